"""A vendor's module: it brings a device for which the next backward of a process starts a thread.

After that backward torch refuses a backward in processes that are forked from this one.
"""

from __future__ import annotations

import os

from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend as register_device

from tests.programs.tiny import visit

__all__ = ["visit"]

BY_FAKE_MODE = "EQUIVTEST_TEST_BY_FAKE_MODE"
"""Environment variable: if set, the device comes with the first fake tensors, as eight do where torch is built for
CUDA and finds no card: FakeTensorMode.__enter__ calls torch._C._ensureCUDADeviceGuardSet (2.15.0)."""

AS_CARD = "EQUIVTEST_TEST_AS_CARD"
"""Environment variable: if set, the device is hidden as CUDA's cards are, by an empty CUDA_VISIBLE_DEVICES."""

_enter = FakeTensorMode.__enter__


def _bring_device(mode: FakeTensorMode) -> FakeTensorMode:
    FakeTensorMode.__enter__ = _enter
    register_device("toaster")
    return _enter(mode)


if AS_CARD in os.environ and os.environ.get("CUDA_VISIBLE_DEVICES") != "":
    register_device("toaster")
elif BY_FAKE_MODE in os.environ:
    FakeTensorMode.__enter__ = _bring_device
elif AS_CARD not in os.environ:
    register_device("toaster")
