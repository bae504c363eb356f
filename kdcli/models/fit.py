"""Fit a student to its teacher, module by module in the order in which they run.

A module's inputs differ from the teacher's once a layer or a dimension is gone. So each linear gets
the weights that produce, from the student's own input, the teacher's output in the kept dimensions
(ridge regression about the copied weights). Each normalisation gets the gain and bias that do the
same.

The student runs once, on a sample of text. Before each of its layers, the teacher's layer runs on
its own input, so only the outputs of one layer are in memory.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kdcli.messages import log
from kdcli.models.fit_cache import FIT_BATCH, FitCache, TeacherStates
from kdcli.models.layout import Layout, linears
from kdcli.models.least_squares import Inputs, fit_linear, fit_norm
from kdcli.models.sample import SAMPLE_TOKENS, real_states, run_sample
from kdcli.types import Batch

RIDGE = 0.3
"""Strength of the ridge. Weaker ones bring a linear nearer to its own targets but the student's
vectors farther from the teacher's, because each linear changes the inputs of all that follow."""
MOST_TOKENS = 32_768
"""Maximum number of tokens of a sample. A fit gains from more tokens than the inputs of its widest
linear."""
FIT_BYTES = 3 * 2**30
"""Memory for the states that a student of the teacher's width is fitted to."""


SILENCE = 10.0
"""Seconds after which a fit says how far it is."""


@dataclass(frozen=True)
class Counterpart:
    """A linear or normalisation of a student, and the teacher's module that it replaces.

    Attributes:
        module: The student's module.
        origin: The teacher's module.
        keep: Maps the teacher's outputs [R, D] to the student's dimensions, [R, N].
    """

    module: nn.Module
    origin: nn.Module
    keep: Callable[[Tensor], Tensor]


