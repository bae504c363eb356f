"""A frozen teacher that several processes hold together: torch's `fully_shard`, layer by layer.

Each process keeps its part of every weight. A layer's weights are gathered for its forward pass and given back after
it, so all processes must read as many batches.
"""

import copy

from torch import nn
from transformers import PreTrainedModel

from kdcli.engine.launch import Session
from kdcli.engine.memory import free_memory
from kdcli.engine.progress import Progress
from kdcli.models.layout import layout_for

MOST_OF_MEMORY = 0.5
"""Share of a device's free memory that a whole teacher may take: students, their optimiser and activations need more
than its rest."""


def to_be_sharded(model: PreTrainedModel, session: Session) -> bool:
    """Whether a teacher is sharded: as `teacher.shard` says; where that is null, if the weights in the compute dtype
    take more than `MOST_OF_MEMORY` of the free memory of any process's device. Never on one process."""
    processes, weights = (
        session.accelerator.num_processes,
        sum(p.numel() for p in model.parameters()),
    )
    if processes == 1 or session.shard_teacher is False:
        return False
    size, free = weights * session.compute_dtype.itemsize, free_memory(session.device)
    if not session.shard_teacher and not session.any_rank(
        free is not None and size > MOST_OF_MEMORY * free
    ):
        return False
    of = "" if free is None else f" of {free / 1e9:,.2f} GB free"
    Progress.log(
        f"the teacher's weights, {size / 1e9:,.2f} GB{of}, are shared out over {processes} processes"
    )
    return True


def sharded(model: PreTrainedModel, session: Session) -> PreTrainedModel:
    """A copy of a model of which this process holds a part on its device; the model itself moves to the CPU. After a
    forward pass that does not come to its end, call `reshard`."""
    # A second or more, for what few runs do.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(session.device.type, (session.accelerator.num_processes,))
    held = copy.deepcopy(model.cpu())
    # A shared layer occurs several times.
    for module in (*dict.fromkeys(layout_for(held.config).modules(held.base_model)), held):
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
    return held


def reshard(model: nn.Module) -> None:
    """Give back every gathered weight."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
