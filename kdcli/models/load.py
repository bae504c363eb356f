"""Loading an encoder with its tokenizer, and saving one: safetensors only, no code that comes with a model.

A source is a hub id, a directory, or `demo` (the teacher inside the package).
"""

from __future__ import annotations

import importlib.resources
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModel, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from kdcli.disk import disk_errors
from kdcli.errors import UsageError
from kdcli.models.layout import layout_for
from kdcli.models.shape import shape_of
from kdcli.types import ModelShape

# A bar for each of a few files read from disk says nothing and tears our own.
transformers_logging.disable_progress_bar()

DEMO = "demo"
OPTIONAL = ("pooler.", "contact_head.", "embeddings.position_ids")
"""Parts of a base model that a checkpoint may lack without being broken."""


@dataclass(frozen=True)
class Loaded:
    """An encoder in float32 and eval mode, its tokenizer and where it came from."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    shape: ModelShape
    source: str


def location(source: str) -> str:
    """What `from_pretrained` has to be given for a source."""
    return str(importlib.resources.files("kdcli") / "data" / "demo_teacher") if source == DEMO else source


def load_encoder(source: str, *, trust_remote_code: bool = False) -> Loaded:
    """Load a base encoder and its tokenizer.

    Raises:
        UsageError: nothing there, offline and not cached, not an encoder, no tokenizer, pickled weights only, damaged
            or incomplete weights, or code of its own without `trust_remote_code`.
    """
    where = location(source)
    folder = Path(where)
    if folder.is_dir():
        _check_folder(folder)
    elif folder.exists() or where.startswith((".", "/", "~")) or where.count("/") > 1:
        raise UsageError(f"no model directory {source}", "give a hub id, a directory with config.json, or 'demo'")
    config = _config(source, where, trust_remote_code)
    layout_for(config)
    tokenizer = _tokenizer(source, where, trust_remote_code)
    model = _model(source, where, trust_remote_code)
    return Loaded(model.eval(), tokenizer, shape_of(model.config), source)


def save_encoder(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Save a stock model directory: config.json, model.safetensors, the tokenizer's files.

    Raises:
        MachineError: the disk is full or not writable; none of the files is there then.
    """
    aside = folder / ".model.part"
    with disk_errors(folder / "model.safetensors"):
        try:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
            model.save_pretrained(aside)
            tokenizer.save_pretrained(aside)
            for file in sorted(aside.iterdir()):
                file.replace(folder / file.name)
        finally:
            shutil.rmtree(aside, ignore_errors=True)


def _check_folder(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise UsageError(f"{folder} has no config.json, so it is not a model directory")
    try:
        json.loads((folder / "config.json").read_text("utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise UsageError(f"{folder / 'config.json'} is not valid JSON: {error}") from None
    if not list(folder.glob("*.safetensors")):
        pickled = sorted(folder.glob("*.bin"))
        if pickled:
            raise _pickled(str(folder), pickled[0].name)
        raise UsageError(f"{folder} has no model.safetensors")


def _pickled(source: str, name: str) -> UsageError:
    return UsageError(
        f"{source} has its weights as a pickle ({name}), which can run code when opened; kdcli reads safetensors only",
        'if you trust it, convert it once: python -c "from transformers import AutoModelForMaskedLM as M; '
        f"M.from_pretrained('{source}', use_safetensors=False).save_pretrained('converted')\" "
        "and copy the tokenizer's files beside it",
    )


def _config(source: str, where: str, trust_remote_code: bool) -> Any:
    try:
        return AutoConfig.from_pretrained(where, trust_remote_code=trust_remote_code)
    except ValueError as error:
        if "trust_remote_code" in str(error):
            raise UsageError(
                f"{source} brings code of its own, which is not run unless you say so",
                "read that code, then add --trust-remote-code",
            ) from None
        raise UsageError(f"{source}: {_first_line(error)}") from None
    except OSError as error:
        raise UsageError(
            f"model '{source}' was found neither as a directory, nor in the Hugging Face cache, nor on the hub: "
            f"{_first_line(error)}",
            "check the name and the network, or use a local directory or 'demo'",
        ) from None


def _tokenizer(source: str, where: str, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    if Path(where).is_dir() and not any(Path(where).glob("*token*")) and not any(Path(where).glob("vocab*")):
        raise UsageError(
            f"{source} has no tokenizer", "copy the tokenizer's files (tokenizer.json …) beside its weights"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(where, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        raise UsageError(
            f"the tokenizer of {source} cannot be loaded: {_first_line(error)}",
            "its files (tokenizer.json …) must lie beside the weights",
        ) from None
    return tokenizer


def _model(source: str, where: str, trust_remote_code: bool) -> PreTrainedModel:
    try:
        model, info = AutoModel.from_pretrained(
            where,
            trust_remote_code=trust_remote_code,
            use_safetensors=True,
            dtype=torch.float32,
            output_loading_info=True,
        )
    except SafetensorError as error:
        raise UsageError(f"the weights of {source} are damaged: {error}", "download or copy them again") from None
    except OSError as error:
        if "safetensors" in str(error):
            raise _pickled(source, "pytorch_model.bin") from None
        raise UsageError(f"the weights of {source} cannot be read: {_first_line(error)}") from None
    except (RuntimeError, ValueError) as error:
        raise UsageError(f"the weights of {source} do not fit its config.json: {_first_line(error)}") from None
    missing = sorted(k for k in info["missing_keys"] if not k.startswith(OPTIONAL))
    if missing:
        raise UsageError(
            f"the weights of {source} are incomplete: {len(missing)} tensors are missing, for example {missing[0]}"
        )
    return model


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
