"""The mask file: all that a pruned task needs next to the base it shares with others, in one
`.safetensors`.

Tensors: `mask.3.Q`, the coded bits of a matrix (`kdcli.deploy.sparse.coding`); `head.NAME`, a
compressed parameter of the task that the base does not have; `scores.3.Q`, float16, if scores are
stored; `rows`, the hashes of the labelled rows that trained it, 8 bytes a row. The header holds
`MaskInfo` and a SHA-256 of the whole file, computed with the digits of that hash as zeros, so that
any damaged byte is detected.
"""

import hashlib
import json
import math
import re
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tokenize import TokenError
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor
from transformers import PreTrainedModel

from kdcli.deploy.sparse.coding import decode, encode, inflate
from kdcli.disk import disk_errors, parse_json, user_path, write_atomic
from kdcli.errors import UsageError
from kdcli.models.matrices import matrices
from kdcli.models.training_rows import NO_ROWS, all_rows
from kdcli.types import RowHashes

FORMAT = "kdcli-mask-1"
PUBLISHED = ".npy"  # ending of the masks of the SMP authors, see `read_smp`
DIGEST = re.compile(rb'"sha256":"([0-9a-f]{64})"')
NO_DIGEST = "0" * 64
DTYPES = {
    str(d).removeprefix("torch."): d
    for d in (torch.float32, torch.float16, torch.bfloat16, torch.int64)
}
MOST_WEIGHTS = 2**32  # Of a mask that is decoded without its base
COPY_AGAIN = "copy it again from where it was made"


Count = Annotated[int, Field(ge=1, le=2**31)]
Size = Annotated[int, Field(ge=0, le=2**31)]
_HEAD: TypeAdapter[dict[str, tuple[str, tuple[Size, ...]]]] = TypeAdapter(
    dict[str, tuple[str, tuple[Size, ...]]]
)


class _Header(BaseModel):
    """The texts that `write_mask` puts into the header of safetensors."""

    format: str
    info: str
    head: str


