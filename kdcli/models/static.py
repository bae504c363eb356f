"""Static models: the vector of a text is the mean of one stored vector per token.

A static model is a table. It has no layers and no positions, so it needs a hundredth of an
encoder's time, and it is small if its vectors are short. It is saved as a `StaticEmbedding` of
sentence-transformers under the names that model2vec uses, so that `SentenceTransformer` and
model2vec's `StaticModel` load the directory. `kdcli.models.static_classifier` puts a head on top.
"""

import copy
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.modeling_outputs import BaseModelOutput

from kdcli.errors import UsageError

MODEL_TYPE = "model2vec"
CLASSIFIER = "StaticForSequenceClassification"
"""The class of static models with a head, in `kdcli.models.static_classifier`."""
FRAMING_KEY = "framing_token_ids"
"""Key of config.json for the tokens that a tokenizer adds around a text."""
TABLES = ("embeddings", "embedding.weight")
"""The names of the table in model.safetensors, by model2vec and by sentence-transformers."""
MAPPING, SCALES = "mapping", "weights"
"""Further tensors of model2vec: the row of each token in the table, and its vector's factor."""
HEAD_TENSORS = ("hidden.", "classifier.")
"""The first parts of the names of a head's tensors in the same file."""


class StaticConfig(PreTrainedConfig):  # type: ignore[misc]
    """The configuration of a static model, with the keys of model2vec."""

    model_type = MODEL_TYPE
    attribute_map = {"hidden_size": "hidden_dim"}  # noqa: RUF012 - as in transformers

    vocab_size: int = 0
    hidden_dim: int = 0
    normalize: bool = True
    framing_token_ids: list[int] | None = None
    # Not annotated, so that config.json does not have them.
    num_hidden_layers = 0
    num_attention_heads = 1
    intermediate_size = 0
    pad_token_id = 0


class StaticModel(PreTrainedModel):  # type: ignore[misc]
    """Token ids [B, L] -> the stored vectors of the tokens [B, L, D]."""

    config_class = StaticConfig
    base_model_prefix = "static"
    _supports_sdpa = True

    def __init__(self, config: StaticConfig) -> None:
        super().__init__(config)
        self.embeddings = nn.Parameter(torch.empty(config.vocab_size, config.hidden_dim))
        # Modules that work on an encoder's layers find none.
        self.layers = nn.ModuleList()
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if module is self:
            nn.init.normal_(self.embeddings, std=self.config.hidden_dim**-0.5)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **unused: object
    ) -> BaseModelOutput:
        return BaseModelOutput(last_hidden_state=F.embedding(input_ids, self.embeddings))


AutoConfig.register(MODEL_TYPE, StaticConfig)
AutoModel.register(StaticConfig, StaticModel)


def is_static(config: PreTrainedConfig) -> bool:
    """Return whether a configuration is a static model's."""
    return str(config.model_type) == MODEL_TYPE


def read_sizes(config: StaticConfig, weights: Path) -> None:
    """Set the sizes of a configuration to the sizes of the stored table.

    model2vec's own configurations lack the number of tokens.

    Raises:
        UsageError: The file has no table, or tensors that no static model has.
    """
    try:
        with safe_open(weights, "pt") as tensors:
            shapes = {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise UsageError(f"{weights} is damaged: {error}", "copy the model again") from None
    known = (*TABLES, MAPPING, SCALES)
    tables = [shapes[name] for name in TABLES if len(shapes.get(name, ())) == 2]
    others = [n for n in shapes if n not in known and not n.startswith(HEAD_TENSORS)]
    if len(tables) != 1 or others:
        raise UsageError(
            f"{weights} must hold one tensor, {TABLES[0]}, with a row for each token; it holds "
            f"{', '.join(sorted(shapes))}"
        )
    ((rows, config.hidden_dim),) = tables
    (config.vocab_size,) = shapes.get(MAPPING, [rows])


def load_static(config: StaticConfig, weights: Path) -> StaticModel:
    """Load a static model whose sizes `read_sizes` set."""
    tensors = load_file(weights)
    table = next(tensors[name] for name in TABLES if name in tensors)
    if MAPPING in tensors:
        table = table[tensors[MAPPING].long()]
    if SCALES in tensors:
        # The scaled rows of an integer table are no integers.
        table = table.float() * tensors[SCALES].float()[:, None]
    model: StaticModel = StaticModel(config)
    with torch.no_grad():
        model.embeddings.copy_(table)
    return model


def as_static(table_VD: Tensor) -> StaticModel:
    """Return a static model with a table [V, D], in eval mode."""
    vocab_size, width = table_VD.shape
    config = StaticConfig(vocab_size=vocab_size, hidden_dim=width)
    model: StaticModel = StaticModel(config)
    with torch.no_grad():
        model.embeddings.copy_(table_VD)
    model.eval()
    return model


def check_fast(tokenizer: PreTrainedTokenizerBase) -> None:
    """Check that a tokenizer has a tokenizer.json.

    Raises:
        UsageError: It is not a fast one.
    """
    if not tokenizer.is_fast:
        raise UsageError(
            f"{type(tokenizer).__name__} has no tokenizer.json, which a static model needs",
            "choose a teacher with a fast tokenizer",
        )


def bare_tokenizer(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerFast:
    """Return a copy of a tokenizer that adds no special tokens to a text and truncates nothing.

    A tokenizer that is bare already keeps its length.

    Raises:
        UsageError: The tokenizer is not a fast one, which a static model needs.
    """
    check_fast(tokenizer)
    backend = copy.deepcopy(tokenizer.backend_tokenizer)
    is_bare = backend.post_processor is None
    backend.post_processor = None
    backend.no_truncation()
    backend.no_padding()
    special = dict(tokenizer.special_tokens_map)
    if "pad_token" not in special:
        # Padding is masked, so any token can be it. A word as a special token would be cut out of
        # longer words, so one that is special already comes first.
        added = backend.get_added_tokens_decoder()
        names = [added[number].content for number in sorted(added) if added[number].special]
        names += [special.get("unk_token"), getattr(backend.model, "unk_token", None)]
        special["pad_token"] = next(filter(None, names), backend.id_to_token(0))
    length = {"model_max_length": tokenizer.model_max_length} if is_bare else {}
    side = tokenizer.truncation_side
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, truncation_side=side, **length, **special
    )
