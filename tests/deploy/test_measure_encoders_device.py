"""The device that the file for old machines picks, on simulated cards."""

import pytest
import torch

from kdcli.deploy.old_machines import measure_encoders as there

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


@pytest.fixture
def p100(monkeypatch):
    """A function that simulates a P100, with or without kernels for it."""

    def make(build: list[str], failure: str | None = None) -> None:
        ones = torch.ones

        def fake_ones(*size, device=None):
            if failure:
                raise RuntimeError(failure)
            return ones(*size)

        monkeypatch.setattr(torch, "ones", fake_ones)
        of_card = {
            "device_count": 1,
            "get_device_capability": (6, 0),
            "get_device_name": "Tesla P100",
        }
        for name, value in (of_card | {"is_available": True, "get_arch_list": build}).items():
            monkeypatch.setattr(torch.cuda, name, lambda device=None, value=value: value)

    return make


INSTALL = {
    "3.7": "pip install one-for-k80",
    "6.0": "pip install one-for-p100",
    "7.0": "pip install one-for-v100",
}
NO_IMAGE = "CUDA error: no kernel image is available for execution on the device\nCompile with ..."


def refused(capsys, code: int, wanted: str) -> str:
    """The message on stderr when a device is refused."""
    with pytest.raises(SystemExit, match=f"^{code}$"):
        there.choose_device(wanted, INSTALL)
    return capsys.readouterr().err


def test_a_card_that_works_is_taken(p100, capsys):
    p100(["sm_37", "sm_60"])
    assert (
        there.choose_device("auto", INSTALL)
        == there.choose_device("cuda:0", {})
        == torch.device("cuda", 0)
    )
    assert there.choose_device("cpu", INSTALL) == CPU
    assert "the last CUDA device here is cuda:0" in refused(capsys, 3, "cuda:1")


def test_a_card_without_kernels_gets_the_line_to_install(p100, capsys):
    p100(["sm_70", "sm_80", "compute_80"], NO_IMAGE)
    message = refused(capsys, 3, "auto")
    card = "Tesla P100 (compute capability 6.0; this torch has sm_70, sm_80, compute_80)"
    assert f"{card}: CUDA error: no kernel" in message
    assert "pip install one-for-p100; or use --device cpu" in message
    assert "Compile with" not in message


@pytest.mark.parametrize("wanted", ["gpu", "cuda:", "cuda:x", "cpu:0", "auto:0", ""])
def test_an_unknown_device_names_the_known(capsys, wanted):
    assert "allowed: auto, cpu, cuda, cuda:INDEX" in refused(capsys, 2, wanted)


@pytest.fixture
def no_card(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_without_a_card(no_card, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert (there.choose_device("auto", INSTALL), capsys.readouterr().err) == (CPU, "")
    assert "no CUDA device here" in refused(capsys, 3, "cuda")


def nvidia_smi(monkeypatch, folder, script):
    """Let a script be the only program on the path."""
    monkeypatch.setenv("PATH", str(folder))
    if script:
        (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (folder / "nvidia-smi").chmod(0o755)


DRIVERS = [
    ("echo 470.256.02; echo 470.256.02", "470.256.02"),
    ("echo NVIDIA-SMI has failed; exit 9", None),
]


@pytest.mark.parametrize(("script", "version"), [*DRIVERS, ("exit 0", None), (None, None)])
def test_the_driver_comes_from_nvidia_smi(monkeypatch, tmp_path, script, version):
    nvidia_smi(monkeypatch, tmp_path, script)
    assert there.driver() == version


def test_a_card_that_torch_does_not_see_is_reported(no_card, monkeypatch, capsys, tmp_path):
    nvidia_smi(monkeypatch, tmp_path, "echo 340.1")
    assert there.choose_device("auto", INSTALL) == CPU
    assert "driver 340.1 sees no CUDA device" in capsys.readouterr().err
