"""Retrieval data in the formats of BEIR and MTEB, and rankings of its documents by vectors.

A directory holds `corpus.jsonl` (`_id` or `id`, `title`, `text`), `queries.jsonl` (`_id` or `id`,
`text`) and `qrels/test.tsv` (query, document, relevance). Each may have another format of rows, in
which the columns of the relevance are `query-id`, `corpus-id` and `score`.

A clone of MTEB's data on the hub has a directory for each of them, such as
`corpus/corpus-00000-of-00002.parquet`, and the relevances in `qrels/`, `default/` or `data/`. A
clone with several languages, and a data set on the hub, have a configuration for each of them:
`corpus`, `queries` and `qrels` or `default`; `de-corpus`, `de-queries` and `de-qrels`; or
`corpus-de`, `queries-de` and `de`.
"""

from __future__ import annotations

import csv
import functools
import io
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from kdcli.data.accounts import ACCOUNTS, RowAccount
from kdcli.data.hub import (
    HubId,
    clone_configs,
    clone_files,
    hub_configs,
    hub_files,
    split_address,
    unknown_config,
)
from kdcli.data.labelled.label_values import number_of
from kdcli.data.labelled.partition import DividedRows, Partition, Pools, text_hashes
from kdcli.data.readers import format_of
from kdcli.data.sources import describe_missing_parts, hub_id, names_by_split, open_source
from kdcli.data.storage import File, NotFound, base_name, folder_hash, open_binary
from kdcli.disk import HASHES, user_path
from kdcli.engine.session import Session
from kdcli.errors import UsageError, one_line
from kdcli.messages import log_fact
from kdcli.metrics.retrieval import rank_documents, ranking_metrics, similarities
from kdcli.targets.precomputed import read_npy
from kdcli.types import Array, RowHashes
from kdcli.workloads.embedder import Embedder
from kdcli.workloads.rankings import ranking_scores
from kdcli.workloads.scores import ModelScores
from kdcli.workloads.settings import VectorFormat

LEVELS = 255
"""Number of steps between the smallest and the largest value of a component in int8."""
RESCORED = 400
"""Number of documents whose binary vectors are compared with the query's own vector."""


class Index:
    """The vectors of documents that another model makes, or that a file holds.

    Attributes:
        source: The model or file.
        width: The number of components of a vector.
    """

    def __init__(self, source: str, width: int, compute: Callable[[], Array]) -> None:
        self.source, self.width = source, width
        self._compute = functools.cache(compute)

    def for_queries_of(self, model: Embedder) -> Array:
        """Return the vectors [N, E] that a model's queries search, cut as the model cuts its own.

        Raises:
            UsageError: The model's vectors have another width than the documents'.
        """
        own = model.format.width(model.model.config.hidden_size)
        if self.width != own:
            raise UsageError(
                f"the documents' vectors of {self.source} have {self.width} numbers, and those of "
                f"{model.source} have {own}",
                "give the documents of a model with the same width, or distil a student with it",
            )
        return model.cut(self._compute())


def open_index(
    source: str,
    documents: Sequence[str],
    pooling: str | None,
    session: Session,
    max_length: int | None = None,
) -> Index:
    """Open a model that encodes documents when they are needed, or a `.npy` file of their vectors.

    Raises:
        UsageError: The model cannot be loaded, or the file does not fit the documents.
    """
    if Path(source).suffix == ".npy":
        vectors_NE = read_npy(user_path(source), len(documents))
        return Index(source, vectors_NE.shape[1], lambda: vectors_NE)
    model = Embedder.open_scored(source, pooling=pooling)
    width = model.format.width(model.model.config.hidden_size)
    return Index(source, width, lambda: model.vectors(documents, "document", session, max_length))


