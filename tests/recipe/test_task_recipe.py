"""Recipes of distilling on a task: what lies beneath what, the stages' own values, lists of
variants."""

import pytest
import yaml
from transformers import BertConfig

from kdcli.data.tasks import named_tasks
from kdcli.errors import UsageError
from kdcli.losses import check_settings, inputs_of, on_tasks
from kdcli.models.grammar import parse_shape
from kdcli.recipe.resolve import ablations, resolve, shipped
from kdcli.types import ModelShape
from kdcli.verbs.distill.distill_recipes import (
    distill_recipe,
    general_recipe,
    stage_settings,
    undistilled_recipe,
)
from kdcli.verbs.distill.distillation import plan
from kdcli.verbs.distill.settings import DistillRecipe
from kdcli.verbs.prune.method_recipes import prune_recipes
from kdcli.verbs.prune.settings import PruneRecipe
from kdcli.workloads.finetune_recipes import eval_source, finetune_recipe
from kdcli.workloads.settings import DownstreamSettings, FinetuneRecipe

BASE = ModelShape(12, 768, 3072, 12)

# task: epochs of the intermediate stage, tokens, whether the prediction stage reads the copies
TINYBERT = {
    "cola": (50.0, 64, True),
    "sst2": (20.0, 64, True),
    "mrpc": (20.0, 128, True),
    "stsb": (20.0, 128, False),
    "qqp": (10.0, 128, True),
    "mnli": (10.0, 128, True),
    "qnli": (10.0, 128, True),
    "rte": (20.0, 128, True),
    "wnli": (20.0, 128, True),
    "squad": (10.0, 384, False),
    "squad_v2": (10.0, 384, False),
}


def asked(recipe=None, sets=(), overrides=None, **options):
    """A recipe as the command asks for it; `__` stands for the dot of a key."""
    given = {"teacher": "t", "student.to": ["4x312"]} | {
        k.replace("__", "."): v for k, v in options.items()
    }
    above = {"variant warm of mine.yaml": overrides or {}}
    return distill_recipe(recipe=recipe, sets=sets, options=given, above=above)


@pytest.mark.parametrize("task", TINYBERT)
def test_a_task_has_the_values_of_the_paper_without_being_asked(task):
    recipe = asked(task=task).recipe
    epochs, length, predict = TINYBERT[task]
    of_stage = stage_settings(recipe)
    assert (recipe.method, recipe.task) == ("tinybert", task)
    assert (of_stage.epochs, of_stage.lr, of_stage.batch_size, of_stage.max_steps) == (
        epochs,
        5e-5,
        32,
        None,
    )
    assert (recipe.train.epochs, recipe.train.lr, recipe.train.batch_size) == (3.0, 3e-5, 32)
    assert (recipe.data.max_length, recipe.data.stride) == (length, 128)
    assert (recipe.augment.copies, recipe.augment.probability, recipe.augment.candidates) == (
        20,
        0.4,
        15,
    )
    assert (recipe.augment.use, recipe.augment.predict) == (False, predict)


def test_every_recipe_of_tinybert_is_one_of_a_task_that_there_is():
    named = {
        name.removeprefix("tinybert-")
        for name in shipped("distill")
        if name.startswith("tinybert-") and "x" not in name
    }
    assert named == set(TINYBERT) | {"demo-topic"}
    assert named <= set(named_tasks())


@pytest.mark.parametrize("name", ["pd-6x384", *(f"tinybert-{task}" for task in TINYBERT)])
def test_a_shipped_recipe_resolves_with_stages_that_can_be(name):
    recipe = asked(name, task=None if name.startswith("tinybert-") else "mrpc").recipe
    assert recipe.task is not None
    on_tasks(recipe.method)
    check_settings(recipe.method, recipe.loss)
    stage_settings(recipe)
    undistilled_recipe(recipe, "student")
    if recipe.general.use:
        of_text = general_recipe(recipe).recipe
        check_settings(of_text.method, of_text.loss)
        assert inputs_of(of_text.method) & {"text", "masked"}


