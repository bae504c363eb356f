"""Fixtures of the command tests. Slow parts with tests of their own are replaced: pictures
(tests/report), multiply-adds (tests/models), the process that measures latency (tests/deploy)."""

import functools

import own_files
import pytest
from forked import workers_are_forked

from kdcli.models import card
from kdcli.models.card import multiply_adds


@pytest.fixture(autouse=True)
def undrawn(request, monkeypatch):
    """No pictures, except in module fixtures and in tests marked `drawn`."""
    if "drawn" not in request.keywords:
        stub = [("a picture", "<svg></svg>")]
        monkeypatch.setattr("kdcli.report.views.drawn", lambda section: stub)


@pytest.fixture(scope="session")
def teacher_of(tmp_path_factory):
    """Kind of task -> a teacher fine-tuned on it, made once; its data are next to it."""
    return functools.cache(lambda kind: own_files.teacher(tmp_path_factory.mktemp(kind), kind))


@pytest.fixture(scope="module")
def asked(request, teacher_of):
    """Arguments of a distillation on an own task, with the module's QUICK options."""

    def of(kind="class", to="2x16"):
        teacher = teacher_of(kind)
        shape = ["--to", to] if to else []
        return [
            "distill",
            teacher,
            "--task",
            "own",
            "--data",
            teacher.parent / "data",
            *shape,
            *request.module.QUICK,
        ]

    return of


@pytest.fixture(autouse=True, scope="package")
def quicker():
    """Count the multiply-adds of a shape once; fork the latency process from one with all
    imports."""
    counted: dict[tuple[object, ...], int] = {}

    def once(model):
        key = type(model), *(weight.shape for weight in model.parameters())
        if key not in counted:
            counted[key] = multiply_adds(model)
        return counted[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(card, "multiply_adds", once)
        workers_are_forked(patch)
        yield
