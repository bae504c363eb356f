"""Documents from a source: text, jsonl, csv or parquet (each also gzipped), a directory of them, here or at a URL that
fsspec reads (`hf://`, `s3://`, `https://`); a data set of the hub, `owner/name[:config][:split][@revision]`; or `demo`.

Everything streams; no file is held whole: a .parquet.gz is unpacked to a temporary file. A line of a .txt file is a
document; the other formats hold a document a row: in the given column, else in `text`, else in the only column of
strings. Blank and null documents are skipped. Large files are read in pieces, which several processes can share.
"""

import codecs
import csv
import functools
import gzip
import io
import itertools
import json
import re
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from kdcli.data.demo import demo_documents, demo_identity
from kdcli.disk import COMMITS, user_path
from kdcli.errors import UsageError, first_line, one_line

CONLL = ("conll", "conllu", "bio", "iob", "iob2")
CONLL_HINT = (
    'make a row a sentence of it, {"tokens": ["EU", "rejects"], "tags": ["B-ORG", "O"]}, as docs/tasks.md shows'
)
FORMATS = ("txt", "jsonl", "csv", "parquet")
SPLIT = re.compile(r"(train|validation|test)(_[a-z]+)?")
PARQUET_ROWS = 128
UNPACK_BYTES = 1 << 20
MOST_LINE = 1 << 25  # Bytes of a line; a gzip file of 100 kB may hold one of 100 MB
NAMES_LISTED = 12
NO_COLUMN = "set data.column (--column of `kdcli tokenize`) to the column of the text"
SAMPLE_BYTES, MOST_UNPACKED = 1 << 18, 1 << 22  # Of a piece
LOG_SECONDS = 10.0  # Between log lines of progress.
HUB_SECONDS = 10.0  # Timeout of the question which commit of a data set is the present one.
HUB_ID = re.compile(r"((?:[\w.-]+/)?[\w.-]+)(?::([^:@]*))?(?::([\w.-]+))?(?:@([\w./-]+))?")
# What file systems call that which changes with a file's content, the first that one has.
VERSIONS = ("ETag", "blob_id", "oid", "LastModified", "last_modified", "mtime")

Log = Callable[[str], None]
Row = tuple[str, Mapping[str, Any]]  # where it stands (`file:line`), and its columns


class NotFound(UsageError):
    """No such data; a caller that knows what it was for adds what should be there."""


class BadRow(UsageError):
    """A row that cannot be used. `where` it stands; `problem` is alike for all rows of one kind, `detail` need not."""

    def __init__(self, where: str, problem: str, detail: str = "", hint: str | None = None) -> None:
        super().__init__(f"{where}{'' if problem.startswith((' ', ':')) else ': '}{problem}{detail}", hint)
        self.where, self.problem = where, problem


Bad = Callable[[BadRow], None]  # takes a bad row, which is then left out, or raises it


def refuse(row: BadRow) -> None:
    """Raise the first bad row."""
    raise row


class HubId(NamedTuple):
    """A data set of the hub. `split` None has all of them; otherwise it is the training text. `revision` None is the
    present one."""

    name: str
    config: str | None = None
    split: str | None = None
    revision: str | None = None

    def commit(self) -> str | None:
        """The commit of its revision, which it asks the hub for; None without a network. A present one is kept for the
        recipe of the run."""
        from huggingface_hub import HfApi
        from huggingface_hub.utils import httpx  # type: ignore[attr-defined]  # its client, whichever version that is

        try:
            found = HfApi().dataset_info(self.name, revision=self.revision, timeout=HUB_SECONDS).sha
        except (OSError, httpx.HTTPError):
            return None
        if self.revision is None and found:
            COMMITS[self.source] = found
        return found

    @property
    def source(self) -> str:
        """As it is named where no revision is given."""
        return f"{self.name}:{self.config or ''}:{self.split or ''}".rstrip(":")


class Piece(NamedTuple):
    """What is read on its own: lines that begin in a range of bytes, row groups of a .parquet file, a shard of a hub
    data set; a whole file if `end` is None. `size`: about how many bytes that is, 0 for unknown; `version` changes with
    the content."""

    name: str
    begin: int = 0
    end: int | None = None
    size: int = 0
    version: str = ""


File = Path | str  # here, or a URL


