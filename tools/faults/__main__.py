"""Search for faults: run commands under bad conditions and check that they fail as documented.

    python -m tools.faults [--minutes 10] [--seed 0] [--jobs N] [--kinds kills,words]
    python -m tools.faults --only KIND:NUMBER

Runs cases until the time is up and prints a table. Exits with 1 if a case failed. A call with the
same seed on the same code continues where the last one stopped.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import traceback
from pathlib import Path

from tools.faults.campaign import Campaign, Fault, unmount_all
from tools.faults.material import ROOT, code_hash, import_commands, prepare_material


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--kinds", help="kinds of cases to run, separated by commas (default: all)")
    parser.add_argument("--only", help="run one case and keep its directory, for example kills:17")
    options = parser.parse_args()
    import_commands()
    from tools.faults import files, kills, models, words, written

    folder, code = ROOT / "runs" / "faults", code_hash()
    material = prepare_material(folder / f"material-{code}")
    modules = (kills, words, models, files, written)
    kinds = [kind for module in modules for kind in module.KINDS]
    names = options.kinds.split(",") if options.kinds else [kind.name for kind in kinds]
    campaign = Campaign(
        [kind for kind in kinds if kind.name in names],
        options.seed,
        material,
        folder / f"{code}-{options.seed}.jsonl",
    )
    if options.only:
        return _run_one(campaign, *options.only.split(":"))
    campaign.run(options.minutes, options.jobs)
    print(campaign.table())
    failures = campaign.failures()
    for similar in failures:
        name, message = min(similar, key=lambda failure: len(failure[1]))
        command = f"python -m tools.faults --seed {options.seed} --only {name}"
        print(f"\n{len(similar)} x {command}\n  {message[:600]}")
    return bool(failures)


def _run_one(campaign: Campaign, kind: str, number: str) -> int:
    """Run one case in a directory that stays. Return 1 if it fails."""
    folder = Path(tempfile.mkdtemp(prefix=f"{kind}-{number}-"))
    try:
        campaign.run_case(campaign.kinds[kind], int(number), folder)
        print("passed")
    except Fault:
        traceback.print_exc()
        return 1
    finally:
        os.chdir(ROOT)
        unmount_all(folder)
        print(f"the files are in {folder}")
    return 0


sys.exit(main())
