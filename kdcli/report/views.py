"""Render a report for the terminal, as Markdown, as HTML, and as a model card.

All views show the sections that `sections` lists.
"""

import hashlib
import re
from base64 import b64encode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from textwrap import wrap

import yaml
from markupsafe import Markup
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markup import escape
from rich.table import Table as RichTable

from kdcli.data.accounts import RowAccount
from kdcli.disk import write_atomic
from kdcli.listing import class_names, numbered_classes
from kdcli.report.front import EMBEDDER, PIPELINES, Score, front_matter, template
from kdcli.report.schema import Compression, Evaluation, Report
from kdcli.report.sections.candidates import compression_section
from kdcli.report.sections.curves import training_section
from kdcli.report.sections.decision import decision_section
from kdcli.report.sections.evaluations import MAX_LABELS, comparisons, details, scores, set_name
from kdcli.report.sections.grid import how_chosen, selection_section
from kdcli.report.sections.kept_weights import pruning_sections
from kdcli.report.sections.overview import card_title, how_trained, models_section, title
from kdcli.report.sections.repeat import repeat_block, repeat_command
from kdcli.report.sections.summary import card_facts, card_sentence, summary
from kdcli.report.sections.timings import (
    agreements,
    latency,
    latency_csv,
    not_measured,
    published,
    published_speedups,
)
from kdcli.report.text import (
    Link,
    Picture,
    ReportSection,
    View,
    count,
    fenced,
    filled,
    plain,
    short,
    shortened_line,
    with_data_names,
)
from kdcli.report.titles import step_title
from kdcli.types import NAMED_BY

__all__ = ["first_pictures", "html", "markdown", "model_card", "short", "terminal", "write_views"]

SCRIPT = Path(__file__).with_name("report.js")
MAX_WORD_WIDTH = 24  # characters in a column that a terminal does not fold
NUMBER = r"[+\-≤≥<]?\d+([.,]\d+)*(e[+-]?\d+)?x?(?![\w-]|[.,]\d)"
"""The beginning of a cell with a number. A shape such as 6x384 is a name."""
METHODS = {"distill": "distillation", "cotrain": "distillation", "prune": "pruned"}
"""Verb -> the hub's tag of its method."""
MAX_EXAMPLES = 5  # items with quotations that Markdown shows in a section
MAX_PARTS = 3  # parts that Markdown names if only HTML shows them
MAPPED_BY = {
    "name": "name",
    "number": "number, because data and model share no names",
    "order": "order, because the model's classes have no names",
    "none": "no labels are read",
}
NOTE = "Rows read = rows kept + rows left out."


def write_views(folder: Path, report: Report) -> None:
    """Write latency.csv, report.md, report.html and, as the last file, report.json.

    With report.json the run is done.

    Raises:
        MachineError: The disk is full or not writable.
    """
    for name, text in (
        ("latency.csv", latency_csv),
        ("report.md", markdown),
        ("report.html", html),
    ):
        write_atomic(folder / name, text(report))
    write_atomic(folder / "report.json", report.to_json())


def shown(everything: Iterable[ReportSection], view: View) -> list[ReportSection]:
    """Return the sections that a view shows and that are not empty.

    Markdown names or counts the parts that only HTML shows.
    """
    kept = []
    for section in everything:
        parts = shown(section.parts, view)
        whole = shown(section.parts, View.HTML) if view is View.MARKDOWN else parts
        seen = {part.title for part in parts}
        hidden = [part.title for part in whole if part.title not in seen]
        names = "; ".join(hidden) if len(hidden) <= MAX_PARTS else f"{len(hidden)} more parts"
        sentences = [*section.sentences, *([f"Also in report.html: {names}."] if hidden else [])]
        draws = view is View.HTML and section.draw is not list
        content = (section.columns, sentences, section.items, section.links, parts, draws)
        if section.least <= view and any(content):
            kept.append(replace(section, parts=parts, sentences=sentences))
    return kept


