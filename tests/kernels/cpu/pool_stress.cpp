// Uses csrc/pool.h as kernels do, hard, and checks what it promises: test_pool.py compiles this with
// the pool, and runs it as it is and under the thread sanitizer.
//
//   pool_stress THREADS ROUNDS      exits with 0, or says which promise was broken
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "octavo.h"
#include "pool.h"
#include "stress_check.h"

using namespace octavo;

namespace {

// What was written before a barrier is seen after it, by all.
void barriers(Pool* pool, int rounds) {
  std::vector<int> written(64 * oct_pool_size(pool));
  const int32_t code = run(pool, [&](const Worker& w) {
    for (int round = 1; round <= rounds; round++) {
      written[64 * w.rank] = round;
      CHECK(w.barrier());
      for (int other = 0; other < w.size; other++) CHECK(written[64 * other] == round);
      CHECK(w.barrier());
    }
  });
  CHECK(code == OCT_OK);
}

// Each ticket goes to one worker, and they begin at 0 after each barrier and in each call.
void tickets(Pool* pool, int rounds) {
  constexpr int kPieces = 37;
  std::vector<int> owner(kPieces);
  for (int call = 0; call < 3; call++) {
    run(pool, [&](const Worker& w) {
      for (int round = 0; round < rounds; round++) {
        for (int piece; (piece = w.ticket()) < kPieces;) {
          CHECK(owner[piece] == 0);
          owner[piece] = w.rank + 1;
        }
        CHECK(w.barrier());
        if (w.rank == 0) {
          for (int& o : owner) {
            CHECK(o != 0);
            o = 0;
          }
        }
        CHECK(w.barrier());
      }
      w.ticket();  // left over: the next call begins at 0 all the same
    });
  }
}

// All get the same memory, also when it grows, and what they had before stays readable.
void memory(Pool* pool, int rounds) {
  std::vector<void*> got(oct_pool_size(pool));
  for (int call = 0; call < 3; call++) {
    run(pool, [&](const Worker& w) {
      const char* before = nullptr;
      size_t size_before = 0;
      for (int round = 1; round <= rounds; round++) {
        const size_t bytes = static_cast<size_t>(1000) * round * (call + 1);
        char* mine = static_cast<char*>(w.scratch(round % 8, bytes));
        CHECK(reinterpret_cast<uintptr_t>(mine) % 64 == 0);
        std::memset(mine, w.rank, bytes);
        char* ours = static_cast<char*>(w.shared(1, bytes));
        CHECK(reinterpret_cast<uintptr_t>(ours) % 64 == 0);
        got[w.rank] = ours;
        for (size_t i = 0; i < size_before; i += 512) CHECK(before[i] >= 0);  // the slow reader
        CHECK(w.barrier());
        CHECK(got[(w.rank + 1) % w.size] == ours);
        for (size_t i = w.rank; i < bytes; i += w.size) ours[i] = static_cast<char>(round % 100);
        CHECK(w.barrier());
        for (size_t i = 0; i < bytes; i += 97) CHECK(ours[i] == round % 100);
        CHECK(mine[bytes - 1] == w.rank);
        before = ours;
        size_before = bytes;
      }
    });
  }
}

// An abort ends the call that runs, for all workers at the same barrier, and no other.
void aborts(Pool* pool, int rounds) {
  for (int i = 0; i < rounds; i++) {
    oct_abort(pool);  // nothing runs
    int calls = 0;
    const int32_t quiet = run(pool, [&](const Worker& w) {
      CHECK(w.barrier());
      if (w.rank == 0) calls++;
    });
    CHECK(quiet == OCT_OK && calls == 1);

    std::atomic<bool> running{false};
    std::thread other([&] {
      while (!running) std::this_thread::yield();
      oct_abort(pool);
    });
    std::vector<int> left(oct_pool_size(pool));
    const int32_t code = run(pool, [&](const Worker& w) {
      for (int round = 0;; round++) {
        if (!w.barrier()) {
          left[w.rank] = round;
          return;
        }
        running = true;
      }
    });
    other.join();
    CHECK(code == OCT_ERR_ABORTED);
    for (int round : left) CHECK(round == left[0]);
  }
}

// A worker that gets no memory ends the call, wherever the others are, and no other call.
void lack(Pool* pool, int rounds) {
  constexpr size_t kMoreThanThereIs = size_t{1} << 60;
  const int size = oct_pool_size(pool);
  for (int i = 0; i < rounds; i++) {
    const int unlucky = i % size, when = i / size % 4;
    std::atomic<int> ended{0};
    const int32_t code = run(pool, [&](const Worker& w) {
      for (int round = 0; round < 3; round++) {
        if (w.rank == unlucky && round == when) {
          i % 2 ? w.scratch(3, kMoreThanThereIs) : w.shared(3, kMoreThanThereIs);
          CHECK(!"it got what there is not");
        }
        if (!w.barrier()) {
          CHECK(round == when && !w.barrier());  // as it may be asked again on the way out
          return;
        }
      }
      if (w.rank == unlucky) w.scratch(3, kMoreThanThereIs);  // after the last barrier
      ended++;
    });
    CHECK(code == OCT_ERR_MEMORY);
    CHECK(std::strstr(oct_last_error(), "no memory for 1") != nullptr);
    CHECK(ended == (when == 3 ? size - 1 : 0));
    const int32_t next = run(pool, [&](const Worker& w) {
      std::memset(w.scratch(3, 5000), w.rank, 5000);
      std::memset(static_cast<char*>(w.shared(3, 5000)) + w.rank, 0, 1);
      CHECK(w.barrier());
    });
    CHECK(next == OCT_OK);
  }
}

// Callers wait for each other; two pools do not.
void callers(Pool* pool, int rounds) {
  Pool* second = oct_pool_new(2, 10);
  CHECK(second != nullptr);
  std::atomic<int> inside{0};
  int calls = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < 3; i++) {
    threads.emplace_back([&] {
      for (int round = 0; round < rounds; round++) {
        run(pool, [&](const Worker& w) {
          if (w.rank == 0) {
            CHECK(inside.fetch_add(1) == 0);
            calls++;
          }
          w.barrier();
          if (w.rank == 0) inside.fetch_sub(1);
        });
      }
    });
  }
  for (int round = 0; round < rounds; round++) {
    CHECK(run(second, [&](const Worker& w) { CHECK(w.barrier()); }) == OCT_OK);
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(calls == 3 * rounds);
  oct_pool_free(second);
}

// Threads that sleep are woken.
void sleepers(Pool* pool) {
  for (int i = 0; i < 5; i++) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    const int32_t code = run(pool, [&](const Worker& w) {
      // One comes so late that the others sleep at the barrier.
      if (w.rank == w.size - 1) std::this_thread::sleep_for(std::chrono::milliseconds(6));
      CHECK(w.barrier());
    });
    CHECK(code == OCT_OK);
  }
}

