"""Initialise a student from its teacher.

The student gets copies of teacher layers. Where a width shrinks, the teacher's activations over a
sample decide which dimensions it keeps:

* Residual stream (D): the principal components of the hidden states, with one basis for all layers.
* q and k, and DeBERTa's position projections: within each head, the principal components of q and
  k.
* v and o: within each head, the principal components of the head's output and of o's weight
  columns.
* Feed-forward units (F): the units with the largest variance of activation times down column.

The biases of the output and down projections absorb the mean of what is left out. Where there is no
bias, units and heads are ranked by the mean square instead of the variance.

A student with fewer heads keeps the heads whose contribution to the attention's output varies most.
If its heads are wider than the teacher's, or if it has more of them, a head takes its dimensions
from the teacher's heads at the same place.

Query heads that read the same key/value head share its bases. Such a group stays together, and only
whole groups are left out, unless the student's groups have fewer query heads.

Rotary embeddings restrict q and k. They turn each pair of dimensions at a frequency of its own, and
the student's table has the frequencies of its own head width. So a basis cannot mix the pairs, and
a narrower head keeps the pairs at the nearest frequencies, whatever they contribute. Any other pair
would turn at a wrong speed, and its scores would be wrong for distant tokens. Each pair stands for
its neighbours too, so the scores of the kept pairs are multiplied by the ratio of the widths. A
model that also rotates v keeps the same pairs of v and o.

A parameter without a map keeps its random values.

Then the student is fitted to the teacher on the same text (`kdcli.models.fit`).
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise, starmap

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kdcli.models.fit import Counterpart, fit_to_teacher
from kdcli.models.fit_cache import FitCache
from kdcli.models.layout import Layout, Rows, linears
from kdcli.models.least_squares import ROWS_AT_ONCE, TINY, second_moments
from kdcli.models.sample import real_states, run_sample
from kdcli.types import Batch

Maps = dict[int, Tensor]
"""Maps a tensor's dimension to indices into the teacher's, [N], or to a basis of it, [D, N]."""
Matrices = dict[str, list[tuple[nn.Linear, Rows]]]


@dataclass
class Moment:
    """The moments of a layer's activations, float64. A shared layer has the mean over its runs.

    Attributes:
        mean_E: The mean.
        second: The mean of x x', [E, E], or only its diagonal, [E].
    """

    mean_E: Tensor
    second: Tensor

    @property
    def variance(self) -> Tensor:
        """The covariance [E, E], or only its diagonal, [E]."""
        mean_E = self.mean_E
        return self.second - (mean_E**2 if self.second.dim() == 1 else mean_E.outer(mean_E))

    def about(self, bias: Tensor | None) -> Tensor:
        """Return the second moments that count if this bias, unless it is None, adds the mean."""
        return self.second if bias is None else self.variance


Moments = dict[str, Moment]
"""Moments of a layer's activations under the letters of its matrices.

* `Q` and `K`: of q and of k.
* `O`: of the heads' outputs.
* `D`: of the feed-forward units, whose second moments are only the diagonal.
"""


@dataclass(frozen=True)
class Heads:
    """The sizes of a layer's attention: numbers of heads, and the width of all heads together."""

    count: int
    key_value: int
    width: int

    @property
    def each(self) -> int:
        return self.width // self.count

    @property
    def group(self) -> int:
        """The number of query heads that read the same key/value head."""
        return self.count // self.key_value


Bases = list[tuple[slice, Tensor]]
"""For each of the student's key/value heads, its span of the dimensions of k in the teacher's heads
that are kept, and a basis [E, N] of the span. The span is one head if heads only get narrower or
fewer."""


