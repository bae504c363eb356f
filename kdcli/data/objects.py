"""Write objects that Python holds in memory to the cache, so that options and a recipe name a path.

The name of the path is a hash of its content: the same object has the same path, so a run that is
called again with it is found. Tables become Parquet, and lists of rows or texts become JSON Lines,
whose rows may hold any nested value. Models become the directories that they save.
"""

import hashlib
import json
import secrets
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeAlias

from kdcli.data.labelled.label_values import as_cell
from kdcli.data.rows import check_distinct
from kdcli.data.sources import names_by_split
from kdcli.disk import (
    atomic_dir,
    atomic_file,
    cache_dir,
    cache_key,
    disk_errors,
    is_path,
    lock_entry,
    use_entry,
)
from kdcli.errors import UsageError, first_line
from kdcli.manifest import file_sha256
from kdcli.messages import log

if TYPE_CHECKING:
    import datasets
    import numpy as np
    import pandas as pd
    import pyarrow as pa
    from sentence_transformers import CrossEncoder, SentenceTransformer
    from transformers import PreTrainedModel

Model: TypeAlias = """(
    Path | str | PreTrainedModel | SentenceTransformer | CrossEncoder
)"""
"""A model in Python: a path, a hub id, or an object that is saved to the cache."""
Data: TypeAlias = """(
    Path | str
    | Sequence[str] | Sequence[Mapping[str, Any]] | pd.Series[Any] | np.ndarray[Any, Any]
    | Mapping[str, Sequence[Any] | pd.Series[Any] | np.ndarray[Any, Any]]
    | pd.DataFrame | datasets.Dataset | datasets.DatasetDict
)"""
"""A source of data in Python: a path, hub id or URL, texts, rows, columns, or a table."""

FOLDER = "objects"
ALLOWED = (
    "a path, a hub id, a URL, a list or Series of texts, a list of dicts, a dict of lists, a "
    "pandas DataFrame, a Dataset or a DatasetDict"
)
HINTS = (
    ("save_pretrained", "a model is not data; give it as the model, saved with .save_pretrained()"),
    ("write_parquet", 'write it with .write_parquet("train.parquet"), and give the path'),
    ("to_pandas", "give its .to_pandas()"),
)
"""A method that identifies a kind of object, and what to give instead."""
ROWS_PER_WRITE = 1000
TYPES_HINT = (
    "make the values of each column all text, all numbers or all lists, for example with "
    ".astype(str), or remove the column"
)
SPLITS_HINT = "for several splits, give datasets.DatasetDict(train=..., validation=...)"


def write_object(value: object) -> Path:
    """Write an object to the cache, unless it is there, and return the path of the file.

    A `DatasetDict` becomes a directory with a file for each split. Nothing deletes these files,
    except `kdcli cache clean objects`.

    Args:
        value: One of the types of `Data` that is no path.

    Raises:
        UsageError: The object is of another type, is empty, or holds values that cannot be written.
        MachineError: The cache cannot be written.
    """
    folder = cache_dir() / FOLDER
    content: _Content | Mapping[str, _Content]
    if _is_a(value, "datasets", "DatasetDict"):
        content = _splits(value)
        path = folder / cache_key(*((split, part.key) for split, part in sorted(content.items())))
    else:
        content = _content_of(value)
        path = folder / f"{content.key}.{content.ending}"
    use_entry(path, type(value).__name__)
    with disk_errors(folder):
        # A read-only cache has no place for a lock.
        if path.exists():
            return path
        folder.mkdir(parents=True, exist_ok=True)
        with lock_entry(path):
            if not path.exists():
                _write(content, path)
    return path


def is_model(value: object) -> bool:
    """Whether an object is a model that `write_model` saves."""
    return any(_is_a(value, *kind) for kind in _MODELS)


def needs_tokenizer(value: object) -> bool:
    """Whether an object is a model that has no tokenizer of its own."""
    return _is_a(value, *_MODELS[0])


