import dataclasses

from fa_verify import Kernel
from fa_verify.campaign import smallest
from fa_verify.record import CaseRecord, FailureRecord

KERNEL = dataclasses.replace(Kernel(name="mine", forward=lambda *_: None), target="mine.py:mine")


def failing(seqlen, *titles):
    failures = tuple(FailureRecord(check="memory", title=title, message="") for title in titles)
    case = f"pass=fwd s={seqlen}x{seqlen} d=16 dtype=float16 seed=1"
    record = CaseRecord(
        kernel="mine",
        target=KERNEL.target,
        source_hash="",
        case=case,
        setup="",
        verdict="fail",
        failures=failures,
    )
    return KERNEL, record


def test_each_kind_of_fault_is_made_small_before_another_argument_of_one():
    through_q = failing(3, "out-of-bounds-read through q")
    through_both = failing(4, "out-of-bounds-read through q", "out-of-bounds-read through k")
    race = failing(9, "race through o", "out-of-bounds-read through q")
    failed = [race, through_both, through_q, failing(5, "out-of-bounds-read through q")]
    assert list(smallest.distinct(failed, 4)) == [through_q, race, through_both]
    assert list(smallest.distinct(failed, 2)) == [through_q, race]
