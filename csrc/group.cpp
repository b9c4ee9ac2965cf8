// The group behind group.h and octavo.h: a meeting of all ranks, and a ring of messages from rank 0.
//
//     | size | meeting: arrived, phase | written | read by rank 1 | read by rank 2 | ... 64 KB
//     | slot 0 | slot 1 | ... | slot 15                                                  64 KB each
//
// Everything that a rank waits for is the value of a gate (gate.h): that of the meeting, what the home rank
// has written, and what each follower has read. Values grow by kStep, so that two bits are left. An
// abort sets kAborted in all gates, for ever: a thread that waits sees it as it sees any other change, and
// one that is about to sleep does not. kStopped, in the gate of the meeting, is its outcome.
//
// The memory is shared with processes that may have gone wrong. So a rank keeps what it relies on, its
// own places in the ring, for itself; what it reads from the memory is read once, and then checked.
#include "group.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <new>

#include "gate.h"
#include "octavo.h"
#include "pool.h"

namespace octavo {
namespace {

constexpr uint32_t kAborted = 1, kStopped = 2, kStep = 4;
constexpr uint32_t kSlots = 16;
constexpr size_t kSlotBytes = 64 << 10;  // a multiple of all usual sizes of pages
constexpr int32_t kMaxRanks = 256;

using SharedGate = Gate<Reach::kMachine>;

struct Header {
  alignas(kLine) std::atomic<uint32_t> size;  // 0: no rank was here yet
  alignas(kLine) std::atomic<uint32_t> arrived;
  SharedGate phase;
  SharedGate written;
  SharedGate read[kMaxRanks];
};
static_assert(sizeof(Header) <= kSlotBytes && std::atomic<uint32_t>::is_always_lock_free);

// A piece of a message: `total` words in all, of which this slot has those from `first` on.
struct alignas(kLine) Piece {
  uint32_t place;  // as in the gate `written` before this piece
  int32_t total, first;
};
constexpr int32_t kPieceWords = (kSlotBytes - sizeof(Piece)) / sizeof(int32_t);

int32_t words_of_piece(int32_t total, int32_t first) { return std::min(total - first, kPieceWords); }

// Pieces between two values of gates.
uint32_t pieces(uint32_t from, uint32_t to) { return ((to & ~(kStep - 1)) - from) / kStep; }

}  // namespace
}  // namespace octavo

struct oct_group {
  octavo::Header& header;
  uint8_t* const slots;
  const int32_t rank, size;
  const bool is_crowded;
  uint32_t place;  // of the next piece that this rank writes, or reads
  std::atomic<int64_t> meetings{0}, messages{0}, words{0};

  int64_t sleep_ns() const { return is_crowded ? octavo::kCrowdedSleepNs : octavo::kSleepNs; }
  uint8_t* slot() const { return slots + place / octavo::kStep % octavo::kSlots * octavo::kSlotBytes; }
};

