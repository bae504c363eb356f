"""Record an encoder's signals: q, k, v, hidden states and logits.

`capture(model, needs)` returns a module that records the needed signals and stops the forward pass
after the last one.

A model that supports transformers' attention interface gets the attention function `kd_capture`,
which is sdpa that records its inputs. Other models get forward hooks on their projections, or are
watched where they compute their attention (`kdcli.models.attention_products`). All of these record
q, k and v as the model's own softmax sees them, after any rotary embedding, and scaled so that
attention is softmax(q·k/√K).
"""

import inspect
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.modeling_outputs import BaseModelOutput

from kdcli.errors import UsageError
from kdcli.models.attention_products import AttentionProducts, Scores, by_head
from kdcli.models.files import LIBRARY_TYPE
from kdcli.models.layout import Layout, check_relations, layout_for
from kdcli.models.modeling_unilm import mask_argument
from kdcli.types import Batch, Needs, Signals, labelled_places

INTERFACE = "kd_capture"
LayerOutput: TypeAlias = tuple[Tensor, ...] | BaseModelOutput


class _AllCaptured(Exception):
    """Raised to end the forward pass once every needed signal is recorded."""


class _Recorder:
    """The signals of one forward pass, and the list of what is still missing."""

    def __init__(self, needs: Needs, signals: Signals) -> None:
        self.signals = signals
        self.needs_logits = needs.logits or needs.masked_logits
        self.attentions = 0
        self.scores: dict[int, Scores] = {}
        self.with_grad = torch.is_grad_enabled()
        self.missing = {
            (kind, n) for kind in ("q", "k", "v", "hidden") for n in getattr(needs, kind)
        }

    def record(self, kind: str, layer: int, make: Callable[[], Tensor]) -> None:
        if (kind, layer) in self.missing:
            if self.with_grad and not torch.is_grad_enabled():
                raise UsageError(
                    "the network runs its layers without gradients, as with reentrant "
                    "checkpointing, so its signals cannot be trained",
                    "turn gradient checkpointing off, or use use_reentrant=False",
                )
            getattr(self.signals, kind)[layer] = make()
            self.missing.discard((kind, layer))
            if not self.missing and not self.needs_logits:
                raise _AllCaptured


_recorder: ContextVar[_Recorder | None] = ContextVar("kdcli_recorder", default=None)


