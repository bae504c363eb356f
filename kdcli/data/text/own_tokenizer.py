"""A WordPiece tokenizer as BERT has it, trained from the text that a model will read.

Words are lower-cased and cut as by BERT; a piece enters the vocabulary when joining its parts shortens the text. Each
text and size is trained once and cached; the same text gives the same tokenizer.
"""

from collections import Counter
from collections.abc import Callable, Iterator

from filelock import FileLock
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from kdcli.data.sources import Log, open_source
from kdcli.disk import cache_dir, cache_key, disk_errors, write_atomic
from kdcli.errors import UsageError

PAD, UNKNOWN, CLS, SEP, MASK = SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")

LEAST_OFTEN = 2  # Times a pair of pieces must occur to become one.
LEAST_PIECES = 8  # Besides the special ones: with fewer there is next to nothing to predict.
# Most letters of pieces, and vocabulary words per letter: rare letters of other scripts would fill a small vocabulary.
LETTERS, LETTER_SHARE = 1000, 4
FORMAT = 1  # Raised when the same text would give another tokenizer.


def own_tokenizer(
    source: str, column: str | None, vocab_size: int, max_length: int, *, log: Log
) -> PreTrainedTokenizerBase:
    """Train a tokenizer on the training text of a source, or take it from the cache. `vocab_size`: words of its
    vocabulary, special ones included; a short text gives fewer, which is logged. `max_length`: tokens that the models
    which read it take at most. Raises UsageError: see `kdcli.data.sources`; a size that leaves no room for pieces, or
    text without words; MachineError: the cache cannot be written."""
    least = len(SPECIAL) + LEAST_PIECES
    if vocab_size < least:
        raise UsageError(
            f"a vocabulary of {vocab_size} is too small", f"at least {least}; BERT's has 30,522"
        )
    opened = open_source(source)
    file = (
        cache_dir()
        / "tokenizers"
        / f"{cache_key(FORMAT, opened.identity, column, vocab_size)}.json"
    )
    with disk_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
    # Of several processes that want it one trains it.
    with FileLock(file.with_name(f".{file.name}.lock")):
        if not file.is_file():
            log(f"training a tokenizer of {vocab_size:,} words on the train text of {opened.name}")
            write_atomic(
                file, _trained(lambda: opened.documents("train", column), vocab_size).to_str()
            )
    trained = Tokenizer.from_file(str(file))
    size = trained.get_vocab_size()
    if size < least:
        raise UsageError(
            f"the train text of {opened.name} has too few words for a tokenizer", "give more text"
        )
    if size != vocab_size:
        # All letters of a text are taken, even where there are more than `vocab_size`.
        log(
            f"the train text of {opened.name} makes a vocabulary of {size:,} words, not {vocab_size:,}"
        )
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    special = {
        "pad_token": PAD,
        "unk_token": UNKNOWN,
        "cls_token": CLS,
        "sep_token": SEP,
        "mask_token": MASK,
    }
    return PreTrainedTokenizerFast(
        tokenizer_object=trained, model_max_length=max_length, model_input_names=inputs, **special
    )


def _trained(documents: Callable[[], Iterator[str]], vocab_size: int) -> Tokenizer:
    """Read the documents twice: for the letters, then for the pieces."""
    tokenizer = _with_words({})
    count: Counter[str] = Counter()
    for document in documents():
        count.update(tokenizer.normalizer.normalize_str(document))
    frequent = sorted(
        (letter for letter in count if not letter.isspace()), key=lambda one: (-count[one], one)
    )
    letters = sorted(frequent[: max(1, min(LETTERS, vocab_size // LETTER_SHARE))])
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        min_frequency=LEAST_OFTEN,
        # By default letters within words are numbered in no fixed order, and ties are broken by number.
        special_tokens=[*SPECIAL, *(f"##{letter}" for letter in letters)],
        initial_alphabet=letters,
        limit_alphabet=len(letters),
        continuing_subword_prefix="##",
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents(), trainer)
    # Made anew: in the trained one the letters within words count as special tokens.
    return _with_words(tokenizer.get_vocab())


def _with_words(vocabulary: dict[str, int]) -> Tokenizer:
    """A tokenizer that cuts as BERT's does, and frames one text or two like that."""
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token=UNKNOWN))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    if vocabulary:
        tokenizer.add_special_tokens(list(SPECIAL))
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[(token, vocabulary[token]) for token in (CLS, SEP)],
        )
    return tokenizer
