// Sixteen lanes as two halves for AVX2 with FMA and F16C.
#pragma once
#include <immintrin.h>
#include <stdint.h>

namespace {

struct F16 { __m256 a, b; };    // 16 floats
struct I16 { __m256i a, b; };   // 16 int32
struct Line { __m256i a, b; };  // 8 outputs x 4 inputs each

// 3 rows x 16 outputs are 6 of 16 registers, their sums over one group 6 more: a fourth row would spill. Few rows wait for
// memory anyhow.
constexpr int kWideRows = 3, kWideTiles = 1, kDirectRows = 4;
constexpr int kChains = 2;  // vectors that go through the gate side by side
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
// The largest, or the sum, of each of four vectors, again and again in the lanes of the result: a fold at each step joins two.
template <class Fold>
inline __m256 fold_four(__m256 a, __m256 b, __m256 c, __m256 d, Fold fold) {
  const __m256d ab = _mm256_castps_pd(fold(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b)));
  const __m256d cd = _mm256_castps_pd(fold(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d)));
  const __m256 all = fold(_mm256_castpd_ps(_mm256_unpacklo_pd(ab, cd)), _mm256_castpd_ps(_mm256_unpackhi_pd(ab, cd)));
  return fold(all, _mm256_permute2f128_ps(all, all, 1));
}
inline F16 largest_of_four(const F16 (&v)[4]) {
  const auto fold = [](__m256 x, __m256 y) { return _mm256_max_ps(x, y); };
  const auto one = [&](F16 x) { return fold(x.a, x.b); };
  const __m256 four = fold_four(one(v[0]), one(v[1]), one(v[2]), one(v[3]), fold);
  return {four, four};
}
inline I16 sums_of_four(const I16 (&v)[4]) {
  const auto fold = [](__m256 x, __m256 y) {
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), _mm256_castps_si256(y)));
  };
  const auto one = [](I16 x) { return _mm256_castsi256_ps(_mm256_add_epi32(x.a, x.b)); };
  const __m256i four = _mm256_castps_si256(fold_four(one(v[0]), one(v[1]), one(v[2]), one(v[3]), fold));
  return {four, four};
}
template <int K>
inline F16 splat_of_four(F16 v) { return {_mm256_permute_ps(v.a, K * 0x55), _mm256_permute_ps(v.b, K * 0x55)}; }
inline void store_four(float* p, F16 v) { _mm_storeu_ps(p, _mm256_castps256_ps128(v.a)); }
inline void store_four(int32_t* p, I16 v) { _mm_storeu_si128((__m128i*)p, _mm256_castsi256_si128(v.a)); }
// 1 / v, relative error 2^-21. For 1e-30 <= v.
inline __m256 reciprocal(__m256 v) {
  const __m256 guess = _mm256_rcp_ps(v);
  return _mm256_mul_ps(guess, _mm256_fnmadd_ps(v, guess, _mm256_set1_ps(2)));
}
inline F16 reciprocal(F16 v) { return {reciprocal(v.a), reciprocal(v.b)}; }
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
// x <= 0 as whole + fraction, |fraction| <= 1/2; `times_power` multiplies with 2^whole. A sum with 1.5 * 2^23 has no fraction
// bits, and the whole number in its lowest.
struct Split { F16 fraction; I16 whole; };
inline Split split(F16 x) {
  const F16 shift = splat(12582912.f), within = max(x, splat(-126)), sum = add(within, shift);
  return {sub(within, sub(sum, shift)), {_mm256_castps_si256(sum.a), _mm256_castps_si256(sum.b)}};
}
inline __m256 times_power(__m256 v, __m256i whole) {
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(v), _mm256_slli_epi32(whole, 23)));
}
inline F16 times_power(F16 v, Split s) { return {times_power(v.a, s.whole.a), times_power(v.b, s.whole.b)}; }
// 2^fraction is 1 + fraction * (... of these, the last one first): the minimax fit.
constexpr float kExp2Terms[] = {6.93124175e-1f, 2.40240991e-1f, 5.59064262e-2f, 9.58285294e-3f};
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
// Byte `at` of each word becomes the low byte of v's.
inline __m256i with_byte(__m256i words, __m256i v, int at) {
  const __m128i bits = _mm_cvtsi32_si128(8 * at);
  const __m256i mask = _mm256_sll_epi32(_mm256_set1_epi32(255), bits);
  return _mm256_or_si256(_mm256_andnot_si256(mask, words), _mm256_and_si256(mask, _mm256_sll_epi32(v, bits)));
}
inline I16 with_byte(I16 words, I16 v, int at) { return {with_byte(words.a, v.a, at), with_byte(words.b, v.b, at)}; }
inline I16 load_int(const void* p) {
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)p + 1)};
}
inline I16 load_bytes(const int8_t* p) {
  return {_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)), _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8)))};
}
inline void store_int(void* p, I16 v) { _mm256_storeu_si256((__m256i*)p, v.a), _mm256_storeu_si256((__m256i*)p + 1, v.b); }

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

