"""Replaces mpiexec while the processes of an MPI job join: started as a program, it serves them PMI-1 and ends.

The processes run already, so mpiexec cannot start them.  Each finds the address of this server in PMI_PORT
and its number in PMI_ID, and becomes a process of one COMM_WORLD by MPI_Init.

Source: MPICH, src/pmi/src/pmi_v1.c, for the messages; that these suffice was seen with MPICH 5.0.2.
"""

from __future__ import annotations

import socket
import sys
import threading


class Job:
    """The keys, values and barriers of one job's processes.

    Args:
        name: No other job on this machine may have it: MPICH names its shared memory after it.
    """

    def __init__(self, name: str, size: int) -> None:
        self._name, self._size = name, size
        self._found = {"PMI_process_mapping": f"(vector,(0,1,{size}))"}  # all on one host
        self._barrier = threading.Barrier(size)

    def serve(self, connection: socket.socket) -> None:
        """Answers one process until it hangs up; only MPI_Init asks."""
        with connection, connection.makefile("r") as lines:
            for line in lines:
                connection.sendall("".join(f"{answer}\n" for answer in self._answers(line.strip())).encode())

    def _answers(self, line: str) -> list[str]:
        words = dict(word.split("=", 1) for word in line.split(" ") if "=" in word)
        command, key = words.get("cmd", ""), words.get("key", "")
        match command:
            case "initack":
                settings = {"size": self._size, "rank": words["pmiid"], "debug": 0}
                return ["cmd=initack rc=0", *(f"cmd=set {name}={value}" for name, value in settings.items())]
            case "put":
                self._found[key] = line.partition(" value=")[2]
                return ["cmd=put_result rc=0 msg=success"]
            case "get":
                found = self._found.get(key)
                return [f"cmd=get_result rc={-1 if found is None else 0} msg=- value={found or ''}"]
            case "barrier_in":
                self._barrier.wait()
        return [_ALWAYS[command].format(name=self._name, size=self._size)]


_ALWAYS = {
    "init": "cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0",
    "get_maxes": "cmd=maxes kvsname_max=256 keylen_max=64 vallen_max=1024",
    "get_appnum": "cmd=appnum appnum=0",
    "get_my_kvsname": "cmd=my_kvsname kvsname={name}",
    "get_universe_size": "cmd=universe_size size={size}",
    "barrier_in": "cmd=barrier_out",
    "finalize": "cmd=finalize_ack rc=0",
}


def main(name: str, size: int) -> None:
    """Prints its port and serves as many processes, until standard input is closed."""
    job, listener = Job(name, size), socket.create_server(("127.0.0.1", 0), backlog=size)
    print(listener.getsockname()[1], flush=True)  # noqa: T201

    def accept() -> None:
        while True:
            threading.Thread(target=job.serve, args=(listener.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
