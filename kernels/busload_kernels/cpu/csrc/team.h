// A small thread team: the caller is thread 0, the others sleep until `run`. Waiting spins for some microseconds, which
// is what the next phase usually takes, then sleeps in the kernel: a busy neighbour or a quota costs time, not a collapse.
#pragma once
#include <stdint.h>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

namespace busload {

// A counter that threads wait on to change.
class Event {
 public:
  uint32_t now() const { return word_.load(std::memory_order_acquire); }
  void wait(uint32_t seen);
  void advance();

 private:
  alignas(64) std::atomic<uint32_t> word_{0};
  std::atomic<int> sleepers_{0};
};

class Team {
 public:
  explicit Team(int threads);
  ~Team();
  Team(const Team&) = delete;
  int size() const { return size_; }

  // task(id) on every thread; returns when all are done.
  template <class Task>
  void run(Task& task) {
    task_ = [](void* t, int id) { (*(Task*)t)(id); };
    argument_ = &task;
    if (size_ > 1) start_.advance();
    task(0);
    barrier();
  }

  // To be called by all threads of a running task: none goes on before all have come.
  void barrier();

  // To be called by all threads: f(index) once for every index below `count`, then a barrier. Each thread begins with
  // a range of its own, in order (so it streams through its part of a matrix), and then takes from the ends of others.
  template <class F>
  void share(int id, int count, F f) {
    if (size_ == 1) {
      for (int i = 0; i < count; i++) f(i);
      return;
    }
    const uint32_t tag = ++member_[id].tag & 0xffff;
    for (int index; (index = take(id, tag, count, true)) >= 0;) f(index);
    for (int other = 1; other < size_; other++)
      for (int index; (index = take((id + other) % size_, tag, count, false)) >= 0;) f(index);
    barrier();
  }

 private:
  struct alignas(64) Member {
    std::atomic<uint64_t> range{0};  // 16 bits tag, 24 bits begin, 24 bits end
    uint32_t tag = 0;
  };
  int take(int owner, uint32_t tag, int count, bool front);
  void work(int id);

  const int size_;
  std::unique_ptr<Member[]> member_;
  std::vector<std::thread> threads_;
  Event start_, passed_;
  alignas(64) std::atomic<int> arrived_{0};
  void (*task_)(void*, int) = nullptr;
  void* argument_ = nullptr;
  bool stop_ = false;
};

}  // namespace busload
