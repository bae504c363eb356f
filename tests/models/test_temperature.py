"""The temperature in a saved model's configuration, as transformers reads it."""

import json
import math

import pytest
import torch
from encoders import tiny_config, tiny_tokenizer
from transformers import AutoModelForSequenceClassification

from kdcli.errors import UsageError
from kdcli.models.load import save_model
from kdcli.models.temperature import store_temperature, stored_temperature


@pytest.fixture
def saved(tmp_path):
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(tiny_config("bert", num_labels=3))
    save_model(model, tiny_tokenizer(), tmp_path / "model")
    return tmp_path / "model"


def test_transformers_reads_the_temperature(saved):
    before = json.loads((saved / "config.json").read_text("utf-8"))
    store_temperature(saved, 1.75)
    after = json.loads((saved / "config.json").read_text("utf-8"))
    assert after == before | {"kdcli_temperature": 1.75}
    model = AutoModelForSequenceClassification.from_pretrained(saved)
    logits = model(torch.tensor([[1, 2, 3]])).logits
    # The line of docs/evaluate.md.
    scaled = logits / getattr(model.config, "kdcli_temperature", 1.0)
    torch.testing.assert_close(scaled, logits / 1.75)
    assert stored_temperature(model.config) == 1.75
    # A second temperature replaces the first.
    store_temperature(saved, 0.5)
    assert json.loads((saved / "config.json").read_text("utf-8"))["kdcli_temperature"] == 0.5


def test_a_model_that_is_saved_again_has_no_temperature(saved, tmp_path):
    # Its weights may have changed since the temperature was fitted.
    store_temperature(saved, 1.75)
    model = AutoModelForSequenceClassification.from_pretrained(saved)
    save_model(model, tiny_tokenizer(), tmp_path / "again")
    config = json.loads((tmp_path / "again" / "config.json").read_text("utf-8"))
    assert "kdcli_temperature" not in config


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan, math.inf])
def test_a_temperature_is_a_positive_number(saved, temperature):
    before = (saved / "config.json").read_bytes()
    with pytest.raises(UsageError, match="must be above 0"):
        store_temperature(saved, temperature)
    assert (saved / "config.json").read_bytes() == before


@pytest.mark.parametrize("value", ["1.5", True, -1, None])
def test_a_temperature_from_outside_is_checked(saved, value):
    config = json.loads((saved / "config.json").read_text("utf-8"))
    (saved / "config.json").write_text(json.dumps(config | {"kdcli_temperature": value}), "utf-8")
    loaded = AutoModelForSequenceClassification.from_pretrained(saved).config
    if value is None:
        assert stored_temperature(loaded) is None
    else:
        with pytest.raises(UsageError, match="must be above 0"):
            stored_temperature(loaded)


def test_a_directory_without_a_model_is_refused(tmp_path):
    with pytest.raises(UsageError, match="cannot be read"):
        store_temperature(tmp_path, 1.5)
