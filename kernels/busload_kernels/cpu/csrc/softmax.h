// What attention over an int8 and over an fp32 cache have in common: spans of keys, softmax with a running maximum, and
// sums that can be joined (online softmax, Milakov and Gimelshein 2018; Dao et al. 2022).
#pragma once
#include "rows.h"

namespace {

constexpr float kMasked = -1e30f;
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

// 2^x for x <= 0, relative error 3e-6 (weights are rounded to bytes), exact at 0.
inline F16 exp2_weight(F16 x) {
  const Split s = split(x);
  F16 p = splat(kExp2Terms[3]);
  p = fma(p, s.fraction, splat(kExp2Terms[2]));
  p = fma(p, s.fraction, splat(kExp2Terms[1]));
  p = fma(p, s.fraction, splat(kExp2Terms[0]));
  p = fma(p, s.fraction, splat(1.f));
  return times_power(p, s);
}

// Brings the maxima of 16 rows from `peaks` to those that also hold for `more`. Returns the factors of sums that were
// relative to either. One of a row's factors is 1: a row that sees nothing of a range keeps its sums to the bit.
struct Factors {
  alignas(64) float before[16], more[16];
};
inline Factors raise(float* peaks, const float* more) {
  Factors factors;
  const F16 before = load(peaks), after = max(before, load(more));
  store(factors.before, exp2_below(sub(before, after)));
  store(factors.more, exp2_below(sub(load(more), after)));
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

// Which keys of a span a row sees.
struct Seen {
  int low, high;
  F16 operator()(F16 v, int first, float otherwise) const {
    return keep_between(v, count_up(first), low, high, splat(otherwise));
  }
};

// The rows of a job: consecutive tokens, each with the query heads of one key-value head.
struct Rows {
  const AttendJob& job;
  const int group, count;
  int positions[kAttendRows];
  explicit Rows(const AttendJob& j) : job(j), group(j.model->heads / j.model->kv_heads), count(j.count * group) {
    for (int token = 0, r = 0; token < j.count; token++)
      for (int head = 0; head < group; head++) positions[r++] = job.position + token;
  }
  int position(int r) const { return positions[r]; }
  int oldest(int r) const { return job.window && position(r) >= job.window ? position(r) - job.window + 1 : 0; }
  Seen seen(const Span& span, int r) const { return {oldest(r) - span.first, position(r) - span.first + 1}; }
};

// Kept for the rows that are computed at once.
struct Scores {
  alignas(64) float score[kRowsAtOnce][kSpan];
  alignas(64) float peak[16];  // by row: log2 of the largest weight
  float step[kRowsAtOnce];     // what weights are multiplied with to be relative to the peak of the sums
  Factors factors;
};

template <bool Masked>
inline F16 peaks_of(const Span& span, const float* score, Seen seen) {
  F16 top = splat(kMasked);
  for (int i = span.begin * kBlockTokens; i < span.end * kBlockTokens; i += 16)
    top = max(top, Masked ? seen(load(score + i), i, kMasked) : load(score + i));
  return top;
}

}  // namespace
