"""Read and write recipes with the core schema of YAML 1.2. A duplicate key is an error.

PyYAML reads YAML 1.1, in which `no` is false, `1:3` is 63, a date is not text, and `5e-4` is not a
number. Text that 1.1 would convert is written in quotes, so other programs read it unchanged.
"""

import re
from collections.abc import Hashable
from typing import Any

import yaml

MAX_RECIPE = 1_000_000  # characters
MAX_EVENTS = 20_000
MAX_YAML_DEPTH = 32


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        names = [key.value for key, _ in node.value]
        repeated = [name for name in names if names.count(name) > 1]
        if repeated:
            raise yaml.MarkedYAMLError(
                problem=f"key '{repeated[0]}' is given twice", problem_mark=node.start_mark
            )
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Also quotes strings that `_Loader` would read as numbers, and keeps strings on one line."""

    def represent_text(self, text: str) -> yaml.ScalarNode:
        """Escape line breaks: the other styles break the line."""
        style = '"' if len(text.splitlines()) > 1 else None
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _Dumper.represent_text)


_EXPONENT = r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"
_NUMERIC = list("-+.0123456789")
# (kind, pattern, possible first characters)
_SCALARS = (
    ("null", r"(~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("bool", r"(true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    # A number with a leading 0 is text, because it is octal in 1.1 and decimal in 1.2.
    ("int", r"[-+]?(0|[1-9]\d*)$", _NUMERIC),
    (
        "float",
        rf"{_EXPONENT}|[-+]?(\d+\.\d*|\.\d+)$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$",
        _NUMERIC,
    ),
    ("merge", r"<<$", ["<"]),
)
# Remove the resolvers of YAML 1.1.
_Loader.yaml_implicit_resolvers = {}
for _kind, _pattern, _first in _SCALARS:
    _tag = f"tag:yaml.org,2002:{_kind}"
    _Loader.add_implicit_resolver(_tag, re.compile(_pattern, re.ASCII), _first)
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(_EXPONENT, re.ASCII), _NUMERIC)


def read_yaml(text: str) -> Any:
    """Parse a text with one document into plain data.

    Raises:
        yaml.YAMLError: The text is malformed, has a duplicate key or a tag, or is too large.
    """
    _check_bounds(text)
    loader = _Loader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def _check_bounds(text: str) -> None:
    """Raise an error if composing the text would take long or recurse deeply. Parsing is linear."""
    if len(text) > MAX_RECIPE:
        raise yaml.YAMLError(f"{len(text):,} characters; at most {MAX_RECIPE:,} are read")
    # `anchored` is the depth at which the outermost anchored collection began.
    depth = anchored = 0
    for number, event in enumerate(yaml.parse(text, Loader=_Loader)):
        problem = None
        if number > MAX_EVENTS or depth > MAX_YAML_DEPTH:
            problem = "too many or too deeply nested values"
        elif (tag := getattr(event, "tag", None)) is not None:
            problem = f"tag {tag} is not allowed"
        elif isinstance(event, yaml.AliasEvent) and anchored:
            problem = "an alias inside an anchor is not allowed"
        if problem is not None:
            mark = getattr(event, "start_mark", None)
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark)
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            anchored = anchored or (depth if event.anchor else 0)
        elif isinstance(event, yaml.CollectionEndEvent):
            anchored = 0 if anchored == depth else anchored
            depth -= 1


def flow_style(value: object) -> str:
    """Write a value on one line, in YAML's flow style. `read_yaml` reads it back unchanged."""
    # Characters outside ASCII are escaped, because a lone exotic space would be read as nothing.
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=10**6)
    return str(text).removesuffix("...\n").strip("\n ")
