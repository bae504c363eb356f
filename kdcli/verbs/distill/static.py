"""Make a static student of an embedding model: one vector per token, fitted to the teacher.

The start is the teacher's vector of each single token, weighted by how rare the token is (smooth
inverse frequency, Arora et al. 2017). Ridge regression then moves the table T as far from this
start T0 as the teacher's vectors Y of the training texts ask for:

    min  ||A T - Y||² + λ ||T - T0||²

A holds the share of each token in each text. Conjugate gradients solve it without forming AᵀA.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kdcli.data.labelled.features import TokenizedRows
from kdcli.engine.evaluation import to_device
from kdcli.engine.launch import Session
from kdcli.models.shape import InitializedStudent
from kdcli.models.static import as_static
from kdcli.types import Array
from kdcli.workloads.embedder import Embedder

RARE = 1e-3
"""The frequency at which a token's weight is one half."""
TOKENS_AT_ONCE = 1024
"""Number of single tokens in one forward pass of the teacher."""
PENALTIES = (1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001)
"""The values of λ that are tried, the strongest first."""
CHOOSING = 0.05
"""The share of the training texts that chooses λ."""
ITERATIONS = 100
"""Maximum number of conjugate gradient iterations."""
TOLERANCE = 1e-3
"""The residual, relative to the first one, at which the iterations end."""


@dataclass(frozen=True)
class _Bags:
    """Weighted sums of rows: the numbers of the rows, their weights, and where each sum begins."""

    numbers_T: Tensor
    weights_T: Tensor
    begins: Tensor

    def sums(self, x: Tensor) -> Tensor:
        """Return the weighted sum of the rows of `x` [R, D] in each bag."""
        return F.embedding_bag(
            self.numbers_T, x, self.begins, mode="sum", per_sample_weights=self.weights_T
        )


@dataclass(frozen=True)
class TokenShares:
    """The share of each token in each text: the sparse matrix A [N, V], by row and by column.

    Special tokens do not count.
    """

    by_text: _Bags
    by_token: _Bags

    @classmethod
    def of(
        cls, rows: TokenizedRows, numbers: Array, vocab_size: int, special: Array
    ) -> TokenShares:
        """Count the tokens of some rows."""
        begins = rows.ends - rows.lengths
        spans = [rows.ids_T[begins[n] : rows.ends[n]] for n in numbers]
        spans = [ids[~np.isin(ids, special)] for ids in spans]
        counts_N = np.array([len(ids) for ids in spans])
        ids_T = np.concatenate(spans).astype(np.int64)
        text_T = np.repeat(np.arange(len(spans)), counts_N)
        share_T = np.repeat(1 / np.maximum(counts_N, 1), counts_N).astype(np.float32)
        order_T = np.argsort(ids_T, kind="stable")
        counts_V = np.bincount(ids_T, minlength=vocab_size)
        return cls(
            _bags(ids_T, share_T, counts_N), _bags(text_T[order_T], share_T[order_T], counts_V)
        )

    def of_texts(self, table_VD: Tensor) -> Tensor:
        """Return A T, the mean vector of each text."""
        return self.by_text.sums(table_VD)

    def of_tokens(self, texts_ND: Tensor) -> Tensor:
        """Return Aᵀ Y, the sum over the texts of each token."""
        return self.by_token.sums(texts_ND)


def _bags(numbers_T: Array, weights_T: Array, counts: Array) -> _Bags:
    begins = np.cumsum(counts) - counts
    return _Bags(*map(torch.from_numpy, (numbers_T, weights_T, begins)))


def static_student(
    rows: TokenizedRows,
    numbers: Array,
    targets_NE: Array,
    basis_ED: Array | None,
    origin: Embedder,
    session: Session,
    *,
    own_vectors: bool = True,
) -> InitializedStudent:
    """Make a static student, with vectors in a basis of the targets'.

    Args:
        rows: All texts, tokenised by `origin`.
        numbers: The numbers of the training texts.
        targets_NE: The vectors of the training texts that the student learns.
        basis_ED: The basis of the student's vectors; None for that of the targets.
        origin: The model whose tokens the student has.
        session: The device.
        own_vectors: Whether the targets are vectors of `origin`. Otherwise its vectors of single
            tokens lie in another space, and the table starts from zero.
    """
    special = torch.tensor(origin.tokenizer.all_special_ids)
    targets_ND = torch.from_numpy(targets_NE.astype(np.float32))
    if basis_ED is not None:
        targets_ND = targets_ND @ torch.from_numpy(basis_ED)
    targets_ND = F.normalize(targets_ND, dim=-1)
    vocab_size = int(origin.model.config.vocab_size)
    shares = TokenShares.of(rows, numbers, vocab_size, special.numpy())
    start_VD = torch.zeros(vocab_size, targets_ND.shape[1])
    if own_vectors:
        tokens_VE = token_vectors(origin, session)
        tokens_VD = tokens_VE if basis_ED is None else tokens_VE @ torch.from_numpy(basis_ED)
        frequency_V1 = shares.of_tokens(torch.full((len(numbers), 1), 1 / len(numbers)))
        start_VD = F.normalize(tokens_VD, dim=-1) * RARE / (RARE + frequency_V1)
        start_VD[special] = 0
    chosen_N = torch.arange(len(numbers)) % round(1 / CHOOSING) == 0
    table_VD, penalty, cosine = fit_table(start_VD, shares, targets_ND, chosen_N)
    model = as_static(table_VD)
    # The saved tokenizer adds no special tokens, so their vectors must stay zero.
    model.embeddings.register_hook(  # type: ignore[no-untyped-call]
        lambda gradient_VD: gradient_VD.index_fill(0, special, 0)
    )
    note = (
        f"a table of {vocab_size:,} token vectors, fitted to {len(numbers):,} texts with λ = "
        f"{penalty:g}; mean cosine {cosine:.3f} on a part that did not take part"
    )
    return InitializedStudent(model, [note])


