"""Filling a student from its teacher: layers are copied, widths reduced to a subset of the teacher's dimensions.

One subset serves all places where the same thing flows, so that a reduced matrix still reads what another one writes:

* residual stream (D): the dimensions in which the word embeddings vary most, the same in every layer;
* q and k, and DeBERTa's position projections with them: within each head, the dimensions with the largest
  |q row|·|k row|; v and o: the largest |v row|·|o column|.
  With rotary embeddings or grouped key/value heads, evenly spaced (pairs of) dimensions, the same in every head;
* feed-forward units (F): the largest |up row|·|down column|, times |gate row| in a gated unit.

A linear that loses columns is scaled so that its remaining rows keep their Frobenius norm, hence its output its size.
With another number of heads, a student head takes its dimensions from the teacher heads in the same place. Whatever has
no such subset keeps its random values, and is named.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kdcli.models.layout import Layout, Rows, linears

Sets = dict[int, Tensor]
"""Dimension of a tensor → indices into the teacher's."""


def copy_reduced(teacher: PreTrainedModel, student: PreTrainedModel, layout: Layout, chosen: list[int]) -> list[str]:
    """Fill the student's parameters in place.

    Args:
        teacher, student: of one type, the student nowhere larger.
        layout: the row of their type.
        chosen: the teacher layer (1 … N) each student layer is copied from.

    Returns:
        Names of the student's parameters that could not be filled and keep their values.
    """
    names = {id(p): name for name, p in student.named_parameters()}
    sets: dict[str, Sets] = {}
    for m, layer in enumerate(layout.modules(student)):
        of_teacher = layout.modules(teacher)[chosen[m] - 1]
        sets |= {names[i]: s for i, s in _layer_sets(layout, teacher.config, student.config, of_teacher, layer).items()}
    residual = _residual(teacher, int(student.config.hidden_size))
    source = dict(teacher.named_parameters())
    linear = {names[id(m.weight)] for m in student.modules() if isinstance(m, nn.Linear)}
    left = []
    with torch.no_grad():
        for name, parameter in student.named_parameters():
            origin = source.get(name if layout.shared else _renamed(name, layout.layers, chosen))
            part = None if origin is None else _part(origin, parameter, sets.get(name, {}), residual, name in linear)
            if part is not None:
                parameter.copy_(part)
            elif parameter.requires_grad:
                # A fixed table (RoFormer's sinusoids) already is what the student's shape makes it.
                left.append(name)
    return left


def copy_head(teacher: PreTrainedModel, student: PreTrainedModel) -> list[str]:
    """Fill in place what two models of one class with a head have beyond their encoders, in the same dimensions.

    A matrix that is tied to the embeddings belongs to the encoder and is left alone.

    Returns:
        Names of the head's parameters that could not be filled and keep their values.
    """
    residual = _residual(teacher, int(student.config.hidden_size))
    source = dict(teacher.named_parameters(remove_duplicate=False))
    encoder = {id(p) for p in student.base_model.parameters()}
    linear = {id(m.weight) for m in student.modules() if isinstance(m, nn.Linear)}
    left = []
    with torch.no_grad():
        for name, parameter in student.named_parameters():
            if id(parameter) in encoder:
                continue
            part = _part(source[name], parameter, {}, residual, id(parameter) in linear)
            if part is None:
                left.append(name)
            else:
                parameter.copy_(part)
    return left


def _part(origin: Tensor, target: Tensor, sets: Sets, residual: tuple[int, Tensor], linear: bool) -> Tensor | None:
    """The part of a teacher's tensor that becomes the student's, or None when a dimension has no subset."""
    part = origin.detach().float()
    if part.dim() != target.dim():
        return None
    wide, residual_D = residual
    for dim, (size, wanted) in enumerate(zip(origin.shape, target.shape, strict=True)):
        index = sets.get(dim)
        if index is None and size == wanted:
            continue
        if index is None and (size, wanted) == (wide, len(residual_D)):
            index = residual_D
        if index is None or len(index) != wanted:
            return None
        before = part.norm()
        part = part.index_select(dim, index.to(part.device))
        if linear and dim == 1 and part.norm() > 0:
            part = part * (before / part.norm())
    return part


def _renamed(name: str, layers: str, chosen: list[int]) -> str:
    """The teacher's name of a student's parameter: layer m is copied from layer chosen[m]."""
    if not name.startswith(f"{layers}."):
        return name
    number, rest = name.removeprefix(f"{layers}.").split(".", 1)
    return f"{layers}.{chosen[int(number)] - 1}.{rest}"


def _residual(teacher: PreTrainedModel, narrow: int) -> tuple[int, Tensor]:
    """Width of the teacher's residual stream, and the dimensions of it that the student keeps."""
    wide = int(teacher.config.hidden_size)
    words_VD: Tensor = teacher.get_input_embeddings().weight
    if words_VD.shape[1] != wide:
        # Factorised embeddings: the table's columns are not the dimensions of the stream.
        return wide, _spread(wide, narrow)
    return wide, words_VD.detach().float().var(0).topk(narrow).indices.sort().values


