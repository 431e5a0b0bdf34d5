"""Gives advice on an exception that your function raised, and finds the line that raised it."""

from __future__ import annotations

import traceback

from equivtest.base.users_code import is_users

NO_DEVICE = ("not compiled with CUDA", "No CUDA GPUs", "no NVIDIA driver", "no NVIDIA GPU", "device type at start")
"""Parts of torch's messages (2.13.0) about a device that the machine does not have."""
IN_PLACE = "leaf Variable that requires grad is being used in an in-place operation"
"""Part of a message of torch (2.13.0) on an input that is changed."""


def way_out_of(error_type: str, text: str) -> str:
    """Returns advice on a missing package, a missing device or a changed input. Otherwise the result is ''."""
    if error_type in ("ModuleNotFoundError", "ImportError"):
        return "install that package in this environment, or leave the import out"
    if any(part in text for part in NO_DEVICE):
        return "take mesh.device_type in place of a fixed device; build leaves the module on the CPU"
    if IN_PLACE in text:
        return "inputs have gradients, so change a copy: x.clone()"
    return ""


def place_of(error: BaseException) -> str:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_users(frame.filename)]
    return f" at {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
