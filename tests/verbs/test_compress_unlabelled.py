"""`kdcli compress MODEL --data TEXT`: no task, no labels, and the teacher as the reference."""

import json
import os
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch
from own_files import (
    encoder,
    headed,
    kdcli,
    lines_of,
    refused,
    report_of,
    rows,
    said_by,
    succeeds,
    write,
)
from test_compress import FAST, TIMES, TRAIN, measured_here, words_of
from transformers import (
    AutoModel,
    AutoModelForQuestionAnswering,
    AutoModelForTokenClassification,
    pipeline,
)

from kdcli.data.labelled.partition import Partition, text_hashes
from kdcli.deploy import untrained
from kdcli.engine.run_dir import RunDir
from kdcli.errors import GateError, Stopped
from kdcli.models.embedder import EmbeddingFormat, save_embedder
from kdcli.models.load import load_encoder
from kdcli.models.training_rows import write_training_rows
from kdcli.report import finish
from kdcli.verbs.compress import judge, run
from kdcli.verbs.compress.runner import StepRunner
from kdcli.verbs.compress.shapes import Untrained
from kdcli.verbs.compress.steps import Step
from kdcli.workloads import labelled
from kdcli.workloads.detect import known_task

LABELS = ("brisk", "calm")


def measured_without_a_worker(patch):
    times = Untrained(TIMES, {"onnx": TIMES}, "onnx", {"1x32": TIMES})
    patch.setattr(run, "measure_untrained", lambda *_: times)
    for module in (untrained, finish):
        patch.setattr(module, "measure_latency", measured_here)


@pytest.fixture(autouse=True)
def _measured_here(monkeypatch):
    measured_without_a_worker(monkeypatch)


def classifier(folder):
    headed(folder / "model", LABELS, num_hidden_layers=2)
    return unlabelled(folder / "texts.jsonl", "class"), "own", "agreement"


def plain_text(folder):
    headed(folder / "model", LABELS, num_hidden_layers=2)
    file = folder / "texts.txt"
    file.write_text("".join(row["text"] + "\n" for row in rows("class", 200)), "utf-8")
    return file, "own", "agreement"


def several_labels(folder):
    problem = "multi_label_classification"
    headed(folder / "model", LABELS, num_hidden_layers=2, problem_type=problem)
    return unlabelled(folder / "texts.jsonl", "multi"), "own", "micro_f1"


def scorer(folder):
    headed(folder / "model", num_labels=1, num_hidden_layers=2, problem_type="regression")
    return unlabelled(folder / "texts.jsonl", "score"), "own", "spearman"


def tagger(folder):
    names = {"id2label": {0: "O", 1: "B-LOC"}, "label2id": {"O": 0, "B-LOC": 1}}
    put_head(folder / "model", AutoModelForTokenClassification, **names)
    return unlabelled(folder / "texts.jsonl", "tokens"), "own", "f1"


def reader(folder):
    put_head(folder / "model", AutoModelForQuestionAnswering)
    return unlabelled(folder / "texts.jsonl", "span"), "own", "f1"


def embedder(folder):
    base = load_encoder(str(encoder(folder / "base", num_hidden_layers=2)))
    save_embedder(base.model, base.tokenizer, EmbeddingFormat("mean"), folder / "model")
    file = folder / "texts.txt"
    file.write_text("".join(f"w{n % 50} w{n % 7} w{n % 11}\n" for n in range(400)), "utf-8")
    return file, "embedding", "spearman"


def reranker(folder):
    headed(folder / "model", num_labels=1, num_hidden_layers=2, type_vocab_size=2)
    lists = [
        {
            "query": f"w{n % 50} w{n % 9}",
            "passages": [f"w{n % 50} w{n % 7}", f"w{n % 11}", f"w{n % 5} w9"],
        }
        for n in range(200)
    ]
    return write(folder / "lists.jsonl", lists), "rerank", "ndcg@10"


