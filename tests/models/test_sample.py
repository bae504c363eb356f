"""Samples of text that a student is fitted to."""

import numpy as np
import torch
from encoders import CountingRows, tiny_encoder

from kdcli.data.text.corpus import Blocks
from kdcli.data.text.shards import Frame
from kdcli.models.sample import SAMPLE_TOKENS, sample_of


def test_random_tokens_are_in_the_vocabulary():
    teacher = tiny_encoder("bert", pad_token_id=63)
    assert int(sample_of(None, teacher.config, None)["input_ids"].max()) < 63


def test_a_sample_keeps_the_types_of_tokens():
    class Pairs(CountingRows):
        def batch(self, indices):
            batch = super().batch(indices)
            return batch | {"token_type_ids": batch["input_ids"] % 2}

    sample = sample_of(Pairs(), tiny_encoder("bert").config, 24)
    assert sample["token_type_ids"].shape == sample["input_ids"].shape
    assert torch.equal(sample["token_type_ids"], sample["input_ids"] % 2)


def test_a_sample_has_as_many_tokens_whatever_the_rows():
    config = tiny_encoder("bert").config
    sample = sample_of(CountingRows(), config, None)
    assert sample.keys() == {"input_ids", "attention_mask"}
    assert 0.9 * SAMPLE_TOKENS < int(sample["attention_mask"].sum()) < 1.1 * SAMPLE_TOKENS
    # The rows have 1 to 7 tokens, so a wider sample would be mostly padding.
    assert sample["input_ids"].shape[1] in (5, 6)
    assert sample["input_ids"][:, 0].unique().numel() > 10
    assert sample_of(CountingRows(), config, 4)["input_ids"].shape[1] == 4


def test_documents_apart_count_as_one_row_of_a_sample():
    class Stream:
        def read(self, at, count):
            return np.arange(at, at + count) % 60

    blocks = Blocks(Stream(), 0, 10, 16, Frame(1, 2, "[SEP]"), True)
    sample = sample_of(blocks, tiny_encoder("bert").config, None)
    assert sample["attention_mask"].shape == sample["input_ids"].shape == (10, 16)
    assert sample["attention_mask"].all()


def test_without_text_a_sample_is_of_random_tokens_that_are_no_padding():
    config = tiny_encoder("roberta", pad_token_id=1).config
    one, two = (sample_of(None, config, 20)["input_ids"] for _ in range(2))
    assert torch.equal(one, two)
    assert one.shape == (64, 20)
    assert not (one == 1).any()
    assert one.unique().numel() == config.vocab_size - 1
