"""The views of a report: terminal, Markdown, one HTML file, and the card of a model. All show the same sections."""

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined, Template, select_autoescape
from markupsafe import Markup
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markup import escape
from rich.table import Table as RichTable

from kdcli.disk import write_atomic
from kdcli.report.front import EMBEDDER, PIPELINES, RERANKED, front_matter
from kdcli.report.schema import FINETUNED, TEACHER, UNDISTILLED, Report
from kdcli.report.sections.contents import sections
from kdcli.report.sections.evaluations import MOST_LABELS, scores
from kdcli.report.sections.latency import latency_csv
from kdcli.report.sections.overview import about, facts, how_made, models_section, origin, title
from kdcli.report.sections.selection import how_chosen
from kdcli.report.text import Section, Table, View, count, cut, plain, short

__all__ = [
    "FINETUNED",
    "TEACHER",
    "UNDISTILLED",
    "html",
    "markdown",
    "model_card",
    "short",
    "terminal",
    "write_views",
]

SHORT, LONG = (
    8,
    24,
)  # Characters of words and of numbers up to which a column is not folded on a terminal
FEW_EXAMPLES = 5  # Items with quotations that Markdown shows of a section


def write_views(folder: Path, report: Report) -> None:
    """Write latency.csv, report.md, report.html and, last, report.json, which says that the run is done. Raises
    MachineError: the disk is full or not writable."""
    for name, text in (
        ("latency.csv", latency_csv),
        ("report.md", markdown),
        ("report.html", html),
    ):
        write_atomic(folder / name, text(report))
    write_atomic(folder / "report.json", report.to_json())


def shown(everything: Iterable[Section], view: View) -> list[Section]:
    """The sections that a view shows; Markdown counts the parts that only HTML shows."""
    kept = []
    for section in everything:
        parts = shown(section.parts, view)
        hidden = len(section.parts) - len(parts) if view is View.MARKDOWN else 0
        sentences = [*section.sentences, *([f"{hidden} more in report.html."] if hidden else [])]
        content = section.table or sentences or section.items or parts or view is View.HTML
        if section.least <= view and content:
            kept.append(replace(section, parts=parts, sentences=sentences))
    return kept


def terminal(report: Report) -> Iterable["FittedTable | str"]:
    """The report for a terminal."""
    # A title of the table itself would be folded to the table's width.
    yield f"[bold]kdcli {escape(report.command)}: {escape(title(report))}[/bold]"
    models, *others = shown(sections(report), View.TERMINAL)
    for section in (replace(models, title=""), *others):
        yield from _printed(section)


def _printed(section: Section) -> Iterable["FittedTable | str"]:
    if section.title:
        yield f"[bold]{escape(section.title)}[/bold]"
    if section.table:
        yield FittedTable(section.table)
        yield from filter(None, [escape(section.table.note)])
    yield from map(escape, section.sentences)
    yield from (escape(item[0]) for item in section.items)
    for part in section.parts:
        yield from _printed(part)


