"""The stages of a task's distillation as jobs: the terms of each loss, and where gradients go."""

import numpy as np
import own_files
import pytest
import torch
from encoders import on_disk, tiny_config, tiny_encoder
from stand_ins import labelled
from transformers import AutoModelForSequenceClassification

from kdcli.losses import build_objective
from kdcli.losses.hard import hard_loss
from kdcli.losses.soft_targets import soft_loss
from kdcli.models.heads import load_for_task
from kdcli.models.least_squares import RIDGE
from kdcli.models.shape import shape_of
from kdcli.recipe.sections import KdSettings
from kdcli.report.schema import STUDENT
from kdcli.targets.cache import SignalStore, StorePlace
from kdcli.types import Signals, StepLoss
from kdcli.verbs.distill.distillation import objective_job
from kdcli.verbs.distill.student import Student, fit_projections
from kdcli.verbs.distill.task_stages import prediction_job
from kdcli.workloads.finetuning import request_of
from kdcli.workloads.labelled_tasks import open_workload
from kdcli.workloads.settings import FinetuneRecipe, FinetuneTrainSettings, LabelledSettings
from kdcli.workloads.training import mixed_terms

LABELS = ("brisk", "calm")
ROWS = np.arange(6)


def saved(folder, seed, **changes):
    """A tiny BERT for two classes; it drops out as BERT does."""
    torch.manual_seed(seed)
    names = {"id2label": dict(enumerate(LABELS)), "label2id": {n: i for i, n in enumerate(LABELS)}}
    config = tiny_config("bert", initializer_range=0.3, **names | changes)
    return on_disk(AutoModelForSequenceClassification.from_config(config), folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A teacher, another one, and data in which rows differ in length."""
    folder = tmp_path_factory.mktemp("stages")
    saved(folder / "teacher", 0, num_hidden_layers=4)
    saved(folder / "other", 1, num_hidden_layers=3)
    texts = [" ".join(f"w{(i * 7 + j) % 40}" for j in range(3 + i % 5)) for i in range(12)]
    for split in ("train", "validation"):
        rows = [{"text": f"{text} {split}", "label": LABELS[i % 2]} for i, text in enumerate(texts)]
        own_files.write(folder / "data" / f"{split}.jsonl", rows)
    return folder


@pytest.fixture
def recipe(folders):
    data = LabelledSettings(source=str(folders / "data"), max_length=16)
    train = FinetuneTrainSettings(max_steps=4, batch_size=4)
    return FinetuneRecipe(model=str(folders / "teacher"), task="own", data=data, train=train)


@pytest.fixture
def ready(recipe, session):
    return open_workload(request_of(recipe, recipe.model, new_head=False), session)


def encoder():
    torch.manual_seed(2)
    return tiny_encoder("bert", initializer_range=0.3, hidden_size=16, intermediate_size=64)


def objective_of(teacher, student, method="tinybert"):
    torch.manual_seed(3)
    return build_objective(method, {}, shape_of(teacher.model.config), shape_of(student.config))


def values(loss):
    return {name: term.value for name, term in loss.terms.items()}


def plain(model, batch):
    with torch.no_grad():
        return model.eval()(**{k: v for k, v in batch.items() if k != "labels"}).logits


@pytest.fixture
def own_stage(ready, recipe):
    task, teacher = ready

    def of(store=None):
        network = encoder()
        student = Student(network, objective_of(teacher, network))
        plan = task.plan(recipe.train)
        job = objective_job({STUDENT: student}, teacher, task, plan, place=store)
        return student, job

    return of


def test_the_own_stage_looks_at_no_labels(own_stage):
    student, job = own_stage()
    student.eval()
    batch = job.examples.batch(ROWS)
    loss = job.step(batch)
    assert set(loss.terms) == {"embedding", "hidden", "attention"}
    torch.testing.assert_close(loss.total, sum(values(loss).values()))
    assert torch.equal(loss.total, job.step(batch | {"labels": 1 - batch["labels"]}).total)
    assert list(job.modules) == [STUDENT]


@pytest.mark.parametrize(
    ("share", "pairs"),
    [(False, [[(0, 0)], [(1, 2)], [(2, 4)]]), (True, [[(0, 0), (1, 2), (2, 4)]])],
)
def test_projections_start_at_the_least_squares_of_both_models_states(ready, share, pairs):
    task, teacher = ready
    student, rows = encoder().train(), task.train_rows
    shapes = shape_of(teacher.model.config), shape_of(student.config)
    made = build_objective("tinybert", {"share_projection": share}, *shapes)
    fit_projections(made, teacher.model, student, rows)
    assert student.training, "as it came"
    batch = rows.batch(np.arange(len(rows)))
    batch = {name: batch[name] for name in ("input_ids", "attention_mask")}

    def states(model, n):
        with torch.no_grad():
            hidden = model.base_model.eval()(**batch, output_hidden_states=True).hidden_states[n]
        return hidden[batch["attention_mask"].bool()].double().numpy()

    for projection, compared in zip(made.projections.values(), pairs, strict=True):
        x_RD = np.concatenate([states(student, m) for m, _ in compared])
        y_RE = np.concatenate([states(teacher.model, n) for _, n in compared])
        ridge = RIDGE * np.diag(np.square(x_RD).sum(0))
        expected_DE = np.linalg.solve(x_RD.T @ x_RD + ridge, x_RD.T @ y_RE)
        np.testing.assert_allclose(projection.weight.detach().numpy(), expected_DE.T, atol=1e-5)


def test_both_stages_fit_the_projections(own_stage, ready, recipe, tmp_path):
    task, teacher = ready
    narrow = saved(tmp_path / "narrow", 4, hidden_size=16, intermediate_size=64)
    headed, job = predicted(
        ready, recipe.model_copy(update={"model": str(narrow)}), KdSettings(), [teacher], "tinybert"
    )
    for projections, student in (
        (own_stage()[0].projections, encoder()),
        (job.modules["projections"], headed.model),
    ):
        expected = objective_of(teacher, student)
        fit_projections(expected, teacher.model, student, task.train_rows)
        for name, weight in expected.projections.state_dict().items():
            assert torch.equal(projections.state_dict()[name], weight)


def predicted(ready, recipe, kd, teachers, method=None, store=None):
    task, first = ready
    headed = load_for_task(recipe.model, task.data.task, new_head=False)
    objectives = {STUDENT: objective_of(first, headed.model, method)} if method else {}
    students = {STUDENT: headed}
    job = prediction_job(task, recipe.train, recipe.keep, kd, students, teachers, objectives, store)
    for module in job.modules.values():
        module.eval()
    return headed, job


def test_a_teacher_that_nothing_is_learned_from_is_not_asked(ready, recipe):
    network = ready[1].model
    calls = []
    network.register_forward_hook(lambda *_: calls.append(1))
    _, job = predicted(ready, recipe, KdSettings(weight=0.0), [ready[1]])
    batch = job.examples.batch(ROWS)
    assert job.step(batch).terms.keys() == {"task"}
    assert not calls


@pytest.mark.parametrize(("weight", "temperature"), [(0.0, 1.0), (0.3, 4.0), (1.0, 1.0)])
def test_labels_and_logits_share_the_weight(ready, recipe, folders, weight, temperature):
    task, _ = ready
    teacher = load_for_task(str(folders / "other"), task.data.task, new_head=False)
    headed, job = predicted(
        ready, recipe, KdSettings(weight=weight, temperature=temperature), [teacher]
    )
    batch = job.examples.batch(ROWS)
    loss = job.step(batch)
    student, soft = plain(headed.model, batch), plain(teacher.model, batch)
    mask = batch["attention_mask"]
    hard = (1 - weight) * hard_loss("class", student, batch["labels"], mask)
    kd = weight * soft_loss("class", soft, student, batch["labels"], mask, temperature)
    torch.testing.assert_close(values(loss), {n: x for n, x in (("task", hard), ("kd", kd)) if x})
    torch.testing.assert_close(loss.total, hard + kd)


def test_an_objective_is_added_with_its_projections(ready, recipe):
    _, teacher = ready
    _, job = predicted(ready, recipe, KdSettings(), [teacher], "tinybert")
    assert set(job.modules) == {"model", "projections"}
    loss = job.step(job.examples.batch(ROWS))
    assert set(loss.terms) == {"task", "kd", "embedding", "hidden", "attention"}
    _, without = predicted(ready, recipe, KdSettings(), [teacher], "pkd")
    assert set(without.modules) == {"model"}, "of equal width nothing is projected"
    assert set(without.step(without.examples.batch(ROWS)).terms) == {"task", "kd", "patience"}


@pytest.mark.parametrize("method", [None, "pkd"])
def test_the_prediction_stage_caches_the_signals_of_one_teacher(ready, recipe, tmp_path, method):
    _, teacher = ready
    _, plain_job = predicted(ready, recipe, KdSettings(weight=0.7), [teacher], method)
    _, job = predicted(
        ready, recipe, KdSettings(weight=0.7), [teacher], method, StorePlace(tmp_path, 10**9)
    )
    assert list(tmp_path.iterdir())
    batch = job.examples.batch(ROWS)
    assert SignalStore.fills(batch)
    expected, loss = plain_job.step(plain_job.examples.batch(ROWS)), job.step(batch)
    assert set(loss.terms) == set(expected.terms)
    assert not SignalStore.fills(batch), "no model reads the cached signals"
    torch.testing.assert_close(values(loss)["kd"], values(expected)["kd"])
    torch.testing.assert_close(loss.total, expected.total, rtol=2e-2, atol=1e-4)
    assert not SignalStore.fills(job.held_out.batch(ROWS))


def test_nothing_is_kept_of_several_teachers_or_for_one_pass(ready, recipe, tmp_path):
    task, teacher = ready
    predicted(ready, recipe, KdSettings(), [teacher, teacher], store=StorePlace(tmp_path, 10**9))
    pass_of = len(task.train_rows) // recipe.train.batch_size
    once = recipe.model_copy(
        update={"train": recipe.train.model_copy(update={"max_steps": pass_of})}
    )
    predicted(ready, once, KdSettings(), [teacher], store=StorePlace(tmp_path, 10**9))
    assert not list(tmp_path.iterdir())


def test_several_teachers_have_the_gradient_of_their_mean_distribution():
    generator = torch.Generator().manual_seed(0)
    first, second, student = (
        torch.randn(5, 3, generator=generator, dtype=torch.float64) for _ in range(3)
    )
    labels, kd = torch.zeros(5, dtype=torch.int64), KdSettings(weight=1.0, temperature=2.0)

    def gradient(*teachers):
        logits = student.clone().requires_grad_()
        of_student = Signals(logits=logits, labels=labels)
        batch = {"attention_mask": torch.ones(5, 4, dtype=torch.int64), "labels": labels}
        of_teachers = [Signals(logits=t) for t in teachers]
        terms = mixed_terms(labelled("class"), of_student, of_teachers, batch, kd)
        StepLoss(terms).total.backward()
        return logits.grad

    mean = ((first / 2).softmax(-1) + (second / 2).softmax(-1)).div(2).log() * 2
    torch.testing.assert_close(gradient(first, second), gradient(mean), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(gradient(first, second), gradient(first), atol=1e-3)
