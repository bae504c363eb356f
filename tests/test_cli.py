"""The command line: its words are frozen, its help is quick to think, its errors have exit
codes."""

import errno
import importlib.util
import json
import logging
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from unittest import mock

import accelerate.tracking
import pytest
import typer
from forked import free_port
from hub_server import Hub
from typer.testing import CliRunner

import kdcli
from kdcli import errors
from kdcli.cli import app
from kdcli.cli.app import FEW_FILES, LITTLE_MEMORY, Verbs
from kdcli.cli.libraries import prepare_libraries
from kdcli.cli.parameters import VALUES
from kdcli.cli.verb import pinned
from kdcli.models.source import check_source
from kdcli.recipe.sections import TRACKER_NAMES
from kdcli.version import full_version

# Verb -> its options, next to those that all verbs have.
OPTIONS = {
    "compress": (
        "--budget --cascade --data --device --front --max-class-drop --max-drop --max-latency-ms "
        "--max-mb -o --output-dir --overwrite --pooling --price-per-hour --processes -r --recipe "
        "--resume "
        "--revision --seed --set --speedup --strict --strict-data --task --trust-remote-code"
    ),
    "distill": (
        "--ablate --also-teacher --assistant --augment --augment-model --augment-only --backend "
        "--batch-size --corpus --data --device --dry-run --dtype --epochs --eval-task --general "
        "--glove --lr --max-steps --method --no-augment -o --output-dir --overwrite --pooling "
        "--processes --push-to-hub -r --recipe --report-to --resume --revision --seed --set "
        "--soft-labels --strict-data --student --task --teacher --teacher-vectors --to "
        "--trust-remote-code"
    ),
    "prune": (
        "--ablate --batch-size --data --device --dry-run --dtype --epochs --eval-task --lr "
        "--masking --max-steps --method -o --output-dir --overwrite --pooling --processes "
        "--push-to-hub -r --recipe --report-to --resume --revision --seed --seeds --set "
        "--sparsity --strict-data --task --teacher --trust-remote-code"
    ),
    "cotrain": (
        "--ablate --base --batch-size --community --data --device --dry-run --dtype --epochs "
        "--eval-task --lr --max-steps --mode --no-standalone -o --output-dir --overwrite "
        "--processes -r --recipe --report-to --resume --revision --seed --seeds --set "
        "--standalone --strict-data --task --temperature --trust-remote-code --vocab-size "
        "--weights"
    ),
    "finetune": (
        "--batch-size --data --device --dry-run --dtype --epochs --grid --lr --max-steps --metric "
        "-o --output-dir --overwrite --processes --push-to-hub -r --recipe --report-to --resume "
        "--revision --seed --seeds --set --strict-data --task --trust-remote-code"
    ),
    "evaluate": (
        "--data --device --documents --dtype --mask --max-class-drop --metric --min-metric -o "
        "--output-dir --overwrite --pooling --predictions --processes -r --recipe --revision "
        "--set --strict-data --submission --task --trust-remote-code"
    ),
    "benchmark": (
        "--backend --baseline --batch-size --compare --data --device --dtype --max-latency-ms "
        "--min-speedup -o --output-dir --overwrite --padding --portable --preset --price-per-hour "
        "-r --recipe --revision --seq-len --set --strict --strict-data --task --trust-remote-code"
    ),
    "export": (
        "--data --format --fp16 --int8 --max-drop -o --output-dir --overwrite --pack --pooling "
        "--push-to-hub --q4 --revision --set --steps --strict-data --task --trust-remote-code "
        "--weights"
    ),
    "tokenize": (
        "--column --dry-run -o --output-dir --share --strict-data --tokenizer --trust-remote-code "
        "--workers"
    ),
    "push": "--dry-run --public --with-report",
    "try": "--host --port --teacher --trust-remote-code",
    "adapt": (
        "--data --device --dry-run --encodes --index --index-model -o --output-dir --overwrite "
        "--pooling --push-to-hub --revision --set --strict-data --trust-remote-code"
    ),
    "trim": (
        "--data --device --max-drop -o --output-dir --overwrite --pooling --push-to-hub "
        "--revision --set --strict-data --task --trust-remote-code --vocab-size"
    ),
}
OF_ALL = {"--json", "--quiet", "-q", "--verbose", "-v"}


