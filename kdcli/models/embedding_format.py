"""Embedding models in the format of sentence-transformers: an encoder whose states become one
vector.

A directory of sentence-transformers lists its modules in `modules.json`: an encoder, a pooling, and
optionally dense layers, layer norms and a normalisation. `read_format` reads the list,
`save_format` writes it, and `Pool` computes it. Layers are modules of sentence-transformers itself,
which is imported only for them, because that takes a second.
"""

import copy
import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from packaging.version import InvalidVersion, Version
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER

from kdcli.custom_code import custom_code_allowed
from kdcli.disk import disk_errors, fill_dir, read_json, write_atomic
from kdcli.errors import UsageError, one_line, shortened
from kdcli.models.custom_class import custom_class
from kdcli.models.files import (
    BY_LIBRARY,
    CONFIG_FILE,
    LENGTH_FILE,
    LIBRARY,
    MODULES_FILE,
    PICKLES,
    check_modules,
    conversion_of,
    file_beside,
    module_kind,
)
from kdcli.models.library_model import ROLE_TOKENS, custom_code_refused, load_library_model
from kdcli.models.load import (
    check_case,
    check_weights,
    encoder_settings,
    is_known_class,
    load_config,
    load_encoder,
    load_tokenizer,
    load_weights,
    pickled_head,
    root_of,
    save_model,
)
from kdcli.models.model import NO_ROWS, Model
from kdcli.models.padding import settle_padding
from kdcli.models.shape import library_length
from kdcli.models.static import CLASSIFIER, bare_tokenizer, is_static
from kdcli.models.tokenizer_files import AS_LOADED
from kdcli.types import RowHashes

