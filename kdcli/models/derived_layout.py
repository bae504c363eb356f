"""Derive an encoder's layout from what it computes, without looking at names.

A small random copy of the model runs once, with gradients, on a few tokens. Its softmaxes, matrix
products and modules are recorded in the order in which they run. Then:

* The layers are the members of a module list that run `num_hidden_layers` times and contain one
  softmax over all tokens each.
* q and k are the factors of the product that the softmax reads, and v is a factor of the product
  that reads the softmax. The gradients of single numbers of q, k and v show which rows of which
  linear make them. This gives the linears, the order of fused rows and the rotary pairs.
* The feed-forward's down projection is the linear whose inputs each read one unit of one or two
  other linears through an activation.

A derived layout is returned only if the model's own states and scores agree with it, and if a
smaller student of it runs and can be saved and reloaded.
"""

import copy
import inspect
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from kdcli.attention import AttentionCall
from kdcli.custom_code import code_errors, custom_code_allowed, failure_of_code
from kdcli.errors import KdcliError, first_line, raise_machine_error
from kdcli.models.attention_products import FunctionMode, product_of
from kdcli.models.capture import capture
from kdcli.models.custom_class import (
    fill_buffers,
    forget_custom_classes,
    has_own_code,
    save_network,
)
from kdcli.models.files import FOREIGN_ERRORS
from kdcli.models.layout import (
    Layout,
    Rotary,
    base_class,
    has_encoder_class,
    without_decoder,
)
from kdcli.models.reduce import copy_reduced
from kdcli.models.shape import student_config
from kdcli.types import Batch, ModelShape, Needs

# Odd, so that no table of 2 x n positions has as many rows.
ROWS, LENGTH = 3, 13
POSITIONS = ("max_position_embeddings", "n_positions")
VOCABULARY = 160
WINDOW = 4
MAX_KINDS = 4
"""A list of names in a configuration that is longer than this may have one for each layer."""
PROBED_UNITS = 8
CLOSE = 1e-4
"""Relative difference up to which two ways to compute the same numbers agree."""
OTHER_TERM = "a term of its own, or a bound on its scores"
CAUSAL = "its tokens attend to earlier ones only"
LEAKS = "its states depend on tokens that the mask hides"
HEADS, HEAD_WIDTH, FFN = 4, 16, 96
"""Sizes of a small copy."""
MAX_NUMBER = 32
"""A larger number in a configuration is a width."""


class NotDerivedError(Exception):
    """A step of the derivation found nothing, or something that kdcli cannot use."""


@dataclass
class Call:
    """A call of a module, a product of two tensors, or a softmax. `run` counts runs of layers."""

    kind: Literal["module", "product", "softmax"]
    inputs: tuple[Tensor, ...]
    output: Tensor
    run: int | None = None
    module: nn.Module | None = None

    @property
    def tokens(self) -> Tensor:
        """The output as [R, E], with one row per token."""
        return self.output.reshape(ROWS * LENGTH, -1)

    @property
    def has_tokens(self) -> bool:
        """Whether the output has a vector for each token."""
        return self.output.shape[:-1] in ((ROWS, LENGTH), (ROWS * LENGTH,))


@dataclass
class Trace:
    """A record of one forward pass: calls in order, and runs of layers with their outputs."""

    calls: list[Call] = field(default_factory=list)
    runs: list[tuple[nn.Module, Tensor]] = field(default_factory=list)
    # The modules around each softmax over all tokens, outermost first.
    around: list[list[nn.Module]] = field(default_factory=list)


