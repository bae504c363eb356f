"""Refuse outputs that are not finite, before a metric ranks or rounds them silently."""

import numpy as np

from kdcli.errors import UsageError
from kdcli.types import Array


def check_finite(values: Array, what: str) -> None:
    """Raise a UsageError if a value is NaN or infinite.

    Args:
        values: Any shape.
        what: The name of the values in the error, in the plural.
    """
    if bad := int((~np.isfinite(values)).sum()):
        raise UsageError(
            f"{bad:,} of {values.size:,} {what} are not finite",
            "the weights are broken or overflow in this dtype: try float32",
        )