def document_scorer(d_NE: Array, similarity: str, stored: VectorFormat) -> Callable[[Array], Array]:
    """Store documents, and return a function from queries [Q, E] to scores [Q, N].

    * `int8`: each component of the documents has 256 levels between its smallest and its largest
      value. Queries stay in float32.
    * `binary`: the documents keep the signs of their components. The documents with the most signs
      in common with a query come first, and the best `RESCORED` of them are ranked by the product
      of the query's float32 vector and the document's signs.

    A larger score is better.
    """
    if stored == "float32":
        return lambda q_QE: similarities(q_QE, d_NE, similarity)
    if stored == "int8":
        stored_NE = _in_int8(d_NE)
        return lambda q_QE: similarities(q_QE, stored_NE, similarity)
    signs_NE = np.where(d_NE > 0, 1, -1).astype(np.float32)

    def by_signs(q_QE: Array) -> Array:
        common_QN = np.where(q_QE > 0, 1, -1).astype(np.float32) @ signs_NE.T
        scores_QN = similarities(q_QE, signs_NE, similarity)
        order_QN = np.argsort(-common_QN, axis=1, kind="stable")
        place_QN = np.argsort(order_QN, axis=1, kind="stable")
        # Documents that are not rescored stay behind the others, in the order of their signs.
        behind_QN = scores_QN.min() - 1 - place_QN
        return np.asarray(np.where(place_QN < RESCORED, scores_QN, behind_QN))

    return by_signs


def _in_int8(d_NE: Array) -> Array:
    """Round vectors to the levels of their components, and return them in float32."""
    low_E, high_E = d_NE.min(0), d_NE.max(0)
    step_E = np.maximum((high_E - low_E) / LEVELS, 1e-12)
    codes_NE = np.round((d_NE - low_E) / step_E) - 128
    stored_NE = codes_NE.clip(-128, 127).astype(np.int8)
    return np.asarray((stored_NE.astype(np.float32) + 128) * step_E + low_E, dtype=np.float32)


RETRIEVAL = "retrieval"
TEXT_FILES = ("corpus", "queries")
RELEVANCES = ("qrels", "default", "data")
"""Directories of relevances. The last two are the default configuration of a clone of the hub."""
FIRST_SPLITS = ("test", "validation")
"""The splits whose relevances are preferred, in this order."""
FIRST_FORMATS = (".jsonl", ".jsonl.gz", ".tsv")
"""The formats that are read if a file exists in several."""
NAME = re.compile(r"([^.]+?)(?:-\d+-of-\d+(?:-\w+)?)?(\..+)")
"""A file's name: what it holds, perhaps the number of a part, and its ending."""
CONFIG = re.compile(r"(?:(.+)[-._])?(corpus|queries|qrels)(?:[-._](.+))?")
"""A configuration's name: perhaps a language, and a part of the data."""
IDS = ("_id", "id")
JUDGEMENT = ("query-id", "corpus-id", "score")
"""The columns of a relevance."""
TOP = 100
"""Number of documents that are ranked for each query."""
QUERIES_AT_ONCE = 256
"""Number of queries whose similarities are computed at once."""


@dataclass(frozen=True)
class Retrieval(DividedRows):
    """A corpus, queries, and the relevance of documents to each query.

    Attributes:
        documents: id -> text.
        queries: id -> text.
        relevance: query -> document -> relevance. It may name documents that the corpus lacks,
            which no model finds, as in BEIR.
        split: The split of the relevance.
        note: The relevant documents that the corpus lacks; empty if it has them all.
    """

    documents: dict[str, str]
    queries: dict[str, str]
    relevance: dict[str, dict[str, float]]
    split: str = "test"
    note: str = ""

    def notes(self) -> list[str]:
        """Return a note on the relevant documents that the corpus lacks, if there are any."""
        return [self.note] if self.note else []

    def pools(self, trained: RowHashes) -> Pools:
        """Return the hashes of the queries, which are all there for evaluation."""
        return Pools(validation=text_hashes(list(self.queries.values())))

    def training_texts(self, partition: Partition) -> Iterable[str]:
        """Return the different documents. Queries only evaluate."""
        return dict.fromkeys(self.documents.values())

    def part(self, partition: Partition, split: str) -> Retrieval:
        """Return the same corpus with the queries of a part.

        Raises:
            UsageError: There are none.
        """
        hashes = text_hashes(list(self.queries.values()))
        (chosen,) = partition.evaluated_rows([hashes], split, "query")
        return replace(self, queries=dict(itertools.compress(self.queries.items(), chosen)))

    def score(
        self,
        model: Embedder,
        session: Session,
        index: Index | None = None,
        max_length: int | None = None,
    ) -> ModelScores:
        """Rank the corpus for each query by a model's vectors and score the rankings.

        Args:
            model: The model of the queries, and of the documents unless there is an index.
            session: The device.
            index: The vectors of the documents, if another model made them.
            max_length: Maximum number of tokens in a text; None for the model's own maximum.

        Raises:
            UsageError: The model's vectors have another width than the index.
        """
        values = retrieval_scores(self, model, session, index, max_length)
        notes = [model.note] if index is None else [model.note, f"searches {index.source}"]
        return ranking_scores(RETRIEVAL, self.split, values, notes)


