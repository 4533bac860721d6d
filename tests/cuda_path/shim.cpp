// The shim of smp/plan, and memory for its tensors. Without a FakeTensorMode they hold memory of the host, and every
// operation falls back to the kernel for CPUs, on the same memory: streams and events mean nothing, values are real.
#define CUDA_SHIM_HAS_VALUES
#include "../../smp/plan/cuda_shim.cpp"

#include <ATen/EmptyTensor.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace {
using at::Tensor;

// Memory of the host that counts as the device's.
struct HostAllocator final : public c10::Allocator {
  at::DataPtr allocate(size_t bytes) override {
    void* memory = bytes ? std::aligned_alloc(64, (bytes + 63) / 64 * 64) : nullptr;
    return {memory, memory, &std::free, c10::Device(c10::kCUDA, 0)};
  }
  at::DeleterFnPtr raw_deleter() const override { return &std::free; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }
} allocator;

Tensor empty(at::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                   at::dtype_or_default(dtype), format);
}

Tensor empty_strided(at::SymIntArrayRef size, at::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::CUDA), at::dtype_or_default(dtype));
}

// The same memory as a tensor of the other device.
Tensor alias(const Tensor& tensor, c10::DeviceType type) {
  auto storage = tensor.storage();
  void* memory = storage.mutable_data();
  at::DataPtr pointer(memory, new c10::Storage(storage), [](void* s) { delete static_cast<c10::Storage*>(s); },
                      c10::Device(type, type == c10::kCUDA ? 0 : -1));
  auto made = c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(pointer),
                           type == c10::kCUDA ? static_cast<c10::Allocator*>(&allocator) : c10::GetAllocator(c10::kCPU), true);
  auto key = type == c10::kCUDA ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU;
  auto found = at::detail::make_tensor<c10::TensorImpl>(std::move(made), c10::DispatchKeySet(key), tensor.dtype());
  found.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return found;
}

bool on_device(const Tensor& tensor) { return tensor.defined() && tensor.is_cuda(); }

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto count = schema.arguments().size();
  const auto begin = stack->size() - count;
  std::vector<std::pair<Tensor, Tensor>> pairs;  // of the device, of the host
  auto host = [&](const Tensor& tensor) {
    if (!on_device(tensor)) return tensor;
    pairs.emplace_back(tensor, alias(tensor, c10::kCPU));
    return pairs.back().second;
  };
  for (size_t i = 0; i < count; ++i) {
    auto& value = (*stack)[begin + i];
    if (value.isTensor()) {
      value = host(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& each : value.toTensorVector()) list.push_back(host(each));
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const auto& each : value.toOptionalTensorList()) {
        std::optional<Tensor> one = each;
        list.push_back(one ? std::optional<Tensor>(host(*one)) : one);
      }
      value = list;
    } else if (value.isDevice()) {
      value = c10::Device(c10::kCPU);
    }
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  auto device = [&](const Tensor& tensor) {
    if (!tensor.defined() || !tensor.device().is_cpu()) return tensor;
    for (const auto& [own, theirs] : pairs) {
      if (theirs.is_same(tensor)) {
        if (own.sizes() != tensor.sizes() || own.strides() != tensor.strides()) {  // an out= that was resized
          own.unsafeGetTensorImpl()->set_storage_keep_dtype(alias(tensor, c10::kCUDA).storage());
          own.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
        }
        return own;
      }
    }
    for (const auto& [own, theirs] : pairs) {
      if (theirs.storage().unsafeGetStorageImpl() == tensor.storage().unsafeGetStorageImpl()) {  // a view
        auto view = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(own.storage()),
                                                            c10::DispatchKeySet(c10::DispatchKey::CUDA), tensor.dtype());
        view.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
        return view;
      }
    }
    return alias(tensor, c10::kCUDA);
  };
  const auto results = schema.returns().size();
  const auto first = stack->size() - results;
  for (size_t i = 0; i < results; ++i) {
    auto& value = (*stack)[first + i];
    if (value.isTensor()) {
      value = device(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& each : value.toTensorVector()) list.push_back(device(each));
      value = list;
    }
  }
}

Tensor& copy_(Tensor& self, const Tensor& source, bool) {
  auto to = on_device(self) ? alias(self, c10::kCPU) : self;
  at::AutoDispatchBelowADInplaceOrView guard;
  to.copy_(on_device(source) ? alias(source, c10::kCPU) : source);
  return self;
}

Tensor copy_from(const Tensor& self, const Tensor& to, bool) {
  Tensor target = to;
  copy_(target, self, false);
  return to;
}

Tensor as_strided(const Tensor& self, at::SymIntArrayRef size, at::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  auto view = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(self.storage()), self.key_set(), self.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
      offset ? offset->expect_int() : self.storage_offset());
  return view;
}

Tensor& set_(Tensor& self, at::Storage source, c10::SymInt offset, at::SymIntArrayRef size, at::SymIntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), offset.expect_int());
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage source) {
  const int64_t length = source.nbytes() / self.itemsize();
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  self.unsafeGetTensorImpl()->set_sizes_contiguous({length});
  return self;
}

void resize_storage(const Tensor& tensor, int64_t bytes) {
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  auto memory = allocator.allocate(bytes);
  if (auto kept = std::min<size_t>(bytes, storage->nbytes())) std::memcpy(memory.get(), storage->data(), kept);
  storage->set_data_ptr_noswap(std::move(memory));
  storage->set_nbytes(bytes);
}

const Tensor& resize_(const Tensor& self, at::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  self.unsafeGetTensorImpl()->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  auto need = (self.storage_offset() + self.numel()) * self.itemsize();
  if (need > static_cast<int64_t>(self.storage().nbytes())) resize_storage(self, need);
  return self;
}

int64_t math_attention(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                       std::optional<double>, bool) {
  return 0;  // SDPBackend.MATH
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("copy_", copy_);
  m.impl("_copy_from", copy_from);
  m.impl("as_strided", as_strided);
  m.impl("set_.source_Storage_storage_offset", set_);
  m.impl("set_.source_Storage", set_storage);
  m.impl("resize_", resize_);
  m.impl("_fused_sdp_choice", math_attention);
}

// For collectives, which gloo does on the host's tensors, and for storages, whose resize_ needs a build for CUDA.
TORCH_LIBRARY_FRAGMENT(cuda_shim, m) {
  m.def("resize_storage(Tensor tensor, int bytes) -> ()", resize_storage);
  m.def("on_host(Tensor tensor) -> Tensor", [](const Tensor& tensor) { return alias(tensor, c10::kCPU); });
}
}  // namespace
