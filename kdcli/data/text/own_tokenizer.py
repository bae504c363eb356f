"""Train a WordPiece tokenizer like BERT's on the training text of a model.

Words are lower-cased and split as in BERT. A piece enters the vocabulary if joining its parts
shortens the text. The tokenizer for a text and a size is trained once and cached. The same text
always gives the same tokenizer. If a data set of the hub changes, a new tokenizer is trained.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

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

from kdcli.data.hub import entry_at_commit
from kdcli.data.sources import HubSource, open_source
from kdcli.disk import cache_dir, cache_key, disk_errors, lock_entry, use_entry, write_atomic
from kdcli.errors import UsageError
from kdcli.messages import log

PAD, UNKNOWN_TOKEN, CLS, SEP, MASK_TOKEN = SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")

MIN_FREQUENCY = 2  # Minimum occurrences of a pair of pieces that is joined.
MIN_PIECES = 8  # In addition to the special tokens. Fewer pieces leave hardly anything to predict.
# Maximum number of letters, and minimum number of words per letter. Without these limits, rare
# letters of other scripts would fill a small vocabulary.
MAX_LETTERS, MIN_WORDS_PER_LETTER = 1000, 4
TOKENIZER_FORMAT = 1  # Raise it when the same text gives another tokenizer.


def own_tokenizer(
    source: str,
    column: str | None,
    share: float,
    vocab_size: int,
    max_length: int,
) -> PreTrainedTokenizerBase:
    """Train a tokenizer on the training text of a source, or load it from the cache.

    Args:
        source: A value of `--data`.
        column: The column of the text; None chooses it.
        share: The share of the text's rows that is read.
        vocab_size: The size of the vocabulary, including special tokens. A short text gives a
            smaller vocabulary, which is logged.
        max_length: The maximum number of tokens that the models accept.

    Raises:
        UsageError: The source cannot be read, the text has too few words, or the size leaves no
            room for pieces.
        MachineError: The cache cannot be written.
    """
    min_size = len(SPECIAL) + MIN_PIECES
    if vocab_size < min_size:
        message = f"a vocabulary of {vocab_size} is too small"
        raise UsageError(message, f"at least {min_size}; BERT's has 30,522")
    opened = open_source(source, share)
    key = cache_key(TOKENIZER_FORMAT, opened.identity, column, vocab_size)
    file = cache_dir() / "tokenizers" / f"{key}.json"
    with disk_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
    about = f"{opened.name}, {vocab_size:,} words"
    if isinstance(opened, HubSource):
        file = entry_at_commit(file, opened.hub, about, Path.is_file)
    use_entry(file, about)
    # A read-only cache has no place for a lock.
    if not file.is_file():
        # If several processes need the tokenizer, one of them trains it.
        with lock_entry(file):
            if not file.is_file():
                words = f"{vocab_size:,} words"
                log(f"training a tokenizer of {words} on the train text of {opened.name}")
                trained = _train(lambda: opened.documents("train", column), vocab_size)
                write_atomic(file, trained.to_str())
    trained = Tokenizer.from_file(str(file))
    size = trained.get_vocab_size()
    if size < min_size:
        message = f"the train text of {opened.name} has too few words for a tokenizer"
        raise UsageError(message, "give more text")
    if size != vocab_size:
        # All letters of the alphabet are included, so the vocabulary may also be larger.
        train_text = f"the train text of {opened.name}"
        log(f"{train_text} gives a vocabulary of {size:,} words, not {vocab_size:,}")
    return PreTrainedTokenizerFast(
        tokenizer_object=trained,
        model_max_length=max_length,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        pad_token=PAD,
        unk_token=UNKNOWN_TOKEN,
        cls_token=CLS,
        sep_token=SEP,
        mask_token=MASK_TOKEN,
    )


def _train(documents: Callable[[], Iterator[str]], vocab_size: int) -> Tokenizer:
    """Train a tokenizer. The documents are read twice: for the letters, then for the pieces."""
    tokenizer = _bert_tokenizer({})
    counts: Counter[str] = Counter()
    for document in documents():
        counts.update(tokenizer.normalizer.normalize_str(document))
    letters = [letter for letter in counts if not letter.isspace()]
    letters.sort(key=lambda letter: (-counts[letter], letter))
    max_letters = max(1, min(MAX_LETTERS, vocab_size // MIN_WORDS_PER_LETTER))
    alphabet = sorted(letters[:max_letters])
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        min_frequency=MIN_FREQUENCY,
        # The trainer numbers letters within words in no fixed order, and breaks ties by number.
        # Special tokens have a fixed order, so these letters are passed as special tokens.
        special_tokens=[*SPECIAL, *(f"##{letter}" for letter in alphabet)],
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        continuing_subword_prefix="##",
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents(), trainer)
    # Build a new tokenizer, because letters within words are special tokens in the trained one.
    return _bert_tokenizer(tokenizer.get_vocab())


def _bert_tokenizer(vocabulary: dict[str, int]) -> Tokenizer:
    """Build a tokenizer that splits text, and frames one text or two, as BERT's does."""
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token=UNKNOWN_TOKEN))
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
