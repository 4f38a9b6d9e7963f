// Programs of aoquant/ops/program.py, run without Python: what a recorded function makes, computes and launches. In the
// CUDA library, and in the CPU library, where nothing is launched and tests run it.
//
// A program is made of words (`native_program.py` writes them), of the names of operators, and of tensors that it holds.
// It runs on tensors of the shapes, strides, dtypes and alignment that it was recorded with; Python's key says so. Words
// are read once, with their bounds checked. The address of a kernel is Triton's, and nothing can check it: only
// native_program.py may write it.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "arguments.h"

namespace aoquant::program {

using torch::stable::detail::from;

using torch::stable::detail::to;

// The same numbers stand in native_program.py.
enum StepKind : int64_t { MAKE, VIEW, OPERATOR, LAUNCH, DROP };
enum ValueKind : int64_t { NONE, TENSOR, TENSORS, INTEGER, NUMBER, BOOLEAN, TYPE, INTEGERS, FORMAT, MAYBE };
enum ParameterKind : int64_t { BITS, ADDRESS, BOXES };

// An argument of an operator. MAYBE is a kind's flag: the schema says `T?`.
struct Value {
  int64_t kind = NONE;
  bool maybe = false;
  std::vector<int64_t> words;
};

// A parameter of a kernel: the bits of a number, the address of a slot's tensor, or a map by which the copy engine reads
// that tensor in boxes.
struct Parameter {
  int64_t kind;
  int64_t word;  // the bits, or the slot
  // of a map; the innermost dimension comes first
  int type = 0, swizzle = 0;            // numbers of CUtensorMapDataType and CUtensorMapSwizzle
  std::vector<int64_t> sizes, strides;  // strides in bytes, of all dimensions but the first
  std::vector<uint32_t> box;
};

struct Step {
  int64_t kind;
  std::vector<int64_t> slots;    // that are read or, of DROP, emptied
  std::vector<int64_t> results;  // slots
  std::vector<int64_t> sizes, strides;
  int64_t offset = 0;  // of a view, behind the first element of what it views
  int32_t type = 0, device = 0;
  std::string name, overload;
  std::vector<Value> values;
  void* function = nullptr;
  unsigned grid[3], threads, shared;
  std::vector<Parameter> parameters;
  size_t maps = 0;  // of the parameters
};

struct Program {
  int64_t arguments, slots;
  std::vector<std::pair<int64_t, Tensor>> constants;
  std::vector<Step> steps;
  std::vector<int64_t> results;
};

class Reader {
 public:
  Reader(const std::vector<int64_t>& words, const std::string& names) : words_(words) {
    for (size_t begin = 0; begin <= names.size();) {  // an overload may have no name, and be the last
      size_t end = std::min(names.find('\n', begin), names.size());
      names_.push_back(names.substr(begin, end - begin));
      begin = end + 1;
    }
  }

  bool ended() const { return at_ == words_.size(); }

  int64_t word(int64_t least = std::numeric_limits<int64_t>::min(), int64_t most = std::numeric_limits<int64_t>::max()) {
    STD_TORCH_CHECK(at_ < words_.size(), "a program's words end too early");
    int64_t found = words_[at_++];
    STD_TORCH_CHECK(least <= found && found <= most, "a program's word ", at_ - 1, " is ", found);
    return found;
  }

  std::vector<int64_t> list(int64_t least = std::numeric_limits<int64_t>::min(), int64_t most = std::numeric_limits<int64_t>::max()) {
    std::vector<int64_t> found(word(0, int64_t(words_.size() - at_)));
    for (int64_t& value : found) value = word(least, most);
    return found;
  }

  const std::string& name() {
    return names_[word(0, int64_t(names_.size()) - 1)];
  }

