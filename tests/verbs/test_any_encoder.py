"""Models whose layers kdcli does not know do what needs hidden states only."""

import pytest
import torch
from encoders import on_disk
from own_files import refused, report_of, succeeds
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, GPT2Config

TEXTS = [f"w{n % 11} w{n % 7} w{n % 5} w{n % 3}" for n in range(200)]
SHORT = ("--max-steps", "2", "--set", "measure.latency=false", "--set", "eval.tasks=[]")


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    torch.manual_seed(0)
    config = GPT2Config(
        n_embd=32, n_layer=2, n_head=4, vocab_size=64, bos_token_id=2, eos_token_id=3
    )
    return on_disk(AutoModel.from_config(config), tmp_path_factory.mktemp("any") / "gpt2")


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    file = tmp_path_factory.mktemp("texts") / "texts.txt"
    file.write_text("\n".join(TEXTS), "utf-8")
    return file


@pytest.mark.slow
@pytest.mark.parametrize("student", ["--to=static:8", "--student=demo"])
def test_its_vectors_are_distilled(gpt2, texts, tmp_path, student):
    folder = tmp_path / "out"
    method = ("--method", "embedding", "--data", texts)
    succeeds("distill", gpt2, student, *method, *SHORT, "-o", folder)
    teacher = next(model for model in report_of(folder).models if model.role == "teacher")
    assert teacher.card.model_type == "gpt2"
    width = 8 if "static" in student else 32
    assert SentenceTransformer(str(folder), device="cpu").encode(TEXTS[:2]).shape == (2, width)


@pytest.mark.slow
def test_a_smaller_one_of_it_is_refused_with_what_works(gpt2, texts, tmp_path):
    method = ("--method", "embedding", "--data", texts)
    message = refused(
        tmp_path, "distill", gpt2, "--to", "1x16", *method, *SHORT, "-o", tmp_path / "out"
    )
    assert "cannot prune a 'gpt2' or make smaller ones of it: no linear that makes q" in message
    assert "--to static:256, or --student MODEL" in message
