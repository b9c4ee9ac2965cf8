// The thread pool behind pool.h and octavo.h.
//
// Workers meet at gates. A gate is a number that only grows, and a way to wait for its growth:
//
//     caller     begin.open()   work ... | meet | work ... | meet | work | meet   wait until done
//     workers    wait for begin work ... | meet | work ... | meet | work | meet   done.open()
//
// At a meeting (a barrier) each worker counts itself in; the last one decides whether the call goes
// on, resets the tickets, and opens the gate. All others find it open some 50 ns later: they spin.
// A thread that has spun for long yields its core to other threads, and in the end sleeps.
//
// A worker that gets no memory has to leave its task in the middle, while others wait for it
// at a barrier. It goes to the next meeting, reports there that the call has failed, and all
// return. The meeting at the end guarantees that there is always a next one.
//
// Where the ranks of a group compute a call together, some meetings span the group, and the one at the
// end of the call always does: the last worker of each rank meets those of the others (group.h)
// before it opens the gate.
#include "pool.h"

#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include "gate.h"
#include "group.h"
#include "octavo.h"

namespace octavo {
namespace {

constexpr int kMaxThreads = 256;
constexpr int kScratchSlots = 8;
constexpr int kSharedSlots = 5;

// Kernels count on the default rounding and on denormals, whatever the calling thread is set to
// (torch.set_flush_denormal changes it for one thread): results would depend on the thread.
class DefaultFloats {
 public:
#if defined(__x86_64__)
  DefaultFloats() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~DefaultFloats() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  DefaultFloats() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(uint64_t{0}));
  }
  ~DefaultFloats() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }

 private:
  uint64_t saved_;
#else
  DefaultFloats() {}
#endif
};

struct NoMemory {
  size_t bytes;
};

void* allocate(size_t bytes) {
  void* memory = nullptr;
  if (posix_memalign(&memory, kLine, bytes) != 0) throw NoMemory{bytes};
  return memory;
}

// The new size of a buffer: somewhat more than requested, so that it does not grow at every step.
size_t grown(size_t bytes) { return (bytes + bytes / 4 + 4095) / 4096 * 4096; }

struct Scratch {
  void* memory = nullptr;
  size_t capacity = 0;
};

struct Shared {
  std::atomic<void*> memory{nullptr};
  std::atomic<size_t> capacity{0};  // written last
};

struct alignas(kLine) Slots {
  Scratch of[kScratchSlots];
};

// Counts forks, so that a child notices that the threads of its pools stayed with the parent.
std::atomic<uint64_t> num_forks{0};
// Held while threads are created, and over a fork: so no fork happens in between.
std::mutex making;

void watch_forks() {
  static std::once_flag once;
  std::call_once(once, [] {
    pthread_atfork([] { making.lock(); }, [] { making.unlock(); },
                   [] {
                     num_forks.fetch_add(1, std::memory_order_relaxed);
                     making.unlock();
                   });
  });
}

// The threads of a pool and all that they share. A forked child leaves its copy of it alone, as
// anything in it may have been in use by threads that it does not have, and makes a new one.
struct Team {
  Team(Pool* owner, int num_workers, int64_t spin)
      : pool(owner), size(num_workers), spin_ns(spin), born(num_forks.load()),
        scratch(new Slots[num_workers]) {}
  ~Team();

  bool start();  // false, with an error set, if threads cannot be created
  void work(int rank);
  void perform(int rank);
  bool meet(bool spans_group);
  int32_t decide(bool spans_group);
  int32_t run(Task what, void* with, Group* among);

  Pool* const pool;
  const int size;
  const int64_t spin_ns;
  const uint64_t born;

  Gate<Reach::kProcess> begin;  // of a call, or of the end of the threads
  Gate<Reach::kProcess> done;   // by each worker but the caller, once a call
  Gate<Reach::kProcess> phase;  // by the last worker at each barrier
  alignas(kLine) std::atomic<int> arrived{0};
  alignas(kLine) std::atomic<int> tickets{0};
  alignas(kLine) std::atomic<uint64_t> call{0};   // odd while one runs
  std::atomic<uint64_t> aborted{0};               // the number of the call that shall stop
  std::atomic<int32_t> outcome{OCT_OK};           // what the last worker at a barrier decided
  std::atomic<size_t> lacking{0};                 // bytes that a worker of this call did not get
  bool quit = false;
  Task task = nullptr;
  void* context = nullptr;
  Group* group = nullptr;  // of the call, or NULL

  std::mutex one_call;
  std::vector<std::thread> threads;
  std::unique_ptr<Slots[]> scratch;
  Shared shared[kSharedSlots];
  std::mutex growing;
  std::vector<void*> outgrown;  // shared memory to be freed when the call is over
};

