// Programs of aoquant/ops/program.py, run without Python: what a recorded function makes, computes and launches.
//
// A program is made of words (`native_program.py` writes them), of the names of operators, and of tensors that it holds.
// It runs on tensors of the shapes, strides, dtypes and alignment that it was recorded with; its key says so. Words are
// read once, with their bounds checked. The address of a kernel is Triton's, and nothing can check it: only
// native_program.py may write it.
#pragma once

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/SmallVector.h>
#ifdef AOQUANT_CUDA
#include <ATen/cuda/EmptyTensor.h>
#endif

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "launch.h"

namespace aoquant::step {

using at::Tensor;
using Tensors = std::vector<Tensor>;

// The same numbers stand in native_program.py.
enum StepKind : int64_t { MAKE, VIEW, OPERATOR, LAUNCH, DROP };
enum ValueKind : int64_t { NONE, TENSOR, TENSORS, INTEGER, NUMBER, BOOLEAN, INTEGERS, DEVICE };

constexpr size_t USUAL = 32;             // tensors of a program, which need no memory of their own
constexpr int64_t LARGEST = 1LL << 44;  // elements

// An argument of an operator: a value, or the tensors of slots.
struct Value {
  int64_t kind = NONE;
  c10::IValue value;
  std::vector<int64_t> slots;
};

struct Step {
  int64_t kind;
  std::vector<int64_t> slots;    // that are read or, of DROP, emptied
  std::vector<int64_t> results;  // slots
  std::vector<int64_t> sizes, strides;
  int64_t offset = 0;  // of a view, behind the first element of what it views
  int64_t extent = 0;  // of a view: elements from its first to behind its last
  at::ScalarType type = at::ScalarType::Undefined;  // of what is made, or of a view
  std::optional<c10::OperatorHandle> op;
  std::vector<Value> values;
  Kernel kernel;
};

// What a kind of forwards leaves for backward. number: Python's, of what runs backwards that are not ordinary. family: of
// the backward's programs. saved: tensors that it reads, beside the gradient and the random state. shared: which results
// other layers may take while autograd keeps them. asked: a bit for each of x, w and bias, whether backward makes its
// gradient.
struct Kind {
  int64_t number, family, saved;
  std::vector<int64_t> shared;
  int64_t asked;
};

struct Program {
  int64_t number = 0, arguments = 0, slots = 0;
  std::vector<std::pair<int64_t, Tensor>> constants;
  std::vector<Step> steps;
  std::vector<int64_t> results;
  // what Python tells of it later, guarded by `mutex`: where it is a layer's forward, and where it is an op's, which of
  // the op's results are none
  std::shared_ptr<const Kind> kind;
  std::shared_ptr<const std::vector<bool>> none;
};

class Reader {
 public:
  Reader(at::IntArrayRef words, const std::string& names) : words_(words) {
    for (size_t begin = 0; begin <= names.size();) {  // an overload may have no name, and be the last
      size_t end = std::min(names.find('\n', begin), names.size());
      names_.push_back(names.substr(begin, end - begin));
      begin = end + 1;
    }
  }

  bool ended() const { return at_ == words_.size(); }

  int64_t word(int64_t least = std::numeric_limits<int64_t>::min(), int64_t most = std::numeric_limits<int64_t>::max()) {
    TORCH_CHECK(at_ < words_.size(), "a program's words end too early");
    int64_t found = words_[at_++];
    TORCH_CHECK(least <= found && found <= most, "a program's word ", at_ - 1, " is ", found);
    return found;
  }

  std::vector<int64_t> list(int64_t least = std::numeric_limits<int64_t>::min(), int64_t most = std::numeric_limits<int64_t>::max()) {
    std::vector<int64_t> found(word(0, int64_t(words_.size() - at_)));
    for (int64_t& value : found) value = word(least, most);
    return found;
  }

  const std::string& name() { return names_[word(0, int64_t(names_.size()) - 1)]; }

