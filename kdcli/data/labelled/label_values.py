"""Read the values of labels: spellings of a class, lists in a string, and values for "no label"."""

import ast
import functools
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from decimal import Decimal
from typing import NamedTuple

Number = int | float | None
"""The number that a label spells, or None if it is a word."""

NO_ANSWER = frozenset(
    [
        *("n/a", "na", "none", "null", "nan", "nil", "unknown", "undefined", "-", "--", "?"),
        *("#n/a", "<na>", "<null>", "n.a.", "nat", "missing", "no label", "unlabeled"),
        *("unlabelled", "todo", "tbd", "skip", "skipped"),
    ]
)
EMPTY_LISTS = frozenset(["none", "nil", "-", "--"])
"""Words for an empty list of labels. The other words mean that nobody knows the labels."""
NO_LABEL_NUMBERS = frozenset(
    [-1, -9, -99, -100, -999, -9999, 99, 255, 999, 9999]
    + [sign * 2**bits - (sign > 0) for bits in (15, 16, 31, 32, 63, 64) for sign in (1, -1)]
)
"""Numbers that data sets write for "no label": survey codes, `ignore_index`, and -1 as an unsigned
integer."""
IGNORED_WORD = "-100"
"""The label of words that losses ignore, in the scripts of transformers."""
BRACKETS = "[]"
PARTS_OF_NAMES = ("/", "&", "+", "#", "\n", "\t", " ")
"""Separators that also occur in names, such as `R&B`. They count only if all parts recur."""
LIST_FORMS = (BRACKETS, "|", ";", ",", *PARTS_OF_NAMES)
"""Forms of a list of labels in a string: in brackets, or with a separator."""
SCORE_COLUMNS = ("score", "rating", "stars", "similarityscore", "relatednessscore")
"""Names of columns of numbers, as `column_key` writes them."""

# Also `array(['a'], dtype=object)` and `frozenset({'a'})`.
_BRACKETED = re.compile(r"(?:\w+\()?(?:\[(.*)\]|\((.*)\)|\{(.*)\})(?:, dtype=[^)]*)?\)?", re.DOTALL)
_CHOICES = re.compile(r"\{\s*['\"]choices['\"]\s*:\s*(\[.*\])\s*\}", re.DOTALL)
_QUOTED = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"", re.DOTALL)
# Spaces and hyphens within a name, but not between two digits.
_SEPARATED = re.compile(r"(?<=[^\W\d])[\s_-]+(?=\w)|(?<=\w)[\s_-]+(?=[^\W\d])")
_DECIMAL_COMMA = re.compile(r"[+-]?\d+,\d+")
_THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2},\d{3}")
_OF_A_SCALE = re.compile(r"[+-]?\d+([.,]\d+)?\s*(%|/\s*\d+)")
_INTEGER = re.compile(r"[+-]?[0-9]+")
_NUMBER = re.compile(
    r"[+-]?(([0-9]+(\.[0-9]*)?|\.[0-9]+)(e[+-]?[0-9]+)?|nan|inf|infinity)", re.IGNORECASE
)
_MAX_DIGITS = 40
# Cyrillic and Greek letters that look like Latin ones, in lower or in upper case.
_CYRILLIC = (0x0430, 0x0432, 0x0435, 0x043A, 0x043C, 0x043D, 0x043E, 0x0440, 0x0441, 0x0442, 0x0443)
_GREEK = (0x03B1, 0x03B2, 0x03B5, 0x03BA, 0x03BC, 0x03B7, 0x03BF, 0x03C1, 0x03F2, 0x03C4, 0x03C5)
_LOOK_ALIKE = (
    dict(zip(_CYRILLIC, "abekmhopcty", strict=True))
    | dict(zip(_GREEK, "abekmhopcty", strict=True))
    | dict(zip((0x0445, 0x0456, 0x0458, 0x0455, 0x03C7, 0x03B9, 0x03BD), "xijsxin", strict=True))
)


