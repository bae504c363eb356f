"""Linear probes measure the encoder, not the words themselves."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoTokenizer

from kdcli.data.demo import TASKS, TOPICS, _lexicon
from kdcli.metrics.probe import BATCH, _means, probe_demo
from kdcli.models.load import location

pytestmark = pytest.mark.slow

CHANCE = {"demo-topic": 1 / TOPICS, "demo-order": 1 / 2, "demo-coherence": 1 / 2}


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(location("demo"))


class Table(nn.Module):
    """An encoder that sees each token alone: row `id` of a table."""

    def __init__(self, table_VD):
        super().__init__()
        self.table_VD = nn.Parameter(table_VD)

    def forward(self, input_ids, attention_mask):
        return SimpleNamespace(last_hidden_state=self.table_VD[input_ids])


class Position(nn.Module):
    """Hidden states that say only where a token stands, and that padding is there."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, input_ids, attention_mask):
        place_BL = torch.arange(input_ids.shape[1]).expand_as(input_ids) * self.scale
        return SimpleNamespace(
            last_hidden_state=torch.stack([place_BL, 1.0 - attention_mask], dim=-1)
        )


@pytest.mark.parametrize("words", ["known", "unknown"])
def test_word_identity_alone_is_at_chance(tokenizer, words):
    """Training and validation examples have different words."""
    model = Table(torch.eye(len(tokenizer)) if words == "known" else torch.ones(len(tokenizer), 4))
    found = probe_demo(model, tokenizer)
    assert model.table_VD.grad is None
    assert set(found) == set(TASKS)
    for task, chance in CHANCE.items():
        assert found[task]["accuracy"] == pytest.approx(chance, abs=0.06)


def test_an_encoder_with_the_topic_of_words_scores(tokenizer):
    lexicon = _lexicon()
    table_VD = torch.zeros(len(tokenizer), TOPICS)
    for topic in range(TOPICS):
        for word in (*lexicon.nouns[topic], *lexicon.verbs[topic]):
            for form in (word, word + "s"):
                ids = tokenizer(form, add_special_tokens=False)["input_ids"]
                if len(ids) == 1:
                    table_VD[ids[0], topic] = 1.0
    assert probe_demo(Table(table_VD), tokenizer)["demo-topic"]["accuracy"] > 0.95


def test_padding_is_not_part_of_the_mean(tokenizer):
    texts = ["the a", "the a the a the a near , . and", "."]
    means = _means(Position(), tokenizer, texts)
    tokens = [len(tokenizer(t)["input_ids"]) for t in texts]
    assert (means[:, 0].tolist(), means[:, 1].tolist()) == (
        [(n - 1) / 2 for n in tokens],
        [0.0, 0.0, 0.0],
    )


def test_batches_do_not_change_the_features(tokenizer):
    texts = [f"the {'a ' * (i % 9)}near" for i in range(2 * BATCH + 20)]
    torch.manual_seed(0)
    model = Table(torch.randn(len(tokenizer), 8))
    whole = _means(model, tokenizer, texts)
    parts = np.concatenate([_means(model, tokenizer, [text]) for text in texts])
    assert (whole, whole.shape) == (pytest.approx(parts, abs=1e-6), (len(texts), 8))
