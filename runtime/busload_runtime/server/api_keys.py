"""API keys: a file of names and hashes, and whose key a request carries.

A line is `NAME:HASH` or `NAME:HASH:WEIGHT`; empty lines and lines that begin with # are skipped. The hash is the
SHA-256 of the key in hex (`printf %s "$KEY" | sha256sum`): whoever reads the file, a backup of it or the Secret that it
comes from cannot use what they find, as long as keys are drawn at random (`openssl rand -hex 32`). Two lines may have
one name: the old key and the new one, while clients change over. The name is the tenant; weights say how tenants share
the engine.
"""

import hashlib
import hmac
import re
from dataclasses import dataclass
from pathlib import Path

from busload_runtime.server.errors import ApiError, StartupError
from busload_runtime.server.small_file import read_small_file
from busload_runtime.server.tenants import Tenant

MAX_BYTES = 2**18
MAX_KEYS = 1000
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_HASH = re.compile(r"[0-9a-fA-F]{64}")
_WEIGHTS = (0.01, 100.0)
_SCHEME = "bearer "


class KeysError(ValueError):
    """A keys file that cannot be used. The message names the line, and never what is in a hash's place: it may be a
    key."""


@dataclass(frozen=True, slots=True)
class ApiKeys:
    """The keys in force."""

    entries: tuple[tuple[bytes, Tenant], ...]
    """SHA-256 of a key, and whose it is."""

    @property
    def tenants(self) -> int:
        return len({tenant.name for _, tenant in self.entries})

    def owner(self, authorization: str | None) -> Tenant:
        """Whose key the value of an Authorization header carries. Raises `ApiError` 401."""
        if authorization is None or authorization[: len(_SCHEME)].lower() != _SCHEME:
            raise _unauthorized("this server needs an API key; send it as: Authorization: Bearer KEY")
        key = authorization[len(_SCHEME) :].strip().encode("latin-1", "replace")  # the bytes that came
        digest, found = hashlib.sha256(key).digest(), None
        for known, tenant in self.entries:  # all of them, so that the time does not tell which one it was
            if hmac.compare_digest(known, digest):
                found = tenant
        if found is None:
            raise _unauthorized("this API key is not valid here; check it, or ask for a new one")
        return found


def first_keys(path: Path) -> ApiKeys:
    """The keys to start with. Raises `StartupError`: there is no last good file, and to serve everybody or nobody
    would hide the mistake."""
    try:
        return parse_keys(read_small_file(path, MAX_BYTES))
    except OSError as error:
        raise StartupError(
            f"--api-keys-file {path} cannot be read: {error.strerror}; mount it or drop the flag"
        ) from None
    except KeysError as error:
        raise StartupError(f"--api-keys-file {path}: {error}") from None


def parse_keys(content: bytes) -> ApiKeys:
    """The keys of a file. Raises `KeysError`."""
    if len(content) > MAX_BYTES:
        raise KeysError(f"the file is larger than {MAX_BYTES} bytes")
    try:
        lines = content.decode("utf-8-sig").splitlines()  # some editors begin files with a mark
    except UnicodeDecodeError as error:
        raise KeysError(f"the file is not UTF-8: {error.reason} at byte {error.start}") from None
    weights: dict[str, float] = {}
    names: dict[bytes, str] = {}
    for number, line in enumerate(map(str.strip, lines), 1):
        if not line or line.startswith("#"):
            continue
        name, digest, weight = _parse_line(line, f"line {number}")
        if digest in names:
            raise KeysError(f"line {number}: this key is in the file already, as {names[digest]}")
        if weights.setdefault(name, weight) != weight:
            raise KeysError(f"line {number}: {name} has weight {weights[name]:g} further up, and here {weight:g}")
        names[digest] = name
    if not 0 < len(names) <= MAX_KEYS:
        raise KeysError(f"the file has {len(names)} keys; it needs at least 1 and may have {MAX_KEYS}")
    bounded = len(weights) > 1
    owners = {name: Tenant(f"key:{name}", name, weight, bounded) for name, weight in weights.items()}
    return ApiKeys(tuple((digest, owners[name]) for digest, name in names.items()))


def _parse_line(line: str, where: str) -> tuple[str, bytes, float]:
    parts = line.split(":")
    if len(parts) not in (2, 3):
        raise KeysError(f"{where}: a line is NAME:HASH or NAME:HASH:WEIGHT, this one has {len(parts)} parts")
    name, digest = parts[0].strip(), parts[1].strip()
    if not _NAME.fullmatch(name):
        raise KeysError(f"{where}: a name has 1 to 63 letters, digits, dots, hyphens and underscores")
    if not _HASH.fullmatch(digest):
        raise KeysError(
            f"{where}: the hash of {name} must be the 64 hex digits of the key's SHA-256 "
            f'(printf %s "$KEY" | sha256sum), and has {len(digest)} characters'
        )
    try:
        weight = float(parts[2]) if len(parts) == 3 else 1.0
    except ValueError:
        weight = 0.0
    low, high = _WEIGHTS
    if not low <= weight <= high:  # NaN neither
        raise KeysError(f"{where}: the weight of {name} must be a number from {low:g} to {high:g}")
    return name, bytes.fromhex(digest), weight


def _unauthorized(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", reason="unauthorized")
