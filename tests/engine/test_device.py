"""Devices and number formats, on cards this machine does not have: the answers of torch are made
up."""

import contextlib
import json
import re
from dataclasses import dataclass, field

import pytest
import torch

from kdcli.deploy.doctor import examine
from kdcli.engine import device as device_file
from kdcli.engine.device import (
    TORCH_DTYPES,
    choose_device,
    choose_dtype,
    device_table,
    has_bf16,
    known_devices,
)
from kdcli.engine.launch import process_count
from kdcli.errors import MachineError, UsageError
from kdcli.recipe.sections import RunOptions

CPU = torch.device("cpu")
CARDS = {"K80": (3, 7), "P100": (6, 0), "V100": (7, 0), "T4": (7, 5)}
CARDS |= {"A100": (8, 0), "H200": (9, 0), "B200": (10, 0)}
BUILD = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]
NO_KERNEL = "CUDA error: no kernel image is available for execution on the device"
ONES = torch.ones


@dataclass
class Machine:
    """What torch finds here.

    Attributes:
        kind: the kind of its accelerators, or None without any.
        count: the number of accelerators.
        card: the name of a CUDA card.
        bf16: whether another accelerator has bfloat16.
        failure: the error of a kernel.
        cuda: the version of CUDA for which PyTorch is built, or None.
        cuda_error: the reason why torch.cuda is not available.
        driver: the version of a loaded driver.
        models: the cards of that driver.
    """

    kind: str | None = None
    count: int = 1
    card: str = "A100"
    bf16: bool = True
    failure: str | None = None
    cuda: str | None = "12.6"
    cuda_error: str = ""
    driver: str | None = None
    models: list[str] = field(default_factory=list)

    def ones(self, *size, device=None):
        if self.failure and device is not None:
            raise RuntimeError(self.failure)
        return ONES(*size)

    def has_bf16(self, including_emulation=True):
        of_card = self.bf16 if self.kind == "xpu" else CARDS[self.card] >= (8, 0)
        return including_emulation or of_card

    def current_device(self):
        raise RuntimeError(f"{self.cuda_error}\nand more")

    def write_driver(self, folder):
        if self.driver is None:
            return
        (folder / "version").write_text(f"NVRM version: NVIDIA Kernel Module  {self.driver}  Sat\n")
        for number, model in enumerate(self.models):
            of_card = folder / "gpus" / f"0000:0{number}:00.0"
            of_card.mkdir(parents=True)
            (of_card / "information").write_text(f"Model: \t\t {model}\nIRQ:   \t\t 10\n")

    def answers(self):
        """(Object, attribute) -> what torch answers on this machine."""

        def within(device):
            return contextlib.nullcontext()

        accelerator, cuda, xpu = torch.accelerator, torch.cuda, torch.xpu
        return {
            (torch, "ones"): self.ones,
            (torch.version, "cuda"): self.cuda,
            (accelerator, "is_available"): lambda: self.kind is not None,
            (accelerator, "current_accelerator"): lambda: torch.device(self.kind),
            (accelerator, "device_count"): lambda: self.count if self.kind else 0,
            (cuda, "current_device"): self.current_device,
            (cuda, "get_device_capability"): lambda device=None: CARDS[self.card],
            (cuda, "get_device_name"): lambda device=None: self.card,
            (cuda, "get_arch_list"): lambda: BUILD,
            (cuda, "is_bf16_supported"): self.has_bf16,
            (cuda, "device"): within,
            (xpu, "is_bf16_supported"): self.has_bf16,
            (xpu, "get_device_name"): lambda device=None: "Arc",
            (xpu, "device"): within,
            (torch.backends.mps, "is_macos_or_newer"): lambda major, minor: self.bf16,
        }


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Let torch answer as on a machine; the first accelerator."""

    def make(kind=None, **facts):
        described = Machine(kind, **facts)
        described.write_driver(tmp_path)
        places = described.answers() | {(device_file, "DRIVER"): tmp_path}
        for (owner, name), answer in places.items():
            monkeypatch.setattr(owner, name, answer)
        return torch.device(kind, 0) if kind else CPU

    return make


@pytest.mark.parametrize("wanted", ["gpu", "cuda:", "cuda:-1", "mps:x", "cpu:0", "auto:0", ""])
def test_unknown_device_names_the_known(wanted):
    allowed = "allowed: auto, cpu, cuda, mps, xpu, or with an index as in cuda:0"
    with pytest.raises(UsageError, match=allowed):
        choose_device(wanted)


@pytest.mark.parametrize("kind", ["cuda", "mps", "xpu"])
def test_the_accelerator_is_chosen_and_others_are_absent(machine, kind):
    expected = machine(kind)
    assert choose_device("auto") == choose_device(kind) == choose_device(f"{kind}:0") == expected
    assert choose_device("cpu") == CPU
    with pytest.raises(MachineError, match=f"{kind}:1: the last such device here is {kind}:0"):
        choose_device(f"{kind}:1")
    absent = {"cuda": "mps", "mps": "xpu", "xpu": "mps"}[kind]
    with pytest.raises(MachineError, match=f"--device {absent}: this PyTorch finds no") as caught:
        choose_device(absent)
    assert "--device auto" in str(caught.value.hint)
    assert list(examine().facts["devices"]) == ["cpu", f"{kind}:0"]
    names = {"cuda": "A100", "mps": "mps", "xpu": "Arc"}
    assert examine().facts["environment"]["gpus"] == [names[kind]]


@pytest.mark.parametrize(("cuda", "built"), [("12.6", True), (None, False)])
def test_without_a_driver_there_is_no_cuda(machine, cuda, built):
    machine(cuda=cuda)
    assert choose_device("auto") == CPU
    message = "--device cuda:1: no CUDA device here: no NVIDIA driver is loaded"
    with pytest.raises(MachineError, match=message) as caught:
        choose_device("cuda:1")
    assert caught.value.exit_code == 3
    assert ("built without CUDA" in caught.value.message) != built
    assert "--device cpu" in str(caught.value.hint)
    assert "pip" not in str(caught.value.hint)
    assert examine().facts["devices"]["cuda"].startswith("no CUDA device here: no NVIDIA driver")


@pytest.mark.parametrize(
    ("models", "lines"),
    [
        (["Tesla P100-PCIE-16GB"], ["cu126"]),
        (["Tesla V100-SXM2-16GB", "Tesla K80"], ["cu118", "cu126"]),
        (["NVIDIA H200"], [""]),
        ([], [""]),
    ],
)
def test_pytorch_without_cuda_beside_a_driver(machine, models, lines):
    machine(driver="580.159.03", models=models, cuda=None)
    message = r"is built without CUDA, but there is an NVIDIA driver 580\.159\.03 for"
    with pytest.raises(MachineError, match=message) as caught:
        choose_device("cuda")
    assert all(model in caught.value.message for model in models)
    hint = str(caught.value.hint)
    assert hint.count("pip install torch") == len(lines)
    assert hint.count(f"as of {device_table()['as_of']}") == len(lines)
    assert all(line in hint for line in lines)
    assert ("cu1" in hint) == any(lines)


def test_driver_too_old(machine):
    reason = "The NVIDIA driver on your system is too old (found version 11040). Please …"
    machine(driver="470.223.02", models=["Tesla K80"], cuda_error=reason)
    message = r"NVIDIA driver 470\.223\.02 is too old: it supports CUDA 11\.4"
    with pytest.raises(MachineError, match=message) as caught:
        choose_device("cuda:0")
    assert "built for CUDA 12.6" in caught.value.message
    hint = "update the driver, or install a PyTorch that it supports: pip install torch==2.7.1"
    assert str(caught.value.hint).startswith(hint)
    found = examine().facts
    assert all(part in found["devices"]["cuda"] for part in ("too old", "cu118"))
    assert found["devices_known_as_of"] == device_table()["as_of"]


def test_driver_that_shows_no_card(machine, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    reason = "No CUDA GPUs are available"
    machine(driver="580.159.03", models=["NVIDIA H200"], cuda_error=reason)
    with pytest.raises(MachineError, match=rf"{reason} \(CUDA_VISIBLE_DEVICES is ''\)\n"):
        choose_device("cuda")


@pytest.mark.parametrize(
    ("name", "index"), [("K80", "cu118"), ("P100", "cu126"), ("V100", "cu126")]
)
def test_card_without_kernels_gets_the_line_to_install(machine, name, index):
    machine("cuda", card=name, failure=f"{NO_KERNEL}\nCompile with …")
    with pytest.raises(MachineError, match="no kernel image is available") as caught:
        choose_device("auto")
    capability = ".".join(map(str, CARDS[name]))
    assert all(part in caught.value.message for part in (name, capability, "sm_90"))
    assert re.match(rf"pip install torch==.*{index}", str(caught.value.hint))
    found = examine().facts["devices"]
    assert found["cpu"].startswith("works; ")
    assert f"whl/{index}   (as of {device_table()['as_of']}; " in found["cuda:0"]


@pytest.mark.parametrize(
    ("kind", "failure"),
    [("cuda", "CUDA error: all CUDA-capable devices are busy"), ("xpu", "Native API failed")],
)
def test_a_card_that_fails_for_another_reason_is_not_told_to_reinstall(machine, kind, failure):
    machine(kind, card="H200", failure=f"{failure}\nand more")
    with pytest.raises(MachineError, match=f": {failure}\n") as caught:
        choose_device("auto")
    assert "--device cpu" in str(caught.value.hint)
    assert "pip" not in str(caught.value.hint)


@pytest.mark.parametrize(
    ("has_kernels", "builds"),
    [
        (True, {"sm_80": (8, 6), "sm_80 compute_80": (9, 0), "sm_90a": (9, 0), "sm_120": (12, 0)}),
        (False, {"sm_86": (8, 0), "sm_80": (9, 0), "compute_90": (8, 0), "": (6, 0)}),
    ],
)
def test_which_builds_have_kernels(has_kernels, builds):
    found = {build: device_file._has_kernels(build.split(), *c) for build, c in builds.items()}
    assert found == dict.fromkeys(builds, has_kernels)


@pytest.mark.parametrize(
    ("card", "dtype"),
    [("K80", "float32"), ("P100", "float32"), ("V100", "float16"), ("H200", "bfloat16")],
)
def test_auto_dtype_of_a_card(machine, card, dtype):
    assert choose_dtype("auto", machine("cuda", card=card)) is getattr(torch, dtype)
    capability = ".".join(map(str, CARDS[card]))
    works = f"works (compute capability {capability}); --dtype auto is {dtype}"
    assert examine().facts["devices"]["cuda:0"] == works


@pytest.mark.parametrize(
    ("kind", "facts", "auto", "refused"),
    [
        ("xpu", {"bf16": True}, torch.bfloat16, set()),
        ("xpu", {"bf16": False}, torch.float32, {"bf16"}),
        ("mps", {"bf16": True}, torch.float32, {"fp16"}),
        ("mps", {"bf16": False}, torch.float32, {"fp16", "bf16"}),
        ("cuda", {"card": "V100"}, torch.float16, {"bf16"}),
    ],
)
def test_a_dtype_that_an_accelerator_lacks_is_refused(machine, kind, facts, auto, refused):
    device = machine(kind, **facts)
    assert choose_dtype("auto", device) is auto
    for wanted, dtype in TORCH_DTYPES.items():
        if wanted in refused:
            with pytest.raises(MachineError, match=r"fp16 training needs a CUDA|has no bf16"):
                choose_dtype(wanted, device)
        else:
            assert choose_dtype(wanted, device) is dtype


def test_fp16_on_a_cpu_is_refused():
    with pytest.raises(MachineError, match="fp16 training needs a CUDA or XPU device"):
        choose_dtype("fp16", CPU)


def test_the_measured_speed_of_bfloat16_is_remembered(cache):
    """The second answer is the one on disk: ranks and resumed runs agree."""
    first = choose_dtype("auto", CPU)
    files = list(cache.glob("cpu-bf16-*.json"))
    assert len(files) == has_bf16(CPU)
    assert choose_dtype("auto", CPU) is first
    for file in files:
        for pays, dtype in ((True, torch.bfloat16), (False, torch.float32)):
            file.write_text(json.dumps({"pays": pays}), "utf-8")
            assert choose_dtype("auto", CPU) is dtype
    assert 0.01 < device_file.cpu_bf16_speed() < 100


@pytest.mark.parametrize(
    ("wanted", "processes", "count"),
    [("auto", None, 3), ("xpu", 2, 2), ("xpu:1", None, 1), ("cpu", None, 1), ("cpu", 2, 2)],
)
def test_a_process_for_each_accelerator(machine, wanted, processes, count):
    machine("xpu", count=3)
    options = RunOptions(device=wanted, processes=processes)
    assert process_count(choose_device(wanted), options) == count


def test_mps_is_one_device(machine):
    device = machine("mps")
    assert process_count(device, RunOptions()) == 1
    with pytest.raises(UsageError, match="--processes 2: mps is one device"):
        process_count(device, RunOptions(processes=2))


def test_each_process_needs_a_device_of_its_own(machine):
    device = machine("cuda", count=2)
    assert process_count(device, RunOptions(processes=2)) == 2
    with pytest.raises(MachineError, match="--processes 3: number of cuda devices here: 2"):
        process_count(device, RunOptions(processes=3))
    with pytest.raises(UsageError, match="--processes 2: --device cuda:1 is one device"):
        process_count(device, RunOptions(processes=2, device="cuda:1"))
    assert process_count(CPU, RunOptions(processes=3)) == 3


def test_table_is_complete_and_sorted():
    rows = known_devices()
    capabilities = [tuple(map(int, row["capability"].split("."))) for row in rows]
    assert capabilities == sorted(capabilities)
    assert {"K80", "P100", "V100", "T4", "A100"} <= {row["name"] for row in rows}
    for row in rows:
        assert row["install"].startswith("pip install torch"), row
        assert ("last_torch" in row) == ("==" in row["install"]), row
        assert not row["bf16"] or row["tensor_cores"], row
        # Where a generation is left behind, the line names the very build that still has it.
        assert row.get("last_torch", "") in row["install"], row
