"""Embedding models: compute the vectors of texts, with PyTorch or with the runtime of an export."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import torch

from kdcli.data.labelled.features import TokenizedRows, encode_texts
from kdcli.deploy.environment import latency_threads
from kdcli.deploy.export import RUNTIMES, VECTORS
from kdcli.deploy.exported import Export, RuntimeNetwork, is_export, open_export
from kdcli.deploy.runners import Runner
from kdcli.deploy.sessions import library
from kdcli.disk import cache_key
from kdcli.engine.evaluation import to_device
from kdcli.engine.session import Session
from kdcli.errors import MachineError, UsageError, is_out_of_memory
from kdcli.metrics.finite import check_finite
from kdcli.metrics.retrieval import of_length_1
from kdcli.models.capture import Capture, capture
from kdcli.models.embedding_format import (
    EmbeddingFormat,
    Pool,
    format_for,
    left_to_library,
    load_by_library,
    load_embedder,
)
from kdcli.models.identity import weights_hash
from kdcli.models.load import check_case, load_tokenizer
from kdcli.models.model import Model, reads_token_types
from kdcli.models.shape import library_length, positions_of
from kdcli.models.source import is_address
from kdcli.targets.outputs import load_or_compute_outputs, stored_outputs
from kdcli.targets.served import ServerSettings, load_served
from kdcli.types import Array, Batch, Needs
from kdcli.workloads.settings import VectorFormat

TOKENS_AT_ONCE = {"cpu": 2048, "cuda": 65536}  # in one forward pass, including padding


@dataclass(frozen=True)
class Embedder(Model):
    """An encoder in float32 or an export that computes the vectors of texts.

    Attributes:
        format: Pooling and further steps from hidden states to vectors.
        runner: Computes the hidden states or vectors; None for PyTorch.
        outputs: Names of the runner's outputs.
        dimensions: Number of leading components that vectors are truncated to; None keeps all.
        stored: How the vectors of documents are stored for a search.
    """

    format: EmbeddingFormat = field(default_factory=EmbeddingFormat)
    runner: Runner | None = None
    outputs: Sequence[str] = ("last_hidden_state",)
    dimensions: int | None = None
    stored: VectorFormat = "float32"

    @classmethod
    def open(
        cls,
        source: str,
        *,
        pooling: str | None = None,
        compacted: bool = False,
        library: bool = False,
        server: ServerSettings | None = None,
    ) -> Self:
        """Load an embedding model.

        Args:
            source: The model.
            pooling: Pooling of an encoder that does not specify its own.
            compacted: Also allow a compacted model.
            library: Also allow a model that only sentence-transformers or a server computes. Its
                vectors can be used, but nothing inside it.
            server: How a server is asked for vectors; None for the default settings.

        Raises:
            UsageError: The model cannot be loaded, or has no pooling.
        """
        if library and is_address(source):
            loaded, fmt = load_served(source, server or ServerSettings())
            return cls(loaded.model, loaded.tokenizer, source, loaded.note, format=fmt)
        if library and (reason := left_to_library(source)) is not None:
            loaded, fmt = load_by_library(source, reason)
            return cls(loaded.model, loaded.tokenizer, source, loaded.note, format=fmt)
        loaded = load_embedder(source, compacted=compacted)
        fmt, pooled = format_for(source, loaded.model.config, pooling)
        note = "; ".join(filter(None, [pooled, loaded.note]))
        return cls(loaded.model, loaded.tokenizer, source, note, rows=loaded.rows, format=fmt)

    @classmethod
    def open_scored(
        cls,
        source: str,
        *,
        pooling: str | None = None,
    ) -> Self:
        """Load an embedding model for evaluation, which may be an export or a compacted model.

        Args:
            source: The model or export.
            pooling: Pooling of an encoder that does not specify its own.

        Raises:
            UsageError: The model or export cannot be loaded, has no pooling, or is an export of a
                model with a head.
        """
        if not is_export(source):
            return cls.open(source, pooling=pooling, compacted=True, library=True)
        export = open_export(source)
        if not {VECTORS, "last_hidden_state"} & set(export.outputs):
            raise UsageError(
                f"{source} is an export of a model with a head: its outputs are "
                f"{', '.join(export.outputs)}, not vectors",
                "export an embedding model, or an encoder with --pooling",
            )
        fmt, note = format_for(source, export.config, pooling)
        tokenizer = load_tokenizer(source)
        check_case(tokenizer, source)
        note = f"run by {export.format}, {export.precision}; {note}"
        network: Any = export
        runner = export.runner(latency_threads())
        return cls(
            network, tokenizer, source, note, format=fmt, runner=runner, outputs=export.outputs
        )

    @property
    def max_length(self) -> int:
        """Maximum number of tokens in a text.

        It comes from the model's format or its tokenizer, and is limited by its positions.
        """
        return library_length(self.format.max_length, self.tokenizer, self.model.config)

    @property
    def rows_at_once(self) -> int | None:
        """The number of texts in a forward pass; None if it depends on their lengths."""
        return getattr(self.model, "rows_at_once", None)

    @property
    def fingerprint(self) -> str:
        """Hash of everything that the vectors depend on, except the texts and their prompts."""
        layers = [x for layer in self.format.layers for x in layer.state_dict().values()]
        settings = replace(self.format, prompts={}, default_prompt=None)
        return cache_key(
            weights_hash(self.model),
            repr(settings),
            [hashlib.sha256(x.numpy().tobytes()).hexdigest() for x in layers],
        )

    def captured(self) -> Capture:
        """Wrap the model in a module that returns `pooled` signals."""
        return capture(self.model, Needs(pooled=True), Pool(self.format))

    def prompt(self, role: str) -> str:
        """Return the prompt for texts of a role, as `encode_query` and `encode_document` choose it.

        Args:
            role: `query`, `document`, or the empty string for texts that are neither.

        Raises:
            UsageError: The model excludes the tokens of prompts from its pooling.
        """
        prompt = self.format.prompts.get(role or self.format.default_prompt or "", "")
        if prompt and not self.format.prompt_counts:
            raise UsageError(
                f"{self.source} excludes the tokens of prompts from its pooling, which is not "
                "supported"
            )
        return prompt

    def tokenize(
        self, texts: Sequence[str], roles: Sequence[str], max_length: int | None = None
    ) -> TokenizedRows:
        """Tokenise texts with their prompts.

        Args:
            texts: The texts.
            roles: The role of each text.
            max_length: Maximum number of tokens in a text; None for the model's own maximum.

        Raises:
            UsageError: A prompt is not supported.
        """
        prompts = {role: self.prompt(role) for role in set(roles)}
        types = reads_token_types(self.model.config, self.tokenizer)
        if self.format.library:
            # The library cuts texts itself, and these tokens are bytes.
            max_length = None
        length = min(max_length or self.max_length, positions_of(self.model.config) or 1 << 30)
        return encode_texts(
            ((prompts[role] + text,) for text, role in zip(texts, roles, strict=True)),
            self.tokenizer,
            max_length=length,
            token_types=types,
        )

    def vectors(
        self, texts: Sequence[str], role: str, session: Session, max_length: int | None = None
    ) -> Array:
        """Compute the vectors of texts, [N, E] float32.

        The model computes in float32. Long texts come first, so that memory runs out early.

        Args:
            texts: The texts.
            role: Their role; see `prompt`.
            session: The device.
            max_length: Maximum number of tokens in a text; None for the model's own maximum.

        Raises:
            UsageError: The prompt for the role is not supported.
            MachineError: There is not enough memory for a single text.
        """
        rows = self.tokenize(texts, [role] * len(texts), max_length)
        if self.runner is not None:
            return self.cut(self._run_rows(self.runner, rows))

        # One array for all rows, because vectors need no copy of their own.
        (vectors_NE,) = load_or_compute_outputs(
            self.model,
            lambda: self.fingerprint,
            rows,
            session,
            lambda: [self._forward(rows, session)],
        )
        return self.cut(vectors_NE)

    def _empty(self, rows: TokenizedRows) -> Array:
        """Return an uninitialised array for the vectors of rows, [N, E] float32."""
        return np.empty((len(rows), self.format.width(self.model.config.hidden_size)), np.float32)

    def _run_rows(self, runner: Runner, rows: TokenizedRows) -> Array:
        """Compute the vectors of rows with a runner, [N, E] float32."""
        vectors_NE, pool = self._empty(rows), Pool(self.format)
        order = np.argsort(-rows.lengths, kind="stable")
        for begin in range(0, len(rows), FORWARD_ROWS):
            indices = order[begin : begin + FORWARD_ROWS]
            vectors_NE[indices] = self._run(runner, rows.batch(indices), rows.pad_id, pool)
        return vectors_NE

    def _forward(self, rows: TokenizedRows, session: Session) -> Array:
        """Compute the vectors of rows with PyTorch, [N, E] float32.

        Raises:
            MachineError: There is not enough memory for a single text.
        """
        lengths, vectors_NE = rows.lengths, self._empty(rows)
        order = np.argsort(-lengths, kind="stable")
        module = self.captured()
        module.to(session.device).eval()
        budget = TOKENS_AT_ONCE.get(session.device.type, TOKENS_AT_ONCE["cuda"])
        begin = 0
        while begin < len(order):
            # A text without words has no tokens if the tokenizer adds none.
            longest = max(1, int(lengths[order[begin]]))
            count = self.rows_at_once or max(1, budget // longest)
            indices = order[begin : begin + count]
            try:
                with torch.inference_mode():
                    pooled = module(to_device(session.device, rows.batch(indices))).pooled
                vectors_NE[indices] = pooled.float().cpu().numpy()
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                if len(indices) == 1:
                    raise MachineError(
                        "out of memory with one text at a time", "lower data.max_length"
                    ) from None
                budget //= 2
                continue
            begin += len(indices)
        return vectors_NE

    def cuts(self, name: str, dimensions: Sequence[int]) -> dict[str, Embedder]:
        """Return copies of the model with vectors truncated to each of `dimensions`, by name.

        Without dimensions, the model itself is returned under `name`.

        Raises:
            UsageError: The vectors have fewer components than a dimension.
        """
        width = self.format.width(self.model.config.hidden_size)
        if dimensions and max(dimensions) > width:
            raise UsageError(
                f"{self.source} has vectors of {width} numbers: dimensions={max(dimensions)} is "
                "too large",
                f"give at most {width}",
            )
        return {f"{name}, {d} numbers": replace(self, dimensions=d) for d in dimensions} or {
            name: self
        }

    def stored_as(self, name: str, formats: Sequence[VectorFormat]) -> dict[str, Embedder]:
        """Return copies of the model with documents stored in each of `formats`, by name.

        Without formats, the model itself is returned under `name`.

        Raises:
            UsageError: Binary vectors do not have the model's similarity.
        """
        if "binary" in formats and self.format.similarity not in ("cosine", "dot"):
            raise UsageError(
                f"{self.source} compares vectors by {self.format.similarity}, which binary vectors "
                "do not have",
                "give vector_formats float32 or int8",
            )
        return {f"{name}, {stored}": replace(self, stored=stored) for stored in formats} or {
            name: self
        }

    def cut(self, v_ND: Array) -> Array:
        """Truncate vectors to the model's `dimensions`."""
        check_finite(v_ND, f"components of the vectors of {self.source}")
        cut_ND = v_ND[:, : self.dimensions]
        if self.dimensions is None or not self.format.normalize:
            return cut_ND
        return of_length_1(cut_ND)

    def _run(self, runner: Runner, batch: Batch, pad_id: int, pool: Pool) -> Array:
        """Compute the vectors of a batch. If the export has no pooling, pool its hidden states."""
        positions = positions_of(self.model.config)
        batch = padded(batch, pad_id, positions, runner.length_step)
        outputs = runner.output(runner.call(runner.prepare(batch)))
        by_name = dict(zip(self.outputs, outputs, strict=True))
        if VECTORS in by_name:
            return by_name[VECTORS]
        states_BLD = torch.from_numpy(by_name["last_hidden_state"])
        with torch.no_grad():
            return np.asarray(pool(states_BLD, batch["attention_mask"]).numpy())


