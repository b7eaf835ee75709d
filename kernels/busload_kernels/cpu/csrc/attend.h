// Grouped-query attention over the paged int8 cache with a running maximum (online softmax, Milakov and Gimelshein 2018;
// Dao et al. 2022), for up to kAttendRows queries at once.
//
// Keys are taken in spans and spans in segments whose borders lie at fixed positions. A span has one maximum per row, and
// its weights become bytes relative to it; a segment has its own sums, which are folded in order. Each row is computed
// alone inside the loops, and keys that a row does not see leave no trace. So it does not matter which rows share a call,
// or who computes a segment: a token of a prompt piece and the same token decoded by itself get equal bits.
#pragma once
#include "rows.h"

namespace {

constexpr float kMasked = -1e30f;
constexpr int kUnroll = 4;  // lines of 4 dims or 4 tokens
constexpr int kSpan = kSpanBlocks * kBlockTokens;

// Softmax-weighted values over a range of keys: for each row out[head_dim] and the sum of the weights by lane [16]; what
// both are relative to is log2 of the largest weight.
struct Sums {
  float* base;
  int dim;
  float* peaks() const { return base; }
  float* out(int row) const { return base + kAttendRows + 16 + row * (int64_t)(dim + 16); }
  float* mass(int row) const { return out(row) + dim; }
  void clear(int rows) const {
    for (int r = 0; r < kAttendRows; r += 16) store(peaks() + r, splat(kMasked));
    for (int r = 0; r < rows; r++)
      for (int d = 0; d < dim + 16; d += 16) store(out(r) + d, splat(0));
  }
};

// 2^x for x <= 0, relative error 3e-6 (weights are rounded to bytes), exact at 0. The polynomial is the minimax fit of
// 2^f, |f| <= 1/2, with a constant of 1.
inline F16 exp2_weight(F16 x) {
  const F16 shift = splat(12582912.f);  // 1.5 * 2^23: sums with it have no fraction bits
  const F16 whole = sub(add(x, shift), shift), f = sub(x, whole);
  F16 p = splat(9.58285294e-3f);
  p = fma(p, f, splat(5.59064262e-2f));
  p = fma(p, f, splat(2.40240991e-1f));
  p = fma(p, f, splat(6.93124175e-1f));
  p = fma(p, f, splat(1.f));
  return times_small_power(p, whole);
}

// Brings the maxima of 16 rows from `peaks` to those that also hold for `more`. Returns the factors of sums that were
// relative to either. One of a row's factors is 1: a row that sees nothing of a range keeps its sums to the bit.
struct Factors {
  alignas(64) float before[16], more[16];
};
inline Factors raise(float* peaks, const float* more) {
  Factors factors;
  const F16 before = load(peaks), after = max(before, load(more));
  store(factors.before, exp2_weight(sub(before, after)));
  store(factors.more, exp2_weight(sub(load(more), after)));
  store(peaks, after);
  return factors;
}

// sums += more
inline void fold(const Sums& sums, const Sums& more, int rows) {
  for (int first = 0; first < rows; first += 16) {
    const Factors factors = raise(sums.peaks() + first, more.peaks() + first);
    for (int r = first; r < rows && r < first + 16; r++)
      for (int i = 0; i < sums.dim + 16; i += 16)
        store(sums.out(r) + i, fma(load(more.out(r) + i), splat(factors.more[r - first]),
                                   mul(load(sums.out(r) + i), splat(factors.before[r - first]))));
  }
}

// The queries of a job: for each kRowsAtOnce rows words of 4 dims, row by row, so that one pointer reaches all of them.
struct Rows {
  const AttendJob& job;
  const int group, count;
  DotKeys::Word words[kAttendRows / kRowsAtOnce][kMaxHeadDim / 4][kRowsAtOnce];
  float scale[kAttendRows];
  int32_t bias[kAttendRows];

  explicit Rows(const AttendJob& j) : job(j), group(j.model->heads / j.model->kv_heads), count(j.count * group) {
    const int dim = job.model->head_dim;
    for (int r = 0; r < count; r++) {
      const int64_t index = (int64_t)(job.row + r / group) * job.model->heads + job.kv_head * group + r % group;
      for (int i = 0; i < dim / 4; i++)
        words[r / kRowsAtOnce][i][r % kRowsAtOnce] = DotKeys::word(job.queries.q + index * dim + 4 * i);
      scale[r] = job.queries.scale[index];
      bias[r] = -DotKeys::kBias * job.queries.sum[index];
    }
  }
  int position(int r) const { return job.position + r / group; }
  int oldest(int r) const { return job.window && position(r) >= job.window ? position(r) - job.window + 1 : 0; }
};

// The tiles of the span that comes next, to be fetched evenly during this one: memory takes longer than the arithmetic of
// a few rows, and it is never to wait for it.
struct FetchTiles {
  const uint8_t* tile[kSpanBlocks];
  int count = 0, index = 0;
  int64_t offset = 0, bytes;

