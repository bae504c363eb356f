"""Read token files of datatrove's `DocumentTokenizer`.

Each `NAME.ds` file comes with `NAME.ds.metadata` (the tokenizer, the bytes per token and the number
of tokens) and `NAME.ds.index` (the ends of the documents, uint64).
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from kdcli.data.sources import Log
from kdcli.data.text.shards import Frame
from kdcli.data.text.stream import TokenStream
from kdcli.errors import UsageError

DS, METADATA, INDEX = ".ds", ".metadata", ".index"
FILE_ENDINGS = (DS, DS + METADATA, DS + INDEX)
MAX_METADATA_BYTES = 10_000
# Number of tokens that are checked at the beginning, in the middle and at the end of a file.
SAMPLED_TOKENS = 4096
OTHER_TOKENIZER_HINT = "run datatrove's DocumentTokenizer with the tokenizer of this model"


@dataclass(frozen=True)
class TokenFile:
    """A `.ds` file, the name of its tokenizer if known, its bytes per token, and its tokens."""

    path: Path
    tokenizer: str | None
    token_bytes: int
    tokens: int


def open_datatrove(
    folder: Path, tokenizer: PreTrainedTokenizerBase, frame: Frame, log: Log
) -> dict[str, TokenStream] | None:
    """Open the streams of a directory of datatrove by split; None if there are no such files.

    Files named `validation*` are held out.

    Raises:
        UsageError: A file is missing or cut, or the tokens come from another tokenizer.
    """
    if not folder.is_dir():
        return None
    names = sorted(path.name for path in folder.iterdir() if path.name.endswith(FILE_ENDINGS))
    if not names:
        return None
    _check_none_missing(folder, names)
    vocabulary_size = max(tokenizer.get_vocab().values()) + 1
    paths = [folder / name for name in names if name.endswith(DS)]
    files = [_read_metadata(path, vocabulary_size) for path in paths]
    for name in dict.fromkeys(file.tokenizer for file in files):
        _check_tokenizer(folder, name, tokenizer, log)
    sizes = sorted({file.token_bytes for file in files})
    if len(sizes) > 1:
        message = f"{folder} holds tokens of {' and of '.join(map(str, sizes))} bytes"
        raise UsageError(message, "give a directory whose files all have tokens of one size")
    dtype = f"<u{sizes[0]}"
    for file in files:
        _check_sample(file, dtype, vocabulary_size, frame)

    def stream(is_validation: bool) -> TokenStream:
        chosen = [f for f in files if f.path.name.startswith("validation") == is_validation]
        return TokenStream([(file.path, file.tokens) for file in chosen], dtype)

    validation = stream(True)
    return {"train": stream(False)} | ({"validation": validation} if validation.files else {})


def _check_none_missing(folder: Path, names: list[str]) -> None:
    files = {name for name in names if name.endswith(DS)}
    expected = {
        name.removesuffix(ending)
        for name in names
        for ending in (METADATA, INDEX)
        if name.endswith(DS + ending)
    }
    if missing := sorted(expected - files):
        raise UsageError(
            f"{folder}: {missing[0]} is missing ({len(missing)} of {len(expected)} files); "
            "its index is there",
            "copy it, too, or run datatrove's pipeline again, which writes the missing files",
        )


def _read_metadata(path: Path, vocabulary_size: int) -> TokenFile:
    """Read the metadata of a file.

    Without metadata, the size of the vocabulary determines the bytes per token, as in datatrove.
    """
    size = path.stat().st_size
    name, token_bytes, tokens = None, 2 if vocabulary_size <= 1 << 16 else 4, None
    metadata = path.with_name(f"{path.name}{METADATA}")
    if metadata.is_file():
        with metadata.open("rb") as file:
            lines = file.read(MAX_METADATA_BYTES).decode("utf-8", "replace").splitlines()
        try:
            name, digits = lines[0].rsplit("|", 1)
            token_bytes, tokens = int(digits), int(lines[1])
        except (IndexError, ValueError):
            raise UsageError(
                f"{metadata} is not metadata of datatrove, which begins with the lines "
                "TOKENIZER|BYTES and a number",
                "was it written by another program?",
            ) from None
    if token_bytes not in (2, 4) or size % token_bytes or tokens not in (None, size // token_bytes):
        count = f"{tokens:,} tokens" if tokens is not None else "tokens"
        message = f"{path} is cut: it has {size:,} bytes, not {count} of {token_bytes} bytes"
        raise UsageError(message, "copy it again, or write it again with datatrove")
    return TokenFile(path, name, token_bytes, size // token_bytes)


def _check_tokenizer(
    folder: Path, name: str | None, tokenizer: PreTrainedTokenizerBase, log: Log
) -> None:
    """Compare the vocabulary with the metadata's tokenizer, if it is on this machine."""
    if name is None or name == tokenizer.name_or_path:
        return
    path = Path(name) / "tokenizer.json" if Path(name).is_dir() else Path(name)
    if not path.is_file():
        try:
            path = Path(hf_hub_download(name, "tokenizer.json", local_files_only=True))
        except (LocalEntryNotFoundError, HFValidationError):
            log(
                f"{folder}: its tokenizer {name} is not on this machine; "
                "kdcli checks only a sample of its tokens"
            )
            return
    if Tokenizer.from_file(str(path)).get_vocab() != tokenizer.get_vocab():
        raise UsageError(
            f"{folder} holds tokens of {name}, whose vocabulary differs from the vocabulary of "
            f"{tokenizer.name_or_path}",
            OTHER_TOKENIZER_HINT,
        )


def _check_sample(file: TokenFile, dtype: str, vocabulary_size: int, frame: Frame) -> None:
    """Look for tokens beyond the vocabulary, and for documents with another frame."""
    if not file.tokens:
        return
    stream = TokenStream([(file.path, file.tokens)], dtype)
    last = max(0, file.tokens - SAMPLED_TOKENS)
    middle = max(0, file.tokens // 2 - SAMPLED_TOKENS)
    places = (0, middle, last)
    sample = np.concatenate(
        [stream.read(begin, min(SAMPLED_TOKENS, file.tokens)) for begin in places]
    )
    if (highest := int(sample.max())) >= vocabulary_size:
        raise UsageError(
            f"{file.path} holds token {highest:,}; the vocabulary of the model has "
            f"{vocabulary_size:,}",
            OTHER_TOKENIZER_HINT,
        )
    is_framed = frame.cls_id != frame.sep_id and frame.cls_id in sample
    if is_framed or frame.sep_id not in sample:
        raise UsageError(
            f"{file.path}: documents must end with the token {frame.sep_id} ({frame.sep}) and "
            "have no other frame",
            f"{OTHER_TOKENIZER_HINT} and eos_token={frame.sep!r}",
        )