def write_model(model: Any, tokenizer: Any = None, beside: str = "") -> Path:
    """Save a model to the cache, unless it is there, and return its directory.

    Args:
        model: An object for which `is_model` holds.
        tokenizer: The tokenizer of a `PreTrainedModel`. The other models have their own.
        beside: The name of a file that is copied too, if the model was loaded from a directory that
            has it.

    Raises:
        UsageError: The tokenizer is missing, or the model cannot be saved as a whole.
        MachineError: The cache cannot be written.
    """
    kind, folder = type(model).__name__, cache_dir() / FOLDER
    # The hash is known only once the files exist.
    aside = folder / f".{secrets.token_hex(12)}.part"
    with disk_errors(folder):
        aside.mkdir(parents=True)
        try:
            # Reports call a model by the last part of its path.
            _save_model(model, tokenizer, aside / kind, kind)
            network = getattr(model, "transformers_model", model)
            origin = getattr(network, "name_or_path", "")
            if beside and origin and (file := Path(origin) / beside).is_file():
                shutil.copy(file, aside / kind / beside)
            # A card may hold the time at which it was written.
            files = (p for p in aside.rglob("*") if p.is_file() and p.name != "README.md")
            hashes = sorted((str(p.relative_to(aside)), file_sha256(p)) for p in files)
            path = folder / cache_key(hashes)
            use_entry(path, kind)
            with lock_entry(path):
                if not path.exists():
                    aside.rename(path)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    return path / kind


def _save_model(model: Any, tokenizer: Any, folder: Path, kind: str) -> None:
    if needs_tokenizer(model):
        if not hasattr(tokenizer, "save_pretrained"):
            raise UsageError(
                f"got a {kind} without its tokenizer; a model in memory needs both",
                "give tokenizer=AutoTokenizer.from_pretrained(...), or the directory of both",
            )
        tokenizer.save_pretrained(folder)
    try:
        model.save_pretrained(str(folder))
    except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise UsageError(
            f"the {kind} cannot be saved: {first_line(error)}", "give the directory of the model"
        ) from None
    for file in folder.rglob("tokenizer.json"):
        # These are what the last call asked for.
        tree = json.loads(file.read_bytes()) | {"truncation": None, "padding": None}
        file.write_text(json.dumps(tree, ensure_ascii=False), "utf-8")
    if any(folder.rglob("adapter_config.json")):
        raise UsageError(
            f"the {kind} has an adapter, which is saved without its base model",
            "merge the adapter with .merge_and_unload(), and give the merged model",
        )


def is_object(source: str) -> bool:
    """Whether a source was written by this module, so that its name is a hash."""
    return Path(source).parent == cache_dir() / FOLDER


def _write(content: "_Content | Mapping[str, _Content]", path: Path) -> None:
    """Write a file, or a directory with a file for each split."""
    if isinstance(content, _Content):
        with atomic_file(path) as file:
            content.write(file)
        return
    with atomic_dir(path) as aside:
        for split, part in content.items():
            with (aside / f"{split}.{part.ending}").open("wb") as opened:
                part.write(opened)


@dataclass(frozen=True)
class _Content:
    """The content of a file: the ending of its name, a hash, and a function that writes it."""

    ending: str
    key: str
    write: Callable[[IO[bytes]], None]


def _rows(rows: Callable[[], Iterable[Mapping[str, object]]]) -> _Content:
    """Return the content of a file of JSON Lines.

    Args:
        rows: Returns the rows, each time from the beginning, because the lines of all rows together
            may be larger than the memory that is left.
    """

    def lines() -> Iterator[bytes]:
        return (f"{_json(row, number)}\n".encode() for number, row in enumerate(rows()))

    digest = hashlib.sha256()
    for line in lines():
        digest.update(line)
    return _Content("jsonl", digest.hexdigest()[:24], lambda file: file.writelines(lines()))


