"""Load and save an encoder with its tokenizer: safetensors only, and no code from the model.

A source is a hub id, a directory, or a model inside the package: `demo` or `demo-classifier`.
"""

import fnmatch
import functools
import importlib.resources
import json
import re
import string
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import list_repo_files, list_repo_refs, snapshot_download
from huggingface_hub.errors import GatedRepoError
from safetensors import SafetensorError
from tokenizers import Tokenizer
from transformers import (
    AutoModel,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER
from transformers.utils import logging as transformers_logging
from transformers.utils.hub import extract_commit_hash

from kdcli.custom_code import (
    CODE_FAILS,
    code_errors,
    custom_code_allowed,
    raise_error_of_code,
)
from kdcli.disk import EMBEDDED, cached_file, fill_dir, is_path, near_path, read_json, user_path
from kdcli.errors import KdcliError, UsageError, first_line, raise_machine_error
from kdcli.messages import warn
from kdcli.models.custom_class import (
    COMPACT_KEY,
    HEADS,
    LABEL_WORDS_KEY,
    UNILM_KEY,
    class_named,
    classes_in_code,
    fill_buffers,
    forget_custom_classes,
    has_own_code,
    is_custom,
    needs_custom_class,
    save_network,
)
from kdcli.models.files import (
    BY_LIBRARY,
    CONFIG_FILE,
    FACTS,
    HUB_ERRORS,
    LENGTH_FILE,
    LENGTH_FILES,
    MODULES_FILE,
    PICKLES,
    TASK_KEY,
    WEIGHT_FILES,
    ModelClass,
    check_builds,
    check_config,
    check_declared,
    check_no_adapter,
    config_errors,
    conversion_of,
    encoder_folder,
    encoder_path,
    file_beside,
    file_of,
    hint_of_models,
    holds_table,
    tensor_names,
    weight_files,
)
from kdcli.models.layout import (
    WRITTEN,
    base_class,
    check_type,
    has_decoder,
    layout_for,
    without_decoder,
)
from kdcli.models.model import NO_ROWS, Model, training_rows, write_training_rows
from kdcli.models.native_twin import TWINS, is_equal_to_stock, native_twin
from kdcli.models.padding import settle_padding
from kdcli.models.shape import longest_input
from kdcli.models.source import check_source
from kdcli.models.static import (
    CLASSIFIER,
    MODEL_TYPE,
    StaticConfig,
    is_static,
    load_static,
    read_sizes,
)
from kdcli.models.temperature import TEMPERATURE
from kdcli.models.tokenizer_files import (
    AS_LOADED,
    PROBE,
    TOKENIZER_FILE,
    check_ids,
    check_tokenizer,
)
from kdcli.types import RowHashes

# The progress bars of transformers would break the ones of kdcli.
transformers_logging.disable_progress_bar()

MODEL_CARD = "README.md"
# A model on the hub at a branch, a tag or a commit.
PINNED = re.compile(r"((?:[\w.-]+/)?[\w.-]+)@([\w./-]+)")
SNAPSHOT_FILES = ["*.json", "*.txt", "*.model", "*.safetensors", "*.py", "*.md", "*.npy"]
OTHER_FILES = ["onnx/*", "openvino/*", "checkpoints/*"]
PROBED = {"return_token_type_ids": True, "verbose": False}
# Configuration keys that describe the source of a model and not the model: a key of earlier
# versions of transformers and kdcli, and defaults for ONNX files.
INHERITED_KEYS = ("finetuning_task", "transformers.js_config")
LABELS = ("id2label", "label2id", "problem_type")
CODE_HINT = "read the code, then add --trust-remote-code"
MAX_PULL_REQUESTS = 20
"""Number of a model's pull requests, the newest first, in which a conversion is looked for."""
GLINER_FILE = "gliner_config.json"
SETFIT_HEAD = "model_head.pkl"
# Tensors that a base model's checkpoint may lack.
OPTIONAL_TENSORS = ("pooler.", "contact_head.", "embeddings.position_ids")


def location(source: str) -> str:
    """Return the argument of `from_pretrained` for a source.

    Args:
        source: Hub id, directory, `demo`, or `OWNER/NAME@REVISION` for a commit of the hub.

    Raises:
        UsageError: The revision does not exist, or the user's directory is unknown.
    """
    root = root_of(source)
    return str(encoder_folder(Path(root))) if Path(root).is_dir() else _location_on_hub(root)


def root_of(source: str) -> str:
    """Return the directory or the hub id of all files of a source; see `location`.

    A commit of the hub is downloaded if it is not cached.
    """
    if source in EMBEDDED:
        return str(importlib.resources.files("kdcli") / "data" / EMBEDDED[source])
    if (pinned := PINNED.fullmatch(source)) and not is_path(source):
        return _snapshot(*pinned.groups())
    return str(user_path(source)) if source.startswith("~") else source


def commit_of(source: str) -> str | None:
    """Return the hub's commit of a source that was loaded, or None for a directory or `demo`."""
    try:
        commit: str | None = extract_commit_hash(str(file_of(location(source), CONFIG_FILE)), None)
    except (*HUB_ERRORS, ValueError):
        # The source is a shape, or a model that this run made.
        return None
    return commit


@functools.cache
def _location_on_hub(name: str) -> str:
    """Return the hub id, or the encoder's directory in a snapshot if it has one of its own."""
    modules = file_beside(name, MODULES_FILE) if PINNED.fullmatch(f"{name}@main") else None
    if modules is None or not encoder_path(modules):
        return name
    return str(encoder_folder(Path(_snapshot(name, "main"))))


@functools.cache
def _snapshot(name: str, revision: str) -> str:
    try:
        return snapshot_download(
            name, revision=revision, allow_patterns=SNAPSHOT_FILES, ignore_patterns=OTHER_FILES
        )
    except (*HUB_ERRORS, ValueError) as error:
        raise UsageError(
            f"model '{name}' was not found at revision '{revision}', neither in the cache nor on "
            f"the hub: {first_line(error)}",
            "check the revision (a branch, a tag or a commit) and the network",
        ) from None


def load_encoder(
    source: str,
) -> Model:
    """Load a base encoder and its tokenizer.

    Raises UsageError if the model is not found, is not an encoder, has no tokenizer, has only
    pickled weights, has damaged or incomplete weights, or brings code without `trust_remote_code`.
    """
    load_config(source)
    tokenizer = load_tokenizer(source)
    model = load_weights(source, AutoModel)
    rows = training_rows(location(source))
    note = settle_padding(model.eval(), tokenizer, source)
    return Model(model, tokenizer, source, note, rows=rows)


def load_config(source: str, *, weights: bool = True, compacted: bool = False) -> PreTrainedConfig:
    """Load the configuration of a model, and check that the model can be loaded.

    Args:
        source: Hub id, directory or `demo`.
        weights: Whether to check that there are safetensors files.
        compacted: Whether to accept a model of `kdcli.deploy.sparse.compact`, which no verb can
            train.

    Raises UsageError if the model is not found, has an unsupported type, or cannot be loaded.
    """
    where = location(source)
    folder = user_path(where)
    is_folder = folder.is_dir()
    check_source(str(folder) if is_folder else source)
    check_no_adapter(source, where)
    # sentence-transformers writes no configuration for a table.
    is_table = file_beside(where, CONFIG_FILE) is None and holds_table(root_of(source))
    if is_folder and not is_table and not (folder / CONFIG_FILE).is_file():
        raise _no_config(folder)
    config = StaticConfig() if is_table else _read_config(source, where)
    if hasattr(config, COMPACT_KEY) and not compacted:
        raise UsageError(
            f"{source} is compacted: its layers have shapes of their own, so that it can be "
            "neither a student nor a teacher",
            "give the masked model that it was made from; only evaluate, benchmark, export and "
            "kdcli.load accept a compacted model",
        )
    layout_for(config)
    if is_static(config) and not compacted:
        raise UsageError(
            f"{source} is a static model: a table of token vectors, without layers to train, prune "
            "or distil",
            "only evaluate, benchmark, export and kdcli.load accept a static model",
        )
    if weights and not is_folder:
        _check_repository(source)
    elif weights and not any((folder / name).is_file() for name in WEIGHT_FILES):
        raise _no_safetensors(str(folder), [file.name for file in sorted(folder.glob(PICKLES))])
    if is_static(config) and (file := file_beside(where, WEIGHT_FILES[0])) is not None:
        read_sizes(config, file)
    return config


def save_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    rows: RowHashes = NO_ROWS,
) -> None:
    """Save a model's configuration, weights and tokenizer.

    Also saves the hashes of the labelled `rows` that trained the model or a model it was made from,
    and the code of a custom class. A calibration temperature is dropped, because it was fitted to
    other weights. Raises MachineError if the disk is full or not writable. In that
    case, no file is left.
    """
    if hasattr(model.config, TEMPERATURE):
        delattr(model.config, TEMPERATURE)
    with fill_dir(folder, last=CONFIG_FILE) as aside:
        save_network(model, aside)
        tidy_config(model, aside / CONFIG_FILE)
        save_tokenizer(tokenizer, aside, model)
        write_training_rows(aside, rows)
        mode = (aside / CONFIG_FILE).stat().st_mode
        for file in filter(Path.is_file, aside.rglob("*")):
            # safetensors creates files that only the owner can read.
            file.chmod(mode)