def test_an_option_beats_set_beats_the_recipe_beats_what_lies_beneath(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(
        "verb: distill-task\ntrain: {lr: 1e-5, epochs: 2.0}\ndata: {max_length: 32}\n", "utf-8"
    )
    given = asked(
        str(file), sets=["train.lr=2e-5", "train.epochs=4.0"], task="cola", train__lr=7e-5
    )
    recipe, origins = given.recipe, given.origins
    assert (recipe.train.lr, origins["train.lr"]) == (7e-5, "option")
    assert (recipe.train.epochs, origins["train.epochs"]) == (4.0, "--set")
    assert (recipe.data.max_length, origins["data.max_length"]) == (32, f"recipe {file}")
    assert (recipe.intermediate["epochs"], origins["intermediate.epochs"]) == (
        50.0,
        "recipe tinybert-cola",
    )
    assert (
        asked(str(file), task="cola", overrides={"train.lr": 9e-5}, train__lr=7e-5).recipe.train.lr
        == 9e-5
    )


def test_another_method_does_not_get_the_values_of_tinybert():
    recipe = asked(task="cola", method="pkd", train__lr=None).recipe
    assert (recipe.data.max_length, recipe.intermediate["epochs"]) == (None, 20.0)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"sets": ["intermediate.epochs=2.0"]}, (2.0, 5e-5, 32, None)),
        ({"sets": ["intermediate.epochs=2.0"], "task": "cola"}, (2.0, 5e-5, 32, None)),
        ({"sets": ["intermediate={lr: 1e-4}"]}, (20.0, 1e-4, 32, None)),
        ({"train__batch_size": 8, "train__max_steps": 7}, (20.0, 5e-5, 8, 7)),
    ],
)
def test_the_intermediate_stage_has_its_own_keys_and_else_those_of_the_prediction_stage(
    given, expected
):
    stage = stage_settings(asked(**{"task": "own"} | given).recipe)
    assert (stage.epochs, stage.lr, stage.batch_size, stage.max_steps) == expected


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("intermediate.lrr=1", "unknown key 'intermediate.lrr'; did you mean 'intermediate.lr'?"),
        ("intermediate.lr=fast", "'intermediate.lr' must be a number, got 'fast'"),
        ("intermediate.seed=1", "all stages share train.seed"),
        ("intermediate.dtype=bf16", "all stages share train.dtype"),
        ("kd.temperature=0", "'kd.temperature' must be greater than 0"),
        ("kd.weight=1.5", "'kd.weight' must be at most 1"),
        ("stage=both", "'stage' must be 'separate', 'joint' or 'none'"),
        ("augment.probability=0", "'augment.probability' must be greater than 0"),
        ("augment.copies=0", "'augment.copies' must be greater than 0"),
        ("cache_gb=-1", "'cache_gb' must be at least 0"),
    ],
)
def test_a_wrong_key_or_value_is_refused(key, message):
    with pytest.raises(UsageError) as refusal:
        stage_settings(asked(sets=[key], task="own").recipe)
    assert message in str(refusal.value)


def test_a_recipe_of_text_is_the_stage_before_the_tasks_own():
    given = asked("tinybert-4x312", task="mrpc", student__to=None)
    recipe = given.recipe
    assert recipe.general.use
    assert (recipe.student.to, recipe.student.init) == (["4x312:1200@12"], "random")
    assert recipe.intermediate["epochs"] == 20.0
    of_text = general_recipe(recipe).recipe
    alone = resolve(DistillRecipe, recipe="tinybert-4x312").recipe
    assert of_text.teacher == "bert-base-uncased"
    assert (of_text.method, of_text.student, of_text.loss) == (
        alone.method,
        alone.student,
        alone.loss,
    )
    assert (of_text.train, of_text.data) == (alone.train, alone.data)
    assert not of_text.measure.latency
    other = general_recipe(asked("tinybert-4x312", task="cola", student__to=None).recipe)
    assert other.to_yaml() == general_recipe(recipe).to_yaml(), "another task takes the same run"


def test_what_is_set_beats_the_recipe_of_text():
    recipe = asked(
        "minilmv2-6x384", sets=["loss.relation_heads=12", "student.layers=[2, 4]"], task="mrpc"
    ).recipe
    assert recipe.loss == {"relation_heads": 12, "teacher_layer": 12}
    assert recipe.student.layers == [2, 4]
    assert recipe.student.to == ["4x312"], "given as an option"


def test_the_stage_on_text_takes_the_students_dropout():
    recipe = asked(sets=["student.dropout=0.25"], task="own", general__use=True).recipe
    assert general_recipe(recipe).recipe.student.dropout == 0.25


