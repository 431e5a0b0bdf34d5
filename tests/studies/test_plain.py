"""The counter of idioms and the check of commit messages, seen to fail."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from studies import commit_subject, plain
from studies.commit_subject import problems_of

MODULE = '''"""Reads a file. {docstring}"""
# This comment has some words. {comment}
raise ValueError("this message has some words: {message}")
'''
IDIOMATIC = "what is held hangs on somebody"
PLAIN = "the rank keeps the value"


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one commit, which the counter takes for this one."""
    monkeypatch.setattr(plain, "ROOT", tmp_path)
    write_all(tmp_path)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
    for args in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "Add files"]):
        subprocess.run([*git, *args], check=True)
    return tmp_path


def write_all(folder: Path, **texts: str) -> None:
    """Writes a module and a document; `texts` are those that are not PLAIN."""
    kinds = {kind: texts.get(kind, PLAIN) for kind in ("docstring", "comment", "message")}
    (folder / "module.py").write_text(MODULE.format(**kinds))
    (folder / "page.md").write_text(f"{texts.get('document', PLAIN)}\n")


@pytest.mark.parametrize("kind", ["document", "message", "docstring", "comment"])
def test_counter_of_idioms_fails_for_each_kind_of_text(
    kind: str, repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plain.main([]) == 0

    write_all(repository, **{kind: IDIOMATIC})

    assert plain.main([]) == 1
    assert f"{IDIOMATIC}\n" in capsys.readouterr().out.replace('"""', "")


def test_counter_of_idioms_in_a_change_ignores_older_lines(repository: Path) -> None:
    write_all(repository, document=f"{IDIOMATIC}\n" * 9)
    subprocess.run(["git", "-C", str(repository), "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qam", "b"])
    assert (plain.main([]), plain.main(["--change", "HEAD"])) == (1, 0)

    (repository / "new.md").write_text(IDIOMATIC)

    assert plain.main(["--change", "HEAD"]) == 1


def test_counter_of_idioms_ignores_code_blocks(repository: Path) -> None:
    write_all(repository, document=f"```text\n{IDIOMATIC}\n```\n")

    assert plain.main([]) == 0


@pytest.mark.parametrize("name", plain.IDIOMS)
def test_each_idiom_is_found_in_an_example(name: str) -> None:
    examples = (
        "the tensor of which none is known", "it is that of rank 0", "the value is held", "it says nothing",
        "judged by itself", "it hangs on the case", "nobody knows", "the last but for one", "all but one",
        "it is to be judged", "where it is wrong", "as it is said",
    )  # fmt: skip

    assert any(name in plain.Line("documents", "", 1, text).idioms for text in examples)


@pytest.mark.parametrize(
    ("subject", "problem"),
    [
        ("How ranks end is said in one place", "begin with an imperative"),
        ("Ranks are named", "begin with an imperative"),
        ("Added a test", "begin with an imperative"),
        ("fix a message", "begin with an imperative"),
        ("Fix a message; add a test", "one commit of each change"),
        ("Fix " + "x" * 69, "at most 72"),
        ("Fix a message.", "full stop"),
    ],
)
def test_commit_subject_that_breaks_a_rule_is_refused(subject: str, problem: str) -> None:
    (told,) = problems_of(f"{subject}\n\nIt was wrong.\n")

    assert problem in told


def test_commit_message_without_a_body_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "message"
    file.write_text("Fix a message\n\n# Please enter the commit message\n")
    assert commit_subject.main(str(file)) == 1

    file.write_text("Fix a message\n\nIt was wrong.\n")
    assert commit_subject.main(str(file)) == 0


@pytest.mark.parametrize(
    "subject", ["Process each rank once", "Seed the draws", "Merge branch 'a'", "fixup! Fix a thing"]
)
def test_right_commit_subject_is_accepted(subject: str) -> None:
    assert not list(problems_of(f"{subject}\n\nIt was wrong.\n"))
