"""Write the front matter of a model card, which the hub reads and searches."""

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from jinja2 import Environment, PackageLoader, StrictUndefined, Template, select_autoescape

from kdcli.data.tasks import named_tasks
from kdcli.disk import EMBEDDED, cached_file, is_path

CARD_FILE, MAX_CARD_BYTES = "README.md", 1 << 20
METHOD_TAGS = ("distillation", "pruned", "quantized")
"""Tags of the hub for how a model was made. A model keeps the tags of the one it was made from."""
MODEL_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
INHERITED_FIELDS = ("license", "license_name", "license_link", "language", "datasets")
EMBEDDER = "SentenceTransformer"  # the class that loads an embedding model
PIPELINES = {  # class -> the hub's name of its task
    "AutoModel": "feature-extraction",
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModelForQuestionAnswering": "question-answering",
    EMBEDDER: "sentence-similarity",
}


@functools.cache
def template(package: str, name: str) -> Template:
    """Return the template of a text, a file of a package."""
    # Authors of Markdown escape names themselves.
    return Environment(
        loader=PackageLoader(package, "."),
        autoescape=select_autoescape(["html.jinja"]),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    ).get_template(name)


@dataclass(frozen=True)
class Score:
    """The metrics of a model on one set of a task."""

    task: str
    set: str
    split: str
    metrics: Mapping[str, float]


def front_matter(
    name: str,
    *,
    base: str,
    relation: str | None,
    library: str,
    tags: list[str],
    pipeline: str | None,
    task: str | None = None,
    data: str | None = None,
    scores: Iterable[Score] = (),
) -> str:
    """Return the YAML that the hub reads about a model.

    The licence and the languages come from the base model's card, if it has them.

    Args:
        name: The name of the model.
        base: The hub id or directory of the base model; may be empty. The hub id of a directory is
            read from its card.
        relation: The relation to the base model, in the hub's words: finetune or quantized.
        library: The Python library that loads the model.
        tags: The tags of the model.
        pipeline: The hub's name of the task.
        task: kdcli's name of the task.
        data: The source of the examples or texts; None for the task's own data set.
        scores: The model's scores.
    """
    base, _, revision = base.partition("@")
    base_card = _card_of(base, revision or None)
    on_hub = MODEL_ID.fullmatch(base) and base not in EMBEDDED and not is_path(base)
    base_model = base if on_hub else base_card.get("base_model")
    inherited: dict[str, Any] = {
        key: base_card[key] for key in INHERITED_FIELDS if key in base_card
    }
    dataset = hub_data_set(task, data)
    datasets = _listed(inherited.pop("datasets", None)) + _listed(dataset)
    kept = [tag for tag in METHOD_TAGS if tag in _listed(base_card.get("tags"))]
    if base_model and relation:
        inherited["base_model_relation"] = relation
    card = ModelCardData(
        library_name=library,
        tags=list(dict.fromkeys([*tags, *kept])),
        pipeline_tag=pipeline,
        base_model=base_model,
        datasets=list(dict.fromkeys(datasets)) or None,
        **inherited,
    )
    store_scores(card, name, scores, dataset)
    return card.to_yaml().strip()


def store_scores(
    card: ModelCardData, name: str, scores: Iterable[Score], dataset: str | None
) -> None:
    """Replace the scores of a card. The hub shows them next to the card.

    Args:
        card: The metadata of the card.
        name: The name of the model.
        scores: The model's scores.
        dataset: The data set of the hub that they are from, if there is one.
    """
    results = [
        EvalResult(
            task_type=card.pipeline_tag or "text-classification",
            dataset_type=dataset or score.task,
            dataset_name=" ".join(filter(None, (score.task, score.set))),
            dataset_split=score.split,
            metric_type=metric,
            metric_value=value,
        )
        for score in scores
        for metric, value in score.metrics.items()
    ]
    card.model_name = name if results else None
    card.metrics = list(dict.fromkeys(result.metric_type for result in results)) or None
    card.eval_results = results or None


def _card_of(base: str, revision: str | None) -> dict[str, str | list[str]]:
    """Read the front matter of a model's card from its directory or from the cache of the hub."""
    if not base:
        return {}
    local = is_path(base)
    file = Path(base) / CARD_FILE if local else cached_file(base, CARD_FILE, revision)
    if file is None or not file.is_file() or file.stat().st_size > MAX_CARD_BYTES:
        return {}
    try:
        card = ModelCard(file.read_text("utf-8"), ignore_metadata_errors=True)
    except (ValueError, yaml.YAMLError):
        return {}  # other people's files may hold anything
    values = card.data.to_dict()  # type: ignore[no-untyped-call]
    return {key: value for key, value in values.items() if isinstance(value, str | list)}


def hub_data_set(task: str | None, data: str | None) -> str | None:
    """Return the data set of the hub that was used, if there was one.

    Args:
        task: kdcli's name of the task.
        data: The source of the rows; None for the task's own data set.
    """
    if data is not None:
        name = re.split("[:@]", data)[0]
        return name if re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name) and not is_path(name) else None
    row = named_tasks().get(task) if task else None
    return row.hub[0] if row and row.hub else None


def _listed(value: object) -> list[str]:
    """Return a value of a card as a list; empty if there is no value."""
    return value if isinstance(value, list) else [str(value)] if value else []
