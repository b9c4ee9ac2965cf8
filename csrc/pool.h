// A pool of threads that compute a step together.
//
// A call runs one function on all workers. Inside, they meet at barriers; between two barriers each
// does its static share (by rank), or takes pieces by ticket.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

struct oct_group;
struct oct_pool;

namespace octavo {

using Group = ::oct_group;
using Pool = ::oct_pool;

// One worker's view of the pool, for the length of one call.
struct Worker {
  int rank;
  int size;
  Pool* pool;

  // Wait for all workers; those of all ranks, if `group` is given, which is the one of the call. False
  // once the call is aborted: then return from the call at once.
  bool barrier(Group* group = nullptr) const;
  // The next number from 0 on that no worker has taken since the last barrier.
  int ticket() const;
  // At least `bytes` of this worker's own memory, 64-byte aligned. Its contents last for the call;
  // asking again may move it. Slots are independent: `slot` in 0..7, a fixed number per use. Where
  // there is no memory it throws, which ends the call with OCT_ERR_MEMORY: what the caller holds by
  // then must need no destructor.
  void* scratch(int slot, size_t bytes) const;
  // The same, but one for all workers: to be asked for by all of them, with the same size, between
  // the same barriers. Slots 0..4. What an earlier request of this call returned stays readable to
  // the end of the call.
  void* shared(int slot, size_t bytes) const;
};

// The part [begin, end) of n things that belongs to a worker.
struct Range {
  int begin, end;
};
inline Range share(int n, int rank, int size) {
  return {static_cast<int>(static_cast<int64_t>(n) * rank / size),
          static_cast<int>(static_cast<int64_t>(n) * (rank + 1) / size)};
}

using Task = void (*)(const Worker&, void*);
// Run task(worker, context) on all workers; the calling thread is worker 0. OCT_OK, OCT_ERR_ABORTED,
// or an error if there are no threads or no memory to be had. A task may not call run() itself, and
// throws nothing but what scratch() and shared() do.
//
// With a group, all its ranks make the call, with as many barriers that span it. They end it together: at
// such a barrier, or at the end of the call, which is one. OCT_ERR_ABORTED where another rank has
// failed, or was aborted; OCT_ERR_PEER if the group is aborted.
int32_t run(Pool* pool, Task task, void* context, Group* group = nullptr);

// Run a callable on all workers.
template <class F>
int32_t run(Pool* pool, F&& body, Group* group = nullptr) {
  using Body = std::remove_reference_t<F>;
  return run(
      pool, [](const Worker& w, void* context) { (*static_cast<Body*>(context))(w); },
      const_cast<void*>(static_cast<const void*>(&body)), group);
}

// The way out of a call of a group before run(), with the code that it returns: the other ranks, which
// would wait, are told to end theirs.
int32_t leave(Group* group, int32_t code);

// Sets what oct_last_error() tells this thread, and returns the code.
int32_t fail(int32_t code, const char* format, ...) __attribute__((format(printf, 2, 3)));

}  // namespace octavo
