"""Training steps on a device that computes nothing: run as a program, for it changes torch for its whole process.

An accelerator defined in Python (PrivateUse1) under FakeTensorMode executes every operation on shapes alone. A tensor
left on the CPU raises, and so does reading a value back, which on a GPU waits for all that is queued. It shows no
numbers, autocast, memory or speed. Prints the cases that ran, and `error: CASE: ...` for each that did not.
"""

import torch
import torch._subclasses.fake_tensor as fake
from encoders import tiny_config
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend
from transformers import AutoModel

from kdcli.losses import build_objective
from kdcli.models.capture import capture, prepare_teacher
from kdcli.models.shape import shape_of
from kdcli.types import COUNTS, StepLoss, Term

TYPES = ("bert", "roberta", "deberta-v2", "mpnet", "distilbert")
METHODS = ("minilm", "minilmv2", "tinybert")
CASES = [f"{method} of {kind}" for kind in TYPES for method in METHODS]
DEVICE = "kdgpu"


class _Module(_DummyBackendModule):
    def get_amp_supported_dtype(self):
        return [torch.bfloat16, torch.float16]

    def synchronize(self, device=None):
        pass


def model_of(kind, layers):
    changes = {"n_layers": layers} if kind == "distilbert" else {"num_hidden_layers": layers}
    pooler = {} if kind in ("distilbert", "deberta-v2") else {"add_pooling_layer": False}
    with torch.device(DEVICE):
        return AutoModel.from_config(tiny_config(kind, **changes), **pooler)


def step(method, kind):
    """One step as `kdcli distill` takes it: frozen teacher, captured signals, loss, gradients, AdamW."""
    teacher, student = prepare_teacher(model_of(kind, 4), torch.bfloat16), model_of(kind, 2).train()
    shapes = shape_of(teacher.config), shape_of(student.config)
    with torch.device(DEVICE):
        objective = build_objective(method, {}, *shapes)
        ids = torch.randint(5, 60, (3, 16))
        batch = {"input_ids": ids, "attention_mask": (torch.arange(16) < torch.tensor([[16], [9], [3]])).long()}
    with torch.no_grad():
        signals = capture(teacher, objective.teacher_needs)(batch)
    terms = objective.terms(signals, capture(student, objective.student_needs)(batch))
    loss = StepLoss({name: Term(value, objective.over[name]) for name, value in terms.items()})
    parameters = [*student.parameters(), *objective.projections.parameters()]
    optimizer = torch.optim.AdamW(parameters, fused=True)
    torch.stack([total * 0.5 for total in loss.totals().values()]).sum().backward()
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
    assert set(loss.totals()) <= set(COUNTS)
    assert any(p.grad is not None and p.grad.device.type == DEVICE for p in parameters)


if __name__ == "__main__":
    _setup_privateuseone_for_python_backend(DEVICE, backend_module=_Module())
    # Both would allocate one real tensor on the device.
    fake.init_gpu_context = lambda device: None
    fake.FakeTensorMode.avoid_device_init = property(lambda self: True)
    with torch.autograd.set_multithreading_enabled(False):
        for case in CASES:
            with fake.FakeTensorMode():
                try:
                    step(*case.split(" of "))
                except Exception as error:
                    print(f"error: {case}: {type(error).__name__}: {str(error)[:300]}")
                else:
                    print(case)