@torch.no_grad()
def copy_reduced(
    teacher: PreTrainedModel,
    student: PreTrainedModel,
    layout: Layout,
    chosen: list[int],
    sample: Batch,
    *,
    fit: bool,
    dtype: torch.dtype = torch.float32,
    cache: FitCache | None = None,
) -> tuple[list[str], Tensor | None]:
    """Fill the parameters of a student of the teacher's type in place.

    * `chosen`: the teacher layer (1 ... N) for each student layer.
    * `fit`: also fit the student to the teacher's outputs for the sample.
    * `dtype`: the number format in which the models run on the sample. Models that mask with the
      smallest float32 number run in float32.
    * `cache`: teacher states and layer outputs that several fits share.

    Returns the names of the parameters that could not be filled, and the basis [D, N] of the
    teacher's residual stream that the student keeps, or None if it keeps the whole stream.
    """
    training = teacher.training
    teacher.eval()
    dtype = dtype if layout.autocast else torch.float32
    origins = [layout.modules(teacher)[n - 1] for n in chosen]
    # All layers of a model have the same sizes. A shared layer needs its maps only once.
    pairs = dict.fromkeys(zip(origins, layout.modules(student), strict=True))
    heads, narrow_heads = (heads_of(layout, model) for model in (teacher, student))
    units, narrow_units = (
        linears(layout, layer)["D"][0][0].in_features for layer in next(iter(pairs))
    )
    # A student may have wider feed-forward blocks than its teacher. Those stay random.
    fewer_units = narrow_units < units
    letters = "" if heads == narrow_heads else "O" if layout.rotary else "QKO"
    letters += "D" if fewer_units else ""
    wide, narrow = int(teacher.config.hidden_size), int(student.config.hidden_size)
    with ExitStack() as hooks:
        moments = hooks.enter_context(_moments(teacher, layout, origins, sample, letters))
        streams = hooks.enter_context(_streams(teacher, layout, sample)) if narrow < wide else []
        if letters or narrow < wide:
            run_sample(teacher, sample, dtype)
    basis_DN = components(torch.stack(streams).sum(0), narrow) if streams else None
    maps: dict[int, Maps] = {}
    for origin_layer, layer in pairs:
        both = linears(layout, origin_layer), linears(layout, layer)
        if heads != narrow_heads:
            maps |= _attention_maps(
                layout, heads, narrow_heads, layer, *both, moments[origin_layer]
            )
        if fewer_units:
            maps |= _unit_maps(moments[origin_layer]["D"], narrow_units, *both)

    def origin(name: str) -> str:
        if layout.shared or not name.startswith(f"{layout.layers}."):
            return name
        number, _, rest = name.removeprefix(f"{layout.layers}.").partition(".")
        return f"{layout.layers}.{chosen[int(number)] - 1}.{rest}".rstrip(".")

    source = dict(teacher.named_parameters())
    parameters = [(n, p, source.get(origin(n))) for n, p in student.named_parameters()]
    unfilled = _fill(parameters, basis_DN, maps)
    for origin_layer, layer in pairs:
        both = linears(layout, origin_layer), linears(layout, layer)
        for letter in filter(moments[origin_layer].get, "OD"):
            teacher_linear, student_linear = (each[letter][0][0] for each in both)
            mean_E = moments[origin_layer][letter].mean_E
            _keep_mean(teacher_linear, student_linear, mean_E, maps, basis_DN)
    if fit:
        counterparts = _counterparts(teacher, student, origin, basis_DN, maps)
        layers = dict(zip(layout.modules(student), origins, strict=True))
        fit_to_teacher(teacher, student, counterparts, layers, sample, dtype, cache)
    teacher.train(training)
    return unfilled, basis_DN


def _counterparts(
    teacher: PreTrainedModel,
    student: PreTrainedModel,
    origin: Callable[[str], str],
    basis_DN: Tensor | None,
    maps: Mapping[int, Maps],
) -> Iterator[Counterpart]:
    """Yield the student's linears and normalisations that have a counterpart in the teacher."""
    teacher_modules = dict(teacher.named_modules())
    for name, module in student.named_modules():
        weight = getattr(module, "weight", None)
        teacher_module = teacher_modules.get(origin(name))
        if teacher_module is None or not isinstance(weight, Tensor):
            continue
        if isinstance(module, nn.Linear) or weight.dim() == 1:
            kept = maps.get(id(weight), {}).get(0)
            wide, narrow = len(teacher_module.get_parameter("weight")), len(weight)
            if kept is None and basis_DN is not None and wide == len(basis_DN) > narrow:
                kept = basis_DN
            yield Counterpart(module, teacher_module, partial(reduced_states, kept=kept))


@torch.no_grad()
def copy_head(
    teacher: PreTrainedModel, student: PreTrainedModel, basis_DN: Tensor | None
) -> list[str]:
    """Fill the head of a student of the same class, and return the names it could not fill."""
    source = dict(teacher.named_parameters(remove_duplicate=False))
    # A matrix that is tied to the embeddings belongs to the encoder.
    encoder = {id(p) for p in student.base_model.parameters()}
    return _fill(
        [(n, p, source[n]) for n, p in student.named_parameters() if id(p) not in encoder],
        basis_DN,
        {},
    )