def cosines(x_ND: Array, y_ND: Array) -> Array:
    """Compute the cosine of each pair of rows, [N] float64. It is 0 if a vector is zero."""
    x, y = x_ND.astype(np.float64), y_ND.astype(np.float64)
    norms = np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1)
    return np.asarray((x * y).sum(1) / np.where(norms == 0, 1, norms))


FORWARD_ROWS = 16
"""Number of rows that a runner reads in one call."""


def network_outputs(network: RuntimeNetwork, rows: TokenizedRows, session: Session) -> list[Array]:
    """Return the logits of each row, computed by a network's own runtime.

    The outputs of an export are stored as those of a model in torch.
    """

    def compute() -> list[Array]:
        runner = network.runner(latency_threads())
        return runner_outputs(runner, rows, positions_of(network.config))

    if not isinstance(network, Export):
        return compute()

    def identity() -> object:
        runtime = library(RUNTIMES[network.format][-1], network.format).__version__
        return network.card.sha256, network.format, network.precision, runtime, latency_threads()

    return stored_outputs(identity, rows, session, compute)


def runner_outputs(runner: Runner, rows: TokenizedRows, positions: int | None) -> list[Array]:
    """Run all rows and return the logits of each row.

    Args:
        runner: Runs the model.
        rows: The tokenised rows.
        positions: Maximum row length of the model; None if there is no maximum.
    """
    logits: dict[int, Array] = {}
    # Rows of similar length need little padding.
    order = np.argsort(-rows.lengths, kind="stable")
    for begin in range(0, len(rows), FORWARD_ROWS):
        numbers = order[begin : begin + FORWARD_ROWS]
        batch = padded(rows.batch(numbers), rows.pad_id, positions, runner.length_step)
        outputs = runner.output(runner.call(runner.prepare(batch)))
        # The start and end logits of a question-answering head are stacked to [L, 2].
        of_rows = outputs[0] if len(outputs) == 1 else np.stack(outputs, -1)
        logits.update(zip(numbers.tolist(), of_rows, strict=True))
    return [logits[number] for number in range(len(rows))]


def padded(batch: Batch, pad_id: int, positions: int | None, step: int) -> Batch:
    """Return the inputs of a batch, padded to a multiple of `step` tokens, at least one token.

    The length stays within the model's positions.
    """
    length = batch["input_ids"].shape[1]
    # A text without words has no tokens if the tokenizer adds none.
    padded_length = max(1, length + -length % step)
    if positions is not None:
        padded_length = min(padded_length, positions)
    names = [name for name in ("input_ids", "attention_mask", "token_type_ids") if name in batch]
    fillers = {name: pad_id if name == "input_ids" else 0 for name in names}
    return {
        name: torch.nn.functional.pad(batch[name], (0, padded_length - length), value=filler)
        for name, filler in fillers.items()
    }
