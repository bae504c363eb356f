"""Batches built ahead by a thread are those that would be built in turn."""

import threading

import pytest
import torch

from kdcli.engine.batches_ahead import BatchesAhead

SHARED = torch.device("mps")  # Memory that needs no pinning


def recording(made):
    def make(step, micro):
        made.append((step, micro, threading.current_thread().name))
        return [{"input_ids": torch.full((micro, 2), step)}]

    return make


def test_a_thread_builds_one_step_ahead_and_no_further():
    made = []
    with BatchesAhead(recording(made), SHARED, 4) as batches:
        for step in (2, 3, 4):
            (batch,) = batches.of(step, 3)
            assert torch.equal(batch["input_ids"], torch.full((3, 2), step))
    assert [(step, micro) for step, micro, _ in made] == [(2, 3), (3, 3), (4, 3)]
    assert {name for *_, name in made} == {"batches_0"}


def test_other_micro_batches_are_built_anew():
    made = []
    with BatchesAhead(recording(made), SHARED, 9) as batches:
        sizes = [
            batches.of(step, micro)[0]["input_ids"].shape
            for step, micro in ((1, 4), (2, 4), (2, 2), (3, 2))
        ]
    assert sizes == [(4, 2), (4, 2), (2, 2), (2, 2)]
    # Nothing is built twice but what was built ahead in another size.
    assert len(set(made)) == len(made)


def test_the_thread_is_gone_after_a_failure():
    def make(step, micro):
        raise ValueError(f"step {step}")

    with pytest.raises(ValueError, match="step 5"), BatchesAhead(make, SHARED, 9) as batches:
        batches.of(5, 1)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("batches")]
