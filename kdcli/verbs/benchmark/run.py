"""`kdcli benchmark`: measure the latency of models and shapes on every backend.

Measurements of the models and of a baseline are interleaved. Data flow: models x backends -> one
worker process for each backend, with the baseline in each -> rows, paired speed-ups, agreement with
torch in float32 -> report.
"""

import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from kdcli.data.accounts import ACCOUNTS, RowAccount
from kdcli.data.sources import open_source
from kdcli.deploy.cascade import FIRST
from kdcli.deploy.cascade import KEY as CASCADE
from kdcli.deploy.exported import is_export, open_export
from kdcli.deploy.latency import CELLS, Latency, Protocol, Subject, measure_latency
from kdcli.deploy.measurements import Failure, LatencyRow
from kdcli.deploy.old_machines.portable import read_portable, write_portable
from kdcli.deploy.runners import check_backend
from kdcli.deploy.shapes import PRESETS, config_of, paper_params
from kdcli.deploy.sparse.loading import has_own_class, load_network
from kdcli.disk import MAX_REPORT_BYTES, read_json
from kdcli.engine.device import choose_device, choose_dtype
from kdcli.engine.run_dir import RunDir, numbered
from kdcli.errors import (
    GateError,
    Interrupted,
    MachineError,
    UnstableError,
    UsageError,
)
from kdcli.messages import log
from kdcli.models.card import describe, describe_source
from kdcli.models.embedding_format import check_computed
from kdcli.models.grammar import is_shape
from kdcli.models.layout import base_class
from kdcli.models.load import load_encoder, load_tokenizer, location
from kdcli.models.shape import longest_input
from kdcli.recipe.resolve import Resolved, inherited
from kdcli.recipe.sections import RunOptions
from kdcli.report.finish import (
    Entry,
    ReportContents,
    RunResult,
    checked_report,
    with_baseline,
    write_report,
)
from kdcli.report.schema import Quality, Report, renamed
from kdcli.report.sections.evaluations import set_name
from kdcli.report.sections.timings import Cell, ran_as
from kdcli.report.views import short
from kdcli.types import Card
from kdcli.verbs.benchmark.backend_scores import BackendScores, evaluate_backends, open_scored_task
from kdcli.verbs.benchmark.settings import BenchmarkOptions, BenchmarkRecipe
from kdcli.workloads.detect import as_trained
from kdcli.workloads.workload import Workload

COMPARED_TEXTS = 16
"""Number of real texts on which backends are compared with torch in float32."""
LENGTH_TEXTS = 2000
"""Number of real texts that give the lengths of `padding: data`."""


@dataclass(frozen=True)
class PortableFiles:
    """The files of a portable runner."""

    files: list[Path]

    def to_json(self) -> str:
        return json.dumps([str(f) for f in self.files])

    def renderables(self) -> Iterable[object]:
        yield f"wrote {', '.join(str(f) for f in self.files)}"
        yield f"on the other machine: python {self.files[0].name} --out result.json"
        yield "then here: kdcli benchmark --compare result.json"


def write_runner(resolved: Resolved[BenchmarkRecipe], folder: Path) -> PortableFiles:
    """Write the portable runner for the shapes and cells of a recipe.

    Raises:
        UsageError: A model that is not a shape, or no shape.
    """
    models, cells = models_and_cells(resolved.recipe)
    if trained := [model for model in models if not is_shape(model)]:
        raise UsageError(
            f"--portable measures shapes, but {trained[0]} is a model",
            "give its shape, for example 6x384",
        )
    return PortableFiles(write_portable(folder, models, cells))


