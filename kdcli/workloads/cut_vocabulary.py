"""Vocabulary trimming: remove the tokens that a text does not need from a model.

Data flow: texts -> token counts -> tokens to keep -> smaller tokenizer and embedding tables, and a
report on how other text is tokenised now.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import TypeAdapter
from safetensors import safe_open
from safetensors.numpy import save
from transformers import PreTrainedTokenizerBase

from kdcli.data.accounts import ACCOUNTS, EMPTY, REPEATED, RowAccount, is_repeated
from kdcli.data.readers import check_header
from kdcli.data.rows import take_first, texts_in
from kdcli.data.sources import HubSource, Source, open_source
from kdcli.data.storage import base_name
from kdcli.data.text.shards import tokenizer_hash
from kdcli.disk import cache_dir, cache_key, lock_entry, use_entry, write_atomic
from kdcli.errors import UsageError
from kdcli.models.model import Model
from kdcli.models.shape import positions_of
from kdcli.models.trim import (
    check_trimmable,
    count_tokens,
    cut_model,
    cut_tokenizer,
    named_in,
    needed_by,
)
from kdcli.recipe.resolve import read_recipe
from kdcli.report.schema import Trimming
from kdcli.types import Array

ACCOUNT = "account"  # The key of the account of rows in a cached file.
_ROW_ACCOUNT = TypeAdapter(RowAccount)

TEXTS_AT_ONCE = 1000
CHARS_AT_ONCE = 1 << 20
"""A call of the tokenizer gets this many texts or characters, whichever comes first."""
CHANGES_SHOWN = 5
"""Number of changed words in the report."""
OTHER_TEXTS = 10_000
"""Maximum number of texts of a validation split that are checked for changes."""
MIN_COVERAGE = 0.99
"""Share of a text's tokens below which a warning is given.

