"""A tokenizer trained from a text: the same every time, of the size asked for, framed as BERT's."""

import json
import os
import subprocess
import sys

import pytest
from reading import logged_to
from transformers import AutoTokenizer

from kdcli.data.text.own_tokenizer import SPECIAL, own_tokenizer
from kdcli.errors import UsageError

WORDS = enumerate(["walk", "talk", "balk"] * 40)
TEXT = "\n".join(f"the {w}ing of Café {w} {i % 7}, and un{w}able {w}s" for i, w in WORDS)


pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT, "utf-8")
    return str(path)


def trained(source, size=70, log=None):
    with logged_to([] if log is None else log):
        return own_tokenizer(source, None, 1.0, size, 512)


def test_size_pieces_and_frame(source):
    tokenizer = trained(source)
    assert (len(tokenizer), tokenizer.convert_tokens_to_ids(list(SPECIAL))) == (70, [0, 1, 2, 3, 4])
    assert tokenizer.tokenize("The CAFE balks") == ["the", "cafe", *tokenizer.tokenize("balks")]
    one, two = tokenizer("the cafe"), tokenizer("the", "cafe")
    assert tokenizer.decode(one["input_ids"]) == "[CLS] the cafe [SEP]"
    assert tokenizer.decode(two["input_ids"]) == "[CLS] the [SEP] cafe [SEP]"
    assert two["token_type_ids"] == [0, 0, 0, 1, 1]
    assert tokenizer.unk_token_id in tokenizer("日")["input_ids"]
    # A piece within a word is none when it stands alone, nor special.
    assert "##a" not in tokenizer.all_special_tokens
    assert tokenizer.decode(tokenizer("##a")["input_ids"], skip_special_tokens=True) != "##a"


def test_another_process_trains_the_same(source, cache):
    program = (
        "import json, sys; from kdcli.data.text.own_tokenizer import own_tokenizer\n"
        "print(json.dumps(own_tokenizer(sys.argv[1], None, 1.0, 70, 512)"
        ".get_vocab()))"
    )
    found = trained(source).get_vocab()
    command, environment = (
        [sys.executable, "-c", program, source],
        os.environ | {"KDCLI_CACHE": str(cache / "other")},
    )
    assert (
        json.loads(subprocess.run(command, env=environment, capture_output=True, check=True).stdout)
        == found
    )


def test_it_is_trained_once_for_each_text_and_size(source, cache):
    log = []
    first = trained(source, log=log)
    assert (trained(source, log=log).get_vocab(), len(log)) == (first.get_vocab(), 1)
    assert trained(source, 60, log).get_vocab() != first.get_vocab()
    assert len(list((cache / "tokenizers").glob("[!.]*"))) == 2


def test_saved_it_is_the_same(source, tmp_path):
    tokenizer = trained(source)
    tokenizer.save_pretrained(tmp_path / "saved")
    read = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert dict(read("the talks", "un talkable")) == dict(tokenizer("the talks", "un talkable"))
    assert (read.mask_token_id, read.model_max_length) == (4, 512)


def test_a_short_text_makes_fewer_words_and_says_so(source):
    log = []
    assert len(trained(source, 5000, log)) < 200
    assert "not 5,000" in log[-1]


def test_rare_letters_do_not_fill_a_small_vocabulary(tmp_path):
    path = tmp_path / "rare.txt"
    rare = "\n".join(chr(0x0400 + i) * 2 for i in range(80))
    path.write_text(f"{TEXT}\n{rare}", "utf-8")
    tokenizer = trained(str(path), 160)
    assert tokenizer.tokenize("walking") != ["[UNK]"]
    pieces = set(tokenizer.get_vocab()) - set(SPECIAL)
    assert len({letter for piece in pieces for letter in piece.removeprefix("##")}) == 160 // 4


@pytest.mark.parametrize(
    ("text", "size", "why"), [(TEXT, 9, "a vocabulary of 9 is too small"), (" \n.", 80, "too few")]
)
def test_refused(tmp_path, text, size, why):
    path = tmp_path / "some.txt"
    path.write_text(text, "utf-8")
    with pytest.raises(UsageError, match=why):
        trained(str(path), size)
