"""Embedding models that only sentence-transformers computes, such as routers and bags of words.

The library reads texts, not token ids. Therefore such a model's tokens are the bytes of a text,
after a token for the text's role, and its only layer is the whole model.
"""

import hashlib
import importlib
import logging
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.modeling_outputs import BaseModelOutput

from kdcli.custom_code import custom_code_allowed
from kdcli.disk import read_json
from kdcli.errors import UsageError, one_line, raise_machine_error
from kdcli.models.files import CONFIG_FILE, LIBRARY_TYPE, MODULES_FILE, file_of
from kdcli.models.model import Model

ROLES = {"": "encode", "query": "encode_query", "document": "encode_document"}
"""Role of a text -> the method that encodes it."""
ROLE_TOKENS = {role: f"\ue000{role}\ue000" for role in ROLES if role}
"""Role of a text -> the token before it. Texts do not have its characters, which are private."""


class LibraryConfig(PreTrainedConfig):  # type: ignore[misc]
    """The configuration of a model that sentence-transformers computes.

    `digest` is a hash of its files other than weights.
    """

    model_type = LIBRARY_TYPE

    hidden_size: int = 0
    vocab_size: int = 0
    digest: str = ""
    num_hidden_layers: int = 1
    num_attention_heads: int = 1
    pad_token_id: int = 0


class LibraryModel(PreTrainedModel):  # type: ignore[misc]
    """Bytes of texts [B, L] -> each text's vector, as the state of all its bytes [B, L, E]."""

    config_class = LibraryConfig
    _supports_sdpa = True
    rows_at_once: int | None = None
    """The number of rows in a forward pass; None if it depends on their lengths."""

    def __init__(self, config: LibraryConfig, library: Any, source: str) -> None:
        super().__init__(config)
        self.library = library
        self.source = source
        self.bytes = byte_tokenizer()

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **unused: object
    ) -> BaseModelOutput:
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        rows = [
            ids[mask.bool()].tolist() for ids, mask in zip(input_ids, attention_mask, strict=True)
        ]
        role_of_token = {self.bytes.convert_tokens_to_ids(t): r for r, t in ROLE_TOKENS.items()}
        roles = [role_of_token.get(row[0] if row else None, "") for row in rows]
        texts = [
            self.bytes.decode(row[bool(role) :]) for row, role in zip(rows, roles, strict=True)
        ]
        vectors_BE = torch.empty(len(rows), self.config.hidden_size, device=input_ids.device)
        for role in dict.fromkeys(roles):
            at = [n for n, other in enumerate(roles) if other == role]
            of_role = self.encode([texts[n] for n in at], role)
            vectors_BE[at] = of_role.to(vectors_BE.device)
        states_BLE = vectors_BE[:, None].expand(-1, input_ids.shape[1], -1)
        return BaseModelOutput(last_hidden_state=states_BLE)

    def encode(self, texts: list[str], role: str) -> Tensor:
        """Return the vectors of texts of one role, [N, E] float32."""
        return encoded(self.library, self.source, texts, role)


def encoded(library: Any, source: str, texts: list[str], role: str) -> Tensor:
    """Encode texts of one role with sentence-transformers, [N, E] float32.

    Raises:
        UsageError: The library cannot encode them.
    """
    encode = getattr(library, ROLES[role])
    try:
        vectors_NE: Tensor = encode(
            texts, batch_size=len(texts), show_progress_bar=False, convert_to_tensor=True
        )
    except Exception as error:  # noqa: BLE001  # A module can raise anything.
        raise_machine_error(error)
        raise UsageError(
            f"sentence-transformers cannot encode a {role or 'text without a role'} with "
            f"{source}: {one_line(error)}",
            "a router without a default route encodes only pairs of a query and a document",
        ) from None
    return vectors_NE.to_dense().float()


def load_library_model(source: str, root: str, class_name: str, reason: str) -> Model:
    """Load an embedding model with sentence-transformers.

    Args:
        source: The model.
        root: Its directory or hub id.
        class_name: The library's class for it.
        reason: Why kdcli does not compute it itself, for the log.

    Raises:
        UsageError: The library cannot load it.
    """
    # The library takes seconds to import.
    library_class = getattr(importlib.import_module("sentence_transformers"), class_name)
    warnings = _Warnings()
    logger = logging.getLogger("sentence_transformers")
    logger.addHandler(warnings)
    try:
        library = library_class(root, device="cpu", trust_remote_code=custom_code_allowed())
        width = encoded(library, source, ["a"], "document").shape[1]
    except UsageError:
        raise
    except Exception as error:  # noqa: BLE001  # A module can raise anything.
        raise_machine_error(error)
        raise UsageError(
            f"sentence-transformers cannot load {source}: {one_line(error)}",
            "copy the complete model again; pip install -U sentence-transformers may read more",
        ) from None
    finally:
        logger.removeHandler(warnings)
    modules = file_of(root, MODULES_FILE)
    assert modules is not None, "the model was loaded"
    for file in sorted(modules.parent.rglob(CONFIG_FILE)):
        if "auto_map" in read_json(file) and not custom_code_allowed():
            raise custom_code_refused(source, str(file.relative_to(modules.parent)))
    config = LibraryConfig(hidden_size=width, digest=_digest(modules.parent))
    model = LibraryModel(config, library, source).eval()
    config.vocab_size = len(model.bytes)
    note = "; ".join([f"computed by sentence-transformers: {reason}", *warnings.messages])
    return Model(model, model.bytes, source, note)


def custom_code_refused(source: str, place: str) -> UsageError:
    """Return the error for a model with code of its own, which the user did not allow."""
    return UsageError(
        f"{source} brings code of its own, in {place}",
        "read the code, then add --trust-remote-code",
    )


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose tokens are the bytes of a text, after one for its role."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {piece: n for n, piece in enumerate(["<pad>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",  # noqa: S106
        additional_special_tokens=list(ROLE_TOKENS.values()),
        clean_up_tokenization_spaces=False,
    )


class _Warnings(logging.Handler):
    """Collects the warnings of a library."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(" ".join(record.getMessage().split()))


def _digest(folder: Path) -> str:
    """Return a hash of the files in a directory other than weights."""
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*")):
        if file.is_file() and file.suffix not in (".safetensors", ".bin"):
            digest.update(f"{file.relative_to(folder)}\n".encode() + file.read_bytes())
    return digest.hexdigest()
