"""`kdcli evaluate`: fine-tuned models on a labelled task: metrics, mistakes, differences, prediction files.

Data flow: examples -> rows of tokens -> logits of each model -> predictions -> evaluations, differences -> report.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from kdcli.data.labelled.lists import RERANK
from kdcli.data.labelled.submission import check_submission, write_submission
from kdcli.data.labelled.task_data import Labelled, open_labelled
from kdcli.deploy.exported import Export
from kdcli.deploy.latency import Subject
from kdcli.deploy.sparse.load import head_of, load, published_mask, with_head
from kdcli.deploy.sparse.mask_file import PUBLISHED, apply_masks, open_mask
from kdcli.disk import check_writable, disk_errors, write_atomic
from kdcli.engine.launch import Session, choose_output_dir, launch
from kdcli.engine.progress import Progress
from kdcli.engine.run_dir import RunDir
from kdcli.errors import GateError, UsageError, did_you_mean
from kdcli.models.card import describe_source
from kdcli.models.heads import tokenizer_for
from kdcli.models.load import location
from kdcli.models.model import Model
from kdcli.models.training_rows import training_rows
from kdcli.recipe.resolve import Resolved
from kdcli.recipe.sections import RunOptions
from kdcli.report.finish import (
    ReportContents,
    ReportedModel,
    RunResult,
    measure,
    write_report,
)
from kdcli.report.schema import Comparison, Evaluation
from kdcli.report.views import short
from kdcli.types import Card, Task
from kdcli.verbs.evaluate.settings import EvaluateRecipe
from kdcli.workloads.as_trained import as_trained
from kdcli.workloads.embedder import Embedder, as_task_model, predict_pairs
from kdcli.workloads.embedding_scores import (
    RETRIEVAL,
    Judged,
    by_vectors,
    open_pairs,
    read_retrieval,
    scored,
)
from kdcli.workloads.mteb_tasks import PREFIX, open_task, task_scores
from kdcli.workloads.predictions import Evaluator, Prediction, compared, shown_label, summed_up
from kdcli.workloads.rankings import ranked
from kdcli.workloads.reranker import Reranker, judged_lists, open_reranker, per_query
from kdcli.workloads.runtimes import judged, load_judged
from kdcli.workloads.task import evaluator_of, open_judged


def is_ranked(task: str | None) -> bool:
    """Whether models are judged as they are, by rankings or by mteb, and have no predictions of rows."""
    return task in (RETRIEVAL, RERANK.name) or str(task).startswith(PREFIX)


@dataclass(frozen=True)
class Extras:
    """What `evaluate` writes or checks besides its report."""

    predictions: Path | None = None  # a jsonl file, one object for each model and example
    submission: Path | None = None  # directory of files for the GLUE server, from the test split
    gates: Mapping[str, float] = field(default_factory=dict)  # metric -> least value of every model


@dataclass(frozen=True)
class _Evaluated:
    """A model, the examples as it reads them (at most `max_length` tokens a row) and its predictions."""

    model: Model
    max_length: int
    evaluator: Evaluator
    predictions: list[Prediction] = field(default_factory=list)
    embedder: Embedder | None = None


def run(
    resolved: Resolved[EvaluateRecipe], invocation: RunOptions, extras: Extras
) -> RunResult | None:
    """Evaluate every model and compare the later ones with the first. Returns the report; None in a process that prints
    nothing. Raises KdcliError: see `kdcli.errors`; nothing was written if recipe, models or data cannot be used."""
    resolved = as_trained(resolved, next(iter(resolved.recipe.models), None), trains=False)
    recipe = resolved.recipe
    check_recipe(recipe, extras)
    session = launch(recipe.dtype, invocation, judging=True)
    if session is None:
        return None
    name = f"evaluate-{Path(recipe.models[0]).name}-{recipe.task}"
    folder = choose_output_dir(name, resolved, invocation, session)
    if is_ranked(recipe.task):
        return _ranking(resolved, invocation, session, folder)
    sources, trusted = recipe.masks or recipe.models, session.trust_remote_code
    trained = {source: training_rows(location(source)) for source in recipe.models}
    trained |= {
        file: open_mask(Path(file)).rows for file in recipe.masks if Path(file).suffix != PUBLISHED
    }
    embedders = not recipe.masks and by_vectors(str(recipe.task), recipe.models[0], recipe.pooling)
    if recipe.dimensions and not embedders:
        raise _heads_judged()
    if embedders:
        data = open_pairs(str(recipe.task), recipe.data, trained)
    else:
        data = open_judged(
            str(recipe.task), recipe.data, recipe.models[0], trained, trust_remote_code=trusted
        )
    check_gate_names(data, extras)
    if extras.submission is not None:
        check_submission(data.task)
    # All are loaded before the first is evaluated, because the last may be unusable.
    load_one = _load_embedders if embedders else _load
    ready: dict[str, _Evaluated] = {}
    for name, source in _names(sources).items():
        ready |= load_one(recipe, session, data, name, source)
    evaluated = {
        name: replace(of, predictions=_predictions(of, session)) for name, of in ready.items()
    }
    first = next(iter(ready.values())).model
    to_submit = {} if extras.submission is None else _predict_test(recipe, first, session)
    session.accelerator.end_training()
    if not session.is_main:
        return None
    # Claimed only now: `--predictions` and `--submission` may lie in the directory.
    RunDir.claim(folder, resolved.to_yaml(), overwrite=invocation.overwrite)
    for name, values in to_submit.items():
        assert extras.submission is not None
        Progress.log(f"to submit: {write_submission(extras.submission, data.task, name, values)}")
    if extras.predictions is not None:
        _write_predictions(extras.predictions, data, evaluated)
    return _report(recipe, session, folder, data, evaluated)


def check_recipe(recipe: EvaluateRecipe, extras: Extras) -> None:
    """Check what needs neither data nor model. Raises UsageError: no model, no task, or contradicting options."""
    if not recipe.models or recipe.task is None:
        missing = "no model" if not recipe.models else "no task"
        raise UsageError(
            f"{missing} given", "kdcli evaluate MODEL [MODEL...] --task TASK [--data SOURCE]"
        )
    if recipe.masks and (len(recipe.models) > 1 or recipe.measure.latency):
        raise UsageError(
            "--mask takes one model, the base of every mask, and measures no latency",
            "kdcli evaluate BASE --mask FILE [--mask FILE]; kdcli mask apply saves a model to measure",
        )
    bits = bool(recipe.masks) and all(Path(mask).suffix == PUBLISHED for mask in recipe.masks)
    if not bits and (recipe.head.kind is not None or recipe.head.words is not None):
        raise UsageError(
            "head.kind and head.words are for a mask without a head, an .npy of the SMP authors",
            "leave them out: what is evaluated has a head of its own",
        )
    if recipe.masks and recipe.head.label_map is not None:
        raise UsageError(
            "head.label_map is for models, not for masks",
            "choose the words of an .npy by head.words",
        )
    if is_ranked(recipe.task) and (
        recipe.masks or recipe.metrics or extras.predictions or extras.submission
    ):
        raise UsageError(
            f"--mask, --metric, --predictions and --submission are not for {recipe.task}"
        )
    if extras.submission is not None and (count := max(len(recipe.models), len(recipe.masks))) > 1:
        raise UsageError(f"--submission takes one model, not {count}")
    if extras.predictions is not None:
        check_writable(extras.predictions, directory=False)
    if extras.submission is not None:
        check_writable(extras.submission, directory=True)


def _heads_judged() -> UsageError:
    return UsageError(
        "dimensions cuts vectors, and these models are judged by their scores", "leave it out"
    )


def _names(sources: list[str]) -> dict[str, str]:
    """Short name -> source; numbered where two share a name."""
    names: dict[str, str] = {}
    for source in sources:
        name = short(source)
        count = sum(n == name or n.startswith(f"{name} (") for n in names)
        names[f"{name} ({count + 1})" if count else name] = source
    return names


def _load(
    recipe: EvaluateRecipe, session: Session, data: Labelled, name: str, source: str
) -> dict[str, _Evaluated]:
    """A model, or the base under a mask, with the examples as it reads them."""
    trusted = session.trust_remote_code
    if recipe.masks:
        model = _under_mask(recipe, Path(source), data.task, trusted)
    else:
        model = load_judged(
            source, data.task, label_map=recipe.head.label_map, trust_remote_code=trusted
        )
    Progress.log(f"{source}: {model.note}")
    evaluator, max_length = evaluator_of(data, recipe.data, model)
    evaluator = evaluator.with_metrics(recipe.metrics, trust_remote_code=trusted)
    return {name: _Evaluated(model, max_length, evaluator)}


def _embedders(
    recipe: EvaluateRecipe, session: Session, name: str, source: str
) -> dict[str, Embedder]:
    embedder = Embedder.open_judged(
        source, pooling=recipe.pooling, trust_remote_code=session.trust_remote_code
    )
    Progress.log(f"{source}: {embedder.note}")
    return embedder.cuts(name, recipe.dimensions)


def _load_embedders(
    recipe: EvaluateRecipe, session: Session, data: Labelled, name: str, source: str
) -> dict[str, _Evaluated]:
    """An embedding model, once for each number of dimensions it is judged at."""
    ready = {}
    for cut, embedder in _embedders(recipe, session, name, source).items():
        evaluator, max_length = evaluator_of(data, recipe.data, model := as_task_model(embedder))
        ready[cut] = _Evaluated(model, max_length, evaluator, embedder=embedder)
    return ready


def _predictions(of: _Evaluated, session: Session) -> list[Prediction]:
    if of.embedder is not None:
        return predict_pairs(of.embedder, of.evaluator, session)
    return judged(session, of.evaluator, of.model)


def _ranking(
    resolved: Resolved[EvaluateRecipe], invocation: RunOptions, session: Session, folder: Path
) -> RunResult | None:
    """Rank for every query a corpus by the vectors of each model, or a list of candidates by its scores; or judge
    vectors by mteb."""
    recipe, pooling = resolved.recipe, resolved.recipe.pooling
    sources = _names(recipe.models)
    models: dict[str, Embedder | Reranker] = {}
    if recipe.task != RERANK.name:
        by_mteb = open_task(str(recipe.task)) if recipe.task != RETRIEVAL else None
        data = read_retrieval(recipe.data.source or "") if by_mteb is None else None
        embedders: dict[str, Embedder] = {}
        for name, source in sources.items():
            embedders |= _embedders(recipe, session, name, source)
        models |= embedders
        if data is not None:
            evaluations, comparisons = scored(
                [Judged(RETRIEVAL, retrieval=data)], embedders, session, recipe.resamples
            )
            size = f"{len(data.queries):,} queries, {len(data.documents):,} documents"
        else:
            evaluations, comparisons = task_scores(by_mteb, embedders, session), []
            size = f"data and measure of mteb {version('mteb')}, which gives no intervals"
    else:
        if recipe.dimensions:
            raise _heads_judged()
        lists, split = judged_lists(
            recipe.data, {s: training_rows(location(s)) for s in recipe.models}
        )
        longest = recipe.data.max_length
        rerankers = {
            name: open_reranker(source, session, max_length=longest, pooling=pooling)
            for name, source in sources.items()
        }
        models |= rerankers
        values = {name: per_query(lists, one.scores(lists)) for name, one in rerankers.items()}
        evaluations, comparisons = ranked(RERANK.name, split, values, recipe.resamples)
        size = f"{len(lists):,} queries, {len(lists.passages):,} candidates"
    session.accelerator.end_training()
    if not session.is_main:
        return None
    RunDir.claim(folder, resolved.to_yaml(), overwrite=invocation.overwrite)
    notes = [*(f"{name}: {one.note}" for name, one in models.items()), size]
    cards = {name: _card(one.model, one.source) for name, one in models.items()}
    subjects = [_subject(n, one.model, one.source) for n, one in models.items()]
    contents = ReportContents(
        "evaluate",
        recipe,
        with_baseline(cards),
        latency=measure(subjects, recipe.measure, session),
        evaluations=evaluations,
        comparisons=comparisons,
        notes=notes,
    )
    return write_report(RunDir(folder), contents)


def _under_mask(recipe: EvaluateRecipe, file: Path, task: Task, trust_remote_code: bool) -> Model:
    """A base under a mask, with the head of the mask. Raises UsageError: see `kdcli.deploy.sparse.load.load`; a mask for
    another task or other labels."""
    base = recipe.models[0]
    if file.suffix == PUBLISHED:
        how: dict[str, Any] = {"kind": recipe.head.kind or "mlm", "words": recipe.head.words}
        mask, encoder = published_mask(file, base, task, trust_remote_code=trust_remote_code, **how)
        apply_masks(encoder, mask.masks)
        model, note = (
            with_head(encoder, mask.info, mask.head, str(file)),
            f"taken for {head_of(mask.info)}",
        )
        tokenizer = tokenizer_for(
            base, of_words=task.kind == "tokens", trust_remote_code=trust_remote_code
        )
        return Model(model.eval(), tokenizer, str(file), note, mask.info.max_length)
    info = open_mask(file).info
    if (info.task, info.labels) != (task.name, task.labels):
        raise UsageError(
            f"{file} is for task {info.task} with labels {', '.join(info.labels) or 'none'}; {task.name} has "
            f"{', '.join(task.labels) or 'none'}",
            "evaluate a mask on its own task",
        )
    model = load(base, file, trust_remote_code=trust_remote_code)
    tokenizer = tokenizer_for(
        base, of_words=task.kind == "tokens", trust_remote_code=trust_remote_code
    )
    return Model(
        model,
        tokenizer,
        str(file),
        f"{base} under a mask, with the head of the mask",
        info.max_length,
    )


def with_baseline(cards: Mapping[str, Card]) -> list[ReportedModel]:
    """Report models that are compared with the first of them."""
    first, *others = cards
    return [
        ReportedModel(first, "baseline", cards[first]),
        *(ReportedModel(name, "candidate", cards[name], first) for name in others),
    ]


def _card(model: Any, source: str) -> Card:
    return model.card if isinstance(model, Export) else describe_source(model, source)


def _subject(name: str, model: Any, source: str) -> Subject:
    ran_on = (model.format, model.precision) if isinstance(model, Export) else ()
    return Subject(name, location(source), *ran_on)


def _report(
    recipe: EvaluateRecipe,
    session: Session,
    folder: Path,
    data: Labelled,
    evaluated: Mapping[str, _Evaluated],
) -> RunResult:
    evaluations: list[Evaluation] = []
    cards, notes, subjects = {}, list(data.notes), []
    for name, of in evaluated.items():
        # A cosine and a score differ in scale, so that no pair is the worst.
        worst = recipe.worst if of.embedder is None else 0
        evaluations += of.evaluator.evaluations(name, data.split, of.predictions, worst)
        headed, source = of.model.model, of.model.source
        cards[name] = _card(headed, source)
        subjects.append(_subject(name, headed, source))
        cut = of.evaluator.features.rows.truncated / max(1, sum(map(len, data.sets.values())))
        verb = "need more than one window of" if data.task.kind == "span" else "were cut at"
        notes.append(
            f"{name}: {of.model.note}; {cut:.1%} of the examples {verb} {of.max_length} tokens"
        )
    latency = measure(subjects, recipe.measure, session)
    comparisons: list[Comparison] = []
    # All models have the same examples in the same order.
    baseline, *others = [
        (name, of.evaluator.scorers(of.predictions)) for name, of in evaluated.items()
    ]
    for model in others:
        Progress.log(f"{recipe.resamples:,} resamples: {model[0]} beside {baseline[0]}")
        evaluator = evaluated[model[0]].evaluator
        comparisons += compared(evaluator, model, baseline, recipe.resamples)
    contents = ReportContents(
        "evaluate",
        recipe,
        with_baseline(cards),
        latency=latency,
        evaluations=evaluations,
        comparisons=comparisons,
        notes=notes,
    )
    return write_report(RunDir(folder), contents)


def _write_predictions(file: Path, data: Labelled, evaluated: Mapping[str, _Evaluated]) -> None:
    lines = []
    for name, of in evaluated.items():
        examples = of.evaluator.features.examples
        for set_name, (begin, end) in of.evaluator.bounds.items():
            for example, prediction in zip(
                examples[begin:end], of.predictions[begin:end], strict=True
            ):
                row: dict[str, Any] = {
                    "model": name,
                    "set": set_name,
                    "id": example.id,
                    "texts": list(example.texts),
                }
                row |= {"label": shown_label(data.task, example), "predicted": prediction.shown}
                # A window without any span has the score infinity, which JSON lacks.
                row["scores"] = [s if math.isfinite(s) else None for s in prediction.scores]
                lines.append(json.dumps(row, ensure_ascii=False) + "\n")
    with disk_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(file, "".join(lines))
    Progress.log(f"{len(lines):,} predictions in {file}")


def _predict_test(recipe: EvaluateRecipe, model: Model, session: Session) -> dict[str, list[Any]]:
    """Set -> predicted value of each example of the test split."""
    task, source = str(recipe.task), recipe.data.source
    data = open_labelled(
        task, source=source, split="test", training=False, withheld=True, log=Progress.log
    )
    values = {}
    for name, examples in data.sets.items():
        # Some test files have labels; they are ignored.
        unlabelled = replace(data, sets={name: [replace(e, label=None) for e in examples]})
        evaluator, _ = evaluator_of(unlabelled, recipe.data, model)
        values[name] = [p.value for p in judged(session, evaluator, model)]
    return values


def check_gate_names(data: Labelled, extras: Extras) -> None:
    """Check the metrics of `--min-metric` before anything is computed. Raises UsageError: unknown for the task, or
    lower is better."""
    higher = [m for m in data.task.metrics if m != "mse" and not m.endswith("_threshold")]
    metrics = [*higher, *(f"{set_name}/{m}" for set_name in data.sets if set_name for m in higher)]
    for metric in extras.gates:
        if metric not in metrics:
            raise UsageError(
                f"--min-metric {metric}: task {data.task.name} has no such metric for which higher is better"
                f"{did_you_mean(metric, metrics)}",
                f"it has {', '.join(metrics)}",
            )


def check_gates(result: RunResult, extras: Extras) -> None:
    """Compare every model's metrics with the gates: the mean over the sets, or one set as `SET/METRIC`. Raises
    GateError: at least one gate was missed."""
    missed = []
    for name in result.report.models if extras.gates else ():
        values = summed_up(
            {e.set: e.metrics for e in result.report.evaluations if e.model == name}, None
        )
        missed += [
            f"{name} has {m} {values[m]:.4f}, below {v:g}"
            for m, v in extras.gates.items()
            if values[m] < v
        ]
    if missed:
        raise GateError("; ".join(missed), f"the report is in {result.folder}")
