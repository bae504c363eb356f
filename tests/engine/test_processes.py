"""The processes that kdcli starts itself: how they end, and what it makes of it."""

import os
import signal
import sys
import threading
import time

import pytest

from kdcli.engine import processes
from kdcli.errors import Stopped

pytestmark = pytest.mark.slow


def sigterm():
    os.kill(os.getpid(), signal.SIGTERM)


def trains_until_asked(outer):
    with processes.stop_requests() as inner:
        assert (inner, inner.requested) == (outer, False)
        sigterm()
        if inner.requested:
            raise Stopped("stopped")


def ends_when_asked():
    with processes.stop_requests():
        pass


def test_a_request_inside_another_is_the_same_and_interrupts_nothing():
    with processes.stop_requests(at_once=True) as outer:
        with pytest.raises(Stopped):
            trains_until_asked(outer)
        assert (outer.requested, outer.insisted, outer.at_once) == (True, False, True)
        with pytest.raises(KeyboardInterrupt):
            ends_when_asked()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_sigterm_interrupts_a_command_of_one_process(monkeypatch):
    interrupt = signal.getsignal(signal.SIGINT)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(KeyboardInterrupt), processes.ends_at_once():
        sigterm()
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    assert handlers == [signal.SIG_DFL, interrupt]
    monkeypatch.setenv("WORLD_SIZE", "2")
    with processes.ends_at_once():
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_outside_a_training_the_first_signal_interrupts():
    with processes.stop_requests(at_once=True) as request:
        with pytest.raises(KeyboardInterrupt):
            sigterm()
        sigterm()
        assert (request.signalled, request.insisted) == (True, False)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert request.insisted
    with processes.stop_requests() as next_one:
        assert not next_one.requested


def test_a_signal_that_a_destructor_drops_is_repeated():
    class Last:
        def __del__(self):
            sigterm()

    def waits():
        with processes.stop_requests(at_once=True):
            Last()
            time.sleep(10)

    hook = sys.unraisablehook
    with pytest.raises(KeyboardInterrupt):
        waits()
    assert sys.unraisablehook is hook


def test_another_thread_than_the_main_one_receives_no_signals():
    requests, before = [], signal.getsignal(signal.SIGINT)

    def work():
        with processes.stop_requests(at_once=True) as outer, processes.stop_requests() as inner:
            requests.extend([outer, inner])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(requests) == 2
    assert requests[0] is requests[1]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_deadline_requests_a_stop():
    with processes.stop_requests() as request:
        request.deadline = 0.0
        assert request.requested
        assert not request.signalled


@pytest.mark.parametrize(
    ("name", "message", "lost"),
    [
        ("DistNetworkError", "failed to recv, got 0 bytes", True),
        ("DistStoreError", "wait timeout after 300000ms", True),
        ("DistBackendError", "NCCL error: ncclRemoteError: a call failed on the other side", True),
        ("DistBackendError", "NCCL error: ncclInvalidUsage: wrong datatype", False),
        ("RuntimeError", "Connection closed by peer [127.0.0.1]:1", True),
        ("RuntimeError", "The size of tensor a (3) must match the size of tensor b (4)", False),
    ],
)
def test_only_a_lost_peer_is_taken_for_a_lost_peer(monkeypatch, name, message, lost):
    monkeypatch.setenv("WORLD_SIZE", "2")
    error = type(name, (RuntimeError,), {})(message)
    assert processes.lost_another(error) is lost
