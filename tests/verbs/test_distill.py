"""`kdcli distill` from end to end on tiny models: what it leaves, resumes and refuses."""

import functools
import json
import os
import shlex
import sys
from types import SimpleNamespace

import own_files
import processes
import pytest
import torch
from forked import Child
from own_files import log_of, refused, report_of, said_by, weights
from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer

from kdcli.cli import main
from kdcli.engine import fan_out
from kdcli.engine.processes import take_slurm
from kdcli.verbs.distill.distill_recipes import distill_recipe
from kdcli.workloads.predictions import Features

QUICK = shlex.split(
    "--max-steps 6 --batch-size 8 --dtype fp32 --set data.max_length=16 "
    "--set train.warmup_fraction=0.2 --set train.eval_every=3 --set train.log_every=1 "
    "--set train.checkpoint_every=2 --set data.held_out_blocks=8 "
    "--set measure.latency=false"
)


kdcli, succeeds = (functools.partial(of, "distill") for of in (own_files.kdcli, own_files.succeeds))


@pytest.fixture
def given(model_dir, text_file):
    return [model_dir, "--data", text_file, *QUICK]


def test_what_a_run_leaves(given, tmp_path):
    out = tmp_path / "out"
    sets = [
        part
        for k in ("latency=true", "min_seconds=0.1", "min_runs=5")
        for part in ("--set", f"measure.{k}")
    ]
    result = succeeds(*given, "--to", "2x32", "-o", out, *sets)
    assert {p.name for p in out.iterdir()} == own_files.RUN | own_files.MODEL
    student = AutoModel.from_pretrained(out)
    assert (student.config.num_hidden_layers, student.config.hidden_size) == (2, 32)
    assert "kd_capture" not in (out / "config.json").read_text()
    assert AutoTokenizer.from_pretrained(out)("w1 w2")["input_ids"]
    report = report_of(out)
    assert list(json.loads((out / "report.json").read_text()))[:4] == [
        "schema",
        "command",
        "status",
        "focus",
    ]
    assert (report.training.steps, report.training.tokens) == (6, 6 * 8 * 16)
    losses = report.quality["held-out loss"]
    assert losses["student"]["loss"] < losses["student undistilled"]["loss"]
    assert [(r.model, r.batch_size) for r in report.latency] == [
        (m, b) for b in (1, 8) for m in ("teacher", "student")
    ]
    assert [r.speedup and r.speedup.baseline for r in report.latency] == [None, "teacher"] * 2
    assert [(m.name, m.role, m.baseline, m.of) for m in report.models] == [
        ("teacher", "teacher", None, None),
        ("student", "student", "teacher", None),
        ("student undistilled", "untrained", None, "student"),
    ]
    assert report.cards["student"].params_total == sum(p.numel() for p in student.parameters())
    assert "teacher" in result.stdout
    assert "2x32" in result.stdout


def test_unreached_weights_keep_their_values_and_are_named(given, model_dir, tmp_path):
    result = kdcli(*given, "--to", "2x32", "--set", "student.init=copied", "-o", tmp_path / "out")
    before, after = weights(model_dir), weights(tmp_path / "out")
    dense, query = (
        "encoder.layer.{}.output.dense.weight",
        "encoder.layer.{}.attention.self.query.weight",
    )
    assert torch.equal(after[dense.format(1)], before[dense.format(3)])
    assert not torch.equal(after[query.format(1)], before[query.format(3)])
    assert "the loss does not use" in said_by(result)
    assert "encoder.layer.1.output.dense" in result.stderr


@pytest.mark.parametrize(
    ("more", "terms"),
    [
        (["--to", "3x16", "--set", "loss.hidden=mse"], {"attention", "value", "hidden"}),
        (
            ["--to", "3x16@2", "--method", "minilmv2", "--set", "loss.relation_heads=8"],
            {"query", "key", "value"},
        ),
        (["--to", "2x32", "--set", "data.pack_isolated=true"], {"attention", "value"}),
    ],
)
def test_projections_relation_heads_and_isolated_texts_train(given, tmp_path, more, terms):
    # A student of a random teacher starts too near to it to come nearer in a few steps.
    succeeds(*given, *more, "--set", "student.init=random", "-o", tmp_path / "out")
    log = log_of(tmp_path / "out")
    assert log[-1]["held_out"]["loss"] < log[0]["held_out"]["loss"]
    assert set(log[-1]["terms"]) == terms


