// What the kernels need from a processor. NVRTC and hipRTC compile them for GPUs at run time; g++ compiles the same text
// for tests, in which the threads of a block are fibers (tests/accelerator/emulated/on_cpu.h).
//
// A kernel is `KERNEL name(const NameArgs a)`: one struct of arguments, passed by value. csd_optim/kernels/sources.py
// reads the layout of these structs between the cdef marks of a header. There are no system headers on a GPU.
#pragma once
#include <stdint.h>

constexpr uint32_t kThreads = 256;  // of a block

#if defined(__CUDACC__) || defined(__HIP__)
#ifdef CSD_SOFT  // without a second bound, compilers grant so few registers that some kernels spill a few
#define KERNEL extern "C" __global__ void __launch_bounds__(kThreads, 2)
#else
#define KERNEL extern "C" __global__ void __launch_bounds__(kThreads)
#endif
#define SHARED __shared__
#define UNROLL _Pragma("unroll")  // before a loop by whose index arrays are accessed, so that they stay in registers
#if defined(__HIP__)
// The value of another thread among 16 neighbours: an AMD wave may have 64 lanes, so shuffles stay within 16.
template <typename T>
__device__ T from_lane(T value, int lane) {
  return __shfl(value, lane, 16);
}
template <typename T>
__device__ T from_lane_xor(T value, int mask) {
  return __shfl_xor(value, mask, 16);
}
#else
template <typename T>
__device__ T from_lane(T value, int lane) {
  return __shfl_sync(0xffffffffu, value, lane, 16);
}
template <typename T>
__device__ T from_lane_xor(T value, int mask) {
  return __shfl_xor_sync(0xffffffffu, value, mask, 16);
}
#endif
// An address that a kernel found in memory, and not in its arguments: see on_cpu.h.
template <typename T>
__device__ T *reach(T *address) {
  return address;
}
#else
#include "on_cpu.h"
#endif

// `n` elements that are loaded and stored at once. Their address must be a multiple of their size.
template <typename T, int n>
struct alignas(sizeof(T) * n) Vector {
  T of[n];
};

inline bool is_multiple(const void *address, uint64_t bytes) { return (uint64_t)address % bytes == 0; }

// Loads `n` elements, of which `left` exist; the others are zero. `whole`: their address is a multiple of their size.
template <typename T, int n>
inline void load(const T *from, T (&to)[n], uint64_t left, bool whole) {
  if (whole && left >= n) {
    const Vector<T, n> all = *(const Vector<T, n> *)from;
    for (int j = 0; j < n; j++) to[j] = all.of[j];
  } else {
    for (int j = 0; j < n; j++) to[j] = (uint64_t)j < left ? from[j] : T(0);
  }
}

template <typename T, int n>
inline void store(const T (&from)[n], T *to, uint64_t left, bool whole) {
  if (whole && left >= n) {
    Vector<T, n> all;
    for (int j = 0; j < n; j++) all.of[j] = from[j];
    *(Vector<T, n> *)to = all;
  } else {
    for (int j = 0; j < n; j++)
      if ((uint64_t)j < left) to[j] = from[j];
  }
}
