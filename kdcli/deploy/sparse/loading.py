"""Load a model for use: a base with a mask and its task's head, or a compacted directory."""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from torch import Tensor
from transformers import AutoModel, PreTrainedModel

from kdcli.deploy.sparse.mask_file import (
    MaskFile,
    MaskInfo,
    apply_masks,
    base_facts,
    check_base,
    open_mask,
    read_smp,
)
from kdcli.disk import read_json
from kdcli.errors import UsageError
from kdcli.models.custom_class import (
    COMPACT_KEY,
    class_named,
    custom_class,
    empty_model,
    load_tensors,
)
from kdcli.models.embedding_format import read_format
from kdcli.models.files import CONFIG_FILE, SIZE, check_config, config_errors, file_beside
from kdcli.models.label_words import load_with_label_words
from kdcli.models.load import load_config, load_weights, location
from kdcli.models.matrices import matrices
from kdcli.models.static import CLASSIFIER
from kdcli.models.static import MODEL_TYPE as STATIC_TYPE
from kdcli.models.static_classifier import StaticForSequenceClassification
from kdcli.types import Task

# Configuration keys that are independent of the task.
NOT_OF_A_TASK = (
    "architectures",
    "dtype",
    "transformers_version",
    "_name_or_path",
    "torch_dtype",
    "auto_map",
)
# Label words of the masks that the authors of static model pruning publish, in the data's order of
# labels. Only tasks whose words differ from the task's own are listed: MNLI was trained with a
# teacher's order of labels.
PUBLISHED_WORDS = {"mnli": ("Maybe", "No", "Yes")}


def load_network(base: str | Path, mask: str | Path | None = None) -> PreTrainedModel:
    """Load a network in float32 and eval mode.

    Without a mask, its class is the one that the base's configuration names, except for embedding
    models: many name the class that they were trained from, and have no weights for its head. With
    a mask, it is the one that the mask names, and the model has the head of the mask's task.

    * `base`: a hub id, a directory, or `demo`.
    * `mask`: a mask file that was made for this base.

    Raises UsageError if the model cannot be loaded, if the mask is damaged or was made for another
    base, or if the base is compacted, because its matrices are no longer the ones that the mask was
    made for.
    """
    source = str(base)
    config = load_config(source, compacted=True)
    if mask is None:
        named = _class((config.architectures or [""])[0])
        has_vectors = read_format(source) is not None
        model_class = custom_class(config) or (None if has_vectors else named) or AutoModel
        return load_weights(source, model_class).eval()
    if hasattr(config, COMPACT_KEY):
        raise UsageError(
            f"{source} is already compacted, so it cannot take a mask",
            "use the base that it was made from",
        )
    coded = open_mask(Path(mask))
    model = load_weights(source, AutoModel).eval()
    check_base(coded, model, source)
    file = coded.decode(model)
    apply_masks(model, file.masks)
    return with_head(model, file.info, file.head, str(file.path))


def published_mask(
    file: Path,
    source: str,
    task: Task | None,
    *,
    kind: Literal["embedding", "mlm"] = "mlm",
    words: Sequence[str] | None = None,
) -> tuple[MaskFile, PreTrainedModel]:
    """Read an `.npy` by the authors of static model pruning as a mask file.

    Also returns the encoder of `source`, which is not masked yet. The `.npy` holds only bits, so
    `task`, `kind` and `words` define the head. The defaults are the head with which the authors
    trained. Without a task, the encoder stays bare.

    Raises UsageError if the file is damaged or does not fit the model, or if the model cannot have
    the task's head.
    """
    base = load_weights(source, AutoModel).eval()
    masks = read_smp(file, base)
    kept = sum(int(m.sum()) for m in masks.values())
    total = sum(m.numel() for m in masks.values())
    about = MaskInfo(**base_facts(base, source), method="smp", density=kept / total)
    if task is None:
        return MaskFile(about, masks, file), base
    chosen: tuple[str, ...] = tuple(words) if words else PUBLISHED_WORDS.get(task.name, task.words)
    model = load_with_label_words(source, task, kind=kind, words=chosen, seed=0).model
    head, config = task_part(model, base)
    facts: dict[str, object] = {
        "task": task.name,
        "labels": task.labels,
        "label_words": chosen,
        "max_length": task.max_length,
    }
    facts |= {"architecture": type(model).__name__, "config": config}
    return MaskFile(about.model_copy(update=facts), masks, file, head), base