MIN_LETTERS, MIN_SHARED_LETTERS = 6, 4
"""Shorter names that differ in one letter are often different words, and so are names whose words
share fewer letters, such as `class A` and `class B`."""
_BETWEEN_WORDS = re.compile(r"[\W_]+")


def number_of(text: str) -> Number:
    """Parse a number, including infinity and NaN; None if the string is not a number."""
    text = text.strip()
    if len(text) > _MAX_DIGITS or not _NUMBER.fullmatch(text):
        return None
    return int(text) if _INTEGER.fullmatch(text) else float(text)


def has_decimal_comma(text: str) -> bool:
    """Whether a string may be a number with a decimal comma."""
    return _DECIMAL_COMMA.fullmatch(text.strip()) is not None


def has_thousands_comma(text: str) -> bool:
    """Whether the comma of a string may separate the thousands of a number."""
    return _THOUSANDS.fullmatch(text.strip()) is not None


def number_with_comma(text: str) -> Number:
    """Parse a number whose fraction follows a comma; None for anything else, also for a point."""
    return None if "." in text else number_of(text.replace(",", ".", 1))


def is_of_a_scale(text: str) -> bool:
    """Whether a string is a number with a percent sign, or with its maximum as in `4.2/5`."""
    return _OF_A_SCALE.fullmatch(text.strip()) is not None


def may_be_number(text: str) -> bool:
    """Whether a person reads a string as a number."""
    return number_of(text) is not None or has_decimal_comma(text) or is_of_a_scale(text)


def may_be_no_label(name: str) -> bool:
    """Whether a label looks like a missing one, if nothing is known of the other labels."""
    number = number_of(name)
    return (
        name.strip().casefold() in NO_ANSWER
        or parse_list(name, BRACKETS) == []
        or (number is not None and number < 0 and number in NO_LABEL_NUMBERS)
    )


def missing_labels(numbers: Mapping[str, Number], *, signed: bool) -> set[str]:
    """Return the labels that stand for no label, by what the other labels are.

    * Words such as `N/A` do if all other labels are numbers, and -1 does if all others are words.
    * Numbers such as -1 or 255 do if the others count the classes from 0 or 1, and are much smaller
      than 255. `{-1, 1}` are two classes.

    Args:
        numbers: All labels, each with the number that it spells.
        signed: Whether `{-1, 0, 1}` are three classes, as of sentiments, and not two.
    """
    # NaN differs from itself.
    rest = {
        name: number for name, number in numbers.items() if number is not None and number == number
    }
    words = numbers.keys() - rest.keys()
    classes_in_words = {word for word in words if word.strip().casefold() not in NO_ANSWER}
    if len(classes_in_words) > 1 and all(map(may_be_no_label, rest)):
        return set(rest)
    if classes_in_words or len(rest) < 2:
        return set()
    codes = {name for name, number in rest.items() if number in NO_LABEL_NUMBERS}
    classes = sorted(number for name, number in rest.items() if name not in codes)
    found = {rest[name] for name in codes}
    is_sign = signed and found == {-1} and classes == [0, 1]
    counts_classes = len(classes) > 1 and classes[0] in (0, 1)
    apart = counts_classes and all(code < 0 or code > 2 * classes[-1] for code in found)
    return words | (codes if apart and not is_sign else set())


def spelling(name: str) -> str:
    """Remove what nobody sees: forms of Unicode, invisible characters, and white space around."""
    if name.isascii():
        return " ".join(name.split())
    visible = (c for c in unicodedata.normalize("NFC", name) if unicodedata.category(c) != "Cf")
    return " ".join("".join(visible).split())


def looks(name: str) -> str:
    """Normalise a name so that names that look the same become equal.

    Ignores case, white space, width, alphabets with the same letters, and full stops at the end.
    """
    visible = spelling(unicodedata.normalize("NFKC", name)).casefold()
    return ("".join(visible.split()).rstrip(".") or visible).translate(_LOOK_ALIKE)


