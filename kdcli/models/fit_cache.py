"""Share work between the fits of several students to one teacher.

Students that begin with the same layers of the teacher compute the same outputs up to the first
layer that differs. Those outputs, and the teacher's states, are computed once.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

from torch import nn

FIT_BATCH = 0
"""The number of the batch that students are fitted to."""
MAX_STUDENTS = 2
"""Maximum number of students whose layer outputs are kept. More would hardly save time."""


@dataclass(frozen=True)
class TeacherStates:
    """What a teacher computes from the batch that students are fitted to.

    Attributes:
        inputs: The arguments of its layers.
        outputs: The outputs of modules outside its layers, in the order of their calls.
    """

    inputs: dict[nn.Module, tuple[tuple[object, ...], dict[str, object]]]
    outputs: dict[nn.Module, list[object]]


class FitCache:
    """The states of a teacher, and the outputs of its students' layers.

    Args:
        teacher_layers: The layers of the teacher.
        batches: The number of batches on which each student runs, always in the same order. The
            first is the one that it is fitted to.
    """

    def __init__(self, teacher_layers: Sequence[nn.Module], batches: int) -> None:
        self.teacher_layers, self.batches = teacher_layers, batches
        self.states: TeacherStates | None = None
        self._outputs: dict[tuple[nn.Module, ...], dict[int, object]] = {}

    @contextmanager
    def running(
        self, number: int, layers: Sequence[nn.Module], origins: Sequence[nn.Module]
    ) -> Iterator[Sequence[nn.Module]]:
        """Reuse layer outputs while a student runs, and keep the outputs of its other layers.

        Args:
            number: The number of the batch that the student runs on.
            layers: The layers of the student.
            origins: The teacher's layers that they replace.

        Yields:
            The layers that are computed.
        """
        computed = []
        with ExitStack() as stack:
            for at, layer in enumerate(layers, 1):
                prefix = tuple(origins[:at])
                # The entries that were used last are at the end.
                kept = self._outputs[prefix] = self._outputs.pop(prefix, {})
                if len(kept) == self.batches:
                    stack.enter_context(_returning(layer, kept[number]))
                else:
                    computed.append(layer)
                    hook = layer.register_forward_hook(partial(_keep, kept, number))
                    stack.callback(hook.remove)
            while len(self._outputs) > MAX_STUDENTS * len(layers):
                del self._outputs[next(iter(self._outputs))]
            yield computed


def _keep(
    kept: dict[int, object], number: int, layer: nn.Module, args: object, output: object
) -> None:
    kept[number] = output


@contextmanager
def _returning(layer: nn.Module, output: object) -> Iterator[None]:
    """Let a layer return an output, whatever its inputs are."""
    layer.forward = lambda *args, **kwargs: output
    try:
        yield
    finally:
        # The method of the class applies again.
        del layer.forward
