"""Tasks that generate text. Training predicts masked target tokens as in UniLM; scoring decodes."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from pydantic import Field
from torch import Tensor
from transformers import GenerationConfig

from kdcli.data.batches import BatchOrder, BucketOrder
from kdcli.data.labelled.features import TokenizedRows
from kdcli.data.text.masking import Masked, PassOrder, mask_vocabulary
from kdcli.errors import UsageError
from kdcli.losses.vocabulary import labels_of, masked_ce, soft_kl
from kdcli.models.capture import Capture
from kdcli.models.generation import load_generator
from kdcli.models.model import Model
from kdcli.models.modeling_unilm import sequence_mask
from kdcli.recipe.sections import Section, TrainSettings
from kdcli.types import Batch, Count, Job, Needs, Schedule, Signals, StepLoss, Task, Term
from kdcli.workloads.labelled import LabelledWorkload
from kdcli.workloads.predictions import Evaluator
from kdcli.workloads.settings import TaskHeadSettings
from kdcli.workloads.training import Keep, first_rows, freeze_unused, total_loss

MASKED_LOGITS = Needs(masked_logits=True)


class Settings(Section):
    """The `workload` section of tasks that generate text."""

    masked: float = Field(0.7, gt=0, lt=1)
    """Share of target tokens that are masked in training."""
    label_smoothing: float = Field(0.1, ge=0, lt=1)
    """Probability mass spread over the vocabulary."""
    beams: int = Field(5, gt=0, le=100)
    """Number of beams; 1 decodes greedily."""
    length_penalty: float = Field(1.0, ge=-10, le=10)
    """Exponent of the length that divides a beam's log probability."""
    no_repeat_ngram: int = Field(0, ge=0, le=100)
    """Length of n-grams that must not repeat; 0 allows all repeats."""
    min_tokens: int = Field(0, ge=0, le=10_000)
    """Minimum number of generated tokens before the end token."""
    max_tokens: int = Field(48, gt=1, le=10_000)
    """Maximum number of generated tokens, including the end token."""


@dataclass
class GenerationWorkload(LabelledWorkload):
    """A task whose targets are texts. The loss is computed on the masked tokens of each target.

    Attributes:
        generation: Masking and decoding settings.
    """

    generation: Settings = field(default_factory=Settings)
    needs: Needs = MASKED_LOGITS
    one_pass: bool = False

    def masked(self, rows: TokenizedRows, *, static: bool, seed: int) -> Masked:
        """Mask a share of the target tokens in every batch.

        Args:
            rows: The tokenised rows.
            static: Use the same masks in every pass.
            seed: Seed for drawing the masks.
        """
        vocabulary = mask_vocabulary(self.tokenizer, self.name)
        return Masked(rows, vocabulary, self.generation.masked, False, static, seed)

    def load(
        self, source: str, *, head: TaskHeadSettings, seed: int = 0, new_head: bool = True
    ) -> Model:
        task = self.data.task
        if not new_head:
            return load_generator(source, task, new_head=False)
        generation = self.generation
        return load_generation(source, task, generation, seed=seed)

    @property
    def over(self) -> Count:  # type: ignore[override]
        return "labels"

    def job(self, model: Model, settings: TrainSettings, keep: Keep) -> tuple[Job, Schedule]:
        plan = self.plan(settings)
        assert isinstance(plan.order, BucketOrder)
        decodes = keep == "best"
        job = self._job(model, self.train_rows, plan.order, settings.seed, decodes=decodes)
        freeze_unused(job.modules["model"], job.step(first_rows(self.train_rows)).total)
        return replace(job, best=self.metric if decodes else None), plan.schedule

    def evaluation_job(self, model: Model, evaluator: Evaluator) -> Job:
        rows = evaluator.features.rows
        order = BatchOrder(max(1, len(rows)), 1, 0)
        reader = replace(self, evaluator=evaluator, tokenizer=model.tokenizer)
        return reader._job(model, rows, order, 0, decodes=True)

    def _job(
        self,
        model: Model,
        rows: TokenizedRows,
        order: BatchOrder | BucketOrder,
        seed: int,
        *,
        decodes: bool,
    ) -> Job:
        """Build a job that trains with new masks in each pass.

        Evaluation computes the loss with fixed masks.

        Args:
            model: The generator.
            rows: The training rows.
            order: The order of the training rows.
            seed: Seed for drawing the masks.
            decodes: Evaluation also decodes the targets and computes metrics.
        """
        assert self.evaluator is not None
        generator: Any = model.model
        captured = self.capture(model)

        def step(batch: Batch) -> StepLoss:
            outputs = None
            if decodes and not torch.is_grad_enabled():
                outputs = decoded(generator, batch)
            signals = self.forward(captured, batch)
            loss = total_loss(self.hard(signals, batch), signals)
            return StepLoss({"loss": Term(loss, self.over)}, outputs)

        held_out = self.masked(self.evaluator.features.rows, static=True, seed=seed)
        examples = self.masked(rows, static=False, seed=seed)
        metrics = self.evaluator.metrics if decodes else None
        modules = {"model": captured}
        return Job(modules, step, examples, PassOrder(order), held_out, compute_metrics=metrics)

    def forward(self, captured: Capture, batch: Batch) -> Signals:
        mask = sequence_mask(batch["sources"], batch["attention_mask"])
        signals: Signals = captured(batch | {"attention_mask": mask})
        return signals

    def hard(self, signals: Signals, batch: Batch) -> Mapping[str, Tensor]:
        smoothing = self.generation.label_smoothing
        assert signals.logits is not None
        return {"task": masked_ce(signals.logits, labels_of(signals), smoothing)}

    def soft(
        self, teacher: Signals, student: Signals, batch: Batch, temperature: float
    ) -> Mapping[str, Tensor]:
        assert teacher.logits is not None
        assert student.logits is not None
        return {"kd": soft_kl(teacher.logits, student.logits, temperature)}


