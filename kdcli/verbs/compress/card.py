"""The model card of a cascade, with code that needs no kdcli."""

from pathlib import Path

from kdcli.deploy.cascade import FIRST, KEY, SINGLE_FILE, TOKENIZER_FILE, WORDS
from kdcli.deploy.exported import Export
from kdcli.disk import read_json
from kdcli.models.heads import tokenizer_for
from kdcli.models.model import reads_token_types
from kdcli.models.shape import positions_of
from kdcli.report.text import bytes_of, fenced

LOAD = """\
import json, numpy as np, onnxruntime, tokenizers
config = json.load(open("config.json"))
models = [
    (onnxruntime.InferenceSession("{first}"), tokenizers.Tokenizer.from_file("{first_tokens}")),
    (onnxruntime.InferenceSession("{second}"), tokenizers.Tokenizer.from_file("tokenizer.json")),
]
def logits(number, *item):
    session, tokenizer = models[number]
    tokenizer.enable_truncation({length}), tokenizer.no_padding()
    e = tokenizer.encode(*item{words})
    known = dict(input_ids=e.ids, attention_mask=e.attention_mask, token_type_ids={types})
    inputs = {{i.name: np.array([known[i.name]]) for i in session.get_inputs()}}
    return session.run(None, inputs)[0][0]{starts}
"""
ANSWER = """\
def answer(text):
    x = logits(0, text)
    {sure}
    x = logits(1, text) if sure < config["{key}"]["threshold"] else x
    return {result}
print(answer({example}))
"""
RANK = """\
def rank(query, passages):
    first = np.array([logits(0, query, passage)[0] for passage in passages])
    order = np.argsort(-first, kind="stable")
    best = order[:config["{key}"]["keep"]]
    second = np.array([logits(1, query, passages[n])[0] for n in best])
    return np.concatenate([best[np.argsort(-second)], order[len(best):]]).tolist()
print(rank("a query", ["a passage", "another passage"]))
"""
SOFTMAX = (
    "p = np.exp(x - x.max(-1, keepdims=True)); "
    "sure = (p / p.sum(-1, keepdims=True)).max(-1).min(initial=1)"
)
NAMES = 'config["id2label"]'
KINDS = {
    "class": {"sure": SOFTMAX, "result": f"{NAMES}[str(x.argmax())]", "example": '"a text"'},
    "multi": {
        "sure": "sure = (1 / (1 + np.exp(-abs(x)))).min()",
        "result": f"[{NAMES}[str(n)] for n in np.flatnonzero(x > 0)]",
        "example": '"a text"',
    },
    "tokens": {
        "sure": SOFTMAX,
        "result": f"[{NAMES}[str(n)] for n in x.argmax(-1)]",
        "example": '["some", "words"]',
    },
}
"""Code for each kind of answer. Rows of x are logits."""
STARTS = "[[n for n, w in enumerate(e.word_ids) if w is not None and w != e.word_ids[n - 1]]]"


def cascade_card(
    small: Export, large: Export, folder: Path, kind: str | None, *, shared: bool
) -> str:
    """Return the model card of a cascade.

    Args:
        small: The small model.
        large: The larger model.
        folder: The directory of the cascade, with its configuration.
        kind: The kind of the answers; None for a reranker.
        shared: Whether both models have the same tokenizer.
    """
    config, sizes = read_json(folder / "config.json"), (small.card.bytes, large.card.bytes)
    own, other = (model.file.relative_to(model.folder).as_posix() for model in (small, large))
    files = [f"{FIRST}/{own}", other]
    is_words = kind == "tokens"
    places = {folder if shared else folder / FIRST: small, folder: large}
    tokenizers = [tokenizer_for(str(place), of_words=is_words) for place in places]
    positions = min(positions_of(each.config) or 1 << 30 for each in (small, large))
    lengths = [min(each.model_max_length, positions) for each in tokenizers]
    has_types = reads_token_types(large.config, tokenizers[-1])
    code = LOAD.format(
        first=files[0],
        second=files[1],
        first_tokens=TOKENIZER_FILE if shared else f"{FIRST}/{TOKENIZER_FILE}",
        length=lengths[0] if shared else f"{lengths}[number]",
        types="e.type_ids" if has_types else "[0] * len(e.ids)",
        words=", is_pretokenized=True" if is_words else "",
        starts=STARTS if is_words else "",
    )
    code += RANK.format(key=KEY) if kind is None else ANSWER.format(key=KEY, **KINDS[kind])
    if kind is None:
        when = (
            f"It scores all passages of a query, and the larger model ranks the best "
            f"{config[KEY]['keep']} of them."
        )
    else:
        when = (
            "It answers, and the larger model is only asked if the least sure part of the answer "
            f"has a probability below {config[KEY]['threshold']:.5g}."
        )
    card = (
        "# A cascade of two models\n\n"
        f"`{files[0]}` ({bytes_of(sizes[0])}) reads every text. {when} The larger model is "
        f"`{files[1]}` ({bytes_of(sizes[1])}), which other tools load from this directory "
        "as if it were alone.\n\n"
        f"With kdcli, `kdcli.load(DIRECTORY).predict(texts)` runs both. Without it:\n\n"
        f"{fenced(code.strip(), 'python')}\n"
    )
    if (folder / SINGLE_FILE).is_file():
        words = f" `{WORDS}` is 1 at the first token of each word, else 0." if is_words else ""
        own = "" if shared else " The inputs of the larger model begin with `second_`."
        card += (
            f"\n`{SINGLE_FILE}` holds both models for one text at a time. It returns `logits`, and "
            f"in `asked` whether the larger model ran.{words}{own}\n"
        )
    readme = large.folder / "README.md"
    front, title, _ = readme.read_text("utf-8").partition("\n# ") if readme.is_file() else ("",) * 3
    return f"{front}\n{card}" if title and front.startswith("---") else card
