// Kernels: those of the CPU, queued, on the shadow of a device's memory.
//
// One fallback serves every operator. Shapes come from the Meta kernel, outputs are allocated, and the CPU kernel is
// queued. As in a CUDA launch, its arguments are borrowed and not kept alive. Views are made at once. An operator whose
// output shape depends on elements (nonzero, masks) waits for its stream, as on CUDA.
#pragma once

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/resize_native.h>
#include <torch/library.h>

#include <map>
#include <optional>
#include <sstream>
#include <string>

#include "runtime.h"

namespace emulated {

using at::Tensor;
using c10::DispatchKey, c10::DispatchKeySet, c10::IValue;
using torch::jit::Stack;

struct OnCpu {  // turns off the dispatch modes of the caller
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard no_autocast{at::autocast_dispatch_keyset};
  c10::impl::ExcludeDispatchKeyGuard no_python{DispatchKeySet{DispatchKey::Python, DispatchKey::PythonTLSSnapshot}};
};

// Ignores warnings, for shape attempts and for kernels, which run long after their caller.
inline struct : c10::WarningHandler {
  void process(const c10::Warning &) override {}
} silent;

// A CPU tensor with the same elements, at the shadow address that kernels use.
inline Tensor shadow(const Tensor &t) {
  const auto n = static_cast<int64_t>(t.storage().nbytes() / t.itemsize());
  Tensor s =
      at::from_blob(shadow_of(t.storage().data(), t.get_device()), {n}, at::TensorOptions(t.dtype()).device(at::kCPU));
  s = s.as_strided(t.sizes(), t.strides(), t.storage_offset());
  if (t.is_conj()) s._set_conj(true);
  if (t.is_neg()) s._set_neg(true);
  return s;
}

inline Tensor as_number(const Tensor &t, const Tensor &like) {  // keeps Python numbers from affecting a result's dtype
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) t.unsafeGetTensorImpl()->set_wrapped_number(true);
  return t;
}
inline Tensor meta(const Tensor &t) {
  if (t.is_cpu() && !t.dim()) return t;
  return at::empty_strided(t.sizes(), t.strides(), at::TensorOptions(t.dtype()).device(at::kMeta));
}
inline Tensor on_device(const Tensor &like, Device device) {
  return at::empty_strided(like.sizes(), like.strides(), at::TensorOptions(like.dtype()).device(device));
}

// A copy of a value with f applied to all tensors in it, and any device replaced by `device`.
template <class F>
IValue mapped(const IValue &v, Device device, const F &f) {
  auto one = [&](const Tensor &t) { return t.defined() ? f(t) : t; };
  if (v.isTensor()) return one(v.toTensor());
  if (v.isDevice()) return device;
  if (v.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor &t : v.toTensorVector()) list.push_back(one(t));
    return list;
  }
  if (v.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> list;
    for (const auto &t : v.toOptionalTensorVector()) list.push_back(t ? std::optional(one(*t)) : t);
    return list;
  }
  return v;
}
template <class F>
Stack all_mapped(const Stack &values, Device device, const F &f) {
  Stack out;
  for (const IValue &v : values) out.push_back(mapped(v, device, f));
  return out;
}

// The device on which an operator runs. Arguments on the host, or on two devices, are an error, as on CUDA.
inline Device device_of(const c10::OperatorHandle &op, c10::ArrayRef<IValue> arguments) {
  int device = -1, named = current_device;
  bool host = false;
  auto look = [&](const Tensor &t) {
    if (t.is_privateuseone()) {
      TORCH_CHECK(device < 0 || device == t.get_device(), op.operator_name(), ": tensors on two devices");
      device = static_cast<int>(t.get_device());
    } else if (t.is_cpu() && t.dim()) host = true;
    return t;
  };
  for (const IValue &v : arguments) {
    mapped(v, at::kCPU, look);
    if (v.isDevice() && v.toDevice().has_index()) named = v.toDevice().index();
  }
  const std::string &name = op.operator_name().name;
  const bool indexes =
      name.starts_with("aten::index") || name == "aten::_index_put_impl_";  // these accept indices on the host
  TORCH_CHECK(device < 0 || !host || indexes, op.operator_name(), ": tensors on the host and on a device");
  return {kType, static_cast<DeviceIndex>(device < 0 ? named : device)};
}