def test_a_masked_language_model_term_gives_student_and_assistant_a_head(given, tmp_path):
    term = [*given, "--to", "2x16", "--set", "loss.masked_lm_weight=0.5", "-o", tmp_path / "out"]
    succeeds(*term, "--dry-run")
    said = said_by(succeeds(*term))
    assert (
        "assistant: head initialised at random: the teacher has no masked-language-model head"
        in said
    )
    assert "training a teacher assistant 4x16 first, because the student has at most half" in said
    assert "student: head initialised from the teacher's" in said
    assert "the loss does not use" not in said
    for folder in (tmp_path / "out", tmp_path / "out" / "assistant-4x16"):
        assert type(AutoModelForMaskedLM.from_pretrained(folder)).__name__ == "BertForMaskedLM"
        assert "mlm" in log_of(folder)[-1]["held_out"]
    assert "AutoModelForMaskedLM.from_pretrained" in (tmp_path / "out" / "README.md").read_text(
        "utf-8"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--to", "9x32"], "larger than its teacher"),
        (["--to", "2x32", "--to", "2x32"], "twice"),
        (["--to", "2x32", "--to", "2x16"], "different teacher assistants"),
        (
            ["--to", "1x16", "--to", "1x32", "--assistant", "4x16"],
            "larger than its teacher assistant 4x16:64@4",
        ),
        (["--to", "3x16", "--assistant", "2x16"], "larger than its teacher assistant 2x16:64@4"),
        (
            ["--to", "2x16", "--set", "student.layers=measured"],
            "add --assistant none, or name the layers",
        ),
        (
            ["--to", "2x16", "--method", "tinybert", "--set", "loss.layer_weights=[1, 1, 1]"],
            "the teacher assistant 4x16:64@4: loss.layer_weights has 3 numbers",
        ),
        (["--to", "2x32@2"], "minilmv2"),
        (
            ["--to", "2x32", "--set", "train.warmup_steps=6"],
            "must be less than the 6 steps of the run",
        ),
        (
            ["--to", "2x32", "--method", "minilmv2", "--set", "loss.relation_heads=7"],
            "do not divide",
        ),
        (["--to", "2x32", "--data", "/nowhere.txt"], "no data at"),
        (["--to", "2x32", "--report-to", "carrier-pigeon"], "carrier-pigeon"),
        ([], "no student shape"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(given, tmp_path, arguments, message):
    assert message in refused(tmp_path, "distill", *given, *arguments)


@pytest.fixture(scope="module")
def labelled(tmp_path_factory):
    """Two own tasks in a directory of tasks, one of them by the name of a shipped one."""
    folder = tmp_path_factory.mktemp("tasks")
    own_files.own(folder / "own", "class", n=64, judged=24)
    for file in ("train", "validation"):
        rows = own_files.rows("class", 48, seed=file == "train")
        named = [
            {"sentence": r["text"], "label": ("negative", "positive")[r["label"] == "calm"]}
            for r in rows
        ]
        own_files.write(folder / "sst2" / f"{file}.jsonl", named)
        # One class only.
        pairs = [{"sentence1": "w1", "sentence2": file, "label": 0}] * 20
        own_files.write(folder / "rte" / f"{file}.jsonl", pairs)
        own_files.write(
            folder / "squad" / f"{file}.jsonl", own_files.rows("span", 16, seed=file == "train")
        )
    return folder


def tasks_of(folder, *names):
    train = (
        "{max_steps: 8, batch_size: 16, lr: 0.003, eval_every: 4, checkpoint_every: 2, log_every: "
        "1}"
    )
    asked = ["--set", f"eval.overrides.train={train}", "--set", f"eval.source={folder}"]
    asked += ["--set", "eval.overrides.data.max_length=16"]
    return [*asked, *(part for name in names for part in ("--eval-task", name))]


def test_teacher_student_and_undistilled_student_are_fine_tuned_alike(given, labelled, tmp_path):
    out = tmp_path / "out"
    result = succeeds(
        *given, *tasks_of(labelled, "own", "sst2"), "--to", "2x32", "--seed", "3", "-o", out
    )
    report = report_of(out)
    names = ["teacher", "student", "student undistilled"]
    assert [(e.task, e.model) for e in report.evaluations] == [
        (t, m) for t in ("own", "sst2") for m in names
    ]
    for task in ("own", "sst2"):
        assert list(report.quality[task]) == names
        for e in report.evaluations:
            assert e.task != task or report.quality[task][e.model] == e.metrics
        for name in names:
            alone = out / "downstream" / task / name.replace(" ", "-")
            inner = report_of(alone)
            assert (inner.recipe["train"]["seed"], inner.training.steps) == (3, 8)
            assert [e.metrics for e in inner.evaluations] == [report.quality[task][name]]
            assert not (alone / "model.safetensors").exists()
    # What stands in the report is what fine-tuning the saved student by itself gives.
    own_files.succeeds(
        *("finetune", out, "--task", "own", "--data", labelled / "own", "-o", tmp_path / "alone"),
        *shlex.split(
            "--max-steps 8 --batch-size 16 --lr 0.003 --dtype fp32 --seed 3 "
            "--set data.max_length=16 --set measure.latency=false"
        ),
    )
    inner = report_of(tmp_path / "alone")
    student = next(e for e in report.evaluations if (e.task, e.model) == ("own", "student"))
    # Only the verb finetune compares with the trivial answer.
    exclude = {"model", "trivial"}
    assert inner.evaluations[0].model_dump(exclude=exclude) == student.model_dump(exclude=exclude)
    assert "your data accuracy" in result.stdout
    assert "student undistilled" in (out / "report.md").read_text("utf-8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--eval-task", "ownn"], "unknown task 'ownn'"),
        (
            ["--eval-task", "own", "--set", "eval.overrides.train.warmup_steps=8"],
            "must be less than the 8 steps of the run",
        ),
        (
            ["--eval-task", "own", "--eval-task", "mrpc"],
            "has no folder mrpc/ for the task mrpc; there are ",
        ),
        (["--eval-task", "rte"], "no training example has the label not_entailment"),
        (["--eval-task", "squad"], "windows of 16 tokens cannot overlap by 128"),
    ],
)
def test_a_task_that_cannot_be_evaluated_is_refused_before_training(
    given, labelled, tmp_path, arguments, message
):
    asked = [*given, *tasks_of(labelled), "--to", "2x32", *arguments]
    stderr = refused(tmp_path, "distill", *asked)
    assert message in stderr
    # The corpus was not read either, which may take hours.
    assert "tokenising the train text" not in stderr


