"""`kdcli distill --task` with what comes before its stages: text, copies with other words; and
several variants."""

import json
import shlex

import pytest
import torch
from encoders import tiny_config
from own_files import (
    kdcli,
    lines_of,
    log_of,
    refused,
    report_of,
    said_by,
    same_weights,
    succeeds,
    times,
    weights,
    write,
)
from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer

from kdcli.data.demo import demo_task
from kdcli.recipe.resolve import ablations

QUICK = shlex.split(
    "--max-steps 4 --batch-size 8 --lr 1e-3 --dtype fp32 --set intermediate.lr=1e-3 "
    "--set data.max_length=24 --set train.eval_every=4 --set train.log_every=1 "
    "--set train.checkpoint_every=2 --set measure.latency=false "
    "--set undistilled.use=false"
)
ON_TEXT = ["--set", "general.overrides.data={max_length: 16, held_out_blocks: 8}", "--set"]
ON_TEXT.append(
    "general.overrides.train={max_steps: 4, batch_size: 8, log_every: 1, checkpoint_every: 2}"
)


@pytest.fixture(scope="module")
def masked_teacher(teacher_of, tmp_path_factory):
    folder = tmp_path_factory.mktemp("masked")
    torch.manual_seed(0)
    AutoModelForMaskedLM.from_config(tiny_config("bert", num_hidden_layers=4)).save_pretrained(
        folder
    )
    AutoTokenizer.from_pretrained(teacher_of("class")).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def sentences(tmp_path_factory):
    """Sentences of the embedded language with their topics, and a teacher that was fine-tuned on
    them."""
    folder = tmp_path_factory.mktemp("sentences")
    for split, count in (("train", 24), ("validation", 24)):
        rows = [
            {"text": e.text, "label": f"topic-{e.label % 2}"}
            for e in demo_task("demo-topic", split)[:count]
        ]
        write(folder / "data" / f"{split}.jsonl", rows)
    quick = shlex.split(
        "--max-steps 6 --dtype fp32 --set measure.latency=false --set data.max_length=24"
    )
    succeeds(
        "finetune",
        "demo",
        *shlex.split(f"--task own --data {folder}/data"),
        *quick,
        "-o",
        folder / "teacher",
    )
    return ["distill", folder / "teacher", "--task", "own", "--data", folder / "data"]


def test_text_then_task_in_one_command(asked, text_file, tmp_path):
    out = tmp_path / "out"
    succeeds(*asked(), *ON_TEXT, "--corpus", text_file, "-o", out)
    assert not (out / "start").exists()
    of_text = report_of(out / "general")
    assert (of_text.recipe["method"], of_text.training.steps) == ("tinybert", 4)
    assert AutoModel.from_pretrained(out / "general").config.num_hidden_layers == 2
    assert "the student before the task: general" in report_of(out).notes
    shared = [k for k in weights(out / "general") if "attention" in k]
    before, after = weights(out / "general"), weights(out / "intermediate")
    assert max((before[k] - after[k]).abs().max() for k in shared) < 4 * 1e-3 * 1.5, (
        "it begins where text ended"
    )
    succeeds(*asked(), *ON_TEXT, "--corpus", text_file, "--seed", "1", "-o", out, "--overwrite")
    assert report_of(out / "general").recipe["train"]["seed"] == 1


def test_a_student_of_text_serves_several_tasks(asked, teacher_of, text_file, tmp_path):
    text = tmp_path / "text.yaml"
    text.write_text(
        f"verb: distill\nteacher: {teacher_of('class').parent / 'base'}\nmethod: "
        "tinybert\nassistant: none\n"
        f"student: {{to: [2x16], init: random}}\nloss: {{layers: top}}\n"
        f"data: {{source: {text_file}, max_length: 16, held_out_blocks: 8}}\n"
        "train: {max_steps: 4, batch_size: 8, log_every: 1, lr: 1e-3}\n"
    )
    given = ["--recipe", text, "--general", tmp_path / "general"]
    succeeds(*asked(), *given, "-o", tmp_path / "first")
    kept = times(tmp_path / "general")
    second = succeeds(*asked("score"), *given, "-o", tmp_path / "second")
    assert "general is done already" in said_by(second)
    # What was made for one task is not written over by the next, not even one that begins anew.
    succeeds(*asked("score"), *given, "-o", tmp_path / "second", "--overwrite")
    assert times(tmp_path / "general") == kept
    assert report_of(tmp_path / "second").recipe["loss"] == {"layers": "top"}
    # Alone it is the same student.
    succeeds(
        "distill",
        *shlex.split(
            f"--recipe {text} --dtype fp32 --set measure.latency=false -o {tmp_path}/alone"
        ),
    )
    assert same_weights(tmp_path / "alone", tmp_path / "general")
    for shape, more, message in (
        ("2x16", ["--set", "general.overrides.train.lr=5e-3"], "train.lr: was 0.001, is 0.005"),
        ("2x16", ["--seed", "1"], "train.seed: was 0, is 1"),
        ("3x16", [], 'student.to: was ["2x16"], is ["3x16"]'),
    ):
        assert message in refused(tmp_path, *asked(to=shape), *given, *more)
    assert times(tmp_path / "general") == kept


