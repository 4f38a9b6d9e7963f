// Programs on a GPU: program.h, and the launches of Triton's kernels.
#include "program.h"

#include <dlfcn.h>

#include "common.cuh"
#include "copy_engine.cuh"

namespace aoquant {
namespace {

using Launch = int (*)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);

Launch driver_launch() {
  static const Launch found = [] {
    void* driver = dlopen("libcuda.so.1", RTLD_LAZY);
    return driver == nullptr ? nullptr : reinterpret_cast<Launch>(dlsym(driver, "cuLaunchKernel"));
  }();
  STD_TORCH_CHECK(found != nullptr, "no CUDA driver is here");
  return found;
}

void launch(const program::Step& step, const program::Slots& at, cudaStream_t stream) {
  constexpr int SCRATCH = 2;  // pointers to memory that Triton gives to kernels which ask for it; these do not
  size_t count = step.parameters.size();
  std::vector<int64_t> words(count + SCRATCH, 0);
  std::vector<CUtensorMap> maps(step.maps);
  std::vector<void*> parameters(count + SCRATCH);
  for (size_t i = 0, map = 0; i < parameters.size(); ++i) {
    parameters[i] = &words[i];
    if (i >= count) continue;
    const program::Parameter& given = step.parameters[i];
    words[i] = given.word;
    if (given.kind == program::BITS) continue;
    void* address = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(at[given.word], &address));
    words[i] = reinterpret_cast<int64_t>(address);
    if (given.kind == program::ADDRESS) continue;
    parameters[i] = &maps[map];
    cudaError_t error = map_boxes(&maps[map++], CUtensorMapDataType(given.type), int(given.sizes.size()), address,
                                  reinterpret_cast<const cuuint64_t*>(given.sizes.data()), reinterpret_cast<const cuuint64_t*>(given.strides.data()),
                                  given.box.data(), CUtensorMapSwizzle(given.swizzle));
    STD_TORCH_CHECK(error == cudaSuccess, "the copy engine cannot read a tensor: ", cudaGetErrorString(error));
  }
  int error = driver_launch()(step.function, step.grid[0], step.grid[1], step.grid[2], step.threads, 1, 1, step.shared, stream, parameters.data(), nullptr);
  STD_TORCH_CHECK(error == 0, "CUDA launch failed: driver error ", error);
}

std::vector<Tensor> run_on_gpu(const program::Program& found, const std::vector<Tensor>& arguments) {
  DeviceGuard guard(arguments[0].get_device_index());
  cudaStream_t stream = current_stream(arguments[0]);
  return program::run(found, arguments, aoti_torch_device_type_cuda(),
                      [stream](const program::Step& step, const program::Slots& at) { launch(step, at, stream); });
}

std::vector<Tensor> run(int64_t number, std::vector<Tensor> arguments) { return run_on_gpu(*program::find(number, arguments), arguments); }

// The program of a call, and its number; -1 where there is none, or a CUDA graph is captured.
std::pair<std::shared_ptr<const program::Program>, int64_t> bound(int64_t family, const std::vector<Tensor>& arguments) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (arguments.empty() || cudaStreamIsCapturing(current_stream(arguments[0]), &status) != cudaSuccess || status != cudaStreamCaptureStatusNone)
    return {nullptr, -1};
  return program::bound(family, arguments);
}

int64_t find_in_family(int64_t family, std::vector<Tensor> arguments) { return bound(family, arguments).second; }

std::tuple<std::vector<Tensor>, int64_t> run_family(int64_t family, std::vector<Tensor> arguments) {
  auto [found, number] = bound(family, arguments);
  if (found == nullptr) return {std::vector<Tensor>(), number};
  return {run_on_gpu(*found, arguments), number};
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(aoquant_native, m) {
  m.def("program_make(int[] words, str names, int arguments, Tensor[] constants) -> int");
  m.def("program_forget(int program) -> ()");
  m.def("program_run(int program, Tensor[] arguments) -> Tensor[]");
  m.def("family_bind(int family, int program, Tensor[] arguments) -> ()");
  m.def("family_forget(int family) -> ()");
  m.def("family_find(int family, Tensor[] arguments) -> int");
  m.def("family_run(int family, Tensor[] arguments) -> (Tensor[], int)");
}
STABLE_TORCH_LIBRARY_IMPL(aoquant_native, CompositeExplicitAutograd, m) {
  m.impl("program_make", TORCH_BOX(&program::make));
  m.impl("program_forget", TORCH_BOX(&program::forget));
  m.impl("program_run", TORCH_BOX(&run));
  m.impl("family_bind", TORCH_BOX(&program::bind));
  m.impl("family_forget", TORCH_BOX(&program::forget_family));
  m.impl("family_find", TORCH_BOX(&find_in_family));
  m.impl("family_run", TORCH_BOX(&run_family));
}

}  // namespace aoquant
