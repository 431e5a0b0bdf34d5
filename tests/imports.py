"""How closed the families are: python -m tests.imports."""

from __future__ import annotations

import sys
from collections import Counter

from tests.test_architecture import PATHS, family_of, own_imports_of, part_of, reached_from


def between_files() -> Counter[str]:
    """Imports of the families' files: 'within' one family, 'between' two, 'other part' of one, 'share' of all."""
    counts: Counter[str] = Counter()
    for module in PATHS:
        for imported in own_imports_of(module) if family_of(module) else ():
            if imported.startswith(("cases.", "oracle")):
                counts["share"] += 1
            elif family_of(imported):
                same = family_of(imported) == family_of(module)
                counts["within" if same else "between"] += 1
                counts["other part"] += same and part_of(imported) != part_of(module)
    return counts


def circles() -> list[str]:
    """Modules that import themselves by way of others."""
    return [module for module in PATHS if any(module in reached_from(imported) for imported in own_imports_of(module))]


def main() -> None:
    """Prints the counts."""
    counts = between_files()
    share = counts["between"] / (counts["between"] + counts["within"])
    sys.stdout.write(
        f"{counts['within']} imports within a family, {counts['other part']} of them of another part; "
        f"{counts['between']} between families ({share:.1%}); {counts['share']} of what they share\n"
        f"{len(circles())} modules in a circle\n"
    )


if __name__ == "__main__":
    main()