def describe_head(info: MaskInfo) -> str:
    """Describe the head that a published mask is assumed to have."""
    if info.architecture is None:
        return "the bare encoder, without a head; --task TASK adds one"
    outputs = info.labels or ("start", "end")[: len(info.label_words)]
    words = ", ".join(
        f"{word} ({output})" for word, output in zip(info.label_words, outputs, strict=True)
    )
    return f"task {info.task}, {info.architecture}, frozen label words {words}"


def has_own_class(source: str) -> bool:
    """Return whether a model is compacted or static, so that only `load` knows its class."""
    file = file_beside(location(source), CONFIG_FILE)
    if file is None:
        # Only a static model of sentence-transformers has no configuration.
        return True
    config = read_json(file)
    return COMPACT_KEY in config or config.get("model_type") == STATIC_TYPE


def task_part(
    model: PreTrainedModel, base: PreTrainedModel
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return what a task's model adds to its base: the head for `write_mask` and `MaskInfo.config`.

    The head holds the parameters that the base, as it was loaded, does not have, by their names in
    `model` and without the masked matrices. The second result holds the settings of the
    configuration that differ from the base's.
    """
    prefix, base_state = f"{model.base_model_prefix}.", base.state_dict()
    masked = {f"{m.path}.weight" for m in matrices(base)}
    head = {}
    for name, tensor in model.state_dict().items():
        inner = name.removeprefix(prefix)
        if inner not in masked and not (
            inner in base_state and torch.equal(base_state[inner].cpu(), tensor.cpu())
        ):
            head[name] = tensor
    before = base.config.to_dict()
    changed = {
        k: v
        for k, v in model.config.to_dict().items()
        if k not in NOT_OF_A_TASK and before.get(k) != v
    }
    return head, changed


def with_head(
    base: PreTrainedModel, info: MaskInfo, head: Mapping[str, Tensor], source: str
) -> PreTrainedModel:
    """Return a task's model around an encoder; the two share the encoder's tensors.

    Raises UsageError if transformers has no such class, or if the head, which comes from `source`,
    does not fit it.
    """
    if info.architecture is None:
        return base
    if (task_class := _class(info.architecture)) is None:
        raise UsageError(
            f"{source} needs class {info.architecture}, which transformers "
            f"{transformers.__version__} does not have",
            "install the version of transformers that made the mask",
        )
    before = base.config.to_dict()
    check_config(before | info.config, source)
    config = copy.deepcopy(base.config)
    for name, value in info.config.items():
        # JSON keys are strings, so the keys of id2label are converted.
        if name in before and SIZE.fullmatch(name) and value != before[name]:
            raise UsageError(
                f"{source} changes '{name}' of its base from {before[name]} to {value}"
            )
        with config_errors(source):
            setattr(
                config, name, {int(k): v for k, v in value.items()} if name == "id2label" else value
            )
    with config_errors(source):
        model = empty_model(task_class, config)
    prefix, shared = f"{model.base_model_prefix}.", base.state_dict(keep_vars=True)
    tensors = {
        name: head.get(name, shared.get(name.removeprefix(prefix))) for name in model.state_dict()
    }
    if missing := sorted(name for name, tensor in tensors.items() if tensor is None):
        raise UsageError(
            f"{source} lacks {len(missing)} tensors of {info.architecture}, for example "
            f"{missing[0]}"
        )
    try:
        return load_tensors(model, {name: t for name, t in tensors.items() if t is not None}, base)
    except RuntimeError as error:
        message = str(error).strip().splitlines()[-1].strip()
        raise UsageError(f"{source} does not fit {info.architecture}: {message}") from None


def _class(name: str) -> type[PreTrainedModel] | None:
    """Return a class of kdcli or of transformers by its name, or None."""
    if name == CLASSIFIER:
        return StaticForSequenceClassification
    value = class_named(name) or (getattr(transformers, name, None) if name else None)
    return value if isinstance(value, type) and issubclass(value, PreTrainedModel) else None
