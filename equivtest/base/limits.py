"""Defines every time limit and size bound, with its unit and the reason for its value."""

from __future__ import annotations

# Time, in seconds.  A limit only ends what would hang; a slow machine must stay below it.
CASE_S = 60.0  # one visit of one case on all ranks, unless its property says otherwise; the slowest shipped one takes 2
GRACE_S = 0.5  # after the first rank failed, for its peers to answer; they wait inside a collective
START_S = 120.0  # a world's start, from the request to every rank's first message; cold imports take 10
EXECUTE_S = 5.0  # added for each rank that starts a new interpreter: importing torch takes 3 of one core
FORK_S = 15.0  # a backward of four elements in a process that was just forked; takes 0.01
STOP_S = 2.0  # for ranks to end when a pool closes, before they are killed
UNLOCK_S = 0.3  # for the kernel to release the locks of a process that ends; takes microseconds
STACKS_S = 0.8  # for the stacks of a hanging rank to be written; they take 0.1
REFUSAL_GRACE_S = 15.0  # GRACE_S if every rank should raise: none waits for another, and some are slow
PROBE_S = 15.0  # a collective of a few elements on ranks that have just answered; takes 0.01
PROBE_GRACE_S = 2.0  # after the first rank failed in a probe: the others fail at once too, or wait for it
SEND_S = 5.0  # for a rank to accept a message; it reads at once unless it hangs
WATCH_S = 0.2  # between a rank's checks of its C code's output size; Python's output is always bounded
SHRINK_S = 60.0  # one failure's shrinking; then the smallest case so far is reported
SETTLE_S = 0.1  # for the backend's threads to release a collective's buffers; they take microseconds
GIT_S = 5.0  # for git to name the commit of a folder; takes 0.05
AUDIT_CASE_S = 5.0  # one visit with a spoiled collective, instead of CASE_S: ranks that disagree may wait for ever
HOSTS_S = 300.0  # for all slots on other hosts to connect, first or again: a person may have to restart torchrun
RUN_S = 120.0  # for a slot to find its run, first or again
TOGETHER_S = 45.0  # for missing slots to connect, before torchrun has to restart all slots
RUN_AGAIN_S = 30.0  # RUN_S of a slot that torchrun has restarted: the run is there, or over
BEAT_S = 1.0  # between two signs of life of a connection to another host
SILENT_S = 10.0  # without a sign of life, after which a host is lost: longer than TCP takes to resend dropped packets
SLOW_S = 3.0  # without a sign of life, after which the run reports it
HANDSHAKE_S = 5.0  # for a peer to prove that it knows the secret; takes two round trips
FLUSH_S = 1.0  # for sending the last message to each host when a run is over
COLLECTIVE_S = 600.0  # the backend's own time-out, twice a property's largest limit: the parent names the cause

# Sizes.
MAX_WORLD_SIZE = 64  # ranks of one world, and slots of a run
MANY_RANKS = 8  # up to which PROBE_S is enough; more ranks wait for each other's cores
MAX_DIMS = 4  # of an activation
MAX_FEATURES = 4096  # of one dim of a case
MAX_NUMEL = 2**24  # elements of one tensor of a case: 128 MiB in float64
SHARED_BYTES = 2**20  # a reply's tensors beyond this go through a file in memory, not the pipe
OUTPUT_CHARS = 8_000  # of a rank's traceback, stacks or output kept in a verdict
OUTPUT_BYTES = 2**22  # of one rank's output that stay in memory; beyond it the file restarts
SCRATCH_BYTES = 2**30  # free in /dev/shm, else scratch uses the temporary directory; a container may have 64 MiB
RENDEZVOUS_BYTES = 2**17  # needed in a scratch directory; the rendezvous of 64 ranks has under 100 KiB
MAX_COLLECTIVES = 1_000  # recorded from one rank on one draw; a case of today makes fewer than a hundred
MESSAGE_BYTES = 2**20  # of a message between hosts, except messages of ranks
UNKNOWN_PEERS = 128  # simultaneous connections whose peers have not yet proved the secret; more are closed
MOST_EVENTS = 200  # losses, refusals and silences of hosts that a run reports
EVENT_CHARS = 500  # of one of them, which limits the ranks that it names
REASON_CHARS = 300  # of the reason why a program does not support a case
HOST_TRIES = 4  # attempts at one visit if hosts are lost during it
WATCHED_BYTES = 2**26  # of one rank's notes on a watched visit; further operations are not judged
MAX_WORKERS = 999  # of pytest-xdist
MAX_WORLDS = 4  # worlds that one pool keeps alive; the least recently used one ends first

