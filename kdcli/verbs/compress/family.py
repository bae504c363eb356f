"""One training of students that share their layers, each of which is a candidate.

The training does not depend on the goal, so that another goal only exports and scores members.
"""

from collections.abc import Mapping
from functools import partial

from kdcli.deploy.untrained import UntrainedTimes
from kdcli.disk import as_directory
from kdcli.models.load import load_config
from kdcli.models.shape import shape_of
from kdcli.verbs.compress.halving import export_student, paid_training, training
from kdcli.verbs.compress.search import Search
from kdcli.verbs.compress.shape_timings import too_slow


def try_family(search: Search, shapes: Mapping[str, UntrainedTimes]) -> None:
    """Train all shapes at once, and export those that can meet the goal.

    The largest member has the teacher's shape, and is no candidate.
    """
    slow = too_slow(search.goal, shapes)
    for shape, why in slow.items():
        search.skip(shape, why)
    fast = [shape for shape in shapes if shape not in slow]
    if not fast:
        return
    teacher = shape_of(load_config(search.teacher))
    family = ",".join([teacher.short, *shapes])
    whole = training(search, family, None)
    step = whole if search.recipe.budget is None else paid_training(search, family)
    if step is None or not all(search.side_by_side([partial(Search.finishes, step=step)])):
        return
    folder = search.steps.path(step)
    tasks = [
        partial(export_student, shape=shape, model=folder / as_directory(shape), parent=folder)
        for shape in fast
    ]
    search.side_by_side(tasks)
    search.score()
