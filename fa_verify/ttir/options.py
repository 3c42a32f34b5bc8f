"""What a caller chooses (`Options`) and what an execution reports (`Incident`, `Launch`).

Plain values; nothing here runs anything.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args, get_type_hints

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fa_verify.ttir.lowering.lower import Rule
    from fa_verify.ttir.syntax.ir import Module

Grid = tuple[int, int, int]


class Edit(Protocol):
    """Changes a module in place before it is lowered; hashable, equal for equal edits.

    Attributes:
        rules: How operations run that it makes up; empty for most.
    """

    @property
    def rules(self) -> Mapping[str, Rule]: ...  # noqa: D102 - above

    def __call__(self, module: Module) -> None: ...  # noqa: D102 - above

    def __hash__(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """What is known of a launch's arguments.

    Attributes:
        run_time: Names of those that are no constants, in order.
        counted: Names of the constants that the grid is counted with.
        blocks: Those that are called a block, where nobody knows what the grid is counted with.
    """

    run_time: tuple[str, ...]
    counted: frozenset[str]
    blocks: frozenset[str] = frozenset()


class Alteration(Protocol):
    """Changes kernels, or how they are launched, to see what comes of it."""

    def edit(self, kernel: str) -> Edit | None:
        """What changes a kernel's module; None: nothing does."""
        ...

    def launch(
        self, kernel: str, grid: Grid, given: dict[str, Any], parameters: Parameters
    ) -> tuple[Grid, dict[str, Any]]:
        """The grid and the arguments to launch with instead.

        Args:
            kernel: The function's name.
            grid: Programs along x, y, z.
            given: Arguments by name, constants and compiler options included.
            parameters: What kinds of argument these are.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FloatModel:
    """How the chip's arithmetic is imitated where chips differ; docs/executor.md, "Numbers".

    Attributes:
        name: A label for records.
        tf32: What happens to the 13 low mantissa bits of a tf32 operand. "truncate": dropped, as
            Hopper's tensor cores do when fed unconverted float32 (measured with one-hot probes on
            an H200, wgmma and mma.sync alike). "nearest_away": PTX's cvt.rna.tf32.f32.
        accumulation: How a dot adds up. "float32": in float32, in BLAS's order, then the
            accumulator; but fp8 operands of wgmma, whose sums keep 13 bits, as below. "exact": in
            float64, rounded once. "tensor_core": as Hopper's tensor cores do, in groups along k,
            each sum truncated; float32 "ieee" dots as a chain of fused multiply-adds. Attention
            launches take 5 to 9 times as long.
        subnormals: "keep": IEEE arithmetic, as in the code Triton generates. "flush": float32
            sums, products and quotients read and write subnormal numbers as zero (PTX's .ftz).
        functions: "correct": float32 exponentials, roots, logarithms and quotients to within a few
            ulp of the exact value. "approximate": exp by way of exp2 of a rounded product, and
            subnormal numbers flushed where Triton's code for sm_90 flushes them. "stepwise": every
            step of that code, libdevice's polynomials too, 40 to 150 times slower.
        contraction: "none": every operation rounds. "fused": a product that is added or
            subtracted at once is not rounded, as Triton's default lets LLVM do.
    """

    name: str = "hopper"
    tf32: Literal["truncate", "nearest_away"] = "truncate"
    accumulation: Literal["float32", "exact", "tensor_core"] = "float32"
    subnormals: Literal["keep", "flush"] = "keep"
    functions: Literal["correct", "approximate", "stepwise"] = "approximate"
    contraction: Literal["none", "fused"] = "none"

    def __post_init__(self) -> None:
        """Reject unknown choices."""
        for field_, type_ in get_type_hints(FloatModel).items():
            choices, value = get_args(type_), getattr(self, field_)
            if choices and value not in choices:
                msg = f"{field_}={value!r}: use {' or '.join(map(repr, choices))}"
                raise ValueError(msg)


HOPPER = FloatModel()
FLOAT_MODELS: dict[str, FloatModel] = {
    model.name: model
    for model in (
        HOPPER,
        FloatModel(name="tf32-rna", tf32="nearest_away"),
        FloatModel(name="exact", accumulation="exact"),
        FloatModel(name="flush", subnormals="flush"),
        FloatModel(
            name="hopper-bits",
            accumulation="tensor_core",
            functions="stepwise",
            contraction="fused",
        ),
    )
}
"""The models with a name on command lines and in replay lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to execute.

    Attributes:
        schedule: Order in which programs take their turn. "forward", "reverse", "shuffled": waves
            in lockstep, in order of program number, its reverse, or any. "serial": one program
            after the other. Programs that wait for each other take turns in the same order.
        schedule_seed: Seeds the order when schedule is "shuffled".
        residents: Programs that may have begun and not ended when programs wait for each other;
            None: as many as it takes. A chip has room for so many a multiprocessor, and hangs where
            these wait for one that has not begun.
        float_model: See `FloatModel`.
        config: Index of the autotune configuration to pin, modulo the number offered.
        sanitize: Look for out-of-bounds accesses, reads of unwritten memory and races. Without it
            an access outside its argument is still never carried out, but no longer reported.
        memory_limit: Bytes of live intermediates; programs run in smaller waves to honour it.
        max_incidents: Incidents kept; more of the same kind, kernel, line and argument only count.
        origin: Where the kernels come from, any text; "" is the working folder. Kernels of another
            origin do not share Triton's disk cache, so that incidents name this origin's files and
            not a copy's.
        deadline: A `time.thread_time()` moment after which `TimeLimit` is raised: what others do on
            the machine does not bring it nearer.
        alteration: Changes the kernels that run; None: they run as they are.
    """

    schedule: Literal["forward", "reverse", "shuffled", "serial"] = "forward"
    schedule_seed: int = 0
    residents: int | None = None
    float_model: FloatModel = HOPPER
    config: int = 0
    sanitize: bool = True
    memory_limit: int = 4 << 30
    max_incidents: int = 64
    origin: str = ""
    deadline: float | None = None
    alteration: Alteration | None = None

    def __post_init__(self) -> None:
        """Reject values that mean nothing."""
        if self.schedule not in ("forward", "reverse", "shuffled", "serial"):
            msg = f"schedule={self.schedule!r}: use 'forward', 'reverse', 'shuffled' or 'serial'"
            raise ValueError(msg)
        if self.memory_limit <= 0:
            msg = f"memory_limit={self.memory_limit}: must be positive"
            raise ValueError(msg)
        if self.residents is not None and self.residents <= 0:
            msg = f"residents={self.residents}: must be positive"
            raise ValueError(msg)
        if self.config < 0:
            msg = f"config={self.config}: must not be negative"
            raise ValueError(msg)


def parse_options(*, schedule: str, config: int, sanitize: bool, floats: str) -> Options:
    """Options from a command line's words; `schedule` may be "shuffled:SEED".

    Raises:
        ValueError: They mean nothing.
    """
    order, colon, seed = schedule.partition(":")
    if colon and not (order == "shuffled" and seed.isdecimal()):
        msg = f"schedule={schedule!r}: use 'forward', 'reverse', 'shuffled' or 'shuffled:SEED'"
        raise ValueError(msg)
    if floats not in FLOAT_MODELS:
        msg = f"float={floats!r}: must be one of {', '.join(FLOAT_MODELS)}"
        raise ValueError(msg)
    return Options(
        float_model=FLOAT_MODELS[floats],
        schedule=order,  # type: ignore[arg-type]  # Options validates it
        schedule_seed=int(seed or 0),
        config=config,
        sanitize=sanitize,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """Something a kernel did that it must not do; `count` lanes did it at this line.

    Attributes:
        kind: "out-of-bounds-read", "out-of-bounds-write", "neighbour-read", "uninitialised-read",
            "race", "integer-overflow", "false-hint", "descriptor-rule" or "assertion-failed"; among
            an execution's notes "nan-born", "order-dependence" or "read-back".
        kernel: The kernel's name.
        file: Source file of the access.
        line: Line in `file`.
        source: Text of that line, "" when the file cannot be read.
        argument: Name of the kernel's parameter, "" if unknown.
        program_id: The first program seen doing it.
        coordinates: Element coordinates in the argument's own shape; outside the tensor, what the
            offset would be by its strides (an index may exceed its extent); None when meaningless.
        offset: Element offset from the argument's first element.
        count: Lanes in all.
        detail: A sentence more.
        mask: The mask's value at that element, True since the access took place; None: no mask.
        distance: How many elements outside the argument, 0 when that means nothing.
        landed: Which element of another argument lies there, "" if none does: "k_ptr[0, 3]".
    """

    kind: str
    kernel: str
    file: str
    line: int
    source: str
    argument: str
    program_id: tuple[int, int, int]
    coordinates: tuple[int, ...] | None
    offset: int
    count: int
    detail: str
    mask: bool | None = None
    distance: int = 0
    landed: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One kernel launch.

    Attributes:
        kernel: The kernel's name.
        grid: Programs along x, y, z.
        constants: Values of constexpr parameters, autotuned ones included.
        num_warps: As requested; the executor has no warps.
        num_stages: As requested; the executor does not pipeline.
        source_hash: Hash of the TTIR that ran.
        seconds_compile: Time spent parsing and lowering for this launch (0 when cached).
        seconds_run: Time spent executing.
    """

    kernel: str
    grid: tuple[int, int, int]
    constants: dict[str, Any] = field(default_factory=dict)
    num_warps: int = 4
    num_stages: int = 1
    source_hash: str = ""
    seconds_compile: float = 0.0
    seconds_run: float = 0.0
