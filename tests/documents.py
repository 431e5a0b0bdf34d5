"""The code blocks of the documentation, and a comparison of shown output with real output."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Outcome:
    """Exit code and output of a command."""

    code: int
    text: str

    def shows(self, block: str) -> bool:
        """True if the lines of `block` are printed in this order; '...' matches anything, within a line too."""
        lines = iter(self.text.splitlines())
        return all(any(_fits(shown, line) for line in lines) for shown in block.splitlines() if shown != "...")


def _fits(shown: str, line: str) -> bool:
    return re.fullmatch(re.escape(shown.rstrip()).replace(re.escape("..."), ".*"), line.rstrip()) is not None


def blocks(text: str) -> list[tuple[str, str]]:
    """Returns (language, code) of each block of a page, in order."""
    return re.findall(r"^```(\S+)\n(.*?)^```$", text, flags=re.M | re.S)


def fenced(path: Path, language: str) -> list[str]:
    return [code for kind, code in blocks(path.read_text("utf-8")) if kind == language]


def file_name(code: str) -> str:
    """Returns the path of a block of Python, which its first line names."""
    return code.partition("\n")[0].removeprefix("# ")
