// The emulated GPU: gives the tensors of the null GPU (null_gpu.c) their values. Device memory is the host's, so each
// operator of torch's CUDA backend is replaced by the CPU's kernel on the same memory; emulation.py loads it.
// While a stream is being captured, what is computed is recorded too, and each launch of the graph computes it again.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <torch/library.h>
#include <functional>
#include <set>

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;
using Work = std::function<void()>;

// Of null_gpu.c, which is preloaded.
extern "C" void null_gpu_record(void (*run)(void*), const void* job, size_t size);
extern "C" void (*null_gpu_reduce)(void*, void*, int64_t, int64_t, int, int, double);

static void run(const Work& work) {
  c10::impl::ExcludeDispatchKeyGuard below_autograd(c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  work();
}
static void record(const Work& work) {  // for the launches of the graph that is being captured, if one is
  if (c10::cuda::currentStreamCaptureStatusMayInitCtx() == c10::cuda::CaptureStatus::None) return;
  auto* kept = new Work(work);
  null_gpu_record([](void* job) { run(**static_cast<Work**>(job)); }, &kept, sizeof kept);
}
static void perform(const Work& work) { run(work), record(work); }

// A CPU tensor on a CUDA tensor's memory. It does not own the memory, so a recorded operator keeps none alive.
static Tensor on_host(const Tensor& t) {
  auto options = at::TensorOptions().dtype(t.dtype()).device(at::kCPU);
  if (t.numel() == 0) return at::empty_strided(t.sizes(), t.strides(), options);
  return at::from_blob(t.data_ptr(), t.sizes(), t.strides(), [](void*) {}, options);
}
static void overwrite(const Tensor& to, const Tensor& from) {  // both of one layout, gaps and overlaps included
  memcpy(to.data_ptr(), from.data_ptr(),
         at::detail::computeStorageNbytes(from.sizes(), from.strides(), from.element_size()));
}
template <class Change> static IValue map_tensors(const IValue& v, Change change) {  // of an argument or a result
  if (v.isTensor()) return change(v.toTensor());
  if (v.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& t : v.toTensorList()) list.push_back(change(t));
    return list;
  }
  if (!v.isOptionalTensorList()) return v;
  c10::List<std::optional<Tensor>> list;
  for (const std::optional<Tensor>& t : v.toOptionalTensorList().vec()) list.push_back(t ? change(*t) : t);
  return list;
}
static std::vector<Tensor> tensors_of(const Stack& stack) {
  std::vector<Tensor> all;
  for (const IValue& v : stack) map_tensors(v, [&](const Tensor& t) { return all.emplace_back(t); });
  return all;
}

// The tensors of one call: CUDA tensors are exchanged for the host's on the way in, and back on the way out.
struct Translation {
  std::vector<std::pair<Tensor, Tensor>> pairs;  // on the GPU, on the host
  c10::Device device{at::kCUDA, c10::cuda::current_device()};

  Tensor in(const Tensor& t) {
    if (!t.defined() || !t.is_cuda()) return t;
    for (auto& [gpu, host] : pairs) if (gpu.is_same(t)) return host;
    device = t.device();
    return pairs.emplace_back(t, on_host(t)).second;
  }
  IValue in(const IValue& v) {
    if (!v.isDevice() || !v.toDevice().is_cuda()) return map_tensors(v, [&](const Tensor& t) { return in(t); });
    if (v.toDevice().has_index()) device = v.toDevice();
    return c10::Device(at::kCPU);
  }
  Tensor out(const Tensor& r) {
    if (!r.defined() || !r.is_cpu()) return r;
    for (auto& [gpu, host] : pairs) if (host.is_same(r)) return gpu;
    for (auto& [gpu, host] : pairs)
      if (r.numel() && host.numel() && r.storage().data_ptr().get() == host.storage().data_ptr().get())
        return gpu.as_strided(r.sizes(), r.strides(), gpu.storage_offset() + r.storage_offset());
    Tensor fresh = at::empty_strided(r.sizes(), r.strides(), r.options().device(device));
    overwrite(fresh, r);
    return fresh;
  }
};

