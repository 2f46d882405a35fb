"""Protocol Buffers on the wire, as far as a SentencePiece model needs them: read fields, write a few.

The `protobuf` package would bring generated classes; they are slower over 260k small messages than this loop.
"""

import struct
from collections.abc import Iterator
from typing import Any

_VARINT, _EIGHT_BYTES, _LENGTH, _FOUR_BYTES = 0, 1, 2, 5


def fields(message: Any) -> Iterator[tuple[int, Any]]:
    """(field number, value) of a message in bytes, in order; numbers as unsigned integers, all else as raw bytes.

    Raises ValueError when the bytes are no message.
    """
    if not isinstance(message, bytes):
        raise ValueError(f"a {type(message).__name__} where a message was expected")
    at, end = 0, len(message)
    while at < end:
        key, at = _read_varint(message, at)
        wire = key & 7
        if wire == _VARINT:
            number, at = _read_varint(message, at)
            yield key >> 3, number
            continue
        if wire == _LENGTH:
            length, at = _read_varint(message, at)
        elif wire in (_FOUR_BYTES, _EIGHT_BYTES):
            length = 4 if wire == _FOUR_BYTES else 8
        else:
            raise ValueError(f"wire type {wire} at byte {at}")
        if at + length > end:
            raise ValueError(f"field of {length} bytes at byte {at} of {end}")
        yield key >> 3, message[at : at + length]
        at += length


def bytes_field(number: int, payload: bytes) -> bytes:
    """A field of bytes, text or a message."""
    return _varint(number << 3 | _LENGTH) + _varint(len(payload)) + payload


def number_field(number: int, value: int) -> bytes:
    """A field of a non-negative integer, an enum or a bool."""
    return _varint(number << 3 | _VARINT) + _varint(value)


def float_field(number: int, value: float) -> bytes:
    """A field of a 32-bit float."""
    return _varint(number << 3 | _FOUR_BYTES) + struct.pack("<f", value)


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while at < len(message) and shift < 70:
        byte = message[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7
    raise ValueError(f"unfinished number at byte {at}")


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)
