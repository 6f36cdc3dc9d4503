#include "memory.h"

#include <errno.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include <string>
#include <utility>

#include "failure.h"

namespace csd {

constexpr uint64_t kHugePage = 2 << 20;

HugeMemory::HugeMemory(uint64_t bytes, bool reserved) : bytes_(bytes) {
  if (bytes == 0) return;
  // Map a huge page more than needed, and trim, so that the memory begins on a huge page. MAP_NORESERVE: untouched
  // pages cost nothing.
  void *raw = mmap(nullptr, bytes + kHugePage, reserved ? PROT_NONE : PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) throw Failure{CSD_ENOMEM, "cannot map " + std::to_string(bytes) + " bytes of memory", errno};
  const uintptr_t from = reinterpret_cast<uintptr_t>(raw), begin = (from + kHugePage - 1) / kHugePage * kHugePage;
  if (begin > from) munmap(raw, begin - from);
  const uint64_t page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t end = begin + (bytes + page - 1) / page * page, raw_end = from + bytes + kHugePage;
  if (raw_end > end) munmap(reinterpret_cast<void *>(end), raw_end - end);
  address_ = reinterpret_cast<void *>(begin);
  madvise(address_, bytes, MADV_HUGEPAGE);  // only a hint: without huge pages everything works, but more slowly
}

// The result of madvise says little: it succeeds even if huge pages are set to "never" or memory is too fragmented.
uint64_t HugeMemory::huge_bytes() const {
  if (bytes_ < kHugePage) return 0;  // cannot have a huge page; avoid smaps, for which the kernel visits every page
  FILE *smaps = fopen("/proc/self/smaps", "re");
  if (!smaps) return 0;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(address_);
  bool here = false;  // in the entry of this mapping, which the kernel may have merged with its neighbours
  uint64_t resident = 0, huge = 0;
  char line[512];
  while (fgets(line, sizeof line, smaps)) {
    uintptr_t from, to;
    if (sscanf(line, "%" SCNxPTR "-%" SCNxPTR " ", &from, &to) == 2) {
      if (here) break;
      here = from <= begin && begin < to;
    } else if (here) {
      if (sscanf(line, "Rss: %" SCNu64, &resident) != 1) sscanf(line, "AnonHugePages: %" SCNu64, &huge);
    }
  }
  fclose(smaps);
  return resident ? static_cast<uint64_t>(static_cast<double>(bytes_) * static_cast<double>(huge) /
                                          static_cast<double>(resident))
                  : 0;
}

HugeMemory::~HugeMemory() {
  if (address_) munmap(address_, bytes_);
}

HugeMemory::HugeMemory(HugeMemory &&o) noexcept
    : address_(std::exchange(o.address_, nullptr)), bytes_(std::exchange(o.bytes_, 0)) {}

HugeMemory &HugeMemory::operator=(HugeMemory &&o) noexcept {
  std::swap(address_, o.address_);
  std::swap(bytes_, o.bytes_);
  return *this;
}

void make_accessible(float *at, uint64_t bytes) {
  if (mprotect(at, bytes, PROT_READ | PROT_WRITE) != 0)
    throw Failure{CSD_ENOMEM, "cannot have " + std::to_string(bytes) + " bytes of memory", errno};
}

// The kernel copies: a page that it cannot read is an error of the call (EFAULT), and not a signal.
bool copy_mapped(void *to, const void *from, uint64_t bytes) {
  auto *into = static_cast<char *>(to);
  auto *out_of = const_cast<char *>(static_cast<const char *>(from));  // iovec has no const; it is only read
  while (bytes) {
    const iovec local{into, bytes}, remote{out_of, bytes};
    const ssize_t n = process_vm_readv(getpid(), &local, 1, &remote, 1, 0);
    if (n < 0 && (errno == ENOSYS || errno == EPERM)) return memcpy(into, out_of, bytes), true;  // a sandbox forbids it
    if (n <= 0) return false;
    into += n, out_of += n, bytes -= static_cast<uint64_t>(n);
  }
  return true;
}

void discard_pages(void *at, uint64_t bytes) {
  const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE)), first = reinterpret_cast<uint64_t>(at);
  const uint64_t end = first + bytes, from = (first + page - 1) / page * page, to = end / page * page;
  if (from >= to) {
    memset(at, 0, bytes);
    return;
  }
  madvise(reinterpret_cast<void *>(from), to - from, MADV_DONTNEED);
  memset(at, 0, from - first);
  memset(reinterpret_cast<void *>(to), 0, end - to);
}

void map_nothing(void *at, uint64_t bytes) {
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
  if (mmap(at, bytes, PROT_READ | PROT_WRITE, flags, -1, 0) == MAP_FAILED)
    throw Failure{CSD_ENOMEM, "memory of tiles cannot be freed", errno};
}

float *HugeMemory::release() { return static_cast<float *>(std::exchange(address_, nullptr)); }

}  // namespace csd
