"""One setting of a saved directory is changed at a time: kdcli gives what the library that owns the
file gives, or refuses the directory.

A row is a kind of directory, a file, the keys that lead to a value in it, and the new value.
"""

import functools
import json
import operator
import shutil

import numpy as np
import pytest
import torch
import transformers
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.models import Dense, Normalize, Pooling, StaticEmbedding, Transformer
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from kdcli.deploy.predict import Predictor
from kdcli.errors import UsageError
from kdcli.workloads.embedder import Embedder

pytestmark = pytest.mark.slow

GONE = "(the key is removed)"
WORDS = [f"w{n}" for n in range(40)]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "query", "passage", ":"]
VOCABULARY = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
TEXTS = ["w1 w2 w3", "w4", "W5 w6 w7 w8 w9 w10 w11", "w12 w1 [SEP] w3", ""]
PAIRS = [("w1 w2", "w3"), ("w4 w6 w9 w3 w2 w8", "w5"), ("w7", "W8 w9 w10 w11 w12 w13 w14")]
SETTINGS, PROMPTS, POOLING = (
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "1_Pooling/config.json",
)


def tokenizer():
    backend = Tokenizer(models.WordLevel(VOCABULARY, "[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    names = {f"{name.lower()}_token": f"[{name}]" for name in ("PAD", "UNK", "CLS", "SEP", "MASK")}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=20,
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        **names,
    )


def config(**settings):
    return transformers.BertConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=24,
        initializer_range=0.3,
        **settings,
    )


def save_stock(model, folder):
    model.eval().save_pretrained(folder)
    tokenizer().save_pretrained(folder)


def save_embedder(folder):
    save_stock(transformers.BertModel(config()), folder / "encoder")
    modules = [Transformer(str(folder / "encoder")), Pooling(16), Dense(16, 6), Normalize()]
    prompts = {"query": "query : ", "document": "passage : "}
    SentenceTransformer(modules=modules, device="cpu", prompts=prompts).save(str(folder))
    shutil.rmtree(folder / "encoder")


def save_table(folder):
    table = StaticEmbedding(tokenizer().backend_tokenizer, embedding_dim=6)
    SentenceTransformer(modules=[table, Normalize()], device="cpu").save(str(folder))


def save_scorer(folder):
    save_stock(transformers.BertForSequenceClassification(config(num_labels=1)), folder / "model")
    CrossEncoder(str(folder / "model"), device="cpu").save(str(folder))
    shutil.rmtree(folder / "model")


def save_relations(folder):
    save_stock(transformers.BertForSequenceClassification(config(num_labels=3)), folder / "model")
    CrossEncoder(str(folder / "model"), device="cpu").save(str(folder))
    shutil.rmtree(folder / "model")


def save_classifier(folder):
    save_stock(transformers.BertForSequenceClassification(config(num_labels=3)), folder)


def save_tagger(folder):
    labels = dict(enumerate(["O", "PER", "LOC"]))
    save_stock(transformers.BertForTokenClassification(config(id2label=labels)), folder)


SAVED = {
    "embedder": save_embedder,
    "table": save_table,
    "scorer": save_scorer,
    "relations": save_relations,
    "classifier": save_classifier,
    "tagger": save_tagger,
}


