"""`kdcli mask`: show a mask file, compare two files, or save the masked or compacted model."""

import filecmp
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import torch
from rich.table import Column, Table
from torch import Tensor
from transformers import AutoModel, PreTrainedModel

from kdcli.data.tasks import named_tasks, task_of
from kdcli.deploy.sparse.compact import compact_model
from kdcli.deploy.sparse.loading import describe_head, published_mask, with_head
from kdcli.deploy.sparse.mask_file import (
    PUBLISHED,
    MaskFile,
    apply_masks,
    check_base,
    open_mask,
    read_mask,
)
from kdcli.disk import STAGED, check_writable, content_of, fill_dir, is_half_filled, remove
from kdcli.engine.inputs import check_not_input
from kdcli.engine.run_dir import lock_directory, numbered
from kdcli.errors import UsageError
from kdcli.messages import log
from kdcli.models.custom_class import is_custom
from kdcli.models.embedding_format import EmbeddingFormat, read_format, save_embedder
from kdcli.models.files import CONFIG_FILE
from kdcli.models.heads import kind_of_head, tokenizer_for
from kdcli.models.load import check_case, load_weights, location
from kdcli.models.matrices import matrices
from kdcli.models.model import all_rows, training_rows
from kdcli.pruners.selection import down_to_one, select_masks
from kdcli.recipe.resolve import resolve
from kdcli.recipe.sections import Section
from kdcli.report.text import bytes_of, number, percent
from kdcli.verbs.mask.settings import ApplyOptions, CompactOptions

SCORES = "scores.safetensors"
"""The file next to a mask in which prune keeps the scores."""


@dataclass(frozen=True)
class MaskResult:
    """The result of a mask command.

    Attributes:
        facts: The values that `--json` prints.
        lines: Lines for the terminal.
        table: A table for the terminal, the header first.
    """

    facts: Mapping[str, object]
    lines: list[str]
    table: list[list[str]] = field(default_factory=list)

    def to_json(self) -> str:
        return json.dumps(self.facts, indent=2)

    def renderables(self) -> Iterable[object]:
        if self.table:
            (first, *others), *rows = self.table
            grid = Table(
                first, *(Column(name, justify="right") for name in others), header_style="bold"
            )
            for row in rows:
                grid.add_row(*row)
            yield grid
        yield from self.lines


def info(file: Path) -> MaskResult:
    """Describe a mask file and the density of each kind of matrix.

    Raises:
        UsageError: The file is missing, damaged, or not a mask.
    """
    mask = read_mask(file)
    about, has_scores = mask.info, bool(mask.scores)
    is_beside = file.with_name(SCORES).is_file()
    elsewhere = f"not here, but {SCORES} lies beside it" if is_beside else "not kept"
    size, density = file.stat().st_size, _density(mask.masks.values())
    facts = about.model_dump(mode="json") | {
        "bytes": size,
        "scores": has_scores,
        "density": density,
        "density_asked": about.density,
    }
    by_kind: dict[str, list[Tensor]] = {}
    for name, bits in mask.masks.items():
        by_kind.setdefault(name.split(".")[1], []).append(bits)
    table = [
        ["mask", file.name],
        ["base", f"{about.base} ({about.model_type})"],
        ["base sha256", about.base_sha256],
        ["task", about.task or ""],
        ["labels", ", ".join(about.labels)],
        ["label words", ", ".join(about.label_words)],
        ["pooling", about.pooling or ""],
        ["tokens a row", "" if about.max_length is None else str(about.max_length)],
        ["method", about.method],
        ["density asked for", f"{percent(about.density)}%"],
        ["density", f"{percent(density, 4)}%"],
        *([kind, f"{percent(_density(masks))}%"] for kind, masks in by_kind.items()),
        *([name, number(value)] for name, value in about.metrics.items()),
        ["size", bytes_of(size)],
        ["scores", "kept: another density can be cut" if has_scores else elsewhere],
    ]
    return MaskResult(facts, down_to_one(mask.masks), [row for row in table if row[1]])


