"""A compacted model computes what the masked one does, from fewer weights, wherever it is
loaded."""

import ast
import copy
import functools
import itertools
import json
import operator
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from encoders import tiny_config, tiny_encoder, tiny_tokenizer
from pruned import random_masks, structured_masks, with_biases
from transformers import AutoModel, dynamic_module_utils

from kdcli.deploy.export import export_model
from kdcli.deploy.sessions import onnx_caller
from kdcli.deploy.sparse.compact import compact_model
from kdcli.deploy.sparse.loading import load_network
from kdcli.deploy.sparse.mask_file import apply_masks
from kdcli.errors import UsageError
from kdcli.models import modeling_kdcli, modeling_unilm
from kdcli.models.custom_class import custom_class
from kdcli.models.layout import COMPACT_PATHS, layout_for, linears
from kdcli.models.load import save_model

pytestmark = pytest.mark.slow

DRAWN = torch.Generator().manual_seed(0)
IDS = torch.randint(5, 64, (4, 20), generator=DRAWN)
PADDED = (torch.arange(20) < torch.tensor([20, 13, 5, 1])[:, None]).long()
BLOCK = (
    torch.block_diag(*(torch.ones(n, n) for n in (7, 1, 12)))
    .bool()[None, None]
    .expand(4, 1, 20, 20)
)
MASKS = {"none": None, "padded": PADDED, "documents": BLOCK}


def gap(model, small, masks=MASKS):
    """Largest difference of real tokens' last states in float64, so that it is not rounding."""
    dtypes, found = (model.dtype, small.dtype), []
    with torch.no_grad():
        for mask in masks.values():
            a, b = (m.double()(input_ids=IDS, attention_mask=mask)[0] for m in (model, small))
            found.append(float((a - b)[PADDED.bool() if a.dim() == 3 else ...].abs().max()))
    model.to(dtypes[0]), small.to(dtypes[1])
    return max(found)


def weights(model):
    return sum(p.numel() for p in model.parameters())


def fresh(kind="bert", seed=0, **changes):
    torch.manual_seed(seed)
    return with_biases(tiny_encoder(kind, initializer_range=0.3, **changes)).double()


@pytest.mark.parametrize("kind", sorted(COMPACT_PATHS))
def test_every_type_computes_the_same_from_fewer_weights(kind):
    model = fresh(kind).float()
    apply_masks(model, structured_masks(model))
    before = {n: p.clone() for n, p in model.named_parameters()}
    small = compact_model(model)
    # Folded constants are rounded once, to float32.
    assert gap(model, small) < 1e-5
    assert weights(small) < 0.6 * weights(model)
    assert all(torch.equal(before[n], p) for n, p in model.named_parameters())
    assert (type(small).__name__, small.config.compact_layers[1]["heads"]) == (
        f"Compact{type(model).__name__}",
        3,
    )


def zeroed(model, letter, layer=0):
    layout = layout_for(model.config)
    return linears(layout, layout.modules(model.base_model)[layer])[letter][0][0]


def cut(model, *places):
    """Set rows or columns of layer 1 to zero: `("V", 0, rows)` or `("O", 1, columns)`; 2 is the
    bias."""
    with torch.no_grad():
        for letter, dim, index in places:
            linear = zeroed(model, letter)
            (linear.bias if dim == 2 else linear.weight.transpose(0, dim))[index] = 0
    return model


HEAD, EVEN, ODD, ALL, NARROW = (
    slice(8, 16),
    slice(0, None, 2),
    slice(1, None, 2),
    slice(None),
    torch.arange(32) % 8 > 2,
)
CASES = {
    # name: what is empty, and heads, width and units left
    "units that are constant": ([("U", 0, slice(0, 100))], (4, 8, 28)),
    "units nobody reads": ([("D", 1, slice(0, 64))], (4, 8, 64)),
    "constant units that nobody reads": (
        [("U", 0, slice(0, 64)), ("D", 1, slice(32, 96))],
        (4, 8, 32),
    ),
    **{
        "all units constant": ([("U", 0, ALL)], (4, 8, 1)),
        "no unit is read": ([("D", 0, ALL)], (4, 8, 1)),
    },
    "values that are their bias": ([("V", 0, EVEN)], (4, 8, 128)),
    **{
        "values nobody reads": ([("O", 1, HEAD)], (3, 8, 128)),
        "a head of biases": ([("V", 0, HEAD)], (3, 8, 128)),
    },
    "all heads of biases": ([("V", 0, ALL)], (1, 8, 128)),
    "no output of attention": ([("O", 0, ALL)], (1, 8, 128)),
    "keys that are their bias": ([("K", 0, EVEN)], (4, 8, 128)),
    "keys that are zero": ([("K", 0, EVEN), ("K", 2, ALL)], (4, 8, 128)),
    "queries that are their bias": ([("Q", 0, EVEN)], (4, 8, 128)),
    "queries that are zero": ([("Q", 0, EVEN), ("Q", 2, ALL)], (4, 8, 128)),
    "a head of constant queries": ([("Q", 0, HEAD)], (4, 8, 128)),
    "a head that looks everywhere alike": ([("K", 0, HEAD)], (4, 8, 128)),
    "all heads look everywhere alike": ([("K", 0, ALL)], (4, 8, 128)),
    "queries and keys empty apart": ([("Q", 0, EVEN), ("K", 0, ODD)], (4, 8, 128)),
    "narrow heads": (
        [("Q", 0, NARROW), ("K", 0, NARROW), ("V", 0, NARROW), ("Q", 2, ALL)],
        (4, 3, 128),
    ),
    "nothing": ([], (4, 8, 128)),
}


