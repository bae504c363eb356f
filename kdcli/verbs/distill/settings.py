"""The recipe of `kdcli distill`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field
from pydantic.dataclasses import dataclass

from kdcli.recipe.methods import known_method, method_names
from kdcli.recipe.options import OF_OPTIONS, ON_TASK, Option
from kdcli.recipe.sections import Init, KdSettings, RecipeValues, Section
from kdcli.workloads import modules_by_task
from kdcli.workloads.settings import (
    SHAPE,
    START,
    TASK_KEYS,
    TEACHER,
    TEXT_DATA,
    TEXT_KEYS,
    TEXT_TRAINING,
    WITH_POOLING,
    WORKLOAD,
    CacheSize,
    DownstreamSettings,
    FinetuneTrainSettings,
    OnTask,
    ShapeSettings,
    StepsOrNone,
    TrainingData,
)

Kind = Literal["text", "embedding", "rows", "outputs"]
"""The data that a student learns from: blocks of text, the vectors of texts, the labelled rows of a
task, or a teacher's outputs on data of another kind."""
EMBEDDING, SOFT_TARGETS = "embedding", "soft-targets"
EMBEDDING_DEFAULTS: Mapping[str, object] = {"train.batch_size": 64, "train.epochs": 1.0}
EMBEDDING_RATE = 5e-4
"""The learning rate of an embedding student whose width is `RATE_WIDTH`."""
RATE_WIDTH = 384
STATIC_EMBEDDING_DEFAULTS: Mapping[str, object] = {
    "train.lr": 3e-3,
    "train.batch_size": 512,
    "train.micro_batch_size": 512,
    "train.epochs": 6.0,
    "loss.pairs_weight": 0.1,
}
"""Defaults if all students are static. A forward pass is cheap, but a gradient is a whole table."""
STATIC_DEFAULTS: Mapping[str, object] = {
    "train.lr": 3e-3,
    "train.batch_size": 256,
    "train.micro_batch_size": 256,
    "train.epochs": 3.0,
}
"""Defaults on a task if the student is static."""
SEPARATE_STAGE: Mapping[str, object] = {"lr": 5e-5, "epochs": 20.0}
"""Defaults of the keys of `intermediate`."""
ONLY_ON_TEXT = ("assistant", "variants", *TEXT_KEYS)
"""Keys and sections that a distillation on a task does not read."""
ONLY_ON_TASK = (
    "stage",
    "soft_labels",
    "kd",
    "general",
    "augment",
    "intermediate",
    "undistilled",
    "cache_gb",
    *TASK_KEYS,
)
"""Keys and sections that a distillation on text does not read."""
ON_TEXT = tuple(method_names("kdcli.losses", "objective", "text", "masked", "sentences"))
ON_LABELS = tuple(method_names("kdcli.losses", "objective", "task"))
METHODS = tuple(sorted({*ON_TEXT, *ON_LABELS}))
TeacherOption = Annotated[
    str | None,
    Option("teacher", metavar="TEACHER", values="teacher"),
    Option(
        "--teacher",
        name="named_teacher",
        metavar="MODEL|URL",
        values="teacher",
        description="Teacher, like TEACHER: often the address of a server that computes its "
        "vectors, such as http://localhost:8080.",
        terminal=True,
        rare=True,
    ),
    Field(description=TEACHER),
]
MoreTeachers = Annotated[
    list[str],
    Option("--also-teacher", name="more_teachers", metavar="MODEL", rare=True),
    Field(
        description="Further teacher with the same weight, on a task or of an embedding student; "
        "may be repeated."
    ),
]


def at_width(rate: float, width: int) -> float:
    """Return a learning rate that was chosen at `RATE_WIDTH` for another width.

    It is inversely proportional to the width: large steps drive wide students from their start.
    """
    return float(f"{rate * RATE_WIDTH / width:.2g}")


def widest(shapes: Sequence[str]) -> int:
    """Return the width of the widest of some shapes with layers."""
    from kdcli.models.grammar import is_static_shape, match_shape

    single = [one for text in shapes for one in text.split(",") if not is_static_shape(one)]
    return max(int(match_shape(one)[2]) for one in single)


def as_list(shapes: object) -> object:
    """Return a single shape as a list of one shape."""
    return [shapes] if isinstance(shapes, str) else shapes


