// The part of Vitis' header of this name that the kernels use, declared as in Vitis (UG1399) but written from scratch:
// for tests that compile the kernels as Vitis would. Streams are unbounded, and stages are calls, one after another.
#pragma once
#include <stdlib.h>

#include <queue>

namespace hls {

template <typename T, int DEPTH = 0>
class stream;

template <typename T>
class stream<T, 0> {
 public:
  explicit stream(const char *) {}
  stream(const stream &) = delete;
  stream &operator=(const stream &) = delete;

  void write(const T &value) { values_.push(value); }
  T read() {
    if (values_.empty()) abort();
    const T value = values_.front();
    values_.pop();
    return value;
  }

 private:
  std::queue<T> values_;
};

template <typename T, int DEPTH>
class stream : public stream<T, 0> {
 public:
  using stream<T, 0>::stream;
};

}  // namespace hls
