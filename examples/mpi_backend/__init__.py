"""MPI as a backend of torch.distributed, written in Python over mpi4py: an example for vendors to copy.

`pip install mpi4py mpich`, then `equivtest run --backend mpi4py --import examples.mpi_backend`.  What torch asks of a
process group in Python stands in `group`; how processes that are there already become one MPI job, in `job`.
"""

from __future__ import annotations

from torch import distributed as dist

from examples.mpi_backend.group import BACKEND, MpiGroup

dist.Backend.register_backend(BACKEND, lambda options, _: MpiGroup(options), extended_api=True, devices=["cpu"])
