"""The tasks of the embedded language: small, made by rule, always at hand."""

from __future__ import annotations

from kdcli.data.demo import TOPICS
from kdcli.types import Task

_ACCURACY = ("accuracy",)
_NOUNS = ("mairpo", "sada", "kargai", "taris", "baksti", "grinu")
"""A noun of each topic that is one token of the embedded tokenizer."""

TASKS = (
    Task("demo-topic", "class", ("text",), _ACCURACY, tuple(f"topic-{i}" for i in range(TOPICS)), words=_NOUNS),
    Task("demo-order", "class", ("text",), _ACCURACY, ("in-order", "swapped"), words=("is", "are")),
    Task("demo-coherence", "class", ("text",), _ACCURACY, ("same-topic", "other-topic"), words=("it", "they")),
)