def texts_of(folder):
    """The texts that have a token: transformers can run one without any only next to others."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    return [text for text in TEXTS if tokenizer(text)["input_ids"]]


def vectors_of_owner(folder):
    model = SentenceTransformer(folder, device="cpu")
    # One text at a time, because padding on the left shifts the positions of BERT.
    return np.stack(
        [
            encode([text])[0]
            for encode in (model.encode, model.encode_query, model.encode_document)
            for text in TEXTS
        ]
    )


def vectors_of_kdcli(folder, session):
    model = Embedder.open_scored(folder)
    vectors = [model.vectors(TEXTS, role, session) for role in ("", "query", "document")]
    np.testing.assert_allclose(Predictor.open(folder).predict(TEXTS), vectors[0], atol=1e-5)
    return np.concatenate(vectors)


def scores_of_owner(folder):
    model = CrossEncoder(folder, device="cpu")
    return np.stack([model.predict([pair])[0] for pair in PAIRS])


def scores_of_kdcli(folder, session):
    return np.array(Predictor.open(folder).predict(PAIRS))


def relations_of_owner(folder):
    model = CrossEncoder(folder, device="cpu")
    return np.stack([model.predict([pair], apply_softmax=True)[0] for pair in PAIRS])


def relations_of_kdcli(folder, session):
    return np.array([list(each.scores.values()) for each in Predictor.open(folder).predict(PAIRS)])


def classes_of_owner(folder):
    pipe = transformers.pipeline("text-classification", model=folder, device="cpu")
    pairs = [{"text": one, "text_pair": other} for one, other in PAIRS]
    answers = pipe([*texts_of(folder), *pairs], truncation=True, top_k=None)
    return [{each["label"]: each["score"] for each in answer} for answer in answers]


def classes_of_kdcli(folder, session):
    model = Predictor.open(folder)
    return [answer.scores for answer in [*model.predict(texts_of(folder)), *model.predict(PAIRS)]]


def tags_of_owner(folder):
    pipe = transformers.pipeline("token-classification", model=folder, device="cpu")
    return [
        letters(text, [(each["start"], each["end"], each["entity"]) for each in pipe(text)])
        for text in TEXTS[:4]
    ]


def tags_of_kdcli(folder, session):
    of_texts = Predictor.open(folder).predict(TEXTS[:4])
    return [
        letters(text, [(each.start, each.end, each.label) for each in found])
        for text, found in zip(TEXTS, of_texts, strict=False)
    ]


def letters(text, found):
    """The label of each letter, because kdcli joins neighbours and a token may be a whole text."""
    return [
        [place, label]
        for start, end, label in found
        for place in range(start, end)
        if text[place] != " "
    ]


OUTPUTS = {
    "embedder": (vectors_of_owner, vectors_of_kdcli),
    "table": (vectors_of_owner, vectors_of_kdcli),
    "scorer": (scores_of_owner, scores_of_kdcli),
    "relations": (relations_of_owner, relations_of_kdcli),
    "classifier": (classes_of_owner, classes_of_kdcli),
    "tagger": (tags_of_owner, tags_of_kdcli),
}


def change(folder, file, path, value):
    """Set the value under the keys `a/b/c` of a JSON file, which may not exist yet."""
    place = folder / file
    tree = json.loads(place.read_text("utf-8")) if place.is_file() else {}
    *outer, last = (int(key) if key.isdigit() else key for key in path.split("/"))
    inside = functools.reduce(operator.getitem, outer, tree)
    if value == GONE:
        inside.pop(last)
    else:
        inside[last] = value
    place.write_text(json.dumps(tree), "utf-8")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    for kind, save in SAVED.items():
        torch.manual_seed(0)
        (folder / kind).mkdir()
        save(folder / kind)
    return folder


@pytest.fixture
def changed(saved, tmp_path):
    def of_row(kind, file, path, value):
        shutil.copytree(saved / kind, tmp_path / "model")
        change(tmp_path / "model", file, path, value)
        return str(tmp_path / "model")

    return of_row


def assert_same(theirs, ours):
    if isinstance(theirs, np.ndarray):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
        return
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert one == (pytest.approx(other, abs=1e-5) if isinstance(other, dict) else other)


def rows(table):
    return [
        pytest.param(kind, file, path, value, id=f"{kind} {file} {path} {value}"[:120])
        for (kind, file), of_file in table.items()
        for path, values in of_file.items()
        for value in values
    ]


OBEYED = {
    ("embedder", SETTINGS): {
        "max_seq_length": [6, 500, None],
        "processing_kwargs": [
            {"text": {"max_length": 6}},
            {"common": {"max_length": 6}, "text": {"max_length": 8}},
            {"audio": {"max_length": 6}, "text": {"max_length": None}},
        ],
        "model_args": [{"attn_implementation": "eager", "add_pooling_layer": False}],
        "config_kwargs": [{"trust_remote_code": True}],
        "unpad_inputs": [True],
    },
    ("embedder", PROMPTS): {
        "prompts": [{}, {"query": "w3 "}, {"passage": "w3 "}, {"query": None, "document": "w3 "}],
        "default_prompt_name": ["query", "document"],
        "truncate_dim": [3, 100],
        "similarity_fn_name": ["dot", None],
        "requirements": [{"torch": ">=1"}],
    },
    ("embedder", POOLING): {
        "pooling_mode": ["cls", "lasttoken", "max", "weightedmean", ["cls"], GONE],
        "pooling_mode_cls_token": [True],
    },
    ("embedder", "2_Dense/config.json"): {
        "activation_function": [
            *("torch.nn.modules.linear.Identity", "torch.nn.modules.activation.ReLU", GONE),
            *("torch.nn.modules.activation.GELU", "torch.nn.SiLU"),
        ]
    },
    ("embedder", "modules.json"): {"1/type": ["sentence_transformers.models.Pooling"]},
    ("scorer", PROMPTS): {
        "activation_fn": [
            "torch.nn.modules.linear.Identity",
            "torch.nn.Sigmoid",
            "mine.Identity",
            None,
            GONE,
        ],
        "prompts": [{"query": "w3 "}],
        "keep_in_fp32_modules": [["0.model.classifier"]],
    },
    ("scorer", SETTINGS): {
        "max_seq_length": [6],
        "processing_kwargs": [{"text": {"max_length": 6}}],
    },
    ("scorer", "config.json"): {
        "sbert_ce_default_activation_function": ["torch.nn.modules.linear.Identity"],
        "sentence_transformers": [{"activation_fn": "mine.Identity"}, {"version": "5"}],
        "problem_type": ["regression", "multi_label_classification"],
    },
    ("relations", SETTINGS): {
        "max_seq_length": [6],
        "processing_kwargs": [{"text": {"max_length": 6}}],
    },
    ("table", PROMPTS): {"prompts": [{"query": "w3 "}], "truncate_dim": [3]},
    ("table", SETTINGS): {"max_seq_length": [4]},
    ("table", "tokenizer_config.json"): {
        "model_max_length": [4],
        "tokenizer_class": ["BertTokenizer"],
    },
    ("table", "special_tokens_map.json"): {"pad_token": ["w9"]},
}
CUT = {"max_length": 5, "strategy": "LongestFirst", "stride": 0}
FIXED = {"strategy": {"Fixed": 16}, "direction": "Left", "pad_to_multiple_of": 8}
FIXED |= {"pad_id": 7, "pad_type_id": 1, "pad_token": "w3"}
CLS = {"SpecialToken": {"id": "[CLS]", "type_id": 0}}
TEMPLATE = [CLS, {"Sequence": {"id": "A", "type_id": 1}}]
for kind in ("embedder", "classifier", "scorer", "table", "tagger"):
    OBEYED[kind, "tokenizer.json"] = {
        "truncation": [CUT | {"direction": "Right"}, CUT | {"direction": "Left"}],
        "padding": [FIXED],
        "normalizer": [{"type": "Lowercase"}],
        "model/unk_token": ["w9"],
        "post_processor/special_tokens/[CLS]/ids": [[9]],
    }
for kind in ("embedder", "classifier", "scorer", "tagger"):
    OBEYED[kind, "tokenizer.json"]["post_processor/single"] = [TEMPLATE]
    OBEYED[kind, "tokenizer_config.json"] = {
        "model_max_length": [6, 500, GONE],
        "truncation_side": ["left"],
        "padding_side": ["left"],
        "do_lower_case": [True],
        "model_input_names": [["input_ids", "attention_mask"]],
        "pad_token": ["w3"],
        "max_length": [6],
        "stride": [3],
        "split_special_tokens": [True],
        "extra_special_tokens": [["w3"]],
        "tokenizer_class": ["BertTokenizer"],
    }
    OBEYED.setdefault((kind, "config.json"), {}).update(
        hidden_act=["relu"],
        layer_norm_eps=[0.5],
        hidden_dropout_prob=[0.5],
        attn_implementation=["eager"],
        pad_token_id=[5],
    )
OBEYED["classifier", "config.json"] |= {
    "problem_type": ["single_label_classification"],
    "id2label": [{"0": "a", "1": "b", "2": "c"}],
    "function_to_apply": ["sigmoid"],
}


@pytest.mark.parametrize(("kind", "file", "path", "value"), rows(OBEYED))
def test_a_setting_is_obeyed_as_by_its_owner(kind, file, path, value, changed, session):
    folder, (of_owner, of_kdcli) = changed(kind, file, path, value), OUTPUTS[kind]
    assert_same(of_owner(folder), of_kdcli(folder, session))


REFUSED = {
    ("embedder", SETTINGS): {
        "do_lower_case": [True],
        "processing_kwargs": [
            {"text": {"truncation": False}},
            {"text": {"truncation": "only_first"}},
            {"text": {"add_special_tokens": False}},
            {"text": {"pad_to_multiple_of": 8}},
            {"others": {"max_length": 6}},
        ],
        "query_length": [6],
        "document_length": [6],
        "query_expansion": [{"strategy": "fixed", "length": 8}],
        "model_kwargs": [{"hidden_act": "relu"}],
        "tokenizer_args": [{"model_max_length": 6}, 5],
        "processor_kwargs": [{"do_lower_case": True}],
        "config_args": [{"hidden_act": "relu"}],
        "tokenizer_name_or_path": ["other"],
        "transformer_task": ["fill-mask"],
        "module_output_name": ["sentence_embedding", GONE],
        "no_such_setting": [1],
    },
    ("embedder", PROMPTS): {
        "default_prompt_name": ["passage", "", 5],
        "prompts": [{"query": 5}, ["a"], None],
        "truncate_dim": [0, -2, True, "3"],
        "similarity_fn_name": ["maxsim"],
        "requirements": [{"no-such-package": ">=1"}],
        "model_type": ["SparseEncoder", "CrossEncoder", "other", None],
        "no_such_setting": [1],
    },
    ("embedder", POOLING): {
        "pooling_mode": ["last", "mean_tokens", ["cls", "mean"], [], None],
        "include_prompt": [False],
        "embedding_dimension": [GONE],
        "no_such_setting": [1],
    },
    ("embedder", "2_Dense/config.json"): {
        "activation_function": ["torch.nn.functional.tanh", "torch.nn.NoSuch", "mine.Tanh", 5],
        "bias": [False],
        "in_features": [8],
        "out_features": [8],
        "use_residual": [True],
        "module_input_name": ["token_embeddings", None],
        "module_output_name": ["other"],
        "no_such_setting": [1],
    },
    ("embedder", "3_Normalize/config.json"): {
        "module_input_name": ["token_embeddings", None],
        "no_such_setting": [1],
    },
    ("embedder", "modules.json"): {
        "0/path": ["0_Transformer", "a/b", ".."],
        "0/type": ["mine.Transformer"],
        "1/path": ["elsewhere"],
        "2/type": ["sentence_transformers.models.Dropout", GONE],
        "3/name": ["2", "", "a.b", None],
    },
    ("scorer", PROMPTS): {
        "activation_fn": ["torch.nn.modules.activation.Tanh", "torch.nn.functional.sigmoid"],
        "default_prompt_name": ["query"],
        "requirements": [{"no-such-package": ">=1"}],
        "no_such_setting": [1],
    },
    ("scorer", SETTINGS): {
        "do_lower_case": [True],
        "query_length": [6],
        "tokenizer_args": [{"model_max_length": 6}],
        "transformer_task": ["feature-extraction", GONE],
        "module_output_name": [GONE],
    },
    ("relations", SETTINGS): {
        "do_lower_case": [True],
        "query_length": [6],
        "transformer_task": [GONE],
    },
    ("relations", PROMPTS): {"default_prompt_name": ["query"], "no_such_setting": [1]},
    ("scorer", "modules.json"): {"0/path": ["0_Transformer"], "0/type": ["mine.Transformer"]},
    ("table", PROMPTS): {"model_type": ["other", None], "no_such_setting": [1]},
    ("table", "modules.json"): {"0/path": ["0_StaticEmbedding"]},
    ("scorer", "config.json"): {"architectures": [["MyBertForSequenceClassification"]]},
    ("classifier", "config.json"): {
        "problem_type": ["regression"],
        "architectures": [["MyBertForSequenceClassification"], ["HF_ColBERT"]],
        "id2label/0": [None],
    },
    ("tagger", "config.json"): {"id2label/2": [None]},
}
NO_VERSIONS = [None, {"sentence_transformers": "w3"}, {"sentence_transformers": None}]
for kind in ("embedder", "table", "scorer", "relations"):
    REFUSED[kind, PROMPTS]["__version__"] = NO_VERSIONS
for kind in SAVED:
    # Two tokens with one id: the library chooses at random.
    REFUSED[kind, "tokenizer.json"] = {"model/vocab/w3": [48, 500], "model/vocab/w11": [0]}
for kind in ("embedder", "classifier", "scorer", "tagger"):
    REFUSED[kind, "tokenizer.json"] |= {
        "post_processor/special_tokens/[CLS]/ids": [[500]],
        "post_processor/single": [
            [{"Sequence": {"id": "A", "type_id": 2}}],
            [CLS] * 30,
            [CLS],
        ],
        "post_processor/pair": [[*TEMPLATE, {"Sequence": {"id": "B", "type_id": 5}}], []],
    }
    REFUSED[kind, "tokenizer_config.json"] = {
        "model_max_length": [0],
        "pad_token": [GONE, "<pad>"],
        "unk_token": [""],
        "extra_special_tokens": [["<url>"]],
    }
    REFUSED.setdefault((kind, "config.json"), {}).update(
        pad_token_id=[500],
        type_vocab_size=[1],
        vocab_size=[40, 50],
        num_hidden_layers=[2],
        is_decoder=[True],
        is_causal=[True],
        return_dict=[False],
        chunk_size_feed_forward=[3],
        _attn_implementation=["flash_attention_2"],
    )


@pytest.mark.parametrize(("kind", "file", "path", "value"), rows(REFUSED))
def test_a_setting_that_cannot_be_obeyed_is_refused(kind, file, path, value, changed, session):
    folder, (_, of_kdcli) = changed(kind, file, path, value), OUTPUTS[kind]
    with pytest.raises(UsageError):
        of_kdcli(folder, session)
