"""A task's head made of label words instead of trained: static model pruning (https://arxiv.org/abs/2210.06210).

The logit of a class is the dot product of the last [CLS] state with the input embedding of the word that stands for the
class; of question answering, of every token's state with the words of start and end.

As such (`embedding`) it is written into the weights of a stock class of transformers, so that what is saved loads
anywhere. Most such classes transform the state before their classifier, and that transform is given weights that make
it the identity:

* activations that are smooth at 0 see the state scaled down to where they are straight, and the classifier scales back:
  tanh(εx) / ε = x (1 − (εx)² / 3), gelu(εx) · 2/ε = x (1 + 0.8 εx). Both factors are powers of two: nothing is rounded.
* relu sees it shifted to where it is straight, and the classifier's bias takes the shift out again. In bfloat16 a
  shifted state is rounded to 1/16 or 1/8, in float32 to a millionth.
* ModernBERT normalises after its activation: what enters is the state without the weight of the encoder's last norm,
  which the head's own norm applies again.

With the transform of the checkpoint's masked-language-model head before it (`mlm`, as the authors' code has it) it
needs that model's class, of whose vocabulary the label words are left: hardly a class of transformers that classifies
has room for the norm in that transform.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kdcli.errors import UsageError
from kdcli.models.custom_class import custom_class, empty_model, load_tensors
from kdcli.models.heads import AUTO_CLASS, TaskModel, describe_task, load_for_task, tokenizer_for
from kdcli.models.masked_lm import load_masked_lm
from kdcli.models.modeling_kdcli import vocabulary_of_head
from kdcli.types import Task

SMALL = {"tanh": (2.0**-10, 1.0)} | dict.fromkeys(
    ("gelu", "gelu_new", "gelu_fast", "gelu_python", "gelu_pytorch_tanh", "silu", "swish"), (2.0**-14, 0.5)
)
"""Activation → the factor ε that it sees the state with, its slope at 0. Smaller ones leave what float16 holds."""

SHIFT = 16.0
"""What relu sees the state moved up by; last states of encoders that end in a norm lie well within."""

TRANSFORM = {
    **dict.fromkeys(("bert", "ernie", "megatron-bert", "nomic_bert", "rembert"), ("{base}.pooler.dense", "tanh")),
    "albert": ("{base}.pooler", "tanh"),
    **dict.fromkeys(
        ("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "data2vec-text", "roberta-prelayernorm"),
        ("classifier.dense", "tanh"),
    ),
    **dict.fromkeys(("esm", "mpnet"), ("classifier.dense", "tanh")),
    "electra": ("classifier.dense", "gelu"),
    **dict.fromkeys(("convbert", "roformer"), ("classifier.dense", "hidden_act")),
    **dict.fromkeys(("deberta", "deberta-v2"), ("pooler.dense", "pooler_hidden_act")),
    "distilbert": ("pre_classifier", "relu"),
    "eurobert": ("dense", "gelu"),
}
"""Model type → linear before the classifier of texts, and the activation after it or the setting that names that.
Heads of tokens have no transform but ModernBERT's, which has the same one everywhere and is treated apart."""

FIRST_TOKEN = {"modernbert": "cls", "eurobert": "bos"}
"""What `classifier_pooling` has to say for the head to read the first token's state."""

HEAD_DROPOUT = ("classifier_dropout", "classifier_dropout_prob", "seq_classif_dropout", "qa_dropout", "pooler_dropout")


def label_word_ids(tokenizer: PreTrainedTokenizerBase, task: Task, words: Sequence[str] | None = None) -> list[int]:
    """Token ids of a task's label words, one for each output of its head.

    Args:
        words: instead of the task's own, in the order of its labels (of `span`: start, end).

    Raises:
        UsageError: no words, too few or many; one is not exactly one token; two are the same token.
    """
    chosen = tuple(words) if words else task.words
    outputs = {"score": ("its score",), "span": ("start", "end")}.get(task.kind, task.labels)
    needed = f"one for each of {', '.join(outputs)}" if len(outputs) < 10 else f"{len(outputs)}, one a label"
    hint = f"choose {needed}, each one token, in this order: --set head.words='[…]'"
    if not chosen:
        raise UsageError(f"task {task.name} has no label words", f"{hint}; or --set head.kind=scratch")
    if len(chosen) != len(outputs):
        raise UsageError(f"{len(chosen)} label words for the {len(outputs)} outputs of task {task.name}", hint)
    found: dict[int, str] = {}
    for word in chosen:
        pieces = _pieces(tokenizer, word)
        number = tokenizer.convert_tokens_to_ids(pieces)[0] if len(pieces) == 1 else None
        if number is None or number == tokenizer.unk_token_id:
            said = f"is {len(pieces)} tokens ({' '.join(pieces)})" if len(pieces) > 1 else "is not in its vocabulary"
            raise UsageError(
                f"label word '{word}' of task {task.name} {said}: this tokenizer has no token for it", hint
            )
        if number in found:
            raise UsageError(f"label words '{found[number]}' and '{word}' are the same token {pieces[0]}", hint)
        found[number] = word
    return list(found)