namespace octavo {
namespace {

// One thread counts, any may look.
void count(std::atomic<int64_t>& counter, int64_t more) {
  counter.store(counter.load(std::memory_order_relaxed) + more, std::memory_order_relaxed);
}

int32_t closed() { return fail(OCT_ERR_ARGUMENT, "the group is NULL"); }
int32_t aborted() { return fail(OCT_ERR_PEER, "a rank of the group has ended"); }

// Wait until a slot is free in the eyes of follower `rank`.
int32_t wait_for_room(const Group& group, int32_t rank) {
  SharedGate& read = group.header.read[rank];
  for (uint32_t now = read.value();; now = read.wait(now, group.sleep_ns())) {
    if (now & kAborted) return aborted();
    const uint32_t unread = pieces(now, group.place);
    if (unread < kSlots) return OCT_OK;
    if (unread > kSlots) {
      return fail(OCT_ERR_ARGUMENT, "rank %d has %u messages unread in a ring of %u: the shared memory is "
                  "damaged", rank, unread, kSlots);
    }
  }
}

// Wait until this follower's next slot is written.
int32_t wait_for_piece(const Group& group) {
  SharedGate& written = group.header.written;
  for (uint32_t now = written.value();; now = written.wait(now, group.sleep_ns())) {
    if (now & kAborted) return aborted();
    const uint32_t unread = pieces(group.place, now);
    if (unread > kSlots) {
      return fail(OCT_ERR_ARGUMENT, "%u messages lie in a ring of %u: the shared memory is damaged",
                  unread, kSlots);
    }
    if (unread > 0) return OCT_OK;
  }
}

int32_t write(Group& group, const int32_t* words, int32_t total) {
  for (int32_t first = 0; first < total;) {
    if (group.header.written.value() & kAborted) return aborted();
    for (int32_t rank = 1; rank < group.size; rank++) {
      const int32_t code = wait_for_room(group, rank);
      if (code != OCT_OK) return code;
    }
    const Piece piece = {group.place, total, first};
    const int32_t count = words_of_piece(total, first);
    std::memcpy(group.slot(), &piece, sizeof piece);
    std::memcpy(group.slot() + sizeof piece, words + first, count * sizeof(int32_t));
    group.header.written.add(kStep);
    group.place += kStep;
    first += count;
  }
  return OCT_OK;
}

// Returns the number of words.
int32_t read(Group& group, int32_t* words, int32_t capacity) {
  int32_t total = 0, first = 0;
  do {
    const int32_t code = wait_for_piece(group);
    if (code != OCT_OK) return code;
    Piece piece;
    std::memcpy(&piece, group.slot(), sizeof piece);
    if (first == 0) total = piece.total;
    if (piece.place != group.place || piece.total != total || piece.first != first || total < 1) {
      return fail(OCT_ERR_ARGUMENT, "part %d of %d of message part %u in the place of %d of %d of %u: the "
                  "shared memory is damaged", piece.first, piece.total, piece.place, first, total, group.place);
    }
    if (total > capacity) {
      return fail(OCT_ERR_ARGUMENT, "a message of %d words: there is room for %d", total, capacity);
    }
    const int32_t count = words_of_piece(total, first);
    std::memcpy(words + first, group.slot() + sizeof piece, count * sizeof(int32_t));
    group.header.read[group.rank].add(kStep);
    group.place += kStep;
    first += count;
  } while (first < total);
  return total;
}

}  // namespace

int group_rank(const Group* group) { return group->rank; }
int group_size(const Group* group) { return group->size; }
bool is_crowded(const Group* group) { return group->is_crowded; }

// Meetings do not overlap, as the last rank opens the gate when all are here. Until then nothing but an
// abort changes its value, so the last one can set the outcome by an addition. `arrived` counts the
// ranks, and those that said stop above them.
int32_t meet(Group* group, bool stop) {
  constexpr uint32_t kOneStop = 1 << 16;
  static_assert(kMaxRanks < kOneStop);
  Header& header = group->header;
  uint32_t now = header.phase.value();
  if (now & kAborted) return OCT_ERR_PEER;
  const uint32_t one = 1 + (stop ? kOneStop : 0);
  const uint32_t here = header.arrived.fetch_add(one, std::memory_order_acq_rel) + one;
  if (here % kOneStop == static_cast<uint32_t>(group->size)) {
    header.arrived.store(0, std::memory_order_relaxed);
    const uint32_t outcome = here >= kOneStop ? kStopped : 0;
    const uint32_t more = kStep + outcome - (now & kStopped);
    now = header.phase.add(more) + more;
  } else {
    now = header.phase.wait(now, group->sleep_ns());
  }
  count(group->meetings, 1);
  if (now & kAborted) return OCT_ERR_PEER;
  return now & kStopped ? OCT_ERR_ABORTED : OCT_OK;
}

}  // namespace octavo

int64_t oct_group_bytes(int32_t size) {
  using namespace octavo;
  if (size < 1 || size > kMaxRanks) {
    return fail(OCT_ERR_ARGUMENT, "a group of %d ranks: 1 to %d are possible", size, kMaxRanks);
  }
  return kSlotBytes * (1 + kSlots);
}

