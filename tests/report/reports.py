"""Values of reports of every verb, and the same with hostile names from outside."""

import io
import itertools
import json
import re
from functools import partial
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
from pydantic_core import to_json
from rich.console import Console

from kdcli.report.finish import published_for
from kdcli.report.schema import ModelEntry, Report
from kdcli.report.sections.timings import latency_csv
from kdcli.report.views import html, markdown, model_card, terminal

MODEL = "google-bert/bert-base-uncased"
MINILM = "sentence-transformers/all-MiniLM-L6-v2"
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
    """The text of report.html without its style sheet, script and pictures."""
    text = re.sub(r"<(style|svg|script)\b.*?</\1>", "", html(report), flags=re.S)
    return " ".join(" ".join(Page(text).text).split())


def printed(report: Report, width: int = 200) -> str:
    """The terminal view."""
    console = Console(width=width, file=io.StringIO(), record=True)
    for part in terminal(report):
        console.print(part)
    return console.export_text()


def model(role: str, baseline: str | None = None, **fields: object) -> dict[str, object]:
    """A model of a report, without its name; `of`, `step` and so on are kept, the rest is its
    card."""
    kept = {"of", "step", "backend", "dtype", "variant", "source", "made", "run"}
    entry = {"role": role, "baseline": baseline}
    entry |= {key: value for key, value in fields.items() if key in kept}
    own = {key: value for key, value in fields.items() if key not in kept}
    return entry | {"card": card(**own)}


def without_files(role: str, of: str, **fields: object) -> dict[str, object]:
    """A model that has no card."""
    return {"role": role, "of": of, "card": None} | fields


def made(values: dict[str, object], **changes: object) -> Report:
    """The report; `models` may be given by name."""
    values = values | changes
    models = values["models"]
    if isinstance(models, dict):
        models = [{"name": name} | entry for name, entry in models.items()]
    return Report.model_validate_json(to_json(values | {"models": models}))


def views(report: Report) -> list[str]:
    """The page, the document and the terminal view, each on one line."""
    return [" ".join(view(report).split()) for view in (words, markdown, printed)]


def missing(text: str, *parts: str) -> list[str]:
    """The parts that a text lacks."""
    return [part for part in parts if part not in text]


def card(**changes: object) -> dict[str, object]:
    shape = {
        "model_type": "bert",
        "layers": 12,
        "hidden": 768,
        "ffn": 3072,
        "heads": 12,
        "sha256": "0" * 64,
    }
    params = {
        "params_total": 109_482_240,
        "params_embedding": 23_837_184,
        "params_transformer": 85_645_056,
    }
    costs = {"params_nonzero": 109_482_240, "multiply_adds": 11_173_625_856, "bytes": 437_951_328}
    if isinstance(hidden := changes.get("hidden"), int):
        shape["ffn"] = 4 * hidden
    return {"id": "google-bert/bert-base-uncased"} | shape | params | costs | changes


def latency_row(
    model: str,
    batch_size: int,
    p50: float,
    status: str = "ok",
    speedup: dict[str, object] | None = None,
) -> dict[str, object]:
    return {
        "speedup": speedup,
        "model": model,
        "backend": "torch",
        "device": "cpu",
        "dtype": "fp32",
        "padding": "full",
        "n": 60,
        "batch_size": batch_size,
        "seq_len": 128,
        "p50_ms": p50,
        "p75_ms": p50 * (1.2 if status == "unstable" else 1.05),
        "p90_ms": p50 * 1.3 if status == "unstable" else p50 * 1.1,
        "p95_ms": p50 * 1.5 if status == "unstable" else p50 * 1.2,
        "mean_ms": p50 * 1.02,
        "iqr_over_p50": {"ok": 0.05, "noisy": 0.2, "unstable": 0.5}[status],
        "status": status,
    }


def ratio(
    baseline: str, median: float, low: float, high: float, *, unstable: bool = False
) -> dict[str, object]:
    quartiles = {"median": median, "low": low, "high": high}
    return {"baseline": baseline, "unstable": unstable} | quartiles


