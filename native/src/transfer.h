#pragma once
#include <cstdint>

namespace csd {

// Read or write exactly `bytes` bytes at `offset`. Address, length and offset are multiples of 4096, as O_DIRECT
// requires. A short transfer is continued where it stopped. Returns 0 or an errno; end of file counts as EIO, because a
// store never ends before its last tile.
int read_fully(int fd, void *buffer, uint64_t bytes, uint64_t offset);
int write_fully(int fd, const void *buffer, uint64_t bytes, uint64_t offset);

}  // namespace csd
