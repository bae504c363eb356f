"""Convert the forms of annotation tools and of SQuAD to rows.

Entities that are positions in a text (doccano, spaCy, Prodigy, Label Studio) become words and their
tags. Answers that are a list of objects become the lists of SQuAD on the hub.
"""

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from kdcli.data.rows import (
    BadRow,
    OnBadRow,
    Row,
    RowValues,
    names_in,
    take_first,
    usual_text_column,
)
from kdcli.errors import UsageError

WORD = re.compile(r"\w+|[^\w\s]")
STARTS, ENDS = ("start", "start_offset", "begin"), ("end", "end_offset")
LABELS = ("label", "labels", "entity", "entity_group", "tag", "type")
ANSWER = {"text", "answer_start"}
ENTITIES = "entities"
SPLIT_KEYS = {"columns", "index", "data"}
PRODIGY_COLUMN, ANSWER_COLUMN, ACCEPT = "_input_hash", "answer", "accept"


class Entity(NamedTuple):
    """The positions and the label of an entity, and its text if the tool wrote it."""

    start: int
    end: int
    label: str
    text: str | None = None


def convert_annotations(rows: Iterable[Row], on_bad: OnBadRow) -> Iterator[Row]:
    """Convert the entities or answers of rows. The first rows decide what a column holds.

    Args:
        rows: Rows of one file. Rows without entities and answers are not changed.
        on_bad: Called with each row whose entities do not fit its text.
    """
    first, rows = take_first(rows)
    if any(_is_task(values) for _, values in first):
        first, rows = take_first(_task_rows(first, rows, on_bad))
    names = names_in(first)
    answers = [n for n in names if any(_are_answers(values.get(n)) for _, values in first)]
    # Words have positions and tags too.
    others = [name for name in names if name != "tokens"]
    entities = [n for n in others if any(_entities(values.get(n)) for _, values in first)]
    text = usual_text_column(first)
    tags_words = len(entities) == 1 and text is not None
    if not answers and not tags_words:
        yield from rows
        return
    for where, values in rows:
        row = Row(where, {**values, **{n: _as_lists(values[n]) for n in answers if n in values}})
        if tags_words:
            try:
                row = _tagged(row, str(text), entities[0])
            except BadRow as error:
                on_bad(error)
                continue
        yield row


def check_accepted(where: str, values: RowValues, label: str) -> None:
    """Check that an annotator accepted the row in Prodigy, unless the answer is the label.

    Raises:
        BadRow: The annotator rejected or skipped the row.
    """
    answer = values.get(ANSWER_COLUMN, ACCEPT)
    if label != ANSWER_COLUMN and PRODIGY_COLUMN in values and answer != ACCEPT:
        raise BadRow(
            where,
            f"the annotator's answer is not '{ACCEPT}'",
            f", but {answer!r}",
            f"remove such rows; if the answer is the label, give --set data.columns.label="
            f"{ANSWER_COLUMN}",
        )


def _are_answers(value: Any) -> bool:
    """Whether a value is an answer, or a list of answers, as in SQuAD's own files."""
    answers = value if isinstance(value, list) else [value]
    return bool(answers) and all(
        isinstance(answer, dict)
        and answer.keys() >= ANSWER
        and not isinstance(answer["text"], list | tuple)
        for answer in answers
    )


def _as_lists(value: Any) -> Any:
    """Return answers as lists of texts and of positions."""
    if value == [] or _are_answers(value):
        answers = value if isinstance(value, list) else [value]
        return {name: [answer[name] for answer in answers] for name in sorted(ANSWER)}
    return value


def _entities(value: Any) -> list[Entity]:
    """Return the entities in a value; none if it holds anything else."""
    found = list(map(_entity, value)) if isinstance(value, list) else []
    return [entity for entity in found if entity is not None] if None not in found else []


def _entity(value: Any) -> Entity | None:
    if isinstance(value, dict):
        start, end, label = (
            next((value[name] for name in names if name in value), None)
            for names in (STARTS, ENDS, LABELS)
        )
        text = value.get("text")
    elif isinstance(value, list) and len(value) == 3:
        (start, end, label), text = value, None
    else:
        return None
    if isinstance(label, list) and len(label) == 1:
        (label,) = label
    if type(start) is not int or type(end) is not int or not isinstance(label, str):
        return None
    return Entity(start, end, label, text if isinstance(text, str) else None)


