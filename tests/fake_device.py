"""Training steps on a device that computes nothing, in a process of their own, because they change
torch for the whole process.

An accelerator defined in Python (PrivateUse1) under FakeTensorMode executes every operation on
shapes alone, in the engine's own loop. A tensor left on the CPU raises, and so does waiting for the
device: reading a value back, finding places by a mask, a copy that blocks. The waits that the
engine's comments count are let through and counted. It shows no numbers, autocast, memory or speed.
Prints the cases that ran, and `error: CASE: ...` for each that did not.

    python fake_device.py few|all|CASE
"""

import sys
from collections.abc import Callable, Iterable
from dataclasses import replace

import encoders
import torch
import torch._subclasses.fake_tensor as fake
from encoders import tiny_config
from stand_ins import Taught, Text, labelled, rows_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _setup_privateuseone_for_python_backend,
)
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from transformers.initialization import no_init_weights

from kdcli.data.batches import BatchOrder
from kdcli.engine import train as engine
from kdcli.engine.session import Session, start
from kdcli.losses import build_objective, inputs_of, methods
from kdcli.losses.ranking import label_loss, pad_lists, score_loss
from kdcli.models.capture import capture, prepare_teacher
from kdcli.models.embedding_format import EmbeddingFormat, Pool
from kdcli.models.layout import layout_for
from kdcli.models.shape import shape_of
from kdcli.pruners import build_pruner, cap
from kdcli.pruners import methods as pruning_methods
from kdcli.recipe.sections import KdSettings
from kdcli.targets.targets import Teacher
from kdcli.types import IGNORED, Job, Needs, Schedule, StepLoss, Term, labelled_places
from kdcli.verbs.cotrain.run import PairStep
from kdcli.verbs.cotrain.settings import CommunitySettings, CotrainRecipe
from kdcli.verbs.distill.student import Student, distill_job, teacher_needs
from kdcli.workloads.training import mixed_terms

TYPES = ("bert", "roberta", "deberta-v2", "mpnet", "distilbert")
DEVICE = "kdgpu"
STEPS = 1
B, L, CLASSES = 3, 16, 4
HEADS = {
    "class": AutoModelForSequenceClassification,
    "multi": AutoModelForSequenceClassification,
    "score": AutoModelForSequenceClassification,
    "tokens": AutoModelForTokenClassification,
    "span": AutoModelForQuestionAnswering,
}
WAITS = [0]


class _Module(_DummyBackendModule):
    def get_amp_supported_dtype(self):
        return [torch.bfloat16, torch.float16]

    def synchronize(self, device=None):
        pass

    def reset_peak_memory_stats(self, device=None):
        pass

    def max_memory_allocated(self, device=None):
        return 0


