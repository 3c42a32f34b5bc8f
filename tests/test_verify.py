import re
import shutil

import pytest

from fa_verify import loader
from fa_verify.backends.base import Execution, Setup
from fa_verify.backends.cpu import CpuBackend
from fa_verify.case import Case
from fa_verify.errors import InvalidInputError, UnsupportedProblemError
from fa_verify.kernel import Kernel
from fa_verify.verify import verify

CASE = Case.parse("pass=fwd s=3x5 d=8 dtype=float16 seed=1")
SETUP = Setup()


def kernel(forward, **fields):
    return Kernel(name="k", forward=forward, target="k.py:k", source_hash="0", **fields)


def raising(error):
    def forward(problem, q, k, v):
        raise error

    return kernel(forward)


def right():
    (found,) = loader.load("tests/targets/plain.py:right")
    return found


def test_a_right_kernel_passes_with_statistics_of_every_tensor():
    record = verify(Case.parse(f"{CASE}".replace("fwd", "bwd")), right(), SETUP, CpuBackend())
    assert record.verdict == "pass", record
    assert set(record.tensors) == {"o", "lse", "dq", "dk", "dv"}
    assert record.replay.startswith("fa-verify replay tests/targets/plain.py:right 'pass=bwd")


@pytest.mark.parametrize("sizes", ["0x0", "0x4", "4x0"])
def test_a_right_kernel_passes_where_nothing_is_to_be_computed(sizes):
    case = Case.parse(f"pass=bwd s={sizes} d=8 dtype=float16 seed=1")
    assert verify(case, right(), SETUP, CpuBackend()).verdict == "pass"


@pytest.mark.parametrize(
    "error", [ValueError("no"), NotImplementedError("no"), UnsupportedProblemError("no")]
)
def test_an_undeclared_function_that_refuses_clearly_is_unsupported(error):
    record = verify(CASE, raising(error), SETUP, CpuBackend())
    assert record.verdict == "unsupported"
    assert "no" in record.reason


def test_a_bare_assert_says_its_source():
    (bare,) = loader.load("tests/targets/wrong.py:asserts")  # a file that pytest does not rewrite
    record = verify(CASE, bare, SETUP, CpuBackend())
    assert record.verdict == "unsupported"
    assert "assert q.shape[-1] == 64" in record.reason


@pytest.mark.parametrize("error", [IndexError("x"), ZeroDivisionError("x"), KeyError("x")])
def test_an_undeclared_function_that_breaks_fails(error):
    assert verify(CASE, raising(error), SETUP, CpuBackend()).verdict == "fail"


def test_a_declared_capability_that_raises_fails_whatever_it_raises():
    (declared,) = loader.load("tests/targets/wrong.py:raises")
    assert verify(CASE, declared, SETUP, CpuBackend()).verdict == "fail"


def test_what_is_not_declared_is_unsupported_and_not_run():
    (declared,) = loader.load("tests/targets/wrong.py:hangs")  # it declares no backward
    case = Case.parse(f"{CASE}".replace("fwd", "bwd"))
    record = verify(case, declared, SETUP, CpuBackend())
    assert (record.verdict, record.reason) == ("unsupported", "not declared: backward")


class Broken:
    device = "cpu"

    def run(self, *_, **__):
        return Execution(outputs=None)  # nothing computed, nothing said


def test_a_trial_that_computed_nothing_never_passes():
    assert verify(CASE, right(), SETUP, Broken()).verdict == "error"


def test_a_fault_of_the_harness_is_an_error_with_its_traceback():
    class Dying(Broken):
        def run(self, *_, **__):
            raise OSError("disk")

    record = verify(CASE, right(), SETUP, Dying())
    assert record.verdict == "error"
    assert "OSError: disk" in record.reason


@pytest.mark.parametrize(
    "text", ["config=x", "schedule=sideways", "schedule=shuffled", "backend=tpu", "colour=red"]
)
def test_a_bad_setup_says_what_is_wrong(text):
    with pytest.raises(InvalidInputError, match="="):
        Setup.parse(text)


def test_what_may_be_a_fault_is_recorded_and_fails_nothing():
    (found,) = loader.load("tests/targets/reads_back.py")
    case = Case.parse("pass=fwd s=1x5 d=16 dtype=float32 qk.values=zeros seed=1")
    record = verify(case, found, SETUP, CpuBackend())
    assert record.verdict == "pass", record
    (line,) = record.possible
    assert line.startswith("read-back at ")
    assert line.endswith("tests/targets/reads_back.py:15 in _transposing_kernel: back = tl.load("
                         "room + tl.arange(0, block)[None, :] * columns + tl.arange(0, columns)"
                         "[:, None])")  # fmt: skip


def test_paths_below_the_working_folder_are_relative(tmp_path, monkeypatch):
    shutil.copytree("kernels", tmp_path / "kernels")
    text = (tmp_path / "kernels" / "tiles.py").read_text()
    unmasked = re.sub(r", mask=[^,)]+(, other=0\.0)?", "", text)
    assert unmasked != text
    (tmp_path / "kernels" / "tiles.py").write_text(unmasked)
    monkeypatch.chdir(tmp_path)
    (wrong,) = loader.load("kernels/flash_attention.py:flash")
    case = Case.parse("pass=fwd s=3x5 d=16 dtype=float16 seed=1")
    record = verify(case, wrong, SETUP, CpuBackend(), explain=True)
    assert record.verdict == "fail"
    assert any(failure.location.startswith("kernels/") for failure in record.failures)
    assert "kernels/forward.py" in record.ran
    assert str(tmp_path) not in repr(record)
