"""Shell completion of names. It imports modules only when used."""


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


def complete_backend(incomplete: str) -> list[str]:
    """Return the backends, with their number formats, that start with this text."""
    from kdcli.deploy.backends import BACKENDS

    names = [f"{name}-{dtype}" for name, dtypes in BACKENDS.items() for dtype in dtypes]
    return [name for name in (*BACKENDS, *names) if name.startswith(incomplete)]


def complete_device(incomplete: str) -> list[str]:
    """Return the kinds of devices that start with this text."""
    return [name for name in ("auto", "cpu", "cuda", "mps", "xpu") if name.startswith(incomplete)]