def tidy_config(
    model: PreTrainedModel, file: Path, settings: Mapping[str, object] | None = None
) -> None:
    """Remove the settings of the models that a saved model was made from, and add `settings`.

    A model without a head for a task has no labels and no task.
    """
    config = read_json(file)
    name = type(model).__name__
    has_labels = LABEL_WORDS_KEY in config or any(
        head != "MaskedLM" and f"For{head}" in name for head in HEADS
    )
    unused = [*INHERITED_KEYS, *(() if has_labels else LABELS)]
    if not has_labels and UNILM_KEY not in config:
        unused.append(TASK_KEY)
    kept = {key: value for key, value in config.items() if key not in unused}
    kept |= settings or {}
    file.write_text(json.dumps(kept, indent=2, sort_keys=True) + "\n", "utf-8")


def save_tokenizer(
    tokenizer: PreTrainedTokenizerBase, folder: Path, model: PreTrainedModel | None = None
) -> None:
    """Save a tokenizer's files, with the truncation and padding that it had when it was loaded.

    Every call changes both, so the files would otherwise depend on what was tokenised last. No
    length exceeds what `model` can read. A truncation gets the length `model_max_length`, because
    libraries differ in which of the two they obey, and padding reaches the longest text, because a
    length of its own would not follow the truncation. The files of a static model have the
    truncation that the model needs, and no padding.
    """
    longest = None if model is None else longest_input(model.config)
    if longest is not None:
        tokenizer.model_max_length = min(tokenizer.model_max_length, longest)
    as_loaded = getattr(tokenizer, AS_LOADED, None)
    static = model is not None and is_static(model.config)
    if tokenizer.is_fast and model is not None and static:
        as_loaded = _truncation_of_static(tokenizer), None
    if as_loaded is not None:
        (truncation, padding), backend = as_loaded, tokenizer.backend_tokenizer
        if not static and truncation is not None:
            length = _keep_one_length(tokenizer, truncation, longest)
            truncation = truncation | {"max_length": length}
        backend.no_truncation() if truncation is None else backend.enable_truncation(**truncation)
        backend.no_padding() if padding is None else backend.enable_padding(
            **padding | {"length": None}
        )
    tokenizer.save_pretrained(folder)


