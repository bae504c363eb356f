"""`kdcli distill --ablate` on text: variants of a loss from one pass of the teacher, scored along
the way."""

import shlex

import own_files
import pytest
from own_files import refused, report_of, said_by, same_weights, succeeds, times

from kdcli.report.charts.charts import report_pictures

QUICK = shlex.split(
    "--max-steps 6 --batch-size 8 --dtype fp32 --set data.max_length=16 --seed 3 "
    "--set train.eval_every=3 --set train.checkpoint_every=2 "
    "--set data.held_out_blocks=8 --set measure.latency=false --to 2x16"
)
LIST = """
without-value: {loss.value: none}
changes-nothing: {loss.value: relation}
without-assistant: {assistant: none}
minilmv2: {method: minilmv2, loss.relation_heads: 4, loss.teacher_layer: -1}
"""


@pytest.fixture
def given(model_dir, text_file, tmp_path):
    (tmp_path / "list.yaml").write_text(LIST)
    return ["distill", model_dir, "--data", text_file, *QUICK]


@pytest.fixture
def scored(tmp_path):
    own_files.own(tmp_path / "own", "class", n=64, judged=24)
    train = "{max_steps: 4, batch_size: 16, lr: 0.003, eval_every: 4, log_every: 1}"
    asked = ["--set", f"eval.overrides.train={train}", "--set", f"eval.source={tmp_path / 'own'}"]
    return [*asked, "--set", "eval.overrides.data.max_length=16", "--eval-task", "own"]


def test_variants_of_one_pass_are_what_each_is_alone(given, tmp_path):
    out = tmp_path / "out"
    result = succeeds(*given, "--ablate", tmp_path / "list.yaml", "-o", out)
    assert "variant changes-nothing changes nothing here and is skipped" in said_by(result)
    report = report_of(out)
    names = ["full", "without-value", "minilmv2"]
    assert [n for n in report.cards if n not in ("teacher", "assistant")] == [
        "without-assistant",
        *names,
    ]
    assert {
        f"{n}{end}" for n in (*names, "without-assistant") for end in ("", " undistilled")
    } == set(report.quality["held-out loss"])
    alone = tmp_path / "alone"
    succeeds(*given, "--set", "loss.value=none", "--set", "assistant=none", "-o", alone)
    inside = out / "students-no-assistant"
    succeeds(*given, "--assistant", "none", "-o", tmp_path / "bare")
    assert same_weights(inside, tmp_path / "bare")
    assert not same_weights(inside, alone)
    # Those of the assistant's pass learn from one assistant, that of the recipe.
    succeeds(*given, "-o", tmp_path / "full")
    assert same_weights(out / "full", tmp_path / "full")
    assert same_weights(out / "assistant-4x16", tmp_path / "full" / "assistant-4x16")
    assert (
        len(
            {
                own_files.weights(out / n)["encoder.layer.0.output.dense.weight"].sum().item()
                for n in names
            }
        )
        == 3
    )
    before = times(out / "without-value")
    succeeds(*given, "--ablate", tmp_path / "list.yaml", "-o", out, "--resume")
    assert times(out / "without-value") == before


def test_students_are_scored_along_the_way_with_several_seeds(given, scored, tmp_path):
    out = tmp_path / "out"
    (tmp_path / "list.yaml").write_text("without-value: {loss.value: none}")
    more = ["--set", "eval.seeds=2", "--set", "eval.at=[2, 4]", "--assistant", "none"]
    succeeds(*given, *scored, *more, "--ablate", tmp_path / "list.yaml", "-o", out)
    report, copy = report_of(out), "student undistilled"
    by_name = {e.model: e for e in report.evaluations}
    grown = [
        f"{name}{end}"
        for name in ("full", "without-value")
        for end in (" at step 2", " at step 4", "")
    ]
    assert set(by_name) == {"teacher", copy, *grown}
    for name, one in by_name.items():
        runs = [out / "downstream" / "own" / name.replace(" ", "-") / f"seed-{n}" for n in range(2)]
        values = [report_of(run).evaluations[0].metrics["accuracy"] for run in runs]
        assert [report_of(run).recipe["train"]["seed"] for run in runs] == [3, 4]
        assert one.metrics["accuracy"] == pytest.approx(sum(values) / 2)
        assert one.deviations["accuracy"] == pytest.approx(abs(values[0] - values[1]) / 2**0.5)
    assert {(c.model, c.baseline) for c in report.comparisons} == {
        ("full", copy),
        ("without-value", copy),
    }
    for c in report.comparisons:
        ours, theirs = (by_name[n].metrics[c.metric] for n in (c.model, c.baseline))
        assert c.difference == pytest.approx(ours - theirs)
        assert c.low <= c.difference <= c.high
    text = (out / "report.md").read_text("utf-8")
    assert "Mean ± sample standard deviation of 2 runs" in text
    start = "accuracy on own over the tokens distilled on: full"
    assert sum(p.caption.startswith(start) for p in report_pictures(report)) == 1
    assert not list(out.rglob("*at-step-*/model.safetensors"))


@pytest.mark.parametrize(
    ("listed", "more", "message"),
    [
        (
            "a: {train.lr: 1.0}",
            [],
            "variant a sets train.lr; variants of a run on text set method, loss and assistant",
        ),
        ("a: {loss.masked_lm_weight: 1.0}", [], "some variants read masked text and some do not"),
        ("a: {loss.value: none}", ["--method", "embedding"], "--ablate"),
        (
            "a: {loss.value: none}",
            ["--set", "eval.at=[6]"],
            "eval.at: step 6 is not before the last step, 6",
        ),
        ("a: {loss.value: none}", ["--set", "eval.at=[2]"], "add --eval-task TASK"),
    ],
)
def test_lists_that_cannot_be_compared_are_refused(given, tmp_path, listed, more, message):
    (tmp_path / "list.yaml").write_text(listed)
    assert message in refused(tmp_path, *given, "--ablate", tmp_path / "list.yaml", *more)
