"""Every value of every shipped recipe, and every default of a method, against a table written from
the papers."""

from pathlib import Path

import pytest
import yaml

from kdcli import losses, pruners
from kdcli.recipe.resolve import defaulted, flatten, read_recipe, recipe_models, resolve, shipped
from kdcli.verbs.prune.method_recipes import prune_recipes, with_defaults
from kdcli.verbs.prune.settings import PruneRecipe
from kdcli.workloads import text_generation

TABLE = yaml.safe_load((Path(__file__).parent / "published.yaml").read_text("utf-8"))
# A variant of a list of ablations is compared in test_task_recipe.py.
EVERY = [(verb, name) for verb in recipe_models() for name in shipped(verb)]


def complete(verb, name):
    """Dotted key -> value of a recipe, with its method's defaults."""
    resolved = resolve(recipe_models()[verb], recipe=name)
    if verb == "prune":
        resolved = with_defaults(resolved)
    elif verb == "distill" and resolved.recipe.task is not None:
        kd = {
            f"kd.{key}": value for key, value in losses.on_tasks(resolved.recipe.method)[1].items()
        }
        resolved = defaulted(resolved, kd, "method")
    values = resolved.recipe.model_dump()
    if verb == "prune":
        values["pruner"] = pruners.check_settings(
            resolved.recipe.method, resolved.recipe.pruner
        ).model_dump()
    elif verb == "finetune" and values["workload"]:
        values["workload"] = text_generation.Settings(**values["workload"]).model_dump()
    elif verb == "distill":
        values["loss"] = losses.check_settings(
            resolved.recipe.method, resolved.recipe.loss
        ).model_dump()
    return dict(flatten(values))


def plain(value):
    """Without the difference of 3 and 3.0."""
    return (
        [plain(v) for v in value]
        if isinstance(value, list)
        else float(value)
        if type(value) is int
        else value
    )


@pytest.mark.parametrize(("verb", "name"), EVERY)
def test_a_recipe_is_the_row_of_the_table(verb, name):
    row, found = TABLE[verb][name], complete(verb, name)
    assert {key: plain(found[key]) for key in row} == {
        key: plain(value) for key, value in row.items()
    }
    assert {key for key, _ in flatten(read_recipe(name, verb))} - {"verb"} <= set(row)


@pytest.mark.parametrize("verb", recipe_models())
def test_the_table_has_no_recipe_that_is_not_there(verb):
    assert set(TABLE.get(verb, {})) == set(shipped(verb))


@pytest.mark.parametrize("method", pruners.methods())
def test_a_pruning_method_starts_from_its_authors_values(method):
    recipe = with_defaults(resolve(PruneRecipe, recipe=None, options={"method": method})).recipe
    values = recipe.model_dump() | {"pruner": pruners.check_settings(method, {}).model_dump()}
    row, found = TABLE["pruners"][method], dict(flatten(values))
    assert {key: found[key] for key in row} == row
    assert {key for key in found if key.startswith("pruner.")} <= set(row)


@pytest.mark.parametrize("method", losses.methods())
def test_a_loss_starts_from_its_authors_values(method):
    found = losses.check_settings(method, {}).model_dump()
    if "task" in losses.inputs_of(method):
        found |= {f"kd.{key}": value for key, value in losses.on_tasks(method)[1].items()}
    assert found == TABLE["losses"][method]


@pytest.mark.parametrize(
    ("recipe", "task", "expected"),
    [
        ("smp-density-80", "mrpc", ([0.2], 32, 60.0, 3500, 0.6, 4.0, "steps")),
        ("smp-density-70", "mnli", ([0.3], 64, 12.0, 5250, 0.593, 4.0, "steps")),
        ("smp-paper", "cola", ([0.9], 64, 60.0, None, 0.6, 1.0, "density")),
        ("smp-rte-paper", None, ([0.9], 64, 60.0, None, 0.6, 1.0, "density")),
        (None, "rte", ([0.9], 32, 100.0, None, 0.6, 1.0, "steps")),
    ],
)
def test_a_recipe_of_prune_without_a_task_lies_over_the_tasks_own(recipe, task, expected):
    (resolved,) = prune_recipes([], recipe=recipe, sets=[], options={"task": task})
    found, train = resolved.recipe, resolved.recipe.train
    pruner = pruners.check_settings(found.method, found.pruner)
    steps = (
        pruner.warmup_steps,
        pruner.warmup_fraction,
        pruner.temperature,
        pruner.regularizer_schedule,
    )
    assert (found.sparsity, train.batch_size, train.epochs, *steps) == expected
    assert found.task == (task or "rte")


def test_a_recipe_of_prune_with_a_task_is_whole(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("task: rte\nmethod: smp\n", "utf-8")
    (resolved,) = prune_recipes([], recipe=str(file), sets=[], options={})
    assert (resolved.recipe.train.epochs, resolved.recipe.train.batch_size) == (3.0, 32)
