"""Choose which weights to keep, given a score for each weight, without sorting all scores.

A regular sample of the scores yields a bracket around the k-th largest score, and only the scores
within the bracket are examined closely. This takes about three passes over the scores of a matrix
or of a whole model, which are never concatenated. On an accelerator, each pass would wait for the
device, so there the k-th largest score is found bit by bit, in 32 passes without waiting.

Scores are finite floats of any dtype. Masks are bool, on the scores' device. No mask is empty: each
matrix keeps at least its best weight.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

# Minimum size of the sample. For n scores it has n^⅔ elements, so that the sample and its bracket
# cost about the same.
MIN_SAMPLE = 1024
# Half the width of the bracket, in standard deviations of the sampled rank. If the k-th score lies
# outside the bracket, the result is the same but takes longer.
BRACKET_DEVIATIONS = 4.0
# Mean sigmoid below which float32 loses digits.
SMALLEST_SCORE = 1e-30


def keep_top(scores: Tensor, keep: int) -> Tensor:
    """Return the mask of exactly the `keep` largest scores, in the shape of the scores.

    The lowest index wins a tie. Raises ValueError if there are fewer than `keep` scores.
    """
    return _keep_top([scores], keep)[0]


def select_masks(
    masking: str,
    scores: Mapping[str, Tensor],
    kinds: Mapping[str, str],
    density: float,
    temperature: float = 1.0,
) -> dict[str, Tensor]:
    """Choose masks of a given density.

    Args:
        masking: `local`, `global` or `proportional`.
        scores: name -> scores [rows, in].
        kinds: name -> kind of the matrix (Q, K, V, O, U, D, ...), for `proportional` only.
        density: Share of the weights to keep.
        temperature: For `proportional` only.
    """
    if masking == "proportional":
        return proportional(scores, kinds, density, temperature)
    return {"local": local, "global": global_}[masking](scores, density)


def local(scores: Mapping[str, Tensor], density: float) -> dict[str, Tensor]:
    """Keep the top `density` of each matrix (SMP-L): round(density · numel), at least one."""
    keep = {name: max(1, round(density * s.numel())) for name, s in scores.items()}
    return _keep_each(scores, keep)


def global_(scores: Mapping[str, Tensor], density: float) -> dict[str, Tensor]:
    """Keep the top `density` of all scores together (SMP-G).

    This keeps round(density · total) weights, and one more for each matrix that would be empty.
    """
    total = sum(s.numel() for s in scores.values())
    masks = _keep_top(list(scores.values()), round(density * total))
    return _raise_empty(scores, dict(zip(scores, masks, strict=True)))


def proportional(
    scores: Mapping[str, Tensor], kinds: Mapping[str, str], density: float, temperature: float = 1.0
) -> dict[str, Tensor]:
    """Choose densities in proportion to the mean sigmoid of the scores (SMP-S, eq. 5).

        v_l = v · Λ · r(S_l) / Σ_k r(S_k),    r(S) = mean σ(S / p)

    The sum is over the Λ matrices of one kind, and p is the temperature. A v_l above 1 becomes 1,
    and the other matrices of the kind share the surplus. Each count is within one weight of v_l ·
    numel. The counts sum to round(density · total), unless matrices had to be raised to one weight.
    """
    ideal: dict[str, float] = {}
    log_means = _log_mean_sigmoids(scores, temperature)
    for kind in dict.fromkeys(kinds[name] for name in scores):
        names = [name for name in scores if kinds[name] == kind]
        sizes = [scores[n].numel() for n in names]
        counts_of_kind = shares(sizes, [log_means[n] for n in names], density)
        ideal |= dict(zip(names, counts_of_kind, strict=True))
    counts = apportion(ideal, round(density * sum(s.numel() for s in scores.values())))
    return _keep_each(scores, {name: max(1, counts[name]) for name in scores})


def threshold(scores: Mapping[str, Tensor], tau: float) -> dict[str, Tensor]:
    """Keep σ(S) > τ, 0 ≤ τ < 1 (SMP-T, soft movement).

    The density depends on the scores.
    """
    # Comparing the scores with the inverse of the sigmoid saves an exponential per weight.
    limit = math.log(tau / (1 - tau)) if tau > 0 else -math.inf
    return _raise_empty(scores, {name: s > limit for name, s in scores.items()})


def shares(sizes: Sequence[int], log_weights: Sequence[float], density: float) -> list[float]:
    """Return how many elements to keep of each matrix, density · Σ sizes in total.

    The densities are proportional to the weights, and no density exceeds 1.

    Args:
        sizes: Numbers of elements.
        log_weights: Finite logarithms of the weights.
        density: Share of all elements to keep.
    """
    remaining, open_ = density * sum(sizes), list(range(len(sizes)))
    kept = [float(size) for size in sizes]
    while open_:
        # Divide by the largest remaining weight, because the weights may underflow.
        largest = max(log_weights[i] for i in open_)
        weights = {i: math.exp(log_weights[i] - largest) for i in open_}
        factor = remaining / sum(sizes[i] * weights[i] for i in open_)
        if not (full := [i for i in open_ if factor * weights[i] > 1]):
            for i in open_:
                kept[i] = factor * weights[i] * sizes[i]
            break
        # A full matrix leaves more for the others. Their shares can only grow, so a full matrix
        # stays full.
        remaining -= sum(sizes[i] for i in full)
        open_ = [i for i in open_ if i not in full]
    return kept


def _log_mean_sigmoids(scores: Mapping[str, Tensor], temperature: float) -> dict[str, float]:
    """Return log mean σ(S / temperature) of each matrix. Waits for an accelerator once."""
    means = [(s.float() / temperature).sigmoid().mean() for s in scores.values()]
    log_means = {}
    for (name, s), mean in zip(scores.items(), torch.stack(means).tolist(), strict=True):
        if mean > SMALLEST_SCORE:
            log_means[name] = math.log(mean)
        else:
            # This is slower and waits for the device again, but it does not underflow.
            log_sum = F.logsigmoid(s.float().cpu() / temperature).double().logsumexp((0, 1))
            log_means[name] = float(log_sum) - math.log(s.numel())
    return log_means


def apportion(ideal: Mapping[str, float], total: int) -> dict[str, int]:
    """Round numbers so that they sum to `total`.

    The numbers with the largest remainders are rounded up.
    """
    counts = {name: math.floor(value) for name, value in ideal.items()}
    by_remainder = sorted(ideal, key=lambda n: counts[n] - ideal[n])
    for name in by_remainder[: total - sum(counts.values())]:
        counts[name] += 1
    return counts


def down_to_one(masks: Mapping[str, Tensor]) -> list[str]:
    """Return a note that names the matrices with a single weight, the minimum. Empty if none."""
    if not (names := [name for name, mask in masks.items() if int(mask.sum()) == 1]):
        return []
    examples = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    counts = f"{len(names):,} of {len(masks):,} matrices"
    return [f"{counts} keep a single weight, the minimum that a mask leaves: {examples}"]


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
    """Return masks of the `keep` largest scores of each matrix."""
    if _on_cpu(scores.values()):
        return {name: keep_top(s, keep[name]) for name, s in scores.items()}
    masks: dict[str, Tensor] = {}
    for size in dict.fromkeys(s.numel() for s in scores.values()):
        same_size = {name: s for name, s in scores.items() if s.numel() == size}
        scores_RN = torch.stack([s.flatten() for s in same_size.values()])
        kept_RN = _keep_by_bits(scores_RN, [keep[name] for name in same_size])
        for (name, s), kept in zip(same_size.items(), kept_RN, strict=True):
            masks[name] = kept.view_as(s)
    return {name: masks[name] for name in scores}


def _keep_by_bits(scores_RN: Tensor, keep: Sequence[int]) -> Tensor:
    """Return masks [R, N] of the `keep` (1 to N) largest scores of each row, compared in float32.

    The first of equal scores wins. Nothing is read back from the device: the `keep`-th largest
    score of a row is built from its highest bit down.
    """
    # A blocking copy would wait for the device.
    keep_R1 = torch.tensor(keep)[:, None].to(scores_RN.device, non_blocking=True)
    # The bits of floats of one sign, read as integers, have the same order. Adding 0 turns -0 into
    # 0.
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
    """Return masks of the `keep` largest scores of all pieces. Ties go by piece, then by index."""
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
    """Return the `rank`-th largest (1-based) of all elements together."""
    low, high = _bracket(pieces, rank)
    above, between = 0, []
    for piece in pieces:
        is_above = piece > high
        above += int(is_above.count_nonzero())
        between.append(piece[(piece >= low).logical_xor_(is_above)])
    inside = sum(len(b) for b in between)
    if rank <= above:
        # The score lies outside the bracket, so search only that side.
        between = [p[p > high] for p in pieces]
    elif rank > above + inside:
        between, rank = [p[p < low] for p in pieces], rank - above - inside
    else:
        rank -= above
    values = torch.cat(between)
    smallest, largest = values.aminmax()
    # Equal scores, as before the first step, make selection algorithms slow.
    if smallest == largest:
        return float(smallest)
    return float(values.kthvalue(len(values) - rank + 1).values)


def _bracket(pieces: Sequence[Tensor], rank: int) -> tuple[float, float]:
    """Return two values that very likely enclose the `rank`-th largest element, inclusively."""
    total = sum(p.numel() for p in pieces)
    # An odd stride reaches every column of a matrix.
    stride = int(total / max(MIN_SAMPLE, total ** (2 / 3))) | 1
    sample = torch.cat([p.reshape(-1)[::stride] for p in pieces]).sort(descending=True).values
    share = rank / total
    middle = share * len(sample)
    spread = BRACKET_DEVIATIONS * math.sqrt(len(sample) * share * (1 - share)) + 1
    first, last = math.floor(middle - spread), math.ceil(middle + spread)
    high = float(sample[first]) if first >= 0 else math.inf
    low = float(sample[last]) if last < len(sample) else -math.inf
    return low, high
