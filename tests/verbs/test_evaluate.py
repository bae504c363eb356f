"""`kdcli evaluate` on tiny models, next to transformers: metrics, files and refusals."""

import functools
import json
import math
import shlex
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import own_files
import processes
import pytest
import torch
from encoders import on_disk, tiny_encoder
from own_files import NAMES, QUICK, lines_of, refused, report_of, said_by, write
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from kdcli.errors import GateError, UsageError
from kdcli.verbs.evaluate.run import Extras, check_recipe, check_score_gates
from kdcli.verbs.evaluate.settings import EvaluateRecipe

LABELS = tuple(sorted(NAMES))
SHARE = """
import datasets
import evaluate


class Share(evaluate.Metric):
    def _info(self):
        features = datasets.Features(
            dict.fromkeys(("predictions", "references"), datasets.Value("int64"))
        )
        text = dict.fromkeys(("description", "citation", "inputs_description"), "")
        return evaluate.MetricInfo(features=features, **text)

    def _compute(self, predictions, references):
        return {"right": sum(map(int.__eq__, predictions, references)) / len(references)}
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two models with heads of different seeds for the two classes in the data's order."""
    folder = tmp_path_factory.mktemp("models")
    return [own_files.headed(folder / f"model-{seed}", LABELS, seed=seed) for seed in (3, 5)]


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "tickets"
    write(folder / "validation.jsonl", own_files.rows("class", 60, seed=1))
    return folder


evaluate, succeeds = (
    functools.partial(of, "evaluate") for of in (own_files.kdcli, own_files.succeeds)
)


def probabilities(model, texts):
    tokenizer, stock = (
        AutoTokenizer.from_pretrained(model),
        AutoModelForSequenceClassification.from_pretrained(model),
    )
    with torch.no_grad():
        return [
            stock(**tokenizer(t, return_tensors="pt")).logits[0].softmax(-1).numpy() for t in texts
        ]


def test_what_it_says_is_what_transformers_says(models, data, tmp_path):
    out, file = tmp_path / "out", tmp_path / "deep" / "predictions.jsonl"
    result = succeeds(models[0], "--task", "own", "--data", data, "--predictions", file, "-o", out)
    assert {p.name for p in out.iterdir()} == own_files.RUN
    rows, given = lines_of(file), own_files.rows("class", 60, seed=1)
    expected = probabilities(models[0], [row["text"] for row in given])
    written = [tuple(row[key] for key in ("model", "set", "id", "texts", "label")) for row in rows]
    assert written == [
        ("model-3", "", str(i), [row["text"]], row["label"]) for i, row in enumerate(given)
    ]
    np.testing.assert_allclose([row["scores"] for row in rows], expected, atol=1e-5)
    assert [row["predicted"] for row in rows] == [LABELS[p.argmax()] for p in expected]
    (evaluation,) = report_of(out).evaluations
    pairs = [(row["label"], row["predicted"]) for row in rows]
    right = sum(a == b for a, b in pairs)
    found, of, there = pairs.count(("calm", "calm")), [b for _, b in pairs].count("calm"), 30
    assert 0 < right < 60
    assert evaluation.metrics["accuracy"] == right / 60
    assert evaluation.metrics["f1"] == pytest.approx(2 * found / (of + there))
    signs = np.array([[a == "calm", b == "calm"] for a, b in pairs], dtype=float)
    assert evaluation.metrics["matthews"] == pytest.approx(np.corrcoef(signs.T)[0, 1])
    assert evaluation.confusion.labels == list(LABELS)
    assert evaluation.confusion.counts == [[pairs.count((a, b)) for b in LABELS] for a in LABELS]
    calm = evaluation.per_class["calm"]
    assert (calm.precision, calm.recall, calm.support) == (
        pytest.approx(found / of),
        pytest.approx(found / 30),
        30,
    )
    # The worst first: those to whose label the model gives the least.
    given_to = [p[LABELS.index(row["label"])] for p, row in zip(expected, given, strict=True)]
    wrong = sorted((i for i in range(60) if pairs[i][0] != pairs[i][1]), key=lambda i: given_to[i])[
        :20
    ]
    assert sorted(m.id for m in evaluation.worst) == sorted(map(str, wrong))
    assert [m.error for m in evaluation.worst] == pytest.approx(
        [-np.log(given_to[i]) for i in wrong], abs=1e-4
    )
    assert report_of(out).cards["model-3"].bytes == (models[0] / "model.safetensors").stat().st_size
    assert "accuracy" in result.stdout


