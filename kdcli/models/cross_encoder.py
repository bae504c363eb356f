"""Cross-encoders in the format of sentence-transformers: models that score pairs of texts."""

from dataclasses import replace

from transformers import PreTrainedConfig, PreTrainedModel

from kdcli.errors import UsageError
from kdcli.models.embedding_format import (
    CROSS_ENCODER,
    GENERAL_SETTINGS,
    PROMPTS_FILE,
    READ,
    SHARED_SETTINGS,
    check_requirements,
    check_settings,
    json_file,
    read_length,
    read_prompts,
)
from kdcli.models.files import MODULES_FILE, check_modules, module_kind
from kdcli.models.load import check_case
from kdcli.models.model import Model
from kdcli.models.shape import library_length

ACTIVATION_CLASSES = {
    "Sigmoid": "torch.nn.modules.activation.Sigmoid",
    "Identity": "torch.nn.modules.linear.Identity",
}
"""The activations that kdcli writes, by name."""

SCORE_SETTINGS = {
    "activation_fn": READ,
    "keep_in_fp32_modules": READ,
    "model_type": (CROSS_ENCODER,),
}
SCORER_SETTINGS = SHARED_SETTINGS | {
    "transformer_task": ("sequence-classification",),
    "modality_config": ({"text": {"method": "forward", "method_output_name": "logits"}},),
    "module_output_name": ("scores",),
}


def activation_of(source: str, config: PreTrainedConfig) -> str | None:
    """Read a cross-encoder's activation from its files, under any current or former key.

    Returns:
        None if the files name none. sentence-transformers ignores classes that are not torch's.

    Raises:
        UsageError: They name an activation that kdcli does not compute.
    """
    section = getattr(config, "sentence_transformers", None)
    names = (
        (json_file(source, PROMPTS_FILE) or {}).get("activation_fn"),
        section.get("activation_fn") if isinstance(section, dict) else None,
        getattr(config, "sbert_ce_default_activation_function", None),
    )
    trusted = (name for name in names if isinstance(name, str) and name.startswith("torch."))
    if (activation := next(trusted, None)) is None:
        return None
    if (kind := activation.rsplit(".", 1)[-1]) not in ACTIVATION_CLASSES:
        raise UsageError(
            f"{source} applies {kind} to its scores; supported are "
            f"{' and '.join(ACTIVATION_CLASSES)}",
            "use .model, which is a CrossEncoder",
        )
    return activation


def is_cross_encoder(source: str) -> bool:
    """Return whether sentence-transformers saved a model as a cross-encoder."""
    general = json_file(source, PROMPTS_FILE) or {}
    return general.get("model_type") == CROSS_ENCODER and (
        json_file(source, MODULES_FILE, list) is not None
    )


def read_scorer(source: str) -> int | None:
    """Read the maximum length of a pair from sentence-transformers' files of a cross-encoder.

    Returns:
        None if they do not name a length.

    Raises:
        UsageError: They have a setting that changes the scores and that kdcli does not compute.
    """
    if not is_cross_encoder(source):
        return None
    modules, general = json_file(source, MODULES_FILE, list), json_file(source, PROMPTS_FILE)
    check_modules(source, modules)
    kinds = [module_kind(module) for module in modules]
    if kinds != ["Transformer"]:
        raise UsageError(
            f"{source} is a cross-encoder that kdcli cannot compute: its modules are "
            f"{', '.join(kinds)}",
            "supported: an encoder with a head for sequence classification",
        )
    check_settings(source, PROMPTS_FILE, general, GENERAL_SETTINGS | SCORE_SETTINGS)
    check_requirements(source, general)
    prompts, default = read_prompts(source, general)
    if default is not None and prompts[default]:
        raise UsageError(
            f"{source} puts a prompt before its queries ({prompts[default]!r}), which kdcli does "
            "not do",
            "put the prompt into the queries of a copy of the data, and remove "
            f"default_prompt_name from {PROMPTS_FILE} in a copy of the model",
        )
    return read_length(source, SCORER_SETTINGS)


def with_own_settings(model: Model) -> Model:
    """Return a model that reads the length in the files of a cross-encoder, if it is one.

    Raises:
        UsageError: The files have a setting that changes the scores and that kdcli does not
            compute.
    """
    if not is_cross_encoder(model.source):
        return model
    check_case(model.tokenizer, model.source)
    own = read_scorer(model.source)
    return replace(model, tuned_length=library_length(own, model.tokenizer, model.model.config))


def set_activation(model: PreTrainedModel, name: str) -> None:
    """Store the activation that `CrossEncoder` applies to the scores in a model's configuration."""
    if hasattr(model.config, "sbert_ce_default_activation_function"):
        del model.config.sbert_ce_default_activation_function
    model.config.sentence_transformers = {"activation_fn": name}


def standing_alone(model: Model) -> Model:
    """Return a model that needs no files of a cross-encoder for its length and its activation.

    The tokenizer and the configuration, which every form of the model has, hold them instead.

    Raises:
        UsageError: The files have a setting that changes the scores and that kdcli does not
            compute.
    """
    model = with_own_settings(model)
    if model.tuned_length is not None:
        model.tokenizer.model_max_length = model.tuned_length
    if (activation := activation_of(model.source, model.model.config)) is not None:
        set_activation(model.model, activation)
    return model
