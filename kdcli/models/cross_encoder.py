"""Cross-encoders in the format of sentence-transformers: models that score pairs of texts."""

from transformers import PreTrainedConfig, PreTrainedModel

from kdcli.models.embedder import PROMPTS_FILE, json_file

ACTIVATION_CLASSES = {
    "Sigmoid": "torch.nn.modules.activation.Sigmoid",
    "Identity": "torch.nn.modules.linear.Identity",
}
"""The activations that kdcli writes, by name."""


def activation_of(source: str, config: PreTrainedConfig) -> str | None:
    """Read a cross-encoder's activation from its files, under any current or former key."""
    section = getattr(config, "sentence_transformers", None)
    name = section.get("activation_fn") if isinstance(section, dict) else None
    name = name or getattr(config, "sbert_ce_default_activation_function", None)
    name = name or (json_file(source, PROMPTS_FILE) or {}).get("activation_fn")
    return name if isinstance(name, str) else None


def set_activation(model: PreTrainedModel, name: str) -> None:
    """Store the activation that `CrossEncoder` applies to the scores in a model's configuration."""
    if hasattr(model.config, "sbert_ce_default_activation_function"):
        del model.config.sbert_ce_default_activation_function
    model.config.sentence_transformers = {"activation_fn": name}
