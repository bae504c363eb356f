"""One pass over what is not trained on: its loss, and what a task is judged by; also what ranks have to agree on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from torch import Tensor

from kdcli.errors import MachineError
from kdcli.training.memory import is_out_of_memory
from kdcli.training.session import Session
from kdcli.types import Batch, Examples, Job

CPU_MICRO_BATCH = 32
"""Sequences at once on a CPU: more does not run faster, only in more memory."""

EVALUATED_AT_ONCE = 256
"""Sequences at once on an accelerator where nothing is trained; halved as often as memory asks for."""


@dataclass(frozen=True)
class EvaluationOutput:
    """A pass over held-out examples: mean loss and terms, and the step's outputs of each example in order."""

    losses: dict[str, float]
    outputs: list[np.ndarray[Any, Any]]


def evaluate(session: Session, job: Job) -> EvaluationOutput:
    """One pass over what the job holds out, without training.

    Raises:
        MachineError: out of memory even one sequence at a time.
    """
    if job.held_out is None:
        raise ValueError("the job holds nothing out")
    for module in job.modules.values():
        module.to(session.device).eval()
    micro = CPU_MICRO_BATCH if session.device.type == "cpu" else EVALUATED_AT_ONCE
    while (found := evaluate_batches(session, job, job.held_out, micro)) is None:
        if micro == 1:
            raise MachineError("out of memory with one sequence at a time", "lower data.max_length")
        micro //= 2
    return found


def evaluate_batches(session: Session, job: Job, examples: Examples, micro: int) -> EvaluationOutput | None:
    """Every rank takes its share of the examples; None when some rank ran out of memory."""
    mine = np.arange(len(examples))[session.accelerator.process_index :: session.accelerator.num_processes]
    sums: dict[str, float] = {}
    outputs: list[tuple[int, np.ndarray[Any, Any]]] = []
    weight, out_of_memory = 0.0, False
    try:
        for begin in range(0, len(mine), micro):
            indices = mine[begin : begin + micro]
            batch = examples.batch(indices)
            with torch.no_grad(), session.accelerator.autocast():
                loss = job.step(to_device(session.device, batch))
            share = job.batch_weight(batch)
            weight += share
            for name, value in ({"loss": loss.total} | dict(loss.terms)).items():
                sums[name] = sums.get(name, 0.0) + float(value) * share
            if job.compute_metrics is not None and loss.outputs is not None:
                outputs += zip(indices.tolist(), loss.outputs.float().cpu().numpy(), strict=True)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        out_of_memory = True
    if any_rank(session, out_of_memory):
        return None
    parts = gather_object([(sums, weight, outputs)])
    total = sum(weight for _, weight, _ in parts)
    names = next(of_one for of_one, _, _ in parts if of_one)
    ordered = sorted((one for _, _, of_rank in parts for one in of_rank), key=lambda one: one[0])
    losses = {name: sum(sums.get(name, 0.0) for sums, _, _ in parts) / total for name in names}
    return EvaluationOutput(losses, [output for _, output in ordered])


def to_device(device: torch.device, batch: Batch) -> Batch:
    """The batch on the device."""
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}


def sum_over_ranks(session: Session, values: Tensor) -> Tensor:
    """The sum of a tensor over all processes."""
    return (
        values
        if session.accelerator.num_processes == 1
        else session.accelerator.reduce(values.to(session.device), "sum")
    )


def any_rank(session: Session, flag: bool) -> bool:
    """Whether the flag is up in any process."""
    if session.accelerator.num_processes == 1:
        return flag
    return bool(sum_over_ranks(session, torch.tensor([float(flag)])).item())