def test_a_model_reads_as_many_tokens_as_when_it_was_fine_tuned(tmp_path):
    """Rows long enough to be cut at 16 tokens, not at the task's 384."""
    data, tuned = own_files.own(tmp_path / "data", "span", n=64, judged=24), tmp_path / "tuned"
    rows = own_files.rows("span", 24, seed=1)
    long = [row | {"context": row["context"] + " w40" * 30} for row in rows]
    write(data / "validation.jsonl", long)
    encoder = own_files.encoder(tmp_path / "encoder")
    options = [*QUICK, "--max-steps", "8", "--set", "data.max_length=16"]
    own_files.succeeds("finetune", encoder, "--task", "own", "--data", data, *options, "-o", tuned)
    assert AutoTokenizer.from_pretrained(tuned).model_max_length == 16
    assert AutoTokenizer.from_pretrained(encoder).model_max_length > 16

    def evaluated(folder, *settings):
        result = succeeds(
            folder, "--task", "own", "--data", data, "--set", "data.stride=4", *settings
        )
        made = max((tmp_path / "runs").iterdir(), key=lambda path: path.stat().st_mtime)
        return report_of(made), said_by(result)

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        same, _ = evaluated(tuned)
        assert same.evaluations[0].metrics == pytest.approx(
            report_of(tuned).evaluations[0].metrics, abs=1e-6
        )
        assert "16 tokens" in same.notes[0]
        other, message = evaluated(tuned, "--set", "data.max_length=24")
        assert "using 24 tokens, as data.max_length says" in message
        assert "24 tokens" in other.notes[0]
        given, message = evaluated(tuned, "--set", "data.max_length=16")
        assert "reads rows of" not in message
        assert given.evaluations == same.evaluations
        # Another task's length says nothing of this one.
        config = json.loads((tuned / "config.json").read_text("utf-8"))
        (tuned / "config.json").write_text(json.dumps(config | {"kdcli_task": "another"}), "utf-8")
        assert "fine-tuned with" not in evaluated(tuned)[1]


def test_predictions_by_vectors_are_cosines(tmp_path):
    model = tmp_path / "model"
    on_disk(tiny_encoder("bert"), model)
    pairs = [
        {"sentence1": f"w{i % 41}", "sentence2": f"w{i % 7} w{i % 5}", "label": i / 20 + 0.01}
        for i in range(30)
    ]
    data, file = write(tmp_path / "pairs.jsonl", pairs), tmp_path / "predictions.jsonl"
    settings = ["--task", "own", "--data", data, "--pooling", "mean"]
    succeeds(model, *settings, "--predictions", file, "-o", tmp_path / "out")
    tokenizer, stock = AutoTokenizer.from_pretrained(model), AutoModel.from_pretrained(model)

    def vector(text):
        with torch.no_grad():
            states_1LD = stock(**tokenizer(text, return_tensors="pt")).last_hidden_state
        return states_1LD[0].double().mean(0)

    expected = [
        float(torch.cosine_similarity(*(vector(row[f"sentence{n}"]) for n in (1, 2)), dim=0))
        for row in pairs
    ]
    rows = lines_of(file)
    assert [row["texts"] for row in rows] == [[r["sentence1"], r["sentence2"]] for r in pairs]
    assert [float(row["predicted"]) for row in rows] == pytest.approx(expected, abs=1e-4)
    submission = ["--submission", tmp_path / "sub"]
    for option in (["--metric", "accuracy"], submission):
        message = refused(tmp_path, "evaluate", model, *settings, *option)
        assert "are scored by their vectors" in message


@pytest.mark.resampled
def test_repeated_texts_add_no_certainty_and_unknown_words_are_told(models, tmp_path):
    rows = own_files.rows("class", 60, seed=1)
    rows = [row | {"text": f"{row['text']} nowhere"} for row in rows]
    reports = []
    for times in (1, 3):
        write(tmp_path / f"{times}" / "validation.jsonl", times * rows)
        given = ("--task", "own", "--data", tmp_path / f"{times}", "-o", tmp_path / f"out-{times}")
        result = succeeds(*models, *given)
        reports.append(report_of(tmp_path / f"out-{times}"))
    once, again = reports
    for before, after in zip(once.comparisons, again.comparisons, strict=True):
        assert after.difference == pytest.approx(before.difference)
        ends = (before.low, before.high)
        assert (after.low, after.high) == pytest.approx(ends, abs=0.05)
    for before, after in zip(once.decisions[0].classes, again.decisions[0].classes, strict=True):
        wide, other = (each.metrics["recall"] for each in (before, after))
        assert (other.low, other.high) == pytest.approx((wide.low, wide.high), abs=0.05)
    place = f"first: {tmp_path / '3' / 'validation.jsonl'}:61"
    repeats = f"120 of 180 evaluated rows repeat an earlier text (up to case and spaces; {place})"
    assert (repeats in once.notes, repeats in again.notes) == (False, True)
    (note,) = [note for note in once.notes if note.startswith("model-3: the tokenizer of")]
    assert "of the tokens: is the text in another language" in note
    assert note.removeprefix("model-3: ") in own_files.said_by(result)


