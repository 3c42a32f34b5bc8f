"""Every kind of fault, planted in a forward and a backward kernel, in a view and past a storage.

docs/executor.md shows these tables. Tensors lie in storages of their own, or side by side in a
larger buffer: K, V and O as slices of one.
"""

import pytest
import torch

from fa_verify import ttir
from tests.ttir import planted

HEADS, N, D, BLOCK, FAR = 3, 20, 16, 16, 1 << 30
OWN, SLICES, PADDED = "own storage", "slices of a buffer", "padded rows"

# fault, kind, line it is planted on ("": the fault's name), where
FORWARD = (
    ("unmasked-read", "out-of-bounds-read", "", (OWN, SLICES, PADDED)),
    ("before-start", "out-of-bounds-read", "", (OWN, SLICES, PADDED)),
    ("unmasked-write", "out-of-bounds-write", "", (OWN, SLICES, PADDED)),
    ("flat-read", "neighbour-read", "", (OWN, SLICES)),
    ("flat-write", "race", "", (OWN, SLICES)),
    ("unwritten-read", "uninitialised-read", "", (OWN, SLICES, PADDED)),
    ("race-write", "race", "", (OWN, SLICES, PADDED)),
    ("race-read", "race", "", (OWN, SLICES, PADDED)),
    ("relaxed", "race", "", (OWN, SLICES, PADDED)),
    ("overflow", "integer-overflow", "", (OWN, SLICES, PADDED)),
    ("assume", "false-hint", "", (OWN, SLICES, PADDED)),
    ("multiple_of", "false-hint", "", (OWN, SLICES, PADDED)),
    ("max_contiguous", "false-hint", "", (OWN, SLICES, PADDED)),
    ("descriptor", "descriptor-rule", "", (OWN, SLICES, PADDED)),
    ("nan-born", "nan-born", "", (OWN, SLICES, PADDED)),
    ("read-back", "read-back", "", (OWN, SLICES, PADDED)),
    ("ticket", "order-dependence", "", (OWN, SLICES, PADDED)),
)
BACKWARD = (
    ("unmasked-read", "out-of-bounds-read", "", (OWN, SLICES, PADDED)),
    ("before-start", "out-of-bounds-read", "", (OWN, SLICES, PADDED)),
    ("unmasked-write", "out-of-bounds-write", "", (OWN, SLICES, PADDED)),
    ("flat-read", "neighbour-read", "", (OWN, SLICES)),
    ("flat-write", "race", "", (OWN, SLICES)),
    ("delta", "uninitialised-read", "", (OWN, SLICES, PADDED)),
    ("race-write", "race", "", (OWN, SLICES, PADDED)),
    ("race-read", "race", "", (OWN, SLICES, PADDED)),
    ("relaxed", "race", "", (OWN, SLICES, PADDED)),
    ("race-update", "race", "race-update, write", (OWN, SLICES, PADDED)),
    ("overflow", "integer-overflow", "", (OWN, SLICES, PADDED)),
    ("assume", "false-hint", "", (OWN, SLICES, PADDED)),
    ("multiple_of", "false-hint", "", (OWN, SLICES, PADDED)),
    ("max_contiguous", "false-hint", "", (OWN, SLICES, PADDED)),
    ("descriptor", "descriptor-rule", "", (OWN, SLICES, PADDED)),
    ("nan-born", "nan-born", "", (OWN, SLICES, PADDED)),
    ("read-back", "read-back", "", (OWN, SLICES, PADDED)),
    ("ticket", "order-dependence", "", (OWN, SLICES, PADDED)),
)


def rows(table):
    return [
        pytest.param(fault, kind, line or fault, place, id=f"{fault}, {place}")
        for fault, kind, line, places in table
        for place in places
    ]


def line_of(text):
    with open(planted.__file__, encoding="utf-8") as source:  # noqa: PTH123
        return next(i for i, line in enumerate(source, 1) if line.rstrip().endswith(text))


class Room:
    """Hands out tensors of (heads, n, d): alone, side by side in one buffer, or with slack."""

    def __init__(self, place, names):
        self.place = place
        self.tensors = {}
        count = len(names)
        shape = (HEADS, N + 3, D + 4) if place == PADDED else (HEADS, N, D)
        buffer = torch.randn(count + 2, *shape, generator=torch.Generator().manual_seed(0))
        for i, name in enumerate(names, 1):
            whole = buffer[i] if place != OWN else buffer[i].clone()
            self.tensors[name] = whole[:, :N, :D]

    def __getitem__(self, name):
        return self.tensors[name]


def strides(*tensors):
    return [s for t in tensors for s in t.stride()[:2]]


