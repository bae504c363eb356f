"""Commands in other processes: one, two that join, one that is killed."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from forked import Forked, free_port
from own_files import log_of, same_weights, succeeds

from kdcli.cli import main


def process(*arguments: object, **environment: str) -> Forked:
    return Forked(_command, [str(a) for a in arguments], **environment)


def ranks(*arguments: object, slurm: bool = False) -> list[Forked]:
    """Run a command as two gloo processes with the environment of torchrun or srun."""
    return as_ranks(lambda **environment: process(*arguments, **environment), slurm=slurm)


def as_ranks(begin: Callable[..., Forked], *, slurm: bool = False) -> list[Forked]:
    """Begin two processes with the environment of gloo's under torchrun or srun."""
    port = free_port()
    if slurm:
        common = {
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_STEP_TASKS_PER_NODE": "2",
            "SLURM_STEP_NODELIST": "localhost",
        }
        # accelerate takes 0 for unset.
        common |= {"SLURM_JOB_ID": "7", "MASTER_PORT": port, "OMP_NUM_THREADS": "0"}
        return [begin(**common, SLURM_PROCID=rank, SLURM_LOCALID=rank) for rank in "01"]
    common = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    common |= {"ACCELERATE_USE_CPU": "true"}
    return [begin(**common, RANK=rank, LOCAL_RANK=rank) for rank in "01"]


def two_ranks(*arguments: object, code: int = 0, slurm: bool = False) -> tuple[str, str]:
    """Run a command as two processes that exit with `code`; the output of the first. The second
    prints nothing."""
    both = ranks(*arguments, slurm=slurm)
    first, second = (rank.communicate() for rank in both)
    assert [rank.returncode for rank in both] == [code, code], (first, second)
    assert second == ("", ""), second
    return first


def killed_and_resumed(
    folder: Path, *arguments: object, stage: str = ".", models: tuple[str, ...] = (".",)
) -> None:
    """Kill a command at a random early step of a stage; resumed, it leaves models and log as if it
    had not been."""
    out = folder / "b"
    killed, cut, log = (
        process(*arguments, "-o", out),
        int.from_bytes(os.urandom(1)) % 40 + 3,
        out / stage / "log.jsonl",
    )
    while killed.returncode is None:
        if log.exists() and log.read_text("utf-8").count("\n") > cut:
            killed.kill()
            break
        time.sleep(0.005)
    output = killed.communicate()
    assert killed.returncode == -9, output
    assert not (out / stage / "report.json").exists()
    succeeds(*arguments, "-o", out, "--resume")
    succeeds(*arguments, "-o", folder / "a")
    assert all(same_weights(folder / "a" / model, out / model) for model in models)
    assert log_of(folder / "a") == log_of(out)


def _command(arguments: list[str]) -> None:
    sys.argv = ["kdcli", *arguments]
    main()
