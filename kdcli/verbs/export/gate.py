"""Writes a file whose loss is bounded: products that lose most stay in float32, as few as the bound
allows."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kdcli.deploy.export import ModelFile, Recorded
from kdcli.deploy.quantise import keys_of, linears, product_errors, smallest_count
from kdcli.engine.progress import Progress
from kdcli.errors import GateError, MachineError
from kdcli.report.schema import Comparison
from kdcli.types import Batch

ROUNDED = ("int8", "q4")  # Precisions that round product by product


@dataclass(frozen=True)
class Scores:
    """The scores of torch and of a file on one set of rows."""

    task: str
    set: str
    split: str
    n: int
    torch: dict[str, float]
    file: dict[str, float]


@dataclass(frozen=True)
class Found:
    """How a file compares with torch.

    Attributes:
        agreement: of predictions or vectors on texts.
        scores: of both on each set of a workload.
        comparisons: paired differences of these scores.
        drop: points (hundredths) of the first metric that the file lost, in its worst set.
    """

    agreement: dict[str, float]
    scores: list[Scores] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    drop: float | None = None


class Judge(Protocol):
    """Judges a file, and gives rows to calibrate on."""

    def judge(self, file: ModelFile) -> Found: ...

    def too_far(self, found: Found) -> str | None:
        """Why a file may not be used, whatever it scores; None if it may."""

    def calibration(self) -> Sequence[Batch]: ...


def write_gated(
    graph: Recorded, judge: Judge, max_drop: float | None
) -> tuple[ModelFile, Found, dict[str, Any]]:
    """Write a file that may be used and loses at most `max_drop` points, None for any; returns it,
    what it is next to torch, and as facts the products by name, error and whether they stay in
    float32, and what each attempt lost. Raises GateError: it loses more with every product in
    float32; MachineError: its vectors are not those of torch."""
    attempts: list[dict[str, Any]] = []
    errors: dict[str, float] = {}
    latest: tuple[ModelFile, Found] | None = None
    reason = ""

    def holds(count: int) -> bool:
        nonlocal latest, reason
        if count and not errors:
            Progress.log(f"measuring the error of each product: {reason}")
            how = (graph.scored_outputs, judge.calibration(), graph.format, graph.precision)
            errors.update(product_errors(graph.network.model, *how))
        file = graph.write(keys_of(graph.network.model, list(errors)[:count]))
        found = judge.judge(file)
        latest = file, found
        reason = judge.too_far(found) or ""
        if max_drop is not None and not reason:
            assert found.drop is not None, "a bound needs a task"
            # Not `>`: a NaN is no score.
            reason = (
                ""
                if found.drop <= max_drop
                else f"{found.drop:.2f} points lost, allowed {max_drop:g}"
            )
        attempts.append({"in_float": count, "drop": found.drop, "holds": not reason})
        Progress.log(f"{count} products in float32: {reason or 'holds'}")
        return not reason

    count = smallest_count(
        len(linears(graph.network.model)) if graph.precision in ROUNDED else 0, holds
    )
    if count is None:
        assert latest is not None
        kind = MachineError if judge.too_far(latest[1]) else GateError
        raise kind(
            f"the file in {graph.precision} is worse than "
            f"allowed{' with every product in float32' * bool(errors)}: "
            f"{reason}",
            "allow more (--max-drop), or export in full precision or to the other format",
        )
    if attempts[-1]["in_float"] != count:
        holds(count)
        attempts.pop()
    assert latest is not None
    facts: dict[str, Any] = (
        {"max_drop": max_drop, "attempts": attempts} if max_drop is not None or errors else {}
    )
    if errors:
        facts["products"] = [
            {"name": n, "error": e, "float": i < count} for i, (n, e) in enumerate(errors.items())
        ]
    return *latest, facts