def diff(first: Path, second: Path) -> MaskResult:
    """Compare two masks of the same shapes, matrix by matrix.

    Raises:
        UsageError: A file is missing, damaged or not a mask, or the shapes differ.
    """
    one, other = read_mask(first), read_mask(second)
    if one.info.shapes != other.info.shapes:
        raise UsageError(
            f"{first} and {second} are for models of other shapes", "compare masks of one base"
        )
    table, facts = [["matrix", first.name, second.name, "shared"]], {}
    both_all = either_all = 0
    for name, mask in one.masks.items():
        both, either = int((mask & other.masks[name]).sum()), int((mask | other.masks[name]).sum())
        both_all, either_all = both_all + both, either_all + either
        shares = (
            float(mask.float().mean()),
            float(other.masks[name].float().mean()),
            both / max(1, either),
        )
        facts[name] = dict(zip(("first", "second", "shared"), shares, strict=True))
        table.append([name, *(f"{share:.1%}" for share in shares)])
    shared = both_all / max(1, either_all)
    differing = (
        ""
        if one.info.base_sha256 == other.info.base_sha256
        else "They were made for different weights. "
    )
    note = f"{differing}{shared:.1%} of the weights that either keeps are kept by both."
    return MaskResult({"shared": shared, "matrices": facts}, [note], table)


def apply(own: ApplyOptions, sets: Sequence[str], output_dir: Path | None) -> MaskResult:
    """Apply a mask to its base, and save the model.

    Args:
        own: The mask and its base. `CompactOptions` remove empty rows instead of storing zeros; see
            `kdcli.deploy.sparse.compact`.
        sets: `head.kind` and `head.words` of an `.npy`.
        output_dir: The directory; by default runs/mask-NAME, numbered.

    Raises:
        UsageError: The file is damaged or not a mask, it is for another base, it has no scores to
            select from, the model cannot be compacted, or the directory is not empty.
    """
    if own.masking is not None and own.sparsity is None:
        raise UsageError("--masking changes nothing without --sparsity", "add --sparsity")
    file, base = own.file, own.base
    folder = output_dir or numbered(f"mask-{file.stem}", taken=False)
    check_writable(folder, directory=True)
    check_not_input(folder, [str(file), *([base] if base is not None else [])], "-o")
    if _is_occupied(folder) and not (folder / CONFIG_FILE).is_file():
        raise _not_empty(folder)
    mask, model, source = _open(file, base, own.task, sets)
    masks = mask.masks
    if own.sparsity is not None:
        masks = _cut(mask, model, own.sparsity, own.masking or "proportional")
    apply_masks(model, masks)
    whole = with_head(model, mask.info, mask.head, str(file))
    of_words = kind_of_head(whole.config, type(whole).__name__) == "tokens"
    tokenizer = tokenizer_for(source, of_words=of_words)
    if mask.info.max_length is not None:
        tokenizer.model_max_length = mask.info.max_length
    if isinstance(own, CompactOptions):
        whole = compact_model(whole, drop_rows_below=own.drop_rows_below)
    rows = all_rows(mask.rows, training_rows(location(source)))
    stored = EmbeddingFormat(mask.info.pooling) if mask.info.pooling else None
    fmt = None if mask.info.architecture is not None else read_format(source) or stored
    if fmt is not None:
        check_case(tokenizer, source)
    save = partial(save_embedder, whole, tokenizer, fmt, rows=rows)
    with lock_directory(folder):
        if not _is_occupied(folder):
            with fill_dir(folder, last=CONFIG_FILE) as staged:
                save(staged)
        elif _holds(folder, save):
            # A killed command may have left this directory after it moved the last file.
            remove(folder / STAGED)
            log(f"{folder} is done already")
        else:
            raise _not_empty(folder)
    log(f"{source} under {file}", *down_to_one(masks))
    return _applied(file, mask, masks, whole, folder)


def _is_occupied(folder: Path) -> bool:
    """Whether a directory holds anything else than what a killed command left half filled."""
    is_filled = folder.is_dir() and bool(content_of(folder))
    return is_filled and not is_half_filled(folder, CONFIG_FILE)


def _not_empty(folder: Path) -> UsageError:
    return UsageError(f"output directory {folder} is not empty", "choose another with -o")


