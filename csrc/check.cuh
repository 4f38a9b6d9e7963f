// Assertions on the device: they check the bounds of what a kernel is about to read or write. A library built with
// AOQUANT_ASSERT=1 (builder.py) has them; in any other they cost nothing.
#pragma once

#ifdef AOQUANT_ASSERT
#undef NDEBUG
#include <cassert>
#define DEVICE_ASSERT(condition) assert(condition)
#else
#define DEVICE_ASSERT(condition) ((void)0)
#endif