def _keep_one_length(
    tokenizer: PreTrainedTokenizerBase, truncation: Mapping[str, Any], longest: int | None
) -> int:
    """Return the length of a tokenizer's truncation, and write no other one to its settings.

    The model can read `longest` tokens, or texts of any length if it is None.
    """
    length: int = tokenizer.model_max_length
    if length >= VERY_LARGE_INTEGER:
        length = int(truncation["max_length"])
    length = min(length, longest or length)
    if "max_length" in tokenizer.init_kwargs:
        tokenizer.init_kwargs["max_length"] = length
    return length


def _truncation_of_static(tokenizer: PreTrainedTokenizerBase) -> dict[str, int | str] | None:
    """Return the truncation of a static model's texts; None for texts of any length.

    A classifier must read as much of a text as in its training. sentence-transformers tokenises
    without special tokens, so the length does not count them.
    """
    length = tokenizer.model_max_length
    if length >= VERY_LARGE_INTEGER:
        return None
    words = max(1, length - tokenizer.num_special_tokens_to_add())
    return {"max_length": words, "direction": tokenizer.truncation_side}


def _check_repository(source: str) -> None:
    """Refuse a repository without safetensors, whose pickle transformers would have converted."""
    if any(cached_file(source, name) for name in WEIGHT_FILES):
        return
    try:
        files = list_repo_files(source)
    except HUB_ERRORS:
        # Offline, the cache is tried.
        return
    if not any(name in files for name in WEIGHT_FILES):
        pickles = [name for name in files if fnmatch.fnmatch(name.rpartition("/")[2], PICKLES)]
        raise _no_safetensors(source, pickles)


