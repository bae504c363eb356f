"""Define the recipe sections that several verbs share, and the options of a run."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic.dataclasses import dataclass

from kdcli.errors import UsageError
from kdcli.recipe.options import DATA, GOAL, OF_OPTIONS, OUTPUT, RECIPE, RUN, TRAINING, Option

MAX_NUMBER = 10**9
MAX_PROCESSES = 1_024
TRACKER_NAMES = (
    "aim",
    "clearml",
    "comet_ml",
    "dvclive",
    "mlflow",
    "swanlab",
    "tensorboard",
    "trackio",
    "wandb",
)
"""The trackers of accelerate. They are listed here because help must not import accelerate."""

RecipeValues = dict[str, Any]
"""Keys of a recipe and their values as YAML holds them: mappings, lists, text, numbers, None.

A field of this type is checked elsewhere, such as by the file of a method.
"""

BatchSize = Annotated[int, Field(gt=0, le=10**6)]
Length = Annotated[int, Field(ge=8, le=2**20)]
"""Tokens per row."""
DATA_OPTION = Option("--data", panel=DATA, metavar="SOURCE", values="data")
PartitionFile = Annotated[
    str | None,
    Field(
        description="File of a run of compress with its selection rows, which replace the "
        "validation split, and its verification rows, which are never trained on.",
    ),
]
_ROWS = "Rows per optimiser step, over all devices and micro-batches"
_BATCH_SIZE = Option("--batch-size", panel=TRAINING, rare=True)
GlobalBatch = Annotated[
    BatchSize,
    _BATCH_SIZE,
    _BATCH_SIZE.of(
        "distill",
        f"{_ROWS} (default: 256 on text, 64 for embedding models, 32 on a task or for rerankers).",
    ),
    _BATCH_SIZE.of("cotrain", f"{_ROWS} (default: 128 on text, 32 on a task)."),
    Field(description=f"{_ROWS}."),
]
_EPOCHS = Option("--epochs", panel=TRAINING, excludes=("--max-steps",))
Epochs = Annotated[
    float,
    _EPOCHS,
    _EPOCHS.of("distill", "Epochs (default: 3; 1 for embedding models)."),
    _EPOCHS.of("cotrain", "Epochs (default: 10 on text, 3 on a task)."),
    Field(gt=0, le=10**6, description="Passes over the training data."),
]
_LR = Option("--lr", panel=TRAINING)
LearningRate = Annotated[
    float,
    _LR,
    _LR.of(
        "distill",
        "Peak learning rate (default: 3e-4 on text, 5e-4 for embedding models, 3e-5 on a task or "
        "for rerankers).",
    ),
    _LR.of("cotrain", "Peak learning rate (default: 5e-4 on text, 3e-5 on a task)."),
    Field(gt=0, description="Peak learning rate."),
]
Seed = Annotated[
    int,
    Option("--seed", panel=TRAINING, rare=True),
    Field(ge=0, lt=2**63, description="Seed of everything random: heads, order, dropout."),
]
Dtype = Annotated[
    Literal["auto", "fp32", "bf16", "fp16"],
    Option("--dtype", panel=TRAINING, rare=True),
    Field(description="Number format of the computation."),
]
EvalTasks = Annotated[
    list[str],
    Option("--eval-task", panel=DATA, metavar="TASK", values="task", rare=True),
    Field(
        description="Tasks on which the report also compares all models; may be repeated.",
    ),
]
MaxClassDrop = Annotated[
    float | None,
    Option("--max-class-drop", panel=GOAL, metavar="POINTS"),
    Field(
        gt=0,
        description="Maximum drop of any class, label or entity type, in points (1 point = 0.01), "
        "below the first model or the teacher; exit code 5.",
    ),
]
PricePerHour = Annotated[
    float | None,
    Option("--price-per-hour", panel=OUTPUT, metavar="PRICE"),
    Field(
        gt=0,
        description="Price of this machine per hour, in any currency; the report then gives the "
        "cost of a million texts.",
    ),
]

Init = Literal["teacher", "copied", "random"]
"""How a student starts: copied from its teacher and fitted to it, only copied, or random."""


class Section(BaseModel):
    """The base of every section of a recipe. Unknown keys and values of a wrong type are errors.

    The docstring below a field is its description.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    def own_defaults(self) -> Mapping[str, Mapping[str, object]]:
        """Return the defaults that depend on other keys: dotted key -> default, by origin."""
        return {}

    def check_parts(self) -> None:
        """Raise a UsageError for a part that is read later, such as a step of a pipeline."""

    @field_validator("*")
    @classmethod
    def _bounded(cls, value: object, info: ValidationInfo) -> object:
        """Check that integers are plausible sizes, counts or lengths. A seed has its own limit."""
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, int) and abs(number) > MAX_NUMBER and info.field_name != "seed":
                raise ValueError(f"must be at most {MAX_NUMBER:,}")
        return value


