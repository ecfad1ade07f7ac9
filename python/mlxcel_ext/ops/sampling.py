"""Sampling ops: no sort and no host synchronisation anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from .. import _ext
from .arguments import argument_errors
from .device import to_device

#: A value for all rows, or one a row.
PerRow = float | int | Sequence[float] | Sequence[int] | npt.NDArray[np.generic] | mx.array

#: Temperatures below this are argmax.
GREEDY_TEMPERATURE = 1e-5

#: The layout of csrc/params/sample.h: SampleRow. An array of these is what :func:`sample_rows` takes.
SAMPLE_ROW = np.dtype(
    [
        ("temperature", "<f4"),
        ("top_k", "<i4"),
        ("top_p", "<f4"),
        ("min_p", "<f4"),
        ("seed", "<u8"),
        ("draw", "<u8"),
    ]
)
#: The layout of csrc/params/sample_edit.h: EditRow.
EDIT_ROW = np.dtype(
    [
        ("repetition", "<f4"),
        ("presence", "<f4"),
        ("frequency", "<f4"),
        ("counts_row", "<i4"),
        ("mask_row", "<i4"),
        ("bias_begin", "<i4"),
        ("bias_end", "<i4"),
        ("reserved", "<i4"),
    ]
)
#: An EDIT_ROW that changes nothing.
NO_EDIT = np.array((1.0, 0.0, 0.0, -1, -1, 0, 0, 0), EDIT_ROW)
#: Most of top_ids that token_logprobs returns.
MAX_TOP_LOGPROBS = 64
_CHAIN_ROW = np.dtype([("seed", "<u8"), ("draw", "<u8")])

#: What a launch has to do at most; "top_k": every row that filters has a top_k of at most MAX_LISTED_TOP_K.
Work = Literal["greedy", "temperature", "top_k", "filters"]
MAX_LISTED_TOP_K = 512
_WORK: dict[Work, _ext.SampleWork] = {
    "greedy": _ext.SampleWork.greedy,
    "temperature": _ext.SampleWork.temperature,
    "top_k": _ext.SampleWork.top_k,
    "filters": _ext.SampleWork.filters,
}


class SampleResult(NamedTuple):
    """What :func:`sample` returns; all of ``[batch]``."""

    ids: mx.array  #: int32, always in range
    valid: mx.array  #: bool; False for a row that has a NaN, or no token that may be drawn
    rounds: mx.array  #: int32; draws that top-p turned down, at most 8


class TokenLogprobs(NamedTuple):
    """What :func:`token_logprobs` returns. Natural logarithms."""

    logprobs: mx.array  #: float32 [batch]
    ranks: mx.array  #: int32 [batch]; tokens at least as likely, itself included
    top_ids: mx.array  #: int32 [batch, num_top], best first, the lower index first at ties
    top_logprobs: mx.array  #: float32 [batch, num_top]


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
            if array.size and array.dtype.kind not in ("iu" if name == "top_k" else "iuf"):
                wanted = "integers" if name == "top_k" else "numbers"
                raise ValueError(f"[sample] {name} must be {wanted}, got {value!r}.")
            if not np.all((array >= low) & (array <= high)):
                raise ValueError(f"[sample] {name} must be in {low:g}..{high:g}, got {value}.")

    def work(self, vocab: int) -> Work:
        """The most that any row asks for; everything where parameters are on the device."""
        if any(isinstance(v, mx.array) for v in (self.temperature, self.top_k, self.top_p, self.min_p)):
            return "filters"
        return work_of(self.temperature, self.top_k, self.top_p, self.min_p, vocab)


def work_of(
    temperature: npt.ArrayLike, top_k: npt.ArrayLike, top_p: npt.ArrayLike, min_p: npt.ArrayLike, vocab: int
) -> Work:
    """The most that any of these rows asks for."""
    top_k, top_p = np.asarray(top_k), np.asarray(top_p)
    random = (np.asarray(temperature) >= GREEDY_TEMPERATURE) & (top_k != 1) & (top_p > 0)
    if not np.any(random):
        return "greedy"
    has_top_k = (top_k > 0) & (top_k < vocab)
    filtered = random & (has_top_k | (top_p < 1) | (np.asarray(min_p) > 0))
    if not np.any(filtered):
        return "temperature"
    return "filters" if np.any(filtered & ~(has_top_k & (top_k <= MAX_LISTED_TOP_K))) else "top_k"


@argument_errors("sample")
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
    return sample_rows(
        logits,
        _pack_rows(params, rng, batch, stream),
        params.work(vocab),
        joint=params.order == "joint",
        temperature_last=params.temperature_last,
        stream=stream,
    )


@argument_errors("sample_rows")
def sample_rows(
    logits: mx.array,
    rows: mx.array | npt.NDArray[np.void],
    work: Work = "filters",
    *,
    joint: bool = False,
    temperature_last: bool = False,
    stream: mx.Stream | mx.Device | None = None,
) -> SampleResult:
    """:func:`sample` for callers that keep packed rows, as an engine does.

    ``rows`` is an array of ``SAMPLE_ROW``, or its words as ``mx.array`` ``[batch, 8]`` uint32. ``work`` is the
    most that any row asks for; ``"filters"`` is always right.
    """
    out = _ext.sample(logits, _words(rows, stream), _WORK[work], joint, temperature_last, stream=stream)
    return SampleResult(*out)


@argument_errors("edit_logits")
def edit_logits(
    logits: mx.array,
    rows: mx.array | npt.NDArray[np.void],
    *,
    bias_ids: mx.array | None = None,
    bias_values: mx.array | None = None,
    counts: mx.array | None = None,
    masks: mx.array | None = None,
    stream: mx.Stream | mx.Device | None = None,
) -> mx.array:
    """Apply token masks, logit bias and penalties, in vLLM's order, row by row.

    Parameters
    ----------
    logits : mx.array
        ``[batch, vocab]``, float32, float16 or bfloat16.
    rows : numpy array of EDIT_ROW ``[batch]``, or its words ``[batch, 8]`` uint32
        ``mask_row`` and ``counts_row`` are -1 where a row has none. ``repetition`` divides positive logits of
        tokens in prompt or output and multiplies negative ones; ``frequency`` is subtracted for each time
        that the output has the token, ``presence`` once.
    bias_ids, bias_values : mx.array
        ``[nnz]`` int32 and float32; row ``b`` adds entries ``bias_begin`` to ``bias_end``, whose ids are all
        different. A bias of -inf forbids a token.
    counts : mx.array
        ``[slots, vocab]`` uint32, as :func:`count_tokens` keeps them.
    masks : mx.array
        ``[masks, words]`` uint32: token ``i`` is allowed where bit ``i % 32`` of word ``i // 32`` is 1, as
        llguidance and xgrammar write them. Tokens beyond the last word are forbidden.

    Returns
    -------
    mx.array
        ``[batch, vocab]`` float32.
    """
    empty = mx.zeros((0,), mx.int32)
    out = _ext.edit_logits(
        logits,
        _words(rows, stream),
        empty if bias_ids is None else bias_ids,
        empty.astype(mx.float32) if bias_values is None else bias_values,
        mx.zeros((0, logits.shape[-1]), mx.uint32) if counts is None else counts,
        mx.zeros((0, 0), mx.uint32) if masks is None else masks,
        stream=stream,
    )
    if not isinstance(rows, mx.array):
        _check_edits(rows, bias_ids, counts, masks)
    return out


@argument_errors("count_tokens")
def count_tokens(
    counts: mx.array,
    rows: mx.array,
    ids: mx.array,
    *,
    reset: bool = False,
    stream: mx.Stream | mx.Device | None = None,
) -> mx.array:
    """Count tokens for the penalties, in place: ``counts[rows[i], ids[i]] += 1``.

    ``counts`` is ``[slots, vocab]`` uint32 and row-contiguous; ``rows`` and ``ids`` are ``[n]`` int32, and a row
    of -1 or an id out of range is left out. With ``reset`` the first token's row is cleared first, and the
    tokens are marked as a prompt's. Returns the counts on the same buffer: use this handle
    from here on.
    """
    return _ext.count_tokens(counts, rows, ids, reset, stream=stream)


@argument_errors("token_logprobs")
def token_logprobs(
    logits: mx.array, ids: mx.array, num_top: int = 0, *, stream: mx.Stream | mx.Device | None = None
) -> TokenLogprobs:
    """Log-softmax of ``logits`` at ``ids`` and at the ``num_top`` (0 to 64) largest tokens.

    ``logits`` is ``[batch, vocab]``, float32, float16 or bfloat16, and ``ids`` ``[batch]`` int32. No sort of the
    vocabulary, and nothing of its size is written.
    """
    return TokenLogprobs(*_ext.token_logprobs(logits, ids, num_top, stream=stream))


@argument_errors("top_k_renorm")
def top_k_renorm(probs: mx.array, top_k: PerRow, *, stream: mx.Stream | mx.Device | None = None) -> mx.array:
    """Keep exactly the ``top_k`` largest probabilities of each row (the lower index first at ties), renormalised.

    ``probs`` is ``[batch, vocab]``, float32, float16 or bfloat16; ``top_k`` is one integer or one a row, and 0
    or less or the vocabulary's size or more keeps all. A row of zeros stays zero.
    """
    return _renorm("top_k_renorm", _ext.RenormKind.top_k_probs, probs, top_k, stream)


@argument_errors("top_p_renorm")
def top_p_renorm(probs: mx.array, top_p: PerRow, *, stream: mx.Stream | mx.Device | None = None) -> mx.array:
    """Keep the smallest set of largest probabilities whose sum reaches ``top_p`` of the row's sum, renormalised.

    As :func:`top_k_renorm`. ``top_p`` of 1 and more keeps all, of 0 and less one token.
    """
    return _renorm("top_p_renorm", _ext.RenormKind.top_p_probs, probs, top_p, stream)


@argument_errors("min_p_renorm")
def min_p_renorm(probs: mx.array, min_p: PerRow, *, stream: mx.Stream | mx.Device | None = None) -> mx.array:
    """Keep probabilities of at least ``min_p`` times the row's largest, renormalised. As :func:`top_k_renorm`."""
    return _renorm("min_p_renorm", _ext.RenormKind.min_p_probs, probs, min_p, stream)


