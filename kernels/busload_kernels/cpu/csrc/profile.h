// Where the time of a step goes, by thread and phase. Compiled in by BUSLOAD_CPU_PROFILE=1 (build.py), else nothing: asking
// for a thread's CPU time is a system call, and a step has a thousand occasions. CPU time tells what the work costs even
// while others use the machine.
#pragma once
#include <stdint.h>
#include <time.h>

#include <vector>

namespace busload {

enum Phase { kEmbed, kNorm, kQkv, kRotate, kAttend, kOutput, kGateUp, kDown, kHead, kSample, kPhases };
constexpr const char* kPhaseNames[kPhases] = {"embed",  "norm",    "qkv",  "rotate", "attend",
                                              "output", "gate_up", "down", "head",   "sample"};

#ifdef BL_PROFILE

inline int64_t nanoseconds(clockid_t clock) {
  timespec t;
  clock_gettime(clock, &t);
  return t.tv_sec * 1000000000ll + t.tv_nsec;
}
inline int64_t cpu_clock() { return nanoseconds(CLOCK_THREAD_CPUTIME_ID); }

class Profile {
 public:
  static constexpr bool kOn = true;
  explicit Profile(int threads) : threads_(threads) {}
  void begin(int id) { threads_[id].cpu = cpu_clock(), threads_[id].wall = nanoseconds(CLOCK_MONOTONIC); }
  // What passed since the last `begin` or `end` was this phase, but for the CPU time `spun` in waiting.
  void end(int id, Phase phase, int64_t spun) {
    Thread& thread = threads_[id];
    const int64_t cpu = cpu_clock(), wall = nanoseconds(CLOCK_MONOTONIC), busy = cpu - thread.cpu - spun;
    thread.busy[phase] += busy;
    thread.idle[phase] += wall - thread.wall - busy;
    thread.cpu = cpu, thread.wall = wall;
  }
  // [threads][phases][2] since the last call: seconds of work; seconds in which the thread waited or had no core.
  void take(double* seconds) {
    for (Thread& thread : threads_) {
      for (int phase = 0; phase < kPhases; phase++) {
        *seconds++ = (double)thread.busy[phase] * 1e-9;
        *seconds++ = (double)thread.idle[phase] * 1e-9;
      }
      thread = {};
    }
  }

 private:
  struct alignas(64) Thread {
    int64_t cpu = 0, wall = 0, busy[kPhases] = {}, idle[kPhases] = {};
  };
  std::vector<Thread> threads_;
};

#else

inline int64_t cpu_clock() { return 0; }

class Profile {
 public:
  static constexpr bool kOn = false;
  explicit Profile(int) {}
  void begin(int) {}
  void end(int, Phase, int64_t) {}
  void take(double*) {}
};

#endif

}  // namespace busload
