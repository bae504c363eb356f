"""Mask files: round trips, damage, bases and models they do not fit, the authors' files."""

import hashlib
import io
import json
import struct
import tracemalloc
import zlib

import numpy as np
import pytest
import torch
from encoders import tiny_encoder
from hypothesis import given, settings
from hypothesis import strategies as st
from pruned import info_for, random_masks
from safetensors.torch import load, save, save_file

from kdcli.deploy.sparse.loading import with_head
from kdcli.deploy.sparse.mask_file import (
    NO_DIGEST,
    MaskInfo,
    apply_masks,
    base_hash,
    check_base,
    open_mask,
    read_mask,
    read_smp,
    write_mask,
)
from kdcli.errors import UsageError
from kdcli.models.matrices import matrices


@pytest.fixture(scope="module")
def base():
    torch.manual_seed(0)
    return tiny_encoder("bert")


@pytest.fixture
def written(base, tmp_path):
    path = tmp_path / "task.safetensors"
    write_mask(
        path, info_for(base), random_masks(base, 0.2), head={"classifier.bias": torch.ones(3)}
    )
    return path


INFO = MaskInfo(
    base="b", base_sha256="0" * 64, model_type="bert", vocab_size=64, method="smp", density=0.1
)


SIZES = st.integers(1, 50)
SHAPES = st.dictionaries(
    st.sampled_from(["1.Q", "1.K", "2.U", "11.D"]), st.tuples(SIZES, SIZES), min_size=1
)


@settings(max_examples=25)
@given(SHAPES, st.floats(0, 1), st.integers(0, 9))
def test_masks_of_any_shape_come_back(tmp_path_factory, shapes, density, seed):
    torch.manual_seed(seed)
    masks = {name: torch.rand(shape) < density for name, shape in shapes.items()}
    path = tmp_path_factory.mktemp("masks") / "mask.safetensors"
    info = write_mask(path, INFO, masks)
    found = read_mask(path)
    assert (found.info, list(found.masks), info.shapes) == (info, list(masks), shapes)
    assert all(torch.equal(found.masks[n], masks[n]) for n in masks)
    assert info.densities == {n: pytest.approx(m.float().mean().item()) for n, m in masks.items()}


def test_everything_comes_back(base, tmp_path):
    words = {
        "labels": ("bad", "good"),
        "label_words": ("terrible", "great"),
        "metrics": {"accuracy": 0.9},
    }
    config = {"id2label": {"0": "bad", "1": "good"}}
    task = {"task": "sst2", "architecture": "BertForSequenceClassification", "config": config}
    info = info_for(base, **task, **words, versions={"torch": "2"})
    masks = random_masks(base, 0.1)
    head = {
        **{
            "classifier.weight": torch.randn(2, 32),
            "classifier.bias": torch.randn(2, dtype=torch.bfloat16),
        },
        **{"bert.pooler.dense.weight": torch.eye(32).half(), "scale": torch.tensor(3.0)},
    }
    scores = {n: torch.randn(m.shape) for n, m in masks.items()}
    path = tmp_path / "new" / "mask.safetensors"
    write_mask(path, info, masks, head=head, scores=scores)
    found = read_mask(path)
    assert (found.info.model_copy(update={"densities": {}, "shapes": {}}), set(found.head)) == (
        info,
        set(head),
    )
    assert [found.head[name].dtype for name in head] == [tensor.dtype for tensor in head.values()]
    assert all(torch.equal(found.head[name], tensor) for name, tensor in head.items())
    assert all(torch.equal(found.scores[n], scores[n].half()) for n in masks)
    assert [f.name for f in path.parent.iterdir()] == ["mask.safetensors"]


def test_the_same_mask_is_the_same_file_with_a_readable_header(base, written, tmp_path):
    again = {tmp_path / str(i) for i in range(8)}
    for path in again:
        write_mask(
            path, info_for(base), random_masks(base, 0.2), head={"classifier.bias": torch.ones(3)}
        )
    whole = written.read_bytes()
    assert {path.read_bytes() for path in again} == {whole}
    header = json.loads(whole[8 : 8 + struct.unpack("<Q", whole[:8])[0]])["__metadata__"]
    assert json.loads(header["info"])["method"] == "smp"


def test_head_of_an_identity_takes_no_room(base, tmp_path):
    masks, sizes = random_masks(base, 0.1), []
    for head in ({}, {"pooler": torch.eye(768)}):
        write_mask(tmp_path / "mask", info_for(base), masks, head=head)
        sizes.append((tmp_path / "mask").stat().st_size)
    assert sizes[1] - sizes[0] < 10_000


