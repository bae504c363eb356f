"""Read CoNLL text: a word and its tags on each line, and an empty line after each sentence."""

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence

from kdcli.data.rows import BadRow, NamesOfColumns, OnBadRow, Row

ENDINGS = ("conll", "conllu", "bio", "iob", "iob2")
TAG = re.compile(r"O|[BIESLUMW]-\S+")
LINE = re.compile(rf"-DOCSTART-.*|\S+(?:[ \t]+\S+)*[ \t]+(?:{TAG.pattern})")
RENAME_HINT = "rename the file, so that its name ends in .conll"
FORM_HINT = "give each word a tag on its line, and each sentence an empty line after it"
MAX_WORDS = 10_000
BOUNDARY = "-DOCSTART-"
FIRST_LINES = 1_000  # Lines that are kept in memory to tell a word from a comment.
SETTING = re.compile(r"#[^\t=]* = ")  # Of a comment such as `# sent_id = 2`.
RULE = re.compile(r"([-=_*#])\1{2,}")  # A line that separates sentences.
UNIVERSAL_COLUMNS = 10
"""Columns of the Universal Dependencies: number, word, lemma, UPOS, XPOS and more."""


def read_conll(name: str, lines: Iterator[tuple[int, str]], on_bad: OnBadRow) -> Iterator[Row]:
    """Read sentences: `tokens` from the first column, `tags` from the last, and `column_2` ...

    If the first column has the tags (BIO) and the last has none, they are exchanged.
    A first column that numbers the words is skipped. Of the ten columns of the Universal
    Dependencies, the words, `upos` and `xpos` are read.

    Args:
        name: The file.
        lines: The numbered lines.
        on_bad: Called with the first bad line of a sentence, which is then skipped.
    """
    first = list(itertools.islice(lines, FIRST_LINES))
    last_cells = Counter(line.rstrip().rpartition("\t")[2] for _, line in first)
    width = previous = 0
    is_whole = True
    sentence: list[tuple[int, list[str]]] = []
    for number, line in itertools.chain(first, lines):
        # A line that is missing was reported as bad.
        is_whole = is_whole and number == previous + 1
        previous = number
        if not line.strip() or line.startswith(BOUNDARY) or RULE.fullmatch(line.strip()):
            if is_whole:
                yield from _row(name, sentence, width, on_bad)
            sentence, is_whole = [], True
            continue
        cells = line.rstrip().split("\t" if "\t" in line else None)
        is_repeated = last_cells[cells[-1]] > 1
        if line.startswith("#") and not _is_tagged(
            line, cells, width, is_first=not sentence, is_repeated=is_repeated
        ):
            # A comment, as before the sentences of the Universal Dependencies.
            if not width and len(cells) > 1 and _begins_word(line):
                on_bad(NamesOfColumns(f"{name}:{number}", line.rstrip()))
            continue
        width = width or len(cells)
        sentence.append((number, cells))
    if is_whole:
        yield from _row(name, sentence, width, on_bad)


def _is_tagged(
    line: str, cells: Sequence[str], width: int, *, is_first: bool, is_repeated: bool
) -> bool:
    """Whether a line that begins with `#` is a word with its tags.

    The first word of a sentence, such as `#topic`, has as many columns as the other words. Spaces
    follow the `#` of a comment, and GermEval writes a tab. The names of the columns, such as
    `#Token` and `Tag`, end in a cell that is no tag.

    Args:
        line: The line.
        cells: Its cells.
        width: The number of columns; 0 before the first word.
        is_first: Whether no word of the sentence was read.
        is_repeated: Whether other lines end in the same cell.
    """
    if TAG.fullmatch(cells[-1]) or not is_first or len(cells) == 1:
        return len(cells) > 1
    if not width:
        return _begins_word(line) and is_repeated
    is_like_others = "\t" in line or not line[1:2].isspace()
    return len(cells) == width and is_like_others and not SETTING.match(line)


def _begins_word(line: str) -> bool:
    """Whether a line that begins with `#` may hold a word, or the name of a column, and more."""
    return "\t" in line and not line[1:2].isspace() and not SETTING.match(line)


def _is_tagged_rule(cells: Sequence[str]) -> bool:
    """Whether the cells of a line are a rule, and tags that mean nothing."""
    return bool(RULE.fullmatch(cells[0])) and {*cells[1:]} <= {"O", "-X-", "_", cells[0]}


def _row(
    name: str, sentence: Sequence[tuple[int, list[str]]], width: int, on_bad: OnBadRow
) -> Iterator[Row]:
    """Yield the row of a sentence, unless it is empty or bad."""
    # A rule may have tags, as the boundaries of documents have.
    if not sentence or (len(sentence) == 1 and _is_tagged_rule(sentence[0][1])):
        return
    if len(sentence) > MAX_WORDS:
        problem = f"the sentence has more than {MAX_WORDS:,} words"
        on_bad(BadRow(f"{name}:{sentence[0][0]}", problem, hint=FORM_HINT))
        return
    for number, cells in sentence:
        if len(cells) != width or width < 2:
            problem = f"the line does not have {max(width, 2)} columns"
            on_bad(BadRow(f"{name}:{number}", problem, hint=FORM_HINT))
            return
    where, words = f"{name}:{sentence[0][0]}", [cells for _, cells in sentence]
    numbers = [cells[0] for cells in words]
    if width == UNIVERSAL_COLUMNS and numbers[0].startswith("1"):
        # Numbers such as 2-3 and 8.1 are of words that are split, or not in the text.
        words = [cells for cells in words if cells[0].isdecimal()]
        columns = list(zip(*words, strict=True))
        yield Row(where, {"tokens": [*columns[1]], "upos": [*columns[3]], "xpos": [*columns[4]]})
        return
    if width > 2 and numbers == [str(number) for number in range(1, len(words) + 1)]:
        words = [cells[1:] for cells in words]
    tokens, *between, tags = map(list, zip(*words, strict=True))
    if all(map(TAG.fullmatch, tokens)) and not any(map(TAG.fullmatch, tags)):
        tokens, tags = tags, tokens
    others = {f"column_{number}": column for number, column in enumerate(between, 2)}
    yield Row(where, {"tokens": tokens, **others, "tags": tags})
