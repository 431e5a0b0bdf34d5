"""A vendor's module that brings the device written in Python."""

from __future__ import annotations

import os

import torch

from tests.programs import python_device

USED = "EQUIVTEST_TEST_USED"
"""Environment variable: if set, the import runs a backward on the device, after which no fork can run a backward."""

if USED in os.environ:
    torch.autograd.backward(torch.ones((), device=python_device.DEVICE, requires_grad=True))
