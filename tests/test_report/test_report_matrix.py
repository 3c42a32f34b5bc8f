"""The precision matrix counts what the records say, and nothing else."""

import math
import random
import statistics

import msgspec
import pytest

from fa_verify import cli
from fa_verify.case import Case
from fa_verify.errors import InvalidInputError
from fa_verify.record import CaseRecord, End, Start, TensorStats, Writer
from fa_verify.report import files, html
from fa_verify.report.matrix import Matrix, matrix
from fa_verify.report.matrix import markdown as page
from fa_verify.report.summary import summarise
from fa_verify.variants import EVERY, ORDER, variants

H200 = "NVIDIA H200"


def of(lines) -> Matrix:
    summary = summarise(lines)
    return matrix(summary.facts, summary.results)


def leaning(lines, seed=1):
    """The lines with a bias in each tensor's statistics."""
    rng = random.Random(seed)  # noqa: S311  # no secret
    for line in lines:
        if isinstance(line, CaseRecord):
            tensors = {
                name: msgspec.structs.replace(stats, bias=rng.gauss(0.01, 0.1))
                for name, stats in line.tensors.items()
            }
            yield msgspec.structs.replace(line, tensors=tensors)
        else:
            yield line


def on(device, lines):
    """The lines as if they came from another device."""
    for line in lines:
        there = {"device": device, "backend": "cuda"}
        yield msgspec.structs.replace(line, **there) if isinstance(line, Start) else line


def test_every_cell_holds_the_cases_of_its_kernel_variant_and_precision(run):
    lines = list(leaning(run(cases=600)))
    (place,) = of(lines).places
    cases = [line for line in lines if isinstance(line, CaseRecord)]
    seen = 0
    for kernel, rows in place.cells.items():
        for variant, cells in rows.items():
            for precision, cell in cells.items():
                mine = [
                    line
                    for line in cases
                    if line.kernel == kernel
                    and variant in (EVERY, *variants(case := Case.parse(line.case)))
                    and precision.split("/")[0] == case.problem.dtype
                    and precision.split("/")[1:] in ([], [case.problem.dot_precision])
                ]
                assert cell.cases == len(mine)
                assert cell.failed == sum(line.verdict == "fail" for line in mine)
                assert cell.refused == sum(line.verdict == "unsupported" for line in mine)
                assert cell.inconclusive == sum(line.verdict == "inconclusive" for line in mine)
                for name, errors in cell.tensors.items():
                    stats = [line.tensors[name] for line in mine if name in line.tensors]
                    assert errors.ratio == max(one.ratio for one in stats)
                    assert errors.ulp == max(one.ulp for one in stats)
                    assert errors.elements == sum(one.elements for one in stats)
                    leans = [one.bias for one in stats if one.elements]
                    if len(leans) > 1:
                        error = statistics.stdev(leans) / math.sqrt(len(leans))
                        assert errors.lean == pytest.approx(statistics.mean(leans))
                        assert errors.lean_error == pytest.approx(error, rel=1e-6)
                    half = statistics.median_low(one.ulp for one in stats)
                    assert half <= errors.typical_ulp <= 2 * half
                    seen += 1
    assert seen > 300
    assert place.total.cases == len(cases)


def test_what_half_of_the_cases_are_within_is_a_power_of_2(line):
    case = Case.parse("pass=fwd s=9x9 d=8 dtype=float16 seed=0")
    for ulps, within in (
        ([0.3], 0.3),
        ([0.3, 9.0], 0.5),
        ([0.5, 9.0], 0.5),
        ([0.51, 9.0], 1.0),
        ([1.0, 1.1, 700.0], 2.0),
        ([0.0, 0.0, 3.0], 0.0),
        ([1e-9], 0.0),
        ([1e30], 2.0**24),
    ):
        records = [line(case, tensors={"o": TensorStats(elements=1, ulp=ulp)}) for ulp in ulps]
        (place,) = of(records).places
        assert place.cells["flash"]["plain"]["float16"].tensors["o"].typical_ulp == within


def test_parts_of_a_run_add_up_to_the_whole(run):
    first, *lines = leaning(run(cases=500))
    whole = of([first, *lines])
    parts = [of([first, *lines[start::3]]) for start in range(3)]
    added = parts[2] + parts[0] + parts[1]
    assert added.total.cases == whole.total.cases == 500
    (mine,), (other,) = added.places, whole.places
    assert set(mine.cells) == set(other.cells)
    for kernel, rows in other.cells.items():
        for variant, cells in rows.items():
            for precision, cell in cells.items():
                again = mine.cells[kernel][variant][precision]
                assert again.failed == cell.failed
                for name, errors in cell.tensors.items():
                    assert again.tensors[name].ratio == errors.ratio
                    assert again.tensors[name].ulps == errors.ulps
                    assert again.tensors[name].lean == pytest.approx(errors.lean)


def written(path, lines):
    writer = Writer(path)
    for line in lines:
        writer.write(line)
    writer.close()
    return path