def _tagged(row: Row, column: str, entities: str) -> Row:
    """Return a row with its words and their tags in place of its entities.

    Raises:
        BadRow: The entities do not fit the text, or overlap.
    """
    where, values = row
    text, value = values.get(column), values.get(entities)
    found = _entities(value)
    if not isinstance(text, str) or (value and not found):
        raise BadRow(where, f"'{entities}' must be a list of entities with start, end and label")
    placed = sorted(_placed(where, text, entity) for entity in found)
    for left, right in itertools.pairwise(placed):
        if right.start < left.end:
            raise BadRow(
                where,
                "two entities overlap",
                f": {text[left.start : left.end]!r} and {text[right.start : right.end]!r}",
                "a word has one tag; keep one of the entities",
            )
    words, tags = [], []
    for begin, end, label in _parts(text, placed):
        for word in WORD.finditer(text, begin, end):
            is_first = not text[begin : word.start()].strip()
            words.append(word[0])
            tags.append(f"{'B' if is_first else 'I'}-{label}" if label else "O")
    others = {name: value for name, value in values.items() if name != entities}
    return Row(where, others | {"tokens": words, "tags": tags})


def _parts(text: str, entities: Iterable[Entity]) -> Iterator[tuple[int, int, str]]:
    """Yield the begin, the end and the label of each entity, and of the text between them."""
    position = 0
    for entity in entities:
        yield position, entity.start, ""
        yield entity.start, entity.end, entity.label
        position = entity.end
    yield position, len(text), ""


def _placed(where: str, text: str, entity: Entity) -> Entity:
    """Return an entity with the positions of its letters, and no white space around it.

    Raises:
        BadRow: The positions are not in the text, or other letters are there.
    """
    start, end = entity.start, entity.end
    if entity.text is not None and text[start:end] != entity.text:
        # A browser counts letters beyond 16 bits twice.
        units = text.encode("utf-16-le", "surrogatepass")
        before, inside = units[: 2 * start], units[2 * start : 2 * end]
        if inside.decode("utf-16-le", "replace") == entity.text:
            start = len(before.decode("utf-16-le", "replace"))
            end = start + len(entity.text)
    inside_text = text[start:end]
    is_other = entity.text is not None and inside_text != entity.text
    if not 0 <= start < end <= len(text) or is_other or not inside_text.strip():
        detail = f": {start} to {end} of {len(text)} letters is {inside_text!r}"
        detail += f", not {entity.text!r}" if is_other else ""
        raise BadRow(where, f"the entity '{entity.label}' is not in the text", detail)
    start += len(inside_text) - len(inside_text.lstrip())
    end -= len(inside_text) - len(inside_text.rstrip())
    return Entity(start, end, entity.label)


def _is_task(value: Any) -> bool:
    """Whether a row is a task of Label Studio with its annotations."""
    return isinstance(value.get("data"), dict) and isinstance(value.get("annotations"), list)


def _task_rows(first: Sequence[Row], rows: Iterable[Row], on_bad: OnBadRow) -> Iterator[Row]:
    """Convert tasks of Label Studio: their data, `entities`, and the choices of each control.

    The choices of a single control are the `label`. They are lists if a task has several.
    """
    samples = [result for _, task in first if _is_task(task) for result in _results(task)]
    controls = {name: name for result in samples for name in result if name != ENTITIES}
    if len(controls) == 1:
        controls = dict.fromkeys(controls, "label")
    has_several = any(
        len(result[name]) > 1 for result in samples for name in controls if name in result
    )
    for where, task in rows:
        results = _results(task) if _is_task(task) else []
        if not results or results.count(results[0]) < len(results):
            problem = (
                "the annotations of the task differ" if results else "the task has no annotation"
            )
            on_bad(BadRow(where, problem, hint="export each task with one annotation"))
            continue
        choices = results[0]
        if not has_several and any(len(choices[name]) > 1 for name in controls if name in choices):
            on_bad(BadRow(where, "the task has several choices", ", but the first tasks have one"))
            continue
        values = {
            controls.get(name, name): choice if has_several or name == ENTITIES else choice[0]
            for name, choice in choices.items()
        }
        yield Row(where, {**task["data"], **values})


