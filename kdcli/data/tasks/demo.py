"""The tasks of the embedded language: small, made by rule, always at hand."""

from __future__ import annotations

from kdcli.data.demo import TOPICS
from kdcli.types import Task

_ACCURACY = ("accuracy",)

TASKS = (
    Task("demo-topic", "class", ("text",), _ACCURACY, tuple(f"topic-{i}" for i in range(TOPICS))),
    Task("demo-order", "class", ("text",), _ACCURACY, ("in-order", "swapped")),
    Task("demo-coherence", "class", ("text",), _ACCURACY, ("same-topic", "other-topic")),
)
