"""Decides if an exception is a failure, or says that a backend or an old release of torch lacks something."""

from __future__ import annotations

from packaging.version import Version

CONTRACTS = "2.13"
"""The release of torch whose documentation the claims follow."""

MISSING = "does not have a sharding strategy registered"
"""Text with which DTensor refuses an operator.

Source: ShardingPropagator in torch/distributed/tensor/_sharding_prop.py (2.8.0).
"""

NEVER = (
    AttributeError, KeyError, IndexError, NameError, AssertionError, ArithmeticError, OSError, ImportError, MemoryError,
)  # fmt: skip
"""Exceptions that are never a refusal, whatever their text, such as a driver's OSError 'Operation not supported'."""

NEVER_WORDS = (
    "cuda error", "hip error",  # from a kernel or a driver, not from the backend
    "single memory location",  # MemoryOverlap.cpp (2.13.0): 'unsupported operation', of a tensor that a kernel writes
)  # fmt: skip
"""Texts, in lower case, of errors that are never a refusal."""

TYPE_ERRORS = (
    "input tensor data type is not supported for nccl process group",
    "input tensor data type is not supported for xccl process group",
)
"""Texts, in lower case, of the only TypeErrors that are refusals.

Source: getNcclDataType in c10d/ProcessGroupNCCL.cpp (torch 2.13.0), and the function of torch-xpu-ops with the same
purpose.  Python's own TypeErrors have similar texts: 'unsupported operand type(s)'.
"""

WORDS = (
    ("no backend type associated with device type", "ProcessGroup.hpp: a group in Python without the operation"),
    ("does not support", "Backend.hpp: a backend in C++ without the operation; distributed_c10d.py: complex tensors"),
    ("does not implement", "Backend.hpp: coalescing"),
    ("invalid scalar type", "ProcessGroupGloo.cpp, GENERATE_ALL_TYPES: a dtype"),
    (
        "cannot use reduceop",
        "ProcessGroupGlooDetail.hpp: PREMUL_SUM, and to torch 2.12 AVG; ProcessGroupNCCL.cpp: BAND",
    ),
    ("avg requires nccl", "ProcessGroupNCCL.cpp: an old NCCL"),
    (
        "unsupported",
        "ProcessGroupNCCL.cpp: 'Unsupported Float8 type for NCCL reduction'; others' 'unsupported data type'",
    ),
    ("is only implemented for", "distributed_c10d.py: monitored_barrier"),
    ("invalid data type", "other backends, of a dtype"),
    ("not supported", "other backends"),
    ("not implemented", "other backends"),
)
"""(text in a refusal in lower case, its source).  Most sources are in torch/csrc/distributed/c10d (2.13.0)."""


def is_refusal(error: BaseException) -> bool:
    """True if `error` says that the backend lacks the operation, for all dtypes or for this dtype."""
    if isinstance(error, NotImplementedError):
        return True
    text = str(error).lower()
    if any(words in text for words in NEVER_WORDS):
        return False
    if isinstance(error, TypeError):
        return text.startswith(TYPE_ERRORS)
    return not isinstance(error, NEVER) and any(words in text for words, _ in WORDS)


def is_missing(error: BaseException, release: str) -> bool:
    """True if `error` says that torch lacks something, and `release` is older than CONTRACTS.

    In CONTRACTS and later releases the same text is a failure, because DTensor must not lose an operator.
    """
    return isinstance(error, NotImplementedError) and MISSING in str(error) and is_older(release)


def is_older(release: str) -> bool:
    return Version(release) < Version(CONTRACTS)


def in_short(error: BaseException) -> str:
    """Returns the class of an error and the first line of its text: 'RuntimeError: Invalid scalar type'.

    If torch.distributed raised the error for NCCL, the cause is only in the last line.  That line then follows the
    first line (NCCLUtils.hpp, C10D_NCCL_CHECK, 2.11.0).
    """
    lines = str(error).strip().splitlines()
    if lines and lines[0].startswith("NCCL error in: "):
        lines = [": ".join(dict.fromkeys((lines[0], lines[-1])))]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
