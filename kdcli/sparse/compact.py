"""Lossless compaction: what a masked model computes, without the rows, columns and heads that compute nothing.

Of a layer, in exact arithmetic and without dropout:

* a feed-forward unit whose row of U is empty gives act(bias) for every token, which D's bias takes over; one whose
  column of D is empty gives nothing. Both go.
* a dimension of V whose row is empty gives its bias for every token, as attention weights add up to 1: O's bias takes
  it over. One whose column of O is empty gives nothing. A head without V goes as a whole.
* a dimension whose row of K is empty adds the same to a query's scores of all keys, which the softmax takes out: it
  goes, whatever K's bias is. With an empty row of Q and a bias b, it adds b · (row of K · x): all such dimensions of
  a head become one, with the sum of those rows.
* empty rows and columns that are left in a matrix, when they are enough to pay for the copy that skipping them takes.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from kdcli.errors import UsageError
from kdcli.models.custom_class import COMPACT, custom_class, empty_model, load_tensors
from kdcli.models.layout import PATHS, layout_for, linears

WORTH_SKIPPING = 0.5
"""Share of a matrix's rows, or columns, that must be empty for the rest to be computed apart. Picking them out costs as
much as it saves below that (docs/results.md), though the file would be smaller."""


def compact(model: PreTrainedModel, *, drop_rows_below: int = 0) -> PreTrainedModel:
    """A smaller model that computes the same; the given one is left as it is.

    Args:
        model: with its removed weights at zero, in eval mode.
        drop_rows_below: rows of a matrix with fewer weights than this are taken for empty, which changes what the model
            computes; 0 or 1 changes nothing.

    Returns:
        A model of class `Compact…` with the sizes of its layers in `config.compact_layers`.

    Raises:
        UsageError: a model type whose layers cannot be compacted, or a model that is compacted already.
    """
    kind = str(model.config.model_type)
    if kind not in PATHS:
        raise UsageError(f"{kind} cannot be compacted", f"supported: {', '.join(sorted(PATHS))}")
    if hasattr(model.config, COMPACT):
        raise UsageError("the model is compacted already", "compact the masked model again")
    layout, base = layout_for(model.config), model.base_model
    prefix = "" if base is model else f"{model.base_model_prefix}."
    act = ACT2FN[str(getattr(model.config, "hidden_act", None) or model.config.activation)]
    inside = f"{prefix}{layout.layers}."
    state = {name: tensor.clone() for name, tensor in model.state_dict().items() if not name.startswith(inside)}
    sizes: list[dict[str, Any]] = []
    for number, layer in enumerate(layout.modules(base)):
        parts = {letter: _Part(found[0][0], drop_rows_below) for letter, found in linears(layout, layer).items()}
        heads = _attention(parts, layout.heads(layer))
        _feed_forward(parts, act)
        replaced, at = _names(kind), f"{inside}{number}."
        size: dict[str, Any] = {"heads": heads}
        for letter, part in parts.items():
            tensors, size[letter] = part.packed()
            state |= {f"{at}{replaced[letter]}.{name}": t for name, t in tensors.items()}
        gone = tuple(f"{path}." for path in PATHS[kind] if path)
        state |= {f"{at}{n}": t.clone() for n, t in layer.state_dict().items() if not n.startswith(gone)}
        sizes.append(size)
    config = copy.deepcopy(model.config)
    config.compact_layers = sizes
    config.architectures = [f"Compact{type(model).__name__}"]
    of_class = custom_class(config)
    assert of_class is not None
    return load_tensors(empty_model(of_class, config), state, base)


def _names(kind: str) -> dict[str, str]:
    """Where the six matrices are in a compacted layer."""
    attention, output, up, down = PATHS[kind]
    names = {letter: f"{attention}.{name}" for letter, name in zip("QKV", ("query", "key", "value"), strict=True)}
    return names | {"O": output or f"{attention}.output", "U": up, "D": down}


class _Part:
    """A linear on its way to be smaller, in float64: its weight [rows, columns] and bias [rows]."""

    def __init__(self, linear: nn.Linear, drop_rows_below: int) -> None:
        self.dtype = linear.weight.dtype
        self.weight = linear.weight.detach().double().cpu().clone()
        self.weight[self.weight.count_nonzero(1) < drop_rows_below] = 0
        rows = self.weight.shape[0]
        self.bias = torch.zeros(rows).double() if linear.bias is None else linear.bias.detach().double().cpu().clone()

    @property
    def rows(self) -> Tensor:
        """Which rows hold a weight, bool."""
        return self.weight.any(1)

    @property
    def columns(self) -> Tensor:
        """Which columns hold a weight, bool."""
        return self.weight.any(0)

    def keep_rows(self, kept: Tensor) -> None:
        """Keep these rows, with their biases."""
        self.weight, self.bias = self.weight[kept], self.bias[kept]

    def fold(self, constant: Tensor) -> None:
        """Take over into the bias what columns read that is the same for every token (0 elsewhere)."""
        self.bias = self.bias + self.weight @ constant

    def packed(self) -> tuple[dict[str, Tensor], tuple[int, int, int, int]]:
        """The tensors of a `CompactLinear` and its size."""
        (wide_out, wide_in), weight, tensors = self.weight.shape, self.weight, {}
        columns, rows = (_worth(self.columns), _worth(self.rows))
        if columns is not None:
            tensors["inputs"], weight = columns, weight[:, columns]
        if rows is not None:
            # All removed rows are written from one row of zeros.
            tensors["outputs"] = torch.full((wide_out,), len(rows))
            tensors["outputs"][rows] = torch.arange(len(rows))
            weight = torch.cat([weight[rows], weight.new_zeros(1, weight.shape[1])])
        tensors |= {"weight": weight.to(self.dtype).contiguous(), "bias": self.bias.to(self.dtype)}
        return tensors, (wide_in, wide_out, weight.shape[1], weight.shape[0])


def _worth(load_tensors: Tensor) -> Tensor | None:
    """Indices of what is filled, at least one; None when too little is empty to be worth skipping."""
    # The row of zeros counts as filled.
    if (~load_tensors).sum() - 1 < WORTH_SKIPPING * len(load_tensors):
        return None
    return load_tensors.nonzero()[:, 0] if load_tensors.any() else torch.zeros(1, dtype=torch.long)


def _feed_forward(parts: dict[str, _Part], act: nn.Module) -> None:
    up, down = parts["U"], parts["D"]
    down.fold(torch.where(up.rows, 0, act(up.bias)))
    kept = _some(up.rows & down.columns)
    up.keep_rows(kept)
    down.weight = down.weight[:, kept]
    # The one unit that stays when none is needed must not be counted twice.
    down.weight[:, ~up.rows] = 0


def _attention(parts: dict[str, _Part], heads: int) -> int:
    """Make the four linears of a layer smaller; returns how many heads are left."""
    q, k, v, o = (parts[letter] for letter in "QKVO")
    o.fold(torch.where(v.rows, 0, v.bias))
    kept_AK = (v.rows & o.columns).view(heads, -1)
    left = kept_AK.any(1)
    if not left.any():
        # A layer needs a head; this one attends to nothing and writes nothing.
        left[0] = True
    each = kept_AK.shape[1]
    spans = [slice(a * each, (a + 1) * each) for a in left.nonzero()[:, 0].tolist()]
    scores = [_score_rows(q, k, span) for span in spans]
    values = [kept_AK.view(-1)[span].nonzero()[:, 0] + span.start for span in spans]
    # One width for all: torch's fast attention for the CPU takes only keys and values of one.
    width = max(1, *(len(rows[1]) for rows in scores), *(len(found) for found in values))
    for part, number in ((q, 0), (k, 2)):
        part.weight = torch.cat([_padded(found[number], width) for found in scores])
        part.bias = torch.cat([_padded(found[number + 1], width) for found in scores])
    o_columns = [_padded(o.weight[:, found].T, width) for found in values]
    v.weight, v.bias = (torch.cat([_padded(x[found], width) for found in values]) for x in (v.weight, v.bias))
    o.weight = torch.cat(o_columns).T
    return len(spans)


def _score_rows(q: _Part, k: _Part, span: slice) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows and biases of a head's Q and K that its attention scores depend on."""
    both = q.rows[span] & k.rows[span]
    alone = ~q.rows[span] & k.rows[span]
    rows = [x[span][both] for x in (q.weight, q.bias, k.weight, k.bias)]
    constant_D = (q.bias[span][alone, None] * k.weight[span][alone]).sum(0)
    if constant_D.any():
        added = (torch.zeros_like(constant_D), torch.ones(()), constant_D, torch.zeros(()))
        rows = [torch.cat([x, new.to(x)[None]]) for x, new in zip(rows, added, strict=True)]
    return rows[0], rows[1], rows[2], rows[3]


def _padded(x: Tensor, width: int) -> Tensor:
    """Rows of zeros, or zeros, behind x until there are `width`."""
    return torch.cat([x, x.new_zeros(width - len(x), *x.shape[1:])])


def _some(kept: Tensor) -> Tensor:
    """The same, with its first one set when none is: no linear may have no row."""
    if not kept.any():
        kept[0] = True
    return kept
