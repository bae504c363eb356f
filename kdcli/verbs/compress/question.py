"""The questions that a finished compression answers: another goal, or the next candidate.

A compression keeps what it tried. The same command with another goal is a question to it, and so is
the same command after the chosen candidate missed the goal on the verification rows.
"""

import math
from pathlib import Path

from kdcli.data.labelled.partition import VERIFICATION
from kdcli.engine.launch import output_dir
from kdcli.engine.progress import Progress
from kdcli.engine.run_dir import RunDir, runs_of
from kdcli.recipe.resolve import Resolved
from kdcli.recipe.sections import RunOptions
from kdcli.report.finish import RunResult
from kdcli.report.schema import Compression
from kdcli.verbs.compress.journal import Journal
from kdcli.verbs.compress.settings import CompressRecipe, GoalSettings

GOAL = ("goal.", "budget", "price_per_hour")
"""Beginnings of the keys that a question to a finished run may change."""
LOOKS = "looks before "
"""The beginning of the journal's keys of the candidates that earlier questions verified."""


def choose_folder(
    name: str, resolved: Resolved[CompressRecipe], options: RunOptions
) -> tuple[Path, bool]:
    """Return the directory of the run, and whether it holds a finished run to ask again.

    A finished run is asked again if it has not answered the question, which may be a new one or one
    that was stopped, or if its report names a next candidate.
    """
    yaml = resolved.to_yaml()
    runs = [RunDir(options.output_dir)] if options.output_dir is not None else runs_of(name)
    same = [run for run in runs if run.has_recipe(yaml, GOAL)]
    finished = [run for run in same if run.done]
    continues = options.resume and len(finished) < len(same)
    if finished and not (options.overwrite or continues):
        folder, is_other = finished[0].path, bool(finished[0].differing_keys(yaml))
        earlier = RunResult.read(folder)
        if is_other or not answers(earlier, resolved.recipe):
            Progress.log(f"Reusing the candidates in {folder} for the new goal, budget or price")
            return folder, True
        following = compression_of(earlier).next_candidate
        if following is not None and not options.resume:
            Progress.log(f"Going on in {folder} with the next candidate, {following}")
            return folder, True
    return output_dir(name, options, yaml, GOAL), False


def answers(result: RunResult, recipe: CompressRecipe) -> bool:
    """Whether a finished compression had this goal and this price.

    A larger budget asks again if the goal was missed.
    """
    earlier = result.report.recipe.get("budget") or math.inf
    if not compression_of(result).met and (recipe.budget or math.inf) > earlier:
        return False
    return had_goal(result, recipe) and result.report.price_per_hour == recipe.price_per_hour


def had_goal(result: RunResult, recipe: CompressRecipe) -> bool:
    """Whether a finished compression had this goal."""
    compression = compression_of(result)
    return (compression.goal, compression.strict) == (limits_of(recipe.goal), recipe.goal.strict)


def limits_of(goal: GoalSettings) -> dict[str, float]:
    """Return the limits that are set."""
    return goal.model_dump(exclude={"strict"}, exclude_none=True)


def takes_next(earlier: RunResult, journal: Journal, *, resumes: bool) -> bool:
    """Whether a question that the run has answered goes on with the report's next candidate.

    With `resumes`, it does so only if it was stopped after it began.
    """
    has_begun = bool(journal.known(_looks_key(earlier)))
    return compression_of(earlier).next_candidate is not None and (has_begun or not resumes)


def looks_before(earlier: RunResult, recipe: CompressRecipe, journal: Journal) -> list[str]:
    """Return the steps that scored a candidate on the verification rows before this question.

    The journal keeps them, so that a stopped question chooses as before. A question with another
    price alone repeats the choice of the last one.
    """
    before = journal.known(LOOKS)
    if had_goal(earlier, recipe) and earlier.report.price_per_hour != recipe.price_per_hour:
        return journal.once(before[-1], list[str], list) if before else []
    looks = [key.removeprefix("run ") for key in journal.known(f"run {VERIFICATION}-")]
    return journal.once(_looks_key(earlier), list[str], lambda: looks)


def _looks_key(earlier: RunResult) -> str:
    """Return the journal's key of the looks before the question that follows a report."""
    return f"{LOOKS}{earlier.report.created} {compression_of(earlier).chosen}"


def compression_of(result: RunResult) -> Compression:
    """Return the compression in the report of a run of `compress`."""
    compression = result.report.compression
    assert compression is not None
    return compression
