// The kernels for x86-64 with AVX2, FMA and F16C; build.py gives this file those flags.
#ifdef __AVX2__
#include "simd_avx2.h"
//
#include "attend.h"
#include "linear.h"

namespace busload {
const Kernels* avx2_kernels() {
  static const Kernels k{"avx2", linear, norm_quantise, norm_add, gate, rotate_store, attend, attend_join, argmax, exponentials};
  return &k;
}
}  // namespace busload
#else
#include "kernels.h"
const busload::Kernels* busload::avx2_kernels() { return nullptr; }
#endif