def may_be_misspelt(name: str, other: str) -> bool:
    """Whether two names of some length differ in one letter, or in the order of two.

    A first letter and a plural s tell words apart.
    """
    if min(len(name), len(other)) < MIN_LETTERS or abs(len(name) - len(other)) > 1:
        return False
    start = _same_letters(name, other)
    before = len(_BETWEEN_WORDS.split(name[:start])[-1])
    if not before:
        return False
    end = _same_letters(name[start:][::-1], other[start:][::-1])
    rest, of_other = name[start : len(name) - end], other[start : len(other) - end]
    is_short = max(len(rest), len(of_other)) == 1 or (len(rest) == 2 and rest == of_other[::-1])
    letters = rest + of_other
    after = len(_BETWEEN_WORDS.split(name[len(name) - end :])[0])
    is_plural = not after and letters.casefold() == "s"
    # Names such as topic-1 and topic-2 are different classes.
    is_word = before + after < MIN_SHARED_LETTERS or is_plural or not letters.isalpha()
    return is_short and not is_word


def _same_letters(name: str, other: str) -> int:
    """Return the number of equal letters at the start of two names."""
    return next(
        (n for n, (a, b) in enumerate(zip(name, other, strict=False)) if a != b),
        min(len(name), len(other)),
    )


def _number_key(name: str) -> object:
    number = number_of(name)
    return name if number is None else number


def _without_case(name: str) -> str:
    return spelling(name).casefold()


def _without_separators(name: str) -> str:
    return _SEPARATED.sub("", _without_case(name))


_KEYS: tuple[Callable[[str], object], ...] = (
    str,
    spelling,
    _number_key,
    _without_case,
    _without_separators,
)
"""Keys by which two spellings are the same label, from strict to lenient."""


@functools.lru_cache(maxsize=64)
def _numbers_by_key(labels: tuple[str, ...]) -> list[dict[object, int]]:
    """Return the classes by each of the `_KEYS` that tells all of them apart."""
    tables = []
    for key_of in _KEYS:
        table = {key_of(name): number for number, name in enumerate(labels)}
        usable = len(table) == len(labels) and all(str(key) for key in table)
        tables.append(table if usable else {})
    return tables


def class_number(labels: tuple[str, ...], name: str) -> int | None:
    """Return the number of the class with a name, which may be spelled in another way.

    `1` is `1.0`, and `positive` is `POSITIVE` unless the task has both as classes.
    """
    for key_of, table in zip(_KEYS, _numbers_by_key(labels), strict=True):
        if table and (number := table.get(key_of(name))) is not None:
            return number
    return None


def parse_list(text: str, form: str) -> list[str] | None:
    """Read a list of labels from a string; None if it is not in one of the `LIST_FORMS`."""
    if form != BRACKETS:
        if parse_list(text, BRACKETS) == []:
            return []  # `[]` among lists with a separator
        return [part for each in text.split(form) if (part := each.strip())]
    choices = _CHOICES.fullmatch(text.strip())
    match = _BRACKETED.fullmatch(choices[1] if choices else text.strip())
    if match is None:
        return None
    inner = next(group for group in match.groups() if group is not None).strip()
    if not _is_quoted(text):
        parts = inner.split(",") if "," in inner else inner.split()
        return [part for each in parts if (part := each.strip())]
    # JSON and Python's repr have commas, and NumPy's repr has none.
    if _QUOTED.sub("", inner).strip(", \n"):
        return None
    try:
        return [str(ast.literal_eval(each)) for each in _QUOTED.findall(inner)]
    except (SyntaxError, ValueError):
        return None


