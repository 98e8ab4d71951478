"""Float64 all the way: transformers takes norms and softmax in float32 whatever a model's dtype is."""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class Double(TorchFunctionMode):
    """While active, float64 tensors stay float64 where code asks for float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64:
            if func is torch.Tensor.float:
                return args[0]
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)