@settings(max_examples=150)
@given(st.data())
def test_any_changed_byte_is_detected(base, tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "one.safetensors"
    if not path.exists():
        write_mask(path, info_for(base), random_masks(base, 0.2))
    whole = path.read_bytes()
    at, change = data.draw(st.integers(0, len(whole) - 1)), data.draw(st.integers(1, 255))
    other = path.with_name("other.safetensors")
    other.write_bytes(whole[:at] + bytes([whole[at] ^ change]) + whole[at + 1 :])
    with pytest.raises(UsageError, match=r"damaged"):
        read_mask(other)


@pytest.mark.parametrize("kept", [0, 40, -1])
def test_cut_file_is_refused(written, kept):
    written.write_bytes(written.read_bytes()[:kept])
    with pytest.raises(UsageError, match="damaged"):
        read_mask(written)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("none", r"none\.safetensors cannot be read"),
        ("model", "not a mask file of kdcli"),
        ("folder", "cannot be read"),
    ],
)
def test_what_is_no_mask_file_is_refused(tmp_path, name, said):
    save_file({"weight": torch.ones(3)}, tmp_path / "model.safetensors")
    (tmp_path / "folder.safetensors").mkdir()
    with pytest.raises(UsageError, match=said):
        read_mask(tmp_path / f"{name}.safetensors")


def test_base_with_other_weights_is_refused_and_both_are_named(base, written):
    mask, other = read_mask(written), tiny_encoder("bert")
    check_base(mask, base, "mine")
    other.load_state_dict(base.state_dict())
    with torch.no_grad():
        # The hash is that of the masked matrices alone.
        other.embeddings.word_embeddings.weight.add_(1)
        other.pooler.dense.weight.add_(1)
        assert base_hash(other) == base_hash(base)
        other.encoder.layer[1].output.dense.weight[0, 0] += 1e-6
    with pytest.raises(UsageError) as caught:
        check_base(mask, other, "mine")
    parts = ("made for base", "mine", base_hash(base), base_hash(other))
    assert [part for part in parts if part not in caught.value.message] == []


def test_another_model_type_is_refused(written):
    with pytest.raises(UsageError, match="masks a bert"):
        check_base(read_mask(written), tiny_encoder("roberta"), "mine")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda m: m.pop("2.K"), "no mask for matrix 2.K"),
        (lambda m: m.update({"3.Q": m["1.Q"]}), "a mask for 3.Q"),
        (
            lambda m: m.update({"1.U": m["1.U"].T}),
            "the mask of 1.U is 32 x 128, but the matrix is 128 x 32",
        ),
    ],
)
def test_masks_that_do_not_fit_change_nothing(base, spoil, message):
    masks, before = random_masks(base, 0.3), base_hash(base)
    spoil(masks)
    with pytest.raises(UsageError, match=message):
        apply_masks(base, masks)
    assert base_hash(base) == before


@pytest.mark.parametrize("kind", ["bert", "modernbert", "deberta", "albert"])
def test_applied_masks_zero_the_removed_weights_alone(kind):
    torch.manual_seed(0)
    model = tiny_encoder(kind)
    masks, before = (
        random_masks(model, 0.3),
        {m.name: m.of(m.linear.weight).clone() for m in matrices(model)},
    )
    apply_masks(model, masks)
    for m in matrices(model):
        assert torch.equal(m.of(m.linear.weight), torch.where(masks[m.name], before[m.name], 0.0))


def test_file_of_another_format_is_named(written):
    signed(written, lambda parts: parts.update(format="kdcli-mask-2"))
    with pytest.raises(UsageError, match="'kdcli-mask-2'; this version of kdcli reads"):
        read_mask(written)


def test_authors_masks_are_read_in_the_string_order_of_their_names(tmp_path):
    torch.manual_seed(0)
    model = tiny_encoder("bert", num_hidden_layers=12)
    masks = random_masks(model, 0.3)
    state = {f"bert.{m.path}.weight": masks[m.name] for m in matrices(model)}
    # By hand, from the order their files have.
    inside = [
        "attention.output.dense",
        "attention.self.key",
        "attention.self.query",
        "attention.self.value",
    ]
    inside += ["intermediate.dense", "output.dense"]
    names = [
        f"bert.encoder.layer.{n}.{x}.weight" for n in (0, 1, 10, 11, *range(2, 10)) for x in inside
    ]
    assert sorted(state) == names
    np.save(
        tmp_path / "mask.npy",
        np.packbits(np.concatenate([state[n].numpy().reshape(-1) for n in names])),
    )
    found = read_smp(tmp_path / "mask.npy", model)
    assert list(found) == [m.name for m in matrices(model)]
    assert all(torch.equal(found[n], masks[n]) for n in masks)


def signed(path, change, tensors=None):
    """Write a mask file whose header or tensors were changed and whose hash is right."""
    whole = path.read_bytes()
    (size,) = struct.unpack("<Q", whole[:8])
    header = json.loads(whole[8 : 8 + size])["__metadata__"]
    stored = load(whole) | (tensors or {})
    parts = {name: json.loads(header[name]) for name in ("info", "head")}
    change(parts)
    header |= {
        name: part if isinstance(part, str) else json.dumps(part) for name, part in parts.items()
    }
    data = save(stored, header | {"sha256": NO_DIGEST})
    start = data.index(NO_DIGEST.encode())
    path.write_bytes(data[:start] + hashlib.sha256(data).hexdigest().encode() + data[start + 64 :])


