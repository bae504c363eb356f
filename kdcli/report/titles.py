"""Titles of the steps of a compression, which people read instead of the names.

A step's name is the name of its directory.
"""

import re

RUNTIMES = {"onnx": "ONNX", "openvino": "OpenVINO"}
FORMS = {"undistilled": "without its teacher"}
BOUNDED = re.compile(r"(.+)-within-([^-]+)")
NUMBERED = re.compile(r"([0-9]+)-[a-z]+")
SELECTION, VERIFICATION = "selection", "verification-"


def step_title(name: str) -> str:
    """Return what a step makes or scores, such as `2x64, ONNX int8 (at most 0.9 points lost)`."""
    if name.startswith(SELECTION):
        return "candidates on the selection rows"
    if name.startswith(VERIFICATION):
        return f"{step_title(name.removeprefix(VERIFICATION))} on the verification rows"
    if "+" in name:
        return " + ".join(map(step_title, name.split("+")))
    if bounded := BOUNDED.fullmatch(name):
        points = "point" if bounded[2] == "1" else "points"
        return f"{step_title(bounded[1])} (at most {bounded[2]} {points} lost)"
    if numbered := NUMBERED.fullmatch(name):
        return f"step {numbered[1]}"
    model, runtime, precision = _parts(name)
    # A directory has no `:`, as in `static:64`.
    words = [FORMS.get(word, word.replace("_", ":")) for word in model]
    return ", ".join([*words, *([f"{RUNTIMES[runtime]} {precision}".strip()] if runtime else [])])


def _parts(name: str) -> tuple[list[str], str, str]:
    """Return the words of the model, its runtime if it has one, and the number format."""
    words = name.split("-")
    place = next((n for n, word in enumerate(words) if word in RUNTIMES), None)
    if place is None:
        return words, "", ""
    return words[:place], words[place], " ".join(words[place + 1 :])