def benchmark(resolved: Resolved[BenchmarkRecipe], options: RunOptions) -> RunResult:
    """Measure every model on every backend and report.

    Raises:
        Interrupted: The user pressed Ctrl-C; the report has the finished cells.
        KdcliError: The run fails. If the recipe, a model or the device cannot be used, nothing is
            written.
    """
    sources, cells = models_and_cells(resolved.recipe)
    resolved = as_trained(resolved, sources[0], task=False, trains=False)
    recipe = resolved.recipe
    device = choose_device(options.device)
    backends = parse_backends(recipe, sources, device)
    models = _named(sources)
    folder = options.output_dir or numbered(
        f"benchmark-{next(iter(models))}", taken=options.overwrite
    )
    RunDir(folder).check(resolved.to_yaml(), resume=False, overwrite=options.overwrite)
    described = {name: _describe(model, options) for name, model in models.items()}
    cards = {name: card for name, (card, _) in described.items()}
    _check_lengths({name: config for name, (_, config) in described.items()}, cells)
    log(*inherited(resolved))
    task = open_scored_task(recipe, models, device) if recipe.task else None
    rows = task.workload if task else None
    protocol = _protocol(recipe, sources, device, cells, rows)
    RunDir.claim(folder, resolved.to_yaml(), overwrite=options.overwrite)
    latency = _measure(models, backends, recipe.dtype, protocol)
    scores = BackendScores()
    if task is not None and not latency.interrupted:
        scores = evaluate_backends(task, backends, device)
    notes = (
        ["interrupted: only the cells measured until then are here"] if latency.interrupted else []
    )
    notes += task.workload.notes if task else []
    entries = [Entry(name, "candidate", card) for name, card in cards.items()]
    contents = ReportContents(
        "benchmark",
        recipe,
        [*with_baseline(entries), *scores.forms],
        focus="latency",
        latency=latency,
        evaluations=scores.evaluations,
        comparisons=scores.comparisons,
        notes=notes,
        command_line=options.command_line("benchmark"),
        price_per_hour=recipe.price_per_hour,
    )
    result = write_report(RunDir(folder), contents)
    _check_outputs(recipe, latency, scores, folder)
    return result


def _check_outputs(
    recipe: BenchmarkRecipe, latency: Latency, scores: BackendScores, folder: Path
) -> None:
    """Check that the measurement is complete, and that every backend gives correct output.

    Raises:
        Interrupted: The user pressed Ctrl-C.
        GateError: A backend is less accurate than allowed.
        MachineError: The output of a backend is wrong.
    """
    if latency.interrupted:
        raise Interrupted("interrupted", f"finished cells are in {folder}")
    if worse := scores.worse(recipe.max_drop):
        raise GateError(
            f"less accurate than torch in float32 by more than {recipe.max_drop:g} points: "
            f"{'; '.join(worse)}",
            f"the report is in {folder}; choose another precision, or raise the limit with --set "
            "max_drop=POINTS",
            folder=folder,
        )
    if wrong := [a for a in latency.agreements if a.wrong]:
        names = "; ".join(
            f"{a.model} on {a.backend} {a.dtype}: "
            + ("not a number" if a.relative is None else f"{a.relative:.3g}")
            for a in wrong
        )
        raise MachineError(
            f"wrong output, not measured (relative error beyond the limit): {names}",
            f"the rest is in {folder}",
        )


def compare_runs(
    resolved: Resolved[BenchmarkRecipe], options: RunOptions, sources: Sequence[Path]
) -> RunResult:
    """Report the measurements of several runs in one table, without measuring anything.

    Raises:
        UsageError: A source is neither a report nor a result of the portable runner.
    """
    gathered = gather(sources, lambda shape: _describe(shape, options)[0])
    folder = options.output_dir or numbered("benchmark-compare", taken=options.overwrite)
    RunDir.claim(
        folder, resolved.to_yaml(), overwrite=options.overwrite, inputs=list(map(str, sources))
    )
    differing = gathered.differing()
    log(*differing)
    contents = ReportContents(
        "benchmark",
        resolved.recipe,
        gathered.models,
        focus="latency",
        latency=gathered.latency,
        quality=gathered.quality,
        notes=[
            f"compared: {', '.join(map(str, sources))}",
            *differing,
            *gathered.notes,
        ],
        command_line=options.command_line("benchmark"),
        price_per_hour=resolved.recipe.price_per_hour,
    )
    return write_report(RunDir(folder), contents)


