"""One report over several runs: names, order, and what each part adds, as the verbs use it."""

import pytest
from reports import evaluation, made, model, prune_values, report_values, without_files

from kdcli.engine.run_dir import RunDir
from kdcli.recipe.sections import Section
from kdcli.report.combine import combine_reports
from kdcli.report.finish import RunResult


class MethodRecipe(Section):
    method: str


class TaskRecipe(Section):
    task: str


@pytest.fixture
def folder(tmp_path):
    """A claimed directory with a log of three steps."""
    RunDir.claim(tmp_path / "combined", "method: minilm\n")
    lines = [
        f'{{"step": {step}, "loss": 0.5, "held_out": {{"student/hard": {1 / step}}}}}'
        for step in (1, 2, 3)
    ]
    (tmp_path / "combined" / "log.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
    return tmp_path / "combined"


def result(folder, values, **changes):
    return RunResult(made(values, **changes), folder)


def test_variants_of_a_distillation_share_the_teacher(folder):
    models = {
        "teacher": model("teacher"),
        "student": model("student", "teacher", layers=6, id="out"),
        "student undistilled": without_files("undistilled", "student"),
    }
    reports = {}
    for name, accuracy in (("full", 0.9), ("map-top", 0.8)):
        scores = {"teacher": 0.93, "student": accuracy, "student undistilled": accuracy - 0.1}
        found = [evaluation(model, metrics={"accuracy": value}) for model, value in scores.items()]
        quality = {"sst2": {model: {"accuracy": value} for model, value in scores.items()}}
        changes = {
            "recipe": {"method": name},
            "models": models,
            "evaluations": found,
            "quality": quality,
            "latency": [],
            "curve": [],
        }
        run = result(folder / name, report_values() | changes)
        names = {"teacher": "teacher", "student": name, "student undistilled": "alone"}
        reports[name] = run.report.renamed(names)
    report = combine_reports(
        folder,
        command="distill",
        recipe=MethodRecipe(method="full"),
        reports=reports,
        notes=["full: where"],
    ).report
    assert [(m.name, m.role, m.baseline, m.of, m.variant) for m in report.models] == [
        ("teacher", "teacher", None, None, None),
        ("full", "student", "teacher", None, "full"),
        ("alone", "undistilled", None, "full", None),
        ("map-top", "student", "teacher", None, "map-top"),
    ]
    assert [e.model for e in report.evaluations] == ["teacher", "full", "alone", "map-top"], (
        "a name is shown once"
    )
    scores = {"teacher": 0.93, "full": 0.9, "alone": 0.8, "map-top": 0.8}
    assert report.quality["sst2"] == {name: {"accuracy": score} for name, score in scores.items()}
    assert (report.recipe, report.notes) == ({"method": "full"}, ["full: where"])
    assert report.published
    assert (report.training, report.latency, report.compared_runs) == (None, [], {})
    assert (folder / "report.html").is_file()


def test_pruned_runs_take_the_names_of_their_parts(folder):
    runs = {name: result(folder / name, prune_values()) for name in ("a", "b")}
    reports = {
        name: run.report.renamed({"dense": "dense", "compact": name}).model_copy(
            update={"pruning": run.report.pruning}
        )
        for name, run in runs.items()
    }
    report = combine_reports(
        folder, command="prune", recipe=TaskRecipe(task="own"), reports=reports
    ).report
    assert [(m.name, m.role, m.baseline) for m in report.models] == [
        ("dense", "baseline", None),
        ("a", "pruned", "dense"),
        ("b", "pruned", "dense"),
    ]
    assert report.cards["a"].bytes == 71_000_000
    assert [e.model for e in report.evaluations] == ["a", "b"]
    assert [p.model for p in report.pruning] == ["a", "b"], "whichever form its run pruned"
    assert (report.recipe, report.published) == ({"task": "own"}, []), (
        "the papers' tasks are others"
    )