def command(*path):
    found = typer.main.get_command(app)
    for name in path:
        found = found.commands[name]
    return found


def test_the_verbs_and_their_options_are_frozen():
    assert set(command().commands) == {*OPTIONS, "recipes", "doctor", "mask", "cache", "help"}
    assert set(command("recipes").commands) == {"ls", "show", "validate"}
    assert set(command("cache").commands) == {"ls", "clean"}
    assert set(command("mask").commands) == {"info", "diff", "apply", "compact"}
    for verb, options in OPTIONS.items():
        # A page has no JSON.
        of_all = OF_ALL - {"--json"} if verb == "try" else OF_ALL
        assert options_of(verb) == of_all.union(options.split()), verb


def options_of(verb):
    return {
        o
        for p in command(verb).params
        if p.param_type_name == "option"
        for o in (*p.opts, *p.secondary_opts)
    }


def run(*arguments):
    # A command also reads the words of its process.
    with mock.patch.object(sys, "argv", ["kdcli", *arguments]):
        return CliRunner().invoke(app, list(arguments))


def test_help_and_version():
    assert "distill" in run("--help").stdout
    assert run("--version").stdout.strip() == f"kdcli {full_version()}"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["distil"], "distill"),
        (["distill", "demo", "--too", "2x64"], "--to"),
        (["distill"], "no teacher given"),
        (["recipes", "show", "smal"], "did you mean 'small'"),
    ],
)
def test_a_slip_of_the_hand_gets_exit_2_and_a_suggestion(arguments, said):
    result = run(*arguments)
    assert (result.exit_code, said in result.stderr.replace("\n", " ")) == (2, True)


def test_a_revision_is_the_models(tmp_path):
    assert (
        pinned("someone/base", "v1.0") == pinned("someone/base@v1.0", "v1.0") == "someone/base@v1.0"
    )
    assert pinned(["base"], "refs/pr/1") == ["base@refs/pr/1"]
    refused = {
        (None, "v1"): "none was given",
        (("a", "b"), "v1"): "several were given",
        (str(tmp_path), "v1"): "has no revisions",
        ("./gone", "v1"): "has no revisions",
        ("demo", "v1"): "has no revisions",
        ("a@v2", "v1"): "a@v2 and --revision v1 contradict each other",
        ("a", "v 1"): "got 'v 1'",
    }
    for (model, revision), said in refused.items():
        with pytest.raises(errors.UsageError, match=said):
            pinned(list(model) if isinstance(model, tuple) else model, revision)


def test_recipes_are_listed_shown_and_checked(tmp_path):
    names = {line.split()[1] for line in run("recipes", "ls").stdout.splitlines()}
    assert {"demo", "small", "minilm-6x768"} <= names
    shown = run("recipes", "show", "minilm-6x768").stdout
    assert shown.startswith("# MiniLM 6x768 from BERT-base")
    assert "https://arxiv.org/abs/2002.10957" in shown
    assert "batch_size: 1024  # recipe minilm-6x768" in shown
    (tmp_path / "mine.yaml").write_text(shown, "utf-8")
    assert run("recipes", "validate", str(tmp_path / "mine.yaml")).stdout.strip().endswith("ok")
    (tmp_path / "mine.yaml").write_text("train: {lrr: 1.0}\n", "utf-8")
    assert run("recipes", "validate", str(tmp_path / "mine.yaml")).exit_code == 2
    (tmp_path / "mine.yaml").write_text("verb: prune\nmethod: smpp\n", "utf-8")
    unknown = run("recipes", "validate", str(tmp_path / "mine.yaml"))
    assert unknown.exit_code == 2
    assert "mine.yaml); did you mean 'smp'?" in unknown.stderr
    (tmp_path / "steps.yaml").write_text("verb: compress\nsteps: [{quantise: {format: onnx}}]")
    broken = run("recipes", "validate", str(tmp_path / "steps.yaml"))
    assert broken.exit_code == 2
    assert "'quantise' in item 1 of 'steps' is no step; did you mean 'quantize'?" in broken.stderr


