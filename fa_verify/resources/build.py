"""`Build`: what one kernel, compiled for one chip, takes of it. A line of a record; no Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from fa_verify.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

__all__ = ["Build", "Finding", "Refusal", "Usage", "read", "write"]


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """What the compiler said of a kernel.

    Attributes:
        error: Why it does not compile, the compiler's words; all else is 0 then.
        misfit: The error is of the kind that makes an autotuner take another configuration.
        registers: Of a thread; on CDNA vector registers.
        spill_stores: Bytes that a thread stores for want of registers; spill_loads: that it loads.
            On CDNA both are 4 times the vector registers spilled: the compiler tells no more.
        stack: Bytes of local memory of a thread.
        shared: Bytes of shared memory of a program.
        columns: Columns of tensor memory of a program.
        matrix: Tensor-core instructions by kind ("wgmma", "mma", "tcgen05", "mfma", "wmma").
        tf32: How many of them read tf32.
        dots: Products in Triton's IR by operand type and, for float32, the precision asked of them.
        lost: Descriptors of products that ptxas computes wrongly (`descriptors.lost`).
        rewritten: Registers written while a product may read them (`operands.rewritten`).
        repeated: Products whose operands Triton lays out wrongly (`layouts.repeated`).
    """

    error: str = ""
    misfit: bool = False
    registers: int = 0
    spill_stores: int = 0
    spill_loads: int = 0
    stack: int = 0
    shared: int = 0
    columns: int = 0
    matrix: dict[str, int] = {}
    tf32: int = 0
    dots: dict[str, int] = {}
    lost: int = 0
    rewritten: int = 0
    repeated: int = 0


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """Something worth saying of a build; `fails` says whether it makes the run fail."""

    kind: str
    text: str
    fails: bool


class Build(msgspec.Struct, frozen=True, kw_only=True, tag="build"):
    """A kernel's function as one launch of a case has it compiled, for one chip.

    Attributes:
        kernel: Name of the kernel under test; target: ``file.py:name``.
        function: Name of the Triton function; location: ``file:line`` of it.
        chip: Name of the chip.
        config: What an autotuner chose, blocks, warps and stages.
        index: Number of the pinned autotune configuration.
        form: All that it was compiled for: types, constants, options. With kernel, function and
            chip it tells a build from every other.
        case: The first case that launches it.
        usage: What it takes.
        findings: What there is to say.
    """

    kernel: str
    target: str
    function: str
    location: str
    chip: str
    config: str
    index: int
    form: str
    case: str
    usage: Usage
    findings: tuple[Finding, ...] = ()

    @property
    def identity(self) -> tuple[str, str, str, str]:
        """The same for the same build of another version of the source."""
        return self.kernel, self.function, self.chip, self.form

    @property
    def fails(self) -> bool:
        """Whether it makes the run fail."""
        return any(finding.fails for finding in self.findings)


class Refusal(msgspec.Struct, frozen=True, kw_only=True, tag="refusal"):
    """A case on which a kernel's launchers raised, so that not all was seen that it launches.

    Attributes:
        kernel: Name of the kernel; target: ``file.py:name``; chip: that it was to run on.
        case: The case.
        error: What was raised.
        fails: Whether Triton's compiler raised it; what launchers raise is for `check` to judge.
    """

    kernel: str
    target: str
    chip: str
    case: str
    error: str
    fails: bool


def write(path: Path, builds: Iterable[Build], refusals: Iterable[Refusal] = ()) -> None:
    """Write builds, a line each, in an order that does not depend on the run.

    Raises:
        InvalidInputError: The file cannot be written.
    """
    encoder = msgspec.json.Encoder(order="deterministic")
    lines = [encoder.encode(build) for build in sorted(builds, key=lambda b: b.identity)]
    lines += [encoder.encode(refusal) for refusal in refusals]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"".join(line + b"\n" for line in lines))
    except OSError as error:
        msg = f"file={str(path)!r}: cannot be written ({error.strerror}); choose another place"
        raise InvalidInputError(msg) from error


def read(path: Path) -> tuple[Build, ...]:
    """The builds of a file.

    Raises:
        InvalidInputError: The file is missing, or a line is no build.
    """
    decoder = msgspec.json.Decoder(Build | Refusal)
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        msg = f"baseline={str(path)!r}: cannot be read ({error.strerror}); make one with --save"
        raise InvalidInputError(msg) from error
    try:
        found = [decoder.decode(line) for line in lines if line.strip()]
    except msgspec.DecodeError as error:
        msg = f"baseline={str(path)!r}: holds no builds of this version ({error}); save it again"
        raise InvalidInputError(msg) from error
    return tuple(line for line in found if isinstance(line, Build))
