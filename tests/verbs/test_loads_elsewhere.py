"""Other programs compute the same from what kdcli writes: transformers, sentence-transformers, ONNX
Runtime alone, transformers.js and fastembed."""

import json
import re

import numpy as np
import own_files
import pytest
import torch
import transformers
from clients import fastembed, node  # noqa: F401
from encoders import TYPES, on_disk, tiny_config
from huggingface_hub import ModelCard
from scipy.special import expit, softmax
from sentence_transformers import SentenceTransformer
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from kdcli.models.embedding_format import POOLING_KEYS, EmbeddingFormat
from kdcli.verbs.export.readme import TYPED_TOKENIZERS, UNKNOWN_TYPES, JsModel, default_dtype

TEXTS = ["w1 w2 w3 w4", "w21 w22 w20", "w3 w21 w4 w5 w22 w1"]
# The texts of the model card.
ONE = ["A first text.", "A second and somewhat longer one."]
QUESTION = ["Where is it?", "It is in the house."]
PAIRS = ["Where is it?", "Where is it?"], ["It is in the house.", "A first text."]
ALL, INT8 = ("--int8", "--fp16", "--q4", "--weights"), ("--int8",)
FORMATS = {
    "mean": EmbeddingFormat("mean", normalize=True),
    "cls": EmbeddingFormat("cls", normalize=False),
    "dense": EmbeddingFormat("mean", normalize=True, layers=(own_files.DENSE,)),
}
IDENTITY = "torch.nn.modules.linear.Identity"
NAMES = {0: "no", 1: "maybe", 2: "yes"}
HEADS = {
    "class": (transformers.AutoModelForSequenceClassification, {"id2label": NAMES}),
    "multi": (
        transformers.AutoModelForSequenceClassification,
        {"id2label": NAMES, "problem_type": "multi_label_classification"},
    ),
    "score": (
        transformers.AutoModelForSequenceClassification,
        {"num_labels": 1, "problem_type": "regression"},
    ),
    "rank": (
        transformers.AutoModelForSequenceClassification,
        {"num_labels": 1, "sentence_transformers": {"activation_fn": IDENTITY}},
    ),
    "tokens": (transformers.AutoModelForTokenClassification, {"id2label": NAMES}),
    "span": (transformers.AutoModelForQuestionAnswering, {}),
    "none": (transformers.AutoModel, {}),
}
KINDS = (*HEADS, *FORMATS)
TAGS = {
    "class": "text-classification",
    "multi": "text-classification",
    "score": "text-classification",
    "rank": "text-classification",
    "tokens": "token-classification",
    "span": "question-answering",
}
AUTO = {
    "feature-extraction": "AutoModel",
    "text-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "question-answering": "AutoModelForQuestionAnswering",
}


