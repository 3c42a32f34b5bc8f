import sys

import pytest
import torch

from fa_verify import Problem, functions, loader
from fa_verify.errors import InvalidInputError, KernelLoadError, UnsupportedProblemError

PLAIN = "tests/targets/plain.py"


def test_a_file_yields_its_kernels_with_target_and_hash():
    (kernel,) = loader.load(PLAIN)
    assert kernel.name == "right"
    assert kernel.target == f"{PLAIN}:right"
    assert len(kernel.source_hash) == 12


def test_a_folder_yields_the_kernels_of_all_files():
    names = {kernel.name for kernel in loader.load("tests/targets")}
    assert {"right", "wrong", "hangs"} <= names


def test_loading_a_folder_puts_nothing_on_the_path():
    before = list(sys.path)
    loader.load("kernels")
    assert sys.path == before
    assert "kernels" not in sys.modules


def test_the_kernels_folder_is_found():
    assert {kernel.name for kernel in loader.load("kernels")} >= {"flash", "flash_atomic"}


@pytest.mark.parametrize("name", ["sdpa", "flash_attn_func"])
def test_a_function_with_a_known_signature_is_a_kernel(name):
    (kernel,) = loader.load(f"{PLAIN}:{name}")
    assert kernel.layout == ("bshd" if name == "flash_attn_func" else "bhsd")
    assert kernel.capabilities is None


def test_torch_s_own_function_is_a_kernel():
    (kernel,) = loader.load("torch.nn.functional:scaled_dot_product_attention")
    assert kernel.target == "torch.nn.functional:scaled_dot_product_attention"


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("tests/targets/none.py", "no such file"),
        (f"{PLAIN}:nothing", "has no such name; it"),
        ("no_such_module:name", "No module named"),
        ("plain", "file.py:NAME"),
    ],
)
def test_a_bad_target_says_what_is_wrong(target, message):
    with pytest.raises((KernelLoadError, InvalidInputError), match=message):
        loader.load(target)


def test_an_import_that_raises_is_reported(tmp_path):
    path = tmp_path / "broken.py"
    path.write_text("raise RuntimeError('at import')")
    with pytest.raises(KernelLoadError, match="RuntimeError: at import"):
        loader.load(str(path))


def test_options_by_keyword_only_are_passed_so_and_make_no_flash_attn_of_a_function():
    asked = []

    def attention(q, k, v, *, causal=False, softmax_scale=None, dropout_p=0.0):
        asked.append((causal, softmax_scale))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=softmax_scale)

    kernel = functions.as_kernel(attention, "attention")
    assert kernel.layout == "bhsd"
    problem = Problem(seqlen_q=3, seqlen_k=3, head_dim=4, head_dim_v=4, softmax_scale=0.5)
    q = torch.ones(problem.shape_q)
    assert kernel.forward(problem, q, q, q).o.shape == problem.shape_o
    assert asked == [(False, 0.5)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import sys\n\nsys.exit(3)\n", r"SystemExit: 3 \(.*mine.py:3\)$"),
        ("x = 1\nx.y\n", r"AttributeError: .*\(.*mine.py:2\)$"),
        (
            "from fa_verify import Capabilities\n\nCapabilities(dtypes=('fp16',))\n",
            r"'fp16' is none of float16.*\(.*mine.py:3\)$",
        ),
        ("import nothing_so_called\n", r"No module named.*mine.py:1\)$"),
        ("def f(:\n", r"SyntaxError: invalid syntax \(mine.py, line 1\)$"),
    ],
)
def test_what_an_import_raised_is_told_with_its_line(tmp_path, text, said):
    file = tmp_path / "mine.py"
    file.write_text(text)
    with pytest.raises(KernelLoadError, match=said):
        loader.load(str(file))


def test_a_function_without_q_k_v_is_refused():
    with pytest.raises(InvalidInputError, match="needs parameters q, k, v"):
        functions.as_kernel(lambda a, b: None, "f")


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda q, k, v, bias: q, r"not handed bias; give it a default, .*Capabilities\(bias="),
        (lambda q, k, v, alibi_slopes, causal: q, r"alibi_slopes.*Capabilities\(alibi=True\)"),
        (
            lambda q, k, v, cu_seqlens_q, cu_seqlens_k, sinks: q,
            r"give them defaults.*Capabilities\(documents=True, sinks=True\)",
        ),
        (lambda q, k, v, out, block: q, r"not handed out, block; .*Capabilities\(\.\.\.\)"),
    ],
)
def test_a_function_that_needs_more_is_told_to_be_wrapped(function, said):
    with pytest.raises(InvalidInputError, match=rf"{said}.*README.md") as error:
        functions.as_kernel(function, "f")
    assert "Kernel(name=" in str(error.value)
    assert not functions.looks_like_attention(function)


def test_what_has_a_default_or_is_known_needs_no_wrapping():
    def attention(q, k, v, dropout_p, causal, sm_scale, bias=None, *more, **others):
        assert (dropout_p, bias, more, others) == (0.0, None, (), {})
        return q

    problem = Problem(seqlen_q=4, seqlen_k=4, head_dim=8, head_dim_v=8)
    tensors = (torch.zeros(1, 1, 4, 8),) * 3
    assert functions.looks_like_attention(attention)
    assert functions.as_kernel(attention, "attention").forward(problem, *tensors).o is tensors[0]


def test_a_term_that_a_replay_line_asks_a_function_for_is_unsupported():
    kernel = functions.as_kernel(lambda q, k, v: q, "f")
    problem = Problem(seqlen_q=4, seqlen_k=4, head_dim=8, head_dim_v=8, alibi=True)
    tensors = (torch.zeros(1, 1, 4, 8),) * 3
    with pytest.raises(UnsupportedProblemError, match=r"^alibi_slopes: .*Capabilities\(alibi=True"):
        kernel.forward(problem, *tensors, alibi_slopes=torch.zeros(1))


def test_functions_that_would_be_taken_by_name_are_found(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "import triton\n"
        "def attend(q, k, v, causal=False): ...\n"
        "def _private(q, k, v): ...\n"
        "def other(a, b): ...\n"
        "class Attend:\n    def __init__(self, q, k, v): ...\n"
        "@triton.jit\ndef kernel(q, k, v): pass\n"
    )
    assert loader.candidates(str(path)) == (f"{path}:attend",)
    assert loader.candidates(str(tmp_path)) == (f"{path}:attend",)
