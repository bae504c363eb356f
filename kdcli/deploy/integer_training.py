"""Train the weights of a packed file, so that its outputs come closer to the model's.

Rounding with compensation keeps the output of each product. This training keeps the outputs of the
whole model: its float32 outputs are the targets, and gradients pass the rounding of weights and
activations unchanged (straight-through estimation, arXiv 1308.3432).
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from kdcli.deploy.calibrate import Kernel, Rounding, nearest_rounding, products
from kdcli.deploy.rounding import Grid, Integers, block_factors, within_pairs
from kdcli.engine.session import Session
from kdcli.engine.train import train
from kdcli.errors import UsageError
from kdcli.types import Batch, Examples, Job, Order, ParamGroup, Schedule, StepLoss, Term

ROWS = 16
"""Number of texts in a step."""
LEARNING_RATE = 0.004
"""The largest learning rate of a weight, in steps of its block's grid."""
SCALE_RATE = 0.1
"""The learning rate of the scales' logarithms, relative to the weights'."""

MARGIN = 0.4
"""Largest distance of a weight from its integer at the start, in steps of the grid."""

Outputs = Callable[[nn.Module, Batch], Mapping[str, Tensor]]
"""Computes the outputs of a model that are kept: [B, L, ...] for tokens, or [B, ...] for texts."""


def train_integers(
    model: nn.Module,
    outputs: Outputs,
    roundings: Mapping[str, Rounding],
    kernel: Kernel,
    examples: Examples,
    order: Order,
    steps: int,
    session: Session,
) -> dict[str, Rounding]:
    """Train the integers and scales of packed weights.

    Args:
        model: The model, in float32 and eval mode. It is not changed.
        outputs: Computes the outputs that are kept.
        roundings: The rounding of linears by name. Those without whole blocks stay as they are.
        kernel: How the products are computed.
        examples: The texts.
        order: The texts of each step.
        steps: The number of steps.
        session: The device.

    Returns:
        The roundings, with the integers and scales at the end of the training.

    Raises:
        UsageError: No linear can be packed.
    """
    student = _Student(model, roundings, kernel)
    if not student.packed:
        raise UsageError(
            "--steps trains linears, and the model has none that can be packed",
            "export without --steps",
        )

    def step(batch: Batch) -> StepLoss:
        with torch.no_grad():
            targets = outputs(model, batch)
        return StepLoss(_errors(outputs(student.model, batch), targets, batch["attention_mask"]))

    def group(name: str) -> ParamGroup:
        return ParamGroup(SCALE_RATE if name.endswith("log_scale_O1") else 1.0)

    job = Job({"packed": student}, step, examples, order, held_out=None, param_group=group)
    schedule = Schedule(
        steps=steps,
        batch_size=ROWS,
        lr=LEARNING_RATE,
        warmup_steps=steps // 20,
        weight_decay=0.0,
        beta2=0.98,
        micro_batch_size=ROWS,
        log_every=50,
    )
    train(session, job, schedule, None)
    return {**roundings, **student.roundings()}


def _errors(
    result: Mapping[str, Tensor], targets: Mapping[str, Tensor], mask_BL: Tensor
) -> dict[str, Term]:
    """Return the squared error of each output, relative to the mean square of its target."""
    terms = {}
    for name, target in targets.items():
        # Logits and vectors of texts may be as wide as the texts are long.
        is_of_tokens = target.ndim > 2 or name in ("start_logits", "end_logits")
        real = mask_BL.bool() if is_of_tokens else torch.ones(len(target), dtype=torch.bool)
        error = (result[name] - target)[real].square().mean() / target[real].square().mean()
        terms[name] = Term(error, "tokens" if is_of_tokens else "rows")
    return terms