class _Recorder(FunctionMode):
    """Record a model's modules, products and softmaxes. Attention is written out."""

    def __init__(self) -> None:
        super().__init__()
        self.trace = Trace()
        self.stack: list[nn.Module] = []
        self.layers: frozenset[nn.Module] = frozenset()

    def run(self) -> int | None:
        inside = any(module in self.layers for module in self.stack)
        return len(self.trace.runs) if inside else None

    def add(self, kind: Literal["product", "softmax"], *inputs: Tensor, output: Tensor) -> Tensor:
        """Record a call, and return a copy of its output, which the model may change in place."""
        self.trace.calls.append(Call(kind, inputs, output, self.run()))
        if _is_attention(self.trace.calls[-1]):
            self.trace.around.append(list(self.stack))
        return output.clone()

    def call(
        self, func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if name == "scaled_dot_product_attention":
            return self.attention(AttentionCall(*args, **kwargs))
        output = func(*args, **kwargs)
        if name == "softmax" and isinstance(output, Tensor):
            return self.add("softmax", args[0] if args else kwargs["input"], output=output)
        if (product := product_of(name, args, kwargs)) is not None:
            sides = product.left, product.right
            return product.output(self.add("product", *sides, output=product.of(output)))
        return output

    def attention(self, call: AttentionCall) -> Tensor:
        """Compute `scaled_dot_product_attention` in the steps that are recorded."""
        query, key, value = call.query, call.key, call.value
        if call.enable_gqa:
            groups = query.shape[1] // key.shape[1]
            key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
        across = key.transpose(-1, -2)
        scores = self.add("product", query, across, output=query @ across) * call.factor
        if call.is_causal:
            causal = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
            call = replace(call, attn_mask=causal)
        scores = call.masked(scores)
        weights = self.add("softmax", scores, output=scores.softmax(-1))
        return self.add("product", weights, value, output=weights @ value)

    @contextmanager
    def watching(self, model: nn.Module, layers: frozenset[nn.Module]) -> Iterator[Trace]:
        """Record while the model runs. `layers` are known from an earlier pass."""
        self.layers = layers

        def enter(module: nn.Module, args: object) -> None:
            self.stack.append(module)

        def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> Tensor | None:
            run = self.run()
            self.stack.pop()
            first = output if isinstance(output, Tensor) else None
            if first is None and isinstance(output, tuple) and isinstance(output[0], Tensor):
                first = output[0]
            if first is None:
                return None
            inputs = tuple(x for x in args if isinstance(x, Tensor))
            self.trace.calls.append(Call("module", inputs, first, run, module))
            if module in self.layers:
                self.trace.runs.append((module, first))
            return first.clone() if isinstance(module, nn.Linear) else None

        with ExitStack() as hooks, torch.enable_grad():
            for module in model.modules():
                hooks.callback(module.register_forward_pre_hook(enter).remove)
                hooks.callback(module.register_forward_hook(leave).remove)
            with self:
                yield self.trace


@contextmanager
def _isolated() -> Iterator[None]:
    """Keep random numbers and modes as they are, and convert errors of the model's code."""
    with (
        torch.random.fork_rng(devices=[]),
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.device("cpu"),
        torch.autocast("cpu", enabled=False),
    ):
        try:
            yield
        except (NotDerivedError, KdcliError):
            raise
        except code_errors(FOREIGN_ERRORS) as error:
            raise_machine_error(error)
            failure = failure_of_code(error) or f"{type(error).__name__}: {first_line(error)}"
            raise NotDerivedError(f"a small copy of it fails: {failure}") from error


def layout_of_states(small: PreTrainedConfig, reason: NotDerivedError) -> Layout:
    """Return the layout of a model whose layers cannot be used.

    Raises NotDerivedError if it does not return a hidden state for each token either.
    """
    with _isolated(), torch.no_grad():
        model, batch = _small_model(small), _tokens(small)
        _run(model, batch)
        offset = _position_offset(model, batch)
        message = f"kdcli cannot prune a '{small.model_type}' or make smaller ones of it: {reason}"
        row = Layout(missing=message, position_offset=offset, interface=False)
        with suppress(NotImplementedError):
            row = replace(row, embeddings=(f"{_paths(model)[model.get_input_embeddings()]}.",))
        return row


@_isolated()
def derive(config: PreTrainedConfig) -> Layout:
    """Return the layout of a small copy of a configuration.

    Raises NotDerivedError, with the step that failed, if kdcli cannot use the architecture.
    """
    if not has_encoder_class(str(config.model_type)):
        raise NotDerivedError("its encoder is part of a class with a decoder")
    if not int(getattr(config, "num_hidden_layers", 0) or 0):
        raise NotDerivedError("its configuration has no num_hidden_layers")
    own_settings = (config.to_dict().get("per_layer_config") or {}).values()
    # A sliding window changes the mask, not the size of a layer.
    if any(set(own) - {"sliding_window"} for own in own_settings):
        raise NotDerivedError("its layers have different sizes")
    model = _small_model(config)
    batch = _tokens(model.config)
    layers_path, layers = _layers(model, batch)
    recorder = _Recorder()
    with recorder.watching(model, frozenset(layers)) as trace:
        states = _run(model, batch)
    _check_last_state(trace, states)
    last = len(trace.runs) - 1
    calls = [call for call in trace.calls if call.run == last]
    layer = trace.runs[last][0]
    row = Layout(
        layers=layers_path,
        shared=len(layers) == 1 and int(model.config.num_hidden_layers) > 1,
        local="sliding_attention" in (getattr(config, "layer_types", None) or ()),
        embeddings=_embeddings(model, trace, layers),
    )
    row, attention = _attention(row, layer, calls)
    if len(layers) > 1:
        row = _same_attention(row, trace)
    row = _feed_forward(row, layer, calls, attention)
    row = replace(row, ffn=_width_key(model, row))
    return _verified(row, model, batch, trace)


@_isolated()
def small_copies(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    """Return copies of a configuration with few layers and tokens: with small widths, and with its
    own.

    The second one is for models whose widths depend on each other in a way that kdcli does not
    know. Raises NotDerivedError for a model of several networks.
    """
    if any(getattr(config, name, None) is not None for name in config.sub_configs):
        raise NotDerivedError("it has parts with configurations of their own, as for images")
    try:
        shallow = _shallow(config)
    except NotImplementedError:
        # Its number of layers cannot be set.
        return [copy.deepcopy(config)]
    try:
        return [_narrow(shallow), shallow]
    except FOREIGN_ERRORS as error:
        raise_machine_error(error)
        return [shallow]


def _narrow(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a copy of a configuration with 4 heads and small widths."""
    narrow = copy.deepcopy(config)
    heads, hidden = int(config.num_attention_heads), int(config.hidden_size)
    for name, value in vars(config).items():
        if type(value) is not int or name.endswith(("vocab_size", "_token_id")):
            continue
        if name == "head_dim":
            setattr(narrow, name, HEAD_WIDTH * (1 if value * heads == hidden else 2))
        elif value == hidden:
            setattr(narrow, name, HEADS * HEAD_WIDTH)
        elif value > MAX_NUMBER:
            setattr(narrow, name, FFN)
    narrow.num_attention_heads = HEADS
    key_heads = getattr(config, "num_key_value_heads", None)
    if key_heads is not None:
        narrow.num_key_value_heads = HEADS if key_heads == heads else min(key_heads, HEADS // 2)
    return narrow


def _shallow(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a copy of a configuration with few layers and tokens."""
    small = copy.deepcopy(config)
    forget_custom_classes(small)
    small.use_cache = False
    small._attn_implementation = "eager"
    depth = int(getattr(config, "num_hidden_layers", 0) or 0)
    by_layer = {
        name: value
        for name, value in vars(small).items()
        if isinstance(value, list)
        and len(value) == depth
        and (name == "layer_types" or depth > MAX_KINDS or all(isinstance(x, int) for x in value))
    }
    # One layer of each kind, and at least two.
    kinds = list(zip(*by_layer.values(), strict=True)) if by_layer else [()]
    kept = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
    kept = kept * 2 if len(kept) == 1 else kept
    first = _first_token(config)
    for name, value in list(vars(small).items()):
        if name in by_layer:
            setattr(small, name, [value[n] for n in kept])
        if name.endswith("_token_id") and isinstance(value, int) and value >= first:
            setattr(small, name, 1)
        if name.endswith("vocab_size") and isinstance(value, int):
            setattr(small, name, min(value, VOCABULARY))
        if name in POSITIONS and isinstance(value, int):
            setattr(small, name, max(value, 4 * LENGTH))
        if name == "chunk_size_feed_forward":
            # It changes the memory and not the states, and must divide the length.
            setattr(small, name, 0)
        if name == "sliding_window" and isinstance(value, int):
            # A mask that ends elsewhere than the model's own shows only within the window.
            setattr(small, name, min(value, WINDOW))
        if value == "linear" and "act" in name:
            # An activation is where the feed-forward block is found.
            setattr(small, name, "gelu")
    small.vocab_size = VOCABULARY
    if depth:
        small.num_hidden_layers = len(kept)
    return small


def _small_model(config: PreTrainedConfig) -> PreTrainedModel:
    """Return a random model of a small configuration."""
    with torch.no_grad():
        torch.manual_seed(0)
        model = base_model(config).eval().float()
        for parameter in model.parameters():
            if parameter.dim() > 1 and parameter.requires_grad:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)
            elif parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape))
    return model


