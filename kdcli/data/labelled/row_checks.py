"""Report problems of labelled rows: rows that cannot be used, and labels that look like mistakes.

All problems are reported at once.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from kdcli.data.labelled.label_values import looks, may_be_misspelt, may_be_no_label
from kdcli.data.labelled.partition import text_groups
from kdcli.data.rows import BadRow, Remark
from kdcli.errors import UsageError
from kdcli.listing import class_name, listed
from kdcli.messages import Fact
from kdcli.types import OWN, Example, Task

MAX_PLACES = 3  # of rows, in a message
MAX_LISTED_PROBLEMS = 10  # Bad rows and classes that a message lists.
MIN_CLASS_ROWS = 10  # A class with fewer rows is reported as small.
MAX_COMPARED_NAMES = 1000  # Names that are compared with each other, which takes quadratic time.
MISSPELT_RATIO = 5  # The right name of a class is this many times as frequent as a misspelt one.
CONTRADICTING = ("class", "multi", "tokens")
"""Kinds of task for which a text has one right label."""
WHOLE = "rows"
"""The name of all rows in messages about them, before they are divided into parts."""
SKIP = "to skip these rows, give --set data.skip_bad=true"


class BadRows:
    """Collect rows that cannot be used, grouped by problem.

    A row with several problems counts once, with the first problem.
    """

    def __init__(self) -> None:
        self._places: set[str] = set()
        self._by_problem: dict[str, list[BadRow]] = {}
        self._counts: Counter[str] = Counter()

    @property
    def places(self) -> tuple[str, ...]:
        """The places of all rows, in order."""
        return tuple(sorted(self._places))

    def __call__(self, row: BadRow) -> None:
        """Add a row, unless it is only to be counted."""
        if isinstance(row, Remark) or row.where in self._places:
            return
        self._places.add(row.where)
        self._counts[row.problem] += 1
        if self._counts[row.problem] <= MAX_LISTED_PROBLEMS:
            self._by_problem.setdefault(row.problem, []).append(row)

    def settle(self, usable: int, *, skip: bool) -> list[str]:
        """Return notes on the skipped rows, or refuse the data.

        Args:
            usable: The number of rows that can be used.
            skip: Whether to skip bad rows.

        Raises:
            UsageError: There are bad rows, and they are not skipped or no row can be used. The
                message counts and places each problem.
        """
        count = len(self._places)
        lines = [self._line(problem) for problem in self._by_problem]
        if not count:
            return []
        if skip and usable:
            return [f"skipped {count:,} of {count + usable:,} rows that cannot be used:", *lines]
        first = next(iter(self._by_problem.values()))[0]
        # If no row can be used, skipping does not help.
        hints = [hint for hint in (first.hint, SKIP if usable else None) if hint]
        if count > 1 and (usable or len(lines) > 1):
            lines = [
                f"{count:,} of {count + usable:,} rows cannot be used:",
                *(f"  {line}" for line in lines),
            ]
            raise UsageError("\n".join(lines), "; ".join(hints))
        raise UsageError(first.message, "; ".join(hints) or None)

    def _line(self, problem: str) -> str:
        first, *others = self._by_problem[problem]
        if not others:
            return first.message
        file = first.where.rpartition(":")[0] + ":"
        more = "" if self._counts[problem] <= MAX_LISTED_PROBLEMS else ", ..."
        places = ", ".join(row.where.removeprefix(file) for row in others)
        return f"{self._counts[problem]:,} rows: {first.message}; also {places}{more}"


def class_counts(task: Task, examples: Iterable[Example]) -> list[int]:
    """Count how often each class occurs."""
    counts: Counter[object] = Counter()
    for example in examples:
        counts.update(example.label if isinstance(example.label, tuple) else [example.label])
    return [counts[number] for number in range(len(task.labels))]


def describe_rows(
    task: Task, examples: Sequence[Example], *, with_whole: bool = False
) -> list[str]:
    """Return lines with the class counts of the training rows and warnings about them.

    Args:
        task: The task.
        examples: The training rows.
        with_whole: See `describe_repeats`.
    """
    lines = []
    if task.labels:
        counts = dict(zip(task.labels, class_counts(task, examples), strict=True))
        unit = "words" if task.kind == "tokens" else "rows"
        lines.append(f"training {unit} by class: {_list_counts(counts)}")
        lines += _label_warnings(counts, examples, task) if task.name == OWN else []
    if task.name == OWN:
        repeats = describe_repeats(task, examples, "training rows", with_whole=with_whole)
        lines += filter(None, [repeats])
    lines += filter(None, [describe_empty(examples, "training row")])
    return lines


def describe_empty(examples: Iterable[Example], row: str) -> str:
    """Return a line on the rows without any text; empty if there are none.

    Args:
        examples: The rows.
        row: The name of one of them in the line.
    """
    empty = [e for e in examples if not "".join(e.texts).strip()]
    if not empty:
        return ""
    plural = "s" if len(empty) > 1 else ""
    line = (
        f"{len(empty):,} {row}{plural} without any text: "
        f"{listed((e.where for e in empty), MAX_PLACES)}"
    )
    return Fact(line, f"{row}s without text of {empty[0].file}")


def describe_repeats(
    task: Task, examples: Sequence[Example], rows: str, *, with_whole: bool = False
) -> str:
    """Return a line on rows with the text of an earlier row, and on labels that contradict.

    Args:
        task: The task.
        examples: The rows.
        rows: The name of the rows in the line.
        with_whole: Whether a run logs this line only if it has logged none about all rows.

    Returns:
        The line; empty if no text is repeated.
    """
    groups = text_groups(examples)
    if groups is None:
        return ""
    _, first = np.unique(groups, return_index=True)
    count = len(examples) - len(first)
    again = np.delete(np.arange(len(examples)), first)
    line = (
        f"{count:,} of {len(examples):,} {rows} repeat an earlier text (up to case and spaces; "
        f"first: {examples[again[0]].where})"
    )
    earlier = [examples[int(n)] for n in first[groups]]
    file = examples[again[0]].file
    # All rows may be in several files of a folder, one for each split.
    is_whole = with_whole or rows == WHOLE
    subject = f"repeated {WHOLE} of {file.rpartition('/')[0]}" if is_whole else f"{rows} of {file}"
    differing = np.array(
        [_labels(task, a) != _labels(task, b) for a, b in zip(examples, earlier, strict=True)]
    ).nonzero()[0]
    if task.kind not in CONTRADICTING or not len(differing):
        return Fact(line, subject)
    count, row = len(np.unique(groups[differing])), int(differing[0])
    texts = "1 text has" if count == 1 else f"{count:,} texts have"
    example = f"{earlier[row].where} and {examples[row].where}"
    return Fact(f"{line}; {texts} contradicting labels, for example {example}", subject)


def _labels(task: Task, example: Example) -> object:
    """Return the label of an example; for `multi` the set of its labels."""
    if task.kind == "multi" and isinstance(example.label, tuple):
        return frozenset(example.label)
    return example.label


def _label_warnings(counts: dict[str, int], examples: Sequence[Example], task: Task) -> list[str]:
    """Warn of classes that look alike, mean no answer, or are small."""
    by_spelling: dict[str, list[str]] = {}
    for name in counts:
        by_spelling.setdefault(looks(name), []).append(name)
    lines = [
        "warning: classes that look alike: "
        f"{', '.join(f'{_shown(n)} {counts[n]:,}' for n in names)} ({rare!r} is at "
        f"{_places(examples, task, rare)}); if they are one class, write one name"
        f"{_merging(task, names, counts)}"
        for names in by_spelling.values()
        if len(names) > 1
        for rare in [min(names, key=counts.__getitem__)]
    ]
    lines += [
        f"class {name!r} looks like a missing label: {_places(examples, task, name)}"
        for name in counts
        if may_be_no_label(name)
    ]
    small = {name: count for name, count in counts.items() if count < MIN_CLASS_ROWS}
    if small and task.kind in ("class", "multi"):
        compared = list(counts.items())[:MAX_COMPARED_NAMES]
        lines += [
            f"class {name!r} may be a misspelt {other!r}: {_places(examples, task, name)}"
            for name, few in compared
            for other, count in compared
            if count >= MIN_CLASS_ROWS > few
            and count >= MISSPELT_RATIO * few
            and may_be_misspelt(name, other)
        ]
        lines.append(
            f"classes with fewer than {MIN_CLASS_ROWS} training rows: {_list_counts(small)}"
        )
    return lines


def _merging(task: Task, names: Sequence[str], counts: dict[str, int]) -> str:
    """Return how pandas writes the most frequent name for all of them.

    It is empty if a cell may hold several names, because `replace` compares whole cells.
    """
    if task.kind != "class":
        return ""
    most = max(names, key=counts.__getitem__)
    replaced = {name: most for name in names if name != most}
    column = f"rows[{task.label!r}]"
    return f", in pandas with {column} = {column}.replace({replaced!r})"


def _shown(name: str) -> str:
    """Return a name in quotes, with the numbers of letters that may look like others."""
    return repr(name) if name.isascii() else f"{name!r} = {name!a}"


def _places(examples: Sequence[Example], task: Task, name: str) -> str:
    """List the places of a class's rows."""
    number = task.labels.index(name)
    places = (
        e.where
        for e in examples
        if number == e.label or (isinstance(e.label, tuple) and number in e.label)
    )
    return listed(places, MAX_PLACES)


def _list_counts(counts: dict[str, int]) -> str:
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    return listed(f"{class_name(name)} {count:,}" for name, count in ordered)
