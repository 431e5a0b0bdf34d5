"""The table of what claims see of clients' collectives."""

from __future__ import annotations

from pathlib import Path

from equivtest.report.audits import as_csv
from equivtest.report.handover import Audited, AuditRow
from studies.client_audit import in_short, read, table


def audited(name: str, *rows: tuple[str, str, int], reason: str = "") -> Audited:
    """(site, fault, visits that a claim rejected) of one property."""
    found = tuple(AuditRow(collective=site, fault=fault, runs=1, rejected=count) for site, fault, count in rows)
    return Audited(property=name, cases=1, rows=found, unseen=(), reason=reason, problem="", seconds=0.0)


def test_clients_that_call_equal_collectives_share_a_table_row(tmp_path: Path) -> None:
    forward, backward = "all_reduce in the forward", "all_reduce in the backward"
    both = ((forward, "own operand", 0), (forward, "another operand", 1), (backward, "own operand", 2))
    audits = [
        audited("second", *both),
        audited("first", *both),
        audited("alone", ("broadcast in the forward on tp", "dropped", 0)),
        audited("none", reason="no rank needs another"),
    ]
    (tmp_path / "audit.csv").write_text(as_csv(audits))

    assert table(read(tmp_path)).splitlines()[2:] == [
        "| all_reduce forward and backward |  | `first` `second` |",
        "|  | broadcast forward on tp | `alone` |",
        "| no rank needs another |  | `none` |",
    ]


def test_rejecting_only_a_dropped_result_does_not_show_that_ranks_are_needed(tmp_path: Path) -> None:
    (tmp_path / "audit.csv").write_text(as_csv([audited("it", ("all_gather in the forward", "dropped", 1))]))

    assert read(tmp_path)["it"].row == ("", in_short({"all_gather in the forward"}))
