"""`kdcli mask`: look at mask files, compare two, put one onto its base as a masked or a compacted model.

The base is the one the mask names unless another place of the same weights is given. The masks that the authors of
static model pruning publish (`.npy`) name none, so there it must be given.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor
from transformers import AutoModel, PreTrainedModel

from kdcli.errors import UsageError
from kdcli.models.custom_class import is_custom
from kdcli.models.heads import kind_of_head, tokenizer_for
from kdcli.models.load import load_weights, save_model
from kdcli.models.matrices import matrices
from kdcli.pruners.selection import MASKINGS, down_to_one, select
from kdcli.report.text import bytes_of, number, percent
from kdcli.sparse.compact import compact
from kdcli.sparse.load import with_head
from kdcli.sparse.mask_file import MaskFile, MaskInfo, apply_masks, check_base, read_mask
from kdcli.sparse.smp_file import read_smp
from kdcli.training.progress import Progress
from kdcli.training.run_dir import numbered

PUBLISHED = ".npy"
"""Suffix of the authors' files."""


@dataclass(frozen=True)
class Shown:
    """Facts about a mask, or about two; `table` is how they stand on a terminal."""

    facts: dict[str, Any]
    header: list[str]
    rows: list[list[str]]
    note: str = ""

    def to_json(self) -> str:
        """The facts."""
        return json.dumps(self.facts, indent=2)

    def renderables(self) -> Iterable[Any]:
        """A table, and a sentence."""
        table = Table(*self.header[:1], header_style="bold")
        for name in self.header[1:]:
            table.add_column(name, justify="right")
        for row in self.rows:
            table.add_row(*row)
        yield table
        if self.note:
            yield self.note


@dataclass(frozen=True)
class Made:
    """A model that was made of a base and a mask."""

    folder: Path
    facts: dict[str, Any]

    def to_json(self) -> str:
        """Where it is and how big."""
        return json.dumps({"folder": str(self.folder), **self.facts}, indent=2)

    def renderables(self) -> Iterable[Any]:
        """Where it is and how to load it."""
        yield f"{self.facts['kept']:.1%} of {self.facts['weights']:,} weights kept, {bytes_of(self.facts['bytes'])}"
        yield f"model in {self.folder}: {self.facts['loads']}"


def info(file: Path) -> Shown:
    """What a mask file says of itself, and how much each type of matrix keeps.

    Raises:
        UsageError: see `read_mask`.
    """
    found = read_mask(file)
    facts = found.info.model_dump(mode="json") | {"bytes": file.stat().st_size, "scores": bool(found.scores)}
    kept = _kept(found.masks)
    facts["density_realised"] = sum(k for k, _ in kept.values()) / sum(n for _, n in kept.values())
    by_kind: dict[str, list[tuple[int, int]]] = {}
    for name, counts in kept.items():
        by_kind.setdefault(name.split(".")[1], []).append(counts)
    said = found.info
    rows = [
        ["base", f"{said.base} ({said.model_type})"],
        ["base sha256", said.base_sha256],
        ["task", said.task or ""],
        ["labels", ", ".join(said.labels)],
        ["label words", ", ".join(said.label_words)],
        ["tokens a row", "" if said.max_length is None else str(said.max_length)],
        ["method", said.method],
        ["density asked for", f"{percent(said.density)}%"],
        ["density", f"{percent(facts['density_realised'], 4)}%"],
        *([kind, f"{percent(sum(k for k, _ in of) / sum(n for _, n in of))}%"] for kind, of in by_kind.items()),
        *([name, number(value)] for name, value in said.metrics.items()),
        ["size", bytes_of(facts["bytes"])],
        ["scores", "kept: another density can be cut" if found.scores else "not kept"],
    ]
    return Shown(facts, ["mask", str(file.name)], [row for row in rows if row[1]], "\n".join(down_to_one(found.masks)))


def diff(first: Path, second: Path) -> Shown:
    """How much two masks of the same shapes have in common, matrix by matrix.

    Raises:
        UsageError: see `read_mask`; they mask other matrices.
    """
    one, other = read_mask(first), read_mask(second)
    if one.info.shapes != other.info.shapes:
        raise UsageError(f"{first} and {second} are for models of other shapes", "compare masks of one base")
    rows, facts = [], {}
    both_all = either_all = 0
    for name, mask in one.masks.items():
        both, either = int((mask & other.masks[name]).sum()), int((mask | other.masks[name]).sum())
        both_all, either_all = both_all + both, either_all + either
        shares = float(mask.float().mean()), float(other.masks[name].float().mean()), both / max(1, either)
        facts[name] = dict(zip(("first", "second", "shared"), shares, strict=True))
        rows.append([name, *(f"{share:.1%}" for share in shares)])
    shared = both_all / max(1, either_all)
    differing = "" if one.info.base_sha256 == other.info.base_sha256 else "They were made for different weights. "
    note = f"{differing}{shared:.1%} of the weights that either keeps are kept by both."
    return Shown({"shared": shared, "matrices": facts}, ["matrix", first.name, second.name, "shared"], rows, note)


