"""A safetensors header that is wrong, hostile or cut is refused in words, and costs no memory."""

from __future__ import annotations

import io
import json
import struct
from typing import Any

import pytest

from fleetune.spec.safetensors_header import parse_header


def file_of(header: Any, data: bytes = b"", *, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype: str = "F32", shape: Any = (2,), offsets: Any = (0, 8), **more: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **more}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "too short"),
        (b"\x80\x04\x95", "too short"),
        (file_of({}, length=10 << 30), "more than the 100,000,000 allowed"),
        (file_of({}, length=3), "claims 3 bytes"),
        (file_of(b"{not json"), "no JSON"),
        (file_of(b"\xff\xfe"), "no JSON"),
        (file_of(b"[" * 200_000), "no JSON"),
        (file_of([]), "no JSON object"),
        (file_of(b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":1}', bytes(8)), "twice"),
        (file_of({"a": entry("PICKLE")}, bytes(8)), "not known"),
        (file_of({"a": entry("C64", (1,))}, bytes(8)), "not known"),
        (file_of({"a": entry(shape=(3,))}, bytes(8)), "does not fit"),
        (file_of({"a": entry(shape=(-2,))}, bytes(8)), "whole numbers"),
        (file_of({"a": entry(shape=(True, 2))}, bytes(8)), "whole numbers"),
        (file_of({"a": entry(shape=(2.0,))}, bytes(8)), "whole numbers"),
        (file_of({"a": entry(shape=(2**64, 2**64), offsets=(0, 8))}, bytes(8)), "whole numbers"),
        (file_of({"a": entry(shape=(1,) * 65)}, bytes(8)), "whole numbers"),
        (file_of({"a": entry(offsets=(8, 16))}, bytes(8)), "gap"),
        (file_of({"a": entry(offsets=(0, 8, 8))}, bytes(8)), "whole numbers"),
        (file_of({"a": entry(), "b": entry()}, bytes(8)), "overlap"),
        (file_of({"a": entry(), "b": entry(offsets=(12, 20))}, bytes(20)), "gap"),
        (file_of({"a": entry()}, bytes(12)), "12 behind its header"),
        (file_of({"a": entry(extra=1)}, bytes(8)), "exactly"),
    ],
)
def test_a_header_that_is_wrong_is_refused_in_words(content: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_header(io.BytesIO(content), len(content))


def test_nothing_is_read_for_a_header_that_claims_gigabytes() -> None:
    class Watched(io.BytesIO):
        read_bytes = 0

        def read(self, size: int | None = -1) -> bytes:
            assert size is not None and size >= 0
            self.read_bytes += size
            return super().read(size)

    content = file_of({}, length=10 << 30)
    file = Watched(content)
    with pytest.raises(ValueError, match="allowed"):
        parse_header(file, 11 << 30)
    assert file.read_bytes == 8