@argument_errors("top_k_mask")
def top_k_mask(logits: mx.array, top_k: PerRow, *, stream: mx.Stream | mx.Device | None = None) -> mx.array:
    """Logits with all but exactly the ``top_k`` largest of each row set to -inf, the lower index first at ties."""
    return _renorm("top_k_mask", _ext.RenormKind.top_k_mask, logits, top_k, stream)


@argument_errors("chain_speculative_sample")
def chain_speculative_sample(
    draft_ids: mx.array,
    draft_probs: mx.array,
    target_probs: mx.array,
    rng: tuple[PerRow, PerRow],
    *,
    stream: mx.Stream | mx.Device | None = None,
) -> tuple[mx.array, mx.array]:
    """Accept a prefix of drafted tokens and draw one more, so that the target's distribution is kept exactly.

    Draft ``i`` is accepted where ``u[i] * draft_probs[i, id] < target_probs[i, id]``. At the first that is not, a
    token is drawn from ``relu(target - draft)``; after the last, one from the target.

    Parameters
    ----------
    draft_ids : mx.array
        ``[batch, n]`` int32. An id out of range (a padding of -1, say) is turned down.
    draft_probs, target_probs : mx.array
        ``[batch, n, vocab]`` and ``[batch, n + 1, vocab]`` float32; what the drafts were drawn from, and the
        model's distribution after the filters.
    rng : (seeds, draw_index)
        As in :func:`sample`; position ``i`` of a chain uses ``draw_index + i``.

    Returns
    -------
    ids : mx.array
        ``[batch, n + 1]`` int32: accepted drafts, the drawn token, then -1.
    num_accepted : mx.array
        ``[batch]`` int32, 0 to n.
    """
    op = "chain_speculative_sample"
    if draft_ids.ndim != 2:
        raise ValueError(f"[{op}] draft_ids must have 2 dimensions [batch, n], got shape {draft_ids.shape}.")
    batch = draft_ids.shape[0]
    rows = _pack(op, {"seed": rng[0], "draw": rng[1]}, batch, _CHAIN_ROW, stream)
    ids, num_accepted = _ext.chain_speculative_sample(
        draft_ids, draft_probs, target_probs, rows, stream=stream
    )
    return ids, num_accepted


