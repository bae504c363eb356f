"""`kdcli distill --task` given what it cannot use: exit 2 or 3, one message, and nothing left
behind."""

import re
import shlex

import own_files
import pytest
from encoders import foreign_tokenizer, tiny_config
from own_files import NAMES, write
from transformers import AutoModelForMaskedLM, AutoTokenizer

from kdcli.errors import UsageError
from kdcli.recipe.resolve import resolve
from kdcli.recipe.sections import RunOptions
from kdcli.verbs.distill.recipe_checks import check_task
from kdcli.verbs.distill.run import complete, distill
from kdcli.verbs.distill.settings import DistillRecipe

LABELS = tuple(sorted(NAMES))
QUICK = shlex.split(
    "--max-steps 2 --dtype fp32 --set data.max_length=24 --set measure.latency=false"
)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return own_files.own(tmp_path_factory.mktemp("data"), "class", n=32, judged=16)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return own_files.headed(tmp_path_factory.mktemp("teacher"), LABELS, num_hidden_layers=4)


@pytest.fixture
def refused(data, teacher, tmp_path):
    def of(*more, given=(teacher,), to=("--to", "2x16")):
        return own_files.refused(
            tmp_path, "distill", *given, "--task", "own", "--data", data, *to, *QUICK, *more
        )

    return of


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            ["--method", "distilbert"],
            "method distilbert learns from text, not from a task's examples methods for tasks: ",
        ),
        (["--set", "kd.temperature=0"], "'kd.temperature' must be greater than 0, got 0"),
        (["--set", "loss.layers='0:0,1:9'"], "9"),
        (["--set", "loss.layer_weights=[1.0]"], "loss.layer_weights has 1 numbers"),
        (
            ["--method", "minilm", "--set", "loss.masked_lm_weight=1"],
            "the examples of a task are not masked",
        ),
        (["--set", "intermediate.warmup_steps=2"], "must be less than the 2 steps of the run"),
        (
            ["--assistant", "none"],
            "--assistant belongs to distilling on text, not to distilling on a task",
        ),
        (
            ["--eval-task", "sst2"],
            "--eval-task belongs to distilling on text, not to distilling on a task",
        ),
        (["--data", "/nowhere"], "no data at /nowhere"),
    ],
)
def test_what_cannot_be_is_refused(refused, more, message):
    assert message in refused(*more)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"teacher": None}, "no teacher given"),
        ({"student": {"to": []}}, "no student given"),
        (
            {"student": {"to": ["2x16", "3x16"]}},
            "on a task, one student is distilled at a time, but 2 shapes were given",
        ),
        (
            {"student": {"source": "x"}, "general": {"use": True}},
            "--student names a student, but the stage on text",
        ),
        (
            {"student": {"to": ["4x16,2x16"]}, "general": {"use": True}},
            "makes one student, and --to 4x16,2x16 several",
        ),
        (
            {"student": {"to": ["family"]}, "undistilled": {"use": True}},
            "trains one student without its teacher, and --to family has several",
        ),
    ],
)
def test_a_recipe_that_cannot_be_is_refused_without_model_or_data(changes, message):
    given = {"teacher": "t", "task": "own", "student": {"to": ["2x16"]}}
    with pytest.raises(UsageError) as refusal:
        check_task(DistillRecipe.model_validate(given | changes))
    assert message in str(refusal.value)


@pytest.mark.parametrize("option", ["general", "corpus", "augment-only", "glove"])
def test_options_of_a_task_need_one(teacher, tmp_path, option):
    message = own_files.refused(tmp_path, "distill", teacher, "--to", "2x16", f"--{option}", "x")
    assert f"--{option} needs --task" in message


@pytest.mark.parametrize("more", [(), ("--ablate", "tinybert")])
def test_a_task_that_only_scores_models_is_refused(teacher, tmp_path, more):
    given = ("distill", teacher, "--task", "retrieval", "--data", tmp_path, "--to", "2x16")
    message = own_files.refused(tmp_path, *given, *more)
    assert "task retrieval scores embedding models, and trains none" in message
    assert "--eval-task retrieval" in message


def test_a_teacher_that_was_not_fine_tuned_for_the_task(refused, tmp_path):
    base = own_files.encoder(tmp_path / "base", num_hidden_layers=4)
    message, unfit = refused(given=(base,)), f"the head of {base} does not fit your data"
    assert unfit in message
    assert "fine-tune it first: kdcli finetune" in message
    three = own_files.headed(tmp_path / "three", ("a", "b", "c"))
    refusal = refused(given=(three,))
    assert re.search("it predicts a, b, c, but your data has (brisk, calm|calm, brisk);", refusal)
    assert unfit in refused("--also-teacher", base)
    assert unfit in refused("--ablate", "tinybert", given=(base,))
    assert unfit in refused("--augment-only", tmp_path / "copies.jsonl", given=(base,))


def test_a_teacher_with_another_order_of_labels(refused, tmp_path):
    swapped = own_files.headed(tmp_path / "swapped", LABELS[::-1], num_hidden_layers=4)
    # Own rows take the order of the teacher's names, which a second teacher must have too.
    assert "not a shape" in refused(given=(swapped,), to=("--to", "banana"))
    message = refused("--also-teacher", swapped)
    assert "in another order" in message
    assert "label_map" in message
    # With the mapping, the order is the data's.
    assert "not a shape" in refused(
        "--set", "head.label_map=[1, 0]", given=(swapped,), to=("--to", "banana")
    )