def is_retrieval(source: str) -> bool:
    """Return whether a source holds retrieval data."""
    if "://" in source:
        return False
    if _is_folder(source):
        return True
    configs, language = _configs(source)
    return bool(configs) and (language is None or language in configs)


def _is_folder(source: str) -> bool:
    """Return whether a directory has files or directories that are named as in retrieval data."""
    folder = user_path(source)
    has_texts = all((folder / name).is_dir() for name in TEXT_FILES)
    return (folder / "qrels").is_dir() or "qrels" in _by_stem(folder) or has_texts


def relevance_files(source: str) -> dict[str, list[File]]:
    """Return the files of the relevances by split; empty without any.

    A file next to the corpus has the relevances of the test split.

    Raises:
        UsageError: The data have several languages, and the source names none of them.
    """
    folder = user_path(source)
    if not _is_folder(source):
        files = _config_files(source, "qrels")
        if files and not split_address(source)[0].exists() and (named := hub_id(source).split):
            files = {name: of_split for name, of_split in files.items() if name == named}
        return _in_order(files, source)
    next_to_corpus = _by_stem(folder).get("qrels")
    for place in (folder / name for name in RELEVANCES):
        if by_split := _in_order(_by_stem(place), str(place)):
            return by_split
        if next_to_corpus:
            return {"test": next_to_corpus}
    return {}


def _in_order(stems: Mapping[str, list[File]], place: str) -> dict[str, list[File]]:
    """Return the files of each split, the preferred splits first."""
    by_split = names_by_split(stems, place)
    ordered = dict.fromkeys((*FIRST_SPLITS, *by_split))
    return {split: stems[by_split[split][0]] for split in ordered if split in by_split}


def _configs(source: str) -> tuple[dict[str, dict[str, str]], str | None]:
    """Find the configurations of the corpus, the queries and the relevances.

    Returns:
        Language ("" for configurations without one) -> part -> configuration, empty if there are
        none; and the language that the source names, or the only one.
    """
    folder, language = split_address(source)
    try:
        if folder.exists():
            names = list(clone_configs(folder))
        else:
            language = hub_id(source).config
            names = list(hub_configs(_data_set(source)))
    except NotFound:
        return {}, None
    by_language: dict[str, dict[str, str]] = {}
    for name in names:
        if match := CONFIG.fullmatch(name):
            part, language_of_part = match[2], match[1] or match[3] or ""
        else:
            part, language_of_part = "qrels", "" if name == "default" else name
        by_language.setdefault(language_of_part, {})[part] = name
    # Languages may share a corpus.
    shared = by_language.get("", {})
    full = {key: shared | own for key, own in by_language.items() if len(shared | own) == 3}
    if language is None and ("" in full or len(full) == 1):
        language = "" if "" in full else next(iter(full))
    return full, language


def _data_set(source: str) -> HubId:
    """Return a data set of the hub, whatever its configuration, at the commit that the run reads.

    The commit is remembered for the address in the recipe.
    """
    return hub_id(source).at_commit()._replace(config=None, split=None)


def _config_of(source: str, part: str) -> str | None:
    """Return the configuration of the corpus, the queries or the relevances; None without any.

    Raises:
        UsageError: The data have several languages, and the source names none of them.
    """
    configs, language = _configs(source)
    if not configs:
        return None
    if language is None or language not in configs:
        folder, _ = split_address(source)
        address = str(folder) if folder.exists() else hub_id(source).name
        raise unknown_config(address, language, sorted(filter(None, configs)))
    return configs[language][part]


