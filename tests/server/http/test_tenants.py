from __future__ import annotations

import base64
import math
import pickle
import random
import statistics
import time

import pytest

from octavo.base.errors import ConfigError, InvalidRequestError
from octavo.core.limits import RequestWork
from octavo.server.http.tenants import (
    MAX_OPEN_TENANTS,
    RateLimitError,
    Tenant,
    Tenants,
    TokenBucket,
)
from octavo.server.settings import ServerSettings
from octavo.system.child_process import KEY_VARIABLE


@pytest.fixture(autouse=True)
def no_key_in_the_environment(monkeypatch):
    monkeypatch.delenv(KEY_VARIABLE, raising=False)


class VirtualClock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def basic(user: str, password: str) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


# -- keys ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "header, name",
    [
        ("Bearer one", "key-1"),
        ("bearer  two ", "key-2"),
        (basic("anybody", "two"), "key-2"),
        (basic("", "one"), "key-1"),
        (basic("a", "one:with:colons"), "key-3"),
        (None, None),
        ("", None),
        ("one", None),
        ("Bearer", None),
        ("Bearer ", None),
        ("Bearer on", None),
        ("Bearer onee", None),
        ("Bearer ONE", None),
        ("Bearer one, Bearer two", None),
        ("Token one", None),
        ("Basic one", None),
        ("Basic !!!", None),
        (basic("one", ""), None),
        ("Bearer \u20ac", None),
    ],
)
def test_authenticate(header, name):
    tenants = Tenants(ServerSettings(api_key=("one", "two", "one:with:colons")))
    tenant = tenants.authenticate(header, "127.0.0.1")
    assert (tenant and tenant.name) == name
    assert not tenants.is_open


def test_keys_beyond_ascii_come_as_the_bytes_of_the_header():
    tenants = Tenants(ServerSettings(api_key=("schlüssel",)))
    assert tenants.authenticate("Bearer " + "schlüssel".encode().decode("latin-1"), None)


def test_keys_of_a_file_and_of_the_environment(tmp_path, monkeypatch):
    path = tmp_path / "keys"
    path.write_text("# ours\n\nalpha\n  beta   # of the lab\ngam#ma\n")
    monkeypatch.setenv(KEY_VARIABLE, "delta")
    tenants = Tenants(ServerSettings(api_key=("flag",), api_key_file=str(path)))
    names = [
        tenants.authenticate(f"Bearer {key}", None).name
        for key in ("flag", "alpha", "beta", "gam#ma", "delta")
    ]
    assert names == ["key-1", "key-2", "key-3", "key-4", "key-5"]
    assert tenants.authenticate("Bearer # ours", None) is None


@pytest.mark.parametrize("text", [b"", b"# only a comment\n\n", b"\xff\xfe"])
def test_a_key_file_without_keys_never_means_an_open_server(tmp_path, text):
    path = tmp_path / "keys"
    path.write_bytes(text)
    with pytest.raises(ConfigError, match="api_key_file"):
        Tenants(ServerSettings(api_key_file=str(path)))


def test_nor_does_a_missing_file_or_an_empty_variable(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="cannot be read"):
        Tenants(ServerSettings(api_key_file=str(tmp_path / "none")))
    monkeypatch.setenv(KEY_VARIABLE, " ")
    with pytest.raises(ConfigError, match=KEY_VARIABLE):
        Tenants(ServerSettings())


def test_the_same_key_twice_is_one_tenant():
    tenants = Tenants(ServerSettings(api_key=("one", "one", "two")))
    assert tenants.authenticate("Bearer two", None).name == "key-2"


def test_salts_differ_by_key_and_by_server_and_do_not_tell_the_key():
    settings = ServerSettings(api_key=("one", "two"))
    salts = {
        Tenants(settings).authenticate(f"Bearer {key}", None).salt
        for key in ("one", "two")
        for _ in range(2)
    }
    assert len(salts) == 4 and "" not in salts
    tenants = Tenants(settings)
    first = tenants.authenticate("Bearer one", "1.2.3.4")
    assert first is tenants.authenticate(basic("x", "one"), "5.6.7.8")


def test_keys_are_not_kept():
    tenants = Tenants(ServerSettings(api_key=()), clock=time.monotonic)
    keyed = Tenants(ServerSettings(api_key=("canary-4711",)))
    # All that authentication works with, without the settings, which the server owns.
    state = {**vars(keyed), "_settings": None, "_clock": None}
    assert b"canary-4711" not in pickle.dumps(state)
    assert tenants.is_open


def test_every_key_is_compared(monkeypatch):
    compared = []
    tenants = Tenants(ServerSettings(api_key=("one", "two", "three")))

    def compare(a: bytes, b: bytes) -> bool:
        compared.append(a)
        return a == b

    monkeypatch.setattr("octavo.server.http.tenants.hmac.compare_digest", compare)
    for header, name in (("Bearer one", "key-1"), ("Bearer three", "key-3"), ("x", None)):
        compared.clear()
        tenant = tenants.authenticate(header, None)
        assert (tenant and tenant.name) == name
        assert len(set(compared)) == 3


