"""Read a model's files with bounds, and check them before transformers builds anything from them.

`config.json` may not name code, other files, or sizes that the weights do not have. An index may
name only safetensors files in its own directory, so that nothing is unpickled.
"""

import json
import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, NoReturn, Self

import torch
from huggingface_hub.errors import StrictDataclassError
from huggingface_hub.utils import httpx  # type: ignore[attr-defined]  # the hub's client
from pydantic import (
    BaseModel,
    Field,
    StrictBool,
    StrictInt,
    ValidationError,
    model_validator,
)
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.models.auto.auto_factory import _BaseAutoModelClass
from transformers.utils.hub import cached_file, get_checkpoint_shard_files

from kdcli.custom_code import (
    CODE_FAILS,
    code_errors,
    custom_code_allowed,
    raise_error_of_code,
)
from kdcli.disk import read_json
from kdcli.errors import KdcliError, UsageError, first_problem, one_line, shortened
from kdcli.models.custom_class import COMPACT_KEY, LABEL_WORDS_KEY, UNILM_KEY

ModelClass = type[PreTrainedModel] | type[_BaseAutoModelClass]
"""A class that loads models: a model class, or an auto class such as `AutoModel`."""

CONFIG_FILE, ADAPTER = "config.json", "adapter_config.json"
FACTS = "export.json"
"""The facts of an export, a model file for another runtime than torch."""
MODULES_FILE = "modules.json"
"""sentence-transformers' list of the modules that a text passes through."""
LIBRARY_TYPE = "sentence-transformers"
"""The model type of an embedding model that only sentence-transformers computes."""
BY_LIBRARY = "evaluate it, or let it teach another encoder: kdcli distill MODEL --student ENCODER"
"""What can be done with such a model."""
LIBRARY = "sentence_transformers."
"""Prefix of the module types that are part of sentence-transformers."""
LENGTH_FILE = "sentence_bert_config.json"
"""sentence-transformers' settings of an encoder, such as its `max_seq_length`."""
LENGTH_FILES = (
    LENGTH_FILE,
    *(
        f"sentence_{kind}_config.json"
        for kind in ("roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
    ),
)
"""The names that this file had in any version, the current one first."""
TASK_KEY = "kdcli_task"
"""Configuration key with the name of the task on which kdcli fine-tuned the model."""
WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json")
PICKLES = "pytorch_model*.bin"
"""The weights that earlier versions of the libraries wrote."""
MODEL_FILES = (
    "README.md",
    "LICENSE*",
    CONFIG_FILE,
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "*.py",  # A model's own code may import files of any name.
    # Tokenizers
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "preprocessor_config.json",
    "vocab.*",
    "merges.txt",
    "bpe.codes",
    "*.model",
    # sentence-transformers
    "modules.json",
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
    "[0-9]_*/config.json",
    "[0-9]_*/model.safetensors",
    # Exports
    "export.json",
    "onnx/*.onnx*",
    "openvino/*.xml",
    "openvino/*.bin",
    # The small model of a cascade
    "first/*.json",
    "first/vocab.*",
    "first/merges.txt",
    "first/*.model",
    "first/onnx/*.onnx*",
)
"""Files that a model needs, as patterns of paths below its directory."""
FLAGS = (
    "output_hidden_states",
    "output_attentions",
    "use_cache",
    "tie_word_embeddings",
    "is_decoder",
)
SIZE = re.compile(
    r".*(dim|_size|layers|heads|embeddings|positions|groups|group_num|networks|buckets|num_labels)"
)
# Sizes that count modules.
REPEATED = re.compile(r".*(layers|groups|group_num|networks)")
# Sizes that may be -1, which DeBERTa writes for an absent table.
OPTIONAL_SIZE = re.compile(r".*(buckets|positions)")
# Sizes of at least 1. Others may be 0, such as ALBERT's gap_size.
POSITIVE_SIZES = ("layers", "heads", "hidden_size", "intermediate_size", "embedding_size")
MPNET_PADDING = 1
OF_BLOCKS = ("big_bird", "bigbird_pegasus")
MAX_SIZE, MAX_REPEATED = 10_000_000, 1_000
HUB_ERRORS = (OSError, httpx.HTTPError)
ATTENTION = (None, "eager", "sdpa")
OTHER_WEIGHTS = {
    "quantization_config": "quantised weights",
    "transformers_weights": "a file of weights",
}
FOREIGN_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
    StrictDataclassError,
)
"""Exceptions that transformers and tokenizers raise for unsuitable files."""
Size = Annotated[int, Field(strict=True, ge=0, le=MAX_SIZE)]
FourSizes = Annotated[list[Size], Field(min_length=4, max_length=4)]


