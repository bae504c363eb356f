"""`kdcli trim`: a model without the tokens that a text does not need.

Data flow: texts -> how often each token occurs -> the tokens to keep -> tokenizer and tables without the others.
"""

import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from kdcli.bench.latency import Subject
from kdcli.commands.trim.settings import TrimData, TrimRecipe
from kdcli.data.files import Source, open_source
from kdcli.errors import UsageError
from kdcli.models.card import describe, describe_source
from kdcli.models.custom_class import HEADS
from kdcli.models.embedder import read_format, save_embedder
from kdcli.models.load import load_tokenizer, location, save_model
from kdcli.models.training_rows import training_rows
from kdcli.models.trim import Array, check_trimmable, counted, cut_model, cut_tokenizer, named_in, with_needed
from kdcli.recipe.resolve import Resolved
from kdcli.recipe.sections import Invocation
from kdcli.report.finish import RunResult, measure, write_report
from kdcli.report.views import EMBEDDER
from kdcli.sparse.load import load
from kdcli.training.launch import choose_output_dir, launch
from kdcli.training.progress import Progress
from kdcli.training.run_dir import RunDir

BEFORE, AFTER = "untrimmed", "trimmed"
TEXTS_AT_ONCE = 1000
CHANGES_SHOWN = 5
OTHER_TEXTS = 10_000  # Of the validation split, to see how other text changes


def run(resolved: Resolved[TrimRecipe], invocation: Invocation) -> RunResult | None:
    """Trim a model and report; None in a process that prints nothing. Raises KdcliError: see `kdcli.errors`; nothing
    was written if model or data cannot be used, or every token is needed."""
    recipe = resolved.recipe
    if recipe.data.source is None:
        raise UsageError("no text given", "kdcli trim MODEL --data TEXT: the tokens of the text are kept")
    session = launch("fp32", invocation, judging=True)
    if session is None:
        return None
    source, trusted = str(recipe.model), session.trust_remote_code
    folder = choose_output_dir(f"trim-{Path(source).name}", resolved, invocation, session)
    tokenizer = load_tokenizer(source, trust_remote_code=trusted)
    check_trimmable(tokenizer, source)
    model, data = load(source, trust_remote_code=trusted), open_source(recipe.data.source)
    fmt = read_format(source)
    # Prompts are text that the model reads.
    named = named_in(model.config) | {
        n for p in (fmt.prompts if fmt else {}).values() for n in tokenizer(p)["input_ids"]
    }
    counts = np.zeros(len(tokenizer), np.int64)
    for texts in _batches(data, "train", recipe.data):
        counts += counted(tokenizer, texts)
    kept = _kept(tokenizer, counts, named, recipe.vocab_size)
    cut, smaller = cut_tokenizer(tokenizer, kept), cut_model(model, kept)
    notes = [f"{len(kept):,} of {len(tokenizer):,} tokens kept; they cover {_share(counts, kept):.3%} of the text"]
    notes += _other_text(data, recipe.data, tokenizer, cut, kept)
    RunDir.claim(folder, resolved.to_yaml(), overwrite=invocation.overwrite)
    rows = training_rows(location(source))
    if fmt is not None:
        save_embedder(smaller, cut, fmt, folder, rows)
    else:
        save_model(smaller, cut, folder, rows)
    head = next((h for h in HEADS if type(model).__name__.endswith(f"For{h}")), None)
    for note in notes:
        Progress.log(note)
    subjects = [Subject(BEFORE, location(source)), Subject(AFTER, str(folder))]
    return write_report(
        RunDir(folder),
        command="trim",
        recipe=recipe.model_dump(),
        cards={BEFORE: describe_source(model, source), AFTER: describe(smaller, str(folder), folder)},
        folders={AFTER: folder},
        latency=measure(subjects, recipe.measure, session),
        notes=notes,
        auto_class=EMBEDDER if fmt else f"AutoModelFor{head}" if head else "AutoModel",
    )


def _kept(tokenizer: PreTrainedTokenizerBase, counts: Array, named: set[int], size: int | None) -> Array:
    """The ids to keep: those `named` and those that occur, or the most frequent of them that make a vocabulary of at
    most `size`."""
    frequent = np.argsort(-counts, kind="stable")[: int((counts > 0).sum())].tolist()
    kept = with_needed(tokenizer, [*named, *frequent])
    if size is not None and len(kept) > size:
        least, most = 0, len(frequent)  # `least` fit, `most` do not.
        kept = with_needed(tokenizer, named)
        if len(kept) > size:
            always = f"{len(kept):,} tokens always stay: special ones, single characters and bytes"
            raise UsageError(f"a vocabulary of {size:,} is too small: {always}", f"give at least {len(kept)}")
        while most - least > 1:
            middle = (least + most) // 2
            tried = with_needed(tokenizer, [*named, *frequent[:middle]])
            least, most, kept = (middle, most, tried) if len(tried) <= size else (least, middle, kept)
    if len(kept) == len(tokenizer):
        raise UsageError(f"the text needs all {len(kept):,} tokens: nothing to trim", "give less text, or --vocab-size")
    return kept


def _other_text(
    source: Source, settings: TrimData, tokenizer: PreTrainedTokenizerBase, cut: PreTrainedTokenizerBase, kept: Array
) -> list[str]:
    """How the texts of the validation split change, if there is one. A text changes where it holds a removed token."""
    if not source.has("validation"):
        return []
    removed, texts, changed, words = set(range(len(tokenizer))) - set(kept.tolist()), 0, 0, Counter[str]()
    for batch in itertools.islice(_batches(source, "validation", settings), OTHER_TEXTS // TEXTS_AT_ONCE):
        rows = tokenizer(batch, add_special_tokens=False, verbose=False)
        for n, (text, ids) in enumerate(zip(batch, rows["input_ids"], strict=True)):
            of_removed = {rows.token_to_word(n, at) for at, token in enumerate(ids) if token in removed}
            texts, changed = texts + 1, changed + bool(of_removed)
            spans = [rows.word_to_chars(n, word) for word in of_removed if word is not None]
            words.update({text[begin:end].strip() for begin, end in spans})
    if not texts:
        return []
    notes = [f"of {texts:,} other texts (validation split) {changed:,} are segmented otherwise, {changed / texts:.1%}"]
    for word, count in words.most_common(CHANGES_SHOWN):
        before, after = (" ".join(each.tokenize(word)) for each in (tokenizer, cut))
        notes.append(f"{word!r}, in {count:,} of them: {before} -> {after}")
    return notes


def _share(counts: Array, kept: Array) -> float:
    return float(counts[kept].sum() / max(1, counts.sum()))


def _batches(source: Source, split: str, settings: TrimData) -> Iterator[list[str]]:
    texts = _texts(source, split, settings.column)
    while batch := list(itertools.islice(texts, TEXTS_AT_ONCE)):
        yield batch


def _texts(source: Source, split: str, column: str | None) -> Iterator[str]:
    """Every text of a split: of a row all its columns, or one; a list of words is a text a word."""
    if column is not None or not (source.files or source.hub):
        yield from source.documents(split, column)
        return
    for name, rows in source.tables(split):
        text = None
        for _, row in rows:
            for value in row.values():
                for text in value if isinstance(value, list) else [value]:
                    if isinstance(text, str):
                        yield text
        if text is None:
            raise UsageError(f"{name} holds no text")
