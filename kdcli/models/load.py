"""Loading an encoder with its tokenizer, and saving one: safetensors only, no code that comes with a model.

A source is a hub id, a directory, or `demo` (the teacher inside the package).
"""

from __future__ import annotations

import importlib.resources
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import list_repo_files, try_to_load_from_cache
from huggingface_hub.errors import GatedRepoError, StrictDataclassError
from huggingface_hub.utils import httpx  # type: ignore[attr-defined]  # its client, whichever version that is
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModel,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from kdcli.disk import disk_errors
from kdcli.errors import UsageError
from kdcli.models.custom_class import CODE, COMPACT, describe_code, forget_custom_classes, is_custom
from kdcli.models.layout import LAYOUTS, layout_for, row_of
from kdcli.models.shape import shape_of
from kdcli.types import ModelShape

# A bar for each of a few files read from disk says nothing and tears our own.
transformers_logging.disable_progress_bar()

DEMO = "demo"
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
OPTIONAL = ("pooler.", "contact_head.", "embeddings.position_ids")
"""Parts of a base model that a checkpoint may lack without being broken."""


@dataclass(frozen=True)
class LoadedModel:
    """An encoder in float32 and eval mode, its tokenizer and where it came from."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    shape: ModelShape
    source: str


def location(source: str) -> str:
    """What `from_pretrained` has to be given for a source."""
    return str(importlib.resources.files("kdcli") / "data" / "demo_teacher") if source == DEMO else source


def load_encoder(source: str, *, trust_remote_code: bool = False) -> LoadedModel:
    """Load a base encoder and its tokenizer.

    Raises:
        UsageError: nothing there, offline and not cached, not an encoder, no tokenizer, pickled weights only, damaged
            or incomplete weights, or code of its own without `trust_remote_code`.
    """
    load_config(source, trust_remote_code=trust_remote_code)
    tokenizer = load_tokenizer(source, trust_remote_code=trust_remote_code)
    model = load_weights(source, AutoModel, trust_remote_code=trust_remote_code)
    return LoadedModel(model.eval(), tokenizer, shape_of(model.config), source)


def load_config(
    source: str, *, trust_remote_code: bool = False, weights: bool = True, compacted: bool = False
) -> PreTrainedConfig:
    """The configuration of a model that can be loaded: there, of a supported type, its weights in safetensors.

    Args:
        weights: False does not ask for them: the configuration alone is what is wanted.
        compacted: a model that `kdcli.sparse.compact` made will do, which no verb can train.

    Raises:
        UsageError: see `load_encoder`.
    """
    where = location(source)
    folder = Path(where)
    if folder.is_dir():
        _check_folder(folder)
    elif folder.exists() or where.startswith((".", "/", "~")) or where.count("/") > 1:
        raise UsageError(f"no model directory {source}", "give a hub id, a directory with config.json, or 'demo'")
    _check_type(source, where, trust_remote_code)
    config = _config(source, where, trust_remote_code)
    if hasattr(config, COMPACT) and not compacted:
        raise UsageError(
            f"{source} is compacted: its layers have shapes of their own, which cannot be trained or learned from",
            "give the masked model it was made of; evaluate, benchmark, export and kdcli.load take it",
        )
    layout_for(config)
    if weights and folder.is_dir():
        _check_weights(folder)
    elif weights:
        _check_repository(source)
    return config


def save_model(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Save a model directory: config.json, model.safetensors, the tokenizer's files; for a class that transformers does
    not have, the file with its code.

    Raises:
        MachineError: the disk is full or not writable; none of the files is there then.
    """
    aside = folder / ".model.part"
    if is_custom(model):
        describe_code(model)
    with disk_errors(folder / "model.safetensors"):
        try:
            shutil.rmtree(aside, ignore_errors=True)
            aside.mkdir(parents=True)
            model.save_pretrained(aside)
            if is_custom(model):
                shutil.copyfile(CODE, aside / CODE.name)
            tokenizer.save_pretrained(aside)
            mode = (aside / "config.json").stat().st_mode
            for file in sorted(aside.iterdir()):
                # safetensors writes for the owner alone.
                file.chmod(mode)
                file.replace(folder / file.name)
        finally:
            shutil.rmtree(aside, ignore_errors=True)


