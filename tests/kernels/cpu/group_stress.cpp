// Uses csrc/group.h and the barriers of csrc/pool.h that span a group as a step does, hard, and checks
// what they promise: test_group.py compiles this, and runs it as it is and under the thread sanitizer.
//
// Ranks are threads here, each with a pool and an end of the group of its own.
//
//   group_stress RANKS THREADS ROUNDS CROWDED      exits with 0, or says which promise was broken
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <thread>
#include <vector>

#include "group.h"
#include "octavo.h"
#include "pool.h"
#include "stress_check.h"

using namespace octavo;

namespace {

constexpr size_t kMoreThanThereIs = size_t{1} << 60;

// Memory of a group, which begins with zeros.
class Memory {
 public:
  explicit Memory(int ranks) : bytes_(oct_group_bytes(ranks)) {
    data_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(data_ != MAP_FAILED);
  }
  ~Memory() { munmap(data_, bytes_); }
  void* data() const { return data_; }

 private:
  size_t bytes_;
  void* data_;
};

struct Ranks {
  Ranks(int count, int threads, bool crowded) : memory(count) {
    for (int rank = 0; rank < count; rank++) {
      groups.push_back(oct_group_open(memory.data(), rank, count, crowded));
      pools.push_back(oct_pool_new(threads, 20));
      CHECK(groups.back() && pools.back());
    }
  }
  ~Ranks() {
    for (Group* group : groups) oct_group_close(group);
    for (Pool* pool : pools) oct_pool_free(pool);
  }
  int size() const { return static_cast<int>(groups.size()); }

  // Run a function as all ranks, each in a thread.
  void all(const std::function<void(int)>& body) {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size(); rank++) threads.emplace_back(body, rank);
    for (std::thread& thread : threads) thread.join();
  }

  Memory memory;
  std::vector<Group*> groups;
  std::vector<Pool*> pools;
};

// What was written before a meeting is seen after it, and all get the same answer.
void meetings(Ranks& ranks, int rounds) {
  const int size = ranks.size();
  std::vector<int> written(16 * size);
  ranks.all([&](int rank) {
    for (int round = 1; round <= rounds; round++) {
      const int who = round * 7919 % (3 * size);  // no rank in two of three rounds
      written[16 * rank] = round;
      CHECK(oct_group_meet(ranks.groups[rank], rank == who) == (who < size));
      for (int other = 0; other < size; other++) CHECK(written[16 * other] == round);
      CHECK(oct_group_meet(ranks.groups[rank], 0) == 0);
    }
    int64_t meetings, messages, bytes;
    oct_group_counts(ranks.groups[rank], &meetings, &messages, &bytes);
    CHECK(meetings == 2 * rounds && messages == 0 && bytes == 0);
  });
}

int32_t word(int message, int i) { return message * 1000003 + i * 31; }

