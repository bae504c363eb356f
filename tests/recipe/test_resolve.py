"""Recipes: precedence, origins, messages for what is wrong, and a resolved recipe that reads back
as itself."""

import json

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from kdcli.errors import UsageError
from kdcli.recipe.resolve import (
    ELSEWHERE,
    combinations,
    grid_options,
    leaf_keys,
    metric_limits,
    recipe_models,
    resolve,
    shipped,
    verb_of,
)
from kdcli.recipe.sections import TrainSettings
from kdcli.verbs.compress.settings import CompressRecipe
from kdcli.verbs.distill.settings import METHODS, DistillRecipe
from kdcli.verbs.evaluate.settings import EvaluateRecipe
from kdcli.verbs.prune.settings import PruneRecipe
from kdcli.workloads.finetune_recipes import downstream_recipe
from kdcli.workloads.settings import DownstreamSettings, FinetuneRecipe, LabelledSettings


@pytest.fixture
def write(tmp_path):
    def make(text: str, name: str = "mine.yaml") -> str:
        (tmp_path / name).write_text(text, "utf-8")
        return str(tmp_path / name)

    return make


def refusal(function, *arguments, **options) -> str:
    """Message and hint of the `UsageError` that a call must end in."""
    with pytest.raises(UsageError) as caught:
        function(*arguments, **options)
    return f"{caught.value.message}\n{caught.value.hint or ''}"


def refused(recipe=None, verb=DistillRecipe, **given) -> str:
    return refusal(resolve, verb, recipe=recipe, **given)


def test_option_beats_set_beats_recipe_beats_default(write):
    recipe = write("train:\n  lr: 1e-3\n  clip: 2.0\n  batch_size: 8\n")
    sets, given = ["train.lr=2e-3", "train.clip=3.0"], {"train.lr": 4e-3, "train.seed": None}
    resolved = resolve(DistillRecipe, recipe=recipe, sets=sets, options=given)
    train = resolved.recipe.train
    assert (train.lr, train.clip, train.batch_size, train.seed) == (
        4e-3,
        3.0,
        8,
        TrainSettings().seed,
    )
    keys = ("train.lr", "train.clip", "train.batch_size", "train.seed")
    assert [resolved.origins.get(key) for key in keys] == [
        "option",
        "--set",
        f"recipe {recipe}",
        None,
    ]


def test_null_of_a_variant_unsets_an_option():
    above = {"variant short of list.yaml": {"train": {"max_steps": None}}}
    resolved = resolve(PruneRecipe, recipe=None, options={"train.max_steps": 5}, above=above)
    assert resolved.recipe.train.max_steps is None


def test_epochs_override_the_steps_of_a_recipe(write):
    recipe = write("verb: distill\ntrain: {max_steps: 2000}\n")
    epochs = resolve(DistillRecipe, recipe=recipe, options={"train.epochs": 1.0})
    assert (epochs.recipe.train.max_steps, epochs.recipe.train.epochs) == (None, 1.0)
    assert epochs.origins["train.max_steps"] == "option"
    both = write("verb: distill\ntrain: {max_steps: 2000, epochs: 1.0}\n")
    for resolved in (
        resolve(DistillRecipe, recipe=both),
        resolve(DistillRecipe, recipe=recipe, options={"train.epochs": None}),
        resolve(
            DistillRecipe,
            recipe=None,
            sets=["train.epochs=1.0"],
            options={"train.max_steps": 2000},
        ),
        resolve(
            DistillRecipe,
            recipe=None,
            sets=["train.max_steps=2000"],
            options={"train.epochs": 1.0},
        ),
    ):
        assert resolved.recipe.train.max_steps == 2000


def test_resolved_yaml_says_where_each_value_came_from(write):
    recipe = write("train:\n  clip: 2.0\n")
    given = {"student.to": ["6x384", "4x312:1200@12"]}
    text = resolve(DistillRecipe, recipe=recipe, sets=["train.seed=7"], options=given).to_yaml()
    origins = {
        line.split(":")[0].strip(): line.rsplit("  # ", 1)[1]
        for line in text.splitlines()
        if "  # " in line
    }
    assert origins["clip"] == f"recipe {recipe}"
    assert (origins["seed"], origins["to"], origins["lr"]) == (
        "--set",
        "option",
        "default on text",
    )


