import gc

import pytest
import torch

from fa_verify.backends.fences import poison
from fa_verify.backends.fences.allocations import Fenced
from fa_verify.backends.fences.fence import Fence
from fa_verify.backends.fences.memory import Heap, tensor_over
from fa_verify.backends.fences.slots import Slots, _size_class

POISON = Fence(mode="poison")
PAGES = [Fence(mode="page"), Fence(mode="page", start=True)]


def slots(fence=POISON):
    made = Slots(Heap("cpu"), "cpu")
    made.begin(finite=fence.finite)
    return made


def beside(tensor, distance, nbytes=1):
    """Bytes outside of a tensor, from its first one."""
    return tensor_over(tensor.data_ptr() + distance, nbytes, "cpu")[0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_what_nobody_wrote_is_a_nan_that_is_known_again(dtype):
    x = slots().take("x", 96, POISON).view(dtype)
    assert x.isnan().all()
    assert poison.left(x).all()
    x[1] = torch.nan
    assert poison.left(x).tolist()[:3] == [True, False, True]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_other_poison_is_a_large_finite_number(dtype):
    fence = Fence(mode="poison", finite=True)
    x = slots(fence).take("x", 96, fence).view(dtype)
    assert x.isfinite().all()
    assert (x > 200).all()


@pytest.mark.parametrize("fence", [POISON, *PAGES])
def test_writes_inside_are_no_damage(fence):
    made = slots(fence)
    for nbytes in (1, 2, 100, 4096):
        made.take("x", nbytes, fence).fill_(0)
    assert made.damage() == []


@pytest.mark.parametrize(("distance", "fence"), [
    (-1, POISON), (-4096, POISON), (100, POISON), (100 + 4096, POISON),
    (-1, PAGES[0]), (100, PAGES[0]), (111, PAGES[0]), (100, PAGES[1]),
])  # fmt: skip
def test_a_write_beside_a_tensor_is_damage_and_says_where(distance, fence):
    made = slots(fence)
    made.take("other", 100, fence)
    x = made.take("x", 100, fence)
    beside(x, distance).fill_(7)
    (found,) = made.damage()
    assert found.slot.label == "x"
    assert (found.first, found.last, found.count) == (distance, distance, 1)


def test_a_slot_is_used_again_only_when_nobody_can_reach_it():
    made = slots()
    x = made.take("x", 100, POISON)
    kept, address = x[3:], x.data_ptr()
    del x
    gc.collect()
    made.begin(finite=False)
    other = made.take("y", 100, POISON)
    assert other.data_ptr() != address
    del kept
    gc.collect()
    same_run = made.take("z", 100, POISON)  # the card may still be busy with x
    assert same_run.data_ptr() != address
    made.begin(finite=False)
    assert made.take("w", 100, POISON).data_ptr() == address
    assert made.mapped < made.taken


def test_large_slots_are_given_back_as_soon_as_nobody_needs_them(monkeypatch):
    monkeypatch.setattr("fa_verify.backends.fences.slots._LARGE", 1 << 20)
    given = []

    class Told(Heap):
        def unmap(self, region):
            given.append(region.nbytes)

    monkeypatch.setattr("fa_verify.backends.fences.slots._KEPT", 0)
    made = Slots(Told("cpu"), "cpu")
    made.begin(finite=False)
    work, o = made.take("work", 4 << 20, POISON), made.take("o", 2 << 20, POISON)
    del work
    gc.collect()
    assert given == []  # its canaries are still to be looked at
    assert made.damage() == []
    assert len(given) == 1
    del o
    gc.collect()
    assert len(given) == 2


def test_a_region_is_given_back_once_though_a_collection_interferes(monkeypatch):
    monkeypatch.setattr("fa_verify.backends.fences.slots._LARGE", 0)
    made = Slots(Heap("cpu"), "cpu")
    made.begin(finite=False)
    held = [made.take("x", 100, POISON) for _ in range(4)]
    made.damage()
    keep = made._keep

    def interrupted(region):
        keep(region)
        held.clear()  # the others die here, amid the loop

    monkeypatch.setattr(made, "_keep", interrupted)
    held.pop()
    gc.collect()
    (regions,) = made._free.values()
    assert len({region.address for region in regions}) == len(regions) == 4


def test_a_crowd_is_used_again_in_the_same_run_but_its_damage_is_kept(monkeypatch):
    monkeypatch.setattr("fa_verify.backends.fences.slots._CROWDED", 1 << 20)
    made = slots()
    for _ in range(20):
        x = made.take("x", 100, POISON)
        beside(x, 101).fill_(7)
        del x
        gc.collect()
    assert made.mapped < 20
    assert len(made.damage()) == 20


def test_a_slot_is_found_by_the_address_of_its_tensor():
    made = slots()
    x = made.take("x", 100, POISON)
    assert made.at(x.data_ptr()).label == "x"
    assert made.at(x.data_ptr() + 1) is None


def test_where_memory_is_short_what_is_kept_for_later_goes_first():
    class Short(Heap):
        left = 8 << 20

        def map(self, nbytes):
            if nbytes > self.left:
                raise torch.OutOfMemoryError
            self.left -= nbytes
            return super().map(nbytes)

        def unmap(self, region):
            self.left += region.nbytes

    made = Slots(Short("cpu"), "cpu")
    for nbytes in (100, 1 << 20, 2 << 20):
        made.take("x", nbytes, POISON)
        gc.collect()
        made.begin(finite=False)
    held = made.take("x", 5 << 20, POISON)
    with pytest.raises(torch.OutOfMemoryError):
        made.take("x", 5 << 20, POISON)
    assert held.numel() == 5 << 20


@pytest.mark.parametrize("nbytes", [1, 4095, 1 << 20, (1 << 30) + 1])
def test_a_size_class_wastes_at_most_an_eighth(nbytes):
    size = _size_class(nbytes, 4096)
    assert nbytes <= size <= max(4096, nbytes + nbytes / 8 + 4096)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_what_a_higher_order_operator_makes_is_moved_too():
    flex = pytest.importorskip("torch.nn.attention.flex_attention").flex_attention
    x = torch.randn(1, 1, 8, 16, generator=torch.Generator().manual_seed(0))
    expected = torch.softmax(x @ x.mT / 4 - 1.0, -1) @ x
    made = slots()
    with torch.compiler.set_stance("force_eager"), Fenced(made, POISON, "cpu"):
        found = flex(x, x, x, score_mod=lambda score, *_: score - 1.0)
    torch.testing.assert_close(found, expected)
    assert made.at(found.data_ptr()) is not None