def check_latency_gates(
    report: Report, folder: Path, gates: BenchmarkOptions, recipe: BenchmarkRecipe
) -> None:
    """Compare every candidate with the gates. An unstable measurement counts by its bound.

    The gates hold in the first cell of the recipe. The minimum speed-up holds for every measurement
    next to the baseline. The maximum latency holds for the models next to the baseline; if there is
    only one model, it holds for its other backends, or for the model itself if nothing else is
    measured. A candidate without a measurement misses every gate.

    Args:
        report: The measurements.
        folder: Where the report is, for the message.
        gates: The limits.
        recipe: The recipe of the run.

    Raises:
        UnstableError: A cell is unstable, and the gates are strict.
        GateError: At least one gate was missed.
    """
    if gates.strict:
        _check_stable(report, folder)
    if gates.max_latency_ms is None and gates.min_speedup is None:
        return
    _, (cell, *_) = models_and_cells(recipe)
    measured = [r for r in report.latency if r.cell == cell]
    failed = [f for f in report.failures if (f.batch_size, f.seq_len) in (cell, (None, None))]
    baseline, *others = _subjects(recipe)
    rows = [r for r in measured if not others or not _is_of(r, baseline)]
    failures = [f for f in failed if not others or not _is_of(f, baseline)]
    missed = [f"{ran_as(f)} was not measured: {f.reason}" for f in failures]
    if not rows and not failures:
        missed.append("no candidate was measured")
    passed_unstable: list[str] = []
    several_models = len({subject.name for subject in (baseline, *others)}) > 1
    for row in rows:
        is_baseline = several_models and row.model == baseline.name
        limits = replace(gates, max_latency_ms=None) if is_baseline else gates
        misses, unstable = _misses_and_unstable_passes(row, limits)
        missed += misses
        passed_unstable += unstable
    if passed_unstable:
        log(f"within the limits, but unstable: {'; '.join(passed_unstable)}")
    if missed:
        raise GateError("; ".join(missed), f"the report is in {folder}", folder=folder)


def _check_stable(report: Report, folder: Path) -> None:
    """Raise UnstableError if a measurement is unstable."""
    unstable = [r for r in report.latency if r.status == "unstable"]
    if not unstable:
        return
    r = unstable[0]
    raise UnstableError(
        f"{len(unstable)} of {len(report.latency)} measurements are unstable, for example "
        f"{r.model} at {r.batch_size} x {r.seq_len}: {r.n:,} runs. Their middle half "
        f"spreads over {r.iqr_over_p50:.0%} of p50, and p90 is {r.p90_ms / r.p50_ms:.1f} times "
        "p50",
        "measure on a quieter machine, or longer with --set measure.min_seconds=...",
        folder=folder,
    )


def _misses_and_unstable_passes(
    row: LatencyRow, gates: BenchmarkOptions
) -> tuple[list[str], list[str]]:
    """Return messages about the limits that a measurement misses or meets by an unstable bound."""
    missed, passed_unstable = [], []
    where, ratio = f"{row.model} on {row.backend} {row.dtype}", row.speedup
    limit, minimum = gates.max_latency_ms, gates.min_speedup
    if limit is not None:
        text = f"{where}: {row.stated_ms:.2f} ms"
        if row.unstable:
            text += ", the 90th percentile of an unstable measurement"
        if row.stated_ms > limit:
            missed.append(f"{text}, above {limit:g} ms")
        elif row.unstable:
            passed_unstable.append(text)
    if minimum is None:
        return missed, passed_unstable
    if ratio is None:
        missed.append(f"{where}: no speed-up, because the baseline was not measured")
    elif ratio.stated is None:
        missed.append(f"{where}: the times are too unstable to show a speed-up")
    else:
        text = f"{where}: {ratio.stated:.2f} times as fast"
        if ratio.unstable:
            text += ", the lower bound of an unstable measurement"
        if ratio.stated < minimum:
            missed.append(f"{text}, below {minimum:g}")
        elif ratio.unstable:
            passed_unstable.append(text)
    return missed, passed_unstable