def test_every_leaf_is_written_once_with_an_origin():
    text = resolve(DistillRecipe, recipe=None).to_yaml()
    assert text.count("  # default") == len(leaf_keys(DistillRecipe))


OUT_OF_RANGE = ["lr=.inf", "lr=.nan", "seed=99999999999999999999", "batch_size=2000000"]


@pytest.mark.parametrize(
    ("pair", "said"),
    [
        (
            "train.learning_rate=1",
            "unknown key 'train.learning_rate' (--set); did you mean 'train.lr'?",
        ),
        ("lr=1", "unknown key 'lr' (--set); did you mean 'train.lr'?"),
        ("methd=minilm", "unknown key 'methd' (--set); did you mean 'method'?"),
        ("train.lr=fast", "'train.lr' must be a number, got 'fast' (--set)"),
        ("train.lr=-1", "'train.lr' must be greater than 0, got -1 (--set)"),
        (
            "train.warmup_fraction=10",
            "'train.warmup_fraction' must be less than 1, got 10 (--set); did you mean 0.1?",
        ),
        ("train.max_steps=1.5", "'train.max_steps' must be a whole number, got 1.5 (--set)"),
        ("train.dtype=fp8", "got 'fp8' (--set)"),
        ("eval.tasks=sst2", "must be a list, got 'sst2' (--set); a list of one is [sst2]"),
        ("student.to=6", "'student.to' must be a list, got 6 (--set)"),
        ("data.pack_isolated=1", "'data.pack_isolated' must be true or false, got 1 (--set)"),
        *((f"train.{pair}", f"'train.{pair.split('=')[0]}' must be") for pair in OUT_OF_RANGE),
        ("loss={'': null}", "keys are words"),
        ("loss={a: {1: 2}}", "keys are words"),
        ("loss=5 loss.a=1", "which was given the value"),
        ("loss.a=1 loss.a.b=1", "which was given the value"),
        ("train.lr", "--set takes KEY.PATH=VALUE, got 'train.lr'"),
        ("train.lr=fast train.clip=hard", "'train.lr'"),
        ("train.lr=fast train.clip=hard", "'train.clip'"),
    ],
)
def test_a_wrong_key_or_value_is_refused_and_never_converted(pair, said):
    assert said in refused(sets=pair.split(" ") if pair.count("=") > 1 else [pair])


def test_names_of_other_tools_lead_to_keys_there_are():
    assert set(ELSEWHERE.values()) <= set(leaf_keys(DistillRecipe))


def test_of_many_wrong_values_the_first_are_named():
    many = "{" + ", ".join(f"k{n}: 0" for n in range(500)) + "}"
    with pytest.raises(UsageError) as caught:
        resolve(FinetuneRecipe, recipe=None, sets=[f"data.columns={many}"])
    assert caught.value.message.count("\n") == 20
    assert caught.value.message.endswith("and 480 more")
    assert len(UsageError("a wrong value " * 10_000).message) < 11_000


