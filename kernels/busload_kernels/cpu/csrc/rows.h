// What works on one row at a time: norms, quantisation, the gate, rotation and the KV write, exponentials.
#pragma once
#include <math.h>

#include <type_traits>

#include "kernels.h"

namespace {

using namespace busload;

#define BUSLOAD_INLINE __attribute__((always_inline))

constexpr int kMaxHeadDim = 256;
constexpr float kLog2E = 1.44269504f;

// 2^x for N vectors of -126 <= x <= 126. The fraction by the Taylor series of 2^f, |f| <= 1/2, up to f^6: relative error 2e-7.
template <int N>
inline void exp2_within(F16 (&x)[N]) {
  constexpr float kTerms[] = {1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.f};
  F16 whole[N], p[N];
#pragma GCC unroll 8
  for (int k = 0; k < N; k++) whole[k] = round_float(x[k]), x[k] = sub(x[k], whole[k]), p[k] = splat(1.5403530e-4f);
#pragma GCC unroll 8
  for (const float term : kTerms)
#pragma GCC unroll 8
    for (int k = 0; k < N; k++) p[k] = fma(p[k], x[k], splat(term));
#pragma GCC unroll 8
  for (int k = 0; k < N; k++) x[k] = times_power_of_two(p[k], whole[k]);
}
inline F16 exp2_below(F16 x) {  // x <= 126
  F16 one[] = {max(x, splat(-126.f))};
  exp2_within(one);
  return one[0];
}
inline F16 exp2(F16 x) { return exp2_below(min(x, splat(126.f))); }

// What four vectors are multiplied with so that the largest of each, if it is above 1e-30, becomes 127.
struct ToBytes {
  F16 factor[4];
  explicit ToBytes(F16 peaks) {
    const F16 four = mul(reciprocal(max(peaks, splat(1e-30f))), splat(127));
    factor[0] = splat_of_four<0>(four), factor[1] = splat_of_four<1>(four);
    factor[2] = splat_of_four<2>(four), factor[3] = splat_of_four<3>(four);
  }
};

// The first `count` of four groups of 32, as two halves each, to int8 with one scale each. They go to `index` in the arrays
// of `out`, the next `step` further. Four, as what is found across the lanes of a vector is found for four at once.
inline void quantise_groups(const F16* low, const F16* high, const Activations out, int64_t index, int64_t step, int count) {
  F16 size[4];
  I16 total[4];
#pragma GCC unroll 4
  for (int k = 0; k < 4; k++) size[k] = max(abs(low[k]), abs(high[k]));
  const F16 peaks = largest_of_four(size), scales = mul(peaks, splat(1.f / 127));
  const ToBytes to_bytes(peaks);
#pragma GCC unroll 4
  for (int k = 0; k < 4; k++) {
    const I16 a = round_int(mul(low[k], to_bytes.factor[k])), b = round_int(mul(high[k], to_bytes.factor[k]));
    total[k] = add_int(a, b);
    if (k >= count) continue;
    int8_t* q = out.q + (index + k * step) * kGroup;
    store_bytes(q, a);
    store_bytes(q + 16, b);
  }
  const I16 sums = sums_of_four(total);
  float scale[4], offset[4];
  int32_t sum[4];
  store_four(scale, scales), store_four(offset, mul(scales, to_float(sums))), store_four(sum, sums);
#pragma GCC unroll 4
  for (int k = 0; k < 4; k++, index += step)
    if (k < count) out.scale[index] = scale[k], out.offset[index] = offset[k], out.start[index] = kSumStart - 128 * sum[k];
}

// Consecutive groups of one row, from `first` on: value(i) is sixteen of their values from i on.
template <class Value>
inline void quantise_row(int groups, const Activations& out, int64_t row, int first, Value value) {
  const auto some = [&](int g, int count) BUSLOAD_INLINE {
    F16 low[4], high[4];
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) {
      low[k] = k < count ? value((g + k) * kGroup) : splat(0);
      high[k] = k < count ? value((g + k) * kGroup + 16) : splat(0);
    }
    quantise_groups(low, high, out, out.index(row, first + g), out.stride, count);
  };
  int g = 0;
  for (; g + 4 <= groups; g += 4) some(g, 4);  // a known count leaves no branch between the four
  if (g < groups) some(g, groups - g);
}

// 1 / sqrt(mean(x^2) + eps), Zhang and Sennrich 2019.
inline float norm_factor(const float* x, float eps, int cols) {
  F16 even = splat(0), odd = splat(0);  // two chains: each sum waits for the one before
  for (int i = 0; i < cols; i += 32) {
    even = fma(load(x + i), load(x + i), even);
    odd = fma(load(x + i + 16), load(x + i + 16), odd);
  }
  return 1.f / sqrtf(sum(add(even, odd)) / (float)cols + eps);
}