def _check_folder(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise UsageError(f"{folder} has no config.json, so it is not a model directory")
    _check_json(folder / "config.json")


def _check_weights(folder: Path) -> None:
    if (folder / WEIGHTS[1]).is_file():
        _check_json(folder / WEIGHTS[1])
    elif not (folder / WEIGHTS[0]).is_file():
        pickled = sorted(folder.glob("*.bin"))
        if pickled:
            raise _pickled(str(folder), pickled[0].name)
        raise UsageError(f"{folder} has no {WEIGHTS[0]}")


def _check_json(file: Path) -> None:
    try:
        found = json.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise UsageError(f"{file} is not valid JSON: {error}") from None
    except OSError as error:
        raise UsageError(f"{file} cannot be read: {error.strerror}") from None
    if not isinstance(found, dict):
        raise UsageError(f"{file} must hold a JSON object, not a {type(found).__name__}")


def _check_repository(source: str) -> None:
    """Refuse a repository without safetensors: left to itself, transformers would ask a service to convert its pickle.

    Without a network there is nothing to ask and nothing to check: what is in the cache is tried.
    """
    if any(isinstance(try_to_load_from_cache(source, name), str) for name in WEIGHTS):
        return
    try:
        files = list_repo_files(source)
    except (OSError, httpx.HTTPError):
        return
    if not any(name in files for name in WEIGHTS):
        pickled = [name for name in files if name.endswith(".bin")]
        if pickled:
            raise _pickled(source, pickled[0])
        raise UsageError(f"{source} has no {WEIGHTS[0]}")


def _pickled(source: str, name: str) -> UsageError:
    return UsageError(
        f"{source} has its weights as a pickle ({name}), which can run code when opened; kdcli reads safetensors only",
        'if you trust it, convert it once: python -c "from transformers import AutoModelForMaskedLM as M; '
        f"M.from_pretrained('{source}', use_safetensors=False).save_pretrained('converted')\" "
        "and copy the tokenizer's files beside it",
    )


def _check_type(source: str, where: str, trust_remote_code: bool) -> None:
    """Refuse a type that is not supported, before a configuration is made of it and before any code of its own runs."""
    try:
        raw, _ = PreTrainedConfig.get_config_dict(where)
    except (OSError, ValueError) as error:
        raise _not_found(source, error) from None
    kind = str(raw.get("model_type"))
    if "model_type" not in raw:
        raise UsageError(f"the config.json of {source} has no model_type", "is it a model of transformers?")
    if kind not in LAYOUTS and "auto_map" in raw and not trust_remote_code:
        raise _own_code(source)
    row_of(kind, decodes=bool(raw.get("is_decoder") or raw.get("is_encoder_decoder")))


def _not_found(source: str, error: Exception) -> UsageError:
    if isinstance(error.__cause__, GatedRepoError):
        return UsageError(
            f"model '{source}' is on the hub, but you have no access to it", "ask for it there, then `hf auth login`"
        )
    return UsageError(
        f"model '{source}' was found neither as a directory, nor in the Hugging Face cache, nor on the hub: "
        f"{_first_line(error)}",
        "check the name and the network, or use a local directory or 'demo'",
    )


def _own_code(source: str) -> UsageError:
    return UsageError(
        f"{source} brings code of its own, which is not run unless you say so",
        "read that code, then add --trust-remote-code",
    )


def _config(source: str, where: str, trust_remote_code: bool) -> PreTrainedConfig:
    try:
        return AutoConfig.from_pretrained(where, trust_remote_code=trust_remote_code)
    except ValueError as error:
        if "trust_remote_code" in str(error):
            raise _own_code(source) from None
        raise UsageError(f"the config.json of {source} cannot be used: {_first_line(error)}") from None
    except StrictDataclassError as error:
        said = " ".join(str(error).split())
        raise UsageError(f"the config.json of {source} cannot be used: {said}") from None


def load_tokenizer(source: str, *, trust_remote_code: bool = False, **settings: Any) -> PreTrainedTokenizerBase:
    """The tokenizer of a model; `settings` go to `from_pretrained`.

    Raises:
        UsageError: there is none, or it cannot be read.
    """
    try:
        with _quietly():
            tokenizer = AutoTokenizer.from_pretrained(location(source), trust_remote_code=trust_remote_code, **settings)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        raise UsageError(
            f"the tokenizer of {source} cannot be loaded: {_first_line(error)}",
            "its files (tokenizer.json …) must lie beside the weights",
        ) from None
    # Where there are no files at all, transformers makes one that knows nothing but [PAD], [UNK], [CLS] …
    if not set(tokenizer.get_vocab()) - set(tokenizer.all_special_tokens):
        raise UsageError(
            f"{source} has no tokenizer", "put the tokenizer's files (tokenizer.json …) beside its weights"
        )
    return tokenizer


def load_weights(
    source: str, auto_class: Any, *, trust_remote_code: bool = False, seed: int = 0, **settings: Any
) -> PreTrainedModel:
    """The model in float32, every tensor of it read from safetensors.

    Args:
        auto_class: `AutoModel`, or one with a head that the weights hold too.
        seed: of what a base model may lack and is then drawn, which is a pooler.
        settings: further arguments of `from_pretrained`.

    Raises:
        UsageError: unreadable, damaged or incomplete weights.
    """
    try:
        with _quietly(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model, info = auto_class.from_pretrained(
                location(source),
                trust_remote_code=trust_remote_code,
                use_safetensors=True,
                dtype=torch.float32,
                output_loading_info=True,
                **settings,
            )
    except SafetensorError as error:
        raise UsageError(f"the weights of {source} are damaged: {error}", "download or copy them again") from None
    except OSError as error:
        raise UsageError(
            # Under a message that speaks of names and directories lies what really happened.
            f"the weights of {source} cannot be read: {_first_line(error.__cause__ or error)}",
            "check the network and the files, then try again",
        ) from None
    except (RuntimeError, ValueError) as error:
        raise UsageError(f"the weights of {source} do not fit its config.json: {_misfit(error)}") from None
    if not is_custom(model):
        forget_custom_classes(model.config)
    # With a head on top, what belongs to the encoder has its prefix, and a pooler is there because the head reads it.
    headed = model.base_model is not model
    prefix, optional = (f"{model.base_model_prefix}.", OPTIONAL[1:]) if headed else ("", OPTIONAL)
    missing = sorted(
        k for k in info["missing_keys"] if not (k.startswith(prefix) and k.removeprefix(prefix).startswith(optional))
    )
    if missing:
        raise UsageError(
            f"the weights of {source} are incomplete: {len(missing)} tensors are missing, for example {missing[0]}"
        )
    loaded: PreTrainedModel = model
    return loaded


@contextmanager
def _quietly() -> Iterator[None]:
    """Without transformers' tables of tensors: what a base model leaves out is no news, what it lacks is our error."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)


def _misfit(error: BaseException) -> str:
    # The line of transformers about sizes points to a table that is not shown.
    return "tensors of other sizes" if "ignore_mismatched_sizes" in str(error) else _first_line(error)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
