"""Listening to an encoder: `capture(model, needs)` gives a module that returns signals and stops at the last one.

Models on the attention interface of transformers are given the attention function `kd_capture`, which is sdpa with an
ear; the others are heard through forward hooks on their projections. What comes out is the same: q, k and v as the
model's own softmax sees them, after any rotary embedding, scaled so that attention is softmax(q·k/√K).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from kdcli.models.layout import Layout, layout_for
from kdcli.types import IGNORED, Batch, Needs, Signals

INTERFACE = "kd_capture"


class _AllCaptured(Exception):
    """The last needed signal was taken."""


class _Recorder:
    """Collects the signals of one forward pass."""

    def __init__(self, needs: Needs, signals: Signals) -> None:
        self.needs, self.signals = needs, signals
        self.attentions = 0
        self.missing = {(kind, n) for kind in ("q", "k", "v", "hidden") for n in getattr(needs, kind)}

    def take(self, kind: str, layer: int, make: Callable[[], Tensor]) -> None:
        if (kind, layer) in self.missing:
            getattr(self.signals, kind)[layer] = make()
            self.missing.discard((kind, layer))

    def leave_if_done(self) -> None:
        if not self.missing and not (self.needs.logits or self.needs.masked_logits):
            raise _AllCaptured


_listening: ContextVar[_Recorder | None] = ContextVar("kdcli_listening", default=None)


def _kd_capture(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    ear = _listening.get()
    if ear is not None:
        ear.attentions += 1
        n, heads, width = ear.attentions, query.shape[1], query.shape[-1]
        # Some models scale q beforehand and pass 1; the captured q always wants 1/√K.
        scaling = kwargs.get("scaling")
        factor = 1.0 if scaling is None else float(scaling) * width**0.5
        ear.take("q", n, lambda: query if abs(factor - 1.0) < 1e-6 else query * factor)
        ear.take("k", n, lambda: _repeated(key, heads))
        ear.take("v", n, lambda: _repeated(value, heads))
        ear.leave_if_done()
    heard: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    return heard


AttentionInterface.register(INTERFACE, _kd_capture)
AttentionMaskInterface.register(INTERFACE, sdpa_mask)


def capture(model: PreTrainedModel, needs: Needs) -> Capture:
    """A module whose forward(batch) gives `Signals` and computes nothing beyond the last signal needed.

    Args:
        model: a base encoder, or one with a head on top (needed for logits); it keeps working as before, and its
            parameters stay where they are.
        needs: layers 1 … N (0 for the embedding output in `hidden`).

    Raises:
        UsageError: a model type without a row in `kdcli.models.layout`.
        ValueError: a needed layer that the model does not have, or logits of a model without a head.
    """
    return Capture(model, needs)


class Capture(nn.Module):
    """See `capture`; `model` is the encoder itself."""

    def __init__(self, model: PreTrainedModel, needs: Needs) -> None:
        super().__init__()
        config = model.config
        self.layout: Layout = layout_for(config)
        self.model = model
        self.needs = needs
        # Not modules of this one, for they belong to the model already, and a shared layer stands in it several times.
        encoder: Any = model.base_model
        self.layers = self.layout.modules(encoder)
        asked = needs.q | needs.k | needs.v | needs.hidden
        wrong = sorted(n for n in asked if not 0 <= n <= len(self.layers)) + [
            n for n in sorted(needs.q | needs.k | needs.v) if n == 0
        ]
        if wrong:
            raise ValueError(f"layers {wrong} asked for, but the model has layers 1 to {len(self.layers)}")
        if (needs.logits or needs.masked_logits) and encoder is model:
            raise ValueError(f"{type(model).__name__} has no head on top, so it has no logits")
        if needs.logits and needs.masked_logits:
            raise ValueError("the logits of all tokens and those of labelled tokens alone cannot be asked for at once")
        if self.layout.interface:
            model.set_attn_implementation(INTERFACE)
            if config._attn_implementation != INTERFACE:
                raise RuntimeError(f"{config.model_type} did not take the attention function {INTERFACE}")
        self.accepted = set(inspect.signature(model.forward).parameters)

    def forward(self, batch: Batch) -> Signals:
        """Run the model on a batch as far as needed; see `kdcli.types.Signals` for what comes back.

        Raises:
            ValueError: `masked_logits` of a batch without labels.
        """
        signals = Signals(mask=batch.get("attention_mask"), labels=batch.get("labels"))
        if self.needs == Needs():
            return signals
        ear = _Recorder(self.needs, signals)
        token = _listening.set(ear)
        try:
            with ExitStack() as hooks:
                self._hook_hidden(ear, hooks)
                if self.needs.masked_logits:
                    self._hook_labelled(signals.labels, hooks)
                if not self.layout.interface:
                    self._hook_projections(ear, hooks)
                if not self.layout.autocast:
                    hooks.enter_context(torch.autocast(batch["input_ids"].device.type, enabled=False))
                output = self.model(**self._inputs(batch))
            if self.needs.logits:
                # A question answering head gives two vectors in place of one matrix.
                spans = "start_logits" in output
                signals.logits = torch.stack([output.start_logits, output.end_logits], -1) if spans else output.logits
            elif self.needs.masked_logits:
                signals.logits = output.logits[0]
        except _AllCaptured:
            pass
        finally:
            _listening.reset(token)
        if ear.missing:
            raise RuntimeError(f"never heard {sorted(ear.missing)}: is the row in kdcli/models/layout.py right?")
        return signals

    def _inputs(self, batch: Batch) -> dict[str, Any]:
        """The batch as this model's forward wants it."""
        # With labels a model would compute a loss of its own.
        inputs: dict[str, Any] = {k: v for k, v in batch.items() if k in self.accepted and k != "labels"}
        config = self.model.config
        mask = inputs.get("attention_mask")
        if mask is not None and mask.dim() == 4:
            if self.layout.leaks:
                raise ValueError(f"{config.model_type} cannot keep documents apart: {self.layout.leaks}")
            if self.layout.local:
                at = torch.arange(mask.shape[-1], device=mask.device)
                near = (at[:, None] - at[None, :]).abs() <= config.sliding_window
                inputs["attention_mask"] = {"full_attention": mask, "sliding_attention": mask & near}
            elif not self.layout.interface:
                smallest = torch.finfo(self.model.dtype).min
                inputs["attention_mask"] = torch.zeros_like(mask, dtype=self.model.dtype).masked_fill(~mask, smallest)
        if "position_ids" in inputs and self.layout.position_offset:
            # Not always the padding token of the configuration: MPNet's is 1 whatever that says.
            embeddings: Any = self.model.base_model.get_submodule("embeddings")
            inputs["position_ids"] = inputs["position_ids"] + embeddings.padding_idx + 1
        return inputs

    def _hook_hidden(self, ear: _Recorder, hooks: ExitStack) -> None:
        if not self.needs.hidden:
            return
        done = [0]

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            if done[0] == 0:
                ear.take("hidden", 0, lambda: args[0] if args else kwargs["hidden_states"])
                ear.leave_if_done()

        def after(module: nn.Module, args: Any, output: Any) -> None:
            done[0] += 1
            ear.take("hidden", done[0], lambda: output if isinstance(output, Tensor) else output[0])
            ear.leave_if_done()

        hooks.callback(self.layers[0].register_forward_pre_hook(before, with_kwargs=True).remove)
        for layer in dict.fromkeys(self.layers):
            hooks.callback(layer.register_forward_hook(after).remove)

    def _hook_labelled(self, labels_BL: Tensor | None, hooks: ExitStack) -> None:
        """Let the head see the labelled tokens alone, as one row: it works token by token, and over a vocabulary."""
        if labels_BL is None:
            raise ValueError("logits at labelled tokens were asked for, but the batch has no labels")
        labelled_BL = labels_BL != IGNORED

        def after(module: nn.Module, args: Any, output: Any) -> Any:
            if isinstance(output, tuple):
                return (output[0][labelled_BL][None], *output[1:])
            output.last_hidden_state = output.last_hidden_state[labelled_BL][None]
            return output

        hooks.callback(self.model.base_model.register_forward_hook(after).remove)

    def _hook_projections(self, ear: _Recorder, hooks: ExitStack) -> None:
        layout = self.layout
        table: list[Tensor] = []
        if layout.positions:
            module = self.model.base_model.get_submodule(layout.positions)
            hooks.callback(module.register_forward_hook(lambda m, a, output: table.append(output[None, None])).remove)
        for n in sorted(self.needs.q | self.needs.k | self.needs.v):
            layer = self.layers[n - 1]
            wanted: dict[str, list[str]] = {}
            for kind, path in (("q", layout.q), ("k", layout.k), ("v", layout.v)):
                if n in getattr(self.needs, kind):
                    wanted.setdefault(path, []).append(kind)
            for path, kinds in wanted.items():
                hook = self._projection_hook(ear, n, layer, kinds, table)
                hooks.callback(layer.get_submodule(path).register_forward_hook(hook).remove)

    def _projection_hook(
        self, ear: _Recorder, n: int, layer: nn.Module, kinds: list[str], table: list[Tensor]
    ) -> Callable[[nn.Module, Any, Tensor], None]:
        layout = self.layout

        def hear(module: nn.Module, args: Any, output_BLE: Tensor) -> None:
            for kind in kinds:
                if layout.fused == "heads":
                    three = output_BLE.view(*output_BLE.shape[:2], layout.heads(layer), 3, -1)
                    x_BALK = three[:, :, :, "qkv".index(kind)].transpose(1, 2)
                else:
                    x_BALK = output_BLE.view(*output_BLE.shape[:2], layout.heads(layer), -1).transpose(1, 2)
                if layout.bias and kind in "qv":
                    bias = layer.get_parameter(layout.bias["qv".index(kind)])
                    x_BALK = x_BALK + bias.view(1, x_BALK.shape[1], 1, -1)
                turned = kind in "qk" or bool(getattr(self.model.config, "rotary_value", False))
                if table and turned:
                    turn = layout.attention(layer).apply_rotary_position_embeddings
                    x_BALK = turn(table[-1], x_BALK, x_BALK)[0]
                ear.take(kind, n, lambda x=x_BALK: x)  # type: ignore[misc]
            ear.leave_if_done()

        return hear


def _repeated(x_BGLK: Tensor, heads: int) -> Tensor:
    """Grouped key/value heads [B, G, L, K] repeated to [B, A, L, K]."""
    groups = x_BGLK.shape[1]
    return x_BGLK if groups == heads else x_BGLK.repeat_interleave(heads // groups, dim=1)


def prepare_teacher(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Freeze a model in eval mode with its weights in the compute dtype.

    Buffers keep their precision: a rotary table in bfloat16 would move every position.
    """
    model.eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def params_without_grad(parameters: Mapping[str, nn.Parameter], loss: Tensor) -> list[str]:
    """Names of the parameters that a loss does not depend on."""
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    return [name for name, gradient in zip(trained, gradients, strict=True) if gradient is None]
