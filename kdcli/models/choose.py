"""Choose a student by measurement: its shape, and which layers of its teacher it keeps.

A student is tried as it will be used: its layers are copied and fitted to the teacher
(`kdcli.models.reduce`) on a few texts, and compared with the teacher on other texts.

Shapes are compared by the mean cosine between the student's and the teacher's vectors. Layers are
compared by agreement: the correlation between the student's and the teacher's cosines of pairs of
texts. Half of the pairs are texts that have little in common. The other half are close: the two
halves of a text, a text and each half, and a text and itself with fewer tokens. Students of one
shape can be worse although their vectors have a smaller error, or their cosines of different texts
agree better (docs/evidence/start.md).

The search for layers starts at evenly spaced layers. It moves one layer after the other to the best
place between its neighbours, and ends when no move raises the agreement. All choices have the
teacher's width.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from kdcli.disk import cache_key
from kdcli.errors import UsageError
from kdcli.kept import Result, keeper_for
from kdcli.messages import log, silenced
from kdcli.models.fit import SILENCE
from kdcli.models.fit_cache import FIT_BATCH, FitCache
from kdcli.models.identity import hash_of_code, weights_hash
from kdcli.models.layout import layout_for
from kdcli.models.reduce import copy_reduced
from kdcli.models.sample import rows_of
from kdcli.models.shape import evenly_spaced_layers, positions_of, shape_of, student_config
from kdcli.types import Batch, Examples, ModelShape
from kdcli.version import __version__ as kdcli_version

Layers: TypeAlias = tuple[int, ...]
Pooling: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Maps the last hidden states [B, L, D] and the mask [B, L] to vectors [B, E]."""
ROWS, SHAPE_ROWS = 128, 512
"""Number of texts on which layers and shapes are compared. Fewer would favour deep students."""
LENGTH = 32
"""Maximum number of tokens of a text."""
MIN_ROWS = 8
"""Minimum number of texts."""
KEPT = 0.6
"""Share of the tokens of a text with fewer tokens."""


def mean_pooling(states_BLD: Tensor, mask_BL: Tensor) -> Tensor:
    """Return the mean of the hidden states of all tokens that are not padding, [B, D]."""
    mask_BL1 = mask_BL[..., None].to(states_BLD.dtype)
    return (states_BLD * mask_BL1).sum(1) / mask_BL1.sum(1).clamp(min=1)


