"""A frozen teacher and its signals."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import nn
from transformers import PreTrainedModel

from kdcli.engine.launch import Session
from kdcli.models.capture import Capture, capture, prepare_teacher
from kdcli.types import Batch, Needs, Signals


@dataclass(frozen=True)
class Teacher:
    """A frozen model and the signals captured from it."""

    source: str
    captured: Capture

    @classmethod
    def frozen(
        cls,
        source: str,
        model: PreTrainedModel,
        needs: Needs,
        session: Session,
        pool: nn.Module | None = None,
    ) -> Self:
        """The model in eval mode on the device, its weights in the compute dtype; `pool` stays in
        float32."""
        model = prepare_teacher(model.to(session.device), session.compute_dtype)
        if pool is not None:
            pool.to(session.device).requires_grad_(False)
        return cls(source, capture(model, needs, pool))

    def signals(self, batch: Batch) -> Signals:
        """The signals of one batch, without gradients."""
        with torch.no_grad(), torch.autocast(batch["input_ids"].device.type, enabled=False):
            signals: Signals = self.captured(batch)
        return signals
