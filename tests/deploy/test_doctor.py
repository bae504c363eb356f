"""`kdcli doctor`: the int8 kernel, the backends, and what it does not show."""

import json
import os
from pathlib import Path

import pytest

from kdcli.deploy.doctor import examine, int8_kernel, variables

pytestmark = pytest.mark.slow

CORE = "avx2 fma avx512f avx512bw avx512dq avx512vl"


@pytest.mark.parametrize(
    ("flags", "kernel"),
    [
        (f"{CORE} avx512_vnni amx_tile amx_int8", "AMX"),
        (f"{CORE} avx512_vnni avx_vnni", "AVX-512 VNNI"),
        (CORE, "AVX-512 without VNNI"),
        ("avx2 fma avx_vnni", "AVX-VNNI"),
        ("avx2 fma avx512f", "AVX2 without VNNI"),
        ("asimd asimddp i8mm", "i8mm"),
        ("asimd asimddp", "dot product"),
        ("sse4_1", "the portable one"),
        ("", "unknown"),
    ],
)
def test_int8_kernel(flags, kernel):
    assert int8_kernel(frozenset(flags.split())) == kernel


def test_values_that_may_be_private_are_hidden():
    environment = {
        "HF_HUB_OFFLINE": "1",
        "https_proxy": "http://me:password@proxy",
        "HF_TOKEN": "hf_secret",
        "USER": "me",
        "CUDA_VISIBLE_DEVICES": "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6,MIG-GPU-89/1/2,0",
    }
    assert variables(environment) == {
        "CUDA_VISIBLE_DEVICES": "GPU-...,MIG-...,0",
        "HF_HUB_OFFLINE": "1",
        "HF_TOKEN": "(set)",
        "HTTPS_PROXY": "(set)",
    }


def test_the_block_can_be_pasted_and_names_no_home(tmp_path, monkeypatch):
    monkeypatch.delenv("KDCLI_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    diagnosis = examine()
    block = diagnosis.to_markdown()
    assert block.startswith("```text\n")
    assert block.endswith("\n```")
    assert block.count("```") == 2
    assert str(Path("~/.cache/kdcli")) in block
    assert str(tmp_path) not in block + diagnosis.to_json()
    facts = json.loads(diagnosis.to_json())
    assert facts["space"]["cache_free_bytes"] > 0
    assert facts["threads"]["latency"] >= 1


def test_a_cache_elsewhere_is_not_named(tmp_path, monkeypatch):
    monkeypatch.setenv("KDCLI_CACHE", str(tmp_path / "customer"))
    assert "customer" not in examine().to_markdown()
    monkeypatch.setenv("KDCLI_CACHE", "")
    assert "$KDCLI_CACHE" not in examine().to_markdown()


def test_backends_that_work_and_fail(monkeypatch):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    assert examine().facts["backends"]["onnx"] == "works"
    real = runtime.InferenceSession

    def failing(text):
        def load(file, *settings, **options):
            raise RuntimeError(text.format(file))

        monkeypatch.setattr(runtime, "InferenceSession", load)
        return examine().facts["backends"]["onnx"]

    assert failing("illegal instruction\nmore") == "fails: illegal instruction"
    assert failing("cannot load {}") == f"fails: cannot load {os.sep}product.onnx"

    class Wrong(real):
        def run(self, names, inputs):
            return [inputs["x"]]

    monkeypatch.setattr(runtime, "InferenceSession", Wrong)
    assert examine().facts["backends"]["onnx"].startswith("fails: an int8 product has wrong")