def base_model(config: PreTrainedConfig) -> PreTrainedModel:
    """Return a model of a configuration without a head; of an encoder-decoder, its encoder."""
    model = base_class(config).from_config(config, trust_remote_code=custom_code_allowed())
    return without_decoder(model)


def _first_token(config: PreTrainedConfig) -> int:
    """Return the first id that is not special in the small model."""
    return _vocabulary(config) // 2


def _vocabulary(config: PreTrainedConfig) -> int:
    return min(int(getattr(config, "vocab_size", None) or VOCABULARY), VOCABULARY)


def _tokens(config: PreTrainedConfig) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids_BL = torch.randint(
        _first_token(config), _vocabulary(config), (ROWS, LENGTH), generator=generator
    )
    return {"input_ids": ids_BL, "attention_mask": torch.ones_like(ids_BL)}


def _run(model: PreTrainedModel, batch: Batch) -> Tensor:
    output = model(**batch)
    states = getattr(output, "last_hidden_state", None)
    if not isinstance(states, Tensor):
        kind = type(output).__name__
        raise NotDerivedError(f"its output, a {kind}, has no last_hidden_state")
    if states.dim() != 3 or states.shape[:2] != (ROWS, LENGTH):
        raise NotDerivedError(
            f"its last_hidden_state for {ROWS} texts of {LENGTH} tokens has the shape "
            f"{list(states.shape)}, which is not a state for each token"
        )
    width = getattr(model.config, "hidden_size", states.shape[-1])
    if states.shape[-1] != width:
        raise NotDerivedError(
            f"its last_hidden_state has {states.shape[-1]} values for each token, but the "
            f"hidden_size of its config.json is {width}"
        )
    return states


