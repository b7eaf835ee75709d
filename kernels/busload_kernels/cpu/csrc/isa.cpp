// Which instruction sets this CPU, and the system on it, can run. Not by __builtin_cpu_supports: it is not in every
// compiler's runtime library.
#include <string.h>

#include "kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>

namespace {

struct Features {
  bool avx2 = false, avx512 = false;
};

Features detect() {
  unsigned eax, ebx, ecx, edx;
  Features found;
  if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx)) return found;
  const unsigned fma = 1u << 12, osxsave = 1u << 27, f16c = 1u << 29, needed = fma | osxsave | f16c;
  if ((ecx & needed) != needed) return found;
  unsigned saved, high;  // registers that the system keeps on a task switch
  asm volatile("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return found;
  const unsigned avx512 = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31, vnni = 1u << 11;  // F, DQ, BW, VL
  found.avx2 = (saved & 0x06) == 0x06 && (ebx & 1u << 5);
  found.avx512 = found.avx2 && (saved & 0xe6) == 0xe6 && (ebx & avx512) == avx512 && (ecx & vnni);
  return found;
}

}  // namespace

extern "C" int32_t bl_isa_runs(const char* isa) {
  static const Features features = detect();
  if (!strcmp(isa, "avx512")) return features.avx512 && busload::avx512_kernels();
  if (!strcmp(isa, "avx2")) return features.avx2 && busload::avx2_kernels();
  return !strcmp(isa, "portable");
}

#else

extern "C" int32_t bl_isa_runs(const char* isa) { return !strcmp(isa, "portable"); }

#endif
