"""Save a student for queries and its teacher for documents as one model."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kdcli.disk import atomic_dir, read_json, write_atomic
from kdcli.errors import UsageError
from kdcli.models.embedding_format import PROMPTS_FILE, save_embedder
from kdcli.models.files import LIBRARY, MODULES_FILE
from kdcli.models.source import is_address
from kdcli.types import ModelShape
from kdcli.verbs.distill.settings import DistillRecipe
from kdcli.verbs.distill.space import student_format, vector_settings
from kdcli.workloads.embedder import Embedder

ROUTER = "router"
"""The directory of the model, in the student's."""


def check_router(
    recipe: DistillRecipe, name: str, to: ModelShape, origin: Embedder, teacher_width: int
) -> None:
    """Check that a student's vectors can be compared with its teacher's.

    Args:
        recipe: The recipe.
        name: The student's name.
        to: The student's shape.
        origin: The model that the student starts from.
        teacher_width: The number of components of the teacher's vectors.

    Raises:
        UsageError: The student's vectors lie in another space.
    """
    if not vector_settings(recipe).router:
        return
    if is_address(str(recipe.teacher)):
        raise UsageError(
            f"workload.router saves the teacher too, and {recipe.teacher} gives only vectors",
            "omit it, or give a teacher on this machine or on the hub",
        )
    if recipe.more_teachers or vector_settings(recipe).vectors:
        other = "--also-teacher" if recipe.more_teachers else "--teacher-vectors"
        raise UsageError(
            f"workload.router needs documents' vectors of the teacher alone, not {other}",
            "omit one of them",
        )
    width = to.hidden if to.is_static else student_format(recipe, origin, to).width(to.hidden)
    reaches_width = width == teacher_width or (vector_settings(recipe).dense and not to.is_static)
    if reaches_width and not recipe.loss.get("dimensions"):
        return
    raise UsageError(
        f"workload.router: the vectors of {name} are principal components of the teacher's, so "
        "that they cannot be compared with the teacher's vectors of documents",
        f"choose a student of width {teacher_width}, or a shape with layers and "
        "workload.dense=true; leave loss.dimensions unset",
    )


def save_router(folder: Path, queries: Embedder, documents: Embedder) -> None:
    """Save two models as one model of sentence-transformers.

    Args:
        folder: The directory to write. An earlier one is replaced.
        queries: The model of `encode_query`.
        documents: The model of `encode_document` and `encode`.

    Raises:
        MachineError: The disk is full or not writable.
    """
    types: dict[str, str] = {}
    structure: dict[str, list[str]] = {}
    with atomic_dir(folder) as whole:
        for route, model in (("query", queries), ("document", documents)):
            structure[route] = []
            for name, kind in _save_route(whole, route, model):
                structure[route].append(name)
                types[name] = kind
        parameters = {"default_route": "document", "allow_empty_key": True, "route_mappings": {}}
        router = {"types": types, "structure": structure, "parameters": parameters}
        write_atomic(whole / "router_config.json", json.dumps(router, indent=2))
        module = {"idx": 0, "name": "0", "path": "", "type": f"{LIBRARY}models.Router"}
        write_atomic(whole / MODULES_FILE, json.dumps([module], indent=2))


def _save_route(folder: Path, route: str, model: Embedder) -> Iterator[tuple[str, str]]:
    """Save the modules of a model, each in a directory of its own, and yield their names and types.

    The prompts of the documents' model, which is saved last, become the prompts of the router.
    """
    with tempfile.TemporaryDirectory() as temporary:
        whole = Path(temporary)
        save_embedder(model.model, model.tokenizer, model.format, whole)
        shutil.move(whole / PROMPTS_FILE, folder / PROMPTS_FILE)
        modules = read_json(whole / MODULES_FILE, kind=list)
        (whole / MODULES_FILE).unlink()
        for module in modules:
            kind = str(module["type"])
            name = f"{route}_{module['idx']}_{kind.rpartition('.')[2]}"
            (folder / name).mkdir(exist_ok=True)
            for file in (whole / module["path"]).iterdir():
                if file.is_file():
                    shutil.move(file, folder / name / file.name)
            yield name, kind