def test_the_stage_on_text_takes_method_and_loss_of_the_task_where_it_has_no_recipe():
    sets = ["loss.layers=top", "general.overrides.train.lr=1e-3"]
    of_text = general_recipe(
        asked(sets=sets, task="own", general__use=True, general__source="x").recipe
    ).recipe
    assert (of_text.method, of_text.loss, of_text.data.source) == (
        "tinybert",
        {"layers": "top"},
        "x",
    )
    assert (of_text.train.lr, of_text.teacher, of_text.assistant) == (1e-3, "t", "none")
    with pytest.raises(UsageError, match=r"did you mean 'general\.overrides\.train\.lr'"):
        general_recipe(
            asked(sets=["general.overrides.train.lrr=1"], task="own", general__use=True).recipe
        )


def test_the_student_alone_is_fine_tuned_as_the_task_is():
    recipe = asked(
        task="cola", train__seed=5, sets=["undistilled.overrides.train.lr=2e-5", "keep=best"]
    ).recipe
    alone = undistilled_recipe(recipe, "somewhere").recipe
    assert (alone.model, alone.task, alone.keep) == ("somewhere", "cola", "best")
    assert (alone.train.epochs, alone.train.lr, alone.train.seed) == (10.0, 2e-5, 5)
    assert alone.data.max_length == 64
    assert (
        undistilled_recipe(asked(task="own", train__max_steps=9).recipe, "x").recipe.train.max_steps
        == 9
    )


def test_the_ablations_of_tinybert_are_the_rows_of_its_tables():
    variants = ablations("tinybert")
    assert list(variants) == [
        "full",
        "without-general",
        "without-augmentation",
        "without-embedding",
        "without-prediction",
        "without-transformer",
        "without-attention",
        "without-hidden",
        "map-top",
        "map-bottom",
    ]
    assert variants["full"] == {}
    for over in variants.values():
        recipe = asked(
            "tinybert-4x312", task="mrpc", student__to=None, augment__use=True, overrides=over
        ).recipe
        module = check_settings(recipe.method, recipe.loss)
        parse_shape(recipe.student.to[0], BASE)
        values = recipe.model_dump() | {"loss": module.model_dump()}
        for key, value in over.items():
            section, name = key.split(".")
            assert values[section][name] == value


def test_without_prediction_learns_the_labels_of_the_original_examples():
    over = ablations("tinybert")["without-prediction"]
    recipe = asked(
        "tinybert-4x312", task="mrpc", student__to=None, augment__use=True, overrides=over
    ).recipe
    assert (recipe.kd.weight, recipe.augment.use, recipe.augment.predict) == (0.0, True, False)


def test_the_separate_stage_of_tinybert_keeps_its_rate_and_that_of_prediction_falls():
    recipe = asked(task="cola", sets=["train.warmup_steps=7"]).recipe
    stage = stage_settings(recipe)
    assert (stage.lr_schedule, stage.warmup_steps, stage.epochs) == ("constant", 0, 50.0)
    assert (recipe.train.lr_schedule, recipe.train.warmup_steps) == ("linear", 7)


def test_a_list_of_variants_changes_something_in_each():
    listed = yaml.safe_load(shipped("ablations")["tinybert"].read_text("utf-8"))
    plain = asked("tinybert-4x312", task="mrpc", augment__use=True).recipe
    for variant, over in ablations("tinybert").items():
        recipe = asked("tinybert-4x312", task="mrpc", augment__use=True, overrides=over).recipe
        assert (recipe == plain) == (variant not in listed)


def test_the_variants_on_text_are_students_of_their_own():
    values = {"student.to": ["2x192"], "variants": ablations("minilm")}
    planned = plan(
        resolve(DistillRecipe, recipe=None, options=values).recipe, BertConfig(hidden_size=384)
    )
    assert list(planned) == list(ablations("minilm"))
    assert planned["without-assistant"].assistant is None
    assert planned["minilmv2-upper"].recipe.loss == {"teacher_layer": -1}


