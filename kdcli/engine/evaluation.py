"""Evaluate a job on its held-out examples: mean losses, and outputs for metrics."""

from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from kdcli.engine.session import Session
from kdcli.errors import MachineError, is_out_of_memory
from kdcli.types import COUNTS, Array, Batch, Count, Examples, Job, counts_of

CPU_MICRO_BATCH = 32
"""Sequences per micro-batch on a CPU. Larger ones need more memory and are not faster."""

DEVICE_MICRO_BATCH = 256
"""Sequences per micro-batch on an accelerator. Halved whenever it runs out of memory."""


@dataclass(frozen=True)
class EvaluationOutput:
    """The result of an evaluation.

    Attributes:
        losses: The means of the loss and its terms over the examples.
        outputs: The step's outputs for each example, in order.
        in_float32: Whether the outputs were computed in float32, as scores are.
    """

    losses: dict[str, float]
    outputs: list[Array]
    in_float32: bool = True


def evaluate_job(session: Session, job: Job) -> EvaluationOutput:
    """Evaluate a job on its held-out examples.

    Raises:
        MachineError: The device runs out of memory with one sequence at a time.
    """
    if job.held_out is None:
        raise ValueError("the job has no held-out examples")
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
    """Evaluate this rank's share of the examples, and gather the results of all ranks.

    The result is None if any rank ran out of memory.
    """
    accelerator = session.accelerator
    # Metrics are computed without autocast, so that every verb gets the same score. A held-out loss
    # is computed with it, like the training loss that it is compared with. During training, frozen
    # weights may be stored in a smaller format than float32.
    is_float32 = all(
        p.dtype == torch.float32 for module in job.modules.values() for p in module.parameters()
    )
    without_autocast = job.compute_metrics is not None and not session.judging and is_float32
    share = np.arange(len(examples))[session.rank :: session.processes]
    sums: dict[tuple[str, Count], float] = {}
    totals = dict.fromkeys(COUNTS, 0.0)
    outputs: list[tuple[int, Array]] = []
    out_of_memory = False
    try:
        for begin in range(0, len(share), micro):
            indices = share[begin : begin + micro]
            batch = examples.batch(indices)
            with torch.no_grad(), nullcontext() if without_autocast else accelerator.autocast():
                loss = job.step(to_device(session.device, batch))
            counts = counts_of(batch)
            totals = {unit: totals[unit] + counts[unit] for unit in COUNTS}
            for name, unit, value in loss.parts():
                sums[name, unit] = sums.get((name, unit), 0.0) + float(value) * counts[unit]
            if job.compute_metrics is not None and loss.outputs is not None:
                outputs += zip(indices.tolist(), loss.outputs.float().cpu().numpy(), strict=True)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        out_of_memory = True
    if session.any_rank(out_of_memory):
        return None
    ranks = session.gather((sums, totals, outputs))
    totals = {unit: sum(rank_totals[unit] for _, rank_totals, _ in ranks) or 1.0 for unit in COUNTS}
    losses: dict[str, float] = {}
    for name, unit in next(rank_sums for rank_sums, _, _ in ranks if rank_sums):
        mean = sum(rank_sums.get((name, unit), 0.0) for rank_sums, _, _ in ranks) / totals[unit]
        losses[name] = losses.get(name, 0.0) + mean
    ordered = sorted(
        (pair for _, _, rank_outputs in ranks for pair in rank_outputs), key=lambda pair: pair[0]
    )
    in_float32 = is_float32 and (without_autocast or session.compute_dtype == torch.float32)
    return EvaluationOutput(losses, [output for _, output in ordered], in_float32)


def to_device(device: torch.device, batch: Batch) -> Batch:
    """Copy a batch to a device."""
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
