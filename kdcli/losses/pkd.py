"""Patient knowledge distillation: compare the first token's states of the layers below the last.

Sun et al. 2019, https://arxiv.org/abs/1908.09355, §3.2, eq. 7:

    L_PT = mean over rows, layers m and components of (h_S,m/‖h_S,m‖ - h_T,g(m)/‖h_T,g(m)‖)²

The term is called `patience`. Training on the task adds the labels and the soft targets (eq. 8).

When to use: teacher and student have similar layers, for example if the student consists of the
teacher's own lower layers. Prefer `soft-targets` if they do not, and `tinybert` to compare every
token and the attention too, in a stage of its own.

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

# PKD-Skip and PKD-Last are TinyBERT's maps without the embedding and the last layer.
MAPS: dict[str, Strategy] = {"skip": "uniform", "last": "top"}


class Settings(Section):
    """Settings of PKD.

    `layers` is `skip`, `last` or a list of pairs (see `kdcli.losses.layer_map`). `weight` is β.
    """

    layers: str = "skip"
    weight: float = Field(100.0, gt=0)


def objective(settings: Settings, teacher: ModelShape, student: ModelShape) -> Objective:
    """Build the loss. Its term `patience` is a weighted float32 scalar.

    It reads the first token's state of each compared layer. If the widths differ, a learned matrix
    per layer maps the student's states to the teacher's width. Raises ValueError if the map does
    not fit the two shapes, or if it compares no layer.
    """
    if settings.layers in MAPS:
        full_map = strategy_map(MAPS[settings.layers], teacher.layers, student.layers)
        pairs = {m: n for m, n in full_map.items() if 0 < m < student.layers}
        if not pairs:
            raise ValueError(
                f"loss.layers: {settings.layers} compares the layers below the student's last, "
                "but the student has a single layer; give a list of pairs, such as "
                f"1:{teacher.layers}"
            )
    else:
        pairs = written_map(settings.layers, teacher.layers, student.layers, list(MAPS))
    projections = nn.ModuleDict()
    if teacher.hidden != student.hidden:
        for m, n in pairs.items():
            projections[str(m)] = StateProjection(student.hidden, teacher.hidden, (m, n))

    def terms(t: Signals, s: Signals) -> dict[str, Tensor]:
        errors = []
        for m, n in pairs.items():
            first_BD = s.hidden[m][:, 0]
            if len(projections):
                first_BD = projections[str(m)](first_BD)
            target_BD = F.normalize(t.hidden[n][:, 0].detach().float(), dim=-1)
            # The authors' code takes the mean over D. The paper prints the sum, but its β of 10 to
            # 1000 fits the mean.
            errors.append(F.mse_loss(F.normalize(first_BD.float(), dim=-1), target_BD))
        return {"patience": settings.weight * torch.stack(errors).mean()}

    t_needs = Needs(hidden=frozenset(pairs.values()))
    s_needs = Needs(hidden=frozenset(pairs))
    return Objective(
        teacher_needs=t_needs,
        student_needs=s_needs,
        projections=projections,
        terms=terms,
        over=OVER,
    )