PROMPTS_FILE = "config_sentence_transformers.json"
SPARSE, MULTI_VECTOR, CROSS_ENCODER = "SparseEncoder", "MultiVectorEncoder", "CrossEncoder"
"""The `model_type` in `PROMPTS_FILE` of models without one short vector for a text."""
POOLING_FOLDER = "1_Pooling"
POOLS = {"Transformer": True, "StaticEmbedding": False}
"""First module of a model -> whether a module that pools follows."""
POOLING_KEYS = {
    "cls": "cls_token",
    "max": "max_tokens",
    "mean": "mean_tokens",
    "mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "weightedmean": "weightedmean_tokens",
    "last": "lasttoken",
}
"""Name of a pooling -> the suffix of its key in 1_Pooling/config.json, in the order in which
sentence-transformers joins the vectors of several poolings."""
MODES = {"lasttoken" if name == "last" else name: name for name in POOLING_KEYS}
"""Name of a pooling in sentence-transformers -> its name here."""
FLAGS = {f"pooling_mode_{POOLING_KEYS[name]}": mode for mode, name in MODES.items()}
"""Keys of 1_Pooling/config.json that earlier versions wrote -> the name of their pooling."""
READ: tuple[object, ...] = ()
"""Stands for all values of a setting, because kdcli obeys the setting."""
INPUT = "sentence_embedding"
"""Name of the vectors between two modules of sentence-transformers."""
GENERAL_SETTINGS = dict.fromkeys(
    (
        "__version__",
        "requirements",
        "prompts",
        "default_prompt_name",
        "similarity_fn_name",
        "truncate_dim",
    ),
    READ,
) | {"model_type": ("SentenceTransformer",)}
WIDTHS = ("embedding_dimension", "word_embedding_dimension")
"""The names of the vectors' width in a Pooling module's settings, of which it needs one."""
POOLING_SETTINGS = dict.fromkeys((*WIDTHS, "pooling_mode", "include_prompt", *FLAGS), READ)
LAYER_SETTINGS: dict[str, dict[str, Sequence[object]]] = {
    "Dense": {
        **dict.fromkeys(("in_features", "out_features", "bias", "use_residual"), READ),
        "activation_function": READ,
        "module_input_name": (INPUT,),
        "module_output_name": (None, INPUT),
    },
    "LayerNorm": {"dimension": READ},
    "Normalize": {"module_input_name": (INPUT,), "module_output_name": (None, INPUT)},
    "Dropout": {"dropout": READ},
}
"""Modules that may follow the pooling -> their settings."""
LOADING = {
    f"{part}_{suffix}": file
    for suffix in ("args", "kwargs")
    for part, file in (
        ("model", None),
        ("tokenizer", "tokenizer_config.json"),
        ("processor", "tokenizer_config.json"),
        ("config", CONFIG_FILE),
    )
}
"""Arguments with which sentence-transformers loads an encoder -> the file where they belong."""
NEUTRAL_ARGUMENTS = {
    # kdcli allows code on the command line, computes in float32, and no vector needs a pooler.
    *("trust_remote_code", "dtype", "torch_dtype", "attn_implementation", "add_pooling_layer"),
    *("low_cpu_mem_usage", "device_map", "use_safetensors"),
}
MODALITIES = dict.fromkeys(("common", "text", "audio", "image", "video", "chat_template"), READ)
SHARED_SETTINGS: dict[str, Sequence[object]] = {
    "max_seq_length": READ,
    "processing_kwargs": READ,
    # `check_case` reads it.
    "do_lower_case": READ,
    "unpad_inputs": READ,
    **dict.fromkeys(("query_length", "document_length", "query_expansion"), (None,)),
    **dict.fromkeys(LOADING, READ),
}
"""Settings of an encoder in sentence_bert_config.json, for vectors and for scores."""
DEFAULT_TASK = "feature-extraction"
ENCODER_SETTINGS = SHARED_SETTINGS | {
    "transformer_task": (DEFAULT_TASK,),
    "modality_config": (
        {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
    ),
    "module_output_name": ("token_embeddings",),
}
PROCESSING_SETTINGS: dict[str, Sequence[object]] = {
    "max_length": READ,
    "truncation": (True, "longest_first"),
    "padding": (True, "longest"),
    "return_tensors": ("pt",),
}
LAYER_ERRORS = (
    *(SafetensorError, RuntimeError, ImportError, AttributeError),
    *(TypeError, ValueError, KeyError),
)
"""Exceptions of sentence-transformers if it cannot load the files of a layer."""
SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")


@dataclass(frozen=True)
class EmbeddingFormat:
    """How an embedding model turns token states into vectors, and how its vectors are used.

    Attributes:
        pooling: A key of `POOLING_KEYS`, or several joined by "+".
        normalize: Whether vectors have length 1.
        layers: Modules of sentence-transformers between the pooling and the normalisation.
        prompts: name -> text that is put before a text.
        default_prompt: Name of the prompt of texts that are neither queries nor documents.
        similarity: One of `SIMILARITIES`.
        max_length: Maximum number of tokens in a text, including special tokens; None uses the
            tokenizer's.
        prompt_counts: Whether the prompt's tokens take part in the pooling.
        truncate_dim: Number of leading components that a vector has; None keeps all.
        library: Whether sentence-transformers computes the vectors; see `load_by_library`.
    """

    pooling: str = "mean"
    normalize: bool = True
    layers: tuple[nn.Module, ...] = ()
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    similarity: str = "cosine"
    max_length: int | None = None
    prompt_counts: bool = True
    truncate_dim: int | None = None
    library: bool = False

    @property
    def poolings(self) -> list[str]:
        """The keys of `POOLING_KEYS` whose vectors are joined."""
        return self.pooling.split("+")

    def width(self, hidden: int) -> int:
        """Return the width of the vectors for an encoder of width `hidden`."""
        width = hidden * len(self.poolings)
        for layer in self.layers:
            width = getattr(layer, "out_features", width)
        return min(width, self.truncate_dim or width)

    def followed_by(self, layers: Sequence[nn.Module]) -> "EmbeddingFormat":
        """Return the format with layers after all others, also after the normalisation."""
        own = (*self.layers, _library_class("Normalize")()) if self.normalize else self.layers
        return replace(self, layers=(*own, *layers), normalize=False, truncate_dim=None)


class Pool(nn.Module):
    """Token states [B, L, D] and attention mask [B, L] or None -> vectors [B, E], in float32.

    A mask of None means that every token is real.
    """

    def __init__(self, fmt: EmbeddingFormat) -> None:
        super().__init__()
        self.poolings, self.normalize = fmt.poolings, fmt.normalize
        self.truncate_dim = fmt.truncate_dim
        self.layers = nn.Sequential(*copy.deepcopy(fmt.layers))

    def forward(self, states_BLD: Tensor, mask_BL: Tensor | None) -> Tensor:
        with torch.autocast(states_BLD.device.type, enabled=False):
            return self.compute(states_BLD.float(), mask_BL)

    def compute(self, states_BLD: Tensor, mask_BL: Tensor | None) -> Tensor:
        """Compute vectors from float32 states, without autocast, which no exporter records."""
        if mask_BL is None:
            mask_BL = states_BLD.new_ones(states_BLD.shape[:2])
        pooled = [self._pooled(name, states_BLD, mask_BL) for name in self.poolings]
        joined_BE = torch.cat(pooled, -1) if len(pooled) > 1 else pooled[0]
        x_BE: Tensor = self.layers({INPUT: joined_BE})[INPUT]
        x_BE = F.normalize(x_BE, dim=-1) if self.normalize else x_BE
        return x_BE if self.truncate_dim is None else x_BE[:, : self.truncate_dim]

    def _pooled(self, pooling: str, x_BLD: Tensor, mask_BL: Tensor) -> Tensor:
        real_BL1 = mask_BL[..., None].to(x_BLD.dtype)
        if pooling == "cls":
            # Take the first real token, because some tokenizers pad on the left.
            return x_BLD[torch.arange(len(x_BLD), device=x_BLD.device), real_BL1[..., 0].argmax(1)]
        if pooling == "last":
            last_B = x_BLD.shape[1] - 1 - real_BL1[..., 0].flip(1).argmax(1)
            return x_BLD[torch.arange(len(x_BLD), device=x_BLD.device), last_B]
        if pooling == "max":
            return x_BLD.masked_fill(real_BL1 == 0, -1e9).amax(1)
        if pooling == "weightedmean":
            # The first real token has the weight 1, the second the weight 2, and so on.
            real_BL1 = real_BL1.cumsum(1) * real_BL1
        counts_B1 = real_BL1.sum(1).clamp(min=1e-9)
        divisor_B1 = counts_B1.sqrt() if pooling == "mean_sqrt_len_tokens" else counts_B1
        return (x_BLD * real_BL1).sum(1) / divisor_B1


def left_to_library(source: str) -> str | None:
    """Return why only sentence-transformers computes an embedding model, or None.

    Raises:
        UsageError: The list of modules is damaged, or the model has no single vector of a text.
    """
    if (modules := _modules(source)) is None:
        return None
    model_class = (json_file(source, PROMPTS_FILE) or {}).get("model_type")
    if model_class == MULTI_VECTOR:
        raise UsageError(
            f"{source} is a {MULTI_VECTOR}: it has a vector for each token, and a text has no "
            "single one",
            "give an embedding model with one vector for a text, or a reranker",
        )
    if model_class == SPARSE:
        return f"it is a {SPARSE}"
    first, *others = list(map(module_kind, modules)) or [""]
    if first not in POOLS:
        return f"its first module is {first or 'unnamed'}"
    if POOLS[first] and (not others or others.pop(0) != "Pooling"):
        return f"its {first} is not followed by a Pooling"
    unknown = [kind or "unnamed" for kind in others if kind not in LAYER_SETTINGS]
    return f"it has a module {unknown[0]}" if unknown else None


def _modules(source: str) -> list[dict[str, object]] | None:
    """Return the list of modules of an embedding model, or None for other models."""
    modules: list[dict[str, object]] | None = json_file(source, MODULES_FILE, list)
    model_class = (json_file(source, PROMPTS_FILE) or {}).get("model_type")
    architectures = (json_file(source, CONFIG_FILE) or {}).get("architectures")
    if modules is None or model_class == CROSS_ENCODER or architectures == [CLASSIFIER]:
        return None
    check_modules(source, modules)
    return modules


def check_computed(source: str) -> None:
    """Check that kdcli computes a model itself if it is an embedding model.

    Raises:
        UsageError: Only sentence-transformers computes it.
    """
    if (reason := left_to_library(source)) is not None:
        raise UsageError(
            f"{source} is an embedding model that only sentence-transformers computes: {reason}",
            BY_LIBRARY,
        )


def is_embedder(source: str) -> bool:
    """Return whether a model's files make it an embedding model, whoever computes it."""
    return left_to_library(source) is not None or read_format(source) is not None


def load_by_library(source: str, reason: str) -> tuple[Model, EmbeddingFormat]:
    """Load an embedding model that only sentence-transformers computes.

    Args:
        source: The model.
        reason: What `left_to_library` returned for it.

    Raises:
        UsageError: The library cannot load it, or it has code of its own, which is not allowed.
    """
    own = [kind for kind in map(module_kind, json_file(source, MODULES_FILE, list)) if "." in kind]
    if own and not custom_code_allowed():
        raise custom_code_refused(source, own[0])
    class_name = (json_file(source, PROMPTS_FILE) or {}).get("model_type") or "SentenceTransformer"
    loaded = load_library_model(source, root_of(source), class_name, reason)
    library = loaded.model.library
    normalize = type(list(library)[-1]).__name__ == "Normalize"
    return loaded, EmbeddingFormat(
        "cls",
        normalize=normalize,
        prompts=ROLE_TOKENS,
        similarity=str(library.similarity_fn_name),
        library=True,
    )


def read_format(source: str) -> EmbeddingFormat | None:
    """Read the format of an embedding model.

    Args:
        source: The model.

    Returns:
        None for a cross-encoder, for a static classifier, whose vectors are logits, and for a model
        without sentence-transformers' files.

    Raises:
        UsageError: The files are damaged, or have a module or a setting that kdcli cannot compute.
    """
    check_computed(source)
    if (modules := _modules(source)) is None:
        return None
    general = json_file(source, PROMPTS_FILE) or {}
    check_settings(source, PROMPTS_FILE, general, GENERAL_SETTINGS)
    check_requirements(source, general)
    fmt = EmbeddingFormat(normalize=False)
    # A static model computes the mean itself.
    pools = POOLS[module_kind(modules[0])]
    for module in modules[1:]:
        kind, path = module_kind(module), str(module["path"])
        if kind == "Pooling":
            fmt = _with_pooling(fmt, source, f"{path}/{CONFIG_FILE}")
        else:
            fmt = _with_layer(fmt, source, kind, path)
    width = general.get("truncate_dim")
    if width is not None and (type(width) is not int or width < 1):
        raise UsageError(f"{source}/{PROMPTS_FILE}: truncate_dim must be at least 1, got {width!r}")
    prompts, default = read_prompts(source, general, empty=("query", "document"))
    similarity = general.get("similarity_fn_name") or "cosine"
    if similarity not in SIMILARITIES:
        known = ", ".join(SIMILARITIES)
        raise UsageError(
            f"{source}/{PROMPTS_FILE}: unknown similarity_fn_name {similarity!r}", f"known: {known}"
        )
    return replace(
        fmt,
        prompts=prompts,
        default_prompt=default if default in prompts else None,
        similarity=similarity,
        # A table has no settings of its own.
        max_length=read_length(source, ENCODER_SETTINGS) if pools else None,
        truncate_dim=width,
    )


def check_requirements(source: str, general: Mapping[str, Any]) -> None:
    """Check the versions that a model's `PROMPTS_FILE` names, as sentence-transformers does.

    Raises:
        UsageError: A required package is missing or has another version, or the version of
            sentence-transformers that wrote the model is none.
    """
    versions = general.get("__version__", {})
    written_by = versions.get("sentence_transformers", "0") if isinstance(versions, dict) else None
    try:
        Version(str(written_by))
    except InvalidVersion:
        raise UsageError(
            f"{source}/{PROMPTS_FILE}: __version__ must be a JSON object of versions, got "
            f"{shortened(repr(versions), 60)}",
            "remove __version__ in a copy of the model",
        ) from None
    if not general.get("requirements"):
        return
    # The library takes a second to import, and few models have requirements.
    environment = importlib.import_module("sentence_transformers.util.environment")
    # Versions before 6 do not read them.
    check = getattr(environment, "check_version_requirements", lambda *arguments: None)
    try:
        check(general["requirements"], source)
    except ImportError as error:
        raise UsageError(
            f"{source} requires packages that are not installed: {one_line(error)}",
            f"install them; the requirements are in {PROMPTS_FILE}",
        ) from None


def read_prompts(
    source: str, general: Mapping[str, Any], *, empty: Sequence[str] = ()
) -> tuple[dict[str, str], str | None]:
    """Read a model's prompts and the name of its default prompt.

    Args:
        source: The model.
        general: The content of `PROMPTS_FILE`.
        empty: The names of prompts that every such model has, and that are empty by default.

    Raises:
        UsageError: The prompts are not texts, or the default prompt is not one of them.
    """
    entries, default = general.get("prompts", {}), general.get("default_prompt_name")
    if not isinstance(entries, dict) or not all(
        isinstance(text, str | None) for text in entries.values()
    ):
        raise UsageError(
            f"{source}/{PROMPTS_FILE}: prompts must be a JSON object of texts, got {entries!r}"
        )
    prompts = {name: text or "" for name, text in entries.items()}
    if default is not None and default not in (*empty, *prompts):
        raise UsageError(
            f"{source}/{PROMPTS_FILE} has no prompt of the name {default!r}, which its "
            "default_prompt_name gives",
            f"its prompts: {', '.join((*empty, *prompts)) or 'none'}",
        )
    return prompts, default


def read_length(source: str, known: Mapping[str, Sequence[object]]) -> int | None:
    """Read the maximum number of tokens in a text from sentence-transformers' encoder settings.

    Args:
        source: The model.
        known: The values of the other settings that kdcli computes; see `check_settings`.

    Returns:
        None if the settings have no length.

    Raises:
        UsageError: The length is not a length, or kdcli cannot compute another setting.
    """
    name, settings = encoder_settings(source)
    check_settings(source, name, settings, known)
    # The defaults of sentence-transformers are those of vectors.
    needed = {"transformer_task": known["transformer_task"] != (DEFAULT_TASK,) and bool(settings)}
    needed["module_output_name"] = "modality_config" in settings
    for key, is_needed in needed.items():
        if is_needed and key not in settings:
            raise UsageError(
                f"{source}/{name} lacks the setting {key}, without which sentence-transformers "
                "cannot use this model",
                f"copy the file of the original model, or add {key}: {known[key][0]!r}",
            )
    for section, belongs in LOADING.items():
        _check_loading(source, name, section, settings.get(section) or {}, belongs)
    length = settings.get("max_seq_length")
    parts = settings.get("processing_kwargs") or {}
    if not isinstance(parts, dict) or not all(isinstance(p, dict) for p in parts.values()):
        raise UsageError(f"{source}/{name}: processing_kwargs must hold JSON objects by modality")
    check_settings(source, f"{name}: processing_kwargs", parts, MODALITIES)
    # sentence-transformers lets the common settings win.
    for part in (parts.get("text", {}), parts.get("common", {})):
        check_settings(source, name, part, PROCESSING_SETTINGS)
        length = part.get("max_length") or length
    if not isinstance(length, int | None) or (length is not None and length < 3):
        raise UsageError(
            f"{source}/{name}: max_seq_length must be a whole number of at least 3 tokens, got "
            f"{length!r}",
            "correct it in a copy of the model, or remove it: the tokenizer's length is then used",
        )
    return length


def _check_loading(
    source: str, name: str, section: str, settings: object, belongs: str | None
) -> None:
    """Check that arguments with which sentence-transformers loads an encoder change no output.

    Args:
        source: The model.
        name: The file of the settings.
        section: The key of the arguments.
        settings: The arguments.
        belongs: The file in which every library reads the same keys, or None.
    """
    if not isinstance(settings, dict):
        raise UsageError(f"{source}/{name}: {section} must be a JSON object, got {settings!r}")
    if others := sorted(settings.keys() - NEUTRAL_ARGUMENTS):
        raise UsageError(
            f"{source}/{name}: {section} has {', '.join(others)}, which kdcli does not pass on",
            f"in a copy of the model, write it into {belongs}, which every library reads"
            if belongs
            else "if it changes no output, remove it from a copy of the model",
        )


def check_settings(
    source: str, name: str, settings: Mapping[str, object], known: Mapping[str, Sequence[object]]
) -> None:
    """Check that a file has no setting that changes a model's outputs and that kdcli ignores.

    Args:
        source: The model.
        name: The file.
        settings: Its content.
        known: setting -> the values that kdcli computes; no values if it reads them itself.

    Raises:
        UsageError: A setting is unknown, or has another value.
    """
    for key, value in settings.items():
        if key not in known:
            raise UsageError(
                f"{source}/{name} has the setting {key!r}, which kdcli does not know",
                f"known: {', '.join(sorted(known))}; if {key!r} changes no output, remove it from "
                "a copy of the model",
            )
        if known[key] and value not in known[key]:
            raise UsageError(
                f"{source}/{name}: kdcli cannot compute {key}={value!r}",
                f"known: {' or '.join(map(repr, known[key]))}",
            )


def format_for(
    source: str, config: PreTrainedConfig, pooling: str | None
) -> tuple[EmbeddingFormat, str]:
    """Return the format of an embedding model or a plain encoder, and a note on where it is from.

    `pooling` is the value of `--pooling`, or None. Raises UsageError if the format cannot be read,
    does not fit the encoder, or contradicts `pooling`.
    """
    fmt = read_format(source)
    if fmt is not None:
        if pooling not in (None, fmt.pooling):
            hint = f"omit --pooling, or delete {MODULES_FILE} from a copy of the model"
            raise UsageError(f"{source} pools by {fmt.pooling}, not by {pooling}", hint)
        _check_widths(source, fmt, config.hidden_size)
        norm = ", normalised" if fmt.normalize else ""
        head = pickled_head(source)
        default = fmt.prompts.get(fmt.default_prompt or "")
        prompt = f"; texts without a role begin with {default!r}" if default else ""
        return fmt, f"{fmt.pooling} pooling{norm}, as its {MODULES_FILE} says{prompt}{head}"
    # sentence-transformers reads such a model in the same way.
    has_prompts = (json_file(source, PROMPTS_FILE) or {}).get("prompts")
    unread = f"; {PROMPTS_FILE} is not read without {MODULES_FILE}" if has_prompts else ""
    if pooling is not None:
        return EmbeddingFormat(pooling), f"{pooling} pooling, normalised{unread}"
    assumed = "mean pooling, normalised, is assumed; --pooling changes it"
    return EmbeddingFormat(), f"it has no {MODULES_FILE}: {assumed}{unread}"


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
    classes = [name for name in config.architectures or () if is_known_class(name, config)]
    scores = any("ForSequenceClassification" in name for name in classes)
    if scores and read_format(source) is None:
        raise UsageError(
            f"{source} scores texts ({config.architectures[0]}) and has no vectors",
            "use an embedding model, or distil a reranker with --task rerank and a classifier with "
            "its own --task",
        )
    if is_static(config):
        tokenizer = bare_tokenizer(loaded := load_tokenizer(source, of_table=True))
        if (truncation := getattr(loaded, AS_LOADED)[0]) is not None:
            tokenizer.model_max_length = truncation["max_length"]
            tokenizer.truncation_side = truncation["direction"].lower()
        return Model(load_weights(source, AutoModel).eval(), tokenizer, source)
    if (model_class := custom_class(config)) is None:
        return load_encoder(source)
    tokenizer, model = load_tokenizer(source), load_weights(source, model_class).eval()
    return Model(model, tokenizer, source, settle_padding(model, tokenizer, source))


def save_embedder(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    fmt: EmbeddingFormat | None,
    folder: Path,
    rows: RowHashes = NO_ROWS,
) -> None:
    """Save an encoder and its format, so that `SentenceTransformer` and `AutoModel` load the
    directory. A model without a format is saved alone.

    `rows` are hashes of the labelled rows that trained the model or a model it was made from.
    """
    if fmt is None:
        save_model(model, tokenizer, folder, rows)
        return
    static = is_static(model.config)
    if static:
        tokenizer, model.config.normalize = bare_tokenizer(tokenizer), fmt.normalize
    else:
        length = library_length(fmt.max_length, tokenizer, model.config)
        # text-embeddings-inference cannot read sentence_bert_config.json without a length.
        fmt = replace(fmt, max_length=length if length < VERY_LARGE_INTEGER else None)
        tokenizer.model_max_length = length
    # Write the encoder last, because its config.json makes the directory a model.
    folder.mkdir(parents=True, exist_ok=True)
    save_format(fmt, model.config.hidden_size, folder, static=static)
    save_model(model, tokenizer, folder, rows)


def save_format(fmt: EmbeddingFormat, hidden: int, folder: Path, *, static: bool) -> None:
    """Write sentence-transformers' files for an encoder of width `hidden`, or a `static` model.

    They have the form that all versions of the library can read.
    """
    modules = {"": "StaticEmbedding"} if static else {"": "Transformer", POOLING_FOLDER: "Pooling"}
    layers = {f"{n}_{type(x).__name__}": x for n, x in enumerate(fmt.layers, len(modules))}
    modules |= {path: path.partition("_")[2] for path in layers}
    modules |= {f"{len(modules)}_Normalize": "Normalize"} if fmt.normalize else {}
    for path in modules:
        with disk_errors(folder / path):
            (folder / path).mkdir(exist_ok=True)
    for path, layer in layers.items():
        save_layer(layer, folder / path)
    files: dict[str, object] = {}
    if not static:
        flags: dict[str, object] = {
            flag: MODES[mode] in fmt.poolings for flag, mode in FLAGS.items()
        }
        if fmt.poolings != [name for name in POOLING_KEYS if name in fmt.poolings]:
            flags = {
                "pooling_mode": [
                    mode for name in fmt.poolings for mode in MODES if MODES[mode] == name
                ]
            }
        files[f"{POOLING_FOLDER}/config.json"] = {
            "word_embedding_dimension": hidden,
            **flags,
            "include_prompt": fmt.prompt_counts,
        }
        length = {} if fmt.max_length is None else {"max_seq_length": fmt.max_length}
        # `check_case` refuses a tokenizer that needs this flag.
        files[LENGTH_FILE] = {"do_lower_case": False} | length
    files[PROMPTS_FILE] = {
        "__version__": {},
        "prompts": fmt.prompts,
        "default_prompt_name": fmt.default_prompt,
        "similarity_fn_name": fmt.similarity,
        **({} if fmt.truncate_dim is None else {"truncate_dim": fmt.truncate_dim}),
    }
    # Write this file last: without it, the directory is a plain encoder.
    files[MODULES_FILE] = module_list(modules)
    for name, content in files.items():
        write_atomic(folder / name, json.dumps(content, indent=2))


def module_list(modules: Mapping[str, str]) -> list[dict[str, object]]:
    """Return the content of modules.json, given the class of each module by its directory."""
    return [
        {"idx": n, "name": str(n), "path": path, "type": f"{LIBRARY}models.{name}"}
        for n, (path, name) in enumerate(modules.items())
    ]


def dense_layer(
    weight: Tensor, bias: Tensor | None = None, activation: str = "Identity"
) -> nn.Module:
    """Return a dense layer of sentence-transformers.

    Args:
        weight: Its matrix, [out, in].
        bias: Its bias, [out].
        activation: The class of its activation in `torch.nn`.
    """
    layer: nn.Module = _library_class("Dense")(
        weight.shape[1],
        weight.shape[0],
        bias=bias is not None,
        activation_function=getattr(nn, activation)(),
        # A part of a larger tensor could not be saved.
        init_weight=weight.clone(),
        init_bias=None if bias is None else bias.clone(),
    )
    return layer


def save_layer(layer: Any, folder: Path) -> None:
    """Save a module of sentence-transformers, without settings that its first versions lack."""
    with fill_dir(folder, last=CONFIG_FILE) as aside:
        layer.save(str(aside))
        settings = read_json(aside / CONFIG_FILE)
        for name in ("module_input_name", "module_output_name"):
            settings.pop(name, None)
        write_atomic(aside / CONFIG_FILE, json.dumps(settings, indent=2))


def json_file(source: str, name: str, kind: type = dict) -> Any:
    """Return the content of a JSON file of a model, or None if the model has no such file."""
    path = file_beside(root_of(source), name)
    return None if path is None else read_json(path, kind=kind)


def _required(source: str, name: str) -> dict[str, object]:
    content = json_file(source, name)
    if content is None:
        raise UsageError(f"{source} has no {name}, although its {MODULES_FILE} names it")
    return dict(content)


def _with_pooling(fmt: EmbeddingFormat, source: str, name: str) -> EmbeddingFormat:
    settings = _required(source, name)
    pooling = _pooling(source, settings)
    check_settings(source, name, settings, POOLING_SETTINGS)
    if not any(width in settings for width in WIDTHS):
        raise UsageError(
            f"{source}/{name} lacks {WIDTHS[0]}, without which sentence-transformers cannot use "
            "this model",
            f"copy the file of the original model, or add {WIDTHS[0]}: the model's width",
        )
    counts = bool(settings.get("include_prompt", True))
    return replace(fmt, pooling=pooling, prompt_counts=counts)


def _pooling(source: str, settings: Mapping[str, object]) -> str:
    """Return the pooling of a Pooling module, whose settings may have the old keys or the new
    one."""
    modes = settings.get("pooling_mode", [])
    if "pooling_mode" not in settings:
        # sentence-transformers pools by the mean if no flag is on.
        modes = [mode for flag, mode in FLAGS.items() if settings.get(flag)] or ["mean"]
    modes = list(map(str, modes if isinstance(modes, list) else [modes]))
    if not modes or not set(modes) <= MODES.keys():
        raise _not_computed(source, f"it pools by {' and '.join(modes) or 'nothing'}")
    return "+".join(MODES[mode] for mode in modes)


def _with_layer(fmt: EmbeddingFormat, source: str, kind: str, path: str) -> EmbeddingFormat:
    """Return the format with a module that follows the pooling."""
    name = f"{path}/{CONFIG_FILE}"
    settings = json_file(source, name) or {}
    check_settings(source, name, settings, LAYER_SETTINGS[kind])
    if kind == "Dropout":
        # No text is encoded with dropout.
        return fmt
    if fmt.normalize:
        # A normalisation that is not the last module is a layer.
        fmt = replace(fmt.followed_by(()), truncate_dim=fmt.truncate_dim)
    if kind == "Normalize":
        return replace(fmt, normalize=True)
    activation = str(settings.get("activation_function", "torch."))
    if not activation.startswith("torch."):
        raise UsageError(
            f"{source}/{name}: kdcli cannot compute activation_function={activation!r}",
            "known: the classes of torch.nn",
        )
    _required(source, name)
    if (file := file_beside(root_of(source), f"{path}/model.safetensors")) is None:
        folder = Path(root_of(source), path)
        is_pickled = folder.is_dir() and any(folder.glob(PICKLES))
        raise UsageError(
            f"{source} has no {path}/model.safetensors",
            conversion_of(folder) if is_pickled else "a layer is read from safetensors only",
        )
    try:
        layer = _library_class(kind).load(str(file.parent)).float()
    except LAYER_ERRORS as error:
        raise UsageError(
            f"sentence-transformers cannot load {file.parent}: {one_line(error)}",
            "copy both files again from the original directory",
        ) from None
    check_weights(layer, file.parent)
    return replace(fmt, layers=(*fmt.layers, layer))


def _library_class(name: str) -> Any:
    """Return the class of a module of sentence-transformers, which takes a second to import."""
    from sentence_transformers.util import import_from_string

    # Models name their modules so in all versions of the library, which knows where they are.
    return import_from_string(f"sentence_transformers.models.{name}")


def _check_widths(source: str, fmt: EmbeddingFormat, hidden: int) -> None:
    """Check that each layer takes vectors of the width that the module before it gives."""
    width = hidden * len(fmt.poolings)
    for layer in fmt.layers:
        takes = getattr(layer, "in_features", getattr(layer, "dimension", width))
        if takes != width:
            raise UsageError(
                f"the {type(layer).__name__} of {source} takes vectors of width {takes}, but "
                f"those before it have width {width}"
            )
        width = getattr(layer, "out_features", width)


def _not_computed(source: str, reason: str) -> UsageError:
    poolings = ", ".join(MODES)
    return UsageError(
        f"{source} is an embedding model that kdcli cannot compute: {reason}",
        f"supported: an encoder, a pooling ({poolings}), {', '.join(LAYER_SETTINGS)}",
    )
