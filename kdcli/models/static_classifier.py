"""Static classifiers: a table of token vectors, their mean, and a head with one hidden layer.

    logits = C tanh(H mean(v) + h) + c

Without the hidden layer, the logits of a text would only be the mean of its tokens' logits. A
classifier is saved as three modules of sentence-transformers, a `StaticEmbedding` and two `Dense`,
so that `SentenceTransformer(DIR).encode(texts)` returns the logits. model.safetensors has the same
tensors for kdcli.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput

from kdcli.models.embedding_format import dense_layer, module_list, save_layer
from kdcli.models.files import MODULES_FILE
from kdcli.models.static import StaticConfig, StaticModel


class StaticForSequenceClassification(PreTrainedModel):  # type: ignore[misc]
    """Token ids [B, L] -> logits [B, C].

    The mean is over all tokens but those in `config.framing_token_ids`, which a tokenizer adds
    around a text.
    """

    config_class = StaticConfig
    base_model_prefix = "static"
    _supports_sdpa = True

    def __init__(self, config: StaticConfig) -> None:
        super().__init__(config)
        self.static = StaticModel(config)
        self.hidden = nn.Linear(config.hidden_dim, config.hidden_dim)
        self.classifier = nn.Linear(config.hidden_dim, config.num_labels)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        **unused: object,
    ) -> SequenceClassifierOutput:
        counts_BL = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        for token in self.config.framing_token_ids or ():
            counts_BL = counts_BL * (input_ids != token)
        states_BLD = self.static(input_ids).last_hidden_state
        counts_BL1 = counts_BL[..., None].to(states_BLD.dtype)
        mean_BD = (states_BLD * counts_BL1).sum(1) / counts_BL1.sum(1).clamp(min=1)
        logits_BC = self.classifier(self.hidden(mean_BD).tanh())
        loss = None if labels is None else self.loss_function(labels, logits_BC, self.config)
        return SequenceClassifierOutput(loss, logits_BC)

    def save_pretrained(
        self,
        folder: str | Path,
        *,
        state_dict: Mapping[str, Tensor] | None = None,
        **settings: object,
    ) -> None:
        """Save the model, also in the form that `SentenceTransformer` loads."""
        own = self.state_dict() if state_dict is None else state_dict
        tensors = {name.removeprefix("static."): x for name, x in own.items()}
        super().save_pretrained(folder, state_dict=tensors, **settings)
        for number, (layer, activation) in enumerate(
            (("hidden", "Tanh"), ("classifier", "Identity")), 1
        ):
            weight, bias = (own[f"{layer}.{part}"].cpu().float() for part in ("weight", "bias"))
            save_layer(dense_layer(weight, bias, activation), Path(folder) / f"{number}_Dense")
        modules = module_list({"": "StaticEmbedding", "1_Dense": "Dense", "2_Dense": "Dense"})
        (Path(folder) / MODULES_FILE).write_text(json.dumps(modules, indent=2), "utf-8")
