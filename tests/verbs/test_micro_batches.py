"""Micro-batches and processes change no training: every loss, stage and pruner, on rows of
different lengths."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import own_files
import pytest
import torch
from accelerate import Accelerator
from encoders import on_disk, tiny_config, tiny_encoder, tiny_tokenizer
from forked import in_ranks
from stand_ins import Taught, rows_of
from transformers import AutoModelForMaskedLM

from kdcli.engine.launch import Session
from kdcli.engine.train import train
from kdcli.losses import build_objective, inputs_of, methods, on_tasks
from kdcli.models.capture import capture
from kdcli.models.embedder import EmbeddingFormat, Pool
from kdcli.models.grammar import parse_shape
from kdcli.models.masked_lm import student_with_head
from kdcli.models.shape import build_student, shape_of
from kdcli.pruners import methods as pruners
from kdcli.recipe.resolve import Resolved, resolve
from kdcli.recipe.sections import KdSettings, RunOptions
from kdcli.run.context import RunContext
from kdcli.types import IGNORED, Needs, Schedule
from kdcli.verbs.cotrain.job import pair_job
from kdcli.verbs.cotrain.models import load_task_pair, load_text_pair
from kdcli.verbs.cotrain.settings import CotrainRecipe
from kdcli.verbs.distill.jobs import objective_job, prediction_job
from kdcli.verbs.distill.student import Student, distill_job
from kdcli.verbs.prune.job import build_pruning
from kdcli.verbs.prune.settings import PruneRecipe
from kdcli.workloads import open_workload
from kdcli.workloads.finetuning import request_of
from kdcli.workloads.settings import FinetuneRecipe
from kdcli.workloads.text import TextWorkload

CALM = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "initializer_range": 0.3}
BATCH, SCHEDULE = 7, Schedule(steps=4, batch_size=7, lr=0.1, warmup_steps=0, eval_every=100)
# Settings of a pruner that lets something happen within four steps.
PRUNING = {
    "smp": {"regularizer": 1.0},
    "soft-movement": {"regularizer": 1.0},
    "l0": {"regularizer": 1.0},
}


class Text:
    """Rows of 3 to 12 tokens; of the longer ones more than in proportion are masked. `full` pads
    each batch to 12."""

    def __init__(self, masked=False, full=False):
        self.full = full
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(3, 13, (48, 1), generator=generator)
        self.mask = (torch.arange(12) < lengths).long()
        self.ids = torch.randint(5, 60, (48, 12), generator=generator).where(self.mask.bool(), 0)
        chosen = (torch.arange(12) < (lengths - 5).clamp(min=0)) & masked
        self.labels = self.ids.where(chosen, IGNORED)
        self.ids = self.ids.masked_fill(chosen, 4)

    def __len__(self):
        return len(self.ids)

    def batch(self, indices):
        at = torch.from_numpy(np.asarray(indices) % 48)
        longest = 12 if self.full else int(self.mask[at].sum(1).max())
        named = {"input_ids": self.ids, "attention_mask": self.mask, "labels": self.labels}
        return {name: tensor[at, :longest] for name, tensor in named.items()}


class All:
    """The rows in order."""

    def indices(self, step):
        return np.arange(BATCH) + BATCH * (step - 1)


@pytest.fixture(autouse=True)
def plain_descent(monkeypatch):
    """Adam makes a full step of a gradient that is zero but for rounding."""
    monkeypatch.setattr(
        torch.optim, "AdamW", lambda groups, lr, **_: torch.optim.SGD(groups, lr=lr)
    )


def session():
    return Session(Accelerator(cpu=True), torch.device("cpu"))


def moved(make, micro):
    """The parameters of a job after its training in this process, which moves them."""
    torch.manual_seed(0)
    job = dataclasses.replace(make(), held_out=None)
    before = {n: p.detach().clone() for m in job.modules.values() for n, p in m.named_parameters()}
    train(session(), job, dataclasses.replace(SCHEDULE, micro_batch_size=micro), None)
    after = {n: p.detach() for m in job.modules.values() for n, p in m.named_parameters()}
    assert max(float((after[n] - before[n]).abs().max()) for n in after) > 1e-3
    return after


def assert_alike(make, processes=2):
    """`make` builds a job; micro-batches and processes do not change where its parameters go."""
    first = moved(make, BATCH)
    # Of two processes, one has two micro-batches of 3 rows and the other has one.
    for other in (moved(make, 2), *in_ranks(processes, lambda: moved(make, 3))):
        far = max((float((first[n] - other[n]).abs().max()), n) for n in other)
        assert far[0] < 1e-5, far


@pytest.mark.parametrize("method", [m for m in methods() if inputs_of(m) & {"text", "masked"}])
def test_on_text(method):
    masked = "masked" in inputs_of(method)

    def make():
        config = tiny_config("bert", num_hidden_layers=4, **CALM)
        model = AutoModelForMaskedLM.from_config(config).eval()
        teacher = model if masked else model.base_model
        shape = parse_shape("2x32", shape_of(config))
        built = build_student(teacher.base_model, shape)
        built = student_with_head(teacher, built) if masked else built
        objective = build_objective(method, {}, shape_of(config), shape)
        signals = capture(teacher, objective.teacher_needs)
        student = Student(built.model, objective)
        taught = Taught(torch.no_grad()(signals))
        return distill_job({"s": student}, taught, rows_of(Text(masked)), All())

    assert_alike(make)


def test_on_texts_of_an_embedding_model():
    keys = {
        "similarity_weight": 1.0,
        "contrastive_weight": 1.0,
        "relations_weight": 1.0,
        "hidden_weight": 1.0,
    }

    def make():
        config = tiny_config("bert", num_hidden_layers=4, **CALM)
        teacher, shape = (
            AutoModelForMaskedLM.from_config(config).eval().base_model,
            parse_shape("2x32", shape_of(config)),
        )
        objective, pool = (
            build_objective("embedding", keys, shape_of(config), shape),
            Pool(EmbeddingFormat()),
        )
        signals = capture(teacher, objective.teacher_needs | Needs(pooled=True), pool)
        anchors = torch.randn(9, 32, generator=torch.Generator().manual_seed(1))

        def taught(batch):
            found = signals(batch)
            # Every third row has a positive.
            found.anchors, odd_B = anchors, (batch["input_ids"][:, 1] % 3 == 0).float()
            found.positive = found.pooled.flip(1) * odd_B[:, None]
            return found

        student = Student(build_student(teacher, shape).model, objective, Pool(EmbeddingFormat()))
        return distill_job({"s": student}, Taught(torch.no_grad()(taught)), rows_of(Text()), All())

    assert_alike(make)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Data of every kind, an encoder and a masked language model."""
    folder = tmp_path_factory.mktemp("micro")
    for kind in own_files.ROWS:
        own_files.own(folder / kind, kind, n=48, judged=8)
    torch.manual_seed(0)
    on_disk(tiny_encoder("bert", **CALM), folder / "encoder")
    on_disk(AutoModelForMaskedLM.from_config(tiny_config("bert", **CALM)), folder / "mlm")
    return folder


