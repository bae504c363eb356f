"""The output directory of a run: claimed once, resumable, every write atomic.

Holds `recipe.yaml`, `log.jsonl` and `checkpoints/step-00000500/` while the run goes on; the model
and report when done.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout
from huggingface_hub import try_to_load_from_cache
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from kdcli.disk import (
    COMMITS,
    MAX_REPORT_BYTES,
    atomic_dir,
    check_writable,
    disk_errors,
    fsync,
    read_json,
    remove,
    write_atomic,
)
from kdcli.errors import MachineError, UsageError
from kdcli.recipe.yaml import read_yaml

MODEL = re.compile(
    r"(?<![\w./@-])\w[\w.-]*(?:/[\w.-]+)?(?![\w./@:-])"
)  # What may be a model of the hub
COMMIT = re.compile(r"@[0-9a-f]{40}")
RECIPE, LOG, CHECKPOINTS, REPORT = "recipe.yaml", "log.jsonl", "checkpoints", "report.json"
BEST = "best.safetensors"
LOCK = ".lock"
ABSENT = "not set"
NOT_OF_TRAINING = ("measure.", "train.checkpoint_every")
"""Keys that cannot change what is trained: a resumed run may give them other values."""
KEEP = 2
"""Checkpoints kept: the last, and the one before it in case the last is damaged."""

_LOCKS: dict[Path, FileLock] = {}
"""Locks that this process holds; a second claim in the same process shares the lock."""


@dataclass(frozen=True)
class Checkpoint:
    """An intact checkpoint: tensors by name, and the small state next to them."""

    step: int
    tensors: dict[str, Tensor]
    state: dict[str, Any]


@dataclass(frozen=True)
class RunDir:
    """A claimed output directory. Only the main process of a run may write; see `claim`."""

    path: Path

    def check(self, recipe_yaml: str, *, resume: bool, overwrite: bool) -> bool:
        """Check that the directory can be claimed; True when it holds a run to resume. Touches
        nothing. Raises UsageError: not empty, not a run of kdcli, or another recipe (names each
        differing key)."""
        check_writable(self.path, directory=True)
        with disk_errors(self.path):
            # Both files: a user's own project may hold a recipe.yaml, and `overwrite` deletes what
            # is there.
            ours = (self.path / RECIPE).is_file() and (self.path / LOG).is_file()
            occupied = ours or (
                self.path.is_dir() and any(not _of_torn_claim(p) for p in self.path.iterdir())
            )
        if occupied and resume and ours:
            self._check_same_recipe(recipe_yaml)
            return True
        if occupied and not (overwrite and ours):
            raise UsageError(
                f"output directory {self.path} is not empty",
                "--resume goes on with its run, --overwrite deletes it; or choose another with -o"
                if ours
                else "it holds no run of kdcli; choose another with -o",
            )
        return False

    @classmethod
    def claim(
        cls, path: Path, recipe_yaml: str, *, resume: bool = False, overwrite: bool = False
    ) -> RunDir:
        """Claim a directory for one run, locked against other processes: write `recipe.yaml` and an
        empty `log.jsonl`.

        Args:
            path: empty or missing, unless a flag is set.
            recipe_yaml: the resolved recipe; `resume` needs the same values as before, comments
            aside.
            overwrite: delete an earlier run of kdcli.

        Raises:
            UsageError: see `check`; another process uses the directory.
            MachineError: the directory cannot be written.
        """
        recipe_yaml = pinned(recipe_yaml)
        run, how = cls(path), {"resume": resume, "overwrite": overwrite}
        run.check(recipe_yaml, **how)
        with disk_errors(path):
            path.mkdir(parents=True, exist_ok=True)
        run._lock()
        # Once more: another process may have had a run here between the check and the lock.
        if not run.check(recipe_yaml, **how):
            run._clear()
        if not (path / RECIPE).is_file() or recipe_yaml != (path / RECIPE).read_text("utf-8"):
            write_atomic(path / RECIPE, recipe_yaml)
        return run

    def give_up(self) -> None:
        """Take back the claim of a run that was refused before it logged anything."""
        if (self.path / LOG).stat().st_size == 0 and not self._checkpoints():
            for name in (RECIPE, LOG):
                (self.path / name).unlink()
            self.release()
            if not any(self.path.iterdir()):
                self.path.rmdir()

    def _clear(self) -> None:
        """Empty the directory for a new run. A kill at any point leaves one that can be claimed
        again: the report goes first, as it says that the rest is whole; recipe and log are replaced
        last, as they say that this is a run."""
        with disk_errors(self.path):
            (self.path / REPORT).unlink(missing_ok=True)
            # The directory itself stays: it may be a mount point, a link or the working directory.
            for inside in self.path.iterdir():
                if inside.name not in (LOCK, RECIPE, LOG):
                    remove(inside)
        write_atomic(self.path / LOG, "")

    def _lock(self) -> None:
        key = self.path.resolve()
        lock = _LOCKS.setdefault(key, FileLock(key / LOCK, blocking=False))
        with disk_errors(self.path):
            try:
                lock.acquire()
            # Timeout is an OSError, too.
            except Timeout:
                hint = "wait for it, or choose another directory with -o"
                raise UsageError(f"another process uses {self.path}", hint) from None

    def release(self) -> None:
        """Let other processes claim the directory."""
        key = self.path.resolve()
        if lock := _LOCKS.pop(key, None):
            (key / LOCK).unlink(missing_ok=True)
            lock.release(force=True)

    def _check_same_recipe(self, recipe_yaml: str) -> None:
        try:
            before = leaves((self.path / RECIPE).read_text("utf-8"))
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise UsageError(
                f"{self.path / RECIPE} is damaged: {error}", "start anew with --overwrite"
            ) from None
        now = leaves(recipe_yaml)
        differing = [
            key
            for key in {**before, **now}
            if not _same(before.get(key, ABSENT), now.get(key, ABSENT))
            and not key.startswith(NOT_OF_TRAINING)
        ]
        if differing:
            lines = [
                f"  {key}: was {before.get(key, ABSENT)}, is {now.get(key, ABSENT)}"
                for key in differing
            ]
            raise UsageError(
                f"{self.path} was started with another recipe:\n" + "\n".join(lines),
                f"give the same options as before ({self.path / RECIPE}), relative paths from the "
                "same working "
                "directory, or start anew with --overwrite",
            )

    @property
    def done(self) -> bool:
        """True when the run has written its report, its last file."""
        report = self.path / REPORT
        return (
            report.is_file()
            and read_json(report, max_bytes=MAX_REPORT_BYTES).get("status") == "done"
        )

    def log(self, record: Mapping[str, Any]) -> None:
        """Append one object to log.jsonl."""
        with disk_errors(self.path / LOG), (self.path / LOG).open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")

    def read_log(self) -> list[dict[str, Any]]:
        """The records of log.jsonl, without a torn last line. Raises MachineError: another line is
        damaged."""
        path = self.path / LOG
        lines = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []
        try:
            records = [dict(json.loads(line)) for line in lines]
            if not all(isinstance(record["step"], int) for record in records):
                raise ValueError("a step is no number")
            return records
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise MachineError(
                f"{path} is damaged: {error}", "start anew with --overwrite"
            ) from None

    def cut_log(self, step: int) -> None:
        """Drop records after `step`; a resumed run logs them again."""
        kept = [json.dumps(r) for r in self.read_log() if r["step"] <= step]
        write_atomic(self.path / LOG, "".join(f"{line}\n" for line in kept))

    def save_checkpoint(
        self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]
    ) -> None:
        """Write `checkpoints/step-.../` atomically and drop all but the last `KEEP`."""
        folder = self.path / CHECKPOINTS / f"step-{step:08d}"
        with atomic_dir(folder) as aside:
            save_file(
                {k: v.detach().cpu().contiguous() for k, v in tensors.items()},
                aside / "tensors.safetensors",
            )
            digest = _sha256(aside / "tensors.safetensors")
            (aside / "state.json").write_text(
                json.dumps({"step": step, "sha256": digest, **state}), "utf-8"
            )
        for old in self._checkpoints()[:-KEEP]:
            shutil.rmtree(old)

    def load_checkpoint(self, warn: Callable[[str], None]) -> Checkpoint | None:
        """The newest intact checkpoint, or None; `warn` gets a message for each damaged one."""
        folders = self._checkpoints()
        for folder in reversed(folders):
            older = (
                "falling back to the one before"
                if folder != folders[0]
                else "none is left: starting anew"
            )
            try:
                state = read_json(folder / "state.json", max_bytes=MAX_REPORT_BYTES)
                if _sha256(folder / "tensors.safetensors") != state["sha256"]:
                    raise ValueError("its checksum does not match")
                return Checkpoint(state["step"], load_file(folder / "tensors.safetensors"), state)
            except (OSError, UsageError, ValueError, KeyError, SafetensorError) as error:
                warn(f"checkpoint {folder} is damaged ({error}); {older}")
        return None

    def save_best(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Write the best weights so far atomically, with the step in the metadata."""
        path = self.path / CHECKPOINTS / BEST
        aside = path.with_name(f".{BEST}.part")
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            whole = {k: v.detach().cpu().contiguous() for k, v in tensors.items()}
            save_file(whole, aside, metadata={"step": str(step)})
            fsync(aside)
            aside.rename(path)

    def load_best(self, step: int) -> dict[str, Tensor]:
        """The weights that `save_best` wrote after `step`. Raises MachineError: damaged, or of
        another step; the run must start anew."""
        path = self.path / CHECKPOINTS / BEST
        try:
            with safe_open(path, framework="pt") as file:
                if file.metadata().get("step") == str(step):
                    return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise MachineError(
                f"{path} cannot be read: {error}", "start anew with --overwrite"
            ) from None
        raise MachineError(f"{path} is not of step {step}", "start anew with --overwrite")

    def drop_checkpoints(self) -> None:
        """Remove the checkpoints of a finished run and release the directory."""
        shutil.rmtree(self.path / CHECKPOINTS, ignore_errors=True)
        self.release()

    def _checkpoints(self) -> list[Path]:
        return sorted((self.path / CHECKPOINTS).glob("step-*"))


