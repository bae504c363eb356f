"""Metrics of generated texts: as sacrebleu and rouge-score give them for a whole set, on any choice
of examples."""

import subprocess
import sys

import numpy as np
import pytest
from rouge_score.rouge_scorer import RougeScorer
from sacrebleu.metrics import BLEU

from kdcli.errors import MachineError
from kdcli.metrics import scorer
from kdcli.metrics.bootstrap import paired_bootstrap
from kdcli.metrics.generated_texts import require_libraries
from kdcli.types import Task

TASK = Task(
    "own",
    "text",
    ("source",),
    ("bleu", "rougeL", "rouge1", "rouge2", "rougeLsum", "exact"),
    label="target",
)
TARGETS = [
    "Which team won the cup in 2015 ?",
    "Who wrote the letters from the front?",
    "When was the bridge over the river finished?",
    "two lines\nof a summary",
]
FOUND = [
    "which team won the cup in 2015 ?",
    "who wrote letters?",
    "the bridge",
    "of a summary two lines",
]


@pytest.mark.parametrize("chosen", [[0, 1, 2, 3], [1], [2, 2, 0], [3, 1, 1, 1, 0]])
def test_any_choice_of_examples_scores_as_the_libraries_score_it(chosen):
    found, targets = [FOUND[i] for i in chosen], [TARGETS[i] for i in chosen]
    scores = scorer(TASK, FOUND, TARGETS)(np.array(chosen))
    assert scores["bleu"] == pytest.approx(
        BLEU(lowercase=True).corpus_score(found, [targets]).score / 100
    )
    rouge = RougeScorer(["rouge1", "rouge2", "rougeL", "rougeLsum"], use_stemmer=True)
    of_pairs = [rouge.score(target, text) for text, target in zip(found, targets, strict=True)]
    for name in ("rouge1", "rouge2", "rougeL", "rougeLsum"):
        assert scores[name] == pytest.approx(np.mean([one[name].fmeasure for one in of_pairs]))


def test_right_texts_score_one_and_nothing_scores_zero():
    assert list(scorer(TASK, TARGETS, TARGETS)(np.arange(4)).values()) == pytest.approx([1.0] * 6)
    empty = scorer(TASK, [""] * 4, TARGETS)(np.arange(4))
    assert set(empty.values()) == {0.0}


def test_spaces_do_not_count_and_case_does_for_an_exact_match():
    found = scorer(
        TASK,
        ["which  team won the cup in 2015 ?", " Who wrote the letters from the front? "],
        TARGETS[:2],
    )
    assert found(np.arange(2))["exact"] == 0.5


def test_intervals_come_from_resampled_sets():
    better, worse = scorer(TASK, TARGETS, TARGETS), scorer(TASK, FOUND, TARGETS)
    difference, low, high = paired_bootstrap(better, worse, 4, resamples=50)["bleu"]
    assert (
        low
        < difference
        == pytest.approx(better(np.arange(4))["bleu"] - worse(np.arange(4))["bleu"])
    )
    assert difference < high


@pytest.mark.parametrize("module", ["sacrebleu.metrics.bleu", "rouge_score.rouge_scorer"])
def test_a_missing_library_names_the_extra(module, without):
    without(module)
    with pytest.raises(
        MachineError, match="BLEU and ROUGE need sacrebleu and rouge-score"
    ) as error:
        require_libraries()
    assert error.value.hint == "pip install rouge-score sacrebleu"


def test_scoring_adds_no_handler_that_would_repeat_every_message():
    code = (
        "import logging; from kdcli.metrics.generated_texts import rouge; "
        "rouge('a text', 'the text'); print(logging.root.handlers)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"
