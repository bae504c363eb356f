"""The file of an embedding model: written where other tools look for it, judged by its vectors and by a task."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from kdcli.backends.export import ModelFile, export_onnx, export_openvino
from kdcli.backends.exported import EMBEDDING_FILES
from kdcli.backends.runners import engine_runner
from kdcli.backends.sessions import onnx_caller, openvino_caller
from kdcli.data.files import open_source
from kdcli.data.text.sentences import sentences
from kdcli.downstream.embedder import Embedder, cosines
from kdcli.downstream.embedding_scores import Judged, judged_sets, scored
from kdcli.downstream.settings import DownstreamSettings
from kdcli.errors import MachineError
from kdcli.models.embedder import EmbeddingFormat, Pool
from kdcli.models.load import location
from kdcli.models.training_rows import training_rows
from kdcli.training.launch import Session, start

TEXTS_COMPARED = 256
SAME = 0.99  # Mean cosine to torch's vectors below which the second linears of feed-forward blocks stay in float32
WRONG = 0.9  # Below it a file is refused


@dataclass(frozen=True)
class VectorsFile:
    """What to write of an embedding model, and what its file is judged on."""

    embedder: Embedder
    file_format: str
    int8: bool
    texts: Sequence[str]
    judged: Judged | None

    @property
    def format(self) -> EmbeddingFormat:
        """How vectors are made."""
        return self.embedder.format

    def write(self, folder: Path) -> tuple[ModelFile, dict[str, Any]]:
        """Write the file into an export's directory; returns it with the facts `agreement`, `scores` and `notes`. In
        int8 all linears are quantised, or, where that changes the vectors too much, all but the second ones of
        feed-forward blocks. Raises MachineError: the vectors are not those of torch; see also `export_onnx`."""
        session = Session(start(torch.device("cpu"), torch.float32), torch.device("cpu"))
        notes = []
        file, by_file = self._written(folder, float_down=False)
        agreement = self._agreement(by_file, session)
        if self.int8 and not agreement["cosine"] >= SAME:
            notes.append(f"with all linears in int8 the cosine of the vectors was {agreement['cosine']:.4f}")
            file, by_file = self._written(folder, float_down=True)
            agreement = self._agreement(by_file, session)
            notes.append("the second linears of the feed-forward blocks are in float32")
        # Not `<`: a NaN must fail too.
        if not agreement["cosine"] >= WRONG:
            raise MachineError(
                f"the vectors of the file are not those of torch: their mean cosine is {agreement['cosine']:.3f}",
                "export in full precision, or to the other format",
            )
        found: dict[str, Any] = {"agreement": agreement, "notes": notes}
        if self.judged is not None:
            models = {"torch": self.embedder, "file": by_file}
            evaluations, comparisons = scored([self.judged], models, session)
            metrics = {row["model"]: row["metrics"] for row in evaluations}
            found["scores"] = [{"task": self.judged.name, **metrics, "n": evaluations[0]["n"]}]
            found["comparisons"] = comparisons
        return file, found

    def _written(self, folder: Path, *, float_down: bool) -> tuple[ModelFile, Embedder]:
        place = folder / EMBEDDING_FILES[self.file_format, "int8" if self.int8 else "fp32"]
        export = export_onnx if self.file_format == "onnx" else export_openvino
        file = export(
            self.embedder.model, place.parent, int8=self.int8, pool=Pool(self.format).eval(), float_down=float_down
        )
        for part in (file.path, file.path.with_suffix(".bin")):
            if part.is_file():
                part.replace(place.with_suffix(part.suffix))
        file = replace(file, path=place)
        load = onnx_caller if self.file_format == "onnx" else openvino_caller
        return file, replace(self.embedder, runner=engine_runner(load(place, threads=0)), outputs=file.outputs)

    def _agreement(self, by_file: Embedder, session: Session) -> dict[str, float]:
        """Mean and least cosine between the vectors of the file and of torch."""
        of_torch, of_file = (model.vectors(self.texts, "", session) for model in (self.embedder, by_file))
        values = cosines(of_torch, of_file)
        return {"texts": len(self.texts), "cosine": float(values.mean()), "least": float(values.min())}


def judged_on(task: str | None, data: str | None, source: str) -> Judged | None:
    """The task on which a file is judged, read. Raises UsageError: see `judged_sets`."""
    if task is None:
        return None
    trained = {source: training_rows(location(source))}
    return judged_sets(DownstreamSettings(tasks=[task], source=data), trained)[0]


def judged_texts(judged: Judged | None, data: str | None) -> list[str]:
    """Texts on which vectors are compared: of the task, else sentences of the data or the demo."""
    if judged is None:
        documents = open_source(data or "demo").documents("train", None)
        found = (text for document in documents for text in sentences(document))
    elif judged.retrieval is not None:
        found = (text for side in (judged.retrieval.queries, judged.retrieval.documents) for text in side.values())
    else:
        assert judged.pairs is not None
        found = (text for rows in judged.pairs.sets.values() for example in rows for text in example.texts)
    return list(itertools.islice(found, TEXTS_COMPARED))
