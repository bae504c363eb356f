"""`kdcli compress MODEL --data TEXT`: no task, no labels, and the teacher as the reference."""

import json

import pytest
import torch
from fake_verbs import Fakes, Killed
from huggingface_hub import ModelCard
from own_files import encoder, headed, kdcli, lines_of, refused, report_of, rows, succeeds, write
from test_compress import QUICK, TRAIN
from transformers import (
    AutoModel,
    AutoModelForQuestionAnswering,
    AutoModelForTokenClassification,
    pipeline,
)

from kdcli.data.labelled.partition import Partition, text_hashes
from kdcli.errors import UsageError
from kdcli.models.embedding_format import EmbeddingFormat, save_embedder
from kdcli.models.load import load_encoder
from kdcli.models.model import write_training_rows
from kdcli.report.publish import Upload
from kdcli.workloads.detect import known_task

LABELS = ("brisk", "calm")


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


def keys_of(folder, data, **keys):
    """The keys of a compression to one shape on one backend."""
    return {
        "model": str(folder / "model"),
        "data__source": str(data),
        "task": None,
        "plan__distill": {"train": TRAIN},
        "plan__shapes": ["1x32"],
        "plan__backends": ["onnx"],
        "plan__prune": None,
        "plan__trim_from": 1.0,
        "data__stride": 4,
        "goal__max_drop": 100.0,
        **QUICK,
        **keys,
    }


def compressed(folder, data, **keys):
    """Compress with the verbs of kdcli; the student counts as the fastest model."""
    made = Fakes({}, in_earnest=True, ms={"1x32": 2.0})
    return made.compress(**keys_of(folder, data, **keys), output_dir=folder / "out")


@pytest.fixture(scope="module")
def classified(tmp_path_factory):
    """The directory of a compressed classifier, and its data."""
    folder = tmp_path_factory.mktemp("classified")
    data = classifier(folder)[0]
    # A budget needs a dry run of the training, which has no labels either.
    compressed(folder, data, budget=7200.0)
    return folder, data


MAKERS = [classifier, plain_text, several_labels, scorer, tagger, reader, embedder, reranker]


def test_retrieval_data_is_found_in_the_home_directory(tmp_path, monkeypatch):
    embedder(tmp_path)
    (tmp_path / "beir" / "qrels").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert known_task(str(tmp_path / "model"), "~/beir") == "retrieval"
    # A model that kdcli made for its vectors is scored as the original.
    (tmp_path / "model" / "recipe.yaml").write_text("verb: compress\ntask: embedding\n")
    (tmp_path / "model" / "log.jsonl").write_text("")
    assert known_task(str(tmp_path / "model"), "~/beir") == "retrieval"


@pytest.mark.parametrize("make", MAKERS)
def test_the_task_is_known_from_model_and_rows(make, tmp_path):
    data, task, _ = make(tmp_path)
    assert known_task(str(tmp_path / "model"), str(data)) == task


@pytest.mark.parametrize("score", ["0,5", "4.2/5", "50 %"])
def test_pairs_with_numbers_are_scored_however_they_are_written(tmp_path, score):
    embedder(tmp_path)
    pairs = [{"sentence1": f"w{n}", "sentence2": "w1", "label": score} for n in range(3)]
    assert known_task(str(tmp_path / "model"), str(write(tmp_path / "pairs.jsonl", pairs))) == "own"


def test_a_model_alone_is_refused_before_its_rows_are_read(tmp_path):
    embedder(tmp_path)
    rows = [{"wording": f"w{n}", "queue": "billing"} for n in range(3)]
    data = write(tmp_path / "tickets.jsonl", rows)
    message = refused(tmp_path, "evaluate", tmp_path / "model", "--data", data)
    assert "texts with classes in train.* and test.*" in message


def test_an_embedding_model_reads_the_column_that_is_named(tmp_path):
    lines = embedder(tmp_path)[0].read_text("utf-8").splitlines()
    named = [{"queue": f"q{n % 3}", "wording": line} for n, line in enumerate(lines)]
    data = write(tmp_path / "tickets.jsonl", named)
    with pytest.raises(UsageError, match="which column holds the text"):
        compressed(tmp_path, data)
    with pytest.raises(
        UsageError, match=r"one column, data\.columns\.text; got data\.columns\.label"
    ):
        compressed(tmp_path, data, data__columns={"text": "wording", "label": "queue"})


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
LATER = [
    pytest.param(make, marks=pytest.mark.long) for make in (several_labels, scorer, tagger, reader)
]