 private:
  const std::vector<int64_t>& words_;
  std::vector<std::string> names_;
  size_t at_ = 0;
};

inline int32_t shim_type(int64_t type) { return int32_t(from(ScalarType(type))); }

inline Parameter read_parameter(Reader& read, int64_t slots) {
  Parameter made{read.word(BITS, BOXES)};
  made.word = made.kind == BITS ? read.word() : read.word(0, slots - 1);
  if (made.kind != BOXES) return made;
  made.type = int(read.word(0, 31)), made.swizzle = int(read.word(0, 31));
  made.sizes = read.list(1), made.strides = read.list(1);
  for (int64_t size : read.list(1, 256)) made.box.push_back(uint32_t(size));
  const size_t rank = made.sizes.size();
  STD_TORCH_CHECK(1 <= rank && rank <= 5 && made.strides.size() == rank - 1 && made.box.size() == rank, "a program maps a tensor of ", rank, " dimensions by ",
                  made.strides.size(), " strides and a box of ", made.box.size());
  return made;
}

inline Step read_step(Reader& read, int64_t slots) {
  Step step{read.word(MAKE, DROP)};
  auto slot = [&] { return read.word(0, slots - 1); };
  switch (step.kind) {
    case MAKE:
      step.results = {slot()};
      step.type = shim_type(read.word(0, 127)), step.device = int32_t(read.word(0, 1023));
      step.sizes = read.list(0), step.strides = read.list(0);
      STD_TORCH_CHECK(step.sizes.size() == step.strides.size(), "a program has a size without a stride");
      break;
    case VIEW:
      step.results = {slot()}, step.slots = {slot()};
      step.offset = read.word(0);
      step.sizes = read.list(0), step.strides = read.list(0);
      STD_TORCH_CHECK(step.sizes.size() == step.strides.size(), "a program has a size without a stride");
      break;
    case OPERATOR:
      step.name = read.name(), step.overload = read.name();
      step.results = read.list(0, slots - 1);
      for (int64_t count = read.word(0, 255); count > 0; --count) {
        Value value;
        int64_t kind = read.word(NONE, 2 * MAYBE);
        value.maybe = kind >= MAYBE, value.kind = kind % MAYBE;
        value.words = value.kind == TENSOR || value.kind == TENSORS ? read.list(0, slots - 1) : read.list();
        STD_TORCH_CHECK(value.kind == NONE || value.kind == TENSORS || value.kind == INTEGERS || value.words.size() == 1, "a program's argument is not one value");
        step.values.push_back(std::move(value));
      }
      break;
    case LAUNCH:
      step.function = reinterpret_cast<void*>(read.word(1));
      for (unsigned& size : step.grid) size = unsigned(read.word(1, std::numeric_limits<int32_t>::max()));
      step.threads = unsigned(read.word(1, 1024)), step.shared = unsigned(read.word(0, 1 << 20));
      for (int64_t count = read.word(0, 255); count > 0; --count) {
        step.parameters.push_back(read_parameter(read, slots));
        step.maps += step.parameters.back().kind == BOXES;
      }
      break;
    case DROP:
      step.slots = read.list(0, slots - 1);
  }
  return step;
}

// The tensors of a run, by slot: those of the caller are borrowed.
class Slots {
 public:
  explicit Slots(int64_t count) : handles_(count), owned_(count) {}
  Slots(const Slots&) = delete;
  ~Slots() {
    for (size_t i = 0; i < handles_.size(); ++i) empty(int64_t(i));
  }

  void borrow(int64_t slot, const Tensor& t) { handles_[slot] = t.get(); }
  void take(int64_t slot, AtenTensorHandle t) {
    empty(slot);
    handles_[slot] = t, owned_[slot] = true;
  }
  void empty(int64_t slot) {
    if (owned_[slot]) aoti_torch_delete_tensor_object(handles_[slot]);
    handles_[slot] = nullptr, owned_[slot] = false;
  }
  AtenTensorHandle operator[](int64_t slot) const {
    STD_TORCH_CHECK(handles_[slot] != nullptr, "a program reads a tensor that is not there");
    return handles_[slot];
  }
  AtenTensorHandle copy(int64_t slot) const {
    AtenTensorHandle made;
    TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle((*this)[slot], &made));
    return made;
  }

 private:
  std::vector<AtenTensorHandle> handles_;
  std::vector<bool> owned_;
};

inline StableIValue argument(const Value& value, const Slots& at) {
  auto one = [&](auto made) { return value.maybe ? from(std::optional(made)) : from(made); };
  switch (value.kind) {
    case TENSOR:
      return one(Tensor(at.copy(value.words[0])));
    case TENSORS: {
      std::vector<Tensor> tensors;
      for (int64_t slot : value.words) tensors.emplace_back(at.copy(slot));
      return one(tensors);
    }
    case INTEGER:
      return one(value.words[0]);
    case NUMBER: {
      double number;
      std::memcpy(&number, value.words.data(), sizeof(number));
      return one(number);
    }
    case BOOLEAN:
      return one(value.words[0] != 0);
    case TYPE:
      return one(ScalarType(value.words[0]));
    case INTEGERS:
      return one(value.words);
    case FORMAT:
      return one(torch::headeronly::MemoryFormat(value.words[0]));
  }
  return from(std::nullopt);
}

inline void call(const Step& step, Slots& at) {
  std::vector<StableIValue> stack(std::max(step.values.size(), step.results.size()));
  for (size_t i = 0; i < step.values.size(); ++i) stack[i] = argument(step.values[i], at);
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(step.name.c_str(), step.overload.c_str(), stack.data(), TORCH_ABI_VERSION));
  for (size_t i = 0; i < step.results.size(); ++i) at.take(step.results[i], to<AtenTensorHandle>(stack[i]));
}

inline std::mutex mutex;
inline std::unordered_map<int64_t, std::shared_ptr<const Program>> programs;

