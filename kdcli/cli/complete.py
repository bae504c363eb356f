"""Shell completion of tasks, recipes and student shapes. It imports modules only when used."""


def complete_task(incomplete: str) -> list[str]:
    """Return the tasks whose names start with this text."""
    from kdcli.data.tasks import OWN, named_tasks

    return [name for name in (*named_tasks(), OWN) if name.startswith(incomplete)]


def complete_recipe(incomplete: str) -> list[str]:
    """Return the shipped recipes whose names start with this text."""
    from kdcli.recipe.resolve import recipe_names

    return [name for name in recipe_names() if name.startswith(incomplete)]


def complete_shape(incomplete: str) -> list[str]:
    """Return the published student shapes that start with this text."""
    from kdcli.report.tables import published_shapes

    return [shape for shape in published_shapes() if shape.startswith(incomplete)]
