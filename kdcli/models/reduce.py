"""Initialise a student from its teacher: copy layers, reduce widths to a subset of the teacher's dimensions.

One subset serves all places with the same dimensions, so that a reduced matrix still reads what another one writes:

* residual stream (D): the dimensions in which the word embeddings vary most, the same in every layer;
* q and k, and DeBERTa's position projections: within each head the largest |q row|·|k row|; v and o: the largest
  |v row|·|o column|. With rotary embeddings or grouped key/value heads, evenly spaced (pairs of) dimensions instead;
* feed-forward units (F): the largest |up row|·|down column|, times |gate row| in a gated unit.

A linear that loses columns is scaled so that its remaining rows keep their Frobenius norm, hence its output its size.
With another number of heads, a student head takes its dimensions from the teacher heads in the same place. A parameter
without such a subset keeps its random values.
"""

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kdcli.models.layout import Layout, Rows, linears

Sets = dict[int, Tensor]  # dimension of a tensor -> indices into the teacher's


def copy_reduced(teacher: PreTrainedModel, student: PreTrainedModel, layout: Layout, chosen: list[int]) -> list[str]:
    """Fill the parameters of a student of the same type in place; returns the names of those that could not be filled.
    `chosen` is the teacher layer (1 ... N) for each student layer."""
    sets: dict[int, Sets] = {}
    for n, layer in zip(chosen, layout.modules(student), strict=True):
        sets |= _layer_sets(layout, teacher.config, student.config, layout.modules(teacher)[n - 1], layer)
    source = dict(teacher.named_parameters())

    def origin(name: str) -> Tensor | None:
        if not layout.shared and name.startswith(f"{layout.layers}."):
            number, rest = name.removeprefix(f"{layout.layers}.").split(".", 1)
            name = f"{layout.layers}.{chosen[int(number)] - 1}.{rest}"
        return source.get(name)

    return _fill(teacher, student, [(n, p, origin(n)) for n, p in student.named_parameters()], sets)


def copy_head(teacher: PreTrainedModel, student: PreTrainedModel) -> list[str]:
    """Fill the head of a student of the same class; returns the names of parameters that could not be filled."""
    source = dict(teacher.named_parameters(remove_duplicate=False))
    # A matrix that is tied to the embeddings belongs to the encoder.
    encoder = {id(p) for p in student.base_model.parameters()}
    head = [(n, p, source[n]) for n, p in student.named_parameters() if id(p) not in encoder]
    return _fill(teacher, student, head, {})


@torch.no_grad()
def _fill(
    teacher: PreTrainedModel,
    student: PreTrainedModel,
    parameters: Iterable[tuple[str, nn.Parameter, Tensor | None]],
    sets: Mapping[int, Sets],
) -> list[str]:
    """Fill the student's (name, parameter, teacher's tensor); returns the names of those that could not be filled."""
    wide, narrow = int(teacher.config.hidden_size), int(student.config.hidden_size)
    words_VD: Tensor = teacher.get_input_embeddings().weight
    # The columns of factorised embeddings are not the dimensions of the residual stream.
    stream = words_VD.shape[1] == wide
    kept_D = words_VD.float().var(0).topk(narrow).indices.sort().values if stream else _spread(wide, narrow)
    linear = {id(m.weight) for m in student.modules() if isinstance(m, nn.Linear)}
    left = []
    for name, parameter, origin in parameters:
        own = sets.get(id(parameter), {})
        part = None if origin is None else _part(origin, parameter, own, wide, kept_D, id(parameter) in linear)
        if part is not None:
            parameter.copy_(part)
        elif parameter.requires_grad:
            # A fixed table (RoFormer's sinusoids) already fits the student's shape.
            left.append(name)
    return left


def _part(origin: Tensor, target: Tensor, sets: Sets, wide: int, kept_D: Tensor, linear: bool) -> Tensor | None:
    """The student's part of a teacher's tensor, `kept_D` of `wide` residual ones; None if a dimension has no subset."""
    part = origin.detach().float()
    if part.dim() != target.dim():
        return None
    for dim, (size, narrow) in enumerate(zip(origin.shape, target.shape, strict=True)):
        index = sets.get(dim)
        if index is None and size == narrow:
            continue
        if index is None and (size, narrow) == (wide, len(kept_D)):
            index = kept_D
        if index is None or len(index) != narrow:
            return None
        before = part.norm()
        part = part.index_select(dim, index.to(part.device))
        if linear and dim == 1 and part.norm() > 0:
            part = part * (before / part.norm())
    return part