// words: slots, the constants' slots, steps, and the slots of the results.
inline int64_t make(std::vector<int64_t> words, std::string names, int64_t arguments, std::vector<Tensor> constants) {
  Reader read(words, names);
  auto made = std::make_shared<Program>();
  made->slots = read.word(0, 1 << 20), made->arguments = arguments;
  STD_TORCH_CHECK(0 <= arguments && arguments <= made->slots, "a program has more arguments than slots");
  std::vector<int64_t> held = read.list(0, made->slots - 1);
  STD_TORCH_CHECK(held.size() == constants.size(), "a program has a constant without a slot");
  for (size_t i = 0; i < held.size(); ++i) made->constants.emplace_back(held[i], constants[i]);
  for (int64_t count = read.word(0, 1 << 20); count > 0; --count) made->steps.push_back(read_step(read, made->slots));
  made->results = read.list(0, made->slots - 1);
  STD_TORCH_CHECK(read.ended(), "a program has words behind its end");
  static int64_t last = 0;
  std::lock_guard lock(mutex);
  programs[++last] = std::move(made);
  return last;
}

inline void forget(int64_t program) {
  std::shared_ptr<const Program> last;  // freed behind the lock
  std::lock_guard lock(mutex);
  if (auto found = programs.find(program); found != programs.end()) {
    last = std::move(found->second);
    programs.erase(found);
  }
}

inline std::shared_ptr<const Program> find(int64_t program, const std::vector<Tensor>& arguments) {
  std::lock_guard lock(mutex);
  auto found = programs.find(program);
  STD_TORCH_CHECK(found != programs.end(), "there is no program ", program);
  STD_TORCH_CHECK(int64_t(arguments.size()) == found->second->arguments && !arguments.empty(), "program ", program, " takes ",
                  found->second->arguments, " tensors");
  return found->second;
}

// Layouts of a family's tensors -> a program and its number.
using Family = std::map<std::vector<int64_t>, std::pair<std::shared_ptr<const Program>, int64_t>>;
inline std::unordered_map<int64_t, Family> families;

// A device's index, and of each tensor its type, dimensions, sizes and strides. Nothing where a program may not read the
// tensors: they lie on several devices, one twice, or one at an address that kernels do not read in vectors.
inline std::vector<int64_t> layout(const std::vector<Tensor>& tensors) {
  if (tensors.empty()) return {};
  std::vector<int64_t> found{tensors[0].get_device_index()};
  std::vector<const void*> begins;
  for (const Tensor& t : tensors) {
    const void* begin = t.data_ptr();
    if (t.get_device_index() != found[0] || reinterpret_cast<uintptr_t>(begin) % 16 != 0) return {};
    if (begin != nullptr && std::find(begins.begin(), begins.end(), begin) != begins.end()) return {};
    begins.push_back(begin);
    int32_t type = 0;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(t.get(), &type));
    found.push_back(type), found.push_back(t.dim());
    const auto sizes = t.sizes(), strides = t.strides();
    found.insert(found.end(), sizes.begin(), sizes.end());
    found.insert(found.end(), strides.begin(), strides.end());
  }
  return found;
}

// Calls of `family` whose tensors lie as these do run `number` from now on.
inline void bind(int64_t family, int64_t number, std::vector<Tensor> arguments) {
  std::vector<int64_t> wanted = layout(arguments);
  std::shared_ptr<const Program> program = find(number, arguments);
  std::lock_guard lock(mutex);
  if (!wanted.empty()) families[family].insert_or_assign(std::move(wanted), std::pair(std::move(program), number));
}

inline void forget_family(int64_t family) {
  Family last;  // freed behind the lock
  std::lock_guard lock(mutex);
  if (auto found = families.find(family); found != families.end()) {
    last = std::move(found->second);
    families.erase(found);
  }
}

// The program of a call, and its number; -1 where there is none.
inline std::pair<std::shared_ptr<const Program>, int64_t> bound(int64_t family, const std::vector<Tensor>& arguments) {
  const std::vector<int64_t> wanted = layout(arguments);
  std::lock_guard lock(mutex);
  if (auto known = families.find(family); known != families.end())
    if (auto found = known->second.find(wanted); found != known->second.end()) return found->second;
  return {nullptr, -1};
}

// Runs a program on tensors of a device of this kind (a shim's number). launch(step, slots) launches a kernel.
template <typename Launch>
std::vector<Tensor> run(const Program& program, const std::vector<Tensor>& arguments, int32_t device_type, Launch launch) {
  Slots at(program.slots);
  for (int64_t i = 0; i < program.arguments; ++i) at.borrow(i, arguments[i]);
  for (const auto& [slot, t] : program.constants) at.borrow(slot, t);
  for (const Step& step : program.steps) {
    AtenTensorHandle made = nullptr;
    switch (step.kind) {
      case MAKE:
        TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(int64_t(step.sizes.size()), step.sizes.data(), step.strides.data(), step.type, device_type,
                                                        step.device, &made));
        at.take(step.results[0], made);
        break;
      case VIEW:
        TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(at[step.slots[0]], int64_t(step.sizes.size()), step.sizes.data(), step.strides.data(),
                                                              step.offset, &made));
        at.take(step.results[0], made);
        break;
      case OPERATOR:
        call(step, at);
        break;
      case LAUNCH:
        launch(step, at);
        break;
      default:
        for (int64_t slot : step.slots) at.empty(slot);
    }
  }
  std::vector<Tensor> results;
  results.reserve(program.results.size());
  for (int64_t slot : program.results) results.emplace_back(at.copy(slot));
  return results;
}

}  // namespace aoquant::program
