"""`kdcli evaluate`."""

from kdcli.cli.verb import MEASURE, SCORING, Given, Printable, verb


@verb(
    *SCORING,
    "processes",
    examples=(
        "kdcli evaluate runs/teacher runs/student --task sst2",
        "kdcli evaluate my-org/classifier runs/small --data texts.txt",
    ),
    panel=MEASURE,
)
def evaluate(given: Given) -> Printable | None:
    """Evaluate fine-tuned models on a labelled task, or embedding models, and compare them."""
    from kdcli.recipe.resolve import metric_limits
    from kdcli.verbs.evaluate.settings import EvaluateOptions, EvaluateRecipe

    options, own = given.run_options, given.of(EvaluateOptions)
    resolved = given.resolve(EvaluateRecipe)
    limits = metric_limits(own.min_metric or ())
    # Importing this takes seconds, so the recipe is checked first.
    from kdcli.verbs.evaluate import run

    extras = run.Extras(predictions=own.predictions, submission=own.submission, gates=limits)
    result = given.show(run.evaluate(resolved, options, extras))
    if result is not None:
        run.check_score_gates(result, extras, resolved.recipe.max_class_drop)
    return result
