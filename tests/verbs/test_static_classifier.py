"""Static classifiers: the mean and the head, the files, and the verbs that take them."""

import json
import shlex
import shutil

import numpy as np
import pytest
import torch
from own_files import refused, report_of, said_by, succeeds
from safetensors.torch import load_file, save_file

import kdcli
from kdcli.errors import UsageError
from kdcli.models.static import StaticConfig
from kdcli.models.static_classifier import StaticForSequenceClassification

QUICK = shlex.split(
    "--max-steps 60 --set data.max_length=24 --set train.eval_every=30 --set train.log_every=5 "
    "--set train.lr=3e-2 --batch-size 32 --dtype fp32 --set measure.latency=false "
    "--set undistilled.use=false"
)


@pytest.fixture(scope="module")
def student(asked, tmp_path_factory):
    """The directory of a static student for classes."""
    folder = tmp_path_factory.mktemp("static") / "student"
    succeeds(*asked(to="static:8"), "-o", folder)
    return folder


def test_the_logits_are_the_head_of_the_mean_of_words():
    torch.manual_seed(0)
    config = StaticConfig(vocab_size=9, hidden_dim=4, num_labels=3, framing_token_ids=[1, 2])
    model = StaticForSequenceClassification(config).eval()
    with torch.no_grad():
        model.hidden.bias.normal_()
        model.classifier.bias.normal_()
    ids = torch.tensor([[1, 5, 7, 5, 2], [1, 8, 2, 0, 0], [1, 2, 0, 0, 0]])
    found = model(input_ids=ids, attention_mask=(ids > 0).long()).logits.detach().numpy()
    state = {name: x.double().numpy() for name, x in model.state_dict().items()}
    table = state["static.embeddings"]
    means = np.stack([(2 * table[5] + table[7]) / 3, table[8], np.zeros(4)])
    hidden = np.tanh(means @ state["hidden.weight"].T + state["hidden.bias"])
    expected = hidden @ state["classifier.weight"].T + state["classifier.bias"]
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_a_trainer_finds_the_loss_and_may_pass_the_weights(student, tmp_path):
    model = kdcli.load(student).model
    ids = torch.tensor([[5, 7, 5], [8, 9, 6]])
    labels = torch.tensor([1, 0])
    found = model(input_ids=ids, labels=labels)
    expected = torch.nn.functional.cross_entropy(found.logits.double(), labels)
    assert float(found.loss) == pytest.approx(float(expected), rel=1e-5)
    state = {name: x.clone() for name, x in model.state_dict().items()}
    state["static.embeddings"] *= 2
    model.save_pretrained(tmp_path, state_dict=state)
    saved = load_file(tmp_path / "model.safetensors")["embeddings"]
    assert torch.equal(saved, state["static.embeddings"])


def test_a_teacher_without_labels_teaches(asked, tmp_path):
    out = tmp_path / "out"
    succeeds(*asked("class", to="static"), "--set", "data.labels=teacher", "-o", out)
    assert kdcli.load(out).model.config.hidden_dim == 32
    agreement = {e.model: e.metrics["agreement"] for e in report_of(out).evaluations}
    assert agreement["student"] > 0.85


def test_a_student_that_is_not_trained_gets_its_teachers_logits_by_a_fit(asked, tmp_path):
    words = [*asked("class", to="static:16"), "--max-steps", "0"]
    result = succeeds(*words, "-o", tmp_path / "out")
    assert "token vectors, fitted to 96 texts" in said_by(result)
    scores = {e.model: e.metrics for e in report_of(tmp_path / "out").evaluations}
    assert scores["student"]["accuracy"] > 0.7


def test_an_export_has_the_same_inputs_and_scores(student, asked, tmp_path):
    data = ("--task", "own", "--data", asked()[5])
    succeeds("export", student, "--format", "onnx", "--int8", *data, "-o", tmp_path / "out")
    facts = json.loads((tmp_path / "out" / "export.json").read_text())
    assert facts["inputs"] == ["input_ids", "attention_mask"]
    assert facts["outputs"] == ["logits"]
    folders = [student, tmp_path / "out"]
    result = succeeds("evaluate", *folders, *data, "-o", tmp_path / "scores")
    values = [next(iter(e.metrics.values())) for e in report_of(tmp_path / "scores").evaluations]
    assert values[0] == pytest.approx(values[1], abs=0.05), result.output


def test_compress_refuses_a_static_student_before_it_fine_tunes_an_encoder(asked, tmp_path):
    teacher = asked("tokens")[1]
    words = ("--task", "own", "--data", asked("tokens")[5], "--max-drop", "30")
    assert "it can only learn outputs for whole texts" in refused(
        tmp_path, "compress", teacher.parent / "base", *words, "--set", "plan.shapes=[static:8]"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--method", "tinybert"), "method tinybert compares token states"),
        (("--student", "demo"), "--student: a static student has"),
        (("--set", "student.layers=[1]"), "student.layers names layers to copy"),
        (("--set", "student.init=copied"), "student.init=copied copies layers"),
        (("--set", "head.kind=mlm"), "head.kind=mlm: a static student has no"),
        (("--corpus", "demo"), "so there is no stage on text"),
    ],
)
def test_what_a_static_classifier_cannot_learn_is_refused(asked, tmp_path, words, message):
    assert message in refused(tmp_path, *asked("class", to="static:8"), *words)


def test_a_static_classifier_is_at_most_as_wide_as_its_teacher(asked, tmp_path):
    assert "cannot have vectors of 33 numbers" in refused(tmp_path, *asked("class", to="static:33"))


def test_labels_of_tokens_need_layers(asked, tmp_path):
    words = asked("tokens", to="static")
    assert "it can only learn outputs for whole texts" in refused(tmp_path, *words)


@pytest.mark.parametrize(
    "command",
    [
        ("prune", "STUDENT", "--method", "smp"),
        ("distill", "STUDENT", "--to", "1x4"),
        ("distill", "STUDENT", "--to", "static:4"),
    ],
)
def test_verbs_that_train_layers_refuse_a_static_classifier(student, asked, tmp_path, command):
    words = [str(student) if word == "STUDENT" else word for word in command]
    message = refused(tmp_path, *words, "--task", "own", "--data", asked("class")[5])
    assert "is a static model: a table" in message


def test_a_damaged_head_is_refused(student, tmp_path):
    folder = shutil.copytree(student, tmp_path / "copy")
    tensors = load_file(folder / "model.safetensors")
    del tensors["classifier.bias"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UsageError, match="incomplete"):
        _ = kdcli.load(folder).model
