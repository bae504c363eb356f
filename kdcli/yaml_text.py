"""YAML as recipes want it: `5e-4` is a number, which YAML 1.1 writes `5.0e-4`, and a key given twice is an error."""

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
    """Quotes the strings that `_Loader` would take for a number."""


for _side in (_Loader, _Dumper):
    _side.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
    )


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