def _gliner(source: str) -> UsageError:
    return UsageError(
        f"{source} is a GLiNER model, whose layers above its encoder kdcli does not have",
        f"give its encoder, which {GLINER_FILE} names as model_name; or label your texts with "
        "GLiNER, and train a tagger on them: kdcli finetune",
    )


def pickled_head(source: str) -> str:
    """Return the remark that a SetFit model's classifier is not read; empty for other models."""
    is_setfit = file_beside(root_of(source), SETFIT_HEAD) is not None
    return f"; its SetFit classifier, {SETFIT_HEAD}, is a pickle and is not read" * is_setfit


def _no_config(folder: Path) -> UsageError:
    if (folder / GLINER_FILE).is_file():
        return _gliner(str(folder))
    if (folder / MODULES_FILE).is_file():
        return UsageError(
            f"{folder} has no {CONFIG_FILE}: only sentence-transformers computes such a model",
            BY_LIBRARY,
        )
    message = f"{folder} has no {CONFIG_FILE}, so it is not a model directory"
    return UsageError(message, hint_of_models(folder))


def _no_safetensors(source: str, pickles: list[str]) -> UsageError:
    if not pickles:
        if (user_path(source) / FACTS).is_file():
            return UsageError(
                f"{source} is an export, and has no weights for torch",
                "give the model that it was made from, or export it with --weights; kdcli.load, "
                "evaluate, benchmark and try run it as it is",
            )
        return UsageError(
            f"{source} has no {WEIGHT_FILES[0]}",
            "give the model from which it was made: kdcli reads no weights of other formats (GGUF, "
            "ONNX files of other programs, TensorFlow)",
        )
    message = (
        f"{source} has its weights as a pickle ({pickles[0]}), which can run code when it is "
        "opened; kdcli reads safetensors only"
    )
    if Path(source).is_dir():
        return UsageError(message, conversion_of(Path(source)))
    if (converted := _converted(source)) is not None:
        pages = f"{source}/discussions/{converted.rpartition('/')[2]}"
        return UsageError(
            message,
            f"a pull request has them as {WEIGHT_FILES[0]}: see on the hub who made it ({pages}), "
            f"then give {source}@{converted}",
        )
    return UsageError(
        message,
        "the hub often has a conversion as a pull request 'Adding safetensors': if it has the "
        f"number N, give {source}@refs/pr/N; or download it (hf download {source} --local-dir DIR) "
        f"and {conversion_of(Path('DIR'))}",
    )


def _converted(source: str) -> str | None:
    """Return the newest pull request of a model on the hub with safetensors, or None.

    The bot that converts pickles makes such pull requests, and so can anybody.
    """
    try:
        refs = list_repo_refs(source, include_pull_requests=True).pull_requests or []
        newest = sorted((ref.ref for ref in refs), key=lambda ref: -int(ref.rpartition("/")[2]))
        for ref in newest[:MAX_PULL_REQUESTS]:
            if not set(WEIGHT_FILES).isdisjoint(list_repo_files(source, revision=ref)):
                return ref
    except (*HUB_ERRORS, ValueError):
        # The hub is out of reach, or hides its pull requests.
        pass
    return None


