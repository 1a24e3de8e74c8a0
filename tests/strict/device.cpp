// The device: addresses that fault on the host, and one fallback that runs the CPU's kernel of every operator.
#include "strict.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/enum_tag.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pthread.h>
#include <torch/library.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <mutex>
#include <set>

namespace strict {

int64_t setting(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  return text && *text ? std::atoll(text) : otherwise;
}

namespace {

using at::Tensor, c10::Device, c10::DeviceIndex, c10::DispatchKey, c10::DispatchKeySet, c10::IValue, c10::Storage;
using Index = DeviceIndex;
constexpr auto kType = c10::DeviceType::PrivateUse1;
const Index kCount = static_cast<Index>(setting("STRICT_DEVICES", 8));
const int64_t kMemory = setting("STRICT_MEMORY", int64_t(64) << 30);

// ---- state of the process

std::recursive_mutex mutex_;
using Locked = std::lock_guard<std::recursive_mutex>;
thread_local Index current_ = 0;
bool used_ = false, forked_ = false;
py::object* on_wait_ = nullptr;
std::map<std::string, std::pair<int64_t, int64_t>> counts_;  // kernels and copies: how many, and bytes

// A stream, and for each stream the last of its tickets that somebody has waited for.
using Lane = std::pair<Index, c10::StreamId>;
using Clock = std::map<Lane, int64_t>;
Clock queued_, host_;           // the last ticket of each stream, and those that the host has waited for
std::map<Lane, Clock> behind_;  // what each stream waits for before it goes on

// Copies under way between the device and pinned memory; the host's next wait for their stream ends them.
struct Flight {
  Tensor host, bytes, left;  // what arrives there, and what the program finds there meanwhile
  bool to_host;
  Lane lane;
  int64_t ticket;
  std::pair<uintptr_t, uintptr_t> source;  // addresses of the tensor on the device, from which the bytes are read

  void check() const {
    const Tensor now = host.contiguous();  // bytes are compared, as NaN is never equal
    TORCH_CHECK(std::memcmp(now.data_ptr(), left.data_ptr(), now.nbytes()) == 0, "strict: pinned memory was changed while its copy ",
                to_host ? "from" : "to", " the device was under way");
  }
};
std::vector<Flight> flights_;

std::pair<uintptr_t, uintptr_t> addresses(const Tensor& t) {
  int64_t last = 0;
  for (int64_t dim = 0; dim < t.dim(); ++dim) last += (t.size(dim) - 1) * t.stride(dim);
  const auto first = reinterpret_cast<uintptr_t>(t.const_data_ptr());
  return {first, t.numel() ? first + (last + 1) * t.element_size() : first};
}

Lane current_lane(std::optional<Device> device = {});
std::map<uintptr_t, size_t> pinned_;

void use() {
  TORCH_CHECK(!forked_, "Cannot re-initialize strict in a forked process: use the start method 'spawn'");
  if (!used_) pthread_atfork(nullptr, nullptr, [] { forked_ = true; });
  used_ = true;
}

void count(const std::string& what, int64_t bytes) {
  Locked locked(mutex_);
  auto& [times, total] = counts_[what];
  ++times, total += bytes;
}

// A processor faults on an address with this bit, as no user address has it (and ARM ignores only the top byte).
constexpr uintptr_t kBit = uintptr_t(1) << 55;
void* flipped(const void* pointer) {
  return pointer ? reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(pointer) ^ kBit) : nullptr;
}

bool is_pinned(const void* pointer) {
  Locked locked(mutex_);
  auto after = pinned_.upper_bound(reinterpret_cast<uintptr_t>(pointer));
  return after != pinned_.begin() && reinterpret_cast<uintptr_t>(pointer) < std::prev(after)->first + std::prev(after)->second;
}

// ---- memory

struct Block {
  c10::DataPtr data;
  int64_t size;
  Index index;
};

struct Memory final : c10::DeviceAllocator {
  std::vector<c10::CachingDeviceAllocator::DeviceStats> stats{static_cast<size_t>(kCount)};

