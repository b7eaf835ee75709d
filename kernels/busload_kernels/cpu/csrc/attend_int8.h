// Attention over the int8 cache: queries and keys as bytes, a span's softmax weights as bytes relative to its maximum and
// its largest value scale, so that both products are integer dot products (layout.h says how keys and values lie).
#pragma once
#include "softmax.h"

namespace {

constexpr int kUnroll = 4;  // lines of 4 dims

// What a weight is multiplied with to become whole: value scale over the largest one seen, times kTop.
struct ByteScale {
  alignas(64) float factor[kSpan];
  float step;  // what a whole number stands for

  void set(const Span& span, int dim, int low, int high) {
    F16 top = splat(0);
    for (int b = span.begin; b < span.end; b++)
      for (int i = 0; i < kBlockTokens; i += 16) {
        const F16 scale = load((const float*)(span.tile[b] + 2 * kBlockTokens * dim) + kBlockTokens + i);
        const F16 seen = keep_between(scale, count_up(b * kBlockTokens + i), low, high, splat(0));
        store(factor + b * kBlockTokens + i, seen);
        top = max(top, seen);
      }
    const float largest_scale = largest(top);
    step = largest_scale * (1.f / DotValues::kTop);
    const F16 inverse = splat(largest_scale > 0 ? DotValues::kTop / largest_scale : 0.f);
    for (int i = span.begin * kBlockTokens; i < span.end * kBlockTokens; i += 16)
      store(factor + i, mul(load(factor + i), inverse));
  }
};

struct Int8Cache {
  // For each kRowsAtOnce rows words of 4 dims, row by row, so that one pointer reaches all of them.
  struct Queries : Rows {
    DotKeys::Word words[kAttendRows / kRowsAtOnce][kMaxHeadDim / 4][kRowsAtOnce];
    float scale[kAttendRows];
    int32_t bias[kAttendRows];

    explicit Queries(const AttendJob& job) : Rows(job) {
      const int dim = job.model->head_dim;
      for (int r = 0, token = 0, head = 0; r < count; r++) {
        const int64_t index = (int64_t)(job.row + token) * job.model->heads + job.kv_head * group + head;
        if (++head == group) head = 0, token++;
        for (int i = 0; i < dim / 4; i++)
          words[r / kRowsAtOnce][i][r % kRowsAtOnce] = DotKeys::word(job.queries.q + index * dim + 4 * i);
        scale[r] = job.queries.scale[index];
        bias[r] = -DotKeys::kBias * job.queries.sum[index];
      }
    }
  };
  struct Weights : Scores {
    DotValues::Pack<kSpanBlocks> pack;
    ByteScale to_byte;
    bool whole_span = false;  // `to_byte` is that of the whole span
  };

