"""The layout of each text encoder type of the installed transformers is what it was: a release that
moves things is seen here."""

import json
import os
import re
from pathlib import Path

import pytest
from encoders import small_config
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto as auto

from kdcli.errors import UsageError
from kdcli.models.layout import layout_for

pytestmark = pytest.mark.long

TABLE = Path(__file__).with_name("every_type.json")
DECODERS = [
    *("cohere", "gemma", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "granite", "lfm2", "llama"),
    *("ministral3", "mistral", "modernbert-decoder", "olmo2", "opt", "phi", "phi3", "qwen2"),
    *("qwen3", "qwen3_5_text", "smollm3"),
]
"""Types of which embedding models are made."""
FURTHER = (
    *("bert-generation", "bros", "canine", "dpr", "embedding_gemma2_text", "layoutlmv3", "led"),
    *("lilt", "longt5", "m2m_100", "markuplm", "nllb-moe", "openai_privacy_filter", "pegasus_x"),
    *("splinter", "switch_transformers", "umt5", "visual_bert", "xlnet"),
)
"""Text encoders without a head for masked words."""


def has_parts(kind: str) -> bool:
    """Whether a type has configurations for several networks, as for texts and images."""
    config = CONFIG_MAPPING[kind]
    return bool(config.sub_configs) and any(
        getattr(config(), name, None) is not None for name in config.sub_configs
    )


TYPES = sorted(
    {
        kind
        for kind in (
            *auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
            *auto.MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES,
            *DECODERS,
            *FURTHER,
        )
        if kind in CONFIG_MAPPING
        and kind not in auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES
        and not has_parts(kind)
        and kind not in auto.MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES
    }
)
SHOWN = ("layers", *"qkvo", "up", "gate", "down")


def outcome(kind: str) -> str:
    """The layout in one line, or why there is none."""
    try:
        row = layout_for(small_config(kind))
    except UsageError as error:
        return f"refused: {error.message}"
    if row.missing:
        return "states: " + row.missing.partition("of it: ")[2]
    paths = " ".join(str(getattr(row, name)) for name in SHOWN)
    flags = [n for n in ("fused", "rotary", "other_term", "causal", "shared") if getattr(row, n)]
    return f"{paths} {' '.join(flags)}".strip()


def test_the_layout_of_each_type_is_what_it_was():
    now = {kind: re.sub(r"\s+", " ", outcome(kind)) for kind in TYPES}
    if os.environ.get("KDCLI_WRITE_TYPES"):
        TABLE.write_text(json.dumps(now, indent=1) + "\n", "utf-8")
    before = json.loads(TABLE.read_text("utf-8"))
    changed = {k: (before.get(k), now.get(k)) for k in before | now if before.get(k) != now.get(k)}
    assert changed == {}