def _renorm(
    op: str, kind: _ext.RenormKind, x: mx.array, value: PerRow, stream: mx.Stream | mx.Device | None
) -> mx.array:
    if x.ndim != 2:
        raise ValueError(f"[{op}] the first argument must have 2 dimensions [batch, vocab], got {x.shape}.")
    top_k = kind in (_ext.RenormKind.top_k_probs, _ext.RenormKind.top_k_mask)
    name = op.rsplit("_", 1)[0]
    batch = x.shape[0]
    _check_per_row(op, name, value, batch)
    if not isinstance(value, mx.array):
        array = np.asarray(value)
        if top_k and array.dtype.kind not in "iu":
            raise ValueError(f"[{op}] {name} must be integers, got {array.dtype}.")
        if array.dtype.kind not in "iuf" or np.isnan(array).any():
            raise ValueError(f"[{op}] {name} must be numbers, got {value}.")
        value = mx.array(np.clip(array, -1, 2**31 - 1) if top_k else array)
    values = mx.broadcast_to(value.astype(mx.int32 if top_k else mx.float32), (batch,))
    return _ext.renorm(kind, x, values, stream=stream)


def _check_edits(
    rows: npt.NDArray[np.void],
    bias_ids: mx.array | None,
    counts: mx.array | None,
    masks: mx.array | None,
) -> None:
    """ValueError unless the rows point into the arrays; kernels do not look."""
    for name, array, past in (("counts_row", counts, 0), ("mask_row", masks, 0), ("bias_end", bias_ids, 1)):
        limit = (0 if array is None else array.shape[0]) + past
        most = int(rows[name].max(initial=-1))
        if most >= limit:
            raise ValueError(f"[edit_logits] rows: {name} must be less than {limit}, got {most}.")
    least = int(rows["bias_begin"].min(initial=0))
    if least < 0:
        raise ValueError(f"[edit_logits] rows: bias_begin must not be negative, got {least}.")


