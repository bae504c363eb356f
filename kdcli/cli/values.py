"""What the values of options name: tasks, shapes, models and so on.

For each kind of value there is a completion for the shell, and a check. Checks run before torch is
loaded, so that a slip of the hand is refused at once. They let everything pass that only a library
or the network can judge; the verbs check again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kdcli.errors import UsageError

DEVICES = ("auto", "cpu", "cuda", "mps", "xpu")


@dataclass(frozen=True)
class Values:
    """A kind of value.

    Attributes:
        complete: Returns the names that start with a text.
        check: Raises a UsageError for a value that is certainly wrong.
    """

    complete: Callable[[str], list[str]] | None = None
    check: Callable[[str], object] | None = None


def _complete_task(incomplete: str) -> list[str]:
    from kdcli.data.tasks import OWN, named_tasks

    return [name for name in (*named_tasks(), OWN) if name.startswith(incomplete)]


def _check_task(name: str) -> None:
    from kdcli import workloads
    from kdcli.data.tasks import OWN, task_of

    if name != OWN and not workloads.may_be_special(name):
        task_of(name)


def _complete_recipe(incomplete: str) -> list[str]:
    from kdcli.recipe.resolve import recipe_names

    return [name for name in recipe_names() if name.startswith(incomplete)]


def _complete_shape(incomplete: str) -> list[str]:
    from kdcli.report.tables import published_shapes

    return [shape for shape in published_shapes() if shape.startswith(incomplete)]


def _check_shape(text: str) -> None:
    from kdcli.models.grammar import matched

    matched(text)


def _complete_backend(incomplete: str) -> list[str]:
    from kdcli.deploy.backends import BACKENDS

    names = [f"{name}-{dtype}" for name, dtypes in BACKENDS.items() for dtype in dtypes]
    return [name for name in (*BACKENDS, *names) if name.startswith(incomplete)]


def _check_backend(text: str) -> None:
    from kdcli.deploy.backends import BACKENDS, check_name

    name, _, dtype = text.partition("-")
    check_name(name, dtype or BACKENDS.get(name, ("",))[0])


def _complete_device(incomplete: str) -> list[str]:
    return [name for name in DEVICES if name.startswith(incomplete)]


def _check_model(source: str) -> None:
    from kdcli.models.grammar import is_shape
    from kdcli.models.source import check_place

    if not is_shape(source):
        check_place(source)


def _check_output_dir(path: str | Path) -> None:
    """Refuse a directory that cannot be made, by making it and removing it again."""
    from kdcli.disk import disk_errors, user_path

    folder = user_path(path)
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    if not missing:
        if not folder.is_dir():
            raise UsageError(f"{folder} is not a directory", "give another output directory")
        return
    with disk_errors(folder):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        finally:
            for made in missing:
                # Another process may have put something there.
                with suppress(OSError):
                    made.rmdir()


VALUES: Mapping[str, Values] = {
    "task": Values(_complete_task, _check_task),
    "recipe": Values(_complete_recipe),
    "shape": Values(_complete_shape, _check_shape),
    "backend": Values(_complete_backend, _check_backend),
    "device": Values(_complete_device),
    "model": Values(check=_check_model),
    "output": Values(check=_check_output_dir),
}
"""The kinds of value, by the names that `Option(values=...)` uses."""
