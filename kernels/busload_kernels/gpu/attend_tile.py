"""Device helper: one tile of keys and values, for decode and prefill attention alike.

The softmax is computed online (Milakov and Gimelshein 2018; FlashAttention-2, Dao 2023), in base 2: exp2 is one
instruction, so log2(e) is folded into the scale of the scores. Scales of a quantised cache are folded into the scores
and into the probabilities, so that 8-bit tiles are only cast, never multiplied.
"""

import triton
import triton.language as tl


@triton.jit
def attend_tile(
    q,
    acc,
    peak,
    total,
    k_pages,
    v_pages,
    k_scales,
    v_scales,
    row,
    seen,
    scale_log2,
    DIM: tl.constexpr,
    TILE: tl.constexpr,
):
    """Attends q [rows, DIM] to the TILE slots from row `row` (int64) of the pages on, all of one page and head.

    seen [rows or 1, TILE] says which row sees which slot; None: every row sees all. In the first tile every row must
    see a slot. Values that no row sees are not read, so what a former owner left in a page cannot reach anybody, not
    even as NaN times 0. Returns acc [rows, DIM] (not normalised), peak [rows] and total [rows], the running maximum
    and sum.
    """
    dim = tl.arange(0, DIM)
    slot = tl.arange(0, TILE)
    k = tl.load(k_pages + (row + slot[None, :]) * DIM + dim[:, None])
    scores = tl.dot(q, k.to(q.dtype), input_precision="ieee") * scale_log2
    if k_scales is not None:
        scores = scores * tl.load(k_scales + row + slot)[None, :]
    if seen is not None:
        scores = tl.where(seen, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    weights = tl.exp2(scores - new_peak[:, None])
    kept = tl.exp2(peak - new_peak)
    total = total * kept + tl.sum(weights, 1)
    at = v_pages + (row + slot[:, None]) * DIM + dim[None, :]
    if seen is not None:
        by_any = tl.max(seen.to(tl.int32), 0) > 0
        v = tl.load(at, mask=by_any[:, None], other=0.0)
        if v_scales is not None:
            weights = weights * tl.load(v_scales + row + slot, mask=by_any, other=0.0)[None, :]
    else:
        v = tl.load(at)
        if v_scales is not None:
            weights = weights * tl.load(v_scales + row + slot)[None, :]
    acc = acc * kept[:, None] + tl.dot(weights.to(q.dtype), v.to(q.dtype), input_precision="ieee")
    return acc, new_peak, total
