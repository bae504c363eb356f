"""Kill commands, or fill their disk, at their n-th system call.

A command that continues afterwards must leave the same files as one that was never interrupted.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path

from tools.faults.campaign import Case, Fault, Kind
from tools.faults.material import QUICK, WORDS
from tools.faults.process import At, Command, Done, kdcli

TIMED = {
    *("report.html", "report.md", "latency.csv", "README.md", "export.json", "README.txt"),
    ".manifest.jsonl",
}
"""Files with times, or with names from the report. Only their existence is compared."""
COMPARED = ("quality", "evaluations", "comparisons", "selection", "pruning")
"""Keys of a report that do not depend on time."""

Words = list[str | Path]


def commands(material: Path) -> dict[str, Words]:
    """Return a short command, without `-o`, for every verb that writes a directory."""
    encoder, teacher = material / "encoder", material / "teacher"
    own: Words = ["--task", "own", "--data", material / "data", *QUICK]
    text: Words = ["--data", material / "text.txt", *QUICK, "--set", "data.held_out_blocks=4"]
    stages = words_of(
        "--set general.overrides.train.max_steps=2 --set intermediate.max_steps=2",
        "--set general.overrides.train.batch_size=8 --set general.overrides.data.held_out_blocks=4",
    )
    to_small = words_of("--to 1x16 --assistant none")
    to_two = words_of("--to 1x16 --to 1x16:32 --assistant 1x32")
    two_runs = words_of("--seeds 2 --grid lr=1e-3,1e-4")
    two_sparsities = words_of("--sparsity 0.5 --sparsity 0.9")
    corpus: Words = ["--corpus", material / "text.txt"]
    mask = next((material / "pruned").rglob("mask.safetensors"))
    return {
        "finetune": ["finetune", encoder, *own, "--set", "keep=best"],
        "grid": ["finetune", encoder, *own, *two_runs],
        "distill": ["distill", encoder, *to_small, *text],
        "assistant": ["distill", encoder, *to_two, *text],
        "chain": ["distill", teacher, "--to", "1x16", *corpus, *own, *stages],
        "prune": ["prune", encoder, *own, *WORDS, *two_sparsities],
        "taught": ["prune", encoder, "--method", "cap", "--teacher", teacher, *own, *WORDS],
        "cotrain": ["cotrain", "2x16", "1x16", "--base", material / "masked-lm", *text],
        "cotrain-task": ["cotrain", "2x16", "1x16", "--base", encoder, *own],
        "evaluate": ["evaluate", teacher, "--task", "own", "--data", material / "data", "-q"],
        "apply": ["mask", "apply", mask, "--base", encoder, "-q"],
        "compact": ["mask", "compact", mask, "--base", encoder, "-q"],
        "export": ["export", teacher, "--format", "onnx", "-q"],
    }


def words_of(*lines: str) -> list[str]:
    """Split parts of a command line into words."""
    return " ".join(lines).split()


UNRESUMED = ("evaluate", "apply", "compact", "export")
"""Commands without `--resume`. Running the command again must be enough."""
VERBS = [
    *words_of("finetune distill prune chain cotrain grid assistant taught cotrain-task"),
    *UNRESUMED,
]
State = dict[str, object]
"""File or directory below a folder -> a hash, or the parts of its content that do not depend on
time."""


def state(folder: Path) -> State:
    """Return the state of all files below a directory."""
    contents: State = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_dir():
            contents[name] = "directory"
        elif not path.is_file():
            contents[name] = "a link, or a device"
        elif path.name == "log.jsonl":
            rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
            contents[name] = [{k: v for k, v in row.items() if "second" not in k} for row in rows]
        elif path.name == "report.json":
            report = json.loads(path.read_text("utf-8"))
            contents[name] = {key: report.get(key) for key in COMPARED}
        elif path.name in TIMED:
            contents[name] = ""
        else:
            contents[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return contents


@functools.cache
def reference(material: Path, verb: str) -> tuple[State, list[str]]:
    """Return the state that an uninterrupted command leaves, and its system calls.

    The first case that needs them runs the command and keeps the result in `material`.
    """
    path = material / f"reference-{verb}.json"
    if not path.exists():
        folder = material / f"reference-{verb}-{os.getpid()}"
        folder.mkdir()
        words = [*commands(material)[verb], "-o", "out"]
        command = Command(folder, *words, at=At(-1, "before"), environment=_cache(folder))
        command.wait().check(0)
        unfinished = folder / "reference.json"
        unfinished.write_text(json.dumps([state(folder / "out"), command.calls()]), "utf-8")
        unfinished.replace(path)
        shutil.rmtree(folder)
    files, calls = json.loads(path.read_text("utf-8"))
    return files, calls


def _cache(folder: Path) -> dict[str, str]:
    # A new cache for every case, so that a command always makes the same system calls.
    return {"KDCLI_CACHE": str(folder / "cache")}


def differences(actual: State, expected: State) -> list[str]:
    """Describe the files that are missing, left over or different."""
    missing = [f"{name} is missing" for name in expected.keys() - actual.keys()]
    left_over = [f"{name} is left over" for name in actual.keys() - expected.keys()]
    common = expected.keys() & actual.keys()
    different = [f"{name} differs" for name in common if actual[name] != expected[name]]
    return [*sorted(missing), *sorted(left_over), *sorted(different)]


def check_result(case: Case, verb: str, cwd: Path) -> None:
    """Check that a command left the same files as an uninterrupted one.

    Raises:
        Fault: Files are missing, left over or different.
    """
    wrong = differences(state(cwd / "out"), reference(case.material, verb)[0])
    wrong += [f"{path.relative_to(cwd)} is left over" for path in cwd.rglob("*.part")]
    if wrong:
        raise Fault(f"{verb}: {'; '.join(wrong[:6])}")


def run_verb(case: Case, verb: str, cwd: Path, *more: str, at: At | None = None) -> Done:
    """Run a verb's command in a directory, with additional options."""
    words = commands(case.material)[verb]
    return kdcli(case.folder, *words, "-o", "out", *more, at=at, cwd=cwd, environment=_cache(cwd))


