"""What all tests share: no network, a cache of their own, a fresh accelerate state for each
test."""

import errno
import functools
import gc
import os
import shutil
import ssl
import sys
import tempfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["KDCLI_CACHE"] = tempfile.mkdtemp(prefix="kdcli-cache-")
os.environ["HF_MODULES_CACHE"] = tempfile.mkdtemp(prefix="kdcli-modules-")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
# Threads that load a tiny model take longer to start than its weights to load.
os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from encoders import on_disk, tiny_config, tiny_encoder
from graphs import SharedGraphs
from hypothesis import settings
from torch.onnx._internal.exporter._registration import ONNXRegistry

from kdcli.engine.progress import Progress
from kdcli.engine.session import Session
from kdcli.models.layout import layout_for

# The same examples every time: a red run must be red again. `--hypothesis-profile default` searches
# anew, among twice as many.
settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=50)
settings.load_profile("repeatable")


def pytest_unconfigure():
    for name in ("KDCLI_CACHE", "HF_MODULES_CACHE"):
        shutil.rmtree(os.environ[name], ignore_errors=True)


class StopTogether:
    """End all workers of pytest-xdist after a failure.

    A worker that is told to stop first runs all tests in its queue, which may take half an hour.
    """

    def __init__(self, session, marker):
        self.session, self.marker = session, marker

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.marker.touch()

    def pytest_runtest_logfinish(self):
        if self.marker.exists():
            self.session.shouldstop = "a test failed in another worker"


def pytest_sessionstart(session):
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if run and session.config.getoption("maxfail") == 1:
        marker = Path(tempfile.gettempdir()) / f"kdcli-tests-{run}-failed"
        session.config.pluginmanager.register(StopTogether(session, marker))


def pytest_ignore_collect(collection_path, config):
    """Where slow tests are not wanted, do not even import a module of slow tests."""
    wanted = "not slow" not in config.option.markexpr
    if wanted or collection_path.suffix != ".py":
        return None
    return "\npytestmark = pytest.mark.slow\n" in collection_path.read_text("utf-8") or None


def pytest_collection_modifyitems(items):
    """Fast ones first."""
    items.sort(key=lambda item: any(item.get_closest_marker(name) for name in ("slow", "browser")))


@pytest.fixture(autouse=True)
def fresh_accelerate():
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


@pytest.fixture(autouse=True)
def messages_on_stderr():
    """Tests call what a command calls, and read what it prints."""
    Progress.attach(is_command=True)


@pytest.fixture(autouse=True, scope="session")
def layouts_derived_once():
    """A derivation runs small networks, which a test must not count among its own."""
    for kind in ("bert", "deberta-v2", "distilbert", "modernbert", "mpnet", "roberta"):
        layout_for(tiny_config(kind))


@pytest.fixture(autouse=True, scope="session")
def not_synced():
    """Only a loss of power tells a file that is on the disk from one that is on its way there, and
    the way is slow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(autouse=True, scope="module")
def imports_are_not_collected():
    """A collection takes half a second if it visits a million objects of the libraries."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def certificates_read_once():
    """Every command makes a client for the hub, which reads all certificates."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", functools.cache(ssl.create_default_context))
        yield


@pytest.fixture(autouse=True, scope="session")
def graphs_recorded_once(tmp_path_factory):
    """Record a graph once for all models of one structure, and read torch's table of operators
    once: both take seconds."""
    folder = None
    if "PYTEST_XDIST_WORKER" in os.environ:
        # The workers of a run share the parent of their folders.
        folder = tmp_path_factory.getbasetemp().parent / "graphs"
        folder.mkdir(exist_ok=True)
    record, operators = torch.onnx.export, ONNXRegistry.from_torchlib
    ONNXRegistry.from_torchlib = staticmethod(functools.cache(operators))
    torch.onnx.export = SharedGraphs(record, folder).export
    yield
    torch.onnx.export = record
    ONNXRegistry.from_torchlib = staticmethod(operators)


@pytest.fixture
def model_dir(tmp_path_factory):
    """A tiny BERT with its tokenizer, saved as a stock model directory."""
    torch.manual_seed(0)
    # Wide weights: the attention of a fresh model is uniform, and there would be nothing to learn.
    encoder = tiny_encoder("bert", num_hidden_layers=4, initializer_range=0.3)
    return on_disk(encoder, tmp_path_factory.mktemp("model"))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A folder for what is kept, of this test alone."""
    monkeypatch.setenv("KDCLI_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def full_disk(monkeypatch):
    """`full_disk(os, "fsync")`: from now on this function fails as on a full disk."""

    def fail(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    return lambda *place: monkeypatch.setattr(*place, fail)


@pytest.fixture
def without(monkeypatch):
    """`without("onnx")`: from now on this library is not installed."""

    def remove(library):
        parts = [name for name in sys.modules if name.startswith(f"{library}.")]
        for name in [library, *parts]:
            monkeypatch.setitem(sys.modules, name, None)

    return remove


@pytest.fixture
def demo_examples(monkeypatch):
    """`demo_examples(200)`: from now on the demo's tasks have this many examples."""
    return functools.partial(monkeypatch.setattr, "kdcli.data.demo.EXAMPLES")


@pytest.fixture
def session():
    """The session of one process on the CPU."""
    return Session(Accelerator(cpu=True), torch.device("cpu"))


@pytest.fixture
def text_file(tmp_path):
    """A text of a few thousand tokens of the tiny tokenizer."""
    path = tmp_path / "text.txt"
    path.write_text(
        "\n".join(f"w{i % 41} w{i % 13} w{(i * 7) % 40} w{i % 5}" for i in range(3000)), "utf-8"
    )
    return path
