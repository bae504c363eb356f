"""Open a pool of processes, in which each call runs like a command of its own."""

import contextlib
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from kdcli.custom_code import custom_code
from kdcli.data.accounts import ACCOUNTS
from kdcli.data.labelled.kept import keep_rows
from kdcli.disk import COMMITS
from kdcli.engine.device import choose_device
from kdcli.engine.launch import process_count
from kdcli.engine.memory import release_memory
from kdcli.engine.pool import Pool
from kdcli.engine.processes import StopRequest
from kdcli.engine.run_dir import RunDir
from kdcli.engine.session import own_state
from kdcli.kept import keep_results, keeper_for
from kdcli.messages import facts_once
from kdcli.recipe.sections import RunOptions


@contextlib.contextmanager
def open_pool(options: RunOptions, stop: StopRequest, facts: set[str]) -> Iterator[Pool | None]:
    """Open the processes that make independent models side by side; None if there is only one.

    The processes of a CPU share its cores. The number of threads changes the order of sums and so
    their last bits: a model has the bits of a run of one process with the same number of threads.

    Args:
        options: The options of the run.
        stop: The request of the user to stop.
        facts: What this process has logged, and the others need not repeat.
    """
    device = choose_device(options.device)
    count = process_count(device, options)
    if count == 1:
        yield None
        return
    cores, given = os.cpu_count() or 1, os.environ.get("OMP_NUM_THREADS", "")
    threads = int(given) if given.isdecimal() else max(1, cores // count)
    on_cpu = device.type == "cpu"
    devices = ["cpu" if on_cpu else f"{device.type}:{rank}" for rank in range(count)]
    keeper = keeper_for()
    results = None if keeper is None else keeper.folder
    context = partial(_as_command, options.trust_remote_code, options.strict_data, facts, results)
    pool = Pool(devices, threads, stop, context)
    try:
        yield pool
    finally:
        pool.close()


@contextlib.contextmanager
def _as_command(
    trust_remote_code: bool, strict_data: bool, facts: set[str], results: Path | None
) -> Iterator[None]:
    """Do for the calls in another process what a command does for its own.

    Args:
        trust_remote_code: Whether a model's own code may run.
        strict_data: Whether rows that cannot be used are an error.
        facts: What the first process has logged.
        results: Where results are kept that all processes use.
    """
    ACCOUNTS.strict = strict_data
    keeping = contextlib.nullcontext() if results is None else keep_results(results)
    with custom_code(trust_remote_code), keep_rows(), keeping, facts_once(facts):
        yield


@contextlib.contextmanager
def alone(folder: Path | None) -> Iterator[None]:
    """Run a verb as if it were alone in this process, and free its models afterwards.

    Args:
        folder: The directory that it claims; None if it claims none.
    """
    # Each verb names the data it read itself.
    before, accounts = dict(COMMITS), dict(ACCOUNTS.by_key)
    COMMITS.clear()
    ACCOUNTS.by_key.clear()
    try:
        with own_state():
            yield
    finally:
        # The report of the command names the data of all its verbs.
        COMMITS.update(before)
        ACCOUNTS.by_key.update(accounts)
        release_memory()
        if folder is not None:
            # Another process of a pool may continue a training that was paused here.
            RunDir(folder).release()
