"""`kdcli distill --to 2x`, `--to 5ms` and `--max-steps 0`."""

import json
import shlex

import pytest
import torch
import yaml
from fake_verbs import latency_of
from own_files import kdcli, log_of, refused, report_of, said_by, succeeds, times
from safetensors.torch import load_file
from test_run_contract import TASK, TEXT, places  # noqa: F401
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from kdcli.errors import GateError
from kdcli.models.shape import shape_of

QUICK = shlex.split(
    "--batch-size 8 --lr 1e-3 --dtype fp32 --device cpu --set measure.latency=false"
)
RUNS = {
    "text": f"distill {{teacher}} --data {{text}} {TEXT}",
    "task": f"distill {{classifier}} {TASK}",
    "task, copies": f"distill {{classifier}} {TASK} --augment --method pkd --set keep=best",
    "embedding": f"distill {{embedder}} --data {{text}} {TEXT} --set embedding.rows=80",
    "embedding, cut": f"distill {{embedder}} --data {{text}} {TEXT} --set embedding.rows=80 "
    "--set 'loss.dimensions=[32, 16]'",
    "reranker": "distill {scorer} --task rerank --data {lists} --set data.max_length=24",
}


def command_of(name, places, *more):  # noqa: F811
    return [*shlex.split(RUNS[name].format(**places)), *QUICK, *more]


class Worker:
    """A latency worker whose times are linear in layers and width, and what it was asked for."""

    def __init__(self):
        self.names, self.backends, self.architectures = [], set(), set()
        self.ms = lambda shape, full: shape.layers * shape.hidden / full.hidden

    def __call__(self, subjects, protocol):
        configs = [AutoConfig.from_pretrained(subject.source) for subject in subjects]
        shapes = list(map(shape_of, configs))
        for subject, config in list(zip(subjects, configs, strict=True))[1:]:
            self.names.append(subject.name)
            self.backends.add((subject.backend, subject.precision))
            self.architectures.add(config.architectures[0])
        times = [self.ms(shape, shapes[0]) for shape in shapes]
        return latency_of({one.name: ms for one, ms in zip(subjects, times, strict=True)})


@pytest.fixture
def worker(answered_by):
    """The worker that measures students."""
    worker = Worker()
    answered_by(worker)
    return worker


@pytest.fixture
def timed(worker):
    """The names of the students that were measured."""
    return worker.names


