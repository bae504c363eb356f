"""The sections of a recipe that several verbs share: types, limits and defaults."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from kdcli.errors import UsageError

MOST = 10**9
BatchSize = Annotated[int, Field(gt=0, le=10**6)]
Epochs = Annotated[float, Field(gt=0, le=10**6)]
Length = Annotated[int, Field(ge=8, le=2**20)]
"""Tokens of a row."""

Init = Literal["teacher", "copied", "random"]
"""How a student starts: copied from its teacher and fitted to it, copied alone, or drawn."""


class Section(BaseModel):
    """Base of every section of a recipe: unknown keys and values of another type are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _bounded(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse whole numbers that no size, count or length can have; a seed has its own limit."""
        for number in value if isinstance(value, list) else [value]:
            if isinstance(number, int) and abs(number) > MOST and info.field_name != "seed":
                raise ValueError(f"must be at most {MOST:,}")
        return value


class TrainSettings(Section):
    """`train:`, shared by every verb that trains. `batch_size` is global: over all devices and micro-batches.
    After the warm-up the learning rate falls to 0 (`lr_schedule: linear`) or stays (`constant`)."""

    lr: float = Field(3e-4, gt=0)
    max_steps: int | None = Field(None, gt=0)
    epochs: Epochs = 3.0
    batch_size: BatchSize = 256
    micro_batch_size: BatchSize | None = None
    warmup_steps: int | None = Field(None, ge=0)
    warmup_fraction: float = Field(0.05, ge=0, lt=1)
    lr_schedule: Literal["linear", "constant"] = "linear"
    weight_decay: float = Field(0.01, ge=0)
    beta2: float = Field(0.999, gt=0, lt=1)
    clip: float = Field(1.0, gt=0)
    seed: int = Field(0, ge=0, lt=2**63)
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    checkpoint_every: int = Field(500, gt=0)
    log_every: int = Field(10, gt=0)
    eval_every: int = Field(250, gt=0)


class MaskSettings(Section):
    """`data.mask:`, the tokens a masked language model predicts: a `share` of each row, as whole words or pieces, drawn
    anew in every pass or `static`."""

    share: float = Field(0.15, gt=0, lt=1)
    whole_words: bool = False
    static: bool = False


class DataSettings(Section):
    """`data:` of verbs that read text; `mask` is for methods that mask it."""

    source: str = "Salesforce/wikitext:wikitext-103-raw-v1"
    max_length: Length = 128
    column: str | None = None
    pack_isolated: bool = False
    held_out_blocks: int = Field(256, gt=0)
    mask: MaskSettings = MaskSettings()


class MeasureSettings(Section):
    """`measure:`, the latency part of a report; each cell runs until both minima are reached."""

    latency: bool = True
    min_runs: int = Field(50, gt=0, le=10**6)
    min_seconds: float = Field(5.0, ge=0, le=86_400)


class KdSettings(Section):
    """`kd:`, the loss against a teacher: `weight`*T^2*KL(teacher || model) at temperature T; labels get the rest."""

    weight: float = Field(0.5, ge=0, le=1)
    temperature: float = Field(2.0, gt=0)


@dataclass(frozen=True)
class RunOptions:
    """Where and how to run; nothing here changes what comes out.

    `stop_after` pauses the training in the run's own directory after this many optimiser steps. The
    run then has a checkpoint and no report, and a later call with `resume` continues it.
    """

    arguments: tuple[str, ...] = ()
    output_dir: Path | None = None
    device: str = "auto"
    processes: int | None = None
    resume: bool = False
    overwrite: bool = False
    dry_run: bool = False
    report_to: str = "none"
    push_to_hub: str | None = None
    trust_remote_code: bool = False
    stop_after: int | None = None

    def check_pushed(self, models: int) -> None:
        """Raise a UsageError if a run of several models is to be pushed: a repository holds one."""
        if self.push_to_hub is not None and models > 1:
            raise UsageError(
                f"--push-to-hub pushes one model, and this run makes {models}",
                "leave it out, and push one of them afterwards: kdcli push DIR REPO",
            )
