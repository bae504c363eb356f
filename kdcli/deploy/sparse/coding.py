"""Masks as bytes, near the entropy of their bits.

Each matrix takes the smaller of two forms: the distances between kept weights, one byte each, or
the bits packed eight to a byte. Either is Huffman-coded (deflate without matches, which random bits
lack): 1.00 to 1.01 of the entropy.
"""

import zlib
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

GAPS, BITS = 0, 1  # First byte of a coded mask: the form of the rest
STEP = 255  # A distance byte of this value only moves on by as many places, without a kept weight


def encode(mask: Array) -> Array:
    """Code a bool mask of any shape, in C order, as uint8 [bytes]."""
    flat = mask.reshape(-1)
    forms = {BITS: _huffman(np.packbits(flat).tobytes())}
    # At higher densities distances are the longer form, and slow.
    if np.count_nonzero(flat) < 0.25 * flat.size:
        # How many removed weights lie before each kept one, as bytes.
        gaps = np.diff(np.flatnonzero(flat), prepend=-1) - 1
        steps = gaps // STEP
        distances = np.full(int(steps.sum()) + gaps.size, STEP, np.uint8)
        distances[np.cumsum(steps + 1) - 1] = gaps - STEP * steps
        forms[GAPS] = _huffman(distances.tobytes())
    form = min(forms, key=lambda f: len(forms[f]))
    return np.frombuffer(bytes([form]) + forms[form], np.uint8)


def decode(coded: Array, size: int) -> Array:
    """Decode a mask of `size` bits: bool [size]. Raises ValueError: the bytes are no mask of that
    size."""
    data = coded.tobytes()
    try:
        # Huffman codes without matches have a bit a byte or more, so a longer output is no mask.
        raw = np.frombuffer(inflate(data[1:], 8 * len(data), wbits=-zlib.MAX_WBITS), np.uint8)
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


def inflate(data: bytes, most: int, wbits: int = zlib.MAX_WBITS) -> bytes:
    """Decompress at most `most` bytes. Raises ValueError: the data hold more, or end too soon;
    zlib.error: damaged."""
    stream = zlib.decompressobj(wbits)
    raw = stream.decompress(data, most + 1)
    if len(raw) > most or not stream.eof:
        raise ValueError(f"cannot be decompressed to {most:,} bytes or fewer")
    return raw


def _huffman(data: bytes) -> bytes:
    coder = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS, 9, zlib.Z_HUFFMAN_ONLY)
    return coder.compress(data) + coder.flush()
