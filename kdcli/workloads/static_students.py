"""Make a static student: one vector for each token, and for a classifier a head.

The table starts from the teacher's vectors of single tokens, weighted by how rare the tokens are
(smooth inverse frequency, Arora et al. 2017):

    u(token) = a / (a + p(token)) · v(token) / |v(token)|

A linear map W then turns the means U of these vectors into the vectors Y that the student learns,
by ridge regression on a sample of the texts:

    min  ||U W - Y||² + λ ||W||²

The table is u W. Training moves each vector on its own after that. A classifier learns logits, so
its Y are the principal components of the states that the teacher's head reads.
"""

from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedConfig

from kdcli.data.labelled.features import TokenizedRows
from kdcli.engine.evaluation import to_device
from kdcli.engine.session import Session
from kdcli.messages import log
from kdcli.models.embedding_format import EmbeddingFormat
from kdcli.models.heads import describe_task
from kdcli.models.layout import layout_for
from kdcli.models.model import Model
from kdcli.models.reduce import components
from kdcli.models.shape import InitializedStudent
from kdcli.models.static import StaticConfig, as_static, check_fast
from kdcli.models.static_classifier import StaticForSequenceClassification
from kdcli.targets.targets import Vectors
from kdcli.types import Array, Task
from kdcli.workloads.embedder import Embedder

RARE = 1e-3
"""The frequency a at which the weight of a token is one half."""
TOKENS_AT_ONCE = 1024
"""Number of single tokens in one forward pass of the teacher."""
TEXTS_AT_ONCE = 128
"""Number of texts in one forward pass of the teacher."""
FITTED = 10_000
"""Maximum number of texts that the map is fitted to."""
PENALTIES = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
"""The values of λ that are tried, relative to the mean eigenvalue of UᵀU."""
CHOOSING = 20
"""One in this many of the texts chooses λ."""


def static_student(
    rows: TokenizedRows,
    numbers: Array,
    vectors: Vectors,
    basis_ED: Array | None,
    origin: Embedder,
    session: Session,
) -> InitializedStudent:
    """Make a static student of an embedding model before its training.

    Args:
        rows: All texts, tokenised by `origin`.
        numbers: The numbers of the training texts.
        vectors: The vectors that the student learns, from any model, by the texts' numbers.
        basis_ED: The basis of the student's vectors; None keeps the targets' basis.
        origin: The model whose tokenizer the student uses.
        session: The device.
    """
    sample = sample_of_texts(numbers)
    targets_ND = torch.from_numpy(vectors(sample).astype(np.float64))
    if basis_ED is not None:
        targets_ND = targets_ND @ torch.from_numpy(basis_ED).double()
    special = torch.tensor(origin.tokenizer.all_special_ids, dtype=torch.long)
    table_VD, note = fitted_table(rows, numbers, sample, targets_ND, special, origin, session)
    model = as_static(table_VD)
    # The saved tokenizer adds no special tokens, so their vectors must stay zero.
    model.embeddings.register_hook(  # type: ignore[no-untyped-call]
        lambda gradient_VD: gradient_VD.index_fill(0, special.to(gradient_VD.device), 0)
    )
    return InitializedStudent(model, [note])


def static_classifier(
    rows: TokenizedRows,
    teacher: Model,
    task: Task,
    width: int,
    session: Session,
    *,
    init: str,
    seed: int,
) -> InitializedStudent:
    """Make a static classifier before its training.

    Args:
        rows: The training texts, tokenised by `teacher`.
        teacher: The model whose tokenizer the student uses, with or without its head.
        task: The task, whose labels the student predicts.
        width: The width of the token vectors.
        session: The device.
        init: `random` fits nothing.
        seed: The seed of the head, and of a random table.

    Raises:
        UsageError: The teacher has no fast tokenizer, which a static model needs.
    """
    student = _random_classifier(teacher, task, width, seed)
    if init == "random":
        return InitializedStudent(student, ["random token vectors"])
    fmt = EmbeddingFormat(pooling=_pooling_of_head(teacher.model.config), normalize=False)
    encoder = Embedder(teacher.model.base_model, teacher.tokenizer, teacher.source, format=fmt)
    numbers = np.arange(len(rows))
    sample = sample_of_texts(numbers)
    states_NE = text_vectors(encoder, rows, sample, session).double()
    states_NE -= states_NE.mean(0)
    targets_ND = states_NE @ components(states_NE.T @ states_NE, width)
    framing = torch.tensor(student.config.framing_token_ids, dtype=torch.long)
    table_VD, note = fitted_table(rows, numbers, sample, targets_ND, framing, encoder, session)
    with torch.no_grad():
        # The targets have length 1, so a component is about width ** -0.5. The hidden layer reads
        # components of about 1.
        student.static.embeddings.copy_(width**0.5 * table_VD)
    return InitializedStudent(student, [note])


