"""Make the training steps of each workload: the verb, its recipe and its data.

Labelled tasks train on rows, rerankers on lists of candidates, and embedding models on text.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable

from kdcli.errors import UsageError
from kdcli.models.grammar import is_static_shape
from kdcli.recipe.resolve import recipe_keys
from kdcli.recipe.sections import RecipeValues, RunOptions
from kdcli.report.front import EMBEDDER
from kdcli.types import Kind
from kdcli.verbs.compress.recipes import RecipeKeys, base_recipe, dotted
from kdcli.verbs.compress.settings import CompressRecipe
from kdcli.verbs.compress.steps import Step, task_data
from kdcli.verbs.compress.verbs import Verbs
from kdcli.verbs.distill.recipes import distill_recipe, embedding_recipe
from kdcli.verbs.distill.settings import at_width
from kdcli.verbs.prune.recipes import prune_recipes
from kdcli.workloads.embedding import METHOD
from kdcli.workloads.embedding_texts import column_of_texts
from kdcli.workloads.eval_sets import by_vectors
from kdcli.workloads.labelled import ROW_KINDS
from kdcli.workloads.recipes import finetune_recipe
from kdcli.workloads.rerank import TASKS
from kdcli.workloads.retrieval import RETRIEVAL

DISTILL = {"method": "tinybert", "stage": "joint"}
"""A single stage, whose one learning curve shows how good a student is."""
LEARNING_RATE = 3e-4
"""The learning rate under a teacher of width 384."""
ROWS_SEEN = 90_000
"""Number of rows that a student reads in all, each of them at least once."""
LIST_KEYS = ("source", "partition", "labels", "max_length", "split_seed")
"""Keys of `data` that lists of candidates have."""
MAX_EPOCHS = 10.0
"""Maximum number of times that a student reads each row."""


class Trainer(ABC):
    """Makes the steps that train models of a workload.

    Args:
        recipe: the recipe of the compression, with its `data.partition`.
        verbs: the verbs that train.
    """

    supervised = False
    """Whether a student can be trained on the labels alone."""
    auto_class = "AutoModel"
    """The class that loads a student, for the report."""

    def __init__(self, recipe: CompressRecipe, verbs: Verbs) -> None:
        self.recipe, self.verbs = recipe, verbs

    def allows_static(self, kind: Kind | None) -> bool:
        """Return whether a student may be static, which has no outputs for single tokens.

        Args:
            kind: the kind of the task's labels; None for workloads other than labelled tasks.
        """
        return False

    def distill_defaults(
        self, shape: str, teacher_width: int, count_rows: Callable[[], int]
    ) -> dict[str, object]:
        """Return the keys of a distillation that the plan does not give.

        Args:
            shape: the student's shape.
            teacher_width: the teacher's hidden size.
            count_rows: returns the number of training rows.
        """
        return {}

    def finetune(self, model: str, keys: RecipeKeys) -> Step:
        """Fine-tune a model on the task."""
        return Step("finetune", lambda options: self._finetune(model, keys, options))

    def distill(self, teacher: str, keys: RecipeKeys, shape: str | None = None) -> Step:
        """Distil a student from a teacher. Without `shape`, the keys give the student."""
        return Step("distill", lambda options: self._distill(teacher, shape, keys, options))

    def prune(self, model: str, keys: RecipeKeys, teacher: str | None = None) -> Step:
        """Prune a model while it learns the task, or its own vectors.

        Args:
            model: the model.
            keys: keys of the recipe of `prune`.
            teacher: the model that the pruned model was made from. Only `RowTrainer` uses it: the
                model then learns its outputs too.
        """

        def call(options: RunOptions) -> object:
            values = self._prune_values(keys, teacher) | {"model": model}
            methods = [values["method"]] if "method" in values else []
            resolved = prune_recipes(methods, recipe=base_recipe(keys), sets=(), options=values)
            return self.verbs.prune(resolved, options)

        return Step("prune", call)

    @abstractmethod
    def _finetune(self, model: str, keys: RecipeKeys, options: RunOptions) -> object: ...

    @abstractmethod
    def _distill(
        self, teacher: str, shape: str | None, keys: RecipeKeys, options: RunOptions
    ) -> object: ...

    @abstractmethod
    def _prune_values(self, keys: RecipeKeys, teacher: str | None) -> RecipeValues: ...

    def _merged(self, data: RecipeKeys, keys: RecipeKeys) -> RecipeValues:
        """Return the dotted keys of a training. The step's keys replace all but the source
        and the partition."""
        own = {"measure.latency": False, "train.seed": self.recipe.seed}
        fixed = {k: v for k, v in data.items() if k in ("data.source", "data.partition")}
        return {**data, **own, **dotted(keys), **fixed}


class RowTrainer(Trainer):
    """Trains models with a head on the rows of a task."""

    supervised = True

    def allows_static(self, kind: Kind | None) -> bool:
        return kind in ROW_KINDS

    def distill_defaults(
        self, shape: str, teacher_width: int, count_rows: Callable[[], int]
    ) -> dict[str, object]:
        if is_static_shape(shape):
            return {}
        epochs = min(MAX_EPOCHS, max(1.0, round(ROWS_SEEN / count_rows(), 1)))
        return {
            **DISTILL,
            "train.lr": at_width(LEARNING_RATE, teacher_width),
            "train.epochs": epochs,
        }

    def _finetune(self, model: str, keys: RecipeKeys, options: RunOptions) -> object:
        values = self._task_values(keys) | {"model": model}
        resolved = finetune_recipe(recipe=base_recipe(keys), options=values)
        return self.verbs.finetune(resolved, options)

    def _distill(
        self, teacher: str, shape: str | None, keys: RecipeKeys, options: RunOptions
    ) -> object:
        values: RecipeValues = {"undistilled.use": False, **self._task_values(keys)}
        values |= {"teacher": teacher}
        values |= {} if shape is None else {"student.to": [shape]}
        resolved = distill_recipe(recipe=base_recipe(keys), options=values)
        return self.verbs.distill(resolved, options)

    def _prune_values(self, keys: RecipeKeys, teacher: str | None) -> RecipeValues:
        values = self._task_values(keys)
        return values if teacher is None else values | {"teacher": teacher}

    def _task_values(self, keys: RecipeKeys) -> RecipeValues:
        return self._merged(task_data(self.recipe), keys) | {"task": self.recipe.task}


class TextTrainer(Trainer):
    """Trains embedding models on text."""

    auto_class = EMBEDDER

    def allows_static(self, kind: Kind | None) -> bool:
        return True

    def distill_defaults(
        self, shape: str, teacher_width: int, count_rows: Callable[[], int]
    ) -> dict[str, object]:
        # `count_rows` counts the rows of `data`, not the texts of `text`.
        is_counted = self.recipe.data.source is not None and self.recipe.text is None
        if is_static_shape(shape) or not is_counted:
            return {}
        defaults = recipe_keys(embedding_recipe(str(self.recipe.model)), "distill")
        keys = defaults | dotted(self.recipe.plan.distill)
        steps, batch_size = keys.get("train.max_steps"), keys["train.batch_size"]
        used = keys.get("workload.rows")
        if not isinstance(steps, int) or not isinstance(batch_size, int):
            return {}
        rows = min(count_rows(), used) if isinstance(used, int) else count_rows()
        return {"train.epochs": MAX_EPOCHS} if steps * batch_size > MAX_EPOCHS * rows else {}

    def _finetune(self, model: str, keys: RecipeKeys, options: RunOptions) -> object:
        return RowTrainer(self.recipe, self.verbs)._finetune(model, keys, options)

    def _distill(
        self, teacher: str, shape: str | None, keys: RecipeKeys, options: RunOptions
    ) -> object:
        values = self._merged(self._text("data.column"), keys)
        values |= {"teacher": teacher, "method": METHOD}
        values |= {"workload.pooling": self.recipe.pooling}
        values |= {} if shape is None else {"student.to": [shape]}
        named = base_recipe(keys) or embedding_recipe(teacher)
        resolved = distill_recipe(recipe=named, options=values)
        return self.verbs.distill(resolved, options)

    def _prune_values(self, keys: RecipeKeys, teacher: str | None) -> RecipeValues:
        values = self._merged(self._text("data.columns.text"), keys)
        return values | {"task": METHOD, "workload.pooling": self.recipe.pooling}

    def _text(self, column_key: str) -> RecipeValues:
        data, text = self.recipe.data, self.recipe.text
        keys = {"data.source": text or data.source, "data.partition": data.partition}
        # The rows of other tasks are pairs, and `text` is another file.
        is_text = self.recipe.task == METHOD and text is None
        keys[column_key] = column_of_texts(data) if is_text else None
        return {key: value for key, value in keys.items() if value is not None}


class ListTrainer(Trainer):
    """Trains models that score lists of candidates, by the recipe of their task."""

    def _finetune(self, model: str, keys: RecipeKeys, options: RunOptions) -> object:
        values = self._merged(self._lists(), keys) | {"model": model, "task": self.recipe.task}
        resolved = finetune_recipe(recipe=base_recipe(keys), options=values)
        return self.verbs.finetune(resolved, options)

    def _distill(
        self, teacher: str, shape: str | None, keys: RecipeKeys, options: RunOptions
    ) -> object:
        values = self._merged(self._lists(), keys) | {"teacher": teacher, "task": self.recipe.task}
        values |= {} if shape is None else {"student.to": [shape]}
        resolved = distill_recipe(recipe=base_recipe(keys), options=values)
        return self.verbs.distill(resolved, options)

    def _prune_values(self, keys: RecipeKeys, teacher: str | None) -> RecipeValues:
        return self._merged(task_data(self.recipe), keys) | {"task": self.recipe.task}

    def _lists(self) -> RecipeValues:
        """Return the keys of `data:` that the recipe of the task has."""
        known = {f"data.{name}" for name in LIST_KEYS}
        return {key: value for key, value in task_data(self.recipe).items() if key in known}


def trainer_of(recipe: CompressRecipe) -> type[Trainer]:
    """Return how models of a recipe's task are trained.

    Raises UsageError: `pooling` is given for models that are not scored by vectors.
    """
    task = str(recipe.task)
    has_lists = task in TASKS
    is_vectors = not has_lists and by_vectors(task, str(recipe.model), recipe.pooling)
    if task in (RETRIEVAL, METHOD) or is_vectors:
        return TextTrainer
    if recipe.pooling is not None:
        raise UsageError(
            f"--pooling is for embedding models, and task {task} is not scored by vectors",
            "remove --pooling",
        )
    return ListTrainer if has_lists else RowTrainer