STEPS = "Optimiser steps, instead of --epochs (default: all steps of the epochs)."


class TrainSettings(Section):
    """`train:`, the training settings."""

    lr: LearningRate = 3e-4
    max_steps: Annotated[int | None, Option("--max-steps", panel=TRAINING)] = Field(
        None, gt=0, description=STEPS
    )
    epochs: Epochs = 3.0
    batch_size: GlobalBatch = 256
    micro_batch_size: BatchSize | None = None
    """Rows that a device processes at once (default: the most that fit)."""
    warmup_steps: int | None = Field(None, ge=0)
    """Number of warm-up steps (default: given by warmup_fraction)."""
    warmup_fraction: float = Field(0.05, ge=0, lt=1)
    """Share of the steps in which the learning rate rises."""
    lr_schedule: Literal["linear", "constant"] = "linear"
    """Whether the learning rate falls to 0 after the warm-up or stays constant."""
    weight_decay: float = Field(0.01, ge=0)
    """Weight decay of AdamW, except for biases and normalisation layers."""
    beta2: float = Field(0.999, gt=0, lt=1)
    """Second beta of AdamW."""
    clip: float = Field(1.0, gt=0)
    """Maximum norm of a model's gradient."""
    seed: Seed = 0
    dtype: Dtype = "auto"
    checkpoint_every: int = Field(500, gt=0)
    """Steps between checkpoints."""
    log_every: int = Field(10, gt=0)
    """Steps between lines of log.jsonl."""
    eval_every: int = Field(250, gt=0)
    """Steps between evaluations."""

    @property
    def trains(self) -> bool:
        """Whether any optimiser step is made."""
        return self.max_steps != 0


class MaskSettings(Section):
    """`data.mask:`, the tokens that a masked language model predicts."""

    share: float = Field(0.15, gt=0, lt=1)
    """Share of each row's tokens that is masked."""
    whole_words: bool = False
    """Whether to mask whole words, not tokens."""
    static: bool = False
    """Whether every pass over the data masks the same tokens."""


class MeasureSettings(Section):
    """`measure:`, the latency part of a report."""

    latency: bool = True
    """Whether to measure latency."""
    min_runs: int = Field(50, gt=0, le=10**6)
    """Minimum number of timed runs; the quartiles of fewer than 30 are rough, and fewer than 5
    count as unstable."""
    min_seconds: float = Field(5.0, ge=0, le=86_400)
    """Minimum time to measure, in seconds."""


class KdSettings(Section):
    """`kd:`, the loss against a teacher: T^2 KL(teacher || model) at temperature T."""

    weight: float = Field(0.5, ge=0, le=1)
    """Weight of the loss. The loss against the labels gets the rest. Some methods have another
    default."""
    temperature: float = Field(2.0, gt=0)
    """Temperature of both softmaxes."""


