// Sixteen lanes in plain C++: any 64-bit CPU. The loops have fixed counts, which compilers turn into whatever the
// target has.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

namespace {

struct F16 { float v[16]; };
struct I16 { int32_t v[16]; };
struct Line { uint8_t v[64]; };

constexpr int kWideRows = 2, kWideTiles = 1, kDirectRows = 2;
constexpr int kChains = 1;  // vectors that go through the gate side by side
// Attention: queries at once, and how many times 16 keys or dims.
constexpr int kRowsAtOnce = 2, kScoreParts = 1, kValueParts = 1;

template <class Result, class Function>
inline Result lanes(Function f) {
  Result r;
  for (int i = 0; i < 16; i++) r.v[i] = f(i);
  return r;
}

inline F16 load(const float* p) { return lanes<F16>([&](int i) { return p[i]; }); }
inline void store(float* p, F16 x) { memcpy(p, x.v, sizeof x.v); }
inline F16 splat(float x) { return lanes<F16>([&](int) { return x; }); }
inline F16 add(F16 x, F16 y) { return lanes<F16>([&](int i) { return x.v[i] + y.v[i]; }); }
inline F16 sub(F16 x, F16 y) { return lanes<F16>([&](int i) { return x.v[i] - y.v[i]; }); }
inline F16 mul(F16 x, F16 y) { return lanes<F16>([&](int i) { return x.v[i] * y.v[i]; }); }
inline F16 fma(F16 x, F16 y, F16 z) { return lanes<F16>([&](int i) { return x.v[i] * y.v[i] + z.v[i]; }); }
inline F16 max(F16 x, F16 y) { return lanes<F16>([&](int i) { return x.v[i] > y.v[i] ? x.v[i] : y.v[i]; }); }
inline F16 min(F16 x, F16 y) { return lanes<F16>([&](int i) { return x.v[i] < y.v[i] ? x.v[i] : y.v[i]; }); }
inline F16 abs(F16 x) { return lanes<F16>([&](int i) { return fabsf(x.v[i]); }); }
inline float sum(F16 x) {
  for (int width = 8; width; width /= 2)
    for (int i = 0; i < width; i++) x.v[i] += x.v[i + width];
  return x.v[0];
}
inline float largest(F16 x) {
  float best = x.v[0];
  for (float value : x.v) best = value > best ? value : best;
  return best;
}
// The largest, or the sum, of each of four vectors, again and again in the lanes of the result.
inline F16 largest_of_four(const F16 (&v)[4]) {
  const float four[4] = {largest(v[0]), largest(v[1]), largest(v[2]), largest(v[3])};
  return lanes<F16>([&](int i) { return four[i % 4]; });
}
template <int K>
inline F16 splat_of_four(F16 x) { return splat(x.v[K]); }
inline void store_four(float* p, F16 x) { memcpy(p, x.v, 16); }
inline void store_four(int32_t* p, I16 x) { memcpy(p, x.v, 16); }
inline F16 reciprocal(F16 x) { return lanes<F16>([&](int i) { return 1 / x.v[i]; }); }
inline float half_to_float(uint16_t half) {
  uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7fff;
  uint32_t bits = (rest << 13) + (112u << 23);           // exponent bias 15 -> 127
  if (rest >= 0x7c00) bits = (rest << 13) | 0x7f800000;  // inf, nan
  float value;
  if (rest < 0x0400) {  // zero and subnormal: whole multiples of 2^-24
    value = (float)rest * 0x1p-24f;
    memcpy(&bits, &value, 4);
  }
  bits |= sign;
  memcpy(&value, &bits, 4);
  return value;
}
inline F16 load_half(const void* p) {
  uint16_t h[16];
  memcpy(h, p, sizeof h);
  return lanes<F16>([&](int i) { return half_to_float(h[i]); });
}
inline F16 to_float(I16 x) { return lanes<F16>([&](int i) { return (float)x.v[i]; }); }
// To the nearest even for |x| < 2^22: the sum with 1.5 * 2^23 has no fraction bits.
inline F16 round_float(F16 x) {
  F16 shifted = add(x, splat(12582912.f));
#if defined(__GNUC__)
  asm volatile("" : "+m"(shifted));  // not folded away, whatever the flags
#endif
  return sub(shifted, splat(12582912.f));
}
inline I16 round_int(F16 x) {
  F16 r = round_float(x);
  return lanes<I16>([&](int i) { return (int32_t)r.v[i]; });
}
inline F16 times_power_of_two(F16 x, F16 whole) {
  return lanes<F16>([&](int i) {
    int32_t bits;
    memcpy(&bits, &x.v[i], 4);
    bits += (int32_t)whole.v[i] * (1 << 23);
    float value;
    memcpy(&value, &bits, 4);
    return value;
  });
}
// x <= 0 as whole + fraction, |fraction| <= 1/2; `times_power` multiplies with 2^whole. Masked lanes may hold anything, which
// has no conversion to a whole number in C++.
struct Split { F16 fraction, whole; };
inline Split split(F16 x) {
  const F16 within = min(max(x, splat(-126)), splat(0)), whole = round_float(within);
  return {sub(within, whole), whole};
}
inline F16 times_power(F16 v, Split s) { return times_power_of_two(v, s.whole); }
// 2^fraction is 1 + fraction * (... of these, the last one first): the minimax fit.
constexpr float kExp2Terms[] = {6.93124175e-1f, 2.40240991e-1f, 5.59064262e-2f, 9.58285294e-3f};
inline int32_t sum_int(I16 x) {
  int32_t total = 0;
  for (int32_t value : x.v) total += value;
  return total;
}
inline I16 sums_of_four(const I16 (&v)[4]) {
  const int32_t four[4] = {sum_int(v[0]), sum_int(v[1]), sum_int(v[2]), sum_int(v[3])};
  return lanes<I16>([&](int i) { return four[i % 4]; });
}
inline I16 add_int(I16 x, I16 y) { return lanes<I16>([&](int i) { return x.v[i] + y.v[i]; }); }
inline I16 splat_int(int32_t x) { return lanes<I16>([&](int) { return x; }); }
inline I16 count_up(int32_t first) { return lanes<I16>([&](int i) { return first + i; }); }
inline F16 keep_between(F16 x, I16 index, int32_t low, int32_t high, F16 other) {
  return lanes<F16>([&](int i) { return low <= index.v[i] && index.v[i] < high ? x.v[i] : other.v[i]; });
}
inline void store_bytes(void* p, I16 x) {
  for (int i = 0; i < 16; i++) ((uint8_t*)p)[i] = (uint8_t)x.v[i];
}
// Byte `at` of each word becomes the low byte of v's.
inline I16 with_byte(I16 words, I16 v, int at) {
  return lanes<I16>([&](int i) {
    const uint32_t mask = 255u << 8 * at;
    return (int32_t)(((uint32_t)words.v[i] & ~mask) | ((uint32_t)v.v[i] << 8 * at & mask));
  });
}
inline I16 load_int(const void* p) {
  I16 x;
  memcpy(x.v, p, sizeof x.v);
  return x;
}
inline I16 load_bytes(const int8_t* p) { return lanes<I16>([&](int i) { return (int32_t)p[i]; }); }
inline void store_int(void* p, I16 x) { memcpy(p, x.v, sizeof x.v); }

inline Line load_line(const uint8_t* p) {
  Line line;
  memcpy(line.v, p, 64);
  return line;
}
inline void store_line(uint8_t* p, Line x) { memcpy(p, x.v, 64); }
inline Line low_nibbles(Line x) {
  for (uint8_t& byte : x.v) byte &= 15;
  return x;
}
inline Line high_nibbles(Line x) {
  for (uint8_t& byte : x.v) byte >>= 4;
  return x;
}
inline int32_t load_word(const void* p) {
  int32_t v;
  memcpy(&v, p, 4);
  return v;
}

constexpr int32_t kSumStart = 0;
struct SumScale {
  F16 factor;
  explicit SumScale(F16 scale) : factor(scale) {}
  F16 add(F16 result, I16 sum, float scale) const { return fma(to_float(sum), mul(factor, splat(scale)), result); }
};
template <class Byte, class Activation, int Bias>
struct DotPlain {
  static constexpr int kBias = 0;
  using Wide = DotPlain;
  using Sum = I16;
  static Line widen(Line line) { return line; }
  static Sum start(const int32_t*) { return splat_int(0); }
  static void step(Sum& sum, Line line, int32_t x) {
    Activation a[4];
    memcpy(a, &x, 4);
    for (int i = 0; i < 16; i++)
      for (int j = 0; j < 4; j++) sum.v[i] += ((int)(Byte)line.v[4 * i + j] - Bias) * (int)a[j];
  }
  static I16 total(Sum sum) { return sum; }
};
using DotNibbles = DotPlain<uint8_t, int8_t, 0>;
using DotBytes = DotPlain<uint8_t, int8_t, 128>;

// Attention. Keys are bytes with a bias against signed queries; values are signed against weights 0..255. A Word is what 4
// queries or weights are multiplied as, an Operand a line made ready for several of them.
struct DotKeys : DotPlain<uint8_t, int8_t, 128> {
  using Operand = Line;
  using Word = int32_t;
  static F16 size(F16 q) { return abs(q); }  // at most 127 when quantised
  static Word word(const int8_t* q) { return load_word(q); }
  static Operand prepare(Line line) { return line; }
};
struct DotValues : DotPlain<int8_t, uint8_t, 0> {
  using Operand = Line;
  using Word = int32_t;
  // The words of a block's 32 weights: those of keys 4g..4g+3 are at place(g).
  static constexpr int place(int g) { return g; }
  static constexpr float kTop = 255;
  // Weights of the rows that are computed at once, for so many blocks: `put` takes those of one block, at most kTop.
  template <int Blocks>
  struct Pack {
    Word words[kRowsAtOnce][Blocks * 8];
    void start(int) {}
    void put(int row, int block, I16 a, I16 b) {
      store_bytes(words[row] + 8 * block, a), store_bytes(words[row] + 8 * block + 4, b);
    }
    void finish(int, int, int, float*) {}
  };
  static Operand prepare(Line line) { return line; }
};

}  // namespace
