"""Completion of values in the shell: tasks, recipes, shapes of students. Heavy imports wait until a key is pressed."""


def complete_task(incomplete: str) -> list[str]:
    """Names of tasks."""
    from kdcli.data.tasks import OWN, tasks

    return [name for name in (*tasks(), OWN) if name.startswith(incomplete)]


def complete_recipe(incomplete: str) -> list[str]:
    """Names of the shipped recipes."""
    from kdcli.recipe.resolve import recipe_names

    return [name for name in recipe_names() if name.startswith(incomplete)]


def complete_shape(incomplete: str) -> list[str]:
    """Shapes of students that papers publish."""
    from kdcli.report.tables import published_shapes

    return [shape for shape in published_shapes() if shape.startswith(incomplete)]
