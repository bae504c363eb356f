"""The recipes of `kdcli distill`."""

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from kdcli.recipe.methods import method_names
from kdcli.recipe.options import ON_TASK, Option
from kdcli.recipe.sections import (
    DataSettings,
    Init,
    KdSettings,
    MeasureSettings,
    RecipeValues,
    Section,
    TrainSettings,
)
from kdcli.workloads.settings import (
    SHAPE,
    START,
    TEACHER,
    CacheSize,
    DownstreamSettings,
    OnTask,
    RerankRecipe,
    ShapeSettings,
    StepsOrNone,
    StudentTrainSettings,
    VectorSettings,
)

ON_TEXT = tuple(method_names("kdcli.losses", "objective", "text", "masked", "sentences"))
ON_LABELS = tuple(method_names("kdcli.losses", "objective", "task"))
TeacherOption = Annotated[
    str | None,
    Option("teacher", metavar="TEACHER", values="model"),
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


class StudentSettings(ShapeSettings):
    """`student:` of `distill`."""

    to: Annotated[list[str], Option("--to", metavar="LxH[:FFN][@HEADS]", values="shape")] = Field(
        default_factory=list, description=SHAPE
    )
    init: Init = Field("teacher", description="How the student's weights start.")
    layers: list[int] | Literal["measured"] | None = Field(
        None,
        description="Teacher layers to copy; `measured` tries them on the texts "
        "(default: evenly spaced).",
    )
    dropout: float | None = Field(
        None, ge=0, lt=1, description="Every dropout rate in training (default: the teacher's)."
    )
    source: Annotated[str | None, Option("--student", metavar="DIR", values="model", rare=True)] = (
        Field(
            None,
            description=START,
        )
    )

    @property
    def copied(self) -> list[int] | None:
        """Teacher layers to copy; None for evenly spaced layers.

        A run replaces `measured` by the layers that it chose (`kdcli.verbs.distill.layers`).
        """
        assert self.layers != "measured"
        return self.layers


class RelationSettings(Section):
    """`relation:`, the relations of self-attention."""

    kernel: Literal["auto", "torch", "triton"] = Field(
        "auto",
        description="Backend of the relations: PyTorch, or Triton kernels on a CUDA device; "
        "auto takes Triton from compute capability 8.0 on.",
    )


class EmbeddingSettings(VectorSettings):
    """`embedding:`, the settings of `method: embedding`."""

    dense: bool = Field(
        False,
        description="Whether a student that is narrower than its teacher's vectors gets a dense "
        "layer up to their width. Otherwise it learns their principal components.",
    )
    router: bool = Field(
        False,
        description="Whether to save router/ too, a sentence-transformers model that encodes "
        "queries with the student and documents with the teacher.",
    )
    vectors: Annotated[str | None, Option("--teacher-vectors", metavar="FILE", rare=True)] = Field(
        None,
        description="File of the teacher's vectors, .npy or .parquet (default: computed).",
    )


class OnTextDownstream(DownstreamSettings):
    """`eval:` of `distill` on text."""

    at: list[Annotated[int, Field(gt=0)]] = Field(
        default_factory=list, description="Steps after which the students are evaluated too."
    )


class TextTrainSettings(TrainSettings):
    """`train:` of `distill` on text, which may train nothing."""

    max_steps: StepsOrNone = None


class DistillRecipe(Section):
    """A recipe of `kdcli distill` on text."""

    purpose: ClassVar[str] = "distilling on text"

    verb: Literal["distill"] = "distill"
    teacher: TeacherOption = None
    more_teachers: MoreTeachers = Field(default_factory=list)
    method: Annotated[str, Option("--method", metavar="NAME", choices=ON_TEXT)] = Field(
        "minilm", description="Method on text."
    )
    assistant: Annotated[str, Option("--assistant", metavar="LxH", rare=True)] = Field(
        "auto", description="Shape of a teacher assistant, auto or none."
    )
    variants: dict[str, RecipeValues] = Field(
        default_factory=dict,
        description="Variants by name, each with the keys of method, assistant and loss that it "
        "changes; all learn from one pass of the teacher.",
    )
    student: StudentSettings = StudentSettings()
    loss: RecipeValues = Field(default_factory=dict, description="Settings of the method.")
    relation: RelationSettings = RelationSettings()
    data: DataSettings = DataSettings()
    train: TextTrainSettings = TextTrainSettings()
    eval: OnTextDownstream = OnTextDownstream()
    measure: MeasureSettings = MeasureSettings()
    embedding: EmbeddingSettings = EmbeddingSettings()


class GeneralSettings(Section):
    """`general:`, a run of `distill` on text whose student the task starts from."""

    use: bool = Field(False, description="Whether to distil on text first.")
    recipe: str | None = Field(
        None, description="Recipe of the run on text (default: the method's settings here)."
    )
    teacher: str | None = Field(
        None, description="Teacher of the run on text (default: the task's)."
    )
    source: Annotated[
        str | None,
        Option(
            "--corpus", panel=ON_TASK, metavar="SOURCE", values="data", enables="use", rare=True
        ),
    ] = Field(None, description="Text to distil on first (default: the recipe's).")
    run: Annotated[
        str | None,
        Option(
            "--general", panel=ON_TASK, metavar="DIR", values="output", enables="use", rare=True
        ),
    ] = Field(
        None,
        description="Directory of the run on text, which is reused once it is done "
        "(default: general/ in the output directory).",
    )
    overrides: RecipeValues = Field(
        default_factory=dict, description="Keys of distill that override its recipe."
    )


class AugmentSettings(Section):
    """`augment:`, copies of the training examples with other words (TinyBERT, algorithm 1)."""

    use: Annotated[bool, Option("--augment/--no-augment", panel=ON_TASK, show_default=False)] = (
        Field(False, description="Also train on copies of the examples with some words replaced.")
    )
    copies: int = Field(20, gt=0, le=10**4, description="Number of copies per example.")
    probability: float = Field(0.4, gt=0, le=1, description="Probability that a word is replaced.")
    candidates: int = Field(15, gt=0, le=10**4, description="Number of candidates per word.")
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
    ] = Field(
        None,
        description="Masked language model that proposes words (default: nearest neighbours).",
    )
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
    ] = Field(
        None,
        description="Word vectors for words of several tokens (default: the teacher's embeddings).",
    )
    predict: bool = Field(
        True, description="Whether the prediction stage trains on the copies too."
    )


