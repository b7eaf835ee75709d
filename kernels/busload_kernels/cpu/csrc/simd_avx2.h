// Sixteen lanes as two halves for AVX2 with FMA and F16C.
#pragma once
#include <immintrin.h>
#include <stdint.h>

namespace {

struct F16 { __m256 a, b; };    // 16 floats
struct I16 { __m256i a, b; };   // 16 int32
struct Line { __m256i a, b; };  // 8 outputs x 4 inputs each

// 4 rows x 16 outputs are 8 of 16 registers; more rows spill.
constexpr int kWideRows = 4, kWideTiles = 1, kDirectRows = 4;
// Attention: queries at once, and how many times 16 keys or dims.
constexpr int kRowsAtOnce = 4, kScoreParts = 1, kValueParts = 1;

// gcc 12 turns a chain of 16-bit additions into a tree, computes all products first and spills every one of them. An
// empty asm that reads and writes the sum keeps the order (209 -> 293 GOPS on a Zen5).
inline void pin(__m256i& v) { asm volatile("" : "+x"(v)); }

inline F16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, F16 v) { _mm256_storeu_ps(p, v.a), _mm256_storeu_ps(p + 8, v.b); }
inline F16 splat(float v) { return {_mm256_set1_ps(v), _mm256_set1_ps(v)}; }
inline F16 add(F16 x, F16 y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline F16 sub(F16 x, F16 y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline F16 mul(F16 x, F16 y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline F16 div(F16 x, F16 y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline F16 fma(F16 x, F16 y, F16 z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline F16 max(F16 x, F16 y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline F16 min(F16 x, F16 y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline F16 abs(F16 x) {
  __m256 sign = _mm256_set1_ps(-0.f);
  return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
inline float sum(F16 v) {
  __m256 x = _mm256_add_ps(v.a, v.b);
  __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_add_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_add_ss(y, _mm_shuffle_ps(y, y, 1)));
}
inline float largest(F16 v) {
  __m256 x = _mm256_max_ps(v.a, v.b);
  __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  y = _mm_max_ps(y, _mm_movehl_ps(y, y));
  return _mm_cvtss_f32(_mm_max_ss(y, _mm_shuffle_ps(y, y, 1)));
}
inline F16 load_half(const void* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p + 1))};
}
inline F16 to_float(I16 v) { return {_mm256_cvtepi32_ps(v.a), _mm256_cvtepi32_ps(v.b)}; }
inline I16 round_int(F16 v) { return {_mm256_cvtps_epi32(v.a), _mm256_cvtps_epi32(v.b)}; }
inline F16 round_float(F16 v) {
  return {_mm256_round_ps(v.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
          _mm256_round_ps(v.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
inline __m256 times_power_of_two(__m256 v, __m256 whole) {
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(v), _mm256_slli_epi32(_mm256_cvtps_epi32(whole), 23)));
}
inline F16 times_power_of_two(F16 v, F16 whole) {
  return {times_power_of_two(v.a, whole.a), times_power_of_two(v.b, whole.b)};
}
// v * 2^whole for whole <= 0
inline F16 times_small_power(F16 v, F16 whole) { return times_power_of_two(v, max(whole, splat(-126))); }
inline int32_t sum_int(I16 v) {
  __m256i x = _mm256_add_epi32(v.a, v.b);
  __m128i y = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
  y = _mm_add_epi32(y, _mm_shuffle_epi32(y, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(y, _mm_shuffle_epi32(y, 0xb1)));
}
inline I16 add_int(I16 x, I16 y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
inline I16 splat_int(int32_t v) { return {_mm256_set1_epi32(v), _mm256_set1_epi32(v)}; }
inline I16 count_up(int32_t first) {
  __m256i low = _mm256_add_epi32(_mm256_set1_epi32(first), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  return {low, _mm256_add_epi32(low, _mm256_set1_epi32(8))};
}
inline __m256 keep_between(__m256 v, __m256i index, int32_t low, int32_t high, __m256 other) {
  __m256i outside = _mm256_or_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(low), index),
                                    _mm256_cmpgt_epi32(index, _mm256_set1_epi32(high - 1)));
  return _mm256_blendv_ps(v, other, _mm256_castsi256_ps(outside));
}
inline F16 keep_between(F16 v, I16 index, int32_t low, int32_t high, F16 other) {
  return {keep_between(v.a, index.a, low, high, other.a), keep_between(v.b, index.b, low, high, other.b)};
}
// Values outside a byte are the caller's mistake; -128..255 keep their low byte.
inline void store_bytes(void* p, I16 v) {
  __m256i mask = _mm256_set1_epi32(255);
  __m256i words = _mm256_packus_epi32(_mm256_and_si256(v.a, mask), _mm256_and_si256(v.b, mask));  // 0-3 8-11 | 4-7 12-15
  words = _mm256_permute4x64_epi64(words, 0xd8);
  _mm_storeu_si128((__m128i*)p, _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}

inline Line load_line(const uint8_t* p) {
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)p + 1)};
}
inline void store_line(uint8_t* p, Line v) {
  _mm256_storeu_si256((__m256i*)p, v.a), _mm256_storeu_si256((__m256i*)p + 1, v.b);
}
inline Line low_nibbles(Line v) {
  __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(v.a, mask), _mm256_and_si256(v.b, mask)};
}
inline Line high_nibbles(Line v) {
  __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(_mm256_srli_epi16(v.a, 4), mask), _mm256_and_si256(_mm256_srli_epi16(v.b, 4), mask)};
}
inline int32_t load_word(const void* p) {
  int32_t v;
  __builtin_memcpy(&v, p, 4);
  return v;
}

// A nibble times a signed byte, eight pairs a group: at most 8 * 2 * 15 * 127 = 30480, which 16 bits hold. So the sum of
// a group needs one widening at its end.
struct DotNibbles {
  using Wide = DotNibbles;
  struct Sum { __m256i a, b; };  // 16-bit
  static Line widen(Line line) { return line; }
  static Sum start(const int32_t*) { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
  static void step(Sum& sum, Line line, int32_t x) {
    __m256i b = _mm256_set1_epi32(x);
    sum.a = _mm256_add_epi16(sum.a, _mm256_maddubs_epi16(line.a, b));
    pin(sum.a);
    sum.b = _mm256_add_epi16(sum.b, _mm256_maddubs_epi16(line.b, b));
    pin(sum.b);
  }
  static I16 total(Sum sum) {
    __m256i one = _mm256_set1_epi16(1);
    return {_mm256_madd_epi16(sum.a, one), _mm256_madd_epi16(sum.b, one)};
  }
};
// Bytes of full range would saturate `vpmaddubsw` (2 * 255 * 127). With the bias taken off and the sign moved to the
// activation a pair is at most 2 * 128 * 127 = 32512; only one pair fits, so each step widens.
struct DotSigned {
  using Sum = I16;
  static Sum start(const int32_t*) { return splat_int(0); }
  static __m256i half(__m256i w, __m256i x) {
    return _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w)), _mm256_set1_epi16(1));
  }
  static void step(Sum& sum, Line line, int32_t x) {
    __m256i b = _mm256_set1_epi32(x);
    sum.a = _mm256_add_epi32(sum.a, half(line.a, b));
    pin(sum.a);
    sum.b = _mm256_add_epi32(sum.b, half(line.b, b));
    pin(sum.b);
  }
  static I16 total(Sum sum) { return sum; }
};
struct DotBytes : DotSigned {
  using Wide = DotSigned;
  static Line widen(Line biased) {
    const __m256i bias = _mm256_set1_epi8((char)0x80);
    return {_mm256_xor_si256(biased.a, bias), _mm256_xor_si256(biased.b, bias)};
  }
  static void step(Sum& sum, Line line, int32_t x) { DotSigned::step(sum, widen(line), x); }
};

// Attention. Keys are bytes with a bias against signed queries; values are signed against weights 0..255. A Word is what 4
// queries or weights are multiplied as, an Operand a line made ready for several of them. Here both are 16-bit, first and
// third of the four in one register, second and fourth in the other: `vpmaddubsw` would saturate, and mending that costs
// more than widening once.
struct Widened { __m256i even[2], odd[2]; };
struct EvenOdd { int32_t even, odd; };

inline void step_widened(I16& sum, const Widened& line, const EvenOdd& word) {
  const __m256i even = _mm256_set1_epi32(word.even), odd = _mm256_set1_epi32(word.odd);
  sum.a = _mm256_add_epi32(sum.a, _mm256_madd_epi16(line.even[0], even));
  pin(sum.a);
  sum.b = _mm256_add_epi32(sum.b, _mm256_madd_epi16(line.even[1], even));
  pin(sum.b);
  sum.a = _mm256_add_epi32(sum.a, _mm256_madd_epi16(line.odd[0], odd));
  pin(sum.a);
  sum.b = _mm256_add_epi32(sum.b, _mm256_madd_epi16(line.odd[1], odd));
  pin(sum.b);
}
struct DotKeys {
  static constexpr int kBias = 128;
  using Operand = Widened;
  using Word = EvenOdd;
  static Word word(const int8_t* q) {
    const auto pair = [](int8_t low, int8_t high) { return (int32_t)((uint32_t)(uint16_t)high << 16 | (uint16_t)low); };
    return {pair(q[0], q[2]), pair(q[1], q[3])};
  }
  static Operand prepare(Line line) {
    const __m256i low = _mm256_set1_epi16(255);
    return {{_mm256_and_si256(line.a, low), _mm256_and_si256(line.b, low)},
            {_mm256_srli_epi16(line.a, 8), _mm256_srli_epi16(line.b, 8)}};
  }
  static void step(I16& sum, const Operand& keys, const Word& q) { step_widened(sum, keys, q); }
};
struct DotValues {
  using Operand = Widened;
  using Word = EvenOdd;
  // The words of a block's 32 weights, in the order that packing leaves: those of keys 4g..4g+3 are at place(g).
  static constexpr int place(int g) { return g / 4 * 4 + 2 * (g % 2) + g % 4 / 2; }
  static __m256i pack(I16 v) {
    const __m256i order = _mm256_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15,  //
                                           0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15);
    return _mm256_shuffle_epi8(_mm256_packus_epi32(v.a, v.b), order);
  }
  static void store(Word* p, I16 a, I16 b) {
    _mm256_storeu_si256((__m256i*)p, pack(a)), _mm256_storeu_si256((__m256i*)p + 1, pack(b));
  }
  static __m256i even(__m256i v) { return _mm256_srai_epi16(_mm256_slli_epi16(v, 8), 8); }
  static Operand prepare(Line line) {
    return {{even(line.a), even(line.b)}, {_mm256_srai_epi16(line.a, 8), _mm256_srai_epi16(line.b, 8)}};
  }
  static void step(I16& sum, const Operand& values, const Word& w) { step_widened(sum, values, w); }
};

}  // namespace
