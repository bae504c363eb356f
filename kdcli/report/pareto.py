"""The Pareto front of costs and qualities."""


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
