"""The questions that a finished compression answers: another goal, or the next candidate.

A compression keeps what it tried, and hashes of what it read. The same command with another goal
is a question to it, and so is the same command after the chosen candidate missed the goal on the
verification rows.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path

from kdcli.data.sources import open_source
from kdcli.disk import HASHES, cache_key
from kdcli.engine.inputs import content_of_inputs
from kdcli.engine.launch import output_dir
from kdcli.engine.run_dir import NOT_OF_TRAINING, RunDir, is_unfinished, runs_of
from kdcli.errors import KdcliError
from kdcli.messages import log
from kdcli.models.load import commit_of
from kdcli.recipe.resolve import Resolved
from kdcli.recipe.sections import RunOptions
from kdcli.report.finish import RunResult
from kdcli.report.schema import Compression
from kdcli.verbs.compress.record import Record, question_of
from kdcli.verbs.compress.settings import CompressRecipe, dotted
from kdcli.workloads.cut_vocabulary import sources_of


def choose_folder(
    name: str, resolved: Resolved[CompressRecipe], options: RunOptions
) -> tuple[Path, RunResult | None, bool]:
    """Return the directory of the run, its last answer if it is finished, and whether this is the
    answer to the command.

    Without `--resume`, a command whose finished run has answered it starts a new run.
    """
    yaml = resolved.to_yaml()
    if options.overwrite:
        return output_dir(name, options, yaml), None, False
    runs = [RunDir(options.output_dir)] if options.output_dir is not None else runs_of(name)
    same = [run for run in runs if run.has_recipe(yaml)]
    answered = answered_runs(same)
    continues = options.resume and any(map(is_unfinished, same))
    if answered and not continues:
        run, earlier, record = answered[0]
        is_answered = answers(earlier, record, resolved.recipe, resumes=options.resume)
        if not is_answered or options.resume or run.differing_keys(yaml, NOT_OF_TRAINING):
            following = compression_of(earlier).next_candidate
            if not is_answered and following is not None and repeats(earlier, resolved.recipe):
                log(f"Going on in {run.path} with the next candidate, {following}")
            elif not is_answered:
                why = "for the new goal, budget, price, backends or shapes"
                log(f"Reusing the candidates in {run.path} {why}")
            return run.path, earlier, is_answered
    return output_dir(name, options, yaml), None, False


def answered_runs(runs: Sequence[RunDir]) -> list[tuple[RunDir, RunResult, Record]]:
    """Return the finished runs with their last answers and their records.

    A report or a record that is damaged or of another version is left out. If no other report is
    left, a line is logged.
    """
    answered, unreadable = [], []
    for run in runs:
        try:
            if run.done:
                answered.append((run, RunResult.read(run.path), Record.read(run)))
        except KdcliError as error:
            unreadable.append(error.message)
    if unreadable and not answered:
        log(f"no candidates are reused: {unreadable[0]}")
    return answered


def repeats(result: RunResult, recipe: CompressRecipe) -> bool:
    """Whether a finished compression had this goal and price, and this choice of candidates."""
    compression, price = compression_of(result), result.report.price_per_hour
    limits = {**compression.goal, "strict": compression.strict}
    limits |= {"cascade": True} if compression.cascade else {}
    plan = result.report.recipe.get("plan", {})
    choice = [plan.get(key, getattr(recipe.plan, key)) for key in ("backends", "shapes")]
    return bool(json.loads(question_of(recipe)) == [limits, price, *choice])


def answers(result: RunResult, record: Record, recipe: CompressRecipe, *, resumes: bool) -> bool:
    """Whether a finished compression has answered a command.

    A larger budget asks again if the goal was missed. If the report names a next candidate, the
    same command verifies it; with `resumes`, only if it was stopped after it began to do so.
    """
    earlier, compression = result.report.recipe.get("budget") or math.inf, compression_of(result)
    if not compression.met and (recipe.budget or math.inf) > earlier:
        return False
    if not repeats(result, recipe):
        return False
    begun = record.unanswered(question_of(recipe)) is not None
    return compression.next_candidate is None or (resumes and not begun)


def compression_of(result: RunResult) -> Compression:
    """Return the compression in the report of a run of `compress`."""
    compression = result.report.compression
    assert compression is not None
    return compression


def hashes_of_inputs(resolved: Resolved[CompressRecipe], folder: Path) -> dict[str, str]:
    """Return hashes of the data, of the recipes of steps and of the model, by name.

    Data at a URL has a hash of the sizes and versions that its server reports, and a model of the
    hub its commit. Data sets on the hub have none.
    """
    recipe = resolved.recipe
    trims = [keys for step in recipe.steps for verb, keys in step.items() if verb == "trim"]
    named = [str(name) for keys in trims if (name := dotted(keys).get("data.source"))]
    # The text of a trimming may be a file that lists texts.
    texts = [source for name in named for source in sources_of(name).values()]
    roots = [name for name in (recipe.data.source, recipe.data.train, recipe.text, *texts) if name]
    remote = {}
    for root in roots:
        source = open_source(root)
        if "://" in root:
            remote[root] = cache_key(source.identity)
    listed = {text: HASHES[text] for text in texts if text in HASHES}
    commit = commit_of(str(recipe.model))
    versions = {} if commit is None else {str(recipe.model): commit}
    return content_of_inputs(resolved.to_yaml(), folder) | listed | remote | versions
