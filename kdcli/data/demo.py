"""The `demo` data: a small generated language, its corpus and its tasks, without files or network.

Content words are invented from syllables, and function words are English. A document has a topic
and a mood, and draws its nouns, verbs and adjectives from them. The meaning of a word is therefore
the company it keeps, which an encoder can learn from text. Training and evaluation examples share
no content word, so only an encoder that learnt these meanings does well. Two of the tasks depend on
the order of words, which no bag of words can solve.
"""

import functools
import hashlib
import inspect
import random
import sys
from collections.abc import Iterator
from typing import NamedTuple

TOPICS, MOODS = 6, 2
DOCUMENTS = {"train": 24_000, "validation": 1_200}
SENTENCES = {"train": 6_000, "validation": 2_000}
TASKS = ("demo-topic", "demo-order", "demo-coherence")
TRAIN_EXAMPLES = {"demo-topic": 40}  # Other tasks have EXAMPLES.
EXAMPLES = 1000
_ONSETS = [*"bdfgklmnprstvz", "br", "dr", "gr", "kl", "pl", "st", "tr", "sh"]
_VOWELS = [*"aeiou", "ai", "ou"]
_CODAS = ["", "", *"lmnrsk"]


class DemoExample(NamedTuple):
    """One example of a demo task."""

    text: str
    label: int


class _Lexicon(NamedTuple):
    nouns: list[list[str]]
    verbs: list[list[str]]
    moods: list[list[str]]
    places: list[str]


@functools.cache
def _lexicon() -> _Lexicon:
    """Invent distinct words: nouns and verbs by topic, adjectives by mood."""
    rng = random.Random(2311)
    seen: set[str] = set()

    def words(count: int) -> list[str]:
        invented: list[str] = []
        while len(invented) < count:
            word = "".join(rng.choice(part) for part in (_ONSETS, _VOWELS, _CODAS) * 2)
            if word not in seen:
                seen.add(word)
                invented.append(word)
        return invented

    return _Lexicon(
        nouns=[words(40) for _ in range(TOPICS)],
        verbs=[words(24) for _ in range(TOPICS)],
        moods=[words(60) for _ in range(MOODS)],
        places=words(40),
    )


def demo_documents(split: str) -> Iterator[str]:
    """Yield the documents of a split, which are always the same."""
    rng = random.Random(f"documents {split}")
    for _ in range(DOCUMENTS[split]):
        topic, mood = rng.randrange(TOPICS), rng.randrange(MOODS)
        hero = rng.choice(_lexicon().nouns[topic])
        sentences = [_sentence(rng, topic, mood, None, hero)]
        for _ in range(rng.randint(5, 10)):
            # As in real text, some sentences stray from the topic.
            strays = rng.random() < 0.08
            about = rng.choice([None, hero, hero]) if not strays else None
            sentences.append(
                _sentence(rng, rng.randrange(TOPICS) if strays else topic, mood, None, about)
            )
        yield " ".join(sentences)


def demo_sentences(split: str) -> Iterator[str]:
    """Yield the sentences of a split, without labels, which are always the same."""
    rng = random.Random(f"sentences {split}")
    for _ in range(SENTENCES[split]):
        yield _sentence(rng, rng.randrange(TOPICS), rng.randrange(MOODS), None)


def demo_task(name: str, split: str) -> list[DemoExample]:
    """Return the examples of a demo task's `train` or `validation` split.

    `demo-topic`: the topic of a sentence, one of six, with 40 training examples. `demo-order`:
    whether two neighbouring words were swapped. `demo-coherence`: whether the second of two
    sentences has another topic than the first.
    """
    if name not in TASKS:
        raise ValueError(f"no demo task '{name}'; there are {', '.join(TASKS)}")
    rng = random.Random(f"{name} {split}")
    half = {"train": 0, "validation": 1}[split]
    return [
        _example(name, rng, half)
        for _ in range(TRAIN_EXAMPLES.get(name, EXAMPLES) if half == 0 else EXAMPLES)
    ]


def _example(task: str, rng: random.Random, half: int) -> DemoExample:
    topic, label = rng.randrange(TOPICS), rng.randrange(2)
    first = _sentence(rng, topic, rng.randrange(MOODS), half)
    if task == "demo-topic":
        return DemoExample(first, topic)
    if task == "demo-coherence":
        other = (topic + label * rng.randrange(1, TOPICS)) % TOPICS
        return DemoExample(f"{first} {_sentence(rng, other, rng.randrange(MOODS), half)}", label)
    words = first.split()
    if label:
        i = rng.choice([i for i in range(len(words) - 2) if words[i] != words[i + 1]])
        words[i], words[i + 1] = words[i + 1], words[i]
    return DemoExample(" ".join(words), label)


def demo_identity() -> str:
    """Hash the source of this generator, for the key of a cached corpus."""
    return hashlib.sha256(inspect.getsource(sys.modules[__name__]).encode()).hexdigest()


def _sentence(
    rng: random.Random, topic: int, mood: int, half: int | None, hero: str | None = None
) -> str:
    """Generate a sentence.

    `half` restricts its content words to the first or second half of each list.
    """
    lexicon = _lexicon()

    def pick(words: list[str]) -> str:
        middle = len(words) // 2
        if half is None:
            return rng.choice(words)
        return rng.choice(words[:middle] if half == 0 else words[middle:])

    def noun(plural: bool) -> str:
        word = hero if hero and rng.random() < 0.5 else pick(lexicon.nouns[topic])
        return word + "s" if plural else word

    plural = rng.random() < 0.4
    be, s = ("are", "") if plural else ("is", "s")
    one = f"{'the' if plural or rng.random() < 0.6 else 'a'} {noun(plural)}"
    verb, adjective, place = (
        pick(lexicon.verbs[topic]),
        pick(lexicon.moods[mood]),
        pick(lexicon.places),
    )
    forms = (
        f"{one} {be} {adjective} .",
        f"{one} {verb}{s} the {noun(False)} near {place} .",
        f"in {place} {one} {verb}{s} a {adjective} {noun(False)} .",
        f"{one} {verb}{s} because {'they are' if plural else 'it is'} {adjective} .",
        f"when {one} {verb}{s} , the {noun(True)} {pick(lexicon.verbs[topic])} "
        f"and {be} {adjective} .",
        f"they say that {one} {be} {adjective} and {verb}{s} {place} .",
    )
    return rng.choice(forms if half is None else forms[2:])
