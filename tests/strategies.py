"""Tensors as Hypothesis sees them: any dtype that is carried, any bit pattern, any layout."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import strategies as st

from deltasync.tensors import ITEM_BYTES, TensorSpec
from deltasync.tensors.bits import tensor_of

# Both zeros, both infinities, quiet and signalling NaNs with payloads, subnormals, the largest finite number.
SPECIAL_BITS: dict[str, tuple[int, ...]] = {
    "bfloat16": (0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0xFFC1, 0x7F81, 0xFFFF, 0x0001, 0x807F, 0x7F7F),
    "float16": (0x0000, 0x8000, 0x7C00, 0xFC00, 0x7E00, 0xFE01, 0x7C01, 0xFFFF, 0x0001, 0x83FF, 0x7BFF),
    "float32": (
        0,
        1 << 31,
        0x7F800000,
        0xFF800000,
        0x7FC00000,
        0xFFC00001,
        0x7F800001,
        0xFFFFFFFF,
        1,
        0x807FFFFF,
    ),
    "float64": (0, 1 << 63, 0x7FF << 52, 0xFFF << 52, 0x7FF8 << 48, (0xFFF << 52) | 1, (1 << 64) - 1, 1),
    "float8_e4m3fn": (0x00, 0x80, 0x7F, 0xFF, 0x01, 0x87, 0x7E),
    "float8_e5m2": (0x00, 0x80, 0x7C, 0xFC, 0x7E, 0xFD, 0xFF, 0x01, 0x83, 0x7B),
}
FLOATS = tuple(SPECIAL_BITS)
INTEGERS = ("int8", "uint8", "int16", "int32", "int64")
# bool is carried too, but only two of its bit patterns mean anything.
DTYPES = FLOATS + INTEGERS

dtypes = st.sampled_from(DTYPES)
widths = st.sampled_from([1, 2, 4, 8])


def special_bits(dtype: str) -> tuple[int, ...]:
    width = 8 * ITEM_BYTES[dtype]
    return SPECIAL_BITS.get(dtype, (0, 1, (1 << width) - 1, 1 << (width - 1), (1 << (width - 1)) - 1))


def _random_bits(seed: int, width_bytes: int, size: int) -> np.ndarray:
    random = np.random.default_rng(seed).integers(0, 256, size * width_bytes, np.uint8)
    return random.view(f"u{width_bytes}")


seeds = st.integers(0, 2**32 - 1)


@st.composite
def bit_arrays(draw: st.DrawFn, dtype: str, size: int) -> np.ndarray:
    """Any bit patterns of a dtype: random or constant ones, some of them replaced by special or drawn
    ones.
    """
    width_bytes = ITEM_BYTES[dtype]
    drawn = st.sampled_from(special_bits(dtype)) | st.integers(0, (1 << (8 * width_bytes)) - 1)
    if draw(st.booleans()):
        bits_N = _random_bits(draw(seeds), width_bytes, size)
    else:
        bits_N = np.full(size, draw(drawn), f"u{width_bytes}")
    if size:
        for index, value in draw(st.dictionaries(st.integers(0, size - 1), drawn, max_size=8)).items():
            bits_N[index] = value
    return bits_N


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, ...]:
    """0-d, empty, flat and matrix shapes; small and some hundreds of elements."""
    return draw(
        st.sampled_from([(), (0,), (3, 0), (1,)])
        | st.tuples(st.integers(0, 700))
        | st.tuples(st.integers(1, 20), st.integers(1, 20))
        | st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 5))
    )


@st.composite
def specs(draw: st.DrawFn, name: str = "w") -> TensorSpec:
    return TensorSpec(name, draw(dtypes), draw(shapes()))


@st.composite
def tensors(draw: st.DrawFn, spec: TensorSpec | None = None) -> torch.Tensor:
    """A tensor of any layout: contiguous, transposed, every second element, or with an offset in its
    storage.
    """
    spec = draw(specs()) if spec is None else spec
    tensor = tensor_of(draw(bit_arrays(spec.dtype, spec.element_count)), spec)
    layout = draw(st.sampled_from(["contiguous", "transposed", "strided", "offset"]))
    if layout == "contiguous" or not spec.shape:
        return tensor
    if layout == "transposed":
        return _copied_into(
            torch.empty(spec.shape[::-1], dtype=tensor.dtype).permute(*range(len(spec.shape))[::-1]), tensor
        )
    if layout == "strided":
        return _copied_into(
            torch.empty((*spec.shape[:-1], 2 * spec.shape[-1]), dtype=tensor.dtype)[..., ::2], tensor
        )
    return _copied_into(torch.empty((spec.shape[0] + 1, *spec.shape[1:]), dtype=tensor.dtype)[1:], tensor)


def _copied_into(view: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    view.copy_(source)
    return view


@st.composite
def new_bits(draw: st.DrawFn, old_N: np.ndarray, dtype: str) -> np.ndarray:
    """What `old_N` may become: unchanged, a few elements, a fraction or all of them, by small or arbitrary
    steps.
    """
    new_N = old_N.copy()
    if not old_N.size:
        return new_N
    kind = draw(st.sampled_from(["same", "few", "fraction", "all"]))
    random = np.random.default_rng(draw(seeds))
    if kind == "few":
        drawn = st.sampled_from(special_bits(dtype)) | st.integers(0, (1 << (8 * old_N.itemsize)) - 1)
        for index, value in draw(st.dictionaries(st.integers(0, old_N.size - 1), drawn, max_size=8)).items():
            new_N[index] = value
    elif kind != "same":
        mask_N = random.random(old_N.size) < (1.0 if kind == "all" else draw(st.floats(0.0, 1.0)))
        if draw(st.booleans()):
            step_N = random.integers(-3, 4, old_N.size).astype(f"i{old_N.itemsize}").view(old_N.dtype)
        else:
            step_N = _random_bits(draw(seeds), old_N.itemsize, old_N.size)
        new_N[mask_N] += step_N[mask_N]
    return new_N


@st.composite
def bit_pairs(
    draw: st.DrawFn, dtype: str | None = None, max_size: int = 700
) -> tuple[np.ndarray, np.ndarray]:
    """Old and new bit patterns of one flat tensor, any density of changes."""
    dtype = draw(dtypes) if dtype is None else dtype
    old_N = draw(bit_arrays(dtype, draw(st.integers(0, max_size))))
    return old_N, draw(new_bits(old_N, dtype))


@st.composite
def model_pairs(
    draw: st.DrawFn,
) -> tuple[dict[str, TensorSpec], dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Specs, old bits and new bits of a small model."""
    table = {
        name: draw(specs(name))
        for name in draw(st.sampled_from([["a"], ["a", "b"], ["b.weight", "a.weight", "c"]]))
    }
    old = {name: draw(bit_arrays(spec.dtype, spec.element_count)) for name, spec in table.items()}
    new = {name: draw(new_bits(old[name], spec.dtype)) for name, spec in table.items()}
    return table, old, new