class UndistilledSettings(Section):
    """`undistilled:`, the same student, fine-tuned without a teacher."""

    use: bool = Field(True, description="Whether to train this student for comparison.")
    overrides: RecipeValues = Field(
        default_factory=dict, description="Keys of finetune that override the task's recipe."
    )


class TaskDistillRecipe(OnTask):
    """A recipe of `kdcli distill --task`."""

    purpose: ClassVar[str] = "distilling on a task"

    verb: Literal["distill-task"] = "distill-task"
    teacher: TeacherOption = None
    more_teachers: MoreTeachers = Field(default_factory=list)
    soft_labels: Annotated[
        str | None, Option("--soft-labels", panel=ON_TASK, metavar="FILE", rare=True)
    ] = Field(
        None,
        description="File of the rows' probabilities or scores, in place of a teacher "
        "(default: none).",
    )
    method: Annotated[str, Option("--method", metavar="NAME", choices=ON_LABELS)] = Field(
        "tinybert", description="Method on a task."
    )
    stage: Literal["separate", "joint", "none"] | None = Field(
        None,
        description="Whether the method's loss is trained before the prediction stage, is part "
        "of its loss, or is skipped (default: the method's).",
    )
    student: StudentSettings = StudentSettings()
    loss: RecipeValues = Field(default_factory=dict, description="Settings of the method.")
    relation: RelationSettings = RelationSettings()
    train: StudentTrainSettings = StudentTrainSettings()
    kd: KdSettings = KdSettings()
    general: GeneralSettings = GeneralSettings()
    augment: AugmentSettings = AugmentSettings()
    intermediate: RecipeValues = Field(
        default_factory=lambda: {"lr": 5e-5, "epochs": 20.0},
        description="Keys of train that differ in the separate stage.",
    )
    undistilled: UndistilledSettings = UndistilledSettings()
    cache_gb: CacheSize = 8.0


@dataclass(frozen=True)
class DistillOptions:
    """Options of `kdcli distill` that set no recipe key of their own."""

    ablate: Annotated[
        str | None,
        Option(
            "--ablate",
            metavar="NAME",
            recipes=("distill", "distill-task"),
            excludes=("--augment-only",),
            rare=True,
        ),
        Field(description="List of variants to train and compare in one table."),
    ] = None
    augment_only: Annotated[
        Path | None,
        Option(
            "--augment-only",
            panel=ON_TASK,
            metavar="FILE",
            recipes=("distill-task",),
            enables="augment.use",
            excludes=("--no-augment", "--resume", "--push-to-hub"),
            terminal=True,
            rare=True,
        ),
        Field(description="Write the copies as jsonl, and stop."),
    ] = None


RECIPES: dict[str, type[Section]] = {
    "distill": DistillRecipe,
    "distill-task": TaskDistillRecipe,
    "rerank": RerankRecipe,
}
"""The settings model of each folder of `recipes/`."""
OPTIONS = {"distill": DistillOptions}
