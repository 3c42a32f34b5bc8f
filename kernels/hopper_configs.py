"""How the Hopper kernels are cut into tiles: a table for the H200, and the run that made it."""

import dataclasses

__all__ = ["BACKWARD", "Tiles", "backward_tiles"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tiles:
    """Blocks and compiler options of one kernel.

    Attributes:
        block_m: Queries a tile. At least 32: tiles of lse begin at multiples of 128 bytes.
        block_n: Keys a tile.
        warps: Of a program.
        stages: Tiles of a loop in shared memory at a time. At least 2: see hopper_forward.py.
        registers: Most that a thread may have; None: as many as it wants.
        dp_first: The order of products; see hopper_dkdv_kernel.
        in_registers: Where q and do are; see hopper_dq_kernel.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    registers: int | None = None
    dp_first: bool = False
    in_registers: bool = False

    @property
    def options(self):
        """What a launch is told."""
        options = {
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "num_warps": self.warps,
            "num_stages": self.stages,
        }
        return options if self.registers is None else {**options, "maxnreg": self.registers}


def _tiles(block_m, block_n, warps, stages, registers=None, **options):  # noqa: ANN003
    return Tiles(
        block_m=block_m, block_n=block_n, warps=warps, stages=stages, registers=registers, **options
    )


# Most columns of a row of q or v: the pass: its tiles. Measured on an H200 with Triton 3.6
# (docs/speed_backward.md). 168 registers let three programs share a multiprocessor. Above 128
# columns no program has the registers for both dk and dv, and dv takes a pass of its own.
BACKWARD = {
    64: {
        "dkdv": _tiles(64, 64, 4, 3, 168),
        "atomic": _tiles(64, 64, 4, 2, 168),
        "dq": _tiles(64, 64, 4, 2),
    },
    80: {
        "dkdv": _tiles(64, 64, 4, 2, 168),
        "atomic": _tiles(64, 64, 4, 2, dp_first=True),
        "dq": _tiles(64, 64, 4, 2),
    },
    96: {
        "dkdv": _tiles(64, 64, 4, 3, dp_first=True),
        "atomic": _tiles(64, 64, 4, 2, dp_first=True),
        "dq": _tiles(64, 64, 4, 2),
    },
    128: {
        "dkdv": _tiles(64, 64, 4, 2, dp_first=True),
        "atomic": _tiles(64, 128, 8, 2),
        "dq": _tiles(64, 64, 4, 3, in_registers=True),
    },
    256: {
        "dv": _tiles(64, 128, 8, 2),
        "dk": _tiles(32, 128, 8, 3),
        "atomic": _tiles(32, 64, 8, 2),
        "dq": _tiles(128, 32, 8, 3),
    },
}


def backward_tiles(columns):
    """Tiles of each backward kernel for rows of q and v of at most so many columns."""
    return next(tiles for most, tiles in BACKWARD.items() if columns <= most)
