"""Models with code of their own are trained, pruned and exported, and what is saved loads in
transformers with the code next to it."""

import json
import logging
import re
import subprocess
import sys

import own_files
import pytest
import torch
from encoders import OWN_CODE, OWN_CODE_FILES, padded_batch, write_own_code
from fake_verbs import Fakes
from own_files import kdcli, refused, report_of, said_by, succeeds
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.models import Pooling
from test_every_verb import PLAN
from transformers import AutoModel, AutoModelForSequenceClassification

from kdcli.custom_code import custom_code
from kdcli.engine.session import Session, start
from kdcli.errors import KdcliError
from kdcli.models.load import load_encoder
from kdcli.workloads.embedder import Embedder

TRUST = "--trust-remote-code"
SHORT = ("--batch-size", "8", "--set", "measure.latency=false", TRUST)
TEXTS = [f"w{n % 11} w{n % 13} w{n % 7} w{n % 17} w{n % 5}" for n in range(3000)]
ELSEWHERE = """
import sys; sys.modules["kdcli"] = None
import torch, transformers
folder, auto, ids = sys.argv[1], sys.argv[2], [int(n) for n in sys.argv[3:]]
model = getattr(transformers, auto).from_pretrained(folder, trust_remote_code=True).eval()
with torch.no_grad():
    print(model(torch.tensor([ids]))[0].flatten()[:6].tolist())
"""


def elsewhere(folder, auto, home, ids=(7, 9, 30, 12)):
    """The first outputs of a model in a fresh process without kdcli, with an empty cache."""
    command = [sys.executable, "-W", "ignore", "-c", ELSEWHERE, str(folder), auto, *map(str, ids)]
    environment = {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "PATH": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return torch.tensor(json.loads(done.stdout.splitlines()[-1]))


def here(folder, auto, ids=(7, 9, 30, 12)):
    model = auto.from_pretrained(folder, trust_remote_code=True).eval()
    with torch.no_grad():
        return model(torch.tensor([list(ids)]))[0].flatten()[:6]


@pytest.fixture(scope="module", params=OWN_CODE)
def made(request, tmp_path_factory):
    """The kind, and a directory with a model, its data and a fine-tuned one."""
    root = tmp_path_factory.mktemp(request.param)
    write_own_code(request.param, root / "model")
    own_files.own(root / "data", "class", 128, 48)
    (root / "texts.txt").write_text("\n".join(TEXTS), "utf-8")
    task = ("--task", "own", "--data", root / "data")
    steps = ("--max-steps", "40", "--set", "train.lr=0.003")
    succeeds("finetune", root / "model", *task, *SHORT, *steps, "-o", root / "tuned")
    return request.param, root


def test_a_fine_tuned_model_has_learned_and_loads_elsewhere(made, tmp_path):
    kind, root = made
    files = {file.name for file in OWN_CODE_FILES.glob(f"*_{kind}.py")} | {"base_own.py"}
    assert {file.name for file in (root / "tuned").glob("*.py")} == files
    auto_map = json.loads((root / "tuned" / "config.json").read_text("utf-8"))["auto_map"]
    assert set(auto_map) == {"AutoConfig", "AutoModel", "AutoModelForSequenceClassification"}
    scores = report_of(root / "tuned").evaluations[-1].metrics
    assert scores["accuracy"] > 0.9
    auto = "AutoModelForSequenceClassification"
    other = elsewhere(root / "tuned", auto, tmp_path)
    torch.testing.assert_close(other, here(root / "tuned", AutoModelForSequenceClassification))
    data = root / "data"
    said = refused(data, "evaluate", root / "tuned", "--task", "own", "--data", data)
    assert "brings code of its own" in said


@pytest.mark.parametrize("method", ["minilm", "embedding"])
def test_smaller_students_keep_the_code(made, method, tmp_path):
    _, root = made
    length = () if method == "embedding" else ("--set", "data.max_length=32")
    given = ("--data", root / "texts.txt", "--method", method, "--to", "1x16", *length)
    tasks = () if method == "embedding" else ("--set", "eval.tasks=[]")
    out = tmp_path / "out"
    succeeds("distill", root / "model", *given, *tasks, *SHORT, "--max-steps", "3", "-o", out)
    other = elsewhere(out, "AutoModel", tmp_path)
    assert other.isfinite().all()
    torch.testing.assert_close(other, here(out, AutoModel))
    with custom_code(allowed=True):
        assert str(load_encoder(str(out)).shape) == "1x16:32@4"


def test_it_is_pruned_and_exported(made, tmp_path):
    kind, root = made
    task = ("--task", "own", "--data", root / "data")
    given = ("--sparsity", "0.5", "--max-steps", "4")
    succeeds("prune", root / "tuned", *task, *given, *SHORT, "-o", tmp_path / "pruned")
    weights = load_file(tmp_path / "pruned" / "model.safetensors")
    layers = [x for name, x in weights.items() if re.search(r"\.[01]\.", name) and x.dim() == 2]
    zeros = sum(int((x == 0).sum()) for x in layers) / sum(x.numel() for x in layers)
    assert zeros > 0.4
    other = elsewhere(tmp_path / "pruned", "AutoModelForSequenceClassification", tmp_path / "home")
    assert other.isfinite().all()
    export = ("export", root / "tuned", "--format", "onnx", "--int8", TRUST, "-o", tmp_path / "x")
    if kind == "pairs":
        result = kdcli(*export)
        assert result.exit_code == 2
        assert "cannot export PairsForSequenceClassification" in said_by(result)
        assert "complex" in said_by(result)
        return
    succeeds(*export)
    evaluated = succeeds("evaluate", tmp_path / "x", *task, TRUST)
    assert "accuracy" in evaluated.output


@pytest.mark.long
def test_it_is_compressed(made, tmp_path):
    kind, root = made
    keys = PLAN | {"model": str(root / "tuned"), "data__source": str(root / "data")}
    keys |= {"trust_remote_code": True, "output_dir": tmp_path / "out"}
    with custom_code(allowed=True):
        if kind == "pairs":
            with pytest.raises(KdcliError, match=r"cannot export PairsForSequence.*complex"):
                Fakes({}, in_earnest=True).compress(**keys)
            return
        Fakes({}, in_earnest=True).compress(**keys)
    names = {candidate.name for candidate in report_of(tmp_path / "out").compression.candidates}
    assert names == {"teacher", "onnx-int8", "1x16:32-onnx-int8"}


def test_experts_with_the_name_of_a_known_type_teach_with_their_code(tmp_path):
    code = {"AutoConfig": "Config", "AutoModel": "Model"}
    code = {auto: f"modeling_experts.Experts{name}" for auto, name in code.items()}
    sizes = {"moe_every_n_layers": 2, "num_experts": 4, "initializer_range": 0.3}
    folder = tmp_path / "model"
    write_own_code("experts", folder, model_type="nomic_bert", auto_map=code, **sizes)
    modules = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    rows = [
        {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for n, (path, kind) in enumerate(modules.items())
    ]
    (folder / "modules.json").write_text(json.dumps(rows), "utf-8")
    (folder / "1_Pooling").mkdir()
    Pooling(32).save(str(folder / "1_Pooling"))
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS[:300]), "utf-8")
    given = ("distill", folder, "--data", tmp_path / "texts.txt", *SHORT, "--max-steps", "2")
    given += ("--dtype", "fp32")
    assert "brings code of its own" in refused(tmp_path, *given[:4], "--to", "static:8")
    library = SentenceTransformer(str(folder), device="cpu", trust_remote_code=True)
    session = Session(start(torch.device("cpu"), torch.float32), torch.device("cpu"))
    with custom_code(allowed=True):
        vectors_NE = Embedder.open_scored(str(folder)).vectors(TEXTS[:5], "", session)
    torch.testing.assert_close(
        torch.from_numpy(vectors_NE), torch.tensor(library.encode(TEXTS[:5]))
    )
    succeeds(*given, "--to", "static:8", "-o", tmp_path / "static")
    said = refused(tmp_path, *given, "--to", "1x16")
    assert "its layers have different sizes" in said


