"""Processes of one run: none waits for another that failed, is gone or never came, and one message
is said."""

import dataclasses
import os
import signal
import time

import pytest
import torch
from forked import Forked, free_port, in_ranks
from ranks import breaks, dies_in_step, ends, fails, forever, freezes, perform, sums, works
from test_engine import CPU, Net, job_of, make_schedule

from kdcli.data.batches import BatchOrder
from kdcli.engine import peers
from kdcli.engine.launch import refuse_engines
from kdcli.engine.processes import ends_at_once, stop_requests
from kdcli.engine.run_dir import RunDir
from kdcli.engine.session import Session, start
from kdcli.engine.train import train
from kdcli.errors import Stopped, UsageError
from kdcli.types import StepLoss, Term

pytestmark = pytest.mark.slow


def lives(*does, patience="20", **environment):
    """Exit codes of processes that join a run and do this, and all that they say; None never
    starts."""
    place = {"WORLD_SIZE": str(len(does)), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    place |= {"ACCELERATE_USE_CPU": "true", peers.JOIN_SECONDS: patience} | environment
    started = [
        Forked(perform, do, **place | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank, do in enumerate(does)
        if do is not None
    ]
    try:
        ended = [
            one
            for one, do in zip(started, (d for d in does if d), strict=True)
            if do is not freezes
        ]
        said = [one.communicate(60)[1] for one in ended]
    finally:
        for one in started:
            if one.returncode is None:
                one.kill()
    return [one.returncode for one in ended], said


@pytest.mark.parametrize("other", [forever, sums, fails])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_fails_ends_all_with_its_code_and_one_message_of_the_main_one(rank, other):
    does = [other, other]
    does[rank] = fails
    codes, said = lives(*does)
    assert codes == [2, 2]
    assert "".join(said).count("error:") == said[0].count("the data are gone") == 1, said


def test_a_bug_in_one_process_ends_the_others():
    codes, said = lives(forever, breaks)
    assert codes == [1, 1]
    assert "ZeroDivisionError: a bug" in said[0]
    assert "Traceback" in said[1]


@pytest.mark.parametrize(("other", "gone"), [(sums, dies_in_step), (forever, freezes)])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_is_killed_or_falls_silent_ends_the_others(rank, other, gone):
    does = [other, other]
    does[rank] = gone
    codes, said = lives(*does)
    assert set(codes) <= {3, -9}
    message = "does not respond" if gone is freezes else "has ended, and the others cannot"
    assert "".join(said).count("error:") == "".join(said).count(message) == 1, said
    assert "Traceback" not in "".join(said)


@pytest.mark.parametrize(
    ("does", "who"), [((ends, None), "process 1 of 2"), ((None, ends), "process 0, at 127")]
)
def test_a_process_that_never_comes_is_named(does, who):
    codes, (said,) = lives(*does, patience="1")
    assert codes == [3]
    assert f"error: {who}" in said
    assert "within 1 s" in said


@pytest.mark.parametrize("does", [ends, works, sums])
def test_processes_that_end_at_different_times_are_not_missed(does):
    codes, said = lives(does, does, does)
    assert codes == [0, 0, 0], said
    assert "".join(said) == ""


def test_a_child_of_kdcli_leaves_it_to_its_parent_to_say_which_was_killed():
    codes, said = lives(sums, dies_in_step, KDCLI_PARENT="1")
    assert codes == [3, -9]
    assert said == ["", ""]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "WORLD_SIZE is 2, but RANK, MASTER_PORT, LOCAL_RANK, MASTER_ADDR is not set"),
        ({"MASTER_ADDR": "a", "MASTER_PORT": "1", "LOCAL_RANK": "0", "RANK": "x"}, "RANK=x"),
        (
            {"MASTER_ADDR": "a", "MASTER_PORT": "1", "LOCAL_RANK": "0", "RANK": "2"},
            "RANK is 2, but WORLD_SIZE 2 allows only 0 to 1",
        ),
        (
            {
                "MASTER_ADDR": "a",
                "MASTER_PORT": "1",
                "LOCAL_RANK": "0",
                "RANK": "1",
                peers.JOIN_SECONDS: "-1",
            },
            "-1",
        ),
    ],
)
def test_an_environment_that_cannot_be_used_is_said(monkeypatch, changes, message):
    for name, value in ({"WORLD_SIZE": "2"} | changes).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=message):
        peers.join()


@pytest.mark.parametrize("engine", ["FSDP", "DEEPSPEED", "MEGATRON_LM", "PARALLELISM_CONFIG"])
def test_what_accelerate_may_ask_for_and_is_not_done_is_refused(monkeypatch, engine):
    monkeypatch.setenv(f"ACCELERATE_USE_{engine}", "true")
    with pytest.raises(UsageError, match=f"ACCELERATE_USE_{engine}"):
        refuse_engines()


def test_the_environment_does_not_divide_gradients(monkeypatch):
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    assert start(CPU, torch.float32).gradient_accumulation_steps == 1


def _trained(net, folder=None, **changes):
    run = RunDir.claim(folder, "x: 1\n", resume=True) if folder else None
    job = job_of({"net": net}, changes.pop("step", None))
    if "rows" in changes:
        job.examples.ids = changes.pop("rows")(job.examples.ids)
    return train(Session(start(CPU, torch.float32), CPU), job, make_schedule(**changes), run)