def models_of(role: str, *shapes: str, **fields: object) -> list[ModelEntry]:
    """Models of some shapes, named after them."""
    models = []
    for shape in shapes:
        whole, _, ffn = shape.partition(":")
        layers, hidden = map(int, whole.split("x"))
        units = {"ffn": int(ffn)} if ffn else {}
        entry = model(role, layers=layers, hidden=hidden, **units, **fields)
        models.append(ModelEntry.model_validate_json(to_json(entry | {"name": shape})))
    return models


def published_rows(*shapes: str) -> list[dict[str, object]]:
    return [row.model_dump() for row in published_for(models_of("student", *shapes))]


def report_values() -> dict[str, object]:
    """A run of two students, as `Report.model_validate` takes it."""
    half = {
        "layers": 6,
        "hidden": 384,
        "ffn": 1536,
        "params_total": 22_713_216,
        "params_embedding": 11_918_592,
    }
    half |= {"params_transformer": 10_794_624, "multiply_adds": 1_396_703_232, "bytes": 90_900_000}
    small = half | {"layers": 3, "params_total": 17_389_824, "params_transformer": 5_471_232}
    small |= {"multiply_adds": 698_351_616, "bytes": 69_600_000}
    held = {
        step: {
            name: dict.fromkeys(("attention", "value"), loss / (1 + step / 50))
            for name, loss in (("6x384", 0.5), ("3x384", 0.25))
        }
        for step in (0, 100, 200)
    }
    rows = [
        latency_row("teacher", 1, 60.0),
        latency_row("6x384", 1, 10.0, "noisy", ratio("teacher", 6.0, 5.5, 6.6)),
        latency_row("3x384", 1, 6.0, "unstable", ratio("teacher", 10.0, 9.0, 11.5, unstable=True)),
        latency_row("teacher", 8, 400.0),
        latency_row("6x384", 8, 66.0),
        latency_row("3x384", 8, 36.0, speedup=ratio("teacher", 11.0, 10.0, 12.0)),
    ]
    origin = {"source": MODEL, "made": f"distilled from {MODEL} with minilm on corpus.txt"}
    return {
        "schema": 2,
        "command": "distill",
        "status": "done",
        "created": "2026-11-21T06:40:04+00:00",
        "versions": {"kdcli": "0.1.0", "torch": "2.13.0"},
        "environment": {"cpu": "A Processor", "physical_cores": 2, "gpus": []},
        "recipe": {"method": "minilm", "data": {"source": "corpus.txt"}},
        "models": {
            "teacher": model("teacher"),
            "6x384": model("student", "teacher", id="out/6x384", **half, **origin),
            "3x384": model("student", "teacher", id="out/3x384", **small, **origin),
            "3x384 undistilled": without_files("untrained", "3x384"),
        },
        "training": {
            "steps": 200,
            "tokens": 819_200,
            "seconds": 400.0,
            "tokens_per_second": 2048.0,
            "loss_first": 1.5,
            "loss_last": 0.3,
            "peak_memory_bytes": 2_000_000_000,
            "resumed_from_step": 100,
        },
        "curve": [
            {
                "step": step,
                "loss": 1.5 / (1 + step / 50) if step else None,
                "held_out": held.get(step),
            }
            for step in range(0, 201, 10)
        ],
        "quality": {
            "sst2": {"teacher": {"accuracy": 0.93}, "3x384": {"accuracy": 0.9}},
            "held-out loss": {"3x384": {"loss": 0.05}, "3x384 undistilled": {"loss": 0.5}},
        },
        "latency": rows,
        "published": published_rows("6x384", "3x384"),
        "notes": ["a note"],
    }


