"""A student's head that is fitted to its teacher's outputs."""

import numpy as np
import pytest
import torch
from encoders import tiny_config
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from kdcli.errors import UsageError
from kdcli.models.heads import check_linear_head, fit_head, last_linear, student_with_fitted_head
from kdcli.models.least_squares import BIAS_RIDGE, RIDGE
from kdcli.models.model import Model
from kdcli.models.shape import build_student
from kdcli.types import ModelShape

pytestmark = pytest.mark.slow


class Rows:
    """Random rows of 3 to 9 tokens."""

    def __init__(self, count=200):
        rng = np.random.default_rng(0)
        self.ids_BL = torch.from_numpy(rng.integers(5, 60, size=(count, 9)))
        self.mask_BL = torch.from_numpy(rng.integers(3, 10, size=(count, 1)) > np.arange(9)).long()

    def __len__(self):
        return len(self.ids_BL)

    def batch(self, at):
        return {"input_ids": self.ids_BL[at], "attention_mask": self.mask_BL[at]}


def teacher_of(kind, auto=AutoModelForSequenceClassification, labels=3):
    torch.manual_seed(0)
    config = tiny_config(kind, num_labels=labels)
    # Larger weights than a new model's, so that the outputs differ from row to row.
    model = auto.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return Model(model, None, "teacher")


def student_of(teacher, rows, hidden):
    full = teacher.shape
    shape = ModelShape(full.layers - 1, hidden, full.ffn, full.heads)
    return build_student(teacher.model.base_model, shape, text=rows)


@pytest.mark.parametrize(
    ("kind", "auto"),
    [
        ("bert", AutoModelForSequenceClassification),
        ("roberta", AutoModelForSequenceClassification),
        ("distilbert", AutoModelForSequenceClassification),
        ("modernbert", AutoModelForSequenceClassification),
        ("bert", AutoModelForTokenClassification),
        ("bert", AutoModelForQuestionAnswering),
    ],
)
@pytest.mark.parametrize("narrow", [False, True])
def test_a_fitted_head_repeats_its_teachers_outputs_better_than_a_copied_one(kind, auto, narrow):
    rows, teacher = Rows(), teacher_of(kind, auto, 2)
    hidden = teacher.shape.hidden // (2 if narrow else 1)
    errors = {}
    for init in ("copied", "teacher"):
        built = student_of(teacher, rows, hidden)
        student = student_with_fitted_head(teacher, built, rows, init=init, seed=0)
        errors[init] = error_of(teacher.model, student.model, rows)
    assert errors["teacher"] < errors["copied"]


def error_of(teacher, student, rows):
    batch, total = rows.batch(np.arange(len(rows))), 0.0
    with torch.no_grad():
        ours, theirs = student(**batch), teacher(**batch)
    names = [name for name in ("logits", "start_logits", "end_logits") if name in theirs]
    for name in names:
        difference = (ours[name] - theirs[name]).double()
        if difference.shape[1] == batch["attention_mask"].shape[1]:
            difference = difference[batch["attention_mask"].bool()]
        total += float(difference.square().sum())
    return total


def test_the_head_is_the_ridge_regression_about_the_copied_head():
    rows, teacher = Rows(), teacher_of("bert", labels=3)
    built = student_of(teacher, rows, teacher.shape.hidden)
    model = student_with_fitted_head(teacher, built, rows, init="copied", seed=0).model
    batch = rows.batch(np.arange(len(rows)))
    with torch.no_grad():
        x = model.bert(**batch).pooler_output.double().numpy()
        y = teacher.model(**batch).logits.double().numpy()
    before = model.classifier
    prior = np.concatenate(
        [before.weight.detach().numpy(), before.bias.detach().numpy()[:, None]], 1
    ).astype(np.float64)
    x = np.concatenate([x, np.ones((len(x), 1))], 1)
    gram = x.T @ x
    ridge = np.diag(np.append(RIDGE * np.diag(gram)[:-1], BIAS_RIDGE * len(x)))
    expected = np.linalg.solve(gram + ridge, x.T @ y + ridge @ prior.T).T
    fit_head(teacher, model, rows)
    assert np.allclose(model.classifier.weight.detach().numpy(), expected[:, :-1], atol=1e-5)
    assert np.allclose(model.classifier.bias.detach().numpy(), expected[:, -1], atol=1e-5)


def test_a_teacher_without_a_head_is_refused():
    teacher = teacher_of("bert")
    bare = Model(teacher.model.base_model, None, "bare")
    assert last_linear(bare.model) is None
    with pytest.raises(UsageError, match="bare has no head"):
        check_linear_head(bare)
