"""Models that generate: the mask, decoding with kept keys and without next to a float64 reference,
beams, refusals."""

import itertools
import json

import numpy as np
import pytest
import torch
from encoders import LEAKING, TYPES, tiny_config, tiny_tokenizer
from transformers import AutoModel, AutoModelForMaskedLM

from kdcli.deploy.sparse.loading import load_network
from kdcli.errors import UsageError
from kdcli.models.capture import capture
from kdcli.models.derived_layout import LEAKS
from kdcli.models.generation import as_generator, load_generator
from kdcli.models.layout import layout_for
from kdcli.models.load import load_config, save_model
from kdcli.models.modeling_unilm import REUSE, _Decoding, sequence_mask
from kdcli.models.trim import cut_model
from kdcli.types import Needs, Task

pytestmark = pytest.mark.slow

GENERATING = sorted(set(TYPES) - {*LEAKING, "splinter"})
REFUSED = [*LEAKING, "splinter"]
TASK = Task("own", "text", ("source",), ("rougeL",), label="target")
START = 3


def generator(model_type="bert", *, seed=0):
    torch.manual_seed(seed)
    config = tiny_config(model_type)
    config.initializer_range = 0.5  # With BERT's every token would be as likely as any other.
    return as_generator(AutoModelForMaskedLM.from_config(config).eval(), tiny_tokenizer(), "here")


def sources(*lengths):
    ids = torch.randint(
        5, 60, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(1)
    )
    real = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    return ids * real, real


def reference(model, source, target):
    """Logits of the next token, from one unpadded row and the mask of the paper, without anything
    of the decoding."""
    ids = torch.tensor([[*source, *target, model.config.unilm["mask_token_id"]]])
    length, n = ids.shape[1], len(source)
    mask = torch.tensor(
        [[k < n or (q >= n and k <= q) for k in range(length)] for q in range(length)]
    )
    typed = getattr(model.config, "type_vocab_size", 1) > 1
    types = torch.tensor([[int(typed and i >= n) for i in range(length)]])
    batch = {"input_ids": ids, "attention_mask": mask[None, None], "token_type_ids": types}
    return capture(model, Needs(logits=True))(batch).logits[0, -1]


@pytest.mark.parametrize("model_type", GENERATING)
@torch.no_grad()
def test_a_step_gives_the_logits_of_the_whole_row(model_type):
    model, (ids, real) = generator(model_type).double(), sources(9, 4, 12)
    reuses = layout_for(model.config).interface
    targets = torch.randint(5, 60, (6, 5), generator=torch.Generator().manual_seed(2))
    if reuses:
        model.set_attn_implementation(REUSE)
    decoding = _Decoding(model, ids, real, reuses)
    steps = []
    for step in range(5):
        steps.append(
            decoding.next_logits(
                model, torch.cat([torch.full((6, 1), START), targets[:, :step]], 1)
            )[:, 0]
        )
        if step == 2:
            # The beams of a source change places.
            order = torch.tensor([1, 0, 2, 2, 5, 4])
            decoding.reorder_cache(order)
            targets[:, :2] = targets[order, :2]
            targets[:, 2:3] = targets[order, 2:3]
    assert not reuses or decoding.target_cache[0][0].shape[2] == 4
    if reuses:
        model.set_attn_implementation("sdpa")
    for step in (3, 4):
        for row in range(6):
            source = ids[row // 2, : real[row // 2].sum()].tolist()
            wanted = reference(model, source, targets[row, :step].tolist())
            torch.testing.assert_close(steps[step][row], wanted, atol=1e-9, rtol=1e-7)


@pytest.mark.parametrize("model_type", GENERATING)
@pytest.mark.parametrize("beams", [1, 3])
def test_kept_keys_decode_what_recomputing_decodes(model_type, beams):
    model, (ids, real) = generator(model_type), sources(9, 4, 12)
    how = (
        {"max_new_tokens": 7, "num_beams": beams, "length_penalty": 1.3}
        if beams > 1
        else {"max_new_tokens": 7}
    )
    kept, slow = (model.generate(ids, real, reuse=reuse, **how) for reuse in (True, False))
    assert kept.tolist() == slow.tolist()
    assert len(set(kept.flatten().tolist())) > 1


def test_greedy_decoding_takes_the_likeliest_token_of_each_step():
    model, (ids, real) = generator(), sources(6, 9)
    found = model.generate(ids, real, max_new_tokens=6)
    for row, length in enumerate(real.sum(1)):
        target: list[int] = []
        while len(target) < 6 and START not in target:
            with torch.no_grad():
                target.append(int(reference(model, ids[row, :length].tolist(), target).argmax()))
        assert found[row, : len(target)].tolist() == target


def test_beams_find_targets_at_least_as_likely_as_greedy_decoding():
    model, (ids, real) = generator(seed=3), sources(5, 8, 6, 7)

    def log_likelihood(row, target):
        target, total = [*target[: target.index(START)], START] if START in target else target, 0.0
        for at, token in enumerate(target):
            with torch.no_grad():
                total += float(
                    reference(model, ids[row, : real[row].sum()].tolist(), target[:at]).log_softmax(
                        -1
                    )[token]
                )
        return total

    how = {"max_new_tokens": 4, "min_new_tokens": 4}
    greedy, beam = (model.generate(ids, real, num_beams=beams, **how).tolist() for beams in (1, 20))
    found = [(log_likelihood(row, greedy[row]), log_likelihood(row, beam[row])) for row in range(4)]
    assert all(b >= g - 1e-5 for g, b in found)
    assert any(b > g + 1e-3 for g, b in found)


def test_lengths_and_repeated_ngrams_are_bounded():
    model, (ids, real) = generator(seed=1), sources(6, 9, 7)
    found = model.generate(
        ids, real, max_new_tokens=12, min_new_tokens=5, no_repeat_ngram_size=2, num_beams=2
    ).tolist()
    for target in found:
        assert len(target) <= 12
        assert START not in target[:5]
        whole = [START, *target[: target.index(START) if START in target else None]]
        pairs = list(itertools.pairwise(whole))
        assert len(pairs) == len(set(pairs))


def test_other_sources_of_a_batch_and_padding_change_nothing():
    model, (ids, real) = generator(), sources(4, 11)
    together = model.generate(ids, real, max_new_tokens=5)
    assert together[0].tolist() == model.generate(ids[:1, :4], max_new_tokens=5)[0].tolist()


def test_a_mask_lets_targets_see_the_source_and_earlier_targets():
    found = sequence_mask(torch.tensor([2, 3]), torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]]))
    assert found[0, 0].int().tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    assert found[1, 0].int().tolist() == [[1, 1, 1, 0]] * 4