def test_a_model_beside_itself_differs_by_nothing_and_is_numbered(models, data, tmp_path):
    twin = own_files.headed(tmp_path / "elsewhere" / "model-3", LABELS, seed=3)
    succeeds(models[0], twin, models[0], "--task", "own", "--data", data, "-o", tmp_path / "out")
    report = report_of(tmp_path / "out")
    assert list(report.cards) == ["model-3", "model-3 (2)", "model-3 (3)"]
    assert {c.difference for c in report.comparisons} == {0}
    # The interval allows for rows that are not among these.
    assert all(c.low == pytest.approx(-c.high) and c.low < 0 for c in report.comparisons)
    assert len(report.comparisons) == 6


def test_the_first_model_stands_next_to_the_most_frequent_class(models, data, tmp_path):
    succeeds(*models, "--task", "own", "--data", data, "-o", tmp_path / "out")
    report = report_of(tmp_path / "out")
    first, second = report.evaluations
    assert first.trivial.metrics["accuracy"] == pytest.approx(0.5)
    assert (first.trivial.is_beaten, second.trivial) == (False, None)
    assert "model-3 is not clearly better than always giving the same answer" in str(report.notes)
    one_class = [row for row in own_files.rows("class", 60, seed=1) if row["label"] == LABELS[0]]
    source = write(tmp_path / "one" / "validation.jsonl", one_class).parent
    succeeds(models[0], "--task", "own", "--data", source, "-o", tmp_path / "of-one")
    assert report_of(tmp_path / "of-one").evaluations[0].trivial is None


@pytest.mark.parametrize(
    ("gates", "code"), [(["matthews=-1", "accuracy=0.1"], 0), (["accuracy=0", "f1=0.999"], 5)]
)
def test_a_gate_that_is_missed_fails_after_the_table(models, data, tmp_path, gates, code):
    options = [part for gate in gates for part in ("--min-metric", gate)]
    result = evaluate(*models, "--task", "own", "--data", data, *options, "-o", tmp_path / "out")
    assert result.exit_code == code, result.output
    assert "tickets accuracy" in result.stdout
    assert (tmp_path / "out" / "report.json").exists()
    if code:
        metric, _, least = gates[-1].partition("=")
        value = report_of(tmp_path / "out").evaluations[0].metrics[metric]
        assert (
            f"model-3 has {metric} {value:.4f}, below {float(least):g}; model-5 has {metric}"
            in said_by(result)
        )


def test_a_metric_that_is_not_a_number_misses_its_gate():
    """mteb's correlation is NaN if all vectors are equal."""
    scored = SimpleNamespace(model="m", set="", metrics={"spearman": math.nan})
    report = SimpleNamespace(cards={"m": None}, evaluations=[scored], decisions=[])
    result = SimpleNamespace(report=report, folder="out")
    with pytest.raises(GateError, match=r"m has spearman nan, below -1"):
        check_score_gates(result, Extras(gates={"spearman": -1.0}))


