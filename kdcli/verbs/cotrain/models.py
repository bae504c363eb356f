"""Load or make the two models that are trained together.

They come from shapes, from existing weights, or from a frozen third model.
"""

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import (
    AutoModelForMaskedLM,
    BertConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from kdcli.custom_code import custom_code_allowed
from kdcli.data.text.own_tokenizer import own_tokenizer
from kdcli.errors import UsageError
from kdcli.losses.ctcd import STUDENT_MODEL, TEACHER_MODEL
from kdcli.models import shape as forms
from kdcli.models.capture import Capture
from kdcli.models.files import check_builds
from kdcli.models.grammar import GRAMMAR, is_shape, parse_shape
from kdcli.models.layout import check_packing
from kdcli.models.load import load_config, load_encoder, load_tokenizer, save_model
from kdcli.models.masked_head import load_masked_lm, student_with_head
from kdcli.models.model import Model, all_rows
from kdcli.types import ModelShape, RowHashes, Start
from kdcli.verbs.cotrain.settings import CotrainRecipe
from kdcli.workloads.settings import TaskHeadSettings
from kdcli.workloads.task_models import check_vocabulary
from kdcli.workloads.workload import Workload

PAIR_ROLES = (TEACHER_MODEL, STUDENT_MODEL)

HEAD_WIDTH = 64
"""Width of a BERT's attention head. A shape without a base gets as many heads as fit."""
NO_LIMIT = 1 << 20
"""More layers and width than any shape has: a model from scratch may be larger than its base."""
MIN_POSITIONS = 512
"""Number of positions of a model without a base, unless the text needs more."""


@dataclass(frozen=True)
class ModelPair:
    """The two models that are trained together.

    Attributes:
        models: The models by role.
        notes: How each model starts.
        community: The frozen community teacher; None without one, and always on a task.
    """

    models: dict[str, Model]
    notes: list[str]
    community: Model | None = None

    @property
    def rows(self) -> RowHashes:
        """The labelled rows that any of the models was trained on before."""
        return all_rows(*(m.rows for m in (*self.models.values(), self.community) if m is not None))

    def captured(self, dropout: float | None, workload: Workload) -> dict[str, Capture]:
        """Return both models as modules that return signals. `dropout` sets every dropout rate."""
        for loaded in self.models.values():
            if dropout is not None:
                forms.set_dropout(loaded.model, dropout)
        return {role: workload.capture(loaded) for role, loaded in self.models.items()}


def head_of(recipe: CotrainRecipe, role: str) -> TaskHeadSettings:
    """Return the head settings of a model. The map of the labels belongs to the teacher."""
    if role == TEACHER_MODEL:
        return recipe.head
    return recipe.head.model_copy(update={"label_map": None})


def load_task_pair(recipe: CotrainRecipe, workload: Workload) -> ModelPair:
    """Load both models for a task. Shapes are copied from `base`, or else from the teacher."""
    seed = recipe.train.seed
    models: dict[str, Model] = {}
    notes: list[str] = []
    for number, role in enumerate(PAIR_ROLES):
        source = str(getattr(recipe, role))
        if not is_shape(source):
            model = workload.load(source, head=head_of(recipe, role), seed=seed)
        else:
            base = load_encoder(recipe.base or str(recipe.teacher))
            shape = parse_shape(source, base.shape)
            built = workload.make_student(base, shape, Start(seed=2 * seed + number))
            notes += [f"{role}: {note}" for note in built.notes]
            with tempfile.TemporaryDirectory() as aside:
                save_model(built.model, base.tokenizer, Path(aside), base.rows)
                model = workload.load(aside, head=head_of(recipe, STUDENT_MODEL), seed=seed)
            model = replace(model, source=source)
        if role == STUDENT_MODEL:
            check_vocabulary(models[TEACHER_MODEL], model.tokenizer, source)
        models[role] = model
    return ModelPair(models, notes)


def load_text_pair(
    recipe: CotrainRecipe,
) -> ModelPair:
    """Load or make both masked language models. The result depends on the recipe alone.

    Raises:
        UsageError: A model or a shape cannot be used, the vocabularies differ, or the text is too
            long for a model, or packed in a way that the model cannot read.
    """
    sources = {TEACHER_MODEL: str(recipe.teacher), STUDENT_MODEL: str(recipe.student)}
    third = recipe.community.model
    community = _load(third, "the community teacher") if third is not None else None
    loaded = {r: _load(s, f"the {r}") for r, s in sources.items() if not is_shape(s)}
    config, tokenizer, heads = _origin(recipe, community or next(iter(loaded.values()), None))
    named = [("the base", str(recipe.base), tokenizer, config)] if recipe.base else []
    named += [(f"the {r}", sources[r], m.tokenizer, m.model.config) for r, m in loaded.items()]
    if community is not None:
        named.append(
            ("the community teacher", community.source, community.tokenizer, community.model.config)
        )
    _check_vocabularies(named)
    shapes = {
        r: _shape(s, forms.shape_of(config), heads) for r, s in sources.items() if r not in loaded
    }
    models: dict[str, Model] = {}
    notes = []
    for number, role in enumerate(PAIR_ROLES):
        if role in loaded:
            # Tokenizers with equal vocabularies may still split words differently, so one
            # tokenizer reads the text for both models.
            models[role] = replace(loaded[role], tokenizer=tokenizer)
            start = f"the weights of {sources[role]}"
        else:
            seed, start = 2 * recipe.train.seed + number, "initialised at random"
            if community is not None:
                model, start = _remapped(recipe, community, number, shapes, seed)
            else:
                model = _fresh(config, shapes[role], seed)
            models[role] = Model(model, tokenizer, sources[role])
        own = models[role].model.config
        notes.append(f"{role}: {shapes.get(role) or forms.shape_of(own)}, {start}")
        _check_text(recipe, role, own)
    if community is not None:
        _check_text(recipe, "community teacher", community.model.config)
    return ModelPair(models, notes, community)


def _load(
    source: str,
    name: str,
) -> Model:
    """Load a masked language model. Errors name it as `name`."""
    otherwise = (
        "co-training needs masked language models; give a shape to train a model from scratch"
    )
    try:
        return load_masked_lm(source, otherwise=otherwise)
    except UsageError as error:
        raise error.of(name) from None


def _origin(
    recipe: CotrainRecipe,
    model: Model | None,
) -> tuple[PretrainedConfig, PreTrainedTokenizerBase, int | None]:
    """Return the configuration, the tokenizer and the number of heads for shapes.

    They come from the base, else from `model`, else from a BERT with a tokenizer that is trained
    on the text. The number of heads is None if it depends on the width.
    """
    if recipe.base is not None:
        config = load_config(recipe.base, weights=False)
        if type(config) not in AutoModelForMaskedLM._model_mapping:
            raise UsageError(
                f"the base: {config.model_type} has no masked-language-model head in transformers"
            )
        if not custom_code_allowed():
            check_builds(recipe.base, config, AutoModelForMaskedLM)
        tokenizer = load_tokenizer(recipe.base)
        return config, tokenizer, forms.shape_of(config).heads
    if model is not None:
        return model.model.config, model.tokenizer, model.shape.heads
    tokenizer = tokenizer_of(recipe)
    words, pad, positions = len(tokenizer), tokenizer.pad_token_id, tokenizer.model_max_length
    return (
        BertConfig(vocab_size=words, max_position_embeddings=positions, pad_token_id=pad),
        tokenizer,
        None,
    )


def tokenizer_of(
    recipe: CotrainRecipe,
) -> PreTrainedTokenizerBase:
    """Load or train the tokenizer that reads the text for both models.

    It is the base's, else the first model's, else a tokenizer that is trained on the text.
    """
    sources = [
        recipe.community.model,
        *(s for s in map(str, (recipe.teacher, recipe.student)) if not is_shape(s)),
    ]
    source = recipe.base or next(filter(None, sources), None)
    if source is not None:
        return load_tokenizer(source)
    data, positions = recipe.data, max(MIN_POSITIONS, recipe.data.block_length)
    return own_tokenizer(data.text, data.column, data.share, recipe.vocab_size, positions)


def _shape(text: str, default: ModelShape, heads: int | None) -> ModelShape:
    """Parse a shape, with defaults for the heads and for the feed-forward width."""
    match = GRAMMAR.fullmatch(text.strip())
    heads = heads or max(1, int(match[2]) // HEAD_WIDTH if match else 1)
    ffn = round(NO_LIMIT * default.ffn / default.hidden)
    return parse_shape(text, ModelShape(NO_LIMIT, NO_LIMIT, ffn, heads))


def _fresh(
    config: PretrainedConfig,
    shape: ModelShape,
    seed: int,
) -> PreTrainedModel:
    """Make a model with random weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForMaskedLM.from_config(
            forms.student_config(config, shape),
            dtype=torch.float32,
            trust_remote_code=custom_code_allowed(),
        )
    return model.eval()


def _remapped(
    recipe: CotrainRecipe,
    community: Model,
    number: int,
    shapes: dict[str, ModelShape],
    seed: int,
) -> tuple[PreTrainedModel, str]:
    """Copy a model from the community teacher's layers. Returns the model and a description."""
    shape, above = shapes[PAIR_ROLES[number]], community.shape
    if shape.layers > above.layers or shape.hidden > above.hidden:
        raise UsageError(
            f"{shape} is larger than the community teacher {above}, from which it starts",
            f"at most {above.layers} layers and width {above.hidden}",
        )
    layers = recipe.community.layers[number] if recipe.community.layers else None
    if (
        layers is None
        and number
        and shapes.get(TEACHER_MODEL) == shape
        and shape.layers < above.layers
    ):
        # Two copies of the same layers would only differ by their dropout.
        layers = [max(1, n - 1) for n in forms.evenly_spaced_layers(above.layers, shape.layers)]
    built = forms.build_student(community.model.base_model, shape, Start(layers=layers, seed=seed))
    student = student_with_head(community.model, built, seed=seed)
    return student.model.eval(), "; ".join(student.notes)


def _check_vocabularies(
    named: list[tuple[str, str, PreTrainedTokenizerBase, PretrainedConfig]],
) -> None:
    """Check that all vocabularies are the same, because logits are compared.

    Raises:
        UsageError: Two vocabularies differ.
    """
    for name, source, tokenizer, config in named[1:]:
        first_name, first_source, first_tokenizer, first_config = named[0]
        sizes = int(first_config.vocab_size), int(config.vocab_size)
        words, others = first_tokenizer.get_vocab(), tokenizer.get_vocab()
        if words != others or sizes[0] != sizes[1]:
            differing = len(set(words.items()) ^ set(others.items()))
            raise UsageError(
                f"{first_name} {first_source} and {name} {source} have different vocabularies: "
                f"{sizes[0]:,} and {sizes[1]:,} words, {differing:,} entries differ",
                "choose models with the same tokenizer, or give a shape in place of one of them",
            )


def _check_text(recipe: CotrainRecipe, role: str, config: PretrainedConfig) -> None:
    """Check that a model can read the blocks of text.

    Raises:
        UsageError: The blocks are too long, or the model cannot keep documents apart.
    """
    positions = forms.positions_of(config)
    if positions is not None and positions < recipe.data.block_length:
        raise UsageError(
            f"the {role} reads at most {positions} tokens, but data.max_length is "
            f"{recipe.data.max_length}",
            f"set data.max_length={positions} or less",
        )
    check_packing(config, isolated=recipe.data.pack_isolated)