def as_cell(label: object) -> object:
    """Write a label that JSON cannot hold, or the choices of Label Studio, as a cell of CSV would.

    Decimals become numbers, and dates and bytes become strings, also in a list. pandas' missing
    date becomes None. Other labels are unchanged.
    """
    if isinstance(label, list):
        return [each if isinstance(each, dict) else as_cell(each) for each in label]
    if isinstance(label, Decimal):
        is_whole = label.is_finite() and label == label.to_integral_value()
        return int(label) if is_whole and label.adjusted() < _MAX_DIGITS else float(label)
    if isinstance(label, date):
        # NaT is a date that differs from itself.
        return label.isoformat() if label == label else None
    if isinstance(label, bytes):
        return label.decode("utf-8", "backslashreplace")
    is_choices = isinstance(label, dict) and label.keys() == {"choices"}
    return json.dumps(label, ensure_ascii=False) if is_choices else label


def list_in(value: object) -> list[object]:
    """Return the elements of a list, which may be in a string, as in a cell of CSV.

    Anything else is the only element. In a string, the elements are in quotes.
    """
    if isinstance(value, str) and (_is_quoted(value) or value.strip() == "[]"):
        parts = parse_list(value, BRACKETS)
        return [value] if parts is None else list(parts)
    return value if isinstance(value, list) else [value]


def single_label(label: object) -> object:
    """Return the only element of a list, such as annotation tools write for a single class.

    The list may be in a string. Anything else is returned unchanged.
    """
    parts = parse_list(label, BRACKETS) if isinstance(label, str) else label
    return parts[0] if isinstance(parts, list) and len(parts) == 1 else label


def _is_quoted(text: str) -> bool:
    """Whether the first element of a list in brackets is in quotes."""
    return re.match(r"(?:\w+\()?[\[({]\s*['\"]", text.strip()) is not None


def labels_in(text: str, labels: tuple[str, ...]) -> list[str]:
    """Return the labels in a string, in the form for which all of them are classes."""
    if class_number(labels, text) is not None:
        return [text]
    for form in LIST_FORMS:
        parts = parse_list(text, form)
        if parts is not None and all(class_number(labels, each) is not None for each in parts):
            return parts
    return [] if text.strip().casefold() in EMPTY_LISTS else [text]


def form_of_lists(texts: Sequence[str], *, several: bool) -> str | None:
    """Return the form in which strings list labels, or None if each string is a label.

    A separator counts if the labels recur: there are fewer of them than different strings, and each
    one of a list occurs in another string too. If it is known that a text has several labels, this
    is required of `PARTS_OF_NAMES` alone; otherwise they do not count.

    Args:
        texts: The different strings.
        several: Whether it is known that a text has several labels.
    """
    bracketed = [text for text in texts if parse_list(text, BRACKETS) is not None]
    several_in_brackets = any(len(parse_list(text, BRACKETS) or ()) != 1 for text in bracketed)
    if any(map(_is_quoted, bracketed)) or (
        bracketed and len(bracketed) == len(texts) and (several or several_in_brackets)
    ):
        return BRACKETS
    for form in LIST_FORMS[1:]:
        lists = _Lists.of(texts, form)
        in_names = form in PARTS_OF_NAMES
        counts = several and lists.all_recur if in_names else several or lists.all_recur
        if lists.long and counts:
            return form
    return None


def separator_in(texts: Sequence[str]) -> str | None:
    """Return the separator of strings that may be lists, because a part of them recurs.

    Of `PARTS_OF_NAMES`, all parts recur.
    """
    for form in LIST_FORMS[1:]:
        lists = _Lists.of(texts, form)
        if lists.long and (lists.all_recur if form in PARTS_OF_NAMES else lists.some_recur):
            return form
    return None