@pytest.mark.parametrize("name", CASES)
def test_empty_parts_are_removed_and_their_constants_folded(name):
    places, (heads, width, units) = CASES[name]
    model = cut(fresh(num_hidden_layers=1), *places)
    small = compact_model(model)
    assert small.dtype == torch.float64
    assert gap(model, small) < 1e-12
    sizes = small.config.compact_layers[0]
    assert (sizes["heads"], sizes["Q"][1] // sizes["heads"], sizes["U"][1]) == (heads, width, units)


@pytest.mark.parametrize("seed", range(6))
def test_any_structure_of_zeros_computes_the_same(seed):
    model, drawn = (
        fresh(seed=seed, hidden_act=("gelu", "relu", "silu")[seed % 3]),
        np.random.default_rng(seed),
    )
    with torch.no_grad():
        for layer, letter in itertools.product(range(2), "QKVOUD"):
            linear = zeroed(model, letter, layer)
            rows, columns = linear.weight.shape
            linear.weight[torch.from_numpy(drawn.random(rows) < drawn.random())] = 0
            linear.weight[:, torch.from_numpy(drawn.random(columns) < drawn.random())] = 0
            linear.weight[torch.from_numpy(drawn.random((rows, columns)) < 0.5)] = 0
            if drawn.random() < 0.3:
                linear.bias.zero_()
    small = compact_model(model)
    assert gap(model, small) < 1e-11
    assert weights(small) < weights(model)


def test_empty_rows_and_columns_are_skipped_where_they_are_many():
    places = [
        ("D", 0, slice(0, 20)),
        ("O", 0, slice(3, 20)),
        ("U", 1, slice(0, 20)),
        ("Q", 1, slice(0, 14)),
    ]
    model = cut(fresh(num_hidden_layers=1), *places)
    small = compact_model(model)
    assert gap(model, small) < 1e-12
    # One row of zeros is added; fewer than half of the columns are not worth a copy.
    of = {
        "Q": (32, 32, 32, 32),
        "O": (32, 32, 32, 16),
        "U": (32, 128, 12, 128),
        "D": (128, 32, 128, 13),
    }
    assert {letter: small.config.compact_layers[0][letter] for letter in of} == of


@pytest.mark.parametrize(("letter", "left"), [("K", 8), ("Q", 12)])
def test_dimensions_that_scores_do_not_need_are_removed(letter, left):
    # Constant queries leave one dimension a head.
    sizes = compact_model(
        cut(fresh(num_hidden_layers=1), (letter, 0, torch.arange(32) % 4 > 0))
    ).config.compact_layers[0]
    assert (sizes["K"][3], sizes["Q"][3]) == (left + 1, 8 + 1)


def test_dropping_rows_equals_emptying_them():
    model = fresh()
    apply_masks(model, random_masks(model, 0.3))
    emptied = copy.deepcopy(model)
    with torch.no_grad():
        for layer, letter in itertools.product(range(2), "QKVOUD"):
            weight = zeroed(emptied, letter, layer).weight
            weight[weight.count_nonzero(1) < 10] = 0
    small = compact_model(model, drop_rows_below=10)
    assert gap(emptied, small) < 1e-11
    assert gap(model, small) > 1e-3
    assert (
        weights(small)
        < weights(compact_model(model))
        == weights(compact_model(model, drop_rows_below=1))
    )


def test_other_types_and_compacted_models_are_refused():
    with pytest.raises(UsageError, match="modernbert cannot be compacted") as caught:
        compact_model(tiny_encoder("modernbert"))
    assert "distilbert, electra" in str(caught.value.hint)
    with pytest.raises(UsageError, match="already compacted"):
        compact_model(compact_model(tiny_encoder("bert")))


def test_a_class_of_another_file_is_known_by_its_name_and_has_no_compact_form():
    config = tiny_config("bert")
    config.architectures = ["UniLMBertForMaskedLM"]
    network_class = custom_class(config)
    assert network_class is modeling_unilm.UniLMBertForMaskedLM
    with pytest.raises(UsageError, match="UniLMBertForMaskedLM cannot be compacted"):
        compact_model(network_class(config))


CLASSES = transformers.AutoModelForSequenceClassification
HEADS = {
    **{"sequence": CLASSES, "tokens": transformers.AutoModelForTokenClassification},
    **{
        "questions": transformers.AutoModelForQuestionAnswering,
        "words": transformers.AutoModelForMaskedLM,
    },
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Masked models with heads and their compacted forms on disk."""
    found = {}
    for head, auto in HEADS.items():
        kind = "distilbert" if head == "questions" else "bert"
        torch.manual_seed(0)
        labels = {} if head in ("questions", "words") else {"num_labels": 3}
        model = with_biases(
            auto.from_config(tiny_config(kind, initializer_range=0.3, **labels)).eval()
        )
        apply_masks(model, structured_masks(model))
        folder = tmp_path_factory.mktemp("compact") / head
        save_model(compact_model(model), tiny_tokenizer(), folder)
        found[head] = model, folder
    return found


@pytest.mark.parametrize("head", HEADS)
def test_saved_directory_is_loaded_without_its_code(head, saved):
    model, folder = saved[head]
    small = load_network(folder)
    assert type(small).__name__ == f"Compact{type(model).__name__}"
    assert gap(model, small, {"padded": PADDED, "none": None}) < 1e-5
    assert not small.training
    files = {"config.json", "model.safetensors", "modeling_kdcli.py", "tokenizer.json"}
    assert files <= {f.name for f in folder.iterdir()}
    assert (folder / "model.safetensors").stat().st_size < 4.2 * weights(model)
    with pytest.raises(UsageError, match="already compacted"):
        load_network(folder, "mask.safetensors")


def test_saved_directory_is_loaded_elsewhere_with_its_code(saved, tmp_path, monkeypatch):
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    model, folder = saved["sequence"]
    moved = shutil.copytree(folder, tmp_path / "moved")
    found = CLASSES.from_pretrained(moved, trust_remote_code=True).eval()
    base = AutoModel.from_pretrained(moved, trust_remote_code=True).eval()
    for each, of in ((found, "BertForSequenceClassification"), (base, "BertModel")):
        assert type(each).__name__ == f"Compact{of}"
        assert type(each).__module__.startswith("transformers_modules")
    assert gap(model, found, {"padded": PADDED}) < 1e-5
    assert gap(model.bert, base, {"padded": PADDED}) < 1e-5
    # Plain models stay plain in the same process.
    assert type(tiny_encoder("bert")).__name__ == "BertModel"
    # Saved again, it brings its code along.
    found.save_pretrained(tmp_path / "again")
    again = CLASSES.from_pretrained(tmp_path / "again", trust_remote_code=True).eval()
    assert gap(found, again, {"padded": PADDED}) == 0


def test_its_code_needs_torch_and_transformers_only():
    tree = ast.parse(Path(str(modeling_kdcli.__file__)).read_text("utf-8"))
    names = [a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names]
    names += [str(n.module) for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    assert {n.split(".")[0] for n in names} - set(sys.stdlib_module_names) == {
        "torch",
        "transformers",
    }


SIZES = {
    "no heads": (["heads"], 0),
    "heads that do not divide": (["heads"], 7),
    "a size that is text": (["Q", 1], "32"),
    "a negative size": (["D", 3], -1),
    "three sizes": (["U"], [32, 48, 32]),
    "other rows": (["O", 3], 7),
    "huge rows": (["V", 1], 10**9),
}


@pytest.mark.parametrize("case", SIZES)
def test_sizes_that_no_layer_can_have_are_refused(case, tmp_path):
    path, value = SIZES[case]
    model = fresh().float()
    apply_masks(model, structured_masks(model))
    save_model(compact_model(model), tiny_tokenizer(), tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text("utf-8"))
    inside = functools.reduce(operator.getitem, path[:-1], config["compact_layers"][0])
    inside[path[-1]] = value
    file.write_text(json.dumps(config), "utf-8")
    with pytest.raises(
        UsageError, match=r"compact_layers|other sizes, for example \S+: \[.*\] instead of \["
    ):
        load_network(tmp_path)


def test_config_that_names_no_class_of_ours_is_refused(saved, tmp_path):
    file = shutil.copytree(saved["sequence"][1], tmp_path / "other") / "config.json"
    file.write_text(
        file.read_text("utf-8").replace('"CompactBertForSequenceClassification"\n', '"Other"\n'),
        "utf-8",
    )
    with pytest.raises(UsageError, match="names the unknown class 'Other'"):
        load_network(tmp_path / "other")


def test_exports_to_onnx_at_any_size(tmp_path):
    # All that a compacted layer can have: ragged heads, columns and rows that are skipped.
    model = fresh(num_hidden_layers=1).float()
    apply_masks(
        model,
        {n: m for n, m in structured_masks(tiny_encoder("bert")).items() if n.startswith("1.")},
    )
    cut(model, ("D", 0, slice(0, 20)), ("U", 1, slice(0, 20)))
    small = compact_model(model)
    assert {"inputs", "outputs"} <= {n.rpartition(".")[2] for n, _ in small.named_buffers()}
    call = onnx_caller(export_model(small, tmp_path, "onnx").path, threads=1)
    for rows, length in ((1, 1), (4, 20), (2, 131)):
        ids = torch.randint(5, 64, (rows, length), generator=DRAWN)
        real = (torch.arange(length) < length - length // 3).expand_as(ids)
        batch = {"input_ids": ids, "attention_mask": real.long()}
        with torch.no_grad():
            expected = model(**batch)[0].numpy()
        assert np.abs(call(call.feed(batch))[0] - expected)[real.numpy()].max() < 1e-4
