"""`kdcli export`."""

from kdcli.cli.verb import SAVING, SHIP, Given, Printable, verb


@verb("sets", *SAVING, examples=("kdcli export runs/student --int8",), panel=SHIP)
def export(given: Given) -> Printable | None:
    """Export a model to ONNX or OpenVINO, and compare its outputs with torch.

    If you give more than one of --int8, --fp16 and --q4, the float32 file is written too.
    """
    from kdcli.recipe.resolve import resolve
    from kdcli.verbs.export.settings import ExportOptions, ExportRecipe

    options, own = given.run_options, given.of(ExportOptions)
    keys = given.keys()
    resolved = resolve(ExportRecipe, recipe=None, sets=given.sets, options=keys)
    precisions = own.precisions
    # Importing this takes seconds, so the options are checked first.
    from kdcli.verbs.export import run
    from kdcli.workloads.detect import as_trained, trained_task

    # The lines of a plain text file have no columns.
    has_rows = not str(resolved.recipe.data.source).endswith(".txt")
    if has_rows and own.task in (None, trained_task(own.model)):
        resolved = as_trained(resolved, own.model, task=False, trains=False)
    exported = run.export(
        own.model,
        format=own.file_format,
        precisions=precisions,
        data=resolved.recipe.data,
        pooling=own.pooling,
        task=own.task,
        max_drop=own.max_drop,
        steps=own.steps,
        weights=own.weights,
        output_dir=options.output_dir,
        overwrite=options.overwrite,
    )
    return given.show(exported)
