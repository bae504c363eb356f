"""Patient knowledge distillation: first-token states of the layers below the last (Sun et al. 2019,
https://arxiv.org/abs/1908.09355, §3.2, eq. 7).

    L_PT = mean over rows, layers m and components of (h_S,m/‖h_S,m‖ - h_T,g(m)/‖h_T,g(m)‖)²        `patience`

Labels and soft targets (eq. 8) are added by the training on the task.

Relations: take it over `soft-targets` when teacher and student have similar layers, such as a student of the teacher's
own lower layers. `tinybert` compares every token and the attention too, in a stage before.

    method: pkd
    loss: {layers: skip, weight: 100.0}
"""

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from kdcli.losses.layer_map import Strategy, strategy_map, written_map
from kdcli.losses.states import StateProjection
from kdcli.recipe.sections import Section
from kdcli.types import Count, ModelShape, Needs, Objective, Signals

OVER: dict[str, Count] = {"patience": "rows"}
INPUTS = frozenset({"task"})
STAGE = "joint"
KD = {"weight": 0.5, "temperature": 5.0}

# PKD-Skip and PKD-Last: TinyBERT's maps without embedding and last layer.
NAMED: dict[str, Strategy] = {"skip": "uniform", "last": "top"}


class Settings(Section):
    """`layers` is `skip`, `last` or a map written out (`kdcli.losses.layer_map`); `weight` is β."""

    layers: str = "skip"
    weight: float = Field(100.0, gt=0)


def objective(settings: Settings, teacher: ModelShape, student: ModelShape) -> Objective:
    """Raises ValueError if these shapes do not have such a map, or no student layer is below the last."""
    if settings.layers in NAMED:
        whole = strategy_map(NAMED[settings.layers], teacher.layers, student.layers)
        pairs = {m: n for m, n in whole.items() if 0 < m < student.layers}
        if not pairs:
            raise ValueError(
                f"loss.layers: {settings.layers} compares the layers below the student's last, of which a student "
                f"of one layer has none; write a map out, such as 1:{teacher.layers}"
            )
    else:
        pairs = written_map(settings.layers, teacher.layers, student.layers, list(NAMED))
    projections = nn.ModuleDict()
    if teacher.hidden != student.hidden:
        projections.update(
            {
                str(m): StateProjection(student.hidden, teacher.hidden, (m, n))
                for m, n in pairs.items()
            }
        )

    def terms(t: Signals, s: Signals) -> dict[str, Tensor]:
        errors = []
        for m, n in pairs.items():
            first_BD = (
                projections[str(m)](s.hidden[m][:, 0]) if len(projections) else s.hidden[m][:, 0]
            )
            target_BD = F.normalize(t.hidden[n][:, 0].detach().float(), dim=-1)
            # A mean over D, as in the authors' code; the paper prints the sum, but its β of 10 to 1000 fit the mean.
            errors.append(F.mse_loss(F.normalize(first_BD.float(), dim=-1), target_BD))
        return {"patience": settings.weight * torch.stack(errors).mean()}

    t_needs, s_needs = Needs(hidden=frozenset(pairs.values())), Needs(hidden=frozenset(pairs))
    return Objective(
        teacher_needs=t_needs,
        student_needs=s_needs,
        projections=projections,
        terms=terms,
        over=OVER,
    )
