"""Read and write mask files: everything that a pruned task needs in addition to its shared base.

A mask file is a `.safetensors` file with these tensors:

* `mask.3.Q`: the coded bits of a matrix.
* `head.NAME`: a compressed parameter of the task that the base does not have.
* `scores.3.Q`: the scores in float16, if they are stored.
* `rows`: the hashes of the labelled rows that trained the task, 8 bytes per row.

The header holds `MaskInfo` and a SHA-256 of the whole file, which is computed with zeros in place
of the hash's own digits. Any damaged byte is detected.

A matrix takes the smaller of two forms: the distances between kept weights, one byte each, or the
bits, packed eight to a byte. Both are Huffman-coded (deflate without matches, because random bits
have none). The result is 1.00 to 1.01 times the entropy.
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
from typing import Annotated, Any, Literal, TypedDict

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor
from transformers import PreTrainedModel

from kdcli.disk import MAX_BYTES, parse_json, user_path, write_atomic
from kdcli.errors import UsageError, first_problem
from kdcli.models.matrices import matrices
from kdcli.models.model import NO_ROWS, all_rows
from kdcli.types import Array, RowHashes

MASK_FORMAT = "kdcli-mask-1"
PUBLISHED = ".npy"  # suffix of the masks that the SMP authors published, see `read_smp`
DIGEST = re.compile(rb'"sha256":"([0-9a-f]{64})"')
NO_DIGEST = "0" * 64
STORED_DTYPES = {
    str(d).removeprefix("torch."): d
    for d in (torch.float32, torch.float16, torch.bfloat16, torch.int64)
}
MAX_WEIGHTS = 2**32  # maximum number of weights of a mask that is decoded without its base
COPY_AGAIN = "copy it again from the original file"


Dimension = Annotated[int, Field(ge=1, le=2**31)]
Size = Annotated[int, Field(ge=0, le=2**31)]
_HEAD: TypeAdapter[dict[str, tuple[str, tuple[Size, ...]]]] = TypeAdapter(
    dict[str, tuple[str, tuple[Size, ...]]]
)
GAPS, BITS = 0, 1  # the first byte of a coded mask, which names the form of the rest
STEP = 255  # a distance byte of this value skips 255 places without a kept weight


class _Header(BaseModel):
    """The strings that `write_mask` puts into safetensors' header."""

    format: str
    info: str
    head: str