def _layer_sets(
    layout: Layout, of_teacher: Any, of_student: Any, teacher: nn.Module, student: nn.Module
) -> dict[int, Sets]:
    """Index sets of one layer besides the residual one: id of a student's parameter -> sets."""
    big, small = linears(layout, teacher), linears(layout, student)
    sets: dict[int, Sets] = {}
    heads, narrow_heads = of_teacher.num_attention_heads, of_student.num_attention_heads
    width, narrow = (each["Q"][0][0].out_features // (3 if layout.fused else 1) for each in (big, small))
    output, down = small["O"][0][0], small["D"][0][0]
    if (width, heads) != (narrow, narrow_heads):
        q, k, v, o = _head_sets(layout, of_teacher, of_student, big, width, narrow)
        linear, each = small["Q"][0][0], width // heads
        if layout.fused == "blocks":
            _put(sets, linear, torch.cat([kept + i * heads * each for i, kept in enumerate((q, k, v))]))
        elif layout.fused == "heads":
            # The row of part p, flat dimension f of [A, 3, K] is (f // K)·3K + p·K + f % K.
            parts = [f // each * 3 * each + p * each + f % each for p, f in enumerate((q, k, v))]
            _put(sets, linear, torch.stack([part.view(narrow_heads, -1) for part in parts], 1).reshape(-1))
        else:
            for letter, kept in zip("QKV", (q, k, v), strict=True):
                _put(sets, small[letter][0][0], kept)
        for name, kept in zip(layout.bias or (), (q, v), strict=False):
            sets.setdefault(id(student.get_parameter(name)), {})[0] = kept
        for name, module in student.named_modules():
            if name in layout.like_q and isinstance(module, nn.Linear):
                _put(sets, module, q)
        if output.in_features == narrow:
            sets.setdefault(id(output.weight), {})[1] = o
    units, narrow_units = big["D"][0][0].in_features, down.in_features
    # A student may have wider feed-forward blocks than its teacher; those stay random.
    if narrow_units < units:
        gains_UF = torch.cat([_weight(*pair) for pair in big["U"]]).norm(dim=1).view(-1, units)
        score_F = gains_UF.prod(0) * _weight(*big["D"][0]).norm(dim=0)
        kept = score_F.topk(narrow_units).indices.sort().values
        sets.setdefault(id(down.weight), {})[1] = kept
        for linear, _ in small["U"]:
            blocks = linear.out_features // narrow_units
            _put(sets, linear, torch.cat([kept + i * units for i in range(blocks)]))
    return sets


def _head_sets(
    layout: Layout, of_teacher: Any, of_student: Any, big: dict[str, Any], width: int, narrow: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Flat dimensions kept of q, k, v (rows) and of o (columns)."""
    heads, narrow_heads = of_teacher.num_attention_heads, of_student.num_attention_heads
    groups = getattr(of_teacher, "num_key_value_heads", None) or heads
    narrow_groups = getattr(of_student, "num_key_value_heads", None) or narrow_heads
    if layout.rotary or groups != heads:
        each, narrow_each = width // heads, narrow // narrow_heads
        q = _even_in_heads(heads, each, narrow_heads, narrow_each, layout.rotary)
        k = _even_in_heads(groups, each, narrow_groups, narrow_each, layout.rotary)
        return q, k, k, q
    q_norm, k_norm, v_norm = (_weight(*big[letter][0]).norm(dim=1) for letter in "QKV")
    # ConvBERT's output projection also reads a convolution, behind the heads.
    o_norm = _weight(*big["O"][0]).norm(dim=0)[:width]
    qk = _best_in_heads(q_norm * k_norm, narrow, narrow_heads)
    vo = _best_in_heads(v_norm * o_norm, narrow, narrow_heads)
    return qk, qk, vo, vo


def _best_in_heads(score_E: Tensor, narrow: int, narrow_heads: int) -> Tensor:
    """For each student head the best dimensions of its span of the teacher's width, a head if the counts agree."""
    # Spans differ by one if the heads do not divide the width; none is shorter than a student's head.
    each, bounds = narrow // narrow_heads, [a * len(score_E) // narrow_heads for a in range(narrow_heads + 1)]
    return torch.cat([start + score_E[start:end].topk(each).indices.sort().values for start, end in pairwise(bounds)])


def _even_in_heads(heads: int, each: int, narrow_heads: int, narrow_each: int, rotary: str | None) -> Tensor:
    """Evenly spaced dimensions, the same in every head; rotary pairs stay together, at the nearest frequencies."""
    if rotary is None or each % 2 or narrow_each % 2:
        inside = _spread(each, narrow_each)
    else:
        pair = _spread(each // 2, narrow_each // 2)
        halves = rotary == "halves"
        inside = torch.cat([pair, pair + each // 2]) if halves else torch.stack([2 * pair, 2 * pair + 1], 1).flatten()
    return (_spread(heads, narrow_heads)[:, None] * each + inside).reshape(-1)


def _spread(size: int, count: int) -> Tensor:
    """`count` evenly spaced numbers below `size`."""
    return torch.arange(count) * size // count


def _put(sets: dict[int, Sets], linear: nn.Linear, rows: Tensor) -> None:
    for parameter in linear.parameters():
        sets.setdefault(id(parameter), {})[0] = rows


def _weight(linear: nn.Linear, rows: Rows) -> Tensor:
    return linear.weight.detach().float().cpu()[rows]
