"""Defines `Mode`, the base class of the dispatch modes in which the oracle runs the unsharded module."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that does not import torch's dynamo.

    torch wraps `__torch_dispatch__` of each mode, so that dynamo never compiles this method. torch's wrapper imports
    dynamo at the first operation, which takes a third of the time of `import torch`. This class calls torch's wrapper
    only if a program has imported dynamo.

    Source: TorchDispatchMode.__init_subclass__, torch._disable_dynamo (2.13.0).
    """

    def __init_subclass__(cls) -> None:
        dispatch: Callable[..., Any] = cls.__torch_dispatch__
        super().__init_subclass__()  # type: ignore[no-untyped-call]
        wrapped: Callable[..., Any] = cls.__torch_dispatch__

        @functools.wraps(dispatch)
        def dispatch_lazily(self: Mode, *args: Any, **kwargs: Any) -> Any:
            has_dynamo = hasattr(sys.modules.get("torch._dynamo"), "disable")  # False also while it is being imported
            return (wrapped if has_dynamo else dispatch)(self, *args, **kwargs)

        setattr(cls, "__torch_dispatch__", dispatch_lazily)  # noqa: B010  (mypy lets no method be assigned)