def numbered(name: str, *, taken: bool) -> Path:
    """A new directory under `runs/` for a run without `-o`; with `taken` the last existing one of
    that name."""
    base = Path("runs") / name
    number, path = 1, base
    while path.exists():
        number += 1
        last, path = path, base.with_name(f"{base.name}-{number}")
    return last if taken and number > 1 else path


def _of_torn_claim(path: Path) -> bool:
    """True for what a kill in the middle of `claim` leaves: the lock, an empty log, an unfinished
    file."""
    unfinished = path.name in (LOCK, f".{LOG}.part", f".{RECIPE}.part")
    return unfinished or (path.name == LOG and path.is_file() and path.stat().st_size == 0)


def pinned(recipe_yaml: str) -> str:
    """A recipe whose models and data of the hub are named with the commit that was loaded, so that
    it repeats the run after the hub moved on."""

    def pin(name: re.Match[str]) -> str:
        file = try_to_load_from_cache(name[0], "config.json")
        return f"{name[0]}@{Path(file).parent.name}" if isinstance(file, str) else name[0]

    def line(text: str) -> str:
        value, mark, comment = text.partition("#")
        for source, commit in COMMITS.items():
            value = re.sub(
                rf"(?<![\w./@:-]){re.escape(source)}(?![\w./@:-])", f"{source}@{commit}", value
            )
        return "".join((MODEL.sub(pin, value), mark, comment))

    return "\n".join(map(line, recipe_yaml.split("\n")))


def _same(before: str, now: str) -> bool:
    """Whether two values are the same; of a model that is not yet loaded the commit is not
    known."""
    return before == now or ("@" not in now and COMMIT.sub("", before) == now)


def leaves(recipe_yaml: str) -> dict[str, str]:
    """Dotted key -> value, without comments: the origin of a value may change between two runs."""

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
