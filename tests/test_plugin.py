import resource
import subprocess
import sys


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
        *("--fa-report", str(tmp_path), "--fa-examples", str(tmp_path / "kept")),
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "12 passed" in result.stdout  # three dtypes, two passes, two shards
    assert (tmp_path / "report.html").exists()
    assert len(list(tmp_path.glob("*.jsonl"))) == 2


def test_the_suite_fails_a_wrong_kernel_and_shows_the_smallest_case(tmp_path):
    result = pytest_run(
        *("--kernel", "tests/targets/wrong.py:wrong", "--fa-cases", "60"),
        *("--fa-report", str(tmp_path), "--fa-examples", str(tmp_path / "kept")),
    )
    assert result.returncode == 1, result.stdout + result.stderr
    assert "smallest case: pass=fwd s=3x" in result.stdout
    assert "fa-verify replay tests/targets/wrong.py:wrong" in result.stdout


def test_a_bad_target_is_misuse(tmp_path):
    result = pytest_run(
        "--kernel",
        "none.py:f",
        "--fa-report",
        str(tmp_path),
        "--fa-examples",
        str(tmp_path / "kept"),
    )
    assert result.returncode == 4, result.stdout + result.stderr
    assert "no such file" in result.stdout + result.stderr


def test_the_plugin_costs_others_under_50_ms(tmp_path):
    # A whole run of an empty project with the plugin and without it, in turns, best of five; CPU
    # seconds, which a busy machine stretches by a tenth (0.053 was seen once beside other work,
    # 0.035 alone): then best of twenty.
    def cost(*options):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        pytest_run("--collect-only", *options, cwd=tmp_path)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    pairs = []
    for turns in (5, 15):
        pairs += [(cost(), cost("-p", "no:fa_verify")) for _ in range(turns)]
        least = min(with_it for with_it, _ in pairs) - min(without for _, without in pairs)
        if least < 0.05:
            break
    assert least < 0.05


def test_the_plugin_loads_nothing_heavy():
    heavy = "{'numpy', 'torch', 'triton', 'hypothesis', 'rich'}"
    code = f"import sys, fa_verify.plugin; print({heavy} & set(sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "set()"


def test_a_kernel_that_fails_once_only_is_found_not_deterministic(tmp_path):
    result = pytest_run(
        *("--kernel", "tests/targets/wrong.py:flaky", "--fa-cases", "60"),
        *("--fa-report", str(tmp_path), "--fa-examples", str(tmp_path / "kept")),
    )
    assert result.returncode == 1, result.stdout + result.stderr
    assert "not deterministic" in result.stdout
    assert "smallest case: pass=fwd" in result.stdout


def test_a_file_without_kernels_is_misuse_not_a_green_run(tmp_path):
    (tmp_path / "empty.py").write_text("")
    result = pytest_run(
        "--kernel",
        str(tmp_path / "empty.py"),
        "--fa-report",
        str(tmp_path),
        "--fa-examples",
        str(tmp_path / "kept"),
    )
    assert result.returncode == 4, result.stdout + result.stderr
    assert "no Kernel found" in result.stdout + result.stderr
