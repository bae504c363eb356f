"""Compare compressed embedding models with their teachers and with published scores.

    python benchmarks/board.py TEACHER [TEACHER ...] --data DIR --texts SOURCE [-o runs/board]
        [--make NAME ...] [--sets SET ...] [--published FILE]
        [--steps 400] [--rows 26000] [--length 32] [--seed 0]

TEACHER is a directory. Makes each teacher's variants with commands of kdcli, scores them on MTEB's
data sets in DIR, times them in interleaved rounds, and writes board.md and board.svg. The commands
that have succeeded are in board.jsonl with their time, and are skipped, so a run that was stopped
goes on, and other variants, sets and teachers can be added. The page has every command.

A directory below DIR is a set: pairs have the columns sentence1, sentence2 and score; texts with
classes have text and label; retrieval has corpus.jsonl, queries.jsonl and qrels.tsv. FILE has
published scores, one line a set, and a line with the size of each model. Without --sets, all sets
of FILE are scored that stand in DIR.
"""

import argparse
import csv
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

PUBLISHED = Path(__file__).with_name("published.csv")
SOURCE = "results of MTEB (embeddings-benchmark/results, f4cc6c8, November 2026)"
SIZE = "MB"
"""The line of the published scores that has the size of each model."""
CLASSES_WITH_16_ROWS = ("emotion",)
"""The sets for which MTEB takes another number of training rows of each class than 8."""
MAIN_METRICS = ("ndcg@10", "spearman", "accuracy")
Report = dict[str, Any]


@dataclass(frozen=True)
class Options:
    """The options of the command line.

    Attributes:
        teachers: Directories of embedding models.
        data: The directory of the data sets.
        texts: The texts that students learn from.
        make: The variants of each teacher.
        sets: The directories of the data sets, relative to `data`.
        published: The published scores.
        steps, rows, seed: Training steps, texts and seed of the students.
        length: Number of tokens of the text that is timed.
        output: The directory of the board.
    """

    teachers: Sequence[str]
    data: Path
    texts: str
    make: Sequence[str]
    sets: Sequence[str]
    published: Path
    steps: int
    rows: int
    seed: int
    length: int
    output: Path


def variant_commands(teacher: str, options: Options) -> dict[str, list[str]]:
    """Return the command that makes each variant. The output directory is added later."""
    config = json.loads((Path(teacher) / "config.json").read_text())
    half = f"{config['num_hidden_layers'] // 2}x{config['hidden_size']}"
    texts = ["--data", options.texts]
    training = [*texts, "--set", f"workload.rows={options.rows}", "--seed", str(options.seed)]
    steps = ["--max-steps", str(options.steps)]
    return {
        "int8": ["export", teacher, "--int8", *texts],
        "packed": ["export", teacher, "--int8", "--pack", *texts],
        "half": ["distill", teacher, "--to", half, *training, *steps],
        "family": ["distill", teacher, "--to", "family", *training, *steps],
        "static": ["distill", teacher, "--to", "static:256", *training],
        "trimmed": ["trim", teacher, *texts],
    }


class Board:
    """The commands that have succeeded, and their results."""

    def __init__(self, output: Path) -> None:
        self.file = output / "board.jsonl"
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        self.done: dict[str, Report] = {row["command"]: row for row in map(json.loads, lines)}

    def run(self, words: Sequence[str], folder: Path, **facts: object) -> Report | None:
        """Run a command of kdcli unless it has succeeded before.

        Args:
            words: The command without its output directory.
            folder: The output directory.
            facts: Further values of its line of board.jsonl.

        Returns:
            Its line of board.jsonl; None if it fails.
        """
        command = shlex.join(["kdcli", *words, "-o", str(folder)])
        if command in self.done:
            return self.done[command]
        print(command, flush=True)
        began = time.perf_counter()
        process = subprocess.run(
            [sys.executable, "-m", "kdcli", *words, "-o", str(folder), "--overwrite"],
            capture_output=True,
            text=True,
            check=False,
        )
        if process.returncode:
            print(f"exit {process.returncode}: {process.stderr[-1000:]}", flush=True)
            return None
        minutes = (time.perf_counter() - began) / 60
        row: Report = {"command": command, "minutes": minutes, "folder": str(folder), **facts}
        with self.file.open("a") as file:
            file.write(json.dumps(row) + "\n")
        self.done[command] = row
        return row


