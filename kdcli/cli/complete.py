"""Shell completion of tasks, recipes and student shapes. Heavy imports wait for a key press."""


def complete_task(incomplete: str) -> list[str]:
    """Return the tasks that begin like this."""
    from kdcli.data.tasks import OWN, named_tasks

    return [name for name in (*named_tasks(), OWN) if name.startswith(incomplete)]


def complete_recipe(incomplete: str) -> list[str]:
    """Return the shipped recipes that begin like this."""
    from kdcli.recipe.resolve import recipe_names

    return [name for name in recipe_names() if name.startswith(incomplete)]


def complete_shape(incomplete: str) -> list[str]:
    """Return the published student shapes that begin like this."""
    from kdcli.report.tables import published_shapes

    return [shape for shape in published_shapes() if shape.startswith(incomplete)]