class StudentSettings(ShapeSettings):
    """`student:` of `distill`."""

    to: Annotated[
        list[str],
        BeforeValidator(as_list),
        Option("--to", metavar="LxH[:FFN][@HEADS]", values="shape"),
    ] = Field(default_factory=list, description=SHAPE)
    init: Init = "teacher"
    """How the student's weights start."""
    layers: list[int] | list[list[int]] | Literal["measured"] | None = None
    """Teacher layers to copy: a list, a list for each depth, or `measured` to choose them by trial
    (default: `measured` for embedding models with 12 or more layers, otherwise evenly spaced)."""
    dropout: float | None = Field(None, ge=0, lt=1)
    """Every dropout rate in training (default: the teacher's)."""
    source: Annotated[
        str | None, Option("--student", metavar="MODEL", values="model", rare=True)
    ] = Field(
        None,
        description=START,
    )

    def copied(self, depth: int) -> list[int] | None:
        """Teacher layers to copy to a student of this depth; None for evenly spaced layers.

        A run replaces `measured` by the layers that it chose.
        """
        assert self.layers != "measured"
        lists = self.layer_lists
        # `build_student` refuses a list of the wrong length.
        return next((one for one in lists if len(one) == depth), next(iter(lists), None))

    @property
    def layer_lists(self) -> list[list[int]]:
        """The lists in `layers`; empty for `measured` and None."""
        if not isinstance(self.layers, list):
            return []
        lists = [one for one in self.layers if isinstance(one, list)]
        return lists or [[one for one in self.layers if isinstance(one, int)]]


class RelationSettings(Section):
    """`relation:`, the relations of self-attention."""

    kernel: Literal["auto", "torch", "triton"] = "auto"
    """Backend of the relations: PyTorch, or Triton kernels on a CUDA device; auto takes Triton
    from compute capability 8.0 on."""


class OnTextDownstream(DownstreamSettings):
    """`eval:` of `distill` on text."""

    at: list[Annotated[int, Field(gt=0)]] = Field(default_factory=list)
    """Steps after which the students are evaluated too."""


class GeneralSettings(Section):
    """`general:`, a run of `distill` on text whose student the task starts from."""

    use: bool = False
    """Whether to distil on text first."""
    recipe: str | None = None
    """Recipe of the run on text (default: the method's settings here)."""
    teacher: str | None = None
    """Teacher of the run on text (default: the task's)."""
    source: Annotated[
        str | None,
        Option(
            "--corpus", panel=ON_TASK, metavar="SOURCE", values="data", enables="use", rare=True
        ),
    ] = None
    """Text to distil on first (default: the recipe's)."""
    run: Annotated[
        str | None,
        Option(
            "--general", panel=ON_TASK, metavar="DIR", values="output", enables="use", rare=True
        ),
    ] = None
    """Directory of the run on text, which is reused once it is done (default: general/ in the
    output directory)."""
    overrides: RecipeValues = Field(default_factory=dict)
    """Keys of distill that override its recipe."""


class AugmentSettings(Section):
    """`augment:`, copies of the training examples with other words (TinyBERT, algorithm 1)."""

    use: Annotated[bool, Option("--augment/--no-augment", panel=ON_TASK, show_default=False)] = (
        False
    )
    """Also train on copies of the examples with some words replaced."""
    copies: int = Field(20, gt=0, le=10**4)
    """Number of copies per example."""
    probability: float = Field(0.4, gt=0, le=1)
    """Probability that a word is replaced."""
    candidates: int = Field(15, gt=0, le=10**4)
    """Number of candidates per word."""
    model: Annotated[
        str | None,
        Option(
            "--augment-model",
            panel=ON_TASK,
            metavar="MODEL",
            enables="use",
            excludes=("--no-augment",),
            rare=True,
        ),
    ] = None
    """Masked language model that proposes words (default: nearest neighbours)."""
    glove: Annotated[
        str | None,
        Option(
            "--glove",
            panel=ON_TASK,
            metavar="FILE",
            enables="use",
            excludes=("--no-augment",),
            rare=True,
        ),
    ] = None
    """Word vectors for words of several tokens (default: the teacher's embeddings)."""
    predict: bool = True
    """Whether the prediction stage trains on the copies too."""


class UndistilledSettings(Section):
    """`undistilled:`, the same student, fine-tuned without a teacher."""

    use: bool = True
    """Whether to train this student for comparison."""
    overrides: RecipeValues = Field(default_factory=dict)
    """Keys of finetune that override the task's recipe."""


class DistillTrainSettings(FinetuneTrainSettings):
    """`train:` of `distill`, which may train nothing."""

    max_steps: StepsOrNone = None


