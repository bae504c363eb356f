"""The verbs as functions: what they take, return and raise."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import own_files
import pandas as pd
import pytest
from datasets import Dataset, DatasetDict
from encoders import tiny_encoder

import kdcli
from kdcli.errors import GateError, UsageError

ROOT = Path(kdcli.__file__).parents[1]


def test_dir_names_every_function_and_importing_loads_no_torch():
    assert {*kdcli.VERBS, "load", "__version__"} == set(dir(kdcli))
    assert (ROOT / "kdcli" / "py.typed").is_file()
    code = "import kdcli, sys; dir(kdcli); kdcli.finetune; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"
    with pytest.raises(AttributeError, match="no attribute 'finetun'"):
        _ = kdcli.finetun


def test_a_function_has_the_options_of_its_verb():
    known = inspect.signature(kdcli.export)
    assert next(iter(known.parameters)) == "model"
    assert known.parameters["max_drop"].annotation == float | None
    assert known.parameters["output_dir"].annotation == Path | None | str
    assert not {"json", "quiet", "processes"} & set(known.parameters)
    with pytest.raises(UsageError, match="unexpected keyword argument 'int9'"):
        kdcli.export("demo", file_format="onnx", int9=True)


def test_a_run_returns_its_report_prints_nothing_and_raises_what_a_command_says(tmp_path, capsys):
    data, base = (
        own_files.own(tmp_path / "data", "class", n=32, judged=16),
        own_files.encoder(tmp_path / "base"),
    )
    how = {"task": "own", "data": data, "sets": "measure.latency=false", "dtype": "fp32"}
    done = kdcli.finetune(base, **how, max_steps=3, batch_size=8, output_dir=str(tmp_path / "out"))
    assert (done.folder, done.report) == (tmp_path / "out", own_files.report_of(tmp_path / "out"))
    table = done.to_frame()
    assert list(table.index) == ["finetuned"]
    assert (
        table.loc["finetuned", "own accuracy"]
        == done.report.quality["own"]["finetuned"]["accuracy"]
    )
    assert table.loc["finetuned", "parameters"] == done.report.cards["finetuned"].params_total
    assert "<iframe srcdoc=" in done._repr_html_()
    assert capsys.readouterr().out == ""
    with pytest.raises(GateError):
        kdcli.evaluate(
            done.folder,
            task="own",
            data=data,
            min_metric="accuracy=1.01",
            output_dir=tmp_path / "judged",
        )
    with pytest.raises(UsageError, match="contradict"):
        kdcli.finetune(base, **how, max_steps=3, epochs=1.0)


def test_an_object_in_place_of_a_file_is_refused_with_the_way_to_write_it():
    rows = {"text": ["w1", "w2"], "label": [0, 1]}
    for data, hint in (
        (pd.DataFrame(rows), "to_csv"),
        (Dataset.from_dict(rows), "to_csv"),
        (DatasetDict(train=Dataset.from_dict(rows)), "to_json"),
        (rows, r"\.jsonl"),
        ([rows], r"\.jsonl"),
    ):
        with pytest.raises(UsageError, match=r"finetune: data takes a file, a directory") as caught:
            kdcli.finetune("demo", task="own", data=data)
        assert re.search(hint, caught.value.hint)
    with pytest.raises(UsageError, match=r"model takes a directory or a hub id, not .* BertModel"):
        kdcli.finetune(tiny_encoder("bert"), task="own", data="rows.csv")
    with pytest.raises(UsageError, match=r"data takes a file, .* type BertModel") as caught:
        kdcli.finetune("demo", task="own", data=tiny_encoder("bert"))
    assert "the model as an argument of its own" in caught.value.hint
    with pytest.raises(UsageError, match=r"model takes a directory or a hub id, not .* dict"):
        kdcli.finetune({"embeddings": 1}, task="own", data="rows.csv")
    with pytest.raises(UsageError, match="sets takes a string"):
        kdcli.finetune("demo", sets={"data.max_length": 8})