class MaskInfo(BaseModel):
    """What a mask is for; `write_mask` fills in densities and shapes. Without a task the last
    fields are empty."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    base: str  # hub id or directory of the encoder it was made for
    base_sha256: str  # `base_hash` of that encoder
    model_type: str
    vocab_size: Count  # tokens that the masked model was judged with
    method: str
    density: float  # requested share of the weights that is kept
    densities: dict[str, float] = {}  # share that is kept, by matrix
    shapes: dict[str, tuple[Count, Count]] = {}  # rows and columns, by matrix
    task: str | None = None
    architecture: str | None = (
        None  # class of transformers with the task's head; None: the bare encoder
    )
    config: dict[
        str, Any
    ] = {}  # settings of the task's model that differ from the base's, such as `id2label`
    labels: tuple[str, ...] = ()  # in the order of their numbers
    label_words: tuple[str, ...] = ()  # the words its head was made of, in the same order
    max_length: Count | None = None  # tokens at which its rows are cut
    pooling: Literal["mean", "cls", "last"] | None = (
        None  # of its vectors, where the base does not say
    )
    metrics: dict[str, float] = {}
    versions: dict[str, str] = {}  # of the packages that made it


@dataclass(frozen=True)
class MaskFile:
    """A mask file in memory; masks and scores by `Matrix.name`, [out, in]."""

    info: MaskInfo
    masks: dict[str, Tensor]  # bool, True is kept
    path: Path
    head: dict[str, Tensor] = field(default_factory=dict)  # by parameter name of the task's model
    scores: dict[str, Tensor] = field(
        default_factory=dict
    )  # float16; empty when they were not stored
    rows: RowHashes = field(
        default_factory=NO_ROWS.copy
    )  # that trained it, see `kdcli.models.training_rows`


def facts_of(base: PreTrainedModel, source: str) -> dict[str, Any]:
    """What a mask says of the encoder at `source` that it is for, and `check_base` compares; call
    it before masking."""
    facts = {
        "base": source,
        "base_sha256": base_hash(base),
        "model_type": str(base.config.model_type),
    }
    return facts | {"vocab_size": base.config.vocab_size}


def base_hash(model: PreTrainedModel) -> str:
    """SHA-256 of the matrices that masks are for: names, shapes and float32 weights."""
    digest = hashlib.sha256()
    for matrix in matrices(model):
        weight = matrix.of(matrix.linear.weight.detach()).float().cpu().contiguous()
        digest.update(f"{matrix.name} {tuple(weight.shape)}\n".encode())
        digest.update(weight.numpy().tobytes())
    return digest.hexdigest()


def write_mask(
    path: Path,
    info: MaskInfo,
    masks: Mapping[str, Tensor],
    *,
    head: Mapping[str, Tensor] | None = None,
    scores: Mapping[str, Tensor] | None = None,
    rows: RowHashes = NO_ROWS,
) -> MaskInfo:
    """Write a mask file atomically; returns `info` with densities and shapes filled in. `masks`: by
    `Matrix.name`, bool [out, in]. `head`: parameters of the task's model that are not the base's,
    see `kdcli.deploy.sparse.load.task_part`.
    `scores`: by `Matrix.name`, to cut at another density later; stored in float16. `rows`: hashes
    of those that trained it. Raises MachineError: the disk is full or not writable; an older file
    of that name is untouched."""
    densities = {name: float(mask.float().mean()) for name, mask in masks.items()}
    shapes = {name: (mask.shape[0], mask.shape[1]) for name, mask in masks.items()}
    info = info.model_copy(update={"densities": densities, "shapes": shapes})
    tensors = {
        f"mask.{name}": torch.from_numpy(encode(mask.cpu().numpy()).copy())
        for name, mask in masks.items()
    }
    parts = {}
    for name, tensor in (head or {}).items():
        parts[name] = [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        # Compressed, as a head made of label words is mostly an identity matrix.
        tensors[f"head.{name}"] = torch.frombuffer(
            bytearray(zlib.compress(raw, 6)), dtype=torch.uint8
        )
    tensors |= {
        f"scores.{name}": t.detach().cpu().half().contiguous() for name, t in (scores or {}).items()
    }
    if len(rows):
        # As signed numbers, which every version of torch saves.
        tensors["rows"] = torch.from_numpy(rows.view(np.int64).copy())
    header = {
        "format": FORMAT,
        "sha256": NO_DIGEST,
        "info": info.model_dump_json(),
        "head": json.dumps(parts),
    }
    data = save_tensors(tensors, header)
    # With sorted keys in the header, whose order safetensors varies: equal masks are equal files.
    (size,) = struct.unpack("<Q", data[:8])
    keys = json.dumps(
        json.loads(data[8 : 8 + size]), sort_keys=True, separators=(",", ":")
    ).encode()
    keys += b" " * (-len(keys) % 8)
    data = struct.pack("<Q", len(keys)) + keys + data[8 + size :]
    at = data.index(f'"sha256":"{NO_DIGEST}"'.encode()) + len(b'"sha256":"')
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(
        path, data[:at] + hashlib.sha256(data).hexdigest().encode() + data[at + len(NO_DIGEST) :]
    )
    return info


@dataclass(frozen=True)
class CodedMask:
    """A mask file whose hash was checked and whose tensors are still coded."""

    info: MaskInfo
    path: Path
    tensors: dict[str, Tensor]
    head: dict[str, tuple[str, tuple[int, ...]]]  # parameter -> dtype and shape

    def decode(self, base: PreTrainedModel | None = None) -> MaskFile:
        """Decode masks, head and scores. What is allocated is bounded by the parameters of `base`,
        without one by `MOST_WEIGHTS`. Raises UsageError: the header declares more, or the coded
        bytes are not of its shapes."""
        shapes, heads = (
            self.info.shapes,
            {name: math.prod(shape) for name, (_, shape) in self.head.items()},
        )
        # A head holds embeddings and a classifier at most.
        most = MOST_WEIGHTS if base is None else 2 * sum(p.numel() for p in base.parameters())
        if (
            max(sum(heads.values()), sum(rows * columns for rows, columns in shapes.values()))
            > most
        ):
            raise _invalid(self.path, f"its header declares more than {most:,} weights")
        try:
            masks = {
                name: torch.from_numpy(
                    decode(self._of(f"mask.{name}", torch.uint8).numpy(), math.prod(shape))
                ).view(shape)
                for name, shape in shapes.items()
            }
            head = {
                name: self._parameter(name, DTYPES[dtype], shape)
                for name, (dtype, shape) in self.head.items()
            }
            stored = any(name.startswith("scores.") for name in self.tensors)
            scores = (
                {name: self._of(f"scores.{name}", torch.float16) for name in shapes}
                if stored
                else {}
            )
            rows = self.rows
        except (ValueError, KeyError, zlib.error) as error:
            raise _invalid(self.path, error) from None
        if any(scores[name].shape != shape for name, shape in shapes.items() if scores):
            raise _invalid(self.path, "its scores have other shapes than its masks")
        return MaskFile(self.info, masks, self.path, head, scores, rows)

    @property
    def rows(self) -> RowHashes:
        """Hashes of the labelled rows that trained it. Raises ValueError: they are not of their
        type."""
        return (
            all_rows(self._of("rows", torch.int64).numpy().view(np.uint64))
            if "rows" in self.tensors
            else NO_ROWS
        )

    def _of(self, name: str, dtype: torch.dtype) -> Tensor:
        if (tensor := self.tensors[name]).dtype != dtype:
            raise ValueError(f"{name} is {tensor.dtype}, not {dtype}")
        return tensor

    def _parameter(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        size = math.prod(shape) * dtype.itemsize
        raw = inflate(self._of(f"head.{name}", torch.uint8).numpy().tobytes(), size)
        if len(raw) != size:
            raise ValueError(f"head.{name} does not hold {size} bytes")
        return (
            torch.frombuffer(bytearray(raw), dtype=dtype).view(shape)
            if size
            else torch.empty(shape, dtype=dtype)
        )


def _invalid(path: Path, reason: object) -> UsageError:
    # The hash is right, so the file was written like this.
    return UsageError(f"{path} is no valid mask file: {reason}", "was it made by another version?")


def open_mask(path: Path) -> CodedMask:
    """Open a mask file and check its hash and header; a missing, damaged or foreign one is a
    `UsageError`."""
    try:
        data = user_path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"the mask file {path} cannot be read: {error.strerror}") from None
    size = struct.unpack("<Q", data[:8])[0] if len(data) >= 8 else len(data)
    if (digest := DIGEST.search(data, 8, min(8 + size, len(data)))) is None:
        raise UsageError(
            f"{path} is no mask file of kdcli, or damaged: no hash in its header",
            f"{COPY_AGAIN}; a model is no mask, and kdcli.load takes no .npy: `kdcli mask apply` "
            "makes it a model",
        )
    start, end = digest.span(1)
    if (
        hashlib.sha256(data[:start] + NO_DIGEST.encode() + data[end:]).hexdigest().encode()
        != digest[1]
    ):
        raise UsageError(f"{path} is damaged: its hash is not that of its content", COPY_AGAIN)
    try:
        header = _Header.model_validate(
            parse_json(data[8 : 8 + size], f"the header of {path}").get("__metadata__")
        )
        info = MaskInfo.model_validate_json(header.info)
        head = _HEAD.validate_python(parse_json(header.head.encode(), f"the header of {path}"))
        coded = CodedMask(info, path, load_tensors(data), head)
    except (ValidationError, SafetensorError, KeyError) as error:
        reason = (
            error.errors(include_url=False)[0]["msg"]
            if isinstance(error, ValidationError)
            else error
        )
        raise _invalid(path, reason) from None
    if header.format != FORMAT:
        raise UsageError(
            f"{path} is a mask file of format {header.format!r}; this version reads {FORMAT!r}"
        )
    return coded


def read_mask(path: Path, base: PreTrainedModel | None = None) -> MaskFile:
    """Open and decode a mask file; errors as in `open_mask` and `CodedMask.decode`."""
    return open_mask(path).decode(base)


def read_smp(path: Path, model: PreTrainedModel) -> dict[str, Tensor]:
    """Read the masks that the authors of static model pruning publish
    (https://arxiv.org/abs/2210.06210): `Matrix.name` -> bool [out, in]. Their `.npy` holds the bits
    of all matrices packed one after the other, in the string order of the weights' names: layer 0,
    1, 10, 11, 2, ..., and in a layer attention output, key, query, value, then feed-forward up and
    down. Raises UsageError: no such file, not an `.npy` of bytes, or not as many weights as the
    model has."""
    try:
        with path.open("rb") as file:
            packed = np.lib.format.read_array(file, allow_pickle=False)
    except OSError as error:
        raise UsageError(f"the mask file {path} cannot be read: {error.strerror}") from None
    except (ValueError, EOFError, SyntaxError, TokenError, MemoryError) as error:
        raise UsageError(f"{path} is no .npy array of bytes, or damaged: {error}") from None
    # Each matrix is a whole number of bytes in the models these files are for.
    ordered = sorted(matrices(model), key=lambda m: f"{m.path}.weight")
    sizes = [m.numel for m in ordered]
    if packed.dtype != np.uint8 or packed.size * 8 != sum(sizes) or any(n % 8 for n in sizes):
        raise UsageError(
            f"{path} holds {packed.size} values of {packed.dtype}; the {len(ordered)} matrices of "
            f"{model.config.model_type} have {sum(sizes)} weights, so {sum(sizes) / 8:g} bytes of "
            "uint8 are needed",
            "give the model the mask was made for, for example bert-base-uncased",
        )
    bits = torch.from_numpy(np.unpackbits(packed.reshape(-1)).astype(bool))
    by_name = {
        m.name: part.view(m.shape)
        for m, part in zip(ordered, torch.split(bits, sizes), strict=True)
    }
    return {m.name: by_name[m.name] for m in matrices(model)}


def check_base(mask: CodedMask | MaskFile, model: PreTrainedModel, source: str) -> None:
    """Raise a `UsageError` where a mask was made for another type or other weights than this base,
    called `source`, or with tokens that the base no longer has: it would read the task in other
    pieces."""
    info, kind = mask.info, str(model.config.model_type)
    if kind != info.model_type:
        raise UsageError(
            f"{mask.path} masks a {info.model_type} ({info.base}); {source} is a {kind}",
            f"use --base {info.base}",
        )
    if (own := base_hash(model)) != info.base_sha256:
        raise UsageError(
            f"{mask.path} was made for {info.base}, whose masked weights have the hash "
            f"{info.base_sha256}; "
            f"those of {source} have {own}",
            f"use the base it was made for: {info.base}",
        )
    if model.config.vocab_size < info.vocab_size:
        trimmed = (
            f"{mask.path} was made with {info.vocab_size:,} tokens; {source} has "
            f"{model.config.vocab_size:,} of them"
        )
        raise UsageError(
            trimmed, f"prune {source} itself, or use the base with all tokens: {info.base}"
        )
    _check_shapes(info.shapes, model, str(mask.path))


def check_fit(masks: Mapping[str, Tensor], model: PreTrainedModel, source: str) -> None:
    """Raise a `UsageError` where masks are not exactly those of a model's matrices, by names and
    shapes."""
    _check_shapes({name: tuple(mask.shape) for name, mask in masks.items()}, model, source)


def _check_shapes(
    masks: Mapping[str, tuple[int, ...]], model: PreTrainedModel, source: str
) -> None:
    shapes = {m.name: m.shape for m in matrices(model)}
    wrong = [f"no mask for matrix {n}" for n in shapes if n not in masks]
    wrong += [f"a mask for {n}, which the model does not have" for n in masks if n not in shapes]
    wrong += [
        f"the mask of {n} is {' x '.join(map(str, mask))}, the matrix "
        f"{' x '.join(map(str, shapes[n]))}"
        for n, mask in masks.items()
        if n in shapes and mask != shapes[n]
    ]
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise UsageError(
            f"{source} does not fit the model: {wrong[0]}{more}", "use the base it was made for"
        )


def apply_masks(model: PreTrainedModel, masks: Mapping[str, Tensor]) -> None:
    """Set the removed weights of a model to zero, in place; errors as in `check_fit`."""
    check_fit(masks, model, "the mask")
    with torch.no_grad():
        for matrix in matrices(model):
            weight, rows = matrix.linear.weight, matrix.rows
            weight[rows] = weight[rows].masked_fill(~masks[matrix.name].to(weight.device), 0)
