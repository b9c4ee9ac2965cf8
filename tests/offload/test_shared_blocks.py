"""Blocks in memory that several processes map."""

from __future__ import annotations

import os
import random
import sys
import threading

import pytest

from octavo.offload.block_folder import DamagedBlockError
from octavo.offload.shared_blocks import (
    MissingBlockError,
    SharedBlocks,
    SharedBlocksReader,
    create_region,
    read_only,
    slots_that_fit,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memfd is of Linux")

SIZE, SLOTS = 256, 8
IDENTITY = bytes(range(32))


def name_of(number: int) -> bytes:
    return number.to_bytes(32)


def content_of(number: int) -> bytearray:
    return bytearray(random.Random(number).randbytes(SIZE))


@pytest.fixture
def region():
    num_bytes = next(size for size in range(10**6) if slots_that_fit(size, SIZE) == SLOTS)
    descriptor = create_region(num_bytes)
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def reader(region):
    descriptor = read_only(region)
    yield SharedBlocksReader(descriptor, SIZE, IDENTITY)
    os.close(descriptor)


def writer_of(region: int, identity: bytes = IDENTITY) -> SharedBlocks:
    return SharedBlocks(region, SIZE, identity)


def write(writer, *numbers: int) -> None:
    for number in numbers:
        writer.write(name_of(number), memoryview(content_of(number)))


def read(blocks, number: int) -> bytes:
    content = bytearray(SIZE)
    blocks.read(name_of(number), memoryview(content))
    return bytes(content)


def test_what_is_written_is_read(region, reader):
    assert name_of(1) not in reader
    writer = writer_of(region)
    write(writer, 1, 2)
    for blocks in (reader, writer):
        assert name_of(1) in blocks and name_of(3) not in blocks
        assert read(blocks, 1) == content_of(1) and read(blocks, 2) == content_of(2)
        with pytest.raises(MissingBlockError):
            read(blocks, 3)


def test_the_newest_overwrite_the_oldest(region, reader):
    writer = writer_of(region)
    for number in range(100):
        write(writer, number)
        there = [each for each in range(101) if name_of(each) in reader]
        assert there == list(range(max(0, number - SLOTS + 1), number + 1))
        assert [read(reader, each) for each in there] == [content_of(each) for each in there]


def test_what_will_soon_be_overwritten_is_worth_writing_again(region, reader):
    writer = writer_of(region)
    write(writer, 1, 2, 3, 4)
    assert name_of(1) in writer
    write(writer, 5)
    assert name_of(1) not in writer and name_of(1) in reader
    write(writer, 1, *range(6, 12))
    assert name_of(1) in reader and read(reader, 1) == content_of(1)
    write(writer, 12)
    assert name_of(1) in reader
    write(writer, 13)
    assert name_of(1) not in reader


def test_a_reader_cannot_write(region):
    descriptor = read_only(region)
    with pytest.raises((PermissionError, OSError)):
        os.write(descriptor, b"x")
    os.close(descriptor)
    with pytest.raises(PermissionError):  # nor can anybody make it shorter under those who read
        os.ftruncate(region, 10)


def test_who_writes_after_another_goes_on_behind_it(region, reader):
    write(writer_of(region), *range(12))
    assert name_of(11) in reader
    later = writer_of(region)
    assert name_of(11) in later and read(later, 11) == content_of(11)
    write(later, 12)
    assert read(reader, 12) == content_of(12) and read(reader, 5) == content_of(5)
    assert name_of(4) not in reader


def test_blocks_of_another_model_are_not_seen(region, reader):
    other = writer_of(region, bytes(32))
    write(other, 1)
    assert name_of(1) not in reader and reader.is_other
    write(writer_of(region), 2)
    assert not reader.is_other
    assert name_of(2) in reader and name_of(1) not in reader


def test_a_writer_of_another_model_begins_anew(region, reader):
    write(writer_of(region), *range(20))
    assert name_of(19) in reader
    write(writer_of(region, bytes(32)), *range(30))
    assert not any(name_of(number) in reader for number in range(30))
    again = writer_of(region)
    write(again, 40)
    assert [number for number in range(50) if name_of(number) in reader] == [40]


@pytest.mark.parametrize("part", ["content", "checksum", "name", "number"])
def test_what_was_cut_short_is_not_there(region, reader, part):
    """As a writer leaves it that is killed, or a bit that has flipped."""
    writer = writer_of(region)
    write(writer, *range(3))
    assert name_of(2) in reader
    memory = writer._region.memory
    entry, content = writer._region.entry_at(2), writer._region._first + 2 * SIZE
    at = {"content": content + 77, "checksum": entry + 8, "name": entry + 20, "number": entry}
    memory[at[part]] ^= 1
    error = MissingBlockError if part in ("name", "number") else DamagedBlockError
    with pytest.raises(error):
        read(reader, 2)
    assert read(reader, 1) == content_of(1)
    if part in ("name", "number"):
        assert name_of(2) not in writer_of(region)


def test_no_room_is_an_error():
    descriptor = create_region(4096 + SIZE)
    with pytest.raises(ValueError, match="no room"):
        writer_of(descriptor)
    os.close(descriptor)


def test_a_block_is_read_whole_or_not_at_all_while_others_are_written(region, reader):
    writer, is_over = writer_of(region), threading.Event()
    num_read, num_missed = 0, 0

    def keep_writing():
        number = 0
        while not is_over.is_set():
            write(writer, number)
            number += 1

    thread = threading.Thread(target=keep_writing)
    thread.start()
    try:
        while num_read < 2000:
            reader.__contains__(b"")
            for name in list(reader._numbers):
                number = int.from_bytes(name)
                try:
                    assert read(reader, number) == content_of(number)
                    num_read += 1
                except (MissingBlockError, DamagedBlockError):
                    num_missed += 1
    finally:
        is_over.set()
        thread.join()
    print(f"{num_missed} of {num_read + num_missed} reads came too late")