def footprint(name, tensor, reads):
    heads = torch.arange(HEADS).reshape(-1, 1, 1)
    mine = (torch.arange(HEADS), torch.arange(HEADS))
    return ttir.Footprint(tensor=tensor, name=name, labels=heads, reads=dict.fromkeys(reads, mine))


def label(run, room, names):
    for name in names:
        run.label(room[name], name, torch.arange(HEADS).reshape(-1, 1, 1))


def run_forward(fault, place):
    room = Room(place, "qkvo")
    q, k, v, o = (room[x] for x in "qkvo")
    grid = (-(-N // BLOCK), HEADS)
    with ttir.execute() as run:
        run.declare(o, "o", written=False)
        label(run, room, "qkv")
        work = torch.empty(HEADS, N)
        lse, count = torch.empty(HEADS, N), torch.zeros(1, dtype=torch.int32)
        planted.forward[grid](
            q, k, v, o, lse, work, count, HEADS, N, *strides(q, k, v, o), FAR, fault, D, BLOCK
        )
        run.judge([footprint("o", o, "qkv")])
    return run, o


def run_backward(fault, place):
    room = Room(place, ("q", "k", "do", "dk"))
    q, k, do, dk = (room[x] for x in ("q", "k", "do", "dk"))
    grid = (-(-N // BLOCK), HEADS)
    with ttir.execute() as run:
        run.declare(dk, "dk", written=False)
        label(run, room, ("q", "k", "do"))
        dq = torch.zeros(HEADS * q.stride(0)).as_strided(q.shape, q.stride())
        delta = torch.empty(HEADS, N)
        delta[: HEADS if fault != "delta" else HEADS - 1] = 0.5
        count = torch.zeros(1 + HEADS * D)
        planted.backward[grid](
            q, k, do, dk, dq, delta, count, HEADS, N, *strides(q, k, do, dk), FAR, fault, D, BLOCK
        )
        run.judge([footprint("dk", dk, ("q", "k", "do"))])
    return run, dk


def found(run, kind, line):
    seen = [*run.incidents, *run.notes]
    hits = [i for i in seen if (i.kind, i.line) == (kind, line)]
    assert hits, [(i.kind, i.line, i.detail) for i in seen]
    assert hits[0].file == planted.__file__
    return hits[0]


@pytest.mark.parametrize(("fault", "kind", "line", "place"), rows(FORWARD))
def test_a_fault_planted_in_a_forward_kernel_is_found_at_its_line(fault, kind, line, place):
    run, _ = run_forward(fault, place)
    found(run, kind, line_of(f"  # {line}"))


@pytest.mark.parametrize(("fault", "kind", "line", "place"), rows(BACKWARD))
def test_a_fault_planted_in_a_backward_kernel_is_found_at_its_line(fault, kind, line, place):
    run, _ = run_backward(fault, place)
    found(run, kind, line_of(f"  # backward: {line}"))


@pytest.mark.parametrize("place", [OWN, SLICES, PADDED])
def test_the_right_kernels_raise_no_alarm(place):
    for launch in (run_forward, run_backward):
        run, output = launch("", place)
        assert (run.incidents, run.notes) == ([], [])
        assert not run.unwritten(output).any()


@pytest.mark.parametrize("place", [OWN, SLICES, PADDED])
@pytest.mark.parametrize("launch", [run_forward, run_backward])
def test_output_elements_that_nobody_wrote_are_known(place, launch):
    run, output = launch("unwritten-output", place)
    assert run.incidents == []
    holes = run.unwritten(output)
    assert holes[..., D - 1].all()
    assert holes.sum() == HEADS * N


def test_an_access_says_how_far_outside_and_onto_what():
    run, _ = run_forward("unmasked-read", SLICES)
    hit = found(run, "out-of-bounds-read", line_of("# unmasked-read"))
    assert hit.argument == "k_ptr"
    assert hit.program_id == (0, HEADS - 1, 0)
    assert hit.coordinates == (HEADS, 0, 0)
    assert hit.mask is None
    assert hit.distance == (2 * BLOCK - N) * D
    assert hit.landed == "v_ptr[0, 0, 0]"
    assert "in v_ptr[0, 0, 0]; the access has no mask" in hit.detail
    run, _ = run_forward("unmasked-write", SLICES)
    hit = found(run, "out-of-bounds-write", line_of("# unmasked-write"))
    assert hit.mask is True
    assert "the mask let it through: it is true there" in hit.detail
    run, _ = run_forward("unmasked-read", PADDED)
    hit = found(run, "out-of-bounds-read", line_of("# unmasked-read"))
    assert hit.coordinates == (0, N, 0)
    assert "between the elements of k_ptr, 5 from the nearest, and up to 240 elements past" in (
        hit.detail
    )
