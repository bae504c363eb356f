"""What a process does in tests of several processes. Imports are lazy, because most actions need
little."""

import os
import signal
import time
from pathlib import Path

import typer

from kdcli.cli.app import Verbs
from kdcli.engine import peers
from kdcli.engine.processes import stop_requests
from kdcli.errors import DivergedError, MachineError, Stopped, UsageError

# A process that a busy machine holds up for a second or two is not gone.
QUICK = {"BEAT_SECONDS": 0.05, "MAX_SILENT_BEATS": 50, "GRACE_SECONDS": 2.0, "REPORT_SECONDS": 5.0}
FOLDER = "KDCLI_TEST_FOLDER"


def forever(rank):
    """Work that hears of nothing, such as a library's."""
    time.sleep(600)


def fails(rank):
    raise UsageError("the data are gone", "look for them")


def lacks(rank):
    raise MachineError("no memory is left")


def diverges(rank):
    raise DivergedError("training diverged at step 1")


def stopped(rank):
    """Stop because another rank was asked to, and be asked afterwards."""
    try:
        with stop_requests():
            raise Stopped("stopped after step 1 of 2", "continue with --resume")
    finally:
        os.kill(os.getpid(), signal.SIGTERM)


def breaks(rank):
    raise ZeroDivisionError("a bug")


def dies(rank):
    os.kill(os.getpid(), signal.SIGKILL)


def dies_in_step(rank):
    _session().wait()
    dies(rank)


def freezes(rank):
    os.kill(os.getpid(), signal.SIGSTOP)


def ends(rank):
    time.sleep(0.2 * rank)


def works(rank):
    """Work of one process for much longer than the others would wait for its word."""
    time.sleep(5.0 if rank == 0 else 0.0)
    peers.join().check()


def sums(rank):
    """A collective that waits for the others."""
    session = _session()
    session.wait()
    session.any_rank(False)


def trains(rank):
    """Train slowly into a directory, like a verb."""
    import torch
    from test_engine import Net, job_of, make_schedule

    from kdcli.engine.run_dir import RunDir
    from kdcli.engine.train import train
    from kdcli.types import StepLoss, Term

    net, folder = Net(dropout=0.3), Path(os.environ[FOLDER])

    def step(batch):
        time.sleep(0.1 * net.training)
        return StepLoss({"net": Term(net(batch), "tokens")})

    session, run_dir = _session(), RunDir(folder)
    if session.is_main:
        run_dir = RunDir.claim(folder, "x: 1\n", resume=True)
    session.wait()
    train(session, job_of({"net": net}, step), make_schedule(), run_dir)
    if session.is_main:
        torch.save(net.state_dict(), folder / "weights.pt")


def _session():
    import torch

    from kdcli.engine.session import Session, start

    cpu = torch.device("cpu")
    return Session(start(cpu, torch.float32), cpu)


def perform(action):
    """Join the run and take an action, as a verb would."""
    # A rank that trains on a busy machine may say nothing for a while.
    for name, value in QUICK.items() if action is not trains else ():
        setattr(peers, name, value)
    verbs = typer.Typer(cls=Verbs)
    verbs.callback()(lambda: None)

    @verbs.command()
    def verb():
        peers.join()
        action(int(os.environ["RANK"]))

    verbs(["verb"])
