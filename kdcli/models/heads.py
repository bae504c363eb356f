"""Load stock encoders with a task's head, and check the head's labels against the data's.

The order of the labels matters: an MNLI teacher with another order scores 7 % instead of 84 %. Such
a checkpoint is refused, and the error gives the mapping that it needs.

A student that is used without training gets a fitted head: its last linear has the least-squares
weights that map its input to what the teacher's last linear returns for the same rows. The other
modules of the head are the teacher's, except those of a static classifier, which has its own.
"""

import copy
import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Literal, TypeVar

import numpy as np
import torch
import transformers
from tokenizers import normalizers
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER

from kdcli.custom_code import custom_code_allowed
from kdcli.errors import UsageError
from kdcli.listing import class_names, numbered_classes
from kdcli.models.cross_encoder import with_own_settings
from kdcli.models.custom_class import (
    LABEL_WORDS_KEY,
    class_for,
    class_named,
    custom_class,
    forget_custom_classes,
    runs_own_code,
)
from kdcli.models.files import CONFIG_FILE, TASK_KEY, ModelClass, config_errors
from kdcli.models.least_squares import Inputs, fit_linear
from kdcli.models.load import (
    encoder_or_head,
    load_config,
    load_tokenizer,
    load_weights,
    location,
    pickled_head,
)
from kdcli.models.masked_head import student_with_head
from kdcli.models.model import Model, return_token_types, training_rows
from kdcli.models.padding import settle_padding
from kdcli.models.shape import InitializedStudent, longest_input
from kdcli.models.static import StaticConfig
from kdcli.models.static_classifier import StaticForSequenceClassification
from kdcli.types import Batch, Examples, Head, Kind, Task

AUTO_CLASS: dict[Kind, ModelClass] = {
    **dict.fromkeys(("class", "multi", "score"), transformers.AutoModelForSequenceClassification),
    "tokens": transformers.AutoModelForTokenClassification,
    "span": transformers.AutoModelForQuestionAnswering,
    "text": transformers.AutoModelForMaskedLM,
}
transformers.AutoModelForSequenceClassification.register(
    StaticConfig, StaticForSequenceClassification
)
PROBLEM: dict[Kind, str] = {
    "class": "single_label_classification",
    "multi": "multi_label_classification",
    "score": "regression",
}
LISTED_LABELS = 5
"""Number of labels that an error names."""
GENERIC = re.compile(r"LABEL_\d+")  # transformers' name for an unnamed label
ModelT = TypeVar("ModelT", bound=Model)
HEAD_ROWS = 1024
"""Maximum number of rows on which a head is fitted."""
MAX_VECTORS = 16_384
"""Maximum number of inputs of the last linear, because a head of tokens has one for every token."""
ROWS_AT_ONCE = 64
INPUTS = ("input_ids", "attention_mask", "token_type_ids")


def modules_of_head(model: PreTrainedModel) -> list[nn.Module]:
    """Return the modules of a model outside its encoder."""
    inside = set(model.base_model.modules())
    return [module for module in model.modules() if module not in inside]


