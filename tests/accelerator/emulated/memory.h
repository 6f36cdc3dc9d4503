// Memory of the emulated devices, and pinned memory of the host.
//
// A device's memory has two addresses. data_ptr() returns an address in a PROT_NONE reservation, so a host access
// faults; kernels and copies use a shadow of it. Freed memory is overwritten as early as CUDA's caching allocators
// could reuse it.
#pragma once

#include <ATen/core/CachingHostAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <set>

#include "streams.h"

namespace emulated {

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr size_t kSpace = size_t{1} << 36;  // bytes of addresses per device
constexpr size_t kGrain = 512;              // allocation granularity, as with CUDA
constexpr int kPoison = 0xff;               // NaN as a float, -1 as an integer

struct Block {
  char *begin;
  size_t size;
  Queue *queue;               // device memory: the stream for which it was allocated
  std::set<Queue *> users{};  // other streams that use it
  std::vector<Point> uses{};  // the ends of their queues when it was freed

  bool idle() const {
    return std::all_of(uses.begin(), uses.end(), [](const Point &p) { return p.passed(); });
  }
  void free() {
    uses.clear();
    for (Queue *user : users) uses.push_back(user->end());
    users.clear();
  }
};

struct Space {
  char *face, *shadow;
  size_t used = 0;
  std::multimap<std::pair<Queue *, size_t>, Block *> free{};
  std::vector<Block *> busy{};  // freed, but still used by other streams
  c10::CachingDeviceAllocator::DeviceStats stats{};
};

inline char *reserve(int access) {
  void *at = mmap(nullptr, kSpace, access, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(at != MAP_FAILED, "no addresses for an emulated device");
  return static_cast<char *>(at);
}

inline std::vector<Space> &spaces() {
  static auto *all = [] {
    auto *made = new std::vector<Space>;
    for (int i = 0; i < kDevices; i++) made->push_back({reserve(PROT_NONE), reserve(PROT_READ | PROT_WRITE)});
    return made;
  }();
  return *all;
}

inline char *shadow_of(const void *pointer, int device) {
  auto *p = static_cast<char *>(const_cast<void *>(pointer));
  return p ? spaces()[device].shadow + (p - spaces()[device].face) : nullptr;
}

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t n) override {
    LOCKED;
    const int device = current_device;
    const c10::Device where(kType, static_cast<c10::DeviceIndex>(device));
    if (!n) return {nullptr, nullptr, &release, where};
    Space &space = spaces()[device];
    Queue &queue = here(device);
    std::erase_if(space.busy, [&](Block *b) { return b->idle() && (give(space, b, true), true); });
    const size_t size = (n + kGrain - 1) / kGrain * kGrain;
    Block *block;
    if (auto found = space.free.find({&queue, size}); found != space.free.end()) {
      block = found->second;
      space.free.erase(found);
    } else {
      TORCH_CHECK_WITH(OutOfMemoryError, space.used + size <= kSpace, "emulated device is full");
      block = new Block{space.face + space.used, size, &queue};
      space.used += size;
      memset(shadow_of(block->begin, device), kPoison, size);
    }
    space.stats.allocated_bytes[0].increase(size);
    return {block->begin, block, &release, where};
  }

  static void release(void *context) {
    if (!context) return;
    LOCKED;
    auto *block = static_cast<Block *>(context);
    Space &space = spaces()[block->queue->device];
    space.stats.allocated_bytes[0].decrease(block->size);
    block->free();
    if (block->uses.empty()) give(space, block, false);
    else space.busy.push_back(block);
  }

  // Makes a block available to the next allocation on its stream, and poisons it: in the order of the stream, or `now`
  // if other streams used it, which are done with it.
  static void give(Space &space, Block *block, bool now) {
    char *shadow = shadow_of(block->begin, block->queue->device);
    space.free.insert({{block->queue, block->size}, block});
    if (now) memset(shadow, kPoison, block->size);
    else append(*block->queue, [shadow, n = block->size] { memset(shadow, kPoison, n); });
  }

  void recordStream(const c10::DataPtr &data, c10::Stream stream) override {
    LOCKED;
    auto *block = static_cast<Block *>(data.get_context());
    Queue &queue = queue_of(stream.device_index(), stream.id());
    if (block && &queue != block->queue) block->users.insert(&queue);
  }

  void copy_data(void *, const void *, size_t) const override { TORCH_CHECK(false, "not emulated"); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex d) override { return spaces()[d].stats; }
  void resetAccumulatedStats(c10::DeviceIndex d) override { spaces()[d].stats.allocated_bytes[0].reset_accumulated(); }
  void resetPeakStats(c10::DeviceIndex d) override { spaces()[d].stats.allocated_bytes[0].reset_peak(); }
};
inline DeviceMemory device_memory;

// Pinned memory: as in CUDA's caching host allocator, a block that copies still use is not reused.
struct HostMemory final : at::HostAllocator {
  static std::map<char *, Block *> &blocks() {
    static auto *all = new std::map<char *, Block *>;
    return *all;
  }
  static std::vector<Block *> &unused() {
    static auto *all = new std::vector<Block *>;
    return *all;
  }

  static Block *find(const void *pointer) {
    LOCKED;
    auto *p = static_cast<char *>(const_cast<void *>(pointer));
    auto it = blocks().upper_bound(p);
    if (it == blocks().begin() || p >= (--it)->second->begin + it->second->size) return nullptr;
    return it->second;
  }

  c10::DataPtr allocate(size_t n) override {
    LOCKED;
    if (!n) return {nullptr, nullptr, &release, c10::Device(at::kCPU)};
    const size_t size = (n + 4095) / 4096 * 4096;
    auto it = std::find_if(unused().begin(), unused().end(), [&](Block *b) { return b->size == size && b->idle(); });
    Block *block;
    if (it != unused().end()) {
      block = *it;
      unused().erase(it);
    } else {
      block = new Block{static_cast<char *>(std::aligned_alloc(4096, size)), size, nullptr};
      blocks()[block->begin] = block;
    }
    memset(block->begin, kPoison, size);
    return {block->begin, block, &release, c10::Device(at::kCPU)};
  }

  static void release(void *context) {
    LOCKED;
    if (!context) return;
    static_cast<Block *>(context)->free();
    unused().push_back(static_cast<Block *>(context));
  }

  bool record_event(void *pointer, void *, c10::Stream stream) override {
    LOCKED;
    Block *block = find(pointer);
    if (block) block->users.insert(&queue_of(stream.device_index(), stream.id()));
    return block;
  }

  void copy_data(void *to, const void *from, size_t n) const override { memcpy(to, from, n); }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
inline HostMemory host_memory;

}  // namespace emulated
