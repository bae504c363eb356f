"""A table of tokens as a product: [V, D] -> [V, R] x [R, D], by a truncated singular value decomposition.

The product is the nearest one of rank R in the Frobenius norm (Eckart and Young 1936); both factors carry the root of
each singular value, so that they train alike.
"""

import copy

import torch
from transformers import PreTrainedModel

from kdcli.errors import UsageError
from kdcli.models.custom_class import EMBEDDING_RANK, class_named, empty_model, load_tensors


@torch.no_grad()
def factorise(model: PreTrainedModel, rank: int) -> tuple[PreTrainedModel, str]:
    """An encoder of class `Factorised...` with `rank` numbers a token, everything else shared with the given one, and a
    note. Raises UsageError: the table is no wider, or is a product already."""
    table = model.get_input_embeddings().weight
    rows, width = table.shape
    if hasattr(model.config, EMBEDDING_RANK):
        raise UsageError(
            f"the embeddings are factorised already, to rank {width}",
            "leave student.embedding_rank out",
        )
    if rank >= width:
        hint = f"give at most {width - 1}, or leave it out"
        raise UsageError(
            f"student.embedding_rank={rank}: the table of tokens is {width} wide", hint
        )
    x = table.double()
    energies, directions = torch.linalg.eigh(x.T @ x)
    energies, directions = energies.flip(0).clamp(min=0), directions.flip(1)[:, :rank]
    roots = energies[:rank].pow(0.25).clamp(min=1e-6)
    name = next(
        name for name, module in model.named_modules() if module is model.get_input_embeddings()
    )
    tensors = model.state_dict()
    tensors[f"{name}.weight"] = (x @ directions / roots).to(table.dtype)
    tensors[f"{name}.projection.weight"] = (directions * roots).to(table.dtype)
    config, of_class = copy.deepcopy(model.config), class_named(f"Factorised{type(model).__name__}")
    config.embedding_rank = rank
    assert of_class is not None
    share = float(energies[:rank].sum() / energies.sum().clamp(min=1e-30))
    note = f"table of tokens of rank {rank} holds {share:.1%} of the energy of the {rows:,} x {width} table"
    return load_tensors(empty_model(of_class, config), tensors, model), note