# Values from which strategies draw.
WORLD_SIZES = (1, 2, 3, 4)
SOAK_WORLD_SIZES = (1, 2, 3, 4, 5, 6, 7, 8)
DTYPES = ("float32", "float64", "bfloat16", "float16")

# Judging real values.
TOO_WIDE = 0.1  # median allowance over the root mean square of the right values: beyond it nothing is concluded
STILL_SHOWS = 0.5  # the same for values within a module: up to there a missing or doubled value is rejected
ZERO_BESIDE = 2.0**-17  # of the other gradients: the scale for a gradient that is zero except for roundings
LEAN = 9.0  # |sum of errors| over the root of their squares' sum: chance passes it once in 2e17 sums
LEAN_SKEW = 2.0**-4  # of the errors' sizes, by which they may also lean: `equivtest.verdicts.lean` derives it
LEAN_TERMS = 8  # products in a sum whose rounding errors prefer no sign; the error of one product may, in 16 bits

# Judging chance.
FALSE_ALARM = 1e-12  # probability that one draw of a right subject fails; a soak has 1e6 draws

# Search and shrinking.
SHRINK_CASE_S = 5.0  # one try while shrinking a time-out, instead of CASE_S
SHRINK_TRIES = 15  # cases tried in each smaller world before shrinking goes on in the failure's own world
BROKEN_RUNS = 5  # runs of one search without answers before the search ends early

# Audits.
AUDIT_CASES = 4  # of each world size that an audit draws; within a run it ends once it has seen every collective
AUDIT_LAST_CASES = 16  # of each world size, if AUDIT_CASES of each showed nothing
AUDIT_VISITS = 40  # with a spoiled collective in an audit within a run; `equivtest audit` has no such limit
AUDIT_CALLS = 6  # of one kind, in one phase and group of one visit, that an audit spoils: first, last, of each size

# Captured runs.
CAPTURED_BYTES = 2**30  # that one rank writes by default
CAPTURED_SIZE = 2**40  # that a dim, a rank or a file in bytes stays below: no machine has more
CAPTURED_DIMS = 8  # of a captured tensor
HEADER_BYTES = 2**26  # of the header of a file of tensors, enough for some hundred thousand tensors
MANIFEST_BYTES = 2**27  # of a manifest for so many tensors
NAME_CHARS = 500  # of a name in a header or a manifest
OTHER_FILES = 100  # of a folder without a captured run, searched for a log of DebugMode
OTHER_BYTES = 2**16  # of such a file; a log of DebugMode has an operator in its first lines


def in_proportion(short_s: float, limit_s: float) -> float:
    """Returns a shortened time limit, in seconds, for cases whose own limit is `limit_s`.

    `short_s` is the shortened limit for cases whose own limit is CASE_S. It grows in proportion for cases with a longer
    limit, but never beyond `limit_s`.
    """
    return min(limit_s, short_s * max(1.0, limit_s / CASE_S))


def on_many_ranks(limit_s: float, world_size: int) -> float:
    """Returns a time limit, in seconds, that grows in proportion to the ranks beyond MANY_RANKS.

    Gloo's reduce_scatter of a list makes one reduction per rank, and each reduction sends messages between all ranks.
    The probe of this collective takes 26 s of processor time on 64 ranks (torch 2.13.0).
    """
    return limit_s * max(1.0, world_size / MANY_RANKS)
