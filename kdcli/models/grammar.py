"""The grammar of shapes such as `6x384`. This module loads no large library."""

import re

from kdcli.errors import UsageError

GRAMMAR = re.compile(r"(\d{1,6})x(\d{1,6})(?::(\d{1,6}))?(?:@(\d{1,6}))?", re.ASCII)
STATIC = re.compile(r"static(?::(\d{1,6}))?", re.ASCII)
"""A table of token vectors, optionally with their width: `static:256`."""
SLIP = re.compile(r"\d+\s*[A-Za-z*×]\s*\d+([:@].*)?")
"""A mistyped shape that cannot be a model's name: `6y384`, `6 x 384`, `6X384`, `6x384@`."""


def match_shape(text: str) -> re.Match[str]:
    """Match a shape; the groups are layers, width, FFN and heads. Raises UsageError if it is none.

    The last two groups may be None.
    """
    match = GRAMMAR.fullmatch(text.strip())
    if match is None:
        grammar = "the grammar is LxH[:FFN][@HEADS], for example 6x384 or 4x312:1200@12"
        raise UsageError(f"'{text}' is not a shape", grammar)
    return match


def is_shape(source: str) -> bool:
    """Return whether a model is given as a shape (`6x384`, `4x312:1200@12`).

    A directory (`./6x384`) and a hub id are not shapes. Raises UsageError if it is a mistyped
    shape.
    """
    if GRAMMAR.fullmatch(source.strip()):
        return True
    if SLIP.fullmatch(source.strip()):
        match_shape(source)
    return False
