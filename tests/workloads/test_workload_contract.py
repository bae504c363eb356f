"""The promises of every workload, with labels and with the labels removed.

A new workload is one row of `WORKLOADS`.
"""

import functools
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from encoders import on_disk, tiny_config, tiny_encoder, tiny_tokenizer
from transformers import (
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from kdcli.errors import UsageError
from kdcli.messages import facts_once
from kdcli.models.model import return_token_types
from kdcli.recipe.sections import KdSettings
from kdcli.types import Needs, Start
from kdcli.workloads import open_workload
from kdcli.workloads.requests import WorkloadRequest
from kdcli.workloads.settings import FinetuneTrainSettings, LabelledSettings, TaskHeadSettings
from kdcli.workloads.task_models import describe_cut
from kdcli.workloads.training import first_rows, mixed_terms, total_loss
from kdcli.workloads.workload import Workload

pytestmark = pytest.mark.slow

TRAIN = FinetuneTrainSettings(batch_size=8, max_steps=4)
HEAD = TaskHeadSettings(kind="scratch")


def words(number: int, count: int = 5) -> str:
    return " ".join(f"w{(number * 7 + 3 * i) % 41}" for i in range(count))


def classes(i: int) -> dict:
    return {"text": words(i), "label": ("calm", "brisk")[i % 2]}


def several(i: int) -> dict:
    return {"text": words(i), "label": [("calm", "brisk", "late")[i % 3]] * (i % 4 > 0)}


def scores(i: int) -> dict:
    return {"text": words(i), "pair": words(i + 1), "label": (i % 5) / 4 + 0.01 * i}


def tags(i: int) -> dict:
    return {"tokens": words(i).split(), "tags": ["O", "B-PER", "O", "B-LOC", "O"]}


def spans(i: int) -> dict:
    context = words(i, 9)
    answer = context.split()[4]
    gold = {"text": [answer], "answer_start": [context.index(answer)]}
    return {"question": words(i + 2, 3), "context": context, "answers": gold}


def lists(i: int) -> dict:
    passages = [words(i + n, 6) for n in range(4)]
    return {"query": words(i, 3), "passages": passages, "labels": [1, 0, 0, 0]}


def texts(i: int) -> dict:
    return {"text": f"{words(i, 6)}. {words(i + 9, 5)}."}


def headed(auto: type, **config: object) -> Callable[[Path], None]:
    """Save a tiny model with a head."""

    def save(folder: Path) -> None:
        torch.manual_seed(1)
        settings = tiny_config("bert", initializer_range=0.3, **config)
        on_disk(auto.from_config(settings), folder)

    return save


def embedder(folder: Path) -> None:
    torch.manual_seed(1)
    on_disk(tiny_encoder("bert", initializer_range=0.3), folder)


def labels(*names: str) -> dict:
    return {"id2label": dict(enumerate(names)), "label2id": {n: i for i, n in enumerate(names)}}


SEQUENCES = AutoModelForSequenceClassification
NER = ("O", "B-LOC", "B-PER")


@dataclass(frozen=True)
class Case:
    """A workload: its task, its rows, and a model that can do the task."""

    task: str
    row: Callable[[int], dict]
    save_model: Callable[[Path], None]
    settings: dict | None = None
    finetunes: bool = True
    static: bool = False


WORKLOADS = {
    "class": Case("own", classes, headed(SEQUENCES, **labels("brisk", "calm")), static=True),
    "multi": Case(
        "own",
        several,
        headed(
            SEQUENCES,
            problem_type="multi_label_classification",
            **labels("brisk", "calm", "late"),
        ),
        static=True,
    ),
    "score": Case(
        "own", scores, headed(SEQUENCES, num_labels=1, problem_type="regression"), static=True
    ),
    "tokens": Case("own", tags, headed(AutoModelForTokenClassification, **labels(*NER))),
    "span": Case("own", spans, headed(AutoModelForQuestionAnswering)),
    "rerank": Case("rerank", lists, headed(SEQUENCES, num_labels=1)),
    "embedding": Case("embedding", texts, embedder, {"pooling": "mean"}, finetunes=False),
}
EVERY = [(name, True) for name, case in WORKLOADS.items() if case.finetunes]
EVERY += [(name, False) for name in WORKLOADS]


def opened(case: Case, folder: Path, session, *, with_labels: bool) -> tuple[Workload, object]:
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps(case.row(i)) + "\n" for i in range(60)), "utf-8")
    case.save_model(folder / "model")
    data = LabelledSettings(
        source=str(rows), max_length=24, stride=4, labels="data" if with_labels else "teacher"
    )
    request = WorkloadRequest(
        case.task, str(folder / "model"), data, HEAD, case.settings or {}, new_head=False
    )
    return open_workload(request, session)


