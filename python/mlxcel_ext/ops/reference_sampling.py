"""The semantics of the sampling ops in numpy float64, by full sorts: what the tests compare with."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

GUMBEL_STREAM, ACCEPT_STREAM = 0, 1


def philox(seed: int, draw: int, block: npt.ArrayLike, stream: int) -> npt.NDArray[np.uint32]:
    """Philox4x32-10 with key ``seed`` and counter ``(block, stream, draw)``: ``[..., 4]`` words."""
    low = np.uint64(0xFFFFFFFF)
    shift = np.uint64(32)
    c0 = np.asarray(block, np.uint64)
    c1, c2, c3 = (np.full_like(c0, word) for word in (stream, draw & 0xFFFFFFFF, draw >> 32))
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):
        p0, p1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (
            (p1 >> shift) ^ c1 ^ np.uint64(k0),
            p1 & low,
            (p0 >> shift) ^ c3 ^ np.uint64(k1),
            p0 & low,
        )
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=-1).astype(np.uint32)


def uniform(words: npt.NDArray[np.uint32]) -> Array:
    """23-bit uniforms, never 0 or 1."""
    return ((words >> np.uint32(9)).astype(np.float64) + 0.5) * 2.0**-23


def gumbel(seed: int, draw: int, vocab: int) -> Array:
    """The noise of each token of a row."""
    words = philox(seed, draw, np.arange((vocab + 3) // 4), GUMBEL_STREAM).reshape(-1)[:vocab]
    return -np.log(-np.log(uniform(words)))


class Kept(NamedTuple):
    """What the filters keep, and how far (relative to the mass) the top-p boundary is from another answer."""

    mask: Mask
    margin: float


def kept_tokens(
    logits: npt.ArrayLike,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    *,
    joint: bool = False,
    temperature_last: bool = False,
) -> Kept:
    """The kept tokens of one row of finite or -inf logits, at a temperature above 0."""
    x = np.asarray(logits, np.float64)
    vocab = x.size
    scale = 1.0 if temperature_last else 1.0 / float(np.float32(temperature))
    order = np.lexsort((np.arange(vocab), -x))  # by value, then by index
    weight = np.exp((x[order] - x.max()) * scale)
    kept = np.isfinite(x[order])
    if min_p > 0:
        kept &= x[order] >= x.max() + np.log(min(1.0, float(np.float32(min_p)))) / scale
    if 0 < top_k < vocab:
        kept &= np.arange(vocab) < top_k
    margin = np.inf
    if top_p < 1.0:
        mass = weight if joint else np.where(kept, weight, 0.0)
        before = np.cumsum(mass) - mass
        share = before / mass.sum() - float(np.float32(top_p))
        margin = float(np.abs(share).min())
        kept &= (share < 0) | (np.arange(vocab) == 0)
    mask = np.zeros(vocab, bool)
    mask[order[kept]] = True
    return Kept(mask, margin)


class Drawn(NamedTuple):
    """A token, whether the row was valid, and how much closer to another token the draw may have been."""

    id: int
    valid: bool
    margin: float


def sample_row(
    logits: npt.ArrayLike,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int,
    draw: int,
    *,
    joint: bool = False,
    temperature_last: bool = False,
) -> Drawn:
    """The draw of one row. ``margin`` is the score's lead, or top-p's margin where that is smaller."""
    x = np.asarray(logits, np.float64)
    if np.isnan(x).any() or not np.any(x > -np.inf):
        return Drawn(-1, False, np.inf)
    if temperature < 1e-5 or top_k == 1 or top_p <= 0 or np.isposinf(x).any():
        return Drawn(int(np.argmax(x)), True, np.inf)
    kept = kept_tokens(x, temperature, top_k, top_p, min_p, joint=joint, temperature_last=temperature_last)
    score = np.where(kept.mask, x / float(np.float32(temperature)) + gumbel(seed, draw, x.size), -np.inf)
    winner = int(np.argmax(score))
    lead = score[winner] - np.partition(score, -2)[-2] if np.count_nonzero(kept.mask) > 1 else np.inf
    return Drawn(winner, True, min(float(lead), kept.margin))


def top_k_renorm(probs: npt.ArrayLike, top_k: int) -> Array:
    p = _positive(probs)
    order = np.lexsort((np.arange(p.size), -p))
    return _renormalised(p, order[: top_k if 0 < top_k < p.size else p.size])


def top_p_renorm(probs: npt.ArrayLike, top_p: float) -> Array:
    p = _positive(probs)
    order = np.lexsort((np.arange(p.size), -p))
    before = np.cumsum(p[order]) - p[order]
    kept = (before < float(np.float32(top_p)) * p.sum()) | (np.arange(p.size) == 0)
    return _renormalised(p, order if top_p >= 1 else order[kept])


def min_p_renorm(probs: npt.ArrayLike, min_p: float) -> Array:
    p = _positive(probs)
    return _renormalised(p, np.flatnonzero(p >= min(1.0, float(np.float32(min_p))) * p.max()))


def top_k_mask(logits: npt.ArrayLike, top_k: int) -> Array:
    x = np.asarray(logits, np.float64)
    if not 0 < top_k < x.size:
        return x
    first = np.lexsort((np.arange(x.size), -x))[:top_k]
    out = np.full_like(x, -np.inf)
    out[first] = x[first]
    return out


def _positive(probs: npt.ArrayLike) -> Array:
    p = np.asarray(probs, np.float64)
    return np.where(p > 0, p, 0.0)


def _renormalised(p: Array, kept: npt.NDArray[np.integer]) -> Array:
    out = np.zeros_like(p)
    total = p[kept].sum()
    if total > 0:
        out[kept] = p[kept] / total
    return out


def chain(
    draft_ids: npt.ArrayLike, draft: npt.ArrayLike, target: npt.ArrayLike, seed: int, draw: int
) -> list[int]:
    """Accepted drafts and the token drawn after them, of one chain."""
    ids = [int(i) for i in np.asarray(draft_ids)]
    q, p = np.asarray(draft, np.float64), np.asarray(target, np.float64)
    vocab = p.shape[-1]
    out: list[int] = []
    for i, token in enumerate(ids):
        u = uniform(philox(seed, draw + i, np.zeros(1), ACCEPT_STREAM))[0, 0]
        if not (0 <= token < vocab and u * q[i, token] < p[i, token]):
            break
        out.append(token)
    at = len(out)
    weights = p[at]
    if at < len(ids) and np.any(p[at] > q[at]):
        weights = np.maximum(p[at] - q[at], 0.0)
    with np.errstate(divide="ignore"):
        return [*out, int(np.argmax(np.log(weights) + gumbel(seed, draw + at, vocab)))]


def edit_logits(
    logits: npt.ArrayLike,
    *,
    mask: npt.ArrayLike | None = None,
    bias: dict[int, float] | None = None,
    prompt: npt.ArrayLike = (),
    output: npt.ArrayLike = (),
    repetition: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
) -> Array:
    """Mask, bias and penalties of one row, in vLLM's order."""
    x = np.array(logits, np.float64)
    if mask is not None:
        words = np.asarray(mask, np.uint32)
        allowed = np.unpackbits(words.view(np.uint8), bitorder="little")[: x.size].astype(bool)
        x[: allowed.size][~allowed] = -np.inf
        x[allowed.size :] = -np.inf
    for token, value in (bias or {}).items():
        x[token] += value
    counts = np.bincount(np.asarray(output, np.int64), minlength=x.size)
    seen = counts > 0
    seen[np.asarray(prompt, np.int64)] = True
    x = np.where(seen, np.where(x > 0, x / repetition, x * repetition), x)
    return x - frequency * counts - presence * (counts > 0)


def log_softmax(logits: npt.ArrayLike) -> Array:
    x = np.asarray(logits, np.float64)
    return x - x.max() - np.log(np.sum(np.exp(x - x.max())))
