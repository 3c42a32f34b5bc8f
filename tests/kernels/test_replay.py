"""Passes noted and done again give the bits of the pass itself, and are never taken for others."""

# ruff: noqa: N803

import gc
import weakref

import pytest
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from fa_verify import ttir

HOPPER = (2, 4, 2, 40, 64)  # batch, heads_q, heads_kv, seqlen, head_dim
SHAPES = [HOPPER, (1, 2, 2, 24, 80), (1, 2, 1, 17, 256), (2, 2, 2, 20, 16)]


@triton.jit
def scaled_kernel(x, y, n, factor, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i, mask=i < n) * factor, mask=i < n)


@triton.jit
def described_kernel(x, y, BLOCK: tl.constexpr):
    y.store([tl.program_id(0) * BLOCK], x.load([tl.program_id(0) * BLOCK]))


def scaled(x, factor, block=16):
    """A pass with a workspace, a torch operation in place, a view and a grid that is computed."""
    y, z = torch.empty_like(x), torch.zeros(x.shape)
    blocks = lambda meta: (triton.cdiv(len(x), meta["BLOCK"]),)  # noqa: E731
    scaled_kernel[blocks](x, y, len(x), factor, BLOCK=block)
    scaled_kernel[blocks](y, z, n=len(x), factor=1, BLOCK=block)
    z.mul_(2.0)
    return z, z.view(-1, 1)


@pytest.fixture
def replay(kernels, monkeypatch):
    """The module, as on a card: nothing is pinned."""
    module = kernels("replay")
    monkeypatch.setattr(module, "pinned", lambda: False)
    return module


@pytest.fixture
def calls(replay):
    """``calls(function)``: the function replayed, and how often it ran itself."""

    def counted(function):
        ran = []

        def run(*arguments):
            ran.append(arguments)
            return function(*arguments)

        return replay.Replayed(run), ran

    return counted


def test_the_third_call_launches_what_the_second_did(calls):
    replayed, ran = calls(scaled)
    with ttir.execute() as run:
        for call in range(1, 6):
            x = torch.arange(40.0) + call
            flat, column = replayed(x, 3.0)
            assert torch.equal(flat, 6 * x)
            assert column.data_ptr() == flat.data_ptr()
            assert len(run.launches) == 2 * call
            assert run.launches[-1].constants["BLOCK"] == 16
    assert run.incidents == []
    assert len(ran) == 2


@pytest.mark.parametrize(
    "other",
    [
        (torch.arange(41.0), 3.0),
        (torch.arange(40.0).double(), 3.0),
        (torch.arange(80.0)[::2], 3.0),
        (torch.arange(41.0)[1:], 3.0),
        (torch.arange(40.0), 4.0),
        (torch.arange(40.0), 3.0, 32),
    ],
    ids=["shape", "dtype", "stride", "alignment", "option", "another option"],
)
def test_another_form_is_done_anew(calls, other):
    replayed, ran = calls(scaled)
    with ttir.execute():
        for _ in range(3):
            replayed(torch.arange(40.0), 3.0)
        assert len(ran) == 2
        replayed(*other)
    assert len(ran) == 3


def test_tensors_that_were_one_may_be_two(calls):
    def difference(x, y):
        out = torch.empty_like(x)
        scaled_kernel[(1,)](y, out, len(x), 1.0, BLOCK=16)
        return (x - out,)

    replayed, ran = calls(difference)
    with ttir.execute():
        x, y = torch.arange(10.0), torch.ones(10)
        for _ in range(2):
            assert not replayed(x, x)[0].any()
        assert torch.equal(replayed(x, y)[0], x - 1)
    assert len(ran) == 2


def test_descriptors_are_made_of_the_tensors_of_each_call(calls):
    def copied(x):
        y = torch.empty_like(x)
        x, described = (TensorDescriptor(t, [len(t)], [1], [16]) for t in (x, y))
        described_kernel[(2,)](x, described, BLOCK=16)
        return (y,)

    replayed, ran = calls(copied)
    with ttir.execute():
        for call in range(4):
            x = torch.arange(32.0) + call
            assert torch.equal(replayed(x)[0], x)
    assert len(ran) == 2


