"""One report over several runs: names, order, and what each part adds, as the verbs use it."""

import pytest
from reports import card, evaluation, finetune_values, made, prune_values, report_values, run_row, selection_values

from kdcli.report.combine import Part, combine_reports
from kdcli.report.finish import RunResult
from kdcli.training.run_dir import RunDir
from kdcli.types import Outcome


@pytest.fixture
def folder(tmp_path):
    """A claimed directory with a log of three steps."""
    RunDir.claim(tmp_path / "combined", "method: minilm\n")
    lines = [f'{{"step": {step}, "loss": 0.5, "held_out": {{"student/hard": {1 / step}}}}}' for step in (1, 2, 3)]
    (tmp_path / "combined" / "log.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
    return tmp_path / "combined"


def result(folder, values, **changes):
    return RunResult(made(values, **changes), folder)


def test_variants_of_a_distillation_share_the_teacher(folder):
    models = {"teacher": card(), "student": card(layers=6, id="out")}
    parts = []
    for name, accuracy in (("full", 0.9), ("map-top", 0.8)):
        scores = {"teacher": 0.93, "student": accuracy, "student undistilled": accuracy - 0.1}
        found = [evaluation(model, metrics={"accuracy": value}) for model, value in scores.items()]
        quality = {"sst2": {model: {"accuracy": value} for model, value in scores.items()}}
        changes = {"recipe": {"method": name}, "models": models, "evaluations": found, "quality": quality}
        run = result(folder / name, report_values() | changes)
        parts.append(Part(name, run, {"teacher": "teacher", "student": name, "student undistilled": "alone"}))
    report = combine_reports(folder, command="distill", parts=parts, notes=["full: where"]).report
    assert list(report.models) == ["teacher", "full", "map-top"]
    assert [e.model for e in report.evaluations] == ["teacher", "full", "alone", "map-top"], "a name is shown once"
    scores = {"teacher": 0.93, "full": 0.9, "alone": 0.8, "map-top": 0.8}
    assert report.quality["sst2"] == {name: {"accuracy": score} for name, score in scores.items()}
    assert (report.recipe, report.notes) == ({"method": "full"}, ["full: where"])
    assert report.published
    assert (report.training, report.latency, report.beside) == (None, [], {})
    assert (folder / "report.html").is_file()


def test_pruned_runs_take_the_names_of_their_parts(folder):
    runs = {name: result(folder / name, prune_values()) for name in ("a", "b")}
    parts = [Part(name, run, {"dense": "dense", "compact": name}) for name, run in runs.items()]
    report = combine_reports(folder, command="prune", recipe={"task": "own"}, parts=parts).report
    assert (list(report.models), report.models["a"].bytes) == (["dense", "a", "b"], 71_000_000)
    assert [e.model for e in report.evaluations] == ["a", "b"]
    assert [p.model for p in report.pruning] == ["a", "b"], "whichever form its run pruned"
    assert (report.recipe, report.published) == ({"task": "own"}, []), "the papers' tasks are others"


def test_the_chosen_run_of_a_grid_is_the_model_of_the_directory(folder):
    runs = [result(folder / "runs" / str(seed), finetune_values()) for seed in (0, 1)]
    selection = selection_values() | {"settings": {}, "seed": 1, "runs": [run_row(0, 0.8), run_row(1, 0.9)]}
    report = combine_reports(
        folder,
        command="finetune",
        parts=[Part("seed=1", runs[1], {"finetuned": "finetuned"})],
        folders={"finetuned": folder},
        outcome=Outcome(steps=200),
        selection=selection,
        auto_class="AutoModelForSequenceClassification",
    ).report
    assert (report.models["finetuned"].id, report.evaluations) == (folder.name, runs[1].report.evaluations)
    assert report.quality == runs[1].report.quality
    assert report.selection
    assert report.training.steps == 200
    assert "AutoModelForSequenceClassification" in (folder / "README.md").read_text("utf-8")


def test_a_pair_stands_beside_the_same_models_alone(folder):
    names = ("teacher", "student")
    alone = result(
        folder / "standalone",
        report_values() | {"models": {name: card() for name in names}},
        quality={"loss": {name: {"loss": 2.0} for name in names}},
        evaluations=[evaluation(name) for name in names],
    )
    report = combine_reports(
        folder,
        command="cotrain",
        recipe={"teacher": "demo", "student": "2x64", "mode": "dml", "weights": [1, 1, 1, 1]},
        parts=[Part("standalone", alone, {name: f"{name} standalone" for name in names}, beside=True)],
        cards={name: card() for name in names},
        evaluations=[evaluation(name, metrics={"accuracy": 0.9}) for name in names],
        quality={"loss": {name: {"loss": 1.0} for name in names}},
    ).report
    assert list(report.models) == ["teacher", "teacher standalone", "student standalone", "student"]
    assert [e.model for e in report.evaluations] == [*names, "teacher standalone", "student standalone"]
    losses = {"teacher": 1.0, "student": 1.0, "teacher standalone": 2.0, "student standalone": 2.0}
    assert report.quality["loss"] == {name: {"loss": loss} for name, loss in losses.items()}
    assert (list(report.beside), len(report.curve)) == (["standalone"], 3)
