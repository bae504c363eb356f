"""Commands killed, or out of disk, at their n-th call of the system: what goes on must end as if
nothing had been."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from tools.faults.campaign import Case, Fault, Kind
from tools.faults.material import QUICK, WORDS
from tools.faults.process import At, Command, Done, kdcli

TIMED = {"report.html", "report.md", "latency.csv", "README.md", "export.json", "README.txt"}
"""Files that hold times, or names of the report; only that they are there is compared."""
COMPARED = ("quality", "evaluations", "comparisons", "selection", "pruning")

Words = list[str | Path]


def commands(material: Path) -> dict[str, Words]:
    """Every verb that writes a directory, as short as it can be; without `-o`."""
    own: Words = ["--task", "own", "--data", material / "data", *QUICK]
    text: Words = ["--data", material / "text.txt", *QUICK, "--set", "data.held_out_blocks=4"]
    mask = next((material / "pruned").rglob("mask.safetensors"))
    few: Words = [
        "--set",
        "general.overrides.train.max_steps=2",
        "--set",
        "intermediate.max_steps=2",
    ]
    few += [
        "--set",
        "general.overrides.train.batch_size=8",
        "--set",
        "general.overrides.data.held_out_blocks=4",
    ]
    return {
        "finetune": ["finetune", material / "encoder", *own, "--set", "keep=best"],
        "grid": ["finetune", material / "encoder", *own, "--seeds", "2", "--grid", "lr=1e-3,1e-4"],
        "distill": ["distill", material / "encoder", "--to", "1x16", "--assistant", "none", *text],
        "assistant": [
            "distill",
            material / "encoder",
            "--to",
            "1x16",
            "--to",
            "1x16:32",
            "--assistant",
            "1x32",
            *text,
        ],
        "chain": [
            "distill",
            material / "teacher",
            "--to",
            "1x16",
            "--corpus",
            material / "text.txt",
            *own,
            *few,
        ],
        "prune": [
            "prune",
            material / "encoder",
            *own,
            *WORDS,
            "--sparsity",
            "0.5",
            "--sparsity",
            "0.9",
        ],
        "taught": [
            "prune",
            material / "encoder",
            "--method",
            "cap",
            "--teacher",
            material / "teacher",
            *own,
            *WORDS,
        ],
        "cotrain": ["cotrain", "2x16", "1x16", "--base", material / "masked-lm", *text],
        "cotrain-task": ["cotrain", "2x16", "1x16", "--base", material / "encoder", *own],
        "evaluate": [
            "evaluate",
            material / "teacher",
            "--task",
            "own",
            "--data",
            material / "data",
            "-q",
        ],
        "apply": ["mask", "apply", mask, "--base", material / "encoder", "-q"],
        "compact": ["mask", "compact", mask, "--base", material / "encoder", "-q"],
        "export": ["export", material / "teacher", "--format", "onnx", "-q"],
    }


UNRESUMED = ("evaluate", "apply", "compact", "export")
"""They take no `--resume`: the same command must do."""
VERBS = [
    *(
        "finetune",
        "distill",
        "prune",
        "chain",
        "cotrain",
        "grid",
        "assistant",
        "taught",
        "cotrain-task",
    ),
    *("evaluate", "apply", "compact", "export"),
]


def state(folder: Path) -> dict[str, Any]:
    """Every file below a directory: its hash, or what of it does not depend on time."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_dir():
            found[name] = "directory"
        elif not path.is_file():
            found[name] = "a link, or a device"
        elif path.name == "log.jsonl":
            rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
            found[name] = [{k: v for k, v in row.items() if "second" not in k} for row in rows]
        elif path.name == "report.json":
            report = json.loads(path.read_text("utf-8"))
            found[name] = {key: report.get(key) for key in COMPARED}
        else:
            found[name] = (
                "" if path.name in TIMED else hashlib.sha256(path.read_bytes()).hexdigest()
            )
    return found


@functools.cache
def reference(material: Path, verb: str) -> tuple[dict[str, Any], list[str]]:
    """What an undisturbed run leaves, and the calls it makes; made by the first case that asks,
    kept in `material`."""
    kept = material / f"reference-{verb}.json"
    if not kept.exists():
        folder = material / f"made-{verb}-{os.getpid()}"
        folder.mkdir()
        command = Command(
            folder,
            *commands(material)[verb],
            "-o",
            "out",
            at=At(-1, "before"),
            environment=_cache(folder),
        )
        command.wait().check(0)
        aside = folder / "kept.json"
        aside.write_text(json.dumps([state(folder / "out"), command.calls()]), "utf-8")
        aside.replace(kept)
        shutil.rmtree(folder)
    left, calls = json.loads(kept.read_text("utf-8"))
    return left, calls