void norm_quantise(const float* x, const float* weight, float eps, const Activations& out, int row) {
  for (int i = 0; i < out.cols; i += 16) __builtin_prefetch(x + out.cols + i, 0, 3);  // the next row, from afar
  const F16 factor = splat(norm_factor(x, eps, out.cols));
  quantise_row(out.cols / kGroup, out, row, 0, [=](int i) { return mul(mul(load(x + i), factor), load(weight + i)); });
}

void norm_add(float* x, const float* y, const float* weight, float eps, int cols) {
  const F16 factor = splat(norm_factor(y, eps, cols));
  for (int i = 0; i < cols; i += 16) store(x + i, fma(mul(load(y + i), factor), load(weight + i), load(x + i)));
}

// x * sigmoid(x) (SwiGLU, Shazeer 2020), or GELU in its tanh form, which is x * sigmoid(2 u) (Hendrycks and Gimpel 2016).
template <int N>
inline void activate(F16 (&x)[N], int activation) {
  F16 e[N];
#pragma GCC unroll 8
  for (int k = 0; k < N; k++) e[k] = mul(x[k], splat(-kLog2E));
  if (activation == BL_GELU_TANH) {
#pragma GCC unroll 8
    for (int k = 0; k < N; k++)
      e[k] = mul(e[k], fma(mul(x[k], x[k]), splat(2 * 0.7978845608f * 0.044715f), splat(2 * 0.7978845608f)));
  }
#pragma GCC unroll 8
  for (int k = 0; k < N; k++) e[k] = max(min(e[k], splat(126)), splat(-126));
  exp2_within(e);
#pragma GCC unroll 8
  for (int k = 0; k < N; k++) x[k] = mul(x[k], reciprocal(add(splat(1), e[k])));
}

void gate(const float* gate_up, int rows, int activation, const Activations& out, int group) {
  const auto some = [&](int first_row, int count) BUSLOAD_INLINE {
    F16 hidden[8];  // the first half of four rows, then the second
#pragma GCC unroll 8
    for (int first = 0; first < 8; first += kChains) {
      F16 part[kChains];
      const float* from[kChains];
#pragma GCC unroll 4
      for (int k = 0; k < kChains; k++) {
        const int row = (first + k) % 4;
        from[k] = gate_up + (first_row + (row < count ? row : 0)) * 2 * kUnitRows + (first + k) / 4 * 16;
        part[k] = load(from[k]);
      }
      activate(part, activation);
#pragma GCC unroll 4
      for (int k = 0; k < kChains; k++) hidden[first + k] = mul(part[k], load(from[k] + kUnitRows));
    }
    quantise_groups(hidden, hidden + 4, out, out.index(first_row, group), 1, count);
  };
  int r = 0;
  for (; r + 4 <= rows; r += 4) some(r, 4);
  if (r < rows) some(r, rows - r);
}

// Dimension i turns with i + head_dim / 2 (Su et al. 2021), after the optional norm.
inline void rotate(float* x, const float* norm, float eps, int head_dim, RopeRow rope) {
  const int half = head_dim / 2;
  const F16 factor = splat(norm ? norm_factor(x, eps, head_dim) : 1.f);
  for (int i = 0; i < half; i += 16) {
    F16 a = load(x + i), b = load(x + half + i), c = load(rope.cosine + i), s = load(rope.sine + i);
    if (norm) a = mul(mul(a, factor), load(norm + i)), b = mul(mul(b, factor), load(norm + half + i));
    store(x + i, sub(mul(a, c), mul(b, s)));
    store(x + half + i, add(mul(b, c), mul(a, s)));
  }
}

// Up to four vectors of `dim`, one after the other in x and in q, to int8 with one scale each, so that their largest `size`
// becomes 127.
struct Quantised {
  float scale[4];
  int32_t sum[4];
};
template <class Size>
inline Quantised quantise_vectors(const float* x, int count, int dim, int8_t* q, Size size) {
  F16 top[4];
  I16 total[4];
#pragma GCC unroll 4
  for (int k = 0; k < 4; k++) {
    top[k] = splat(0);
    if (k < count)
      for (int i = k * dim; i < (k + 1) * dim; i += 16) top[k] = max(top[k], size(load(x + i)));
  }
  const F16 peaks = largest_of_four(top);
  const ToBytes to_bytes(peaks);
#pragma GCC unroll 4
  for (int k = 0; k < 4; k++) {
    total[k] = splat_int(0);
    if (k >= count) continue;
    for (int i = k * dim; i < (k + 1) * dim; i += 16) {
      const I16 whole = round_int(mul(load(x + i), to_bytes.factor[k]));
      total[k] = add_int(total[k], whole);
      store_bytes(q + i, whole);
    }
  }
  Quantised result;
  store_four(result.scale, mul(peaks, splat(1.f / 127)));
  store_four(result.sum, sums_of_four(total));
  return result;
}

