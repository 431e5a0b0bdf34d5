"""Reads and writes a bag in a zip file: the layout of BagIt, with a SHA-256 of each file (RFC 8493).

A reader gets only bytes. The module extracts no file, follows no link and fetches nothing.
"""

from __future__ import annotations

import hashlib
import io
import re
import stat
import struct
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from equivtest.base.files import write_whole
from equivtest.errors import BrokenSetup, Misuse, reason_of, shorten

DECLARATION = b"BagIt-Version: 1.0\nTag-File-Character-Encoding: UTF-8\n"
INFO, MANIFEST, TAGS = "bag-info.txt", "manifest-sha256.txt", "tagmanifest-sha256.txt"
PAYLOAD = "data/"

MOST_BYTES = 512 << 20
"""Largest size of all files of a bundle together, uncompressed.  A conformance run has about a tenth of it."""
MOST_FILES = 10_000
DATE = (1980, 1, 1, 0, 0, 0)
"""Date of each entry of the zip file.  It is always the same, so that equal files make equal bundles."""

_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)+")
_LINE = re.compile(r"([0-9a-f]{64})  ([^\s]+)")
_BROKEN = (
    zipfile.BadZipFile, zlib.error, struct.error, NotImplementedError, RuntimeError, EOFError, OSError, ValueError,
    IndexError, OverflowError,
)  # fmt: skip
"""Exceptions that zipfile raises for a file that is no archive, or a damaged one (Python 3.11 to 3.14)."""


@dataclass(frozen=True)
class Bag:
    """The content of a bag.

    Attributes:
        payload: Path below data/ -> content.
        digest: SHA-256 of the list of checksums of BagIt's own files. The digest changes if any file changes, because
            one of BagIt's own files lists the checksums of all other files.
        altered: One line for each file whose content does not match its checksum.
    """

    payload: Mapping[str, bytes]
    digest: str
    altered: tuple[str, ...] = ()


def write_bag(path: Path, payload: Mapping[str, bytes], info: Mapping[str, str]) -> str:
    """Writes `payload` as a bag into a zip file, and returns its digest.  Raises BrokenSetup if that fails."""
    size = sum(map(len, payload.values()))
    listed = {f"{PAYLOAD}{name}": data for name, data in sorted(payload.items())}
    tags = {
        "bagit.txt": DECLARATION,
        INFO: _lines({**info, "Payload-Oxum": f"{size}.{len(payload)}"}),
        MANIFEST: _manifest(listed),
    }
    tags[TAGS] = _manifest(tags)
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in (tags | listed).items():
            file.writestr(zipfile.ZipInfo(f"bundle/{name}", DATE), data, zipfile.ZIP_DEFLATED)
    try:
        write_whole(path, archive.getvalue())
    except OSError as error:
        raise BrokenSetup(f"cannot write {path}: {reason_of(error)}") from error
    return _sha256(tags[TAGS])


def read_bag(path: Path) -> Bag:
    """Reads all files of a bag, with their checksums.  Raises Misuse if it is missing, is no bag, or is too large."""
    try:
        with path.open("rb") as stream, zipfile.ZipFile(stream) as archive:
            return _checked(_files_of(archive))
    except Misuse as error:
        raise Misuse(f"{shorten(str(path))} is not a bundle: {error}") from error
    except _BROKEN as error:
        reason = reason_of(error) if isinstance(error, OSError | ValueError) else str(error)
        raise Misuse(f"{shorten(str(path))} is not a bundle: {reason or type(error).__name__}") from error


def _files_of(archive: zipfile.ZipFile) -> dict[str, bytes | str]:
    """Returns the content of each file by its path in the bag, or the reason why a file cannot be read, as a string."""
    entries = [entry for entry in archive.infolist() if not entry.is_dir()]
    if len(entries) > MOST_FILES:
        raise Misuse(f"it has {len(entries):,} files, but a bundle has at most {MOST_FILES:,}")
    files: dict[str, bytes | str] = {}
    left = MOST_BYTES
    for entry in entries:
        _check_entry(entry)
        base, _, name = entry.filename.partition("/")
        if base != entries[0].filename.partition("/")[0]:
            raise Misuse(f"it has two folders at its top: {entries[0].filename!r} and {entry.filename!r}")
        if name in files:
            raise Misuse(f"it has the file {name!r} twice")
        files[name] = data = _content(archive, entry, left)
        left -= len(data)
    return files


