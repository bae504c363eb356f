"""An embedding model at work: texts -> vectors, and what vectors are judged by without fine-tuning.

Pairs with a score: correlation of the cosine with it. Retrieval: the ranking of a corpus for each
query.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import torch

from kdcli.data.labelled.features import Array, TokenizedRows, encode
from kdcli.deploy.environment import latency_threads
from kdcli.deploy.export import VECTORS
from kdcli.deploy.exported import is_export, open_export
from kdcli.deploy.runners import Runner
from kdcli.disk import cache_key
from kdcli.engine.evaluation import to_device
from kdcli.engine.launch import Session
from kdcli.engine.memory import is_out_of_memory
from kdcli.errors import MachineError, UsageError
from kdcli.metrics.finite import check_finite
from kdcli.models.capture import Capture, capture
from kdcli.models.card import weights_hash
from kdcli.models.embedder import EmbeddingFormat, Pool, format_for, load_embedder
from kdcli.models.load import load_tokenizer
from kdcli.models.model import Model
from kdcli.models.shape import positions_of
from kdcli.types import Batch, Example, Needs, Task
from kdcli.workloads.labelled import FORWARD_ROWS, padded

TEXTS = Task("texts", "score", ("text",), ())
TOKENS_AT_ONCE = {"cpu": 2048, "cuda": 65536}  # padding included, in one forward pass
ROLES = {"query": ("query",), "document": ("document", "passage", "corpus"), "": ()}
"""Role of a text -> names that prompts for it have."""


@dataclass(frozen=True)
class Embedder(Model):
    """An encoder in float32, or an export, that gives vectors of texts.

    Attributes:
        format: how a vector is made of the encoder's states.
        runner: computes in place of torch.
        outputs: names of the runner's outputs.
        dimensions: cuts vectors to their first components.
    """

    format: EmbeddingFormat = field(default_factory=EmbeddingFormat)
    runner: Runner | None = None
    outputs: Sequence[str] = ("last_hidden_state",)
    dimensions: int | None = None

    @classmethod
    def open(
        cls,
        source: str,
        *,
        pooling: str | None = None,
        trust_remote_code: bool = False,
        compacted: bool = False,
    ) -> Self:
        """Load one. Raises UsageError: see `kdcli.models.embedder`."""
        loaded = load_embedder(source, trust_remote_code=trust_remote_code, compacted=compacted)
        fmt, note = format_for(source, loaded.model.config, pooling)
        return cls(loaded.model, loaded.tokenizer, source, note, rows=loaded.rows, format=fmt)

    @classmethod
    def open_scored(
        cls, source: str, *, pooling: str | None = None, trust_remote_code: bool = False
    ) -> Self:
        """One that is judged, not trained: an export or a compacted model too. Raises UsageError:
        see `open` and `open_export`; an export of a model with a head."""
        if not is_export(source):
            return cls.open(
                source, pooling=pooling, trust_remote_code=trust_remote_code, compacted=True
            )
        export = open_export(source)
        if not {VECTORS, "last_hidden_state"} & set(export.outputs):
            message = (
                f"{source} is an export of a model with a head: it gives "
                f"{', '.join(export.outputs)}, no vectors"
            )
            raise UsageError(message, "export an embedding model, or an encoder with --pooling")
        fmt, note = format_for(source, export.config, pooling)
        tokenizer = load_tokenizer(source, trust_remote_code=trust_remote_code)
        note = f"run by {export.format}, {export.precision}; {note}"
        network: Any = export
        runner = export.runner(latency_threads())
        return cls(
            network, tokenizer, source, note, format=fmt, runner=runner, outputs=export.outputs
        )

    @property
    def max_length(self) -> int:
        """Tokens of a text at most: of its format, else its tokenizer's, and no more than it has
        positions."""
        wanted = self.format.max_length or self.tokenizer.model_max_length
        return int(min(wanted, positions_of(self.model.config) or wanted))

    @property
    def fingerprint(self) -> str:
        """A hash of everything its vectors depend on, but the texts."""
        dense = (
            []
            if self.format.dense is None
            else [t.numpy().tobytes() for t in self.format.dense[:2] if t is not None]
        )
        settings = replace(
            self.format, dense=None, prompts={}, default_prompt=None
        )  # prompts are part of the texts
        return cache_key(
            weights_hash(self.model),
            repr(settings),
            [hashlib.sha256(part).hexdigest() for part in dense],
        )

    def captured(self) -> Capture:
        """A module that gives `pooled` signals."""
        return capture(self.model, Needs(pooled=True), Pool(self.format))

    def prompt(self, role: str) -> str:
        """What is put before a text of a role. Raises UsageError: the prompt's tokens are left out
        of the pooling."""
        names = [n for n in (*ROLES[role], self.format.default_prompt) if n in self.format.prompts]
        prompt = self.format.prompts[names[0]] if names else ""
        if prompt and not self.format.prompt_counts:
            raise UsageError(
                f"{self.source} leaves the tokens of its prompts out of its pooling: not supported"
            )
        return prompt

    def tokenize(
        self, texts: Sequence[str], roles: Sequence[str], max_length: int | None = None
    ) -> TokenizedRows:
        """Texts with their prompts, as rows of tokens."""
        prompts = {role: self.prompt(role) for role in set(roles)}
        examples = [
            Example("", str(n), (prompts[r] + t,), None)
            for n, (t, r) in enumerate(zip(texts, roles, strict=True))
        ]
        types = int(getattr(self.model.config, "type_vocab_size", 0) or 0) > 1
        length = min(max_length or self.max_length, positions_of(self.model.config) or 1 << 30)
        return encode(TEXTS, examples, self.tokenizer, max_length=length, token_types=types)

    def vectors(self, texts: Sequence[str], role: str, session: Session) -> Array:
        """The vector of each text, float32 [N, E]; in float32, the longest texts first. Raises
        MachineError: out of memory with one text at a time."""
        rows = self.tokenize(texts, [role] * len(texts))
        lengths = rows.lengths
        found = np.empty((len(rows), self.format.width(self.model.config.hidden_size)), np.float32)
        if self.runner is not None:
            by_length, pool = np.argsort(-lengths, kind="stable"), Pool(self.format)
            for begin in range(0, len(rows), FORWARD_ROWS):
                indices = by_length[begin : begin + FORWARD_ROWS]
                found[indices] = self._by_runner(
                    self.runner, rows.batch(indices), rows.pad_id, pool
                )
            return self._cut(found)
        module = self.captured()
        module.to(session.device).eval()
        budget = TOKENS_AT_ONCE.get(session.device.type, TOKENS_AT_ONCE["cuda"])
        order, begin = np.argsort(-lengths, kind="stable"), 0
        while begin < len(order):
            indices = order[begin : begin + max(1, budget // int(lengths[order[begin]]))]
            try:
                with torch.inference_mode():
                    pooled = module(to_device(session.device, rows.batch(indices))).pooled
                found[indices] = pooled.float().cpu().numpy()
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
        return self._cut(found)

    def cuts(self, name: str, dimensions: Sequence[int]) -> "dict[str, Embedder]":
        """Name -> this model with its vectors cut to each of `dimensions`; itself without any.
        Raises UsageError: more than there are."""
        width = self.format.width(self.model.config.hidden_size)
        if dimensions and max(dimensions) > width:
            raise UsageError(
                f"{self.source} has vectors of {width} numbers: dimensions={max(dimensions)} is "
                "too many"
            )
        return {f"{name}, {d} numbers": replace(self, dimensions=d) for d in dimensions} or {
            name: self
        }

    def _cut(self, v_ND: Array) -> Array:
        check_finite(v_ND, f"components of the vectors of {self.source}")
        cut_ND = v_ND[:, : self.dimensions]
        if self.dimensions is None or not self.format.normalize:
            return cut_ND
        return np.asarray(cut_ND / np.maximum(np.linalg.norm(cut_ND, axis=1, keepdims=True), 1e-12))

    def _by_runner(self, made: Runner, batch: Batch, pad_id: int, pool: Pool) -> Array:
        """The vectors of a batch: pooled by the file itself, or here from its last hidden
        states."""
        batch = padded(batch, pad_id, positions_of(self.model.config))
        by_name = dict(zip(self.outputs, made.output(made.call(made.prepare(batch))), strict=True))
        if VECTORS in by_name:
            return by_name[VECTORS]
        with torch.no_grad():
            return np.asarray(
                pool(
                    torch.from_numpy(by_name["last_hidden_state"]), batch["attention_mask"]
                ).numpy()
            )


def cosines(x_ND: Array, y_ND: Array) -> Array:
    """Cosine of each pair of rows, [N] float64; 0 with a zero vector."""
    x, y = x_ND.astype(np.float64), y_ND.astype(np.float64)
    norms = np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1)
    return np.asarray((x * y).sum(1) / np.where(norms == 0, 1, norms))