  static constexpr int kStep = 256;  // divides every tile
  explicit FetchTiles(int64_t tile_bytes) : bytes(tile_bytes) {}
  void add(const uint8_t* next) {
    if (next) tile[count++] = next;
  }
  void step() {
    if (index == count) return;
    for (int i = 0; i < kStep; i += 64) __builtin_prefetch(tile[index] + offset + i, 0, 2);
    if ((offset += kStep) == bytes) offset = 0, index++;
  }
};

// Blocks begin..end of a span.
struct Span {
  const uint8_t* tile[kSpanBlocks];
  int begin, end;
  int first;  // position of the first key of block 0

  Span seen_by(int oldest, int newest) const {
    Span part = *this;
    const int low = (oldest - first) / kBlockTokens, high = (newest - first + kBlockTokens) / kBlockTokens;
    if (low > begin) part.begin = low;
    if (high < end) part.end = high;
    return part;
  }
};

// Of one block, without the scales of the queries. Not inlined: gcc would spill the sums for the sake of what is around.
template <int Count>
__attribute__((noinline)) void scores(const uint8_t* tile, const Rows& rows, int first_row, float* out, FetchTiles& fetch) {
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

// What a weight is multiplied with to become a byte: value scale over the largest one seen, times 255.
struct ByteScale {
  alignas(64) float factor[kSpan];
  float step;  // of a byte

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
    step = largest_scale * (1.f / 255);
    const F16 inverse = splat(largest_scale > 0 ? 255.f / largest_scale : 0.f);
    for (int i = span.begin * kBlockTokens; i < span.end * kBlockTokens; i += 16)
      store(factor + i, mul(load(factor + i), inverse));
  }
};

// Kept for the rows that are computed at once.
struct Weights {
  alignas(64) float score[kRowsAtOnce][kSpan];
  alignas(64) DotValues::Word words[kRowsAtOnce][kSpan / 4];
  alignas(64) float peak[16];  // by row: log2 of the largest weight
  float step[kRowsAtOnce];     // of a byte
  Factors factors;
};

// Which keys of a span a row sees.
struct Seen {
  int low, high;
  F16 operator()(F16 v, int first, float otherwise) const {
    return keep_between(v, count_up(first), low, high, splat(otherwise));
  }
};

template <bool Masked>
inline float peak_of(const Span& span, const float* score, Seen seen) {
  F16 top = splat(kMasked);
  for (int i = span.begin * kBlockTokens; i < span.end * kBlockTokens; i += 16)
    top = max(top, Masked ? seen(load(score + i), i, kMasked) : load(score + i));
  return largest(top);
}

// A row's scores to bytes. Returns the sum of the weights by lane.
template <bool Masked>
inline F16 soften(const Span& span, const float* score, float scale, float peak, const ByteScale& to_byte, Seen seen,
                  DotValues::Word* words, FetchTiles& fetch) {
  F16 mass = splat(0);
  for (int i = span.begin * kBlockTokens; i < span.end * kBlockTokens; i += kBlockTokens) {
    fetch.step();
    I16 rounded[2];
#pragma GCC unroll 2
    for (int p = 0; p < 2; p++) {
      const int at = i + 16 * p;
      F16 weight = exp2_weight(fma(load(score + at), splat(scale), splat(-peak)));
      if (Masked) weight = seen(weight, at, 0);
      mass = add(mass, weight);
      rounded[p] = round_int(mul(weight, load(to_byte.factor + at)));
    }
    DotValues::store(words + i / 4, rounded[0], rounded[1]);
  }
  return mass;
}

// Scores of `count` rows to weights; the sums' maxima and weight sums follow, their values are left to add_values.
template <bool Masked>
__attribute__((noinline)) void weigh(const Span& span, const Rows& rows, int first_row, int count, ByteScale& to_byte,
                                     const Sums& sums, Weights& weights, FetchTiles& fetch) {
  const auto seen = [&](int r) { return Seen{rows.oldest(r) - span.first, rows.position(r) - span.first + 1}; };
  store(weights.peak, splat(kMasked));
  for (int r = 0; r < count; r++)
    weights.peak[r] = peak_of<Masked>(span, weights.score[r], seen(first_row + r)) * rows.scale[first_row + r];
  weights.factors = raise(sums.peaks() + first_row, weights.peak);
  for (int r = 0; r < count; r++) {
    const int row = first_row + r;
    if (Masked) to_byte.set(span, sums.dim, seen(row).low, seen(row).high);
    const F16 mass =
        soften<Masked>(span, weights.score[r], rows.scale[row], weights.peak[r], to_byte, seen(row), weights.words[r], fetch);
    store(sums.mass(row),
          fma(mass, splat(weights.factors.more[r]), mul(load(sums.mass(row)), splat(weights.factors.before[r]))));
    weights.step[r] = weights.factors.more[r] * to_byte.step;
  }
}

template <int Count>
__attribute__((noinline)) void add_values(const Span& span, const Weights& weights, int first_row, const Sums& sums,
                                          FetchTiles& fetch) {
  const int dim = sums.dim;
  for (int d = 0; d < dim; d += 16 * kValueParts) {
    I16 total[Count][kValueParts];
#pragma GCC unroll 8
    for (int r = 0; r < Count; r++)
#pragma GCC unroll 2
      for (int p = 0; p < kValueParts; p++) total[r][p] = splat_int(0);
    for (int b = span.begin; b < span.end; b++) {
      const uint8_t* values = span.tile[b] + kBlockTokens * dim + 4 * d;
      const DotValues::Word* words = weights.words[0] + b * (kBlockTokens / 4);
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

// f(integral_constant count) for a count known only at run time.
template <int Most, class F>
inline void with_count(int count, F f) {
  if constexpr (Most > 1)
    if (count < Most) return with_count<Most - 1>(count, f);
  f(std::integral_constant<int, Most>{});
}

// One span for all rows, kRowsAtOnce at a time.
void attend_span(const Span& all, const Rows& rows, const Sums& sums, FetchTiles& fetch) {
  const int dim = sums.dim;
  Weights weights;
  ByteScale bytes;
  bool whole_span = false;  // `bytes` is that of the whole span
  for (int row = 0; row < rows.count; row += kRowsAtOnce) {
    const int count = rows.count - row < kRowsAtOnce ? rows.count - row : kRowsAtOnce;
    const Span span = all.seen_by(rows.oldest(row), rows.position(row + count - 1));
    const bool masked = rows.position(row) < span.first + kSpan - 1 || rows.oldest(row + count - 1) > span.first;
    if (!masked && !whole_span) bytes.set(span, dim, 0, kSpan), whole_span = true;
    with_count<kRowsAtOnce>(count, [&](auto n) {
      for (int b = span.begin; b < span.end; b++)
        scores<n>(span.tile[b], rows, row, weights.score[0] + b * kBlockTokens, fetch);
      if (masked)
        weigh<true>(span, rows, row, n, bytes, sums, weights, fetch), whole_span = false;
      else
        weigh<false>(span, rows, row, n, bytes, sums, weights, fetch);
      add_values<n>(span, weights, row, sums, fetch);
    });
  }
}

// Sums over one segment of the keys, as far as rows see it.
void attend_segment(const Rows& rows, int segment, const Sums& sums) {
  const AttendJob& job = rows.job;
  sums.clear(rows.count);
  const int64_t head = job.kv_head * kv_tile_bytes(sums.dim);
  const auto tile = [&](int b) { return job.kv + job.blocks[b] * job.block_bytes + head; };
  const int begin = rows.oldest(0) / kBlockTokens, end = rows.position(rows.count - 1) / kBlockTokens + 1;
  for (int first = segment * kSegmentBlocks; first < (segment + 1) * kSegmentBlocks; first += kSpanBlocks) {
    Span span;
    span.first = first * kBlockTokens;
    span.begin = begin > first ? begin - first : 0;
    span.end = end - first < kSpanBlocks ? end - first : kSpanBlocks;
    FetchTiles fetch(kv_tile_bytes(sums.dim));
    for (int b = span.begin; b < span.end; b++) span.tile[b] = tile(first + b);
    for (int b = first + kSpanBlocks; b < first + 2 * kSpanBlocks && b < end; b++) fetch.add(tile(b));
    if (first + kSpanBlocks >= end)
      for (const uint8_t* next : job.next) fetch.add(next);
    if (span.begin < span.end) attend_span(span, rows, sums, fetch);
  }
}

// The result of a job's rows: out / sum of the weights, quantised.
void finish(const AttendJob& job, const Sums& sums) {
  const int group = job.model->heads / job.model->kv_heads;
  for (int r = 0; r < job.count * group; r++) {
    const F16 inverse = splat(1.f / sum(load(sums.mass(r))));
    const int column = (job.kv_head * group + r % group) * sums.dim;
    for (int d = 0; d < sums.dim; d += kGroup)
      quantise_group(mul(load(sums.out(r) + d), inverse), mul(load(sums.out(r) + d + 16), inverse), job.out,
                     job.row + r / group, (column + d) / kGroup);
  }
}

void attend(const AttendJob& job) {
  alignas(64) float memory[2][attend_sums(kMaxHeadDim, kAttendRows)];
  const Rows rows(job);
  if (job.segment >= 0) return attend_segment(rows, job.segment, {job.partial, job.model->head_dim});
  const Sums total{memory[0], job.model->head_dim}, part{memory[1], job.model->head_dim};
  const int first = rows.oldest(0) / kSegmentTokens;
  attend_segment(rows, first, total);
  for (int s = first + 1; s <= rows.position(rows.count - 1) / kSegmentTokens; s++) {
    attend_segment(rows, s, part);
    fold(total, part, rows.count);
  }
  finish(job, total);
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