@dataclass(frozen=True)
class Line:
    """A model of the board.

    Attributes:
        teacher: The teacher's name.
        variant: The variant, and the shape of a family's member.
        folder: The model.
        command: The command that made it; empty for a teacher.
        minutes: The time of the command.
    """

    teacher: str
    variant: str
    folder: Path
    command: str = ""
    minutes: float | None = None


def make_lines(teacher: str, board: Board, options: Options) -> list[Line]:
    """Make the variants of a teacher. Variants that fail are left out."""
    name = Path(teacher).name
    lines = [Line(name, "teacher", Path(teacher))]
    commands = variant_commands(teacher, options)
    for variant in options.make:
        folder = options.output / name / variant
        row = board.run(commands[variant], folder)
        if row is None:
            continue
        members = sorted(path.parent for path in folder.glob("*x*/config.json"))
        for model in members or [folder]:
            shape = f", {model.name}" if members else ""
            lines.append(Line(name, variant + shape, model, row["command"], row["minutes"]))
    return lines


def score(lines: Sequence[Line], name: str, board: Board, options: Options) -> None:
    """Score each model that has no score on a set yet, in a command of its own.

    A board that is stopped loses one model's score, and not the whole set.
    """
    known, data, keys = scores_on(name, board), options.data / name, list[str]()
    if any(path.name.startswith("test.") for path in data.iterdir()):
        keys += ["--set", "data.split=test"]
    if name in CLASSES_WITH_16_ROWS:
        keys += ["--set", "samples_per_label=16"]
    for line in lines:
        model = str(line.folder)
        if model not in known:
            title = f"{line.teacher}-{line.variant}-{name}"
            folder = options.output / "scores" / title.replace(", ", "-").replace("/", "-")
            words = ["evaluate", model, "--data", str(data), *keys]
            board.run(words, folder, models=[model], set=name)


def scores_on(name: str, board: Board) -> dict[str, float]:
    """Return the main score of each model that was scored on a set, in points."""
    scores: dict[str, float] = {}
    for row in board.done.values():
        if row.get("set") == name:
            evaluations = report_in(row)["evaluations"]
            for folder, evaluation in zip(row["models"], evaluations, strict=True):
                metrics: Mapping[str, float] = evaluation["metrics"]
                main = next(metrics[name] for name in MAIN_METRICS if name in metrics)
                scores[folder] = 100 * main
    return scores


def report_in(row: Report) -> Report:
    report: Report = json.loads((Path(row["folder"]) / "report.json").read_text())
    return report


def megabytes(folder: Path) -> float:
    """Return the size of a model's weights. A file with several names counts once."""
    endings = (".safetensors", ".onnx", ".onnx_data")
    files = [p.stat() for p in folder.rglob("*") if p.suffix in endings]
    return sum({file.st_ino: file.st_size for file in files}.values()) / 1e6


def latencies(lines: Sequence[Line], board: Board, options: Options) -> list[str]:
    """Time a teacher and its variants in interleaved rounds. Returns a cell for each line."""
    words = ["benchmark", *(str(line.folder) for line in lines), "--batch-size", "1"]
    words += ["--seq-len", str(options.length)]
    name = "-".join(["latency", *(line.folder.name for line in lines[1:])])
    row = board.run(words, options.output / lines[0].teacher / name)
    if row is None:
        return [""] * len(lines)
    cells = []
    for timed in report_in(row)["latency"]:
        speedup = timed["speedup"]
        cell = "1" if speedup is None else "{median:.1f} ({low:.1f}-{high:.1f})".format(**speedup)
        cells.append(cell + (" unstable" if timed["status"] == "unstable" else ""))
    return cells


@dataclass(frozen=True)
class Published:
    """Published scores of a model.

    Attributes:
        model: Its name.
        size: Megabytes of its weights, as text.
        scores: The score on each set in points, as text. Empty where none is known.
    """

    model: str
    size: str
    scores: Mapping[str, str]


def published_scores(file: Path) -> list[Published]:
    """Read the published scores: a column for each model, a line for each set and for the size."""
    with file.open(newline="") as lines:
        rows = {row.pop("set"): row for row in csv.DictReader(lines)}
    sizes = rows.pop(SIZE)
    return [
        Published(model, size, {name: row[model] for name, row in rows.items()})
        for model, size in sizes.items()
    ]


