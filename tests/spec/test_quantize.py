"""qlora is one way to say lora on an nf4 base; what cannot be is refused with every value named."""

from __future__ import annotations

import pytest

from fleetune.spec.errors import UserError
from fleetune.spec.given import file_given, flags_given
from fleetune.spec.quantized import quantized_bytes
from fleetune.spec.read import resolve


def resolved(**values):
    return resolve(flags=flags_given({"model": "m", "data": "d", **values}))


def test_qlora_is_lora_on_an_nf4_base():
    for given in ({"method": "qlora"}, {"method": "qlora", "quantize": "nf4"}, {"method": "lora", "quantize": "nf4"}):
        adaptation = resolved(**given).spec.adaptation
        assert (adaptation.method, adaptation.quantize) == ("lora", "nf4")
    assert resolved(method="qlora").origins["quantize"] == "flag --method"
    assert resolved(method="qlora", quantize="nf4").origins["quantize"] == "flag --quantize"
    assert resolved().spec.adaptation.quantize == "none"


@pytest.mark.parametrize("quantize", ["int8", "none"])
def test_qlora_with_another_quantisation_is_an_error_that_says_what_works(quantize):
    with pytest.raises(
        UserError, match=rf"method qlora \(flag --method\).*quantize is {quantize}.*--method lora --quantize {quantize}"
    ):
        resolved(method="qlora", quantize=quantize)


def test_a_file_s_int8_under_a_flag_s_qlora_is_told_with_both_places(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("model: m\ndata: d\nquantize: int8\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"flag --method.*run.yaml, line 3"):
        resolve(flags=flags_given({"method": "qlora"}), file=file_given(file))


@pytest.mark.parametrize(
    ("scheme", "shape", "expected"),
    [
        ("int8", (576, 1536), 576 * 1536 + 4 * 576),
        ("nf4", (576, 1536), 576 * 1536 // 2 + 13824 + 4 * 54 + 4),
        ("nf4", (3, 10), 15 + 1 + 4 + 4),
    ],
)
def test_bytes_are_counted_with_all_scales(scheme, shape, expected):
    assert quantized_bytes(scheme, *shape) == expected
