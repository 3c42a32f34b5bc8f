import io
import re
import time
from html.parser import HTMLParser

import msgspec
import pytest
from rich.console import Console

from fa_verify.case import Case
from fa_verify.record import FailureRecord, TensorStats
from fa_verify.report import html, markdown
from fa_verify.report.summary import summarise
from fa_verify.report.table import show

CASE = Case.parse("pass=bwd s=128x128 d=64 dtype=float16 seed=1")
HOSTILE = (
    "<script>alert(1)</script> {{ 7 * 7 }} [red]x[/red] \x1b[31m | `a``` \u202e </title>\n# h @all"
)


def terminal(summary, **options) -> str:
    file = io.StringIO()
    show(Console(file=file, width=100, highlight=False, **options), summary)
    return file.getvalue()


def hostile(line) -> list:
    failure = FailureRecord(
        check="numerics",
        title=HOSTILE,
        message=HOSTILE,
        tensor=HOSTILE,
        diagnosis=HOSTILE,
        location=HOSTILE,
        source=HOSTILE,
    )
    shared = {"kernel": HOSTILE, "file": HOSTILE}
    return [
        line(
            CASE,
            verdict="fail",
            failures=(failure,),
            tensors={"o": TensorStats(elements=1)},
            **shared,
        ),
        line(CASE, verdict="unsupported", reason=HOSTILE, **shared),
    ]


class Page(HTMLParser):
    """Collects the tags and checks that they close."""

    void = ("meta", "br")

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.attributes = [], set(), []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += attrs
        if tag not in self.void:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def parsed(text) -> Page:
    page = Page()
    page.feed(text)
    page.close()
    assert not page.open
    return page


def test_terminal(run, snapshot):
    snapshot("terminal.txt", terminal(summarise(run(cases=400))))


def test_terminal_of_a_pass(run, snapshot):
    snapshot("terminal-pass.txt", terminal(summarise(run(cases=60, broken=False))))


def test_terminal_of_nothing(snapshot):
    snapshot("terminal-nothing.txt", terminal(summarise([])))


def test_markdown(run, snapshot):
    snapshot("report.md", markdown.render(summarise(run(cases=400))))


def test_html(run, snapshot):
    snapshot("report.html", html.render(summarise(run(cases=9))))


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
@pytest.mark.parametrize("format_", [terminal, markdown.render, html.render])
def test_a_report_of_the_cpu_says_what_it_cannot_show(run, format_, backend):
    first, *rest = run(cases=9)
    shown = format_(summarise([msgspec.structs.replace(first, backend=backend), *rest]))
    words = " ".join(shown.replace("\\", "").split())
    assert ("not seen are pipelining" in words) == (backend == "cpu")
    assert ("FMA contraction and layouts" in words) == (backend == "cpu")


def test_the_verdict_and_the_failing_line_end_the_log(run):
    *_, verdict, place = terminal(summarise(run())).splitlines()
    assert verdict.startswith("FAIL  1 of 3 kernels (flash_broken)")
    assert "kernels/flash_broken.py:61" in place


def on_a_terminal(summary, width):
    file = io.StringIO()
    show(Console(file=file, width=width, force_terminal=True, color_system=None), summary)
    return file.getvalue().split("FAIL flash_broken:")[0]


@pytest.mark.parametrize("width", [80, 100])
def test_the_table_fits_on_a_terminal(run, width):
    table = on_a_terminal(summarise(run()), width)
    assert max(len(line) for line in table.splitlines()) <= width
    assert "verdict" in table
    assert "…" not in table  # a digit left out is another number


def test_a_file_has_no_edge(run):
    table = terminal(summarise(run())).split("FAIL flash_broken:")[0]
    assert "…" not in table
    rows = [line for line in table.splitlines() if "float" in line]
    assert rows
    assert all(len(row.split()) >= len(summarise(run()).tensors) + 2 for row in rows)


def test_a_replay_line_is_never_wrapped(run):
    summary = summarise(run())
    shown = [line.strip() for line in terminal(summary).splitlines()]
    for fault in summary.faults:
        assert fault.replay in shown
        assert f"\n{fault.replay}\n" in markdown.render(summary)


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_without_unicode(run, encoding):
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    show(Console(file=file, width=100), summarise(run(cases=30)))
    file.flush()


def test_a_hostile_record_moves_no_cursor_and_styles_nothing(line):
    shown = terminal(summarise(hostile(line)), force_terminal=False)
    assert all(char.isprintable() or char == "\n" for char in shown)
    assert "[red]x[/red]" in shown


def test_a_hostile_record_adds_no_tag_to_the_page(line, run):
    page = parsed(html.render(summarise(hostile(line))))
    assert page.tags <= parsed(html.render(summarise(run()))).tags
    assert "script" not in page.tags


def test_a_hostile_record_adds_no_markup_to_the_comment(line):
    text = re.sub(r"(?ms)^(`{3,})\w*$.*?^\1$", "", markdown.render(summarise(hostile(line))))
    assert "<script" not in text
    assert "@all" not in text
    assert not re.search(r"(?m)^# h", text)
    rows = [row for row in text.splitlines() if row.startswith("|")]
    assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1


def test_the_page_asks_for_nothing_from_outside(run):
    text = html.render(summarise(run()))
    page = parsed(text)
    assert "script" not in page.tags
    assert "link" not in page.tags
    for name, value in page.attributes:
        assert name not in ("src", "srcset", "data", "action"), value
        assert name != "href" or value.startswith("#"), value
    assert "url(" not in text
    assert "default-src 'none'" in text


def test_every_worst_case_is_on_the_page(run):
    summary = summarise(run(cases=900))
    text = html.render(summary)
    for row in summary.rows:
        for tensor in row.tensors.values():
            assert tensor.ratio_case in text


@pytest.mark.parametrize("kernels", [("flash",), tuple(f"kernel_{n}" for n in range(14))])
def test_a_large_run_makes_a_small_page_quickly(run, kernels):
    summary = summarise(run(cases=20_000, kernels=kernels))
    begin = time.process_time()
    size = len(html.render(summary).encode())
    assert size < 2_000_000
    assert time.process_time() - begin < 10


@pytest.mark.parametrize("ratio", [0.0, 1e-30, 1.7976931348623157e308])
def test_extreme_ratios_can_be_drawn(line, ratio):
    stats = TensorStats(elements=1, ratio=ratio, ratio_prob=ratio, ulp=ratio)
    summary = summarise([line(CASE, tensors={"o": stats, "lse": stats})])
    parsed(html.render(summary))
    assert terminal(summary)
    assert "nan" not in html.render(summary)


def test_a_traceback_starts_with_its_error_and_keeps_its_lines(line, snapshot):
    trace = "Traceback (most recent call last):\n  File 'a.py', line 1\nZeroDivisionError: by zero"
    summary = summarise([line(CASE, verdict="error", reason=trace)])
    assert "ERROR        flash: ZeroDivisionError: by zero (1 case)" in terminal(summary)
    snapshot("terminal-error.txt", terminal(summary))
    snapshot("error.md", markdown.render(summary))
    parsed(html.render(summary))
