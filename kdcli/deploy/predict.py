"""Use a trained model or an export on texts: labels, entities, answers, texts, vectors, scores.

A model runs with torch, on the fastest device, and an export with its own runtime on the CPU.
Nothing here needs the data or the recipe that trained the model: its directory says what it does.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from scipy.special import expit, softmax
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from kdcli.data.labelled.answer_windows import decode_answers, windows
from kdcli.data.labelled.features import TokenizedRows, cover_letters, encode_texts
from kdcli.data.labelled.label_values import describe_unknown_scheme
from kdcli.deploy.cascade import CascadeSettings, cascade_parts
from kdcli.deploy.environment import latency_threads
from kdcli.deploy.export import VECTORS
from kdcli.deploy.exported import EMBEDDING_KIND, is_export, open_export
from kdcli.deploy.runners import Runner, runner
from kdcli.deploy.sparse.loading import load_network
from kdcli.disk import unprintable
from kdcli.engine.device import choose_device
from kdcli.errors import UsageError
from kdcli.messages import log_fact, warn
from kdcli.metrics.cascade import ranked_twice, sureness
from kdcli.metrics.finite import check_finite
from kdcli.metrics.tokens import entities
from kdcli.models.cross_encoder import activation_of, is_cross_encoder, read_scorer
from kdcli.models.custom_class import UNILM_KEY
from kdcli.models.embedding_format import EmbeddingFormat, Pool, load_embedder, read_format
from kdcli.models.heads import PROBLEM, head_of, kind_of_head, tokenizer_for
from kdcli.models.load import check_case, load_config
from kdcli.models.model import reads_token_types
from kdcli.models.padding import settle_padding
from kdcli.models.shape import library_length, longest_input
from kdcli.types import Array, Example, Kind

Text = str | Sequence[str]
"""A text; a pair of texts; or the words of a text, for a model that labels words."""
ROWS_PER_BATCH = 32
MAX_OVERLAP = 128
"""Maximum number of tokens that two windows of a long context share."""
ITEMS = {1: "a text", 2: "a pair of texts"}
"""Number of texts of an item -> its name in messages."""
RERANK_KIND, TEXT_KIND = "rerank", "text"
"""Kinds of model, next to `EMBEDDING_KIND` and the kinds of a task with labels."""


@dataclass(frozen=True)
class Label:
    """The class of a text.

    Attributes:
        label: Its name.
        score: Its probability.
        scores: The probability of every class, by name.
    """

    label: str
    score: float
    scores: dict[str, float]


@dataclass(frozen=True)
class Labels:
    """The classes of a text that may have several, or none.

    Attributes:
        labels: The names of the classes with a probability above 0.5.
        scores: The probability of every class, by name.
    """

    labels: list[str]
    scores: dict[str, float]


@dataclass(frozen=True)
class Entity:
    """Words with a common label.

    Attributes:
        label: The type, without `B-` or `I-`.
        text: The words.
        score: The mean probability of the words' labels.
        start, end: The first character and the one after the last; numbers of words if the text
            was given as a list of words.
    """

    label: str
    text: str
    score: float
    start: int
    end: int


@dataclass(frozen=True)
class AnswerSpan:
    """The answer to a question.

    Attributes:
        text: The best span of the context.
        margin: The span's logit minus the logit of "no answer". For a model that was trained with
            unanswerable questions, a margin below 0 means that there is no answer.
    """

    text: str
    margin: float


Predictions: TypeAlias = (
    list[Label]
    | list[Labels]
    | list[list[Entity]]
    | list[AnswerSpan]
    | list[float]
    | list[str]
    | Array
)
"""What a model predicts for texts, by its kind."""


def most_probable(names: Sequence[str], probs_C: Array) -> Label:
    """Return the most probable class."""
    best = int(probs_C.argmax())
    scores = dict(zip(names, probs_C.tolist(), strict=True))
    return Label(names[best], float(probs_C[best]), scores)


def several_labels(names: Sequence[str], probs_C: Array) -> Labels:
    """Return the classes that are more probable than not."""
    scores = dict(zip(names, probs_C.tolist(), strict=True))
    return Labels([name for name, prob in scores.items() if prob > 0.5], scores)


@dataclass(frozen=True)
class Predictor:
    """A model that is ready for use.

    Attributes:
        source: The directory of the model or export.
        kind: The kind of task that it predicts, or `embedding` or `rerank`.
        config: The model's configuration.
        tokenizer: The model's tokenizer.
        runner: Computes the outputs; None for a model that generates texts.
        outputs: The names of the runner's outputs, for an embedding model.
        format: How vectors are made; None for a model with a head.
        generate: Generates a text for each text; None for other models.
    """

    source: str
    kind: str
    config: PreTrainedConfig
    tokenizer: PreTrainedTokenizerBase
    runner: Runner | None
    outputs: Sequence[str]
    format: EmbeddingFormat | None = None
    generate: Callable[[list[tuple[str, ...]]], list[str]] | None = None

    @classmethod
    def open(cls, source: str) -> Predictor:
        """Load a model, or an export for its own runtime.

        Args:
            source: Its directory, or a hub id.

        Raises:
            UsageError: The model cannot be loaded, or is an encoder without a head.
            MachineError: The runtime of an export is not installed.
        """
        config = load_config(source, weights=False, compacted=True)
        if (parts := cascade_parts(source, config)) is not None:
            first = cls._open(parts.first, load_config(parts.first, weights=False), parts.tokenizer)
            second = cls._open(source, config, source)
            return CascadePredictor(**vars(second), first=first, settings=parts.settings)
        return cls._open(source, config, source)

    @classmethod
    def _open(cls, source: str, config: PreTrainedConfig, of_tokenizer: str) -> Predictor:
        kind, fmt = kind_of_model(source, config), read_format(source)
        network: PreTrainedModel | None = None
        if kind == EMBEDDING_KIND and not is_export(source):
            # The tokenizer of a static model adds no special tokens, whatever its files say.
            embedder = load_embedder(source, compacted=True)
            network, tokenizer = embedder.model, embedder.tokenizer
        else:
            tokenizer = tokenizer_for(of_tokenizer, of_words=kind == "tokens")
        if kind == EMBEDDING_KIND or is_cross_encoder(source):
            check_case(tokenizer, source)
        if kind == "score" and config.num_labels != 1:
            raise UsageError(
                f"{source} predicts {config.num_labels} numbers for a text; supported is one",
                "use .model, which returns all outputs",
            )
        if kind == "tokens":
            labels = tuple(map(str, config.id2label.values()))
            if (warning := describe_unknown_scheme(labels)) is not None:
                warn(f"{source}: {warning}")
        known = functools.partial(cls, source, kind, config, tokenizer, format=fmt)
        if is_export(source):
            export = open_export(source)
            return known(export.runner(latency_threads()), export.outputs)
        if network is None:
            network = load_network(source)
            if kind != TEXT_KIND and (note := settle_padding(network, tokenizer, source)):
                log_fact(f"{source}: {note}")
        device = choose_device("auto")
        network.to(device)
        if kind == TEXT_KIND:
            return known(None, (), generate=network.generate)
        run = runner(network, "torch", "fp32", device=device, threads=0, folder=Path())
        return known(run, ("last_hidden_state",) if kind == EMBEDDING_KIND else ())

    def predict(self, texts: Iterable[Text]) -> Predictions:
        """Predict texts, in batches.

        Args:
            texts: The texts, or pairs of texts. A reranker takes pairs of a query and a passage,
                and a model for question answering pairs of a question and a context. For a model
                that labels words, a text may be a list of words.

        Returns:
            For each text, a `Label`, a `Labels`, a list of `Entity`, an `AnswerSpan`, or a text.
            Models with one output and rerankers return a number. An embedding model returns its
            vectors, [N, E] float32. Texts are cut at the length with which the model was trained.

        Raises:
            UsageError: An item is no text or pair, texts and pairs are mixed, or the outputs are
                not finite.
        """
        if isinstance(texts, str):
            raise UsageError("predict takes a list of texts, and got a single text", "give [text]")
        if isinstance(texts, Mapping) or hasattr(texts, "columns"):
            # Iterating a table gives the names of its columns.
            raise UsageError(
                f"predict takes a list of texts, and got an object of type {type(texts).__name__}",
                'give its column of texts, for example data["text"]',
            )
        return self._predicted(list(texts))[0]

    def _predicted(self, items: list[Text]) -> tuple[list[Any] | Array, list[float]]:
        """Return predictions, and how sure each is if the kind of model says so."""
        if self.format is not None:
            return self._vectors(items, self.format), []
        if self.kind == "tokens":
            return self._entities(items)
        if self.kind == "span":
            return self._answers(items), []
        counts = (2,) if self.kind == RERANK_KIND else (1, 2)
        checked = [_checked(item, n, counts) for n, item in enumerate(items)]
        for number, each in enumerate(checked):
            if len(each) != len(checked[0]):
                raise UsageError(
                    f"item {number} is {ITEMS[len(each)]}, but item 0 is {ITEMS[len(checked[0])]}",
                    "pass texts and pairs in separate calls",
                )
        if self.generate is not None:
            return (self.generate(checked) if checked else []), []
        logits_NC = self._logits(self._rows(checked))
        if self.kind == RERANK_KIND:
            return [float(score) for score in self._activated(logits_NC[:, 0])], []
        if self.kind == "score":
            return [float(score) for score in logits_NC[:, 0]], []
        names: Sequence[str] = self._names
        kind: Kind = "multi" if self.kind == "multi" else "class"
        sure = [sureness(kind, logits_C) for logits_C in logits_NC]
        if kind == "multi":
            return [several_labels(names, probs_C) for probs_C in expit(logits_NC)], sure
        return [most_probable(names, probs_C) for probs_C in softmax(logits_NC, axis=-1)], sure

    @property
    def max_length(self) -> int:
        """The number of tokens at which a text is cut."""
        if self.format is not None:
            return library_length(self.format.max_length, self.tokenizer, self.config)
        if is_cross_encoder(self.source):
            return library_length(read_scorer(self.source), self.tokenizer, self.config)
        return int(min(self.tokenizer.model_max_length, longest_input(self.config) or 1 << 30))

    @property
    def _token_types(self) -> bool:
        return reads_token_types(self.config, self.tokenizer)

    @property
    def _names(self) -> tuple[str, ...]:
        return tuple(str(self.config.id2label[n]) for n in range(self.config.num_labels))

    def _rows(self, texts: Sequence[tuple[str, ...]], *, of_words: bool = False) -> TokenizedRows:
        """Tokenise texts, or pairs or words of texts."""
        return encode_texts(
            texts,
            self.tokenizer,
            max_length=self.max_length,
            token_types=self._token_types,
            kind="tokens" if of_words else "score",
        )

    def _outputs(
        self, rows: TokenizedRows, finish: Callable[[list[Array], torch.Tensor], Array]
    ) -> list[Array]:
        """Return the output of each row.

        Args:
            rows: The tokenised rows.
            finish: Turns the outputs of a batch and its mask [B, L] into one array for each row.
        """
        assert self.runner is not None
        outputs: dict[int, Array] = {}
        order = np.argsort(rows.lengths, kind="stable")
        for begin in range(0, len(rows), ROWS_PER_BATCH):
            at = order[begin : begin + ROWS_PER_BATCH]
            batch = rows.batch(at)
            arrays = self.runner.output(self.runner.call(self.runner.prepare(batch)))
            for row, output in zip(at, finish(arrays, batch["attention_mask"]), strict=True):
                # Rows of a batch share memory that the next call overwrites.
                outputs[int(row)] = np.array(output)
        in_order = [outputs[row] for row in range(len(rows))]
        for output in in_order:
            check_finite(output, f"outputs of {self.source} for a text")
        return in_order

    def _logits(self, rows: TokenizedRows) -> Array:
        """Return the logits of rows, [N, C] float64."""
        logits = self._outputs(rows, lambda arrays, mask_BL: arrays[0])
        return np.stack(logits).astype(np.float64) if logits else np.empty((0, 1))

    def _vectors(self, items: Sequence[Text], fmt: EmbeddingFormat) -> Array:
        """Return the vectors of texts, [N, E] float32, as `SentenceTransformer.encode` does."""
        prompt = fmt.prompts.get(fmt.default_prompt or "", "")
        if prompt and not fmt.prompt_counts:
            raise UsageError(
                f"{self.source} excludes the tokens of prompts from its pooling, which is not "
                "supported",
                "use .model, which is a SentenceTransformer",
            )
        texts = [(prompt + _checked(item, n, (1,))[0],) for n, item in enumerate(items)]
        pool = Pool(fmt).eval()

        def finish(arrays: list[Array], mask_BL: torch.Tensor) -> Array:
            named = dict(zip(self.outputs, arrays, strict=True))
            if VECTORS in named:
                return named[VECTORS]
            with torch.inference_mode():
                return np.asarray(pool(torch.from_numpy(named["last_hidden_state"]), mask_BL))

        vectors = self._outputs(self._rows(texts), finish)
        width = fmt.width(self.config.hidden_size)
        return np.stack(vectors) if vectors else np.empty((0, width), np.float32)

    def _entities(self, items: Sequence[Text]) -> tuple[list[Any], list[float]]:
        """Return the entities of texts, from the label of each word's first token, and how sure
        the labels are."""
        spans = [self._words(item, number) for number, item in enumerate(items)]
        full = [n for n, words in enumerate(spans) if words]
        results: list[list[Entity]] = [[] for _ in items]
        sure = [1.0] * len(items)
        if not full:
            return results, sure
        words = [tuple(_text(items[n], *span) for span in spans[n]) for n in full]
        rows = self._rows(words, of_words=True)
        assert rows.words_T is not None
        outputs = self._outputs(rows, lambda arrays, mask_BL: arrays[0])
        for row, (number, output_LC) in enumerate(zip(full, outputs, strict=True)):
            end, length = int(rows.ends[row]), int(rows.lengths[row])
            words_L = rows.words_T[end - length : end]
            logits_LC = output_LC[:length].astype(np.float64)
            sure[number] = sureness("tokens", logits_LC, words_L >= 0)
            probs_LC = softmax(logits_LC, axis=-1)
            results[number] = self._of_text(items[number], spans[number], words_L, probs_LC)
        return results, sure

    def _of_text(
        self, item: Text, spans: Sequence[tuple[int, int]], words_L: Array, probs_LC: Array
    ) -> list[Entity]:
        """Return the entities of one text, given the number of the word that begins at each
        token."""
        # Words after the end of the row have no label.
        tags, scores = ["O"] * len(spans), [1.0] * len(spans)
        for token in np.flatnonzero(words_L >= 0):
            word, label = int(words_L[token]), int(probs_LC[token].argmax())
            tags[word] = self._names[label]
            scores[word] = float(probs_LC[token, label])
        found = sorted(entities(tags, self._names), key=lambda entity: entity[1])
        return [
            Entity(
                label,
                _text(item, spans[first][0], spans[last - 1][1]),
                math.fsum(scores[first:last]) / (last - first),
                spans[first][0],
                spans[last - 1][1],
            )
            for label, first, last in found
        ]

    def _words(self, item: Text, number: int) -> list[tuple[int, int]]:
        """Return where the words of a text begin and end.

        They are the words that the tokenizer sees, or the items of a list of words.
        """
        _checked(item, number, None)
        if not isinstance(item, str):
            return [(n, n + 1) for n in range(len(item))]
        encoded = self.tokenizer(
            item, add_special_tokens=False, return_offsets_mapping=True, verbose=False
        )
        offsets = np.array(encoded["offset_mapping"], np.int32).reshape(-1, 2)
        (offsets,) = cover_letters(item, [offsets])
        spans: dict[int, tuple[int, int]] = {}
        for word, (begin, end) in zip(encoded.word_ids(), offsets.tolist(), strict=True):
            first, last = spans.get(word, (begin, end))
            spans[word] = min(first, begin), max(last, end)
        # Some tokenizers count the space before a word.
        return [
            (end - len(item[begin:end].lstrip()), end)
            for begin, end in spans.values()
            if item[begin:end].strip()
        ]

    def _answers(self, items: Sequence[Text]) -> list[AnswerSpan]:
        """Return the answers to pairs of a question and a context."""
        pairs = [_checked(item, n, (2,)) for n, item in enumerate(items)]
        for number, (question, context) in enumerate(pairs):
            if not question.strip() or not context.strip():
                raise UsageError(
                    f"item {number} has an empty {'context' if question.strip() else 'question'}",
                    "give a question and a context with text",
                )
        examples = [Example("", str(n), pair, ()) for n, pair in enumerate(pairs)]
        length = self.max_length
        room = length - length // 2 - self.tokenizer.num_special_tokens_to_add(pair=True)
        parts = windows(
            examples,
            self.tokenizer,
            max_length=length,
            stride=min(MAX_OVERLAP, max(0, room // 2)),
            token_types=self._token_types,
        )
        logits = self._outputs(parts, lambda starts_ends, mask_BL: np.stack(starts_ends, -1))
        return [
            AnswerSpan(each.text, -each.no_answer)
            for each in decode_answers(parts, logits, examples)
        ]

    def _activated(self, scores_N: Array) -> Array:
        """Apply a cross-encoder's activation, as `CrossEncoder.predict` does."""
        name = activation_of(self.source, self.config) or "Sigmoid"
        return expit(scores_N) if name.endswith("Sigmoid") else scores_N


