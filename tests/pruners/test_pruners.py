"""Contract of every pruning method, through the engine: density, what is trained, resumption, the
model at the end."""

import copy
import math
import re

import hypothesis
import numpy as np
import pytest
import torch
from encoders import tiny_encoder
from hypothesis import strategies as st

from kdcli.engine.run_dir import RunDir
from kdcli.engine.session import Session, start
from kdcli.engine.train import train
from kdcli.errors import UsageError
from kdcli.pruners import build_pruner, check_settings, defaults, methods
from kdcli.pruners.cap import CLASSES, FINETUNED_GRADIENT, PRETRAINED, contrastive
from kdcli.pruners.l0 import hard_concrete_gates
from kdcli.pruners.masked import is_score
from kdcli.pruners.pruner import kept_share, progress, ramp
from kdcli.types import Job, Schedule, StepLoss, Term

CPU, KINDS = torch.device("cpu"), ["bert", "modernbert", "distilbert"]
STEPS, DENSITY = 8, 0.4
# What a few steps of a toy task need; other methods take their defaults.
SETTINGS = {
    **{"smp": {"regularizer": 0.5}, "soft-movement": {"regularizer": 1.0, "threshold": 0.49}},
    **{"l0": {"regularizer": 1.0, "start": -1.0, "score_lr": 0.5}, "cap": {"supervised": 0.1}},
}
LR = {"smp": 5e-2, "l0": 1e-2}


def tiny(kind):
    torch.manual_seed(0)
    return tiny_encoder(kind, **({"num_hidden_layers": 2} if kind == "modernbert" else {}))


class Rows:
    """The class of a row is its first word; one row is padded."""

    def __init__(self):
        self.ids = torch.randint(10, 60, (16, 6), generator=torch.Generator().manual_seed(0))
        self.ids[3, 4:] = 0

    def __len__(self):
        return len(self.ids)

    def batch(self, indices):
        ids = self.ids[torch.from_numpy(np.asarray(indices))]
        return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": ids[:, 0] % 2}


class All:
    def indices(self, step):
        return np.arange(16)


def first_states(model, batch):
    return model(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
    ).last_hidden_state[:, 0]


def task_loss(model, batch):
    to_logits = torch.randn(32, 2, generator=torch.Generator().manual_seed(2)) / 4
    return torch.nn.functional.cross_entropy(
        first_states(model, batch) @ to_logits, batch["labels"]
    )


def trained(method, kind, folder=None, stop_after=None, **settings):
    """A model after some steps of the engine: (model, pruner, weights before, outcome)."""
    model = tiny(kind)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    lr, chosen = LR.get(method, 3e-3), SETTINGS.get(method, {}) | settings
    pruner = build_pruner(method, chosen, model, density=DENSITY, steps=STEPS, lr=lr)
    with torch.no_grad():
        states = first_states(model, Rows().batch(np.arange(16)))
    others = {PRETRAINED: states, FINETUNED_GRADIENT: states.flip(-1)}

    def step(batch):
        terms = {"task": task_loss(model, batch)} | pruner.terms()
        if pruner.contrast is not None and len(batch["labels"]) == 16:
            terms |= pruner.contrast(
                first_states(model, batch), torch.arange(16), others | {CLASSES: batch["labels"]}
            )
        return StepLoss({name: Term(value, "rows") for name, value in terms.items()})

    on = {"param_group": pruner.param_group, "on_step_end": pruner.after}
    job = Job({"model": model}, step, Rows(), All(), None, **on)
    schedule = Schedule(
        STEPS, 16, lr, 0, stop_after=stop_after, micro_batch_size=16, checkpoint_every=100
    )
    run = RunDir.claim(folder, "x: 1\n", resume=True) if folder else None
    outcome = train(Session(start(CPU, torch.float32), CPU), job, schedule, run)
    return model, pruner, before, outcome


@pytest.fixture(scope="module", params=[(m, k) for m in methods() for k in KINDS], ids="-".join)
def case(request):
    return *request.param, *trained(*request.param)


def test_density_is_the_requested_one_and_the_task_is_learned(case):
    method, kind, model, pruner, _, _ = case
    kept, total = sum(pruner.masks.kept().values()), sum(m.numel for m in pruner.masks.matrices)
    if defaults(method).exact:
        assert (pruner.density(0), pruner.density(STEPS)) == (1.0, DENSITY)
        assert abs(kept - DENSITY * total) <= len(pruner.masks.matrices)
    else:
        assert pruner.density is None
        assert 0 < kept < total
    batch = Rows().batch(np.arange(16))
    with torch.no_grad():
        assert task_loss(model.eval(), batch) < task_loss(tiny(kind), batch) - 0.02


