// Makes the CPU build of torch believe in a CUDA device, for tensors under a FakeTensorMode: a device guard, without
// which autograd aborts, and hooks that say that CUDA is available, without which backward fails.
#include <ATen/ATen.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

namespace {
using namespace c10;

const Device kFirst(kCUDA, 0);

struct Guard : public impl::NoOpDeviceGuardImpl<kCUDA> {
  Device exchangeDevice(Device) const override { return kFirst; }
  Device getDevice() const override { return kFirst; }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, kFirst); }
  Stream getDefaultStream(Device) const override { return Stream(Stream::DEFAULT, kFirst); }
  Stream getNewStream(Device, int) const override { return Stream(Stream::DEFAULT, kFirst); }
  Stream exchangeStream(Stream) const noexcept override { return Stream(Stream::DEFAULT, kFirst); }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void recordDataPtrOnStream(const DataPtr&, const Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

// torch looks the hooks up under this name.
struct CUDAHooks : public at::CUDAHooksInterface {
  CUDAHooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex current_device() const override { return 0; }
  int getNumGPUs() const override { return 1; }
  bool isPinnedPtr(const void*) const override { return false; }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(kCPU); }
};
using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
// Before those of a build for CUDA, whose GPUs are hidden while it plans.
C10_REGISTER_TYPED_CLASS_WITH_PRIORITY(CUDAHooksRegistry, "CUDAHooks", c10::REGISTRY_PREFERRED, CUDAHooks);

#ifndef CUDA_SHIM_HAS_VALUES
// GPUs have one kernel for these; where none is registered, torch takes them apart.
void no_values(const c10::OperatorHandle& op, torch::jit::Stack*) {
  TORCH_CHECK(false, op.schema().name(), ": tensors of a plan have no values");
}
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  for (const char* name : {"silu_backward", "_fused_rms_norm", "_fused_rms_norm_backward"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&no_values>());
}
#endif
}  // namespace