 private:
  at::IntArrayRef words_;
  std::vector<std::string> names_;
  size_t at_ = 0;
};

inline Parameter read_parameter(Reader& read, int64_t slots) {
  Parameter made{read.word(BITS, BOXES)};
  made.word = made.kind == BITS ? read.word() : read.word(0, slots - 1);
  if (made.kind != BOXES) return made;
  made.type = int(read.word(0, 31)), made.swizzle = int(read.word(0, 31));
  for (int64_t size : read.list(1)) made.sizes.push_back(uint64_t(size));
  for (int64_t stride : read.list(1)) made.strides.push_back(uint64_t(stride));
  for (int64_t size : read.list(1, 256)) made.box.push_back(uint32_t(size));
  const size_t rank = made.sizes.size();
  TORCH_CHECK(1 <= rank && rank <= 5 && made.strides.size() == rank - 1 && made.box.size() == rank, "a program maps a tensor of ", rank, " dimensions by ",
              made.strides.size(), " strides and a box of ", made.box.size());
  return made;
}

inline Kernel read_kernel(Reader& read, int64_t slots) {
  Kernel made;
  made.function = reinterpret_cast<void*>(read.word(1));
  for (unsigned& size : made.grid) size = unsigned(read.word(1, std::numeric_limits<int32_t>::max()));
  made.threads = unsigned(read.word(1, 1024)), made.shared = unsigned(read.word(0, 1 << 20));
  size_t maps = 0;
  for (int64_t count = read.word(0, MOST_PARAMETERS); count > 0; --count) {
    made.parameters.push_back(read_parameter(read, slots));
    maps += made.parameters.back().kind == BOXES;
  }
  TORCH_CHECK(maps <= MOST_MAPS, "a program's kernel reads ", maps, " tensors in boxes");
  return made;
}

inline Value read_value(Reader& read, int64_t slots) {
  Value made{read.word(NONE, DEVICE)};
  if (made.kind == TENSOR || made.kind == TENSORS) {
    made.slots = read.list(0, slots - 1);
    TORCH_CHECK(made.kind == TENSORS || made.slots.size() == 1, "a program's argument is not one value");
    return made;
  }
  const std::vector<int64_t> words = read.list();
  const size_t count = made.kind == NONE ? 0 : made.kind == DEVICE ? 2 : 1;
  TORCH_CHECK(made.kind == INTEGERS || words.size() == count, "a program's argument is not one value");
  if (made.kind == INTEGER) made.value = words[0];
  if (made.kind == BOOLEAN) made.value = words[0] != 0;
  if (made.kind == INTEGERS) made.value = words;
  if (made.kind == DEVICE) {
    TORCH_CHECK((words[0] == 0 && words[1] == -1) || (words[0] == 1 && 0 <= words[1] && words[1] < 128), "a program's device is ", words[0], ", ", words[1]);
    made.value = c10::Device(c10::DeviceType(words[0]), c10::DeviceIndex(words[1]));
  }
  if (made.kind == NUMBER) {
    double number;
    std::memcpy(&number, words.data(), sizeof(number));
    made.value = number;
  }
  return made;
}

inline void read_layout(Reader& read, Step& step) {
  step.sizes = read.list(0), step.strides = read.list(0);
  TORCH_CHECK(step.sizes.size() == step.strides.size(), "a program has a size without a stride");
  if (std::find(step.sizes.begin(), step.sizes.end(), 0) != step.sizes.end()) return;
  step.extent = 1;
  for (size_t i = 0; i < step.sizes.size(); ++i) {
    int64_t reach;
    TORCH_CHECK(!__builtin_mul_overflow(step.sizes[i] - 1, step.strides[i], &reach) && reach < LARGEST && (step.extent += reach) <= LARGEST,
                "a program's tensor has no end");
  }
}

inline Step read_step(Reader& read, int64_t slots) {
  Step step{read.word(MAKE, DROP)};
  auto slot = [&] { return read.word(0, slots - 1); };
  switch (step.kind) {
    case MAKE:
      step.results = {slot()};
      step.type = at::ScalarType(read.word(0, int64_t(at::ScalarType::Undefined) - 1));
      read_layout(read, step);
      break;
    case VIEW:
      step.results = {slot()}, step.slots = {slot()};
      step.type = at::ScalarType(read.word(0, int64_t(at::ScalarType::Undefined) - 1));
      step.offset = read.word(0, LARGEST);
      read_layout(read, step);
      break;
    case OPERATOR: {
      const std::string &name = read.name(), &overload = read.name();
      step.op = c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str());
      step.results = read.list(0, slots - 1);
      for (int64_t count = read.word(0, 255); count > 0; --count) step.values.push_back(read_value(read, slots));
      const c10::FunctionSchema& schema = step.op->schema();
      TORCH_CHECK(step.values.size() == schema.arguments().size(), "a program calls ", name, " with ", step.values.size(), " arguments");
      break;
    }
    case LAUNCH:
      step.kernel = read_kernel(read, slots);
      break;
    case DROP:
      step.slots = read.list(0, slots - 1);
  }
  return step;
}

// The tensors of a run, by slot: those of the caller are borrowed.
class Slots {
 public:
  explicit Slots(int64_t count) : tensors_(count, nullptr), owned_(count) {}
  Slots(const Slots&) = delete;