def put_head(folder, auto, **settings):
    base = load_encoder(str(encoder(folder, num_hidden_layers=2)))
    for name, value in settings.items():
        setattr(base.model.config, name, value)
    torch.manual_seed(0)
    model = auto.from_config(base.model.config)
    model.base_model.load_state_dict(base.model.state_dict(), strict=False)
    model.save_pretrained(folder)


def unlabelled(file, kind):
    named = ("label", "ner_tags", "answers")
    lines = [{k: v for k, v in row.items() if k not in named} for row in rows(kind, 200)]
    return write(file, lines)


def arguments(folder, data, **sets):
    training = {f"plan.distill.train.{key}": value for key, value in TRAIN.items()}
    sets = {"plan.trim_from": "1.0", **training, **sets}
    sets |= {"plan.shapes": "[1x32]", "plan.backends": "[onnx]", "plan.prune": "null"}
    sets |= {"data.stride": 4, "data.max_length": 24}
    return ("compress", folder / "model", "--data", data, *words_of(sets), *FAST[:4])


@pytest.fixture(scope="module")
def classified(tmp_path_factory):
    """The directory of a compressed classifier, and the command."""
    folder = tmp_path_factory.mktemp("classified")
    with pytest.MonkeyPatch.context() as patch:
        measured_without_a_worker(patch)
        given = arguments(folder, classifier(folder)[0])
        succeeds(*given, "--max-drop", "100", "-o", folder / "out")
    return folder, given


MAKERS = [classifier, plain_text, several_labels, scorer, tagger, reader, embedder, reranker]


def test_retrieval_data_is_found_in_the_home_directory(tmp_path, monkeypatch):
    embedder(tmp_path)
    (tmp_path / "beir" / "qrels").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert known_task(str(tmp_path / "model"), "~/beir") == "retrieval"


@pytest.mark.parametrize("make", MAKERS)
def test_the_task_is_known_from_model_and_rows(make, tmp_path):
    data, task, _ = make(tmp_path)
    assert known_task(str(tmp_path / "model"), str(data)) == task


def test_an_embedding_model_reads_the_column_that_is_named(tmp_path):
    lines = embedder(tmp_path)[0].read_text("utf-8").splitlines()
    rows = [{"queue": f"q{n % 3}", "body": line} for n, line in enumerate(lines)]
    given = arguments(tmp_path, write(tmp_path / "tickets.jsonl", rows))
    given += ("--max-drop", "100")
    assert "which column holds the text?" in refused(tmp_path, *given)
    two = ("--set", "data.columns.label=queue")
    named = ("--set", "data.columns.text=body")
    assert "one column, data.columns.text; got data.columns.label" in refused(
        tmp_path, *given, *named, *two
    )
    succeeds(*given, *named, "-o", tmp_path / "out")
    student = report_of(tmp_path / "out" / "steps" / "1x32")
    assert student.recipe["data"]["column"] == "body"


def test_rows_without_a_benchmarks_columns_are_the_users_own(tmp_path):
    texts, _, _ = classifier(tmp_path)
    (tmp_path / "model" / "recipe.yaml").write_text("verb: finetune\ntask: sst2\n")
    (tmp_path / "model" / "log.jsonl").write_text("")
    sentences = write(tmp_path / "sentences.jsonl", [{"sentence": f"w{n}"} for n in range(9)])
    model = str(tmp_path / "model")
    assert known_task(model, str(texts)) == "own"
    assert known_task(model, str(sentences)) == "sst2"
    assert known_task(model, None) == "sst2"
    # The error is raised when the file is read.
    assert known_task(model, str(tmp_path / "missing.jsonl")) == "sst2"


# Their kinds are evaluated without labels by tests/workloads, and each needs a graph of its own.
LATER = [pytest.param(make, marks=pytest.mark.long) for make in (scorer, tagger, reader)]


