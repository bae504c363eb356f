"""Layer maps g(m): the teacher layer that student layer m = 0 ... M learns from; 0 is the embedding.

TinyBERT (https://arxiv.org/abs/1909.10351, §4.5) has `uniform` g(m) = m·N/M, rounded, `top` g(m) = m + N - M and
`bottom` g(m) = m, all with g(0) = 0. A map may also be written out as student:teacher pairs, `0:0,1:3,2:6`.
"""

import re
from collections.abc import Sequence
from typing import Literal, get_args

Strategy = Literal["uniform", "top", "bottom"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)

_PAIR = re.compile(r"\s*([0-9]{1,4})\s*:\s*([0-9]{1,4})\s*")


def layer_map(text: str, teacher_layers: int, student_layers: int) -> dict[int, int]:
    """Student layer -> teacher layer, in the student's order; `text` is a strategy or a map written out."""
    for name in STRATEGIES:
        if text == name:
            return strategy_map(name, teacher_layers, student_layers)
    return written_map(text, teacher_layers, student_layers, STRATEGIES)


def strategy_map(name: Strategy, teacher_layers: int, student_layers: int) -> dict[int, int]:
    """One of TinyBERT's maps over all layers 0 ... M; ValueError for `top` or `bottom` of a deeper student."""
    layers = range(1, student_layers + 1)
    if name == "uniform":
        return {0: 0} | {m: max(1, round(m * teacher_layers / student_layers)) for m in layers}
    if student_layers > teacher_layers:
        raise ValueError(
            f"loss.layers: {name} needs a student of no more layers than its teacher, but it has {student_layers} and "
            f"the teacher {teacher_layers}; use uniform"
        )
    return {0: 0} | {
        m: m + (teacher_layers - student_layers if name == "top" else 0) for m in layers
    }


def written_map(
    text: str, teacher_layers: int, student_layers: int, names: Sequence[str]
) -> dict[int, int]:
    """A map of comma-separated `student:teacher` pairs; `names` are the strategies that the message offers. Raises
    ValueError: unreadable; a missing layer; a student layer given twice; the embedding paired with a layer."""
    pairs: dict[int, int] = {}
    for part in text.split(","):
        if (pair := _PAIR.fullmatch(part)) is None:
            raise ValueError(
                f"loss.layers: {text!r} is neither {', '.join(names)} nor pairs student:teacher such as "
                f"0:0,1:{max(1, round(teacher_layers / student_layers))}"
            )
        m, n = int(pair[1]), int(pair[2])
        for which, layer, last in (("student", m, student_layers), ("teacher", n, teacher_layers)):
            if layer > last:
                raise ValueError(
                    f"loss.layers: {part.strip()} names layer {layer} of the {which}, which has layers 0 (the "
                    f"embedding) to {last}"
                )
        if m in pairs:
            raise ValueError(
                f"loss.layers: {part.strip()} names student layer {m} again; each may learn from one"
            )
        if (m == 0) != (n == 0):
            raise ValueError(
                f"loss.layers: {part.strip()} pairs an embedding (0) with a layer; 0 goes with 0 only, layers with "
                f"layers 1 to {teacher_layers}"
            )
        pairs[m] = n
    return dict(sorted(pairs.items()))
