"""YAML as recipes want it: the plain words of version 1.2 (its core schema), and a key given twice is an error.

In version 1.1, which the library reads, `no` is false, `1:3` is 63, a date is no text and `5e-4` is no number: label
words, layer maps, names of directories and learning rates. Text that 1.1 would take for something else is written in
quotes, so that other programs read it back too.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

import yaml


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        names = [key.value for key, _ in node.value]
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise yaml.MarkedYAMLError(problem=f"key '{twice[0]}' is given twice", problem_mark=node.start_mark)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """Quotes the strings that `_Loader` would take for a number, beside those of version 1.1."""


# Without those of version 1.1, which the library brings.
_Loader.yaml_implicit_resolvers = {}
_EXPONENT = r"[-+]?(\d+(\.\d*)?|\.\d+)[eE][-+]?\d+$"
_NUMERIC = list("-+.0123456789")
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(_EXPONENT, re.ASCII), _NUMERIC)
for _kind, _pattern, _first in (
    ("null", r"(~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("bool", r"(true|True|TRUE|false|False|FALSE)$", list("tTfF")),
    # No number begins with a 0 that says nothing: 1.1 takes it for octal, 1.2 does not, people for a name.
    ("int", r"[-+]?(0|[1-9]\d*)$", _NUMERIC),
    ("float", rf"{_EXPONENT}|[-+]?(\d+\.\d*|\.\d+)$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$", _NUMERIC),
    ("merge", r"<<$", ["<"]),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_kind}", re.compile(_pattern, re.ASCII), _first)


def read_yaml(text: str) -> Any:
    """The one document of a text; plain data only, as in `yaml.safe_load`.

    Raises:
        yaml.YAMLError: malformed, or a key given twice.
    """
    loader = _Loader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def one_line(value: Any) -> str:
    """A value in flow style, which `read_yaml` turns back into the same value."""
    # Escaped where it is not ASCII: a value of nothing but an exotic space would read back as nothing.
    text = yaml.dump(value, Dumper=_Dumper, default_flow_style=True, width=10**6)
    return str(text).removesuffix("...\n").strip("\n ")