@pytest.mark.parametrize(
    "make", [classifier, plain_text, several_labels, embedder, reranker, *LATER]
)
def test_a_model_and_unlabelled_rows_are_enough(make, request, tmp_path):
    if make is classifier:
        folder, task, metric = request.getfixturevalue("classified")[0], "own", "agreement"
    else:
        folder, (data, task, metric) = tmp_path, make(tmp_path)
        done = succeeds(*arguments(folder, data), "--max-drop", "100", "-o", folder / "out")
        assert done.stderr.startswith("output directory: ")
        # A single shape without a budget needs no dry run.
        assert "its training takes" not in said_by(done)
    report = report_of(folder / "out")
    compression, verified = report.compression, report.compression.verification
    assert (compression.task, compression.metric) == (task, metric)
    assert verified.reference == "teacher"
    assert verified.teacher == pytest.approx(1.0)
    named = "" if metric == "agreement" else f" ({metric})"
    assert f"agreement with the teacher{named} (95 % interval" in compression.sentence
    assert "accuracy" not in (folder / "out" / "report.md").read_text("utf-8")
    scored = {row.name for row in compression.candidates if row.score is not None}
    assert scored >= {"teacher", "onnx", "1x32-onnx"}
    assert "1x32-undistilled" not in {row.name for row in compression.candidates}


def test_what_is_shipped_loads_and_says_where_it_comes_from(classified, tmp_path):
    folder, given = classified
    best = folder / "out" / "best"
    assert type(AutoModel.from_pretrained(best)).__name__ == "BertModel"
    answer = pipeline("text-classification", model=str(best))("w1 w2")
    assert answer[0]["label"] in LABELS
    inside = {path.relative_to(best).as_posix() for path in best.rglob("*") if path.is_file()}
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= inside
    assert any(name.startswith("onnx/") for name in inside)
    assert not inside & {"report.json", "recipe.yaml", "log.jsonl", "training_rows.safetensors"}
    sentence = report_of(folder / "out").compression.sentence
    assert sentence in (best / "README.md").read_text("utf-8")
    data = given[given.index("--data") + 1]
    succeeds("evaluate", folder / "model", best, "--data", data, "-o", tmp_path / "again")


def test_no_training_row_is_evaluated_and_no_evaluated_row_chooses_the_vocabulary(tmp_path):
    headed(tmp_path / "model", LABELS, num_hidden_layers=2)
    texts = [f"w{n % 50} w{n // 50} w{n % 3}" for n in range(200)]
    data = write(tmp_path / "texts.jsonl", [{"text": text} for text in texts])
    given = arguments(tmp_path, data, **{"plan.trim_from": "0.0"})
    succeeds(*given, "--max-drop", "100", "-o", tmp_path / "out")
    steps = tmp_path / "out" / "steps"
    training = {row["text"] for row in lines_of(steps / "training-text.jsonl")}
    partition = Partition.read(str(tmp_path / "out" / "partition.safetensors"))
    assert len(training) == 200 - len(partition.selection) - len(partition.verification)
    assert (len(partition.selection), len(partition.verification)) == (20, 40)
    vocabulary = set(
        json.loads((steps / "1x32-trimmed" / "tokenizer.json").read_text())["model"]["vocab"]
    )
    assert {f"w{n}" for n in range(50)} & vocabulary == {w for t in training for w in t.split()}
    selection = report_of(next(steps.glob("selection-*")))
    verification = report_of(next(steps.glob("verification-*")))
    assert {row.n for row in selection.evaluations} == {20}
    assert {row.n for row in verification.evaluations} == {40}


def computed_again(folder, data):
    """The command of the second look at the verification rows, which keeps no outputs."""
    models = (folder / "model", folder / "out" / "steps" / "onnx")
    sets = {"data.partition": folder / "out" / "partition.safetensors", "resamples": 2000}
    sets |= {"data.split": "verification", "confidence": 0.975, "data.max_length": 24}
    return ("evaluate", *models, "--data", data, *words_of(sets))


def the_student_is_fastest(subjects, protocol):
    """Measure here. The model of one layer has the longest name, so it counts as the fastest."""
    latency = measured_here(subjects, protocol)
    for number, row in enumerate(latency.rows):
        ms = 100.0 / len(row.model)
        latency.rows[number] = row.model_copy(update={"p50_ms": ms, "p90_ms": ms})
    return latency


