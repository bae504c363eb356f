"""The progress of a run: lines for the log, and a live bar.

The command line prints the lines on stderr. A terminal gets a live bar, and anything else one line
every few seconds. With `-q` there is nothing.
"""

from __future__ import annotations

import logging
import time
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import ClassVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from kdcli.messages import LOG, is_logged, log, time_left
from kdcli.types import REGULARIZER

LINE_SECONDS = 5.0
"""Seconds between two lines if there is no terminal."""
PACE_STEPS = 5
"""Steps after the first one from which the remaining time is estimated."""


@dataclass
class LogRecord:
    """One line of log.jsonl: what is known after a step. None stands for what was not computed.

    Attributes:
        step: The number of finished steps; 0 is the evaluation before the first step.
        loss: The loss of the global batch.
        terms: The loss's terms, without their weights.
        lr: The learning rate.
        grad_norm: The norm of all gradients before clipping.
        tokens: Tokens seen so far.
        held_out: Loss and terms of the held-out examples.
        metrics: Metrics of the held-out examples.
        seconds: Seconds of training so far.
    """

    step: int
    loss: float | None = None
    terms: dict[str, float] | None = None
    lr: float | None = None
    grad_norm: float | None = None
    tokens: int | None = None
    held_out: dict[str, float] | None = None
    metrics: dict[str, float] | None = None
    seconds: float | None = None

    def to_json(self) -> dict[str, object]:
        """Return everything that was computed."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def scalars(self) -> dict[str, float]:
        """Return all numbers under flat names, for trackers."""
        scalars: dict[str, float] = {}
        for name, value in self.to_json().items():
            if isinstance(value, float):
                scalars[name] = value
            elif isinstance(value, dict):
                scalars |= {f"{name}/{key}": number for key, number in value.items()}
        return scalars


class OnStderr(logging.Handler):
    """Prints messages on stderr, above a live bar."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print a message."""
        Progress.console.print(self.format(record), markup=False, soft_wrap=True)


class Progress:
    """Shows the progress of a run, on the main rank only.

    Args:
        steps: The steps of the run.
        done: The steps that a resumed run has already done.
        shown: Whether this process shows anything.
    """

    console: ClassVar[Console] = Console(stderr=True, highlight=False)
    handler: ClassVar[logging.Handler] = OnStderr()

    def __init__(self, steps: int, done: int, shown: bool) -> None:
        self.steps, self.done = steps, done
        self.shown = shown and not self.console.quiet and is_logged()
        self.live = self.shown and self.console.is_terminal and self.handler in LOG.handlers
        self.last_line = time.monotonic()
        # The first step of this process, and when it ended.
        self.first: tuple[int, float] | None = None
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
        traceback: TracebackType | None,
    ) -> None:
        self.bar.stop()

    def update(self, record: LogRecord) -> None:
        """Show a step's loss and speed, and its held-out loss if it was evaluated."""
        if not self.shown:
            return
        step = record.step
        tokens = record.tokens or 0
        seconds = record.seconds or 0.0
        speed = tokens / seconds if seconds else 0.0
        # Held-out losses have no regularizer.
        regularizer = (record.terms or {}).get(REGULARIZER, 0.0)
        added = f" + regularizer {regularizer:.4g}" if regularizer else ""
        facts = f"loss {(record.loss or 0.0) - regularizer:.4f}{added}  {speed:,.0f} tokens/s"
        if record.held_out is not None:
            first_metrics = list((record.metrics or {}).items())[:2]
            metrics = "".join(f", {name} {value:.4f}" for name, value in first_metrics)
            log(f"step {step}: held-out loss {record.held_out['loss']:.4f}{metrics}")
        now = time.monotonic()
        left = self._time_left(step, now)
        if self.live:
            self.bar.update(self.task, completed=step, facts=facts, left=left)
            return
        if now - self.last_line >= LINE_SECONDS or step == self.steps:
            log("  ".join(filter(None, [f"step {step}/{self.steps}", facts, left])))
            self.last_line = now

    def _time_left(self, step: int, now: float) -> str:
        """Return the remaining time at the mean pace since the first step.

        The first step itself is slower than the others. The result is empty at the end, and as
        long as too few steps are known.
        """
        self.first = self.first or (step, now)
        first_step, first_end = self.first
        steps = step - first_step
        if steps < PACE_STEPS or step == self.steps:
            return ""
        return time_left((now - first_end) / steps * (self.steps - step))

    @classmethod
    def attach(cls, *, is_command: bool) -> None:
        """Print messages on stderr.

        Args:
            is_command: Whether a command runs. A program that calls kdcli may handle the messages
                of `kdcli` or of all loggers itself, or choose their level: then nothing is printed
                that it does not ask for.
        """
        LOG.removeHandler(cls.handler)
        if is_command or not LOG.hasHandlers():
            LOG.addHandler(cls.handler)
        if is_command or LOG.level == logging.NOTSET:
            LOG.setLevel(logging.INFO)