def launched_by(number):
    """A pass that launches with a number and returns what it wrote."""

    def function(x):
        y = torch.empty_like(x)
        scaled_kernel[(1,)](x, y, len(x), number(x), BLOCK=16)
        return (y,)

    return function


kept = torch.full((10,), 2.0)


def from_outside(x):
    y = torch.empty_like(x)
    scaled_kernel[(1,)](kept, y, len(x), 1.0, BLOCK=16)
    return (y + x,)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (launched_by(lambda x: float(x[0])), lambda x: x * x[0]),
        (launched_by(lambda x: x.sum().item()), lambda x: x * x.sum()),
        (from_outside, lambda x: x + 2.0),
        (lambda x: (torch.tensor([1.0, 2.0]), x + 1.0), lambda x: x + 1.0),
    ],
    ids=["an element", "a sum", "a tensor from outside", "a tensor of numbers"],
)
def test_what_depends_on_data_is_done_anew(calls, function, expected):
    replayed, ran = calls(function)
    with ttir.execute():
        for call in range(4):
            x = torch.arange(1.0, 11.0) + call
            assert torch.equal(replayed(x)[-1], expected(x))
    assert len(ran) == 4


def test_nothing_is_noted_of_launches_that_take_times(calls):
    def twice(x):
        y = torch.empty_like(x)
        for _ in range(2):
            scaled_kernel[(1,)](x, y, len(x), 1.0, BLOCK=16)
        return (y,)

    replayed, ran = calls(twice)
    with ttir.execute():
        for _ in range(4):
            replayed(torch.arange(10.0))
    assert len(ran) == 4


def test_a_pass_that_raises_raises_again(calls):
    def refuses(x):
        raise ValueError(x.shape)

    replayed, ran = calls(refuses)
    for _ in range(3):
        with pytest.raises(ValueError, match="10"):
            replayed(torch.arange(10.0))
    assert len(ran) == 3


