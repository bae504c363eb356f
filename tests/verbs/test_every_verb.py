"""Every verb on every type of model: what works, and what is refused with which reason.

`every_verb.json` stores the verbs, and the refusals of each type; what it does not name works.
`KDCLI_WRITE_VERBS=1` writes it anew, `tools/model_types.py` shows it.
"""

import json
import os
import random
from pathlib import Path

import pytest
import torch
from encoders import DERIVED, TYPES, bytes_of_words, on_disk, small_config
from fake_verbs import Fakes
from filelock import FileLock
from own_files import kdcli, own, write
from transformers import PreTrainedConfig

from kdcli.errors import UsageError
from kdcli.models.derived_layout import base_model
from kdcli.models.layout import base_class

TABLE = Path(__file__).with_name("every_verb.json")
CONTRACT = (*TYPES, *DERIVED, "gemma3_text", "layoutlm", "qwen3", "t5", "xmod")
FURTHER = (
    *("bart", "gemma", "gemma2", "gpt2", "gpt_neox", "lfm2", "llama", "longformer", "mbart"),
    *("ministral3", "mistral", "modernbert-decoder", "mt5", "opt", "phi3", "qwen2", "umt5"),
    *("xlm", "xlnet"),
)
"""Decoders and encoder-decoders of the embedding models that people use, and types without layers
that can be used."""
STORED = json.loads(TABLE.read_text("utf-8"))["types"]
WRITES = "KDCLI_WRITE_VERBS" in os.environ
TRIED = [*CONTRACT, *FURTHER] if WRITES else list(STORED)
WORKS = "works"
TRAIN = ("--max-steps", "2", "--batch-size", "8", "--dtype", "fp32", "--set", "data.max_length=24")
STEPS = (*TRAIN, "--set", "measure.latency=false")
VECTORS = ("--method", "embedding", "--pooling", "mean")
PLAN = {
    "plan__shapes": ["1x16"],
    "plan__backends": ["onnx-int8"],
    "plan__trim_from": 1.0,
    "plan__prune": None,
    "plan__distill": {"train": {"max_steps": 2, "batch_size": 8, "dtype": "fp32"}},
    "data__max_length": 24,
    "goal__max_drop": 100.0,
}
"""A compression to one student, and int8 files of it and of the model."""


def config_of(kind: str) -> PreTrainedConfig:
    config = small_config(kind)
    config.update({"bos_token_id": 2, "eos_token_id": 3})
    return config


def arguments(verb: str, folder: Path, data: Path) -> list[object]:
    """The command line of a verb, whose model is `folder/model` or what an earlier verb wrote."""
    model, tuned, texts = folder / "model", folder / "finetune", data / "texts.txt"
    task = ("--task", "own", "--data", data / "task")
    texted = ("--data", texts, *STEPS, "--set", "eval.tasks=[]")
    columns = ("--set", "data.columns={text: a, pair: b, label: score}")
    start = tuned if tuned.exists() else model
    # A model without a classifier is exported and compressed by its vectors.
    by_head = (tuned, *task) if tuned.exists() else (model, "--pooling", "mean", "--data", texts)
    words = {
        "evaluate": (model, "--pooling", "mean", "--task", "own", "--data", data / "sts", *columns),
        "trim": (model, "--data", texts),
        "distill text": (model, "--to", "1x16", *texted),
        "distill vectors": (model, "--to", "1x16", *VECTORS, *texted),
        "distill to static": (model, "--to", "static:8", *VECTORS, *texted),
        "finetune": (model, *task, *STEPS),
        "distill task": (start, "--to", "1x16", *task, *STEPS),
        "distill outputs": (start, "--to", "1x16", "--method", "soft-targets", *task, *STEPS),
        "prune": (model, *task, "--method", "smp", "--sparsity", "0.5", *STEPS),
        "export": (*by_head, "--format", "onnx", "--int8"),
    }
    return [verb.partition(" ")[0], *words[verb], "-o", folder / verb]


VERBS = (
    *("evaluate", "trim", "distill text", "distill vectors", "distill to static"),
    *("finetune", "distill task", "distill outputs", "prune", "export", "compress"),
)


def compressed(folder: Path, data: Path) -> str:
    """`works`, or the message of the error, of a compression that trains and exports in earnest.

    Its latencies are given: the processes that measure them take most of the time.
    """
    tuned, keys = folder / "finetune", dict(PLAN)
    keys |= {"model": str(folder / "model"), "task": None, "pooling": "mean"}
    keys["data__source"] = str(data / "texts.txt")
    if tuned.exists():
        keys |= {"model": str(tuned), "task": "own", "data__source": str(data / "task")}
        del keys["pooling"]
    try:
        Fakes({}, in_earnest=True).compress(**keys, output_dir=folder / "compress")
    except UsageError as error:
        return error.message
    return WORKS


def outcome(verb: str, folder: Path, data: Path) -> str:
    """`works`, or the message of the error."""
    if verb == "compress":
        return compressed(folder, data).replace(str(folder), "DIR")
    result = kdcli(*arguments(verb, folder, data))
    if result.exit_code == 0:
        return WORKS
    assert result.exit_code in (2, 3), (verb, result.output, result.exception)
    message = result.stderr.rpartition("error: ")[2].splitlines()[0]
    return message.replace(str(folder), "DIR")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("data"), random.Random(0)

    def text() -> str:
        return " ".join(f"w{rng.randrange(50)}" for _ in range(rng.randrange(3, 9)))

    own(folder / "task", "class", n=64, judged=24)
    (folder / "texts.txt").write_text("\n".join(text() for _ in range(300)), "utf-8")
    for split in ("train", "validation"):
        pairs = [{"a": text(), "b": text(), "score": rng.random() * 5} for _ in range(32)]
        write(folder / "sts" / f"{split}.jsonl", pairs)
    return folder


@pytest.fixture
def folder(request, tmp_path):
    kind = request.param
    torch.manual_seed(0)
    config = config_of(kind)
    # An encoder that is part of a class is saved with all of it.
    whole = base_class(config).from_config(config) if kind in ("bart", "mbart") else None
    # transformers reads tokenizers of this type with a class of its own.
    tokenizer = bytes_of_words() if kind == "qwen2" else None
    on_disk((whole or base_model(config)).eval(), tmp_path / kind / "model", tokenizer)
    return tmp_path / kind


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["deberta", "xmod"], indirect=True)
def test_types_that_need_float32_are_pruned_in_it(folder, data):
    words = arguments("prune", folder, data)
    result = kdcli(*("bf16" if word == "fp32" else word for word in words))
    assert result.exit_code == 0, result.output


@pytest.mark.long
@pytest.mark.parametrize("folder", TRIED, indirect=True)
def test_each_verb_does_with_each_type_what_it_did(folder, data):
    now = {verb: said for verb in VERBS if (said := outcome(verb, folder, data)) != WORKS}
    if WRITES:
        with FileLock(f"{TABLE}.lock"):
            types = json.loads(TABLE.read_text("utf-8"))["types"] | {folder.name: now}
            table = {"verbs": VERBS, "types": dict(sorted(types.items()))}
            TABLE.write_text(json.dumps(table, indent=1) + "\n", "utf-8")
    else:
        assert now == STORED[folder.name]
