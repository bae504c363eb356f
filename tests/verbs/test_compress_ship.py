"""What the selection rows decide about a chosen model, and what the rows of a run are warned of."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import ModelCard

from kdcli.data.labelled.partition import Partition, Pools
from kdcli.deploy.export import SECOND_NAMES, add_second_names
from kdcli.models.temperature import TEMPERATURE
from kdcli.recipe.sections import RunOptions
from kdcli.report.front import Score
from kdcli.report.schema_decisions import (
    Calibration,
    ClassChange,
    Decision,
)
from kdcli.report.sections.repeat import LEFT_OUT, repeat_command
from kdcli.verbs.compress.divide import goal_notes, row_notes
from kdcli.verbs.compress.limits import GoalSettings
from kdcli.verbs.compress.ship import (
    OF_STEP,
    Shipped,
    best_card,
    check_temperature,
    fit_temperature,
    never_predicted,
)

STEP_CARD = """---
base_model: org/big
base_model_relation: finetune
tags: [kdcli, distillation, pruned]
pipeline_tag: text-classification
metrics: [accuracy]
model-index:
- name: m
  results:
  - task: {type: text-classification}
    dataset: {name: sst2, type: nyu-mll/glue, split: selection}
    metrics: [{type: accuracy, value: 0.99}]
---
# big distilled to 2x64

Distilled from big, it takes 1 MB and runs with transformers.

How to run it.

### Scores on sst2

| model | accuracy |

## Repeat it

```sh
kdcli distill teacher
```

