"""python -m tools.faults [--minutes 10] [--seed 0] [--jobs N] [--kinds kills,words] [--only
KIND:NUMBER]

Runs what is left of the campaign and prints a table; exit 1 if a case failed. The same seed on the
same code goes on.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import traceback
from pathlib import Path

from tools.faults.campaign import Campaign, Fault, unmounted
from tools.faults.material import ROOT, imported, made, state_of_code


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--kinds", help="only these, with commas between")
    parser.add_argument("--only", help="one case, in a directory that stays")
    given = parser.parse_args()
    imported()
    from tools.faults import files, kills, models, ranks, words

    folder, code = ROOT / "runs" / "faults", state_of_code()
    material = made(folder / f"material-{code}")
    kinds = [kind for room in (kills, words, models, ranks, files) for kind in room.KINDS]
    named = given.kinds.split(",") if given.kinds else [kind.name for kind in kinds]
    campaign = Campaign(
        [k for k in kinds if k.name in named],
        given.seed,
        material,
        folder / f"{code}-{given.seed}.jsonl",
    )
    if given.only:
        return _only(campaign, *given.only.split(":"))
    campaign.run(given.minutes, given.jobs)
    print(campaign.table())
    failures = campaign.failures()
    for alike in failures:
        name, seen = min(alike, key=lambda failure: len(failure[1]))
        print(
            f"\n{len(alike)} x python -m tools.faults --seed {given.seed} --only {name}\n  "
            f"{seen[:600]}"
        )
    return bool(failures)


def _only(campaign: Campaign, kind: str, number: str) -> int:
    folder = Path(tempfile.mkdtemp(prefix=f"{kind}-{number}-"))
    try:
        campaign.alone(campaign.kinds[kind], int(number), folder)
        print("passed")
    except Fault:
        traceback.print_exc()
        return 1
    finally:
        os.chdir(ROOT)
        unmounted(folder)
        print(f"left in {folder}")
    return 0


sys.exit(main())
