"""What is saved is what was measured: the directory that a verb leaves, loaded as its card says by
libraries that know nothing of kdcli, scores what kdcli reported."""

import functools
import json
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import own_files
import pytest
import torch
from encoders import on_disk, tiny_config, tiny_encoder, tiny_tokenizer
from onnxruntime import InferenceSession
from scipy.special import expit, softmax
from scipy.stats import pearsonr, spearmanr
from sentence_transformers import CrossEncoder
from sklearn.metrics import f1_score
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForSequenceClassification, AutoTokenizer, pipeline
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER

from kdcli.deploy.predict import Predictor
from kdcli.models.embedding_format import EmbeddingFormat

FIRST_OR_SECOND = "w50"
FILLER = "w40 " * 30
OWN = ("--task", "own", "--data")
SMALL = ("--max-steps", 8, "--batch-size", 16, "--dtype", "fp32", "--set", "measure.latency=false")
VERBS = {
    "distill": ("--to", "1x32", *SMALL),
    "prune": ("--method", "smp", "--sparsity", 0.5, *SMALL),
}
LENGTH_FILE, GENERAL_FILE = "sentence_bert_config.json", "config_sentence_transformers.json"
SIGMOID = "torch.nn.modules.activation.Sigmoid"


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
    # tokenizer.json alone has types for the second text, which the file does not ask for.
    data = ("--data", file, "--set", "data.columns.text=premise")
    own_files.succeeds("export", folder, "--format", "onnx", *data, "-o", tmp_path / "file")
    alone = Tokenizer.from_file(str(tmp_path / "file" / "tokenizer.json"))
    alone.enable_padding()
    batch = alone.encode_batch(list(zip(*texts, strict=True)))
    assert any(any(each.type_ids) for each in batch)
    arrays = {"input_ids": [e.ids for e in batch]}
    arrays |= {"attention_mask": [e.attention_mask for e in batch]}
    arrays |= {"token_type_ids": [e.type_ids for e in batch]}
    session = InferenceSession(tmp_path / "file" / "onnx" / "model.onnx")
    feed = {each.name: np.array(arrays[each.name]) for each in session.get_inputs()}
    assert [names[n] for n in session.run(None, feed)[0].argmax(1)] == answers


def long_texts(n, seed, words):
    rng = random.Random(seed)
    return [" ".join(f"w{rng.randrange(50)}" for _ in range(words)) for _ in range(n)]


def published_classifier(folder, length=150, **changes):
    """A classifier with random weights whose tokenizer reads `length` tokens."""
    torch.manual_seed(0)
    config = tiny_config("bert", initializer_range=0.3, **changes)
    model = AutoModelForSequenceClassification.from_config(config).eval()
    tokenizer = pair_tokenizer(model_max_length=length)
    texts = long_texts(40, 7, 145)
    with torch.no_grad():
        logits = model(**tokenizer(texts, padding=True, return_tensors="pt")).logits
        model.classifier.bias -= logits.median(0).values
    return on_disk(model, folder, tokenizer)


@pytest.mark.parametrize("length", [150, VERY_LARGE_INTEGER])
def test_long_texts_are_read_as_far_as_tokenizer_and_positions_say(tmp_path, cache, length):
    names, texts = {0: "one", 1: "two"}, long_texts(60, 1, 145)
    folder = published_classifier(tmp_path / "long", length, id2label=names)
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
    assert AutoTokenizer.from_pretrained(student).model_max_length == min(length, 160)


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


def change(folder, name, **keys):
    """Set keys of a JSON file."""
    file = folder / name
    before = json.loads(file.read_text("utf-8")) if file.exists() else {}
    file.write_text(json.dumps(before | keys), "utf-8")