@dataclass(frozen=True, config=OF_OPTIONS)
class RunOptions:
    """Where and how to run. These options do not change the result.

    `stop_after` pauses the training in the run directory after this number of optimiser steps. The
    run then has a checkpoint and no report. A later call with `resume` continues it. `written` are
    files and directories that the command writes next to the run.
    """

    arguments: tuple[str, ...] = ()
    output_dir: Annotated[
        Path | None, Option("--output-dir", "-o", panel=RUN, metavar="DIR", values="output")
    ] = None
    """Output directory (default: a new directory in runs/)."""
    device: Annotated[str, Option("--device", panel=RUN, values="device")] = "auto"
    """Device: auto, cpu, cuda, mps, xpu or cuda:INDEX."""
    processes: Annotated[
        int | None,
        Option("--processes", panel=RUN, terminal=True, rare=True),
        Field(gt=0, le=MAX_PROCESSES),
    ] = None
    """Number of processes (default: one per CUDA device, else one)."""
    resume: Annotated[bool, Option("--resume", panel=RUN, excludes=("--overwrite",))] = False
    """Continue the run in the output directory (default: the newest unfinished run in runs/ with
    this recipe)."""
    overwrite: Annotated[bool, Option("--overwrite", panel=RUN, rare=True)] = False
    """Delete the run in the output directory first."""
    dry_run: Annotated[
        bool, Option("--dry-run", panel=RUN, terminal=True, excludes=("--push-to-hub",))
    ] = False
    """Estimate size, memory and time, and write nothing."""
    report_to: Annotated[
        str,
        Option(
            "--report-to",
            panel=OUTPUT,
            choices=("none", "all", *TRACKER_NAMES),
            metavar="NAME",
            rare=True,
        ),
    ] = "none"
    """Experiment tracker that follows the run."""
    push_to_hub: Annotated[
        str | None, Option("--push-to-hub", panel=OUTPUT, metavar="REPO", rare=True)
    ] = None
    """Repository to push the model to, private if it is new."""
    trust_remote_code: Annotated[bool, Option("--trust-remote-code", panel=RUN, rare=True)] = False
    """Run code that comes with the model."""
    strict_data: Annotated[bool, Option("--strict-data", panel=RUN, rare=True)] = False
    """Refuse data with rows that are empty, bad, repeated, or trained on."""
    stop_after: int | None = None
    written: tuple[Path, ...] = ()

    def command_line(self, verb: str) -> str | None:
        """Return the command as it was typed, without `--resume`, to repeat the whole run.

        The result is None if another verb runs `verb` as a step, or if Python called it.
        """
        words = self._words(verb, {})
        return None if words is None else shlex.join(words)

    def continuing_command(
        self,
        verb: str,
        folder: Path,
        changes: Mapping[str, str] | None = None,
        more: Sequence[str] = ("--resume",),
    ) -> str:
        """Return the command that continues a run of this command, without --overwrite.

        Python has no command, so the result then names the arguments of the call.

        Args:
            verb: The verb.
            folder: The directory of the run.
            changes: Option -> its new value.
            more: Flags to add; () for a finished run, which needs no --resume.
        """
        changes = changes or {}
        words = self._words(verb, {**changes, **({} if self.output_dir else {"-o": str(folder)})})
        if words is None:
            named = {"--output-dir": str(folder), **changes, **dict.fromkeys(more, True)}
            if self.overwrite:
                named["--overwrite"] = False
            names = [option.lstrip("-").replace("-", "_") for option in named]
            values = (f"{n}={value!r}" for n, value in zip(names, named.values(), strict=True))
            return f"the same call with {', '.join(values)}"
        return shlex.join([*(word for word in words if word != "--overwrite"), *more])

    def _words(self, verb: str, changes: Mapping[str, str]) -> list[str] | None:
        """Return the words of the command without `--resume`, and with other values of options."""
        if not self.arguments or self.arguments[0] != verb:
            return None
        # Managed restarts write `--resume auto`.
        before = ["", *self.arguments]
        words = ["kdcli"] + [
            word
            for last, word in zip(before, self.arguments, strict=False)
            if word != "--resume" and (last, word) != ("--resume", "auto")
        ]
        for option, value in changes.items():
            words = _with_option(words, option, value)
        return words

    def check_pushed(self, models: int) -> None:
        """Raise a UsageError if a run would push several models. A repository holds one model."""
        if self.push_to_hub is not None and models > 1:
            raise UsageError(
                f"--push-to-hub pushes one model, and this run makes {models}",
                "remove it, and push one of them afterwards: kdcli push DIR REPO",
            )


@dataclass(frozen=True, config=OF_OPTIONS)
class CommandOptions:
    """Options that the command line itself uses."""

    recipe: Annotated[
        str | None, Option("--recipe", "-r", panel=RECIPE, metavar="NAME|FILE", values="recipe")
    ] = None
    """Shipped recipe (kdcli recipes ls), or a YAML file."""
    sets: Annotated[
        list[str] | None, Option("--set", name="sets", panel=RECIPE, metavar="KEY.PATH=VALUE")
    ] = None
    """Set any key of the recipe; may be repeated."""
    revision: Annotated[str | None, Option("--revision", panel=RUN, metavar="REV", rare=True)] = (
        None
    )
    """Branch, tag or commit of the model, like MODEL@REV."""
    json: Annotated[bool, Option("--json", panel=OUTPUT, terminal=True, rare=True)] = False
    """Print the report as JSON."""
    quiet: Annotated[
        bool,
        Option("--quiet", "-q", panel=OUTPUT, terminal=True, excludes=("--verbose",), rare=True),
    ] = False
    """Print results and errors only."""
    verbose: Annotated[bool, Option("--verbose", "-v", panel=OUTPUT, terminal=True, rare=True)] = (
        False
    )
    """Also print the libraries' messages."""


def _with_option(words: list[str], option: str, value: str) -> list[str]:
    """Return the words of a command with another value of an option.

    The option may be missing. If it is repeated, all its values are replaced, because the last one
    counts.
    """
    if all(word.partition("=")[0] != option for word in words):
        return [*words, option, value]
    return [
        value if last == option else f"{option}={value}" if word.startswith(f"{option}=") else word
        for last, word in zip(["", *words], words, strict=False)
    ]
