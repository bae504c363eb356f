"""Embedding models: how an encoder's token states become one vector, in the files of sentence-transformers.

A directory of sentence-transformers lists its modules in `modules.json`: an encoder, a pooling, perhaps one dense
layer, perhaps normalisation. `read_format` reads that list, `save_format` writes it, `Pool` computes it.
"""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn
from transformers import PreTrainedConfig

from kdcli.disk import disk_errors, read_json, write_atomic
from kdcli.errors import UsageError, did_you_mean
from kdcli.models.custom_class import custom_class
from kdcli.models.files import file_beside
from kdcli.models.load import (
    load_config,
    load_encoder,
    load_tokenizer,
    load_weights,
    location,
    save_model,
)
from kdcli.models.model import Model
from kdcli.models.training_rows import NO_ROWS
from kdcli.types import RowHashes

MODULES, PROMPTS, LENGTH = (
    "modules.json",
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
)
POOLING, DENSE = "1_Pooling", "2_Dense"
POOLINGS = {
    "mean": "mean_tokens",
    "cls": "cls_token",
    "last": "lasttoken",
    "max": "max_tokens",
    "mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
}
"""Name of a pooling -> the suffix of its key in 1_Pooling/config.json."""
CHOICES = ("mean", "cls", "last")
SAME_AS = {"lasttoken": "last", "mean_tokens": "mean", "cls_token": "cls", "max_tokens": "max"}


@dataclass(frozen=True)
class EmbeddingFormat:
    """What an embedding model does after its encoder, and what its users rely on.

    Attributes:
        pooling: a key of `POOLINGS`.
        normalize: vectors have length 1.
        dense: weight [out, in], bias [out] or None, and whether a tanh follows; None without a dense layer.
        prompts: name -> text put before a text; `default_prompt` is the name of the one used unless told.
        similarity: `cosine`, `dot`, `euclidean` or `manhattan`.
        max_length: tokens of a text, special ones included; None is the tokenizer's.
        prompt_counts: the prompt's tokens count in the pooling.
    """

    pooling: str = "mean"
    normalize: bool = True
    dense: tuple[Tensor, Tensor | None, bool] | None = None
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    similarity: str = "cosine"
    max_length: int | None = None
    prompt_counts: bool = True

    def width(self, hidden: int) -> int:
        """Components of a vector of an encoder of this hidden width."""
        return hidden if self.dense is None else len(self.dense[0])


class Pool(nn.Module):
    """Token states [B, L, D] and attention mask [B, L] (None: all real) -> vectors [B, E] in float32."""

    def __init__(self, fmt: EmbeddingFormat) -> None:
        super().__init__()
        self.pooling, self.normalize = fmt.pooling, fmt.normalize
        self.dense: nn.Linear | None = None
        self.tanh = False
        if fmt.dense is not None:
            weight, bias, self.tanh = fmt.dense
            self.dense = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
            self.dense.load_state_dict(
                {"weight": weight} | ({} if bias is None else {"bias": bias})
            )

    def forward(self, states_BLD: Tensor, mask_BL: Tensor | None) -> Tensor:
        with torch.autocast(states_BLD.device.type, enabled=False):
            return self.compute(states_BLD.float(), mask_BL)

    def compute(self, states_BLD: Tensor, mask_BL: Tensor | None) -> Tensor:
        """The vectors of float32 states; without autocast, which no exporter records."""
        x_BE = self._pooled(states_BLD, mask_BL)
        if self.dense is not None:
            x_BE = F.linear(x_BE, self.dense.weight.float(), self.dense.bias)
            x_BE = x_BE.tanh() if self.tanh else x_BE
        return F.normalize(x_BE, dim=-1) if self.normalize else x_BE

    def _pooled(self, x_BLD: Tensor, mask_BL: Tensor | None) -> Tensor:
        real_BL1 = (
            x_BLD.new_ones(*x_BLD.shape[:2], 1)
            if mask_BL is None
            else mask_BL[..., None].to(x_BLD.dtype)
        )
        if self.pooling == "cls":
            # The first real token, also where a tokenizer pads on the left.
            return x_BLD[torch.arange(len(x_BLD), device=x_BLD.device), real_BL1[..., 0].argmax(1)]
        if self.pooling == "last":
            last_B = x_BLD.shape[1] - 1 - real_BL1[..., 0].flip(1).argmax(1)
            return x_BLD[torch.arange(len(x_BLD), device=x_BLD.device), last_B]
        if self.pooling == "max":
            return x_BLD.masked_fill(real_BL1 == 0, -1e9).amax(1)
        counts_B1 = real_BL1.sum(1).clamp(min=1e-9)
        return (x_BLD * real_BL1).sum(1) / (
            counts_B1 if self.pooling == "mean" else counts_B1.sqrt()
        )

    @property
    def format_of_dense(self) -> tuple[Tensor, Tensor | None, bool] | None:
        """The dense layer as `EmbeddingFormat` holds it."""
        if self.dense is None:
            return None
        bias = None if self.dense.bias is None else self.dense.bias.detach().cpu().float()
        return self.dense.weight.detach().cpu().float(), bias, self.tanh