def _json(row: Mapping[str, object], number: int) -> str:
    """Return a row as JSON.

    Raises:
        UsageError: A name or a value cannot be written.
    """
    values = {}
    for name, value in row.items():
        if not isinstance(name, str):
            raise UsageError(
                f"row {number} has the column {name!r}; columns are named by text",
                "rename the keys of the dicts",
            )
        try:
            values[name] = json.dumps(value, default=_plain)
        except (TypeError, ValueError, RecursionError) as error:
            raise UsageError(
                f"column '{name}' of row {number} cannot be written: {first_line(error)}",
                "use text, numbers, True, False, None, and lists or dicts of these",
            ) from None
    return "{" + ", ".join(f"{json.dumps(name)}: {text}" for name, text in values.items()) + "}"


def _plain(value: object) -> object:
    """Return a scalar or an array of numpy as a number or a list, and others as a cell of CSV."""
    plain = value.tolist() if hasattr(value, "tolist") else as_cell(value)
    if plain is not value:
        return plain
    raise TypeError(f"it holds an object of type {type(value).__name__}")


def _table(schema: "pa.Schema", batches: "Callable[[], Iterator[pa.Table]]") -> _Content:
    """Return the content of a Parquet file.

    Args:
        schema: The names and types of the columns.
        batches: Yields the table in parts, each time from the beginning.
    """
    # The bytes of a Parquet file differ between versions of pyarrow.
    names = [(field.name, str(field.type)) for field in schema]
    digest = hashlib.sha256(repr((names, schema.metadata)).encode())
    for batch in batches():
        for row in batch.to_pylist():
            digest.update(repr(tuple(row.values())).encode())

    def write(file: IO[bytes]) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            with pq.ParquetWriter(file, schema) as writer:
                for batch in batches():
                    writer.write_table(batch)
        except pa.ArrowNotImplementedError as error:
            raise UsageError(
                f"the table cannot be written: {first_line(error)}", TYPES_HINT
            ) from None

    return _Content("parquet", digest.hexdigest()[:24], write)


def _content_of(value: Any) -> _Content:
    """Return the content of the file for an object."""
    if _is_a(value, "datasets", "Dataset"):
        return _dataset(value)
    if _is_a(value, "pandas", "DataFrame"):
        return _columns(value.items())
    if isinstance(value, Mapping):
        return _columns(_checked_columns(value))
    if _is_column(value):
        return _list(list(value))
    raise UsageError(
        f"got an object of type {type(value).__name__}; allowed is {ALLOWED}",
        next((hint for method, hint in HINTS if hasattr(value, method)), "convert it to one"),
    )


def _list(values: Sequence[object]) -> _Content:
    """Return the rows of a list of texts or of rows."""
    if not values:
        raise UsageError("the list is empty; at least one row is needed", "give texts or rows")
    rows = [value for value in values if isinstance(value, Mapping)]
    if len(rows) == len(values):
        return _rows(lambda: rows)
    wrong = next((value for value in values if not isinstance(value, str)), None)
    if wrong is not None:
        number, kind = list(map(id, values)).index(id(wrong)), type(wrong).__name__
        raise UsageError(
            f"item {number} of the list is of type {kind}; a list holds only texts or only dicts",
            "for several files, give their directory"
            if isinstance(wrong, Path)
            else 'give [{"text": "...", "label": "..."}, ...], or texts, without missing values',
        )
    if all(text and is_path(str(text)) for text in values):
        raise UsageError(
            f"the list holds the {len(values)} paths {values[0]} ...; a list holds texts or dicts",
            "give one file, or the directory of several files",
        )
    return _rows(lambda: ({"text": str(text)} for text in values))


def _checked_columns(columns: Mapping[object, object]) -> Iterator[tuple[object, object]]:
    """Yield the columns of a dict of lists.

    Raises:
        UsageError: A value is no list, or the rows of two Series have different labels.
    """
    series: list[tuple[object, Any]] = [
        (name, each) for name, each in columns.items() if _is_a(each, "pandas", "Series")
    ]
    for name, each in series[1:]:
        first_name, first = series[0]
        if not each.index.equals(first.index):
            raise UsageError(
                f"the Series {first_name!r} and {name!r} have different indexes, so it is unclear "
                "which values belong together",
                "align them with pandas.DataFrame(...), or give their .tolist() to join them by "
                "position",
            )
    for name, column in columns.items():
        if not _is_column(column):
            is_table = any(_is_a(column, *kind) for kind in _TABLES) or isinstance(column, Mapping)
            raise UsageError(
                f"the dict holds an object of type {type(column).__name__} under {name!r}; a dict "
                "of data holds a list of values for each column",
                SPLITS_HINT if is_table else 'give {"text": [...], "label": [...]}',
            )
        yield name, column


