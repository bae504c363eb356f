"""The embedded language and its tasks."""

import itertools

import pytest

from kdcli.data.demo import TASKS, demo_documents, demo_task
from kdcli.metrics.probe import probe_demo
from kdcli.models.load import load_encoder

WORDS_SHARED = {
    *("the", "a", "is", "are", "in", "near", "because", "it", "they", "when", "and", "say", "that", ",", ".")
}


def test_the_text_is_always_the_same():
    once, again = (list(itertools.islice(demo_documents("train"), 5)) for _ in range(2))
    assert once == again
    assert once != list(itertools.islice(demo_documents("validation"), 5))


@pytest.mark.parametrize("task", TASKS)
def test_train_and_validation_share_no_content_word(task):
    def words(split):
        found = {word for e in demo_task(task, split) for word in e.text.split()} - WORDS_SHARED
        return found | {w.removesuffix("s") for w in found}

    shared = words("train") & words("validation")
    # Dropping a plural's s may by chance give another word.
    assert len(shared) < 5
    labels = [e.label for e in demo_task(task, "validation")]
    assert max(labels.count(x) for x in set(labels)) < 0.56 * len(labels)


@pytest.mark.slow
def test_the_teacher_has_learnt_the_language():
    teacher = load_encoder("demo")
    found = probe_demo(teacher.model, teacher.tokenizer)
    assert found["demo-topic"]["accuracy"] > 0.85
    assert found["demo-order"]["accuracy"] > 0.60
    assert found["demo-coherence"]["accuracy"] > 0.60