constexpr int32_t kSumStart = 0;
struct SumScale {
  F16 factor;
  explicit SumScale(F16 scale) : factor(scale) {}
  // The product of the scales does not wait for the sum.
  F16 add(F16 result, I16 sum, float scale) const { return fma(to_float(sum), mul(factor, splat(scale)), result); }
};
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
// queries or weights are multiplied as, an Operand a line made ready for several of them. `vpmaddubsw` saturates when the
// products of a pair of neighbours exceed 16 bits.
struct DotKeys {
  static constexpr int kBias = 128;
  using Operand = Line;
  using Word = int32_t;
  // At most 127 when quantised: that of a pair, which rounding may raise by 1. So the products of a pair are 255 * 128.
  static __m256 size(__m256 q) {
    q = _mm256_andnot_ps(_mm256_set1_ps(-0.f), q);
    return _mm256_add_ps(q, _mm256_permute_ps(q, 0xb1));
  }
  static F16 size(F16 q) { return {size(q.a), size(q.b)}; }
  static Word word(const int8_t* q) { return load_word(q); }
  static Operand prepare(Line line) { return line; }
  static __m256i half(__m256i keys, __m256i q) {
    return _mm256_madd_epi16(_mm256_maddubs_epi16(keys, q), _mm256_set1_epi16(1));
  }
  static void step(I16& sum, const Operand& keys, Word word) {
    const __m256i q = _mm256_set1_epi32(word);
    sum.a = _mm256_add_epi32(sum.a, half(keys.a, q));
    pin(sum.a);
    sum.b = _mm256_add_epi32(sum.b, half(keys.b, q));
    pin(sum.b);
  }
};
// Weights are rounded to 15 bits, then to bytes such that no pair of neighbours is together above 255 (256 by rounding), so
// its products stay below 256 * 127: a weight that stands out keeps 8 bits, and among equals 7 are enough.
struct DotValues {
  using Operand = Line;
  using Word = int32_t;
  static constexpr float kTop = 32767;
  // The words of a block's 32 weights, in the order that packing leaves: those of keys 4g..4g+3 are at place(g).
  static constexpr int place(int g) { return g / 2 + 4 * (g % 2); }

  // Weights of the rows that are computed at once, for so many blocks: `put` takes those of one block, at most kTop, and
  // `finish` multiplies `steps` with what bytes are to be multiplied with to be relative to kTop.
  template <int Blocks>
  class Pack {
    static_assert(kRowsAtOnce == 4);

   public:
    alignas(32) Word words[kRowsAtOnce][Blocks * 8];

    void start(int row) { pairs_[row] = _mm256_setzero_si256(); }
    void put(int row, int block, I16 a, I16 b) {
      const __m256i one = _mm256_set1_epi16(1), low = _mm256_packus_epi32(a.a, a.b), high = _mm256_packus_epi32(b.a, b.b);
      wide_[row][block][0] = low, wide_[row][block][1] = high;
      const __m256i pairs = _mm256_max_epi32(_mm256_madd_epi16(low, one), _mm256_madd_epi16(high, one));
      pairs_[row] = _mm256_max_epi32(pairs_[row], pairs);
    }
    void finish(int rows, int begin, int end, float* steps) {
      __m256 size[kRowsAtOnce];
      for (int r = 0; r < kRowsAtOnce; r++) size[r] = _mm256_cvtepi32_ps(r < rows ? pairs_[r] : _mm256_setzero_si256());
      const __m128 pair = _mm256_castps256_ps128(
          fold_four(size[0], size[1], size[2], size[3], [](__m256 x, __m256 y) { return _mm256_max_ps(x, y); }));
      // Over 2^15, as vpmulhrsw multiplies.
      const __m128 most = _mm_min_ps(_mm_div_ps(_mm_set1_ps(255 * 32768.f), _mm_max_ps(pair, _mm_set1_ps(1))), _mm_set1_ps(32767));
      const __m128i factors = _mm_cvttps_epi32(most);
      alignas(16) int32_t factor[4];
      alignas(16) float step[4];
      _mm_store_si128((__m128i*)factor, factors);
      _mm_store_ps(step, _mm_div_ps(_mm_set1_ps(32768), _mm_cvtepi32_ps(factors)));
      for (int r = 0; r < rows; r++) {
        const __m256i by = _mm256_set1_epi16((int16_t)factor[r]);
        for (int b = begin; b < end; b++)
          _mm256_store_si256((__m256i*)words[r] + b, _mm256_packus_epi16(_mm256_mulhrs_epi16(wide_[r][b][0], by),
                                                                        _mm256_mulhrs_epi16(wide_[r][b][1], by)));
        steps[r] *= step[r];
      }
    }

   private:
    __m256i wide_[kRowsAtOnce][Blocks][2], pairs_[kRowsAtOnce];  // 16 bits; the largest sums of neighbours
  };
  static Operand prepare(Line line) { return line; }
  static __m256i half(__m256i values, __m256i w) {
    return _mm256_madd_epi16(_mm256_maddubs_epi16(w, values), _mm256_set1_epi16(1));
  }
  static void step(I16& sum, const Operand& values, Word word) {
    const __m256i w = _mm256_set1_epi32(word);
    sum.a = _mm256_add_epi32(sum.a, half(values.a, w));
    pin(sum.a);
    sum.b = _mm256_add_epi32(sum.b, half(values.b, w));
    pin(sum.b);
  }
};

}  // namespace
