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
// Vectors that go through the gate side by side: a core looks only so far ahead, and one long chain of instructions after the
// other would fill that with instructions that wait.
constexpr int kChains = 4;
// Attention: queries at once, and how many times 16 keys or dims.
constexpr int kRowsAtOnce = 8, kScoreParts = 2, kValueParts = 2;

inline F16 load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, F16 v) { _mm512_storeu_ps(p, v); }
inline F16 splat(float v) { return _mm512_set1_ps(v); }
inline F16 add(F16 a, F16 b) { return _mm512_add_ps(a, b); }
inline F16 sub(F16 a, F16 b) { return _mm512_sub_ps(a, b); }
inline F16 mul(F16 a, F16 b) { return _mm512_mul_ps(a, b); }
inline F16 fma(F16 a, F16 b, F16 c) { return _mm512_fmadd_ps(a, b, c); }
inline F16 max(F16 a, F16 b) { return _mm512_max_ps(a, b); }
inline F16 min(F16 a, F16 b) { return _mm512_min_ps(a, b); }
inline F16 abs(F16 a) { return _mm512_abs_ps(a); }
inline float sum(F16 v) { return _mm512_reduce_add_ps(v); }
inline float largest(F16 v) { return _mm512_reduce_max_ps(v); }
// The largest, or the sum, of each of four vectors, again and again in the lanes of the result: a fold at each step joins two.
template <class Fold>
inline __m512 fold_four(__m512 a, __m512 b, __m512 c, __m512 d, Fold fold) {
  const __m512d ab = _mm512_castps_pd(fold(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)));
  const __m512d cd = _mm512_castps_pd(fold(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d)));
  const __m512 all = fold(_mm512_castpd_ps(_mm512_unpacklo_pd(ab, cd)), _mm512_castpd_ps(_mm512_unpackhi_pd(ab, cd)));
  const __m512 half = fold(all, _mm512_shuffle_f32x4(all, all, 0x4e));
  return fold(half, _mm512_shuffle_f32x4(half, half, 0xb1));
}
inline F16 largest_of_four(const F16 (&v)[4]) {
  return fold_four(v[0], v[1], v[2], v[3], [](__m512 x, __m512 y) { return _mm512_max_ps(x, y); });
}
inline I16 sums_of_four(const I16 (&v)[4]) {
  const auto fold = [](__m512 x, __m512 y) {
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(x), _mm512_castps_si512(y)));
  };
  const auto as = [](I16 x) { return _mm512_castsi512_ps(x); };
  return _mm512_castps_si512(fold_four(as(v[0]), as(v[1]), as(v[2]), as(v[3]), fold));
}
template <int K>
inline F16 splat_of_four(F16 v) { return _mm512_permute_ps(v, K * 0x55); }
inline void store_four(float* p, F16 v) { _mm_storeu_ps(p, _mm512_castps512_ps128(v)); }
inline void store_four(int32_t* p, I16 v) { _mm_storeu_si128((__m128i*)p, _mm512_castsi512_si128(v)); }
// 1 / v, relative error 2^-22. For 1e-30 <= v.
inline F16 reciprocal(F16 v) {
  const F16 guess = _mm512_rcp14_ps(v);
  return _mm512_mul_ps(guess, _mm512_fnmadd_ps(v, guess, _mm512_set1_ps(2)));
}
inline F16 load_half(const void* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
inline F16 to_float(I16 v) { return _mm512_cvtepi32_ps(v); }
inline I16 round_int(F16 v) { return _mm512_cvtps_epi32(v); }
inline F16 round_float(F16 v) { return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline F16 times_power_of_two(F16 v, F16 whole) { return _mm512_scalef_ps(v, whole); }
// x <= 0 as a whole number and a fraction from 0 to 1; `times_power` multiplies with 2^whole (vscalefps takes the floor of x).
struct Split { F16 fraction, x; };
inline Split split(F16 x) { return {_mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC), x}; }
inline F16 times_power(F16 v, Split s) { return _mm512_scalef_ps(v, s.x); }
// 2^fraction is 1 + fraction * (... of these, the last one first): the minimax fit.
constexpr float kExp2Terms[] = {6.930448450e-1f, 2.412802038e-1f, 5.224247629e-2f, 1.342668301e-2f};
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
// Byte `at` of each word becomes the low byte of v's.
inline I16 with_byte(I16 words, I16 v, int at) {
  const __m128i bits = _mm_cvtsi32_si128(8 * at);
  const I16 mask = _mm512_sll_epi32(_mm512_set1_epi32(255), bits);
  return _mm512_ternarylogic_epi32(mask, _mm512_sll_epi32(v, bits), words, 0xca);  // mask ? v : words
}
inline I16 load_int(const void* p) { return _mm512_loadu_si512(p); }
inline I16 load_bytes(const int8_t* p) { return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)); }
inline void store_int(void* p, I16 v) { _mm512_storeu_si512(p, v); }

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
//
// Sums start from the bits of 1.5 * 2^23, as a float which has no fraction bits: so the float of a sum's bits is its value more
// than that, and one fma both converts and scales it. c is exact, scales have 11 bits (or a few more): what that fma returns
// is the product, rounded once.
constexpr float kSumStartFloat = 12582912.f;
constexpr int32_t kSumStart = 0x4b400000;
struct SumScale {
  F16 factor, start;
  explicit SumScale(F16 scale) : factor(scale), start(_mm512_mul_ps(scale, _mm512_set1_ps(-kSumStartFloat))) {}
  // result + sum * factor * scale
  F16 add(F16 result, I16 sum, float scale) const {
    return fma(fma(_mm512_castsi512_ps(sum), factor, start), splat(scale), result);
  }
};
struct DotNibbles {  // line 0..15, activations signed
  using Wide = DotNibbles;
  using Sum = __m512i;
  static Line widen(Line line) { return line; }
  static Sum start(const int32_t*) { return _mm512_set1_epi32(kSumStart); }
  static void step(Sum& sum, Line line, int32_t x) { sum = _mm512_dpbusd_epi32(sum, line, _mm512_set1_epi32(x)); }
  static I16 total(Sum sum) { return sum; }
};
struct DotBytes : DotNibbles {  // line: value + 128
  using Wide = DotBytes;
  static Sum start(const int32_t* start) { return _mm512_set1_epi32(*start); }
};

// Attention. Keys are bytes with a bias against signed queries; values are signed against weights 0..255. A Word is what 4
// queries or weights are multiplied as, an Operand a line made ready for several of them.
struct DotKeys {
  static constexpr int kBias = 128;
  static F16 size(F16 q) { return abs(q); }  // at most 127 when quantised
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
  static constexpr float kTop = 255;
  // Weights of the rows that are computed at once, for so many blocks: `put` takes those of one block, at most kTop.
  template <int Blocks>
  struct Pack {
    alignas(32) Word words[kRowsAtOnce][Blocks * 8];
    void start(int) {}
    void put(int row, int block, I16 a, I16 b) {
      _mm256_store_si256((__m256i*)words[row] + block, _mm512_cvtusepi16_epi8(_mm512_packus_epi32(a, b)));
    }
    void finish(int, int, int, float*) {}
  };
  static Operand prepare(Line line) { return line; }
  static void step(I16& sum, Operand values, Word w) { sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi32(w), values); }
};

}  // namespace