def _words(rows: mx.array | npt.NDArray[np.void], stream: mx.Stream | mx.Device | None) -> mx.array:
    """Packed rows as 32-bit words on the device."""
    if isinstance(rows, mx.array):
        return rows
    return to_device(rows.view(np.uint32).reshape(len(rows), rows.dtype.itemsize // 4), stream)


def _pack_rows(
    params: SamplingBatch,
    rng: tuple[PerRow, PerRow],
    batch: int,
    stream: mx.Stream | mx.Device | None,
) -> mx.array:
    values = {
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "seed": rng[0],
        "draw": rng[1],
    }
    return _pack("sample", values, batch, SAMPLE_ROW, stream)


def _pack(
    op: str,
    values: dict[str, PerRow],
    batch: int,
    layout: np.dtype[np.void],
    stream: mx.Stream | mx.Device | None,
) -> mx.array:
    """Per-row values as the words of `layout`, in one array: a step uploads one."""
    for name, value in values.items():
        _check_per_row(op, name, value, batch)
    if any(isinstance(value, mx.array) for value in values.values()):
        return mx.concatenate([_device_words(op, n, v, batch) for n, v in values.items()], axis=1)
    rows = np.empty(batch, layout)
    for name, value in values.items():
        rows[name] = _as_uint64(op, name, value) if layout[name] == np.uint64 else value
    return _words(rows, stream)


def _check_per_row(op: str, name: str, value: PerRow, batch: int) -> None:
    shape = value.shape if isinstance(value, mx.array) else np.shape(value)
    if tuple(shape) not in ((), (batch,)):
        raise ValueError(f"[{op}] {name} must be one value or {batch}, one a row, got shape {tuple(shape)}.")


def _as_uint64(op: str, name: str, value: PerRow) -> npt.NDArray[np.uint64]:
    # Lists of Python integers go through objects: numpy would make floats of 2^63 and above.
    array = value if isinstance(value, np.ndarray) else np.array(value, dtype=object)
    integers = (
        array.dtype.kind in "iu"
        if array.dtype != object
        else all(isinstance(v, int | np.integer) for v in array.flat)
    )
    if not integers or (array.size and not (array.min() >= 0 and int(array.max()) < 2**64)):
        raise ValueError(f"[{op}] {name} must be integers in 0..2^64-1, got {value!r}.")
    return array.astype(np.uint64)


def _device_words(op: str, name: str, value: PerRow, batch: int) -> mx.array:
    """One value a row as ``[batch, 1]`` words, or ``[batch, 2]`` for 64 bits."""
    dtype = {"seed": mx.uint64, "draw": mx.uint64, "top_k": mx.int32}.get(name, mx.float32)
    if not isinstance(value, mx.array):
        value = mx.array(_as_uint64(op, name, value) if dtype == mx.uint64 else np.asarray(value))
    column = mx.contiguous(mx.broadcast_to(value.astype(dtype).reshape(-1, 1), (batch, 1)))
    return column.view(mx.uint32)
