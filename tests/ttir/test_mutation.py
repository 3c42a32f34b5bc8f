"""Mutants of small kernels: what they change, what is proven to change nothing."""

# Triton reads the kernels in this file: their constexprs are upper-case.
# ruff: noqa: N803

import pytest
import torch
import triton
import triton.language as tl

from fa_verify import ttir
from fa_verify.ttir.launch import compiler
from fa_verify.ttir.mutation.recorder import Recorder

COLUMNS = 21


@triton.jit
def softmax_kernel(x, y, columns, stride_x, stride_y, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    inside = lanes < columns
    logits = tl.load(x + row * stride_x + lanes, mask=inside, other=float("-inf"))
    p = tl.exp(logits - tl.max(logits, 0))
    tl.store(y + row * stride_y + lanes, p / tl.sum(p, 0), mask=inside)


@triton.jit
def add_one_kernel(x, y, columns, BLOCK: tl.constexpr):
    lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = lanes < columns
    tl.store(y + lanes, tl.load(x + lanes, mask=inside, other=0.0) + 1.0, mask=inside)


@triton.jit
def count_kernel(x, y, columns, BLOCK: tl.constexpr):
    total = 0.0
    for first in range(0, columns // BLOCK * BLOCK, BLOCK):
        total += tl.sum(tl.load(x + first + tl.arange(0, BLOCK)), 0)
    tl.atomic_add(y, total)


@triton.jit
def copy_kernel(x, y, columns, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    loaded = tl.load(x + lanes, mask=lanes < columns, other=0.0)
    tl.store(y + lanes, loaded, mask=lanes < columns)


@triton.jit
def returning_kernel(x, y, columns, BLOCK: tl.constexpr):
    first = tl.program_id(0) * BLOCK
    if first >= columns:
        return
    total = 0.0
    for _ in range(3):
        total += tl.sum(tl.load(x + first + tl.arange(0, BLOCK)), 0)
    tl.store(y + tl.program_id(0), total)


@triton.jit
def limits_kernel(x, y, columns, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    start = tl.maximum(columns - 30, 0) // 4 * 4  # 0 for 0 or 1
    end = tl.minimum(columns + 1, 23) // 4 * 4  # 20 for 23, 24 for 24
    logits = tl.load(x + start + lanes, mask=start + lanes < end, other=0.0)
    small = tl.minimum(logits, 0.5)
    large = tl.maximum(logits, 0.25)
    logits = tl.where(logits < 0.5, small * 2.0, 1.0) + tl.where(logits < 0.75, 0.75, large)
    wide = lanes.to(tl.int64) * 3
    wider = columns.to(tl.int64) * columns
    tl.store(y + lanes, logits + wide + wider, mask=lanes < columns)


@triton.jit
def twice_kernel(x, y, columns, BLOCK: tl.constexpr, AGAIN: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    numbers = tl.load(x + lanes)
    shown = lanes < columns
    product = tl.where(shown, numbers, 0.0) * numbers
    if AGAIN:
        product = tl.where(shown, product, 0.0)
    tl.store(y + lanes, product)


@triton.jit
def absorbing_kernel(x, y, columns, factor, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    numbers = tl.load(x + lanes)
    shown = lanes < columns
    inf = tl.where(shown, numbers * 1.5, float("inf"))
    zero = tl.where(shown, numbers, 0.0) * 2.0
    negative = tl.where(shown, numbers * -2.0, float("inf"))
    some = tl.where(shown, numbers * 4.0, 1.0)
    other = tl.where(shown, numbers * factor, float("inf"))
    tl.store(y + lanes, inf + zero + negative + some + other)


@triton.jit
def columns_kernel(x, y, columns, rows, BLOCK: tl.constexpr, MOVES: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for row in range(rows):
        first = row if MOVES else 0
        total += tl.load(x + row * columns + lanes, mask=first + lanes < columns, other=0.0)
    tl.store(y + lanes, total, mask=lanes < columns)


@triton.jit
def distance_kernel(x, y, columns, BLOCK: tl.constexpr):
    lanes = tl.arange(0, BLOCK)
    steps = tl.abs(lanes - columns) + (columns - lanes) % 2
    tl.store(y + lanes, tl.load(x + lanes) + steps, mask=lanes < columns)


def softmax(alteration, columns=COLUMNS):
    x = torch.randn(3, columns, generator=torch.Generator().manual_seed(0))
    y = torch.empty_like(x)
    with ttir.execute(ttir.Options(alteration=alteration)) as run:
        run.declare(x, "x", written=True)
        run.declare(y, "y", written=False)
        softmax_kernel[(3,)](x, y, columns, x.stride(0), y.stride(0), BLOCK=32)
    return y, x.softmax(1), run.incidents


def flat(kernel, alteration, columns=COLUMNS, grid=2):
    x, y = torch.randn(columns), torch.zeros(columns)
    with ttir.execute(ttir.Options(alteration=alteration)) as run:
        run.declare(x, "x", written=True)
        kernel[(grid,)](x, y, columns, BLOCK=16)
    return x, y, run.incidents


def recorded(run):
    recorder = Recorder()
    run(recorder)
    assert recorder.found
    return recorder.found


def one(found, operator, **fields):
    chosen = [
        m
        for m in found
        if m.operator == operator and all(getattr(m, k) == v for k, v in fields.items())
    ]
    assert len(chosen) == 1, chosen
    return chosen[0]


def test_a_recorder_changes_nothing():
    y, right, incidents = softmax(Recorder())
    torch.testing.assert_close(y, right)
    assert not incidents


def test_an_edit_is_of_its_own_run_alone():
    mutant = one(recorded(softmax), "change-reduction", label="maxnumf")
    before, right, _ = softmax(None)
    changed, _, _ = softmax(mutant)
    again, _, _ = softmax(mutant)
    after, _, _ = softmax(None)
    assert not torch.allclose(changed, right)
    assert torch.equal(before, after)
    assert torch.equal(changed, again)


def test_mutants_of_a_kernel_that_returns_early():
    def run(alteration):
        torch.manual_seed(0)
        return flat(returning_kernel, alteration, columns=32, grid=3)

    found = recorded(run)
    x, right, _ = run(None)
    torch.testing.assert_close(
        right[:3], torch.stack([3 * x[:16].sum(), 3 * x[16:].sum(), x[0] * 0])
    )
    late = one(found, "loop-bound", label="end+1")
    for _ in range(2):
        _, y, _ = run(late)
        torch.testing.assert_close(y[:2], right[:2] / 3 * 4)
    _, y, _ = run(one(found, "flip-comparison", label="opposite"))
    assert not torch.allclose(y, right)


@pytest.mark.parametrize(
    ("operator", "fields", "incident"),
    [
        ("drop-mask", {"op": "tt.load"}, "out-of-bounds-read"),
        ("drop-mask", {"op": "tt.store"}, "out-of-bounds-write"),
        ("flip-comparison", {"label": "edge"}, "out-of-bounds-read"),
        ("grid", {"label": "x+1"}, "out-of-bounds-read"),
    ],
)
def test_the_sanitizer_sees_accesses_that_go_astray(operator, fields, incident):
    _, _, incidents = softmax(one(recorded(softmax), operator, **fields), columns=COLUMNS)
    assert incident in {x.kind for x in incidents}


@pytest.mark.parametrize(
    ("operator", "fields"),
    [
        ("shift-comparison", {}),
        ("change-constant", {"label": "range"}),
        ("drop-other", {}),
        ("change-reduction", {"label": "addf"}),
        ("swap-operands", {"op": "arith.subf"}),
        ("swap-operands", {"op": "arith.divf"}),
        ("drop-operand", {"op": "arith.subf", "label": "keep-b"}),
        ("drop-operand", {"op": "arith.divf", "label": "keep-a"}),
        ("grid", {"label": "x-1"}),
        ("swap-arguments", {"names": ("columns", "stride_x")}),
    ],
)
def test_other_numbers_come_out(operator, fields):
    found = recorded(softmax_padded)
    y, right, _ = softmax_padded(one(found, operator, **fields))
    assert not torch.allclose(y, right, equal_nan=False)


def softmax_padded(alteration):
    """Rows further apart than they are long, so that a stride is no extent."""
    x = torch.randn(3, 40, generator=torch.Generator().manual_seed(0))[:, :COLUMNS]
    y = torch.zeros(3, COLUMNS)
    with ttir.execute(ttir.Options(alteration=alteration)):
        softmax_kernel[(3,)](x, y, COLUMNS, x.stride(0), y.stride(0), BLOCK=32)
    return y, x.softmax(1), ()


def test_lanes_that_are_never_stored_may_hold_anything():
    found = recorded(lambda alteration: flat(add_one_kernel, alteration))
    mutant = one(found, "drop-other")
    assert "" not in found[mutant].proofs
    x, y, incidents = flat(add_one_kernel, mutant)
    assert torch.equal(y, x + 1)
    assert not incidents


def test_lanes_that_are_added_up_are_seen():
    found = recorded(softmax)
    assert found[one(found, "drop-other")].proofs == {""}


def test_a_loop_of_whole_steps_may_end_one_earlier():
    found = recorded(lambda alteration: flat(count_kernel, alteration, grid=1))
    mutant = one(found, "loop-bound", label="end-1")
    assert found[mutant].proofs == {"the loop goes from a multiple of its step 16 to another"}
    x, y, _ = flat(count_kernel, mutant, grid=1)
    torch.testing.assert_close(y[0], x[:16].sum())
    shorter = one(found, "loop-bound", label="end-step")
    assert found[shorter].proofs == {""}
    _, y, _ = flat(count_kernel, shorter, grid=1)
    assert y[0] == 0


@pytest.mark.parametrize(("label", "programs"), [("store", 1), ("nothing", 0)])
def test_an_atomic_is_dropped(label, programs):
    found = recorded(lambda alteration: flat(count_kernel, alteration, grid=2))
    x, y, _ = flat(count_kernel, one(found, "drop-atomic", label=label), grid=2)
    torch.testing.assert_close(y[0], programs * x[:16].sum())


def test_ids_are_of_the_source_not_of_the_specialisation():
    ids = []
    for columns in (21, 16):  # which Triton specialises on
        found = recorded(lambda alteration, n=columns: softmax(alteration, columns=n))
        ids.append({m.id for m in found if m.operator in ("drop-mask", "change-reduction")})
    assert ids[0] == ids[1]
    found = recorded(softmax)
    assert len({m.id for m in found}) == len(found)


@pytest.mark.parametrize("columns", [21, 32])
def test_mutants_that_compute_nothing_else_change_no_bit(columns):
    recorder = Recorder()
    right, _, _ = softmax(recorder, columns)
    alike = recorder.found.keys() - recorder.differ
    for mutant in recorder.found:
        y, _, incidents = softmax(mutant, columns)
        if mutant in alike:
            assert torch.equal(y, right), mutant
            assert not incidents, mutant
    masks = {m for m in recorder.found if m.operator in ("drop-mask", "drop-other")}
    assert len(masks) == 3
    assert bool(masks & alike) == (columns == 32)


def limits(alteration):
    x, y = torch.linspace(-1, 1, 32), torch.zeros(32)
    with ttir.execute(ttir.Options(alteration=alteration)) as run:
        limits_kernel[(1,)](x, y, 22, BLOCK=32)
    return y, run.incidents


QUOTIENT = "all that is made of the limit is a quotient, which stays the same"
CHOSEN = "where the other operand is taken, another value is chosen afterwards"


@pytest.mark.parametrize(
    ("operator", "fields", "proof"),
    [
        ("change-constant", {"op": "arith.maxsi"}, QUOTIENT),
        ("change-constant", {"op": "arith.minsi"}, ""),
        ("change-constant", {"op": "arith.minnumf"}, CHOSEN),
        ("drop-operand", {"op": "arith.minnumf", "label": "keep-a"}, CHOSEN),
        ("drop-operand", {"op": "arith.minnumf", "label": "keep-b"}, ""),
        ("drop-operand", {"op": "arith.maxnumf", "label": "keep-a"}, ""),
    ],
)
def test_a_limit_that_nothing_is_made_of_may_be_another(operator, fields, proof):
    found = recorded(limits)
    mutant = one(found, operator, **fields)
    assert found[mutant].proofs == {proof}
    if proof:
        assert torch.equal(limits(mutant)[0], limits(None)[0])


def test_only_the_size_of_a_difference_is_read():
    def run(alteration):
        torch.manual_seed(0)
        return flat(distance_kernel, alteration, columns=16, grid=1)

    found = recorded(run)
    swaps = [m for m in found if m.operator == "swap-operands" and m.op == "arith.subi"]
    proofs = {next(iter(found[m].proofs)): m for m in swaps}
    assert proofs.keys() == {"its only readers take its absolute value", ""}
    _, right, _ = run(None)
    assert torch.equal(run(proofs["its only readers take its absolute value"])[1], right)
    assert not torch.equal(run(proofs[""])[1], right)


def test_arithmetic_that_fits_32_bits_needs_no_64():
    found = recorded(limits)
    proofs = {next(iter(found[m].proofs)) for m in found if m.operator == "drop-cast"}
    assert proofs == {"it lies in 0 to 93", ""}


@pytest.mark.parametrize("moves", [False, True])
def test_what_a_loop_computes_again_is_the_same_where_nothing_in_it_moves(moves):
    def run(alteration):
        x, y = torch.randn(3 * COLUMNS), torch.zeros(COLUMNS)
        with ttir.execute(ttir.Options(alteration=alteration)):
            columns_kernel[(1,)](x, y, COLUMNS, 3, BLOCK=32, MOVES=moves)
        return x.view(3, COLUMNS).sum(0), y

    found = recorded(run)
    mutant = one(found, "drop-other")
    assert (found[mutant].proofs == {""}) == moves
    right, y = run(mutant)
    assert torch.allclose(y, right) != moves


def test_a_slip_in_one_line_leaves_the_line_that_computes_the_same_alone(monkeypatch):
    def copied(alteration, block):
        x, y = torch.randn(COLUMNS), torch.zeros(COLUMNS)
        with ttir.execute(ttir.Options(alteration=alteration)) as run:
            copy_kernel[(1,)](x, y, COLUMNS, BLOCK=block)
        return {x.kind for x in run.incidents}

    def edges(block):
        found = recorded(lambda alteration: copied(alteration, block))
        return [m for m in found if (m.operator, m.label) == ("flip-comparison", "edge")]

    (both,) = edges(32)
    assert copied(both, 32) == {"out-of-bounds-read", "out-of-bounds-write"}
    monkeypatch.setattr(compiler, "_apart", [])
    compiler.keep_apart()
    apart = [copied(mutant, 64) for mutant in edges(64)]
    assert sorted(kind for (kind,) in apart) == ["out-of-bounds-read", "out-of-bounds-write"]


@pytest.mark.parametrize("again", [True, False])
@pytest.mark.parametrize(
    ("operator", "label"),
    [
        ("drop-select", "always-first"),
        ("change-constant", "operand-2"),
        ("reorder-scale-and-mask", "scale-first-0-2"),
    ],
)
def test_what_is_hidden_again_may_be_anything(operator, label, again):
    def run(alteration):
        x, y = torch.linspace(0.5, 1, 32), torch.zeros(32)
        x[-1] = torch.inf  # times 0 is NaN
        with ttir.execute(ttir.Options(alteration=alteration)):
            twice_kernel[(1,)](x, y, COLUMNS, BLOCK=32, AGAIN=again)
        return y

    found = recorded(run)
    chosen = [m for m in found if (m.operator, m.label) == (operator, label)]
    inner = min(chosen, key=lambda m: found[m].line)
    same = torch.equal(run(inner).nan_to_num(7), run(None).nan_to_num(7))
    assert (found[inner].proofs != {""}) == same == again


def test_a_factor_that_a_hidden_constant_absorbs_may_come_before_or_after_the_mask():
    def run(alteration):
        x, y = torch.linspace(0.5, 1, 32), torch.zeros(32)
        with ttir.execute(ttir.Options(alteration=alteration)):
            absorbing_kernel[(1,)](x, y, COLUMNS, 3.0, BLOCK=32)
        return y

    found = recorded(run)
    moved = [m for m in found if m.operator == "reorder-scale-and-mask"]
    proofs = [found[m].proofs for m in sorted(moved, key=lambda m: found[m].line)]
    none = frozenset({""})
    assert proofs == [{"inf times 1.5 is inf"}, {"0 times 2 is 0"}, none, none, none]


@triton.jit
def chosen_kernel(x, y, columns, BLOCK: tl.constexpr, INSIDE: tl.constexpr):
    """The sum of what is chosen by what was read, and by whether it lies inside."""
    lanes = tl.arange(0, BLOCK)
    inside = lanes < columns
    numbers = tl.load(x + lanes, mask=inside, other=0.0)
    chosen = numbers != 3.0
    if INSIDE:
        chosen = inside & chosen
    tl.store(y, tl.sum(tl.where(chosen, numbers, 1.0), 0))


@pytest.mark.parametrize("inside", [True, False])
def test_what_is_chosen_by_a_false_condition_too_is_not_seen(inside):
    def run(alteration):
        x, y = torch.linspace(0.5, 1, 32), torch.zeros(1)
        with ttir.execute(ttir.Options(alteration=alteration)):
            chosen_kernel[(1,)](x, y, COLUMNS, BLOCK=32, INSIDE=inside)
        return y

    found = recorded(run)
    (dropped,) = (m for m in found if m.operator == "drop-other")
    assert torch.equal(run(dropped), run(None)) == inside
    assert (found[dropped].proofs != {""}) == inside