def test_no_tensor_is_kept(calls):
    replayed, _ = calls(scaled)
    with ttir.execute():
        for _ in range(3):
            x = torch.arange(40.0)
            results = replayed(x, 3.0)
        alive = [weakref.ref(tensor) for tensor in (x, *results)]
        del x, results
        replayed(torch.arange(40.0), 3.0)  # the executor remembers its last launch
        gc.collect()
        assert [ref() for ref in alive] == [None] * 3


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_gives_the_same_bits(kernels, replay, monkeypatch, shape, deterministic):
    """Of Hopper's kernels and of the general ones, forward and backward, with a gradient of lse."""
    batch, heads_q, heads_kv, seqlen, head_dim = shape
    operators = kernels("operators")
    monkeypatch.setattr(operators, "eager", lambda *_: True)
    replayed = {}
    for name in ("_forward_pass", "_backward_pass"):
        replayed[name] = replay.Replayed(getattr(operators, name)._function)
        monkeypatch.setattr(operators, name, replayed[name])
    attention = kernels("attention").attention

    def call(seed):
        generator = torch.Generator().manual_seed(seed)
        q, k, v, do = (
            torch.randn((batch, heads, seqlen, head_dim), generator=generator, dtype=torch.float16)
            for heads in (heads_q, heads_kv, heads_kv, heads_q)
        )
        leaves = [x.requires_grad_() for x in (q, k, v)]
        options = {"causal": True, "deterministic": deterministic, "return_lse": True}
        o, lse = attention(*leaves, **options)
        return [o, lse, *torch.autograd.grad([o, lse], leaves, [do, torch.ones_like(lse)])]

    with ttir.execute() as run:
        call(0), call(1)
        noted = [list(passes._known.values()) for passes in replayed.values()]
        assert all(isinstance(one, replay.Noted) for (one,) in noted)
        third = call(2)
        monkeypatch.setattr(replay, "pinned", lambda: True)
        expected = call(2)
    assert run.incidents == []
    for ours, theirs in zip(third, expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.fixture
def made_ready(replay, monkeypatch):
    """Launches made ready as on a card, though these run here; how many went together each time."""
    together = []

    class Launches:
        def __init__(self, ready) -> None:
            self.ready = ready

        def __call__(self, tensors):
            together.append(len(self.ready))
            for compiled, grid, values, places in self.ready:
                given = [tensors[places[i]] if i in places else x for i, x in enumerate(values)]
                compiled[grid](*given)

    monkeypatch.setattr(replay, "prepared", lambda *launch: launch)
    monkeypatch.setattr(replay, "Launches", Launches)
    return together


def chained(x):
    """A pass of allocations and launches alone, in turns."""
    y = x.new_empty(x.shape)
    scaled_kernel[(3,)](x, y, len(x), 2.0, BLOCK=16)
    z = torch.empty_like(y)
    scaled_kernel[(3,)](y, z, len(x), 3.0, BLOCK=16)
    return z, y


def test_launches_go_together_where_nothing_comes_between(calls, made_ready):
    replayed, _ = calls(chained)
    with ttir.execute() as run:
        for call in range(4):
            x = torch.arange(40.0) + call
            z, y = replayed(x)
            assert torch.equal(z, 6 * x)
            assert torch.equal(y, 2 * x)
    assert run.incidents == []
    assert made_ready == [2, 2]


def test_operations_between_launches_keep_their_turn(calls, made_ready):
    replayed, _ = calls(scaled)
    with ttir.execute():
        for call in range(3):
            x = torch.arange(40.0) + call
            assert torch.equal(replayed(x, 3.0)[0], 6 * x)
    assert made_ready == [1, 1]


def test_who_watches_launches_sees_each(calls, made_ready, replay, monkeypatch):
    replayed, _ = calls(chained)
    with ttir.execute() as run:
        for call in range(4):
            monkeypatch.setattr(replay, "watched", lambda call=call: call == 3)
            x = torch.arange(40.0) + call
            assert torch.equal(replayed(x)[0], 6 * x)
    assert made_ready == [2]
    assert len(run.launches) == 8


@pytest.fixture
def noted_attention(kernels, replay, monkeypatch):
    """``attention``, whose passes are noted and replayed, by the way that a card takes."""
    operators = kernels("operators")
    monkeypatch.setattr(operators, "eager", lambda *_: True)
    for name in ("_forward_pass", "_backward_pass"):
        passes = replay.Replayed(getattr(operators, name)._function)
        monkeypatch.setattr(operators, name, passes)
    return kernels("attention").attention


def test_what_has_gradients_may_change(noted_attention):
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(1, 2, 24, 64, generator=generator).half() for _ in range(3)]

    def call(*needed):
        inputs = [x.clone().requires_grad_(i in needed) for i, x in enumerate(given)]
        o = noted_attention(*inputs, causal=True)
        if not needed:
            assert not o.requires_grad
            return o, {}
        assert o.requires_grad
        found = torch.autograd.grad(o, [inputs[i] for i in needed], torch.ones_like(o))
        return o, dict(zip(needed, found, strict=True))

    with ttir.execute() as run:
        o, due = call(0, 1, 2)
        for needed in ((0, 1, 2), (0, 1, 2), (1,), (0, 2), ()):
            again, found = call(*needed)
            assert torch.equal(o, again)
            assert all(torch.equal(found[i], due[i]) for i in needed)
        with torch.no_grad():
            again = noted_attention(*[x.clone().requires_grad_() for x in given], causal=True)
        assert torch.equal(o, again)
        assert not again.requires_grad
        with torch.inference_mode():
            assert torch.equal(o, noted_attention(*given, causal=True))
    assert run.incidents == []


def test_a_gradient_of_other_strides_is_another_form(noted_attention):
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (torch.randn(1, 2, 24, 64, generator=generator).half() for _ in range(4))
    do_across = do.transpose(1, 2).contiguous().transpose(1, 2)
    found = []
    with ttir.execute() as run:
        for grad in (do, do, do, do_across, do_across, do_across, do[:, :1].expand_as(do)):
            inputs = [x.clone().requires_grad_() for x in (q, k, v)]
            found.append(torch.autograd.grad(noted_attention(*inputs), inputs, grad))
    assert run.incidents == []
    for one in found[1:-1]:
        assert all(map(torch.equal, found[0], one))
    assert not torch.equal(found[0][0], found[-1][0])


