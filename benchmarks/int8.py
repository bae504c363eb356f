"""Compare int8 files of kdcli, ONNX Runtime and other tools: size, agreement, latency.

    python benchmarks/int8.py MODEL TEXTS --calibration SOURCE [--pooling mean] [--prompt "query: "]
                              [--pairs STSB] [--file NAME=PATH ...] [--rounds 40] [-o files]
                              [--picture sizes.svg]

MODEL is an encoder whose vectors are means, or a classifier of texts. Makes the model's float32
file, kdcli's int8 file and the file of ONNX Runtime's `quantize_dynamic`. `--file` adds ONNX or
OpenVINO files that other tools made from the float32 file. Without `--calibration`, only those
files are compared. Prints, for each file:

* how closely it agrees with torch on the lines of TEXTS, one text at a time and in padded batches
  of 32 in the order of the file;
* the Spearman correlation on the pairs of STS-B (lines of JSON, gzipped);
* the latency of 128 tokens as a ratio to the first file. Every round calls every file once, in a
  random order. The ratio is the median over the rounds, with the quartiles;
* the largest sum of two neighbouring products of integers. Without VNNI, ONNX Runtime cuts off sums
  beyond 32,767 silently.

`--picture` draws the size of each file over 1 - its mean agreement with torch, one text at a time.
"""

import argparse
import gzip
import json
import random
import resource
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx.numpy_helper import to_array
from onnxruntime.quantization import QuantType, quantize_dynamic
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from kdcli.deploy.rounding import largest_pair
from kdcli.deploy.runners import Runner, file_runner
from kdcli.metrics.regression import spearman
from kdcli.report.charts.drawing import INK, scatter_chart
from kdcli.types import Array, Batch

BATCH, LENGTH = 32, 128
INTEGER_PRODUCTS = {"MatMulInteger": 1, "QLinearMatMul": 3, "MatMul": 1, "Gemm": 1}
"""The place of the weights among the inputs of a node."""


class Texts:
    """Texts and the torch model that is the reference."""

    def __init__(self, source: str, prompt: str) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(source)
        self.prompt = prompt
        names = AutoConfig.from_pretrained(source).architectures or [""]
        self.is_classifier = names[0].endswith("ForSequenceClassification")
        kind = AutoModelForSequenceClassification if self.is_classifier else AutoModel
        self.model = kind.from_pretrained(source).float().eval()

    def batches(self, texts: Sequence[str], size: int) -> Iterator[Batch]:
        """Yield padded batches, in the order of the texts."""
        for begin in range(0, len(texts), size):
            part = [self.prompt + text for text in texts[begin : begin + size]]
            yield dict(
                self.tokenizer(
                    part, padding=True, truncation=True, max_length=LENGTH, return_tensors="pt"
                )
            )

    def by_torch(self, texts: Sequence[str]) -> Array:
        """Return the vectors or logits that torch computes."""
        with torch.inference_mode():
            outputs = [(self.model(**batch)[0], batch) for batch in self.batches(texts, BATCH)]
        return np.concatenate([self.values(output.numpy(), batch) for output, batch in outputs])

    def by_file(self, runner: Runner, texts: Sequence[str], size: int) -> Array:
        """Return the vectors or logits that a file computes in batches of a size."""
        values = []
        for batch in self.batches(texts, size):
            output = runner.output(runner.call(runner.prepare(batch)))[0]
            values.append(self.values(output, batch))
        return np.concatenate(values)

    def values(self, output: Array, batch: Batch) -> Array:
        """Return the logits, or the normalised mean vectors."""
        if self.is_classifier:
            return output
        mask_BL1 = batch["attention_mask"].numpy()[..., None]
        mean_BE = (output * mask_BL1).sum(1) / mask_BL1.sum(1)
        vectors_BE: Array = mean_BE / np.linalg.norm(mean_BE, axis=-1, keepdims=True)
        return vectors_BE

    def agreement(self, reference: Array, values: Array) -> Array:
        """Return whether the predictions of each text are equal, or the cosines of its vectors."""
        agreement_N: Array = (reference * values).sum(-1)
        if self.is_classifier:
            agreement_N = reference.argmax(-1) == values.argmax(-1)
        return agreement_N

    def describe(self, agreement_N: Array) -> str:
        """Write the share of equal predictions, or the mean and the lowest cosine."""
        least = "" if self.is_classifier else f" {agreement_N.min():.4f}"
        return f"{agreement_N.mean():.4f}{least}"


def make(source: str, calibration: str, pooling: str | None, folder: Path) -> dict[str, Path]:
    """Write the files of kdcli and ONNX Runtime, and print the processor seconds of each."""
    plain, own = folder / "float32", folder / "kdcli"
    options = ["--pooling", pooling] if pooling else []
    command = ["kdcli", "export", source, "--format", "onnx", *options, "--overwrite"]
    seconds = _seconds_of_children()
    subprocess.run([*command, "-o", plain], check=True, capture_output=True)
    print(f"float32: {_seconds_of_children() - seconds:.0f} s, from the model")
    seconds = _seconds_of_children()
    command += ["--int8", "--data", calibration]
    subprocess.run([*command, "-o", own], check=True, capture_output=True)
    print(f"kdcli: {_seconds_of_children() - seconds:.0f} s, from the model")
    files = {
        "kdcli": own / "onnx/model_quantized.onnx",
        "ONNX Runtime": folder / "onnxruntime.onnx",
        "float32": plain / "onnx/model.onnx",
    }
    started = time.process_time()
    graph = onnx.load(files["float32"])
    # ONNX Runtime transposes the weights of a Gemm, which the recorded shapes would contradict.
    graph.graph.ClearField("value_info")
    quantize_dynamic(graph, files["ONNX Runtime"], weight_type=QuantType.QInt8)
    print(f"ONNX Runtime: {time.process_time() - started:.0f} s, from the float32 file")
    return files


