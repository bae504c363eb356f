"""Tiny random encoders of every supported type, and a tokenizer for them."""

from __future__ import annotations

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import CONFIG_MAPPING, AutoModel, PreTrainedModel, PreTrainedTokenizerFast

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 160,
    "pad_token_id": 0,
}
OF_TYPE = {
    "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 128},
    "albert": {"embedding_size": 16},
    "electra": {"embedding_size": 16},
    "rembert": {"input_embedding_size": 16},
    "convbert": {"embedding_size": 32},
    "eurobert": {"num_key_value_heads": 2},
    "esm": {"position_embedding_type": "rotary", "token_dropout": False},
    "mobilebert": {"embedding_size": 16, "true_hidden_size": 32, "intra_bottleneck_size": 32},
    "modernbert": {"num_hidden_layers": 4, "local_attention": 8},
    "deberta": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": 32},
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "max_relative_positions": 32},
}


def tiny_config(model_type: str, **changes: object):
    sizes = {} if model_type == "distilbert" else dict(SIZES)
    if model_type == "distilbert":
        sizes = {k: SIZES[k] for k in ("vocab_size", "max_position_embeddings", "pad_token_id")}
    return CONFIG_MAPPING[model_type](**sizes | OF_TYPE.get(model_type, {}) | changes)


def tiny_encoder(model_type: str, **changes: object) -> PreTrainedModel:
    return AutoModel.from_config(tiny_config(model_type, **changes)).eval()


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word: `w0` … `w57`, after [PAD] [UNK] [CLS] [SEP] [MASK]."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {word: i for i, word in enumerate([*special, *(f"w{i}" for i in range(59))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
    )