@dataclass(frozen=True)
class FittedTable:
    """A table as wide as the terminal."""

    table: Table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Turn what is far too wide on its side, if it has few rows; fold names, then headings; what is still too wide
        becomes several tables."""
        table, width = self.table, options.max_width
        lines, marked = [line[: table.narrow] for line in (table.header, *table.rows)], table.marked
        if len(lines) <= len(lines[0]) and sum(len(name) + 3 for name in lines[0]) >= width:
            lines, marked = [list(column) for column in zip(*lines, strict=True)], None
            lines[0][0] = ""
        columns = list(zip(*lines, strict=True))
        if sum(max(map(len, column)) + 3 for column in columns) >= width:
            lines = [[name.replace(" ", "\n") for name in lines[0]], *lines[1:]]
            lines[1:] = [
                [name, *(cell.replace(" (", "\n(") for cell in cells)] for name, *cells in lines[1:]
            ]
            columns = list(zip(*lines, strict=True))
        whole = [_is_whole(*column) for column in columns]
        # What may be folded needs room for its words.
        apart = ["\n" if one else None for one in whole]
        words = [
            [w for text in c for w in text.split(at)] for c, at in zip(columns, apart, strict=True)
        ]
        least = [min(LONG, max(map(len, own), default=0)) for own in words]
        if sum(least) + 3 * len(least) >= width:
            # Names may be cut where one table is then enough.
            cut = [
                n if _is_numeric(c[1:]) else min(n, SHORT)
                for n, c in zip(least, columns, strict=True)
            ]
            least = cut if sum(cut) + 3 * len(cut) < width else least
        most = [
            max(len(part) for text in column for part in text.split("\n")) for column in columns
        ]
        pieces: list[list[int]] = [[0]]
        for i in range(1, len(columns)):
            if len(pieces[-1]) > 1 and sum(least[k] + 3 for k in (*pieces[-1], i)) >= width:
                pieces.append([0])
            pieces[-1].append(i)
        for piece in pieces:
            made, room = (
                RichTable(header_style="bold"),
                width - 1 - sum(least[k] + 3 for k in piece),
            )
            for k in piece:
                more = max(0, min(room, most[k] - least[k]))
                room -= more
                justify: Literal["left", "right"] = "right" if k else "left"
                made.add_column(
                    escape(lines[0][k]), justify=justify, overflow="fold", width=least[k] + more
                )
            for i, row in enumerate(lines[1:]):
                if len(pieces) == 1 or any(row[k] for k in piece[1:]):
                    made.add_row(
                        *(escape(row[k]) for k in piece), style="bold" if i == marked else None
                    )
            yield made


def _is_whole(heading: str, *cells: str) -> bool:
    """Whether a column holds short words or numbers, which fold last."""
    longest, words = max(map(len, cells), default=0), max(map(len, heading.split()), default=0)
    return words <= max(SHORT, longest) and longest <= (LONG if _is_numeric(cells) else SHORT)


def _is_numeric(cells: Iterable[str]) -> bool:
    return all(cell[:1] in "+-0123456789" for cell in cells)


def markdown(report: Report) -> str:
    """report.md: the report as a document that needs no browser."""
    lines = [f"# {plain(title(report))}", "", f"kdcli {report.command}, {report.created}.", ""]
    for section in shown(sections(report), View.MARKDOWN):
        lines += _written(section, "##")
    versions = ", ".join(f"{k} {v}" for k, v in report.versions.items())
    return "\n".join(
        [*lines, plain(f"Measured on {report.environment.get('cpu')}; {versions}."), ""]
    )


def _written(section: Section, level: str) -> list[str]:
    lines = [f"{level} {plain(section.title)}", ""]
    if section.table:
        lines += markdown_table(section.table)
    for sentence in section.sentences:
        lines += [plain(sentence), ""]
    quoting = any(len(item) > 1 for item in section.items)
    for head, *texts in section.items[: FEW_EXAMPLES if quoting else None]:
        quoted = "; ".join(f"“{text}”" for text in texts)
        lines.append(f"* {plain(f'{head}: {quoted}' if texts else head)}")
    lines += [""] * bool(section.items)
    for part in section.parts:
        lines += _written(part, f"{level}#")
    return lines


def markdown_table(table: Table) -> list[str]:
    """Lines of a table and its note, each followed by an empty one."""
    header, *rows = [
        "| " + " | ".join(map(plain, row)) + " |" for row in (table.header, *table.rows)
    ]
    return [
        header,
        "|" + "---|" * len(table.header),
        *rows,
        "",
        *([plain(table.note), ""] if table.note else []),
    ]


def html(report: Report) -> str:
    """report.html: one file, nothing loaded from elsewhere, everything from outside escaped."""
    return _template("report.html.jinja").render(
        report=report,
        title=title(report),
        # A pruning is named by its title, which holds the method.
        method="" if report.pruning else report.recipe.get("method") or "",
        about=about(report),
        facts=facts(report),
        sections=shown(sections(report), View.HTML),
        drawn=drawn,
        cut=cut,
        recipe=yaml.safe_dump(report.recipe, sort_keys=False, allow_unicode=True),
        environment=yaml.safe_dump(
            {**report.environment, **report.versions}, sort_keys=False, allow_unicode=True
        ),
    )


@functools.cache
def _template(name: str) -> Template:
    # Markdown is escaped by `plain`.
    return Environment(
        loader=PackageLoader("kdcli.report", "."),
        autoescape=select_autoescape(["html.jinja"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    ).get_template(name)


def drawn(section: Section) -> list[tuple[str, Markup]]:
    """Captions and pictures of a section."""
    # The SVG is made by matplotlib, which escapes the names in it.
    return [(p.caption, Markup(p.svg)) for p in section.draw()]  # noqa: S704


def model_card(
    report: Report,
    name: str,
    auto_class: str = "AutoModel",
    *,
    own_code: bool = False,
    generates: bool = False,
) -> str:
    """README.md of a model directory: what it is, how it was made, results, how to repeat it. `auto_class` loads the
    model with its head, `AutoModel` one without, `EMBEDDER` one that embeds; with `own_code` its class is in a file
    beside its weights; one that `generates` has the method."""
    card, source, embeds = report.models[name], origin(report), auto_class == EMBEDDER
    has_head, tags = (
        auto_class not in ("AutoModel", EMBEDDER),
        ["kdcli", report.command, card.model_type],
    )
    task, judged = report.recipe.get("task"), [e for e in report.evaluations if e.model == name]
    front = front_matter(
        f"{Path(source).name or card.model_type}-{name}".replace(" ", "-"),
        base=source,
        relation="finetune",
        library="sentence-transformers" if embeds else "transformers",
        tags=tags,
        pipeline="text-ranking"
        if task == RERANKED
        else "text-generation"
        if generates
        else PIPELINES.get(auto_class),
        task=task if isinstance(task, str) else None,
        data=(report.recipe.get("data") or {}).get("source"),
        scores=[e.model_dump() for e in judged],
    )
    classes = [e.confusion.labels if e.confusion else list(e.per_class) for e in judged]
    results = (scores(report, name) if has_head else []) or [models_section(report)]
    if report.selection:
        results.append(Section("How it was chosen", sentences=[how_chosen(report.selection)]))
    return _template("model_card.md.jinja").render(
        report=report,
        front=front,
        what=title(report) if has_head else f"{card.layers}x{card.hidden} {card.model_type}",
        parameters=count(card.params_total),
        embedding=count(card.params_embedding),
        made=how_made(report),
        auto_class=auto_class,
        own_code=own_code,
        has_head=has_head,
        generates=generates,
        embeds=embeds,
        labels=next(filter(None, classes), []),
        most=MOST_LABELS,
        origin=source and short(source),
        results=[line for section in results for line in _written(section, "###")],
        plain=plain,
    )
