"""Masked language models that generate text. kdcli writes this file next to the weights.

It needs only torch and transformers. `UniLMBertForMaskedLM` is transformers' `BertForMaskedLM`,
fine-tuned on `[CLS] source [SEP] target [SEP]` as in UniLM (https://arxiv.org/abs/1905.03197). A
target token is predicted at a [MASK] that follows the earlier target tokens.

    model = AutoModelForMaskedLM.from_pretrained(directory, trust_remote_code=True)
    model.generate(["a source", "another"])
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

ROWS_AT_ONCE = 32  # number of sources that `generate` decodes together
# Name of the attention function that reads cached keys and values. It contains the module's name,
# because each copy of this file is a separate module.
REUSE = f"reuse_{__name__.replace('.', '_')}"


def sequence_mask(sources_B: Tensor, real_BL: Tensor) -> Tensor:
    """Return UniLM's attention mask [B, 1, L, L], True where a token may attend.

    Source tokens see the source. Target tokens see the source, and the target up to themselves.
    `sources_B` holds the number of tokens of each source; the target follows it.
    """
    at_L = torch.arange(real_BL.shape[1], device=real_BL.device)
    is_source_BL = at_L < sources_B[:, None]
    allowed_BLL = is_source_BL[:, None, :] | (
        ~is_source_BL[:, :, None] & (at_L[None, :] <= at_L[:, None])
    )
    return (allowed_BLL & real_BL[:, None, :].bool())[:, None]


def mask_argument(config: Any, mask: Tensor, *, interface: bool, dtype: torch.dtype) -> Any:
    """Convert a mask [B, 1, L, L] to the form that an encoder takes.

    If some layers attend within a window, the result has one mask per kind of layer. If attention
    does not go through transformers' interface, it is a bias.
    """
    if getattr(config, "layer_types", None):
        at = torch.arange(mask.shape[-1], device=mask.device)
        near = (at[:, None] - at[None, :]).abs() <= config.sliding_window
        return {"full_attention": mask, "sliding_attention": mask & near}
    if interface:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)


class _Decoding:
    """A batch while its targets are decoded.

    With `reuse`, the keys and values of sources and targets are cached. Otherwise, each step
    computes every token again. The beams of a source share its keys, so nothing of a source is
    copied when beams change places. Shapes: S tokens of the padded sources [B, S], R = B * beams
    targets, G key heads.
    """

    is_compileable = False

    def __init__(self, model: Any, ids_BS: Tensor, real_BS: Tensor, reuse: bool) -> None:
        self.model = model
        self.ids_BS = ids_BS
        self.real_BS = real_BS.bool()
        self.reuse = reuse
        self.sources_B = real_BS.sum(1)
        self.typed = int(getattr(model.config, "type_vocab_size", 0) or 0) > 1
        self.accepted = inspect.signature(model.forward).parameters
        self.source_cache: list[tuple[Tensor, Tensor]] = []  # k, v of each layer, [B, G, S, K]
        self.target_cache: list[tuple[Tensor, Tensor]] = []  # same, [R, G, tokens so far, K]
        self.layer = 0
        if reuse:
            self._attending(
                model.base_model, ids_BS, torch.zeros_like(ids_BS), attention_mask=real_BS
            )

    def get_seq_length(self) -> int:
        """Return 0, so that transformers does not slice the inputs.

        `prepare_inputs_for_generation` slices them instead.
        """
        return 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Follow the beams: row i continues from the previous row beam_idx[i]."""
        self.target_cache = [(k[beam_idx], v[beam_idx]) for k, v in self.target_cache]

    def next_logits(self, forward: Callable[..., Any], target_RT: Tensor) -> Any:
        """Compute the logits [R, 1, V] of the token after `target_RT`.

        The first column of `target_RT` is the start token.
        """
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
            at_R = torch.full_like(start_R, ids.shape[1] - 1)
            positions = {"position_ids": places + offset}
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
        # The padding after a row becomes the padding token again, because some types derive their
        # positions from it.
        interface, dtype = self.model.config.unilm["interface"], self.model.dtype
        mask_inputs = {
            "attention_mask": mask_argument(
                self.model.config, mask, interface=interface, dtype=dtype
            )
        }
        with _only(self.model.base_model, start_R + steps):
            return self._run(forward, ids, (at_L >= start_R[:, None]).long(), **mask_inputs).logits

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
        """Compute one layer's attention, [R, A, n, K].

        While the source cache has no entry for the layer, it reads the sources, [B, A, S, K].
        `window` is the first distance that a local layer does not see.
        """
        layer, self.layer = self.layer, self.layer + 1
        at_S = torch.arange(self.ids_BS.shape[1], device=q.device)
        if layer == len(self.source_cache):
            self.source_cache.append((k, v))
            mask = self.real_BS[:, None, None, :]
            if window is not None:
                mask = mask & ((at_S[:, None] - at_S[None, :]).abs() < window)
            k, v = _repeated(q, k, v)
            return nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=scale)
        if layer < len(self.target_cache):
            kept = self.target_cache[layer]
            k, v = torch.cat([kept[0], k], 2), torch.cat([kept[1], v], 2)
        steps, new = k.shape[2] - 1, q.shape[2]
        if layer == len(self.target_cache):
            self.target_cache.append((k[:, :, :0], v[:, :, :0]))
        # Cache all tokens except [MASK], whose keys change with its position.
        self.target_cache[layer] = k[:, :, :-1], v[:, :, :-1]
        source_k, source_v = _repeated(q, *self.source_cache[layer])
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
        # Use at least float32, as transformers' own functions do.
        weights = (
            (scores * scale).softmax(-1, torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
        )
        to_source, to_target = weights[..., : len(at_S)], weights[..., len(at_S) :]
        return self._by_row(self._by_source(to_source) @ source_v, new) + to_target @ v

    def _by_source(self, x: Tensor) -> Tensor:
        """Reshape [B * beams, A, n, *] to [B, A, beams * n, *].

        The beams of a source read the same keys.
        """
        return x.view(len(self.ids_BS), -1, *x.shape[1:]).transpose(1, 2).flatten(2, 3)

    def _by_row(self, x: Tensor, new: int) -> Tensor:
        return x.reshape(*x.shape[:2], -1, new, x.shape[-1]).transpose(1, 2).flatten(0, 1)


_decoding: ContextVar[_Decoding] = ContextVar("kdcli_decoding")


def _repeated(q: Tensor, *grouped: Tensor) -> tuple[Tensor, ...]:
    """Repeat keys and values for each head of q, if several heads share one."""
    return tuple(x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in grouped)


def _attend_reusing(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
) -> tuple[Tensor, None]:
    scaling = kwargs.get("scaling")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    context = _decoding.get().attend(query, key, value, scale, kwargs.get("sliding_window"))
    return context.transpose(1, 2).contiguous(), None


# There is no mask function, because the attention function computes its own mask.
transformers.AttentionInterface.register(REUSE, _attend_reusing)


@contextmanager
def _only(encoder: nn.Module, at_R: Tensor) -> Any:
    """Pass only one token of each row to the head, which computes a whole vocabulary per token."""

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
    """A mixin for masked language models that generate text.

    `config.unilm` holds `mask_token_id`, `position_offset` (the id of the first position) and
    `interface` (False for a model type whose keys cannot be cached). `generation_config` holds
    lengths, beams and penalties. Its end token also begins a target.
    """

    @classmethod
    def can_generate(cls) -> bool:
        """Return True, because transformers looks for its mixin among the direct bases only."""
        return True

    def prepare_inputs_for_generation(
        self, input_ids: Tensor, past_key_values: _Decoding | None = None, **ignored: Any
    ) -> dict[str, Any]:
        """Return the inputs of a step: the targets so far, and their cache."""
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
        """Decode targets.

        `inputs` are texts or pairs of texts, for which texts are returned. Or they are ids of
        sources with their special tokens, padded on the right, [B, S], for which ids of targets are
        returned, [B, T], padded after their end token. `attention_mask` is [B, S], 1 at real
        tokens, or None if every token is real. With `reuse=False`, each step computes every token
        again. `settings` are arguments of transformers' `generate` (`num_beams`, `max_new_tokens`
        ...), which take precedence over `generation_config`.

        Raises ValueError if there are no texts, or if no positions are left for the source.
        """
        if not isinstance(inputs, Tensor):
            return self._texts(inputs, reuse=reuse, **settings)
        model: Any = self
        real = torch.ones_like(inputs) if attention_mask is None else attention_mask
        before = model.config._attn_implementation
        interface = model.config.unilm["interface"]
        try:
            if interface:
                model.set_attn_implementation(REUSE if reuse else "sdpa")
            decoding = _Decoding(model, inputs, real, reuse and interface)
            start = torch.full_like(inputs[:, :1], model.generation_config.eos_token_id)
            targets: Any = super().generate(start, past_key_values=decoding, **settings)
        finally:
            model.set_attn_implementation(before)
        return targets[:, 1:]

    def _texts(self, texts: Sequence[Any], **settings: Any) -> list[str]:
        if isinstance(texts, str) or not len(texts):
            raise ValueError("generate expects a non-empty list of texts or of pairs of texts")
        model: Any = self
        tokenizer = transformers.AutoTokenizer.from_pretrained(model.name_or_path)
        longest = settings.get("max_new_tokens", model.generation_config.max_new_tokens)
        room = tokenizer.model_max_length - longest
        if room < 1:
            raise ValueError(
                f"max_new_tokens is {longest}, which leaves no room for a source: the model reads "
                f"at most {tokenizer.model_max_length} tokens"
            )
        by_length = sorted(range(len(texts)), key=lambda i: len("".join(texts[i])))
        results = [""] * len(texts)
        for begin in range(0, len(texts), ROWS_AT_ONCE):
            at = by_length[begin : begin + ROWS_AT_ONCE]
            columns = zip(
                *((texts[i],) if isinstance(texts[i], str) else texts[i] for i in at), strict=True
            )
            encoded = tokenizer(
                *map(list, columns),
                truncation=True,
                max_length=room,
                padding=True,
                padding_side="right",
                return_tensors="pt",
            ).to(model.device)
            ids = self.generate(encoded["input_ids"], encoded["attention_mask"], **settings)
            for i, target in zip(
                at, tokenizer.batch_decode(ids, skip_special_tokens=True), strict=True
            ):
                results[i] = target.strip()
        return results


def _decoding_too(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a masked language model's forward so that it can also do a decoding step.

    The wrapper keeps the signature.
    """

    @functools.wraps(forward)
    def step(self: Any, *args: Any, decoding: _Decoding | None = None, **kwargs: Any) -> Any:
        if decoding is None:
            return forward(self, *args, **kwargs)
        target = kwargs["input_ids"]
        return MaskedLMOutput(logits=decoding.next_logits(functools.partial(forward, self), target))

    return step


def __getattr__(name: str) -> Any:
    """Create `UniLMX` from X, a class of transformers, on first access."""
    rest = name.removeprefix("UniLM")
    if rest == name:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    plain = getattr(transformers, rest)
    # Otherwise transformers would search this module's source for its attention interface.
    can_set = staticmethod(plain._can_set_attn_implementation)
    members = {
        "__module__": __name__,
        "_can_set_attn_implementation": can_set,
        "forward": _decoding_too(plain.forward),
    }
    globals()[name] = type(name, (_UniLM, plain), members)
    return globals()[name]
