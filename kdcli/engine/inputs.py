"""The inputs of a run: the files that its recipe or its command names, whatever the spelling.

Every verb that writes or deletes a path from the user first asks `check_not_input`, and every
verb that empties a directory also asks `foreign_files`.
"""

from __future__ import annotations

import fnmatch
import functools
import glob
import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from fsspec.implementations.local import LocalFileSystem

from kdcli.disk import EMBEDDED, HASHES, check_writable, holds_run, user_path
from kdcli.errors import UsageError
from kdcli.listing import listed
from kdcli.manifest import NOT_LISTED, Manifest
from kdcli.recipe.yaml import read_yaml

PATH_KEYS = frozenset(
    [
        *("model", "models", "teacher", "more_teachers", "student", "base", "masks", "documents"),
        *("source", "train", "partition", "text", "texts", "vectors", "glove", "soft_labels"),
        *("recipe", "run", "index_model"),
    ]
)
"""Recipe keys whose values may be a bare name of a file or directory.

Under other keys, only a value with a separator or a dot may be a path: a directory may be called
`linear`, as a schedule is.
"""
NO_PATHS = frozenset({"columns"})
"""Recipe keys below which no value names a file."""
LOCAL_URL = re.compile(r"(?:file|local):", re.IGNORECASE)
URL = re.compile(r"\w[\w+.-]+:/")
MAX_LISTED = 3
"""Maximum number of foreign files in a message."""


def local_paths(source: str) -> list[Path]:
    """Return the local paths that a model or data source may name; empty if it names none.

    A source is a path, a pattern, a URL such as `file:///data`, or a chain of URLs such as
    `zip://rows.csv::file:///rows.zip`, each also with `@revision`.
    """
    if source in EMBEDDED:
        return []
    paths: dict[Path, None] = {}
    for part in source.split("::"):
        for text in dict.fromkeys([part, part.rpartition("@")[0] or part]):
            if LOCAL_URL.match(text):
                text = LocalFileSystem._strip_protocol(text)
            elif URL.match(text):
                continue
            try:
                path = user_path(text)
                if not path.exists():
                    # The configuration of a clone may follow.
                    path = user_path(text.rpartition(":")[0] or text)
                if path.exists():
                    paths[path] = None
                elif glob.has_magic(text):
                    paths |= dict.fromkeys(map(Path, glob.glob(str(path), recursive=True)))  # noqa: PTH207
            except (UsageError, OSError, ValueError):
                continue  # It is not a path.
    return list(paths)


def texts_in(tree: object, key: str = "") -> Iterator[str]:
    """Yield the strings in a recipe's values that may be paths.

    Args:
        tree: The recipe, or the value of a key.
        key: The key.
    """
    if isinstance(tree, str):
        if tree and (key in PATH_KEYS or any(mark in tree for mark in "/\\.")):
            yield tree
    elif isinstance(tree, list):
        for value in tree:
            yield from texts_in(value, key)
    elif isinstance(tree, dict):
        for inner, value in tree.items():
            if inner not in NO_PATHS:
                yield from texts_in(value, inner)


def _real_places(path: Path, skipped: Path, seen: set[Path]) -> Iterator[Path]:
    """Yield where a path and everything below it really lie.

    A link is at its own place and at the place that it leads to. The directory `skipped` is not
    entered from the directory that holds it: what is written there is not read from there.
    """
    real = path.resolve()
    yield real
    if not real.is_dir() or real in seen:
        return
    seen.add(real)
    for inside in real.iterdir():
        if inside == skipped and inside.is_dir():
            continue
        yield inside
        if inside.is_symlink() or inside.is_dir():
            yield from _real_places(inside, skipped, seen)