def test_a_reranker_uses_the_settings_of_its_files_or_is_refused(tmp_path, cache):
    base, folder = published_classifier(tmp_path / "base", num_labels=1), tmp_path / "reranker"
    # The classes that `CrossEncoder` applies, the latest of which counts.
    change(base, "config.json", sentence_transformers={"activation_fn": SIGMOID})
    CrossEncoder(str(base), activation_fn=torch.nn.Identity(), device="cpu").save(str(folder))
    query, passages = "w1 w2", long_texts(6, 3, 100)
    pairs = [(query, passage) for passage in passages]
    change(folder, LENGTH_FILE, processing_kwargs={"text": {"max_length": 40}})
    ours, theirs = Predictor.open(str(folder)), CrossEncoder(str(folder), device="cpu")
    np.testing.assert_allclose(ours.predict(pairs), theirs.predict(pairs), atol=1e-5)
    own_files.succeeds("export", folder, "-o", tmp_path / "file")
    of_file = Predictor.open(str(tmp_path / "file")).predict(pairs)
    np.testing.assert_allclose(of_file, theirs.predict(pairs), atol=1e-4)
    (tmp_path / "few.txt").write_text("w1 w2 w3 w4", "utf-8")
    own_files.succeeds("trim", folder, "--data", tmp_path / "few.txt", "-o", tmp_path / "few")
    trimmed, few = CrossEncoder(str(tmp_path / "few"), device="cpu"), [("w1 w2", "w3 w4 w2 " * 30)]
    np.testing.assert_allclose(trimmed.predict(few), theirs.predict(few), atol=1e-5)
    lists = [{"query": query, "passages": passages, "labels": [1, 0, 0, 0, 0, 0]}]
    file = own_files.write(tmp_path / "lists.jsonl", lists)
    evaluate = ("evaluate", folder, "--task", "rerank", "--data", file)
    for name, keys, message in (
        (LENGTH_FILE, {"query_length": 6}, "cannot compute query_length=6"),
        (GENERAL_FILE, {"pooling": "cls"}, "has the setting 'pooling'"),
        (GENERAL_FILE, {"prompts": {"q": "w3 "}, "default_prompt_name": "q"}, "puts a prompt"),
    ):
        before = (folder / name).read_text("utf-8")
        change(folder, name, **keys)
        assert message in own_files.refused(tmp_path, *evaluate)
        (folder / name).write_text(before, "utf-8")


def test_a_detector_with_one_output_keeps_its_label_and_probability(tmp_path, cache):
    folder = own_files.headed(tmp_path / "detector", ("SPAM",))
    texts = long_texts(60, 5, 8)
    file = own_files.write(tmp_path / "texts.jsonl", [{"text": text} for text in texts])
    for verb, options in (("distill", ("--to", "2x32", *SMALL)), ("prune", VERBS["prune"])):
        out = tmp_path / verb
        own_files.succeeds(verb, folder, *OWN, file, *options, "-o", out)
        answers = pipeline("text-classification", model=str(out), device="cpu")(texts)
        assert {answer["label"] for answer in answers} == {"SPAM"}
        assert all(0 < answer["score"] < 1 for answer in answers)


@pytest.mark.parametrize("verb", ["finetune", "export"])
def test_a_token_that_the_model_lacks_is_refused_by_name(tmp_path, verb):
    folder = own_files.headed(tmp_path / "model", ("brisk", "calm"))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<url>", "<user>"])
    tokenizer.save_pretrained(folder)
    file = own_files.write(tmp_path / "rows.jsonl", own_files.rows("class", 40))
    data = ("--format", "onnx") if verb == "export" else (*OWN, file)
    message = own_files.refused(tmp_path, verb, folder, *data)
    assert "has 66 tokens, but the model has only 64: it lacks '<url>', '<user>'" in message


@pytest.mark.parametrize("shape", ["2x32", "static"])
def test_a_score_with_a_name_keeps_it(tmp_path, cache, shape):
    folder = own_files.headed(tmp_path / "model", ("helpfulness",), problem_type="regression")
    rows = [{"text": text} for text in long_texts(60, 5, 8)]
    file = own_files.write(tmp_path / "texts.jsonl", rows)
    out = tmp_path / "out"
    own_files.succeeds("distill", folder, *OWN, file, "--to", shape, *SMALL, "-o", out)
    config = json.loads((out / "config.json").read_text("utf-8"))
    assert config["id2label"] == {"0": "helpfulness"}
    assert config["problem_type"] == "regression"


NUMBERED = {
    "from one": ({"1": "calm", "2": "brisk"}, {}, "the 2 outputs from 0, got 1, 2"),
    "a gap": ({"0": "calm", "2": "brisk"}, {}, "the 2 outputs from 0, got 0, 2"),
    "a word": ({"0": "calm", "x": "brisk"}, {}, "the 2 outputs from 0, got 0, x"),
    "no names": (
        {},
        {"calm": 1, "brisk": 0},
        'add it to a copy of the model: "id2label": {"1": "calm", "0": "brisk"}',
    ),
    "other numbers": (
        {"0": "calm", "1": "brisk"},
        {"calm": 1, "brisk": 0},
        "class 'calm' is number 0 in 'id2label', but 1 in 'label2id'",
    ),
}


