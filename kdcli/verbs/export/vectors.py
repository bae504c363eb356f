"""The file of an embedding model: written where other tools look for it, judged by its vectors and by a task."""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from kdcli.data.files import open_source
from kdcli.data.text.sentences import sentences
from kdcli.deploy.export import ModelFile
from kdcli.deploy.runners import file_runner
from kdcli.deploy.sessions import Array
from kdcli.engine.launch import Session, start
from kdcli.models.load import location
from kdcli.models.training_rows import training_rows
from kdcli.types import Batch
from kdcli.verbs.export.agreement import dropped
from kdcli.verbs.export.gate import Found
from kdcli.workloads.embedder import Embedder, cosines
from kdcli.workloads.embedding_scores import RETRIEVAL, Judged, open_pairs, read_retrieval, scored
from kdcli.workloads.settings import LabelledSettings

TEXTS_COMPARED = 256
CALIBRATED, ROWS = (
    32,
    8,
)  # Texts on which the error of each product is measured, and of a batch of them
SAME = 0.99  # Least mean cosine to torch's vectors


@dataclass(frozen=True)
class VectorsJudge:
    """Judges the file of an embedding model: by its vectors of texts, and by a task if there is one."""

    embedder: Embedder
    texts: Sequence[str]
    judged: Judged | None

    @property
    def session(self) -> Session:
        return Session(start(torch.device("cpu"), torch.float32), torch.device("cpu"))

    @functools.cached_property
    def of_torch(self) -> Array:
        """Torch's vectors of the texts."""
        return self.embedder.vectors(self.texts, "", self.session)

    def judge(self, file: ModelFile) -> Found:
        by_file = replace(
            self.embedder, runner=file_runner(file.path, threads=0), outputs=file.outputs
        )
        values = cosines(self.of_torch, by_file.vectors(self.texts, "", self.session))
        alike = {
            "texts": len(self.texts),
            "cosine": float(values.mean()),
            "least": float(values.min()),
        }
        if self.judged is None:
            return Found(alike)
        evaluations, comparisons = scored(
            [self.judged], {"torch": self.embedder, "file": by_file}, self.session
        )
        metrics = {row.model: row.metrics for row in evaluations}
        first = next(iter(evaluations[0].metrics))
        scores = [evaluations[0].model_dump(include={"task", "set", "split", "n"}) | metrics]
        return Found(alike, scores, comparisons, dropped(comparisons, first))

    def too_far(self, found: Found) -> str | None:
        # Not `<`: a NaN must fail too.
        cosine = found.agreement["cosine"]
        return (
            None if cosine >= SAME else f"the mean cosine of its vectors to torch's is {cosine:.3f}"
        )

    def calibration(self) -> list[Batch]:
        texts = self.texts[:CALIBRATED]
        rows = self.embedder.rows(texts, [""] * len(texts))
        return [
            rows.batch(np.arange(i, min(i + ROWS, len(rows)))) for i in range(0, len(rows), ROWS)
        ]


def judged_on(task: str | None, settings: LabelledSettings, source: str) -> Judged | None:
    """The task on which a file is judged, read. Raises UsageError: a task that vectors cannot be judged on; unusable
    data."""
    if task is None:
        return None
    if task == RETRIEVAL:
        return Judged(task, retrieval=read_retrieval(settings.source or ""))
    return Judged(
        task, open_pairs(task, settings, {source: training_rows(location(source))}), settings
    )


def judged_texts(judged: Judged | None, data: str | None) -> list[str]:
    """Texts on which vectors are compared: of the task, else sentences of the data or the demo."""
    if judged is None:
        documents = open_source(data or "demo").documents("train", None)
        found = (text for document in documents for text in sentences(document))
    elif judged.retrieval is not None:
        found = (
            text
            for side in (judged.retrieval.queries, judged.retrieval.documents)
            for text in side.values()
        )
    else:
        assert judged.pairs is not None
        found = (
            text
            for rows in judged.pairs.sets.values()
            for example in rows
            for text in example.texts
        )
    return list(itertools.islice(found, TEXTS_COMPARED))
