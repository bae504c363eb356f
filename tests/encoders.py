"""Tiny random encoders of every supported type, a tokenizer and tasks for them."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModel,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Tokenizer,
)

from kdcli.models.layout import base_class
from kdcli.types import Kind, Task

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"intermediate_size": 128, "max_position_embeddings": 160, "pad_token_id": 0}
OF_TYPE = {
    "distilbert": {
        **{"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 128},
        "max_position_embeddings": 160,
    },
    "xlnet": {"d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64},
    "funnel": {
        **{"d_model": 32, "block_sizes": [1, 1], "n_head": 4, "d_head": 8, "d_inner": 64},
        "architectures": ["FunnelModel"],
    },
    "layoutlmv3": {"coordinate_size": 4, "shape_size": 8},
    "lilt": {"hidden_size": 48},
    "openai_privacy_filter": {"num_experts_per_tok": 1},
    "reformer": {"axial_pos_shape": [10, 16], "axial_pos_embds_dim": [8, 24]},
    "embedding_gemma2_text": {
        **{"head_dim": 8, "num_key_value_heads": 2, "embedding_dim": 32},
        "layer_types": ["sliding_attention", "full_attention"],
        "per_layer_config": {"1": {"head_dim": 16}},
        "hidden_size_per_layer_input": 8,
    },
    "albert": {"embedding_size": 16},
    "electra": {"embedding_size": 16},
    "rembert": {"input_embedding_size": 16},
    "convbert": {"embedding_size": 32},
    "eurobert": {"num_key_value_heads": 2},
    "esm": {"position_embedding_type": "rotary", "token_dropout": False},
    "jina_embeddings_v3": {"type_vocab_size": 1},
    "gemma3_text": {
        "head_dim": 16,
        "num_key_value_heads": 2,
        "use_bidirectional_attention": True,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "glm": {"head_dim": 8, "num_key_value_heads": 2},
    "phi3": {"num_key_value_heads": 2},
    "nystromformer": {"num_landmarks": 16, "segment_means_seq_len": 16, "conv_kernel_size": 5},
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 32},
    "qwen3": {"head_dim": 16, "num_key_value_heads": 2},
    "t5": {"d_kv": 8, "d_ff": 128},
    "xmod": {"default_language": "en_XX"},
    "luke": {"entity_vocab_size": 16, "entity_emb_size": 16},
    "big_bird": {"attention_type": "original_full"},
    "roc_bert": {"pronunciation_embed_dim": 8, "shape_embed_dim": 8},
    "mobilebert": {"embedding_size": 16, "true_hidden_size": 32, "intra_bottleneck_size": 32},
    "mpnet": {"pad_token_id": 1},
    "modernbert": {"num_hidden_layers": 4, "local_attention": 8},
    "deberta": {
        "relative_attention": True,
        "pos_att_type": ["c2p", "p2c"],
        "max_relative_positions": 32,
    },
    "deberta-v2": {
        "relative_attention": True,
        "pos_att_type": ["c2p", "p2c"],
        "max_relative_positions": 32,
    },
}

TYPES = (
    *("albert", "bert", "camembert", "convbert", "data2vec-text", "deberta", "deberta-v2"),
    *("distilbert", "electra", "ernie", "esm", "eurobert", "megatron-bert", "mobilebert"),
    *("modernbert", "mpnet", "nomic_bert", "rembert", "roberta", "roberta-prelayernorm"),
    *("roformer", "splinter", "xlm-roberta", "xlm-roberta-xl"),
)
"""Types whose heads, exports and generation are tested too."""
LEAKING = ("convbert", "deberta", "deberta-v2", "esm", "mobilebert")
"""Those whose states depend on tokens that a mask hides."""
DERIVED = ("big_bird", "esmc", "gte", "jina_embeddings_v3", "luke", "roc_bert", "ultrabert")
"""Further bidirectional types."""

NAMES, WORDS = ("entailment", "neutral", "contradiction"), ("w7", "w3", "w11")
TASKS: dict[Kind, Task] = {
    "class": Task("nli", "class", ("premise", "hypothesis"), ("accuracy",), NAMES, words=WORDS),
    "multi": Task(
        "topics", "multi", ("text",), ("micro_f1",), ("sport", "art", "war"), words=WORDS
    ),
    "score": Task("likeness", "score", ("text",), ("pearson",), words=("w9",)),
    "tokens": Task("tags", "tokens", ("tokens",), ("f1",), ("O", "B-PER", "I-PER"), words=WORDS),
    "span": Task("answers", "span", ("question", "context"), ("f1",), words=("w4", "w6")),
}


NAMES_OF_ITS_OWN = ("distilbert", "funnel", "xlnet")
"""Types whose configurations name their sizes differently, as in `OF_TYPE`."""


def tiny_config(model_type: str, **changes: object):
    given = ("vocab_size", "pad_token_id") if model_type in NAMES_OF_ITS_OWN else SIZES
    sizes = {name: SIZES[name] for name in given}
    return CONFIG_MAPPING[model_type](**sizes | OF_TYPE.get(model_type, {}) | changes)


MORE_SIZES = {
    "num_key_value_heads": 2,
    "head_dim": 8,
    "d_ff": 128,
    "d_kv": 8,
    "ffn_dim": 128,
    "word_embed_proj_dim": 32,
    "d_inner": 128,
    "attention_window": 8,
    "embedding_size": 32,
    "num_experts": 2,
    "num_local_experts": 2,
}


def small_config(kind: str) -> PreTrainedConfig:
    """A tiny configuration with each size that the type knows and accepts."""
    if kind in (*TYPES, *DERIVED, *NAMES_OF_ITS_OWN, "embedding_gemma2_text"):
        return tiny_config(kind)
    known = CONFIG_MAPPING[kind]()
    sizes = {n: x for n, x in MORE_SIZES.items() if isinstance(getattr(known, n, None), int)}
    if hasattr(known, "num_key_value_heads") and not isinstance(known.num_key_value_heads, int):
        sizes["num_key_value_heads"] = 2
    sizes |= SIZES | OF_TYPE.get(kind, {})
    while True:
        try:
            return CONFIG_MAPPING[kind](**sizes)
        except Exception as error:
            refused = [name for name in sizes if name in str(error)]
            if not refused:
                # A check that names no size, such as ESM C's.
                refused = [name for name in sizes if name in MORE_SIZES]
            if not refused:
                raise
            for name in refused:
                del sizes[name]


def tiny_encoder(model_type: str, **changes: object) -> PreTrainedModel:
    config = tiny_config(model_type, **changes)
    # As in a model that kdcli loads.
    config.use_cache = False
    return base_class(config).from_config(config).eval()


def tiny_tokenizer(words: Iterable[int] = range(59)) -> PreTrainedTokenizerFast:
    """One token a word: `w0` ... `w58`, after [PAD] [UNK] [CLS] [SEP] [MASK]."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {word: i for i, word in enumerate([*special, *(f"w{i}" for i in words)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    named = {f"{token[1:-1].lower()}_token": token for token in special}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named)