// Messages of any length arrive whole, and in order, at all followers, however slow these are.
void messages(Ranks& ranks, int rounds) {
  std::vector<int> lengths;
  std::mt19937 random(7);
  for (int m = 0; m < rounds; m++) lengths.push_back(1 + random() % (m % 10 ? 300 : 100'000));
  ranks.all([&](int rank) {
    std::vector<int32_t> words(100'000);
    int64_t sum = 0;
    for (int m = 0; m < rounds; m++) {
      if (rank == 0) {
        for (int i = 0; i < lengths[m]; i++) words[i] = word(m, i);
        CHECK(oct_group_send(ranks.groups[0], words.data(), lengths[m]) == OCT_OK);
      } else {
        if (m % 50 == rank) std::this_thread::sleep_for(std::chrono::milliseconds(3));
        const int32_t got = oct_group_receive(ranks.groups[rank], words.data(), 100'000);
        CHECK(got == lengths[m]);
        for (int i = 0; i < got; i++) CHECK(words[i] == word(m, i));
      }
      sum += lengths[m];
    }
    int64_t meetings, messages, bytes;
    oct_group_counts(ranks.groups[rank], &meetings, &messages, &bytes);
    CHECK(messages == rounds && bytes == 4 * sum);
  });
}

// Barriers that span the group hold all workers of all ranks; others those of one rank.
void barriers(Ranks& ranks, int rounds) {
  const int size = ranks.size(), threads = oct_pool_size(ranks.pools[0]);
  std::vector<int> written(16 * size * threads);
  ranks.all([&](int rank) {
    Group* group = ranks.groups[rank];
    const int32_t code = run(ranks.pools[rank], [&](const Worker& w) {
      for (int round = 1; round <= rounds; round++) {
        written[16 * (rank * threads + w.rank)] = round;
        CHECK(w.barrier());
        for (int t = 0; t < threads; t++) CHECK(written[16 * (rank * threads + t)] == round);
        CHECK(w.barrier(group));
        for (int other = 0; other < size * threads; other++) CHECK(written[16 * other] == round);
        CHECK(w.barrier(group));
      }
    }, group);
    CHECK(code == OCT_OK);
  });
}

// An abort of one rank's call ends that of all ranks, at the same barrier of the group, and no other call.
void aborts(Ranks& ranks, int rounds) {
  const int threads = oct_pool_size(ranks.pools[0]);
  for (int i = 0; i < rounds; i++) {
    std::vector<int> left(ranks.size() * threads, -1);
    ranks.all([&](int rank) {
      Group* group = ranks.groups[rank];
      std::atomic<bool> running{false};
      std::thread other([&] {
        if (rank != i % ranks.size()) return;
        while (!running) std::this_thread::yield();
        oct_abort(ranks.pools[rank]);
      });
      const int32_t code = run(ranks.pools[rank], [&](const Worker& w) {
        for (int round = 0;; round++) {
          CHECK(w.barrier());  // an abort waits
          if (!w.barrier(group)) {
            left[rank * threads + w.rank] = round;
            return;
          }
          running = true;
        }
      }, group);
      CHECK(code == OCT_ERR_ABORTED);
      other.join();
    });
    for (int round : left) CHECK(round == left[0] && round > 0);
    barriers(ranks, 1);
  }
}

// A worker that gets no memory ends the call of all ranks, wherever they are, and no other call.
void lack(Ranks& ranks, int rounds) {
  const int size = ranks.size(), threads = oct_pool_size(ranks.pools[0]);
  for (int i = 0; i < rounds; i++) {
    const int unlucky = i % size, worker = i / size % threads, when = i % 7;
    ranks.all([&](int rank) {
      Group* group = ranks.groups[rank];
      std::atomic<int> ended{0};
      const auto need = [&](const Worker& w, int now) {
        if (rank == unlucky && w.rank == worker && now == when) w.scratch(3, kMoreThanThereIs);
      };
      const int32_t code = run(ranks.pools[rank], [&](const Worker& w) {
        for (int round = 0; round < 3; round++) {
          need(w, 2 * round);
          if (!w.barrier()) break;
          need(w, 2 * round + 1);
          if (!w.barrier(group)) break;
          CHECK(round < when / 2);  // no rank goes on behind the meeting that follows
        }
        if (!w.barrier(group)) return;  // again, for those that broke off
        need(w, 6);
        ended++;
      }, group);
      CHECK(code == (rank == unlucky ? OCT_ERR_MEMORY : OCT_ERR_ABORTED));
      CHECK(ended == (when < 6 ? 0 : rank == unlucky ? threads - 1 : threads));
    });
    barriers(ranks, 1);
  }
}

// A rank that cannot begin a call ends that of the others.
void without_threads(Ranks& ranks) {
  for (int unlucky = 0; unlucky < ranks.size(); unlucky++) {
    ranks.all([&](int rank) {
      Group* group = ranks.groups[rank];
      const int32_t code = run(rank == unlucky ? nullptr : ranks.pools[rank], [&](const Worker& w) {
        CHECK(!w.barrier(group));
      }, group);
      CHECK(code == (rank == unlucky ? OCT_ERR_ARGUMENT : OCT_ERR_ABORTED));
    });
    barriers(ranks, 1);
  }
}

// Ranks that sleep are woken.
void sleepers(Ranks& ranks) {
  for (int late = 0; late < ranks.size(); late++) {
    ranks.all([&](int rank) {
      if (rank == late) std::this_thread::sleep_for(std::chrono::milliseconds(6));
      CHECK(oct_group_meet(ranks.groups[rank], 0) == 0);
    });
  }
}

// Once the group is aborted no rank waits, wherever it was, now or later.
void peers(int size, int threads, bool crowded, int rounds) {
  for (int i = 0; i < rounds; i++) {
    Ranks ranks(size, threads, crowded);
    std::vector<int32_t> words(5000);
    std::thread gone([&] {
      std::this_thread::sleep_for(std::chrono::microseconds(i * 137 % 4000));
      oct_group_abort(ranks.groups[i % size]);
    });
    ranks.all([&](int rank) {
      Group* group = ranks.groups[rank];
      int32_t code = OCT_OK;
      switch (i % 4) {
        case 0:  // all meet, but one
          while (code == OCT_OK) code = rank == i % size ? OCT_ERR_PEER : oct_group_meet(group, 0);
          break;
        case 1:  // in calls
          while (code == OCT_OK)
            code = run(ranks.pools[rank], [&](const Worker& w) { while (w.barrier(group)) {} }, group);
          break;
        case 2:  // nobody reads, or nobody writes
          while (code >= 0) code = rank == 0 ? oct_group_send(group, words.data(), 5000) : OCT_ERR_PEER;
          break;
        case 3:
          while (code >= 0) code = rank ? oct_group_receive(group, words.data(), 5000) : OCT_ERR_PEER;
      }
      CHECK(code == OCT_ERR_PEER);
    });
    gone.join();
    ranks.all([&](int rank) {
      Group* group = ranks.groups[rank];
      CHECK(oct_group_meet(group, 0) == OCT_ERR_PEER);
      CHECK(std::strcmp(oct_last_error(), "a rank of the group has ended") == 0);
      CHECK(run(ranks.pools[rank], [&](const Worker&) {}, group) == OCT_ERR_PEER);
      CHECK((rank ? oct_group_receive(group, words.data(), 1) : oct_group_send(group, words.data(), 1)) ==
            OCT_ERR_PEER);
      CHECK(run(ranks.pools[rank], [&](const Worker& w) { CHECK(w.barrier()); }) == OCT_OK);
    });
  }
}

// A follower that is killed at any exchange of a few steps, or stopped and then killed, ends the waiting of
// all, once its end is noticed: here by a thread that waits for the process.
[[maybe_unused]] void kills(int victim, int signal) {
  constexpr int kSteps = 6, kMeetings = 2, kExchanges = kSteps * (1 + kMeetings);
  for (int fatal = 0; fatal < kExchanges; fatal++) {
    Memory memory(3);
    pid_t children[3] = {};
    for (int rank = 1; rank < 3; rank++) {
      if ((children[rank] = fork()) > 0) continue;
      Group* group = oct_group_open(memory.data(), rank, 3, 1);
      int32_t code = OCT_OK, word = 0;
      for (int exchange = 0; exchange < kExchanges && code == OCT_OK; exchange++) {
        if (rank == victim && exchange == fatal) raise(signal);
        if (exchange % (1 + kMeetings)) {
          code = oct_group_meet(group, 0);
        } else {
          code = std::min(0, oct_group_receive(group, &word, 1));
          if (code == OCT_OK && word != exchange) code = 1;
        }
      }
      std::_Exit(code == OCT_ERR_PEER ? 3 : 4);
    }
    Group* group = oct_group_open(memory.data(), 0, 3, 1);
    std::thread watch([&] {
      int status = 0;
      waitpid(children[victim], &status, WUNTRACED);
      if (WIFSTOPPED(status)) {
        kill(children[victim], SIGKILL);
        waitpid(children[victim], &status, 0);
      }
      CHECK(WIFSIGNALED(status));
      oct_group_abort(group);
    });
    int32_t code = OCT_OK;
    for (int exchange = 0; exchange < kExchanges && code == OCT_OK; exchange++) {
      code = exchange % (1 + kMeetings) ? oct_group_meet(group, 0) : oct_group_send(group, &exchange, 1);
    }
    CHECK(code == OCT_ERR_PEER);
    watch.join();
    int status = 0;
    waitpid(children[3 - victim], &status, 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 3);
    oct_group_close(group);
  }
}

// Ranks that are processes: the thread sanitizer does not look into other ones.
[[maybe_unused]] void forks(int size, int rounds) {
  Memory memory(size);
  std::vector<pid_t> children;
  const auto work = [&](int rank) {
    Group* group = oct_group_open(memory.data(), rank, size, 1);
    std::vector<int32_t> words(40'000);
    for (int round = 0; round < rounds; round++) {
      const int length = 1 + round * 997 % 40'000;
      if (rank == 0) {
        for (int i = 0; i < length; i++) words[i] = word(round, i);
        CHECK(oct_group_send(group, words.data(), length) == OCT_OK);
      } else {
        CHECK(oct_group_receive(group, words.data(), 40'000) == length);
        for (int i = 0; i < length; i++) CHECK(words[i] == word(round, i));
      }
      CHECK(oct_group_meet(group, round % 5 == rank) == (round % 5 < size));
    }
    oct_group_close(group);
  };
  for (int rank = 1; rank < size; rank++) {
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
      work(rank);
      std::_Exit(0);
    }
    children.push_back(child);
  }
  work(0);
  for (pid_t child : children) {
    int status = 0;
    waitpid(child, &status, 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  }
}

}  // namespace

int main(int, char** arguments) {
  const int size = std::atoi(arguments[1]), threads = std::atoi(arguments[2]);
  const int rounds = std::atoi(arguments[3]);
  const bool crowded = std::atoi(arguments[4]);
#if !defined(__SANITIZE_THREAD__)
  forks(size, rounds);
  if (size == 3) {
    for (int signal : {SIGKILL, SIGSTOP}) kills(1, signal), kills(2, signal);
  }
#endif
  Ranks ranks(size, threads, crowded);
  meetings(ranks, rounds);
  messages(ranks, rounds);
  barriers(ranks, rounds);
  aborts(ranks, 12);
  lack(ranks, 42);
  without_threads(ranks);
  sleepers(ranks);
  peers(size, threads, crowded, 24);
}
