"""Masking functions: which weights stay, given a score for each. Pure functions that sort nothing.

The k-th largest score is bracketed by a regular sample, and only scores within the bracket are looked at closely: about
three passes over the scores, of one matrix or of all of a model, which are never concatenated. An accelerator would be
waited for at each of these looks: there the k-th largest is found bit by bit, in 32 passes. Scores are finite floats of
any dtype; masks are bool on the scores' device. No mask is empty: a matrix keeps at least its best weight.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

# Least size of the sample; of n scores it has n^⅔, so that the sample and its bracket cost about the same.
SAMPLE = 1024
MASKINGS = (
    "local",
    "global",
    "proportional",
)  # Names of the masking functions that keep a given density, see `select`
SMALL = 1e-30  # Mean sigmoid below which float32 loses digits
WIDTH = 4.0  # Half the bracket in standard deviations of the sampled rank. A k-th score outside it only costs time


def keep_top(scores: Tensor, keep: int) -> Tensor:
    """Mask of exactly the `keep` largest scores of any shape, among equal ones those of the lowest index."""
    return _keep_top([scores], keep)[0]


def select(
    masking: str,
    scores: Mapping[str, Tensor],
    kinds: Mapping[str, str],
    density: float,
    temperature: float = 1.0,
) -> dict[str, Tensor]:
    """Masks of a density by one of `MASKINGS`. `scores`: name -> scores [rows, in]. `kinds`: name -> Q, K, V, O, U, D,
    ...; only `proportional` uses `kinds` and `temperature`."""
    if masking == "proportional":
        return proportional(scores, kinds, density, temperature)
    return {"local": local, "global": global_}[masking](scores, density)


def local(scores: Mapping[str, Tensor], density: float) -> dict[str, Tensor]:
    """The top `density` of each matrix by itself (SMP-L): round(density · numel), at least one."""
    return _keep_each(
        scores, {name: max(1, round(density * s.numel())) for name, s in scores.items()}
    )


def global_(scores: Mapping[str, Tensor], density: float) -> dict[str, Tensor]:
    """The top `density` of all scores together (SMP-G): round(density · total), and one for each empty matrix."""
    total = sum(s.numel() for s in scores.values())
    masks = _keep_top(list(scores.values()), round(density * total))
    return _raise_empty(scores, dict(zip(scores, masks, strict=True)))


def proportional(
    scores: Mapping[str, Tensor], kinds: Mapping[str, str], density: float, temperature: float = 1.0
) -> dict[str, Tensor]:
    """Densities in proportion to the mean sigmoid of the scores, among the matrices of one kind (SMP-S, eq. 5).

        v_l = v · Λ · r(S_l) / Σ_k r(S_k),    r(S) = mean σ(S / p)

    over the Λ matrices of a kind, p the temperature. A v_l above 1 becomes 1, and the others of its kind share the
    rest. Each count is within one weight of v_l · numel, and all sum to round(density · total), save for matrices
    raised to one weight.
    """
    ideal: dict[str, float] = {}
    log_means = _log_mean_sigmoids(scores, temperature)
    for kind in dict.fromkeys(kinds[name] for name in scores):
        names = [name for name in scores if kinds[name] == kind]
        sizes = [scores[n].numel() for n in names]
        ideal |= dict(
            zip(names, shares(sizes, [log_means[n] for n in names], density), strict=True)
        )
    counts = apportion(ideal, round(density * sum(s.numel() for s in scores.values())))
    return _keep_each(scores, {name: max(1, counts[name]) for name in scores})


def threshold(scores: Mapping[str, Tensor], tau: float) -> dict[str, Tensor]:
    """Keep σ(S) > τ, 0 ≤ τ < 1 (SMP-T, soft movement); the density depends on the scores."""
    # The sigmoid is monotone: comparing scores with its inverse saves an exponential a weight.
    limit = math.log(tau / (1 - tau)) if tau > 0 else -math.inf
    return _raise_empty(scores, {name: s > limit for name, s in scores.items()})


def shares(sizes: Sequence[int], log_weights: Sequence[float], density: float) -> list[float]:
    """How many of `sizes` to keep: density · Σ sizes in all, densities in proportion to the weights, whose logarithms
    are finite, and none above 1."""
    left, open_ = density * sum(sizes), list(range(len(sizes)))
    kept = [float(size) for size in sizes]
    while open_:
        # Relative to the largest that is left: weights may be too small for a number.
        largest = max(log_weights[i] for i in open_)
        weights = {i: math.exp(log_weights[i] - largest) for i in open_}
        factor = left / sum(sizes[i] * weights[i] for i in open_)
        if not (full := [i for i in open_ if factor * weights[i] > 1]):
            for i in open_:
                kept[i] = factor * weights[i] * sizes[i]
            break
        # A full one leaves more for the others, whose share can only grow: no full one is ever reopened.
        left -= sum(sizes[i] for i in full)
        open_ = [i for i in open_ if i not in full]
    return kept


def _log_mean_sigmoids(scores: Mapping[str, Tensor], temperature: float) -> dict[str, float]:
    """log mean σ(S / temperature) of each matrix. An accelerator is waited for once."""
    means = torch.stack(
        [(s.float() / temperature).sigmoid().mean() for s in scores.values()]
    ).tolist()
    found = {}
    for (name, s), mean in zip(scores.items(), means, strict=True):
        if mean > SMALL:
            found[name] = math.log(mean)
        else:
            # Slower, but nothing underflows; and again waited for.
            sums = F.logsigmoid(s.float().cpu() / temperature).double().logsumexp((0, 1))
            found[name] = float(sums) - math.log(s.numel())
    return found


def apportion(ideal: Mapping[str, float], total: int) -> dict[str, int]:
    """Whole numbers that sum to `total`, each the ideal one rounded down or up: the largest remainders go up."""
    counts = {name: math.floor(value) for name, value in ideal.items()}
    for name in sorted(ideal, key=lambda n: counts[n] - ideal[n])[: total - sum(counts.values())]:
        counts[name] += 1
    return counts


def down_to_one(masks: Mapping[str, Tensor]) -> list[str]:
    """A note on matrices that keep a single weight, the least a mask leaves; nothing if there are none."""
    if not (names := [name for name, mask in masks.items() if int(mask.sum()) == 1]):
        return []
    few = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return [
        f"{len(names):,} of {len(masks):,} matrices keep a single weight, the least a mask leaves them: {few}"
    ]


def _raise_empty(scores: Mapping[str, Tensor], masks: dict[str, Tensor]) -> dict[str, Tensor]:
    if _on_cpu(scores.values()):
        return {
            name: mask if bool(mask.any()) else keep_top(scores[name], 1)
            for name, mask in masks.items()
        }
    return {name: mask | (_first_best(scores[name]) & ~mask.any()) for name, mask in masks.items()}


def _first_best(scores: Tensor) -> Tensor:
    return (torch.arange(scores.numel(), device=scores.device) == scores.argmax()).view_as(scores)


def _on_cpu(pieces: Iterable[Tensor]) -> bool:
    return next(iter(pieces)).device.type == "cpu"


def _keep_each(scores: Mapping[str, Tensor], keep: Mapping[str, int]) -> dict[str, Tensor]:
    """Masks of the `keep` largest of each matrix by itself."""
    if _on_cpu(scores.values()):
        return {name: keep_top(s, keep[name]) for name, s in scores.items()}
    masks: dict[str, Tensor] = {}
    for size in dict.fromkeys(s.numel() for s in scores.values()):
        alike = {name: s for name, s in scores.items() if s.numel() == size}
        kept_RN = _keep_by_bits(
            torch.stack([s.flatten() for s in alike.values()]), [keep[name] for name in alike]
        )
        masks |= {
            name: kept.view_as(alike[name]) for name, kept in zip(alike, kept_RN, strict=True)
        }
    return {name: masks[name] for name in scores}


def _keep_by_bits(scores_RN: Tensor, keep: Sequence[int]) -> Tensor:
    """Masks [R, N] of the `keep` (1 to N) largest of each row, among equal ones the first, in float32. Reads nothing
    back: the `keep`-th largest of a row is built from its highest bit down."""
    # Not blocking: such a copy would wait too.
    keep_R1 = torch.tensor(keep)[:, None].to(scores_RN.device, non_blocking=True)
    # As integers, floats of one sign are in order. Adding 0 makes -0 and 0 one.
    bits_RN = (scores_RN.float() + 0.0).view(torch.int32)
    order_RN = bits_RN ^ ((bits_RN >> 31) & 0x7FFFFFFF)
    limit_R1 = torch.full_like(keep_R1, -(2**31), dtype=torch.int32)
    for bit in range(31, -1, -1):
        higher_R1 = limit_R1 ^ (-(2**31) if bit == 31 else 1 << bit)
        enough_R1 = (order_RN >= higher_R1).sum(1, keepdim=True) >= keep_R1
        limit_R1 = torch.where(enough_R1, higher_R1, limit_R1)
    above_RN, ties_RN = order_RN > limit_R1, order_RN == limit_R1
    left_R1 = keep_R1 - above_RN.sum(1, keepdim=True)
    return above_RN | (ties_RN & (ties_RN.cumsum(1, dtype=torch.int32) <= left_R1))


def _keep_top(pieces: Sequence[Tensor], keep: int) -> list[Tensor]:
    """Masks of the `keep` largest of all pieces; equal ones by piece, then by index."""
    total = sum(p.numel() for p in pieces)
    if not 0 <= keep <= total:
        raise ValueError(f"cannot keep {keep} of {total}")
    if keep in (0, total):
        return [torch.full_like(p, bool(keep), dtype=torch.bool) for p in pieces]
    if not _on_cpu(pieces):
        flat_N = torch.cat([p.flatten() for p in pieces])
        (kept_N,) = _keep_by_bits(flat_N[None], [keep])
        parts = kept_N.split([p.numel() for p in pieces])
        return [part.view_as(p) for part, p in zip(parts, pieces, strict=True)]
    limit = _kth(pieces, keep)
    masks = [(p >= limit).contiguous() for p in pieces]
    excess = sum(int(m.count_nonzero()) for m in masks) - keep
    for piece, mask in zip(reversed(pieces), reversed(masks), strict=True):
        if excess == 0:
            break
        ties = (piece == limit).flatten().nonzero()[:, 0]
        out = ties[max(0, len(ties) - excess) :]
        mask.view(-1)[out] = False
        excess -= len(out)
    return masks


def _kth(pieces: Sequence[Tensor], rank: int) -> float:
    """The `rank`-th largest (1-based) of all elements together."""
    low, high = _bracket(pieces, rank)
    above, between = 0, []
    for piece in pieces:
        is_above = piece > high
        above += int(is_above.count_nonzero())
        between.append(piece[(piece >= low).logical_xor_(is_above)])
    inside = sum(len(b) for b in between)
    if rank <= above:
        # Outside the bracket: search only the side where it is.
        between = [p[p > high] for p in pieces]
    elif rank > above + inside:
        between, rank = [p[p < low] for p in pieces], rank - above - inside
    else:
        rank -= above
    values = torch.cat(between)
    least, most = values.aminmax()
    # Equal scores, as before the first step, make selection algorithms slow.
    return float(least if least == most else values.kthvalue(len(values) - rank + 1).values)


def _bracket(pieces: Sequence[Tensor], rank: int) -> tuple[float, float]:
    """Two values that very likely enclose the `rank`-th largest, both included."""
    total = sum(p.numel() for p in pieces)
    # An odd stride meets every column of a matrix.
    stride = int(total / max(SAMPLE, total ** (2 / 3))) | 1
    sample = torch.cat([p.reshape(-1)[::stride] for p in pieces]).sort(descending=True).values
    share = rank / total
    middle, spread = share * len(sample), WIDTH * math.sqrt(len(sample) * share * (1 - share)) + 1
    first, last = math.floor(middle - spread), math.ceil(middle + spread)
    high = float(sample[first]) if first >= 0 else math.inf
    low = float(sample[last]) if last < len(sample) else -math.inf
    return low, high
