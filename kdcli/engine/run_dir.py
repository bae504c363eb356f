"""The output directory of a run.

A run claims its directory, so that no other process can write there. The run can be resumed, and
every write is atomic. During the run the directory holds `recipe.yaml`, `log.jsonl` and checkpoints
such as `checkpoints/step-00000500/`. At the end it holds the model and the report.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from kdcli.disk import (
    COMMITS,
    LOCK,
    LOG_FILE,
    MAX_REPORT_BYTES,
    RECIPE_FILE,
    REPORT_FILE,
    atomic_dir,
    cached_file,
    check_writable,
    disk_errors,
    fsync,
    holds_run,
    read_json,
    remove,
    write_atomic,
)
from kdcli.engine.inputs import (
    changed_inputs,
    check_no_foreign_files,
    check_not_input,
    texts_in,
)
from kdcli.errors import MachineError, UsageError
from kdcli.manifest import MANIFEST, begin_manifest, continue_manifest, file_sha256
from kdcli.messages import log
from kdcli.recipe.defaults import runs_dir
from kdcli.recipe.yaml import flow_style, read_yaml

# Matches text that may be the name of a model on the hub.
MODEL = re.compile(r"(?<![\w./@-])\w[\w.-]*(?:/[\w.-]+)?(?![\w./@:-])")
COMMIT = re.compile(r"@[0-9a-f]{40}")
NUMBER = re.compile(r"[2-9]|[1-9][0-9]+")
"""Matches the number that the directory of a second or later run of a name ends in."""
CHECKPOINTS = "checkpoints"
INPUTS = f"{CHECKPOINTS}/inputs.json"
BEST_WEIGHTS = "best.safetensors"
NOT_SET, NULL = "not set", json.dumps(None)
MEASURED = json.dumps("measured")
"""Value of `student.layers` before a run has chosen the layers and written them down."""
NOT_OF_TRAINING = ("measure.", "train.checkpoint_every")
"""Beginnings of keys that do not affect training, so a resumed run may change them."""
OF_QUESTION = ("goal.", "budget", "price_per_hour", "plan.backends", "plan.shapes")
"""Beginnings of the keys that a question to a finished run of `compress` may change."""
SOURCE = "data.source"
"""The key that names the data of a run."""
KEEP = 2
"""Number of checkpoints kept: the last one, and the one before in case the last is damaged."""

_LOCKS: dict[Path, FileLock] = {}
"""Locks that this process holds. A second claim in the same process shares the lock."""


@dataclass(frozen=True)
class Checkpoint:
    """An intact checkpoint: the tensors by name, and other state."""

    step: int
    tensors: dict[str, Tensor]
    state: dict[str, Any]


@dataclass(frozen=True)
class RunDir:
    """A claimed output directory, see `claim`. Only the main process of a run may write there."""

    path: Path

    def check(
        self,
        recipe_yaml: str,
        *,
        resume: bool,
        overwrite: bool,
        written: Sequence[Path] = (),
        inputs: Sequence[str] = (),
    ) -> bool:
        """Check that the directory can be claimed, without changing it.

        Args:
            recipe_yaml: The resolved recipe.
            resume: Whether to continue a run in the directory.
            overwrite: Whether a run in the directory may be deleted.
            written: Further files and directories that the command writes.
            inputs: Further models and data that the command reads.

        Returns:
            Whether the directory holds a run to resume.

        Raises:
            UsageError: The directory is not empty, its run has another recipe (the message lists
                the keys that differ), or `overwrite` would delete an input, or a file that kdcli
                did not write.
        """
        check_writable(self.path, directory=True)
        with disk_errors(self.path):
            is_run = self.is_run
            is_occupied = is_run or (
                self.path.is_dir()
                and any(not _is_from_unfinished_claim(p) for p in self.path.iterdir())
            )
        if is_occupied and resume and is_run:
            self._check_same_recipe(recipe_yaml)
            return True
        if is_occupied and overwrite and is_run and not self._is_ours():
            raise UsageError(
                f"{RECIPE_FILE} and {LOG_FILE} in {self.path} are not from kdcli",
                "choose another directory with -o",
            )
        if is_occupied and not (overwrite and is_run):
            is_reported = (self.path / REPORT_FILE).is_file()
            resuming = "" if is_reported else "continue its run with --resume, "
            raise UsageError(
                f"output directory {self.path} is not empty",
                f"{resuming}delete its run with --overwrite, or choose another directory with -o"
                if is_run
                else "it holds no run of kdcli; choose another directory with -o",
            )
        if is_occupied:
            sources = [*texts_in(read_yaml(recipe_yaml)), *inputs]
            check_not_input(self.path, sources, "--overwrite")
            # `--overwrite` is the only way out of a damaged recipe, so it may be deleted.
            damaged = () if self._has_intact_recipe() else (self.path / RECIPE_FILE,)
            check_no_foreign_files(self.path, (*written, *damaged))
        return False

    def _is_ours(self) -> bool:
        """Whether the recipe names a verb. If it is damaged, the log must be from kdcli.

        Other tools write a `recipe.yaml` next to a model, too.
        """
        if not self._has_intact_recipe():
            with (self.path / LOG_FILE).open("rb") as file:
                return file.readline(MAX_REPORT_BYTES).startswith(b'{"step": ')
        recipe = read_yaml((self.path / RECIPE_FILE).read_text("utf-8"))
        return isinstance(recipe, dict) and isinstance(recipe.get("verb"), str)

    def _has_intact_recipe(self) -> bool:
        try:
            read_yaml((self.path / RECIPE_FILE).read_text("utf-8"))
        except (ValueError, yaml.YAMLError):
            return False
        return True

    @classmethod
    def claim(
        cls,
        path: Path,
        recipe_yaml: str,
        *,
        resume: bool = False,
        overwrite: bool = False,
        written: Sequence[Path] = (),
        inputs: Sequence[str] = (),
    ) -> RunDir:
        """Claim a directory for a run, and lock it against other processes.

        This writes `recipe.yaml` and an empty `log.jsonl`.

        Args:
            path: The directory. It must be empty or missing, unless a flag is set.
            recipe_yaml: The resolved recipe.
            resume: Continue the run in the directory. Its recipe must have the same values;
                comments may differ.
            overwrite: Delete the run in the directory.
            written, inputs: See `check`.

        Raises:
            UsageError: See `check`, or another process uses the directory.
            MachineError: The directory cannot be written.
        """
        recipe_yaml = cls(path)._relative(pin_commits(recipe_yaml))
        run = cls(path)

        def check() -> bool:
            return run.check(
                recipe_yaml,
                resume=resume,
                overwrite=overwrite,
                written=written,
                inputs=inputs,
            )

        check()
        with disk_errors(path):
            path.mkdir(parents=True, exist_ok=True)
        run._lock()
        # Check again: between the check and the lock, another process may have run here.
        if check():
            continue_manifest(path)
        else:
            run._clear()
        file = path / RECIPE_FILE
        if not file.is_file() or file.read_bytes() != recipe_yaml.encode("utf-8"):
            write_atomic(file, recipe_yaml)
        return run

    def check_inputs(self, content: Mapping[str, str]) -> None:
        """Check that the inputs of a stopped run still have the content with which it began.

        Args:
            content: source -> a hash of its content now.

        Raises:
            UsageError: An input changed; the message names it.
        """
        file = self.path / INPUTS
        before = read_json(file) if file.is_file() else {}
        if changed := changed_inputs(content, before):
            raise UsageError(
                f"{changed} since the run in {self.path} began",
                "restore the content and continue, choose another directory with -o, or start "
                "again with --overwrite",
            )

    def record_inputs(self, content: Mapping[str, str]) -> None:
        """Record the content of the inputs, until the run is done. The first record counts."""
        file = self.path / INPUTS
        if content and not file.is_file() and not self.done:
            write_atomic(file, json.dumps(content))

    def give_up(self) -> None:
        """Undo the claim of a run that failed before it logged anything."""
        if (self.path / LOG_FILE).stat().st_size == 0 and not self._checkpoints():
            for name in (RECIPE_FILE, LOG_FILE, MANIFEST):
                (self.path / name).unlink(missing_ok=True)
            shutil.rmtree(self.path / CHECKPOINTS, ignore_errors=True)
            self.release()
            if not any(self.path.iterdir()):
                self.path.rmdir()

    def _clear(self) -> None:
        """Empty the directory for a new run.

        If the process is killed at any point, the directory can be claimed again. The report is
        removed first, because it marks a complete run. Recipe and log are replaced last, because
        they mark a run.
        """
        with disk_errors(self.path):
            (self.path / REPORT_FILE).unlink(missing_ok=True)
            # Keep the directory itself: it may be a mount point, a link or the working directory.
            for content in self.path.iterdir():
                if content.name not in (LOCK, MANIFEST, RECIPE_FILE, LOG_FILE):
                    remove(content)
            begin_manifest(self.path)
        write_atomic(self.path / LOG_FILE, "")

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

    @property
    def is_run(self) -> bool:
        """Whether the directory holds a run of kdcli."""
        return holds_run(self.path)

    def has_recipe(self, recipe_yaml: str) -> bool:
        """Whether the directory holds a run with this recipe. A damaged recipe counts as
        different."""
        try:
            return self.is_run and not self.differing_keys(recipe_yaml)
        except UsageError:
            return False

    def has_data_of(self, recipe_yaml: str) -> bool:
        """Whether the directory holds a run on the data of this recipe. A damaged recipe counts as
        different."""
        try:
            differing = self.differing_keys(recipe_yaml)
        except UsageError:
            return False
        return not any(line.startswith(f"{SOURCE}:") for line in differing)

    def differing_keys(
        self, recipe_yaml: str, free_keys: tuple[str, ...] = NOT_OF_TRAINING + OF_QUESTION
    ) -> list[str]:
        """Return the keys in which the run's recipe differs, with both values.

        `free_keys` are the beginnings of the keys that may differ.

        Raises:
            UsageError: The recipe is damaged.
        """
        try:
            text = (self.path / RECIPE_FILE).read_text("utf-8")
            if not isinstance(read_yaml(text), dict):
                raise ValueError("it has no keys")
            before = flatten_recipe(text)
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise UsageError(
                f"{self.path / RECIPE_FILE} is damaged: {error}", "start again with --overwrite"
            ) from None
        now = flatten_recipe(self._relative(recipe_yaml))
        free_keys += _chosen_keys(before, now)
        return [
            f"{key}: was {before.get(key, NOT_SET)}, is {now.get(key, NOT_SET)}"
            for key in {**before, **now}
            if not _same(before.get(key, NOT_SET), now.get(key, NOT_SET))
            and not key.startswith(free_keys)
        ]

    def _relative(self, recipe_yaml: str) -> str:
        """Name the files of an enclosing run relative to this directory, so that both can be
        moved."""
        above = reversed(self.path.absolute().parents)
        outer = next((folder for folder in above if holds_run(folder)), None)
        if outer is None:
            return recipe_yaml
        for text in set(texts_in(read_yaml(recipe_yaml))):
            place = Path(text).absolute()
            is_relative = text.startswith("../")
            is_inside = place.is_relative_to(outer) and place != outer and place.exists()
            if not is_relative and is_inside:
                here = Path(os.path.relpath(place, self.path.absolute())).as_posix()
                recipe_yaml = recipe_yaml.replace(f" {flow_style(text)} ", f" {flow_style(here)} ")
        return recipe_yaml

    def _check_same_recipe(self, recipe_yaml: str) -> None:
        differing = self.differing_keys(recipe_yaml)
        before, now = (
            read_yaml((self.path / RECIPE_FILE).read_text("utf-8")),
            read_yaml(recipe_yaml),
        )
        # A run writes every section of its verb's recipe.
        is_same_verb = "verb" in now and before.get("verb") == now["verb"]
        sections = ", ".join(sorted(map(str, before.keys() ^ now.keys())))
        if is_same_verb and sections:
            raise UsageError(
                f"{self.path} was started by another version of kdcli, whose recipes have other "
                f"sections: {sections}",
                "continue it with that version, choose another directory with -o, or start again "
                "with --overwrite",
            )
        if differing:
            lines = [f"  {line}" for line in differing]
            raise UsageError(
                f"{self.path} was started with another recipe:\n" + "\n".join(lines),
                "choose another directory with -o; to continue this run, give the same options as "
                f"before ({self.path / RECIPE_FILE}), with relative paths from the same working "
                "directory; --overwrite deletes it and starts again",
            )

    @property
    def done(self) -> bool:
        """Whether the run has written its report, which is its last file."""
        report = self.path / REPORT_FILE
        return (
            report.is_file()
            and read_json(report, max_bytes=MAX_REPORT_BYTES).get("status") == "done"
        )

    def log(self, record: Mapping[str, object]) -> None:
        """Append a record to log.jsonl."""
        with (
            disk_errors(self.path / LOG_FILE),
            (self.path / LOG_FILE).open("a", encoding="utf-8") as file,
        ):
            file.write(json.dumps(record) + "\n")

    def read_log(self) -> list[dict[str, Any]]:
        """Return the records of log.jsonl, without an incomplete last line.

        Raises:
            MachineError: Another line is damaged.
        """
        path = self.path / LOG_FILE
        lines = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []
        try:
            records = [dict(json.loads(line)) for line in lines]
            if not all(isinstance(record["step"], int) for record in records):
                raise ValueError("a step is not a number")
            return records
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise MachineError(
                f"{path} is damaged: {error}", "start again with --overwrite"
            ) from None

    def cut_log(self, step: int) -> None:
        """Remove the records after a step. A resumed run logs them again."""
        kept = [json.dumps(r) for r in self.read_log() if r["step"] <= step]
        write_atomic(self.path / LOG_FILE, "".join(f"{line}\n" for line in kept))

    def save_checkpoint(
        self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, object]
    ) -> None:
        """Write `checkpoints/step-.../` atomically, and remove all but the last `KEEP`."""
        folder = self.path / CHECKPOINTS / f"step-{step:08d}"
        with atomic_dir(folder) as aside:
            save_file(_to_save(tensors), aside / "tensors.safetensors")
            digest = file_sha256(aside / "tensors.safetensors")
            (aside / "state.json").write_text(
                json.dumps({"step": step, "sha256": digest, **state}), "utf-8"
            )
        for old in self._checkpoints()[:-KEEP]:
            shutil.rmtree(old)

    def load_checkpoint(self) -> Checkpoint | None:
        """Load the newest intact checkpoint, or return None. Damaged ones are logged."""
        folders = self._checkpoints()
        for folder in reversed(folders):
            consequence = (
                "falling back to the one before"
                if folder != folders[0]
                else "it was the last one, so the run starts again"
            )
            try:
                state = read_json(folder / "state.json", max_bytes=MAX_REPORT_BYTES)
                if file_sha256(folder / "tensors.safetensors") != state["sha256"]:
                    raise ValueError("its checksum does not match")
                return Checkpoint(state["step"], load_file(folder / "tensors.safetensors"), state)
            except (OSError, UsageError, ValueError, KeyError, SafetensorError) as error:
                log(f"checkpoint {folder} is damaged ({error}); {consequence}")
        return None

    def save_best(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Write the best weights so far atomically. The metadata holds the step."""
        path = self.path / CHECKPOINTS / BEST_WEIGHTS
        aside = path.with_name(f".{BEST_WEIGHTS}.part")
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            save_file(_to_save(tensors), aside, metadata={"step": str(step)})
            fsync(aside)
            aside.rename(path)

    def load_best(self, step: int) -> dict[str, Tensor]:
        """Load the weights that `save_best` wrote after a step.

        Raises:
            MachineError: The file is damaged or belongs to another step, so the run must start
                again.
        """
        path = self.path / CHECKPOINTS / BEST_WEIGHTS
        try:
            with safe_open(path, framework="pt") as file:
                if file.metadata().get("step") == str(step):
                    return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise MachineError(
                f"{path} cannot be read: {error}", "start again with --overwrite"
            ) from None
        raise MachineError(f"{path} does not belong to step {step}", "start again with --overwrite")

    def drop_checkpoints(self) -> None:
        """Remove the checkpoints of a finished run, and release the directory."""
        shutil.rmtree(self.path / CHECKPOINTS, ignore_errors=True)
        self.release()

    def _checkpoints(self) -> list[Path]:
        return sorted((self.path / CHECKPOINTS).glob("step-*"))