def test_every_unknown_key_of_a_recipe_is_named(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("verb: distill\nmethd: minilm\ntrain: {lrr: 1.0, clip: 1.0}\n", "utf-8")
    assert refused(recipe=str(file)).splitlines() == [
        f"unknown key 'methd' (recipe {file}); did you mean 'method'?",
        f"unknown key 'train.lrr' (recipe {file}); did you mean 'train.lr'?",
    ]


def test_unknown_key_with_nothing_near_lists_the_keys():
    message = refused(sets=["zzzzzz=1"])
    assert "known keys and sections: " in message
    assert " train, " in message
    assert "train.lr" not in message
    of_mask = "unknown key 'data.mask.zzz' (--set); keys of 'data.mask': share, whole_words, static"
    assert of_mask in refused(sets=["data.mask.zzz=1"])
    # A common section makes no keys similar, as with data.stride.
    message = refused(verb=FinetuneRecipe, sets=["data.share=0.5"])
    assert "keys of 'data': source, train, " in message
    assert "did you mean" not in refused(sets=["data.share=1.5"])


@pytest.mark.parametrize(
    "text", ["2020-12-31", "2020-13-45", "no", "on", "1:3", "010", "0x10", "1_000", "=", "1٣"]
)
def test_words_that_other_yaml_takes_for_something_else_are_words(write, text):
    given = resolve(DistillRecipe, recipe=None, sets=[f"data.source={text}"])
    assert given.recipe.data.source == text
    read = resolve(DistillRecipe, recipe=write(f"data: {{source: {text}}}\n"), sets=[])
    assert read.recipe.data.source == text
    assert yaml.safe_load(given.to_yaml())["data"]["source"] == text, (
        "in quotes, for readers of version 1.1"
    )


@pytest.mark.parametrize("name", ["0", "2023", "1.5", "null", "true", "comment #", "# a", "a: b"])
def test_names_of_columns_are_text(name):
    given = resolve(FinetuneRecipe, recipe=None, sets=[f"data.columns.text={name}"])
    assert given.recipe.data.columns == {"text": name}
    quoted = resolve(FinetuneRecipe, recipe=None, sets=[f"data.columns.text='{name}'"])
    assert quoted.recipe == given.recipe


def test_a_text_that_may_be_missing_can_be_removed(write):
    recipe = write("data: {source: a.csv, train: b.csv}\n")
    sets = ["data.source=c #1.csv", "data.train=null"]
    data = resolve(FinetuneRecipe, recipe=recipe, sets=sets).recipe.data
    assert (data.source, data.train) == ("c #1.csv", None)


@pytest.mark.parametrize(
    ("pair", "said"),
    [
        (
            "data.columns.text.x=a",
            "'data.columns.text.x' lies under 'data.columns.text', which must be a string or a "
            "list, got {'x': 'a'} (--set)",
        ),
        (
            "data.columns={text: 3}",
            "'data.columns.text' must be a string or a list, got 3 (--set)",
        ),
        (
            "data.columns.text=[a, 2]",
            "item 2 of 'data.columns.text' must be a string, got 2 (--set)",
        ),
    ],
)
def test_a_value_that_may_be_of_several_types_is_explained_under_the_key_given(pair, said):
    assert said in refused(verb=FinetuneRecipe, sets=[pair]).split("\n")


@pytest.mark.parametrize("text", ["5e-4", "5.0e-4", "5E-4", "0.0005", ".5e-3"])
def test_a_number_is_a_number_however_it_is_written(write, text):
    assert resolve(DistillRecipe, recipe=write(f"train:\n  lr: {text}\n")).recipe.train.lr == 5e-4
    assert resolve(DistillRecipe, recipe=None, sets=[f"train.lr={text}"]).recipe.train.lr == 5e-4


def test_quoted_number_stays_a_string(write):
    assert (
        resolve(DistillRecipe, recipe=write("data:\n  source: '1e3'\n")).recipe.data.source == "1e3"
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("train: [", "is not valid YAML"),
        ("- 1\n- 2\n", "must hold a mapping of keys, got list"),
        ("", "must hold a mapping of keys, got NoneType"),
        ("verb: prune\n", "is a recipe of 'prune', not of 'distill'"),
        ("train:\n", "'train' (recipe"),
        ("train:\n  lr: 1e-4\ntrain:\n  clip: 2.0\n", "key 'train' is given twice"),
        ("a: !!python/object/apply:os.system ['true']\n", "is not valid YAML"),
        ("a: 1\n---\nb: 2\n", "is not valid YAML"),
        ("train:\n  lrr: 1e-3\n", "unknown key 'train.lrr' (recipe FILE)"),
        # Bounded before it is composed.
        ("a: " + "[" * 5000 + "]" * 5000, "deeply nested"),
        ("\n".join(f"k{i}: {i}" for i in range(30_000)), "too many"),
        ("a: " + "x" * 2_000_000, "at most 1,000,000"),
        ("a: &a [1, 2]\nb: &b [*a, *a]\nc: [*b, *b]\n", "alias inside an anchor"),
        ("a: &a [*a]\n", "alias inside an anchor"),
        ("a: !!bool x\n", "tag tag:yaml.org,2002:bool is not allowed"),
        ("a: !!timestamp x\n", "is not allowed"),
    ],
)
def test_malformed_recipe_is_a_usage_error(write, text, said):
    file = write(text)
    assert said.replace("FILE", file) in refused(file)


