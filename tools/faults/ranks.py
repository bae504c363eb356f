"""Several processes: of one run, of which one differs, dies or never starts, and of several runs in
one directory."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

from tools.faults.campaign import Case, Fault, Kind, brief
from tools.faults.kills import commands, reference, same
from tools.faults.process import PROMISED, At, Command, Done

MINUTE = 60.0
TOGETHER = ("finetune", "distill", "prune", "cotrain", "chain")


def together(case: Case) -> None:
    """Two or three commands in one directory, at once or shortly after each other: one run comes
    out."""
    rng, verb = case.rng, TOGETHER[case.number % len(TOGETHER)]
    how = ([], ["--resume"], ["--overwrite"])[case.number // len(TOGETHER) % 3]
    words = [*commands(case.material)[verb], "-o", "out"]
    _, calls = reference(case.material, verb)
    cache = {"KDCLI_CACHE": str(case.folder / "cache")}
    if how:
        Command(
            case.folder, *words, at=At(rng.randrange(len(calls)), "after"), environment=cache
        ).wait()
    running = []
    for _ in range(rng.choice((2, 2, 3))):
        running.append(Command(case.folder, *words, *how, environment=cache))
        time.sleep(rng.choice((0, 0, 0.05, 0.5, 1.5)))
    ended = [command.wait() for command in running]
    codes = [done.code for done in ended]
    try:
        for done in ended:
            done.check(0, 2)
        if 0 not in codes or (not how and codes.count(0) != 1):
            raise Fault("not one of them won")
        same(case, verb, case.folder)
    except Fault as fault:
        raise Fault(f"{verb} {how}, codes {codes}: {fault}") from None


def by_hand(
    case: Case, words: list[object], ranks: list[list[object] | None]
) -> list[Command | None]:
    """A command as two processes of a launcher, each with words of its own; None is never
    started."""
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
    return [
        None
        if own is None
        else Command(
            case.folder, *words, *own, environment=common | {"RANK": str(r), "LOCAL_RANK": str(r)}
        )
        for r, own in enumerate(ranks)
    ]


def _began(case: Case) -> Callable[[], bool]:
    log = case.folder / "out" / "log.jsonl"
    return lambda: log.exists() and log.stat().st_size > 0


def _until(true: Callable[[], bool], seconds: float = 40.0) -> None:
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.02)


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


Words = list[object]
OUT: Words = ["-o", "out"]


def _ranks(*ranks: Words | None) -> Callable[[Case, Words], list[Done]]:
    def run(case: Case, words: Words) -> list[Done]:
        return [command.wait(MINUTE) for command in by_hand(case, words, list(ranks)) if command]

    return run


def _one_falls(rank: int, *, at_step: bool) -> Callable[[Case, Words], list[Done]]:
    def run(case: Case, words: Words) -> list[Done]:
        both = by_hand(case, [*words, *OUT, "--max-steps", "400"], [[], []])
        _until(_began(case)) if at_step else time.sleep(case.rng.random())
        fallen, other = both[rank], both[1 - rank]
        assert fallen
        assert other
        os.kill(fallen.pid, signal.SIGKILL)
        fallen.wait()
        return [other.wait(MINUTE)]

    return run


def _child_falls(rank: int, *, at_step: bool) -> Callable[[Case, Words], list[Done]]:
    def run(case: Case, words: Words) -> list[Done]:
        cache = {"KDCLI_CACHE": str(case.folder / "cache")}
        parent = Command(
            case.folder, *words, *OUT, "--max-steps", "400", "--processes", "2", environment=cache
        )
        _until(lambda: len(_children(parent.pid)) == 2)
        _until(_began(case)) if at_step else time.sleep(3 * case.rng.random())
        os.kill(_children(parent.pid)[rank], signal.SIGKILL)
        return [parent.wait(MINUTE)]

    return run


DATA = "other-data"  # in the case's directory
SCENES: dict[str, Callable[[Case, Words], list[Done]]] = {
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
    "the first falls at its start": _one_falls(0, at_step=False),
    "the second falls at its start": _one_falls(1, at_step=False),
    "the first falls at a step": _one_falls(0, at_step=True),
    "the second falls at a step": _one_falls(1, at_step=True),
    "the first child falls at its start": _child_falls(0, at_step=False),
    "the second child falls at its start": _child_falls(1, at_step=False),
    "the first child falls at a step": _child_falls(0, at_step=True),
    "the second child falls at a step": _child_falls(1, at_step=True),
}
OPEN: set[str] = set()
"""Scenes known to fail."""
VERBS = ("finetune", "distill")


def scene_of(number: int) -> str:
    return list(SCENES)[number % len(SCENES)]


def ranks(case: Case) -> None:
    """One scene: within a minute every process ends with a promised code, and all together say one
    thing."""
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
            if done.code not in PROMISED or "Traceback" in done.stderr:
                raise Fault(f"codes {codes}: {brief(done.stderr.strip()[-300:], done.stderr)}")
        said = sum(done.messages for done in ended)
        if scene == next(iter(SCENES)):
            if any(codes) or said:
                raise Fault(f"codes {codes}, {ended[0].stderr[-500:]}")
        elif 0 in codes or said != 1:
            raise Fault(
                f"codes {codes} and {said} messages: "
                f"{' // '.join(done.stderr.strip()[-300:] for done in ended)}"
            )
    except Fault as fault:
        raise Fault(f"{verb}, {scene}: {fault}") from None


KINDS = [
    Kind("together", 45, together, wall=120),
    Kind(
        "ranks",
        2 * len(SCENES),
        ranks,
        wall=130,
        open=lambda n: scene_of(n) if scene_of(n) in OPEN else None,
    ),
]
