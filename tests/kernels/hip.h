// Stand-ins for what hipRTC has built in, so that clang alone compiles the kernels: see test_compiled_for_gpus.py.
#pragma once
#define __global__ __attribute__((global))
#define __device__ __attribute__((device))
#define __shared__ __attribute__((shared))
#define __launch_bounds__(...) __attribute__((launch_bounds(__VA_ARGS__)))

struct Index {
  unsigned x;
};
#define threadIdx (Index{__builtin_amdgcn_workitem_id_x()})
#define blockIdx (Index{__builtin_amdgcn_workgroup_id_x()})
#define gridDim (Index{__builtin_amdgcn_grid_size_x() / __builtin_amdgcn_workgroup_size_x()})

__device__ inline void __syncthreads() { __builtin_amdgcn_s_barrier(); }
__device__ inline float sqrtf(float x) { return __builtin_sqrtf(x); }

// The value of lane `lane` among `width` neighbours.
template <typename T>
__device__ T __shfl(T value, int lane, int width) {
  const int me = (int)(threadIdx.x & 63), from = (me & ~(width - 1)) + (lane & (width - 1));
  int words[(sizeof(T) + 3) / 4] = {};
  __builtin_memcpy(words, &value, sizeof(T));
  for (int &word : words) word = __builtin_amdgcn_ds_bpermute(from << 2, word);
  __builtin_memcpy(&value, words, sizeof(T));
  return value;
}
template <typename T>
__device__ T __shfl_xor(T value, int mask, int width) {
  return __shfl(value, (int)(threadIdx.x & 63) ^ mask, width);
}
template <typename T>
__device__ T atomicAdd(T *at, T value) {
  return __atomic_fetch_add(at, value, __ATOMIC_RELAXED);
}
