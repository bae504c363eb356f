"""Compare criteria for the choice of a student's layers with the quality of the student.

    python benchmarks/layers.py MODEL TEXTS PAIRS QUESTIONS --keep 3 [--choices 10]
        [--max-steps 50] [--pooling mean]

Every choice of `--keep` layers of the embedding model MODEL, or the evenly spaced layers and
`--choices` random ones, is copied and fitted to texts. With `--max-steps`, it is then trained for
as many steps of 64 texts. The criteria compare the vectors of the untrained student and its
teacher, on other texts: once after the fit of the search for layers (32 texts), once after the
fit of a distillation. TEXTS has a text in each line. PAIRS (.jsonl, such as STS-B's development
set) has `sentence1`, `sentence2` and `label`. QUESTIONS (.jsonl, such as QNLI's) has `question` and
`sentence`; each question searches its own sentence among the first 600. The last tables have the
rank correlation of each criterion with the scores. `agreement` is the criterion of `student.layers:
measured` (kdcli/models/choose.py).
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import random
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

import kdcli
from kdcli.losses.relation import regroup, relation_kl
from kdcli.metrics.regression import pearson, spearman
from kdcli.models.choose import ROWS, pair_cosines, parts_of, vectors_of
from kdcli.models.embedding_format import Pool, save_embedder
from kdcli.models.sample import rows_of
from kdcli.models.shape import build_student, evenly_spaced_layers
from kdcli.run.context import cpu_session
from kdcli.types import Batch, Examples, Start
from kdcli.workloads.embedder import Embedder

FITTED, SEARCH, QUESTIONS, BATCH, LENGTH = 1000, 32, 600, 64, 64
RELATION_HEADS = 12
"""The heads of the relations between tokens. They must divide the width."""


def criteria(
    own_VND: Tensor, teacher_VND: Tensor, own_NLD: Tensor, teacher_NLD: Tensor, mask_NL: Tensor
) -> dict[str, float]:
    """Return the criteria by name. Larger is better.

    Args:
        own_VND, teacher_VND: Vectors of the texts' parts. The first part is the whole text.
        own_NLD, teacher_NLD: The last hidden states of the texts.
        mask_NL: 1 at the texts' tokens.
    """
    own_ND, teacher_ND = (F.normalize(x_VND[0], dim=-1) for x_VND in (own_VND, teacher_VND))
    own_NN, teacher_NN = own_ND @ own_ND.T, teacher_ND @ teacher_ND.T
    above = np.triu_indices(len(own_ND), 1)
    nearest = [(x - 9 * torch.eye(len(x))).topk(10).indices.numpy() for x in (own_NN, teacher_NN)]
    shared = [len(np.intersect1d(a, b)) / 10 for a, b in zip(*nearest, strict=True)]
    own_centred_ND, centred_ND = (x_ND - x_ND.mean(0) for x_ND in (own_ND, teacher_ND))
    left_DD, spectrum_D, right_DD = torch.linalg.svd(own_centred_ND.T @ centred_ND)
    rotated_ND = own_centred_ND @ left_DD @ right_DD
    norms = [(x_ND.T @ x_ND).norm() for x_ND in (own_centred_ND, centred_ND)]
    own_BALK, teacher_BALK = (
        regroup(x_NLD[:, None], RELATION_HEADS) for x_NLD in (own_NLD, teacher_NLD)
    )
    divergence = relation_kl(teacher_BALK, teacher_BALK, own_BALK, own_BALK, mask_NL)
    return {
        "agreement": pearson(pair_cosines(own_VND).numpy(), pair_cosines(teacher_VND).numpy()),
        "cosine of the vectors": float((own_ND * teacher_ND).sum(1).mean()),
        "the same without the means": float(F.cosine_similarity(own_centred_ND, centred_ND).mean()),
        "the same after the best rotation": float(
            F.cosine_similarity(rotated_ND, centred_ND).mean()
        ),
        "centred kernel alignment": float((spectrum_D**2).sum() / (norms[0] * norms[1])),
        "cosines of all pairs, Spearman": spearman(
            own_NN.numpy()[above], teacher_NN.numpy()[above]
        ),
        "ten nearest neighbours": float(np.mean(shared)),
        "relations between tokens": -float(divergence),
    }


def mrr(questions_ND: Tensor, sentences_ND: Tensor) -> float:
    """Return MRR@10 of the sentence at each question's place."""
    cosines_NN = F.normalize(questions_ND, dim=-1) @ F.normalize(sentences_ND, dim=-1).T
    rank_N = (cosines_NN > cosines_NN.diagonal()[:, None]).sum(1) + 1
    return float(torch.where(rank_N <= 10, 1 / rank_N, 0).mean())


@torch.no_grad()
def states_of(model: PreTrainedModel, batch: Batch) -> Tensor:
    """Return the last hidden states of texts, [N, L, D]."""
    states_NLD: Tensor = model.eval()(**batch).last_hidden_state
    return states_NLD


def read_rows(file: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in Path(file).read_text("utf-8").splitlines()]


def print_correlations(measured: list[dict[str, float]], of: list[dict[str, float]]) -> None:
    """Print the rank correlation of each criterion with each score."""
    print("\n| rank correlation | " + " | ".join(of[0]) + " |\n|---|" + "---|" * len(of[0]))
    for name in measured[0]:
        own = np.array([row[name] for row in measured])
        values = [spearman(own, np.array([row[score] for row in of])) for score in of[0]]
        print(f"| {name} | " + " | ".join(f"{value:.2f}" for value in values) + " |")


