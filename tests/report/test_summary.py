"""The head of a report: its title, its first sentence, its price, and how to repeat the run."""

import hashlib
import re
from pathlib import Path

import pytest
from reports import (
    HOSTILE,
    Page,
    benchmark_values,
    compress_values,
    evaluate_values,
    latency_row,
    made,
    missing,
    printed,
    ratio,
    report_values,
    words,
)

from kdcli.data import sources, storage
from kdcli.deploy.measurements import LatencyRow
from kdcli.disk import HASHES
from kdcli.listing import joined
from kdcli.report import finish
from kdcli.report.finish import RunResult, frame
from kdcli.report.schema import Compression, GoalLimit, Report
from kdcli.report.sections.overview import title
from kdcli.report.sections.repeat import repeat_block, repeat_command
from kdcli.report.sections.summary import summary
from kdcli.report.text import directory_word, loses, lost_points, points_interval, with_data_names
from kdcli.report.views import html, markdown
from kdcli.verbs.compress.limits import GoalSettings
from kdcli.verbs.compress.question import repeats
from kdcli.verbs.compress.settings import CompressRecipe

pytestmark = pytest.mark.slow

NAME = "google-bert/bert-base-uncased"


def test_the_title_of_a_compression_names_the_model_that_the_teacher_was_made_from(compressed):
    recipe = {"model": "org/plain", "task": "own"}
    own = compressed.model_copy(update={"recipe": recipe})
    assert title(own) == "org/plain compressed to 3x384-onnx-int8"


def sentences(report):
    (paragraph,) = summary(report)
    return paragraph


def test_a_distilled_model_is_compared_with_its_teacher():
    comparison = {"model": "3x384", "baseline": "teacher", "task": "sst2", "set": ""}
    comparison |= {"metric": "accuracy", "difference": -0.03, "low": -0.04, "high": -0.01}
    scored = {"model": "3x384", "task": "sst2", "set": "", "split": "validation", "n": 872}
    scored |= {"metrics": {"accuracy": 0.9}}
    report = made(report_values(), comparisons=[comparison], evaluations=[scored])
    assert sentences(report) == (
        f"3x384 is at least 9.0 times as fast as {NAME} (unstable measurement; at most 7.80 ms for "
        "1 × 128 tokens) and takes 69.6 MB instead of 438.0 MB. It loses 3.00 points of "
        f"accuracy against {NAME} (95 % interval 1.00 to 4.00) on 872 rows of sst2 (validation)."
    )


def test_a_training_that_raises_the_loss_is_no_success():
    values = report_values()
    losses = values["quality"]["held-out loss"]
    assert "raised" not in sentences(made(values))
    losses["3x384"], losses["3x384 undistilled"] = {"loss": 0.03010001}, {"loss": 0.0301}
    assert "raised" not in sentences(made(values)), "that is rounding"
    losses["3x384"] = {"loss": 0.0565}
    assert sentences(made(values)).endswith(
        "Training raised the held-out loss of 3x384 from 0.03010 to 0.05650: train longer, or with "
        "a lower learning rate."
    )
    teacher, student = (values["models"][name]["card"] for name in ("teacher", "3x384"))
    student["params_total"] = teacher["params_total"]
    assert "raised" in sentences(made(values))
    values["recipe"] |= {"student": {"to": ["12x768,3x384"]}}
    assert "raised" not in sentences(made(values)), "it started as the teacher"


def test_a_gain_is_not_a_negative_loss():
    values = evaluate_values()
    for each in values["comparisons"]:
        each |= {"difference": 0.02, "low": 0.01, "high": 0.03}
    assert "It gains 2.00 points" in sentences(made(values))
    assert "interval 1.00 to 3.00" in sentences(made(values))


def test_of_several_candidates_the_best_comes_first():
    values = evaluate_values()
    first, second = values["models"]
    scores = {first: 0.93, second: 0.91, "worse": 0.5}
    values["models"] |= {"worse": values["models"][second]}
    values["quality"] = {"sst2": {name: {"accuracy": score} for name, score in scores.items()}}
    assert sentences(made(values)).startswith(
        f"{second} is the best of 2 candidates. It takes 90.9 MB"
    )
    values["quality"] = {"sst2": {name: {"mse": score} for name, score in scores.items()}}
    assert sentences(made(values)).startswith("worse takes")


