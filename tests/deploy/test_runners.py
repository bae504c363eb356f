"""Every backend agrees with torch and uses the given threads; an impossible one is refused before
loading."""

import numpy as np
import psutil
import pytest
import torch
from encoders import tiny_encoder

from kdcli.deploy import sessions as engines
from kdcli.deploy.backends import BACKENDS
from kdcli.deploy.export import export_model
from kdcli.deploy.runners import ERROR_LIMITS, check_backend, compare_states, runner
from kdcli.errors import MachineError, UsageError

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
PAIRS = [(name, precision) for name, known in BACKENDS.items() for precision in known]
LONG = [
    pytest.param(*pair, marks=[pytest.mark.long] if pair[0] == "compile" else []) for pair in PAIRS
]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return tiny_encoder("bert", num_hidden_layers=1, initializer_range=0.3)


@pytest.fixture(scope="module")
def batch():
    ids_BL = torch.arange(45).view(3, 15) + 10
    return {
        "input_ids": ids_BL,
        "attention_mask": (torch.arange(15) < torch.tensor([[15], [9], [2]])).long(),
    }


def reference(model, batch):
    with torch.no_grad():
        return model(**batch).last_hidden_state.numpy()


@pytest.mark.parametrize(("name", "precision"), LONG)
def test_backend_agrees_with_torch(name, precision, model, batch, tmp_path):
    if (name, precision) == ("openvino", "bf16"):
        try:
            check_backend(name, precision)
        except MachineError as error:
            pytest.skip(error.message)
    before = {key: x.clone() for key, x in model.state_dict().items()}
    check_backend(name, precision)
    made = runner(model, name, precision, device=CPU, threads=1, folder=tmp_path / "files")
    (found,) = made.output(made.call(made.prepare(batch)))
    assert found.dtype == np.float32
    near = compare_states(reference(model, batch), found, batch["attention_mask"].numpy())
    assert near["relative"] <= ERROR_LIMITS[precision]
    # Lower precision is really lower; float32 really is float32.
    assert (near["relative"] > 1e-4) == (precision != "fp32")
    # A weight of 4 bits is one of sixteen values.
    assert near["cosine"] > (0.95 if precision in ("q4", "int8-packed") else 0.99)
    # The next call changes neither this output nor the model.
    kept = found.copy()
    made.call(made.prepare({k: v[:, :7].contiguous() for k, v in batch.items()}))
    assert np.array_equal(found, kept, equal_nan=True)
    assert all(
        x.dtype == torch.float32 and torch.equal(x, before[k])
        for k, x in model.state_dict().items()
    )