class _CompactLayer(BaseModel):
    """A layer of `COMPACT_KEY`: its heads, and the sizes of its matrices."""

    heads: Annotated[int, Field(strict=True, ge=1)]
    Q: FourSizes
    K: FourSizes
    V: FourSizes
    O: FourSizes  # noqa: E741  # the name of the matrix
    U: FourSizes
    D: FourSizes

    @model_validator(mode="after")
    def _divide(self) -> Self:
        if any(sizes[1] % self.heads for sizes in (self.Q, self.K, self.V)):
            raise ValueError("the outputs of Q, K and V must be multiples of the number of heads")
        return self


class _LabelWords(BaseModel):
    ids: list[Any]
    auto_class: str


class _UniLM(BaseModel):
    mask_token_id: StrictInt
    position_offset: StrictInt
    interface: StrictInt | StrictBool


class _Config(BaseModel):
    """The keys of a configuration whose JSON types transformers and kdcli rely on."""

    auto_map: dict[str, Any] | None = None
    id2label: dict[Any, Any] | None = None
    label2id: dict[Any, Any] | None = None
    compact: list[_CompactLayer] | None = Field(None, validation_alias=COMPACT_KEY)
    words: _LabelWords | None = Field(None, validation_alias=LABEL_WORDS_KEY)
    unilm: _UniLM | None = Field(None, validation_alias=UNILM_KEY)


def file_of(
    source: str, name: str, revision: str | None = None, *, needed: bool = False
) -> Path | None:
    """Return a file of a directory or a hub id, downloaded if it is not cached, or None.

    Raises HUB_ERRORS if the hub cannot be reached, or if a `needed` file does not exist.
    """
    path = cached_file(
        source, name, revision=revision, _raise_exceptions_for_missing_entries=needed
    )
    return None if path is None else Path(path)


def file_beside(source: str, name: str) -> Path | None:
    """Return a file of a model, or None if it does not exist or the hub cannot be reached."""
    try:
        path = file_of(source, name)
    except HUB_ERRORS:
        return None
    return path if path is not None and path.is_file() else None


def hint_of_models(folder: Path) -> str:
    """Return a hint for a directory without a model: the models in its subdirectories, if any."""
    inside = sorted(str(path.parent) for path in folder.glob(f"*/{CONFIG_FILE}"))
    if inside:
        return f"there are models in {', '.join(inside)}: give one of them"
    return "give the directory of a model"


def model_files(folder: Path, more: Sequence[str] = ()) -> list[str]:
    """Return the files that a model needs, as paths below its directory.

    Args:
        folder: The directory.
        more: Further patterns of paths.
    """
    files = []
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = path.relative_to(folder).as_posix()
        # A pattern without a folder does not reach into folders.
        same_depth = [p for p in (*MODEL_FILES, *more) if p.count("/") == name.count("/")]
        if any(fnmatchcase(name, pattern) for pattern in same_depth):
            files.append(name)
    return files


def check_modules(source: str, modules: Sequence[Any]) -> None:
    """Raise a UsageError unless each module has a path, and a name that no other one has."""
    if not all(isinstance(m, dict) and isinstance(m.get("path"), str) for m in modules):
        raise UsageError(f"{source}/{MODULES_FILE} must hold a list of modules with paths")
    names = {module.get("name") for module in modules if isinstance(module.get("name"), str)}
    if len(names) != len(modules) or any(not name or "." in name for name in names):
        raise UsageError(
            f"{source}/{MODULES_FILE} must give each module a name of its own, without dots",
            "sentence-transformers keeps only the last of the modules with one name",
        )


