"""The journal of a compression: what was measured and decided, and the seconds that it took.

A resumed compression reads the earlier measurements from log.jsonl, so it decides as before.
"""

import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from kdcli.disk import LOG_FILE
from kdcli.engine.processes import StopRequest
from kdcli.engine.run_dir import RunDir
from kdcli.errors import Interrupted, KdcliError, MachineError, Stopped
from kdcli.report.titles import step_title

T = TypeVar("T")
SCORED = "scored "
"""The beginning of the keys of records that hold candidates which were scored together."""
SPENT = "spent "
"""The beginning of the keys of records that hold only the seconds of an attempt that failed."""


class Unrecorded(Exception):
    """The reason for a failure that may not occur again, so the journal does not record it."""


@dataclass(frozen=True)
class Record:
    """A line of log.jsonl: the JSON form of a value, and the seconds that it took to compute."""

    key: str
    value: object
    seconds: float
    step: int


@dataclass
class Journal:
    """The records of a compression.

    Attributes:
        budget: seconds that all steps may take together.
        stop: whether the user asked the compression to stop.
        run: the claimed directory. Before it is claimed, the journal is only kept in memory.
        source: the directory whose records were read.
        current: what is being computed, for messages.
        clock: the seconds from which durations are computed.
    """

    budget: float | None
    stop: StopRequest
    records: list[Record] = field(default_factory=list)
    run: RunDir | None = None
    source: RunDir | None = None
    current: str = ""
    clock: Callable[[], float] = time.monotonic

    @property
    def seconds(self) -> float:
        """The seconds spent so far, including the earlier processes of a resumed run."""
        return sum(record.seconds for record in self.records)

    @property
    def left(self) -> float:
        """The seconds of the budget that are left."""
        return (self.budget or math.inf) - self.seconds

    def read(self, run: RunDir) -> None:
        """Take the records of an earlier process. Raises MachineError: log.jsonl is damaged."""
        self.source = run
        try:
            self.records = TypeAdapter(list[Record]).validate_python(run.read_log())
        except ValidationError as error:
            raise _damaged(run, error) from None

    def claim(self, run: RunDir) -> None:
        """Write the journal to a claimed directory from now on."""
        before = self.records
        self.read(run)
        self.run = run
        run.cut_log(len(self.records))
        known = {record.key for record in self.records}
        for record in before:
            is_new = record.key not in known or record.key.startswith(SPENT)
            if is_new and record not in self.records:
                self._add(record.key, record.value, record.seconds)

    def _add(self, key: str, value: object, seconds: float) -> None:
        record = Record(key, value, seconds, len(self.records) + 1)
        self.records.append(record)
        if self.run is not None:
            self.run.log(asdict(record))

    def known(self, beginning: str) -> list[str]:
        """Return the keys of the records that begin in this way."""
        return [record.key for record in self.records if record.key.startswith(beginning)]

    def once(self, key: str, kind: type[T], compute: Callable[[], T]) -> T:
        """Return what `compute` returned the first time, also if that was in another process.

        Values are stored as JSON and read back as `kind`. Raises Stopped or Interrupted: the user
        stopped the compression. If `compute` raises, only the seconds are stored, so that the next
        call computes again.
        """
        adapter = TypeAdapter(kind)
        for record in self.records:
            if record.key == key:
                try:
                    return adapter.validate_python(record.value)
                except ValidationError as error:
                    raise _damaged(self.source, error) from None
        self.check()
        self.current = key
        began = self.clock()
        try:
            value = compute()
            # The latency worker takes Ctrl-C itself and returns what it has measured until then.
            self.check()
        except BaseException:
            self._add(f"{SPENT}{key}", None, round(self.clock() - began, 3))
            raise
        self.current = ""
        seconds = round(self.clock() - began, 3)
        self._add(key, adapter.dump_python(value, mode="json", exclude_defaults=True), seconds)
        return value

    def check(self) -> None:
        """Raise Stopped or Interrupted if the user asked the compression to stop."""
        if self.stop.signalled:
            raise self.stopped()

    def stopped(self) -> KdcliError:
        """Return the error of a compression that the user stopped."""
        if self.run is None:
            return Interrupted("stopped before anything was written")
        words = self.current.split()
        where = f"in {step_title(words[1])}" if words[:1] == ["run"] else "between two steps"
        return Stopped(f"stopped {where}", "continue with --resume")


def _damaged(run: RunDir | None, error: ValidationError) -> MachineError:
    assert run is not None
    first = error.errors(include_url=False)[0]
    return MachineError(
        f"{run.path / LOG_FILE} is damaged: {first['msg']}", "start anew with --overwrite"
    )
