"""The golden net of a refactoring: losses, files, report keys and help of every verb, recorded and compared.

    python tools/golden.py record FILE     before the change
    python tools/golden.py compare FILE    after it; prints each difference and exits 1

A change that does not alter the computation leaves every loss the same to the last bit on the same machine.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "COLUMNS": "120", "TERM": "dumb", "NO_COLOR": "1"}

QUIET = [
    "--set",
    "measure.latency=false",
    "--set",
    "train.log_every=1",
    "-q",
    "--device",
    "cpu",
    "--dtype",
    "fp32",
]
SHORT = [*QUIET, "--max-steps", "6", "--batch-size", "8"]
TOPIC = ["--task", "demo-topic", "--set", "data.train_rows=200", "--set", "data.judged_rows=60"]
VERBS = [
    "distill",
    "prune",
    "cotrain",
    "finetune",
    "evaluate",
    "benchmark",
    "export",
    "mask",
    "recipes",
    "doctor",
]

CASES: dict[str, list[str]] = {
    "teacher": ["finetune", "demo", *TOPIC, *SHORT],
    "grid": ["finetune", "demo", *TOPIC, *SHORT, "--seeds", "2", "--grid", "lr=1e-4,1e-3"],
    "cotrain": ["cotrain", "2x32", "1x32", "--base", "demo", "--data", "demo", *SHORT],
    "minilm": ["distill", "demo", "--to", "2x32", "--assistant", "2x64", *SHORT],
    "minilmv2": [
        "distill",
        "demo",
        "--to",
        "2x32",
        "--to",
        "1x64",
        "--assistant",
        "none",
        "--method",
        "minilmv2",
        *SHORT,
    ],
    "distilbert": [
        "distill",
        "cotrain/teacher",
        "--data",
        "demo",
        "--to",
        "1x32",
        "--method",
        "distilbert",
        *SHORT,
    ],
    "mlm-kd": [
        "distill",
        "cotrain/teacher",
        "--data",
        "demo",
        "--to",
        "1x32",
        "--method",
        "mlm-kd",
        *SHORT,
    ],
    "eval-task": [
        "distill",
        "demo",
        "--to",
        "2x32",
        "--assistant",
        "none",
        "--eval-task",
        "demo-topic",
        *SHORT,
        "--set",
        "eval.overrides.train.max_steps=3",
    ],
    "tinybert": [
        "distill",
        "teacher",
        "--to",
        "2x32",
        "--corpus",
        "demo",
        "--augment",
        *TOPIC,
        *SHORT,
        "--set",
        "augment.copies=2",
        "--set",
        "intermediate.max_steps=6",
        "--set",
        "general.overrides.train.max_steps=4",
        "--set",
        "general.overrides.train.batch_size=8",
    ],
    "pkd": [
        "distill",
        "teacher",
        "--to",
        "2x64",
        "--method",
        "pkd",
        "--also-teacher",
        "teacher",
        *TOPIC,
        *SHORT,
    ],
    "joint": [
        "distill",
        "teacher",
        "--to",
        "2x64",
        "--method",
        "minilm",
        "--set",
        "stage=joint",
        *TOPIC,
        *SHORT,
    ],
    "smp": ["prune", "demo", "--method", "smp", *TOPIC, *SHORT],
    "prunings": [
        "prune",
        "demo",
        "--method",
        "magnitude",
        "--method",
        "movement",
        "--method",
        "l0",
        "--sparsity",
        "0.5",
        "--sparsity",
        "0.9",
        *TOPIC,
        *SHORT,
    ],
    "cap": ["prune", "demo", "--method", "cap", "--teacher", "teacher", *TOPIC, *SHORT],
    "soft-movement": ["prune", "demo", "--method", "soft-movement", *TOPIC, *SHORT],
    "community": [
        "cotrain",
        "2x32",
        "1x32",
        "--community",
        "cotrain/teacher",
        "--data",
        "demo",
        "--eval-task",
        "demo-topic",
        "--set",
        "eval.overrides.train.max_steps=3",
        *SHORT,
    ],
    "cotrain-task": ["cotrain", "2x64", "1x64", "--base", "demo", *TOPIC, *SHORT],
    "evaluate": [
        "evaluate",
        "teacher",
        "pkd",
        *TOPIC[:2],
        "--set",
        "data.judged_rows=60",
        "-q",
        "--device",
        "cpu",
    ],
    "evaluate-mask": [
        "evaluate",
        "demo",
        "--mask",
        "smp/mask/mask.safetensors",
        *TOPIC[:2],
        "-q",
        "--device",
        "cpu",
    ],
    "benchmark": [
        "benchmark",
        "demo",
        "pkd",
        "--batch-size",
        "1",
        "--seq-len",
        "16",
        "--set",
        "measure.min_runs=2",
        "--set",
        "measure.min_seconds=0",
        "-q",
        "--device",
        "cpu",
    ],
    "export": ["export", "pkd", "--format", "onnx", "-q"],
}
DRY = ("minilm", "tinybert", "smp", "cotrain", "cotrain-task", "grid")


def kdcli(*arguments: str) -> tuple[int, str]:
    """Run a command in this process: exit code and what it printed on stdout."""
    from kdcli.cli import main

    sys.argv = ["kdcli", *arguments]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            main()
        except SystemExit as ended:
            return int(ended.code or 0), out.getvalue()
    return 0, out.getvalue()


def keys(tree: Any, prefix: str = "") -> list[str]:
    """Dotted keys of a JSON value; the items of a list are one."""
    if isinstance(tree, dict):
        return sorted(
            {k for key, value in tree.items() for k in keys(value, f"{prefix}.{key}")}
        ) or [prefix]
    if isinstance(tree, list):
        return sorted({k for value in tree for k in keys(value, f"{prefix}[]")}) or [prefix]
    return [prefix]


def left(folder: Path) -> dict[str, Any]:
    """What a run left: files, losses, keys and scores of its reports, its recipes."""
    found: dict[str, Any] = {
        "files": sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
    }
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.name == "log.jsonl":
            records = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
            found[name] = [{k: v for k, v in r.items() if "second" not in k} for r in records]
        elif path.name == "report.json":
            report = json.loads(path.read_text("utf-8"))
            found[name] = {
                "keys": keys(report),
                "quality": report["quality"],
                "notes": report["notes"],
            }
        elif path.name == "recipe.yaml":
            found[name] = path.read_text("utf-8").splitlines()
    return found


def net() -> dict[str, Any]:
    """Run everything."""
    import torch

    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for verb in VERBS:
        found[f"help {verb}"] = kdcli(verb, "--help")[1].splitlines()
    found["help"] = kdcli("--help")[1].splitlines()
    found["recipes"] = sorted(kdcli("recipes", "ls")[1].splitlines())
    with tempfile.TemporaryDirectory() as aside:
        os.chdir(aside)
        for name, arguments in CASES.items():
            print(name, file=sys.stderr)
            if name in DRY:
                code, out = kdcli(*arguments, "--dry-run", "--json", "-o", name)
                found[f"dry {name}"] = [
                    code,
                    keys(json.loads(out)),
                    [leg["steps"] for leg in json.loads(out)["legs"]],
                ]
            code, _ = kdcli(*arguments, "-o", name)
            found[name] = {"code": code, **left(Path(name))}
    return json.loads(json.dumps(found))


def differences(before: Any, after: Any, at: str = "") -> list[str]:
    """Where two recordings differ."""
    if isinstance(before, dict) and isinstance(after, dict):
        return [
            line
            for key in sorted({*before, *after})
            for line in differences(
                before.get(key, "(absent)"), after.get(key, "(absent)"), f"{at} > {key}"
            )
        ]
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        pairs = enumerate(zip(before, after, strict=True))
        return [line for number, (a, b) in pairs for line in differences(a, b, f"{at}[{number}]")]
    return [] if before == after else [f"{at}:\n  - {str(before)[:600]}\n  + {str(after)[:600]}"]


if __name__ == "__main__":
    mode, file = sys.argv[1], Path(sys.argv[2]).resolve()
    recorded = net()
    if mode == "record":
        file.write_text(json.dumps(recorded, indent=1), "utf-8")
    else:
        file.with_suffix(".new.json").write_text(json.dumps(recorded, indent=1), "utf-8")
        lines = differences(json.loads(file.read_text("utf-8")), recorded)
        print("\n".join(lines) or "no difference", file=sys.stderr)
        sys.exit(bool(lines))