def bytes_of_words() -> Qwen2Tokenizer:
    """A tokenizer of words such as w7, of which each letter and digit is a token."""
    pieces = ["<|endoftext|>", "\u0120", *"wxyz", *"0123456789"]
    return Qwen2Tokenizer(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[])


def on_disk(
    model: PreTrainedModel, folder: Path, tokenizer: PreTrainedTokenizerFast | None = None
) -> Path:
    """Save a model with its tokenizer, the tiny one unless given."""
    for part in (model, tokenizer or tiny_tokenizer()):
        part.save_pretrained(folder)
    return folder


def foreign_tokenizer() -> PreTrainedTokenizerFast:
    """The same words as other numbers."""
    return tiny_tokenizer(reversed(range(59)))


def byte_level(*merges: tuple[str, str]) -> Tokenizer:
    """Bytes and what the merges make of them; as in all of its kind, a word's first piece holds the
    space before it."""
    special = ["<pad>", "<unk>", "<s>", "</s>", "<mask>"]
    pieces = [
        *special,
        *sorted(pre_tokenizers.ByteLevel.alphabet()),
        *("".join(pair) for pair in merges),
    ]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def padded_batch(
    model: PreTrainedModel, rows: int = 2, length: int = 10, real: int = 6
) -> dict[str, torch.Tensor]:
    """Random tokens; the second row has `real` tokens and padding."""
    torch.manual_seed(1)
    ids = torch.randint(5, 60, (rows, length))
    mask = torch.ones_like(ids)
    mask[1, real:] = 0
    ids[mask == 0] = model.config.pad_token_id
    return {"input_ids": ids, "attention_mask": mask}


@torch.no_grad()
def logits_of(model: PreTrainedModel, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Logits of any head; of question answering [B, L, 2]."""
    output = model(**batch)
    return (
        torch.stack([output.start_logits, output.end_logits], -1)
        if "start_logits" in output
        else output.logits
    )


def assert_same_state(one: PreTrainedModel, other: PreTrainedModel) -> None:
    state, wanted = one.state_dict(), other.state_dict()
    assert state.keys() == wanted.keys()
    assert [name for name, tensor in state.items() if not torch.equal(tensor, wanted[name])] == []


class CountingRows:
    """Rows of 1 ... 7 tokens that count up, padded to `width`."""

    def __init__(self, width=200):
        self.width = width

    def __len__(self):
        return 50_000

    def batch(self, indices):
        ids_BL = torch.as_tensor(indices)[:, None] % 50 + torch.arange(self.width)
        real_BL = torch.arange(self.width) < torch.as_tensor(indices % 7 + 1)[:, None]
        return {"input_ids": ids_BL % 55 + 3, "attention_mask": real_BL.long(), "labels": ids_BL}


OWN_CODE_FILES = Path(__file__).parent / "own_code"
OWN_CODE = {"pairs": "Pairs", "slopes": "Slopes", "blocks": "New"}
"""Models with code of their own (tests/own_code), and how the names of their classes begin."""


def write_own_code(kind: str, folder: Path, **settings: object) -> Path:
    """Write a random model with its code and a tokenizer, as a person downloads it."""
    folder.mkdir(parents=True, exist_ok=True)
    for file in (*OWN_CODE_FILES.glob(f"*_{kind}.py"), OWN_CODE_FILES / "base_own.py"):
        shutil.copy(file, folder)
    name = OWN_CODE.get(kind) or kind.capitalize()
    configuration = (
        "configuration" if (folder / f"configuration_{kind}.py").exists() else "modeling"
    )
    auto_map = {"AutoConfig": f"{configuration}_{kind}.{name}Config"} | {
        auto: f"modeling_{kind}.{name}{auto.removeprefix('AutoModel') or 'Model'}"
        for auto in ("AutoModel", "AutoModelForSequenceClassification")
    }
    sizes = SIZES | {"intermediate_size": 64, "layer_norm_eps": 1e-12}
    config = {"model_type": f"{kind}_encoder", "architectures": [f"{name}Model"]} | sizes
    config |= {"auto_map": auto_map} | settings
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    model = AutoModel.from_config(config, trust_remote_code=True)
    save_file(model.state_dict(), folder / "model.safetensors", {"format": "pt"})
    tiny_tokenizer().save_pretrained(folder)
    return folder