def test_another_goal_is_answered_from_what_was_tried(tmp_path, monkeypatch):
    monkeypatch.setattr(finish, "measure_latency", the_student_is_fastest)
    data, _, _ = classifier(tmp_path)
    given = (*arguments(tmp_path, data), "-o", tmp_path / "out")
    assert kdcli(*given, "--max-drop", "100").exit_code == 0
    first = report_of(tmp_path / "out").compression
    assert (first.chosen, first.verification.look) == ("1x32-onnx", 1)
    weights = {
        path: path.stat().st_mtime_ns
        for path in (tmp_path / "out" / "steps").rglob("*.safetensors")
    }
    # A size limit needs timings of untrained shapes only if something must be trained.
    monkeypatch.setattr(run, "measure_untrained", lambda *_: pytest.fail("shapes were timed"))
    goal = ("--max-drop", "1", "--max-mb", "100")
    with monkeypatch.context() as patch:
        patch.setattr(labelled, "evaluate_job", lambda *_: pytest.fail("the teacher was run"))
        done = kdcli(*given, *goal)
    assert done.exit_code == 0, done.output
    second = report_of(tmp_path / "out").compression
    verified = report_of(tmp_path / "out" / "steps" / "verification-onnx")
    succeeds(*computed_again(tmp_path, data), "-o", tmp_path / "computed")
    computed = report_of(tmp_path / "computed")
    # `compress` names the models in its reports.
    pairs = zip(computed.evaluations, verified.evaluations, strict=True)
    renamed = [one.model_copy(update={"model": other.model}) for one, other in pairs]
    assert renamed == verified.evaluations
    both = zip(computed.comparisons, verified.comparisons, strict=True)
    again = [
        one.model_copy(update={"model": other.model, "baseline": other.baseline})
        for one, other in both
    ]
    assert again == verified.comparisons
    assert (second.goal, second.chosen) == ({"max_drop": 1.0, "max_mb": 100.0}, "onnx")
    assert {path: path.stat().st_mtime_ns for path in weights} == weights
    assert second.verification.look == 2
    assert second.verification.confidence == pytest.approx(0.975)
    assert "97.5% interval" in (tmp_path / "out" / "report.md").read_text("utf-8")
    # Another price only writes the report again.
    priced = kdcli(*given, *goal, "--price-per-hour", "0.36")
    assert priced.exit_code == 0, priced.output
    report = report_of(tmp_path / "out")
    third = report.compression
    assert (third.chosen, third.verification.look) == ("onnx", 2)
    assert {path: path.stat().st_mtime_ns for path in weights} == weights
    cost = third.candidates[0].throughput.cost_per_million
    assert cost == pytest.approx(100 / third.candidates[0].throughput.texts_per_second)
    assert "At 0.36 an hour, a million texts cost" in third.sentence
    steps = {step.name: tmp_path / "out" / step.folder / "report.html" for step in third.steps}
    assert {"1x32"} < steps.keys()
    assert all(page.is_file() for page in steps.values())
    assert report.data_versions.keys() == {data.name}
    front = kdcli("compress", "--front", tmp_path / "out")
    assert front.exit_code == 0
    for row in second.candidates:
        assert row.name[:20] in front.stdout
    # Another model or other data are no other goal.
    assert kdcli(*given, "--set", "seed=3", "--max-drop", "2").exit_code == 2
    # A run that was moved answers from what it holds.
    moved = (tmp_path / "out").rename(tmp_path / "moved")
    monkeypatch.setattr(Step, "run", lambda *_: pytest.fail("a step was run"))
    done = kdcli(*arguments(tmp_path, data), "-o", moved, "--max-drop", "99")
    assert done.exit_code == 0, done.output
    assert report_of(moved).compression.chosen == first.chosen
    assert (moved / "best" / "onnx" / "model.onnx").is_file()


