"""The record of a compression next to its steps: the seconds, the looks and the questions.

Each line of log.jsonl is one of the classes below.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

from kdcli.disk import LOG_FILE
from kdcli.engine.run_dir import RunDir
from kdcli.errors import MachineError, first_problem
from kdcli.verbs.compress.settings import CompressRecipe


@dataclass(frozen=True)
class Attempt:
    """A call of a step.

    Attributes:
        place: The step's directory below `steps/`.
        seconds: The duration of the call.
        until: The optimiser steps after which the call paused a training; None for its end.
        error: Why the step fails whenever it is called; empty if it does not.
        verb: The verb, or the name of a measurement.
    """

    place: str
    seconds: float
    until: int | None = None
    error: str = ""
    verb: str = ""
    kind: Literal["attempt"] = "attempt"


@dataclass(frozen=True)
class Look:
    """The beginning of an evaluation on the verification rows, in the directory `place`."""

    place: str
    kind: Literal["look"] = "look"


@dataclass(frozen=True)
class Candidate:
    """A way to a smaller model.

    Attributes:
        folder: The model, relative to the run; empty if it was not finished.
        skipped: Why it was not finished; empty if it was.
        parent: The directory of the training that made the model for it.
        model: The model in torch that it is made from, relative to the run if it is inside.
    """

    name: str
    folder: str = ""
    skipped: str = ""
    parent: str | None = None
    model: str = ""


@dataclass(frozen=True)
class Scored:
    """Candidates that were scored next to each other."""

    candidates: list[Candidate]
    kind: Literal["scored"] = "scored"


@dataclass(frozen=True)
class Question:
    """A goal, and what was known when it was asked.

    Attributes:
        goal: The limits, the price, the backends and the shapes, as JSON.
        known: The number of lines that were known. The looks and candidates in them decide, so that
            a question that is stopped and asked again has the same answer.
        inputs: Hashes of the data, the model and the recipes, by name.
    """

    goal: str
    known: int
    inputs: dict[str, str]
    kind: Literal["question"] = "question"


@dataclass(frozen=True)
class Answer:
    """The report of the last question was written."""

    kind: Literal["answer"] = "answer"


Line = Annotated[Attempt | Look | Scored | Question | Answer, Field(discriminator="kind")]


@dataclass
class Record:
    """The lines of a compression. Before its directory is claimed, they are only kept in memory."""

    lines: list[Line] = field(default_factory=list)
    run: RunDir | None = None

    @classmethod
    def read(cls, run: RunDir) -> "Record":
        """Read the lines of a run.

        Raises:
            MachineError: Log.jsonl is damaged, or of version 0.2.
        """
        lines = [{k: v for k, v in line.items() if k != "step"} for line in run.read_log()]
        try:
            return cls(TypeAdapter(list[Line]).validate_python(lines))
        except ValidationError as error:
            raise MachineError(
                f"{run.path / LOG_FILE} is damaged, or of an earlier version of kdcli: "
                f"{first_problem(error, lines)}",
                "start anew with --overwrite",
            ) from None

    def add(self, *lines: Line) -> None:
        """Add lines."""
        for line in lines:
            self.lines.append(line)
            if self.run is not None:
                self.run.log({"step": len(self.lines), **asdict(line)})

    def claim(self, run: RunDir, new: int) -> None:
        """Write the lines from the number `new` on to a claimed directory, and all later ones."""
        self.run, unwritten = run, self.lines[new:]
        run.cut_log(new)
        del self.lines[new:]
        self.add(*unwritten)

    @property
    def attempts(self) -> list[Attempt]:
        """The calls of all steps."""
        return [line for line in self.lines if isinstance(line, Attempt)]

    def seconds(self, passed: Mapping[str, float] | None = None) -> float:
        """Return the seconds of the steps in these directories, by default of all steps.

        `passed` has the optimiser steps until which a training counts.
        """
        return sum(
            one.seconds
            for one in self.attempts
            if passed is None
            or (math.inf if one.until is None else one.until) <= passed.get(one.place, -1)
        )

    def looks(self, known: int | None = None) -> list[str]:
        """Return the directories of the looks at the verification rows, in their order."""
        lines = self.lines[:known]
        return list(dict.fromkeys(line.place for line in lines if isinstance(line, Look)))

    def candidates(self, recipe: CompressRecipe, known: int) -> dict[str, Candidate]:
        """Return the candidates that were scored for the backends and shapes of a recipe, by name.

        A later candidate replaces an earlier one.
        """
        scored: dict[str, Candidate] = {}
        is_same = False
        for line in self.lines[:known]:
            if isinstance(line, Question):
                is_same = _choice(line.goal) == _choice(question_of(recipe))
            elif isinstance(line, Scored) and is_same:
                scored |= {one.name: one for one in line.candidates}
        return scored

    @property
    def inputs(self) -> dict[str, str]:
        """The hashes of the inputs with which the run began, by name."""
        questions = [line for line in self.lines if isinstance(line, Question)]
        return questions[0].inputs if questions else {}

    @property
    def last_question(self) -> Question | None:
        """The question that was answered last."""
        asked = None
        answered = None
        for line in self.lines:
            if isinstance(line, Question):
                asked = line
            elif isinstance(line, Answer):
                answered = asked
        return answered

    def unanswered(self, goal: str) -> Question | None:
        """Return a question with this goal that was stopped after the last answer."""
        for line in reversed(self.lines):
            if isinstance(line, Answer):
                return None
            if isinstance(line, Question) and line.goal == goal:
                return line
        return None

    def ask(self, recipe: CompressRecipe, inputs: dict[str, str]) -> Question:
        """Return the question of a command, which is a new one unless it was stopped.

        If only the price differs from the last question's, the choice stays the same.
        """
        text, last = question_of(recipe), self.last_question
        if (stopped := self.unanswered(text)) is not None:
            return stopped
        repeats = last is not None and without_price(last.goal) == without_price(text)
        if last is not None and repeats and last.goal != text:
            known = last.known
        else:
            known = len(self.lines) if last is not None else 0
        question = Question(text, known, inputs)
        self.add(question)
        return question

    def has_tried(self, recipe: CompressRecipe) -> bool:
        """Whether the last answer had the backends and shapes of a recipe to choose from."""
        last = self.last_question
        return last is not None and _choice(last.goal) == _choice(question_of(recipe))


def question_of(recipe: CompressRecipe) -> str:
    """Return the limits, the price, the backends and the shapes as text."""
    goal, plan = recipe.goal, recipe.plan
    unset = set() if goal.cascade else {"cascade"}
    limits = goal.model_dump(exclude_none=True, exclude=unset)
    parts = [limits, recipe.price_per_hour, plan.backends, plan.shapes]
    return json.dumps(parts, sort_keys=True)


def without_price(question: str) -> list[object]:
    """Return the parts of a question that decide the choice."""
    limits, _, *plan = json.loads(question)
    return [limits, *plan]


def _choice(question: str) -> list[object]:
    """Return the backends and the shapes of a question."""
    choice: list[object] = json.loads(question)[2:]
    return choice
