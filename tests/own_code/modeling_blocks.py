"""A post-norm encoder: q, k and v are three blocks of one linear, rotary embeddings of halves, and
a packed GeGLU with the up projection first. It can leave padding out of its linears."""

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPooling

from .base_own import Embeddings, OwnConfig, OwnModel, added_mask, classified


class NewConfig(OwnConfig):
    model_type = "blocks_encoder"
    type_vocab_size: int = 1
    attention_probs_dropout_prob: float = 0.0
    rope_theta: float = 10_000.0
    rope_scaling: dict | None = None
    unpad_inputs: bool = False


class Rotation(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.width = config.hidden_size // config.num_attention_heads
        self.theta, self.scaling = config.rope_theta, config.rope_scaling or {"factor": 1.0}
        self.register_buffer("inv_freq", self.speeds(), persistent=False)

    def speeds(self):
        factor = self.scaling["factor"]
        speeds = (self.theta * factor) ** -(torch.arange(0, self.width, 2) / self.width)
        return speeds / factor ** (2 / self.width)

    def forward(self, x):
        angles = torch.arange(x.shape[1], device=x.device)[:, None] * self.inv_freq.float()
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


class TurnedEmbeddings(Embeddings):
    def __init__(self, config):
        super().__init__(config)
        self.rotary_emb = Rotation(config)

    def forward(self, input_ids):
        states = super().forward(input_ids)
        return states, self.rotary_emb(states)


def rotate(x, turn):
    cos, sin = (part[:, None] for part in turn)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.qkv_proj = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x, mask, turn, real, maps=None):
        each = self.config.hidden_size // self.config.num_attention_heads
        parts = self.qkv_proj(x).split(self.config.hidden_size, dim=-1)
        q, k, v = (padded(part, real).unflatten(-1, (-1, each)) for part in parts)
        q, k = rotate(q, turn).transpose(1, 2), rotate(k, turn).transpose(1, 2)
        if maps is not None:
            maps.append((q @ k.transpose(-1, -2) / each**0.5 + mask).softmax(-1))
        dropout = self.config.attention_probs_dropout_prob if self.training else 0.0
        context = F.scaled_dot_product_attention(
            q, k, v.transpose(1, 2), attn_mask=mask, dropout_p=dropout
        )
        context = context.transpose(1, 2).flatten(2)
        return self.o_proj(context if real is None else context[real])


def padded(x, real):
    """Put the vectors of real tokens back into rows of equal length."""
    if real is None:
        return x
    rows = x.new_zeros(*real.shape, x.shape[-1])
    rows[real] = x
    return rows


class GatedUnits(nn.Module):
    def __init__(self, config):
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.intermediate_size = inner
        self.up_gate_proj = nn.Linear(width, 2 * inner, bias=False)
        self.down_proj = nn.Linear(inner, width)
        self.hidden_dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, x):
        up, gate = self.up_gate_proj(x).split(self.intermediate_size, dim=-1)
        return self.down_proj(self.hidden_dropout(F.gelu(gate) * up))


class NewLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.attention = Attention(config)
        self.mlp = GatedUnits(config)
        self.attn_ln = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.mlp_ln = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.hidden_dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, x, mask, turn, real, maps=None):
        context = self.attention(x, mask, turn, real, maps)
        x = self.attn_ln(x + self.hidden_dropout(context))
        return self.mlp_ln(x + self.hidden_dropout(self.mlp(x)))


class Encoder(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.layer = nn.ModuleList(NewLayer(config) for _ in range(config.num_hidden_layers))

    def forward(self, x, mask, turn, real, maps):
        states = [x]
        for layer in self.layer:
            x = layer(x, mask, turn, real, maps)
            states.append(x)
        return x, states


class NewPreTrainedModel(OwnModel):
    config_class = NewConfig
    base_model_prefix = "new"

    def _init_weights(self, module):
        super()._init_weights(module)
        if isinstance(module, Rotation):
            module.inv_freq.copy_(module.speeds())


class NewModel(NewPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.embeddings = TurnedEmbeddings(config)
        self.encoder = Encoder(config)
        self.post_init()

    def forward(
        self,
        input_ids,
        attention_mask=None,
        output_hidden_states=False,
        output_attentions=False,
        **_,
    ):
        x, turn = self.embeddings(input_ids)
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        real = mask.bool() if self.config.unpad_inputs else None
        added, maps = added_mask(mask, x), [] if output_attentions else None
        x, states = self.encoder(x if real is None else x[real], added, turn, real, maps)
        x, states = padded(x, real), tuple(padded(state, real) for state in states)
        return BaseModelOutputWithPooling(x, None, states if output_hidden_states else None, maps)


class NewForSequenceClassification(NewPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.new = NewModel(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def forward(self, input_ids, attention_mask=None, **_):
        return classified(self.classifier, self.new, input_ids, attention_mask)