inline void on_cpu(const c10::OperatorHandle &op, Stack &stack) {
  op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), &stack);
}

// Turns a view of the shadow of `base` into the same view of `base`.
inline IValue view_of(const IValue &v, const Tensor &base) {
  return mapped(v, base.device(), [&](const Tensor &cpu) {
    auto t = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(base.storage()),
                                                      DispatchKeySet(DispatchKey::PrivateUse1), cpu.dtype());
    const char *begin = shadow_of(base.storage().data(), static_cast<int>(base.get_device()));
    const auto bytes = begin ? static_cast<const char *>(cpu.const_data_ptr()) - begin : 0;
    t.unsafeGetTensorImpl()->set_storage_offset(bytes / static_cast<int64_t>(cpu.itemsize()));
    t.unsafeGetTensorImpl()->set_sizes_and_strides(cpu.sizes(), cpu.strides());
    return t;
  });
}

// Properties of an operator, from its schema.
struct Traits {
  bool is_view;   // returns aliases of its arguments' memory
  bool in_place;  // returns its arguments
  bool into;      // returns `out` arguments
  bool random;    // takes a generator
  bool counts;    // returns not only tensors, or is random without a generator: runs when the stream is done

  explicit Traits(const c10::OperatorHandle &op) {
    const auto &arguments = op.schema().arguments();
    const auto &results = op.schema().returns();
    auto any = [](const auto &list, auto f) { return std::any_of(list.begin(), list.end(), f); };
    is_view = any(results, [](auto &r) { return r.alias_info() && !r.alias_info()->isWrite(); });
    in_place = !any(results, [](auto &r) { return !r.alias_info(); });
    into = in_place && any(arguments, [](auto &a) { return a.is_out(); });
    random = any(arguments, [](auto &a) { return a.name() == "generator"; });
    counts = any(results, [](auto &r) {
      return r.type()->kind() != c10::TypeKind::TensorType && r.type()->kind() != c10::TypeKind::ListType;
    });
    counts |= !random && op.hasTag(at::Tag::nondeterministic_seeded);
  }
};

// Everything that the shapes of the results may depend on.
inline std::string signature(const c10::OperatorHandle &op, const Stack &given) {
  std::ostringstream s;
  s << op.operator_name();
  for (const IValue &v : given) {
    s << '|' << v.tagKind() << ' ';
    if (v.isTensor() || v.isTensorList() || v.isOptionalTensorList())
      mapped(v, at::kCPU, [&](const Tensor &t) {
        s << t.sizes() << t.strides() << t.dtype() << t.device() << t.unsafeGetTensorImpl()->is_wrapped_number() << ',';
        return t;
      });
    else if (!v.isGenerator()) s << v;
  }
  return s.str();
}

// The shapes of the results; none if they depend on elements. Cached, because many Meta kernels are in Python and slow.
inline std::optional<Stack> shapes_of(const c10::OperatorHandle &op, const Stack &given) {
  static auto *known = new std::map<std::string, std::optional<Stack>>;  // guarded by lock()
  const std::string key = signature(op, given);
  {
    LOCKED;
    if (auto found = known->find(key); found != known->end()) return found->second;
  }
  const c10::WarningUtils::WarningHandlerGuard quiet(&silent);
  std::optional<Stack> shapes;
  try {
    Stack metas = all_mapped(given, at::kMeta, meta);
    op.redispatchBoxed(DispatchKeySet(DispatchKey::Meta), &metas);
    shapes = std::move(metas);
  } catch (const std::exception &) {}
  LOCKED;
  return known->try_emplace(key, std::move(shapes)).first->second;
}

