"""The common base of cases with an activation x and a cotangent."""

from __future__ import annotations

from equivtest.cases.case import Case, Shape
from equivtest.cases.case_tensor import CaseTensor
from equivtest.layout import Layout

X_ALONE = ((), ("x",))
"""Values of `requires_grad` if only x can have a gradient."""


class ActivationCase(Case):
    """A case whose fields say which tensors need a gradient, and the memory format of x and of the cotangent.

    The subclass declares these fields, in an order that it chooses.
    """

    requires_grad: tuple[str, ...]
    x_contiguous: bool
    cotangent_contiguous: bool

    def given(self, name: str, shape: Shape, layout: Layout) -> CaseTensor:
        is_contiguous = {"x": self.x_contiguous, "cotangent": self.cotangent_contiguous}.get(name, True)
        return CaseTensor(shape, layout, needs_grad=name in self.requires_grad, is_contiguous=is_contiguous)