  // From now on only the device has the address of this memory.
  c10::DataPtr take(c10::DataPtr data, size_t size, Index index) {
    void* address = size ? flipped(data.get()) : nullptr;
    auto* block = new Block{std::move(data), static_cast<int64_t>(size), index};
    change(*block, 1);
    return {address, block, &give, Device(kType, index)};
  }
  void change(const Block& block, int sign) {
    Locked locked(mutex_);
    auto& s = stats[block.index];
    for (auto* bytes : {&s.allocated_bytes[0], &s.reserved_bytes[0], &s.active_bytes[0]})
      sign > 0 ? bytes->increase(block.size) : bytes->decrease(block.size);
    sign > 0 ? s.allocation[0].increase(1) : s.allocation[0].decrease(1);
  }
  static void give(void* context);
  c10::DataPtr allocate(size_t size) override {
    use();
    const int64_t held = stats[current_].allocated_bytes[0].current;
    TORCH_CHECK_WITH(OutOfMemoryError, held + static_cast<int64_t>(size) <= kMemory, "strict out of memory: tried to allocate ",
                     size, " bytes; ", held, " of ", kMemory, " are in use");
    auto data = c10::GetCPUAllocator()->allocate(size);
    if (size) std::memset(data.get(), 0xFF, size);  // NaN in every floating-point type, -1 in integers
    return take(std::move(data), size, current_);
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(flipped(to), flipped(from), size); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(Index index) override { return stats.at(index); }
  void resetAccumulatedStats(Index) override {}
  void resetPeakStats(Index index) override {
    auto& s = stats.at(index);
    for (auto* bytes : {&s.allocated_bytes[0], &s.reserved_bytes[0], &s.active_bytes[0]}) bytes->reset_peak();
  }
  std::pair<size_t, size_t> getMemoryInfo(Index index) override {
    return {kMemory - stats.at(index).allocated_bytes[0].current, kMemory};
  }
};
Memory& memory() {
  static auto* made = new Memory;
  return *made;
}
void Memory::give(void* context) {
  std::unique_ptr<Block> block(static_cast<Block*>(context));
  memory().change(*block, -1);
}

struct Pinned final : at::HostAllocator {
  c10::DataPtr allocate(size_t size) override {
    use();
    auto* data = new c10::DataPtr(c10::GetCPUAllocator()->allocate(size));
    Locked locked(mutex_);
    if (size) pinned_[reinterpret_cast<uintptr_t>(data->get())] = size;
    return {data->get(), data, [](void* context) {
      std::unique_ptr<c10::DataPtr> data(static_cast<c10::DataPtr*>(context));
      Locked locked(mutex_);
      pinned_.erase(reinterpret_cast<uintptr_t>(data->get()));
    }, c10::DeviceType::CPU};
  }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
Pinned& pinned_memory() {
  static auto* made = new Pinned;
  return *made;
}

// ---- random numbers: a CPU generator for each device

// TorchNeuron draws masks of dropout on the host, and computes in 32 bits what is 64 bits wide.
const bool kLikeNeuron = setting("STRICT_NEURON_LIKE", 0);

void narrow(const Tensor& t) {
  if (!t.defined() || !t.is_cpu() || !t.is_non_overlapping_and_dense()) return;
  if (t.scalar_type() == at::kLong) t.copy_(t.to(at::kInt));
  if (t.scalar_type() == at::kDouble) t.copy_(t.to(at::kFloat));
}

// What a kernel reads of a device's tensor: the bits stay as they are where they were copied to.
Tensor narrowed(const Tensor& t) {
  if (t.scalar_type() == at::kLong) return t.to(at::kInt).to(at::kLong);
  return t.scalar_type() == at::kDouble ? t.to(at::kFloat).to(at::kDouble) : t;
}

struct Generator final : c10::GeneratorImpl {
  explicit Generator(Index index, at::Generator cpu = at::make_generator<at::CPUGeneratorImpl>())
      : GeneratorImpl(Device(kType, index), DispatchKeySet(DispatchKey::PrivateUse1)), cpu(std::move(cpu)) {}
  void set_current_seed(uint64_t seed) override { cpu.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { cpu.set_offset(offset); }
  uint64_t get_offset() const override { return cpu.get_offset(); }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override { return cpu.seed(); }
  void set_state(const c10::TensorImpl& state) override { cpu.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return cpu.unsafeGetGeneratorImpl()->get_state(); }
  Generator* clone_impl() const override { return new Generator(device().index(), cpu.clone()); }
  at::Generator cpu;
};
at::Generator& generator(Index index) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>;
    for (Index i = 0; i < kCount; ++i) made->push_back(at::make_generator<Generator>(i));
    return made;
  }();
  return all->at(index < 0 ? current_ : index);
}
at::Generator& cpu_generator(const at::Generator& g) { return static_cast<Generator*>(g.unsafeGetGeneratorImpl())->cpu; }

// An operator without a generator draws from the device's default one, which the CPU's kernel takes for its own.
struct Draws {
  explicit Draws(Index index) : own(cpu_generator(generator(index))), host(at::detail::getDefaultCPUGenerator()) { swap(); }
  ~Draws() { swap(); }
  void swap() {
    auto mine = own.get_state();
    own.set_state(host.get_state());
    host.set_state(mine);
  }
  Locked locked{mutex_};
  at::Generator &own, host;
};

// ---- operators

Tensor over(const Storage& storage, DispatchKey key, const Tensor& like) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(Storage(storage), DispatchKeySet(key), like.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  if (like.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return made;
}

// One call of an operator: its storages, as the program knows them and as the kernel does.
struct Call {
  std::vector<std::pair<Storage, Storage>> storages;
  Index index = 0;

  Tensor in(const Tensor& t) {
    if (!t.defined() || !t.is_privateuseone()) return t;
    for (auto& [outer, inner] : storages)
      if (outer.is_alias_of(t.storage())) return over(inner, DispatchKey::CPU, t);
    c10::DataPtr data(flipped(t.storage().data()), c10::DeviceType::CPU);
    storages.emplace_back(t.storage(), Storage(Storage::use_byte_size_t(), t.storage().nbytes(), std::move(data), c10::GetCPUAllocator(), true));
    return over(storages.back().second, DispatchKey::CPU, t);
  }
  Tensor out(const Tensor& t) {
    if (!t.defined() || !t.is_cpu()) return t;
    for (auto& [outer, inner] : storages)
      if (inner.is_alias_of(t.storage())) return over(outer, DispatchKey::PrivateUse1, t);
    Storage inner = t.storage();
    storages.emplace_back(Storage(Storage::use_byte_size_t(), inner.nbytes(), taken(inner), &memory(), true), inner);
    return over(storages.back().first, DispatchKey::PrivateUse1, t);
  }
  c10::DataPtr taken(Storage& inner) {
    auto data = inner.set_data_ptr(c10::DataPtr(nullptr, c10::DeviceType::CPU));
    return memory().take(std::move(data), inner.nbytes(), index);
  }
  // A kernel that resized a tensor has given it other memory.
  void follow_resizes() {
    for (auto& [outer, inner] : storages)
      if (inner.data() && inner.data() != flipped(outer.data())) {
        outer.set_nbytes(inner.nbytes());
        outer.set_data_ptr(taken(inner));
      }
  }
};

template <class F>
IValue mapped(const IValue& value, F f) {
  if (value.isTensor()) return f(value.toTensor());
  if (value.isTensorList()) {
    c10::List<Tensor> made;
    for (const Tensor& t : value.toTensorVector()) made.push_back(f(t));
    return made;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> made;
    for (std::optional<Tensor> t : value.toOptionalTensorList()) made.push_back(t ? std::optional<Tensor>(f(*t)) : std::nullopt);
    return made;
  }
  return value;
}

bool writes(const c10::Argument& a) { return a.alias_info() && a.alias_info()->isWrite(); }

// All tensors of an operator are on one device, as on CUDA; it may read numbers and indices from the host.
Device checked_device(const c10::FunctionSchema& schema, const std::vector<IValue>& arguments) {
  static const std::set<std::string> indexing{"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index"};
  std::optional<Device> device;
  auto find = [&](const Tensor& t) { if (t.defined() && !t.is_cpu() && !device) device = t.device(); return t; };
  for (const auto& value : arguments) mapped(value, find);
  for (const auto& value : arguments) if (value.isDevice() && !device) device = value.toDevice();
  if (!device || !device->has_index()) device = Device(kType, current_);
  for (size_t i = 0; i < arguments.size(); ++i) {
    const bool reads = !writes(schema.arguments()[i]);
    mapped(arguments[i], [&](const Tensor& t) {
      if (!t.defined() || t.device() == *device || (reads && t.is_cpu() && t.dim() == 0)) return t;
      const bool is_index = reads && t.is_cpu() && arguments[i].isOptionalTensorList() && indexing.count(schema.name());
      TORCH_CHECK(is_index, "Expected all tensors to be on the same device, but found at least two devices, ", *device, " and ",
                  t.device(), "! (argument ", schema.arguments()[i].name(), " of ", schema.operator_name(), ")");
      host_waits("indices from the host");
      return t;
    });
  }
  return *device;
}

// Operators whose result has a size that the host must learn.
void count_waits_for_sizes(const c10::FunctionSchema& schema, const std::vector<IValue>& arguments) {
  static const std::set<std::string> sized{"aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim",
                                           "aten::unique_consecutive", "aten::bincount", "aten::equal"};
  if (sized.count(schema.name()) || (schema.name() == "aten::repeat_interleave" && arguments.back().isNone())) host_waits(schema.name());
  for (const auto& value : arguments)
    if (value.isOptionalTensorList())
      mapped(value, [&](const Tensor& t) {
        if (t.defined() && t.scalar_type() == at::kBool) host_waits("index by a mask");
        return t;
      });
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  use();
  const auto& schema = op.schema();
  const size_t n = schema.arguments().size();
  const std::vector<IValue> outer(stack->end() - n, stack->end());
  Call call;
  call.index = checked_device(schema, outer).index();
  count_waits_for_sizes(schema, outer);
  count("kernel " + schema.name(), 0);
  bool draws = op.hasTag(at::Tag::nondeterministic_seeded);
  for (size_t i = 0; i < n; ++i)
    if (writes(schema.arguments()[i])) mapped(outer[i], [](const Tensor& t) { return refuse_change(t), t; });
  std::vector<IValue> inner;
  for (size_t i = 0; i < n; ++i) {
    const auto& value = outer[i];
    const bool computes = kLikeNeuron && !schema.arguments()[i].alias_info();
    TORCH_CHECK(!value.isStorage(), schema.operator_name(), " takes a storage: strict has no kernel for it");
    if (value.isGenerator()) {
      auto g = value.toGenerator();
      TORCH_CHECK(g.device().type() == kType, "Expected a 'strict' device type for generator but found '", g.device(), "'");
      inner.emplace_back(cpu_generator(g));
      draws = false;
    } else {
      inner.push_back(value.isDevice() ? IValue(Device(c10::DeviceType::CPU)) : mapped(value, [&](const Tensor& t) {
        return computes && t.defined() && t.is_privateuseone() ? narrowed(call.in(t)) : call.in(t);
      }));
    }
  }
  torch::jit::drop(*stack, n);
  stack->insert(stack->end(), inner.begin(), inner.end());
  {
    at::AutoDispatchBelowADInplaceOrView below;
    std::optional<Draws> drawing;
    if (draws && !(kLikeNeuron && schema.name() == "aten::native_dropout")) drawing.emplace(call.index);
    op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
    for (size_t r = 0; kLikeNeuron && r < schema.returns().size(); ++r) {
      const auto* alias = schema.returns()[r].alias_info();
      if (!alias || alias->isWrite())  // a view computes nothing
        mapped((*stack)[stack->size() - schema.returns().size() + r], [](const Tensor& t) { return narrow(t), t; });
    }
  }
  call.follow_resizes();
  for (size_t i = 0; i < n; ++i) {
    if (!writes(schema.arguments()[i]) || !outer[i].isTensor() || !outer[i].toTensor().defined()) continue;
    const auto &here = outer[i].toTensor(), &there = inner[i].toTensor();
    if (here.sizes() != there.sizes() || here.strides() != there.strides())
      here.unsafeGetTensorImpl()->set_sizes_and_strides(there.sizes(), there.strides(), there.storage_offset());
  }
  const auto& returns = schema.returns();
  for (size_t r = 0; r < returns.size(); ++r) {
    IValue& result = (*stack)[stack->size() - returns.size() + r];
    size_t i = n;  // the argument that was written and is returned
    if (writes(returns[r]))
      for (i = 0; i < n; ++i)
        if (writes(schema.arguments()[i]) && schema.arguments()[i].alias_info()->beforeSets() == returns[r].alias_info()->beforeSets()) break;
    result = i < n ? outer[i] : mapped(result, [&](const Tensor& t) { return call.out(t); });
  }
}

void refuse_pinned(std::optional<bool> pin) { TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned"); }

Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device> device,
             std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  refuse_pinned(pin);
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &memory(), DispatchKeySet(DispatchKey::PrivateUse1), c10::dtype_or_default(dtype), format);
}
Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<Device> device, std::optional<bool> pin) {
  refuse_pinned(pin);
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &memory(),
                                           DispatchKeySet(DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
  at::AutoDispatchBelowADInplaceOrView below;
  const Tensor source = inside(from), target = inside(to);
  const bool down = from.is_cpu(), up = to.is_cpu();
  count(down ? "copy to device" : up ? "copy to host" : "copy on device", static_cast<int64_t>(from.nbytes()));
  const Tensor& host = down ? from : to;
  if (!up) refuse_change(to);
  if (!down && !up) {
    target.copy_(source);
  } else if (non_blocking && is_pinned(host.data_ptr())) {
    Locked locked(mutex_);
    // Towards the host the bytes arrive later; towards the device they must stay what they are until then, or until
    // a later copy takes their place.
    Tensor bytes = source.clone();
    if (up) {
      std::erase_if(flights_, [&](const Flight& f) { return !f.to_host && f.host.is_alias_of(host) && (f.check(), true); });
      poison(target);
    } else {
      target.copy_(source);
    }
    const Lane lane = current_lane((down ? to : from).device());
    flights_.push_back({host, bytes, host.clone(at::MemoryFormat::Contiguous), up, lane, ++queued_[lane], addresses(down ? to : from)});
  } else {
    host_waits(up ? "copy to the host" : "copy from pageable memory", (down ? to : from).device());
    target.copy_(source);
  }
  return to;
}
Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}
at::Scalar item(const Tensor& self) {
  host_waits("item", self.device());
  count("copy to host", self.element_size());
  return at::_local_scalar_dense(inside(self));
}
Tensor& set_storage_part(Tensor& self, Storage source, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  TORCH_CHECK(source.device() == self.device(), "set_: ", self.device(), " cannot have storage on ", source.device());
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  if (!stride.empty()) impl->set_sizes_and_strides(impl->sizes(), C10_AS_INTARRAYREF_SLOW(stride));
  impl->set_storage_offset(offset.guard_int(__FILE__, __LINE__));
  return self;
}
Tensor& set_storage(Tensor& self, Storage source) {
  c10::SymInt size(static_cast<int64_t>(source.nbytes() / self.element_size()));
  return set_storage_part(self, std::move(source), 0, c10::SymIntArrayRef(&size, 1), {});
}
Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage_part(self, source.storage(), source.sym_storage_offset(), source.sym_sizes(), source.sym_strides());
}
void record_stream(Tensor&, c10::Stream) {}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  // torch would compute it by several operators, whose memory no accelerator's kernel needs.
  m.impl("silu_backward", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", item);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage_part);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("record_stream", record_stream);
}