def read_format(source: str) -> EmbeddingFormat | None:
    """What the files beside a model say; None for a cross-encoder, or without files of sentence-transformers. Raises
    UsageError: modules or settings that kdcli does not compute, or damaged files."""
    modules = beside_model(source, MODULES, list)
    if modules is None or (beside_model(source, PROMPTS) or {}).get("model_type") == "CrossEncoder":
        return None
    if not all(isinstance(m, dict) for m in modules):
        raise UsageError(f"{source}/{MODULES} must hold a list of modules")
    fmt = EmbeddingFormat(normalize=False)
    for place, module in enumerate(modules):
        kind, path = str(module.get("type", "")).rsplit(".", 1)[-1], str(module.get("path", ""))
        if (kind == "Transformer") != (place == 0) or (kind == "Pooling") != (place == 1):
            order = ", ".join(str(m.get("type", "")).rsplit(".", 1)[-1] for m in modules)
            raise _not_computed(source, f"its modules are {order}")
        if place == 0 and path not in ("", "."):
            raise _not_computed(
                source,
                f"its encoder lies in the directory {path}",
                f"copy {path}/* beside {MODULES}",
            )
        if kind == "Pooling":
            settings = _required(source, f"{path}/config.json")
            fmt = replace(
                fmt,
                pooling=_pooling(source, settings),
                prompt_counts=settings.get("include_prompt", True),
            )
        elif kind == "Dense" and fmt.dense is None and not fmt.normalize:
            fmt = replace(fmt, dense=_dense(source, path))
        elif kind == "Normalize":
            fmt = replace(fmt, normalize=True)
        elif place > 1:
            raise _not_computed(source, f"module {place} is {kind or 'unnamed'}")
    told, length = (
        beside_model(source, PROMPTS) or {},
        (beside_model(source, LENGTH) or {}).get("max_seq_length"),
    )
    prompts = {str(k): str(v) for k, v in (told.get("prompts") or {}).items() if v}
    if not isinstance(length, int | None) or (length is not None and length < 3):
        raise UsageError(
            f"{source}/{LENGTH}: max_seq_length must be a number of tokens, got {length!r}"
        )
    if (default := told.get("default_prompt_name")) not in (None, *prompts):
        default = None  # Its prompt is empty.
    similarity = told.get("similarity_fn_name") or "cosine"
    return replace(
        fmt, prompts=prompts, default_prompt=default, similarity=similarity, max_length=length
    )


def format_for(
    source: str, config: PreTrainedConfig, pooling: str | None
) -> tuple[EmbeddingFormat, str]:
    """The format of an embedding model, or of a plain encoder, and a line that says where it is from. `pooling`: of
    `--pooling`, one of `CHOICES`. Raises UsageError: see `read_format`; the pooling contradicts the model's own."""
    if pooling is not None and pooling not in CHOICES:
        raise UsageError(
            f"unknown pooling '{pooling}'{did_you_mean(pooling, CHOICES)}",
            f"known: {', '.join(CHOICES)}",
        )
    found = read_format(source)
    if found is not None:
        if pooling not in (None, found.pooling):
            hint = f"leave --pooling out, or delete {MODULES} of a copy of the model"
            raise UsageError(f"{source} pools by {found.pooling}, not by {pooling}", hint)
        norm = ", normalised" if found.normalize else ""
        return found, f"{found.pooling} pooling{norm}, as its {MODULES} says"
    if pooling is not None:
        return EmbeddingFormat(pooling), f"{pooling} pooling, normalised"
    # As sentence-transformers does with such a model.
    return (
        EmbeddingFormat(),
        f"it has no {MODULES}: mean pooling, normalised, is assumed; --pooling says otherwise",
    )


def load_embedder(
    source: str, *, trust_remote_code: bool = False, compacted: bool = False
) -> Model:
    """An encoder whose directory may be one of sentence-transformers. `compacted` as in `load_config`. Raises
    UsageError: see `load_encoder`; or a cross-encoder."""
    config = load_config(source, trust_remote_code=trust_remote_code, compacted=compacted)
    if (
        any("ForSequenceClassification" in name for name in config.architectures or ())
        and read_format(source) is None
    ):
        raise UsageError(
            f"{source} scores texts ({config.architectures[0]}) and has no vectors",
            "take an embedding model; a reranker is distilled with --task rerank, a classifier with its own --task",
        )
    if (of_class := custom_class(config)) is None:
        return load_encoder(source, trust_remote_code=trust_remote_code)
    tokenizer = load_tokenizer(source, trust_remote_code=trust_remote_code)
    return Model(load_weights(source, of_class).eval(), tokenizer, source)


def save_embedder(
    model: Any, tokenizer: Any, fmt: EmbeddingFormat, folder: Path, rows: RowHashes = NO_ROWS
) -> None:
    """Save an encoder and its format, so that `SentenceTransformer` and `AutoModel` both load the directory; `rows` as
    in `save_model`."""
    if fmt.max_length is not None:
        tokenizer.model_max_length = fmt.max_length
    # First, since the encoder's config.json makes the directory a model.
    folder.mkdir(parents=True, exist_ok=True)
    save_format(fmt, model.config.hidden_size, folder)
    save_model(model, tokenizer, folder, rows)


