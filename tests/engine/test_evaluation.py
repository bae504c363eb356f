"""The pass over what is held out: means that do not depend on micro-batches, outputs in order,
memory that runs out."""

import dataclasses

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn

from kdcli.data.batches import BatchOrder
from kdcli.engine import session as sessions
from kdcli.engine.evaluation import (
    CPU_MICRO_BATCH,
    evaluate_batches,
    evaluate_job,
)
from kdcli.engine.session import Session
from kdcli.errors import MachineError, is_out_of_memory
from kdcli.types import Job, StepLoss, Term

N = 77
CPU = torch.device("cpu")


class Rows:
    """Row i holds the number i, and weighs 1 + i % 3."""

    def __init__(self, n=N) -> None:
        self.n = n
        self.sizes: list[int] = []

    def __len__(self) -> int:
        return self.n

    def batch(self, indices):
        self.sizes.append(len(indices))
        numbers = torch.from_numpy(np.asarray(indices))[:, None]
        mask = torch.arange(3) < weights(numbers)
        return {"input_ids": numbers.expand(-1, 3), "attention_mask": mask.long()}


def weights(numbers):
    return 1.0 + numbers % 3


def step_of(model, room=None, outputs=True):
    """A step whose loss is the weighed mean of the row's numbers, and that has memory for `room`
    rows at once."""

    def step(batch):
        numbers = batch["input_ids"][:, 0].double()
        assert not torch.is_grad_enabled()
        assert not model.training
        if room is not None and len(numbers) > room:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        mean = (numbers * weights(numbers)).sum() / weights(numbers).sum()
        square = (numbers**2 * weights(numbers)).sum() / weights(numbers).sum()
        found = (
            torch.stack([numbers, -numbers], 1).bfloat16()
            if outputs == "half"
            else numbers[:, None]
        )
        terms = {"mean": Term(mean, "tokens"), "square": Term(square, "tokens", weight=0.0)}
        terms["plain"] = Term(numbers.mean(), "rows", weight=2.0)
        return StepLoss(terms, found if outputs else None)

    return step


def job_of(examples, judge=True, training=False, **how):
    model = nn.Linear(1, 1).train(training)
    return Job(
        modules={"student": model},
        step=step_of(model, **how),
        examples=Rows(3),
        order=BatchOrder(3, 1, 0),
        held_out=examples,
        compute_metrics=(lambda outputs: {"accuracy": 1.0}) if judge else None,
    )


def session():
    return Session(Accelerator(cpu=True), CPU)


def expected():
    numbers = np.arange(N)
    found = {
        n: np.average(x, weights=weights(numbers))
        for n, x in (("mean", numbers), ("square", numbers**2))
    }
    found["plain"] = numbers.mean()
    return found | {"loss": found["mean"] + 2 * found["plain"]}


def test_losses_are_means_over_what_batches_weigh_and_outputs_come_in_order():
    rows = Rows()
    found = evaluate_job(session(), job_of(rows, training=True))
    assert found.losses == pytest.approx(expected())
    assert [o.tolist() for o in found.outputs] == [[float(i)] for i in range(N)]
    assert rows.sizes == [CPU_MICRO_BATCH, CPU_MICRO_BATCH, N - 2 * CPU_MICRO_BATCH]


@pytest.mark.parametrize("micro", [1, 2, 5, 64, 100])
def test_the_size_of_micro_batches_changes_nothing(micro):
    found = evaluate_batches(session(), job_of(Rows()), Rows(), micro)
    assert found.losses == pytest.approx(expected())
    assert np.concatenate(found.outputs).tolist() == list(range(N))


def test_outputs_are_float32_whatever_the_model_computes_in():
    found = evaluate_job(session(), job_of(Rows(9), outputs="half"))
    assert {o.dtype for o in found.outputs} == {np.dtype(np.float32)}
    assert found.outputs[3].tolist() == [3.0, -3.0]


