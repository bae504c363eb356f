"""`kdcli adapt`: map a new embedding model's vectors into the index of an old one.

Data flow: texts -> vectors of the new model, and their rows of the index -> maps, fitted to most
texts -> the best map on the selection texts -> its scores on the verification texts.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from kdcli.deploy.export import recorded
from kdcli.disk import fill_dir
from kdcli.engine.memory import begin_peak, peak_so_far
from kdcli.engine.run_dir import RunDir
from kdcli.engine.session import Session
from kdcli.errors import KdcliError, UsageError
from kdcli.messages import log
from kdcli.models.card import describe_source
from kdcli.models.embedding_format import Pool, save_embedder
from kdcli.models.load import location
from kdcli.models.model import TYPE_IDS, training_rows
from kdcli.recipe.resolve import Resolved
from kdcli.recipe.sections import RunOptions
from kdcli.report.finish import Entry, ReportContents, RunResult
from kdcli.report.front import EMBEDDER
from kdcli.report.text import short
from kdcli.run.context import open_run
from kdcli.run.dry_run import Estimate, StageEstimate
from kdcli.verbs.adapt.adaptation import (
    ADAPTED,
    OLD,
    REEMBEDDED,
    Adaptation,
    IndexedTexts,
    check_index_model,
    check_size,
    read_index,
)
from kdcli.verbs.adapt.settings import AdaptRecipe
from kdcli.workloads.embedder import Embedder

UNIT = 0.01
"""Vectors whose lengths are this close to 1 have length 1."""
SAMPLED_TEXTS = 64
"""Number of texts that a dry run encodes."""


def adapt(resolved: Resolved[AdaptRecipe], options: RunOptions) -> RunResult | Estimate | None:
    """Adapt a model to an index and report, or estimate how long that takes.

    Returns None in a process that prints nothing.

    Raises:
        UsageError: The model, the texts or the index cannot be used, or the rows of the index do
            not belong to the texts. Nothing is written.
    """
    recipe = resolved.recipe
    check_recipe(recipe)
    source, index = str(recipe.model), str(recipe.vectors)
    name = f"adapt-{Path(source).name}"
    context = open_run(resolved, options, name, dtype="fp32", evaluates=True)
    if context is None:
        return None
    folder, session = context.folder, context.session
    RunDir(folder).check(resolved.to_yaml(), resume=False, overwrite=options.overwrite)
    new = Embedder.open(source, pooling=recipe.pooling)
    old = None if recipe.index_model is None else Embedder.open_scored(recipe.index_model)
    indexed = read_index(recipe)
    check_size(indexed, new, recipe)
    if indexed.retrieval is not None and recipe.encodes == "documents" and old is None:
        raise UsageError(
            f"the queries of {recipe.data.source} need the old model, because the adapted one "
            "encodes documents",
            "add --index-model MODEL, or give --data the corpus without its queries",
        )
    if old is not None:
        check_index_model(old, indexed, session)
    if context.dry_run:
        return _estimate(indexed, new, folder, session)
    log(f"encoding {len(indexed.texts):,} texts with {short(source)}")
    new_NE = new.vectors(indexed.texts.texts, "document", session)
    adaptation = Adaptation(indexed, new, new_NE, old, recipe.encodes, session)
    chosen, how_chosen = adaptation.choose_map()

    lengths_N = np.linalg.norm(indexed.old_NE.astype(np.float32), axis=1)
    width = replace(new.format, truncate_dim=None).width(new.shape.hidden)
    fmt = replace(
        new.format.followed_by([chosen.layer(width)]),
        normalize=bool((np.abs(lengths_N - 1) < UNIT).all()),
        similarity=adaptation.similarity,
    )
    results = [adaptation.verify(chosen)]
    if indexed.retrieval is not None:
        adapted = replace(new, format=fmt)
        results.append(adaptation.verify_relevance(indexed.retrieval, chosen, adapted))

    RunDir.claim(folder, resolved.to_yaml(), overwrite=options.overwrite)
    save_embedder(new.model, new.tokenizer, fmt, folder, training_rows(location(source)))
    notes = [new.note, how_chosen, *(sentence for _, sentence in results)]
    try:
        _write_onnx(replace(new, format=fmt), folder)
    except KdcliError as error:
        notes.append(f"no ONNX file was written: {error}")
    for note in notes:
        log(note)
    mapped = f"mapping its vectors of {recipe.encodes} ({chosen.name}) to {short(index)}"
    made = f"made from {short(source)} by {mapped}"
    entries = [
        Entry.loaded(REEMBEDDED, "baseline", new),
        Entry.saved(ADAPTED, "adapted", new.model, folder, REEMBEDDED, made=made, source=source),
        Entry(OLD, "candidate", None, REEMBEDDED),
    ]
    contents = ReportContents(
        "adapt",
        recipe,
        entries,
        evaluations=[row for result, _ in results for row in result.evaluations],
        comparisons=[row for result, _ in results for row in result.comparisons],
        notes=notes,
        auto_class=EMBEDDER,
    )
    return context.report(contents, recipe.measure)


def _estimate(indexed: IndexedTexts, new: Embedder, folder: Path, session: Session) -> Estimate:
    """Estimate the time to encode all texts from a sample of `SAMPLED_TEXTS`."""
    count = len(indexed.texts)
    numbers = np.unique(np.linspace(0, count - 1, SAMPLED_TEXTS).astype(int))
    texts = indexed.texts_at(numbers)
    begin_peak(session.device)
    new.vectors(texts[:1], "document", session)  # The first call is slower.
    began = time.monotonic()
    new.vectors(texts, "document", session)
    seconds = time.monotonic() - began
    steps = math.ceil(count / len(texts))
    memory = peak_so_far(session.device)
    whole = StageEstimate(str(folder), steps, 1.0, seconds * count / len(texts), seconds, memory)
    log(f"encoding {count:,} texts takes {steps:,} steps of {len(texts)} texts")
    return Estimate({REEMBEDDED: describe_source(new.model, new.source)}, [whole])


def _write_onnx(model: Embedder, folder: Path) -> None:
    """Write the ONNX file that computes a model's vectors from tokens."""
    pool, token_types = Pool(model.format).eval(), TYPE_IDS in model.tokenizer.model_input_names
    with (
        fill_dir(folder, last="onnx") as staged,
        recorded(model.model.eval(), staged, "onnx", pool=pool, token_types=token_types) as graph,
    ):
        graph.write()


def check_recipe(recipe: AdaptRecipe) -> None:
    """Check the options before a model is read.

    Raises:
        UsageError: There is no index, there are no texts, or nothing encodes queries.
    """
    example = "kdcli adapt MODEL --index VECTORS --data TEXTS"
    if recipe.vectors is None:
        raise UsageError("no index given", f"{example} takes the vectors of the old model")
    if recipe.data.source is None:
        raise UsageError("no text given", f"{example} takes the texts of the index")
