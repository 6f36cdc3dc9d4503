#pragma once
#include <sys/uio.h>

#include <cstdint>

namespace csd {

// Read or write exactly `bytes` bytes at `offset`. If `fd` is of O_DIRECT, address, length and offset are multiples of
// 4096. A short transfer is continued where it stopped. Returns 0 or an errno; end of file counts as EIO, because a
// store never ends before its last tile, and a record never before its last byte.
int read_fully(int fd, void *buffer, uint64_t bytes, uint64_t offset);
int write_fully(int fd, const void *buffer, uint64_t bytes, uint64_t offset);
int write_fully(int fd, iovec *parts, int n, uint64_t offset);  // one after another; uses `parts` up

}  // namespace csd
