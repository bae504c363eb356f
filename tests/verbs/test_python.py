"""The verbs as functions: what they take, return and raise."""

import inspect
import os
import pickle
import re
import subprocess
import sys
import traceback
from pathlib import Path

import numpy as np
import own_files
import pandas as pd
import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset, DatasetDict
from encoders import tiny_encoder, tiny_tokenizer
from sentence_transformers import SentenceTransformer
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import kdcli
from kdcli.cli.python import command, values_of
from kdcli.errors import GateError, UsageError
from kdcli.recipe.resolve import resolve
from kdcli.recipe.yaml import read_yaml
from kdcli.workloads.settings import FinetuneRecipe

ROOT = Path(kdcli.__file__).parents[1]


def test_dir_names_every_function_and_importing_loads_no_torch():
    assert {*kdcli.VERBS, "load", "read", "__version__"} == set(dir(kdcli))
    assert (ROOT / "kdcli" / "py.typed").is_file()
    code = "import kdcli, sys; dir(kdcli); kdcli.finetune; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"
    with pytest.raises(AttributeError, match="no attribute 'finetun'"):
        _ = kdcli.finetun


SPIN = """
import importlib.abc, os, sys

class Watch(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "torch":
            print(os.environ.get("GOMP_SPINCOUNT"), flush=True)
            os._exit(0)

sys.meta_path.insert(0, Watch())
import kdcli
kdcli.finetune("demo", task="own", data=[{"text": "a", "label": "b"}])
"""


def test_threads_are_set_up_before_torch_is_imported():
    env = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    printed = subprocess.check_output([sys.executable, "-c", SPIN], text=True, env=env)
    assert printed in ("0\n", "10000\n")


def test_a_function_has_the_options_of_its_verb():
    known = inspect.signature(kdcli.export)
    assert next(iter(known.parameters)) == "model"
    assert known.parameters["max_drop"].annotation == float | None
    assert known.parameters["output_dir"].annotation == Path | None | str
    assert not {"json", "quiet", "processes"} & set(known.parameters)
    page = inspect.getdoc(kdcli.compress) or ""
    assert re.findall(r"^    (\w+): \S", page, re.M) == list(
        inspect.signature(kdcli.compress).parameters
    )
    assert "Maximum drop of the task metric, in points" in page
    assert pickle.loads(pickle.dumps(kdcli.export)) is kdcli.export
    with pytest.raises(UsageError, match="unexpected keyword argument 'int9'"):
        kdcli.export("demo", file_format="onnx", int9=True)
    with pytest.raises(UsageError) as unknown:
        kdcli.finetune("demo", data="x.csv", measure={"latency": False})
    assert "keys of the recipe are in config, as in config={'measure'" in unknown.value.hint
    with pytest.raises(UsageError) as unknown:
        kdcli.finetune("demo", data="x.csv", epoch=3)
    assert "config" not in unknown.value.hint


def test_a_run_returns_its_report_prints_nothing_and_raises_what_a_command_says(tmp_path, capsys):
    data, base = (
        own_files.own(tmp_path / "data", "class", n=32, judged=16),
        own_files.encoder(tmp_path / "base"),
    )
    how = {"task": "own", "data": data, "sets": "measure.latency=false", "dtype": "fp32"}
    done = kdcli.finetune(base, **how, max_steps=3, batch_size=8, output_dir=str(tmp_path / "out"))
    assert (done.folder, done.report) == (tmp_path / "out", own_files.report_of(tmp_path / "out"))
    assert done.report.command_line is None
    assert repr(done) == f"RunResult(folder={done.folder!r}, trust_remote_code=False)"
    table = done.to_frame()
    assert list(table.index) == ["finetuned"]
    assert (
        table.loc["finetuned", "own accuracy"]
        == done.report.quality["own"]["finetuned"]["accuracy"]
    )
    assert table.loc["finetuned", "parameters"] == done.report.cards["finetuned"].params_total
    assert "<iframe srcdoc=" in done._repr_html_()
    assert capsys.readouterr().out == ""
    with pytest.raises(GateError) as caught:
        kdcli.evaluate(
            done.folder,
            task="own",
            data=data,
            min_metric="accuracy=1.0",
            output_dir=tmp_path / "judged",
        )
    assert caught.value.folder == tmp_path / "judged"
    missed = kdcli.read(caught.value.folder)
    assert missed.report == own_files.report_of(tmp_path / "judged")
    assert kdcli.read(str(tmp_path / "out")).report == done.report
    with pytest.raises(UsageError, match="no run at"):
        kdcli.read("nowhere")
    with pytest.raises(UsageError, match="contradict"):
        kdcli.finetune(base, **how, max_steps=3, epochs=1.0)


