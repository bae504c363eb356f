"""The result of kdcli export."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from kdcli.deploy.usable import Usable
from kdcli.report.text import bytes_of
from kdcli.types import task_name
from kdcli.verbs.export.facts import ExportFacts
from kdcli.verbs.export.readme import difference_text

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Exported(Usable):
    """The result of `kdcli export`.

    Attributes:
        facts: The content of export.json.
        folder: The directory of the export.
    """

    facts: ExportFacts = field(repr=False)
    folder: Path
    trust_remote_code: bool = False

    @property
    def best(self) -> Path:
        """The directory to ship."""
        return self.folder

    def to_json(self) -> str:
        """Return the content of export.json."""
        return self.facts.to_json()

    def to_frame(self) -> pd.DataFrame:
        """Return one row a file: its size, its difference from torch, and the scores of both."""
        import pandas as pd

        rows = []
        for file in self.facts.by_file:
            row: dict[str, object] = {
                "source": self.facts.source,
                "format": self.facts.format,
                "precision": file.precision,
                "max_abs": file.max_abs,
                "relative": file.relative,
                "bytes": file.bytes,
            }
            row |= file.agreement
            for scores in file.scores or ():
                task = f"{scores.task} {scores.set}".strip()
                row |= {f"{task} {name} torch": value for name, value in scores.torch.items()}
                row |= {f"{task} {name} file": value for name, value in scores.file.items()}
            rows.append(row)
        return pd.DataFrame(rows)

    def _repr_html_(self) -> str:
        return str(self.to_frame().to_html(index=False))

    def renderables(self) -> Iterable[object]:
        """Return what the terminal shows: a table, notes, and the directory."""
        facts = self.facts
        table = Table("", "", show_header=False, box=None)
        table.add_row("source", facts.source)
        table.add_row("format", facts.format)
        table.add_row("inputs", ", ".join(facts.inputs))
        table.add_row("outputs", ", ".join(facts.outputs))
        for file in facts.by_file:
            table.add_row("precision", file.precision)
            table.add_row("size", bytes_of(file.bytes))
            table.add_row("next to torch", difference_text(file, facts.kind))
            for scores in file.scores or ():
                values = ", ".join(
                    f"{name} {value:.4f} (torch {scores.torch[name]:.4f})"
                    for name, value in scores.file.items()
                )
                table.add_row(task_name(scores.task), values)
        yield table
        yield from (note for file in facts.by_file for note in file.notes)
        yield f"model in {self.folder} (README.md shows how to run it)"