OLD = "verb: cotrain\ntrain:\n  lr: 1e-3\n  teacher_lr: null  # default\n"


def test_keys_that_no_longer_exist_are_ignored_in_the_recipe_of_a_run_if_they_are_null(
    write, caplog
):
    recipe = write(OLD, "recipe.yaml")
    verb = recipe_models()["cotrain"]
    assert "unknown key 'train.teacher_lr'" in refused(recipe, verb)
    write("", "log.jsonl")
    with caplog.at_level("INFO", "kdcli"):
        assert resolve(verb, recipe=recipe).recipe.train.lr == 1e-3
    assert caplog.messages == [
        f"{recipe}: ignored train.teacher_lr: no longer a key, and null in this recipe"
    ]
    write(OLD.replace("null", "1e-4"), "recipe.yaml")
    assert "unknown key 'train.teacher_lr'" in refused(recipe, verb)
    write("verb: cotrain\ntrain: null\n", "recipe.yaml")
    assert "'train' (recipe" in refused(recipe, verb)


def test_an_empty_mapping_is_kept(write):
    text = resolve(DistillRecipe, recipe=None, sets=["loss.x={}"]).to_yaml()
    assert resolve(DistillRecipe, recipe=write(text)).recipe.loss == {"x": {}}


def test_recipe_that_is_not_text_is_a_usage_error(tmp_path):
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00train")
    assert "is not valid YAML" in refused(str(tmp_path / "binary.yaml"))


def test_unknown_recipe_is_answered_with_the_nearest_and_the_list():
    message = refused("minilm-6x78")
    assert "no recipe 'minilm-6x78' for distill; did you mean 'minilm-6x768'?" in message
    assert "shipped recipes: demo" in message


texts = st.text(
    st.characters(codec="utf-8", exclude_categories=["Cs", "Cc"]), max_size=20
) | st.sampled_from(
    [
        "1e3",
        "5E-4",
        "null",
        "yes",
        "0x1f",
        "1_000",
        "a: b",
        "a  # b",
        "- a",
        "'",
        '"',
        "~",
        "4x312:1200@12",
        "12:30",
    ]
)
positive = st.floats(min_value=1e-12, max_value=1e12, allow_nan=False)
options = st.fixed_dictionaries(
    {},
    optional={
        "teacher": texts,
        "method": st.sampled_from(METHODS),
        "student.to": st.lists(texts, max_size=3),
        "student.layers": st.lists(st.integers(1, 48), max_size=4),
        "student.dropout": st.floats(0, 0.99),
        "data.source": texts,
        "data.column": texts,
        "data.pack_isolated": st.booleans(),
        "train.lr": positive,
        "train.epochs": st.floats(min_value=1e-12, max_value=1e6),
        "train.max_steps": st.integers(1, 10**9),
        "train.seed": st.integers(0, 2**63 - 1),
        "loss.relation_heads": st.integers()
        | positive
        | texts
        | st.booleans()
        | st.lists(texts, max_size=2),
    },
)


@settings(deadline=None)
@given(options)
def test_resolved_yaml_reads_back_as_the_same_recipe(tmp_path_factory, given_options):
    first = resolve(DistillRecipe, recipe=None, options=given_options)
    path = tmp_path_factory.mktemp("round") / "recipe.yaml"
    path.write_text(first.to_yaml(), "utf-8")
    assert resolve(DistillRecipe, recipe=str(path)).recipe == first.recipe


def test_resolved_yaml_is_yaml_that_others_read():
    resolved = resolve(DistillRecipe, recipe="demo")
    assert yaml.safe_load(resolved.to_yaml()) == resolved.recipe.model_dump()


