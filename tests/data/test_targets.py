"""Sources and targets as rows: what the tokenizer says of each, what is cut, labels and types on
the target alone."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from questions import KINDS, tokenizer_of

from kdcli.data.labelled.features import MIN_SOURCE_TOKENS, encode_targets
from kdcli.errors import UsageError
from kdcli.types import IGNORED, Example

TEXTS = [
    "the cat sat",
    "rivers",
    "who ran? who ran? who ran? who ran?",
    "the cat on the rivers in 1872",
]
END = 3


def rows_of(pairs, kind="word pieces", max_length=32, target_length=8):
    examples = [
        Example(f"f:{i}", str(i), s if isinstance(s, tuple) else (s,), t)
        for i, (s, t) in enumerate(pairs)
    ]
    how = {
        "max_length": max_length,
        "target_length": target_length,
        "end_id": END,
        "token_types": True,
    }
    return encode_targets(examples, tokenizer_of(kind), **how)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("room", [24, MIN_SOURCE_TOKENS])
def test_a_row_is_source_target_and_end(kind, room):
    tokenizer = tokenizer_of(kind)
    pairs = [(s, t) for s in TEXTS for t in TEXTS]
    rows, cut = rows_of(pairs, kind, room + 5, 5), 0
    for i, (source, target) in enumerate(pairs):
        wanted = tokenizer(source, truncation=True, max_length=room)["input_ids"]
        words = tokenizer(target, add_special_tokens=False)["input_ids"]
        cut += len(words) > 4 or len(tokenizer(source)["input_ids"]) > room
        begin = int(rows.ends[i] - rows.lengths[i])
        assert rows.ids_T[begin : rows.ends[i]].tolist() == [*wanted, *words[:4], END]
        assert rows.sources[i] == len(wanted)
    assert rows.truncated == cut > 0


@settings(max_examples=30)
@given(st.permutations(range(4)), st.integers(1, 4))
def test_a_batch_has_labels_and_types_on_targets_alone(order, count):
    rows = rows_of([(text, TEXTS[i - 1]) for i, text in enumerate(TEXTS)]).take(np.array(order))
    batch = rows.batch(np.arange(count))
    for row in range(count):
        source, length = int(rows.sources[row]), int(rows.lengths[row])
        assert int(batch["sources"][row]) == source
        ids, labels = batch["input_ids"][row].tolist(), batch["labels"][row].tolist()
        assert labels == [IGNORED] * source + ids[source:length] + [IGNORED] * (len(ids) - length)
        assert batch["token_type_ids"][row].tolist() == [
            int(source <= i < length) for i in range(len(ids))
        ]
        assert ids[length - 1] == END
        assert batch["attention_mask"][row].sum() == length


def test_without_a_target_a_row_is_its_source():
    rows = rows_of([(TEXTS[0], None)])
    assert rows.lengths.tolist() == rows.sources.tolist()
    assert (rows.labels == IGNORED).all()


def test_no_room_for_a_source_is_refused():
    with pytest.raises(
        UsageError, match="rows of 15 tokens with targets of 8 tokens leave 7 tokens for the source"
    ):
        rows_of([(TEXTS[0], TEXTS[1])], max_length=15)


def test_a_source_of_two_texts_is_cut_in_the_longer():
    rows = rows_of([((TEXTS[2], "rivers"), "cat")], max_length=20)
    wanted = tokenizer_of("word pieces")(TEXTS[2], "rivers", truncation=True, max_length=12)[
        "input_ids"
    ]
    assert rows.ids_T[: rows.sources[0]].tolist() == wanted
    assert rows.truncated == 1