def _layers(model: PreTrainedModel, batch: Batch) -> tuple[str, list[nn.Module]]:
    """Return the innermost module list whose members run as layers, and its path."""
    recorder = _Recorder()
    with recorder.watching(model, frozenset()) as trace:
        _run(model, batch)
    depth = int(model.config.num_hidden_layers)
    if not trace.around:
        raise NotDerivedError(
            "no softmax over all tokens was found: its attention, if any, is hashed, banded or "
            "linear"
        )
    found: tuple[str, list[nn.Module]] | None = None
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or len(module) not in (1, depth):
            continue
        members = list(module)
        alike = len({type(member) for member in members}) == 1
        runs = [member for stack in trace.around for member in stack if member in members]
        expected = members if len(members) == depth else members * depth
        if alike and runs == expected and len(trace.around) == depth:
            found = path, members
    if found is not None and len({_sizes(layer) for layer in found[1]}) > 1:
        raise NotDerivedError("its layers have different sizes")
    if found is None:
        raise NotDerivedError(
            f"with {depth} layers it runs {len(trace.around)} softmaxes over all tokens, not one "
            "in each of a list of equal layers: they may have several streams, or stand in "
            "several lists"
        )
    return found


def _sizes(layer: nn.Module) -> tuple[tuple[str, torch.Size], ...]:
    """Return the sizes of a layer's linears. Some first layers lack a norm, or have a bias more."""
    return tuple(
        (path, module.weight.shape)
        for path, module in layer.named_modules()
        if isinstance(module, nn.Linear)
    )


def _check_last_state(trace: Trace, states: Tensor) -> None:
    """Check that the last hidden state is the last layer's output, or that of a module after it."""
    if torch.equal(trace.runs[-1][1], states):
        return
    at = max(n for n, call in enumerate(trace.calls) if call.module is trace.runs[-1][0])
    for call in trace.calls[at + 1 :]:
        if call.module is not None and call.output.shape == states.shape:
            is_leaf = next(call.module.children(), None) is None
            if is_leaf and torch.equal(call.output, states):
                return
    raise NotDerivedError(
        "its last hidden state is neither its last layer's output nor that of a module after it"
    )


def _embeddings(model: nn.Module, trace: Trace, layers: list[nn.Module]) -> tuple[str, ...]:
    """Return the prefixes of the parameters that make the first layer's input."""
    first = next(n for n, call in enumerate(trace.calls) if call.run is not None)
    inside = {module for layer in layers for module in layer.modules()}
    ran = {call.module for call in trace.calls[:first] if call.module and call.has_tokens}
    prefixes: list[str] = []
    for path, module in model.named_modules():
        known = path.startswith(tuple(prefixes))
        if module in ran and module not in inside and not known and list(module.parameters()):
            prefixes.append(f"{path}.")
    return tuple(prefixes)


@dataclass(frozen=True)
class _Source:
    """The linear that makes one of q, k and v, and the rows of each head in it."""

    linear: nn.Linear
    path: str
    rows: list[list[int]]
    rotary: Rotary | None
    bias: str | None