def page_of(
    table: Sequence[Sequence[str]],
    published: Sequence[Published],
    sets: Sequence[str],
    commands: Sequence[str],
) -> str:
    """Return the page: the table, the published scores, and the commands."""
    head = ["model", "variant", *sets, "MB", "times as fast, quartiles", "minutes", "command"]
    rows = [
        [row.model, "published", *(row.scores.get(name, "") for name in sets), row.size, "", "", ""]
        for row in published
        if any(row.scores.get(name) for name in sets)
    ]
    lines = [head, ["---"] * len(head), *table, *rows]
    text = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    numbered = "".join(f"{n}. `{command}`\n" for n, command in enumerate(commands, 1))
    return f"{text}\nPublished: {SOURCE}.\n\nCommands:\n\n{numbered}"


@dataclass(frozen=True)
class Point:
    """A model of the picture.

    Attributes:
        name: Its name and variant.
        size: Megabytes of its weights.
        score: Its mean score on the sets, in points.
        marker: Matplotlib's sign: another one for published scores.
    """

    name: str
    size: float
    score: float
    marker: str = "o"


def published_points(published: Sequence[Published], sets: Sequence[str]) -> Iterator[Point]:
    """Yield a point for each model that has a published score on all sets."""
    for row in published:
        scores = [row.scores.get(name, "") for name in sets]
        if all(scores):
            mean = sum(map(float, scores)) / len(scores)
            yield Point(f"{row.model} published", float(row.size), mean, marker="x")


def draw(points: Sequence[Point], file: Path) -> None:
    """Draw the mean score of each model over its size."""
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for point in points:
        place = (point.size, point.score)
        axes.plot(*place, point.marker, color="C0" if point.marker == "o" else "C1")
        axes.annotate(point.name, place, (4, 4), textcoords="offset points", fontsize=8)
    axes.set_xscale("log")
    axes.set_xlabel("size of the weights (MB)")
    axes.set_ylabel("mean score on the sets (points)")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, metadata={"Date": None})


def main() -> None:
    options = parsed_options()
    options.output.mkdir(parents=True, exist_ok=True)
    board = Board(options.output)
    table: list[list[str]] = []
    points: list[Point] = []
    for teacher in options.teachers:
        lines = make_lines(teacher, board, options)
        speed = latencies(lines, board, options)
        for name in options.sets:
            score(lines, name, board, options)
        by_set = {name: scores_on(name, board) for name in options.sets}
        for line, times in zip(lines, speed, strict=True):
            scores = [by_set[name].get(str(line.folder)) for name in options.sets]
            size = megabytes(line.folder)
            place = str(list(board.done).index(line.command) + 1) if line.command else ""
            minutes = "" if line.minutes is None else f"{line.minutes:.1f}"
            # The members of a family share one training.
            minutes += " in all" if ", " in line.variant else ""
            cells = ["" if value is None else f"{value:.2f}" for value in scores]
            table.append([line.teacher, line.variant, *cells, f"{size:.1f}", times, minutes, place])
            present = [value for value in scores if value is not None]
            if len(present) == len(scores):
                mean = sum(present) / len(present)
                points.append(Point(f"{line.teacher} {line.variant}", size, mean))
    published = published_scores(options.published)
    page = page_of(table, published, options.sets, list(board.done))
    (options.output / "board.md").write_text(page)
    points += published_points(published, options.sets)
    draw(points, options.output / "board.svg")
    print(f"{options.output}/board.md and board.svg")


def parsed_options() -> Options:
    variants = ["int8", "packed", "half", "family", "static", "trimmed"]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("teachers", nargs="+", metavar="TEACHER")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--texts", required=True)
    parser.add_argument("--make", nargs="*", choices=variants, default=variants)
    parser.add_argument("--sets", nargs="+")
    parser.add_argument("--published", type=Path, default=PUBLISHED)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rows", type=int, default=26000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("-o", dest="output", type=Path, default=Path("runs/board"))
    given = parser.parse_args()
    scores = published_scores(given.published)
    given.sets = given.sets or [name for name in scores[0].scores if (given.data / name).is_dir()]
    missing = [name for name in given.sets if not (given.data / name).is_dir()]
    if missing:
        parser.error(f"no directory {', '.join(missing)} in {given.data}")
    return Options(**vars(given))


if __name__ == "__main__":
    main()
