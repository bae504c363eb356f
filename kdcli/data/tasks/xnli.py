"""XNLI (Conneau et al. 2018, https://arxiv.org/abs/1809.05053).

Models are trained on English and evaluated in fifteen languages.
"""

from kdcli.types import Task

TASKS = (
    Task(
        "xnli",
        "class",
        ("premise", "hypothesis"),
        ("accuracy",),
        ("entailment", "neutral", "contradiction"),
        hub=("facebook/xnli", "{set}"),
        sets=(
            "en",
            "fr",
            "es",
            "de",
            "el",
            "bg",
            "ru",
            "tr",
            "ar",
            "vi",
            "th",
            "zh",
            "hi",
            "sw",
            "ur",
        ),
        hub_train=("facebook/xnli", "en"),
        words=("Yes", "Maybe", "No"),
    ),
)