def _check_entry(entry: zipfile.ZipInfo) -> None:
    if not _NAME.fullmatch(entry.filename):
        raise Misuse(f"{shorten(repr(entry.filename))} is not a path of a bundle, BASE/name or BASE/data/name")
    if stat.S_IFMT(entry.external_attr >> 16) not in (0, stat.S_IFREG):
        raise Misuse(f"{entry.filename!r} is not a regular file")
    if entry.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise Misuse(
            f"{entry.filename!r} is compressed by method {entry.compress_type}, but a bundle uses only deflate"
        )


def _content(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, left: int) -> bytes | str:
    """Returns the bytes of a file, or the reason, as a string, why the file cannot be read.

    The size in the zip file's directory may be wrong, so the bytes themselves are counted.

    Raises:
        Misuse: the file has more than `left` bytes.
    """
    try:
        with archive.open(entry) as stream:
            data = stream.read(left + 1)
    except _BROKEN as error:
        return f"cannot be read: {shorten(str(error)) or type(error).__name__}"
    if len(data) > left:
        raise Misuse(f"the files of the bundle have more than {MOST_BYTES >> 20} MiB together, which is the limit")
    return data


def _checked(files: Mapping[str, bytes | str]) -> Bag:
    whole = {name: data for name, data in files.items() if isinstance(data, bytes)}
    altered = [f"{name} {why}" for name, why in files.items() if isinstance(why, str)]
    for name in ("bagit.txt", INFO, MANIFEST, TAGS):
        if name not in files:
            raise Misuse(f"it has no {name}")
    if whole.get("bagit.txt", DECLARATION) != DECLARATION:
        altered.append("bagit.txt is not of BagIt 1.0 in UTF-8")
    tags = {name: data for name, data in whole.items() if not name.startswith(PAYLOAD) and name != TAGS}
    listed = {name: data for name, data in whole.items() if name.startswith(PAYLOAD)}
    unread = {name for name, data in files.items() if isinstance(data, str)}
    altered += _differences(whole.get(TAGS), TAGS, tags, unread)
    altered += _differences(whole.get(MANIFEST), MANIFEST, listed, unread)
    payload = {name.removeprefix(PAYLOAD): data for name, data in listed.items()}
    return Bag(payload, _sha256(whole.get(TAGS, b"")), tuple(altered))


def _differences(manifest: bytes | None, named: str, files: Mapping[str, bytes], unread: set[str]) -> list[str]:
    """Returns one line for each file that is missing, added, or differs from its checksum in a manifest.

    Args:
        named: Name of the manifest, for the lines.
        unread: Files of the bag that could not be read. These files do not count as missing.
    """
    if manifest is None:
        return []
    sums: dict[str, str] = {}
    for line in manifest.decode("utf-8", "replace").splitlines():
        match = _LINE.fullmatch(line)
        if match is None or match[2] in sums:
            return [f"{named} has a line that is not a checksum, or that repeats a file: {shorten(line)!r}"]
        sums[match[2]] = match[1]
    found = [f"{name} is missing: {named} lists it" for name in sums if name not in files and name not in unread]
    found += [f"{name} was added: {named} does not list it" for name in files if name not in sums]
    return found + [
        f"{name} does not match its checksum in {named}"
        for name, data in files.items()
        if name in sums and _sha256(data) != sums[name]
    ]


def _manifest(files: Mapping[str, bytes]) -> bytes:
    return "".join(f"{_sha256(data)}  {name}\n" for name, data in files.items()).encode()


def _lines(info: Mapping[str, str]) -> bytes:
    return "".join(f"{name}: {' '.join(text.split())}\n" for name, text in info.items()).encode()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
