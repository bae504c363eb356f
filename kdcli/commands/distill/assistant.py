"""The legs of a distillation: the teacher assistant's run where one is due, then the students'.

MiniLM (arXiv 2002.10957, §3.3): a student of at most half the teacher's layers *and* half its width learns better from
an assistant with the teacher's layers and the student's width, which learnt from the teacher. Each leg is a run of its
own; that of the assistant lives inside the output directory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kdcli.commands.distill.settings import DistillRecipe
from kdcli.errors import UsageError
from kdcli.models.shape import parse_shape
from kdcli.recipe.resolve import Resolved
from kdcli.types import ModelShape


@dataclass(frozen=True)
class Stage:
    """One teacher, one training run: of the assistant, or of all students.

    Attributes:
        teacher: hub id or directory to load.
        shapes: name of each student in the report → its shape.
        folder: the run directory.
        resolved: the leg's own recipe, which alone repeats it.
    """

    teacher: str
    shapes: Mapping[str, ModelShape]
    folder: Path
    resolved: Resolved[DistillRecipe]

    def model_folder(self, name: str) -> Path:
        """Where a student is saved: the run directory itself, or a directory for each when there are several."""
        return self.folder if len(self.shapes) == 1 else self.folder / _folder_name(name)


def shapes_of(recipe: DistillRecipe, teacher: ModelShape) -> dict[str, ModelShape]:
    """The shapes a recipe asks for, by name in the report: `student`, or the shape itself when there are several.

    Raises:
        UsageError: a shape that `parse_shape` refuses, or one named twice.
    """
    texts = recipe.student.to
    if len(set(texts)) < len(texts):
        raise UsageError(f"--to names a shape twice: {', '.join(texts)}")
    parsed = {text: parse_shape(text, teacher) for text in texts}
    return parsed if len(parsed) > 1 else {"student": next(iter(parsed.values()))}


def make_stages(
    resolved: Resolved[DistillRecipe], teacher: ModelShape, shapes: Mapping[str, ModelShape], folder: Path
) -> list[Stage]:
    """The chain: a leg for the teacher assistant where one is due (MiniLM §3.3), then the leg of the students."""
    recipe = resolved.recipe
    due = {name: _assistant(recipe, teacher, shape) for name, shape in shapes.items()}
    if len(set(due.values())) > 1:
        listed = "; ".join(f"{name}: {shape or 'none'}" for name, shape in due.items())
        raise UsageError(
            f"the students need different teacher assistants ({listed}), so one teacher pass cannot serve them",
            "distil them one by one, or give one --assistant for all (none, or LxH)",
        )
    assistant = next(iter(due.values()))
    if assistant is None:
        return [Stage(str(recipe.teacher), shapes, folder, resolved)]
    first = folder / f"assistant-{_folder_name(_short(assistant, teacher))}"
    student = recipe.student.model_copy(update={"to": [_short(assistant, teacher)], "layers": None})
    own = recipe.model_copy(update={"student": student, "assistant": "none"})
    origins = dict(resolved.origins) | {"student.to": "teacher assistant", "assistant": "teacher assistant"}
    return [
        Stage(str(recipe.teacher), {"assistant": assistant}, first, Resolved(own, origins)),
        Stage(str(first), shapes, folder, resolved),
    ]


def _assistant(recipe: DistillRecipe, teacher: ModelShape, student: ModelShape) -> ModelShape | None:
    if recipe.assistant == "none":
        return None
    if recipe.assistant != "auto":
        return parse_shape(recipe.assistant, teacher)
    if 2 * student.layers <= teacher.layers and 2 * student.hidden <= teacher.hidden:
        return ModelShape(teacher.layers, student.hidden, student.ffn, student.heads)
    return None


def _short(shape: ModelShape, teacher: ModelShape) -> str:
    """A shape without what the grammar would fill in: `6x384` for `6x384:1536@12`."""
    ffn = "" if shape.ffn == round(shape.hidden * teacher.ffn / teacher.hidden) else f":{shape.ffn}"
    heads = "" if shape.heads == teacher.heads else f"@{shape.heads}"
    return f"{shape.layers}x{shape.hidden}{ffn}{heads}"


def _folder_name(shape: str) -> str:
    """A shape as a directory name: ':' is not allowed everywhere."""
    return shape.replace(":", "_")


def name_of(source: str, teacher: ModelShape, shapes: Mapping[str, ModelShape]) -> str:
    """The directory of a run without `-o`: distill-TEACHER-SHAPE."""
    names = "+".join(_folder_name(_short(s, teacher)) for s in shapes.values())
    return f"distill-{Path(source).name}-{names}"
