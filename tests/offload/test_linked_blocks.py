"""KV blocks over a link: whatever the other end does, a reader gets the block that it asked for, or
an error, in bounded time and memory."""

from __future__ import annotations

import struct
import subprocess
import sys
import threading
import time
import zlib

import pytest

pytest.importorskip("cryptography", reason="connections between machines need certificates")

from link_ends import RawPeer, two_ends  # noqa: E402

from octavo.base.errors import ConfigError, LinkError  # noqa: E402
from octavo.links.frames import BLOCK, BLOCK_NAMES, MESSAGE, WANTED  # noqa: E402
from octavo.links.handshake import connect  # noqa: E402
from octavo.links.ticket import parse_ticket  # noqa: E402
from octavo.offload import linked_blocks  # noqa: E402
from octavo.offload.block_folder import DamagedBlockError  # noqa: E402
from octavo.offload.block_server import ServedBlocks  # noqa: E402
from octavo.offload.linked_blocks import MOST_WANTED, LinkedBlocks  # noqa: E402
from octavo.offload.shared_blocks import MissingBlockError  # noqa: E402

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the memory of blocks is Linux's")

SIZE = 4096
FACTS = {"purpose": "a test"}
IDENTITY = b"i" * 32
SECONDS = 60.0  # of which none is waited for where all is well


def name_of(number: int) -> bytes:
    return number.to_bytes(32, "big")


def block_of(number: int) -> bytes:
    return bytes([number % 251]) * SIZE


def until(condition) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.001)


class Lost:
    """Counts the ends of links, and keeps their reasons."""

    def __init__(self):
        self.reasons = []

    def __call__(self, why):
        self.reasons.append(str(why))


@pytest.fixture
def served():
    blocks = ServedBlocks("127.0.0.1", 1 << 18, SIZE, IDENTITY, FACTS)
    yield blocks
    blocks.close()


@pytest.fixture
def lost():
    return Lost()


@pytest.fixture
def reader(lost):
    blocks = LinkedBlocks(SIZE, 64, lost)
    yield blocks
    blocks.close()


def join(reader: LinkedBlocks, served: ServedBlocks) -> None:
    reader.join(connect(parse_ticket(served.invite("replica 1")), FACTS))


def write(served: ServedBlocks, *numbers: int) -> None:
    for number in numbers:
        served.write(name_of(number), memoryview(block_of(number)))


def read(reader: LinkedBlocks, number: int, ahead=()) -> bytes:
    content = memoryview(bytearray(SIZE))
    reader.read(name_of(number), content, map(name_of, ahead))
    return bytes(content)


# -- both ends as they are -------------------------------------------------------------------------


def test_blocks_from_before_and_after_the_link(served, reader, lost):
    assert not reader.is_open and name_of(1) not in reader
    write(served, 1, 2)
    join(reader, served)
    until(lambda: name_of(2) in reader)
    write(served, 3)
    until(lambda: name_of(3) in reader)
    assert [read(reader, number) for number in (3, 1, 2, 1)] == [*map(block_of, (3, 1, 2, 1))]
    assert reader.is_open and not lost.reasons