bool Team::start() {
  // Signals are for the threads of the program; a thread inherits the mask of its maker.
  sigset_t all, before;
  sigfillset(&all);
  // Signals that the thread's own instructions cause go to no other thread; blocked, they would end the
  // process without a call of any handler.
  for (int own : {SIGBUS, SIGSEGV, SIGFPE, SIGILL}) sigdelset(&all, own);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  bool started = true;
  try {
    threads.reserve(size - 1);
    for (int rank = 1; rank < size; rank++) threads.emplace_back([this, rank] { work(rank); });
  } catch (const std::exception& error) {
    fail(OCT_ERR_MEMORY, "cannot start thread %d of %d: %s", static_cast<int>(threads.size()) + 2,
         size, error.what());
    started = false;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return started;
}

Team::~Team() {
  quit = true;
  begin.add(1);
  for (std::thread& thread : threads) thread.join();
  for (int rank = 0; rank < size; rank++) {
    for (Scratch& slot : scratch[rank].of) std::free(slot.memory);
  }
  for (Shared& slot : shared) std::free(slot.memory.load());
}

void Team::work(int rank) {
  char name[16];
  std::snprintf(name, sizeof name, "octavo-%d", rank);
#if defined(__linux__)
  pthread_setname_np(pthread_self(), name);
#elif defined(__APPLE__)
  pthread_setname_np(name);
#endif
  const DefaultFloats floats;
  for (uint32_t calls = 0;; calls++) {
    begin.wait(calls, spin_ns);
    if (quit) return;
    perform(rank);
    done.add(1);
  }
}

// The work of one worker in a call, up to the meeting at its end.
void Team::perform(int rank) {
  try {
    task(Worker{rank, size, pool}, context);
  } catch (const NoMemory& missing) {
    lacking.store(missing.bytes, std::memory_order_relaxed);
  } catch (const std::bad_alloc&) {
    lacking.store(1, std::memory_order_relaxed);
  }
  meet(true);
}

// Meetings do not overlap: no worker counts itself in for the next before it has left this one, so
// `outcome` stays as it was decided until all have read it.
bool Team::meet(bool spans_group) {
  // Over: all know, and a worker that got no memory has left. A task may ask again on its way out.
  if (outcome.load(std::memory_order_relaxed) != OCT_OK) return false;
  const uint32_t now = phase.value();
  if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 < size) {
    phase.wait(now, group && is_crowded(group) ? kCrowdedSleepNs : kSleepNs);
  } else {
    arrived.store(0, std::memory_order_relaxed);
    tickets.store(0, std::memory_order_relaxed);
    // Written only if it changes: all others have its cache line, and look at it next.
    if (const int32_t code = decide(spans_group)) outcome.store(code, std::memory_order_relaxed);
    phase.add(1);
  }
  return outcome.load(std::memory_order_relaxed) == OCT_OK;
}

// Whether the call goes on. The ranks of a group have to agree on that, as each would wait for the
// others: an abort waits for the next meeting of the group. A rank that has failed goes to it at
// once, which is the one that the others come to next.
int32_t Team::decide(bool spans_group) {
  const bool has_failed = lacking.load(std::memory_order_relaxed) > 0;
  const bool is_aborted =
      aborted.load(std::memory_order_relaxed) == call.load(std::memory_order_relaxed);
  if (group == nullptr) return has_failed || is_aborted ? OCT_ERR_ABORTED : OCT_OK;
  if (!spans_group && !has_failed) return OCT_OK;
  return octavo::meet(group, has_failed || is_aborted);
}

int32_t Team::run(Task what, void* with, Group* among) {
  const std::lock_guard<std::mutex> lock(one_call);
  task = what;
  context = with;
  group = among;
  tickets.store(0, std::memory_order_relaxed);
  outcome.store(OCT_OK, std::memory_order_relaxed);
  lacking.store(0, std::memory_order_relaxed);
  call.fetch_add(1, std::memory_order_release);
  const uint32_t before = done.value();
  const uint32_t all = before + static_cast<uint32_t>(size) - 1;
  {
    const DefaultFloats floats;
    begin.add(1);
    perform(0);
  }
  for (uint32_t seen = done.value(); seen != all; seen = done.value()) done.wait(seen, kSleepNs);
  call.fetch_add(1, std::memory_order_release);
  for (void* memory : outgrown) std::free(memory);
  outgrown.clear();
  if (const size_t bytes = lacking.load(std::memory_order_relaxed)) {
    return fail(OCT_ERR_MEMORY, "no memory for %zu bytes of scratch", bytes);
  }
  const int32_t code = outcome.load(std::memory_order_relaxed);
  if (code == OCT_ERR_PEER) return fail(code, "a rank of the group has ended");
  return code;
}

}  // namespace
}  // namespace octavo

struct oct_pool {
  const int size;
  const int64_t spin_ns;
  std::atomic<octavo::Team*> team{nullptr};