class Watch(TorchDispatchMode):
    """Raises where a GPU would be waited for, and FakeTensorMode does not mind."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in ("_to_copy", "copy_"):
            to = kwargs.get("device") or args[0].device
            came = args[0].device if name == "_to_copy" else args[1].device
            # A single number is passed as an argument of the kernel.
            blocks = not kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
            if (
                torch.device(to).type != came.type
                and blocks
                and (name == "_to_copy" or args[1].dim())
            ):
                raise RuntimeError(f"a copy from {came} to {to} waits")
        by_places = (
            name in ("index", "index_put_", "index_put", "_index_put_impl_")
            and args[0].device.type == DEVICE
        )
        if by_places and any(
            at is not None and at.device.type == "cpu" and at.dim() for at in args[1]
        ):
            raise RuntimeError("places on the CPU are copied to the device, which waits")
        return func(*args, **kwargs)


def read_back(tensor):
    """`tolist`, which the engine calls once a step. Every number on the device is 1; on the CPU it
    is one of rows."""
    on_device = tensor.device.type == DEVICE
    WAITS[0] += on_device
    (length,) = tensor.shape
    return [1.0 if on_device else float(B)] * length


class Rows:
    """Batches on the CPU, of rows of 16, 9 and 3 tokens."""

    def __init__(self, **more: Callable[[], torch.Tensor]) -> None:
        self.more = more

    def __len__(self) -> int:
        return B

    def batch(self, indices):
        real_BL = torch.arange(L) < torch.tensor([[16], [9], [3]])
        batch = {
            "input_ids": torch.randint(5, 60, (B, L)).where(real_BL, 0),
            "attention_mask": real_BL.long(),
        }
        batch |= {name: make() for name, make in self.more.items()}
        if name_of_labels(batch):
            batch["labelled"] = labelled_places(batch)
        return batch


def name_of_labels(batch):
    return "labels" in batch and batch["labels"].shape == (B, L)


def model_of(kind, layers=2, auto=AutoModel, **changes):
    changes |= {"n_layers" if kind == "distilbert" else "num_hidden_layers": layers}
    with torch.device(DEVICE), no_init_weights():
        return auto.from_config(tiny_config(kind, **changes)).train()


def train(job, waits=STEPS, **schedule):
    """Train as a command does; `waits`: how often the device may be waited for, once a step."""
    session = Session(start(torch.device("cpu"), torch.float32), torch.device(DEVICE))
    WAITS[0] = 0
    with Watch():
        engine.train(
            session,
            job,
            Schedule(steps=STEPS, batch_size=B, lr=1e-3, warmup_steps=0, **schedule),
            None,
        )
    assert WAITS[0] == waits, f"{WAITS[0]} waits in {STEPS} steps, of which {waits} are counted"


def job_of(modules, step, rows, **more):
    return Job(modules, step, rows, BatchOrder(B, B, 0), None, **more)


def masked_labels():
    return torch.where(torch.rand(B, L) < 0.3, torch.randint(0, 60, (B, L)), IGNORED)


def labels_of_kind(kind):
    return {
        "class": lambda: torch.randint(0, CLASSES, (B,)),
        "multi": lambda: torch.randint(0, 2, (B, CLASSES)).float(),
        "score": lambda: torch.rand(B),
        "tokens": lambda: torch.where(
            torch.rand(B, L) < 0.5, torch.randint(0, CLASSES, (B, L)), IGNORED
        ),
        "span": lambda: torch.randint(0, 3, (B, 2)),
    }[kind]


def headed(kind, task, layers=2):
    labels = {} if task == "span" else {"num_labels": 1 if task == "score" else CLASSES}
    return model_of(kind, layers, HEADS[task], **labels)


def distilled(method, kind):
    """`kdcli distill` on text: a frozen teacher, two students of one pass."""
    masked = "masked" in inputs_of(method) or method == "masked-lm"
    auto = AutoModelForMaskedLM if masked else AutoModel
    teacher = prepare_teacher(model_of(kind, 4, auto), torch.bfloat16)
    students = {}
    for name in ("one", "other"):
        student = model_of(kind, 2, auto)
        with torch.device(DEVICE):
            objective = build_objective(
                method, {}, shape_of(teacher.config), shape_of(student.config)
            )
        students[name] = Student(student, objective)
    signals = Teacher("teacher", capture(teacher, teacher_needs(students))).signals
    rows = Rows(labels=masked_labels) if masked else Rows()
    targets, order = Taught(signals), BatchOrder(B, B, 0)
    train(distill_job(students, targets, rows_of(rows), order), micro_batch_size=2)


def embedded(settings, kind):
    """`kdcli distill --method embedding`: stored vectors of the teacher, and its states."""
    teacher, student = prepare_teacher(model_of(kind, 4), torch.bfloat16), model_of(kind)
    with torch.device(DEVICE):
        objective = build_objective(
            "embedding", settings, shape_of(teacher.config), shape_of(student.config)
        )
        anchors = torch.randn(7, 32)
        pool = Pool(EmbeddingFormat(pooling=settings.get("pooling", "mean")))
    students = {"student": Student(student, objective, pool)}
    live = Teacher("teacher", capture(teacher, objective.teacher_needs))

    def signals(batch):
        given = {name: batch.pop(name) for name in ("pooled", "positive", "negatives")}
        return replace(live.signals(batch), anchors=anchors, **given)

    rows = Rows(
        pooled=lambda: torch.randn(B, 32),
        positive=lambda: torch.randn(B, 32),
        negatives=lambda: torch.randn(B, 2, 32),
    )
    train(distill_job(students, Taught(signals), rows_of(rows), BatchOrder(B, B, 0)))


def on_task(task, kind, method="soft-targets"):
    """`kdcli distill --task`: labels, a teacher's logits and what a joint method compares."""
    teacher, student = prepare_teacher(headed(kind, task, 4), torch.bfloat16), headed(kind, task)
    with torch.device(DEVICE):
        objective = build_objective(method, {}, shape_of(teacher.config), shape_of(student.config))
    of_student = capture(student, objective.student_needs | Needs(logits=True))
    of_teacher = Teacher("teacher", capture(teacher, objective.teacher_needs | Needs(logits=True)))
    modules = {"student": torch.nn.ModuleList([of_student, objective.projections])}
    workload = labelled(task)

    def step(batch):
        taught = of_teacher.signals(batch)
        signals = of_student(batch)
        terms = mixed_terms(workload, signals, [taught], batch, KdSettings())
        return StepLoss(
            terms
            | {n: Term(v, objective.over[n]) for n, v in objective.terms(taught, signals).items()}
        )

    train(job_of(modules, step, Rows(labels=labels_of_kind(task))))


