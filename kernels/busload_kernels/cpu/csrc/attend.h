// Grouped-query attention over the paged int8 cache, 32 keys at a time with a running maximum (online softmax, Milakov
// and Gimelshein 2018; Dao et al. 2022). Each row is computed alone inside the loops and masked keys leave no trace, so
// it does not matter which rows share a call: a token of a prompt piece and the same token decoded by itself get equal
// bits.
#pragma once
#include "rows.h"

namespace {

constexpr float kMasked = -1e30f;
constexpr int kRowsAtOnce = 4;  // use a line of keys or values while it is in a register

struct TileView {
  const uint8_t* keys;
  const uint8_t* values;
  const float* key_scale;
  const float* value_scale;
  int first;  // position of the first key
};

// What one tile says to each row: softmax weights times value scale as bytes, and what they are relative to.
struct Weights {
  alignas(64) uint8_t bytes[kAttendRows][kBlockTokens];
  alignas(64) float peak[kAttendRows];   // log2 of the largest weight
  alignas(64) float scale[kAttendRows];  // of the bytes
  alignas(64) float mass[kAttendRows][16];  // sums of the weights, by lane
};

struct State {
  alignas(64) float peak[kAttendRows];
  alignas(64) float mass[kAttendRows][16];
  alignas(64) float out[kAttendRows][kMaxHeadDim];
};

struct Rows {
  const AttendJob& job;
  int group = job.model->heads / job.model->kv_heads;
  int64_t query(int r) const { return (int64_t)(job.row + r / group) * job.model->heads + job.kv_head * group + r % group; }
  int position(int r) const { return job.position + r / group; }
};

template <int Count>
inline void scores(const TileView& tile, const Rows& rows, int first_row, F16 (*score)[2]) {
  const AttendJob& job = rows.job;
  const int dim = job.model->head_dim;
  const int8_t* query[Count];
#pragma GCC unroll 8
  for (int r = 0; r < Count; r++) query[r] = job.queries.q + rows.query(first_row + r) * dim;
  // Both halves of the tile at once: a dot product waits for the one before it, and four rows alone leave gaps.
  typename DotBytes::Sum total[Count][2];
#pragma GCC unroll 8
  for (int r = 0; r < Count; r++) total[r][0] = total[r][1] = DotBytes::zero();
#pragma GCC unroll 4
  for (int i = 0; i < dim; i += 4) {
    const Line first = load_line(tile.keys + 16 * i), second = load_line(tile.keys + 16 * dim + 16 * i);
#pragma GCC unroll 8
    for (int r = 0; r < Count; r++) {
      const int32_t word = load_word(query[r] + i);
      DotBytes::step(total[r][0], first, word);
      DotBytes::step(total[r][1], second, word);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < Count; r++) {
    const int64_t index = rows.query(first_row + r);
    const I16 bias = splat_int(-DotBytes::kBias * job.queries.sum[index]);
    const F16 scale = splat(job.queries.scale[index]);
    for (int part = 0; part < 2; part++)
      score[r][part] = mul(to_float(add_int(DotBytes::total(total[r][part]), bias)), mul(load(tile.key_scale + 16 * part), scale));
  }
}

template <int Count, bool Masked>
void weigh(const TileView& tile, const Rows& rows, int first_row, Weights& out) {
  F16 score[Count][2];
  scores<Count>(tile, rows, first_row, score);
  F16 value_scale[2] = {load(tile.value_scale), load(tile.value_scale + 16)};
  float top = largest(max(value_scale[0], value_scale[1]));
#pragma GCC unroll 8
  for (int r = 0; r < Count; r++) {
    const int row = first_row + r, position = rows.position(row) - tile.first;
    const int low = rows.job.window ? position - rows.job.window + 1 : 0, high = position + 1;  // keys this row sees
    auto seen = [&](F16 v, int part, float otherwise) { return keep_between(v, count_up(16 * part), low, high, splat(otherwise)); };
    if (Masked) {
#pragma GCC unroll 2
      for (int part = 0; part < 2; part++) {
        score[r][part] = seen(score[r][part], part, kMasked);
        value_scale[part] = seen(load(tile.value_scale + 16 * part), part, 0);
      }
      top = largest(max(value_scale[0], value_scale[1]));
    }
    const float peak = largest(max(score[r][0], score[r][1]));
    const F16 inverse = splat(top > 0 ? 255.f / top : 0.f);
    F16 weight[2];
#pragma GCC unroll 2
    for (int part = 0; part < 2; part++) {
      weight[part] = exp2_below(sub(score[r][part], splat(peak)));
      if (Masked) weight[part] = seen(weight[part], part, 0);
      store_bytes(out.bytes[row] + 16 * part, round_int(mul(weight[part], mul(value_scale[part], inverse))));
    }
    out.peak[row] = peak;
    out.scale[row] = top * (1.f / 255);
    store(out.mass[row], add(weight[0], weight[1]));
  }
}

// Brings tile and state to one maximum; afterwards weights.peak is the factor of each row's sums, weights.scale that
// of its bytes.
inline void settle(Weights& weights, State& state, int rows, int dim) {
  static_assert(kAttendRows == 16);
  const F16 before = load(state.peak), tile = load(weights.peak), peak = max(before, tile);
  const F16 factor = exp2_below(sub(tile, peak));
  store(weights.peak, factor);
  store(weights.scale, mul(load(weights.scale), factor));
  if (largest(sub(peak, before)) > 0) {
    alignas(64) float decay[16];
    store(decay, exp2_below(sub(before, peak)));
    for (int r = 0; r < rows; r++) {
      if (decay[r] == 1) continue;
      const F16 by = splat(decay[r]);
      store(state.mass[r], mul(load(state.mass[r]), by));
      for (int d = 0; d < dim; d += 16) store(state.out[r] + d, mul(load(state.out[r] + d), by));
    }
    store(state.peak, peak);
  }
}

template <int Count>
void add_values(const TileView& tile, const Weights& weights, int first_row, int dim, State& state) {
  for (int d = 0; d < dim; d += 16) {
    typename DotWeights::Sum total[Count];
#pragma GCC unroll 8
    for (int r = 0; r < Count; r++) total[r] = DotWeights::zero();
#pragma GCC unroll 8
    for (int t = 0; t < kBlockTokens; t += 4) {
      Line line = load_line(tile.values + t * dim + 4 * d);
#pragma GCC unroll 8
      for (int r = 0; r < Count; r++) DotWeights::step(total[r], line, load_word(weights.bytes[first_row + r] + t));
    }
#pragma GCC unroll 8
    for (int r = 0; r < Count; r++) {
      float* out = state.out[first_row + r] + d;
      store(out, fma(to_float(DotWeights::total(total[r])), splat(weights.scale[first_row + r]), load(out)));
    }
  }
}

// f(constant row count, first row) for rows in fours and the rest.
template <class F>
inline void by_rows(int rows, F f) {
  using std::integral_constant;
  int r = 0;
  for (; r + kRowsAtOnce <= rows; r += kRowsAtOnce) f(integral_constant<int, kRowsAtOnce>{}, r);
  switch (rows - r) {
    case 3: f(integral_constant<int, 3>{}, r); break;
    case 2: f(integral_constant<int, 2>{}, r); break;
    case 1: f(integral_constant<int, 1>{}, r); break;
  }
}

void attend(const AttendJob& job) {
  const BlModel& m = *job.model;
  const Rows rows{job};
  const int dim = m.head_dim, count = job.count * rows.group;
  State state;
  Weights weights;
  for (int r = 0; r < kAttendRows; r++) {
    state.peak[r] = weights.peak[r] = kMasked;
    weights.scale[r] = 0;
    store(state.mass[r], splat(0));
    for (int d = 0; d < dim; d += 16) store(state.out[r] + d, splat(0));
  }
  const int last = job.position + job.count - 1;
  const int oldest = job.window && job.position >= job.window ? job.position - job.window + 1 : 0;
  const int final = last / kBlockTokens;
  const auto at = [&](int b) { return job.kv + job.blocks[b] * job.block_bytes + job.kv_head * kv_tile_bytes(dim); };
  const auto fetch = [&](const uint8_t* tile) {
    if (!tile) return;
    for (int64_t i = 0; i < kv_tile_bytes(dim); i += 64) __builtin_prefetch(tile + i, 0, 2);  // to L2
  };
  for (int b = oldest / kBlockTokens; b <= final; b++) {
    const uint8_t* base = at(b);
    fetch(b + kFetchAhead <= final ? at(b + kFetchAhead) : job.next[b + kFetchAhead - final - 1]);
    const float* scales = (const float*)(base + 2 * kBlockTokens * dim);
    const TileView tile{base, base + kBlockTokens * dim, scales, scales + kBlockTokens, b * kBlockTokens};
    const bool whole = tile.first + kBlockTokens - 1 <= job.position && (!job.window || tile.first > last - job.window);
    by_rows(count, [&](auto n, int r) {
      whole ? weigh<n, false>(tile, rows, r, weights) : weigh<n, true>(tile, rows, r, weights);
    });
    settle(weights, state, count, dim);
    by_rows(count, [&](auto n, int r) {
      for (int i = r; i < r + n; i++)
        store(state.mass[i], fma(load(weights.mass[i]), splat(weights.peak[i]), load(state.mass[i])));
      add_values<n>(tile, weights, r, dim, state);
    });
    store(weights.peak, splat(kMasked));  // rows that are not there
    store(weights.scale, splat(0));
  }
  for (int r = 0; r < count; r++) {
    const F16 inverse = splat(1.f / sum(load(state.mass[r])));
    const int column = (job.kv_head * rows.group + r % rows.group) * dim;
    for (int d = 0; d < dim; d += kGroup)
      quantise_group(mul(load(state.out[r] + d), inverse), mul(load(state.out[r] + d + 16), inverse), job.out,
                     job.row + r / rows.group, (column + d) / kGroup);
  }
}

}  // namespace
