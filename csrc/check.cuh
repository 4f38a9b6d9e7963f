// Assertions on the device: bounds of what a kernel is about to read or write. They are there in a library that was built
// with AOQUANT_ASSERT=1 (builder.py), and cost nothing in any other.
#pragma once

#ifdef AOQUANT_ASSERT
#undef NDEBUG
#include <cassert>
#define DEVICE_ASSERT(condition) assert(condition)
#else
#define DEVICE_ASSERT(condition) ((void)0)
#endif