@pytest.mark.parametrize(("names", "numbers", "message"), NUMBERED.values(), ids=NUMBERED)
def test_labels_that_are_not_numbered_from_zero_are_refused(tmp_path, names, numbers, message):
    folder = own_files.headed(tmp_path / "model", ("brisk", "calm"))
    change(folder, "config.json", id2label=names, label2id=numbers)
    file = own_files.write(tmp_path / "rows.jsonl", own_files.rows("class", 40))
    found = own_files.refused(tmp_path, "finetune", folder, *OWN, file)
    assert message in found


@pytest.fixture(scope="module")
def stranger():
    """`stranger(how, folder, inputs)` answers with a model in a process without kdcli."""
    program = [sys.executable, str(Path(__file__).with_name("stranger.py"))]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(program, text=True, **pipes) as process:

        def ask(how, folder, inputs):
            request = {"how": how, "folder": str(folder), "inputs": inputs}
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        yield ask
        process.stdin.close()


def labels_of(rows):
    return [row["label"] for row in rows]


def most_probable(answers):
    return [max(answer, key=answer.get) for answer in answers]


def accuracy(answers, rows):
    return np.mean(np.array(most_probable(answers)) == labels_of(rows))


def micro_f1(answers, rows):
    chosen = [[answer[name] > 0.5 for name in own_files.NAMES] for answer in answers]
    true = [[name in label for name in own_files.NAMES] for label in labels_of(rows)]
    return f1_score(true, chosen, average="micro")


def correlation(answers, rows):
    return pearsonr([answer["score"] for answer in answers], labels_of(rows)).statistic


def tag_f1(answers, rows):
    # Every location is one word, so that entities are words.
    true = [tag for row in rows for tag in row["ner_tags"]]
    return f1_score(true, [tag for row in answers for tag in row], pos_label="B-LOC")


def exact(answers, rows):
    return np.mean([a in row["answers"]["text"] for a, row in zip(answers, rows, strict=True)])


def rank_correlation(vectors, rows):
    first, second = np.array(vectors[0]).reshape(2, len(rows), -1, order="F")
    lengths = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    return spearmanr((first * second).sum(1) / lengths, labels_of(rows)).statistic


def reciprocal_rank(scores, rows):
    ranks = []
    for row in rows:
        of_query, scores = scores[: len(row["passages"])], scores[len(row["passages"]) :]
        ranks.append(sum(score >= of_query[0] for score in of_query))
    return np.mean([1 / rank for rank in ranks])


def long_rows(count, seed):
    """Rows that say their class only within the first 24 tokens, which the models read."""
    return [
        row | {"text": f"{row['text']} {FILLER}"} for row in own_files.rows("class", count, seed)
    ]


def close_rows(count, seed):
    rng = random.Random(seed)
    words = [[f"w{rng.randrange(50)}" for _ in range(12)] for _ in range(count)]
    return [
        {
            "sentence1": " ".join(of[:8]),
            "sentence2": " ".join(of[4 - n % 5 :]),
            "label": n % 5 + 0.5,
        }
        for n, of in enumerate(words)
    ]


def ranked_rows(count, seed):
    """Queries with a passage that holds both of their words, and three that hold at most one."""
    rows = []
    for query in long_texts(count, seed, 2):
        first, second = query.split()
        passages = [f"{second} w57 {first}", f"{first} w57", f"w58 {second}", "w57 w58"]
        rows.append({"query": query, "passages": passages, "labels": [1, 0, 0, 0]})
    return rows


def spoiled(kind):
    return lambda count, seed: own_files.spoil(own_files.rows(kind, count, seed), kind)


def columns(*names):
    return lambda row: [row[names[0]] if len(names) == 1 else [row[name] for name in names]]


@dataclass(frozen=True)
class Kind:
    """What a stranger is asked about a row, how it answers, and the metric of its answers."""

    how: str
    inputs: Callable[[dict], list]
    metric: Callable[[Any, list[dict]], float]
    name: str
    rows: Callable[[int, int], list[dict]]
    task: str = "own"


