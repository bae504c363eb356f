"""Devices and number formats, on cards this machine does not have: torch.cuda's answers are made
up."""

import contextlib
import re
from types import SimpleNamespace

import pytest
import torch

from kdcli.deploy.doctor import examine
from kdcli.disk import USED
from kdcli.engine import device as device_file
from kdcli.engine import launch
from kdcli.engine.device import choose_device, choose_dtype, device_table, known_devices
from kdcli.errors import MachineError, UsageError
from kdcli.recipe.sections import RunOptions

BUILD = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]
CPU = torch.device("cpu")
CARDS = {
    "K80": (3, 7),
    "P100": (6, 0),
    "V100": (7, 0),
    "T4": (7, 5),
    "A100": (8, 0),
    "H200": (9, 0),
    "B200": (10, 0),
}


def found(monkeypatch, kind: str | None, count: int = 1) -> None:
    """Make torch.accelerator find some accelerators of a kind, or none."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: kind is not None)
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda: torch.device(kind or "cuda")
    )
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count if kind else 0)


@pytest.fixture
def card(monkeypatch):
    """A function that makes torch.cuda answer as if one such card were here."""

    def make(name: str, failure: str | None = None, build: list[str] = BUILD) -> torch.device:
        ones = torch.ones

        def fake_ones(*size, device=None):
            if failure and device is not None:
                raise RuntimeError(failure)
            return ones(*size)

        # Emulated bf16 is everywhere: only the question that leaves it out gets a true answer.
        def bf16(including_emulation=True):
            return including_emulation or CARDS[name] >= (8, 0)

        found(monkeypatch, "cuda")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: CARDS[name])
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: build)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", bf16)
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        monkeypatch.setattr(torch, "ones", fake_ones)
        return torch.device("cuda", 0)

    return make


@pytest.fixture
def no_card(monkeypatch, tmp_path):
    found(monkeypatch, None)
    monkeypatch.setattr(device_file, "DRIVER", tmp_path / "no driver")


@pytest.fixture
def driver(no_card, monkeypatch, tmp_path):
    """A function that puts a driver here whose cards torch.cuda cannot use, and says why; None:
    built without CUDA."""

    def make(version: str, models: list[str], failure: str | None) -> None:
        of_driver = f"NVRM version: NVIDIA UNIX x86_64 Kernel Module  {version}  Sat Oct  7 2023\n"
        (tmp_path / "version").write_text(of_driver)
        for number, model in enumerate(models):
            of_card = tmp_path / "gpus" / f"0000:0{number}:00.0"
            of_card.mkdir(parents=True)
            (of_card / "information").write_text(
                f"Model: \t\t {model}\nIRQ:   \t\t 10\nBus Type: \t PCIe\n"
            )

        def current_device():
            raise RuntimeError(f"{failure}\nand more")

        monkeypatch.setattr(device_file, "DRIVER", tmp_path)
        monkeypatch.setattr(torch.version, "cuda", None if failure is None else "12.6")
        monkeypatch.setattr(torch.cuda, "current_device", current_device)

    return make


@pytest.mark.parametrize(
    "wanted", ["gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:²", "mps:x", "cpu:0", "auto:0", ""]
)
def test_unknown_device_names_the_known(wanted):
    with pytest.raises(
        UsageError, match="allowed: auto, cpu, cuda, mps, xpu, or with an index as in cuda:0"
    ):
        choose_device(wanted)


@pytest.mark.usefixtures("no_card")
def test_without_a_card():
    assert choose_device("auto") == choose_device("cpu") == CPU
    for wanted in ("cuda", "cuda:1"):
        with pytest.raises(MachineError, match="no CUDA device here") as caught:
            choose_device(wanted)
        assert (caught.value.exit_code, "--device cpu" in str(caught.value.hint)) == (3, True)


def test_with_a_card(card):
    expected = card("A100")
    assert choose_device("auto") == choose_device("cuda") == choose_device("cuda:0") == expected
    assert choose_device("cpu") == CPU
    with pytest.raises(MachineError, match="cuda:3: the last such device here is cuda:0"):
        choose_device("cuda:3")


@pytest.fixture
def other(monkeypatch):
    """A function that puts an accelerator here that is no CUDA card; its kernel runs, or fails as
    said."""
    ones = torch.ones

    def make(
        kind: str, *, count: int = 1, bf16: bool = True, failure: str | None = None
    ) -> torch.device:
        def fake_ones(*size, device=None):
            if failure and device is not None:
                raise RuntimeError(failure)
            return ones(*size)

        found(monkeypatch, kind, count)
        monkeypatch.setattr(torch, "ones", fake_ones)
        monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda major, minor: bf16)
        monkeypatch.setattr(torch.xpu, "device", lambda device: contextlib.nullcontext())
        monkeypatch.setattr(
            torch.xpu,
            "is_bf16_supported",
            lambda including_emulation=True: including_emulation or bf16,
        )
        monkeypatch.setattr(torch.xpu, "get_device_name", lambda device=None: "Arc")
        return torch.device(kind, 0)

    return make


@pytest.mark.parametrize("kind", ["mps", "xpu"])
def test_another_accelerator(other, kind):
    expected = other(kind)
    assert choose_device("auto") == choose_device(kind) == choose_device(f"{kind}:0") == expected
    assert choose_device("cpu") == CPU
    with pytest.raises(MachineError, match=f"{kind}:1: the last such device here is {kind}:0"):
        choose_device(f"{kind}:1")
    absent = {"mps": "xpu", "xpu": "mps"}[kind]
    with pytest.raises(MachineError, match=f"--device {absent}: this PyTorch finds no") as caught:
        choose_device(absent)
    assert "--device auto" in str(caught.value.hint)
    assert list(examine().facts["devices"]) == ["cpu", f"{kind}:0"]
    assert examine().facts["environment"]["gpus"] == [{"mps": "mps", "xpu": "Arc"}[kind]]


def test_an_accelerator_that_does_not_run(other):
    other("xpu", failure="Native API failed\nand more")
    with pytest.raises(MachineError, match=r"cannot run on Arc: Native API failed\n") as caught:
        choose_device("auto")
    assert "--device cpu" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("kind", "bf16", "auto", "fp16"),
    [
        ("xpu", True, torch.bfloat16, True),
        ("xpu", False, torch.float32, True),
        ("mps", True, torch.float32, False),
        ("mps", False, torch.float32, False),
    ],
)
def test_dtypes_of_another_accelerator(other, kind, bf16, auto, fp16):
    device = other(kind, bf16=bf16)
    assert choose_dtype("auto", device) is auto
    for wanted, allowed in (("bf16", bf16), ("fp16", fp16), ("fp32", True)):
        with (
            contextlib.nullcontext()
            if allowed
            else pytest.raises(MachineError, match=r"fp16 training|has no bf16")
        ):
            assert choose_dtype(wanted, device) is device_file.TORCH_DTYPES[wanted]


@pytest.mark.parametrize(
    ("wanted", "processes", "started"),
    [
        ("auto", None, 3),
        ("xpu", None, 3),
        ("xpu", 2, 2),
        ("xpu:1", None, 0),
        ("cpu", None, 0),
        ("cpu", 2, 2),
    ],
)
def test_a_process_for_each_accelerator(other, monkeypatch, wanted, processes, started):
    other("xpu", count=3)
    counts: list[int] = []
    monkeypatch.setattr(
        launch, "fan_out", lambda arguments, count, on_cpu: counts.append(count) or 0
    )
    monkeypatch.setattr(launch, "start", lambda *arguments: SimpleNamespace(num_processes=1))
    launch.launch("fp32", RunOptions(device=wanted, processes=processes))
    assert counts == ([started] if started else [])


@pytest.mark.parametrize("processes", [None, 1])
def test_mps_is_one_device(other, monkeypatch, processes):
    other("mps")
    monkeypatch.setattr(launch, "start", lambda *arguments: SimpleNamespace(num_processes=1))
    session = launch.launch("fp32", RunOptions(processes=processes))
    assert session is not None
    assert session.device.type == "mps"
    with pytest.raises(UsageError, match="--processes 2: mps is one device"):
        launch.launch("fp32", RunOptions(processes=2))


@pytest.mark.parametrize(
    ("name", "index"), [("K80", "cu118"), ("P100", "cu126"), ("V100", "cu126")]
)
def test_card_without_kernels_gets_the_line_to_install(card, name, index):
    card(
        name, "CUDA error: no kernel image is available for execution on the device\nCompile with …"
    )
    with pytest.raises(
        MachineError, match=r"no kernel image is available for execution on the device\n"
    ) as caught:
        choose_device("auto")
    assert all(
        part in caught.value.message for part in (name, ".".join(map(str, CARDS[name])), "sm_90")
    )
    assert re.match(rf"pip install torch==.*{index}", str(caught.value.hint))


def test_card_that_fails_for_another_reason_is_not_told_to_reinstall(card):
    card("H200", "CUDA error: all CUDA-capable devices are busy or unavailable")
    with pytest.raises(MachineError, match="busy or unavailable") as caught:
        choose_device("cuda")
    assert ("nvidia-smi" in str(caught.value.hint), "pip" in str(caught.value.hint)) == (
        True,
        False,
    )


@pytest.mark.usefixtures("no_card")
@pytest.mark.parametrize(("cuda", "said"), [("12.6", False), (None, True)])
def test_no_driver(monkeypatch, cuda, said):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    with pytest.raises(
        MachineError, match="--device cuda: no CUDA device here: no NVIDIA driver is loaded"
    ) as caught:
        choose_device("cuda")
    assert ("built without CUDA" in caught.value.message) is said
    assert "pip" not in str(caught.value.hint)
    assert choose_device("auto") == CPU
    assert examine().facts["devices"]["cuda"].startswith("no CUDA device here: no NVIDIA driver")


@pytest.mark.parametrize(
    ("models", "lines"),
    [
        (["Tesla P100-PCIE-16GB"], ["cu126"]),
        (["Tesla K80", "Tesla K80"], ["cu118"]),
        (["Tesla V100-SXM2-16GB", "Tesla K80"], ["cu118", "cu126"]),
        (["NVIDIA H200"], [""]),
        (["NVIDIA L40S"], [""]),
        ([], [""]),
    ],
)
def test_pytorch_without_cuda_beside_a_driver(driver, models, lines):
    driver("580.159.03", models, None)
    message = r"is built without CUDA, but there is an NVIDIA driver 580\.159\.03 for"
    with pytest.raises(MachineError, match=message) as caught:
        choose_device("cuda")
    assert all(model in caught.value.message for model in models)
    hint = str(caught.value.hint)
    assert (
        hint.count("pip install torch")
        == hint.count(f"as of {device_table()['as_of']}")
        == len(lines)
    )
    assert all(line in hint for line in lines)
    assert ("cu1" in hint) == any(lines)
    assert "--device cpu" in hint


def test_driver_too_old(driver):
    driver(
        "470.223.02",
        ["Tesla K80"],
        "The NVIDIA driver on your system is too old (found version 11040). Please …",
    )
    with pytest.raises(
        MachineError, match=r"NVIDIA driver 470\.223\.02 is too old: it supports CUDA 11\.4"
    ) as caught:
        choose_device("cuda:0")
    assert "built for CUDA 12.6" in caught.value.message
    hint = str(caught.value.hint)
    assert hint.startswith(
        "update the driver, or install a PyTorch that it supports: pip install torch==2.7.1"
    )
    assert "cu118" in hint
    found = examine().facts
    assert all(part in found["devices"]["cuda"] for part in ("too old", "cu118"))
    assert found["devices_known_as_of"] == device_table()["as_of"]


def test_driver_that_shows_no_card(driver, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    driver("580.159.03", ["NVIDIA H200"], "No CUDA GPUs are available")
    with pytest.raises(
        MachineError, match=r"No CUDA GPUs are available \(CUDA_VISIBLE_DEVICES is ''\)\n"
    ) as caught:
        choose_device("cuda")
    assert "pip" not in str(caught.value.hint)


@pytest.mark.parametrize(
    ("name", "capability", "dtype"),
    [
        ("P100", "6.0", "float32"),
        ("V100", "7.0", "float16"),
        ("K80", "3.7", "float32"),
        ("H200", "9.0", "bfloat16"),
    ],
)
def test_doctor_of_a_card_that_works(card, name, capability, dtype):
    card(name)
    assert (
        examine().facts["devices"]["cuda:0"]
        == f"works (compute capability {capability}); --dtype auto is {dtype}"
    )


@pytest.mark.parametrize(
    ("name", "index"), [("K80", "cu118"), ("P100", "cu126"), ("V100", "cu126")]
)
def test_doctor_of_a_card_without_kernels(card, name, index):
    card(name, "CUDA error: no kernel image is available for execution on the device")
    found = examine().facts["devices"]
    assert found["cpu"].startswith("works; ")
    assert "no kernel image" in found["cuda:0"]
    assert f"whl/{index}   (as of {device_table()['as_of']}; " in found["cuda:0"]


@pytest.mark.parametrize(
    ("has_kernels", "builds"),
    [
        (True, {"sm_80": (8, 6), "sm_80 compute_80": (9, 0), "sm_90a": (9, 0), "sm_120": (12, 0)}),
        (
            False,
            {"sm_86": (8, 0), "sm_80": (9, 0), "compute_90": (8, 0), "sm_120": (1, 2), "": (6, 0)},
        ),
    ],
)
def test_which_builds_have_kernels(has_kernels, builds):
    assert {b: device_file._has_kernels(b.split(), *c) for b, c in builds.items()} == dict.fromkeys(
        builds, has_kernels
    )


@pytest.mark.parametrize(
    ("names", "dtype"),
    [
        (("K80", "P100"), torch.float32),
        (("V100", "T4"), torch.float16),
        (("A100", "B200"), torch.bfloat16),
    ],
)
def test_auto_dtype_of_a_card(card, names, dtype):
    assert {choose_dtype("auto", card(name)) for name in names} == {dtype}


def test_a_dtype_that_is_not_there_is_refused(card):
    with pytest.raises(MachineError, match="V100 has no bf16"):
        choose_dtype("bf16", card("V100"))
    assert choose_dtype("fp32", card("V100")) is torch.float32
    assert choose_dtype("bf16", card("A100")) is torch.bfloat16
    with pytest.raises(MachineError, match="fp16 training needs a CUDA or XPU device"):
        choose_dtype("fp16", CPU)
    with pytest.raises(
        UsageError,
        match=r"unknown dtype 'bf61'; allowed: auto, fp32, bf16, fp16; did you mean 'bf16'",
    ):
        choose_dtype("bf61", CPU)


@pytest.mark.parametrize(
    ("flags", "speed", "dtype"),
    [
        ({"avx512_bf16"}, 4.0, torch.bfloat16),
        ({"amx_bf16"}, 1.2, torch.bfloat16),
        ({"bf16"}, 0.7, torch.float32),
        ({"avx2"}, 4.0, torch.float32),
    ],
)
def test_auto_dtype_of_a_cpu_asks_the_flags_then_the_clock(
    monkeypatch, tmp_path, flags, speed, dtype
):
    asked = []
    monkeypatch.setenv("KDCLI_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(device_file, "cpu_flags", lambda: frozenset(flags))
    monkeypatch.setattr(device_file, "cpu_bf16_speed", lambda: asked.append(1) or speed)
    assert choose_dtype("auto", CPU) is dtype
    # The second answer is the remembered one: ranks and resumed runs agree.
    assert choose_dtype("auto", CPU) is dtype
    assert len(asked) == ("avx2" not in flags)
    # `kdcli cache` knows that this process uses the result.
    assert len(list(tmp_path.glob(f"cache/*{USED}"))) == len(asked)


def test_cache_that_cannot_be_written_is_named(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("KDCLI_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr(device_file, "cpu_flags", lambda: frozenset({"bf16"}))
    monkeypatch.setattr(device_file, "cpu_bf16_speed", lambda: 2.0)
    with pytest.raises(MachineError, match=r"cpu-bf16-.* could not be written"):
        choose_dtype("auto", CPU)


def test_two_processes_that_measure_at_once_both_go_on(monkeypatch, tmp_path):
    def lost(path, content):
        path.write_text(content)
        raise MachineError("the other's file was put first")

    monkeypatch.setenv("KDCLI_CACHE", str(tmp_path))
    monkeypatch.setattr(device_file, "cpu_flags", lambda: frozenset({"bf16"}))
    monkeypatch.setattr(device_file, "cpu_bf16_speed", lambda: 2.0)
    monkeypatch.setattr(device_file, "write_atomic", lost)
    assert choose_dtype("auto", CPU) is torch.bfloat16


def test_measured_speed_is_a_ratio():
    assert 0.01 < device_file.cpu_bf16_speed() < 100


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