def apply(
    file: Path,
    *,
    base: str | None,
    sparsity: float | None,
    masking: str,
    compacted: bool,
    drop_rows_below: int,
    output_dir: Path | None,
    trust_remote_code: bool,
) -> Made:
    """Save the model that a mask makes of its base.

    Args:
        base: where the base is; None: where the mask says.
        sparsity: cut the mask's scores anew, so that this share goes; needs a file that holds scores.
        masking: how they are cut, see `kdcli.pruners.selection`.
        compacted: remove what is empty instead of storing zeros.
        drop_rows_below: see `kdcli.sparse.compact.compact`.
        output_dir: default runs/mask-NAME, numbered.

    Raises:
        UsageError: see `read_mask`, `check_base` and `compact`; no scores to cut; a directory that is not empty.
    """
    found, model, source = _opened(file, base, trust_remote_code)
    masks = found.masks if sparsity is None else _cut(found, model, sparsity, masking)
    folder = output_dir or numbered(f"mask-{file.stem}", taken=False)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"output directory {folder} is not empty", "choose another with -o")
    apply_masks(model, masks)
    whole = with_head(model, found.info, found.head, str(file))
    of_words = kind_of_head(whole.config, type(whole).__name__) == "tokens"
    tokenizer = tokenizer_for(source, of_words=of_words, trust_remote_code=trust_remote_code)
    if found.info.max_length is not None:
        tokenizer.model_max_length = found.info.max_length
    if compacted:
        whole = compact(whole, drop_rows_below=drop_rows_below)
    save_model(whole, tokenizer, folder)
    loads = f"{type(whole).__name__}.from_pretrained('{folder}')"
    if is_custom(whole):
        loads = f"kdcli.load('{folder}'), or from_pretrained(…, trust_remote_code=True)"
    kept = _kept(masks)
    total = sum(n for _, n in kept.values())
    for line in (f"{source} under {file}", *down_to_one(masks)):
        Progress.log(line)
    return Made(
        folder,
        {
            "kept": sum(k for k, _ in kept.values()) / total,
            "weights": total,
            "bytes": sum(f.stat().st_size for f in folder.glob("*.safetensors")),
            "loads": loads,
        },
    )


def _opened(file: Path, base: str | None, trust_remote_code: bool) -> tuple[MaskFile, PreTrainedModel, str]:
    """A mask and the encoder it is for, checked against each other."""
    if file.suffix == PUBLISHED:
        if base is None:
            raise UsageError(f"{file} does not say which model it masks", "give it: --base bert-base-uncased")
        model = load_weights(base, AutoModel, trust_remote_code=trust_remote_code).eval()
        masks = read_smp(file, model)
        kept = _kept(masks)
        density = sum(k for k, _ in kept.values()) / sum(n for _, n in kept.values())
        said = MaskInfo(
            base=base, base_sha256="", model_type=str(model.config.model_type), method="smp", density=density
        )
        return MaskFile(said, masks, file), model, base
    found = read_mask(file)
    source = base or found.info.base
    model = load_weights(source, AutoModel, trust_remote_code=trust_remote_code).eval()
    check_base(found, model, source)
    return found, model, source


def _cut(found: MaskFile, model: PreTrainedModel, sparsity: float, masking: str) -> dict[str, Tensor]:
    if not 0 <= sparsity < 1:
        raise UsageError(f"--sparsity must be at least 0 and less than 1, got {sparsity:g}", "0.9 removes 90 %")
    if masking not in MASKINGS:
        raise UsageError(f"unknown masking '{masking}'", f"allowed: {', '.join(MASKINGS)}")
    if not found.scores:
        raise UsageError(
            f"{found.path} holds no scores to cut at another density",
            "give scores.safetensors, which a run of prune leaves beside its mask",
        )
    kinds = {m.name: m.kind for m in matrices(model)}
    scores = {name: tensor.to(torch.float32) for name, tensor in found.scores.items()}
    return select(masking, scores, kinds, 1 - sparsity)


def _kept(masks: Mapping[str, Tensor]) -> dict[str, tuple[int, int]]:
    """Weights kept and all, by matrix."""
    return {name: (int(mask.sum()), mask.numel()) for name, mask in masks.items()}