def test_doctor_says_what_this_machine_can_run():
    found = json.loads(run("doctor", "--json").stdout)
    assert "works" in found["devices"]["cpu"]
    assert found["versions"]["kdcli"] == full_version()
    shown = run("doctor").stdout
    assert "works" in shown
    for name in ("onnxruntime", "openvino", *TRACKER_NAMES):
        here = importlib.util.find_spec(name.replace("-", "_")) is not None
        assert found["optional"][name.replace("_", "-")].startswith("not installed") is not here
        assert name.replace("_", "-") in shown


def test_the_trackers_of_help_are_those_of_accelerate():
    assert list(TRACKER_NAMES) == sorted(accelerate.tracking.LOGGER_TYPE_TO_CLASS)


@pytest.mark.parametrize(
    ("name", "installed", "message", "hint"),
    [
        ("all", [], "--report-to all: no tracker is installed", "install one of aim, clearml"),
        (
            "wandb",
            ["tensorboard"],
            "--report-to wandb: it is not installed",
            "pip install wandb; installed: tensorboard",
        ),
        ("comet_ml", [], "it is not installed", "pip install comet-ml; installed: none"),
        ("tensorbord", [], "did you mean 'tensorboard'?", "allowed: none, all, aim"),
    ],
)
def test_a_tracker_that_is_not_there_is_refused_by_name(
    monkeypatch, name, installed, message, hint
):
    monkeypatch.setattr("kdcli.engine.launch.get_available_trackers", lambda: installed)
    done = run("finetune", "demo", "--task", "demo-topic", "--report-to", name)
    assert done.exit_code == 2
    assert message in done.stderr
    assert hint in done.stderr
    assert "pip install all" not in done.stderr


def test_every_error_has_the_exit_code_it_promises():
    public = [e for e in errors.KdcliError.__subclasses__() if e.__module__ == errors.__name__]
    codes = {e.__name__: e.exit_code for e in public if e is not errors.ChildFailed}
    assert codes == {
        "UsageError": 2,
        "MachineError": 3,
        "DivergedError": 4,
        "GateError": 5,
        "UnstableError": 6,
        "Stopped": 75,
        "Interrupted": 130,
    }


def failing(error):
    """Run a program whose only verb raises this error."""
    program = typer.Typer(cls=Verbs)

    @program.command()
    def fail():
        raise error

    program.callback()(lambda: None)
    return CliRunner().invoke(program, ["fail"])


def of_file(fault):
    return OSError(getattr(errno, fault), "the reason", "/the/file")


UNUSABLE = "error: /the/file cannot be used: the reason\n"
FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (errors.DivergedError("loss is nan", "lower it"), 4, "error: loss is nan\nlower it\n"),
        (errors.Stopped("stopped after step 2"), 75, "stopped after step 2\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (of_file("EACCES"), 3, UNUSABLE),
        (of_file("EROFS"), 3, UNUSABLE),
        (of_file("ENAMETOOLONG"), 2, UNUSABLE),
        (of_file("ENOTDIR"), 2, UNUSABLE),
        (of_file("EMFILE"), 3, f"{UNUSABLE}{FEW_FILES}\n"),
        (of_file("ENOMEM"), 3, UNUSABLE),
        (MemoryError(), 3, f"error: out of memory\n{LITTLE_MEMORY}\n"),
        (
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 9 bytes"),
            3,
            "error: out of memory: [enforce fail] DefaultCPUAllocator: can't allocate memory: 9 "
            f"bytes\n{LITTLE_MEMORY}\n",
        ),
        (FULL, 3, "error: a file cannot be used: No space left on device\n"),
        # kdcli may have caused these faults, so they stay bugs with a traceback.
        (of_file("ENOENT"), 1, ""),
        (PermissionError(errno.EPERM, "Operation not permitted"), 1, ""),
        (NotADirectoryError(errno.ENOTDIR, "Not a directory"), 1, ""),
    ],
    ids=repr,
)
def test_an_error_is_one_message_and_an_exit_code(error, code, message):
    done = failing(error)
    assert (done.exit_code, done.stderr) == (code, message)


