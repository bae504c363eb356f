"""`kdcli compress` on tiny models, with its own verbs: what is refused, and pipelines and plans."""

import re
import signal
from types import SimpleNamespace

import pytest
import torch
from fake_verbs import Fakes
from own_files import encoder, headed, own, refused, report_of, same_weights, write

from kdcli.errors import Stopped, UsageError
from kdcli.report.schema import Evaluation
from kdcli.verbs.compress.run import teacher_notes

TRAIN = {"max_steps": 4, "batch_size": 16, "lr": 3e-3, "dtype": "fp32"}
QUICK = {"measure__min_runs": 2, "measure__min_seconds": 0.0, "data__max_length": 24}
STEPS = [
    {"distill": {"student": {"to": ["2x16"]}, "method": "soft-targets", "train": TRAIN}},
    {"prune": {"method": "magnitude", "sparsity": [0.5], "train": TRAIN}},
    {"export": {"format": "onnx"}},
]
PLAN = {
    "plan__backends": ["onnx"],
    "plan__shapes": ["2x16", "1x16"],
    "plan__prune": None,
    "plan__distill": {"method": "soft-targets", "train": TRAIN},
    "plan__trim_from": 1.0,
    "goal__max_drop": 100.0,
}
MS = {"2x16": 5.0, "1x16": 4.0, "1x32": 4.0}


def earnest(**changes):
    return Fakes({}, in_earnest=True, ms=dict(MS), **changes)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """The keys of a fine-tuned model of two layers, and of its data."""
    folder = tmp_path_factory.mktemp("tuned")
    headed(folder / "teacher", ("brisk", "calm"), num_hidden_layers=2)
    own(folder / "data", "class", n=64, judged=32)
    return {"model": str(folder / "teacher"), "data__source": str(folder / "data"), **QUICK}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["demo", "--task", "demo-topic"], "no goal given"),
        (["demo", "--max-drop", "1"], "demo is a plain encoder: it has no head and no pooling"),
        (["--task", "demo-topic", "--max-drop", "1"], "no model given kdcli compress MODEL --data"),
        (
            ["demo", "--task", "demo-topic", "--speedup", "0.5"],
            "'goal.speedup' must be greater than 1",
        ),
        (
            ["demo", "--task", "demo-topic", "--speedup", "2", "--strict"],
            "--strict is about --max-drop",
        ),
        (
            ["demo", "--task", "demo-topic", "--max-drop", "1", "--budget", "soon"],
            "--budget takes a time",
        ),
        (
            ["demo", "-r", "trim-int8", "--task", "demo-topic", "--budget", "9m"],
            "a recipe with steps has one",
        ),
        (
            ["demo", "--task", "demo-topic", "--max-drop", "1", "--pooling", "mean"],
            "task demo-topic is not scored by vectors",
        ),
        (
            ["demo", "--task", "demo-topic", "--max-drop", "1", "--set", "plan.distill.methd=x"],
            "unknown key 'plan.distill.methd'; did you mean 'plan.distill.method'?",
        ),
        (
            ["demo", "--task", "demo-topic", "--max-drop", "1", "--set", "plan.distill.recipe=5"],
            "'plan.distill.recipe' must be the name of a recipe or the path of a file, got 5",
        ),
        (
            ["demo", "--task", "demo-topic", "--max-drop", "1", "--set", "steps=[{distil: {}}]"],
            "'distil' in item 1 of 'steps' is no step; did you mean 'distill'?",
        ),
        (
            ["demo", "--task", "demo-topic", "--set", "steps=[{}]"],
            "item 1 of 'steps' must name one of distill, prune, trim, quantize, export, got an",
        ),
        (["--front", "run"], "--front and --output-dir contradict each other"),
        (["--front", "run", "--speedup", "9"], "--front and --speedup contradict each other"),
        (["--front", "run", "--set", "seed=3"], "--front and --set contradict each other"),
        (
            [
                "demo",
                "--task",
                "demo-topic",
                "--set",
                "steps=[{trim: {}}, {quantize: {format: 5}}]",
            ],
            "'quantize.format' in item 2 of 'steps': unknown format 5",
        ),
        (
            ["demo", "--task", "demo-topic", "--max-drop", "1", "--set", "plan.backends=[onx]"],
            "unknown backend 'onx'; did you mean 'onnx'?",
        ),
        (
            ["demo", "--task", "demo-topic", "--max-drop", "1", "--set", "plan.backends=[torch]"],
            "torch runs no exports",
        ),
    ],
)
def test_what_cannot_be_meant_is_refused(arguments, said, tmp_path):
    assert said in refused(tmp_path, "compress", *arguments)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            {"plan__distill": {"loss": {"layrs": "top"}}},
            "'plan.distill': unknown key 'loss.layrs' of method tinybert; did you mean",
        ),
        (
            {"plan__distill": {"intermediate": {"lrr": 1}}},
            "'plan.distill': unknown key 'intermediate.lrr'; did you mean 'intermediate.lr'?",
        ),
        (
            {"plan__distill": {"workload": {"poling": "mean"}}},
            "'plan.distill': unknown key 'workload.poling' of your data",
        ),
        ({"plan__prune": {"pruner": {"maskng": "topk"}}}, "unknown key 'pruner.maskng' of method"),
        ({"plan__finetune": {"grid": {"train": {"lrr": [1]}}}}, "unknown key 'grid.train.lrr'"),
        (
            {"steps": [{"trim": {}}, {"prune": {"pruner": {"x": 1}, "sparsity": [0.5]}}]},
            "'prune' in item 2 of 'steps': unknown key 'pruner.x'",
        ),
    ],
)
def test_a_nested_key_of_a_planned_step_is_checked_before_anything_runs(
    tmp_path, tuned, keys, said
):
    made = earnest()
    with pytest.raises(UsageError, match=re.escape(said)):
        made.compress(**tuned | keys, goal__max_drop=1.0, output_dir=tmp_path / "out")
    assert made.calls == []