@dataclass(frozen=True, kw_only=True)
class CascadePredictor(Predictor):
    """A larger model that is only asked where a small one is unsure.

    Attributes:
        first: The small model.
        settings: When the larger model is asked.
    """

    first: Predictor
    settings: CascadeSettings

    def _predicted(self, items: list[Text]) -> tuple[list[Any] | Array, list[float]]:
        answers, sure = self.first._predicted(items)
        if self.settings.threshold is None:
            return self._ranked(items, np.array(answers)), []
        asked = [n for n, each in enumerate(sure) if each < self.settings.threshold]
        others, _ = super()._predicted([items[n] for n in asked])
        for n, other in zip(asked, others, strict=True):
            answers[n] = other
        return answers, sure

    def _ranked(self, items: list[Text], first_N: Array) -> list[float]:
        """Return scores that rank the pairs of each query; see `ranked_twice`."""
        assert self.settings.keep is not None
        scores_N = np.zeros(len(items))
        pairs_by_query: dict[str, list[int]] = {}
        for number, pair in enumerate(items):
            pairs_by_query.setdefault(pair[0], []).append(number)
        lists = [np.array(numbers) for numbers in pairs_by_query.values()]
        kept = [at[np.argsort(-first_N[at], kind="stable")[: self.settings.keep]] for at in lists]
        asked = np.concatenate([*kept, np.zeros(0, int)]).tolist()
        scores_N[asked] = super()._predicted([items[n] for n in asked])[0]
        for at in lists:
            scores_N[at] = ranked_twice(first_N[at], scores_N[at], self.settings.keep)
        return [float(score) for score in scores_N]


