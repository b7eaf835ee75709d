// What works on one row at a time: norms, quantisation, the gate, rotation and the KV write, exponentials.
#pragma once
#include <math.h>

#include <type_traits>

#include "kernels.h"

namespace {

using namespace busload;

constexpr int kMaxHeadDim = 256;
constexpr float kLog2E = 1.44269504f;

// 2^x for -126 <= x <= 126. The fraction by the Taylor series of 2^f, |f| <= 1/2, up to f^6: relative error 2e-7.
inline F16 exp2_within(F16 x) {
  F16 whole = round_float(x), f = sub(x, whole);
  F16 p = splat(1.5403530e-4f);
  p = fma(p, f, splat(1.3333558e-3f));
  p = fma(p, f, splat(9.6181291e-3f));
  p = fma(p, f, splat(5.5504109e-2f));
  p = fma(p, f, splat(2.4022651e-1f));
  p = fma(p, f, splat(6.9314718e-1f));
  p = fma(p, f, splat(1.f));
  return times_power_of_two(p, whole);
}
inline F16 exp2_below(F16 x) { return exp2_within(max(x, splat(-126.f))); }  // x <= 126
inline F16 exp2(F16 x) { return exp2_below(min(x, splat(126.f))); }

// Two halves of a group of 32 to int8 with one scale.
inline void quantise_group(F16 a, F16 b, const Activations& out, int64_t row, int group) {
  const int64_t index = group * out.stride + row;
  const float peak = largest(max(abs(a), abs(b)));
  const F16 inverse = splat(peak > 0 ? 127.f / peak : 0.f);
  const I16 qa = round_int(mul(a, inverse)), qb = round_int(mul(b, inverse));
  int8_t* q = out.q + index * kGroup;
  store_bytes(q, qa);
  store_bytes(q + 16, qb);
  const float scale = peak * (1.f / 127.f);
  out.scale[index] = scale;
  const int32_t sum = sum_int(add_int(qa, qb));
  out.offset[index] = scale * (float)sum;
  out.unbias[index] = -128 * sum;
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
  const F16 factor = splat(norm_factor(x, eps, out.cols));
  for (int g = 0; g < out.cols / kGroup; g++, x += kGroup, weight += kGroup)
    quantise_group(mul(mul(load(x), factor), load(weight)), mul(mul(load(x + 16), factor), load(weight + 16)), out, row, g);
}

void norm_add(float* x, const float* y, const float* weight, float eps, int cols) {
  const F16 factor = splat(norm_factor(y, eps, cols));
  for (int i = 0; i < cols; i += 16) store(x + i, fma(mul(load(y + i), factor), load(weight + i), load(x + i)));
}

inline F16 sigmoid(F16 x) { return div(splat(1.f), add(splat(1.f), exp2(mul(x, splat(-kLog2E))))); }

// x * sigmoid(x) (SwiGLU, Shazeer 2020), or GELU in its tanh form, which is x * sigmoid(2 u) (Hendrycks and Gimpel 2016).
inline F16 activate(F16 x, int activation) {
  if (activation == BL_SILU) return mul(x, sigmoid(x));
  F16 u = mul(x, fma(mul(x, x), splat(2 * 0.7978845608f * 0.044715f), splat(2 * 0.7978845608f)));
  return mul(x, sigmoid(u));
}

void gate(const float* gate_up, int rows, int activation, const Activations& out, int group) {
  for (int r = 0; r < rows; r++, gate_up += 2 * kUnitRows)
    quantise_group(mul(activate(load(gate_up), activation), load(gate_up + 32)),
                   mul(activate(load(gate_up + 16), activation), load(gate_up + 48)), out, r, group);
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

inline float peak_of(const float* x, int n) {
  F16 peak = splat(0);
  for (int i = 0; i < n; i += 16) peak = max(peak, abs(load(x + i)));
  return largest(peak);
}

struct Quantised {
  float scale;
  int32_t sum;
};

// int8 with one scale.
inline Quantised quantise_vector(const float* x, int n, int8_t* q) {
  const float peak = peak_of(x, n);
  const F16 inverse = splat(peak > 0 ? 127.f / peak : 0.f);
  I16 total = splat_int(0);
  for (int i = 0; i < n; i += 16) {
    const I16 whole = round_int(mul(load(x + i), inverse));
    total = add_int(total, whole);
    store_bytes(q + i, whole);
  }
  return {peak * (1.f / 127), sum_int(total)};
}

inline void store_int8(const float* key, const float* value, int dim, uint8_t* tile, int slot) {
  int8_t q[kMaxHeadDim];
  uint8_t* keys = tile + (slot / 16) * 16 * dim + (slot % 16) * 4;
  uint8_t* values = tile + kBlockTokens * dim + (slot / 4) * 4 * dim + slot % 4;
  float* scales = (float*)(tile + 2 * kBlockTokens * dim);
  scales[slot] = quantise_vector(key, dim, q).scale;
  for (int i = 0; i < dim; i += 4) {
    uint32_t word = (uint32_t)load_word(q + i) ^ 0x80808080u;
    __builtin_memcpy(keys + 16 * i, &word, 4);
  }
  scales[kBlockTokens + slot] = quantise_vector(value, dim, q).scale;
  for (int i = 0; i < dim; i++) values[4 * i] = (uint8_t)q[i];
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
  const bool int8 = m.kv_format == BL_KV_INT8;
  if (layer.qkv_bias)
    for (int i = 0; i < (m.heads + 2 * m.kv_heads) * dim; i += 16)
      store(qkv + i, add(load(qkv + i), load(layer.qkv_bias + i)));
  for (int h = 0; h < m.heads; h++, qkv += dim) {
    rotate(qkv, layer.query_norm, m.norm_eps, dim, rope);
    if (!int8) continue;
    const int64_t index = (int64_t)row * m.heads + h;
    const Quantised query = quantise_vector(qkv, dim, queries.q + index * dim);
    queries.scale[index] = query.scale * m.attention_scale * kLog2E;
    queries.sum[index] = query.sum;
  }
  for (int h = 0; h < m.kv_heads; h++, qkv += dim, tile += kv_tile_bytes(m)) {
    const float* value = qkv + m.kv_heads * dim;
    rotate(qkv, layer.key_norm, m.norm_eps, dim, rope);
    int8 ? store_int8(qkv, value, dim, tile, slot) : store_fp32(qkv, value, dim, tile, slot);
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