def input_at(place: Path, sources: Iterable[str]) -> str | None:
    """Return the source that has a file at `place` or below it; None if no source has one.

    Args:
        place: A file that is written, or a directory that is deleted.
        sources: The models and data of the command.
    """
    real = place.resolve()
    if not real.exists():
        return None

    # The file system may know the place under several names, in upper and in lower case.
    @functools.cache
    def is_place(path: Path) -> bool:
        with suppress(OSError):
            return path.samefile(real)
        return False

    for source in sources:
        for path in local_paths(source):
            own_place = path.absolute().parent.resolve() / path.name
            places = itertools.chain([own_place], _real_places(path, real, set()))
            if any(is_place(above) for at in places for above in (at, *at.parents)):
                return source
    return None


def check_not_input(place: Path, sources: Iterable[str], option: str) -> None:
    """Refuse to write or delete a place that holds an input.

    Args:
        place: The file or directory.
        sources: The models and data of the command.
        option: The option that writes or deletes the place, for the message.

    Raises:
        UsageError: A source has a file at the place or below it.
    """
    if (source := input_at(place, sources)) is not None:
        verb = "delete" if place.is_dir() else "overwrite"
        raise UsageError(
            f"{option} would {verb} {source}, which this command reads",
            "choose another place for the output",
        )


def check_output_file(file: Path, sources: Iterable[str], option: str, *, overwrite: bool) -> None:
    """Check, before any work, that an option may write a file.

    Args:
        file: The file.
        sources: The models and data of the command.
        option: The option that names the file.
        overwrite: Whether `--overwrite` allows replacing an existing file.

    Raises:
        UsageError: The file is an input, or it exists and may not be replaced.
        MachineError: The file cannot be written.
    """
    check_writable(file, directory=False)
    check_not_input(file, sources, option)
    if file.is_file() and not overwrite:
        raise UsageError(
            f"{option} {file}: the file already exists",
            "--overwrite replaces it; or name another file",
        )


# The files of a model that change what it computes; README.md and reports do not.
OF_MODEL = (
    *("*.safetensors", "*config*.json", "tokenizer.json", "*tokens*.json", "vocab.*", "merges.txt"),
    *("*.model", "modules.json", "*.py", "export.json", "*.onnx", "*.onnx.data"),
)


def content_of_inputs(recipe_yaml: str, folder: Path) -> dict[str, str]:
    """Hash the content of the local files that a recipe names, and what its teacher's server is.

    Files inside the run, or inside a run that this one is a part of, are skipped, because their own
    recipes determine them.

    Args:
        recipe_yaml: The resolved recipe, whose data has been opened.
        folder: The directory of the run.

    Returns:
        Each source, as the recipe spells it -> a hash of its content.
    """
    own = next((above for above in reversed(folder.absolute().parents) if holds_run(above)), folder)
    content: dict[str, str] = {}
    for source in dict.fromkeys(texts_in(read_yaml(recipe_yaml))):
        local = sorted(local_paths(source))
        outside = [path for path in local if not path.resolve().is_relative_to(own.resolve())]
        if outside or (not local and source in HASHES):
            content[source] = HASHES.get(source) or " ".join(map(_hash_of, outside))
    return content


def changed_inputs(now: Mapping[str, str], before: Mapping[str, str]) -> str:
    """Say which inputs have another hash than when a run began, by source; empty for none."""
    changed = [name for name, value in now.items() if before.get(name, value) != value]
    have = "has" if len(changed) == 1 else "have"
    return f"{' and '.join(changed)} {have} changed" if changed else ""


def _hash_of(path: Path) -> str:
    digest = hashlib.sha256()
    files = [path]
    if path.is_dir():
        is_model = (path / "config.json").is_file() or (path / "modules.json").is_file()
        inside = path.rglob("*") if is_model else path.iterdir()
        patterns = OF_MODEL if is_model else ("*",)
        files = sorted(
            file
            for file in inside
            if file.is_file() and any(fnmatch.fnmatchcase(file.name, each) for each in patterns)
        )
    for file in files:
        digest.update(str(file.relative_to(path)).encode())
        with file.open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()


