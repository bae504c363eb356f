"""What is saved is what was measured: the directory that a verb leaves, loaded as its card says by
libraries that know nothing of kdcli, scores what kdcli reported."""

import random

import own_files
import pytest
import torch
from encoders import on_disk, tiny_config, tiny_encoder, tiny_tokenizer
from sentence_transformers import CrossEncoder
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline

FIRST_OR_SECOND = "w50"
OWN = ("--task", "own", "--data")


def pair_tokenizer(**settings):
    """A tokenizer that separates the texts of a pair, and does not return their types."""
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    for name, value in settings.items():
        setattr(tokenizer, name, value)
    return tokenizer


def ordered_pairs(n, seed):
    """Pairs that have one word in the first or in the second text."""
    rng = random.Random(seed)
    rows = []
    for _ in range(n):
        texts = [[f"w{rng.randrange(40)}" for _ in range(rng.randrange(2, 6))] for _ in range(2)]
        first = rng.randrange(2)
        texts[1 - first].insert(rng.randrange(2), FIRST_OR_SECOND)
        one, other = (" ".join(words) for words in texts)
        rows.append({"premise": one, "hypothesis": other, "label": ["second", "first"][first]})
    return rows


def classified(folder, rows, **settings):
    """The labels that `pipeline` gives to pairs."""
    classify = pipeline("text-classification", model=str(folder), device="cpu", **settings)
    pairs = [{"text": row["premise"], "text_pair": row["hypothesis"]} for row in rows]
    return [answer["label"] for answer in classify(pairs, batch_size=32)]


def test_a_tuned_pair_model_gets_its_token_types_from_its_tokenizer(tmp_path, cache):
    torch.manual_seed(0)
    encoder = on_disk(
        tiny_encoder("bert", initializer_range=0.1), tmp_path / "base", pair_tokenizer()
    )
    rows = ordered_pairs(200, 1)
    own_files.write(tmp_path / "data/train.jsonl", ordered_pairs(600, 0))
    own_files.write(tmp_path / "data/validation.jsonl", rows)
    data, out = tmp_path / "data", tmp_path / "tuned"
    steps = ("--max-steps", 120)
    own_files.succeeds("finetune", encoder, *OWN, data, *own_files.QUICK, *steps, "-o", out)
    answers = classified(out, rows)
    right = sum(answer == row["label"] for answer, row in zip(answers, rows, strict=True))
    accuracy = own_files.report_of(out).evaluations[0].metrics["accuracy"]
    assert accuracy > 0.9
    assert right / len(rows) == pytest.approx(accuracy)


def test_a_published_pair_model_whose_tokenizer_returns_no_types_reads_none(tmp_path, cache):
    torch.manual_seed(0)
    names = {0: "second", 1: "first"}
    config = tiny_config("bert", initializer_range=0.3, id2label=names)
    model = AutoModelForSequenceClassification.from_config(config)
    rows, tokenizer = ordered_pairs(200, 1), pair_tokenizer()
    texts = [row["premise"] for row in rows], [row["hypothesis"] for row in rows]
    with torch.no_grad():
        logits = model.eval()(**tokenizer(*texts, padding=True, return_tensors="pt")).logits
        # Both classes occur.
        model.classifier.bias -= logits.median(0).values
    folder = on_disk(model, tmp_path / "published", tokenizer)
    answers = classified(folder, rows)
    labelled = [row | {"label": answer} for row, answer in zip(rows, answers, strict=True)]
    assert len(set(answers)) == 2
    file = own_files.write(tmp_path / "rows.jsonl", labelled)
    out, quick = tmp_path / "out", ("--set", "measure.latency=false")
    own_files.succeeds("evaluate", folder, *OWN, file, *quick, "-o", out)
    assert own_files.report_of(out).evaluations[0].metrics["accuracy"] == 1.0


def long_texts(n, seed, words):
    rng = random.Random(seed)
    return [" ".join(f"w{rng.randrange(50)}" for _ in range(words)) for _ in range(n)]


def published_classifier(folder, **changes):
    """A classifier with random weights whose tokenizer reads 150 tokens."""
    torch.manual_seed(0)
    config = tiny_config("bert", initializer_range=0.3, **changes)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    tokenizer = pair_tokenizer(model_max_length=150)
    texts = long_texts(40, 7, 145)
    with torch.no_grad():
        logits = model(**tokenizer(texts, padding=True, return_tensors="pt")).logits
        model.classifier.bias -= logits.median(0).values
    return on_disk(model, folder, tokenizer)


def test_long_texts_are_read_as_far_as_the_tokenizer_says(tmp_path, cache):
    names = {0: "one", 1: "two"}
    folder, texts = published_classifier(tmp_path / "long", id2label=names), long_texts(60, 1, 145)
    classify = pipeline("text-classification", model=str(folder), device="cpu")
    answers = [each["label"] for each in classify(texts, truncation=True)]
    assert len(set(answers)) == 2
    rows = [{"text": t, "label": a} for t, a in zip(texts, answers, strict=True)]
    file, out = own_files.write(tmp_path / "rows.jsonl", rows), tmp_path / "out"
    quick = ("--set", "measure.latency=false", "-o", out)
    own_files.succeeds("evaluate", folder, *OWN, file, *quick)
    assert own_files.report_of(out).evaluations[0].metrics["accuracy"] == 1.0
    # Fewer tokens are read if asked for, and a warning says what that costs.
    cut = own_files.succeeds(
        "evaluate", folder, *OWN, file, *quick, "--overwrite", "--set", "data.max_length=32"
    )
    assert "warning: 100.0% of the examples are longer than 32 tokens" in own_files.said_by(cut)
    student = tmp_path / "student"
    untrained = ("--to", "1x32", "--max-steps", 0, "--set", "measure.latency=false", "-o", student)
    own_files.succeeds("distill", folder, *OWN, file, *untrained)
    assert AutoTokenizer.from_pretrained(student).model_max_length == 150


@pytest.mark.parametrize("length", [16, 150])
def test_a_reranker_reads_the_length_of_its_own_files(tmp_path, cache, length):
    encoder = CrossEncoder(
        str(published_classifier(tmp_path / "base", num_labels=1)), max_length=length, device="cpu"
    )
    encoder.save(str(tmp_path / "reranker"))
    lists = []
    for number, query in enumerate(long_texts(12, 2, 4)):
        passages = long_texts(6, 100 + number, 140)
        scores = encoder.predict([(query, passage) for passage in passages])
        relevant = [int(n == scores.argmax()) for n in range(len(passages))]
        lists.append({"query": query, "passages": passages, "labels": relevant})
    file, out = own_files.write(tmp_path / "lists.jsonl", lists), tmp_path / "out"
    rerank = ("--task", "rerank", "--data", file, "--set", "measure.latency=false", "-o", out)
    own_files.succeeds("evaluate", tmp_path / "reranker", *rerank)
    assert own_files.report_of(out).evaluations[0].metrics["ndcg@10"] == 1.0