def reranked(loss, kind):
    """`kdcli distill --task rerank`: scores of lists of two rows and one row."""
    model = capture(headed(kind, "score"), Needs(logits=True))

    def step(batch):
        places_QM = batch["places"]
        real_QM, s_QM = places_QM >= 0, pad_lists(model(batch).logits[:, 0], places_QM)
        labels_QM, t_QM = (
            pad_lists(batch["relevance"], places_QM),
            pad_lists(batch["scores"], places_QM),
        )
        taught = Term(score_loss(loss, s_QM, t_QM, labels_QM, real_QM, 1.0), "labels", 0.5)
        return StepLoss(
            {
                "scores": taught,
                "labels": Term(label_loss(loss, s_QM, labels_QM, real_QM), "labels", 0.5),
            }
        )

    rows = Rows(
        places=lambda: torch.tensor([[0, 1], [2, -1]]),
        labels=lambda: torch.zeros(2, dtype=torch.int64),
        relevance=lambda: torch.tensor([1.0, 0.0, float("nan")]),
        scores=lambda: torch.rand(B),
    )
    train(job_of({"model": model}, step, rows))


def cotrained(how, kind):
    """`kdcli cotrain`: on text, under a frozen third model, or on a task."""
    task = "class" if how == "task" else None
    recipe = CotrainRecipe(
        community=CommunitySettings(
            model="third" if how.startswith("community") else None,
            printed_order=how == "community, printed order",
        )
    )
    make = (
        (lambda: headed(kind, "class"))
        if task
        else (lambda: model_of(kind, auto=AutoModelForMaskedLM))
    )
    needs = Needs(logits=True) if task else Needs(masked_logits=True)
    models = {role: capture(make(), needs) for role in ("teacher", "student")}
    third = Teacher("third", capture(prepare_teacher(make(), torch.bfloat16), needs))
    workload = labelled("class") if task else Text(None, None)
    step = PairStep(recipe, workload, models, third if recipe.community.model else None)
    rows = Rows(labels=labels_of_kind("class") if task else masked_labels)
    train(job_of(step.modules, step, rows))


def pruned(method, kind, **settings):
    """`kdcli prune`: masks chosen before the first step and after every one, which for densities in
    proportion to scores waits; `cap` contrasts with all rows of the batch."""
    model = headed(kind, "class")
    pruner = build_pruner(method, settings, model, density=0.3, steps=STEPS, lr=1e-3)
    student = capture(model, Needs(logits=True, hidden=frozenset({2})))

    def step(batch):
        signals = student(batch)
        losses = labelled("class").hard(signals, batch)
        terms = {name: Term(value, "rows") for name, value in losses.items()} | {
            name: Term(value, "rows") for name, value in pruner.terms().items()
        }
        if pruner.contrast is not None:
            found = pruner.contrast(signals.hidden[2][:, 0], batch["own_rows"], batch)
            terms |= {name: Term(value, "rows") for name, value in found.items()}
        return StepLoss(terms)

    def shared(batch):
        states = student(batch).hidden[2][:, 0]
        return {
            cap.PRETRAINED: states,
            cap.FINETUNED_GRADIENT: states,
            cap.CLASSES: batch["labels"],
        }

    more = {"shared": shared} if pruner.contrast is not None else {}
    rows = Rows(labels=labels_of_kind("class"))
    job = job_of(
        {"model": student},
        step,
        rows,
        on_step_end=pruner.after,
        param_group=pruner.param_group,
        **more,
    )
    proportional = method == "smp" and settings.get("masking", "proportional") == "proportional"
    train(job, waits=2 * STEPS + 1 if proportional else STEPS)


