"""`python -m studies.plain`: counts idioms that a reader has to read twice, and compares their rate with a budget."""

from __future__ import annotations

import argparse
import ast
import io
import math
import re
import subprocess
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
BUDGET = {"documents": 1.0, "messages": 1.0, "docstrings": 2.0, "comments": 2.0}
"""Number of idioms that are allowed per 1,000 words of each kind of text.  One idiom is always allowed."""

EXAMPLES = ("test_plain.py",)
"""Files that quote the idioms.  The idioms in these files do not count."""

DETERMINERS = "a|an|the|it|they|there|that|this|one|none|no|some|all|each|every|nobody|nothing|something"
IDIOMS = {
    "of which": r"\bof (?:which|whom|whose)\b",
    "that of": r"\b(?:that|those|ones) of\b",
    "no actor": r"\b(?:is|are|was|were|be) (?:told|said|held|handed|met|meant|taken for|asked|seen to)\b",
    "says of": r"\bsays? (?:of|nothing|something)\b",
    "of its own": r"\b(?:by|of) (?:itself|themselves|(?:its|their|one's) own)\b",
    "hangs on": r"\bhangs? on\b",
    "anybody": r"\b(?:any|some|no)body\b",
    "but for": r"\bbut (?:for|that)\b",
    "all but": r"\b(?:all|nothing) but\b",
    "is to": r"\b(?:is|are) to (?:be )?[a-z]+\b",
    "where it": rf"\bwhere (?:{DETERMINERS}) ",
    "as it is": r"\bas (?:it|they) (?:is|are|was|does|do) ",
}
"""Name of an idiom -> its pattern.  CONTRIBUTING.md says what to write in its place."""

_PATTERNS = [(name, re.compile(pattern, re.IGNORECASE)) for name, pattern in IDIOMS.items()]
_PATTERNS.append(("begins with", re.compile(r"^(?:What|As|Those|Of|In which|Such) ")))


class Line(NamedTuple):
    kind: str
    path: str
    number: int
    text: str

    @property
    def idioms(self) -> list[str]:
        return [name for name, pattern in _PATTERNS for _ in pattern.finditer(self.text)]


def lines_of(path: Path) -> Iterator[Line]:
    """Yields the lines of a document outside of its blocks, or the docstrings, comments and messages of a module."""
    name = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)
    source = path.read_text("utf-8")
    found = _of_module(source) if path.suffix == ".py" else _of_document(source)
    yield from (Line(kind, name, number, text.strip()) for kind, number, text in found if text.strip())


def _of_document(source: str) -> Iterator[tuple[str, int, str]]:
    is_fenced = False
    for number, line in enumerate(source.splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_fenced = not is_fenced
        elif not is_fenced:
            yield "documents", number, line


def _of_module(source: str) -> Iterator[tuple[str, int, str]]:
    tree = ast.parse(source)
    docstrings = [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr) and _is_text(node.value)]
    for node in docstrings:
        for offset, line in enumerate(node.value.splitlines()):  # type: ignore[attr-defined]
            yield "docstrings", node.lineno + offset, line
    for each in ast.walk(tree):
        if _is_text(each) and each not in docstrings and each.value.count(" ") >= 4:  # type: ignore[attr-defined]
            yield "messages", each.lineno, each.value  # type: ignore[attr-defined]
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and token.string.count(" ") >= 3:
            yield "comments", token.start[0], token.string.lstrip("#")


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def tracked(paths: Iterable[str] = ()) -> list[Path]:
    """Returns the modules and documents that git knows or would add, within `paths` if some are named."""
    names = _git("ls-files", "--cached", "--others", "--exclude-standard", "--", *(paths or ("*.py", "*.md")))
    files = [ROOT / name for name in sorted(set(names.splitlines()))]
    return [file for file in files if file.suffix in (".py", ".md") and file.is_file() and file.name not in EXAMPLES]


def added_since(revision: str) -> dict[str, set[int]]:
    """Returns, by path, the numbers of the lines that were added since this branch left a revision."""
    added: dict[str, set[int]] = defaultdict(set)
    path = ""
    for line in _git("diff", "--unified=0", "--no-color", "--no-ext-diff", "--merge-base", revision, "--").splitlines():
        if line.startswith("+++ "):
            path = line.removeprefix("+++ ").removeprefix("b/")
        elif hunk := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            start, count = int(hunk[1]), int(hunk[2] or 1)
            added[path] |= set(range(start, start + count))
    for name in _git("ls-files", "--others", "--exclude-standard").splitlines():
        added[name] = set(range(1, 100_000))
    return added


def _git(*args: str) -> str:
    return subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=True).stdout


class Count(NamedTuple):
    words: int
    idioms: int

    @property
    def rate(self) -> float:
        return 1000 * self.idioms / max(1, self.words)


def count(lines: Iterable[Line]) -> dict[str, Count]:
    words: Counter[str] = Counter()
    idioms: Counter[str] = Counter()
    for line in lines:
        words[line.kind] += len(line.text.split())
        idioms[line.kind] += len(line.idioms)
    return {kind: Count(words[kind], idioms[kind]) for kind in BUDGET}


def over_budget(counts: Mapping[str, Count]) -> list[str]:
    return [kind for kind, each in counts.items() if each.idioms > math.ceil(each.words * BUDGET[kind] / 1000)]


def main(args: list[str] | None = None) -> int:
    """Prints the counts, and the lines of each kind over its budget.  Returns 1 if there is such a kind."""
    parser = argparse.ArgumentParser(prog="python -m studies.plain", description=__doc__)
    parser.add_argument("--change", metavar="REV", help="count only lines added since this revision")
    parser.add_argument("--most", type=int, default=20, help="how many lines to print of a kind (default 20)")
    parser.add_argument("paths", nargs="*", help="files or folders (default: all that git knows)")
    options = parser.parse_args(args)
    lines = [line for path in tracked(options.paths) for line in lines_of(path)]
    if options.change:
        added = added_since(options.change)
        lines = [line for line in lines if line.number in added.get(line.path, ())]
    counts = count(lines)
    over = over_budget(counts)
    for kind in over:
        worst = [line for line in lines if line.kind == kind and line.idioms]
        for line in worst[: options.most]:
            print(f"{line.path}:{line.number}: {', '.join(line.idioms)}: {line.text[:120]}")
    for kind, each in counts.items():
        verdict = "too many" if kind in over else "within"
        rate = f"{each.rate:5.1f} idioms in 1,000 words ({each.idioms} in {each.words})"
        print(f"{kind:<10} {rate}: {verdict} the budget of {BUDGET[kind]:g}")
    return int(bool(over))


if __name__ == "__main__":
    sys.exit(main())
