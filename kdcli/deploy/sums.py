"""Prove that no sum of an int8 file's products saturates, on any processor.

ONNX Runtime multiplies activations of 0 ... 255 by weights of -127 ... 127. With VNNI, it adds four
products in 32 bits. Without it (AVX2 and AVX-512), it first adds the products of inputs 2k and
2k + 1 in 16 bits, and a sum beyond 32,767 is cut off silently.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from kdcli.deploy.products import key_of_module, products
from kdcli.deploy.quantise import Roundings, names_in_int8, products_of_file
from kdcli.deploy.rounding import largest_pair
from kdcli.deploy.sessions import library
from kdcli.types import Array

if TYPE_CHECKING:
    import onnx

MAX_SUM = 2**15 - 1
MAX_ACTIVATION = 255


@dataclass(frozen=True)
class LargestSum:
    """The largest sum of two neighbouring products of integers, in magnitude.

    Attributes:
        name: The linear, or the weights' name in the graph if no module has them.
        any_input: The largest sum that any input can cause.
        texts: A bound for the calibration texts, from the largest activation of each channel; None
            if they did not reach the linear.
    """

    name: str
    any_input: int
    texts: int | None

    @property
    def can_saturate(self) -> bool:
        """Whether some input can exceed 16 bits."""
        return self.any_input > MAX_SUM


def largest_sums(
    plain: Path, file: Path, model: nn.Module, roundings: Roundings
) -> list[LargestSum]:
    """Read the integers of an int8 file, and return the largest sum of each of its products.

    Args:
        plain: The float32 file from which the file was made.
        file: The int8 file.
        model: The model, which names the products.
        roundings: The roundings that were chosen on calibration texts, by key.
    """
    onnx = library("onnx", "onnx")
    names = {key_of_module(module): name for name, module in products(model).items()}
    stored = {tensor.name: tensor for tensor in onnx.load(file).graph.initializer}
    sums = {}
    for product in products_of_file(plain):
        values_OI = _integers(stored, product.weight)
        if product.is_table or values_OI is None:
            continue
        rounding = roundings.get(product.key)
        largest_I = rounding.largest_input_I if rounding is not None else None
        name = names.get(product.key, product.weight)
        sums[name] = LargestSum(
            name,
            MAX_ACTIVATION * largest_pair(values_OI),
            None if largest_I is None else largest_pair(values_OI * largest_I),
        )
    return list(sums.values())


def _integers(stored: Mapping[str, "onnx.TensorProto"], weight: str) -> Tensor | None:
    """Return the integers of a product, [out, in]; None if the file has it in float32."""
    onnx = library("onnx", "onnx")
    for name in names_in_int8(weight):
        if f"{name}_quantized" in stored:
            values_IO: Array = onnx.numpy_helper.to_array(stored[f"{name}_quantized"])
            return torch.from_numpy(values_IO.copy()).T.int()
    return None