def test_a_cut_model_decodes_what_the_whole_one_does_of_the_kept_tokens():
    model = generator()
    model.config.unilm["mask_token_id"], model.generation_config.eos_token_id = 40, 41
    model.generation_config.pad_token_id = model.config.pad_token_id = 42
    kept = np.array([7, 9, *range(20, 64)])
    cut, ids = cut_model(model, kept), torch.from_numpy(kept)
    assert (cut.config.unilm["mask_token_id"], cut.generation_config.eos_token_id) == (22, 23)
    sources_of_cut = torch.randint(24, 46, (2, 9), generator=torch.Generator().manual_seed(1))
    others = [[n] for n in set(range(64)) - set(kept.tolist())]
    whole = model.generate(ids[sources_of_cut], bad_words_ids=others, max_new_tokens=6)
    assert torch.equal(whole, ids[cut.generate(sources_of_cut, max_new_tokens=6)])


def test_generating_leaves_the_models_attention_as_it_was():
    model, (ids, real) = generator(), sources(4)
    captured = capture(model, Needs(logits=True))
    before = captured({"input_ids": ids, "attention_mask": real}).logits
    model.generate(ids, real, max_new_tokens=2)
    assert torch.equal(captured({"input_ids": ids, "attention_mask": real}).logits, before)


@pytest.mark.parametrize("model_type", REFUSED)
def test_a_type_that_takes_no_such_mask_is_refused_with_the_reason(model_type, tmp_path):
    auto = AutoModel if model_type == "splinter" else AutoModelForMaskedLM
    save_model(auto.from_config(tiny_config(model_type)), tiny_tokenizer(), tmp_path)
    with pytest.raises(UsageError) as error:
        load_generator(str(tmp_path), TASK, new_head=True)
    reason = "no masked-language-model head" if model_type == "splinter" else LEAKS
    assert reason in error.value.message


def test_a_bare_encoder_gets_a_tied_head_and_is_told(tmp_path):
    model = AutoModelForMaskedLM.from_config(tiny_config("bert")).base_model
    save_model(model, tiny_tokenizer(), tmp_path)
    made = load_generator(str(tmp_path), TASK, new_head=True)
    assert "new head over the vocabulary, tied to the embeddings" in made.note
    assert made.model.get_output_embeddings().weight is made.model.get_input_embeddings().weight
    assert torch.equal(
        made.model.base_model.encoder.layer[0].output.dense.weight,
        model.encoder.layer[0].output.dense.weight,
    )
    with pytest.raises(UsageError, match="it generates no text"):
        load_generator(str(tmp_path), TASK, new_head=False)


def test_texts_give_texts_in_their_order_after_reloading(tmp_path):
    model, tokenizer = generator(seed=1), tiny_tokenizer()
    model.generation_config.max_new_tokens, tokenizer.model_max_length = 6, 40
    model.generation_config.num_beams = 2
    save_model(model, tokenizer, tmp_path)
    loaded = load_network(tmp_path)
    texts = [f"w{i} w{3 * i} " * (1 + i % 5) for i in range(40)]
    found = loaded.generate(texts)
    for text, target in zip(texts[:4], found, strict=False):
        ids = tokenizer([text], return_tensors="pt")["input_ids"]
        assert tokenizer.decode(model.generate(ids)[0], skip_special_tokens=True) == target
    assert len(set(found)) > 10
    assert loaded.generate([("w1 w2", "w3")]) == loaded.generate(["w1 w2 w3"])
    with pytest.raises(ValueError, match="no room"):
        loaded.generate(["w1"], max_new_tokens=40)
    with pytest.raises(ValueError, match="list of texts"):
        loaded.generate("w1")


@pytest.mark.parametrize(
    "value", [3, {"mask_token_id": "x"}, {"mask_token_id": 4, "position_offset": 0}]
)
def test_a_damaged_configuration_is_refused(value, tmp_path):
    save_model(generator(), tiny_tokenizer(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text("utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(config | {"unilm": value}), "utf-8")
    with pytest.raises(UsageError, match=r"unilm"):
        load_config(str(tmp_path))
