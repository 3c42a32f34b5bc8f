"""Passes whose launches are noted once and then made again: most of the host's time saved.

What a pass of some shapes, strides, dtypes, alignments and options does on the host is always the
same: it checks, chooses kernels, computes grids and arguments, and only the addresses differ. So
its second call is noted, as the torch operations (allocations, above all) and the launches of
compiled kernels that it makes; further ones make these again. What depends on data, or cannot be
noted, is done anew each time.
"""

import functools
import threading
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from .descriptors import descriptor
from .launches import Launches, prepared, watched
from .tuned import pinned

__all__ = ["Noted", "Replayed", "note"]

_FORMS = 512  # kept of a pass; then all are forgotten
_ALIGNMENT = 16  # the largest that Triton's specialisation and the kernels ask an address for
_CONSTANTS = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout,
              torch.memory_format)  # fmt: skip
_MET_ONCE, _UNNOTABLE = object(), object()
# By these names Python gets to the same operations in a third of the time.
_BINDINGS = {
    torch.ops.aten.empty.memory_format: torch.empty,
    torch.ops.aten.empty_like.default: torch.empty_like,
    torch.ops.aten.new_empty.default: torch.Tensor.new_empty,
    torch.ops.aten.new_empty_strided.default: torch.Tensor.new_empty_strided,
    torch.ops.aten.zeros.default: torch.zeros,
}
_ALLOCATING = {*_BINDINGS} - {torch.ops.aten.zeros.default}
_noting = threading.Lock()


class _UnnotableError(Exception):
    """Something that a note cannot hold."""


class Replayed:
    """A pass: ``function(*arguments)`` takes tensors, lists of them and hashable options.

    It must return a tuple of tensors, and what it does must depend on its arguments' form only:
    the options, and shape, strides, dtype, device and alignment of each tensor.
    """

    def __init__(self, function) -> None:
        self._function = function
        self._known = {}  # by form

    def __call__(self, *arguments):  # noqa: ANN002, ANN204
        """Do the pass, or make its launches again."""
        if pinned():  # fa_verify runs each configuration in turn
            return self._function(*arguments)
        tensors, form = _taken_apart(arguments)
        noted = self._known.get(form)
        if type(noted) is Noted:
            return noted(tensors)
        if noted is _MET_ONCE:
            result, noted = note(self._function, arguments)
            self._known[form] = noted or _UNNOTABLE
            return result
        result = self._function(*arguments)  # at first: compiled, and tuned
        if noted is None:
            if len(self._known) == _FORMS:
                self._known = {}
            self._known[form] = _MET_ONCE
        return result


def _taken_apart(arguments):
    """All tensors, and the form: what a pass may depend on."""
    tensors, form = [], []
    for argument in arguments:
        if argument is None:
            form.append(None)
        elif isinstance(argument, torch.Tensor):
            tensors.append(argument)
            form += (
                argument.shape, argument.stride(), argument.dtype, argument.device,
                argument.data_ptr() % _ALIGNMENT,
            )  # fmt: skip
        elif isinstance(argument, list):
            inner, inner_form = _taken_apart(argument)
            tensors += inner
            form.append(inner_form)
        else:
            form.append(argument)
    return tensors, tuple(form)


class Noted:
    """What a pass did, to be done again with other tensors of the same form.

    Args:
        steps: Functions of the list of all tensors so far; those of operations append to it.
        allocations: Those among them that only allocate.
        launches: The others, as `Launches`; None, if they are not all launches made ready.
        results: Places of what is returned.
    """

    def __init__(self, steps, allocations, launches, results) -> None:
        self._steps, self._results = steps, results
        self._allocations, self._launches = allocations, launches

    def __call__(self, tensors):  # noqa: ANN204
        """Return what the pass returns for this list of tensors, to which others are appended."""
        device = tensors[0].device
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                return self(tensors)
        apart = self._launches is None or watched()
        for step in self._steps if apart else self._allocations:
            step(tensors)
        if not apart:
            self._launches(tensors)
        return tuple([tensors[place] for place in self._results])


def note(function, arguments):
    """Do a pass; return its result, and it as `Noted`, or None if that cannot be."""
    if not _noting.acquire(blocking=False):  # another thread notes
        return function(*arguments), None
    try:
        tensors = []
        own = _views(arguments, tensors)
        notes = _Notes(tensors)
        with patch.object(JITFunction, "run", notes.launching(JITFunction.run)), notes:
            result = function(*own)
        return result, notes.noted(result)
    finally:
        _noting.release()


def _views(arguments, tensors):
    """The arguments, each tensor as a Python object of its own: q may be k."""
    own = []
    for argument in arguments:
        if isinstance(argument, torch.Tensor):
            own.append(argument.detach())
            tensors.append(own[-1])
        else:
            own.append(_views(argument, tensors) if isinstance(argument, list) else argument)
    return own


