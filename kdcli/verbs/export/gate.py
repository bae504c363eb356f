"""Write a file whose loss is bounded, with as few products in float32 as the bound allows.

The products whose rounding causes the largest errors stay in float32.
"""

from collections.abc import Sequence

from torch import nn

from kdcli.data.batches import BucketOrder
from kdcli.deploy.backends import PACKED, kept_in
from kdcli.deploy.calibrate import (
    Rounding,
    by_key,
    calibrate,
    kernel_for,
    keys_of,
    product_errors,
    products,
    round_tables,
    smallest_count,
)
from kdcli.deploy.codebook import CODED_ROWS
from kdcli.deploy.export import ModelFile, Recorded
from kdcli.deploy.half import nodes_beyond_half
from kdcli.deploy.integer_training import ROWS, train_integers
from kdcli.deploy.rounding import BLOCK
from kdcli.errors import GateError, MachineError
from kdcli.listing import joined
from kdcli.messages import log
from kdcli.metrics.resolution import exceeds
from kdcli.run.context import cpu_session
from kdcli.types import Batch
from kdcli.verbs.export.export_check import MIN_CALIBRATION_TEXTS, ExportCheck
from kdcli.verbs.export.facts import Attempt, FileComparison, GatedFile, Product

QUANTISED = ("int8", PACKED, "q4")
"""Precisions that round product by product."""
MEASURED_BATCHES = 4
"""Number of batches of texts on which the error of each product is measured."""


def write_gated(
    graph: Recorded,
    check: ExportCheck,
    max_drop: float | None,
    *,
    exact: bool = False,
    steps: int = 0,
) -> GatedFile:
    """Write a file that may be used and loses at most `max_drop` points.

    Args:
        graph: The graph of the model in the wanted precision.
        check: Compares a file with torch.
        max_drop: The largest drop of the first metric, in points; None for any drop.
        exact: Refuse an excess of less than one row too.
        steps: The number of steps for which packed integers are trained.

    Raises:
        GateError: The file loses more, even with every product in float32.
        MachineError: The file's vectors are not torch's.
    """
    search = _Search(graph, check, max_drop, exact=exact, steps=steps)
    most = len(products(graph.network.model)) if graph.precision in QUANTISED else 0
    count = smallest_count(most, search.holds)
    if count is None:
        raise search.failure()
    if search.attempts[-1].in_float != count:
        # The best version was not the last one, so write it again.
        search.holds(count)
        search.attempts.pop()
    return search.result(count)


