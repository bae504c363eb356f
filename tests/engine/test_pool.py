"""Independent calls in several processes: what each gets, and what happens if one ends."""

import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from kdcli.disk import write_atomic
from kdcli.engine.pool import Pool, undisturbed
from kdcli.engine.processes import StopRequest, handled_signals
from kdcli.errors import MachineError, Stopped, UsageError
from kdcli.manifest import Manifest, begin_manifest
from kdcli.messages import log
from kdcli.recipe.sections import RunOptions


def note(file: Path, options: RunOptions) -> None:
    log("at work")
    file.write_text(f"{options.device} {os.environ['OMP_NUM_THREADS']}", "utf-8")


def die(file: Path, times: int, options: RunOptions) -> None:
    """Be killed this many times, as by the kernel for lack of memory."""
    with file.open("a") as log:
        log.write("x")
    if file.stat().st_size <= times:
        os.kill(os.getpid(), signal.SIGKILL)


def write(file: Path, options: RunOptions) -> None:
    write_atomic(file, "by a child")


def refuse(options: RunOptions) -> None:
    raise UsageError("no", "say yes")


def wait(file: Path, options: RunOptions) -> None:
    file.write_text(str(os.getpid()), "utf-8")
    time.sleep(100)


def tick(folder: Path, options: RunOptions) -> None:
    while not (folder / "measured").exists():
        with (folder / "ticks").open("a") as ticks:
            ticks.write("x")
        time.sleep(0.01)


def statuses(parent: psutil.Process) -> list[str]:
    return [child.status() for child in parent.children()]


def die_undisturbed(file: Path, options: RunOptions) -> None:
    """Be killed in a measurement, once."""
    with undisturbed():
        if not file.exists():
            file.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def measure(folder: Path, options: RunOptions) -> None:
    """Be killed while the others are suspended, then look whether they run."""
    ticks, killed = folder / "ticks", folder / "killed"
    before = ticks.stat().st_size if ticks.exists() else 0
    until(lambda: ticks.exists() and ticks.stat().st_size > before)
    with undisturbed():
        until(lambda: psutil.STATUS_STOPPED in statuses(psutil.Process(os.getppid())))
        before = ticks.stat().st_size
        if not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.5)
        after = ticks.stat().st_size
        foreign = psutil.Process(int((folder / "foreign").read_text())).status()
    (folder / "measured").write_text(f"{after - before} {foreign != psutil.STATUS_STOPPED}")


@pytest.fixture
def pool():
    before = psutil.Process().children()
    made = Pool(["cpu", "cpu"], 3, StopRequest())
    yield made
    made.close()
    # Python's tracker of shared memory ends with this process.
    left = [child.cmdline() for child in psutil.Process().children() if child not in before]
    assert all("resource_tracker" in str(words) for words in left), left


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.filterwarnings("ignore")
def test_calls_share_devices_and_come_back_in_order(pool, tmp_path, capfd):
    def task(name):
        pool.call(name, functools.partial(note, tmp_path / name), RunOptions())
        return name

    names = ["a", "b", "c"]
    assert pool.side_by_side([functools.partial(task, name) for name in names]) == names
    assert [(tmp_path / name).read_text() for name in names] == ["cpu 3"] * 3
    assert sorted(capfd.readouterr().err.splitlines()) == [f"[{n}] at work" for n in names]


def test_the_files_of_a_call_are_listed_in_the_manifest_of_the_run(pool, tmp_path):
    begin_manifest(tmp_path)
    inside = tmp_path / "step" / "file"
    inside.parent.mkdir()
    pool.call("a", functools.partial(write, inside), RunOptions())
    assert Manifest(tmp_path).is_unchanged(inside)


def test_a_killed_process_costs_its_call_only(pool, tmp_path, caplog):
    caplog.set_level("INFO", "kdcli")
    once, often = (functools.partial(die, tmp_path / n, k) for n, k in (("1", 1), ("9", 9)))
    other = functools.partial(note, tmp_path / "other")
    calls = [
        functools.partial(pool.call, n, f, RunOptions()) for n, f in (("1", once), ("o", other))
    ]
    pool.side_by_side(calls)
    assert (tmp_path / "1").read_text() == "xx"
    assert (tmp_path / "other").exists()
    assert "1: its process was killed; another one continues it" in caplog.messages
    with pytest.raises(MachineError, match="killed 2 times, often for lack of memory") as error:
        pool.call("9", often, RunOptions())
    assert error.value.hint == "use fewer --processes, and continue with --resume"


def test_an_undisturbed_call_suspends_only_its_pool_while_it_lives(pool, tmp_path):
    calls = [
        functools.partial(pool.call, f.__name__, functools.partial(f, tmp_path), RunOptions())
        for f in (tick, measure)
    ]
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as foreign:
        (tmp_path / "foreign").write_text(str(foreign.pid))
        pool.side_by_side(calls)
    assert (tmp_path / "measured").read_text() == "0 True"


def test_a_killed_measurement_leaves_no_process_suspended(pool, tmp_path):
    warm = [functools.partial(note, tmp_path / name) for name in ("first", "second")]
    pool.side_by_side(
        [functools.partial(pool.call, str(n), f, RunOptions()) for n, f in enumerate(warm)]
    )
    killed = tmp_path / "killed"
    pool.call("measure", functools.partial(die_undisturbed, killed), RunOptions())
    assert killed.exists()
    assert psutil.STATUS_STOPPED not in statuses(psutil.Process())


def test_an_error_ends_the_others(pool, tmp_path):
    file = tmp_path / "pid"

    def fail():
        until(file.exists)
        pool.call("bad", refuse, RunOptions())

    begin = time.monotonic()
    with pytest.raises(UsageError, match="no") as error:
        pool.side_by_side(
            [lambda: pool.call("slow", functools.partial(wait, file), RunOptions()), fail]
        )
    assert error.value.hint == "say yes"
    assert time.monotonic() - begin < 60


def test_a_signal_stops_all(pool, tmp_path):
    files = [tmp_path / "0", tmp_path / "1"]

    def ask(number, frame):
        pool.stop.take(number)
        raise KeyboardInterrupt

    def stop():
        until(lambda: all(file.exists() for file in files))
        os.kill(os.getpid(), signal.SIGTERM)

    calls = [
        functools.partial(pool.call, file.name, functools.partial(wait, file), RunOptions())
        for file in files
    ]
    with handled_signals(ask), pytest.raises(KeyboardInterrupt):
        pool.side_by_side([*calls, stop])
    with pytest.raises(Stopped):
        pool.call("later", refuse, RunOptions())


def test_no_process_outlives_its_parent(tmp_path):
    file = tmp_path / "pid"
    code = f"""
import sys, functools, pathlib
sys.path[:0] = {sys.path!r}
from test_pool import Pool, RunOptions, StopRequest, wait
if __name__ == "__main__":
    pool = Pool(["cpu"], 1, StopRequest())
    pool.call("one", functools.partial(wait, pathlib.Path({str(file)!r})), RunOptions())
"""
    script = tmp_path / "script.py"
    script.write_text(code, "utf-8")
    parent = subprocess.Popen([sys.executable, script])
    until(lambda: file.exists() and file.read_text())
    parent.kill()
    parent.wait()
    until(lambda: not psutil.pid_exists(int(file.read_text())))
