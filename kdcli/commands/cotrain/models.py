"""The two models that are trained together: from shapes, from weights there are, or from a frozen third one's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForMaskedLM, BertConfig, PreTrainedModel, PreTrainedTokenizerBase

from kdcli.commands.cotrain.plan import ROLES
from kdcli.commands.cotrain.settings import CotrainRecipe
from kdcli.data.text.own_tokenizer import own_tokenizer
from kdcli.errors import UsageError
from kdcli.losses.ctcd import STUDENT, TEACHER
from kdcli.models.layout import layout_for
from kdcli.models.load import LoadedModel, load_config, load_tokenizer
from kdcli.models.masked_lm import load_masked_lm, student_with_head
from kdcli.models.shape import (
    GRAMMAR,
    build_student,
    evenly_spaced_layers,
    is_shape,
    parse_shape,
    positions_of,
    shape_of,
    student_config,
)
from kdcli.training.progress import Progress
from kdcli.types import ModelShape

HEAD_WIDTH = 64
"""Width of an attention head of a BERT, of which a shape without a base has as many as fit."""

NO_LIMIT = 1 << 20
"""Layers and width that no shape exceeds: one that is trained from the start is not bound by that of a base."""

LEAST_POSITIONS = 512
"""Tokens that a model without a base reads, or more where the text asks for it."""


@dataclass(frozen=True)
class Pair:
    """Two masked language models over one vocabulary, by role, and the frozen third one where there is any.

    `notes` say how each began.
    """

    models: dict[str, PreTrainedModel]
    tokenizer: PreTrainedTokenizerBase
    community: LoadedModel | None
    notes: list[str]


@dataclass(frozen=True)
class _Origin:
    """What shapes are completed from."""

    config: Any
    tokenizer: PreTrainedTokenizerBase
    heads: int | None


def load_pair(recipe: CotrainRecipe, *, trust_remote_code: bool) -> Pair:
    """Load or make both models: a pure function of the recipe.

    Raises:
        UsageError: see `kdcli.models.masked_lm.load_masked_lm` and `kdcli.models.shape.parse_shape`; different
            vocabularies; text too long for a model, or packed so that it cannot keep documents apart.
    """
    sources = {TEACHER: str(recipe.teacher), STUDENT: str(recipe.student)}
    community = None
    if recipe.community.model is not None:
        community = _load(recipe.community.model, "the community teacher", trust_remote_code)
    given = {r: _load(s, f"the {r}", trust_remote_code) for r, s in sources.items() if not is_shape(s)}
    origin = _origin(recipe, community, given, trust_remote_code)
    named = [("the base", str(recipe.base), origin.tokenizer, origin.config)] if recipe.base else []
    named += [(f"the {r}", sources[r], m.tokenizer, m.model.config) for r, m in given.items()]
    if community is not None:
        named.append(("the community teacher", community.source, community.tokenizer, community.model.config))
    _check_vocabularies(named)
    shapes = {r: _shape(s, origin) for r, s in sources.items() if r not in given}
    models, notes = {r: m.model for r, m in given.items()}, []
    for role, shape in shapes.items():
        if community is not None:
            models[role], said = _remapped(recipe, community, role, shape, shapes)
        else:
            models[role] = _fresh(origin.config, shape, 2 * recipe.train.seed + ROLES.index(role), trust_remote_code)
            said = "initialised at random"
        notes.append(f"{role}: {shape}, {said}")
    notes += [f"{role}: {shape_of(m.model.config)}, the weights of {m.source}" for role, m in given.items()]
    for role in ROLES:
        _check_text(recipe, role, models[role].config)
    if community is not None:
        _check_text(recipe, "community teacher", community.model.config)
    return Pair({role: models[role] for role in ROLES}, origin.tokenizer, community, sorted(notes, reverse=True))


def _load(source: str, what: str, trust_remote_code: bool) -> LoadedModel:
    otherwise = "co-training needs masked language models; a shape in place of a model starts from the beginning"
    try:
        return load_masked_lm(source, otherwise=otherwise, trust_remote_code=trust_remote_code)
    except UsageError as error:
        raise error.of(what) from None


def _origin(
    recipe: CotrainRecipe, community: LoadedModel | None, given: dict[str, LoadedModel], trust_remote_code: bool
) -> _Origin:
    if recipe.base is not None:
        config = load_config(recipe.base, trust_remote_code=trust_remote_code, weights=False)
        if type(config) not in AutoModelForMaskedLM._model_mapping:
            raise UsageError(f"the base: {config.model_type} has no masked-language-model head in transformers")
        tokenizer = load_tokenizer(recipe.base, trust_remote_code=trust_remote_code)
        return _Origin(config, tokenizer, shape_of(config).heads)
    first = community or next(iter(given.values()), None)
    if first is not None:
        return _Origin(first.model.config, first.tokenizer, first.shape.heads)
    positions = max(LEAST_POSITIONS, recipe.data.max_length)
    tokenizer = own_tokenizer(recipe.data.source, recipe.data.column, recipe.vocab_size, positions, log=Progress.log)
    config = BertConfig(
        vocab_size=len(tokenizer), max_position_embeddings=positions, pad_token_id=tokenizer.pad_token_id
    )
    return _Origin(config, tokenizer, None)


def _shape(text: str, origin: _Origin) -> ModelShape:
    """The shape that a text means under an origin, whose ratio of feed-forward to width and whose heads it takes."""
    of_origin = shape_of(origin.config)
    found = GRAMMAR.fullmatch(text.strip())
    heads = origin.heads or max(1, int(found[2]) // HEAD_WIDTH if found else 1)
    ratio = of_origin.ffn / of_origin.hidden
    return parse_shape(text, ModelShape(NO_LIMIT, NO_LIMIT, round(NO_LIMIT * ratio), heads))


def _fresh(config: Any, shape: ModelShape, seed: int, trust_remote_code: bool) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForMaskedLM.from_config(
            student_config(config, shape), dtype=torch.float32, trust_remote_code=trust_remote_code
        )
    return model.eval()


def _remapped(
    recipe: CotrainRecipe, community: LoadedModel, role: str, shape: ModelShape, shapes: dict[str, ModelShape]
) -> tuple[PreTrainedModel, str]:
    """A model copied from the community teacher's, and how.

    Two copies of the same layers would be one model, and teach each other nothing but their dropout.
    """
    of_teacher, number = community.shape, ROLES.index(role)
    if shape.layers > of_teacher.layers or shape.hidden > of_teacher.hidden:
        raise UsageError(
            f"{shape} is larger than the community teacher {of_teacher}, from which it starts",
            f"at most {of_teacher.layers} layers and width {of_teacher.hidden}",
        )
    layers = recipe.community.layers[number] if recipe.community.layers else None
    if layers is None and number and shapes.get(ROLES[0]) == shape and shape.layers < of_teacher.layers:
        layers = [max(1, n - 1) for n in evenly_spaced_layers(of_teacher.layers, shape.layers)]
    seed = 2 * recipe.train.seed + number
    built = build_student(community.model.base_model, shape, layers=layers, seed=seed)
    headed = student_with_head(community.model, built, seed=seed)
    return headed.model.eval(), "; ".join(headed.notes)


def _check_vocabularies(named: list[tuple[str, str, PreTrainedTokenizerBase, Any]]) -> None:
    """Refuse models that do not read and guess the same words: their logits could not be compared."""
    for what, source, tokenizer, config in named[1:]:
        first_what, first_source, first_tokenizer, first_config = named[0]
        sizes = int(first_config.vocab_size), int(config.vocab_size)
        words, others = first_tokenizer.get_vocab(), tokenizer.get_vocab()
        if words == others and sizes[0] == sizes[1]:
            continue
        differing = len(set(words.items()) ^ set(others.items()))
        raise UsageError(
            f"{first_what} {first_source} and {what} {source} have different vocabularies: {sizes[0]:,} and "
            f"{sizes[1]:,} words, {differing:,} entries differ",
            "take models of one tokenizer, or a shape in place of one of them",
        )


def _check_text(recipe: CotrainRecipe, role: str, config: Any) -> None:
    positions, leaks = positions_of(config), layout_for(config).leaks
    if positions is not None and positions < recipe.data.max_length:
        raise UsageError(
            f"the {role} reads at most {positions} tokens, data.max_length is {recipe.data.max_length}",
            f"set data.max_length={positions} or less",
        )
    if recipe.data.pack_isolated and leaks:
        raise UsageError(
            f"data.pack_isolated: {config.model_type} cannot keep documents apart: {leaks}",
            "set data.pack_isolated=false",
        )