class _Lists(NamedTuple):
    """Lists of labels in strings.

    Attributes:
        long: The lists of several labels.
        counts: The number of lists of each label.
        total: The number of all lists.
    """

    long: list[list[str]]
    counts: Counter[str]
    total: int

    @classmethod
    def of(cls, texts: Sequence[str], separator: str) -> "_Lists":
        """Read different strings with a separator."""
        lists = [parse_list(text, separator) or [] for text in texts]
        counts = Counter(part for parts in lists for part in dict.fromkeys(parts))
        return cls([parts for parts in lists if len(parts) > 1], counts, len(lists))

    @property
    def all_recur(self) -> bool:
        """Whether each label of a long list is in another list, too, and there are few labels."""
        parts = (part for parts in self.long for part in parts)
        return len(self.counts) < self.total and all(self.counts[part] > 1 for part in parts)

    @property
    def some_recur(self) -> bool:
        """Whether a label of a long list is in another list, too."""
        return any(self.counts[part] > 1 for parts in self.long for part in parts)


OUTSIDE = "O"
SINGLES = frozenset("SUW")  # Prefixes of an entity of one word.
BEGINS = SINGLES | {"B"}
ENDS = SINGLES | {"E", "L"}
PREFIXES = BEGINS | ENDS | {"I", "M"}
NO_TYPE = "_"  # The type of the entities if labels are only B, I and O, as in seqeval.

_ALMOST = (
    re.compile(r"(?P<prefix>[A-Za-z])[-_:](?P<type>.+)"),
    re.compile(r"(?P<type>.+)[-_:](?P<prefix>[A-Za-z])"),
)


class Tag(NamedTuple):
    """A label in a scheme: one of the `PREFIXES`, and the type of the entity."""

    prefix: str
    type: str


def tag_of(label: str, labels: tuple[str, ...]) -> Tag:
    """Read a label other than `O`. Without a prefix, such as `NOUN`, it is read as `I-NOUN`.

    Args:
        label: The label.
        labels: All labels. If they are prefixes without types, so is this one.
    """
    if label[1:2] == "-" and label[0] in PREFIXES:
        return Tag(label[0], label[2:])
    return Tag(label, NO_TYPE) if _are_prefixes(labels) else Tag("I", label)


def describe_unknown_scheme(labels: Sequence[str]) -> str | None:
    """Return a warning if labels look like the tags of a scheme that is not read as one.

    They do if one type has several of them, such as `B_PER` and `I_PER`, or if there is no `O`.
    """
    if labels and all(map(str.isdecimal, labels)):
        return (
            "the labels of words are numbers without names, so every run of a number is read as an "
            "entity; write names into the data, with O for words outside of entities"
        )
    known = [label for label in labels if label[1:2] == "-" and label[0] in PREFIXES]
    others = [label for label in labels if label not in known]
    for form in _ALMOST:
        types = {label[2:]: [label] for label in known}
        letters = {label[0] for label in known}
        for label in others:
            match = form.fullmatch(label)
            if match is not None:
                types.setdefault(match["type"], []).append(label)
                letters.add(match["prefix"].upper())
        groups = [group for group in types.values() if len(group) > 1]
        if groups and letters & {"B", "I"}:
            return (
                f"the labels {' and '.join(groups[0])} look like tags of a scheme that kdcli does "
                f"not know, so {groups[0][-1]} is read as a type of entity of its own; rename the "
                "labels to PREFIX-TYPE with the prefixes B, I, E and S (or M, L, U and W), and to "
                "O for other words"
            )
    by_look: dict[str, str] = {}
    for label in known:
        first = by_look.setdefault(looks(label[2:]), label)
        if first[2:] != label[2:]:
            return (
                f"{first} and {label} are tags of two types of entity, whose names look alike; "
                "if they are one type, write one name"
            )
    if known and others and OUTSIDE not in labels:
        return (
            f"no label is O, so {others[0]} is read as a type of entity; if it stands for words "
            "outside of entities, rename it to O"
        )
    return None


@functools.lru_cache(maxsize=8)
def _are_prefixes(labels: tuple[str, ...]) -> bool:
    """Whether labels are the prefixes of a scheme without types, such as B, I and O."""
    prefixes = {label for label in labels if label != OUTSIDE}
    return prefixes <= PREFIXES and len(prefixes) > 1 and bool(prefixes & {"I", "M"})
