"""Account for the rows of a source: how many are read, kept, and left out, and why.

A command has one account for each source and part. The log shows it in one line, and the report has
a table of all accounts. With `--strict-data`, a row that is left out is an error, unless the recipe
asks for it. So is a labelled row without text, or with the text of an earlier row.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from kdcli.data.rows import BadRow, BlankLine, LineBreaks, NamesOfColumns, OutsideShare
from kdcli.data.storage import base_name
from kdcli.errors import UsageError
from kdcli.messages import log_fact
from kdcli.types import Example

EMPTY, BAD, REPEATED = "empty", "bad", "repeated"
LINE_BREAKS = "line breaks in quoted cells"
TRAINED = "trained a model"  # Such rows are withheld from an evaluation.
CUT = "over the number of rows asked for"
OTHER_PART = "in another part of the data"
OUTSIDE_SHARE = "outside the share asked for"
CHOSEN = (CUT, OTHER_PART, OUTSIDE_SHARE)
"""Reasons that follow from the recipe, not from the data."""
STRICT_HINT = "correct the data, or leave out --strict-data"


@dataclass
class LeftOut:
    """Rows that are left out for one reason.

    Attributes:
        reason: The reason.
        count: The number of rows.
        first: The place of the first one; "" if it has none.
    """

    reason: str
    count: int
    first: str

    def __str__(self) -> str:
        place = f" (first: {self.first})" if self.first else ""
        return f"{self.count:,} {self.reason}{place}"


@dataclass
class RowAccount:
    """The account of a source.

    Attributes:
        source: The source, as `--data` names it.
        rows: The word for the counted items: rows, texts or queries. It begins with the split,
            unless this is `train` or all splits are counted together.
        read: The number of rows that were read, with empty lines.
        kept: The number of rows that are used.
        left_out: The other rows.
        line_breaks: The line breaks in quoted cells; None without any. With them, a file has more
            lines than rows.
        in_part: Whether the source has more rows, which were not needed.
    """

    source: str
    rows: str = "rows"
    read: int = 0
    kept: int = 0
    left_out: list[LeftOut] = field(default_factory=list)
    line_breaks: LeftOut | None = None
    in_part: bool = False

    @classmethod
    def of_split(cls, source: str, split: str, rows: str = "rows") -> "RowAccount":
        """Open the account of one split."""
        return cls(source, rows if split == "train" else f"{split} {rows}")

    def add(self, part: "RowAccount") -> None:
        """Add the rows of a part of the source that were read and left out."""
        self.read += part.read
        for one in part.left_out:
            self.leave_out(one.reason, one.first, one.count)
        if part.line_breaks is not None:
            self._add_line_breaks(part.line_breaks.first, part.line_breaks.count)

    def leave_out(self, reason: str, first: str, count: int = 1) -> None:
        """Count rows that are left out; `first` is the place of the first one."""
        for one in self.left_out:
            if one.reason == reason:
                one.count += count
                return
        self.left_out.append(LeftOut(reason, count, first))

    def leave_out_missing(
        self, reason: str, before: Iterable[Example], after: Iterable[Example]
    ) -> None:
        """Count the examples of `before` that are not among the same examples in `after`."""
        kept = set(map(id, after))
        places = [example.where for example in before if id(example) not in kept]
        if places:
            self.leave_out(reason, places[0], len(places))

    def end_before(self, rows: Iterator[object]) -> None:
        """Note whether the source has more rows than the caller needs. This reads the next row."""
        try:
            if next(rows, None) is not None:
                self.read -= 1
                self.in_part = True
        except UsageError:
            # The next row cannot be used, or the next file has none. Neither was counted.
            self.in_part = True

    def on_bad(self, error: BadRow) -> None:
        """Count something that is no error by itself; raise the error of a line that is no row."""
        if isinstance(error, LineBreaks):
            self._add_line_breaks(error.where, error.count)
        elif isinstance(error, BlankLine):
            self.read += 1
            self.leave_out(EMPTY, error.where)
        elif isinstance(error, OutsideShare):
            self.read += 1
            self.leave_out(OUTSIDE_SHARE, error.where)
        elif isinstance(error, NamesOfColumns):
            log_fact(error.message)
        else:
            raise error

    def _add_line_breaks(self, first: str, count: int) -> None:
        self.line_breaks = self.line_breaks or LeftOut(LINE_BREAKS, 0, first)
        self.line_breaks.count += count

    @property
    def used(self) -> int:
        """The number of rows that are not left out so far."""
        return self.read - sum(one.count for one in self.left_out)

    @property
    def key(self) -> tuple[str, str, int]:
        """The key of the account among those of a command."""
        return self.source, self.rows, self.read

    @property
    def line(self) -> str:
        """The account as a line of the log."""
        name = base_name(self.source) or self.source
        left_out = f"; left out: {', '.join(map(str, self.left_out))}" if self.left_out else ""
        breaks = f"; {self.line_breaks}" if self.line_breaks else ""
        read = (
            f"the first {self.read:,} read, more are not needed"
            if self.in_part
            else (f"{self.read:,} read")
        )
        return f"{self.rows} of {name}: {read}, {self.kept:,} kept{left_out}{breaks}"


@dataclass
class Accounts:
    """The accounts of a command.

    Attributes:
        strict: Whether a row that the data is to blame for is an error.
        by_key: The accounts, in the order in which they were closed.
    """

    strict: bool = False
    by_key: dict[tuple[str, str, int], RowAccount] = field(default_factory=dict)

    def clear(self, *, strict: bool) -> None:
        """Begin another command."""
        self.strict = strict
        self.by_key.clear()

    def close(self, account: RowAccount, kept: int) -> None:
        """Complete an account, and log it unless the same one was logged before.

        Args:
            account: The account.
            kept: The number of rows that are used.

        Raises:
            UsageError: The account does not add up, or rows are left out and `strict` is set.
        """
        account.kept = kept
        unexplained = account.used - kept
        if unexplained:
            raise UsageError(
                f"{account.line}: {abs(unexplained):,} {account.rows} are not accounted for",
                "please report this with the data; the result would not be reliable",
            )
        self.check(account)
        if self.by_key.get(account.key) != account:
            log_fact(account.line)
        self.by_key[account.key] = account

    def check(self, account: RowAccount) -> None:
        """Raise a UsageError if rows are left out that the data is to blame for, and `strict`."""
        if self.strict and any(one.reason not in CHOSEN for one in account.left_out):
            raise UsageError(account.line, STRICT_HINT)


ACCOUNTS = Accounts()
"""The accounts of the command that this process runs."""


def is_repeated(text: str, seen: set[int]) -> bool:
    """Whether `--strict-data` is given and an earlier text is the same, up to case and spaces.

    `seen` holds the hashes of the earlier texts.
    """
    if not ACCOUNTS.strict:
        return False
    key = hash(" ".join(text.split()).casefold())
    repeats = key in seen
    seen.add(key)
    return repeats
