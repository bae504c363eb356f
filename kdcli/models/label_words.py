"""Make a task's head from label words instead of training it.

The method is static model pruning (https://arxiv.org/abs/2210.06210). There are two kinds of head.

`embedding`: a class's logit is the dot product of the last [CLS] state with the input embedding of
the word for that class. For question answering, it is the dot product of every token's state with
the embeddings of the words for start and end. The head is written into the weights of a stock
class, so that the saved model loads anywhere. Most such classes transform the state before their
classifier, so that transform is made the identity:

* An activation that is smooth at 0 gets the state scaled down to where it is linear, and the
  classifier scales it back: tanh(εx) / ε = x (1 - (εx)² / 3), gelu(εx) · 2/ε = x (1 + 0.8 εx). Both
  factors are powers of two, so nothing is rounded.
* relu gets the state shifted to where it is linear, and the classifier's bias undoes the shift. In
  bfloat16 a shifted state is rounded to 1/16 or 1/8, in float32 to a millionth.
* ModernBERT normalises after its activation. Its dense layer divides by the weight of the encoder's
  last norm, and the head's own norm multiplies by that weight again.

`mlm`: the logits come from the checkpoint's masked-language-model head at the label words, as in
the authors' code. This kind needs that model's class, with its vocabulary cut to the label words
(`kdcli.models.modeling_kdcli`).
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kdcli.errors import UsageError
from kdcli.models.custom_class import custom_class, empty_model, load_tensors
from kdcli.models.heads import (
    AUTO_CLASS,
    describe_task,
    load_for_task,
    modules_of_head,
    tokenizer_for,
)
from kdcli.models.layout import layout_for, submodule
from kdcli.models.masked_head import load_masked_lm
from kdcli.models.model import Model, return_token_types
from kdcli.models.modeling_kdcli import vocabulary_of_head
from kdcli.types import Task

_LIKE_GELU = ("gelu", "gelu_new", "gelu_fast", "gelu_python", "gelu_pytorch_tanh", "silu", "swish")
# Maps an activation to the factor ε on its input and its slope at 0. A smaller ε would underflow in
# float16.
SMOOTH_ACTIVATIONS = {"tanh": (2.0**-10, 1.0)} | dict.fromkeys(_LIKE_GELU, (2.0**-14, 0.5))
SHIFT = 16.0  # shift of relu's input: the last states of encoders that end in a norm are smaller
HEAD_DROPOUT = (
    "classifier_dropout",
    "classifier_dropout_prob",
    "seq_classif_dropout",
    "qa_dropout",
    "pooler_dropout",
)
TRAIN_ONE = "train a head instead: --set head.kind=scratch"


def label_word_ids(
    tokenizer: PreTrainedTokenizerBase, task: Task, words: Sequence[str] | None = None
) -> list[int]:
    """Return the token ids of a task's label words, or of `words`, one for each output of the head.

    Raises UsageError if there are no words or the wrong number of words, if a word is not exactly
    one token, or if two words are the same token.
    """
    chosen = tuple(words) if words else task.words
    outputs = {"score": ("its score",), "span": ("start", "end")}.get(task.kind, task.labels)
    needed = (
        f"one for each of {', '.join(outputs)}"
        if len(outputs) < 10
        else f"{len(outputs)}, one for each label"
    )
    hint = f"choose words of one token, {needed}, in this order: --set head.words='[...]'"
    if not chosen:
        raise UsageError(f"{task.title} has no label words", f"{hint}; or --set head.kind=scratch")
    if len(chosen) != len(outputs):
        raise UsageError(
            f"{len(chosen)} label words for the {len(outputs)} outputs of {task.title}", hint
        )
    words_of: dict[int, str] = {}
    for word in chosen:
        pieces: list[str] = tokenizer.tokenize(f" {word}")
        # Byte-level tokenizers keep the space in the first piece. Some SentencePiece tokenizers
        # make the space its own piece, except before the first word of a text.
        if len(pieces) > 1 and not pieces[0].startswith("Ġ"):
            pieces = tokenizer.tokenize(word)
        number = tokenizer.convert_tokens_to_ids(pieces)[0] if len(pieces) == 1 else None
        if number is None or number == tokenizer.unk_token_id:
            reason = (
                f"is {len(pieces)} tokens ({' '.join(pieces)})"
                if len(pieces) > 1
                else "is not in the tokenizer's vocabulary"
            )
            raise UsageError(f"label word '{word}' of {task.title} {reason}", hint)
        if number in words_of:
            raise UsageError(
                f"label words '{words_of[number]}' and '{word}' are the same token {pieces[0]}",
                hint,
            )
        words_of[number] = word
    return list(words_of)


def load_with_label_words(
    source: str,
    task: Task,
    *,
    kind: Literal["embedding", "mlm"],
    words: Sequence[str] | None = None,
    seed: int,
) -> Model:
    """Load an encoder with a frozen head of label words and without dropout.

    * `kind`: `embedding` or `mlm`, as the module's docstring explains.
    * `words`: words to use instead of the task's own.
    * `seed`: the seed of weights that the checkpoint lacks and the head does not read.

    The head's parameters have `requires_grad` off. Raises UsageError if the model cannot be loaded,
    if a label word is missing or not a single token, or if the model type or the checkpoint cannot
    have such a head.
    """
    if kind == "mlm":
        headed, ids = _from_mlm(source, task, words)
    else:
        headed = load_for_task(source, task, new_head=True, own_head=False, seed=seed)
        ids = label_word_ids(headed.tokenizer, task, words)
        _from_embeddings(headed, ids, texts=task.kind not in ("tokens", "span"))
    model = headed.model
    for name in HEAD_DROPOUT:
        if hasattr(model.config, name):
            setattr(model.config, name, 0.0)
    for module in modules_of_head(model):
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return_token_types(model.config, headed.tokenizer)
    tokens = ", ".join(map(str, headed.tokenizer.convert_ids_to_tokens(ids)))
    return replace(headed, note=f"a frozen head of label words ({kind}): {tokens}")


def _impossible(model: PreTrainedModel) -> UsageError:
    return UsageError(
        f"the head of {type(model).__name__} cannot be made of label words", TRAIN_ONE
    )


@torch.no_grad()
def _from_embeddings(headed: Model, ids: list[int], *, texts: bool) -> None:
    """Write the embeddings of the label words into the classifier.

    With `texts`, the classifier reads one state per text.
    """
    model = headed.model
    linears = [m for m in modules_of_head(model) if isinstance(m, nn.Linear)]
    if not linears or linears[-1].out_features != len(ids):
        raise _impossible(model)
    classifier, embeddings = linears[-1], model.get_input_embeddings().weight
    if embeddings.shape[1] != classifier.in_features:
        raise UsageError(
            f"the embeddings of {headed.source} have width {embeddings.shape[1]}, but its states "
            f"have width {classifier.in_features}, so label words cannot be its head",
            TRAIN_ONE,
        )
    rows_CD = embeddings[ids].clone()
    scale = 1.0
    shift = 0.0
    layout = layout_for(model.config)
    if layout.head_norm:
        _identity_with_norm(headed.source, model)
    elif texts:
        scale, shift = _identity(model, layout.head)
    classifier.weight.copy_(rows_CD / scale)
    _set_bias(classifier, rows_CD.sum(1) * -shift)
    classifier.requires_grad_(False)
    if layout.pooling is not None:
        model.config.classifier_pooling = layout.pooling
        if hasattr(model, "classifier_pooling"):
            model.classifier_pooling = layout.pooling


def _identity(model: PreTrainedModel, head: tuple[str, str] | None) -> tuple[float, float]:
    """Make the transform before the classifier x -> x · scale + shift; return scale and shift."""
    if head is None:
        raise _impossible(model)
    dense = submodule(model, head[0].format(base=model.base_model_prefix))
    activation = str(getattr(model.config, head[1], head[1]))
    if activation not in (*SMOOTH_ACTIVATIONS, "relu"):
        raise UsageError(
            f"the head of {type(model).__name__} has activation {activation}, which cannot be made "
            "the identity",
            f"{TRAIN_ONE}; supported activations: relu, {', '.join(SMOOTH_ACTIVATIONS)}",
        )
    factor, slope = SMOOTH_ACTIVATIONS.get(activation, (1.0, 1.0))
    shift = 0.0 if activation in SMOOTH_ACTIVATIONS else SHIFT
    nn.init.eye_(dense.weight).mul_(factor)
    _set_bias(dense, torch.full((dense.out_features,), shift))
    dense.requires_grad_(False)
    return factor * slope, shift


def _identity_with_norm(source: str, model: PreTrainedModel) -> None:
    """Make ModernBERT's dense layer, activation and norm the identity.

    The input is the output of the encoder's last norm.
    """
    last = submodule(model.base_model, "final_norm")
    head = submodule(model, "head")
    if not last.weight.all():
        raise UsageError(
            f"the last norm of {source} has weights of 0, so label words cannot be its head",
            TRAIN_ONE,
        )
    # A normalised state lies within ±√D, so this shift makes it positive. Its mean is 0, so the
    # norm undoes the shift.
    offset_D = torch.full_like(last.weight, math.sqrt(last.weight.numel()) + 8)
    head.dense.weight.copy_((1 / last.weight).diag())
    head.norm.weight.copy_(last.weight)
    if last.bias is not None:
        offset_D -= last.bias / last.weight
        head.norm.bias.copy_(last.bias)
    _set_bias(head.dense, offset_D)
    model.config.classifier_bias = True
    head.requires_grad_(False)


def _from_mlm(source: str, task: Task, words: Sequence[str] | None) -> tuple[Model, list[int]]:
    """Load the checkpoint's masked language model with the label words as its vocabulary.

    Returns the model and the token ids of the words.
    """
    hint = "use the words' embeddings: --set head.kind=embedding"
    loaded = load_masked_lm(source, otherwise=hint)
    masked_lm = loaded.model
    tokenizer = tokenizer_for(source, of_words=task.kind == "tokens")
    ids = label_word_ids(tokenizer, task, words)
    config = copy.deepcopy(masked_lm.config)
    describe_task(config, task)
    config.label_words = {"ids": ids, "auto_class": AUTO_CLASS[task.kind].__name__}
    config.architectures = [f"LabelWords{type(masked_lm).__name__}"]
    model_class = custom_class(config)
    assert model_class is not None
    tensors = masked_lm.state_dict()
    for name, parameter in vocabulary_of_head(masked_lm).items():
        dim = list(parameter.shape).index(config.vocab_size)
        tensors[name] = parameter.detach().index_select(dim, torch.tensor(ids))
    model = load_tensors(empty_model(model_class, config), tensors, masked_lm.base_model)
    for parameter in set(model.parameters()) - set(model.base_model.parameters()):
        parameter.requires_grad_(False)
    return Model(model, tokenizer, source, "", rows=loaded.rows), ids


def _set_bias(linear: nn.Linear, bias: Tensor) -> None:
    linear.bias = nn.Parameter(bias.clone())
