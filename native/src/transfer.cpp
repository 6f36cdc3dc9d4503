#include "transfer.h"

#include <errno.h>
#include <unistd.h>

#include <algorithm>

namespace csd {
namespace {

// Calls io(parts, n, offset) until all of the parts are transferred, and moves their beginnings on.
template <typename Io>
int fully(Io io, iovec *parts, int n, uint64_t offset) {
  for (; n > 0; parts++, n--) {
    while (parts->iov_len > 0) {
      const ssize_t moved = io(parts, n, offset);
      if (moved < 0 && errno == EINTR) continue;
      if (moved < 0) return errno;
      if (moved == 0) return EIO;
      auto left = static_cast<uint64_t>(moved);
      offset += left;
      for (iovec *part = parts; left > 0; part++) {
        const uint64_t some = std::min<uint64_t>(left, part->iov_len);
        part->iov_base = static_cast<char *>(part->iov_base) + some;
        part->iov_len -= some;
        left -= some;
      }
    }
  }
  return 0;
}

}  // namespace

int read_fully(int fd, void *buffer, uint64_t bytes, uint64_t offset) {
  iovec part{buffer, bytes};
  return fully([fd](iovec *p, int, uint64_t at) { return pread(fd, p->iov_base, p->iov_len, static_cast<off_t>(at)); },
               &part, 1, offset);
}

int write_fully(int fd, const void *buffer, uint64_t bytes, uint64_t offset) {
  iovec part{const_cast<void *>(buffer), bytes};
  return fully([fd](iovec *p, int, uint64_t at) { return pwrite(fd, p->iov_base, p->iov_len, static_cast<off_t>(at)); },
               &part, 1, offset);
}

int write_fully(int fd, iovec *parts, int n, uint64_t offset) {
  return fully([fd](iovec *p, int left, uint64_t at) { return pwritev(fd, p, left, static_cast<off_t>(at)); }, parts, n,
               offset);
}

}  // namespace csd
