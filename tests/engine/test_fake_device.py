"""Steps on an accelerator: no tensor stays on the CPU, and the device is waited for where a comment
says so."""

import fake_device
import pytest
from forked import Child

pytestmark = pytest.mark.slow

FOUND = {  # What is said of a fault
    "reads a value": "aten._local_scalar_dense",
    "selects by a mask": "aten.nonzero",
    "a tensor on the CPU": "two devices, kdgpu:0 and cpu",
    "a copy that waits": "a copy from cpu to kdgpu:0 waits",
    "places on the CPU": "places on the CPU are copied to the device",
}


@pytest.mark.parametrize("how", ["few", pytest.param("all", marks=pytest.mark.long)])
def test_a_step_of_every_loss_task_pruner_and_model_stays_on_its_device(how, capfd):
    names = fake_device.few() if how == "few" else list(fake_device.cases())
    assert Child(lambda: fake_device.run_cases(names)).wait() == 0
    lines = capfd.readouterr().out.splitlines()
    assert [line for line in lines if "faulty" not in line] == [
        name for name in names if "faulty" not in name
    ]
    faults = [line for line in lines if "faulty" in line]
    for line, (fault, said) in zip(faults, FOUND.items(), strict=True):
        assert line.startswith(f"error: faulty: {fault}: ")
        assert said in line
