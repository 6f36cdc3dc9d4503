// As much of Vitis' header of this name as the kernel uses, declared as Vitis does (UG1399) and in our own words: for
// tests that compile the kernel as Vitis would. Streams have no bounds, and stages are calls, one after another.
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
