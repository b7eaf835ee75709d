// Sixteen lanes for AVX-512 (F, BW, VL, DQ) with VNNI.
#pragma once
#include <immintrin.h>
#include <stdint.h>

namespace {

using F16 = __m512;   // 16 floats
using I16 = __m512i;  // 16 int32
using Line = __m512i;

// Rows and tiles of the large-batch kernel: 6 x 2 accumulators and as many sums are 24 of 32 registers.
constexpr int kWideRows = 6, kWideTiles = 2, kDirectRows = 8;
// Attention: queries at once, and how many times 16 keys or dims.
constexpr int kRowsAtOnce = 8, kScoreParts = 2, kValueParts = 2;

inline F16 load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, F16 v) { _mm512_storeu_ps(p, v); }
inline F16 splat(float v) { return _mm512_set1_ps(v); }
inline F16 add(F16 a, F16 b) { return _mm512_add_ps(a, b); }
inline F16 sub(F16 a, F16 b) { return _mm512_sub_ps(a, b); }
inline F16 mul(F16 a, F16 b) { return _mm512_mul_ps(a, b); }
inline F16 div(F16 a, F16 b) { return _mm512_div_ps(a, b); }
inline F16 fma(F16 a, F16 b, F16 c) { return _mm512_fmadd_ps(a, b, c); }
inline F16 max(F16 a, F16 b) { return _mm512_max_ps(a, b); }
inline F16 min(F16 a, F16 b) { return _mm512_min_ps(a, b); }
inline F16 abs(F16 a) { return _mm512_abs_ps(a); }
inline float sum(F16 v) { return _mm512_reduce_add_ps(v); }
inline float largest(F16 v) { return _mm512_reduce_max_ps(v); }
inline F16 load_half(const void* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
inline F16 to_float(I16 v) { return _mm512_cvtepi32_ps(v); }
inline I16 round_int(F16 v) { return _mm512_cvtps_epi32(v); }
inline F16 round_float(F16 v) { return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline F16 times_power_of_two(F16 v, F16 whole) { return _mm512_scalef_ps(v, whole); }
// v * 2^whole for whole <= 0
inline F16 times_small_power(F16 v, F16 whole) { return _mm512_scalef_ps(v, whole); }
inline int32_t sum_int(I16 v) { return _mm512_reduce_add_epi32(v); }
inline I16 add_int(I16 a, I16 b) { return _mm512_add_epi32(a, b); }
inline I16 splat_int(int32_t v) { return _mm512_set1_epi32(v); }
inline I16 count_up(int32_t first) {
  return _mm512_add_epi32(_mm512_set1_epi32(first), _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
}
// v where low <= index < high, else `other`
inline F16 keep_between(F16 v, I16 index, int32_t low, int32_t high, F16 other) {
  __mmask16 keep = _mm512_cmple_epi32_mask(_mm512_set1_epi32(low), index) & _mm512_cmplt_epi32_mask(index, _mm512_set1_epi32(high));
  return _mm512_mask_blend_ps(keep, other, v);
}
inline void store_bytes(void* p, I16 v) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(v)); }

inline Line load_line(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline void store_line(uint8_t* p, Line v) { _mm512_storeu_si512(p, v); }
inline Line low_nibbles(Line v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
inline Line high_nibbles(Line v) { return _mm512_and_si512(_mm512_srli_epi16(v, 4), _mm512_set1_epi8(15)); }
inline int32_t load_word(const void* p) {
  int32_t v;
  __builtin_memcpy(&v, p, 4);
  return v;
}

// Dot products of one line with 4 broadcast bytes, summed over a group. Where bytes carry a bias, `start` takes it out of
// the sum. Wide tiles hold lines as `widen` makes them, for the steps of Wide.
struct DotNibbles {  // line 0..15, activations signed
  using Wide = DotNibbles;
  using Sum = __m512i;
  static Line widen(Line line) { return line; }
  static Sum start(const int32_t*) { return _mm512_setzero_si512(); }
  static void step(Sum& sum, Line line, int32_t x) { sum = _mm512_dpbusd_epi32(sum, line, _mm512_set1_epi32(x)); }
  static I16 total(Sum sum) { return sum; }
};
struct DotBytes : DotNibbles {  // line: value + 128
  using Wide = DotBytes;
  static Sum start(const int32_t* unbias) { return _mm512_set1_epi32(*unbias); }
};

// Attention. Keys are bytes with a bias against signed queries; values are signed against weights 0..255. A Word is what 4
// queries or weights are multiplied as, an Operand a line made ready for several of them.
struct DotKeys {
  static constexpr int kBias = 128;
  using Operand = Line;
  using Word = int32_t;
  static Word word(const int8_t* q) { return load_word(q); }
  static Operand prepare(Line line) { return line; }
  static void step(I16& sum, Operand keys, Word q) { sum = _mm512_dpbusd_epi32(sum, keys, _mm512_set1_epi32(q)); }
};
struct DotValues {
  using Operand = Line;
  using Word = int32_t;
  // The words of a block's 32 weights, in the order that packing leaves: those of keys 4g..4g+3 are at place(g).
  static constexpr int place(int g) { return 2 * (g % 4) + g / 4; }
  static void store(Word* p, I16 a, I16 b) {
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtusepi16_epi8(_mm512_packus_epi32(a, b)));
  }
  static Operand prepare(Line line) { return line; }
  static void step(I16& sum, Operand values, Word w) { sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi32(w), values); }
};

}  // namespace