def _results(task: RowValues) -> list[dict[str, list[Any]]]:
    """Return the `entities`, and the choices by control, of each annotation of a task."""
    found = []
    for annotation in task["annotations"]:
        if annotation.get("was_cancelled"):
            continue
        by_name: dict[str, list[Any]] = {}
        for result in annotation.get("result", []):
            kind, value = result.get("type"), result.get("value", {})
            name = ENTITIES if kind == "labels" else str(result.get("from_name"))
            choice = value if kind == "labels" else value.get(kind)
            # Other labels are of regions without a position in the text, such as boxes.
            is_region = kind != "labels" and str(kind).endswith("labels")
            if choice is not None and not is_region:
                by_name.setdefault(name, []).extend(
                    choice if isinstance(choice, list) else [choice]
                )
        found.append(by_name)
    return found


def rows_of_json(name: str, values: Any) -> list[Any]:
    """Return the rows in a JSON value, of the file `name`.

    The value is a list of rows, an object that holds one list of rows, an object of columns or of
    rows by their names, as pandas writes, or a row. SQuAD's articles become questions, and the
    pairs of spaCy become objects.

    Raises:
        UsageError: There are several lists of rows, or articles have another form.
    """
    if isinstance(values, dict):
        values = _split_rows(values) or _rows_of_object(name, values)
    if values and all(isinstance(value, dict) and "paragraphs" in value for value in values):
        try:
            return [row for article in values for row in _questions(article)]
        except (KeyError, TypeError) as error:
            raise UsageError(f"{name} is not in the form of SQuAD: no {error}") from None
    return [
        {"text": value[0], **value[1]} if isinstance(value, list) and _is_row(value) else value
        for value in values
    ]


def _split_rows(values: Mapping[str, Any]) -> list[Any]:
    """Return the rows that pandas writes apart from the names of their columns."""
    names, rows = values.get("columns"), values.get("data")
    if not isinstance(names, list) or not isinstance(rows, list) or values.keys() - SPLIT_KEYS:
        return []
    if not all(isinstance(row, list) and len(row) == len(names) for row in rows):
        return []
    return [dict(zip(names, row, strict=True)) for row in rows]


def _rows_of_object(name: str, values: Mapping[str, Any]) -> list[Any]:
    """Return the rows in a JSON object."""
    parts = list(values.values())
    lists = {key: v for key, v in values.items() if isinstance(v, list) and any(map(_is_row, v))}
    if len(lists) > 1:
        raise UsageError(
            f"{name} holds several lists of rows: {', '.join(lists)}",
            f"save each as a file, for example: jq .{next(iter(lists))} FILE",
        )
    are_columns = all(isinstance(v, list) and len(v) == len(parts[0]) for v in parts)
    # A column may hold objects, such as answers.
    if lists and not (are_columns and len(parts) > 1 and len(parts[0]) > 1):
        return list(*lists.values())
    if parts and are_columns:
        return [dict(zip(values, row, strict=True)) for row in zip(*parts, strict=True)]
    if parts and all(isinstance(v, dict) and v.keys() == parts[0].keys() for v in parts):
        if all(map(str.isdecimal, parts[0])):
            return [{column: values[column][key] for column in values} for key in parts[0]]
        if len(parts) > 1:
            return parts
    return [values]


def _is_row(value: Any) -> bool:
    """Whether a value is an object, or a text and an object, as in spaCy's training data."""
    if isinstance(value, list):
        return len(value) == 2 and isinstance(value[0], str) and isinstance(value[1], dict)
    return isinstance(value, dict)


def _questions(article: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the questions of an article of SQuAD."""
    for paragraph in article["paragraphs"]:
        for question in paragraph["qas"]:
            names = ("id", "question", "answers")
            row = {name: question[name] for name in names if name in question}
            yield {"title": article.get("title"), "context": paragraph["context"], **row}
