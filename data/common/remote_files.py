"""Reads files in object stores, which have URLs, through fsspec without a local copy."""

import re
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from .errors import DataError, reported, required_package
from .fields import require
from .hashing import digest

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

# The fields that may indicate the version of a file in an object store.
_VERSIONS = ("size", "ETag", "Content-MD5", "Digest", "Last-Modified")
_URL = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)


def is_url(name: str) -> bool:
    """Returns whether a name begins with a protocol, as in ``gs://bucket/a.txt``."""
    return _URL.match(name) is not None


@dataclass(frozen=True, order=True)
class RemoteFile:
    """A file in an object store.

    Attributes:
      url: The URL of the file, such as ``s3://bucket/a.txt.gz``.
    """

    url: str

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        """The last part of the URL."""
        return PurePosixPath(self.url).name

    @property
    def suffix(self) -> str:
        """The suffix of the name, with its dot."""
        return PurePosixPath(self.url).suffix

    @property
    def version(self) -> str:
        """A hash of the file's size and, if the store provides them, its time and version.

        Raises:
          DataError: The file cannot be read.
        """
        with _named(self.url):
            system, path = _file_system(self.url)
            # Over HTTP, `ukey` is a hash of only the URL, so hash more fields.
            facts = cast("dict[str, object]", system.info(path))
            return digest([str(system.ukey(path)), *(str(facts.get(x)) for x in _VERSIONS)])

    def open(self, mode: str = "rb") -> BinaryIO:
        """Opens the file; reading requests only the required byte ranges.

        Raises:
          DataError: The file cannot be read, or the package of its protocol is missing.
        """
        with _named(self.url):
            system, path = _file_system(self.url)
            return cast(BinaryIO, system.open(path, mode))


def matching_urls(pattern: str) -> list[RemoteFile]:
    """Returns the files that match a URL or a glob, in sorted order; the list may be empty.

    Raises:
      DataError: The store cannot be read, or the package of its protocol is missing.
    """
    with _named(pattern):
        system, path = _file_system(pattern)
        # A file name may contain [ ] * ?, so look for a file with this exact name first.
        is_file = cast(bool, system.isfile(path))
        paths = [path] if is_file else cast(list[str], system.glob(path))
        # fsspec returns paths without a protocol, so add it again.
        return sorted(RemoteFile(str(system.unstrip_protocol(x))) for x in paths)


def is_remote_folder(url: str) -> bool:
    """Returns whether a URL names a folder.

    Raises:
      DataError: See ``matching_urls``.
    """
    with _named(url):
        system, path = _file_system(url)
        return cast(bool, system.isdir(path))


def _file_system(url: str) -> "tuple[AbstractFileSystem, str]":
    # Import late, because local files do not need fsspec.
    import fsspec
    from fsspec.registry import known_implementations

    known = cast("dict[str, dict[str, Any]]", known_implementations)
    protocol = url.partition("://")[0].lower()
    require(
        protocol in known or protocol in fsspec.available_protocols(),
        f"the protocol of {url!r} must be one that fsspec knows, such as gs, s3, az, https or "
        f"file, got {protocol!r}",
        DataError,
    )
    # The registry contains the import path of a class, which begins with the package.
    package = known.get(protocol, {"class": protocol})["class"].partition(".")[0]
    with required_package(package, f"reading {url!r}", f"pip install {package}"):
        return fsspec.core.url_to_fs(url)


def _named(url: str) -> AbstractContextManager[None]:
    """Reports any exception as an error with the URL, because stores raise many types."""
    remedy = "check the name, the network and the credentials"
    return reported(f"cannot read {url!r}", remedy, Exception)