def test_only_what_the_method_trains_moves(case):
    _, _, model, pruner, before, _ = case
    moved = set()
    for name, parameter in model.named_parameters():
        plain = name.replace(".parametrizations.weight.original", ".weight")
        if is_score(name):
            moved |= {"scores"} if parameter.count_nonzero() else set()
        elif not torch.equal(parameter, before[plain]):
            moved.add("embeddings" if "embeddings." in plain else "weights")
    trained = {"weights": pruner.trains_weights, "scores": bool(pruner.masks.scores())}
    assert moved == {name for name, moves in trained.items() if moves}


RESUMED = [*((m, "modernbert") for m in methods()), ("smp", "bert"), ("magnitude", "distilbert")]


@pytest.mark.parametrize("case", RESUMED, ids="-".join, indirect=True)
def test_a_resumed_run_has_the_same_scores_and_masks(case, tmp_path):
    method, kind, whole, expected, _, _ = case
    trained(method, kind, tmp_path / "run", stop_after=5)
    model, pruner, _, outcome = trained(method, kind, tmp_path / "run")
    assert outcome.resumed_from_step == 5
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), whole.parameters(), strict=True)
    )
    masks, wanted = pruner.masks.masks(), expected.masks.masks()
    assert all(torch.equal(masks[name], wanted[name]) for name in wanted)


def test_the_folded_model_is_a_stock_one_of_the_same_outputs(case):
    _, kind, trained_model, pruner, _, _ = case
    model, masks = copy.deepcopy((trained_model.eval(), pruner.masks))
    batch, kept = Rows().batch(np.arange(16)), masks.masks()
    with torch.no_grad():
        masked = first_states(model, batch)
        masks.fold()
        assert (first_states(model, batch) - masked).abs().max() <= 1e-6
        assert torch.equal(first_states(trained_model, batch), masked)
    assert model.state_dict().keys() == tiny(kind).state_dict().keys()
    for matrix in masks.matrices:
        assert torch.equal(matrix.of(matrix.linear.weight) != 0, kept[matrix.name])


@pytest.mark.parametrize("masking", ["local", "global", "proportional", "threshold"])
def test_smp_takes_every_masking_function(masking):
    _, pruner, _, _ = trained("smp", "bert", masking=masking, threshold=0.49)
    assert (pruner.density is None) == (masking == "threshold")
    assert 0 < pruner.masks.density() < 1


def test_smp_masks_follow_gradients_and_not_the_order_of_equal_scores():
    _, pruner, _, _ = trained("smp", "bert", warmup_fraction=0.0)
    for name, mask in pruner.masks.masks().items():
        # Ties go to the lowest index, so without gradients the last row would be empty.
        assert mask[-1].any(), name
        assert mask.count_nonzero() < mask.numel()


def bound(method, steps=100, lr=1e-2, **settings):
    return build_pruner(method, settings, tiny("bert"), density=0.1, steps=steps, lr=lr)


def test_the_regularizer_of_smp_rises_with_the_steps_or_with_the_density():
    for schedule, risen in (("steps", 1 - 0.7**3), ("density", 1 - 0.5**3)):
        pruner = bound("smp", regularizer_schedule=schedule)
        pruner.after(0)
        assert pruner.terms()["regularizer"].item() == 0
        pruner.after(30)
        assert pruner.terms()["regularizer"].item() == pytest.approx(400 * risen * 0.5, rel=1e-5)
    assert bound("smp", regularizer=0.0).terms() == {}


def test_the_regularizer_of_smp_may_rise_in_a_part_of_the_steps():
    pruner = bound("smp", regularizer_fraction=0.5)
    for done, risen in ((20, 1 - (1 - 20 / 50) ** 3), (50, 1.0), (80, 1.0)):
        pruner.after(done)
        assert pruner.terms()["regularizer"].item() == pytest.approx(400 * risen * 0.5, rel=1e-5)


def test_scores_and_weights_have_their_own_rates_and_scores_no_decay():
    score = "model.encoder.layer.0.output.dense.parametrizations.weight.0.score"
    weight = "model.encoder.layer.0.output.dense.parametrizations.weight.original"
    for method, lr, expected in (
        ("smp", 2e-2, (1.0, 3e-5 / 2e-2)),
        ("movement", 3e-5, (1e-2 / 3e-5, 1.0)),
    ):
        pruner = bound(method, lr=lr)
        groups = [pruner.param_group(name) for name in (score, weight)]
        assert (defaults(method).lr, groups[0].lr, groups[1].lr) == pytest.approx((lr, *expected))
        assert [group.decayed for group in groups] == [False, True]


def test_magnitude_keeps_the_largest_weights_as_they_change():
    pruner = bound("magnitude")
    matrix = pruner.masks.matrices[0]
    weight, kept = matrix.linear.parametrizations.weight.original, []
    for values in (weight.detach().clone(), torch.arange(32 * 32.0).view(32, 32) - 499.75):
        with torch.no_grad():
            weight.copy_(values)
        pruner.after(100)
        kept.append(pruner.masks.masks()[matrix.name].flatten().nonzero().flatten().tolist())
    # Those of a size above 461, of both signs.
    assert kept[0] != kept[1] == [*range(39), *range(961, 1024)]


