"""Fixtures of the command tests. Slow parts with tests of their own are replaced: pictures
(tests/report), multiply-adds (tests/models), intervals (tests/metrics), the process that measures
latency (tests/deploy)."""

import os

import own_files
import pytest
from filelock import FileLock
from forked import workers_are_forked

from kdcli.data import demo
from kdcli.deploy import untrained
from kdcli.metrics.bootstrap import paired_bootstrap
from kdcli.models import card
from kdcli.models.card import multiply_adds
from kdcli.report import views
from kdcli.verbs.benchmark import run as benchmark
from kdcli.workloads import scores

DRAWN = views.drawn


def pytest_ignore_collect(collection_path, config):
    """Every command takes seconds, so these tests are slow, but for one module of unit tests."""
    slow = collection_path.name != "test_compress_choice.py"
    return (slow and "not slow" in config.option.markexpr) or None


@pytest.fixture(autouse=True)
def whole(request, monkeypatch):
    """Draw pictures where a test is marked `drawn`, and resample 1000 times with `resampled`."""
    if "drawn" in request.keywords:
        monkeypatch.setattr(views, "drawn", DRAWN)
    if "resampled" in request.keywords:
        monkeypatch.setattr(scores, "paired_bootstrap", paired_bootstrap)


@pytest.fixture
def answered_by(monkeypatch):
    """Answer every request to a latency worker by a function of its subjects and its protocol."""

    def answer(measured):
        for module in (benchmark, untrained):
            monkeypatch.setattr(module, "measure_latency", measured)

    return answer


@pytest.fixture
def short_demo(cache, monkeypatch, demo_examples):
    """The demo has so little text and so few examples that reading them takes no time."""
    for split, documents in (("train", 600), ("validation", 300)):
        monkeypatch.setitem(demo.DOCUMENTS, split, documents)
    demo_examples(100)


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    """Name of a directory and how it is made -> its path; all workers of a test run share it."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent

    def directory(name, make):
        folder, done = root / name, root / f"{name}.done"
        with FileLock(f"{folder}.lock"):
            if not done.is_file():
                make(folder)
                done.touch()
        return folder

    return directory


@pytest.fixture(scope="session")
def teacher_of(shared):
    """Kind of task -> a teacher fine-tuned on it, with its data next to it."""

    def teacher(kind):
        return shared(f"taught-{kind}", lambda folder: own_files.teacher(folder, kind)) / "teacher"

    return teacher


@pytest.fixture(scope="session")
def exported(shared, teacher_of):
    """Kind of task, format and options -> the teacher, its data, and its export."""

    def export(kind="class", file_format="onnx", *options):
        teacher = teacher_of(kind)
        words = ("export", teacher, "--format", file_format, *options)
        folder = shared(
            "-".join((kind, file_format, *options)),
            lambda folder: own_files.succeeds(*words, "-o", folder),
        )
        return teacher, teacher.parent / "data", folder

    return export


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


@pytest.fixture(autouse=True, scope="module")
def shorter():
    """Draw no pictures and resample 25 times, also in module fixtures.

    A wider scope would last until a worker's last test, and change what tests of reports see.
    """

    def few(*scorers, resamples, **settings):
        return paired_bootstrap(*scorers, resamples=min(resamples, 25), **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scores, "paired_bootstrap", few)
        patch.setattr(views, "drawn", lambda section: [("a picture", "a caption", "<svg></svg>")])
        yield
