"""`kdcli export`."""

from kdcli.cli.verb import SAVING, SHIP, Given, Printable, verb


@verb("sets", *SAVING, examples=("kdcli export runs/student --int8",), panel=SHIP)
def export(given: Given) -> Printable | None:
    """Export a model to ONNX or OpenVINO, and compare its outputs with torch.

    If you give more than one of --int8, --fp16 and --q4, the float32 file is written too.
    """
    from kdcli.verbs.export.settings import ExportOptions, ExportRecipe

    options, own = given.run_options, given.of(ExportOptions)
    resolved = given.resolve(ExportRecipe)
    precisions = own.precisions
    # Importing this takes seconds, so the options are checked first.
    from kdcli.recipe.resolve import inherited
    from kdcli.verbs.export import run
    from kdcli.workloads.detect import as_trained, data_of_run, trained_task

    given_data = data = resolved.recipe.data
    task, of_run = own.task, False
    if data.source is None and task is None and own.pooling is None:
        resolved, task = data_of_run(resolved, own.model)
        data = resolved.recipe.data
        of_run = data.source is not None and own.max_drop is None
    elif task in (None, trained_task(own.model)):
        inherits = not data.columns
        resolved = as_trained(resolved, own.model, task=False, trains=False)
        data = resolved.recipe.data
        if inherits and task is None and own.max_drop is None:
            # Without a task, texts are read from one column.
            columns = {role: name for role, name in data.columns.items() if role == "text"}
            data = data.model_copy(update={"columns": columns, "skip_bad": given_data.skip_bad})
    exported = run.export(
        own.model,
        format=own.file_format,
        precisions=precisions,
        data=data,
        pooling=own.pooling,
        task=task,
        max_drop=own.max_drop,
        of_run=of_run,
        notes=inherited(resolved),
        steps=own.steps,
        weights=own.weights,
        output_dir=options.output_dir,
        overwrite=options.overwrite,
    )
    return given.show(exported)