def on_task(recipe_class, folder, kind="class", **changes):
    train = {"max_steps": 4, "batch_size": BATCH, "warmup_fraction": 0.0, "lr": 1e-3}
    data = {"source": str(folder / kind), "max_length": 24, "stride": 4}
    return recipe_class.model_validate({"task": "own", "data": data, "train": train} | changes)


def taught(folder, kind="class"):
    recipe = on_task(FinetuneRecipe, folder, kind, model=str(folder / "encoder"))
    return recipe, *open_workload(request_of(recipe, recipe.model, new_head=True), session())


def loaded(task, recipe):
    return task.load(recipe.model, head=recipe.head, seed=recipe.train.seed)


@pytest.mark.parametrize("kind", own_files.ROWS)
def test_fine_tuning_and_soft_targets_of_every_kind(folder, kind):
    recipe, task, teacher = taught(folder, kind)
    assert_alike(lambda: task.job(loaded(task, recipe), recipe.train, "last")[0], processes=4)
    kd = KdSettings(weight=0.5, temperature=2.0)
    assert_alike(
        lambda: prediction_job(task, recipe, kd, loaded(task, recipe), [teacher], None, None)[0]
    )


@pytest.mark.parametrize("method", [m for m in methods() if "task" in inputs_of(m)])
@pytest.mark.parametrize("kind", ["class", "tokens"])
def test_joint_with_the_prediction(folder, kind, method):
    recipe, task, teacher = taught(folder, kind)

    def make():
        headed = loaded(task, recipe)
        objective = build_objective(
            method, {}, shape_of(teacher.model.config), shape_of(headed.model.config)
        )
        # From its own weights the student would have nothing to learn.
        torch.nn.init.normal_(
            headed.model.base_model.encoder.layer[-1].attention.self.key.weight, std=0.3
        )
        kd = KdSettings(weight=0.5, temperature=2.0)
        return prediction_job(task, recipe, kd, headed, [teacher], objective, None)[0]

    assert_alike(make)


