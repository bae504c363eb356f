"""The teacher assistant of MiniLM (arXiv 2002.10957, section 3.3); the shapes of students and their names.

A student with at most half the teacher's layers and half its width learns better from an assistant, which has the
teacher's layers and the student's width and learnt from the teacher.
"""

from collections.abc import Mapping
from dataclasses import replace

from kdcli.commands.distill.settings import DistillRecipe
from kdcli.errors import UsageError
from kdcli.models.shape import parse_shape
from kdcli.recipe.resolve import Resolved
from kdcli.types import ModelShape


def student_shapes(recipe: DistillRecipe, teacher: ModelShape) -> dict[str, ModelShape]:
    """The students' shapes by name in the report: `student`, or with several students the shape as given."""
    texts = recipe.student.to
    if len(set(texts)) < len(texts):
        raise UsageError(f"--to names a shape twice: {', '.join(texts)}")
    parsed = {text: parse_shape(text, teacher) for text in texts}
    return parsed if len(parsed) > 1 else {"student": next(iter(parsed.values()))}


def assistant_shape(
    recipe: DistillRecipe, teacher: ModelShape, students: Mapping[str, ModelShape]
) -> ModelShape | None:
    """The shape of the assistant that all students learn from, if they need one."""
    if recipe.assistant == "none":
        return None
    if recipe.assistant != "auto":
        return parse_shape(recipe.assistant, teacher)
    needed: dict[str, ModelShape | None] = dict.fromkeys(students)
    for name, shape in students.items():
        if 2 * shape.layers <= teacher.layers and 2 * shape.hidden <= teacher.hidden:
            needed[name] = replace(shape, layers=teacher.layers)
    if len(set(needed.values())) > 1:
        listed = "; ".join(f"{name}: {shape or 'none'}" for name, shape in needed.items())
        raise UsageError(
            f"the students need different teacher assistants ({listed}), so one teacher pass cannot serve them",
            "distil them one by one, or give one --assistant for all (none, or LxH)",
        )
    return next(iter(needed.values()))


def assistant_recipe(resolved: Resolved[DistillRecipe], short: str) -> Resolved[DistillRecipe]:
    """The recipe that alone repeats the assistant's stage; `short` is its shape."""
    recipe = resolved.recipe
    student = recipe.student.model_copy(update={"to": [short], "layers": None})
    origins = dict(resolved.origins) | {"student.to": "teacher assistant", "assistant": "teacher assistant"}
    return Resolved(recipe.model_copy(update={"student": student, "assistant": "none"}), origins)


def short_name(shape: ModelShape, teacher: ModelShape) -> str:
    """A shape without the parts that the grammar fills in: `6x384` for `6x384:1536@12`."""
    ffn = "" if shape.ffn == round(shape.hidden * teacher.ffn / teacher.hidden) else f":{shape.ffn}"
    heads = "" if shape.heads == teacher.heads else f"@{shape.heads}"
    return f"{shape.layers}x{shape.hidden}{ffn}{heads}"


def as_directory(name: str) -> str:
    """A name for a directory; some file systems refuse ':'."""
    return name.replace(":", "_")
