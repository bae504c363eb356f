"""Unlabelled text, as blocks of tokens that are masked for masked-language-model losses."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kdcli.data.batches import BatchOrder
from kdcli.data.text.corpus import Corpus, open_corpus
from kdcli.data.text.masking import Masked, PassOrder, check_share, mask_vocabulary
from kdcli.engine.launch import make_schedule
from kdcli.engine.session import Session
from kdcli.errors import UsageError
from kdcli.losses.vocabulary import labels_of, masked_ce, soft_kl
from kdcli.models.load import load_encoder
from kdcli.models.masked_head import load_masked_lm
from kdcli.models.model import NO_ROWS, Model
from kdcli.recipe.sections import TrainSettings
from kdcli.types import Batch, Count, Examples, Needs, RowHashes, Signals
from kdcli.workloads.scores import ModelScores
from kdcli.workloads.settings import TaskHeadSettings, TrainingData
from kdcli.workloads.training import Plan
from kdcli.workloads.workload import Workload

MASKED_LOGITS = Needs(masked_logits=True)


@dataclass
class TextWorkload(Workload[Model]):
    """Blocks of text for models that share a tokenizer.

    Attributes:
        corpus: Training blocks and held-out blocks.
        settings: The recipe's `data` section.
        tokenizer: The tokenizer of the blocks.
        source: The model that the tokenizer belongs to, for messages.
        seed: Seed for drawing the masks.
        masked: Whether to mask tokens, for masked language models.
        otherwise: Hint of the error for a model without a masked-language-model head.
    """

    session: Session
    corpus: Corpus
    settings: TrainingData
    tokenizer: PreTrainedTokenizerBase
    source: str
    seed: int = 0
    masked: bool = True
    otherwise: str = "choose a masked language model"
    notes: list[str] = field(default_factory=list)
    name: str = "text"
    split: str = "held-out blocks"
    metric: str = "loss"
    rows: RowHashes = field(default_factory=NO_ROWS.copy)
    needs: Needs = MASKED_LOGITS
    over: Count = "labels"
    has_metrics: bool = False

    @property
    def has_labels(self) -> bool:  # type: ignore[override]
        return self.masked

    @property
    def auto_class(self) -> str:  # type: ignore[override]
        return "AutoModelForMaskedLM" if self.masked else "AutoModel"

    @property
    def examples(self) -> Examples:
        return self._masked(self.corpus.train)

    @property
    def held_out(self) -> Examples:
        return self._masked(self.corpus.held_out)

    @property
    def sample(self) -> Examples:
        return self.corpus.train

    def _masked(self, blocks: Examples) -> Examples:
        if not self.masked:
            return blocks
        tokens, mask = mask_vocabulary(self.tokenizer, self.source), self.settings.mask
        return Masked(blocks, tokens, mask.share, mask.whole_words, mask.static, self.seed)

    def plan(self, settings: TrainSettings) -> Plan:
        blocks = len(self.corpus.train)
        schedule = make_schedule(settings, blocks / settings.batch_size)
        order = BatchOrder(blocks, schedule.batch_size, schedule.seed)
        steps_per_pass = blocks / schedule.batch_size
        return Plan(PassOrder(order) if self.masked else order, schedule, steps_per_pass)

    def load(
        self, source: str, *, head: TaskHeadSettings, seed: int = 0, new_head: bool = True
    ) -> Model:
        return load_text_model(source, masked=self.masked, otherwise=self.otherwise)

    def hard(self, signals: Signals, batch: Batch) -> Mapping[str, Tensor]:
        if signals.logits is None:
            return {}
        return {"hard": masked_ce(signals.logits, labels_of(signals))}

    def soft(
        self, teacher: Signals, student: Signals, batch: Batch, temperature: float
    ) -> Mapping[str, Tensor]:
        assert teacher.logits is not None
        assert student.logits is not None
        return {"soft": soft_kl(teacher.logits, student.logits, temperature)}

    def outputs(self, signals: Signals, batch: Batch) -> Tensor | None:
        return signals.logits

    def score(self, model: Model, *, worst: int = 0) -> ModelScores:
        raise UsageError(
            "text has no labels to score a model on", "add --eval-task TASK to compare models"
        )


def load_text_model(source: str, *, masked: bool, otherwise: str, bare: bool = False) -> Model:
    """Load an encoder, or a masked language model for losses on masked text.

    Args:
        source: The model.
        masked: Load a masked language model.
        otherwise: Hint of the error for a model without a masked-language-model head.
        bare: Accept a model without a masked-language-model head.

    Raises:
        UsageError: The model cannot be loaded, or has no masked-language-model head.
    """
    if not masked:
        return load_encoder(source)
    return load_masked_lm(source, otherwise=otherwise, bare=bare)


def read_corpus(settings: TrainingData, tokenizer: PreTrainedTokenizerBase) -> Corpus:
    """Tokenise the text, unless its blocks are cached, and open the blocks."""
    return open_corpus(
        settings.text,
        tokenizer,
        max_length=settings.block_length,
        column=settings.column,
        share=settings.share,
        held_out_blocks=settings.held_out_blocks,
        isolated=settings.pack_isolated,
    )


def check_masking(settings: TrainingData, tokenizer: PreTrainedTokenizerBase, source: str) -> None:
    """Check that the tokenizer and the settings can mask text.

    Raises:
        UsageError: The tokenizer has no mask token, or the share of masked tokens is not allowed.
    """
    check_share(settings.mask.share)
    mask_vocabulary(tokenizer, source)
