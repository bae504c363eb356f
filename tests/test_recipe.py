"""kdcli.recipe: precedence, origins, messages for what is wrong, and a resolved recipe that reads back as itself."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from kdcli.errors import UsageError
from kdcli.recipe import ELSEWHERE, DistillRecipe, TrainSettings, leaf_keys, resolve


@pytest.fixture
def write(tmp_path):
    def make(text: str, name: str = "mine.yaml") -> str:
        (tmp_path / name).write_text(text, "utf-8")
        return str(tmp_path / name)

    return make


def refused(**kwargs) -> str:
    """Message and hint of the `UsageError` that resolving must end in."""
    with pytest.raises(UsageError) as caught:
        resolve(DistillRecipe, **{"recipe": None, **kwargs})
    return f"{caught.value.message}\n{caught.value.hint or ''}"


def test_option_beats_set_beats_recipe_beats_default(write):
    recipe = write("train:\n  lr: 1e-3\n  clip: 2.0\n  batch_size: 8\n")
    resolved = resolve(
        DistillRecipe,
        recipe=recipe,
        sets=["train.lr=2e-3", "train.clip=3.0"],
        options={"train.lr": 4e-3, "train.seed": None},
    )
    train = resolved.recipe.train
    assert (train.lr, train.clip, train.batch_size, train.seed) == (4e-3, 3.0, 8, TrainSettings().seed)
    assert resolved.origins["train.lr"] == "option"
    assert resolved.origins["train.clip"] == "--set"
    assert resolved.origins["train.batch_size"] == f"recipe {recipe}"
    assert "train.seed" not in resolved.origins


def test_resolved_yaml_says_where_each_value_came_from(write):
    recipe = write("train:\n  clip: 2.0\n")
    text = resolve(
        DistillRecipe, recipe=recipe, sets=["train.seed=7"], options={"student.to": ["6x384", "4x312:1200@12"]}
    ).to_yaml()
    origins = {line.split(":")[0].strip(): line.rsplit("  # ", 1)[1] for line in text.splitlines() if "  # " in line}
    assert origins["clip"] == f"recipe {recipe}"
    assert (origins["seed"], origins["to"], origins["lr"]) == ("--set", "option", "default")


def test_every_leaf_is_written_once_with_an_origin():
    text = resolve(DistillRecipe, recipe=None).to_yaml()
    assert text.count("  # default") == len(leaf_keys(DistillRecipe))


@pytest.mark.parametrize(
    ("pair", "suggested"),
    [
        ("train.learning_rate=1", "train.lr"),
        ("train.batchsize=1", "train.batch_size"),
        ("lr=1", "train.lr"),
        ("data.lr=1", "train.lr"),
        ("methd=minilm", "method"),
    ],
)
def test_unknown_key_is_answered_with_the_nearest(pair, suggested):
    key = pair.split("=")[0]
    assert f"unknown key '{key}' (--set); did you mean '{suggested}'?" in refused(sets=[pair])


def test_names_of_other_tools_lead_to_keys_there_are():
    assert set(ELSEWHERE.values()) <= set(leaf_keys(DistillRecipe))


def test_unknown_key_with_nothing_near_lists_the_keys():
    message = refused(sets=["zzzzzz=1"])
    assert "did you mean" not in message
    assert "train.lr" in message


def test_unknown_key_in_a_recipe_names_the_recipe(write):
    recipe = write("train:\n  lrr: 1e-3\n")
    assert f"unknown key 'train.lrr' (recipe {recipe})" in refused(recipe=recipe)


@pytest.mark.parametrize(
    ("pair", "said"),
    [
        ("train.lr=fast", "'train.lr' must be a valid number, got 'fast' (--set)"),
        ("train.lr=-1", "'train.lr' must be greater than 0, got -1 (--set)"),
        ("train.max_steps=1.5", "'train.max_steps' must be a valid integer, got 1.5 (--set)"),
        ("train.dtype=fp8", "got 'fp8' (--set)"),
        ("student.to=6x384", "'student.to' must be a valid list, got '6x384' (--set)"),
        ("data.pack_isolated=1", "'data.pack_isolated' must be a valid boolean, got 1 (--set)"),
        ("data.source=2020-13-45", None),
    ],
)
def test_value_of_another_type_is_refused_and_never_converted(pair, said):
    if said is None:  # looks like a date, is none: a string like any other
        assert resolve(DistillRecipe, recipe=None, sets=[pair]).recipe.data.source == "2020-13-45"
    else:
        assert said in refused(sets=[pair])


def test_all_wrong_values_are_named_at_once():
    message = refused(sets=["train.lr=fast", "train.clip=hard"])
    assert "'train.lr'" in message
    assert "'train.clip'" in message


@pytest.mark.parametrize("text", ["5e-4", "5.0e-4", "5E-4", "0.0005", ".5e-3"])
def test_a_number_is_a_number_however_it_is_written(write, text):
    assert resolve(DistillRecipe, recipe=write(f"train:\n  lr: {text}\n")).recipe.train.lr == 5e-4
    assert resolve(DistillRecipe, recipe=None, sets=[f"train.lr={text}"]).recipe.train.lr == 5e-4


def test_quoted_number_stays_a_string(write):
    assert resolve(DistillRecipe, recipe=write("data:\n  source: '1e3'\n")).recipe.data.source == "1e3"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("train: [", "is not valid YAML"),
        ("- 1\n- 2\n", "must hold a mapping of recipe keys, got list"),
        ("", "must hold a mapping of recipe keys, got NoneType"),
        ("verb: prune\n", "is a recipe of 'prune', not of 'distill'"),
        ("train:\n", "'train' (recipe"),
        ("train:\n  lr: 1e-4\ntrain:\n  clip: 2.0\n", "key 'train' is given twice"),
        ("a: !!python/object/apply:os.system ['true']\n", "is not valid YAML"),
        ("a: 1\n---\nb: 2\n", "is not valid YAML"),
        ("a: 2020-13-45\n", "is not valid YAML"),
    ],
)
def test_malformed_recipe_is_a_usage_error(write, text, said):
    assert said in refused(recipe=write(text))


def test_recipe_that_is_not_text_is_a_usage_error(tmp_path):
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00train")
    assert "is not valid YAML" in refused(recipe=str(tmp_path / "binary.yaml"))


def test_unknown_recipe_is_answered_with_the_nearest_and_the_list():
    message = refused(recipe="minilm-6x78")
    assert "no recipe 'minilm-6x78' for distill; did you mean 'minilm-6x768'?" in message
    assert "shipped recipes: demo" in message


@pytest.mark.parametrize("sets", [["loss=5", "loss.a=1"], ["loss.a=1", "loss.a.b=1"]])
def test_a_key_below_a_value_is_a_usage_error(sets):
    assert "which was given the value" in refused(sets=sets)


def test_set_without_equals_is_a_usage_error():
    assert "--set takes KEY.PATH=VALUE, got 'train.lr'" in refused(sets=["train.lr"])


texts = st.text(st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=20) | st.sampled_from(
    ["1e3", "5E-4", "null", "yes", "0x1f", "1_000", "a: b", "a  # b", "- a", "'", '"', "~", "4x312:1200@12", "12:30"]
)
positive = st.floats(min_value=1e-12, max_value=1e12, allow_nan=False)
options = st.fixed_dictionaries(
    {},
    optional={
        "teacher": texts,
        "method": texts,
        "student.to": st.lists(texts, max_size=3),
        "student.layers": st.lists(st.integers(1, 48), max_size=4),
        "student.dropout": st.floats(0, 0.99),
        "data.source": texts,
        "data.column": texts,
        "data.pack_isolated": st.booleans(),
        "train.lr": positive,
        "train.epochs": positive,
        "train.max_steps": st.integers(1, 10**9),
        "train.seed": st.integers(0, 2**63),
        "loss.relation_heads": st.integers() | positive | texts | st.booleans() | st.lists(texts, max_size=2),
    },
)


@settings(max_examples=150, deadline=None)
@given(options)
def test_resolved_yaml_reads_back_as_the_same_recipe(tmp_path_factory, given_options):
    first = resolve(DistillRecipe, recipe=None, options=given_options)
    path = tmp_path_factory.mktemp("round") / "recipe.yaml"
    path.write_text(first.to_yaml(), "utf-8")
    assert resolve(DistillRecipe, recipe=str(path)).recipe == first.recipe


def test_resolved_yaml_is_yaml_that_others_read():
    resolved = resolve(DistillRecipe, recipe="demo")
    assert yaml.safe_load(resolved.to_yaml()) == resolved.recipe.model_dump()