CONTRADICTIONS = (
    "distill demo --to 2x16 --epochs 2 --max-steps 3",
    "distill demo --to 2x16 --resume --overwrite",
    "distill demo --to 2x16 --quiet --verbose",
    "distill demo --task demo-topic --no-augment --glove vectors.txt",
    "distill demo --task demo-topic --augment-only a.jsonl --ablate tinybert",
    "cotrain 2x16 2x16 --vocab-size 99 --base demo",
    "cotrain 2x16 2x16 --vocab-size 99 --community demo",
    "benchmark 2x16 --compare runs/a",
    "benchmark --compare runs/a --max-latency-ms 5",
    "benchmark --compare runs/a --portable there",
    "benchmark 2x16 --portable there --task sst2",
)


@pytest.mark.parametrize("line", CONTRADICTIONS)
def test_options_that_contradict_each_other_are_refused(line):
    done = run(*line.split())
    assert (done.exit_code, "contradict each other" in done.stderr) == (2, True)


HUGE = str(10**20)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *((option, HUGE) for option in ("--seed", "--batch-size", "--max-steps", "--processes")),
        *(("--batch-size", value) for value in ("0", "-1", str(10**9))),
        *(
            (option, value)
            for option in ("--lr", "--epochs")
            for value in ("inf", "nan", "0", "-1")
        ),
        *(("--processes", value) for value in ("0", "-2", "100000")),
        *(
            ("--set", f"{key}={HUGE}")
            for key in ("data.max_length", "train.log_every", "train.micro_batch_size")
        ),
        *(("--set", f"measure.min_seconds={value}") for value in ("-1", ".inf", "1e9")),
    ],
)
def test_a_number_without_bounds_is_refused_at_once(option, value):
    done = run("finetune", "demo", "--task", "demo-topic", option, value)
    assert (done.exit_code, done.stderr.startswith("error: "), "Traceback" in done.stderr) == (
        2,
        True,
        False,
    )


@pytest.mark.parametrize(
    "line", [f"--{o} {v}" for o in ("max-latency-ms", "min-speedup") for v in ("nan", "-1", "0")]
)
def test_a_gate_that_none_can_miss_or_pass_is_refused(line):
    done = run("benchmark", "2x16", *line.split())
    assert (done.exit_code, "must be" in done.stderr) == (2, True)
    assert (
        run("evaluate", "demo", "--task", "demo-topic", "--min-metric", "accuracy=.nan").exit_code
        == 2
    )


def test_an_argument_that_is_not_utf8_is_refused():
    done = subprocess.run(
        [sys.executable, "-m", "kdcli", "distill", b"a\xff"], capture_output=True, check=False
    )
    assert (done.returncode, b"is not UTF-8" in done.stderr, b"Traceback" in done.stderr) == (
        2,
        True,
        False,
    )


@pytest.mark.parametrize(
    "word", ["x" * 4097, f"--epochs={'x' * 4097}", f"--set=kd.weight={'x' * 10**5}"]
)
def test_an_argument_without_end_is_refused_in_a_few_words(word):
    command = [sys.executable, "-m", "kdcli", "distill", word]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, len(done.stderr) < 300) == (2, True)
    assert f"has {len(word):,} characters\nat most 4,096 are allowed" in done.stderr