@pytest.mark.long
def test_compiled_for_every_shape(model):
    """By default torch.compile silently falls back to eager after eight shapes."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    run = torch.compile
    graphs = []

    def counted(target, **settings):
        return run(
            target, **settings, backend=lambda graph, inputs: graphs.append(graph) or graph.forward
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", counted)
        made = runner(model, "compile", "fp32", device=CPU, threads=1, folder=None)
        for length in range(5, 14):
            made.call(made.prepare({"input_ids": torch.full((2, length), 7)}))
    assert len(graphs) == 9
    torch._dynamo.reset()


@pytest.mark.long
def test_missing_compiler_is_named(model, monkeypatch):
    def broken(graph, inputs):
        raise RuntimeError("No working C++ compiler found")

    run = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda target, **settings: run(target, **settings, backend=broken)
    )
    made = runner(model, "compile", "fp32", device=CPU, threads=1, folder=None)
    with pytest.raises(MachineError, match="No working C") as caught:
        made.call(made.prepare({"input_ids": torch.full((2, 5), 7)}))
    assert "g++" in caught.value.hint
    torch._dynamo.reset()


def test_onnx_uses_the_threads_it_is_given(model, batch, tmp_path):
    file = export_model(model, tmp_path, "onnx").path

    def started(threads):
        before = psutil.Process().num_threads()
        call = engines.onnx_caller(file, threads=threads)
        call(call.feed(batch))
        return psutil.Process().num_threads() - before, call

    (one, first), (three, second) = started(1), started(3)
    assert three - one == 2
    assert first is not second


def test_threads_and_precision_of_openvino(model, batch, tmp_path, monkeypatch):
    openvino = pytest.importorskip("openvino")
    settings_used = []
    real = openvino.Core.compile_model

    def compile_model(core, path, device, settings):
        made = real(core, path, device, settings)
        settings_used.append(
            [str(made.get_property(name)) for name in ("INFERENCE_NUM_THREADS", "PERFORMANCE_HINT")]
        )
        settings_used[-1].append(made.get_property("INFERENCE_PRECISION_HINT").get_type_name())
        return made

    monkeypatch.setattr(openvino.Core, "compile_model", compile_model)
    runner(model, "openvino", "fp32", device=CPU, threads=1, folder=tmp_path)
    assert settings_used[-1] == ["1", "LATENCY", "f32"]


def test_a_mask_the_batch_lacks_is_filled_in(model, batch, tmp_path):
    made = runner(model, "onnx", "fp32", device=CPU, threads=1, folder=tmp_path)
    bare = {"input_ids": batch["input_ids"]}
    (found,) = made.output(made.call(made.prepare(bare)))
    assert np.allclose(found, reference(model, bare), atol=1e-4)


@pytest.mark.parametrize(
    ("name", "precision", "message"),
    [
        ("onnx", "bf16", "backend onnx has no precision 'bf16'; did you mean 'onnx-fp16'?"),
        ("torch", "fp61", "backend torch has no precision 'fp61'; did you mean 'torch-fp16'?"),
        (
            "openvino",
            "fp16",
            "backend openvino has no precision 'fp16'; did you mean 'openvino-bf16'?",
        ),
    ],
)
def test_an_unknown_precision_of_a_backend(name, precision, message):
    with pytest.raises(UsageError) as caught:
        check_backend(name, precision)
    assert caught.value.message == message
    assert all(allowed in caught.value.hint for allowed in BACKENDS[name])


def test_bf16_a_processor_lacks(monkeypatch):
    openvino = pytest.importorskip("openvino")
    monkeypatch.setattr(openvino.Core, "get_property", lambda core, *names: ["FP32", "INT8"])
    with pytest.raises(MachineError, match="no bf16"):
        check_backend("openvino", "bf16")
    check_backend("openvino", "fp32")


@pytest.mark.parametrize("name", ["onnx", "openvino"])
def test_engines_are_for_the_cpu(name, model, tmp_path):
    with pytest.raises(UsageError, match="CPU only"):
        runner(
            model,
            name,
            "fp32",
            device=torch.device("cuda", 0),
            threads=1,
            folder=tmp_path / "files",
        )
    assert not (tmp_path / "files").exists()


def test_agreement_by_hand():
    reference_BLD = np.array([[[3.0, 4.0], [0.0, 5.0], [100.0, 100.0]]], np.float32)
    other_BLD = np.array([[[3.0, 4.0], [5.0, 0.0], [-100.0, np.nan]]], np.float32)
    found = compare_states(reference_BLD, other_BLD, np.array([[1, 1, 0]]))
    assert found == pytest.approx({"max_abs": 5.0, "relative": 1.0, "cosine": 0.5})
    spoilt = compare_states(reference_BLD, other_BLD, np.array([[1, 1, 1]]))
    assert not spoilt["relative"] <= max(ERROR_LIMITS.values())


def test_limits_reject_other_weights(batch):
    outputs = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        outputs.append(reference(tiny_encoder("bert"), batch))
    found = compare_states(*outputs, batch["attention_mask"].numpy())
    assert found["relative"] > 2 * max(ERROR_LIMITS.values())
    assert {precision for _, precision in PAIRS} == set(ERROR_LIMITS)


def test_threads_of_onnx_runtime_do_not_spin_between_calls(monkeypatch, tmp_path, model):
    file = export_model(model, tmp_path, "onnx").path
    load, settings = engines.library("onnxruntime", "onnx").InferenceSession, []

    def recorded(path, options, **more):
        settings.append(options.get_session_config_entry("session.force_spinning_stop"))
        return load(path, options, **more)

    monkeypatch.setattr("onnxruntime.InferenceSession", recorded)
    engines.onnx_caller(file, threads=2)
    assert settings == ["1"]
