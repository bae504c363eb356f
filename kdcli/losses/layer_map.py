"""Layer maps: the teacher layer g(m) from which student layer m = 0 ... M learns.

Layer 0 is the embedding. TinyBERT (https://arxiv.org/abs/1909.10351, §4.5) defines three maps, all
with g(0) = 0: `uniform` with g(m) = m·N/M, rounded, `top` with g(m) = m + N - M, and `bottom` with
g(m) = m. A map may also be written as student:teacher pairs, for example `0:0,1:3,2:6`.
"""

import re
from collections.abc import Sequence
from typing import Literal, get_args

Strategy = Literal["uniform", "top", "bottom"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)

_PAIR = re.compile(r"\s*([0-9]{1,4})\s*:\s*([0-9]{1,4})\s*")


def layer_map(text: str, teacher_layers: int, student_layers: int) -> dict[int, int]:
    """Parse a layer map, which is the name of a strategy or a list of pairs.

    Returns student layer -> teacher layer, in the student's order. Raises ValueError as
    `strategy_map` and `written_map` do.
    """
    for name in STRATEGIES:
        if text == name:
            return strategy_map(name, teacher_layers, student_layers)
    return written_map(text, teacher_layers, student_layers, STRATEGIES)


def strategy_map(name: Strategy, teacher_layers: int, student_layers: int) -> dict[int, int]:
    """Return one of TinyBERT's maps over the layers 0 ... M.

    Raises ValueError for `top` and `bottom` if the student is deeper than the teacher.
    """
    layers = range(1, student_layers + 1)
    if name == "uniform":
        return {0: 0} | {m: max(1, round(m * teacher_layers / student_layers)) for m in layers}
    if student_layers > teacher_layers:
        raise ValueError(
            f"loss.layers: {name} needs a student that is not deeper than its teacher, but the "
            f"student has {student_layers} layers and the teacher {teacher_layers}; use uniform"
        )
    offset = teacher_layers - student_layers if name == "top" else 0
    return {0: 0} | {m: m + offset for m in layers}


def written_map(
    text: str, teacher_layers: int, student_layers: int, names: Sequence[str]
) -> dict[int, int]:
    """Parse a layer map of comma-separated `student:teacher` pairs.

    `names` are the strategies that the error message offers. Raises ValueError if the text cannot
    be parsed, a layer does not exist, a student layer occurs twice, or the embedding is paired with
    a layer.
    """
    pairs: dict[int, int] = {}
    for part in text.split(","):
        if (pair := _PAIR.fullmatch(part)) is None:
            example = f"0:0,1:{max(1, round(teacher_layers / student_layers))}"
            raise ValueError(
                f"loss.layers: {text!r} is neither {', '.join(names)} nor a list of "
                f"student:teacher pairs such as {example}"
            )
        m, n = int(pair[1]), int(pair[2])
        for which, layer, last in (("student", m, student_layers), ("teacher", n, teacher_layers)):
            if layer > last:
                raise ValueError(
                    f"loss.layers: {part.strip()} names layer {layer} of the {which}, which has "
                    f"layers 0 (the embedding) to {last}"
                )
        if m in pairs:
            raise ValueError(
                f"loss.layers: {part.strip()} names student layer {m} again; a student layer can "
                "learn from only one teacher layer"
            )
        if (m == 0) != (n == 0):
            raise ValueError(
                f"loss.layers: {part.strip()} pairs an embedding (0) with a layer; pair 0 with 0, "
                f"and student layers with teacher layers 1 to {teacher_layers}"
            )
        pairs[m] = n
    return dict(sorted(pairs.items()))
