"""Programs that make process groups of their own."""

from __future__ import annotations

from dataclasses import dataclass

from equivtest.cases.case import Case, require


@dataclass(frozen=True, kw_only=True, repr=False)
class WorldCase(Case):
    """What a case says of the world that its program needs; as it stands, it needs none.

    Attributes:
        needs_world: Whether the program makes groups of its own: its ranks are the world, and the environment tells
            them so, as torchrun does.
        set_up, tear_down: 'package.module:NAME' of functions (mesh) -> None, called around each draw; '' where there is
            nothing to do.  What is set up and not torn down runs in fresh ranks, which end after the case.
    """

    needs_world: bool = False
    set_up: str = ""
    tear_down: str = ""

    def check_world(self) -> None:
        """Raises Misuse unless the program has the world that it sets up."""
        require(
            self.needs_world or not (self.set_up or self.tear_down),
            f"set_up and tear_down go with needs_world=True, got {self.set_up or self.tear_down!r} without it",
        )
        require(
            not (self.needs_world and self.members),
            f"a program that needs the world has no members, got {self.members}",
        )

    @property
    def needs_fresh_ranks(self) -> bool:
        return bool(self.set_up) and not self.tear_down

    @property
    def sets_up_its_ranks(self) -> bool:
        return bool(self.set_up)
