"""Small random directories in the forms in which embedding models are published."""

from pathlib import Path

import numpy as np
import torch
from encoders import tiny_config, tiny_tokenizer
from sentence_transformers import SentenceTransformer, SparseEncoder
from sentence_transformers.models import (
    CNN,
    LSTM,
    BoW,
    Dense,
    LayerNorm,
    Normalize,
    Pooling,
    Router,
    StaticEmbedding,
    Transformer,
    WordEmbeddings,
    WordWeights,
)
from sentence_transformers.models.tokenizer import WhitespaceTokenizer
from tokenizers import processors
from torch import nn
from transformers import AutoModel, AutoModelForMaskedLM, T5Config, T5EncoderModel

PREFIXES = {"query": "w50 w51 ", "document": "w52 "}


def framed(first: str | None, last: str | None, side: str = "right", length: int = 24):
    """Return the tiny tokenizer, which adds a token before and after each text."""
    tokenizer = tiny_tokenizer()
    around = [token for token in (first, "$A", last) if token]
    tokens = [(t, tokenizer.convert_tokens_to_ids(t)) for t in around if t != "$A"]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=" ".join(around), special_tokens=tokens
    )
    tokenizer.padding_side, tokenizer.model_max_length = side, length
    return tokenizer


BERT = ("[CLS]", "[SEP]")


def _save(folder: Path, network, tokenizer, modules, **settings: object) -> Path:
    for part in (network.eval(), tokenizer):
        part.save_pretrained(folder / "encoder")
    encoder = Transformer(str(folder / "encoder"), **settings.pop("encoder", {}))
    model = SentenceTransformer(modules=[encoder, *modules], device="cpu", **settings)
    model.save(str(folder / "model"))
    return folder / "model"


def _network(model_type: str, **changes: object):
    changes = {"initializer_range": 0.3} | changes
    return AutoModel.from_config(tiny_config(model_type, **changes))


def _identity(width: int, out: int) -> Dense:
    return Dense(width, out, bias=False, activation_function=nn.Identity())


def _t5(folder: Path) -> Path:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    network = T5EncoderModel(T5Config(vocab_size=64, pad_token_id=0, **sizes))
    modules = [Pooling(32), _identity(32, 24), Normalize()]
    return _save(folder, network, framed(None, "[SEP]"), modules)


PACKAGINGS = {
    "EmbeddingGemma": lambda folder: _save(
        folder,
        _network("gemma3_text"),
        framed("[CLS]", "[SEP]"),
        [Pooling(32), _identity(32, 64), _identity(64, 32), Normalize()],
        prompts=PREFIXES | {"STS": "w53 "},
    ),
    "Qwen3-Embedding": lambda folder: _save(
        folder,
        _network("qwen3"),
        framed(None, "[SEP]", side="left"),
        [Pooling(32, "lasttoken"), Normalize()],
        prompts={"query": "w50 w51 : ", "document": ""},
    ),
    "GTE": lambda folder: _save(
        folder, _network("gte"), framed(*BERT), [Pooling(32, "cls"), Normalize()]
    ),
    "E5": lambda folder: _save(
        folder,
        _network("bert"),
        framed(*BERT),
        [Pooling(32), Normalize()],
        prompts={"query": "w50 : ", "passage": "w52 : "},
    ),
    "multilingual-E5": lambda folder: _save(
        folder,
        _network("xlm-roberta", pad_token_id=0),
        framed(*BERT),
        [Pooling(32), Normalize()],
        prompts={"query": "w50 : ", "passage": "w52 : "},
        default_prompt_name="query",
    ),
    "BGE-M3": lambda folder: _save(
        folder,
        _network("xlm-roberta", pad_token_id=0),
        framed(*BERT, length=100),
        [Pooling(32, "cls"), Normalize()],
    ),
    "GTE on ModernBERT": lambda folder: _save(
        folder, _network("modernbert"), framed(*BERT), [Pooling(32, "cls")]
    ),
    "Nomic on ModernBERT": lambda folder: _save(
        folder,
        _network("modernbert", max_position_embeddings=20),
        framed(*BERT),
        [Pooling(32)],
        prompts=PREFIXES,
    ),
    "Nomic v1.5": lambda folder: _save(
        folder,
        _network("nomic_bert"),
        framed(*BERT),
        [Pooling(32), LayerNorm(32), Normalize()],
        prompts=PREFIXES,
        truncate_dim=16,
    ),
    "LaBSE": lambda folder: _save(
        folder, _network("bert"), framed(*BERT), [Pooling(32, "cls"), Dense(32, 32), Normalize()]
    ),
    "Sentence-T5": _t5,
    "SGPT": lambda folder: _save(
        folder, _network("qwen3"), framed("[CLS]", "[SEP]"), [Pooling(32, "weightedmean")]
    ),
    "several poolings": lambda folder: _save(
        folder,
        _network("bert"),
        framed(*BERT),
        [Pooling(32, ("mean", "max")), Dense(64, 24, activation_function=nn.GELU())],
    ),
}
"""Name -> a function that saves such a model inside a directory and returns its place."""


def save_packaging(name: str, folder: Path) -> Path:
    torch.manual_seed(0)
    return (PACKAGINGS | BY_LIBRARY)[name](folder)


def _library(folder: Path, modules, **settings: object) -> Path:
    SentenceTransformer(modules=modules, device="cpu", **settings).save(str(folder / "model"))
    return folder / "model"


def _encoder(folder: Path) -> Transformer:
    for part in (_network("bert").eval(), framed(*BERT)):
        part.save_pretrained(folder / "encoder")
    return Transformer(str(folder / "encoder"))


def _table() -> StaticEmbedding:
    return StaticEmbedding(tiny_tokenizer().backend_tokenizer, embedding_dim=32)


def _sparse(folder: Path) -> Path:
    torch.manual_seed(0)
    for part in (AutoModelForMaskedLM.from_config(tiny_config("bert")).eval(), framed(*BERT)):
        part.save_pretrained(folder / "encoder")
    SparseEncoder(str(folder / "encoder"), device="cpu").save(str(folder / "model"))
    return folder / "model"


WORDS_OF_TABLE = [f"w{n}" for n in range(58)]


def _words() -> WordEmbeddings:
    vectors = np.random.default_rng(0).random((len(WORDS_OF_TABLE), 32))
    return WordEmbeddings(WhitespaceTokenizer(WORDS_OF_TABLE), vectors)


BY_LIBRARY = {
    "Router": lambda folder: _library(
        folder,
        [Router.for_query_document([_table()], [_encoder(folder), Pooling(32)]), Normalize()],
        prompts={"query": "w50 ", "document": "w51 "},
    ),
    "GloVe": lambda folder: _library(
        folder,
        [
            _words(),
            WordWeights(WORDS_OF_TABLE, {"w1": 2.0, "w2": 0.5}),
            Pooling(32),
            Dense(32, 16),
        ],
    ),
    "bag of words": lambda folder: _library(folder, [BoW(WORDS_OF_TABLE), Dense(58, 16)]),
    "CNN": lambda folder: _library(folder, [_encoder(folder), CNN(32, 8), Pooling(24)]),
    "LSTM": lambda folder: _library(folder, [_words(), LSTM(32, 8), Pooling(16)]),
    "Dense before the pooling": lambda folder: _library(
        folder,
        [
            _encoder(folder),
            Dense(32, 16, module_input_name="token_embeddings"),
            Pooling(16, "max"),
        ],
    ),
    "SPLADE": _sparse,
}
"""The same for models that only sentence-transformers computes."""
