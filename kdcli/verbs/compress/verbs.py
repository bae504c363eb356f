"""What a compression calls: other verbs, the latency worker and the clock."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from kdcli.deploy.latency import Latency, measure_latency
from kdcli.deploy.runners import check_backend
from kdcli.verbs.distill.run import distill
from kdcli.verbs.evaluate.run import evaluate
from kdcli.verbs.export.run import export
from kdcli.verbs.finetune.run import finetune
from kdcli.verbs.prune.run import prune
from kdcli.verbs.trim.run import trim


@dataclass(frozen=True)
class Verbs:
    """The verbs that a compression calls. A test gives its own.

    Attributes:
        measure: measures latencies.
        check_backend: raises an error if a backend cannot be used on this machine.
        clock: the seconds from which durations are computed.
    """

    finetune: Callable[..., object]
    distill: Callable[..., object]
    prune: Callable[..., object]
    trim: Callable[..., object]
    export: Callable[..., object]
    evaluate: Callable[..., object]
    measure: Callable[..., Latency] = measure_latency
    check_backend: Callable[[str, str], None] = check_backend
    clock: Callable[[], float] = time.monotonic


VERBS = Verbs(finetune, distill, prune, trim, export, evaluate)
