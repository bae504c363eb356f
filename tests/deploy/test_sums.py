"""Integer products as processors compute them, with VNNI and without."""

import inspect
import platform
import shutil
import subprocess
import sys

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx_graphs import graph, node

from kdcli.deploy.doctor import int8_kernel
from kdcli.deploy.export import MAX_SUM
from kdcli.deploy.rounding import INT8, INT8_PAIRS, round_weight
from kdcli.engine.device import cpu_flags

TOKENS, WIDTH, OUTPUTS = 33, 130, 40


def matrices(grid):
    """Activations in 0 ... 255 and integers of weights, [tokens, in] and [in, out]."""
    generator = np.random.default_rng(0)
    activations_TI = generator.integers(0, 256, (TOKENS, WIDTH), dtype=np.uint8)
    activations_TI[:3] = 255
    weight_OI = torch.from_numpy(generator.normal(size=(OUTPUTS, WIDTH)))
    weight_OI[0] = 1.0
    return activations_TI, round_weight(weight_OI, grid).values_OI.T.contiguous().numpy()


def with_vnni(activations_TI, values_IO):
    """Sums in 32 bits, which are exact here."""
    return activations_TI.astype(np.int64) @ values_IO.astype(np.int64)


def without_vnni(activations_TI, values_IO):
    """Sums of two products in 16 bits with saturation, and their sums in 32 bits."""
    pairs_TK2 = activations_TI.reshape(TOKENS, -1, 2).astype(np.int64)
    pairs_K2O = values_IO.reshape(-1, 2, OUTPUTS).astype(np.int64)
    sums_TKO = (pairs_TK2[..., None] * pairs_K2O).sum(2)
    return np.clip(sums_TKO, -MAX_SUM - 1, MAX_SUM).sum(1)


def product(activations_TI, values_IO):
    """The product as ONNX Runtime computes it."""
    kinds, shape = onnx.TensorProto, list(activations_TI.shape)
    model = graph(
        [node("MatMulInteger", "a b", "y")],
        {"a": (kinds.UINT8, shape)},
        {"y": (kinds.INT32, None)},
        {"b": values_IO},
    )
    return onnxruntime.InferenceSession(model.SerializeToString()).run(None, {"a": activations_TI})


def expected_here(activations_TI, values_IO):
    """The product by the emulation of this processor's kernel."""
    kernel = int8_kernel(cpu_flags())
    emulation = without_vnni if kernel.endswith("without VNNI") else with_vnni
    return emulation(activations_TI, values_IO)


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="kernels of x86")
def test_the_emulation_of_this_processor_is_exact():
    activations_TI, values_IO = matrices(INT8)
    (sums_TO,) = product(activations_TI, values_IO)
    assert (sums_TO == expected_here(activations_TI, values_IO)).all()


def test_integers_of_pairs_have_the_same_sums_on_every_processor():
    saturating, safe = (matrices(grid) for grid in (INT8, INT8_PAIRS))
    assert (with_vnni(*saturating) != without_vnni(*saturating)).any()
    assert (with_vnni(*safe) == without_vnni(*safe)).all()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("qemu-x86_64") is None, reason="qemu-x86_64 is not installed")
def test_a_processor_without_vnni_computes_what_the_emulation_says(tmp_path):
    """An emulated processor with AVX2 runs ONNX Runtime's other kernel."""
    cases = [matrices(grid) for grid in (INT8, INT8_PAIRS)]
    np.savez(tmp_path / "cases.npz", *[array for case in cases for array in case])
    script = (
        f"import sys; sys.path = {sys.path!r}\n"
        "import numpy as np, onnx, onnxruntime\n"
        "from onnx_graphs import graph, node\n"
        f"{inspect.getsource(product)}"
        f"arrays = list(np.load({str(tmp_path / 'cases.npz')!r}).values())\n"
        "sums = [product(*arrays[:2])[0], product(*arrays[2:])[0]]\n"
        f"np.savez({str(tmp_path / 'sums.npz')!r}, *sums)"
    )
    command = ["qemu-x86_64", "-cpu", "Haswell", sys.executable, "-c", script]
    subprocess.run(command, capture_output=True, check=True)
    saturating, safe = np.load(tmp_path / "sums.npz").values()
    assert (saturating == without_vnni(*cases[0])).all()
    assert (safe == with_vnni(*cases[1])).all()
