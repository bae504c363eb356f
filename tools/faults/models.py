"""Models from elsewhere: files that do not fit together, and code that must never run."""

from __future__ import annotations

import json
import random
import shutil
import textwrap
from collections.abc import Callable
from pathlib import Path

from tools.faults.campaign import Case, Fault, Kind
from tools.faults.files import spoiled
from tools.faults.kills import Words, commands
from tools.faults.material import QUICK
from tools.faults.process import kdcli

RUN = "import os, pathlib\npathlib.Path(os.environ['FAULTS_MARKER']).write_text(__name__)\n"
"""What planted code does."""
CLASSES = """
    from transformers import BertConfig, BertModel, BertTokenizerFast
    class XConfig(BertConfig):
        model_type = "x"
    class XModel(BertModel):
        config_class = XConfig
    class XTokenizer(BertTokenizerFast):
        pass
"""


class _Pickled:
    """Unpickled, it runs."""

    def __reduce__(self) -> tuple[Callable[..., None], tuple[str, dict[str, str]]]:
        return exec, (RUN, {"__name__": "pickle"})


def _edit(path: Path, **changes: object) -> None:
    tree = json.loads(path.read_text("utf-8")) if path.exists() else {}
    path.write_text(json.dumps(tree | changes), "utf-8")


def _auto_map(rng: random.Random, folder: Path) -> None:
    (folder / "planted.py").write_text(RUN + textwrap.dedent(CLASSES))
    names = {
        "AutoConfig": "planted.XConfig",
        "AutoModel": "planted.XModel",
        "AutoModelForMaskedLM": "planted.XModel",
    }
    names |= {"AutoModelForSequenceClassification": "planted.XModel"}
    kind = rng.choice(("bert", "bert", "x", "llama"))
    _edit(
        folder / "config.json",
        auto_map=names,
        model_type=kind,
        architectures=[rng.choice(("XModel", "BertModel"))],
    )


def _tokenizer(rng: random.Random, folder: Path) -> None:
    (folder / "planted.py").write_text(RUN + textwrap.dedent(CLASSES))
    more: dict[str, object] = rng.choice(
        [{}, {"tokenizer_class": "XTokenizer"}, {"tokenizer_class": None}]
    )
    _edit(
        folder / "tokenizer_config.json",
        auto_map={"AutoTokenizer": [None, "planted.XTokenizer"]},
        **more,
    )
    if rng.random() < 0.5:
        (folder / "tokenizer.json").unlink()


def _pickle(rng: random.Random, folder: Path) -> None:
    import torch

    for name in ("pytorch_model.bin", "model.pt", "training_args.bin", "vocab.pkl"):
        torch.save(_Pickled(), folder / name, _use_new_zipfile_serialization=rng.random() < 0.5)
    if rng.random() < 0.7:
        (folder / "model.safetensors").unlink(missing_ok=True)


def _index(rng: random.Random, folder: Path) -> None:
    _pickle(random.Random(0), folder)
    (folder / "model.safetensors").unlink(missing_ok=True)
    other = rng.choice(
        (
            "pytorch_model.bin",
            "../outside/model.safetensors",
            str(folder.parent / "outside/model.safetensors"),
        )
    )
    _edit(
        folder / "model.safetensors.index.json",
        metadata={},
        weight_map={"embeddings.LayerNorm.bias": other},
    )


def _settings(rng: random.Random, folder: Path) -> None:
    """Settings that make transformers look for code or another repository."""
    (folder / "planted.py").write_text(RUN)
    choices: list[dict[str, object]] = [
        {"attn_implementation": "owner/kernel"},
        {"_attn_implementation": "owner/kernel"},
        {"hidden_act": "planted.run"},
        {"quantization_config": {"quant_method": "bitsandbytes"}},
        {"quantization_config": {"quant_method": "gptq"}},
        {"quantization_config": {"quant_method": "x"}},
        {"quantization_config": {"quant_method": 1}},
        {"auto_map": 3},
        {"custom_pipelines": {"x": {"impl": "planted.X"}}},
        {"transformers_weights": "../x.safetensors"},
        {"architectures": ["planted.X"]},
        {"torch_dtype": "os.system"},
        {"dtype": "__import__"},
        {"use_kernels": True},
        {"auto_map": {"AutoConfig": "owner/repo--planted.XConfig"}},
    ]
    _edit(folder / "config.json", **rng.choice(choices))


def _own_class(rng: random.Random, folder: Path) -> None:
    """The file that a compacted model of kdcli brings, with other content."""
    (folder / "modeling_kdcli.py").write_text(RUN)
    shape: dict[str, object] = rng.choice([{}, {"kdcli_compact": {}}, {"compact": {"x": 1}}])
    names = {
        "AutoModel": "modeling_kdcli.CompactModel",
        "AutoConfig": "modeling_kdcli.CompactConfig",
    }
    _edit(folder / "config.json", auto_map=names, **shape)