def _read_config(
    source: str,
    where: str,
) -> PreTrainedConfig:
    custom_code = UsageError(
        f"{source} brings code of its own, which is not run by default; a model of transformers "
        "with the same weights may be another network",
        CODE_HINT,
    )
    file = _config_file(source, where)
    raw = read_json(file)
    check_config(raw, file)
    # Refuse an unsupported type before its own code could run.
    kind = str(raw.get("model_type"))
    if "model_type" not in raw:
        raise UsageError(
            f"the config.json of {source} has no model_type",
            "give a model that transformers can load",
        )
    if kind in TWINS:
        with config_errors(f"the {CONFIG_FILE} of {source}"):
            if (twin := native_twin(raw, tensor_names(where))) is not None:
                return twin
    own_network = any(
        name.startswith(("AutoConfig", "AutoModel")) for name in raw.get("auto_map") or ()
    )
    known = is_equal_to_stock(raw) or needs_custom_class(raw)
    if own_network and not known and not custom_code_allowed():
        raise custom_code
    check_type(kind, decodes=bool(raw.get("is_decoder") or raw.get("is_encoder_decoder")))
    runs_code = own_network and not known
    with config_errors(f"the {'code' if runs_code else CONFIG_FILE} of {source}"), _quietly():
        try:
            return transformers.AutoConfig.from_pretrained(
                where, trust_remote_code=custom_code_allowed()
            )
        except ValueError as error:
            raise custom_code if "trust_remote_code" in str(error) else error from None


def _config_file(source: str, where: str) -> Path:
    """Return the configuration of a model.

    Raises:
        UsageError: There is no such model.
    """
    try:
        file = file_of(where, CONFIG_FILE, needed=True)
    except (*HUB_ERRORS, ValueError) as error:
        if isinstance(error.__cause__, GatedRepoError):
            message = f"model '{source}' is on the hub, but you have no access to it"
            raise UsageError(message, "request access there, then run `hf auth login`") from None
        raise UsageError(
            f"model '{source}' was found neither as a directory, nor in the Hugging Face cache, "
            f"nor on the hub: {first_line(error)}{near_path(source, EMBEDDED)}",
            "check the name and the network, or use a local directory or 'demo'; "
            "HF_HUB_OFFLINE=1 uses the cache without asking the hub",
        ) from None
    if file is None and file_beside(where, GLINER_FILE) is not None:
        raise _gliner(source)
    if file is None:
        raise UsageError(f"{source} has no {CONFIG_FILE}, so it is not a model")
    return file


