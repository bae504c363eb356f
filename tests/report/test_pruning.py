"""What a pruning left: tables and pictures that hold the numbers of the schema, and the views
around them."""

import re

import pytest
from reports import (
    evaluation,
    made,
    missing,
    model,
    pruned_values,
    sparsities_values,
    words,
)

from kdcli.report.charts.charts import report_pictures
from kdcli.report.charts.drawing import MAX_NUMBERS
from kdcli.report.charts.weight_maps import (
    MAX_RIDGES,
    head_map,
    model_pictures,
    score_ridges,
    type_map,
)
from kdcli.report.schema import Pruning
from kdcli.report.sections.kept_weights import (
    best_pruned,
    kept,
)
from kdcli.report.sections.overview import title
from kdcli.report.text import Picture

pytestmark = pytest.mark.slow


def entry(**changes: object) -> Pruning:
    return Pruning.model_validate(pruned_values(**changes))  # type: ignore[arg-type]


def sparsities_of(*pruning: dict[str, object]):
    values = sparsities_values()
    models = {str(one["model"]): model("pruned", "dense") for one in pruning}
    return made(values, models=models | values["models"], pruning=list(pruning))  # type: ignore[operator]


def test_shares_over_all_count_weights_and_not_matrices():
    small = {"name": "1.Q", "layer": 1, "kind": "Q", "weights": 100, "kept": 100}
    large = {"name": "1.U", "layer": 1, "kind": "U", "weights": 900, "kept": 0}
    one = entry(matrices=[small, large], heads=[[1.0]])
    assert (kept(one), kept(one, kind="U"), kept(one, kind="D")) == (0.1, 0.0, None)


def test_of_several_methods_the_best_comes_first():
    runs = {"0.5": ("smp", 0.5), "0.9": ("smp", 0.9), "0.97": ("movement", 0.9)}
    report = sparsities_of(*(pruned_values(name, s, method=m) for name, (m, s) in runs.items()))
    assert title(report) == "bert-base-uncased on sst2, smp, movement 50 %, 90 %"
    assert best_pruned(report) == "0.9", "the densest is not compared with the others"
    assert "bert-base-uncased with smp 90 % keeps " in words(report)
    # Variants of one method. The method of the first one kept more weights than it was asked for.
    alike = [pruned_values("0.9", 0.9, density=1.0), pruned_values("0.97", 0.9, density=0.1)]
    report = sparsities_of(*alike)
    assert best_pruned(report) == "0.97"
    assert "bert-base-uncased, pruned as 0.97, keeps " in words(report)


def written(picture: Picture | None) -> list[str]:
    """The text in a picture."""
    return [text.strip() for text in re.findall(r"<text[^>]*>([^<]*)</text>", picture.svg)]


def cells_of(picture: Picture | None) -> str:
    """The cells of a map."""
    return re.search(r'<g class="values">(.*?)</g>', picture.svg, re.S)[1]


def test_picture_by_type_writes_every_share():
    one = entry()
    picture = type_map(one)
    texts = written(picture)
    shares = {f"{m.layer}.{m.kind}": 100 * m.kept / m.weights for m in one.matrices}
    assert {f"{x:.1f}" for x in shares.values()} <= set(texts)
    assert (
        texts.count("all"),
        len([text for text in texts if re.fullmatch(r"\d+\.\d", text)]),
    ) == (2, 7 * 7)
    ends = [
        f"{word} {shares[n]:.1f} % ({n})"
        for word, f in (("Least", min), ("most", max))
        for n in [f(shares, key=shares.get)]
    ]
    assert not missing(picture.caption, *ends)


def test_noise_looks_like_noise():
    def spread_of_reds(one: Pruning) -> int:
        reds = [
            int(red, 16) for red in re.findall(r"fill: #([0-9a-f]{2})", cells_of(type_map(one)))
        ]
        return max(reds) - min(reds)

    matrices = [
        {"name": f"1.{k}", "layer": 1, "kind": k, "weights": 1000, "kept": 100 + i}
        for i, k in enumerate("QK")
    ]
    assert spread_of_reds(entry(matrices=matrices, heads=[[0.1]], density=0.1005)) < 15
    assert spread_of_reds(entry()) > 100


def test_picture_of_heads_has_a_cell_a_head(odd):
    few = entry(number_of_heads=4)
    assert {f"{100 * share:.1f}" for row in few.heads for share in row} <= set(
        written(head_map(few))
    )
    (one,) = odd.pruning
    many = head_map(one)
    assert len(one.heads[1]) > MAX_NUMBERS
    assert "Least" in many.caption
    assert len([text for text in written(many) if text.endswith(" %")]) == 5, (
        "a scale instead of numbers"
    )
    assert cells_of(many).count("<path") == sum(map(len, one.heads)) == 6 + 3 * 24
    assert head_map(one.model_copy(update={"heads": []})) is None


def test_scores_are_drawn_at_a_few_steps_and_the_last():
    one = entry()
    steps = [
        int(t.replace(",", ""))
        for t in written(score_ridges(one))
        if re.fullmatch(r"[1-9][\d,]+", t)
    ]
    assert (len(steps), max(steps)) == (MAX_RIDGES, 1000)
    assert 0 not in steps, "all scores are the same before the first step"
    for histograms in (one.histograms[:1], []):
        assert score_ridges(one.model_copy(update={"histograms": histograms})) is None


def test_a_rare_score_does_not_widen_the_picture():
    edges = [float(i) for i in range(-50, 51)]
    counts = [1, *[0] * 48, 50_000, 50_000, *[0] * 48, 1]
    picture = score_ridges(entry(histograms=[{"step": 5, "edges": edges, "counts": counts}]))
    assert "From -1 to 1 at first" in picture.caption


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("share", [0.0, 1.0])
def test_nothing_or_everything_kept(share):
    matrices = [{"name": "1.Q", "layer": 1, "kind": "Q", "weights": 10, "kept": int(10 * share)}]
    assert len(model_pictures(entry(matrices=matrices, heads=[[share, share]], density=share))) == 4


def test_the_curve_of_several_methods_has_a_line_each_with_bars_over_seeds():
    scores = {
        "smp 50 %": 0.91,
        "smp 97 %": 0.85,
        "movement 97 %": 0.8,
        "movement 50 %": 0.9,
    }
    asked = {name: 0.5 if "50" in name else 0.97 for name in scores}
    seeds = {"deviations": {"accuracy": 0.01}, "seeds": 2}
    report = made(
        sparsities_values(),
        models={"dense": model("baseline")} | {n: model("pruned", "dense") for n in asked},
        pruning=[pruned_values(n, s, method=n.split()[0]) for n, s in asked.items()],
        quality={"sst2": {name: {"accuracy": value} for name, value in scores.items()}},
        evaluations=[
            evaluation(name, metrics={"accuracy": value}, **seeds) for name, value in scores.items()
        ],
    )
    shares = [f"{100 * one.density:.3g} %" for one in report.pruning]
    caption = next(p.caption for p in report_pictures(report) if "weights kept" in p.caption)
    assert caption == (
        f"accuracy on sst2 over the weights kept: smp 0.8500 ({shares[1]}), 0.9100 ({shares[0]}); "
        f"movement 0.8000 ({shares[2]}), 0.9000 ({shares[3]}). "
        "Means over seeds; bars: sample standard deviation."
    )
