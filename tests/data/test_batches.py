"""The order of a run is a pure function of seed and step: resuming cannot change it."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kdcli.data.batches import BatchPlan


@settings(max_examples=60)
@given(st.integers(1, 60), st.integers(1, 25), st.integers(0, 5))
def test_every_example_comes_once_a_pass(n, batch_size, seed):
    plan = BatchPlan(n, batch_size, seed)
    batches = [plan.indices(step) for step in range(1, 3 * n + 2)]
    assert {len(b) for b in batches} == {batch_size}
    seen = np.concatenate(batches)
    for epoch in range(len(seen) // n):
        assert sorted(seen[epoch * n : (epoch + 1) * n].tolist()) == list(range(n))


def test_the_order_of_a_step_does_not_depend_on_the_steps_before():
    plan = BatchPlan(1000, 7, 3)
    later = plan.indices(123).tolist()
    for step in range(1, 50):
        plan.indices(step)
    assert plan.indices(123).tolist() == later
    assert BatchPlan(1000, 7, 3).indices(123).tolist() == later
    assert BatchPlan(1000, 7, 4).indices(123).tolist() != later


def test_passes_differ_from_each_other():
    plan = BatchPlan(100, 100, 0)
    assert plan.indices(1).tolist() != plan.indices(2).tolist()


def test_a_batch_larger_than_the_data_takes_several_passes():
    found = BatchPlan(3, 7, 0).indices(1).tolist()
    assert len(found) == 7
    assert sorted(found[:3]) == sorted(found[3:6]) == [0, 1, 2]