class Comparison:
    """Compares untrained students with their teacher on texts.

    Args:
        teacher: The teacher's encoder.
        rows: The texts, such as `rows_to_compare`. Students are fitted on a quarter of them.
        pooling: How the vector of a text is computed.
        dtype: The number format in which the models run while students are fitted.

    Raises:
        UsageError: There are too few texts.
    """

    def __init__(
        self,
        teacher: PreTrainedModel,
        rows: Batch,
        pooling: Pooling,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.teacher, self.pooling, self.dtype = teacher, pooling, dtype
        count = len(rows["input_ids"])
        check_rows(count)
        is_fitted_B = torch.arange(count) % 4 == 0
        self.fitted = {name: x[is_fitted_B] for name, x in rows.items()}
        self.parts = parts_of({name: x[~is_fitted_B] for name, x in rows.items()})
        self.vectors_VNE = vectors_of(teacher, self.parts, pooling)
        self._shape: ModelShape | None = None
        self._cache: FitCache | None = None
        self._built: PreTrainedModel | None = None

    def agreement(self, shape: ModelShape, layers: Sequence[int]) -> float:
        """Return how well a student's cosines of pairs of texts agree with its teacher's.

        Args:
            shape: The student's shape.
            layers: The teacher layers 1 ... N that it keeps.
        """
        modules = layout_for(self.teacher.config).modules(self.teacher)
        if self._cache is None or shape != self._shape:
            self._shape, self._cache = shape, FitCache(modules, 1 + len(self.parts))
        cache = self._cache
        student = self._student(shape, layers, cache)
        own = layout_for(student.config).modules(student)
        origins = [modules[n - 1] for n in layers]
        vectors = []
        for number, part in enumerate(self.parts, FIT_BATCH + 1):
            with cache.running(number, own, origins):
                vectors.append(vectors_of(student, [part], self.pooling))
        own_VNE = torch.cat(vectors)
        pairs = torch.stack([pair_cosines(own_VNE), pair_cosines(self.vectors_VNE)])
        # The correlation of a constant is not a number.
        return float(torch.corrcoef(pairs)[0, 1].nan_to_num(nan=-1))

    def identity(self) -> list[str]:
        """Return what the result of a comparison depends on."""
        arrays = {name: x.numpy() for name, x in self.fitted.items()}
        digest = Result({**arrays, "vectors": self.vectors_VNE.numpy()}).digest
        return [weights_hash(self.teacher), hash_of_code(self.teacher), str(self.dtype), digest]

    def cosine(self, shape: ModelShape) -> float:
        """Return the mean cosine between the vectors of a student and its teacher.

        The student keeps evenly spaced layers.
        """
        depth = shape_of(self.teacher.config).layers
        student = self._student(shape, evenly_spaced_layers(depth, shape.layers))
        (own_NE,) = vectors_of(student, self.parts[:1], self.pooling)
        return float(F.cosine_similarity(own_NE, self.vectors_VNE[0], dim=-1).mean())

    def _student(
        self, shape: ModelShape, layers: Sequence[int], cache: FitCache | None = None
    ) -> PreTrainedModel:
        """Build and fit a student. With `cache`, the next one of this configuration is the same
        object."""
        teacher, kept = self.teacher, list(layers)
        layout = layout_for(teacher.config)
        config = student_config(teacher.config, shape, kept)
        student = self._built if cache is not None else None
        if student is None or student.config.to_dict() != config.to_dict():
            with torch.random.fork_rng(devices=[]):
                student = type(teacher)(config).float()
        if cache is not None:
            self._built = student
        # A comparison fits many students.
        with silenced():
            copy_reduced(
                teacher,
                student,
                layout,
                kept,
                self.fitted,
                fit=not layout.shared,
                dtype=self.dtype,
                cache=cache,
            )
        return student


def check_rows(count: int) -> None:
    """Check the number of texts on which students are compared.

    Raises:
        UsageError: There are too few.
    """
    if count < MIN_ROWS:
        raise UsageError(
            f"kdcli compares students on at least {MIN_ROWS} training texts, but there "
            f"{'is' if count == 1 else 'are'} only {count}",
            "give more text, or name the student's shape and layers",
        )


def rows_to_compare(text: Examples, config: PreTrainedConfig, rows: int) -> Batch:
    """Return this number of rows of a text, shortened. `config` is the teacher's."""
    return rows_of(text, rows, min(LENGTH, positions_of(config) or LENGTH))


def measured_layers(
    comparison: Comparison, count: int, among: Sequence[int] | None = None
) -> list[int]:
    """Return the teacher layers 1 ... N that a student of `count` layers keeps.

    The log has their agreement, next to that of evenly spaced layers. Within `keep_results`, they
    are searched once.

    Args:
        comparison: How choices are compared with the teacher.
        count: The number of layers.
        among: The layers to choose from, of which the last stays (default: all, and any may go).
    """
    config = comparison.teacher.config
    every = list(range(1, shape_of(config).layers + 1)) if among is None else list(among)
    even = evenly_spaced_layers(len(every), count)
    keeps_last = among is not None
    has_choice = int(keeps_last) < count < len(every)
    if not has_choice or layout_for(config).shared:
        return [every[place - 1] for place in even]
    keeper = keeper_for()
    if keeper is None:
        return _search(comparison, every, even, keeps_last=keeps_last)
    facts = (kdcli_version, torch.__version__, every, count, keeps_last)
    key = cache_key("layers", *facts, *comparison.identity())
    if (kept := keeper.load(key)) is not None:
        layers: list[int] = json.loads(kept.text)
        log(f"layers {', '.join(map(str, layers))}: chosen in an earlier step")
        return layers
    began = time.monotonic()
    layers = _search(comparison, every, even, keeps_last=keeps_last)
    keeper.store(key, Result({}, json.dumps(layers)), time.monotonic() - began)
    return layers


def _search(
    comparison: Comparison, every: Sequence[int], even: Sequence[int], *, keeps_last: bool
) -> list[int]:
    """Move one layer after the other, from evenly spaced ones, until no move is better.

    Args:
        comparison: How choices are compared with the teacher.
        every: The layers to choose from.
        even: Evenly spaced places in `every`, from 1.
        keeps_last: Whether the last layer stays.
    """
    count = len(even)
    free = count - 1 if keeps_last else count
    log(f"choosing {count} of {len(every)} layers by trial; name them in student.layers to skip it")
    shape = replace(shape_of(comparison.teacher.config), layers=count)
    scores: dict[Layers, float] = {}
    logged = time.monotonic()

    def layers_at(places: Sequence[int]) -> list[int]:
        return [every[place - 1] for place in places]

    def score(places: Layers) -> float:
        nonlocal logged
        if places not in scores:
            scores[places] = comparison.agreement(shape, layers_at(places))
            if time.monotonic() - logged >= SILENCE:
                best = max(scores, key=scores.__getitem__)
                log(
                    f"choices of layers tried: {len(scores)}; best so far: "
                    f"{', '.join(map(str, layers_at(best)))} (agreement {scores[best]:.3f})"
                )
                logged = time.monotonic()
        return scores[places]

    start = best = tuple(even)
    before = None
    score(start)
    while best != before:
        before = best
        for at in range(free):
            best = max([best, *moves(best, at, len(every))], key=score)
    layers = layers_at(best)
    log(
        f"layers {', '.join(map(str, layers))}: agreement {scores[best]:.3f} after the fit "
        f"(evenly spaced {scores[start]:.3f}; {len(scores)} choices)"
    )
    return layers


def parts_of(rows: Batch) -> list[Batch]:
    """Return the rows, their first halves, their second halves, and the rows with fewer tokens.

    Every part keeps the first and the last token, which are special in most models.
    """
    mask_BL = rows["attention_mask"].bool()
    place_BL, length_B1 = mask_BL.cumsum(1) - 1, mask_BL.sum(1, keepdim=True)
    is_end_BL = (place_BL == 0) | (place_BL == length_B1 - 1)
    is_first_BL = 2 * place_BL < length_B1
    is_kept_BL = torch.rand(mask_BL.shape, generator=torch.Generator().manual_seed(0)) < KEPT
    parts = [rows]
    for in_part_BL in (is_first_BL, ~is_first_BL, is_kept_BL):
        in_part_BL = mask_BL & (in_part_BL | is_end_BL)
        mask, order = in_part_BL.long().sort(stable=True, dim=1, descending=True)
        longest = int(mask.sum(1).max())
        ids_BL = rows["input_ids"].gather(1, order)
        parts.append({"input_ids": ids_BL[:, :longest], "attention_mask": mask[:, :longest]})
    return parts


def pair_cosines(vectors_VND: Tensor) -> Tensor:
    """Return the cosines of close pairs and, as many, of different texts, [P].

    `vectors_VND` holds the vectors of each of `parts_of`.
    """
    text, first, second, fewer = F.normalize(vectors_VND, dim=-1)
    pairs = [(first, second), (text, first), (text, second), (text, fewer)]
    pairs += [(text, text.roll(n + 1, 0)) for n in range(len(pairs))]
    return torch.cat([(x_ND * y_ND).sum(1) for x_ND, y_ND in pairs])


def moves(layers: Layers, at: int, count: int) -> Iterator[Layers]:
    """Yield the choices in which a layer is at another place between its neighbours.

    `at` is the index of the layer in `layers`, and `count` the number of the teacher's layers.
    """
    bounds = [0, *layers, count + 1]
    for other in range(bounds[at] + 1, bounds[at + 2]):
        if other != layers[at]:
            yield (*layers[:at], other, *layers[at + 1 :])


@torch.no_grad()
def vectors_of(model: PreTrainedModel, parts: list[Batch], pooling: Pooling) -> Tensor:
    """Return the vectors of the rows of each part, [V, N, E] float64."""
    training, vectors = model.training, []
    model.eval()
    for part in parts:
        batch = {name: x.to(model.device) for name, x in part.items()}
        states_BLD = model(**batch).last_hidden_state
        vectors.append(pooling(states_BLD, batch["attention_mask"]).double().cpu())
    model.train(training)
    return torch.stack(vectors)