def _attention(
    row: Layout, layer: nn.Module, calls: list[Call]
) -> tuple[Layout, set[nn.Module | None]]:
    """Return the row with the parts of a layer's attention, and their linears."""
    at = next(n for n, call in enumerate(calls) if _is_attention(call))
    scores, weights = calls[at].inputs[0], calls[at].output
    products = [
        c for c in calls[:at] if c.kind == "product" and _is_square(c.output)
        and c.output.numel() == scores.numel() and _depends(scores, c.output)
    ]  # fmt: skip
    reading = next(
        (
            n for n, c in enumerate(calls) if n > at and c.kind == "product"
            and _is_square(c.inputs[0]) and _depends(c.inputs[0], weights)
        ),
        None,
    )  # fmt: skip
    if not products or reading is None:
        raise NotDerivedError("no product of q and k, or of the attention and v, was found")
    heads = scores.numel() // (ROWS * LENGTH * LENGTH)
    context = calls[reading].output

    def by_head(x: Tensor) -> Tensor:
        return x.reshape(ROWS, heads, LENGTH, -1)

    q, k = products[-1].inputs
    factors = (q, k.transpose(-1, -2), calls[reading].inputs[1])
    sources = [
        _source(name, by_head(x), layer, calls[:reading])
        for name, x in zip("qkv", factors, strict=True)
    ]
    output = next(
        (
            c for c in calls[reading:] if isinstance(c.module, nn.Linear)
            and c.inputs and _depends(c.inputs[0], context)
        ),
        None,
    )  # fmt: skip
    if output is None:
        raise NotDerivedError("no linear that reads the attention's output was found")
    paths = _paths(layer)
    # Linears that do not read tokens, but the scores depend on them: they project positions.
    linears = [c for c in calls[:at] if isinstance(c.module, nn.Linear) and not c.has_tokens]
    others = {c.module for c in linears if _depends(scores, c.output)}
    others -= {source.linear for source in sources}
    row = replace(
        row,
        q=sources[0].path,
        k=sources[1].path,
        v=sources[2].path,
        o=paths[output.module],
        fused=_fused(sources),
        rotary=sources[0].rotary,
        rotary_value=sources[2].rotary is not None,
        like_q=tuple(path for module, path in paths.items() if module in others),
        bias=_bias(sources),
    )
    return row, {*(source.linear for source in sources), output.module}


def _same_attention(row: Layout, trace: Trace) -> Layout:
    """Return the row of the last layer's attention, after a comparison with the other layers'.

    Layers may rotate different shares of a head, or none. Raises NotDerivedError for other
    differences.
    """
    rotations = {row.rotary}
    for n, (layer, _) in enumerate(trace.runs[:-1]):
        other, _ = _attention(row, layer, [call for call in trace.calls if call.run == n])
        rotations.add(other.rotary)
        if replace(other, rotary=row.rotary) != row:
            raise NotDerivedError("its layers attend in different ways")
    rotations.discard(None)
    if len(rotations) > 1 and "partial" not in rotations:
        raise NotDerivedError("its layers rotate different pairs of dimensions")
    rotary = "partial" if "partial" in rotations else next(iter(rotations), None)
    return replace(row, rotary=rotary)


def _paths(module: nn.Module) -> dict[nn.Module | None, str]:
    return {part: path for path, part in module.named_modules()}


def _gradients(number: Tensor, tensors: list[Tensor]) -> list[Tensor]:
    """Return the gradients of a number, which are 0 where it does not depend on a tensor."""
    return list(
        torch.autograd.grad(
            number, tensors, retain_graph=True, allow_unused=True, materialize_grads=True
        )
    )


def _depends(output: Tensor, on: Tensor) -> bool:
    if not (output.requires_grad and on.requires_grad):
        return False
    weights = torch.rand(output.shape, generator=torch.Generator().manual_seed(0))
    return bool(_gradients((output * weights).sum(), [on])[0].any())


def _source(name: str, x_BALK: Tensor, layer: nn.Module, calls: list[Call]) -> _Source:
    """Trace q, k or v back to the linear that makes it."""
    leaves = [
        call
        for call in calls
        if call.module is not None
        and call.output.requires_grad
        and next(call.module.parameters(recurse=False), None) is not None
    ]
    outputs = [call.output for call in leaves]
    heads, each = x_BALK.shape[1], x_BALK.shape[3]
    weights_K = torch.rand(each, generator=torch.Generator().manual_seed(0)) + 0.5

    def number(head: int) -> Tensor:
        return (x_BALK[0, head, 1] * weights_K).sum()

    gradients = _gradients(number(0), outputs)
    reached = [call for call, gradient in zip(leaves, gradients, strict=True) if gradient.any()]
    made = [c for c in reached if isinstance(c.module, nn.Linear) and c.has_tokens]
    if not made and reached:
        kind = type(reached[-1].module).__name__
        raise NotDerivedError(f"{name} is made by a {kind}, not by a linear of torch")
    if not made:
        raise NotDerivedError(f"no linear that makes {name} was found")
    rows: list[list[int]] = []
    for head in range(heads):
        gradient = _gradients(number(head), [made[-1].output])[0].reshape(ROWS * LENGTH, -1)
        if gradient.any(1).nonzero().flatten().tolist() != [1]:
            raise NotDerivedError(f"{name} of a token reads other tokens")
        found = gradient[1].nonzero().flatten().tolist()
        if len(found) == gradient.shape[1] and heads * each % len(found) == 0:
            # A norm over all heads mixes their numbers.
            group = head * len(found) // (heads * each)
            found = found[group * each : (group + 1) * each]
        rows.append(found)
    if any(len(found) != each for found in rows):
        raise NotDerivedError(f"the heads of {name} are not rows of one linear")
    paths = _paths(layer)
    linear = made[-1].module
    assert isinstance(linear, nn.Linear)
    own = {
        path: parameter
        for path, parameter in layer.named_parameters()
        if next(layer.get_submodule(path.rpartition(".")[0]).children(), None) is not None
        and parameter.requires_grad
    }
    added = _gradients(number(0), list(own.values())) if own else []
    biases = [path for path, gradient in zip(own, added, strict=True) if gradient.any()]
    bias = biases[0] if biases else None
    return _Source(linear, paths[linear], rows, _rotary(x_BALK, reached[-1]), bias)