KINDS = {
    "class": Kind("classify", columns("text"), accuracy, "accuracy", spoiled("class")),
    "long": Kind("classify", columns("text"), accuracy, "accuracy", long_rows),
    "pair": Kind(
        "classify", columns("premise", "hypothesis"), accuracy, "accuracy", spoiled("pair")
    ),
    "multi": Kind("classify", columns("text"), micro_f1, "micro_f1", spoiled("multi")),
    "score": Kind("classify", columns("text"), correlation, "pearson", spoiled("score")),
    "tokens": Kind("tag", columns("tokens"), tag_f1, "f1", spoiled("tokens")),
    "span": Kind("answer", columns("question", "context"), exact, "exact", spoiled("span")),
    "rank": Kind(
        "rank",
        lambda row: [[row["query"], passage] for passage in row["passages"]],
        reciprocal_rank,
        "mrr@10",
        ranked_rows,
        "rerank",
    ),
    "vectors": Kind(
        "encode",
        lambda row: [row["sentence1"], row["sentence2"]],
        rank_correlation,
        "spearman",
        close_rows,
    ),
}


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """Kind -> its data, and a model of a plain tokenizer that `finetune` trained on them.

    The embedding model is one that sentence-transformers saved in its old layout."""

    @functools.cache
    def tune(name):
        kind, folder = KINDS[name], tmp_path_factory.mktemp(name)
        tokenizer = pair_tokenizer()
        encoder = on_disk(tiny_encoder("bert", initializer_range=0.1), folder / "base", tokenizer)
        own_files.write(folder / "data" / "train.jsonl", kind.rows(128, 0))
        own_files.write(folder / "data" / "validation.jsonl", kind.rows(48, 1))
        data, out = ("--task", kind.task, "--data", folder / "data"), folder / "tuned"
        if name == "vectors":
            own_files.embedder(out, EmbeddingFormat("cls", max_length=9), base=encoder)
            in_old_layout(out)
        else:
            own_files.succeeds("finetune", encoder, *data, *own_files.QUICK, "-o", out)
        return data, out

    return tune


def in_old_layout(folder):
    """Put the encoder into a directory of its own, with its length in a file of an old name."""
    modules = json.loads((folder / "modules.json").read_text("utf-8"))
    modules[0]["path"] = "0_Transformer"
    (folder / "modules.json").write_text(json.dumps(modules), "utf-8")
    inside = folder / "0_Transformer"
    inside.mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).rename(inside / name)
    (folder / LENGTH_FILE).rename(inside / "sentence_roberta_config.json")


def outputs_as_answers(outputs, folder):
    """Name the logits that ONNX Runtime or a table computed, as a pipeline would."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    names = list(config["id2label"].values())
    if config.get("problem_type") == "multi_label_classification":
        outputs = expit(outputs)
    elif len(names) > 1:
        outputs = softmax(outputs, axis=1)
    return [dict(zip(names, row, strict=True)) for row in outputs]


def compare(stranger, name, data, folder, how=None):
    """Compare what `evaluate` measures with the score of a stranger's answers."""
    kind, judged = KINDS[name], folder.with_name(f"{folder.name}-judged")
    own_files.succeeds("evaluate", folder, *data, "-o", judged)
    measured = own_files.report_of(judged).evaluations[0].metrics
    rows = own_files.lines_of(data[-1] / "validation.jsonl")
    inputs = [given for row in rows for given in kind.inputs(row)]
    answers = stranger(how or kind.how, folder, inputs)
    if how is not None and name in ("class", "pair", "multi", "score"):
        outputs = answers[0] if how == "encode" else answers
        answers = outputs_as_answers(np.array(outputs), folder)
    if how == "run" and name == "rank":
        # A reranker applies a sigmoid to its outputs.
        answers = expit(np.array(answers)[:, 0])
    if how == "run" and name == "vectors":
        answers = [answers]
    assert kind.metric(answers, rows) == pytest.approx(measured[kind.name], abs=1e-4)
    check_predictions(name, folder, inputs, answers)
    return measured


def check_predictions(name, folder, inputs, answers):
    """Compare the predictions of a result of kdcli with the answers of a stranger."""
    if name == "tokens":
        return  # test_predict.py compares entities.
    texts = [given if isinstance(given, str) else tuple(given) for given in inputs]
    ours = Predictor.open(str(folder)).predict(texts)
    if name == "vectors":
        np.testing.assert_allclose(ours, answers[0], atol=1e-4)
    elif name == "span":
        assert [answer.text for answer in ours] == answers
    elif name == "score":
        assert ours == pytest.approx([answer["score"] for answer in answers], abs=1e-4)
    elif name == "rank":
        assert ours == pytest.approx(answers, abs=1e-4)
    else:
        for prediction, answer in zip(ours, answers, strict=True):
            assert prediction.scores == pytest.approx(answer, abs=1e-4)