@pytest.fixture(params=EVERY, ids=lambda one: one[0] + ("" if one[1] else "-unlabelled"))
def workload(request, tmp_path, session, cache):
    name, with_labels = request.param
    found, model = opened(WORKLOADS[name], tmp_path, session, with_labels=with_labels)
    found.model, found.case = model, WORKLOADS[name]
    return found


def attached(workload, teacher):
    targets = workload.targets(teacher, Needs(), passes=1.0)
    return targets, *targets.attach(workload.examples, workload.held_out)


def test_labels_are_learned_if_there_are_any(workload):
    batch = first_rows(workload.examples)
    captured = workload.capture(workload.model)
    losses = workload.hard(workload.forward(captured, batch), batch)
    assert workload.has_labels == bool(losses)
    if workload.has_labels:
        job, schedule = workload.job(workload.model, TRAIN, "last")
        assert schedule.steps == 4
        assert torch.isfinite(job.step(batch).total)
    else:
        with pytest.raises(UsageError, match=r"no labels|neither labels nor scores"):
            workload.job(workload.model, TRAIN, "last")


def test_a_student_that_is_its_teacher_has_nothing_to_learn(workload):
    targets, examples, _ = attached(workload, workload.model)
    batch = first_rows(examples)
    taught = targets.signals(batch)
    own = workload.forward(workload.capture(workload.model), batch)
    losses = workload.soft(taught, own, batch, 2.0)
    assert losses
    assert all(abs(float(loss)) < 1e-3 for loss in losses.values())


def test_without_labels_the_teacher_has_the_whole_weight(workload):
    targets, examples, _ = attached(workload, workload.model)
    batch = first_rows(examples)
    taught = targets.signals(batch)
    own = workload.forward(workload.capture(workload.model), batch)
    kd = KdSettings(weight=0.25)
    terms = mixed_terms(workload, own, [taught], batch, kd)
    soft = workload.soft(taught, own, batch, kd.temperature)
    share = 0.25 if workload.has_labels else 1.0
    for name, value in soft.items():
        assert torch.equal(terms[name].value, share * value)
    assert (len(terms) > len(soft)) == workload.has_labels


def pairs(i: int) -> dict:
    return {"sentence1": words(i), "sentence2": words(i + 1), "label": (i % 5) / 4 + 0.01 * i}


@pytest.mark.parametrize("with_labels", [True, False])
def test_a_model_that_reads_token_types_gets_them(tmp_path, session, cache, with_labels):
    found = {}
    for name in ("distilbert", "bert"):
        config = tiny_config(name, num_labels=1, problem_type="regression")
        tokenizer = tiny_tokenizer()
        return_token_types(config, tokenizer)
        save = functools.partial(on_disk, SEQUENCES.from_config(config), tokenizer=tokenizer)
        (tmp_path / name).mkdir()
        case = replace(WORKLOADS["score"], row=pairs, save_model=save)
        found[name] = opened(case, tmp_path / name, session, with_labels=with_labels)
    (untyped, _), (typed, bert) = found.values()
    assert untyped.train_rows.types_T is None
    assert not untyped.reads_as_it_is(bert)
    own, expected = (each.evaluator_for(bert)[0].features.rows for each in (untyped, typed))
    assert np.array_equal(own.types_T, expected.types_T)
    again = untyped.retokenize_for(bert)
    assert again.reads_as_it_is(bert)
    assert (again.held_out.labels is not None) == with_labels


def test_unknown_tokens_are_logged_once_for_each_tokenizer(tmp_path, session, cache, caplog):
    caplog.set_level(logging.INFO, "kdcli")
    with facts_once():
        for name, first in (("one", 30), ("copy", 30), ("other", 40)):

            def save(folder: Path, first: int = first) -> None:
                WORKLOADS["class"].save_model(folder)
                tiny_tokenizer(range(first, 89)).save_pretrained(folder)

            (tmp_path / name).mkdir()
            case = replace(WORKLOADS["class"], save_model=save)
            workload, model = opened(case, tmp_path / name, session, with_labels=True)
            assert any("does not know" in note for note in workload.score(model).notes)
    assert caplog.text.count("does not know") == 2


def test_cut_rows_are_logged_once_for_each_file(tmp_path, session, cache, caplog):
    caplog.set_level(logging.INFO, "kdcli")
    _, model = opened(WORKLOADS["class"], tmp_path, session, with_labels=True)
    with facts_once():
        for share, file in ((0.11, "a.csv"), (0.12, "a.csv"), (0.97, "b.csv")):
            describe_cut("class", "examples", share, 8, model, file)
    warnings = [line for line in caplog.messages if "are longer than 8 tokens" in line]
    assert [line.partition("% of")[0] for line in warnings] == ["warning: 11.0", "warning: 97.0"]


