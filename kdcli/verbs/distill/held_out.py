"""Read the students' losses on held-out data from the log of a run."""

from __future__ import annotations

from kdcli.engine.run_dir import RunDir
from kdcli.report.schema import UNDISTILLED


def held_out_losses(run_dir: RunDir, names: list[str]) -> dict[str, dict[str, float]]:
    """Read each student's held-out loss and its terms from the run's log.

    They are read before training, under the name of the undistilled student, and after training.
    Without training, there is only the student.
    """
    records = [record for record in run_dir.read_log() if "held_out" in record]
    first, last = records[0], records[-1]
    quality: dict[str, dict[str, float]] = {}
    for name in names:
        prefix = f"{name}/" if len(names) > 1 else ""
        labels = [(name, last["held_out"])]
        if last["step"]:
            labels.insert(0, (name + UNDISTILLED, first["held_out"]))
        for label, losses in labels:
            terms = {
                k.removeprefix(prefix): v
                for k, v in losses.items()
                if k.startswith(prefix) and k != "loss"
            }
            quality[label] = {"loss": sum(terms.values())} | terms
    return quality