def _pieces(tokenizer: PreTrainedTokenizerBase, word: str) -> list[str]:
    """A word as it stands in a text, after a space.

    Byte-level tokenizers hold the space in the word's first piece. One of SentencePiece that keeps spaces makes a piece
    of its own of it, unless the word begins the text.
    """
    pieces = tokenizer.tokenize(f" {word}")
    if len(pieces) > 1 and not pieces[0].startswith("Ġ"):
        return list(tokenizer.tokenize(word))
    return list(pieces)


def load_with_label_words(
    source: str,
    task: Task,
    *,
    kind: Literal["embedding", "mlm"],
    words: Sequence[str] | None = None,
    seed: int,
    trust_remote_code: bool = False,
) -> TaskModel:
    """Load an encoder under a frozen head of label words (`requires_grad` is off), without any dropout of its own.

    Args:
        source: hub id, directory or `demo`.
        kind: `embedding`: logits are dot products with input embeddings, as they are. `mlm`: those of the checkpoint's
            masked-language-model head at the label words.
        words: instead of the task's own, see `label_word_ids`.
        seed: of weights that the checkpoint lacks and the head does not read.

    Raises:
        UsageError: see `kdcli.models.heads.load_for_task` and `label_word_ids`; embeddings of another width than the
            states; a type or checkpoint whose head cannot be made so.
    """
    if kind == "mlm":
        return _under_mlm(source, task, words, trust_remote_code)
    headed = load_for_task(source, task, new_head=True, own_head=False, seed=seed, trust_remote_code=trust_remote_code)
    ids = label_word_ids(headed.tokenizer, task, words)
    model = headed.model
    _from_embeddings(source, model, _classifier(model, len(ids)), ids, texts=task.kind not in ("tokens", "span"))
    pooling = FIRST_TOKEN.get(str(model.config.model_type))
    if pooling is not None:
        model.config.classifier_pooling = pooling
        if hasattr(model, "classifier_pooling"):
            model.classifier_pooling = pooling
    _without_dropout(model)
    return replace(headed, note=_note(kind, headed.tokenizer, ids))


