"""The grammar of shapes without a teacher, and the parameters and work that papers print for
them."""

import pytest
from transformers import BertModel

from kdcli.deploy.shapes import PRESETS, config_of, paper_params, shape
from kdcli.errors import UsageError
from kdcli.models.card import describe
from kdcli.models.grammar import is_shape
from kdcli.models.shape import shape_of
from kdcli.types import ModelShape

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("text", ["6x384", "4x312:1200", "4x312:1200@12", "12x768@6", " 6x384 "])
def test_shapes_are_recognised(text):
    assert is_shape(text)
    assert not is_shape(f"./{text.strip()}")
    assert not is_shape("me/6y384")


@pytest.mark.parametrize(
    "text", ["6y384", "6X384", "6 x 384", "6×384", "6*384", "6x384:", "6x384@", "6y384:1200"]
)
def test_a_slip_is_an_error_and_no_question_to_a_hub(text):
    with pytest.raises(UsageError, match="is not a shape"):
        is_shape(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *[("6x384", (6, 384, 1536, 12)), ("2x128", (2, 128, 512, 8)), ("2x130", (2, 130, 520, 10))],
        *[
            ("2x131", (2, 131, 524, 1)),
            ("48x2048", (48, 2048, 8192, 8)),
            ("4x312@4", (4, 312, 1248, 4)),
        ],
        ("4x312:1200@12", (4, 312, 1200, 12)),
    ],
)
def test_what_is_left_out(text, expected):
    config = config_of(text, vocab_size=77)
    assert shape(text) == shape_of(config) == ModelShape(*expected)
    assert (config.vocab_size, config.model_type) == (77, "bert")


ZERO, HEADS = "has a zero in it", "7 heads do not divide a width of 384"


@pytest.mark.parametrize(
    ("text", "message"),
    [("six by four", "is not a shape"), ("0x384", ZERO), ("6x0", ZERO), ("6x384@7", HEADS)],
)
def test_shapes_that_cannot_be(text, message):
    with pytest.raises(UsageError, match=message):
        config_of(text)


@pytest.mark.parametrize(
    ("text", "embedding", "transformer"),
    [
        *[("12x768", 23.4, 85.1), ("6x768", 23.4, 42.5), ("12x384", 11.7, 21.3)],
        *[("6x384", 11.7, 10.6), ("4x384", 11.7, 7.1), ("3x384", 11.7, 5.3)],
    ],
)
def test_parameters_as_in_table_4_of_minilm(text, embedding, transformer):
    assert [round(count / 1e6, 1) for count in paper_params(text)] == [
        embedding,
        transformer,
    ]


@pytest.mark.parametrize(
    ("text", "flops", "flops_off", "params", "params_off"),
    [
        ("12x768", 22.5, -0.0067, 109, 0.0044),
        ("6x768", 11.3, -0.011, 67.0, -0.0007),
        ("4x312:1200@12", 1.2, 0.039, 14.5, -0.0103),
    ],
)
def test_the_card_of_a_shape_as_in_table_1_of_tinybert(text, flops, flops_off, params, params_off):
    card = describe(BertModel(config_of(text)), text, None)
    assert 2 * card.multiply_adds / 1e9 / flops - 1 == pytest.approx(flops_off, abs=0.001)
    assert card.params_total / 1e6 / params - 1 == pytest.approx(params_off, abs=0.0002)


@pytest.mark.parametrize("text", ["2x96:200@6", "1x312:1200@12"])
def test_parameters_are_those_of_the_model(text):
    model = BertModel(config_of(text, vocab_size=300))
    embedding, layers = paper_params(text, vocab_size=300)
    assert embedding == model.embeddings.word_embeddings.weight.numel()
    assert layers == sum(p.numel() for p in model.encoder.parameters())


def test_presets_can_be_measured():
    for preset in PRESETS.values():
        assert all(is_shape(s) and shape(s) for s in preset.shapes)
        assert preset.cells
    assert PRESETS["serving"].cells == ((1, 16), (1, 64), (1, 128), (1, 256), (1, 512))
