"""A job's step as one module, its parameter groups, and its longest rows."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from kdcli.engine.cpu_kernels import fast_cpu_kernels
from kdcli.engine.session import Session
from kdcli.types import Array, Batch, Count, Examples, Job, ParamGroup


class JobStep(nn.Module):
    """A job's step as one module, so that `DistributedDataParallel` sees one forward pass."""

    def __init__(self, session: Session, job: Job) -> None:
        super().__init__()
        self.session, self.job = session, job
        self.trained = nn.ModuleList(job.modules.values())

    def forward(
        self, batch: Batch, weights: Mapping[Count, float]
    ) -> tuple[Tensor, list[tuple[str, Tensor]]]:
        """Compute the weighted loss of a micro-batch.

        Args:
            weights: The micro-batch's share of each count of the global batch.

        Returns:
            The loss, and the logged values with their names. Several processes average their
            gradients, so the loss is multiplied by their number.
        """
        accelerator, device = self.session.accelerator, self.session.device
        with accelerator.autocast(), fast_cpu_kernels(device, self.job.modules.values()):
            loss = self.job.step(batch)
        processes = accelerator.num_processes
        totals = [total * (weights[unit] * processes) for unit, total in loss.totals().items()]
        parts = [
            (name, value.detach().float() * weights[unit]) for name, unit, value in loss.parts()
        ]
        return torch.stack(totals).sum(), parts


@contextmanager
def sparse_embeddings(modules: Mapping[str, nn.Module], *, use: bool) -> Iterator[None]:
    """Let embeddings have sparse gradients, which become dense once per step.

    docs/evidence/speed.md has the measurements.
    """
    embeddings = [
        inner
        for module in modules.values()
        for inner in module.modules()
        if isinstance(inner, nn.Embedding) and not inner.sparse
    ]
    for embedding in embeddings:
        embedding.sparse = use
    try:
        yield
    finally:
        for embedding in embeddings:
            embedding.sparse = False


def param_groups(job: Job, weight_decay: float) -> list[dict[str, object]]:
    """Return AdamW's groups of a job. `lr_factor` multiplies the schedule's learning rate.

    Biases and normalisation weights have no weight decay, as in BERT's recipe.
    """
    groups: dict[ParamGroup, list[nn.Parameter]] = {}
    for name, module in job.modules.items():
        for path, parameter in module.named_parameters():
            if not parameter.requires_grad:
                continue
            group = ParamGroup()
            if job.param_group is not None:
                group = job.param_group(f"{name}.{path}")
            group = replace(group, decayed=group.decayed and parameter.dim() > 1)
            groups.setdefault(group, []).append(parameter)
    return [
        {
            "params": parameters,
            "weight_decay": weight_decay if group.decayed else 0.0,
            "lr_factor": group.lr,
        }
        for group, parameters in groups.items()
    ]


def longest_rows(examples: Examples, rows: Array, count: int) -> Array:
    """Return the longest examples, or some of `rows` if the examples have no `lengths`."""
    lengths = getattr(examples, "lengths", None)
    return (rows if lengths is None else np.argsort(lengths)[::-1])[:count]