class _Notes(TorchDispatchMode):
    """Notes the torch operations of this thread, and launches."""

    def __init__(self, tensors) -> None:
        super().__init__()
        self._places, self._alive, self._count = {}, [], len(tensors)
        for place, tensor in enumerate(tensors):
            self._keep(tensor, place)
        self._thread = threading.get_ident()
        self._steps, self._launched, self._ready = [], [], []
        self._allocations = []
        self._failed = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Say that torch.compile needs no shield: making one loads a second's worth of modules."""
        return False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN204
        """Run and note an operation."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self._note(lambda: self._operation(func, args, kwargs, result))
        return result

    def launching(self, run):
        """`JITFunction.run`, noted."""

        def noting(kernel, *args, grid, warmup, **kwargs):  # noqa: ANN002, ANN003
            compiled = run(kernel, *args, grid=grid, warmup=warmup, **kwargs)
            if threading.get_ident() == self._thread:
                self._note(lambda: self._launch(kernel, compiled, grid, args, kwargs))
            return compiled

        return noting

    def noted(self, results):
        """What was noted; None if something could not be."""
        places = [self._places.get(id(result)) for result in results]
        if self._failed or None in places:
            return None
        together = None
        if self._ready and len(self._steps) == len(self._allocations) + len(self._ready):
            together = Launches(self._ready)
        return Noted(self._steps, self._allocations, together, places)

    def _note(self, take):
        try:
            step = take()
        except _UnnotableError:
            self._failed = True
            return
        if step is not None:
            self._steps.append(step)

    def _operation(self, func, args, kwargs, result):
        if not isinstance(result, torch.Tensor):  # a number: what follows depends on data
            raise _UnnotableError
        if func is torch.ops.aten.detach.default:  # what torch.empty returns: another name for it
            self._keep(result, _place(args[0], self._places))
            return None
        kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory" or value}
        args, kwargs = _Filled(args, self._places), _Filled(kwargs.values(), self._places, kwargs)
        self._keep(result, self._count)
        self._count += 1
        step = _appending(_BINDINGS.get(func, func), args, kwargs)
        if func in _ALLOCATING:
            self._allocations.append(step)
        return step

    def _keep(self, tensor, place):
        """Know a tensor by its id, which no other gets as long as it lives."""
        self._places.setdefault(id(tensor), place)
        self._alive.append(tensor)

    def _launch(self, kernel, compiled, grid, args, kwargs):
        if not isinstance(compiled, CompiledKernel):
            raise _UnnotableError
        named = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
        named |= {
            kernel.arg_names[path[0]]: value
            for path, value in compiled.src.constants.items()
            if len(path) == 1
        }
        grid = grid(named) if callable(grid) else grid
        grid = (*grid, 1, 1)[:3]
        values = [named[name] for name in kernel.arg_names]
        filled = _Filled(values, self._places)
        launch = id(compiled), grid, filled
        if launch in self._launched:  # the autotuner takes times
            raise _UnnotableError
        self._launched.append(launch)
        ready = prepared(compiled, grid, values, filled.places)
        run, alone = compiled[grid], ready and Launches([ready])
        if ready is not None:
            self._ready.append(ready)

        def step(tensors):
            if alone is None or watched():
                run(*filled.of(tensors))
            else:
                alone(tensors)

        return step


def _appending(func, args, kwargs):
    """A step: an operation of these `_Filled` arguments, whose result joins the tensors."""
    if not kwargs.constant or args.described or args.tensors[1:]:
        return lambda tensors: tensors.append(func(*args.of(tensors), **kwargs.by_name(tensors)))
    kwargs = kwargs.by_name(())
    if not args.tensors:
        make = functools.partial(func, *args.values, **kwargs)
        return lambda tensors: tensors.append(make())
    ((at, place),) = args.tensors
    if at:
        return lambda tensors: tensors.append(func(*args.of(tensors), **kwargs))
    rest = args.values[1:]
    return lambda tensors: tensors.append(func(tensors[place], *rest, **kwargs))


class _Filled:
    """Arguments in which tensors are to be filled in."""

    def __init__(self, values, places, names=()) -> None:
        self.names = tuple(names)
        self.values = [None if _holds_a_tensor(value) else _constant(value) for value in values]
        self.tensors = [
            (at, _place(value, places))
            for at, value in enumerate(values)
            if isinstance(value, torch.Tensor)
        ]
        self.described = [
            (at, _place(value.base, places), {**vars(value), "base": None})
            for at, value in enumerate(values)
            if isinstance(value, TensorDescriptor)
        ]

    @property
    def constant(self):
        """Whether there are none."""
        return not self.tensors and not self.described

    @property
    def places(self):
        """Where each tensor is, by the argument that it is or is described by."""
        return {at: place for at, place, *_ in (*self.tensors, *self.described)}

    def __eq__(self, other) -> bool:
        return vars(self) == vars(other)

    __hash__ = None

    def of(self, tensors):
        """The arguments with these tensors."""
        values = self.values.copy()
        for at, place in self.tensors:
            values[at] = tensors[place]
        for at, place, fields in self.described:
            values[at] = descriptor(tensors[place], fields)
        return values

    def by_name(self, tensors):
        """Likewise, by their names."""
        return dict(zip(self.names, self.of(tensors), strict=True))


def _holds_a_tensor(value):
    return isinstance(value, (torch.Tensor, TensorDescriptor))


def _place(tensor, places):
    if id(tensor) not in places:  # made before, or not by an operation
        raise _UnnotableError
    return places[id(tensor)]


def _constant(value):
    """A value that holds no tensor."""
    if isinstance(value, (tuple, list)):
        return type(value)(map(_constant, value))
    if not isinstance(value, _CONSTANTS):
        raise _UnnotableError
    return value