def candidate(name: str, score: float, ms: float, mb: float, **fields: object) -> dict[str, object]:
    """A candidate of a compression, timed in batches of 8 at 0.36 an hour."""
    rate = 8000 / (8 * ms)
    batch = {"batch_size": 8, "seq_len": 128, "texts_per_second": rate, "unstable": False}
    batch["cost_per_million"] = 0.36 / 3600 / rate * 1e6
    speedup = None if name == "teacher" else ratio("teacher", 60 / ms, 59 / ms, 61 / ms)
    ends = {"low": score - 0.002, "high": score + 0.002}
    numbers = {"score": score, "ms": ms, "mb": mb, "speedup": speedup, "throughput": batch}
    return {"name": name, "outcome": ""} | numbers | ends | fields


def compress_values() -> dict[str, object]:
    """A compression to a shape in int8, with a price."""
    chosen = "3x384-onnx-int8"
    values = report_values()
    models = {"teacher": values["models"]["teacher"], chosen: values["models"]["3x384"]}  # type: ignore[index]
    models[chosen] |= {"role": "candidate"}
    verified = {"rows": 872, "teacher": 0.93, "score": 0.92, "low": 0.915, "high": 0.926}
    compression = {
        "task": "sst2",
        "metric": "accuracy",
        "rows": 500,
        "goal": {"max_drop": 2.0},
        "strict": False,
        "met": True,
        "chosen": chosen,
        "sentence": f"{chosen} is 10.0 times as fast as bert-base-uncased.",
        "candidates": [
            candidate("teacher", 0.93, 60.0, 438.0),
            candidate("onnx-int8", 0.929, 20.0, 110.0),
            candidate(chosen, 0.921, 6.0, 69.6),
            {"name": "1x384-onnx-int8", "outcome": "too slow"},
        ],
        "verification": verified | {"confidence": 0.95, "look": 1, "reference": "labels"},
        "steps": [
            {"name": name, "command": "finetune", "folder": f"steps/{name}"}
            for name in ("teacher", "a name")
        ],
    }
    rows = [latency_row("teacher", 8, 480.0), latency_row(chosen, 8, 48.0)]
    rows[1]["speedup"] = ratio("teacher", 10.0, 9.8, 10.2)
    return values | {
        "command": "compress",
        "models": models,
        "compression": compression,
        "latency": rows,
        "quality": {},
        "curve": [],
        "published": [],
        "training": None,
        "recipe": {"model": "google-bert/bert-base-uncased", "task": "sst2", "seed": 7},
        "command_line": "kdcli compress google-bert/bert-base-uncased --task sst2",
        "data_versions": {"nyu-mll/glue": "commit abc"},
        "price_per_hour": 0.36,
    }


def evaluation(
    model: str, task: str = "sst2", part: str = "", **changes: object
) -> dict[str, object]:
    """872 examples of two classes, 800 of them right."""
    long = "a thoroughly strange and " + "very " * 100 + "long film"
    mistake = {"texts": [long, "second"], "label": "positive", "predicted": "negative"}
    return {
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
        "worst": [mistake | {"id": str(i), "error": 7.5 - i} for i in range(8)],
    } | changes


def paired(baseline: float, model: float) -> dict[str, float]:
    difference = model - baseline
    return {
        "baseline": baseline,
        "model": model,
        "low": difference - 0.03,
        "high": difference + 0.03,
    }


