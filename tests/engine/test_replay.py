"""Replay files: written from a verdict, read back, run again."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
import torch

from equivtest.cases.case import from_data
from equivtest.errors import Misuse
from equivtest.ranks.backend import Backend
from equivtest.ranks.pool import Pool
from equivtest.ranks.reply import Reply
from equivtest.search.replay import backend_of, read_replay, replay, write_replay
from equivtest.verdicts.judging import judge_replies
from equivtest.verdicts.message import write_message
from tests.replies import LINEAR, StubPool, drop_tensor, on_all_ranks, raised, right_replies

WRONG = on_all_ranks(LINEAR, "output", torch.zeros_like)
VERDICT = judge_replies("package.module:mine", LINEAR, WRONG)[0]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A replay file of a wrong output."""
    return write_replay(VERDICT, Backend(), tmp_path / "new" / "folder")


def again(file: Path, replies: list[Reply]) -> tuple[bool, str]:
    return replay(read_replay(file), cast(Pool, StubPool(lambda case: replies)), path=str(file))


def rewrite(file: Path, **fields: Any) -> Path:
    file.write_bytes(msgspec.json.encode(msgspec.json.decode(file.read_bytes()) | fields))
    return file


def test_replay_file_is_named_after_its_failure(file: Path) -> None:
    assert file.name.startswith("package.module.mine-equals_unsharded-value-") and file.suffix == ".json"


def test_repeated_failure_overwrites_its_replay_file(file: Path) -> None:
    assert write_replay(VERDICT, Backend(), file.parent) == file


def test_different_failures_have_different_replay_files(file: Path) -> None:
    others = [
        judge_replies("package.module:mine", LINEAR, drop_tensor(right_replies(LINEAR), 0, name))[index]
        for index, name in ((0, "output"), (1, "grad.x"))
    ]

    assert len({file, *(write_replay(other, Backend(), file.parent) for other in others)}) == 3


def test_replay_file_has_subject_case_message_and_releases(file: Path) -> None:
    """The subject and case to run, the message for a person and the releases that failed."""
    data = read_replay(file)

    assert (data["subject"], data["claim"], data["kind"]) == ("package.module:mine", "equals_unsharded", "value")
    assert from_data(data["case"]) == LINEAR
    assert data["message"] == write_message(VERDICT) and data["versions"]["torch"] == str(torch.__version__)


def test_replay_file_keeps_the_backend(tmp_path: Path) -> None:
    backend = Backend("fake", "cpu", ("json",), "spawn")

    assert backend_of(read_replay(write_replay(VERDICT, backend, tmp_path))) == backend


def test_replay_of_a_case_that_still_fails_shows_its_message(file: Path) -> None:
    fails, message = again(file, WRONG)

    assert fails and message == write_message(VERDICT, replay=str(file))


def test_replay_says_that_the_claim_now_holds_if_the_case_no_longer_fails(file: Path) -> None:
    assert again(file, right_replies(LINEAR)) == (
        False,
        f"package.module:mine: equals_unsharded holds in {LINEAR!r}",
    )


def test_replay_ignores_other_failing_claims(file: Path) -> None:
    assert not again(file, drop_tensor(right_replies(LINEAR), 0, "grad.x"))[0]


def test_replay_counts_a_raising_or_lost_rank_as_a_failure(file: Path) -> None:
    fails, message = again(file, [raised(0), *right_replies(LINEAR)[1:]])

    assert fails and message.startswith("RankRaised")


def test_replay_runs_the_case_of_the_replay_file(file: Path) -> None:
    pool = StubPool()
    replay(read_replay(file), cast(Pool, pool))

    assert pool.seen == [LINEAR]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"schema": 2}, "has schema 2, this equivtest reads 1: use the version that wrote it"),
        ({"claim": "is_fine"}, "has the unknown claim 'is_fine'"),
    ],
)
def test_replay_file_of_another_version_is_refused(file: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(Misuse, match=message):
        read_replay(rewrite(file, **fields))


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"3", b'{"schema": 1}'])
def test_broken_replay_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.json"
    path.write_bytes(content)

    with pytest.raises(Misuse, match=r"broken\.json is broken"):
        read_replay(path)


def test_missing_replay_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Misuse, match="cannot be read: No such file or directory"):
        read_replay(tmp_path / "none.json")


def test_replay_file_with_a_broken_backend_is_refused(file: Path) -> None:
    with pytest.raises(Misuse, match="backend is broken"):
        backend_of(read_replay(rewrite(file, backend={"name": 3})))


def test_replay_file_with_a_broken_case_is_refused(file: Path) -> None:
    pool = StubPool()

    with pytest.raises(Misuse, match="unknown case class 'Other'"):
        replay(read_replay(rewrite(file, case={"schema": 1, "type": "Other", "fields": {}})), cast(Pool, pool))
    assert pool.seen == []