def _layer_sets(
    layout: Layout, of_teacher: Any, of_student: Any, teacher: nn.Module, student: nn.Module
) -> dict[int, Sets]:
    """Index sets of one layer's tensors that are not the residual one: id of a student's parameter → sets."""
    big, small = linears(layout, teacher), linears(layout, student)
    found: dict[int, Sets] = {}
    heads, narrow_heads = of_teacher.num_attention_heads, of_student.num_attention_heads
    parts = {"blocks": 3, "heads": 3}.get(layout.fused or "", 1)
    width, narrow = (of["Q"][0][0].out_features // parts for of in (big, small))
    if (width, heads) != (narrow, narrow_heads):
        q, k, v, o = _head_sets(layout, of_teacher, of_student, big, width, narrow)
        _put_rows(
            found, layout, small, student, (q, k, v), (heads, width // heads), (narrow_heads, narrow // narrow_heads)
        )
        for name, module in student.named_modules():
            if name in layout.like_q and isinstance(module, nn.Linear):
                _put(found, module, q)
        if small["O"][0][0].in_features == narrow:
            found.setdefault(id(small["O"][0][0].weight), {})[1] = o
    units, narrow_units = big["D"][0][0].in_features, small["D"][0][0].in_features
    if units != narrow_units:
        gains_UF = torch.cat([_weight(*pair) for pair in big["U"]]).norm(dim=1).view(-1, units)
        score_F = gains_UF.prod(0) * _weight(*big["D"][0]).norm(dim=0)
        # A student may ask for wider units than its teacher has; those stay random.
        if narrow_units < units:
            kept = score_F.topk(narrow_units).indices.sort().values
            found.setdefault(id(small["D"][0][0].weight), {})[1] = kept
            for linear, _ in small["U"]:
                blocks = linear.out_features // narrow_units
                _put(found, linear, torch.cat([kept + i * units for i in range(blocks)]))
    return found


def _head_sets(
    layout: Layout, of_teacher: Any, of_student: Any, big: dict[str, Any], width: int, narrow: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Flat dimensions kept of q, k, v (rows) and of o (columns)."""
    heads, narrow_heads = of_teacher.num_attention_heads, of_student.num_attention_heads
    groups = getattr(of_teacher, "num_key_value_heads", None) or heads
    narrow_groups = getattr(of_student, "num_key_value_heads", None) or narrow_heads
    if layout.rotary or groups != heads:
        each, narrow_each = width // heads, narrow // narrow_heads
        queries = _even_in_heads(heads, each, narrow_heads, narrow_each, layout.rotary)
        keys = _even_in_heads(groups, each, narrow_groups, narrow_each, layout.rotary)
        return queries, keys, keys, queries
    q_norm, k_norm, v_norm = (_weight(*big[letter][0]).norm(dim=1) for letter in "QKV")
    # ConvBERT's output projection also reads a convolution, behind the heads.
    o_norm = _weight(*big["O"][0]).norm(dim=0)[:width]
    qk = _best_in_heads(q_norm * k_norm, narrow, narrow_heads)
    vo = _best_in_heads(v_norm * o_norm, narrow, narrow_heads)
    return qk, qk, vo, vo


def _best_in_heads(score_E: Tensor, narrow: int, narrow_heads: int) -> Tensor:
    """For each student head the best dimensions of its own span of the teacher's, which is a head if counts agree.

    Spans of a teacher's width that the heads do not divide differ by one; none is shorter than a student's head.
    """
    each, bounds = narrow // narrow_heads, [a * len(score_E) // narrow_heads for a in range(narrow_heads + 1)]
    best = [start + score_E[start:end].topk(each).indices.sort().values for start, end in pairwise(bounds)]
    return torch.cat(best)


def _even_in_heads(heads: int, each: int, narrow_heads: int, narrow_each: int, rotary: str | None) -> Tensor:
    """Evenly spaced dimensions of a head, the same in all; rotary pairs stay together, at the nearest frequencies."""
    if rotary is None or each % 2 or narrow_each % 2:
        inside = _spread(each, narrow_each)
    else:
        pair = _spread(each // 2, narrow_each // 2)
        inside = (
            torch.cat([pair, pair + each // 2])
            if rotary == "halves"
            else torch.stack([2 * pair, 2 * pair + 1], 1).reshape(-1)
        )
    at = _spread(heads, narrow_heads) if narrow_heads <= heads else torch.arange(narrow_heads) * heads // narrow_heads
    return (at[:, None] * each + inside).reshape(-1)


def _spread(size: int, wanted: int) -> Tensor:
    return torch.arange(wanted) * size // wanted


def _put_rows(
    found: dict[int, Sets],
    layout: Layout,
    small: dict[str, Any],
    student: nn.Module,
    qkv: tuple[Tensor, Tensor, Tensor],
    wide: tuple[int, int],
    narrow: tuple[int, int],
) -> None:
    """Rows of the three projections, separate or fused; `wide` is [A, K] of the teacher, `narrow` of the student."""
    each = wide[1]
    linear = small["Q"][0][0]
    if layout.fused == "blocks":
        _put(found, linear, torch.cat([kept + i * wide[0] * each for i, kept in enumerate(qkv)]))
    elif layout.fused == "heads":
        # The row of part p, flat dimension f of [A, 3, K] is (f // K)·3K + p·K + f % K.
        parts = [(f // each * 3 * each + p * each + f % each).view(narrow) for p, f in enumerate(qkv)]
        _put(found, linear, torch.stack(parts, 1).reshape(-1))
    else:
        for letter, kept in zip("QKV", qkv, strict=True):
            _put(found, small[letter][0][0], kept)
    for name, kept in zip(layout.bias or (), (qkv[0], qkv[2]), strict=False):
        found.setdefault(id(student.get_parameter(name)), {})[0] = kept


def _put(found: dict[int, Sets], linear: nn.Linear, rows: Tensor) -> None:
    found.setdefault(id(linear.weight), {})[0] = rows
    if linear.bias is not None:
        found.setdefault(id(linear.bias), {})[0] = rows


def _weight(linear: nn.Linear, rows: Rows) -> Tensor:
    weight = linear.weight.detach().float().cpu()
    return weight if rows is None else weight[rows]
