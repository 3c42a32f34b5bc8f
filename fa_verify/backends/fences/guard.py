"""`Guard`: puts fences around one run of a kernel, and says what the canaries saw."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from fa_verify.backends.base import Incident
from fa_verify.backends.fences.allocations import Fenced
from fa_verify.backends.fences.launches import watched
from fa_verify.backends.fences.memory import Heap
from fa_verify.backends.fences.slots import Slots
from fa_verify.spool import Argument, Launch
from fa_verify.ttir.memory.views import coordinates

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterator

    from fa_verify.backends.fences.fence import Fence
    from fa_verify.backends.fences.memory import Memory
    from fa_verify.backends.fences.slots import Damage
    from fa_verify.inputs import Inputs

__all__ = ["Guard"]


class Guard:
    """The slots of a process.

    Attributes:
        launches: Those of the last run.
    """

    def __init__(self, device: str, pages: Callable[[], Memory]) -> None:
        """Nothing is allocated yet.

        Args:
            device: "cuda", or "cpu" in tests.
            pages: Makes the memory of fences of mode "page".
        """
        self._device, self._pages = device, pages
        self._slots: dict[str, Slots] = {}
        self.launches: list[Launch] = []

    @contextmanager
    def around(
        self,
        inputs: Inputs,
        fence: Fence,
        *,
        unaligned: Container[str],
        begins: Callable[[Launch], None],
        ended: Callable[[], None],
    ) -> Iterator[None]:
        """Move the inputs into slots, and whatever torch makes in the meantime.

        Args:
            inputs: Their tensors lie in slots afterwards.
            fence: What surrounds tensors.
            unaligned: Inputs that may begin at any element.
            begins: Told of each launch before it is made.
            ended: Called after each.
        """
        self.launches = []
        if fence.mode == "off":
            yield
            return
        slots = self.slots(fence)
        slots.begin(finite=fence.finite)
        mode = Fenced(slots, fence, self._device)
        for name, tensor in inputs.named():
            mode.put(tensor, name, unaligned=name in unaligned)

        def tell(launch: Launch) -> None:
            self.launches.append(launch)
            begins(launch)

        with ExitStack() as stack:
            stack.enter_context(watched(slots, tell, ended))
            stack.enter_context(mode)
            yield

    def slots(self, fence: Fence) -> Slots:
        """The slots of a mode."""
        if fence.mode not in self._slots:
            memory = self._pages() if fence.mode == "page" else Heap(self._device)
            self._slots[fence.mode] = Slots(memory, self._device)
        return self._slots[fence.mode]

    def incidents(self, fence: Fence) -> tuple[Incident, ...]:
        """Writes beside tensors during the last run; waits for the device."""
        if fence.mode == "off":
            return ()
        return tuple(_incident(found, self.launches) for found in self.slots(fence).damage())


def _incident(damage: Damage, launches: list[Launch]) -> Incident:
    """What a damaged canary says. Which launch of several did it, nobody saw."""
    label = damage.slot.label
    given = [(x, a) for x in launches for a in x.arguments if a.label == label]
    kernels = list(dict.fromkeys(launch.kernel for launch, _ in given))
    nowhere = Launch(kernel="", file="", line=0, arguments=())
    launch, argument = given[0] if given else (nowhere, _unknown(label))
    first, last = (_element(at, argument) for at in (damage.first, damage.last))
    where = coordinates(argument.shape, argument.strides, first)
    among = f"; one of {', '.join(kernels)} did it" if len(kernels) > 1 else ""
    return Incident(
        kind="out-of-bounds-write",
        kernel=launch.kernel,
        file=launch.file,
        line=launch.line,
        source="",
        argument=argument.name,
        program_id=None,
        coordinates=where,
        offset=first,
        count=-(-damage.count // argument.itemsize),
        detail=(
            f"the canaries beside {argument.name} of shape {argument.shape} were written over, "
            f"elements {first} to {last} from its first one{among}"
        ),
    )


def _element(byte: int, argument: Argument) -> int:
    """Elements from an argument's first one to a byte of its slot."""
    return byte // argument.itemsize - argument.offset


def _unknown(label: str) -> Argument:
    """A tensor that no launch was given."""
    name = f"allocation {label}" if label.isdecimal() else label
    return Argument(name=name, label=label, shape=(), strides=(), offset=0, itemsize=1)
