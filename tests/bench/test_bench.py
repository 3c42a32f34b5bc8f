"""`fa-verify bench`: points, contestants and tables; the clock itself needs a card."""

from __future__ import annotations

import contextlib
import gc
import types
import weakref
from pathlib import Path

import msgspec
import pytest
import torch

from fa_verify import loader, ttir
from fa_verify.bench import contestants, table, timing, turns
from fa_verify.bench import running as bench
from fa_verify.bench.points import Point, Roof, Timed, decodes, grid, spread_out
from fa_verify.bench.timing import Stopwatch
from fa_verify.errors import InvalidInputError, UnsupportedProblemError

ROOT = Path(__file__).parents[2]
OPTIONS = {
    "directions": ["forward"], "dtypes": ["float16"], "head_dims": [64], "causal": [False],
    "seqlens": [128], "tokens": 128, "batches": [1], "keys": [128], "peers": [], "rounds": 3,
    "milliseconds": 1.0, "budget": None, "workers": None,
}  # fmt: skip


def point(**fields: object) -> Point:
    defaults = {
        "direction": "forward", "dtype": "float16", "head_dim": 64, "causal": False,
        "seqlen": 64, "batch": 2, "heads": 3,
    }  # fmt: skip
    return Point(**{**defaults, **fields})


def test_operations_are_counted_as_in_the_papers() -> None:
    assert point().flops == 4 * 2 * 3 * 64 * 64 * 64
    assert point(causal=True).flops == point().flops / 2
    assert point(direction="backward").flops == 2.5 * point().flops


def test_the_grid_keeps_tokens_and_width() -> None:
    points = list(
        grid(["forward"], ["float16"], [80, 256], causal=[True], seqlens=[512, 16384], tokens=16384)
    )
    assert [(p.head_dim, p.heads, p.seqlen, p.batch) for p in points] == [
        (80, 25, 512, 32), (256, 8, 512, 32), (80, 25, 16384, 1), (256, 8, 16384, 1),
    ]  # fmt: skip
    assert points[0].problem.mask.causal


