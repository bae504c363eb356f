"""Every shipped recipe: it resolves, its loss section is one its method knows, and the papers' values stand in it."""

import pytest
import yaml

from kdcli.commands.distill.settings import DistillRecipe
from kdcli.data.tasks import tasks
from kdcli.downstream.settings import FinetuneRecipe
from kdcli.losses import build_objective, check_settings
from kdcli.models.shape import parse_shape
from kdcli.recipe.resolve import combinations, recipe_models, resolve, shipped, summary
from kdcli.types import ModelShape

BASE, DEMO = ModelShape(12, 768, 3072, 12), ModelShape(4, 128, 512, 4)
EVERY = [(verb, name) for verb in recipe_models() for name in shipped(verb)]

# name: teacher, method, student, assistant, batch, lr, steps, beta2
PUBLISHED = {
    "minilm-6x768": ("bert-base-uncased", "minilm", "6x768", "none", 1024, 5e-4, 400_000, 0.999),
    "minilm-12x384": ("bert-base-uncased", "minilm", "12x384", "none", 256, 3e-4, 400_000, 0.999),
    "minilm-6x384": ("bert-base-uncased", "minilm", "6x384", "12x384", 256, 3e-4, 400_000, 0.999),
    "minilm-4x384": ("bert-base-uncased", "minilm", "4x384", "12x384", 256, 3e-4, 400_000, 0.999),
    "minilm-3x384": ("bert-base-uncased", "minilm", "3x384", "12x384", 256, 3e-4, 400_000, 0.999),
    "minilm-inhouse-12x384": (None, "minilm", "12x384", "none", 2048, 6e-4, 400_000, 0.98),
    "minilm-inhouse-6x384": (None, "minilm", "6x384", "12x384", 512, 4e-4, 400_000, 0.98),
    "minilm-multilingual-12x384": ("xlm-roberta-base", "minilm", "12x384", "none", 256, 3e-4, 1_000_000, 0.999),
    "minilm-multilingual-6x384": ("xlm-roberta-base", "minilm", "6x384", "12x384", 512, 6e-4, 400_000, 0.999),
    "minilmv2-6x768": ("bert-base-uncased", "minilmv2", "6x768", "none", 256, 6e-4, 400_000, 0.999),
    "minilmv2-6x384": ("bert-base-uncased", "minilmv2", "6x384", "none", 256, 6e-4, 400_000, 0.999),
}


@pytest.mark.parametrize("name", shipped("distill"))
def test_recipe_resolves_and_its_loss_section_is_known(name):
    recipe = resolve(DistillRecipe, recipe=name).recipe
    check_settings(recipe.method, recipe.loss)
    for shape in recipe.student.to:
        parse_shape(shape, DEMO if recipe.teacher == "demo" else BASE)


@pytest.mark.parametrize("task", tasks().values(), ids=tasks())
def test_every_task_has_a_recipe_of_its_name(task):
    recipe = resolve(FinetuneRecipe, recipe=task.name).recipe
    assert recipe.task == task.name
    assert recipe.data.max_length in (None, 64, task.max_length)
    assert recipe.choose_on in (None, *task.sets)
    assert combinations(resolve(FinetuneRecipe, recipe=task.name))[0][0] == {}


def test_no_recipe_of_finetune_lacks_a_task():
    assert set(shipped("finetune")) == set(tasks())


@pytest.mark.parametrize(("verb", "name"), EVERY)
def test_recipe_is_short_and_says_what_it_is(verb, name):
    text = shipped(verb)[name].read_text("utf-8")
    lines = text.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 120
    assert lines[0].startswith("# ")
    assert yaml.safe_load(text)["verb"] == verb


@pytest.mark.parametrize("name", PUBLISHED)
def test_training_values_are_the_published_ones(name):
    teacher, method, student, assistant, batch, lr, steps, beta2 = PUBLISHED[name]
    recipe = resolve(DistillRecipe, recipe=name).recipe
    train = recipe.train
    of_models = (recipe.teacher, recipe.method, recipe.student.to, recipe.assistant)
    assert of_models == (teacher, method, [student], assistant)
    assert (train.batch_size, train.lr, train.max_steps, train.beta2) == (batch, lr, steps, beta2)
    assert (train.warmup_steps, train.weight_decay, recipe.data.max_length) == (4000, 0.01, 512)


# name: method, student, batch, lr, epochs, tokens, warm-up steps and fraction, weight decay, clip
BY_EPOCHS = {
    "tinybert-4x312": ("tinybert", "4x312:1200@12", 256, 1e-4, 3.0, 128, 10_000, 0.05, 0.01, 1.0),
    "tinybert-6x768": ("tinybert", "6x768", 256, 1e-4, 3.0, 128, 10_000, 0.05, 0.01, 1.0),
    "distilbert-6x768": ("distilbert", "6x768", 4096, 5e-4, 3.0, 512, None, 0.05, 0.0, 5.0),
}


@pytest.mark.parametrize("name", BY_EPOCHS)
def test_training_values_are_the_published_ones_of_those_that_count_epochs(name):
    recipe = resolve(DistillRecipe, recipe=name).recipe
    train = recipe.train
    assert (recipe.teacher, recipe.assistant, train.max_steps) == ("bert-base-uncased", "none", None)
    assert BY_EPOCHS[name] == (
        *(recipe.method, *recipe.student.to, train.batch_size, train.lr, train.epochs, recipe.data.max_length),
        *(train.warmup_steps, train.warmup_fraction, train.weight_decay, train.clip),
    )
    build_objective(recipe.method, recipe.loss, BASE, parse_shape(recipe.student.to[0], BASE))


def test_distilbert_starts_from_the_layers_and_weights_of_its_authors():
    recipe = resolve(DistillRecipe, recipe="distilbert-6x768").recipe
    assert recipe.student.layers == [1, 3, 5, 8, 10, 12]
    assert recipe.loss == {"temperature": 2.0, "soft_weight": 5.0, "mlm_weight": 2.0, "hidden_weight": 1.0}


@pytest.mark.parametrize("name", ["minilmv2-6x768", "minilmv2-6x384"])
def test_minilmv2_uses_48_relation_heads_of_the_last_layer(name):
    assert resolve(DistillRecipe, recipe=name).recipe.loss == {"relation_heads": 48, "teacher_layer": 12}


def test_no_recipe_stands_outside_the_table():
    assert set(shipped("distill")) == set(PUBLISHED) | set(BY_EPOCHS) | {"demo", "small"}


def test_summary_and_table_name_every_recipe():
    table = (shipped("distill")["demo"].parents[1] / "README.md").read_text("utf-8")
    listed = "\n".join(row["name"] for row in summary())
    names = [name for _, name in EVERY]
    assert [name for name in (*shipped("ablations"), *names) if f"| `{name}` |" not in table] == []
    assert [name for name in names if name not in listed] == []
