"""The job of a co-training: one forward pass per model and step, separate gradients and rates; how
the pair starts."""

from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from encoders import on_disk, tiny_config, tiny_encoder, tiny_tokenizer
from transformers import AutoModelForMaskedLM

from kdcli.data.text.corpus import open_corpus
from kdcli.engine.session import Session
from kdcli.engine.train import train
from kdcli.errors import UsageError
from kdcli.types import Schedule
from kdcli.verbs.cotrain.models import load_text_pair
from kdcli.verbs.cotrain.run import pair_job
from kdcli.verbs.cotrain.settings import CotrainRecipe
from kdcli.workloads.blocks import TextWorkload

SCHEDULE = Schedule(
    steps=6, batch_size=8, lr=1e-3, warmup_steps=0, eval_every=6, checkpoint_every=100
)


def masked_model(folder, **changes):
    torch.manual_seed(0)
    model = AutoModelForMaskedLM.from_config(tiny_config("bert", initializer_range=0.3, **changes))
    return str(on_disk(model, folder))


@pytest.fixture
def base(tmp_path):
    return masked_model(tmp_path / "base", num_hidden_layers=4)


@pytest.fixture
def corpus(text_file):
    how = {"max_length": 16, "column": None, "isolated": False, "held_out_blocks": 8}
    return open_corpus(str(text_file), tiny_tokenizer(), **how)


def recipe_of(base, **changes):
    values = {"teacher": "3x32", "student": "2x16@4", "base": base, "data": {"max_length": 16}}
    return CotrainRecipe.model_validate(
        values | ({"base": None} if "community" in changes else {}) | changes
    )


def load(recipe):
    return load_text_pair(recipe)


def job_of(recipe, corpus, pair=None, schedule=SCHEDULE):
    session = Session(Accelerator(cpu=True), torch.device("cpu"))
    pair = pair or load(recipe)
    tokenizer = pair.models["student"].tokenizer
    workload = TextWorkload(session, corpus, recipe.data, tokenizer, "base", seed=schedule.seed)
    train = {name: getattr(schedule, name) for name in ("lr", "batch_size", "seed")}
    own = recipe.train.model_copy(update=train)
    return pair_job(recipe.model_copy(update={"train": own}), workload, pair)[0]


def trained(recipe, corpus):
    pair = load(recipe)
    session = Session(Accelerator(cpu=True), torch.device("cpu"))
    train(session, job_of(recipe, corpus, pair), SCHEDULE, None)
    return models_of(pair)


def models_of(pair):
    return {role: loaded.model for role, loaded in pair.models.items()}


def weights_of(model):
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


class TestJob:
    def test_the_recipe_sets_dropout_in_training_and_the_saved_models_keep_their_own(
        self, base, corpus
    ):
        def twice(dropout):
            recipe = recipe_of(base, dropout=dropout)
            pair = load(recipe)
            job = job_of(recipe, corpus, pair)
            for module in job.modules.values():
                module.train()
            batch = job.examples.batch(np.arange(4))
            return [job.step(batch).total.item() for _ in range(2)], models_of(pair)

        (first, second), models = twice(0.0)
        assert first == second
        assert {model.config.hidden_dropout_prob for model in models.values()} == {0.1}
        (first, second), _ = twice(None)
        assert first != second

    def test_a_base_needs_no_weights(self, base, corpus):
        (Path(base) / "model.safetensors").unlink()
        assert trained(recipe_of(base), corpus).keys() == {"teacher", "student"}

    @pytest.mark.parametrize(
        ("weights", "moved"), [([0, 1, 0, 0], "student"), ([0, 0, 0, 1], "teacher")]
    )
    def test_a_soft_term_moves_only_the_model_that_learns(self, base, corpus, weights, moved):
        recipe = recipe_of(base, weights=weights)
        before = {role: weights_of(model) for role, model in models_of(load(recipe)).items()}
        for role, model in trained(recipe, corpus).items():
            assert same(before[role], weights_of(model)) == (role != moved)


class TestPair:
    def test_a_seed_fixes_both_models_and_they_differ(self, base):
        recipe = recipe_of(base, teacher="2x32", student="2x32")
        one, two = (models_of(load(recipe)) for _ in range(2))
        assert same(weights_of(one["teacher"]), weights_of(two["teacher"]))
        assert not same(weights_of(one["teacher"]), weights_of(one["student"]))

    def test_students_of_one_shape_copy_neighbouring_layers(self, base):
        recipe = recipe_of(base, teacher="2x32", student="2x32", community={"model": base})
        pair = load(recipe)
        frozen = pair.community.model
        for role, layers in (("teacher", (2, 4)), ("student", (1, 3))):
            model = models_of(pair)[role]
            for mine, n in zip(model.bert.encoder.layer, layers, strict=True):
                assert same(weights_of(mine), weights_of(frozen.bert.encoder.layer[n - 1]))
            assert same(weights_of(model.cls), weights_of(frozen.cls))
        chosen = recipe.community.model_copy(update={"layers": [[1, 2], [3, 4]]})
        teacher = models_of(load(recipe.model_copy(update={"community": chosen})))["teacher"]
        assert same(
            weights_of(teacher.bert.encoder.layer[1]), weights_of(frozen.bert.encoder.layer[1])
        )

    def test_different_vocabularies_are_named_with_their_sizes(self, base, tmp_path):
        other = masked_model(tmp_path / "other", vocab_size=70)
        with pytest.raises(
            UsageError,
            match=r"teacher .*base and the student .*other have different .*64 and 70 words",
        ):
            load(recipe_of(None, teacher=base, student=other))
        with pytest.raises(
            UsageError, match=r"the student .*other and the community teacher .*base have different"
        ):
            load(recipe_of(None, student=other, community={"model": base}))

    def test_words_in_another_order_are_another_vocabulary(self, base, tmp_path):
        other = masked_model(tmp_path / "other")
        file = tmp_path / "other" / "tokenizer.json"
        text = (
            file.read_text("utf-8")
            .replace('"w7"', '"other"')
            .replace('"w8"', '"w7"')
            .replace('"other"', '"w8"')
        )
        file.write_text(text, "utf-8")
        with pytest.raises(UsageError, match="64 and 64 words, 4 entries differ"):
            load(recipe_of(None, teacher=base, student=other))

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"data": {"max_length": 200}}, "the teacher reads at most 160 tokens"),
            ({"student": "2x30"}, "4 heads do not divide"),
            ({"student": "9x32", "community": "base"}, "larger than the community teacher"),
            (
                {"student": "2x32", "community": "base", "layers": [[1, 2, 3], [7, 8]]},
                "must name 2 of the teacher's",
            ),
            (
                {"community": "encoder"},
                "the community teacher: .* without a masked-language-model head",
            ),
        ],
    )
    def test_models_that_do_not_fit(self, base, tmp_path, changes, message):
        on_disk(tiny_encoder("bert"), tmp_path / "encoder")
        if "community" in changes:
            community = {
                "model": str(tmp_path / changes["community"]),
                "layers": changes.get("layers"),
            }
            changes = {"student": changes.get("student", "2x16@4"), "community": community}
        with pytest.raises(UsageError, match=message):
            load(recipe_of(base, **changes))
