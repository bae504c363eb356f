"""Small models, data and finished runs that cases start from.

They are made once for each version of the code and never changed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "tests" / folder) for folder in ("", "verbs", "models")]
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_DEACTIVATE_ASYNC_LOAD": "1",
}
ENVIRONMENT |= {"OMP_NUM_THREADS": "1", "COLUMNS": "200", "TERM": "dumb", "NO_COLOR": "1"}
ENVIRONMENT |= {
    "TRANSFORMERS_VERBOSITY": "error",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "PYTHONPATH": str(ROOT),
}
VERBS = ("benchmark", "cotrain", "distill", "evaluate", "export", "finetune", "mask", "prune")


def code_hash() -> str:
    """Return a hash of the package, the recipes, this tool and the tables of settings."""
    names = ("kdcli", "recipes", "tools/faults", "tests/models")
    folders = [ROOT / name for name in names]
    files = sorted(
        p
        for folder in folders
        for p in folder.rglob("*")
        if p.suffix in (".py", ".yaml", ".toml", ".jinja")
    )
    content = b"".join(str(path).encode() + path.read_bytes() for path in files)
    return hashlib.sha256(content).hexdigest()[:12]


def import_commands() -> None:
    """Import the modules of all commands, so that forked processes already have them.

    PyTorch is limited to one thread, because a fork does not copy other threads.
    """
    os.environ.update(ENVIRONMENT)
    import importlib

    import torch

    torch.set_num_threads(1)
    for verb in VERBS:
        importlib.import_module(f"kdcli.verbs.{verb}.run")
    importlib.import_module("kdcli.cli")
    importlib.import_module("transformers.models.bert.modeling_bert")


def prepare_material(folder: Path) -> Path:
    """Make the material in `folder` unless it is already there, and return `folder`."""
    if (folder / "done").exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    # In a separate process, because this one must not start threads.
    code = f"from tools.faults.material import _make; _make({str(folder)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    (folder / "done").touch()
    return folder


def _make(name: str) -> None:
    folder = Path(name)
    os.environ["KDCLI_CACHE"] = str(folder / "cache")
    import_commands()
    import own_files
    import torch
    from encoders import tiny_config, tiny_tokenizer
    from transformers import AutoModelForMaskedLM

    own_files.encoder(folder / "encoder")
    torch.manual_seed(0)
    masked = AutoModelForMaskedLM.from_config(tiny_config("bert", initializer_range=0.3))
    masked.save_pretrained(folder / "masked-lm")
    tiny_tokenizer().save_pretrained(folder / "masked-lm")
    own_files.own(folder / "data", "class", n=48, judged=24)
    for kind in ("pair", "multi", "score", "tokens", "span"):
        own_files.own(folder / kind, kind, n=24, judged=12)
    lines = (f"w{i % 41} w{i % 13} w{(i * 7) % 40} w{i % 5}" for i in range(600))
    (folder / "text.txt").write_text("\n".join(lines), "utf-8")
    os.chdir(folder)
    task = ["--task", "own", "--data", folder / "data", *QUICK]
    own_files.succeeds("finetune", folder / "encoder", *task, "-o", folder / "teacher")
    own_files.succeeds("prune", folder / "encoder", *task, *WORDS, "-o", folder / "pruned")
    exported = ["--format", "onnx", "-q", "-o", folder / "export"]
    own_files.succeeds("export", folder / "teacher", *exported)
    (folder / "bomb").write_bytes(zlib.compress(bytes(1 << 30), 9))


WORDS = ["--set", "head.words=[w40, w41]"]
"""Options for a head of label words."""
QUICK = [
    *("--max-steps", "4", "--batch-size", "8", "--dtype", "fp32", "--device", "cpu", "-q"),
    *("--set", "data.max_length=24", "--set", "measure.latency=false"),
    *("--set", "train.log_every=1", "--set", "train.eval_every=2"),
    *("--set", "train.checkpoint_every=1"),
]
"""Options for a short run."""
