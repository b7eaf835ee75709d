// Sixteen lanes as four vectors of the compiler's own kind (gcc and clang have them for every CPU): 128 bits are what the
// oldest x86-64 and ARM64 have.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

namespace {

using Floats = float __attribute__((vector_size(16)));
using Ints = int32_t __attribute__((vector_size(16)));
using Shorts = int16_t __attribute__((vector_size(16)));
using UnsignedShorts = uint16_t __attribute__((vector_size(16)));
using Bytes = uint8_t __attribute__((vector_size(16)));

struct F16 { Floats v[4]; };  // 16 floats
struct I16 { Ints v[4]; };    // 16 int32
struct Line { Bytes v[4]; };  // 4 outputs x 4 inputs each

constexpr int kWideRows = 2, kWideTiles = 1, kDirectRows = 2;
constexpr int kChains = 1;  // vectors that go through the gate side by side
// Attention: queries at once, and how many times 16 keys or dims.
constexpr int kRowsAtOnce = 2, kScoreParts = 1, kValueParts = 1;

template <class Result, class Function>
inline Result quarters(Function f) {
  return {f(0), f(1), f(2), f(3)};
}
template <class Vector>
inline Vector load_vector(const void* p) {
  Vector v;
  memcpy(&v, p, sizeof v);
  return v;
}

inline F16 load(const float* p) { return quarters<F16>([=](int i) { return load_vector<Floats>(p + 4 * i); }); }
inline void store(float* p, F16 x) { memcpy(p, x.v, sizeof x.v); }
inline F16 splat(float x) { return quarters<F16>([=](int) { return Floats{x, x, x, x}; }); }
inline F16 add(F16 x, F16 y) { return quarters<F16>([=](int i) { return x.v[i] + y.v[i]; }); }
inline F16 sub(F16 x, F16 y) { return quarters<F16>([=](int i) { return x.v[i] - y.v[i]; }); }
inline F16 mul(F16 x, F16 y) { return quarters<F16>([=](int i) { return x.v[i] * y.v[i]; }); }
inline F16 fma(F16 x, F16 y, F16 z) { return quarters<F16>([=](int i) { return x.v[i] * y.v[i] + z.v[i]; }); }
inline Floats choose(Ints mask, Floats x, Floats y) { return (Floats)(((Ints)x & mask) | ((Ints)y & ~mask)); }
inline F16 max(F16 x, F16 y) { return quarters<F16>([=](int i) { return choose(x.v[i] > y.v[i], x.v[i], y.v[i]); }); }
inline F16 min(F16 x, F16 y) { return quarters<F16>([=](int i) { return choose(x.v[i] < y.v[i], x.v[i], y.v[i]); }); }
inline F16 abs(F16 x) { return quarters<F16>([=](int i) { return (Floats)((Ints)x.v[i] & 0x7fffffff); }); }
inline float sum(F16 x) {
  const Floats four = (x.v[0] + x.v[2]) + (x.v[1] + x.v[3]);
  return (four[0] + four[2]) + (four[1] + four[3]);
}
inline float larger(float x, float y) { return x > y ? x : y; }
inline float largest(F16 x) {
  const Floats low = choose(x.v[0] > x.v[1], x.v[0], x.v[1]), high = choose(x.v[2] > x.v[3], x.v[2], x.v[3]);
  const Floats four = choose(low > high, low, high);
  return larger(larger(four[0], four[1]), larger(four[2], four[3]));
}
// The largest, or the sum, of each of four vectors, again and again in the lanes of the result.
inline F16 largest_of_four(const F16 (&v)[4]) {
  const Floats four = {largest(v[0]), largest(v[1]), largest(v[2]), largest(v[3])};
  return {four, four, four, four};
}
template <int K>
inline F16 splat_of_four(F16 x) { return splat(x.v[0][K]); }
inline void store_four(float* p, F16 x) { memcpy(p, x.v, 16); }
inline void store_four(int32_t* p, I16 x) { memcpy(p, x.v, 16); }
inline F16 reciprocal(F16 x) { return quarters<F16>([=](int i) { return 1 / x.v[i]; }); }
// Four fp16 numbers. Bits moved to their places in a float are the value over 2^112, also of subnormal numbers.
inline Floats half_to_float(Ints half) {
  const Floats small = (Floats)((half & 0x7fff) << 13) * 0x1p112f;
  const Ints special = (half & 0x7c00) == 0x7c00;  // inf, nan
  return (Floats)((Ints)small | (special & 0x7f800000) | (half & 0x8000) << 16);
}
inline F16 load_half(const void* p) {
  uint16_t h[16];
  memcpy(h, p, sizeof h);
  return quarters<F16>([&](int i) { return half_to_float(Ints{h[4 * i], h[4 * i + 1], h[4 * i + 2], h[4 * i + 3]}); });
}
inline F16 to_float(I16 x) { return quarters<F16>([=](int i) { return __builtin_convertvector(x.v[i], Floats); }); }
// The sum of |x| < 2^22 with this has no fraction bits, and the whole number nearest to x in its lowest.
constexpr float kWholeFloat = 12582912.f;  // 1.5 * 2^23
constexpr int32_t kWholeBits = 0x4b400000;
inline F16 round_float(F16 x) { return sub(add(x, splat(kWholeFloat)), splat(kWholeFloat)); }
inline I16 round_int(F16 x) { return quarters<I16>([=](int i) { return (Ints)(x.v[i] + kWholeFloat) - kWholeBits; }); }
inline Floats times_power(Floats v, Ints whole) { return (Floats)((Ints)v + (whole << 23)); }
inline F16 times_power_of_two(F16 x, F16 whole) {
  return quarters<F16>([=](int i) { return times_power(x.v[i], (Ints)(whole.v[i] + kWholeFloat)); });
}
// x <= 0 as whole + fraction, |fraction| <= 1/2; `times_power` multiplies with 2^whole.
struct Split { F16 fraction; I16 whole; };
inline Split split(F16 x) {
  const F16 within = max(x, splat(-126)), sum = add(within, splat(kWholeFloat));
  return {sub(within, sub(sum, splat(kWholeFloat))), quarters<I16>([=](int i) { return (Ints)sum.v[i]; })};
}
inline F16 times_power(F16 v, Split s) { return quarters<F16>([=](int i) { return times_power(v.v[i], s.whole.v[i]); }); }
// 2^fraction is 1 + fraction * (... of these, the last one first): the minimax fit.
constexpr float kExp2Terms[] = {6.93124175e-1f, 2.40240991e-1f, 5.59064262e-2f, 9.58285294e-3f};
inline int32_t sum_int(I16 x) {
  const Ints four = (x.v[0] + x.v[1]) + (x.v[2] + x.v[3]);
  return four[0] + four[1] + four[2] + four[3];
}
inline I16 sums_of_four(const I16 (&v)[4]) {
  const Ints four = {sum_int(v[0]), sum_int(v[1]), sum_int(v[2]), sum_int(v[3])};
  return {four, four, four, four};
}
inline I16 add_int(I16 x, I16 y) { return quarters<I16>([=](int i) { return x.v[i] + y.v[i]; }); }
inline I16 splat_int(int32_t x) { return quarters<I16>([=](int) { return Ints{x, x, x, x}; }); }
inline I16 count_up(int32_t first) { return quarters<I16>([=](int i) { return Ints{0, 1, 2, 3} + (first + 4 * i); }); }
inline F16 keep_between(F16 x, I16 index, int32_t low, int32_t high, F16 other) {
  return quarters<F16>([=](int i) { return choose((index.v[i] >= low) & (index.v[i] < high), x.v[i], other.v[i]); });
}
inline void store_bytes(void* p, I16 x) {
  int32_t word[16];
  memcpy(word, x.v, sizeof word);
  for (int i = 0; i < 16; i++) ((uint8_t*)p)[i] = (uint8_t)word[i];
}
// Byte `at` of each word becomes the low byte of v's.
inline I16 with_byte(I16 words, I16 v, int at) {
  const int32_t mask = (int32_t)(255u << 8 * at);
  return quarters<I16>([=](int i) { return (words.v[i] & ~mask) | (v.v[i] << 8 * at & mask); });
}
inline I16 load_int(const void* p) { return quarters<I16>([=](int i) { return load_vector<Ints>((const char*)p + 16 * i); }); }
inline I16 load_bytes(const int8_t* p) {
  int32_t word[16];
  for (int i = 0; i < 16; i++) word[i] = p[i];
  return load_int(word);
}
inline void store_int(void* p, I16 x) { memcpy(p, x.v, sizeof x.v); }

inline Line load_line(const uint8_t* p) { return quarters<Line>([=](int i) { return load_vector<Bytes>(p + 16 * i); }); }
inline void store_line(uint8_t* p, Line x) { memcpy(p, x.v, 64); }
inline Line low_nibbles(Line x) { return quarters<Line>([=](int i) { return x.v[i] & 15; }); }
inline Line high_nibbles(Line x) { return quarters<Line>([=](int i) { return x.v[i] >> 4; }); }
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

// Dot products in 16 bits, as no vector has wider products of bytes on every CPU: of the 4 bytes of an output those at even
// places and those at odd ones, each as a vector of 16-bit numbers, and 4 activations split in the same way.
struct Pairs { Shorts even, odd; };
inline Pairs signed_pairs(Bytes v) { return {((Shorts)v << 8) >> 8, (Shorts)v >> 8}; }
inline Pairs unsigned_pairs(Bytes v) { return {(Shorts)v & 255, (Shorts)((UnsignedShorts)v >> 8)}; }
inline Bytes repeat(int32_t word) { return (Bytes)Ints{word, word, word, word}; }
inline Ints sum_of_pairs(Shorts v) { return (((Ints)v << 16) >> 16) + ((Ints)v >> 16); }
constexpr uint8_t kSign = 0x80;  // what takes the bias of 128 off a byte
inline Line unbiased(Line line) { return quarters<Line>([=](int i) { return line.v[i] ^ kSign; }); }

// A nibble times a signed byte, eight pairs a group: at most 8 * 2 * 15 * 127 = 30480, which 16 bits hold. So the sum of
// a group needs one widening at its end.
struct DotNibbles {
  using Wide = DotNibbles;
  struct Sum { Shorts v[4]; };
  static Line widen(Line line) { return line; }
  static Sum start(const int32_t*) { return {}; }
  static void step(Sum& sum, Line line, int32_t word) {
    const Pairs x = signed_pairs(repeat(word));
    for (int i = 0; i < 4; i++) {
      const Pairs w = unsigned_pairs(line.v[i]);
      sum.v[i] += w.even * x.even + w.odd * x.odd;
    }
  }
  static I16 total(Sum sum) { return quarters<I16>([=](int i) { return sum_of_pairs(sum.v[i]); }); }
};
// Bytes of full range: two products, at most 2 * 128 * 127 = 32512, fit 16 bits. So each step widens.
struct DotSigned {
  using Sum = I16;
  static Sum start(const int32_t*) { return splat_int(0); }
  static void step(Sum& sum, Line line, int32_t word) {
    const Pairs x = signed_pairs(repeat(word));
    for (int i = 0; i < 4; i++) {
      const Pairs w = signed_pairs(line.v[i]);
      sum.v[i] += sum_of_pairs(w.even * x.even + w.odd * x.odd);
    }
  }
  static I16 total(Sum sum) { return sum; }
};
struct DotBytes : DotSigned {
  using Wide = DotSigned;
  static Line widen(Line biased) { return unbiased(biased); }
  static void step(Sum& sum, Line line, int32_t word) { DotSigned::step(sum, widen(line), word); }
};

// Attention. Keys are bytes with a bias against signed queries; values are signed against weights 0..255. A Word is what 4
// queries or weights are multiplied as, an Operand a line made ready for several of them.
struct DotKeys {
  static constexpr int kBias = 0;  // gone with `prepare`
  using Operand = Line;
  using Word = int32_t;
  static F16 size(F16 q) { return abs(q); }  // at most 127 when quantised
  static Word word(const int8_t* q) { return load_word(q); }
  static Operand prepare(Line line) { return unbiased(line); }
  static void step(I16& sum, const Operand& keys, Word word) { DotSigned::step(sum, keys, word); }
};
// A weight above 127 leaves no room for a second product in 16 bits: each is widened alone.
struct DotValues {
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
  static void step(I16& sum, const Operand& values, Word word) {
    const Pairs w = unsigned_pairs(repeat(word));
    for (int i = 0; i < 4; i++) {
      const Pairs v = signed_pairs(values.v[i]);
      sum.v[i] += sum_of_pairs(v.even * w.even) + sum_of_pairs(v.odd * w.odd);
    }
  }
};

}  // namespace
