"""What the cases share that hand over an activation x and a cotangent."""

from __future__ import annotations

from equivtest.kit.case import Case


class ActivationCase(Case):
    """A case whose fields say which of what is given needs a gradient, and how x and cotangent lie in memory.

    The fields are those of the case itself, where they stand in its own order.
    """

    requires_grad: tuple[str, ...]
    x_contiguous: bool
    cotangent_contiguous: bool

    def given_flags(self) -> dict[str, bool]:
        return {name: name in self.requires_grad for name in self.given_names()}

    def is_contiguous(self, name: str) -> bool:
        return {"x": self.x_contiguous, "cotangent": self.cotangent_contiguous}.get(name, True)
