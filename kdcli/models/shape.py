"""Make a student from a teacher and a shape such as `6x384`.

This module derives the student's configuration and initial weights
(`kdcli.models.reduce`).
"""

import copy
import json
import time
from contextlib import suppress
from dataclasses import dataclass

import torch
import transformers
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from kdcli.disk import cache_key
from kdcli.errors import UsageError
from kdcli.kept import Result, keeper_for
from kdcli.messages import log
from kdcli.models.fit import tokens_to_fit
from kdcli.models.grammar import short_name
from kdcli.models.identity import hash_of_code, weights_hash
from kdcli.models.layout import Layout, layout_for
from kdcli.models.reduce import copy_reduced
from kdcli.models.sample import SAMPLE_TOKENS, sample_of
from kdcli.models.static import as_static, is_static
from kdcli.types import FITTED, Batch, Examples, ModelShape, Start
from kdcli.version import __version__ as kdcli_version

BASIS = "basis_DN"
"""The name of the basis among the kept weights of a fitted student."""


@dataclass(frozen=True)
class InitializedStudent:
    """A student, notes on its initialisation, and its basis of the teacher's residual stream.

    `basis_DN` is the basis that `kdcli.models.reduce` chose, or None if the student keeps the whole
    stream. `whole` is the network that a member of a family shares its layers with.
    """

    model: PreTrainedModel
    notes: list[str]
    basis_DN: Tensor | None = None
    whole: PreTrainedModel | None = None


def shape_of(config: PreTrainedConfig) -> ModelShape:
    """Return the shape of a model, given its configuration."""
    # GPT-2 and others have no key for a width of four times the hidden width.
    ffn = getattr(config, layout_for(config).ffn, None) or 4 * config.hidden_size
    return ModelShape(config.num_hidden_layers, config.hidden_size, ffn, config.num_attention_heads)


def positions_of(config: PreTrainedConfig) -> int | None:
    """Return the number of positions that a model can tell apart, whatever else is in a batch.

    Returns None if it has no table of them or uses only distances.
    """
    positions = _declared_positions(config)
    if positions is None:
        return None
    layout = layout_for(config)
    # A module that looks up sines (RoFormer's) has no more rows than positions.
    if layout.rotary and layout.positions is None:
        return _same_frequencies(config, positions)
    return positions - (config.pad_token_id + 1 if layout.position_offset else 0)


def _same_frequencies(config: PreTrainedConfig, positions: int) -> int | None:
    """Return the number of tokens above which rotary frequencies change, if they do.

    They would change for all rows of a batch, by the length of its longest row.
    """
    settings = getattr(config, "rope_parameters", None) or {}
    # Some models have settings for each type of layer.
    ropes = [each for each in (settings, *settings.values()) if isinstance(each, dict)]
    changing = [rope for rope in ropes if rope.get("rope_type") in ("dynamic", "longrope")]
    limits = [rope.get("original_max_position_embeddings") or positions for rope in changing]
    return min(map(int, limits), default=None)


def _declared_positions(config: PreTrainedConfig) -> int | None:
    """Return the number of positions that a configuration names, if any."""
    try:
        positions = getattr(config, "max_position_embeddings", None)
    except NotImplementedError:
        # XLNet's configuration, which has no limit, raises this.
        positions = None
    return None if positions is None or positions < 1 else int(positions)


def longest_input(config: PreTrainedConfig) -> int | None:
    """Return the number of tokens that a model of any type can read; None if it has no limit."""
    return None if is_static(config) else positions_of(config)


def library_length(
    own: int | None, tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig
) -> int:
    """Return the number of tokens that sentence-transformers reads of a text.

    Without a length of its `own`, a model reads no more than its configuration's positions, also if
    they are rotary and have no table.
    """
    length = own or tokenizer.model_max_length
    if own is None:
        length = min(length, _declared_positions(config) or length)
    return int(min(length, longest_input(config) or length))