@pytest.mark.long  # wants a machine that does nothing else
def test_the_time_of_a_comparison_tells_nothing_of_the_key():
    """Welch's t between a key that is wrong in its first byte and one that is in its last."""
    key = "k" * 64
    tenants = Tenants(ServerSettings(api_key=(key,)))
    headers = ["Bearer x" + key[1:], "Bearer " + key[:-1] + "x"]
    samples: list[list[int]] = [[], []]
    rng = random.Random(0)
    for _ in range(200_000):
        which = rng.getrandbits(1)
        started = time.perf_counter_ns()
        tenants.authenticate(headers[which], None)
        samples[which].append(time.perf_counter_ns() - started)
    bound = statistics.quantiles(samples[0], n=20)[-2]  # interrupts are not of interest
    first, second = ([t for t in one if t < bound] for one in samples)
    spread = statistics.variance(first) / len(first) + statistics.variance(second) / len(second)
    t = (statistics.fmean(first) - statistics.fmean(second)) / math.sqrt(spread)
    assert abs(t) < 4.5


# -- open servers --------------------------------------------------------------------------------


def test_tenants_of_an_open_server_are_its_clients():
    tenants = Tenants(ServerSettings())
    tenant = tenants.authenticate(None, "10.0.0.1")
    assert (tenant.name, tenant.salt) == ("10.0.0.1", "")
    assert tenants.authenticate("Bearer whatever", "10.0.0.1") is tenant
    assert tenants.authenticate(None, "10.0.0.2") is not tenant
    assert tenants.authenticate(None, None).name == "local"
    assert tenants.authenticate(None, "evil\r\nname").name == "local"


def test_an_ipv6_client_is_its_network():
    tenants = Tenants(ServerSettings())
    tenant = tenants.authenticate(None, "2001:db8::1")
    assert tenant is tenants.authenticate(None, "2001:db8::ffff:2")
    assert tenant is not tenants.authenticate(None, "2001:db8:0:1::1")
    assert tenants.authenticate(None, "::ffff:10.0.0.1").name == "10.0.0.1"


def test_addresses_are_forgotten_but_not_those_at_work():
    tenants = Tenants(ServerSettings(max_concurrent_per_key=1))
    busy, idle = tenants.from_address("10.0.0.1"), tenants.from_address("10.0.0.2")
    busy.begin_request()
    for number in range(2 * MAX_OPEN_TENANTS):
        tenants.from_address(f"11.{number >> 16}.{number >> 8 & 255}.{number & 255}")
    assert len(tenants._by_address) == MAX_OPEN_TENANTS
    assert tenants.from_address("10.0.0.1") is busy
    assert tenants.from_address("10.0.0.2") is not idle


# -- limits --------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_minute", [0.5, 1, 7, 60, 61, 300.5])
def test_what_passes_in_a_minute_is_the_limit_to_one_request(per_minute):
    """Far more than the limit is tried, at random times, for ten minutes after the first burst."""
    clock = VirtualClock()
    bucket = TokenBucket(per_minute, clock)
    while not bucket.take(1):
        pass
    rng = random.Random(1)
    started = clock.now
    passed = []
    while clock.now < started + 600:
        clock.now += rng.expovariate(per_minute * 20 / 60)
        if not bucket.take(1):
            passed.append(clock.now)
    for start in range(0, 540, 30):
        num_passed = sum(start <= time - started < start + 60 for time in passed)
        assert abs(num_passed - per_minute) <= 1


@pytest.mark.parametrize("per_minute", [0.5, 7, 60, 1000])
def test_waiting_as_long_as_told_is_enough_and_needed(per_minute):
    clock = VirtualClock()
    bucket = TokenBucket(per_minute, clock)
    while not (wait := bucket.take(1)):
        pass
    assert 0 < wait <= 60 / per_minute
    clock.now += wait * 0.99
    assert bucket.take(1)
    clock.now += wait * 0.01
    assert not bucket.take(1)


def test_requests_of_a_tenant_are_limited():
    clock = VirtualClock()
    tenants = Tenants(ServerSettings(rate_limit_requests=2, api_key=("one", "two")), clock)
    one = tenants.authenticate("Bearer one", None)
    for _ in range(2):
        one.begin_request()
        one.end_request()
    with pytest.raises(RateLimitError, match="requests a minute") as raised:
        one.begin_request()
    assert (raised.value.reason, raised.value.retry_after) == ("rate_requests", pytest.approx(30))
    assert one.num_running == 0
    tenants.authenticate("Bearer two", None).begin_request()
    clock.now += 30
    one.begin_request()


def test_a_limit_below_one_a_minute_lets_one_through():
    clock = VirtualClock()
    tenant = Tenants(ServerSettings(rate_limit_requests=0.5), clock).from_address("10.0.0.1")
    tenant.begin_request()
    with pytest.raises(RateLimitError) as raised:
        tenant.begin_request()
    assert raised.value.retry_after == pytest.approx(120)


