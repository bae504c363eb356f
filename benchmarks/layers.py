"""Compare criteria for the choice of a student's layers with the quality of the student.

    python benchmarks/layers.py MODEL TEXTS PAIRS QUESTIONS --keep 3 [--pooling mean]

Every choice of `--keep` layers of the embedding model MODEL is copied and fitted to texts, and not
trained. The criteria compare its vectors of other texts with the teacher's. TEXTS has a text in
each line. PAIRS (.jsonl, such as STS-B's development set) has `sentence1`, `sentence2` and `label`.
QUESTIONS (.jsonl, such as QNLI's) has `question` and `sentence`; each question searches its own
sentence among the first 600. The last table has the rank correlation of each criterion with both
scores. `score` is the criterion of `student.layers: measured` (kdcli/models/choose.py).
"""

from __future__ import annotations

import argparse
import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kdcli.metrics.regression import pearson, spearman
from kdcli.models.choose import ROWS, pair_cosines, parts_of, vectors_of
from kdcli.models.embedder import Pool
from kdcli.models.sample import rows_of
from kdcli.models.shape import build_student, shape_of
from kdcli.run.context import cpu_session
from kdcli.types import Batch, Start
from kdcli.workloads.embedder import Embedder

QUESTIONS = 600


def criteria(own_VND: Tensor, teacher_VND: Tensor) -> dict[str, float]:
    """Return the criteria by name. Larger is better. The first vectors are the texts' own."""
    own_ND, teacher_ND = (F.normalize(x_VND[0], dim=-1) for x_VND in (own_VND, teacher_VND))
    own_NN, teacher_NN = own_ND @ own_ND.T, teacher_ND @ teacher_ND.T
    above = np.triu_indices(len(own_ND), 1)
    nearest = [(x - 9 * torch.eye(len(x))).topk(10).indices.numpy() for x in (own_NN, teacher_NN)]
    shared = [len(np.intersect1d(a, b)) / 10 for a, b in zip(*nearest, strict=True)]
    return {
        "cosine of the vectors": float((own_ND * teacher_ND).sum(1).mean()),
        "Spearman of all cosines": spearman(own_NN.numpy()[above], teacher_NN.numpy()[above]),
        "ten nearest neighbours": float(np.mean(shared)),
        "score": pearson(pair_cosines(own_VND).numpy(), pair_cosines(teacher_VND).numpy()),
    }


def mrr(questions_ND: Tensor, sentences_ND: Tensor) -> float:
    """Return MRR@10 of the sentence at each question's place."""
    cosines_NN = F.normalize(questions_ND, dim=-1) @ F.normalize(sentences_ND, dim=-1).T
    rank_N = (cosines_NN > cosines_NN.diagonal()[:, None]).sum(1) + 1
    return float(torch.where(rank_N <= 10, 1 / rank_N, 0).mean())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("model", "texts", "pairs", "questions"):
        parser.add_argument(name)
    parser.add_argument("--keep", type=int, default=3)
    parser.add_argument("--pooling", default="mean")
    options = parser.parse_args()
    teacher, session = Embedder.open(options.model, pooling=options.pooling), cpu_session()
    lines = Path(options.texts).read_text("utf-8").splitlines()
    pairs, asked = (
        [json.loads(line) for line in Path(file).read_text("utf-8").splitlines()]
        for file in (options.pairs, options.questions)
    )
    asked = asked[:QUESTIONS]

    def rows(texts: list[str]) -> Batch:
        tokens = teacher.tokenize(texts, [""] * len(texts))
        return rows_of(tokens, ROWS, 32)

    parts, pool = parts_of(rows(lines[1::2])), Pool(teacher.format)
    fitted = teacher.tokenize(lines[::2][:1000], [""] * min(1000, len(lines[::2])))
    target = vectors_of(teacher.model, parts, pool)
    shape = replace(shape_of(teacher.model.config), layers=options.keep)
    measured: list[dict[str, float]] = []
    for layers in itertools.combinations(range(1, teacher.shape.layers + 1), options.keep):
        built = build_student(teacher.model, shape, Start(layers=list(layers)), text=fitted)
        student = replace(teacher, model=built.model.eval())

        def vectors(texts: list[str], student: Embedder = student) -> Tensor:
            return torch.from_numpy(student.vectors(texts, "", session))

        one, other = (vectors([row[f"sentence{n}"] for row in pairs]) for n in (1, 2))
        labels = np.array([row["label"] for row in pairs])
        measured.append(
            {
                "STS-B": spearman(F.cosine_similarity(one, other).numpy(), labels),
                "MRR@10": mrr(
                    *(vectors([r[key] for r in asked]) for key in ("question", "sentence"))
                ),
            }
            | criteria(vectors_of(built.model, parts, pool), target)
        )
        values = [f"{name} {value:.4f}" for name, value in measured[-1].items()]
        print(", ".join(map(str, layers)), *values, sep=" | ", flush=True)
    task_names = list(measured[0])[:2]
    print("\n| rank correlation | " + " | ".join(task_names) + " |\n|---|---|---|")
    for name in list(measured[0])[2:]:
        own = np.array([row[name] for row in measured])
        of_tasks = [spearman(own, np.array([row[task] for row in measured])) for task in task_names]
        print(f"| {name} | " + " | ".join(f"{value:.2f}" for value in of_tasks) + " |")


if __name__ == "__main__":
    main()
