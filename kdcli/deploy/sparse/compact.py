"""Compact a masked model losslessly: remove the rows, columns and heads that compute nothing.

In exact arithmetic and without dropout, the following parts of a layer are redundant:

* A feed-forward unit whose row of U is empty outputs act(bias) for every token, which is added to
  D's bias. A unit whose column of D is empty contributes nothing. Both are removed.
* A dimension of V whose row is empty outputs its bias for every token, because attention weights
  add up to 1. The output is added to O's bias. A dimension whose column of O is empty contributes
  nothing. A head without any dimension of V is removed as a whole.
* A dimension whose row of K is empty adds the same number to a query's scores of all keys, which
  the softmax cancels. If its row of Q is empty and has a bias b, it adds b · (row of K · x). All
  such dimensions of a head become one, with the sum of those rows.
* Empty rows and columns that remain in a matrix are skipped if they are numerous enough to pay for
  the copy that skipping takes.
"""

import copy

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2FN

from kdcli.errors import UsageError
from kdcli.models.custom_class import COMPACT_KEY, class_named, empty_model, load_tensors
from kdcli.models.layout import COMPACT_PATHS, layout_for, linears

# Minimum share of empty rows or columns for a matrix to skip them. Below it, selecting the other
# rows costs as much as it saves.
SKIP_ABOVE = 0.5


def compact_class_of(model: PreTrainedModel) -> type[PreTrainedModel] | None:
    """Return the class of a model's compact form, or None if it has none."""
    if not layout_for(model.config).compact:
        return None
    return class_named(f"Compact{type(model).__name__}")


def compact_model(model: PreTrainedModel, *, drop_rows_below: int = 0) -> PreTrainedModel:
    """Return a smaller model that computes the same outputs.

    Its class is `Compact...`, and the sizes of its layers are in `config.compact_layers`. The given
    model must have its removed weights at zero and be in eval mode; it is not changed. With
    `drop_rows_below`, rows with fewer weights are treated as empty, which changes the outputs (0
    and 1 change nothing).

    Raises UsageError if the model type cannot be compacted, or if the model is already compacted.
    """
    if hasattr(model.config, COMPACT_KEY):
        raise UsageError("the model is already compacted", "compact the masked model instead")
    kind = str(model.config.model_type)
    if (compact_class := compact_class_of(model)) is None:
        what = type(model).__name__ if kind in COMPACT_PATHS else kind
        raise UsageError(
            f"{what} cannot be compacted",
            f"supported: {', '.join(sorted(COMPACT_PATHS))}",
        )
    layout, base = layout_for(model.config), model.base_model
    prefix = "" if base is model else f"{model.base_model_prefix}."
    act = ACT2FN[str(getattr(model.config, "hidden_act", None) or model.config.activation)]
    attention, output, up, down = COMPACT_PATHS[kind]
    names = {"Q": f"{attention}.query", "K": f"{attention}.key", "V": f"{attention}.value"}
    names |= {"O": output or f"{attention}.output", "U": up, "D": down}
    inside = f"{prefix}{layout.layers}."
    state = {
        name: tensor.clone()
        for name, tensor in model.state_dict().items()
        if not name.startswith(inside)
    }
    sizes: list[dict[str, int | tuple[int, int, int, int]]] = []
    for number, layer in enumerate(layout.modules(base)):
        parts = {
            letter: _Part(of[0][0], drop_rows_below)
            for letter, of in linears(layout, layer).items()
        }
        size: dict[str, int | tuple[int, int, int, int]] = {
            "heads": _attention(parts, layout.heads(layer))
        }
        _feed_forward(parts, act)
        for letter, part in parts.items():
            tensors, size[letter] = part.packed()
            state |= {f"{inside}{number}.{names[letter]}.{name}": t for name, t in tensors.items()}
        replaced = tuple(f"{path}." for path in COMPACT_PATHS[kind] if path)
        rest = {n: t for n, t in layer.state_dict().items() if not n.startswith(replaced)}
        state |= {f"{inside}{number}.{name}": tensor.clone() for name, tensor in rest.items()}
        sizes.append(size)
    config = copy.deepcopy(model.config)
    config.compact_layers = sizes
    config.architectures = [compact_class.__name__]
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
    def rows(self) -> Tensor:
        """The rows that have a weight, bool."""
        return self.weight.any(1)

    @property
    def columns(self) -> Tensor:
        """The columns that have a weight, bool."""
        return self.weight.any(0)

    def fold(self, constant: Tensor) -> None:
        """Add the contribution of constant inputs to the bias.

        `constant` holds the value of each input that is the same for every token, and 0 for the
        others.
        """
        self.bias = self.bias + self.weight @ constant

    def packed(self) -> tuple[dict[str, Tensor], tuple[int, int, int, int]]:
        """Return the tensors of a `CompactLinear` and its size."""
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
    """Return the indices of the kept rows or columns, at least one.

    Returns None if too few are empty to skip them.
    """
    # The row of zeros counts as kept, and so does the row that stays if all are empty.
    if len(kept) - max(1, int(kept.sum())) - 1 < SKIP_ABOVE * len(kept):
        return None
    return kept.nonzero()[:, 0] if kept.any() else torch.zeros(1, dtype=torch.long)


def _feed_forward(parts: dict[str, _Part], act: nn.Module) -> None:
    """Remove units that are constant or that nothing reads."""
    up, down = parts["U"], parts["D"]
    down.fold(torch.where(up.rows, 0, act(up.bias)))
    kept = up.rows & down.columns
    if not kept.any():
        kept[0] = True  # every linear needs a row
    up.weight = up.weight[kept]
    up.bias = up.bias[kept]
    down.weight = down.weight[:, kept]
    # A constant unit that stays nevertheless must not count twice.
    down.weight[:, ~up.rows] = 0


def _attention(parts: dict[str, _Part], heads: int) -> int:
    """Make the four linears of a layer's attention smaller; returns the number of heads left."""
    q, k, v, o = (parts[letter] for letter in "QKVO")
    o.fold(torch.where(v.rows, 0, v.bias))
    kept_AK = (v.rows & o.columns).view(heads, -1)
    kept_A = kept_AK.any(1)
    if not kept_A.any():
        kept_A[0] = True  # a layer needs a head; this one writes nothing
    each = kept_AK.shape[1]
    spans = [slice(a * each, (a + 1) * each) for a in kept_A.nonzero()[:, 0].tolist()]
    scores = [_score_rows(q, k, span) for span in spans]
    values = [kept_AK.view(-1)[span].nonzero()[:, 0] + span.start for span in spans]
    # All heads get one width, because torch's fast attention on the CPU needs keys and values of
    # the same width.
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
    """Return the rows and biases of a head's Q and K on which its attention scores depend."""
    both, alone = q.rows[span] & k.rows[span], ~q.rows[span] & k.rows[span]
    rows = [x[span][both] for x in (q.weight, q.bias, k.weight, k.bias)]
    constant_D = (q.bias[span][alone, None] * k.weight[span][alone]).sum(0)
    if constant_D.any():
        added = (torch.zeros_like(constant_D), torch.ones(()), constant_D, torch.zeros(()))
        rows = [torch.cat([x, new.to(x)[None]]) for x, new in zip(rows, added, strict=True)]
    return rows


def _padded(x: Tensor, width: int) -> Tensor:
    return torch.cat([x, x.new_zeros(width - len(x), *x.shape[1:])])
