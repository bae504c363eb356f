"""Embedding models in the format of sentence-transformers: an encoder whose states become one
vector.

A directory of sentence-transformers lists its modules in `modules.json`: an encoder, a pooling, and
optionally a dense layer and a normalisation. `read_format` reads the list, `save_format` writes it,
and `Pool` computes it. The files are read here rather than by sentence-transformers, which reads
pickled weights, replaces foreign activations and takes a second to import (docs/results.md).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from kdcli.disk import disk_errors, read_json, write_atomic
from kdcli.errors import UsageError, did_you_mean
from kdcli.models.custom_class import custom_class
from kdcli.models.files import CONFIG_FILE, LENGTH_FILE, file_beside
from kdcli.models.load import (
    check_case,
    load_config,
    load_encoder,
    load_tokenizer,
    load_weights,
    location,
    save_model,
)
from kdcli.models.model import Model
from kdcli.models.static import CLASSIFIER, bare_tokenizer, is_static
from kdcli.models.training_rows import NO_ROWS
from kdcli.types import RowHashes

MODULES_FILE = "modules.json"
PROMPTS_FILE = "config_sentence_transformers.json"
POOLING_FOLDER = "1_Pooling"
LIBRARY = "sentence_transformers."
"""Prefix of the module types that are part of sentence-transformers."""
POOLS = {"Transformer": True, "StaticEmbedding": False}
"""First module of a model -> whether a module that pools follows."""
POOLING_KEYS = {
    "mean": "mean_tokens",
    "cls": "cls_token",
    "last": "lasttoken",
    "max": "max_tokens",
    "mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
}
"""Name of a pooling -> the suffix of its key in 1_Pooling/config.json."""
CHOICES = ("mean", "cls", "last")
"""Poolings that `--pooling` accepts."""
ALIASES = {"lasttoken": "last", "mean_tokens": "mean", "cls_token": "cls", "max_tokens": "max"}
SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")


class DenseLayer(NamedTuple):
    """A linear layer after the pooling: weight [out, in], bias [out], and whether a tanh
    follows."""

    weight: Tensor
    bias: Tensor | None
    tanh: bool


@dataclass(frozen=True)
class EmbeddingFormat:
    """How an embedding model turns token states into vectors, and how its vectors are used.

    Attributes:
        pooling: a key of `POOLING_KEYS`.
        normalize: whether vectors have length 1.
        dense: the dense layer after the pooling, or None.
        prompts: name -> text that is put before a text.
        default_prompt: name of the prompt that is used if none is chosen.
        similarity: one of `SIMILARITIES`.
        max_length: maximum number of tokens in a text, including special tokens; None uses the
            tokenizer's.
        prompt_counts: whether the prompt's tokens take part in the pooling.
    """

    pooling: str = "mean"
    normalize: bool = True
    dense: DenseLayer | None = None
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    similarity: str = "cosine"
    max_length: int | None = None
    prompt_counts: bool = True

    def width(self, hidden: int) -> int:
        """Return the width of the vectors for an encoder of width `hidden`."""
        return hidden if self.dense is None else len(self.dense.weight)


class Pool(nn.Module):
    """Token states [B, L, D] and attention mask [B, L] or None -> vectors [B, E], in float32.

    A mask of None means that every token is real.
    """

    def __init__(self, fmt: EmbeddingFormat) -> None:
        super().__init__()
        self.pooling, self.normalize = fmt.pooling, fmt.normalize
        self.dense: nn.Linear | None = None
        self.tanh = False
        if fmt.dense is not None:
            weight, bias, self.tanh = fmt.dense
            self.dense = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
            tensors = {"weight": weight} if bias is None else {"weight": weight, "bias": bias}
            self.dense.load_state_dict(tensors)

    def forward(self, states_BLD: Tensor, mask_BL: Tensor | None) -> Tensor:
        with torch.autocast(states_BLD.device.type, enabled=False):
            return self.compute(states_BLD.float(), mask_BL)

    def compute(self, states_BLD: Tensor, mask_BL: Tensor | None) -> Tensor:
        """Compute vectors from float32 states, without autocast, which no exporter records."""
        x_BE = self._pooled(states_BLD, mask_BL)
        if self.dense is not None:
            x_BE = F.linear(x_BE, self.dense.weight.float(), self.dense.bias)
            x_BE = x_BE.tanh() if self.tanh else x_BE
        return F.normalize(x_BE, dim=-1) if self.normalize else x_BE

    def _pooled(self, x_BLD: Tensor, mask_BL: Tensor | None) -> Tensor:
        if mask_BL is None:
            real_BL1 = x_BLD.new_ones(*x_BLD.shape[:2], 1)
        else:
            real_BL1 = mask_BL[..., None].to(x_BLD.dtype)
        if self.pooling == "cls":
            # Take the first real token, because some tokenizers pad on the left.
            return x_BLD[torch.arange(len(x_BLD), device=x_BLD.device), real_BL1[..., 0].argmax(1)]
        if self.pooling == "last":
            last_B = x_BLD.shape[1] - 1 - real_BL1[..., 0].flip(1).argmax(1)
            return x_BLD[torch.arange(len(x_BLD), device=x_BLD.device), last_B]
        if self.pooling == "max":
            return x_BLD.masked_fill(real_BL1 == 0, -1e9).amax(1)
        counts_B1 = real_BL1.sum(1).clamp(min=1e-9)
        divisor_B1 = counts_B1 if self.pooling == "mean" else counts_B1.sqrt()
        return (x_BLD * real_BL1).sum(1) / divisor_B1

    @property
    def format_of_dense(self) -> DenseLayer | None:
        """The dense layer, in the form that `EmbeddingFormat` has."""
        if self.dense is None:
            return None
        bias = None if self.dense.bias is None else self.dense.bias.detach().cpu().float()
        return DenseLayer(self.dense.weight.detach().cpu().float(), bias, self.tanh)


def read_format(source: str) -> EmbeddingFormat | None:
    """Read the format of an embedding model.

    Returns None for a cross-encoder, for a static classifier, whose vectors are logits, and for a
    model without sentence-transformers' files. Raises UsageError if the files are damaged, or if
    kdcli cannot compute a module or setting.
    """
    modules = json_file(source, MODULES_FILE, list)
    general = json_file(source, PROMPTS_FILE) or {}
    if modules is None or general.get("model_type") == "CrossEncoder":
        return None
    if (json_file(source, CONFIG_FILE) or {}).get("architectures") == [CLASSIFIER]:
        return None
    if not all(isinstance(m, dict) for m in modules):
        raise UsageError(f"{source}/{MODULES_FILE} must hold a list of modules")
    fmt = EmbeddingFormat(normalize=False)
    # A static model computes the mean itself.
    encoder = _kind(modules[0]) if modules else ""
    encoder = encoder if encoder in POOLS else "Transformer"
    pools = POOLS[encoder]
    for place, module in enumerate(modules):
        kind, path = _kind(module), str(module.get("path", ""))
        if (kind == encoder) != (place == 0) or (kind == "Pooling") != (place == 1 and pools):
            raise _not_computed(source, f"its modules are {', '.join(map(_kind, modules))}")
        if place == 0 and path not in ("", "."):
            raise _not_computed(
                source,
                f"its encoder lies in the directory {path}",
                f"copy {path}/* to the directory of {MODULES_FILE}",
            )
        if kind == "Pooling":
            settings = _required(source, f"{path}/config.json")
            fmt = replace(
                fmt,
                pooling=_pooling(source, settings),
                prompt_counts=bool(settings.get("include_prompt", True)),
            )
        elif kind == "Dense" and fmt.dense is None and not fmt.normalize:
            fmt = replace(fmt, dense=_dense(source, path))
        elif kind == "Normalize":
            fmt = replace(fmt, normalize=True)
        elif place > pools:
            raise _not_computed(source, f"module {place} is {kind or 'unnamed'}")
    length = (json_file(source, LENGTH_FILE) or {}).get("max_seq_length")
    if not isinstance(length, int | None) or (length is not None and length < 3):
        raise UsageError(
            f"{source}/{LENGTH_FILE}: max_seq_length must be a number of tokens, got {length!r}"
        )
    entries = general.get("prompts") or {}
    if not isinstance(entries, dict):
        raise UsageError(f"{source}/{PROMPTS_FILE}: prompts must be a JSON object, got {entries!r}")
    prompts = {str(name): str(text) for name, text in entries.items() if text}
    default = str(general.get("default_prompt_name"))
    similarity = general.get("similarity_fn_name") or "cosine"
    if similarity not in SIMILARITIES:
        known = ", ".join(SIMILARITIES)
        raise UsageError(
            f"{source}/{PROMPTS_FILE}: unknown similarity_fn_name {similarity!r}", f"known: {known}"
        )
    return replace(
        fmt,
        prompts=prompts,
        # A default prompt that is missing here is empty.
        default_prompt=default if default in prompts else None,
        similarity=similarity,
        max_length=length,
    )


def format_for(
    source: str, config: PreTrainedConfig, pooling: str | None
) -> tuple[EmbeddingFormat, str]:
    """Return the format of an embedding model or a plain encoder, and a note on where it is from.

    `pooling` is the value of `--pooling`, one of `CHOICES`, or None. Raises UsageError if the
    format cannot be read, does not fit the encoder, or contradicts `pooling`.
    """
    if pooling is not None and pooling not in CHOICES:
        raise UsageError(
            f"unknown pooling '{pooling}'{did_you_mean(pooling, CHOICES)}",
            f"known: {', '.join(CHOICES)}",
        )
    fmt = read_format(source)
    if fmt is not None:
        if pooling not in (None, fmt.pooling):
            hint = f"omit --pooling, or delete {MODULES_FILE} from a copy of the model"
            raise UsageError(f"{source} pools by {fmt.pooling}, not by {pooling}", hint)
        if fmt.dense is not None and fmt.dense.weight.shape[1] != config.hidden_size:
            raise UsageError(
                f"the dense layer of {source} takes vectors of width {fmt.dense.weight.shape[1]}, "
                f"but its encoder has width {config.hidden_size}"
            )
        norm = ", normalised" if fmt.normalize else ""
        return fmt, f"{fmt.pooling} pooling{norm}, as its {MODULES_FILE} says"
    if pooling is not None:
        return EmbeddingFormat(pooling), f"{pooling} pooling, normalised"
    # sentence-transformers assumes the same for such a model.
    return (
        EmbeddingFormat(),
        f"it has no {MODULES_FILE}: mean pooling, normalised, is assumed; --pooling changes it",
    )


def load_embedder(source: str, *, compacted: bool = False) -> Model:
    """Load an encoder, whose directory may be in sentence-transformers' format.

    `compacted` accepts a model of `kdcli.deploy.sparse.compact`. Raises UsageError if the model
    cannot be loaded, is a cross-encoder, or sentence-transformers reads other tokens of its texts.
    """
    loaded = _load_encoder(source, compacted=compacted)
    check_case(loaded.tokenizer, source)
    return loaded


def _load_encoder(source: str, *, compacted: bool) -> Model:
    config = load_config(source, compacted=compacted)
    scores = any("ForSequenceClassification" in name for name in config.architectures or ())
    if scores and read_format(source) is None:
        raise UsageError(
            f"{source} scores texts ({config.architectures[0]}) and has no vectors",
            "use an embedding model, or distil a reranker with --task rerank and a classifier with "
            "its own --task",
        )
    if is_static(config):
        tokenizer = load_tokenizer(source)
        return Model(load_weights(source, AutoModel).eval(), bare_tokenizer(tokenizer), source)
    if (model_class := custom_class(config)) is None:
        return load_encoder(source)
    tokenizer = load_tokenizer(source)
    return Model(load_weights(source, model_class).eval(), tokenizer, source)


def save_embedder(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    fmt: EmbeddingFormat,
    folder: Path,
    rows: RowHashes = NO_ROWS,
) -> None:
    """Save an encoder and its format, so that `SentenceTransformer` and `AutoModel` load the
    directory.

    `rows` are hashes of the labelled rows that trained the model or a model it was made from.
    """
    static = is_static(model.config)
    if static:
        tokenizer, model.config.normalize = bare_tokenizer(tokenizer), fmt.normalize
    elif fmt.max_length is not None:
        tokenizer.model_max_length = fmt.max_length
    # Write the encoder last, because its config.json makes the directory a model.
    folder.mkdir(parents=True, exist_ok=True)
    save_format(fmt, model.config.hidden_size, folder, static=static)
    save_model(model, tokenizer, folder, rows)


def save_format(fmt: EmbeddingFormat, hidden: int, folder: Path, *, static: bool = False) -> None:
    """Write sentence-transformers' files for an encoder of width `hidden`, or a `static` model.

    They have the form that all versions of the library can read.
    """
    names = ["StaticEmbedding"] if static else ["Transformer", "Pooling"]
    names += ["Dense"] if fmt.dense else []
    names += ["Normalize"] if fmt.normalize else []
    folders = ["", *([] if static else [POOLING_FOLDER])]
    paths = [*folders, *(f"{n}_{name}" for n, name in enumerate(names) if n >= len(folders))]
    flags = {f"pooling_mode_{suffix}": name == fmt.pooling for name, suffix in POOLING_KEYS.items()}
    files: dict[str, object] = {}
    if not static:
        files[f"{POOLING_FOLDER}/config.json"] = {
            "word_embedding_dimension": hidden,
            **flags,
            "include_prompt": fmt.prompt_counts,
        }
    for path in paths:
        with disk_errors(folder / path):
            (folder / path).mkdir(exist_ok=True)
    if fmt.dense is not None:
        write_dense(fmt.dense, folder / paths[len(folders)])
    if not static:
        length = {} if fmt.max_length is None else {"max_seq_length": fmt.max_length}
        # `check_case` refuses a tokenizer that needs this flag.
        files[LENGTH_FILE] = {"do_lower_case": False} | length
    files[PROMPTS_FILE] = {
        "__version__": {},
        "prompts": fmt.prompts,
        "default_prompt_name": fmt.default_prompt,
        "similarity_fn_name": fmt.similarity,
    }
    # Write this file last: without it, the directory is a plain encoder.
    files[MODULES_FILE] = module_list(dict(zip(paths, names, strict=True)))
    for name, content in files.items():
        write_atomic(folder / name, json.dumps(content, indent=2))


def module_list(modules: Mapping[str, str]) -> list[dict[str, object]]:
    """Return the content of modules.json, given the class of each module by its directory."""
    return [
        {"idx": n, "name": str(n), "path": path, "type": f"{LIBRARY}models.{name}"}
        for n, (path, name) in enumerate(modules.items())
    ]


def write_dense(dense: DenseLayer, folder: Path) -> None:
    """Write a dense layer as a module of sentence-transformers."""
    tensors = {"linear.weight": dense.weight.contiguous()}
    if dense.bias is not None:
        tensors["linear.bias"] = dense.bias
    activation = "activation.Tanh" if dense.tanh else "linear.Identity"
    config = {
        "in_features": dense.weight.shape[1],
        "out_features": dense.weight.shape[0],
        "bias": dense.bias is not None,
        "activation_function": f"torch.nn.modules.{activation}",
    }
    with disk_errors(folder):
        folder.mkdir(exist_ok=True)
    write_atomic(folder / "model.safetensors", save(tensors))
    write_atomic(folder / "config.json", json.dumps(config, indent=2))


def json_file(source: str, name: str, kind: type = dict) -> Any:
    """Return the content of a JSON file of a model, or None if the model has no such file."""
    path = file_beside(location(source), name)
    return None if path is None else read_json(path, kind=kind)


def _required(source: str, name: str) -> dict[str, object]:
    content = json_file(source, name)
    if content is None:
        raise UsageError(f"{source} has no {name}, although its {MODULES_FILE} names it")
    return dict(content)


def _kind(module: Mapping[str, object]) -> str:
    """Return the class name of a module, with its package if it is not sentence-transformers'
    own."""
    kind = str(module.get("type", ""))
    return kind.rsplit(".", 1)[-1] if kind.startswith(LIBRARY) else kind


def _pooling(source: str, settings: Mapping[str, object]) -> str:
    """Return the pooling of a Pooling module, whose settings may have the old keys or the new
    one."""
    modes = settings.get("pooling_mode")
    if modes is None:
        modes = [
            key.removeprefix("pooling_mode_")
            for key, on in settings.items()
            if on is True and "pooling_" in key
        ]
    elif not isinstance(modes, list):
        modes = [modes]
    known = [ALIASES.get(str(mode), str(mode)) for mode in modes]
    if len(known) != 1 or known[0] not in POOLING_KEYS:
        raise _not_computed(source, f"it pools by {' and '.join(map(str, modes)) or 'nothing'}")
    return known[0]


def _dense(source: str, path: str) -> DenseLayer:
    settings = _required(source, f"{path}/config.json")
    activation = str(settings.get("activation_function", ""))
    name = activation.rsplit(".", 1)[-1]
    if not activation.startswith("torch.nn.") or name not in ("Tanh", "Identity"):
        raise _not_computed(source, f"its dense layer has activation {activation or 'none named'}")
    if settings.get("use_residual"):
        raise _not_computed(source, "its dense layer has a residual connection")
    names = {settings.get("module_input_name"), settings.get("module_output_name")}
    if names - {None, "sentence_embedding"}:
        raise _not_computed(source, "its dense layer reads or writes token states")
    if (file := file_beside(location(source), f"{path}/model.safetensors")) is None:
        raise UsageError(
            f"{source} has no {path}/model.safetensors",
            "a dense layer is read from safetensors only",
        )
    try:
        tensors = load(file.read_bytes())
    except SafetensorError as error:
        raise UsageError(
            f"{file} is damaged: {error}", "copy the model again from the original directory"
        ) from None
    if tensors.keys() - {"linear.weight", "linear.bias"} or "linear.weight" not in tensors:
        held = ", ".join(sorted(tensors))
        raise UsageError(f"{file} must hold linear.weight and optionally linear.bias, not {held}")
    bias = tensors["linear.bias"].float() if "linear.bias" in tensors else None
    return DenseLayer(tensors["linear.weight"].float(), bias, name == "Tanh")


def _not_computed(source: str, reason: str, hint: str | None = None) -> UsageError:
    poolings = ", ".join(POOLING_KEYS)
    return UsageError(
        f"{source} is an embedding model that kdcli cannot compute: {reason}",
        hint or f"supported: an encoder, a pooling ({poolings}), at most one Dense, Normalize",
    )
