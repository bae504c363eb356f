"""Tag schemes: the labels of words that spell out entities, such as `B-PER` and `I-PER`.

The prefixes of all schemes in use have one meaning each, so that a scheme needs no name:

| scheme | begins | inside | ends | one word |
|---|---|---|---|---|
| IOB1, IOB2 | B | I | | |
| IOE1, IOE2 | | I | E | |
| BIOES, BMES | B | I, M | E | S |
| BILOU, BMEWO | B | I, M | L, E | U, W |
"""

import functools
import re
from collections.abc import Sequence
from typing import NamedTuple

from kdcli.data.labelled.label_values import looks

OUTSIDE = "O"
SINGLES = frozenset("SUW")  # Prefixes of an entity of one word.
BEGINS = SINGLES | {"B"}
ENDS = SINGLES | {"E", "L"}
PREFIXES = BEGINS | ENDS | {"I", "M"}
NO_TYPE = "_"  # The type of the entities if labels are only B, I and O, as in seqeval.

_ALMOST = (
    re.compile(r"(?P<prefix>[A-Za-z])[-_:](?P<type>.+)"),
    re.compile(r"(?P<type>.+)[-_:](?P<prefix>[A-Za-z])"),
)


class Tag(NamedTuple):
    """A label in a scheme: one of the `PREFIXES`, and the type of the entity."""

    prefix: str
    type: str


def tag_of(label: str, labels: tuple[str, ...]) -> Tag:
    """Read a label other than `O`. Without a prefix, such as `NOUN`, it is read as `I-NOUN`.

    Args:
        label: The label.
        labels: All labels. If they are prefixes without types, so is this one.
    """
    if label[1:2] == "-" and label[0] in PREFIXES:
        return Tag(label[0], label[2:])
    return Tag(label, NO_TYPE) if _are_prefixes(labels) else Tag("I", label)


def describe_unknown_scheme(labels: Sequence[str]) -> str | None:
    """Return a warning if labels look like the tags of a scheme that is not read as one.

    They do if one type has several of them, such as `B_PER` and `I_PER`, or if there is no `O`.
    """
    if labels and all(map(str.isdecimal, labels)):
        return (
            "the labels of words are numbers without names, so every run of a number is read as an "
            "entity; write names into the data, with O for words outside of entities"
        )
    known = [label for label in labels if label[1:2] == "-" and label[0] in PREFIXES]
    others = [label for label in labels if label not in known]
    for form in _ALMOST:
        types = {label[2:]: [label] for label in known}
        letters = {label[0] for label in known}
        for label in others:
            match = form.fullmatch(label)
            if match is not None:
                types.setdefault(match["type"], []).append(label)
                letters.add(match["prefix"].upper())
        groups = [group for group in types.values() if len(group) > 1]
        if groups and letters & {"B", "I"}:
            return (
                f"the labels {' and '.join(groups[0])} look like tags of a scheme that kdcli does "
                f"not know, so {groups[0][-1]} is read as a type of entity of its own; rename the "
                "labels to PREFIX-TYPE with the prefixes B, I, E and S (or M, L, U and W), and to "
                "O for other words"
            )
    by_look: dict[str, str] = {}
    for label in known:
        first = by_look.setdefault(looks(label[2:]), label)
        if first[2:] != label[2:]:
            return (
                f"{first} and {label} are tags of two types of entity, whose names look alike; "
                "if they are one type, write one name"
            )
    if known and others and OUTSIDE not in labels:
        return (
            f"no label is O, so {others[0]} is read as a type of entity; if it stands for words "
            "outside of entities, rename it to O"
        )
    return None


@functools.lru_cache(maxsize=8)
def _are_prefixes(labels: tuple[str, ...]) -> bool:
    """Whether labels are the prefixes of a scheme without types, such as B, I and O."""
    prefixes = {label for label in labels if label != OUTSIDE}
    return prefixes <= PREFIXES and len(prefixes) > 1 and bool(prefixes & {"I", "M"})
