"""Store the temperature that calibrates a classifier's probabilities."""

import json
import math
from pathlib import Path

from transformers import PreTrainedConfig

from kdcli.disk import read_json, write_atomic
from kdcli.errors import UsageError
from kdcli.models.files import CONFIG_FILE

TEMPERATURE = "kdcli_temperature"
"""The key of config.json. transformers has none: its pipelines apply softmax or sigmoid to the
logits as they are."""


def store_temperature(folder: Path, temperature: float) -> None:
    """Store a temperature in the configuration of a saved model or export.

    The weights stay as they are. Whoever loads the model divides its logits:

        logits / getattr(model.config, "kdcli_temperature", 1.0)

    Args:
        folder: The model's directory.
        temperature: Divides the logits; see `kdcli.metrics.calibration.fit_temperature`.

    Raises:
        UsageError: The temperature is not a positive number, or the directory has no readable
            config.json.
        MachineError: The disk is full or not writable.
    """
    _check(temperature, "fit it with kdcli.metrics.calibration")
    config = read_json(folder / CONFIG_FILE)
    config[TEMPERATURE] = temperature
    write_atomic(folder / CONFIG_FILE, json.dumps(config, indent=2) + "\n")


def remove_temperature(folder: Path) -> None:
    """Remove the temperature from the configuration of a saved model or export, if it has one."""
    config = read_json(folder / CONFIG_FILE)
    if config.pop(TEMPERATURE, None) is not None:
        write_atomic(folder / CONFIG_FILE, json.dumps(config, indent=2) + "\n")


def stored_temperature(config: PreTrainedConfig) -> float | None:
    """Return the temperature in the configuration of a loaded model; None if it has none.

    Raises:
        UsageError: The temperature is not a positive number.
    """
    temperature = getattr(config, TEMPERATURE, None)
    if temperature is None:
        return None
    _check(temperature, f"fix or remove {TEMPERATURE} in {CONFIG_FILE}")
    return float(temperature)


def _check(temperature: float, hint: str) -> None:
    is_number = isinstance(temperature, int | float) and not isinstance(temperature, bool)
    if not is_number or not 0 < temperature < math.inf:
        raise UsageError(f"a temperature must be above 0, got {temperature!r}", hint)