def _config_files(source: str, part: str) -> dict[str, list[File]]:
    """Return the files of the corpus, the queries or the relevances by split.

    Raises:
        UsageError: The data have several languages, and the source names none of them.
    """
    config = _config_of(source, part)
    if config is None:
        return {}
    folder, _ = split_address(source)
    if folder.exists():
        clone = clone_files(folder, config)
        return dict(clone.files) if clone else {}
    return hub_files(_data_set(source)._replace(config=config))


def corpus_address(source: str) -> str:
    """Return the address with which `--data` reads only the documents of retrieval data.

    Raises:
        UsageError: There are no documents or no relevances, or the data have several languages, and
            the source names none of them.
    """
    files = _text_files(source, "corpus", _relevances_of(source, None)[0])
    if isinstance(files[0], Path):
        return str(files[0] if len(files) == 1 else files[0].parent)
    hub, config = hub_id(source), _config_of(source, "corpus")
    # `--data` reads training text, and the documents' split has any name.
    by_split = _config_files(source, "corpus")
    split = next(name for name, of_split in by_split.items() if of_split == files)
    revision = f"@{hub.revision}" if hub.revision else ""
    return f"{hub.name}:{config}:{split}{revision}"


def read_retrieval(source: str, split: str | None = None) -> Retrieval:
    """Read a directory of retrieval data. Queries without a relevant document are dropped.

    Args:
        source: The directory.
        split: The split of the relevances. Without it, or without a validation split, it is the
            test split if there is one.

    Raises:
        UsageError: A file is missing or malformed, an id occurs twice, a relevance is given for an
            unknown query, two relevances contradict each other, a query has no text, no query has a
            relevant document, the corpus has none of the relevant documents, or the split has no
            relevances.
    """
    folder = split_address(source)[0]
    chosen, qrels = _relevances_of(source, split)
    corpus, asked = (_text_files(source, name, chosen) for name in TEXT_FILES)
    read = [*corpus, *asked, *qrels]
    if (missing := describe_missing_parts(map(base_name, read))) is not None:
        raise UsageError(f"{folder}: {missing}", "download the others")
    local = [file for file in read if isinstance(file, Path)]
    log_fact(*filter(None, [_other_formats(local)]))
    if local and (digest := folder_hash(local)) is not None:
        HASHES[source] = digest
    documents, queries = _by_id(corpus), _by_id(asked)
    relevance, absent, unasked = _grades(qrels, queries, documents)
    used = {q: t for q, t in queries.items() if any(g > 0 for g in relevance.get(q, {}).values())}
    if not used and unasked:
        raise UsageError(
            f"{base_name(asked[0])} has no query with a relevant document in {qrels[0]}; it lacks, "
            f"for example, {unasked[0]}",
            "give the queries and the relevances of one data set",
        )
    if not used:
        raise UsageError(f"{qrels[0]} has no query with a relevant document")
    if (blank := next((query for query, text in used.items() if not text), None)) is not None:
        raise UsageError(
            f"query {blank} of {folder} has no text",
            f"add a text, or remove it from {base_name(qrels[0])}",
        )
    if not any(grades.keys() & documents.keys() for grades in relevance.values()):
        raise UsageError(
            f"the corpus has none of the documents in {qrels[0]}, for example {absent[0]}",
            "give the corpus and the relevances of one data set",
        )
    of_documents = RowAccount(source, "documents", len(documents))
    ACCOUNTS.close(of_documents, len(documents))
    of_queries = RowAccount(source, "queries", len(queries))
    if unused := [query for query in queries if query not in used]:
        of_queries.leave_out("without a relevant document", f"query {unused[0]}", len(unused))
    ACCOUNTS.close(of_queries, len(used))
    notes = []
    if absent:
        notes.append(
            f"{len(absent):,} relevant documents are not in the corpus and count as not found, the "
            f"first in {absent[0]}"
        )
    if unasked:
        notes.append(
            f"judged queries that {base_name(asked[0])} lacks, which are left out: "
            f"{len(unasked):,}, the first in {unasked[0]}"
        )
    log_fact(*notes)
    return Retrieval(documents, used, relevance, chosen, "; ".join(notes))


