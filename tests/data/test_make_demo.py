"""The embedded teacher is what `tools/make_demo.py` makes of the text as it is generated now."""

import hashlib
import importlib.util
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from kdcli.data.demo import demo_documents
from kdcli.models.load import location

ROOT = Path(__file__).parents[2]
TEACHER = Path(location("demo"))
TEXT = "9bee27348c98"


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("make_demo", ROOT / "tools" / "make_demo.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_text_is_the_one_the_teacher_was_trained_on():
    """A change of the generated language needs a new teacher: run tools/make_demo.py, then change TEXT."""
    assert hashlib.sha256("\n".join(demo_documents("train")).encode()).hexdigest().startswith(TEXT)


def test_a_tokenizer_that_is_there_is_kept(tool, tmp_path):
    """The trainer numbers the pieces differently each time; weights trained with other numbers would be worthless."""
    (tmp_path / "tokenizer.json").write_bytes((TEACHER / "tokenizer.json").read_bytes())
    kept = tool.make_tokenizer(tmp_path).get_vocab()
    assert kept == json.loads((TEACHER / "tokenizer.json").read_text("utf-8"))["model"]["vocab"]


def test_the_package_holds_what_the_tool_writes(tool):
    assert (TEACHER / "README.md").read_text("utf-8") == tool.CARD
    assert AutoConfig.from_pretrained(TEACHER).num_hidden_layers == 4
    assert sum(f.stat().st_size for f in TEACHER.iterdir()) <= 4 << 20


def test_masking_keeps_what_is_not_predicted(tool):
    tokenizer = tool.make_tokenizer(TEACHER)
    torch.manual_seed(0)
    ids_BL = torch.randint(5, len(tokenizer), (64, 64))
    ids_BL[:, 0], ids_BL[:, -1] = tokenizer.cls_token_id, tokenizer.sep_token_id
    made = tool.masked(ids_BL, tokenizer)
    chosen_BL = made["labels"] != -100
    assert not chosen_BL[:, [0, -1]].any()
    assert 0.12 < chosen_BL.float().mean() < 0.17
    assert (made["input_ids"][~chosen_BL] == ids_BL[~chosen_BL]).all()
    assert (made["labels"][chosen_BL] == ids_BL[chosen_BL]).all()
    shown = made["input_ids"][chosen_BL]
    assert 0.76 < (shown == tokenizer.mask_token_id).float().mean() < 0.84
    assert 0.07 < (shown == ids_BL[chosen_BL]).float().mean() < 0.13
