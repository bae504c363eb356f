"""Written by `python -m tools.stub`."""

from pathlib import Path

from kdcli.deploy.sparse.load import load as load
from kdcli.report.finish import RunResult
from kdcli.report.publish import Published
from kdcli.verbs.export.run import Exported

__version__: str
VERBS: tuple[str, ...]

def distill(
    teacher: str | None = None,
    *,
    to: list[str] | None = None,
    method: str | None = None,
    task: str | None = None,
    student: str | None = None,
    general: str | None = None,
    corpus: str | None = None,
    more_teachers: list[str] | None = None,
    soft_labels: str | None = None,
    augment: bool | None = None,
    augment_model: str | None = None,
    glove: str | None = None,
    ablate: str | None = None,
    assistant: str | None = None,
    eval_task: list[str] | None = None,
    pooling: str | None = None,
    teacher_vectors: str | None = None,
    output_dir: Path | str | None = None,
    recipe: str | None = None,
    sets: list[str] | None = None,
    data: str | None = None,
    max_steps: int | None = None,
    epochs: float | None = None,
    batch_size: int | None = None,
    lr: float | None = None,
    seed: int | None = None,
    dtype: str | None = None,
    device: str = "auto",
    revision: str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    report_to: str = "none",
    push_to_hub: str | None = None,
    trust_remote_code: bool = False,
) -> RunResult:
    """Train a smaller student of an encoder: on unlabelled text (MiniLM, TinyBERT ...), or on a task with --task. The options are those of `kdcli distill`. Raises kdcli.errors.KdcliError."""

def prune(
    model: str | None = None,
    *,
    method: list[str] | None = None,
    sparsity: list[float] | None = None,
    masking: str | None = None,
    task: str | None = None,
    teacher: str | None = None,
    eval_task: list[str] | None = None,
    pooling: str | None = None,
    output_dir: Path | str | None = None,
    recipe: str | None = None,
    sets: list[str] | None = None,
    data: str | None = None,
    max_steps: int | None = None,
    epochs: float | None = None,
    batch_size: int | None = None,
    lr: float | None = None,
    seed: int | None = None,
    dtype: str | None = None,
    device: str = "auto",
    revision: str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    report_to: str = "none",
    push_to_hub: str | None = None,
    trust_remote_code: bool = False,
) -> RunResult:
    """Remove weights of an encoder while it learns a task (SMP and its baselines). The options are those of `kdcli prune`. Raises kdcli.errors.KdcliError."""

def cotrain(
    teacher: str | None = None,
    student: str | None = None,
    *,
    mode: str | None = None,
    weights: str | None = None,
    temperature: float | None = None,
    community: str | None = None,
    base: str | None = None,
    vocab_size: int | None = None,
    standalone: bool | None = None,
    task: str | None = None,
    eval_task: list[str] | None = None,
    output_dir: Path | str | None = None,
    recipe: str | None = None,
    sets: list[str] | None = None,
    data: str | None = None,
    max_steps: int | None = None,
    epochs: float | None = None,
    batch_size: int | None = None,
    lr: float | None = None,
    seed: int | None = None,
    dtype: str | None = None,
    device: str = "auto",
    revision: str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    report_to: str = "none",
    trust_remote_code: bool = False,
) -> RunResult:
    """Train two models in one loop that learn from each other: on unlabelled text, or on a task with --task. The options are those of `kdcli cotrain`. Raises kdcli.errors.KdcliError."""

def finetune(
    model: str | None = None,
    *,
    task: str | None = None,
    seeds: int | None = None,
    grid: list[str] | None = None,
    metric: list[str] | None = None,
    output_dir: Path | str | None = None,
    recipe: str | None = None,
    sets: list[str] | None = None,
    data: str | None = None,
    max_steps: int | None = None,
    epochs: float | None = None,
    batch_size: int | None = None,
    lr: float | None = None,
    seed: int | None = None,
    dtype: str | None = None,
    device: str = "auto",
    revision: str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    report_to: str = "none",
    push_to_hub: str | None = None,
    trust_remote_code: bool = False,
) -> RunResult:
    """Fine-tune an encoder on a labelled task and report what it scores. The options are those of `kdcli finetune`. Raises kdcli.errors.KdcliError."""