def token_vectors(teacher: Embedder, session: Session) -> Tensor:
    """Return the teacher's vector of each token alone, between its special tokens, [V, E]."""
    tokenizer = teacher.tokenizer
    special = set(tokenizer.all_special_ids)
    example = list(tokenizer("a")["input_ids"])
    before = next((n for n, token in enumerate(example) if token not in special), len(example))
    after = next((n for n, t in enumerate(reversed(example)) if t not in special), 0)
    prefix, suffix = example[:before], example[len(example) - after :]
    count = int(teacher.model.config.vocab_size)
    ids_VL = torch.tensor([[*prefix, token, *suffix] for token in range(count)])
    module = teacher.captured().to(session.device).eval()
    parts = []
    with torch.inference_mode():
        for ids_BL in torch.split(ids_VL, TOKENS_AT_ONCE):
            batch = {"input_ids": ids_BL, "attention_mask": torch.ones_like(ids_BL)}
            parts.append(module(to_device(session.device, batch)).pooled.float().cpu())
    return torch.cat(parts).clone()


def fit_table(
    start_VD: Tensor, shares: TokenShares, targets_ND: Tensor, chosen_N: Tensor
) -> tuple[Tensor, float, float]:
    """Fit a table to the vectors of texts, with the penalty that is best for some of them.

    Args:
        start_VD: The table before the fit.
        shares: The tokens of all texts.
        targets_ND: The vectors of all texts, of length 1.
        chosen_N: The texts that choose the penalty. They only take part in the last fit.

    Returns:
        The table, the penalty, and the mean cosine of the chosen texts before the last fit.
    """
    fitted_N1 = (~chosen_N).float()[:, None]
    before_ND = shares.of_texts(start_VD)
    scale = (before_ND * targets_ND).sum() / before_ND.square().sum().clamp(min=1e-30)
    start_VD = start_VD * scale
    missing_ND = targets_ND - before_ND * scale

    def cosine(change_VD: Tensor) -> float:
        own_ND = shares.of_texts(start_VD + change_VD)
        return float(F.cosine_similarity(own_ND[chosen_N], targets_ND[chosen_N], dim=-1).mean())

    best_cosine, best_penalty = cosine(torch.zeros_like(start_VD)), math.inf
    change_VD = torch.zeros_like(start_VD)
    for penalty in PENALTIES:
        change_VD = _ridge(shares, missing_ND * fitted_N1, penalty, fitted_N1, change_VD)
        reached = cosine(change_VD)
        if reached < best_cosine:
            break
        best_cosine, best_penalty = reached, penalty
    if best_penalty == math.inf:
        return start_VD, best_penalty, best_cosine
    everything_N1 = torch.ones_like(fitted_N1)
    change_VD = _ridge(shares, missing_ND, best_penalty, everything_N1, change_VD)
    return start_VD + change_VD, best_penalty, best_cosine


def _ridge(
    shares: TokenShares, missing_ND: Tensor, penalty: float, weight_N1: Tensor, start_VD: Tensor
) -> Tensor:
    """Solve (Aᵀ W A + λ) X = Aᵀ M by conjugate gradients, for all columns at once.

    Args:
        shares: A.
        missing_ND: M, what the change should add to the vector of each text.
        penalty: λ.
        weight_N1: The diagonal of W.
        start_VD: The first X.
    """

    def normal(x_VD: Tensor) -> Tensor:
        return shares.of_tokens(weight_N1 * shares.of_texts(x_VD)) + penalty * x_VD

    x_VD = start_VD.clone()
    right_VD = shares.of_tokens(missing_ND)
    residual_VD = right_VD - normal(x_VD)
    direction_VD = residual_VD.clone()
    energy_D = residual_VD.square().sum(0)
    limit = TOLERANCE**2 * float(right_VD.square().sum())
    for _ in range(ITERATIONS):
        if float(energy_D.sum()) <= limit:
            break
        image_VD = normal(direction_VD)
        step_D = energy_D / (direction_VD * image_VD).sum(0).clamp(min=1e-30)
        x_VD += step_D * direction_VD
        residual_VD -= step_D * image_VD
        after_D = residual_VD.square().sum(0)
        direction_VD = residual_VD + after_D / energy_D.clamp(min=1e-30) * direction_VD
        energy_D = after_D
    return x_VD
