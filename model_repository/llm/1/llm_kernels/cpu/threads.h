// Threads that wait between steps, and where they meet within one. It does not know what they compute.
#pragma once

#include <sched.h>

#include <atomic>
#include <functional>
#include <thread>
#include <vector>

#include "simd.h"

namespace tokenstream {

struct Range {
  int begin, end;
};

inline Range share(int count, int part, int parts) {
  return {static_cast<int>(static_cast<long>(count) * part / parts),
          static_cast<int>(static_cast<long>(count) * (part + 1) / parts)};
}

// Wait until `done`: some microseconds awake, for stages are short; then letting others run, for the cores are shared
// and the thread waited for may be on this one; then asleep, until `word` changes from `old`.
template <class Done>
void wait_for(std::atomic<int>& word, int old, int yields, Done done) {
  constexpr int spins = 50;
  for (int i = 0; i < spins + yields; ++i) {
    if (done()) return;
    if (i < spins)
#if defined(__x86_64__)
      __builtin_ia32_pause();
#else
      std::this_thread::yield();
#endif
    else
      sched_yield();
  }
  while (!done()) word.wait(old, std::memory_order_acquire);
}

class Barrier {
 public:
  void wait(int threads) {
    const int phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads) {
      arrived_.store(0, std::memory_order_relaxed);
      phase_.fetch_add(1, std::memory_order_release);  // wraps around, after a day
      phase_.notify_all();
      return;
    }
    wait_for(phase_, phase, 1000, [&] { return phase_.load(std::memory_order_acquire) != phase; });
  }

 private:
  alignas(kCacheLine) std::atomic<int> arrived_{0};
  alignas(kCacheLine) std::atomic<int> phase_{0};
};

// `threads` threads, the caller of `run` among them.
class Pool {
 public:
  explicit Pool(int threads) : count_(threads) {
    for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { work(i); });
  }
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;
  ~Pool() {
    job_ = nullptr;
    call();
    for (auto& worker : workers_) worker.join();
  }

  int count() const { return count_; }

  // job(thread) on every thread; returns when all have returned.
  void run(const std::function<void(int)>& job) {
    job_ = &job;
    left_.store(count_ - 1, std::memory_order_relaxed);
    call();
    job(0);
    for (int seen = left_.load(std::memory_order_acquire); seen; seen = left_.load(std::memory_order_acquire))
      wait_for(left_, seen, 1000, [&] { return left_.load(std::memory_order_acquire) != seen; });
  }

 private:
  void call() {
    calls_.fetch_add(1, std::memory_order_release);
    calls_.notify_all();
  }

  void work(int thread) {
    for (int calls = 0;;) {
      wait_for(calls_, calls, 1000, [&] { return calls_.load(std::memory_order_acquire) != calls; });
      calls = calls_.load(std::memory_order_relaxed);  // before `left_` falls: the next call may follow at once
      if (!job_) return;
      (*job_)(thread);
      left_.fetch_sub(1, std::memory_order_release);
      left_.notify_all();
    }
  }

  const int count_;
  const std::function<void(int)>* job_ = nullptr;
  alignas(kCacheLine) std::atomic<int> calls_{0};
  alignas(kCacheLine) std::atomic<int> left_{0};
  std::vector<std::thread> workers_;
};

// What of `count` items each thread takes: its own share from front to back, so that it streams, and then from the
// others', for a thread may have to wait for its core.
class Shares {
 public:
  explicit Shares(int threads) : taken_(threads) {}

  // The next item for `thread`, or -1.
  int take(int thread, int count) {
    const int threads = static_cast<int>(taken_.size());
    for (int i = 0; i < threads; ++i) {
      const int owner = (thread + i) % threads;
      const Range own = share(count, owner, threads);
      std::atomic<int>& taken = taken_[owner].count;
      if (taken.load(std::memory_order_relaxed) >= own.end - own.begin) continue;
      const int item = taken.fetch_add(1, std::memory_order_relaxed);
      if (item < own.end - own.begin) return own.begin + item;
    }
    return -1;
  }
  void restart() {
    for (auto& t : taken_) t.count.store(0, std::memory_order_relaxed);
  }

 private:
  struct alignas(kCacheLine) Taken {
    std::atomic<int> count{0};
  };
  std::vector<Taken> taken_;
};

}  // namespace tokenstream
