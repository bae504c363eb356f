"""Compare beam search with and without a cache of keys and values.

    python benchmarks/generation.py [MODEL] [--rows 64] [--source 128] [--target 32] [--beams 5]
                                    [--pairs 3]

MODEL is a generator or a masked language model. Without it, the model has MiniLM's shape, 6x384,
and random weights. Every target has the maximum length. The runs are interleaved. Prints the tokens
per second and the ratio of each pair of runs, and the median ratio.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, models
from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast

from kdcli.models.generation import load_generator
from kdcli.models.load import save_model
from kdcli.types import Task

TASK = Task("own", "text", ("source",), ("rougeL",), label="target")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def random_model(folder: Path) -> None:
    """Save a BERT with 6 layers, width 384 and a vocabulary of the size of bert-base-uncased's."""
    words = {
        word: i
        for i, word in enumerate([*SPECIAL, *(f"w{i}" for i in range(30_522 - len(SPECIAL)))])
    }
    named = {f"{token[1:-1].lower()}_token": token for token in SPECIAL}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, "[UNK]")), **named
    )
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 384,
        "num_hidden_layers": 6,
        "num_attention_heads": 12,
        "intermediate_size": 1536,
    }
    save_model(BertForMaskedLM(BertConfig(vocab_size=len(words), **sizes)), tokenizer, folder)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?")
    for name, value in (("rows", 64), ("source", 128), ("target", 32), ("beams", 5), ("pairs", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.model is None:
            random_model(Path(folder))
        model = load_generator(options.model or folder, TASK, new_head=True).model
    ids = torch.randint(
        1000, 30_000, (options.rows, options.source), generator=torch.Generator().manual_seed(0)
    )
    decoding = {
        "num_beams": options.beams,
        "max_new_tokens": options.target,
        "min_new_tokens": options.target,
    }

    def seconds(reuse: bool) -> tuple[float, list[list[int]]]:
        began = time.perf_counter()
        targets = model.generate(ids, reuse=reuse, **decoding).tolist()
        return time.perf_counter() - began, targets

    model.generate(ids[:4], **decoding)
    ratios = []
    for _ in range(options.pairs):
        (kept, one), (anew, other) = seconds(True), seconds(False)
        ratios.append(anew / kept)
        tokens = options.rows * options.target
        same = sum(a == b for a, b in zip(one, other, strict=True))
        rates = f"{tokens / kept:,.0f} tokens/s kept, {tokens / anew:,.0f} anew"
        print(
            f"{ratios[-1]:.1f}x: {rates}; {same} of {options.rows} targets are the same", flush=True
        )
    print(
        f"median {statistics.median(ratios):.1f}x on {torch.get_num_threads()} threads, torch "
        f"{torch.__version__}"
    )


if __name__ == "__main__":
    main()
