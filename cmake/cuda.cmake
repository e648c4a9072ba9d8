# SPDX-License-Identifier: Apache-2.0
# The CUDA backend (LEANATTN_CUDA, where a toolkit is found). Needs no GPU to build. A register spill is an error, but
# with LEANATTN_TIMELINE.
set(LEANATTN_CUDA_OBJECTS "")
set(LEANATTN_CUDA_LIBRARY "")
if(LEANATTN_CUDA)
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    find_package(CUDAToolkit QUIET)
  endif()
  if(NOT CUDAToolkit_FOUND OR CUDAToolkit_VERSION VERSION_LESS 12.8)
    message(STATUS "leanattn: no CUDA toolkit 12.8 or later found; the library is built without its CUDA backend")
    set(LEANATTN_CUDA OFF)
  endif()
endif()
if(NOT LEANATTN_CUDA)
  target_sources(leanattn_objects PRIVATE src/cuda/absent.cpp)
  return()
endif()
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES 80-real 90-real 90-virtual)  # 80 also serves 8.6 and 8.9; PTX what comes later
endif()
enable_language(CUDA)

add_library(leanattn_cuda_flags INTERFACE)
target_compile_features(leanattn_cuda_flags INTERFACE cuda_std_20)
if(NOT LEANATTN_TIMELINE)  # its marks take registers, and its times are of no account
  target_compile_options(leanattn_cuda_flags INTERFACE
    "$<$<COMPILE_LANGUAGE:CUDA>:-Xptxas=--warn-on-spills,--warning-as-error;-Werror=all-warnings>")
endif()
target_compile_options(leanattn_cuda_flags INTERFACE
  "$<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-Wextra;--expt-relaxed-constexpr>")

add_library(leanattn_cuda_objects OBJECT src/cuda/backend.cu src/cuda/inst_bf16.cu src/cuda/inst_f16.cu src/cuda/merge.cu)
add_library(leanattn_cuda_90a_objects OBJECT src/cuda/inst_warpgroup.cu)
set_target_properties(leanattn_cuda_90a_objects PROPERTIES CUDA_ARCHITECTURES 90a-real)  # wgmma is nowhere else, not even later
foreach(part leanattn_cuda_objects leanattn_cuda_90a_objects)
  set_target_properties(${part} PROPERTIES
    POSITION_INDEPENDENT_CODE ON CXX_VISIBILITY_PRESET hidden CUDA_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON)
  target_include_directories(${part} PRIVATE include src)
  target_link_libraries(${part} PRIVATE leanattn_cuda_flags CUDA::cudart_static)
  if(LEANATTN_TIMELINE)
    target_compile_definitions(${part} PRIVATE LEANATTN_TIMELINE)
  endif()
endforeach()
set(LEANATTN_CUDA_OBJECTS $<TARGET_OBJECTS:leanattn_cuda_objects> $<TARGET_OBJECTS:leanattn_cuda_90a_objects>)
set(LEANATTN_CUDA_LIBRARY CUDA::cudart_static)

if(LEANATTN_BUILD_TESTS)
  add_library(schedule_device OBJECT tests/schedule_device.cu)
  target_include_directories(schedule_device PRIVATE include src)
  target_link_libraries(schedule_device PRIVATE leanattn_cuda_flags)
endif()
