"""Time the trimming of a vocabulary of XLM-R's size, and check that the outputs stay equal.

    python benchmarks/trim.py [--tokens 250002] [--size 20000] [--texts 20000]

The Unigram vocabulary has invented pieces, the model has 2 layers of width 384, and the texts have
words from the vocabulary. Reading counts the tokens of the texts. Cutting chooses the tokens, with
and without a size, and builds the tokenizer and the tables.
Aim: cutting takes less than a minute, and outputs for texts of kept tokens are equal to the bit.
"""

from __future__ import annotations

import argparse
import itertools
import time

import numpy as np
import torch
from transformers import (
    XLMRobertaConfig,
    XLMRobertaModel,
    XLMRobertaTokenizer,
)

from kdcli.models.model import Model
from kdcli.models.trim import count_tokens, named_in
from kdcli.types import Array
from kdcli.workloads.cut_vocabulary import cut, kept_note, kept_tokens

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def random_model(tokens: int, rng: np.random.Generator) -> Model:
    """Return a model with random weights and a vocabulary of random pieces.

    Pieces have 1 to 8 letters, and half of them begin a word.
    """
    lengths = rng.integers(2, 9, 2 * tokens)
    words = ("".join(LETTERS[n] for n in rng.integers(0, 26, length)) for length in lengths)
    pieces = itertools.chain(
        ["▁", *LETTERS, *(f"▁{c}" for c in LETTERS)],
        (f"▁{w}" if n % 2 else w for n, w in enumerate(words)),
    )
    distinct = list(itertools.islice(dict.fromkeys(pieces), tokens - 5))
    special = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    tokenizer = XLMRobertaTokenizer(
        vocab=special + [(p, -5.0 - n / 50_000) for n, p in enumerate(distinct)]
    )
    config = XLMRobertaConfig(
        vocab_size=len(tokenizer),
        hidden_size=384,
        num_hidden_layers=2,
        num_attention_heads=12,
        intermediate_size=1536,
    )
    return Model(XLMRobertaModel(config).eval(), tokenizer, "random")


def texts_of(loaded: Model, count: int, rng: np.random.Generator) -> list[str]:
    """Return sentences of 20 words. A few words are much more frequent than the others."""
    words = [
        t.removeprefix("▁")
        for t in sorted(loaded.tokenizer.get_vocab())
        if t.startswith("▁") and len(t) > 1
    ]
    places = np.minimum(rng.zipf(1.2, (count, 20)) - 1, len(words) - 1)
    return [" ".join(words[n] for n in row) for row in places]


def same_bits(loaded: Model, smaller: Model, texts: list[str], kept: Array) -> tuple[int, bool]:
    """How many of the texts hold kept tokens alone, and whether the outputs on these are equal."""
    whole = [
        text for text in texts if set(loaded.tokenizer(text)["input_ids"]) <= set(kept.tolist())
    ]
    with torch.no_grad():
        one, other = (
            each.model(**each.tokenizer(whole, padding=True, return_tensors="pt")).last_hidden_state
            for each in (loaded, smaller)
        )
    return len(whole), torch.equal(one, other)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=250_002)
    parser.add_argument("--size", type=int, default=20_000)
    parser.add_argument("--texts", type=int, default=20_000)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    loaded = random_model(options.tokens, rng)
    texts = texts_of(loaded, options.texts, rng)
    print(f"{len(loaded.tokenizer):,} tokens, {sum(map(len, texts)) / 1e6:.1f} MB of text")
    began = time.perf_counter()
    counts = {"the text": count_tokens(loaded.tokenizer, texts)}
    reading = time.perf_counter() - began
    print(f"reading: {reading:.1f} s")
    for size in (None, options.size):
        began = time.perf_counter()
        kept, trimming = kept_tokens(loaded.tokenizer, counts, named_in(loaded.model.config), size)
        smaller = cut(loaded, kept)
        cutting = time.perf_counter() - began
        count, equal = same_bits(loaded, smaller, texts[:64], kept)
        print(
            f"size {size}: {kept_note(trimming)}; cutting next to reading {cutting:.1f} s; equal "
            f"on {count} texts: {equal}"
        )


if __name__ == "__main__":
    main()
