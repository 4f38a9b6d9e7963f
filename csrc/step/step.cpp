// A repeated layer's node of autograd, and the ops of a compiled step: both run recorded programs (program.h) without
// Python.
//
// aoquant/linear/replay.py asks for a forward and says what a kind of forwards leaves for backward. Compiled code calls
// the ops by themselves, and aoquant/ops/define.py says which program a call of one is. What is not ordinary, or not
// known, goes back to Python. torch's stable ABI knows no autograd, so this library serves the torch alone that it was
// built with.
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/autocast_mode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <exception>
#include <optional>
#include <tuple>
#include <type_traits>

#include "program.h"

// native_step.py looks for this text, before it loads the library.
extern "C" __attribute__((used, visibility("default"))) const char aoquant_step_torch[] = "aoquant step for torch " AOQUANT_TORCH;

namespace aoquant::step {
namespace {

using torch::autograd::Node;
using torch::autograd::variable_list;

constexpr int64_t INPUTS = 3;    // x, w and bias
constexpr size_t ARGUMENTS = 3;  // of an op: tensors, numbers and words

std::unordered_map<std::string, int64_t> op_families;  // of an op's calls, by `call_of`
std::atomic<int64_t> paused = 0;                       // blocks that choose kernels, in all threads

// What a call shares with other layers while its node keeps it: one number is held, more are not.
struct Shared {
  c10::weak_intrusive_ptr<c10::TensorImpl> tensor;
  Tensor single;

  explicit Shared(const Tensor& t) : tensor(t.getIntrusivePtr()) {
    if (t.numel() == 1) single = t;
  }
};

using Left = std::shared_ptr<const std::vector<Shared>>;
auto& shared = *new std::unordered_map<int64_t, Left>;  // by the call; never freed: a node may end later

template <typename Signature>
c10::TypedOperatorHandle<Signature> op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// Whether programs may read these tensors: nothing watches operators, chooses kernels or stands for a tensor.
bool ordinary(const Tensors& tensors) {
  constexpr c10::DispatchKeySet strange({c10::DispatchKey::Python, c10::DispatchKey::Functionalize, c10::DispatchKey::Batched, c10::DispatchKey::FuncTorchBatched,
                                         c10::DispatchKey::FuncTorchGradWrapper, c10::DispatchKey::Sparse, c10::DispatchKey::Conjugate, c10::DispatchKey::Negative});
  const char* forced = std::getenv("AOQUANT_BACKEND");
  if (paused != 0 || (forced != nullptr && *forced != 0)) return false;
  if (c10::impl::dispatch_mode_enabled() || at::impl::torch_function_mode_enabled()) return false;
  if (at::autocast::is_autocast_enabled(tensors[0].device().type())) return false;
  for (const Tensor& t : tensors)
    if (t.key_set().has_any(strange)) return false;
  return true;
}

// The program of a call, where programs may run now and one is known.
Bound ordinary_bound(int64_t family, const Tensors& given) { return !given.empty() && ordinary(given) ? bound(family, given) : Bound{}; }

// torch 2.13 counts nodes by intrusive pointers, earlier ones by shared ones.
template <typename T>
auto make_node() {
  if constexpr (std::is_base_of_v<c10::intrusive_ptr_target, Node>) {
    return c10::make_intrusive<T>();
  } else {
    return std::shared_ptr<T>(new T(), [](T* node) { deleteNode(node); });
  }
}

struct QuantizedLinearBackward : Node {
  std::shared_ptr<const Kind> kind;
  std::vector<torch::autograd::SavedVariable> saved;
  Tensor random;  // not saved: the calls of a step advance one state, in place
  int64_t call = 0;  // of what it shares
  bool released = false;

  ~QuantizedLinearBackward() override { share_no_more(); }

  std::string name() const override { return "QuantizedLinearBackward"; }

  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override {
    TORCH_CHECK(false, "a quantised layer ran before compiled autograd was switched on: switch it on before the forward");
  }

  void release_variables() override {
    std::lock_guard lock(mutex_);
    for (auto& variable : saved) variable.reset_data();
    share_no_more();
    released = true;
  }

  variable_list apply(variable_list&& gradients) override {
    Tensors given{gradients[0].defined() ? std::move(gradients[0]) : input_metadata(0).zeros_like()};
    {
      std::lock_guard lock(mutex_);
      TORCH_CHECK(!released, torch::autograd::ERR_BACKWARD_TWICE);
      for (const auto& variable : saved) given.push_back(variable.unpack(getptr()));
    }
    if (random.defined()) given.push_back(random);
    Tensors made = gradients_of(given);
    if (random.defined()) random.slice(0, 2).add_(1);  // the step
    variable_list found(INPUTS);
    size_t next = 0;
    for (int64_t i = 0; i < INPUTS; ++i)
      if (kind->asked >> i & 1) found[i] = made.at(next++);
    TORCH_CHECK(next == made.size(), "a backward makes ", made.size(), " gradients, and ", next, " are asked for");
    return found;
  }

