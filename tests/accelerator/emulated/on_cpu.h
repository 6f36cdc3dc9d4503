// Runs a kernel of native/gpu/ on the CPU. The threads of a block are fibers, which change places at barriers and
// shuffles only. In between they run in an order drawn by a seed, so results change if a __syncthreads() is missing.
#pragma once
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <algorithm>
#include <functional>
#include <random>
#include <vector>

#define KERNEL static inline void
#define SHARED static thread_local  // a thread runs one block at a time
#define UNROLL

struct Index {
  uint32_t x;
};
inline thread_local Index threadIdx, blockIdx, gridDim;

// Memory of an emulated device has two addresses: kernels are given the first one and use the other.
struct Memory {
  uint64_t begin, bytes, offset;
};
inline thread_local Memory device_memory;

template <typename T>
inline T *reach(T *address) {
  const uint64_t at = (uint64_t)address;
  return at - device_memory.begin < device_memory.bytes ? (T *)(at + device_memory.offset) : address;
}

namespace fibers {

constexpr size_t kStack = 64 << 10;
constexpr uint32_t kRow = 16;  // threads that shuffle with one another

struct Fiber {
  ucontext_t context;
  bool is_done, waits;
  uint32_t waits_for;  // 0: the block; else 1 + its row
};

inline thread_local std::vector<Fiber> all;
inline thread_local std::vector<char> stacks;
inline thread_local ucontext_t scheduler;
inline thread_local uint32_t current;
inline thread_local const std::function<void()> *body;
inline thread_local std::vector<uint64_t> lanes;

inline void wait(uint32_t what) {
  all[current].waits = true;
  all[current].waits_for = what;
  const Index me = threadIdx;
  swapcontext(&all[current].context, &scheduler);
  threadIdx = me;
}

inline void start() {
  (*body)();
  all[current].is_done = true;
  swapcontext(&all[current].context, &scheduler);
}

// Lets fibers go on whose whole row or block has arrived. Threads that have ended do not count, as on a GPU.
inline void release(uint32_t threads) {
  for (uint32_t row = 0; row < threads / kRow; row++) {
    const auto begin = all.begin() + kRow * row;
    const bool complete = std::all_of(
        begin, begin + kRow, [row](const Fiber &f) { return f.is_done || (f.waits && f.waits_for == 1 + row); });
    if (complete) std::for_each(begin, begin + kRow, [](Fiber &f) { f.waits = false; });
  }
  if (std::all_of(all.begin(), all.end(), [](const Fiber &f) { return f.is_done || (f.waits && f.waits_for == 0); }))
    for (Fiber &f : all) f.waits = false;
}

inline void run_block(uint32_t threads, const std::function<void()> &kernel, std::mt19937 &dice) {
  all.assign(threads, Fiber{});
  stacks.resize(threads * kStack);
  lanes.assign(threads, 0);
  body = &kernel;
  for (uint32_t t = 0; t < threads; t++) {
    getcontext(&all[t].context);
    all[t].context.uc_stack.ss_sp = stacks.data() + t * kStack;
    all[t].context.uc_stack.ss_size = kStack;
    all[t].context.uc_link = &scheduler;
    makecontext(&all[t].context, start, 0);
  }
  std::vector<uint32_t> order(threads);
  for (uint32_t t = 0; t < threads; t++) order[t] = t;
  for (bool moved = true; moved;) {
    moved = false;
    if (dice() % 4) std::shuffle(order.begin(), order.end(), dice);
    for (const uint32_t t : order) {
      if (all[t].is_done || all[t].waits) continue;
      current = t;
      threadIdx = {t};
      swapcontext(&scheduler, &all[t].context);
      moved = true;
    }
    release(threads);
  }
  for (const Fiber &f : all)
    if (!f.is_done) abort();  // a barrier that some threads never reach
}

// Runs the blocks one after another, also in an order drawn by the seed.
inline void launch(uint32_t blocks, uint32_t threads, uint32_t seed, const std::function<void()> &kernel) {
  std::mt19937 dice(seed);
  std::vector<uint32_t> order(blocks);
  for (uint32_t b = 0; b < blocks; b++) order[b] = b;
  std::shuffle(order.begin(), order.end(), dice);
  gridDim = {blocks};
  for (const uint32_t b : order) {
    blockIdx = {b};
    run_block(threads, kernel, dice);
  }
}

}  // namespace fibers

inline void __syncthreads() { fibers::wait(0); }

template <typename T>
inline T from_lane(T value, int lane) {
  const uint32_t me = threadIdx.x, row = me / fibers::kRow;
  memcpy(&fibers::lanes[me], &value, sizeof value);
  fibers::wait(1 + row);
  T other;
  memcpy(&other, &fibers::lanes[fibers::kRow * row + (uint32_t)lane], sizeof other);
  fibers::wait(1 + row);
  return other;
}
template <typename T>
inline T from_lane_xor(T value, int mask) {
  return from_lane(value, (int)(threadIdx.x % fibers::kRow) ^ mask);
}

template <typename T>
inline T atomicAdd(T *at, T value) {
  const T before = *at;
  *at += value;
  return before;
}
