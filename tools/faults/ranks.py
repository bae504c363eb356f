"""Several processes at once.

`together` starts several runs in one directory. `ranks` starts the processes of one run, one of
which has other options, dies, or never starts.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

from tools.faults.campaign import Case, Fault, Kind, brief, patience
from tools.faults.kills import Words, check_result, commands, reference
from tools.faults.process import EXIT_CODES, At, Command, Done

MINUTE = 60.0
TOGETHER = ("finetune", "distill", "prune", "cotrain", "chain")


def together(case: Case) -> None:
    """Start two or three commands in one directory, at once or shortly after each other.

    Exactly one of them must run, or continue the interrupted run, and the others must be refused.
    """
    rng, verb = case.rng, TOGETHER[case.number % len(TOGETHER)]
    option = ([], ["--resume"], ["--overwrite"])[case.number // len(TOGETHER) % 3]
    words = [*commands(case.material)[verb], "-o", "out"]
    _, calls = reference(case.material, verb)
    cache = {"KDCLI_CACHE": str(case.folder / "cache")}
    if option:
        at = At(rng.randrange(len(calls)), "after")
        Command(case.folder, *words, at=at, environment=cache).wait()
    running = []
    for _ in range(rng.choice((2, 2, 3))):
        running.append(Command(case.folder, *words, *option, environment=cache))
        time.sleep(rng.choice((0, 0, 0.05, 0.5, 1.5)))
    results = [command.wait() for command in running]
    codes = [done.code for done in results]
    try:
        for done in results:
            done.check(0, 2)
        if 0 not in codes or (not option and codes.count(0) != 1):
            raise Fault("not exactly one of them ran")
        check_result(case, verb, case.folder)
    except Fault as fault:
        raise Fault(f"{verb} {option}, codes {codes}: {fault}") from None


def start_ranks(case: Case, words: Words, ranks: list[Words | None]) -> list[Command | None]:
    """Start the two processes of a run as a launcher would.

    Args:
        case: The case.
        words: The command line that both processes share.
        ranks: Additional words for each process. A process with None is never started.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    common |= {"ACCELERATE_USE_CPU": "true", "KDCLI_CACHE": str(case.folder / "cache")}

    def start(rank: int, own: Words) -> Command:
        environment = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        return Command(case.folder, *words, *own, environment=environment)

    return [None if own is None else start(rank, own) for rank, own in enumerate(ranks)]


def _has_begun(case: Case) -> Callable[[], bool]:
    """Return a function that tells whether the run has logged a step."""
    log = case.folder / "out" / "log.jsonl"
    return lambda: log.exists() and log.stat().st_size > 0


def _wait_until(condition: Callable[[], bool], seconds: float = 40.0) -> None:
    """Wait until a condition is true, but on an idle machine not longer than `seconds`."""
    end = time.monotonic() + seconds * patience()
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


OUT: Words = ["-o", "out"]
Scene = Callable[[Case, Words], list[Done]]
"""Runs a command line as several processes and returns their results."""


def _ranks(*ranks: Words | None) -> Scene:
    """Return a scene in which each process has additional words, or with None is never started."""

    def run(case: Case, words: Words) -> list[Done]:
        started = start_ranks(case, words, list(ranks))
        return [command.wait(MINUTE) for command in started if command]

    return run


def _rank_dies(rank: int, *, at_step: bool) -> Scene:
    """Return a scene in which a process of a launcher is killed, at a step or at its start."""

    def run(case: Case, words: Words) -> list[Done]:
        both = start_ranks(case, [*words, *OUT, "--max-steps", "400"], [[], []])
        _wait_until(_has_begun(case)) if at_step else time.sleep(case.rng.random())
        killed, other = both[rank], both[1 - rank]
        assert killed
        assert other
        os.kill(killed.pid, signal.SIGKILL)
        killed.wait()
        return [other.wait(MINUTE)]

    return run


def _child_dies(rank: int, *, at_step: bool) -> Scene:
    """Return a scene in which a process that kdcli started is killed, at a step or at its start."""

    def run(case: Case, words: Words) -> list[Done]:
        cache = {"KDCLI_CACHE": str(case.folder / "cache")}
        long_run = ["--max-steps", "400", "--processes", "2"]
        parent = Command(case.folder, *words, *OUT, *long_run, environment=cache)
        _wait_until(lambda: len(_children(parent.pid)) == 2)
        _wait_until(_has_begun(case)) if at_step else time.sleep(3 * case.rng.random())
        os.kill(_children(parent.pid)[rank], signal.SIGKILL)
        return [parent.wait(MINUTE)]

    return run


DATA = "other-data"
"""Directory with other data, in the case's directory."""
SCENES: dict[str, Scene] = {
    "no rank differs": _ranks(OUT, OUT),
    "another lr": _ranks(OUT, [*OUT, "--lr", "1e-5"]),
    "another number of steps": _ranks(OUT, [*OUT, "--max-steps", "9"]),
    "another seed": _ranks(OUT, [*OUT, "--seed", "5"]),
    "other data": _ranks(OUT, [*OUT, "--data", DATA]),
    "a usage error on the second": _ranks(OUT, [*OUT, "--batch-size", "0"]),
    "a usage error on the first": _ranks([*OUT, "--set", "x=1"], OUT),
    "data missing on the second": _ranks(OUT, [*OUT, "--data", "nowhere"]),
    "the second never starts": _ranks(OUT, None),
    "the first never starts": _ranks(None, OUT),
    "the first dies at its start": _rank_dies(0, at_step=False),
    "the second dies at its start": _rank_dies(1, at_step=False),
    "the first dies at a step": _rank_dies(0, at_step=True),
    "the second dies at a step": _rank_dies(1, at_step=True),
    "the first child dies at its start": _child_dies(0, at_step=False),
    "the second child dies at its start": _child_dies(1, at_step=False),
    "the first child dies at a step": _child_dies(0, at_step=True),
    "the second child dies at a step": _child_dies(1, at_step=True),
}
VERBS = ("finetune", "distill")


def scene_of(number: int) -> str:
    """Return the name of a case's scene."""
    return list(SCENES)[number % len(SCENES)]


def ranks(case: Case) -> None:
    """Run a scene. Every process must end within a minute with a documented exit code.

    If the scene contains an error, the processes together must print exactly one message.
    """
    scene, verb = scene_of(case.number), VERBS[case.number // len(SCENES) % len(VERBS)]
    own = case.folder / DATA
    own.mkdir()
    source = case.material / "data" / "train.jsonl"
    for name in ("train", "validation"):
        (own / f"{name}.jsonl").write_text(
            "".join(source.read_text().splitlines(keepends=True)[10:]), "utf-8"
        )
    try:
        ended = SCENES[scene](case, list(commands(case.material)[verb]))
        codes = [done.code for done in ended]
        for done in ended:
            if done.code not in EXIT_CODES or "Traceback" in done.stderr:
                raise Fault(f"codes {codes}: {brief(done.stderr.strip()[-300:], done.stderr)}")
        messages = sum(done.messages for done in ended)
        if scene == next(iter(SCENES)):
            if any(codes) or messages:
                raise Fault(f"codes {codes}, {ended[0].stderr[-500:]}")
        elif 0 in codes or messages != 1:
            output = " // ".join(done.stderr.strip()[-300:] for done in ended)
            raise Fault(f"codes {codes} and {messages} messages: {output}")
    except Fault as fault:
        raise Fault(f"{verb}, {scene}: {fault}") from None


KINDS = [
    Kind("together", 45, together, wall=120),
    Kind("ranks", len(VERBS) * len(SCENES), ranks, wall=130),
]
