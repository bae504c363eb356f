"""Answer with models as stock libraries do, without kdcli.

`stranger.py` reads one request per line, `{"how": ..., "folder": ..., "inputs": [...]}`, and prints
the answers as one line of JSON. Requests share a process, because the imports take seconds.
"""

import json
import sys
from pathlib import Path

import numpy as np

sys.modules["kdcli"] = None  # type: ignore[assignment]  # importing it fails
ONNX = "onnx/model.onnx"


def classify(folder, inputs):
    """Every label's score, by `transformers.pipeline`."""
    from transformers import pipeline

    settings = {"device": "cpu", "top_k": None, "trust_remote_code": True}
    scores = pipeline("text-classification", model=folder, **settings)
    answers = scores([as_input(each) for each in inputs], batch_size=8, truncation=True)
    return [{each["label"]: each["score"] for each in answer} for answer in answers]


def as_input(texts):
    return texts if isinstance(texts, str) else {"text": texts[0], "text_pair": texts[1]}


def tag(folder, inputs):
    """The label of each word, by the model of its configuration."""
    import torch
    from transformers import AutoModelForTokenClassification, AutoTokenizer

    model = AutoModelForTokenClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    answers = []
    for words in inputs:
        rows = tokenizer(words, is_split_into_words=True, truncation=True, return_tensors="pt")
        with torch.no_grad():
            numbers = model(**rows).logits[0].argmax(-1).tolist()
        places = rows.word_ids()
        named = [model.config.id2label[numbers[places.index(n)]] for n in range(len(words))]
        answers.append(named)
    return answers


def answer(folder, inputs):
    """The best span of each context, by the model of its configuration."""
    import torch
    from transformers import AutoModelForQuestionAnswering, AutoTokenizer

    model = AutoModelForQuestionAnswering.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    answers = []
    for question, context in inputs:
        row = tokenizer(question, context, return_offsets_mapping=True, return_tensors="pt")
        offsets, sides = row.pop("offset_mapping")[0].tolist(), row.sequence_ids()
        with torch.no_grad():
            output = model(**row)
        inside = [n for n, side in enumerate(sides) if side == 1]
        spans = [(first, last) for first in inside for last in inside if first <= last]
        starts, ends = output.start_logits[0].tolist(), output.end_logits[0].tolist()
        first, last = max(spans, key=lambda span: starts[span[0]] + ends[span[1]])
        answers.append(context[offsets[first][0] : offsets[last][1]])
    return answers


def encode(folder, inputs):
    """The vectors of texts, queries and documents, by sentence-transformers."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(folder, device="cpu")
    encoders = (model.encode, model.encode_query, model.encode_document)
    return [encoder(inputs).tolist() for encoder in encoders]


def rank(folder, inputs):
    """The scores of pairs, by sentence-transformers."""
    from sentence_transformers import CrossEncoder

    return CrossEncoder(folder, device="cpu").predict([tuple(each) for each in inputs]).tolist()


def run(folder, inputs):
    """The outputs of an export, by onnxruntime and the library tokenizers alone."""
    from onnxruntime import InferenceSession
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(f"{folder}/tokenizer.json")
    settings = json.loads((Path(folder) / "tokenizer_config.json").read_text("utf-8"))
    tokenizer.enable_truncation(settings["model_max_length"])
    tokenizer.enable_padding()
    rows = tokenizer.encode_batch(
        [each if isinstance(each, str) else tuple(each) for each in inputs]
    )
    parts = {"input_ids": "ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}
    arrays = {name: np.array([getattr(row, part) for row in rows]) for name, part in parts.items()}
    session = InferenceSession(Path(folder) / ONNX)
    given = {each.name: arrays[each.name].astype(np.int64) for each in session.get_inputs()}
    # The logits, or the vectors of texts after those of tokens.
    return session.run(None, given)[-1].tolist()


if __name__ == "__main__":
    for line in sys.stdin:
        request = json.loads(line)
        answers = globals()[request["how"]](request["folder"], request["inputs"])
        print(json.dumps(answers), flush=True)
