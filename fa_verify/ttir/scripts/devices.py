"""Which tensors a program believes to be on the GPU, while all of them are on the CPU.

`Devices` keeps that belief for each storage, so views share it. Two modes of torch maintain it:
`Redirection` turns requests for cuda into requests for the CPU and answers `is_cuda` and `device`
by belief; `Inheritance` lets results of operations on such tensors be believed to be there too,
gradients included. C++ sees CPU tensors throughout.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils import _device as default_device
from torch.utils._python_dispatch import TorchDispatchMode

from fa_verify.ttir.launch import session
from fa_verify.ttir.scripts.opmath import as_on_cuda

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

GPU = torch.device("cuda", 0)
_CPU = torch.device("cpu")
_composite = torch._C._dispatch_has_kernel_for_dispatch_key  # noqa: SLF001 - torch offers no other way
_FEWEST = 256  # storages before the first look for dead ones; the limit then follows the living


class Devices:
    """The storages believed to be on the GPU.

    Attributes:
        asked: Whether what a function of torch makes now was asked for there; None outside of them.
    """

    def __init__(self) -> None:
        """Believe nothing yet."""
        self.asked: bool | None = None
        # A weak reference keeps the key from being used again for another storage.
        self._there: dict[int, StorageWeakRef] = {}
        self._limit = _FEWEST

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is believed to be on the GPU."""
        return _key(tensor) in self._there

    def any(self, keys: set[int]) -> bool:
        """Whether one of these storages is believed to be there."""
        return not self._there.keys().isdisjoint(keys)

    def put(self, tensor: torch.Tensor, *, there: bool = True) -> None:
        """Believe from now on that the storage of `tensor` is (or is not) on the GPU."""
        key = _key(tensor)
        if not there:
            self._there.pop(key, None)
        elif key and key not in self._there and not tensor.is_meta:
            if len(self._there) >= self._limit:
                self._there = {k: ref for k, ref in self._there.items() if not ref.expired()}  # type: ignore[no-untyped-call]
                self._limit = max(_FEWEST, 2 * len(self._there))
            self._there[key] = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]

    def place(self, result: Any, arguments: Iterable[Any], *, there: bool) -> Any:
        """`result` on the device asked for: a copy where it is an argument on the other one."""
        if isinstance(result, list | tuple) and type(result) in (list, tuple):
            return type(result)(self.place(x, arguments, there=there) for x in result)
        if not isinstance(result, torch.Tensor) or self.holds(result) == there:
            return result
        if _key(result) in {_key(tensor) for tensor in _tensors(arguments)}:
            result = result.clone()
        self.put(result, there=there)
        return result


def is_composite(func: Any) -> bool:
    """Whether an operator is a function of others; in inference mode modes see it whole."""
    return _composite(func.name(), "CompositeImplicitAutograd")


def _key(tensor: torch.Tensor) -> int:
    """Identity of the storage of `tensor`; 0 where it has none."""
    if not torch._C._has_storage(tensor):  # noqa: SLF001 - torch offers no other way
        return 0
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