def tokenizer_for(
    source: str,
    *,
    of_words: bool,
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model for a task.

    With `of_words`, the task's rows are lists of words that each have a label, so a byte-level
    tokenizer is set to put a space before every word. Raises UsageError if there is no readable
    tokenizer.
    """
    tokenizer = load_tokenizer(source)
    if (
        of_words
        and tokenizer.is_fast
        and "ByteLevel" in repr(tokenizer.backend_tokenizer.pre_tokenizer)
    ):
        tokenizer = _spaced(load_tokenizer(source, add_prefix_space=True))
    return tokenizer


def load_for_task(
    source: str,
    task: Task,
    *,
    label_map: Sequence[int] | None = None,
    new_head: bool,
    own_head: bool = True,
    seed: int = 0,
    compacted: bool = False,
) -> Model:
    """Load a model with a task's head.

    * `label_map`: the data's number for each of the checkpoint's labels, if their orders differ.
    * `new_head`: allow a random head drawn from `seed`, for fine-tuning. Otherwise the checkpoint
      must have a head that fits the task.
    * `own_head`: use the checkpoint's head if it fits. Otherwise always make a new one.
    * `compacted`: accept a model of `kdcli.deploy.sparse.compact`, which no verb can train.

    Raises UsageError if the model cannot be loaded, if the model type has no such head, if the
    checkpoint's head is of another kind, or if its labels differ from the task's or are in another
    order.
    """
    config = load_config(source, compacted=compacted)
    auto = AUTO_CLASS[task.kind]
    custom = custom_class(config) if own_head else None
    if custom is None and class_for(config, auto) is None:
        place = "the code of the model" if runs_own_code(config) else "transformers"
        raise UsageError(
            f"{config.model_type} has no head for {_head_name(task.kind)} in {place}, which "
            f"{task.title} needs",
            "use a model of another type",
        )
    encoder_or_head(source, config, auto)
    misfit = misfit_of(source, config, task, label_map) if own_head else "a new one was requested"
    if misfit is not None and not new_head:
        count = len(task.labels)
        same_count = count > 1 and config.num_labels == count and label_map is None
        raise _unfit(source, task, misfit, label_count=count if same_count else None)
    if misfit is not None and label_map is not None:
        raise UsageError(
            f"head.label_map has no head to reorder, because {source} gets a new one: {misfit}",
            "remove head.label_map; a new head is in the data's order",
        )
    tokenizer = tokenizer_for(source, of_words=task.kind == "tokens")
    max_length = None
    if misfit is None:
        max_length = tuned_length(config, tokenizer, task)
        model = load_weights(source, custom or auto)
        if label_map is not None:
            _permute(model, list(label_map))
        note = "its own head" + (", in the data's order of labels" if label_map is not None else "")
        has_no_names = all(GENERIC.fullmatch(str(n)) for n in config.id2label.values())
        if task.kind != "score" and task.labels and has_no_names:
            note += "; its labels have no names, so their order is taken to be the data's"
        describe_task(model.config, task)
    else:
        encoder = load_weights(source, AutoModel, seed=seed)
        model = with_new_head(encoder, config, task, seed, source=source)
        return_token_types(config, tokenizer)
        note = f"a new head: {misfit}"
    note = "; ".join(filter(None, [note, settle_padding(model.eval(), tokenizer, source)]))
    rows = training_rows(location(source))
    return with_own_settings(Model(model, tokenizer, source, note, max_length, rows))


def check_head(source: str, config: PreTrainedConfig, task: Task) -> None:
    """Check that the head that a configuration describes can serve a task.

    Raises UsageError if the head is of another kind, or if its labels differ from the task's or are
    in another order.
    """
    if (misfit := misfit_of(source, config, task, None)) is not None:
        raise _unfit(source, task, misfit)


def _unfit(source: str, task: Task, misfit: str, *, label_count: int | None = None) -> UsageError:
    """Return the error for a head that cannot serve a task.

    `label_count` is the number of labels if the model and the task have as many of them.
    """
    pairs = task.kind == "score" and len(task.texts) == 2
    vectors = ", or evaluate its vectors: kdcli evaluate --pooling mean" if pairs else ""
    # A text head cannot read rows of words.
    reads_rows = task.kind != "tokens" or "has no head" not in misfit
    ignoring = "; or ignore the labels: --set data.labels=teacher" if reads_rows else ""
    mapped = ""
    if label_count is not None and "it predicts" in misfit:
        mapped = (
            "; or, if both name the same classes, give the data's number of each of the model's: "
            f"--set head.label_map='{list(range(label_count))}'"
        )
    return UsageError(
        f"the head of {source} does not fit {task.title}: {misfit}{pickled_head(source)}",
        f"fine-tune it first: kdcli finetune{vectors}{ignoring}{mapped}",
    )


def tuned_length(
    config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase, task: Task
) -> int | None:
    """Return the maximum number of tokens per row that a model with a fitting head reads.

    This is the tokenizer's length, which every other library obeys, or the model's positions if
    they are fewer; `VERY_LARGE_INTEGER` if neither has a limit. Contexts and sources are divided or
    cut by the task's protocol, so their length is only that of a model which was fine-tuned on this
    very task, and None for other models.
    """
    follows_task = task.kind in ("span", "text")
    if follows_task and getattr(config, TASK_KEY, None) != task.name:
        return None
    return int(min(tokenizer.model_max_length, longest_input(config) or VERY_LARGE_INTEGER))


def kind_of_head(config: PreTrainedConfig, name: str) -> Literal["class", "tokens", "span"] | None:
    """Return the kind of head of a model class, by its name, or None if it has no such head.

    `class` stands for every kind with one output per text.
    """
    words, custom = getattr(config, LABEL_WORDS_KEY, None), class_named(name)
    names = {name} if custom is None else {parent.__name__ for parent in custom.__mro__}
    kinds: tuple[Literal["class", "tokens", "span"], ...] = ("class", "tokens", "span")
    for kind in kinds:
        if custom is not None and words is not None:
            if words["auto_class"] == AUTO_CLASS[kind].__name__:
                return kind
        elif class_for(config, AUTO_CLASS[kind]) in names:
            return kind
    return None


def head_of(config: PreTrainedConfig) -> Head | None:
    """Return what the head that a configuration describes predicts, or None if it has no head."""
    architecture = next(iter(config.architectures or ()), "")
    kind: Kind | None = kind_of_head(config, architecture)
    if kind == "class" and config.num_labels == 1 and config.problem_type is None:
        kind = "score"
    elif kind == "class":
        kind = next((k for k, problem in PROBLEM.items() if problem == config.problem_type), kind)
    is_regression = kind == "score" and config.problem_type is not None
    if is_regression:
        return Head("score", score_name=_score_name(config))
    if kind is None or kind == "span":
        return None if kind is None else Head(kind)
    labels = tuple(str(config.id2label[i]) for i in range(config.num_labels))
    check_distinct_labels(labels)
    return Head(kind, labels, named=not all(map(GENERIC.fullmatch, labels)))


def check_distinct_labels(labels: Sequence[str]) -> None:
    """Raise a UsageError if two outputs of a head have the same name."""
    for number, name in enumerate(labels):
        if (first := labels.index(name)) < number:
            raise UsageError(
                f"id2label in the model's config.json gives outputs {first} and {number} the same "
                f"name, '{name}'",
                "give each output a name of its own in config.json",
            )


def _head_name(kind: Kind) -> str:
    return {"tokens": "token classification", "span": "question answering"}.get(
        kind, "sequence classification"
    )


def misfit_of(
    source: str, config: PreTrainedConfig, task: Task, label_map: Sequence[int] | None
) -> str | None:
    """Return why the checkpoint's own head cannot serve the task, or None if it can.

    Raises UsageError if its labels are the task's in another order, or if `label_map` is not a
    permutation.
    """
    architecture = (config.architectures or ["none"])[0]
    kind, head = kind_of_head(config, architecture), _head_name(task.kind)
    if kind is None or AUTO_CLASS[kind] is not AUTO_CLASS[task.kind]:
        return f"{architecture} has no head for {head}"
    if task.kind == "span":
        return None
    head_labels = [str(config.id2label.get(i, f"LABEL_{i}")) for i in range(config.num_labels)]
    count = len(task.labels) or 1
    if config.problem_type not in (None, PROBLEM.get(task.kind)):
        return f"its head is for {config.problem_type}, not {PROBLEM.get(task.kind, head)}"
    if len(head_labels) != count:
        if task.labels and not all(map(GENERIC.fullmatch, head_labels)):
            return _label_misfit(head_labels, task)
        return f"its head has {len(head_labels)} outputs, but {task.title} needs {count}"
    if task.kind == "score":
        return None
    if label_map is not None:
        if sorted(label_map) != list(range(count)):
            raise UsageError(
                f"head.label_map must hold each of 0 ... {count - 1} once, got {list(label_map)}"
            )
        return None
    in_head, in_data = _comparable(head_labels, task.labels)
    if all(GENERIC.fullmatch(name) for name in head_labels) or in_head == in_data:
        return None
    if sorted(in_head) == sorted(in_data):
        needed = [in_data.index(name) for name in in_head]
        raise UsageError(
            f"{source} has the labels of {task.title} in another order: "
            f"{numbered_classes(head_labels)}; the data: {numbered_classes(task.labels)}",
            f"add --set head.label_map='{needed}' to put them in the data's order",
        )
    return _label_misfit(head_labels, task)


def _label_misfit(head_labels: Sequence[str], task: Task) -> str:
    """Name the labels of a head, and the task's labels that are not among them."""
    in_head, in_data = _comparable(head_labels, task.labels)
    rows = task.rows_of_labels
    pairs = zip(task.labels, in_data, strict=True)
    foreign = [label for label, name in pairs if name not in in_head]
    predicted = f"it predicts {class_names(head_labels, LISTED_LABELS)}"
    if not foreign:
        return f"{predicted}; {task.title} has only {class_names(task.labels, LISTED_LABELS)}"
    in_order = [label for label in rows or foreign if label in foreign]
    where = f"; the first is in {rows[in_order[0]]}" if rows else ""
    missing = class_names(in_order, LISTED_LABELS)
    return f"{predicted}, but {task.title} has {missing}{where}"


def _comparable(*lists: Sequence[str]) -> list[list[str]]:
    """Remove punctuation and case from labels, unless they tell labels apart (C and C++)."""
    without_punctuation = [[re.sub(r"[\W_]", "", n).lower() for n in names] for names in lists]
    without_case = [[name.strip().lower() for name in names] for names in lists]
    for candidates in (without_punctuation, without_case):
        if all(len(set(names)) == len(names) and all(names) for names in candidates):
            return candidates
    return [list(names) for names in lists]


def _score_name(config: PreTrainedConfig) -> str:
    """Return the name that a configuration gives its only output; empty if it has none."""
    name = str(config.id2label.get(0, "")) if config.num_labels == 1 else ""
    return "" if GENERIC.fullmatch(name) else name


def describe_task(config: PreTrainedConfig, task: Task) -> None:
    """Write a task and its labels into a configuration, which `transformers.pipeline` reads.

    A score that has a label is a detector's: its output is the logit of a probability. Other scores
    keep the name that the model gives them, such as `toxicity`.
    """
    score_name = task.score_name or _score_name(config) or "score"
    names = ("start", "end") if task.kind == "span" else task.labels or (score_name,)
    setattr(config, TASK_KEY, task.name)
    if task.kind == "span":
        config.num_labels = len(names)
        return
    config.id2label = dict(enumerate(names))
    config.label2id = {name: number for number, name in enumerate(names)}
    is_detector = task.kind == "score" and bool(task.labels)
    config.problem_type = None if is_detector else PROBLEM.get(task.kind)


def with_new_head(
    encoder: PreTrainedModel,
    config: PreTrainedConfig,
    task: Task,
    seed: int,
    *,
    source: str,
) -> PreTrainedModel:
    """Put an encoder's weights under a new head for the task, drawn from the seed.

    `config` is changed to describe the task.
    """
    forget_custom_classes(config)
    describe_task(config, task)
    torch.manual_seed(seed)
    auto = AUTO_CLASS[task.kind]
    model: PreTrainedModel
    with config_errors(f"the {CONFIG_FILE} of {source}"):
        model = auto.from_config(
            config, dtype=torch.float32, trust_remote_code=custom_code_allowed()
        )
    missing = model.base_model.load_state_dict(encoder.state_dict(), strict=False).missing_keys
    # Only one of the two classes may have a pooler. If only the head's class has one (Nomic), it
    # stays random.
    lost = [name for name in missing if not name.startswith("pooler.")]
    assert not lost, (
        f"{type(model).__name__} has encoder weights that AutoModel does not: {lost[:3]}"
    )
    return model


def _permute(model: PreTrainedModel, label_map: list[int]) -> None:
    """Reorder the head's outputs: output i becomes output `label_map[i]`."""
    heads = [
        m
        for m in modules_of_head(model)
        if isinstance(m, nn.Linear) and m.out_features == len(label_map)
    ]
    if not heads:
        raise UsageError(
            f"{type(model).__name__} has no linear head whose outputs could be reordered"
        )
    place = torch.tensor(label_map).argsort()
    for parameter in (heads[-1].weight, heads[-1].bias):
        if parameter is not None:
            parameter.data = parameter.data[place]


def _spaced(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Make a byte-level tokenizer put a space before each word.

    Without the space, several words would become the pieces of one word.
    """
    # RoBERTa's own class obeys `add_prefix_space`, but the plain class ignores it.
    backend = tokenizer.backend_tokenizer
    before = [backend.normalizer] if backend.normalizer is not None else []
    ((first, _), *_) = backend.pre_tokenizer.pre_tokenize_str(
        before[0].normalize_str("a") if before else "a"
    )
    if not first.startswith("Ġ"):
        backend.normalizer = normalizers.Sequence([*before, normalizers.Prepend(" ")])
    return tokenizer


def student_with_fitted_head(
    teacher: ModelT, built: InitializedStudent, rows: Examples, *, init: str, seed: int
) -> ModelT:
    """Fit a student's head to its teacher's outputs. An encoder gets its teacher's head first.

    Args:
        teacher: The teacher, with a head that ends in a linear. It must be on the CPU.
        built: The student of the teacher's encoder, or a static classifier with its own head.
        rows: The rows on which the head is fitted.
        init: How the student starts. Only `teacher` fits the head.
        seed: The seed of weights that cannot be copied.
    """
    model, note = built.model, "a head of its own"
    if last_linear(model) is None:
        model = student_with_head(teacher.model, built, init=init, seed=seed).model
        note = "its teacher's head"
    if init == "teacher":
        fit_head(teacher, model.eval(), rows)
        note += ", fitted to its teacher's outputs"
    tokenizer = copy.deepcopy(teacher.tokenizer)
    return replace(teacher, model=model.eval(), tokenizer=tokenizer, note=note)


def check_linear_head(teacher: Model) -> None:
    """Check that a teacher has a head that ends in a linear.

    Raises:
        UsageError: It has none.
    """
    if last_linear(teacher.model) is None:
        raise UsageError(
            f"{teacher.source} has no head that a student could start from",
            "train the student: remove --max-steps 0",
        )


@torch.no_grad()
def fit_head(teacher: Model, student: nn.Module, rows: Examples) -> None:
    """Fit the last linear of a student's head to the teacher's outputs, in place."""
    own, other = last_linear(student), last_linear(teacher.model)
    assert own is not None
    assert other is not None
    numbers = np.unique(np.linspace(0, len(rows) - 1, HEAD_ROWS).astype(np.int64))
    batches = np.array_split(numbers, -(-len(numbers) // ROWS_AT_ONCE))
    seen = dict[str, Tensor]()
    inputs, targets = list[Tensor](), list[Tensor]()
    with ExitStack() as hooks:
        for hook in (
            own.register_forward_hook(lambda _, args, __: seen.update(x=args[0])),
            other.register_forward_hook(lambda _, __, output: seen.update(y=output)),
        ):
            hooks.callback(hook.remove)
        for some in batches:
            batch = rows.batch(some)
            given: Batch = {name: batch[name] for name in INPUTS if name in batch}
            for model in (teacher.model, student):
                model(**given)
            x, y, mask = seen["x"], seen["y"], given["attention_mask"].bool()
            # A head of tokens has an output for every token, a head of texts one for every row.
            if x.dim() == mask.dim() + 1:
                x, y = x[mask], y[mask]
            kept = _evenly_spaced(len(x), MAX_VECTORS // len(batches))
            inputs.append(x[kept].double())
            targets.append(y[kept].double())
    states_RI = Inputs(torch.cat(inputs), has_bias=own.bias is not None)
    fit_linear(own, states_RI, torch.cat(targets))


def _evenly_spaced(count: int, most: int) -> Tensor:
    """Return the places of at most `most` of `count` items, evenly spaced."""
    kept = min(count, most)
    return torch.arange(kept) * count // max(1, kept)


def last_linear(model: nn.Module) -> nn.Linear | None:
    """Return the linear of a model's head that is defined last; None without such a head."""
    linears = [m for m in modules_of_head(model) if isinstance(m, nn.Linear)]
    return linears[-1] if linears else None
