"""`kdcli compress`: from a model to something smaller that may be shipped.

Data flow: goal -> untrained latencies -> teacher -> candidates, each a chain of other verbs' runs -> judged beside the
teacher on held-out rows -> the best one in best/, and a report with the whole table.
"""

import contextlib
import shutil
from pathlib import Path
from typing import Any

from kdcli.deploy.exported import FACTS
from kdcli.deploy.latency import CELLS, Latency
from kdcli.disk import atomic_dir, read_json, write_atomic
from kdcli.engine.processes import stop_requests
from kdcli.engine.progress import Progress
from kdcli.engine.run_dir import RunDir, numbered
from kdcli.errors import GateError, UsageError
from kdcli.models.heads import misfit_of
from kdcli.models.load import load_config, location
from kdcli.recipe.resolve import Resolved
from kdcli.recipe.sections import RunOptions
from kdcli.report import schema
from kdcli.report.charts.compression import png
from kdcli.report.finish import ReportContents, ReportedModel, RunResult, write_report
from kdcli.report.schema import Compression, Role
from kdcli.report.sections.latency import speedup_of
from kdcli.report.text import duration
from kdcli.run.context import cpu_session
from kdcli.verbs.compress.judge import (
    Judged,
    Measured,
    check_rows,
    choose,
    conflict,
    is_bounded,
    judge,
    misses,
    sentence,
)
from kdcli.verbs.compress.plan import (
    TEACHER,
    Candidate,
    Search,
    check_backends,
    check_budget,
    check_timing,
    finetuning,
    measure_untrained,
    missed_untrained,
    try_pruning,
    try_shapes,
)
from kdcli.verbs.compress.recipes import set_options
from kdcli.verbs.compress.settings import CompressRecipe, GoalSettings
from kdcli.verbs.compress.verbs import Verbs
from kdcli.verbs.compress.work import Work, kind_of, product
from kdcli.workloads import open_evaluation
from kdcli.workloads.labelled import LabelledWorkload
from kdcli.workloads.rerank import is_reranker
from kdcli.workloads.workload import EvaluationRequest

BEST, PICTURE, BACKENDS = "best", "pareto.png", "judged-backends"
NOT_SHIPPED = (
    "checkpoints",
    "start",
    "intermediate",
    "student-undistilled",
    "mask",
    "compact",
    ".lock",
    "log.jsonl",
)
"""What a run directory holds beside its model."""


def run(resolved: Resolved[CompressRecipe], invocation: RunOptions) -> RunResult:
    """Compress a model and report. Raises GateError: nothing that was tried meets the goal; the report and the nearest
    candidate are there; KdcliError: see `kdcli.errors`; nothing was written if goal, model or data cannot be used."""
    recipe = resolved.recipe
    name = f"compress-{Path(str(recipe.model)).name}-{recipe.task}"
    folder = invocation.output_dir or numbered(
        name, taken=invocation.resume or invocation.overwrite
    )
    how = {"resume": invocation.resume, "overwrite": invocation.overwrite}
    resumed = RunDir(folder).check(resolved.to_yaml(), **how)
    with stop_requests() as stop, contextlib.closing(Verbs()) as verbs:
        work = Work(recipe, invocation, folder, stop, kind_of(recipe), verbs=verbs)
        if resumed:
            work.records = RunDir(folder).read_log()
            if RunDir(folder).done:
                Progress.log(f"{folder} is done already")
                return checked(recipe, RunResult.read(folder))
        rows, fits = check_model(recipe, work.kind, trusted=invocation.trust_remote_code)
        search = Search(work, str(recipe.model))
        for note in check_rows(recipe, rows):
            Progress.log(note)
            search.notes.append(note)
        untrained: dict[str, Any] = {}
        if not recipe.steps:
            check_backends(search)
            check_timing(search)
            untrained = work.once("untrained", lambda: measure_untrained(search, str(recipe.model)))
            search.fastest = untrained["fastest"]
            check_reachable(search, untrained)
        check_budget(work, fits=fits)
        work.claim(RunDir.claim(folder, resolved.to_yaml(), **how))
        search.teacher = str(recipe.model) if fits else str(work.must(TEACHER, finetuning(work)))
        judged = pipeline(search) if recipe.steps else planned(search, untrained)
        result = finish(search, judged)
    return checked(recipe, result)


def checked(recipe: CompressRecipe, result: RunResult) -> RunResult:
    """The result of a compression. Raises GateError: it missed the goal."""
    compression = result.report.compression
    assert compression is not None
    if not compression.met:
        raise GateError(
            compression.sentence, f"the whole table is in {result.folder} (report.html)"
        )
    return result


