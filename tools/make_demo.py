"""Make the two models that the package contains.

    python tools/make_demo.py [--steps 2500] [--out kdcli/data]
    python tools/make_demo.py --classifier [--out kdcli/data]

`demo` is a 4x128 BERT trained by masked language modelling. `demo-classifier` is `demo` fine-tuned
on the task `demo-topic`. Both only use text that `kdcli.data.demo` generates. The weights are saved
in half precision to keep the package small. The encoder takes about ten minutes on two cores and
the classifier half a minute. Prints the loss and the hashes of the files.

An existing tokenizer is kept, because the trainer of `tokenizers` breaks ties at random and numbers
the same word pieces differently each time. With the same tokenizer, seed, PyTorch version and
number of threads, the weights are the same.
"""

from __future__ import annotations

import argparse
import hashlib
import tempfile
import time
from pathlib import Path

import torch
from tokenizers import BertWordPieceTokenizer
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForMaskedLM,
    BertTokenizerFast,
    get_linear_schedule_with_warmup,
)

import kdcli
from kdcli.data.batches import BatchOrder
from kdcli.data.demo import demo_documents
from kdcli.data.text.corpus import open_corpus
from kdcli.models.files import TASK_KEY

LENGTH, BATCH, SEED = 64, 64, 0
CARD = """---
license: apache-2.0
library_name: transformers
---
# The demo teacher of kdcli

A BERT of 4 layers and width 128, trained by `python tools/make_demo.py` on a language that
`kdcli/data/demo.py` invents. It knows no real language. It exists so that
`kdcli distill demo --to 2x64` needs no network and no file.
"""
CLASSIFIER_CARD = """---
license: apache-2.0
library_name: transformers
---
# The demo classifier of kdcli

The demo teacher of kdcli, fine-tuned by `python tools/make_demo.py --classifier` to tell six topics
of an invented language apart. It exists so that `kdcli compress demo-classifier --data demo` needs
no network and no file.
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--out", type=Path, default=Path("kdcli/data"))
    parser.add_argument(
        "--classifier",
        action="store_true",
        help="fine-tune the embedded encoder into the classifier instead (ignores --steps)",
    )
    options = parser.parse_args()
    if options.classifier:
        make_classifier(options.out / "demo_classifier")
    else:
        make_encoder(options.out / "demo_teacher", options.steps)


def make_encoder(out: Path, steps: int) -> None:
    torch.manual_seed(SEED)
    out.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(out)
    model = BertForMaskedLM(
        BertConfig(
            vocab_size=len(tokenizer),
            hidden_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            intermediate_size=512,
            max_position_embeddings=128,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    train(model, tokenizer, steps)
    model.bert.half().save_pretrained(out)
    save_tokenizer_and_card(tokenizer, out, CARD)


def make_classifier(out: Path) -> None:
    """Fine-tune the embedded encoder on its task.

    The mark of the task is removed, so that the classifier is treated like any published model.
    """
    with tempfile.TemporaryDirectory() as folder:
        trained = Path(folder) / "run"
        kdcli.finetune("demo", task="demo-topic", output_dir=trained)
        model = AutoModelForSequenceClassification.from_pretrained(trained)
        tokenizer = BertTokenizerFast.from_pretrained(trained)
    delattr(model.config, TASK_KEY)
    out.mkdir(parents=True, exist_ok=True)
    model.half().save_pretrained(out)
    save_tokenizer_and_card(tokenizer, out, CLASSIFIER_CARD)


def save_tokenizer_and_card(tokenizer: BertTokenizerFast, out: Path, card: str) -> None:
    """Save the tokenizer and the model card next to the model, and print the files' hashes."""
    tokenizer.save_pretrained(out)
    (out / "README.md").write_text(card, "utf-8")
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    for path in (out / "tokenizer.json", out / "model.safetensors"):
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        print(f"{path}: {path.stat().st_size:,} bytes, sha256 {digest}")


def make_tokenizer(folder: Path) -> BertTokenizerFast:
    """Load the tokenizer in a folder, or train one if the folder has no tokenizer."""
    path = folder / "tokenizer.json"
    if path.is_file():
        return BertTokenizerFast(tokenizer_file=str(path), model_max_length=128)
    trainer = BertWordPieceTokenizer(lowercase=True)
    trainer.train_from_iterator(
        demo_documents("train"), vocab_size=1500, min_frequency=2, show_progress=False
    )
    trainer.save(str(path))
    return BertTokenizerFast(tokenizer_file=str(path), model_max_length=128)


def train(model: BertForMaskedLM, tokenizer: BertTokenizerFast, steps: int) -> None:
    corpus = open_corpus(
        "demo",
        tokenizer,
        max_length=LENGTH,
        column=None,
        isolated=False,
        held_out_blocks=256,
    )
    order = BatchOrder(len(corpus.train), BATCH, SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, fused=True)
    schedule = get_linear_schedule_with_warmup(optimizer, steps // 20, steps)
    model.train()
    began = time.perf_counter()
    for step in range(1, steps + 1):
        batch = masked(corpus.train.batch(order.indices(step))["input_ids"], tokenizer)
        loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 250 == 0 or step == 1:
            print(
                f"step {step}/{steps}  loss {loss.item():.4f}  {time.perf_counter() - began:.0f} s",
                flush=True,
            )


def masked(ids_BL: torch.Tensor, tokenizer: BertTokenizerFast) -> dict[str, torch.Tensor]:
    """Mask tokens as BERT does.

    15 % of the tokens are predicted. Of these, 80 % become the mask token, 10 % become a random
    token and 10 % stay the same.

    Args:
        ids_BL: Token ids, [B, L].
        tokenizer: The tokenizer of the ids.

    Returns:
        `input_ids` and `labels`, [B, L]. The label of a token that is not predicted is -100.
    """
    special = torch.tensor(sorted(tokenizer.all_special_ids))
    chosen_BL = (torch.rand(ids_BL.shape) < 0.15) & ~torch.isin(ids_BL, special)
    labels_BL = ids_BL.masked_fill(~chosen_BL, -100)
    draw_BL = torch.rand(ids_BL.shape)
    inputs_BL = ids_BL.masked_fill(chosen_BL & (draw_BL < 0.8), tokenizer.mask_token_id)
    random_BL = torch.randint(len(tokenizer), ids_BL.shape)
    return {
        "input_ids": torch.where(chosen_BL & (draw_BL > 0.9), random_BL, inputs_BL),
        "labels": labels_BL,
    }


if __name__ == "__main__":
    main()
