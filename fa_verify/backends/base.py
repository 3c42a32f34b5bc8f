"""What a backend is: it runs a kernel on inputs and says what it saw. It judges nothing."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Protocol

import torch

from fa_verify.backends.fences.fence import POISON, Fence
from fa_verify.errors import InvalidInputError
from fa_verify.kernel import Grads, Outputs

if TYPE_CHECKING:
    from fa_verify.inputs import Inputs
    from fa_verify.kernel import Kernel
    from fa_verify.problem import Problem
    from fa_verify.ran import SourceRan

__all__ = ["FAULT", "Backend", "Execution", "Incident", "Setup"]

FAULT = 71  # exit code of a process whose kernel faulted on the card

_KEYS = (
    *("backend", "config", "schedule", "float", "fence"),
    *("warps", "stages", "beside", "stress", "sanitizer"),
)
_COUNTS = ("warps", "stages", "stress")
_BESIDE = ("nothing", "load", "twin")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """How a kernel is run: all that replay needs beside the kernel and the case.

    Attributes:
        backend: "cpu" (TTIR on the CPU) or "cuda".
        config: Index of the pinned autotune configuration, modulo how many there are.
        schedule: Order of the programs: "forward", "reverse", "serial" or
            "shuffled:SEED" (CPU only).
        float_model: Name of the CPU executor's float model; "hardware" on CUDA.
        fence: What surrounds tensors (CUDA only: the CPU executor watches every access).
        warps: num_warps of every launch, whatever its caller says; 0: as it says (CUDA only).
        stages: num_stages, likewise.
        beside: What else runs on the card meanwhile: "nothing", "load" (products and copies that
            keep it busy) or "twin" (the same launches, on other numbers, on a second stream).
        stress: How often the same launch is run again under stress, to see whether a bit moves.
        sanitizer: The tool that the case runs under, which alone judges it (CUDA only); "": none.

    >>> Setup.parse("backend=cpu config=3") == Setup(config=3)
    True
    >>> str(Setup(backend="cuda", warps=8, stress=12)).split()[4:]
    ['warps=8', 'stress=12']
    """

    backend: str = "cpu"
    config: int = 0
    schedule: str = "forward"
    float_model: str = "hopper"
    fence: Fence = POISON
    warps: int = 0
    stages: int = 0
    beside: str = "nothing"
    stress: int = 0
    sanitizer: str = ""

    def __str__(self) -> str:
        """The text that `parse` reads."""
        words = [f"backend={self.backend}", f"config={self.config}", f"schedule={self.schedule}"]
        words += [f"float={self.float_model}"]
        words += [f"fence={self.fence}"] if self.fence != POISON else []
        words += [f"{name}={getattr(self, name)}" for name in _COUNTS if getattr(self, name)]
        words += [f"beside={self.beside}"] if self.beside != "nothing" else []
        words += [f"sanitizer={self.sanitizer}"] if self.sanitizer else []
        return " ".join(words)

    @classmethod
    def parse(cls, text: str) -> Setup:
        """Read the text form.

        Raises:
            InvalidInputError: A token is malformed, unknown or out of range.
        """
        tokens = dict(token.partition("=")[::2] for token in text.split())
        if set(tokens) - set(_KEYS):
            msg = f"setup={text!r}: keys are {', '.join(_KEYS)}"
            raise InvalidInputError(msg)
        default = cls()
        schedule = tokens.get("schedule", default.schedule)
        name, _, seed = schedule.partition(":")
        valid = (name in ("forward", "reverse", "serial") and not seed) or (
            name == "shuffled" and seed.isdecimal()
        )
        if not valid:
            msg = f"schedule={schedule!r}: must be forward, reverse, serial or shuffled:SEED"
            raise InvalidInputError(msg)
        if tokens.get("backend", "cpu") not in ("cpu", "cuda"):
            msg = f"backend={tokens['backend']!r}: must be cpu or cuda"
            raise InvalidInputError(msg)
        for name in ("config", *_COUNTS):
            if not tokens.get(name, "0").isdecimal():
                rule = "an index from 0" if name == "config" else "a count"
                msg = f"{name}={tokens[name]!r}: must be {rule}"
                raise InvalidInputError(msg)
        if tokens.get("beside", default.beside) not in _BESIDE:
            msg = f"beside={tokens['beside']!r}: must be {', '.join(_BESIDE)}"
            raise InvalidInputError(msg)
        return cls(
            backend=tokens.get("backend", default.backend),
            config=int(tokens.get("config", "0")),
            schedule=schedule,
            float_model=tokens.get("float", default.float_model),
            fence=Fence.parse(tokens["fence"]) if "fence" in tokens else default.fence,
            beside=tokens.get("beside", default.beside),
            sanitizer=tokens.get("sanitizer", ""),
            **{name: int(tokens.get(name, "0")) for name in _COUNTS},
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """A forbidden access, or another fault that a backend saw while the kernel ran.

    Attributes:
        kind: "out-of-bounds-read", "out-of-bounds-write", "uninitialised-read", "race", ...
        kernel: The Triton function's name; file, line, source: where in it.
        argument: The kernel parameter through which the access went.
        program_id: The first program that did it; None: nobody knows.
        coordinates: Element coordinates in the argument's own shape, if they mean anything.
        offset: Elements from the argument's first one.
        count: How many lanes in all.
        detail: A sentence.
    """

    kind: str
    kernel: str
    file: str
    line: int
    source: str
    argument: str
    program_id: tuple[int, int, int] | None
    coordinates: tuple[int, ...] | None
    offset: int
    count: int
    detail: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """What one run of forward (and backward) did.

    Attributes:
        outputs: The forward's result; None when it raised.
        grads: The backward's result; None when it raised or was not asked for.
        incidents: Faults seen, at most some dozens, each with its count.
        notes: What may be no fault: where a NaN was born, a store read back by its program.
        unwritten: For o, lse and each gradient: bool, the tensor's shape, True where nobody wrote.
            Only tensors with such elements are listed.
        error: "Type: message" of an exception, "" if none; the traceback follows on more lines.
        error_kind: "" | "unsupported" (UnsupportedProblemError, or an op that cannot be run) |
            "raised" | "timeout".
        error_at: "file:line" of what raised, in the author's code; "" if there is none.
        stage: "forward" or "backward": where the error arose.
        config: Text of the pinned autotune configurations, for people.
        configs: How many configurations the kernel offers (the largest count of its functions).
        seconds: Wall-clock seconds of forward and backward together.
        ran: What of each source file's kernels ran, as far as the backend sees it.
    """

    outputs: Outputs | None = None
    grads: Grads | None = None
    incidents: tuple[Incident, ...] = ()
    notes: tuple[Incident, ...] = ()
    unwritten: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    error: str = ""
    error_kind: str = ""
    error_at: str = ""
    stage: str = ""
    config: str = ""
    configs: int = 1
    seconds: float = 0.0
    ran: dict[str, SourceRan] = dataclasses.field(default_factory=dict)

    def to(self, device: str) -> Execution:
        """The same with its tensors on a device."""
        o, grads = self.outputs, self.grads
        return dataclasses.replace(
            self,
            outputs=o and Outputs(_moved(o.o, device), _moved(o.lse, device), o.saved),
            grads=grads and Grads(**{n: _moved(x, device) for n, x in grads.named().items()}),
            unwritten={name: mask.to(device) for name, mask in self.unwritten.items()},
        )


def _moved(tensor: Any, device: str) -> Any:
    """Whatever a kernel returned in a tensor's place stays as it is."""
    return tensor.to(device) if isinstance(tensor, torch.Tensor) else tensor


class Backend(Protocol):
    """Runs kernels. Two exist: `cpu` over `fa_verify.ttir`, and `cuda`."""

    device: str

    def run(
        self, kernel: Kernel, problem: Problem, inputs: Inputs, setup: Setup, *, backward: bool
    ) -> Execution:
        """Run the kernel; an exception that it raises is part of the answer, never propagated."""
        ...
