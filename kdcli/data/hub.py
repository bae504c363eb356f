"""Rows of a data set of the hub, streamed by `datasets`."""

import functools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from kdcli.data.formats import NotFound, Row, beside
from kdcli.disk import COMMITS
from kdcli.errors import first_line

HUB_SECONDS = 10.0  # Timeout of the question which commit of a data set is the present one.
HUB_ID = re.compile(r"((?:[\w.-]+/)?[\w.-]+)(?::([^:@]*))?(?::([\w.-]+))?(?:@([\w./-]+))?")


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


@functools.cache
def hub_splits(hub: HubId) -> list[str]:
    """The splits of a data set; one that was named is the training text."""
    import datasets

    with _errors(hub):
        found = list(datasets.get_dataset_split_names(hub.name, hub.config, revision=hub.revision))
    if hub.split is None:
        return found
    if hub.split not in found:
        raise NotFound(f"{hub.name} has no {hub.split} split; it has {', '.join(found)}")
    return ["train"]


def _stream(hub: HubId, split: str) -> Any:
    import datasets

    # What was asked before stays, so that all that a run reads is of one commit.
    revision = hub.revision or COMMITS.get(hub.source) or hub.commit()
    return datasets.load_dataset(
        hub.name, hub.config, split=hub.split or split, revision=revision, streaming=True
    )


def hub_size(hub: HubId, split: str) -> tuple[int, int]:
    """The number of shards of a split, and its bytes as the data set's card has them, 0 for unknown."""
    with _errors(hub):
        stream = _stream(hub, split)
        told = (stream.info.splits or {}).get(hub.split or split)
        return stream.num_shards, (told and told.num_bytes) or 0


def hub_rows(hub: HubId, split: str, shard: int | None = None) -> Iterator[Row]:
    """The rows of a split, or of one of its shards."""
    with _errors(hub):
        stream = _stream(hub, split)
        if shard is not None and stream.num_shards > 1:
            stream = stream.shard(stream.num_shards, shard)
        part = f"{hub.name} {split}" + (f" part {shard}" if shard else "")
        for number, row in enumerate(stream, 1):
            yield f"{part} row {number}", row


@contextmanager
def _errors(hub: HubId) -> Iterator[None]:
    try:
        yield
    except (ConnectionError, OSError, ValueError, RuntimeError) as error:
        named = hub.name + (f":{hub.config}" if hub.config else "")
        raise NotFound(
            f"data '{named}' is neither a file nor a directory and cannot be had from the hub: "
            f"{first_line(error)}{beside(hub.name)}",
            "offline, give --data a file or directory (.txt, .jsonl, .csv, .tsv, .parquet), or try --data demo; for a gated "
            "or private data set, `hf auth login`",
        ) from None
