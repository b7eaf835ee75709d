// The kernels for any CPU; compiled with the compiler's default target.
#include "simd_portable.h"
//
#include "attend.h"
#include "linear.h"

namespace busload {
const Kernels* portable_kernels() {
  static const Kernels k{"portable", linear, norm_quantise, norm_add, gate, rotate_store, attend, attend_join, argmax, exponentials};
  return &k;
}
}  // namespace busload
