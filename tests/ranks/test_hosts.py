"""Ranks on other hosts: who may connect, what they answer, what becomes of a host that is lost."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from equivtest.base import limits
from equivtest.diagnose.watched import read_events
from equivtest.errors import Misuse
from equivtest.pytest_plugin import settings
from equivtest.ranks.first_cause import first_cause
from equivtest.ranks.hosts import hub_messages as messages
from equivtest.ranks.hosts import secret as secrets
from equivtest.ranks.hosts.hub_links import SlotLink, spread
from equivtest.ranks.hosts.run_hub import RunHub
from equivtest.ranks.hosts.slot import Refused, Slot, hello_of
from equivtest.ranks.pool import Pool
from tests.programs.tiny import PlainCase
from tests.ranks.slots import SECRET, Relay, slots_of

VISIT = "tests.programs.tiny:visit"
TWO = PlainCase(world_size=2)
OF_TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2"}


@pytest.fixture
def hub() -> Iterator[RunHub]:
    with RunHub(("127.0.0.1", 0), SECRET.encode()) as hub:
        yield hub


def event_with(hub: RunHub, words: str) -> str:
    """The first event that says so, waited for."""
    until_s = time.monotonic() + 10
    while time.monotonic() < until_s:
        if found := [event for event in hub.events() if words in event]:
            return found[0]
        time.sleep(0.02)
    raise AssertionError(f"no event says {words!r}: {hub.events()}")


def test_peer_with_a_wrong_secret_is_refused_at_once(hub: RunHub) -> None:
    slot = Slot(hello_of(OF_TORCHRUN), ("127.0.0.1", hub.port), b"another one than that of the run")

    assert slot.run().endswith("the listener has another secret")
    assert "127.0.0.1 was refused: its secret is another one" in event_with(hub, "refused")


def test_message_of_a_peer_without_the_secret_is_never_decoded(hub: RunHub) -> None:
    hello = messages.encode(hello_of(OF_TORCHRUN))
    with socket.create_connection(("127.0.0.1", hub.port), 5) as stranger:
        stranger.sendall((len(hello).to_bytes(8, "little") + hello)[:64])  # the hub reads no more
        received = b"".join(iter(lambda: stranger.recv(1000), b""))

    assert len(received) == len(secrets._GREETING) + 32 + 32  # the challenge, and no proof
    assert "its secret is another one" in event_with(hub, "refused")


def test_silent_connections_do_not_block_slots(hub: RunHub) -> None:
    idle = [socket.create_connection(("127.0.0.1", hub.port), 5) for _ in range(10)]
    slot = Slot(hello_of({"RANK": "0", "WORLD_SIZE": "1"}), ("127.0.0.1", hub.port), SECRET.encode())
    thread = threading.Thread(target=slot.run)
    thread.start()

    assert hub.slots() == {f"{socket.gethostname()} (127.0.0.1)": 1}
    hub.close()
    thread.join(10)
    assert not thread.is_alive()
    for each in idle:
        each.close()


def test_slot_with_another_version_of_equivtest_or_torch_is_refused(hub: RunHub) -> None:
    hello = messages.SlotHello(0, 1, 0, "elsewhere", 1, "localhost", "equivtest 0, torch 0")

    with pytest.raises(Refused, match=r"it runs equivtest 0, torch 0, but the run equivtest .*, torch "):
        Slot(hello, ("127.0.0.1", hub.port), SECRET.encode())._connect()


@pytest.mark.parametrize(("given", "words"), [("", "need a secret"), ("short", "16 characters or more, got 5")])
def test_listening_without_a_long_secret_raises_misuse(given: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(secrets.VARIABLE, given)
    monkeypatch.delenv(secrets.FILE_VARIABLE, raising=False)

    with pytest.raises(Misuse, match=words):
        settings.check(settings.parse({"listen": ":0"}))


def test_secret_can_be_read_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secret").write_text(f"{SECRET}\n")
    monkeypatch.delenv(secrets.VARIABLE, raising=False)
    monkeypatch.setenv(secrets.FILE_VARIABLE, str(tmp_path / "secret"))

    assert secrets.read_secret() == SECRET.encode()


@pytest.mark.parametrize("text", ["29600", "host", "host:", "host:x", "host:70000"])
def test_address_without_host_or_port_raises_misuse(text: str) -> None:
    with pytest.raises(Misuse, match="--listen: expected HOST:PORT"):
        messages.parse_address(text, "--listen")
    assert messages.parse_address("[::1]:29600", "--listen") == ("::1", 29600)


@pytest.mark.parametrize("listen", [None, ":29600"])
def test_error_for_a_run_under_torchrun_says_the_right_command(
    listen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {**OF_TORCHRUN, "TORCHELASTIC_RUN_ID": "none"}.items():
        monkeypatch.setenv(name, value)

    with pytest.raises(Misuse, match=r"torchrun makes this process rank 0 of 2.*-m equivtest.rank --connect HOST"):
        settings.check(settings.parse({"listen": listen}))


def link(rank: int, group_rank: int = 0) -> SlotLink:
    with socket.socket() as connection:
        return SlotLink(connection, messages.SlotHello(rank, 8, group_rank, "a", 1, "a", ""), "10.0.0.1")


@pytest.mark.parametrize(
    ("world_size", "places"),
    [(1, [(0, 0)]), (2, [(0, 0), (4, 0)]), (3, [(0, 0), (1, 1), (4, 0)]), (7, list(enumerate([0, 1, 2, 3, 0, 1, 2])))],
)
def test_small_world_uses_ranks_on_every_host(world_size: int, places: list[tuple[int, int]]) -> None:
    slots = [link(rank, rank // 4) for rank in range(8)]

    assert [(slot.hello.rank, local) for slot, local, _, _ in spread(slots, world_size)] == places


def test_clock_difference_is_computed_from_the_quickest_reply() -> None:
    slot, now_s = link(0), time.monotonic()
    slot.hear_beat(messages.Beat(now_s, now_s + 1000))
    slot.hear_beat(messages.Beat(now_s - 5, now_s + 1000))

    assert slot.offset_s == pytest.approx(-1000, abs=0.1)


@dataclass
class Hosts:
    """Two hosts that are this machine, and what runs there."""

    pool: Pool
    hub: RunHub
    relays: list[Relay]
    slots: list[subprocess.Popen[bytes]]
    folder: Path


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    folder = tmp_path_factory.mktemp("hosts")
    with RunHub(("127.0.0.1", 0), SECRET.encode()) as hub:
        relays = [Relay(hub.port), Relay(hub.port)]
        with (
            slots_of(hub, relays, EQUIVTEST_TEST_FOLDER=str(folder)) as slots,
            Pool(visit=VISIT, hub=hub.path) as pool,
        ):
            yield Hosts(pool, hub, relays, slots, folder)
        for relay in relays:
            relay.close()


def ran_pids(hosts: Hosts) -> list[int]:
    """The process ids of two ranks that have answered."""
    replies = hosts.pool.run("trivial", TWO)
    return [int(reply.answers[0].tensors["output"].local.item()) for reply in replies]


@pytest.mark.ranks
def test_ranks_on_other_hosts_run_collectives_and_reply(hosts: Hosts) -> None:
    replies = hosts.pool.run("counts", TWO)
    large = hosts.pool.run("large", PlainCase(world_size=2, numel=limits.SHARED_BYTES))

    assert [reply.answers[0].tensors["output"].local.item() for reply in replies] == [2, 2]
    assert large[1].answers[0].tensors["output"].local[-1].item() == limits.SHARED_BYTES


@pytest.mark.ranks
def test_message_names_the_host_of_a_killed_rank(hosts: Hosts) -> None:
    cause = first_cause(hosts.pool.run("killed", PlainCase(world_size=2, culprit=1)))

    assert cause is not None and (cause.rank, cause.outcome) == (1, "lost")
    assert cause.error_text.startswith("killed by SIGKILL (process ")
    assert f"on {socket.gethostname()} (127.0.0.1))" in cause.error_text


def taken_deaths(hosts: Hosts) -> list[str]:
    """Returns the deaths reported within some seconds."""
    until_s, deaths = time.monotonic() + 10, []
    while not deaths and time.monotonic() < until_s:
        deaths = hosts.pool.take_deaths()
        time.sleep(0.02)
    return deaths


@pytest.mark.ranks
def test_message_names_the_host_of_a_rank_killed_between_two_cases(hosts: Hosts) -> None:
    """The next visit finds new ranks, so that no reply would tell of it."""
    pid = ran_pids(hosts)[1]
    os.kill(pid, signal.SIGKILL)
    deaths = taken_deaths(hosts)

    where = rf"rank 1 of 2 \(process {pid} on {re.escape(socket.gethostname())} \(127.0.0.1\)\) killed by SIGKILL "
    assert len(deaths) == 1 and re.match(where + "after it had answered, last trivial on PlainCase", deaths[0]), deaths
    assert pid not in ran_pids(hosts)


@pytest.mark.ranks
def test_host_lost_between_two_cases_is_not_reported_as_a_dead_rank(hosts: Hosts) -> None:
    """A rank elsewhere may end with it; the hub tells what was lost."""
    pids = ran_pids(hosts)
    os.kill(pids[0], signal.SIGKILL)
    hosts.relays[1].cut()
    event_with(hosts.hub, f"process {pids[1]} on ")
    assert not hosts.pool.take_deaths()
    assert not set(pids) & set(ran_pids(hosts))


@pytest.mark.ranks
def test_message_has_the_stacks_of_a_silent_rank_on_another_host(hosts: Hosts) -> None:
    replies = hosts.pool.run("hangs_in_collective", TWO, limit_s=0.5)

    assert [reply.outcome for reply in replies] == ["answered", "timed_out"]
    assert "in hangs_in_collective" in replies[1].detail and "rank 1 is process " in replies[1].detail


@pytest.mark.ranks
def test_collectives_recorded_on_another_host_are_sent_in_messages(hosts: Hosts, tmp_path: Path) -> None:
    """Its host shares no files: whose fault a failure is would be unknown."""
    hosts.pool.watch("counts", TWO, str(tmp_path), limit_s=20)

    assert [[event.kind for event in read_events(tmp_path, rank)][:1] for rank in (0, 1)] == [["all_reduce"]] * 2


@pytest.mark.ranks
def test_case_during_which_a_host_is_lost_runs_again(hosts: Hosts) -> None:
    busy: list[int] = []

    def cut() -> None:
        while len(busy) < 2:
            busy[:] = [int(path.name) for path in hosts.folder.iterdir()]
        hosts.relays[1].cut()
        event_with(hosts.hub, "was lost, with rank 1 ")
        (hosts.folder / "go on").touch()

    cutting = threading.Thread(target=cut)
    cutting.start()
    replies = hosts.pool.run("waits", TWO)
    cutting.join()

    pids = [int(reply.answers[0].tensors["output"].local.item()) for reply in replies]
    assert not set(pids) & set(busy)
    assert not any(map(psutil.pid_exists, busy))
    assert f"slot 1 (process {hosts.slots[1].pid} on " in event_with(hosts.hub, "was lost, with rank 1 ")
