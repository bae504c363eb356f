"""The cascades of a compression, from the answers of the candidates that were scored anyway."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from itertools import permutations
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import TypeAdapter

from kdcli.deploy.cascade import FIRST, KEY, SINGLE_FILE, TOKENIZER_FILE, write_single_file
from kdcli.deploy.exported import Export, open_export
from kdcli.deploy.measurements import LatencyRow
from kdcli.deploy.measurements import Speedup as PairedSpeedup
from kdcli.disk import cache_key, read_json, write_atomic
from kdcli.messages import log
from kdcli.metrics.cascade import Answers, Rankings, Trial, choose, rows_needed, upper_limit
from kdcli.models.files import CONFIG_FILE, FACTS
from kdcli.models.model import all_rows, training_rows, write_training_rows
from kdcli.report.schema import CascadeFacts, Report
from kdcli.report.text import percent
from kdcli.report.titles import SELECTION
from kdcli.types import Array, Card
from kdcli.verbs.compress.card import cascade_card
from kdcli.verbs.compress.limits import POINT
from kdcli.verbs.compress.record import Candidate
from kdcli.verbs.compress.scored import ERROR, TEACHER, CandidateScores, read
from kdcli.verbs.compress.steps import Step
from kdcli.verbs.compress.verb_steps import ANSWERS
from kdcli.workloads.rerank import TASKS

if TYPE_CHECKING:
    from kdcli.recipe.sections import RunOptions
    from kdcli.verbs.compress.search import Search

MAX_CASCADES = 3
"""Maximum number of cascades, the fastest ones, that are scored next to the candidates."""
FORMAT = "onnx"
MERGED = ("models", "latency", "evaluations", "comparisons", "decisions")
"""The lists of a report to which an evaluation of cascades adds."""


@dataclass(frozen=True)
class Found:
    """A cascade that keeps the goal on the selection rows.

    Attributes:
        first, second: The names of the small model and of the larger one.
        trial: Its setting.
        ms: Its mean latency.
    """

    first: str
    second: str
    trial: Trial
    ms: float

    @property
    def name(self) -> str:
        """The name of the candidate."""
        return f"{self.first}+{self.second}"


def read_answers(folder: Path) -> dict[str, Answers] | dict[str, Rankings]:
    """Read the answers of the models in an evaluation's directory, by name."""
    adapter = TypeAdapter(dict[str, Answers] | dict[str, Rankings])
    return adapter.validate_python(read_json(folder / ANSWERS, max_bytes=1 << 30))


def with_cascades(search: Search, scores: CandidateScores, folder: Path) -> CandidateScores:
    """Add the fastest cascades that keep `max_drop`, if they are faster than what keeps it alone.

    Args:
        search: The search.
        scores: The scores of the candidates.
        folder: The directory of their evaluation.
    """
    found, search.no_cascade = find(scores, folder)
    if not found:
        return scores
    steps, folders = search.steps, {scores.teacher.name: scores.teacher.folder}
    folders |= {one.name: one.folder for one in scores.candidates}
    for one in found:
        step = cascade_step(search, one, folders)
        steps.require(step)
        second = search.candidates[one.second]
        place = steps.relative(steps.path(step))
        search.candidates[one.name] = Candidate(one.name, place, "", second.parent, second.model)
        folders[one.name] = steps.path(step)
    models = {TEACHER: search.teacher} | {one.name: str(folders[one.name]) for one in found}
    step = search.make.score(f"{SELECTION}-cascades", models)
    steps.require(step)
    own, report = steps.result(step).report, scores.report
    rows = [row for one in found for row in cascade_rows(report, one)]
    added = own.model_copy(update={"latency": rows})
    merged = report.model_copy(
        update={
            key: [
                *getattr(report, key),
                *(part for part in getattr(added, key) if _name(part) != TEACHER),
            ]
            for key in MERGED
        }
    )
    facts = {one.name: facts_of(one) for one in found}
    read_scores = read(merged, folders, scores.goal)
    read_scores = read_scores.with_latencies(merged, search.recipe.price_per_hour)
    return replace(
        read_scores,
        candidates=[replace(one, cascade=facts.get(one.name)) for one in read_scores.candidates],
    )


def _name(part: object) -> str:
    return str(getattr(part, "model", None) or getattr(part, "name", ""))