def test_a_general_stage_with_an_assistant(asked, text_file, tmp_path):
    out = tmp_path / "out"
    given = [*asked(to="2x16"), "--method", "minilm", *ON_TEXT, "--corpus", text_file, "-o", out]
    succeeds(*given, "--set", "general.overrides.assistant=3x16")
    assert list(report_of(out / "general").cards) == ["teacher", "assistant", "student"]
    assert report_of(out / "general" / "assistant-3x16").training.steps == 4


def test_pre_trained_distillation(asked, masked_teacher, text_file, tmp_path):
    out = tmp_path / "out"
    on_text = ["--set", "general.overrides.method=masked-lm", "--corpus", text_file, *ON_TEXT]
    given = [*asked(), "--method", "soft-targets", *on_text]
    succeeds(*given, "--set", f"general.teacher={masked_teacher}", "-o", out)
    assert all(set(r["terms"]) <= {"mlm"} for r in log_of(out / "general") if r["step"])
    assert all(set(r["terms"]) == {"task", "kd"} for r in log_of(out) if r["step"])
    assert not (out / "intermediate").exists()
    assert "masked" in refused(tmp_path, *given)


def test_a_dry_run_with_text_first_does_not_measure_layers(asked, text_file, tmp_path):
    given = [*asked(), *ON_TEXT, "--corpus", text_file, "--set", "student.layers=measured"]
    succeeds(*given, "--dry-run", "-o", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_copies_are_trained_on_as_the_recipe_says(sentences, tmp_path):
    quick = [
        *QUICK[2:],
        *shlex.split("--to 2x32@2 --epochs 1 --set intermediate.epochs=1.0 --augment"),
    ]
    few = [*quick, "--set", "augment.copies=3"]
    result = succeeds(*sentences, *few, "-o", tmp_path / "both")
    assert "72 copies of 24 examples, 3 of each" in said_by(result)
    assert "augment.model is not set, so all replacement words are nearest neighbours" in said_by(
        result
    )
    notes = " ".join(report_of(tmp_path / "both").notes)
    assert all(
        part in notes
        for part in ("of their words replaced", "neighbours by the model's input embeddings")
    )
    assert [log_of(tmp_path / "both" / name)[-1]["step"] for name in ("intermediate", ".")] == [
        12,
        12,
    ]
    succeeds(*sentences, *few, "--set", "augment.predict=false", "-o", tmp_path / "own")
    assert log_of(tmp_path / "own")[-1]["step"] == 3, (
        "the prediction stage reads the examples as they are"
    )
    assert same_weights(tmp_path / "both" / "intermediate", tmp_path / "own" / "intermediate"), (
        "the same copies again"
    )
    estimated = kdcli(*sentences, *few, "--dry-run", "--json", "-o", tmp_path / "no")
    assert [leg["steps"] for leg in json.loads(estimated.stdout)["legs"]] == [12, 12]


def test_the_copies_may_be_looked_at(sentences, tmp_path):
    file, options = (
        tmp_path / "copies.jsonl",
        ["--set", "augment.copies=2", "--set", "data.max_length=24"],
    )
    result = succeeds(*sentences, *options, "--augment-only", file)
    assert f"48 rows in {file}" in result.stdout.replace("\n", "")
    rows, own = lines_of(file), lines_of(sentences[-1] / "train.jsonl")
    assert [r["label"] for r in rows] == [r["label"] for r in own for _ in range(2)]
    assert sum(r["text"] != own[i // 2]["text"] for i, r in enumerate(rows)) > 40
    assert [p.name for p in tmp_path.iterdir()] == ["copies.jsonl"]
    before = file.read_bytes()
    assert "the file already exists" in refused(
        tmp_path, *sentences, *options, "--augment-only", file
    )
    again = kdcli(*sentences, *options, "--augment-only", file, "--overwrite", "--json")
    assert json.loads(again.stdout)["copies"] == 48
    assert file.read_bytes() == before, "the same copies for the same seed"
    succeeds(*sentences, *options, "--seed", "1", "--augment-only", file, "--overwrite")
    assert file.read_bytes() != before


@pytest.mark.parametrize("source", ["masked language model", "word vectors"])
def test_words_come_from_the_source_that_is_named(sentences, tmp_path, source):
    words = sorted(
        {word for row in lines_of(sentences[-1] / "train.jsonl") for word in row["text"].split()}
    )
    if source == "word vectors":
        file = tmp_path / "vectors.txt"
        vectors = torch.randn(len(words), 4, generator=torch.Generator().manual_seed(0)).tolist()
        file.write_text(
            "".join(f"{w} {' '.join(map(str, v))}\n" for w, v in zip(words, vectors, strict=True))
        )
        named, note = ["--glove", file], "vectors.txt"
    else:
        model = tmp_path / "masked"
        AutoModelForMaskedLM.from_config(
            AutoModel.from_pretrained(sentences[1]).config
        ).save_pretrained(model)
        AutoTokenizer.from_pretrained(sentences[1]).save_pretrained(model)
        named, note = ["--augment-model", model], "a masked language model's predictions"
    options = ["--set", "augment.copies=2", "--set", "data.max_length=24", *named]
    result = succeeds(*sentences, *options, "--augment-only", tmp_path / "copies.jsonl")
    assert note in " ".join(result.stdout.split())
    copies = lines_of(tmp_path / "copies.jsonl")
    assert len(copies) == 48
    assert source != "word vectors" or {w for row in copies for w in row["text"].split()} <= set(
        words
    )


def test_variants_are_compared_in_one_table(asked, tmp_path):
    listed = tmp_path / "mine.yaml"
    listed.write_text("map-top: {loss.layers: top}\nlabels: {kd.weight: 0.0}\n", "utf-8")
    out = tmp_path / "out"
    arguments = [*asked(), "--ablate", listed, "--set", "undistilled.use=true", "-o", out]
    result = succeeds(*arguments)
    assert list(report_of(out).quality["own"]) == [
        "teacher",
        "full",
        "student undistilled",
        "map-top",
        "labels",
    ]
    assert all(name in result.stdout for name in ("full", "map-top", "labels", "teacher"))
    for name in ("full", "map-top", "labels"):
        alone = report_of(out / name)
        metrics = next(e.metrics for e in alone.evaluations if e.model == "student")
        assert report_of(out).quality["own"][name] == metrics
    assert report_of(out / "map-top").recipe["loss"] == {"layers": "top"}
    assert all(set(r["terms"]) == {"task"} for r in log_of(out / "labels") if r["step"])
    assert not (out / "model.safetensors").exists()
    kept = times(out / "map-top")
    succeeds(*arguments, "--resume")
    assert times(out / "map-top") == kept
    succeeds(*asked(), "--set", "undistilled.use=true", "-o", tmp_path / "plain")
    assert same_weights(tmp_path / "plain", out / "full")
    succeeds(*asked(), "--ablate", listed, "--overwrite", "-o", out, "--seed", "1")
    assert [report_of(out / name).recipe["train"]["seed"] for name in ("map-top", "labels")] == [
        1,
        1,
    ]


@pytest.mark.long
def test_the_shipped_ablations_run(asked, tmp_path):
    succeeds(*asked(to="3x16"), "--ablate", "tinybert", "-o", tmp_path / "out")
    assert list(report_of(tmp_path / "out").quality["own"]) == ["teacher", *ablations("tinybert")]


@pytest.mark.usefixtures("short_demo")
def test_the_embedded_default(tmp_path):
    quiet = ["--dtype", "fp32", "--set", "measure.latency=false"]
    succeeds("finetune", "demo", "--task", "demo-topic", *quiet, "-o", tmp_path / "teacher")
    asked = ["distill", tmp_path / "teacher", "--task", "demo-topic", "--to", "2x64", *quiet]
    succeeds(*asked, "-o", tmp_path / "out")
    accuracy = {
        model: m["accuracy"]
        for model, m in report_of(tmp_path / "out").quality["demo-topic"].items()
    }
    assert list(accuracy) == ["teacher", "student", "student undistilled"]
    # The fitted start, fine-tuned alone, may do better in so few steps.
    assert accuracy["student"] > 0.7
