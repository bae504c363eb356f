"""The output directory of a run: claimed once, resumable, every write atomic.

Layout: `recipe.yaml`, `log.jsonl`, `checkpoints/step-00000500/` while running; the model and its report when done.
Nothing is ever written in place: files are written aside, fsynced and renamed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from kdcli.disk import disk_errors, write_atomic
from kdcli.errors import MachineError, UsageError
from kdcli.recipe.yaml import read_yaml

RECIPE, LOG, CHECKPOINTS, REPORT = "recipe.yaml", "log.jsonl", "checkpoints", "report.json"
BEST = "best.safetensors"
ABSENT = "not set"
KEEP = 2
"""Checkpoints kept: the last, and the one before in case the last turns out damaged."""


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint as read back: tensors by name, and the small state beside them."""

    step: int
    tensors: dict[str, Tensor]
    state: dict[str, Any]


@dataclass(frozen=True)
class RunDir:
    """A claimed output directory. Only the main process of a run may write; see `claim`."""

    path: Path

    def check(self, recipe_yaml: str, *, resume: bool, overwrite: bool) -> bool:
        """Say whether the directory can be claimed, touching nothing; True when it holds a run to go on with.

        Raises:
            UsageError: not empty, not a run of ours, or resumed with another recipe (each differing key is named).
        """
        if self.path.exists() and not self.path.is_dir():
            raise UsageError(f"{self.path} is a file; --output-dir must be a directory")
        occupied = self.path.is_dir() and any(self.path.iterdir())
        # Both, for a user's own project may well hold a recipe.yaml, and `overwrite` deletes what is ours.
        ours = (self.path / RECIPE).is_file() and (self.path / LOG).is_file()
        if occupied and resume and ours:
            self._check_same_recipe(recipe_yaml)
            return True
        if occupied and not (overwrite and ours):
            raise UsageError(
                f"output directory {self.path} is not empty",
                "--resume goes on with its run, --overwrite deletes it; or choose another with -o"
                if ours
                else "it holds no run of kdcli, so it is left alone; choose another with -o",
            )
        return False

    @classmethod
    def claim(cls, path: Path, recipe_yaml: str, *, resume: bool = False, overwrite: bool = False) -> RunDir:
        """Take an output directory for one run: write its `recipe.yaml` and begin its `log.jsonl`.

        Args:
            path: an empty or missing directory, unless one of the flags is set.
            recipe_yaml: the resolved recipe; with `resume` it must equal the one that is there, comments aside.
            resume: go on in a directory that an earlier run claimed.
            overwrite: delete what an earlier run of kdcli left there.

        Raises:
            UsageError: see `check`.
            MachineError: the directory cannot be made or written.
        """
        run = cls(path)
        if run.check(recipe_yaml, resume=resume, overwrite=overwrite):
            return run
        with disk_errors(path):
            if path.is_dir():
                shutil.rmtree(path)
            path.mkdir(parents=True, exist_ok=True)
        write_atomic(path / LOG, "")
        write_atomic(path / RECIPE, recipe_yaml)
        return run

    def _check_same_recipe(self, recipe_yaml: str) -> None:
        before, now = (_leaves(text) for text in ((self.path / RECIPE).read_text("utf-8"), recipe_yaml))
        differing = [key for key in {**before, **now} if before.get(key, ABSENT) != now.get(key, ABSENT)]
        if differing:
            lines = [f"  {key}: was {before.get(key, ABSENT)}, is {now.get(key, ABSENT)}" for key in differing]
            raise UsageError(
                f"{self.path} was started with another recipe:\n" + "\n".join(lines),
                f"give the same options as before ({self.path / RECIPE}), or start anew with --overwrite",
            )

    @property
    def done(self) -> bool:
        """True when the run wrote its report, which is the last thing it does."""
        report = self.path / REPORT
        return report.is_file() and json.loads(report.read_text("utf-8")).get("status") == "done"

    def log(self, record: Mapping[str, Any]) -> None:
        """Append one object to log.jsonl."""
        with disk_errors(self.path / LOG), (self.path / LOG).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def read_log(self) -> list[dict[str, Any]]:
        """The records of log.jsonl; a last line torn by a kill is left out."""
        path = self.path / LOG
        lines = path.read_text("utf-8").split("\n") if path.is_file() else []
        return [json.loads(line) for line in lines[:-1]]

    def cut_log(self, step: int) -> None:
        """Drop what was logged after `step`, which a resumed run will log again."""
        kept = [json.dumps(r) for r in self.read_log() if r["step"] <= step]
        write_atomic(self.path / LOG, "".join(f"{line}\n" for line in kept))

    def save_checkpoint(self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Write `checkpoints/step-…/` aside, fsync it, rename it into place, and drop all but the last `KEEP`."""
        folder = self.path / CHECKPOINTS / f"step-{step:08d}"
        aside = folder.with_name(f".{folder.name}.part")
        with disk_errors(folder):
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
            try:
                save_file({k: v.detach().cpu().contiguous() for k, v in tensors.items()}, aside / "tensors.safetensors")
                digest = _sha256(aside / "tensors.safetensors")
                text = json.dumps({"step": step, "sha256": digest, **state})
                (aside / "state.json").write_text(text, "utf-8")
                for file in aside.iterdir():
                    _fsync(file)
                shutil.rmtree(folder, ignore_errors=True)
                aside.rename(folder)
                _fsync(folder.parent)
            finally:
                shutil.rmtree(aside, ignore_errors=True)
        for old in self._checkpoints()[:-KEEP]:
            shutil.rmtree(old)

    def load_checkpoint(self, warn: Callable[[str], None]) -> Checkpoint | None:
        """The newest checkpoint that is whole, or None; `warn` hears of a damaged one before the older is taken."""
        folders = self._checkpoints()
        for folder in reversed(folders):
            older = "falling back to the one before" if folder != folders[0] else "none is left: starting anew"
            try:
                state = json.loads((folder / "state.json").read_text("utf-8"))
                if _sha256(folder / "tensors.safetensors") != state["sha256"]:
                    raise ValueError("its checksum does not match")
                return Checkpoint(state["step"], load_file(folder / "tensors.safetensors"), state)
            except (OSError, ValueError, KeyError, SafetensorError) as error:
                warn(f"checkpoint {folder} is damaged ({error}); {older}")
        return None

    def save_best(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Write the best weights so far in one file, aside and renamed; the step stands in its metadata."""
        path = self.path / CHECKPOINTS / BEST
        aside = path.with_name(f".{BEST}.part")
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            whole = {k: v.detach().cpu().contiguous() for k, v in tensors.items()}
            save_file(whole, aside, metadata={"step": str(step)})
            _fsync(aside)
            aside.rename(path)

    def load_best(self, step: int) -> dict[str, Tensor]:
        """The weights that `save_best` wrote after `step`.

        Raises:
            MachineError: they are damaged or of another step: the run has to be done again.
        """
        path = self.path / CHECKPOINTS / BEST
        try:
            with safe_open(path, framework="pt") as file:
                if file.metadata().get("step") == str(step):
                    return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise MachineError(f"{path} cannot be read: {error}", "start anew with --overwrite") from None
        raise MachineError(f"{path} is not of step {step}", "start anew with --overwrite")

    def drop_checkpoints(self) -> None:
        """Remove the checkpoints of a run that is done."""
        shutil.rmtree(self.path / CHECKPOINTS, ignore_errors=True)

    def _checkpoints(self) -> list[Path]:
        return sorted((self.path / CHECKPOINTS).glob("step-*"))


def numbered(name: str, *, taken: bool) -> Path:
    """A directory under `runs/` for a run without `-o`, with a number behind its name when that is taken.

    With `taken` the last one that exists, to resume or overwrite it.
    """
    base = Path("runs") / name
    number, path = 1, base
    while path.exists():
        number += 1
        last, path = path, base.with_name(f"{base.name}-{number}")
    return last if taken and number > 1 else path


def _leaves(recipe_yaml: str) -> dict[str, str]:
    """Dotted key → value. Comments play no part: a value may come from a file now and have been an option then."""

    def walk(tree: Any, prefix: str) -> dict[str, str]:
        if not isinstance(tree, dict):
            return {prefix: json.dumps(tree, default=str)}
        found: dict[str, str] = {}
        for key, value in tree.items():
            found |= walk(value, f"{prefix}.{key}" if prefix else str(key))
        return found

    return walk(read_yaml(recipe_yaml), "")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