def test_a_title_names_five_models_and_counts_the_others():
    values = evaluate_values()
    second = values["models"].pop("all-MiniLM-L6-v2")
    values["models"] |= {f"m{number}": second for number in range(6)}
    lists = {"evaluations": [], "comparisons": [], "quality": {}}
    report = made(values, **lists)
    assert title(report) == "bert-base-uncased, m0, m1, m2, m3 and 2 more on sst2"


def test_agreement_is_with_the_model_that_was_compressed():
    values = evaluate_values()
    for each in values["evaluations"]:
        each |= {"reference": "teacher"}
    assert " points of agreement with bert-base-uncased (accuracy) (95 %" in sentences(made(values))


@pytest.mark.parametrize(
    ("goal", "strict", "shown"),
    [
        (
            {"max_drop": 1.0, "speedup": 4.0},
            True,
            "Goal: at most 1 point lost, even at the pessimistic end of the interval, at least 4 "
            "times as fast.",
        ),
        (
            {"max_drop": 0.5, "max_class_drop": 2.0},
            False,
            "Goal: at most 0.5 points lost, at most 2 points lost by a class.",
        ),
    ],
)
def test_the_goal_of_a_compression_is_above_its_candidates(goal, strict, shown):
    values = compress_values()
    limits = [{"phrase": limit.phrase()} for limit in GoalSettings(**goal, strict=strict).limits]
    values["compression"] |= {"goal": goal, "strict": strict, "limits": limits}
    assert shown in markdown(made(values))


def test_a_backend_that_quantises_has_no_size_on_disk(benchmark):
    assert "MB" not in sentences(benchmark)
    assert " MB" in sentences(priced())


def test_without_a_price_a_compression_has_no_costs(compressed):
    free = compressed.model_copy(update={"price_per_hour": None})
    assert "cost/M" not in words(free)


def test_an_unstable_cost_is_a_bound_and_says_so():
    values = compress_values()
    chosen = values["compression"]["candidates"][2]
    chosen["throughput"] = chosen["throughput"] | {"unstable": True}
    report = made(values)
    assert "≤0.60, unstable" in markdown(report)
    assert "≥167, unstable" in markdown(report)
    assert "“unstable” marks" in markdown(report)


def priced(status="ok", price=0.36):
    """A benchmark with a price, as `write_report` fills it in."""
    rows = [
        latency_row("12x768", 8, 480.0),
        latency_row(
            "6x384", 8, 48.0, status, ratio("12x768", 10.0, 9.0, 11.0, unstable=status != "ok")
        ),
    ]
    values = benchmark_values()
    models = {name: values["models"][name] for name in ("12x768", "6x384")}
    rows = [LatencyRow.model_validate(row).priced(price) for row in rows]
    lists = {"failures": [], "agreements": [], "published": [], "quality": {}}
    return made(values, models=models, latency=rows, price_per_hour=price, **lists)


@pytest.mark.parametrize(
    ("status", "sentence", "cell"),
    [
        ("ok", "a million texts cost 0.60 instead of 6.00, in batches of 8 × 128 tokens.", "0.60"),
        (
            "unstable",
            "a million texts cost at most 0.78 (unstable measurement) instead of 6.00, in batches "
            "of 8 × 128 tokens.",
            "≤0.78, unstable",
        ),
    ],
)
def test_a_benchmark_has_the_cost_of_every_row(status, sentence, cell):
    report = priced(status)
    assert sentences(report).endswith(f"At 0.36 an hour, {sentence}")
    assert f"| {cell} |" in markdown(report)
    row = report.latency[1]
    assert row.cost_per_million == pytest.approx(0.6 if status == "ok" else 0.78)
    assert row.texts_per_second == pytest.approx(8000 / row.stated_ms)


def test_without_a_price_there_is_throughput_but_no_cost():
    row = LatencyRow.model_validate(latency_row("a", 8, 48.0)).priced(None)
    assert (row.texts_per_second, row.cost_per_million) == (pytest.approx(166.7, abs=0.1), None)
    assert "cost" not in words(priced(price=None))


