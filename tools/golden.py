"""The safety net of a restructuring: record what kdcli computes and shows, and compare it later.

    python tools/golden.py record losses FILE      before a change, then after it:
    python tools/golden.py compare losses FILE     prints each difference and exits with 1
    python tools/golden.py record surface FILE
    python tools/golden.py compare surface FILE
    python tools/golden.py compare losses FILE --only minilm,smp
    python tools/golden.py record losses FILE --only minilm   replaces one case in FILE
    python tools/golden.py selfcheck

`losses` holds the numbers of every training step and evaluation and a hash of every saved tensor.
A change that leaves the computation alone leaves all of them the same to the last bit, on the same
machine. `surface` holds help texts, file lists, report keys and recipes, which may change.

The tool uses nothing of kdcli but its command line, so it also records an older version: set
PYTHONPATH to that version's directory.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import hashlib
import importlib
import io
import json
import math
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ |= {"OMP_NUM_THREADS": "1", "COLUMNS": "120", "TERM": "dumb", "NO_COLOR": "1"}
os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}

if TYPE_CHECKING:
    from tools.golden_cases import CASES, Case, write_inputs
else:  # As a script: the version of the package that PYTHONPATH names may have tools of its own.
    from golden_cases import CASES, Case, write_inputs

MAX_LINES = 12  # Differences that are printed for one case
VERBS = (
    *("distill", "prune", "cotrain", "finetune", "evaluate", "benchmark", "export", "mask"),
    *("tokenize", "trim", "compress", "push", "recipes", "doctor"),
)


def kdcli(*arguments: str) -> tuple[int, str, str]:
    """Run a command in this process; return its exit code, standard output and standard error."""
    from kdcli.cli import main

    sys.argv = ["kdcli", *arguments]
    out, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(errors):
        try:
            main()
        except SystemExit as ended:
            return int(ended.code or 0), out.getvalue(), errors.getvalue()
        except Exception:  # noqa: BLE001 - a crash is recorded, and the other cases still run
            return 1, out.getvalue(), errors.getvalue() + traceback.format_exc()
    return 0, out.getvalue(), errors.getvalue()


# The losses recording. Where a log, a report or a file moves, these readers are what has to change.

LOGGED = ("loss", "terms", "held_out", "metrics", "lr", "grad_norm")


def numbers(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers of a JSON value, each with its dotted key."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from numbers(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name, value


def steps_of(log: Path) -> dict[str, dict[str, float]]:
    """Read a log.jsonl: step -> name of a loss or metric -> number."""
    steps: dict[str, dict[str, float]] = {}
    for line in log.read_text("utf-8").splitlines():
        record = json.loads(line)
        kept = {key: record[key] for key in LOGGED if key in record}
        if "step" in record and kept:
            steps.setdefault(str(record["step"]), {}).update(numbers(kept))
    return steps


def quality_of(report: Mapping[str, Any]) -> dict[str, list[list[float]]]:
    """Read a report's quality: metric -> its values, in order and without the models' names.

    An interval of a difference is three numbers.
    """
    found: dict[str, set[tuple[float, ...]]] = {}
    for table in report.get("quality", {}).values():
        for row in table.values():
            for metric, value in numbers(row):
                found.setdefault(metric, set()).add((value,))
    for row in report.get("evaluations", []):
        for metric, value in numbers(row["metrics"]):
            found.setdefault(metric, set()).add((value,))
    for row in report.get("comparisons", []):
        interval = tuple(row[key] for key in ("difference", "low", "high"))
        found.setdefault(f"difference of {row['metric']}", set()).add(interval)
    for row in report.get("pruning", []):
        found.setdefault("density", set()).add((row["density"],))
    return {metric: sorted(map(list, values)) for metric, values in sorted(found.items())}


def tensors_hash(named: Iterable[tuple[str, str, tuple[int, ...], bytes]]) -> str:
    """Hash tensors given as name, type, shape and bytes."""
    total = hashlib.sha256()
    for name, kind, shape, content in sorted(named):
        total.update(f"{name} {kind} {shape}".encode())
        total.update(content)
    return total.hexdigest()[:32]


def safetensors_hash(path: Path) -> str:
    """Hash the tensors of a safetensors file, without its metadata."""
    import torch
    from safetensors import safe_open

    rows = []
    with safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118 - the file is no mapping
            tensor, kind = file.get_tensor(name), file.get_slice(name).get_dtype()
            content = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            rows.append((name, kind, tuple(tensor.shape), content))
    return tensors_hash(rows)


def onnx_hash(path: Path) -> str:
    """Hash the weights of an ONNX file, without their names, which the exporter chooses."""
    import onnx

    weights = onnx.load(path).graph.initializer
    arrays = [onnx.numpy_helper.to_array(weight) for weight in weights]
    return tensors_hash(("", str(a.dtype), a.shape, a.tobytes()) for a in arrays)


def hashes_of(folder: Path) -> dict[str, str]:
    """Hash every file of weights under a folder: path -> hash."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.suffix == ".safetensors":
            found[name] = safetensors_hash(path)
        elif path.suffix == ".onnx":
            found[name] = onnx_hash(path)
        elif path.suffix == ".bin":
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()[:32]
    return found