def test_padding_changes_no_loss(workload):
    if not workload.has_labels:
        pytest.skip("there is no loss against labels")
    examples, captured = workload.examples, workload.capture(workload.model)
    pair = examples.batch(np.arange(2))
    together = total_loss(workload.hard(workload.forward(captured, pair), pair), None)
    ones = [examples.batch(np.array([i])) for i in range(2)]
    alone = [total_loss(workload.hard(workload.forward(captured, b), b), None) for b in ones]
    counts = [float((b["labels"] != -100).sum()) if workload.over == "labels" else 1 for b in ones]
    mean = sum(c * float(loss) for c, loss in zip(counts, alone, strict=True)) / sum(counts)
    assert float(together) == pytest.approx(mean, rel=1e-4)


def test_a_model_agrees_with_itself(workload):
    if workload.has_labels:
        scores = workload.score(workload.model)
        assert scores.evaluations[0].reference == "labels"
        assert sum(scores.counts.values()) == workload.row_count
        assert workload.gated_metrics[0] in scores.evaluations[0].metrics
        return
    reference = workload.with_reference(workload.model)
    assert reference.score(workload.model).is_reference
    result = reference.evaluate({"teacher": workload.model, "same": workload.model}, resamples=25)
    for row in result.evaluations:
        assert row.reference == "teacher"
        # A class that is never predicted has no F1, whoever is the reference.
        values = [v for name, v in row.metrics.items() if name not in ("mse", "macro_f1")]
        assert values == pytest.approx([1.0] * len(values), abs=1e-5)
        assert row.metrics.get("mse", 0.0) == pytest.approx(0.0, abs=1e-8)
    assert all(row.difference == 0 for row in result.comparisons)
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in workload.model.model.parameters():
            parameter.normal_()
    assert not reference.score(workload.model).is_reference


def test_a_model_with_broken_weights_gets_no_score(workload):
    model = workload.model
    if not workload.has_labels:
        workload = workload.with_reference(model)
    with torch.no_grad():
        next(model.model.parameters()).fill_(float("nan"))
    with pytest.raises(UsageError, match="are not finite"):
        workload.score(model)


def test_a_saved_model_is_the_same_model(workload, tmp_path):
    workload.save(workload.model, tmp_path / "saved", workload.rows)
    again = workload.load(str(tmp_path / "saved"), head=HEAD, new_head=False)
    batch = {k: v for k, v in first_rows(workload.held_out).items() if k != "labels"}
    pairs = zip(workload.encode(workload.model, batch), workload.encode(again, batch), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)


def test_a_student_of_another_shape_is_made(workload):
    shape = workload.model.shape
    small = type(shape)(1, 16, 32, 4)
    student = workload.make_student(workload.model, small, Start(seed=3))
    assert (student.model.config.num_hidden_layers, student.model.config.hidden_size) == (1, 16)


@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.bfloat16), ("cuda", torch.float32)])
def test_a_fit_runs_in_the_sessions_format_on_its_device_only(workload, device, dtype):
    workload.session = SimpleNamespace(device=torch.device(device), compute_dtype=torch.bfloat16)
    encoder = workload.model.model.base_model
    linear = next(m for m in encoder.modules() if isinstance(m, torch.nn.Linear))
    seen = set()
    hook = linear.register_forward_hook(lambda _, __, output: seen.add(output.dtype))
    workload.make_student(workload.model, type(workload.model.shape)(1, 16, 32, 4), Start())
    hook.remove()
    assert seen == {dtype}


def test_a_static_student_has_its_teachers_outputs(workload, tmp_path):
    if not workload.case.static:
        pytest.skip("a static student has no outputs of this kind")
    teacher = workload.model
    student = workload.fitted_student(teacher, type(teacher.shape)(0, 8, 0, 1), Start(seed=3))
    assert str(student.shape) == "static:8"
    assert student.tokenizer is not teacher.tokenizer
    workload.save(student, tmp_path / "saved", workload.rows)
    again = workload.load(str(tmp_path / "saved"), head=HEAD, new_head=False)
    batch = workload.examples.batch(np.arange(len(workload.examples)))
    (ours,), (theirs,) = workload.encode(student, batch), workload.encode(again, batch)
    assert torch.equal(ours, theirs)
    (taught,) = workload.encode(teacher, batch)
    # The head was fitted to these outputs, so it predicts them better than their mean does.
    assert (ours - taught).square().sum() < (taught - taught.mean(0)).square().sum()


def test_the_size_of_a_micro_batch_decides_no_batch(workload):
    batches = {}
    for size in (None, 1, 8):
        settings = TRAIN.model_copy(update={"micro_batch_size": size})
        plan = workload.plan(settings)
        assert size in (None, plan.schedule.micro_batch_size)
        batches[size] = [set(plan.order.indices(step).tolist()) for step in range(1, 5)]
    assert batches[1] == batches[8] == batches[None]
