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

void Event::wait_beyond(uint32_t seen) {
  const auto end = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < 16; i++) {
      if (beyond(seen)) return;
      relax();
    }
  } while (std::chrono::steady_clock::now() < end);
  sleepers_.fetch_add(1);
  for (uint32_t word; (int32_t)((word = now()) - seen) <= 0;) futex(word_, FUTEX_WAIT, word);
  sleepers_.fetch_sub(1);
}

void Event::advance() {
  word_.fetch_add(1);  // sequentially consistent, as is sleepers_: a sleeper is seen, or sees the new word
  if (sleepers_.load()) futex(word_, FUTEX_WAKE, INT32_MAX);
}

Team::Team(int threads) : size_(threads), member_(new Member[threads]) {
  try {
    for (int id = 1; id < threads; id++) threads_.emplace_back([this, id] { work(id); });
  } catch (...) {  // no more threads to be had: end those that have begun
    stop();
    throw;
  }
}

Team::~Team() { stop(); }

void Team::stop() {
  stop_ = true;
  started_.advance();
  for (std::thread& thread : threads_) thread.join();
}

void Team::work(int id) {
  for (uint32_t seen = 0;; seen++) {
    started_.wait_beyond(seen);
    if (stop_) return;
    task_(argument_, id);
    finish(id);
  }
}

void Team::start() {
  // Nobody works now. Fresh tags: one that was not needed for 32768 phases would read as one of the future.
  for (int id = 0; id < size_; id++) member_[id].range.store((uint64_t)(uint16_t)(member_[0].phase - 1) << 48);
  started_.advance();
}

// All threads leave a task together: the next one may begin to change what the last thread still looks at.
void Team::finish(int id) {
  const uint32_t seen = finished_.now();
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
    arrived_.store(0, std::memory_order_relaxed);
    finished_.advance();
  } else if (id == 0) {
    finished_.wait_beyond(seen);
  }
}

void Team::complete(uint32_t phase, int done, int count) {
  if (done && done_.fetch_add(done, std::memory_order_acq_rel) + done == count) {
    done_.store(0, std::memory_order_relaxed);
    passed_.advance();
  } else {
    passed_.wait_beyond(phase);
  }
}

// An index from one thread's range, or -1. The range's tag tells whether its owner has come to this phase; if not, its
// range is known all the same. Tags wrap; a task has some hundreds of phases.
int Team::take(int owner, uint32_t phase, int count, bool front) {
  std::atomic<uint64_t>& range = member_[owner].range;
  const uint16_t tag = (uint16_t)phase;
  uint64_t old = range.load(std::memory_order_relaxed);
  for (;;) {
    uint64_t begin = old >> 24 & 0xffffff, end = old & 0xffffff;
    const int16_t ahead = (int16_t)((uint16_t)(old >> 48) - tag);
    if (ahead > 0) return -1;  // this phase is over, the next has begun
    if (ahead < 0) {
      begin = (int64_t)count * owner / size_;
      end = (int64_t)count * (owner + 1) / size_;
    }
    if (begin >= end) return -1;
    const int index = (int)(front ? begin++ : --end);
    if (range.compare_exchange_weak(old, (uint64_t)tag << 48 | begin << 24 | end, std::memory_order_relaxed)) return index;
  }
}

}  // namespace busload
