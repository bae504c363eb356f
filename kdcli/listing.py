"""Names of classes, and parts of a sentence, in one line."""

import re
from collections.abc import Iterable, Sequence
from itertools import islice

MAX_LISTED = 10
"""The number of items that a list shows."""
_WORD = re.compile(r"[\w<>+#/&@%$-]+(?:[.'’][\w<>+#/&@%$-]+)*[+#%]*")


def class_name(name: str) -> str:
    """Return a name as it is, or in quotes if a reader could not see where it ends."""
    return name if _WORD.fullmatch(name) else repr(name)


def listed(items: Iterable[str], most: int = MAX_LISTED) -> str:
    """List the first items, and count the others."""
    rest = iter(items)
    shown = ", ".join(islice(rest, most))
    others = sum(1 for _ in rest)
    return f"{shown} and {others:,} more" if others else shown


def class_names(names: Iterable[str], most: int = MAX_LISTED) -> str:
    """List names of classes, as `class_name` writes them."""
    return listed(map(class_name, names), most)


def numbered_classes(names: Iterable[str], most: int = MAX_LISTED) -> str:
    """List names of classes with their numbers."""
    return listed((f"{number} {class_name(name)}" for number, name in enumerate(names)), most)


def joined(parts: Sequence[str]) -> str:
    """Join parts of a sentence: `a, b and c`."""
    return " and ".join(filter(None, [", ".join(parts[:-1]), *parts[-1:]]))
