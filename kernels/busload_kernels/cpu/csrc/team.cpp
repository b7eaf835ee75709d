#include "team.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>

namespace busload {
namespace {

constexpr auto kSpin = std::chrono::microseconds(40);

void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

long futex(std::atomic<uint32_t>& word, int operation, uint32_t value) {
  static_assert(sizeof word == 4);
  return syscall(SYS_futex, &word, operation | FUTEX_PRIVATE_FLAG, value, nullptr, nullptr, 0);
}

}  // namespace

void Event::wait(uint32_t seen) {
  const auto end = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 16; i++) {
      if (now() != seen) return;
      relax();
    }
  } while (std::chrono::steady_clock::now() < end);
  sleepers_.fetch_add(1);
  while (now() == seen) futex(word_, FUTEX_WAIT, seen);
  sleepers_.fetch_sub(1);
}

void Event::advance() {
  word_.fetch_add(1);  // sequentially consistent, as is sleepers_: a sleeper is seen, or sees the new word
  if (sleepers_.load()) futex(word_, FUTEX_WAKE, INT32_MAX);
}

Team::Team(int threads) : size_(threads), member_(new Member[threads]) {
  for (int id = 1; id < threads; id++) threads_.emplace_back([this, id] { work(id); });
}

Team::~Team() {
  stop_ = true;
  start_.advance();
  for (std::thread& thread : threads_) thread.join();
}

void Team::work(int id) {
  for (uint32_t seen = 0;; seen++) {
    start_.wait(seen);
    if (stop_) return;
    task_(argument_, id);
    barrier();
  }
}

void Team::barrier() {
  if (size_ == 1) return;
  const uint32_t seen = passed_.now();
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
    arrived_.store(0, std::memory_order_relaxed);
    passed_.advance();
  } else {
    passed_.wait(seen);
  }
}

int Team::take(int owner, uint32_t tag, int count, bool front) {
  std::atomic<uint64_t>& range = member_[owner].range;
  uint64_t old = range.load(std::memory_order_relaxed);
  for (;;) {
    uint64_t begin = old >> 24 & 0xffffff, end = old & 0xffffff;
    if (old >> 48 != tag) {  // the owner has not come yet: its range is known all the same
      begin = (int64_t)count * owner / size_;
      end = (int64_t)count * (owner + 1) / size_;
    }
    if (begin >= end) return -1;
    const int index = front ? begin++ : --end;
    if (range.compare_exchange_weak(old, (uint64_t)tag << 48 | begin << 24 | end, std::memory_order_relaxed)) return index;
  }
}

}  // namespace busload
