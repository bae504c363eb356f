"""The student that is chosen for a speed-up or a latency, without timing anything."""

from types import SimpleNamespace

import pytest
from transformers import BertConfig

from kdcli.deploy.untrained import UntrainedTimes, choose_shape
from kdcli.errors import GateError, UsageError
from kdcli.models.grammar import SpeedGoal, goal_of, is_shape, parse_goal
from kdcli.models.shape import shape_of


def teacher_of(layers=12, hidden=64, heads=4):
    config = BertConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_attention_heads=heads,
    )
    model = SimpleNamespace(config=config)
    return SimpleNamespace(model=model, shape=shape_of(config), source="teacher")


def measuring(teacher, calls, *, overhead=0.5, best=1.0, noise=None, units=0.0):
    """Times that are linear in layers and in the square of the width.

    `units` is the share of a layer's time that is proportional to its feed-forward units.
    """
    full = teacher.shape

    def ms_of(shape):
        layer = 1 - units + units * shape.ffn / (4 * shape.hidden)
        return overhead + shape.layers * layer * (shape.hidden / full.hidden) ** 2

    def measure(shapes):
        calls.append(list(shapes))
        times = {}
        for name, shape in shapes.items():
            ms = ms_of(shape) * (noise or {}).get(name, 1.0)
            speedup = ms_of(full) / ms
            times[name] = UntrainedTimes(ms, speedup, ms / best, speedup * best)
        return times

    return measure


def choose(goal, teacher, measure, agreement=lambda shape: 0.5):
    return choose_shape(goal, teacher, measure, lambda: agreement)


@pytest.mark.parametrize(
    ("layers", "wanted"),
    [(2, 1.5), (3, 1.1), (3, 2), (6, 1.1), (6, 2), (6, 4), (12, 1.5), (12, 3), (12, 8), (24, 5)],
)
def test_the_student_has_the_most_layers_that_are_fast_enough(layers, wanted):
    teacher, calls = teacher_of(layers), []
    measure = measuring(teacher, calls)
    whole = layers + 0.5
    fast = [n for n in range(1, layers) if whole / (n + 0.5) >= wanted]
    chosen = choose(SpeedGoal(speedup=wanted), teacher, measure)
    assert chosen.name == f"{max(fast)}x64"
    assert not chosen.by_quartile
    # The times are linear, so one guess is right. Two more show that units cost nothing here.
    assert sum(map(len, calls)) <= 6
    assert len({name for names in calls for name in names}) == sum(map(len, calls))


def test_times_that_are_not_on_a_line_still_find_the_most_layers():
    teacher, calls = teacher_of(12), []
    # The fastest layers are far quicker than a line from 1 to 11 layers suggests.
    noise = {f"{n}x64": 0.3 for n in range(2, 9)}
    chosen = choose(SpeedGoal(ms=2.9), teacher, measuring(teacher, calls, noise=noise))
    assert chosen.name == "8x64"


@pytest.mark.parametrize(("wanted", "name"), [(8.5, "1x48"), (12.0, "2x32"), (14.0, "1x32")])
def test_a_narrower_student_only_if_one_layer_is_too_slow(wanted, name):
    teacher, calls = teacher_of(12), []
    chosen = choose(SpeedGoal(speedup=wanted), teacher, measuring(teacher, calls))
    assert chosen.name == name
    assert "1x64" in chosen.times
    assert next(iter(chosen.times)) == "11x64"


def test_the_better_quartiles_decide_where_the_medians_leave_no_shape():
    teacher, calls = teacher_of(2), []
    measure = measuring(teacher, calls, best=2.0)
    # 1x64 is 1.67 times as fast by its median, and 1x32 3.33 times.
    chosen = choose(SpeedGoal(speedup=3.4), teacher, measure)
    assert (chosen.name, chosen.by_quartile) == ("1x48", True)
    assert chosen.times["1x48"].load(SpeedGoal(speedup=3.4)) > 1


def test_a_goal_that_no_student_reaches_names_the_fastest():
    teacher, calls = teacher_of(6), []
    with pytest.raises(GateError, match=r"reaches 50x: the fastest, 1x32, has 8\.67x, 0\.75 ms"):
        choose(SpeedGoal(speedup=50), teacher, measuring(teacher, calls))
    unmeasured = lambda shapes: dict.fromkeys(shapes, UntrainedTimes())  # noqa: E731
    with pytest.raises(GateError, match="not measured"):
        choose(SpeedGoal(ms=5), teacher, unmeasured)