def test_gates_of_several_sets_are_of_their_mean_or_of_one(tmp_path):
    labels = ("entailment", "neutral", "contradiction")
    model = own_files.headed(tmp_path / "model", labels)
    texts = [r["text"] for r in own_files.rows("class", 30)]
    rows = [
        {"premise": text, "hypothesis": "w3 w24", "label": labels[i % 3]}
        for i, text in enumerate(texts)
    ]
    for name, part in (
        ("matched", rows),
        ("mismatched", [r | {"label": labels[0]} for r in rows[:20]]),
    ):
        write(tmp_path / "data" / f"validation_{name}.jsonl", part)
    options = [model, "--task", "mnli", "--data", tmp_path / "data"]
    succeeds(*options, "-o", tmp_path / "out")
    by_set = {e.set: e.metrics["accuracy"] for e in report_of(tmp_path / "out").evaluations}
    low, high = sorted(by_set, key=by_set.get)
    assert by_set[low] < by_set[high]
    mean = sum(by_set.values()) / 2
    for gate, code in (
        (f"accuracy={mean - 1e-6}", 0),
        (f"accuracy={mean + 1e-6}", 5),
        (f"{high}/accuracy={by_set[high] - 1e-6}", 0),
        (f"{low}/accuracy={by_set[high] - 1e-6}", 5),
    ):
        assert (
            evaluate(
                *options, "--min-metric", gate, "-o", tmp_path / "out", "--overwrite"
            ).exit_code
            == code
        ), gate


def test_a_test_split_and_a_part_of_it(models, data, tmp_path):
    write(data / "test.jsonl", own_files.rows("class", 40, seed=2))
    options = [models[0], "--task", "own", "--data", data, "--set", "data.split=test"]
    succeeds(*options, "--set", "data.judged_rows=10", "-o", tmp_path / "out")
    (evaluation,) = report_of(tmp_path / "out").evaluations
    assert (evaluation.split, evaluation.n) == ("test", 10)


def test_a_model_that_kdcli_did_not_train_is_evaluated_on_the_test_split(tmp_path):
    model = own_files.headed(tmp_path / "model", ("brisk", "calm"))
    write(tmp_path / "data" / "train.jsonl", own_files.rows("class", 40))
    write(tmp_path / "data" / "test.jsonl", own_files.rows("class", 30, seed=2))
    succeeds(model, "--data", tmp_path / "data", "-o", tmp_path / "out")
    (evaluation,) = report_of(tmp_path / "out").evaluations
    assert (evaluation.split, evaluation.n) == ("test", 30)


def test_a_file_with_only_some_of_the_classes_is_judged_with_the_names_of_the_model(tmp_path):
    names = ("brisk", "calm", "dire")
    model = own_files.headed(tmp_path / "model", names)
    some = [r for r in own_files.rows("class", 40) if r["label"] == "calm"] + [
        {"text": "w1 w2", "label": "dire"}
    ]
    options = [
        "--data",
        write(tmp_path / "some.jsonl", some),
        "--predictions",
        tmp_path / "predictions.jsonl",
    ]
    succeeds(model, "--task", "own", *options, "-o", tmp_path / "out")
    (evaluation,) = report_of(tmp_path / "out").evaluations
    assert evaluation.confusion.labels == list(names)
    rows = lines_of(tmp_path / "predictions.jsonl")
    expected = [names[p.argmax()] for p in probabilities(model, [r["texts"][0] for r in rows])]
    assert [r["predicted"] for r in rows] == expected
    assert evaluation.metrics["accuracy"] == np.mean(
        [r["label"] == e for r, e in zip(rows, expected, strict=True)]
    )


def test_a_model_with_the_labels_in_another_order(models, data, tmp_path):
    """It is refused with the mapping it needs, and is right about the same examples with it."""
    model = own_files.headed(tmp_path / "model", LABELS[::-1], seed=3)
    # A named task, whose order is its own; a user's own rows take the order of their model.
    rows = [
        {"sentence": r["text"], "label": r["label"]} for r in own_files.rows("class", 60, seed=1)
    ]
    names = {"brisk": "negative", "calm": "positive"}
    write(tmp_path / "sst" / "validation.jsonl", [r | {"label": names[r["label"]]} for r in rows])
    other = own_files.headed(tmp_path / "other", ("positive", "negative"), seed=3)
    options = [other, "--task", "sst2", "--data", tmp_path / "sst"]
    assert "add --set head.label_map='[1, 0]'" in refused(tmp_path, "evaluate", *options)
    succeeds(*options, "--set", "head.label_map=[1, 0]", "-o", tmp_path / "mapped")
    expected = [
        ("positive", "negative")[p.argmax()]
        for p in probabilities(other, [r["sentence"] for r in rows])
    ]
    right = np.mean([names[r["label"]] == e for r, e in zip(rows, expected, strict=True)])
    assert report_of(tmp_path / "mapped").evaluations[0].metrics["accuracy"] == right
    assert right != 0.5
    # The same model on own rows.
    succeeds(model, "--task", "own", "--data", data, "-o", tmp_path / "own")
    assert report_of(tmp_path / "own").evaluations[0].confusion.labels == list(LABELS[::-1])
    assert "another order" in refused(
        tmp_path, "evaluate", models[0], model, "--task", "own", "--data", data
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "no model given"),
        ({"models": ["a"]}, "no task given"),
        ({"models": ["a", "b"], "task": "sst2", "masks": ["m"]}, "--mask takes one model"),
        (
            {"models": ["a"], "task": "sst2", "masks": ["m"], "measure": {"latency": True}},
            "measures no latency",
        ),
        (
            {"models": ["a"], "task": "retrieval", "data": {"labels": "teacher"}},
            "data.labels=teacher does not apply to task retrieval",
        ),
        ({"models": ["a", "b"], "task": "sst2"}, "--submission takes one model, not 2"),
        (
            {"models": ["a"], "task": "sst2", "masks": ["m", "n"]},
            "--submission takes one model, not 2",
        ),
    ],
)
def test_recipes_are_checked_before_anything_is_loaded(settings, message):
    with pytest.raises(UsageError, match=message):
        check_recipe(EvaluateRecipe(**settings), Extras(submission=Path("glue")))


