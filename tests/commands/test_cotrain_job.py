"""Co-training as the engine sees it: one forward a model and step, gradients apart, rates apart, who does not learn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from encoders import tiny_config, tiny_encoder, tiny_tokenizer
from transformers import AutoModelForMaskedLM

from kdcli.commands.cotrain.job import on_text
from kdcli.commands.cotrain.models import load_pair
from kdcli.commands.cotrain.settings import CotrainRecipe
from kdcli.data.text.corpus import open_corpus
from kdcli.errors import UsageError
from kdcli.training.engine import start, train
from kdcli.types import Schedule

CPU = torch.device("cpu")
PLAN = Schedule(steps=6, batch_size=8, lr=1e-3, warmup_steps=0, eval_every=6, checkpoint_every=100)


def masked_model(folder, seed=0, tokenizer=None, **changes):
    torch.manual_seed(seed)
    config = tiny_config("bert", initializer_range=0.3, **changes)
    AutoModelForMaskedLM.from_config(config).save_pretrained(folder)
    (tokenizer or tiny_tokenizer()).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def base(tmp_path):
    return masked_model(tmp_path / "base", num_hidden_layers=4)


@pytest.fixture
def corpus(text_file):
    return open_corpus(
        str(text_file), tiny_tokenizer(), max_length=16, column=None, isolated=False, held_out_blocks=8, log=print
    )


def recipe_of(base, **changes):
    values = {"teacher": "3x32", "student": "2x16@4", "base": base, "data": {"max_length": 16}}
    if "community" in changes:
        values.pop("base")
    return CotrainRecipe.model_validate(values | changes)


def trained(recipe, corpus, schedule=PLAN):
    pair = load_pair(recipe, trust_remote_code=False)
    train(start(CPU, torch.float32), CPU, on_text(pair, corpus, recipe, schedule, CPU, "no"), schedule, None)
    return pair


def weights_of(model):
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


class TestJob:
    def test_dropout_is_that_of_the_recipe_while_they_train_and_the_models_own_when_saved(self, base, corpus):
        def twice(dropout):
            recipe = recipe_of(base, dropout=dropout)
            pair = load_pair(recipe, trust_remote_code=False)
            job = on_text(pair, corpus, recipe, PLAN, CPU, "no")
            for module in job.modules.values():
                module.train()
            batch = job.examples.batch(np.arange(4))
            return [float(job.step(batch).total) for _ in range(2)], pair

        (first, second), pair = twice(0.0)
        assert first == second
        assert {model.config.hidden_dropout_prob for model in pair.models.values()} == {0.1}
        (first, second), _ = twice(None)
        assert first != second

    def test_a_base_needs_no_weights(self, base, corpus):
        (Path(base) / "model.safetensors").unlink()
        assert trained(recipe_of(base), corpus).models.keys() == {"teacher", "student"}

    def test_one_forward_of_each_model_serves_all_terms(self, base, corpus):
        recipe = recipe_of(base, community={"model": base})
        pair = load_pair(recipe, trust_remote_code=False)
        calls = []
        for name, model in [*pair.models.items(), ("frozen", pair.community.model)]:
            model.register_forward_hook(lambda *_, name=name: calls.append(name))
        job = on_text(pair, corpus, recipe, PLAN, CPU, "no")
        calls.clear()
        loss = job.step(job.examples.batch(np.arange(4)))
        assert sorted(calls) == ["frozen", "student", "teacher"]
        expected = [f"student-{n}/{term}" for n in (1, 2) for term in ("hard", "soft", "community")]
        assert list(loss.terms) == expected
        # Weights of 1:1:1:4, and the terms without them.
        factors = torch.tensor([1.0, 4.0, 1.0, 1.0, 1.0, 1.0])
        torch.testing.assert_close(loss.total, (factors * torch.stack(list(loss.terms.values()))).sum())

    @pytest.mark.parametrize(("weights", "moved"), [([0, 1, 0, 0], "student"), ([0, 0, 0, 1], "teacher")])
    def test_what_one_learns_from_the_other_moves_only_the_one(self, base, corpus, weights, moved):
        recipe = recipe_of(base, weights=weights)
        before = {role: weights_of(m) for role, m in load_pair(recipe, trust_remote_code=False).models.items()}
        after = trained(recipe, corpus).models
        for role in before:
            assert same(before[role], weights_of(after[role])) == (role != moved)

    def test_standalone_in_one_loop_is_each_model_alone(self, base, corpus):
        schedule = PLAN
        together = trained(recipe_of(base, mode="standalone"), corpus, schedule)
        for role, weights in (("student", [1, 0, 0, 0]), ("teacher", [0, 0, 1, 0])):
            alone = trained(recipe_of(base, weights=weights), corpus, schedule)
            # Dropout of the second model comes after that of the first, so both run in either case.
            assert same(weights_of(together.models[role]), weights_of(alone.models[role]))
            (other,) = {"teacher", "student"} - {role}
            assert not same(weights_of(together.models[other]), weights_of(alone.models[other]))

    def test_each_model_has_its_rate(self, base, corpus):
        recipe = recipe_of(base, train={"lr": 1e-3, "teacher_lr": 5e-4})
        job = on_text(load_pair(recipe, trust_remote_code=False), corpus, recipe, PLAN, CPU, "no")
        paces = {
            name: job.pace(f"{name}.{path}") for name, m in job.modules.items() for path, _ in m.named_parameters()
        }
        assert {name: pace.lr for name, pace in paces.items()} == {"teacher": 0.5, "student": 1.0}

    def test_the_temperature_is_of_both_softmaxes(self, base, corpus):
        found = []
        for temperature in (1.0, 3.0):
            recipe = recipe_of(base, temperature=temperature)
            job = on_text(load_pair(recipe, trust_remote_code=False), corpus, recipe, PLAN, CPU, "no")
            for module in job.modules.values():
                module.eval()
            found.append(job.step(job.examples.batch(np.arange(4))).terms)
        differing = {name for name in found[0] if not torch.equal(found[0][name], found[1][name])}
        assert differing == {"teacher/soft", "student/soft"}

    def test_what_is_held_out_is_judged_by_the_labels_though_nothing_learns_from_them(self, base, corpus):
        recipe = recipe_of(base, weights=[0, 1, 0, 1])
        job = on_text(load_pair(recipe, trust_remote_code=False), corpus, recipe, PLAN, CPU, "no")
        batch = job.held_out.batch(np.arange(4))
        assert set(job.step(batch).terms) == {"teacher/soft", "student/soft"}
        with torch.no_grad():
            found = job.step(batch)
        assert set(found.terms) == {"teacher/soft", "student/soft", "teacher/hard", "student/hard"}
        torch.testing.assert_close(found.total, found.terms["teacher/soft"] + found.terms["student/soft"])

    def test_a_batch_counts_by_its_masked_tokens(self, base, corpus):
        recipe = recipe_of(base)
        job = on_text(load_pair(recipe, trust_remote_code=False), corpus, recipe, PLAN, CPU, "no")
        batch = job.examples.batch(np.arange(4))
        assert job.batch_weight(batch) == (batch["labels"] != -100).sum() > 0


class TestPair:
    def test_shapes_of_one_seed_begin_alike_and_apart(self, base):
        recipe = recipe_of(base, teacher="2x32", student="2x32")
        one, two = (load_pair(recipe, trust_remote_code=False) for _ in range(2))
        assert same(weights_of(one.models["teacher"]), weights_of(two.models["teacher"]))
        assert not same(weights_of(one.models["teacher"]), weights_of(one.models["student"]))

    def test_a_shape_may_be_larger_than_the_base(self, base):
        model = load_pair(recipe_of(base, teacher="6x64:96@8"), trust_remote_code=False).models["teacher"]
        config = model.config
        assert (config.num_hidden_layers, config.hidden_size, config.intermediate_size) == (6, 64, 96)
        assert (config.num_attention_heads, config.vocab_size) == (8, 64)

    def test_a_directory_starts_from_its_weights(self, base):
        pair = load_pair(recipe_of(None, teacher=base), trust_remote_code=False)
        assert same(weights_of(pair.models["teacher"]), weights_of(AutoModelForMaskedLM.from_pretrained(base)))
        assert pair.models["student"].config.hidden_size == 16

    def test_without_any_model_a_tokenizer_is_trained(self, text_file):
        recipe = recipe_of(None, student="2x16", vocab_size=90, data={"source": str(text_file), "max_length": 600})
        pair = load_pair(recipe, trust_remote_code=False)
        assert {m.config.vocab_size for m in pair.models.values()} == {len(pair.tokenizer)}
        assert pair.models["student"].config.max_position_embeddings == 600
        assert pair.tokenizer("w1 w2")["input_ids"][0] == pair.tokenizer.cls_token_id

    def test_students_of_one_shape_are_remapped_from_neighbouring_layers(self, base):
        recipe = recipe_of(base, teacher="2x32", student="2x32", community={"model": base})
        pair = load_pair(recipe, trust_remote_code=False)
        frozen = pair.community.model.bert.encoder.layer
        for role, layers in (("teacher", (2, 4)), ("student", (1, 3))):
            for mine, n in zip(pair.models[role].bert.encoder.layer, layers, strict=True):
                assert same(weights_of(mine), weights_of(frozen[n - 1]))
            assert same(weights_of(pair.models[role].cls), weights_of(pair.community.model.cls))
        chosen = recipe.community.model_copy(update={"layers": [[1, 2], [3, 4]]})
        other = load_pair(recipe.model_copy(update={"community": chosen}), trust_remote_code=False)
        assert same(weights_of(other.models["teacher"].bert.encoder.layer[1]), weights_of(frozen[1]))

    def test_different_vocabularies_are_named_with_their_sizes(self, base, tmp_path):
        other = masked_model(tmp_path / "other", vocab_size=70)
        with pytest.raises(
            UsageError, match=r"teacher .*base and the student .*other have different .*64 and 70 words"
        ):
            load_pair(recipe_of(None, teacher=base, student=other), trust_remote_code=False)
        with pytest.raises(UsageError, match=r"the student .*other and the community teacher .*base have different"):
            load_pair(recipe_of(None, student=other, community={"model": base}), trust_remote_code=False)

    def test_words_in_another_order_are_another_vocabulary(self, base, tmp_path):
        folder = tmp_path / "other"
        other = masked_model(folder)
        file = folder / "tokenizer.json"
        text = file.read_text("utf-8").replace('"w7"', '"other"').replace('"w8"', '"w7"').replace('"other"', '"w8"')
        file.write_text(text, "utf-8")
        with pytest.raises(UsageError, match="64 and 64 words, 4 entries differ"):
            load_pair(recipe_of(None, teacher=base, student=other), trust_remote_code=False)

    def test_a_community_teacher_needs_its_head(self, tmp_path):
        folder = tmp_path / "encoder"
        tiny_encoder("bert").save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
        with pytest.raises(UsageError, match=r"the community teacher: .* without a masked-language-model head"):
            load_pair(recipe_of(None, community={"model": str(folder)}), trust_remote_code=False)

    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"data": {"max_length": 200}}, "the teacher reads at most 160 tokens"),
            ({"student": "2x30"}, "4 heads do not divide"),
            ({"student": "9x32", "community": True}, "larger than the community teacher"),
            ({"student": "2x32", "community": True, "layers": [[1, 2, 3], [7, 8]]}, "must name 2 of the teacher's"),
        ],
    )
    def test_models_that_cannot_be(self, base, changes, said):
        if changes.pop("community", None):
            changes["community"] = {"model": base, "layers": changes.pop("layers", None)}
        with pytest.raises(UsageError, match=said):
            load_pair(recipe_of(base, **changes), trust_remote_code=False)
