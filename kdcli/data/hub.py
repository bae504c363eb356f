"""Rows of a data set of the hub, streamed by `datasets`."""

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kdcli.data.rows import CARD, MAX_CARD_BYTES, ClassNames, Row
from kdcli.data.storage import File, NotFound, as_file, list_names, list_siblings
from kdcli.disk import COMMITS, use_entry, user_path
from kdcli.errors import UsageError, first_line

if TYPE_CHECKING:
    import datasets

CONFIGS = b"configs:"
CONFIG_KEYS = {"config_name", "data_files", "data_dir", "default", "description", "version"}
COMMIT_TIMEOUT = 10.0  # Seconds to wait for the hub's answer about the current commit.
DATA_SET_ID = re.compile(r"((?:[\w.-]+/)?[\w.-]+)(?::([^:@]*))?(?::([\w.-]+))?(?:@([\w./-]+))?")
HUB_HINT = (
    "offline, give --data a file or directory (.txt, .jsonl, .csv, .tsv, .parquet), or try "
    "--data demo; for a gated or private data set, `hf auth login`"
)


class HubId(NamedTuple):
    """The address of a data set on the hub.

    Attributes:
        name: `owner/name`.
        config: The configuration, or None for the default one.
        split: The only split to read, as training text. If None, all splits are read under their
            names.
        revision: A branch, tag or commit, or None for the current commit.
    """

    name: str
    config: str | None = None
    split: str | None = None
    revision: str | None = None

    @property
    def source(self) -> str:
        """The address without a revision, as a user writes it."""
        return f"{self.name}:{self.config or ''}:{self.split or ''}".rstrip(":")

    def commit(self) -> str | None:
        """Ask the hub for the commit of the revision; None without a network or such a data set.

        The current commit of a data set is remembered for the recipe of the run.
        """
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HFValidationError

        # Use the client's own import, because versions of the client use different libraries.
        from huggingface_hub.utils import httpx  # type: ignore[attr-defined]

        try:
            info = HfApi().dataset_info(self.name, revision=self.revision, timeout=COMMIT_TIMEOUT)
        except (OSError, httpx.HTTPError, HFValidationError):
            return None
        if self.revision is None and info.sha:
            COMMITS[self.source] = info.sha
        return info.sha

    def at_commit(self) -> "HubId":
        """Return the address at the commit of the run's first request for it.

        A run then reads only one commit. Without a network, the commit is unknown.
        """
        return self._replace(revision=self.revision or COMMITS.get(self.source) or self.commit())


def entry_at_commit(
    entry: Path,
    hub: HubId,
    about: str,
    is_complete: Callable[[Path], bool],
    last_file: str = "",
) -> Path:
    """Return the cache entry of the data set's commit, or the newest one without a network.

    The process uses the newest entry from then on, so that it cannot be deleted.

    Args:
        entry: The path of the entry without a commit.
        hub: The data set.
        about: The data that the entry belongs to.
        is_complete: Whether an entry is whole.
        last_file: The file that completes an entry that is a directory. Its time decides which
            entry is the newest, because later writes change the time of the directory.
    """
    commit = hub.commit()
    if commit is not None:
        return entry.with_name(f"{entry.stem}-{commit[:12]}{entry.suffix}")
    while True:
        complete = filter(is_complete, entry.parent.glob(f"{entry.stem}*{entry.suffix}"))
        newest = max(complete, key=lambda path: (path / last_file).stat().st_mtime_ns, default=None)
        if newest is None:
            return entry
        use_entry(newest, about)
        # It may have been deleted before this process used it.
        if is_complete(newest):
            return newest


class HubSize(NamedTuple):
    """The number of shards of a split, and its bytes according to the card (0 if unknown)."""

    shards: int
    bytes: int


@functools.cache
def hub_splits(hub: HubId) -> list[str]:
    """List the splits of a data set. If the address names a split, it is the training text."""
    import datasets

    with _hub_errors(hub):
        try:
            splits = datasets.get_dataset_split_names(hub.name, hub.config, revision=hub.revision)
        except ValueError:
            # The configuration is wrong, or none is named and none is the default.
            names = datasets.get_dataset_config_names(hub.name, revision=hub.revision)
            if hub.config not in names:
                raise unknown_config(hub.name, hub.config, names) from None
            raise
    if hub.split is None:
        return list(splits)
    if hub.split not in splits:
        raise NotFound(f"{hub.name} has no {hub.split} split; it has {', '.join(splits)}")
    return ["train"]


def hub_size(hub: HubId, split: str) -> HubSize:
    """Look up the size of a split."""
    with _hub_errors(hub):
        stream = _open_stream(hub, split)
        info = (stream.info.splits or {}).get(hub.split or split)
        return HubSize(stream.num_shards, (info and info.num_bytes) or 0)


def hub_rows(hub: HubId, split: str, shard: int | None = None) -> Iterator[Row]:
    """Read the rows of a split, or of one of its shards."""
    with _hub_errors(hub):
        stream = _open_stream(hub, split)
        if shard is not None and stream.num_shards > 1:
            stream = stream.shard(stream.num_shards, shard)
        part = f"{hub.name} {split}" + (f" part {shard}" if shard else "")
        classes = ClassNames.of(stream.features)
        for number, values in enumerate(stream, 1):
            yield classes.name_row(Row(f"{part} row {number}", values))


