"""Reads the secret that a run shares with other hosts.

Two processes prove to each other that they know the secret.

Until a peer has proved this, none of its messages is decoded. Both sides only read a fixed number of bytes, within a
time limit. Each side answers a challenge of the other side. An answer is valid only for one side and one connection.
Later messages are neither encrypted nor signed. Source: HMAC, RFC 2104; the exchange has the purpose of RFC 4279, a
pre-shared key, without its encryption.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Generator
from pathlib import Path

from equivtest.errors import Misuse

VARIABLE = "EQUIVTEST_SECRET"
FILE_VARIABLE = "EQUIVTEST_SECRET_FILE"
FEWEST_BYTES = 16
"""Length of the shortest secret: a guess every millisecond for a thousand years does not find 16 random characters."""
_GREETING = b"equivtest ranks 1\n"
_NONCE_BYTES = 32
_PROOF_BYTES = hashlib.sha256().digest_size
_WAY_OUT = f"set {VARIABLE}, or {FILE_VARIABLE} to a file's path, here and on every host: openssl rand -hex 32"

Exchange = Generator[tuple[bytes, int], bytes, None]
"""A generator that yields (bytes to send, number of bytes to read next), and receives the bytes read."""


class NotTheSame(Exception):
    """Raised if the process on the other side does not know the secret, or is no process of equivtest."""


def read_secret() -> bytes:
    """Returns the secret from the environment, or from the file that the environment names.

    Raises:
        Misuse: there is no secret, or the secret is unreadable or too short.
    """
    text = os.environ.get(VARIABLE, "").encode()
    path = os.environ.get(FILE_VARIABLE, "")
    if not text and path:
        try:
            text = Path(path).read_bytes()
        except OSError as error:
            raise Misuse(f"{FILE_VARIABLE}: cannot read {path}: {error.strerror}") from error
    text = text.strip()
    if not text:
        raise Misuse(f"ranks on other hosts need a secret that both sides know: {_WAY_OUT}")
    if len(text) < FEWEST_BYTES:
        raise Misuse(f"the secret must have {FEWEST_BYTES} characters or more, got {len(text)}: {_WAY_OUT}")
    return text


def admitting(secret: bytes) -> Exchange:
    """Proves on the listening side that this process knows the secret, and checks the peer's proof.

    Raises:
        NotTheSame: the peer's proof is wrong.
    """
    nonce = secrets.token_bytes(_NONCE_BYTES)
    answer = yield _GREETING + nonce, _NONCE_BYTES + _PROOF_BYTES
    theirs, proof = answer[:_NONCE_BYTES], answer[_NONCE_BYTES:]
    if not hmac.compare_digest(proof, _proof(secret, b"connects", nonce, theirs)):
        yield bytes(_PROOF_BYTES), 0  # so that the other side notices
        raise NotTheSame("its secret is another one")
    yield _proof(secret, b"listens", nonce, theirs), 0


def introducing(secret: bytes) -> Exchange:
    """Proves on the connecting side that this process knows the secret, and checks the listener's proof.

    Raises:
        NotTheSame: the listener's proof is wrong, or the listener is no process of equivtest.
    """
    greeting = yield b"", len(_GREETING) + _NONCE_BYTES
    theirs = greeting[len(_GREETING) :]
    if not greeting.startswith(_GREETING):
        raise NotTheSame("the listener is no run of equivtest, or a run of another release")
    nonce = secrets.token_bytes(_NONCE_BYTES)
    proof = yield nonce + _proof(secret, b"connects", theirs, nonce), _PROOF_BYTES
    if not hmac.compare_digest(proof, _proof(secret, b"listens", theirs, nonce)):
        raise NotTheSame("the listener has another secret")


def _proof(secret: bytes, role: bytes, listens: bytes, connects: bytes) -> bytes:
    return hmac.digest(secret, b"\0".join((_GREETING, role, listens, connects)), "sha256")
