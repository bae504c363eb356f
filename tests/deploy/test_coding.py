"""Masks come back from their bytes, and the bytes are near the entropy of the bits."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hn

from kdcli.deploy.sparse.mask_file import BITS, GAPS, decode_mask, encode_mask


@given(hn.arrays(bool, st.tuples(st.integers(1, 40), st.integers(1, 40))))
def test_any_mask_comes_back(mask):
    assert (decode_mask(encode_mask(mask), mask.size) == mask.reshape(-1)).all()


@pytest.mark.parametrize("gap", [0, 1, 253, 254, 255, 256, 509, 510, 511, 5000])
def test_distances_around_a_step(gap):
    mask = np.zeros(6000, bool)
    mask[[3, 4 + gap]] = True
    coded = encode_mask(mask)
    assert coded[0] == GAPS
    assert (decode_mask(coded, mask.size) == mask).all()


@pytest.mark.parametrize("value", [False, True])
def test_nothing_and_all_kept(value):
    mask = np.full(12345, value)
    coded = encode_mask(mask)
    assert coded.size < mask.size / 50
    assert (decode_mask(coded, mask.size) == value).all()


@pytest.mark.parametrize(
    ("density", "form", "bound"),
    [(0.03, GAPS, 1.02), (0.1, GAPS, 1.02), (0.3, BITS, 1.02), (0.5, BITS, 1.001)],
)
def test_size_is_near_the_entropy(density, form, bound):
    mask = np.random.default_rng(0).random(2_000_000) < density
    entropy = -(density * np.log2(density) + (1 - density) * np.log2(1 - density)) * mask.size / 8
    coded = encode_mask(mask)
    assert coded[0] == form
    assert 0.99 * entropy < coded.size < bound * entropy


@pytest.mark.parametrize("size", [99, 8, 0])
@pytest.mark.parametrize("density", [0.02, 0.5])
def test_another_size_is_refused(density, size):
    mask = np.random.default_rng(0).random(1000) < density
    with pytest.raises(ValueError, match=r"has \d+ places|do not hold"):
        decode_mask(encode_mask(mask), size)


@pytest.mark.parametrize("data", [b"", b"\x00", b"\x07\x03\x00", b"\x01nonsense"])
def test_nonsense_is_refused(data):
    with pytest.raises(ValueError, match=r"decompressed|does not know"):
        decode_mask(np.frombuffer(data, np.uint8), 10)