def decision(model: str, baseline: str, labels: tuple[str, ...], **changes: object) -> dict:
    """Two comparable models: the first class loses 5 points, the last one has few rows."""
    point = {"threshold": 0.5, "precision": 0.9, "recall": 0.8}
    classes = [
        {
            "name": name,
            "count": 400,
            "enough": True,
            "metrics": {"recall": paired(0.93, 0.88), "f1": paired(0.92, 0.9)},
            "both": 350,
            "only_baseline": 41,
            "only_model": 7,
        }
        for name in labels
    ]
    for each in classes[1:]:
        each["metrics"] = {"recall": paired(0.91, 0.915), "f1": paired(0.92, 0.91)}
    classes[-1] |= {"count": 12, "enough": False, "metrics": {"recall": paired(0.9, 0.1)}}
    row = {
        "id": "17",
        "texts": ["a film of which", "nobody heard"],
        "label": labels[1],
        "baseline": labels[1],
        "model": labels[0],
        "change": 0.75,
        "changed": labels[0],
        "baseline_probability": 0.125,
        "model_probability": 0.875,
    }
    counts = np.diag([100 + i for i in range(len(labels))])
    counts[0, 1] = 41
    return {
        "model": model,
        "baseline": baseline,
        "task": "sst2",
        "set": "",
        "n": 872,
        "reference": "labels",
        "metric": "recall",
        "min_count": 30,
        "agreement": 0.9375,
        "classes": classes,
        "confusion": {"labels": list(labels), "counts": counts.tolist()},
        "confused": [{"baseline": labels[0], "model": labels[1], "count": 41}],
        "differing": [row],
        "calibration": {
            baseline: {"error": 0.0625, "temperature": 1.75, "scaled_error": 0.03125},
            model: {"error": 0.125, "temperature": None, "scaled_error": None},
        },
        "thresholds": [
            {
                "label": labels[1],
                "baseline": point,
                "model": None,
                "same_precision": point | {"threshold": 0.625, "recall": 0.75},
                "same_recall": None,
            }
        ],
    } | changes


def many_labels(number: int = 77) -> dict[str, object]:
    """A confusion matrix in which label i is taken i times for the next one, and the scores of its
    classes."""
    labels = [f"card_payment_reason_{i:03d}" for i in range(number)]
    counts = np.diag([50] * number) + np.roll(np.diag(range(number)), 1, axis=1)
    score = {"precision": 0.5, "recall": 0.5, "f1": 0.5, "support": 50}
    return {
        "confusion": {"labels": labels, "counts": counts.tolist()},
        "per_class": dict.fromkeys(labels, score),
    }


def run_row(seed: int, accuracy: float, **settings: float | int | str) -> dict[str, object]:
    return {
        "settings": settings,
        "seed": seed,
        "metrics": {"accuracy": accuracy, "f1": accuracy - 0.1},
    }


def selection_values() -> dict[str, object]:
    """Three learning rates with two seeds each, and one tried with a single seed."""
    found = {1e-5: (0.90, 0.91), 3e-5: (0.92, 0.94), 1e-4: (0.89, 0.93), 3e-4: (0.5,)}
    runs = [
        run_row(seed, value, lr=lr) for lr, of in found.items() for seed, value in enumerate(of)
    ]
    return {
        "metric": "accuracy",
        "on": "validation",
        "settings": {"lr": 3e-5},
        "seed": 1,
        "runs": runs,
    }


def finetune_values() -> dict[str, object]:
    """A report of `finetune` on a task of one set, without a grid."""
    values = report_values() | {
        "command": "finetune",
        "recipe": {"model": "sentence-transformers/all-MiniLM-L6-v2", "task": "sst2"},
        "models": {
            "finetuned": model(
                "finetuned",
                id="out/model",
                layers=6,
                hidden=384,
                bytes=90_900_000,
                source=MINILM,
                made=f"fine-tuned from {MINILM} on sst2",
            )
        },
        "curve": [
            {"step": step, "loss": 0.7 / (1 + step / 50) if step else None, "held_out": None}
            for step in range(0, 201, 10)
        ],
        "quality": {"sst2": {"finetuned": {"accuracy": 800 / 872}}},
        "latency": [latency_row("finetuned", 1, 10.0)],
        "published": [],
        "evaluations": [evaluation("finetuned")],
    }
    for point in values["curve"][::10]:
        part = point["step"] / 500
        point |= {
            "held_out": {"finetuned": {"loss": 0.6 / (1 + 5 * part)}},
            "metrics": {"accuracy": 0.5 + part, "f1": 0.4 + part},
        }
    return values


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
        "recipe": {
            "models": [f"google-bert/{first}", f"sentence-transformers/{second}"],
            "task": task,
        },
        "models": {
            first: model("baseline"),
            second: model("candidate", first, layers=6, hidden=384, bytes=90_900_000),
        },
        "training": None,
        "curve": [],
        "latency": [],
        "published": [],
        "notes": [],
        "quality": quality,
        "evaluations": evaluations,
        "comparisons": [
            {"model": second, "baseline": first, "task": task, "set": part, "metric": metric}
            | dict(zip(("difference", "low", "high"), values, strict=True))
            for part, (metric, values) in itertools.product(parts, interval.items())
        ],
    }