def losses_of(folder: Path) -> dict[str, Any]:
    """Collect what a run computed."""
    logs = {str(p.parent.relative_to(folder)): steps_of(p) for p in folder.rglob("log.jsonl")}
    reports = sorted(folder.rglob("report.json"))
    quality = {
        str(path.parent.relative_to(folder)): quality_of(json.loads(path.read_text("utf-8")))
        for path in reports
    }
    return {
        "steps": {place: steps for place, steps in sorted(logs.items()) if steps},
        "quality": {place: values for place, values in quality.items() if values},
        "weights": hashes_of(folder),
    }


# The surface recording.


def keys(tree: Any, prefix: str = "") -> list[str]:
    """List the dotted keys of a JSON value; the items of a list count as one."""
    if isinstance(tree, dict):
        found = {k for key, value in tree.items() for k in keys(value, f"{prefix}.{key}")}
        return sorted(found) or [prefix]
    if isinstance(tree, list):
        return sorted({k for value in tree for k in keys(value, f"{prefix}[]")}) or [prefix]
    return [prefix]


def surface_of(folder: Path) -> dict[str, Any]:
    """Collect what a run left: its files, the keys of its reports and logs, its recipes."""
    files = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
    found: dict[str, Any] = {"files": files}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.name == "log.jsonl":
            records = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
            found[name] = sorted({key for record in records for key in keys(record)})
        elif path.name == "report.json":
            report = json.loads(path.read_text("utf-8"))
            found[name] = {"keys": keys(report), "notes": report["notes"]}
        elif path.name == "recipe.yaml":
            found[name] = path.read_text("utf-8").splitlines()
    return found


def shown() -> dict[str, Any]:
    """Collect the help texts and the names of the shipped recipes."""
    found: dict[str, Any] = {"help": kdcli("--help")[1].splitlines()}
    for verb in VERBS:
        found[f"help {verb}"] = kdcli(verb, "--help")[1].splitlines()
    found["recipes"] = sorted(kdcli("recipes", "ls")[1].splitlines())
    return found


# Running the cases.


def in_order(names: Iterable[str]) -> list[str]:
    """List the cases with everything they need, each after what it needs."""
    ordered: list[str] = []

    def add(name: str) -> None:
        if name not in ordered:
            for needed in sorted(CASES[name].needs):
                add(needed)
            ordered.append(name)

    for name in names:
        add(name)
    return ordered