Versions: kdcli 1.
"""


def test_the_card_of_best_has_the_scores_of_the_verification_rows(tmp_path):
    """The step's card has the scores of the rows that chose the model, and the step's command."""
    scores = [Score("sst2", "", "verification", {"accuracy": 0.9})]
    facts, command = ["loses 1.00 points", "takes 1 MB"], "kdcli compress org/big"
    shipped = Shipped("org/big", "2x64", facts, "It is a cascade.", scores, "nyu-mll/glue")
    text = best_card(STEP_CARD, tmp_path, shipped, command)
    card = ModelCard(text)
    (result,) = card.data.eval_results
    assert (result.dataset_type, result.dataset_split) == ("nyu-mll/glue", "verification")
    assert (result.metric_type, result.metric_value) == ("accuracy", 0.9)
    assert (card.data.model_name, card.data.library_name) == ("big-2x64", "transformers")
    assert (card.data.base_model, card.data["base_model_relation"]) == ("org/big", "finetune")
    lead = "Made from org/big by distillation and pruning, it loses 1.00 points, takes 1 MB and"
    title = "# org/big compressed to 2x64"
    results = f"### Scores on sst2\n\n{OF_STEP}\n\n| model | accuracy |"
    middle = f"{lead} runs with transformers.\n\nIt is a cascade.\n\nHow to run it.\n\n{results}"
    assert (
        card.text.strip()
        == f"{title}\n\n{middle}\n\n## Repeat it\n\n```sh\n{command}\n```\n\nVersions: kdcli 1."
    )
    (tmp_path / "export.json").write_text('{"files": {"onnx/model_int8.onnx": 3}}')
    measured = "with ONNX Runtime (`onnx/model_int8.onnx`, which these numbers are for) or, as"
    assert measured in best_card(STEP_CARD, tmp_path, shipped, command)
    small = tmp_path / "small"
    small.mkdir()
    (small / "README.md").write_text("---\ntags: [kdcli, quantized]\n---\n# Small\n")
    both = ModelCard(best_card(STEP_CARD, tmp_path, replace(shipped, first=small), command))
    assert "by distillation, pruning and quantization" in both.text
    assert both.data.tags == [*card.data.tags, "quantized"]
    without_scores = STEP_CARD.replace("### Scores on sst2", "### Models")
    assert OF_STEP not in best_card(without_scores, tmp_path, shipped, command)


def test_the_second_name_of_a_file_is_a_link_and_not_a_copy(tmp_path):
    file, second = (tmp_path / name for name in next(iter(SECOND_NAMES.items())))
    file.parent.mkdir()
    for path in (file, second):
        path.write_bytes(b"model")
    add_second_names(tmp_path)
    assert second.samefile(file)


def test_a_command_to_repeat_has_no_resume():
    options = RunOptions(arguments=("compress", "m", "--resume", "--max-drop", "1"))
    assert options.command_line("compress") == "kdcli compress m --max-drop 1"
    managed = RunOptions(arguments=("finetune", "m", "--resume", "auto", "--task", "auto"))
    assert managed.command_line("finetune") == "kdcli finetune m --task auto"


def test_the_command_that_continues_a_run_names_its_directory():
    folder = Path("runs/compress m")
    words = ("compress", "m", "--overwrite", "--budget=9m")
    options = RunOptions(arguments=words)
    command = "kdcli compress m --budget=9m -o 'runs/compress m' --resume"
    assert options.continuing_command("compress", folder) == command
    larger = options.continuing_command("compress", folder, {"--budget": "20m"})
    assert larger == command.replace("9m", "20m")
    named = RunOptions(arguments=("compress", "m", "-o", "out"), output_dir=Path("out"))
    changed = named.continuing_command("compress", Path("out"), {"--max-drop": "0.5"}, ())
    assert changed == "kdcli compress m -o out --max-drop 0.5"
    # The last value of a repeated option counts, so all of them change.
    words = ("compress", "m", "--max-drop", "1", "--max-drop=2", "-o", "out")
    repeated = RunOptions(arguments=words, output_dir=Path("out"))
    changed = repeated.continuing_command("compress", Path("out"), {"--max-drop": "0.5"}, ())
    assert changed == "kdcli compress m --max-drop 0.5 --max-drop=0.5 -o out"
    # Python has no command.
    changed = RunOptions().continuing_command("compress", Path("out"), {"--budget": "9m"}, ())
    assert changed == "the same call with output_dir='out', budget='9m'"
    continuing = RunOptions().continuing_command("compress", Path("out"))
    assert continuing == "the same call with output_dir='out', resume=True"
    # With its `overwrite=True`, the same call would delete the run.
    continuing = RunOptions(overwrite=True).continuing_command("compress", Path("out"))
    assert continuing == "the same call with output_dir='out', resume=True, overwrite=False"


def test_the_command_of_a_model_card_has_neither_price_nor_directories(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "acme").mkdir()
    (tmp_path / "acme" / "rows.csv").touch()
    command = (
        "kdcli compress org/model --data /home/me/customer.csv --price-per-hour 0.5 "
        "--set data.source=acme/rows.csv --task sst2 --max-drop 1.0 -o ~/acme/run"
    )
    assert repeat_command("compress", command, public=True) == (
        "kdcli compress org/model --data customer.csv --set data.source=rows.csv --task sst2 "
        f"--max-drop 1.0 -o run\n{LEFT_OUT}"
    )
    served = "kdcli distill --teacher http://localhost:8080/v1 --data "
    command = served + "'https://me:secret@host/rows.csv?sig=secret'"
    assert repeat_command("distill", command, public=True).startswith(
        f"{served}https://host/rows.csv\n"
    )
    priced = "kdcli compress m --price-per-hour=0.5 -y"
    assert repeat_command("compress", priced, public=True) == "kdcli compress m -y"
    assert repeat_command("compress", priced) == priced


def calibration(temperature):
    return Calibration(
        error=0.1,
        temperature=temperature,
        scaled_error=0.02,
        stored_temperature=None,
        stored_error=None,
    )


def decision(**changed):
    fields = {"model": "int8", "baseline": "big", "task": "own", "set": "", "n": 100}
    fields |= {"reference": "labels", "metric": "f1", "min_count": 30, "classes": []}
    return Decision(**fields | {"agreement": 0.9} | changed)


@pytest.mark.parametrize(
    ("found", "stored"),
    [
        (decision(calibration={"int8": calibration(1.7), "big": calibration(3.0)}), 1.7),
        (decision(calibration={"int8": calibration(None)}), None),
        (decision(calibration={"int8": calibration(1.7)}, reference="teacher"), None),
        (decision(calibration={"other": calibration(1.7)}, model="other"), None),
    ],
)
def test_the_temperature_of_the_selection_rows_is_stored(found, stored, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "bert"}', "utf-8")
    fit_temperature(tmp_path, [found], "int8")
    config = json.loads((tmp_path / "config.json").read_text("utf-8"))
    assert config.get(TEMPERATURE) == stored
    assert config["model_type"] == "bert"


@pytest.mark.parametrize(
    ("error", "kept", "said"),
    [(0.04, True, "from 0.100 to 0.040: config.json stores it"), (0.1, False, "not stored")],
)
def test_a_temperature_that_does_not_help_on_other_rows_is_removed(error, kept, said, tmp_path):
    (tmp_path / "config.json").write_text('{"kdcli_temperature": 1.7}', "utf-8")
    checked = calibration(1.2).model_copy(update={"stored_temperature": 1.7, "stored_error": error})
    (note,) = check_temperature(tmp_path, [decision(calibration={"int8": checked})], "int8")
    assert said in note
    config = json.loads((tmp_path / "config.json").read_text("utf-8"))
    assert (TEMPERATURE in config) == kept


def test_the_note_on_the_temperature_names_the_first_of_several_sets(tmp_path):
    (tmp_path / "config.json").write_text('{"kdcli_temperature": 1.7}', "utf-8")
    checked = calibration(1.2).model_copy(update={"stored_temperature": 1.7, "stored_error": 0.1})
    sets = [decision(set=name, calibration={"int8": checked}) for name in ("matched", "mismatched")]
    (note,) = check_temperature(tmp_path, sets, "int8")
    assert note.startswith("on the verification rows of matched, the temperature 1.7 of")


def test_without_a_stored_temperature_there_is_nothing_to_check(tmp_path):
    found = decision(calibration={"int8": calibration(1.2)})
    assert check_temperature(tmp_path, [found], "int8") == []


def of_class(name, both, only_baseline, only_model):
    return ClassChange(
        name=name,
        count=both + only_baseline,
        enough=True,
        metrics={},
        both=both,
        only_baseline=only_baseline,
        only_model=only_model,
    )


def test_classes_that_are_never_predicted_are_named():
    classes = [of_class("a", 50, 0, 3), of_class("b", 0, 5, 0), of_class("c", 0, 0, 2)]
    lost, absent = never_predicted([decision(classes=classes, reference="teacher")])
    assert "the chosen model never predicts b on" in lost
    assert "the teacher never predicts c on" in absent
    # With labels, a class may simply not be in the rows.
    assert len(never_predicted([decision(classes=classes)])) == 1
    same = [of_class("a", 5, 1, 0), of_class("b", 7, 0, 1)]
    assert never_predicted([decision(classes=same, reference="teacher")]) == []


def test_a_note_names_at_most_ten_classes():
    classes = [of_class(f"c{n}", 0, 5, 0) for n in range(40)]
    (lost,) = never_predicted([decision(classes=classes)])
    assert "c9 and 30 more" in lost
    assert "c10" not in lost


def hashes(*numbers):
    return np.array(numbers, np.uint64)


def test_rows_that_are_in_two_splits_are_counted():
    train, validation = np.arange(400, dtype=np.uint64), hashes(1, 2, 1000)
    partition = Partition(selection=hashes(7), verification=hashes(1, 2, 1000))
    (note,) = row_notes(Pools(train, validation), partition)
    assert note.startswith("2 training rows are also in the validation or test split")
    assert row_notes(Pools(train, hashes(1000)), partition) == []


def test_rows_that_trained_the_model_are_counted():
    train = np.arange(400, dtype=np.uint64)
    partition = Partition(selection=hashes(7), verification=hashes(8))
    (note,) = row_notes(Pools(train, known=hashes(7, 20, 21, 1000)), partition)
    assert note.startswith("2 of 400 rows trained the model")
    few = "leaves few selection and verification rows: give other rows, or train without some of"
    assert few in note
    verified = Partition(hashes(7), np.arange(600, 800, dtype=np.uint64))
    (note,) = row_notes(Pools(np.arange(800, dtype=np.uint64), known=hashes(9)), verified)
    assert "leaves few selection rows: give other rows" in note
    enough = Partition(np.arange(400, 600, dtype=np.uint64), np.arange(600, 800, dtype=np.uint64))
    (note,) = row_notes(Pools(np.arange(800, dtype=np.uint64), known=hashes(7)), enough)
    assert "few rows" not in note


def test_few_rows_are_a_note():
    chance, wide = goal_notes(GoalSettings(max_drop=1.0), 199, 1)
    assert chance.startswith("only 199 selection rows: chance decides")
    assert wide.startswith("only 1 verification rows")
    assert "Without --strict, only the measured drop must stay within --max-drop" in wide
    strict = goal_notes(GoalSettings(max_drop=1.0, strict=True), 199, 1)[1]
    assert "with --strict all of it must stay within --max-drop" in strict


def test_a_drop_of_zero_is_met_by_chance():
    assert goal_notes(GoalSettings(max_drop=0.5), 500, 500) == []
    (note,) = goal_notes(GoalSettings(max_drop=0.0), 500, 500)
    assert "by chance" in note