def as_published(folder):
    """Give a tokenizer the words of the model card, and separators around texts."""
    words = re.findall(r"\w+|[.?]", " ".join([*ONE, *QUESTION]))
    names = {f"w{30 + n}": word for n, word in enumerate(dict.fromkeys(words))}
    content = json.loads((folder / "tokenizer.json").read_text("utf-8"))
    vocabulary = content["model"]["vocab"]
    content["model"]["vocab"] = {names.get(word, word): n for word, n in vocabulary.items()}
    (folder / "tokenizer.json").write_text(json.dumps(content), "utf-8")
    file = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = [(token, file.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    file.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ids
    )
    file.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def model_of(tmp_path_factory):
    """Kind of a head or format of vectors -> the directory of a model."""
    models = {}

    def model(kind):
        if kind in models:
            return models[kind]
        folder = tmp_path_factory.mktemp(kind)
        if kind in FORMATS:
            base = as_published(own_files.encoder(folder / "base", num_hidden_layers=1))
            own_files.embedder(folder / "model", FORMATS[kind], base=base)
        else:
            auto, settings = HEADS[kind]
            torch.manual_seed(0)
            config = tiny_config("bert", num_hidden_layers=1, initializer_range=0.3, **settings)
            as_published(on_disk(auto.from_config(config), folder / "model"))
        models[kind] = folder / "model"
        return models[kind]

    return model


@pytest.fixture(scope="module")
def exported(model_of, tmp_path_factory):
    """Kind and options -> the model, and its export to ONNX."""
    exports = {}

    def export(kind, *options):
        if (kind, options) not in exports:
            folder = tmp_path_factory.mktemp("exports") / "out"
            own_files.succeeds("export", model_of(kind), "--format", "onnx", *options, "-o", folder)
            exports[kind, options] = model_of(kind), folder
        return exports[kind, options]

    return export


RUN = """import { pipeline } from "@huggingface/transformers";
const [task, texts, options, dtypes] = process.argv.slice(2).map((each) => JSON.parse(each));
for (const dtype of dtypes) {
  const run = await pipeline(task, "./", dtype === null ? {} : { dtype });
  const output = await run(texts, options);
  console.log(output.tolist ? output.tolist() : output);
}
"""


def by_node(node, folder, task, *dtypes, **options):  # noqa: F811
    """Run the pipeline of transformers.js once with each dtype; None stands for no dtype."""
    arguments = [json.dumps(each) for each in (task, TEXTS, options, dtypes)]
    return [output for (output,) in node(RUN, folder, *arguments)]


def test_the_int8_file_has_two_names_and_is_stored_once(exported):
    _, folder = exported("mean", *INT8)
    first, second = (folder / "onnx" / f"model_{name}.onnx" for name in ("quantized", "int8"))
    assert first.samefile(second)


def test_transformers_js_runs_a_packed_file_as_the_int8_file(node, exported):  # noqa: F811
    model, folder = exported("mean", "--int8", "--pack")
    expected = SentenceTransformer(str(model), device="cpu").encode(TEXTS)
    pooled = {"pooling": "mean", "normalize": True}
    first, second, default = by_node(
        node, folder, "feature-extraction", "q8", "int8", None, **pooled
    )
    assert first == second == default
    assert ((np.array(first) * expected).sum(-1) > 0.98).all()


def test_vectors_by_transformers_js_with_every_dtype(node, exported):  # noqa: F811
    model, folder = exported("mean", *ALL)
    expected = SentenceTransformer(str(model), device="cpu").encode(TEXTS)
    dtypes = ("fp32", None, "fp16", "q8", "int8", "q4")
    pooled = {"pooling": "mean", "normalize": True}
    vectors = dict(
        zip(dtypes, by_node(node, folder, "feature-extraction", *dtypes, **pooled), strict=True)
    )
    np.testing.assert_allclose(vectors["fp32"], expected, atol=1e-5)
    # Node takes the float32 file if no dtype is given.
    assert vectors[None] == vectors["fp32"]
    np.testing.assert_allclose(vectors["fp16"], expected, atol=1e-2)
    assert vectors["int8"] == vectors["q8"] != vectors["fp32"]
    for dtype, least in (("q8", 0.99), ("q4", 0.9)):
        assert ((np.array(vectors[dtype]) * expected).sum(-1) > least).all()


def card_code(folder):
    (code,) = re.findall(r"```js\n(.*?)```", (folder / "README.md").read_text("utf-8"), re.DOTALL)
    return code


def file_outputs(folder, *texts):
    """Run the int8 file on texts with ONNX Runtime in Python."""
    session = pytest.importorskip("onnxruntime").InferenceSession(
        folder / "onnx" / "model_quantized.onnx"
    )
    inputs = AutoTokenizer.from_pretrained(folder)(
        *texts, padding=True, return_token_type_ids=True, return_tensors="np"
    )
    names = [each.name for each in session.get_outputs()]
    arrays = session.run(names, {each.name: inputs[each.name] for each in session.get_inputs()})
    return inputs, dict(zip(names, arrays, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "span"])
def test_the_javascript_of_the_card_and_the_snippet_of_the_hub(node, exported, kind):  # noqa: F811
    """The hub's snippet takes its task from the card and gives no dtype."""
    _, folder = exported(kind, *INT8)
    data = ModelCard.load(folder / "README.md").data
    assert data.library_name == "onnx"
    assert {"transformers.js", "quantized"} <= set(data.tags)
    assert data.pipeline_tag == TAGS.get(kind, "feature-extraction")
    assert ("sentence-similarity" in data.tags) == (kind in FORMATS)
    assert data.base_model is None
    code = card_code(folder)
    assert 'dtype: "q8"' in code
    snippet = f"""
import {{ pipeline as allocate }} from "@huggingface/transformers";
const pipe = await allocate("{data.pipeline_tag}", "./");
console.log(pipe.task);
"""
    (printed, *others), *task = node(code + snippet, folder)
    assert task == [[data.pipeline_tag]]
    inputs, outputs = file_outputs(folder, *(PAIRS if kind == "rank" else [ONE]))
    logits, near = outputs.get("logits"), {"atol": 1e-4}
    if kind in FORMATS:
        vectors = outputs["sentence_embedding"]
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
        np.testing.assert_allclose(printed, vectors, **near)
    elif kind == "none":
        assert printed == list(outputs["last_hidden_state"].shape)
    elif kind == "class":
        scores = softmax(logits, axis=-1)
        assert [row["label"] for row in printed] == [NAMES[i] for i in scores.argmax(-1)]
        np.testing.assert_allclose([row["score"] for row in printed], scores.max(-1), **near)
    elif kind == "multi":
        named = [{each["label"]: each["score"] for each in row} for row in printed]
        found = [[row[name] for name in NAMES.values()] for row in named]
        np.testing.assert_allclose(found, expit(logits), **near)
    elif kind in ("score", "rank"):
        np.testing.assert_allclose(printed, logits, **near)
    else:
        for row, labels, mask in zip(
            printed, logits.argmax(-1), inputs["attention_mask"], strict=True
        ):
            found = {each["index"]: each["entity"] for each in row}
            real = {n: NAMES[int(labels[n])] for n in range(int(mask.sum()))}
            assert {n: real.get(n) for n in found} == found != {}
    assert others == []


def test_a_pair_keeps_its_token_types_in_javascript(node, exported):  # noqa: F811
    """The class of the tokenizer decides whether transformers.js returns token types."""
    _, folder = exported("span", *INT8)
    assert ModelCard.load(folder / "README.md").data.library_name == "onnx"
    inputs, outputs = file_outputs(folder, *([text] for text in QUESTION))
    assert inputs["token_type_ids"].any()
    ((start, end),) = node(card_code(folder), folder)
    np.testing.assert_allclose(start, outputs["start_logits"], atol=1e-4)
    np.testing.assert_allclose(end, outputs["end_logits"], atol=1e-4)

    tokenizer_config = folder / "tokenizer_config.json"
    settings = json.loads(tokenizer_config.read_text())
    tokenizer_config.write_text(json.dumps(settings | {"tokenizer_class": "BertTokenizer"}))
    ((printed,),) = node(JsModel("span", "bert").code("int8"), folder)
    # The context begins after the first separator. Of the special tokens, transformers.js only
    # keeps the first in the softmax, and never as an answer.
    ids = inputs["input_ids"][0]
    kept = (np.arange(len(ids)) > list(ids).index(3)) & ~np.isin(ids, [2, 3])
    kept[0] = True
    start, end = (
        softmax(np.where(kept, outputs[f"{name}_logits"][0], -np.inf)) for name in ("start", "end")
    )
    start[0] = end[0] = 0
    assert printed["score"] == pytest.approx(np.triu(np.outer(start, end)).max(), rel=1e-3)


def test_the_tokenizers_of_transformers_js_that_return_token_types(node, exported):  # noqa: F811
    _, folder = exported("mean", *INT8)
    code = """import * as library from "@huggingface/transformers";
import { readFileSync } from "node:fs";
const [file, config] = ["tokenizer.json", "tokenizer_config.json"].map(
  (name) => JSON.parse(readFileSync(name, "utf-8")),
);
for (const [name, each] of Object.entries(library)) {
  if (!name.endsWith("Tokenizer") || name === "AutoTokenizer") continue;
  if (new each(structuredClone(file), config).return_token_type_ids) console.log(name);
}
"""
    assert {name for (name,) in node(code, folder)} == TYPED_TOKENIZERS


def test_javascript_pools_only_as_the_file_does():
    poolings = {
        p: JsModel("embedding", "bert", EmbeddingFormat(p)).code("int8") for p in POOLING_KEYS
    }
    # The pipeline takes the last position of every row, which may be padding.
    by_pipeline = {pooling for pooling, code in poolings.items() if "pipeline(" in code}
    assert by_pipeline == {"mean", "cls"}
    assert all("sentence_embedding" in poolings[p] for p in POOLING_KEYS if p not in by_pipeline)


@pytest.mark.parametrize("pooling", ["mean", "lasttoken"])
def test_javascript_normalises_vectors_that_are_compared_by_cosine(pooling):
    def normalises(**changes):
        code = JsModel("embedding", "bert", EmbeddingFormat(pooling, **changes)).code("int8")
        return "normalize: true" in code or ".normalize(2, -1)" in code

    assert normalises(normalize=False)
    assert not normalises(normalize=False, similarity="dot")


@pytest.mark.parametrize(
    ("precisions", "dtype"),
    [
        (["int8"], "q8"),
        (["q4"], "q4"),
        (["fp32"], "fp32"),
        (["fp32", "fp16"], "fp32"),
        (["fp32", "int8"], None),
    ],
)
def test_config_names_a_dtype_unless_every_device_finds_its_default(precisions, dtype):
    """transformers.js opens the float32 file in Node and the one of q8 in browsers."""
    assert default_dtype(precisions) == dtype


def test_the_types_that_transformers_js_refuses(node, exported):  # noqa: F811
    _, folder = exported("mean", *INT8)
    code = f"""import * as library from "@huggingface/transformers";
const tasks = {json.dumps(AUTO)};
for (const [task, name] of Object.entries(tasks))
  console.log(task, {json.dumps(list(TYPES))}.filter((type) => !library[name].supports(type)));
"""
    refused = {task: set(types) for task, types in node(code, folder)}
    assert refused == UNKNOWN_TYPES


FASTEMBED = """
import json, sys
from fastembed import TextEmbedding
from fastembed.common.model_description import ModelSource, PoolingType
folder, texts, dim, files = map(json.loads, sys.argv[1:])
vectors = {}
for number, file in enumerate(files):
    for pooling, output in ((PoolingType.MEAN, None), (PoolingType.DISABLED, "sentence_embedding")):
        name = f"own/{number}-{pooling.name}"
        TextEmbedding.add_custom_model(
            name, pooling=pooling, normalization=output is None, dim=dim, model_file=file,
            sources=ModelSource(hf="own/model"), output_name=output,
        )
        model = TextEmbedding(name, specific_model_path=folder)
        vectors[f"{file} {pooling.name}"] = [list(map(float, v)) for v in model.embed(texts)]
print(json.dumps(vectors))
"""


def by_fastembed(fastembed, folder, texts, dim, *files):  # noqa: F811
    """File and pooling -> the vectors that fastembed computes."""
    arguments = [json.dumps(each) for each in (str(folder), texts, dim, files)]
    return {key: np.array(vectors) for key, vectors in fastembed(FASTEMBED, *arguments).items()}


def test_vectors_by_fastembed(fastembed, exported):  # noqa: F811
    model, folder = exported("mean", *ALL)
    expected = SentenceTransformer(str(model), device="cpu").encode(TEXTS)
    files = ("onnx/model.onnx", "onnx/model_quantized.onnx", "onnx/model_int8.onnx")
    for key, vectors in by_fastembed(fastembed, folder, TEXTS, 32, *files).items():
        if key.startswith("onnx/model.onnx"):
            np.testing.assert_allclose(vectors, expected, atol=1e-5)
        else:
            assert ((vectors * expected).sum(-1) > 0.99).all()