def test_models_with_another_vocabulary(refused, teacher, tmp_path):
    other = own_files.headed(tmp_path / "other", LABELS, vocab_size=65)
    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.add_tokens(["w99"])
    tokenizer.save_pretrained(other)
    message = refused("--student", other, to=())
    assert (
        f"method tinybert compares token states, and {other} has other tokens than {teacher}"
        in message
    )
    assert "--method soft-targets compares logits of whole rows" in message
    masked = tmp_path / "masked"
    AutoModelForMaskedLM.from_config(tiny_config("bert", vocab_size=65)).save_pretrained(masked)
    AutoTokenizer.from_pretrained(other).save_pretrained(masked)
    message = f"augment.model {masked} has another vocabulary than teacher {teacher}"
    assert message in refused("--augment", "--augment-model", masked)
    assert "has another vocabulary" in refused(
        "--augment-model", masked, "--augment-only", tmp_path / "copies.jsonl"
    )
    assert "masked" in refused(
        "--augment", "--augment-model", own_files.encoder(tmp_path / "plain")
    )


def test_tokens_cannot_be_taught_by_a_teacher_of_other_tokens(tmp_path):
    teacher = own_files.teacher(tmp_path / "tags", "tokens")
    other = own_files.encoder(tmp_path / "other")
    foreign_tokenizer().save_pretrained(other)
    given = [
        "distill",
        teacher,
        "--task",
        "own",
        "--data",
        teacher.parent / "data",
        "--method",
        "soft-targets",
        *QUICK,
    ]
    message = own_files.refused(tmp_path, *given, "--student", other)
    assert f"your data labels tokens, and {other} has other tokens than {teacher}" in message


SOFT = {"probabilities": [0.5, 0.5]}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([SOFT] * 5, "has 5 rows for 32 training rows"),
        (
            [{"probabilities": [0.5, 0.6]}] * 32,
            "soft.jsonl:1: the values must be probabilities that sum to 1",
        ),
        (
            [{"probabilities": [0.5]}] * 32,
            "soft.jsonl:1: 'probabilities' must hold 2 numbers (brisk, calm), got",
        ),
        ([{"p": 1}] * 32, "soft.jsonl:1: no column probabilities or logits; there are p"),
        (
            [{"logits": [0.5, float("nan")]}] * 32,
            "soft.jsonl:1: the values must be finite, got [0.5, nan]",
        ),
        ([{"text": "w1", **SOFT}] * 32, "has no soft labels for 32 of 32 training rows"),
        (
            [{"text": "w1", **SOFT}, {"text": "w1", "probabilities": [0.1, 0.9]}],
            "soft.jsonl:2: the text has other values in",
        ),
        ([], "soft.jsonl holds no rows"),
    ],
)
def test_soft_labels_that_cannot_be_used(data, tmp_path, rows, message):
    write(tmp_path / "soft.jsonl", rows)
    given = [
        "distill",
        "--task",
        "own",
        "--data",
        data,
        *QUICK,
        "--student",
        own_files.encoder(tmp_path / "student"),
    ]
    assert message in own_files.refused(tmp_path, *given, "--soft-labels", tmp_path / "soft.jsonl")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("demo", "--student", "demo"), "--soft-labels and teacher demo contradict each other"),
        ((), "--soft-labels needs --student"),
        (("--student", "demo", "--method", "tinybert"), "method tinybert reads a teacher's states"),
        (("--student", "demo", "--augment"), "--soft-labels has no labels of the copies"),
    ],
)
def test_soft_labels_take_the_teachers_place(tmp_path, more, message):
    given = ["distill", *more, "--task", "own", "--soft-labels", "soft.npy"]
    assert message in own_files.refused(
        tmp_path, *given, *(() if "--student" in more else ("--to", "2x16"))
    )


def test_a_file_of_copies_that_cannot_be_made(refused, tmp_path):
    assert "nowhere.txt" in refused(
        "--glove", tmp_path / "nowhere.txt", "--augment-only", tmp_path / "copies.jsonl"
    )
    assert "its directory does not exist" in refused(
        "--augment-only", tmp_path / "no" / "copies.jsonl"
    )
    assert "is a directory" in refused("--augment-only", tmp_path)


def test_a_variant_that_cannot_be_is_found_before_the_first_runs(refused, tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("fine: {kd.weight: 0.5}\nwrong: {loss.layers: '0:0,1:9'}\n", "utf-8")
    assert "9" in refused("--ablate", file)
    file.write_text("wrong: {kd.temprature: 2.0}\n", "utf-8")
    assert "unknown key 'kd.temprature'" in refused("--ablate", file)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"method": "pkd"}, "does not read method"),
        ({"augment.use": True, "stage": "none"}, "does not read stage, augment"),
        ({"more_teachers": ["other"]}, "does not read more_teachers"),
    ],
)
def test_a_workload_that_learns_outputs_refuses_the_keys_of_rows(keys, message):
    options = {"task": "embedding", "teacher": "demo", "student.to": ["2x64"], **keys}
    resolved = resolve(DistillRecipe, recipe=None, options=options)
    with pytest.raises(UsageError, match=message):
        distill(resolved, RunOptions())


def test_a_workload_that_learns_outputs_reports_no_method_of_rows():
    options = {"task": "embedding", "teacher": "demo", "student.to": ["2x64"]}
    resolved = complete(resolve(DistillRecipe, recipe=None, options=options))
    assert (resolved.recipe.method, resolved.recipe.kd.weight) == ("soft-targets", 0.5)
