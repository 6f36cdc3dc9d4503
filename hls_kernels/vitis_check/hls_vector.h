// The part of Vitis' header of this name that the kernels use; see hls_stream.h.
#pragma once
#include <stddef.h>

#include <array>

namespace hls {

template <typename T, size_t N>
class alignas(N * sizeof(T)) vector {
 public:
  vector() = default;
  T &operator[](size_t lane) { return lanes_[lane]; }
  const T &operator[](size_t lane) const { return lanes_[lane]; }

 private:
  std::array<T, N> lanes_;
};

}  // namespace hls