def test_the_threshold_of_soft_movement_rises_from_zero():
    pruner = bound("soft-movement", threshold=0.6)
    pruner.after(10)
    assert pruner.masks.density() == 1.0
    pruner.after(100)
    # Equal scores, all below the threshold: one weight a matrix is kept.
    assert set(pruner.masks.kept().values()) == {1}


def test_l0_draws_its_gates_in_training_and_not_in_evaluation():
    model, batch = tiny("bert"), Rows().batch(np.arange(4))
    build_pruner("l0", {}, model, density=0.1, steps=100, lr=1e-2)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    with torch.no_grad():
        same = [first_states(model.eval(), batch) for _ in range(2)]
        drawn = [first_states(model.train(), batch) for _ in range(2)]
    assert torch.equal(*same)
    assert not torch.equal(*drawn)
    assert hard_concrete_gates(
        torch.tensor([-9.0, math.log(1 / 11), 0.0, 9.0])
    ).tolist() == pytest.approx([0, 0, 0.5, 1], abs=1e-6)


def test_contrast_is_the_formula():
    g = torch.Generator().manual_seed(0)
    z, other = (torch.randn(5, 8, generator=g) for _ in range(2))
    labels = torch.tensor([0, 1, 0, 1, 0])
    unit = [torch.nn.functional.normalize(x.double()).numpy() for x in (z, other)]
    exponents = unit[0] @ unit[1].T / 0.1
    log_p = exponents - np.log(np.exp(exponents).sum(1, keepdims=True))
    supervised = -np.mean([log_p[i, labels.numpy() == labels[i].item()].mean() for i in range(5)])
    assert contrastive(z, other, torch.eye(5, dtype=torch.bool), 0.1).item() == pytest.approx(
        -np.diag(log_p).mean()
    )
    whole = {PRETRAINED: other, FINETUNED_GRADIENT: other, CLASSES: labels}
    terms = bound("cap").contrast(z, torch.arange(5), whole)
    assert terms["supervised"].item() == pytest.approx(10 * supervised, rel=1e-5)
    assert terms["unsupervised"].item() == pytest.approx(-0.1 * np.diag(log_p).mean(), rel=1e-5)
    del whole[CLASSES]
    assert set(bound("cap").contrast(z, torch.arange(5), whole)) == {"unsupervised"}


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        (
            "smp",
            {"temprature": 2.0},
            "unknown key 'pruner.temprature' of method smp; did you mean 'pruner.temperature'?",
        ),
        ("smp", {"temperature": 0.0}, "'pruner.temperature' must be greater than 0, got 0.0"),
        (
            "movement",
            {"initial_fraction": 0.7, "final_fraction": 0.6},
            "'pruner': the sum of initial_fraction and final_fraction must not exceed 1",
        ),
    ],
)
def test_wrong_settings_are_refused(method, settings, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        check_settings(method, settings)


def test_settings_that_do_not_fit_the_run_are_refused():
    with pytest.raises(UsageError, match="101, but the run has only 100 steps"):
        bound("smp", warmup_steps=101)
    for density in (0.0, 1.1):
        with pytest.raises(UsageError, match="sparsity of"):
            build_pruner("smp", {}, tiny("bert"), density=density, steps=10, lr=1.0)


def test_the_ramp_is_constant_at_both_ends():
    assert [ramp(t, 100, first=0.1, last=0.2) for t in (0, 10, 45, 80, 100)] == pytest.approx(
        [0, 0, 0.5, 1, 1]
    )
    assert [ramp(t, 100, last=1.0) for t in (0, 1)] == [0, 1]
    assert [ramp(t, 10, first=0.5, last=0.5) for t in (4, 5)] == [0, 1]


def test_cubic_and_linear_densities_are_the_formulas():
    assert [kept_share(0.4, 0.1, kind) for kind in ("cubic", "linear")] == pytest.approx(
        [0.1 + 0.9 * 0.6**3, 0.64]
    )
    assert progress(0.4, "cubic") == pytest.approx(1 - 0.6**3)
    assert [kept_share(p, 0.03, "cubic") for p in (0.0, 1.0)] == [1.0, 0.03]


SHARES = st.floats(0, 0.5)


@hypothesis.settings(max_examples=40)
@hypothesis.given(
    st.integers(1, 50), SHARES, SHARES, st.floats(0.01, 1), st.sampled_from(["cubic", "linear"])
)
def test_density_never_rises_and_ends_at_the_final_one(steps, first, last, final, shape):
    found = [
        kept_share(ramp(t, steps, first=first, last=last), final, shape) for t in range(steps + 1)
    ]
    assert (found, found[-1]) == (sorted(found, reverse=True), final)
    assert found[0] <= 1