def test_the_same_command_takes_the_next_candidate_after_a_failure(tmp_path, monkeypatch):
    monkeypatch.setattr(finish, "measure_latency", the_student_is_fastest)
    verify = judge.verify

    def worse(runner, scores, chosen):
        verified = verify(runner, scores, chosen)
        if chosen.name != "1x32-onnx":
            return verified
        # The student is worse on the verification rows than on the selection rows.
        student = replace(verified.chosen, score=0.0, low=0.0, high=0.0)
        return replace(verified, chosen=student)

    for module in (run, judge):
        monkeypatch.setattr(module, "verify", worse)
    data, _, _ = classifier(tmp_path)
    given = (*arguments(tmp_path, data), "--max-drop", "90", "-o", tmp_path / "out")
    failed = kdcli(*given)
    assert failed.exit_code == GateError.exit_code, failed.output
    assert "The next candidate is onnx: 1.000 agreement on the selection rows" in said_by(failed)
    first = report_of(tmp_path / "out").compression
    assert (first.chosen, first.next_candidate) == ("1x32-onnx", "onnx")
    # A finished question is not asked again by --resume.
    resumed = kdcli(*given, "--resume")
    assert (resumed.exit_code, "is done already" in said_by(resumed)) == (5, True)
    run_step = Step.run

    def stopped(*options):
        with monkeypatch.context() as patch:
            patch.setattr(Step, "run", terminated("verification-onnx", run_step))
            done = kdcli(*given, *options)
        assert done.exit_code == Stopped.exit_code, done.output

    # Another goal that was stopped leaves the question answered.
    stopped("--max-drop", "80")
    resumed = kdcli(*given, "--resume")
    assert (resumed.exit_code, "is done already" in said_by(resumed)) == (5, True)
    # Another price repeats the answer, also after the next candidate was begun.
    stopped()
    given = (*given, "--price-per-hour", "1")
    assert kdcli(*given).exit_code == 5
    priced = report_of(tmp_path / "out").compression
    assert (priced.chosen, priced.verification.look) == ("1x32-onnx", 1)
    # The stopped question goes on.
    stopped()
    taken = kdcli(*given, "--resume")
    assert taken.exit_code == 0, taken.output
    second = report_of(tmp_path / "out").compression
    assert (second.chosen, second.met, second.next_candidate) == ("onnx", True, None)
    assert (second.verification.look, second.verification.confidence) == (2, 0.975)
    outcomes = {row.name: row.outcome for row in second.candidates}
    assert outcomes["1x32-onnx"].endswith("on the verification rows")
    # A tighter goal does not return to the one that failed, and a met goal is answered.
    assert kdcli(*given, "--max-drop", "80").exit_code == 0
    third = report_of(tmp_path / "out").compression
    assert (third.chosen, third.verification.look) == ("onnx", 2)
    assert "is not empty" in said_by(kdcli(*given, "--max-drop", "80"))


def terminated(step, run_step):
    """Return a `Step.run` that stops the process once, when a step begins."""
    names = [step]

    def stopped(self, options):
        if options.output_dir.name in names:
            names.clear()
            os.kill(os.getpid(), signal.SIGTERM)
        run_step(self, options)

    return stopped


def test_the_same_command_continues_a_question_that_was_stopped(tmp_path, monkeypatch):
    monkeypatch.setattr(finish, "measure_latency", the_student_is_fastest)
    data, _, _ = classifier(tmp_path)
    given = (*arguments(tmp_path, data), "-o", tmp_path / "out")
    succeeds(*given, "--max-drop", "100")
    question = (*given, "--max-drop", "1", "--max-mb", "100")
    monkeypatch.setattr(Step, "run", terminated("verification-onnx", Step.run))
    stopped = kdcli(*question)
    assert stopped.exit_code == Stopped.exit_code, stopped.output
    assert report_of(tmp_path / "out").compression.goal == {"max_drop": 100.0}
    succeeds(*question)
    second = report_of(tmp_path / "out").compression
    assert (second.goal, second.chosen) == ({"max_drop": 1.0, "max_mb": 100.0}, "onnx")
    assert second.verification.look == 2


