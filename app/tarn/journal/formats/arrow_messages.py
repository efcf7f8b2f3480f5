"""Reader of Arrow IPC stream messages that checks each message's declared sizes before Arrow decompresses it.

A compressed buffer begins with its decompressed length, which is what Arrow allocates. The list of buffers and the row
count of a batch are in the flatbuffer before its body; pyarrow does not expose it, so the needed fields are decoded
here.
"""

import struct
from typing import Any

from tarn.journal.formats.budget import Budget
from tarn.journal.formats.record import ByteSource, invalid_format

LARGEST_METADATA = 1 << 20
"""Maximum bytes of a message's flatbuffer. A batch of statements has some hundred bytes, a schema some thousand."""

DICTIONARY_BATCH, RECORD_BATCH = 2, 3
CONTINUATION = b"\xff" * 4
"""First bytes of a message since Arrow 0.15 (2019); before, a message began with its length."""


class Messages:
    """File-like object for Arrow: returns the requested bytes of messages that are within the budget."""

    closed = False

    def __init__(self, source: ByteSource, largest: int, budget: Budget) -> None:
        self.is_cut_off = False
        self.rows = 0
        """Rows of all record batches, by their headers."""
        self._source = source
        self._largest = largest
        self._budget = budget
        self._pending = memoryview(b"")
        self._dictionaries: dict[int, int] = {}

    def is_empty(self) -> bool:
        self._pending = memoryview(self._receive(1))
        return not self._pending

    def rest(self) -> bytes:
        """Return bytes after those that Arrow has read, if any."""
        return bytes(self._pending) or self._receive(1)

    def read(self, size: int) -> memoryview:
        if len(self._pending) < size:
            self._load()
        data, self._pending = self._pending[:size], self._pending[size:]
        self.is_cut_off = len(data) < size
        return data

    def _load(self) -> None:
        """Read the next complete message and check it."""
        preamble = bytes(self._pending)
        prefix = preamble + self._receive(4 - len(preamble))
        if prefix == CONTINUATION:
            prefix += self._receive(4)
        if len(prefix) < 4 or (prefix[:4] == CONTINUATION and len(prefix) < 8):
            self._pending = memoryview(prefix)
            return
        length = int.from_bytes(prefix[-4:], "little", signed=True)
        if not 0 <= length <= LARGEST_METADATA:
            raise invalid_format(f"a message has {length} bytes of metadata; the maximum is {LARGEST_METADATA}")
        metadata = self._receive(length)
        if len(metadata) < length or not length:
            self._pending = memoryview(prefix + metadata)
            return
        try:
            message = _Table.root(metadata)
            size = message.number(3, "q")
        except (struct.error, IndexError):
            raise invalid_format("the metadata of a message cannot be read") from None
        if not 0 <= size <= self._largest:
            raise invalid_format(f"a message has {size} bytes; the maximum is {self._largest}")
        data = bytearray(prefix + metadata)
        start = len(data)
        self._receive_into(data, size)
        if len(data) == start + size:
            try:
                self._check(message, memoryview(data)[start:])
            except (struct.error, IndexError):
                raise invalid_format("the metadata of a message cannot be read") from None
        self._pending = memoryview(data)

    def _check(self, message: "_Table", body: memoryview) -> None:
        kind, header = message.number(1, "B"), message.table(2)
        if header is None or kind not in (DICTIONARY_BATCH, RECORD_BATCH):
            return
        batch = header
        if kind == DICTIONARY_BATCH:
            values = header.table(1)
            if values is None:
                raise invalid_format("a dictionary has no values")
            batch = values
        rows, size = batch.number(0, "q"), _unpacked(batch, body)
        self._budget.add_unpacked(size)
        if kind == RECORD_BATCH:
            self._budget.add_rows(rows)
            self.rows += rows
            self._budget.require_at_once(size + sum(self._dictionaries.values()), "a batch with its dictionaries")
            return
        # Dictionary values are not counted as rows, but the same limit applies to their number.
        Budget(self._budget.size).add_rows(rows)
        number, is_delta = header.number(0, "q"), header.number(2, "B")
        self._dictionaries[number] = size + (self._dictionaries.get(number, 0) if is_delta else 0)
        self._budget.require_at_once(sum(self._dictionaries.values()), "a dictionary")

    def _receive(self, size: int) -> bytes:
        data = bytearray()
        self._receive_into(data, size)
        return bytes(data)

    def _receive_into(self, data: bytearray, size: int) -> None:
        end = len(data) + size
        while len(data) < end and (block := self._source.read(end - len(data))):
            data += block
            self._budget.size += len(block)


def _unpacked(batch: "_Table", body: memoryview) -> int:
    """Return the decompressed size of a batch's buffers in bytes."""
    if batch.table(3) is None:
        return len(body)
    total = 0
    for offset, length in batch.pairs(2):
        if not length:
            continue
        if offset < 0 or length < 8 or offset + length > len(body):
            raise invalid_format("a buffer lies outside its message")
        (size,) = struct.unpack_from("<q", body, offset)
        if size < -1:
            raise invalid_format(f"a buffer declares a decompressed size of {size} bytes")
        total += length - 8 if size == -1 else size
    return total


class _Table:
    """A flatbuffer table. Raises struct.error and IndexError for offsets outside its bytes."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data = data
        self._at = at
        self._fields = at - self._read("i", at)
        self._extent = self._read("H", self._fields)

    @classmethod
    def root(cls, data: bytes) -> "_Table":
        return cls(data, struct.unpack_from("<I", data)[0])

    def number(self, field: int, form: str) -> int:
        """Return a number field; 0 if it is absent, which is the default of all fields read here."""
        at = self._place(field)
        return 0 if at is None else self._read(form, at)

    def table(self, field: int) -> "_Table | None":
        at = self._place(field)
        return None if at is None else _Table(self._data, at + self._read("I", at))

    def pairs(self, field: int) -> list[Any]:
        """Return a vector field of structs of two 64-bit numbers each."""
        at = self._place(field)
        if at is None:
            return []
        at += self._read("I", at)
        count = self._read("I", at)
        if at + 4 + 16 * count > len(self._data):
            raise IndexError
        return list(struct.iter_unpack("<qq", self._data[at + 4 : at + 4 + 16 * count]))

    def _place(self, field: int) -> int | None:
        entry = 4 + 2 * field
        if entry + 2 > self._extent:
            return None
        offset = self._read("H", self._fields + entry)
        return self._at + offset if offset else None

    def _read(self, form: str, at: int) -> int:
        if at < 0:
            raise IndexError
        value: int = struct.unpack_from(f"<{form}", self._data, at)[0]
        return value
