"""Questions with their answers, and small tokenizers of the three kinds that tell characters
differently."""

import functools

import numpy as np
from hypothesis import strategies as st
from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from kdcli.data.labelled.answer_windows import windows
from kdcli.types import Answer, Example

WORDS = st.builds(
    str.__add__,
    st.sampled_from(["cat", "ran", "é", "Z", "ß", "1872", "東", "न", "👩", "🌍", "x", "q"]),
    st.sampled_from(["", "", "s", "\u0301", "\u0308", "\ufe0f", "\u200d🚀", "्"]),
)
CONTEXTS = st.lists(WORDS, min_size=1, max_size=120)
SPECIAL = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
TEXT = [
    "who where what ran the a cat sat on mat in Wien Zürich naïve café 1872 rivers river running "
    "東京 नमस्ते"
] * 4
KINDS = ["word pieces", "bytes", "sentence pieces"]


@functools.cache
def tokenizer_of(kind: str) -> PreTrainedTokenizerFast:
    """Small, made here; bytes and sentence pieces keep the space before a word in its token."""
    asked = {"special_tokens": list(SPECIAL.values()), "show_progress": False}
    if kind == "word pieces":
        tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True, strip_accents=True)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.train_from_iterator(TEXT, trainers.WordPieceTrainer(vocab_size=120, **asked))
    elif kind == "bytes":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        tokenizer.train_from_iterator(
            TEXT, trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, **asked)
        )
    else:
        words, letters = (
            sorted({"▁" + w for w in TEXT[0].split()}),
            sorted(set(TEXT[0].replace(" ", "▁"))),
        )
        scores = [
            *((n, 0.0) for n in SPECIAL.values()),
            *((w, -5.0) for w in words),
            *((x, -9.0) for x in letters),
        ]
        tokenizer = Tokenizer(models.Unigram(scores, unk_id=1))
        white = normalizers.Replace(Regex(r"\s+"), " ")
        tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), white])
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    ids = [(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    between = "[SEP]:0" if kind == "word pieces" else "[SEP]:0 [SEP]:0"
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair=f"[CLS]:0 $A:0 {between} $B:1 [SEP]:1",
        special_tokens=ids,
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **SPECIAL)


def asking(
    context: str, *answers: str | tuple[str, int], question: str = "who ran?", name: str = "q"
) -> Example:
    gold = tuple(Answer(a, context.index(a)) if isinstance(a, str) else Answer(*a) for a in answers)
    return Example(f"f.jsonl:{name}", name, (question, context), gold)


def windows_of(examples, kind="word pieces", max_length=100, stride=40, token_types=True):
    return windows(
        examples, tokenizer_of(kind), max_length=max_length, stride=stride, token_types=token_types
    )


def row(windows, i, of="char_begin_T"):
    """What one window has of a ragged array."""
    values = windows.ids_T if of == "ids" else getattr(windows, of)
    return values[windows.ends[i] - windows.lengths[i] : windows.ends[i]].tolist()


def one_hot(windows) -> list[np.ndarray]:
    """Logits that mean the labels; windows without the answer are less sure of theirs."""
    found = []
    for length, label, cls in zip(windows.lengths, windows.labels, windows.cls, strict=True):
        logits = np.full((length, 2), -10.0, dtype=np.float32)
        logits[label, [0, 1]] = 5.0 if label[0] == cls else 10.0
        found.append(logits)
    return found


def random_logits(windows, seed=0) -> list[np.ndarray]:
    generator = np.random.Generator(np.random.PCG64(seed))
    return [generator.normal(size=(length, 2)).astype(np.float32) for length in windows.lengths]


def mixed(n=12) -> list[Example]:
    contexts = [" ".join(f"cat ran {i * j}" for j in range(3 + i % 5 * 12)) for i in range(n)]
    return [
        asking(c, "ran 0", name=str(i)) if i % 3 else asking(c, name=str(i))
        for i, c in enumerate(contexts)
    ]


# Its offsets begin after the first letter of a word.
ROBBERT = pre_tokenizers.Sequence(
    [
        pre_tokenizers.Whitespace(),
        pre_tokenizers.ByteLevel(add_prefix_space=True),
        pre_tokenizers.Punctuation(),
    ]
)
PEOPLE = "Anna Berg flew from Amsterdam to New York on Monday with Carlos Ruiz ."


def with_pre_tokenizer(before):
    """A byte-level tokenizer for PEOPLE."""
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = before
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        [PEOPLE] * 9,
        trainers.BpeTrainer(vocab_size=400, special_tokens=special, initial_alphabet=alphabet),
    )
    backend.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0))
    names = {"cls": "<s>", "sep": "</s>", "pad": "<pad>", "unk": "<unk>"}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, **{f"{key}_token": name for key, name in names.items()}
    )
