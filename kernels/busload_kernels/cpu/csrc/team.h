// A small thread team: the caller is thread 0, the others sleep until `run`. A task is the same sequence of shared phases
// on every thread. A phase ends when its items are done, not when all threads have come: a thread that lost its core holds
// up the one item it was at, no more, and skips what was done without it. Waiting spins for some microseconds, which is
// what the rest of a phase usually takes, then sleeps in the kernel. So a busy neighbour or a quota costs time, not a
// collapse.
#pragma once
#include <stdint.h>

#include <atomic>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "profile.h"

namespace busload {

// A counter that threads wait on to change.
class Event {
 public:
  explicit Event(uint32_t first = 0) : word_(first) {}
  uint32_t now() const { return word_.load(std::memory_order_acquire); }
  bool beyond(uint32_t seen) const { return (int32_t)(now() - seen) > 0; }
  void wait_beyond(uint32_t seen);
  void advance();

 private:
  alignas(64) std::atomic<uint32_t> word_;
  std::atomic<int> sleepers_{0};
};

class Team {
 public:
  explicit Team(int threads);  // throws std::system_error when a thread cannot start
  ~Team();
  Team(const Team&) = delete;
  int size() const { return size_; }
  // CPU time this thread spent at ends of phases since it was last asked; 0 without BL_PROFILE.
  int64_t spun(int id) { return std::exchange(member_[id].spun, 0); }

  // task(id) on every thread; returns when all are done.
  template <class Task>
  void run(Task& task) {
    task_ = [](void* t, int id) { (*(Task*)t)(id); };
    argument_ = &task;
    if (size_ > 1) start();
    task(0);
    if (size_ > 1) finish(0);
  }

  // To be called by all threads of a running task with the same count: f(index) once for every index below it. On
  // return all of them are done, by whomever. Each thread begins with a range of its own, in order (so it streams
  // through its part of a matrix), and then takes from the ends of others. What a thread prepares for f must depend
  // only on what this phase reads: if it comes too late, it prepares from newer data and f is not called.
  template <class F>
  void share(int id, int count, F f) {
    if (size_ == 1) {
      for (int i = 0; i < count; i++) f(i);
      return;
    }
    if (count == 0) return;
    const uint32_t phase = member_[id].phase++;
    if (passed_.beyond(phase)) return;
    int done = 0;
    for (int index; (index = take(id, phase, count, true)) >= 0; done++) f(index);
    for (int other = 1; other < size_; other++)
      for (int index; (index = take((id + other) % size_, phase, count, false)) >= 0; done++) f(index);
    const int64_t begin = cpu_clock();
    complete(phase, done, count);
    member_[id].spun += cpu_clock() - begin;
  }

 private:
  struct alignas(64) Member {
    std::atomic<uint64_t> range{0};  // 16 bits of the phase, 24 bits begin, 24 bits end
    uint32_t phase = 1;
    int64_t spun = 0;
  };
  int take(int owner, uint32_t phase, int count, bool front);
  void complete(uint32_t phase, int done, int count);
  void start();
  void stop();
  void finish(int id);
  void work(int id);

  const int size_;
  std::unique_ptr<Member[]> member_;
  std::vector<std::thread> threads_;
  Event started_, passed_{1}, finished_;  // passed_: the first phase whose items are not all done
  alignas(64) std::atomic<int> done_{0}, arrived_{0};
  void (*task_)(void*, int) = nullptr;
  void* argument_ = nullptr;
  bool stop_ = false;
};

}  // namespace busload