# The names of the files that kdcli writes, in a run and in the directories inside it.
WRITTEN = (
    *("recipe.yaml", "log.jsonl", "report.json", "report.md", "report.html", "latency.csv"),
    *("*.safetensors", "*.safetensors.index.json", "config.json", "*config*.json", "modules.json"),
    *("tokenizer.json", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt"),
    *("*.model", "*.jinja", "modeling_*.py", "README.md", "state.json", "predictions.json"),
    *("export.json", "*.onnx", "*.onnx.data", "openvino_*.xml", "openvino_*.bin", "pareto.png"),
    *("pruning.json", "inputs.json", "text.train.jsonl", "text.validation.jsonl"),
    "training-text.jsonl",  # Of an earlier version.
    # Submissions to the GLUE server.
    *("CoLA.tsv", "SST-2.tsv", "MRPC.tsv", "STS-B.tsv", "QQP.tsv", "MNLI-m.tsv", "MNLI-mm.tsv"),
    *("QNLI.tsv", "RTE.tsv", "WNLI.tsv"),
)
# File systems, desktops and trackers write these.
OF_THE_SYSTEM = (".DS_Store", "Thumbs.db", ".nfs*", "events.out.tfevents.*")
GROWING = ("log.jsonl", "report.json")
"""Files whose content the manifest does not compare: the log grows, and both must be deletable if
they are damaged, since `--overwrite` is the only way out."""
DIRECTORIES = frozenset({"signals", ".aim", "dvclive", "mlruns", "swanlog", "trackio", "wandb"})
"""Directories that hold files of other names: stored signals, and logs of trackers."""
UNFINISHED = re.compile(r"\.lock|\..*\.(part|old|lock|used)|\.staged|\.manifest\.jsonl(\.part)?")


def foreign_files(folder: Path, written: Iterable[Path] = ()) -> list[Path]:
    """List the files below an output directory that kdcli did not write, or not as they are.

    The directory's manifest decides. Names decide about files that it does not list, such as
    checkpoints, and about every file in a directory of an older version, which has no manifest.

    Args:
        folder: The output directory.
        written: Further files and directories that this command writes there.
    """
    places = (path.resolve() for path in written)
    # A directory that holds the run itself excuses nothing in it.
    own = [place for place in places if not folder.resolve().is_relative_to(place)]
    manifest = Manifest(folder)
    found = []
    for inside in sorted(folder.rglob("*")):
        if inside.is_dir() and not inside.is_symlink():
            continue
        relative = inside.relative_to(folder)
        if any(inside.resolve().is_relative_to(path) for path in own):
            continue
        if manifest.exists and _is_compared(relative):
            is_known = manifest.is_unchanged(inside)
        else:
            is_known = _has_known_name(relative)
        if not is_known:
            found.append(inside)
    return found


def _has_known_name(path: Path) -> bool:
    """Whether kdcli, a tracker or the system writes files of this name."""
    patterns = (*WRITTEN, *OF_THE_SYSTEM)
    is_named = any(fnmatch.fnmatchcase(path.name, pattern) for pattern in patterns)
    return is_named or any(part in DIRECTORIES or UNFINISHED.fullmatch(part) for part in path.parts)


def _is_compared(path: Path) -> bool:
    """Whether the manifest of a directory decides about a path inside it."""
    is_of_system = any(fnmatch.fnmatchcase(path.name, pattern) for pattern in OF_THE_SYSTEM)
    is_private = any(part in DIRECTORIES or UNFINISHED.fullmatch(part) for part in path.parts)
    return not (is_of_system or is_private or path.name in GROWING or NOT_LISTED & {*path.parts})


def check_no_foreign_files(folder: Path, written: Iterable[Path] = ()) -> None:
    """Refuse to empty a directory that holds files which kdcli did not write as they are.

    Raises:
        UsageError: There are such files; the message names some of them.
    """
    foreign = foreign_files(folder, written)
    if foreign:
        names = listed((str(path.relative_to(folder)) for path in foreign), MAX_LISTED)
        raise UsageError(
            f"--overwrite would delete {names} in {folder}, which kdcli did not write, or which "
            "changed since then",
            "move them away, or choose another directory with -o",
        )
