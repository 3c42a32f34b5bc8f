import subprocess
import sys
import time


def pytest_run(*arguments, cwd=None):
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=cwd,
    )


def test_the_suite_passes_a_right_kernel_and_merges_one_report(tmp_path):
    result = pytest_run(
        *("-n", "2", "--kernel", "tests/targets/plain.py:right", "--fa-cases", "12"),
        *("--fa-report", str(tmp_path)),
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "12 passed" in result.stdout  # three dtypes, two passes, two shards
    assert (tmp_path / "report.html").exists()
    assert len(list(tmp_path.glob("*.jsonl"))) == 2


def test_the_suite_fails_a_wrong_kernel_and_shows_the_smallest_case(tmp_path):
    result = pytest_run(
        *("--kernel", "tests/targets/wrong.py:wrong", "--fa-cases", "60"),
        *("--fa-report", str(tmp_path)),
    )
    assert result.returncode == 1, result.stdout + result.stderr
    assert "smallest case: pass=fwd s=3x" in result.stdout
    assert "fa-verify replay tests/targets/wrong.py:wrong" in result.stdout


def test_a_bad_target_is_misuse(tmp_path):
    result = pytest_run("--kernel", "none.py:f", "--fa-report", str(tmp_path))
    assert result.returncode == 4, result.stdout + result.stderr
    assert "no such file" in result.stdout + result.stderr


def test_the_plugin_costs_others_under_50_ms(tmp_path):
    # Importing the plugin is all that another project's run pays for: best of five, side by side
    # with an interpreter that imports pytest alone.
    def best(code):
        times = []
        for _ in range(5):
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", code], check=True)
            times.append(time.perf_counter() - start)
        return min(times)

    assert best("import pytest, fa_verify.plugin") - best("import pytest") < 0.05


def test_the_plugin_loads_nothing_heavy():
    code = "import sys, fa_verify.plugin; print({'numpy', 'torch', 'triton', 'hypothesis', 'rich'} & set(sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "set()"
