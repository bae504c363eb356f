"""`kdcli distill --task` from end to end on tiny models: what its stages leave, repeat and
share."""

import json
import shlex

import numpy as np
import own_files
import pytest
import torch
from encoders import foreign_tokenizer, on_disk, tiny_encoder
from own_files import (
    kdcli,
    log_of,
    refused,
    report_of,
    said_by,
    same_weights,
    succeeds,
    weights,
)
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from kdcli.losses import inputs_of, methods, on_tasks
from kdcli.recipe.resolve import read_recipe, resolve
from kdcli.recipe.sections import RunOptions
from kdcli.report.schema import FINETUNED
from kdcli.run.context import RunContext, cpu_session
from kdcli.verbs.distill.run import open_outputs
from kdcli.verbs.distill.settings import DistillRecipe
from kdcli.verbs.distill.task_stages import TaskDistillation

QUICK = shlex.split(
    "--max-steps 8 --batch-size 16 --lr 1e-3 --dtype fp32 --set intermediate.lr=2e-4 "
    "--set data.max_length=24 --set data.stride=4 --set train.eval_every=4 "
    "--set train.log_every=1 --set train.checkpoint_every=3 "
    "--set measure.latency=false "
    "--set 'undistilled.overrides.train={log_every: 1, checkpoint_every: 3}'"
)
STUDENT, ALONE = "student", "student undistilled"
ON_TASKS = [m for m in methods() if "task" in inputs_of(m)]


@pytest.fixture(scope="module")
def done(asked, tmp_path_factory):
    """The directory of a distillation by TinyBERT, and the command's result."""
    out = tmp_path_factory.mktemp("done") / "out"
    return out, succeeds(*asked(), "-o", out)


@pytest.mark.parametrize("asked_kind", [None, "multi"])
def test_rows_without_labels_may_have_several(tmp_path, asked_kind):
    teacher = own_files.headed(tmp_path / "teacher", ("a", "b", "c"))
    data = own_files.write(tmp_path / "a.jsonl", [{"text": f"w{n} w3"} for n in range(40)])
    kind = ["--set", f"data.columns.kind={asked_kind}"] if asked_kind else []
    arguments = [teacher, "--task", "own", "--data", data, "--to", "1x16", *QUICK, *kind]
    own_files.succeeds("distill", *arguments, "--max-steps", 2, "--dry-run")
    own_files.succeeds("distill", *arguments, "--max-steps", 2, "-o", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text("utf-8"))
    problem = {None: "single_label_classification", "multi": "multi_label_classification"}
    assert config["problem_type"] == problem[asked_kind]


def scores(folder):
    return {e.model: e.metrics for e in report_of(folder).evaluations}


def test_what_a_run_leaves(done):
    out, result = done
    stages = {"start", "intermediate", "student-undistilled"}
    assert {p.name for p in out.iterdir()} == own_files.RUN | own_files.TUNED | stages
    report = report_of(out)
    assert list(report.cards) == ["teacher", STUDENT]
    assert [e.model for e in report.evaluations] == ["teacher", STUDENT, ALONE]
    assert list(report.quality["own"]) == ["teacher", STUDENT, ALONE]
    assert report.quality["own"]["teacher"]["accuracy"] > 0.9
    (decision,) = report.decisions
    assert (decision.model, decision.baseline) == (STUDENT, "teacher")
    assert sum(each.count for each in decision.classes) == decision.n
    assert report.training.steps == 8
    assert any(note.startswith(f"{ALONE}: started from the same weights") for note in report.notes)
    assert any(
        note.startswith("the student has accuracy ") and "; answering " in note
        for note in report.notes
    )
    for shown in (result.stdout, (out / "report.md").read_text("utf-8")):
        assert ALONE in shown
    first, second = log_of(out / "intermediate"), log_of(out)
    assert all(set(r["terms"]) == {"embedding", "hidden", "attention"} for r in first if r["step"])
    assert first[-1]["held_out"]["loss"] < first[0]["held_out"]["loss"]
    assert all(set(r["terms"]) == {"kd"} for r in second if r["step"])
    assert all("accuracy" in r["metrics"] for r in second if "held_out" in r)
    assert [len({r["step"] for r in log}) for log in (first, second)] == [9, 9]
    # The student is a stock model without projections.
    model = AutoModelForSequenceClassification.from_pretrained(out)
    assert (model.config.num_hidden_layers, model.config.hidden_size) == (2, 16)
    assert sorted(weights(out)) == sorted(model.state_dict())
    for folder in (out, out / "intermediate", out / "start"):
        assert not [key for key in weights(folder) if "projection" in key]
        assert "kd_capture" not in (folder / "config.json").read_text("utf-8")


