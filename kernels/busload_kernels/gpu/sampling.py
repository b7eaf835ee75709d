"""Drawing the next token of each row: greedy, or by temperature with min-p, top-k and top-p. No sort, no wait.

Three launches whatever the parameters, so that a captured graph serves every mixture:

1. `_threshold_kernel`: the smallest logit that may be drawn. Top-k and top-p are both "the largest threshold that
   leaves enough above it", where enough is a count or a probability; the threshold is searched among the bit patterns
   of fp32, four ways at a time. Rows that ask for neither leave at once.
2. `_candidate_kernel`: the best token of each piece of the vocabulary, by logit / temperature + Gumbel noise (the
   Gumbel-max trick, Yellott 1977: its argmax is a draw from the softmax), or by the logit alone.
3. `_winner_kernel`: the best of the pieces; of equals the lower id.

The noise is Philox (Salmon et al. 2011) of seed, sample index and token, so a draw depends on its own row alone. It is
another draw than the CPU's from the same seed, of the same distribution; greedy is the same. Where tokens are as likely
as the last one inside top-k or top-p, all of them stay.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .checks import FLOATS, check_tensor
from .errors import GpuKernelError
from .launch import Tile, launch

PIECE = 4096
"""Tokens of a program."""
SEARCHED_AT_ONCE = 1024
"""Tokens that a step of the search for a threshold holds in registers."""


@triton.jit
def _key(logits):
    """fp32 to integers in the same order."""
    bits = logits.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _mass(logits, pivots, peak, scale_log2, COUNT: tl.constexpr):
    """How much of `logits` [BLOCK] lies at or above each of `pivots` [4]: tokens, or weight relative to the peak."""
    weight = tl.full(logits.shape, 1.0, tl.float32) if COUNT else tl.exp2((logits - peak) * scale_log2)
    above = _key(logits).to(tl.int64)[None, :] >= pivots[:, None]
    return tl.sum(tl.where(above, weight[None, :], 0.0), 1)


@triton.jit
def _search(row, peak, low, share, scale_log2, COUNT: tl.constexpr, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """Largest key with enough at or above it: `share` tokens if COUNT, else that share of the weight from `low` on."""
    high = _key(peak).to(tl.int64) + 1
    lane = tl.arange(0, 4)
    wanted = share
    if not COUNT:
        wanted = share * tl.sum(
            tl.where(lane == 0, _row_mass(row, low + lane * 0, peak, scale_log2, COUNT, VOCAB, BLOCK), 0.0)
        )
    while high - low > 1:
        step = (high - low + 3) // 4
        pivots = tl.minimum(low + step * (lane + 1), high)
        enough = _row_mass(row, pivots, peak, scale_log2, COUNT, VOCAB, BLOCK) >= wanted
        enough = enough & (pivots < high)
        new_low = tl.max(tl.where(enough, pivots, low), 0)
        high = tl.min(tl.where(enough, high, pivots), 0)
        low = new_low
    return low


@triton.jit
def _row_mass(row, pivots, peak, scale_log2, COUNT: tl.constexpr, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    mass = tl.zeros([4], tl.float32)
    for start in range(0, VOCAB, BLOCK):
        token = start + tl.arange(0, BLOCK)
        logits = tl.load(row + token, mask=token < VOCAB, other=float("-inf")).to(tl.float32)
        mass += _mass(logits, pivots, peak, scale_log2, COUNT)
    return mass


@triton.jit
def _threshold_kernel(
    logits, temperatures, top_ks, top_ps, min_ps, thresholds, VOCAB: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64)
    row = logits + at * VOCAB
    temperature = tl.load(temperatures + at)
    top_k = tl.load(top_ks + at)
    top_p = tl.load(top_ps + at)
    min_p = tl.load(min_ps + at)
    tl.store(thresholds + at, float("-inf"))
    if (temperature > 0) & ((top_k > 0) | (top_p < 1) | (min_p > 0)):
        best = tl.full([BLOCK], float("-inf"), tl.float32)
        for start in range(0, VOCAB, BLOCK):
            token = start + tl.arange(0, BLOCK)
            best = tl.maximum(best, tl.load(row + token, mask=token < VOCAB, other=float("-inf")).to(tl.float32))
        peak = tl.max(best, 0)
        scale_log2 = 1.4426950408889634 / temperature
        least = _key(peak + tl.log(tl.maximum(min_p, 1e-37)) * temperature).to(tl.int64)
        low = tl.where(min_p > 0, least, _key(tl.full([], float("-inf"), tl.float32)).to(tl.int64))
        if (top_k > 0) & (top_k < VOCAB):
            bottom = _key(tl.full([], float("-inf"), tl.float32)).to(tl.int64)
            kept = _search(row, peak, bottom, top_k.to(tl.float32), scale_log2, True, VOCAB, BLOCK)
            low = tl.maximum(low, kept)
        if top_p < 1:
            low = _search(row, peak, low, top_p, scale_log2, False, VOCAB, BLOCK)
        key = low.to(tl.int32)
        tl.store(thresholds + at, (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True))


@triton.jit
def _gumbel(seed, sample_index, token):
    """-log(E), E exponential. The uniform number is small where E is, and so keeps its precision there."""
    zero = token * 0
    bits, _, _, _ = tl.philox(seed, token, zero + sample_index, zero, zero)
    uniform = tl.minimum((bits.to(tl.uint32, bitcast=True).to(tl.float32) + 0.5) * 2.3283064e-10, 0.99999994)
    exponential = tl.where(uniform < 1e-3, uniform + uniform * uniform * 0.5, -tl.log(1.0 - uniform))
    return -tl.log(exponential)


@triton.jit
def _candidate_kernel(
    logits,
    temperatures,
    thresholds,
    seeds,
    sample_indices,
    scores,
    tokens,
    VOCAB: tl.constexpr,
    PIECES: tl.constexpr,
    PIECE: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    score = tl.load(logits + at * VOCAB + token, mask=token < VOCAB, other=float("-inf")).to(tl.float32)
    temperature = tl.load(temperatures + at)
    if temperature > 0:
        noise = _gumbel(tl.load(seeds + at), tl.load(sample_indices + at), token)
        allowed = score >= tl.load(thresholds + at)
        score = tl.where(allowed, score / temperature + noise, float("-inf"))
    best = tl.max(score, 0)
    first = tl.min(tl.where(score == best, token, VOCAB - 1), 0)
    tl.store(scores + at * PIECES + tl.program_id(1), best)
    tl.store(tokens + at * PIECES + tl.program_id(1), first)


@triton.jit
def _winner_kernel(scores, tokens, out, PIECES: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64)
    piece = tl.arange(0, BLOCK)
    score = tl.load(scores + at * PIECES + piece, mask=piece < PIECES, other=float("-inf"))
    token = tl.load(tokens + at * PIECES + piece, mask=piece < PIECES, other=2147483647)
    best = tl.max(score, 0)
    tl.store(out + at, tl.min(tl.where(score == best, token, 2147483647), 0))


@dataclass(frozen=True, slots=True)
class SamplingBuffers:
    """Parameters of each row and memory between the launches, for a fixed number of rows.

    temperature, top_p, min_p [rows] fp32 (temperature 0 is greedy, top_p 1 and min_p 0 keep all), top_k [rows] int32 (0
    keeps all), seed [rows] int64, sample_index [rows] int32: tokens that the request has drawn before.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    seed: torch.Tensor
    sample_index: torch.Tensor
    thresholds: torch.Tensor
    scores: torch.Tensor
    tokens: torch.Tensor

    @classmethod
    def allocate(cls, rows: int, vocab: int, device: torch.device | str) -> "SamplingBuffers":
        """All rows greedy."""
        pieces = triton.cdiv(vocab, PIECE)
        return cls(
            temperature=torch.zeros(rows, device=device),
            top_k=torch.zeros(rows, dtype=torch.int32, device=device),
            top_p=torch.ones(rows, device=device),
            min_p=torch.zeros(rows, device=device),
            seed=torch.zeros(rows, dtype=torch.int64, device=device),
            sample_index=torch.zeros(rows, dtype=torch.int32, device=device),
            thresholds=torch.empty(rows, device=device),
            scores=torch.empty((rows, pieces), device=device),
            tokens=torch.empty((rows, pieces), dtype=torch.int32, device=device),
        )