A text of 100 tokens then has more than one removed token on average."""
COMPARED, COMPARED_TOKENS = 64, 128
"""Maximum number of texts whose hidden states are compared, and maximum tokens per text."""


@dataclass(frozen=True)
class TokenUse:
    """How often the tokens of a model occur in texts.

    Attributes:
        counts: Name of a source -> the number of times that each token occurs in it. All sources
            have the same weight, however long they are.
        named: Ids that are always kept.
        texts: The number of texts of all sources.
    """

    counts: Mapping[str, Array]
    named: set[int]
    texts: int

    @classmethod
    def of_texts(cls, loaded: Model, texts: Iterable[str], prompts: Iterable[str]) -> "TokenUse":
        """Count the tokens of texts.

        Raises:
            UsageError: The tokenizer cannot be trimmed.
        """
        named = named_tokens(loaded, prompts)
        counts, count = np.zeros(len(loaded.tokenizer), np.int64), 0
        for batch in _batches(texts):
            counts += count_tokens(loaded.tokenizer, batch)
            count += len(batch)
        return cls({"the training rows": counts}, named, count)

    def sizes(self, loaded: Model) -> tuple[int, int]:
        """Return the least number of tokens that can be kept, and the number of all that occur."""
        counts_V = np.asarray(sum(self.counts.values()))
        needed = needed_by(loaded.tokenizer, counts_V)
        occurring = np.flatnonzero(counts_V)
        return len(needed(self.named)), len(needed([*self.named, *occurring]))

    def keep(self, loaded: Model, size: int | None) -> tuple[Array, Trimming]:
        """Return the ids of the most frequent tokens, and the share of each text that they cover.

        Raises:
            UsageError: `size` is too small, or every token is needed.
        """
        kept, trimming = kept_tokens(loaded.tokenizer, self.counts, self.named, size)
        return kept, trimming.model_copy(update={"texts": self.texts})


def named_tokens(loaded: Model, prompts: Iterable[str]) -> set[int]:
    """Return the ids in a model's configuration and its prompts, which it always needs.

    Raises:
        UsageError: The tokenizer cannot be trimmed.
    """
    check_trimmable(loaded.tokenizer, loaded.source)
    return named_in(loaded.model.config) | {
        n for prompt in prompts for n in loaded.tokenizer(prompt)["input_ids"]
    }


def trimmed(
    loaded: Model,
    text: str,
    *,
    size: int | None = None,
    column: str | None = None,
    share: float = 1.0,
    prompts: Iterable[str] = (),
) -> tuple[Model, Trimming, list[str]]:
    """Trim a model's tokenizer and embedding tables to the tokens that a text needs.

    Args:
        loaded: The model.
        text: A source of text, or a YAML file with one source per language. Every language has the
            same weight, however long its text is.
        size: Maximum number of tokens. The most frequent ones are kept. None keeps every token that
            occurs.
        column: Column of the text in a table; None reads every text in a row.
        share: Share of the rows that is read.
        prompts: Additional texts that the model reads.

    Returns:
        The trimmed model, the tokens that it keeps, and notes on what changed.

    Raises:
        UsageError: The tokenizer cannot be trimmed, the text cannot be read, `size` is too small,
            or every token is needed.
    """
    tokenizer = loaded.tokenizer
    named = named_tokens(loaded, prompts)
    sources = sources_of(text)
    names = ["the training text"]
    if len(sources) > 1:
        names = [f"{name} (training split)" for name in sources]
    named_sources = zip(names, sources.values(), strict=True)
    counted = {name: _counts(source, column, share, tokenizer) for name, source in named_sources}
    counts = {name: of_source for name, (of_source, _) in counted.items()}
    use = TokenUse(counts, named, sum(texts for _, texts in counted.values()))
    kept, trimming = use.keep(loaded, size)
    smaller = cut(loaded, kept)
    notes, measured = [kept_note(trimming), *low_coverage(trimming)], list[str]()
    for name, source in sources.items():
        other = f"{base_name(name) or name} (validation split)"
        measured += _changes_in(other, source, column, loaded, smaller, trimming, kept)
    return smaller, trimming, [*notes, *(measured or new_tokens_notes(trimming))]


def new_tokens_notes(trimming: Trimming) -> list[str]:
    """Estimate how many tokens of new texts are not kept, and warn if they are many."""
    note = (
        f"about {trimming.new:.1%} of the tokens of further texts like these are not kept, "
        "estimated from the tokens that occur once"
    )
    return [note, *few_texts(trimming, trimming.new)]


def few_texts(trimming: Trimming, removed: float) -> list[str]:
    """Warn if a large share of the tokens of texts that chose no token was removed.

    A limit on the size may be the reason instead; see `low_coverage`.
    """
    if removed <= 1 - MIN_COVERAGE or trimming.kept < trimming.needed:
        return []
    return [
        f"warning: the vocabulary has the tokens of {trimming.texts:,} texts, and other texts need "
        f"more: {removed:.1%} of their tokens are not kept, so such words become smaller pieces or "
        "unknown. Give more texts, or keep the whole vocabulary (in compress: --set "
        "plan.trim_from=1)"
    ]


def _changes_in(
    name: str,
    source: str,
    column: str | None,
    loaded: Model,
    smaller: Model,
    trimming: Trimming,
    kept: Array,
) -> list[str]:
    """Note how a source's validation texts change with the trimmed model."""
    texts = list(itertools.islice(_validation(source, column), OTHER_TEXTS))
    notes = _changes(name, texts, loaded.tokenizer, smaller.tokenizer, trimming, kept)
    if texts:
        cosines = _cosines(loaded, smaller, texts[:: -(-len(texts) // COMPARED)])
        notes.append(
            f"{name}: mean state compared with the whole vocabulary: cosine {cosines.mean():.4f}, "
            f"minimum {cosines.min():.4f}, on {len(cosines)} texts"
        )
    return notes


def kept_note(trimming: Trimming) -> str:
    """Tell how many tokens are kept, and how much of each text they cover."""
    return (
        f"{trimming.kept:,} of {trimming.whole:,} tokens kept; they cover {trimming.covered}, of "
        f"{trimming.texts:,} texts"
    )


def low_coverage(trimming: Trimming) -> list[str]:
    """Warn if the kept tokens cover too little of a text."""
    name, share = min(trimming.coverage.items(), key=lambda item: item[1])
    if share >= MIN_COVERAGE:
        return []
    every = "all of it" if len(trimming.coverage) == 1 else "all texts"
    return [
        f"warning: {trimming.kept:,} tokens cover only {share:.3%} of {name}, so its other tokens "
        f"are split into smaller pieces; it takes {trimming.needed:,} tokens to cover {every}"
    ]


def cut(loaded: Model, kept: Array) -> Model:
    """Return a copy of a model with only the tokens in `kept`."""
    model, tokenizer = cut_model(loaded.model, kept), cut_tokenizer(loaded.tokenizer, kept)
    return replace(loaded, model=model, tokenizer=tokenizer)


def kept_tokens(
    tokenizer: PreTrainedTokenizerBase,
    counts: Mapping[str, Array],
    named: set[int],
    size: int | None,
) -> tuple[Array, Trimming]:
    """Choose the token ids to keep from their frequency in texts.

    Args:
        tokenizer: The tokenizer.
        counts: Name of a text -> the number of times that each token occurs in it.
        named: Ids that are always kept.
        size: Maximum number of tokens; None keeps every token that occurs.

    Returns:
        The ids, and the share of each text that they cover.

    Raises:
        UsageError: `size` is too small, or every token is needed.
    """
    # All texts have the same weight, so that a language with little text keeps its tokens.
    shares = sum(of_text / max(1, of_text.sum()) for of_text in counts.values())
    kept, needed = _kept(tokenizer, np.asarray(shares), named, size)
    coverage = {
        name: float(of_text[kept].sum() / max(1, of_text.sum())) for name, of_text in counts.items()
    }
    # Good and Turing's estimate of the share of tokens that did not occur.
    unseen = [(of_text == 1).sum() / max(1, of_text.sum()) for of_text in counts.values()]
    new = float(max(1 - share + u for share, u in zip(coverage.values(), unseen, strict=True)))
    trimming = Trimming(
        kept=len(kept), whole=len(tokenizer), needed=needed, coverage=coverage, new=min(1.0, new)
    )
    return kept, trimming


def sources_of(text: str) -> dict[str, str]:
    """Return the sources of text, name -> source.

    Args:
        text: A source, or a YAML file that maps languages to sources.

    Raises:
        UsageError: The YAML file does not map names to sources.
    """
    if not text.endswith((".yaml", ".yml")):
        return {text: text}
    sources = read_recipe(text, None)
    hint = "write one line per language, such as 'de: ./german.txt'"
    if not sources:
        raise UsageError(f"{text} lists no text", hint)
    for name, source in sources.items():
        if not isinstance(source, str):
            raise UsageError(f"{text}: the value of {name} must be one source of text", hint)
    return sources


def _kept(
    tokenizer: PreTrainedTokenizerBase, shares: Array, named: set[int], size: int | None
) -> tuple[Array, int]:
    """Return the ids to keep, and the number of them without a limit.

    They are the ids in `named` and every token that occurs. If this exceeds `size`, only the most
    frequent tokens that fit are kept.
    """
    needed = needed_by(tokenizer, shares)
    frequent = np.argsort(-shares, kind="stable")[: int((shares > 0).sum())].tolist()
    kept = needed([*named, *frequent])
    unlimited = len(kept)
    if size is not None and len(kept) > size:
        kept = needed(named)
        if len(kept) > size:
            raise UsageError(
                f"a vocabulary of {size:,} is too small: {len(kept):,} tokens are always kept "
                "(special tokens, single characters of your texts' writing systems, and bytes)",
                f"give at least {len(kept)}",
            )
        # Bisection: the first `low` frequent tokens fit, the first `high` do not.
        low, high = 0, len(frequent)
        while high - low > 1:
            middle = (low + high) // 2
            candidate = needed([*named, *frequent[:middle]])
            if len(candidate) <= size:
                low, kept = middle, candidate
            else:
                high = middle
    if len(kept) == len(tokenizer):
        raise UsageError(
            f"the text needs all {len(kept):,} tokens: nothing to trim",
            "use less text, or a smaller vocabulary size",
        )
    return kept, unlimited


def _counts(
    source: str, column: str | None, share: float, tokenizer: PreTrainedTokenizerBase
) -> tuple[Array, int]:
    """Count the tokens and the rows in the training split of a source.

    The counts are cached, except for hub data, which may change, and for data that is checked.
    """
    opened = open_source(source, share)
    if isinstance(opened, HubSource) or ACCOUNTS.strict:
        counts, account = _counted(opened, column, tokenizer)
        ACCOUNTS.close(account, account.used)
        return counts, account.used
    key = cache_key("counted vocabulary", opened.identity, column, tokenizer_hash(tokenizer))
    file = cache_dir() / "vocabularies" / f"{key}.safetensors"
    use_entry(file, f"{opened.name}, {Path(tokenizer.name_or_path).name}")
    # A read-only cache has no place for a lock.
    if not file.is_file():
        # If several processes need the counts, one of them counts.
        with lock_entry(file):
            if not file.is_file():
                counts, account = _counted(opened, column, tokenizer)
                metadata = {ACCOUNT: _ROW_ACCOUNT.dump_json(account).decode()}
                write_atomic(file, save({"counts": counts}, metadata))
    with safe_open(file, "np") as stored:
        account = _ROW_ACCOUNT.validate_json(stored.metadata()[ACCOUNT])
        ACCOUNTS.close(account, account.used)
        return np.asarray(stored.get_tensor("counts")), account.used


def _counted(
    opened: Source, column: str | None, tokenizer: PreTrainedTokenizerBase
) -> tuple[Array, RowAccount]:
    """Count the tokens, and the rows of the text. Raises UsageError if there are no tokens."""
    account = RowAccount(opened.name)
    batches = _batches(_read_texts(opened, "train", column, account))
    counts = (count_tokens(tokenizer, batch) for batch in batches)
    total = np.asarray(sum(counts, np.zeros(len(tokenizer), np.int64)))
    if not total.any():
        if opened.share < 1:
            part = f"data.share={opened.share:g} of {opened.name}"
            raise UsageError(f"{part} holds no text", "raise data.share")
        raise UsageError(f"{opened.name} holds no text")
    return total, account


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if len(batch) >= TEXTS_AT_ONCE or size >= CHARS_AT_ONCE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


@torch.no_grad()
def _cosines(loaded: Model, smaller: Model, texts: Sequence[str]) -> Array:
    """Compute the cosine between two models' mean last hidden states of each text.

    Each model uses its own tokenizer.
    """
    means = []
    for model in (loaded, smaller):
        length = min(COMPARED_TOKENS, positions_of(model.model.config) or COMPARED_TOKENS)
        options: dict[str, Any] = {
            "truncation": True,
            "max_length": length,
            "return_tensors": "pt",
        }
        rows = (model.tokenizer(text, **options) for text in texts)
        encoder = model.model.base_model.eval()
        states = (
            encoder(**{k: row[k] for k in ("input_ids", "attention_mask")}).last_hidden_state
            for row in rows
        )
        means.append(torch.stack([state_1LD[0].mean(0) for state_1LD in states]))
    before_ND, after_ND = means
    return torch.nn.functional.cosine_similarity(before_ND, after_ND).numpy()


def _changes(
    name: str,
    texts: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    trimmed_tokenizer: PreTrainedTokenizerBase,
    trimming: Trimming,
    kept: Array,
) -> list[str]:
    """Note how many texts, tokens and words are tokenised differently, and warn if many are.

    A text is tokenised differently if it contains a removed token.
    """
    removed, changed, words = set(range(len(tokenizer))) - set(kept.tolist()), 0, Counter[str]()
    tokens, gone, unknown = 0, 0, [0, 0]
    for batch in _batches(texts):
        rows = tokenizer(batch, add_special_tokens=False, verbose=False)
        tokens += sum(map(len, rows["input_ids"]))
        gone += sum(token in removed for ids in rows["input_ids"] for token in ids)
        both = (tokenizer, trimmed_tokenizer)
        unknown = [n + _unknown(each, batch) for n, each in zip(unknown, both, strict=True)]
        for n, (text, ids) in enumerate(zip(batch, rows["input_ids"], strict=True)):
            changed_words = {
                rows.token_to_word(n, at) for at, token in enumerate(ids) if token in removed
            }
            changed += bool(changed_words)
            spans = [rows.word_to_chars(n, word) for word in changed_words if word is not None]
            words.update({text[begin:end].strip() for begin, end in spans})
    if not texts:
        return []
    notes = [
        f"{name}: {changed:,} of {len(texts):,} texts ({changed / len(texts):.1%}) are tokenised "
        f"differently; {gone / max(1, tokens):.1%} of their tokens were removed, and "
        f"{(unknown[1] - unknown[0]) / max(1, tokens):.1%} became unknown",
        *few_texts(trimming, gone / max(1, tokens)),
    ]
    for word, times in words.most_common(CHANGES_SHOWN):
        before, after = (" ".join(t.tokenize(word)) for t in (tokenizer, trimmed_tokenizer))
        notes.append(f"{word!r}, in {times:,} of them: {before} -> {after}")
    return notes


def _unknown(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> int:
    """Count the unknown tokens of texts."""
    if tokenizer.unk_token_id is None:
        return 0
    return int(count_tokens(tokenizer, texts)[tokenizer.unk_token_id])


def _validation(source: str, column: str | None) -> Iterator[str]:
    opened = open_source(source)
    return _texts(opened, "validation", column) if opened.has("validation") else iter(())


def _texts(source: Source, split: str, column: str | None) -> Iterator[str]:
    """Iterate over the texts of a split, and close the account of its rows."""
    account = RowAccount.of_split(source.name, split)
    yield from _read_texts(source, split, column, account)
    ACCOUNTS.close(account, account.used)


def _read_texts(
    source: Source, split: str, column: str | None, account: RowAccount
) -> Iterator[str]:
    """Iterate over the texts of a split; `account` counts its rows.

    Without `column`, all columns of a row are read, and every word of a list is a text.
    """
    if column is not None:
        yield from (text for _, text in source.placed_documents(split, column, account))
        return
    seen: set[int] = set()
    for name, rows in source.tables(split, account.on_bad):
        is_empty = True
        first, rows = take_first(rows)
        if first:
            check_header(first)
        for where, values in rows:
            account.read += 1
            texts = texts_in(values)
            if is_repeated("\n".join(texts), seen):
                account.leave_out(REPEATED, where)
            elif any(text and not text.isspace() for text in texts):
                is_empty = False
                yield from texts
            else:
                account.leave_out(EMPTY, where)
        if is_empty and source.share == 1:
            raise UsageError(f"{name} holds no text")
