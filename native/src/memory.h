// Anonymous memory on huge pages: direct I/O and long scans cost per page.
#pragma once
#include <cstdint>

namespace csd {

class HugeMemory {
 public:
  HugeMemory() = default;
  explicit HugeMemory(uint64_t bytes);  // throws Failure
  ~HugeMemory();
  HugeMemory(HugeMemory &&) noexcept;
  HugeMemory &operator=(HugeMemory &&) noexcept;
  float *floats() const { return static_cast<float *>(address_); }
  uint64_t bytes() const { return bytes_; }
  float *release();  // the caller unmaps

 private:
  void *address_ = nullptr;
  uint64_t bytes_ = 0;
};

}  // namespace csd