def test_a_teacher_of_one_layer_has_narrower_students_alone():
    teacher, calls = teacher_of(1), []
    assert choose(SpeedGoal(speedup=1.5), teacher, measuring(teacher, calls)).name == "1x32"
    assert calls == [["1x48"], ["1x32"]]
    # Neither three quarters nor half of a width of 1 are whole numbers.
    with pytest.raises(UsageError, match="has no smaller student"):
        choose(SpeedGoal(speedup=2), teacher_of(1, 1, 1), measuring(teacher, calls))


@pytest.mark.parametrize(
    ("text", "goal"),
    [
        ("2x", SpeedGoal(speedup=2.0)),
        (" 1.5x ", SpeedGoal(speedup=1.5)),
        ("5ms", SpeedGoal(ms=5.0)),
        ("0.25ms", SpeedGoal(ms=0.25)),
        *((t, None) for t in ("2x64", "x", "ms", "2.x", "-2x", "1e99x", "static", "2X", "5 ms")),
    ],
)
def test_goals_are_told_from_shapes(text, goal):
    assert parse_goal(text) == goal
    assert goal is None or not is_shape(text)


@pytest.mark.parametrize("text", ["0x", "1x", "0.5x", "0ms", "0.0ms"])
def test_a_goal_must_ask_for_something(text):
    with pytest.raises(UsageError, match=f"^{text} is not (faster|a latency)"):
        parse_goal(text)


@pytest.mark.parametrize("texts", [["2x", "3x64"], ["3x64", "2x"], ["2x", "3x"], ["2x", "static"]])
def test_a_goal_is_given_alone(texts):
    with pytest.raises(UsageError, match="chooses the only shape"):
        goal_of(texts)


@pytest.mark.parametrize("goal", [SpeedGoal(speedup=12.5 / 6.2), SpeedGoal(ms=6.2)])
def test_deeper_students_have_as_many_units_as_are_fast_enough(goal):
    teacher, calls = teacher_of(12), []
    compared = []

    def agreement(shape):
        compared.append(shape)
        return 1 - abs(shape.layers - 7) / 10

    measure = measuring(teacher, calls, units=0.75)
    chosen = choose(goal, teacher, measure, agreement)
    # 0.5 + 12 layers take 12.5 ms, so these goals are the same.
    assert [shape.layers for shape in compared] == [5, 6, 7, 8]
    for shape in compared[1:]:
        step = 256 // 24 - 256 // 24 % 8
        layer = 0.25 + 0.75 * shape.ffn / 256
        wider = 0.25 + 0.75 * (shape.ffn + step) / 256
        assert 0.5 + shape.layers * layer <= 6.2 < 0.5 + shape.layers * wider
    assert chosen.name == f"7x64:{compared[2].ffn}"
    assert chosen.why.startswith("is closest to the teacher")
    assert chosen.times[chosen.name].ms <= 6.2
    (line,) = [line for line in chosen.measured if line.startswith(chosen.name)]
    assert line.endswith(", cosine 1.000")


def test_the_most_layers_win_if_no_deeper_student_agrees_more():
    teacher = teacher_of(12)
    measure = measuring(teacher, [], units=0.75)
    chosen = choose(SpeedGoal(speedup=2), teacher, measure, lambda shape: -shape.layers)
    assert chosen.name == "5x64"


def test_a_deeper_student_that_misses_the_goal_gets_fewer_units():
    teacher = teacher_of(12)
    plain = measuring(teacher, [], units=0.75)

    def measure(shapes):
        times = plain(shapes)
        # Seven layers are slower than the line through the other shapes.
        return {
            name: UntrainedTimes(one.ms * 1.1, one.speedup / 1.1) if "7x" in name else one
            for name, one in times.items()
        }

    chosen = choose(SpeedGoal(speedup=2), teacher, measure, lambda shape: shape.layers == 7)
    seven = [name for name in chosen.times if name.startswith("7x64:")]
    assert len(seven) == 2
    assert chosen.name == seven[1], "the one with fewer units"
    assert chosen.times[seven[0]].speedup < 2 <= chosen.times[seven[1]].speedup
