"""Load the models of labelled tasks, and choose the form of the rows that they read."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER

from kdcli.data.text.shards import tokenizer_hash
from kdcli.deploy.cascade import cascade_parts
from kdcli.deploy.exported import is_export, open_export
from kdcli.errors import UsageError
from kdcli.messages import Fact, log_fact, warn
from kdcli.models.heads import check_head, load_for_task, tokenizer_for, tuned_length
from kdcli.models.label_words import load_with_label_words
from kdcli.models.model import Model, training_rows
from kdcli.models.shape import positions_of
from kdcli.types import Kind, Task
from kdcli.workloads.cascades import as_cascade
from kdcli.workloads.predictions import RowFormat
from kdcli.workloads.settings import LabelledSettings, TaskHeadSettings

LENGTH_KEY = "data.max_length"
MAX_CUT_SHARE = 0.05
"""The share of cut rows above which a warning is logged."""


def load_trained(
    source: str,
    task: Task,
    head: TaskHeadSettings,
    *,
    seed: int,
) -> Model:
    """Load a model to train, with its own head, a new head, or a frozen head of label words.

    Raises:
        UsageError: The model cannot be loaded, it does not fit the task, or a label word cannot be
            used.
    """
    if head.kind in ("embedding", "mlm"):
        return load_with_label_words(source, task, kind=head.kind, words=head.words, seed=seed)
    return load_for_task(source, task, label_map=head.label_map, new_head=True, seed=seed)


def load_scored(
    source: str,
    task: Task,
    *,
    label_map: Sequence[int] | None = None,
) -> Model:
    """Load a fine-tuned model or an export to score it.

    The `model` attribute of an export is an `Export`.

    Raises:
        UsageError: The model or export cannot be loaded, its head does not fit the task, or
            `label_map` is set for an export.
    """
    if not is_export(source):
        return load_for_task(source, task, label_map=label_map, new_head=False, compacted=True)
    if label_map is not None:
        raise UsageError(
            f"the labels of the export {source} cannot be reordered", "omit head.label_map"
        )

    def load(folder: str, of_tokenizer: str) -> Model:
        return _load_export(folder, of_tokenizer, task)

    second = load(source, source)
    return as_cascade(second, cascade_parts(source, second.model.config), load)


def _load_export(source: str, of_tokenizer: str, task: Task) -> Model:
    export = open_export(source)
    check_head(source, export.config, task)
    tokenizer = tokenizer_for(of_tokenizer, of_words=task.kind == "tokens")
    note = f"run by {export.format}, {export.precision}"
    length = tuned_length(export.config, tokenizer, task)
    network: Any = export
    return Model(network, tokenizer, source, note, length, training_rows(source))


def row_format(settings: LabelledSettings, task: Task, model: Model) -> RowFormat:
    """Choose the form of the rows that a model reads.

    The maximum length is at most the number of the model's position embeddings.

    Args:
        settings: The recipe's `data` section.
        task: The task.
        model: The model that reads the rows. Its own length is used if the settings give none.
    """
    length = settings.max_length or model.tuned_length or task.max_length
    tuned = model.tuned_length
    if settings.max_length and tuned not in (None, VERY_LARGE_INTEGER, settings.max_length):
        log_fact(
            f"{model.source} reads rows of {tuned} tokens: using {length} tokens, as "
            "data.max_length says"
        )
    positions = positions_of(model.model.config)
    if positions is not None and positions < length:
        if settings.max_length:
            log_fact(
                f"{model.source} reads at most {positions} tokens, so data.max_length is set to "
                f"{positions}"
            )
        length = positions
    form = RowFormat(length, settings.stride, model.token_types)
    if task.kind == "text":
        decoding: Any = model.model.generation_config
        target_length, end_id = decoding.max_new_tokens, decoding.eos_token_id
        form = replace(form, target_length=target_length, end_id=end_id)
    return form


def describe_cut(
    kind: Kind, rows: str, share: float, max_length: int, model: Model, source: str
) -> list[str]:
    """Return a note on the share of rows that are longer than the model reads, if there are any.

    Also log a warning if they are more than a few.

    Args:
        kind: The kind of the task. A long context of a span is read in several windows.
        rows: The name of the rows in the message.
        share: The share of the rows that are longer.
        max_length: The number of tokens that the model reads.
        model: The model, whose tokenizer decides the lengths.
        source: The file of the rows, or a text that tells them apart from other rows.
    """
    if not share:
        return []
    subject = f"{rows} of {source}, {max_length} tokens of {tokenizer_hash(model.tokenizer)}"
    if share > MAX_CUT_SHARE and kind != "span":
        warning = (
            f"{share:.1%} of the {rows} are longer than {max_length} tokens, and only "
            "their beginnings were read; data.max_length sets the length"
        )
        warn(Fact(warning, subject))
    verb = "need more than one window of" if kind == "span" else "were cut at"
    return [Fact(f"{share:.1%} of the {rows} {verb} {max_length} tokens ({LENGTH_KEY})", subject)]


def check_vocabulary(teacher: Model, tokenizer: PreTrainedTokenizerBase, student: str) -> None:
    """Check that teacher and student have the same vocabulary.

    Raises:
        UsageError: The vocabularies differ.
    """
    if not same_tokens(teacher.tokenizer, tokenizer):
        raise UsageError(
            f"teacher {teacher.source} and {student} have different vocabularies, but both must "
            "read the same tokens",
            "choose a teacher that was fine-tuned from a model with the same tokenizer",
        )


def same_tokens(one: PreTrainedTokenizerBase | None, other: PreTrainedTokenizerBase | None) -> bool:
    """Whether two tokenizers have the same vocabulary, so that both models can share rows."""
    if one is other:
        return True
    return one is not None and other is not None and one.get_vocab() == other.get_vocab()
