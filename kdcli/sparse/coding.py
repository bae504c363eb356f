"""Masks as bytes, near the entropy of their bits.

Two forms are tried for each matrix and the smaller one is kept: the distances between kept weights, one byte each, or
the bits packed eight to a byte; either is then Huffman-coded (deflate without matches, which random bits do not have).
Measured on the 84.9 million random bits of BERT-base, in megabytes, against the entropy: 3 % 2.08 (2.06), 10 % 5.03
(4.98), 20 % 7.74 (7.66), 50 % 10.62 (10.62). LZMA on packed bits takes 2.26, 5.13, 7.82 and 10.62, and far longer.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

GAPS, BITS = 0, 1
"""The first byte of a coded mask: which form the rest has."""
STEP = 255
"""A distance byte of this value is no kept weight: it only moves on by as many places."""


def encode(mask: Array) -> Array:
    """Code a mask.

    Args:
        mask: bool, any shape; read in C order.

    Returns:
        uint8 [bytes].
    """
    flat = mask.reshape(-1)
    forms = {BITS: _huffman(np.packbits(flat).tobytes())}
    # Beyond this density distances are the longer form, and there are many of them.
    if np.count_nonzero(flat) < 0.25 * flat.size:
        forms[GAPS] = _huffman(_gaps(flat).tobytes())
    form = min(forms, key=lambda f: len(forms[f]))
    return np.frombuffer(bytes([form]) + forms[form], np.uint8)


def decode(coded: Array, size: int) -> Array:
    """The mask of `size` bits that `encode` coded: bool [size].

    Raises:
        ValueError: the bytes are no mask of that size.
    """
    data = coded.tobytes()
    try:
        raw = np.frombuffer(zlib.decompress(data[1:], wbits=-zlib.MAX_WBITS), np.uint8)
    except zlib.error as error:
        raise ValueError(f"cannot be decompressed: {error}") from None
    if data[:1] == bytes([BITS]):
        if raw.size != (size + 7) // 8:
            raise ValueError(f"{raw.size} bytes do not hold {size} bits")
        return np.unpackbits(raw, count=size).astype(bool)
    if data[:1] != bytes([GAPS]):
        raise ValueError("coded in a way this version does not know")
    kept = raw < STEP
    # A distance counts the removed weights in between; the kept one takes a place too.
    places = np.cumsum(raw.astype(np.int64) + kept)[kept] - 1
    if places.size and places[-1] >= size:
        raise ValueError(f"a kept weight at place {places[-1]} of {size}")
    mask = np.zeros(size, bool)
    mask[places] = True
    return mask


def _gaps(flat: Array) -> Array:
    """How many removed weights lie before each kept one, as bytes; those after the last are not told."""
    gaps = np.diff(np.flatnonzero(flat), prepend=-1) - 1
    steps = gaps // STEP
    coded = np.full(int(steps.sum()) + gaps.size, STEP, np.uint8)
    coded[np.cumsum(steps + 1) - 1] = gaps - STEP * steps
    return coded


def _huffman(data: bytes) -> bytes:
    coder = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS, 9, zlib.Z_HUFFMAN_ONLY)
    return coder.compress(data) + coder.flush()
