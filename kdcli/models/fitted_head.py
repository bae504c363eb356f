"""Give a student its teacher's head, fitted to the teacher's outputs, to use it without training.

The last linear of the head gets the least-squares weights that map its own input to what the
teacher's last linear returns for the same rows. The other modules of the head are copied.
"""

import copy
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from kdcli.errors import UsageError
from kdcli.models.heads import modules_of_head
from kdcli.models.masked_lm import student_with_head
from kdcli.models.model import Model
from kdcli.models.reduce import fit_linear
from kdcli.models.shape import InitializedStudent
from kdcli.types import Batch, Examples

HEAD_ROWS = 1024
"""Maximum number of rows on which a head is fitted."""
ROWS_AT_ONCE = 64
INPUTS = ("input_ids", "attention_mask", "token_type_ids")


def student_with_fitted_head(
    teacher: Model, built: InitializedStudent, rows: Examples, *, init: str, seed: int
) -> Model:
    """Put a student encoder under its teacher's head, and fit the head to the teacher's outputs.

    Args:
        teacher: The teacher, with a head that ends in a linear. It must be on the CPU.
        built: The student of the teacher's encoder.
        rows: The rows on which the head is fitted.
        init: How the student starts. Only `teacher` fits the head.
        seed: The seed of weights that cannot be copied.

    Raises UsageError: the teacher has no such head.
    """
    if not last_linears(teacher.model):
        raise UsageError(
            f"{teacher.source} has no head that a student could start from",
            "train the student: remove --max-steps 0",
        )
    model = student_with_head(teacher.model, built, init=init, seed=seed).model
    if init == "teacher":
        fit_head(teacher, model.eval(), rows)
    tokenizer = copy.deepcopy(teacher.tokenizer)
    note = "its teacher's head, fitted to its outputs"
    return replace(teacher, model=model.eval(), tokenizer=tokenizer, note=note)


@torch.no_grad()
def fit_head(teacher: Model, student: nn.Module, rows: Examples) -> None:
    """Fit the last linear of a student's head to the teacher's outputs, in place."""
    own, other = last_linears(student)[-1], last_linears(teacher.model)[-1]
    inputs, targets = list[Tensor](), list[Tensor]()
    taken = [
        own.register_forward_hook(lambda _, args, __: inputs.append(args[0].double())),
        other.register_forward_hook(lambda _, __, output: targets.append(output.double())),
    ]
    masks = []
    numbers = np.unique(np.linspace(0, len(rows) - 1, HEAD_ROWS).astype(np.int64))
    for some in np.array_split(numbers, -(-len(numbers) // ROWS_AT_ONCE)):
        batch = rows.batch(some)
        given: Batch = {name: batch[name] for name in INPUTS if name in batch}
        for model in (teacher.model, student):
            model(**given)
        masks.append(given["attention_mask"].bool())
    for hook in taken:
        hook.remove()
    # A head of tokens has an output for every token, a head of texts one for every row.
    real = [
        (x[mask], y[mask]) if x.dim() == mask.dim() + 1 else (x, y)
        for x, y, mask in zip(inputs, targets, masks, strict=True)
    ]
    fit_linear(own, torch.cat([x for x, _ in real]), torch.cat([y for _, y in real]))


def last_linears(model: nn.Module) -> list[nn.Linear]:
    """Return the linears of a model's head in the order in which they are defined."""
    return [m for m in modules_of_head(model) if isinstance(m, nn.Linear)]
