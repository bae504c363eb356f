"""SQuAD 1.1 and 2.0 (Rajpurkar et al. 2016, 2018, https://arxiv.org/abs/1606.05250, https://arxiv.org/abs/1806.03822)
and MLQA (Lewis et al. 2019, https://arxiv.org/abs/1910.07475), which is trained on SQuAD 1.1 and judged by language."""

from __future__ import annotations

from kdcli.types import Task

_SQUAD = ("rajpurkar/squad", None)
_TEXTS = ("question", "context")
_WORDS = ("Yes", "No")
"""Label words of start and end."""

TASKS = (
    Task("squad", "span", _TEXTS, ("f1", "exact"), label="answers", hub=_SQUAD, max_length=384, words=_WORDS),
    Task(
        "squad_v2",
        "span",
        _TEXTS,
        (
            *("f1", "exact", "best_f1", "best_f1_threshold", "best_exact", "best_exact_threshold"),
            *("answer_f1", "no_answer_accuracy"),
        ),
        label="answers",
        hub=("rajpurkar/squad_v2", None),
        impossible=True,
        max_length=384,
        words=_WORDS,
    ),
    Task(
        "mlqa",
        "span",
        _TEXTS,
        ("f1", "exact"),
        label="answers",
        hub=("facebook/mlqa", "mlqa.{set}.{set}"),
        sets=("en", "es", "de", "ar", "hi", "vi", "zh"),
        hub_train=_SQUAD,
        max_length=512,
        words=_WORDS,
    ),
)
