"""Lossless compaction: a masked model without the rows, columns and heads that compute nothing.

Of a layer, in exact arithmetic and without dropout:

* a feed-forward unit whose row of U is empty gives act(bias) for every token, which goes into D's
  bias. One whose column of D is empty gives nothing. Both are removed.
* a dimension of V whose row is empty gives its bias for every token, as attention weights add up to
  1: it goes into O's bias. One whose column of O is empty gives nothing. A head without V is
  removed as a whole.
* a dimension whose row of K is empty adds the same to a query's scores of all keys, which the
  softmax cancels. With an empty row of Q and a bias b, it adds b · (row of K · x): all such
  dimensions of a head become one, with the sum of those rows.
* empty rows and columns that are left in a matrix, where they are enough to pay for the copy that
  skipping them takes.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from kdcli.errors import UsageError
from kdcli.models.custom_class import COMPACT, custom_class, empty_model, load_tensors
from kdcli.models.layout import PATHS, layout_for, linears

# Share of empty rows, or columns, from which a matrix skips them; below, picking the others costs
# what it saves.
SKIP_ABOVE = 0.5


def compact(model: PreTrainedModel, *, drop_rows_below: int = 0) -> PreTrainedModel:
    """A smaller model that computes the same, of class `Compact...` with the sizes of its layers in
    `config.compact_layers`; the given one, with its removed weights at zero and in eval mode, stays
    as it is.
    `drop_rows_below`: treat rows with fewer weights as empty, which changes the outputs; 0 or 1
    changes nothing. Raises UsageError: a model type that cannot be compacted, or a compacted model.
    """
    kind = str(model.config.model_type)
    if kind not in PATHS:
        raise UsageError(f"{kind} cannot be compacted", f"supported: {', '.join(sorted(PATHS))}")
    if hasattr(model.config, COMPACT):
        raise UsageError("the model is compacted already", "compact the masked model again")
    layout, base = layout_for(model.config), model.base_model
    prefix = "" if base is model else f"{model.base_model_prefix}."
    act = ACT2FN[str(getattr(model.config, "hidden_act", None) or model.config.activation)]
    attention, output, up, down = PATHS[kind]
    names = {"Q": f"{attention}.query", "K": f"{attention}.key", "V": f"{attention}.value"}
    names |= {"O": output or f"{attention}.output", "U": up, "D": down}
    inside = f"{prefix}{layout.layers}."
    state = {
        name: tensor.clone()
        for name, tensor in model.state_dict().items()
        if not name.startswith(inside)
    }
    sizes: list[dict[str, Any]] = []
    for number, layer in enumerate(layout.modules(base)):
        parts = {
            letter: _Part(of[0][0], drop_rows_below)
            for letter, of in linears(layout, layer).items()
        }
        size: dict[str, Any] = {"heads": _attention(parts, layout.heads(layer))}
        _feed_forward(parts, act)
        for letter, part in parts.items():
            tensors, size[letter] = part.packed()
            state |= {f"{inside}{number}.{names[letter]}.{name}": t for name, t in tensors.items()}
        replaced = tuple(f"{path}." for path in PATHS[kind] if path)
        rest = {n: t for n, t in layer.state_dict().items() if not n.startswith(replaced)}
        state |= {f"{inside}{number}.{name}": tensor.clone() for name, tensor in rest.items()}
        sizes.append(size)
    config = copy.deepcopy(model.config)
    config.compact_layers, config.architectures = sizes, [f"Compact{type(model).__name__}"]
    compact_class = custom_class(config)
    assert compact_class is not None
    return load_tensors(empty_model(compact_class, config), state, base)


class _Part:
    """A linear while it is made smaller, in float64: its weight [rows, columns] and bias [rows]."""

    def __init__(self, linear: nn.Linear, drop_rows_below: int) -> None:
        self.dtype = linear.weight.dtype
        self.weight = linear.weight.detach().double().cpu().clone()
        self.weight[self.weight.count_nonzero(1) < drop_rows_below] = 0
        rows = self.weight.shape[0]
        self.bias = (
            torch.zeros(rows).double()
            if linear.bias is None
            else linear.bias.detach().double().cpu().clone()
        )

    @property
    def rows(self) -> Tensor:  # which rows hold a weight, bool
        return self.weight.any(1)

    @property
    def columns(self) -> Tensor:  # which columns hold a weight, bool
        return self.weight.any(0)

    def fold(self, constant: Tensor) -> None:
        """Add to the bias what inputs that are the same for every token contribute (0 for the
        others)."""
        self.bias = self.bias + self.weight @ constant

    def packed(self) -> tuple[dict[str, Tensor], tuple[int, int, int, int]]:
        """The tensors of a `CompactLinear` and its size."""
        (wide_out, wide_in), weight, tensors = self.weight.shape, self.weight, {}
        columns, rows = _kept_if_few(self.columns), _kept_if_few(self.rows)
        if columns is not None:
            tensors["inputs"], weight = columns, weight[:, columns]
        if rows is not None:
            # All removed rows are read from one row of zeros.
            tensors["outputs"] = torch.full((wide_out,), len(rows))
            tensors["outputs"][rows] = torch.arange(len(rows))
            weight = torch.cat([weight[rows], weight.new_zeros(1, weight.shape[1])])
        tensors |= {"weight": weight.to(self.dtype).contiguous(), "bias": self.bias.to(self.dtype)}
        return tensors, (wide_in, wide_out, weight.shape[1], weight.shape[0])


def _kept_if_few(kept: Tensor) -> Tensor | None:
    """Indices of the kept rows or columns, at least one; None when too few are empty to skip
    them."""
    # The row of zeros counts as kept, and so does the one that stays where all are empty.
    if len(kept) - max(1, int(kept.sum())) - 1 < SKIP_ABOVE * len(kept):
        return None
    return kept.nonzero()[:, 0] if kept.any() else torch.zeros(1, dtype=torch.long)


def _feed_forward(parts: dict[str, _Part], act: nn.Module) -> None:
    """Remove units that are constant or not read."""
    up, down = parts["U"], parts["D"]
    down.fold(torch.where(up.rows, 0, act(up.bias)))
    kept = up.rows & down.columns
    if not kept.any():
        kept[0] = True  # no linear may be without a row
    up.weight, up.bias, down.weight = up.weight[kept], up.bias[kept], down.weight[:, kept]
    # A constant unit that stays all the same must not count twice.
    down.weight[:, ~up.rows] = 0


def _attention(parts: dict[str, _Part], heads: int) -> int:
    """Make the four linears of a layer smaller; returns how many heads are left."""
    q, k, v, o = (parts[letter] for letter in "QKVO")
    o.fold(torch.where(v.rows, 0, v.bias))
    kept_AK = (v.rows & o.columns).view(heads, -1)
    left = kept_AK.any(1)
    if not left.any():
        left[0] = True  # a layer needs a head; this one writes nothing
    each = kept_AK.shape[1]
    spans = [slice(a * each, (a + 1) * each) for a in left.nonzero()[:, 0].tolist()]
    scores = [_score_rows(q, k, span) for span in spans]
    values = [kept_AK.view(-1)[span].nonzero()[:, 0] + span.start for span in spans]
    # One width for all: torch's fast attention on the CPU needs keys and values of one width.
    width = max(1, *(len(rows[1]) for rows in scores), *(len(kept) for kept in values))
    q.weight, q.bias, k.weight, k.bias = (
        torch.cat([_padded(x, width) for x in xs]) for xs in zip(*scores, strict=True)
    )
    v.weight, v.bias = (
        torch.cat([_padded(x[kept], width) for kept in values]) for x in (v.weight, v.bias)
    )
    o.weight = torch.cat([_padded(o.weight[:, kept].T, width) for kept in values]).T
    return len(spans)


def _score_rows(q: _Part, k: _Part, span: slice) -> list[Tensor]:
    """Rows and biases of a head's Q, and of its K, that its attention scores depend on."""
    both, alone = q.rows[span] & k.rows[span], ~q.rows[span] & k.rows[span]
    rows = [x[span][both] for x in (q.weight, q.bias, k.weight, k.bias)]
    constant_D = (q.bias[span][alone, None] * k.weight[span][alone]).sum(0)
    if constant_D.any():
        added = (torch.zeros_like(constant_D), torch.ones(()), constant_D, torch.zeros(()))
        rows = [torch.cat([x, new.to(x)[None]]) for x, new in zip(rows, added, strict=True)]
    return rows


def _padded(x: Tensor, width: int) -> Tensor:
    return torch.cat([x, x.new_zeros(width - len(x), *x.shape[1:])])
