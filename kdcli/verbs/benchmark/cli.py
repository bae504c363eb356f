"""`kdcli benchmark`."""

from kdcli.cli.verb import MEASURE, SCORING, Given, Printable, verb


@verb(
    *SCORING,
    examples=(
        "kdcli benchmark bert-base-uncased 6x384 --backend torch",
        "kdcli benchmark runs/teacher runs/student --backend torch --backend onnx-int8",
    ),
    panel=MEASURE,
)
def benchmark(given: Given) -> Printable | None:
    """Measure the latency of models or shapes next to a baseline, on several backends."""
    from kdcli.verbs.benchmark.settings import BenchmarkOptions, BenchmarkRecipe

    options, own = given.run_options, given.of(BenchmarkOptions)
    resolved = given.resolve(BenchmarkRecipe)
    # Importing this takes seconds, so the recipe is checked first.
    from kdcli.verbs.benchmark import run

    if own.portable is not None:
        return given.show(run.write_runner(resolved, own.portable))
    if own.compare:
        return given.show(run.compare_runs(resolved, options, own.compare))
    run.check_gates(resolved.recipe, own)
    result = given.show(run.benchmark(resolved, options))
    run.check_latency_gates(result.report, result.folder, own, resolved.recipe)
    return result
