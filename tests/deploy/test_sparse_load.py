"""`kdcli.load`: a base under a mask, with the head of its task."""

import subprocess
import sys

import pytest
import torch
from encoders import tiny_config, tiny_encoder, tiny_tokenizer
from pruned import info_for, random_masks
from transformers import AutoModelForSequenceClassification

import kdcli
from kdcli.deploy.sparse.loading import task_part
from kdcli.deploy.sparse.mask_file import apply_masks, write_mask
from kdcli.deploy.usable import load


@pytest.fixture
def base(tmp_path):
    torch.manual_seed(0)
    model = tiny_encoder("bert", initializer_range=0.3)
    model.save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    return model


def test_head_and_settings_of_the_task_come_with_the_mask(base, tmp_path):
    config = tiny_config(
        "bert", id2label={0: "no", 1: "maybe", 2: "yes"}, problem_type="single_label_classification"
    )
    torch.manual_seed(1)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    model.bert.load_state_dict(base.state_dict())
    with torch.no_grad():
        model.bert.pooler.dense.weight.copy_(torch.eye(32) / 1024)
    head, changed = task_part(model, base)
    assert sorted(head) == ["bert.pooler.dense.weight", "classifier.bias", "classifier.weight"]
    masks = random_masks(base, 0.3)
    info = info_for(base, architecture="BertForSequenceClassification", config=changed)
    write_mask(tmp_path / "mask", info, masks, head=head)
    apply_masks(model, masks)
    # The masked matrices are no part of the head either.
    assert task_part(model, base)[0].keys() == head.keys()
    found = kdcli.load(tmp_path / "base", mask=tmp_path / "mask")
    assert not found.training
    assert (found.config.id2label, found.config.problem_type) == (
        config.id2label,
        "single_label_classification",
    )
    found.save_pretrained(tmp_path / "whole")
    tiny_tokenizer().save_pretrained(tmp_path / "whole")
    again = kdcli.load(tmp_path / "whole").model
    assert type(again) is type(model)
    ids = torch.randint(5, 64, (3, 9))
    with torch.no_grad():
        assert torch.equal(found(ids).logits, model(ids).logits)
        assert torch.equal(again(ids).logits, model(ids).logits)


def test_package_without_load_brings_no_torch():
    code = "import sys, kdcli; assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert kdcli.load is load
    with pytest.raises(AttributeError, match="nothing"):
        kdcli.nothing  # noqa: B018