@pytest.mark.parametrize("name", RUNS)
def test_a_student_is_chosen_and_saved_without_training(name, places, timed, tmp_path):  # noqa: F811
    command = command_of(name, places, "--to", "2x", "--max-steps", "0", "-o", tmp_path / "out")
    succeeds(*command)
    report = report_of(tmp_path / "out")
    (student,), (teacher,) = report.with_role("student"), report.with_role("teacher")
    assert (student.card.layers, teacher.card.layers) == (2, 4)
    assert {model.role for model in report.models} == {"student", "teacher"}
    assert (report.training.steps, report.training.loss_last) == (0, None)
    assert [record["step"] for record in log_of(tmp_path / "out")] == [0]
    note = "--to 2x: 2x32 has the most layers of the widest students that are fast enough on torch"
    assert [n for n in report.notes if n.startswith(note)]
    for page in ("report.html", "report.md"):
        text = (tmp_path / "out" / page).read_text("utf-8")
        assert "not trained" in text
        assert "without training" in (tmp_path / "out" / "README.md").read_text("utf-8")
    recipe = yaml.safe_load((tmp_path / "out" / "recipe.yaml").read_text("utf-8"))
    assert recipe["student"]["to"] in ("2x32", ["2x32"])
    assert recipe["student"]["chosen"]["goal"] == "2x"
    # A finished run is not repeated, and its shapes are not timed again.
    before, count = times(tmp_path / "out"), len(timed)
    succeeds(*command, "--resume")
    assert (times(tmp_path / "out"), len(timed)) == (before, count)
    # Nor are they by a rerun from the recipe, which makes the same student.
    again = ["distill", "--recipe", tmp_path / "out" / "recipe.yaml", "-o", tmp_path / "again"]
    succeeds(*again)
    assert len(timed) == count
    one, other = (load_file(tmp_path / d / "model.safetensors") for d in ("out", "again"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_too_little_text_is_refused_before_anything_is_timed(places, timed, tmp_path):  # noqa: F811
    (tmp_path / "few.txt").write_text("One text.\nAnother text.\n", "utf-8")
    command = f"distill {places['embedder']} --data {tmp_path / 'few.txt'} --to 2x --max-steps 0"
    said = refused(tmp_path, *shlex.split(command), *QUICK)
    assert "at least 8 training texts, but there is only 1" in said
    assert not timed


def test_a_classifier_is_timed_without_its_head(places, worker, tmp_path):  # noqa: F811
    command = command_of("task", places, "--to", "2x", "--max-steps", "0", "-o", tmp_path / "out")
    succeeds(*command)
    assert worker.architectures == {"BertModel"}
    assert report_of(tmp_path / "out").with_role("student")[0].card.layers == 2


@pytest.mark.parametrize("to", ["2x32", "2x16"])
def test_an_untrained_classifier_has_its_teachers_head(to, places, tmp_path):  # noqa: F811
    succeeds(*command_of("task", places, "--to", to, "--max-steps", "0", "-o", tmp_path / "out"))
    student = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    teacher = AutoModelForSequenceClassification.from_pretrained(places["classifier"]).eval()
    assert student.config.id2label == teacher.config.id2label
    lines = (places["rows"] / "validation.jsonl").read_text("utf-8").splitlines()
    texts = [json.loads(line)["text"] for line in lines]
    tokenizer = AutoTokenizer.from_pretrained(places["classifier"])
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        ours, theirs = student(**batch).logits, teacher(**batch).logits
    # A new head agrees on half of the rows.
    assert (ours.argmax(1) == theirs.argmax(1)).double().mean() >= 0.75


@pytest.mark.parametrize("name", ["text", "task"])
def test_the_student_with_the_closest_vectors_is_chosen(name, places, worker, tmp_path):  # noqa: F811
    worker.ms = lambda shape, full: shape.layers * (0.25 + 0.75 * shape.ffn / full.ffn)
    command = command_of(name, places, "--to", "2x", "--max-steps", "0", "-o", tmp_path / "out")
    result = succeeds(*command)
    recipe = yaml.safe_load((tmp_path / "out" / "recipe.yaml").read_text("utf-8"))
    chosen = recipe["student"]["chosen"]
    # Such as "3x32:64: 2.10x, 1.90 ms, cosine 0.773".
    lines = [line.split(": ") for line in chosen["measured"] if "cosine" in line]
    cosines = {shape: float(facts.rpartition(" ")[2]) for shape, facts in lines}
    assert {shape[:4] for shape in cosines} == {"2x32", "3x32", "4x32"}
    assert cosines[chosen["shape"]] == max(cosines.values())
    assert "is closest to the teacher among the candidates" in said_by(result)
    depth = int(chosen["shape"][0])
    config = json.loads((tmp_path / "out" / "config.json").read_text("utf-8"))
    whole = shape_of(AutoConfig.from_pretrained(places["embedder"])).ffn
    units = int(chosen["shape"].partition(":")[2] or whole)
    assert (config["num_hidden_layers"], config["intermediate_size"]) == (depth, units)


def test_a_run_for_another_goal_is_not_resumed(places, timed, tmp_path):  # noqa: F811
    command = command_of("text", places, "--max-steps", "0", "-o", tmp_path / "out")
    succeeds(*command, "--to", "2x")
    before = list(timed)
    message = said_by(kdcli(*command, "--to", "3x", "--resume"))
    assert 'student.to: was ["2x32"], is ["3x"]' in message
    assert timed == before, "it was timed before it was refused"


def test_an_unfinished_run_keeps_its_shape(places, timed, tmp_path):  # noqa: F811
    command = command_of("text", places, "--to", "2.0x", "--max-steps", "0", "-o", tmp_path / "out")
    succeeds(*command)
    (tmp_path / "out" / "report.json").unlink()
    count = len(timed)
    succeeds(*command, "--resume")
    assert len(timed) == count
    assert report_of(tmp_path / "out").with_role("student")[0].card.layers == 2


def test_the_students_are_timed_on_the_backend(places, worker, tmp_path):  # noqa: F811
    more = ("--to", "1.3x", "--backend", "onnx-int8", "--max-steps", "0", "-o", tmp_path / "out")
    succeeds(*command_of("text", places, *more))
    assert worker.backends == {("onnx", "int8")}
    assert "on onnx-int8" in " ".join(report_of(tmp_path / "out").notes)


def test_another_shape_replaces_the_chosen_one(places, timed, tmp_path):  # noqa: F811
    short = ("--max-steps", "0", "-o")
    succeeds(*command_of("text", places, "--to", "2x", *short, tmp_path / "out"))
    recipe = ("--recipe", tmp_path / "out" / "recipe.yaml")
    succeeds("distill", *recipe, "--to", "1x32", "-o", tmp_path / "other")
    report = report_of(tmp_path / "other")
    assert report.with_role("student")[0].card.layers == 1
    assert not [note for note in report.notes if note.startswith("--to")]


def test_variants_share_the_shape(places, timed, tmp_path):  # noqa: F811
    variants = tmp_path / "variants.yaml"
    variants.write_text("warm: {kd.temperature: 3.0}\n", "utf-8")
    more = ("--to", "2x", "--max-steps", "0", "--ablate", variants, "-o", tmp_path / "out")
    succeeds(*command_of("task", places, *more))
    assert len(timed) == len(set(timed))
    students = report_of(tmp_path / "out").with_role("student")
    assert [student.card.layers for student in students] == [2, 2]


@pytest.mark.parametrize("change", ["student.to: [3x]"])
def test_variants_need_one_goal(change, places, timed, tmp_path):  # noqa: F811
    variants = tmp_path / "variants.yaml"
    variants.write_text(f"base: {{}}\nother: {{{change}}}\n", "utf-8")
    more = ("--to", "2x", "--max-steps", "0", "--ablate", variants, "-o", tmp_path / "out")
    done = kdcli(*command_of("task", places, *more))
    assert (done.exit_code, timed, (tmp_path / "out").exists()) == (2, [], False)
    assert "variant other asks for" in said_by(done)


def test_a_dry_run_times_the_shapes_and_writes_nothing(places, timed, tmp_path):  # noqa: F811
    more = ("--to", "2x", "--max-steps", "0", "--dry-run", "--json", "-o", tmp_path / "out")
    estimate = json.loads(succeeds(*command_of("text", places, *more)).stdout)
    assert [leg["steps"] for leg in estimate["legs"]] == [0]
    assert timed
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("text", ["--to", "2x", "--to", "3x32"], "2x chooses the only shape"),
        ("text", ["--set", "student.to=[2x, 3x32]"], "2x chooses the only shape"),
        ("text", ["--to", "0.5x"], "0.5x is not faster than the teacher"),
        ("text", ["--to", "2x", "--set", "student.layers=[1]"], "student.layers names the layers"),
        ("text", ["--to", "9ms"], "fast enough for --to 9ms on torch: 1.00x, 4.00 ms"),
        ("text", ["--to", "2x", "--assistant", "2x"], "'2x' is not a shape"),
        ("task", ["--to", "2x", "--student", "{encoder}"], "--to 2x has nothing to choose"),
        ("task", ["--student", "{encoder}", "--max-steps", "0"], "be combined with --student"),
        ("task", ["--to", "2x16", "--max-steps", "0", "--corpus", "{text}"], "the stage on text"),
        *(
            (name, ["--student", "{encoder}", "--max-steps", "0"], "be combined with --student")
            for name in ("embedding", "reranker")
        ),
        ("text", ["--to", "2x16", "--max-steps", "-3"], "at least 0, got -3"),
    ],
)
def test_what_is_refused(name, more, message, places, timed, tmp_path):  # noqa: F811
    given = [word.format(**places) for word in more]
    assert message in refused(tmp_path, *command_of(name, places, *given))


def test_a_goal_out_of_reach_writes_nothing(places, timed, tmp_path):  # noqa: F811
    command = command_of("text", places, "--to", "99x", "-o", tmp_path / "out")
    done = kdcli(*command)
    assert (done.exit_code, "reaches 99x" in said_by(done)) == (GateError.exit_code, True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "verb", ["finetune {encoder}", "prune {encoder}", "cotrain {encoder} 1x32"]
)
def test_other_verbs_must_train(verb, places, tmp_path):  # noqa: F811
    words = shlex.split(f"{verb} {TASK} --max-steps 0".format(**places))
    assert "'train.max_steps' must be greater than 0, got 0" in refused(tmp_path, *words)
