"""What the cases share that hand over an activation x and a cotangent."""

from __future__ import annotations

from equivtest.cases.case import Case, Shape
from equivtest.cases.case_tensor import CaseTensor
from equivtest.layout import Layout

X_ALONE = ((), ("x",))
"""What `requires_grad` may list where there is nothing but x to have a gradient."""


class ActivationCase(Case):
    """A case whose fields say which of what is given needs a gradient, and how x and cotangent lie in memory.

    The fields are those of the case itself, where they stand in its own order.
    """

    requires_grad: tuple[str, ...]
    x_contiguous: bool
    cotangent_contiguous: bool

    def given(self, name: str, shape: Shape, layout: Layout) -> CaseTensor:
        """One tensor that is handed over, as the fields say."""
        is_contiguous = {"x": self.x_contiguous, "cotangent": self.cotangent_contiguous}.get(name, True)
        return CaseTensor(shape, layout, needs_grad=name in self.requires_grad, is_contiguous=is_contiguous)