def _adapter(rng: random.Random, folder: Path) -> None:
    (folder / "planted.py").write_text(RUN)
    _edit(
        folder / "adapter_config.json",
        peft_type="LORA",
        base_model_name_or_path="../outside",
        auto_mapping={"x": "planted"},
    )
    _edit(folder / "generation_config.json", custom_generate="planted.py")
    (folder / "chat_template.jinja").write_text("{{ ''.__class__.__mro__[1].__subclasses__() }}")
    (folder / "requirements.txt").write_text("planted")


def _in_the_way(rng: random.Random, folder: Path) -> None:
    """Modules of well-known names next to the model, where a user may stand."""
    for name in (
        "yaml",
        "numpy",
        "torch",
        "transformers",
        "sitecustomize",
        "kdcli",
        "safetensors",
        "json",
    ):
        (folder / f"{name}.py").write_text(RUN)


PLANTED = (_auto_map, _tokenizer, _pickle, _index, _settings, _own_class, _adapter, _in_the_way)
SPOILED = (
    "config.json",
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "index",
    "header",
)


def orders(material: Path, model: Path) -> list[Words]:
    """What a user may do with a model."""
    data: Words = ["--task", "own", "--data", material / "data"]
    text: Words = ["--data", material / "text.txt"]
    few = [*QUICK, "--max-steps", "1"]
    mask = commands(material)["apply"][2]
    return [
        ["finetune", model, *data, *few, "-o", "out"],
        ["evaluate", model, *data, "-q", "-o", "out"],
        [
            "distill",
            model,
            "--to",
            "1x16",
            "--assistant",
            "none",
            *text,
            *few,
            "--set",
            "data.held_out_blocks=4",
            "-o",
            "out",
        ],
        ["distill", model, "--to", "1x16", *data, *few, "-o", "out", "--dry-run"],
        ["prune", model, *data, *few, "-o", "out"],
        [
            "cotrain",
            "1x16",
            "1x16",
            "--base",
            model,
            *text,
            *few,
            "--set",
            "data.held_out_blocks=4",
            "-o",
            "out",
        ],
        ["mask", "apply", mask, "--base", model, "-o", "out", "-q"],
        [
            "benchmark",
            model,
            "--batch-size",
            "1",
            "--seq-len",
            "8",
            "--set",
            "measure.min_runs=1",
            "-o",
            "out",
        ],
        ["export", model, "--format", "onnx", "-o", "out", "-q"],
    ]


def foreign(case: Case) -> None:
    """Use a model with one thing wrong or planted; no trace of it running."""
    rng, model, marker = case.rng, case.folder / "model", case.folder / "MARKER"
    shutil.copytree(case.material / rng.choice(("encoder", "teacher")), model)
    shutil.copytree(case.material / "encoder", case.folder / "outside")
    plant = rng.choice(PLANTED) if case.number % 2 else None
    what = plant.__name__ if plant else rng.choice(SPOILED)
    if plant:
        plant(rng, model)
    else:
        spoiled(rng, model, what)
    words = rng.choice(orders(case.material, model))
    how = {
        "FAULTS_MARKER": str(marker),
        "KDCLI_CACHE": str(case.folder / "cache"),
        "HF_MODULES_CACHE": str(case.folder / "hf"),
    }
    try:
        if plant is _in_the_way:
            _stands_in(case, how)
        else:
            kdcli(case.folder, *words, environment=how).check()
        if marker.exists():
            raise Fault(f"planted code ran as {marker.read_text()}")
        if (case.folder / "hf").exists() and any((case.folder / "hf").rglob("planted.py")):
            raise Fault("planted code was copied")
    except Fault as fault:
        verb = "a new Python" if plant is _in_the_way else words[0]
        raise Fault(f"{verb} of a model with {what}: {fault}") from None


def _stands_in(case: Case, how: dict[str, str]) -> None:
    """Commands that start Python anew, where the working directory is the model's."""
    own = ["--task", "own", "--data", case.material / "data", *QUICK, "--max-steps", "1"]
    measured = [
        "--batch-size",
        "1",
        "--seq-len",
        "8",
        "--set",
        "measure.min_runs=1",
        "--set",
        "measure.min_seconds=0",
    ]
    words = case.rng.choice(
        (["benchmark", ".", *measured], ["finetune", ".", *own, "--processes", "2"])
    )
    kdcli(
        case.folder, *words, "-o", case.folder / "out", cwd=case.folder / "model", environment=how
    ).check()


KINDS = [Kind("models", 320, foreign, wall=90)]