def _random_classifier(
    teacher: Model, task: Task, width: int, seed: int
) -> StaticForSequenceClassification:
    """Make a static classifier with random weights, for the tokenizer of its teacher."""
    tokenizer = teacher.tokenizer
    check_fast(tokenizer)
    # The special tokens that the tokenizer adds to a text or to a pair are no part of the mean.
    bare, framed = (
        set(tokenizer("a", "a", add_special_tokens=special)["input_ids"])
        for special in (False, True)
    )
    config = StaticConfig(
        vocab_size=int(teacher.model.config.vocab_size),
        hidden_dim=width,
        normalize=False,
        framing_token_ids=sorted(framed - bare),
    )
    describe_task(config, task)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return StaticForSequenceClassification(config)


def _pooling_of_head(config: PreTrainedConfig) -> Literal["cls", "mean"]:
    """Return how the teacher's head pools the states: the first token's, or their mean."""
    pooling = getattr(config, "classifier_pooling", None)
    return "cls" if pooling in (None, layout_for(config).pooling) else "mean"


def sample_of_texts(numbers: Array) -> Array:
    """Return the numbers of the texts that a map is fitted to, evenly spaced."""
    at = np.linspace(0, len(numbers) - 1, FITTED).astype(np.int64)
    return np.asarray(numbers[np.unique(at)])


def fitted_table(
    rows: TokenizedRows,
    numbers: Array,
    sample: Array,
    targets_ND: Tensor,
    left_out: Tensor,
    origin: Embedder,
    session: Session,
) -> tuple[Tensor, str]:
    """Fit a table of token vectors, [V, D].

    Args:
        rows: All texts, tokenised by `origin`.
        numbers: The numbers of the training texts.
        sample: The numbers of the texts that the map is fitted to.
        targets_ND: The vectors of these texts.
        left_out: The ids of tokens that do not count in the student's means. Their vectors are
            zero.
        origin: The model that gives the vectors of single tokens.
        session: The device.

    Returns:
        The table, whose means are fitted to targets of length 1, and a note.
    """
    vocab_size = int(origin.model.config.vocab_size)
    ids, shares = _words(rows, numbers, left_out.numpy())
    frequency_V = np.bincount(
        np.concatenate(ids), weights=np.concatenate(shares), minlength=vocab_size
    ) / len(numbers)
    weight_V = torch.from_numpy(RARE / (RARE + frequency_V)).float()
    tokens_VE = F.normalize(token_vectors(origin, session), dim=-1) * weight_V[:, None]
    tokens_VE[left_out] = 0
    ids, shares = _words(rows, sample, left_out.numpy())
    means_NE = torch.stack(
        [
            (tokens_VE[at] * torch.from_numpy(share)[:, None]).sum(0)
            for at, share in zip(ids, shares, strict=True)
        ]
    ).double()
    map_ED, cosine = fit_map(means_NE, F.normalize(targets_ND, dim=-1))
    note = (
        f"a table of {vocab_size:,} token vectors, fitted to {len(sample):,} texts; mean cosine "
        f"before training, on texts that were left out: {cosine:.3f}"
    )
    return tokens_VE @ map_ED.float(), note