@pytest.mark.parametrize("method", ["tinybert", "pkd", "soft-targets"])
def test_dropout_is_the_students_in_every_stage_with_a_teacher(
    asked, tmp_path, monkeypatch, method
):
    rates = []

    def spy(build):
        def stage(self):
            job = build(self).job
            rates.append({m.p for module in job.modules.values() for m in dropouts(module)})
            raise KeyboardInterrupt

        return stage

    def dropouts(module):
        return (m for m in module.modules() if isinstance(m, torch.nn.Dropout))

    monkeypatch.setattr(TaskDistillation, "build", spy(TaskDistillation.build))
    options = ["--method", method, "--set", "student.dropout=0.25", "--max-steps", "1"]
    kdcli(*asked(), *options, "-o", tmp_path / "out")
    assert rates == [{0.25}]


def test_dropout_is_the_students_where_outputs_teach(tmp_path):
    rows = [
        {"query": f"w{n % 40} w{n // 40}", "positive": f"w{n % 40}", "negative": f"w{n % 7 + 41}"}
        for n in range(80)
    ]
    data = own_files.write(tmp_path / "lists.jsonl", rows)
    teacher = own_files.headed(tmp_path / "teacher", num_labels=1)
    keys = {"task": "rerank", "teacher": str(teacher), "data.source": str(data)}
    keys |= {"student.to": ["1x32"], "student.dropout": 0.25, "train.max_steps": 1}
    resolved = resolve(DistillRecipe, recipe=None, options=keys)
    context = RunContext(resolved, RunOptions(dry_run=True), cpu_session(), tmp_path / "out")
    (stage,) = open_outputs(context).stages
    modules = stage.build().job.modules["model"].modules()
    assert {m.p for m in modules if isinstance(m, torch.nn.Dropout)} == {0.25}


def test_each_stage_starts_where_the_one_before_ended(done):
    out, _ = done
    before, between, after = (weights(out / name) for name in ("start", "intermediate", "."))
    query = "encoder.layer.0.attention.self.query.weight"
    assert not torch.equal(before[query], between[query])
    moved = (between[query] - after[f"bert.{query}"]).abs().max()
    assert 0 < moved < 8 * 1e-3 * 1.5, "8 steps of Adam at 1e-3 from where the stage before ended"


def test_the_student_without_a_teacher_is_what_fine_tuning_makes_of_it(done, asked, tmp_path):
    out, _ = done
    assert not (out / "student-undistilled" / "model.safetensors").exists()
    given = asked()
    # Rate and batch are those of `finetune`, steps and data those of the distillation.
    options = shlex.split(
        "--max-steps 8 --dtype fp32 --set data.max_length=24 --set measure.latency=false"
    )
    data = given[given.index("--data") + 1]
    succeeds(
        "finetune",
        out / "start",
        *shlex.split(f"--task own --data {data}"),
        *options,
        "-o",
        tmp_path / "alone",
    )
    assert scores(tmp_path / "alone") == {FINETUNED: scores(out)[ALONE]}


def test_the_teachers_signals_are_cached_and_gone_when_they_are_not_needed(done, asked, tmp_path):
    out, result = done
    assert "computing the teacher's signals for 96 rows" in said_by(result)
    assert not (out / "signals").exists()
    succeeds(*asked(), "-o", tmp_path / "again")
    assert same_weights(out, tmp_path / "again"), "the same command gives the same bits"
    without = succeeds(
        *asked(),
        *shlex.split(f"--set cache_gb=0 --set undistilled.use=false -o {tmp_path}/without"),
    )
    assert "signals" not in said_by(without)
    a, b = weights(out / "intermediate"), weights(tmp_path / "without" / "intermediate")
    # Of Adam's steps only the sign is certain where a gradient is near zero; a step is 1e-3 at
    # most.
    assert all((a[k] - b[k]).abs().mean() < 2e-4 for k in a), "they are rounded to bfloat16"
    assert not all(torch.equal(a[k], b[k]) for k in a)
    assert [e.model for e in report_of(tmp_path / "without").evaluations] == ["teacher", STUDENT]
    assert not (tmp_path / "without" / "student-undistilled").exists()
    small = kdcli(
        *asked(),
        *shlex.split(f"--set cache_gb=1e-7 --set undistilled.use=false -o {tmp_path}/small"),
    )
    assert "the teacher's signals are not cached: they would take" in said_by(small)
    assert same_weights(tmp_path / "small", tmp_path / "without")


