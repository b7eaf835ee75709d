/* The most 8-bit multiply-adds per second that one core does: independent chains of the instructions that the CPU engine
 * multiplies 4-bit weights with, on values in registers. Compiled for the machine it runs on (-march=native). */
#include <stdint.h>

/* In a vector register, or a general one. */
#if defined(__AVX512VNNI__)
#define HELD(value) "+v"(value)
#include <immintrin.h>
#define PER_INSTRUCTION 64
typedef __m512i vector;
static inline vector multiply_add(vector sum, vector a, vector b) { return _mm512_dpbusd_epi32(sum, a, b); }
static inline vector fill(int value) { return _mm512_set1_epi8((char)value); }
static const char *name = "AVX-512 VNNI (vpdpbusd)";
#elif defined(__AVX2__)
#define HELD(value) "+x"(value)
#include <immintrin.h>
#define PER_INSTRUCTION 32
typedef __m256i vector;
static inline vector multiply_add(vector sum, vector a, vector b) {
    return _mm256_add_epi16(sum, _mm256_maddubs_epi16(a, b));
}
static inline vector fill(int value) { return _mm256_set1_epi8((char)value); }
static const char *name = "AVX2 (vpmaddubsw, vpaddw)";
#else
#define HELD(value) "+r"(value)
#define PER_INSTRUCTION 1
typedef int32_t vector;
static inline vector multiply_add(vector sum, vector a, vector b) { return sum + a * b; }
static inline vector fill(int value) { return value; }
static const char *name = "portable C";
#endif

/* More chains than latency times throughput of the multiplier, fewer than registers. One variable each: an array would stay
 * in memory. The empty asms keep the compiler from multiplying once for all chains, and from adding the rounds up at once. */
#define CHAINS 12
#define EACH(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7) DO(8) DO(9) DO(10) DO(11)
#define DECLARE(i) vector sum##i = fill(i);
#define STEP(i) \
    __asm__ volatile("" : HELD(b)); \
    sum##i = multiply_add(sum##i, a, b); \
    __asm__ volatile("" : HELD(sum##i));

const char *peak_instructions(void) { return name; }

/* Does `rounds` rounds and returns the number of multiply-adds. */
int64_t peak_run(int64_t rounds) {
    vector a = fill(3), b = fill(5);
    EACH(DECLARE)
    for (int64_t round = 0; round < rounds; round++) {
        EACH(STEP)
    }
    return rounds * CHAINS * PER_INSTRUCTION;
}
