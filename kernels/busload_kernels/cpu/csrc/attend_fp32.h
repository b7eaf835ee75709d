// Attention over the fp32 cache: nothing is rounded but the sums.
#pragma once
#include "softmax.h"

namespace {

struct Fp32Cache {
  // For each kRowsAtOnce rows one dim after the other, row by row; attention scale and log2(e) included.
  struct Queries : Rows {
    float dims[kAttendRows / kRowsAtOnce][kMaxHeadDim][kRowsAtOnce];
    float scale[kAttendRows];

    explicit Queries(const AttendJob& job) : Rows(job) {
      const int dim = job.model->head_dim;
      for (int r = 0; r < count; r++) {
        const float* query =
            job.queries.rotated + (job.row + r / group) * job.queries.width + (job.kv_head * group + r % group) * dim;
        for (int d = 0; d < dim; d++) dims[r / kRowsAtOnce][d][r % kRowsAtOnce] = query[d];
        scale[r] = job.model->attention_scale * kLog2E;
      }
    }
  };
  using Weights = Scores;  // in place of the scores

  template <int Count>
  static void scores(const uint8_t* tile, const Queries&, int first_row, float* out, FetchTiles&);
  template <bool Masked>
  static F16 soften(const Span&, const Queries&, int row, int r, Weights&, FetchTiles&);
  static void settle(const Span&, int, Weights&) {}
  template <int Count>
  static void add_values(const Span&, const Queries&, int first_row, const Weights&, const Sums&, FetchTiles&);
};

template <int Count>
__attribute__((noinline)) void Fp32Cache::scores(const uint8_t* tile, const Queries& rows, int first_row, float* out,
                                                 FetchTiles& fetch) {
  const int dim = rows.job.model->head_dim;
  const float(*query)[kRowsAtOnce] = rows.dims[first_row / kRowsAtOnce];
  for (int part = 0; part < kBlockTokens / 16; part += kScoreParts) {
    F16 total[Count][kScoreParts];
#pragma GCC unroll 8
    for (int r = 0; r < Count; r++)
#pragma GCC unroll 2
      for (int p = 0; p < kScoreParts; p++) total[r][p] = splat(0);
    const float* keys = (const float*)tile + part * 16 * dim;
    for (int d = 0; d < dim; d += 2) {
      fetch.step();
#pragma GCC unroll 2
      for (int i = d; i < d + 2; i++) {
        F16 key[kScoreParts];
#pragma GCC unroll 2
        for (int p = 0; p < kScoreParts; p++) key[p] = load(keys + p * 16 * dim + 16 * i);
#pragma GCC unroll 8
        for (int r = 0; r < Count; r++)
#pragma GCC unroll 2
          for (int p = 0; p < kScoreParts; p++) total[r][p] = fma(key[p], splat(query[i][r]), total[r][p]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < Count; r++)
#pragma GCC unroll 2
      for (int p = 0; p < kScoreParts; p++) store(out + r * kSpan + 16 * (part + p), total[r][p]);
  }
}

// A row's scores to weights. Returns their sum by lane.
template <bool Masked>
inline F16 Fp32Cache::soften(const Span& span, const Queries& rows, int row, int r, Weights& weights, FetchTiles&) {
  const Seen seen = rows.seen(span, row);
  const F16 scale = splat(rows.scale[row]), peak = splat(-weights.peak[r]);
  F16 mass = splat(0);
  for (int i = span.begin * kBlockTokens; i < span.end * kBlockTokens; i += 16) {
    F16 weight = exp2_below(fma(load(weights.score[r] + i), scale, peak));
    if (Masked) weight = seen(weight, i, 0);
    mass = add(mass, weight);
    store(weights.score[r] + i, weight);
  }
  weights.step[r] = weights.factors.more[r];
  return mass;
}

// Only keys that some row sees are touched: what lies in the cache beyond need not be a number.
template <int Count>
__attribute__((noinline)) void Fp32Cache::add_values(const Span& span, const Queries& rows, int first_row,
                                                     const Weights& weights, const Sums& sums, FetchTiles& fetch) {
  const int dim = sums.dim, low = rows.seen(span, first_row).low, high = rows.seen(span, first_row + Count - 1).high;
  for (int d = 0; d < dim; d += 16 * kValueParts) {
    F16 total[Count][kValueParts];
#pragma GCC unroll 8
    for (int r = 0; r < Count; r++)
#pragma GCC unroll 2
      for (int p = 0; p < kValueParts; p++) total[r][p] = splat(0);
    for (int b = span.begin; b < span.end; b++) {
      const float* values = (const float*)span.tile[b] + kBlockTokens * dim + d;
      const int first = b * kBlockTokens, begin = low > first ? low - first : 0;
      const int end = high - first < kBlockTokens ? high - first : kBlockTokens;
      for (int t = begin; t < end; t++) {
        if (t % 2 == 0) fetch.step();
        F16 value[kValueParts];
#pragma GCC unroll 2
        for (int p = 0; p < kValueParts; p++) value[p] = load(values + t * dim + 16 * p);
#pragma GCC unroll 8
        for (int r = 0; r < Count; r++) {
          const F16 weight = splat(weights.score[r][first + t]);
#pragma GCC unroll 2
          for (int p = 0; p < kValueParts; p++) total[r][p] = fma(value[p], weight, total[r][p]);
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < Count; r++)
#pragma GCC unroll 2
      for (int p = 0; p < kValueParts; p++) {
        float* out = sums.out(first_row + r) + d + 16 * p;
        const F16 more = mul(total[r][p], splat(weights.step[r]));
        store(out, fma(load(out), splat(weights.factors.before[r]), more));
      }
  }
}

}  // namespace