# Milliseconds of one sequence of 128 tokens under torch in float32, and those of the backends
# relative to them.
LATENCY_SHAPES = {"12x768": 60.0, "6x384": 10.0, "3x384": 6.0}
BACKENDS = {("torch", "fp32"): 1.0, ("onnx", "fp32"): 0.8, ("onnx", "int8"): 0.5}


def benchmark_row(
    name: str, on: tuple[str, str], batch_size: int, seq_len: int, **changes: object
) -> dict[str, object]:
    p50 = LATENCY_SHAPES.get(name, 6.0) * BACKENDS[on] * batch_size * seq_len / 128
    of_verb = {
        "backend": on[0],
        "dtype": on[1],
        "seq_len": seq_len,
        "padding": "random",
        "p99_ms": p50 * 1.3,
        "tokens_per_second": 0.6 * 1e3 * batch_size * seq_len / p50,
        "load_seconds": 0.42,
        "first_call_ms": p50 * 3,
        "peak_memory_bytes": 120_000_000,
    }
    return latency_row(name, batch_size, p50) | of_verb | changes


def benchmark_values(
    cells: tuple[tuple[int, int], ...] = ((1, 128), (8, 128), (1, 32), (1, 512)),
    on: tuple[tuple[str, str], ...] = tuple(BACKENDS),
) -> dict[str, object]:
    """A benchmark of two shapes next to BERT-base; one does not fit once, one is wrong on ONNX in
    int8."""
    sizes: dict[str, dict[str, object]] = {
        "12x768": {},
        "6x384": {"layers": 6, "hidden": 384, "params_total": 22_713_216, "bytes": 90_900_000},
        "3x384": {"layers": 3, "hidden": 384, "params_total": 17_389_824, "bytes": 69_600_000},
    }
    papers = {"paper_params_embedding": 23_440_896, "paper_params_transformer": 85_054_464}
    measured = [
        (name, backend, cell)
        for cell, backend, name in itertools.product(cells, on, LATENCY_SHAPES)
        if (name, backend) != ("6x384", ("onnx", "int8"))
    ]
    rows = []
    for name, backend, cell in measured:
        row = benchmark_row(name, backend, *cell)
        if (name, backend) != ("12x768", ("torch", "fp32")):
            median = 60.0 / (LATENCY_SHAPES[name] * BACKENDS[backend])
            row["speedup"] = ratio("12x768", median, 0.9 * median, 1.2 * median)
        rows.append(row)
    rows[1] |= {"status": "noisy", "iqr_over_p50": 0.2}
    agreement = {
        "backend": "onnx",
        "dtype": "int8",
        "max_abs": 0.5,
        "cosine": 0.999,
        "limit": 0.1,
        "wrong": False,
    }
    large = {
        "model": "12x768",
        "backend": "torch",
        "dtype": "fp32",
        "batch_size": 64,
        "seq_len": 512,
    }
    return report_values() | {
        "command": "benchmark",
        "recipe": {"models": ["6x384", "3x384"], "baseline": "12x768"},
        "focus": "latency",
        "models": benchmark_models({n: changes | papers for n, changes in sizes.items()}),
        "training": None,
        "curve": [],
        "quality": {},
        "latency": rows,
        "notes": [],
        "published": published_rows(*sizes),
        "failures": [
            large | {"reason": "out of memory"},
            {
                "model": "3x384",
                "backend": "openvino",
                "dtype": "int8",
                "reason": "openvino is not installed",
            },
        ],
        "agreements": [
            agreement | {"model": "3x384", "relative": 0.02},
            agreement | {"model": "6x384", "relative": 0.31, "wrong": True},
        ],
    }


