"""Every optimizer of torch.optim in every form, ten updates: python -m studies.optimizers [NAME ...].

The bound is that of `equivtest.programs.oracle.update`, from what was held before each update.  'by forms': how
far the form is from the single-tensor form after ten updates; 'thawed': whether a parameter that is frozen for three
updates, and the one beside it, are what they are alone; 'sharded': how far DTensors on 2 and on 3 ranks are from whole
tensors, NaN where they are refused: not at all, but where a kernel takes elements by the register, or adds them up.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace

import torch
from torch import nn

from equivtest.families.zero3.fetch.case import FetchCase
from equivtest.programs.case import ModuleCase
from equivtest.programs.oracle.update import FOLLOWED, Held, expect_update
from equivtest.ranks.pool import Pool
from tests.programs.optimizers import OPTIONS, SHAPES, STEPS, Setting, drawn, settings, trained

NAMES = [f"p{number}" for number in range(len(SHAPES))]
CASE = ModuleCase(
    world_size=1,
    build="equivtest.programs.examples.gated:gated_block",
    parallelize="equivtest.programs.examples.plans:tensor_parallel",
    x_shape=(1, 2),
)


def judged(setting: Setting) -> tuple[float, int, int]:
    """The largest error over its bound, how many updates were judged, and of how many nothing was concluded."""
    parameters = dict(zip(NAMES, map(nn.Parameter, drawn(setting.dtype, 0)), strict=True))
    optimizer = setting.make(list(parameters.values()))
    case, group = replace(CASE, dtype=setting.dtype), {**dict(setting.options), "lr": 0.05}
    worst, num, num_open = 0.0, 0, 0
    for step in range(STEPS):
        gradients = dict(zip(NAMES, drawn(setting.dtype, 1 + step), strict=True))
        held = {
            name: Held(each.detach().clone(), gradients[name], _state(optimizer, each))
            for name, each in parameters.items()
        }
        expected = expect_update(case, setting.name, [(NAMES, group)], held)
        for name, parameter in parameters.items():
            parameter.grad = gradients[name]
        optimizer.step()
        for name, (right, states) in expected.items():
            left = {"": (parameters[name], right)}
            left |= {key: (optimizer.state[parameters[name]][key], each) for key, each in states.items()}
            for actual, each in left.values():
                error = (actual.detach().double() - each.value).abs()
                allowed = torch.zeros_like(error) if each.allowed is None else each.allowed
                worst = max(worst, float(torch.where(error <= 0, 0.0, error / allowed).max()))
                num, num_open = num + 1, num_open + each.is_open
    return worst, num, num_open


def _state(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, torch.Tensor]:
    state = optimizer.state.get(parameter, {})
    return {name: each.detach().clone() for name, each in state.items() if isinstance(each, torch.Tensor)}


def by_forms(setting: Setting) -> float:
    """How far it is from the single-tensor form."""
    left = []
    for each in (setting, setting._replace(form="single")):
        parameters = [nn.Parameter(tensor) for tensor in drawn(setting.dtype, 0)]
        trained(each, parameters, [drawn(setting.dtype, 1 + step) for step in range(STEPS)])
        left.append(parameters)
    return max(float((one - other).detach().double().abs().max()) for one, other in zip(*left, strict=True))


def is_thawed_right(setting: Setting) -> bool:
    """Two parameters, of which one sits out three updates, are what each is by itself, bit by bit."""
    together = [nn.Parameter(tensor) for tensor in drawn(setting.dtype, 0)[:2]]
    alone = [nn.Parameter(tensor) for tensor in drawn(setting.dtype, 0)[:2]]
    optimizers = [setting.make(together), *(setting.make([each]) for each in alone)]
    for step in range(STEPS):
        for number, gradient in enumerate(drawn(setting.dtype, 1 + step)[:2]):
            is_frozen = number == 1 and step in (3, 4, 7)
            for each in (together[number], alone[number]):
                each.requires_grad_(not is_frozen)
                each.grad = None if is_frozen else gradient.clone()
        for optimizer in optimizers:
            optimizer.step()
    return all(torch.equal(one, other) for one, other in zip(together, alone, strict=True))


def by_ranks(name: str, pool: Pool, num_ranks: int) -> list[float]:
    """The largest distance of any rank, by setting; NaN where a rank raises."""
    case = FetchCase(world_size=num_ranks, parameters=((1,),))
    replies = pool.run(f"tests.programs.optimizers:sharded_{name}", case, limit_s=900.0)
    assert {reply.outcome for reply in replies} == {"answered"}, replies[0].detail
    found: list[float] = torch.stack([reply.answers[0].tensors["param.0"].local for reply in replies]).amax(0).tolist()
    return found


def main() -> int:
    num_wrong = num = 0
    with Pool() as pool:
        for name in sys.argv[1:] or OPTIONS:
            on_ranks = [by_ranks(name, pool, num_ranks) for num_ranks in (2, 3)]
            for number, setting in enumerate(settings(name)):
                worst, num_judged, num_open = judged(setting) if name in FOLLOWED else (0.0, 0, 0)
                is_right, apart = is_thawed_right(setting), [each[number] for each in on_ranks]
                must_agree = name in FOLLOWED and setting.form != "fused"  # element by element, in the same operations
                is_apart = any(math.isnan(each) or (must_agree and each > 0) for each in apart)
                num, num_wrong = num + 1, num_wrong + (worst > 1 or not is_right or is_apart)
                print(
                    f"{name:9} {setting.form:7} {setting.dtype:8} {dict(setting.options)!s:68} bound {worst:6.3f} of "
                    f"{num_judged}, {num_open} open  thawed {'right' if is_right else 'WRONG'}  sharded "
                    f"{' '.join(f'{each:.1e}' for each in apart)}  forms "
                    f"{'-' if setting.form == 'own' else f'{by_forms(setting):.1e}'}",
                    flush=True,
                )
    print(f"{num_wrong} of {num} are beyond the bound, not thawed rightly or not the same when sharded")
    return 0


if __name__ == "__main__":
    sys.exit(main())
