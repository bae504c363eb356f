"""A BERT of which every second layer mixes experts, with the name of a type of transformers, as the
second version of Nomic's embedding model."""

import torch
from torch import nn
from transformers import BertConfig, BertModel


class ExpertsConfig(BertConfig):
    model_type = "nomic_bert"

    def __init__(self, moe_every_n_layers=2, num_experts=4, moe_top_k=2, **more):
        super().__init__(**more)
        self.moe_every_n_layers = moe_every_n_layers
        self.num_experts = num_experts
        self.moe_top_k = moe_top_k


class Mixture(nn.Module):
    """A feed-forward block in which each token is read by the experts that its router chooses."""

    def __init__(self, config):
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.chosen = config.moe_top_k
        self.router = nn.Linear(width, config.num_experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, inner), nn.GELU(), nn.Linear(inner, width))
            for _ in range(config.num_experts)
        )
        self.norm = nn.LayerNorm(width)

    def forward(self, x, residual):
        shares = self.router(x).softmax(-1)
        largest = shares.topk(self.chosen)
        shares = torch.zeros_like(shares).scatter(-1, largest.indices, largest.values)
        mixed = sum(shares[..., n, None] * expert(x) for n, expert in enumerate(self.experts))
        return self.norm(residual + mixed)


class ExpertsModel(BertModel):
    config_class = ExpertsConfig

    def __init__(self, config):
        super().__init__(config, add_pooling_layer=False)
        for layer in self.encoder.layer[1 :: config.moe_every_n_layers]:
            layer.intermediate, layer.output = nn.Identity(), Mixture(config)
        self.post_init()