@pytest.mark.parametrize("make", [classifier, embedder, reranker, *LATER])
def test_a_model_and_unlabelled_rows_are_enough(make, request, tmp_path, capsys):
    if make is classifier:
        folder, task, metric = request.getfixturevalue("classified")[0], "own", "agreement"
    else:
        folder, (data, task, metric) = tmp_path, make(tmp_path)
        compressed(folder, data)
        said = capsys.readouterr().err
        assert said.startswith("output directory: ")
        # A single shape without a budget needs no dry run.
        assert "its training takes" not in said
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
    folder, data = classified
    best = folder / "out" / "best"
    assert type(AutoModel.from_pretrained(best)).__name__ == "BertModel"
    answer = pipeline("text-classification", model=str(best))("w1 w2")
    assert answer[0]["label"] in LABELS
    inside = {path.relative_to(best).as_posix() for path in best.rglob("*") if path.is_file()}
    assert {"README.md", "config.json", "model.safetensors", "tokenizer.json"} <= inside
    assert any(name.startswith("onnx/") for name in inside)
    assert not inside & {"report.json", "recipe.yaml", "log.jsonl"}
    assert "training_rows.safetensors" in Upload.of(best).kept
    card, verified = ModelCard.load(best / "README.md"), report_of(folder / "out").evaluations[-1]
    scores = {result.metric_type: result.metric_value for result in card.data.eval_results}
    assert scores == pytest.approx(verified.metrics)
    assert {result.dataset_split for result in card.data.eval_results} == {"verification"}
    assert card.data.library_name == "transformers"
    assert "Made from model by distillation" in card.text
    succeeds("evaluate", folder / "model", best, "--data", data, "-o", tmp_path / "again")
    notes = report_of(tmp_path / "again").notes
    assert any(note.startswith(f"skipped 140 of 200 rows: {best} was trained") for note in notes)


def test_no_training_row_is_evaluated_and_no_evaluated_row_chooses_the_vocabulary(tmp_path):
    headed(tmp_path / "model", LABELS, num_hidden_layers=2)
    texts = [f"w{n % 50} w{n // 50} w{n % 3}" for n in range(200)]
    data = write(tmp_path / "texts.jsonl", [{"text": text} for text in texts])
    # The texts are read after a training that computed in another precision.
    half = {"train": TRAIN | {"dtype": "bf16"}}
    compressed(tmp_path, data, plan__trim_from=0.0, plan__distill=half)
    steps = tmp_path / "out" / "steps"
    training = {row["text"] for row in lines_of(next(steps.rglob("text.train.jsonl")))}
    partition = Partition.read(str(tmp_path / "out" / "partition.safetensors"))
    assert len(training) == 200 - len(partition.selection) - len(partition.verification)
    assert (len(partition.selection), len(partition.verification)) == (20, 40)
    vocabulary = set(
        json.loads((next(steps.rglob("1x32-trimmed")) / "tokenizer.json").read_text())["model"][
            "vocab"
        ]
    )
    assert {f"w{n}" for n in range(50)} & vocabulary == {w for t in training for w in t.split()}
    selection = report_of(next(steps.rglob("selection")))
    verification = report_of(next(steps.rglob("verification-*")))
    assert {row.n for row in selection.evaluations} == {20}
    assert {row.n for row in verification.evaluations} == {40}


