"""Models whose layers kdcli does not know do what needs hidden states only."""

import pytest
import torch
from encoders import bytes_of_words, on_disk, tiny_encoder, tiny_tokenizer
from own_files import kdcli, own, refused, report_of, said_by, succeeds
from sentence_transformers import SentenceTransformer
from test_finetune import QUICK
from transformers import (
    AutoModel,
    BartConfig,
    BartForSequenceClassification,
    BartModel,
    GPT2Config,
    LongformerConfig,
    T5Config,
    T5ForConditionalGeneration,
)

from kdcli.models.load import load_encoder

TEXTS = [f"w{n % 11} w{n % 7} w{n % 5} w{n % 3}" for n in range(200)]
SHORT = ("--max-steps", "2", "--set", "measure.latency=false", "--set", "eval.tasks=[]")
FEW = ("--set", "measure.min_runs=2", "--set", "measure.min_seconds=0.0", "--seq-len", "16")
ENDS = {"bos_token_id": 2, "eos_token_id": 3}
BART = {
    **ENDS,
    **{"d_model": 32, "vocab_size": 64, "max_position_embeddings": 64, "pad_token_id": 0},
    **{f"{part}_layers": 2 for part in ("encoder", "decoder")},
    **{f"{part}_attention_heads": 4 for part in ("encoder", "decoder")},
    **{f"{part}_ffn_dim": 64 for part in ("encoder", "decoder")},
    "decoder_start_token_id": 2,
}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 64}


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    torch.manual_seed(0)
    config = GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, **ENDS)
    return on_disk(AutoModel.from_config(config), tmp_path_factory.mktemp("any") / "gpt2")


@pytest.fixture(scope="module")
def bart(tmp_path_factory):
    torch.manual_seed(0)
    return on_disk(BartModel(BartConfig(**BART)), tmp_path_factory.mktemp("any") / "bart")


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    file = tmp_path_factory.mktemp("texts") / "texts.txt"
    file.write_text("\n".join(TEXTS), "utf-8")
    return file


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "student"), [("gpt2", "--to=static:8"), ("bart", "--student=demo")]
)
def test_its_vectors_are_distilled(kind, texts, tmp_path, student, request):
    folder, teacher = tmp_path / "out", request.getfixturevalue(kind)
    method = ("--method", "embedding", "--data", texts)
    succeeds("distill", teacher, student, *method, *SHORT, "-o", folder)
    card = next(model.card for model in report_of(folder).models if model.role == "teacher")
    assert card.model_type == kind
    width = 8 if "static" in student else 32
    assert SentenceTransformer(str(folder), device="cpu").encode(TEXTS[:2]).shape == (2, width)


@pytest.mark.slow
def test_a_static_student_reads_pieces_of_words(texts, tmp_path):
    """Its tokenizer spells neither other letters nor an unknown token."""
    teacher = on_disk(tiny_encoder("bert"), tmp_path / "teacher", bytes_of_words())
    given = ("--method", "embedding", "--data", texts, "--to", "static:8")
    succeeds("distill", teacher, *given, *SHORT, "-o", tmp_path / "out")
    vectors_NE = SentenceTransformer(str(tmp_path / "out"), device="cpu").encode(["w7", "w8", "w7"])
    assert (vectors_NE[0] == vectors_NE[2]).all()
    assert not (vectors_NE[0] == vectors_NE[1]).all()


@pytest.mark.slow
def test_a_smaller_one_of_it_is_refused_with_what_works(gpt2, texts, tmp_path):
    method = ("--method", "embedding", "--data", texts)
    message = refused(
        tmp_path, "distill", gpt2, "--to", "1x16", *method, *SHORT, "-o", tmp_path / "out"
    )
    assert "cannot prune a 'gpt2' or make smaller ones of it: q is made by a Conv1D" in message
    assert "--to static:256, or --student MODEL" in message


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [
        ("--method", "minilm"),
        ("--method", "embedding", "--set", "loss.relations_weight=1", "--pooling", "mean"),
        ("--method", "tinybert", "--task", "own"),
    ],
)
def test_relations_of_a_causal_teacher_are_refused_before_any_work(method, texts, tmp_path):
    teacher = on_disk(tiny_encoder("qwen3"), tmp_path / "teacher")
    data = ("--data", texts, "--set", "eval.tasks=[]")
    if "own" in method:
        task = ("--task", "own", "--data", own(tmp_path / "data", "class", n=32))
        succeeds("finetune", teacher, *task, *SHORT[:4], "-o", tmp_path / "tuned")
        teacher, data = tmp_path / "tuned", task[2:]
    result = kdcli(
        "distill", teacher, "--to", "1x16", *method, *data, *SHORT[:4], "-o", tmp_path / "out"
    )
    said = said_by(result)
    assert result.exit_code == 2
    assert "qwen3 is causal: its tokens attend to earlier ones only" in said
    assert "distil its vectors (--method embedding)" in said
    assert "fitting" not in said
    assert "signals" not in said


