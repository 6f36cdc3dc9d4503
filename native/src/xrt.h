// The part of the Xilinx runtime's C API that we use, loaded at run time: every machine can build everything, and XRT
// is needed only to open a card. Handles are XRT's own, null on failure. Other functions return 0, or nonzero on
// failure; XRT then sets errno and writes to stderr. Needs XRT 2.13 or later: before, handles are not thread-safe, and
// a run cannot be started again without a wait.
#pragma once
#include <cstddef>
#include <cstdint>

namespace csd {

struct Xrt {
  using Handle = void *;
  Handle (*device_open)(unsigned index);
  Handle (*device_open_by_bdf)(const char *bdf);
  int (*device_close)(Handle device);
  int (*device_load_xclbin)(Handle device, const char *path);
  int (*device_xclbin_uuid)(Handle device, unsigned char *uuid);  // 16 bytes
  Handle (*kernel_open)(Handle device, const unsigned char *uuid, const char *name);
  int (*kernel_close)(Handle kernel);
  int (*kernel_arg_group)(Handle kernel, int arg);  // the memory bank of a pointer argument
  Handle (*buffer_alloc)(Handle device, size_t bytes, uint64_t flags, uint32_t group);
  int (*buffer_free)(Handle buffer);
  void *(*buffer_map)(Handle buffer);
  int (*buffer_sync)(Handle buffer, int direction, size_t bytes, size_t offset);
  Handle (*run_open)(Handle kernel);
  int (*run_close)(Handle run);
  int (*run_set_arg)(Handle run, int index, ...);  // a buffer's handle, or an unsigned int
  int (*run_start)(Handle run);
  int (*run_state)(Handle run);

  static const Xrt &get();  // throws Failure where there is no XRT
};

// Flags of buffer_alloc.
constexpr uint64_t kNormal = 0, kCacheable = 1ull << 24, kP2p = 1ull << 30;
// Directions of buffer_sync.
constexpr int kToDevice = 0, kFromDevice = 1;
// States of a run. Of the states above COMPLETED, those listed here and any above kTimedOut are failures; the others
// are transient.
constexpr int kCompleted = 4, kError = 5, kAborted = 6, kTimedOut = 8;

}  // namespace csd
