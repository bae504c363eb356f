"""Build untrained BERT models from shapes, and define the protocols of published latency tables."""

from collections.abc import Mapping
from dataclasses import dataclass

from transformers import BertConfig

from kdcli.models.grammar import match_shape, parse_shape
from kdcli.types import ModelShape

VOCABULARY = 30_522  # uncased BERT's vocabulary, which every shape in the papers has
MAX_HEADS = 12


@dataclass(frozen=True)
class Preset:
    """A latency protocol."""

    shapes: tuple[str, ...]  # the baseline first; empty if the user names the models
    cells: tuple[tuple[int, int], ...]  # (batch size, tokens)


PRESETS: Mapping[str, Preset] = {
    # Neither paper states its batch size. Both refer to the protocol of BERT-PKD: 128 sequences of
    # 128 tokens.
    "minilm": Preset(  # arXiv 2002.10957, table 4
        shapes=("12x768", "6x768", "12x384", "6x384", "4x384", "3x384"),
        cells=((128, 128),),
    ),
    "tinybert": Preset(  # arXiv 1909.10351, table 1
        shapes=("12x768", "4x312:1200@12", "6x768"),
        cells=((128, 128),),
    ),
    # The shapes of both papers, one sequence at a time: half a minute on two cores.
    "papers": Preset(
        shapes=("12x768", "6x768", "12x384", "6x384", "4x384", "3x384", "4x312:1200@12"),
        cells=((1, 128),),
    ),
    "serving": Preset(shapes=(), cells=tuple((1, length) for length in (16, 64, 128, 256, 512))),
}


def shape(text: str) -> ModelShape:
    """Parse `LxH[:FFN][@HEADS]` without a teacher.

    FFN defaults to 4H, and HEADS to the largest divisor of H up to 12. Raises UsageError if the
    text is malformed, if a size is zero, or if the heads do not divide the width.
    """
    match = match_shape(text)
    layers, hidden = int(match[1]), int(match[2])
    heads = max(h for h in range(1, MAX_HEADS + 1) if hidden % h == 0)
    # A teacher of the same size supplies the defaults without any limit. `parse_shape` refuses a
    # width of 0.
    return parse_shape(text, ModelShape(layers, max(hidden, 1), 4 * max(hidden, 1), heads))


def config_of(text: str, vocab_size: int = VOCABULARY) -> BertConfig:
    """Return the BERT configuration of a shape, with 512 positions and two token types.

    Raises UsageError if `text` is not a shape.
    """
    sizes = shape(text)
    layers = {
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "intermediate_size": sizes.ffn,
    }
    return BertConfig(vocab_size=vocab_size, hidden_size=sizes.hidden, **layers)


def paper_params(text: str, vocab_size: int = VOCABULARY) -> tuple[int, int]:
    """Count the parameters of a BERT shape as MiniLM's table 4 does.

    Returns the parameters of the word embeddings and of the encoder layers. All twelve numbers of
    that table are reproduced as printed. Raises UsageError if `text` is not a shape.
    """
    sizes = shape(text)
    layer = 4 * sizes.hidden**2 + 2 * sizes.hidden * sizes.ffn + 9 * sizes.hidden + sizes.ffn
    return vocab_size * sizes.hidden, sizes.layers * layer