def test_requests_at_once_are_limited_and_cost_no_rate():
    clock = VirtualClock()
    settings = ServerSettings(max_concurrent_per_key=1, rate_limit_requests=2)
    tenant = Tenants(settings, clock).from_address("10.0.0.1")
    tenant.begin_request()
    for _ in range(5):
        with pytest.raises(RateLimitError) as raised:
            tenant.begin_request()
        assert raised.value.reason == "concurrency"
    tenant.end_request()
    tenant.begin_request()


def test_keys_of_a_file_may_have_weights(tmp_path):
    path = tmp_path / "keys"
    path.write_text("plain\nheavy weight=2.5  # the team's\nweight=3\n")
    tenants = Tenants(ServerSettings(api_key_file=str(path), api_key=("x weight=2",)))
    weights = {
        key: tenant and tenant.weight
        for key in ("plain", "heavy", "weight=3", "x weight=2", "heavy weight=2.5")
        for tenant in [tenants.authenticate(f"Bearer {key}", None)]
    }
    assert weights == {
        "plain": 1.0,
        "heavy": 2.5,
        "weight=3": 1.0,
        "x weight=2": 1.0,
        "heavy weight=2.5": None,
    }


@pytest.mark.parametrize("weight", ["0", "-1", "nan", "inf", "much", "", "1e9"])
def test_weights_are_ordinary_numbers(tmp_path, weight):
    path = tmp_path / "keys"
    path.write_text(f"first\nsecond weight={weight}\n")
    with pytest.raises(ConfigError, match="line 2: weight must be"):
        Tenants(ServerSettings(api_key_file=str(path)))


def test_completions_at_once_are_limited_and_not_requests():
    settings = ServerSettings(max_concurrent_per_key=4)
    tenant = Tenants(settings, VirtualClock()).from_address("10.0.0.1")
    tenant.begin_request()
    tenant.begin_work(RequestWork(3, 100))
    tenant.begin_request()
    with pytest.raises(RateLimitError, match="by completion") as raised:
        tenant.begin_work(RequestWork(2, 10))
    assert raised.value.reason == "concurrency"
    tenant.begin_work(RequestWork(1, 10))
    with pytest.raises(RateLimitError):
        tenant.begin_request()
    tenant.end_work(RequestWork(3, 100))
    tenant.end_request()
    tenant.begin_request()
    with pytest.raises(InvalidRequestError, match="5 completions"):  # at no time
        tenant.begin_work(RequestWork(5, 10))


def test_tokens_at_once_are_limited_by_key():
    tenant = Tenants(ServerSettings(max_work_per_key=100)).from_address("10.0.0.1")
    for _ in range(2):
        tenant.begin_request()
    tenant.begin_work(RequestWork(2, 60))
    with pytest.raises(RateLimitError, match="tokens at once") as raised:
        tenant.begin_work(RequestWork(1, 41))
    assert raised.value.reason == "work_of_key"
    tenant.begin_work(RequestWork(1, 40))
    tenant.end_work(RequestWork(2, 60))
    with pytest.raises(InvalidRequestError, match="101 tokens"):
        tenant.begin_work(RequestWork(1, 101))


def test_tokens_are_charged_and_refunded():
    clock = VirtualClock()
    tenant = Tenants(ServerSettings(rate_limit_tokens=600), clock).from_address("10.0.0.1")
    tenant.charge_tokens(500)
    with pytest.raises(RateLimitError, match="tokens a minute") as raised:
        tenant.charge_tokens(200)
    assert (raised.value.reason, raised.value.retry_after) == ("rate_tokens", pytest.approx(10))
    tenant.refund_tokens(100)
    tenant.charge_tokens(200)
    tenant.refund_tokens(10_000)  # never more than a minute's worth
    tenant.charge_tokens(600)
    with pytest.raises(RateLimitError):
        tenant.charge_tokens(1)


def test_what_no_wait_can_make_possible_is_an_error_of_the_request():
    tenant = Tenants(ServerSettings(rate_limit_tokens=600)).from_address("10.0.0.1")
    with pytest.raises(InvalidRequestError, match="600 a minute"):
        tenant.charge_tokens(601)


@pytest.mark.parametrize("keys", [(), ("one",)])
def test_priorities_reach_as_far_as_the_operator_lets(keys):
    def priorities(**settings):
        tenants = Tenants(ServerSettings(api_key=keys, **settings))
        tenant = tenants.authenticate("Bearer one", "10.0.0.1")
        return [tenant.priority_of(asked) for asked in (-(2**31) + 1, -1, None, 0, 2, 2**31 - 1)]

    assert priorities() == [0] * 6
    assert priorities(priority_range=2) == [-2, -1, 0, 0, 2, 2]


@pytest.mark.parametrize("reach", [-1, 101])
def test_the_range_of_priorities_is_small(reach):
    with pytest.raises(ConfigError, match="priority_range"):
        ServerSettings(priority_range=reach)


def test_without_limits_everything_passes():
    tenant = Tenant("anybody")
    for _ in range(1000):
        tenant.begin_request()
        tenant.charge_tokens(1 << 40)
    tenant.refund_tokens(1)