def _rotary(x_BALK: Tensor, call: Call) -> Rotary | None:
    """Return which dimensions of a head are rotated together after a call."""
    width = x_BALK.shape[3]
    read = [
        _gradients(number, [call.output])[0].flatten().nonzero().flatten().tolist()
        for number in x_BALK[0, 0, LENGTH - 1]
    ]
    places = sorted({place for some in read for place in some})
    local = [[places.index(place) for place in some] for some in read]
    if all(some == [n] for n, some in enumerate(local)):
        return None
    if all(some == sorted({n, (n + width // 2) % width}) for n, some in enumerate(local)):
        return "halves"
    if all(some == sorted({n, n ^ 1}) for n, some in enumerate(local)):
        return "pairs"
    if all(n in some for n, some in enumerate(local)):
        return "partial"
    raise NotDerivedError("each number of q reads several dimensions, but not as if rotated")


def _fused(sources: list[_Source]) -> Literal["blocks", "heads"] | None:
    """Return the order of the rows of q, k and v, if they are one linear."""
    q, k, v = sources
    heads, each = len(q.rows), len(q.rows[0])

    def rows(start: int, step: int) -> list[list[int]]:
        return [list(range(start + a * step, start + a * step + each)) for a in range(heads)]

    width, together = heads * each, [q.rows, k.rows, v.rows]
    if q.linear is k.linear is v.linear:
        # Several heads of q may read one head of k and of v.
        shared = (q.linear.out_features - width) // 2
        group = max(1, width // max(1, shared))
        keys, values = (
            [rows(start, each)[head // group] for head in range(heads)]
            for start in (width, width + shared)
        )
        if together == [rows(0, each), keys, values]:
            return "blocks"
        if together == [rows(part * each, 3 * each) for part in range(3)]:
            return "heads"
    elif len({q.linear, k.linear, v.linear}) == 3 and q.rows == rows(0, each):
        group = width // k.linear.out_features
        if k.rows == v.rows == [q.rows[head // group] for head in range(heads)]:
            return None
    raise NotDerivedError("the rows of its q, k and v are in an order that kdcli does not know")


def _bias(sources: list[_Source]) -> tuple[str, str] | None:
    q, k, v = (source.bias for source in sources)
    if q is None and k is None and v is None:
        return None
    if q is None or v is None or k is not None:
        raise NotDerivedError("it adds parameters to q, k or v that kdcli does not know")
    return q, v


def _feed_forward(
    row: Layout, layer: nn.Module, calls: list[Call], attention: set[nn.Module | None]
) -> Layout:
    """Return the row with the linears of the feed-forward block.

    Of several blocks it is the widest one; adapters are narrower.
    """
    paths, blocks = _paths(layer), dict[int, Layout]()
    linears = [c for c in calls if isinstance(c.module, nn.Linear) and c.has_tokens and c.inputs]
    for n, down in reversed(list(enumerate(linears))):
        if down.module in attention:
            continue
        ups = [up for up in linears[:n] if _through_activation(down.inputs[0], up)]
        if not 1 <= len(ups) <= 2:
            continue
        if len(ups) == 2:
            # The unit is proportional to the up projection, but not to its gate.
            error = [_bilinear_error(down.inputs[0], up.output) for up in ups]
            ups = ups if error[0] < error[1] else ups[::-1]
        width = down.inputs[0].shape[-1]
        packed = len(ups) == 1 and ups[0].output.shape[-1] == 2 * width
        up, gate = paths[ups[0].module], paths[ups[-1].module]
        block = replace(
            row, up=up, down=paths[down.module], gate=gate if packed or len(ups) == 2 else None
        )
        blocks.setdefault(width, block)
    if not blocks:
        raise NotDerivedError(
            "no feed-forward block of linears around an activation was found in the members of "
            f"'{row.layers}'"
        )
    return blocks[max(blocks)]


def _through_activation(units: Tensor, up: Call) -> bool:
    """Return whether each unit reads its own rows of a linear, and not in proportion."""
    width, rows = units.shape[-1], up.output.shape[-1]
    if rows not in (width, 2 * width) or not _depends(units, up.output):
        return False
    for unit in range(0, width, max(1, width // PROBED_UNITS)):
        gradient = _gradients(units[..., unit].sum(), [up.output])[0].reshape(-1, rows)
        # A unit with ReLU may be 0 for all tokens.
        read = gradient.any(0).nonzero().flatten().tolist()
        if not set(read) <= {unit, unit + width}:
            return False
    slopes = _gradients(units.sum(), [up.output])[0].reshape(-1, rows)
    return bool((slopes.std(0) > CLOSE * slopes.abs().amax(0)).any())


def _bilinear_error(units: Tensor, factor: Tensor) -> float:
    gradient = _gradients(units.sum(), [factor])[0]
    return float(((units - gradient * factor).norm() / units.norm()).detach())


def _width_key(model: PreTrainedModel, row: Layout) -> str:
    """Return the configuration key of the feed-forward width."""

    def width_of(network: PreTrainedModel) -> int:
        return int(row.modules(network)[-1].get_submodule(row.down).in_features)  # type: ignore[arg-type]

    config, width = model.config, width_of(model)
    for name, value in config.to_dict().items():
        if value != width or isinstance(value, bool):
            continue
        wider = copy.deepcopy(config)
        setattr(wider, name, width + 8)
        try:
            with torch.device("meta"), no_init_weights():
                changed = width_of(base_model(wider))
        except (ValueError, RuntimeError):
            continue
        if changed == width + 8:
            return str(name)
    raise NotDerivedError(f"no configuration key sets the width of its feed-forward, {width}")


def _verified(row: Layout, model: PreTrainedModel, batch: Batch, trace: Trace) -> Layout:
    """Complete the row with what only runs show, and compare it with the model."""
    row = replace(row, head_count=_head_count(row, model, trace))
    row = _captured(row, model, batch, trace)
    row = replace(row, position_offset=_position_offset(model, batch))
    row = replace(row, leaks=_leaks(row, model, batch), autocast=_autocasts(model, batch))
    _check_student(row, model, batch)
    return row


def _autocasts(model: PreTrainedModel, batch: Batch) -> bool:
    """Return whether the model runs under autocast, without numbers that only float32 holds."""
    try:
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            model(**batch)
    except RuntimeError as error:
        raise_machine_error(error)
        return False
    return True


def _head_count(row: Layout, model: PreTrainedModel, trace: Trace) -> str:
    """Return the attribute of the attention that holds its number of heads."""
    weights = next(call.output for call in trace.calls if _is_attention(call))
    heads = weights.numel() // (ROWS * LENGTH * LENGTH)
    layer = row.modules(model)[-1]
    owner = row.attention(layer)
    for name in (row.head_count, *vars(owner)):
        with suppress(AttributeError, TypeError):
            if replace(row, head_count=name).heads(layer) == heads:
                return str(name)
    raise NotDerivedError(f"nothing in its attention holds its number of heads, {heads}")


def _captured(row: Layout, model: PreTrainedModel, batch: Batch, trace: Trace) -> Layout:
    """Return the row with the way in which q, k and v can be recorded."""
    ways = [replace(row, interface=interface) for interface in (True, False)]
    ways.append(replace(row, interface=False, products=True))
    if row.rotary is not None:
        tables = [
            call
            for call in trace.calls
            if call.run is None and not call.output.requires_grad and call.output.dim() == 2
        ]
        paths = _paths(model)
        if tables and tables[0].module is not None:
            ways[1] = replace(ways[1], positions=paths[tables[0].module])
    error = NotDerivedError("")
    for way in ways:
        try:
            return _compared(way, model, batch, trace)
        except NotDerivedError as reason:
            error = reason
        except FOREIGN_ERRORS as reason:
            raise_machine_error(reason)
            error = NotDerivedError(f"its q, k and v could not be recorded: {first_line(reason)}")
        finally:
            model.set_attn_implementation("eager")
    raise error


@torch.no_grad()
def _compared(row: Layout, model: PreTrainedModel, batch: Batch, trace: Trace) -> Layout:
    """Return the row with what its captured signals show next to the model's own.

    Raises NotDerivedError if they differ.
    """
    numbers = frozenset(range(1, len(trace.runs) + 1))
    needs = Needs(q=numbers, k=numbers, v=numbers, hidden=numbers | {0})
    signals = capture(model, needs, layout=row)(batch)
    other_term, causal = row.other_term, True
    for n, (_, output) in enumerate(trace.runs, 1):
        calls = [call for call in trace.calls if call.run == n - 1]
        at = next(i for i, call in enumerate(calls) if _is_attention(call))
        weights_BALL = calls[at].output.view(ROWS, -1, LENGTH, LENGTH)
        product = [c.output for c in calls[:at] if c.kind == "product" and _is_square(c.output)][-1]
        q, k, v = signals.q[n], signals.k[n], signals.v[n]
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        alike = F.cosine_similarity(scores.flatten(), product.flatten(), dim=0)
        if alike < 1 - CLOSE:
            raise NotDerivedError("the product of the q and k that it found is not the model's")
        allowed = weights_BALL > 0
        causal &= not allowed.triu(1).any()
        if not _close(scores.masked_fill(~allowed, -torch.inf).softmax(-1), weights_BALL):
            other_term = OTHER_TERM
        context = next(c.output for c in calls[at + 1 :] if c.kind == "product")
        if not _close(weights_BALL @ v, context.reshape(ROWS, -1, LENGTH, v.shape[-1])):
            raise NotDerivedError("the v that it found is not the model's")
        if n < len(trace.runs) and not _close(signals.hidden[n], output):
            raise NotDerivedError("the states of its layers are not the model's")
    if not _close(signals.hidden[len(trace.runs)], _run(model, batch)):
        raise NotDerivedError("the last state of its layers is not the model's")
    return replace(row, other_term=other_term, causal=causal)


def _is_square(x: Tensor) -> bool:
    return x.shape[-2:] == (LENGTH, LENGTH)


def _is_attention(call: Call) -> bool:
    return call.kind == "softmax" and _is_square(call.output)


def _close(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).norm() <= CLOSE * other.norm())


@torch.no_grad()
def _position_offset(model: PreTrainedModel, batch: Batch) -> bool:
    """Return whether position ids begin after the padding id."""
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return False
    positions_BL = torch.arange(LENGTH).expand(ROWS, LENGTH)
    own = _run(model, batch)
    if _close(_run(model, batch | {"position_ids": positions_BL}), own):
        return False
    embeddings = dict(model.named_modules()).get("embeddings")
    padding = getattr(embeddings, "padding_idx", None)
    if padding is not None:
        shifted_BL = positions_BL + padding + 1
        if _close(_run(model, batch | {"position_ids": shifted_BL}), own):
            return True
    # They begin at another number, so that documents in one row cannot be kept apart.
    return False


@torch.no_grad()
def _leaks(row: Layout, model: PreTrainedModel, batch: Batch) -> str | None:
    """Return why a document sees another one in its row despite the mask, or None."""
    if row.causal:
        return CAUSAL
    last = len(row.modules(model))
    run = capture(model, Needs(hidden=frozenset({last})), layout=row)
    half = LENGTH // 2
    document_L = (torch.arange(LENGTH) >= half).long()
    mask = (document_L[:, None] == document_L[None])[None, None].expand(ROWS, 1, LENGTH, LENGTH)
    positions_BL = torch.cat([torch.arange(half), torch.arange(LENGTH - half)]).expand(ROWS, -1)
    other = batch["input_ids"].clone()
    other[:, half:] = other[:, half:].flip(1)
    extra = {"attention_mask": mask, "position_ids": positions_BL}
    try:
        one, two = (
            run({"input_ids": ids} | extra).hidden[last] for ids in (batch["input_ids"], other)
        )
        alone = run({name: x[:, half:] for name, x in batch.items()}).hidden[last]
    except Exception as error:  # noqa: BLE001  # Own code may expect another mask.
        raise_machine_error(error)
        return LEAKS
    finally:
        model.set_attn_implementation("eager")
    apart = _close(one[:, :half], two[:, :half]) and _close(one[:, half:], alone)
    return None if apart else LEAKS


@torch.no_grad()
def _check_student(row: Layout, model: PreTrainedModel, batch: Batch) -> None:
    """Check that a shallower and narrower student runs, and reloads in transformers."""
    config = model.config
    heads, width = config.num_attention_heads, getattr(config, row.ffn)
    fewer = max(1, heads // 2)
    shape = ModelShape(1, config.hidden_size * fewer // heads, max(1, width // 2), fewer)
    try:
        student = type(model)(student_config(config, shape, [1], layout=row)).float().eval()
        copy_reduced(model, student, row, [1], batch, fit=False)
        own = _run(student, batch)
        with tempfile.TemporaryDirectory() as folder:
            save_network(student, Path(folder))
            again = type(model).from_pretrained(folder).eval()
            if has_own_code(again):
                fill_buffers(again)
        same = _close(_run(again, batch), own)
    except NotDerivedError:
        raise
    except Exception as error:  # The model's own code.
        raise_machine_error(error)
        if type(error).__name__ == "AmbiguousGlobalPerLayerAttributeError":
            # The class that older versions of transformers lack.
            raise NotDerivedError("its layers have different sizes") from error
        raise NotDerivedError(
            f"a student of one layer and half its widths fails: {first_line(error)}"
        ) from error
    if own.shape[-1] != shape.hidden or not own.isfinite().all() or not same:
        raise NotDerivedError("a smaller student differs after it was saved and reloaded")
