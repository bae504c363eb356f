"""Compare an exported file with torch: its outputs on texts, and its scores."""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kdcli.data.demo import demo_sentences
from kdcli.data.labelled.lists import ListSplits
from kdcli.data.labelled.partition import Partition, text_hashes
from kdcli.data.labelled.splits import Splits
from kdcli.deploy.export import GRAPH_OUTPUTS, ModelFile, without_padding
from kdcli.deploy.exported import EMBEDDING_KIND
from kdcli.deploy.runners import Runner, file_runner
from kdcli.errors import UsageError
from kdcli.messages import log
from kdcli.metrics.finite import check_finite
from kdcli.metrics.resolution import points_per_row
from kdcli.models.model import Model
from kdcli.models.shape import positions_of
from kdcli.report.schema import Comparison
from kdcli.report.text import short
from kdcli.run.context import cpu_session
from kdcli.types import Array, Batch, Example, Kind, task_title
from kdcli.verbs.export.facts import FileComparison, FileScores
from kdcli.workloads import open_rows
from kdcli.workloads.embedder import Embedder, cosines
from kdcli.workloads.mteb_tasks import PREFIX
from kdcli.workloads.requests import EvaluationRequest
from kdcli.workloads.scores import ModelScores
from kdcli.workloads.workload import Workload

CALIBRATION_TEXTS = 256
"""Maximum number of texts on which integers are chosen."""
MIN_CALIBRATION_TEXTS = 16
"""With fewer texts of the user's data, integers are chosen on the texts of the package."""
MIN_TRAINING_TEXTS = 1000
"""Minimum number of texts on which integers are trained."""
MAX_UNKNOWN = 0.3
"""Maximum share of unknown tokens in texts that a tokenizer can read."""

TextRow = tuple[str, ...]
"""A text, or a pair of texts."""


@dataclass(frozen=True)
class CheckTexts:
    """The texts of an export. No text is in both lists, not even in other case or spacing.

    Attributes:
        compared: Texts on which each file is compared with torch.
        compared_from: Describes these texts.
        calibration: Rows on which integers are chosen.
        calibration_from: Describes these rows.
        from_package: Whether the calibration rows are not the user's.
    """

    compared: Sequence[str]
    compared_from: str
    calibration: Sequence[TextRow]
    calibration_from: str
    from_package: bool = False


