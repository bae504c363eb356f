"""Describe a model by its size: the card that reports show."""

import hashlib
import math
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from kdcli.models.files import stored_weights
from kdcli.models.layout import layout_for
from kdcli.models.load import commit_of, location
from kdcli.models.shape import positions_of, shape_of
from kdcli.models.static import CLASSIFIER
from kdcli.types import Card

_DTYPES = {
    "F32": "fp32",
    "F16": "fp16",
    "BF16": "bf16",
}  # dtype names in safetensors -> in kdcli
COUNTED_TOKENS = 128  # length of the sequence that `multiply_adds` runs


def describe_source(model: PreTrainedModel, source: str) -> Card:
    """Describe a model that was loaded from a hub id or a directory.

    The card has the size and hash of the files only if `source` is a directory.
    """
    folder = Path(location(source))
    card = describe(model, source, folder if folder.is_dir() else None)
    return replace(card, revision=commit_of(source))


def describe(model: PreTrainedModel, name: str, folder: Path | None) -> Card:
    """Describe a model whose safetensors files are in `folder`, or that was never saved (None)."""
    prefixes = layout_for(model.config).embeddings
    embedding = sum(
        p.numel() for name, p in model.base_model.named_parameters() if name.startswith(prefixes)
    )
    total = sum(p.numel() for p in model.parameters())
    weights = stored_weights(folder) if folder else []
    # The layers after an embedding model's pooling. A static classifier has copies of its own.
    own = folder if type(model).__name__ != CLASSIFIER else None
    layers = sorted(own.glob("*_Dense/model.safetensors")) if own else []
    of_layers = [tensor for file in layers for tensor in load_file(file).values()]
    total += sum(map(torch.numel, of_layers))
    digest, dtypes = hashlib.sha256(), Counter[str]()
    for file in [*weights, *layers]:
        with file.open("rb") as stream:
            hashlib.file_digest(stream, lambda: digest)
        with safe_open(file, "pt") as tensors:
            for tensor in (tensors.get_slice(key) for key in tensors.keys()):  # noqa: SIM118  # not a mapping
                dtypes[tensor.get_dtype()] += math.prod(tensor.get_shape())
    return Card(
        id=name,
        model_type=str(model.config.model_type),
        **asdict(shape_of(model.config)),
        params_total=total,
        params_embedding=embedding,
        params_transformer=total - embedding,
        params_nonzero=sum(
            int(p.count_nonzero()) for p in [*model.parameters(), *of_layers] if not p.is_meta
        ),
        multiply_adds=multiply_adds(model.base_model),
        bytes=sum(f.stat().st_size for f in [*weights, *layers]) if weights else 4 * total,
        held_in=_DTYPES.get(common := dtypes.most_common(1)[0][0], common) if dtypes else "fp32",
        sha256=digest.hexdigest() if weights else None,
    )


def multiply_adds(model: PreTrainedModel) -> int:
    """Return the number of multiply-adds of a forward pass over one sequence of 128 tokens.

    The sequence is shorter if the model has fewer positions. Both matrix products and attention
    products count. The "FLOPs" in papers are mostly twice this number.
    """
    if not any(True for _ in model.parameters()):
        # A server computes the model.
        return 0
    attention, was_training = model.config._attn_implementation, model.training
    half = model.config.vocab_size // 2
    length = min(COUNTED_TOKENS, positions_of(model.config) or COUNTED_TOKENS)
    ids_BL = torch.arange(length, device=next(model.parameters()).device)[None] % half + half
    # The counter's hooks fail if a parameter is passed to a module, such as DeBERTa's table of
    # positions, so the weights are passed as plain tensors.
    weights = {name: p.detach() for name, p in model.named_parameters()}
    model.set_attn_implementation("eager")
    try:
        # Fused attention kernels would hide their matrix products from the counter.
        with (
            torch.no_grad(),
            sdpa_kernel(SDPBackend.MATH),
            FlopCounterMode(display=False) as counter,
        ):
            inputs = {"input_ids": ids_BL, "attention_mask": torch.ones_like(ids_BL)}
            functional_call(model.eval(), weights, kwargs=inputs)
    finally:
        model.train(was_training)
        model.set_attn_implementation(attention)
    return int(counter.get_total_flops()) // 2
