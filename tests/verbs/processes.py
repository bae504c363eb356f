"""Commands in other processes: one, or two that join."""

import sys
from collections.abc import Callable

from forked import Forked, free_port

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


def _command(arguments: list[str]) -> None:
    sys.argv = ["kdcli", *arguments]
    main()