def faulty(fault):
    """A step with a fault in it."""
    model = capture(model_of("bert"), Needs(hidden=frozenset({2})))
    on_cpu = torch.ones(B, L, 1)

    def step(batch):
        states_BLD = model(batch).hidden[2]
        if fault == "reads a value":
            states_BLD = states_BLD * states_BLD.sum().item()
        elif fault == "selects by a mask":
            states_BLD = states_BLD[batch["attention_mask"] > 0]
        elif fault == "a tensor on the CPU":
            states_BLD = states_BLD * on_cpu
        elif fault == "a copy that waits":
            states_BLD = states_BLD * on_cpu.to(DEVICE)
        elif fault == "places on the CPU":
            states_BLD = states_BLD[torch.arange(2)]
        return StepLoss({"loss": Term(states_BLD.square().mean(), "rows")})

    train(job_of({"model": model}, step, Rows()))


FAULTS = (
    "reads a value",
    "selects by a mask",
    "a tensor on the CPU",
    "a copy that waits",
    "places on the CPU",
)


def cases() -> dict[str, Callable[[], None]]:
    """Name -> what it runs: every loss, task kind, pruner and way of co-training on a few types;
    relations on all."""
    found: dict[str, Callable[[], None]] = {}
    for kind in TYPES:
        for method in methods():
            if inputs_of(method) & {"text", "masked"}:
                found[f"{method} of {kind}"] = lambda m=method, k=kind: distilled(m, k)
    for kind in encoders.TYPES:
        found.setdefault(f"minilmv2 of {kind}", lambda k=kind: distilled("minilmv2", k))
    embedding = {
        "vectors": "mse",
        "similarity_weight": 1.0,
        "pairs_weight": 1.0,
        "contrastive_weight": 1.0,
        "dimensions": [32, 16],
    }
    found["embedding, every term"] = lambda: embedded(
        embedding | {"relations_weight": 1.0, "hidden_weight": 1.0}, "bert"
    )
    found["embedding"] = lambda: embedded({}, "mpnet")
    for task in HEADS:
        for kind in TYPES[:2]:
            found[f"task {task} of {kind}"] = lambda t=task, k=kind: on_task(t, k)
    for method in methods():
        if "task" in inputs_of(method):
            found[f"task class by {method}"] = lambda m=method: on_task("class", "deberta-v2", m)
    for loss in ("margin-mse", "listwise", "pointwise"):
        found[f"rerank {loss}"] = lambda way=loss: reranked(way, "bert")
    for how in ("text", "community", "community, printed order", "task"):
        found[f"cotrain on {how}"] = lambda h=how: cotrained(h, "bert")
    for method in pruning_methods():
        found[f"prune by {method}"] = lambda m=method: pruned(m, "bert")
    for masking in ("local", "global", "threshold"):
        found[f"prune by smp, {masking}"] = lambda way=masking: pruned(
            "smp", "roberta", masking=way
        )
    for kind in ("deberta", "modernbert"):
        found[f"prune by smp, {kind}"] = lambda k=kind: pruned("smp", k)
    return found | {f"faulty: {fault}": lambda f=fault: faulty(f) for fault in FAULTS}


def few() -> list[str]:
    """Without most of the types; each loss, pruner, kind and fault."""
    return [
        case
        for case in cases()
        if " of " not in case or case.endswith((" of bert", "minilmv2 of distilbert"))
    ]


def run_cases(names: Iterable[str]) -> None:
    """Change torch for good, run cases, and print each one or its error."""
    # Layouts are derived on the CPU, with real numbers.
    for kind in encoders.TYPES:
        layout_for(tiny_config(kind))
    _setup_privateuseone_for_python_backend(DEVICE, backend_module=_Module())
    # Both would allocate one real tensor on the device.
    fake.init_gpu_context = lambda device: None
    fake.FakeTensorMode.avoid_device_init = property(lambda self: True)
    torch.Tensor.pin_memory = lambda self: self
    # Parameters cannot be moved there; the models are made there.
    torch.nn.Module.to = lambda self, *how, **more: self
    fake.FakeTensor.tolist = read_back
    # Counted on the CPU, where the batches are real.
    counts = engine.counts_of

    def counts_of(batch):
        with fake.unset_fake_temporarily():
            return counts(batch)

    engine.counts_of = counts_of
    every = cases()
    with torch.autograd.set_multithreading_enabled(False):
        for name in names:
            with fake.FakeTensorMode(allow_non_fake_inputs=True):
                try:
                    every[name]()
                except Exception as error:
                    print(f"error: {name}: {type(error).__name__}: {str(error)[:300]}")
                else:
                    print(name)


if __name__ == "__main__":
    run_cases({"all": list(cases()), "few": few()}.get(sys.argv[1], sys.argv[1:]))