def _to_save(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


@contextmanager
def lock_directory(path: Path) -> Iterator[None]:
    """Lock an output directory that is not a run against other processes, and create it.

    It is removed if it was created and is still empty at the end.

    Raises:
        UsageError: Another process uses the directory.
        MachineError: The directory cannot be written.
    """
    run, is_new = RunDir(path), not path.exists()
    with disk_errors(path):
        path.mkdir(parents=True, exist_ok=True)
    run._lock()
    try:
        yield
    finally:
        run.release()
        if is_new and path.is_dir() and not any(path.iterdir()):
            path.rmdir()


def numbered(name: str, *, taken: bool) -> Path:
    """Return the directory under `runs_dir()` of a run without `-o`.

    Args:
        name: The name of the directory. Later runs of this name get a number.
        taken: Return the last directory that exists, not the first one that does not.
    """
    base = runs_dir() / name
    number, path = 1, base
    while path.exists():
        number += 1
        last, path = path, base.with_name(f"{base.name}-{number}")
    return last if taken and number > 1 else path


def runs_of(name: str) -> list[RunDir]:
    """Return the runs of this name under `runs/`, the newest first."""
    places = {1: runs_dir() / name}
    for path in runs_dir().glob(f"{escape(name)}-*"):
        # `numbered` begins with 2. Other names belong to other models, such as `bert-1`.
        if NUMBER.fullmatch(number := path.name.removeprefix(f"{name}-")):
            places[int(number)] = path
    newest_first = sorted(places.items(), reverse=True)
    return [run for _, path in newest_first if (run := RunDir(path)).is_run]


def run_to_continue(name: str, recipe_yaml: str) -> Path:
    """Return the directory under `runs/` that `--resume` without `-o` continues.

    It is the newest unfinished run with the same recipe, or else the newest finished one. If there
    is none, it is the newest run of this name, so that the error can list the keys that differ.

    Args:
        name: The name of the run's directory.
        recipe_yaml: The resolved recipe.
    """
    runs = runs_of(name)
    if not runs:
        return numbered(name, taken=True)
    same = [run for run in runs if run.has_recipe(recipe_yaml)]
    return next(filter(is_unfinished, same), [*same, *runs][0]).path


def run_to_overwrite(name: str, recipe_yaml: str) -> Path:
    """Return the directory under `runs/` that `--overwrite` without `-o` overwrites.

    It is the newest run of this name on the same data, or else a new directory. The second run on
    `tickets.csv` and the first one on `tickets-2.csv` have the same name.
    """
    same = [run for run in runs_of(name) if run.has_data_of(recipe_yaml)]
    return same[0].path if same else numbered(name, taken=False)


def is_unfinished(run: RunDir) -> bool:
    """Whether a run can be continued. A run with a damaged report cannot."""
    try:
        return not run.done
    except UsageError:
        return False


def _is_from_unfinished_claim(path: Path) -> bool:
    """Whether a process killed during `claim` may have left a file.

    Such files are the lock, the manifest, an empty log and unfinished files.
    """
    asides = f".{LOG_FILE}.part", f".{RECIPE_FILE}.part", f"{MANIFEST}.part"
    unfinished = path.name in (LOCK, MANIFEST, *asides)
    return unfinished or (path.name == LOG_FILE and path.is_file() and path.stat().st_size == 0)


def pin_commits(recipe_yaml: str) -> str:
    """Add the loaded commit to the models and data sets of the hub in a recipe.

    The recipe then repeats the run even after they have changed on the hub.
    """

    def pin(name: re.Match[str]) -> str:
        file = cached_file(name[0], "config.json")
        return f"{name[0]}@{file.parent.name}" if file else name[0]

    def line(text: str) -> str:
        value, mark, comment = text.partition("#")
        for source, commit in COMMITS.items():
            value = re.sub(
                rf"(?<![\w./@:-]){re.escape(source)}(?![\w./@:-])", f"{source}@{commit}", value
            )
        return "".join((MODEL.sub(pin, value), mark, comment))

    return "\n".join(map(line, recipe_yaml.split("\n")))


def _same(before: str, now: str) -> bool:
    """Whether two values are the same.

    The commit of a model that is not loaded yet is unknown, and so are layers to be measured.
    """
    is_measured = now == MEASURED and before.startswith("[")
    return before == now or is_measured or ("@" not in now and COMMIT.sub("", before) == now)


def _chosen_keys(before: Mapping[str, str], now: Mapping[str, str]) -> tuple[str, ...]:
    """Return the beginnings of the keys that a run has filled in for the goal of `--to`.

    They are free if the run's shape was chosen for the goal in the recipe `now`.
    """
    goal, shape = (before.get(f"student.chosen.{key}", NULL) for key in ("goal", "shape"))
    if goal == NULL:
        return ()
    is_chosen = before.get("student.to") in (shape, f"[{shape}]")
    is_same_goal = now.get("student.to") in (goal, f"[{goal}]")
    return ("student.to", "student.chosen.") if is_chosen and is_same_goal else ()


def flatten_recipe(recipe_yaml: str) -> dict[str, str]:
    """Return dotted key -> value.

    Comments are ignored, because the origin of a value may change between two runs.
    """

    def walk(tree: object, prefix: str) -> dict[str, str]:
        if not isinstance(tree, dict):
            return {prefix: json.dumps(tree, default=str)}
        values: dict[str, str] = {}
        for key, value in tree.items():
            values |= walk(value, f"{prefix}.{key}" if prefix else str(key))
        return values

    return walk(read_yaml(recipe_yaml), "")
