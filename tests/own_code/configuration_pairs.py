"""Configuration of an encoder whose code comes with the model, in a file of its own."""

from transformers import PreTrainedConfig


class PairsConfig(PreTrainedConfig):
    model_type = "pairs_encoder"

    def __init__(
        self,
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        max_length=160,
        pad_token_id=0,
        norm_eps=1e-5,
        flash_attention=True,
        **more,
    ):
        super().__init__(pad_token_id=pad_token_id, **more)
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.intermediate_size = intermediate_size
        self.max_length = max_length
        self.norm_eps = norm_eps
        self.flash_attention = flash_attention
