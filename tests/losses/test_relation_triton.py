"""The Triton kernels of the relation losses: right in Triton's interpreter, and compiled for four
generations of GPU.

Triton (286 MB) is no part of `.[dev]`: without `pip install -e .[triton]`, only the refusals are
tested. A job of continuous integration has it. What is marked `cuda` also needs a device. The
interpreter multiplies bfloat16 wrongly, so that type is tested on a device only.
"""

import importlib.util
import os
import subprocess
import sys

import interpreted
import pytest
import torch
from interpreted import EACH, ISOLATED, MASKS, PADDED, agree, exact, of_kernel, vectors

from kdcli.losses.relation import why_no_triton

has_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)
on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.slow
@has_triton
def test_the_interpreter_computes_what_the_float64_reference_does():
    program = interpreted.__file__
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", program]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert ran.returncode == 0, ran.stdout[-3000:]
    assert " passed" in ran.stdout


class Recorded:
    """Stands for a kernel and keeps what it was launched with."""

    def __init__(self, kernel):
        self.kernel, self.launched = kernel, None

    def __getitem__(self, grid):
        return self

    def __call__(self, *inputs, **named):
        self.launched = dict(zip(self.kernel.arg_names, inputs, strict=False)) | named

    def compiled(self, capability):
        """Shared memory in bytes of the program that a card of this compute capability would
        run."""
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        options = {name: self.launched.pop(name) for name in ("num_warps", "num_stages")}
        types = {
            torch.float32: "*fp32",
            torch.float16: "*fp16",
            torch.bfloat16: "*bf16",
            torch.uint8: "*u8",
        }
        signature, constants = {}, {}
        for parameter in self.kernel.params:
            value = self.launched[parameter.name]
            if parameter.is_constexpr or (type(value) is int and value == 1):
                signature[parameter.name], constants[parameter.name] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                signature[parameter.name] = types[value.dtype]
            else:
                signature[parameter.name] = "i32" if isinstance(value, int) else "fp32"
        whole = {
            name: value for name, value in self.launched.items() if signature.get(name) == "i32"
        }
        order = list(signature)
        aligned = {
            (order.index(name),): [["tt.divisibility", 16]]
            for name, n in whole.items()
            if n % 16 == 0
        }
        source = ASTSource(self.kernel, signature, constants, aligned)
        return triton.compile(
            source, target=GPUTarget("cuda", capability, 32), options=options
        ).metadata.shared


@pytest.mark.long
@has_triton
@pytest.mark.parametrize(("capability", "kilobytes"), [(60, 48), (70, 96), (80, 163), (90, 227)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_both_kernels_compile_for_a_card_and_fit_its_shared_memory(
    capability, kilobytes, dtype, monkeypatch
):
    if dtype == torch.bfloat16 and capability < 80:
        pytest.skip("these cards have no bfloat16")
    from kdcli.losses import relation_triton as module

    kernels = [Recorded(module._rows), Recorded(module._columns)]
    replaced = dict(zip(("_rows", "_columns"), kernels, strict=True))
    replaced["capability_of"] = lambda device: divmod(capability, 10)
    for name, replacement in replaced.items():
        monkeypatch.setattr(module, name, replacement)
    widest = module.max_width(torch.device("cuda"))
    one = torch.ones(1, 1)
    cases = (
        (True, 16, None),
        (True, 64, PADDED),
        (True, widest, ISOLATED),
        (False, 64, PADDED),
        (True, 64, one),
    )
    for kl, width, mask in cases:
        batch = slice(
            0, 1 if mask is one else None
        )  # one token of one head: Triton makes every size a constant
        tx, ty, sx, sy = (x[batch, batch, batch] for x in vectors(width, width // 2, dtype))
        for grad in (True, False):
            for kernel in kernels:
                kernel.launched = None
            module.compare_relations((sx, sy), (tx, ty), mask, kl=kl, grad=grad)
            launched = [kernel for kernel in kernels if kernel.launched]
            assert launched == kernels[: 2 if grad else 1]
            for kernel in launched:
                assert 0 < kernel.compiled(capability) <= kilobytes * 1024


@pytest.mark.cuda
@on_cuda
@has_triton
@EACH
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize(
    ("dtype", "near"), [(torch.float32, 1e-4), (torch.float16, 3e-3), (torch.bfloat16, 2e-2)]
)
@pytest.mark.parametrize(("teacher", "student"), [(64, 32), (64, 26), (16, 128)])
def test_on_a_device(loss, of_row, kind, dtype, near, teacher, student):
    inputs, mask = vectors(teacher, student, dtype), MASKS[kind]
    found = of_kernel(loss, *(x.cuda() for x in inputs), mask if mask is None else mask.cuda())
    agree(found, exact(of_row, *inputs, mask), near)


def test_a_machine_without_it_is_told_why():
    assert "CUDA device" in why_no_triton(torch.device("cpu"), torch.float32)
    if importlib.util.find_spec("triton") is None:
        gpu = torch.device("cuda", 7)
        assert "pip install" in why_no_triton.__wrapped__(gpu, torch.float32)
