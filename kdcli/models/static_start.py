"""Make a static classifier for a task and a tokenizer, with random weights."""

import torch
from transformers import PreTrainedTokenizerBase

from kdcli.models.heads import describe_task
from kdcli.models.model import Model
from kdcli.models.static import StaticConfig, check_fast
from kdcli.models.static_classifier import StaticForSequenceClassification
from kdcli.types import Task


def random_classifier(
    teacher: Model, task: Task, width: int, seed: int
) -> StaticForSequenceClassification:
    """Make a static classifier with random weights.

    Args:
        teacher: The model whose tokenizer the student uses.
        task: The task, whose labels the student predicts.
        width: The width of the token vectors.
        seed: The seed of the weights.

    Raises UsageError: the teacher has no fast tokenizer, which a static model needs.
    """
    check_fast(teacher.tokenizer)
    config = StaticConfig(
        vocab_size=int(teacher.model.config.vocab_size),
        hidden_dim=width,
        normalize=False,
        framing_token_ids=framing_tokens(teacher.tokenizer),
    )
    describe_task(config, task)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return StaticForSequenceClassification(config)


def framing_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the ids of the special tokens that a tokenizer adds to a text or to a pair."""
    bare, framed = (
        set(tokenizer("a", "a", add_special_tokens=special)["input_ids"])
        for special in (False, True)
    )
    return sorted(framed - bare)