def test_what_will_be_read_next_is_asked_for_in_one_frame(served, reader, monkeypatch):
    write(served, *range(20))
    join(reader, served)
    until(lambda: name_of(19) in reader)
    sent, send = [], reader._link.send
    monkeypatch.setattr(
        reader._link, "send", lambda kind, data: (sent.append(len(data) // 32), send(kind, data))
    )
    for number in range(20):
        assert read(reader, number, range(number + 1, 20)) == block_of(number)
    assert sent == [20]


def test_no_more_is_under_way_than_a_bound(served, lost, monkeypatch):
    monkeypatch.setattr(linked_blocks, "_BYTES_UNDER_WAY", 4 * SIZE)
    reader = LinkedBlocks(SIZE, 64, lost)
    write(served, *range(40))
    join(reader, served)
    until(lambda: name_of(39) in reader)
    for number in range(40):
        assert read(reader, number, range(number + 1, 40)) == block_of(number)
        assert len(reader._wanted) + len(reader._arrived) <= 4
    reader.close()


def test_what_was_fetched_ahead_and_is_not_read_is_dropped(served, reader):
    write(served, *range(30))
    join(reader, served)
    until(lambda: name_of(29) in reader)
    read(reader, 0, range(1, 20))
    read(reader, 29)
    read(reader, 28)
    until(lambda: read(reader, 27) and not reader._wanted and not reader._arrived)


def test_a_block_that_was_overwritten_is_missing(served, reader):
    write(served, 0)
    join(reader, served)
    until(lambda: name_of(0) in reader)
    write(served, *range(1, 200))
    with pytest.raises(MissingBlockError):
        read(reader, 0)
    assert reader.is_open
    assert read(reader, 199) == block_of(199) if name_of(199) in reader else True


def test_names_are_bounded(served, lost):
    reader = LinkedBlocks(SIZE, 5, lost)
    join(reader, served)
    write(served, *range(9))
    until(lambda: name_of(8) in reader)
    assert [name_of(number) in reader for number in range(9)] == [False] * 4 + [True] * 5
    reader.close()


def test_several_readers_at_once(served, lost):
    readers = [LinkedBlocks(SIZE, 64, lost) for _ in range(3)]
    for reader in readers:
        join(reader, served)
    found = [[] for _ in readers]

    def read_all(reader, into):
        for number in range(40):
            until(lambda number=number: name_of(number) in reader)
            into.append(read(reader, number))

    threads = [
        threading.Thread(target=read_all, args=each) for each in zip(readers, found, strict=True)
    ]
    for thread in threads:
        thread.start()
    write(served, *range(40))
    for thread in threads:
        thread.join()
    assert found == [[block_of(number) for number in range(40)]] * 3
    for reader in readers:
        reader.close()


def test_an_end_is_noticed_and_another_link_can_follow(served, reader, lost):
    write(served, 1)
    join(reader, served)
    until(lambda: name_of(1) in reader)
    reader._link.end(LinkError("cut"))
    until(lambda: lost.reasons)
    assert not reader.is_open and name_of(1) not in reader
    with pytest.raises(OSError):
        read(reader, 1)
    join(reader, served)
    until(lambda: name_of(1) in reader)
    assert read(reader, 1) == block_of(1) and lost.reasons == ["cut"]


def test_closing_either_end_ends_its_threads(lost):
    before = threading.active_count()
    served = ServedBlocks("127.0.0.1", 1 << 18, SIZE, IDENTITY, FACTS)
    reader = LinkedBlocks(SIZE, 64, lost)
    join(reader, served)
    until(lambda: served._readers)
    served.invite("one that never comes")
    served.close()
    until(lambda: not reader.is_open)
    reader.close()
    join_nobody = LinkedBlocks(SIZE, 64, lost)
    join_nobody.close()
    until(lambda: threading.active_count() == before)


# -- who may read ----------------------------------------------------------------------------------


def test_other_facts_are_refused_by_name(served):
    with pytest.raises(ConfigError, match="purpose is a test there, and another here"):
        connect(parse_ticket(served.invite("replica 1")), {"purpose": "another"})


def test_a_ticket_is_good_for_one_reader(served, reader):
    text = served.invite("replica 1")
    reader.join(connect(parse_ticket(text), FACTS))
    with pytest.raises(LinkError, match="does not take this ticket"):
        connect(parse_ticket(text), FACTS)
    wrong = text[:-64] + "0" * 64
    with pytest.raises(LinkError, match="does not take this ticket"):
        connect(parse_ticket(wrong), FACTS)
    write(served, 1)
    until(lambda: name_of(1) in reader)  # the others were ended alone


# -- an evil reader --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind, data",
    [
        (WANTED, b"x" * 31),
        (WANTED, b""),
        (WANTED, b"x" * 32 * (MOST_WANTED + 1)),
        (BLOCK, b"x" * 40),
        (MESSAGE, b"{}"),
    ],
)
def test_a_reader_that_sends_something_else_is_ended_alone(served, reader, kind, data):
    join(reader, served)
    ticket = parse_ticket(served.invite("replica 2"))
    with RawPeer(ticket) as peer:
        peer.send(peer.hello(ticket, FACTS))
        peer.send(peer.frame(kind, data))
        assert peer.is_cut()
    write(served, 1)
    until(lambda: name_of(1) in reader)
    assert read(reader, 1) == block_of(1)


def test_a_reader_that_asks_for_ever_and_takes_nothing_holds_nothing(served, reader):
    """A reader may ask for so much and no more, and is ended when it exceeds that."""
    write(served, *range(30))
    ticket = parse_ticket(served.invite("replica 2"))
    with RawPeer(ticket) as peer:
        peer.send(peer.hello(ticket, FACTS))
        try:
            for _ in range(20_000):
                peer.send(peer.frame(WANTED, name_of(7) * MOST_WANTED))
        except OSError:
            pass
        assert peer.is_cut()
    join(reader, served)
    until(lambda: name_of(7) in reader)
    assert read(reader, 7) == block_of(7)


def test_names_that_nobody_wrote_are_missing(served):
    ticket = parse_ticket(served.invite("replica 2"))
    with connect(ticket, FACTS) as link:
        link.start({BLOCK_NAMES: 1 << 15, BLOCK: 36 + SIZE})
        link.send(WANTED, b"\xff" * 32)
        frame = link.receive()
        assert frame.kind == BLOCK and bytes(frame.data) == b"\xff" * 32


# -- an evil replica -------------------------------------------------------------------------------


@pytest.fixture
def evil(reader):
    """The other end of a reader's link, which may send what it likes, and has said one name."""
    with two_ends(facts=FACTS) as (ours, theirs):
        reader.join(theirs)
        ours.start({WANTED: MOST_WANTED * 32})
        ours.send(BLOCK_NAMES, name_of(1))
        until(lambda: name_of(1) in reader)
        yield ours


def answered(reader, evil, *frames) -> BaseException | bytes:
    """Read block 1, to which ``frames`` are the answer; return what came, or what was raised."""
    found = []

    def run():
        try:
            found.append(read(reader, 1))
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    assert bytes(evil.receive().data) == name_of(1)
    for kind, data in frames:
        evil.send(kind, data)
    thread.join(SECONDS)
    assert not thread.is_alive()
    return found[0]


def whole(name: bytes, block: bytes, checksum: int | None = None) -> bytes:
    right = zlib.crc32(block, zlib.crc32(name))
    return name + struct.pack("<I", right if checksum is None else checksum) + block


def test_a_good_answer(reader, evil):
    assert answered(reader, evil, (BLOCK, whole(name_of(1), block_of(5)))) == block_of(5)


@pytest.mark.parametrize("bit", [0, 9 * SIZE // 2, 8 * SIZE - 1])
def test_a_flipped_bit_is_seen(reader, evil, bit):
    block = bytearray(block_of(1))
    checksum = zlib.crc32(block, zlib.crc32(name_of(1)))
    block[bit // 8] ^= 1 << bit % 8
    found = answered(reader, evil, (BLOCK, whole(name_of(1), bytes(block), checksum)))
    assert isinstance(found, DamagedBlockError)


def test_the_checksum_is_of_the_name_too(reader, evil):
    found = answered(
        *(reader, evil),
        (BLOCK, name_of(1) + whole(name_of(2), block_of(2))[32:]),
    )
    assert isinstance(found, DamagedBlockError)


@pytest.mark.parametrize(
    "data",
    [
        whole(name_of(2), block_of(2)),  # was not asked for
        whole(name_of(1), block_of(1)[:-1]),
        whole(name_of(1), block_of(1) + b"x"),
        name_of(1)[:-1],
        name_of(1) + b"\0\0\0\0",
        b"",
    ],
)
def test_another_block_or_another_length_ends_the_link(reader, evil, lost, data):
    found = answered(reader, evil, (BLOCK, data))
    assert isinstance(found, OSError)
    until(lambda: lost.reasons)
    assert not reader.is_open and not reader._arrived and not reader._wanted


@pytest.mark.parametrize("kind, data", [(BLOCK_NAMES, b"x" * 33), (MESSAGE, b"{}"), (WANTED, b"")])
def test_other_frames_end_the_link(reader, evil, lost, kind, data):
    evil.send(kind, data)
    until(lambda: lost.reasons)
    assert name_of(1) not in reader


def test_a_block_that_came_is_not_sent_twice(reader, evil, lost):
    good = whole(name_of(1), block_of(1))
    assert answered(reader, evil, (BLOCK, good)) == block_of(1)
    evil.send(BLOCK, good)
    until(lambda: lost.reasons)


def test_a_block_that_does_not_come_ends_the_link(evil, reader, lost):
    reader._patience = 0.05
    found = answered(reader, evil)
    assert isinstance(found, TimeoutError) and "has not come" in str(found)
    until(lambda: lost.reasons)


def test_an_end_in_mid_transfer_is_an_error_at_once(evil, reader):
    reader._patience = SECONDS
    begin = threading.Thread(target=lambda: (evil.receive(), evil.close()))
    begin.start()
    with pytest.raises(ConnectionError):
        read(reader, 1)
    begin.join()


# -- two processes ---------------------------------------------------------------------------------

WRITER = """
import sys
from octavo.offload.block_server import ServedBlocks
size, count = {size}, {count}
served = ServedBlocks("127.0.0.1", 1 << 20, size, b"i" * 32, {{"purpose": "a test"}})
for number in range(count):
    served.write(number.to_bytes(32, "big"), memoryview(bytes([number % 251]) * size))
print(served.invite("replica 1"), flush=True)
sys.stdin.read()
"""


def test_a_writer_that_is_killed_in_mid_transfer(reader, lost):
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER.format(size=SIZE, count=60)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with writer:
        reader.join(connect(parse_ticket(writer.stdout.readline()), FACTS))
        until(lambda: name_of(59) in reader)
        good = 0
        for number in range(60):
            if number == 20:
                writer.kill()
            try:
                assert read(reader, number, range(number + 1, 60)) == block_of(number)
                good += 1
            except OSError:
                assert number >= 20
        writer.stdin.close()
    assert 20 <= good <= 60
    until(lambda: lost.reasons)
    assert not reader.is_open