  void borrow(int64_t slot, const Tensor& t) { tensors_[slot] = &t; }
  void take(int64_t slot, Tensor t) {
    owned_[slot] = std::move(t);
    tensors_[slot] = &owned_[slot];
  }
  void empty(int64_t slot) {
    owned_[slot].reset();
    tensors_[slot] = nullptr;
  }
  const Tensor& operator[](int64_t slot) const {
    TORCH_CHECK(tensors_[slot] != nullptr, "a program reads a tensor that is not there");
    return *tensors_[slot];
  }

 private:
  c10::SmallVector<const Tensor*, USUAL> tensors_;
  c10::SmallVector<Tensor, USUAL> owned_;
};

inline Tensor made_of(const Step& step, c10::Device device) {
  // as torch's own operator does it, which fills the memory then
  if (at::globalContext().deterministicAlgorithms() && at::globalContext().deterministicFillUninitializedMemory())
    return at::empty_strided(step.sizes, step.strides, at::TensorOptions(step.type).device(device));
#ifdef AOQUANT_CUDA
  // by the allocator that a program may have put in place of torch's own
  if (device.is_cuda()) return Tensor(at::detail::empty_strided_cuda(step.sizes, step.strides, step.type, device));
#endif
  const c10::DispatchKeySet keys(c10::computeDispatchKey(step.type, c10::kStrided, device));
  return at::detail::empty_strided_generic(step.sizes, step.strides, c10::GetAllocator(device.type()), keys, step.type);
}

// A view for kernels and for whoever counts writes, and none to autograd.
inline Tensor view_of(const Step& step, const Tensor& base) {
  const int64_t begin = base.storage_offset() + step.offset, bytes = int64_t(base.itemsize());
  TORCH_CHECK(c10::elementSize(step.type) == size_t(bytes), "a program's view has elements of another size");
  TORCH_CHECK((begin + step.extent) * bytes <= int64_t(base.storage().nbytes()), "a program's view ends behind the memory that it views");
  Tensor made = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), c10::scalarTypeToTypeMeta(step.type));
  made.unsafeGetTensorImpl()->set_sizes_and_strides(step.sizes, step.strides, begin);
  made.unsafeGetTensorImpl()->set_version_counter(base.unsafeGetTensorImpl()->version_counter());
  return made;
}

inline void call(const Step& step, Slots& at) {
  torch::jit::Stack stack;
  stack.reserve(step.values.size());
  for (const Value& given : step.values) {
    if (given.kind == TENSOR) {
      stack.emplace_back(at[given.slots[0]]);
    } else if (given.kind == TENSORS) {
      c10::List<Tensor> tensors;
      for (int64_t slot : given.slots) tensors.push_back(at[slot]);
      stack.emplace_back(std::move(tensors));
    } else {
      stack.push_back(given.value);
    }
  }
  step.op->callBoxed(stack);
  auto slot = step.results.begin();
  for (c10::IValue& made : stack) {
    if (!made.isTensorList()) {
      if (slot != step.results.end()) at.take(*slot++, std::move(made).toTensor());
    } else {
      for (Tensor t : made.toTensorList())
        if (slot != step.results.end()) at.take(*slot++, std::move(t));
    }
  }
  TORCH_CHECK(slot == step.results.end(), "a program's operator made fewer tensors");
}

// Runs a program on its tensors, below autograd.
inline Tensors run(const Program& program, const Tensors& arguments) {
  const c10::Device device = arguments[0].device();
  const c10::DeviceGuard guard(device);
  const at::AutoDispatchBelowAutograd below;
  void* const stream = device.is_cuda() ? current_stream(device.index()) : nullptr;
  Slots at(program.slots);
  for (int64_t i = 0; i < program.arguments; ++i) at.borrow(i, arguments[i]);
  for (const auto& [slot, t] : program.constants) at.borrow(slot, t);
  for (const Step& step : program.steps) {
    switch (step.kind) {
      case MAKE:
        at.take(step.results[0], made_of(step, device));
        break;
      case VIEW:
        at.take(step.results[0], view_of(step, at[step.slots[0]]));
        break;
      case OPERATOR:
        call(step, at);
        break;
      case LAUNCH:
        TORCH_CHECK(device.is_cuda(), "a CPU launches no kernels");
        launch(step.kernel, [&](int64_t slot) { return at[slot].data_ptr(); }, stream);
        break;
      default:
        for (int64_t slot : step.slots) at.empty(slot);
    }
  }
  Tensors results;
  results.reserve(program.results.size());
  for (int64_t slot : program.results) results.push_back(at[slot]);
  return results;
}

inline std::mutex mutex;
inline std::unordered_map<int64_t, std::shared_ptr<Program>> programs;