def sample(logits: torch.Tensor, buffers: SamplingBuffers, out: torch.Tensor) -> torch.Tensor:
    """One token id for each row of `logits` [rows, vocab] (floats, finite or minus infinity, one finite at least) into
    `out` [rows] int32. Returns out."""
    check_tensor("logits", logits, ("rows", "vocab"), FLOATS)
    rows, vocab = logits.shape
    pieces = triton.cdiv(vocab, PIECE)
    check_tensor("out", out, (rows,), (torch.int32,))
    check_tensor("buffers.temperature", buffers.temperature, (rows,), (torch.float32,))
    if tuple(buffers.scores.shape) != (rows, pieces):
        raise GpuKernelError(
            f"buffers.scores has shape {list(buffers.scores.shape)}; {rows} rows of {vocab} tokens need "
            f"[{rows}, {pieces}]: allocate the buffers for this vocabulary"
        )
    launch(
        _threshold_kernel,
        (rows,),
        Tile({"BLOCK": SEARCHED_AT_ONCE}, num_warps=8),
        logits=logits,
        temperatures=buffers.temperature,
        top_ks=buffers.top_k,
        top_ps=buffers.top_p,
        min_ps=buffers.min_p,
        thresholds=buffers.thresholds,
        VOCAB=vocab,
    )
    launch(
        _candidate_kernel,
        (rows, pieces),
        Tile({"PIECE": PIECE}, num_warps=8),
        logits=logits,
        temperatures=buffers.temperature,
        thresholds=buffers.thresholds,
        seeds=buffers.seed,
        sample_indices=buffers.sample_index,
        scores=buffers.scores,
        tokens=buffers.tokens,
        VOCAB=vocab,
        PIECES=pieces,
    )
    launch(
        _winner_kernel,
        (rows,),
        Tile({"BLOCK": triton.next_power_of_2(pieces)}, num_warps=1),
        scores=buffers.scores,
        tokens=buffers.tokens,
        out=out,
        PIECES=pieces,
    )
    return out