def load_tokenizer(
    source: str, *, of_table: bool = False, **settings: object
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model.

    Args:
        source: Hub id, directory or `demo`.
        of_table: Read tokenizer.json alone, as sentence-transformers does for a `StaticEmbedding`.
        settings: Further arguments of `from_pretrained`.

    Raises UsageError if there is no readable tokenizer, or if it makes ids that the model lacks.
    """
    hint = "put the tokenizer's files (tokenizer.json ...) into the model's directory"
    where = location(source)
    named = file_beside(where, "tokenizer_config.json") or file_beside(where, CONFIG_FILE)
    tokenizer_class = AutoTokenizer if named else PreTrainedTokenizerFast
    is_folder = user_path(where).is_dir()
    if not named and not is_folder and file_beside(where, TOKENIZER_FILE) is None:
        # Otherwise the error would be about files of a model that does not exist.
        check_source(source)
        _config_file(source, where)
    try:
        with _quietly():
            check_tokenizer(where)
            _check_tokenizer_code(source, where)
            if of_table:
                file = file_of(where, TOKENIZER_FILE, needed=True)
                tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_file(str(file)))
            else:
                tokenizer = tokenizer_class.from_pretrained(
                    where, trust_remote_code=custom_code_allowed(), **settings
                )
            if tokenizer.is_fast:
                backend = tokenizer.backend_tokenizer
                setattr(tokenizer, AS_LOADED, (backend.truncation, backend.padding))
            length = tokenizer.model_max_length
            if not (isinstance(length, int | float) and length > 0):
                raise UsageError(
                    f"the tokenizer of {source} has the model_max_length {length!r}, which must be "
                    "a number of at least 1",
                    "correct it in the tokenizer_config.json of a copy of the model",
                )
            probes = [tokenizer(*texts, **PROBED) for texts in ((PROBE,), (PROBE, PROBE))]
            if tokenizer.is_fast:
                # The truncation of the call above would be saved.
                tokenizer.backend_tokenizer.no_truncation()
    except UsageError:
        raise
    except BaseException as error:
        # The library tokenizers raises Exception, or a class that it does not export.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise_machine_error(error)
        raise UsageError(
            f"the tokenizer of {source} cannot be loaded: {first_line(error)}", hint
        ) from None
    # Without any files, transformers makes a tokenizer that has special tokens only.
    if not tokenizer.get_vocab().keys() - set(tokenizer.all_special_tokens):
        raise UsageError(f"{source} has no tokenizer", hint)
    check_ids(tokenizer, probes, source, _sizes(source, where))
    return tokenizer


def _check_tokenizer_code(source: str, where: str) -> None:
    """Refuse a tokenizer with code of its own, unless the code may run.

    A class of transformers may make other tokens, for example without an end token.
    """
    if custom_code_allowed():
        return
    file = file_beside(where, "tokenizer_config.json")
    auto_map = None if file is None else read_json(file).get("auto_map")
    if isinstance(auto_map, list) or "AutoTokenizer" in (auto_map or ()):
        raise UsageError(
            f"the tokenizer of {source} brings code of its own, which is not run by default; a "
            "tokenizer of transformers may make other tokens",
            CODE_HINT,
        )


def encoder_settings(source: str) -> tuple[str, dict[str, Any]]:
    """Return sentence-transformers' settings of an encoder, and the name of their file."""
    for name in LENGTH_FILES:
        if (file := file_beside(location(source), name)) is not None:
            return name, read_json(file)
        if not Path(root_of(source)).is_dir():
            # The hub has the current name only.
            break
    return LENGTH_FILE, {}


def check_case(tokenizer: PreTrainedTokenizerBase, source: str) -> None:
    """Check that a model's tokenizer lowercases if sentence-transformers does it before.

    kdcli does not lowercase, because many tokenizers of transformers cannot save this.
    """
    name, settings = encoder_settings(source)
    if not settings.get("do_lower_case"):
        return
    letters, normalize = " ".join(string.ascii_uppercase), tokenizer.tokenize
    if tokenizer.is_fast:
        # A vocabulary without single letters hides the case from `tokenize`.
        normalizer = tokenizer.backend_tokenizer.normalizer
        normalize = str if normalizer is None else normalizer.normalize_str
    if normalize(letters) != normalize(letters.lower()):
        raise UsageError(
            f"sentence-transformers lowercases the texts of {source} (do_lower_case in its "
            f"{name}), but its tokenizer does not",
            "set do_lower_case to false in a copy of the model, and give it texts in lower case",
        )


def _sizes(source: str, where: str) -> dict[str, int]:
    """Return the sizes that a model's files declare, by their keys in config.json."""
    file = file_beside(where, CONFIG_FILE)
    raw = {} if file is None else read_json(file)
    sizes = {key: value for key, value in raw.items() if isinstance(value, int)}
    is_table = holds_table(root_of(source)) if file is None else raw.get("model_type") == MODEL_TYPE
    if is_table and (weights := file_beside(where, WEIGHT_FILES[0])) is not None:
        table = StaticConfig()
        read_sizes(table, weights)
        sizes["vocab_size"] = table.vocab_size
    return sizes


def load_weights(
    source: str,
    auto_class: ModelClass,
    *,
    seed: int = 0,
    **settings: object,
) -> PreTrainedModel:
    """Load a model in float32 from safetensors.

    Args:
        source: Hub id, directory or `demo`.
        auto_class: `AutoModel`, or a class with a head that the checkpoint must have.
        seed: Seed of the pooler, for a base model that lacks it.
        settings: Further arguments of `from_pretrained`.

    Raises UsageError if the weights cannot be read, are damaged or are incomplete.
    """
    settings |= {
        "trust_remote_code": custom_code_allowed(),
        "use_safetensors": True,
        "dtype": torch.float32,
        # Otherwise the error would not name the tensors.
        "ignore_mismatched_sizes": True,
    }
    where = location(source)
    config = load_config(source, compacted=True)
    # Check the same commit of the hub that is loaded.
    revision = None if Path(where).is_dir() else commit_of(source)
    auto_class = encoder_or_head(source, config, auto_class)
    with _weight_errors(source), _quietly(), torch.random.fork_rng(devices=[]):
        files = weight_files(where, revision)
        if not custom_code_allowed():
            check_declared(source, config, auto_class, files)
        torch.manual_seed(seed)
        if is_static(config) and auto_class is AutoModel:
            static = load_static(config, files[0])
            check_weights(static, source)
            return static
        file = file_beside(where, CONFIG_FILE)
        is_twin = file is not None and read_json(file).get("model_type") != config.model_type
        if is_static(config) or is_twin:
            settings["config"] = config
        model, info = auto_class.from_pretrained(
            where, revision=revision, output_loading_info=True, **settings
        )
    _check_sizes(source, info["mismatched_keys"])
    with suppress(*HUB_ERRORS):
        # Put the card into the cache, because models made from this one inherit its licence.
        file_of(where, MODEL_CARD, revision)
    if config.model_type not in WRITTEN:
        # A decoder would return a table of keys and values.
        model.config.use_cache = False
    if has_own_code(model) and (names := fill_buffers(model)):
        warn(
            f"transformers leaves buffers of {source} empty, for example {names[0]}, because its "
            "code computes them only when it builds the network; kdcli computes them again, but "
            "other programs get other states from this model and from models made from it"
        )
    _check_used(source, model, config, info["unexpected_keys"])
    if not is_custom(model):
        forget_custom_classes(model.config)
    _check_complete(source, model, info["missing_keys"], info["unexpected_keys"])
    check_weights(model, source)
    return without_decoder(model) if auto_class is base_class(config) else model


def _check_sizes(
    source: str, mismatched: Collection[tuple[str, Sequence[int], Sequence[int]]]
) -> None:
    """Check that no stored tensor has another size than config.json gives it."""
    if not mismatched:
        return
    name, stored, needed = min(mismatched)
    raise UsageError(
        f"the weights of {source} do not fit its config.json: {len(mismatched)} tensors have other "
        f"sizes, for example {name}: {list(stored)} instead of {list(needed)}",
        "correct the sizes in the config.json of a copy of the model (id2label has a name for "
        "each output of a head)",
    )


def _check_complete(
    source: str, model: PreTrainedModel, missing: Collection[str], unused: Collection[str]
) -> None:
    """Check that the weights have every tensor that the model computes with."""
    allowed: tuple[str, ...] = OPTIONAL_TENSORS
    if model.base_model is not model:
        # Under a head, the encoder's tensors have a prefix, and the pooler is required because the
        # head reads it.
        prefix = f"{model.base_model_prefix}."
        allowed = tuple(prefix + name for name in OPTIONAL_TENSORS[1:])
    if absent := sorted(name for name in missing if not name.startswith(allowed)):
        raise UsageError(
            f"the weights of {source} are incomplete: {len(absent)} tensors are missing, for "
            f"example {absent[0]}",
            "they are quantised (qweight): give the model that they were made from"
            if any(name.endswith(".qweight") for name in unused)
            else "they may be of another network, with code of its own, than transformers' "
            f"{model.config.model_type}; or download them again",
        )


def check_weights(model: torch.nn.Module, source: str | Path) -> None:
    """Raise a UsageError if a weight is NaN or infinite. `source` is the model's name in it."""
    if bad := [name for name, values in model.named_parameters() if not _is_finite(values)]:
        raise UsageError(
            f"the weights of {source} hold NaN or infinity, for example {bad[0]}",
            "its training may have failed, or its files are damaged: give another model",
        )


def _is_finite(values: torch.Tensor) -> bool:
    """Return whether all values are finite. A sum could exceed the range of the format."""
    if not values.numel() or not values.is_floating_point():
        return True
    least, largest = torch.aminmax(values.detach())
    return bool(torch.isfinite(least) and torch.isfinite(largest))


def encoder_or_head(source: str, config: PreTrainedConfig, auto_class: ModelClass) -> ModelClass:
    """Return the class that loads an encoder, or an encoder with a head.

    This is `auto_class`, unless it has a decoder without a head. Raises UsageError if its head
    reads a decoder's states.
    """
    if auto_class is AutoModel or not has_decoder(str(config.model_type)):
        return base_class(config) if auto_class is AutoModel else auto_class
    model = check_builds(source, config, auto_class)
    name = type(model).__name__
    if not hasattr(model.base_model, "decoder"):
        return auto_class
    if not any(name.endswith(f"For{head}") for head in HEADS):
        return base_class(config)
    raise UsageError(
        f"the head of a {name} reads the states of its decoder; kdcli compresses encoders only",
        "distil the vectors of its encoder (--method embedding); or let the model label your rows, "
        "and train another encoder on them: kdcli finetune",
    )


def is_known_class(name: str, config: PreTrainedConfig) -> bool:
    """Return whether transformers, kdcli or code that may run has a network class of a name."""
    known = class_named(name) is not None or hasattr(transformers, name)
    return name == CLASSIFIER or known or name in classes_in_code(config)


def _check_used(
    source: str, model: PreTrainedModel, config: PreTrainedConfig, unused: Sequence[str]
) -> None:
    """Check that no tensors of another network are ignored.

    They are those of a class that transformers does not have, and those inside the encoder. A known
    class may have a head, which an encoder does without.
    """
    names = config.architectures or ()
    unknown = next((name for name in names if not is_known_class(name, config)), None)
    if unknown is not None and unused:
        raise UsageError(
            f"{source} is a {unknown}, a class that transformers does not have; {len(unused)} of "
            f"its tensors would be ignored, for example {min(unused)}",
            "correct 'architectures' in the config.json of a copy of the model, or save only its "
            f"encoder: AutoModel.from_pretrained('{source}').save_pretrained(...)",
        )
    if inside := [name for name in unused if _is_inside(model, name)]:
        loaded = type(model).__name__
        raise UsageError(
            f"the weights of {source} are of another network than transformers' {loaded}, which "
            f"would ignore {len(inside)} tensors of its encoder, for example {min(inside)}",
            "correct its config.json (a number of layers, for example) in a copy of the model; or, "
            "if the model is meant to be without them, save it so: "
            f"{loaded}.from_pretrained('{source}').save_pretrained(...)",
        )


def _is_inside(model: PreTrainedModel, name: str) -> bool:
    """Return whether a stored tensor is a parameter of a part that a model's encoder has."""
    part, *inner = name.removeprefix(f"{model.base_model_prefix}.").split(".")
    # Other endings are those of buffers, which old versions of transformers stored.
    is_parameter = bool(inner) and inner[-1] in ("weight", "bias")
    # A pooler may be built without its parameters, and no state depends on it.
    return is_parameter and part != "pooler" and part in dict(model.base_model.named_children())


@contextmanager
def _quietly() -> Iterator[None]:
    """Silence transformers' tables of unused and missing tensors. `load_weights` checks them."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)


@contextmanager
def _weight_errors(source: str) -> Iterator[None]:
    """Convert the errors of reading a model's weights to a `UsageError`."""
    try:
        yield
    except SafetensorError as error:
        raise UsageError(
            f"the weights of {source} are damaged: {error}", "download or copy them again"
        ) from None
    except HUB_ERRORS as error:
        raise UsageError(
            # The message of transformers is about names and directories. Its cause explains more.
            f"the weights of {source} cannot be read: {first_line(error.__cause__ or error)}",
            "check the network and the files, then try again",
        ) from None
    except (RuntimeError, ValueError) as error:
        raise_error_of_code(error)
        raise UsageError(
            f"the weights of {source} do not fit its config.json: {first_line(error)}"
        ) from None
    except KdcliError:
        raise
    except code_errors(()) as error:
        raise_error_of_code(error)
        raise UsageError(
            f"the code of {source} fails: {type(error).__name__}: {first_line(error)}", CODE_FAILS
        ) from None
