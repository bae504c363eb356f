"""Completion and checks for the values of options: tasks, shapes, models and so on.

The checks run before torch is loaded, so that typos are reported at once. They accept anything that
only a library or the hub can verify; the verbs check it later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

DEVICES = ("auto", "cpu", "cuda", "mps", "xpu")


@dataclass(frozen=True)
class Values:
    """A kind of value.

    Attributes:
        names: Returns the values that the shell completes; None for paths.
        check: Raises a KdcliError for a value that is certainly wrong.
    """

    names: Callable[[], Iterable[str]] | None = None
    check: Callable[[str], object] | None = None


def _tasks() -> list[str]:
    from kdcli.data.tasks import named_tasks
    from kdcli.types import OWN

    return [*named_tasks(), OWN]


def _check_task(name: str) -> None:
    from kdcli.data.tasks import task_of
    from kdcli.types import OWN
    from kdcli.workloads import modules_by_task

    # A colon separates a benchmark from its task, as in mteb:STS12.
    if name != OWN and ":" not in name and name not in modules_by_task():
        task_of(name)


def _recipes() -> list[str]:
    from kdcli.recipe.resolve import recipe_names

    return recipe_names()


def _shapes() -> list[str]:
    from kdcli.report.tables import published_shapes

    return [*published_shapes(), "static", "family"]


def _check_shape(text: str) -> None:
    from kdcli.models.grammar import FAMILY, is_static_shape, match_shape, parse_goal

    if text.strip() == FAMILY or parse_goal(text) is not None:
        return
    for shape in text.split(","):
        if not is_static_shape(shape):
            match_shape(shape)


def _backends() -> list[str]:
    from kdcli.deploy.backends import BACKENDS

    names = [f"{name}-{dtype}" for name, dtypes in BACKENDS.items() for dtype in dtypes]
    return [*BACKENDS, *names]


def _check_backend(text: str) -> None:
    from kdcli.deploy.backends import check_backend_name

    check_backend_name(text)


def _formats() -> Iterable[str]:
    from kdcli.deploy.backends import FORMATS

    return FORMATS


def _check_format(name: str) -> None:
    from kdcli.deploy.backends import check_format

    check_format(name)


def _check_model(source: str) -> None:
    from kdcli.models.grammar import is_shape
    from kdcli.models.source import check_source

    if not is_shape(source):
        check_source(source)


def _check_teacher(source: str) -> None:
    from kdcli.models.source import check_address, is_address

    if is_address(source):
        check_address(source)
    else:
        _check_model(source)


def _check_data(source: str) -> None:
    from kdcli.data.sources import check_data_exists

    check_data_exists(source)


def _check_output_dir(path: str) -> None:
    from kdcli.disk import check_writable, user_path

    check_writable(user_path(path), directory=True)


VALUES: Mapping[str, Values] = {
    "task": Values(_tasks, _check_task),
    "recipe": Values(_recipes),
    "shape": Values(_shapes, _check_shape),
    "backend": Values(_backends, _check_backend),
    "format": Values(_formats, _check_format),
    "device": Values(lambda: DEVICES),
    "model": Values(check=_check_model),
    "teacher": Values(check=_check_teacher),
    "data": Values(check=_check_data),
    "output": Values(check=_check_output_dir),
}
"""The kinds of value, by the names that `Option(values=...)` uses."""