def test_a_pipeline_leaves_the_model_of_its_last_step(tmp_path, tuned):
    keys = tuned | {"steps": STEPS, "goal__max_drop": 100.0, "data__verification_rows": 500}
    whole = earnest().compress(**keys, output_dir=tmp_path / "whole").folder
    report = report_of(whole)
    names = ["teacher", "1-distill", "2-prune", "3-export"]
    assert [row.name for row in report.compression.candidates] == names
    assert (report.compression.chosen, report.compression.rows) == ("3-export", 16)
    assert list(report.cards) == ["teacher", "3-export"]
    assert (whole / "best" / "onnx" / "model.onnx").is_file()
    assert (whole / "pareto.png").read_bytes().startswith(b"\x89PNG")
    assert report.compression.verification.rows == 16
    assert {row.split for row in report.evaluations} == {"verification"}
    assert any(note.startswith("only 16 verification rows") for note in report.notes)
    missing = "data.verification_rows=500, but this part has 16 rows: "
    assert any(note.startswith(missing) for note in report.notes)


def test_a_teacher_that_has_learned_nothing_is_named_at_once(tmp_path, tuned, capsys):
    encoder(tmp_path / "model", num_hidden_layers=2)
    own(tmp_path / "data", "class", n=256, judged=64)
    training = {"plan__finetune": {"train": TRAIN | {"lr": 1e-9, "max_steps": 60}}}
    keys = tuned | PLAN | training | {"data__source": str(tmp_path / "data")}
    made = earnest(ends=("2x16", signal.SIGTERM))
    with pytest.raises(Stopped):
        made.compress(**keys | {"model": str(tmp_path / "model")}, output_dir=tmp_path / "out")
    said = " ".join(capsys.readouterr().err.split())
    assert made.calls[-2:] == ["finetune teacher", "distill 2x16"]
    score = (
        r"the fine-tuned teacher has accuracy .* answering (brisk|calm).* to every text has 0\.\d+"
    )
    assert re.search(score, said)
    assert "its score is not clearly better than always" in said
    assert "--set plan.finetune.train.lr=" in said