def choices_of(layers: int, keep: int, count: int | None) -> list[tuple[int, ...]]:
    """Return all choices of layers, or the evenly spaced layers and `count` random choices."""
    choices = list(itertools.combinations(range(1, layers + 1), keep))
    if not count:
        return choices
    even = tuple(evenly_spaced_layers(layers, keep))
    others = [chosen for chosen in choices if chosen != even]
    return sorted([even, *random.Random(0).sample(others, min(count, len(others)))])


def scores_of(
    student: Embedder, pairs: list[dict[str, str]], asked: list[dict[str, str]], when: str
) -> dict[str, float]:
    """Score a student on pairs of sentences with labels, and on questions with their sentences."""
    session = cpu_session()

    def vectors(rows: list[dict[str, str]], key: str) -> Tensor:
        return torch.from_numpy(student.vectors([row[key] for row in rows], "", session))

    labels = np.array([row["label"] for row in pairs])
    one, other = vectors(pairs, "sentence1"), vectors(pairs, "sentence2")
    return {
        f"STS-B, {when}": spearman(F.cosine_similarity(one, other).numpy(), labels),
        f"MRR@10, {when}": mrr(vectors(asked, "question"), vectors(asked, "sentence")),
    }


@dataclass(frozen=True)
class Criteria:
    """Measures students by the criteria.

    Attributes:
        teacher: The teacher.
        fits: The texts to which students are fitted, by the name of the fit.
        compared: The texts on which students are compared with the teacher.
    """

    teacher: Embedder
    fits: Mapping[str, Examples]
    compared: Batch

    @classmethod
    def of(cls, teacher: Embedder, lines: list[str]) -> Self:
        """Fit to every other text, and compare on the texts between."""

        def tokens(texts: list[str], length: int) -> Examples:
            return teacher.tokenize(texts, [""] * len(texts), length)

        even, between = lines[::2], lines[1::2]
        fits = {"search": tokens(even[:SEARCH], 32), "fit": tokens(even[:FITTED], LENGTH)}
        return cls(teacher, fits, rows_of(teacher.tokenize(between, [""] * len(between)), ROWS, 32))

    @functools.cached_property
    def _of_teacher(self) -> tuple[Tensor, Tensor]:
        return self._outputs(self.teacher.model)

    def _outputs(self, model: PreTrainedModel) -> tuple[Tensor, Tensor]:
        """Return the vectors of the texts' parts, and the last hidden states of the texts."""
        pool, parts = Pool(self.teacher.format), parts_of(self.compared)
        return vectors_of(model, parts, pool), states_of(model, self.compared)

    def measure(self, layers: Sequence[int]) -> tuple[PreTrainedModel, dict[str, float]]:
        """Return the student of some layers after the last fit, and the criteria of each fit."""
        found: dict[str, float] = {}
        shape = replace(self.teacher.shape, layers=len(layers))
        for name, text in self.fits.items():
            start = Start(layers=list(layers))
            model = build_student(self.teacher.model, shape, start, text=text).model
            own_VND, own_NLD = self._outputs(model)
            target_VND, target_NLD = self._of_teacher
            mask_NL = self.compared["attention_mask"]
            values = criteria(own_VND, target_VND, own_NLD, target_NLD, mask_NL)
            found |= {f"{criterion} ({name})": value for criterion, value in values.items()}
        return model, found


def train(student: PreTrainedModel, teacher: Embedder, options: argparse.Namespace) -> Embedder:
    """Distil a student on TEXTS."""
    with tempfile.TemporaryDirectory() as folder:
        started, trained = Path(folder, "started"), Path(folder, "trained")
        save_embedder(student, teacher.tokenizer, teacher.format, started)
        kdcli.distill(
            options.model,
            student=started,
            method="embedding",
            pooling=options.pooling,
            data=options.texts,
            max_steps=options.max_steps,
            batch_size=BATCH,
            dtype="bf16",
            sets=[
                f"workload.rows={options.max_steps * BATCH}",
                f"data.max_length={LENGTH}",
                "measure.latency=false",
            ],
            output_dir=trained,
        )
        return Embedder.open(str(trained))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("model", "texts", "pairs", "questions"):
        parser.add_argument(name)
    parser.add_argument("--keep", type=int, default=3)
    parser.add_argument("--choices", type=int)
    parser.add_argument("--max-steps", type=int, default=0)
    parser.add_argument("--pooling", default="mean")
    options = parser.parse_args()
    teacher = Embedder.open(options.model, pooling=options.pooling)
    pairs, asked = read_rows(options.pairs), read_rows(options.questions)[:QUESTIONS]
    compared = Criteria.of(teacher, Path(options.texts).read_text("utf-8").splitlines())
    measured: list[dict[str, float]] = []
    scored: list[dict[str, float]] = []
    for layers in choices_of(teacher.shape.layers, options.keep, options.choices):
        model, found = compared.measure(layers)
        own = scores_of(replace(teacher, model=model.eval()), pairs, asked, "untrained")
        if options.max_steps:
            own |= scores_of(train(model, teacher, options), pairs, asked, "trained")
        measured.append(found)
        scored.append(own)
        cells = [f"{name} {value:.4f}" for name, value in (own | found).items()]
        print(", ".join(map(str, layers)), *cells, sep=" | ", flush=True)
    print_correlations(measured, scored)


if __name__ == "__main__":
    main()
