"""The grammar of shapes such as `6x384`. This module loads no large library."""

import re

from kdcli.errors import UsageError
from kdcli.types import ModelShape

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
        grammar = (
            "the grammar is LxH[:FFN][@HEADS], for example 6x384 or 4x312:1200@12; students of "
            "embedding models may be static[:H]"
        )
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


def is_static_shape(text: str) -> bool:
    """Return whether a student's shape is `static` or `static:WIDTH`."""
    return STATIC.fullmatch(text.strip()) is not None


def parse_shape(text: str, teacher: ModelShape, *, allow_static: bool = False) -> ModelShape:
    """Parse `LxH[:FFN][@HEADS]`, or `static[:H]` for a student without layers if it is allowed.

    FFN defaults to the teacher's ratio of FFN to width, and HEADS to the teacher's heads. The width
    of a static student defaults to the teacher's. Raises UsageError if the text is malformed, if a
    number is zero, if the heads do not divide the width, or if the student is deeper or wider than
    the teacher.
    """
    if static := STATIC.fullmatch(text.strip()):
        if not allow_static:
            raise UsageError(
                "a static student has no layers, so it can only learn the vectors of an embedding "
                "model",
                "use `kdcli distill` with --method embedding, or a shape such as 3x384",
            )
        return _static_shape(int(static[1] or teacher.hidden), teacher)
    match = match_shape(text)
    layers, hidden = int(match[1]), int(match[2])
    ffn = int(match[3] or round(hidden * teacher.ffn / teacher.hidden))
    heads = int(match[4] or teacher.heads)
    if not (layers and hidden and ffn and heads):
        raise UsageError(f"shape '{text}' has a zero in it", "every number must be at least 1")
    if hidden % heads:
        widths = [
            w
            for w in (hidden - hidden % heads, hidden + heads - hidden % heads)
            if 0 < w <= teacher.hidden
        ]
        dividing = [h for h in range(1, min(hidden, 128) + 1) if hidden % h == 0]
        near = sorted(dividing, key=lambda h: (abs(h - heads), h))[:4]
        raise UsageError(
            f"{heads} heads do not divide a width of {hidden}",
            f"head counts near {heads} that divide {hidden}: {', '.join(map(str, sorted(near)))} "
            f"(write {layers}x{hidden}@{near[0]})"
            + (
                f"; widths that {heads} heads divide: {', '.join(map(str, widths))}"
                if widths
                else ""
            ),
        )
    if layers > teacher.layers or hidden > teacher.hidden:
        message = (
            f"student {layers}x{hidden} is larger than its teacher "
            f"{teacher.layers}x{teacher.hidden}"
        )
        raise UsageError(message, f"at most {teacher.layers} layers and width {teacher.hidden}")
    return ModelShape(layers, hidden, ffn, heads)


def _static_shape(width: int, teacher: ModelShape) -> ModelShape:
    """Return the shape of a static student. Raises UsageError if it cannot have the width."""
    if not 1 <= width <= teacher.hidden:
        raise UsageError(
            f"a static student of {teacher} cannot have vectors of {width} numbers",
            f"choose a width from 1 to {teacher.hidden}",
        )
    return ModelShape(0, width, 0, 1)
