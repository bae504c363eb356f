"""A frozen teacher and its signals."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import nn
from transformers import PreTrainedModel

from kdcli.engine.launch import Session
from kdcli.models.capture import Capture, capture, prepare_teacher
from kdcli.targets.sharded import reshard, sharded, to_be_sharded
from kdcli.types import Batch, Needs, Signals


@dataclass(frozen=True)
class Teacher:
    """A frozen model and the signals captured from it."""

    source: str
    captured: Capture
    sharded: bool = False

    @classmethod
    def frozen(
        cls,
        source: str,
        model: PreTrainedModel,
        needs: Needs,
        session: Session,
        pool: nn.Module | None = None,
    ) -> Self:
        """The model in eval mode on the device, its weights in the compute dtype; `pool` stays in float32."""
        model = prepare_teacher(model.to(session.device), session.compute_dtype)
        if pool is not None:
            pool.to(session.device).requires_grad_(False)
        return cls(source, capture(model, needs, pool))

    @classmethod
    def of_every_step(
        cls, source: str, model: PreTrainedModel, needs: Needs, session: Session
    ) -> Self:
        """As `frozen`, of a teacher that all processes read in every step; sharded if asked for, or if it does not
        fit."""
        if not to_be_sharded(model, session):
            return cls.frozen(source, model, needs, session)
        captured = capture(sharded(prepare_teacher(model, session.compute_dtype), session), needs)
        # It stops at the last signal needed, with the weights of that layer gathered.
        captured.register_forward_hook(lambda *_: reshard(captured.model), always_call=True)
        return cls(source, captured, sharded=True)

    def signals(self, batch: Batch) -> Signals:
        """The signals of one batch, without gradients."""
        with torch.no_grad(), torch.autocast(batch["input_ids"].device.type, enabled=False):
            signals: Signals = self.captured(batch)
        return signals