def test_the_block_repeats_the_run(compressed):
    block = repeat_block(compressed)
    assert all(line.startswith("# ") for line in block.splitlines()[1:]), "a shell can run it"
    assert block in Page(html(compressed)).text, "one element, so that one selection copies it"
    from_python = compressed.model_copy(update={"command_line": None})
    assert repeat_block(from_python).startswith("kdcli compress --recipe recipe.yaml -o")


def test_the_hash_of_a_file_is_of_what_the_run_opened(tmp_path, monkeypatch):
    monkeypatch.setattr(finish, "COMMITS", {"owner/text": "abc"})
    file, text = tmp_path / "rows.csv", tmp_path / "text.txt"
    file.write_text("text\nw1\n")
    expected = hashlib.sha256(file.read_bytes()).hexdigest()
    recipe = {"data": {"source": str(file)}, "text": str(text)}
    sources.open_source(str(file))
    file.write_text("text\nanother\n")
    sources.open_source(str(file))
    file.unlink()
    text.mkdir()
    assert finish._data_versions(recipe) == {
        "rows.csv": f"sha256 {expected}",
        "owner/text": "commit abc",
    }


def test_the_hash_of_a_directory_is_of_the_files_that_are_read(tmp_path):
    for name in ("validation.csv", "train.csv", "notes.md"):
        (tmp_path / name).write_text(f"text\n{name}\n")
    # What `sha256sum train.csv validation.csv | sha256sum` prints.
    hashed = [(tmp_path / name).read_bytes() for name in ("train.csv", "validation.csv")]
    lines = [
        f"{hashlib.sha256(content).hexdigest()}  {name}\n"
        for content, name in zip(hashed, ("train.csv", "validation.csv"), strict=True)
    ]
    expected = hashlib.sha256("".join(lines).encode()).hexdigest()
    sources.open_source(str(tmp_path))
    assert HASHES.pop(str(tmp_path)) == expected
    for number in range(storage.MAX_HASHED_FILES):
        (tmp_path / f"train-{number}.csv").write_text("text\nw1\n")
    sources.open_source(str(tmp_path))
    assert str(tmp_path) not in HASHES


def test_a_public_command_may_have_long_words():
    command = f"kdcli finetune bert --set base={'x' * 400}"
    assert repeat_command("finetune", command, public=True) == command


def test_a_gain_or_loss_of_nothing_has_no_sign():
    assert loses(0.004, "accuracy") == loses(-0.004, "accuracy") == "loses no accuracy"
    assert loses(0.5, "f1") == "loses 0.50 points of f1"
    assert points_interval(-0.001, 0.25, 0.95) == "95 % interval 0.00 to 0.25"
    assert lost_points(-0.005, -0.02, 0.00001) == ("+0.50", "+0.00 to +2.00")
    assert lost_points(-0.005, -0.02, 0.01, "-") == ("0.50", "-1.00 to 2.00")


def test_a_summary_without_facts_is_empty():
    assert joined([]) == ""
    assert joined(["a", "b", "c"]) == "a, b and c"


def test_names_neither_leave_the_comment_nor_end_the_block():
    report = made(compress_values(), data_versions={"a\nrm -rf /": "x", "```": "y"})
    assert not [line for line in repeat_block(report).splitlines()[1:] if line[0] != "#"]
    assert "\n````sh\nkdcli" in markdown(report)


@pytest.mark.parametrize(
    ("goal", "price", "same"),
    [(2.0, 0.36, True), (2.0, 0.5, False), (2.0, None, False), (1.0, 0.36, False)],
)
def test_another_price_asks_again(compressed, tmp_path, goal, price, same):
    recipe = CompressRecipe(goal=GoalSettings(max_drop=goal), price_per_hour=price)
    assert repeats(RunResult(compressed, tmp_path), recipe) == same


