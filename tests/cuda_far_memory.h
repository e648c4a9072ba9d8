// SPDX-License-Identifier: Apache-2.0
// A range of device addresses far larger than the device's memory: one physical chunk of NaN stands behind all of it, and chunks of
// their own stand where rows are. Through the driver's virtual memory, found by the runtime, so that nothing more is linked.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <set>
#include <string>
#include <vector>

#include "cuda_memory.h"

namespace leanattn::testing {

class FarMemory {
 public:
  static constexpr std::size_t kChunkBytes = std::size_t{8} << 20;

  // Empty when the device and the driver have what this needs.
  static std::string why_not() {
    int device = 0, supported = 0;
    must(cudaGetDevice(&device), "cudaGetDevice");
    const auto ask = entry<CUresult(CUdevice*, int)>("cuDeviceGet");
    const auto attribute = entry<CUresult(int*, CUdevice_attribute, CUdevice)>("cuDeviceGetAttribute");
    CUdevice handle = 0;
    if (!ask || !attribute || !entry<CUresult()>("cuMemAddressReserve") || ask(&handle, device) != CUDA_SUCCESS) {
      return "this driver has no virtual memory management";
    }
    attribute(&supported, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, handle);
    return supported ? "" : "this device has no virtual memory management";
  }

  // bytes: a multiple of kChunkBytes. own: the chunks, by number, that are not the common one.
  FarMemory(std::size_t bytes, const std::set<std::size_t>& own) : bytes_(bytes) {
    must(cudaGetDevice(&device_), "cudaGetDevice");
    require(reserve_(&base_, bytes, kChunkBytes, 0, 0), "cuMemAddressReserve");
    const CUmemGenericAllocationHandle nan = create();
    for (std::size_t chunk = 0; chunk < bytes / kChunkBytes; ++chunk) {
      require(map_(base_ + chunk * kChunkBytes, kChunkBytes, 0, own.count(chunk) ? create() : nan, 0), "cuMemMap");
      ++mapped_;
    }
    CUmemAccessDesc access{};
    access.location = {CU_MEM_LOCATION_TYPE_DEVICE, device_};
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    require(set_access_(base_, bytes, &access, 1), "cuMemSetAccess");
    bool nan_is_set = false;
    for (std::size_t chunk = 0; chunk < bytes / kChunkBytes; ++chunk) {
      if (!own.count(chunk) && std::exchange(nan_is_set, true)) continue;
      must(cudaMemset(data() + chunk * kChunkBytes, kNanByte, kChunkBytes), "cudaMemset");
    }
    must(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
  }
  ~FarMemory() {
    cudaDeviceSynchronize();
    if (mapped_ > 0) unmap_(base_, mapped_ * kChunkBytes);
    for (const CUmemGenericAllocationHandle handle : chunks_) release_(handle);
    if (base_) free_(base_, bytes_);
  }
  FarMemory(const FarMemory&) = delete;

  std::byte* data() const { return reinterpret_cast<std::byte*>(base_); }

 private:
  template <class Function>
  static Function* entry(const char* name) {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult answer{};
    constexpr unsigned kVersion = 12000;
    if (cudaGetDriverEntryPointByVersion(name, &found, kVersion, cudaEnableDefault, &answer) != cudaSuccess) {
      cudaGetLastError();
      return nullptr;
    }
    return answer == cudaDriverEntryPointSuccess ? reinterpret_cast<Function*>(found) : nullptr;
  }
  static void require(CUresult answer, const char* what) {
    if (answer != CUDA_SUCCESS) throw std::runtime_error(std::string(what) + ": CUDA's driver answers " + std::to_string(answer));
  }
  CUmemGenericAllocationHandle create() {
    CUmemAllocationProp properties{};
    properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, device_};
    CUmemGenericAllocationHandle handle{};
    require(create_(&handle, kChunkBytes, &properties, 0), "cuMemCreate");
    chunks_.push_back(handle);
    return handle;
  }

  decltype(&cuMemAddressReserve) reserve_ = entry<decltype(cuMemAddressReserve)>("cuMemAddressReserve");
  decltype(&cuMemAddressFree) free_ = entry<decltype(cuMemAddressFree)>("cuMemAddressFree");
  decltype(&cuMemCreate) create_ = entry<decltype(cuMemCreate)>("cuMemCreate");
  decltype(&cuMemRelease) release_ = entry<decltype(cuMemRelease)>("cuMemRelease");
  decltype(&cuMemMap) map_ = entry<decltype(cuMemMap)>("cuMemMap");
  decltype(&cuMemUnmap) unmap_ = entry<decltype(cuMemUnmap)>("cuMemUnmap");
  decltype(&cuMemSetAccess) set_access_ = entry<decltype(cuMemSetAccess)>("cuMemSetAccess");
  int device_ = 0;
  std::size_t bytes_ = 0, mapped_ = 0;
  CUdeviceptr base_ = 0;
  std::vector<CUmemGenericAllocationHandle> chunks_;
};

}  // namespace leanattn::testing