@pytest.mark.parametrize("method", ON_TASKS)
def test_every_method_trains(asked, tmp_path, method):
    out = tmp_path / "out"
    succeeds(*asked(), "--method", method, "--set", "undistilled.use=false", "-o", out)
    recipe, (stage, kd) = report_of(out).recipe, on_tasks(method)
    assert {k: recipe["kd"][k] for k in kd} == kd, "as its authors had it"
    assert (out / "intermediate").exists() == (stage == "separate")
    terms = [r["terms"] for r in log_of(out) if r["step"]]
    added = {"pkd": {"patience"}}.get(method, set()) | ({"task"} if kd["weight"] < 1 else set())
    assert all(set(t) == {"kd"} | added for t in terms)
    assert all(t["kd"] > 0 and t.get("patience", 1) > 0 for t in terms)
    if stage == "separate":
        log = log_of(out / "intermediate")
        assert log[-1]["held_out"]["loss"] < log[0]["held_out"]["loss"]
    model = AutoModelForSequenceClassification.from_pretrained(out)
    assert sorted(weights(out)) == sorted(model.state_dict())


@pytest.mark.parametrize(
    ("settings", "there", "terms"),
    [
        (["--set", "stage=none"], False, {"kd"}),
        (["--set", "stage=joint"], False, {"kd", "embedding", "hidden", "attention"}),
    ],
)
def test_the_objective_may_be_left_out_or_joined(asked, tmp_path, settings, there, terms):
    out = tmp_path / "out"
    succeeds(*asked(), *settings, "--set", "undistilled.use=false", "-o", out)
    assert (out / "intermediate").exists() == there
    assert all(set(r["terms"]) == terms for r in log_of(out) if r["step"])
    assert AutoModelForSequenceClassification.from_pretrained(out).config.num_hidden_layers == 2


def test_every_stage_has_the_measured_layers(asked, tmp_path):
    measured = ["--set", "student.layers=measured", "--set", "undistilled.use=false"]
    result = succeeds(*asked(), *measured, "-o", tmp_path / "out")
    recipes = [
        read_recipe(str(folder / "recipe.yaml"), None)
        for folder in (tmp_path / "out", tmp_path / "out" / "intermediate")
    ]
    first, second = recipes[0]["student"]["layers"]
    assert recipes[1]["student"]["layers"] == [first, second]
    assert f"initialised from teacher layers {first}, {second}" in said_by(result)


def test_the_student_may_be_brought(done, asked, tmp_path):
    brought = done[0] / "start"
    arguments = [*asked(to=None), "--student", brought]
    succeeds(*arguments, "-o", tmp_path / "out")
    assert not (tmp_path / "out" / "start").exists()
    assert same_weights(tmp_path / "out", done[0])
    assert "not 3x16" in refused(tmp_path, *arguments, "--to", "3x16")


@pytest.fixture
def stranger(tmp_path):
    """An encoder of another type, whose tokenizer has other numbers of the same words."""
    narrow = tiny_encoder("distilbert", dim=16, n_heads=2, hidden_dim=32, initializer_range=0.1)
    return on_disk(narrow, tmp_path / "stranger", foreign_tokenizer())


FEW = ["--method", "soft-targets", "--set", "student.dropout=0.0"]


def test_a_teacher_of_other_tokens_teaches_by_its_logits(asked, stranger, tmp_path):
    out, kind = tmp_path / "out", "score"
    succeeds(*asked(kind, to=None), *FEW, "--student", stranger, "-o", out)
    steps = [row["terms"] for row in log_of(out) if row["step"]]
    assert all(set(terms) == {"task", "kd"} for terms in steps)
    assert set(log_of(out)[0]["held_out"]) >= {"task", "kd"}
    report = report_of(out)
    assert {"teacher", "student"} <= {e.model for e in report.evaluations}
    # Each is judged as it reads the rows itself.
    teacher = next(e.metrics for e in report.evaluations if e.model == "teacher")
    assert teacher == pytest.approx(next(e.metrics for e in report_of(asked(kind)[1]).evaluations))
    assert AutoTokenizer.from_pretrained(out).get_vocab() == foreign_tokenizer().get_vocab()
    assert AutoModelForSequenceClassification.from_pretrained(out).config.model_type == "distilbert"