  // Not inlined: gcc would spill the sums for the sake of what is around.
  template <int Count>
  static void scores(const uint8_t* tile, const Queries&, int first_row, float* out, FetchTiles&);
  template <bool Masked>
  static F16 soften(const Span&, const Queries&, int row, int r, Weights&, FetchTiles&);
  static void settle(const Span& span, int rows, Weights& weights) { weights.pack.finish(rows, span.begin, span.end, weights.step); }
  template <int Count>
  static void add_values(const Span&, const Queries&, int first_row, const Weights&, const Sums&, FetchTiles&);
};

// Of one block, without the scales of the queries.
template <int Count>
__attribute__((noinline)) void Int8Cache::scores(const uint8_t* tile, const Queries& rows, int first_row, float* out,
                                                 FetchTiles& fetch) {
  const int dim = rows.job.model->head_dim;
  const DotKeys::Word(*query)[kRowsAtOnce] = rows.words[first_row / kRowsAtOnce];
  const float* key_scale = (const float*)(tile + 2 * kBlockTokens * dim);
#pragma GCC unroll 2
  for (int part = 0; part < kBlockTokens / 16; part += kScoreParts) {
    I16 total[Count][kScoreParts];
#pragma GCC unroll 8
    for (int r = 0; r < Count; r++)
#pragma GCC unroll 2
      for (int p = 0; p < kScoreParts; p++) total[r][p] = splat_int(rows.bias[first_row + r]);
    const uint8_t* keys = tile + part * 16 * dim;
    for (int i = 0; i < dim / 4; i += kUnroll, keys += 64 * kUnroll) {
      fetch.step();
#pragma GCC unroll 4
      for (int j = 0; j < kUnroll; j++) {
        DotKeys::Operand line[kScoreParts];
#pragma GCC unroll 2
        for (int p = 0; p < kScoreParts; p++) line[p] = DotKeys::prepare(load_line(keys + 64 * j + p * 16 * dim));
#pragma GCC unroll 8
        for (int r = 0; r < Count; r++)
#pragma GCC unroll 2
          for (int p = 0; p < kScoreParts; p++) DotKeys::step(total[r][p], line[p], query[i + j][r]);
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < Count; r++)
#pragma GCC unroll 2
      for (int p = 0; p < kScoreParts; p++)
        store(out + r * kSpan + 16 * (part + p), mul(to_float(total[r][p]), load(key_scale + 16 * (part + p))));
  }
}

// A row's scores to weights. Returns the sum of the weights by lane.
template <bool Masked>
inline F16 Int8Cache::soften(const Span& span, const Queries& rows, int row, int r, Weights& weights, FetchTiles& fetch) {
  const Seen seen = rows.seen(span, row);
  if (Masked) weights.to_byte.set(span, rows.job.model->head_dim, seen.low, seen.high), weights.whole_span = false;
  if (!Masked && !weights.whole_span)
    weights.to_byte.set(span, rows.job.model->head_dim, 0, kSpan), weights.whole_span = true;
  const F16 scale = splat(rows.scale[row]), peak = splat(-weights.peak[r]);
  F16 mass = splat(0);
  weights.pack.start(r);
  for (int b = span.begin; b < span.end; b++) {
    fetch.step();
    I16 rounded[2];
#pragma GCC unroll 2
    for (int p = 0; p < 2; p++) {
      const int at = b * kBlockTokens + 16 * p;
      F16 weight = exp2_weight(fma(load(weights.score[r] + at), scale, peak));
      if (Masked) weight = seen(weight, at, 0);
      mass = add(mass, weight);
      rounded[p] = round_int(mul(weight, load(weights.to_byte.factor + at)));
    }
    weights.pack.put(r, b, rounded[0], rounded[1]);
  }
  weights.step[r] = weights.factors.more[r] * weights.to_byte.step;
  return mass;
}

template <int Count>
__attribute__((noinline)) void Int8Cache::add_values(const Span& span, const Queries&, int first_row, const Weights& weights,
                                                     const Sums& sums, FetchTiles& fetch) {
  const int dim = sums.dim;
  for (int d = 0; d < dim; d += 16 * kValueParts) {
    I16 total[Count][kValueParts];
#pragma GCC unroll 8
    for (int r = 0; r < Count; r++)
#pragma GCC unroll 2
      for (int p = 0; p < kValueParts; p++) total[r][p] = splat_int(0);
    for (int b = span.begin; b < span.end; b++) {
      const uint8_t* values = span.tile[b] + kBlockTokens * dim + 4 * d;
      const DotValues::Word* words = weights.pack.words[0] + b * (kBlockTokens / 4);
#pragma GCC unroll 8
      for (int g = 0; g < kBlockTokens / 4; g++) {
        fetch.step();
        DotValues::Operand line[kValueParts];
#pragma GCC unroll 2
        for (int p = 0; p < kValueParts; p++) line[p] = DotValues::prepare(load_line(values + 4 * g * dim + 64 * p));
#pragma GCC unroll 8
        for (int r = 0; r < Count; r++) {
          const DotValues::Word& word = words[r * (kSpan / 4) + DotValues::place(g)];
#pragma GCC unroll 2
          for (int p = 0; p < kValueParts; p++) DotValues::step(total[r][p], line[p], word);
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < Count; r++)
#pragma GCC unroll 2
      for (int p = 0; p < kValueParts; p++) {
        float* out = sums.out(first_row + r) + d + 16 * p;
        const F16 more = mul(to_float(total[r][p]), splat(weights.step[r]));
        store(out, fma(load(out), splat(weights.factors.before[r]), more));
      }
  }
}

}  // namespace
