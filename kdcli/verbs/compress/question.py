"""The questions that a finished compression answers: another goal, or the next candidate.

A compression keeps what it tried. The same command with another goal is a question to it, and so is
the same command after the chosen candidate missed the goal on the verification rows.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kdcli.data.labelled.partition import VERIFICATION
from kdcli.engine.launch import output_dir
from kdcli.engine.progress import Progress
from kdcli.engine.run_dir import RunDir, is_unfinished, runs_of
from kdcli.errors import UsageError
from kdcli.recipe.resolve import Resolved
from kdcli.recipe.sections import RunOptions
from kdcli.report.finish import RunResult
from kdcli.report.schema import Compression
from kdcli.verbs.compress.journal import SCORED, Journal
from kdcli.verbs.compress.settings import CompressRecipe, GoalSettings

GOAL = ("goal.", "budget", "price_per_hour")
"""Beginnings of the keys that a question to a finished run may change."""
VERIFIED = "verified before "
"""The beginning of the journal's keys of the questions."""


@dataclass(frozen=True)
class Question:
    """A question of a command to a finished run.

    Attributes:
        earlier: The run's last answer.
        is_answered: Whether this answer is the answer to the command.
        goal: The goal and the price of the command, as JSON.
        repeats_choice: Whether only the price differs from the last answer, so that the choice
            stays the same.
    """

    earlier: RunResult
    is_answered: bool
    goal: str
    repeats_choice: bool

    @property
    def key(self) -> str:
        """The question's key in the journal."""
        return f"{_after(self.earlier)}{self.goal}"


def choose_folder(
    name: str, resolved: Resolved[CompressRecipe], options: RunOptions
) -> tuple[Path, Question | None]:
    """Return the directory of the run, and the question to it if it is finished.

    Without `--resume`, a command whose finished run has answered it starts a new run.
    """
    yaml = resolved.to_yaml()
    if options.overwrite:
        return output_dir(name, options, yaml, GOAL), None
    runs = [RunDir(options.output_dir)] if options.output_dir is not None else runs_of(name)
    same = [run for run in runs if run.has_recipe(yaml, GOAL)]
    answered = answered_runs(same)
    continues = options.resume and any(map(is_unfinished, same))
    if answered and not continues:
        run, earlier = answered[0]
        question = question_to(run, earlier, resolved.recipe, resumes=options.resume)
        if not question.is_answered or options.resume or run.differing_keys(yaml):
            return run.path, question
    return output_dir(name, options, yaml, GOAL), None


def answered_runs(runs: Sequence[RunDir]) -> list[tuple[RunDir, RunResult]]:
    """Return the finished runs with their last answers.

    A report that is damaged or has another schema is left out. If no other report is left, a line
    is logged.
    """
    answered, unreadable = [], []
    for run in runs:
        try:
            if run.done:
                answered.append((run, RunResult.read(run.path)))
        except UsageError as error:
            unreadable.append(error.message)
    if unreadable and not answered:
        Progress.log(f"no candidates are reused: {unreadable[0]}")
    return answered


def question_to(
    run: RunDir, earlier: RunResult, recipe: CompressRecipe, *, resumes: bool
) -> Question:
    """Return the question of a command to a finished run, and log what follows from it.

    A command with the goal and the price of the last answer is answered, unless the report names a
    next candidate. With `resumes`, the next candidate is only verified if the same command was
    stopped after it began to do so.
    """
    compression, price = compression_of(earlier), recipe.price_per_hour
    repeats = had_goal(earlier, recipe) and earlier.report.price_per_hour != price
    goal = _goal(limits_of(recipe.goal), recipe.goal.strict, price)
    question = Question(earlier, answers(earlier, recipe), goal, repeats)
    following = compression.next_candidate
    if not question.is_answered:
        Progress.log(f"Reusing the candidates in {run.path} for the new goal, budget or price")
    elif following is not None and (not resumes or _has_begun(run, question)):
        Progress.log(f"Going on in {run.path} with the next candidate, {following}")
        return replace(question, is_answered=False)
    return question


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


def verified_before(question: Question, journal: Journal) -> list[str]:
    """Return the steps that scored a candidate on the verification rows before a question.

    The journal keeps them, so that a stopped question chooses as before. If only the price is
    another one, the result is the one for the question of the last report.
    """
    names = [key.removeprefix("run ") for key in journal.known(f"run {VERIFICATION}-")]
    if question.repeats_choice:
        answered = _answered(question.earlier, journal)
        names = journal.once(answered, list[str], list) if answered else []
    return journal.once(question.key, list[str], lambda: names)


def scored_before(question: Question, journal: Journal) -> list[str]:
    """Return the journal's keys of the candidates among which a question chooses.

    If only the price is another one, a question that was stopped after the last report adds none.
    """
    keys = [record.key for record in journal.records]
    if question.repeats_choice:
        reported = {f"run {step.name}" for step in compression_of(question.earlier).steps}
        numbers = [number for number, key in enumerate(keys) if key in reported]
        last = max(numbers, default=len(keys))
        # The candidates follow the step that scored them.
        keys = keys[: last + 2]
    return [key for key in keys if key.startswith(SCORED)]


def _answered(result: RunResult, journal: Journal) -> str:
    """Return the key of the question that a report answers; empty for a run's first report."""
    goal = _goal_of(result)
    keys = [
        key
        for key in journal.known(VERIFIED)
        if key.endswith(f" {goal}") and not key.startswith(_after(result))
    ]
    return keys[-1] if keys else ""


def _has_begun(run: RunDir, question: Question) -> bool:
    """Whether the run's journal has a question."""
    return any(record.get("key") == question.key for record in run.read_log())


def _after(result: RunResult) -> str:
    """Return the beginning of the keys of the questions that follow a report.

    Two reports of the same second differ in the choice or in the goal and the price.
    """
    return f"{VERIFIED}{result.report.created} {compression_of(result).chosen} {_goal_of(result)} "


def _goal_of(result: RunResult) -> str:
    compression = compression_of(result)
    return _goal(compression.goal, compression.strict, result.report.price_per_hour)


def _goal(limits: Mapping[str, float], strict: bool, price: float | None) -> str:
    return json.dumps([limits, strict, price], sort_keys=True)


def compression_of(result: RunResult) -> Compression:
    """Return the compression in the report of a run of `compress`."""
    compression = result.report.compression
    assert compression is not None
    return compression
