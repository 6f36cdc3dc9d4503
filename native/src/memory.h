// Anonymous memory on huge pages: direct I/O and long scans cost per page.
#pragma once
#include <cstdint>

namespace csd {

class HugeMemory {
 public:
  HugeMemory() = default;
  // `reserved`: addresses that nobody may touch before allow(), or before something else is mapped there. They do not
  // count as memory, even where the system never promises more than it has. Throws Failure.
  explicit HugeMemory(uint64_t bytes, bool reserved = false);
  ~HugeMemory();
  HugeMemory(HugeMemory &&) noexcept;
  HugeMemory &operator=(HugeMemory &&) noexcept;
  float *floats() const { return static_cast<float *>(address_); }
  uint64_t bytes() const { return bytes_; }
  uint64_t huge_bytes() const;  // of those that were touched: on huge pages, as the kernel tells
  float *release();             // the caller unmaps

 private:
  void *address_ = nullptr;
  uint64_t bytes_ = 0;
};

void allow(float *at, uint64_t bytes);  // to be read and written, whole pages. Throws Failure

void give_back(void *at, uint64_t bytes);  // whole pages, which read as zeros then

}  // namespace csd
