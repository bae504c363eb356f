"""Data sets on which embedding models are scored without fine-tuning."""

import itertools
import json
from types import SimpleNamespace

import fsspec
import numpy as np
import pytest
import torch
from datasets import Dataset
from encoders import on_disk, tiny_encoder
from hub_server import hub  # noqa: F401
from reading import logged_to
from scipy.stats import spearmanr
from sentence_transformers import SentenceTransformer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, f1_score

import kdcli
from kdcli.data.text.sentences import read_texts
from kdcli.errors import UsageError
from kdcli.models.embedding_format import EmbeddingFormat, save_embedder
from kdcli.models.load import load_encoder
from kdcli.workloads.beir import (
    corpus_address,
    is_retrieval,
    read_retrieval,
    relevance_files,
)
from kdcli.workloads.detect import known_task
from kdcli.workloads.embedder import Embedder
from kdcli.workloads.embeddings import open_evaluation
from kdcli.workloads.eval_sets import open_eval_sets, open_labelled_set
from kdcli.workloads.requests import EvaluationRequest
from kdcli.workloads.settings import DownstreamSettings, LabelledSettings

ROWS = []
for n in range(25):
    words = [f"w{(n * 7 + i) % 41}" for i in range(6)]
    other = [f"w{(n * 5 + i + 17) % 41}" for i in range(6)]
    pair = words[: n % 4] + other[n % 4 :]
    ROWS.append({"text": " ".join(words), "pair": " ".join(pair), "label": n % 5 + 0.5})
COLUMNS = {"text": "text", "pair": "pair", "label": "label"}


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def pairs(tmp_path):
    write(tmp_path / "data" / "own" / "validation.jsonl", ROWS)
    return tmp_path / "data" / "own"