def test_a_dry_run_checks_tasks_without_tokenising_them(given, labelled, tmp_path, monkeypatch):
    tokenised = []
    of = Features.of.__func__

    def counted(cls, task, examples, *arguments, **how):
        tokenised.append(len(examples))
        return of(cls, task, examples, *arguments, **how)

    monkeypatch.setattr(Features, "of", classmethod(counted))
    asked = [
        *given,
        *tasks_of(labelled, "own", "sst2"),
        "--to",
        "2x32",
        "-o",
        tmp_path / "out",
        "--dry-run",
        "--json",
    ]
    assert json.loads(succeeds(*asked).stdout)["legs"][0]["steps"] == 6
    assert tokenised == [0, 0]
    assert not (tmp_path / "out").exists()


def fork_command(command, env):
    """Fork a process of `fan_out` that runs its command line, `python -P -m kdcli ARGUMENTS`."""

    def run():
        sys.argv = command[3:]
        torch.set_num_threads(int(env["OMP_NUM_THREADS"]))
        main()

    return Child(run, env)


def test_two_processes_are_one_with_the_same_global_batch(given, tmp_path, monkeypatch, capfd):
    plain = [*given, "--to", "2x32", "--set", "student.dropout=0.0", "--device", "cpu"]
    succeeds(*plain, "-o", tmp_path / "one")
    capfd.readouterr()
    monkeypatch.setattr(fan_out, "subprocess", SimpleNamespace(Popen=fork_command))
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))
    asked = ["distill", *map(str, plain), "-o", str(tmp_path / "two"), "--processes", "2"]
    own_files.succeeds(*asked)
    assert capfd.readouterr().out.count("model and report in") == 1
    own_files.same_logs(tmp_path / "one", tmp_path / "two", rel=1e-5, abs=1e-5)