def heads_of(layout: Layout, model: PreTrainedModel) -> Heads:
    """Return the sizes of the attention of a model's layers."""
    layer = layout.modules(model)[0]
    count = layout.heads(layer)
    linear, rows = linears(layout, layer)["Q"][0]
    width = len(torch.arange(linear.out_features)[rows])
    return Heads(count, getattr(model.config, "num_key_value_heads", None) or count, width)


@contextmanager
def _moments(
    teacher: PreTrainedModel,
    layout: Layout,
    layers: list[nn.Module],
    sample: Batch,
    letters: str,
) -> Iterator[dict[nn.Module, Moments]]:
    """Record the moments of the layers' activations for these letters while the teacher runs."""
    moments: dict[nn.Module, Moments] = {layer: {} for layer in layers}
    runs = Counter(layout.modules(teacher))

    def record(layer: nn.Module, letter: str, rows: Rows) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            tokens = sample["input_ids"].shape
            if len(output) == tokens.numel() and output.dim() == 2:
                # OPT has one row for each token.
                args, output = (args[0].view(*tokens, -1),), output.view(*tokens, -1)
            # DeBERTa also projects positions.
            if output.shape[:2] != tokens:
                return
            if letter in "QK":
                x_BLE = output[..., rows]
                if letter == "Q" and layout.bias is not None:
                    x_BLE = x_BLE + layer.get_parameter(layout.bias[0])
            else:
                x_BLE = args[0]
            moment = _moment(real_states(x_BLE, sample), diagonal=letter == "D")
            moment = Moment(moment.mean_E / runs[layer], moment.second / runs[layer])
            if (so_far := moments[layer].get(letter)) is not None:
                moment = Moment(so_far.mean_E + moment.mean_E, so_far.second + moment.second)
            moments[layer][letter] = moment

        return hook

    with ExitStack() as hooks:
        for layer in moments:
            matrices = linears(layout, layer)
            for letter in letters:
                linear, rows = matrices[letter][0]
                hook = record(layer, letter, rows)
                hooks.callback(linear.register_forward_hook(hook).remove)
        yield moments


def _moment(x_RE: Tensor, *, diagonal: bool) -> Moment:
    """Return the moments of states. In float32, a large mean would hide a small variance."""
    parts = torch.split(x_RE, ROWS_AT_ONCE)
    mean_E = torch.stack([part.double().sum(0) for part in parts]).sum(0) / len(x_RE)
    if diagonal:
        squares = [(part.double() - mean_E).square().sum(0) for part in parts]
        return Moment(mean_E, torch.stack(squares).sum(0) / len(x_RE) + mean_E**2)
    centred_RE = x_RE - mean_E.float()
    covariance_EE = second_moments(centred_RE) / len(x_RE)
    return Moment(mean_E, covariance_EE + mean_E.outer(mean_E))


@contextmanager
def _streams(teacher: PreTrainedModel, layout: Layout, sample: Batch) -> Iterator[list[Tensor]]:
    """Record the second moments of the hidden states while the teacher runs, each [D, D] float64.

    They are the first layer's inputs and every layer's outputs. Each trace is 1, so that every
    layer has the same weight.
    """
    moments_DD: list[Tensor] = []

    def add(x_BLD: Tensor) -> None:
        x_RD = real_states(x_BLD, sample)
        moment_DD = second_moments(x_RD)
        moments_DD.append(moment_DD / moment_DD.trace())

    def before(module: nn.Module, args: tuple[Tensor, ...], kwargs: Mapping[str, Tensor]) -> None:
        if not moments_DD:
            add(args[0] if args else kwargs["hidden_states"])

    def after(module: nn.Module, args: object, output: Tensor | tuple[Tensor, ...]) -> None:
        add(output if isinstance(output, Tensor) else output[0])

    with ExitStack() as hooks:
        layers = dict.fromkeys(layout.modules(teacher))
        hooks.callback(
            next(iter(layers)).register_forward_pre_hook(before, with_kwargs=True).remove
        )
        for layer in layers:
            hooks.callback(layer.register_forward_hook(after).remove)
        yield moments_DD


