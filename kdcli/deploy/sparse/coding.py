"""Encode masks as bytes, close to the entropy of their bits.

Each matrix takes the smaller of two forms: the distances between kept weights, one byte each, or
the bits, packed eight to a byte. Both are Huffman-coded (deflate without matches, because random
bits have none). The result is 1.00 to 1.01 times the entropy.
"""

import zlib

import numpy as np

from kdcli.types import Array

GAPS, BITS = 0, 1  # the first byte of a coded mask, which names the form of the rest
STEP = 255  # a distance byte of this value skips 255 places without a kept weight


def encode_mask(mask: Array) -> Array:
    """Encode a bool mask of any shape, in C order, as uint8 [bytes]."""
    flat = mask.reshape(-1)
    forms = {BITS: _huffman(np.packbits(flat).tobytes())}
    # At higher densities, distances are longer than bits, and slow.
    if np.count_nonzero(flat) < 0.25 * flat.size:
        # The number of removed weights before each kept weight, as bytes.
        gaps = np.diff(np.flatnonzero(flat), prepend=-1) - 1
        steps = gaps // STEP
        distances = np.full(int(steps.sum()) + gaps.size, STEP, np.uint8)
        distances[np.cumsum(steps + 1) - 1] = gaps - STEP * steps
        forms[GAPS] = _huffman(distances.tobytes())
    form = min(forms, key=lambda f: len(forms[f]))
    return np.frombuffer(bytes([form]) + forms[form], np.uint8)


def decode_mask(coded: Array, size: int) -> Array:
    """Decode a mask of `size` bits to bool [size].

    Raises ValueError if the bytes are not a mask of that size.
    """
    data = coded.tobytes()
    try:
        # A Huffman code without matches has at least one bit per byte, so a longer output is not a
        # mask.
        raw = np.frombuffer(inflate(data[1:], 8 * len(data), wbits=-zlib.MAX_WBITS), np.uint8)
    except zlib.error as error:
        raise ValueError(f"cannot be decompressed: {error}") from None
    if data[:1] == bytes([BITS]):
        if raw.size != (size + 7) // 8:
            raise ValueError(f"{raw.size} bytes do not hold {size} bits")
        return np.unpackbits(raw, count=size).astype(bool)
    if data[:1] != bytes([GAPS]):
        raise ValueError("encoded in a form that this version does not know")
    kept = raw < STEP
    # A distance counts the removed weights in between. The kept weight takes a place too.
    places = np.cumsum(raw.astype(np.int64) + kept)[kept] - 1
    if places.size and places[-1] >= size:
        raise ValueError(f"it keeps a weight at place {places[-1]}, but has {size} places")
    mask = np.zeros(size, bool)
    mask[places] = True
    return mask


def inflate(data: bytes, limit: int, wbits: int = zlib.MAX_WBITS) -> bytes:
    """Decompress at most `limit` bytes.

    Raises ValueError if the data hold more or end too soon, and zlib.error if they are damaged.
    """
    stream = zlib.decompressobj(wbits)
    raw = stream.decompress(data, limit + 1)
    if len(raw) > limit or not stream.eof:
        raise ValueError(f"cannot be decompressed to at most {limit:,} bytes")
    return raw


def _huffman(data: bytes) -> bytes:
    coder = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS, 9, zlib.Z_HUFFMAN_ONLY)
    return coder.compress(data) + coder.flush()