@pytest.mark.parametrize("kind", ["blocks"])
def test_buffers_that_transformers_leaves_empty_are_computed(kind, tmp_path, caplog):
    folder = write_own_code(kind, tmp_path / "model")
    with custom_code(allowed=True):
        wanted = load_encoder(str(folder)).model
    code = folder / f"modeling_{kind}.py"
    text = code.read_text("utf-8")
    assert "isinstance(module, Rotation)" in text
    code.write_text(text.replace("isinstance(module, Rotation)", "False"), "utf-8")
    caplog.set_level(logging.WARNING, "kdcli")
    with custom_code(allowed=True):
        again = load_encoder(str(folder)).model
    assert "leaves buffers of" in caplog.text
    assert "embeddings.rotary_emb.inv_freq" in caplog.text
    batch = padded_batch(wanted)
    with torch.no_grad():
        one, two = (model(**batch).last_hidden_state for model in (wanted, again))
    torch.testing.assert_close(one, two)


READ, BUILT = "        super().__init__(pad_token_id", "        self.post_init()"
RUNS = "        mask = torch.ones_like(input_ids)"
UNUSED = "returns a last_hidden_state for each token"
FAULTS = {
    "return (x,)": ("its output, a tuple, has no last_hidden_state", UNUSED),
    "return BaseModelOutput(x.mean(1))": (r"3 texts of 13 tokens has the shape \[3, ", UNUSED),
    # What is derived has other rows.
    "if len(x) != 3: raise OSError('no kernel')": (
        r"modeling_slopes\.py, line \d+: OSError: no kernel",
        "what always works is a model that transformers has",
    ),
}
"""A line of code, and the message and the hint about it."""


def with_line(folder, before, line):
    """A model with one more line of code."""
    write_own_code("pairs" if before == READ else "slopes", folder)
    texts = {file: file.read_text("utf-8") for file in folder.glob("*.py")}
    assert any(before in text for text in texts.values())
    for file, text in texts.items():
        file.write_text(text.replace(before, f"        {line}\n{before}"), "utf-8")
    return folder


@pytest.mark.parametrize("line", FAULTS)
def test_a_fault_of_the_code_is_named(tmp_path, line):
    model = with_line(tmp_path / "model", RUNS, line)
    own_files.own(tmp_path / "data", "class", 48, 24)
    task = ("--task", "own", "--data", tmp_path / "data", *SHORT)
    result = kdcli("finetune", model, *task, "-o", tmp_path / "out")
    assert result.exit_code == 2, result.output
    said = said_by(result)
    assert all(re.search(part, said) for part in FAULTS[line]), said


@pytest.mark.parametrize(
    ("before", "line", "said"),
    [
        (READ, "bytearray(1 << 60)", "out of memory"),
        (BUILT, 'torch.empty(1 << 50, device="cpu")', "can't allocate memory"),
    ],
    ids=["configuration", "model"],
)
def test_a_full_memory_is_no_fault_of_the_code(tmp_path, before, line, said):
    model = with_line(tmp_path / "model", before, line)
    own_files.own(tmp_path / "data", "class", 48, 24)
    task = ("--task", "own", "--data", tmp_path / "data", *SHORT)
    result = kdcli("finetune", model, *task, "-o", tmp_path / "out")
    assert result.exit_code == 3, result.output
    assert said in said_by(result)
    assert "own code" not in said_by(result)
    assert "the code of" not in said_by(result)
