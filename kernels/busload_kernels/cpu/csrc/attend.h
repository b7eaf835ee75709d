// Grouped-query attention over the paged int8 cache, 32 keys at a time with a running maximum (online softmax, Milakov
// and Gimelshein 2018; Dao et al. 2022). Each row is computed alone inside the loops, so it does not matter which rows
// share a call: a token of a prompt piece and the same token decoded by itself get equal bits.
#pragma once
#include "rows.h"

namespace {

constexpr float kMasked = -1e30f;

struct AttendState {
  float peak[kAttendRows], mass[kAttendRows];
  float out[kAttendRows][kMaxHeadDim];
};

// Four rows use a line of keys or values while it is in a register.
constexpr int kRowsAtOnce = 4;

struct TileView {
  const uint8_t* keys;
  const uint8_t* values;
  const float* key_scale;
  const float* value_scale;
  int first;  // position of the first key
};

template <int Rows>
inline void scores(const TileView& tile, const AttendJob& job, const int64_t* query, F16 (*score)[2]) {
  const int dim = job.model->head_dim;
  for (int part = 0; part < 2; part++) {
    typename DotBytes::Sum high[Rows], low[Rows];
    for (int r = 0; r < Rows; r++) high[r] = DotBytes::zero(), low[r] = DotBytes::zero();
    const uint8_t* keys = tile.keys + part * 16 * dim;
    for (int i = 0; i < dim; i += 4) {
      Line line = load_line(keys + 16 * i);
#pragma GCC unroll 4
      for (int r = 0; r < Rows; r++) {
        const int8_t* q = job.queries.q + query[r] * 2 * dim + i;
        DotBytes::step(high[r], line, load_word(q));
        DotBytes::step(low[r], line, load_word(q + dim));
      }
    }
    const F16 scale = load(tile.key_scale + 16 * part);
    for (int r = 0; r < Rows; r++) {
      I16 total = add_int(times_128(DotBytes::total(high[r])), DotBytes::total(low[r]));
      total = add_int(total, splat_int(-DotBytes::kBias * job.queries.sum[query[r]]));
      score[r][part] = mul(to_float(total), mul(scale, splat(job.queries.scale[query[r]])));
    }
  }
}

template <int Rows>
void attend_tile(const TileView& tile, const AttendJob& job, int first_row, AttendState& state) {
  const BlModel& m = *job.model;
  const int dim = m.head_dim, group = m.heads / m.kv_heads;
  int64_t query[Rows];
  int low[Rows], high[Rows];  // keys of the tile this row sees
  for (int r = 0; r < Rows; r++) {
    const int token = (first_row + r) / group, position = job.position + token;
    query[r] = (int64_t)(job.row + token) * m.heads + job.kv_head * group + (first_row + r) % group;
    low[r] = job.window ? position - job.window + 1 - tile.first : 0;
    high[r] = position + 1 - tile.first;
  }
  F16 score[Rows][2];
  scores<Rows>(tile, job, query, score);

  uint8_t weights[Rows][kBlockTokens];
  F16 decay[Rows], weight_scale[Rows];
  for (int r = 0; r < Rows; r++) {
    float& peak = state.peak[first_row + r];
    F16 p[2];
    for (int part = 0; part < 2; part++)
      p[part] = keep_between(score[r][part], count_up(16 * part), low[r], high[r], splat(kMasked));
    const float higher = fmaxf(peak, largest(max(p[0], p[1])));
    decay[r] = exp2(splat(peak - higher));
    peak = higher;
    F16 mass = splat(0);
    for (int part = 0; part < 2; part++) {
      p[part] = keep_between(exp2(sub(p[part], splat(higher))), count_up(16 * part), low[r], high[r], splat(0));
      mass = add(mass, p[part]);
      p[part] = mul(p[part], load(tile.value_scale + 16 * part));
    }
    state.mass[first_row + r] = sum(fma(splat(state.mass[first_row + r] * (1.f / 16)), decay[r], mass));
    const float top = largest(max(p[0], p[1]));
    const F16 inverse = splat(top > 0 ? 255.f / top : 0.f);
    for (int part = 0; part < 2; part++) store_bytes(weights[r] + 16 * part, round_int(mul(p[part], inverse)));
    weight_scale[r] = splat(top * (1.f / 255));
  }

  for (int d = 0; d < dim; d += 16) {
    typename DotWeights::Sum total[Rows];
    for (int r = 0; r < Rows; r++) total[r] = DotWeights::zero();
#pragma GCC unroll 8
    for (int t = 0; t < kBlockTokens; t += 4) {
      Line line = load_line(tile.values + t * dim + 4 * d);
#pragma GCC unroll 4
      for (int r = 0; r < Rows; r++) DotWeights::step(total[r], line, load_word(weights[r] + t));
    }
    for (int r = 0; r < Rows; r++) {
      float* out = state.out[first_row + r] + d;
      store(out, fma(to_float(DotWeights::total(total[r])), weight_scale[r], mul(load(out), decay[r])));
    }
  }
}

void attend(const AttendJob& job) {
  const BlModel& m = *job.model;
  const int dim = m.head_dim, group = m.heads / m.kv_heads, rows = job.count * group;
  AttendState state;
  for (int r = 0; r < rows; r++) {
    state.peak[r] = kMasked;
    state.mass[r] = 0;
    for (int d = 0; d < dim; d += 16) store(state.out[r] + d, splat(0));
  }
  const int last = job.position + job.count - 1;
  const int oldest = job.window && job.position >= job.window ? job.position - job.window + 1 : 0;
  for (int b = oldest / kBlockTokens; b <= last / kBlockTokens; b++) {
    const uint8_t* base = job.kv + job.blocks[b] * job.block_bytes + job.kv_head * kv_tile_bytes(dim);
    if (b < last / kBlockTokens) {
      const uint8_t* next = job.kv + job.blocks[b + 1] * job.block_bytes + job.kv_head * kv_tile_bytes(dim);
      for (int64_t i = 0; i < kv_tile_bytes(dim); i += 64) __builtin_prefetch(next + i);
    }
    const float* scales = (const float*)(base + 2 * kBlockTokens * dim);
    const TileView tile{base, base + kBlockTokens * dim, scales, scales + kBlockTokens, b * kBlockTokens};
    int r = 0;
    for (; r + kRowsAtOnce <= rows; r += kRowsAtOnce) attend_tile<kRowsAtOnce>(tile, job, r, state);
    switch (rows - r) {
      case 3: attend_tile<3>(tile, job, r, state); break;
      case 2: attend_tile<2>(tile, job, r, state); break;
      case 1: attend_tile<1>(tile, job, r, state); break;
    }
  }
  for (int r = 0; r < rows; r++) {
    const F16 inverse = splat(1.f / state.mass[r]);
    const int column = (job.kv_head * group + r % group) * dim;
    for (int d = 0; d < dim; d += kGroup)
      quantise_group(mul(load(state.out[r] + d), inverse), mul(load(state.out[r] + d + 16), inverse), job.out,
                     job.row + r / group, (column + d) / kGroup);
  }
}

}  // namespace