def benchmark_models(cards: dict[str, dict[str, object]]) -> dict[str, object]:
    """Models that are compared with the first of them."""
    first, *others = cards
    return {
        first: model("baseline", id=first, **cards[first]),
        **{name: model("candidate", first, id=name, **cards[name]) for name in others},
    }


def report_of(**changes: object) -> Report:
    """The benchmark with some of it changed."""
    return made(benchmark_values(), **changes)


# Weights of the matrices of a layer of width 384.
SIZES = dict.fromkeys("QKVO", 147_456) | dict.fromkeys("UGD", 589_824)


def pruned_values(
    name="masked",
    sparsity=0.9,
    kinds="QKVOUD",
    layers=6,
    number_of_heads=12,
    scores=True,
    **changes: object,
) -> dict[str, object]:
    """Shares that grow towards the middle layers and differ between types and heads; a cubic
    schedule."""
    density, values = 1 - sparsity, np.random.default_rng(0)
    matrices = []
    for layer in range(1, layers + 1):
        hill = 1.2 - 1.2 * abs(layer / (layers + 1) - 0.5)
        for number, kind in enumerate(kinds):
            left = round(SIZES[kind] * min(1.0, density * hill * (0.7 + 0.08 * number)))
            place = {"name": f"{layer}.{kind}", "layer": layer, "kind": kind}
            matrices.append(place | {"weights": SIZES[kind], "kept": left})
    kept = sum(int(m["kept"]) for m in matrices) / sum(int(m["weights"]) for m in matrices)
    steps = list(range(0, 1001, 50))
    curve = [
        {"step": s, "density": max(kept, kept + (1 - kept) * (1 - s / 600) ** 3)}
        for s in steps[:-1]
    ]
    histograms = []
    for step in steps if scores else []:
        spread = (
            values.normal(-0.1, 0.5, 4000)
            * step
            / 1000
            * np.where(values.random(4000) < 0.2, 1, 0.3)
        )
        low, high = (float(spread.min()), float(spread.max())) if step else (0.0, 1.0)
        counts, edges = np.histogram(spread, 40, (low, high))
        histograms.append({"step": step, "edges": edges.tolist(), "counts": counts.tolist()})
    shares = np.clip(density * values.uniform(0.3, 1.7, (layers, number_of_heads)), 0, 1)
    return {
        "model": name,
        "method": "smp",
        "masking": "proportional",
        "sparsity": sparsity,
        "density": kept,
        "matrices": matrices,
        "heads": shares.tolist(),
        "curve": [*curve, {"step": 1000, "density": kept}],
        "histograms": histograms,
    } | changes


def _values(
    models: dict[str, dict[str, object]], accuracies: dict[str, float]
) -> dict[str, object]:
    """A report of `prune` on sst2."""
    return report_values() | {
        "command": "prune",
        "recipe": {
            "model": "bert-base-uncased",
            "task": "sst2",
            "method": "smp",
            "sparsity": [0.9],
        },
        "models": models,
        "curve": [
            {"step": step, "loss": 0.7 / (1 + step / 200), "held_out": None}
            for step in range(50, 1001, 50)
        ],
        "quality": {"sst2": {name: {"accuracy": value} for name, value in accuracies.items()}},
        "latency": [],
        "published": [],
        "evaluations": [
            evaluation(name, metrics={"accuracy": value}) for name, value in accuracies.items()
        ],
    }


