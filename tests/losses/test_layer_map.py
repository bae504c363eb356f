"""Layer maps: the three strategies, layer counts that do not divide, and the grammar of a map
written out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdcli.losses.layer_map import STRATEGIES, layer_map


@pytest.mark.parametrize(
    ("text", "n", "m", "expected"),
    [
        ("uniform", 12, 4, {0: 0, 1: 3, 2: 6, 3: 9, 4: 12}),
        ("uniform", 6, 4, {0: 0, 1: 2, 2: 3, 3: 4, 4: 6}),
        ("uniform", 12, 5, {0: 0, 1: 2, 2: 5, 3: 7, 4: 10, 5: 12}),
        ("uniform", 2, 6, {0: 0, 1: 1, 2: 1, 3: 1, 4: 1, 5: 2, 6: 2}),
        ("top", 12, 4, {0: 0, 1: 9, 2: 10, 3: 11, 4: 12}),
        ("bottom", 12, 4, {0: 0, 1: 1, 2: 2, 3: 3, 4: 4}),
        ("0:0,1:3,2:6", 6, 4, {0: 0, 1: 3, 2: 6}),
        (" 2 : 1 , 1:6 ", 6, 4, {1: 6, 2: 1}),
    ],
)
def test_maps(text, n, m, expected):
    assert layer_map(text, n, m) == expected


@pytest.mark.parametrize("text", STRATEGIES)
@pytest.mark.parametrize("m", [1, 2, 5, 6, 11, 12])
def test_every_strategy_maps_every_layer_in_order_into_the_teacher(text, m):
    pairs = layer_map(text, 12, m)
    assert (list(pairs), pairs[0]) == (list(range(m + 1)), 0)
    assert all(
        1 <= a < b <= 12
        for a, b in zip(list(pairs.values())[1:], list(pairs.values())[2:], strict=False)
    )
    assert text == "bottom" or pairs[m] == 12


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "middle",
            r"'middle' is neither uniform, top, bottom nor a list of student:teacher pairs "
            r"such as 0:0,1:2",
        ),
        ("", r"'' is neither"),
        ("1:3,", r"is neither"),
        ("1:-3", r"is neither"),
        ("1:3;2:6", r"is neither"),
        ("1:7", r"1:7 names layer 7 of the teacher, which has layers 0 \(the embedding\) to 6"),
        ("1:2,4:6", r"4:6 names layer 4 of the student, which has layers 0 \(the embedding\) to 3"),
        ("1:2,1:3", r"1:3 names student layer 1 again"),
        ("0:2", r"0:2 pairs an embedding"),
        ("2:0", r"2:0 pairs an embedding.*layers 1 to 6"),
    ],
)
def test_maps_that_cannot_be_say_what_is_allowed(text, message):
    with pytest.raises(ValueError, match=message):
        layer_map(text, 6, 3)


@pytest.mark.parametrize("text", ["top", "bottom"])
def test_a_student_deeper_than_its_teacher_is_sent_to_uniform(text):
    with pytest.raises(ValueError, match="use uniform"):
        layer_map(text, 2, 3)


@given(
    st.dictionaries(st.integers(1, 20), st.integers(1, 30), min_size=1), st.booleans(), st.randoms()
)
def test_what_is_written_out_comes_back(pairs, embedding, random):
    pairs = ({0: 0} if embedding else {}) | pairs
    items = list(pairs.items())
    random.shuffle(items)
    space = random.choice(["", " "])
    text = f"{space},{space}".join(f"{m}{space}:{space}{n}" for m, n in items)
    assert list(layer_map(text, 30, 20).items()) == sorted(pairs.items())


@given(st.text(alphabet="0123456789:, -;.x\n", max_size=12))
def test_any_text_is_a_map_of_layers_that_exist_or_a_value_error(text):
    try:
        pairs = layer_map(text, 6, 3)
    except ValueError:
        return
    assert pairs
    assert all((m == 0 and n == 0) or (1 <= m <= 3 and 1 <= n <= 6) for m, n in pairs.items())
