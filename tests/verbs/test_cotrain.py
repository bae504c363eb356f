"""`kdcli cotrain` end to end on tiny models: what it writes, resumes, compares and refuses."""

import functools
import shlex

import own_files
import pytest
import torch
from encoders import on_disk, tiny_config, tiny_tokenizer
from own_files import log_of, refused, report_of, same_weights, weights
from transformers import (
    AutoModelForMaskedLM,
    AutoTokenizer,
)

from kdcli.report.text import number

QUICK = shlex.split(
    "--max-steps 6 --batch-size 8 --dtype fp32 --set data.max_length=16 "
    "--set train.warmup_fraction=0.2 --set train.eval_every=3 --set train.log_every=1 "
    "--set train.checkpoint_every=2 --set data.held_out_blocks=8 "
    "--set measure.latency=false"
)
ON_TASK = [*own_files.QUICK, "--max-steps", "8", "--set", "train.eval_every=4"]


succeeds = functools.partial(own_files.succeeds, "cotrain")


@pytest.fixture
def base(tmp_path):
    torch.manual_seed(0)
    model = AutoModelForMaskedLM.from_config(
        tiny_config("bert", num_hidden_layers=4, initializer_range=0.3)
    )
    return on_disk(model, tmp_path / "base")


@pytest.fixture
def given(base, text_file):
    return ["3x32", "2x16", "--base", base, "--data", text_file, *QUICK]


@pytest.fixture
def own_task(tmp_path):
    return own_files.own(tmp_path / "own", "class", n=64, judged=24)


@pytest.mark.drawn
def test_what_a_run_leaves(given, tmp_path):
    out = tmp_path / "out"
    result = succeeds(*given, "-o", out)
    assert {p.name for p in out.iterdir()} == own_files.RUN | {
        "teacher",
        "student",
        "standalone",
    }
    assert {p.name for p in (out / "standalone").iterdir()} == own_files.REPORT | {
        "teacher",
        "student",
    }
    for name, shape in (("teacher", (3, 32)), ("student", (2, 16))):
        model = AutoModelForMaskedLM.from_pretrained(out / name)
        assert (model.config.num_hidden_layers, model.config.hidden_size) == shape
        assert AutoTokenizer.from_pretrained(out / name).get_vocab() == tiny_tokenizer().get_vocab()
        assert "kd_capture" not in (out / name / "config.json").read_text()
        card = (out / name / "README.md").read_text("utf-8")
        assert all(
            part in card for part in ("AutoModelForMaskedLM", "3x32 and 2x16, co-distillation")
        )
    report = report_of(out)
    assert (report.command, report.training.steps, report.training.tokens) == (
        "cotrain",
        6,
        6 * 8 * 16,
    )
    assert list(report.cards) == ["teacher", "teacher standalone", "student standalone", "student"]
    losses = report.quality["held-out MLM loss"]
    assert set(losses) == set(report.cards)
    # The table shows where both curves end; both runs start with the same models and masks.
    alone = report_of(out / "standalone")
    first, last = (p.held_out for p in (report.curve[0], report.curve[-1]))
    assert {name: set(terms) for name, terms in last.items()} == {
        "teacher": {"hard", "soft"},
        "student": {"hard", "soft"},
    }
    page = (out / "report.html").read_text("utf-8")
    for name in ("teacher", "student"):
        ours, theirs = losses[name]["loss"], losses[f"{name} standalone"]["loss"]
        assert (
            ours
            == last[name]["hard"]
            < first[name]["hard"]
            == alone.curve[0].held_out[name]["hard"]
        )
        assert theirs == alone.curve[-1].held_out[name]["hard"] != ours
        word = "better" if theirs > ours else "worse"
        assert f"{abs(theirs - ours):.4f} {word} with the other model" in " ".join(report.notes)
        assert f"{name}: held-out loss against the labels, from step " in page
        assert all(f"→ {loss:.4f}" in page for loss in (ours, theirs))
    assert "held-out teacher/hard" in page
    assert report.compared_runs == {"standalone": alone.curve}
    assert "kdcli cotrain: 3x32 and 2x16, co-distillation" in result.stdout


def test_without_any_model_a_tokenizer_is_trained(text_file, tmp_path):
    out = tmp_path / "out"
    options = [
        "2x16",
        "1x16",
        "--vocab-size",
        "60",
        "--data",
        text_file,
        "--no-standalone",
        *QUICK,
        "-o",
        out,
    ]
    succeeds(*options)
    assert {p.name for p in out.iterdir() if p.is_dir()} == {"teacher", "student"}
    words = [
        AutoTokenizer.from_pretrained(out / name).get_vocab() for name in ("teacher", "student")
    ]
    assert words[0] == words[1]
    assert weights(out / "student")["bert.embeddings.word_embeddings.weight"].shape == (
        len(words[0]),
        16,
    )
    # The recipe alone repeats it.
    succeeds("--recipe", out / "recipe.yaml", "--dtype", "fp32", "-o", tmp_path / "again")
    assert same_weights(out / "student", tmp_path / "again" / "student")