FAST = {"measure": {"latency": False}, "train": {"log_every": 1}}
HOW = {"task": "own", "dtype": "fp32", "max_steps": 3, "batch_size": 8, "config": FAST}


def test_an_object_trains_the_model_that_its_file_trains(tmp_path):
    """Also after the run was resumed: the same object has the same path."""
    base = own_files.encoder(tmp_path / "base")
    splits = {"train": own_files.rows("class", 32), "validation": own_files.rows("class", 16, 1)}
    folder = own_files.own(tmp_path / "data", "class", n=32, judged=16)
    of_files = kdcli.finetune(base, data=folder, **HOW, output_dir=tmp_path / "files")
    objects = DatasetDict({name: Dataset.from_list(rows) for name, rows in splits.items()})
    out = tmp_path / "objects"
    of_objects = kdcli.finetune(base, data=objects, **HOW, output_dir=out)
    own_files.same_logs(of_files.folder, out)
    assert own_files.same_weights(of_files.folder, out)
    assert of_objects.report.quality == of_files.report.quality
    source = of_objects.report.recipe["data"]["source"]
    assert read_yaml((out / "recipe.yaml").read_text("utf-8"))["data"]["source"] == source
    assert Path(source).parent == Path(os.environ["KDCLI_CACHE"]) / "objects"
    again = kdcli.finetune(base, data=DatasetDict(objects), **HOW, resume=True, output_dir=out)
    assert again.report == of_objects.report
    changed = DatasetDict({name: data.select(range(15)) for name, data in objects.items()})
    with pytest.raises(UsageError, match="was started with another recipe"):
        kdcli.finetune(base, data=changed, **HOW, resume=True, output_dir=out)


def test_a_verb_leaves_the_accelerator_and_the_random_numbers_of_its_caller(tmp_path):
    accelerator = Accelerator(cpu=True)
    base, rows = own_files.encoder(tmp_path / "base"), own_files.rows("class", 32)
    torch.manual_seed(7)
    number = torch.rand(1)
    torch.manual_seed(7)
    kdcli.finetune(base, data=rows, **HOW | {"dtype": "bf16"}, output_dir=tmp_path / "out")
    assert torch.equal(torch.rand(1), number)
    assert accelerator.mixed_precision == "no"


def test_a_signal_raises_keyboard_interrupt_which_says_how_to_continue(tmp_path):
    base, rows = own_files.encoder(tmp_path / "base"), own_files.rows("class", 32)
    out = tmp_path / "out"
    own_files.terminate_in_training(tmp_path)
    with pytest.raises(KeyboardInterrupt) as caught:
        kdcli.finetune(base, data=rows, **HOW | {"max_steps": 4000}, output_dir=out)
    call = f"the same call with output_dir='{out}', resume=True"
    assert str(caught.value).endswith(f". continue with: {call}")


def recipe_of(name, *arguments, **options):
    """The values with which a function calls its verb."""
    return values_of(command(name), *arguments, **options)


@pytest.mark.parametrize("name", [name for name in kdcli.VERBS if name != "push"])
def test_every_verb_with_data_takes_an_object(name):
    frame = pd.DataFrame({"text": ["w1", "w2"], "label": ["a", "b"]})
    needed = {"export": {"file_format": "onnx"}}.get(name, {})
    given = {"model": "demo"} if name in ("export", "trim", "adapt") else {}
    paths = [
        recipe_of(name, **given, **needed, data=data)["data"]
        for data in (frame, Dataset.from_pandas(frame), frame.to_dict("records"), ["w1", "w2"])
    ]
    assert all(isinstance(path, str) and Path(path).is_file() for path in paths)
    file = str(Path(paths[0]))
    for same in (file, Path(file)):
        assert recipe_of(name, **given, **needed, data=same)["data"] == file
    with pytest.raises(UsageError, match=rf"kdcli\.{name}: data: got an object of type int"):
        getattr(kdcli, name)(**given, **needed, data=3)


