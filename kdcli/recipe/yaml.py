"""YAML 1.2's core schema for recipes; a key given twice is an error.

In YAML 1.1, PyYAML's version, `no` is false, `1:3` is 63, a date is no text and `5e-4` is no number. Text that
1.1 would convert is written in quotes, so other programs read it back alike.
"""

import re
from collections.abc import Hashable
from typing import Any

import yaml

MOST_CHARACTERS, MOST_EVENTS, MOST_DEPTH = 1_000_000, 20_000, 32


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        names = [key.value for key, _ in node.value]
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise yaml.MarkedYAMLError(
                problem=f"key '{twice[0]}' is given twice", problem_mark=node.start_mark
            )
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Also quotes strings that `_Loader` would read as numbers."""


# Drops the resolvers of YAML 1.1.
_Loader.yaml_implicit_resolvers = {}
_EXPONENT = r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"
_NUMERIC = list("-+.0123456789")
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(_EXPONENT, re.ASCII), _NUMERIC)
for _kind, _pattern, _first in (
    ("null", r"(~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("bool", r"(true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    # A leading 0 makes a name: octal in 1.1, decimal in 1.2.
    ("int", r"[-+]?(0|[1-9]\d*)$", _NUMERIC),
    (
        "float",
        rf"{_EXPONENT}|[-+]?(\d+\.\d*|\.\d+)$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$",
        _NUMERIC,
    ),
    ("merge", r"<<$", ["<"]),
):
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_kind}", re.compile(_pattern, re.ASCII), _first
    )


def read_yaml(text: str) -> Any:
    """The one document of a text: plain data, as in `yaml.safe_load`. Raises yaml.YAMLError: malformed, a key given
    twice, a tag, or larger than a recipe can be."""
    _check_bounds(text)
    loader = _Loader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def _check_bounds(text: str) -> None:
    """Refuse what would take long or recurse deeply to compose; parsing alone is linear."""
    if len(text) > MOST_CHARACTERS:
        raise yaml.YAMLError(f"{len(text):,} characters; at most {MOST_CHARACTERS:,} are read")
    depth = anchored = 0
    for number, event in enumerate(yaml.parse(text, Loader=_Loader)):
        mark = getattr(event, "start_mark", None)
        if number > MOST_EVENTS or depth > MOST_DEPTH:
            raise yaml.MarkedYAMLError(
                problem="too many or too deeply nested values", problem_mark=mark
            )
        if (tag := getattr(event, "tag", None)) is not None:
            raise yaml.MarkedYAMLError(problem=f"tag {tag} is not allowed", problem_mark=mark)
        if isinstance(event, yaml.AliasEvent) and anchored:
            raise yaml.MarkedYAMLError(
                problem="an alias inside an anchor is not allowed", problem_mark=mark
            )
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            # Depth at which the outermost anchored collection began.
            anchored = anchored or (depth if event.anchor else 0)
        elif isinstance(event, yaml.CollectionEndEvent):
            anchored = 0 if anchored == depth else anchored
            depth -= 1


def one_line(value: Any) -> str:
    """A value in flow style that `read_yaml` reads back unchanged."""
    # Not ASCII is escaped: a lone exotic space would read back as nothing.
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=10**6)
    return str(text).removesuffix("...\n").strip("\n ")
