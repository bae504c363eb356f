"""Outputs of scored models on disk: exact, and computed again for anything that differs."""

import importlib
import os
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from test_cache import headed, rows_of

from kdcli.kept import delete_oldest_results, keep_results
from kdcli.models.identity import weights_hash
from kdcli.run.context import cpu_session
from kdcli.targets.outputs import load_or_compute_outputs

SHAPES = {"class": (3,), "tokens": (30, 3)}


class Asked:
    """Asks for the outputs of a model, and counts how often they are computed."""

    def __init__(self, shape):
        self.shape, self.computed = shape, 0

    def __call__(self, model, rows, session=None):
        def compute():
            self.computed += 1
            drawn = np.random.default_rng(self.computed)
            return [drawn.standard_normal(self.shape, np.float32) for _ in range(len(rows))]

        fingerprint = lambda: weights_hash(model)  # noqa: E731
        return load_or_compute_outputs(model, fingerprint, rows, session or cpu_session(), compute)


def session_of(dtype=torch.float32, device="cpu", judging=False, processes=1):
    accelerator = SimpleNamespace(num_processes=processes)
    place = torch.device(device)
    return SimpleNamespace(
        accelerator=accelerator, device=place, compute_dtype=dtype, judging=judging
    )


@pytest.mark.parametrize("kind", SHAPES)
def test_outputs_are_kept_to_the_bit(kind, tmp_path):
    ask, model, rows = Asked(SHAPES[kind]), headed(), rows_of()
    with keep_results(tmp_path / "outputs"):
        first, second = ask(model, rows), ask(model, rows)
    assert ask.computed == 1
    for before, after in zip(first, second, strict=True):
        np.testing.assert_array_equal(before, after, strict=True)
    # Nothing is kept outside the context.
    ask(model, rows)
    assert ask.computed == 2
    assert [file.suffix for file in (tmp_path / "outputs").iterdir()] == [".safetensors"]


def test_what_outputs_depend_on_is_never_mixed_up(tmp_path):
    ask, model, rows = Asked((3,)), headed(), rows_of()
    other = headed()
    with torch.no_grad():
        other.classifier.bias[0] += 1
    # A smaller maximum length leaves other tokens of the same texts.
    shorter = rows_of((7, 2, 18, 3, 3, 18, 11, 5))
    asked = [(model, rows), (other, rows), (headed(dtype=torch.bfloat16), rows), (model, shorter)]
    asked += [(model, rows_of(seed=1)), (model, rows_of(types=False))]
    asked += [(model, replace(rows, pad_id=1))]
    for settings in ({"dtype": torch.bfloat16}, {"device": "meta"}, {"judging": True}):
        asked.append((model, rows, session_of(**settings)))
    with keep_results(tmp_path):
        for each in asked:
            ask(*each)
        assert ask.computed == len(asked)
        for each in asked:
            ask(*each)
    assert ask.computed == len(asked)


def test_outputs_depend_on_the_code_of_the_model(tmp_path, monkeypatch):
    """A class that comes with the model may change while its weights stay."""
    ask, rows, code = Asked((3,)), rows_of(), tmp_path / "modeling_of_outputs.py"
    text = "from transformers import BertForSequenceClassification as Bert\nclass Own(Bert): pass\n"
    code.write_text(text, "utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    model = headed()
    model.__class__ = importlib.import_module(code.stem).Own
    with keep_results(tmp_path / "outputs"):
        for added in ("", "# changed\n", ""):
            code.write_text(text + added, "utf-8")
            ask(model, rows)
    assert ask.computed == 2


@pytest.mark.parametrize("damage", [lambda b: b[:-5], lambda b: b[:-1] + bytes([b[-1] ^ 1])])
def test_damaged_outputs_are_computed_again(damage, tmp_path, capsys):
    ask, model, rows = Asked((3,)), headed(), rows_of()
    with keep_results(tmp_path):
        ask(model, rows)
        (file,) = tmp_path.iterdir()
        file.write_bytes(damage(file.read_bytes()))
        ask(model, rows)
        assert ask.computed == 2
        assert "so its content is computed again" in capsys.readouterr().err
        ask(model, rows)
    assert ask.computed == 2


def test_a_file_that_cannot_be_written_ends_no_run(tmp_path, capsys):
    (tmp_path / "file").touch()
    with keep_results(tmp_path / "file"):
        Asked((3,))(headed(), rows_of())
    assert "a result is not kept for later steps: " in capsys.readouterr().err


def test_nothing_is_kept_of_several_processes(tmp_path):
    with keep_results(tmp_path / "outputs"):
        Asked((3,))(headed(), rows_of(), session_of(processes=2))
    assert not (tmp_path / "outputs").exists()


def test_the_files_that_were_used_last_stay(tmp_path):
    ask, model = Asked((3,)), headed()
    files = []
    with keep_results(tmp_path):
        for seed in range(3):
            ask(model, rows_of(seed=seed))
            (new,) = set(tmp_path.iterdir()) - set(files)
            files.append(new)
            os.utime(new, (seed, seed))
        # A file that is read counts as new.
        ask(model, rows_of(seed=0))
    delete_oldest_results(tmp_path, 2 * files[0].stat().st_size)
    assert set(tmp_path.iterdir()) == {files[0], files[2]}
    delete_oldest_results(tmp_path / "missing")