def _is_of(measurement: LatencyRow | Failure, subject: Subject) -> bool:
    """Whether a measurement, or a failed one, is of this model on this backend."""
    expected = subject.name, subject.backend, subject.precision
    return (measurement.model, measurement.backend, measurement.dtype) == expected


def check_gates(recipe: BenchmarkRecipe, gates: BenchmarkOptions) -> None:
    """Check that there is something to compare with, before anything is measured.

    Raises:
        UsageError: A speed-up is required, but only the baseline is measured.
    """
    baseline, *others = _subjects(recipe)
    if gates.min_speedup is not None and not others:
        raise UsageError(
            f"--min-speedup compares measurements, but only {baseline.name} on {baseline.backend} "
            "is measured",
            "give a second model, or another --backend",
        )


def models_and_cells(recipe: BenchmarkRecipe) -> tuple[list[str], list[tuple[int, int]]]:
    """Return the models, the baseline first, and the cells of a recipe and its preset.

    Raises:
        UsageError: No model is given.
    """
    alone = not recipe.models and recipe.baseline is None
    preset = PRESETS[recipe.preset or "papers"] if recipe.preset or alone else None
    models = list(recipe.models) or list(preset.shapes if preset else ())
    if recipe.baseline is not None:
        models = [recipe.baseline, *(m for m in models if m != recipe.baseline)]
    if not models:
        raise UsageError(
            "no model given",
            "kdcli benchmark MODEL [MODEL...] --baseline TEACHER; a model may be a shape, such as "
            "6x384",
        )
    cells = preset.cells if preset else CELLS
    batch_sizes = recipe.batch_sizes or list(dict.fromkeys(batch_size for batch_size, _ in cells))
    seq_lens = recipe.seq_lens or list(dict.fromkeys(seq_len for _, seq_len in cells))
    return models, [(batch_size, seq_len) for batch_size in batch_sizes for seq_len in seq_lens]


def parse_backends(
    recipe: BenchmarkRecipe, models: Sequence[str], device: torch.device | None = None
) -> list[tuple[str, str]]:
    """Parse and check the backends of a recipe. The default precision is the recipe's `dtype`.

    Raises:
        UsageError: An unknown backend or precision, or a compacted model on `sparse`.
        MachineError: A library is missing, or the device lacks the precision.
    """
    backends = [
        (name, precision or recipe.dtype)
        for name, _, precision in (b.partition("-") for b in recipe.backends)
    ]
    for backend, precision in backends:
        check_backend(backend, precision)
        if precision == "bf16" and device is not None:
            choose_dtype(precision, device)
        for model in models if backend == "sparse" else ():
            if not is_shape(model) and has_own_class(model):
                raise UsageError(
                    f"backend sparse cannot run {model}: a compacted or static model has no "
                    "weights left to skip",
                    "measure the masked model on sparse, and the compacted one in a run without "
                    "sparse",
                )
    return backends


def _named(models: Sequence[str]) -> dict[str, str]:
    """Return the sources by their names in the report.

    Raises:
        UsageError: Two names are equal.
    """
    named: dict[str, str] = {}
    for model in models:
        name = model if is_shape(model) else short(model)
        if name in named:
            raise UsageError(f"two models are called {name}", "give each once")
        named[name] = model
    return named


def _describe(model: str, options: RunOptions) -> tuple[Card, PreTrainedConfig]:
    """Describe a shape, an export or a model, and return its configuration."""
    if is_shape(model):
        config = config_of(model)
        untrained = base_class(config).from_config(config, dtype=torch.float32).eval()
        embedding, transformer = paper_params(model)
        card = replace(
            describe(untrained, model, None),
            paper_params_embedding=embedding,
            paper_params_transformer=transformer,
        )
        return card, config
    if is_export(model):
        export = open_export(model, choose_device(options.device))
        return export.card, export.config
    own_class = has_own_class(model)
    encoder = load_network(model).base_model if own_class else load_encoder(model).model
    return describe_source(encoder, model), encoder.config