@dataclass(frozen=True)
class TrainingRows:
    """Rows on which integers are trained.

    Attributes:
        rows: The rows.
        padded: Tokenises rows into a padded batch.
    """

    rows: Sequence[TextRow]
    padded: Callable[[Sequence[TextRow]], Batch]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The number of characters of each row, which orders rows by their number of tokens."""
        return np.array([sum(map(len, row)) for row in self.rows])

    def batch(self, indices: Array) -> Batch:
        """Return the batch of some rows."""
        return self.padded([self.rows[n] for n in indices])


def texts_of_package(tokenizer: PreTrainedTokenizerBase, most_compared: int) -> CheckTexts:
    """Return sentences that come with kdcli, or words that the tokenizer knows."""
    file = Path(__file__).with_name("sentences.txt")
    blocks = file.read_text("utf-8").split("\n\n")
    calibration, compared = (block.splitlines() for block in blocks)
    demo = list(itertools.islice(demo_sentences("validation"), CALIBRATION_TEXTS + most_compared))
    unknown, tokens = _tokens_per_word(calibration, tokenizer)
    if 2 * _tokens_per_word(demo, tokenizer)[1] < tokens:
        return replace(divide(demo, most_compared, "sentences of 'demo'"), from_package=True)
    if unknown > MAX_UNKNOWN:
        words = _random_words(tokenizer, CALIBRATION_TEXTS + most_compared)
        texts = divide(words, most_compared, "texts of random words that the tokenizer knows")
        return replace(texts, from_package=True)
    rows = [(text,) for text in calibration]
    origin = "sentences that come with kdcli"
    return CheckTexts(compared[:most_compared], origin, rows, origin, from_package=True)


def _tokens_per_word(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerBase
) -> tuple[float, float]:
    """Return the share of unknown tokens, and the number of tokens per word."""
    ids = [n for text in texts for n in tokenizer.encode(text, add_special_tokens=False)]
    words = sum(len(text.split()) for text in texts)
    return ids.count(tokenizer.unk_token_id) / max(1, len(ids)), len(ids) / words


def _random_words(tokenizer: PreTrainedTokenizerBase, count: int) -> list[str]:
    """Return texts of random tokens, for a tokenizer of no natural language."""
    rng = np.random.default_rng(0)
    ids = np.setdiff1d(np.arange(len(tokenizer)), tokenizer.all_special_ids)
    lengths = rng.integers(4, 24, count)
    return [str(tokenizer.decode(rng.choice(ids, length).tolist())) for length in lengths]


def divide(
    texts: Iterable[str],
    most_compared: int,
    origin: str,
    most_calibration: int = CALIBRATION_TEXTS,
) -> CheckTexts:
    """Divide different texts into texts to compare and texts for calibration.

    If there are few texts, both parts get half of them.

    Raises:
        UsageError: There are no texts.
    """
    different: dict[int, str] = {}
    for text in texts:
        different.setdefault(_hash(text), text)
        if len(different) == most_compared + most_calibration:
            break
    read = list(different.values())
    if not read:
        raise UsageError("--data has no text to compare the file on", "give texts with words")
    count = min(most_compared, -(-len(read) // 2))
    return CheckTexts(read[:count], origin, [(text,) for text in read[count:]], origin)


def _hash(text: str) -> int:
    """Return a hash that does not depend on case and spacing."""
    return int(text_hashes([text])[0])


def texts_of_task(request: EvaluationRequest, evaluated: Sequence[str]) -> CheckTexts:
    """Return the evaluated texts, and training rows of the same data for calibration."""
    rows = list(dict.fromkeys(_training_rows(request)))
    source = short(request.data.source) if request.data.source else request.task
    return CheckTexts(
        evaluated,
        f"evaluated texts of {source}",
        _without(evaluated, rows),
        f"training rows of {source}",
    )


def _without(evaluated: Sequence[str], rows: Sequence[TextRow]) -> list[TextRow]:
    """Return the rows that share no text with the evaluated ones.

    An evaluated text may be one text of a row, or all of its texts together.
    """
    known = set(text_hashes(evaluated).tolist())
    return [row for row in rows if known.isdisjoint(map(_hash, (" ".join(row), *row)))]


def _training_rows(request: EvaluationRequest) -> list[TextRow]:
    """Return the texts of the training rows; none if the data has no training rows."""
    if request.task.startswith(PREFIX):
        return []
    partition = Partition(np.empty(0, np.uint64), np.empty(0, np.uint64))
    if request.data.partition is not None:
        partition = Partition.read(request.data.partition)
    try:
        rows = open_rows(request, cpu_session())
    except UsageError as error:
        log(f"the training rows cannot be read: {error.message}")
        return []
    if isinstance(rows, ListSplits):
        kept = np.flatnonzero(partition.is_training(rows.train.query_hashes))
        return [example.texts for example in rows.train.take(kept).examples]
    if isinstance(rows, Splits):
        is_words = rows.task.kind == "tokens"
        return [_row(example, is_words) for example in rows.training(partition)]
    return [(text,) for text in rows.training_texts(partition)]


def _row(example: Example, is_words: bool) -> TextRow:
    return (" ".join(example.texts),) if is_words else example.texts


def with_calibration(texts: CheckTexts, tokenizer: PreTrainedTokenizerBase) -> CheckTexts:
    """Take the package's texts for calibration if the data has too few of them."""
    if len(texts.calibration) >= MIN_CALIBRATION_TEXTS:
        return texts
    package = texts_of_package(tokenizer, 1)
    calibration = _without(texts.compared, package.calibration)
    if not calibration:
        raise UsageError(
            "no text is left for calibration: the file is compared on all texts of kdcli",
            "give other texts with --data",
        )
    few = f"{len(texts.calibration)} {texts.calibration_from} are fewer than"
    return replace(
        package,
        compared=texts.compared,
        compared_from=texts.compared_from,
        calibration=calibration,
        calibration_from=f"{package.calibration_from} ({few} {MIN_CALIBRATION_TEXTS})",
    )