class TestGridOptions:
    def test_values_are_read_as_yaml_and_keys_of_train_may_be_short(self):
        pairs = [
            "lr=2e-5,3e-5",
            "train.clip=1, 2.5",
            "warmup-steps=10",
            " keep =last,best",
            "data.source=a/b,1e3x",
        ]
        assert grid_options(FinetuneRecipe, pairs) == {
            "grid.train.lr": [2e-5, 3e-5],
            "grid.train.clip": [1, 2.5],
            "grid.train.warmup_steps": [10],
            "grid.keep": ["last", "best"],
            "grid.data.source": ["a/b", "1e3x"],
        }
        assert grid_options(FinetuneRecipe, []) == {}

    def test_a_key_given_twice_is_refused(self):
        assert "--grid train.lr is given twice" in refusal(
            grid_options, FinetuneRecipe, ["lr=1e-5", "train.lr=2e-5"]
        )

    def test_epochs_beside_a_fixed_number_of_steps_are_refused(self):
        options = {"grid.train.epochs": [1.0, 2.0], "train.max_steps": 5}
        assert "changes nothing" in refusal(
            combinations, resolve(FinetuneRecipe, recipe=None, options=options)
        )

    @pytest.mark.parametrize(
        ("pair", "said"),
        [
            *(
                (pair, f"--grid takes KEY=VALUE,VALUE..., got '{pair}'")
                for pair in ("lr", "lr=", "", "=")
            ),
            ("lr", "--grid lr=2e-5,3e-5,5e-5"),
            ("train.lrr=1", "unknown key 'train.lrr' (--grid); did you mean 'train.lr'?"),
            ("lrr=1", "unknown key 'lrr' (--grid); did you mean 'train.lr'?"),
            ("train=1", "'train' (--grid) is a section: it must hold keys"),
        ],
    )
    def test_of_another_form_or_key(self, pair, said):
        assert said in refusal(grid_options, FinetuneRecipe, [pair])


class TestCombinations:
    def resolved(self, recipe=None, sets=(), **options):
        return resolve(FinetuneRecipe, recipe=recipe, sets=sets, options=options)

    def test_without_a_grid_the_recipe_itself_with_one_seed(self):
        resolved = self.resolved(seeds=3, task="sst2")
        ((chosen, only),) = combinations(resolved)
        assert chosen == {}
        assert only.recipe == resolved.recipe.model_copy(update={"seeds": 1})

    def test_every_combination_the_last_key_fastest(self):
        pairs = grid_options(FinetuneRecipe, ["lr=2e-5,3e-5", "keep=last,best", "batch_size=8"])
        resolved = self.resolved(seeds=4, **pairs)
        found = combinations(resolved)
        assert [s for s, _ in found] == [
            {"train.lr": lr, "train.batch_size": 8, "keep": keep}
            for lr in (2e-5, 3e-5)
            for keep in ("last", "best")
        ]
        for chosen, of in found:
            recipe = of.recipe
            assert (recipe.train.lr, recipe.train.batch_size, recipe.keep) == tuple(chosen.values())
            assert (recipe.grid, recipe.seeds) == ({}, 1)
            assert of.origins["train.lr"] == "section grid"
            assert not [key for key in of.origins if key.startswith(("grid", "seeds"))]
        # The recipe that they were made of is as it was.
        assert resolved.recipe.train.lr == FinetuneRecipe().train.lr
        assert resolved.recipe.grid == {
            "train": {"lr": [2e-5, 3e-5], "batch_size": [8]},
            "keep": ["last", "best"],
        }

    @pytest.mark.parametrize(
        "text", ["grid: {train: {lr: [1e-3, 2e-3]}}\n", "grid:\n  train.lr: [1e-3, 2e-3]\n"]
    )
    def test_a_grid_of_a_recipe(self, write, text):
        found = combinations(self.resolved(recipe=write(text)))
        assert [of.recipe.train.lr for _, of in found] == [1e-3, 2e-3]

    def test_an_option_replaces_the_same_key_of_a_recipe_and_no_other(self, write):
        recipe = write("grid: {train: {lr: [1e-3, 2e-3], clip: [1.0, 2.0]}}\n")
        found = combinations(
            self.resolved(recipe=recipe, **grid_options(FinetuneRecipe, ["lr=5e-3"]))
        )
        assert [s for s, _ in found] == [
            {"train.lr": 5e-3, "train.clip": clip} for clip in (1.0, 2.0)
        ]

    def test_one_reads_back_as_a_recipe(self, write):
        pairs = grid_options(FinetuneRecipe, ["lr=2e-5,3e-5"])
        for _, of in combinations(self.resolved(seeds=2, **pairs)):
            assert resolve(FinetuneRecipe, recipe=write(of.to_yaml())).recipe == of.recipe

    @pytest.mark.parametrize(
        ("pair", "said"),
        [
            ("grid.train.lr=0.1", "grid.train.lr must hold a list of values, got 0.1"),
            ("grid.train.lr=[]", "grid.train.lr must hold a list of values, got []"),
            ("grid.train.lrr=[1.0]", "unknown key 'grid.train.lrr'; did you mean 'grid.train.lr'?"),
            ("grid.train=[1.0]", "'grid.train' is a section"),
            ("grid.train.lr=[1e-3, high]", "'grid.train.lr' must be a number, got 'high'"),
            ("grid.keep=[last, frist]", "'grid.keep' must be 'last' or 'best', got 'frist'"),
            ("grid.train.epochs=[3.0, 0]", "'grid.train.epochs' must be greater than 0, got 0"),
        ],
    )
    def test_what_cannot_be_tried_is_refused(self, pair, said):
        assert said in refusal(combinations, self.resolved(sets=[pair]))


