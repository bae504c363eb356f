"""The mask file: all that a pruned task needs beside the base it shares with others, in one `.safetensors`.

Tensors: `mask.3.Q`, the coded bits of a matrix (`kdcli.sparse.coding`), `head.NAME`, a compressed parameter of the task
that the base does not have, and `scores.3.Q`, float16, when the scores were kept. The header holds `MaskInfo` and a
SHA-256 of the whole file, with the digits of that hash read as zeros, so that no damaged byte goes unnoticed.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
DIGEST = re.compile(rb'"sha256":"([0-9a-f]{64})"')
BLANK = "0" * 64
DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float32, torch.float16, torch.bfloat16, torch.int64)}
AGAIN = "copy it again from where it was made"


class MaskInfo(BaseModel):
    """What a mask is of.

    Attributes:
        base: hub id or directory of the encoder it was made for.
        base_sha256: `base_hash` of that encoder.
        model_type: of the encoder, as in its configuration.
        method: what made the mask.
        density: share of the weights that was to be kept.
        densities: share that is kept, by matrix; `write_mask` fills it in.
        shapes: rows and columns, by matrix; filled in too.
        task: its name; None for a mask that belongs to no task.
        architecture: class of transformers with the task's head; None for the bare encoder.
        config: settings of the task's model that differ from the base's, such as `id2label`.
        labels: the task's labels in the order of their numbers.
        label_words: the words its head was made of, in the same order.
        max_length: tokens at which its rows are cut; None for a mask that belongs to no task.
        metrics: what it scored.
        versions: name → version of what made it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    base: str
    base_sha256: str
    model_type: str
    method: str
    density: float
    densities: dict[str, float] = {}
    shapes: dict[str, tuple[int, int]] = {}
    task: str | None = None
    architecture: str | None = None
    config: dict[str, Any] = {}
    labels: tuple[str, ...] = ()
    label_words: tuple[str, ...] = ()
    max_length: int | None = None
    metrics: dict[str, float] = {}
    versions: dict[str, str] = {}


@dataclass(frozen=True)
class MaskFile:
    """A mask file in memory.

    Attributes:
        masks: by `Matrix.name`, bool [out, in]; True is kept.
        head: by parameter name of the task's model; empty for the bare encoder.
        scores: by `Matrix.name`, float16 [out, in]; empty when they were not kept.
        path: where it was read.
    """

    info: MaskInfo
    masks: dict[str, Tensor]
    path: Path
    head: dict[str, Tensor] = field(default_factory=dict)
    scores: dict[str, Tensor] = field(default_factory=dict)


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
    """Write a mask file whole or not at all.

    Args:
        masks: by `Matrix.name`, bool [out, in].
        head: parameters of the task's model that are not the base's, see `kdcli.sparse.load.task_part`.
        scores: by `Matrix.name`, so that another density can be cut from them later; stored in float16.

    Returns:
        `info` with densities and shapes filled in.

    Raises:
        MachineError: the disk is full or not writable; an older file of that name is untouched.
    """
    whole = info.model_copy(
        update={
            "densities": {name: float(mask.float().mean()) for name, mask in masks.items()},
            "shapes": {name: (mask.shape[0], mask.shape[1]) for name, mask in masks.items()},
        }
    )
    tensors = {f"mask.{name}": torch.from_numpy(encode(mask.cpu().numpy()).copy()) for name, mask in masks.items()}
    parts = {}
    for name, tensor in (head or {}).items():
        parts[name] = [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        # A head made of label words is mostly an identity matrix.
        tensors[f"head.{name}"] = torch.frombuffer(bytearray(zlib.compress(raw, 6)), dtype=torch.uint8)
    for name, tensor in (scores or {}).items():
        tensors[f"scores.{name}"] = tensor.detach().cpu().half().contiguous()
    said = {"format": FORMAT, "sha256": BLANK, "info": whole.model_dump_json(), "head": json.dumps(parts)}
    data = _in_order(save_tensors(tensors, said))
    empty_model = f'"sha256":"{BLANK}"'.encode()
    at = data.index(empty_model) + len(b'"sha256":"')
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, data[:at] + hashlib.sha256(data).hexdigest().encode() + data[at + len(BLANK) :])
    return whole