def _kd_capture(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    recorder = _recorder.get()
    if recorder is not None:
        recorder.attentions += 1
        n, heads, width = recorder.attentions, query.shape[1], query.shape[-1]
        # Some models scale q beforehand and pass a scaling of 1. The captured q always expects
        # 1/√K.
        factor = 1.0 if scaling is None else float(scaling) * width**0.5
        recorder.record("q", n, lambda: query if abs(factor - 1.0) < 1e-6 else query * factor)
        recorder.record("k", n, lambda: _repeated(key, heads))
        recorder.record("v", n, lambda: _repeated(value, heads))
    output: tuple[Tensor, None] = sdpa_attention_forward(
        module, query, key, value, attention_mask, scaling=scaling, **kwargs
    )
    return output


AttentionInterface.register(INTERFACE, _kd_capture)
AttentionMaskInterface.register(INTERFACE, sdpa_mask)


class Capture(nn.Module):
    """A module whose forward(batch) returns `Signals` and stops after the last one needed.

    * `model`: a base encoder, or a model with a head, which logits require. The model keeps working
      as before.
    * `needs`: the signals to record. Layers are numbered 1 ... N; `hidden` also accepts 0, the
      embedding output.
    * `pool`: a module that maps the last hidden states and the mask to vectors, for `needs.pooled`.
    * `layout`: the model's layout, if its type is not looked up.

    Raises UsageError if the model has no layout, or if it is causal and q, k or v are needed.
    Raises ValueError if the model lacks a needed layer, or if logits are needed from a model
    without a head.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        needs: Needs,
        pool: nn.Module | None = None,
        layout: Layout | None = None,
    ) -> None:
        super().__init__()
        config = model.config
        if needs.pooled:
            assert pool is not None, "pooled vectors need a pooling module"
            needs = replace(needs, hidden=needs.hidden | {int(config.num_hidden_layers)})
        self.layout = layout or layout_for(config)
        self.model = model
        self.needs = needs
        self.pool = pool
        encoder = model.base_model
        # A plain list, because the layers are already submodules of the model, and a shared layer
        # occurs several times.
        vectors = needs.q | needs.k | needs.v
        self.last = int(config.num_hidden_layers)
        only_states = self.layout.missing is not None and vectors | needs.hidden <= {self.last}
        self.layers = [] if only_states and not vectors else self.layout.modules(encoder)
        if layout is None:
            check_relations(config, needs)
        wrong = sorted(n for n in vectors | needs.hidden if not 0 <= n <= self.last) + [0] * (
            0 in vectors
        )
        if wrong:
            raise ValueError(
                f"layers {wrong} are needed, but the model has layers 1 to {self.last}"
            )
        if (needs.logits or needs.masked_logits) and encoder is model:
            raise ValueError(f"{type(model).__name__} has no head on top, so it has no logits")
        if needs.logits and needs.masked_logits:
            raise ValueError(
                "needs.logits and needs.masked_logits are mutually exclusive: set only one"
            )
        if self.layout.interface:
            model.set_attn_implementation(INTERFACE)
            if config._attn_implementation != INTERFACE:
                raise RuntimeError(
                    f"{config.model_type} did not accept the attention function {INTERFACE}"
                )
        self.accepted = set(inspect.signature(model.forward).parameters)

    def forward(self, batch: Batch) -> Signals:
        """Run the model on a batch, as far as the needed signals require.

        Raises ValueError if `masked_logits` are needed and the batch has no labels.
        """
        signals = Signals(mask=batch.get("attention_mask"), labels=batch.get("labels"))
        if self.needs == Needs():
            return signals
        recorder = _Recorder(self.needs, signals)
        with suppress(_AllCaptured), ExitStack() as hooks:
            hooks.callback(_recorder.reset, _recorder.set(recorder))
            self._hook_hidden(recorder, hooks)
            if self.needs.masked_logits:
                if signals.labels is None:
                    raise ValueError(
                        "logits at labelled tokens are needed, but the batch has no labels"
                    )
                signals.labelled = labelled_places(batch)
                self._hook_labelled(signals.labelled, hooks)
            if self.layout.products:
                self._watch_products(recorder, hooks)
            elif not self.layout.interface:
                self._hook_projections(recorder, hooks)
            if not self.layout.autocast:
                hooks.enter_context(torch.autocast(batch["input_ids"].device.type, enabled=False))
            output = self.model(**self._inputs(batch))
            if self.needs.logits:
                # A question-answering head returns two vectors instead of one matrix.
                spans = "start_logits" in output
                signals.logits = (
                    torch.stack([output.start_logits, output.end_logits], -1)
                    if spans
                    else output.logits
                )
            elif self.needs.masked_logits:
                signals.logits = output.logits[0]
        if recorder.missing:
            message = f"the forward pass did not reach {sorted(recorder.missing)}"
            if self.layout.products:
                raise UsageError(
                    f"{message}: the code of the {self.model.config.model_type} computes attention "
                    "in a function that is not torch's, as flash_attn does",
                    "turn it off in the model's config.json, or run without the package",
                )
            raise RuntimeError(
                f"{message}: {self.model.config.model_type} does not run all of its layers"
            )
        for n, scores in recorder.scores.items():
            # The captured q expects 1/√K.
            factor = scores.scale * scores.q.shape[-1] ** 0.5
            if isinstance(factor, Tensor) or abs(factor - 1.0) > 1e-6:
                signals.q |= {n: signals.q[n] * factor} if n in signals.q else {}
            rows = len(batch["input_ids"])
            for kind in ("q", "k", "v"):
                found = getattr(signals, kind)
                if n in found:
                    found[n] = by_head(found[n], scores.q, rows)
        if self.needs.pooled:
            assert self.pool is not None
            signals.pooled = self.pool(signals.hidden[self.last], signals.mask)
        return signals

    def _inputs(self, batch: Batch) -> dict[str, Tensor | dict[str, Tensor]]:
        """Return the model's arguments for a batch, with the mask and positions that it expects.

        Labels are excluded, because they would make the model compute its own loss.
        """
        accepted = {k: v for k, v in batch.items() if k in self.accepted and k != "labels"}
        inputs: dict[str, Tensor | dict[str, Tensor]] = {**accepted}
        config = self.model.config
        mask = accepted.get("attention_mask")
        if mask is not None and mask.dim() == 4:
            if self.layout.leaks:
                raise ValueError(
                    f"{config.model_type} cannot keep documents apart: {self.layout.leaks}"
                )
            inputs["attention_mask"] = mask_argument(
                config, mask, interface=self.layout.interface, dtype=self.model.dtype
            )
        if "position_ids" in accepted and self.layout.position_offset:
            # Ask the embeddings, because MPNet's padding index is 1 whatever its configuration
            # says.
            embeddings = self.model.base_model.get_submodule("embeddings")
            inputs["position_ids"] = accepted["position_ids"] + embeddings.padding_idx + 1
        return inputs

    def _hook_hidden(self, recorder: _Recorder, hooks: ExitStack) -> None:
        if not self.needs.hidden:
            return
        done = 0

        def before(
            module: nn.Module, args: tuple[Tensor, ...], kwargs: Mapping[str, Tensor]
        ) -> None:
            if done == 0:
                recorder.record("hidden", 0, lambda: args[0] if args else kwargs["hidden_states"])

        def after(module: nn.Module, args: object, output: Tensor | tuple[Tensor, ...]) -> None:
            nonlocal done
            done += 1
            if done < self.last:
                recorder.record(
                    "hidden", done, lambda: output if isinstance(output, Tensor) else output[0]
                )

        def whole(module: nn.Module, args: object, output: BaseModelOutput) -> None:
            recorder.record("hidden", self.last, lambda: output.last_hidden_state)

        # What follows the last layer may depend on the number of layers, as DeBERTa's convolution.
        hooks.callback(self.model.base_model.register_forward_hook(whole).remove)
        if not self.layers:
            # Only the output of a static model, and of one with unknown layers, can be used.
            return
        hooks.callback(self.layers[0].register_forward_pre_hook(before, with_kwargs=True).remove)
        for layer in dict.fromkeys(self.layers):
            hooks.callback(layer.register_forward_hook(after).remove)

    def _hook_labelled(self, labelled_P: Tensor, hooks: ExitStack) -> None:
        """Pass only the labelled tokens to the head, as one row.

        The head works token by token and covers a whole vocabulary, so this saves most of its work.
        """

        def after(module: nn.Module, args: object, output: LayerOutput) -> LayerOutput:
            if isinstance(output, tuple):
                return (output[0].flatten(0, 1)[labelled_P][None], *output[1:])
            output.last_hidden_state = output.last_hidden_state.flatten(0, 1)[labelled_P][None]
            return output

        hooks.callback(self.model.base_model.register_forward_hook(after).remove)

    def _watch_products(self, recorder: _Recorder, hooks: ExitStack) -> None:
        run = 0

        def on_scores(scores: Scores) -> None:
            recorder.scores.setdefault(run, scores)
            recorder.record("q", run, lambda: scores.q)
            recorder.record("k", run, lambda: scores.k)

        def before(module: object, args: object) -> None:
            nonlocal run
            run += 1
            products.watch(in_layer=True)

        products = AttentionProducts(
            on_scores, lambda value: recorder.record("v", run, lambda: value)
        )
        for layer in dict.fromkeys(self.layers):
            hooks.callback(layer.register_forward_pre_hook(before).remove)
            hooks.callback(
                layer.register_forward_hook(lambda *_: products.watch(in_layer=False)).remove
            )
        hooks.enter_context(products)

    def _hook_projections(self, recorder: _Recorder, hooks: ExitStack) -> None:
        table: list[Tensor] = []
        if self.layout.positions:
            module = self.model.base_model.get_submodule(self.layout.positions)
            hooks.callback(
                module.register_forward_hook(
                    lambda m, a, output: table.append(output[None, None])
                ).remove
            )
        for kind in "qkv":
            for n in getattr(self.needs, kind):
                linear = self.layers[n - 1].get_submodule(getattr(self.layout, kind))
                record = partial(self._record_projection, recorder, n, kind, table)
                hooks.callback(linear.register_forward_hook(record).remove)

    def _record_projection(
        self,
        recorder: _Recorder,
        n: int,
        kind: str,
        table: list[Tensor],
        module: object,
        args: object,
        x_BLE: Tensor,
    ) -> None:
        layout, layer = self.layout, self.layers[n - 1]
        if layout.fused == "heads":
            three = x_BLE.view(*x_BLE.shape[:2], layout.heads(layer), 3, -1)
            x_BALK = three[:, :, :, "qkv".index(kind)].transpose(1, 2)
        else:
            x_BALK = x_BLE.view(*x_BLE.shape[:2], layout.heads(layer), -1).transpose(1, 2)
        if layout.bias and kind in "qv":
            bias = layer.get_parameter(layout.bias["qv".index(kind)])
            x_BALK = x_BALK + bias.view(1, x_BALK.shape[1], 1, -1)
        if table and (kind in "qk" or layout.rotary_value):
            rotate = layout.attention(layer).apply_rotary_position_embeddings
            x_BALK = rotate(table[-1], x_BALK, x_BALK)[0]
        recorder.record(kind, n, lambda: x_BALK)


capture = Capture  # call sites read as a verb, annotations as a class


def _repeated(x_BGLK: Tensor, heads: int) -> Tensor:
    groups = x_BGLK.shape[1]
    return x_BGLK if groups == heads else x_BGLK.repeat_interleave(heads // groups, dim=1)


def prepare_teacher(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Freeze a model in eval mode and convert its weights to the compute dtype."""
    model.eval().requires_grad_(False)
    if model.config.model_type == LIBRARY_TYPE:
        # Modules of sentence-transformers expect one dtype, which not all of them take over.
        return model
    # Keep the precision of buffers: a rotary table in bfloat16 would shift every position.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def params_without_grad(parameters: Mapping[str, nn.Parameter], loss: Tensor) -> list[str]:
    """Return the names of the trainable parameters that a loss does not depend on."""
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    return [name for name, gradient in zip(trained, gradients, strict=True) if gradient is None]
