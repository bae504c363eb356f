"""The front matter of a model directory: what the hub, and whoever searches it, reads of a model."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData, try_to_load_from_cache

from kdcli.data.tasks import tasks

CARD, MOST_BYTES = "README.md", 1 << 20
HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
RERANKED = "rerank"
INHERITED = ("license", "license_name", "license_link", "language", "datasets")
EMBEDDER = "SentenceTransformer"  # Loads an embedding model
PIPELINES = {  # What the hub calls the task of a class
    "AutoModel": "feature-extraction",
    "AutoModelForMaskedLM": "fill-mask",
    "AutoModelForSequenceClassification": "text-classification",
    "AutoModelForTokenClassification": "token-classification",
    "AutoModelForQuestionAnswering": "question-answering",
    EMBEDDER: "sentence-similarity",
}


def front_matter(
    name: str,
    *,
    base: str,  # Hub id or directory; empty where there is none
    relation: str | None,  # As the hub takes it: finetune or quantized
    library: str,
    tags: list[str],
    pipeline: str | None,
    task: str | None = None,
    data: str
    | None = None,  # Where its examples or texts are from; None for the task's own data set
    scores: Iterable[Mapping[str, Any]] = (),  # `task`, `set`, `split` and `metrics` of each
) -> str:
    """YAML of the front matter. Licence and languages are those of the base, where its card says them; a base that lies
    in a directory is named by the hub model that it came from."""
    base, _, revision = base.partition("@")
    above = _card_of(base, revision or None)
    known = (
        base
        if HUB_ID.fullmatch(base) and base != "demo" and not Path(base).exists()
        else above.get("base_model")
    )
    datasets = [found] if (found := _dataset(task, data)) else []
    inherited: dict[str, Any] = {key: above[key] for key in INHERITED if key in above}
    datasets = list(dict.fromkeys([*_listed(inherited.pop("datasets", None)), *datasets]))
    results = [
        EvalResult(
            task_type=pipeline or "text-classification",
            dataset_type=found or str(row["task"]),
            dataset_name=" ".join(filter(None, (row["task"], row["set"]))),
            dataset_split=row["split"],
            metric_type=metric,
            metric_value=value,
        )
        for row in scores
        for metric, value in row["metrics"].items()
    ]
    made = ModelCardData(
        model_name=name if results else None,
        library_name=library,
        tags=tags,
        pipeline_tag=pipeline,
        base_model=known,
        datasets=datasets or None,
        metrics=list(dict.fromkeys(result.metric_type for result in results)) or None,
        eval_results=results or None,
        **inherited | ({"base_model_relation": relation} if known and relation else {}),
    )
    return made.to_yaml().strip()


def _card_of(base: str, revision: str | None) -> dict[str, Any]:
    """The front matter of a model's card, if it is here: in its directory, or in the cache of the hub."""
    file: Any = Path(base) / CARD if base else None
    if base and not Path(base).exists():
        file = (
            try_to_load_from_cache(base, CARD, revision=revision)
            if HUB_ID.fullmatch(base)
            else None
        )
    if (
        not isinstance(file, str | Path)
        or not Path(file).is_file()
        or Path(file).stat().st_size > MOST_BYTES
    ):
        return {}
    try:
        data: Any = ModelCard(Path(file).read_text("utf-8"), ignore_metadata_errors=True).data
    except (ValueError, yaml.YAMLError):
        return {}  # What others wrote there may be no card
    return {key: value for key, value in data.to_dict().items() if isinstance(value, str | list)}


def _dataset(task: str | None, data: str | None) -> str | None:
    """The data set of the hub that was used, if it was one."""
    if data is not None:
        name = re.split("[:@]", data)[0]
        return (
            name if re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name) and not Path(name).exists() else None
        )
    row = tasks().get(task) if task else None
    return row.hub[0] if row and row.hub else None


def _listed(value: Any) -> list[str]:
    return value if isinstance(value, list) else [value] if value else []
