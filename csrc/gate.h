// Waiting for a number that another thread, or another process, changes.
#pragma once

#include <sched.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstddef>
#include <cstdint>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#else
#include <condition_variable>
#include <mutex>
#endif
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace octavo {

constexpr size_t kLine = 64;  // bytes of a cache line
// How long a thread spins before the core is offered to others, and before it sleeps.
constexpr int64_t kSpinNs = 30'000;
constexpr int64_t kSleepNs = 2'000'000;
// The latter where there are more threads than cores: the thread that is waited for may need this one.
constexpr int64_t kCrowdedSleepNs = 50'000;

inline int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

enum class Reach {
  kProcess,  // threads of one process
  kMachine,  // processes that map the same memory: only on Linux
};

// A number, and a way to wait for its change. Zeroed memory is a gate with the value 0.
template <Reach reach>
class alignas(kLine) Gate {
 public:
  uint32_t value() const { return value_.load(std::memory_order_acquire); }

  // Add to the value, and return what it was; threads that see the new one see all earlier writes.
  uint32_t add(uint32_t amount) {
    const uint32_t before = value_.fetch_add(amount, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) wake();
    return before;
  }
  // Set bits of the value.
  void set(uint32_t bits) {
    value_.fetch_or(bits, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) wake();
  }

  // Until the value is not `seen`; returns it.
  uint32_t wait(uint32_t seen, int64_t sleep_after_ns) {
    constexpr int kLooks = 64;
    uint32_t now;
    for (int i = 0; i < kLooks; i++) {  // the usual case, without a look at the clock
      if ((now = value()) != seen) return now;
      relax();
    }
    const int64_t begin = now_ns();
    for (;;) {
      for (int i = 0; i < kLooks; i++) {
        if ((now = value()) != seen) return now;
        relax();
      }
      const int64_t waited = now_ns() - begin;
      if (waited >= sleep_after_ns) return sleep(seen);
      if (waited >= kSpinNs) sched_yield();
    }
  }

 private:
  // A sleeper counts itself in before its last look at the value, and the count is read after the
  // value has changed; so one of the two notices the other.
#if defined(__linux__)
  uint32_t sleep(uint32_t seen) {
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    uint32_t now;
    while ((now = value()) == seen) {
      syscall(SYS_futex, &value_, FUTEX_WAIT | kFlag, seen, nullptr, nullptr, 0);
    }
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
    return now;
  }
  void wake() { syscall(SYS_futex, &value_, FUTEX_WAKE | kFlag, INT_MAX, nullptr, nullptr, 0); }

  static constexpr int kFlag = reach == Reach::kProcess ? FUTEX_PRIVATE_FLAG : 0;
#else
  uint32_t sleep(uint32_t seen) {
    std::unique_lock<std::mutex> lock(mutex_);
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    changed_.wait(lock, [&] { return value_.load(std::memory_order_seq_cst) != seen; });
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
    return value();
  }
  void wake() {
    { std::lock_guard<std::mutex> lock(mutex_); }
    changed_.notify_all();
  }
  std::mutex mutex_;
  std::condition_variable changed_;
#endif

  std::atomic<uint32_t> value_{0};
  std::atomic<uint32_t> sleepers_{0};
};

}  // namespace octavo
