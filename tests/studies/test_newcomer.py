"""The study that follows pages: a step that differs from its page is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from studies import newcomer
from studies.newcomer import Newcomer, Page, Step, milestones

PAGE = """# Page

```sh
echo outside
```

## Part

```python
# package/shown.py
print("from a file")
```

```sh
python package/shown.py
exit 1    # exit code 1
```

## Other part
"""


@pytest.fixture
def follow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    """Follows a text as a page."""
    monkeypatch.setattr(newcomer, "ROOT", tmp_path)

    def steps(text: str, section: str = "") -> list[Step]:
        (tmp_path / "page.md").write_text(text, "utf-8")
        return list(Newcomer(tmp_path).follow(Page("page.md", section)))

    return steps


def test_commands_of_a_section_become_the_steps_of_a_newcomer(follow: object) -> None:
    steps = follow(PAGE, "## Part")  # type: ignore[operator]

    assert [step.command for step in steps] == ["python package/shown.py", "exit 1    # exit code 1"]
    assert steps[0].outcome.text == "from a file\n" and not any(step.problem for step in steps)


@pytest.mark.parametrize(
    ("commands", "shown", "problem"),
    [
        ("echo one two", "one ...", ""),
        ("echo one", "two", "the page shows another output: two"),
        ("exit 2", "", "exit code 2, the page says 0"),
        ("true  # exit code 1", "", "exit code 0, the page says 1"),
        ("echo BACKEND", "shadow", ""),
    ],
)
def test_output_that_differs_from_the_page_is_reported_as_a_problem(
    follow: object, commands: str, shown: str, problem: str
) -> None:
    (step,) = follow(f"```sh\n{commands}\n```\n\n```text\n{shown}\n```\n")  # type: ignore[operator]

    assert step.problem == problem


def test_milestones_are_measured_from_the_start() -> None:
    outcomes = [(0, ""), (0, "of 5 claims 5 hold"), (1, "")]
    steps = [
        Step("page", "command", 10.0, 1.0, 4.0 if code == 0 and text else None, newcomer.Outcome(code, text))
        for code, text in outcomes
    ]

    assert milestones(steps).splitlines()[:4] == [
        "- installed: 10.0 s", "- first judged case: 14.0 s", "- first green: 20.0 s", "- first red: 30.0 s",
    ]  # fmt: skip