def test_a_corpus_is_an_object_too_and_so_is_data_in_config():
    values = recipe_of("distill", "demo", corpus=["w1 w2"])
    assert Path(values["corpus"]).read_text("utf-8") == '{"text": "w1 w2"}\n'
    frame = pd.DataFrame({"text": ["w1"]})
    config = {"eval": {"source": frame}, "data.train": DatasetDict(train=Dataset.from_list(ROW))}
    first, second = recipe_of("distill", "demo", config=config)["sets"]
    assert Path(first.removeprefix("eval.source=")).suffix == ".parquet"
    assert Path(second.removeprefix("data.train=")).is_dir()


ROW = [{"text": "w1", "label": "a"}]


@pytest.mark.parametrize("library", ["transformers", "sentence-transformers"])
def test_a_model_in_memory_gives_the_weights_that_its_directory_gives(tmp_path, library):
    """Also after the run was resumed: the same model has the same path."""
    if library == "transformers":
        base = own_files.headed(tmp_path / "base", ("brisk", "calm"))
        model = AutoModelForSequenceClassification.from_pretrained(base)
        how = HOW | {"data": own_files.rows("class", 32)}
        own = {"tokenizer": AutoTokenizer.from_pretrained(base)}
    else:
        base = own_files.embedder(tmp_path / "base")
        model, own = SentenceTransformer(str(base), device="cpu"), {}
        how = HOW | {"data": own_files.rows("score", 32)}
    of_files = kdcli.finetune(base, **how, output_dir=tmp_path / "files")
    out = tmp_path / "object"
    of_object = kdcli.finetune(model, **own, **how, output_dir=out)
    own_files.same_logs(of_files.folder, out)
    assert own_files.same_weights(of_files.folder, out)
    source = Path(of_object.report.recipe["model"])
    assert source.parents[1] == Path(os.environ["KDCLI_CACHE"]) / "objects"
    again = kdcli.finetune(model, **own, **how, resume=True, output_dir=out)
    assert again.report == of_object.report
    card = (out / "README.md").read_text("utf-8")
    assert type(model).__name__ in card
    assert source.parent.name not in card
    next(iter(model.parameters())).data.add_(1.0)
    with pytest.raises(UsageError, match="was started with another recipe"):
        kdcli.finetune(model, **own, **how, resume=True, output_dir=out)


def test_a_model_in_memory_keeps_the_rows_that_trained_it(tmp_path):
    base = own_files.headed(tmp_path / "base", ("brisk", "calm"))
    rows = own_files.rows("class", 60)
    done = kdcli.finetune(base, **HOW, data=rows, output_dir=tmp_path / "out")
    of_object, of_files = (
        kdcli.evaluate(model, **own, task="own", data=rows, output_dir=tmp_path / name)
        for name, model, own in (
            ("object", done.model, {"tokenizer": AutoTokenizer.from_pretrained(done.folder)}),
            ("files", done.folder, {}),
        )
    )
    assert of_object.report.evaluations[0].n == of_files.report.evaluations[0].n == 8


def test_a_result_saves_the_files_of_its_model(tmp_path):
    base = own_files.headed(tmp_path / "base", ("brisk", "calm"))
    done = kdcli.finetune(
        base, **HOW, data=own_files.rows("class", 32), output_dir=tmp_path / "out"
    )
    done.save_pretrained(tmp_path / "new" / "copy")
    files = {file.name for file in (tmp_path / "new" / "copy").iterdir()}
    assert files == {
        *("README.md", "config.json", "model.safetensors"),
        *("tokenizer.json", "tokenizer_config.json"),
    }
    assert own_files.same_weights(tmp_path / "out", tmp_path / "new" / "copy")
    with pytest.raises(UsageError, match="copy is not empty"):
        done.save_pretrained(tmp_path / "new" / "copy")


