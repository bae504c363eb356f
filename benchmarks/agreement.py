"""How well the agreement with a teacher, which needs no labels, predicts scores on labelled data.

    python benchmarks/agreement.py AGREEMENT SCORED [SCORED ...] -o agreement.svg

AGREEMENT is the directory of a `kdcli evaluate TEACHER STUDENTS` on unlabelled text, and SCORED are
directories of the same command on labelled tasks. Prints the rank correlations over the students,
and plots the points that each student loses against its agreement.
"""

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from kdcli.metrics.regression import spearman
from kdcli.report.finish import RunResult

MEASURES = ("spearman", "neighbours@10")
MAIN = {"stsb": "spearman", "retrieval": "ndcg@10"}


def scores_of(folder: Path) -> tuple[str, dict[str, dict[str, float]]]:
    """Return the task of an evaluation, and its metrics by model."""
    evaluations = RunResult.read(folder).report.evaluations
    return evaluations[0].task, {each.model: dict(each.metrics) for each in evaluations}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("agreement", type=Path)
    parser.add_argument("scored", type=Path, nargs="+")
    parser.add_argument("-o", "--output", type=Path, required=True)
    options = parser.parse_args()
    _, agreement = scores_of(options.agreement)
    teacher, *students = agreement
    figure, axes = plt.subplots(1, len(MEASURES), figsize=(9, 3.6), sharey=True)
    for folder in options.scored:
        task, metrics = scores_of(folder)
        name = MAIN.get(task, next(iter(metrics[teacher])))
        lost = np.array([100 * (metrics[teacher][name] - metrics[s][name]) for s in students])
        for measure, axis in zip(MEASURES, axes, strict=True):
            values = np.array([agreement[student][measure] for student in students])
            correlation = spearman(values, -lost)
            print(f"{measure} of the agreement and {task} {name}: {correlation:.3f}")
            axis.plot(values, lost, "o", label=f"{task} {name}, rank correlation {correlation:.2f}")
            axis.set_xlabel(f"agreement with the teacher: {measure}")
    axes[0].set_ylabel("points lost to the teacher")
    for axis in axes:
        axis.axhline(0, color="grey", linewidth=0.8)
        axis.legend(fontsize=8, frameon=False)
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(options.output, metadata={"Date": None})


if __name__ == "__main__":
    main()