def test_community_students_are_saved_and_the_better_one_is_named(base, text_file, tmp_path):
    out = tmp_path / "out"
    before = {p: p.read_bytes() for p in base.iterdir()}
    options = ["2x32", "2x32", "--community", base, "--data", text_file, *QUICK]
    succeeds(*options, "-o", out)
    assert {p: p.read_bytes() for p in base.iterdir()} == before
    report = report_of(out)
    assert {p.name for p in out.iterdir() if p.is_dir()} == {"student-1", "student-2", "standalone"}
    names = ["teacher", "student-1", "student-1 standalone", "student-2 standalone", "student-2"]
    assert list(report.cards) == names
    assert report.cards["teacher"].layers == 4
    losses = {
        name: report.quality["held-out MLM loss"][name]["loss"]
        for name in ("student-1", "student-2")
    }
    assert f"{min(losses, key=losses.get)} is the better student" in " ".join(report.notes)
    for name in ("student-1", "student-2"):
        assert "community" in report.curve[-1].held_out[name]
    assert {m.name: (m.role, m.baseline, m.of) for m in report.models} == {
        "teacher": ("teacher", None, None),
        "student-1": ("peer", "student-1 standalone", None),
        "student-1 standalone": ("baseline", None, "student-1"),
        "student-2 standalone": ("baseline", None, "student-2"),
        "student-2": ("peer", "student-2 standalone", None),
    }
    # Alone, each still learns from the frozen teacher.
    assert set(log_of(out / "standalone")[1]["terms"]) == {
        f"student-{n}/{t}" for n in (1, 2) for t in ("hard", "community")
    }
    succeeds(
        *options,
        *shlex.split(f"--no-standalone --set community.printed_order=true -o {tmp_path}/printed"),
    )
    assert not same_weights(out / "student-1", tmp_path / "printed" / "student-1")


@pytest.fixture
def on_task(model_dir, own_task):
    return [model_dir, "2x32", "--task", "own", "--data", own_task, *ON_TASK]


def test_on_a_task_the_teacher_alone_is_the_result_of_finetune(on_task, model_dir, tmp_path):
    succeeds(*on_task, "--mode", "standalone", "-o", tmp_path / "out")
    own = ["--task", "own", "--data", tmp_path / "own"]
    own_files.succeeds("finetune", model_dir, *own, *ON_TASK, "-o", tmp_path / "ft")
    one, other = weights(tmp_path / "out" / "teacher"), weights(tmp_path / "ft")
    assert all(torch.equal(one[k], other[k]) for k in other)


def test_a_teacher_that_loses_its_score_is_named_with_its_start(on_task, model_dir, tmp_path):
    teacher, out = tmp_path / "teacher", tmp_path / "out"
    task = on_task[2:]
    own_files.succeeds("finetune", model_dir, *task, "--max-steps", "40", "-o", teacher)
    # The teacher learns from a student that knows nothing.
    quick = ["--weights", "1:0:0:1", "--lr", "3e-2", "--no-standalone"]
    succeeds(teacher, "2x16", *task, *quick, "-o", out)
    report = report_of(out)
    notes = "\n".join(report.notes)
    (before,) = report_of(teacher).evaluations
    (after, _) = report.evaluations
    assert after.metrics["accuracy"] < before.metrics["accuracy"]
    start = f"the teacher had accuracy {number(before.metrics['accuracy'])} before the training and"
    assert f"{start} loses " in notes
    assert notes.count("lower the learning rate (--lr)") == 1
    for name in ("teacher", "student"):
        assert f"the {name} has accuracy " in notes
    assert "the student had" not in notes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--weights", "1:1:1"], "weights must be four numbers of at least 0, got 1:1:1"),
        (["--temperature", "0"], "'temperature' must be greater than 0"),
        (["--mode", "both"], "'mode' must be"),
        (["--set", "data.mask.share=1.0"], "'data.mask.share' must be less than 1"),
        (["--batch-size", "100000"], "less than one batch of 100000"),
        (["--set", "data.max_length=300"], "the teacher reads at most 160 tokens"),
        (["--base", "UNBUILT"], "UNBUILT: kdcli cannot use a model of type 'bert': a small"),
        (["--task", "own", "--community", "c/d"], "--community belongs to co-training on text"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(given, tmp_path, arguments, message):
    unbuilt = on_disk(tiny_config("bert", hidden_act="planted.run"), tmp_path / "UNBUILT")
    assert message in refused(
        tmp_path, "cotrain", *given, *(unbuilt if a == "UNBUILT" else a for a in arguments)
    )
