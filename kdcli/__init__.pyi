"""Written by `python -m tools.stub`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, overload

from kdcli.data.objects import Data
from kdcli.deploy.sparse.load import load as load
from kdcli.report.finish import RunResult
from kdcli.report.publish import Published, Upload
from kdcli.verbs.compress.front import Front
from kdcli.verbs.export.result import Exported

__version__: str
VERBS: tuple[str, ...]

def read(folder: Path | str) -> RunResult:
    """Return the result of a finished run, also of one whose result missed a limit.

    Raises kdcli.errors.UsageError: there is no run in `folder`, it is not finished, or its report
        is damaged or from another version of kdcli."""

def distill(
    teacher: Path | str | None = None,
    *,
    more_teachers: Path | str | Sequence[Path | str] | None = None,
    method: str | None = None,
    assistant: str | None = None,
    backend: str | None = None,
    to: str | Sequence[str] | None = None,
    student: Path | str | None = None,
    teacher_vectors: Path | str | None = None,
    ablate: str | None = None,
    data: Data | None = None,
    eval_task: str | Sequence[str] | None = None,
    pooling: str | None = None,
    task: str | None = None,
    soft_labels: Path | str | None = None,
    corpus: Data | None = None,
    general: Path | str | None = None,
    augment: bool | None = None,
    augment_model: Path | str | None = None,
    glove: Path | str | None = None,
    lr: float | None = None,
    max_steps: int | None = None,
    epochs: float | None = None,
    batch_size: int | None = None,
    seed: int | None = None,
    dtype: str | None = None,
    recipe: Path | str | None = None,
    sets: str | Sequence[str] | None = None,
    config: Mapping[str, Any] | None = None,
    revision: str | None = None,
    output_dir: Path | str | None = None,
    device: str = "auto",
    resume: bool = False,
    overwrite: bool = False,
    trust_remote_code: bool = False,
    report_to: str = "none",
    push_to_hub: str | None = None,
) -> RunResult:
    """Train a smaller student of an encoder: on unlabelled text, or on a task with --task.

    The arguments are the options of `kdcli distill`. Raises kdcli.errors.KdcliError."""

def prune(
    model: Path | str | None = None,
    *,
    method: str | Sequence[str] | None = None,
    sparsity: float | Sequence[float] | None = None,
    teacher: Path | str | None = None,
    masking: str | None = None,
    task: str | None = None,
    data: Data | None = None,
    pooling: str | None = None,
    eval_task: str | Sequence[str] | None = None,
    lr: float | None = None,
    max_steps: int | None = None,
    epochs: float | None = None,
    batch_size: int | None = None,
    seed: int | None = None,
    dtype: str | None = None,
    recipe: Path | str | None = None,
    sets: str | Sequence[str] | None = None,
    config: Mapping[str, Any] | None = None,
    revision: str | None = None,
    output_dir: Path | str | None = None,
    device: str = "auto",
    resume: bool = False,
    overwrite: bool = False,
    trust_remote_code: bool = False,
    report_to: str = "none",
    push_to_hub: str | None = None,
) -> RunResult:
    """Remove weights of an encoder while it learns a task (SMP and its baselines).

    The arguments are the options of `kdcli prune`. Raises kdcli.errors.KdcliError."""

def cotrain(
    teacher: Path | str | None = None,
    student: Path | str | None = None,
    *,
    base: Path | str | None = None,
    mode: str | None = None,
    weights: str | None = None,
    temperature: float | None = None,
    standalone: bool | None = None,
    vocab_size: int | None = None,
    community: Path | str | None = None,
    data: Data | None = None,
    eval_task: str | Sequence[str] | None = None,
    task: str | None = None,
    lr: float | None = None,
    max_steps: int | None = None,
    epochs: float | None = None,
    batch_size: int | None = None,
    seed: int | None = None,
    dtype: str | None = None,
    recipe: Path | str | None = None,
    sets: str | Sequence[str] | None = None,
    config: Mapping[str, Any] | None = None,
    revision: str | None = None,
    output_dir: Path | str | None = None,
    device: str = "auto",
    resume: bool = False,
    overwrite: bool = False,
    trust_remote_code: bool = False,
    report_to: str = "none",
) -> RunResult:
    """Train two models that learn from each other: on unlabelled text, or on a task with --task.

    The arguments are the options of `kdcli cotrain`. Raises kdcli.errors.KdcliError."""

def finetune(
    model: Path | str | None = None,
    *,
    seeds: int | None = None,
    grid: str | Sequence[str] | None = None,
    task: str | None = None,
    data: Data | None = None,
    metric: Path | str | Sequence[Path | str] | None = None,
    lr: float | None = None,
    max_steps: int | None = None,
    epochs: float | None = None,
    batch_size: int | None = None,
    seed: int | None = None,
    dtype: str | None = None,
    recipe: Path | str | None = None,
    sets: str | Sequence[str] | None = None,
    config: Mapping[str, Any] | None = None,
    revision: str | None = None,
    output_dir: Path | str | None = None,
    device: str = "auto",
    resume: bool = False,
    overwrite: bool = False,
    trust_remote_code: bool = False,
    report_to: str = "none",
    push_to_hub: str | None = None,
) -> RunResult:
    """Fine-tune an encoder on a labelled task, and evaluate it.

    The arguments are the options of `kdcli finetune`. Raises kdcli.errors.KdcliError."""

def evaluate(
    models: Path | str | Sequence[Path | str] | None = None,
    *,
    mask_file: Path | str | Sequence[Path | str] | None = None,
    documents: Path | str | None = None,
    predictions: Path | str | None = None,
    submission: Path | str | None = None,
    max_class_drop: float | None = None,
    min_metric: str | Sequence[str] | None = None,
    task: str | None = None,
    pooling: str | None = None,
    metric: Path | str | Sequence[Path | str] | None = None,
    data: Data | None = None,
    recipe: Path | str | None = None,
    sets: str | Sequence[str] | None = None,
    config: Mapping[str, Any] | None = None,
    dtype: str | None = None,
    revision: str | None = None,
    output_dir: Path | str | None = None,
    device: str = "auto",
    overwrite: bool = False,
    trust_remote_code: bool = False,
) -> RunResult:
    """Evaluate fine-tuned models on a labelled task, or embedding models, and compare them.

    The arguments are the options of `kdcli evaluate`. Raises kdcli.errors.KdcliError."""

def benchmark(
    models: Path | str | Sequence[Path | str] | None = None,
    *,
    baseline: Path | str | None = None,
    preset: str | None = None,
    backend: str | Sequence[str] | None = None,
    dtype: str | None = None,
    batch_size: int | Sequence[int] | None = None,
    seq_len: int | Sequence[int] | None = None,
    padding: str | None = None,
    compare: Path | str | Sequence[Path | str] | None = None,
    max_latency_ms: float | None = None,
    min_speedup: float | None = None,
    strict: bool = False,
    task: str | None = None,
    data: Data | None = None,
    recipe: Path | str | None = None,
    sets: str | Sequence[str] | None = None,
    config: Mapping[str, Any] | None = None,
    revision: str | None = None,
    output_dir: Path | str | None = None,
    device: str = "auto",
    overwrite: bool = False,
    trust_remote_code: bool = False,
    price_per_hour: float | None = None,
) -> RunResult:
    """Measure the latency of models or shapes next to a baseline, on several backends.

    The arguments are the options of `kdcli benchmark`. Raises kdcli.errors.KdcliError."""

def export(
    model: Path | str,
    *,
    file_format: str,
    int8: bool = False,
    fp16: bool = False,
    q4: bool = False,
    weights: bool = False,
    max_drop: float | None = None,
    data: Data | None = None,
    pooling: str | None = None,
    task: str | None = None,
    sets: str | Sequence[str] | None = None,
    config: Mapping[str, Any] | None = None,
    revision: str | None = None,
    output_dir: Path | str | None = None,
    overwrite: bool = False,
    trust_remote_code: bool = False,
    push_to_hub: str | None = None,
) -> Exported:
    """Export a model to ONNX or OpenVINO, and compare its outputs with torch.

    If you give more than one of --int8, --fp16 and --q4, the float32 file is written too.

    The arguments are the options of `kdcli export`. Raises kdcli.errors.KdcliError."""

def trim(
    model: Path | str,
    *,
    vocab_size: int | None = None,
    max_drop: float | None = None,
    task: str | None = None,
    pooling: str | None = None,
    data: Data | None = None,
    sets: str | Sequence[str] | None = None,
    config: Mapping[str, Any] | None = None,
    revision: str | None = None,
    output_dir: Path | str | None = None,
    device: str = "auto",
    overwrite: bool = False,
    trust_remote_code: bool = False,
    push_to_hub: str | None = None,
) -> RunResult:
    """Remove the tokens that your text does not need from a model's vocabulary.

    The arguments are the options of `kdcli trim`. Raises kdcli.errors.KdcliError."""

@overload
def compress(
    model: Path | str | None = None,
    *,
    budget: str | None = None,
    max_drop: float | None = None,
    max_class_drop: float | None = None,
    speedup: float | None = None,
    max_latency_ms: float | None = None,
    max_mb: float | None = None,
    strict: bool | None = None,
    task: str | None = None,
    pooling: str | None = None,
    data: Data | None = None,
    seed: int | None = None,
    recipe: Path | str | None = None,
    sets: str | Sequence[str] | None = None,
    config: Mapping[str, Any] | None = None,
    front: Path | str,
    revision: str | None = None,
    output_dir: Path | str | None = None,
    device: str = "auto",
    resume: bool = False,
    overwrite: bool = False,
    trust_remote_code: bool = False,
    price_per_hour: float | None = None,
) -> Front:
    """Distill, prune and export a model until it is small and fast enough for a goal.

    The arguments are the options of `kdcli compress`. Raises kdcli.errors.KdcliError."""

@overload
def compress(
    model: Path | str | None = None,
    *,
    budget: str | None = None,
    max_drop: float | None = None,
    max_class_drop: float | None = None,
    speedup: float | None = None,
    max_latency_ms: float | None = None,
    max_mb: float | None = None,
    strict: bool | None = None,
    task: str | None = None,
    pooling: str | None = None,
    data: Data | None = None,
    seed: int | None = None,
    recipe: Path | str | None = None,
    sets: str | Sequence[str] | None = None,
    config: Mapping[str, Any] | None = None,
    front: None = None,
    revision: str | None = None,
    output_dir: Path | str | None = None,
    device: str = "auto",
    resume: bool = False,
    overwrite: bool = False,
    trust_remote_code: bool = False,
    price_per_hour: float | None = None,
) -> RunResult:
    """Distill, prune and export a model until it is small and fast enough for a goal.

    The arguments are the options of `kdcli compress`. Raises kdcli.errors.KdcliError."""

@overload
def push(
    directory: Path | str,
    repository: str,
    *,
    public: bool = False,
    with_report: bool = False,
    dry_run: Literal[True],
) -> Upload:
    """Push a model or an export to the hub, with its card and nothing else.

    The arguments are the options of `kdcli push`. Raises kdcli.errors.KdcliError."""

@overload
def push(
    directory: Path | str,
    repository: str,
    *,
    public: bool = False,
    with_report: bool = False,
    dry_run: Literal[False] = False,
) -> Published:
    """Push a model or an export to the hub, with its card and nothing else.

    The arguments are the options of `kdcli push`. Raises kdcli.errors.KdcliError."""