class TestGates:
    def test_metric_and_least_value(self):
        pairs = ["accuracy=0.9", " matched/accuracy =1", "f1=5e-1", "mrr@10=99%"]
        limits = {"accuracy": 0.9, "matched/accuracy": 1.0, "f1": 0.5, "mrr@10": 0.99}
        assert metric_limits(pairs) == limits

    @pytest.mark.parametrize(
        "pair", ["accuracy", "accuracy=", "accuracy=high", "=0.9", "accuracy=true", "a=[1]"]
    )
    def test_of_another_form(self, pair):
        message = refusal(metric_limits, [pair])
        assert f"--min-metric takes METRIC=VALUE, got '{pair}'" in message
        assert "--min-metric accuracy=0.9" in message


class TestVerbOf:
    def test_a_shipped_recipe_is_of_its_folder(self):
        assert [verb_of(name) for name in ("minilm-6x384", "sst2", "no-such")] == [
            "distill",
            "finetune",
            "distill",
        ]

    def test_a_file_is_of_the_verb_it_says_or_of_distill(self, write):
        texts = ("verb: evaluate\n", "verb: finetune\ntask: own\n", "train: {lr: 1e-3}\n")
        assert [verb_of(write(text)) for text in texts] == ["evaluate", "finetune", "distill"]

    def test_a_verb_that_there_is_not(self, write):
        file = write("verb: finetun\n")
        said = (
            f"{file} is a recipe of 'finetun'; did you mean 'finetune'?; known: adapt, "
            "benchmark, compress, cotrain, "
        )
        assert said in refusal(verb_of, file)

    def test_no_two_verbs_ship_a_recipe_of_one_name(self):
        names = [name for verb in recipe_models() for name in shipped(verb)]
        assert len(names) == len(set(names))