def test_variants_of_ones_own(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("warm: {kd.temperature: 4.0}\nlong: {train: {epochs: 9.0}}\n", "utf-8")
    assert ablations(str(file)) == {
        "full": {},
        "warm": {"kd.temperature": 4.0},
        "long": {"train.epochs": 9.0},
    }
    for text, message in (
        ("warm: 4", "'warm' must hold a mapping"),
        ("- warm", "must hold a mapping of keys"),
    ):
        file.write_text(text, "utf-8")
        with pytest.raises(UsageError, match=message):
            ablations(str(file))
    with pytest.raises(UsageError, match="did you mean 'tinybert'"):
        ablations("tinybrt")
    with pytest.raises(UsageError, match=r"unknown key 'kd\.temprature' \(variant warm of mine"):
        asked(task="own", overrides={"kd.temprature": 4.0})


def test_a_recipe_that_a_run_left_gives_the_same_run_again(tmp_path):
    first = asked(task="cola", sets=["loss.layers=top", "intermediate.epochs=1.5"])
    file = tmp_path / "recipe.yaml"
    file.write_text(first.to_yaml(), "utf-8")
    again = distill_recipe(recipe=str(file), options={})
    assert again.recipe == first.recipe
    assert resolve(DistillRecipe, recipe=str(file)).recipe == first.recipe


def pruned(*methods, recipe=None, sets=(), **options):
    """What `prune` does with these methods: each one's recipe and where its values came from."""
    given = {key.replace("__", "."): value for key, value in options.items()}
    return prune_recipes(methods, recipe=recipe, sets=sets, options=given)


def test_keys_that_no_longer_exist_are_ignored_in_the_recipe_of_a_pruning_run(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("verb: prune\ntask: mrpc\ndata:\n  gone_key: null\n")
    (tmp_path / "log.jsonl").touch()
    (resolved,) = pruned(recipe=str(recipe))
    assert resolved.recipe.task == "mrpc"


def test_methods_of_pruning_share_examples_and_steps_and_no_learning_rate():
    theirs = resolve(PruneRecipe, recipe="smp-mrpc").recipe
    plain = PruneRecipe()
    for order in (("smp", "movement"), ("movement", "smp")):
        recipes = {of.recipe.method: of for of in pruned(*order, task="mrpc")}
        assert list(recipes) == list(order)
        smp, movement = (recipes[m].recipe for m in ("smp", "movement"))
        assert smp == theirs
        assert movement.data == smp.data
        assert movement.train == smp.train.model_copy(update={"lr": plain.train.lr})
        assert (movement.pruner, movement.kd) == (plain.pruner, plain.kd)
        assert recipes["movement"].origins["train.epochs"] == "recipe smp-mrpc"
        assert "train.lr" not in recipes["movement"].origins, "the method's own may stand there"
    (alone,) = pruned("movement", task="mrpc")
    assert alone.recipe.train == plain.train
    # So do runs that are compared, and a recipe's own method with another one.
    options = {"task": "mrpc"}
    variant = prune_recipes(["movement"], recipe=None, sets=(), options=options, compared=["smp"])
    for (one,) in (variant, pruned("movement", recipe="smp-mrpc")):
        assert one.recipe.train == theirs.train.model_copy(update={"lr": plain.train.lr})
        assert "train.lr" not in one.origins


def test_the_recipe_of_pruning_is_that_of_the_method_and_task_in_the_end():
    theirs = resolve(PruneRecipe, recipe="smp-mrpc").recipe
    (resolved,) = pruned(sets=["task=mrpc"])
    assert resolved.recipe == theirs
    (resolved,) = pruned(sets=["method=magnitude"], task="mrpc")
    assert resolved.recipe == PruneRecipe(task="mrpc", method="magnitude")
    assert resolved.origins["method"] == "--set"
    (resolved,) = pruned("smp", task="mrpc", recipe="smp-sst2", train__epochs=1.0)
    assert (
        resolved.recipe.train.batch_size
        == resolve(PruneRecipe, recipe="smp-sst2").recipe.train.batch_size
    )
    assert (resolved.recipe.task, resolved.recipe.train.epochs) == ("mrpc", 1.0)


def test_fine_tuning_is_by_the_recipe_of_the_task_however_that_is_said(tmp_path):
    theirs = resolve(FinetuneRecipe, recipe="mrpc").recipe
    assert finetune_recipe(options={"task": "mrpc"}).recipe == theirs
    assert finetune_recipe(sets=["task=mrpc"], options={}).recipe == theirs
    assert finetune_recipe(options={"task": "own"}).recipe == FinetuneRecipe(task="own")
    file = tmp_path / "mine.yaml"
    file.write_text("task: mrpc\ntrain: {batch_size: 8}\n", encoding="utf-8")
    mine = finetune_recipe(recipe=str(file), options={}).recipe
    assert mine.train == FinetuneRecipe().train.model_copy(update={"batch_size": 8}), (
        "a file says all that differs"
    )


def test_the_folder_of_a_task_is_found_in_the_home_directory(tmp_path, monkeypatch):
    (tmp_path / "data" / "rte").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(tmp_path))
    settings = DownstreamSettings(tasks=["rte", "sst2"], source="~/data")
    assert eval_source(settings, "rte") == str(tmp_path / "data" / "rte")
    with pytest.raises(UsageError, match="there are rte/"):
        eval_source(settings, "sst2")
