"""Compare two ways to get candidate words from a masked language model for data augmentation.

    python benchmarks/augment.py [--model DIR] [--texts FILE.jsonl.gz --column sentence]
                                 [--count 24] [--rounds 5]

kdcli asks for all words of many texts together. The authors of TinyBERT ask for one word at a time:
a batch of one row, logits for all its tokens, and the top k of the vocabulary. They also append the
unmasked text to the masked one, which is timed separately. The ways take turns on all texts, and a
ratio is the median over the rounds. Without `--model`, the model is BERT-base with random weights.
A model without a masked-language-modelling head gets a random one, which takes the same time.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoTokenizer,
    BertConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from kdcli.data.augment.masked_words import MaskedWords
from kdcli.data.augment.words import tokenize_words

CANDIDATES = 15


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="a model directory with its tokenizer")
    parser.add_argument("--texts", type=Path, help="a .jsonl.gz file (default: random words)")
    parser.add_argument("--column", default="sentence")
    parser.add_argument("--count", type=int, default=24, help="texts")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--dtype",
        default="float32",
        choices=["float32", "bfloat16"],
        help="number format of kdcli's way (the other two use float32)",
    )
    options = parser.parse_args()
    model, tokenizer = load(options.model)
    texts = texts_of(options, tokenizer)
    device = torch.device(options.device)
    asked = MaskedWords(model, tokenizer, device, getattr(torch, options.dtype))
    plain = MaskedWords(model, tokenizer, device)
    reads = tokenize_words(texts, tokenizer)
    words = sum(word.token is not None for one in reads for word in one.words)
    tokens = sum(len(one.ids) for one in reads) / len(reads)
    print(
        f"{len(texts)} texts of {tokens:.1f} tokens, {words} queries, {options.device}, "
        f"{options.dtype}",
        flush=True,
    )
    ways: dict[str, Callable[[], object]] = {
        "together": lambda: asked.candidates(texts, CANDIDATES),
        "one word at a time": lambda: one_by_one(plain, texts, doubled=False),
        "one word at a time, text doubled": lambda: one_by_one(plain, texts, doubled=True),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(options.rounds + 1):
        for name in sorted(ways, key=lambda n: (list(ways).index(n) + turn) % len(ways)):
            began = time.perf_counter()
            ways[name]()
            if turn:
                seconds[name].append(time.perf_counter() - began)
    for name, measured in seconds.items():
        ratios = [slow / fast for slow, fast in zip(measured, seconds["together"], strict=True)]
        spread = f"{min(ratios):.1f} … {max(ratios):.1f}"
        rate = words / statistics.median(measured)
        print(
            f"{rate:8.0f} words/s  {statistics.median(ratios):5.1f} × the time ({spread})  {name}"
        )


def load(source: Path | None) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    torch.manual_seed(0)
    if source is None:
        return AutoModelForMaskedLM.from_config(BertConfig()), generated_tokenizer()
    model = AutoModelForMaskedLM.from_config(
        AutoConfig.from_pretrained(source), dtype=torch.float32
    )
    encoder = AutoModel.from_pretrained(source, dtype=torch.float32)
    model.base_model.load_state_dict(encoder.state_dict(), strict=False)
    return model, AutoTokenizer.from_pretrained(source)


def generated_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with as many tokens as BERT's, all of them whole words."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {
        word: i
        for i, word in enumerate([*special, *map(spelled, range(BertConfig().vocab_size - 5))])
    }
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = dict(
        zip(
            ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), special, strict=True
        )
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def spelled(number: int) -> str:
    letters = ""
    for _ in range(4):
        number, letter = divmod(number, 26)
        letters += chr(ord("a") + letter)
    return letters


def texts_of(options: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return evenly spaced texts of the file, or random words with the lengths of SST-2."""
    if options.texts is not None:
        with gzip.open(options.texts, "rt", encoding="utf-8") as file:
            texts = [json.loads(line)[options.column] for line in file]
        return texts[:: max(1, len(texts) // options.count)][: options.count]
    rng = np.random.Generator(np.random.PCG64(0))
    known = sorted(word for word in tokenizer.get_vocab() if word.isalpha() and len(word) > 2)
    lengths = np.clip(rng.gamma(2.0, 6.0, options.count), 2, 60).astype(int)
    return [" ".join(rng.choice(known, length)) for length in lengths]


@torch.inference_mode()
def one_by_one(asked: MaskedWords, texts: list[str], *, doubled: bool) -> list[list[int]]:
    tokenizer, candidates = asked.tokenizer, []
    for text in texts:
        (one,) = tokenize_words([text], tokenizer)
        for word in one.words:
            if word.token is None:
                continue
            ids = list(one.ids)
            ids[word.token] = tokenizer.mask_token_id
            first = [tokenizer.cls_token_id, *ids, tokenizer.sep_token_id]
            second = [*one.ids, tokenizer.sep_token_id] if doubled else []
            batch = {
                "input_ids": torch.tensor([first + second], device=asked.device),
                "token_type_ids": torch.tensor(
                    [[0] * len(first) + [1] * len(second)], device=asked.device
                ),
            }
            logits_LV = asked.model(**batch).logits[0]
            candidates.append(logits_LV[1 + word.token].topk(CANDIDATES).indices.tolist())
    return candidates


if __name__ == "__main__":
    main()
