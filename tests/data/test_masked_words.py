"""Words by a masked language model: batched and gathered, yet what one full query a word would
say."""

import pytest
import torch
from encoders import tiny_config
from questions import KINDS, tokenizer_of
from transformers import AutoModelForMaskedLM

from kdcli.data.augment.masked_words import MaskedWords
from kdcli.data.augment.words import SPACELESS, whole_words
from kdcli.errors import UsageError

TYPES = (
    "bert",
    "roberta",
    "distilbert",
    "electra",
    "modernbert",
    "deberta-v2",
    "albert",
    "mpnet",
    "convbert",
)
TEXTS = [
    "the cat sat on a mat",
    "rivers",
    "Zürich, naïve café in 1872",
    "who ran? The cat ran.",
    "東京 नमस्ते a",
]
TEXTS += ["", "?!"]
CPU = torch.device("cpu")


def masked_words_of(kind="word pieces", model_type="bert"):
    tokenizer = tokenizer_of(kind)
    torch.manual_seed(0)
    config = tiny_config(model_type, vocab_size=len(tokenizer), initializer_range=0.3)
    return MaskedWords(AutoModelForMaskedLM.from_config(config), tokenizer, CPU)


@pytest.mark.parametrize("model_type", TYPES)
def test_the_logits_at_the_masked_places_are_those_of_the_full_computation(model_type):
    asked = masked_words_of(model_type=model_type)
    rows = torch.randint(5, 60, (4, 17), generator=torch.Generator().manual_seed(1))
    places = torch.tensor([0, 16, 5, 9])
    with torch.no_grad():
        full = asked.model(input_ids=rows, attention_mask=torch.ones_like(rows)).logits
    assert full.shape == (4, 17, len(asked.tokenizer))
    torch.testing.assert_close(
        asked.logits(rows, places), full[torch.arange(4), places], rtol=1e-4, atol=1e-5
    )
    with torch.no_grad():
        after = asked.model(input_ids=rows, attention_mask=torch.ones_like(rows)).logits
    assert torch.equal(after, full), "the model is left as it was"


def alone(asked: MaskedWords, text: str, begin: int, end: int, count: int) -> list[str] | None:
    """The definition, with nothing batched, gathered or shared; None where these characters are not
    one known token."""
    tokenizer, words = asked.tokenizer, whole_words(asked.tokenizer)
    row = tokenizer(text, return_offsets_mapping=True)
    own = text[begin:end]
    places = [
        i for i, (b, e) in enumerate(row["offset_mapping"]) if e == end and text[b:e].strip() == own
    ]
    ids = list(row["input_ids"])
    inside = [1 for b, e in row["offset_mapping"] if b < end and e > begin and text[b:e].strip()]
    if len(places) != 1 or len(inside) != 1 or ids[places[0]] == tokenizer.unk_token_id:
        return None
    ids[places[0]] = tokenizer.mask_token_id
    with torch.no_grad():
        logits = asked.model(input_ids=torch.tensor([ids])).logits[0, places[0]]
    likely = [words[i] for i in logits.argsort(descending=True).tolist() if i in words]
    of_script = [word for word, spaceless in likely if spaceless == bool(SPACELESS.match(own))]
    return [word for word in of_script if word.casefold() != own.casefold()][:count]


@pytest.mark.parametrize("kind", KINDS)
def test_batched_is_what_one_query_a_word_says(kind):
    asked = masked_words_of(kind)
    found = asked.candidates(TEXTS, 4)
    for text, of_text in zip(TEXTS, found, strict=True):
        for word, likely in of_text:
            assert likely == alone(asked, text, word.begin, word.end, 4), text[
                word.begin : word.end
            ]
    assert sum(likely is not None for of_text in found for _, likely in of_text) >= 12


def test_of_a_long_text_each_word_is_asked_within_the_piece_that_holds_it():
    asked = masked_words_of()
    # A query has two positions less than the model, and two special tokens.
    size = asked.model.config.max_position_embeddings - 4
    texts = ["the cat sat on a mat in ", "river where who ran the cat "]
    pieces = [" ".join((text * size).split()[:size]) for text in texts] + ["what"]
    assert len(asked.tokenizer.tokenize(pieces[0])) == size < 252
    (whole,) = asked.candidates([" ".join(pieces)], 3)
    apart = [likely for of_piece in asked.candidates(pieces, 3) for _, likely in of_piece]
    assert ([likely for _, likely in whole], len(apart)) == (apart, 2 * size + 1)


def test_a_tokenizer_without_mask_token_is_refused():
    tokenizer = type(tokenizer_of("bytes"))(
        tokenizer_object=tokenizer_of("bytes").backend_tokenizer, pad_token="[PAD]"
    )
    model = AutoModelForMaskedLM.from_config(tiny_config("bert", vocab_size=500))
    with pytest.raises(UsageError, match="no mask token") as error:
        MaskedWords(model, tokenizer, CPU)
    assert "masked language model" in error.value.hint