 private:
  void share_no_more() {
    if (call == 0) return;
    std::remove_reference_t<decltype(shared)>::node_type last;  // freed behind the lock
    std::lock_guard lock(aoquant::step::mutex);
    last = shared.extract(std::exchange(call, 0));
  }

  Tensors gradients_of(const Tensors& given) const {
    static const auto python = op<Tensors(int64_t, at::TensorList)>("aoquant_step::gradients");
    if (!at::GradMode::is_enabled()) {
      try {
        if (const Bound found = ordinary_bound(kind->family, given); found.program != nullptr) return run(*found.program, given);
      } catch (const std::exception&) {  // the backward's own error comes from its steps, one by one
      }
    }
    // straight to Python's: functorch has no rule for this operator, and sees those that it calls
    return python.redispatch(c10::DispatchKeySet(given[0].is_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU), kind->number, given);
  }
};

// y of a forward of `family` that needs no gradient; none where the call is not known, or its program fails.
std::optional<Tensor> product(int64_t family, const Tensors& given) {
  try {
    if (const Bound found = ordinary_bound(family, given); found.program != nullptr) return std::move(run(*found.program, given)[0]);
  } catch (const std::exception&) {  // the forward's own error comes from its steps, one by one
  }
  return std::nullopt;
}

// Results of a forward of `family` that autograd does not keep, y first, with y's node, Python's number of its kind, and
// the number of the call if it shares tensors, else 0; nothing and -1 where the call is not known, or its program fails.
// given: x, w, bias where there is one, and what else forward reads.
std::tuple<Tensors, int64_t, int64_t> forward(int64_t family, Tensors given, const std::optional<Tensor>& bias, const std::optional<Tensor>& random) {
  TORCH_CHECK(given.size() >= 2, "a forward has an input and a weight");
  Bound found;
  Tensors made;
  try {
    found = ordinary_bound(family, given);
    if (found.kind == nullptr) return {Tensors(), -1, 0};
    made = run(*found.program, given);
  } catch (const std::exception&) {  // the forward's own error comes from its steps, one by one; a hook's is the caller's
    return {Tensors(), -1, 0};
  }
  const std::shared_ptr<const Kind>& kind = found.kind;
  TORCH_CHECK(bias.has_value() || (kind->asked >> 2 & 1) == 0, "a forward has no bias to give a gradient");
  TORCH_CHECK(int64_t(made.size()) > kind->saved, "a forward makes ", made.size(), " tensors and saves ", kind->saved);
  auto node = make_node<QuantizedLinearBackward>();
  torch::autograd::edge_list edges;
  const Tensor* inputs[INPUTS] = {&given[0], &given[1], bias ? &*bias : nullptr};
  for (int64_t i = 0; i < INPUTS; ++i)
    edges.push_back(kind->asked >> i & 1 ? torch::autograd::impl::gradient_edge(*inputs[i]) : torch::autograd::Edge());
  node->set_next_edges(std::move(edges));
  node->kind = kind;
  for (int64_t i = 0; i < kind->saved; ++i) node->saved.emplace_back(made[1 + i], false);
  if (random) node->random = *random;
  torch::autograd::set_history(made[0], node);
  if (!kind->shared.empty()) {
    static int64_t last = 0;
    auto left = std::make_shared<std::vector<Shared>>();
    for (int64_t i : kind->shared) left->emplace_back(made.at(i));
    std::lock_guard lock(aoquant::step::mutex);
    node->call = ++last;
    shared.emplace(last, std::move(left));
  }
  Tensors rest;
  for (int64_t i = 0; i < int64_t(made.size()); ++i)
    if (i == 0 || (i > kind->saved && std::find(kind->shared.begin(), kind->shared.end(), i) == kind->shared.end())) rest.push_back(std::move(made[i]));
  return {std::move(rest), kind->number, node->call};
}

// Lets forwards by this program leave their backward to a node.
void learn(int64_t program, int64_t number, int64_t family, int64_t saved, at::IntArrayRef shared, int64_t asked) {
  auto made = std::make_shared<const Kind>(Kind{number, family, saved, shared.vec(), asked});
  std::lock_guard lock(mutex);
  known(program)->kind = std::move(made);
}

// What a call shares; nothing where a tensor of it is gone.
Tensors shared_by(int64_t call) {
  Left left;
  {
    std::lock_guard lock(mutex);
    if (auto known = shared.find(call); known != shared.end()) left = known->second;
  }
  // not under the lock: what Python alone keeps waits for the GIL, and the GIL's owner may wait for the lock to end a node
  Tensors found;
  if (left == nullptr) return found;
  for (const Shared& one : *left) {
    auto alive = one.tensor.lock();
    if (alive == nullptr) return {};
    found.emplace_back(std::move(alive));
  }
  return found;
}

std::string call_of(const std::string& op, at::IntArrayRef numbers, const std::string& words) {
  std::string made = op + '\n' + words + '\n';
  return made.append(reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(int64_t));
}

// Results of an op's call, whose arguments end the stack: none where it is not known, or its program fails.
std::optional<Tensors> results_of(const std::string& op, const torch::jit::Stack& stack) {
  const c10::IValue *arguments = &stack[stack.size() - ARGUMENTS], &tensors = arguments[0], &numbers = arguments[1];
  if (!tensors.isTensorList() || !numbers.isIntList()) return std::nullopt;
  const Tensors given = tensors.toTensorVector();
  if (given.empty() || !ordinary(given)) return std::nullopt;
  if (at::GradMode::is_enabled() && std::any_of(given.begin(), given.end(), [](const Tensor& t) { return t.requires_grad(); })) return std::nullopt;
  int64_t family;
  {
    const std::string call = call_of(op, numbers.toIntVector(), arguments[2].toStringRef());
    std::lock_guard lock(mutex);
    auto found = op_families.find(call);
    if (found == op_families.end()) return std::nullopt;
    family = found->second;
  }
  Bound found;
  Tensors made;
  try {
    found = bound(family, given);
    if (found.none == nullptr) return std::nullopt;
    made = run(*found.program, given);
  } catch (const std::exception&) {  // the op's own error comes from its steps, one by one
    return std::nullopt;
  }
  Tensors whole(found.none->size());
  for (size_t i = 0, next = 0; i < whole.size(); ++i)
    if (!(*found.none)[i]) whole[i] = std::move(made.at(next++));
  return whole;
}

// An op that compiled steps repeat.
void repeated(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  std::optional<Tensors> made = results_of(op.operator_name().name, *stack);
  // Python's kernel is there for all devices, of which csrc takes two
  if (!made) return op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::XPU), stack);
  torch::jit::drop(*stack, ARGUMENTS);
  for (Tensor& t : *made) stack->emplace_back(std::move(t));
}

