import shutil

import torch
import triton
import triton.language as tl

from fa_verify import Kernel, Outputs, loader
from fa_verify.backends.base import Setup
from fa_verify.backends.cpu import CpuBackend
from fa_verify.case import Case
from fa_verify.diagnosis.cause import sizes
from fa_verify.inputs import materialise
from fa_verify.ttir import FLOAT_MODELS

CASE = Case.parse("pass=bwd s=20x33 d=80 dtype=float16 mask=causal seed=3")


def run(kernel, case=CASE, **setup):
    inputs = materialise(case)
    return CpuBackend().run(kernel, case.problem, inputs, Setup(**setup), backward=case.backward)


def flash():
    (kernel,) = loader.load("kernels/flash_attention.py:flash")
    return kernel


def test_a_right_kernel_leaves_no_incident_and_writes_everything():
    execution = run(flash())
    assert (execution.error, execution.incidents, execution.unwritten) == ("", (), {})
    assert execution.grads.dq.shape == CASE.problem.shape_q


def test_every_configuration_is_pinned_alone():
    case = Case.parse(f"{CASE} cap=3.0")  # the general kernels', which have several
    configs = range(run(flash(), case).configs)
    texts = {run(flash(), case, config=index).config for index in configs}
    assert len(texts) > 1


def test_the_sizes_of_a_launch_are_told_whatever_they_are_called():
    @triton.jit
    def filled(o, columns: tl.constexpr, rows: tl.constexpr, causal: tl.constexpr):
        at = tl.arange(0, rows)[:, None] * columns + tl.arange(0, columns)[None, :]
        tl.store(o + at, tl.zeros([rows, columns], tl.float32).to(o.dtype.element_ty))

    def forward(problem, q, k, v):
        o = torch.empty(problem.shape_o, dtype=q.dtype)
        filled[(1,)](o, columns=problem.head_dim, rows=problem.seqlen_q, causal=True)
        return Outputs(o)

    case = Case.parse("pass=fwd s=32x8 d=16 dtype=float16 seed=0")
    text = run(Kernel(name="filled", forward=forward), case).config
    assert text == "filled(columns=16, rows=32)"
    assert sizes(text, keys=1) == [16, 32]


def test_schedules_give_a_deterministic_kernel_the_same_bits():
    first, second = run(flash()), run(flash(), schedule="shuffled:5")
    assert torch.equal(first.outputs.o, second.outputs.o)
    assert torch.equal(first.grads.dk, second.grads.dk)


def test_incidents_name_the_file_of_this_copy_of_a_kernel(tmp_path):
    # Triton's disk cache is keyed by the text of a source: the second copy finds the first one's.
    for name in ("first", "second"):
        folder = tmp_path / name
        shutil.copytree("kernels", folder)
        tiles = (folder / "tiles.py").read_text()
        assert tiles.count("mask=rows_inside & columns_inside, other=0.0") == 1
        (folder / "tiles.py").write_text(
            tiles.replace("mask=rows_inside & columns_inside, other=0.0", "mask=columns_inside")
        )
        (kernel,) = loader.load(f"{folder / 'flash_attention.py'}:flash")
        execution = run(kernel, Case.parse("pass=fwd s=20x33 d=72 dtype=float16 seed=3"))
        assert {incident.kind for incident in execution.incidents} >= {"out-of-bounds-read"}
        assert {incident.file for incident in execution.incidents} == {str(folder / "tiles.py")}


def test_a_configuration_that_does_not_fit_gives_way_to_the_next(tmp_path):
    shutil.copytree("kernels", tmp_path / "k")
    path = tmp_path / "k" / "forward.py"
    text = path.read_text()
    first = "    program = tl.program_id(0)\n"
    assert text.count(first) == 1
    path.write_text(text.replace(first, f"    tl.static_assert(BLOCK_M != 128)\n{first}"))
    (kernel,) = loader.load(f"{tmp_path / 'k' / 'flash_attention.py'}:flash")
    execution = run(
        kernel, Case.parse("pass=fwd s=20x33 d=64 dtype=float16 cap=3.0 seed=3"), config=0
    )
    assert execution.error == ""
    assert "BLOCK_M=64" in execution.config


def test_a_setup_names_its_float_model():
    case = Case.parse("pass=bwd s=20x33 d=64 dtype=float32 dot=ieee seed=3")
    found = {name: run(flash(), case, float_model=name).grads.dq for name in FLOAT_MODELS}
    for name, dq in found.items():
        torch.testing.assert_close(dq, found["hopper"])
        setup = Setup(float_model=name)
        assert Setup.parse(str(setup)) == setup
    assert torch.equal(found["tf32-rna"], found["hopper"])  # this case has no tf32 dot
    assert not torch.equal(found["exact"], found["hopper"])
    assert not torch.equal(found["hopper-bits"], found["exact"])


def test_a_tile_that_reads_rows_of_the_next_head_is_seen_in_both_passes(tmp_path):
    shutil.copytree("kernels", tmp_path / "k")
    path = tmp_path / "k" / "tiles.py"
    text = path.read_text()
    masked = (
        "    rows_inside = (first_row + tl.arange(0, ROWS) < seqlen)[:, None]\n    columns_inside"
    )
    assert text.count(masked) == 1
    path.write_text(text.replace(masked, masked.replace("< seqlen)", "< seqlen + 3)")))
    (kernel,) = loader.load(f"{tmp_path / 'k' / 'flash_attention.py'}:flash")
    case = Case.parse("pass=bwd b=2 h=4/2 s=20x33 d=40 dtype=float16 cap=3.0 seed=3")
    execution = run(kernel, case)
    strays = [i for i in execution.incidents if i.kind == "neighbour-read"]
    assert {i.kernel for i in strays} == {"forward_kernel", "dq_kernel", "dkdv_kernel"}
    assert all(i.source.startswith("return tl.load(pointers, mask=rows_inside") for i in strays)
    assert any("reads k[0, 1, " in i.detail and "writes o[0, 0, " in i.detail for i in strays)
    (right,) = loader.load("kernels/flash_attention.py:flash")
    assert run(right, case).incidents == ()


def test_a_launcher_written_for_a_gpu_only_meets_one():
    (kernel,) = loader.load("tests/targets/for_cuda.py")
    case = Case.parse("pass=fwd s=1x5 d=16 dtype=float32 qk.values=zeros seed=1")
    inputs = materialise(case)
    execution = CpuBackend().run(kernel, case.problem, inputs, Setup(), backward=False)
    assert execution.error == ""
    torch.testing.assert_close(execution.outputs.o, inputs.v.mean(2, keepdim=True))
    assert execution.outputs.o.device.type == "cpu"  # outside an execution nobody pretends


def test_a_compiler_s_complaint_is_told_in_one_line():
    def forward(problem, q, k, v):
        said = "at 19:18:\n    x = tl.gone(\n        ^\ngone was removed"
        raise ValueError(said)

    kernel = Kernel(name="old", forward=forward)
    execution = run(kernel, Case.parse("pass=fwd s=4x4 d=16 dtype=float16 seed=1"))
    assert execution.error.splitlines()[0] == "ValueError: at 19:18: gone was removed"
