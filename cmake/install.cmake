# SPDX-License-Identifier: Apache-2.0
# Headers, libraries, the command line, the CMake package, pkg-config files and the licence.
include(CMakePackageConfigHelpers)

install(DIRECTORY include/leanattn DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h")
install(FILES LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR})
if(TARGET leanattn_cli)
  install(TARGETS leanattn_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
endif()

# One export file a library, so that a consumer of the shared one never loads the static one's dependencies.
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/leanattn)
install(TARGETS leanattn EXPORT leanattn-static ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(EXPORT leanattn-static NAMESPACE leanattn:: DESTINATION ${package_dir})
if(LEANATTN_SHARED)
  install(TARGETS leanattn_shared EXPORT leanattn-shared LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
  install(EXPORT leanattn-shared NAMESPACE leanattn:: DESTINATION ${package_dir})
endif()

if(LEANATTN_HWY_LIBRARY)
  set(LEANATTN_NEEDS_HWY ON)
else()
  set(LEANATTN_NEEDS_HWY OFF)
endif()
configure_package_config_file(cmake/leanattn-config.cmake.in leanattn-config.cmake INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(leanattn-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/leanattn-config.cmake ${CMAKE_CURRENT_BINARY_DIR}/leanattn-config-version.cmake
        DESTINATION ${package_dir})

# leanattn.pc: the shared library where there is one. leanattn-static.pc: the archive by its file name, with all that it needs.
file(RELATIVE_PATH LEANATTN_PC_TO_PREFIX ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_PREFIX})
set(LEANATTN_PC_PRIVATE "-lstdc++ -lm -pthread")
if(LEANATTN_OPENMP)
  string(REPLACE ";" " " openmp_flags "${OpenMP_CXX_FLAGS}")
  string(PREPEND LEANATTN_PC_PRIVATE "${openmp_flags} ")
endif()
if(LEANATTN_CUDA)  # cudart_static and what it needs in its turn
  string(PREPEND LEANATTN_PC_PRIVATE "-L${CUDAToolkit_LIBRARY_DIR} -lcudart_static -ldl -lrt ")
endif()
set(LEANATTN_PC_REQUIRES "")
if(LEANATTN_NEEDS_HWY)
  set(LEANATTN_PC_REQUIRES libhwy)
endif()
set(archive ${CMAKE_STATIC_LIBRARY_PREFIX}leanattn${CMAKE_STATIC_LIBRARY_SUFFIX})

set(LEANATTN_PC_NAME leanattn-static)
set(LEANATTN_PC_LIBS "\${libdir}/${archive} ${LEANATTN_PC_PRIVATE}")
set(LEANATTN_PC_REQUIRES_LINE "Requires: ${LEANATTN_PC_REQUIRES}")
configure_file(cmake/leanattn.pc.in leanattn-static.pc @ONLY)
set(LEANATTN_PC_NAME leanattn)
if(LEANATTN_SHARED)
  set(LEANATTN_PC_LIBS "-L\${libdir} -lleanattn")
  set(LEANATTN_PC_REQUIRES_LINE "")
endif()
configure_file(cmake/leanattn.pc.in leanattn.pc @ONLY)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/leanattn.pc ${CMAKE_CURRENT_BINARY_DIR}/leanattn-static.pc
        DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
