"""The Pareto front of costs and qualities."""

from __future__ import annotations

from dataclasses import dataclass

SAME_LATENCY = 1.05
"""Latencies within this factor count as equal, because other work on the machine moves them."""


@dataclass(frozen=True)
class Point:
    """The score, the latency in milliseconds and the size in MB of a model."""

    score: float
    ms: float
    mb: float

    def dominates(self, other: Point) -> bool:
        """Whether this model is as good, as fast and as small as another one, and better in one.

        Of equally fast models, the one that is measured as faster is not better.
        """
        as_fast = self.ms <= SAME_LATENCY * other.ms
        faster = SAME_LATENCY * self.ms < other.ms
        as_good = self.score >= other.score and as_fast and self.mb <= other.mb
        return as_good and (self.score > other.score or faster or self.mb < other.mb)


def front_of(points: dict[str, tuple[float, float]]) -> list[str]:
    """Return the names on the Pareto front, from the cheapest to the most expensive.

    Args:
        points: The cost and quality of each model by name. A model is on the front if its quality
            is higher than that of every cheaper model.
    """
    front: list[str] = []
    for name in sorted(points, key=lambda name: (points[name][0], -points[name][1])):
        if not front or points[name][1] > points[front[-1]][1]:
            front.append(name)
    return front
