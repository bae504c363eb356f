"""The files of a model that others made: read with bounds and checked before transformers builds anything from them.

`config.json` may name no code, no other file and no size that the weights do not have; an index names safetensors files
of its own directory only, so that nothing is unpickled.
"""

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from huggingface_hub.utils import httpx  # type: ignore[attr-defined]  # its client, whichever version that is
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from kdcli.disk import read_json
from kdcli.errors import UsageError, one_line, shortened
from kdcli.models.custom_class import COMPACT, LABEL_WORDS, UNILM

CONFIG, ADAPTER = "config.json", "adapter_config.json"
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
)
TOKENIZER_BYTES = 100_000_000
KINDS: dict[str, type] = {
    "architectures": list,
    "auto_map": dict,
    "id2label": dict,
    "label2id": dict,
    COMPACT: list,
    LABEL_WORDS: dict,
    UNILM: dict,
}
NAMED: dict[type, str] = {dict: "a JSON object", list: "a list", int: "a whole number"}
FLAGS = (
    "output_hidden_states",
    "output_attentions",
    "use_cache",
    "tie_word_embeddings",
    "is_decoder",
)
SIZE = re.compile(
    r".*(dim|_size|layers|heads|embeddings|positions|groups|group_num|networks|buckets|num_labels)"
)
REPEATED = re.compile(r".*(layers|groups|group_num|networks)")  # sizes that count modules
NONE = re.compile(r".*(buckets|positions)")  # sizes for which DeBERTa writes -1 where it has none
NEEDED = (
    "layers",
    "heads",
    "hidden_size",
    "intermediate_size",
    "embedding_size",
)  # ALBERT's gap_size may be 0
MOST_SIZE, MOST_REPEATED = 10_000_000, 1_000
HUB_ERRORS = (OSError, httpx.HTTPError)
ATTENTION = (None, "eager", "sdpa")
OTHER_WEIGHTS = {
    "quantization_config": "quantised weights",
    "transformers_weights": "a file of weights",
}
FOREIGN_ERRORS = (
    *(
        ArithmeticError,
        AssertionError,
        AttributeError,
        ImportError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
    ),
    StrictDataclassError,
)
"""What transformers and tokenizers raise about files that do not fit them."""


def file_of(
    source: str, name: str, revision: str | None = None, *, needed: bool = False
) -> Path | None:
    """A file of a directory or of a hub id, downloaded if it is not cached; None: there is none. Raises HUB_ERRORS: the
    hub cannot be asked, or a `needed` file is not there."""
    found = cached_file(
        source, name, revision=revision, _raise_exceptions_for_missing_entries=needed
    )
    return None if found is None else Path(found)


def file_beside(source: str, name: str) -> Path | None:
    """A file beside a model; None if it has none, or the hub cannot be asked."""
    try:
        found = file_of(source, name)
    except HUB_ERRORS:
        return None
    return found if found is not None and found.is_file() else None


def check_config(raw: Mapping[str, Any], source: object) -> None:
    """Check values of a configuration that transformers trusts. Raises UsageError: a value of another kind, a size
    beyond any encoder's, an attention implementation that would be downloaded, or weights that are not read."""

    def refuse(name: str, allowed: str) -> None:
        raise UsageError(
            f"{source}: '{name}' must be {allowed}, got {shortened(repr(raw[name]), 60)}"
        )

    for name, kind in KINDS.items():
        if not isinstance(raw.get(name), kind | None):
            refuse(name, NAMED[kind])
    if not all(isinstance(name, str) for name in raw.get("architectures") or ()):
        refuse("architectures", "a list of names")
    words = raw.get(LABEL_WORDS)
    if words is not None and not (
        isinstance(words.get("ids"), list) and isinstance(words.get("auto_class"), str)
    ):
        refuse(LABEL_WORDS, "a JSON object with ids and auto_class")
    # True is an int too.
    if (unilm := raw.get(UNILM)) is not None and not all(
        isinstance(unilm.get(key), int) for key in ("mask_token_id", "position_offset", "interface")
    ):
        refuse(UNILM, "a JSON object with mask_token_id, position_offset and interface")
    for name, value in raw.items():
        if name in FLAGS and not isinstance(value, bool | None):
            refuse(name, "true or false")
        if isinstance(value, float) and not math.isfinite(value):
            refuse(name, "a finite number")
        most = MOST_REPEATED if REPEATED.fullmatch(name) else MOST_SIZE
        least = 1 if name.endswith(NEEDED) else -1 if NONE.fullmatch(name) else 0
        if SIZE.fullmatch(name) and isinstance(value, int | float) and not least <= value <= most:
            refuse(name, f"at least {least} and at most {most:,}")
        # Such a key would replace a method of the configuration, or a table that renames its keys.
        if callable(of_class := getattr(PreTrainedConfig, name, None)) or isinstance(
            of_class, dict
        ):
            raise UsageError(f"{source}: '{name}' is no setting", "leave the key out")
    if raw.get("chunk_size_feed_forward") not in (None, 0):
        refuse("chunk_size_feed_forward", "0: it cuts only batches of some lengths")
    for name in ("attn_implementation", "_attn_implementation"):
        if raw.get(name) not in ATTENTION:
            refuse(name, "absent, eager or sdpa; others may be downloaded code")
    for name, what in OTHER_WEIGHTS.items():
        if raw.get(name) is not None:
            raise UsageError(
                f"{source} names {what} ('{name}'); kdcli reads plain {WEIGHTS[0]}",
                "save it as such",
            )