def components(moment_DD: Tensor, count: int) -> Tensor:
    """Return the eigenvectors with the largest eigenvalues, [D, count]."""
    basis_DN: Tensor = torch.linalg.eigh(moment_DD).eigenvectors[:, -count:].flip(1)
    # A component's sign is arbitrary. Make its largest entry positive, so that the result does not
    # depend on the processor.
    signs_1N: Tensor = basis_DN.gather(0, basis_DN.abs().argmax(0, keepdim=True)).sign()
    return basis_DN * signs_1N


def _fill(
    parameters: Iterable[tuple[str, nn.Parameter, Tensor | None]],
    basis_DN: Tensor | None,
    maps: Mapping[int, Maps],
) -> list[str]:
    """Fill the student's (name, parameter, teacher's tensor), and return the names it could not
    fill."""
    unfilled = []
    for name, parameter, origin in parameters:
        part = (
            None
            if origin is None
            else _part(name, origin, parameter, basis_DN, maps.get(id(parameter), {}))
        )
        if part is not None:
            parameter.copy_(part)
        elif parameter.requires_grad:
            # A fixed table (RoFormer's sinusoids) already fits the student's shape.
            unfilled.append(name)
    return unfilled


def _part(
    name: str, origin: Tensor, target: Tensor, basis_DN: Tensor | None, maps: Maps
) -> Tensor | None:
    """Return the student's part of a teacher's tensor, or None if a dimension has no map."""
    part = origin.detach()
    if part.dim() != target.dim():
        return None
    # A gain or a depthwise convolution is a diagonal matrix; this is its diagonal in another basis.
    gain = name.endswith("weight") and (part.dim() == 1 or (part.dim() == 3 and part.shape[1] == 1))
    for dim, (size, narrow) in enumerate(zip(origin.shape, target.shape, strict=True)):
        kept = maps.get(dim)
        if kept is None and size == narrow:
            continue
        if kept is None and basis_DN is not None and (size, narrow) == basis_DN.shape:
            kept = basis_DN.square() if gain else basis_DN
        if kept is None or kept.shape[-1] != narrow:
            return None
        part = reduced(part, kept, dim)
    return part


def reduced(x: Tensor, kept: Tensor | None, dim: int = -1) -> Tensor:
    """Map a dimension of a tensor to the student's."""
    if kept is None:
        return x
    kept = kept.to(x.device)
    if kept.dim() == 1:
        return x.index_select(dim, kept)
    return (x.double().movedim(dim, -1) @ kept).movedim(-1, dim).to(x.dtype)


def reduced_states(x_RD: Tensor, kept: Tensor | None) -> Tensor:
    """Map states to the student's dimensions, in float32, which is faster and as good."""
    if kept is None or kept.dim() == 1:
        return reduced(x_RD, kept)
    # A hook calls this while a model runs in bfloat16.
    with torch.autocast("cpu", enabled=False):
        return x_RD @ kept.to(x_RD)


def _keep_mean(
    wide: nn.Linear,
    narrow: nn.Linear,
    mean_E: Tensor,
    maps: Mapping[int, Maps],
    basis_DN: Tensor | None,
) -> None:
    """Add the mean of the inputs that a student's linear lacks to its bias."""
    kept = maps.get(id(narrow.weight), {}).get(1)
    if kept is None or narrow.bias is None:
        return
    lost_E = mean_E[: len(kept)].clone() if kept.dim() > 1 else mean_E.clone()
    if kept.dim() == 1:
        lost_E[kept] = 0
    else:
        lost_E -= kept @ (kept.T @ lost_E)
    shift_D = wide.weight.detach().cpu().double()[:, : len(lost_E)] @ lost_E
    if basis_DN is not None and (len(shift_D), len(narrow.bias)) == basis_DN.shape:
        shift_D = shift_D @ basis_DN
    narrow.bias.add_(shift_D.to(narrow.bias))


