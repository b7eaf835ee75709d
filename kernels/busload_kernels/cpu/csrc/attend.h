// Grouped-query attention over the paged cache, for up to kAttendRows queries at once.
//
// Keys are taken in spans and spans in segments whose borders lie at fixed positions. A span has one maximum per row; a
// segment has its own sums, which are folded in order. Each row is computed alone inside the loops, and keys that a row
// does not see leave no trace. So it does not matter which rows share a call, or who computes a segment: a token of a
// prompt piece and the same token decoded by itself get equal bits.
#pragma once
#include "attend_fp32.h"
#include "attend_int8.h"

namespace {

// Scores of `count` rows to weights; the sums' maxima and weight sums follow, their values are left to add_values.
template <class Cache, bool Masked>
__attribute__((noinline)) void weigh(const Span& span, const typename Cache::Queries& rows, int first_row, int count,
                                     const Sums& sums, typename Cache::Weights& weights, FetchTiles& fetch) {
  store(weights.peak, splat(kMasked));
  for (int first = 0; first < count; first += 4) {
    F16 top[4];
    for (int k = 0; k < 4; k++)
      top[k] = first + k < count ? peaks_of<Masked>(span, weights.score[first + k], rows.seen(span, first_row + first + k))
                                 : splat(kMasked);
    store_four(weights.peak + first, largest_of_four(top));
  }
  for (int r = 0; r < count; r++) weights.peak[r] *= rows.scale[first_row + r];
  weights.factors = raise(sums.peaks() + first_row, weights.peak);
  for (int r = 0; r < count; r++) {
    const F16 mass = Cache::template soften<Masked>(span, rows, first_row + r, r, weights, fetch);
    float* sum = sums.mass(first_row + r);
    store(sum, fma(mass, splat(weights.factors.more[r]), mul(load(sum), splat(weights.factors.before[r]))));
  }
  Cache::settle(span, count, weights);
}

// f(integral_constant count) for a count known only at run time.
template <int Most, class F>
inline void with_count(int count, F f) {
  if constexpr (Most > 1)
    if (count < Most) return with_count<Most - 1>(count, f);
  f(std::integral_constant<int, Most>{});
}

// One span for all rows, kRowsAtOnce at a time.
template <class Cache>
void attend_span(const Span& all, const typename Cache::Queries& rows, const Sums& sums, FetchTiles& fetch) {
  typename Cache::Weights weights;
  for (int row = 0; row < rows.count; row += kRowsAtOnce) {
    const int count = rows.count - row < kRowsAtOnce ? rows.count - row : kRowsAtOnce;
    const Span span = all.seen_by(rows.oldest(row), rows.position(row + count - 1));
    const bool masked = rows.position(row) < span.first + kSpan - 1 || rows.oldest(row + count - 1) > span.first;
    with_count<kRowsAtOnce>(count, [&](auto n) {
      for (int b = span.begin; b < span.end; b++)
        Cache::template scores<n>(span.tile[b], rows, row, weights.score[0] + b * kBlockTokens, fetch);
      if (masked)
        weigh<Cache, true>(span, rows, row, n, sums, weights, fetch);
      else
        weigh<Cache, false>(span, rows, row, n, sums, weights, fetch);
      Cache::template add_values<n>(span, rows, row, weights, sums, fetch);
    });
  }
}

// Sums over one segment of the keys, as far as rows see it.
template <class Cache>
void attend_segment(const typename Cache::Queries& rows, int segment, const Sums& sums) {
  const AttendJob& job = rows.job;
  sums.clear(rows.count);
  const int64_t head = job.kv_head * kv_tile_bytes(*job.model);
  const auto tile = [&](int b) { return job.kv + job.blocks[b] * job.block_bytes + head; };
  const int begin = rows.oldest(0) / kBlockTokens, end = rows.position(rows.count - 1) / kBlockTokens + 1;
  for (int first = segment * kSegmentBlocks; first < (segment + 1) * kSegmentBlocks; first += kSpanBlocks) {
    Span span;
    span.first = first * kBlockTokens;
    span.begin = begin > first ? begin - first : 0;
    span.end = end - first < kSpanBlocks ? end - first : kSpanBlocks;
    FetchTiles fetch(kv_tile_bytes(*job.model));
    for (int b = span.begin; b < span.end; b++) span.tile[b] = tile(first + b);
    for (int b = first + kSpanBlocks; b < first + 2 * kSpanBlocks && b < end; b++) fetch.add(tile(b));
    if (first + kSpanBlocks >= end)
      for (const uint8_t* next : job.next) fetch.add(next);
    if (span.begin < span.end) attend_span<Cache>(span, rows, sums, fetch);
  }
}

// The result of a job's rows: out / sum of the weights, quantised.
void finish(const AttendJob& job, const Sums& sums) {
  const int group = job.model->heads / job.model->kv_heads;
  const int dim = sums.dim, groups = dim / kGroup;
  float inverse[kAttendRows];
  for (int row = 0; row < job.count * group; row++) inverse[row] = 1.f / sum(load(sums.mass(row)));
  int rows[kAttendRows * kMaxHeadDim / kGroup];  // of the groups of one token: looked up, as a division takes longer
  for (int head = 0, i = 0; head < group; head++)
    for (int g = 0; g < groups; g++) rows[i++] = head;
  for (int token = 0; token < job.count; token++)
    quantise_row(group * groups, job.out, job.row + token, job.kv_head * group * groups, [&](int i) {
      const int head = rows[i / kGroup], row = token * group + head;
      return mul(load(sums.out(row) + i - head * dim), splat(inverse[row]));
    });
}

template <class Cache>
void attend_over(const AttendJob& job) {
  alignas(64) float memory[2][attend_sums(kMaxHeadDim, kAttendRows)];
  const typename Cache::Queries rows(job);
  if (job.segment >= 0) return attend_segment<Cache>(rows, job.segment, {job.partial, job.model->head_dim});
  const Sums total{memory[0], job.model->head_dim}, part{memory[1], job.model->head_dim};
  const int first = rows.oldest(0) / kSegmentTokens;
  attend_segment<Cache>(rows, first, total);
  for (int s = first + 1; s <= rows.position(rows.count - 1) / kSegmentTokens; s++) {
    attend_segment<Cache>(rows, s, part);
    fold(total, part, rows.count);
  }
  finish(job, total);
}

void attend(const AttendJob& job) {
  job.model->kv_format == BL_KV_FP32 ? attend_over<Fp32Cache>(job) : attend_over<Int8Cache>(job);
}

// What `attend` does for a job whose segments lie apart, one after the other from the first one of the context.
void attend_join(const AttendJob& job, float* partials) {
  const int dim = job.model->head_dim, rows = job.count * (job.model->heads / job.model->kv_heads);
  const int last = (job.position + job.count - 1) / kSegmentTokens;
  const int first = job.window && job.position >= job.window ? (job.position - job.window + 1) / kSegmentTokens : 0;
  const auto part = [&](int s) { return Sums{partials + s * (int64_t)attend_sums(dim, rows), dim}; };
  for (int s = first + 1; s <= last; s++) fold(part(first), part(s), rows);
  finish(job, part(first));
}

}  // namespace