def find(scores: CandidateScores, folder: Path) -> tuple[list[Found], str]:
    """Return the fastest cascades that keep `max_drop`, or why there are none.

    A cascade is only found if it is faster than every candidate that keeps the goal alone.
    """
    goal, error = scores.goal, ERROR
    assert goal.max_drop is not None
    max_risk = goal.max_drop * POINT
    exports = [one for one in scores.candidates if (one.folder / FORMAT).is_dir()]
    if len(exports) < 2:
        names = ", ".join(one.name for one in exports) or "none"
        return [], (
            f"a cascade needs two ONNX candidates, and there is only: {names}. Add onnx or "
            "onnx-int8 to plan.backends, or shapes to plan.shapes."
        )
    if not (folder / ANSWERS).is_file():
        return [], (
            "the candidates were scored by a version of kdcli without cascades. Start again with "
            "--overwrite."
        )
    answers = read_answers(folder)
    alone = [one.ms for one in exports if not goal.misses(one, scores.teacher)]
    found, keeps, beyond = list[Found](), False, dict[str, Trial]()
    for first, second in permutations(exports, 2):
        if first.ms >= second.ms:
            continue
        trials = answers[first.name].trials(answers[second.name], answers[TEACHER])  # type: ignore[arg-type]
        trial, too_risky = choose(trials, max_risk, error)
        if trial is not None and trial.asked < 1:
            keeps = True
            ms = first.ms + trial.asked * second.ms
            if trial.asked and ms < min(alone, default=float("inf")):
                found.append(Found(first.name, second.name, trial, ms))
        elif too_risky is not None:
            beyond[f"{first.name}+{second.name}"] = too_risky
    if found:
        return sorted(found, key=lambda one: one.ms)[:MAX_CASCADES], ""
    if keeps or not beyond:
        return [], "none is faster than the candidates that meet the goal alone."
    limits = {name: upper_limit(one.losses_N, error) for name, one in beyond.items()}
    name = min(limits, key=limits.__getitem__)
    losses_N, limit = beyond[name].losses_N, limits[name]
    ranks = isinstance(answers[TEACHER], Rankings)
    lost = f"up to {percent(limit)} % of the answers of {name} may change"
    if ranks:
        lost = f"the rankings of {name} may score up to {limit / POINT:.2f} points less"
    needed = rows_needed(losses_N, max_risk, error)
    whys = [
        f"none keeps --max-drop {goal.max_drop:g}: on {len(losses_N):,} selection rows, {lost}.",
        describe_needed(needed, loss_name(ranks=ranks), SELECTION),
    ]
    if FORMAT not in answers:
        whys.append(f"Add {FORMAT} to plan.backends: in float32, the model itself loses nothing.")
    return [], " ".join(whys)


def loss_name(*, ranks: bool) -> str:
    """Name what a cascade's bound limits."""
    return "mean loss" if ranks else "rate of changes"


def describe_needed(needed: int | None, loss: str, rows: str) -> str:
    """Say how many rows would show that a loss is within the goal; None if no number would."""
    if needed is None:
        return f"More {rows} rows do not help, because the {loss} itself is not below the goal."
    return (
        f"At the same {loss}, about {needed:,} {rows} rows would be enough: give more rows, or "
        f"raise data.{rows}_rows if they come from the training rows, with --overwrite or another "
        "-o."
    )


def facts_of(one: Found) -> CascadeFacts:
    """Return the facts of a cascade, with the limit that the selection rows give."""
    trial = one.trial
    return CascadeFacts(
        first=one.first,
        second=one.second,
        setting=trial.setting,
        asked=trial.asked,
        risk=upper_limit(trial.losses_N, ERROR),
    )


def cascade_rows(report: Report, one: Found) -> list[LatencyRow]:
    """Return the latencies of a cascade: the first model's, and the second's where it is asked.

    Medians become means over the texts. At the 95th percentile, a text is read twice if more than
    5 % of the texts are.
    """
    by_cell = {(row.model, row.cell): row for row in report.latency}
    asked, rows = one.trial.asked, []
    for (name, cell), first in by_cell.items():
        second = by_cell.get((one.second, cell))
        if name != one.first or second is None:
            continue
        means = {
            key: getattr(first, key) + asked * getattr(second, key)
            for key in ("p50_ms", "p75_ms", "p90_ms", "mean_ms")
        }
        worst = max((first, second), key=lambda row: ("ok", "noisy", "unstable").index(row.status))
        rows.append(
            first.model_copy(
                update={
                    **means,
                    "model": one.name,
                    "p95_ms": first.p95_ms + (second.p95_ms if asked > 0.05 else 0.0),
                    "p99_ms": None,
                    "status": worst.status,
                    "iqr_over_p50": max(first.iqr_over_p50, second.iqr_over_p50),
                    "speedup": _speedup(first.speedup, second.speedup, asked),
                    "tokens_per_second": None,
                    "first_call_ms": None,
                }
            )
        )
    return rows


