// SPDX-License-Identifier: Apache-2.0
// LEANATTN_API marks what the shared library exports; everything else is hidden. C and C++.
#pragma once

#if defined(__GNUC__)
#define LEANATTN_API __attribute__((visibility("default")))
#else
#define LEANATTN_API
#endif