def prune_values() -> dict[str, object]:
    """One sparsity: the dense model, the masked one, the compacted one, and the sparse form that
    has no card."""
    shape = {"layers": 6, "hidden": 384, "bytes": 90_900_000, "params_total": 22_713_216}
    models = {
        "dense": model("baseline", id="bert-base-uncased", **shape, params_nonzero=22_700_000),
        "masked": model(
            "pruned",
            "dense",
            id="out",
            **shape,
            params_nonzero=13_100_000,
            source="bert-base-uncased",
            made="pruned from bert-base-uncased on sst2 with smp",
        ),
        "compact": model(
            "pruned",
            "dense",
            id="out/compact",
            **shape | {"bytes": 71_000_000},
            params_nonzero=13_090_000,
        ),
        "sparse": without_files("form", "masked", backend="sparse", dtype="fp32"),
    }
    ratios = {"masked": 1.0, "compact": 1.4, "sparse": 1.6}
    p50 = {"dense": 10.0, "masked": 10.1, "compact": 7.1, "sparse": 6.2}
    rows = {name: latency_row(name, 1, value) for name, value in p50.items()}
    for name, r in ratios.items():
        rows[name]["speedup"] = ratio("dense", r, r - 0.1, r + 0.1)
    rows["sparse"] |= {"backend": "sparse", "dtype": "fp32"}
    return _values(models, {"masked": 0.9, "compact": 0.9}) | {
        "latency": list(rows.values()),
        "pruning": [pruned_values()],
    }


def sparsities_values() -> dict[str, object]:
    """Three sparsities, each a model of its own; the sizes differ."""
    asked = {"0.5": 0.5, "0.9": 0.9, "0.97": 0.97}
    sizes = {name: int(90_900_000 * (1 - s / 2)) for name, s in asked.items()} | {
        "dense": 90_900_000
    }
    models = {
        name: model("pruned", "dense", id=name, layers=6, hidden=384, bytes=sizes[name])
        for name in asked
    }
    dense = model("baseline", id="bert-base-uncased", layers=6, hidden=384, bytes=sizes["dense"])
    models = {"dense": dense, **models}
    values = _values(models, {"0.5": 0.91, "0.9": 0.9, "0.97": 0.85})
    recipe = values["recipe"] | {"sparsity": list(asked.values())}  # type: ignore[operator]
    pruning = [pruned_values(name, s) for name, s in asked.items()]
    return values | {"recipe": recipe, "training": None, "curve": [], "pruning": pruning}


DECIDED = "all-MiniLM-L6-v2", "bert-base-uncased", ("negative", "positive", "mixed")
KINDS = {  # name of a fixture -> values of its report
    "report": report_values,
    "finetuned": finetune_values,
    "grid": lambda: finetune_values() | {"selection": selection_values()},
    "labels": lambda: (
        finetune_values() | {"evaluations": [evaluation("finetuned", "banking77", **many_labels())]}
    ),
    "languages": lambda: evaluate_values(("ar", "de", "en", "sw", "zh"), "xnli"),
    "compared": evaluate_values,
    "decided": lambda: evaluate_values() | {"decisions": [decision(*DECIDED)]},
    "benchmark": benchmark_values,
    "compressed": compress_values,
    "pruned": prune_values,
    "sparsities": sparsities_values,
}

for file in sorted(Path(__file__).with_name("saved").iterdir()):
    # Reports as they were written once, two of them with names that try to become markup.
    KINDS[file.stem] = partial(json.loads, file.read_text("utf-8"))

CARDS = {  # name of a report -> its model with a card, and the class that loads the model
    "report": ("3x384", "AutoModel"),
    "grid": ("finetuned", "AutoModelForSequenceClassification"),
    "pruned": ("masked", "AutoModelForSequenceClassification"),
}
GOLDEN = Path(__file__).with_name("golden")


def written(kind: str) -> dict[str, str]:
    """The texts of a report's views, by the names of their files in `GOLDEN`."""
    report = made(KINDS[kind]())
    page = Page(re.sub(r"<(style|svg|script)\b.*?</\1>", "", html(report), flags=re.S))
    lines = filter(None, (" ".join(text.split()) for text in page.text))
    texts = {
        "md": markdown(report),
        "txt": printed(report, 100),
        "html.txt": "".join(f"{line}\n" for line in lines),
        "csv": latency_csv(report),
    }
    if kind in CARDS:
        name, auto_class = CARDS[kind]
        texts["card.md"] = model_card(report, name, auto_class)
    return {f"{kind}.{view}": text for view, text in texts.items() if text}


if __name__ == "__main__":
    for each in KINDS:
        if "hostile" not in each:
            for name, text in written(each).items():
                (GOLDEN / name).write_text(text, "utf-8")