def option_to_continue(verb: str, case: Case) -> list[str]:
    """Return the option that continues an interrupted command, or in a third of the cases restarts
    it."""
    if verb in UNRESUMED:
        return ["--overwrite"] if verb in ("export", "evaluate") else []
    return ["--overwrite"] if case.number // len(VERBS) % 3 == 2 else ["--resume"]


def killed(case: Case) -> None:
    """Kill a command at a system call and continue it.

    In a quarter of the cases, the command that continues it is killed as well.
    """
    verb = VERBS[case.number % len(VERBS)]
    _, calls = reference(case.material, verb)
    times = 1 + (case.rng.random() < 0.25)
    more: list[str] = []
    for _ in range(times):
        at = At(case.rng.randrange(len(calls)), case.rng.choice(("before", "after")))
        what = f"{verb} killed {at.event} call {at.number} ({calls[at.number]})"
        done = run_verb(case, verb, case.folder, *more, at=at)
        if done.code != -9:
            # A continued command makes fewer calls, so it may have ended before this one.
            _check_success(done, what)
            break
        more = option_to_continue(verb, case)
    else:
        _check_success(run_verb(case, verb, case.folder, *more), f"{what}, then {' '.join(more)}")
    try:
        check_result(case, verb, case.folder)
    except Fault as fault:
        raise Fault(f"{what}, then {' '.join(more)}: {fault}") from None


def full(case: Case) -> None:
    """Run a command on a full disk, then continue it with enough space.

    Half of the cases use a small file system if this process may mount one. All others let the
    system calls fail as on a full disk.
    """
    verb = VERBS[case.number % len(VERBS)]
    _, calls = reference(case.material, verb)
    disk = case.folder / "disk"
    disk.mkdir()
    is_mounted = False
    if case.number // len(VERBS) % 2 == 0 and os.geteuid() == 0:
        kibibytes = case.rng.randrange(8, 1200)
        mount = _mount_command(disk, kibibytes)
        is_mounted = subprocess.run(mount, check=False, capture_output=True).returncode == 0
    if is_mounted:
        what, at = f"{verb} on {kibibytes} KiB", None
    else:
        at = At(case.rng.randrange(len(calls)), "full")
        what = f"{verb}, full from call {at.number}"
    done = run_verb(case, verb, disk, at=at)
    try:
        done.check(0, 3)
        if done.code and "disk is full" not in done.stderr:
            raise Fault(f"the message does not mention the disk: {done.stderr[-400:]}")
        if is_mounted:
            subprocess.run(_mount_command(disk, 1 << 17, resize=True), check=True)
        if done.code:
            continued = run_verb(case, verb, disk, *option_to_continue(verb, case))
            _check_success(continued, "then with space")
        check_result(case, verb, disk)
    except Fault as fault:
        raise Fault(f"{what}: {fault}") from None


def _mount_command(disk: Path, kibibytes: int, *, resize: bool = False) -> list[str]:
    options = f"{'remount,' if resize else ''}size={kibibytes}k"
    return ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(disk)]


def _check_success(done: Done, what: str) -> None:
    """Check that a command succeeded. Raises a Fault that begins with `what`."""
    try:
        done.check(0)
    except Fault as fault:
        raise Fault(f"{what}: {fault}") from None


KINDS = [Kind("kills", 260, killed, wall=180), Kind("disks", 78, full, wall=180)]