def bomb(size):
    return torch.frombuffer(bytearray(zlib.compress(bytes(size), 9)), dtype=torch.uint8)


def coded_bomb(size):
    raw = zlib.compressobj(9, zlib.DEFLATED, -15)
    return torch.frombuffer(
        bytearray(b"\0" + raw.compress(bytes(size)) + raw.flush()), dtype=torch.uint8
    )


ALTERED = {
    "info is no JSON": (lambda p: p.update(info="{"), {}),
    "info is deep": (lambda p: p.update(info="[" * 100_000), {}),
    "head is no JSON": (lambda p: p.update(head="{"), {}),
    "head is deep": (lambda p: p.update(head='{"a":' * 100_000), {}),
    "head of another dtype": (
        lambda p: p["head"].update({"classifier.bias": ["float99", [3]]}),
        {},
    ),
    "head of another shape": (
        lambda p: p["head"].update({"classifier.bias": ["float32", [4]]}),
        {},
    ),
    "head of a vast shape": (
        lambda p: p["head"].update({"classifier.bias": ["float32", [2**31, 2**31]]}),
        {},
    ),
    "head of a negative shape": (
        lambda p: p["head"].update({"classifier.bias": ["float32", [-3]]}),
        {},
    ),
    "head that is not there": (lambda p: p["head"].update({"other": ["float32", [3]]}), {}),
    "head that inflates": (lambda p: None, {"head.classifier.bias": bomb(1 << 28)}),
    "a mask of 256 GiB": (lambda p: p["info"]["shapes"].update({"1.Q": [2**19, 2**19]}), {}),
    "a mask of another shape": (lambda p: p["info"]["shapes"].update({"1.Q": [31, 32]}), {}),
    "a mask that is not there": (lambda p: p["info"]["shapes"].update({"9.Q": [32, 32]}), {}),
    "a mask of floats": (lambda p: None, {"mask.1.Q": torch.ones(3)}),
    "a mask that inflates": (lambda p: None, {"mask.1.Q": coded_bomb(1 << 28)}),
    "scores of another shape": (
        lambda p: None,
        {f"scores.{n}.{k}": torch.ones(2).half() for n in (1, 2) for k in "QKVOUD"},
    ),
    "scores of one matrix": (lambda p: None, {"scores.1.Q": torch.ones(32, 32).half()}),
    "a length of no tokens": (lambda p: p["info"].update(max_length=-1), {}),
}


def test_a_header_of_many_megabytes_is_refused_before_it_is_parsed(written):
    signed(written, lambda p: p["info"].update(config={"a": [0] * 4_000_000}), {})
    with pytest.raises(UsageError, match=r"its header has .* at most 10,000,000"):
        read_mask(written)


@pytest.mark.parametrize("case", ALTERED)
def test_an_altered_header_with_a_right_hash_is_refused_and_allocates_little(base, written, case):
    signed(written, *ALTERED[case])
    tracemalloc.start()
    for model in (base, None):
        with pytest.raises(UsageError, match=r"task\.safetensors") as caught:
            open_mask(written).decode(model)
        assert "\n" not in caught.value.message
    assert tracemalloc.get_traced_memory()[1] < 20_000_000
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"num_hidden_layers": 10**9}, "'num_hidden_layers'"),
        ({"hidden_size": 64}, "changes 'hidden_size' of its base"),
        ({"_attn_implementation": "owner/kernel"}, "_attn_implementation"),
        ({"id2label": {"x": "a"}}, "must number the 1 outputs from 0, got x"),
    ],
)
def test_settings_of_a_mask_that_do_not_fit_its_base_are_refused(base, config, message):
    info = info_for(base, architecture="BertForSequenceClassification", config=config)
    with pytest.raises(UsageError, match=message):
        with_head(base, info, {}, "the mask")


def npy(array):
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


NO_ARRAYS = (
    npy(np.array([{}], object)),
    b"",
    b"\x93NUMPY\x01\x00",
    b"\x93NUMPY\x01\x00\x04\x00{1:\n",
)
OTHERS = [
    (npy(np.zeros(7, np.uint8)), "7 values of uint8"),
    (npy(np.zeros(24576 // 8, np.float32)), "of float32"),
]


@pytest.mark.parametrize(
    ("data", "message"), [*OTHERS, *((data, r"not an \.npy array") for data in NO_ARRAYS)]
)
def test_other_and_damaged_arrays_are_refused(base, tmp_path, data, message):
    (tmp_path / "mask.npy").write_bytes(data)
    with pytest.raises(UsageError, match=message):
        read_smp(tmp_path / "mask.npy", base)
