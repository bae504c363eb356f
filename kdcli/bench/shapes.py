"""Shapes as models without weights: what `kdcli benchmark` measures or projects when nothing has been trained yet, and
the shapes, batches and lengths of published latency tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from transformers import BertConfig

from kdcli.models.shape import GRAMMAR, parse_shape
from kdcli.types import ModelShape

VOCABULARY = 30_522
"""Words of uncased BERT, the vocabulary of every shape in the papers."""

HEADS = 12
TOKENS = 128
"""Length of the one sequence that `counts` counts, as in kdcli.models.card."""


@dataclass(frozen=True)
class Preset:
    """A latency protocol.

    Attributes:
        shapes: what it measures, the baseline first; empty where the user names the models.
        cells: (batch size, tokens).
        published: shape → published speed-up over the first shape; empty where nothing was published.
        device: the card it was published for, a name of devices.toml.
        source: where it was published.
    """

    shapes: tuple[str, ...]
    cells: tuple[tuple[int, int], ...]
    published: Mapping[str, float] = field(default_factory=dict)
    device: str | None = None
    source: str | None = None


PRESETS: Mapping[str, Preset] = {
    # Neither paper states its batch: the protocol both refer to is that of BERT-PKD, 128 sequences of 128 tokens.
    "minilm": Preset(
        shapes=("12x768", "6x768", "12x384", "6x384", "4x384", "3x384"),
        cells=((128, 128),),
        published={"12x768": 1.0, "6x768": 2.0, "12x384": 2.7, "6x384": 5.3, "4x384": 7.8, "3x384": 10.1},
        device="p100",
        source="arXiv 2002.10957, table 4",
    ),
    "tinybert": Preset(
        shapes=("12x768", "4x312:1200@12", "6x768"),
        cells=((128, 128),),
        published={"12x768": 1.0, "4x312:1200@12": 9.4, "6x768": 2.0},
        device="k80",
        source="arXiv 1909.10351, table 1",
    ),
    "serving": Preset(shapes=(), cells=tuple((1, length) for length in (16, 64, 128, 256, 512))),
}


def shape(text: str) -> ModelShape:
    """Read `LxH[:FFN][@HEADS]` without a teacher to take the rest from: FFN is 4·H, heads the largest divisor of H up
    to 12.

    Raises:
        UsageError: malformed, zero, or heads that do not divide the width.
    """
    found = GRAMMAR.fullmatch(text.strip())
    layers, hidden = (int(found[1]), int(found[2])) if found else (1, 1)
    heads = max(h for h in range(1, HEADS + 1) if hidden % h == 0)
    # A teacher of just that size: whatever is left out comes from it, and nothing is too large. Width 0 is refused.
    return parse_shape(text, ModelShape(layers, max(hidden, 1), 4 * max(hidden, 1), heads))


def config_of(text: str, vocab_size: int = VOCABULARY) -> BertConfig:
    """The configuration of BERT in a shape; 512 positions, two token types.

    Raises:
        UsageError: as `shape`.
    """
    of = shape(text)
    return BertConfig(
        vocab_size=vocab_size,
        hidden_size=of.hidden,
        num_hidden_layers=of.layers,
        num_attention_heads=of.heads,
        intermediate_size=of.ffn,
    )


def counts(text: str, vocab_size: int = VOCABULARY) -> dict[str, int]:
    """Size and work of BERT in a shape, the ways the papers count them.

    `params_embedding` (word embeddings only) and `params_transformer` (the layers only) are the two columns of MiniLM's
    table 4, all of whose twelve numbers they equal as printed. `params_total` is the whole encoder: also positions,
    token types, their normalisation and the pooler.

    `multiply_adds` is of one sequence of 128 tokens: the matrix products of the layers, the two of attention, and the
    pooler. `flops` is twice that, and it is what TinyBERT's table 1 prints: its 22.5 G, 11.3 G and 1.2 G are additions
    and multiplications counted apart, on 128 tokens. Here they come out as 22.35, 11.18 and 1.25 G: 0.7 and 1.1 % less
    and 3.9 % more than printed (as printed, 1.2 has two digits). One more H×H product over all tokens would give
    22.50, 11.33 and 1.27. Its parameters: 109 M and 67.0 M come out (109.5, 67.0); its 14.5 M for 4x312:1200@12 is
    14.35 M here, 1.0 % less; with the H×768 matrix that fits the student to its teacher, which the authors' code keeps
    in the model, it is 14.59 M.

    Raises:
        UsageError: as `shape`.
    """
    of = shape(text)
    matrices = 4 * of.hidden**2 + 2 * of.hidden * of.ffn
    vectors = 4 * of.hidden + of.ffn + of.hidden + 4 * of.hidden
    embedding, transformer = vocab_size * of.hidden, of.layers * (matrices + vectors)
    config = config_of(text, vocab_size)
    around = (config.max_position_embeddings + config.type_vocab_size + 2) * of.hidden
    pooler = of.hidden**2 + of.hidden
    multiply_adds = of.layers * (TOKENS * matrices + 2 * TOKENS**2 * of.hidden) + of.hidden**2
    return {
        "params_embedding": embedding,
        "params_transformer": transformer,
        "params_total": embedding + around + transformer + pooler,
        "multiply_adds": multiply_adds,
        "flops": 2 * multiply_adds,
    }