def load_generation(
    source: str,
    task: Task,
    settings: Settings | None,
    *,
    seed: int,
) -> Model:
    """Load a masked language model to train as a generator.

    Args:
        source: The model.
        task: The task.
        settings: The recipe's `generation` section; None for the defaults.
        seed: Seed for new weights.

    Raises:
        UsageError: The model cannot be loaded or cannot generate text, or `min_tokens` is not below
            `max_tokens`.
    """
    model = load_generator(source, task, new_head=True, seed=seed)
    set_decoding(model.model, settings or Settings())
    return model


def set_decoding(model: Any, settings: Settings) -> None:
    """Store the decoding settings in a model's `generation_config`.

    Raises:
        UsageError: `min_tokens` is not below `max_tokens`, so there is no room for the end token.
    """
    if settings.min_tokens >= settings.max_tokens:
        raise UsageError(
            f"workload.min_tokens {settings.min_tokens} is not below max_tokens "
            f"{settings.max_tokens}",
            "lower min_tokens or raise max_tokens",
        )
    before = model.generation_config
    beam_settings: dict[str, Any] = {}
    if settings.beams > 1:
        beam_settings = {"length_penalty": settings.length_penalty, "early_stopping": False}
    model.generation_config = GenerationConfig(
        eos_token_id=before.eos_token_id,
        pad_token_id=before.pad_token_id,
        num_beams=settings.beams,
        no_repeat_ngram_size=settings.no_repeat_ngram,
        min_new_tokens=settings.min_tokens,
        max_new_tokens=settings.max_tokens,
        **beam_settings,
    )


def decoded(generator: Any, batch: Batch) -> Tensor:
    """Decode the targets for the sources of a batch and return their token ids, [B, T]."""
    sources = batch["sources"]
    at_S = torch.arange(int(sources.max()), device=sources.device)
    real = (at_S < sources[:, None]).long()
    pad_id = generator.generation_config.pad_token_id
    ids = torch.where(real.bool(), batch["input_ids"][:, : len(at_S)], pad_id)
    targets: Tensor = generator.generate(ids, real)
    return targets
