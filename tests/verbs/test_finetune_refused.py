"""What `kdcli finetune` refuses: exit code 2, one message that names file and row, nothing written.

Messages on single rows and files are tested in tests/data.
"""

import shlex

import own_files
import pytest
from own_files import QUICK, refused, write

from kdcli.errors import UsageError
from kdcli.recipe.resolve import combinations, grid_options
from kdcli.verbs.finetune.run import check_grid
from kdcli.workloads.finetune_recipes import finetune_recipe
from kdcli.workloads.finetuning import request_of
from kdcli.workloads.labelled_tasks import check_task_data, open_workload
from kdcli.workloads.settings import FinetuneRecipe


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    return own_files.encoder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture
def data(tmp_path):
    return own_files.own(tmp_path / "data", "class", n=64, judged=16)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no model given"),
        (["MODEL"], "no task given"),
        (["MODEL", "--task", "own"], "no data given"),
        (
            ["MODEL", "--task", "own", "--data", "DATA", "--seeds", "0"],
            "'seeds' must be greater than 0, got 0",
        ),
        (["MODEL", "--task", "own", "--data", "DATA", "--device", "tpu"], "unknown device"),
        (
            ["MODEL", "--task", "sst2", "--data", "DATA"],
            "'label' of task sst2 must be one of 0 (negative), 1 (positive)",
        ),
        (["DATA", "--task", "own", "--data", "DATA"], "has no config.json"),
        (
            ["demo-classifier", "--task", "own", "--data", "DATA", "--set", "data.labels=teacher"],
            "task own: the training rows have no labels",
        ),
    ],
)
def test_a_bad_command_line(encoder, data, tmp_path, arguments, message):
    places = {"MODEL": encoder, "DATA": data}
    assert message in refused(tmp_path, "finetune", *(places.get(a, a) for a in arguments), *QUICK)


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ("seed=1,2", "a seed is not a setting"),
        ("data.max_length=16,24", "grid.data.max_length: the runs of a grid share"),
        ("model=a,b", "grid.model: the runs of a grid share"),
        ("dtype=fp32,bf16", "grid.train.dtype: the runs of a grid share"),
        ("warmup_steps=1,", "grid.train.warmup_steps must hold numbers or words, got None"),
        ("lr=1e-3,0.001", "the grid holds train.lr=0.001 twice"),
    ],
)
def test_a_grid_of_what_all_runs_share(grid, message):
    resolved = finetune_recipe(options={"task": "own", **grid_options(FinetuneRecipe, [grid])})
    with pytest.raises(UsageError) as refusal:
        check_grid([values for values, _ in combinations(resolved)])
    assert message in f"{refusal.value}"


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        (
            ["--grid", "epochs=0.001,0.002"],
            "the grid's train.epochs=0.001 and train.epochs=0.002 give the same training: 1 steps",
        ),
        (
            ["--grid", "epochs=5,10", "--max-steps", "5"],
            "grid.train.epochs changes nothing together with train.max_steps",
        ),
        (
            shlex.split("--max-steps 9 --set train.warmup_steps=2 --grid warmup_fraction=0.1,0.2"),
            "train.warmup_fraction=0.2 give the same training: 9 steps, 2 of warm-up",
        ),
    ],
)
def test_cells_of_a_grid_that_train_the_same_are_refused(encoder, data, tmp_path, grid, message):
    options = ["--task", "own", "--data", data, "--set", "data.max_length=24", "--batch-size", "8"]
    assert message in refused(tmp_path, "finetune", encoder, *options, *grid)


def recipe_of(model, task, data, **options):
    values = {"model": str(model), "task": task, "data.source": str(data), "data.max_length": 24}
    values |= {"data.stride": 4, "train.max_steps": 9}
    return finetune_recipe(options=values | options).recipe


def checked(recipe, session):
    return check_task_data(request_of(recipe, recipe.model))


def opened(recipe, session):
    return open_workload(request_of(recipe, recipe.model), session)[0]


def test_a_set_to_choose_on_must_be_there(encoder, session, data, tmp_path):
    texts = [r["text"] for r in own_files.rows("class", 32)]
    for name in ("train", "validation_matched", "validation_mismatched"):
        rows = [
            {"premise": text, "hypothesis": name, "label": i % 3} for i, text in enumerate(texts)
        ]
        write(tmp_path / "mnli" / f"{name}.jsonl", rows)
    for task, source, there in (
        ("mnli", tmp_path / "mnli", "matched, mismatched"),
        ("own", data, "there is only one"),
    ):
        with pytest.raises(
            UsageError, match=f"choose_on matchd is not among the evaluated sets: {there}"
        ):
            checked(recipe_of(encoder, task, source, choose_on="matchd"), session)


def misplaced(lines, numbers):
    for number in numbers:
        lines[number]["answers"]["answer_start"][0] += 1
    return lines


def test_few_misplaced_answers_are_left_out_and_many_are_refused(encoder, session, tmp_path):
    data = own_files.own(tmp_path / "data", "span", n=200, judged=16)
    path = write(data / "train.jsonl", misplaced(own_files.rows("span", 200), [123]))
    task = opened(recipe_of(encoder, "own", data), session)
    dropped = task.notes.index("1 training questions were dropped:")
    assert task.notes[dropped + 1].startswith(f"{path}:124: answer 'w30' is not at character")
    assert len(task.train.rows) == 199
    write(path, misplaced(own_files.rows("span", 200), range(0, 200, 20)))
    with pytest.raises(UsageError, match="10 of 200 answers are not at answer_start") as refusal:
        checked(recipe_of(encoder, "own", data), session)
    assert f"{path}:1: answer 'w30' is not at character" in str(refusal.value)
    assert "answer_start counts characters of the context, from 0" in str(refusal.value.hint)