def module_kind(module: Mapping[str, object]) -> str:
    """Return the class name of a module in `MODULES_FILE`.

    A class that is not part of sentence-transformers keeps the name of its package.
    """
    kind = str(module.get("type", ""))
    return kind.rsplit(".", 1)[-1] if kind.startswith(LIBRARY) else kind


def encoder_path(file: Path) -> str:
    """Return the path of the encoder, relative to the `MODULES_FILE` that names it.

    It is empty unless the encoder has a directory of its own.
    """
    return str(_first_module(file).get("path") or "")


def encoder_folder(folder: Path) -> Path:
    """Return the directory of the encoder in a directory of sentence-transformers.

    Raises UsageError if `MODULES_FILE` names a directory outside the model, or none.
    """
    inside = Path(encoder_path(folder / MODULES_FILE))
    if inside.is_absolute() or ".." in inside.parts or not (folder / inside).is_dir():
        raise UsageError(
            f"{folder / MODULES_FILE} says that the encoder is in '{inside}', which is no "
            "directory of the model",
            "copy the complete model again; the path of an encoder next to the file is empty",
        )
    return folder / inside


def holds_table(source: str) -> bool:
    """Return whether a directory or a hub id holds a static model of sentence-transformers."""
    file = file_beside(source, MODULES_FILE)
    return file is not None and module_kind(_first_module(file)) == "StaticEmbedding"


def _first_module(file: Path) -> dict[str, Any]:
    modules: list[Any] = read_json(file, kind=list) if file.is_file() else []
    return modules[0] if modules and isinstance(modules[0], dict) else {}


def _check_label_numbers(raw: Mapping[str, Any], source: object) -> None:
    """Raise a UsageError if `label2id` contradicts `id2label`, or names a head's outputs alone."""
    names = {str(name): str(number) for number, name in (raw.get("id2label") or {}).items()}
    numbers = {str(name): str(number) for name, number in (raw.get("label2id") or {}).items()}
    has_head = any("Classification" in name for name in raw.get("architectures") or ())
    if has_head and not names and any(not name.startswith("LABEL_") for name in numbers):
        named = {number: name for name, number in numbers.items()}
        raise UsageError(
            f"{source} has 'label2id' but no 'id2label', where every library reads the names of a "
            "head's outputs",
            f'add it to a copy of the model: "id2label": {shortened(json.dumps(named), 200)}',
        )
    # Many models have label2id of another task, which no library reads.
    if names.keys() != numbers.keys() or names == numbers:
        return
    name = next(name for name, number in names.items() if numbers[name] != number)
    raise UsageError(
        f"{source}: class '{name}' is number {names[name]} in 'id2label', but {numbers[name]} in "
        "'label2id'",
        "correct one in a copy of the model; id2label is in the order of the head's outputs",
    )


def check_config(raw: Mapping[str, Any], source: object) -> None:
    """Check the values of a configuration that transformers trusts.

    Raises UsageError for a value of the wrong type, a size beyond any encoder's, an attention
    implementation that would be downloaded, and weights that kdcli does not read.
    """
    names = [] if raw.get("architectures") is None else raw["architectures"]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        _refuse(raw, source, "architectures", "a list of names")
    try:
        _Config.model_validate(raw)
    except ValidationError as error:
        raise UsageError(f"{source}: {first_problem(error, raw)}") from None
    _check_id2label(raw, source)
    _check_label_numbers(raw, source)
    for name, value in raw.items():
        _check_setting(raw, name, value, source)
    if raw.get("model_type") == "mpnet" and raw.get("pad_token_id") not in (None, MPNET_PADDING):
        # Its network counts positions from this id, whatever the configuration says.
        _refuse(raw, source, "pad_token_id", f"{MPNET_PADDING} in this type of model")
    if raw.get("model_type") in OF_BLOCKS and raw.get("attention_type") != "original_full":
        raise UsageError(
            f"{source}: block-sparse attention switches itself off after a short text, so answers "
            "depend on earlier texts",
            'set "attention_type": "original_full" in the config.json of a copy; it has the same '
            "weights",
        )
    if raw.get("chunk_size_feed_forward") not in (None, 0):
        allowed = "0, because other values fail for some batch lengths"
        _refuse(raw, source, "chunk_size_feed_forward", allowed)
    if raw.get("return_dict") is False:
        _refuse(raw, source, "return_dict", "true, because outputs are read by name")
    if raw.get("is_causal") is True:
        _refuse(raw, source, "is_causal", "false, because a token must see the whole text")
    for name in ("attn_implementation", "_attn_implementation"):
        if raw.get(name) not in ATTENTION:
            allowed = "absent, eager or sdpa, because others may download code"
            _refuse(raw, source, name, allowed)
    for name, description in OTHER_WEIGHTS.items():
        if raw.get(name) is not None:
            raise UsageError(
                f"{source} names {description} ('{name}'), but kdcli reads plain "
                f"{WEIGHT_FILES[0]} only",
                f"save the model as {WEIGHT_FILES[0]}",
            )