@pytest.mark.long
def test_processes_of_srun_are_joined(given, tmp_path):
    asked = [*given, "--to", "2x32", "--set", "student.dropout=0.0", "--device", "cpu"]
    succeeds(*asked, "-o", tmp_path / "one")
    stdout, _ = processes.two_ranks("distill", *asked, "-o", tmp_path / "two", slurm=True)
    assert stdout.count("model and report in") == 1
    one, two = (log_of(tmp_path / name)[-1] for name in ("one", "two"))
    assert two["tokens"] == one["tokens"]
    assert two["held_out"]["loss"] == pytest.approx(one["held_out"]["loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (
            {"SLURM_STEP_NODELIST": "gpu[03-07,11],login", "SLURM_STEP_TASKS_PER_NODE": "4(x6),2"},
            ("gpu03", "26", "4"),
        ),
        (
            {"SLURM_STEP_NODELIST": "a-b7,c1", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"},
            ("a-b7", "26", "1"),
        ),
        ({"SLURM_STEP_NUM_TASKS": "1"}, (None, None, None)),
        ({"WORLD_SIZE": "9", "MASTER_ADDR": "mine", "LOCAL_WORLD_SIZE": "3"}, ("mine", "9", "3")),
    ],
)
def test_the_environment_of_srun(monkeypatch, environment, expected):
    for name in (
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "RANK",
        "LOCAL_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
    ):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    common = {
        "SLURM_STEP_NUM_TASKS": "26",
        "SLURM_PROCID": "5",
        "SLURM_LOCALID": "1",
        "SLURM_JOB_ID": "123456",
    }
    for name, value in (common | environment).items():
        monkeypatch.setenv(name, value)
    take_slurm()
    assert (
        tuple(os.environ.get(n) for n in ("MASTER_ADDR", "WORLD_SIZE", "LOCAL_WORLD_SIZE"))
        == expected
    )
    if expected[1] == "26":
        assert tuple(os.environ[n] for n in ("RANK", "LOCAL_RANK", "MASTER_PORT")) == (
            "5",
            "1",
            "23456",
        )


@pytest.mark.parametrize("is_option", [True, False])
@pytest.mark.parametrize("method", ["minilm", "minilmv2", "tinybert"])
def test_the_embedded_teacher_needs_no_network_by_any_method(method, is_option):
    options = {"teacher": "demo", "student.to": ["2x32"], "train.lr": 1e-4}
    named = {"method": method} if is_option else {}
    sets = [] if is_option else ["train.seed=1", f"method={method}"]
    resolved = distill_recipe(recipe=None, sets=sets, options=options | named)
    recipe = resolved.recipe
    assert (recipe.data.source, recipe.train.max_steps, recipe.train.lr) == ("demo", 300, 1e-4)
    assert (recipe.method, recipe.student.to) == (method, ["2x32"])
    assert ("loss.hidden" in resolved.origins) == (method == "minilm")


@pytest.mark.parametrize("more", [(), ("--task", "demo-topic")])
def test_triton_asked_for_where_it_cannot_run(tmp_path, more):
    result = kdcli(
        "demo",
        *shlex.split("--to 2x64 --device cpu --set relation.kernel=triton"),
        *more,
        "-o",
        tmp_path / "o",
    )
    assert (result.exit_code, result.stderr.count("error: ")) == (3, 1), result.output
    assert "relation.kernel=triton cannot run here: it needs a CUDA device" in said_by(result)
    assert not (tmp_path / "o").exists()


@pytest.mark.usefixtures("short_demo")
def test_the_embedded_default(tmp_path):
    quick = ["--max-steps", "4", "--set", "measure.min_seconds=0.2"]
    succeeds("demo", "--to", "2x64", "-o", tmp_path / "demo", *quick)
    report = report_of(tmp_path / "demo")
    assert set(report.quality) == {
        "demo-topic probe",
        "demo-order probe",
        "demo-coherence probe",
        "held-out loss",
    }
    assert report.cards["student"].bytes < report.cards["teacher"].bytes
    (assistant,) = (tmp_path / "demo").glob("assistant-*")
    assert list(report_of(assistant).quality) == ["held-out loss"]
