// Copies between host and device, with the semantics that CUDA documents: copies from and to pinned memory are queued;
// pageable source memory is read, and pageable destination memory is written, before the call returns.
#pragma once

#include "kernels.h"

namespace emulated {

inline Tensor borrowed(const Tensor &host) {
  return at::from_blob(host.data_ptr(), host.sizes(), host.strides(), host.options().requires_grad(false));
}

inline std::function<void()> copying(const Tensor &to, const Tensor &from) {
  return [to, from] {
    const OnCpu plain;
    Tensor(to).copy_(from);
  };
}

inline Tensor between_devices(const Tensor &src, const Tensor &dst) {
  Queue &from = here(src.get_device()), &to = here(dst.get_device());
  if (&from == &to) {
    enqueue(from, copying(shadow(dst), shadow(src)));
    return dst;
  }
  const Point copied = enqueue(from, copying(shadow(dst), shadow(src)), {to.end()});
  append(to, nullptr, {copied});
  return dst;
}

inline Tensor copy_from(const Tensor &self, const Tensor &dst, bool non_blocking) {
  const OnCpu plain;
  if (!dst.numel()) return dst;
  const Tensor src = self.expand_as(dst);
  if (src.is_privateuseone() && dst.is_privateuseone()) return between_devices(src, dst);
  const bool down = src.is_privateuseone();
  const Tensor &host = down ? dst : src;
  Queue &queue = here((down ? src : dst).get_device());
  const bool dense = host.is_non_overlapping_and_dense() && src.strides() == dst.strides();
  const bool direct = dense && (down || src.dtype() == dst.dtype()) && !src.is_conj() && !src.is_neg();
  if (non_blocking && direct && HostMemory::find(host.const_data_ptr())) {
    enqueue(queue, down ? copying(borrowed(dst), shadow(src)) : copying(shadow(dst), borrowed(src)));
    host_memory.record_event(host.data_ptr(), nullptr,
                             Guard::stream({kType, static_cast<DeviceIndex>(queue.device)}, queue.id));
  } else if (down) {
    wait_for(enqueue(queue, copying(borrowed(dst), shadow(src))));
  } else {
    const Point copied = enqueue(queue, copying(shadow(dst), src.clone()));
    if (!non_blocking) wait_for(copied);
  }
  return dst;
}

inline Tensor copy_from_and_resize(const Tensor &self, const Tensor &dst) {
  at::native::resize_(dst, self.sizes());
  return copy_from(self, dst, false);
}

}  // namespace emulated
