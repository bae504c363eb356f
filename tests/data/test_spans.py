"""Windows hold every token and know their characters; answers come back from them exactly, whatever
the tokenizer."""

import numpy as np
import pytest
import questions
from hypothesis import given, settings
from hypothesis import strategies as st
from questions import (
    CONTEXTS,
    KINDS,
    PEOPLE,
    ROBBERT,
    SPECIAL,
    asking,
    one_hot,
    random_logits,
    row,
    tokenizer_of,
    windows_of,
    with_pre_tokenizer,
)
from tokenizers import Regex, pre_tokenizers, processors
from transformers import CanineTokenizer, PreTrainedTokenizerFast

from kdcli.data.labelled.answer_windows import Decoded, check_answers, decode_answers, windows
from kdcli.errors import UsageError
from kdcli.types import Answer, Example

pytestmark = pytest.mark.slow


def answered(examples, kind, **settings):
    found = windows_of(examples, kind, **settings)
    return [d.text for d in decode_answers(found, one_hot(found), examples, max_answer_tokens=60)]


PLACES = {
    "begin": ("Wien is where the cat ran", "Wien"),
    "end": ("the cat ran in Zürich", "Zürich"),
    "all": ("a cat", "a cat"),
    "before a stop": ("the cat sat in Wien.", "Wien"),
    "within brackets": ("the (naïve) cat", "naïve"),
    "several words": ("the cat sat on the mat in 1872", "sat on the mat"),
    "after much space": ("the cat   \n\t sat", "sat"),
    "combining marks": ("the cafe\u0301 in Zu\u0308rich ran", "cafe\u0301 in Zu\u0308rich"),
    "a mark at the end of all": ("the cat in a cafe\u0301", "cafe\u0301"),
    "emoji": ("the 👩‍🚀 ran on 🌍 the mat", "👩‍🚀 ran on 🌍"),
    "emoji of two code points": ("the cat ❤\ufe0f the mat", "❤\ufe0f"),
    "no spaces": ("the cat ran in 東京 and sat", "東京"),
    "vowel signs": ("the cat नमस्ते sat", "नमस्ते"),
    "ligature": ("the \ufb01sh ran", "\ufb01sh"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", PLACES)
def test_an_answer_comes_back_exactly(kind, place):
    context, answer = PLACES[place]
    assert answered([asking(context, answer)], kind) == [answer]


@pytest.mark.parametrize("kind", KINDS)
def test_of_a_text_that_repeats_the_right_one_is_labelled(kind):
    context = "the cat ran on the cat and the cat sat"
    for start in (4, 19, 31):
        found = windows_of([asking(context, ("cat", start))], kind)
        first, last = found.labels[0]
        assert row(found, 0)[first] in (start - 1, start)
        assert row(found, 0, "char_end_T")[last] == start + 3


def test_white_space_of_its_own_token_is_no_part_of_an_answer():
    found = windows_of([asking("the cat  sat on mats", ("  sat ", 7))], "bytes")
    first, last = found.labels[0]
    assert (row(found, 0)[first], row(found, 0, "char_end_T")[last]) == (8, 12)


@settings(max_examples=40)
@given(CONTEXTS, st.sampled_from(KINDS), st.integers(20, 60), st.data())
def test_windows_hold_every_token_of_the_context_and_overlap_by_the_stride(
    words, kind, max_length, data
):
    stride = data.draw(st.integers(0, max_length - max_length // 2 - 5))
    context = " ".join(words)
    found = windows_of([asking(context)], kind, max_length=max_length, stride=stride)
    whole = tokenizer_of(kind)(
        context, add_special_tokens=False, return_offsets_mapping=True, verbose=False
    )
    assert found.lengths.max() <= max_length
    ids, chars = [], []
    for i in range(len(found)):
        begin = row(found, i)
        of_context = [at for at, value in enumerate(begin) if value >= 0]
        shared = stride if i else 0
        assert ids[len(ids) - shared :] == [row(found, i, "ids")[at] for at in of_context[:shared]]
        ids += [row(found, i, "ids")[at] for at in of_context[shared:]]
        chars += [(begin[at], row(found, i, "char_end_T")[at]) for at in of_context[shared:]]
    assert (ids, chars) == (whole["input_ids"], [tuple(pair) for pair in whole["offset_mapping"]])


LONG = " ".join(f"cat ran {i}" for i in range(60))


@pytest.mark.parametrize("kind", KINDS)
def test_across_a_border_only_windows_that_hold_the_whole_answer_are_labelled(kind):
    examples = [asking(LONG, f"ran {i} cat") for i in range(59)]
    found = windows_of(examples, kind, max_length=60, stride=20)
    assert len(found) > 2 * len(examples)
    assert found.truncated == len(examples)
    assert answered(examples, kind, max_length=60, stride=20) == [e.label[0].text for e in examples]
    parts = 0
    for i, (first, last) in enumerate(found.labels):
        answer = examples[found.example[i]].label[0]
        span = range(answer.start, answer.start + len(answer.text))
        held = [
            c
            for b, e in zip(row(found, i), row(found, i, "char_end_T"), strict=True)
            for c in range(b, e)
        ]
        assert (first != found.cls[i]) == (
            len([c for c in span if c in held or LONG[c] == " "]) == len(span)
        )
        assert (first == found.cls[i]) == (last == found.cls[i])
        parts += 0 < len(set(span) & set(held)) < len(answer.text) - 2
    assert parts, "no border cuts an answer"


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_classification_question_context(kind):
    tokenizer = tokenizer_of(kind)
    found = windows_of([asking("the cat ran", "cat", question="  \n who ran")], kind)
    assert row(found, 0, "ids") == tokenizer("who ran", "the cat ran")["input_ids"]
    types = tokenizer("who ran", "the cat ran", return_token_type_ids=True)["token_type_ids"]
    assert (found.types_T.tolist(), set(types), found.cls.tolist()) == (types, {0, 1}, [0])
    assert found.truncated == 0
    assert windows_of([asking("the cat ran", "cat")], kind, token_types=False).types_T is None


def test_the_classification_token_is_found_where_it_stands():
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer_of("word pieces").backend_tokenizer, **SPECIAL
    )
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        pair="$A:0 [SEP]:0 $B:1 [SEP]:1 [CLS]:1",
        single="$A [SEP] [CLS]",
        special_tokens=[(n, tokenizer.convert_tokens_to_ids(n)) for n in ("[CLS]", "[SEP]")],
    )
    examples = [asking("the [CLS] cat ran", question="[CLS] who")]
    examples.append(asking("the cat"))
    found = windows(examples, tokenizer, max_length=60, stride=10, token_types=True)
    assert found.cls.tolist() == (found.lengths - 1).tolist()
    assert found.labels.tolist() == [[place, place] for place in found.cls]
    assert found.by_length().cls.tolist() == sorted(found.cls)
    assert sorted(found.cls) != found.cls.tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("question", ["who ran " * 50, "🌍👩‍🚀" * 60, "q" * 300])
def test_a_question_that_is_too_long_is_cut(kind, question):
    examples = [asking(LONG, "ran 7 cat", question=question), asking(LONG, "ran 7 cat")]
    found = windows_of(examples, kind, max_length=60, stride=20)
    cut = row(found, 0, "ids")[: row(found, 0).index(next(v for v in row(found, 0) if v >= 0))]
    specials = 2 if kind == "word pieces" else 3
    assert 1 <= len(cut) - specials <= 30
    assert cut[1:-specials] == tokenizer_of(kind)(question)["input_ids"][1 : len(cut) - specials]
    assert [d.text for d in decode_answers(found, one_hot(found), examples)] == ["ran 7 cat"] * 2


@pytest.mark.parametrize(
    ("length", "stride", "hint"), [(40, 20, "0 to 16"), (6, 0, "nothing is left"), (60, -1, "0 to")]
)
def test_a_stride_that_leaves_no_room_is_refused(length, stride, hint):
    with pytest.raises(UsageError, match=hint):
        windows_of([asking(LONG)], max_length=length, stride=stride)


def test_a_tokenizer_without_offsets_is_refused():
    with pytest.raises(UsageError, match="CanineTokenizer"):
        windows([asking(LONG)], CanineTokenizer(), max_length=60, stride=20, token_types=True)


MISPLACED = [
    (("cat", 5), "f.jsonl:q: answer 'cat' is not at character 5 of its context"),
    (("dog", 4), "f.jsonl:q: answer 'dog' is not at character 4 of its context"),
    (("cat", -7), "f.jsonl:q: answer 'cat' is not at character -7 of its context"),
    (("cat", 400), "f.jsonl:q: answer 'cat' is not at character 400 of its context"),
    ((" ", 3), "f.jsonl:q: an answer is empty; give an empty list if the question has no answer"),
]


@pytest.mark.parametrize(("answer", "line"), MISPLACED)
def test_answers_that_are_not_in_their_place_are_listed(answer, line):
    fine, wrong = asking("the cat ran", "cat", name="p"), asking("the cat ran", answer)
    unlabelled = Example("f.jsonl:9", "9", fine.texts, None)
    assert check_answers([fine, wrong, asking("the cat"), unlabelled]) == [line]
    found = windows_of([fine, wrong])
    assert found.labels[1].tolist() == [0, 0]
    assert found.labels[0, 0] > 0


def test_each_gold_answer_is_checked():
    line = "f.jsonl:q: answer 'ran' is not at character 7 of its context"
    assert check_answers([asking("the cat ran", "cat", ("ran", 7))]) == [line]


def by_loops(windows, logits, examples, best, max_answer_tokens) -> list[Decoded]:
    """As the reference scripts do it: every candidate pair on its own, then the best of the
    list."""
    found = []
    for number, example in enumerate(examples):
        candidates, nulls = [], []
        for i in range(len(windows)):
            if windows.example[i] != number:
                continue
            begin, end = row(windows, i), row(windows, i, "char_end_T")
            starts, ends = (
                [float(logits[i][t][side]) for t in range(len(begin))] for side in (0, 1)
            )
            nulls.append(starts[0] + ends[0])
            for s in sorted(range(len(begin)), key=lambda t: starts[t], reverse=True)[:best]:
                for e in sorted(range(len(begin)), key=lambda t: ends[t], reverse=True)[:best]:
                    if begin[s] < 0 or begin[e] < 0 or e < s or e - s + 1 > max_answer_tokens:
                        continue
                    candidates.append(
                        (starts[s] + ends[e], example.texts[1][begin[s] : end[e]].strip())
                    )
        score, text = max(candidates, default=(float("-inf"), ""))
        no_answer = min(nulls) - score
        found.append(Decoded(example.id, text, no_answer, score))
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("best", "max_answer_tokens"), [(20, 30), (1, 30), (5, 2), (1000, 1)])
def test_decoding_agrees_with_loops(kind, best, max_answer_tokens):
    examples = questions.mixed()
    found = windows_of(examples, kind, max_length=50, stride=16)
    logits = random_logits(found, seed=best)
    asked = {"best": best, "max_answer_tokens": max_answer_tokens}
    for number, values in zip(found.example, logits, strict=True):
        values[0] += 4 * (number % 2)
    expected = by_loops(found, logits, examples, **asked)
    assert decode_answers(found, logits, examples, **asked) == expected
    assert 0 < sum(d.no_answer > 0 for d in expected) < len(expected)


def test_a_tie_is_an_answer_and_the_first_one():
    examples = [asking("the cat ran in Wien " * 12)]
    found = windows_of(examples)
    (decoded,) = decode_answers(
        found, [np.zeros((found.lengths[0], 2), dtype=np.float32)], examples
    )
    assert (decoded.no_answer, decoded.text) == (0.0, "the")


def test_without_a_span_there_is_no_text():
    empty, reversed_only = asking(""), asking("the cat ran")
    found = windows_of([empty, reversed_only])
    logits = [np.zeros((length, 2), dtype=np.float32) for length in found.lengths]
    begin = next(i for i, value in enumerate(row(found, 1)) if value >= 0)
    logits[1][begin + 2, 0] = logits[1][begin, 1] = 9.0
    for decoded in decode_answers(found, logits, [empty, reversed_only], best=1):
        assert (decoded.text, decoded.score, decoded.no_answer) == ("", -np.inf, np.inf)


PEOPLE_ANSWERS = ["Anna Berg", "Amsterdam", "New York", "Monday", "Carlos Ruiz"]


def decoded_gold(context, answers, tokenizer):
    """The answers that perfect logits give."""
    examples = [
        Example("r", str(n), ("Who ?", context), (Answer(text, context.index(text)),))
        for n, text in enumerate(answers)
    ]
    found = windows(examples, tokenizer, max_length=32, stride=8, token_types=False)
    logits = []
    for length, (first, last) in zip(found.lengths, found.labels, strict=True):
        logits.append(np.full((length, 2), -5.0))
        logits[-1][first, 0] = logits[-1][last, 1] = 5.0
    return [each.text for each in decode_answers(found, logits, examples)]


@pytest.mark.parametrize("before", [ROBBERT, pre_tokenizers.ByteLevel(add_prefix_space=False)])
def test_offsets_that_miss_letters_do_not_cut_answers(before):
    tokenizer = with_pre_tokenizer(before)
    assert decoded_gold(PEOPLE, PEOPLE_ANSWERS, tokenizer) == PEOPLE_ANSWERS


def test_a_tokenizer_that_loses_letters_of_the_answers_is_refused():
    # No token stands for "York".
    removed = pre_tokenizers.Split(Regex(" York "), "removed")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = with_pre_tokenizer(pre_tokenizers.Sequence([removed, byte_level]))
    with pytest.raises(UsageError, match=r"loses letters of 1 of .*'New York' is decoded as 'New'"):
        decoded_gold(PEOPLE, PEOPLE_ANSWERS, tokenizer)
