"""Follows pages of the documentation as a newcomer does, in a fresh environment: `python -m studies.newcomer`.

The study builds the wheel, installs it in an environment outside of the checkout, and starts each page in an empty
folder.  A page is followed from its blocks alone: a file is written, a command is run, and the text after a command
must be what the command prints.  A command that says `# exit code 1` must end with that code, any other with 0.  The
exit code of the study is 1 if a step differs from its page.

The device is the one written in Python in tests/programs, in a separate package as a vendor would ship it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.documents import Outcome, blocks, fenced, file_name

ROOT = Path(__file__).parents[1]
DEVICE = {"BACKEND": "shadow", "DEVICE": "shadow", "PACKAGE": "shadow"}
"""Word of a page -> what a vendor writes in its place."""
LIMIT_S = 900
_CODE = re.compile(r"# exit code (\d)")

OBSERVER = """
import sys, threading, time

def observe():
    while (search := getattr(sys.modules.get("equivtest.search.search"), "Searching", None)) is None:
        time.sleep(0.005)
    judge = search.judge
    def noted(*args, **kwargs):
        verdicts = judge(*args, **kwargs)
        with open({path!r}, "a") as file:
            print(time.monotonic(), file=file)
        return verdicts
    search.judge = noted

if "run" in sys.orig_argv[:4]:
    threading.Thread(target=observe, daemon=True).start()
