"""Networks of transformers that are equal to code which models on the hub bring.

Their weights are renamed by transformers. Models with this code need no `--trust-remote-code`.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

EQUAL_TO_STOCK = ("eurobert", "nomic_bert")
"""Types whose code on the hub has the name of a type of transformers, and computes the same,
unless it has a mixture of experts."""
TWINS = {"new": "gte"}
"""Type of the code -> type of transformers."""
NEW_DEFAULTS = {
    "layer_norm_type": "layer_norm",
    "position_embedding_type": "rope",
    "logn_attention_scale": False,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 2048,
    "vocab_size": 30528,
    "hidden_size": 768,
    "num_attention_heads": 12,
    "pad_token_id": 0,
}
"""Settings of the type `new` that its configuration may leave out, as its code has them."""
NEW_NETWORK = ("layer_norm_type", "position_embedding_type", "logn_attention_scale")
"""Those of its settings that transformers' network does not have."""
NEW_TENSORS = re.compile(
    r"(new\.)?(embeddings\.(word_embeddings|token_type_embeddings|LayerNorm|rotary_emb)"
    r"|encoder\.layer\.\d+\.(attention\.(qkv|o)_proj|mlp\.(up_gate|down)_proj|(attn|mlp)_ln)"
    r"|pooler)\..*|(classifier|lm_head)\..*"
)
"""The tensors that its weights may have; the states do not need poolers and heads."""


def is_equal_to_stock(raw: Mapping[str, Any]) -> bool:
    """Return whether transformers' network of the same type is that of the model's own code."""
    return raw.get("model_type") in EQUAL_TO_STOCK and not raw.get("moe_every_n_layers")


def native_twin(raw: Mapping[str, Any], tensors: Collection[str]) -> PreTrainedConfig | None:
    """Return the configuration of the equal network of transformers, or None if there is none.

    Weights with `tensors` of other names are of another version of the code.
    """
    twin = TWINS.get(str(raw.get("model_type")))
    if twin not in CONFIG_MAPPING or not raw.get("auto_map"):
        return None
    if not all(map(NEW_TENSORS.fullmatch, tensors)):
        return None
    settings = NEW_DEFAULTS | dict(raw)
    if any(settings[name] != NEW_DEFAULTS[name] for name in NEW_NETWORK):
        return None
    rope = _rope(settings)
    if rope is None:
        return None
    names = [str(name) for name in raw.get("architectures") or ()]
    unused = ("auto_map", "model_type", "rope_theta", "rope_scaling", *NEW_NETWORK)
    kept = {name: value for name, value in settings.items() if name not in unused}
    kept["architectures"] = [f"Gte{name[3:]}" if name.startswith("New") else name for name in names]
    return CONFIG_MAPPING[twin](**kept, rope_parameters=rope)


def _rope(settings: Mapping[str, Any]) -> dict[str, object] | None:
    """Return the rotary embedding of the type `new`, or None if transformers has no such one."""
    theta, scaling = float(settings["rope_theta"]), settings.get("rope_scaling")
    if scaling is None:
        return {"rope_type": "default", "rope_theta": theta}
    if not isinstance(scaling, dict) or scaling.keys() != {"type", "factor"}:
        return None
    if scaling["type"] != "ntk" or not scaling["factor"] >= 1:
        return None
    # A larger base, after which all frequencies are divided by the same number.
    factor, heads = float(scaling["factor"]), int(settings["num_attention_heads"])
    divisor = factor ** (2 * heads / int(settings["hidden_size"]))
    return {"rope_type": "linear", "rope_theta": theta * factor, "factor": divisor}