def _relevances_of(source: str, split: str | None) -> tuple[str, list[File]]:
    """Return the split whose relevances are used, and their files."""
    by_split = relevance_files(source) if source else {}
    if not by_split:
        raise UsageError(
            f"no relevances in {source}" if source else "no retrieval data given",
            "give a directory with corpus.jsonl, queries.jsonl and qrels/test.tsv in BEIR's format "
            "(--data, or eval.source for --eval-task); BeIR/NAME on the hub has its relevances in "
            "BeIR/NAME-qrels, whose files belong in qrels/",
        )
    if split not in (None, "validation", *by_split):
        raise UsageError(
            f"{source} has no relevances of the {split} split",
            f"choose one that it has: data.split={', '.join(by_split)}",
        )
    chosen = split if split in by_split else next(iter(by_split))
    if chosen != (split or "test"):
        log_fact(f"{source}: searches with the relevances of its {chosen} split")
    return chosen, by_split[chosen]


def _grades(
    qrels: Sequence[File], queries: Mapping[str, str], documents: Mapping[str, str]
) -> tuple[dict[str, dict[str, float]], list[str], list[str]]:
    """Return the grade of each document by query, and the places of unknown names.

    These are where the corpus lacks a relevant document, and where a query is missing.
    """
    relevance: dict[str, dict[str, float]] = {}
    absent: list[str] = []
    unasked: dict[str, str] = {}
    for where, query, document, grade in itertools.chain.from_iterable(map(_judgements, qrels)):
        if query not in queries:
            unasked.setdefault(query, f"{where}, query {query}")
            continue
        if grade > 0 and document not in documents:
            absent.append(f"{where}, document {document}")
        if relevance.setdefault(query, {}).setdefault(document, grade) != grade:
            raise UsageError(
                f"{where} gives document {document} a second, different relevance for query "
                f"{query}",
                "keep one of the lines",
            )
    return relevance, absent, list(unasked.values())


def retrieval_scores(
    data: Retrieval,
    model: Embedder,
    session: Session,
    index: Index | None,
    max_length: int | None = None,
) -> dict[str, Array]:
    """Rank the corpus for every query and score the rankings, metric -> values [Q]."""
    documents, queries = list(data.documents), list(data.queries)
    if index is None:
        d_ND = model.vectors(list(data.documents.values()), "document", session, max_length)
    else:
        d_ND = index.for_queries_of(model)
    q_QD = model.vectors(list(data.queries.values()), "query", session, max_length)
    score = document_scorer(d_ND, model.format.similarity, model.stored)
    rankings: list[list[str]] = []
    for begin in range(0, len(queries), QUERIES_AT_ONCE):
        end = begin + QUERIES_AT_ONCE
        scores_QN = score(q_QD[begin:end])
        rankings += rank_documents(scores_QN, queries[begin:end], documents, data.relevance, TOP)
    rows = [ranking_metrics(r, data.relevance[q]) for q, r in zip(queries, rankings, strict=True)]
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}


def _by_stem(folder: Path) -> dict[str, list[File]]:
    """Return the files of rows in a folder by their names without an ending and a part's number.

    Of a file that exists in several formats, one is returned.
    """
    return {
        stem: min(by_ending.items(), key=lambda item: item[0] not in FIRST_FORMATS)[1]
        for stem, by_ending in _formats(folder).items()
    }


def _formats(folder: Path) -> dict[str, dict[str, list[File]]]:
    """Return the files of rows in a folder, stem -> ending -> files."""
    endings: dict[str, dict[str, list[File]]] = {}
    for file in sorted(folder.glob("*.*")):
        if format_of(file.name) and (parts := NAME.fullmatch(file.name)):
            endings.setdefault(parts[1], {}).setdefault(parts[2], []).append(file)
    return endings


def _other_formats(read: Sequence[Path]) -> str:
    """Return a message about files that may hold what other files hold in another format."""
    others: list[str] = []
    for folder in dict.fromkeys(file.parent for file in read):
        for by_ending in _formats(folder).values():
            files = list(itertools.chain.from_iterable(by_ending.values()))
            unread = [base_name(file) for file in files if file not in read]
            others += unread if len(unread) < len(files) else []
    if not others:
        return ""
    verb = "were" if len(read) > 1 else "was"
    return f"skipped {', '.join(others)}, because {', '.join(f.name for f in read)} {verb} read"