@torch.no_grad()
def test_an_encoder_is_loaded_without_its_decoder(bart, tmp_path):
    whole = BartModel.from_pretrained(bart).eval()
    batch = tiny_tokenizer()(TEXTS[:2], return_tensors="pt", return_token_type_ids=False)
    encoder = load_encoder(str(bart)).model
    wanted = whole.encoder(**batch).last_hidden_state
    torch.testing.assert_close(encoder(**batch).last_hidden_state, wanted)
    assert [name for name, _ in encoder.named_parameters() if "decoder" in name] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "name"),
    [
        (lambda: BartForSequenceClassification(BartConfig(**BART)), "BartForSequence"),
        (lambda: T5ForConditionalGeneration(T5Config(**T5, **ENDS)), "T5ForSequence"),
    ],
)
def test_a_head_on_a_decoder_is_refused_with_the_reason(model, name, tmp_path):
    folder, data = on_disk(model(), tmp_path / "model"), own(tmp_path / "data", "class", n=32)
    task = ("--task", "own", "--data", data)
    for verb in (("finetune", *QUICK), ("prune", *QUICK), ("evaluate",)):
        message = refused(tmp_path, verb[0], folder, *task, *verb[1:])
        if verb[0] != "evaluate" or name.startswith("Bart"):
            reads = f"the head of a {name}Classification reads the states of its decoder"
            assert reads in message
            assert "--method embedding" in message


@pytest.mark.slow
def test_a_vocabulary_that_could_not_be_saved_is_not_trimmed(bart, texts, tmp_path):
    message = refused(tmp_path, "trim", bart, "--data", texts)
    assert (
        "a trimmed bart cannot be saved: its encoder is part of a class with a decoder" in message
    )


@pytest.mark.slow
def test_a_generator_is_trimmed_and_exported_as_its_encoder(texts, tmp_path):
    model = on_disk(T5ForConditionalGeneration(T5Config(**T5, **ENDS)), tmp_path / "model")
    succeeds("trim", model, "--data", texts, "-o", tmp_path / "trimmed")
    words = ("--format", "onnx", "--pooling", "mean", "--data", texts)
    succeeds("export", tmp_path / "trimmed", *words, "-o", tmp_path / "onnx")
    one, two = (load_encoder(str(folder)) for folder in (model, tmp_path / "trimmed"))
    assert two.model.config.architectures == ["T5EncoderModel"]
    states = [
        m.model(**m.tokenizer(TEXTS[0], return_tensors="pt", return_token_type_ids=False))
        for m in (one, two)
    ]
    torch.testing.assert_close(*(s.last_hidden_state for s in states))


@pytest.mark.slow
def test_without_layers_compress_compares_exports(gpt2, texts, tmp_path):
    given = ("compress", gpt2, "--pooling", "mean", "--data", texts, "--max-drop", "100", *FEW[:4])
    plan = ("--set", "plan.backends=[onnx]", "--set", "data.max_length=24")
    succeeds(*given, *plan, "-o", tmp_path / "out")
    report = report_of(tmp_path / "out")
    assert [c.name for c in report.compression.candidates] == ["teacher", "onnx"]
    assert any("only exports of the model itself were tried" in note for note in report.notes)
    for shape in ("1x16", "2x"):
        message = refused(tmp_path, *given, *plan, "--set", f"plan.shapes=[{shape}]")
        assert "cannot prune a 'gpt2' or make smaller ones of it" in message


@pytest.mark.slow
def test_a_backend_that_cannot_run_a_model_leaves_the_others(texts, tmp_path):
    config = LongformerConfig(
        attention_window=8, hidden_size=32, num_hidden_layers=1, num_attention_heads=4
    )
    config.update({"intermediate_size": 64, "vocab_size": 64, "pad_token_id": 0, **ENDS})
    model = on_disk(AutoModel.from_config(config), tmp_path / "model")
    words = ("--backend", "torch", "--backend", "onnx", "--batch-size", "1")
    succeeds("benchmark", model, *words, *FEW, "-o", tmp_path / "out")
    report = report_of(tmp_path / "out")
    assert [row.backend for row in report.latency] == ["torch"]
    (failure,) = report.failures
    assert failure.backend == "onnx"
    assert failure.reason.startswith("torch cannot export LongformerModel (longformer) to ONNX")