class TestDownstreamRecipe:
    def test_a_shipped_recipe_with_the_seed_of_the_run(self):
        found = downstream_recipe(DownstreamSettings(), "cola", 7).recipe
        plain = resolve(FinetuneRecipe, recipe="cola").recipe
        assert (found.task, found.train.seed, found.train.epochs) == ("cola", 7, 10.0)
        assert found == plain.model_copy(
            update={"train": plain.train.model_copy(update={"seed": 7})}
        )

    def test_a_task_without_one(self):
        found = downstream_recipe(DownstreamSettings(source="mine.jsonl"), "own", 0).recipe
        assert found == FinetuneRecipe(task="own", data=LabelledSettings(source="mine.jsonl"))

    def test_the_source_is_a_folder_of_tasks_or_the_data_itself(self, tmp_path):
        (tmp_path / "sst2").mkdir()
        given = DownstreamSettings(source=str(tmp_path))
        assert downstream_recipe(given, "sst2", 0).recipe.data.source == str(tmp_path / "sst2")
        assert downstream_recipe(given, "cola", 0).recipe.data.source == str(tmp_path)

    def test_of_several_tasks_each_has_a_folder(self, tmp_path):
        for name in ("sst2", "own"):
            (tmp_path / name).mkdir()
        given = DownstreamSettings(source=str(tmp_path), tasks=["sst2", "cola"])
        assert downstream_recipe(given, "sst2", 0).recipe.data.source == str(tmp_path / "sst2")
        message = (
            f"eval.source={tmp_path} has no folder cola/ for the task cola; there are own/, sst2/\n"
        )
        assert refusal(downstream_recipe, given, "cola", 0).startswith(message)

    def test_overrides_are_over_the_recipe_and_the_seed(self):
        overrides = {
            "train": {"epochs": 1.0, "seed": 3},
            "keep": "best",
            "data": {"max_length": 64},
        }
        found = downstream_recipe(DownstreamSettings(overrides=overrides), "cola", 7)
        recipe = found.recipe
        assert (recipe.train.epochs, recipe.train.seed, recipe.keep, recipe.data.max_length) == (
            1.0,
            3,
            "best",
            64,
        )
        assert (
            recipe.train.batch_size
            == resolve(FinetuneRecipe, recipe="cola").recipe.train.batch_size
        )

    def test_an_override_that_finetune_does_not_know(self):
        for overrides, said in (
            ({"train": {"lrr": 1.0}}, "did you mean 'eval.overrides.train.lr'?"),
            ({"train": {"lr": "fast"}}, "'eval.overrides.train.lr' must be a number"),
            ({"teacher": "x"}, "unknown key 'eval.overrides.teacher'"),
        ):
            assert said in refusal(
                downstream_recipe, DownstreamSettings(overrides=overrides), "cola", 0
            )


def test_a_key_in_a_list_of_sections_is_named_by_its_place():
    keys = {"section steps[1].distill": {"train.lrr": 1.0}}
    message = refused(above=keys)
    assert "unknown key 'distill.train.lrr' in item 2 of 'steps'" in message
    assert "did you mean 'distill.train.lr'?" in message
    message = refused(above={"section plan.distill": {"student": {"layers": [1, "two"]}}})
    assert "item 2 of 'plan.distill.student.layers' must be a whole number, got 'two'" in message


