"""Tasks on one base: weights equal those of models loaded apart."""

import copy

import pytest
import torch
from encoders import tiny_config, tiny_encoder, tiny_tokenizer
from pruned import info_for, random_masks, with_biases
from transformers import AutoModelForQuestionAnswering, AutoModelForSequenceClassification

from kdcli.deploy.sparse import bank as bank_module
from kdcli.deploy.sparse.bank import Bank
from kdcli.deploy.sparse.load import load, task_part
from kdcli.deploy.sparse.mask_file import apply_masks, read_mask, write_mask
from kdcli.errors import UsageError
from kdcli.models.matrices import matrices

pytestmark = pytest.mark.slow

IDS = torch.randint(5, 64, (3, 17), generator=torch.Generator().manual_seed(0))
TYPES = ("bert", "roberta", "distilbert", "electra", "modernbert", "deberta")


def bits(model):
    """Every weight as an integer: -0.0 is not 0.0."""
    return {n: p.detach().view(torch.int32).clone() for n, p in model.named_parameters()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def task_model(base, auto, density, seed, **changes):
    """A model of its own with the base's encoder under a mask, and its mask."""
    torch.manual_seed(seed)
    model = auto.from_config(tiny_config(base.config.model_type, **changes)).eval()
    model.base_model.load_state_dict(base.state_dict(), strict=False)
    return model, random_masks(model, density, seed)


@pytest.fixture
def base():
    torch.manual_seed(0)
    return tiny_encoder("bert")


@pytest.mark.parametrize(
    ("kind", "densities"),
    [*((kind, (0.5, 0.1)) for kind in TYPES), ("bert", (0.05, 0.1)), ("bert", (0.0, 1.0))],
)
def test_two_tasks_predict_as_the_models_saved_apart(kind, densities, tmp_path):
    torch.manual_seed(0)
    base = with_biases(tiny_encoder(kind, initializer_range=0.3))
    base.save_pretrained(tmp_path / "base")
    tiny_tokenizer().save_pretrained(tmp_path / "base")
    classes = AutoModelForSequenceClassification
    heads = (classes, classes if kind == "deberta" else AutoModelForQuestionAnswering)
    bank, apart = Bank(copy.deepcopy(base)), {}
    for n, (auto, density) in enumerate(zip(heads, densities, strict=True)):
        model, masks = task_model(base, auto, density, n, num_labels=3 - n)
        head, changed = task_part(model, base)
        info = info_for(base, architecture=type(model).__name__, config=changed)
        write_mask(tmp_path / f"{n}.safetensors", info, masks, head=head)
        apply_masks(model, masks)
        model.save_pretrained(tmp_path / f"{n}")
        apart[n] = type(model).from_pretrained(tmp_path / f"{n}").eval()
        found = read_mask(tmp_path / f"{n}.safetensors")
        bank.add(f"task{n}", found.masks, info=found.info, head=found.head)
    for n in (0, 1, 0, 0, 1):
        used = bank.use(f"task{n}")
        loaded = load(tmp_path / "base", tmp_path / f"{n}.safetensors")
        assert same(bits(used), bits(apart[n]))
        assert same(bits(loaded), bits(apart[n]))
        with torch.no_grad():
            expected, here = apart[n](IDS), used(IDS)
        assert (type(used), here.keys()) == (type(apart[n]), expected.keys())
        assert all(torch.equal(expected[name], here[name]) for name in expected)


def test_both_ways_of_writing_leave_the_same_bits(base, monkeypatch):
    monkeypatch.setattr(
        bank_module, "TILE", 1000
    )  # matrices of more than one tile, the last one not full
    found = []
    for below in (0.0, 1.0):
        monkeypatch.setattr(bank_module, "SCATTER_BELOW", below)
        bank = Bank(copy.deepcopy(base))
        bank.add("sparse", random_masks(base, 0.1, 1))
        bank.add("dense", random_masks(base, 0.9, 2))
        kinds = {type(f).__name__ for f in bank._entries["sparse"].forms}
        assert kinds == {"_Scattered" if below else "_Packed"}
        bank.use("dense")
        found.append(bits(bank.use("sparse")))
    assert same(*found)


def test_adding_leaves_the_base_and_use_switches_bare_encoders(base):
    before, masks = bits(base), random_masks(base, 0.4)
    bank = Bank(base)
    bank.add("all", {n: torch.ones_like(m) for n, m in masks.items()})
    bank.add("some", masks)
    assert bank.tasks == ("all", "some")
    assert same(bits(base), before)
    assert bank.use("some") is base
    assert all(torch.equal(m.of(m.linear.weight) != 0, masks[m.name]) for m in matrices(base))
    assert same(bits(bank.use("all")), before)


def test_tasks_share_the_base_and_keep_their_heads_apart(base):
    bank = Bank(base)
    for n in range(2):
        model, masks = task_model(base, AutoModelForSequenceClassification, 0.2, n, num_labels=2)
        head, changed = task_part(model, base)
        assert set(head) >= {"classifier.weight", "classifier.bias"}
        assert not any("encoder.layer" in name or "embeddings" in name for name in head)
        bank.add(
            f"{n}",
            masks,
            info=info_for(base, architecture=type(model).__name__, config=changed),
            head=head,
        )
    one, other = bank.use("0"), bank.use("1")
    assert bank.use("0") is one
    shared = {p.data_ptr() for p in one.parameters()} & {p.data_ptr() for p in other.parameters()}
    assert base.embeddings.word_embeddings.weight.data_ptr() in shared
    assert {m.linear.weight.data_ptr() for m in matrices(base)} <= shared
    assert one.classifier.weight.data_ptr() not in shared


def test_what_is_refused(base):
    bank, masks = Bank(base), random_masks(base, 0.2)
    with pytest.raises(UsageError, match="no task 'sst2'"):
        bank.use("sst2")
    bank.add("sst2", masks)
    with pytest.raises(UsageError, match="did you mean 'sst2'"):
        bank.use("sst")
    with pytest.raises(UsageError, match="already has"):
        bank.add("sst2", masks)
    with pytest.raises(UsageError, match=r"no mask for matrix 1\.Q"):
        bank.add("other", {n: m for n, m in masks.items() if n != "1.Q"})
    for architecture, said in (
        ("BertForNothing", "does not have"),
        ("BertForTokenClassification", "lacks 2 tensors"),
    ):
        with pytest.raises(UsageError, match=said):
            bank.add("other", masks, info=info_for(base, architecture=architecture))
    head = {"classifier.weight": torch.ones(5, 32), "classifier.bias": torch.ones(5)}
    with pytest.raises(UsageError, match="does not fit BertForTokenClassification"):
        bank.add(
            "other",
            masks,
            info=info_for(base, architecture="BertForTokenClassification"),
            head=head,
        )
    assert bank.tasks == ("sst2",)
    with pytest.raises(UsageError, match=r"float32, got torch\.float64"):
        Bank(tiny_encoder("bert").double())