def _note(kind: str, tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    said = ", ".join(str(token) for token in tokenizer.convert_ids_to_tokens(ids))
    return f"a frozen head of label words ({kind}): {said}"


def _outside(model: PreTrainedModel) -> list[nn.Module]:
    inside = {id(m) for m in model.base_model.modules()}
    return [m for m in model.modules() if id(m) not in inside]


def _classifier(model: PreTrainedModel, outputs: int) -> nn.Linear:
    linears = [m for m in _outside(model) if isinstance(m, nn.Linear)]
    if not linears or linears[-1].out_features != outputs:
        raise UsageError(
            f"the head of {type(model).__name__} cannot be made of label words", "train one: --set head.kind=scratch"
        )
    return linears[-1]


@torch.no_grad()
def _from_embeddings(source: str, model: PreTrainedModel, head: nn.Linear, ids: list[int], *, texts: bool) -> None:
    embeddings = model.get_input_embeddings().weight
    if embeddings.shape[1] != head.in_features:
        raise UsageError(
            f"the embeddings of {source} are {embeddings.shape[1]} wide and its states {head.in_features}, "
            "so label words give no head",
            "train one: --set head.kind=scratch",
        )
    rows_CD = embeddings[ids].clone()
    if model.config.model_type == "modernbert":
        scale, shift = _identity_with_norm(source, model), 0.0
    elif texts:
        scale, shift = _identity(model)
    else:
        scale, shift = 1.0, 0.0
    head.weight.copy_(rows_CD / scale)
    _set_bias(head, rows_CD.sum(1) * -shift)
    head.requires_grad_(False)


def _identity(model: PreTrainedModel) -> tuple[float, float]:
    """Make the transform before the classifier `x · scale + shift`."""
    kind = str(model.config.model_type)
    if kind not in TRANSFORM:
        raise UsageError(
            f"the head of {type(model).__name__} cannot be made of label words", "train one: --set head.kind=scratch"
        )
    path, activation = TRANSFORM[kind]
    activation = str(getattr(model.config, activation, activation))
    dense = model.get_submodule(path.format(base=model.base_model_prefix))
    assert isinstance(dense, nn.Linear)
    if activation not in (*SMALL, "relu"):
        raise UsageError(
            f"the head of {type(model).__name__} has activation {activation}, which cannot be made the identity",
            f"train one: --set head.kind=scratch; known: relu, {', '.join(SMALL)}",
        )
    factor, slope = SMALL.get(activation, (1.0, 1.0))
    shift = 0.0 if activation in SMALL else SHIFT
    nn.init.eye_(dense.weight).mul_(factor)
    _set_bias(dense, torch.full((dense.out_features,), shift))
    dense.requires_grad_(False)
    return factor * slope, shift


def _identity_with_norm(source: str, model: PreTrainedModel) -> float:
    """Make ModernBERT's dense, activation and norm the identity on what left the encoder's last norm.

    A normalised state lies within ± √D, and its mean is 0, so the norm takes out what it was shifted by.
    """
    last, head = model.base_model.get_submodule("final_norm"), model.get_submodule("head")
    dense, norm = head.get_submodule("dense"), head.get_submodule("norm")
    assert isinstance(last, nn.LayerNorm)
    assert isinstance(norm, nn.LayerNorm)
    assert isinstance(dense, nn.Linear)
    if not last.weight.all():
        raise UsageError(f"the last norm of {source} has weights of 0, so label words give no head")
    offset_D = torch.full_like(last.weight, math.sqrt(last.weight.numel()) + 8)
    dense.weight.copy_((1 / last.weight).diag())
    norm.weight.copy_(last.weight)
    if last.bias is not None:
        offset_D -= last.bias / last.weight
        norm.bias.copy_(last.bias)
    _set_bias(dense, offset_D)
    model.config.classifier_bias = True
    head.requires_grad_(False)
    return 1.0


def _under_mlm(source: str, task: Task, words: Sequence[str] | None, trust_remote_code: bool) -> TaskModel:
    """The checkpoint's masked language model with the label words for a vocabulary: no other logit is computed."""
    loaded = load_masked_lm(
        source, otherwise="use the words' embeddings: --set head.kind=embedding", trust_remote_code=trust_remote_code
    )
    whole, tokenizer = loaded.model, tokenizer_for(source, of_words=task.kind == "tokens")
    ids = label_word_ids(tokenizer, task, words)
    config: Any = copy.deepcopy(whole.config)
    describe_task(config, task)
    config.label_words = {"ids": ids, "auto_class": AUTO_CLASS[task.kind].__name__}
    config.architectures = [f"LabelWords{type(whole).__name__}"]
    of_class = custom_class(config)
    assert of_class is not None
    tensors = whole.state_dict()
    chosen = torch.tensor(ids)
    for name, parameter in vocabulary_of_head(whole).items():
        place = list(parameter.shape).index(config.vocab_size)
        tensors[name] = parameter.detach().index_select(place, chosen)
    model = load_tensors(empty_model(of_class, config), tensors, whole.base_model)
    inside = {id(p) for p in model.base_model.parameters()}
    for parameter in model.parameters():
        if id(parameter) not in inside:
            parameter.requires_grad_(False)
    _without_dropout(model)
    return TaskModel(model, tokenizer, source, _note("mlm", tokenizer, ids))


def _set_bias(linear: nn.Linear, bias: Tensor) -> None:
    linear.bias = nn.Parameter(bias.clone())


def _without_dropout(model: PreTrainedModel) -> None:
    for name in HEAD_DROPOUT:
        if hasattr(model.config, name):
            setattr(model.config, name, 0.0)
    for module in _outside(model):
        if isinstance(module, nn.Dropout):
            module.p = 0.0
