"""Reports to show: a plain one, and one in which everything that comes from outside is hostile."""

from __future__ import annotations

import io
import re
from html.parser import HTMLParser

from rich.console import Console

from kdcli.report.published import published_for
from kdcli.report.schema import Report
from kdcli.report.views import html, terminal

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>$\\frac$ `|` [bold]"


class Page(HTMLParser):
    """Tags, attributes and text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data):
        self.text.append(data)


def words(report: Report) -> str:
    """The text of report.html, style sheet and pictures aside."""
    text = re.sub(r"<(style|svg)\b.*?</\1>", "", html(report), flags=re.S)
    return " ".join(" ".join(Page(text).text).split())


def printed(report: Report, width: int = 200) -> str:
    """The terminal view."""
    console = Console(width=width, file=io.StringIO(), record=True)
    for part in terminal(report):
        console.print(part)
    return console.export_text()


def card(**changes: object) -> dict[str, object]:
    shape = {"model_type": "bert", "layers": 12, "hidden": 768, "ffn": 3072, "heads": 12, "sha256": "0" * 64}
    params = {"params_total": 109_482_240, "params_embedding": 23_837_184, "params_transformer": 85_645_056}
    costs = {"params_nonzero": 109_482_240, "multiply_adds": 11_173_625_856, "bytes": 437_951_328}
    return {"id": "google-bert/bert-base-uncased"} | shape | params | costs | changes


def latency_row(model: str, batch_size: int, p50: float, status: str = "ok") -> dict[str, object]:
    return {
        **{"model": model, "backend": "torch", "device": "cpu", "dtype": "float32", "padding": "full", "n": 60},
        **{"batch_size": batch_size, "seq_len": 128, "p50_ms": p50, "p90_ms": p50 * 1.1, "p95_ms": p50 * 1.2},
        **{"mean_ms": p50 * 1.02, "iqr_over_p50": {"ok": 0.05, "noisy": 0.2, "unstable": 0.5}[status]},
        "status": status,
    }


def report_values() -> dict[str, object]:
    """A run of two students, as `Report.model_validate` takes it."""
    half = {"layers": 6, "hidden": 384, "ffn": 1536, "params_total": 22_713_216, "params_embedding": 11_918_592}
    half |= {"params_transformer": 10_794_624, "multiply_adds": 1_396_703_232, "bytes": 90_900_000}
    small = half | {"layers": 3, "params_total": 17_389_824, "params_transformer": 5_471_232}
    small |= {"multiply_adds": 698_351_616, "bytes": 69_600_000}
    students = ("6x384", "3x384")
    held = {
        step: {
            f"{s}/{t}": 0.5 / (i + 1) / (1 + step / 50) for i, s in enumerate(students) for t in ("attention", "value")
        }
        for step in (0, 100, 200)
    }
    return {
        "schema": 1,
        "command": "distill",
        "status": "done",
        "created": "2026-11-21T06:40:04+00:00",
        "versions": {"kdcli": "0.1.0", "torch": "2.13.0"},
        "environment": {"cpu": "A Processor", "physical_cores": 2, "gpus": []},
        "recipe": {"method": "minilm", "data": {"source": "corpus.txt"}},
        "models": {"teacher": card(), "6x384": card(id="out/6x384", **half), "3x384": card(id="out/3x384", **small)},
        "training": {
            **{"steps": 200, "tokens": 819_200, "seconds": 400.0, "tokens_per_second": 2048.0},
            **{"loss_first": 1.5, "loss_last": 0.3, "peak_memory_bytes": 2_000_000_000, "resumed_from_step": 100},
        },
        "curve": [
            {"step": step, "loss": 1.5 / (1 + step / 50) if step else None, "held_out": held.get(step)}
            for step in range(0, 201, 10)
        ],
        "quality": {
            "sst2": {"teacher": {"accuracy": 0.93}, "3x384": {"accuracy": 0.9}},
            "held-out loss": {"3x384": {"loss": 0.05}, "3x384 undistilled": {"loss": 0.5}},
        },
        "latency": [
            latency_row("teacher", 1, 60.0),
            latency_row("6x384", 1, 10.0, "noisy"),
            latency_row("3x384", 1, 6.0, "unstable"),
            latency_row("teacher", 8, 400.0),
            latency_row("6x384", 8, 66.0),
            latency_row("3x384", 8, 36.0),
        ],
        "speedup": {
            "6x384_vs_teacher": {"median": 6.0, "low": 5.5, "high": 6.6, "batch_size": 1, "seq_len": 128},
            "3x384_vs_teacher": {"median": 10.0, "low": 9.0, "high": 11.5, "batch_size": 1, "seq_len": 128},
            "3x384_vs_teacher@8x128": {"median": 11.0, "low": 10.0, "high": 12.0, "batch_size": 8, "seq_len": 128},
        },
        "published": published_for(["6x384", "3x384"]),
        "notes": ["a note"],
    }


def hostile_values() -> dict[str, object]:
    """Names, notes, recipe and environment that try to become markup."""
    values = report_values()
    values["models"] = {
        "teacher": card(id=HOSTILE, model_type=HOSTILE),
        HOSTILE: card(id=HOSTILE, layers=3, bytes=69_600_000),
    }
    values["latency"] = [latency_row("teacher", 1, 60.0), latency_row(HOSTILE, 1, 6.0)]
    values["speedup"] = {}
    values["quality"] = {HOSTILE: {"teacher": {"accuracy": 0.9}, HOSTILE: {HOSTILE: 0.8}}}
    values["curve"] = [
        {"step": i, "loss": 1.0 / (i + 1), "held_out": {HOSTILE: 0.5}, "metrics": {HOSTILE: 0.5}} for i in range(3)
    ]
    values["recipe"] = {"method": HOSTILE, "data": {"source": HOSTILE}}
    values["environment"] = {"cpu": HOSTILE}
    values["notes"] = [HOSTILE]
    values["published"] = [{"row": HOSTILE, "source": HOSTILE, "values": {HOSTILE: 1.0}}]
    values["evaluations"] = [hostile_evaluation("teacher", ""), hostile_evaluation(HOSTILE, HOSTILE)]
    interval = {"metric": HOSTILE, "difference": 0.1, "low": 0.05, "high": 0.2}
    values["comparisons"] = [
        {"model": HOSTILE, "baseline": HOSTILE, "task": HOSTILE, "set": HOSTILE, **interval},
    ]
    run = {"settings": {HOSTILE: 0.1}, "seed": 0, "metrics": {HOSTILE: 0.5}}
    other = {"settings": {HOSTILE: 0.2}, "seed": 0, "metrics": {HOSTILE: 0.6}}
    chosen = {"metric": HOSTILE, "on": HOSTILE, "settings": {HOSTILE: 0.2}, "seed": 0}
    values["selection"] = chosen | {"runs": [run, other]}
    return values


def hostile_evaluation(model: str, part: str) -> dict[str, object]:
    score = {"precision": 0.5, "recall": 0.5, "f1": 0.5, "support": 1}
    mistake = {"id": HOSTILE, "texts": [HOSTILE], "label": HOSTILE, "predicted": HOSTILE, "badness": 1.0}
    return {
        "model": model,
        "task": HOSTILE,
        "set": part,
        "split": HOSTILE,
        "n": 1,
        "metrics": {HOSTILE: 0.5},
        "confusion": {"labels": [HOSTILE, "other"], "counts": [[0, 1], [0, 0]]},
        "per_class": {HOSTILE: score},
        "worst": [mistake],
    }


def evaluation(model: str, task: str = "sst2", part: str = "", **changes: object) -> dict[str, object]:
    """872 examples of two classes, 800 of them right."""
    values = {
        "model": model,
        "task": task,
        "set": part,
        "split": "validation",
        "n": 872,
        "metrics": {"accuracy": 800 / 872},
        "confusion": {"labels": ["negative", "positive"], "counts": [[388, 40], [32, 412]]},
        "per_class": {
            "negative": {"precision": 0.92381, "recall": 0.906542, "f1": 0.915094, "support": 428},
            "positive": {"precision": 0.911504, "recall": 0.927928, "f1": 0.919643, "support": 444},
        },
        "worst": [
            {
                "id": str(i),
                "texts": ["a thoroughly strange and " + "very " * 100 + "long film", "second text"],
                "label": "positive",
                "predicted": "negative",
                "badness": 7.5 - i,
            }
            for i in range(8)
        ],
    }
    return values | changes


def many_labels(number: int) -> dict[str, object]:
    """A confusion matrix in which label i is taken i times for the next one, and the scores of its classes."""
    labels = [f"card_payment_reason_{i:03d}" for i in range(number)]
    counts = [[0] * number for _ in labels]
    for i in range(number):
        counts[i][i] = 50
        counts[i][(i + 1) % number] += i
    score = {"precision": 0.5, "recall": 0.5, "f1": 0.5, "support": 50}
    return {"confusion": {"labels": labels, "counts": counts}, "per_class": dict.fromkeys(labels, score)}


def run_row(seed: int, accuracy: float, **settings: float | int | str) -> dict[str, object]:
    return {"settings": settings, "seed": seed, "metrics": {"accuracy": accuracy, "f1": accuracy - 0.1}}


def selection_values() -> dict[str, object]:
    """Three learning rates with two seeds each, and one tried with a single seed."""
    found = {1e-5: (0.90, 0.91), 3e-5: (0.92, 0.94), 1e-4: (0.89, 0.93), 3e-4: (0.5,)}
    return {
        "metric": "accuracy",
        "on": "validation",
        "settings": {"lr": 3e-5},
        "seed": 1,
        "runs": [run_row(seed, value, lr=lr) for lr, of in found.items() for seed, value in enumerate(of)],
    }


def finetune_values() -> dict[str, object]:
    """A report of `finetune` on a task of one set, without a grid."""
    return report_values() | {
        "command": "finetune",
        "recipe": {"model": "sentence-transformers/all-MiniLM-L6-v2", "task": "sst2"},
        "models": {"finetuned": card(id="out/model", layers=6, hidden=384, bytes=90_900_000)},
        "curve": [
            {
                "step": step,
                "loss": 0.7 / (1 + step / 50) if step else None,
                "held_out": {"loss": 0.6 / (1 + step / 100)} if step % 100 == 0 else None,
                "metrics": {"accuracy": 0.5 + step / 500, "f1": 0.4 + step / 500} if step % 100 == 0 else None,
            }
            for step in range(0, 201, 10)
        ],
        "quality": {"sst2": {"finetuned": {"accuracy": 800 / 872}}},
        "latency": [latency_row("finetuned", 1, 10.0)],
        "speedup": {},
        "published": [],
        "evaluations": [evaluation("finetuned")],
    }


def evaluate_values(parts: tuple[str, ...] = ("",), task: str = "sst2") -> dict[str, object]:
    """A report of `evaluate` on two models, nothing measured but scores."""
    models = {"bert-base-uncased": 0.93, "all-MiniLM-L6-v2": 0.91}
    evaluations = [
        evaluation(name, task, part, metrics={"accuracy": value - i / 100, "f1": value - i / 50})
        for name, value in models.items()
        for i, part in enumerate(parts)
    ]
    first, second = models
    quality: dict[str, dict[str, object]] = {}
    for e in evaluations:
        quality.setdefault(f"{task} {e['set']}".strip(), {})[str(e["model"])] = e["metrics"]
    interval = {"accuracy": (-0.02, -0.0312, -0.0088), "f1": (-0.02, -0.0412, 0.0012)}
    return report_values() | {
        "command": "evaluate",
        "recipe": {"models": [f"google-bert/{first}", f"sentence-transformers/{second}"], "task": task},
        "models": {first: card(), second: card(layers=6, hidden=384, bytes=90_900_000)},
        "training": None,
        "curve": [],
        "quality": quality,
        "latency": [],
        "speedup": {},
        "published": [],
        "notes": [],
        "evaluations": evaluations,
        "comparisons": [
            {"model": second, "baseline": first, "task": task, "set": part, "metric": metric}
            | dict(zip(("difference", "low", "high"), values, strict=True))
            for part in parts
            for metric, values in interval.items()
        ],
    }
