#include "transfer.h"

#include <errno.h>
#include <unistd.h>

namespace csd {
namespace {

template <typename Io>
int fully(Io io, char *buffer, uint64_t bytes, uint64_t offset) {
  while (bytes > 0) {
    const ssize_t moved = io(buffer, bytes, offset);
    if (moved < 0 && errno == EINTR) continue;
    if (moved < 0) return errno;
    if (moved == 0) return EIO;
    buffer += moved;
    offset += static_cast<uint64_t>(moved);
    bytes -= static_cast<uint64_t>(moved);
  }
  return 0;
}

}  // namespace

int read_fully(int fd, void *buffer, uint64_t bytes, uint64_t offset) {
  return fully([fd](char *b, uint64_t n, uint64_t at) { return pread(fd, b, n, static_cast<off_t>(at)); },
               static_cast<char *>(buffer), bytes, offset);
}

int write_fully(int fd, const void *buffer, uint64_t bytes, uint64_t offset) {
  return fully([fd](char *b, uint64_t n, uint64_t at) { return pwrite(fd, b, n, static_cast<off_t>(at)); },
               static_cast<char *>(const_cast<void *>(buffer)), bytes, offset);
}

}  // namespace csd