def _attention_maps(
    layout: Layout,
    heads: Heads,
    narrow_heads: Heads,
    student: nn.Module,
    teacher_linears: Matrices,
    student_linears: Matrices,
    moments: Moments,
) -> dict[int, Maps]:
    """Return the maps of the attention of one layer: id of a student parameter -> maps.

    The residual stream has no map here.
    """
    maps: dict[int, Maps] = {}
    q, k, v, o = _head_maps(layout, heads, narrow_heads, teacher_linears, moments)
    if narrow_heads.each < heads.each:
        # Attention divides q·k by the root of the head's width. The student's scores are the
        # teacher's if q and k make up for the smaller width. A rotary pair also stands for its
        # neighbours, so the scores are larger by the ratio of the widths.
        scale = (narrow_heads.each / heads.each) ** (-0.25 if layout.rotary else 0.25)
        q, k = scale * q, scale * k
    if layout.fused:
        sizes = [each["Q"][0][0].out_features for each in (teacher_linears, student_linears)]
        rows_EN = torch.zeros(*sizes, dtype=torch.float64)
        for letter, kept in zip("QKV", (q, k, v), strict=True):
            at_E, at_N = (
                torch.arange(size)[each[letter][0][1]]
                for size, each in zip(sizes, (teacher_linears, student_linears), strict=True)
            )
            rows_EN[at_E[:, None], at_N] = kept
        _put(maps, student_linears["Q"][0][0], rows_EN)
    else:
        for letter, kept in zip("QKV", (q, k, v), strict=True):
            _put(maps, student_linears[letter][0][0], kept)
    for name, kept in zip(layout.bias or (), (q, v), strict=False):
        maps.setdefault(id(student.get_parameter(name)), {})[0] = kept
    for name, module in student.named_modules():
        if name in layout.like_q and isinstance(module, nn.Linear):
            _put(maps, module, q)
    output = student_linears["O"][0][0]
    if output.in_features == narrow_heads.width:
        maps.setdefault(id(output.weight), {})[1] = o
    return maps


def _unit_maps(
    units: Moment, count: int, teacher_linears: Matrices, student_linears: Matrices
) -> dict[int, Maps]:
    """Return the maps of a block with fewer units: id of a student parameter -> maps.

    The block keeps the `count` units whose contribution to its output varies most.
    """
    down_DF = _weight(*teacher_linears["D"][0]).double()
    score_F = units.about(teacher_linears["D"][0][0].bias) * down_DF.square().sum(0)
    kept = score_F.topk(count).indices.sort().values
    maps: dict[int, Maps] = {id(student_linears["D"][0][0].weight): {1: kept}}
    for linear, _ in student_linears["U"]:
        blocks = linear.out_features // count
        _put(maps, linear, torch.cat([kept + i * len(score_F) for i in range(blocks)]))
    return maps