// ---- devices, streams, events

thread_local std::map<Index, c10::Stream> streams_;

Lane lane(const c10::Stream& stream) { return {stream.device_index(), stream.id()}; }
Lane current_lane(std::optional<Device> device) {
  const Index index = device && device->has_index() ? device->index() : current_;
  auto found = streams_.find(index);
  return {index, found == streams_.end() ? 0 : found->second.id()};
}

void merge(Clock& into, const Clock& from) {
  for (const auto& [lane, ticket] : from) into[lane] = std::max(into[lane], ticket);
}
bool covers(const Clock& clock, Lane lane, int64_t ticket) {
  auto found = clock.find(lane);
  return found != clock.end() && found->second >= ticket;
}
// Everything that a stream has done when it reaches its end.
Clock end_of(Lane lane) {
  Locked locked(mutex_);
  Clock made = behind_[lane];
  made[lane] = queued_[lane];
  return made;
}

// The host has waited for these: their copies arrive.
void land(const Clock& waited) {
  std::vector<Flight> landing;
  {
    Locked locked(mutex_);
    merge(host_, waited);
    auto stays = [](const Flight& f) { return !covers(host_, f.lane, f.ticket); };
    auto first = std::stable_partition(flights_.begin(), flights_.end(), stays);
    landing.assign(first, flights_.end());
    flights_.erase(first, flights_.end());
  }
  at::AutoDispatchBelowADInplaceOrView below;
  for (const auto& flight : landing) {
    flight.check();
    if (flight.to_host) flight.host.copy_(flight.bytes);
  }
}