def tokens_to_fit(teacher: PreTrainedModel, layout: Layout, layers: int) -> int:
    """Return the number of tokens that a student with `layers` layers is fitted to.

    The inputs of the teacher's layers, the outputs of one of them and the inputs of its widest
    linear take `FIT_BYTES`, if this is within the bounds of a sample.
    """
    layer = layout.modules(teacher)[0]
    weights = [getattr(module, "weight", None) for module in layer.modules()]
    outputs = sum(len(weight) for weight in weights if isinstance(weight, Tensor))
    widest = linears(layout, layer)["D"][0][0].in_features
    numbers = layers * int(teacher.config.hidden_size) + outputs + widest
    return max(SAMPLE_TOKENS, min(MOST_TOKENS, FIT_BYTES // (4 * numbers)))


class _Fit:
    """The state of a fit: the outputs that are wanted next, and the inputs that were read last."""

    def __init__(self, sample: Batch) -> None:
        self.sample = sample
        self.targets: dict[nn.Module, Tensor] = {}
        self.read: Tensor | None = None
        self.inputs: Inputs | None = None

    @contextmanager
    def recording(self, counterparts: Iterable[Counterpart]) -> Iterator[None]:
        """Keep the outputs of the teacher's modules as targets of the student's."""
        with ExitStack() as hooks:
            for each in counterparts:
                hooks.callback(each.origin.register_forward_hook(self._record(each)).remove)
            yield

    def _record(self, counterpart: Counterpart) -> Callable[..., None]:
        def hook(module: nn.Module, args: object, output: object) -> None:
            self.keep_target(counterpart, output)

        return hook

    def keep_target(self, counterpart: Counterpart, output: object) -> None:
        """Keep the output of a teacher's module as the target of the student's."""
        shape = self.sample["input_ids"].shape
        # Skip poolers, and tensors that are computed once for all rows (DeBERTa's position
        # projections).
        if isinstance(output, Tensor) and output.dim() == 3 and output.shape[:2] == shape:
            target_RN = counterpart.keep(real_states(output, self.sample))
            self.targets[counterpart.module] = target_RN

    def linear(self, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        """Fit a linear before it runs."""
        assert isinstance(module, nn.Linear)
        target_RO = self._target(module, module.out_features)
        if target_RO is not None:
            fit_linear(module, self._inputs(args[0], module.bias is not None), target_RO)

    def _inputs(self, x_BLI: Tensor, has_bias: bool) -> Inputs:
        """Return the inputs of a linear. q, k and v share theirs."""
        if self.inputs is None or self.read is not x_BLI or self.inputs.has_bias != has_bias:
            states_RI = real_states(x_BLI, self.sample)
            self.inputs = Inputs(states_RI, has_bias=has_bias, ridge=RIDGE)
            self.read = x_BLI
        return self.inputs

    def norm(self, module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        """Fit a normalisation after it ran, and return its new output."""
        target_RN = self._target(module, output.shape[-1])
        if target_RN is None:
            return None
        fit_norm(module, real_states(output, self.sample).double(), target_RN.double())
        fitted: Tensor = type(module).forward(module, *args)
        return fitted

    def _target(self, module: nn.Module, width: int) -> Tensor | None:
        target_RN = self.targets.pop(module, None)
        return target_RN if target_RN is not None and target_RN.shape[-1] == width else None


@torch.no_grad()
def fit_to_teacher(
    teacher: PreTrainedModel,
    student: PreTrainedModel,
    counterparts: Iterable[Counterpart],
    origins: Mapping[nn.Module, nn.Module],
    sample: Batch,
    dtype: torch.dtype,
    cache: FitCache | None = None,
) -> None:
    """Fit a student's linears and normalisations to its teacher's outputs for a sample, in place.

    `origins` maps each of the student's layers to the teacher's layer that it replaces. Both models
    run in `dtype`; the fitted weights are computed in float32 and float64. A long fit logs the
    number of fitted layers. Layers whose outputs are in `cache` are not fitted.
    """
    fit = _Fit(sample)
    layer_of = {module: layer for layer in origins for module in layer.modules()}
    by_layer: dict[nn.Module | None, list[Counterpart]] = {}
    for each in counterparts:
        by_layer.setdefault(layer_of.get(each.module), []).append(each)
    outside = by_layer.get(None, [])
    modules = [each.origin for each in outside]
    if cache is None:
        states = _run_teacher(teacher, set(origins.values()), modules, sample, dtype)
    else:
        states = cache.states or _run_teacher(teacher, cache.teacher_layers, modules, sample, dtype)
        cache.states = states
    for each in outside:
        for output in states.outputs.get(each.origin, ()):
            fit.keep_target(each, output)

    layers, logged = list(origins), time.monotonic()

    def before_layer(layer: nn.Module, args: object) -> None:
        nonlocal logged
        if time.monotonic() - logged >= SILENCE:
            log(f"{layers.index(layer)} of {len(layers)} layers fitted")
            logged = time.monotonic()
        origin = origins[layer]
        args_of_origin, kwargs = states.inputs[origin]
        with fit.recording(by_layer.get(layer, [])):
            origin(*args_of_origin, **kwargs)

    student.eval()
    with ExitStack() as hooks:
        fitted: Sequence[nn.Module] = layers
        if cache is not None:
            running = cache.running(FIT_BATCH, layers, list(origins.values()))
            fitted = hooks.enter_context(running)
        for layer in fitted:
            hooks.callback(layer.register_forward_pre_hook(before_layer).remove)
        for module in (each.module for some in by_layer.values() for each in some):
            hook = (
                module.register_forward_pre_hook(fit.linear)
                if isinstance(module, nn.Linear)
                else module.register_forward_hook(fit.norm)
            )
            hooks.callback(hook.remove)
        run_sample(student, sample, dtype)
    student.train()


def _run_teacher(
    teacher: PreTrainedModel,
    layers: Iterable[nn.Module],
    modules: Iterable[nn.Module],
    sample: Batch,
    dtype: torch.dtype,
) -> TeacherStates:
    """Run a teacher on a sample, and keep the inputs of its layers and the outputs of modules."""
    states = TeacherStates({}, {})

    def keep_input(layer: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        states.inputs[layer] = args, kwargs

    def keep_output(module: nn.Module, args: object, output: object) -> None:
        states.outputs.setdefault(module, []).append(output)

    with ExitStack() as hooks:
        for layer in layers:
            hook = layer.register_forward_pre_hook(keep_input, with_kwargs=True)
            hooks.callback(hook.remove)
        for module in modules:
            hooks.callback(module.register_forward_hook(keep_output).remove)
        run_sample(teacher, sample, dtype)
    return states
