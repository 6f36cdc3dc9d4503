// C-simulation: the part of Vitis' header of this name that the kernels use, for plain g++. Vitis uses its own header.
#pragma once
#include <stddef.h>

namespace hls {

// Aligned as the FPGA's ports require.
template <typename T, size_t N>
class alignas(N * sizeof(T)) vector {
 public:
  T &operator[](size_t lane) { return lanes_[lane]; }
  const T &operator[](size_t lane) const { return lanes_[lane]; }

 private:
  T lanes_[N];
};

}  // namespace hls