@pytest.mark.parametrize(("goals", "layers"), [(["100"], 1), (["100", "1"], 2)])
def test_a_stop_waits_until_best_and_the_report_are_written(goals, layers, tmp_path, monkeypatch):
    monkeypatch.setattr(finish, "measure_latency", the_student_is_fastest)
    data, _, _ = classifier(tmp_path)
    given = (*arguments(tmp_path, data), "-o", tmp_path / "out")
    *earlier, last = [(*given, "--max-drop", goal) for goal in goals]
    for command in earlier:
        succeeds(*command)
    written = run.write_report

    def stopped(*args):
        os.kill(os.getpid(), signal.SIGTERM)
        return written(*args)

    with monkeypatch.context() as patch:
        patch.setattr(run, "write_report", stopped)
        assert kdcli(*last).exit_code == Stopped.exit_code
    compression = report_of(tmp_path / "out").compression
    assert compression.goal == {"max_drop": float(goals[-1])}
    best = tmp_path / "out" / "best"
    assert json.loads((best / "config.json").read_text())["num_hidden_layers"] == layers
    assert compression.sentence in (best / "README.md").read_text()
    assert "is done already" in said_by(kdcli(*last, "--resume"))


def test_a_question_that_was_stopped_while_scoring_can_be_continued(tmp_path, monkeypatch):
    monkeypatch.setattr(finish, "measure_latency", the_student_is_fastest)
    data, _, _ = classifier(tmp_path)
    given = (*arguments(tmp_path, data), "-o", tmp_path / "out")
    succeeds(*given, "--max-drop", "100")
    # On another machine, the candidates are timed again.
    place = StepRunner.place.fget
    monkeypatch.setattr(StepRunner, "place", property(lambda self: [*place(self), "other"]))
    run_step = Step.run

    def stopped(self, options):
        run_step(self, options)
        if options.output_dir.name.startswith("selection-"):
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(Step, "run", stopped)
        done = kdcli(*given, "--max-drop", "1")
    assert done.exit_code == Stopped.exit_code
    assert "continue with" in said_by(done)
    keys = [record["key"] for record in RunDir(tmp_path / "out").read_log()]
    assert keys[-1].startswith("spent run selection-")
    succeeds(*given, "--max-drop", "1")
    assert report_of(tmp_path / "out").compression.goal == {"max_drop": 1.0}


def test_a_question_that_cannot_be_reached_leaves_the_finished_run_as_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr(finish, "measure_latency", the_student_is_fastest)
    data, _, _ = classifier(tmp_path)
    given = (*arguments(tmp_path, data), "-o", tmp_path / "out")
    succeeds(*given, "--max-drop", "100")
    names = ("recipe.yaml", "report.json", "log.jsonl")
    before = [(tmp_path / "out" / name).read_bytes() for name in names]
    done = kdcli(*given, "--max-drop", "100", "--speedup", "1000000")
    assert done.exit_code == GateError.exit_code
    assert [(tmp_path / "out" / name).read_bytes() for name in names] == before


def test_a_run_without_a_directory_has_the_name_of_the_data(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "measure_untrained", stop)
    data, _, _ = classifier(tmp_path)
    monkeypatch.chdir(tmp_path)
    done = kdcli(*arguments(tmp_path, data), "--max-drop", "100")
    assert done.stderr.startswith("output directory: runs/compress-model-texts\n")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda folder: encoder(folder / "model"),
            "is a plain encoder: it has no head and no pooling",
        ),
        (
            lambda folder: put_head(folder / "model", AutoModelForQuestionAnswering),
            "which column holds the question?",
        ),
    ],
)
def test_a_model_that_cannot_read_the_rows_is_refused(make, message, tmp_path):
    make(tmp_path)
    data = unlabelled(tmp_path / "texts.jsonl", "class")
    given = (tmp_path / "model", "--data", data)
    assert message in refused(tmp_path, "compress", *given, "--max-drop", "1")
    if "plain encoder" in message:
        assert "no task given" in refused(tmp_path, "evaluate", *given)