// The CPU's kernel with the GPU's random numbers: the CUDA generator's seed and offset decide what is drawn. In a graph
// they are in memory (`captured_`), where each replay puts new ones.
using Random = std::optional<at::PhiloxCudaState>;
static void call(const c10::OperatorHandle& op, Stack& stack, const Random& random, int slot) {
  Tensor state;
  at::Generator cpu = at::detail::getDefaultCPUGenerator();
  if (random) {
    uint64_t seed = random->captured_ ? *random->seed_.ptr : random->seed_.val;
    uint64_t offset = random->captured_ ? *random->offset_.ptr + random->offset_intragraph_ : random->offset_.val;
    uint64_t mixed = seed * 0x9E3779B97F4A7C15ull + offset * 0xD1B54A32D192ED03ull + 1;
    std::lock_guard<std::mutex> lock(cpu.mutex());
    if (slot >= 0) stack[slot] = at::detail::createCPUGenerator(mixed);
    else state = cpu.get_state(), cpu.set_current_seed(mixed);
  }
  op.callBoxed(stack);
  std::lock_guard<std::mutex> lock(cpu.mutex());
  if (state.defined()) cpu.set_state(state);
}
static void emulate(const c10::OperatorHandle& op, Stack* stack) {
  Translation translation;
  Stack inputs, results;
  std::optional<at::Generator> generator;
  int slot = -1, n = op.schema().arguments().size();
  for (int i = 0; i < n; i++) {
    IValue argument = torch::jit::peek(*stack, i, n);
    if (op.schema().arguments()[i].name() == "generator") slot = i;
    if (argument.isGenerator() && argument.toGenerator().device().is_cuda()) generator = argument.toGenerator();
    inputs.push_back(argument.isGenerator() && generator ? IValue() : translation.in(argument));
  }
  torch::jit::drop(*stack, n);
  Random random;
  if (op.hasTag(at::Tag::nondeterministic_seeded)) {
    if (!generator) generator = at::globalContext().defaultGenerator(translation.device);
    std::lock_guard<std::mutex> lock(generator->mutex());
    random = at::check_generator<at::CUDAGeneratorImpl>(*generator)->philox_cuda_state(4);
  }
  results = inputs;
  run([&] { call(op, results, random, slot); });
  std::vector<std::pair<Tensor, Tensor>> resized;  // what the operator was given too small, and the GPU's memory for it
  for (auto& [gpu, host] : translation.pairs) {
    if (gpu.sizes() == host.sizes()) continue;
    gpu.resize_(host.sizes());
    resized.emplace_back(on_host(gpu), host).first.copy_(host);
  }
  for (IValue& v : results) stack->push_back(v = map_tensors(v, [&](const Tensor& t) { return translation.out(t); }));
  std::vector<Tensor> places = tensors_of(results);
  for (Tensor& t : places) if (t.defined() && t.is_cuda()) t = on_host(t);
  record([=] {
    Stack again = inputs;
    call(op, again, random, slot);
    std::vector<Tensor> made = tensors_of(again);
    for (size_t i = 0; i < made.size(); i++)
      if (made[i].defined() && made[i].data_ptr() != places[i].data_ptr()) overwrite(places[i], made[i]);
    for (auto& [place, host] : resized) place.copy_(host);
  });
}

