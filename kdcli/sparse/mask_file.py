"""The mask file: all that a pruned task needs beside the base it shares with others, in one `.safetensors`.

Tensors: `mask.3.Q`, the coded bits of a matrix (`kdcli.sparse.coding`); `head.NAME`, a compressed parameter of the task
that the base does not have; `scores.3.Q`, float16, if scores are stored. The header holds `MaskInfo` and a SHA-256 of
the whole file, computed with the digits of that hash as zeros, so that any damaged byte is detected.
"""

import hashlib
import json
import re
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor
from transformers import PreTrainedModel

from kdcli.disk import disk_errors, write_atomic
from kdcli.errors import UsageError
from kdcli.models.matrices import matrices
from kdcli.sparse.coding import decode, encode

FORMAT = "kdcli-mask-1"
PUBLISHED = ".npy"  # ending of the masks of the SMP authors, see `read_smp`
DIGEST = re.compile(rb'"sha256":"([0-9a-f]{64})"')
NO_DIGEST = "0" * 64
DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float32, torch.float16, torch.bfloat16, torch.int64)}
COPY_AGAIN = "copy it again from where it was made"


class MaskInfo(BaseModel):
    """What a mask is for; `write_mask` fills in densities and shapes. Without a task the last fields are empty."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    base: str  # hub id or directory of the encoder it was made for
    base_sha256: str  # `base_hash` of that encoder
    model_type: str
    method: str
    density: float  # requested share of the weights that is kept
    densities: dict[str, float] = {}  # share that is kept, by matrix
    shapes: dict[str, tuple[int, int]] = {}  # rows and columns, by matrix
    task: str | None = None
    architecture: str | None = None  # class of transformers with the task's head; None: the bare encoder
    config: dict[str, Any] = {}  # settings of the task's model that differ from the base's, such as `id2label`
    labels: tuple[str, ...] = ()  # in the order of their numbers
    label_words: tuple[str, ...] = ()  # the words its head was made of, in the same order
    max_length: int | None = None  # tokens at which its rows are cut
    metrics: dict[str, float] = {}
    versions: dict[str, str] = {}  # of the packages that made it


@dataclass(frozen=True)
class MaskFile:
    """A mask file in memory; masks and scores by `Matrix.name`, [out, in]."""

    info: MaskInfo
    masks: dict[str, Tensor]  # bool, True is kept
    path: Path
    head: dict[str, Tensor] = field(default_factory=dict)  # by parameter name of the task's model
    scores: dict[str, Tensor] = field(default_factory=dict)  # float16; empty when they were not stored


def base_hash(model: PreTrainedModel) -> str:
    """SHA-256 of the matrices that masks are for: names, shapes and float32 weights. Call it before masking."""
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
) -> MaskInfo:
    """Write a mask file atomically; returns `info` with densities and shapes filled in. `masks`: by `Matrix.name`, bool
    [out, in]. `head`: parameters of the task's model that are not the base's, see `kdcli.sparse.load.task_part`.
    `scores`: by `Matrix.name`, to cut at another density later; stored in float16. Raises MachineError: the disk is
    full or not writable; an older file of that name is untouched."""
    densities = {name: float(mask.float().mean()) for name, mask in masks.items()}
    shapes = {name: (mask.shape[0], mask.shape[1]) for name, mask in masks.items()}
    info = info.model_copy(update={"densities": densities, "shapes": shapes})
    tensors = {f"mask.{name}": torch.from_numpy(encode(mask.cpu().numpy()).copy()) for name, mask in masks.items()}
    parts = {}
    for name, tensor in (head or {}).items():
        parts[name] = [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        # Compressed, as a head made of label words is mostly an identity matrix.
        tensors[f"head.{name}"] = torch.frombuffer(bytearray(zlib.compress(raw, 6)), dtype=torch.uint8)
    tensors |= {f"scores.{name}": t.detach().cpu().half().contiguous() for name, t in (scores or {}).items()}
    header = {"format": FORMAT, "sha256": NO_DIGEST, "info": info.model_dump_json(), "head": json.dumps(parts)}
    data = save_tensors(tensors, header)
    # With sorted keys in the header, whose order safetensors varies: equal masks are equal files.
    (size,) = struct.unpack("<Q", data[:8])
    keys = json.dumps(json.loads(data[8 : 8 + size]), sort_keys=True, separators=(",", ":")).encode()
    keys += b" " * (-len(keys) % 8)
    data = struct.pack("<Q", len(keys)) + keys + data[8 + size :]
    at = data.index(f'"sha256":"{NO_DIGEST}"'.encode()) + len(b'"sha256":"')
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, data[:at] + hashlib.sha256(data).hexdigest().encode() + data[at + len(NO_DIGEST) :])
    return info


def read_mask(path: Path) -> MaskFile:
    """Read a mask file; a missing, damaged or foreign one is a `UsageError`."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"the mask file {path} cannot be read: {error.strerror}") from None
    size = struct.unpack("<Q", data[:8])[0] if len(data) >= 8 else len(data)
    if (digest := DIGEST.search(data, 8, min(8 + size, len(data)))) is None:
        raise UsageError(
            f"{path} is no mask file of kdcli, or damaged: no hash in its header",
            f"{COPY_AGAIN}; a model is no mask, and kdcli.load takes no .npy: `kdcli mask apply` makes it a model",
        )
    start, end = digest.span(1)
    if hashlib.sha256(data[:start] + NO_DIGEST.encode() + data[end:]).hexdigest().encode() != digest[1]:
        raise UsageError(f"{path} is damaged: its hash is not that of its content", COPY_AGAIN)
    header = json.loads(data[8 : 8 + size]).get("__metadata__", {})
    if header.get("format") != FORMAT:
        raise UsageError(f"{path} is a mask file of format {header.get('format')!r}; this version reads {FORMAT!r}")
    try:
        info = MaskInfo.model_validate_json(header["info"])
        tensors = load_tensors(data)
        masks = {
            name: torch.from_numpy(decode(tensors[f"mask.{name}"].numpy(), shape[0] * shape[1])).view(shape)
            for name, shape in info.shapes.items()
        }
        head = {}
        for name, (dtype, shape) in json.loads(header["head"]).items():
            raw = bytearray(zlib.decompress(tensors[f"head.{name}"].numpy().tobytes()))
            head[name] = torch.frombuffer(raw, dtype=DTYPES[dtype]).view(shape)
    except (ValueError, KeyError, ValidationError, SafetensorError, zlib.error) as error:
        # The hash is right, so the file was written like this.
        raise UsageError(f"{path} is no valid mask file: {error}", "was it made by another version?") from None
    scores = {name.removeprefix("scores."): t for name, t in tensors.items() if name.startswith("scores.")}
    return MaskFile(info, masks, path, head, scores)