def text_vectors(model: Embedder, rows: TokenizedRows, numbers: Array, session: Session) -> Tensor:
    """Return a model's vectors of some rows, [N, E]."""
    order = np.argsort(rows.lengths[numbers], kind="stable")
    module = model.captured().to(session.device).eval()
    parts = []
    with torch.inference_mode():
        for some in np.array_split(order, -(-len(order) // TEXTS_AT_ONCE)):
            batch = {name: x for name, x in rows.batch(numbers[some]).items() if name != "labels"}
            parts.append(module(to_device(session.device, batch)).pooled.float().cpu())
    return torch.cat(parts)[torch.from_numpy(np.argsort(order))].clone()


def token_vectors(model: Embedder, session: Session) -> Tensor:
    """Return a model's vector of each token alone, between its special tokens, [V, E]."""
    tokenizer = model.tokenizer
    pieces = tokenizer.get_vocab().keys() - set(tokenizer.all_special_tokens)
    # A tokenizer without an unknown token leaves out a text that its pieces cannot spell.
    texts = ("a", *sorted(pieces))
    word = next(text for text in texts if tokenizer(text, add_special_tokens=False)["input_ids"])
    bare, example = (
        list(tokenizer(word, add_special_tokens=special)["input_ids"]) for special in (False, True)
    )
    first = next(n for n in range(len(example)) if example[n : n + len(bare)] == bare)
    prefix, suffix = example[:first], example[first + len(bare) :]
    count = int(model.model.config.vocab_size)
    ids_VL = torch.tensor([[*prefix, token, *suffix] for token in range(count)])
    log(f"{model.source}: vectors of {count:,} single tokens")
    module = model.captured().to(session.device).eval()
    parts = []
    with torch.inference_mode():
        for ids_BL in torch.split(ids_VL, TOKENS_AT_ONCE):
            batch = {"input_ids": ids_BL, "attention_mask": torch.ones_like(ids_BL)}
            parts.append(module(to_device(session.device, batch)).pooled.float().cpu())
    # A tensor of inference mode could not be part of a trained model.
    return torch.cat(parts).clone()


def fit_map(means_NE: Tensor, targets_ND: Tensor) -> tuple[Tensor, float]:
    """Fit a linear map by ridge regression, with the penalty that is best for some of the texts.

    Args:
        means_NE: The weighted mean of each text's token vectors, float64.
        targets_ND: The vectors that the texts should have, of length 1, float64.

    Returns:
        The map [E, D], and the mean cosine on texts that were held out, if the map is fitted to the
        other ones.
    """
    held_out_N = torch.arange(len(means_NE)) % CHOOSING == 0
    fitted, held_out_ME = (means_NE[~held_out_N], targets_ND[~held_out_N]), means_NE[held_out_N]
    if not len(fitted[0]):
        fitted = means_NE, targets_ND

    def reached(penalty: float) -> float:
        own_MD = held_out_ME @ _ridge(*fitted, penalty)
        return float(F.cosine_similarity(own_MD, targets_ND[held_out_N], dim=-1).mean())

    best = max(PENALTIES, key=reached)
    return _ridge(means_NE, targets_ND, best), reached(best)


def _ridge(means_NE: Tensor, targets_ND: Tensor, penalty: float) -> Tensor:
    """Solve (UᵀU + λ) W = UᵀY; `penalty` is λ relative to the mean eigenvalue of UᵀU."""
    moments_EE = means_NE.T @ means_NE
    scale = penalty * float(moments_EE.trace()) / len(moments_EE)
    diagonal_EE = torch.eye(len(moments_EE), dtype=moments_EE.dtype) * max(scale, 1e-12)
    solved: Tensor = torch.linalg.solve(moments_EE + diagonal_EE, means_NE.T @ targets_ND)
    return solved


def _words(rows: TokenizedRows, numbers: Array, left_out: Array) -> tuple[list[Array], list[Array]]:
    """Return the ids of each text without those left out, and their shares in the text."""
    begins = rows.ends - rows.lengths
    spans = [rows.ids_T[begins[n] : rows.ends[n]] for n in numbers]
    ids = [span[~np.isin(span, left_out)].astype(np.int64) for span in spans]
    return ids, [np.full(len(each), 1 / max(1, len(each)), np.float32) for each in ids]
