"""Every public name of the language is tested here, or is no operation."""

import ast
import importlib.util
from pathlib import Path

import pytest
import triton.language as tl

HERE = Path(__file__).parent
TYPE, VALUE = "an element type: rows are tested with it", "a Python-side value"
NOT_OPERATIONS = {
    **dict.fromkeys(
        ["int1", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
         "float16", "bfloat16", "float32", "float64", "float8e4nv", "float8e5", "float8e4b15",
         "pi32_t", "void"], TYPE,
    ),
    **dict.fromkeys(["float8e4b8", "float8e5b16"], "an element type of AMD's; not on sm_90"),
    **dict.fromkeys(["block_type", "pointer_type", "const", "dtype", "constexpr_type"], "a type"),
    **dict.fromkeys(["tensor", "tuple", "slice", "tensor_descriptor", "constexpr"],
                    "the class of what other operations return"),
    **dict.fromkeys(["extra", "math", "target_info"], "a module"),
    "PropagateNan": "an enumeration",
    "TRITON_MAX_TENSOR_NUMEL": VALUE,
}  # fmt: skip


def _trees():
    return [ast.parse(path.read_text(encoding="utf-8")) for path in sorted(HERE.glob("test_*.py"))]


def _kernels():
    """Names used as tl.NAME (or as a method x.NAME) in the kernels of this folder."""
    for tree in _trees():
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef) and function.decorator_list:
                if ast.unparse(function.decorator_list[0]) != "triton.jit":
                    continue
                for node in ast.walk(function):
                    if isinstance(node, ast.Attribute):
                        yield node.attr


def _rows():
    spec = importlib.util.spec_from_file_location("rows", HERE / "test_rows.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.ROWS


ROWS = _rows()
TESTED = {row.name for row in ROWS} | set(_kernels())


@pytest.mark.parametrize("name", sorted(tl.__all__))
def test_every_name_is_tested_or_is_no_operation(name):
    assert name in TESTED or name in NOT_OPERATIONS


def test_a_row_tests_what_it_names():
    for row in ROWS:
        assert not row.name or f"tl.{row.name}(" in row.expression, row


def test_a_new_name_would_be_noticed():
    assert "an_operation_of_triton_4" not in TESTED | set(NOT_OPERATIONS)
