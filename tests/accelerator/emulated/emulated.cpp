// Two accelerators emulated on the CPU, as PyTorch's PrivateUse1 device, to test synchronisation.
//
//   streams.h   queues of work, and the schedule that decides when it runs
//   memory.h    memory that faults when the host touches it, and is overwritten when freed
//   runtime.h   torch's interfaces to devices, streams and events
//   kernels.h   the CPU's kernels, queued
//   copies.h    copies between host and device
//
// Not emulated: graphs (but emu_capture pretends that one is captured), collectives, cudaHostRegister, IPC, time.
#include <ATen/EmptyTensor.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/set_native.h>

#include "copies.h"

namespace {

using namespace emulated;
using Layout = std::optional<at::Layout>;
using Dtype = std::optional<at::ScalarType>;

REGISTER_ALLOCATOR(kType, &device_memory)
REGISTER_HOST_ALLOCATOR(kType, &host_memory)
using RuntimeGuard = Guard;
C10_REGISTER_GUARD_IMPL(PrivateUse1, RuntimeGuard)
[[maybe_unused]] const bool hooked = (at::RegisterPrivateUse1HooksInterface(new Hooks), true);

Tensor empty(c10::IntArrayRef size, Dtype dtype, Layout, std::optional<Device> device, std::optional<bool>,
             std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  const DispatchKeySet key(DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, &device_memory, key, c10::dtype_or_default(dtype), format);
}
Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, Dtype dtype, Layout, std::optional<Device> device,
                     std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  const DispatchKeySet key(DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, &device_memory, key, c10::dtype_or_default(dtype));
}
at::Scalar item(const Tensor &t) {
  wait_for(here(static_cast<int>(t.get_device())).end());
  return at::native::_local_scalar_dense_cpu(shadow(t));
}
void record_stream(Tensor &t, Stream s) { device_memory.recordStream(t.storage().data_ptr(), s); }
bool compatible(const Tensor &, const Tensor &) { return true; }

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&kernel>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", item);
  m.impl("_has_compatible_shallow_copy_type", compatible);
  m.impl("record_stream", record_stream);
  m.impl("resize_", static_cast<const Tensor &(*)(const Tensor &, c10::IntArrayRef, std::optional<at::MemoryFormat>)>(
                        &at::native::resize_));
  m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_meta__symint);
  m.impl("set_.source_Storage", static_cast<Tensor &(*)(Tensor &, at::Storage)>(&at::native::set_));
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
}

}  // namespace

// For tests: see tests/support/emulated.py.
extern "C" {
void emu_schedule(int which, uint64_t seed) {
  LOCKED;
  Guard().synchronizeDevice(-1);
  order = static_cast<Order>(which);
  dice.seed(seed);
  for (auto &[key, queue] : queues()) queue.awake = order == kRandom && dice() % 2;  // not as the last schedule left it
}
void emu_capture(int on) {
  LOCKED;
  capturing = on;
}
// Queues a kernel on the current stream of a device: `run` runs it to its end (emulate.cpp).
void emu_launch(int device, int (*run)(const char *, const void *, uint32_t, uint32_t, const void *), const char *name,
                const void *args, size_t bytes, uint32_t blocks, uint32_t seed) {
  struct Memory {
    uint64_t begin, bytes, offset;
  };
  const Space &space = spaces()[static_cast<size_t>(device)];
  const Memory memory{reinterpret_cast<uint64_t>(space.face), kSpace, static_cast<uint64_t>(space.shadow - space.face)};
  std::string copy(static_cast<const char *>(args), bytes), kernel(name);
  enqueue(here(device), [=, copy = std::move(copy), kernel = std::move(kernel)] {
    if (run(kernel.c_str(), copy.data(), blocks, seed, &memory)) throw std::runtime_error("no kernel " + kernel);
  });
}
uint64_t emu_launched() { return launched; }
uint64_t emu_waited() { return waited; }
uint64_t emu_pending() {
  LOCKED;
  uint64_t n = 0;
  for (auto &[key, queue] : queues()) n += queue.work.size();
  return n;
}
}
