"""Keep one base in memory for many tasks.

Switching tasks writes the next task's kept weights into the only set of matrices. A sparse matrix
is stored as places and values, and is written tile by tile, while a tile is in the cache. Other
matrices are stored as bits, through which the base is written. Numpy releases the GIL for both, so
threads share the work.
"""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kdcli.deploy.sparse.load import with_head
from kdcli.deploy.sparse.mask_file import MaskInfo, check_fit
from kdcli.errors import UsageError, did_you_mean
from kdcli.models.matrices import Matrix, matrices
from kdcli.types import Array

# Number of weights in a tile: a place within it fits in 16 bits, and its 256 KB in a core's cache.
TILE = 1 << 16
# Maximum density at which writing the kept weights one by one beats masking all weights.
SCATTER_BELOW = 0.1


class _Scattered:
    """A mask as the places and values of the kept weights."""

    def __init__(self, weight: Array, mask: Array) -> None:
        self.values = weight[mask]
        self.tiles = [
            np.flatnonzero(mask[at : at + TILE]).astype(np.uint16)
            for at in range(0, mask.size, TILE)
        ]
        self.ends = np.cumsum([0, *(len(t) for t in self.tiles)]).tolist()

    def write(self, weight: Array, out: Array) -> None:
        for n, places in enumerate(self.tiles):
            tile = out[n * TILE : (n + 1) * TILE]
            tile.fill(0)
            tile[places.astype(np.intp)] = self.values[self.ends[n] : self.ends[n + 1]]


class _Packed:
    """A mask as bits."""

    def __init__(self, weight: Array, mask: Array) -> None:
        self.bits = np.packbits(mask)

    def write(self, weight: Array, out: Array) -> None:
        # 0 and 1 become no bits and all bits. A product would give zeros the sign of the weight.
        kept = np.unpackbits(self.bits, count=out.size).view(np.int8)
        np.bitwise_and(weight.view(np.int32), np.negative(kept, out=kept), out=out.view(np.int32))


class _Entry(NamedTuple):
    model: PreTrainedModel
    forms: list[_Scattered | _Packed]


class Bank:
    """Tasks on one encoder, on the CPU in float32.

    `use` overwrites the encoder's matrices. The bank keeps a copy of the original weights.

    Raises UsageError if the encoder is not on the CPU or not in float32.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._base: PreTrainedModel = model.base_model
        self._matrices: list[Matrix] = matrices(model)
        for matrix in self._matrices:
            weight = matrix.linear.weight
            if weight.device.type != "cpu" or weight.dtype != torch.float32:
                raise UsageError(
                    f"a bank needs its base on the CPU in float32, got {weight.dtype} on "
                    f"{weight.device}",
                    "convert it first: base.cpu().float()",
                )
        self._weights = [
            m.of(m.linear.weight.detach()).clone().reshape(-1).numpy() for m in self._matrices
        ]
        self._entries: dict[str, _Entry] = {}

    @property
    def tasks(self) -> tuple[str, ...]:
        """The names of the tasks."""
        return tuple(self._entries)

    def add(
        self,
        name: str,
        masks: Mapping[str, Tensor],
        *,
        info: MaskInfo | None = None,
        head: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Add a task.

        * `masks`: by `Matrix.name`, bool [out, in].
        * `info`: names the class of the task's model and its settings; None for the bare encoder.
        * `head`: parameters by their names in that model.

        Raises UsageError if the masks do not fit the base, if the head does not fit its class, or
        if the name is taken.
        """
        if name in self._entries:
            raise UsageError(f"the bank already has a task '{name}'", "use another name")
        check_fit(masks, self._base, f"the mask of {name}")
        forms: list[_Scattered | _Packed] = []
        for matrix, weight in zip(self._matrices, self._weights, strict=True):
            mask = masks[matrix.name].cpu().reshape(-1).numpy()
            sparse = np.count_nonzero(mask) <= SCATTER_BELOW * mask.size
            forms.append((_Scattered if sparse else _Packed)(weight, mask))
        model = (
            self._base
            if info is None
            else with_head(self._base, info, head or {}, f"the head of {name}")
        )
        self._entries[name] = _Entry(model, forms)

    def use(self, name: str) -> PreTrainedModel:
        """Switch to a task and return its model, which is the same object for every call.

        The models of other tasks then compute with this task's weights. Raises UsageError if the
        task is unknown.
        """
        if name not in self._entries:
            raise UsageError(
                f"the bank has no task '{name}'{did_you_mean(name, self._entries)}",
                f"available: {', '.join(self._entries) or 'none; add a task first'}",
            )
        with ThreadPoolExecutor(torch.get_num_threads()) as threads:
            list(threads.map(_write, self._matrices, self._weights, self._entries[name].forms))
        return self._entries[name].model


def _write(matrix: Matrix, weight: Array, form: _Scattered | _Packed) -> None:
    target = matrix.of(matrix.linear.weight.detach())
    # Rows that are given by index are not a view of the weight.
    out = target.reshape(-1).numpy() if isinstance(matrix.rows, slice) else np.empty_like(weight)
    form.write(weight, out)
    if not isinstance(matrix.rows, slice):
        matrix.linear.weight.detach()[matrix.rows] = torch.from_numpy(out).view(target.shape)
