// Memory maps and the measure of what the machine moves.
#include <string.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>

#include "abi.h"
#include "team.h"

extern "C" void* bl_map(int64_t bytes) {
  // Aligned by mapping more and giving the ends back: huge pages need it.
  constexpr int64_t huge = 2 << 20;
  const int64_t size = (bytes + 4095) / 4096 * 4096;
  char* raw = (char*)mmap(nullptr, size + huge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) return nullptr;
  char* aligned = (char*)(((uintptr_t)raw + huge - 1) / huge * huge);
  if (aligned != raw) munmap(raw, aligned - raw);
  if (raw + huge != aligned) munmap(aligned + size, raw + huge - aligned);
  madvise(aligned, size, MADV_HUGEPAGE);
  return aligned;
}

extern "C" void bl_unmap(void* address, int64_t bytes) {
  if (address) munmap(address, (bytes + 4095) / 4096 * 4096);
}

namespace {

uint64_t read_all(const uint8_t* p, int64_t bytes) {
  uint64_t sums[8] = {};
  for (int64_t i = 0; i + 64 <= bytes; i += 64) {
    __builtin_prefetch(p + i + 8192);
    uint64_t words[8];
    memcpy(words, p + i, 64);
    for (int j = 0; j < 8; j++) sums[j] += words[j];
  }
  uint64_t total = 0;
  for (uint64_t sum : sums) total += sum;
  return total;
}

}  // namespace

extern "C" double bl_bandwidth(uint8_t* buffer, int64_t bytes, int32_t threads, double seconds, int32_t copy) try {
  using Clock = std::chrono::steady_clock;
  busload::Team team(threads);
  const int64_t part = bytes / threads / 128 * 128;
  std::atomic<uint64_t> sink{0};
  double best = 0;
  const auto begin = Clock::now();
  do {
    auto task = [&](int id) {
      uint8_t* mine = buffer + id * part;
      if (copy)
        memcpy(mine, mine + part / 2, part / 2);
      else
        sink += read_all(mine, part);
    };
    const auto start = Clock::now();
    team.run(task);
    best = std::max(best, (double)part * threads / std::chrono::duration<double>(Clock::now() - start).count());
  } while (std::chrono::duration<double>(Clock::now() - begin).count() < seconds);
  return best;
} catch (const std::exception&) {
  return 0;
}
