"""Write a page of docs/reference: what kdcli can do with each model type that a test tries."""

import json
from collections.abc import Iterable
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests"
TABLE = TESTS / "models" / "every_type.json"
"""What `tests/models/test_every_type.py` finds with the installed transformers."""
VERBS_TABLE = TESTS / "verbs" / "every_verb.json"
"""What `tests/verbs/test_every_verb.py` finds."""
WORKS = "works"
STATES, REFUSED = "states: ", "refused: "
HEAD = """\
# Model types

This page lists the model types that a test tries, each with a tiny random model. A type that is
missing here usually works too: see [Add a model type](../add-a-model-type.md).
"""
BOTH_WAYS = """\
## Every verb

{count} types, whose tokens attend to earlier and later ones:
"""
CAUSAL = """\
## Every verb, without relation losses

{count} causal types. `minilm`, `minilmv2` and `tinybert` refuse them as teachers, because a token
attends to earlier ones only; distil their vectors instead (`--method embedding`), or on a task
their outputs (`--method soft-targets`):
"""
ONLY_STATES = """\
## Without smaller models of their own

{count} types whose layers kdcli cannot use. It can evaluate, benchmark, trim and export them, and
distil their vectors into a static student (`--to static:256`) or another model (`--student`).
"""
NOT_AT_ALL = """\
## Refused

{count} types.
"""
VERBS = """\
## Each verb by command line

{count} types on which a test runs each verb, with two steps of training. Students have one layer
and half the width; `task` means tinybert, `outputs` soft-targets. `export` and `compress` write
int8 ONNX files, of the fine-tuned model if there is one. A number is the reason of a refusal:
"""


def page() -> str:
    """Return the page."""
    found: dict[str, str] = json.loads(TABLE.read_text("utf-8"))
    states = {kind: text for kind, text in found.items() if text.startswith(STATES)}
    refused = {kind: text for kind, text in found.items() if text.startswith(REFUSED)}
    layouts = {
        kind: text.split() for kind, text in found.items() if kind not in {*states, *refused}
    }
    causal = [kind for kind, words in layouts.items() if "causal" in words]
    both_ways = [kind for kind in layouts if kind not in causal]
    sections = [
        HEAD,
        BOTH_WAYS.format(count=len(both_ways)),
        listed(both_ways),
        CAUSAL.format(count=len(causal)),
        listed(causal),
        ONLY_STATES.format(count=len(states)),
        table(states, STATES),
        NOT_AT_ALL.format(count=len(refused)),
        table(refused, REFUSED),
        *verbs_by_type(),
    ]
    return "\n".join(sections)


def verbs_by_type() -> list[str]:
    """Return the section with what each verb does with each type, and the reasons."""
    stored = json.loads(VERBS_TABLE.read_text("utf-8"))
    verbs: list[str] = stored["verbs"]
    found: dict[str, dict[str, str]] = stored["types"]
    reasons: dict[str, int] = {}
    rows = []
    for kind, refusals in found.items():
        cells = []
        for verb in verbs:
            reason = refusals.get(verb, WORKS)
            if reason == WORKS:
                cells.append("yes")
                continue
            reason = reason.replace(f"'{kind}'", "model of this type")
            reason = reason.replace(f"{kind} is", "the type is")
            cells.append(str(reasons.setdefault(reason, len(reasons) + 1)))
        rows.append(f"| `{kind}` | {' | '.join(cells)} |")
    head = [f"| type | {' | '.join(verbs)} |", "|---" * (len(verbs) + 1) + "|"]
    numbered = [f"{number}. {reason}" for reason, number in reasons.items()]
    return [
        VERBS.format(count=len(found)),
        "\n".join([*head, *rows, ""]),
        "\n".join(numbered) + "\n",
    ]


def listed(kinds: Iterable[str]) -> str:
    """Return model types as a paragraph of short lines."""
    lines = [""]
    for name in ", ".join(f"`{kind}`" for kind in kinds).split(" "):
        if len(lines[-1]) + len(name) >= 100:
            lines.append("")
        lines[-1] += f" {name}" if lines[-1] else name
    return "\n".join(lines) + ".\n"


def table(reasons: dict[str, str], prefix: str) -> str:
    """Return a table of model types and the reasons."""
    rows = [f"| `{kind}` | {text.removeprefix(prefix)} |" for kind, text in reasons.items()]
    return "\n".join(["| type | reason |", "|---|---|", *rows, ""])