"""
"""A `sitecustomize` of the environment, which notes when `equivtest run` has judged a case."""


@dataclass(frozen=True)
class Page:
    """A page to follow.

    Attributes:
        section: The heading of the part that is followed, or '' for the whole page.
        files_of: Pages whose files the page uses.
    """

    path: str
    section: str = ""
    files_of: tuple[str, ...] = ()

    def blocks(self) -> list[tuple[str, str]]:
        text = (ROOT / self.path).read_text("utf-8")
        start = text.index(f"\n{self.section}\n") if self.section else 0
        end = text.find("\n## ", start + 4) if self.section else -1
        return blocks(text[start:] if end < 0 else text[start:end])


TENSOR_PARALLEL = "docs/how-to/tensor-parallel.md"
PAGES = (
    Page("README.md", "## I have a module"),
    Page("docs/tutorial/first-program.md"),
    Page("docs/tutorial/first-backend-run.md"),
    Page(TENSOR_PARALLEL),
    Page("docs/how-to/data-parallel.md", files_of=(TENSOR_PARALLEL,)),
    Page("docs/how-to/compare-script.md", files_of=(TENSOR_PARALLEL,)),
)


@dataclass
class Step:
    """A command of a page, and how it ended.

    Attributes:
        seconds, cpu_s: Wall-clock time, and processor time of all processes.
        judged_s: Seconds until the first case was judged. None for a command other than `equivtest run`.
        problem: How the step differs from the page, or ''.
    """

    page: str
    command: str
    seconds: float
    cpu_s: float
    judged_s: float | None
    outcome: Outcome
    problem: str = ""


class Newcomer:
    """A fresh environment in the folder `home`."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.observed = home / "judged"
        self.python = home / "venv/bin/python"
        hidden = ("PYTHONPATH", "PYTHONHASHSEED", "VIRTUAL_ENV")
        self.environment = {name: value for name, value in os.environ.items() if name not in hidden}
        self.environment["PATH"] = f"{self.python.parent}:{os.environ['PATH']}"

    def install(self) -> Step:
        build = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(self.home / "dist")]
        subprocess.run([*build, str(ROOT)], check=True, stdout=subprocess.DEVNULL)
        (wheel,) = (self.home / "dist").glob("*.whl")
        venv = f"{sys.executable} -m venv {self.home}/venv"
        step = self.run("", f"{venv} && pip install -q -c {ROOT}/constraints.txt {wheel}", self.home)
        if step.outcome.code == 0:
            (site,) = (self.home / "venv/lib").glob("python*/site-packages")
            (site / "sitecustomize.py").write_text(OBSERVER.format(path=str(self.observed)))
            (site / "shadow").mkdir()
            for source, name in (("python_device", "__init__"), ("backend", "backend")):
                text = (ROOT / f"tests/programs/{source}.py").read_text("utf-8")
                (site / f"shadow/{name}.py").write_text(text.replace("from tests.programs.", "from shadow."), "utf-8")
        step.command = "python -m venv, pip install"
        return step

    def run(self, page: str, command: str, folder: Path) -> Step:
        self.observed.unlink(missing_ok=True)
        cpu_s, begun_s = sum(os.times()[2:4]), time.monotonic()
        ended = subprocess.run(
            ["bash", "-c", command],
            cwd=folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        seconds = time.monotonic() - begun_s
        judged_s = float(self.observed.read_text().split()[0]) - begun_s if self.observed.exists() else None
        outcome = Outcome(ended.returncode, ended.stdout)
        step = Step(page, command, seconds, sum(os.times()[2:4]) - cpu_s, judged_s, outcome)
        wanted = int(found[1]) if (found := _CODE.search(command)) else 0
        if ended.returncode != wanted:
            step.problem = f"exit code {ended.returncode}, the page says {wanted}"
        return step

    def follow(self, page: Page) -> Iterator[Step]:
        folder = Path(tempfile.mkdtemp(dir=self.home))
        for other in page.files_of:
            for code in fenced(ROOT / other, "python"):
                write(folder, code)
        step: Step | None = None
        for language, code in page.blocks():
            if language == "text" and step is not None and not step.outcome.shows(code):
                step.problem = step.problem or f"the page shows another output: {code.splitlines()[0]}"
            if language not in ("python", "sh"):
                continue
            if language == "python":
                write(folder, code)
                continue
            for command in code.splitlines():
                if step is not None:
                    yield step
                for word, own in DEVICE.items():
                    command = re.sub(rf"\b{word}\b", own, command)
                step = self.run(page.path, command, folder)
        if step is not None:
            yield step


def write(folder: Path, code: str) -> None:
    path = folder / file_name(code)
    path.parent.mkdir(exist_ok=True)
    path.write_text(code, "utf-8")


def row(step: Step, torch_s: float) -> str:
    command = step.command if len(step.command) <= 100 else f"{step.command[:60]} ... {step.command[-35:]}"
    judged = "" if step.judged_s is None else f"{step.judged_s:.1f}"
    cells = [step.page, f"`{command}`", f"{step.seconds:.1f}", f"{step.seconds / torch_s:.1f}", f"{step.cpu_s:.1f}"]
    return f"| {' | '.join([*cells, judged, str(step.outcome.code), step.problem or 'as shown'])} |"


def main() -> int:
    home = Path(tempfile.mkdtemp(prefix="newcomer-"))
    try:
        return follow_all(Newcomer(home))
    finally:
        shutil.rmtree(home)


def follow_all(newcomer: Newcomer) -> int:
    """Prints the table of all steps and the milestones.  Returns 1 if a step differs from its page."""
    steps = [newcomer.install()]
    for _ in range(2):  # the first reads the disk
        torch = newcomer.run("", 'python -c "import torch"', newcomer.home)
    print("| page | command | s | times `import torch` | CPU s | s to first judged case | exit code | output |")
    print("|---|---|---|---|---|---|---|---|")
    for step in (*steps, torch):
        print(row(step, torch.seconds))
    if not steps[0].problem:
        for page in PAGES:
            for step in newcomer.follow(page):
                steps.append(step)
                print(row(step, torch.seconds))
    print(f"\nSeconds from the start, without the time to read:\n\n{milestones(steps)}")
    print(f"\nLoad average over the last 15 minutes: {os.getloadavg()[2]:.1f} on {os.cpu_count()} cores.")
    wrong = [step for step in steps if step.problem]
    for step in wrong:
        print(f"\n{step.page}: {step.command}: {step.problem}\n{step.outcome.text[-3000:]}", file=sys.stderr)
    return int(bool(wrong))


def milestones(steps: list[Step]) -> str:
    """Returns, as a list, the seconds from the start to the installation, the first verdict and the first failure."""
    lines, past_s = [], 0.0
    reached: dict[str, Callable[[Step], bool]] = {
        "installed": lambda step: True,
        "first judged case": lambda step: step.judged_s is not None,
        "first green": lambda step: "of 5 claims 5 hold" in step.outcome.text,
        "first red": lambda step: step.outcome.code == 1,
    }
    for step in steps:
        for name in [name for name, test in reached.items() if test(step)]:
            del reached[name]
            seconds = step.judged_s if "judged" in name and step.judged_s is not None else step.seconds
            lines.append(f"- {name}: {past_s + seconds:.1f} s")
        past_s += step.seconds
    last = PAGES[-1]
    minutes = sum(step.seconds for step in steps if step.page == last.path) / 60
    num_lines = sum(len(code.splitlines()) for kind, code in last.blocks() if kind != "text")
    lines.append(
        f"- compare script replaced, on 8 ranks and a device in Python: {minutes:.1f} minutes, {num_lines} lines"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
