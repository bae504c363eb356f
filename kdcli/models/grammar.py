"""The grammar of shapes such as `6x384`. This module loads no large library."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from kdcli.errors import UsageError
from kdcli.types import ModelShape

GRAMMAR = re.compile(r"(\d{1,6})x(\d{1,6})(?::(\d{1,6}))?(?:@(\d{1,6}))?", re.ASCII)
STATIC = re.compile(r"static(?::(\d{1,6}))?", re.ASCII)
"""A table of token vectors, optionally with their width: `static:256`."""
GOAL = re.compile(r"(\d{1,6}(?:\.\d{1,6})?)(x|ms)", re.ASCII)
"""A speed-up over the teacher (`2x`, `1.5x`) or a latency (`5ms`), in place of a shape."""
FAMILY = "family"
"""The depths N, 2N/3, N/2 and N/3 of a model with N layers, at its width."""
SLIP = re.compile(r"\d+\s*[A-Za-z*×]\s*\d+([:@].*)?")
"""A mistyped shape that cannot be a model's name: `6y384`, `6 x 384`, `6X384`, `6x384@`."""


@dataclass(frozen=True)
class SpeedGoal:
    """A minimum speed-up over the teacher, or a maximum latency in milliseconds."""

    speedup: float | None = None
    ms: float | None = None

    def __str__(self) -> str:
        """Format the goal as the user writes it: `2x` or `5ms`."""
        return f"{self.ms:g}ms" if self.speedup is None else f"{self.speedup:g}x"


def parse_goal(text: str) -> SpeedGoal | None:
    """Parse `2x` or `5ms`; None for any other text.

    Raises UsageError if a speed-up is not above 1, or if a latency is 0.
    """
    match = GOAL.fullmatch(text.strip())
    if match is None:
        return None
    value = float(match[1])
    if match[2] == "x" and value <= 1:
        raise UsageError(f"{text} is not faster than the teacher", "give more than 1, such as 2x")
    if value == 0:
        raise UsageError(f"{text} is not a latency", "give more than 0, such as 5ms")
    return SpeedGoal(speedup=value) if match[2] == "x" else SpeedGoal(ms=value)


def goal_of(texts: Sequence[str]) -> SpeedGoal | None:
    """Return the goal in a list of shapes, or None if it has none.

    Raises UsageError if a goal is wrong, or if it is not the only value.
    """
    goals = {text: goal for text in texts if (goal := parse_goal(text)) is not None}
    if goals and len(texts) > 1:
        raise UsageError(
            f"{next(iter(goals))} chooses the only shape, but {len(texts)} were given: "
            f"{', '.join(texts)}",
            "give the goal alone, or shapes without a goal",
        )
    return next(iter(goals.values()), None)


def is_family(texts: Sequence[str]) -> bool:
    """Return whether students share their layers: `family`, or shapes that are joined by commas.

    Raises UsageError if there is another shape.
    """
    family = next((text for text in texts if text.strip() == FAMILY or "," in text), None)
    if family is not None and len(texts) > 1:
        raise UsageError(
            f"--to {family} is one training of students that share their layers, but "
            f"{len(texts)} values were given",
            "join all shapes by commas, or repeat --to with single shapes to train them apart",
        )
    return family is not None


def shapes_in(texts: Sequence[str], teacher: ModelShape) -> list[str]:
    """Return the shapes of `student.to` one by one.

    Raises UsageError if a model with one layer has no `family`.
    """
    if not is_family(texts):
        return list(texts)
    if texts[0].strip() != FAMILY:
        return [text.strip() for text in texts[0].split(",")]
    depths = sorted({max(1, round(teacher.layers * part / 6)) for part in (6, 4, 3, 2)})
    if len(depths) < 2:
        raise UsageError("--to family: a model with one layer has no smaller members")
    return [f"{depth}x{teacher.hidden}" for depth in reversed(depths)]


def match_shape(text: str) -> re.Match[str]:
    """Match a shape; the groups are layers, width, FFN and heads. Raises UsageError if it is none.

    The last two groups may be None.
    """
    match = GRAMMAR.fullmatch(text.strip())
    if match is None:
        grammar = (
            "the grammar is LxH[:FFN][@HEADS], for example 6x384 or 4x312:1200@12; students of "
            "embedding models and classifiers may be static[:H]; distill --to and plan.shapes of "
            "compress also take a speed-up such as 2x or a latency such as 5ms, and distill --to "
            "takes family or shapes such as 6x384,3x384 that share one training"
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


def parse_shape(text: str, teacher: ModelShape, *, static_width: int | None = None) -> ModelShape:
    """Parse `LxH[:FFN][@HEADS]`, or `static[:H]` for a student without layers.

    FFN defaults to the teacher's ratio of FFN to width, and HEADS to the teacher's heads. The width
    of a static student defaults to `static_width`, which is also its maximum; None allows no static
    student. Raises UsageError if the text is malformed, if a number is zero, if the heads do not
    divide the width, or if the student is deeper or wider than the teacher.
    """
    if static := STATIC.fullmatch(text.strip()):
        if static_width is None:
            raise UsageError(
                "a static student has no layers, so it can only learn outputs for whole texts: "
                "vectors, classes or scores",
                "use `kdcli distill` with --method embedding, or with --task for a classifier; or "
                "give a shape such as 3x384",
            )
        return static_shape(int(static[1] or static_width), static_width)
    match = match_shape(text)
    layers, hidden = int(match[1]), int(match[2])
    ffn = int(match[3] or round(hidden * teacher.ffn / teacher.hidden))
    heads = int(match[4] or teacher.heads)
    if not (layers and hidden and ffn and heads):
        raise UsageError(f"shape '{text}' has a zero in it", "every number must be at least 1")
    if layers > teacher.layers or hidden > teacher.hidden:
        message = (
            f"student {layers}x{hidden} is larger than its teacher "
            f"{teacher.layers}x{teacher.hidden}"
        )
        raise UsageError(message, f"at most {teacher.layers} layers and width {teacher.hidden}")
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
    return ModelShape(layers, hidden, ffn, heads)


def short_name(shape: ModelShape, teacher: ModelShape) -> str:
    """Return a shape without the parts that follow from the teacher's.

    For example, `6x384:1536@12` becomes `6x384`.
    """
    if shape.is_static:
        return str(shape)
    ffn = "" if shape.ffn == round(shape.hidden * teacher.ffn / teacher.hidden) else f":{shape.ffn}"
    heads = "" if shape.heads == teacher.heads else f"@{shape.heads}"
    return f"{shape.layers}x{shape.hidden}{ffn}{heads}"


def static_shape(width: int, most: int) -> ModelShape:
    """Return the shape of a static student. Raises UsageError if the width is not 1 to `most`."""
    if not 1 <= width <= most:
        raise UsageError(
            f"a static student cannot have vectors of {width} numbers; its teacher's have {most}",
            f"choose a width from 1 to {most}",
        )
    return ModelShape(0, width, 0, 1)
