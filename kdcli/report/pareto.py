"""The Pareto front of costs and qualities."""


def front_of(points: dict[str, tuple[float, float]]) -> list[str]:
    """Return the names of the (cost, quality) that beat everything cheaper, by rising cost."""
    front: list[str] = []
    for name in sorted(points, key=lambda name: (points[name][0], -points[name][1])):
        if not front or points[name][1] > points[front[-1]][1]:
            front.append(name)
    return front