@pytest.fixture
def model(tmp_path):
    """An embedding model that reads 4 tokens of a text."""
    torch.manual_seed(0)
    base = load_encoder(
        str(on_disk(tiny_encoder("bert", initializer_range=0.3), tmp_path / "base"))
    )
    save_embedder(base.model, base.tokenizer, EmbeddingFormat(max_length=4), tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize(
    ("max_length", "note"),
    [(None, "100.0% of the texts were cut at 4 tokens"), (16, "no text was cut")],
)
def test_texts_are_cut_as_the_note_says(pairs, model, session, max_length, note):
    settings = LabelledSettings(source=str(pairs), columns=COLUMNS, max_length=max_length)
    scores = open_labelled_set("own", settings, {}, session).score(Embedder.open(str(model)))
    theirs = SentenceTransformer(str(model), device="cpu")
    theirs.max_seq_length = max_length or 4
    first, second = (theirs.encode([row[side] for row in ROWS]) for side in ("text", "pair"))
    cosines = (first.astype(np.float64) * second).sum(1)
    wanted = spearmanr(cosines, [row["label"] for row in ROWS]).statistic
    assert scores.evaluations[0].metrics["spearman"] == pytest.approx(wanted, abs=1e-6)
    assert scores.notes[0].endswith(note)


def test_searches_cut_texts_at_data_max_length(model, tmp_path, session):
    """The scores are those of a model that reads so many tokens itself."""
    folder = tmp_path / "search"
    texts = [f"w1 w2 w3 w4 w{n} w{n + 9} w{2 * n}" for n in range(12)]
    write(folder / "corpus.jsonl", [{"_id": f"d{n}", "text": t} for n, t in enumerate(texts)])
    write(folder / "queries.jsonl", [{"_id": f"q{n}", "text": t} for n, t in enumerate(texts)])
    (folder / "qrels.tsv").write_text("".join(f"q{n}\td{n}\t1\n" for n in range(12)))
    base = load_encoder(str(model))
    save_embedder(base.model, base.tokenizer, EmbeddingFormat(max_length=16), tmp_path / "longer")

    def metrics(source, max_length):
        data = LabelledSettings(source=str(folder), max_length=max_length)
        workload = open_evaluation(EvaluationRequest("retrieval", [str(source)], data), session)
        assert any("data.max_length" in note for note in workload.notes) == bool(max_length)
        return workload.score(Embedder.open(str(source))).evaluations[0].metrics

    assert metrics(model, 16) == metrics(tmp_path / "longer", None)
    assert metrics(model, None) != metrics(model, 16)


def test_judgements_of_unknown_documents_and_queries(model, tmp_path, session):
    """As in BEIR, whose ArguAna has such documents. A query without a text is not searched."""
    folder = tmp_path / "search"
    write(folder / "corpus.jsonl", [{"_id": f"d{n}", "text": f"w{n} w2"} for n in range(9)])
    write(folder / "queries.jsonl", [{"_id": "d1", "text": "w1 w2"}, {"_id": "q", "text": "w1 w2"}])
    qrels = folder / "qrels.tsv"
    qrels.write_text("q\td1\t1\nq\tlost\t1\nq\tother\t0\nd1\tgone\t1\nz\td1\t1\nz\td2\t1\n")
    data = LabelledSettings(source=str(folder))
    workload = open_evaluation(EvaluationRequest("retrieval", [str(model)], data), session)
    assert workload.notes == [
        "2 queries, 9 documents",
        "2 relevant documents are not in the corpus and count as not found, the first in "
        f"{qrels}:2, document lost; judged queries that queries.jsonl lacks, which are left out: "
        f"1, the first in {qrels}:5, query z",
    ]
    metrics = workload.score(Embedder.open(str(model))).evaluations[0].metrics
    # The first query's best document is the identical text, and the second query finds nothing.
    ndcg = 1 / (1 + 1 / np.log2(3))
    wanted = {"ndcg@10": ndcg / 2, "mrr@10": 0.5, "recall@10": 0.25, "recall@100": 0.25}
    assert metrics == pytest.approx(wanted)
    for line, message in {
        "q\tlost\t1": "the corpus has none of the documents in",
        "z\td1\t1": "queries.jsonl has no query with a relevant document in .* lacks, for example",
    }.items():
        qrels.write_text(line)
        with pytest.raises(UsageError, match=message):
            open_evaluation(EvaluationRequest("retrieval", [str(model)], data), session)


def test_each_of_several_tasks_has_its_folder(pairs, session):
    folder = pairs.parent / "retrieval"
    write(folder / "corpus.jsonl", [{"_id": f"d{n}", "text": f"w{n}"} for n in range(9)])
    write(folder / "queries.jsonl", [{"_id": "q", "text": "w1"}])
    (folder / "qrels.tsv").write_text("q\td1\t1\n")
    overrides = {"data": {"columns": COLUMNS}}
    settings = DownstreamSettings(
        tasks=["own", "retrieval"], source=str(pairs.parent), overrides=overrides
    )
    own, retrieval = open_eval_sets(settings, {}, session)
    assert (own.row_count, retrieval.row_count) == (25, 1)
    folder.rename(pairs.parent / "other")
    with pytest.raises(UsageError, match="no folder retrieval/ for the task retrieval"):
        open_eval_sets(settings, {}, session)


def test_texts_with_classes_have_the_scores_of_mteb(model, tmp_path, session):
    """Also if the training rows are sorted by class, and some of them are evaluated again."""
    mteb_classes = pytest.importorskip("mteb.abstasks.classification").AbsTaskClassification
    names = ["c", "a", "b"]
    rows = [
        {"text": f"w{7 * n % 41} w{n % 3} w{n % 5}", "label": names[n % 3], "n": n}
        for n in range(90)
    ]
    train = sorted(rows[:60], key=lambda row: row["label"])
    write(tmp_path / "classes" / "train.jsonl", train)
    write(tmp_path / "classes" / "test.jsonl", [*rows[60:], *rows[:5]])
    source = str(tmp_path / "classes")
    settings = LabelledSettings(source=source, split="test", columns={"text": "text"})
    opened = open_labelled_set("own", settings, {}, session, samples_per_label=4)
    metrics = opened.score(Embedder.open(str(model))).evaluations[0].metrics

    library = SimpleNamespace(seed=42, samples_per_label=4, label_column_name="label")
    encode = SentenceTransformer(str(model), device="cpu").encode
    data = {
        split: Dataset.from_list([{**row, "label": names.index(row["label"])} for row in of_split])
        for split, of_split in (("train", train), ("test", [*rows[60:], *rows[:5]]))
    }
    wanted, order = [], None
    for number in range(10):
        chosen, order, _ = mteb_classes._undersample_data(library, data["train"], number, order)
        regression = LogisticRegression(max_iter=100, random_state=42)
        regression.fit(encode(chosen["text"]), chosen["label"])
        predicted = regression.predict(encode(data["test"]["text"]))
        truth = data["test"]["label"]
        wanted.append(
            [accuracy_score(truth, predicted), f1_score(truth, predicted, average="macro")]
        )
    assert list(metrics.values()) == pytest.approx(np.mean(wanted, axis=0))
    assert opened.row_count == 35
    assert min(metrics.values()) > 0.4


def test_whole_numbers_in_a_column_called_score_are_numbers(model, tmp_path, session):
    rows = [
        {"sentence1": row["text"], "sentence2": row["pair"], "score": n % 3}
        for n, row in enumerate(ROWS)
    ]
    write(tmp_path / "whole" / "test.jsonl", rows)
    settings = LabelledSettings(source=str(tmp_path / "whole"), split="test")
    opened = open_labelled_set("own", settings, {}, session)
    theirs = SentenceTransformer(str(model), device="cpu")
    first, second = (
        theirs.encode([row[side] for row in rows]).astype(np.float64)
        for side in ("sentence1", "sentence2")
    )
    wanted = spearmanr((first * second).sum(1), [row["score"] for row in rows]).statistic
    metrics = opened.score(Embedder.open(str(model))).evaluations[0].metrics
    assert metrics["spearman"] == pytest.approx(wanted, abs=1e-6)


def test_pairs_that_are_sorted_by_score_are_pairs_with_a_score(model, tmp_path):
    rows = [{"sentence1": f"w{n}", "sentence2": f"w{n + 1}", "score": n // 150} for n in range(450)]
    write(tmp_path / "pairs.jsonl", rows)
    assert known_task(str(model), str(tmp_path / "pairs.jsonl")) == "own"
    # A bad row is reported when the pairs are read.
    with (tmp_path / "pairs.jsonl").open("a", encoding="utf-8") as file:
        file.write("no row\n")
    assert known_task(str(model), str(tmp_path / "pairs.jsonl")) == "own"


def test_rows_that_cannot_be_scored_are_not_all_read(model):
    files = fsspec.filesystem("memory")
    files.pipe("/unscored.jsonl", b'{"text": "w1", "topic": "news"}\n' * 100_000)
    assert known_task(str(model), "memory://unscored.jsonl") == "embedding"
    assert 0 < files.store["/unscored.jsonl"].tell() < 1_000_000


@pytest.mark.parametrize(
    "content", [b"q\xe9\td1\t1\n", b'q\t"d1\t1\n', b"q\t" + b"d" * (1 << 26) + b"\t1\n"]
)
def test_relevances_that_cannot_be_read_are_named(tmp_path, content):
    write(tmp_path / "corpus.jsonl", [{"_id": "d1", "text": "w1"}])
    write(tmp_path / "queries.jsonl", [{"_id": "q", "text": "w1"}])
    (tmp_path / "qrels.tsv").write_bytes(b"q\td1\t1\n" + content)
    with pytest.raises(UsageError, match=r"qrels\.tsv cannot be read: "):
        read_retrieval(str(tmp_path))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("q\td1\t0.5\nq\td1\t1\n", ":1: the relevance must be a whole number, got '0.5'"),
        ("q\td1\t1\nq\td1\tyes\n", ":2: the relevance must be a whole number, got 'yes'"),
        ("corpus-id\tquery-id\tscore\nd1\tq\t1\n", ":1: the columns must be query-id, corpus-id"),
        ("q\t0\td1\t1\n", ":1 must have query, document and relevance, separated by tabs"),
    ],
)
def test_a_line_of_relevances_that_is_no_judgement_is_refused(tmp_path, lines, message):
    write(tmp_path / "corpus.jsonl", [{"_id": "d1", "text": "w1"}])
    write(tmp_path / "queries.jsonl", [{"_id": "q", "text": "w1"}])
    (tmp_path / "qrels.tsv").write_text(lines)
    with pytest.raises(UsageError) as caught:
        read_retrieval(str(tmp_path))
    assert caught.value.message.startswith(f"{tmp_path / 'qrels.tsv'}{message}")


def test_a_line_of_names_and_files_of_other_formats_are_logged(tmp_path):
    rows = {"corpus": [{"_id": "d1", "text": "w1"}], "queries": [{"_id": "q", "text": "w1"}]}
    for name, of_file in rows.items():
        write(tmp_path / f"{name}.jsonl", of_file)
        Dataset.from_list(of_file).to_parquet(tmp_path / f"{name}.parquet")
    (tmp_path / "qrels.tsv").write_text("query\tdocument\tgrade\nq\td1\t1\n")
    lines: list[str] = []
    with logged_to(lines):
        read_retrieval(str(tmp_path))
    file = tmp_path / "qrels.tsv"
    assert f"{file}:1 is read as the names of the columns: query, document, grade" in lines
    read = "corpus.jsonl, queries.jsonl, qrels.tsv"
    assert f"skipped corpus.parquet, queries.parquet, because {read} were read" in lines


HUB_FORMS = {
    "parts": ("corpus/corpus", "queries/queries", "data/test"),
    "pushed": ("corpus/train", "queries/train", "default/test"),
    "splits": ("corpus/test", "queries/test", "qrels/test"),
}
"""The directories of corpus, queries and relevances in clones of the hub."""


def test_retrieval_data_may_have_the_forms_of_mteb(model, tmp_path, session):
    """Ids that are numbers, relevance as floats, other formats than TSV, and clones of the hub."""
    texts = [f"w1 w2 w3 w4 w{n} w{n + 9} w{2 * n}" for n in range(12)]
    judged = [{"query-id": n, "corpus-id": n, "score": 1.0} for n in range(12)]
    rows = [{"id": n, "text": text} for n, text in enumerate(texts)]

    def metrics(folder):
        data = LabelledSettings(source=str(folder))
        workload = open_evaluation(EvaluationRequest("retrieval", [str(model)], data), session)
        return workload.score(Embedder.open(str(model))).evaluations[0].metrics

    for form in ("tsv", "jsonl", "parquet"):
        (tmp_path / form / "qrels").mkdir(parents=True)
    named = [{"_id": str(n), "text": text} for n, text in enumerate(texts)]
    lines = ["query-id\tcorpus-id\tscore", *(f"{n}\t{n}\t1.0" for n in range(12))]
    (tmp_path / "tsv" / "qrels" / "test.tsv").write_text("\n".join(lines) + "\n")
    write(tmp_path / "jsonl" / "qrels" / "test.jsonl", judged)
    Dataset.from_list(judged).to_parquet(tmp_path / "parquet" / "qrels" / "test.parquet")
    for name in ("corpus", "queries"):
        write(tmp_path / "tsv" / f"{name}.jsonl", named)
        write(tmp_path / "jsonl" / f"{name}.jsonl", rows)
        Dataset.from_list(rows).to_parquet(tmp_path / "parquet" / f"{name}.parquet")
    for form, stems in HUB_FORMS.items():
        for stem, of_file in zip(stems, (rows, rows, judged), strict=True):
            (tmp_path / form / stem).parent.mkdir(parents=True)
            for part in range(2):
                file = tmp_path / form / f"{stem}-{part:05}-of-00002.parquet"
                Dataset.from_list(of_file[part::2]).to_parquet(file)
        assert is_retrieval(str(tmp_path / form))
    found = {form: metrics(tmp_path / form) for form in ("tsv", "jsonl", "parquet", *HUB_FORMS)}
    assert 0.1 < found["tsv"]["ndcg@10"] < 1
    assert found["tsv"] == found["jsonl"] == found["parquet"]
    # The documents have another order there, which decides between equal ones.
    for form in HUB_FORMS:
        assert found[form]["recall@10"] == found["tsv"]["recall@10"]
    (tmp_path / "parts" / "corpus" / "corpus-00001-of-00002.parquet").unlink()
    with pytest.raises(UsageError, match=r"parts: 1 of 2 files are missing"):
        metrics(tmp_path / "parts")


def put_searches(folder, names, languages=("",)):
    """Write a clone of retrieval data with a configuration for each part and language."""
    rows = {
        "corpus": [{"_id": str(n), "text": f"w{n} w{n + 1}"} for n in range(9)],
        "queries": [{"_id": str(n), "text": f"w{n}"} for n in range(9)],
        "qrels": [{"query-id": str(n), "corpus-id": str(n), "score": 1} for n in range(4)],
    }
    configs = []
    for language, part in itertools.product(languages, rows):
        name = names.format(part=part, language=language)
        if part == "qrels" and names != "{language}-{part}":
            name = language or "default"
        write(folder / "rows" / f"{name}.jsonl", rows[part][language == "en" :])
        files = [{"split": "validation", "path": f"rows/{name}.jsonl"}]
        configs.append({"config_name": name, "data_files": files})
    (folder / "README.md").write_text(f"---\nconfigs: {json.dumps(configs)}\n---\n")


@pytest.mark.parametrize("names", ["{part}", "{language}-{part}", "{part}-{language}"])
def test_retrieval_data_may_have_configurations(model, tmp_path, session, hub, names):  # noqa: F811
    """Each part of the data is a configuration, perhaps of a language."""
    folder = tmp_path / "clone"
    languages = ("de", "en") if "language" in names else ("",)
    put_searches(folder, names, languages)
    hub.add("someone/searches", folder)

    def scored(source):
        data = LabelledSettings(source=source)
        workload = open_evaluation(EvaluationRequest("retrieval", [str(model)], data), session)
        (evaluation,) = workload.score(Embedder.open(str(model))).evaluations
        return evaluation.split, evaluation.n, evaluation.metrics

    address = ":en" if languages[0] else ""
    with hub.known(tmp_path / "hf"):
        found = [scored(f"{where}{address}") for where in (folder, "someone/searches")]
        assert found[0] == found[1]
        assert found[0][:2] == ("validation", 3 if languages[0] else 4)
        for where in (str(folder), "someone/searches"):
            assert is_retrieval(where)
            if languages[0]:
                with pytest.raises(UsageError, match="has the configurations de, en, no default"):
                    scored(where)
            with pytest.raises(UsageError, match="no relevances in someone/searches"):
                scored(f"someone/searches{address or ':'}:test")
            corpus = read_texts(
                corpus_address(f"{where}{address}"), column="text", unit="document", rows=None
            )
            assert len(corpus) == (8 if languages[0] else 9)
            # The rows of one part are texts.
            assert not is_retrieval(f"{where}:{names.format(part='corpus', language='de')}")


@pytest.mark.parametrize("language", ["", ":en"])
def test_a_recipe_pins_the_retrieval_data_of_the_hub(model, tmp_path, hub, language):  # noqa: F811
    names = "{language}-{part}" if language else "{part}"
    put_searches(tmp_path / "clone", names, ("de", "en") if language else ("",))
    hub.add("someone/searches", tmp_path / "clone")
    source = f"someone/searches{language}"
    with hub.known(tmp_path / "hf"):

        def evaluated(out, data):
            options = {"task": "retrieval", "output_dir": tmp_path / out}
            report = kdcli.evaluate(str(model), data=data, **options).report
            return report.recipe["data"]["source"], report.data_versions

        pinned = f"{source}@{'a' * 40}"
        versions = {source: f"commit {'a' * 40}"}
        # The second run reads what the process already knows.
        assert evaluated("first", source) == evaluated("again", source) == (source, versions)
        hub.add("someone/searches", tmp_path / "clone")
        assert evaluated("later", source) == (source, {source: f"commit {'b' * 40}"})
        for run, commit in (("first", "a"), ("later", "b")):
            text = (tmp_path / run / "recipe.yaml").read_text()
            assert f"source: {source}@{commit * 40}" in text
        hub.asked.clear()
        evaluated("pinned", pinned)
        files = [path for _, path in hub.asked if "/resolve/" in path and "rows/" in path]
        assert files
        assert all("a" * 40 in path for path in files)


def test_relevances_of_another_split_are_read(model, tmp_path, session):
    folder = tmp_path / "retrieval"
    for name in ("corpus", "queries"):
        write(folder / f"{name}.jsonl", [{"_id": str(n), "text": f"w{n}"} for n in range(4)])
    (folder / "qrels").mkdir()
    (folder / "qrels" / "dev.tsv").write_text("0\t0\t1\n1\t1\t1\n")
    (folder / "qrels" / "train.tsv").write_text("2\t2\t1\n")

    def opened(**settings):
        data = LabelledSettings(source=str(folder), **settings)
        request = EvaluationRequest("retrieval", [str(model)], data)
        (evaluation,) = (
            open_evaluation(request, session).score(Embedder.open(str(model))).evaluations
        )
        return evaluation.split, evaluation.n

    assert opened() == ("validation", 2)
    with pytest.raises(UsageError, match="no relevances of the test split") as refused:
        opened(split="test")
    assert refused.value.hint == "choose one that it has: data.split=validation, train"
    (folder / "qrels" / "test.tsv").write_text("3\t3\t1\n")
    assert opened(split="validation") == ("validation", 2)
    assert opened(split="test") == ("test", 1)
    result = kdcli.evaluate(model, data=folder, output_dir=tmp_path / "out")
    assert [each.split for each in result.report.evaluations] == ["test"]
    # Without a choice, every verb takes the test split.
    assert opened() == ("test", 1)
    (folder / "qrels" / "dev.tsv").unlink()
    assert opened() == ("test", 1)


def test_relevances_beside_the_corpus_come_before_other_folders(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.tsv").write_text("0\t0\t1\n")
    (tmp_path / "qrels.tsv").write_text("1\t1\t1\n")
    assert relevance_files(str(tmp_path)) == {"test": [tmp_path / "qrels.tsv"]}
    (tmp_path / "qrels").mkdir()
    (tmp_path / "qrels" / "dev.tsv").write_text("2\t2\t1\n")
    assert list(relevance_files(str(tmp_path))) == ["validation"]
