"""Use the model that a verb leaves: load it with its own class, or predict with it."""

import functools
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

from transformers import PreTrainedModel

from kdcli.custom_code import custom_code, custom_code_allowed
from kdcli.deploy.exported import EMBEDDING_KIND
from kdcli.deploy.predict import RERANK_KIND, Predictions, Predictor, Text, kind_of_model
from kdcli.deploy.sparse.loading import load_network
from kdcli.disk import atomic_dir, check_writable, user_path
from kdcli.errors import UsageError
from kdcli.models.custom_class import custom_class
from kdcli.models.files import CONFIG_FILE, model_files
from kdcli.models.load import load_config, root_of


class Usable(ABC):
    """The result of a verb that leaves a model: the model, and its predictions."""

    trust_remote_code: bool
    """Whether code that comes with the model may run."""

    @property
    @abstractmethod
    def best(self) -> Path:
        """The directory to ship."""

    @functools.cached_property
    def model(self) -> Any:
        """The model in eval mode on the CPU, loaded on first access.

        It is a `SentenceTransformer` for an embedding model, a `CrossEncoder` for a reranker, and
        otherwise the class of transformers that its configuration names.

        Raises:
            UsageError: The run left no model, or an export without weights for torch.
        """
        with custom_code(self.trust_remote_code):
            return load_for_use(self._source)

    def save_pretrained(self, folder: Path | str) -> None:
        """Copy the files of the model or the export, with its tokenizer and its card.

        They are the files that `kdcli.push` uploads, without the recipe and the report.

        Args:
            folder: A directory that is empty or does not exist.

        Raises:
            UsageError: The run left no model, or the directory is not empty.
            MachineError: The disk is full or not writable.
        """
        source, place = Path(_model_folder(self.best)), user_path(folder)
        check_writable(place, directory=True)
        if place.is_dir() and any(place.iterdir()):
            raise UsageError(f"{place} is not empty", "give a new directory, or empty this one")
        with atomic_dir(place) as aside:
            for name in model_files(source):
                (aside / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source / name, aside / name)

    def predict(self, texts: Iterable[Text]) -> Predictions:
        """Predict texts with the model, or with an export in its own runtime.

        See `kdcli.deploy.predict.Predictor.predict`.
        """
        return self._predictor.predict(texts)

    @functools.cached_property
    def _predictor(self) -> Predictor:
        with custom_code(self.trust_remote_code):
            return Predictor.open(self._source)

    @property
    def _source(self) -> str:
        """The model as other functions take it.

        Raises:
            UsageError: The run left no model.
        """
        return _model_folder(self.best)


@dataclass(frozen=True)
class LoadedModel(Usable):
    """A model that `load` opened.

    Attributes:
        source: A directory of a model, an export or a cascade; a hub id, or `demo`.
    """

    source: str
    trust_remote_code: bool = False

    @property
    def best(self) -> Path:
        return Path(root_of(self.source))

    @property
    def _source(self) -> str:
        return self.source


@overload
def load(
    source: str | Path, mask: None = None, *, trust_remote_code: bool = False
) -> LoadedModel: ...


@overload
def load(
    source: str | Path, mask: str | Path, *, trust_remote_code: bool = False
) -> PreTrainedModel: ...


def load(
    source: str | Path, mask: str | Path | None = None, *, trust_remote_code: bool = False
) -> LoadedModel | PreTrainedModel:
    """Open a model, an export or a cascade for use: `predict(texts)` and `model`.

    Args:
        source: A directory that kdcli wrote, another model's directory, a hub id, or `demo`.
        mask: A mask file that was made for this base. The result is then the network in float32
            and eval mode, with the head of the mask's task.
        trust_remote_code: Run code that comes with the model. Models that kdcli wrote need none.

    Raises:
        UsageError: There is no model, or the mask is damaged or was made for another base.
    """
    trusts = trust_remote_code or custom_code_allowed()
    with custom_code(trusts):
        if mask is not None:
            return load_network(source, mask)
        load_config(str(source), weights=False, compacted=True)
    return LoadedModel(str(source), trusts)


def load_for_use(source: str) -> Any:
    """Load a model with the class that others load it with.

    Raises:
        UsageError: The model cannot be loaded, or is an export without weights for torch.
    """
    config = load_config(source, compacted=True)
    kind = kind_of_model(source, config, headless=True)
    if kind not in (EMBEDDING_KIND, RERANK_KIND):
        return load_network(source)
    if custom_class(config) is not None and not custom_code_allowed():
        raise UsageError(
            f"{source} is compacted, and sentence-transformers runs the file with its class",
            "use .predict(), or repeat the call with trust_remote_code=True",
        )
    # Only here, because the import takes seconds.
    import sentence_transformers

    name = "SentenceTransformer" if kind == EMBEDDING_KIND else "CrossEncoder"
    model_class = getattr(sentence_transformers, name)
    return model_class(source, device="cpu", trust_remote_code=custom_code_allowed()).eval()


def _model_folder(folder: Path) -> str:
    """Return a directory as a source.

    Raises:
        UsageError: It holds no model.
    """
    if not (folder / CONFIG_FILE).is_file():
        inside = sorted(path.parent.name for path in folder.glob(f"*/{CONFIG_FILE}"))
        hint = "finetune, distill, prune, trim, compress and export leave a model"
        if inside:
            hint = f"load one of the models in {', '.join(inside)} with kdcli.load(DIR)"
        raise UsageError(f"the run in {folder} left no model of its own", hint)
    return str(folder)
