// C-simulation: as much of Vitis' header of this name as the kernels use, for plain g++. Under Vitis its own is found.
#pragma once
#include <stddef.h>

namespace hls {

// Aligned as on the FPGA's ports.
template <typename T, size_t N>
class alignas(N * sizeof(T)) vector {
 public:
  T &operator[](size_t lane) { return lanes_[lane]; }
  const T &operator[](size_t lane) const { return lanes_[lane]; }

 private:
  T lanes_[N];
};

}  // namespace hls
