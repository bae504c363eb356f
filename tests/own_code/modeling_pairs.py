"""A pre-norm encoder: q, k and v of a head are neighbours in one linear, rotary embeddings by
complex numbers, a packed SwiGLU, RMSNorm, and attention by torch's own function."""

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

from .base_own import OwnModel, added_mask, classified
from .configuration_pairs import PairsConfig

try:
    from flash_attn import flash_attn_func
except ImportError:
    flash_attn_func = None


class PairsLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads = config.num_attention_heads
        width, inner = config.hidden_size, config.intermediate_size
        self.attention_norm = nn.RMSNorm(width, config.norm_eps)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.wo = nn.Linear(width, width, bias=False)
        self.ffn_norm = nn.RMSNorm(width, config.norm_eps)
        self.w12 = nn.Linear(width, 2 * inner, bias=False)
        self.w3 = nn.Linear(inner, width, bias=False)

    def forward(self, x, mask, turns, maps):
        rows, length, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(rows, length, self.heads, -1)
        q, k, v = qkv.chunk(3, dim=-1)
        q, k = turn(q, turns), turn(k, turns)
        if flash_attn_func is not None and x.is_cuda:
            context = flash_attn_func(q, k, v)
        else:
            q, k, v = (part.transpose(1, 2) for part in (q, k, v))
            if maps is not None:
                scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
                maps.append((scores if mask is None else scores + mask).softmax(-1))
            context = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)
        x = x + self.wo(context.reshape(rows, length, width))
        gate, up = self.w12(self.ffn_norm(x)).chunk(2, dim=-1)
        return x + self.w3(F.silu(gate) * up)


def turn(x, turns):
    """Multiply pairs of neighbouring numbers by complex numbers of length 1."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns[None, :, None]).flatten(3).type_as(x)


class PairsPreTrainedModel(OwnModel):
    config_class = PairsConfig
    base_model_prefix = "model"
    _input_embed_layer = "encoder"


class PairsModel(PairsPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.encoder = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.transformer_encoder = nn.ModuleList(
            PairsLayer(config) for _ in range(config.num_hidden_layers)
        )
        self.layer_norm = nn.RMSNorm(config.hidden_size, config.norm_eps)
        self.post_init()

    def forward(
        self,
        input_ids,
        attention_mask=None,
        output_hidden_states=False,
        output_attentions=False,
        **_,
    ):
        x = self.encoder(input_ids)
        mask = None if attention_mask is None else added_mask(attention_mask, x)
        half = self.config.hidden_size // self.config.num_attention_heads // 2
        speeds = 10_000.0 ** -(torch.arange(half, device=x.device) / half)
        angles = torch.arange(x.shape[1], device=x.device)[:, None] * speeds
        turns = torch.polar(torch.ones_like(angles), angles)
        states, maps = [x], [] if output_attentions else None
        for layer in self.transformer_encoder:
            x = layer(x, mask, turns, maps)
            states.append(x)
        states[-1] = x = self.layer_norm(x)
        return BaseModelOutput(x, tuple(states) if output_hidden_states else None, maps)


class PairsForSequenceClassification(PairsPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = PairsModel(config)
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def forward(self, input_ids, attention_mask=None, **_):
        head = nn.Sequential(self.dense, nn.Tanh(), self.classifier)
        return classified(head, self.model, input_ids, attention_mask)
