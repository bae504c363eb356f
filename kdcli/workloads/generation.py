"""Training and judging of models that generate: masked targets in training, as in UniLM, and decoding in judging."""

from typing import Any

import torch
from transformers import GenerationConfig

from kdcli.data.batches import BatchOrder, BucketOrder
from kdcli.data.labelled.features import TokenizedRows
from kdcli.data.text.masking import Masked, PassOrder, tokens_of
from kdcli.errors import UsageError
from kdcli.losses.vocabulary import labels_of, masked_ce
from kdcli.models.capture import capture
from kdcli.models.model import Model
from kdcli.models.modeling_unilm import sequence_mask
from kdcli.types import Batch, Job, Needs, StepLoss, Task, Term
from kdcli.workloads.predictions import Evaluator
from kdcli.workloads.settings import GenerationSettings


def check_no_text(task: Task, taken: bool) -> None:
    """Raise a `UsageError` for a task of generation where it is not `taken`."""
    if task.kind == "text" and not taken:
        raise UsageError(
            f"task {task.name} generates text, which this verb cannot do",
            "kdcli finetune, evaluate and the --eval-task of distill take such a task",
        )


def set_decoding(model: Any, settings: GenerationSettings) -> None:
    """Write how to decode into a model's `generation_config`, which is saved with it. Raises UsageError: the least
    tokens leave none for the end token."""
    if settings.min_tokens >= settings.max_tokens:
        raise UsageError(
            f"generation.min_tokens {settings.min_tokens} is not below max_tokens {settings.max_tokens}"
        )
    before = model.generation_config
    of_beams: dict[str, Any] = (
        {"length_penalty": settings.length_penalty, "early_stopping": False}
        if settings.beams > 1
        else {}
    )
    model.generation_config = GenerationConfig(
        eos_token_id=before.eos_token_id,
        pad_token_id=before.pad_token_id,
        num_beams=settings.beams,
        no_repeat_ngram_size=settings.no_repeat_ngram,
        min_new_tokens=settings.min_tokens,
        max_new_tokens=settings.max_tokens,
        **of_beams,
    )


def generation_job(
    evaluator: Evaluator,
    headed: Model,
    rows: TokenizedRows,
    order: BatchOrder | BucketOrder,
    settings: GenerationSettings,
    *,
    seed: int = 0,
    best: str | None = None,
    decodes: bool = False,
) -> Job:
    """The job that trains on `rows` with new masks in each pass, and judges by the loss at fixed masks and, where it
    selects by a metric or `decodes`, by decoded targets."""
    vocabulary = tokens_of(headed.tokenizer, headed.source)
    masked: dict[str, Any] = {
        "vocabulary": vocabulary,
        "share": settings.masked,
        "whole_words": False,
        "seed": seed,
    }
    generator: Any
    model, generator = capture(headed.model, Needs(masked_logits=True)), headed.model
    decodes = decodes or best is not None

    def step(batch: Batch) -> StepLoss:
        outputs = None
        if decodes and not torch.is_grad_enabled():
            outputs = decoded(generator, batch)
        mask = sequence_mask(batch["sources"], batch["attention_mask"])
        signals = model(batch | {"attention_mask": mask})
        loss = masked_ce(signals.logits, labels_of(signals), settings.label_smoothing)
        return StepLoss({"loss": Term(loss, "labels")}, outputs)

    held_out = Masked(evaluator.features.rows, static=True, **masked)
    metrics = evaluator.metrics if decodes else None
    examples = Masked(rows, static=False, **masked)
    return Job(
        {"model": model},
        step,
        examples,
        PassOrder(order),
        held_out,
        compute_metrics=metrics,
        best=best,
    )


def decoded(generator: Any, batch: Batch) -> torch.Tensor:
    """The ids of the targets that a model decodes for the sources of a batch, [B, T]."""
    sources = batch["sources"]
    at_S = torch.arange(int(sources.max()), device=sources.device)
    real = (at_S < sources[:, None]).long()
    ids = torch.where(
        real.bool(), batch["input_ids"][:, : len(at_S)], generator.generation_config.pad_token_id
    )
    targets: torch.Tensor = generator.generate(ids, real)
    return targets
