"""Accounts by API key or address, with their rate limits and permissions.

A tenant is one API key, or, on a server without keys, one client address. Limits count
`RequestWork`: completions, and the tokens that they may come to. A limit by the minute is a token
bucket: it holds one minute's worth, fills evenly, and must hold what a request takes.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import ipaddress
import os
import re
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from octavo.base.errors import ConfigError, InvalidRequestError, RequestError
from octavo.core.limits import QueueLimits, RequestWork
from octavo.server.settings import ServerSettings
from octavo.system.child_process import ADMIN_KEY_VARIABLE, KEY_VARIABLE

MAX_OPEN_TENANTS = 4096  # addresses whose buckets an open server remembers

Clock = Callable[[], float]

_ONE = RequestWork(1, 0)
_NO_LIMITS = QueueLimits()


class RateLimitError(RequestError):
    """A tenant is over one of its limits.

    Args:
        reason: "rate_requests", "rate_tokens", "concurrency" or "work_of_key".
        retry_after: seconds until the same request may pass.
    """

    def __init__(self, reason: str, retry_after: float):
        super().__init__(f"{_LIMITS[reason]}; try again in {max(retry_after, 0.1):.1f} s")
        self.reason = reason
        self.retry_after = retry_after


_LIMITS = {
    "rate_requests": "the limit of requests a minute is reached",
    "rate_tokens": "the limit of tokens a minute is reached",
    "concurrency": "too many requests at once, counted by completion",
    "work_of_key": "too many tokens at once, of prompts and of answers as long as they may become",
}


class TokenBucket:
    """A token bucket that lets ``per_minute`` through in a minute, and as much at once after a
    quiet one."""

    def __init__(self, per_minute: float, clock: Clock):
        self.capacity = max(per_minute, 1.0)
        self._rate = per_minute / 60  # a second
        self._clock = clock
        self._level = self.capacity
        self._level_time = clock()

    def take(self, amount: float) -> float:
        """Take ``amount`` and return 0.0, or take nothing and return the seconds to wait."""
        now = self._clock()
        self._level = min(self.capacity, self._level + (now - self._level_time) * self._rate)
        self._level_time = now
        missing = amount - self._level
        if missing > 1e-6:  # less is the rounding of many small refills
            return missing / self._rate
        self._level -= amount
        return 0.0

    def put_back(self, amount: float) -> None:
        self._level = min(self.capacity, self._level + amount)


class Tenant:
    """One account, with its limits and what is charged to it.

    Args:
        name: short, and safe for logs.
        salt: requests share cached prefixes only within the same salt.
        limits: of the work that it may have at once, waiting and running.
        weight: in fair queuing, while others wait too.
        requests, tokens: buckets of its limits by the minute, if it has any.
        priority_range: how far from 0 the priorities of its requests may be.
    """

    def __init__(
        self,
        name: str,
        salt: str = "",
        *,
        limits: QueueLimits = _NO_LIMITS,
        weight: float = 1.0,
        requests: TokenBucket | None = None,
        tokens: TokenBucket | None = None,
        priority_range: int = 0,
    ):
        self.name = name
        self.salt = salt
        self.weight = weight
        self.num_running = 0
        # Of running requests; one whose body is not read yet counts as one sample.
        self._work = RequestWork(0, 0)
        self._limits = limits
        self._requests = requests
        self._tokens = tokens
        self._priority_range = priority_range

    def priority_of(self, asked: int | None) -> int:
        """Return the priority that a request gets, given the one that it asks for."""
        return max(-self._priority_range, min(asked or 0, self._priority_range))

    def begin_request(self) -> None:
        """Charge a request, as one completion; `end_request` must follow when its answer is over.

        Raises:
            RateLimitError: nothing was charged.
        """
        self._check_work(_ONE)
        if self._requests is not None and (wait := self._requests.take(1)):
            raise RateLimitError("rate_requests", wait)
        self.num_running += 1
        self._work = self._work.plus(_ONE)

    def end_request(self) -> None:
        self.num_running -= 1
        self._work = self._work.minus(_ONE)

    def begin_work(self, work: RequestWork) -> None:
        """Charge all the work of a request, of which one completion is charged already.

        `end_work` must follow.

        Raises:
            RateLimitError: it is too much beside what runs already; nothing was charged.
            InvalidRequestError: it is over the tenant's limits in any case.
        """
        self._limits.check(work)
        more = work.minus(_ONE)
        self._check_work(more)
        self._work = self._work.plus(more)

    def end_work(self, work: RequestWork) -> None:
        self._work = self._work.minus(work.minus(_ONE))

    def _check_work(self, more: RequestWork) -> None:
        after, limits = self._work.plus(more), self._limits
        if limits.max_requests is not None and after.samples > limits.max_requests:
            raise RateLimitError("concurrency", 1.0)
        if limits.max_tokens is not None and after.tokens > limits.max_tokens:
            raise RateLimitError("work_of_key", 1.0)

    def charge_tokens(self, num_tokens: int) -> None:
        """Charge the tokens that a request may use: its prompt, and all that it may generate.

        Raises:
            RateLimitError: the bucket has too few now; nothing was charged.
            InvalidRequestError: it can never have so many.
        """
        if self._tokens is None:
            return
        if num_tokens > self._tokens.capacity:
            raise InvalidRequestError(
                f"the request may use {num_tokens} tokens, more than the limit of "
                f"{self._tokens.capacity:g} a minute; lower max_tokens or shorten the prompt"
            )
        if wait := self._tokens.take(num_tokens):
            raise RateLimitError("rate_tokens", wait)

    def refund_tokens(self, num_tokens: int) -> None:
        """Give back tokens that were charged and not used."""
        if self._tokens is not None:
            self._tokens.put_back(num_tokens)


class Tenants:
    """All tenants. Keys are kept as digests only.

    Keys come from ``api_key``, from the lines of ``api_key_file``, which may give them weights, and
    from the environment variable ``OCTAVO_API_KEY``. Without any, the server is open.

    Raises:
        ConfigError: the key file cannot be read or holds no key, or the variable is empty. It is
            never taken to mean an open server.
    """

    def __init__(self, settings: ServerSettings, clock: Clock = time.monotonic):
        self._settings = settings
        self._clock = clock
        # Known to this process only, so that salts reveal nothing about keys, and change with it.
        secret = secrets.token_bytes(32)
        self._by_digest: dict[bytes, Tenant] = {}
        for key, weight in _configured_keys(settings):
            digest = _digest(key.encode())
            salt = hmac.digest(secret, digest, "sha256").hex()
            name = f"key-{len(self._by_digest) + 1}"
            self._by_digest.setdefault(digest, self._create_tenant(name, salt, weight))
        self._by_address: OrderedDict[str, Tenant] = OrderedDict()  # least recently used first
        self._operator = Tenant("operator", secrets.token_hex(32))
        admin_digests = [_digest(key.encode()) for key in _admin_keys(settings)]
        self._admins = dict.fromkeys(admin_digests, self._operator)

    @property
    def is_open(self) -> bool:
        """True if requests need no key."""
        return not self._by_digest

    @property
    def num_running(self) -> int:
        """Number of requests of all tenants that are not over."""
        tenants = (*self._by_digest.values(), *self._by_address.values(), self._operator)
        return sum(tenant.num_running for tenant in tenants)

    def authenticate(self, authorization: str | None, client_host: str | None) -> Tenant | None:
        """Return the tenant of an ``Authorization`` header, None if its key is wrong or missing.

        A key comes as ``Bearer KEY``, or as the password of ``Basic`` with any user name, which
        is what a browser can ask its user for. An admin key may do all that other keys may.
        """
        digest = _digest(_presented_key(authorization))
        if admin := _tenant_of(digest, self._admins):
            return admin
        if self.is_open:
            return self.from_address(client_host)
        return _tenant_of(digest, self._by_digest)

    def is_operator(self, tenant: Tenant) -> bool:
        """True if a tenant may see what concerns all others.

        These are tenants with an admin key, and all tenants of a server without any keys.
        """
        if self._admins:
            return tenant is self._operator
        return self.is_open

    def from_address(self, client_host: str | None) -> Tenant:
        """Return the tenant of a client without a key, and remember its address."""
        name = network_of(client_host)
        tenant = self._by_address.pop(name, None)
        if tenant is None:
            self._forget_oldest()
            tenant = self._create_tenant(name, "")
        self._by_address[name] = tenant
        return tenant

    def _forget_oldest(self) -> None:
        if len(self._by_address) < MAX_OPEN_TENANTS:
            return
        for name, tenant in self._by_address.items():
            if not tenant.num_running:  # there are fewer running ones than connections
                del self._by_address[name]
                return

    def _create_tenant(self, name: str, salt: str, weight: float = 1.0) -> Tenant:
        settings = self._settings

        def bucket(per_minute: float | None) -> TokenBucket | None:
            return None if per_minute is None else TokenBucket(per_minute, self._clock)

        return Tenant(
            name,
            salt,
            limits=QueueLimits(
                settings.max_concurrent_per_key,
                settings.max_work_per_key,
                are="waiting and running for one key",
            ),
            weight=weight,
            requests=bucket(settings.rate_limit_requests),
            tokens=bucket(settings.rate_limit_tokens),
            priority_range=settings.priority_range,
        )


def _tenant_of(digest: bytes, known: Mapping[bytes, Tenant]) -> Tenant | None:
    """Return the tenant whose key has this digest, if there is one."""
    found = None
    for each, tenant in known.items():
        # No way out of this loop: its time must not tell how many keys were compared.
        if hmac.compare_digest(each, digest):
            found = tenant
    return found


def _admin_keys(settings: ServerSettings) -> list[str]:
    keys = [key.strip() for key in settings.admin_key]
    return [*keys, *_variable_keys(ADMIN_KEY_VARIABLE, "set a key, or unset it")]


def _configured_keys(settings: ServerSettings) -> list[tuple[str, float]]:
    """Return keys, with their weights in fair queuing."""
    keys = [(key.strip(), 1.0) for key in settings.api_key]
    if settings.api_key_file is not None:
        keys += _file_keys(Path(settings.api_key_file))
    remedy = "set a key, or unset it to serve openly"
    return keys + [(key, 1.0) for key in _variable_keys(KEY_VARIABLE, remedy)]


def _variable_keys(variable: str, remedy: str) -> list[str]:
    """Return the key in an environment variable, if that is set. ConfigError if it is set and
    empty."""
    key = os.environ.get(variable)
    if key is None:
        return []
    if not key.strip():
        raise ConfigError(f"{variable} is empty: {remedy}")
    return [key.strip()]


def _file_keys(path: Path) -> list[tuple[str, float]]:
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"api_key_file {path} cannot be read: {reason}") from None
    keys = []
    for number, line in enumerate(lines, 1):
        if written := re.split(r"(?:^|\s)#", line)[0].strip():
            keys.append(_weighted_key(written, f"api_key_file {path}, line {number}"))
    if not keys:
        raise ConfigError(f"api_key_file {path} holds no key: write one a line")
    return keys


def _weighted_key(written: str, where: str) -> tuple[str, float]:
    """Return the key and the weight of ``KEY`` or ``KEY weight=2``."""
    match = re.fullmatch(r"(\S.*?)\s+weight=(\S*)", written)
    if match is None:
        return written, 1.0
    try:
        weight = float(match[2])
    except ValueError:
        weight = 0.0
    if not 0.001 <= weight <= 1000:
        raise ConfigError(f"{where}: weight must be a number from 0.001 to 1000, not {match[2]!r}")
    return match[1], weight


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _presented_key(authorization: str | None) -> bytes:
    """Return the key in a header, b"" if there is none. Headers are bytes that were read as
    Latin-1."""
    scheme, _, credentials = (authorization or "").strip().partition(" ")
    key = credentials.strip().encode("latin-1", "replace")
    match scheme.lower():
        case "bearer":
            return key
        case "basic":
            try:
                return base64.b64decode(key, validate=True).partition(b":")[2]
            except binascii.Error:
                return b""
    return b""


def address_of(scope: Mapping[str, Any]) -> str:
    """Return the address of a request's client, as `network_of` does."""
    client = scope.get("client")
    return network_of(client[0] if client else None)


def network_of(host: str | None) -> str:
    """Return an address for accounting: for IPv6 its /64 network, which one client controls."""
    try:
        address = ipaddress.ip_address(host or "")
    except ValueError:
        return "local"
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((int(address), 64), strict=False))