def test_labels_of_another_head_and_too_few_rows_are_refused(tmp_path):
    headed(tmp_path / "model", ("spam", "ham"), num_hidden_layers=2)
    data = write(tmp_path / "rows.jsonl", rows("class", 200))
    message = refused(tmp_path, "evaluate", tmp_path / "model", "--data", data)
    first = next(n for n, row in enumerate(lines_of(data), 1) if row["label"] == "brisk")
    assert (
        f"it predicts spam, ham, but your data has brisk, calm (the first in {data}:{first})"
    ) in message
    assert "--set data.labels=teacher" in message
    headed(tmp_path / "wider", ("spam", "ham", "news"), num_hidden_layers=2)
    for model in (tmp_path / "wider", "demo-classifier"):
        message = refused(tmp_path, "compress", model, "--data", data, "--max-drop", "1")
        assert "do not fit the head of" in message
        assert "it predicts " in message
        assert f"but your data has brisk, calm (the first in {data}:" in message
        assert "--set data.labels=teacher" in message
    few = write(tmp_path / "few.jsonl", [{"text": f"w{n}"} for n in range(4)])
    message = refused(tmp_path, "compress", tmp_path / "model", "--data", few, "--max-drop", "1")
    assert "4 rows, too few" in message
    assert "give --data with at least 200 rows; they need no labels" in message
    one = write(tmp_path / "one.jsonl", [{"text": "w1"}])
    message = refused(tmp_path, "compress", tmp_path / "model", "--data", one, "--max-drop", "1")
    assert "the data has 1 row, too few" in message


def test_rows_that_trained_the_model_are_refused_and_other_rows_help(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "measure_untrained", stop)
    data, _, _ = classifier(tmp_path)
    hashes = text_hashes([row["text"] for row in lines_of(data)])
    write_training_rows(tmp_path / "model", hashes)
    message = refused(tmp_path, *arguments(tmp_path, data), "--max-drop", "100")
    assert "rows, 0 of them did not train" in message
    wanted = "at least 200 rows that did not train the model; they need no labels"
    assert wanted in message
    assert "judge_trained_rows" not in message
    others = [{"text": f"w{n % 50} w{n // 50} w{n % 3}"} for n in range(200)]
    given = arguments(tmp_path, write(tmp_path / "others.jsonl", others))
    done = kdcli(*given, "--max-drop", "100", "-o", tmp_path / "out")
    # The rows are accepted, and the run goes on to its first measurement.
    assert said_by(done).endswith("error: far enough")


def test_few_rows_are_a_warning(tmp_path, monkeypatch):
    """The rows are counted before anything is measured."""
    monkeypatch.setattr(run, "measure_untrained", stop)
    data, _, _ = classifier(tmp_path)
    write(data, lines_of(data)[:60])
    done = kdcli(*arguments(tmp_path, data), "--max-drop", "100", "-o", tmp_path / "out")
    assert (done.exit_code, "selection rows: chance decides" in said_by(done)) == (
        GateError.exit_code,
        True,
    )


def stop(*_):
    raise GateError("far enough")


def test_evaluation_without_labels_compares_with_the_first_model(tmp_path):
    data, _, _ = classifier(tmp_path)
    headed(tmp_path / "other", LABELS, seed=3, num_hidden_layers=2)
    models = (tmp_path / "model", tmp_path / "other")
    assert kdcli("evaluate", *models, "--data", data, "-o", tmp_path / "out").exit_code == 0
    first, second = report_of(tmp_path / "out").evaluations
    assert (first.reference, first.metrics["agreement"]) == ("teacher", 1.0)
    answers = [
        [
            row["label"]
            for row in pipeline("text-classification", model=str(model))(
                [row["text"] for row in lines_of(data)]
            )
        ]
        for model in models
    ]
    assert second.metrics["agreement"] == pytest.approx(np.mean(np.equal(*answers)))


def test_a_model_is_not_compared_with_itself(tmp_path):
    data, _, _ = classifier(tmp_path)
    alone = ("evaluate", tmp_path / "model", "--data", data)
    message = refused(tmp_path, *alone)
    assert "without labels, model would only be compared with itself" in message
    file = tmp_path / "predictions.jsonl"
    succeeds(*alone, "--predictions", file, "-o", tmp_path / "out")
    assert len(lines_of(file)) == len(lines_of(data))