def check_model(recipe: CompressRecipe, kind: str, *, trusted: bool) -> tuple[int, bool]:
    """The number of held-out rows, and whether the model can do the task as it is. Raises UsageError: unusable data or
    model, no labelled rows."""
    model, task = str(recipe.model), str(recipe.task)
    request = EvaluationRequest(task, [model], recipe.data, pooling=recipe.pooling)
    workload = open_evaluation(request, cpu_session(trust_remote_code=trusted))
    rows = workload.row_count
    if kind == "rerank":
        return rows, is_reranker(model, trust_remote_code=trusted)
    if isinstance(workload, LabelledWorkload):
        config = load_config(model, trust_remote_code=trusted)
        return rows, misfit_of(model, config, workload.data.task, None) is None
    return rows, True


def check_reachable(search: Search, untrained: dict[str, Any]) -> None:
    """Refuse what needs no training to be told. Raises UsageError: the model meets the goal as it is; GateError: no
    backend and no shape can meet it."""
    goal, recipe = search.goal, search.work.recipe
    if not is_bounded(goal):
        return
    size = (
        sum(f.stat().st_size for f in Path(location(str(recipe.model))).glob("*.safetensors")) / 1e6
    )
    own = untrained["teacher"]
    small = goal.max_mb is None or 0 < size <= goal.max_mb
    fast = goal.max_latency_ms is None or own["ms"] <= goal.max_latency_ms
    if goal.speedup is None and small and fast:
        facts = f"{own['ms']:.2f} ms, {size:.1f} MB"
        raise UsageError(
            f"{recipe.model} meets every limit already: {facts}",
            "nothing was trained; ask for more",
        )
    # What a backend alone saves of the files is seen only once it is written.
    backends = {} if goal.max_mb is not None else untrained["backends"]
    timed = untrained["shapes"] | backends
    missed = {name: missed_untrained(goal, one, best=True) for name, one in timed.items()}
    if recipe.plan.prune is None and all(missed.values()):
        whys = [f"{name}: {'; '.join(of.values())}" for name, of in missed.items()]
        why = conflict(missed.values()) or "; ".join(whys)
        raise GateError(
            f"no shape of the plan can meet the goal: {why}",
            "nothing was trained; name others in plan.shapes",
        )


def planned(search: Search, untrained: dict[str, Any]) -> Judged:
    """Try candidates from cheap to dear until one meets the goal with confidence."""
    for backend in search.backends:
        search.export(backend, search.teacher, backend)
    # Where the fastest is asked for, no backend ends the search, and they are judged beside the shapes.
    if is_bounded(search.goal) and search.judge(BACKENDS):
        search.notes.append("a backend alone meets the goal, so nothing smaller was trained")
    else:
        try_shapes(search, untrained["shapes"])
        if search.judged is None:
            search.judge(BACKENDS)
        if not search.met:
            try_pruning(search)
    assert search.judged is not None
    return search.judged


def pipeline(search: Search) -> Judged:
    """Run the steps of a recipe one after another, each on the model before it, and judge what every one left."""
    work, model, made, parent = search.work, Path(search.teacher), {}, None
    for number, step in enumerate(work.recipe.steps, 1):
        ((verb, keys),) = step.items()
        name = f"{number}-{verb}"
        if verb in ("quantize", "export"):
            backend = keys.get("format", "onnx") + ("-int8" if verb == "quantize" else "")
            search.write(name, model, backend, parent, needed=True)
            made[name] = work.path(name)
            continue
        if verb == "trim":
            source = work.recipe.trimmed_to
            more = ["--data", source] if source else []
            model = work.must(name, ["trim", str(model), *more, *set_options(keys)])
        else:
            beside = (
                ["--teacher", search.teacher] if verb == "prune" and work.kind == "task" else []
            )
            model, parent = (
                product(work.must(name, work.training(verb, str(model), keys, *beside))),
                name,
            )
        made[name] = model
    return judge(work, "judged", search.teacher, made)


