"""Record what kdcli computes and shows before a change, and compare it after the change.

    python tools/golden.py record losses FILE                 before the change
    python tools/golden.py compare losses FILE                after the change
    python tools/golden.py record surface FILE
    python tools/golden.py compare surface FILE
    python tools/golden.py compare losses FILE --only minilm,smp
    python tools/golden.py record losses FILE --only minilm   replaces one case in FILE
    python tools/golden.py selfcheck

`compare` prints each difference and exits with 1 if there are any. `selfcheck` plants an error in
each kind of loss and checks that it is noticed.

`losses` contains the numbers of every training step and evaluation, and a hash of every saved
tensor. A change that does not alter the computation must leave all of them identical to the last
bit on the same machine. `surface` contains help texts, file lists, report keys and recipes, which
may change.

The tool only uses kdcli's command line. It can therefore record an older version as well: set
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
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

os.environ |= {"OMP_NUM_THREADS": "1", "COLUMNS": "120", "TERM": "dumb", "NO_COLOR": "1"}
os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}

if TYPE_CHECKING:
    from tools.golden_cases import CASES, Case
    from tools.golden_compare import Recording, differences, print_differences
    from tools.golden_inputs import write_inputs
else:  # A script must not import `tools`: PYTHONPATH may name a version with tools of its own.
    from golden_cases import CASES, Case
    from golden_compare import Recording, differences, print_differences
    from golden_inputs import write_inputs

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


# Recording losses. These readers must change if a log, a report or a file moves.

LOGGED = ("loss", "terms", "held_out", "metrics", "lr", "grad_norm")

Numbers = dict[str, float]
"""Name of a loss or metric -> its value."""


class Losses(TypedDict):
    """The numbers that a run computed. Each key maps a directory or file of the run to its part."""

    steps: dict[str, dict[str, Numbers]]
    quality: dict[str, dict[str, list[list[float]]]]
    weights: dict[str, str]


def numbers(value: object, name: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers of a JSON value, each with its dotted key."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from numbers(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name, value


def steps_of(log: Path) -> dict[str, Numbers]:
    """Read a log.jsonl: step -> its numbers."""
    steps: dict[str, Numbers] = {}
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
    values_of: dict[str, set[tuple[float, ...]]] = {}
    for table in report.get("quality", {}).values():
        for row in table.values():
            for metric, value in numbers(row):
                values_of.setdefault(metric, set()).add((value,))
    for row in report.get("evaluations", []):
        for metric, value in numbers(row["metrics"]):
            values_of.setdefault(metric, set()).add((value,))
    for row in report.get("comparisons", []):
        interval = tuple(row[key] for key in ("difference", "low", "high"))
        values_of.setdefault(f"difference of {row['metric']}", set()).add(interval)
    for row in report.get("pruning", []):
        values_of.setdefault("density", set()).add((row["density"],))
    return {metric: sorted(map(list, values)) for metric, values in sorted(values_of.items())}


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
    hashes = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.suffix == ".safetensors":
            hashes[name] = safetensors_hash(path)
        elif path.suffix == ".onnx":
            hashes[name] = onnx_hash(path)
        elif path.suffix == ".bin":
            hashes[name] = hashlib.sha256(path.read_bytes()).hexdigest()[:32]
    return hashes


def losses_of(folder: Path) -> Losses:
    """Collect the numbers and weights that a run left in its directory."""
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


# Recording the surface.


def keys(tree: object, prefix: str = "") -> list[str]:
    """List the dotted keys of a JSON value. The items of a list share one key."""
    if isinstance(tree, dict):
        inner = {k for key, value in tree.items() for k in keys(value, f"{prefix}.{key}")}
        return sorted(inner) or [prefix]
    if isinstance(tree, list):
        return sorted({k for value in tree for k in keys(value, f"{prefix}[]")}) or [prefix]
    return [prefix]


def surface_of(folder: Path) -> dict[str, object]:
    """Collect a run's file names, the keys of its reports and logs, and its recipes."""
    files = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
    surface: dict[str, object] = {"files": files}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.name == "log.jsonl":
            records = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
            surface[name] = sorted({key for record in records for key in keys(record)})
        elif path.name == "report.json":
            report = json.loads(path.read_text("utf-8"))
            surface[name] = {"keys": keys(report), "notes": report["notes"]}
        elif path.name == "recipe.yaml":
            surface[name] = path.read_text("utf-8").splitlines()
    return surface


def help_and_recipes() -> dict[str, list[str]]:
    """Collect the lines of the help texts and the names of the shipped recipes."""
    lines = {"help": kdcli("--help")[1].splitlines()}
    for verb in VERBS:
        lines[f"help {verb}"] = kdcli(verb, "--help")[1].splitlines()
    lines["recipes"] = sorted(kdcli("recipes", "ls")[1].splitlines())
    return lines


# Running the cases.


def in_order(names: Iterable[str]) -> list[str]:
    """List the cases and the cases they need, each after all that it needs."""
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
    """Return the processor time of this process and of the child processes that have ended."""
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


def dry_run(case: Case) -> list[object]:
    """Return the exit code of a dry run, the keys of its JSON, and the steps of each stage."""
    code, out, _ = kdcli(*case.arguments, "--dry-run", "--json", "-o", "runs/dry")
    estimate = json.loads(out)
    return [code, keys(estimate), [leg["steps"] for leg in estimate["legs"]]]