def test_devices_are_kept_apart_and_a_written_matrix_is_read_again(run, tmp_path):
    cpu = written(tmp_path / "cpu.jsonl", leaning(run(cases=90, broken=False)))
    card = written(tmp_path / "card.jsonl", on(H200, leaning(run(cases=120, broken=False, seed=2))))
    files.write_matrix(files.matrix_of([card]), tmp_path / "card")
    found = files.matrix_of([cpu, tmp_path / "card" / "matrix.json"])
    assert [(place.device, place.total.cases) for place in found.places] == [
        (H200, 120),
        ("the CPU backend", 90),
    ]
    straight = files.matrix_of([cpu, card])
    assert page.render(found) == page.render(straight)
    assert html.render_matrix(found) == html.render_matrix(straight)
    again = files.matrix_of([card, tmp_path / "card"])
    assert again.total.cases == 240  # of one device: added


def test_cells_without_a_case_and_variants_without_one_say_so(line):
    lines = [
        line(Case.parse("pass=fwd s=9x9 d=8 dtype=float16 mask=causal seed=0")),
        line(Case.parse("pass=fwd s=9x9 d=8 dtype=bfloat16 seed=0")),
    ]
    found = of(lines)
    text = page.render(found)
    assert "| flash | plain | no case | - (1) |" in text
    assert "| flash | causal | - (1) | no case |" in text
    (place,) = found.places
    assert set(place.without("flash")) == set(ORDER) - {"all", "plain", "causal"}
    assert "No case: window, mask with gaps, documents," in text
    assert "no case" in html.render_matrix(found)


def test_fp8_has_columns_with_those_who_take_it_alone(line):
    plain, small = "pass=fwd s=9x9 d=8 dtype=float16 seed=", "pass=fwd s=9x9 d=8 fp8=head seed="
    lines = [
        line(Case.parse(f"{plain}0"), kernel="flash"),
        line(Case.parse(f"{plain}1 mask=causal"), kernel="other"),
        line(Case.parse(f"{small}0 dtype=bfloat16"), kernel="small"),
        line(Case.parse(f"{plain}2"), kernel="every"),
        line(Case.parse(f"{small}2 dtype=bfloat16"), kernel="every"),
    ]
    found = of(lines)
    (place,) = found.places
    fp8 = "float8_e4m3fn/bfloat16"
    assert place.tables == (
        (("float16", fp8), ("every",)),
        (("float16",), ("flash", "other")),
        ((fp8,), ("small",)),
    )
    text, markup = page.render(found), html.render_matrix(found)
    assert f"| kernel | variant | {fp8} |" in text
    assert "| kernel | variant | float16 |  |" in text
    for columns in (["float16", fp8], ["float16"], [fp8]):
        heads = "".join(f"<th>{name}</th>" for name in columns)
        assert markup.count(f'<th class="left">variant</th>{heads}</tr>') == 1


def test_a_failure_is_seen_on_every_page(run):
    summary = summarise(run(cases=300))
    found = matrix(summary.facts, summary.results)
    failed = found.total.failed
    assert failed == sum(result.verdict == "fail" for result in summary.results) > 0
    for text in (page.render(found),):
        assert "FAILED**" in text
        assert "none failed" not in text
    for text in (html.render_matrix(found), html.render(summary)):
        assert " failed</small>" in text
    right = of(run(cases=300, broken=False))
    assert "FAILED" not in page.render(right)
    assert " failed</small>" not in html.render_matrix(right)


@pytest.mark.parametrize(
    ("broken", "verdicts", "code"),
    [(True, None, 1), (False, None, 0), (False, "error", 4), (False, "unsupported", 3)],
)
def test_the_command_writes_three_files_and_exits_as_check_does(
    run, tmp_path, capsys, broken, verdicts, code
):
    lines = run(cases=60, broken=broken)
    if verdicts:
        lines = [
            msgspec.structs.replace(line, verdict=verdicts)
            if isinstance(line, CaseRecord)
            else line
            for line in lines
        ]
    written(tmp_path / "run" / "20260102T030405-1.jsonl", lines)
    out = tmp_path / "out"
    with pytest.raises(SystemExit) as stop:
        cli.main(["matrix", str(tmp_path / "run"), "-o", str(out)])
    assert stop.value.code == code
    assert {path.name for path in out.iterdir()} == {"matrix.html", "matrix.md", "matrix.json"}
    assert "60 cases on the CPU backend" in capsys.readouterr().out


def test_what_is_no_matrix_is_refused(tmp_path):
    (tmp_path / "other.json").write_text('{"places": 3}')
    with pytest.raises(InvalidInputError, match="not a matrix of this version"):
        files.matrix_of([tmp_path / "other.json"])
    with pytest.raises(InvalidInputError, match="cannot be read"):
        files.matrix_of([tmp_path / "none.json"])
    nothing = of([End(seconds=1.0, cases=0, exit_code=0)])
    assert page.render(nothing).splitlines()[2] == "no case: none failed."


def test_hostile_names_make_no_mark(line):
    hostile = "<script>|`[x](y)` {{ 7 * 7 }}\n# h"
    lines = [
        line(
            Case.parse("pass=fwd s=9x9 d=8 dtype=float16 seed=0"),
            kernel=hostile,
            tensors={"o": TensorStats(elements=1, ratio=0.5)},
        )
    ]
    found = of(lines)
    assert "<script" not in html.render_matrix(found)
    assert "<script" not in page.render(found)
    assert "49" not in html.render_matrix(found).split("</style>")[1]
    assert not any(text.startswith("# h") for text in page.render(found).splitlines())