def _open_stream(hub: HubId, split: str) -> "datasets.IterableDataset":
    import datasets

    revision = hub.at_commit().revision
    return datasets.load_dataset(
        hub.name, hub.config, split=hub.split or split, revision=revision, streaming=True
    )


@functools.cache
def hub_configs(hub: HubId) -> tuple[str, ...]:
    """List the configurations of a data set; see `HubId.at_commit` for its revision."""
    import datasets

    with _hub_errors(hub):
        return tuple(datasets.get_dataset_config_names(hub.name, revision=hub.revision))


@functools.cache
def hub_files(hub: HubId) -> dict[str, list[File]]:
    """Return the addresses of a configuration's files by split; see `HubId.at_commit`."""
    import datasets

    with _hub_errors(hub):
        builder = datasets.load_dataset_builder(hub.name, hub.config, revision=hub.revision)
    return _files_of(builder)


def _files_of(builder: "datasets.DatasetBuilder") -> dict[str, list[File]]:
    by_split = builder.config.data_files or {}
    return {str(split): list(map(as_file, paths)) for split, paths in by_split.items()}


def unknown_config(address: str, config: str | None, names: Sequence[str]) -> NotFound:
    """Return the error for a configuration that does not exist, or for a source that names none."""
    if not names:
        return NotFound(f"{address} has no configuration {config}", f"give --data {address}")
    listed = list_names(list(names))
    if config is None:
        message = f"{address} has the configurations {listed}, no default"
    else:
        message = f"{address} has no configuration {config}; it has {listed}"
    return NotFound(message, f"name one of them: --data {address}:{names[0]}")


class CloneFiles(NamedTuple):
    """The files of a clone by split, and the names of its classes."""

    files: Mapping[str, list[File]]
    classes: ClassNames


def split_address(source: str) -> tuple[Path, str | None]:
    """Split the address of a clone, `DIRECTORY[:CONFIG]`, into its parts."""
    path = user_path(source)
    folder, _, config = source.rpartition(":")
    if folder and not path.exists() and (user_path(folder) / CARD).is_file():
        return user_path(folder), config
    return path, None


def clone_configs(folder: Path) -> dict[str, dict[str, object]]:
    """Read the configurations in the card of a data set's clone; empty without any.

    Raises:
        UsageError: The card cannot be read.
    """
    card = folder / CARD
    if not card.is_file() or CONFIGS not in card.read_bytes()[:MAX_CARD_BYTES]:
        return {}
    from huggingface_hub import DatasetCard

    with _card_errors(card):
        configs = DatasetCard.load(card).data.to_dict().get("configs")
        return {config.get("config_name", "default"): config for config in configs or []}


def clone_files(folder: Path, name: str | None = None) -> CloneFiles | None:
    """Find the files of a configuration in the card of a data set's clone.

    Args:
        folder: The clone.
        name: The configuration; None for the default one.

    Returns:
        The files, or None if there is no card with configurations.

    Raises:
        UsageError: The card cannot be read, it lacks the configuration, no configuration is the
            default, or it has settings for the readers of `datasets`.
    """
    by_name, card = clone_configs(folder), folder / CARD
    if name is None:
        if not by_name:
            return None
        defaults = [name for name, config in by_name.items() if config.get("default")]
        alone = by_name if len(by_name) == 1 else ()
        name = next(iter([*defaults, *({"default"} & by_name.keys()), *alone]), None)
    if name is None or name not in by_name:
        raise unknown_config(str(folder), name, list(by_name))
    import datasets

    with _card_errors(card):
        builder = datasets.load_dataset_builder(str(folder), name)
    files = _files_of(builder)
    settings = by_name[name].keys() - CONFIG_KEYS
    if settings:
        raise UsageError(
            f"{card}: the configuration has {', '.join(sorted(settings))}, which kdcli does not "
            "read",
            f"let datasets read it: load_dataset('{folder}', '{name}').save_to_disk('DIRECTORY')",
        )
    return CloneFiles(files, ClassNames.of(builder.info.features))


@contextmanager
def _card_errors(card: Path) -> Iterator[None]:
    """Turn every error of a card's reader into one that names the card."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  # Readers of YAML raise their own classes.
        message = f"{card}: the configurations cannot be read: {first_line(error)}"
        raise UsageError(message, "correct the card, or give a directory of files") from None


@contextmanager
def _hub_errors(hub: HubId) -> Iterator[None]:
    """Turn an error of `datasets` into one that names the data set and tells what to do."""
    try:
        yield
    except (ConnectionError, OSError, ValueError, RuntimeError) as error:
        name = f"{hub.name}:{hub.config}" if hub.config else hub.name
        message = (
            f"data '{name}' is neither a file nor a directory and cannot be loaded from the hub: "
            f"{first_line(error)}{list_siblings(hub.name)}"
        )
        raise NotFound(message, HUB_HINT) from None
