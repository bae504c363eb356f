"""Reports of benchmarks: of shapes on several backends, of runs that were judged, and a hostile one."""

from __future__ import annotations

from reports import HOSTILE, card, hostile_values, latency_row, report_values

from kdcli.report.published import published_for
from kdcli.report.schema import Report

LATENCY_SHAPES = {"12x768": 60.0, "6x384": 10.0, "3x384": 6.0}
"""Milliseconds of one sequence of 128 tokens under torch in float32."""

BACKENDS = {("torch", "fp32"): 1.0, ("onnx", "fp32"): 0.8, ("onnx", "int8"): 0.5}
"""Milliseconds relative to those."""


def benchmark_row(
    model: str, on: tuple[str, str], batch_size: int, seq_len: int, **changes: object
) -> dict[str, object]:
    p50 = LATENCY_SHAPES.get(model, 6.0) * BACKENDS[on] * batch_size * seq_len / 128
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
    return latency_row(model, batch_size, p50) | of_verb | changes


def benchmark_values(
    cells: tuple[tuple[int, int], ...] = ((1, 128), (8, 128), (1, 32), (1, 512)),
    on: tuple[tuple[str, str], ...] = tuple(BACKENDS),
) -> dict[str, object]:
    """A benchmark of two shapes beside BERT-base; one does not fit once, one is wrong on ONNX in int8."""
    sizes: dict[str, dict[str, object]] = {
        "12x768": {},
        "6x384": {"layers": 6, "hidden": 384, "params_total": 22_713_216, "bytes": 90_900_000},
        "3x384": {"layers": 3, "hidden": 384, "params_total": 17_389_824, "bytes": 69_600_000},
    }
    papers = {"paper_params_embedding": 23_440_896, "paper_params_transformer": 85_054_464}
    measured = [
        (model, backend, cell)
        for cell in cells
        for backend in on
        for model in LATENCY_SHAPES
        if (model, backend) != ("6x384", ("onnx", "int8"))
    ]
    rows = [benchmark_row(model, backend, *cell) for model, backend, cell in measured]
    rows[1] |= {"status": "noisy", "iqr_over_p50": 0.2}
    speedup = {}
    for model, backend, cell in measured:
        if (model, backend) == ("12x768", ("torch", "fp32")):
            continue
        name = model if backend == ("torch", "fp32") else f"{model}/{backend[0]}-{backend[1]}"
        ratio = 60.0 / (LATENCY_SHAPES[model] * BACKENDS[backend])
        where = "" if cell == cells[0] else f"@{cell[0]}x{cell[1]}"
        speedup[f"{name}_vs_12x768{where}"] = {
            **{"median": ratio, "low": 0.9 * ratio, "high": 1.2 * ratio},
            **{"batch_size": cell[0], "seq_len": cell[1]},
        }
    agreement = {"backend": "onnx", "dtype": "int8", "max_abs": 0.5, "cosine": 0.999, "limit": 0.1, "wrong": False}
    return report_values() | {
        "command": "benchmark",
        "recipe": {"models": ["6x384", "3x384"], "baseline": "12x768"},
        "models": {name: card(id=name, **changes, **papers) for name, changes in sizes.items()},
        "training": None,
        "curve": [],
        "quality": {},
        "latency": rows,
        "speedup": speedup,
        "published": published_for(sizes),
        "notes": [],
        "failures": [
            {"model": "12x768", "backend": "torch", "dtype": "fp32", "batch_size": 64, "seq_len": 512}
            | {"reason": "out of memory"},
            {"model": "3x384", "backend": "openvino", "dtype": "int8", "reason": "openvino is not installed"},
        ],
        "agreements": [
            agreement | {"model": "3x384", "relative": 0.02},
            agreement | {"model": "6x384", "relative": 0.31, "wrong": True},
        ],
        "projections": [
            {"model": "6x384", "device": "p100", "batch_size": 1, "seq_len": 128, "milliseconds": 2.5, "speedup": 5.1}
            | {"published": 5.3, "error": -0.0377, "note": "projection, memory-bound"},
            {"model": "6x384", "device": "k80", "batch_size": 1, "seq_len": 128, "milliseconds": 12.5, "speedup": 5.6},
        ],
    }


def report_of(**changes: object) -> Report:
    """The benchmark with some of it changed."""
    return Report.model_validate(benchmark_values() | changes)


def compared_benchmark_values() -> dict[str, object]:
    """A benchmark of runs that were judged too; `slow` is beaten in everything."""
    values = benchmark_values(((1, 128),), (("torch", "fp32"),))
    accuracy = {"12x768": 0.93, "6x384": 0.91, "3x384": 0.88, "slow": 0.87}
    slow = benchmark_row("slow", ("torch", "fp32"), 1, 128, p50_ms=30.0)
    models = {**values["models"], "slow": card(id="slow", layers=6, bytes=270_000_000)}  # type: ignore[dict-item]
    return values | {
        "models": models,
        "latency": [*values["latency"], slow],  # type: ignore[misc]
        "quality": {
            "held-out loss": {name: {"loss": 0.5} for name in accuracy},
            "sst2": {name: {"accuracy": value} for name, value in accuracy.items()},
        },
    }


def hostile_benchmark_values() -> dict[str, object]:
    """The same of a benchmark."""
    values = hostile_values() | {"command": "benchmark"}
    on = {"backend": HOSTILE, "dtype": HOSTILE}
    cell = {"batch_size": 1, "seq_len": 128}
    row = latency_row(HOSTILE, 1, 6.0) | on
    strange = on | {"device": HOSTILE, "padding": HOSTILE}
    lengths = (128, 256)
    values["latency"] = [row | {"seq_len": n, "model": m} for n in lengths for m in ("teacher", HOSTILE)]
    values["latency"] += [latency_row(HOSTILE, batch, 6.0) | strange for batch in (1, 8)]
    ratio = {"median": 2.0, "low": 1.0, "high": 3.0}
    values["speedup"] = {f"{HOSTILE}/{HOSTILE}-{HOSTILE}_vs_teacher": ratio | cell}
    values["quality"] = {HOSTILE: {"teacher": {HOSTILE: 0.9}, HOSTILE: {HOSTILE: 0.8}}}
    values["published"] = [{"row": f"3x768 {HOSTILE}", "source": HOSTILE, "values": {"speed-up": 2.0, HOSTILE: 1.0}}]
    values["failures"] = [{"model": HOSTILE, "reason": HOSTILE} | on | cell]
    said = {"max_abs": 1.0, "relative": 1.0, "cosine": 0.0, "limit": 0.1, "metric": 0.5}
    values["agreements"] = [{"model": HOSTILE, "wrong": True} | on | said]
    calculated = {"milliseconds": 1.0, "speedup": 2.0, "published": 3.0, "error": 0.1}
    values["projections"] = [{"model": HOSTILE, "device": HOSTILE, "note": HOSTILE} | calculated | cell]
    return values
