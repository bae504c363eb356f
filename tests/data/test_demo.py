"""The embedded language, its tasks, and its teacher, which `tools/make_demo.py` makes of the text
generated now."""

import hashlib
import importlib.util
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from kdcli.data.demo import SENTENCES, TASKS, demo_documents, demo_sentences, demo_task
from kdcli.metrics.probe import probe_demo
from kdcli.models.load import load_encoder, location
from kdcli.workloads.detect import known_task

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
TEACHER = Path(location("demo"))
TEXT = "9bee27348c98"


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("make_demo", ROOT / "tools" / "make_demo.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_text_is_the_one_the_teacher_was_trained_on():
    """A change of the generated language needs a new teacher: run tools/make_demo.py, then change
    TEXT."""
    assert hashlib.sha256("\n".join(demo_documents("train")).encode()).hexdigest().startswith(TEXT)


def test_a_tokenizer_that_is_there_is_kept(tool, tmp_path):
    """The trainer numbers the pieces differently each time; weights trained with other numbers
    would be worthless."""
    (tmp_path / "tokenizer.json").write_bytes((TEACHER / "tokenizer.json").read_bytes())
    kept = tool.make_tokenizer(tmp_path).get_vocab()
    assert kept == json.loads((TEACHER / "tokenizer.json").read_text("utf-8"))["model"]["vocab"]


def test_the_package_holds_what_the_tool_writes(tool):
    assert (TEACHER / "README.md").read_text("utf-8") == tool.CARD
    assert AutoConfig.from_pretrained(TEACHER).num_hidden_layers == 4
    assert sum(f.stat().st_size for f in TEACHER.iterdir()) <= 4 << 20


SHARED = {
    *["the", "a", "is", "are", "in", "near", "because", "it", "they", "when", "and", "say", "that"],
    ",",
    ".",
}


@pytest.mark.parametrize("task", TASKS)
def test_train_and_validation_share_no_content_word(task):
    def words(split):
        found = {word for e in demo_task(task, split) for word in e.text.split()} - SHARED
        return found | {w.removesuffix("s") for w in found}

    shared = words("train") & words("validation")
    # Dropping a plural's s may by chance give another word.
    assert len(shared) < 5
    labels = [e.label for e in demo_task(task, "validation")]
    assert max(labels.count(x) for x in set(labels)) < 0.56 * len(labels)


def test_the_teacher_has_learnt_the_language(demo_examples):
    demo_examples(400)
    teacher = load_encoder("demo")
    found = probe_demo(teacher.model, teacher.tokenizer)
    assert found["demo-topic"]["accuracy"] > 0.85
    assert found["demo-order"]["accuracy"] > 0.60
    assert found["demo-coherence"]["accuracy"] > 0.60


def test_the_sentences_without_labels_are_always_the_same():
    text = "".join(demo_sentences("train"))
    assert hashlib.sha256(text.encode()).hexdigest().startswith("af855328a5d2")
    assert sum(1 for _ in demo_sentences("validation")) == SENTENCES["validation"]


def test_the_embedded_classifier_tells_topics_apart_and_counts_as_published():
    assert known_task("demo-classifier", "demo") == "own"
    examples = demo_task("demo-topic", "validation")[:200]
    folder = location("demo-classifier")
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    batch = tokenizer([e.text for e in examples], padding=True, return_tensors="pt")
    with torch.no_grad():
        predicted = model(**batch).logits.argmax(-1).tolist()
    right = sum(p == e.label for p, e in zip(predicted, examples, strict=True))
    assert right >= 195