def _head_maps(
    layout: Layout,
    heads: Heads,
    narrow_heads: Heads,
    teacher_linears: Matrices,
    moments: Moments,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return bases for the rows of q, k and v and for the columns of o, [E, N] float64."""
    # ConvBERT's output projection also reads a convolution, whose inputs come after the heads.
    o_ED = _weight(*teacher_linears["O"][0]).T[: heads.width].double()
    output_EE = o_ED @ o_ED.T
    context_EE = moments["O"].about(teacher_linears["O"][0][0].bias)[: heads.width, : heads.width]
    by_head = (heads.count, heads.each, heads.count, heads.each)
    contribution_AA = (context_EE * output_EE).view(by_head).sum((1, 3))
    query_RE, key_E = _kept_dimensions(heads, narrow_heads, contribution_AA.diagonal())

    def of_queries(moment_EE: Tensor) -> Tensor:
        return torch.stack([moment_EE[kept_E][:, kept_E] for kept_E in query_RE]).sum(0)

    qk = (
        _pairs_in_heads(layout, len(key_E), heads.each, narrow_heads)
        if layout.rotary
        else _components_in_heads(
            of_queries(moments["Q"].second),
            # The mean of k adds the same number to all scores of a query.
            moments["K"].variance[key_E][:, key_E],
            narrow_heads,
        )
    )
    vo = (
        qk
        if layout.rotary_value
        else _components_in_heads(of_queries(context_EE), of_queries(output_EE), narrow_heads)
    )
    (q, k), (o, v) = (
        _bases_of_heads(bases, query_RE, key_E, heads, narrow_heads) for bases in (qk, vo)
    )
    return q, k, v, o


def _kept_dimensions(heads: Heads, narrow: Heads, contribution_A: Tensor) -> tuple[Tensor, Tensor]:
    """Return the dimensions of q, [R, E], and of k, [E], of the heads that a student keeps.

    Each row of the dimensions of q has, for every dimension of k, the one that is multiplied by it,
    in one of the R query heads that are kept of each group.
    """
    size_GR, query_GR = contribution_A.view(-1, heads.group).topk(min(heads.group, narrow.group))
    fits = narrow.each <= heads.each and narrow.group <= heads.group
    count = min(narrow.key_value, heads.key_value) if fits else heads.key_value
    key_G = size_GR.sum(1).topk(count).indices.sort().values
    query_RG = (query_GR[key_G].sort().values + heads.group * key_G[:, None]).T
    inside = torch.arange(heads.each)
    query_RE, key_E = (
        (kept[..., None] * heads.each + inside).flatten(-2) for kept in (query_RG, key_G)
    )
    return query_RE, key_E


def _components_in_heads(one_EE: Tensor, other_EE: Tensor, narrow: Heads) -> Bases:
    """Return the principal components, under two moments of equal weight, of each span."""
    bases = []
    for part in _parts(len(one_EE), narrow.key_value):
        spans = [moment_EE[part, part] for moment_EE in (one_EE, other_EE)]
        # A head whose weights were all pruned has no moments.
        scaled = [span / span.trace().clamp(min=TINY) for span in spans]
        bases.append((part, components(torch.stack(scaled).sum(0), narrow.each)))
    return bases


def _pairs_in_heads(layout: Layout, size: int, each: int, narrow: Heads) -> Bases:
    """Return the pairs of rotated dimensions at the frequencies of the student's table.

    A span is widened to whole heads, so that it has all frequencies.
    """
    bases, halves = [], layout.rotary == "halves"
    for part in _parts(size, narrow.key_value):
        start, end = part.start // each, math.ceil(part.stop / each)
        span_E = torch.arange((end - start) * each)
        basis_EE = torch.eye(len(span_E), dtype=torch.float64)
        if layout.rotary == "partial":
            # The heads have the same width, and each dimension keeps its place.
            place_N = torch.arange(each)
            kept_N = place_N * (end - start) // each * each + place_N
            bases.append((slice(start * each, end * each), basis_EE[:, kept_N]))
            continue
        by_head = span_E.view(end - start, 2, -1) if halves else span_E.view(end - start, -1, 2).mT
        # From the highest frequency to the lowest.
        pairs_P2 = by_head.permute(2, 0, 1).reshape(-1, 2)
        places = torch.arange(narrow.each // 2) * len(pairs_P2) / (narrow.each // 2)
        kept_P2 = pairs_P2[places.round().long()]
        kept_N = (kept_P2.T if halves else kept_P2).flatten()
        bases.append((slice(start * each, end * each), basis_EE[:, kept_N]))
    return bases


def _bases_of_heads(
    bases: Bases, query_RE: Tensor, key_E: Tensor, heads: Heads, narrow: Heads
) -> tuple[Tensor, Tensor]:
    """Return the bases of all query heads and of all key/value heads, [E, N] float64.

    The query heads of a student's group share the dimensions of q that belong to the group's span.
    """
    query_EAN = torch.zeros(heads.width, narrow.count, narrow.each, dtype=torch.float64)
    key_EGN = torch.zeros(
        heads.key_value * heads.each, narrow.key_value, narrow.each, dtype=torch.float64
    )
    for g, (span, basis_EN) in enumerate(bases):
        key_EGN[key_E[span], g] = basis_EN
        query_E = query_RE[:, span].flatten()
        for a, part in enumerate(_parts(len(query_E), narrow.group), g * narrow.group):
            query_EAN[query_E[part], a] = basis_EN.repeat(len(query_RE), 1)[part]
    return query_EAN.flatten(1), key_EGN.flatten(1)


def _parts(size: int, count: int) -> list[slice]:
    """Divide `size` indices into `count` slices, whose lengths differ by at most one."""
    return list(starmap(slice, pairwise(a * size // count for a in range(count + 1))))


def _put(maps: dict[int, Maps], linear: nn.Linear, rows: Tensor) -> None:
    for parameter in linear.parameters():
        maps.setdefault(id(parameter), {})[0] = rows


def _weight(linear: nn.Linear, rows: Rows) -> Tensor:
    return linear.weight.detach().float().cpu()[rows]