def processor_seconds() -> float:
    """Processor time of this process and of those that it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def run_case(name: str, case: Case, folder: Path) -> int:
    """Run a case and return its exit code; print its messages if it fails."""
    begun = processor_seconds()
    code, out, errors = kdcli(*case.arguments, "-o", str(folder))
    print(f"{name}: {processor_seconds() - begun:.1f} s", file=sys.stderr)
    if code:
        print(f"{name} exits with {code}\n{out[-2000:]}{errors[-4000:]}", file=sys.stderr)
    return code


def dry_run(case: Case) -> list[Any]:
    """Return the exit code of a dry run, the keys of what it prints and its steps."""
    code, out, _ = kdcli(*case.arguments, "--dry-run", "--json", "-o", "runs/dry")
    estimate = json.loads(out)
    return [code, keys(estimate), [leg["steps"] for leg in estimate["legs"]]]


@contextlib.contextmanager
def sandbox() -> Iterator[None]:
    """Work in a temporary directory that holds the data, with a cache of its own."""
    import torch

    import kdcli as package

    torch.set_num_threads(1)
    # `compress` starts processes of its own, which must import the same kdcli.
    os.environ["PYTHONPATH"] = str(Path(package.__file__).parents[1])
    with tempfile.TemporaryDirectory() as aside:
        os.environ["KDCLI_CACHE"] = str(Path(aside) / "cache")
        back = Path.cwd()
        os.chdir(aside)
        try:
            Path("inputs").mkdir()
            write_inputs(Path("inputs"))
            Path("runs").mkdir()
            yield
        finally:
            os.chdir(back)


def recording(what: str, only: list[str]) -> dict[str, Any]:
    """Run the cases and return their recording."""
    print(f"kdcli of {Path(sys.modules['kdcli'].__file__ or '').parent}", file=sys.stderr)
    wanted = only or list(CASES)
    found: dict[str, Any] = {}
    with sandbox():
        if what == "surface" and not only:
            found |= shown()
        for name in in_order(wanted):
            case = CASES[name]
            if what == "surface" and case.dry and name in wanted:
                found[f"dry {name}"] = dry_run(case)
            code = run_case(name, case, Path("runs") / name)
            if name in wanted:
                read = losses_of if what == "losses" else surface_of
                found[name] = {"code": code} | read(Path("runs") / name)
    return json.loads(json.dumps(found))  # type: ignore[no-any-return]


# An error in each kind of loss must be found.

RELATIVE_ERROR = 1e-7
PLANTS = {
    "text": ("on-own-text", "kdcli.losses.minilm", "objective"),
    "task": ("teacher", "kdcli.losses.hard", "hard_loss"),
    "task, from a teacher": ("soft-targets", "kdcli.losses.soft_targets", "soft_loss"),
    "embedding": ("embedding", "kdcli.losses.embedding", "objective"),
    "rerank, labels": ("rerank", "kdcli.losses.ranking", "label_loss"),
    "rerank, scores": ("rerank-scores", "kdcli.losses.ranking", "score_loss"),
    "pruning": ("smp", "kdcli.losses.hard", "hard_loss"),
    "pruning, penalty": ("soft-movement", "kdcli.pruners.soft_movement", "pruner"),
    "pruning of an embedding model": ("prune-embedding", "kdcli.losses.embedding", "objective"),
    "cotrain": ("cotrain-fresh", "kdcli.losses.ctcd", "ctcd"),
    "generation": ("generation", "kdcli.losses.vocabulary", "masked_ce"),
}
"""Kind of loss -> a case, and the module and name of the function to plant an error in."""


def erring(value: Any) -> Any:
    """Multiply what a loss function returns by 1 + 1e-7, or what an objective's terms return."""
    import torch

    if isinstance(value, torch.Tensor):
        return value * (1 + RELATIVE_ERROR)
    if isinstance(value, Mapping):
        return {name: erring(item) for name, item in value.items()}
    if isinstance(value, tuple):  # A weight and its term
        return tuple(item if isinstance(item, float) else erring(item) for item in value)
    names = {field.name for field in dataclasses.fields(value)}
    for name in names & {"terms", "regularise"}:  # Of an objective and of a pruner
        inner = getattr(value, name)
        return dataclasses.replace(value, **{name: functools.partial(_erring, inner)})
    raise TypeError(f"no error can be planted in a {type(value).__name__}")


def _erring(function: Callable[..., Any], *given: Any) -> Any:
    return erring(function(*given))


@contextlib.contextmanager
def planted(module: str, name: str) -> Iterator[None]:
    """Replace a function by one that errs, in every module that has imported it."""
    right = getattr(importlib.import_module(module), name)

    def wrong(*given: Any, **named: Any) -> Any:
        return erring(right(*given, **named))

    modules = [m for at, m in list(sys.modules.items()) if at.startswith("kdcli") and m]
    holders = [m for m in modules if vars(m).get(name) is right]
    for holder in holders:
        setattr(holder, name, wrong)
    try:
        yield
    finally:
        for holder in holders:
            setattr(holder, name, right)


def selfcheck(only: list[str]) -> int:
    """Plant an error in each kind of loss, or in those of the cases `only`.

    Returns 1 if an error is not found.
    """
    missed = 0
    plants = {kind: plant for kind, plant in PLANTS.items() if not only or plant[0] in only}
    with sandbox():
        before: dict[str, Any] = {}
        for name in in_order(case for case, _, _ in plants.values()):
            if run_case(name, CASES[name], Path("runs") / name):
                return 1
            before[name] = losses_of(Path("runs") / name)
        for number, (kind, (name, module, function)) in enumerate(plants.items()):
            folder = Path("planted") / str(number)
            with planted(module, function):
                code = run_case(name, CASES[name], folder)
            after = losses_of(folder)
            found = {
                part: len(differences(before[name][part], after[part]))
                for part in ("steps", "weights")
            }
            missed += bool(code) or not any(found.values())
            counts = f"{found['steps']} numbers and {found['weights']} files differ"
            print(f"{kind} ({name}, {module}.{function}): {counts}")
    print(f"{missed} of {len(plants)} planted errors are missed" if missed else "all are found")
    return min(1, missed)