def _cache(folder: Path) -> dict[str, str]:
    # Cold in every case, so that a command makes the same calls each time.
    return {"KDCLI_CACHE": str(folder / "cache")}


def differences(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """What is missing, too many or other, by name of the file."""
    names = [f"{name} is missing" for name in wanted if name not in found]
    names += [f"{name} is left over" for name in found if name not in wanted]
    return names + [
        f"{name} differs" for name in wanted if name in found and found[name] != wanted[name]
    ]


def same(case: Case, verb: str, cwd: Path) -> None:
    """Raise a Fault where a run left something else than an undisturbed one."""
    wrong = differences(state(cwd / "out"), reference(case.material, verb)[0])
    wrong += [f"{path.relative_to(cwd)} is left over" for path in cwd.rglob("*.part")]
    if wrong:
        raise Fault(f"{verb}: {'; '.join(wrong[:6])}")


def again(case: Case, verb: str, cwd: Path, *more: str, at: At | None = None) -> Done:
    """Run a verb's command in its directory."""
    words = commands(case.material)[verb]
    return kdcli(case.folder, *words, "-o", "out", *more, at=at, cwd=cwd, environment=_cache(cwd))


def on_with(verb: str, case: Case) -> list[str]:
    """The option that goes on with what a killed run left; with every third case starts it anew."""
    if verb in UNRESUMED:
        return ["--overwrite"] if verb in ("export", "evaluate") else []
    return ["--overwrite"] if case.number // len(VERBS) % 3 == 2 else ["--resume"]


def killed(case: Case) -> None:
    """Kill a verb at a call, in a quarter of the cases what goes on with it too, then let it
    end."""
    verb = VERBS[case.number % len(VERBS)]
    _, calls = reference(case.material, verb)
    times = 1 + (case.rng.random() < 0.25)
    more: list[str] = []
    for _ in range(times):
        at = At(case.rng.randrange(len(calls)), case.rng.choice(("before", "after")))
        what = f"{verb} killed {at.how} call {at.number} ({calls[at.number]})"
        done = again(case, verb, case.folder, *more, at=at)
        if done.code != -9:
            # A run that goes on makes fewer calls.
            _checked(done, what)
            break
        more = on_with(verb, case)
    else:
        _checked(again(case, verb, case.folder, *more), f"{what}, then {' '.join(more)}")
    try:
        same(case, verb, case.folder)
    except Fault as fault:
        raise Fault(f"{what}, then {' '.join(more)}: {fault}") from None


def full(case: Case) -> None:
    """A disk that is full at a call, or really is; then with space."""
    verb = VERBS[case.number % len(VERBS)]
    _, calls = reference(case.material, verb)
    disk = case.folder / "disk"
    disk.mkdir()
    small, at = 0, None
    if case.number // len(VERBS) % 2 == 0 and os.geteuid() == 0:
        small = case.rng.randrange(8, 1200)
        small *= bool(
            not subprocess.run(_mount(disk, small), check=False, capture_output=True).returncode
        )
    if not small:
        at = At(case.rng.randrange(len(calls)), "full")
    what = f"{verb} on {small} KiB" if small else f"{verb}, full from call {at and at.number}"
    done = again(case, verb, disk, at=at)
    try:
        done.check(0, 3)
        if done.code and "disk is full" not in done.stderr:
            raise Fault(f"no word of the disk: {done.stderr[-400:]}")
        if small:
            subprocess.run(_mount(disk, 1 << 17, again=True), check=True)
        if done.code:
            _checked(again(case, verb, disk, *on_with(verb, case)), "then with space")
        same(case, verb, disk)
    except Fault as fault:
        raise Fault(f"{what}: {fault}") from None


def _mount(disk: Path, kibibytes: int, *, again: bool = False) -> list[str]:
    options = f"{'remount,' if again else ''}size={kibibytes}k"
    return ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(disk)]


def _checked(done: Done, what: str) -> None:
    try:
        done.check(0)
    except Fault as fault:
        raise Fault(f"{what}: {fault}") from None


KINDS = [Kind("kills", 260, killed, wall=180), Kind("disks", 78, full, wall=180)]
