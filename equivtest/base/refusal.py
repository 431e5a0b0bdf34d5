"""Whether an exception is a backend's or an old release's own word that it cannot do a thing, or a failure."""

from __future__ import annotations

from packaging.version import Version

CONTRACTS = "2.13"
"""The release of torch in which the contracts were read."""

MISSING = "does not have a sharding strategy registered"
"""Words of DTensor: ShardingPropagator in torch/distributed/tensor/_sharding_prop.py (2.8.0)."""

NEVER = (
    AttributeError, KeyError, IndexError, NameError, AssertionError, ArithmeticError, OSError, ImportError, MemoryError,
)  # fmt: skip
"""What programs and broken machines raise, whatever its text says: 'Operation not supported' is a driver's."""

TYPE_ERRORS = (
    "input tensor data type is not supported for nccl process group",
    "input tensor data type is not supported for xccl process group",
)
"""The only refusals that are a TypeError, lower case: getNcclDataType in c10d/ProcessGroupNCCL.cpp (torch 2.13.0), and
its like in torch-xpu-ops.  Python's own TypeErrors have such words too: 'unsupported operand type(s)'."""

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
"""(words of a refusal in lower case, who says them): files of torch/csrc/distributed/c10d, torch 2.13.0, or others."""


def is_refusal(error: BaseException) -> bool:
    """Whether `error` documents that the backend has not the operation, or not for this dtype."""
    if isinstance(error, NotImplementedError):
        return True
    text = str(error).lower()
    if "cuda error" in text or "hip error" in text:  # a kernel's or a driver's, not the backend's word
        return False
    if isinstance(error, TypeError):
        return text.startswith(TYPE_ERRORS)
    return not isinstance(error, NEVER) and any(words in text for words, _ in WORDS)


def is_missing(error: BaseException, release: str) -> bool:
    """Whether a release of torch older than CONTRACTS says of itself that it has not something.

    In CONTRACTS and later the same words are a failure: what DTensor had there must not be lost.
    """
    return isinstance(error, NotImplementedError) and MISSING in str(error) and is_older(release)


def is_older(release: str, than: str = CONTRACTS) -> bool:
    """Whether a release of torch came before another; unless said otherwise, before the contracts were read."""
    return Version(release) < Version(than)


def in_short(error: BaseException) -> str:
    """'RuntimeError: Invalid scalar type': the class and the first line of the text."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