void wait_for(const Clock& clock, const std::string& why) {
  land(clock);
  if (!on_wait_) return;
  py::gil_scoped_acquire gil;
  (*on_wait_)(why);
}

struct Event {
  std::chrono::steady_clock::time_point time;
  Lane lane;
  int64_t ticket;
  Clock before;
  bool timed;
  int asked = 0;

  bool done() const { return covers(host_, lane, ticket); }
};

// The only device that this process may use; -1: any.
Index only_ = -1;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  Device getDevice() const override { return {kType, current_}; }
  void setDevice(Device d) const override {
    TORCH_CHECK(d.index() >= 0 && d.index() < kCount, "invalid device ordinal: ", d);
    TORCH_CHECK(only_ < 0 || d.index() == only_, "Device index ", d.index(), " is out of range: this process has device ", only_, " alone");
    current_ = d.index();
  }
  Device exchangeDevice(Device d) const override {
    auto before = getDevice();
    setDevice(d);
    return before;
  }
  void uncheckedSetDevice(Device d) const noexcept override { current_ = d.index(); }
  Index deviceCount() const noexcept override { return kCount; }
  c10::DeviceCapability getDeviceCapability(Device) const override { return {}; }
  Device indexed(Device d) const { return d.has_index() ? d : getDevice(); }
  c10::Stream getDefaultStream(Device d) const override { return c10::Stream(c10::Stream::DEFAULT, indexed(d)); }
  c10::Stream getStream(Device d) const override {
    auto found = streams_.find(indexed(d).index());
    return found == streams_.end() ? getDefaultStream(d) : found->second;
  }
  c10::Stream getNewStream(Device d, int) const override {
    static std::atomic<c10::StreamId> next{1};
    return c10::Stream(c10::Stream::UNSAFE, indexed(d), next++);
  }
  c10::Stream getStreamFromGlobalPool(Device d, bool) const override { return getNewStream(d, 0); }
  c10::Stream exchangeStream(c10::Stream s) const override {
    auto before = getStream(s.device());
    streams_.insert_or_assign(s.device_index(), s);
    return before;
  }
  void destroyEvent(void* e, Index) const noexcept override { delete static_cast<Event*>(e); }
  void record(void** e, const c10::Stream& s, Index, c10::EventFlag flag) const override {
    Locked locked(mutex_);
    if (!*e) *e = new Event;
    const int64_t ticket = ++queued_[lane(s)];
    const bool timed = flag == c10::EventFlag::BACKEND_DEFAULT;
    *static_cast<Event*>(*e) = {std::chrono::steady_clock::now(), lane(s), ticket, end_of(lane(s)), timed};
  }
  void block(void* e, const c10::Stream& s) const override {
    Locked locked(mutex_);
    if (e) merge(behind_[lane(s)], static_cast<Event*>(e)->before);
  }
  // Not done when asked for the first time, so that nobody counts on it; done later, so that a loop may poll.
  bool queryEvent(void* e) const override {
    auto* event = static_cast<Event*>(e);
    if (!event || event->done()) return true;
    if (!event->asked++) return false;
    return land(event->before), true;
  }
  bool queryStream(const c10::Stream& s) const override { return land(end_of(lane(s))), true; }
  void synchronizeStream(const c10::Stream& s) const override { wait_for(end_of(lane(s)), "synchronize a stream"); }
  void synchronizeEvent(void* e) const override {
    wait_for(e ? static_cast<Event*>(e)->before : Clock(), "synchronize an event");
  }
  void synchronizeDevice(Index index) const override {
    Clock all;
    for (const auto& [lane, ticket] : queued_)
      if (lane.first == (index < 0 ? current_ : index)) merge(all, end_of(lane));
    wait_for(all, "synchronize");
  }
  double elapsedTime(void* first, void* last, Index) const override {
    auto *a = static_cast<Event*>(first), *b = static_cast<Event*>(last);
    TORCH_CHECK(a && b && a->timed && b->timed, "Both events must be recorded with enable_timing=True");
    TORCH_CHECK(a->done() && b->done(), "device not ready: synchronize before elapsed_time");
    return std::chrono::duration<double, std::milli>(b->time - a->time).count();
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  void init() const override { use(); }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return kCount > 0; }
  bool hasPrimaryContext(Index) const override { return used_; }
  Index deviceCount() const override { return kCount; }
  Index getCurrentDevice() const override { return current_; }
  void setCurrentDevice(Index i) const override { Guard().setDevice({kType, i}); }
  Index exchangeDevice(Index i) const override { return Guard().exchangeDevice({kType, i}).index(); }
  Index maybeExchangeDevice(Index i) const override { return i < 0 ? current_ : exchangeDevice(i); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory(); }
  bool isPinnedPtr(const void* p) const override { return is_pinned(p); }
  Device getDeviceFromPtr(void*) const override { return {kType, current_}; }
  const at::Generator& getDefaultGenerator(Index i) const override { return generator(i); }
  at::Generator getNewGenerator(Index i) const override { return at::make_generator<Generator>(i < 0 ? current_ : i); }
  // Memory is released, or new; a change from one size to another would have to keep the values.
  void resizePrivateUse1Bytes(const Storage& storage, size_t bytes) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    TORCH_CHECK(!bytes || !impl->nbytes(), "strict: a storage with memory can only be resized to 0 bytes");
    const Index before = exchangeDevice(impl->device().index());
    impl->set_data_ptr_noswap(bytes ? memory().allocate(bytes) : c10::DataPtr(nullptr, impl->device()));
    impl->set_nbytes(bytes);
    setCurrentDevice(before);
  }
};

