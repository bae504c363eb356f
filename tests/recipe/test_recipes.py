"""Every shipped recipe: it resolves, its loss fits its shapes, it says what it is. Values:
test_published.py."""

import pytest
import yaml

from kdcli.data.tasks import named_tasks
from kdcli.losses import build_objective, check_settings
from kdcli.recipe.resolve import combinations, recipe_models, resolve, shipped, shipped_recipes
from kdcli.types import ModelShape
from kdcli.verbs.cotrain.settings import CotrainRecipe
from kdcli.verbs.distill.distillation import student_shapes
from kdcli.verbs.distill.settings import DistillRecipe
from kdcli.workloads.settings import FinetuneRecipe

BASE, DEMO = ModelShape(12, 768, 3072, 12), ModelShape(4, 128, 512, 4)
EVERY = [(verb, name) for verb in recipe_models() for name in shipped(verb)]


@pytest.mark.parametrize("name", shipped("distill"))
def test_recipe_resolves_and_its_loss_section_is_known(name):
    recipe = resolve(DistillRecipe, recipe=name).recipe
    check_settings(recipe.method, recipe.loss)
    teacher = DEMO if recipe.teacher == "demo" else BASE
    shapes = student_shapes(recipe, teacher) if recipe.student.to else {}
    for shape in shapes.values():
        build_objective(recipe.method, recipe.loss, teacher, shape)


@pytest.mark.parametrize("task", named_tasks().values(), ids=named_tasks())
def test_every_task_has_a_recipe_of_its_name(task):
    recipe = resolve(FinetuneRecipe, recipe=task.name).recipe
    assert recipe.task == task.name
    assert recipe.data.max_length in (None, 64, task.max_length)
    assert recipe.choose_on in (None, *task.sets)
    assert combinations(resolve(FinetuneRecipe, recipe=task.name))[0][0] == {}


def test_no_recipe_of_finetune_lacks_a_task():
    assert set(shipped("finetune")) == set(named_tasks())


@pytest.mark.parametrize(("verb", "name"), EVERY)
def test_recipe_is_short_and_says_what_it_is(verb, name):
    text = shipped(verb)[name].read_text("utf-8")
    lines = text.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 120
    assert lines[0].startswith("# ")
    assert yaml.safe_load(text)["verb"] == verb


def test_summary_and_table_name_every_recipe():
    table = (shipped("distill")["demo"].parents[1] / "README.md").read_text("utf-8")
    listed = "\n".join(row["name"] for row in shipped_recipes())
    names = [name for _, name in EVERY]
    assert [name for name in (*shipped("ablations"), *names) if f"| `{name}` |" not in table] == []
    assert [name for name in names if name not in listed] == []


def cells(table):
    """Name -> the other cells, of all rows that begin with a name."""
    rows = [
        [c.strip() for c in line.strip("|").split("|")]
        for line in table.splitlines()
        if line.startswith("| `")
    ]
    return {name.strip("`"): others for name, *others in rows}


def test_the_table_names_the_models_of_the_recipes():
    table = (shipped("distill")["demo"].parents[1] / "README.md").read_text("utf-8")
    distilled, cotrained = (
        table.split(f"## {verb}\n")[1].split("\n## ")[0] for verb in ("distill", "cotrain")
    )
    teachers = {
        "BERT-base": "bert-base-uncased",
        "XLM-R base": "xlm-roberta-base",
        "embedded": "demo",
    }
    teachers |= {"all-MiniLM-L6-v2": "sentence-transformers/all-MiniLM-L6-v2"}
    teachers |= {"bge-small-en-v1.5": "BAAI/bge-small-en-v1.5"}
    for name, (teacher, student, assistant, *_) in cells(distilled).items():
        recipe = resolve(DistillRecipe, recipe=name).recipe
        assert (recipe.teacher, recipe.student.to) == (
            teachers.get(teacher),
            [student] if student != "yours" else [],
        )
        assert recipe.assistant in (assistant.replace("-", "none"), "auto"), name
    for name, (teacher, student, _) in cells(cotrained).items():
        pair = resolve(CotrainRecipe, recipe=name).recipe
        assert (pair.teacher, pair.student) == (teacher.split(",")[0], student)
        assert ("BERT-base" in teacher) == (pair.community.model == "bert-base-uncased")