def _speedup(
    first: PairedSpeedup | None, second: PairedSpeedup | None, asked: float
) -> PairedSpeedup | None:
    if first is None or second is None:
        return None

    def at(key: str) -> float:
        return float(1 / (1 / getattr(first, key) + asked / getattr(second, key)))

    return first.model_copy(
        update={
            **{key: at(key) for key in ("median", "low", "high")},
            "unstable": first.unstable or second.unstable,
        }
    )


def cascade_step(search: Search, one: Found, folders: Mapping[str, Path]) -> Step:
    """Return the step that writes a cascade's directory."""
    first, second, setting = folders[one.first], folders[one.second], one.trial.setting
    is_reranker = search.recipe.task in TASKS
    settings = {"keep": int(setting)} if is_reranker else {"threshold": setting}
    kind = None if is_reranker else search.kind

    def call(options: RunOptions) -> None:
        assert options.output_dir is not None
        write_cascade(options.output_dir, first, second, settings, kind)

    values = {"first": str(first), "second": str(second), **settings}
    return Step(one.name, "cascade", values, call)


def write_cascade(
    folder: Path, first: Path, second: Path, settings: Mapping[str, float], kind: str | None
) -> None:
    """Write the directory of a cascade from two exports.

    Args:
        folder: The directory.
        first: The export of the small model.
        second: The export of the larger model.
        settings: What config.json holds.
        kind: The kind of the answers; None for a reranker, which has no single file.
    """
    shutil.rmtree(folder, ignore_errors=True)
    small, large = open_export(str(first)), open_export(str(second))
    shutil.copytree(second, folder, ignore=shutil.ignore_patterns("README.md", FACTS))
    rows = (training_rows(str(part)) for part in (first, second))
    write_training_rows(folder, all_rows(*rows))
    shared = _tokenizer(first) == _tokenizer(second)
    (folder / FIRST / FORMAT).mkdir(parents=True)
    for name in small.files:
        shutil.copy(first / name, folder / FIRST / name)
    for file in first.glob("*"):
        is_read = file.name in (CONFIG_FILE, FACTS) or not shared
        if file.is_file() and is_read and file.suffix != ".md":
            shutil.copy(file, folder / FIRST)
    config = read_json(folder / CONFIG_FILE) | {KEY: settings}
    write_atomic(folder / CONFIG_FILE, json.dumps(config, indent=2) + "\n")
    files, threshold = dict(large.files), settings.get("threshold")
    if threshold is not None and kind is not None:
        try:
            write_single_file(
                small.file, large.file, folder / SINGLE_FILE, kind, threshold, shared=shared
            )
            files[SINGLE_FILE] = (folder / SINGLE_FILE).stat().st_size
        except ValueError as error:  # protobuf holds at most 2 GB.
            log(f"{SINGLE_FILE} is not written: {error}")
    text = cascade_card(small, large, folder, kind, shared=shared)
    write_atomic(folder / "README.md", text)
    facts = read_json(second / FACTS) | {"files": files, "card": asdict(_card_of(small, large))}
    write_atomic(folder / FACTS, json.dumps(facts, indent=2) + "\n")


def _card_of(small: Export, large: Export) -> Card:
    """Return the larger model's card, with the size of both models."""
    own, other = large.card, small.card
    return replace(
        own,
        params_total=own.params_total + other.params_total,
        params_embedding=own.params_embedding + other.params_embedding,
        params_transformer=own.params_transformer + other.params_transformer,
        params_nonzero=own.params_nonzero + other.params_nonzero,
        bytes=own.bytes + other.bytes,
        sha256=cache_key(own.sha256, other.sha256),
    )


def _tokenizer(folder: Path) -> list[object]:
    """Return what a tokenizer's tokens depend on."""
    config = read_json(folder / "tokenizer_config.json")
    kept = ("model_max_length", "model_input_names", "do_lower_case")
    return [read_json(folder / TOKENIZER_FILE), *(config.get(key) for key in kept)]


def is_cascade(folder: Path) -> bool:
    """Whether a directory holds a cascade."""
    return (folder / FIRST / FACTS).is_file()


def verified_losses(folder: Path, name: str) -> Array:
    """Return a cascade's loss on each verification row, given the directory of the evaluation."""
    answers = read_answers(folder)
    return answers[name].losses(answers[TEACHER])  # type: ignore[arg-type]
