"""A frozen teacher and what it says of a batch."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from kdcli.models.capture import Capture, capture, prepare_teacher
from kdcli.types import Batch, Needs, Signals


def compute_dtype(precision: str) -> torch.dtype:
    """The type of matrix products under what accelerate calls `bf16`, `fp16`, or another word for float32."""
    return {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)


def listening(teacher: PreTrainedModel, needs: Needs, device: torch.device, precision: str) -> Capture:
    """The teacher made ready: frozen, on the device, its weights in the compute dtype; see `compute_dtype`."""
    return capture(prepare_teacher(teacher.to(device), compute_dtype(precision)), needs)


def heard(listened: Capture, batch: Batch) -> Signals:
    """What a teacher that `listening` made ready has to say of a batch."""
    with torch.no_grad(), torch.autocast(batch["input_ids"].device.type, enabled=False):
        signals: Signals = listened(batch)
    return signals