Guard guard_;
c10::impl::DeviceGuardImplRegistrar registrar_{kType, &guard_};
const bool registered_ = [] {
  c10::SetAllocator(kType, &memory());
  at::setHostAllocator(kType, &pinned_memory());
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace

Tensor inside(const Tensor& tensor) { return Call().in(tensor); }

void poison(const Tensor& inside) {
  if (inside.is_floating_point()) inside.fill_(NAN);
  else if (inside.scalar_type() == at::kBool) inside.logical_not_();
  else inside.fill_(inside.scalar_type() == at::kByte ? 0xFF : -1);
}

void refuse_change(const Tensor& t) {
  if (!t.defined() || !t.is_privateuseone()) return;
  Locked locked(mutex_);
  const auto [first, end] = addresses(t);
  const Lane lane = current_lane(t.device());
  for (const Flight& f : flights_)
    TORCH_CHECK(!f.to_host || f.lane == lane || end <= f.source.first || f.source.second <= first || covers(behind_[lane], f.lane, f.ticket),
                "strict: memory of the device was changed while its copy to the host was under way on another stream");
}

void host_waits(const std::string& why, std::optional<at::Device> device) { wait_for(end_of(current_lane(device)), why); }

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("on_wait", [](py::object call) { on_wait_ = new py::object(std::move(call)); });
  m.def("counts", [] { Locked locked(mutex_); return counts_; });
  m.def("reset_counts", [] { Locked locked(mutex_); counts_.clear(); });
  m.def("generator", [](int64_t index) { return generator(static_cast<Index>(index)); });
  m.def("is_initialized", [] { return used_; });
  m.def("use_only", [](int64_t index) { only_ = current_ = static_cast<Index>(index), use(); });
  m.def("is_in_bad_fork", [] { return forked_; });
  m.def("device_count", [] { return static_cast<int64_t>(kCount); });
  m.def("can_read", [](const Tensor& t) { return !(reinterpret_cast<uintptr_t>(t.data_ptr()) & kBit); });
  add_collectives(m);
}

}  // namespace strict
