"""Record each ONNX graph once: models that differ only in their weights share it."""

import copy
import json
from collections.abc import Callable, Mapping
from typing import Any

import onnx_ir
import torch
from torch import Tensor, nn

NAMES = {
    "_name_or_path",
    "architectures",
    "dtype",
    "id2label",
    "initializer_range",
    "label2id",
    "problem_type",
    "sentence_transformers",
    "torch_dtype",
}
"""Keys of a configuration that no graph depends on."""


class SharedGraphs:
    """Replaces `torch.onnx.export`, which takes seconds for each model.

    A graph is recorded with random weights, so that the exporter merges no two equal ones. Each
    model's own weights are filled in afterwards. kdcli compares every file with torch, so a weight
    in the wrong place is an error.
    """

    def __init__(self, record: Callable[..., Any]) -> None:
        self.record = record
        self._programs: dict[tuple[object, ...], tuple[Any, dict[str, tuple[str, bool]]]] = {}

    def export(self, module: nn.Module, example: object, **options: Any) -> Any:
        key = _key(module, options)
        if key not in self._programs:
            drawn = copy.deepcopy(module)
            generator = torch.Generator().manual_seed(0)
            for weight in _weights(drawn).values():
                weight.normal_(generator=generator)
            program = self.record(drawn, example, **options)
            places = _places(program, drawn)
            if places is None:
                return self.record(module, example, **options)
            self._programs[key] = program, places
        program, places = self._programs[key]
        program = copy.copy(program)
        program.model = program.model.clone()
        weights = _weights(module)
        for name, (weight, turned) in places.items():
            value = weights[weight].T if turned else weights[weight]
            array = value.detach().contiguous().numpy()
            program.model.graph.initializers[name].const_value = onnx_ir.tensor(array, name=name)
        return program


def _weights(module: nn.Module) -> Mapping[str, Tensor]:
    state = module.state_dict().items()
    return {name: weight for name, weight in state if weight.is_floating_point()}


def _key(module: nn.Module, options: Mapping[str, Any]) -> tuple[object, ...]:
    """Return all that a graph depends on."""
    network: Any = module.model
    config = json.loads(network.model.config.to_json_string())
    kept = {k: v for k, v in config.items() if k not in NAMES and not k.startswith("kdcli_")}
    pool = network.pool
    pooled = pool and (pool.pooling, pool.normalize, pool.tanh)
    shapes = tuple((name, tuple(weight.shape)) for name, weight in _weights(module).items())
    names = *options["input_names"], *options["output_names"]
    return type(network.model), json.dumps(kept, sort_keys=True), pooled, shapes, names


def _places(program: Any, module: nn.Module) -> dict[str, tuple[str, bool]] | None:
    """Map a graph's constants to the weights they come from, and whether they are transposed.

    None if a constant may have been computed from weights.
    """
    weights, origins = _weights(module), {}
    for name, weight in weights.items():
        origins[_identity(weight)] = name, False
        if weight.ndim == 2:
            origins.setdefault(_identity(weight.T), (name, True))
    fixed = {_identity(buffer) for buffer in module.buffers()}
    places = {}
    for name, value in program.model.graph.initializers.items():
        constant = torch.from_numpy(value.const_value.numpy().copy())
        if name in weights:
            places[name] = name, False
        elif (identity := _identity(constant)) in origins:
            places[name] = origins[identity]
        elif constant.is_floating_point() and constant.numel() > 1 and identity not in fixed:
            return None
    return places


def _identity(tensor: Tensor) -> tuple[object, ...]:
    array = tensor.detach().contiguous().numpy()
    return array.shape, array.tobytes()
