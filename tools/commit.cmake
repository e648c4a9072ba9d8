# SPDX-License-Identifier: Apache-2.0
# Writes HEADER with the git description of SOURCE_DIR, "unknown" where there is none; leaves it alone when nothing changed.
cmake_minimum_required(VERSION 3.25)
set(commit "")
find_package(Git QUIET)
if(Git_FOUND AND EXISTS ${SOURCE_DIR}/.git)
  execute_process(COMMAND ${GIT_EXECUTABLE} -C ${SOURCE_DIR} describe --always --dirty --abbrev=12
    OUTPUT_VARIABLE commit OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
endif()
if(commit STREQUAL "")
  set(commit "unknown")
endif()
file(CONFIGURE OUTPUT ${HEADER} CONTENT "#define LEANATTN_COMMIT \"@commit@\"\n" @ONLY)