@contextlib.contextmanager
def sandbox() -> Iterator[None]:
    """Work in a temporary directory that contains the data, with a separate cache."""
    import torch

    import kdcli as package

    torch.set_num_threads(1)
    # `compress` starts further processes, which must import the same kdcli.
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


def record(what: str, only: list[str]) -> Recording:
    """Run the cases and record their losses or their surface.

    Args:
        what: `losses` or `surface`.
        only: The cases to record; empty for all cases.
    """
    print(f"kdcli of {Path(sys.modules['kdcli'].__file__ or '').parent}", file=sys.stderr)
    wanted = only or list(CASES)
    recording: Recording = {}
    with sandbox():
        if what == "surface" and not only:
            recording |= help_and_recipes()
        for name in in_order(wanted):
            case = CASES[name]
            if what == "surface" and case.dry and name in wanted:
                recording[f"dry {name}"] = dry_run(case)
            code = run_case(name, case, Path("runs") / name)
            if name in wanted:
                read = losses_of if what == "losses" else surface_of
                recording[name] = {"code": code, **read(Path("runs") / name)}
    # As it will be read from the file: tuples become lists.
    return json.loads(json.dumps(recording))  # type: ignore[no-any-return]


# Checking that an error in each kind of loss is noticed.

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


def with_error(value: object) -> object:
    """Multiply the value of a loss function, or the terms of an objective, by 1 + 1e-7."""
    import torch

    if isinstance(value, torch.Tensor):
        return value * (1 + RELATIVE_ERROR)
    if isinstance(value, Mapping):
        return {name: with_error(item) for name, item in value.items()}
    if isinstance(value, tuple):  # A weight and its term
        return tuple(item if isinstance(item, float) else with_error(item) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = {field.name for field in dataclasses.fields(value)}
        for name in names & {"terms", "regularise"}:  # An objective, and a pruner
            inner = getattr(value, name)
            return dataclasses.replace(value, **{name: functools.partial(_call_with_error, inner)})
    raise TypeError(f"no error can be planted in a {type(value).__name__}")


def _call_with_error(function: Callable[..., object], *arguments: object) -> object:
    return with_error(function(*arguments))


@contextlib.contextmanager
def planted(module: str, name: str) -> Iterator[None]:
    """Replace a function by one with an error, in every module that has imported it."""
    right = getattr(importlib.import_module(module), name)

    def wrong(*arguments: object, **named: object) -> object:
        return with_error(right(*arguments, **named))

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
    """Plant an error in each kind of loss and check that the recording changes.

    Args:
        only: The cases whose losses are checked; empty for all cases.

    Returns:
        0 if every error is noticed, 1 otherwise.
    """
    missed = 0
    plants = {kind: plant for kind, plant in PLANTS.items() if not only or plant[0] in only}
    with sandbox():
        before: dict[str, Losses] = {}
        for name in in_order(case for case, _, _ in plants.values()):
            if run_case(name, CASES[name], Path("runs") / name):
                return 1
            before[name] = losses_of(Path("runs") / name)
        for number, (kind, (name, module, function)) in enumerate(plants.items()):
            folder = Path("planted") / str(number)
            with planted(module, function):
                code = run_case(name, CASES[name], folder)
            after = losses_of(folder)
            steps = len(differences(before[name]["steps"], after["steps"]))
            files = len(differences(before[name]["weights"], after["weights"]))
            missed += bool(code) or not (steps or files)
            counts = f"{steps} numbers and {files} files differ"
            print(f"{kind} ({name}, {module}.{function}): {counts}")
    if missed:
        print(f"{missed} of {len(plants)} planted errors were not noticed")
    else:
        print("all planted errors were noticed")
    return min(1, missed)


def main() -> int:
    """Run the command line and return the exit code."""
    import kdcli  # noqa: F401

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    modes = parser.add_subparsers(dest="mode", required=True)
    for mode in ("record", "compare", "selfcheck"):
        sub = modes.add_parser(mode)
        if mode != "selfcheck":
            sub.add_argument("what", choices=("losses", "surface"))
            sub.add_argument("file", type=Path)
        sub.add_argument("--only", default="", help="names of cases, separated by commas")
    options = parser.parse_args()
    only = [name for name in options.only.split(",") if name]
    if unknown := sorted(set(only) - set(CASES)):
        parser.error(f"no case {', '.join(unknown)}; the cases are {', '.join(CASES)}")
    if options.mode == "selfcheck":
        return selfcheck(only)
    file: Path = options.file.resolve()
    before = json.loads(file.read_text("utf-8")) if options.mode == "compare" else {}
    after = record(options.what, only)
    if options.mode == "record":
        if only and file.exists():
            after = json.loads(file.read_text("utf-8")) | after
        file.write_text(json.dumps(after, indent=1) + "\n", "utf-8")
        failed = [n for n, case in after.items() if isinstance(case, dict) and case.get("code")]
        print(f"failed: {', '.join(failed)}" if failed else f"wrote {file}")
        return min(1, len(failed))
    file.with_suffix(".new.json").write_text(json.dumps(after, indent=1) + "\n", "utf-8")
    wanted = {name: before[name] for name in only if name in before} if only else before
    return min(1, print_differences(wanted, after, options.what))


if __name__ == "__main__":
    sys.exit(main())