class MaskInfo(BaseModel):
    """The facts about a mask, its base and its task.

    `write_mask` fills in densities and shapes. Without a task, the last fields are empty.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    base: str  # hub id or directory of the encoder it was made for
    base_sha256: str  # `base_hash` of that encoder
    model_type: str
    vocab_size: Dimension  # vocabulary with which the masked model was evaluated
    method: str
    density: float  # requested share of weights to keep
    densities: dict[str, float] = {}  # share of weights kept, by matrix
    shapes: dict[str, tuple[Dimension, Dimension]] = {}  # rows and columns, by matrix
    task: str | None = None
    # The class in transformers with the task's head, or None for the bare encoder.
    architecture: str | None = None
    # Settings of the task's model that differ from the base's, such as `id2label`.
    config: dict[str, Any] = {}
    labels: tuple[str, ...] = ()  # in the order of their numbers
    label_words: tuple[str, ...] = ()  # the words that its head was made from, in the same order
    max_length: Dimension | None = None  # maximum number of tokens per row
    # The pooling of its vectors, if the base does not define it.
    pooling: Literal["mean", "cls", "last"] | None = None
    metrics: dict[str, float] = {}
    versions: dict[str, str] = {}  # versions of the packages that made the mask


class BaseFacts(TypedDict):
    """The fields of `MaskInfo` that describe the base."""

    base: str
    base_sha256: str
    model_type: str
    vocab_size: int


class TaskFacts(TypedDict, total=False):
    """The fields of `MaskInfo` that describe the task. A workload sets the ones that it has."""

    task: str
    labels: tuple[str, ...]
    label_words: tuple[str, ...]
    max_length: int | None
    pooling: str | None


@dataclass(frozen=True)
class MaskFile:
    """A mask file in memory, with masks and scores by `Matrix.name`, [out, in]."""

    info: MaskInfo
    masks: dict[str, Tensor]  # bool; True means that a weight is kept
    path: Path
    head: dict[str, Tensor] = field(default_factory=dict)  # by parameter name of the task's model
    # float16; empty if the scores were not stored.
    scores: dict[str, Tensor] = field(default_factory=dict)
    # The rows that trained the mask, see `kdcli.models.model`.
    rows: RowHashes = field(default_factory=NO_ROWS.copy)


def base_facts(base: PreTrainedModel, source: str) -> BaseFacts:
    """Return the facts about the encoder at `source` that a mask records and `check_base` compares.

    Call it before masking.
    """
    return BaseFacts(
        base=source,
        base_sha256=base_hash(base),
        model_type=str(base.config.model_type),
        vocab_size=base.config.vocab_size,
    )


def base_hash(model: PreTrainedModel) -> str:
    """Return the SHA-256 of the matrices that masks cover: names, shapes and float32 weights."""
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
    """Write a mask file atomically, and return `info` with densities and shapes filled in.

    * `masks`: by `Matrix.name`, bool [out, in].
    * `head`: the parameters of the task's model that the base does not have (see
      `kdcli.deploy.sparse.loading.task_part`).
    * `scores`: by `Matrix.name`, to cut at another density later. They are stored in float16.
    * `rows`: hashes of the labelled rows that trained the mask.

    Raises MachineError if the disk is full or not writable. An older file of the same name is not
    changed in that case.
    """
    densities = {name: float(mask.float().mean()) for name, mask in masks.items()}
    shapes = {name: (mask.shape[0], mask.shape[1]) for name, mask in masks.items()}
    info = info.model_copy(update={"densities": densities, "shapes": shapes})
    tensors = {
        f"mask.{name}": torch.from_numpy(encode_mask(mask.cpu().numpy()).copy())
        for name, mask in masks.items()
    }
    parts = {}
    for name, tensor in (head or {}).items():
        parts[name] = [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        # Compress the parameters, because a head made of label words is mostly an identity matrix.
        tensors[f"head.{name}"] = torch.frombuffer(
            bytearray(zlib.compress(raw, 6)), dtype=torch.uint8
        )
    tensors |= {
        f"scores.{name}": t.detach().cpu().half().contiguous() for name, t in (scores or {}).items()
    }
    if len(rows):
        # Store them as signed integers, which every version of torch can save.
        tensors["rows"] = torch.from_numpy(rows.view(np.int64).copy())
    header = {
        "format": MASK_FORMAT,
        "sha256": NO_DIGEST,
        "info": info.model_dump_json(),
        "head": json.dumps(parts),
    }
    data = _with_sorted_header(save_tensors(tensors, header))
    write_atomic(path, _with_digest(data))
    return info


def _with_sorted_header(data: bytes) -> bytes:
    """Sort the keys of a safetensors header, whose order varies, so that equal masks give equal
    files."""
    (size,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + size])
    text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data[8 + size :]


def _with_digest(data: bytes) -> bytes:
    """Replace the zeros of `NO_DIGEST` by the hash of the whole file."""
    at = data.index(f'"sha256":"{NO_DIGEST}"'.encode()) + len(b'"sha256":"')
    digest = hashlib.sha256(data).hexdigest().encode()
    return data[:at] + digest + data[at + len(NO_DIGEST) :]


@dataclass(frozen=True)
class CodedMask:
    """A mask file whose hash is correct and whose tensors are still coded."""

    info: MaskInfo
    path: Path
    tensors: dict[str, Tensor]
    head: dict[str, tuple[str, tuple[int, ...]]]  # parameter -> dtype and shape

    def decode(self, base: PreTrainedModel | None = None) -> MaskFile:
        """Decode masks, head and scores.

        Memory is bounded by the number of parameters of `base`, or by `MAX_WEIGHTS` without a base.
        Raises UsageError if the header declares more, or if the coded bytes do not have its shapes.
        """
        shapes = self.info.shapes
        heads = {name: math.prod(shape) for name, (_, shape) in self.head.items()}
        # A head holds at most embeddings and a classifier.
        limit = MAX_WEIGHTS if base is None else 2 * sum(p.numel() for p in base.parameters())
        if (
            max(sum(heads.values()), sum(rows * columns for rows, columns in shapes.values()))
            > limit
        ):
            raise _invalid(self.path, f"its header declares more than {limit:,} weights")
        try:
            masks = {
                name: torch.from_numpy(
                    decode_mask(self._of(f"mask.{name}", torch.uint8).numpy(), math.prod(shape))
                ).view(shape)
                for name, shape in shapes.items()
            }
            head = {
                name: self._parameter(name, STORED_DTYPES[dtype], shape)
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
        """The hashes of the labelled rows that trained the mask.

        Raises ValueError if they have the wrong type.
        """
        return (
            all_rows(self._of("rows", torch.int64).numpy().view(np.uint64))
            if "rows" in self.tensors
            else NO_ROWS
        )

    def _of(self, name: str, dtype: torch.dtype) -> Tensor:
        if (tensor := self.tensors[name]).dtype != dtype:
            raise ValueError(f"{name} must be {dtype}, got {tensor.dtype}")
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
    # The hash is correct, so the file was written in this state.
    return UsageError(
        f"{path} is not a valid mask file: {reason}", "another version of kdcli may have written it"
    )


def open_mask(path: Path) -> CodedMask:
    """Open a mask file and check its hash and header.

    Raises UsageError if the file is missing, damaged, or not a mask file.
    """
    try:
        data = user_path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"the mask file {path} cannot be read: {error.strerror}") from None
    size = struct.unpack("<Q", data[:8])[0] if len(data) >= 8 else len(data)
    if MAX_BYTES < size <= len(data):
        raise UsageError(
            f"{path} is not a mask file of kdcli: its header has {size:,} bytes, and at most "
            f"{MAX_BYTES:,} are allowed",
            COPY_AGAIN,
        )
    if (digest := DIGEST.search(data, 8, min(8 + size, len(data)))) is None:
        raise UsageError(
            f"{path} is not a mask file of kdcli, or is damaged: its header has no hash",
            f"{COPY_AGAIN}; a model is not a mask, and an .npy needs `kdcli mask apply`, which "
            "makes it a model",
        )
    start, end = digest.span(1)
    if (
        hashlib.sha256(data[:start] + NO_DIGEST.encode() + data[end:]).hexdigest().encode()
        != digest[1]
    ):
        raise UsageError(f"{path} is damaged: its content does not match its hash", COPY_AGAIN)
    where = f"the header of {path}"
    values: object = None
    try:
        values = parse_json(data[8 : 8 + size], where).get("__metadata__")
        header = _Header.model_validate(values)
        values = parse_json(header.info.encode(), where)
        info = MaskInfo.model_validate_json(header.info)
        values = parse_json(header.head.encode(), where)
        head = _HEAD.validate_python(values)
        coded = CodedMask(info, path, load_tensors(data), head)
    except (ValidationError, SafetensorError, KeyError, UnicodeError) as error:
        reason = first_problem(error, values) if isinstance(error, ValidationError) else error
        raise _invalid(path, reason) from None
    if header.format != MASK_FORMAT:
        raise UsageError(
            f"{path} is a mask file of format {header.format!r}; this version of kdcli reads "
            f"{MASK_FORMAT!r}"
        )
    return coded


def read_mask(path: Path) -> MaskFile:
    """Open and decode a mask file.

    Raises UsageError if the file is missing, damaged, or not a mask file.
    """
    return open_mask(path).decode()


def read_smp(path: Path, model: PreTrainedModel) -> dict[str, Tensor]:
    """Read the masks that the authors of static model pruning publish.

    The paper is https://arxiv.org/abs/2210.06210. Returns `Matrix.name` -> bool [out, in]. The
    authors' `.npy` holds the bits of all matrices, packed one after the other in the string order
    of the weights' names: layers 0, 1, 10, 11, 2, ..., and within a layer attention output, key,
    query and value, then feed-forward up and down.

    Raises UsageError if the file does not exist, is not an `.npy` of bytes, or does not hold as
    many weights as the model has.
    """
    try:
        with path.open("rb") as file:
            packed = np.lib.format.read_array(file, allow_pickle=False)
    except OSError as error:
        raise UsageError(f"the mask file {path} cannot be read: {error.strerror}") from None
    except (ValueError, EOFError, SyntaxError, TokenError, MemoryError) as error:
        raise UsageError(f"{path} is not an .npy array of bytes, or is damaged: {error}") from None
    # In the models that these files are for, each matrix is a whole number of bytes.
    ordered = sorted(matrices(model), key=lambda m: f"{m.path}.weight")
    sizes = [m.numel for m in ordered]
    if packed.dtype != np.uint8 or packed.size * 8 != sum(sizes) or any(n % 8 for n in sizes):
        raise UsageError(
            f"{path} holds {packed.size} values of {packed.dtype}; the {len(ordered)} matrices of "
            f"{model.config.model_type} have {sum(sizes)} weights, so {sum(sizes) / 8:g} bytes of "
            "uint8 are needed",
            "use the model that the mask was made for, for example bert-base-uncased",
        )
    bits = torch.from_numpy(np.unpackbits(packed.reshape(-1)).astype(bool))
    by_name = {
        m.name: part.view(m.shape)
        for m, part in zip(ordered, torch.split(bits, sizes), strict=True)
    }
    return {m.name: by_name[m.name] for m in matrices(model)}


def check_base(mask: CodedMask | MaskFile, model: PreTrainedModel, source: str) -> None:
    """Check that a mask was made for this base, which is called `source` in errors.

    Raises UsageError if the mask was made for another model type or other weights, or with tokens
    that the base no longer has, because texts would then be segmented differently.
    """
    info, kind = mask.info, str(model.config.model_type)
    if kind != info.model_type:
        raise UsageError(
            f"{mask.path} masks a {info.model_type} ({info.base}), but {source} is a {kind}",
            f"use --base {info.base}",
        )
    if (base_sha256 := base_hash(model)) != info.base_sha256:
        raise UsageError(
            f"{mask.path} was made for {info.base}, whose masked weights have the hash "
            f"{info.base_sha256}, but the weights of {source} have {base_sha256}",
            f"use the base that the mask was made for: {info.base}",
        )
    if model.config.vocab_size < info.vocab_size:
        trimmed = (
            f"{mask.path} was made with {info.vocab_size:,} tokens, but {source} has only "
            f"{model.config.vocab_size:,} of them"
        )
        raise UsageError(
            trimmed, f"prune {source} itself, or use the base with all tokens: {info.base}"
        )
    _check_shapes(info.shapes, model, str(mask.path))


def _check_shapes(
    masks: Mapping[str, tuple[int, ...]], model: PreTrainedModel, source: str
) -> None:
    shapes = {m.name: m.shape for m in matrices(model)}
    wrong = [f"no mask for matrix {n}" for n in shapes if n not in masks]
    wrong += [f"a mask for {n}, which the model does not have" for n in masks if n not in shapes]
    wrong += [
        f"the mask of {n} is {' x '.join(map(str, mask))}, but the matrix is "
        f"{' x '.join(map(str, shapes[n]))}"
        for n, mask in masks.items()
        if n in shapes and mask != shapes[n]
    ]
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise UsageError(
            f"{source} does not fit the model: {wrong[0]}{more}",
            "use the base that the mask was made for",
        )


def apply_masks(model: PreTrainedModel, masks: Mapping[str, Tensor]) -> None:
    """Set the removed weights of a model to zero, in place.

    Raises UsageError if the masks do not fit the model.
    """
    _check_shapes({name: tuple(mask.shape) for name, mask in masks.items()}, model, "the mask")
    with torch.no_grad():
        for matrix in matrices(model):
            weight, rows = matrix.linear.weight, matrix.rows
            weight[rows] = weight[rows].masked_fill(~masks[matrix.name].to(weight.device), 0)


def encode_mask(mask: Array) -> Array:
    """Encode a bool mask of any shape, in C order, as uint8 [bytes]."""
    flat = mask.reshape(-1)
    forms = {BITS: _huffman(np.packbits(flat).tobytes())}
    # At higher densities, distances are longer than bits, and slow.
    if np.count_nonzero(flat) < 0.25 * flat.size:
        # The number of removed weights before each kept weight, as bytes.
        gaps = np.diff(np.flatnonzero(flat), prepend=-1) - 1
        steps = gaps // STEP
        distances = np.full(int(steps.sum()) + gaps.size, STEP, np.uint8)
        distances[np.cumsum(steps + 1) - 1] = gaps - STEP * steps
        forms[GAPS] = _huffman(distances.tobytes())
    form = min(forms, key=lambda f: len(forms[f]))
    return np.frombuffer(bytes([form]) + forms[form], np.uint8)


def decode_mask(coded: Array, size: int) -> Array:
    """Decode a mask of `size` bits to bool [size].

    Raises ValueError if the bytes are not a mask of that size.
    """
    data = coded.tobytes()
    try:
        # A Huffman code without matches has at least one bit per byte, so a longer output is not a
        # mask.
        raw = np.frombuffer(inflate(data[1:], 8 * len(data), wbits=-zlib.MAX_WBITS), np.uint8)
    except zlib.error as error:
        raise ValueError(f"cannot be decompressed: {error}") from None
    if data[:1] == bytes([BITS]):
        if raw.size != (size + 7) // 8:
            raise ValueError(f"{raw.size} bytes do not hold {size} bits")
        return np.unpackbits(raw, count=size).astype(bool)
    if data[:1] != bytes([GAPS]):
        raise ValueError("encoded in a form that this version does not know")
    kept = raw < STEP
    # A distance counts the removed weights in between. The kept weight takes a place too.
    places = np.cumsum(raw.astype(np.int64) + kept)[kept] - 1
    if places.size and places[-1] >= size:
        raise ValueError(f"it keeps a weight at place {places[-1]}, but has {size} places")
    mask = np.zeros(size, bool)
    mask[places] = True
    return mask


def inflate(data: bytes, limit: int, wbits: int = zlib.MAX_WBITS) -> bytes:
    """Decompress at most `limit` bytes.

    Raises ValueError if the data hold more or end too soon, and zlib.error if they are damaged.
    """
    stream = zlib.decompressobj(wbits)
    raw = stream.decompress(data, limit + 1)
    if len(raw) > limit or not stream.eof:
        raise ValueError(f"cannot be decompressed to at most {limit:,} bytes")
    return raw


def _huffman(data: bytes) -> bytes:
    coder = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS, 9, zlib.Z_HUFFMAN_ONLY)
    return coder.compress(data) + coder.flush()
