"""Types, conversions and device maths, against numpy."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

ALL_16_BITS = np.arange(2**16, dtype=np.uint16)


def random_floats(count: int) -> npt.NDArray[np.float32]:
    """Random bits, so that all exponents, subnormals, infinities and NaNs occur."""
    return np.random.default_rng(5).integers(0, 2**32, count, dtype=np.uint32).view(np.float32)


def neighbourhood_of_ties(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The points half way between neighbouring values, and the floats just beside them."""
    with np.errstate(all="ignore"):
        ties = ((values[:-1].astype(np.float64) + values[1:]) / 2).astype(np.float32)
        return np.concatenate([ties, np.nextafter(ties, np.float32(np.inf)), np.nextafter(ties, np.float32(-np.inf))])


def round_to_bfloat16(x: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Round to nearest even on the bits; NaN where x is."""
    bits = x.view(np.uint32).astype(np.uint64)
    rounded: npt.NDArray[np.uint16] = (
        (bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)
    ).astype(np.uint16)
    rounded[np.isnan(x)] = 0x7FFF
    return rounded


def bfloat16_values(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    words: npt.NDArray[np.uint32] = bits.astype(np.uint32) << np.uint32(16)
    return words.view(np.float32)


def assert_same_bits(actual: npt.NDArray[np.uint16], expected: npt.NDArray[np.uint16], infinity: int) -> None:
    """Equal, where all NaNs count as equal."""
    actual_nan, expected_nan = (actual & 0x7FFF) > infinity, (expected & 0x7FFF) > infinity
    np.testing.assert_array_equal(actual_nan, expected_nan)
    np.testing.assert_array_equal(actual[~actual_nan], expected[~expected_nan])


def test_every_half_becomes_the_float_that_numpy_says(emulator: ModuleType) -> None:
    np.testing.assert_array_equal(
        emulator.numerics.half_to_float(ALL_16_BITS), ALL_16_BITS.view(np.float16).astype(np.float32)
    )


def test_every_bfloat16_is_the_upper_half_of_its_float(emulator: ModuleType) -> None:
    np.testing.assert_array_equal(emulator.numerics.bfloat16_to_float(ALL_16_BITS), bfloat16_values(ALL_16_BITS))


def test_every_half_survives_the_round_trip(emulator: ModuleType) -> None:
    back = emulator.numerics.float_to_half(emulator.numerics.half_to_float(ALL_16_BITS))
    assert_same_bits(back, ALL_16_BITS, infinity=0x7C00)


def test_every_bfloat16_survives_the_round_trip(emulator: ModuleType) -> None:
    back = emulator.numerics.float_to_bfloat16(emulator.numerics.bfloat16_to_float(ALL_16_BITS))
    assert_same_bits(back, ALL_16_BITS, infinity=0x7F80)


@pytest.mark.parametrize("name", ["float_to_half", "float_to_half_by_default"])
def test_floats_round_to_half_as_in_numpy(emulator: ModuleType, name: str) -> None:
    halves = np.sort(ALL_16_BITS.view(np.float16).astype(np.float32))
    moderate = np.random.default_rng(6).normal(scale=100, size=50_000).astype(np.float32)
    overflow = np.array([65504, 65519.996, 65520, 65536, 1e30], dtype=np.float32)
    x = np.concatenate([random_floats(50_000), moderate, neighbourhood_of_ties(halves), overflow, -overflow])
    with np.errstate(over="ignore"):
        expected = x.astype(np.float16).view(np.uint16)
    assert_same_bits(getattr(emulator.numerics, name)(x), expected, infinity=0x7C00)


def test_doubles_round_to_half_once(emulator: ModuleType) -> None:
    # Through float this would round to 1 + 2^-11 first, then down to the even 1.
    x = np.concatenate([[1 + 2**-11 + 2**-40], np.random.default_rng(7).normal(size=20_000)])
    assert_same_bits(emulator.numerics.double_to_half(x), x.astype(np.float16).view(np.uint16), infinity=0x7C00)


@pytest.mark.parametrize("name", ["float_to_bfloat16", "float_to_bfloat16_by_default"])
def test_floats_round_to_the_nearest_bfloat16(emulator: ModuleType, name: str) -> None:
    values = np.sort(bfloat16_values(ALL_16_BITS))
    moderate = np.random.default_rng(8).normal(size=50_000).astype(np.float32)
    x = np.concatenate([random_floats(50_000), moderate, neighbourhood_of_ties(values)])
    assert_same_bits(getattr(emulator.numerics, name)(x), round_to_bfloat16(x), infinity=0x7F80)


def test_half_arithmetic_rounds_once(emulator: ModuleType) -> None:
    rng = np.random.default_rng(9)
    x, y = rng.integers(0, 2**16, (2, 20_000), dtype=np.uint16)
    with np.errstate(all="ignore"):
        total, product = x.view(np.float16) + y.view(np.float16), x.view(np.float16) * y.view(np.float16)
    assert_same_bits(emulator.numerics.half_sum(x, y), total.view(np.uint16), infinity=0x7C00)
    assert_same_bits(emulator.numerics.half_product(x, y), product.view(np.uint16), infinity=0x7C00)


def test_pairs_keep_low_and_high_apart(emulator: ModuleType) -> None:
    x, y = np.random.default_rng(10).normal(size=(2, 1000)).astype(np.float32)
    n = emulator.numerics
    for low in (n.low_of_half2, n.x_of_half22float2):
        np.testing.assert_array_equal(low(x, y), x.astype(np.float16).astype(np.float32))
    for high in (n.high_of_half2, n.y_of_half22float2):
        np.testing.assert_array_equal(high(x, y), y.astype(np.float16).astype(np.float32))
    for low in (n.low_of_bfloat162, n.x_of_bfloat1622float2):
        np.testing.assert_array_equal(low(x, y), bfloat16_values(round_to_bfloat16(x)))
    for high in (n.high_of_bfloat162, n.y_of_bfloat1622float2):
        np.testing.assert_array_equal(high(x, y), bfloat16_values(round_to_bfloat16(y)))


def test_vector_types_have_the_alignment_that_cuda_gives_them(emulator: ModuleType) -> None:
    assert emulator.numerics.vector_layouts() == {
        "char2": (2, 2),
        "char4": (4, 4),
        "uchar4": (4, 4),
        "short2": (4, 4),
        "short4": (8, 8),
        "ushort4": (8, 8),
        "int2": (8, 8),
        "int3": (12, 4),
        "int4": (16, 16),
        "uint2": (8, 8),
        "uint3": (12, 4),
        "uint4": (16, 16),
        "longlong2": (16, 16),
        "ulonglong2": (16, 16),
        "float1": (4, 4),
        "float2": (8, 8),
        "float3": (12, 4),
        "float4": (16, 16),
        "double2": (16, 16),
        "double3": (24, 8),
        "__half": (2, 2),
        "__half2": (4, 4),
        "__nv_bfloat16": (2, 2),
        "__nv_bfloat162": (4, 4),
    }


UNARY_FLOAT: dict[str, Callable[[Any], Any]] = {
    "rsqrtf": lambda x: 1 / np.sqrt(x),
    "__expf": np.exp,
    "__exp10f": lambda x: np.power(10.0, x),
    "__logf": np.log,
    "__log2f": np.log2,
    "__log10f": np.log10,
    "__sinf": np.sin,
    "__cosf": np.cos,
    "__tanf": np.tan,
    "__frcp_rn": lambda x: 1 / x,
    "__fsqrt_rn": np.sqrt,
    "__saturatef": lambda x: np.clip(x, 0, 1),
    "sinpif": lambda x: np.sin(np.pi * x),
    "cospif": lambda x: np.cos(np.pi * x),
    "sin_of_sincospif": lambda x: np.sin(np.pi * x),
    "cos_of_sincospif": lambda x: np.cos(np.pi * x),
    "abs_float": np.abs,
}


@pytest.mark.parametrize("name", UNARY_FLOAT)
def test_float_functions_agree_with_double_precision(emulator: ModuleType, name: str) -> None:
    x = np.random.default_rng(11).uniform(0.01, 8, 2000).astype(np.float32)
    expected = UNARY_FLOAT[name](x.astype(np.float64))
    # 2e-7 is two units in the last place of a float; the absolute part is for zeros of sin, cos and log.
    np.testing.assert_allclose(getattr(emulator.numerics, name)(x), expected, rtol=2e-7, atol=2e-7)


UNARY_DOUBLE: dict[str, Callable[[Any], Any]] = {
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sinpi": lambda x: np.sin(np.pi * x),
    "cospi": lambda x: np.cos(np.pi * x),
    "sin_of_sincospi": lambda x: np.sin(np.pi * x),
    "cos_of_sincospi": lambda x: np.cos(np.pi * x),
}


@pytest.mark.parametrize("name", UNARY_DOUBLE)
def test_double_functions_agree_with_numpy(emulator: ModuleType, name: str) -> None:
    x = np.random.default_rng(12).uniform(0.01, 2, 2000)
    np.testing.assert_allclose(getattr(emulator.numerics, name)(x), UNARY_DOUBLE[name](x), rtol=1e-15, atol=1e-15)


def test_multiples_of_pi_give_exact_sines_and_cosines(emulator: ModuleType) -> None:
    quarters = np.arange(-20, 21) / 2
    np.testing.assert_array_equal(emulator.numerics.sinpi(quarters), np.tile([0, 1, 0, -1], 11)[: len(quarters)])
    np.testing.assert_array_equal(emulator.numerics.cospi(quarters), np.tile([1, 0, -1, 0], 11)[: len(quarters)])
    huge = np.array([1e15 + 0.5, 2.0**60])
    np.testing.assert_array_equal(np.abs(emulator.numerics.sinpi(huge)), [1, 0])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_named_roundings_are_single_operations(emulator: ModuleType, dtype: type) -> None:
    x, y, z = np.random.default_rng(13).normal(size=(3, 2000)).astype(dtype)
    n = emulator.numerics
    add, sub, mul, div = (
        (n.__fadd_rn, n.__fsub_rn, n.__fmul_rn, n.__fdiv_rn)
        if dtype == np.float32
        else (n.__dadd_rn, n.__dsub_rn, n.__dmul_rn, n.__ddiv_rn)
    )
    np.testing.assert_array_equal(add(x, y), x + y)
    np.testing.assert_array_equal(sub(x, y), x - y)
    np.testing.assert_array_equal(mul(x, y), x * y)
    np.testing.assert_array_equal(div(x, y), x / y)
    # The error of a product is representable, and only a fused multiply-add can see it.
    fused = n.__fmaf_rn if dtype == np.float32 else n.__fma_rn
    errors = fused(x, y, -(x * y))
    assert np.count_nonzero(errors) > 1000
    if dtype == np.float32:
        np.testing.assert_array_equal(errors, x.astype(np.float64) * y - (x * y))
        np.testing.assert_array_equal(n.fmaf(x, y, z), fused(x, y, z))
        np.testing.assert_array_equal(n.__fdividef(x, y), x / y)
        np.testing.assert_allclose(n.__powf(np.abs(x), y), np.abs(x).astype(np.float64) ** y, rtol=2e-7)


def test_bit_operations_agree_with_python(emulator: ModuleType) -> None:
    rng = np.random.default_rng(14)
    words = np.concatenate([[0, 1, 2**31, 2**32 - 1], rng.integers(0, 2**32, 500)]).astype(np.uint32)
    longs = np.array([0, 1, 2**63, 2**64 - 1, *rng.integers(0, 2**63, 500).tolist()], dtype=np.uint64)
    n = emulator.numerics

    def lowest(value: int) -> int:
        return (value & -value).bit_length()

    assert n.__popc(words).tolist() == [bin(v).count("1") for v in words.tolist()]
    assert n.__popcll(longs).tolist() == [bin(v).count("1") for v in longs.tolist()]
    assert n.__clz(words.view(np.int32)).tolist() == [32 - v.bit_length() for v in words.tolist()]
    assert n.__clzll(longs.view(np.int64)).tolist() == [64 - v.bit_length() for v in longs.tolist()]
    assert n.__ffs(words.view(np.int32)).tolist() == [lowest(v) for v in words.tolist()]
    assert n.__ffsll(longs.view(np.int64)).tolist() == [lowest(v) for v in longs.tolist()]
    assert n.__brev(words).tolist() == [int(f"{v:032b}"[::-1], 2) for v in words.tolist()]

    other, other_long = words[::-1].copy(), longs[::-1].copy()
    pairs = list(zip(words.tolist(), other.tolist(), strict=True))
    assert n.__umulhi(words, other).tolist() == [a * b >> 32 for a, b in pairs]
    signed, other_signed = words.view(np.int32), other.view(np.int32)
    expected = [a * b >> 32 for a, b in zip(signed.tolist(), other_signed.tolist(), strict=True)]
    assert n.__mulhi(signed, other_signed).tolist() == expected
    expected = [a * b >> 64 for a, b in zip(longs.tolist(), other_long.tolist(), strict=True)]
    assert n.__umul64hi(longs, other_long).tolist() == expected


def test_reinterpretations_keep_the_bits(emulator: ModuleType) -> None:
    floats = np.random.default_rng(15).normal(size=100).astype(np.float32)
    doubles = floats.astype(np.float64)
    n = emulator.numerics
    np.testing.assert_array_equal(n.__float_as_int(floats), floats.view(np.int32))
    np.testing.assert_array_equal(n.__float_as_uint(floats), floats.view(np.uint32))
    np.testing.assert_array_equal(n.__int_as_float(floats.view(np.int32)), floats)
    np.testing.assert_array_equal(n.__uint_as_float(floats.view(np.uint32)), floats)
    np.testing.assert_array_equal(n.__double_as_longlong(doubles), doubles.view(np.int64))
    np.testing.assert_array_equal(n.__longlong_as_double(doubles.view(np.int64)), doubles)


def test_conversions_to_integers_saturate(emulator: ModuleType) -> None:
    x = np.array([-2.5, -0.5, 0.5, 1.5, 2.7, 3e9, -3e9, np.inf, -np.inf, np.nan], dtype=np.float32)
    lowest, highest = -(2**31), 2**31 - 1
    n = emulator.numerics
    clamped = [highest, lowest, highest, lowest, 0]
    assert n.__float2int_rn(x).tolist() == [-2, 0, 0, 2, 3, *clamped]
    assert n.__float2int_rz(x).tolist() == [-2, 0, 0, 1, 2, *clamped]
    assert n.__float2int_rd(x).tolist() == [-3, -1, 0, 1, 2, *clamped]
    assert n.__float2int_ru(x).tolist() == [-2, 0, 1, 2, 3, *clamped]
    wide = np.array([2.0**62, 2.0**63, 2.0**64, -1.0, np.nan])
    assert n.__double2ll_rn(wide).tolist() == [2**62, 2**63 - 1, 2**63 - 1, -1, 0]
    assert n.__double2ull_rz(wide).tolist() == [2**62, 2**63, 2**64 - 1, 0, 0]


def test_min_and_max_have_the_overloads_of_cuda(emulator: ModuleType) -> None:
    n = emulator.numerics
    x, y = np.random.default_rng(16).integers(-100, 100, (2, 100)).astype(np.int32)
    np.testing.assert_array_equal(n.min_int(x, y), np.minimum(x, y))
    np.testing.assert_array_equal(n.max_int(x, y), np.maximum(x, y))
    np.testing.assert_array_equal(n.max_long(x.astype(np.int64), y.astype(np.int64)), np.maximum(x, y))
    np.testing.assert_array_equal(n.max_mixed(x.astype(np.float32), y.astype(np.float64)), np.maximum(x, y))
    # A negative int becomes a large unsigned one, as it does in CUDA.
    assert n.min_unsigned_and_int(np.array([5], np.uint32), np.array([-1], np.int32)).tolist() == [5]
    numbers, nan = np.array([1.0], np.float32), np.array([np.nan], np.float32)
    assert n.min_float(numbers, nan).tolist() == [1.0]
    assert n.max_float(nan, numbers).tolist() == [1.0]
    assert n.abs_long_long(np.array([-(2**40)])).tolist() == [2**40]


def test_the_clock_advances(emulator: ModuleType) -> None:
    assert emulator.numerics.clock_advances(np.zeros(40, np.int32)).all()