def _seconds_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def largest_sum(file: Path) -> str:
    """Return the largest sum of two neighbouring products that any input can cause.

    It is 255 times the largest sum of two weights.
    """
    if file.suffix != ".onnx":
        return ""
    graph = onnx.load(file).graph
    tensors = {tensor.name: tensor for tensor in graph.initializer}
    # In a file with QuantizeLinear and DequantizeLinear, a product reads its integers through one.
    integers_of = {
        node.output[0]: node.input[0] for node in graph.node if node.op_type == "DequantizeLinear"
    }
    sums = [0]
    for node in graph.node:
        if node.op_type in INTEGER_PRODUCTS:
            weights = node.input[INTEGER_PRODUCTS[node.op_type]]
            tensor = tensors.get(integers_of.get(weights, weights))
            if tensor is not None and tensor.data_type == onnx.TensorProto.INT8:
                turned = any(a.name == "transB" and a.i for a in node.attribute)
                values = to_array(tensor).astype(np.int32)
                sums.append(largest_pair(torch.from_numpy(values if turned else values.T)))
    return f"{255 * max(sums):,}" if max(sums) else ""


def ratios(files: dict[str, Path], threads: int, rounds: int) -> dict[str, str]:
    """Time the files in turns, and return the ratios to the first file."""
    ids_BL = torch.randint(1000, 20000, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids_BL, "attention_mask": torch.ones_like(ids_BL)}
    runners = {name: file_runner(file, threads=threads) for name, file in files.items()}
    inputs = {name: runner.prepare(batch) for name, runner in runners.items()}
    times: dict[str, list[float]] = {name: [] for name in files}
    order = random.Random(0)
    for _ in range(rounds + 3):
        for name in order.sample(list(files), len(files)):
            started = time.perf_counter()
            runners[name].call(inputs[name])
            times[name].append(time.perf_counter() - started)
    measured = {name: np.array(values[3:]) for name, values in times.items()}
    first = next(iter(measured.values()))
    texts = {}
    for name, values in measured.items():
        low, middle, high = np.percentile(values / first, [25, 50, 75])
        best = np.percentile(values, 25) / np.percentile(first, 25)
        texts[name] = f"{middle:.2f} ({low:.2f}-{high:.2f}), of lower quartiles {best:.2f}"
    print(f"{threads} threads: {next(iter(files))} takes {1000 * np.percentile(first, 25):.1f} ms")
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("texts", type=Path)
    parser.add_argument("--calibration")
    parser.add_argument("--pooling")
    parser.add_argument("--prompt", default="")
    parser.add_argument("--pairs", type=Path)
    parser.add_argument("--file", action="append", default=[], metavar="NAME=PATH")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("-o", "--output", type=Path, default=Path("files"))
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    files: dict[str, Path] = {}
    if options.calibration is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        files = make(options.model, options.calibration, options.pooling, options.output)
    given = [each.partition("=") for each in options.file]
    files |= {name: Path(path) for name, _, path in given}
    texts = options.texts.read_text().splitlines()
    reference = Texts(options.model, options.prompt)
    exact_NE = reference.by_torch(texts)
    rows = []
    if options.pairs is not None:
        with gzip.open(options.pairs, "rt") as lines:
            rows = [json.loads(line) for line in lines]
    ends = [row[name] for name in ("sentence1", "sentence2") for row in rows]
    labels_N = np.array([row["label"] for row in rows])

    def score(values_NE: Array) -> float:
        first_NE, second_NE = np.split(values_NE, 2)
        return spearman((first_NE * second_NE).sum(-1), labels_N)

    scored = score(reference.by_torch(ends)) if rows else 0.0
    if rows:
        print(f"torch: Spearman {scored:.4f} on {len(rows)} pairs")
    points: dict[str, tuple[float, float]] = {}
    for name, file in files.items():
        runner = file_runner(file, threads=1)
        size = sum(part.stat().st_size for part in file.parent.glob(f"{file.stem}.*")) / 1e6
        alone_N, padded_N = (
            reference.agreement(exact_NE, reference.by_file(runner, texts, rows_of_batch))
            for rows_of_batch in (1, BATCH)
        )
        points[name] = size, round(1 - float(alone_N.mean()), 4)
        parts = [
            f"{size:.1f} MB",
            f"alone {reference.describe(alone_N)}",
            f"padded {reference.describe(padded_N)}",
        ]
        if rows:
            found = score(reference.by_file(runner, ends, BATCH))
            parts.append(f"Spearman {found:.4f}, lost {100 * (scored - found):.2f}")
        print(f"{name}: {'; '.join(parts)}; largest sum {largest_sum(file)}", flush=True)
    if options.picture is not None:
        measure = "equal answers" if reference.is_classifier else "mean cosine"
        labels = {name: f"{name}, {size:.1f} MB" for name, (size, _) in points.items()}
        drawn = scatter_chart(points, labels, "MB", f"1 - {measure}", bounds=(0.0, 2.0))
        options.picture.write_text(f"{drawn.replace('currentColor', INK)}\n", "utf-8")
    for threads in (1, 2) if options.rounds else ():
        for name, text in ratios(files, threads, options.rounds).items():
            print(f"{name}, {threads} threads: {text}", flush=True)


if __name__ == "__main__":
    main()