class _Student(nn.Module):
    """A copy of a model that computes as the packed file does, always without dropout."""

    def __init__(self, model: nn.Module, roundings: Mapping[str, Rounding], kernel: Kernel) -> None:
        super().__init__()
        self.model = copy.deepcopy(model).requires_grad_(requires_grad=False)
        self.packed: dict[str, tuple[Rounding, nn.Linear, _OnGrid]] = {}
        for name, part in products(self.model).items():
            rounding = roundings.get(name) or nearest_rounding(part, kernel)
            if isinstance(part, nn.Embedding):
                part.weight.data = rounding.integers.weight()
                continue
            part.register_forward_pre_hook(_rounded_input(rounding, kernel))
            grid = kernel.grid.for_width(part.in_features)
            if grid.block is None:
                part.weight.data = rounding.integers.weight()
                continue
            on_grid = _OnGrid(rounding.integers, grid)
            smoothing_I = 1.0 if rounding.smoothing_I is None else rounding.smoothing_I
            part.weight = nn.Parameter(on_grid.numbers(part.weight.detach() * smoothing_I))
            parametrize.register_parametrization(part, "weight", on_grid)
            self.packed[name] = rounding, part, on_grid

    def train(self, mode: bool = True) -> "_Student":
        return super().train(mode=False)

    @torch.no_grad()
    def roundings(self) -> dict[str, Rounding]:
        """Return the trained roundings."""
        result = {}
        for name, (rounding, linear, on_grid) in self.packed.items():
            number_OI = linear.get_parameter("parametrizations.weight.original")
            result[name] = replace(rounding, integers=on_grid.integers(number_OI))
        return result


class _OnGrid(nn.Module):
    """Rounds a weight matrix, given in steps of its grid, with fixed factors and trained scales."""

    factor_OI: Tensor
    number_OI: Tensor
    first_scale_O1: Tensor

    def __init__(self, integers: Integers, grid: Grid) -> None:
        super().__init__()
        values_OI = integers.values_OI
        blocks_OGN = values_OI.reshape(len(values_OI), -1, grid.block or 1).numpy()
        factor_OG1 = torch.from_numpy(block_factors(blocks_OGN, -1, -grid.low))
        factor_OI = factor_OG1.expand(blocks_OGN.shape).reshape(values_OI.shape).float()
        self.grid = grid
        self.register_buffer("factor_OI", factor_OI)
        self.register_buffer("number_OI", values_OI / factor_OI)
        self.register_buffer("first_scale_O1", integers.scale_OG.float())
        self.log_scale_O1 = nn.Parameter(torch.zeros_like(self.first_scale_O1))

    @property
    def scale_O1(self) -> Tensor:
        """The scale of each output."""
        return self.first_scale_O1 * self.log_scale_O1.exp()

    def numbers(self, exact_OI: Tensor) -> Tensor:
        """Return weights in steps of the grid, moved to where rounding gives the first integers."""
        number_OI = exact_OI / (self.first_scale_O1 * self.factor_OI)
        return number_OI.clamp(self.number_OI - MARGIN, self.number_OI + MARGIN)

    def forward(self, number_OI: Tensor) -> Tensor:
        """Return the rounded weights. Gradients pass the rounding unchanged."""
        rounded_OI = self._values(number_OI) / self.factor_OI
        straight_OI = number_OI + (rounded_OI - number_OI).detach()
        return straight_OI * (self.factor_OI * self.scale_O1)

    def integers(self, number_OI: Tensor) -> Integers:
        """Return the integers and scales of the rounded weights."""
        values_OI = self._values(number_OI).to("cpu", torch.int8)
        return Integers(values_OI, self.scale_O1.cpu(), values_OI.shape[1])

    @torch.no_grad()
    def _values(self, number_OI: Tensor) -> Tensor:
        rounded_OI = torch.round(number_OI).clamp(self.grid.low, self.grid.high)
        return within_pairs(rounded_OI * self.factor_OI, self.factor_OI.abs(), self.grid)


def _rounded_input(
    rounding: Rounding, kernel: Kernel
) -> Callable[[nn.Module, tuple[Tensor]], Tensor]:
    """Return a hook that rounds the input of a linear. Gradients pass it unchanged."""

    def round_input(_: nn.Module, inputs: tuple[Tensor]) -> Tensor:
        x = rounding.smoothed(inputs[0])
        return x + (kernel.round_input(x.detach()) - x.detach())

    return round_input
