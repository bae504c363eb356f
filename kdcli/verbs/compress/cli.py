"""The options of `kdcli compress`."""

from typing import Annotated, Any

import typer

from kdcli.cli.app import app
from kdcli.cli.options import JUDGING, Pooling, Task, run_options, show, with_options

GOAL = "Goal"


@app.command()
@with_options(*JUDGING, "seed", "resume")
def compress(
    model: Annotated[
        str | None, typer.Argument(help="Hub id, directory, or 'demo'; fine-tuned or not.")
    ] = None,
    task: Task = None,
    pooling: Pooling = None,
    max_drop: Annotated[
        float | None,
        typer.Option(help="Points of the task's metric that may be lost.", rich_help_panel=GOAL),
    ] = None,
    speedup: Annotated[
        float | None, typer.Option(help="Times as fast as torch in float32.", rich_help_panel=GOAL)
    ] = None,
    max_latency_ms: Annotated[
        float | None,
        typer.Option(help="Milliseconds of one sequence of 128 tokens.", rich_help_panel=GOAL),
    ] = None,
    max_mb: Annotated[
        float | None, typer.Option(help="Megabytes of what is shipped.", rich_help_panel=GOAL)
    ] = None,
    strict: Annotated[
        bool | None,
        typer.Option(
            "--strict", help="--max-drop holds for the interval's lower end.", rich_help_panel=GOAL
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Most time to take: 90s, 30m, 2h.", rich_help_panel=GOAL),
    ] = None,
    **shared: Any,
) -> Any:
    """Make a model smaller and faster until a goal is met: plan, distil, prune, export, judge, choose."""
    given = locals() | shared
    from kdcli.verbs.compress.recipes import compress_recipe, seconds_of

    goal = {
        name: given[name] for name in ("max_drop", "speedup", "max_latency_ms", "max_mb", "strict")
    }
    options = {
        "model": model,
        "task": task,
        "data.source": shared["data"],
        "seed": shared["seed"],
        "pooling": pooling,
    }
    options |= {"budget": seconds_of(budget)} | {
        f"goal.{name}": value for name, value in goal.items()
    }
    resolved = compress_recipe(recipe=shared["recipe"], sets=shared["sets"] or (), options=options)
    from kdcli.verbs.compress.run import run

    return show(run(resolved, run_options(given)), as_json=shared["json"])