def test_links_lead_to_the_reports_of_the_steps(compressed):
    links = [value for name, value in Page(html(compressed)).attributes if name == "href"]
    assert links == ["steps/teacher/report.html", "steps/a%20name/report.html"]
    assert "* [a name (finetune)](steps/a%20name/report.md)" in markdown(compressed)
    notebook = RunResult(compressed, Path())._repr_html_()
    assert "steps/" not in notebook, "a notebook is elsewhere"


def test_hostile_names_of_a_compression_stay_text():
    values = compress_values()
    values["compression"]["steps"] = [{"name": HOSTILE, "command": "x", "folder": HOSTILE}]
    values["compression"]["sentence"] = values["command_line"] = HOSTILE
    report = made(values, data_versions={HOSTILE: HOSTILE})
    page = Page(html(report))
    assert (page.tags.count("script"), page.tags.count("img")) == (1, 0)
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert "<script" not in re.sub(r"^```.*?^```$", "", markdown(report), flags=re.S | re.M)
    assert frame(report) is not None


def test_an_empty_cell_is_empty_so_that_a_telephone_hides_it(compressed):
    assert re.search(r'<td data-name="points lost \(\+\), selection"></td>', html(compressed))


def test_what_a_decision_does_not_need_is_folded(compressed):
    page = html(compressed)
    folded = page[page.index("All measurements") :]
    assert not missing(folded, ">Models<", ">Latency<")
    closed = re.findall(r'<details class="part"><summary[^>]*>([^<]*)<', folded)
    assert closed == ["Models", "Latency"]
    assert "Latency" not in printed(compressed)


@pytest.mark.parametrize(
    ("recipe", "name"),
    [
        ({"task": "own", "data": {"source": "/home/me/tickets.csv"}}, "tickets.csv"),
        ({"task": "own", "data": {"source": None}}, "your data"),
        # Python wrote an object to this file.
        (
            {"task": "own", "data": {"source": "cache/objects/0123456789abcdef.parquet"}},
            "your data",
        ),
        # The directory is not the benchmark, which may be scored too.
        ({"task": "own", "data": {"source": "./sst2"}}, "sst2 (your data)"),
        # The data of a distillation on text is the text.
        ({"data": {"source": "corpus.txt"}, "eval": {"tasks": ["own"]}}, "your data"),
    ],
)
def test_your_own_data_has_its_name_in_every_view(recipe, name, report, monkeypatch):
    monkeypatch.setenv("KDCLI_CACHE", "cache")
    own = report.model_copy(update={"recipe": recipe})
    scored = own.model_copy(update={"quality": {"own": {}, "own b": {}, "sst2": {}}})
    assert list(with_data_names(scored).quality) == [name, f"{name} b", "sst2"]


@pytest.mark.parametrize(
    ("source", "word"),
    [
        ("demo", "demo"),
        ("data/tickets.csv", "tickets"),
        ("data/tickets.2026.jsonl.gz", "tickets.2026"),
        ("data/v1.5", "v1.5"),
        ("org/reviews@main", "reviews"),
        ("https://example.org/rows.parquet?download=1", "rows"),
        # Wildcards and blanks are not for the name of a directory.
        ("data/*.csv", "own"),
        ("data/2026-*.csv.gz", "2026"),
        ("data/my tickets [new].csv", "my-tickets-new"),
        (None, "own"),
        # Python wrote an object to this file.
        ("cache/objects/0123456789abcdef.parquet", "own"),
    ],
)
def test_a_directory_has_the_name_of_your_own_data(source, word, monkeypatch):
    monkeypatch.setenv("KDCLI_CACHE", "cache")
    assert directory_word("own", source) == word
    assert directory_word("sst2", source) == "sst2"


@pytest.mark.parametrize(
    ("missed", "said"),
    [
        ("", ["Goal met: at most 1 point lost. It is small."]),
        ("it lost 2 points", ["Goal missed: it lost 2 points.", "It is small.", "Ask for less."]),
    ],
)
def test_whether_the_goal_is_met_comes_first_and_what_to_do_last(missed, said):
    compression = Compression.model_construct(
        limits=[GoalLimit(phrase="at most 1 point lost")],
        met=not missed,
        missed=missed,
        sentence="It is small.",
        advice="Ask for less." if missed else "",
    )
    assert summary(Report.model_construct(compression=compression)) == said
