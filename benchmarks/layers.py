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
import itertools
import json
import random
import tempfile
from dataclasses import replace
from pathlib import Path

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
from kdcli.models.shape import build_student, evenly_spaced_layers, shape_of
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
    teacher, session = Embedder.open(options.model, pooling=options.pooling), cpu_session()
    lines = Path(options.texts).read_text("utf-8").splitlines()
    pairs, asked = read_rows(options.pairs), read_rows(options.questions)[:QUESTIONS]
    labels = np.array([row["label"] for row in pairs])

    def rows(texts: list[str], count: int) -> Batch:
        return rows_of(teacher.tokenize(texts, [""] * len(texts)), count, 32)

    def scores(student: Embedder, when: str) -> dict[str, float]:
        def vectors(texts: list[str]) -> Tensor:
            return torch.from_numpy(student.vectors(texts, "", session))

        one, other = (vectors([row[f"sentence{n}"] for row in pairs]) for n in (1, 2))
        found = (vectors([row[key] for row in asked]) for key in ("question", "sentence"))
        return {
            f"STS-B, {when}": spearman(F.cosine_similarity(one, other).numpy(), labels),
            f"MRR@10, {when}": mrr(*found),
        }

    compared = rows(lines[1::2], ROWS)
    parts, pool = parts_of(compared), Pool(teacher.format)
    fits: dict[str, Examples] = {}
    for name, count in (("search", SEARCH), ("fit", FITTED)):
        texts = lines[::2][:count]
        fits[name] = teacher.tokenize(texts, [""] * len(texts), LENGTH if name == "fit" else 32)
    target_VND, target_NLD = (
        vectors_of(teacher.model, parts, pool),
        states_of(teacher.model, compared),
    )
    shape = replace(shape_of(teacher.model.config), layers=options.keep)
    choices = list(itertools.combinations(range(1, teacher.shape.layers + 1), options.keep))
    if options.choices:
        even = tuple(evenly_spaced_layers(teacher.shape.layers, options.keep))
        others = [layers for layers in choices if layers != even]
        chosen = random.Random(0).sample(others, min(options.choices, len(others)))
        choices = sorted([even, *chosen])
    measured: list[dict[str, float]] = []
    scored: list[dict[str, float]] = []
    for layers in choices:
        start = Start(layers=list(layers))
        found: dict[str, float] = {}
        for name, text in fits.items():
            built = build_student(teacher.model, shape, start, text=text)
            states_NLD = states_of(built.model, compared)
            own_VND = vectors_of(built.model, parts, pool)
            values = criteria(
                own_VND, target_VND, states_NLD, target_NLD, compared["attention_mask"]
            )
            found |= {f"{criterion} ({name})": value for criterion, value in values.items()}
        measured.append(found)
        scored.append(scores(replace(teacher, model=built.model.eval()), "untrained"))
        if options.max_steps:
            with tempfile.TemporaryDirectory() as folder:
                started, trained = Path(folder, "started"), Path(folder, "trained")
                save_embedder(built.model, teacher.tokenizer, teacher.format, started)
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
                scored[-1] |= scores(Embedder.open(str(trained)), "trained")
        cells = [f"{name} {value:.4f}" for name, value in (scored[-1] | found).items()]
        print(", ".join(map(str, layers)), *cells, sep=" | ", flush=True)
    print_correlations(measured, scored)


if __name__ == "__main__":
    main()
