"""One pass over held-out examples, without training: mean loss, and outputs for metrics."""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object

from kdcli.engine.launch import Session
from kdcli.engine.memory import is_out_of_memory
from kdcli.errors import MachineError
from kdcli.types import COUNTS, Batch, Count, Examples, Job, counts_of

CPU_MICRO_BATCH = 32
"""Sequences at once on a CPU: more take more memory and no less time."""

DEVICE_MICRO_BATCH = 256
"""Sequences at once on an accelerator that only evaluates; halved while memory runs out."""


@dataclass(frozen=True)
class EvaluationOutput:
    """Mean loss and terms over the examples, and the step's outputs of each example in order."""

    losses: dict[str, float]
    outputs: list[np.ndarray[Any, Any]]


def evaluate(session: Session, job: Job) -> EvaluationOutput:
    """One pass over the job's held-out examples. Raises MachineError: out of memory with one
    sequence at a time."""
    if job.held_out is None:
        raise ValueError("the job holds nothing out")
    for module in job.modules.values():
        module.to(session.device).eval()
    micro = CPU_MICRO_BATCH if session.device.type == "cpu" else DEVICE_MICRO_BATCH
    while (output := evaluate_batches(session, job, job.held_out, micro)) is None:
        if micro == 1:
            raise MachineError("out of memory with one sequence at a time", "lower data.max_length")
        micro //= 2
    return output


def evaluate_batches(
    session: Session, job: Job, examples: Examples, micro: int
) -> EvaluationOutput | None:
    """Evaluate this rank's share of the examples and gather all; None when any rank ran out of
    memory."""
    accelerator = session.accelerator
    # A score is the same whichever verb computes it; a held-out loss is compared with the training
    # loss. Frozen weights may be held in less than float32 while training.
    whole = all(
        p.dtype == torch.float32 for module in job.modules.values() for p in module.parameters()
    )
    plain = job.compute_metrics is not None and not session.judging and whole
    share = np.arange(len(examples))[accelerator.process_index :: accelerator.num_processes]
    sums: dict[tuple[str, Count], float] = {}
    counted = dict.fromkeys(COUNTS, 0.0)
    outputs: list[tuple[int, np.ndarray[Any, Any]]] = []
    out_of_memory = False
    try:
        for begin in range(0, len(share), micro):
            indices = share[begin : begin + micro]
            batch = examples.batch(indices)
            with torch.no_grad(), nullcontext() if plain else accelerator.autocast():
                loss = job.step(to_device(session.device, batch))
            counts = counts_of(batch)
            counted = {over: counted[over] + counts[over] for over in COUNTS}
            for name, over, value in loss.parts():
                sums[name, over] = sums.get((name, over), 0.0) + float(value) * counts[over]
            if job.compute_metrics is not None and loss.outputs is not None:
                outputs += zip(indices.tolist(), loss.outputs.float().cpu().numpy(), strict=True)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        out_of_memory = True
    if session.any_rank(out_of_memory):
        return None
    ranks = gather_object([(sums, counted, outputs)])
    totals = {
        over: sum(rank_counted[over] for _, rank_counted, _ in ranks) or 1.0 for over in COUNTS
    }
    losses: dict[str, float] = {}
    for name, over in next(rank_sums for rank_sums, _, _ in ranks if rank_sums):
        mean = sum(rank_sums.get((name, over), 0.0) for rank_sums, _, _ in ranks) / totals[over]
        losses[name] = losses.get(name, 0.0) + mean
    ordered = sorted(
        (pair for _, _, rank_outputs in ranks for pair in rank_outputs), key=lambda pair: pair[0]
    )
    return EvaluationOutput(losses, [output for _, output in ordered])


def to_device(device: torch.device, batch: Batch) -> Batch:
    """The batch on the device."""
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
