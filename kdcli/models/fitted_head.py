"""Fit a student's head to its teacher's outputs, to use the student without training.

The last linear of the head gets the least-squares weights that map its own input to what the
teacher's last linear returns for the same rows. The other modules of the head are the teacher's,
except those of a static classifier, which has its own.
"""

import copy
from contextlib import ExitStack
from dataclasses import replace
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from kdcli.errors import UsageError
from kdcli.models.heads import modules_of_head
from kdcli.models.least_squares import Inputs, fit_linear
from kdcli.models.masked_head import student_with_head
from kdcli.models.model import Model
from kdcli.models.shape import InitializedStudent
from kdcli.types import Batch, Examples

ModelT = TypeVar("ModelT", bound=Model)
HEAD_ROWS = 1024
"""Maximum number of rows on which a head is fitted."""
MAX_VECTORS = 16_384
"""Maximum number of inputs of the last linear, because a head of tokens has one for every token."""
ROWS_AT_ONCE = 64
INPUTS = ("input_ids", "attention_mask", "token_type_ids")


def student_with_fitted_head(
    teacher: ModelT, built: InitializedStudent, rows: Examples, *, init: str, seed: int
) -> ModelT:
    """Fit a student's head to its teacher's outputs. An encoder gets its teacher's head first.

    Args:
        teacher: The teacher, with a head that ends in a linear. It must be on the CPU.
        built: The student of the teacher's encoder, or a static classifier with its own head.
        rows: The rows on which the head is fitted.
        init: How the student starts. Only `teacher` fits the head.
        seed: The seed of weights that cannot be copied.
    """
    model, note = built.model, "a head of its own"
    if last_linear(model) is None:
        model = student_with_head(teacher.model, built, init=init, seed=seed).model
        note = "its teacher's head"
    if init == "teacher":
        fit_head(teacher, model.eval(), rows)
        note += ", fitted to its teacher's outputs"
    tokenizer = copy.deepcopy(teacher.tokenizer)
    return replace(teacher, model=model.eval(), tokenizer=tokenizer, note=note)


def check_head(teacher: Model) -> None:
    """Check that a teacher has a head that ends in a linear.

    Raises:
        UsageError: It has none.
    """
    if last_linear(teacher.model) is None:
        raise UsageError(
            f"{teacher.source} has no head that a student could start from",
            "train the student: remove --max-steps 0",
        )


@torch.no_grad()
def fit_head(teacher: Model, student: nn.Module, rows: Examples) -> None:
    """Fit the last linear of a student's head to the teacher's outputs, in place."""
    own, other = last_linear(student), last_linear(teacher.model)
    assert own is not None
    assert other is not None
    numbers = np.unique(np.linspace(0, len(rows) - 1, HEAD_ROWS).astype(np.int64))
    batches = np.array_split(numbers, -(-len(numbers) // ROWS_AT_ONCE))
    seen = dict[str, Tensor]()
    inputs, targets = list[Tensor](), list[Tensor]()
    with ExitStack() as hooks:
        for hook in (
            own.register_forward_hook(lambda _, args, __: seen.update(x=args[0])),
            other.register_forward_hook(lambda _, __, output: seen.update(y=output)),
        ):
            hooks.callback(hook.remove)
        for some in batches:
            batch = rows.batch(some)
            given: Batch = {name: batch[name] for name in INPUTS if name in batch}
            for model in (teacher.model, student):
                model(**given)
            x, y, mask = seen["x"], seen["y"], given["attention_mask"].bool()
            # A head of tokens has an output for every token, a head of texts one for every row.
            if x.dim() == mask.dim() + 1:
                x, y = x[mask], y[mask]
            kept = _evenly_spaced(len(x), MAX_VECTORS // len(batches))
            inputs.append(x[kept].double())
            targets.append(y[kept].double())
    states_RI = Inputs(torch.cat(inputs), has_bias=own.bias is not None)
    fit_linear(own, states_RI, torch.cat(targets))


def _evenly_spaced(count: int, most: int) -> Tensor:
    """Return the places of at most `most` of `count` items, evenly spaced."""
    kept = min(count, most)
    return torch.arange(kept) * count // max(1, kept)


def last_linear(model: nn.Module) -> nn.Linear | None:
    """Return the linear of a model's head that is defined last; None without such a head."""
    linears = [m for m in modules_of_head(model) if isinstance(m, nn.Linear)]
    return linears[-1] if linears else None