class TestOpenKeys:
    """Sections whose keys are those of something else: columns of a file, settings of a loss, keys
    of another verb."""

    def test_any_key_below_them_is_taken(self):
        sets = ["data.columns.text=body text", "data.columns.label=y", "grid.train.lr=[1e-3]"]
        recipe = resolve(FinetuneRecipe, recipe=None, sets=sets).recipe
        assert recipe.data.columns == {"text": "body text", "label": "y"}
        assert recipe.grid == {"train": {"lr": [1e-3]}}
        two = resolve(EvaluateRecipe, recipe=None, sets=["data.columns.text=[a, b]"]).recipe
        assert two.data.columns == {"text": ["a", "b"]}
        sets = ["eval.overrides.train.lr=1e-3", "eval.overrides.keep=best"]
        overrides = resolve(DistillRecipe, recipe=None, sets=sets).recipe.eval.overrides
        assert overrides == {"train": {"lr": 1e-3}, "keep": "best"}

    @pytest.mark.parametrize(
        ("pair", "said"),
        [
            ("data.colums.text=a", "unknown key 'data.colums.text'"),
            ("data.columns=a", "'data.columns' must be a mapping of keys, got 'a' (--set)"),
            ("data.columns.text.x=a", "got {'x': 'a'}"),
            ("task.text=a", "unknown key 'task.text'"),
        ],
    )
    def test_no_key_that_only_looks_like_one(self, pair, said):
        assert said in refused(verb=FinetuneRecipe, sets=[pair])

    def test_they_read_back_as_they_were(self, write):
        sets = [
            "data.columns.text=[a, 'b: c']",
            "grid.train.lr=[1e-3, 2]",
            "grid.keep=[last]",
            "choose_on=en",
        ]
        first = resolve(FinetuneRecipe, recipe=None, sets=sets)
        assert resolve(FinetuneRecipe, recipe=write(first.to_yaml())).recipe == first.recipe

    @pytest.mark.parametrize(
        "key", ["-0", "1e3", "true", "a: b", "# a", "- a", " ", "[", "\x85", "x" * 128]
    )
    def test_so_does_any_word_as_a_key(self, write, key):
        first = resolve(
            PruneRecipe, recipe=write(f"pruner: {{{json.dumps(key)}: {{{json.dumps(key)}: 1}}}}")
        )
        assert first.recipe.pruner == {key: {key: 1}}
        assert resolve(PruneRecipe, recipe=write(first.to_yaml())).recipe == first.recipe

    @pytest.mark.parametrize(
        "pair", ["pruner.=1", "pruner..a=1", "pruner.a.=1", f"pruner.{'x' * 129}=1"]
    )
    def test_what_is_no_word_is_refused(self, pair):
        assert "a key is a word of 1 to 128 characters" in refused(verb=PruneRecipe, sets=[pair])

    def test_nor_does_the_name_of_a_file_end_a_comment(self, tmp_path):
        file = tmp_path / "a\nb\x85\x1b.yaml"
        file.write_text("keep: best", "utf-8")
        first = resolve(FinetuneRecipe, recipe=str(file))
        (tmp_path / "again.yaml").write_text(first.to_yaml(), "utf-8")
        assert resolve(FinetuneRecipe, recipe=str(tmp_path / "again.yaml")).recipe == first.recipe


@pytest.mark.parametrize(
    "prune",
    [
        {"sparsity": [0.5], "train": {"epochs": 1.0}},
        {"a\nb": "c\n\nd", "e": ["f\ng", "h\u2028i"]},
    ],
)
def test_a_free_mapping_that_may_be_null_reads_back(prune, tmp_path):
    given = resolve(CompressRecipe, recipe=None, sets=[f"plan.prune={json.dumps(prune)}"])
    file = tmp_path / "recipe.yaml"
    file.write_text(given.to_yaml(), "utf-8")
    assert resolve(CompressRecipe, recipe=str(file)).recipe.plan.prune == prune


OLD_RERANKER = """\
verb: rerank
teacher: t
student: {to: 3x64, source: null}
ranking: {loss: listwise, weight: 0.5}
cache_gb: 2.0
"""


def test_recipes_of_earlier_versions_are_read(write):
    """Also by their renamed sections, and with the defaults of their kind of data."""
    recipe = resolve(DistillRecipe, recipe=write(OLD_RERANKER)).recipe
    assert (recipe.task, recipe.student.to, recipe.kind) == ("rerank", ["3x64"], "outputs")
    assert recipe.workload == {"loss": "listwise", "weight": 0.5}
    assert (recipe.method, recipe.train.lr, recipe.train.batch_size) == ("soft-targets", 3e-5, 32)
    tuned = OLD_RERANKER.replace("null", "base")
    tuned = resolve(FinetuneRecipe, recipe=write(tuned)).recipe
    assert (tuned.model, tuned.task, tuned.student.to) == ("base", "rerank", "3x64")
    assert tuned.workload == recipe.workload
    on_task = write("verb: distill-task\ntask: own\nteacher: t\n")
    assert resolve(DistillRecipe, recipe=on_task).recipe.method == "tinybert"
    wrong = write("verb: cotrain-task\n")
    with pytest.raises(UsageError, match="is a recipe of 'cotrain-task', not of 'distill'"):
        resolve(DistillRecipe, recipe=wrong)
    sets = ["method=embedding", "embedding.rows=7", "student.to=2x768"]
    resolved = resolve(DistillRecipe, recipe=None, sets=sets)
    assert (resolved.recipe.workload, resolved.recipe.train.lr) == ({"rows": 7}, 2.5e-4)
    assert resolved.origins["workload.rows"] == "--set"
    assert resolved.origins["train.lr"] == "default of embedding at width 768"
