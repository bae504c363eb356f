"""What `kdcli evaluate` shows about a model next to its baseline, class by class and row by row."""

import functools
import shutil

import numpy as np
import own_files
import pytest
from own_files import NAMES, QUICK, lines_of, refused, report_of, said_by, write

from kdcli.metrics.calibration import (
    class_calibration_error,
    fit_class_temperature,
    scale_classes,
)
from kdcli.models.temperature import store_temperature
from kdcli.recipe.resolve import resolve
from kdcli.recipe.sections import RunOptions
from kdcli.verbs.evaluate import run as evaluate_run
from kdcli.verbs.evaluate.settings import EvaluateRecipe

LABELS = tuple(sorted(NAMES))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two models with random heads for the two classes. The second is worse in both classes."""
    folder = tmp_path_factory.mktemp("models")
    return [own_files.headed(folder / f"model-{seed}", LABELS, seed=seed) for seed in (5, 3)]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write(folder / "validation.jsonl", own_files.rows("class", 80, seed=1))
    return folder


@pytest.fixture(scope="module")
def judged(models, data, tmp_path_factory):
    """An evaluation of both models, the second with a stored temperature: its directory, its one
    decision, each model's predictions, and what was printed."""
    folder = tmp_path_factory.mktemp("judged")
    shipped = folder / "shipped" / models[1].name
    shutil.copytree(models[1], shipped)
    store_temperature(shipped, 2.5)
    arguments = ["--task", "own", "--data", data, "--predictions", folder / "predictions.jsonl"]
    result = succeeds(models[0], shipped, *arguments, "-o", folder / "out")
    (decision,) = report_of(folder / "out").decisions
    return folder / "out", decision, predictions_of(folder / "predictions.jsonl"), result.stdout


evaluate, succeeds = (
    functools.partial(of, "evaluate") for of in (own_files.kdcli, own_files.succeeds)
)


def predictions_of(file):
    """Model -> its rows of a file of predictions."""
    rows = lines_of(file)
    return {name: [r for r in rows if r["model"] == name] for name in ("model-5", "model-3")}


def share(rows, **equal):
    return sum(all(row[k] == v for k, v in equal.items()) for row in rows)


def test_the_classes_and_rows_that_change_are_reported(judged):
    out, decision, predictions, printed = judged
    assert (decision.model, decision.baseline, decision.n) == ("model-3", "model-5", 80)
    assert (decision.reference, decision.metric, decision.min_count) == ("labels", "recall", 30)
    theirs, ours = predictions.values()
    for each in decision.classes:
        recall = each.metrics["recall"]
        for value, rows in ((recall.baseline, theirs), (recall.model, ours)):
            hits = share(rows, label=each.name, predicted=each.name)
            assert value == hits / share(rows, label=each.name)
        assert recall.low <= recall.difference <= recall.high
        both = sum(
            a["predicted"] == b["predicted"] == each.name for a, b in zip(ours, theirs, strict=True)
        )
        assert each.both == both
        assert each.only_model == share(ours, predicted=each.name) - both
        assert each.only_baseline == share(theirs, predicted=each.name) - both
        assert each.count == share(ours, label=each.name)
        assert each.enough
    pairs = [(b["predicted"], a["predicted"]) for a, b in zip(ours, theirs, strict=True)]
    assert decision.confusion.labels == list(LABELS)
    assert decision.confusion.counts == [[pairs.count((a, b)) for b in LABELS] for a in LABELS]
    assert decision.agreement == sum(a == b for a, b in pairs) / 80
    largest = max((c for c in decision.confused), key=lambda c: c.count)
    assert decision.confused[0] == largest
    assert largest.count == pairs.count((largest.baseline, largest.model)) > 0
    changes = {
        row["id"]: abs(row["scores"][0] - other["scores"][0])
        for row, other in zip(ours, theirs, strict=True)
    }
    listed = [row.id for row in decision.differing]
    assert len(listed) == 20
    assert listed == sorted(changes, key=lambda i: -changes[i])[:20]
    by_id = {row["id"]: row for row in ours}
    for row in decision.differing:
        assert row.texts == by_id[row.id]["texts"]
        assert (row.label, row.model) == (by_id[row.id]["label"], by_id[row.id]["predicted"])
        assert row.change == pytest.approx(changes[row.id])
        assert row.changed == LABELS[1]
        assert row.model_probability == by_id[row.id]["scores"][1]
    assert "worst class" in printed
    # Texts are in the local report.html and report.json only.
    text = decision.differing[0].texts[0]
    assert text in (out / "report.html").read_text("utf-8")
    assert not any(row.texts[0] in printed for row in decision.differing)


