"""The Pareto front of costs and qualities."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kdcli.report.schema import Candidate, CandidateCost

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


def dominated_by(
    points: Mapping[str, Point], may_replace: Callable[[str, str], bool]
) -> dict[str, str]:
    """Return the dominated models, each with one that dominates it and is not dominated itself.

    "As fast" is not transitive, so a model that only a dominated one dominates is not dominated.

    Args:
        points: The models by name.
        may_replace: Whether the first model meets all limits that the second one meets.
    """
    better: dict[str, str] = {}
    kept: list[str] = []
    # A model comes after all models that can dominate it.
    by_score = sorted(points.items(), key=lambda item: (-item[1].score, item[1].mb, item[1].ms))
    for name, point in by_score:
        dominating = (
            other for other in kept if points[other].dominates(point) and may_replace(other, name)
        )
        if (other := next(dominating, None)) is None:
            kept.append(name)
        else:
            better[name] = other
    return better


def candidates_on_front(candidates: Sequence[Candidate], cost: CandidateCost) -> list[str]:
    """Return the names on the front of score and cost, from the cheapest to the most expensive.

    The front has no candidate that the choice did not consider, because another one dominates it.
    """
    return front_of(
        {
            one.name: (one.cost(cost), one.score)
            for one in candidates
            if one.score is not None and one.dominated_by is None
        }
    )


def front_of(points: dict[str, tuple[float, float]]) -> list[str]:
    """Return the names on the Pareto front, from the cheapest to the most expensive.

    Args:
        points: The cost and quality of each model by name. A model is on the front if its quality
            is higher than the quality of every cheaper model.
    """
    front: list[str] = []
    for name in sorted(points, key=lambda name: (points[name][0], -points[name][1])):
        if not front or points[name][1] > points[front[-1]][1]:
            front.append(name)
    return front