def _check_lengths(configs: Mapping[str, PreTrainedConfig], cells: Iterable[Cell]) -> None:
    """Check that every model reads as many tokens as the cells have.

    Raises:
        UsageError: A model reads fewer.
    """
    longest = max(seq_len for _, seq_len in cells)
    for name, config in configs.items():
        limit = longest_input(config)
        if limit is not None and limit < longest:
            raise UsageError(
                f"{name} reads at most {limit} tokens, but a cell has {longest}",
                f"give --seq-len {limit} or less",
            )


def _protocol(
    recipe: BenchmarkRecipe,
    models: Sequence[str],
    device: torch.device,
    cells: list[tuple[int, int]],
    workload: Workload | None,
) -> Protocol:
    """Return the worker's settings.

    Texts and their lengths come from the task or from `--data`. By default, the texts are the
    demo's.

    Raises:
        UsageError: `padding: data` without data.
    """
    source = recipe.data.source
    if workload is not None:
        texts = workload.texts_of_rows()[:LENGTH_TEXTS]
    else:
        account = RowAccount(source or "demo")
        opened = open_source(account.source)
        placed = opened.placed_documents("train", recipe.data.column, account)
        first = itertools.islice(placed, LENGTH_TEXTS if source else COMPARED_TEXTS)
        texts = [text for _, text in first]
        if source is not None:
            account.end_before(placed)
            ACCOUNTS.close(account, len(texts))
    lengths: list[int] = []
    if recipe.padding == "data":
        if source is None and workload is None:
            raise UsageError(
                "padding 'data' needs --data", "give a file, a directory or a hub id of text"
            )
        tokenizer = load_tokenizer(next((m for m in models if not is_shape(m)), "demo"))
        lengths = [len(ids) for ids in tokenizer(texts, verbose=False)["input_ids"]]
    return Protocol(
        str(device),
        recipe.measure.min_runs,
        recipe.measure.min_seconds,
        cells,
        padding=recipe.padding,
        lengths=lengths,
        texts=texts[:COMPARED_TEXTS],
    )


def _subjects(recipe: BenchmarkRecipe) -> list[Subject]:
    """Return what a recipe measures, the baseline first."""
    models, _ = models_and_cells(recipe)
    return subjects_of(_named(models), parse_backends(recipe, models), recipe.dtype)


def subjects_of(
    models: Mapping[str, str], backends: Sequence[tuple[str, str]], dtype: str
) -> list[Subject]:
    """Return every model on every backend, the baseline first.

    The baseline is the first model on torch in `dtype`, or on its own backend if it is an export,
    which runs on no other one.
    """
    baseline = _subject(*next(iter(models.items())), "torch", dtype)
    every = [
        _subject(name, model, backend, precision)
        for backend, precision in backends
        for name, model in models.items()
    ]
    return list(dict.fromkeys([baseline, *every]))


def _subject(name: str, model: str, backend: str, precision: str) -> Subject:
    if is_export(model):
        export = open_export(model)
        if hasattr(export.config, CASCADE):
            raise UsageError(
                f"{model} is a cascade, whose time depends on how often its larger model is asked",
                f"time its models: kdcli benchmark {Path(model) / FIRST} and the export of the "
                "larger one; kdcli compress reports the mean",
            )
        return Subject(name, model, export.format, export.precision)
    if not is_shape(model):
        check_computed(model)
    return Subject(name, location(model), backend, precision)


