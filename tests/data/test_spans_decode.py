"""Answers read off logits: against plain loops, over padding and order, and when there is none."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from questions import KINDS, WORDS, asking, mixed, random_logits, row, windows_of

from kdcli.data.labelled.spans import Decoded, decode


@pytest.mark.parametrize("kind", KINDS)
def test_sorted_windows_mean_the_same(kind):
    examples = mixed()
    found = windows_of(examples, kind, max_length=50, stride=16)
    logits = random_logits(found)
    order = np.argsort(found.rows.lengths, kind="stable")
    by_length = found.by_length()
    assert by_length.rows.lengths.tolist() == sorted(found.rows.lengths)
    assert by_length.rows.lengths.tolist() != found.rows.lengths.tolist()
    for i, at in enumerate(order):
        for of in ("ids", "char_begin_T", "char_end_T"):
            assert row(by_length, i, of) == row(found, at, of)
        assert by_length.rows.labels[i].tolist() == found.rows.labels[at].tolist()
    assert decode(by_length, [logits[i] for i in order], examples) == decode(found, logits, examples)
    assert len(found.take(np.empty(0, dtype=np.int64))) == 0


def test_what_is_beyond_a_window_changes_nothing():
    examples = mixed()
    found = windows_of(examples, max_length=50, stride=16)
    logits = random_logits(found)
    padded = [np.concatenate([x, np.full((9, 2), 99.0, dtype=np.float32)]) for x in logits]
    assert decode(found, padded, examples) == decode(found, logits, examples)


def by_loops(windows, logits, examples, best, max_answer_tokens, impossible) -> list[Decoded]:
    """As the reference scripts do it: every candidate pair on its own, then the best of the list."""
    found = []
    for number, example in enumerate(examples):
        candidates, nulls = [], []
        for i in range(len(windows)):
            if windows.rows.example[i] != number:
                continue
            begin, end = row(windows, i), row(windows, i, "char_end_T")
            starts, ends = ([float(logits[i][t][side]) for t in range(len(begin))] for side in (0, 1))
            nulls.append(starts[0] + ends[0])
            for s in sorted(range(len(begin)), key=lambda t: starts[t], reverse=True)[:best]:
                for e in sorted(range(len(begin)), key=lambda t: ends[t], reverse=True)[:best]:
                    if begin[s] < 0 or begin[e] < 0 or e < s or e - s + 1 > max_answer_tokens:
                        continue
                    candidates.append((starts[s] + ends[e], example.texts[1][begin[s] : end[e]].strip()))
        score, text = max(candidates, default=(float("-inf"), ""))
        no_answer = min(nulls) - score
        found.append(Decoded(example.id, "" if impossible and no_answer > 0 else text, no_answer, score))
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("best", "max_answer_tokens"), [(20, 30), (1, 30), (5, 2), (1000, 1)])
@pytest.mark.parametrize("impossible", [False, True])
def test_decoding_agrees_with_loops(kind, best, max_answer_tokens, impossible):
    examples = mixed()
    found = windows_of(examples, kind, max_length=50, stride=16)
    logits = random_logits(found, seed=best)
    asked = {"best": best, "max_answer_tokens": max_answer_tokens, "impossible": impossible}
    for number, values in zip(found.rows.example, logits, strict=True):
        values[0] += 4 * (number % 2)
    expected = by_loops(found, logits, examples, **asked)
    assert decode(found, logits, examples, **asked) == expected
    if impossible:
        assert 0 < sum(d.text == "" for d in expected) < len(expected)


@settings(max_examples=20)
@given(st.lists(WORDS, min_size=1, max_size=40))
def test_no_answer_wins_only_where_it_is_possible(words):
    examples = [asking(" ".join(words))]
    found = windows_of(examples, "bytes", max_length=60, stride=20)
    logits = [np.zeros((length, 2), dtype=np.float32) for length in found.rows.lengths]
    for values in logits:
        values[0] = 1.0
    (unable,), (able,) = decode(found, logits, examples, impossible=True), decode(found, logits, examples)
    assert unable.text == ""
    assert able.text != ""
    assert able.no_answer == unable.no_answer == 2.0
    assert able.score == 0.0


def test_a_tie_is_an_answer_and_the_first_one():
    examples = [asking("the cat ran in Wien " * 12)]
    found = windows_of(examples)
    (decoded,) = decode(found, [np.zeros((found.rows.lengths[0], 2), dtype=np.float32)], examples, impossible=True)
    assert decoded.no_answer == 0.0
    assert decoded.text == "the"


def test_without_a_span_there_is_no_text():
    empty, reversed_only = asking(""), asking("the cat ran")
    found = windows_of([empty, reversed_only])
    logits = [np.zeros((length, 2), dtype=np.float32) for length in found.rows.lengths]
    begin = next(i for i, value in enumerate(row(found, 1)) if value >= 0)
    logits[1][begin + 2, 0] = logits[1][begin, 1] = 9.0
    for decoded in decode(found, logits, [empty, reversed_only], best=1):
        assert (decoded.text, decoded.score, decoded.no_answer) == ("", -np.inf, np.inf)
