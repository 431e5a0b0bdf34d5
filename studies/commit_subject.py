"""Checks a commit's message: a short imperative, one change, and the reason: `python -m studies.commit_subject FILE`.

A hook of pre-commit calls it (stage commit-msg).  CONTRIBUTING.md has the rules.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

MOST_CHARS = 72
MADE_BY_GIT = re.compile(r"Merge |Revert |fixup! |squash! |amend! ")
NO_VERBS = re.compile(
    r"(?:a|an|the|this|that|these|those|it|they|there|each|every|all|some|no|one|two|three|more|most|of|in|on|by|for|with|"
    r"from|at|as|if|when|where|what|which|who|whose|how|why|whether|and|or|but|not|now|only|tests?|docs?)",
    re.IGNORECASE,
)
OTHER_FORMS = re.compile(r"\w+(?:ing|ed|[^s]s)", re.IGNORECASE)
IMPERATIVES = {
    "bring",
    "ping",
    "sing",
    "string",
    "embed",
    "feed",
    "need",
    "seed",
    "shed",
    "speed",
    "focus",
    "bias",
    "alias",
}
"""Verbs whose base form ends like another form, such as 'bring'."""


def problems_of(message: str) -> Iterator[str]:
    """Yields the problems of a commit's message.  A message that git made has none."""
    lines = [line for line in message.splitlines() if not line.startswith("#")]
    subject = lines[0].strip() if lines else ""
    if MADE_BY_GIT.match(subject):
        return
    words = subject.split() or [""]
    if len(subject) > MOST_CHARS:
        yield f"the subject has {len(subject)} characters, at most {MOST_CHARS} are allowed: move the rest to the body"
    if ";" in subject:
        yield "the subject has a ';': make one commit of each change"
    if not _is_imperative(*words[:2]):
        yield f"the subject begins with {words[0]!r}: begin with an imperative, such as Add, Fix or Remove"
    if subject.endswith("."):
        yield "the subject ends with a full stop: leave it out"
    if not any(line.strip() for line in lines[2:]) or lines[1].strip():
        yield "there is no body: leave a line empty, then say in 3 to 10 lines why"


def _is_imperative(first: str, second: str = "") -> bool:
    is_other = NO_VERBS.fullmatch(first) or (OTHER_FORMS.fullmatch(first) and first.lower() not in IMPERATIVES)
    return first[:1].isupper() and not is_other and second not in ("is", "are", "was", "were", "has", "have", "of")


def main(path: str) -> int:
    """Prints the problems of the message in a file.  Returns 1 if there are any."""
    problems = list(problems_of(Path(path).read_text("utf-8")))
    for problem in problems:
        print(f"commit message: {problem}", file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