def test_a_message_holds_the_beginning_of_a_long_word():
    assert errors.UsageError(f"a {'x' * 999} b").message == f"a {'x' * 999} b"
    assert errors.UsageError(f"a {'x' * 10**6} b").message == f"a {'x' * 200}... b"


def test_modules_in_the_working_directory_are_not_run(tmp_path):
    for name in ("torch", "typer", "yaml", "rich"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('planted')", "utf-8")
    command = [sys.executable, "-m", "kdcli", "recipes", "ls"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, "planted" in done.stderr) == (0, False)


@pytest.fixture
def online(monkeypatch):
    """The client of the hub is as in a new process, but for a short wait, and again after the
    test."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.2)
    yield
    prepare_libraries(False, False)


@pytest.mark.parametrize("verbose", [False, True])
def test_retries_of_the_hub_client_are_one_line(monkeypatch, capfd, verbose, online):
    from huggingface_hub.utils import http_backoff, httpx

    from kdcli.cli.hub_client import HubClient

    port, passed = free_port(), []
    handler = logging.Handler()
    handler.emit = passed.append
    client = logging.getLogger("huggingface_hub.utils._http")
    client.addHandler(handler)
    prepare_libraries(False, verbose)
    # The hub has answered before, so it is worth waiting for.
    monkeypatch.setattr(HubClient, "has_answered", True)
    for _ in range(2):
        with pytest.raises(httpx.HTTPError):
            http_backoff("HEAD", f"http://127.0.0.1:{port}/x", max_retries=2, base_wait_time=0)
    client.removeHandler(handler)
    assert len(passed) >= 8 if verbose else passed == []
    assert capfd.readouterr().err.count("waiting for the hub") == (0 if verbose else 1)


def test_a_hub_that_never_answers_is_asked_once(monkeypatch, capfd, online):
    from huggingface_hub import constants
    from huggingface_hub.errors import OfflineModeIsEnabled
    from huggingface_hub.utils import http_backoff

    assert constants.DEFAULT_ETAG_TIMEOUT <= 15
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.setblocking(False)
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        prepare_libraries(False, False)
        for _ in range(3):
            with pytest.raises(OfflineModeIsEnabled, match=f"{url} does not answer"):
                # A timeout of None would wait for ever.
                http_backoff("GET", f"{url}/api/models/a/b", timeout=None)
        silent.accept()
        with pytest.raises(BlockingIOError):
            silent.accept()
    messages = capfd.readouterr().err
    assert messages.count("does not answer") == messages.count("HF_HUB_OFFLINE=1") == 1


def test_an_answer_of_the_hub_lifts_the_limits(monkeypatch, online):
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session, httpx

    limits = []

    def answer(client, request, **_):
        limits.append(dict(request.extensions["timeout"]))
        return httpx.Response(503, request=request)

    monkeypatch.setattr(httpx.Client, "send", answer)
    prepare_libraries(False, False)
    for _ in range(2):
        get_session().get("http://127.0.0.1:9/", timeout=60)
    first, second = limits
    seconds = constants.HF_HUB_ETAG_TIMEOUT
    assert first == dict.fromkeys(("connect", "read", "write", "pool"), seconds)
    assert set(second.values()) == {60}


def test_a_name_that_is_never_resolved_counts_as_no_answer(monkeypatch, online):
    from huggingface_hub.errors import OfflineModeIsEnabled
    from huggingface_hub.utils import get_session, httpx

    resolved = threading.Event()
    # The timeouts of a request do not limit this.
    monkeypatch.setattr(httpx.Client, "send", lambda *_, **__: resolved.wait())
    prepare_libraries(False, False)
    try:
        with pytest.raises(OfflineModeIsEnabled, match=r"no answer within 0\.2 s"):
            get_session().get("http://127.0.0.1:9/")
    finally:
        resolved.set()


def test_a_model_of_a_hub_that_never_answers_is_one_message(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hub = Hub(f"http://127.0.0.1:{silent.getsockname()[1]}")
        with hub.known(tmp_path, HF_HUB_ETAG_TIMEOUT="1"):
            done = CliRunner().invoke(app, ["evaluate", "someone/tiny", "--task", "sst2"])
    assert done.exit_code == 2, done.stderr
    assert done.stderr.count("does not answer") == 1
    assert "model 'someone/tiny' was found neither as a directory" in done.stderr
    assert "HF_HUB_OFFLINE=1 uses the cache" in done.stderr


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("kdcli finetune demo --task mn", {"mnli"}),
        ("kdcli distill demo --to 4x3", {"4x312", "4x384"}),
        ("kdcli distill demo -r demo-em", {"demo-embedding"}),
    ],
)
def test_a_shell_completes_tasks_recipes_and_shapes(line, offered):
    words = {
        "_KDCLI_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(line.count(" ")),
    }
    done = CliRunner().invoke(app, prog_name="kdcli", env=words)
    assert set(done.stdout.split()) == offered


WRONG_NAMES = {
    "completion": (2, "kdcli --install-completion sets it up for this shell"),
    "finetune demo --task best": (2, "unknown task 'best'"),
    "finetune demo --task sst22": (2, "unknown task 'sst22'; did you mean 'sst2'?"),
    "distill demo --to 2x64 --method minlm": (2, "unknown method 'minlm'"),
    "distill demo --to 2x64 --set train.lrr=3": (2, "unknown key 'train.lrr' (--set)"),
    "distill demo --to 2x65": (2, "4 heads do not divide a width of 65"),
    "distill demo --to 2x64 --to 2x640": (2, "student 2x640 is larger than its teacher"),
    "distill demo --to 99x65": (2, "student 99x65 is larger than its teacher"),
    "distill demo --to 2by64": (2, "'2by64' is not a shape"),
    "export demo --format onnx --pack": (
        2,
        "--pack halves the size of an int8 file",
    ),
    "export demo --format openvino --int8 --pack": (
        2,
        "--pack does not work with --format openvino",
    ),
    "export demo --format onnx --int8 --steps 9": (
        2,
        "--steps trains the integers of a packed file",
    ),
    "export demo --format onyx": (
        2,
        "--format must be 'onnx' or 'openvino', got onyx; did you mean 'onnx'?",
    ),
    "benchmark demo --backend onx": (2, "unknown backend 'onx'; did you mean 'onnx'?"),
    "benchmark demo --backend int8": (2, "unknown backend 'int8'; did you mean 'onnx-int8'?"),
    "benchmark demo --backend onxx-int8": (2, "unknown backend 'onxx'; did you mean 'onnx'?"),
    "benchmark demo --backend onnx-in8": (
        2,
        "backend onnx has no precision 'in8'; did you mean 'onnx-int8'?",
    ),
    "compress demo-classifier --data demo --max-drop 1 --set plan.backends=[int8]": (
        2,
        "unknown backend 'int8'; did you mean 'onnx-int8'?",
    ),
    "benchmark demo --backend onnx-int9": (2, "backend onnx has no precision 'int9'"),
    "evaluate ./none --task sst2": (2, "no model directory ./none"),
    "compress me/none --data demo": (2, "nor in the Hugging Face cache"),
    "prune demo --task demo-topic --method smpp": (
        2,
        "unknown method 'smpp'; did you mean 'smp'?",
    ),
    "prune demo --task demo-topic --sparsity 1.5": (2, "must be less than 1, got 1.5"),
    "prune demo --task demo-topic --set train.lrr=3": (2, "unknown key 'train.lrr' (--set)"),
    "finetune demo --task demo-topic --data none.csv": (2, "no data at none.csv"),
    "distill demo --to 2x64 --data ./none": (2, "no data at ./none"),
    "distill demo --to 2x64 -o file": (2, "file is a file; it must be a directory"),
    "distill demo --to 2x64 -o file/x": (2, "file/x cannot be created: file is a file"),
}


@pytest.mark.parametrize(
    "line",
    [
        "cotrain 2x64 2x32 --base me/none --data demo",
        "trim me/none --data demo",
        "tokenize demo --tokenizer me/none -o tokens",
    ],
)
def test_a_model_that_does_not_exist_has_no_error_about_its_tokenizer(line, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, line.split())
    assert result.exit_code == 2
    assert "model 'me/none' was found neither as a directory nor in the Hugging Face cache" in (
        result.stderr
    )


@pytest.mark.parametrize(
    ("line", "option"),
    [
        ("tokenize two.csv --tokenizer demo -o out", "--column NAME"),
        ("distill demo --to 2x64 --data two.csv -o out", "--set data.column=NAME"),
        ("export demo --data two.csv -o out", "--set data.columns.text=NAME"),
    ],
)
def test_the_column_of_a_text_is_named_by_the_option_of_the_verb(
    line, option, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("two.csv").write_text("a,b\nx y,z w\n")
    result = CliRunner().invoke(app, line.split())
    assert result.exit_code == 2
    assert result.stderr.rstrip().endswith(f"name the column of the text with {option}")


def test_wrong_names_are_refused_before_torch_is_loaded(tmp_path):
    (tmp_path / "file").touch()
    program = (
        "import sys\n"
        "from kdcli.cli import app\n"
        f"for line in {list(WRONG_NAMES)}:\n"
        "    sys.argv[1:] = line.split()\n"
        "    try:\n        app()\n"
        "    except SystemExit as ended:\n"
        "        print(ended.code, 'torch' in sys.modules, flush=True)\n"
        "    print('---', file=sys.stderr, flush=True)\n"
    )
    root = str(Path(kdcli.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": root},
        capture_output=True,
        text=True,
        check=True,
    )
    ends, messages = done.stdout.splitlines(), done.stderr.split("---\n")
    for (line, (code, said)), end, message in zip(
        WRONG_NAMES.items(), ends, messages[:-1], strict=True
    ):
        assert end == f"{code} False", line
        assert said in message
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        *(
            ("model", value)
            for value in ("demo", "me/model", "me/model@refs/pr/1", "6x384", "run/x")
        ),
        *(("task", value) for value in ("own", "sst2", "embedding", "retrieval", "rerank")),
        *(("task", value) for value in ("mteb:STS12", "demo-topic")),
        *(("shape", value) for value in (" 6x384 ", "4x312:1200@12")),
        *(("backend", value) for value in ("torch", "onnx-int8", "sparse")),
        *(("data", value) for value in ("demo", "run/x", "me/set:config:train", "hf://me/x.csv")),
        *(("output", value) for value in ("new", "new/deep", "run/x")),
    ],
)
def test_what_may_be_right_is_left_to_the_verb(kind, value, tmp_path, monkeypatch, online):
    (tmp_path / "run" / "x").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    check = VALUES[kind].check
    assert check is not None
    check(value)
    assert [each.name for each in tmp_path.rglob("*")] == ["run", "x"]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: kdcli.finetune("demo", task=5), "'task' must be a string, got 5"),
        (lambda: kdcli.evaluate([5], task="sst2"), "must be a string, got 5"),
        (lambda: kdcli.distill("demo", method=5), "'method' must be"),
    ],
)
def test_values_of_a_wrong_type_are_refused_by_name(call, said):
    with pytest.raises(errors.UsageError, match=said):
        call()


def test_a_revision_in_the_cache_needs_no_network(tmp_path, monkeypatch):
    repository = tmp_path / "models--me--model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "v2").write_text("0" * 40)
    folder = repository / "snapshots" / ("0" * 40)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    check_source("me/model@v2")
    with pytest.raises(errors.UsageError, match="nor in the Hugging Face cache"):
        check_source("me/model")


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        ("compress --max-drop 3,5", "takes a number, or one with %, got '3,5'; write 3.5", ""),
        ("compress --max-mb fast", "takes a number, or one with MB, got 'fast'", ""),
        ("prune demo --sparsity 90x", "takes a number, or one with %, got '90x'", ""),
        ("finetune --lr 1%", "takes a number, got '1%'", ""),
        ("--speed 1 benchmark", "no such option: --speed", "kdcli --help lists"),
        ("compress demo --dry-run", "no such option: --dry-run", "--budget 20m limits its time"),
        ("finetune demo --learning_rate 1", "no such option: --learning_rate", "here is --lr"),
        ("finetune demo more", "got unexpected extra argument(s) (more)", "kdcli finetune --help"),
        ("evaluate demo --min-metric f1=90", "f1 is at most 1", "--min-metric f1=0.9"),
        ("compress demo-classifer --data demo", "did you mean 'demo-classifier'?", ""),
    ],
)
def test_wrong_words_are_errors_in_one_style(words, message, hint):
    done = run(*words.split())
    assert done.exit_code == 2
    error, *hints = done.stderr.splitlines()
    assert error.startswith("error: ")
    assert message in error
    assert hint in "\n".join(hints)


@pytest.mark.parametrize(
    ("verb", "flag", "text", "value"),
    [
        ("compress", "--max-drop", "-3%", -3.0),
        ("compress", "--max-drop", "-3 %", -3.0),
        ("compress", "--speedup", "-5x", -5.0),
        ("compress", "--max-mb", "-2.5mb", -2.5),
        ("compress", "--max-latency-ms", "-8 ms", -8.0),
        ("prune", "--sparsity", "-90%", -0.9),
    ],
)
def test_a_number_may_have_its_unit(verb, flag, text, value):
    done = run(verb, "demo-classifier", f"{flag}={text}")
    assert done.exit_code == 2
    assert f"got {value}" in done.stderr


def test_resume_alone_continues_a_run_with_its_recipe(tmp_path):
    folder = tmp_path / "run"
    training = ("finetune", "demo", "--task", "demo-topic", "--max-steps", "2")
    first = run(*training, "--set", "measure.latency=false", "--resume", "-o", str(folder))
    assert first.exit_code == 0, first.stderr
    assert f"{folder} holds no run to resume; a new run begins there" in first.stderr
    report = (folder / "report.json").read_bytes()
    missing = run("finetune", "--resume", "-o", f"{folder}s")
    assert missing.exit_code == 2
    assert f"{folder}s holds no run to resume" in missing.stderr
    again = run("finetune", "--resume", "-o", str(folder))
    assert again.exit_code == 0, again.stderr
    assert (folder / "report.json").read_bytes() == report
    longer = run("finetune", "--resume", "-o", str(folder), "--max-steps", "3")
    assert longer.exit_code == 2
    assert "train.max_steps: was 2, is 3" in longer.stderr
    other = run("prune", "--resume", "-o", str(folder))
    assert other.exit_code == 2
    assert "is a recipe of 'finetune', not of 'prune'" in other.stderr


def test_two_values_of_an_option_are_a_warning(monkeypatch):
    given = ["evaluate", "demo-classifier", "--data", "a.csv", "--data=b.csv"]
    given += ["--set", "worst=1", "--set", "worst=2", "--set", "split=test", "--set", "split= test"]
    given += ["--pooling", "mean", "--set", "pooling=cls", "-o", "a", "--output-dir", "a"]
    monkeypatch.setattr(sys, "argv", ["kdcli", *given])
    lines = CliRunner().invoke(app, given).stderr.splitlines()
    assert [line for line in lines if "several values" in line] == [
        "warning: several values of --set worst: 1, 2; 2 counts",
        "warning: several values of --set pooling and --pooling: cls, mean; mean counts",
        "warning: several values of --data: a.csv, b.csv; b.csv counts",
    ]