def test_every_beginning_of_what_is_spread_out_covers_all() -> None:
    assert spread_out(range(8)) == [0, 4, 2, 6, 1, 5, 3, 7]
    assert spread_out([512, 1024, 2048, 4096, 8192, 16384]) == [512, 8192, 2048, 1024, 16384, 4096]
    assert all(sorted(spread_out(range(n))) == list(range(n)) for n in range(20))


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize("causal", [False, True])
def test_kernels_and_peers_compute_the_same(
    direction: str, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is timed is the problem of the point: the results agree with PyTorch's."""
    flash = next(
        k for k in loader.load(str(ROOT / "kernels/flash_attention.py")) if k.name == "flash"
    )
    one = point(direction=direction, causal=causal)
    given = contestants.inputs(one, "cpu", 0)
    # The named backends need a card; PyTorch's own choice stands in for them.
    monkeypatch.setattr(contestants, "sdpa_kernel", lambda _: torch.enable_grad())
    with ttir.execute(ttir.Options()):
        ours = contestants.kernel(flash).prepare(one, given)()
    theirs = contestants.peer("fa2").prepare(one, given)()
    assert len(ours) == len(theirs) == (1 if direction == "forward" else 3)
    assert turns._difference(ours, theirs) < 0.02
    assert turns._difference(ours, [x + 1 for x in theirs]) > 0.9


class Fake:
    """A stopwatch whose rounds are known; the second function it is made of does not run."""

    def __init__(self, median: float) -> None:
        self.median, self.spread, self.turns = median, 0.1, 0

    def turn(self) -> None:
        self.turns += 1


def test_a_contestant_that_refuses_is_told_and_the_others_are_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        msg = "no such head_dim"
        raise ValueError(msg)

    made: list[Fake] = []

    def of(_functions: object, _milliseconds: float) -> Fake:
        made.append(Fake(2.0 + len(made)))
        return made[-1]

    monkeypatch.setattr(Stopwatch, "of", of)
    cpu = contestants.inputs
    monkeypatch.setattr(contestants, "inputs", lambda p, _device, seed: cpu(p, "cpu", seed))
    running = [
        contestants.Contestant(name="a", peer=False, prepare=lambda _p, x: lambda: (x.q,)),
        contestants.Contestant(name="b", peer=False, prepare=refuse),
        contestants.Contestant(name="c", peer=True, prepare=lambda _p, x: lambda: (x.q + 1,)),
    ]
    at: list[str] = []
    row = turns.take(point(), running, rounds=3, milliseconds=1.0, at=at.append)
    assert at == ["a", "b", "c", *["a", "c"] * 3]
    assert [(t.name, t.milliseconds) for t in row] == [("a", 2.0), ("b", 0.0), ("c", 3.0)]
    assert row[1].error == "ValueError: no such head_dim"
    assert row[2].difference == pytest.approx(1, abs=1e-2)
    assert [fake.turns for fake in made] == [3, 3]


@pytest.mark.parametrize(("spread", "turns_taken"), [(0.001, 3), (0.2, 7)])
def test_a_point_ends_early_where_all_spreads_are_small(
    spread: float, turns_taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = Fake(1.0)
    fake.spread = spread
    monkeypatch.setattr(Stopwatch, "of", lambda *_: fake)
    cpu = contestants.inputs
    monkeypatch.setattr(contestants, "inputs", lambda p, _device, seed: cpu(p, "cpu", seed))
    one = contestants.Contestant(name="a", peer=False, prepare=lambda _p, x: lambda: (x.q,))
    turns.take(point(), [one], rounds=7, milliseconds=1.0, at=lambda _: None)
    assert fake.turns == turns_taken


def test_a_contestant_that_ends_the_context_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def illegal(*_: object) -> None:
        msg = "illegal memory access"
        raise RuntimeError(msg)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", illegal)
    cpu = contestants.inputs
    monkeypatch.setattr(contestants, "inputs", lambda p, _device, seed: cpu(p, "cpu", seed))
    broken = contestants.Contestant(name="b", peer=False, prepare=illegal)
    at: list[str] = []
    with pytest.raises(turns.DeviceLostError, match="illegal memory access"):
        turns.take(point(), [broken], rounds=1, milliseconds=1.0, at=at.append)
    assert at == ["b"]


def test_what_a_captured_launch_reads_stays_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph of a backward pass is replayed after other contestants' graphs were captured."""
    stream = types.SimpleNamespace(synchronize=lambda: None)
    graph = types.SimpleNamespace(replay=lambda: None)
    monkeypatch.setattr(timing, "_elapsed", lambda function: function() or 1.0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: contextlib.nullcontext())

    def prepared(saved: torch.Tensor) -> list[object]:
        return [lambda: saved.add_(1) and None]

    saved = torch.zeros(1)
    watch, alive = Stopwatch.of(prepared(saved), 1.0), weakref.ref(saved)
    del saved
    gc.collect()
    assert alive() is not None
    watch.turn()
    del watch
    gc.collect()
    assert alive() is None


def test_the_report_shows_rates_ratios_and_the_share_of_the_peak() -> None:
    one = point(seqlen=4096, batch=4, heads=16, head_dim=128)
    roof = Roof(device="card", torch="2", triton="3", tflops={"float16": 800.0})
    timed = [
        Timed(point=one, name="flash", peer=False, milliseconds=one.flops / 600e9),
        Timed(point=one, name="fa2", peer=True, milliseconds=one.flops / 400e9),
        Timed(point=one, name="cudnn", peer=True, error="RuntimeError: none"),
    ]
    text = table.markdown(roof, timed)
    assert "| N | flash | fa2 | cudnn | flash of peak | flash / fa2 | flash / cudnn |" in text
    assert "| 4096 | 600 | 400 | - | 0.75 | 1.50 | - |" in text
    assert "* cudnn: RuntimeError: none" in text
    assert table.line(timed) == "forward fp16 D 128 full N   4096  flash 600  fa2 400  cudnn -"


def test_files_are_written_and_read_back(tmp_path: Path) -> None:
    roof = Roof(device="card", torch="2", triton="3", tflops={"float16": 800.0})
    timed = [Timed(point=point(), name="flash", peer=False, milliseconds=1.0)]
    bench._write(tmp_path / "new", roof, timed)
    decoder = msgspec.json.Decoder(Roof | Timed)
    lines = (tmp_path / "new/bench.jsonl").read_bytes().splitlines()
    assert [decoder.decode(line) for line in lines] == [roof, *timed]


@pytest.mark.parametrize("name", ["bench", "decode", "earlier-backward"])
def test_the_committed_tables_are_those_of_the_committed_lines(name: str) -> None:
    folder = ROOT / "reports/bench-h200"
    decoder = msgspec.json.Decoder(Roof | Timed)
    lines = (folder / f"{name}.jsonl").read_bytes().splitlines()
    roof, *timed = (decoder.decode(line) for line in lines)
    assert table.markdown(roof, timed) == (folder / f"{name}.md").read_text()


def test_points_without_a_compiled_flex_say_so_and_the_budget_is_shared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    limits: list[float | None] = []

    class Child:
        roof = Roof(device="card", torch="2", triton="3", tflops={"float16": 800.0})

        def __init__(self, _order: object, names: dict[str, bool]) -> None:
            self.names = names

        def row(self, one: Point, left_out: dict[str, str] | None = None) -> list[Timed]:
            why = left_out or {}
            return [
                Timed(
                    point=one,
                    name=n,
                    peer=p,
                    milliseconds=float(n not in why),
                    error=why.get(n, ""),
                )
                for n, p in self.names.items()
            ]

        def close(self) -> None:
            pass

    def compiled(_targets: object, _peers: object, points: list[Point], *rest: object) -> object:
        limits.append(rest[1])  # type: ignore[arg-type]
        return [], frozenset(p for p in points if p.seqlen == 256)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench, "Child", Child)
    monkeypatch.setattr(bench.beforehand, "compile_all", compiled)
    options = {**OPTIONS, "seqlens": [128, 256], "peers": ["flex"], "workers": 2, "budget": 60.0}
    target = str(ROOT / "kernels/flash_attention.py:flash")
    assert bench.bench([target], tmp_path, **options) == 0
    text = (tmp_path / "bench.md").read_text()
    assert limits == [30.0]
    assert [
        line.split("|")[3].strip() != "-"
        for line in text.splitlines()
        if line[:3] in ("| 1", "| 2")
    ] == [True, False]
    assert "* flex: unavailable: not compiled" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_without_a_card_it_says_what_is_needed(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="CUDA device"):
        bench.bench(["kernels"], tmp_path, **OPTIONS)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a card")
def test_on_a_card(tmp_path: Path) -> None:
    options = {**OPTIONS, "directions": ["forward", "backward"], "peers": ["fa2"]}
    assert bench.bench([str(ROOT / "kernels/flash_attention.py")], tmp_path, **options) == 0
    assert "flash / fa2" in (tmp_path / "bench.md").read_text()


def test_decoding_is_timed_on_one_query_and_grouped_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    (one,) = decodes(["float16"], [64], [2], [96])
    assert one.bytes_read == 2 * 64 * (2 * 32 + 2 * 2 * 4 * 96)
    (decode,) = loader.load(str(ROOT / "kernels/cached_attention.py:decode"))
    given = contestants.inputs(one, "cpu", 0)
    monkeypatch.setattr(contestants, "sdpa_kernel", lambda _: torch.enable_grad())
    with ttir.execute(ttir.Options()):
        (ours,) = contestants.kernel(decode).prepare(one, given)()
    assert ours.shape == (2, 32, 1, 64)
    for name in ("cudnn", "efficient"):  # grouped heads, and expanded ones
        theirs = contestants.peer(name).prepare(one, given)()
        assert turns._difference([ours], theirs) < 0.002


def test_a_kernel_is_not_timed_on_what_it_does_not_take() -> None:
    (decode,) = loader.load(str(ROOT / "kernels/cached_attention.py:decode"))
    one = point(seqlen=64)
    with pytest.raises(UnsupportedProblemError, match="seqlen_q=64"):
        contestants.kernel(decode).prepare(one, contestants.inputs(one, "cpu", 0))


def test_the_report_shows_decoding_against_bandwidth_and_the_fastest_peer() -> None:
    (one,) = decodes(["bfloat16"], [128], [4], [8192])
    roof = Roof(device="card", torch="2", triton="3", tflops={"bfloat16": 800.0}, terabytes=4.0)
    timed = [
        Timed(point=one, name="decode", peer=False, milliseconds=one.bytes_read / 3e9),
        Timed(point=one, name="fa2", peer=True, milliseconds=one.bytes_read / 1e9),
        Timed(point=one, name="cudnn", peer=True, milliseconds=one.bytes_read / 2e9),
        Timed(point=one, name="math", peer=True, error="RuntimeError: none"),
    ]
    text = table.markdown(roof, timed)
    assert "reading 4.00 TB/s." in text
    assert "## decode bf16 D 128" in text
    assert "| decode of bandwidth | fastest peer | decode / fastest |" in text
    row = "| 4 | 8192 | 22.4 | 67.1 | 33.6 | - | 0.75 | cudnn | 1.50 |"
    assert row in text
    assert (
        table.line(timed)
        == "decode bf16 D 128 B   4 N   8192  decode 22.4  fa2 67.1  cudnn 33.6  math -"
    )