class DistillRecipe(OnTask):
    """A recipe of `kdcli distill`."""

    verb: Literal["distill"] = "distill"
    teacher: TeacherOption = None
    more_teachers: MoreTeachers = Field(default_factory=list)
    soft_labels: Annotated[
        str | None, Option("--soft-labels", panel=ON_TASK, metavar="FILE", rare=True)
    ] = None
    """File of the rows' probabilities or scores, in place of a teacher (default: none)."""
    method: Annotated[
        str, Option("--method", metavar="NAME", choices=METHODS), known_method(METHODS)
    ] = "minilm"
    """Method (default: minilm on text, embedding for embedding models, tinybert on a task)."""
    assistant: Annotated[str, Option("--assistant", metavar="LxH", rare=True)] = "auto"
    """Shape of a teacher assistant, a model between teacher and student that is trained first;
    auto or none."""
    variants: dict[str, RecipeValues] = Field(default_factory=dict)
    """Variants on text by name, each with the keys of method, assistant and loss that it
    changes; all learn from one pass of the teacher."""
    stage: Literal["separate", "joint", "none"] | None = None
    """Whether the method's loss is trained before the prediction stage, is part of its loss, or
    is skipped (default: the method's)."""
    student: StudentSettings = StudentSettings()
    loss: RecipeValues = Field(default_factory=dict)
    """Settings of the method."""
    relation: RelationSettings = RelationSettings()
    workload: Annotated[
        RecipeValues,
        WITH_POOLING,
        Option(
            "--teacher-vectors",
            metavar="VECTORS",
            kind=str,
            key="vectors",
            description="Vectors of the teacher: a file, directory, pattern, URL or hub data set "
            "(default: computed).",
            rare=True,
        ),
    ] = Field(default_factory=dict, description=WORKLOAD)
    data: TrainingData = TrainingData()
    train: DistillTrainSettings = DistillTrainSettings()
    kd: KdSettings = KdSettings()
    general: GeneralSettings = GeneralSettings()
    augment: AugmentSettings = AugmentSettings()
    intermediate: RecipeValues = Field(default_factory=dict)
    """Keys of train that differ in the separate stage (default: lr 5e-5 and 20 epochs)."""
    undistilled: UndistilledSettings = UndistilledSettings()
    eval: OnTextDownstream = OnTextDownstream()
    cache_gb: CacheSize = 8.0

    @property
    def kind(self) -> Kind:
        """The kind of data that the student learns from."""
        if self.task is None:
            return "embedding" if self.method == EMBEDDING else "text"
        return "outputs" if self.task in modules_by_task() else "rows"

    def rate_at(self, width: int) -> Mapping[str, Mapping[str, object]]:
        """Return the learning rate of an embedding student of a width, by its origin."""
        origin = f"default of {EMBEDDING} at width {width}"
        return {origin: {"train.lr": at_width(EMBEDDING_RATE, width)}}

    def own_defaults(self) -> Mapping[str, Mapping[str, object]]:
        # This import loads numpy, and help imports this module.
        from kdcli.models.grammar import FAMILY, goal_of, is_family, is_static_shape

        static = bool(self.student.to) and all(map(is_static_shape, self.student.to))
        if self.kind == "text":
            return {"default on text": {**TEXT_DATA, **TEXT_TRAINING}}
        if self.kind == "embedding":
            on_text = {k: v for k, v in TEXT_TRAINING.items() if k != "train.lr"}
            own = {f"default of {EMBEDDING}": EMBEDDING_DEFAULTS}
            if static:
                own = {"default of static students": STATIC_EMBEDDING_DEFAULTS}
            elif self.student.to not in ([], [FAMILY]) and goal_of(self.student.to) is None:
                own |= self.rate_at(widest(self.student.to))
            return {**own, "default on text": {**TEXT_DATA, **on_text}}
        # Neither a file nor a static student has token states.
        without_states = self.kind == "outputs" or static or self.soft_labels is not None
        method = {"method": SOFT_TARGETS if without_states else "tinybert"}
        defaults: dict[str, Mapping[str, object]] = {"default on a task": method}
        if self.kind == "rows":
            # A user who sets one key of this mapping keeps the defaults of the others.
            defaults["default of the separate stage"] = {
                f"intermediate.{key}": value
                for key, value in SEPARATE_STAGE.items()
                if key not in self.intermediate
            }
        if static:
            defaults["default of static students"] = STATIC_DEFAULTS
        if self.kind == "rows" and is_family(self.student.to):
            defaults["default of a family"] = {"undistilled.use": False}
        return defaults


@dataclass(frozen=True, config=OF_OPTIONS)
class DistillOptions:
    """Options of `kdcli distill` that set no recipe key of their own."""

    ablate: Annotated[
        str | None,
        Option(
            "--ablate",
            metavar="NAME",
            excludes=("--augment-only",),
            rare=True,
        ),
    ] = None
    """List of variants to train and compare in one table."""
    augment_only: Annotated[
        Path | None,
        Option(
            "--augment-only",
            panel=ON_TASK,
            metavar="FILE",
            enables="augment.use",
            excludes=("--no-augment", "--resume", "--push-to-hub"),
            terminal=True,
            rare=True,
        ),
    ] = None
    """Write the copies as jsonl, and stop."""


RECIPES: dict[str, type[Section]] = {"distill": DistillRecipe}
"""The recipe's settings model."""
OPTIONS = {"distill": DistillOptions}
