// Launches of Triton's kernels by the driver, whose library is loaded when the first kernel is launched; nothing is linked
// with it, and its headers are not read.
#pragma once

#include <c10/util/Exception.h>
#include <dlfcn.h>

#include <cstdint>
#include <type_traits>
#include <vector>

namespace aoquant::step {

// The same numbers stand in native_program.py.
enum ParameterKind : int64_t { BITS, ADDRESS, BOXES };

constexpr int64_t MOST_PARAMETERS = 62;
constexpr size_t MOST_MAPS = 8, SCRATCH = 2;  // SCRATCH: pointers to memory that Triton gives to kernels which ask for it; these do not

// A parameter of a kernel: the bits of a number, the address of a slot's tensor, or a map by which the copy engine reads
// that tensor in boxes.
struct Parameter {
  int64_t kind;
  int64_t word;  // the bits, or the slot
  // of a map; the innermost dimension comes first
  int type = 0, swizzle = 0;             // numbers of CUtensorMapDataType and CUtensorMapSwizzle
  std::vector<uint64_t> sizes, strides;  // strides in bytes, of all dimensions but the first
  std::vector<uint32_t> box;
};

struct Kernel {
  void* function = nullptr;
  unsigned grid[3], threads, shared;
  std::vector<Parameter> parameters;
};

// A CUtensorMap.
struct alignas(64) Map {
  uint64_t words[16];
};

struct Driver {
  int (*launch)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
  int (*is_capturing)(void*, int*);
  int (*map)(Map*, int, uint32_t, void*, const uint64_t*, const uint64_t*, const uint32_t*, const uint32_t*, int, int, int, int);

  static const Driver& get() {
    static const Driver found;
    return found;
  }

 private:
  Driver() {
    void* library = dlopen("libcuda.so.1", RTLD_LAZY);
    TORCH_CHECK(library != nullptr, "no CUDA driver is here");
    const auto take = [library](auto& function, const char* name) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
    };
    take(launch, "cuLaunchKernel");
    take(is_capturing, "cuStreamIsCapturing");
    take(map, "cuTensorMapEncodeTiled");  // since CUDA 12
    TORCH_CHECK(launch != nullptr && is_capturing != nullptr, "the CUDA driver launches no kernels");
  }
};

#ifdef AOQUANT_CUDA
extern "C" int32_t aoti_torch_get_current_cuda_stream(int32_t device, void** stream);  // of torch_cuda

inline void* current_stream(int device) {
  void* found = nullptr;
  TORCH_CHECK(aoti_torch_get_current_cuda_stream(device, &found) == 0, "torch has no stream");
  return found;
}
#else
inline void* current_stream(int) { TORCH_CHECK(false, "aoquant's step library was built for a torch without CUDA"); }
#endif

inline bool is_capturing(void* stream) {
  int status = 0;
  return Driver::get().is_capturing(stream, &status) != 0 || status != 0;
}

// address(slot): of a slot's tensor.
template <typename Address>
void launch(const Kernel& kernel, const Address& address, void* stream) {
  constexpr size_t MOST = MOST_PARAMETERS + SCRATCH;
  constexpr uint32_t STEPS[5] = {1, 1, 1, 1, 1};
  constexpr int INTERLEAVE_NONE = 0, PROMOTE_128_BYTES = 2, ZERO_OUTSIDE = 0;
  const size_t count = kernel.parameters.size();
  void *words[MOST] = {}, *parameters[MOST];
  Map maps[MOST_MAPS];
  for (size_t i = 0, map = 0; i < count + SCRATCH; ++i) {
    parameters[i] = &words[i];
    if (i >= count) continue;
    const Parameter& given = kernel.parameters[i];
    words[i] = given.kind == BITS ? reinterpret_cast<void*>(given.word) : address(given.word);
    if (given.kind != BOXES) continue;
    TORCH_CHECK(Driver::get().map != nullptr, "the CUDA driver has no maps for a copy engine");
    parameters[i] = &maps[map];
    int error = Driver::get().map(&maps[map++], given.type, uint32_t(given.sizes.size()), words[i], given.sizes.data(), given.strides.data(), given.box.data(), STEPS,
                                  INTERLEAVE_NONE, given.swizzle, PROMOTE_128_BYTES, ZERO_OUTSIDE);
    TORCH_CHECK(error == 0, "the copy engine cannot read a tensor: driver error ", error);
  }
  const unsigned* grid = kernel.grid;
  int error = Driver::get().launch(kernel.function, grid[0], grid[1], grid[2], kernel.threads, 1, 1, kernel.shared, stream, parameters, nullptr);
  TORCH_CHECK(error == 0, "CUDA launch failed: driver error ", error);
}

}  // namespace aoquant::step