def test_logits_are_matched_to_rows_of_other_tokens(asked, tmp_path):
    """The same weights under renumbered words say the same, so both losses are those of a teacher
    of equal tokens."""
    teacher = asked()[1]
    renumbered = tmp_path / "renumbered"
    model = AutoModelForSequenceClassification.from_pretrained(teacher)
    ours, theirs = (
        AutoTokenizer.from_pretrained(teacher).get_vocab(),
        foreign_tokenizer().get_vocab(),
    )
    table = model.get_input_embeddings().weight
    with torch.no_grad():
        was = table.clone()
        for word, number in theirs.items():
            table[number] = was[ours[word]]
    on_disk(model, renumbered, foreign_tokenizer())
    start = own_files.encoder(tmp_path / "start")
    more = [*FEW, "--set", "undistilled.use=false", "--student", start]
    alike = asked(to=None)
    succeeds(*alike, *more, "-o", tmp_path / "alike")
    succeeds(alike[0], renumbered, *alike[2:], *more, "-o", tmp_path / "renumbered-run")
    own_files.same_logs(tmp_path / "alike", tmp_path / "renumbered-run", rel=1e-4)
    assert "with their own tokenizer" in " ".join(report_of(tmp_path / "renumbered-run").notes)
    also = ["--also-teacher", renumbered, *FEW, "--set", "undistilled.use=false"]
    succeeds(*alike, *also, "--student", start, "-o", tmp_path / "both")
    own_files.same_logs(tmp_path / "alike", tmp_path / "both", rel=1e-4)


def test_soft_labels_take_the_place_of_a_teacher(asked, tmp_path):
    """Its probabilities in a file, by order or by text, teach as the teacher itself."""
    teacher = asked()[1]
    start = own_files.encoder(tmp_path / "start")
    more = ["--set", "undistilled.use=false", "--set", "student.dropout=0.0", "--student", start]
    succeeds(*asked(to=None), "--method", "soft-targets", *more, "-o", tmp_path / "taught")
    rows = own_files.lines_of(teacher.parent / "data" / "train.jsonl")
    model = AutoModelForSequenceClassification.from_pretrained(teacher).eval()
    tokenizer = AutoTokenizer.from_pretrained(teacher)
    with torch.no_grad():
        encoded = tokenizer(
            [row["text"] for row in rows], padding=True, truncation=True, return_tensors="pt"
        )
        p = model(**encoded).logits.softmax(-1).double().numpy()
    np.save(tmp_path / "soft.npy", p)
    names = [model.config.id2label[n] for n in range(2)]
    by_text = [
        {"text": row["text"], "probabilities": dict(zip(names, map(float, each), strict=True))}
        for row, each in zip(rows, p, strict=True)
    ]
    own_files.write(tmp_path / "soft.jsonl", by_text[::-1])
    given = [part for part in asked(to=None) if part != teacher]
    for name in ("soft.npy", "soft.jsonl"):
        out = tmp_path / name.replace(".", "-")
        succeeds(*given, *more, "--soft-labels", tmp_path / name, "-o", out)
        steps, taught = (
            [r["terms"] for r in log_of(o) if r["step"]] for o in (out, tmp_path / "taught")
        )
        for ours, theirs in zip(steps, taught, strict=True):
            assert ours == {key: pytest.approx(value, abs=2e-4) for key, value in theirs.items()}
        assert any(name in note for note in report_of(out).notes)
        assert [e.model for e in report_of(out).evaluations] == ["student"]


def test_several_teachers_count_alike(asked, teacher_of, tmp_path):
    other = own_files.headed(tmp_path / "other", tuple(sorted(own_files.NAMES)), seed=3)
    few = shlex.split("--method soft-targets --set undistilled.use=false --set student.dropout=0.0")
    first = {}
    for name, teachers in {"one": [], "two": [other], "twice": [teacher_of("class")]}.items():
        also = [part for teacher in teachers for part in ("--also-teacher", teacher)]
        succeeds(*asked(), *few, *also, "-o", tmp_path / name)
        first[name] = log_of(tmp_path / name)[0]["held_out"]
    assert first["twice"] == pytest.approx(first["one"])
    assert first["two"]["task"] == pytest.approx(first["one"]["task"])
    assert first["two"]["kd"] != pytest.approx(first["one"]["kd"])
    assert same_weights(tmp_path / "one", tmp_path / "twice") or scores(tmp_path / "one") == scores(
        tmp_path / "twice"
    )
    assert f"teacher: {other}" in report_of(tmp_path / "two").notes
