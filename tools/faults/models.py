"""Models from strangers: damaged files, and planted code that must never run."""

from __future__ import annotations

import json
import random
import shutil
import textwrap
from collections.abc import Callable
from pathlib import Path

from tools.faults.campaign import Case, Fault, Kind
from tools.faults.files import damage_model
from tools.faults.kills import Words, commands, words_of
from tools.faults.material import QUICK
from tools.faults.process import kdcli

RUN = "import os, pathlib\npathlib.Path(os.environ['FAULTS_MARKER']).write_text(__name__)\n"
"""The planted code, which leaves a file when it runs."""
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
    """An object that runs the planted code when it is unpickled."""

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
    """Other content for the file of code that belongs to a compacted model of kdcli."""
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


def _modules_with_known_names(rng: random.Random, folder: Path) -> None:
    """Modules with the names of well-known packages in the model's folder."""
    for name in words_of("yaml numpy torch transformers sitecustomize kdcli safetensors json"):
        (folder / f"{name}.py").write_text(RUN)


PLANTED = (
    *(_auto_map, _tokenizer, _pickle, _index, _settings, _own_class, _adapter),
    _modules_with_known_names,
)
"""Functions that plant code in a model's folder."""
DAMAGED = (
    *("config.json", "config.json", "tokenizer.json", "tokenizer_config.json"),
    *("index", "header"),
)
"""Names of the parts that `damage_model` can damage, as often as they are drawn."""


def commands_for(material: Path, model: Path) -> list[Words]:
    """Return the commands that a user may run on a model."""
    data: Words = ["--task", "own", "--data", material / "data"]
    text: Words = ["--data", material / "text.txt"]
    few: Words = [*QUICK, "--max-steps", "1"]
    few_blocks = words_of("--set data.held_out_blocks=4")
    to_small = words_of("--to 1x16 --assistant none")
    once = words_of("--batch-size 1 --seq-len 8 --set measure.min_runs=1")
    out = words_of("-o out")
    mask = commands(material)["apply"][2]
    return [
        ["finetune", model, *data, *few, *out],
        ["evaluate", model, *data, "-q", *out],
        ["distill", model, *to_small, *text, *few, *few_blocks, *out],
        ["distill", model, "--to", "1x16", *data, *few, *out, "--dry-run"],
        ["prune", model, *data, *few, *out],
        ["cotrain", "1x16", "1x16", "--base", model, *text, *few, *few_blocks, *out],
        ["mask", "apply", mask, "--base", model, *out, "-q"],
        ["benchmark", model, *once, *out],
        ["export", model, "--format", "onnx", *out, "-q"],
    ]


def foreign(case: Case) -> None:
    """Use a model with one damaged file or planted code. The code must never run."""
    rng, model, marker = case.rng, case.folder / "model", case.folder / "MARKER"
    shutil.copytree(case.material / rng.choice(("encoder", "teacher")), model)
    shutil.copytree(case.material / "encoder", case.folder / "outside")
    plant = rng.choice(PLANTED) if case.number % 2 else None
    what = plant.__name__ if plant else rng.choice(DAMAGED)
    if plant:
        plant(rng, model)
    else:
        damage_model(rng, model, what)
    words = rng.choice(commands_for(case.material, model))
    environment = {
        "FAULTS_MARKER": str(marker),
        "KDCLI_CACHE": str(case.folder / "cache"),
        "HF_MODULES_CACHE": str(case.folder / "hf"),
    }
    try:
        if plant is _modules_with_known_names:
            _run_in_model_folder(case, environment)
        else:
            kdcli(case.folder, *words, environment=environment).check()
        if marker.exists():
            raise Fault(f"planted code ran as {marker.read_text()}")
        if (case.folder / "hf").exists() and any((case.folder / "hf").rglob("planted.py")):
            raise Fault("planted code was copied")
    except Fault as fault:
        verb = "a new Python" if plant is _modules_with_known_names else words[0]
        raise Fault(f"{verb} of a model with {what}: {fault}") from None


def _run_in_model_folder(case: Case, environment: dict[str, str]) -> None:
    """Run a command that starts new Python processes, with the model's folder as the working
    directory."""
    own = ["--task", "own", "--data", case.material / "data", *QUICK, "--max-steps", "1"]
    measured = words_of(
        "--batch-size 1 --seq-len 8 --set measure.min_runs=1 --set measure.min_seconds=0"
    )
    commands = ["benchmark", ".", *measured], ["finetune", ".", *own, "--processes", "2"]
    words = [*case.rng.choice(commands), "-o", case.folder / "out"]
    kdcli(case.folder, *words, cwd=case.folder / "model", environment=environment).check()


KINDS = [Kind("models", 320, foreign, wall=90)]