def terminal(report: Report) -> Iterable["FittedTable | str"]:
    """Yield the report for a terminal."""
    report = with_data_names(report)
    # A title of the table itself would be folded to the table's width.
    yield f"[bold]kdcli {escape(report.command)}: {escape(title(report))}[/bold]"
    yield from map(escape, summary(report))
    models, *others = shown(sections(report), View.TERMINAL)
    for section in (replace(models, title=""), *others):
        yield from _printed(section)


def _printed(section: ReportSection) -> Iterable["FittedTable | str"]:
    if section.title:
        yield f"[bold]{escape(section.title)}[/bold]"
    if section.columns:
        yield FittedTable(section)
        yield from filter(None, [escape(section.note)])
    yield from map(escape, section.sentences)
    yield from (escape(item[0]) for item in section.items)
    for part in section.parts:
        yield from _printed(part)


@dataclass(frozen=True)
class FittedTable:
    """A table as wide as the terminal."""

    table: ReportSection

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Fit the table to the width of the terminal.

        A table that is too wide and has few rows is turned on its side, if one table is then
        enough. Otherwise its cells break at spaces and hyphens. A table that is still too wide
        becomes several tables, each with the columns that tell its rows apart.
        """
        room, marked = options.max_width - 1, self.table.marked
        lines = [
            [_unbroken(text) for text in line[: self.table.narrow]]
            for line in (self.table.columns, *self.table.rows)
        ]
        folded = sum(_least_width(column) + 3 for column in zip(*lines, strict=True))
        is_wide = max(folded, sum(len(name) + 3 for name in lines[0])) > room
        if is_wide and len(lines) <= len(lines[0]):
            turned = [list(column) for column in zip(*lines, strict=True)]
            turned[0][0] = ""
            if sum(_least_width(column) + 3 for column in zip(*turned, strict=True)) <= room:
                lines, marked = turned, None
        columns = list(zip(*lines, strict=True))
        least = [_least_width(column) for column in columns]
        keys = _key_columns(lines[1:])
        if sum(width + 3 for width in least[:keys]) > room // 2:
            keys = 1
        pieces = _pieces(least, room, keys)
        is_right = [k > 0 and _has_numbers(column[1:]) for k, column in enumerate(columns)]
        for piece in pieces:
            grid = RichTable(header_style="bold")
            spare = room - sum(least[k] + 3 for k in piece)
            widths = {}
            # Numbers are harder to read in two lines than names.
            for k in sorted(piece, key=lambda k: not is_right[k]):
                more = max(0, min(spare, max(map(len, columns[k])) - least[k]))
                spare -= more
                widths[k] = least[k] + more
            cells = []
            for k in piece:
                heading, *texts = (_wrapped(text, widths[k]) for text in columns[k])
                grid.add_column(heading, justify="right" if is_right[k] else "left")
                cells.append(texts)
            for i, row in enumerate(zip(*cells, strict=True)):
                if len(pieces) == 1 or any(row[keys:]):
                    grid.add_row(*row, style="bold" if i == marked else None)
            yield grid


def _least_width(column: Iterable[str]) -> int:
    """Return the width of the longest part of a column that does not break."""
    words = [word for text in column for word in wrap(text, 1, break_long_words=False)]
    return min(MAX_WORD_WIDTH, max(map(len, words), default=0))


def _unbroken(cell: str) -> str:
    """Keep a number and its unit together. Brackets, words after a comma and ranges may fold."""
    return re.sub(r"(?<!,)(?<! to) (?!\()", "\xa0", cell) if re.match(NUMBER, cell) else cell


def _wrapped(cell: str, width: int) -> str:
    return escape("\n".join(wrap(cell, width or 1)).replace("\xa0", " "))


def _key_columns(rows: Sequence[Sequence[str]]) -> int:
    """Return how many of the first columns tell all rows apart; 1 if no number of columns does."""
    counts = range(1, len(rows[0])) if rows else ()
    return next((n for n in counts if len({tuple(row[:n]) for row in rows}) == len(rows)), 1)


def _pieces(least: list[int], room: int, keys: int) -> list[list[int]]:
    """Divide columns among as few tables as possible, each with the first `keys` columns."""
    pieces: list[list[int]] = [list(range(keys))]
    for i in range(keys, len(least)):
        if len(pieces[-1]) > keys and sum(least[k] + 3 for k in (*pieces[-1], i)) > room:
            pieces.append(list(range(keys)))
        pieces[-1].append(i)
    return pieces


def _has_numbers(cells: Iterable[str]) -> bool:
    """Return whether most of the cells that are not empty begin with a number."""
    numeric = [re.match(NUMBER, cell) is not None for cell in cells if cell]
    return 2 * sum(numeric) > len(numeric)


def markdown(report: Report) -> str:
    """Return report.md, a document that needs no browser."""
    report = with_data_names(report)
    lines = [f"# {plain(title(report))}", ""]
    lines += [line for text in summary(report) for line in (plain(text), "")]
    lines += [f"kdcli {report.command}, {report.created}.", ""]
    for section in shown(sections(report), View.MARKDOWN):
        lines += _written(section, "##")
    return "\n".join([*lines, "## How to repeat it", "", fenced(repeat_block(report), "sh"), ""])


def _written(section: ReportSection, level: str) -> list[str]:
    lines = [f"{level} {plain(section.title)}", ""]
    if section.columns:
        lines += markdown_table(section)
    for sentence in section.sentences:
        lines += [plain(sentence), ""]
    quoting = any(len(item) > 1 for item in section.items)
    for head, *texts in section.items[: MAX_EXAMPLES if quoting else None]:
        quoted = "; ".join(f"“{text}”" for text in texts)
        lines.append(f"* {plain(f'{head}: {quoted}' if texts else head)}")
    lines += [f"* [{plain(link.text)}]({link.to('report.md')})" for link in section.links]
    lines += [""] * bool(section.items or section.links)
    for part in section.parts:
        lines += _written(part, f"{level}#")
    return lines


def markdown_table(table: ReportSection) -> list[str]:
    """Return the lines of a table and its note, with an empty line after each."""
    header, *rows = [
        "| " + " | ".join(map(plain, row)) + " |" for row in (table.columns, *table.rows)
    ]
    return [
        header,
        "|" + "---|" * len(table.columns),
        *rows,
        "",
        *([plain(table.note), ""] if table.note else []),
    ]


def html(report: Report, *, links: bool = True) -> str:
    """Return report.html, one file that loads nothing. All text from outside is escaped.

    Its only script sorts and filters tables. A browser runs no other one: the page's policy names
    the script's hash. Without `links` it has no links to other reports.
    """
    report = with_data_names(report)
    script = SCRIPT.read_text("utf-8")
    digest = b64encode(hashlib.sha256(script.encode()).digest()).decode()
    parts = shown(sections(report), View.HTML)
    return template("kdcli.report", "report.html.jinja").render(
        report=report,
        title=title(report),
        # The title of a pruning holds the method.
        method="" if report.pruning else report.recipe.get("method") or "",
        summary=summary(report),
        block=repeat_block(report),
        by_recipe=repeat_command(report.command, None),
        sections=[part for part in parts if links or not part.links],
        drawn=drawn,
        script=Markup(script),  # noqa: S704
        script_hash=f"sha256-{digest}",
        cut=shortened_line,
        recipe=yaml.safe_dump(report.recipe, sort_keys=False, allow_unicode=True),
        environment=yaml.safe_dump(
            {**report.environment, **report.versions}, sort_keys=False, allow_unicode=True
        ),
    )


def drawn(section: ReportSection) -> list[tuple[str, str, Markup]]:
    """Return the descriptions, captions and pictures of a section."""
    # The SVG is made by matplotlib, which escapes the names in it.
    return [(p.caption, p.shown or p.caption, Markup(p.svg)) for p in section.draw()]  # noqa: S704


def first_pictures(report: Report) -> list[Picture]:
    """Return the pictures of the first section of report.html that has any."""
    pending = list(sections(with_data_names(report)))
    while pending:
        section = pending.pop(0)
        if pictures := section.draw():
            return pictures
        pending = [*section.parts, *pending]
    return []


ENCODE = {"queries": "encode_query", "documents": "encode_document"}
"""What an adapted model encodes -> the method of sentence-transformers."""


def model_card(
    report: Report,
    name: str,
    auto_class: str = "AutoModel",
    *,
    pipeline: str | None = None,
    own_code: bool = False,
    generates: bool = False,
) -> str:
    """Return README.md of a model directory: the model, its results, and how to repeat them.

    `auto_class` loads the model with its head, `AutoModel` a model without a head, and EMBEDDER an
    embedding model. `pipeline` is the hub's name of the task; None takes the one of `auto_class`.
    With `own_code` the model's class is in a file next to its weights. A model that `generates` has
    the method `generate`.
    """
    report = with_data_names(report)
    entry, embeds = report.model(name), auto_class == EMBEDDER
    card, source = report.cards[name], entry.source or ""
    has_head = auto_class not in ("AutoModel", EMBEDDER)
    # A static model with a head gives logits where one without gives vectors.
    encodes = embeds or not card.layers
    task = report.recipe.get("task")
    evaluations = [e for e in report.evaluations if e.model == name]
    if pipeline is None:
        pipeline = "text-generation" if generates else PIPELINES.get(auto_class)
    library = "sentence-transformers" if encodes else "transformers"
    front = front_matter(
        f"{Path(source).name or card.model_type}-{name}".replace(" ", "-"),
        base=source,
        relation="finetune",
        library=library,
        tags=["kdcli", METHODS.get(report.command, report.command), card.model_type],
        pipeline=pipeline,
        task=task if isinstance(task, str) else None,
        data=report.source,
        scores=[Score(e.task, e.set, e.split, e.metrics) for e in evaluations],
    )
    classes = [e.confusion.labels if e.confusion else list(e.per_class) for e in evaluations]
    results = (scores(report, name) if has_head else []) or [models_section(report)]
    if report.selection:
        results.append(ReportSection("How it was chosen", sentences=[how_chosen(report.selection)]))
    return template("kdcli.report", "model_card.md.jinja").render(
        report=report,
        front=front,
        what=card_title(report, name),
        sentence=card_sentence(
            entry.made or f"made by kdcli {report.command}", card_facts(report, name), library
        ),
        parameters=count(card.params_total),
        embedding=count(card.params_embedding),
        trained=how_trained(report),
        auto_class=auto_class,
        own_code=own_code,
        has_head=has_head,
        generates=generates,
        prediction=[] if generates else _prediction(auto_class, evaluations),
        embeds=embeds,
        encodes=encodes,
        encode=ENCODE.get(str(report.recipe.get("encodes")), "encode"),
        classes=class_names(next(filter(None, classes), []), MAX_LABELS),
        ancestor=(
            "the model that it was made from"
            if entry.role in ("trimmed", "adapted")
            else "its teacher"
        ),
        origin=source and short(source),
        results=[line for section in results for line in _written(section, "###")],
        command=fenced(repeat_command(report.command, report.command_line, public=True), "sh"),
        plain=plain,
    )


def _prediction(auto_class: str, evaluations: Sequence[Evaluation]) -> list[str]:
    """Return code that prints an answer of a model with a head, from `model` and `tokenizer`."""
    if auto_class == "AutoModelForQuestionAnswering":
        return [
            'inputs = tokenizer("a question", "a text with the answer", return_tensors="pt")',
            "start, end = (scores.argmax() for scores in model(**inputs).to_tuple()[:2])",
            'print(tokenizer.decode(inputs["input_ids"][0, start : end + 1]))',
        ]
    if auto_class not in ("AutoModelForSequenceClassification", "AutoModelForTokenClassification"):
        return []
    texts = ['"a text"', '"another text"']
    count = max((len(wrong.texts) for each in evaluations for wrong in each.worst), default=1)
    answer = "logits"
    if auto_class == "AutoModelForTokenClassification":
        answer = "[model.config.id2label[n] for n in logits[0].argmax(-1).tolist()]"
    elif any(each.confusion for each in evaluations):
        answer = "model.config.id2label[logits.argmax().item()]"
    elif any(each.per_class for each in evaluations):
        answer = "[name for n, name in model.config.id2label.items() if logits[0, n] > 0]"
    return [
        f'logits = model(**tokenizer({", ".join(texts[:count])}, return_tensors="pt")).logits',
        f"print({answer})",
    ]


def sections(report: Report) -> list[ReportSection]:
    """Return all sections of a report."""
    if report.compression is not None:
        return _of_compression(report, report.compression)
    return [
        models_section(report),
        not_measured(report),
        *scores(report),
        comparisons(report),
        decision_section(report),
        *([selection_section(report.selection)] if report.selection else []),
        latency(report),
        agreements(report),
        published_speedups(report),
        ReportSection("Pictures", draw=partial(_pictures, report), least=View.HTML),
        *pruning_sections(report),
        training_section(report),
        details(report),
        published(report),
        accounts_section(report),
        ReportSection("Notes", items=[(note,) for note in report.notes]),
    ]


def _of_compression(report: Report, compression: Compression) -> list[ReportSection]:
    """Show the candidates and what the chosen one lost. Everything else is folded, at the end."""
    folded = [
        models_section(report),
        *scores(report),
        latency(report),
        agreements(report),
        details(report),
        published(report),
        accounts_section(report),
    ]
    least = View.MARKDOWN
    parts = [replace(part, open=False, least=max(part.least, least)) for part in folded]
    # Only the sentences about the classes are seen at first.
    classes = decision_section(report)
    classes = replace(classes, parts=[replace(part, open=False) for part in classes.parts])
    links = [
        Link(f"{step_title(one.name)} ({one.command})", one.folder) for one in compression.steps
    ]
    return [
        compression_section(compression, report.price_per_hour),
        not_measured(report),
        comparisons(report, lost=True),
        classes,
        ReportSection("Notes", items=[(note,) for note in report.notes]),
        ReportSection("Reports of the steps", links=links, least=least),
        ReportSection("All measurements", parts=parts, least=least),
    ]


def _pictures(report: Report) -> list[Picture]:
    # Importing matplotlib takes a third of a second, and only a finished run needs it.
    from kdcli.report.charts.charts import report_pictures

    return report_pictures(report)


def accounts_section(report: Report) -> ReportSection:
    """Return the table of the accounts of all sources; the terminal shows them in the log."""
    rows = [row for account in report.accounts for row in _rows(account)]
    data = filled("Data read", rows, NOTE, least=View.MARKDOWN)
    return replace(data, parts=[_classes(report)])


def _classes(report: Report) -> ReportSection:
    """Return the table of the classes of each task."""
    by_task = {
        set_name(one.task, one.set): one.classes
        for one in report.evaluations
        if one.classes is not None
    }
    rows = [
        {
            "task": task,
            "classes": numbered_classes(classes.names),
            "named by": NAMED_BY[classes.names_from],
            "labels read by": MAPPED_BY[classes.mapping],
        }
        for task, classes in by_task.items()
    ]
    return filled("Classes", rows, least=View.MARKDOWN)


def _rows(account: RowAccount) -> list[dict[str, str]]:
    """Return a row with the totals of an account, and one for each reason."""
    totals = {
        "data": account.source,
        "counted": account.rows,
        "read": f"{account.read:,}",
        "kept": f"{account.kept:,}",
    }
    reasons = [
        {"left out": f"{one.count:,}", "reason": one.reason, "first": one.first}
        for one in account.left_out
    ]
    first, *others = reasons or [{}]
    return [totals | first, *others]
