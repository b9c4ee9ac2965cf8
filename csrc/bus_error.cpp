// A mapped file that is truncated, or whose disk fails, has no page behind an address: SIGBUS. The
// process ends, as nothing can be computed without its weights, but reports the file first.
#include "octavo.h"

#include <atomic>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <fcntl.h>
#include <unistd.h>

namespace {

struct sigaction previous;
std::atomic<bool> installed{false};
std::atomic_flag reporting = ATOMIC_FLAG_INIT;

// The handler does only signal-safe things: no allocation, no stdio, no locks.

void say(const char* text, size_t length) {
  while (length > 0) {
    const ssize_t written = write(STDERR_FILENO, text, length);
    if (written <= 0) return;
    text += written;
    length -= static_cast<size_t>(written);
  }
}

void say(const char* text) { say(text, std::strlen(text)); }

// Reads /proc/self/maps line by line, a piece at a time; lines that are too long lose their end.
class Maps {
 public:
  Maps() : file_(open("/proc/self/maps", O_RDONLY | O_CLOEXEC)) {}
  ~Maps() {
    if (file_ >= 0) close(file_);
  }
  bool next(char* line, size_t capacity) {
    size_t length = 0;
    for (;;) {
      if (at_ == end_) {
        const ssize_t count = file_ < 0 ? 0 : read(file_, piece_, sizeof piece_);
        if (count <= 0) return false;
        at_ = 0;
        end_ = static_cast<size_t>(count);
      }
      const char character = piece_[at_++];
      if (character == '\n') break;
      if (length + 1 < capacity) line[length++] = character;
    }
    line[length] = '\0';
    return true;
  }

 private:
  int file_;
  size_t at_ = 0, end_ = 0;
  char piece_[1024];
};

// A hexadecimal number; moves behind it.
uintptr_t hexadecimal(const char*& text) {
  uintptr_t value = 0;
  for (;; ++text) {
    const char c = *text;
    if (c >= '0' && c <= '9') value = value * 16 + static_cast<uintptr_t>(c - '0');
    else if (c >= 'a' && c <= 'f') value = value * 16 + static_cast<uintptr_t>(c - 'a' + 10);
    else return value;
  }
}

// The path of the file that is mapped at an address, in `line`; null if there is none.
const char* mapped_at(uintptr_t address, char* line, size_t capacity) {
  Maps maps;
  while (maps.next(line, capacity)) {
    const char* text = line;  // "start-end permissions offset device inode   path"
    const uintptr_t start = hexadecimal(text);
    const uintptr_t end = *text == '-' ? hexadecimal(++text) : 0;
    if (address >= start && address < end) return std::strchr(text, '/');
  }
  return nullptr;
}

void report(int, siginfo_t* info, void*) {
  if (reporting.test_and_set()) {
    for (;;) pause();  // another thread is handling it, and ends the process
  }
  if (info->si_code <= 0) {  // another process sent it: nothing will fail again
    sigaction(SIGBUS, &previous, nullptr);
    raise(SIGBUS);
    return;
  }
  char line[4352];  // a path has at most 4096 bytes
  const char* path = mapped_at(reinterpret_cast<uintptr_t>(info->si_addr), line, sizeof line);
#if !defined(__linux__)
  if (path == nullptr) path = "a file of the model";  // there is no /proc
#endif
  if (path != nullptr) {
    say("octavo: ");
    say(path);
    say(" has been truncated or replaced while it was in use, or its disk has failed (SIGBUS). "
        "Restore the file, and start again.\n");
  }
  // Restore the previous handler, which the failing instruction calls again.
  sigaction(SIGBUS, &previous, nullptr);
}

}  // namespace

void oct_report_bus_errors(void) {
  if (installed.exchange(true)) return;
  struct sigaction action = {};
  action.sa_sigaction = report;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigemptyset(&action.sa_mask);
  sigaction(SIGBUS, &action, &previous);
}
