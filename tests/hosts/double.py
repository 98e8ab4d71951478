"""Float64 all the way: transformers takes norms and softmax in float32 whatever a model's dtype is."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

CASTS = {torch.Tensor.to, torch.Tensor.type}  # what may be told a dtype by place


class Double(TorchFunctionMode):
    """While active, float64 tensors stay float64 where code asks for float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float and args[0].dtype == torch.float64:
            return args[0]
        if func in CASTS and args[0].dtype == torch.float64:
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        if not kwargs:  # nearly always, and thousands of times a test
            return func(*args)
        if kwargs.get("dtype") is torch.float32 and args and isinstance(args[0], torch.Tensor):
            kwargs = kwargs | {"dtype": torch.float64} if args[0].dtype == torch.float64 else kwargs
        return func(*args, **kwargs)