def finish(search: Search, judged: Judged) -> RunResult:
    """Put the best candidate into best/ and write the report."""
    work, goal = search.work, search.goal
    last = judged.candidates[-1]
    chosen, missed = (
        (last, misses(goal, judged.teacher, last)) if work.recipe.steps else choose(goal, judged)
    )
    with atomic_dir(work.folder / BEST) as aside:
        shutil.copytree(
            chosen.folder, aside, dirs_exist_ok=True, ignore=shutil.ignore_patterns(*NOT_SHIPPED)
        )
    rows = [
        row_of(one, judged.teacher, goal, chosen) for one in (judged.teacher, *judged.candidates)
    ]
    rows += [
        schema.Candidate(name=c.name, outcome=c.left_out)
        for c in search.candidates.values()
        if c.left_out
    ]
    dropped = seconds_dropped(search, chosen)
    limits = goal.model_dump(exclude={"strict"}, exclude_none=True)
    compression = Compression(
        task=str(work.recipe.task),
        metric=judged.metric,
        rows=judged.rows,
        goal=limits,
        strict=goal.strict,
        met=not missed,
        chosen=chosen.name,
        sentence=sentence(judged, chosen, missed, goal),
        candidates=rows,
    )
    notes = [f"{BEST}/ is what to ship, and its README.md says how to run it", *search.notes]
    notes += [
        f"it took {duration(work.seconds)}, {duration(dropped)} of it for what is not in {BEST}/"
    ]
    notes += [note for one in judged.candidates if (note := in_float(one))]
    if any(row.status != "ok" for row in judged.report.latency):
        notes.append(
            "some latencies are noisy or unstable: the machine had other work, so measure again when it has none"
        )
    if len(judged.candidates) > 1 and not work.recipe.steps:
        notes.append(
            f"the held-out rows also chose among {len(judged.candidates)} candidates: judge {BEST}/ on others"
        )
    return _write(work, judged, chosen, compression, notes)


def row_of(
    one: Measured, teacher: Measured, goal: GoalSettings, chosen: Measured
) -> schema.Candidate:
    """Report what became of a candidate."""
    outcome = ""
    if one is chosen:
        outcome = "chosen"
    elif one is not teacher:
        outcome = "; ".join(misses(goal, teacher, one).values()) or "meets the goal"
    return schema.Candidate(
        name=one.name,
        score=one.score,
        low=one.low,
        high=one.high,
        ms=one.ms,
        speedup=one.speedup,
        mb=one.mb,
        outcome=outcome,
    )


def in_float(one: Measured) -> str:
    """Which products a quantised candidate keeps in float32; an empty string for none."""
    file = one.folder / FACTS
    products = read_json(file).get("products", []) if file.is_file() else []
    kept = [each["name"] for each in products if each["float"]]
    return (
        f"{one.name}: {len(kept)} of {len(products)} products stay in float32: {', '.join(kept)}"
        if kept
        else ""
    )


def seconds_dropped(search: Search, chosen: Measured) -> float:
    """What was spent on making candidates that were not chosen; every step of a pipeline is part of the last one."""
    if search.work.recipe.steps:
        return 0.0
    parent = search.candidates.get(chosen.name, Candidate(chosen.name)).parent
    spent = [
        (r["key"].split()[1], r["seconds"])
        for r in search.work.records
        if r["key"].startswith("run ")
    ]
    kept = [TEACHER, "judged", chosen.name, *([parent, f"{parent}-trimmed"] if parent else [])]
    return float(
        sum(
            seconds for name, seconds in spent if name not in kept and not name.startswith("judged")
        )
    )


def _write(
    work: Work, judged: Judged, chosen: Measured, compression: Compression, notes: list[str]
) -> RunResult:
    """The report: teacher and chosen model in full, all candidates in one table. The evaluation has the rest."""
    source, names = judged.report, list(judged.report.models)
    pair = {names[0]: TEACHER, names[1 + judged.candidates.index(chosen)]: chosen.name}
    latency = Latency(
        [
            row.model_dump() | {"model": pair[row.model]}
            for row in source.latency
            if row.model in pair
        ]
    )
    for row in source.latency:
        if row.model in pair and (ratio := speedup_of(source, row)) is not None:
            on = (
                ""
                if (row.backend, row.dtype) == ("torch", "fp32")
                else f"/{row.backend}-{row.dtype}"
            )
            cell = (
                ""
                if (row.batch_size, row.seq_len) == CELLS[0]
                else f"@{row.batch_size}x{row.seq_len}"
            )
            latency.speedups[f"{pair[row.model]}{on}_vs_{TEACHER}{cell}"] = ratio.model_dump()
    quality = {
        task: {pair[m]: v for m, v in of.items() if m in pair}
        for task, of in source.quality.items()
    }
    write_atomic(work.folder / PICTURE, png(compression))
    models = []
    for name, shown in pair.items():
        role: Role = "teacher" if shown == TEACHER else "candidate"
        baseline = None if role == "teacher" else TEACHER
        models.append(ReportedModel(shown, role, source.cards[name], baseline))
    contents = ReportContents(
        "compress",
        work.recipe,
        models,
        latency=latency,
        quality=quality,
        notes=notes,
        compression=compression,
    )
    return write_report(RunDir(work.folder), contents)