class Inheritance(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """New storages computed from tensors on the GPU are on the GPU.

    Attributes:
        kernels: Operators' qualified names to what somebody registered for CUDA.
    """

    supports_higher_order_operators = True

    def __init__(self, devices: Devices) -> None:
        """Maintain `devices`."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.devices = devices
        self.kernels: dict[str, Callable[..., Any]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """See `Allocations`."""
        return False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation on the CPU and pass the belief on."""
        del types
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():  # noqa: SLF001 - the truth, without detours
            device = kwargs.get("device")
            asked = device is not None and device.type == "cuda"
            if asked:
                kwargs = {**kwargs, "device": _CPU}
            if kwargs.get("pin_memory"):
                kwargs = {**kwargs, "pin_memory": False}
            known = {_key(x) for x in _tensors((*args, *kwargs.values()))}
            asked = asked or self.devices.any(known)
            kernel = self.kernels.get(func.name()) if asked and self.kernels else None
            if kernel is not None:
                result = kernel(*args, **kwargs)
            elif asked and torch.is_inference_mode_enabled() and is_composite(func):
                with self:  # outside of that mode it would have come in its parts
                    result = func.decompose(*args, **kwargs)
            else:
                result = as_on_cuda(func, args, kwargs) if asked else func(*args, **kwargs)
            if asked:
                for tensor in _tensors((result,)):
                    if _key(tensor) not in known:
                        self.devices.put(tensor)
            return result


class Redirection(TorchFunctionMode):
    """Tensors asked for on cuda are made on the CPU and answer as if they were on cuda."""

    def __init__(self, devices: Devices) -> None:
        """Maintain `devices`."""
        super().__init__()
        self.devices = devices

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Answer, or run a function with its device replaced."""
        del types
        kwargs = kwargs or {}
        answer = _ANSWERS.get(func)
        if answer is not None:
            return answer(self.devices, *args, **kwargs)
        if isinstance(func, torch._ops.OpOverload):  # noqa: SLF001
            return func(*args, **kwargs)  # from C++, which says where tensors really are
        if kwargs.get("pin_memory"):
            kwargs = {**kwargs, "pin_memory": False}
        device = kwargs.get("device")
        if device is not None:
            kwargs = {**kwargs, "device": real(device)}
        else:
            device = next((x for x in args if isinstance(x, torch.device)), None)
            if device is not None:
                args = tuple(real(x) if isinstance(x, torch.device) else x for x in args)
            elif default_device.CURRENT_DEVICE is not None and (
                func in default_device._device_constructors()  # noqa: SLF001
            ):
                device = default_device.CURRENT_DEVICE
                kwargs = {**kwargs, "device": real(device)}
        outside, self.devices.asked = self.devices.asked, device is not None and _there(device)
        try:
            result = func(*args, **kwargs)
        finally:
            self.devices.asked = outside
        if device is None:
            return result
        wanted = _device(device)
        if wanted.type not in ("cuda", "cpu"):
            return result
        return self.devices.place(result, (*args, *kwargs.values()), there=wanted.type == "cuda")


def real(device: Any) -> Any:
    """The device that stands for `device`: the CPU for any cuda device."""
    return _CPU if _device(device).type == "cuda" else device


def _there(device: Any) -> bool:
    return _device(device).type == "cuda"


def _device(device: Any) -> torch.device:
    return GPU if isinstance(device, int) else torch.device(device)


def _device_of(devices: Devices, tensor: torch.Tensor) -> torch.device:
    return GPU if devices.holds(tensor) else tensor.device


def _index_of(devices: Devices, tensor: torch.Tensor) -> int:
    return 0 if devices.holds(tensor) else tensor.get_device()


def _is_cpu(devices: Devices, tensor: torch.Tensor) -> bool:
    return tensor.is_cpu and not devices.holds(tensor)


def _to(devices: Devices, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Tensor.to in its three forms: (device, dtype), (dtype) and (other)."""
    first = args[0] if args else kwargs.get("device", kwargs.get("other"))
    there: bool | None = None
    if isinstance(first, torch.Tensor):
        there = devices.holds(first)
    elif isinstance(first, str | int | torch.device):
        wanted = _device(first)
        if wanted.type in ("cuda", "cpu"):
            there = wanted.type == "cuda"
        if args:
            args = (real(first), *args[1:])
        else:
            kwargs = {**kwargs, "device": real(first)}
    if there is not None and there != devices.holds(tensor) and not kwargs.get("non_blocking"):
        session.refuse_while_capturing()
    result = tensor.to(*args, **kwargs)
    return result if there is None else devices.place(result, (tensor,), there=there)


def _cuda(
    devices: Devices,
    tensor: torch.Tensor,
    device: Any = None,
    non_blocking: bool = False,  # noqa: FBT001, FBT002 - torch's signature
    memory_format: torch.memory_format = torch.preserve_format,
) -> Any:
    del device
    if not non_blocking and not devices.holds(tensor):
        session.refuse_while_capturing()
    return devices.place(tensor.cpu(memory_format=memory_format), (tensor,), there=True)


def _cpu(devices: Devices, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if devices.holds(tensor):
        session.refuse_while_capturing()
    return devices.place(tensor.cpu(*args, **kwargs), (tensor,), there=False)


def _type_as(devices: Devices, tensor: torch.Tensor, other: torch.Tensor) -> Any:
    return devices.place(tensor.type_as(other), (tensor,), there=devices.holds(other))


def _deepcopy(devices: Devices, tensor: torch.Tensor, memo: Any) -> torch.Tensor:
    result: torch.Tensor = tensor.__deepcopy__(memo)  # type: ignore[no-untyped-call]
    devices.put(result, there=devices.holds(tensor))
    return result


_T: Any = torch.Tensor
_ANSWERS: dict[Any, Callable[..., Any]] = {
    _T.device.__get__: _device_of,
    _T.is_cuda.__get__: Devices.holds,
    _T.is_cpu.__get__: _is_cpu,
    _T.get_device: _index_of,
    _T.to: _to,
    _T.cuda: _cuda,
    _T.cpu: _cpu,
    _T.type_as: _type_as,
    _T.__deepcopy__: _deepcopy,
    _T.pin_memory: lambda _, tensor, *__: tensor.clone(),
    _T.record_stream: lambda *_: None,
    torch.device: lambda _, *args, **kwargs: torch.device(*args, **kwargs),
}
