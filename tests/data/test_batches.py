"""The order of a run is a pure function of seed and step: resuming cannot change it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from kdcli.data.batches import BatchOrder, BucketOrder, permuted

pytestmark = pytest.mark.slow


@settings(max_examples=30)
@given(st.integers(1, 60), st.integers(1, 25), st.integers(0, 5))
def test_every_example_comes_once_a_pass(n, batch_size, seed):
    schedule = BatchOrder(n, batch_size, seed)
    batches = [schedule.indices(step) for step in range(1, 3 * n + 2)]
    assert {len(b) for b in batches} == {batch_size}
    seen = np.concatenate(batches)
    for epoch in range(len(seen) // n):
        assert sorted(seen[epoch * n : (epoch + 1) * n].tolist()) == list(range(n))


def test_the_order_of_a_step_does_not_depend_on_the_steps_before():
    schedule = BatchOrder(1000, 7, 3)
    later = schedule.indices(123).tolist()
    for step in range(1, 50):
        schedule.indices(step)
    assert (schedule.indices(123).tolist(), BatchOrder(1000, 7, 3).indices(123).tolist()) == (
        later,
        later,
    )
    assert BatchOrder(1000, 7, 4).indices(123).tolist() != later
    assert (
        BatchOrder(100, 100, 0).indices(1).tolist() != BatchOrder(100, 100, 0).indices(2).tolist()
    )


@settings(max_examples=80)
@given(st.integers(1, 3000), st.integers(0, 2**63 - 1), st.integers(0, 10**6))
def test_a_permutation_has_every_number_once_wherever_it_is_asked(n, seed, number):
    whole = permuted(np.arange(n), n, seed, number)
    assert sorted(whole.tolist()) == list(range(n))
    places = np.arange(n)[:: max(1, n // 7)][::-1]
    assert permuted(places, n, seed, number).tolist() == whole[places].tolist()


def test_neighbours_of_a_large_permutation_are_independent():
    """Of all numbers below a million, and of places far apart in one of 10**12, of which no array
    could be made."""
    whole = permuted(np.arange(10**6), 10**6, 0, 0)
    pairs, _, _ = np.histogram2d(whole[:-1], whole[1:], 20)
    steps = np.bincount((whole[1:] - whole[:-1]) % 10**6 // 10**4, minlength=100)
    assert chisquare(pairs.ravel()).pvalue > 0.001
    assert chisquare(steps).pvalue > 0.001
    order = BatchOrder(10**12, 2000, 3)
    drawn = np.concatenate([order.indices(step) for step in (1, 2, 10**8, 5 * 10**8)])
    assert len(np.unique(drawn)) == 8000
    assert chisquare(np.bincount(drawn // 10**11, minlength=10)).pvalue > 0.001


LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=80)


def drawn(schedule, number):
    """The batches of a pass."""
    first = number * schedule.steps_of_pass + 1
    return [schedule.indices(step) for step in range(first, first + schedule.steps_of_pass)]


@settings(max_examples=60)
@given(LENGTHS, st.integers(1, 25), st.integers(1, 30), st.integers(0, 5), st.integers(1, 4))
def test_every_example_comes_once_in_every_pass_of_buckets(lengths, batch_size, group, seed, pool):
    schedule = BucketOrder(np.array(lengths), batch_size, group, seed, pool)
    for number in range(3):
        batches = drawn(schedule, number)
        assert sorted(np.concatenate(batches).tolist()) == list(range(len(lengths)))
        sizes = [len(b) for b in batches]
        assert max(sizes) <= batch_size
        assert max(sizes) - min(sizes) <= 1
        assert len(batches) == -(-len(lengths) // batch_size)


@settings(max_examples=40)
@given(LENGTHS, st.integers(1, 9), st.lists(st.integers(1, 200), min_size=1, max_size=12))
def test_a_step_of_buckets_does_not_depend_on_what_was_asked_before(lengths, batch_size, steps):
    schedule = BucketOrder(np.array(lengths), batch_size, 4, 3)
    for step in steps:
        fresh = BucketOrder(np.array(lengths), batch_size, 4, 3)
        assert schedule.indices(step).tolist() == fresh.indices(step).tolist()


def test_passes_and_seeds_of_buckets_differ():
    lengths = np.random.Generator(np.random.PCG64(0)).integers(5, 120, 3000)
    schedule = BucketOrder(lengths, 16, 4, 0)
    orders = [np.concatenate(drawn(schedule, n)).tolist() for n in range(3)]
    orders.append(np.concatenate(drawn(BucketOrder(lengths, 16, 4, 1), 0)).tolist())
    assert len({tuple(order) for order in orders}) == 4
    # Not only the order of the batches: other examples meet.
    met = [{frozenset(b.tolist()) for b in drawn(schedule, n)} for n in range(2)]
    assert len(met[0] & met[1]) < 0.05 * len(met[0])


def padding(batches, lengths):
    padded = sum(len(b) * lengths[b].max() for b in batches)
    return 1 - sum(lengths[b].sum() for b in batches) / padded


def test_buckets_hold_far_less_padding_than_batches_of_any_length():
    lengths = np.random.Generator(np.random.PCG64(0)).geometric(0.03, 20_000).clip(4, 128)
    schedule, plain = BucketOrder(lengths, 32, 8, 0), BatchOrder(len(lengths), 32, 0)
    of_plain = padding([plain.indices(step) for step in range(1, 626)], lengths)
    for number in range(2):
        groups = [g for batch in drawn(schedule, number) for g in np.split(batch, 4)]
        assert schedule.padding(number) == pytest.approx(padding(groups, lengths))
        assert schedule.padding(number) < 0.1 * of_plain
