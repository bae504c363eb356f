"""A frozen teacher that computes signals."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import nn
from transformers import PreTrainedModel

from kdcli.engine.session import Session
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
        """Freeze a model and capture its signals.

        The model is put into eval mode, moved to the device and converted to the compute dtype.

        Args:
            source: The model's name in messages.
            model: The model.
            needs: The signals to capture.
            session: The device and compute dtype.
            pool: Pooling of an embedding model, which stays in float32.
        """
        model = prepare_teacher(model.to(session.device), session.compute_dtype)
        if pool is not None:
            pool.to(session.device).requires_grad_(False)
        return cls(source, capture(model, needs, pool))

    def signals(self, batch: Batch) -> Signals:
        """Compute the signals of a batch without gradients."""
        with torch.no_grad(), torch.autocast(batch["input_ids"].device.type, enabled=False):
            signals: Signals = self.captured(batch)
        return signals