def _text_files(source: str, name: str, split: str) -> list[File]:
    """Return the files of the corpus or the queries, which may have a directory.

    In a directory, they are named after the split, or after what they hold, or there is one name.

    Raises:
        UsageError: There are none.
    """
    folder = user_path(source)
    if _is_folder(source):
        in_folder, inside = _by_stem(folder), _by_stem(folder / name)
        if name in in_folder:
            return in_folder[name]
    else:
        inside = _config_files(source, name)
    of_split = names_by_split(inside, str(folder / name)).get(split, [])
    only = inside if len(inside) == 1 else []
    for stem in (*of_split, name, *only):
        if stem in inside:
            return inside[stem]
    other = f"; {name}/ has {', '.join(inside)}" if inside else ""
    raise UsageError(f"{folder} has no {name}.jsonl{other}")


def _judgements(file: File) -> Iterator[tuple[str, str, str, float]]:
    """Yield the place, query, document and grade of each relevance.

    A .tsv file may lack the names of its columns. Its first line has them if it does not end in a
    number.

    Raises:
        UsageError: A row has no query, document or whole number.
    """
    rows: Iterable[tuple[str, Sequence[object]]]
    is_tsv = base_name(file).endswith(".tsv")
    if is_tsv:
        try:
            with open_binary(file) as content:
                lines = io.TextIOWrapper(content, encoding="utf-8-sig", newline="")
                table = list(csv.reader(lines, delimiter="\t", strict=True))
        except (csv.Error, UnicodeDecodeError) as error:
            hint = "save it as UTF-8, with a query, a document and a relevance on each line"
            raise UsageError(f"{file} cannot be read: {one_line(error)}", hint) from None
        is_header = bool(table and table[0]) and number_of(table[0][-1]) is None
        if is_header and tuple(table[0]) != JUDGEMENT:
            if sorted(table[0]) == sorted(JUDGEMENT):
                raise UsageError(
                    f"{file}:1: the columns must be {', '.join(JUDGEMENT)}, in this order, got "
                    f"{', '.join(table[0])}",
                    "write the columns in this order",
                )
            log_fact(f"{file}:1 is read as the names of the columns: {', '.join(table[0])}")
        rows = [(f"{file}:{n}", row) for n, row in enumerate(table, 1)][is_header:]
    else:
        tables = open_source(str(file)).tables("train")
        rows = ((where, [row.get(c) for c in JUDGEMENT]) for _, t in tables for where, row in t)
    for where, row in rows:
        ids = list(map(_id_of, row[:-1]))
        if len(ids) != 2 or not ids[0] or not ids[1]:
            form = "separated by tabs" if is_tsv else f"in {', '.join(JUDGEMENT)}"
            raise UsageError(
                f"{where} must have query, document and relevance, {form}",
                "give each judgement a row with these 3 values; of TREC's 4 columns, remove the "
                "second",
            )
        if (grade := _grade(row[-1])) is None:
            raise UsageError(
                f"{where}: the relevance must be a whole number, got {row[-1]!r}",
                "write 0 for a document that is not relevant, and 1 or more for a relevant one",
            )
        yield where, ids[0], ids[1], grade


def _grade(value: object) -> float | None:
    """Return a relevance, which is a whole number; None for anything else."""
    number = number_of(str(value))
    return float(number) if number is not None and float(number).is_integer() else None


def _id_of(value: object) -> str | None:
    """Return an id, which may be a whole number in the file; None for anything else."""
    is_id = isinstance(value, str | int) and not isinstance(value, bool)
    return str(value) if is_id else None


def _by_id(files: Sequence[File]) -> dict[str, str]:
    """Read the texts of files, id -> text."""
    texts: dict[str, str] = {}
    tables = itertools.chain.from_iterable(open_source(str(f)).tables("train") for f in files)
    for where, row in itertools.chain.from_iterable(table.rows for table in tables):
        doc_id = _id_of(next((row[column] for column in IDS if column in row), None))
        text, title = row.get("text"), row.get("title") or ""
        if doc_id is None or not isinstance(text, str) or not isinstance(title, str):
            raise UsageError(
                f"{where}: must have '_id' and the string 'text'; it has {', '.join(row)}"
            )
        if doc_id in texts:
            raise UsageError(f"{where}: _id {doc_id} occurs twice")
        texts[doc_id] = f"{title} {text}".strip()
    if not texts:
        raise UsageError(f"{files[0]} is empty")
    return texts
