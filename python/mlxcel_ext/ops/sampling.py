"""Sampling ops: no sort and no host synchronisation anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from .. import _ext

#: A value for all rows, or one a row.
PerRow = float | int | Sequence[float] | Sequence[int] | npt.NDArray[np.generic] | mx.array

#: Temperatures below this are argmax.
GREEDY_TEMPERATURE = 1e-5

# The layout of csrc/params/sample.h: SampleRow.
_ROW = np.dtype(
    [
        ("temperature", "<f4"),
        ("top_k", "<i4"),
        ("top_p", "<f4"),
        ("min_p", "<f4"),
        ("seed", "<u8"),
        ("draw", "<u8"),
    ]
)
_FLOATS = ("temperature", "top_p", "min_p")


class SampleResult(NamedTuple):
    """What :func:`sample` returns; all of ``[batch]``."""

    ids: mx.array  #: int32, always in range
    valid: mx.array  #: bool; False for a row that has a NaN, or no token that may be drawn
    rounds: mx.array  #: int32; draws that top-p turned down, at most 8


@dataclass(frozen=True, eq=False)
class SamplingBatch:
    """Sampling parameters of a batch; each is one value, or one a row (list, numpy or ``mx.array``).

    Parameters
    ----------
    temperature
        Below 1e-5 the row is argmax, lowest index at ties.
    top_k
        Keeps exactly the ``top_k`` largest logits, the lower index first at ties. 1 is argmax; 0, -1 and the
        vocabulary's size and above are off.
    top_p
        Keeps the smallest set of largest logits whose mass reaches ``top_p``, the lower index first at ties.
        1 and above is off, 0 and below is argmax.
    min_p
        Keeps tokens of at least ``min_p`` times the largest probability; 0 is off.
    order
        ``"top_k_first"``: ``top_p`` is a share of the mass that min-p and top-k left, as in vLLM.
        ``"joint"``: a share of the whole distribution.
    temperature_last
        The filters see the distribution at temperature 1, as in llama.cpp and mlx-lm.

    Raises
    ------
    ValueError
        For a value out of range. Values in an ``mx.array`` are not looked at: that would synchronise.
    """

    temperature: PerRow = 1.0
    top_k: PerRow = 0
    top_p: PerRow = 1.0
    min_p: PerRow = 0.0
    order: Literal["top_k_first", "joint"] = "top_k_first"
    temperature_last: bool = False

    def __post_init__(self) -> None:
        if self.order not in ("top_k_first", "joint"):
            raise ValueError(f"[sample] order must be 'top_k_first' or 'joint', got {self.order!r}.")
        for name, low, high in (
            ("temperature", 0.0, np.inf),
            ("top_k", -1, np.iinfo(np.int32).max),
            ("top_p", -np.inf, np.inf),
            ("min_p", 0.0, 1.0),
        ):
            value = getattr(self, name)
            if isinstance(value, mx.array):
                continue
            array = np.asarray(value)
            if name == "top_k" and array.size and array.dtype.kind not in "iu":
                raise ValueError(f"[sample] top_k must be integers, got {array.dtype}.")
            if not np.all((array >= low) & (array <= high)):
                raise ValueError(f"[sample] {name} must be in {low:g}..{high:g}, got {value}.")

    def work(self, vocab: int) -> _ext.SampleWork:
        """The most that any row asks for; with parameters on the device, everything."""
        if any(isinstance(v, mx.array) for v in (self.temperature, self.top_k, self.top_p, self.min_p)):
            return _ext.SampleWork.filters
        top_k, top_p = np.asarray(self.top_k), np.asarray(self.top_p)
        greedy = (np.asarray(self.temperature) < GREEDY_TEMPERATURE) | (top_k == 1) | (top_p <= 0)
        filtered = ((top_k > 0) & (top_k < vocab)) | (top_p < 1) | (np.asarray(self.min_p) > 0)
        if np.all(greedy):
            return _ext.SampleWork.greedy
        return _ext.SampleWork.filters if np.any(filtered & ~greedy) else _ext.SampleWork.temperature


def sample(
    logits: mx.array,
    params: SamplingBatch,
    rng: tuple[PerRow, PerRow],
    *,
    stream: mx.Stream | mx.Device | None = None,
) -> SampleResult:
    """Draw one token a row from logits.

    A token is drawn by the Gumbel-max rule over the tokens that the filters keep:
    ``ids[b] = argmax_i(logits[b, i] / temperature[b] - log(-log(u[b, i])))``. The order is vLLM's:
    temperature, then min-p and top-k, then top-p on what they left.

    Parameters
    ----------
    logits : mx.array
        ``[batch, vocab]``, float32, float16 or bfloat16, any strides; vocab 1 to 262,144.
    params : SamplingBatch
        Per-row parameters. Rows with different parameters share one launch.
    rng : (seeds, draw_index)
        Each one value or one a row: the request's 64-bit seed, and which of the request's draws this is. The
        token depends on these, the logits and the row's parameters alone: not on its place in the batch or
        on the backend, except where two scores lie within f32 rounding.

    Returns
    -------
    SampleResult
        ``ids``, ``valid`` and ``rounds``.

    Raises
    ------
    ValueError
        On a shape, dtype or value that does not fit.

    Notes
    -----
    Traffic: the logits are read once on a GPU. Noise: Philox4x32-10, 23-bit uniforms that are never 0 or 1.

    Examples
    --------
    >>> params = SamplingBatch(temperature=[0.0, 0.8], top_k=50, top_p=0.9)
    >>> sample(mx.array([[0.0, 5.0, 1.0], [2.0, 2.0, 2.0]]), params, rng=([7, 8], 0)).ids.shape
    (2,)
    """
    if logits.ndim != 2:
        raise ValueError(f"[sample] logits must have 2 dimensions [batch, vocab], got shape {logits.shape}.")
    batch, vocab = logits.shape
    ids, valid, rounds = _ext.sample(
        logits,
        _pack_rows(params, rng, batch),
        params.work(vocab),
        params.order == "joint",
        params.temperature_last,
        stream=stream,
    )
    return SampleResult(ids, valid, rounds)


def _pack_rows(params: SamplingBatch, rng: tuple[PerRow, PerRow], batch: int) -> mx.array:
    """The rows' parameters as one ``[batch, 8]`` uint32 array, so that a step uploads one array."""
    values = {
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "seed": rng[0],
        "draw": rng[1],
    }
    for name, value in values.items():
        size = value.size if isinstance(value, mx.array) else np.size(value)
        ndim = value.ndim if isinstance(value, mx.array) else np.ndim(value)
        if ndim > 1 or (ndim == 1 and size != batch):
            raise ValueError(f"[sample] {name} must be one value or {batch}, one a row, got {size} values.")
    if any(isinstance(value, mx.array) for value in values.values()):
        return mx.concatenate([_device_words(n, v, batch) for n, v in values.items()], axis=1)
    rows = np.empty(batch, _ROW)
    for name, value in values.items():
        rows[name] = _as_words64(name, value) if name in ("seed", "draw") else value
    return mx.array(rows.view(np.uint32).reshape(batch, 8))


def _as_words64(name: str, value: PerRow) -> npt.NDArray[np.uint64]:
    array = np.asarray(value)
    if array.dtype.kind not in "iu":
        raise ValueError(f"[sample] {name} must be integers in 0..2^64-1, got {value!r}.")
    if array.dtype.kind == "i" and np.any(array < 0):
        raise ValueError(f"[sample] {name} must be integers in 0..2^64-1, got {value!r}.")
    return array.astype(np.uint64)


def _device_words(name: str, value: PerRow, batch: int) -> mx.array:
    """One parameter as ``[batch, 1]`` (or 2) words."""
    dtype = mx.float32 if name in _FLOATS else mx.int32 if name == "top_k" else mx.uint64
    if not isinstance(value, mx.array):
        value = mx.array(_as_words64(name, value) if dtype == mx.uint64 else np.asarray(value))
    column = mx.contiguous(mx.broadcast_to(value.astype(dtype).reshape(-1, 1), (batch, 1)))
    return column.view(mx.uint32)
