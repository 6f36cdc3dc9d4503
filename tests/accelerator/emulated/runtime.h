// Torch's interfaces to a device: the current device, streams, events, pinned memory.
#pragma once

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>

#include "memory.h"

namespace emulated {

using c10::Device, c10::DeviceIndex, c10::Stream, c10::StreamId;

struct Event {
  Point at;
  unsigned asked = 0;  // how often it was queried before it had passed: polling counts as waiting, once per event
};

inline Queue &queue_of(const Stream &s) { return queue_of(s.device_index(), s.id()); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }
  Device getDevice() const override { return {kType, static_cast<DeviceIndex>(current_device)}; }
  void setDevice(Device d) const override { uncheckedSetDevice(d); }
  void uncheckedSetDevice(Device d) const noexcept override {
    if (d.index() >= 0) current_device = d.index();
  }
  Device exchangeDevice(Device d) const override {
    const Device before = getDevice();
    uncheckedSetDevice(d);
    return before;
  }

  static DeviceIndex index_of(Device d) { return d.index() < 0 ? static_cast<DeviceIndex>(current_device) : d.index(); }
  static Stream stream(Device d, StreamId id) { return Stream(Stream::UNSAFE, Device(kType, index_of(d)), id); }
  Stream getStream(Device d) const noexcept override { return stream(d, current_stream[index_of(d)]); }
  Stream getDefaultStream(Device d) const override { return stream(d, 0); }
  Stream getStreamFromGlobalPool(Device d, bool) const override { return getNewStream(d); }
  Stream getNewStream(Device d, int = 0) const override {
    static std::atomic<StreamId> last{0};
    return stream(d, ++last);
  }
  Stream exchangeStream(Stream s) const override {
    const Stream before = getStream(s.device());
    current_stream[s.device_index()] = s.id();
    return before;
  }
  bool queryStream(const Stream &s) const override { return query(queue_of(s).end()); }
  void synchronizeStream(const Stream &s) const override { wait_for(queue_of(s).end()); }
  bool isStreamCapturing(const Stream &) const override { return capturing; }
  void synchronizeDevice(DeviceIndex device) const override {
    LOCKED;
    for (auto &[key, queue] : queues())
      if (device < 0 || queue.device == device) wait_for(queue.end());
  }

  void record(void **event, const Stream &s, DeviceIndex, c10::EventFlag) const override {
    LOCKED;
    if (!*event) *event = new Event{};
    *static_cast<Event *>(*event) = {queue_of(s).end()};
  }
  void block(void *event, const Stream &s) const override {
    if (event) enqueue(queue_of(s), nullptr, {static_cast<Event *>(event)->at});
  }
  bool queryEvent(void *event) const override {
    LOCKED;
    if (!event) return true;
    auto *e = static_cast<Event *>(event);
    // Twice as many pieces each time: for a host that polls, asking takes longer than most kernels.
    const bool passed = query(e->at, 1u << std::min(e->asked, 6u));
    if (!passed && !e->asked++) waited++;
    return passed;
  }
  void synchronizeEvent(void *event) const override {
    if (event) wait_for(static_cast<Event *>(event)->at);
  }
  void destroyEvent(void *event, DeviceIndex) const noexcept override { delete static_cast<Event *>(event); }
  double elapsedTime(void *, void *, DeviceIndex) const override { return 0; }
  void recordDataPtrOnStream(const c10::DataPtr &data, const Stream &s) const override {
    device_memory.recordStream(data, s);
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return kDevices; }
  DeviceIndex getCurrentDevice() const override { return static_cast<DeviceIndex>(current_device); }
  void setCurrentDevice(DeviceIndex d) const override { exchangeDevice(d); }
  DeviceIndex exchangeDevice(DeviceIndex d) const override {
    if (d < 0) return getCurrentDevice();
    TORCH_CHECK(d < kDevices, "no emulated device ", int(d));
    return static_cast<DeviceIndex>(std::exchange(current_device, d));
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override {
    return d < kDevices ? exchangeDevice(d) : getCurrentDevice();
  }
  bool isPinnedPtr(const void *p) const override { return HostMemory::find(p); }
  at::Allocator *getPinnedMemoryAllocator() const override { return &host_memory; }
  Device getDeviceFromPtr(void *p) const override {
    for (DeviceIndex d = 0; d < kDevices; d++)
      if (p >= spaces()[d].face && p < spaces()[d].face + kSpace) return {kType, d};
    TORCH_CHECK(false, "no memory of an emulated device");
  }
  void resizePrivateUse1Bytes(const c10::Storage &storage, size_t size) const override {
    const int device = storage.device().index();
    const c10::DeviceGuard guard(storage.device());
    auto data = device_memory.allocate(size);
    char *to = shadow_of(data.get(), device), *from = shadow_of(storage.data(), device);
    if (size_t n = std::min(size, storage.nbytes())) enqueue(here(device), [=] { memcpy(to, from, n); });
    storage.unsafeGetStorageImpl()->set_data_ptr(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(size);
  }
};

}  // namespace emulated