# Comparing two recordings.

ABSENT = "(absent)"


def differences(before: Any, after: Any, at: str = "") -> list[str]:
    """Describe where two recordings differ, one line or block each."""
    if isinstance(before, dict) and isinstance(after, dict):
        return [
            line
            for key in sorted({*before, *after})
            for line in differences(
                before.get(key, ABSENT), after.get(key, ABSENT), f"{at} > {key}" if at else key
            )
        ]
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        pairs = enumerate(zip(before, after, strict=True))
        return [line for number, (a, b) in pairs for line in differences(a, b, f"{at}[{number}]")]
    if repr(before) == repr(after):
        return []
    return [f"{at}:\n  - {str(before)[:600]}\n  + {str(after)[:600]}{relative(before, after)}"]


def relative(before: Any, after: Any) -> str:
    """Describe the relative difference of two numbers; return nothing for other values."""
    both = isinstance(before, float) and isinstance(after, float)
    if not both or not before or not math.isfinite(before) or not math.isfinite(after):
        return ""
    return f"\n  relative difference {abs(after - before) / abs(before):.1e}"


def moved(before: dict[str, Any], after: dict[str, Any], at: str) -> list[str]:
    """Give places of `after` that only changed their names their old names; describe each."""
    notes = []
    for old in sorted(before.keys() - after.keys()):
        news = sorted(after.keys() - before.keys())
        same = [new for new in news if repr(after[new]) == repr(before[old])]
        if same:
            after[old] = after.pop(same[0])
            notes.append(f"{at}: {old} is now {same[0]}, with the same values")
    return notes


def compare(before: dict[str, Any], after: dict[str, Any], what: str) -> int:
    """Print the differences of two recordings; return the number of cases that differ."""
    wrong = 0
    for name in sorted({*before, *after}):
        old, new = before.get(name, ABSENT), after.get(name, ABSENT)
        if what == "losses" and isinstance(old, dict) and isinstance(new, dict):
            for part in ("steps", "quality", "weights"):
                for note in moved(old[part], new[part], f"{name} > {part}"):
                    print(f"note: {note}")
        lines = differences(old, new, name)
        wrong += bool(lines)
        print("\n".join(lines[:MAX_LINES]), end="\n" if lines else "")
        if len(lines) > MAX_LINES:
            print(f"{name}: {len(lines) - MAX_LINES} more differences")
    print(f"{wrong} of {len(before)} cases differ" if wrong else "no difference")
    return wrong


def main() -> int:
    """Parse the command line and run; return the exit code."""
    import kdcli  # noqa: F401

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    modes = parser.add_subparsers(dest="mode", required=True)
    for mode in ("record", "compare", "selfcheck"):
        sub = modes.add_parser(mode)
        if mode != "selfcheck":
            sub.add_argument("what", choices=("losses", "surface"))
            sub.add_argument("file", type=Path)
        sub.add_argument("--only", default="", help="names of cases, separated by commas")
    given = parser.parse_args()
    only = [name for name in given.only.split(",") if name]
    if unknown := sorted(set(only) - set(CASES)):
        parser.error(f"no case {', '.join(unknown)}; the cases are {', '.join(CASES)}")
    if given.mode == "selfcheck":
        return selfcheck(only)
    file: Path = given.file.resolve()
    before = json.loads(file.read_text("utf-8")) if given.mode == "compare" else {}
    after = recording(given.what, only)
    if given.mode == "record":
        if only and file.exists():
            after = json.loads(file.read_text("utf-8")) | after
        file.write_text(json.dumps(after, indent=1) + "\n", "utf-8")
        failed = [n for n, case in after.items() if isinstance(case, dict) and case.get("code")]
        print(f"failed: {', '.join(failed)}" if failed else f"{file} is written")
        return min(1, len(failed))
    file.with_suffix(".new.json").write_text(json.dumps(after, indent=1) + "\n", "utf-8")
    wanted = {name: before[name] for name in only if name in before} if only else before
    return min(1, compare(wanted, after, given.what))


if __name__ == "__main__":
    sys.exit(main())