def kind_of_model(source: str, config: PreTrainedConfig, *, headless: bool = False) -> str:
    """Return what a model predicts, by its files.

    Args:
        source: The model.
        config: Its configuration.
        headless: Whether to return "" for an encoder without a head.

    Raises:
        UsageError: It is an encoder without a head, or its files are damaged.
    """
    if read_format(source) is not None:
        return EMBEDDING_KIND
    if hasattr(config, UNILM_KEY):
        return TEXT_KIND
    architecture = next(iter(config.architectures or ()), "")
    kind = kind_of_head(config, architecture)
    if kind is None and not headless:
        raise UsageError(
            f"{source} is an encoder without a head ({architecture}), which predicts nothing",
            "fine-tune it on a task; an embedding model names its pooling in modules.json",
        )
    if kind != "class":
        return kind or ""
    is_trained_reranker = getattr(config, "finetuning_task", None) == RERANK_KIND
    has_scores = is_trained_reranker or is_cross_encoder(source) or activation_of(source, config)
    if config.num_labels == 1 and has_scores:
        return RERANK_KIND
    if config.num_labels == 1 and config.problem_type is None:
        # The output of a detector, which has a name such as SPAM, is the logit of a probability.
        head = head_of(config)
        return "multi" if head is not None and head.named else "score"
    return next((k for k, problem in PROBLEM.items() if problem == config.problem_type), kind)