def student_config(
    teacher: PreTrainedConfig,
    shape: ModelShape,
    layers: list[int] | None = None,
    layout: Layout | None = None,
) -> PreTrainedConfig:
    """Return the teacher's configuration with the student's sizes.

    `layers` names the teacher layer (1 ... N) that each student layer is copied from; None selects
    evenly spaced layers. `layout` is the teacher's, if its type is not looked up. Raises UsageError
    if a head has an odd width under rotary embeddings, or if the heads do not divide MobileBERT's
    fixed width.
    """
    layout = layout or layout_for(teacher)
    layout.check_layers()
    inner = getattr(teacher, "true_hidden_size", shape.hidden)
    if inner % shape.heads:
        raise UsageError(
            f"student {shape}: {teacher.model_type} attends in a width of {inner}, which "
            f"{shape.heads} heads do not divide",
            f"write {shape.layers}x{shape.hidden}@{teacher.num_attention_heads}",
        )
    head_width = shape.hidden // shape.heads
    own_width = getattr(teacher, "head_dim", None)
    if own_width not in (None, teacher.hidden_size // teacher.num_attention_heads):
        # Keep a width that is not the heads' share of the hidden width, if there are no more heads.
        head_width = min(own_width, own_width * teacher.num_attention_heads // shape.heads)
    width = own_width or teacher.hidden_size // teacher.num_attention_heads
    if layout.rotary == "partial" and own_width is not None:
        head_width = own_width
    if layout.rotary == "partial" and head_width != width:
        heads = max(1, round(shape.hidden / width))
        raise UsageError(
            f"student {shape}: {teacher.model_type} rotates a part of each head, so heads keep "
            f"their width of {width}",
            f"write {shape.layers}x{heads * width}@{heads}",
        )
    if layout.rotary and head_width % 2:
        raise UsageError(
            f"student {shape}: {teacher.model_type} rotates pairs of dimensions (rotary "
            f"positions), so a head cannot have the odd width {head_width}",
            f"choose a width that is a multiple of {2 * shape.heads}, or another number of heads",
        )
    config = copy.deepcopy(teacher)
    config.num_hidden_layers = shape.layers
    config.hidden_size = shape.hidden
    config.num_attention_heads = shape.heads
    setattr(config, layout.ffn, shape.ffn)
    for name in ("embedding_size", "pooler_hidden_size", "word_embed_proj_dim"):
        if getattr(teacher, name, None) == teacher.hidden_size:
            setattr(config, name, shape.hidden)
    if (key_heads := getattr(teacher, "num_key_value_heads", None)) is not None:
        # Use the teacher's ratio of query heads to key heads, or the next lower one that divides.
        limit = max(1, shape.heads * key_heads // teacher.num_attention_heads)
        config.num_key_value_heads = max(g for g in range(1, limit + 1) if shape.heads % g == 0)
    if own_width is not None:
        config.head_dim = head_width
    if getattr(teacher, "layer_types", None) is not None:
        # Each layer keeps the attention kind of the teacher layer from which it is copied.
        chosen = layers or evenly_spaced_layers(teacher.num_hidden_layers, shape.layers)
        config.layer_types = [teacher.layer_types[n - 1] for n in chosen]
    return config


def shape_of_width(teacher: PreTrainedConfig, layers: int, width: int) -> ModelShape | None:
    """Return the shape of a student with the teacher's ratio of FFN to width.

    It has the teacher's heads, or fewer if the architecture's heads cannot become narrower. Returns
    None if the architecture cannot have the width.
    """
    full = shape_of(teacher)
    ffn = round(width * full.ffn / full.hidden)
    fewer, rest = divmod(full.heads * width, full.hidden)
    for heads in (full.heads, *([] if rest else [fewer])):
        if width % heads == 0:
            shape = ModelShape(layers, width, ffn, heads)
            with suppress(UsageError):
                student_config(teacher, shape)
                return shape
    return None


def build_student(
    teacher: PreTrainedModel,
    shape: ModelShape,
    start: Start = FITTED,
    *,
    text: Examples | None = None,
    dtype: torch.dtype = torch.float32,
) -> InitializedStudent:
    """Build a student of a shape from a base encoder.

    * `text`: the text to fit on. Without it, nothing is fitted.
    * `dtype`: the number format in which the models run on that text.

    A static student has random vectors, whatever `start.init` is: its table is fitted to vectors of
    texts, which this function does not have.

    Raises UsageError if the architecture cannot have the shape, or if `start.layers` has the wrong
    length or names a layer that the teacher lacks.
    """
    if shape.is_static:
        table_VD = torch.randn(teacher.config.vocab_size, shape.hidden)
        return InitializedStudent(as_static(table_VD), ["random token vectors"])
    source = shape_of(teacher.config)
    chosen = start.layers or evenly_spaced_layers(source.layers, shape.layers)
    if len(chosen) != shape.layers or not all(1 <= n <= source.layers for n in chosen):
        allowed = f"{shape.layers} of the teacher's layers 1 to {source.layers}"
        raise UsageError(f"student.layers {chosen} must name {allowed}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(start.seed)
        student = type(teacher)(student_config(teacher.config, shape, chosen)).float()
    if start.dropout is not None:
        set_dropout(student, start.dropout)
    if start.init == "random":
        return InitializedStudent(student, ["initialised at random"])
    # The student's layers that share one module would each fit the same weights.
    fit = (
        start.init == "teacher"
        and text is not None
        and shape != source
        and not layout_for(teacher.config).shared
    )
    layout = layout_for(teacher.config)
    tokens = tokens_to_fit(teacher, layout, shape.layers) if fit else SAMPLE_TOKENS
    sample = sample_of(text, teacher.config, positions_of(teacher.config), tokens)
    if fit:
        unfilled, basis_DN = _fit_once(teacher, student, layout, chosen, sample, dtype, start.seed)
    else:
        unfilled, basis_DN = copy_reduced(
            teacher, student, layout, chosen, sample, fit=False, dtype=dtype
        )
    notes = [f"initialised from teacher layers {', '.join(map(str, chosen))}"]
    if shape.hidden < source.hidden:
        notes[0] += f", width {source.hidden} reduced to {shape.hidden}"
    notes[0] += ", fitted to its outputs" if fit else ""
    if unfilled:
        notes.append(
            f"{len(unfilled)} tensors have no counterpart and start at random, for example "
            f"{unfilled[0]}"
        )
    return InitializedStudent(student, notes, basis_DN)


def _fit_once(
    teacher: PreTrainedModel,
    student: PreTrainedModel,
    layout: Layout,
    chosen: list[int],
    sample: Batch,
    dtype: torch.dtype,
    seed: int,
) -> tuple[list[str], Tensor | None]:
    """Fit a student that began with the weights of a seed, as `copy_reduced` does.

    A fit can take minutes, so the steps of a run that keep their results compute it once.
    """

    def fit() -> tuple[list[str], Tensor | None]:
        read, name = int(sample["attention_mask"].sum()), short_name(student_shape, source)
        log(f"fitting a {name} to the teacher's outputs for {read:,} tokens")
        return copy_reduced(teacher, student, layout, chosen, sample, fit=True, dtype=dtype)

    student_shape, source = shape_of(student.config), shape_of(teacher.config)
    keeper = keeper_for(sum(weight.nbytes for weight in student.state_dict().values()))
    if keeper is None:
        return fit()
    rows = Result({name: tensor.numpy(force=True) for name, tensor in sample.items()})
    key = cache_key(
        "fit",
        *(kdcli_version, torch.__version__, transformers.__version__),
        *(weights_hash(teacher), hash_of_code(teacher), student.config.to_json_string()),
        *(chosen, seed, str(dtype), teacher.device.type, rows.digest),
    )
    if (kept := keeper.load(key)) is not None:
        weights = {name: torch.from_numpy(array) for name, array in kept.arrays.items()}
        basis_DN = weights.pop(BASIS, None)
        student.load_state_dict(weights)
        return json.loads(kept.text), basis_DN
    began = time.monotonic()
    unfilled, basis_DN = fit()
    weights = student.state_dict() | ({} if basis_DN is None else {BASIS: basis_DN})
    arrays = {name: weight.numpy(force=True) for name, weight in weights.items()}
    keeper.store(key, Result(arrays, json.dumps(unfilled)), time.monotonic() - began)
    return unfilled, basis_DN


def evenly_spaced_layers(teacher_layers: int, student_layers: int) -> list[int]:
    """Return the teacher layer for each student layer: evenly spaced, including the last one."""
    return [
        max(1, round(m * teacher_layers / student_layers)) for m in range(1, student_layers + 1)
    ]


def set_dropout(model: nn.Module, rate: float) -> None:
    """Set every dropout rate of a model in memory, but not in its configuration."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = rate
        for name in ("attention_dropout", "dropout_prob"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, rate)