def weights_of(net):
    return {name: p.detach() for name, p in net.named_parameters()}


def both_are(expected, work):
    """Two processes end with these weights."""
    for found in in_ranks(2, work):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def _differ(what):
    def work():
        second = os.environ["RANK"] == "1"
        net = Net(seed=int(second and what == "weights"))
        # The last row alone is another.
        other = {"rows": lambda ids: torch.cat([ids[:-1], ids[-1:] + 1])}
        changes = other if second and what == "hash of the training" else {}
        changes |= (
            {"steps": 9}
            if second and what == "optimiser steps: 12 in process 0, 9 in process 1"
            else {}
        )
        with pytest.raises(UsageError, match=what):
            _trained(net, **changes)
        return {"none": torch.zeros(1)}

    return work


@pytest.mark.parametrize(
    "what", ["weights", "hash of the training", "optimiser steps: 12 in process 0, 9 in process 1"]
)
def test_processes_that_would_train_something_else_are_refused(what):
    in_ranks(2, _differ(what))


def test_more_processes_than_rows_of_a_batch_are_refused():
    short = dataclasses.replace(job_of({"net": Net()}), order=BatchOrder(50, 2, 0))

    def work():
        with pytest.raises(
            UsageError, match="the 2 rows of a batch are fewer than the 3 processes"
        ):
            train(Session(start(CPU, torch.float32), CPU), short, make_schedule(batch_size=2), None)
        return {"none": torch.zeros(1)}

    in_ranks(3, work)


def test_a_checkpoint_is_sent_to_a_machine_that_does_not_see_it(tmp_path):
    whole = Net()
    _trained(whole)
    _trained(Net(), tmp_path / "0", stop_after=6, checkpoint_every=3)
    RunDir(tmp_path / "0").release()

    def work():
        net = Net()
        outcome = _trained(net, tmp_path / os.environ["RANK"])
        assert outcome.resumed_from_step == 6
        return weights_of(net)

    both_are(weights_of(whole), work)


def test_memory_that_runs_out_in_one_process_ends_in_a_checkpoint_of_the_step_before(tmp_path):
    whole, folder = Net(), tmp_path / "run"
    _trained(whole)

    def work(tight):
        net, calls = Net(), [0]

        def step(batch):
            calls[0] += net.training
            # The probe is the first call.
            if tight and os.environ["RANK"] == "1" and calls[0] == 6:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return StepLoss({"net": Term(net(batch), "tokens")})

        run = (
            RunDir.claim(folder, "x: 1\n", resume=True)
            if os.environ["RANK"] == "0"
            else RunDir(tmp_path / "none")
        )
        job = job_of({"net": net}, step)
        try:
            outcome = train(Session(start(CPU, torch.float32), CPU), job, make_schedule(), run)
        except Stopped as stopped:
            # As the command would.
            peers.peers().end(stopped)
            run.release()
            return {"micro": torch.tensor(int("micro-batches of 2" in stopped.message))}
        assert outcome.resumed_from_step == 4
        return weights_of(net)

    assert [int(found["micro"]) for found in in_ranks(2, lambda: work(True))] == [1, 1]
    both_are(weights_of(whole), lambda: work(False))


def test_a_micro_batch_that_does_not_fit_is_halved_before_the_first_step_by_all(capfd):
    whole = Net()
    _trained(whole)

    def work():
        net = Net()

        def step(batch):
            if len(batch["input_ids"]) > 1 + int(os.environ["RANK"]):
                raise torch.OutOfMemoryError("CUDA out of memory")
            return StepLoss({"net": Term(net(batch), "tokens")})

        _trained(net, step=step)
        return weights_of(net)

    both_are(weights_of(whole), work)
    assert "micro-batch halved to 1" in capfd.readouterr().err


def waits(rank):
    """A main thread in a library that runs no handler of Python's: the other process never comes to
    the barrier."""
    session = Session(start(CPU, torch.float32), CPU)
    session.wait()
    if rank == 0:
        with ends_at_once(), stop_requests():
            print("waiting", flush=True)
            session.wait()
    time.sleep(600)


def test_a_second_sigterm_ends_at_once_whatever_the_main_thread_waits_for():
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    both = [Forked(perform, waits, **place | {"RANK": rank, "LOCAL_RANK": rank}) for rank in "01"]
    both[0].first_line()
    for _ in range(2):
        time.sleep(1.2)
        both[0].kill(signal.SIGTERM)
    _, said = both[0].communicate(30)
    assert both[0].returncode == 130
    assert "interrupted; no checkpoint of this step was written" in said
    both[1].communicate(30)
    assert both[1].returncode == 3


def test_a_parameter_that_no_step_uses_stays_as_in_one_process():
    def work():
        net = Net()
        net.idle = torch.nn.Parameter(torch.ones(3))
        before = net.idle.detach().clone()
        _trained(net)
        assert net.idle.grad is None
        assert torch.equal(net.idle, before)
        return weights_of(net)

    (one,) = in_ranks(1, work)
    both_are(one, work)
