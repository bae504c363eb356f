"""What is wrong with labelled rows: those that cannot be used, all at once, and labels that look
like mistakes."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from kdcli.data.rows import BadRow
from kdcli.data.tasks import OWN
from kdcli.errors import UsageError
from kdcli.types import Example, Task

LISTED = 10  # Places of bad rows, and classes, that a message names.
FEW_ROWS = 10  # A class of fewer is said to be small.
NO_ANSWER = frozenset(
    ["n/a", "na", "none", "null", "nan", "nil", "unknown", "undefined", "-", "--", "?", "#n/a"]
)
SKIP = "--set data.skip_bad=true leaves such rows out"


class BadRows:
    """Collects rows that cannot be used, by what is wrong; a row counts once, with its first
    fault."""

    def __init__(self) -> None:
        self._places: set[str] = set()
        self._kinds: dict[str, list[BadRow]] = {}
        self._counts: Counter[str] = Counter()

    def __call__(self, row: BadRow) -> None:
        """Add a row."""
        if row.where in self._places:
            return
        self._places.add(row.where)
        self._counts[row.problem] += 1
        if self._counts[row.problem] <= LISTED:
            self._kinds.setdefault(row.problem, []).append(row)

    def settle(self, usable: int, *, skip: bool) -> list[str]:
        """With `skip` notes on what was left out, else a UsageError that counts and places every
        kind of fault."""
        count, lines = len(self._places), [self._line(problem) for problem in self._kinds]
        if not count:
            return []
        if skip and usable:
            return [f"left out {count:,} of {count + usable:,} rows that cannot be used:", *lines]
        first = next(iter(self._kinds.values()))[0]
        # Where every row is bad, the rows are not to blame.
        hints = [hint for hint in (first.hint, SKIP if usable else None) if hint]
        if count > 1 and (usable or len(lines) > 1):
            lines = [
                f"{count:,} of {count + usable:,} rows cannot be used:",
                *(f"  {line}" for line in lines),
            ]
            raise UsageError("\n".join(lines), "; ".join(hints))
        raise UsageError(first.message, "; ".join(hints) or None)

    def _line(self, problem: str) -> str:
        first, *others = self._kinds[problem]
        if not others:
            return first.message
        file = first.where.rpartition(":")[0] + ":"
        more = "" if self._counts[problem] <= LISTED else ", ..."
        places = ", ".join(row.where.removeprefix(file) for row in others)
        return f"{self._counts[problem]:,} rows: {first.message}; also {places}{more}"


def class_counts(task: Task, examples: Iterable[Example]) -> list[int]:
    """How often each class occurs."""
    counts: Counter[Any] = Counter()
    for example in examples:
        counts.update(example.label if isinstance(example.label, tuple) else [example.label])
    return [counts[number] for number in range(len(task.labels))]


def looked_over(task: Task, examples: Sequence[Example]) -> list[str]:
    """The count of each class of the training rows, and a line for each doubt about labels and
    texts."""
    lines = []
    if task.labels:
        counts = dict(zip(task.labels, class_counts(task, examples), strict=True))
        lines.append(
            f"training {'words' if task.kind == 'tokens' else 'rows'} by class: {_counted(counts)}"
        )
        lines += _doubts(counts, examples, task) if task.name == OWN else []
    empty = [e.where for e in examples if not "".join(e.texts).strip()]
    if empty:
        lines.append(f"{_rows(len(empty))} without any text: {_listed(empty)}")
    return lines


def _doubts(counts: dict[str, int], examples: Sequence[Example], task: Task) -> list[str]:
    """Lines on classes that are one but for case or space, that mean no answer, or that are
    small."""
    alike: dict[str, list[str]] = {}
    for name in counts:
        alike.setdefault("".join(name.split()).casefold(), []).append(name)
    lines = [
        f"classes that differ in case or white space alone: {' and '.join(map(repr, names))} "
        f"({', '.join(f'{counts[n]:,}' for n in names)} rows; first "
        f"{_places(examples, task, names[1])})"
        for names in alike.values()
        if len(names) > 1
    ]
    lines += [
        f"class {name!r} reads like a missing label: {_places(examples, task, name)}"
        for name in counts
        if name.strip().casefold() in NO_ANSWER
    ]
    small = {name: count for name, count in counts.items() if count < FEW_ROWS}
    if small and task.kind in ("class", "multi"):
        lines.append(f"classes of fewer than {FEW_ROWS} training rows: {_counted(small)}")
    return lines


def _places(examples: Sequence[Example], task: Task, name: str) -> str:
    number = task.labels.index(name)
    return _listed(
        [
            e.where
            for e in examples
            if number == e.label or (isinstance(e.label, tuple) and number in e.label)
        ]
    )


def _listed(places: Sequence[str]) -> str:
    return ", ".join(places[:3]) + (f" and {len(places) - 3:,} more" if len(places) > 3 else "")


def _rows(count: int) -> str:
    return f"{count:,} training row{'s' if count > 1 else ''}"


def _counted(counts: dict[str, int]) -> str:
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    more = "" if len(ordered) <= LISTED else f" ... {len(ordered)} classes in all"
    return ", ".join(f"{name} {count:,}" for name, count in ordered[:LISTED]) + more
