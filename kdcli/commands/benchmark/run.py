"""`kdcli benchmark`: latency of models and shapes beside a baseline, measured interleaved, on every backend asked for.

Data flow: models × backends → one worker process a backend, the baseline in each → rows, paired speed-ups, agreement
with torch in float32 → report.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModel

from kdcli.backends.runners import check_backend
from kdcli.bench.compare import gather
from kdcli.bench.latency import CELLS, Latency, Protocol, Subject, measure_latency
from kdcli.bench.old_machines.portable import write_portable
from kdcli.bench.old_machines.projection import table
from kdcli.bench.shapes import PRESETS, config_of, counts
from kdcli.commands.benchmark.scores import Scores, open_task, scores_on_backends
from kdcli.commands.benchmark.settings import BenchmarkRecipe
from kdcli.data.files import open_source
from kdcli.data.labelled.task_data import Labelled
from kdcli.downstream.task import quality_of
from kdcli.errors import GateError, Interrupted, MachineError, UnstableError, UsageError, did_you_mean
from kdcli.models.card import describe
from kdcli.models.load import load_encoder, load_tokenizer, location
from kdcli.models.shape import is_shape
from kdcli.recipe.resolve import Resolved
from kdcli.recipe.sections import Invocation
from kdcli.report.finish import RunResult, write_report
from kdcli.report.sections.latency import speedup_of
from kdcli.report.views import short
from kdcli.sparse.load import is_compact, load
from kdcli.training.device import choose_device
from kdcli.training.progress import Progress
from kdcli.training.run_dir import RunDir, numbered
from kdcli.types import ModelShape

TEXTS = 16
"""Real texts on which backends are compared with torch in float32."""

PAPERS = (128, 128)
"""(batch size, tokens) for which the papers print speed-ups."""

DRAWN = 2000
"""Real texts whose lengths `padding: data` draws from."""


@dataclass(frozen=True)
class Gates:
    """What every candidate has to keep in the first cell; `strict` is that no cell may be unstable."""

    max_latency_ms: float | None = None
    min_speedup: float | None = None
    strict: bool = False


@dataclass(frozen=True)
class Written:
    """The portable runner, written."""

    files: list[Path]

    def to_json(self) -> str:
        """The files."""
        return json.dumps([str(f) for f in self.files])

    def renderables(self) -> Iterable[Any]:
        """The files, and what to do with them."""
        yield f"wrote {', '.join(str(f) for f in self.files)}"
        yield f"on the other machine: python {self.files[0].name} --out result.json"
        yield "then here: kdcli benchmark --compare result.json"


def write_runner(resolved: Resolved[BenchmarkRecipe], folder: Path) -> Written:
    """Write the portable runner for the shapes and cells of a recipe.

    Raises:
        UsageError: a model that is not a shape, or no shape.
    """
    models, cells = _wanted(resolved.recipe)
    weighty = [m for m in models if not is_shape(m)]
    if weighty:
        raise UsageError(f"--portable measures shapes, {weighty[0]} is a model", "give its shape, for example 6x384")
    return Written(write_portable(folder, models, cells))


def run(resolved: Resolved[BenchmarkRecipe], invocation: Invocation) -> RunResult:
    """Measure every model on every backend and report.

    Raises:
        Interrupted: Ctrl-C; what was measured is in the report.
        KdcliError: see `kdcli.errors`; nothing was written if recipe, models or device cannot be used.
    """
    recipe = resolved.recipe
    models, cells = _wanted(recipe)
    backends = [_parsed(text) for text in recipe.backends]
    for backend, precision in backends:
        check_backend(backend, precision)
    dense_only = [model for model in models if is_compact(model)]
    if dense_only and any(backend == "sparse" for backend, _ in backends):
        raise UsageError(
            f"backend sparse does not run {dense_only[0]}: it is compacted, nothing in it is left to skip",
            "measure the masked model it was made of on sparse, and this one in a run without it",
        )
    device = choose_device(invocation.device)
    names = _names(models)
    folder = invocation.output_dir or numbered(f"benchmark-{names[0]}", taken=invocation.overwrite)
    run_dir = RunDir(folder)
    run_dir.check(resolved.to_yaml(), resume=False, overwrite=invocation.overwrite)
    cards = {n: _card(m, invocation) for n, m in zip(names, models, strict=True)}
    labelled: Labelled | None = None
    if recipe.task is not None:
        labelled, headed = open_task(recipe, names, models, trust_remote_code=invocation.trust_remote_code)
    protocol = _protocol(recipe, models, device, cells, invocation, labelled)
    projections = _projected(cards, recipe.project, cells)
    RunDir.claim(folder, resolved.to_yaml(), overwrite=invocation.overwrite)
    latency = _measured(names, models, backends, protocol)
    scores = Scores()
    if labelled is not None and not latency.interrupted:
        scores = scores_on_backends(recipe, labelled, headed, backends, device)
    notes = ["interrupted: only the cells measured until then are here"] if latency.interrupted else []
    result = write_report(
        run_dir,
        command="benchmark",
        recipe=recipe.model_dump(),
        cards=cards,
        folders={},
        latency=latency,
        outcome=None,
        quality=quality_of(scores.evaluations),
        notes=notes,
        evaluations=scores.evaluations,
        comparisons=scores.comparisons,
        projections=projections,
    )
    if latency.interrupted:
        raise Interrupted("interrupted", f"what was measured until then is in {folder}")
    if scores.worse:
        raise MachineError(
            f"less accurate than torch in float32 by more than max_drop {recipe.max_drop:g}: {'; '.join(scores.worse)}",
            f"the report is in {folder}; another precision, or --set max_drop=… if that is good enough",
        )
    wrong = [a for a in latency.agreements if a["wrong"]]
    if wrong:
        said = "; ".join(f"{a['model']} on {a['backend']} {a['dtype']}: {a['relative']:.3g}" for a in wrong)
        raise MachineError(
            f"wrong output (relative error beyond the limit) of {said}; not measured", f"the rest is in {folder}"
        )
    return result


def compare(resolved: Resolved[BenchmarkRecipe], invocation: Invocation, sources: Sequence[Path]) -> RunResult:
    """Report what several runs measured, side by side; nothing is measured.

    Raises:
        UsageError: a source that is no report and no portable result.
    """
    found = gather(sources)
    cards = found.cards | {name: _card(shape, invocation) for name, shape in found.shapes.items()}
    run_dir = RunDir(invocation.output_dir or numbered("benchmark-compare", taken=invocation.overwrite))
    RunDir.claim(run_dir.path, resolved.to_yaml(), overwrite=invocation.overwrite)
    return write_report(
        run_dir,
        command="benchmark",
        recipe=resolved.recipe.model_dump() | {"compare": [str(s) for s in sources]},
        cards=cards,
        folders={},
        latency=Latency(rows=found.rows, speedups=found.speedups),
        outcome=None,
        quality=found.quality,
        notes=found.notes,
    )


def hold_gates(result: RunResult, gates: Gates) -> None:
    """Compare every candidate with the gates.

    Raises:
        GateError: one was missed.
        UnstableError: a cell is unstable under `strict`.
    """
    report = result.report
    unstable = [r for r in report.latency if r.status == "unstable"]
    if gates.strict and unstable:
        r = unstable[0]
        raise UnstableError(
            f"{len(unstable)} of {len(report.latency)} measurements are unstable, for example {r.model} at "
            f"{r.batch_size} × {r.seq_len}: the middle half of its runs spreads over {r.iqr_over_p50:.0%} of p50",
            "measure on a quieter machine, or longer with --set measure.min_seconds=…",
        )
    first = report.latency[0] if report.latency else None
    baseline = next(iter(report.models))
    missed = []
    for row in report.latency:
        where = f"{row.model} on {row.backend} {row.dtype}"
        if first is None or (row.batch_size, row.seq_len) != (first.batch_size, first.seq_len):
            continue
        speedup = speedup_of(report, row)
        if row.model != baseline and gates.max_latency_ms is not None and row.p50_ms > gates.max_latency_ms:
            missed.append(f"{where}: {row.p50_ms:.2f} ms, above {gates.max_latency_ms:g} ms")
        if speedup is not None and gates.min_speedup is not None and speedup.median < gates.min_speedup:
            missed.append(f"{where}: {speedup.median:.2f} times as fast, below {gates.min_speedup:g}")
    if missed:
        raise GateError("; ".join(missed), f"the report is in {result.folder}")


def _wanted(recipe: BenchmarkRecipe) -> tuple[list[str], list[tuple[int, int]]]:
    """Models, baseline first, and cells, from the recipe and its preset."""
    if recipe.preset is not None and recipe.preset not in PRESETS:
        raise UsageError(
            f"unknown preset '{recipe.preset}'{did_you_mean(recipe.preset, PRESETS)}", f"known: {', '.join(PRESETS)}"
        )
    preset = PRESETS[recipe.preset] if recipe.preset else None
    models = list(recipe.models) or list(preset.shapes if preset else ())
    if recipe.baseline is not None:
        models = [recipe.baseline, *(m for m in models if m != recipe.baseline)]
    if not models:
        raise UsageError(
            "no model given", "kdcli benchmark MODEL [MODEL…] --baseline TEACHER; a shape such as 6x384 will do"
        )
    given = list(preset.cells) if preset else list(CELLS)
    batches = recipe.batch_sizes or list(dict.fromkeys(batch for batch, _ in given))
    lengths = recipe.seq_lens or list(dict.fromkeys(length for _, length in given))
    return models, [(batch, length) for batch in batches for length in lengths]


def _parsed(backend: str) -> tuple[str, str]:
    """`onnx-int8` → backend and precision; alone a backend is in float32."""
    name, _, precision = backend.partition("-")
    return name, precision or "fp32"


def _names(models: Sequence[str]) -> list[str]:
    names = [m if is_shape(m) else short(m) for m in models]
    twice = sorted({n for n in names if names.count(n) > 1})
    if twice:
        raise UsageError(f"two models are called {twice[0]}", "give each once")
    return names


def _card(model: str, invocation: Invocation) -> dict[str, Any]:
    if is_shape(model):
        made = AutoModel.from_config(config_of(model), dtype=torch.float32).eval()
        of_paper = counts(model)
        return describe(made, model, None) | {
            "paper_params_embedding": of_paper["params_embedding"],
            "paper_params_transformer": of_paper["params_transformer"],
        }
    trusted = invocation.trust_remote_code
    encoder = load(model).base_model if is_compact(model) else load_encoder(model, trust_remote_code=trusted).model
    where = Path(location(model))
    return describe(encoder, model, where if where.is_dir() else None)


def _projected(
    cards: Mapping[str, Mapping[str, Any]], devices: Sequence[str], cells: Sequence[tuple[int, int]]
) -> list[dict[str, Any]]:
    """Times on cards that are not here, estimated from the shapes; beside what a paper printed for such a card."""
    published = {(p.device, of): s for p in PRESETS.values() for of, s in p.published.items()}
    shapes = [ModelShape(c["layers"], c["hidden"], c["ffn"], c["heads"]) for c in cards.values()]
    rows = table(shapes, devices, cells=cells) if devices else []
    found = []
    for number, row in enumerate(rows):
        name = list(cards)[number % len(cards)]
        printed = published.get((row["device"], name)) if (row["batch_size"], row["seq_len"]) == PAPERS else None
        found.append(
            {
                "model": name,
                "device": row["device"],
                "batch_size": row["batch_size"],
                "seq_len": row["seq_len"],
                "milliseconds": row["projected_ms"],
                "speedup": row["projected_speedup"],
                "published": printed,
                "error": row["projected_speedup"] / printed - 1 if printed else None,
                "note": row["label"],
            }
        )
    return found


def _protocol(
    recipe: BenchmarkRecipe,
    models: Sequence[str],
    device: torch.device,
    cells: list[tuple[int, int]],
    invocation: Invocation,
    labelled: Labelled | None,
) -> Protocol:
    """What the worker is told; real lengths and texts come from the task or `--data`, else texts from the demo."""
    source = recipe.data.source
    if labelled is not None:
        examples = [example for of_set in labelled.sets.values() for example in of_set]
        texts = [" ".join(example.texts) for example in examples[:DRAWN]]
    else:
        documents = open_source(source or "demo").documents("train", recipe.data.column)
        texts = [text for text, _ in zip(documents, range(DRAWN if source else TEXTS), strict=False)]
    lengths: list[int] = []
    if recipe.padding == "data":
        reading = [m for m in models if not is_shape(m)] or ["demo"]
        if source is None and labelled is None:
            raise UsageError("padding 'data' needs --data", "give a file, a directory or a hub id with text")
        tokenizer = load_tokenizer(reading[0], trust_remote_code=invocation.trust_remote_code)
        lengths = [len(ids) for ids in tokenizer(texts, verbose=False)["input_ids"]]
    return Protocol(
        device=str(device),
        min_runs=recipe.measure.min_runs,
        min_seconds=recipe.measure.min_seconds,
        cells=cells,
        padding=recipe.padding,
        lengths=lengths,
        texts=texts[:TEXTS],
        trust_remote_code=invocation.trust_remote_code,
    )


def _measured(
    names: Sequence[str], models: Sequence[str], backends: Sequence[tuple[str, str]], protocol: Protocol
) -> Latency:
    """One worker for each backend, the baseline on plain torch in all of them; its rows are kept once."""
    baseline = Subject(names[0], location(models[0]))
    whole = Latency()
    for backend in dict.fromkeys(name for name, _ in backends):
        subjects = [
            Subject(name, location(model), backend, precision)
            for of, precision in backends
            if of == backend
            for name, model in zip(names, models, strict=True)
        ]
        Progress.log(f"measuring {len(subjects)} on {backend}")
        found = measure_latency([baseline, *(s for s in subjects if s != baseline)], protocol)
        seen = {(r["model"], r["backend"], r["dtype"], r["batch_size"], r["seq_len"]) for r in whole.rows}
        found.rows = [
            r for r in found.rows if (r["model"], r["backend"], r["dtype"], r["batch_size"], r["seq_len"]) not in seen
        ]
        whole.add(vars(found))
        whole.interrupted = found.interrupted
        if whole.interrupted:
            break
    return whole
