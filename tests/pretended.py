"""Devices that are not there: tensors in the CPU's memory that say they are elsewhere, and act like it.

Tensors of two devices meet in no operation but a copy, and in the indexing of one device's by the CPU's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only

aten: Any = torch.ops.aten
COPIES = {aten.copy_.default, aten._to_copy.default}
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
FIRST, SECOND = (torch.device("lazy", n) for n in range(2))  # a type that torch starts up nothing for


class Elsewhere(torch.Tensor):
    """A tensor on a device that is not there."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor, device: torch.device) -> Elsewhere:
        made: Any = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=device,
            requires_grad=inner.requires_grad,
        )
        made.inner = inner
        return made

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def untyped_storage(self) -> Any:
        return self.inner.untyped_storage()

    def __getitem__(self, at: Any) -> Any:
        parts = at if isinstance(at, tuple) else (at,)
        return super().__getitem__(tuple(torch.tensor(x) if isinstance(x, list) else x for x in parts))

    def tolist(self) -> Any:
        return self.inner.tolist()

    def new_tensor(self, data: Any, dtype: torch.dtype | None = None) -> Tensor:
        return Elsewhere(self.inner.new_tensor(data, dtype=dtype), self.device)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Numbers(TorchFunctionMode):
    """`torch.tensor` copies to its device where no dispatch mode sees it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.tensor and torch.device(kwargs.get("device") or "cpu").type == FIRST.type:
            return torch.tensor(*args, **kwargs | {"device": "cpu"}).to(kwargs["device"])
        return func(*args, **kwargs)


@contextmanager
def pretending() -> Iterator[None]:
    """Lets tensors be made on these devices inside the block."""
    with _Operations(), _Numbers():
        yield


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    asked = kwargs.get("device")
    device = _device_of(func, args, kwargs) if asked is None else torch.device(asked)
    if device.type == FIRST.type and device.index is None:
        device = FIRST
    bare_args, bare = tree_map_only(Elsewhere, lambda x: x.inner, (args, kwargs))
    out = func(*bare_args, **(bare if asked is None else bare | {"device": "cpu"}))
    if device.type == "cpu":
        return out
    out = tree_map_only(Tensor, lambda x: Elsewhere(x, device), out)
    return return_and_correct_aliasing(func, args, kwargs, out)


def _device_of(func: Any, args: Any, kwargs: dict[str, Any]) -> torch.device:
    """Returns where an operation's result will be; refuses operands that CUDA would refuse."""
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    if not tensors:
        return torch.device("cpu")
    first = tensors[0].device
    if func in COPIES:
        return first
    rest = tensors[1:]
    if func in INDEXING:
        indices = [x for x in args[1] if isinstance(x, Tensor)]
        rest = [x for x in indices if x.device.type != "cpu"] + [
            x for x in args[2:3] if isinstance(x, Tensor)
        ]
    scalars = func not in INDEXING or first.type != "cpu"
    places = {x.device for x in (tensors[0], *rest) if x.ndim or x.device.type != "cpu" or not scalars}
    if len(places) > 1 or (places - {first} and func._schema.is_mutable):
        raise RuntimeError(f"{func}: expected all tensors to be on the same device, got {places}")
    return places.pop() if places else first


def moved(model: nn.Module, device: torch.device) -> None:
    """Puts a module's parameters and buffers on a device, those that are not elsewhere yet."""
    known: dict[int, Any] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is None or isinstance(tensor, Elsewhere):
                    continue
                if id(tensor) not in known:
                    made = Elsewhere(tensor.detach(), device)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    known[id(tensor)] = nn.Parameter(made, tensor.requires_grad) if is_parameter else made
                held[name] = known[id(tensor)]


def spread(model: Any, layers: Sequence[nn.Module], last: Sequence[nn.Module]) -> Any:
    """Puts half of a model's layers, and what comes last, on a second device, as `device_map` does."""
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    half = len(layers) // 2
    for module in (*layers[half:], *last):
        moved(module, SECOND)
    for n, layer in enumerate(layers):
        add_hook_to_module(layer, AlignDevicesHook(FIRST if n < half else SECOND))
    moved(model, FIRST)
    return add_hook_to_module(model, AlignDevicesHook(FIRST, io_same_device=True))
