"""Sends whole messages over a socket. A message is sent as its length and its bytes."""

from __future__ import annotations

import errno
import os
import socket
import weakref

_LENGTH_BYTES = 8
_CHUNK_BYTES = 2**20
_not_for_forks: weakref.WeakSet[socket.socket] = weakref.WeakSet()


class Channel:
    """One end of a two-way connection over which whole messages are sent.

    Args:
        end: A connected stream socket. The channel closes this socket.
        send_limit_s: Seconds for the other end to accept one message. If None, there is no limit.
    """

    def __init__(self, end: socket.socket, send_limit_s: float | None = None) -> None:
        self._end = end
        self._send_limit_s = send_limit_s
        self._received = bytearray()
        close_in_forks(end)

    def fileno(self) -> int:
        return self._end.fileno()

    def send(self, message: bytes) -> None:
        """Sends one message.

        Raises:
            OSError: the other end is gone, or did not accept the message within the limit.
        """
        self._end.settimeout(self._send_limit_s)
        self._end.sendall(len(message).to_bytes(_LENGTH_BYTES, "little") + message)  # one call: one wake-up

    def receive(self, limit_s: float | None = None) -> bytes:
        """Waits for the next message and returns it.

        Raises:
            EOFError: the other end is closed.
            OSError: no message came within `limit_s`.
        """
        while (message := self._take()) is None:
            self._end.settimeout(limit_s)
            self._fill()
        return message

    def receive_available(self) -> list[bytes]:
        """Returns the messages that have arrived completely, without waiting. The list may be empty.

        Raises:
            EOFError: the other end is closed and no message is left.
        """
        self._end.settimeout(0)
        closed = False
        try:
            while True:
                self._fill()
        except BlockingIOError:
            pass
        except EOFError:
            closed = True
        messages = []
        while (message := self._take()) is not None:
            messages.append(message)
        if closed and not messages:
            raise EOFError("the other end is closed")
        return messages

    def close(self) -> None:
        self._end.close()

    def _fill(self) -> None:
        try:
            received = self._end.recv(_CHUNK_BYTES)
        except OSError as error:  # TCP has other words for a peer that is gone
            if isinstance(error, BlockingIOError | TimeoutError) and error.errno != errno.ETIMEDOUT:
                raise
            received = b""
        if not received:
            raise EOFError("the other end is closed")
        self._received += received

    def _take(self) -> bytes | None:
        length = int.from_bytes(self._received[:_LENGTH_BYTES], "little")
        stop = _LENGTH_BYTES + length
        if len(self._received) < max(stop, _LENGTH_BYTES):
            return None
        message = bytes(self._received[_LENGTH_BYTES:stop])
        del self._received[:stop]
        return message


def close_in_forks(end: socket.socket) -> None:
    """Closes `end` in every child that this process forks from now on.

    If the child kept `end` open, the process at the other end would not notice the end of this process while the child
    lives.
    """
    _not_for_forks.add(end)


def _close_all() -> None:
    for end in list(_not_for_forks):
        end.close()


os.register_at_fork(after_in_child=_close_all)
