#pragma once
#include <cstdint>

namespace csd {

// Read or write exactly `bytes` bytes at `offset`. Address, length and offset are multiples of 4096, as O_DIRECT wants;
// a transfer cut short by the system goes on where it stopped. Returns 0 or an errno; a file that ends early
// is EIO, for a store never ends before its tiles do.
int read_fully(int fd, void *buffer, uint64_t bytes, uint64_t offset);
int write_fully(int fd, const void *buffer, uint64_t bytes, uint64_t offset);

}  // namespace csd