inline void quantise_queries(const float* x, int heads, int dim, float attention_scale, const Queries& out, int64_t index) {
  for (int h = 0; h < heads; h += 4, index += 4) {
    const int count = heads - h < 4 ? heads - h : 4;
    const Quantised four = quantise_vectors(x + h * dim, count, dim, out.q + index * dim, [](F16 v) { return DotKeys::size(v); });
    for (int k = 0; k < count; k++) out.scale[index + k] = four.scale[k] * attention_scale, out.sum[index + k] = four.sum[k];
  }
}

inline void store_key(const int8_t* q, int dim, uint8_t* tile, int slot) {
  uint8_t* keys = tile + (slot / 16) * 16 * dim + (slot % 16) * 4;
  for (int i = 0; i < dim; i += 4) {
    uint32_t word = (uint32_t)load_word(q + i) ^ 0x80808080u;
    __builtin_memcpy(keys + 16 * i, &word, 4);
  }
}

// Rewrites the values of the token's three neighbours too.
inline void store_value(const int8_t* q, int dim, uint8_t* tile, int slot) {
  uint8_t* values = tile + kBlockTokens * dim + (slot / 4) * 4 * dim;
  for (int i = 0; i < dim; i += 16) store_int(values + 4 * i, with_byte(load_int(values + 4 * i), load_bytes(q + i), slot % 4));
}

// Keys and values of a token: [2][kv_heads][dim].
inline void store_int8(const float* x, int kv_heads, int dim, uint8_t* tiles, int64_t tile_bytes, int slot) {
  int8_t q[4 * kMaxHeadDim];
  for (int first = 0; first < 2 * kv_heads; first += 4) {
    const int count = 2 * kv_heads - first < 4 ? 2 * kv_heads - first : 4;
    const Quantised four = quantise_vectors(x + first * dim, count, dim, q, [](F16 v) { return abs(v); });
    for (int k = 0; k < count; k++) {
      const bool value = first + k >= kv_heads;
      uint8_t* tile = tiles + (first + k - value * kv_heads) * tile_bytes;
      (value ? store_value : store_key)(q + k * dim, dim, tile, slot);
      ((float*)(tile + 2 * kBlockTokens * dim))[value * kBlockTokens + slot] = four.scale[k];
    }
  }
}

inline void store_fp32(const float* key, const float* value, int dim, uint8_t* tile, int slot) {
  float* keys = (float*)tile + (slot / 16) * 16 * dim + slot % 16;
  float* values = (float*)tile + (kBlockTokens + slot) * dim;
  for (int i = 0; i < dim; i++) keys[16 * i] = key[i];
  for (int i = 0; i < dim; i += 16) store(values + i, load(value + i));
}

void rotate_store(const BlModel& m, const BlLayer& layer, float* qkv, RopeRow rope, const Queries& queries, int row,
                  uint8_t* tile, int slot) {
  const int dim = m.head_dim;
  if (layer.qkv_bias)
    for (int i = 0; i < (m.heads + 2 * m.kv_heads) * dim; i += 16)
      store(qkv + i, add(load(qkv + i), load(layer.qkv_bias + i)));
  float* key = qkv + m.heads * dim;
  for (int h = 0; h < m.heads; h++) rotate(qkv + h * dim, layer.query_norm, m.norm_eps, dim, rope);
  for (int h = 0; h < m.kv_heads; h++) rotate(key + h * dim, layer.key_norm, m.norm_eps, dim, rope);
  if (m.kv_format == BL_KV_INT8) {
    quantise_queries(qkv, m.heads, dim, m.attention_scale * kLog2E, queries, (int64_t)row * m.heads);
    store_int8(key, m.kv_heads, dim, tile, kv_tile_bytes(m), slot);
  } else {
    for (int h = 0; h < m.kv_heads; h++)
      store_fp32(key + h * dim, key + (m.kv_heads + h) * dim, dim, tile + h * kv_tile_bytes(m), slot);
  }
}

int32_t argmax(const float* x, int n) {
  const int whole = n / 16 * 16;
  F16 peaks = splat(-INFINITY), check = splat(0);
  for (int i = 0; i < whole; i += 16) {
    F16 v = load(x + i);
    peaks = max(peaks, v);
    check = fma(v, splat(0), check);  // 0 times inf or nan is nan
  }
  float peak = largest(peaks), bad = sum(check);
  for (int i = whole; i < n; i++) peak = x[i] > peak ? x[i] : peak, bad += x[i] * 0.f;
  if (!(bad == 0)) return -1;
  int i = 0;
  for (; i < whole; i += 16)
    if (largest(load(x + i)) == peak) break;
  while (x[i] != peak) i++;
  return i;
}

double exponentials(const float* x, float* out, int n, float scale, float peak) {
  const F16 factor = splat(scale * kLog2E), top = splat(peak);
  double total = 0;
  int i = 0;
  for (; i + 16 <= n; i += 16) {
    F16 v = exp2(mul(sub(load(x + i), top), factor));
    store(out + i, v);
    total += sum(v);
  }
  for (; i < n; i++) total += out[i] = expf(scale * (x[i] - peak));
  return total;
}

}  // namespace
