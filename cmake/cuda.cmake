# SPDX-License-Identifier: Apache-2.0
# LEANATTN_CUDA: compiles the shared host and device headers for the GPU. Needs no GPU. A register spill is an error.
if(NOT LEANATTN_CUDA)
  return()
endif()
include(CheckLanguage)
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  message(STATUS "leanattn: no CUDA toolkit found; the library is built without CUDA")
  return()
endif()
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES 80-real 90a-real 90a-virtual)
endif()
enable_language(CUDA)

add_library(leanattn_cuda_flags INTERFACE)
target_compile_options(leanattn_cuda_flags INTERFACE
  $<$<COMPILE_LANGUAGE:CUDA>:-Xptxas=--warn-on-spills,--warning-as-error -Werror=all-warnings -Xcompiler=-Wall,-Wextra>)

if(LEANATTN_BUILD_TESTS)
  add_library(schedule_device OBJECT tests/schedule_device.cu)
  set_target_properties(schedule_device PROPERTIES CUDA_STANDARD 20 CUDA_STANDARD_REQUIRED ON)
  target_include_directories(schedule_device PRIVATE include src)
  target_link_libraries(schedule_device PRIVATE leanattn_cuda_flags)
endif()
