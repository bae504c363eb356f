"""The tensors of a job's modules and optimiser by name, as checkpoints hold them.

The names are `module/MODULE/PATH` and `optimizer/NUMBER/NAME`.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn


def module_tensors(modules: Mapping[str, nn.Module]) -> dict[str, Tensor]:
    """Return the weights and buffers of modules by name."""
    return {
        f"module/{name}/{path}": tensor
        for name, module in modules.items()
        for path, tensor in _untied_state(module).items()
    }


def load_modules(modules: Mapping[str, nn.Module], tensors: Mapping[str, Tensor]) -> None:
    """Copy the tensors of `module_tensors` into modules; other tensors are ignored."""
    for name, module in modules.items():
        prefix = f"module/{name}/"
        state = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
        assert state.keys() == _untied_state(module).keys(), "a checkpoint of another model"
        module.load_state_dict(state, strict=False)


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the state of an optimiser by name."""
    return {
        f"optimizer/{index}/{name}": value
        for index, values in optimizer.state_dict()["state"].items()
        for name, value in values.items()
    }


def load_optimizer(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Replace the state of an optimiser by the tensors of `optimizer_tensors`."""
    state = optimizer.state_dict()
    state["state"] = {}
    for key, tensor in tensors.items():
        if key.startswith("optimizer/"):
            _, index, name = key.split("/")
            state["state"].setdefault(int(index), {})[name] = tensor
    optimizer.load_state_dict(state)


def _untied_state(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's state, with each tied tensor under its first name only."""
    state: dict[tuple[int, torch.Size], tuple[str, Tensor]] = {}
    for name, tensor in module.state_dict().items():
        place = tensor.data_ptr() if tensor.numel() else id(tensor)
        state.setdefault((place, tensor.shape), (name, tensor))
    return dict(state.values())
