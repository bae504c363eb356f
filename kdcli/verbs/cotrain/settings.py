"""The recipe of `kdcli cotrain`."""

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import Field

from kdcli.errors import UsageError
from kdcli.recipe.options import Option
from kdcli.recipe.sections import Section
from kdcli.workloads.settings import (
    TASK_KEYS,
    TEXT_DATA,
    TEXT_KEYS,
    TEXT_TRAINING,
    DownstreamSettings,
    OnTask,
    TrainingData,
    VariantSettings,
)

PRE_TRAINING: Mapping[str, object] = {
    "train.lr": 5e-4,
    "train.batch_size": 128,
    "train.epochs": 10.0,
}
ONLY_ON_TEXT = ("vocab_size", "community", *TEXT_KEYS)
"""Keys and sections that co-training on a task does not read."""
ONLY_ON_TASK = ("workload", *TASK_KEYS)
"""Keys and sections that co-training on text does not read."""


def parse_weights(text: str) -> list[float]:
    """Parse weights such as `1:1:1:4`. The recipe checks the values.

    Raises:
        UsageError: A part is not a number.
    """
    try:
        return [float(part) for part in text.split(":")]
    except ValueError:
        raise UsageError(
            f"--weights takes four numbers, got '{text}'",
            "student against labels : student from teacher : teacher against labels : teacher "
            "from student, for example 1:1:1:4",
        ) from None


class PairSettings(Section):
    """The two models that are trained together, and what they learn from."""

    teacher: Annotated[str | None, Option("teacher", metavar="TEACHER", values="model")] = None
    """Teacher: a hub id, a directory, or a shape such as 4x128: 4 layers of width 128."""
    student: Annotated[str | None, Option("student", metavar="STUDENT")] = None
    """Student: a hub id, a directory, or a shape such as 2x64."""
    base: Annotated[str | None, Option("--base", metavar="MODEL")] = None
    """Model that gives shapes their tokenizer and configuration, and on a task their weights too
    (default: the teacher on a task, none on text)."""
    mode: Annotated[
        Literal["standalone", "one-way", "reversed", "co-distillation"],
        Option("--mode", metavar="MODE"),
    ] = "co-distillation"
    """Who learns from whom; one-way: the student only; reversed: the teacher only."""
    weights: Annotated[
        list[float],
        Option("--weights", kind=str, parse=parse_weights, metavar="A:B:C:D", rare=True),
    ] = Field(default_factory=lambda: [1.0, 1.0, 1.0, 4.0])
    """Weights of the losses: student against labels, student from teacher, teacher against
    labels, teacher from student; the mode sets some of them to 0."""
    temperature: Annotated[float, Option("--temperature", rare=True)] = Field(1.0, gt=0)
    """Temperature of both softmaxes."""
    standalone: Annotated[bool, Option("--standalone/--no-standalone", rare=True)] = True
    """Also train both models without each other, for comparison."""
    dropout: float | None = Field(None, ge=0, lt=1)
    """Every dropout rate in training (default: the models' own)."""


class CommunitySettings(Section):
    """`community:`, a frozen pre-trained model that both models learn from (Community KD)."""

    model: Annotated[str | None, Option("--community", metavar="MODEL", rare=True)] = None
    """Frozen teacher of both models, from which shapes are copied (default: none)."""
    printed_order: bool = False
    """Whether the divergence is from each model to the frozen teacher, as the paper prints it."""
    layers: list[list[int]] | None = Field(None, min_length=2, max_length=2)
    """Layers that each model copies (default: evenly spaced ones, and their neighbours for a
    second model of the same shape)."""


class CotrainRecipe(VariantSettings, PairSettings, OnTask):
    """A recipe of `cotrain`. On a task, `keep: best` uses the student's metric."""

    verb: Literal["cotrain"] = "cotrain"
    vocab_size: Annotated[
        int, Option("--vocab-size", metavar="N", excludes=("--base", "--community"), rare=True)
    ] = Field(30_522, gt=0, le=10**6)
    """Number of tokens of a tokenizer that is trained from the text."""
    community: CommunitySettings = CommunitySettings()
    data: TrainingData = TrainingData()
    eval: DownstreamSettings = DownstreamSettings()

    def own_defaults(self) -> Mapping[str, Mapping[str, object]]:
        if self.task is not None:
            return {}
        return {
            "the paper's pre-training": PRE_TRAINING,
            "default on text": {**TEXT_DATA, **TEXT_TRAINING},
        }


RECIPES: dict[str, type[Section]] = {"cotrain": CotrainRecipe}
"""The recipe's settings model."""
