"""Padding on the side where it changes no answer, or a note or refusal; rows that a network cannot
read."""

import json

import pytest
import torch
from encoders import on_disk, small_config, tiny_config
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from kdcli.custom_code import custom_code
from kdcli.deploy.predict import Predictor
from kdcli.errors import UsageError
from kdcli.models.load import load_encoder, save_model


def saved(kind, folder, side="right"):
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(tiny_config(kind, initializer_range=0.5))
    config = on_disk(model.eval(), folder) / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"padding_side": side}))
    return str(folder)


@pytest.mark.parametrize(("kind", "side"), [("bert", "right"), ("qwen3", "left")])
def test_padding_that_changes_no_answer_stays(kind, side, tmp_path):
    loaded = load_encoder(saved(kind, tmp_path, side))
    assert (loaded.note, loaded.tokenizer.padding_side) == ("", side)


@pytest.mark.parametrize("classes", [4, 5, 8, 10, 12])
def test_the_number_of_classes_is_not_taken_for_a_length(classes, tmp_path):
    config = tiny_config("bert", num_labels=classes, initializer_range=0.5)
    on_disk(AutoModelForSequenceClassification.from_config(config).eval(), tmp_path)
    (found,) = Predictor.open(str(tmp_path)).predict(["w1 w2"])
    assert len(found.scores) == classes


def test_a_model_is_saved_with_the_padding_of_its_scores(tmp_path):
    loaded = load_encoder(saved("bert", tmp_path / "left", "left"))
    assert "kdcli pads right" in loaded.note
    save_model(loaded.model, loaded.tokenizer, tmp_path / "right")
    assert AutoTokenizer.from_pretrained(tmp_path / "right").padding_side == "right"


def test_answers_that_depend_on_padding_are_a_note(tmp_path):
    assert "depend on padding" in load_encoder(saved("convbert", tmp_path)).note


def test_a_head_that_reads_padding_is_refused(tmp_path):
    model = saved("xlnet", tmp_path)
    with pytest.raises(UsageError, match="reads the last token of a row, even if it is padding"):
        Predictor.open(model)


def test_a_head_that_does_not_know_the_padding_token_is_refused(tmp_path):
    config = small_config("gpt2")
    config.pad_token_id = None
    on_disk(AutoModelForSequenceClassification.from_config(config).eval(), tmp_path)
    with pytest.raises(UsageError, match="cannot read several rows") as caught:
        Predictor.open(str(tmp_path))
    assert "pad_token_id to 0" in caught.value.hint


def test_a_network_that_cannot_read_a_row_is_named(tmp_path):
    on_disk(AutoModel.from_config(small_config("canine")), tmp_path)
    network = load_encoder(str(tmp_path)).model
    named = f"{tmp_path}, a CanineModel, fails: RuntimeError: max_pool1d"
    with pytest.raises(UsageError) as caught, custom_code(False):
        network(input_ids=torch.ones(1, 2, dtype=torch.long))
    assert caught.value.message.startswith(named)
    assert "longer texts" in caught.value.hint