// The caller's way to round is its own, and kept.
void floats(Pool* pool) {
#if defined(__x86_64__)
  const unsigned before = _mm_getcsr();
  _mm_setcsr(before | 0x8040);  // denormals are zero
  run(pool, [&](const Worker&) {
    volatile float tiny = 1e-40f;
    CHECK(tiny * 0.5f > 0);
  });
  CHECK((_mm_getcsr() & 0x8040) == 0x8040);
  _mm_setcsr(before);
#else
  (void)pool;
#endif
}

// A child has threads of its own, and does not disturb the parent's.
void forks(Pool* pool) {
  for (int i = 0; i < 3; i++) {
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
      barriers(pool, 10);
      memory(pool, 3);
      oct_pool_free(pool);
      std::_Exit(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    barriers(pool, 10);
  }
}

}  // namespace

int main(int, char** arguments) {
  const int rounds = std::atoi(arguments[2]);
  Pool* pool = oct_pool_new(std::atoi(arguments[1]), 20);
  CHECK(pool != nullptr);
  barriers(pool, rounds);
  tickets(pool, rounds / 10);
  memory(pool, 20);
  aborts(pool, 20);
  lack(pool, 48);
  callers(pool, rounds / 10);
  sleepers(pool);
  floats(pool);
#if !defined(__SANITIZE_THREAD__)  // which cannot follow a fork that starts threads
  forks(pool);
#endif
  oct_pool_free(pool);
}