// Random numbers: each launch draws a seed from the CPU's generator, so they are the same under every schedule.
inline void draw_seed(const c10::OperatorHandle &op, const Stack &given, Stack &arguments) {
  for (size_t i = 0; i < given.size(); i++)
    if (op.schema().arguments()[i].name() == "generator" && given[i].isNone()) {
      at::Generator host = at::detail::getDefaultCPUGenerator();
      const std::lock_guard<std::mutex> drawn(host.mutex());
      arguments[i] = at::make_generator<at::CPUGeneratorImpl>(host.get<at::CPUGeneratorImpl>()->random64());
    }
}

inline void write_back(const Stack &to, const Stack &from) {
  for (size_t i = 0; i < to.size(); i++) {
    if (to[i].isTensor()) to[i].toTensor().copy_(from[i].toTensor());
    if (to[i].isTensorList()) {
      auto parts = to[i].toTensorVector(), values = from[i].toTensorVector();
      for (size_t k = 0; k < parts.size(); k++) parts[k].copy_(values[k]);
    }
  }
}

inline void kernel(const c10::OperatorHandle &op, Stack *stack) {
  const OnCpu plain;
  const auto &schema = op.schema();
  const Traits traits(op);
  const Stack given = torch::jit::pop(*stack, schema.arguments().size());
  const Device device = device_of(op, given);
  const c10::DeviceGuard guard(device);
  Queue &queue = here(device.index());
  Stack arguments = all_mapped(given, at::kCPU, [](const Tensor &t) {
    return as_number(t.is_privateuseone() ? shadow(t) : t.is_cpu() ? t.clone() : t, t);  // scalars are passed by value
  });
  if (traits.is_view) {
    on_cpu(op, arguments);
    for (const IValue &v : arguments) stack->push_back(view_of(v, given[0].toTensor()));
    return;
  }
  std::optional<Stack> shapes;
  const bool asks = !traits.in_place || traits.into;
  if (!traits.counts && asks) shapes = shapes_of(op, given);
  const bool waits = traits.counts || (asks && !shapes);
  if (traits.into && shapes)
    for (size_t i = 0, k = 0; i < given.size(); i++)
      if (schema.arguments()[i].is_out() && given[i].isTensor()) {
        const Tensor &out = given[i].toTensor();
        const auto sizes = (*shapes)[k++].toTensor().sizes();
        if (out.sizes() == sizes) continue;
        at::native::resize_(out, sizes);
        arguments[i] = shadow(out);
      }
  if (traits.random) draw_seed(op, given, arguments);

  const size_t n = schema.returns().size();
  auto fresh = [&](const Tensor &t) { return on_device(t, device); };
  Stack out(n);
  if (waits) {
    wait_for(queue.end());
    on_cpu(op, arguments);
    auto copied = [&](const Tensor &t) {
      Tensor d = fresh(t);
      run_to(queue.end());
      shadow(d).copy_(t);
      return d;
    };
    for (size_t i = 0; i < n; i++)
      if (!schema.returns()[i].alias_info()) out[i] = mapped(arguments[i], device, copied);
  } else {
    Stack into;  // the shadows of the results
    if (!traits.in_place) {
      out = all_mapped(*shapes, device, fresh);
      into = all_mapped(out, at::kCPU, shadow);
    }
    enqueue(queue, [op, arguments = std::move(arguments), into = std::move(into)]() mutable {
      const OnCpu plain;
      const c10::WarningUtils::WarningHandlerGuard quiet(&silent);
      on_cpu(op, arguments);
      write_back(into, arguments);
    });
  }
  for (size_t i = 0; i < n; i++) {
    if (const auto *returned = schema.returns()[i].alias_info())
      for (size_t k = 0; k < given.size(); k++)
        if (const auto *info = schema.arguments()[k].alias_info(); info && *info == *returned) out[i] = given[k];
    stack->push_back(out[i]);
  }
}

}  // namespace emulated
