"""Random signals for any method, and definitions of the losses in float64, one query at a time."""

import torch

from kdcli.types import IGNORED, ModelShape, Needs, Signals, labelled_places

WORDS = 23
PADDED = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0]])
LABELS = torch.full((3, 5), IGNORED)
LABELS[0, 2], LABELS[0, 4], LABELS[1, 0], LABELS[2, 0] = 7, 0, 22, 3
LABELLED = labelled_places({"labels": LABELS})


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def signals(needs: Needs, shape: ModelShape, seed: int, *, grad: bool = False) -> Signals:
    """Normal signals of the rows in PADDED, with logits at the tokens that LABELS labels."""
    batch, length = PADDED.shape
    sizes = dict.fromkeys(
        ("q", "k", "v"), (batch, shape.heads, length, shape.hidden // shape.heads)
    )
    sizes["hidden"] = (batch, length, shape.hidden)

    def drawn(place: int, *size: int) -> torch.Tensor:
        return normal(*size, seed=1000 * seed + place).requires_grad_(grad)

    layers = {
        kind: {n: drawn(100 * i + n, *size) for n in sorted(getattr(needs, kind))}
        for i, (kind, size) in enumerate(sizes.items())
    }
    logits = drawn(999, int((LABELS != IGNORED).sum()), WORDS) if needs.masked_logits else None
    return Signals(mask=PADDED, labels=LABELS, labelled=LABELLED, logits=logits, **layers)


def of_layers(s: Signals) -> list[torch.Tensor]:
    return [x for layers in (s.q, s.k, s.v, s.hidden) for x in layers.values()]


def leaves(s: Signals) -> list[torch.Tensor]:
    return of_layers(s) + ([] if s.logits is None else [s.logits])


def kl_of_row(t: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    log_p, log_q = t.log_softmax(-1), s.log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum()


def mse_of_row(t: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    return ((t - s) ** 2).mean()


def relation_reference(of_row, tx, ty, sx, sy, mask) -> torch.Tensor:
    """Mean of `of_row(teacher scores, student scores)` over heads and real queries, over the keys
    that a query sees."""
    batch, heads, length, _ = tx.shape
    total, rows = torch.zeros((), dtype=torch.float64), 0
    for b in range(batch):
        for i in range(length):
            if mask is None:
                keys = list(range(length))
            elif mask.dim() == 2:
                keys = [j for j in range(length) if mask[b, j] and mask[b, i]]
            else:
                keys = [j for j in range(length) if mask[b, 0, i, j]]
            rows += bool(keys)
            for a in range(heads if keys else 0):
                t = ty[b, a, keys].double() @ tx[b, a, i].double() / tx.shape[-1] ** 0.5
                s = sy[b, a, keys].double() @ sx[b, a, i].double() / sx.shape[-1] ** 0.5
                total = total + of_row(t, s)
    return total / (heads * max(rows, 1))


def hidden_reference(teacher, student, mask) -> torch.Tensor:
    """Mean squared error of the real tokens' states."""
    real = mask.bool()
    return ((teacher.double() - student.double()) ** 2)[real].mean(-1).mean()