@pytest.fixture
def on_a_card(kernels, replay):
    """``on_a_card(shape, seed)``: leaves and a gradient of o on a card."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")

    def made(shape, seed):
        generator = torch.Generator("cuda").manual_seed(seed)
        made = [
            torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)
            for _ in range(4)
        ]
        return [x.requires_grad_() for x in made[:3]], made[3]

    return made


CARD_SHAPES = [(2, 4, 500, 64), (1, 4, 333, 96), (1, 2, 250, 40), (1, 2, 256, 256)]
TERMS = {
    "plain": {},
    "bias": {"bias": lambda heads: torch.randn(heads, 1, 1, device="cuda")},
    "sinks": {"sinks": lambda heads: torch.randn(heads, device="cuda")},
    "alibi": {"alibi_slopes": lambda heads: torch.rand(heads, device="cuda")},
}


@pytest.mark.parametrize("term", TERMS)
@pytest.mark.parametrize("shape", CARD_SHAPES)
def test_on_a_card_replays_give_the_same_bits(kernels, replay, on_a_card, monkeypatch, shape, term):
    attention = kernels("attention").attention
    terms = {name: make(shape[1]) for name, make in TERMS[term].items()}

    def call(seed):
        leaves, do = on_a_card(shape, seed)
        o, lse = attention(*leaves, causal=True, return_lse=True, **terms)
        return [o, lse, *torch.autograd.grad(o, leaves, do)]

    call(0), call(1)
    third = call(2)
    monkeypatch.setattr(replay, "pinned", lambda: True)
    for ours, theirs in zip(third, call(2), strict=True):
        assert torch.equal(ours, theirs)


def test_on_a_card_launches_follow_the_stream(kernels, on_a_card):
    attention = kernels("attention").attention
    given = [on_a_card((1, 4, 512, 64), seed) for seed in range(3)]

    def call(leaves, do):
        o = attention(*leaves, causal=True)
        return [o.detach(), *torch.autograd.grad(o, leaves, do)]

    due = [call(*given[seed]) for seed in (0, 1, 2)]  # the third is replayed
    leaves, do = given[0]
    for (others, other_do), expected in zip(given[1:], due[1:], strict=True):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)  # on another stream they would find what was there before
            with torch.no_grad():
                for mine, other in zip((*leaves, do), (*others, other_do), strict=True):
                    mine.copy_(other)
            found = call(leaves, do)
        stream.synchronize()
        assert all(map(torch.equal, expected, found))


@pytest.mark.parametrize("warm", [1, 2, 3])
@pytest.mark.parametrize("shape", CARD_SHAPES)
def test_on_a_card_a_graph_is_captured(kernels, on_a_card, shape, warm):
    """Whether a pass runs itself, is noted, or is replayed while the graph is captured."""
    attention = kernels("attention").attention
    leaves, do = on_a_card(shape, 0)

    def call():
        o = attention(*leaves, causal=True)
        return [o.detach(), *torch.autograd.grad(o, leaves, do)]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(warm):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = call()
    others, other_do = on_a_card(shape, 1)
    with torch.no_grad():
        for mine, other in zip((*leaves, do), (*others, other_do), strict=True):
            mine.copy_(other)
    graph.replay()
    torch.cuda.synchronize()
    for ours, theirs in zip(captured, call(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")  # torch's own first one
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_on_a_card_compiled_training_gives_the_same_bits(kernels, on_a_card, mode):
    """`reduce-overhead` is CUDA graphs, by torch.compile."""
    attention = kernels("attention").attention
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, causal=True), mode=mode)
    for seed in range(4):
        leaves, do = on_a_card((1, 4, 300, 64), seed)
        found = []
        for function in (compiled, lambda q, k, v: attention(q, k, v, causal=True)):
            o = function(*leaves)
            found.append([x.clone() for x in (o, *torch.autograd.grad(o, leaves, do))])
        for ours, theirs in zip(*found, strict=True):
            assert torch.equal(ours, theirs)