def _measure(
    models: Mapping[str, str], backends: Sequence[tuple[str, str]], dtype: str, protocol: Protocol
) -> Latency:
    """Measure the models in one worker for each backend.

    Each worker also measures the baseline, whose rows are kept once.
    """
    baseline, *subjects = subjects_of(models, backends, dtype)
    groups: dict[str, list[Subject]] = {}
    for subject in subjects or [baseline]:
        groups.setdefault(subject.backend, []).append(subject)
    total = Latency()
    for backend, of_backend in groups.items():
        log(f"measuring {len(of_backend)} on {backend}")
        latency = measure_latency(list(dict.fromkeys([baseline, *of_backend])), protocol)
        seen = {_place(row) for row in total.rows}
        latency.rows = [row for row in latency.rows if _place(row) not in seen]
        total.extend(latency)
        if total.interrupted:
            break
    return total


def _place(row: LatencyRow) -> tuple[str, str, str, int, int]:
    """Return what a row measures."""
    return row.model, row.backend, row.dtype, *row.cell


@dataclass
class Gathered:
    """The parts of a report, with each model under the name of its run.

    Attributes:
        models: The models of all runs.
        latency: Their measurements.
        quality: Their metrics by task.
        notes: Sentences for the reader.
        evaluated_on: The hash and the description of the examples, by task and run.
    """

    models: list[Entry] = field(default_factory=list)
    latency: Latency = field(default_factory=Latency)
    quality: Quality = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    evaluated_on: dict[str, dict[str, tuple[str, str]]] = field(default_factory=dict)

    def differing(self) -> list[str]:
        """Return a sentence for every task that runs were evaluated on with different examples."""
        sentences = []
        for task, runs in self.evaluated_on.items():
            if len({rows for rows, _ in runs.values()}) > 1:
                examples = "; ".join(f"{run}: {words}" for run, (_, words) in runs.items())
                sentences.append(
                    f"the scores on {task} cannot be compared, because the runs were evaluated on "
                    f"different examples ({examples})"
                )
        return sentences


def gather(sources: Sequence[Path], card_of: Callable[[str], Card]) -> Gathered:
    """Read run directories, `report.json` files and results of the portable runner.

    `card_of` describes a shape that the portable runner measured.

    Raises:
        UsageError: A file is missing, damaged, or neither a report nor a portable result.
    """
    gathered = Gathered()
    for source in sources:
        file = source / "report.json" if source.is_dir() else source
        run = file.parent.name if file.name == "report.json" else file.stem
        raw = read_json(file, max_bytes=MAX_REPORT_BYTES)
        if "models" in raw and "command" in raw:
            _add_report(gathered, run, checked_report(raw, file))
        else:
            _add_portable(gathered, file, card_of)
    return gathered


def _add_report(gathered: Gathered, run: str, report: Report) -> None:
    """Add a report under the name of its run."""
    measured = {row.model for row in report.latency}
    # Untrained students and checkpoints only matter within their own run.
    listed = [m for m in report.models if m.card or m.role == "form" or m.name in measured]
    alone = len(listed) == 1
    names = {model.name: run if alone else f"{run}: {model.name}" for model in listed}
    own = report.renamed(names)
    gathered.models += [replace(Entry.reported(m), variant=None, run=run) for m in own.models]
    gathered.latency.rows += own.latency
    for task, by_model in own.quality.items():
        gathered.quality.setdefault(task, {}).update(by_model)
    for e in report.evaluations:
        words = f"{e.n:,} examples of {report.source or 'its own data'}, {e.split}"
        runs = gathered.evaluated_on.setdefault(set_name(e.task, e.set), {})
        runs[run] = e.rows_sha256 or words, words


def _add_portable(gathered: Gathered, file: Path, card_of: Callable[[str], Card]) -> None:
    """Add a result of the portable runner under the name of its file."""
    result, run = read_portable(file), file.stem
    names = {shape: f"{run}: {shape}" for shape in result.shapes}
    shapes = [Entry(name, "candidate", card_of(shape), run=run) for shape, name in names.items()]
    gathered.models += with_baseline(shapes)
    gathered.latency.rows += [renamed(row, names) for row in result.rows]
    gathered.notes.append(f"{run}: {json.dumps(result.environment, ensure_ascii=False)}")