def save_format(fmt: EmbeddingFormat, hidden: int, folder: Path) -> None:
    """Write the files of sentence-transformers beside an encoder of width `hidden`. All its versions read them."""
    names = [
        "Transformer",
        "Pooling",
        *(["Dense"] if fmt.dense else []),
        *(["Normalize"] if fmt.normalize else []),
    ]
    paths = ["", POOLING, *[f"{n}_{name}" for n, name in enumerate(names[2:], 2)]]
    kinds = {f"pooling_mode_{suffix}": name == fmt.pooling for name, suffix in POOLINGS.items()}
    pooling = {"word_embedding_dimension": hidden, **kinds, "include_prompt": fmt.prompt_counts}
    files: dict[str, Any] = {f"{POOLING}/config.json": pooling}
    for name, path in zip(names, paths, strict=True):
        with disk_errors(folder / path):
            (folder / path).mkdir(exist_ok=True)
        if name == "Dense":
            assert fmt.dense is not None
            weight, bias, tanh = fmt.dense
            tensors = {"linear.weight": weight.contiguous()} | (
                {} if bias is None else {"linear.bias": bias}
            )
            write_atomic(folder / path / "model.safetensors", save(tensors))
            activation = (
                "torch.nn.modules.activation.Tanh" if tanh else "torch.nn.modules.linear.Identity"
            )
            sizes = {
                "in_features": weight.shape[1],
                "out_features": weight.shape[0],
                "bias": bias is not None,
            }
            files[f"{path}/config.json"] = sizes | {"activation_function": activation}
    length = {"do_lower_case": False} | (
        {} if fmt.max_length is None else {"max_seq_length": fmt.max_length}
    )
    files[LENGTH] = length
    told = {
        "prompts": fmt.prompts,
        "default_prompt_name": fmt.default_prompt,
        "similarity_fn_name": fmt.similarity,
    }
    files[PROMPTS] = {"__version__": {}} | told
    # Last: without it the directory is a plain encoder.
    files[MODULES] = [
        {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.models.{name}"}
        for n, (name, path) in enumerate(zip(names, paths, strict=True))
    ]
    for name, content in files.items():
        write_atomic(folder / name, json.dumps(content, indent=2))


def beside_model(source: str, name: str, kind: type = dict) -> Any:
    """The content of a JSON file beside a model; None if it has no such file."""
    path = file_beside(location(source), name)
    return None if path is None else read_json(path, kind=kind)


def _required(source: str, name: str) -> dict[str, Any]:
    if (found := beside_model(source, name)) is None:
        raise UsageError(f"{source} has no {name}, which its {MODULES} names")
    return dict(found)


def _pooling(source: str, settings: dict[str, Any]) -> str:
    """The one pooling of a Pooling module's settings, old keys or new."""
    if "pooling_mode" in settings:
        modes = (
            [settings["pooling_mode"]]
            if isinstance(settings["pooling_mode"], str)
            else settings["pooling_mode"]
        )
    else:
        modes = [
            key.removeprefix("pooling_mode_")
            for key, on in settings.items()
            if on is True and "pooling_" in key
        ]
    known = [SAME_AS.get(str(mode), str(mode)) for mode in modes]
    if len(known) != 1 or known[0] not in POOLINGS:
        raise _not_computed(source, f"it pools by {' and '.join(map(str, modes)) or 'nothing'}")
    return known[0]


def _dense(source: str, path: str) -> tuple[Tensor, Tensor | None, bool]:
    settings = _required(source, f"{path}/config.json")
    activation = str(settings.get("activation_function", "")).rsplit(".", 1)[-1]
    if activation not in ("Tanh", "Identity"):
        raise _not_computed(source, f"its dense layer has activation {activation or 'none named'}")
    if (file := file_beside(location(source), f"{path}/model.safetensors")) is None:
        raise UsageError(
            f"{source} has no {path}/model.safetensors",
            "a dense layer is read from safetensors only",
        )
    try:
        tensors = load(file.read_bytes())
    except SafetensorError as error:
        raise UsageError(
            f"{file} is damaged: {error}", "copy the model again from where it was made"
        ) from None
    if tensors.keys() - {"linear.weight", "linear.bias"} or "linear.weight" not in tensors:
        raise UsageError(
            f"{file} must hold linear.weight and perhaps linear.bias, not {', '.join(sorted(tensors))}"
        )
    return tensors["linear.weight"].float(), tensors.get("linear.bias"), activation == "Tanh"


def _not_computed(source: str, what: str, hint: str | None = None) -> UsageError:
    known = f"an encoder, a pooling ({', '.join(POOLINGS)}), at most one Dense, perhaps Normalize"
    return UsageError(
        f"{source} is an embedding model that kdcli cannot compute: {what}",
        hint or f"known: {known}",
    )
