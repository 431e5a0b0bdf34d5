"""Subject that trains a perceptron with float32 parameters by FSDP2, which computes and reduces in fewer bits.

Source: torch/distributed/fsdp/_fully_shard/_fsdp_api.py, MixedPrecisionPolicy (2.13.0).
"""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from equivtest.cases.subject import Answers, Given
from equivtest.families.training.data_parallel.subject import Fsdp2Run
from equivtest.families.training.mixed.case import MixedCase
from equivtest.tensors import DTYPES


def fsdp2_mixed_mlp(case: MixedCase, mesh: DeviceMesh, given: Given) -> Answers:
    return MixedRun(case, mesh, given).answers()


class MixedRun(Fsdp2Run):
    case: MixedCase

    def policy(self) -> MixedPrecisionPolicy:
        case = self.case
        return MixedPrecisionPolicy(
            param_dtype=DTYPES[case.param_dtype],
            reduce_dtype=DTYPES.get(case.reduce_dtype),
            output_dtype=DTYPES.get(case.output_dtype),
            cast_forward_inputs=case.casts_inputs,
        )