def _refuse(raw: Mapping[str, Any], source: object, name: str, allowed: str) -> NoReturn:
    """Raise a UsageError for the value of a key."""
    value = shortened(repr(raw[name]), 60)
    raise UsageError(f"{source}: '{name}' must be {allowed}, got {value}")


def _check_id2label(raw: Mapping[str, Any], source: object) -> None:
    """Check that every output of a head has a number and a name."""
    numbers = list(raw.get("id2label") or ())
    if set(map(str, numbers)) != set(map(str, range(len(numbers)))):
        raise UsageError(
            f"{source}: 'id2label' must number the {len(numbers)} outputs from 0, got "
            f"{shortened(', '.join(map(str, numbers)), 60)}",
            "number them from 0 in a copy of the model, in the order of the head's outputs",
        )
    if None in (raw.get("id2label") or {}).values():
        _refuse(raw, source, "id2label", "a JSON object with a name for each output")


def _check_setting(raw: Mapping[str, Any], name: str, value: object, source: object) -> None:
    """Check one key whose name says what its value must be."""
    if name in FLAGS and not isinstance(value, bool | None):
        _refuse(raw, source, name, "true or false")
    if isinstance(value, float) and not math.isfinite(value):
        _refuse(raw, source, name, "a finite number")
    upper = MAX_REPEATED if REPEATED.fullmatch(name) else MAX_SIZE
    lower = 1 if name.endswith(POSITIVE_SIZES) else -1 if OPTIONAL_SIZE.fullmatch(name) else 0
    if isinstance(value, int | float) and SIZE.fullmatch(name) and not lower <= value <= upper:
        _refuse(raw, source, name, f"at least {lower} and at most {upper:,}")
    # The key would replace a method of the configuration, or a table that renames its keys.
    attribute = getattr(PreTrainedConfig, name, None)
    if callable(attribute) or isinstance(attribute, dict):
        raise UsageError(f"{source}: '{name}' is not a setting", "remove the key")


@contextmanager
def config_errors(source: object) -> Iterator[None]:
    """Convert any exception that transformers raises about a configuration to a `UsageError`.

    The error names the configuration's `source`. Use it only for calls into transformers whose only
    foreign input is the configuration, so that no bug of kdcli is hidden.
    """
    try:
        yield
    except KdcliError:
        raise
    except code_errors(FOREIGN_ERRORS) as error:
        raise_error_of_code(error)
        explains = isinstance(error, ValueError | StrictDataclassError)
        kind = "" if explains else f"{type(error).__name__}: "
        hint = CODE_FAILS if custom_code_allowed() else None
        raise UsageError(f"{source} cannot be used: {kind}{one_line(error)}", hint) from None


def check_no_adapter(source: str, where: str) -> None:
    """Raise a UsageError if a model's files, at `where`, are an adapter's."""
    if file_beside(where, ADAPTER) is not None:
        raise UsageError(
            f"{source} holds an adapter ({ADAPTER}), not a model",
            "merge the adapter into its base model, and save the result",
        )


def conversion_of(folder: Path) -> str:
    """Return the hint that converts the pickled weights in a directory, whatever they are for."""
    code = (
        "import pathlib, torch; from safetensors.torch import save_file; "
        f"d = pathlib.Path({json.dumps(str(folder))}); "
        f'save_file({{k: v.contiguous().clone() for f in d.glob("{PICKLES}") '
        "for k, v in torch.load(f, weights_only=True).items()}, "
        f'd / "{WEIGHT_FILES[0]}", {{"format": "pt"}})'
    )
    return f"convert it once, which runs none of its code: python -c {shlex.quote(code)}"