def test_kept_outputs_give_the_scores_that_are_computed_again(tmp_path):
    data = classifier(tmp_path)[0]
    compressed(tmp_path, data)
    compressed(tmp_path, data, goal__max_drop=1.0, goal__max_mb=100.0, price_per_hour=0.36)
    out = tmp_path / "out"
    report = report_of(out)
    answer = report.compression
    assert (answer.chosen, answer.verification.look) == ("onnx", 2)
    assert "97.5% interval" in (out / "report.md").read_text("utf-8")
    assert "At 0.36 an hour, a million texts cost" in answer.sentence
    assert report.data_versions.keys() == {data.name}
    verified = report_of(next(out.rglob("verification-onnx")))
    models = (tmp_path / "model", next(out.rglob("onnx/export.json")).parent)
    sets = {"data.partition": out / "partition.safetensors", "resamples": 2000}
    sets |= {"data.split": "verification", "confidence": 0.975, "data.max_length": 24}
    words = [word for key, value in sets.items() for word in ("--set", f"{key}={value}")]
    succeeds("evaluate", *models, "--data", data, *words, "-o", tmp_path / "computed")
    computed = report_of(tmp_path / "computed")
    assert [e.metrics for e in computed.evaluations] == [e.metrics for e in verified.evaluations]
    ends = [[(c.low, c.high) for c in one.comparisons] for one in (computed, verified)]
    assert ends[0] == ends[1]
    front = kdcli("compress", "--front", out)
    assert front.exit_code == 0
    assert all(row.name[:20] in front.stdout for row in answer.candidates)


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
    assert (
        f"it predicts spam, ham, but your data has calm, brisk; the first is in {data}:1"
    ) in message
    assert "--set data.labels=teacher" in message
    headed(tmp_path / "wider", ("spam", "ham", "news"), num_hidden_layers=2)
    for model in (tmp_path / "wider", "demo-classifier"):
        message = refused(tmp_path, "compress", model, "--data", data, "--max-drop", "1")
        assert "do not fit the head of" in message
        assert "it predicts " in message
        assert f"but your data has calm, brisk; the first is in {data}:1" in message
        assert "--set data.labels=teacher" in message
    names = ["spam", "z", "ham", "e", "d", "c", "b", "a"]
    several = [{"text": f"w{n}", "label": names[n % 8]} for n in range(40)]
    data = write(tmp_path / "several.jsonl", several)
    message = refused(tmp_path, "evaluate", tmp_path / "model", "--data", data)
    assert f"your data has z, e, d, c, b and 1 more; the first is in {data}:2" in message
    few = write(tmp_path / "few.jsonl", [{"text": f"w{n}"} for n in range(4)])
    message = refused(tmp_path, "compress", tmp_path / "model", "--data", few, "--max-drop", "1")
    assert "4 rows, too few" in message
    assert "give --data with at least 200 rows; they need no labels" in message
    one = write(tmp_path / "one.jsonl", [{"text": "w1"}])
    message = refused(tmp_path, "compress", tmp_path / "model", "--data", one, "--max-drop", "1")
    assert "the data has 1 row, too few" in message


def test_rows_that_trained_the_model_are_refused(tmp_path):
    data, _, _ = classifier(tmp_path)
    hashes = text_hashes([row["text"] for row in lines_of(data)])
    write_training_rows(tmp_path / "model", hashes)
    wanted = "at least 200 rows that did not train the model; they need no labels"
    with pytest.raises(UsageError, match="rows, 0 of them did not train") as refusal:
        compressed(tmp_path, data)
    assert wanted in refusal.value.hint


def test_a_run_without_a_directory_has_the_name_of_the_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data, _, _ = classifier(tmp_path)
    made = Fakes({}, in_earnest=True, ends=("onnx", Killed()))
    with pytest.raises(Killed):
        made.compress(**keys_of(tmp_path, data))
    assert (tmp_path / "runs" / "compress-model-texts" / "recipe.yaml").is_file()


def test_a_model_is_not_compared_with_itself(tmp_path):
    data, _, _ = classifier(tmp_path)
    alone = ("evaluate", tmp_path / "model", "--data", data)
    message = refused(tmp_path, *alone)
    assert "without labels, model would only be compared with itself" in message
    file = tmp_path / "predictions.jsonl"
    succeeds(*alone, "--predictions", file, "-o", tmp_path / "out")
    assert len(lines_of(file)) == len(lines_of(data))


@pytest.mark.parametrize(
    ("row", "task"),
    [
        ({"text": "buy now", "label": ["SPAM"]}, "own"),
        ({"sentence1": "one", "sentence2": "two", "score": 0.5}, "own"),
        ({"query": "who", "passage": "she", "label": 1}, "rerank"),
    ],
)
def test_a_model_with_one_output_is_a_reranker_if_the_rows_have_queries(tmp_path, row, task):
    model = str(headed(tmp_path / "model", num_labels=1))
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(row), encoding="utf-8")
    assert known_task(model, str(rows)) == task
    assert known_task(model, None) == "rerank"
