"""Damage bytes and JSON values at random."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

ODD: list[object] = [
    *(None, True, False, 0, -1, 1, 2.5, 10**9, -(10**9), 2**31, 2**63, 2**64, 10**40),
    *(1e308, -0.0, float("nan"), float("inf")),
    *("", " ", "x", "0", "true", "nan", "\x00", "\ud800", "\x1b[2J"),
    *("../../x", "/proc/1/mem", "x" * 5000, "\u00e9" * 300, "a\nb"),
    *([], {}, [None], [[]], {"": None}, {"x": {"x": {}}}),
    *([0] * 2000, dict.fromkeys(map(str, range(500)), 0), "DEEP", "DEEPER"),
]
"""Values that a program does not expect."""
DEEP = {b'"DEEP"': b"[" * 600 + b"]" * 600, b'"DEEPER"': b'{"a":' * 100_000 + b"1" + b"}" * 100_000}
TOKENS = b"{}[],:\"'\\\n\t -+.eE0123456789&*!|>#%@`\x00\xff\xef\xbb\xbf\xed\xa0\x80<<~"


def damage(rng: random.Random, data: bytes) -> bytes:
    """Change bytes at a few random places: replace, insert, delete, cut, repeat or move them."""
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        at = rng.randrange(len(data) + 1)
        size = rng.choice((1, 1, 2, 8, 64))
        piece = (
            bytes(rng.choice(TOKENS) for _ in range(size))
            if rng.random() < 0.7
            else rng.randbytes(size)
        )
        begin, end = data[:at], data[at:]
        changes = [begin + piece + end[size:], begin + piece + end, begin + end[size:], begin]
        data = rng.choice([*changes, begin + end[:size] * 3 + end[size:], end + begin])
    return data


Place = tuple[str | int, ...]
"""The keys and indices that lead to a part of a JSON value."""


def places(tree: object, at: Place = ()) -> Iterator[Place]:
    """Yield the places of a JSON value and of all values inside it."""
    yield at
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from places(value, (*at, key))
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            yield from places(value, (*at, index))


def change_values(rng: random.Random, value: object) -> object:
    """Copy a JSON value and make one to three changes.

    A change replaces a value, or deletes, renames or adds a key or an item.
    """
    tree: Any = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        above: list[str | int]
        last: Any
        *above, last = rng.choice(list(places(tree))[1:] or [("x",)])
        parent = tree
        for key in above:
            parent = parent[key]
        if not isinstance(parent, dict | list) or not parent:
            return rng.choice(ODD)
        what = rng.random()
        if what < 0.75:
            parent[last] = copy.deepcopy(rng.choice(ODD))
        elif what < 0.85:
            del parent[last]
        elif isinstance(parent, dict):
            parent[str(rng.choice(ODD))] = parent.pop(last)
        else:
            parent.append(copy.deepcopy(rng.choice([*ODD, parent[last]])))
        if not places(tree):
            break
    return rng.choice(ODD) if rng.random() < 0.01 else tree


def json_bytes(tree: object) -> bytes:
    """Encode a JSON value as UTF-8. The words of `DEEP` become deeply nested values."""
    data = json.dumps(tree, separators=(",", ":")).encode()
    for word, deep in DEEP.items():
        data = data.replace(word, deep)
    return data


def damage_json(rng: random.Random, data: bytes) -> bytes:
    """Change the values of a JSON file, or damage its bytes."""
    if rng.random() < 0.75:
        return json_bytes(change_values(rng, json.loads(data)))
    return damage(rng, data)
