"""What the encoders with code of their own share: settings, embeddings, a mask and a classifier."""

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput


class OwnConfig(PreTrainedConfig):
    vocab_size: int = 64
    hidden_size: int = 32
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    intermediate_size: int = 64
    max_position_embeddings: int = 160
    type_vocab_size: int = 2
    pad_token_id: int = 0
    layer_norm_eps: float = 1e-12
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1


class OwnModel(PreTrainedModel):
    _input_embed_layer = "word_embeddings"
    _supports_sdpa = True


class Embeddings(nn.Module):
    def __init__(self, config):
        super().__init__()
        width = config.hidden_size
        self.word_embeddings = nn.Embedding(config.vocab_size, width, config.pad_token_id)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, width)
        self.LayerNorm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, input_ids, token_type_ids=None):
        types = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
        states = self.word_embeddings(input_ids) + self.token_type_embeddings(types)
        return self.dropout(self.LayerNorm(states))


def added_mask(mask, x):
    """0 for real tokens, and the smallest number for padding."""
    return (1 - mask[:, None, None].to(x.dtype)) * torch.finfo(x.dtype).min


def classified(head, encoder, *inputs):
    """The classes of texts by their first tokens."""
    return SequenceClassifierOutput(logits=head(encoder(*inputs).last_hidden_state[:, 0]))