  // The team of this process; NULL, with an error set, if it cannot be created.
  octavo::Team* here() {
    octavo::Team* mine = team.load(std::memory_order_acquire);
    if (mine && mine->born == octavo::num_forks.load(std::memory_order_relaxed)) return mine;
    const std::lock_guard<std::mutex> lock(octavo::making);
    mine = team.load(std::memory_order_acquire);
    if (mine && mine->born == octavo::num_forks.load(std::memory_order_relaxed)) return mine;
    std::unique_ptr<octavo::Team> made;
    try {
      made.reset(new octavo::Team(this, size, spin_ns));
    } catch (const std::bad_alloc&) {
      octavo::fail(OCT_ERR_MEMORY, "no memory for %d threads", size);
    }
    if (!made || !made->start()) return nullptr;
    mine = made.release();
    team.store(mine, std::memory_order_release);
    return mine;
  }
};

namespace octavo {

// A pool of one has no barrier to wait at, but its tickets and aborts are the same.
bool Worker::barrier(Group* group) const {
  return pool->team.load(std::memory_order_relaxed)->meet(group != nullptr);
}

int Worker::ticket() const {
  return pool->team.load(std::memory_order_relaxed)->tickets.fetch_add(1, std::memory_order_relaxed);
}

void* Worker::scratch(int slot, size_t bytes) const {
  Scratch& mine = pool->team.load(std::memory_order_relaxed)->scratch[rank].of[slot];
  if (mine.capacity < bytes) {
    std::free(mine.memory);
    mine = {};
    mine.memory = allocate(grown(bytes));
    mine.capacity = grown(bytes);
  }
  return mine.memory;
}

void* Worker::shared(int slot, size_t bytes) const {
  Team& team = *pool->team.load(std::memory_order_relaxed);
  Shared& all = team.shared[slot];
  if (all.capacity.load(std::memory_order_acquire) < bytes) {
    const std::lock_guard<std::mutex> lock(team.growing);
    if (all.capacity.load(std::memory_order_relaxed) < bytes) {
      const size_t capacity = grown(bytes);
      team.outgrown.reserve(team.outgrown.size() + 1);
      void* const larger = allocate(capacity);
      // A slower worker may still read what it was given before the last barrier.
      if (void* old = all.memory.load(std::memory_order_relaxed)) team.outgrown.push_back(old);
      all.memory.store(larger, std::memory_order_relaxed);
      all.capacity.store(capacity, std::memory_order_release);
    }
  }
  return all.memory.load(std::memory_order_relaxed);
}

int32_t run(Pool* pool, Task task, void* context, Group* group) {
  if (pool == nullptr) return leave(group, fail(OCT_ERR_ARGUMENT, "the thread pool is NULL"));
  Team* team = pool->here();
  return team ? team->run(task, context, group) : leave(group, OCT_ERR_MEMORY);
}

int32_t leave(Group* group, int32_t code) {
  if (group) meet(group, true);
  return code;
}

}  // namespace octavo

oct_pool* oct_pool_new(int32_t num_threads, int32_t spin_us) {
  using namespace octavo;
  if (num_threads < 1 || num_threads > kMaxThreads || spin_us < 0) {
    fail(OCT_ERR_ARGUMENT,
         "a pool of %d threads that spin for %d us: 1 to %d threads, 0 us or more are possible",
         num_threads, spin_us, kMaxThreads);
    return nullptr;
  }
  watch_forks();
  std::unique_ptr<oct_pool> pool(new (std::nothrow) oct_pool{num_threads, spin_us * int64_t{1000}});
  if (!pool) {
    fail(OCT_ERR_MEMORY, "no memory for a thread pool");
    return nullptr;
  }
  return pool->here() ? pool.release() : nullptr;
}

void oct_pool_free(oct_pool* pool) {
  if (pool == nullptr) return;
  octavo::Team* team = pool->team.load();
  // A child leaves its inherited copy alone; its pages stay shared until they are written to.
  if (team && team->born == octavo::num_forks.load()) {
    { const std::lock_guard<std::mutex> lock(team->one_call); }
    delete team;
  }
  delete pool;
}

int32_t oct_pool_size(const oct_pool* pool) { return pool ? pool->size : 0; }

double oct_pool_barrier_ns(oct_pool* pool, int32_t rounds) {
  using namespace octavo;
  if (rounds < 1) return fail(OCT_ERR_ARGUMENT, "%d rounds of barriers: at least 1", rounds);
  double each = 0;
  const int32_t code = run(pool, [&](const Worker& worker) {
    if (!worker.barrier()) return;  // all are awake
    const int64_t begin = now_ns();
    for (int32_t i = 0; i < rounds; i++) {
      if (!worker.barrier()) return;
    }
    if (worker.rank == 0) each = static_cast<double>(now_ns() - begin) / rounds;
  });
  return code < 0 ? code : each;
}

void oct_abort(oct_pool* pool) {
  if (pool == nullptr) return;
  octavo::Team* team = pool->team.load(std::memory_order_acquire);
  if (team == nullptr) return;
  const uint64_t call = team->call.load(std::memory_order_acquire);
  if (call % 2 == 0) return;  // nothing runs
  // Never go back to an older call if another abort was faster.
  uint64_t last = team->aborted.load();
  while (last < call && !team->aborted.compare_exchange_weak(last, call)) {
  }
}