def read_mask(path: Path) -> MaskFile:
    """Read a mask file.

    Raises:
        UsageError: no such file, damaged, or no mask file; the message says which.
    """
    data = _checked(path)
    size = struct.unpack("<Q", data[:8])[0]
    said = json.loads(data[8 : 8 + size]).get("__metadata__", {})
    if said.get("format") != FORMAT:
        raise UsageError(f"{path} is a mask file of format {said.get('format')!r}; this version reads {FORMAT!r}")
    try:
        info = MaskInfo.model_validate_json(said["info"])
        tensors = load_tensors(data)
        masks = {
            name: torch.from_numpy(decode(tensors[f"mask.{name}"].numpy(), shape[0] * shape[1])).view(shape)
            for name, shape in info.shapes.items()
        }
        head = {
            name: _tensor(tensors[f"head.{name}"], dtype, shape)
            for name, (dtype, shape) in json.loads(said["head"]).items()
        }
    except (ValueError, KeyError, ValidationError, SafetensorError, zlib.error) as error:
        # Its hash is right: it was written like this.
        raise UsageError(f"{path} is no valid mask file: {error}", "was it made by another version?") from None
    scores = {name.removeprefix("scores."): t for name, t in tensors.items() if name.startswith("scores.")}
    return MaskFile(info, masks, path, head, scores)


def check_base(found: MaskFile, model: PreTrainedModel, source: str) -> None:
    """Refuse a base that a mask was not made for.

    Args:
        source: what the base is called in the message.

    Raises:
        UsageError: another model type, or weights whose hash differs; both are named.
    """
    info = found.info
    kind = str(model.config.model_type)
    if kind != info.model_type:
        raise UsageError(
            f"{found.path} masks a {info.model_type} ({info.base}); {source} is a {kind}", f"use --base {info.base}"
        )
    own = base_hash(model)
    if own != info.base_sha256:
        raise UsageError(
            f"{found.path} was made for {info.base}, whose masked weights have the hash {info.base_sha256}; "
            f"those of {source} have {own}",
            f"use the base it was made for: {info.base}",
        )
    check_fit(found.masks, model, str(found.path))


def check_fit(masks: Mapping[str, Tensor], model: PreTrainedModel, source: str) -> None:
    """Refuse masks that are not exactly those of a model's matrices.

    Raises:
        UsageError: a matrix without a mask, a mask without a matrix, or another shape.
    """
    shapes = {m.name: m.shape for m in matrices(model)}
    wrong = [f"no mask for matrix {n}" for n in shapes if n not in masks]
    wrong += [f"a mask for {n}, which the model does not have" for n in masks if n not in shapes]
    wrong += [
        f"the mask of {n} is {' × '.join(map(str, mask.shape))}, the matrix {' × '.join(map(str, shapes[n]))}"
        for n, mask in masks.items()
        if n in shapes and tuple(mask.shape) != shapes[n]
    ]
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise UsageError(f"{source} does not fit the model: {wrong[0]}{more}", "use the base it was made for")


def apply_masks(model: PreTrainedModel, masks: Mapping[str, Tensor]) -> None:
    """Set the removed weights of a model to zero, in place.

    Raises:
        UsageError: see `check_fit`.
    """
    check_fit(masks, model, "the mask")
    with torch.no_grad():
        for matrix in matrices(model):
            weight, mask = matrix.linear.weight, masks[matrix.name].to(matrix.linear.weight.device)
            if matrix.rows is None:
                weight.masked_fill_(~mask, 0)
            else:
                weight[matrix.rows] = weight[matrix.rows].masked_fill(~mask, 0)


def _in_order(data: bytes) -> bytes:
    """The same file with the keys of its header sorted: the library orders them anew each time, and a mask made again
    is to be the same to the byte."""
    (size,) = struct.unpack("<Q", data[:8])
    header = json.dumps(json.loads(data[8 : 8 + size]), sort_keys=True, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header + data[8 + size :]


def _tensor(coded: Tensor, dtype: str, shape: list[int]) -> Tensor:
    """A compressed parameter as it was."""
    raw = bytearray(zlib.decompress(coded.numpy().tobytes()))
    return torch.frombuffer(raw, dtype=DTYPES[dtype]).view(shape)


def _checked(path: Path) -> bytes:
    """The bytes of a mask file whose hash is right."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"the mask file {path} cannot be read: {error.strerror}") from None
    size = struct.unpack("<Q", data[:8])[0] if len(data) >= 8 else len(data)
    found = DIGEST.search(data, 8, min(8 + size, len(data)))
    if found is None:
        raise UsageError(
            f"{path} is no mask file of kdcli, or damaged: no hash in its header",
            f"{AGAIN}; a model is no mask, and an .npy of the SMP authors is for `kdcli mask apply` and `compact`",
        )
    start, end = found.span(1)
    blanked = data[:start] + BLANK.encode() + data[end:]
    if hashlib.sha256(blanked).hexdigest().encode() != found[1]:
        raise UsageError(f"{path} is damaged: its hash is not that of its content", AGAIN)
    return data