def read_smp(path: Path, model: PreTrainedModel) -> dict[str, Tensor]:
    """Read the masks that the authors of static model pruning publish (https://arxiv.org/abs/2210.06210): `Matrix.name`
    -> bool [out, in]. Their `.npy` holds the bits of all matrices packed one after the other, in the string order of
    the weights' names: layer 0, 1, 10, 11, 2, ..., and in a layer attention output, key, query, value, then
    feed-forward up and down. Raises UsageError: no such file, not an `.npy` of bytes, or not as many weights as the
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
            f"{model.config.model_type} have {sum(sizes)} weights, so {sum(sizes) / 8:g} bytes of uint8 are needed",
            "give the model the mask was made for, for example bert-base-uncased",
        )
    bits = torch.from_numpy(np.unpackbits(packed.reshape(-1)).astype(bool))
    by_name = {m.name: part.view(m.shape) for m, part in zip(ordered, torch.split(bits, sizes), strict=True)}
    return {m.name: by_name[m.name] for m in matrices(model)}


def check_base(mask: MaskFile, model: PreTrainedModel, source: str) -> None:
    """Raise a `UsageError` where a mask was made for another type or other weights than this base, called `source`."""
    info, kind = mask.info, str(model.config.model_type)
    if kind != info.model_type:
        raise UsageError(
            f"{mask.path} masks a {info.model_type} ({info.base}); {source} is a {kind}", f"use --base {info.base}"
        )
    if (own := base_hash(model)) != info.base_sha256:
        raise UsageError(
            f"{mask.path} was made for {info.base}, whose masked weights have the hash {info.base_sha256}; "
            f"those of {source} have {own}",
            f"use the base it was made for: {info.base}",
        )
    check_fit(mask.masks, model, str(mask.path))


def check_fit(masks: Mapping[str, Tensor], model: PreTrainedModel, source: str) -> None:
    """Raise a `UsageError` where masks are not exactly those of a model's matrices, by names and shapes."""
    shapes = {m.name: m.shape for m in matrices(model)}
    wrong = [f"no mask for matrix {n}" for n in shapes if n not in masks]
    wrong += [f"a mask for {n}, which the model does not have" for n in masks if n not in shapes]
    wrong += [
        f"the mask of {n} is {' x '.join(map(str, mask.shape))}, the matrix {' x '.join(map(str, shapes[n]))}"
        for n, mask in masks.items()
        if n in shapes and tuple(mask.shape) != shapes[n]
    ]
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise UsageError(f"{source} does not fit the model: {wrong[0]}{more}", "use the base it was made for")


def apply_masks(model: PreTrainedModel, masks: Mapping[str, Tensor]) -> None:
    """Set the removed weights of a model to zero, in place; errors as in `check_fit`."""
    check_fit(masks, model, "the mask")
    with torch.no_grad():
        for matrix in matrices(model):
            weight, rows = matrix.linear.weight, matrix.rows
            weight[rows] = weight[rows].masked_fill(~masks[matrix.name].to(weight.device), 0)