def check_can_train(texts: CheckTexts, most: int) -> None:
    """Raise a UsageError if there are too few texts to train integers on `most` of them."""
    count, needed = len(texts.calibration), min(most, MIN_TRAINING_TEXTS)
    if count < needed:
        raise UsageError(
            f"--steps trains on at least {needed:,} texts, and there are {count:,}: "
            f"{texts.calibration_from}",
            "give more texts with --data, or a task with more training rows",
        )


def chosen_rows(texts: CheckTexts, count: int = CALIBRATION_TEXTS) -> list[TextRow]:
    """Return at most `count` evenly spaced rows, in an order without a pattern.

    The limit of tokens may leave out the last of them.
    """
    places = np.linspace(0, len(texts.calibration) - 1, count).astype(int)
    order = np.random.default_rng(0).permutation(np.unique(places))
    return [texts.calibration[n] for n in order]


ROWS, MAX_TEXT_TOKENS = 8, 128
"""Number of texts in a batch, and maximum number of tokens in a text."""
CALIBRATION_TOKENS = 4096
"""Maximum number of tokens on which integers are chosen."""
SAME = 0.99
"""Minimum mean cosine to torch's vectors."""


@dataclass(frozen=True)
class ExportCheck:
    """Compares a model's file with torch on texts, and on the rows of a workload if there is one.

    Attributes:
        model: The model in torch.
        kind: The kind of its head; None for an encoder without a head.
        texts: The texts on which the outputs are compared, and those for calibration.
        workload: The rows on which both are scored; None for no scores.
    """

    model: Model
    kind: Kind | None
    texts: CheckTexts
    workload: Workload | None

    @functools.cached_property
    def vectors_of_torch(self) -> Array:
        """The embedding model's vectors of the texts."""
        assert isinstance(self.model, Embedder)
        return self.model.vectors(self.texts.compared, "", cpu_session())

    @functools.cached_property
    def scores_of_torch(self) -> ModelScores:
        """The model's scores in torch."""
        assert self.workload is not None
        log(f"{task_title(self.workload.name)}: scoring the model in torch")
        return self.workload.score(self.model)

    def compare(self, file: ModelFile) -> FileComparison:
        """Compare a file with torch."""
        agreement = self._agreement(file)
        workload = self.workload
        if workload is None:
            return FileComparison(agreement)
        runner = file_runner(file.path, threads=0)
        of_file = workload.score(workload.run_by(self.model, runner, file.outputs))
        scores = {"torch": self.scores_of_torch, "file": of_file}
        result = workload.compare(scores, {"file": "torch"})
        rows = zip(self.scores_of_torch.evaluations, of_file.evaluations, strict=True)
        both = [FileScores(a.task, a.set, a.split, a.n, a.metrics, b.metrics) for a, b in rows]
        metric = next(iter(self.scores_of_torch.evaluations[0].metrics))
        points = min(
            points_per_row([each.scorers[name] for each in scores.values()], metric, count)
            for name, count in of_file.counts.items()
        )
        drop = worst_drop(result.comparisons, metric)
        return FileComparison(agreement, both, result.comparisons, drop, points)

    def _agreement(self, file: ModelFile) -> dict[str, float]:
        """Compare the predictions or vectors of the texts."""
        runner = file_runner(file.path, threads=0)
        if not isinstance(self.model, Embedder):
            network, tokenizer = self.model.model, self.model.tokenizer
            return compare_outputs(network, tokenizer, runner, self.kind, self.texts.compared)
        in_file = replace(self.model, runner=runner, outputs=file.outputs)
        in_torch_NE = self.vectors_of_torch
        in_file_NE = in_file.vectors(self.texts.compared, "", cpu_session())
        # The vector of a text without any token that a static model knows is zero.
        equal_N = (in_torch_NE == in_file_NE).all(axis=1)
        values = np.where(equal_N, 1, cosines(in_torch_NE, in_file_NE))
        least = float(values.min())
        return {"texts": len(values), "cosine": float(values.mean()), "least": least}

    def too_far(self, comparison: FileComparison) -> str | None:
        """Return why a file may not be used, whatever it scores; None if it may."""
        if not isinstance(self.model, Embedder):
            return None
        # Not `<`: a NaN must fail too.
        cosine = comparison.agreement["cosine"]
        if cosine >= SAME:
            return None
        return f"the mean cosine of its vectors to torch's is {cosine:.3f}"

    def calibration(self) -> list[Batch]:
        """Return rows on which integers are chosen, in padded batches."""
        batches: list[Batch] = []
        tokens = 0
        for batch in self._padded(chosen_rows(self.texts)):
            tokens += int(batch["attention_mask"].sum())
            if tokens > CALIBRATION_TOKENS and batches:
                break
            batches.append(batch)
        return batches

    def training_rows(self, count: int) -> TrainingRows:
        """Return at most this many rows on which integers are trained."""
        return TrainingRows(
            chosen_rows(self.texts, count),
            lambda rows: next(self._padded(rows, sum(map(len, rows)), MAX_TEXT_TOKENS)),
        )

    def batches(self) -> list[Batch]:
        """Return the rows for calibration and the texts that are compared, in padded batches."""
        compared = [(text,) for text in self.texts.compared]
        return [*self.calibration(), *self._padded(compared)]

    def _padded(
        self, rows: Sequence[TextRow], size: int | None = None, max_tokens: int | None = None
    ) -> Iterator[Batch]:
        if self.kind == "span" and all(len(row) == 1 for row in rows):
            rows = _with_contexts([text for (text,) in rows])
        # Few rows still are several batches.
        size = size or min(ROWS, max(1, len(rows) // ROWS))
        if not isinstance(self.model, Embedder):
            yield from tokenized_rows(self.model.model, self.model.tokenizer, rows, size)
            return
        roles = [""]
        if self.model.format.prompt_counts:
            # Every prompt that the model puts before a text takes part.
            by_prompt = {self.model.prompt(each): each for each in ("query", "document", "")}
            roles = list(by_prompt.values())
        texts = [text for row in rows for text in row]
        roles_of_texts = [roles[n % len(roles)] for n in range(len(texts))]
        tokens = self.model.tokenize(texts, roles_of_texts, max_tokens)
        for begin in range(0, len(texts), size):
            yield tokens.batch(np.arange(begin, min(begin + size, len(texts))))


def worst_drop(comparisons: Sequence[Comparison], metric: str) -> float:
    """Return the points (hundredths) that a file loses on its worst set, or NaN if a set has NaN.

    NaN is no score, so no bound allows it.
    """
    differences = [row.difference for row in comparisons if row.metric == metric]
    return 0.0 - 100 * float(np.min(differences))


def compare_outputs(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    runner: Runner,
    kind: Kind | None,
    texts: Sequence[str],
) -> dict[str, float]:
    """Compare a runner with torch in float32 on texts.

    Returns `texts`, the number of texts, and values that depend on the kind of the head:

    * None, an encoder: `cosine` and `least`, the mean and the smallest cosine between the mean
      vectors of the last hidden states over real tokens.
    * `score`: `mean` and `most`, the mean and the largest absolute difference.
    * `tokens`: `same`, the share of real tokens with equal predictions.
    * other kinds: `same`, the share of texts with equal predictions.

    Raises:
        UsageError: An output of the model or of the runner is NaN or infinite.
    """
    differences: list[Array] = []
    rows = _with_contexts(texts) if kind == "span" else [(text,) for text in texts]
    for batch in tokenized_rows(model, tokenizer, rows, ROWS):
        with torch.no_grad():
            outputs = model(**batch)
        names = [name for name in GRAPH_OUTPUTS if name in outputs]
        sides = {
            "torch": [outputs[name].float().numpy() for name in names],
            "the file": runner.output(runner.call(runner.prepare(batch))),
        }
        for name, side in sides.items():
            # A most probable class, for example, can be the same although it is that of NaN.
            check_finite(without_padding(names, side, batch), f"outputs of {name} for some texts")
        mask_BL = batch["attention_mask"].numpy().astype(bool)
        predicted = [_predicted(side, kind, mask_BL) for side in sides.values()]
        differences.append(
            cosines(*predicted) if kind is None else np.abs(predicted[0] - predicted[1])
        )
    values = np.concatenate(differences)
    if kind is None:
        return {"texts": len(texts), "cosine": float(values.mean()), "least": float(values.min())}
    if kind == "score":
        return {"texts": len(texts), "mean": float(values.mean()), "most": float(values.max())}
    same = values == 0
    return {"texts": len(texts), "same": float((same if same.ndim == 1 else same.all(1)).mean())}


def _with_contexts(texts: Sequence[str]) -> list[TextRow]:
    """Return each text as a question, with the next text as its context."""
    return list(zip(texts, [*texts[1:], *texts[:1]], strict=True))


def tokenized_rows(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[TextRow],
    size: int,
) -> Iterator[Batch]:
    """Yield texts, or pairs of texts, as batches of a number of rows."""
    length = min(MAX_TEXT_TOKENS, positions_of(model.config) or MAX_TEXT_TOKENS)
    for begin in range(0, len(rows), size):
        columns = map(list, zip(*rows[begin : begin + size], strict=True))
        encoded = tokenizer(
            *columns, padding=True, truncation=True, max_length=length, return_tensors="pt"
        )
        names = ("input_ids", "attention_mask", "token_type_ids")
        yield {name: encoded[name] for name in names if name in encoded}


def agreement_text(values: dict[str, float], kind: str | None) -> str:
    """Describe the result of `compare_outputs`. `kind` is the head's, `embedding` or None."""
    texts = f"on {values['texts']:.0f} texts"
    if kind == EMBEDDING_KIND:
        return (
            f"cosine of the vectors {values['cosine']:.4f} {texts}, the least {values['least']:.4f}"
        )
    if kind is None:
        cosine, least = values["cosine"], values["least"]
        return f"cosine of the mean vectors {cosine:.4f} {texts}, the least {least:.4f}"
    if kind == "score":
        return f"scores differ by {values['mean']:.3g} {texts}, at most by {values['most']:.3g}"
    predictions = "labels of tokens" if kind == "tokens" else "predictions"
    return f"{values['same']:.1%} of the {predictions} are the same {texts}"


def _predicted(outputs: Sequence[Array], kind: Kind | None, mask_BL: Array) -> Array:
    """Return predictions as numbers.

    A row is a text, for `tokens` a token. An encoder gives its mean vectors [B, D].
    """
    first = outputs[0]
    if kind is None:
        return np.asarray((first * mask_BL[..., None]).sum(1) / mask_BL.sum(1, keepdims=True))
    if kind == "span":
        ends = [np.where(mask_BL, side, -np.inf).argmax(-1) for side in outputs]
        return np.stack(ends, -1)
    if kind == "tokens":
        return np.asarray(first[mask_BL].argmax(-1))
    if kind == "class":
        return np.asarray(first.argmax(-1))
    return (first > 0).astype(int) if kind == "multi" else first[:, 0]