@dataclass(frozen=True)
class Source:
    """Where documents come from: files by split, or a hub data set, or the embedded demo."""

    name: str
    files: Mapping[str, tuple[File, ...]]
    hub: HubId | None = None

    @property
    def identity(self) -> list[Any]:
        """JSON that changes whenever the documents may have changed."""
        if self.hub:
            return ["hub", *self.hub]
        if not self.files:
            return ["demo", demo_identity()]
        return [[split, *_stat(file)] for split, files in self.files.items() for file in files]

    def has(self, split: str) -> bool:
        """True if there is such a split."""
        return split in _hub_splits(self.hub) if self.hub else split in self.files or not self.files

    def pieces(self, split: str, most_bytes: int) -> list[Piece]:
        """The documents of a split in pieces of about `most_bytes` where files can be cut. Raises as `tables`."""
        if not self.files and not self.hub:
            return [Piece("demo", version=demo_identity())]
        self._check_split(split)
        if self.hub:
            count, size = _hub_size(self.hub, split)
            return [Piece(f"{self.name} {split}", n, n + 1, size // count) for n in range(count)]
        return [piece for file in self.files[split] for piece in _pieces(file, most_bytes)]

    def documents(self, split: str, column: str | None) -> Iterator[str]:
        """The documents of a split, blank ones left out; a UsageError names the file and line that are wrong."""
        if not self.files and not self.hub:
            yield from demo_documents(split)
            return
        for name, rows in self.tables(split):
            text = None
            for text in _texts(rows, column):
                yield text
            if text is None:
                raise UsageError(f"{name} holds no text")

    def documents_in(self, split: str, piece: Piece, column: str | None) -> Iterator[str]:
        """As `documents`, of one of the `pieces`."""
        if self.hub:
            yield from _texts(_hub_rows(self.hub, split, piece.begin), column)
            return
        if not self.files or piece.end is None:
            one = Source(self.name, {split: (_as_file(piece.name),)} if self.files else {})
            yield from one.documents(split, column)
            return
        whole = Piece(piece.name)
        if column is None and (first := next(_rows(whole, refuse), None)):
            # As the whole file has it: in the first row of a piece other columns may be null.
            column = _column(*first)
        try:
            yield from _texts(_rows(piece, refuse), column)
        except UsageError:
            # Only now is it worth counting the lines before the piece, for the message.
            for _ in _texts(_rows(piece, refuse, before=_lines_before(piece)), column):
                pass
            raise

    def sample(self, split: str, piece: Piece, column: str | None) -> tuple[list[str], int]:
        """Documents from the beginning of a piece, and how many of its bytes they are, 0 for unknown."""
        name = _name(piece.name)
        if self.files and not name.endswith((".parquet", ".parquet.gz")):
            return _sample_of_lines(piece, column)
        texts, held = [], 0
        for text in self.documents_in(split, piece, column):
            texts.append(text)
            if (held := held + len(text.encode())) > SAMPLE_BYTES:
                break
        if name.endswith(".parquet"):
            return texts, piece.size * len(texts) // _rows_of_parquet(piece)
        # The size of a hub data set is that of its text.
        return texts, min(piece.size, held)

    def tables(self, split: str, bad: Bad = refuse) -> Iterator[tuple[str, Iterator[Row]]]:
        """The name and the rows of each file of a split; `NotFound` for no such split. `bad` gets the lines that hold
        no row. Iterating raises a UsageError that names the file that cannot be read."""
        self._check_split(split)
        if self.hub:
            yield f"{self.name} {split}", _hub_rows(self.hub, split)
            return
        for file in self.files[split]:
            yield str(file), _rows(Piece(str(file)), bad)

    def _check_split(self, split: str) -> None:
        if not self.has(split):
            there = _hub_splits(self.hub) if self.hub else self.files
            raise NotFound(f"{self.name} has no {split} split; it has {', '.join(there) or 'none'}")


def open_source(source: str) -> Source:
    """Resolve a `--data` value. Raises UsageError: a file of another format; a URL that cannot be read; `NotFound`: no
    such data."""
    if source == "demo":
        return Source(source, {})
    if "://" in source:
        return Source(source, _remote_files(source))
    path = user_path(source)
    if path.is_file():
        _check_format(path, path.name)
        return Source(source, {"train": (path,)})
    if path.is_dir():
        held = sorted(p for p in path.iterdir() if p.is_file())
        return Source(source, _by_split(path, {p.name: p for p in held}, held_by(path)))
    hub = HUB_ID.fullmatch(source)
    if hub is None or source.startswith((".", "/", "~")) or _format(source):
        hint = "give a file, a directory, a URL, a hub id like owner/name[:config][:split][@revision], or 'demo'"
        raise NotFound(f"no data at {source}{_beside(source)}", hint)
    return Source(source, {}, HubId(hub[1], hub[2] or None, hub[3], hub[4]))


def _check_format(file: File, name: str) -> None:
    if is_conll(Path(name)):
        raise UsageError(f"{file} is CoNLL text, which is not read", CONLL_HINT)
    if not _format(name):
        endings = ", ".join(f".{f}" for f in FORMATS)
        raise UsageError(f"{file} has no known format; known: {endings}, each also .gz")


def _by_split(folder: File, files: Mapping[str, File], held: str) -> dict[str, tuple[File, ...]]:
    """The files of a directory, given by their names, that can be read, by the split that they name."""
    known = [name for name in sorted(files) if _format(name) and not name.startswith(".")]
    named = {s: tuple(files[n] for n in known if _split(n) == s) for s in dict.fromkeys(map(_split, known)) if s}
    if not known and any(is_conll(Path(name)) for name in files):
        raise UsageError(f"{folder} holds CoNLL text, which is not read", CONLL_HINT)
    if not known:
        endings = ", ".join(f".{f}" for f in FORMATS)
        hint = f"it should hold train.* and perhaps validation.* with one of {endings} (or .gz of these)"
        raise NotFound(f"{folder} has no file of a known format; it holds {held}", hint)
    return named or {"train": tuple(files[name] for name in known)}


@contextmanager
def _remote_errors(url: str) -> Iterator[None]:
    """Turn whatever a file system of fsspec raises into a UsageError that names the URL."""
    hint = "is the address right, and are you logged in? `hf auth login` (hf://), AWS_ACCESS_KEY_ID ... (s3://)"
    try:
        yield
    except UsageError:
        raise
    except ImportError as error:
        missing = re.search(r"[iI]nstall (?:[\"'`]?)([\w-]+)", str(error))
        package = missing[1] if missing else str(error.name)
        raise UsageError(f"{url} cannot be read: {package} is not installed", f"pip install {package}") from None
    except FileNotFoundError as error:
        # What a web server said is the cause.
        if error.__cause__ is not None and getattr(error.__cause__, "status", None) != 404:
            raise UsageError(f"{url} cannot be read: {one_line(error.__cause__)}", hint) from None
        raise NotFound(f"no data at {url}", hint) from None
    except Exception as error:  # noqa: BLE001  # The libraries behind it raise classes of their own.
        raise UsageError(f"{url} cannot be read: {one_line(error) or type(error).__name__}", hint) from None


def _remote_files(url: str) -> dict[str, tuple[File, ...]]:
    """The files at a URL, which names one or a directory, by split."""
    import fsspec

    with _remote_errors(url):
        system, path = fsspec.core.url_to_fs(url)
        # A web server has no directories.
        if _format(_name(url)) or "http" in url.split("://")[0] or not system.isdir(path):
            _check_format(url, _name(url))
            system.info(path)
            return {"train": (url,)}
        found = [each["name"] for each in system.ls(path, detail=True) if each["type"] == "file"]
        files: dict[str, File] = {_name(each): system.unstrip_protocol(each) for each in found}
        return _by_split(url, files, ", ".join(sorted(files)[:NAMES_LISTED]) or "nothing")


def _as_file(name: str) -> File:
    return name if "://" in name else Path(name)


def _name(file: File) -> str:
    return file.name if isinstance(file, Path) else file.split("?")[0].rstrip("/").rsplit("/", 1)[-1]


def _stat(file: File) -> tuple[str, int, Any]:
    """A file's full name, its size in bytes, 0 if unknown, and what changes with its content."""
    if isinstance(file, Path):
        stat = file.stat()
        return str(file.resolve()), stat.st_size, stat.st_mtime_ns
    import fsspec

    with _remote_errors(file):
        system, path = fsspec.core.url_to_fs(file)
        info = system.info(path)
    return file, info.get("size") or 0, next((str(info[key]) for key in VERSIONS if info.get(key)), "")


@contextmanager
def _opened(file: File) -> Iterator[IO[bytes]]:
    if isinstance(file, Path):
        with file.open("rb") as here:
            yield here
        return
    import fsspec

    with _remote_errors(file), fsspec.open(file, "rb") as there:
        # Its own files read no more than a line, however long.
        yield io.BufferedReader(there)


def _pieces(file: File, most_bytes: int) -> list[Piece]:
    """A file in pieces of about `most_bytes`, or whole if its format cannot be cut."""
    _, size, version = _stat(file)
    parts = -(-size // most_bytes)
    ends = [size * n // parts for n in range(parts + 1)]
    if parts > 1 and _name(file).endswith(".parquet"):
        import pyarrow.parquet as pq

        with _opened(file) as opened, _parquet_errors(file):
            groups = pq.ParquetFile(opened).num_row_groups
        parts = min(parts, groups)
        ends = [groups * n // parts for n in range(parts + 1)]
    elif not _name(file).endswith((".txt", ".jsonl")):
        parts = 1
    if parts < 2:
        return [Piece(str(file), size=size, version=str(version))]
    return [Piece(str(file), begin, end, size // parts, str(version)) for begin, end in itertools.pairwise(ends)]


def _sample_of_lines(piece: Piece, column: str | None) -> tuple[list[str], int]:
    """Documents of the first `SAMPLE_BYTES` of a piece of lines, and how many bytes of the file they are."""
    with _opened(_as_file(piece.name)) as file:
        file.seek(piece.begin)
        data = file.read(SAMPLE_BYTES)
    read = len(data)
    if _name(piece.name).endswith(".gz"):
        unpacker = zlib.decompressobj(wbits=31)
        try:
            data = unpacker.decompress(data, MOST_UNPACKED)
        except zlib.error as error:
            raise UsageError(f"{piece.name} is not a whole gzip file: {error}") from None
        read -= len(unpacker.unused_data) + len(unpacker.unconsumed_tail)
    first = data.find(b"\n") + 1 if piece.begin else 0
    whole = data[first : data.rfind(b"\n") + 1] or data
    readers = {"txt": _txt, "jsonl": _jsonl, "csv": _csv}
    rows = readers[str(_format(_name(piece.name)))](Piece(piece.name), io.BytesIO(whole), lambda bad: None, 0)
    return list(_texts(rows, column)), read * len(whole) // max(1, len(data))


def _lines_before(piece: Piece) -> int:
    """The lines of a file that begin before a piece of it; 0 for a .parquet file, whose rows know their number."""
    if piece.name.endswith(".parquet"):
        return 0
    with _opened(_as_file(piece.name)) as file:
        return sum(1 for _ in _bytes_of_lines(piece._replace(begin=0, end=piece.begin), file))


def is_conll(path: Path, line: str = "") -> bool:
    """Whether a file is CoNLL text, a word and its tags a line: by its ending, or by its first line."""
    tagged = re.fullmatch(r"-DOCSTART-.*|\S+(?:[ \t]+\S+)*[ \t]+(?:O|[BIES]-\S+)", line.strip())
    return bool(tagged) or path.name.removesuffix(".gz").rsplit(".", 1)[-1] in CONLL


def _beside(source: str) -> str:
    """What the directory of a missing file holds, for messages."""
    folder = user_path(source).parent
    return f"; {folder} holds {held_by(folder)}" if "/" in source and folder.is_dir() else ""


def held_by(folder: Path) -> str:
    """What a directory holds, for messages."""
    names = sorted(f"{p.name}{'/' if p.is_dir() else ''}" for p in folder.iterdir() if not p.name.startswith("."))
    return (", ".join(names[:NAMES_LISTED]) or "nothing") + (" ..." if len(names) > NAMES_LISTED else "")


def _split(name: str) -> str | None:
    """The split of a file: `train.jsonl.gz`, `train-00000-of-00002.parquet` of the hub, `test_matched.csv`."""
    stem = name.split(".")[0].split("-")[0]
    return stem if SPLIT.fullmatch(stem) else None


def _format(name: str) -> str | None:
    _, dot, ending = name.removesuffix(".gz").rpartition(".")
    return ending if dot and ending in FORMATS else None


def _texts(rows: Iterator[Row], column: str | None) -> Iterator[str]:
    for where, row in rows:
        if column is None:
            column = _column(where, row)
        value = row.get(column)
        if column not in row or not isinstance(value, str | None):
            wrong = f"holds {type(value).__name__}" if column in row else f"is not there; there are {', '.join(row)}"
            raise UsageError(f"{where}: column '{column}' {wrong}", NO_COLUMN)
        if value and not value.isspace():
            yield whole_text(where, column, value)


def _column(where: str, row: Mapping[str, Any]) -> str:
    """The column of the text: `text`, or the only one of strings."""
    strings = [k for k, v in row.items() if isinstance(v, str)]
    if "text" not in row and len(strings) != 1:
        raise UsageError(f"{where}: which column is the text? there are {', '.join(row)}", NO_COLUMN)
    return "text" if "text" in row else strings[0]


def whole_text(where: str, column: str, text: str) -> str:
    """The text itself; a UsageError if it holds half a surrogate pair, which JSON can spell and no tokenizer takes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadRow(where, "half a surrogate pair", f" at character {error.start} of '{column}'") from None
    return text


def _rows(piece: Piece, bad: Bad, before: int = 0) -> Iterator[Row]:
    """The rows of a piece, whose first line is number `before` + 1."""
    readers = {"txt": _txt, "jsonl": _jsonl, "csv": _csv, "parquet": _parquet}
    name = piece.name
    try:
        with _opened(_as_file(name)) as file:
            unpacked = gzip.GzipFile(fileobj=file) if _name(name).endswith(".gz") else file
            try:
                yield from readers[str(_format(_name(name)))](piece, unpacked, bad, before)  # type: ignore[arg-type]  # GzipFile reads like any file
            except (EOFError, zlib.error, gzip.BadGzipFile) as error:
                raise UsageError(f"{name} is not a whole gzip file: {error}") from None
    except OSError as error:
        raise UsageError(f"{name} cannot be read: {one_line(error)}") from None


def _bytes_of_lines(piece: Piece, file: IO[bytes]) -> Iterator[bytes]:
    """The lines that begin in a piece; longer ones than `MOST_LINE` are cut."""
    at = 0
    if piece.begin:
        at, rest = file.seek(piece.begin - 1), b""
        # The rest of a line of the piece before.
        while not rest.endswith(b"\n") and (rest := file.readline(MOST_LINE)):
            at += len(rest)
    while (piece.end is None or at < piece.end) and (line := file.readline(MOST_LINE + 1)):
        at += len(line)
        yield line


def _lines(piece: Piece, file: IO[bytes], bad: Bad, before: int) -> Iterator[tuple[int, str]]:
    for number, line in enumerate(_bytes_of_lines(piece, file), before + 1):
        where = f"{piece.name}:{number}"
        if len(line) > MOST_LINE:
            raise UsageError(f"{where} is longer than {MOST_LINE:,} bytes", "put one document on each line")
        try:
            whole = number == 1 and not piece.begin
            yield number, (line.removeprefix(codecs.BOM_UTF8) if whole else line).decode("utf-8")
        except UnicodeDecodeError as error:
            bad(BadRow(where, " is not UTF-8", f" (byte {error.start} of the line)"))


def _txt(piece: Piece, file: IO[bytes], bad: Bad, before: int) -> Iterator[Row]:
    return ((f"{piece.name}:{number}", {"text": line.strip()}) for number, line in _lines(piece, file, bad, before))


def _jsonl(piece: Piece, file: IO[bytes], bad: Bad, before: int) -> Iterator[Row]:
    for number, line in _lines(piece, file, bad, before):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            bad(BadRow(f"{piece.name}:{number}", " is not JSON", f": {error}"))
            continue
        if not isinstance(row, dict):
            bad(BadRow(f"{piece.name}:{number}", " must be a JSON object", f", got {type(row).__name__}"))
            continue
        yield f"{piece.name}:{number}", row


def _csv(piece: Piece, file: IO[bytes], bad: Bad, before: int) -> Iterator[Row]:
    csv.field_size_limit(MOST_LINE)
    reader = csv.DictReader(line for _, line in _lines(piece, file, bad, before))
    try:
        for row in reader:
            if None in row or None in row.values():
                wrong = f" does not have the {len(reader.fieldnames or ())} columns"
                bad(BadRow(f"{piece.name}:{reader.line_num}", wrong))
                continue
            yield f"{piece.name}:{reader.line_num}", row
    except csv.Error as error:
        raise UsageError(f"{piece.name}:{reader.line_num} is not CSV: {error}") from None


def _parquet(piece: Piece, file: IO[bytes], bad: Bad, before: int) -> Iterator[Row]:
    import pyarrow.parquet as pq

    number = 0
    try:
        with tempfile.TemporaryFile() as unpacked, _parquet_errors(piece.name):
            packed = piece.name.endswith(".gz")
            if packed:
                # Parquet is read from its end, which a gzip stream can only reach by unpacking all of it.
                shutil.copyfileobj(file, unpacked, UNPACK_BYTES)
            table = pq.ParquetFile(unpacked if packed else file)
            groups = range(table.num_row_groups)
            number = sum(table.metadata.row_group(group).num_rows for group in groups[: piece.begin])
            for batch in table.iter_batches(batch_size=PARQUET_ROWS, row_groups=groups[piece.begin : piece.end]):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{piece.name}:{number}", row
    except UnicodeDecodeError:
        rows = f"one of the rows {number + 1} to {number + PARQUET_ROWS}"
        raise UsageError(f"{piece.name}: {rows} is not UTF-8") from None


def _rows_of_parquet(piece: Piece) -> int:
    import pyarrow.parquet as pq

    with _opened(_as_file(piece.name)) as file, _parquet_errors(piece.name):
        table = pq.ParquetFile(file)
        groups = range(table.num_row_groups)[piece.begin : piece.end]
        return max(1, sum(int(table.metadata.row_group(group).num_rows) for group in groups))


@contextmanager
def _parquet_errors(name: object) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except pa.ArrowException as error:
        raise UsageError(f"{name} is not a whole parquet file: {one_line(error)}") from None


@functools.cache
def _hub_splits(hub: HubId) -> list[str]:
    """The splits of a data set; one that was named is the training text."""
    import datasets

    with _hub_errors(hub):
        found = list(datasets.get_dataset_split_names(hub.name, hub.config, revision=hub.revision))
    if hub.split is None:
        return found
    if hub.split not in found:
        raise NotFound(f"{hub.name} has no {hub.split} split; it has {', '.join(found)}")
    return ["train"]


def _hub_stream(hub: HubId, split: str) -> Any:
    import datasets

    # What was asked before stays, so that all that a run reads is of one commit.
    revision = hub.revision or COMMITS.get(hub.source) or hub.commit()
    return datasets.load_dataset(hub.name, hub.config, split=hub.split or split, revision=revision, streaming=True)


def _hub_size(hub: HubId, split: str) -> tuple[int, int]:
    """The number of shards of a split, and its bytes as the data set's card has them, 0 for unknown."""
    with _hub_errors(hub):
        stream = _hub_stream(hub, split)
        told = (stream.info.splits or {}).get(hub.split or split)
        return stream.num_shards, (told and told.num_bytes) or 0


def _hub_rows(hub: HubId, split: str, shard: int | None = None) -> Iterator[Row]:
    """The rows of a split, or of one of its shards."""
    with _hub_errors(hub):
        stream = _hub_stream(hub, split)
        if shard is not None and stream.num_shards > 1:
            stream = stream.shard(stream.num_shards, shard)
        part = f"{hub.name} {split}" + (f" part {shard}" if shard else "")
        for number, row in enumerate(stream, 1):
            yield f"{part} row {number}", row


@contextmanager
def _hub_errors(hub: HubId) -> Iterator[None]:
    try:
        yield
    except (ConnectionError, OSError, ValueError, RuntimeError) as error:
        named = hub.name + (f":{hub.config}" if hub.config else "")
        raise NotFound(
            f"data '{named}' is neither a file nor a directory and cannot be had from the hub: "
            f"{first_line(error)}{_beside(hub.name)}",
            "offline, give --data a file or directory (.txt, .jsonl, .csv, .parquet), or try --data demo; for a gated "
            "or private data set, `hf auth login`",
        ) from None