oct_group* oct_group_open(void* memory, int32_t rank, int32_t size, int32_t is_crowded) {
  using namespace octavo;
#if !defined(__linux__)
  fail(OCT_ERR_ARGUMENT, "processes can share memory and wait for each other only on Linux");
  return nullptr;
#endif
  if (oct_group_bytes(size) < 0) return nullptr;
  if (memory == nullptr || reinterpret_cast<uintptr_t>(memory) % kLine != 0 || rank < 0 || rank >= size) {
    fail(OCT_ERR_ARGUMENT, "rank %d of %d at %p: ranks are 0 to %d, and memory has to be aligned", rank,
         size, memory, size - 1);
    return nullptr;
  }
  Header& header = *static_cast<Header*>(memory);
  uint32_t others = 0;
  if (!header.size.compare_exchange_strong(others, size) && others != static_cast<uint32_t>(size)) {
    fail(OCT_ERR_ARGUMENT, "rank %d of %d in the memory of a group of %u ranks", rank, size, others);
    return nullptr;
  }
  const SharedGate& ring = rank == 0 ? header.written : header.read[rank];
  auto* slots = static_cast<uint8_t*>(memory) + kSlotBytes;
  auto* group = new (std::nothrow)
      oct_group{header, slots, rank, size, is_crowded != 0, ring.value() & ~(kStep - 1)};
  if (group == nullptr) fail(OCT_ERR_MEMORY, "no memory for a group");
  return group;
}

void oct_group_close(oct_group* group) { delete group; }

int32_t oct_group_send(oct_group* group, const int32_t* words, int32_t count) {
  using namespace octavo;
  if (group == nullptr) return closed();
  if (group->rank != 0 || count < 1) {
    return fail(OCT_ERR_ARGUMENT, "a message of %d words by rank %d: rank 0 sends, one word at least",
                count, group->rank);
  }
  const int32_t code = write(*group, words, count);
  if (code != OCT_OK) return code;
  octavo::count(group->messages, 1);
  octavo::count(group->words, count);
  return OCT_OK;
}

int32_t oct_group_receive(oct_group* group, int32_t* words, int32_t capacity) {
  using namespace octavo;
  if (group == nullptr) return closed();
  if (group->rank == 0) return fail(OCT_ERR_ARGUMENT, "rank 0 sends messages, and receives none");
  const int32_t total = read(*group, words, capacity);
  if (total < 0) return total;
  count(group->messages, 1);
  count(group->words, total);
  return total;
}

void oct_group_abort(oct_group* group) {
  using namespace octavo;
  if (group == nullptr) return;
  group->header.phase.set(kAborted);
  group->header.written.set(kAborted);
  for (int32_t rank = 1; rank < group->size; rank++) group->header.read[rank].set(kAborted);
}

int32_t oct_group_meet(oct_group* group, int32_t stop) {
  using namespace octavo;
  if (group == nullptr) return closed();
  const int32_t code = meet(group, stop != 0);
  if (code == OCT_ERR_PEER) return aborted();
  return code == OCT_ERR_ABORTED ? 1 : 0;
}

double oct_group_meet_ns(oct_group* group, int32_t rounds) {
  using namespace octavo;
  if (group == nullptr) return closed();
  if (rounds < 1) return fail(OCT_ERR_ARGUMENT, "%d meetings: at least 1", rounds);
  int64_t begin = 0;
  for (int32_t i = 0; i <= rounds; i++) {
    if (i == 1) begin = now_ns();  // all are awake
    if (meet(group, false) == OCT_ERR_PEER) return aborted();
  }
  return static_cast<double>(now_ns() - begin) / rounds;
}

double oct_group_barrier_ns(oct_group* group, oct_pool* pool, int32_t rounds) {
  using namespace octavo;
  if (group == nullptr) return closed();
  if (rounds < 1) return leave(group, fail(OCT_ERR_ARGUMENT, "%d rounds of barriers: at least 1", rounds));
  double each = 0;
  const int32_t code = run(
      pool,
      [&](const Worker& worker) {
        if (!worker.barrier(group)) return;  // all are awake
        const int64_t begin = now_ns();
        for (int32_t i = 0; i < rounds; i++) {
          if (!worker.barrier(group)) return;
        }
        if (worker.rank == 0) each = static_cast<double>(now_ns() - begin) / rounds;
      },
      group);
  return code < 0 ? code : each;
}

void oct_group_counts(const oct_group* group, int64_t* meetings, int64_t* messages, int64_t* bytes) {
  *meetings = *messages = *bytes = 0;
  if (group == nullptr) return;
  *meetings = group->meetings.load(std::memory_order_relaxed);
  *messages = group->messages.load(std::memory_order_relaxed);
  *bytes = group->words.load(std::memory_order_relaxed) * static_cast<int64_t>(sizeof(int32_t));
}
