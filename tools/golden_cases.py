"""The commands that tools/golden.py runs. `golden_inputs.py` writes the files that they read.

A case's output directory is `runs/CASE`. A case that reads the output of another one names that
directory among its arguments, so the tool knows what has to run first.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

CPU = ("-q", "--device", "cpu")
QUIET = ("--set", "measure.latency=false", "--set", "train.log_every=1", "--dtype", "fp32", *CPU)
SHORT = (*QUIET, "--max-steps", "6", "--batch-size", "8")
HELD_OUT = ("--set", "train.eval_every=3")
TOPIC = ("--task", "demo-topic")
FEW_ROWS = ("--set", "data.train_rows=200", "--set", "data.judged_rows=60")
FEW_BLOCKS = ("--set", "data.held_out_blocks=16")
ON_TEXT = (*SHORT, *FEW_BLOCKS)
ON_TOPIC = (*TOPIC, *FEW_ROWS, *SHORT)
EVAL_TOPIC = ("--eval-task", "demo-topic", "--set", "eval.overrides.train.max_steps=3")
EMBEDDING = ("--method", "embedding", "--pooling", "mean")
OWN_TEXT = ("--data", "inputs/texts.txt")
ON_TEXTS = (*OWN_TEXT, *ON_TEXT, *HELD_OUT)
ANCHORS = ("--set", "workload.anchors=16")
EMBEDDED = (*EMBEDDING, *ON_TEXTS, *ANCHORS)
EVAL_PAIRS = (
    *("--eval-task", "own", "--set", "eval.source=inputs/pairs"),
    *("--set", "eval.overrides={data.columns: {text: a, pair: b}}"),
)
RERANK = ("--task", "rerank", *SHORT, *HELD_OUT)
MEASURE = ("--set", "measure.min_runs=2", "--set", "measure.min_seconds=0")


@dataclass(frozen=True)
class Case:
    """A command line without its output directory."""

    arguments: tuple[str, ...]
    dry: bool = False  # The surface recording also makes a dry run of it.

    @property
    def needs(self) -> set[str]:
        """The cases whose output this command reads."""
        return set(re.findall(r"runs/([\w-]+)", " ".join(self.arguments)))


def _own(kind: str, *more: str) -> Case:
    few = ("--set", "data.max_length=32")
    data = ("--task", "own", "--data", f"inputs/{kind}")
    return Case(("finetune", "demo", *data, *SHORT, *HELD_OUT, *few, *more))


def _evaluate(*models: str, task: str, data: str = "") -> Case:
    source = ("--data", data) if data else ("--set", "data.judged_rows=60")
    return Case(("evaluate", *models, "--task", task, *source, *CPU))


def _export(model: str, *options: str) -> Case:
    return Case(("export", model, *options, "-q"))


CASES: dict[str, Case] = {
    # Labelled tasks
    "teacher": Case(("finetune", "demo", *ON_TOPIC, *HELD_OUT), dry=True),
    "keep-best": Case(("finetune", "demo", *ON_TOPIC, *HELD_OUT, "--set", "keep=best")),
    "micro-batches": Case(("finetune", "demo", *ON_TOPIC, "--set", "train.micro_batch_size=3")),
    "grid": Case(
        ("finetune", "demo", *ON_TOPIC, "--seeds", "2", "--grid", "lr=1e-4,1e-3"), dry=True
    ),
    "order": Case(("finetune", "demo", "--task", "demo-order", *FEW_ROWS, *SHORT)),
    "score": _own("score"),
    "multi": _own("multi"),
    "tokens": _own("tokens"),
    "span": _own("span", "--set", "data.stride=4"),
    "generation": _own("generation", "--set", "workload.max_tokens=8"),
    "generation-best": _own(
        *("generation", "--set", "workload.max_tokens=8", "--set", "workload.beams=2"),
        *("--set", "keep=best", "--set", "data.judged_rows=8"),
    ),
    # Distillation on text
    "minilm": Case(("distill", "demo", "--to", "2x32", "--assistant", "2x64", *ON_TEXT), dry=True),
    "minilmv2": Case(
        (
            *("distill", "demo", "--to", "2x32", "--to", "1x64", "--assistant", "none"),
            *("--method", "minilmv2", *ON_TEXTS),
        )
    ),
    "tinybert-text": Case(("distill", "demo", "--to", "2x32", "--method", "tinybert", *ON_TEXTS)),
    "distilbert": Case(
        (
            *("distill", "runs/cotrain/teacher", "--to", "1x32"),
            *("--method", "distilbert", *ON_TEXTS),
        )
    ),
    "mlm-kd": Case(
        (
            *("distill", "runs/cotrain/teacher", "--to", "1x32"),
            *("--method", "mlm-kd", *ON_TEXTS),
        )
    ),
    "masked-lm": Case(
        (
            *("distill", "runs/cotrain/teacher", "--to", "1x32"),
            *("--method", "masked-lm", *ON_TEXTS),
        )
    ),
    "eval-task": Case(
        ("distill", "demo", "--to", "2x32", "--assistant", "none", *EVAL_TOPIC, *OWN_TEXT, *ON_TEXT)
    ),
    "tokenize": Case(("tokenize", "inputs/texts.txt", "--tokenizer", "demo", "--workers", "1")),
    "on-tokens": Case(
        (
            *("distill", "demo", "--to", "2x32", "--assistant", "none"),
            *("--data", "runs/tokenize", *ON_TEXT),
        )
    ),
    "on-own-text": Case(
        (
            *("distill", "demo", "--to", "2x32", "--assistant", "none"),
            *("--data", "inputs/texts.txt", *ON_TEXT),
        )
    ),
    # Distillation on a task
    "tinybert": Case(
        (
            *(
                "distill",
                "runs/teacher",
                "--to",
                "2x32",
                "--corpus",
                "inputs/texts.txt",
                "--augment",
            ),
            *(*ON_TOPIC, "--set", "augment.copies=2", "--set", "intermediate.max_steps=6"),
            *("--set", "general.overrides.train.max_steps=4"),
            *("--set", "general.overrides.train.batch_size=8"),
            *("--set", "general.overrides.data.held_out_blocks=16"),
        ),
        dry=True,
    ),
    "pkd": Case(
        (
            *("distill", "runs/teacher", "--to", "2x64", "--method", "pkd"),
            *("--also-teacher", "runs/teacher", *ON_TOPIC),
        )
    ),
    "joint": Case(
        (
            *("distill", "runs/teacher", "--to", "2x64", "--method", "minilm"),
            *("--set", "stage=joint", *ON_TOPIC),
        )
    ),
    "minilmv2-task": Case(
        ("distill", "runs/teacher", "--to", "2x64", "--method", "minilmv2", *ON_TOPIC)
    ),
    "soft-targets": Case(
        (
            *("distill", "runs/teacher", "--to", "1x64", "--method", "soft-targets"),
            *("--set", "keep=best", *ON_TOPIC, *HELD_OUT),
        )
    ),
    "soft-labels": Case(
        (
            *("distill", "--student", "demo", "--task", "own", "--data", "inputs/class"),
            *("--soft-labels", "inputs/soft.npy", "--method", "soft-targets", *SHORT),
        )
    ),
    "span-student": Case(
        (
            *("distill", "runs/span", "--to", "2x32", "--method", "soft-targets", "--task", "own"),
            *("--data", "inputs/span", "--set", "data.max_length=32", "--set", "data.stride=4"),
            *SHORT,
        )
    ),
    "score-student": Case(
        (
            *("distill", "runs/score", "--to", "2x32", "--task", "own"),
            *("--data", "inputs/score", *SHORT),
        )
    ),
    # Embedding models
    "embedding": Case(("distill", "demo", "--to", "2x32", *EMBEDDED, *EVAL_PAIRS), dry=True),
    "embedding-students": Case(("distill", "demo", "--to", "2x128", "--to", "1x64", *EMBEDDED)),
    "embedding-terms": Case(
        (
            *("distill", "demo", "--to", "2x32", *EMBEDDING, *ON_TEXT, *HELD_OUT, *ANCHORS),
            *("--data", "inputs/triples.jsonl"),
            *("--set", "loss.similarity_weight=0.5", "--set", "loss.contrastive_weight=0.5"),
            *("--set", "loss.relations_weight=0.5", "--set", "loss.hidden_weight=0.5"),
            *("--set", "loss.vectors=mse"),
        )
    ),
    "embedding-dense": Case(
        ("distill", "demo", "--to", "2x32", *EMBEDDED, "--set", "workload.dense=true")
    ),
    "embedding-cut": Case(
        (
            *("distill", "demo", "--to", "2x64", *EMBEDDED, "--set", "loss.dimensions=[64, 32]"),
            *("--set", "loss.similarity_weight=0.5"),
        )
    ),
    "embedding-student": Case(
        ("distill", "runs/embedding", "--student", "runs/cotrain-fresh/teacher", *EMBEDDED[2:])
    ),
    "embedding-vectors": Case(
        ("distill", "demo", "--to", "2x32", "--teacher-vectors", "inputs/vectors.npy", *EMBEDDED)
    ),
    "embedding-parquet": Case(
        (
            *("distill", "demo", "--to", "2x32", *EMBEDDED),
            *("--teacher-vectors", "inputs/vectors.parquet"),
        )
    ),
    # Rerankers
    "rerank": Case(("finetune", "demo", "--data", "inputs/lists", *RERANK), dry=True),
    "rerank-margins": Case(
        (
            *("distill", "runs/rerank", "--to", "2x32", "--data", "inputs/lists", *RERANK),
            *("--set", "workload.weight=0.7"),
        )
    ),
    "rerank-lists": Case(
        (
            *("distill", "runs/rerank", "--to", "2x32", "--data", "inputs/lists", *RERANK),
            *("--set", "workload.loss=listwise"),
        )
    ),
    "rerank-points": Case(
        (
            *("distill", "runs/rerank", "--to", "2x32", "--data", "inputs/lists", *RERANK),
            *("--set", "workload.loss=pointwise"),
        )
    ),
    "rerank-scores": Case(
        ("distill", "--student", "demo", "--data", "inputs/scored-lists", *RERANK)
    ),
    "rerank-embedder": Case(
        (
            *("distill", "runs/embedding", "--student", "demo", "--data", "inputs/lists", *RERANK),
            *("--set", "workload.loss=listwise", "--set", "workload.temperature=0.05"),
        )
    ),
    # Pruning
    "smp": Case(("prune", "demo", "--method", "smp", *ON_TOPIC), dry=True),
    "prunings": Case(
        (
            *("prune", "demo", "--method", "magnitude", "--method", "movement", "--method", "l0"),
            *("--sparsity", "0.5", "--sparsity", "0.9", *ON_TOPIC),
        )
    ),
    "cap": Case(("prune", "demo", "--method", "cap", "--teacher", "runs/teacher", *ON_TOPIC)),
    "soft-movement": Case(("prune", "demo", "--method", "soft-movement", *ON_TOPIC)),
    "smp-score": Case(
        (
            *("prune", "demo", "--method", "smp", "--task", "own", "--data", "inputs/score"),
            *(*SHORT, "--set", "head.kind=scratch"),
        )
    ),
    "prune-embedding": Case(
        (
            *("prune", "demo", "--task", "embedding", "--pooling", "mean", "--sparsity", "0.5"),
            *(*OWN_TEXT, *SHORT, *HELD_OUT, *ANCHORS, *EVAL_PAIRS),
        )
    ),
    "movement-embedding": Case(
        (
            *("prune", "runs/embedding", "--task", "embedding", "--method", "movement"),
            *("--sparsity", "0.5", *OWN_TEXT, *SHORT, *HELD_OUT, *ANCHORS),
        )
    ),
    "mask-apply": Case(("mask", "apply", "runs/smp/mask/mask.safetensors")),
    "mask-compact": Case(("mask", "compact", "runs/smp/mask/mask.safetensors")),
    # Cotraining
    "cotrain": Case(
        ("cotrain", "2x32", "1x32", "--base", "demo", "--data", "demo", *ON_TEXT, *HELD_OUT),
        dry=True,
    ),
    "cotrain-fresh": Case(
        (
            *("cotrain", "2x64", "1x64", "--vocab-size", "300", "--data", "inputs/texts.txt"),
            *("--set", "data.max_length=32", "--set", "data.mask.whole_words=true", *ON_TEXT),
        )
    ),
    "community": Case(
        (
            *("cotrain", "2x32", "1x32", "--community", "runs/cotrain/teacher"),
            *(*EVAL_TOPIC, *OWN_TEXT, *ON_TEXT),
        )
    ),
    "cotrain-task": Case(
        ("cotrain", "2x64", "1x64", "--base", "demo", *ON_TOPIC, *HELD_OUT), dry=True
    ),
    # Vocabularies
    "trim": Case(("trim", "demo", "--data", "inputs/texts.txt", "--vocab-size", "120", *CPU)),
    "trim-embedding": Case(("trim", "runs/embedding", "--data", "inputs/texts.txt", *CPU)),
    "trim-task": Case(("trim", "runs/teacher", "--data", "inputs/texts.txt", *CPU)),
    # Evaluation
    "evaluate": _evaluate("runs/teacher", "runs/pkd", task="demo-topic"),
    "evaluate-mask": Case(
        ("evaluate", "demo", "--mask", "runs/smp/mask/mask.safetensors", *TOPIC, *CPU)
    ),
    "evaluate-compact": _evaluate("runs/teacher", "runs/smp/compact", task="demo-topic"),
    "evaluate-exports": _evaluate(
        *("runs/teacher", "runs/onnx", "runs/onnx-int8", "runs/openvino"), task="demo-topic"
    ),
    "evaluate-generation": _evaluate("runs/generation", task="own", data="inputs/generation"),
    "evaluate-embedding": Case(
        (
            *("evaluate", "runs/embedding", "runs/embedding-dense", "runs/onnx-embedding"),
            *("--task", "own", "--data", "inputs/pairs", *CPU),
            *("--set", "data.columns={text: a, pair: b}"),
        )
    ),
    "evaluate-retrieval": _evaluate(
        "runs/embedding", "runs/embedding-students/1x64", task="retrieval", data="inputs/beir"
    ),
    "evaluate-rerank": _evaluate(
        *("runs/rerank", "runs/rerank-margins", "runs/onnx-rerank", "runs/embedding"),
        task="rerank",
        data="inputs/lists",
    ),
    # Export
    "onnx": _export("runs/teacher", "--format", "onnx", "--fp16"),
    "onnx-int8": _export(
        *("runs/teacher", "--format", "onnx", "--int8", *TOPIC),
        *("--set", "data.judged_rows=60"),
    ),
    "openvino": _export("runs/teacher", "--format", "openvino"),
    "onnx-encoder": _export("runs/minilm", "--format", "onnx", "--q4"),
    "onnx-embedding": _export("runs/embedding", "--format", "onnx"),
    "onnx-rerank": _export("runs/rerank", "--format", "onnx"),
    "benchmark": Case(
        (
            *("benchmark", "demo", "runs/pkd", "--batch-size", "1", "--seq-len", "16"),
            *(*MEASURE, *CPU),
        )
    ),
    # Compression
    "pipeline": Case(
        ("compress", "demo", "-r", "inputs/pipeline.yaml", "--set", "data.source=demo", *CPU)
    ),
    "search": Case(
        ("compress", "runs/teacher", "-r", "inputs/search.yaml", "--max-mb", "0.9", *CPU)
    ),
}
"""Name -> case, in the order in which they run, except that a case runs after those it needs."""