def test_a_metric_of_the_evaluate_library_beside_those_of_the_task(data, tmp_path):
    (tmp_path / "share.py").write_text(SHARE, "utf-8")
    common = ["--task", "own", "--data", data, "--metric", tmp_path / "share.py"]
    assert "so it is not run" in refused(
        tmp_path, "evaluate", own_files.headed(tmp_path / "model", LABELS), *common
    )
    write(data / "train.jsonl", own_files.rows("class", 40, seed=2))
    trusted = [*common, "--trust-remote-code"]
    for verb, model in (
        ("finetune", own_files.encoder(tmp_path / "encoder")),
        ("evaluate", tmp_path / "finetune"),
    ):
        few = [*QUICK, "--max-steps", "2"] if verb == "finetune" else []
        result = own_files.succeeds(verb, model, *trusted, *few, "-o", tmp_path / verb)
        report = report_of(tmp_path / verb)
        metrics = report.evaluations[0].metrics
        assert metrics["share.right"] == pytest.approx(metrics["accuracy"])
        assert (
            report.quality["own"][report.evaluations[0].model]["share.right"]
            == metrics["share.right"]
        )
        assert "share.right" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--task", "own", "--min-metric", "acuracy=0.9"],
            "no such metric for which higher is better; did you mean 'accuracy'?",
        ),
        (
            ["--task", "own", "--min-metric", "accuracy"],
            "--min-metric takes METRIC=VALUE, got 'accuracy'",
        ),
        (["--task", "own", "--submission", "sub"], "your data is not a GLUE task"),
        (
            ["--task", "own", "--set", "resamples=10"],
            "'resamples' must be at least 100",
        ),
        (["--task", "own", "--set", "train.lr=1"], "unknown key 'train.lr'"),
    ],
)
def test_bad_options_are_refused(models, data, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    assert message in refused(tmp_path, "evaluate", models[0], "--data", data, *arguments)


def test_the_second_of_two_models_is_checked_before_the_first_is_evaluated(
    models, data, tmp_path, monkeypatch
):
    monkeypatch.setattr("kdcli.workloads.labelled.LabelledWorkload.score", None)
    bare = own_files.encoder(tmp_path / "plain")
    assert "fine-tune it first" in refused(
        tmp_path, "evaluate", models[0], bare, "--task", "own", "--data", data
    )


# Task -> how a row is written, and the words the server wants for the classes where it wants words.
GLUE = {
    "cola": (("sentence",), ("unacceptable", "acceptable"), False, ["CoLA"]),
    "sst2": (("sentence",), ("negative", "positive"), False, ["SST-2"]),
    "mrpc": (("sentence1", "sentence2"), ("not_equivalent", "equivalent"), False, ["MRPC"]),
    "stsb": (("sentence1", "sentence2"), ("score",), False, ["STS-B"]),
    "qqp": (("question1", "question2"), ("not_duplicate", "duplicate"), False, ["QQP"]),
    "mnli": (
        ("premise", "hypothesis"),
        ("entailment", "neutral", "contradiction"),
        True,
        ["MNLI-m", "MNLI-mm"],
    ),
    "qnli": (("question", "sentence"), ("entailment", "not_entailment"), True, ["QNLI"]),
    "rte": (("sentence1", "sentence2"), ("entailment", "not_entailment"), True, ["RTE"]),
    "wnli": (("sentence1", "sentence2"), ("not_entailment", "entailment"), False, ["WNLI"]),
}


def expected_submission(model, columns, names, words, rows):
    tokenizer, stock = (
        AutoTokenizer.from_pretrained(model),
        AutoModelForSequenceClassification.from_pretrained(model),
    )
    lines = ["index\tprediction"]
    for index, row in enumerate(rows):
        batch = tokenizer(*(row[c] for c in columns), return_tensors="pt")
        with torch.no_grad():
            logits = stock(**batch).logits[0]
        if names == ("score",):
            value = f"{min(5.0, max(0.0, float(logits[0]))):.3f}"
        else:
            value = names[int(logits.argmax())] if words else str(int(logits.argmax()))
        lines.append(f"{index}\t{value}")
    return ("\n".join(lines) + "\n").encode()


@pytest.mark.parametrize("task", GLUE)
def test_the_file_for_the_server_to_the_byte(tmp_path, task):
    columns, names, words, files = GLUE[task]
    head = {"num_labels": 1} if names == ("score",) else {"labels": names}
    model = own_files.headed(tmp_path / "model", **head, seed=2)
    sets = ("_matched", "_mismatched") if task == "mnli" else ("",)
    tests = {}
    for number, of_set in enumerate(sets):
        texts = [(r["premise"], r["hypothesis"]) for r in own_files.rows("pair", 40, seed=number)]
        labels = [(i % 11) / 2 if task == "stsb" else i % len(names) for i in range(40)]
        rows = [
            dict(zip(columns, t, strict=False)) | {"label": n}
            for t, n in zip(texts, labels, strict=True)
        ]
        write(tmp_path / "data" / f"validation{of_set}.jsonl", rows[:12])
        # As on the hub: labels of -1, and a number of its own for each row, not in order; one set
        # without labels.
        tests[of_set] = [r | {"label": -1, "idx": 1000 - i} for i, r in enumerate(rows)]
        if number:
            tests[of_set] = [{k: v for k, v in r.items() if k != "label"} for r in tests[of_set]]
        write(tmp_path / "data" / f"test{of_set}.jsonl", tests[of_set])
    # Within the directory of the run, which must not be in its way.
    folder = tmp_path / "out" / "glue"
    succeeds(
        model,
        *shlex.split(
            f"--task {task} --data {tmp_path}/data --submission {folder} -o {tmp_path}/out"
        ),
    )
    assert sorted(p.name for p in folder.iterdir()) == sorted(f"{name}.tsv" for name in files)
    for name, rows in zip(files, tests.values(), strict=True):
        written = (folder / f"{name}.tsv").read_bytes()
        assert written == expected_submission(model, columns, names, words, rows)
        values = {line.split(b"\t")[1] for line in written.splitlines()[1:]}
        assert len(values) > 1
        assert task != "stsb" or {b"0.000", b"5.000"} <= values


def test_a_submission_without_a_test_split_is_refused(tmp_path):
    model = own_files.headed(tmp_path / "model", ("negative", "positive"))
    rows = [
        {"sentence": r["text"], "label": i % 2} for i, r in enumerate(own_files.rows("class", 20))
    ]
    write(tmp_path / "data" / "validation.jsonl", rows)
    options = ["--task", "sst2", "--data", tmp_path / "data", "--submission", tmp_path / "sub"]
    message = refused(tmp_path, "evaluate", model, *options)
    assert "no test split" in message
    assert message.rstrip(".").endswith("and the columns sentence"), (
        "labels are what the server withholds"
    )


@pytest.mark.resampled
def test_two_processes_say_the_same_once(models, data, tmp_path):
    options = [*models, "--task", "own", "--data", data, "--device", "cpu"]
    succeeds(*options, "--predictions", tmp_path / "one.jsonl", "-o", tmp_path / "one")
    output, _ = processes.two_ranks(
        "evaluate", *options, "--predictions", tmp_path / "two.jsonl", "-o", tmp_path / "two"
    )
    assert output.count("report in") == 1
    a, b = lines_of(tmp_path / "one.jsonl"), lines_of(tmp_path / "two.jsonl")
    assert [r | {"scores": None} for r in a] == [r | {"scores": None} for r in b]
    np.testing.assert_allclose([r["scores"] for r in a], [r["scores"] for r in b], atol=1e-5)
    assert report_of(tmp_path / "one").comparisons == report_of(tmp_path / "two").comparisons
