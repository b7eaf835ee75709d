// The kernels for x86-64 with AVX-512 F, BW, VL, DQ and VNNI; build.py gives this file those flags.
#ifdef __AVX512VNNI__
#include "simd_avx512.h"
//
#include "attend.h"
#include "linear.h"

namespace busload {
const Kernels* avx512_kernels() {
  static const Kernels k{"avx512", linear, norm_quantise, norm_add, gate, rotate_store, attend, attend_join, argmax, exponentials};
  return &k;
}
}  // namespace busload
#else
#include "kernels.h"
const busload::Kernels* busload::avx512_kernels() { return nullptr; }
#endif
