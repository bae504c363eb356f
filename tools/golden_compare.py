"""Comparison of two recordings of `golden.py`."""

from __future__ import annotations

import math

Recording = dict[str, object]
"""Name of a case -> its exit code with its losses or its surface, as read from JSON."""
MAX_LINES = 12
"""Maximum number of differences that are printed for one case."""
ABSENT = "(absent)"


def differences(before: object, after: object, at: str = "") -> list[str]:
    """Describe where two recordings differ, one line or block each."""
    if isinstance(before, dict) and isinstance(after, dict):
        return [
            line
            for key in sorted({*before, *after})
            for line in differences(
                before.get(key, ABSENT), after.get(key, ABSENT), f"{at} > {key}" if at else key
            )
        ]
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        pairs = enumerate(zip(before, after, strict=True))
        return [line for number, (a, b) in pairs for line in differences(a, b, f"{at}[{number}]")]
    if repr(before) == repr(after):
        return []
    return [f"{at}:\n  - {str(before)[:600]}\n  + {str(after)[:600]}{relative(before, after)}"]


def relative(before: object, after: object) -> str:
    """Describe the relative difference of two numbers. Other values give an empty text."""
    if not isinstance(before, float) or not isinstance(after, float):
        return ""
    if not before or not math.isfinite(before) or not math.isfinite(after):
        return ""
    return f"\n  relative difference {abs(after - before) / abs(before):.1e}"


def restore_names(before: dict[str, object], after: dict[str, object], at: str) -> list[str]:
    """Rename the keys of `after` whose values have another key in `before`.

    Returns:
        A note on each renamed key.
    """
    notes = []
    for old in sorted(before.keys() - after.keys()):
        news = sorted(after.keys() - before.keys())
        same = [new for new in news if repr(after[new]) == repr(before[old])]
        if same:
            after[old] = after.pop(same[0])
            notes.append(f"{at}: {old} is now {same[0]}, with the same values")
    return notes


def print_differences(before: Recording, after: Recording, what: str) -> int:
    """Print the differences of two recordings and return the number of cases that differ."""
    wrong = 0
    for name in sorted({*before, *after}):
        old, new = before.get(name, ABSENT), after.get(name, ABSENT)
        if what == "losses" and isinstance(old, dict) and isinstance(new, dict):
            for part in ("steps", "quality", "weights"):
                for note in restore_names(old[part], new[part], f"{name} > {part}"):
                    print(f"note: {note}")
        lines = differences(old, new, name)
        wrong += bool(lines)
        print("\n".join(lines[:MAX_LINES]), end="\n" if lines else "")
        if len(lines) > MAX_LINES:
            print(f"{name}: {len(lines) - MAX_LINES} more differences")
    print(f"{wrong} of {len(before)} cases differ" if wrong else "no difference")
    return wrong