def weight_files(source: str, revision: str | None) -> list[Path]:
    """Return the safetensors files of a model, downloaded if they are not cached.

    `revision` is a commit of the hub. Raises UsageError for an index that names anything but
    safetensors files in its own directory, and for a damaged file. Raises HUB_ERRORS if a file is
    missing or cannot be downloaded.
    """
    files = [file_of(source, WEIGHT_FILES[0], revision)]
    if files[0] is None:
        index = file_of(source, WEIGHT_FILES[1], revision)
        if index is None:
            raise UsageError(f"{source} has no {WEIGHT_FILES[0]}")
        check_index(index)
        shards, _ = get_checkpoint_shard_files(source, str(index), revision=revision)
        files = [Path(file) for file in shards]
    present = [file for file in files if file is not None]
    for file in present:
        try:
            with safe_open(file, "pt") as tensors:
                tensors.keys()
        except SafetensorError as error:
            raise UsageError(f"{file} is damaged: {error}", "download or copy it again") from None
    return present


def stored_weights(folder: Path) -> list[Path]:
    """Return the files of a directory from which transformers loads a model's weights."""
    # The directory may hold other files, such as weights in half precision.
    if (whole := folder / WEIGHT_FILES[0]).is_file():
        return [whole]
    return sorted(folder.glob("model-*-of-*.safetensors"))


def tensor_names(source: str) -> list[str]:
    """Return the names of a model's tensors; empty if it has no readable safetensors files."""
    if (index := file_beside(source, WEIGHT_FILES[1])) is not None:
        return list(read_json(index).get("weight_map") or ())
    with suppress(SafetensorError, *HUB_ERRORS):
        file = file_of(source, WEIGHT_FILES[0])
        if file is not None:
            with safe_open(file, "pt") as tensors:
                return list(tensors.keys())
    return []


def check_index(index: Path) -> None:
    """Check an index of shards.

    Raises UsageError if the index has no metadata, or if it names anything but safetensors files in
    its own directory.
    """
    tree = read_json(index)
    shards = tree.get("weight_map")
    if not isinstance(tree.get("metadata"), dict):
        raise UsageError(f"{index} has no metadata, which must be a JSON object")
    has_shards = isinstance(shards, dict) and bool(shards)
    if not has_shards or not all(isinstance(name, str) for name in shards.values()):
        raise UsageError(f"{index} has no weight_map from tensors to files")
    folder = index.parent.resolve()
    allowed = {folder}
    if folder.parent.name == "snapshots":
        # In the hub's cache, files are links to the blobs of the same model.
        allowed.add(folder.parent.parent / "blobs")
    for name in sorted(set(shards.values())):
        plain = Path(name).name == name and name.endswith(".safetensors") and "\0" not in name
        if not plain or (index.parent / name).resolve().parent not in allowed:
            raise UsageError(
                f"{index} names {shortened(repr(name), 60)}, which is not a safetensors file in "
                "its directory"
            )


def check_builds(source: str, config: PreTrainedConfig, auto_class: ModelClass) -> PreTrainedModel:
    """Build the model of a configuration on the meta device, which takes no memory.

    Raises UsageError if transformers cannot build it.
    """
    model: PreTrainedModel
    with config_errors(f"the {CONFIG_FILE} of {source}"), torch.device("meta"), no_init_weights():
        if issubclass(auto_class, PreTrainedModel):
            model = auto_class(config)
        else:
            model = auto_class.from_config(config)
    return model


def check_declared(
    source: str, config: PreTrainedConfig, auto_class: ModelClass, files: list[Path]
) -> None:
    """Compare the number of parameters of a configuration with the size of its files.

    Raises UsageError if transformers cannot build the model, or if the files are too small for its
    parameters.
    """
    empty = check_builds(source, config, auto_class)
    declared = sum(p.numel() for p in empty.parameters())
    stored = sum(file.stat().st_size for file in files)
    if declared > stored:
        raise UsageError(
            f"the {CONFIG_FILE} of {source} declares {declared:,} parameters, but its weights "
            f"have only {stored:,} bytes"
        )
