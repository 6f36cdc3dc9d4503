// Anonymous memory on huge pages, because direct I/O and long scans have a cost per page.
#pragma once
#include <cstdint>

namespace csd {

class HugeMemory {
 public:
  HugeMemory() = default;
  // `reserved`: only reserves addresses, which must not be touched before make_accessible() or before something else is
  // mapped over them. They do not count as memory, even on a system that does not overcommit. Throws Failure.
  explicit HugeMemory(uint64_t bytes, bool reserved = false);
  ~HugeMemory();
  HugeMemory(HugeMemory &&) noexcept;
  HugeMemory &operator=(HugeMemory &&) noexcept;
  float *floats() const { return static_cast<float *>(address_); }
  uint64_t bytes() const { return bytes_; }
  uint64_t huge_bytes() const;  // estimate of what is on huge pages, from the share that smaps reports
  float *release();             // the caller must unmap it

 private:
  void *address_ = nullptr;
  uint64_t bytes_ = 0;
};

void make_accessible(float *at, uint64_t bytes);  // makes whole reserved pages readable and writable. Throws Failure

// Copies from a mapped file. Returns false if a page cannot be read, where memcpy would end in SIGBUS.
bool copy_mapped(void *to, const void *from, uint64_t bytes);

void discard_pages(void *at, uint64_t bytes);  // makes all of it read as zeros, and frees the whole pages within

void map_nothing(void *at, uint64_t bytes);  // maps zeros, which take no memory, over whole pages. Throws Failure

}  // namespace csd