def _holds(folder: Path, save: Callable[[Path], None]) -> bool:
    """Whether a directory holds exactly the files that `save` writes."""
    with TemporaryDirectory() as aside:
        save(Path(aside))
        saved = [file.relative_to(aside) for file in Path(aside).rglob("*") if file.is_file()]
        held = [
            file.relative_to(folder)
            for inside in content_of(folder)
            for file in (inside, *inside.rglob("*"))
            if file.is_file()
        ]
        return sorted(saved) == sorted(held) and all(
            filecmp.cmp(folder / name, Path(aside, name), shallow=False) for name in saved
        )


def _applied(
    file: Path,
    mask: MaskFile,
    masks: Mapping[str, Tensor],
    model: PreTrainedModel,
    folder: Path,
) -> MaskResult:
    """Describe the saved model."""
    loads = f"{type(model).__name__}.from_pretrained('{folder}')"
    if is_custom(model):
        loads = f"kdcli.load('{folder}').model, or from_pretrained(..., trust_remote_code=True)"
    kept, total = _density(masks.values()), sum(m.numel() for m in masks.values())
    size = sum(f.stat().st_size for f in folder.glob("model*.safetensors"))
    facts = {"folder": str(folder), "kept": kept, "weights": total, "bytes": size, "loads": loads}
    lines = [
        f"{kept:.1%} of {total:,} weights kept, {bytes_of(size)}",
        f"model in {folder}: {loads}",
    ]
    if file.suffix == PUBLISHED:
        lines.insert(0, f"the file holds bits alone and was taken for {describe_head(mask.info)}")
        facts |= mask.info.model_dump(
            mode="json", include={"task", "labels", "label_words", "architecture"}
        )
    return MaskResult(facts, lines)


class _Head(Section):
    """`head:` of an `.npy` of the SMP authors."""

    kind: Literal["embedding", "mlm"] = "mlm"
    words: list[str] | None = None


class _HeadRecipe(Section):
    """The keys that `--set` takes."""

    verb: Literal["mask"] = "mask"
    head: _Head = _Head()


def _open(
    file: Path,
    base: str | None,
    task: str | None,
    sets: Sequence[str],
) -> tuple[MaskFile, PreTrainedModel, str]:
    """Open a mask and the encoder that it masks, and check them against each other.

    Returns:
        The mask, the encoder, and the encoder's source.
    """
    if file.suffix == PUBLISHED:
        if base is None:
            raise UsageError(
                f"{file} does not say which model it masks", "give it: --base bert-base-uncased"
            )
        head = resolve(_HeadRecipe, recipe=None, sets=sets).recipe.head
        # The authors' file names begin with the task.
        trained_on = (
            task_of(task) if task is not None else named_tasks().get(file.stem.split("_")[0])
        )
        if trained_on is None and sets:
            raise UsageError(
                f"{file} does not say which task its head is for", "give it: --task TASK"
            )
        mask, model = published_mask(file, base, trained_on, kind=head.kind, words=head.words)
        return mask, model, base
    if task is not None or sets:
        raise UsageError(
            f"--task and --set are for an .npy of the SMP authors; {file} holds its own head"
        )
    mask_file = open_mask(file)
    source = base or mask_file.info.base
    model = load_weights(source, AutoModel).eval()
    check_base(mask_file, model, source)
    return mask_file.decode(model), model, source


def _cut(
    mask: MaskFile, model: PreTrainedModel, sparsity: float, masking: str
) -> dict[str, Tensor]:
    """Select masks of another sparsity from the scores of a mask file.

    Raises:
        UsageError: The mask file has no scores.
    """
    if not mask.scores:
        raise UsageError(
            f"{mask.path} holds no scores to cut at another density",
            f"give {SCORES}, which kdcli prune writes next to its mask",
        )
    kinds = {m.name: m.kind for m in matrices(model)}
    scores = {name: tensor.to(torch.float32) for name, tensor in mask.scores.items()}
    return select_masks(masking, scores, kinds, 1 - sparsity)


def _density(masks: Iterable[Tensor]) -> float:
    """Return the share of all weights that the masks keep."""
    counts = [(int(mask.sum()), mask.numel()) for mask in masks]
    return sum(kept for kept, _ in counts) / sum(total for _, total in counts)