def test_worst_limits_the_rows_that_differ(models, data, tmp_path):
    arguments = ["--task", "own", "--data", data, "--set", "worst=0", "-o", tmp_path / "out"]
    succeeds(*models, *arguments)
    (decision,) = report_of(tmp_path / "out").decisions
    assert decision.differing == []


def test_without_labels_the_teacher_is_the_reference(models, data, tmp_path):
    file, out = tmp_path / "predictions.jsonl", tmp_path / "out"
    arguments = ["--task", "own", "--data", data, "--set", "data.labels=teacher"]
    succeeds(*models, *arguments, "--predictions", file, "-o", out)
    (decision,) = report_of(out).decisions
    assert decision.reference == "teacher"
    theirs, ours = predictions_of(file).values()
    for each in decision.classes:
        rows = [i for i, row in enumerate(theirs) if row["predicted"] == each.name]
        agreed = sum(ours[i]["predicted"] == each.name for i in rows)
        assert each.count == len(rows)
        assert (each.metrics["recall"].baseline, each.metrics["recall"].model) == (
            1.0,
            pytest.approx(agreed / len(rows)),
        )
    result = evaluate(*models, *arguments, "--max-class-drop", 3, "-o", tmp_path / "gate")
    assert result.exit_code == 5
    assert "points of agreement in class" in said_by(result)
    # All predictions of the teacher count as right, so its error is its distance from certainty.
    assert list(decision.calibration) == ["model-5", "model-3"]
    unsure = np.mean([1 - max(row["scores"]) for row in theirs])
    assert decision.calibration["model-5"].error == pytest.approx(unsure, abs=1e-9)
    assert all(row.label is None for row in decision.differing)


def test_calibration_is_that_of_the_predictions(judged):
    _, decision, predictions, _ = judged
    assert list(decision.calibration) == ["model-5", "model-3"]
    for name, rows in predictions.items():
        probs = np.array([row["scores"] for row in rows])
        true = np.array([LABELS.index(row["label"]) for row in rows])
        found = decision.calibration[name]
        assert found.error == pytest.approx(class_calibration_error(probs, true))
        assert found.temperature == pytest.approx(fit_class_temperature(probs, true))
        if found.temperature is not None:
            scaled = scale_classes(probs, found.temperature)
            assert found.scaled_error == pytest.approx(class_calibration_error(scaled, true))
    assert decision.calibration["model-5"].stored_temperature is None
    assert found.stored_temperature == 2.5
    scaled = scale_classes(probs, 2.5)
    assert found.stored_error == pytest.approx(class_calibration_error(scaled, true))


def at(rows, threshold):
    """Precision and recall of the second class above a threshold."""
    hits = sum(r["scores"][1] > threshold and r["label"] == LABELS[1] for r in rows)
    predicted = sum(r["scores"][1] > threshold for r in rows)
    return hits / predicted, hits / share(rows, label=LABELS[1])


def test_precision_and_recall_of_a_threshold_are_not_of_the_rows_that_chose_it(
    judged, models, tmp_path
):
    chosen = judged[1].model_copy(update={"thresholds_on": "selection"})
    write(tmp_path / "data" / "validation.jsonl", own_files.rows("class", 60, seed=2))
    values = {"models": list(map(str, models)), "data.source": str(tmp_path / "data")}
    evaluate_run.evaluate(
        resolve(EvaluateRecipe, recipe=None, options=values | {"task": "own"}),
        RunOptions(output_dir=tmp_path / "out"),
        evaluate_run.Extras(tmp_path / "predictions.jsonl", thresholds_from=[chosen]),
    )
    report = report_of(tmp_path / "out")
    (decision,) = report.decisions
    theirs, ours = predictions_of(tmp_path / "predictions.jsonl").values()
    (before,), (now,) = chosen.thresholds, decision.thresholds
    assert (now.baseline.precision, now.baseline.recall) == at(theirs, 0.5)
    assert (now.model.precision, now.model.recall) == at(ours, 0.5)
    assert now.same_recall.threshold == before.same_recall.threshold
    assert (now.same_recall.precision, now.same_recall.recall) == at(
        ours, before.same_recall.threshold
    )
    assert now.same_recall != before.same_recall
    origin = "chosen on the selection rows, and precision and recall come from these rows."
    assert origin in (tmp_path / "out" / "report.md").read_text("utf-8")


