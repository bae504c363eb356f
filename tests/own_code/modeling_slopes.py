"""A post-norm encoder without positions: the scores fall with the distance of two tokens, by a
slope of each head, and the softmax is written out. The feed-forward is a gated linear unit."""

import math

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

from .base_own import Embeddings, OwnConfig, OwnModel, added_mask, classified


class SlopesConfig(OwnConfig):
    model_type = "slopes_encoder"


class SelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.num_attention_heads = config.num_attention_heads
        width = config.hidden_size
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.dropout = nn.Dropout(config.attention_probs_dropout_prob)

    def forward(self, x, mask, slopes):
        q, k, v = (self.by_head(part(x)) for part in (self.query, self.key, self.value))
        scores = torch.einsum("bhlk,bhmk->bhlm", q, k) / math.sqrt(q.shape[-1])
        scores = scores + mask
        weights = nn.functional.softmax(scores + slopes.to(scores.dtype), dim=-1)
        context = torch.einsum("bhlm,bhmk->blhk", self.dropout(weights), v)
        return context.reshape(x.shape), weights

    def by_head(self, x):
        return x.view(*x.shape[:2], self.num_attention_heads, -1).permute(0, 2, 1, 3)


class SelfOutput(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, x, residual):
        return self.LayerNorm(self.dropout(self.dense(x)) + residual)


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.self = SelfAttention(config)
        self.output = SelfOutput(config)

    def forward(self, x, mask, slopes):
        context, weights = self.self(x, mask, slopes)
        return self.output(context, x), weights


class GatedUnits(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gated_layers = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.act = nn.GELU()
        self.wo = nn.Linear(config.intermediate_size, config.hidden_size)
        self.layernorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, x):
        gate, up = self.gated_layers(x).chunk(2, dim=-1)
        return self.layernorm(x + self.wo(self.dropout(self.act(gate) * up)))


class SlopesLayer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.attention = Attention(config)
        self.mlp = GatedUnits(config)

    def forward(self, x, mask, slopes):
        x, weights = self.attention(x, mask, slopes)
        return self.mlp(x), weights


class Encoder(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.heads = config.num_attention_heads
        self.layer = nn.ModuleList(SlopesLayer(config) for _ in range(config.num_hidden_layers))

    def forward(self, x, mask):
        places = torch.arange(x.shape[1], device=x.device)
        distances = (places[:, None] - places).abs()
        numbers = torch.arange(1, self.heads + 1, device=x.device)
        slopes = -(2.0 ** (-8 * numbers / self.heads))[:, None, None] * distances
        states, maps = [x], []
        for layer in self.layer:
            x, weights = layer(x, mask, slopes[None])
            states.append(x)
            maps.append(weights)
        return x, tuple(states), tuple(maps)


class SlopesPreTrainedModel(OwnModel):
    config_class = SlopesConfig
    base_model_prefix = "bert"


class SlopesModel(SlopesPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.embeddings = Embeddings(config)
        self.encoder = Encoder(config)
        self.post_init()

    def forward(
        self,
        input_ids,
        attention_mask=None,
        token_type_ids=None,
        output_hidden_states=False,
        output_attentions=False,
        **_,
    ):
        x = self.embeddings(input_ids, token_type_ids)
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        x, states, maps = self.encoder(x, added_mask(mask, x))
        return BaseModelOutput(
            x, states if output_hidden_states else None, maps if output_attentions else None
        )


class SlopesForSequenceClassification(SlopesPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.bert = SlopesModel(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def forward(self, input_ids, attention_mask=None, token_type_ids=None, **_):
        return classified(self.classifier, self.bert, input_ids, attention_mask, token_type_ids)
