"""`kdcli trim --max-drop`: the fewest tokens with which a model keeps its score."""

import random
import re

import own_files
import pytest
from own_files import kdcli, refused, report_of, said_by, succeeds, write
from transformers import AutoTokenizer


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Texts whose words are the rarer, the larger their number."""
    rng = random.Random(0)
    words = [f"w{n}" for n in range(58)]
    weights = [1 / (n + 1) for n in range(58)]
    rows = [{"text": " ".join(rng.choices(words, weights, k=6))} for _ in range(900)]
    return write(tmp_path_factory.mktemp("texts") / "texts.jsonl", rows)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    return own_files.headed(tmp_path_factory.mktemp("model") / "model", num_labels=3)


def sizes_tried(result):
    """Number of tokens -> points lost, from the log."""
    lines = re.findall(r"([\d,]+) tokens: (-?[\d.]+) points of \S+ lost", said_by(result))
    return {int(count.replace(",", "")): float(points) for count, points in lines}


def test_a_classifier_keeps_its_predictions_with_the_fewest_tokens(texts, classifier, tmp_path):
    words = ("--data", texts, "--max-drop", "8")
    result = kdcli("trim", classifier, *words, "-o", tmp_path / "out")
    tried = sizes_tried(result)
    kept = len(AutoTokenizer.from_pretrained(tmp_path / "out"))
    assert kept == min(count for count, points in tried.items() if points <= 8)
    assert kept < max(tried)
    smaller = [count for count in tried if count < kept]
    assert smaller
    assert all(tried[count] > 8 for count in smaller)
    report = report_of(tmp_path / "out")
    before, after = report.evaluations
    assert (before.model, after.model) == ("untrimmed", "trimmed")
    assert before.metrics["agreement"] == 1 > after.metrics["agreement"]
    assert 100 <= after.n <= 180  # a fifth of the rows
    lost = 100 * (1 - after.metrics["agreement"])
    assert any(f"tokens lose {lost:.2f} points of agreement" in note for note in report.notes)
    card = " ".join((tmp_path / "out" / "README.md").read_text().split())
    assert f"by keeping {kept} of its 64 tokens" in card
    smallest = f"({kept} is the smallest size tried that loses at most 8 points on the selection"
    assert smallest in card
    assert "untrimmed" in result.stdout  # the table comes before the verdict
    # The rows that chose the size are too kind to it, so other rows decide.
    assert result.exit_code == (5 if lost > 8 else 0)


def test_an_embedding_model_is_scored_by_its_vectors(texts, tmp_path):
    model = own_files.embedder(tmp_path / "model")
    words = ("--data", texts, "--max-drop", "10")
    succeeds("trim", model, *words, "-o", tmp_path / "out")
    _, after = report_of(tmp_path / "out").evaluations
    assert set(after.metrics) == {"spearman", "neighbours@10"}


def test_a_bound_that_the_training_rows_cannot_meet(classifier, tmp_path):
    # A word that only one row has is unknown to the other rows.
    usual = [f"w{n % 10} w{n // 10 % 10} w{n // 100}" for n in range(200)]
    rows = [{"text": text} for text in [*usual, *(f"w{n}" for n in range(21, 58))]]
    file = write(tmp_path / "rows.jsonl", rows)
    result = kdcli("trim", classifier, "--data", file, "--max-drop", "0", "-o", tmp_path / "out")
    assert result.exit_code == 5
    assert "tokens of the training rows lose" in said_by(result)
    assert not (tmp_path / "out").exists()


def test_no_loss_is_not_a_negative_one(texts, classifier, tmp_path):
    result = kdcli("trim", classifier, "--data", texts, "--max-drop", "0", "-o", tmp_path / "out")
    assert "-0.00" not in said_by(result) + result.stdout


def test_a_model_all_of_whose_tokens_occur_can_lose_some(texts, classifier, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    succeeds("trim", classifier, "--data", texts, "-o", first)
    result = kdcli("trim", first, "--data", texts, "--max-drop", "40", "-o", second)
    assert result.exit_code in (0, 5), result.output
    assert len(AutoTokenizer.from_pretrained(second)) < len(AutoTokenizer.from_pretrained(first))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--max-drop", "1", "--vocab-size", "20"), "both choose the number of tokens"),
        (("--task", "own"), "--task and --pooling are for --max-drop"),
        (("--max-drop", "1", "--set", "data.column=text"), "omit data.column"),
        (("--max-drop", "-1"), "max_drop"),
    ],
)
def test_a_bound_that_contradicts_other_options(texts, classifier, tmp_path, words, message):
    assert message in refused(tmp_path, "trim", classifier, "--data", texts, *words)


def test_a_bound_needs_rows_to_choose_and_to_verify(classifier, tmp_path):
    file = write(tmp_path / "few.jsonl", [{"text": f"w{n} w3"} for n in range(50)])
    message = refused(tmp_path, "trim", classifier, "--data", file, "--max-drop", "1")
    assert "has too few rows" in message


def test_a_plain_encoder_needs_a_pooling(texts, tmp_path):
    plain = own_files.encoder(tmp_path / "plain")
    message = refused(tmp_path, "trim", plain, "--data", texts, "--max-drop", "1")
    assert "has no head and no pooling" in message
    words = ("--data", texts, "--max-drop", "30", "--pooling", "mean")
    succeeds("trim", plain, *words, "-o", tmp_path / "out")