def evaluate(
    models: list[str] | None = None,
    *,
    task: str | None = None,
    mask_file: list[str] | None = None,
    predictions: Path | str | None = None,
    submission: Path | str | None = None,
    min_metric: list[str] | None = None,
    metric: list[str] | None = None,
    pooling: str | None = None,
    output_dir: Path | str | None = None,
    recipe: str | None = None,
    sets: list[str] | None = None,
    data: str | None = None,
    dtype: str | None = None,
    device: str = "auto",
    revision: str | None = None,
    overwrite: bool = False,
    trust_remote_code: bool = False,
) -> RunResult:
    """Evaluate fine-tuned models on a labelled task, or embedding models by their vectors, and compare them. The options are those of `kdcli evaluate`. Raises kdcli.errors.KdcliError."""

def benchmark(
    models: list[str] | None = None,
    *,
    baseline: str | None = None,
    preset: str | None = None,
    backend: list[str] | None = None,
    batch_size: list[int] | None = None,
    seq_len: list[int] | None = None,
    padding: str | None = None,
    task: str | None = None,
    compare: list[Path] | None = None,
    max_latency_ms: float | None = None,
    min_speedup: float | None = None,
    strict: bool = False,
    output_dir: Path | str | None = None,
    recipe: str | None = None,
    sets: list[str] | None = None,
    data: str | None = None,
    dtype: str | None = None,
    device: str = "auto",
    revision: str | None = None,
    overwrite: bool = False,
    trust_remote_code: bool = False,
) -> RunResult:
    """Measure latency of models or shapes beside a baseline, interleaved, on several backends. The options are those of `kdcli benchmark`. Raises kdcli.errors.KdcliError."""

def export(
    model: str,
    *,
    file_format: str,
    int8: bool = False,
    fp16: bool = False,
    q4: bool = False,
    max_drop: float | None = None,
    weights: bool = False,
    pooling: str | None = None,
    task: str | None = None,
    output_dir: Path | str | None = None,
    sets: list[str] | None = None,
    data: str | None = None,
    revision: str | None = None,
    overwrite: bool = False,
    push_to_hub: str | None = None,
    trust_remote_code: bool = False,
) -> Exported:
    """Write a model as ONNX or OpenVINO, compared with torch before it is kept. Several of --int8, --fp16 and --q4
    write their files beside the float32 one. The options are those of `kdcli export`. Raises kdcli.errors.KdcliError."""

def trim(
    model: str,
    *,
    vocab_size: int | None = None,
    output_dir: Path | str | None = None,
    sets: list[str] | None = None,
    data: str | None = None,
    device: str = "auto",
    revision: str | None = None,
    overwrite: bool = False,
    push_to_hub: str | None = None,
    trust_remote_code: bool = False,
) -> RunResult:
    """Remove the tokens that your text does not need from a model's vocabulary. The options are those of `kdcli trim`. Raises kdcli.errors.KdcliError."""

def compress(
    model: str | None = None,
    *,
    task: str | None = None,
    pooling: str | None = None,
    max_drop: float | None = None,
    speedup: float | None = None,
    max_latency_ms: float | None = None,
    max_mb: float | None = None,
    strict: bool | None = None,
    budget: str | None = None,
    output_dir: Path | str | None = None,
    recipe: str | None = None,
    sets: list[str] | None = None,
    data: str | None = None,
    seed: int | None = None,
    device: str = "auto",
    revision: str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    trust_remote_code: bool = False,
) -> RunResult:
    """Make a model smaller and faster until a goal is met: plan, distil, prune, export, judge, choose. The options are those of `kdcli compress`. Raises kdcli.errors.KdcliError."""

def push(directory: Path | str, repository: str, *, public: bool = False) -> Published:
    """Push a model directory or an export to the hub. The options are those of `kdcli push`. Raises kdcli.errors.KdcliError."""