def _checked(item: object, number: int, counts: tuple[int, ...] | None) -> tuple[str, ...]:
    """Return an item of `predict` as a tuple of texts.

    Args:
        item: The item.
        number: Its place, for the message.
        counts: The allowed numbers of texts; None for words.

    Raises:
        UsageError: It is no text or pair, or has another number of texts.
    """
    # A column of lists that was read from a Parquet file holds arrays.
    item = item.tolist() if isinstance(item, np.ndarray) else item
    texts = (item,) if isinstance(item, str) else item
    if isinstance(texts, list | tuple) and all(isinstance(each, str) for each in texts):
        if any(map(unprintable, texts)):
            raise UsageError(f"item {number} is not UTF-8 text", "correct or remove it")
        if counts is None or len(texts) in counts:
            return tuple(texts)
        got = f"{len(texts)} texts"
    else:
        got = f"an object of type {type(item).__name__}"
    allowed = "a text or a list of words"
    if counts is not None:
        allowed = " or ".join(ITEMS[count] for count in counts)
    raise UsageError(f"item {number} is {got}; this model takes {allowed}", "give a list of these")


def _text(item: Text, begin: int, end: int) -> str:
    """Return a part of a text, or words of a list as one text."""
    return item[begin:end] if isinstance(item, str) else " ".join(item[begin:end])
