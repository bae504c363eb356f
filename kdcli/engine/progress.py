"""Progress of a run on stderr: a live bar on a terminal, one line every few seconds elsewhere, nothing with `-q`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, ClassVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from kdcli.engine.processes import is_main

LINE_SECONDS = 5.0
"""Between two lines where there is no terminal."""
PACE_STEPS = 5
"""Steps after the first from which the remaining time is estimated."""


class Progress:
    """Shows the progress of a run of `steps` steps, on the main rank only."""

    console: ClassVar[Console] = Console(stderr=True, highlight=False)

    def __init__(self, steps: int, done: int, shown: bool) -> None:
        self.steps, self.done = steps, done
        self.shown = shown and not self.console.quiet
        self.live = self.shown and self.console.is_terminal
        self.last_line = time.monotonic()
        self.first: tuple[int, float] | None = (
            None  # The first step of this process, and when it was done
        )
        self.bar = Bar(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("{task.fields[facts]}"),
            TextColumn("elapsed"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
            console=self.console,
            disable=not self.live,
            transient=False,
        )
        self.task = self.bar.add_task("train", total=steps, completed=done, facts="", left="")

    def __enter__(self) -> Progress:
        self.bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.bar.stop()

    def update(self, step: int, record: Mapping[str, Any]) -> None:
        """Show a step's loss and speed, and its held-out loss if it was evaluated."""
        if not self.shown:
            return
        rate = record["tokens"] / record["seconds"] if record["seconds"] else 0.0
        facts = f"loss {record['loss']:.4f}  {rate:,.0f} tokens/s"
        if "held_out" in record:
            metrics = "".join(
                f", {name} {value:.4f}"
                for name, value in list(record.get("metrics", {}).items())[:2]
            )
            self.log(f"step {step}: held-out loss {record['held_out']['loss']:.4f}{metrics}")
        now = time.monotonic()
        left = self._left(step, now)
        if self.live:
            self.bar.update(self.task, completed=step, facts=facts, left=left)
            return
        if now - self.last_line >= LINE_SECONDS or step == self.steps:
            self.log("  ".join(filter(None, [f"step {step}/{self.steps}", facts, left])))
            self.last_line = now

    def _left(self, step: int, now: float) -> str:
        """The remaining time at the mean pace since the first step, which is slower than the others; empty where it is
        not known yet, and at the end."""
        self.first = self.first or (step, now)
        taken = step - self.first[0]
        if taken < PACE_STEPS or step == self.steps:
            return ""
        seconds = (now - self.first[1]) / taken * (self.steps - step)
        hours, minutes = divmod(round(seconds) // 60, 60)
        return f"{hours}:{minutes:02}:{round(seconds) % 60:02} left"

    @classmethod
    def log(cls, *messages: str) -> None:
        """Print a line each on stderr, above a live bar, in the main process only."""
        for message in messages if is_main() else ():
            cls.console.print(message, markup=False, soft_wrap=True)