@pytest.mark.parametrize("kind", ["multi", "tokens"])
def test_other_kinds_have_classes_too(tmp_path, kind):
    data = own_files.own(tmp_path / "data", kind, n=64, judged=40)
    encoder = own_files.encoder(tmp_path / "encoder")
    for steps in (4, 30):
        arguments = [encoder, "--task", "own", "--data", data, *QUICK, "--max-steps", steps]
        own_files.succeeds("finetune", *arguments, "-o", tmp_path / f"tuned-{steps}")
    file = tmp_path / "predictions.jsonl"
    models = [tmp_path / "tuned-30", tmp_path / "tuned-4"]
    arguments = ["--task", "own", "--data", data, "--set", "data.max_length=24"]
    succeeds(*models, *arguments, "--predictions", file, "-o", tmp_path / "out")
    (decision,) = report_of(tmp_path / "out").decisions
    assert decision.metric == "f1"
    rows = lines_of(file)
    by_model = [[r for r in rows if r["model"] == m.name] for m in models]
    names = {"multi": sorted(NAMES), "tokens": ["LOC"]}[kind]
    assert [each.name for each in decision.classes] == names
    assert [each.enough for each in decision.classes] == [c.count >= 30 for c in decision.classes]
    if kind == "multi":
        assert set(decision.calibration) == {m.name for m in models}
        assert {t.label for t in decision.thresholds} <= set(names)
        assert decision.confusion is None
    else:
        assert decision.calibration == {}
        assert decision.confusion.labels == ["O", "LOC"]
        words = [
            (b, m)
            for base, model in zip(*by_model, strict=True)
            for b, m in zip(base["predicted"], model["predicted"], strict=True)
        ]
        assert decision.agreement == pytest.approx(np.mean([a == b for a, b in words]))
        first = decision.differing[0]
        base, model = ({r["id"]: r for r in rows}[first.id] for rows in by_model)
        differ = [
            i
            for i, (a, b) in enumerate(zip(base["predicted"], model["predicted"], strict=True))
            if a != b
        ]
        assert first.change == pytest.approx(len(differ) / len(base["texts"]))
        assert first.label == ", ".join(f"{base['texts'][i]} {base['label'][i]}" for i in differ)
        assert first.model == ", ".join(
            f"{base['texts'][i]} {model['predicted'][i]}" for i in differ
        )


def test_a_class_that_loses_too_much_fails_the_gate(models, data, judged, tmp_path):
    arguments, decision = [*models, "--task", "own", "--data", data], judged[1]
    lost = {each.name: -100 * each.metrics["recall"].difference for each in decision.classes}
    worst = max(lost, key=lost.__getitem__)
    count = next(each.count for each in decision.classes if each.name == worst)
    assert lost[worst] > 4
    for points, code in ((lost[worst] + 0.01, 0), (lost[worst] - 0.01, 5)):
        out = tmp_path / f"out-{code}"
        result = evaluate(*arguments, "--max-class-drop", points, "-o", out)
        assert result.exit_code == code, result.output
        assert (out / "report.json").is_file()
        message = f"loses {lost[worst]:.2f} points of recall in class {worst} ({count} examples)"
        assert (message in said_by(result)) == (code == 5)
    # The limit is a recipe key as well.
    recipe = ["--set", f"max_class_drop={lost[worst] - 0.01}", "-o", tmp_path / "again"]
    assert evaluate(*arguments, *recipe).exit_code == 5


def test_small_classes_are_not_checked(models, data, tmp_path):
    # One of 40 rows is 2.5 points, so a limit of 2 points needs 50 rows.
    arguments = [*models, "--task", "own", "--max-class-drop", 2]
    result = evaluate(*arguments, "--data", data, "-o", tmp_path / "out")
    assert result.exit_code == 5
    assert "no class has the 50 examples that the check needs" in said_by(result)
    assert "not enough rows to tell" in result.stdout
    (decision,) = report_of(tmp_path / "out").decisions
    assert decision.min_count == 50
    assert not any(each.enough for each in decision.classes)
    # One class with enough rows is checked, and the other one is listed.
    many = own_files.rows("class", 200, seed=1)
    kept = [row for i, row in enumerate(many) if row["label"] == LABELS[0] or i < 60]
    uneven = write(tmp_path / "data" / "validation.jsonl", kept).parent
    result = evaluate(*arguments, "--data", uneven, "-o", tmp_path / "uneven")
    (decision,) = report_of(tmp_path / "uneven").decisions
    assert [each.enough for each in decision.classes] == [True, False]
    assert decision.classes[0].count >= 50 > decision.classes[1].count
    assert f"class {LABELS[1]}" not in said_by(result)


def test_the_class_gate_needs_two_models_and_classes(models, data, tmp_path):
    gate = ["--max-class-drop", 2]
    own = ["--task", "own", "--data", data]
    assert "only one is given" in refused(tmp_path, "evaluate", models[0], *own, *gate)
    write(tmp_path / "scores" / "validation.jsonl", own_files.rows("score", 8, seed=1))
    head = own_files.headed(tmp_path / "score", ("LABEL_0",))
    message = refused(
        tmp_path, *("evaluate", head, head, "--task", "own", "--data", tmp_path / "scores"), *gate
    )
    assert "has no classes" in message