@pytest.mark.parametrize("name", KINDS)
def test_a_tuned_model_scores_the_same_elsewhere(tuned, stranger, name):
    data, out = tuned(name)
    measured = compare(stranger, name, data, out)
    if name == "vectors":
        return
    # It learned something, and `finetune` reported what `evaluate` reports.
    report = own_files.report_of(out)
    assert report.evaluations[0].metrics == pytest.approx(measured, abs=1e-6)
    assert 0.5 < measured[KINDS[name].name] <= 1
    first, *_, last = own_files.log_of(out)
    assert last["held_out"]["loss"] < first["held_out"]["loss"]


SHORT = ("--set", "data.max_length=16", "--set", "embedding.rows=80")
UNSCORED = (*SHORT, "--set", "eval.tasks=[]")
OF_VECTORS = {
    "distill": UNSCORED,
    "static": UNSCORED,
    "prune": ("--task", "embedding", *SHORT),
}
# Other libraries than the ones of the model's kind.
ALONE = {"static": "encode", "export": "run", "compress": "run"}
PRUNED = ("--method", "smp", "--sparsity", 0.5)
LABELLED = ("class", "pair", "multi", "score", "tokens", "span")
PLAN = {
    "shapes": "[1x32]",
    "backends": "[onnx]",
    "prune": "null",
    "trim_from": 1.0,
    "distill": "{train: {max_steps: 8, batch_size: 16}}",
}
COMPRESSED = ("compress", "--max-drop", 100, "--set", "measure.min_seconds=0.0")
COMPRESSED += tuple(
    word for key, value in PLAN.items() for word in ("--set", f"plan.{key}={value}")
)
# A verb and its options, the kinds of its models, and where they are.
MADE = {
    "distill": (("distill", "--to", "1x32", *SMALL), KINDS, "."),
    "static": (
        ("distill", "--to", "static:8", *SMALL),
        ("class", "multi", "score", "vectors"),
        ".",
    ),
    "prune": (("prune", *PRUNED, *SMALL), KINDS, "."),
    "cotrain": (("cotrain", "1x32", *SMALL, "--set", "data.stride=4"), LABELLED, "student"),
    "compress": (COMPRESSED, ("class",), "best"),
    "trim": (("trim",), ("class", "tokens", "vectors"), "."),
    "adapt": (("adapt",), ("vectors",), "."),
    "export": (("export", "--format", "onnx"), ("class", "rank", "vectors"), "."),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verb", "name"), [(verb, name) for verb, (_, names, _) in MADE.items() for name in names]
)
def test_a_smaller_model_scores_the_same_elsewhere(tuned, stranger, tmp_path, verb, name):
    data, model = tuned(name)
    (command, *options), _, place = MADE[verb]
    given, out = data, tmp_path / "out"
    if name == "vectors":
        texts = tmp_path / "texts.txt"
        rows = own_files.lines_of(data[-1] / "train.jsonl")
        texts.write_text("\n".join(row["sentence1"] for row in rows), "utf-8")
        given = ("--data", texts, *OF_VECTORS.get(verb, ()))
        if verb == "adapt":
            vectors = Predictor.open(str(model)).predict([row["sentence1"] for row in rows])
            np.save(tmp_path / "index.npy", np.tanh(3 * np.asarray(vectors))[:, ::-1])
            given += ("--index", tmp_path / "index.npy")
    elif verb in ("trim", "export"):
        given = data[2:] if verb == "trim" else ()
    own_files.succeeds(command, model, *options, *given, "-o", out)
    measured = compare(stranger, name, data, out / place, ALONE.get(verb))
    if verb not in ("trim", "export", "compress") and name != "vectors":
        reported = {e.model: e.metrics for e in own_files.report_of(out).evaluations}
        own = reported.get("student") or reported["masked"]
        assert own == pytest.approx(measured, abs=1e-6)


@pytest.mark.slow
def test_the_forms_of_a_mask_score_the_same_elsewhere(tuned, stranger, tmp_path):
    data, model = tuned("class")
    out, applied = tmp_path / "out", tmp_path / "applied"
    own_files.succeeds("prune", model, *data, *PRUNED, *SMALL, "-o", out)
    own_files.succeeds("mask", "apply", out / "mask" / "mask.safetensors", "-o", applied)
    expected = compare(stranger, "class", data, out)
    for folder in (applied, out / "compact"):
        assert compare(stranger, "class", data, folder) == pytest.approx(expected, abs=1e-6)
