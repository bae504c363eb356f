"""Push a model directory to a repository of the hub.

Only files that a model needs are pushed. A report quotes evaluated rows and a recipe names local
paths, so both stay unless they are asked for. Hashes of training rows always stay, because they
would let anyone test whether a short text was trained on.
"""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import httpx, validate_repo_id  # type: ignore[attr-defined]
from rich.table import Table

from kdcli.errors import UsageError
from kdcli.report.text import bytes_of

CONFIG_FILE = "config.json"
PUSHED_FILES = (
    "README.md",
    "LICENSE*",
    CONFIG_FILE,
    "generation_config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "modeling_*.py",
    "configuration_*.py",
    "tokenization_*.py",
    # Tokenizers
    "tokenizer*.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "preprocessor_config.json",
    "vocab.*",
    "merges.txt",
    "bpe.codes",
    "*.model",
    # sentence-transformers
    "modules.json",
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
    "[0-9]_*/config.json",
    "[0-9]_*/model.safetensors",
    # Exports
    "export.json",
    "onnx/*.onnx*",
    "openvino/*.xml",
    "openvino/*.bin",
    # The small model of a cascade
    "first/*.json",
    "first/vocab.*",
    "first/merges.txt",
    "first/*.model",
    "first/onnx/*.onnx*",
)
"""Files that a model needs, as patterns of paths below its directory."""
REPORT_FILES = ("recipe.yaml", "report.json", "report.md", "report.html", "*.png", "*.csv")
"""Files of a report."""
LOGIN = "`hf auth login` with a token that may write, and the right name"


@dataclass(frozen=True)
class Upload:
    """The files of a directory that are pushed, and the ones that stay.

    Attributes:
        folder: The directory.
        files: The sizes of the pushed files, by their paths below the directory.
        kept: The paths of the files that stay on this machine.
    """

    folder: Path
    files: dict[str, int]
    kept: list[str]

    @classmethod
    def of(cls, folder: Path, *, with_report: bool = False) -> "Upload":
        """Choose the files of a model or an export.

        Raises:
            UsageError: The directory holds no model.
        """
        if not (folder / CONFIG_FILE).is_file():
            inside = sorted(
                str(p.parent.relative_to(folder)) for p in folder.glob(f"*/{CONFIG_FILE}")
            )
            hint = "give the directory of a model"
            if inside:
                hint = f"there are models in {', '.join(inside)}: push one of them"
            raise UsageError(f"{folder} has no {CONFIG_FILE}, so it is not a model directory", hint)
        patterns = (*PUSHED_FILES, *(REPORT_FILES if with_report else ()))
        files: dict[str, int] = {}
        kept: list[str] = []
        for path in sorted(p for p in folder.rglob("*") if p.is_file()):
            name = path.relative_to(folder).as_posix()
            # A pattern without a folder does not reach into folders.
            same_depth = [p for p in patterns if p.count("/") == name.count("/")]
            if any(fnmatchcase(name, pattern) for pattern in same_depth):
                files[name] = path.stat().st_size
            else:
                kept.append(name)
        return cls(folder, files, kept)

    def to_json(self) -> str:
        return json.dumps({"files": self.files, "kept": self.kept}, indent=2)

    def renderables(self) -> Iterable[object]:
        table = Table("file to push", "size")
        for name, size in self.files.items():
            table.add_row(name, bytes_of(size))
        yield table
        if self.kept:
            yield f"not pushed: {', '.join(self.kept)}"


@dataclass(frozen=True)
class Published:
    """A commit that was pushed to a repository."""

    repository: str
    revision: str
    url: str
    private: bool

    @property
    def sentence(self) -> str:
        """Return the message for the terminal."""
        kind = "private" if self.private else "public"
        return f"pushed to {self.repository} ({kind}), revision {self.revision}"

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    def renderables(self) -> Iterable[object]:
        yield self.sentence


def check_repository(repository: str) -> None:
    """Check that a repository's name is valid and that there is a token, without a request.

    Raises:
        UsageError: The name is not valid, or there is no token.
    """
    try:
        validate_repo_id(repository)
    except HFValidationError:
        raise UsageError(
            f"'{repository}' is not the name of a repository",
            "give OWNER/NAME, or NAME for your own",
        ) from None
    if get_token() is None:
        raise UsageError(f"cannot push to {repository}: there is no token for the hub", LOGIN)


def publish(upload: Upload, repository: str, *, private: bool = True) -> Published:
    """Push the files of a model to a repository, which is created if it does not exist.

    An existing repository keeps its visibility.

    Raises:
        UsageError: The hub refuses the push.
    """
    check_repository(repository)
    hub = HfApi(library_name="kdcli")
    try:
        name = hub.create_repo(repository, private=private, exist_ok=True).repo_id
        commit = hub.upload_folder(
            repo_id=name,
            folder_path=upload.folder,
            commit_message="Pushed by kdcli",
            allow_patterns=[_escaped(file) for file in upload.files],
        )
        is_private = bool(hub.model_info(name).private)
    except (OSError, ValueError, httpx.HTTPError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UsageError(
            f"{upload.folder} cannot be pushed to {repository}: {reason}", LOGIN
        ) from None
    return Published(name, str(commit.oid), str(commit.commit_url), is_private)


def _escaped(name: str) -> str:
    """Return a pattern that matches only this name."""
    return "".join(f"[{letter}]" if letter in "*?[" else letter for letter in name)
