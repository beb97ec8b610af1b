"""Linears of the CPU kernels: the same bits on every level, for any company and threads, and those of the definition.

The reference is written here in NumPy, from the words of `cpu/gemm.h` and `cpu/pack.h`, not from their code.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine import cpu_objects
from llm_kernels.packed import Arithmetic, Format, PackedWeight, PackError, Rows, linear

Array = NDArray[np.float32]
BLOCK = 32
QUANTS = (Format.INT8, Format.INT4, Format.INT5)
MOST = {Format.INT8: 127, Format.INT4: 15, Format.INT5: 31}
ALL = [
    *((f, Arithmetic.FMA32) for f in Format),
    *((f, Arithmetic.Q8DOT) for f in QUANTS),
]
each = pytest.mark.parametrize(("weight_format", "arithmetic"), ALL, ids=lambda value: value.name.lower())
numbers = np.random.default_rng


def bits(x: Array) -> NDArray[np.uint32]:
    return np.ascontiguousarray(x).view(np.uint32)


def spread(rng: np.random.Generator, shape: tuple[int, int], least: int, most: int) -> Array:
    """Numbers of many sizes, from 2^least to 2^most, and some zeros."""
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(least, most + 1, shape)
    return np.where(rng.random(shape) < 0.1, 0, x).astype(np.float32)


@st.composite
def products(draw: st.DrawFn) -> tuple[Array, Array]:
    """A weight [columns, depth] and rows [rows, depth]: of one size, or of many, with blocks of next to nothing."""
    columns, depth, rows = draw(st.integers(1, 130)), draw(st.integers(1, 200)), draw(st.integers(1, 40))
    rng = numbers(draw(st.integers(0, 2**32)))
    if draw(st.booleans()):
        return tuple(rng.standard_normal((n, depth)).astype(np.float32) for n in (columns, rows))  # type: ignore[return-value]
    w, x = spread(rng, (columns, depth), -20, 10), spread(rng, (rows, depth), -30, 30)
    for start in range(0, depth, BLOCK):
        x[:, start : start + BLOCK] *= np.float32(rng.choice([1, 0, 2.0**-100, 2.0**-125], p=[0.7, 0.1, 0.1, 0.1]))
    return w, x


def fma(a: Any, b: Any, c: Any) -> Array:
    """The nearest float32 to a * b + c, for float32: in float64, whose last bit tells whether more follows it."""
    product, c = np.float64(a) * np.float64(b), np.float64(c)  # the product is exact
    s = product + c
    back = s - product
    rest = (product - (s - back)) + (c - back)  # what the sum has lost: Knuth's
    even = (s.view(np.int64) & 1) == 0
    odd = np.where((rest != 0) & even, np.nextafter(s, np.where(rest > 0, np.inf, -np.inf)), s)
    return odd.astype(np.float32)  # type: ignore[no-any-return]


def quantised(w: Array, weight_format: Format) -> tuple[NDArray[np.int64], Array, Array]:
    """q [columns, blocks, 32], scale and minimum [columns, blocks], both of float16."""
    padded = np.pad(w, ((0, 0), (0, -w.shape[1] % BLOCK))).reshape(len(w), -1, BLOCK)
    most = np.float32(MOST[weight_format])
    if weight_format is Format.INT8:
        width, minimum = np.abs(padded).max(-1), np.zeros(padded.shape[:2], np.float32)
    else:
        width, minimum = padded.max(-1) - padded.min(-1), padded.min(-1).astype(np.float16).astype(np.float32)
    scale = (width / most).astype(np.float16).astype(np.float32)
    divisor = np.where(scale > 0, scale, np.inf)[..., None].astype(np.float32)
    q = np.rint((padded - minimum[..., None]) / divisor).astype(np.int64)
    return np.clip(q, -127 if weight_format is Format.INT8 else 0, MOST[weight_format]), scale, minimum


def widened(w: Array, weight_format: Format) -> Array:
    """The values that a format holds of a weight."""
    if weight_format is Format.FLOAT32:
        return w
    if weight_format is Format.BFLOAT16:
        return torch.from_numpy(w).bfloat16().float().numpy()
    q, scale, minimum = quantised(w, weight_format)
    return fma(scale[..., None], q, minimum[..., None]).reshape(len(w), -1)[:, : w.shape[1]]


def fma32(w: Array, x: Array) -> Array:
    sums = np.zeros((len(x), len(w)), np.float32)
    for k in range(x.shape[1]):
        sums = fma(w[None, :, k], x[:, None, k], sums)
    return sums


def q8dot(w: Array, x: Array, weight_format: Format) -> Array:
    q, scale, minimum = quantised(w, weight_format)
    padded = np.pad(x, ((0, 0), (0, -x.shape[1] % BLOCK))).reshape(len(x), -1, BLOCK)
    largest = np.abs(padded).max(-1)
    up = np.divide(np.float32(127), largest, out=np.zeros_like(largest), where=largest >= 2.0**-100)
    a = np.rint(padded * up[..., None]).astype(np.int64)
    step = largest / np.float32(127)
    shift = step * a.sum(-1).astype(np.float32)
    sums = np.zeros((len(x), len(w)), np.float32)
    for b in range(q.shape[1]):
        sums = fma(a[:, b] @ q[:, b].T, scale[None, :, b] * step[:, b, None], sums)
        if weight_format is not Format.INT8:
            sums = fma(minimum[None, :, b], shift[:, b, None], sums)
    return sums


def test_the_reference_fuses_as_the_c_library_does() -> None:
    fmaf = ctypes.CDLL("libm.so.6").fmaf
    fmaf.argtypes, fmaf.restype = [ctypes.c_float] * 3, ctypes.c_float
    a, b, c = (spread(numbers(i), (1, 20000), -20, 20)[0] for i in range(3))
    c[::2] = -(a * b)[::2]  # what is left is all rounding
    c[1::4] = (a * b * np.float32(2**24))[1::4]  # and what decides is behind the last bit
    assert np.array_equal(fma(a, b, c), np.array([fmaf(*abc) for abc in zip(a, b, c, strict=True)], np.float32))


@each
@given(product=products(), threads=st.integers(1, 3))
def test_all_levels_give_the_same_bits(
    weight_format: Format, arithmetic: Arithmetic, product: tuple[Array, Array], threads: int
) -> None:
    w, x = product
    found = {}
    for level, library in cpu_objects.libraries().items():
        weight = PackedWeight.pack(library, Rows.of(w), arithmetic, weight_format)
        found[level] = weight.memory.tobytes(), bits(linear(library, weight, x, threads)).tobytes()
    assert len(set(found.values())) == 1, {level: hash(value) for level, value in found.items()}


@each
@given(product=products(), data=st.data())
def test_a_rows_bits_depend_on_itself_alone(
    weight_format: Format, arithmetic: Arithmetic, product: tuple[Array, Array], data: st.DataObject
) -> None:
    w, x = product
    some = data.draw(st.lists(st.integers(0, len(x) - 1), min_size=1, max_size=40))
    for library in cpu_objects.libraries().values():
        weight = PackedWeight.pack(library, Rows.of(w), arithmetic, weight_format)
        together = linear(library, weight, x, 1)
        for threads in (1, 2, 3):
            assert np.array_equal(bits(linear(library, weight, x[some], threads)), bits(together[some]))


@each
@given(product=products())
def test_a_product_is_the_one_defined(
    weight_format: Format, arithmetic: Arithmetic, product: tuple[Array, Array]
) -> None:
    w, x = product
    library = cpu_objects.best()
    weight = PackedWeight.pack(library, Rows.of(w), arithmetic, weight_format)
    values = widened(w, weight_format)
    assert np.array_equal(weight.columns(library, 0, len(w)), values)
    wanted = fma32(values, x) if arithmetic is Arithmetic.FMA32 else q8dot(w, x, weight_format)
    assert np.array_equal(linear(library, weight, x, 2), wanted)


@given(product=products())
def test_pairs_of_bfloat16_are_summed_in_float32(product: tuple[Array, Array]) -> None:
    library = cpu_objects.best()
    if not library.ts_has_dpbf16():
        pytest.skip("this CPU has no vdpbf16ps")
    w, x = product
    weight = PackedWeight.pack(library, Rows.of(w), Arithmetic.DPBF16, Format.BFLOAT16)
    a, b = (widened(v, Format.BFLOAT16).astype(np.float64) for v in (x, w))
    found = linear(library, weight, x, 2)
    assert (np.abs(found - a @ b.T) <= x.shape[1] * 2.0**-22 * (np.abs(a) @ np.abs(b).T) + 1e-30).all()
    assert np.array_equal(bits(linear(library, weight, x[-1:], 1)), bits(found[-1:]))


@each
@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_so_and_spoils_no_other_row(
    weight_format: Format, arithmetic: Arithmetic, broken: float
) -> None:
    rng = numbers(1)
    w, x = (rng.standard_normal((n, 70)).astype(np.float32) for n in (40, 9))
    for place in (0, 20, 40, 69):
        spoilt = x.copy()
        spoilt[4, place] = broken
        for library in cpu_objects.libraries().values():
            weight = PackedWeight.pack(library, Rows.of(w), arithmetic, weight_format)
            found, wanted = linear(library, weight, spoilt, 1), linear(library, weight, x, 1)
            assert not np.isfinite(found[4]).any()
            others = np.arange(9) != 4
            assert np.array_equal(bits(found[others]), bits(wanted[others]))


@given(pattern=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=100))
def test_bfloat16_is_rounded_to_nearest_even(pattern: list[int]) -> None:
    halfway = [p & 0xFFFF0000 | 0x8000 for p in pattern]
    w = np.array([*pattern, *halfway], np.uint32).view(np.float32)
    w = w[np.isfinite(w) & (np.abs(w) < 3.38e38)][None]
    if w.size:
        for library in cpu_objects.libraries().values():
            weight = PackedWeight.pack(library, Rows.of(w), Arithmetic.FMA32, Format.BFLOAT16)
            assert np.array_equal(
                bits(weight.columns(library, 0, 1)), bits(torch.from_numpy(w).bfloat16().float().numpy())
            )


Kind = GGMLQuantizationType
HALVES = {  # where a block has its float16
    **dict.fromkeys((Kind.Q4_0, Kind.Q5_0, Kind.Q8_0), (0,)),
    **dict.fromkeys((Kind.Q4_1, Kind.Q5_1, Kind.Q4_K, Kind.Q5_K), (0, 2)),
    Kind.Q6_K: (208,),
}
OWN = {
    **dict.fromkeys((Kind.Q4_0, Kind.Q4_1, Kind.Q4_K), Format.INT4),
    **dict.fromkeys((Kind.Q5_0, Kind.Q5_1, Kind.Q5_K), Format.INT5),
    **dict.fromkeys((Kind.Q8_0, Kind.Q6_K), Format.INT8),
}


def blocks(rng: np.random.Generator, kind: Kind, columns: int, count: int, most: int = 9) -> NDArray[np.uint8]:
    """Rows [columns, bytes] of random blocks; their scales and minima are any float16 below 2^most."""
    size = GGML_QUANT_SIZES[kind][1]
    rows = rng.integers(0, 256, (columns, count, size), np.uint8)
    for at in HALVES[kind]:
        half = rng.integers(0, 2, (columns, count)) << 15 | rng.integers(0, (15 + most) << 10, (columns, count))
        rows[..., at : at + 2] = half.astype(np.uint16)[..., None].view(np.uint8)
    return rows.reshape(columns, -1)


def packed(library: Any, kind: Kind, rows: NDArray[np.uint8], weight_format: Format) -> Array:
    values, size = GGML_QUANT_SIZES[kind]
    given = Rows(int(kind), rows.shape[1] // size * values, rows)
    weight = PackedWeight.pack(library, given, Arithmetic.FMA32, weight_format)
    return weight.columns(library, 0, len(rows))


gguf_rows = given(seed=st.integers(0, 2**32), columns=st.integers(1, 40), count=st.integers(1, 4))


@pytest.mark.parametrize("kind", [Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0], ids=lambda kind: kind.name)
@gguf_rows
def test_blocks_of_gguf_are_taken_as_they_are(kind: Kind, seed: int, columns: int, count: int) -> None:
    rows = blocks(numbers(seed), kind, columns, count)
    for library in cpu_objects.libraries().values():
        found = packed(library, kind, rows, OWN[kind])
        wanted = rows.reshape(columns, count, -1).copy()
        if kind is Kind.Q8_0:  # the kernels have no -128
            wanted[..., 2:][wanted[..., 2:] == 128] = 129
        assert np.array_equal(found, dequantize(wanted.reshape(columns, -1), kind))


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q5_K], ids=lambda kind: kind.name)
@gguf_rows
def test_super_blocks_lose_no_more_than_their_scales_do_in_float16(
    kind: Kind, seed: int, columns: int, count: int
) -> None:
    rows = blocks(numbers(seed), kind, columns, count)
    no_quants, no_minima = (rows.reshape(columns, count, -1).copy() for _ in range(2))
    no_quants[..., 16:] = 0  # what is left are the minima
    no_minima[..., 2:4] = 0  # and here the scaled quants
    parts = sum(np.abs(dequantize(part.reshape(columns, -1), kind)) for part in (no_quants, no_minima))
    found = packed(cpu_objects.best(), kind, rows, OWN[kind])
    assert (np.abs(found - dequantize(rows, kind)) <= parts * 2.0**-10.9 + 2.0**-25 * (MOST[OWN[kind]] + 1)).all()


@gguf_rows
def test_six_bits_are_requantised_to_the_nearest_of_eight(seed: int, columns: int, count: int) -> None:
    rows = blocks(numbers(seed), Kind.Q6_K, columns, count)
    exact = dequantize(rows, Kind.Q6_K)
    found = packed(cpu_objects.best(), Kind.Q6_K, rows, Format.INT8)
    assert np.array_equal(found, widened(exact, Format.INT8))
    largest = np.abs(exact.reshape(columns, -1, BLOCK)).max(-1).repeat(BLOCK, 1)
    assert (np.abs(found - exact) <= largest * (0.5 / 127 + 2.0**-11) + 127 * 2.0**-25).all()


@pytest.mark.parametrize("kind", list(HALVES), ids=lambda kind: kind.name)
@pytest.mark.parametrize("weight_format", Format, ids=lambda value: value.name.lower())
@given(seed=st.integers(0, 2**32))
def test_any_kind_becomes_any_format_alike_on_all_levels(kind: Kind, weight_format: Format, seed: int) -> None:
    rows = blocks(numbers(seed), kind, 17, 1, most=3)
    found = [packed(library, kind, rows, weight_format) for library in cpu_objects.libraries().values()]
    assert all(np.array_equal(bits(found[0]), bits(other)) for other in found[1:])
    if OWN[kind] is not weight_format:
        own = packed(cpu_objects.best(), kind, rows, OWN[kind]) if kind is not Kind.Q6_K else dequantize(rows, kind)
        assert np.array_equal(found[0], widened(own, weight_format))


@pytest.mark.parametrize(
    ("number", "dtype", "weight_format"), [(1, np.float16, Format.FLOAT32), (30, np.uint16, Format.BFLOAT16)]
)
def test_halves_are_taken_as_they_are(number: int, dtype: Any, weight_format: Format) -> None:
    every = np.arange(2**16, dtype=np.uint16)
    finite = (
        every[(every & 0x7F80) != 0x7F80].reshape(-1, 2)[:, ::-1] if number == 30 else every[(every & 0x7C00) != 0x7C00]
    )
    rows = np.ascontiguousarray(finite).reshape(16, -1)
    values = (
        rows.view(np.float16).astype(np.float32) if number == 1 else (rows.astype(np.uint32) << 16).view(np.float32)
    )
    for library in cpu_objects.libraries().values():
        given = Rows(number, rows.shape[1], rows.view(np.uint8))
        found = PackedWeight.pack(library, given, Arithmetic.FMA32, weight_format).columns(library, 0, 16)
        assert np.array_equal(bits(found), bits(values))


@pytest.mark.parametrize("weight_format", Format, ids=lambda value: value.name.lower())
@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
@given(column=st.integers(0, 32), place=st.integers(0, 69))
def test_a_weight_that_is_not_finite_is_refused(weight_format: Format, broken: float, column: int, place: int) -> None:
    w = np.ones((33, 70), np.float32)
    w[column, place] = broken
    for library in cpu_objects.libraries().values():
        with pytest.raises(PackError):
            PackedWeight.pack(library, Rows.of(w), Arithmetic.FMA32, weight_format)


@pytest.mark.parametrize(
    ("weight_format", "value"),
    [(Format.BFLOAT16, 3.4e38), (Format.INT8, 65520 * 127.0), (Format.INT4, -65520.0), (Format.INT5, 3e38)],
)
def test_a_weight_too_large_for_its_format_is_refused(weight_format: Format, value: float) -> None:
    w = np.ones((5, 40), np.float32)
    w[3, 33] = value
    with pytest.raises(PackError, match="too large for its format"):
        PackedWeight.pack(cpu_objects.best(), Rows.of(w), Arithmetic.FMA32, weight_format)


@pytest.mark.parametrize("kind", list(HALVES), ids=lambda kind: kind.name)
@pytest.mark.parametrize("half", [np.inf, -np.inf, np.nan])
def test_a_block_of_gguf_that_is_not_finite_is_refused(kind: Kind, half: float) -> None:
    for at in HALVES[kind]:
        rows = blocks(numbers(0), kind, 20, 2)
        size = GGML_QUANT_SIZES[kind][1]
        rows[7, size + at : size + at + 2] = np.array([half], np.float16).view(np.uint8)
        for weight_format in Format:
            with pytest.raises(PackError):
                packed(cpu_objects.best(), kind, rows, weight_format)