// Operators that no CPU has, or that have to see both sides.
static Tensor wide(const Tensor& t) { return t.to(at::kFloat); }
static Tensor mm_dtype(const Tensor& a, const Tensor& b, at::ScalarType type) {
  TORCH_CHECK(a.scalar_type() == b.scalar_type() && (type == a.scalar_type() || type == at::kFloat), "out_dtype");
  Tensor out = at::empty({a.size(0), b.size(1)}, a.options().dtype(type));
  perform([to = on_host(out), a = on_host(a), b = on_host(b)] { to.copy_(at::mm(wide(a), wide(b))); });
  return out;
}
static Tensor& addmm_dtype_out(const Tensor& s, const Tensor& a, const Tensor& b, at::ScalarType type,
                               const at::Scalar& beta, const at::Scalar& alpha, Tensor& out) {
  TORCH_CHECK(a.scalar_type() == b.scalar_type() && s.scalar_type() == type && out.scalar_type() == type, "out_dtype");
  perform([=, to = on_host(out), s = on_host(s), a = on_host(a), b = on_host(b)] {
    to.copy_(at::addmm(wide(s), wide(a), wide(b), beta, alpha));
  });
  return out;
}
static Tensor& copy_(Tensor& self, const Tensor& from, bool non_blocking) {
  if (self.numel() == 0) return self;
  Tensor to_host = self.is_cuda() ? on_host(self) : self, from_host = from.is_cuda() ? on_host(from) : from;
  bool crosses = self.is_cuda() != from.is_cuda(), same = self.scalar_type() == from.scalar_type() &&
    self.sizes() == from.sizes() && self.strides() == from.strides() && self.is_non_overlapping_and_dense();
  auto stream = c10::cuda::getCurrentCUDAStream();
  // Between host and device torch copies memory of one layout: it counts as one copy, the rest is arithmetic.
  if (crosses) cudaMemcpyAsync(self.data_ptr(), from.data_ptr(), same * self.nbytes(), cudaMemcpyDefault, stream);
  if (!crosses || !same) perform([=] { to_host.copy_(from_host); });
  if (crosses && !non_blocking) C10_CUDA_CHECK(cudaStreamSynchronize(stream));
  return self;
}
// NCCL's sums: ncclDataType_t counts as `types` does, ncclRedOp_t from sum (0) to average (4) and the factor's sum (5).
static void reduce(void* to, void* parts, int64_t ranks, int64_t n, int type, int reduction, double factor) {
  static const at::ScalarType types[] = {at::kChar, at::kByte, at::kInt, at::kInt, at::kLong, at::kLong,
                                         at::kHalf, at::kFloat, at::kDouble, at::kBFloat16};
  run([&] {
    Tensor all = at::from_blob(parts, {ranks, n}, types[type]), out = at::from_blob(to, {n}, types[type]);
    if (type == 6 || type == 9) all = wide(all);
    if (reduction == 5) all = all * factor;
    out.copy_(reduction == 1 ? all.prod(0) : reduction == 2 ? all.amax(0) : reduction == 3 ? all.amin(0) : all.sum(0));
    if (reduction == 4) out.copy_(all.sum(0) / ranks);
  });
}
static const std::set<std::string> real_ones = {  // operators whose own CUDA kernels are right here
  "aten::empty", "aten::empty_strided", "aten::set_", "aten::resize_", "aten::_pin_memory", "aten::is_pinned",
  "aten::record_stream", "aten::_local_scalar_dense", "aten::copy_", "aten::_efficientzerotensor", "aten::is_set_to",
  "aten::_has_compatible_shallow_copy_type", "aten::_copy_from", "aten::_to_copy",
  "aten::empty_like", "aten::resize_as_"};
static std::unique_ptr<torch::Library> library;

static bool install() {
  using c10::DispatchKey;
  library = std::make_unique<torch::Library>(torch::Library::IMPL, "aten", DispatchKey::CUDA, __FILE__, __LINE__);
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    auto op = c10::Dispatcher::singleton().findSchema(name);
    if (name.name.rfind("aten::", 0) != 0 || real_ones.count(name.name) || !op) continue;
    auto has = [&](DispatchKey key) { return op->hasKernelForDispatchKey(key); };
    bool on_cpu = has(DispatchKey::CPU) || has(DispatchKey::CompositeExplicitAutograd) ||
                  has(DispatchKey::CompositeExplicitAutogradNonFunctional);
    const auto& returns = op->schema().returns();
    bool view = !returns.empty() && returns[0].alias_info() && !returns[0].alias_info()->isWrite();
    if (!has(DispatchKey::CUDA) || !on_cpu || view) continue;
    std::string overload = name.overload_name.empty() ? "" : "." + name.overload_name;
    library->impl((name.name.substr(6) + overload).c_str(), torch::CppFunction::makeFromBoxedFunction<&emulate>());
  }
  library->impl("copy_", &copy_).impl("mm.dtype", &mm_dtype).impl("addmm.dtype_out", &addmm_dtype_out);
  null_gpu_reduce = reduce;
  return true;
}
static bool installed = install();