@pytest.mark.parametrize(
    "method", [m for m in methods() if "task" in inputs_of(m) and on_tasks(m)[0] == "separate"]
)
def test_a_stage_of_its_own(folder, method):
    recipe, task, teacher = taught(folder)

    def make():
        student = tiny_encoder("bert", hidden_size=16, intermediate_size=64, **CALM)
        objective = build_objective(
            method, {}, shape_of(teacher.model.config), shape_of(student.config)
        )
        return objective_job(task, recipe.train, student, objective, teacher, None)[1]

    assert_alike(make)


@pytest.mark.parametrize("kind", ["class", "tokens"])
@pytest.mark.parametrize("method", pruners())
def test_pruning(folder, method, kind, monkeypatch):
    # A gate is drawn in each forward pass, as dropout is.
    monkeypatch.setattr(torch, "rand_like", lambda x: torch.full_like(x, 0.4))
    settings = PRUNING.get(method, {})
    changes = {"method": method, "pruner": settings, "sparsity": [0.5], "head": {"kind": "scratch"}}
    recipe = on_task(
        PruneRecipe, folder, kind, model=str(folder / "encoder"), kd={"weight": 0.5}, **changes
    )
    task, _ = open_workload(request_of(recipe, recipe.model), session())
    _, _, teacher = taught(folder, kind)
    context = RunContext(Resolved(recipe), RunOptions(), session(), folder)
    assert_alike(
        lambda: build_pruning(context, task, recipe, loaded(task, recipe), teacher, None).job
    )


@pytest.mark.parametrize("kind", ["class", "tokens"])
def test_co_training_on_a_task(folder, kind):
    pair = {"teacher": "2x32", "student": "1x32", "base": str(folder / "encoder")}
    recipe = on_task(CotrainRecipe, folder, kind, dropout=0.0, **pair)
    _, task, _ = taught(folder, kind)
    assert_alike(lambda: pair_job(recipe, task, load_task_pair(recipe, task))[0])


@pytest.mark.parametrize("community", [False, True])
def test_co_training_on_text(folder, community):
    base = (
        {"community": {"model": str(folder / "mlm")}}
        if community
        else {"base": str(folder / "mlm")}
    )
    how = {"teacher": "2x32", "student": "1x16@4", "dropout": 0.0, "data": {"max_length": 16}}
    how |= {"train": {"max_steps": 4, "batch_size": BATCH}}
    recipe = CotrainRecipe.model_validate(how | base)
    corpus = SimpleNamespace(train=Text(full=True), held_out=Text(full=True))
    workload = TextWorkload(session(), corpus, recipe.data, tiny_tokenizer(), "mlm")

    def make():
        return pair_job(recipe, workload, load_text_pair(recipe))[0]

    assert_alike(make)


@pytest.mark.parametrize("loss", ["margin-mse", "listwise", "pointwise"])
def test_rerankers_on_lists_of_different_lengths(folder, tmp_path, loss):
    rng, rows = np.random.default_rng(0), []
    for n in range(48):
        count = 2 + n % 4
        texts = [
            " ".join(f"w{w}" for w in rng.integers(0, 59, size=rng.integers(2, 7)))
            for _ in range(count)
        ]
        labels = [int(m == n % count) for m in range(count)]
        rows.append(
            {
                "query": f"w{n} w7",
                "passages": texts,
                "labels": labels,
                "scores": rng.normal(size=count).tolist(),
            }
        )
    file = own_files.write(tmp_path / "lists.jsonl", rows)
    options = {"workload.loss": loss, "workload.weight": 0.6, "workload.temperature": 0.5}
    options |= {"task": "rerank", "model": str(folder / "encoder"), "data.source": str(file)}
    options |= {"train.max_steps": 4, "train.batch_size": BATCH, "train.warmup_fraction": 0.0}
    recipe = resolve(FinetuneRecipe, recipe=None, options=options).recipe
    workload, _ = open_workload(request_of(recipe, str(folder / "encoder")), session())

    def make():
        return workload.job(loaded(workload, recipe), recipe.train, "last")[0]

    assert_alike(make)