_MODELS = (
    ("transformers", "PreTrainedModel"),
    ("sentence_transformers", "SentenceTransformer"),
    ("sentence_transformers", "CrossEncoder"),
)
_TABLES = (("pandas", "DataFrame"), ("datasets", "Dataset"))


def _is_column(value: object) -> bool:
    """Whether an object holds the values of one column, such as a list, array or Series."""
    is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    return is_list or _is_a(value, "pandas", "Series") or _is_a(value, "numpy", "ndarray")


def _columns(columns: Iterable[tuple[object, object]]) -> _Content:
    """Return a table of named columns; an index is no column."""
    import pyarrow as pa

    names, arrays = [], []
    for name, column in columns:
        names.append(str(name))
        try:
            arrays.append(pa.array(column, from_pandas=_is_a(column, "pandas", "Series") or None))
        except (pa.ArrowException, UnicodeError, OverflowError, TypeError) as error:
            raise UsageError(
                f"column '{name}' cannot be written: {first_line(error)}",
                TYPES_HINT,
            ) from None
    check_distinct("the table", names)
    lengths = {name: len(array) for name, array in zip(names, arrays, strict=True)}
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise UsageError(f"all columns need the same number of rows: {counts}", "fill or cut them")
    table = pa.table(dict(zip(names, arrays, strict=True)))
    _check_size(names, table.num_rows)

    def batches() -> "Iterator[pa.Table]":
        for begin in range(0, table.num_rows, ROWS_PER_WRITE):
            yield table.slice(begin, ROWS_PER_WRITE)

    return _table(table.schema, batches)


def _dataset(dataset: "datasets.Dataset") -> _Content:
    """Return the table of a `Dataset`, which may be larger than the memory."""
    # The schema holds the names of classes.
    schema = dataset.features.arrow_schema
    _check_size(schema.names, len(dataset))

    def batches() -> "Iterator[pa.Table]":
        # This format has all columns and the order of the rows, but no Python objects.
        for batch in dataset.with_format("arrow").iter(batch_size=ROWS_PER_WRITE):
            yield batch.cast(schema)

    return _table(schema, batches)


def _splits(splits: "datasets.DatasetDict") -> dict[str, _Content]:
    """Return the tables of a `DatasetDict`, by the name that it gives to a split.

    Raises:
        UsageError: No split has a name that kdcli reads, or one split has two names.
    """
    tables: dict[str, _Content] = {}
    for names in names_by_split(splits, "the DatasetDict").values():
        for split in names:
            try:
                tables[split] = _dataset(splits[split])
            except UsageError as error:
                raise error.of(f"split {split}") from None
    others = ", ".join(split for split in splits if split not in tables)
    if not tables:
        raise UsageError(
            f"the DatasetDict has the splits {others or 'none'}; it needs train, validation or "
            "test",
            "rename a split, or give one of them as a Dataset",
        )
    if others:
        log(f"splits that are not read: {others}")
    return tables


def _check_size(names: Sequence[str], rows: int) -> None:
    """Raise a UsageError if a table is empty."""
    if not names or not rows:
        missing = "rows" if names else "columns"
        raise UsageError(
            f"the table has no {missing}; at least one row is needed", "give a table with rows"
        )


def _is_a(value: object, module: str, name: str) -> bool:
    """Whether an object is of a class of a library, without importing the library."""
    # An object's library has been imported.
    library = sys.modules.get(module)
    return library is not None and isinstance(value, getattr(library, name, ()))
