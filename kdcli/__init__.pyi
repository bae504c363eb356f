"""Written by `python -m tools.stub`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, overload

from transformers import PreTrainedTokenizerBase

from kdcli.data.objects import Data, Model
from kdcli.deploy.usable import load as load
from kdcli.report.finish import RunResult
from kdcli.report.publish import Published, Upload
from kdcli.verbs.compress.compress_candidates import Front
from kdcli.verbs.export.run import Exported

__version__: str
VERBS: tuple[str, ...]

def read(folder: Path | str) -> RunResult:
    """Return the result of a finished run, also of one whose result missed a limit.

    Raises kdcli.errors.UsageError: there is no run in `folder`, it is not finished, or its report
        is damaged or from another version of kdcli."""

def distill(
    teacher: Model | None = None,
    *,
    teacher_vectors: str | None = None,
    more_teachers: Model | Sequence[Model] | None = None,
    method: str | None = None,
    assistant: str | None = None,
    backend: str | None = None,
    to: str | Sequence[str] | None = None,
    student: Model | None = None,
    ablate: str | None = None,
    task: str | None = None,
    pooling: str | None = None,
    data: Data | None = None,
    eval_task: str | Sequence[str] | None = None,
    soft_labels: Path | str | None = None,
    corpus: Data | None = None,
    general: Path | str | None = None,
    augment: bool | None = None,
    augment_model: Model | None = None,
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
    tokenizer: PreTrainedTokenizerBase | None = None,
    revision: str | None = None,
    output_dir: Path | str | None = None,
    device: str = "auto",
    resume: bool = False,
    overwrite: bool = False,
    trust_remote_code: bool = False,
    strict_data: bool = False,
    report_to: str = "none",
    push_to_hub: str | None = None,
) -> RunResult:
    """Train a smaller student of an encoder: on unlabelled text, or on a task with --task.

    The arguments are the options of `kdcli distill`. Raises kdcli.errors.KdcliError.

    Args:
        teacher: Teacher: a hub id, a directory, 'demo' or 'demo-classifier'. Or a model in
            memory.
        teacher_vectors: Vectors of the teacher: a file, directory, pattern, URL or hub data set
            (default: computed).
        more_teachers: Further teacher with the same weight, on a task or of an embedding student;
            may be repeated. Or a model in memory.
        method: Method (distilbert, embedding, masked-lm, minilm, minilmv2, mlm-kd, pkd, soft-
            targets or tinybert; default: minilm on text, embedding for embedding models, tinybert
            on a task).
        assistant: Shape of a teacher assistant, a model between teacher and student that is
            trained first; auto or none (default: auto).
        backend: Backend on which shapes are timed for --to 2x or --to 5ms: torch, compile, onnx
            or openvino, perhaps with a number format, such as onnx-int8 (default: torch).
        to: Layers x width of the student, such as 6x768, or static:256; may be repeated. Or a
            goal, 2x or 5ms: the best student that is fast enough on 128 tokens. Or family, or
            6x384,3x384: one training of students that share their layers.
        student: Encoder that the student starts from; on text, only with method embedding
            (default: the teacher). Or a model in memory.
        ablate: List of variants to train and compare in one table.
        task: Task: sst2, mnli, squad ..., or 'own' for your own files.
        pooling: Pooling of an embedding model without modules.json (mean, cls or last; default:
            the model's own).
        data: Text, or rows of a task: a hub id (or ID@REV), a file, a directory, a URL or 'demo'
            (default: WikiText-103, or the task's own data). Or an object, such as a DataFrame.
        eval_task: Tasks on which the report also compares all models; may be repeated.
        soft_labels: File of the rows' probabilities or scores, in place of a teacher (default:
            none).
        corpus: Text to distil on first (default: the recipe's). Or an object, such as a
            DataFrame.
        general: Directory of the run on text, which is reused once it is done (default: general/
            in the output directory).
        augment: Also train on copies of the examples with some words replaced.
        augment_model: Masked language model that proposes words (default: nearest neighbours). Or
            a model in memory.
        glove: Word vectors for words of several tokens (default: the teacher's embeddings).
        lr: Peak learning rate (default: 3e-4 on text, 5e-4 for embedding models, 3e-5 on a task
            or for rerankers).
        max_steps: Optimiser steps, instead of --epochs (default: all steps of the epochs).
        epochs: Epochs (default: 3; 1 for embedding models).
        batch_size: Rows per optimiser step, over all devices and micro-batches (default: 256 on
            text, 64 for embedding models, 32 on a task or for rerankers).
        seed: Seed of everything random: heads, order, dropout (default: 0).
        dtype: Number format of the computation (auto, fp32, bf16 or fp16; default: auto).
        recipe: Shipped recipe (kdcli recipes ls), or a YAML file.
        sets: Set any key of the recipe; may be repeated.
        config: Recipe keys as nested dicts, with the values of --set.
        tokenizer: Tokenizer of the models that are given as PreTrainedModel objects.
        revision: Branch, tag or commit of the model, like MODEL@REV.
        output_dir: Output directory (default: a new directory in runs/).
        device: Device: auto, cpu, cuda, mps, xpu or cuda:INDEX (default: auto).
        resume: Continue the run in the output directory (default: the newest unfinished run in
            runs/ with this recipe).
        overwrite: Delete the run in the output directory first.
        trust_remote_code: Run code that comes with the model.
        strict_data: Refuse data with rows that are empty, bad, repeated, or trained on.
        report_to: Experiment tracker that follows the run (none, all, aim, clearml, comet_ml,
            dvclive, mlflow, swanlab, tensorboard, trackio or wandb; default: none).
        push_to_hub: Repository to push the model to, private if it is new."""

def prune(
    model: Model | None = None,
    *,
    ablate: str | None = None,
    seeds: int | None = None,
    method: str | Sequence[str] | None = None,
    sparsity: float | Sequence[float] | None = None,
    teacher: Model | None = None,
    masking: str | None = None,
    task: str | None = None,
    pooling: str | None = None,
    data: Data | None = None,
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
    tokenizer: PreTrainedTokenizerBase | None = None,
    revision: str | None = None,
    output_dir: Path | str | None = None,
    device: str = "auto",
    resume: bool = False,
    overwrite: bool = False,
    trust_remote_code: bool = False,
    strict_data: bool = False,
    report_to: str = "none",
    push_to_hub: str | None = None,
) -> RunResult:
    """Remove weights of an encoder while it learns a task.

    The arguments are the options of `kdcli prune`. Raises kdcli.errors.KdcliError.

    Args:
        model: Encoder: a hub id, a directory, 'demo' or 'demo-classifier' (default: bert-base-
            uncased). Or a model in memory.
        ablate: List of variants to train and compare in one table.
        seeds: Number of runs per variant, each with its own seed (default: 1).
        method: Pruning method; may be repeated, one run for each. smp keeps the values of the
            weights and trains a score for each; the others also train the weights (cap, l0,
            magnitude, movement, smp or soft-movement; default: smp).
        sparsity: Share of the layers' weights to remove; may be repeated, one run for each
            (default: 0.9).
        teacher: Model fine-tuned on the task, whose outputs are also learned (default: none). Or
            a model in memory.
        masking: Where weights compete to be kept: local in each matrix, global all together;
            proportional keeps more of a matrix with higher scores; threshold keeps all scores
            above a number (local, global, proportional or threshold; default: the method's).
        task: Task: sst2, mnli, squad ..., or 'own' for your own files (default: sst2).
        pooling: Pooling of an embedding model without modules.json (mean, cls or last; default:
            the model's own).
        data: Texts or rows of a task, with or without labels: a hub id (or ID@REV), a file, a
            directory, or 'demo' (default: the task's own data). Or an object, such as a
            DataFrame.
        eval_task: Tasks on which the report also compares all models; may be repeated.
        lr: Peak learning rate; with smp, of the weights' scores (default: the method's).
        max_steps: Optimiser steps, instead of --epochs (default: all steps of the epochs).
        epochs: Passes over the training data (default: 3).
        batch_size: Rows per optimiser step, over all devices and micro-batches (default: 32).
        seed: Seed of everything random: heads, order, dropout (default: 0).
        dtype: Number format of the computation (auto, fp32, bf16 or fp16; default: auto).
        recipe: Shipped recipe (kdcli recipes ls), or a YAML file.
        sets: Set any key of the recipe; may be repeated.
        config: Recipe keys as nested dicts, with the values of --set.
        tokenizer: Tokenizer of the models that are given as PreTrainedModel objects.
        revision: Branch, tag or commit of the model, like MODEL@REV.
        output_dir: Output directory (default: a new directory in runs/).
        device: Device: auto, cpu, cuda, mps, xpu or cuda:INDEX (default: auto).
        resume: Continue the run in the output directory (default: the newest unfinished run in
            runs/ with this recipe).
        overwrite: Delete the run in the output directory first.
        trust_remote_code: Run code that comes with the model.
        strict_data: Refuse data with rows that are empty, bad, repeated, or trained on.
        report_to: Experiment tracker that follows the run (none, all, aim, clearml, comet_ml,
            dvclive, mlflow, swanlab, tensorboard, trackio or wandb; default: none).
        push_to_hub: Repository to push the model to, private if it is new."""

def cotrain(
    teacher: Model | None = None,
    student: Model | None = None,
    *,
    base: Model | None = None,
    mode: str | None = None,
    weights: str | None = None,
    temperature: float | None = None,
    standalone: bool | None = None,
    ablate: str | None = None,
    seeds: int | None = None,
    vocab_size: int | None = None,
    community: Model | None = None,
    task: str | None = None,
    data: Data | None = None,
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
    tokenizer: PreTrainedTokenizerBase | None = None,
    revision: str | None = None,
    output_dir: Path | str | None = None,
    device: str = "auto",
    resume: bool = False,
    overwrite: bool = False,
    trust_remote_code: bool = False,
    strict_data: bool = False,
    report_to: str = "none",
) -> RunResult:
    """Train two models that learn from each other: on unlabelled text, or on a task with --task.

    The arguments are the options of `kdcli cotrain`. Raises kdcli.errors.KdcliError.

    Args:
        teacher: Teacher: a hub id, a directory, or a shape such as 4x128: 4 layers of width 128.
            Or a model in memory.
        student: Student: a hub id, a directory, or a shape such as 2x64. Or a model in memory.
        base: Model that gives shapes their tokenizer and configuration, and on a task their
            weights too (default: the teacher on a task, none on text). Or a model in memory.
        mode: Who learns from whom; one-way: the student only; reversed: the teacher only
            (standalone, one-way, reversed or co-distillation; default: co-distillation).
        weights: Weights of the losses: student against labels, student from teacher, teacher
            against labels, teacher from student; the mode sets some of them to 0 (default: 1, 1,
            1, 4).
        temperature: Temperature of both softmaxes (default: 1).
        standalone: Also train both models without each other, for comparison (default:
            --standalone).
        ablate: List of variants to train and compare in one table.
        seeds: Number of runs per variant, each with its own seed (default: 1).
        vocab_size: Number of tokens of a tokenizer that is trained from the text (default:
            30522).
        community: Frozen teacher of both models, from which shapes are copied (default: none). Or
            a model in memory.
        task: Task: sst2, mnli, squad ..., or 'own' for your own files.
        data: Text, or rows of a task: a hub id (or ID@REV), a file, a directory, a URL or 'demo'
            (default: WikiText-103, or the task's own data). Or an object, such as a DataFrame.
        eval_task: Tasks on which the report also compares all models; may be repeated.
        lr: Peak learning rate (default: 5e-4 on text, 3e-5 on a task).
        max_steps: Optimiser steps, instead of --epochs (default: all steps of the epochs).
        epochs: Epochs (default: 10 on text, 3 on a task).
        batch_size: Rows per optimiser step, over all devices and micro-batches (default: 128 on
            text, 32 on a task).
        seed: Seed of everything random: heads, order, dropout (default: 0).
        dtype: Number format of the computation (auto, fp32, bf16 or fp16; default: auto).
        recipe: Shipped recipe (kdcli recipes ls), or a YAML file.
        sets: Set any key of the recipe; may be repeated.
        config: Recipe keys as nested dicts, with the values of --set.
        tokenizer: Tokenizer of the models that are given as PreTrainedModel objects.
        revision: Branch, tag or commit of the model, like MODEL@REV.
        output_dir: Output directory (default: a new directory in runs/).
        device: Device: auto, cpu, cuda, mps, xpu or cuda:INDEX (default: auto).
        resume: Continue the run in the output directory (default: the newest unfinished run in
            runs/ with this recipe).
        overwrite: Delete the run in the output directory first.
        trust_remote_code: Run code that comes with the model.
        strict_data: Refuse data with rows that are empty, bad, repeated, or trained on.
        report_to: Experiment tracker that follows the run (none, all, aim, clearml, comet_ml,
            dvclive, mlflow, swanlab, tensorboard, trackio or wandb; default: none)."""

def finetune(
    model: Model | None = None,
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
    tokenizer: PreTrainedTokenizerBase | None = None,
    revision: str | None = None,
    output_dir: Path | str | None = None,
    device: str = "auto",
    resume: bool = False,
    overwrite: bool = False,
    trust_remote_code: bool = False,
    strict_data: bool = False,
    report_to: str = "none",
    push_to_hub: str | None = None,
) -> RunResult:
    """Fine-tune an encoder on a labelled task, and evaluate it.

    The arguments are the options of `kdcli finetune`. Raises kdcli.errors.KdcliError.

    Args:
        model: Encoder: a hub id, a directory, 'demo' or 'demo-classifier'. Or a model in memory.
        seeds: Number of runs per setting, each with its own seed (default: 1).
        grid: Values to try, such as lr=2e-5,3e-5; may be repeated.
        task: Task: sst2, mnli, squad ..., or 'own' for your own files.
        data: Data of the task: a hub id (or ID@REV), a file, a directory, or 'demo' (default: the
            task's own). Or an object, such as a DataFrame.
        metric: Additional metric of the evaluate library: a name, script or directory; may be
            repeated.
        lr: Peak learning rate (default: 3e-5).
        max_steps: Optimiser steps, instead of --epochs (default: all steps of the epochs).
        epochs: Passes over the training data (default: 3).
        batch_size: Rows per optimiser step, over all devices and micro-batches (default: 32).
        seed: Seed of everything random: heads, order, dropout (default: 0).
        dtype: Number format of the computation (auto, fp32, bf16 or fp16; default: auto).
        recipe: Shipped recipe (kdcli recipes ls), or a YAML file.
        sets: Set any key of the recipe; may be repeated.
        config: Recipe keys as nested dicts, with the values of --set.
        tokenizer: Tokenizer of the models that are given as PreTrainedModel objects.
        revision: Branch, tag or commit of the model, like MODEL@REV.
        output_dir: Output directory (default: a new directory in runs/).
        device: Device: auto, cpu, cuda, mps, xpu or cuda:INDEX (default: auto).
        resume: Continue the run in the output directory (default: the newest unfinished run in
            runs/ with this recipe).
        overwrite: Delete the run in the output directory first.
        trust_remote_code: Run code that comes with the model.
        strict_data: Refuse data with rows that are empty, bad, repeated, or trained on.
        report_to: Experiment tracker that follows the run (none, all, aim, clearml, comet_ml,
            dvclive, mlflow, swanlab, tensorboard, trackio or wandb; default: none).
        push_to_hub: Repository to push the model to, private if it is new."""

def evaluate(
    models: Model | Sequence[Model] | None = None,
    *,
    mask_file: Path | str | Sequence[Path | str] | None = None,
    documents: Model | None = None,
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
    tokenizer: PreTrainedTokenizerBase | None = None,
    dtype: str | None = None,
    revision: str | None = None,
    output_dir: Path | str | None = None,
    device: str = "auto",
    overwrite: bool = False,
    trust_remote_code: bool = False,
    strict_data: bool = False,
) -> RunResult:
    """Evaluate fine-tuned models on a labelled task, or embedding models, and compare them.

    The arguments are the options of `kdcli evaluate`. Raises kdcli.errors.KdcliError.

    Args:
        models: Fine-tuned models, embedding models or exports; the others are compared with the
            first. Or a model in memory.
        mask_file: Mask file of kdcli prune, applied to the model before it is evaluated; may be
            repeated.
        documents: In retrieval, search the documents' vectors of this model, or of a .npy file
            with a row for each document (default: each model's own). Or a model in memory.
        predictions: Write every prediction to this jsonl file.
        submission: Write the GLUE server's files for the test split to this directory.
        max_class_drop: Maximum drop of any class, label or entity type, in points (1 point =
            0.01), below the first model or the teacher; exit code 5.
        min_metric: Exit with 5 if a model scores less; may be repeated.
        task: Task: sst2, mnli, squad ..., or 'own' for your own files.
        pooling: Pooling of an embedding model without modules.json (mean, cls or last; default:
            the model's own).
        metric: Additional metric of the evaluate library: a name, script or directory; may be
            repeated.
        data: Texts or rows of a task, with or without labels: a hub id (or ID@REV), a file, a
            directory, or 'demo' (default: the task's own data). Or an object, such as a
            DataFrame.
        recipe: Shipped recipe (kdcli recipes ls), or a YAML file.
        sets: Set any key of the recipe; may be repeated.
        config: Recipe keys as nested dicts, with the values of --set.
        tokenizer: Tokenizer of the models that are given as PreTrainedModel objects.
        dtype: Number format of the computation (auto, fp32, bf16 or fp16; default: fp32).
        revision: Branch, tag or commit of the model, like MODEL@REV.
        output_dir: Output directory (default: a new directory in runs/).
        device: Device: auto, cpu, cuda, mps, xpu or cuda:INDEX (default: auto).
        overwrite: Delete the run in the output directory first.
        trust_remote_code: Run code that comes with the model.
        strict_data: Refuse data with rows that are empty, bad, repeated, or trained on."""

def benchmark(
    models: Model | Sequence[Model] | None = None,
    *,
    baseline: Model | None = None,
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
    tokenizer: PreTrainedTokenizerBase | None = None,
    revision: str | None = None,
    output_dir: Path | str | None = None,
    device: str = "auto",
    overwrite: bool = False,
    trust_remote_code: bool = False,
    strict_data: bool = False,
    price_per_hour: float | None = None,
) -> RunResult:
    """Measure the latency of models or shapes next to a baseline, on several backends.

    The arguments are the options of `kdcli benchmark`. Raises kdcli.errors.KdcliError.

    Args:
        models: Hub ids, directories, or shapes such as 6x384: 6 layers of width 384. Or a model
            in memory.
        baseline: Model to compare with (default: the first). Or a model in memory.
        preset: List of models, batch sizes and lengths to measure where you give none (papers,
            minilm, tinybert or serving; default: papers, if you give no model).
        backend: Backend: torch, sparse, compile, onnx or openvino, perhaps with a number format,
            such as onnx-int8; may be repeated (default: torch).
        dtype: Number format of the baseline, and of backends without one of their own (fp32, bf16
            or fp16; default: fp32).
        batch_size: Sequences per call; may be repeated (default: the preset's, or 1 and 8).
        seq_len: Tokens per sequence; may be repeated (default: the preset's, or 128).
        padding: Lengths of the sequences in a batch; data takes --data's (full, random or data;
            default: full).
        compare: Compare the reports of runs and measure nothing; may be repeated.
        max_latency_ms: Exit with 5 if the median at the first batch size and length is above
            this.
        min_speedup: Exit with 5 if the speed-up at the first batch size and length is below this.
        strict: Exit with 6 if a measurement is unstable.
        task: Task on which every backend is evaluated too (default: none).
        data: Text, or with a task its examples: a hub id (or ID@REV), a file, a directory, or
            'demo' (default: the task's own, or 'demo'). Or an object, such as a DataFrame.
        recipe: Shipped recipe (kdcli recipes ls), or a YAML file.
        sets: Set any key of the recipe; may be repeated.
        config: Recipe keys as nested dicts, with the values of --set.
        tokenizer: Tokenizer of the models that are given as PreTrainedModel objects.
        revision: Branch, tag or commit of the model, like MODEL@REV.
        output_dir: Output directory (default: a new directory in runs/).
        device: Device: auto, cpu, cuda, mps, xpu or cuda:INDEX (default: auto).
        overwrite: Delete the run in the output directory first.
        trust_remote_code: Run code that comes with the model.
        strict_data: Refuse data with rows that are empty, bad, repeated, or trained on.
        price_per_hour: Price of this machine per hour, in any currency; the report then gives the
            cost of a million texts."""

def export(
    model: Model,
    *,
    file_format: str = "onnx",
    int8: bool = False,
    fp16: bool = False,
    q4: bool = False,
    pack: bool = False,
    steps: int = 0,
    weights: bool = False,
    max_drop: float | None = None,
    data: Data | None = None,
    pooling: str | None = None,
    task: str | None = None,
    sets: str | Sequence[str] | None = None,
    config: Mapping[str, Any] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    revision: str | None = None,
    output_dir: Path | str | None = None,
    overwrite: bool = False,
    trust_remote_code: bool = False,
    strict_data: bool = False,
    push_to_hub: str | None = None,
) -> Exported:
    """Export a model to ONNX or OpenVINO, and compare its outputs with torch.

    If you give more than one of --int8, --fp16 and --q4, the float32 file is written too.

    The arguments are the options of `kdcli export`. Raises kdcli.errors.KdcliError.

    Args:
        model: Model: a hub id, a directory, 'demo' or 'demo-classifier'; its head is exported
            too. Or a model in memory.
        file_format: Format of the file (onnx or openvino; default: onnx).
        int8: Quantise to 8 bits.
        fp16: Convert to half precision; ONNX only.
        q4: Quantise weights to 4 bits; ONNX only.
        pack: Store the matrices of --int8, and its embedding tables of at least 4,096 rows, in
            about half the size at the same speed; ONNX only.
        steps: Number of steps for training the packed weights on texts of --data, so that the
            file's outputs come closer to the model's (default: 0).
        weights: Write model.safetensors too.
        max_drop: Maximum drop of the task metric, in points (1 point = 0.01; --max-drop 1% too);
            kdcli keeps matrix products in float32 where needed.
        data: Data on which each file is compared with torch: the task's examples, or text
            (default: the task's own data, or the data of the model's training run). Or an object,
            such as a DataFrame.
        pooling: Pooling of an embedding model without modules.json (mean, cls or last; default:
            the model's own).
        task: Task on which the file is evaluated (default: none).
        sets: Set any key of the recipe; may be repeated.
        config: Recipe keys as nested dicts, with the values of --set.
        tokenizer: Tokenizer of the models that are given as PreTrainedModel objects.
        revision: Branch, tag or commit of the model, like MODEL@REV.
        output_dir: Output directory (default: a new directory in runs/).
        overwrite: Delete the run in the output directory first.
        trust_remote_code: Run code that comes with the model.
        strict_data: Refuse data with rows that are empty, bad, repeated, or trained on.
        push_to_hub: Repository to push the model to, private if it is new."""

def trim(
    model: Model,
    *,
    vocab_size: int | None = None,
    max_drop: float | None = None,
    task: str | None = None,
    pooling: str | None = None,
    data: Data | None = None,
    sets: str | Sequence[str] | None = None,
    config: Mapping[str, Any] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    revision: str | None = None,
    output_dir: Path | str | None = None,
    device: str = "auto",
    overwrite: bool = False,
    trust_remote_code: bool = False,
    strict_data: bool = False,
    push_to_hub: str | None = None,
) -> RunResult:
    """Remove the tokens that your text does not need from a model's vocabulary.

    The arguments are the options of `kdcli trim`. Raises kdcli.errors.KdcliError.

    Args:
        model: Model: a hub id, a directory, 'demo' or 'demo-classifier'; its head is kept. Or a
            model in memory.
        vocab_size: Number of tokens to keep (default: every token that occurs in the data).
        max_drop: Keep the fewest tokens with which the score drops by at most this many points (1
            point = 0.01): the task's metric, or agreement with the model if there are no labels.
        task: Task: sst2, mnli, squad ..., or 'own' for your own files.
        pooling: Pooling of an embedding model without modules.json (mean, cls or last; default:
            the model's own).
        data: Text whose tokens are kept: a hub id (or ID@REV), a file, a directory, a URL, or
            'demo'. Or an object, such as a DataFrame.
        sets: Set any key of the recipe; may be repeated.
        config: Recipe keys as nested dicts, with the values of --set.
        tokenizer: Tokenizer of the models that are given as PreTrainedModel objects.
        revision: Branch, tag or commit of the model, like MODEL@REV.
        output_dir: Output directory (default: a new directory in runs/).
        device: Device: auto, cpu, cuda, mps, xpu or cuda:INDEX (default: auto).
        overwrite: Delete the run in the output directory first.
        trust_remote_code: Run code that comes with the model.
        strict_data: Refuse data with rows that are empty, bad, repeated, or trained on.
        push_to_hub: Repository to push the model to, private if it is new."""

def adapt(
    model: Model,
    *,
    index: str | None = None,
    index_model: Model | None = None,
    encodes: str | None = None,
    pooling: str | None = None,
    data: Data | None = None,
    sets: str | Sequence[str] | None = None,
    config: Mapping[str, Any] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    revision: str | None = None,
    output_dir: Path | str | None = None,
    device: str = "auto",
    overwrite: bool = False,
    trust_remote_code: bool = False,
    strict_data: bool = False,
    push_to_hub: str | None = None,
) -> RunResult:
    """Map a new embedding model's vectors into an old index, so that the index can stay.

    The arguments are the options of `kdcli adapt`. Raises kdcli.errors.KdcliError.

    Args:
        model: New embedding model: a hub id, a directory, or 'demo'. Or a model in memory.
        index: Vectors of the texts by the old model: a .npy, .safetensors, .parquet, .arrow or
            .jsonl file, a directory or pattern of shards, a URL, or a hub data set.
        index_model: Old model, if it is at hand: kdcli checks that it made the index. Or a model
            in memory.
        encodes: What the adapted model encodes: new queries, which search the old index, or new
            documents, which the old model's queries search (queries or documents; default:
            queries).
        pooling: Pooling of an embedding model without modules.json (mean, cls or last; default:
            the model's own).
        data: Texts of the index: a file, a directory, a hub id or a URL. With a directory in
            BEIR's format, its queries and their relevant documents are scored too. Or an object,
            such as a DataFrame.
        sets: Set any key of the recipe; may be repeated.
        config: Recipe keys as nested dicts, with the values of --set.
        tokenizer: Tokenizer of the models that are given as PreTrainedModel objects.
        revision: Branch, tag or commit of the model, like MODEL@REV.
        output_dir: Output directory (default: a new directory in runs/).
        device: Device: auto, cpu, cuda, mps, xpu or cuda:INDEX (default: auto).
        overwrite: Delete the run in the output directory first.
        trust_remote_code: Run code that comes with the model.
        strict_data: Refuse data with rows that are empty, bad, repeated, or trained on.
        push_to_hub: Repository to push the model to, private if it is new."""

@overload
def compress(
    model: Model | None = None,
    *,
    budget: str | None = None,
    max_drop: float | None = None,
    max_class_drop: float | None = None,
    speedup: float | None = None,
    max_latency_ms: float | None = None,
    max_mb: float | None = None,
    strict: bool | None = None,
    cascade: bool | None = None,
    task: str | None = None,
    pooling: str | None = None,
    data: Data | None = None,
    seed: int | None = None,
    recipe: Path | str | None = None,
    sets: str | Sequence[str] | None = None,
    config: Mapping[str, Any] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    front: Path | str,
    revision: str | None = None,
    output_dir: Path | str | None = None,
    device: str = "auto",
    resume: bool = False,
    overwrite: bool = False,
    trust_remote_code: bool = False,
    strict_data: bool = False,
    price_per_hour: float | None = None,
) -> Front:
    """Distill, prune and export a model until it is small and fast enough for a goal.

    The arguments are the options of `kdcli compress`. Raises kdcli.errors.KdcliError.

    Args:
        model: Model: a hub id, a directory, 'demo' or 'demo-classifier'; fine-tuned or not. Or a
            model in memory.
        budget: Time limit, such as 90s, 30m or 2h (default: none).
        max_drop: Maximum drop of the task metric, in points (1 point = 0.01; --max-drop 1% too);
            without labels, of agreement with MODEL.
        max_class_drop: Maximum drop of any class, label or entity type, in points (1 point =
            0.01), below the first model or the teacher; exit code 5.
        speedup: Minimum speed-up over PyTorch in float32.
        max_latency_ms: Maximum latency of 128 tokens, in milliseconds.
        max_mb: Maximum size of the deployed files, in megabytes.
        strict: Apply --max-drop to the pessimistic end of the 95 % interval.
        cascade: Also try a cascade: a small model answers, and a larger one where it is unsure.
        task: Task: sst2, mnli, squad ..., or 'own' for your own files.
        pooling: Pooling of an embedding model without modules.json (mean, cls or last; default:
            the model's own).
        data: Texts or rows of a task, with or without labels: a hub id (or ID@REV), a file, a
            directory, or 'demo' (default: the task's own data). Or an object, such as a
            DataFrame.
        seed: Seed of everything random: heads, order, dropout (default: 0).
        recipe: Shipped recipe (kdcli recipes ls), or a YAML file.
        sets: Set any key of the recipe; may be repeated.
        config: Recipe keys as nested dicts, with the values of --set.
        tokenizer: Tokenizer of the models that are given as PreTrainedModel objects.
        front: Print all candidates of a finished run, and stop.
        revision: Branch, tag or commit of the model, like MODEL@REV.
        output_dir: Output directory (default: a new directory in runs/).
        device: Device: auto, cpu, cuda, mps, xpu or cuda:INDEX (default: auto).
        resume: Continue the run in the output directory (default: the newest unfinished run in
            runs/ with this recipe).
        overwrite: Delete the run in the output directory first.
        trust_remote_code: Run code that comes with the model.
        strict_data: Refuse data with rows that are empty, bad, repeated, or trained on.
        price_per_hour: Price of this machine per hour, in any currency; the report then gives the
            cost of a million texts."""

@overload
def compress(
    model: Model | None = None,
    *,
    budget: str | None = None,
    max_drop: float | None = None,
    max_class_drop: float | None = None,
    speedup: float | None = None,
    max_latency_ms: float | None = None,
    max_mb: float | None = None,
    strict: bool | None = None,
    cascade: bool | None = None,
    task: str | None = None,
    pooling: str | None = None,
    data: Data | None = None,
    seed: int | None = None,
    recipe: Path | str | None = None,
    sets: str | Sequence[str] | None = None,
    config: Mapping[str, Any] | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    front: None = None,
    revision: str | None = None,
    output_dir: Path | str | None = None,
    device: str = "auto",
    resume: bool = False,
    overwrite: bool = False,
    trust_remote_code: bool = False,
    strict_data: bool = False,
    price_per_hour: float | None = None,
) -> RunResult:
    """Distill, prune and export a model until it is small and fast enough for a goal.

    The arguments are the options of `kdcli compress`. Raises kdcli.errors.KdcliError.

    Args:
        model: Model: a hub id, a directory, 'demo' or 'demo-classifier'; fine-tuned or not. Or a
            model in memory.
        budget: Time limit, such as 90s, 30m or 2h (default: none).
        max_drop: Maximum drop of the task metric, in points (1 point = 0.01; --max-drop 1% too);
            without labels, of agreement with MODEL.
        max_class_drop: Maximum drop of any class, label or entity type, in points (1 point =
            0.01), below the first model or the teacher; exit code 5.
        speedup: Minimum speed-up over PyTorch in float32.
        max_latency_ms: Maximum latency of 128 tokens, in milliseconds.
        max_mb: Maximum size of the deployed files, in megabytes.
        strict: Apply --max-drop to the pessimistic end of the 95 % interval.
        cascade: Also try a cascade: a small model answers, and a larger one where it is unsure.
        task: Task: sst2, mnli, squad ..., or 'own' for your own files.
        pooling: Pooling of an embedding model without modules.json (mean, cls or last; default:
            the model's own).
        data: Texts or rows of a task, with or without labels: a hub id (or ID@REV), a file, a
            directory, or 'demo' (default: the task's own data). Or an object, such as a
            DataFrame.
        seed: Seed of everything random: heads, order, dropout (default: 0).
        recipe: Shipped recipe (kdcli recipes ls), or a YAML file.
        sets: Set any key of the recipe; may be repeated.
        config: Recipe keys as nested dicts, with the values of --set.
        tokenizer: Tokenizer of the models that are given as PreTrainedModel objects.
        front: Print all candidates of a finished run, and stop.
        revision: Branch, tag or commit of the model, like MODEL@REV.
        output_dir: Output directory (default: a new directory in runs/).
        device: Device: auto, cpu, cuda, mps, xpu or cuda:INDEX (default: auto).
        resume: Continue the run in the output directory (default: the newest unfinished run in
            runs/ with this recipe).
        overwrite: Delete the run in the output directory first.
        trust_remote_code: Run code that comes with the model.
        strict_data: Refuse data with rows that are empty, bad, repeated, or trained on.
        price_per_hour: Price of this machine per hour, in any currency; the report then gives the
            cost of a million texts."""

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

    The arguments are the options of `kdcli push`. Raises kdcli.errors.KdcliError.

    Args:
        directory: Directory of a model or an export.
        repository: Repository on the hub, OWNER/NAME; created if it does not exist.
        public: Make a new repository public instead of private.
        with_report: Also push the report and the recipe, which may quote evaluated rows and name
            local paths.
        dry_run: List the files and push nothing."""

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

    The arguments are the options of `kdcli push`. Raises kdcli.errors.KdcliError.

    Args:
        directory: Directory of a model or an export.
        repository: Repository on the hub, OWNER/NAME; created if it does not exist.
        public: Make a new repository public instead of private.
        with_report: Also push the report and the recipe, which may quote evaluated rows and name
            local paths.
        dry_run: List the files and push nothing."""
