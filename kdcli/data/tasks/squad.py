"""Extractive question answering: SQuAD and MLQA.

* SQuAD 1.1 and 2.0: Rajpurkar et al. 2016, 2018, https://arxiv.org/abs/1606.05250 and
  https://arxiv.org/abs/1806.03822.
* MLQA: Lewis et al. 2019, https://arxiv.org/abs/1910.07475. Models are trained on SQuAD 1.1 and
  evaluated in each language.
"""

from kdcli.types import Task

IMPOSSIBLE_METRICS = (
    *("f1", "exact", "best_f1", "best_f1_threshold", "best_exact", "best_exact_threshold"),
    *("answer_f1", "no_answer_accuracy"),
)
_SQUAD = ("rajpurkar/squad", None)
_LANGUAGES = ("en", "es", "de", "ar", "hi", "vi", "zh")


def _task(
    name: str,
    metrics: tuple[str, ...] = ("f1", "exact"),
    max_length: int = 384,
    *,
    hub: tuple[str, str | None],
    hub_train: tuple[str, str | None] | None = None,
    sets: tuple[str, ...] = (),
    impossible: bool = False,
) -> Task:
    # The two label words stand for the start and the end of an answer.
    return Task(
        name,
        "span",
        ("question", "context"),
        metrics,
        label="answers",
        hub=hub,
        hub_train=hub_train,
        sets=sets,
        impossible=impossible,
        max_length=max_length,
        words=("Yes", "No"),
    )


TASKS = (
    _task("squad", hub=_SQUAD),
    _task("squad_v2", IMPOSSIBLE_METRICS, hub=("rajpurkar/squad_v2", None), impossible=True),
    _task(
        "mlqa",
        max_length=512,
        hub=("facebook/mlqa", "mlqa.{set}.{set}"),
        hub_train=_SQUAD,
        sets=_LANGUAGES,
    ),
)