// Lets calls of an op with these numbers and words run the programs of `family`, of which `program` is one. none: which
// of its results are missing.
void learn_op(const std::string& op, at::IntArrayRef numbers, const std::string& words, int64_t family, int64_t program, const c10::List<bool>& none) {
  auto made = std::make_shared<const std::vector<bool>>(none.begin(), none.end());
  std::lock_guard lock(mutex);
  known(program)->none = std::move(made);
  op_families.insert_or_assign(call_of(op, numbers, words), family);
}

// Other kernels are there: ops may choose among them anew.
void forget_ops() {
  std::lock_guard lock(mutex);
  op_families.clear();
}

// Blocks that choose kernels have begun, or, by a negative number, ended.
void pause(int64_t blocks) { paused += blocks; }

Tensors run_program(int64_t program, const Tensors& arguments) { return run(*find(program, arguments), arguments); }

// The results of a call, and the number of its program; -1 where there is none.
std::tuple<Tensors, int64_t> run_family(int64_t family, const Tensors& arguments) {
  const Bound found = bound(family, arguments);
  if (found.program == nullptr) return {Tensors(), -1};
  return {run(*found.program, arguments), found.program->number};
}

void take_ops(torch::Library& m) {
  for (const char* op : {"encode", "matmul", "gradients"}) m.impl(op, torch::CppFunction::makeFromBoxedFunction<&repeated>());
}

}  // namespace

TORCH_LIBRARY(aoquant_step, m) {
  m.def("program_make(int[] words, str names, int arguments, Tensor[] constants) -> int");
  m.def("program_forget(int program) -> ()");
  m.def("program_run(int program, Tensor[] arguments) -> Tensor[]");
  m.def("family_bind(int family, int program, Tensor[] arguments) -> ()");
  m.def("family_forget(int family) -> ()");
  m.def("family_run(int family, Tensor[] arguments) -> (Tensor[], int)");
  m.def("product(int family, Tensor[] given) -> Tensor?");
  m.def("forward(int family, Tensor[] given, Tensor? bias, Tensor? random) -> (Tensor[], int, int)");
  m.def("learn(int program, int number, int family, int saved, int[] shared, int asked) -> ()");
  m.def("shared(int call) -> Tensor[]");
  m.def("learn_op(str op, int[] numbers, str words, int family, int program, bool[] none) -> ()");
  m.def("forget_ops() -> ()");
  m.def("pause(int blocks) -> ()");
  m.def("gradients(int number, Tensor[] given) -> Tensor[]");  // Python's
}
TORCH_LIBRARY_IMPL(aoquant_step, CompositeImplicitAutograd, m) {
  m.impl("program_make", &make);
  m.impl("program_forget", &forget);
  m.impl("program_run", &run_program);
  m.impl("family_bind", &bind);
  m.impl("family_forget", &forget_family);
  m.impl("family_run", &run_family);
  m.impl("product", &product);
  m.impl("forward", &forward);
  m.impl("learn", &learn);
  m.impl("shared", &shared_by);
  m.impl("learn_op", &learn_op);
  m.impl("forget_ops", &forget_ops);
  m.impl("pause", &pause);
}
TORCH_LIBRARY_IMPL(aoquant, CUDA, m) { take_ops(m); }
TORCH_LIBRARY_IMPL(aoquant, CPU, m) { take_ops(m); }

}  // namespace aoquant::step
