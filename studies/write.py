"""Runs a study and stores its output: `python -m studies.write NAME [ARGUMENT ...]`.

The file studies/results/NAME.md begins with the command, the date, the commit and the machine.  Only a study that ends
without an error writes the file.
"""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def header(command: str) -> str:
    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=RESULTS, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    changed = ", with uncommitted changes" if git("status", "--porcelain", "--untracked-files=no") else ""
    return (
        f"# `{command}`\n\n"
        f"- Date: {datetime.now(UTC):%Y-%m-%d}\n"
        f"- Commit: {git('rev-parse', '--short', 'HEAD')}{changed}\n"
        f"- Machine: {os.cpu_count()} cores, {platform.machine()}, {platform.system()}; "
        f"Python {platform.python_version()}, torch {metadata.version('torch')}\n\n"
    )


def main(name: str, *arguments: str) -> int:
    """Runs the study, prints each line as it comes, and writes the file.  Returns the exit code of the study."""
    begin, text = header(shlex.join(["python", "-m", f"studies.{name}", *arguments])), ""
    command = [sys.executable, "-u", "-m", f"studies.{name}", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as study:
        assert study.stdout is not None
        for line in study.stdout:
            sys.stdout.write(line)
            text += line
    if study.returncode == 0:
        body = text.rstrip("\n") if "\n|" in text else f"```text\n{text.rstrip()}\n```"
        (RESULTS / f"{name}.md").write_text(f"{begin}{body}\n", "utf-8")
    return study.returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