@pytest.mark.parametrize(
    ("is_beaten", "last", "signs"),
    [
        (True, 0.5, []),
        (False, 0.5, ["may have learned little or nothing: its score is not clearly better"]),
        # The loss alone says less: contradicting labels limit how far it can fall.
        (
            True,
            1.087,
            ["may not have learned all that it can: its training loss only went from 1.105 to "],
        ),
        (False, 1.087, ["little or nothing: its score is not", " and its training loss only went"]),
        (None, 1.087, ["may not have learned all that it can: "]),
        (None, 0.5, []),
    ],
)
def test_the_signs_of_a_teacher_that_learned_little(is_beaten, last, signs):
    trivial = {"answer": "tech", "metrics": {"accuracy": 0.26}, "is_beaten": is_beaten}
    evaluation = Evaluation(
        model="finetuned",
        task="own",
        set="",
        split="validation",
        n=50,
        metrics={"accuracy": 0.54, "macro_f1": 0.4},
        trivial=None if is_beaten is None else trivial,
    )
    curve = [SimpleNamespace(loss=loss) for loss in [None, *4 * [1.105], *4 * [last]]]
    score, *warning = teacher_notes(SimpleNamespace(evaluations=[evaluation], curve=curve))
    same = "" if is_beaten is None else "; answering tech to every text has 0.2600"
    assert score == f"the fine-tuned teacher has accuracy 0.5400 on 50 selection rows{same}"
    assert len(warning) == bool(signs)
    assert all(sign in warning[0] for sign in signs)


@pytest.mark.parametrize(
    ("losses", "warns"),
    [
        # A single batch may be easy or difficult.
        ([0.7] * 99 + [0.5], True),
        ([0.5] + [0.7] * 4 + [0.55] * 94 + [0.7], False),
        ([0.9, 0.5], False),
        ([0.9, 0.3, 0.6, 0.6, 0.6, 0.6], True),
        ([0.7], False),
        ([], False),
    ],
)
def test_the_loss_of_a_training_is_a_mean_over_batches(losses, warns):
    curve = [SimpleNamespace(loss=loss) for loss in losses]
    assert bool(teacher_notes(SimpleNamespace(evaluations=[], curve=curve))) == warns


def test_an_encoder_with_a_pooling_is_judged_by_its_vectors(tmp_path):
    model = encoder(tmp_path / "model", num_hidden_layers=2)
    pairs = [{"a": f"w{n}", "b": f"w{n * 7 % 50}", "label": n % 6 + 0.5} for n in range(40)]
    write(tmp_path / "data" / "validation.jsonl", pairs)
    text = tmp_path / "texts.txt"
    text.write_text("\n".join(f"w{n} w{n % 7} w{n % 11}" for n in range(50)), "utf-8")
    keys = PLAN | {"model": str(model), "data__source": str(tmp_path / "data"), "task": "own"}
    keys |= {"pooling": "mean", "text": str(text), "data__columns": {"text": "a", "pair": "b"}}
    keys |= {"plan__distill": {"data": {"held_out_blocks": 8}, "train": TRAIN}}
    keys |= {"measure__min_runs": 2, "measure__min_seconds": 0.0, "plan__shapes": ["1x32"]}
    result = earnest().compress(**keys, output_dir=tmp_path / "out")
    compression = result.report.compression
    assert {row.name for row in compression.candidates} >= {"teacher", "onnx", "1x32-onnx"}
    assert compression.metric == "spearman"
    assert (result.folder / "best" / "onnx" / "model.onnx").is_file()


def test_side_by_side_is_one_after_another(tuned, tmp_path, monkeypatch, capfd, caplog):
    """Two processes, one of which is killed once, make the same models as one process."""
    caplog.set_level("INFO", "kdcli")
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))
    whole = tmp_path / "marker"
    whole.touch()
    keys = {**tuned, **PLAN, "plan__undistilled": True, "plan__shapes": ["1x16"]}
    markers = {1: whole, 2: tmp_path / "killed"}
    for count, marker in markers.items():
        made = Fakes({}, in_earnest=True, ms=dict(MS), killed=marker)
        made.compress(**keys, output_dir=tmp_path / str(count), processes=count)
    one, two = (tmp_path / str(count) for count in markers)
    answers = [report_of(folder).compression for folder in (one, two)]
    rows = [[(row.name, row.score, row.outcome) for row in a.candidates] for a in answers]
    assert rows[0] == rows[1]
    assert len(rows[0]) >= 3
    assert answers[0].chosen == answers[1].chosen
    models = {file.parent.relative_to(one) for file in one.rglob("steps/*/*/model.safetensors")}
    assert {"1x16", "1x16-undistilled"} <= {model.name for model in models}
    assert all(same_weights(one / model, two / model) for model in models)
    log = "\n".join(caplog.messages)
    assert "independent steps run side by side in 2 processes" in log
    assert "its process was killed; another one continues it" in log
    assert "[1x16-undistilled] " in capfd.readouterr().err
