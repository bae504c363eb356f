"""Show what a finished compression tried, so that another goal can be chosen."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from kdcli.errors import UsageError
from kdcli.report.finish import RunResult
from kdcli.report.pareto import candidates_on_front
from kdcli.report.schema import Candidate, Compression
from kdcli.report.sections.timings import interval, milliseconds
from kdcli.report.text import megabytes, number

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Front:
    """The candidates of a compression, with their scores on the selection rows.

    Attributes:
        folder: The directory of the run.
        compression: The goal, the candidates and the chosen one.
        fast: The candidates that no faster one matches.
        small: The candidates that no smaller one matches. Neither list has a candidate that the
            choice did not consider.
    """

    folder: Path
    compression: Compression = field(repr=False)
    fast: list[str]
    small: list[str]

    @classmethod
    def read(cls, folder: Path) -> Front:
        """Read a finished compression.

        Raises:
            UsageError: The directory holds none.
        """
        compression = RunResult.read(folder).report.compression
        if compression is None:
            raise UsageError(
                f"{folder} holds no compression", "give the directory of a run of kdcli compress"
            )
        return cls.of(folder, compression)

    @classmethod
    def of(cls, folder: Path, compression: Compression) -> Front:
        """Find the fronts of a compression."""
        fast, small = (candidates_on_front(compression.candidates, cost) for cost in ("ms", "mb"))
        return cls(folder, compression, fast, small)

    def rows(self) -> list[Candidate]:
        """Return the measured candidates, from the best to the worst score."""
        measured = [one for one in self.compression.candidates if one.score is not None]
        return sorted(measured, key=lambda one: -(one.score or 0.0))

    def _records(self) -> list[dict[str, str | float | bool | None]]:
        """Return one row a candidate. The speed-up is None if its times are too unstable."""
        return [
            {
                "name": one.name,
                self.compression.metric: one.score,
                "ms": one.ms,
                "speedup": one.speedup.stated if one.speedup else 1.0,
                "unstable": one.unstable or bool(one.speedup and one.speedup.unstable),
                "mb": one.mb,
                "on_latency_front": one.name in self.fast,
                "on_size_front": one.name in self.small,
            }
            for one in self.rows()
        ]

    def to_frame(self) -> pd.DataFrame:
        """Return one row a candidate.

        A candidate is on a front if no candidate that is as good is faster, or is smaller.
        """
        import pandas as pd

        return pd.DataFrame(self._records())

    def _repr_html_(self) -> str:
        return str(self.to_frame().to_html(index=False))

    def to_json(self) -> str:
        """Return the rows as JSON."""
        return json.dumps(self._records(), indent=2)

    def renderables(self) -> Iterable[object]:
        """Return what the terminal shows."""
        table = Table()
        # A name is what the user copies, so it is never cut off.
        table.add_column("candidate", overflow="fold")
        for header in (self.compression.metric, "ms", "speed-up", "MB", "on the front of"):
            table.add_column(header)
        fronts_by_name = {"latency": self.fast, "size": self.small}
        for one in self.rows():
            fronts = [name for name, front in fronts_by_name.items() if one.name in front]
            chosen = " (chosen)" if one.name == self.compression.chosen else ""
            table.add_row(
                f"{one.name}{chosen}",
                number(one.score),
                milliseconds(one.ms, unstable=one.unstable),
                interval(one.speedup) if one.speedup else "1 (baseline)",
                megabytes(one.mb or 0),
                " and ".join(fronts),
            )
        yield table
        yield (
            f"Scores on {self.compression.rows:,} selection rows. The same command with another "
            "goal and the same -o answers from these candidates, and verifies the chosen one."
        )