@contextmanager
def config_errors(source: object) -> Iterator[None]:
    """Turn whatever transformers raises about a configuration into a `UsageError` with the name of its `source`. Only
    for calls into transformers whose one foreign input is that configuration, so that no fault of ours is hidden."""
    try:
        yield
    except FOREIGN_ERRORS as error:
        kind = (
            ""
            if isinstance(error, ValueError | StrictDataclassError)
            else f"{type(error).__name__}: "
        )
        raise UsageError(f"{source} cannot be used: {kind}{one_line(error)}") from None


def check_tokenizer(source: str) -> None:
    """Raise a `UsageError` where a tokenizer's JSON is damaged, too large or too deep."""
    for name in TOKENIZER:
        if (file := file_of(source, name)) is not None:
            read_json(file, most_bytes=TOKENIZER_BYTES)


def weight_files(source: str, revision: str | None) -> list[Path]:
    """The safetensors files of a model, downloaded if need be; `revision`: a commit of the hub. Raises UsageError: an
    adapter; an index that names anything but safetensors files of its own directory; a damaged file. HUB_ERRORS: a file
    is missing or cannot be had."""
    if file_of(source, ADAPTER, revision) is not None:
        raise UsageError(
            f"{source} holds an adapter ({ADAPTER})",
            "merge it into the model it is for, and save that",
        )
    files = [file_of(source, WEIGHTS[0], revision)]
    if files[0] is None:
        index = file_of(source, WEIGHTS[1], revision)
        if index is None:
            raise UsageError(f"{source} has no {WEIGHTS[0]}")
        check_index(index)
        files = [
            Path(file)
            for file in get_checkpoint_shard_files(source, str(index), revision=revision)[0]
        ]
    found = [file for file in files if file is not None]
    for file in found:
        try:
            with safe_open(file, "pt") as tensors:
                tensors.keys()
        except SafetensorError as error:
            raise UsageError(f"{file} is damaged: {error}", "download or copy it again") from None
    return found


def check_index(index: Path) -> None:
    """Raise a `UsageError` where an index of shards has no metadata or names a file that is no safetensors file of its
    directory."""
    tree = read_json(index)
    shards = tree.get("weight_map")
    if not isinstance(tree.get("metadata"), dict):
        raise UsageError(f"{index} has no metadata, which must be a JSON object")
    if (
        not isinstance(shards, dict)
        or not shards
        or not all(isinstance(name, str) for name in shards.values())
    ):
        raise UsageError(f"{index} has no weight_map from tensors to files")
    folder = index.parent.resolve()
    # In the cache of the hub, files are links to the blobs of the same model.
    allowed = (
        {folder, folder.parent.parent / "blobs"} if folder.parent.name == "snapshots" else {folder}
    )
    for name in sorted(set(shards.values())):
        plain = Path(name).name == name and name.endswith(".safetensors") and "\0" not in name
        if not plain or (index.parent / name).resolve().parent not in allowed:
            raise UsageError(
                f"{index} names {shortened(repr(name), 60)}, which is no safetensors file of that directory"
            )


def check_builds(source: str, config: PreTrainedConfig, auto_class: Any) -> PreTrainedModel:
    """The model of a configuration, without memory. Raises UsageError: transformers cannot build it."""
    with config_errors(f"the {CONFIG} of {source}"), torch.device("meta"), no_init_weights():
        built = (
            auto_class(config)
            if issubclass(auto_class, PreTrainedModel)
            else auto_class.from_config(config)
        )
    model: PreTrainedModel = built
    return model


def check_declared(
    source: str, config: PreTrainedConfig, auto_class: Any, files: list[Path]
) -> None:
    """Compare the parameters of a configuration with the bytes of its files. Raises UsageError: see `check_builds`;
    more parameters than the files can hold."""
    empty = check_builds(source, config, auto_class)
    declared, stored = (
        sum(p.numel() for p in empty.parameters()),
        sum(file.stat().st_size for file in files),
    )
    if declared > stored:
        message = f"the {CONFIG} of {source} declares {declared:,} parameters; its weights hold {stored:,} bytes"
        raise UsageError(message)