class _Search:
    """Writes versions of a file, and remembers the latest one."""

    def __init__(
        self,
        graph: Recorded,
        check: ExportCheck,
        max_drop: float | None,
        *,
        exact: bool,
        steps: int,
    ) -> None:
        self.graph, self.check, self.max_drop, self.exact = graph, check, max_drop, exact
        self.attempts: list[Attempt] = []
        self.errors: dict[str, float] = {}
        self.reason = ""
        self.calibration: Sequence[Batch] = []
        self.calibrated_on = ""
        self.roundings: dict[str, Rounding] = {}
        self.in_int8: dict[str, Rounding] = {}
        self.beyond_half: set[str] = set()
        if graph.precision in QUANTISED:
            self._calibrate()
            if graph.precision == PACKED and steps:
                self._train(steps)
        elif graph.precision == "fp16":
            # A CPU computes such a file in float32, so no comparison would show an overflow.
            self.beyond_half = nodes_beyond_half(graph.plain, check.batches())
        self.latest: tuple[ModelFile, FileComparison] | None = None

    def holds(self, count: int) -> bool:
        """Write the file with `count` products in float32. Return whether it may be used."""
        graph = self.graph
        if count and not self.errors:
            self._measure_errors()
        model = graph.network.model
        names = list(self.errors)[:count]
        kept = keys_of(model, names)
        if graph.precision == PACKED:
            in_int8 = {name: self.in_int8[name] for name in names if name in self.in_int8}
            file = graph.write(frozenset(), by_key(model, self.roundings | in_int8), kept)
        else:
            file = graph.write(kept | self.beyond_half, by_key(model, self.roundings))
        comparison = self.check.compare(file)
        self.latest = file, comparison
        self.reason = self.check.too_far(comparison) or self._excess(comparison)
        self.attempts.append(Attempt(count, comparison.drop, not self.reason))
        mixed = [f"{count} matrix product{'s' if count > 1 else ''}"] if count else []
        if self.beyond_half:
            mixed.append(f"{len(self.beyond_half)} operations with values too large for it")
        rest = f", {joined(mixed)} in {kept_in(graph.precision)}" if mixed else ""
        log(f"{graph.precision} file{rest}: {self.reason or self._kept_bound(comparison)}")
        return not self.reason

    def failure(self) -> MachineError | GateError:
        """Return the error to raise if no version of the file may be used."""
        assert self.latest is not None
        kind = MachineError if self.check.too_far(self.latest[1]) else GateError
        even_so = (
            f" even with every product in {kept_in(self.graph.precision)}" if self.errors else ""
        )
        return kind(
            f"the file in {self.graph.precision} is worse than allowed{even_so}: {self.reason}",
            "allow more (--max-drop), or export in full precision or to the other format",
        )

    def result(self, count: int) -> GatedFile:
        """Return the latest file, which has `count` products in float32."""
        assert self.latest is not None
        ranked = [
            Product(name=name, error=error, is_kept=rank < count)
            for rank, (name, error) in enumerate(self.errors.items())
        ]
        file, comparison = self.latest
        return GatedFile(
            file,
            comparison.chosen_by_search() if count else comparison,
            self.max_drop,
            self._tolerance(comparison),
            self.attempts,
            ranked,
            f"{len(self.check.texts.compared)} {self.check.texts.compared_from}",
            self.calibrated_on,
            len(self.beyond_half),
            kept_in(self.graph.precision),
        )

    def _calibrate(self) -> None:
        """Choose the integers of each linear."""
        graph = self.graph
        self.calibration = self.check.calibration()
        texts = sum(len(batch["input_ids"]) for batch in self.calibration)
        self.calibrated_on = f"{texts} {self.check.texts.calibration_from}"
        log(f"choosing the integers on {self.calibrated_on}")
        if self.check.texts.from_package:
            log(
                f"the model may read other texts: give at least {MIN_CALIBRATION_TEXTS} of them, "
                "as --data without --task or as training rows of the task, for a closer file"
            )
        self.roundings = self._calibrated(graph.precision)
        if graph.precision != PACKED:
            return
        model = graph.network.model
        parts = products(model).values()
        linears = [part for part in parts if isinstance(part, nn.Linear)]
        rows = [part.num_embeddings for part in parts if isinstance(part, nn.Embedding)]
        small = sorted(count for count in rows if count < CODED_ROWS)
        if small:
            listed = ", ".join(map(str, small))
            log(
                f"{len(small)} of {len(rows)} tables stay in plain int8, because they have fewer "
                f"than {CODED_ROWS:,} rows ({listed})"
            )
        if len(small) < len(rows):
            log("choosing the codes of tables, which may take minutes if they are large")
        self.roundings |= round_tables(model, graph.scored_outputs, self.calibration)
        widths = [linear.in_features for linear in linears]
        odd = [width for width in widths if width % BLOCK]
        if odd:
            listed = ", ".join(map(str, sorted(set(odd))))
            log(
                f"{len(odd)} of {len(widths)} products stay in plain int8, because their widths "
                f"({listed}) are no multiples of {BLOCK}"
            )

    def _train(self, steps: int) -> None:
        """Train the integers so that the outputs come closer to the model's."""
        graph, rows = self.graph, self.check.training_rows(steps * ROWS)
        self.calibrated_on += f" and trained for {steps} steps on {len(rows):,}"
        log(f"training the integers for {steps} steps on {len(rows):,} texts")
        self.roundings = train_integers(
            graph.network.model,
            graph.kept_outputs,
            self.roundings,
            kernel_for(graph.format, graph.precision, graph.network.model),
            rows,
            BucketOrder(rows.lengths, ROWS, ROWS, seed=0),
            steps,
            cpu_session(),
        )

    def _calibrated(self, precision: str) -> dict[str, Rounding]:
        """Return the integers of each linear in a precision."""
        graph = self.graph
        kernel = kernel_for(graph.format, precision, graph.network.model)
        return calibrate(graph.network.model, graph.scored_outputs, self.calibration, kernel)

    def _measure_errors(self) -> None:
        """Measure the error that each product causes if it alone is rounded."""
        graph = self.graph
        log(f"measuring the error of each product: {self.reason}")
        self.errors = product_errors(
            graph.network.model,
            graph.scored_outputs,
            self.calibration[:MEASURED_BATCHES],
            kernel_for(graph.format, graph.precision, graph.network.model),
            self.roundings,
        )
        if graph.precision == PACKED:
            self.in_int8 = self._calibrated("int8")
            # The file should become as little larger as possible.
            sizes = {n: part.weight.numel() for n, part in products(graph.network.model).items()}
            ranked = sorted(self.errors, key=lambda name: -(self.errors[name] ** 2) / sizes[name])
            self.errors = {name: self.errors[name] for name in ranked}

    def _excess(self, comparison: FileComparison) -> str:
        """Return in words that a drop exceeds the bound; empty if it does not."""
        if self.max_drop is None:
            return ""
        drop = comparison.drop
        assert drop is not None, "a bound needs a task"
        if not exceeds(drop, self.max_drop, self._tolerance(comparison)):
            return ""
        return f"{drop:.2f} points lost, allowed {self.max_drop:g}"

    def _tolerance(self, comparison: FileComparison) -> float:
        """Return the smallest excess over the bound that counts, in points.

        Rows cannot show less than one row, which is not worth a product in float32.
        """
        return 0.0 if self.exact or self.max_drop is None else comparison.points_per_row

    def _kept_bound(self, comparison: FileComparison) -> str:
        """Return why a file may be used."""
        drop = comparison.drop
        if self.max_drop is None or drop is None:
            return "its outputs agree with torch's"
        lost = f"{drop:z.2f} points lost, allowed {self.max_drop:g}"
        if not exceeds(drop, self.max_drop):
            return lost
        row = f"one row ({self._tolerance(comparison):.2f} points)"
        return f"{lost}, and an excess of less than {row} is ignored"