def test_what_is_no_whole_model_is_refused():
    own = {"task": "own", "data": "rows.csv"}
    with pytest.raises(UsageError, match="model: got a BertModel without its tokenizer"):
        kdcli.finetune(tiny_encoder("bert"), **own)
    with pytest.raises(UsageError, match=r"teacher takes a directory, a hub id.* Linear") as caught:
        kdcli.distill(torch.nn.Linear(2, 2))
    assert ".save_pretrained(DIR)" in caught.value.hint
    last_line = "".join(traceback.format_exception(caught.value)).splitlines()[-1]
    assert last_line == caught.value.hint
    with pytest.raises(UsageError, match="tokenizer belongs to a PreTrainedModel"):
        kdcli.finetune("demo", **own, tokenizer=tiny_tokenizer())
    with pytest.raises(UsageError, match="sets takes a string") as caught:
        kdcli.finetune("demo", sets={"data.max_length": 8})
    assert "config=" in caught.value.hint


VALUES = {
    "train": {"lr": 1e-5, "max_steps": 7, "lr_schedule": "constant"},
    "data": {"columns": {"text": "no", "label": "1e-3"}, "skip_bad": True},
    "grid": {"train.lr": [1e-3, 2], "train": {"batch_size": (8, 16)}},
    "head": {"words": ["a: b", "#c", "", "é\n'\"", "null", "~"], "label_map": None},
    "measure.latency": False,
    "workload": {},
}


def test_config_says_what_sets_say():
    sets = recipe_of("finetune", "demo", config=VALUES)["sets"]
    recipe = resolve(FinetuneRecipe, recipe=None, sets=sets).recipe
    assert (recipe.train.lr, recipe.train.max_steps) == (1e-5, 7)
    assert recipe.train.lr_schedule == "constant"
    assert recipe.data.columns == {"text": "no", "label": "1e-3"}
    assert recipe.data.skip_bad is True
    assert recipe.grid == {"train": {"lr": [1e-3, 2], "batch_size": [8, 16]}}
    assert recipe.head.words == VALUES["head"]["words"]
    assert recipe.measure.latency is False
    numbers = {"train": {"lr": np.float32(0.5), "max_steps": np.int64(3)}, "model": Path("a/b")}
    sets = recipe_of("finetune", config=numbers, sets="train.max_steps=4")["sets"]
    recipe = resolve(FinetuneRecipe, recipe=None, sets=sets).recipe
    assert (recipe.train.lr, recipe.train.max_steps, recipe.model) == (0.5, 4, "a/b")
    steps = [{"distill": {"train": {"lr": 1e-3}}}, {"quantize": {"format": "onnx"}}]
    (pair,) = recipe_of("compress", "demo", config={"steps": steps})["sets"]
    assert read_yaml(pair.removeprefix("steps=")) == steps


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"train": {"lr": "1e-3"}}, r"'train\.lr' must be a number, got '1e-3'"),
        ({"train": {"max_steps": 1.5}}, r"'train\.max_steps' must be a whole number"),
        ({"train": {"learning_rate": 1}}, r"unknown key 'train\.learning_rate'.*'train\.lr'"),
        ({"lr": 1}, r"unknown key 'lr'.*did you mean 'train\.lr'"),
        ({"train": 3}, "'train' .* is a section"),
        ({"train": {"lr": {}}}, r"'train\.lr' must be a number"),
        (["train.lr=1"], "config takes a dict of recipe keys, not list"),
        ({3: 1}, "config has the key 3; keys are words"),
        ({"train": {"a=b": 1}}, "config: train has the key 'a=b'; keys are words"),
        ({"train": {"lr": object()}}, r"'train\.lr' takes text, a number.*type object"),
        ({"train": {"lr": 1j}}, r"'train\.lr' takes text, a number.*type complex"),
        ({"train": {"lr": pd.DataFrame()}}, r"'train\.lr' takes text.*type DataFrame"),
        ({"data": {"source": pd.DataFrame()}}, r"data\.source: the table has no columns"),
        ({"model": tiny_encoder("bert")}, "'model' takes text.*type BertModel"),
    ],
)
def test_a_wrong_config_is_refused_with_its_key(config, message):
    with pytest.raises(UsageError, match=message):
        kdcli.finetune("demo", task="own", data=["w1"], config=config)