// words: slots, the constants' slots, steps, and the slots of the results.
inline int64_t make(at::IntArrayRef words, const std::string& names, int64_t arguments, const Tensors& constants) {
  Reader read(words, names);
  auto made = std::make_shared<Program>();
  made->slots = read.word(0, 1 << 20), made->arguments = arguments;
  TORCH_CHECK(0 < arguments && arguments <= made->slots, "a program has no arguments, or more than slots");
  std::vector<int64_t> held = read.list(0, made->slots - 1);
  TORCH_CHECK(held.size() == constants.size(), "a program has a constant without a slot");
  for (size_t i = 0; i < held.size(); ++i) made->constants.emplace_back(held[i], constants[i]);
  for (int64_t count = read.word(0, 1 << 20); count > 0; --count) made->steps.push_back(read_step(read, made->slots));
  made->results = read.list(0, made->slots - 1);
  TORCH_CHECK(read.ended(), "a program has words behind its end");
  static int64_t last = 0;
  std::lock_guard lock(mutex);
  made->number = ++last;
  programs[last] = std::move(made);
  return last;
}

inline void forget(int64_t program) {
  std::shared_ptr<Program> last;  // freed behind the lock
  std::lock_guard lock(mutex);
  if (auto found = programs.find(program); found != programs.end()) {
    last = std::move(found->second);
    programs.erase(found);
  }
}

// A program, under the lock.
inline std::shared_ptr<Program> known(int64_t program) {
  auto found = programs.find(program);
  TORCH_CHECK(found != programs.end(), "there is no program ", program);
  return found->second;
}

inline std::shared_ptr<Program> find(int64_t program, const Tensors& arguments) {
  std::lock_guard lock(mutex);
  std::shared_ptr<Program> found = known(program);
  TORCH_CHECK(int64_t(arguments.size()) == found->arguments, "program ", program, " takes ", found->arguments, " tensors");
  return found;
}

using Layout = c10::SmallVector<int64_t, 2 * USUAL>;

struct Hash {
  size_t operator()(const Layout& layout) const {
    uint64_t made = layout.size();
    for (int64_t value : layout) made = (made ^ uint64_t(value)) * 0x9E3779B97F4A7C15u, made ^= made >> 29;
    return made;
  }
};

// Layouts of a family's tensors -> a program.
using Family = std::unordered_map<Layout, std::shared_ptr<Program>, Hash>;
inline std::unordered_map<int64_t, Family> families;

// A device, and of each tensor its type, dimensions, sizes and strides. Nothing where a program may not read the tensors:
// they lie on several devices, one twice, or one at an address that kernels do not read in vectors.
inline Layout layout(const Tensors& tensors) {
  if (tensors.empty()) return {};
  const c10::Device device = tensors[0].device();
  Layout found{int64_t(device.type()), device.index()};
  c10::SmallVector<const void*, USUAL> begins;
  for (const Tensor& t : tensors) {
    const void* begin = t.const_data_ptr();
    if (t.device() != device || reinterpret_cast<uintptr_t>(begin) % 16 != 0) return {};
    if (begin != nullptr && std::find(begins.begin(), begins.end(), begin) != begins.end()) return {};
    begins.push_back(begin);
    found.push_back(int64_t(t.scalar_type())), found.push_back(t.dim());
    const auto sizes = t.sizes(), strides = t.strides();
    found.append(sizes.begin(), sizes.end());
    found.append(strides.begin(), strides.end());
  }
  return found;
}

// Calls of `family` whose tensors lie as these do run `number` from now on.
inline void bind(int64_t family, int64_t number, const Tensors& arguments) {
  Layout wanted = layout(arguments);
  std::shared_ptr<Program> program = find(number, arguments);  // and, in the end, the one that was there before
  std::lock_guard lock(mutex);
  if (!wanted.empty()) std::swap(families[family][std::move(wanted)], program);
}

inline void forget_family(int64_t family) {
  Family last;  // freed behind the lock
  std::lock_guard lock(mutex);
  if (auto found = families.find(family); found != families.end()) {
    last = std::move(found->second);
    families.erase(found);
  }
}

struct Bound {
  std::shared_ptr<const Program> program;
  std::shared_ptr<const Kind> kind;
  std::shared_ptr<const std::vector<bool>> none;
};

// The program of a call, and what is known of it; none where there is none, or a CUDA graph is captured.
inline Bound bound(int64_t family, const Tensors& arguments) {
  if (arguments.empty() || (arguments[0].is_cuda() && is_capturing(current_stream(arguments[0].device().index())))) return {};
  const Layout wanted = layout(arguments);
  std::lock_guard lock(mutex);
  if (auto known = families.find(family); known != families.end())
    if (auto found = known->second.find(wanted); found != known->second.end()) return {found->second, found->second->kind, found->second->none};
  return {};
}

}  // namespace aoquant::step
