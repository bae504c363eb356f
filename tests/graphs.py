"""Record each ONNX graph once: models that differ only in their weights share it."""

import copy
import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
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


Places = dict[str, tuple[str, bool]]
"""Constant of a graph -> the weight it comes from, and whether it is transposed."""
Graph = tuple[onnx_ir.Model, Places]


class SharedGraphs:
    """Replaces `torch.onnx.export`, which takes seconds for each model.

    A graph is recorded with random weights, so that the exporter merges no two equal ones. Each
    model's own weights are filled in afterwards. kdcli compares every file with torch, so a weight
    in the wrong place is an error.

    Args:
        record: `torch.onnx.export`.
        folder: where the processes of a test run leave the graphs for each other.
    """

    def __init__(self, record: Callable[..., Any], folder: Path | None) -> None:
        self.record, self.folder = record, folder
        self._graphs: dict[str, Graph | None] = {}

    def export(self, module: nn.Module, example: object, **options: Any) -> Any:
        key = _key(module, options)
        if key not in self._graphs:
            self._graphs[key] = self._read(key) or self._draw(key, module, example, options)
        graph = self._graphs[key]
        if graph is None:
            return self.record(module, example, **options)
        model, places = graph
        program = torch.onnx.ONNXProgram(model.clone(), exported_program=None)
        weights = _weights(module)
        for name, (weight, turned) in places.items():
            value = weights[weight].T if turned else weights[weight]
            array = value.detach().contiguous().numpy()
            program.model.graph.initializers[name].const_value = onnx_ir.tensor(array, name=name)
        return program

    def _draw(
        self, key: str, module: nn.Module, example: object, options: Mapping[str, Any]
    ) -> Graph | None:
        """Record the graph with random weights; None if its constants depend on the weights."""
        drawn = copy.deepcopy(module)
        generator = torch.Generator().manual_seed(0)
        for weight in _weights(drawn).values():
            weight.normal_(generator=generator)
        program = self.record(drawn, example, **options)
        places = _places(program, drawn)
        if places is None:
            return None
        if self.folder is not None:
            aside = self.folder / f"{key}.{os.getpid()}"
            onnx_ir.save(program.model, aside)
            aside.rename(self.folder / f"{key}.onnx")
            aside.write_text(json.dumps(places))
            aside.rename(self.folder / f"{key}.json")
        return program.model, places

    def _read(self, key: str) -> Graph | None:
        """Read a graph that another process recorded."""
        if self.folder is None or not (places := self.folder / f"{key}.json").exists():
            return None
        model = onnx_ir.load(self.folder / f"{key}.onnx")
        return model, {name: (w, t) for name, (w, t) in json.loads(places.read_text()).items()}


def _weights(module: nn.Module) -> Mapping[str, Tensor]:
    state = module.state_dict().items()
    return {name: weight for name, weight in state if weight.is_floating_point()}


def _key(module: nn.Module, options: Mapping[str, Any]) -> str:
    """Return a hash of all that a graph depends on."""
    network: Any = module.model
    config = json.loads(network.model.config.to_json_string())
    kept = {k: v for k, v in config.items() if k not in NAMES and not k.startswith("kdcli_")}
    pool = network.pool
    pooled = pool and (pool.poolings, pool.normalize, repr(pool.layers))
    shapes = tuple((name, tuple(weight.shape)) for name, weight in _weights(module).items())
    names = *options["input_names"], *options["output_names"]
    kind = type(network.model)
    settings = json.dumps(kept, sort_keys=True)
    facts = kind.__module__, kind.__qualname__, settings, pooled, shapes, names
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _places(program: Any, module: nn.Module) -> Places | None:
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
