"""The tokens that a text needs, and a loaded model without the others.

Texts -> how often each token occurs -> the tokens to keep -> tokenizer and tables without the
others, and what other text becomes.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save
from transformers import PreTrainedTokenizerBase

from kdcli.data.sources import HubSource, Source, open_source
from kdcli.data.text.shards import tokenizer_hash
from kdcli.disk import cache_dir, cache_key, disk_errors, write_atomic
from kdcli.errors import UsageError
from kdcli.models.model import Model
from kdcli.models.shape import positions_of
from kdcli.models.trim import (
    Array,
    check_trimmable,
    count_tokens,
    cut_model,
    cut_tokenizer,
    named_in,
    needed_by,
)
from kdcli.recipe.resolve import read_recipe
from kdcli.report.text import bytes_of

TEXTS_AT_ONCE = 1000
CHANGES_SHOWN = 5
OTHER_TEXTS = 10_000  # Of a validation split, to see how other text changes
COMPARED, COMPARED_TOKENS = (
    64,
    128,
)  # Of these: texts whose states are compared, and tokens of each at most


def trimmed(
    loaded: Model,
    text: str,
    *,
    size: int | None = None,
    column: str | None = None,
    prompts: Iterable[str] = (),
) -> tuple[Model, list[str]]:
    """Cut a model's tokenizer and tables of tokens to those that a text needs, and note what that
    changes.

    Args:
        text: a source of text, or a YAML file with one a language, which count alike however long
        they are.
        size: keep the most frequent tokens only, at most so many.
        column: of a table; None reads every text of a row.
        prompts: further text that the model reads.

    Raises:
        UsageError: a tokenizer that cannot be cut, text that cannot be read, a size too small, or
            every token is needed.
    """
    tokenizer = loaded.tokenizer
    named = named_in(loaded.model.config) | {
        n for prompt in prompts for n in tokenizer(prompt)["input_ids"]
    }
    check_trimmable(tokenizer, loaded.source)
    sources = _sources(text)
    names = list(sources) if len(sources) > 1 else ["the text"]
    read = zip(names, sources.values(), strict=True)
    counts = {name: _counts(source, column, tokenizer) for name, source in read}
    kept, notes = kept_tokens(tokenizer, counts, named, size)
    smaller = cut(loaded, kept)
    before, after = (
        sum(p.numel() * p.element_size() for p in each.model.parameters())
        for each in (loaded, smaller)
    )
    name = Path(loaded.source).name
    notes.append(f"{name} takes {bytes_of(after)}, {bytes_of(before)} with its whole vocabulary")
    for name, source in sources.items():
        held = f"{name} (validation split)"
        shown = list(itertools.islice(_validation(source, column), OTHER_TEXTS))
        notes += _changes(held, shown, tokenizer, smaller.tokenizer, kept)
        if shown:
            cosines = _cosines(loaded, smaller, shown[:: -(-len(shown) // COMPARED)])
            near = (
                f"cosine {cosines.mean():.4f}, the least {cosines.min():.4f}, on {len(cosines)} "
                "texts"
            )
            notes.append(f"{held}: mean state compared with the whole vocabulary: {near}")
    return smaller, notes


def cut(loaded: Model, kept: Array) -> Model:
    """A loaded model with the tokens `kept` alone."""
    model, tokenizer = cut_model(loaded.model, kept), cut_tokenizer(loaded.tokenizer, kept)
    return replace(loaded, model=model, tokenizer=tokenizer)


def kept_tokens(
    tokenizer: PreTrainedTokenizerBase,
    counts: Mapping[str, Array],
    named: set[int],
    size: int | None,
) -> tuple[Array, list[str]]:
    """Choose the ids to keep by how often each occurs in texts, and note how much of each text they
    cover.

    `named`: ids that stay in any case. Raises UsageError: see `trimmed`.
    """
    # Texts count alike, however long: a language with little text keeps its tokens.
    shares = sum(each / max(1, each.sum()) for each in counts.values())
    kept = _kept(tokenizer, np.asarray(shares), named, size)
    covered = ", ".join(
        f"{each[kept].sum() / max(1, each.sum()):.3%} of {name}" for name, each in counts.items()
    )
    return kept, [f"{len(kept):,} of {len(tokenizer):,} tokens kept; they cover {covered}"]


def _sources(text: str) -> dict[str, str]:
    """Return name -> source of the texts that count alike: the one given, or those that a YAML file
    lists by language.

    Raises UsageError: a file that is no list of texts.
    """
    if not text.endswith((".yaml", ".yml")):
        return {text: text}
    listed, hint = read_recipe(text, None), "write a line a language, such as 'de: ./german.txt'"
    if not listed:
        raise UsageError(f"{text} lists no text", hint)
    for name, source in listed.items():
        if not isinstance(source, str):
            raise UsageError(f"{text}: {name} names no text", hint)
    return listed


def _kept(
    tokenizer: PreTrainedTokenizerBase, shares: Array, named: set[int], size: int | None
) -> Array:
    """The ids to keep: those `named` and those that occur, or the most frequent of them that make a
    vocabulary of at most `size`."""
    needed = needed_by(tokenizer)
    frequent = np.argsort(-shares, kind="stable")[: int((shares > 0).sum())].tolist()
    kept = needed([*named, *frequent])
    if size is not None and len(kept) > size:
        least, most = 0, len(frequent)  # `least` fit, `most` do not.
        kept = needed(named)
        if len(kept) > size:
            always = f"{len(kept):,} tokens always stay: special ones, single characters and bytes"
            raise UsageError(
                f"a vocabulary of {size:,} is too small: {always}", f"give at least {len(kept)}"
            )
        while most - least > 1:
            middle = (least + most) // 2
            tried = needed([*named, *frequent[:middle]])
            least, most, kept = (
                (middle, most, tried) if len(tried) <= size else (least, middle, kept)
            )
    if len(kept) == len(tokenizer):
        hint = "give less text, or a size below it"
        raise UsageError(f"the text needs all {len(kept):,} tokens: nothing to trim", hint)
    return kept


def _counts(source: str, column: str | None, tokenizer: PreTrainedTokenizerBase) -> Array:
    """How often each token occurs in the training split of a source, cached; what the hub holds may
    change."""
    opened = open_source(source)
    key = cache_key("vocabulary", opened.identity, column, tokenizer_hash(tokenizer))
    file = cache_dir() / "vocabularies" / f"{key}.safetensors"
    if file.is_file() and not isinstance(opened, HubSource):
        return load_file(file)["counts"]
    counts = sum(
        _counted(tokenizer, _texts(opened, "train", column)), np.zeros(len(tokenizer), np.int64)
    )
    with disk_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(file, save({"counts": np.asarray(counts)}))
    return np.asarray(counts)


def _counted(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str]) -> Iterator[Array]:
    return (count_tokens(tokenizer, batch) for batch in _batches(texts))


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    left = iter(texts)
    while batch := list(itertools.islice(left, TEXTS_AT_ONCE)):
        yield batch


@torch.no_grad()
def _cosines(loaded: Any, smaller: Any, texts: Sequence[str]) -> Array:
    """Of each text the cosine between its mean last states under two models that read it in tokens
    of their own."""
    means = []
    for each in (loaded, smaller):
        longest = min(COMPARED_TOKENS, positions_of(each.model.config) or COMPARED_TOKENS)
        how: dict[str, Any] = {"truncation": True, "max_length": longest, "return_tensors": "pt"}
        rows = (each.tokenizer(text, **how) for text in texts)
        encoder = each.model.base_model.eval()
        states = (
            encoder(**{k: row[k] for k in ("input_ids", "attention_mask")}).last_hidden_state
            for row in rows
        )
        means.append(torch.stack([state_1LD[0].mean(0) for state_1LD in states]))
    one, other = means
    return torch.nn.functional.cosine_similarity(one, other).numpy()


def _changes(
    name: str,
    texts: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    cut: PreTrainedTokenizerBase,
    kept: Array,
) -> list[str]:
    """How many of some texts change, and what their commonest changed words become. A text changes
    where it holds a removed token."""
    removed, changed, words = set(range(len(tokenizer))) - set(kept.tolist()), 0, Counter[str]()
    for batch in _batches(texts):
        rows = tokenizer(batch, add_special_tokens=False, verbose=False)
        for n, (text, ids) in enumerate(zip(batch, rows["input_ids"], strict=True)):
            of_removed = {
                rows.token_to_word(n, at) for at, token in enumerate(ids) if token in removed
            }
            changed += bool(of_removed)
            spans = [rows.word_to_chars(n, word) for word in of_removed if word is not None]
            words.update({text[begin:end].strip() for begin, end in spans})
    if not texts:
        return []
    notes = [
        f"{name}: {changed:,} of {len(texts):,} texts are segmented otherwise, "
        f"{changed / len(texts):.1%}"
    ]
    for word, times in words.most_common(CHANGES_SHOWN):
        before, after = (" ".join(each.tokenize(word)) for each in (tokenizer, cut))
        notes.append(f"{word!r}, in {times:,} of them: {before} -> {after}")
    return notes


def _validation(source: str, column: str | None) -> Iterator[str]:
    opened = open_source(source)
    return _texts(opened, "validation", column) if opened.has("validation") else iter(())


def _texts(source: Source, split: str, column: str | None) -> Iterator[str]:
    """Every text of a split: of a row all its columns, or one; a list of words is a text a word."""
    if column is not None:
        yield from source.documents(split, column)
        return
    for name, rows in source.tables(split):
        text = None
        for _, values in rows:
            for value in values.values():
                for text in value if isinstance(value, list) else [value]:
                    if isinstance(text, str):
                        yield text
        if text is None:
            raise UsageError(f"{name} holds no text")
