"""Finds kernels: a folder, a file, ``file.py:name`` or ``module:name``.

Files are loaded by path under a private module name, so that a folder called ``kernels`` never
meets the package of that name and nothing is put on sys.path. On a machine without a GPU they are
imported under the CPU backend's driver, since kernel files ask for devices while they load.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib
import importlib.util
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch

from fa_verify import functions, ttir
from fa_verify.errors import InvalidInputError, KernelLoadError
from fa_verify.kernel import Kernel

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

__all__ = ["candidates", "load"]

_T = TypeVar("_T")


def load(target: str) -> tuple[Kernel, ...]:
    """The kernels that a target names, each with its `target` and `source_hash` filled in.

    A folder or file yields every `Kernel` value of its modules, in the order of their names. After
    a colon the name may also be that of a function with the signature of
    torch.nn.functional.scaled_dot_product_attention, of flash_attn_func, or (problem, q, k, v).

    Raises:
        InvalidInputError: The target has no such form.
        KernelLoadError: It does not exist, does not import, or holds no such name.
    """
    place, colon, name = target.rpartition(":")
    if not colon:
        place = target
    path = Path(place)
    if path.is_dir():
        if colon:
            msg = f"target={target!r}: NAME goes with a file or a module, not with a folder"
            raise InvalidInputError(msg)
        files = sorted(file for file in path.glob("*.py") if file.name != "__init__.py")
        found = [kernel for file in files for kernel in _kernels(_load_file(file), file)]
        return _unique(found)
    if path.suffix == ".py":
        if not path.is_file():
            msg = f"target={target!r}: no such file"
            raise KernelLoadError(msg)
        module = _load_file(path)
        return (_named(module, name, path, target),) if colon else _unique(_kernels(module, path))
    if not colon:
        what = "is no Python file" if path.exists() else "there is no such folder"
        msg = f"target={target!r}: {what}; give a folder, a .py file, file.py:NAME or module:NAME"
        raise InvalidInputError(msg)
    module = _guarded(lambda: importlib.import_module(place), target)
    return (_named(module, name, Path(module.__file__ or place), target),)


def candidates(target: str) -> tuple[str, ...]:
    """Targets of a folder's or file's plain functions that `load` would take by their names."""
    path = Path(target)
    files = sorted(path.glob("*.py")) if path.is_dir() else [path]
    return tuple(
        f"{_shown(file)}:{name}"
        for file in files
        for name, value in vars(_load_file(file)).items()
        if not name.startswith("_") and functions.looks_like_attention(value)
    )


def _load_file(path: Path) -> ModuleType:
    """Import one file; its folder becomes a private package when it has an ``__init__.py``."""
    path = path.resolve()
    private = "_fa_verify_" + hashlib.sha256(str(path.parent).encode()).hexdigest()[:12]
    init = path.parent / "__init__.py"
    if init.is_file():
        if private not in sys.modules:
            _import(private, init, package=path.parent)
        if path == init:
            return sys.modules[private]
    name = f"{private}.{path.stem}" if init.is_file() else f"{private}_{path.stem}"
    return sys.modules[name] if name in sys.modules else _import(name, path)


def _import(name: str, path: Path, package: Path | None = None) -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        name, path, submodule_search_locations=[str(package)] if package else None
    )
    if spec is None or spec.loader is None:
        msg = f"target={str(path)!r}: not a Python file"
        raise KernelLoadError(msg)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    loader = spec.loader
    try:
        _guarded(lambda: loader.exec_module(module), str(path))
    except KernelLoadError:
        del sys.modules[name]
        raise
    return module


def _guarded(action: Callable[[], _T], target: str) -> _T:
    """Run an import under the right driver; say what went wrong, and where."""
    try:
        with contextlib.ExitStack() as stack:
            if not torch.cuda.is_available():
                stack.enter_context(ttir.activated())
                stack.enter_context(ttir.redirected())
            return action()
    except (Exception, SystemExit) as error:
        msg = (
            f"target={target!r}: importing it raised {type(error).__name__}: {error}{_where(error)}"
        )
        raise KernelLoadError(msg) from error


def _where(error: BaseException) -> str:
    """The last line of the imported code, which called what raised."""
    own = Path(__file__).parent
    frames = [
        f"{frame.filename}:{frame.lineno}"
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<")
        and "importlib" not in frame.filename
        and not Path(frame.filename).is_relative_to(own)
    ]
    return f" ({frames[-1]})" if frames else ""


def _kernels(module: ModuleType, path: Path) -> list[Kernel]:
    """The `Kernel` values that a module binds at its top level."""
    return [
        _stamped(value, f"{_shown(path)}:{name}", path)
        for name, value in vars(module).items()
        if isinstance(value, Kernel)
    ]


def _named(module: ModuleType, name: str, path: Path, target: str) -> Kernel:
    value = getattr(module, name, None)
    if value is None:
        there = [one for one, value in vars(module).items() if isinstance(value, Kernel)]
        instead = f"; its kernels: {', '.join(there)}" if there else "; it has no Kernel"
        msg = f"target={target!r}: the module has no such name{instead}"
        raise KernelLoadError(msg)
    kernel = value if isinstance(value, Kernel) else functions.as_kernel(value, name)
    return _stamped(kernel, target, path)


def _stamped(kernel: Kernel, target: str, path: Path) -> Kernel:
    """Add where it came from, and the hash of all Python files that it may have come from."""
    files = sorted(path.parent.glob("*.py")) if (path.parent / "__init__.py").is_file() else [path]
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]
    return dataclasses.replace(kernel, target=target, source_hash=digest)


def _shown(path: Path) -> str:
    """The path as a person would type it: relative when it lies below the working folder."""
    path, here = path.resolve(), Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def _unique(kernels: list[Kernel]) -> tuple[Kernel, ...]:
    """Drop re-exports: the first target of each kernel stays."""
    seen: dict[tuple[str, object], Kernel] = {}
    for kernel in kernels:
        seen.setdefault((kernel.name, kernel.forward), kernel)
    return tuple(seen.values())
