"""Run the latency worker: read a request as JSON from stdin and write lines of JSON to stdout.

Each line is written as soon as its content is known, so that finished cells survive Ctrl-C or a
crash.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModel, AutoTokenizer, PretrainedConfig, PreTrainedModel

from kdcli.custom_code import custom_code, custom_code_allowed
from kdcli.deploy.exported import is_export, open_export
from kdcli.deploy.latency import Protocol, Subject
from kdcli.deploy.old_machines.measure_encoders import (
    UNSTABLE,
    WARM_SECONDS,
    measure,
    speedup,
    summary,
    timed,
)
from kdcli.deploy.runners import ERROR_LIMITS, Runner, compare_states, runner
from kdcli.deploy.shapes import config_of
from kdcli.deploy.sparse.loading import has_own_class, load_network
from kdcli.engine.memory import peak_of
from kdcli.errors import UsageError, is_out_of_memory
from kdcli.models.grammar import is_shape
from kdcli.models.layout import base_class
from kdcli.models.load import load_weights
from kdcli.models.shape import longest_input
from kdcli.types import Array, Batch

Send = Callable[[Mapping[str, object]], None]


SAMPLE_TOKENS = 128
SAMPLE_LENGTHS = (64, 48, 17, 5)
"""Numbers of tokens of the random rows on which backends are compared."""


@dataclass
class _Loaded:
    """A subject that is ready to run.

    `columns` identify it in the report. Its first call sets `first_call_ms`.
    """

    spec: Subject
    config: PretrainedConfig
    runner: Runner
    load_seconds: float
    weights_bytes: int
    first_call_ms: float | None = None

    @property
    def columns(self) -> dict[str, str]:
        return {
            "model": self.spec.name,
            "backend": self.spec.backend,
            "dtype": self.spec.precision,
        }


def main() -> None:
    """Serve one request."""
    request = json.loads(sys.stdin.read())
    subjects = [Subject(**subject) for subject in request["subjects"]]
    protocol = Protocol(**request["protocol"])
    torch.set_num_threads(request["threads"])
    with tempfile.TemporaryDirectory() as folder, custom_code(request["custom_code"]):
        serve(
            subjects,
            protocol,
            Path(folder),
            lambda message: print(json.dumps(message), flush=True),
        )


def serve(subjects: Sequence[Subject], protocol: Protocol, folder: Path, send: Send) -> None:
    """Load every subject, compare its output with torch in float32, and measure cell after cell.

    No cell is longer than what every subject can read.
    """
    loaded = _load(subjects, protocol, folder, send)
    limits = [limit for s in loaded if (limit := longest_input(s.config)) is not None]
    cells = [(size, min([seq_len, *limits])) for size, seq_len in protocol.cells]
    for cell in dict.fromkeys(cells):
        _measure_cell(protocol, loaded, cell, send)
        if protocol.only_first_again:
            protocol = replace(protocol, max_measurements=1)


def _load(
    subjects: Sequence[Subject], protocol: Protocol, folder: Path, send: Send
) -> list[_Loaded]:
    device, threads = torch.device(protocol.device), torch.get_num_threads()
    loaded: list[_Loaded] = []
    references: dict[str, Array] = {}
    for number, spec in enumerate(subjects):
        source, backend, precision = spec.source, spec.backend, spec.precision
        began = time.perf_counter()
        if is_export(source):
            export = open_export(source, device)
            spec = replace(spec, backend=export.format, precision=export.precision)
            loaded_runner = export.runner(threads)
            weights = sum(export.files.values())
            loaded.append(
                _Loaded(spec, export.config, loaded_runner, time.perf_counter() - began, weights)
            )
            send({"prepared": [spec.name]})
            continue
        model = _model(source).to(device)
        seconds = time.perf_counter() - began
        sample = _sample(source, model, protocol)
        plain = (backend, precision) == ("torch", "fp32")
        if not plain and source not in references:
            with torch.inference_mode():
                outputs = model(**{k: v.to(device) for k, v in sample.items()})
            references[source] = outputs.last_hidden_state.float().cpu().numpy()
        weights = model.get_memory_footprint(return_buffers=False)
        began = time.perf_counter()
        try:
            loaded_runner = runner(
                model,
                backend,
                precision,
                device=device,
                threads=threads,
                folder=folder / str(number),
            )
        except UsageError as error:
            # The backend cannot run this model; the others can.
            failure = {"model": spec.name, "backend": backend, "dtype": precision}
            send({"failures": [failure | {"reason": error.message}], "prepared": [spec.name]})
            continue
        subject = _Loaded(
            spec, model.config, loaded_runner, seconds + time.perf_counter() - began, weights
        )
        if plain or _agrees(subject, sample, references[source], send):
            loaded.append(subject)
        send({"prepared": [spec.name]})
    return loaded


def _model(source: str) -> PreTrainedModel:
    model: PreTrainedModel
    if is_shape(source):
        torch.manual_seed(0)
        config = config_of(source)
        model = base_class(config).from_config(config, dtype=torch.float32)
    elif has_own_class(source):
        model = load_network(source).base_model
    else:
        model = load_weights(source, AutoModel)
    return model.eval()


def _sample(source: str, model: PreTrainedModel, protocol: Protocol) -> Batch:
    """Return the padded batch on which backends are compared.

    The batch is real text if the model has a tokenizer that can pad, and random ids otherwise.
    """
    longest = longest_input(model.config) or SAMPLE_TOKENS
    random_ids = cell_batch(model.config, [min(length, longest) for length in SAMPLE_LENGTHS])
    if not protocol.texts or is_shape(source):
        return random_ids
    tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=custom_code_allowed())
    if tokenizer.pad_token is None:
        return random_ids
    rows = tokenizer(
        list(protocol.texts),
        padding=True,
        truncation=True,
        max_length=min(SAMPLE_TOKENS, longest),
        return_tensors="pt",
    )
    return {k: v for k, v in rows.items() if k in ("input_ids", "attention_mask", "token_type_ids")}


def _agrees(subject: _Loaded, sample: Batch, reference: Array, send: Send) -> bool:
    """Compare a subject with torch in float32, and return False if its output is wrong."""
    with torch.inference_mode():
        (output,) = subject.runner.output(subject.runner.call(subject.runner.prepare(sample)))
    errors = compare_states(reference, output, sample["attention_mask"].numpy())
    limit = ERROR_LIMITS[subject.spec.precision]
    wrong = not errors["relative"] <= limit
    send({"agreements": [subject.columns | errors | {"limit": limit, "wrong": wrong}]})
    return not wrong


def _measure_cell(
    protocol: Protocol, subjects: Sequence[_Loaded], cell: tuple[int, int], send: Send
) -> None:
    """Measure all subjects in one cell, and again while one of them is unstable.

    A subject that does not fit into memory is reported as a failure, and the others go on.
    """
    device, size = torch.device(protocol.device), {"batch_size": cell[0], "seq_len": cell[1]}
    lengths = lengths_of(protocol.padding, protocol.lengths, *cell)
    calls: dict[int, Callable[[], object]] = {}
    peaks: dict[int, int | None] = {}
    first_seconds: dict[int, float] = {}
    for number, subject in enumerate(subjects):
        call = partial(
            subject.runner.call, subject.runner.prepare(cell_batch(subject.config, lengths))
        )
        try:
            with torch.inference_mode():
                began = time.perf_counter()
                peaks[number] = peak_of(partial(timed, call, device), device)
                first_seconds[number] = time.perf_counter() - began
                if subject.first_call_ms is None:
                    subject.first_call_ms = 1e3 * first_seconds[number]
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            continue
        calls[number] = call
    # Each model warms up alone before the rounds begin.
    rounds = max(protocol.min_seconds, protocol.min_runs * sum(first_seconds.values()))
    expected = round(len(calls) * WARM_SECONDS + rounds)
    send({"measuring": [*cell, expected, protocol.max_measurements]})
    times = measure(
        calls, device, protocol.min_runs, protocol.min_seconds, protocol.max_measurements
    )
    rows = []
    for number, seconds in times.items():
        subject = subjects[number]
        peak = peaks[number]
        statistics = summary(seconds)
        row = subject.columns | {
            "device": protocol.device,
            **size,
            "padding": protocol.padding,
            **statistics,
        }
        stated = "p90_ms" if statistics["status"] == UNSTABLE else "p50_ms"
        row["tokens_per_second"] = 1e3 * sum(lengths) / statistics[stated]
        row |= {"load_seconds": subject.load_seconds, "first_call_ms": subject.first_call_ms}
        row["peak_memory_bytes"] = None if peak is None else peak + subject.weights_bytes
        if number != 0 and 0 in times:
            ratios = speedup(times[0], seconds)
            row["speedup"] = ratios | {"baseline": subjects[0].spec.name}
        rows.append(row)
    too_large = [subject for number, subject in enumerate(subjects) if number not in times]
    failures = [subject.columns | size | {"reason": "out of memory"} for subject in too_large]
    send({"rows": rows, "failures": failures})


def lengths_of(padding: str, lengths: Sequence[int], batch_size: int, seq_len: int) -> list[int]:
    """Return the number of real tokens of each row of a cell.

    `padding` is `full` (no padding), `random` (lengths from a quarter of `seq_len` upwards) or
    `data` (drawn from `lengths`, cut to `seq_len`).
    """
    drawn = np.random.Generator(np.random.PCG64(batch_size))
    if padding == "random":
        return [int(n) for n in drawn.integers(max(1, seq_len // 4), seq_len + 1, batch_size)]
    if padding == "data":
        return [int(n) for n in np.minimum(drawn.choice(np.asarray(lengths), batch_size), seq_len)]
    return [seq_len] * batch_size


def cell_batch(config: PretrainedConfig, lengths: Sequence[int]) -> Batch:
    """Return random ids of the given lengths, padded on the right."""
    longest = max(lengths)
    mask_BL = (torch.arange(longest)[None, :] < torch.tensor(lengths)[:, None]).long()
    pad = config.pad_token_id if config.pad_token_id is not None else 0
    ids_BL = full_length_ids(config, len(lengths), longest).where(mask_BL.bool(), pad)
    return {"input_ids": ids_BL, "attention_mask": mask_BL}


def full_length_ids(config: PretrainedConfig, batch_size: int, seq_len: int) -> Tensor:
    """Return random token ids [B, L] without special tokens, the same for the same vocabulary.

    Vocabularies begin (BERT) or end (RoBERTa, ModernBERT) with their special tokens, so the ids
    come from the middle half.
    """
    words = int(config.vocab_size)
    special = {
        v for k, v in config.to_dict().items() if k.endswith("_token_id") and isinstance(v, int)
    }
    usable = np.array(
        [i for i in range(words // 4, max(words - words // 4, words // 4 + 1)) if i not in special]
    )
    drawn = np.random.Generator(np.random.PCG64(0)).integers(0, len(usable), (batch_size, seq_len))
    return torch.from_numpy(usable[drawn])


if __name__ == "__main__":
    main()