@pytest.mark.parametrize(
    ("judge", "judging", "dtype"),
    [(True, False, torch.float32), (True, True, torch.bfloat16), (False, False, torch.bfloat16)],
)
def test_scores_are_computed_in_float32_unless_a_verb_that_only_judges_asks_for_less(
    judge, judging, dtype
):
    AcceleratorState._reset_state(True)
    model, seen = nn.Linear(1, 1), set()

    def step(batch):
        seen.add((found := model(batch["input_ids"].float().mean(1, keepdim=True))).dtype)
        return StepLoss({"loss": Term(found.float().mean(), "rows")}, found)

    job = dataclasses.replace(job_of(Rows(9), judge=judge), modules={"student": model}, step=step)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    output = evaluate_job(Session(accelerator, CPU, judging=judging), job)
    AcceleratorState._reset_state(True)
    assert seen == {dtype}
    assert output.in_float32 == (dtype == torch.float32)


@pytest.mark.parametrize("how", [{"judge": False}, {"outputs": False}])
def test_outputs_are_kept_only_to_be_judged(how):
    found = evaluate_job(session(), job_of(Rows(), **how))
    assert found.outputs == []
    assert found.losses == pytest.approx(expected())


@pytest.mark.parametrize("room", [16, 3, 1])
def test_where_memory_runs_out_fewer_rows_are_taken_at_once(room):
    rows = Rows()
    found = evaluate_job(session(), job_of(rows, room=room))
    assert found.losses == pytest.approx(expected())
    assert np.concatenate(found.outputs).tolist() == list(range(N))
    tried = list(dict.fromkeys(rows.sizes))
    assert tried[:2] == [CPU_MICRO_BATCH, CPU_MICRO_BATCH // 2]
    largest = max(size for size in tried if size <= room)
    assert largest == 2 ** int(np.log2(room))


def test_without_memory_for_one_row_it_is_said_what_to_lower():
    with pytest.raises(MachineError, match="one sequence at a time") as error:
        evaluate_job(session(), job_of(Rows(), room=0))
    assert "data.max_length" in error.value.hint


def test_an_error_of_another_kind_is_not_taken_for_want_of_memory():
    job = dataclasses.replace(job_of(Rows()), step=lambda batch: torch.eye(2) @ torch.eye(3))
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        evaluate_job(session(), job)


def test_a_job_that_holds_nothing_out_cannot_be_evaluated():
    with pytest.raises(ValueError, match="has no held-out examples"):
        evaluate_job(session(), job_of(None))


@pytest.mark.parametrize(
    ("error", "memory"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), True),
        (
            RuntimeError(
                "DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes"
            ),
            True,
        ),
        (
            RuntimeError(
                "[enforce fail] DefaultCPUAllocator: not enough memory: you tried to allocate"
            ),
            True,
        ),
        (RuntimeError("expected scalar type Float but found Half"), False),
    ],
)
def test_what_says_that_memory_ran_out(error, memory):
    assert is_out_of_memory(error) is memory


class Rank:
    """One of several processes; `flags` is what they sum up to."""

    def __init__(self, index, count, flags=0.0) -> None:
        self.process_index, self.num_processes, self.flags = index, count, flags

    def autocast(self):
        return torch.autocast("cpu", enabled=False)

    def reduce(self, values, how):
        assert how == "sum"
        return values + self.flags


@pytest.mark.parametrize("count", [2, 3, 100])
def test_several_processes_find_together_what_one_finds(monkeypatch, count):
    """Each takes its share, the last ones of a hundred none at all; all of them hold all outputs in
    order."""
    parts: list[object] = []
    monkeypatch.setattr(sessions, "gather_object", lambda mine: parts.extend(mine) or parts)
    taken = []
    for index in range(count):
        rows = Rows()
        found = evaluate_batches(Session(Rank(index, count), CPU), job_of(rows), rows, 8)
        taken.append(sum(rows.sizes))
    assert sum(taken) == N
    assert max(taken) - min(taken) <= 1
    # The last one to ask has heard of all.
    assert found.losses == pytest.approx(expected())
    assert np.concatenate(found.outputs).tolist() == list(range(N))


def test_a_process_gives_up_when_another_one_has_no_memory(monkeypatch):
    monkeypatch.setattr(
        sessions, "gather_object", lambda mine: pytest.fail("ranks would wait for each other")
    )
    assert evaluate_batches(Session(Rank(0, 2, flags=1.0), CPU), job_of(Rows()), Rows(), 8) is None
    assert Session(Rank(0, 2, flags=1.0), CPU).any_rank(False) is True
    assert Session(Rank(0, 2, flags=0.0), CPU).any_rank(False) is False
    assert Session(Rank(0, 1), CPU).any_rank(True) is True
