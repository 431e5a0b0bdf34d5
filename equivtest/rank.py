"""`torchrun ... -m equivtest.rank --connect HOST:PORT`: reserves a place on this host for ranks of a run elsewhere."""

from __future__ import annotations

import argparse
import os
import sys

from equivtest.errors import EquivtestError
from equivtest.ranks.hosts.hub_messages import parse_address
from equivtest.ranks.hosts.secret import FILE_VARIABLE, VARIABLE, read_secret
from equivtest.ranks.hosts.slot import keep_slot


def main() -> int:
    """Runs a slot.  Returns 0 after a run, and 2 if there was no run or the run rejected this host."""
    parser = argparse.ArgumentParser(prog="torchrun ... -m equivtest.rank", description=__doc__)
    parser.add_argument("--connect", metavar="HOST:PORT", required=True, help="the address of equivtest run --listen")
    try:
        address = parse_address(parser.parse_args().connect, "--connect")
        secret = read_secret()
        for name in (VARIABLE, FILE_VARIABLE):
            os.environ.pop(name, None)
        return keep_slot(address, secret)
    except EquivtestError as error:
        print(f"equivtest: {error}", file=sys.stderr)  # noqa: T201
        return 2


if __name__ == "__main__":
    sys.exit(main())
