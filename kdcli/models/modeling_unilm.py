"""Masked language models as sequence-to-sequence models: kdcli writes this file next to the weights
of such a model.

It needs torch and transformers only. `UniLMBertForMaskedLM` is transformers' `BertForMaskedLM`,
fine-tuned on `[CLS] source [SEP] target [SEP]` as in UniLM (https://arxiv.org/abs/1905.03197): a
target token is predicted at a [MASK] that follows the earlier ones.

    AutoModelForMaskedLM.from_pretrained(directory, trust_remote_code=True).generate(["a source",
    "another"])
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.modeling_outputs import MaskedLMOutput

ROWS_AT_ONCE = 32  # sources that `generate` decodes together
# Name of the attention function that reads kept keys and values. Copies of this file are modules of
# their own.
REUSE = f"reuse_{__name__.replace('.', '_')}"


def sequence_mask(sources_B: Tensor, real_BL: Tensor) -> Tensor:
    """UniLM's attention [B, 1, L, L], True where a token may attend: source tokens see the source,
    target tokens the source and the targets up to themselves. `sources_B`: tokens of each source;
    the target follows it."""
    at_L = torch.arange(real_BL.shape[1], device=real_BL.device)
    of_source_BL = at_L < sources_B[:, None]
    allowed_BLL = of_source_BL[:, None, :] | (
        ~of_source_BL[:, :, None] & (at_L[None, :] <= at_L[:, None])
    )
    return (allowed_BLL & real_BL[:, None, :].bool())[:, None]


def mask_argument(config: Any, mask: Tensor, *, interface: bool, dtype: torch.dtype) -> Any:
    """A mask [B, 1, L, L] as an encoder takes it: one for each kind of layer where some attend in a
    window; a bias where attention does not go through the interface of transformers."""
    if getattr(config, "layer_types", None):
        at = torch.arange(mask.shape[-1], device=mask.device)
        near = (at[:, None] - at[None, :]).abs() <= config.sliding_window
        return {"full_attention": mask, "sliding_attention": mask & near}
    if interface:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)


class _Decoding:
    """A batch while its targets are decoded. Shapes: S tokens of the padded sources [B, S]; R = B *
    beams targets; G key heads. `reuse` keeps the keys and values of sources and targets; else each
    step computes every token anew. The beams of a source share its keys, so nothing of a source is
    copied when beams change places."""

    is_compileable = False

    def __init__(self, model: Any, ids_BS: Tensor, real_BS: Tensor, reuse: bool) -> None:
        self.model, self.ids_BS, self.real_BS, self.reuse = model, ids_BS, real_BS.bool(), reuse
        self.sources_B = real_BS.sum(1)
        self.typed = int(getattr(model.config, "type_vocab_size", 0) or 0) > 1
        self.accepted = inspect.signature(model.forward).parameters
        self.of_source: list[tuple[Tensor, Tensor]] = []  # k and v of each layer, [B, G, S, K]
        self.of_target: list[tuple[Tensor, Tensor]] = []  # the same, [R, G, tokens so far, K]
        self.layer = 0
        if reuse:
            self._attending(
                model.base_model, ids_BS, torch.zeros_like(ids_BS), attention_mask=real_BS
            )

    def get_seq_length(self) -> int:
        """For transformers, which slices inputs by it; `prepare_inputs_for_generation` slices them
        here."""
        return 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Follow the beams: row i goes on from what row beam_idx[i] was."""
        self.of_target = [(k[beam_idx], v[beam_idx]) for k, v in self.of_target]

    def next_logits(self, forward: Callable[..., Any], target_RT: Tensor) -> Any:
        """Logits [R, 1, V] of the token after `target_RT`, whose first column is the start
        token."""
        targets, steps = target_RT[:, 1:], target_RT.shape[1] - 1
        rows = len(target_RT) // len(self.ids_BS)
        start_R = self.sources_B.repeat_interleave(rows)
        mask_R1 = torch.full_like(start_R, self.model.config.unilm["mask_token_id"])[:, None]
        if self.reuse:
            ids = torch.cat([targets[:, -1:], mask_R1], 1)
            places = start_R[:, None] + torch.arange(
                steps + 1 - ids.shape[1], steps + 1, device=ids.device
            )
            offset = self.model.config.unilm["position_offset"]
            at_R, positions = (
                torch.full_like(start_R, ids.shape[1] - 1),
                {"position_ids": places + offset},
            )
            with _only(self.model.base_model, at_R):
                return self._attending(forward, ids, torch.ones_like(ids), **positions).logits
        sources = self.ids_BS.repeat_interleave(rows, 0)
        ids = nn.functional.pad(sources, (0, steps + 1), value=self.model.config.pad_token_id or 0)
        ids.scatter_(
            1,
            start_R[:, None] + torch.arange(steps + 1, device=ids.device),
            torch.cat([targets, mask_R1], 1),
        )
        at_L = torch.arange(ids.shape[1], device=ids.device)
        mask = sequence_mask(start_R, at_L <= start_R[:, None] + steps)
        # The padding after a row gets the padding token again, which some types read their
        # positions from.
        interface, dtype = self.model.config.unilm["interface"], self.model.dtype
        whole = {
            "attention_mask": mask_argument(
                self.model.config, mask, interface=interface, dtype=dtype
            )
        }
        with _only(self.model.base_model, start_R + steps):
            return self._run(forward, ids, (at_L >= start_R[:, None]).long(), **whole).logits

    def _attending(self, run: Callable[..., Any], ids: Tensor, types: Tensor, **inputs: Any) -> Any:
        token, self.layer = _decoding.set(self), 0
        try:
            return self._run(run, ids, types, **inputs)
        finally:
            _decoding.reset(token)

    def _run(self, run: Callable[..., Any], ids: Tensor, types: Tensor, **inputs: Any) -> Any:
        if self.typed and "token_type_ids" in self.accepted:
            inputs["token_type_ids"] = types
        return run(input_ids=ids, **inputs)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        """Attention of one layer, [R, A, n, K]; without sources yet it reads them, [B, A, S, K].
        `window`: of a local layer, the first distance that it does not see."""
        layer, self.layer = self.layer, self.layer + 1
        at_S = torch.arange(self.ids_BS.shape[1], device=q.device)
        if layer == len(self.of_source):
            self.of_source.append((k, v))
            mask = self.real_BS[:, None, None, :]
            if window is not None:
                mask = mask & ((at_S[:, None] - at_S[None, :]).abs() < window)
            k, v = _repeated(q, k, v)
            return nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=scale)
        if layer < len(self.of_target):
            kept = self.of_target[layer]
            k, v = torch.cat([kept[0], k], 2), torch.cat([kept[1], v], 2)
        steps, new = k.shape[2] - 1, q.shape[2]
        if layer == len(self.of_target):
            self.of_target.append((k[:, :, :0], v[:, :, :0]))
        # All but [MASK], whose keys change with its place.
        self.of_target[layer] = k[:, :, :-1], v[:, :, :-1]
        source_k, source_v = _repeated(q, *self.of_source[layer])
        k, v = _repeated(q, k, v)
        at_T = torch.arange(steps + 1, device=q.device)
        at_n = at_T[-new:]
        seen_RnS = self.real_BS.repeat_interleave(len(q) // len(self.ids_BS), 0)[:, None, :]
        seen_nT = at_T <= at_n[:, None]
        if window is not None:
            places_Rn = self.sources_B.repeat_interleave(len(q) // len(self.ids_BS))[:, None] + at_n
            seen_RnS = seen_RnS & ((places_Rn[:, :, None] - at_S).abs() < window)
            seen_nT = seen_nT & (at_n[:, None] - at_T < window)
        by_source = self._by_source(q) @ source_k.transpose(-1, -2)
        scores = torch.cat(
            [
                self._by_row(by_source, new).masked_fill(~seen_RnS[:, None], -torch.inf),
                (q @ k.transpose(-1, -2)).masked_fill(~seen_nT, -torch.inf),
            ],
            -1,
        )
        # In at least float32, as transformers' own functions compute it.
        weights = (
            (scores * scale).softmax(-1, torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
        )
        of_source, of_target = weights[..., : len(at_S)], weights[..., len(at_S) :]
        return self._by_row(self._by_source(of_source) @ source_v, new) + of_target @ v

    def _by_source(self, x: Tensor) -> Tensor:
        """[B * beams, A, n, *] -> [B, A, beams * n, *]: the beams of a source read the same
        keys."""
        return x.view(len(self.ids_BS), -1, *x.shape[1:]).transpose(1, 2).flatten(2, 3)

    def _by_row(self, x: Tensor, new: int) -> Tensor:
        return x.reshape(*x.shape[:2], -1, new, x.shape[-1]).transpose(1, 2).flatten(0, 1)


_decoding: ContextVar[_Decoding] = ContextVar("kdcli_decoding")


def _repeated(q: Tensor, *of_groups: Tensor) -> tuple[Tensor, ...]:
    """Keys and values for each head of q, where several heads share one."""
    return tuple(x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in of_groups)


def _attend_reusing(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    scaling = kwargs.get("scaling")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    context = _decoding.get().attend(query, key, value, scale, kwargs.get("sliding_window"))
    return context.transpose(1, 2).contiguous(), None


# It has no function of masks: it masks by what it keeps.
transformers.AttentionInterface.register(REUSE, _attend_reusing)


@contextmanager
def _only(encoder: nn.Module, at_R: Tensor) -> Any:
    """Hand the head one token of each row: it computes a whole vocabulary for each."""

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        states = output[0][torch.arange(len(at_R), device=at_R.device), at_R][:, None]
        if isinstance(output, tuple):
            return (states, *output[1:])
        output.last_hidden_state = states
        return output

    handle = encoder.register_forward_hook(after)
    try:
        yield
    finally:
        handle.remove()


class _UniLM(transformers.GenerationMixin):  # type: ignore[misc]
    """Mixed in before a masked language model. `config.unilm`: `mask_token_id`; `position_offset`,
    the id of the first position; `interface`, False for a type whose keys cannot be kept.
    `generation_config` holds lengths, beams and penalties; its end token begins a target too."""

    @classmethod
    def can_generate(cls) -> bool:
        """True: transformers looks for its mixin among the direct bases only."""
        return True

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, past_key_values: _Decoding | None = None, **ignored: Any
    ) -> dict[str, Any]:
        """Inputs of a step: the targets so far, and what is kept of them."""
        return {"input_ids": input_ids, "decoding": past_key_values}

    @torch.no_grad()
    def generate(
        self,
        inputs: Any,
        attention_mask: Tensor | None = None,
        *,
        reuse: bool = True,
        **settings: Any,
    ) -> Any:
        """Decode targets. `inputs`: texts or pairs of texts, which give texts; or ids of sources
        with their special tokens, padded on the right, [B, S], which give ids of targets, [B, T],
        padded after their end token. `reuse`: False computes every token anew in each step.
        `settings`: as of transformers' `generate` (`num_beams`, `max_new_tokens` ...), over
        `generation_config`. Raises ValueError: no texts, no position for the targets."""
        if not isinstance(inputs, Tensor):
            return self._texts(inputs, reuse=reuse, **settings)
        model: Any = self
        real = torch.ones_like(inputs) if attention_mask is None else attention_mask
        before, interface = model.config._attn_implementation, model.config.unilm["interface"]
        try:
            if interface:
                model.set_attn_implementation(REUSE if reuse else "sdpa")
            decoding = _Decoding(model, inputs, real, reuse and interface)
            start = torch.full_like(inputs[:, :1], model.generation_config.eos_token_id)
            found: Any = super().generate(start, past_key_values=decoding, **settings)
        finally:
            model.set_attn_implementation(before)
        return found[:, 1:]

    def _texts(self, texts: Sequence[Any], **settings: Any) -> list[str]:
        if isinstance(texts, str) or not len(texts):
            raise ValueError("generate takes a list of texts, or of pairs of texts")
        model: Any = self
        tokenizer = transformers.AutoTokenizer.from_pretrained(model.name_or_path)
        longest = settings.get("max_new_tokens", model.generation_config.max_new_tokens)
        room = tokenizer.model_max_length - longest
        if room < 1:
            raise ValueError(
                f"{longest} new tokens leave no room for a source in {tokenizer.model_max_length}"
            )
        by_length = sorted(range(len(texts)), key=lambda i: len("".join(texts[i])))
        found = [""] * len(texts)
        for begin in range(0, len(texts), ROWS_AT_ONCE):
            at = by_length[begin : begin + ROWS_AT_ONCE]
            columns = zip(
                *((texts[i],) if isinstance(texts[i], str) else texts[i] for i in at), strict=True
            )
            how: dict[str, Any] = {"truncation": True, "max_length": room, "padding": True}
            encoded = tokenizer(
                *map(list, columns), padding_side="right", return_tensors="pt", **how
            ).to(model.device)
            ids = self.generate(encoded["input_ids"], encoded["attention_mask"], **settings)
            for i, target in zip(
                at, tokenizer.batch_decode(ids, skip_special_tokens=True), strict=True
            ):
                found[i] = target.strip()
        return found


def _decoding_too(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the forward of a masked language model, keeping its signature, to do a step of decoding
    too."""

    @functools.wraps(forward)
    def step(self: Any, *args: Any, decoding: _Decoding | None = None, **kwargs: Any) -> Any:
        if decoding is None:
            return forward(self, *args, **kwargs)
        target = kwargs["input_ids"]
        return MaskedLMOutput(logits=decoding.next_logits(functools.partial(forward, self), target))

    return step


def __getattr__(name: str) -> Any:
    """Make `UniLMX` from X, a class of transformers, on first access."""
    rest = name.removeprefix("UniLM")
    if rest == name:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    plain = getattr(transformers, rest)
    # transformers would search the source of this module for its attention interface.
    can_set = staticmethod(plain._can_set_attn_implementation)
    members = {
        "__module__": __name__,
        "_can_set_attn_implementation": can_set,
        "forward": _decoding_too(plain.forward),
    }
    globals()[name] = type(name, (_UniLM, plain), members)
    return globals()[name]
