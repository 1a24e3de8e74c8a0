// The collective library: gloo carries the bytes on a thread for each communicator, and the tensors are the device's.
//
// While a collective runs, its inputs and outputs are NaN; `wait()` puts the inputs back and the results in. Each
// communicator does one thing after the other and buffers nothing: a message ends when it was received.
#include "strict.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <future>
#include <map>
#include <random>
#include <thread>

namespace strict {
namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;
using Lists = std::vector<Tensors>;
using Op = c10d::OpType;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
const int64_t kDelay = setting("STRICT_DELAY", 200);  // microseconds at most before each operation
const int64_t kLeastDelay = setting("STRICT_LEAST_DELAY", 0);  // and at least
const int64_t kBandwidth = setting("STRICT_BANDWIDTH", 0);  // megabytes a second, which are bytes a microsecond; 0: no limit
const bool kSplits = setting("STRICT_CUDA_LIKE", 1) && !kLikeNeuron;
constexpr int kAcknowledge = 1 << 20, kBatched = 1 << 21;  // added to tags

// Runs jobs in order on its own thread.
struct Queue {
  explicit Queue(unsigned seed) : random(seed), thread([this] { run(); }) {}
  ~Queue() {
    {
      std::lock_guard locked(mutex);
      stopped = true;
    }
    changed.notify_one();
    thread.join();
  }
  std::shared_future<void> add(std::function<void()> job) {
    std::packaged_task<void()> task(std::move(job));
    auto done = task.get_future().share();
    {
      std::lock_guard locked(mutex);
      jobs.push_back(std::move(task));
    }
    changed.notify_one();
    return done;
  }
  void run() {
    for (;;) {
      std::unique_lock locked(mutex);
      changed.wait(locked, [this] { return stopped || !jobs.empty(); });
      if (stopped) return;
      auto job = std::move(jobs.front());
      jobs.pop_front();
      locked.unlock();
      std::this_thread::sleep_for(std::chrono::microseconds(kLeastDelay + random() % (std::max<int64_t>(kDelay - kLeastDelay, 0) + 1)));
      job();
    }
  }
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::packaged_task<void()>> jobs;
  bool stopped = false;
  std::mt19937 random;
  std::thread thread;
};

bool same_bytes(const Tensor& a, const Tensor& b) { return std::memcmp(a.data_ptr(), b.data_ptr(), a.nbytes()) == 0; }

// A tensor of the program that a collective uses now.
struct Loan {
  Tensor outer, bytes, left;  // what it was or will be, and what the program finds there meanwhile
  bool arrives;
};

struct StrictWork final : c10d::Work {
  StrictWork(int rank, Op op, std::shared_future<void> done, std::vector<Loan> loans)
      : Work(rank, op), done(std::move(done)), loans(std::move(loans)) {}
  bool wait(std::chrono::milliseconds) override {
    if (done.valid()) done.get();
    for (const auto& loan : loans)
      TORCH_CHECK(same_bytes(inside(loan.outer), loan.left), "strict: a tensor of ", loan.outer.sizes(),
                  " was changed between a collective (", c10d::opTypeToString(opType_), ") and its wait()");
    for (bool arrives : {false, true})
      for (const auto& loan : loans)
        if (loan.arrives == arrives) std::memcpy(inside(loan.outer).data_ptr(), loan.bytes.data_ptr(), loan.bytes.nbytes());
    loans.clear();
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  void blockCurrentStream() override { wait(kNoTimeout); }
  bool isCompleted() override { return !done.valid() || done.wait_for(std::chrono::seconds(0)) == std::future_status::ready; }
  bool isSuccess() const override { return true; }
  Tensors result() override { return {}; }
  std::shared_future<void> done;
  std::vector<Loan> loans;
};

struct StrictOptions final : c10d::Backend::Options {
  explicit StrictOptions(std::chrono::milliseconds timeout) : Options("strictccl", timeout) {}
};

struct Message {
  bool sends;
  Tensor bytes;
  int peer, tag;
};

struct StrictBackend final : c10d::Backend {
  StrictBackend(c10::intrusive_ptr<c10d::Backend> gloo, std::string name)
      : Backend(gloo->getRank(), gloo->getSize()), gloo(std::move(gloo)), name(std::move(name)) {}
  const std::string getBackendName() const override { return "strictccl"; }
  bool supportsCoalescing() const override { return true; }
  bool supportsSplitting() const override { return kSplits; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return c10::make_intrusive<StrictOptions>(gloo->getBackendOptions()->timeout); }
  void eagerConnectSingleDevice(at::Device d) override { device = d; }
  void setTimeout(std::chrono::milliseconds t) override { gloo->setTimeout(t); }
  void setSequenceNumberForGroup() override { gloo->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return gloo->getSequenceNumberForGroup(); }
  void abort() override { gloo->abort(); }
  void shutdown() override { queues.clear(), gloo->shutdown(); }

  // All ranks split a communicator, those without a part in the new one too.
  void take_part_in_split() { queue("").add([this] { gloo->barrier()->wait(); }).get(); }
  c10::intrusive_ptr<Backend> split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                                    const c10::intrusive_ptr<Options>& options) override {
    take_part_in_split();
    auto part = gloo->split(store, ranks, gloo->getBackendOptions());
    return part ? c10::make_intrusive<StrictBackend>(part, options->group_name) : nullptr;
  }

  Queue& queue(const std::string& pair) {
    auto& found = queues[pair];
    if (!found) found = std::make_unique<Queue>(static_cast<unsigned>(rank_ + std::hash<std::string>()(name + pair)));
    return *found;
  }

  Tensor checked(const Tensor& t) {
    TORCH_CHECK(t.is_privateuseone(), "strictccl: tensors must be on strict, not on ", t.device());
    TORCH_CHECK(t.is_contiguous(), "strictccl: tensors must be contiguous, not of strides ", t.strides());
    if (!device || !device->has_index()) device = t.device();
    TORCH_CHECK(*device == t.device(), "strictccl: this communicator is of ", *device, ", the tensor of ", t.device());
    Tensor bytes = inside(t).clone();
    if (kLikeNeuron) narrow(bytes);
    return bytes;
  }
  // Takes tensors from the program; what may still be read, as a message that is sent, stays as it is.
  Tensors lend(const Tensors& tensors, bool arrives, std::vector<Loan>& loans, bool readable = false) {
    Tensors made;
    for (const auto& t : tensors) {
      if (arrives) refuse_change(t);
      made.push_back(checked(t));
      loans.push_back({t, arrives ? made.back() : made.back().clone(), {}, arrives});
      loans.back().left = readable ? loans.back().bytes : Tensor();
    }
    return made;
  }
  WorkPtr start(Op op, std::vector<Loan> loans, std::function<void()> job, const std::string& pair = "") {
    for (auto& loan : loans) if (!loan.left.defined()) poison(inside(loan.outer));
    for (auto& loan : loans) if (!loan.left.defined()) loan.left = inside(loan.outer).clone();
    int64_t most = 0;
    for (const auto& loan : loans) most = std::max<int64_t>(most, loan.bytes.nbytes());
    auto slowed = [most, job = std::move(job)] {
      if (kBandwidth) std::this_thread::sleep_for(std::chrono::microseconds(most / kBandwidth));
      job();
    };
    return c10::make_intrusive<StrictWork>(rank_, op, queue(pair).add(std::move(slowed)), std::move(loans));
  }
  // Of tensors that are input and output in one.
  template <class Call>
  WorkPtr in_place(Op op, Tensors& tensors, Call call) {
    std::vector<Loan> loans;
    auto bytes = lend(tensors, true, loans);
    return start(op, std::move(loans), [=, this]() mutable {
      call(*gloo, bytes)->wait();
      if (kLikeNeuron) for (auto& t : bytes) narrow(t);
    });
  }
  template <class Call>
  WorkPtr apart(Op op, const Tensors& outs, const Tensors& ins, Call call) {
    std::vector<Loan> loans;
    auto in = lend(ins, false, loans), out = lend(outs, true, loans);
    return start(op, std::move(loans), [=, this]() mutable {
      call(*gloo, out, in)->wait();
      if (kLikeNeuron) for (auto& t : out) narrow(t);
    });
  }
  // The part may be this rank's own slice of the whole, and nothing else of it.
  void check_sizes(const Tensor& whole, const Tensor& part) {
    TORCH_CHECK(whole.numel() == part.numel() * size_ && whole.scalar_type() == part.scalar_type(), "strictccl: the whole (", whole.sizes(),
                ") must be ", size_, " times the part (", part.sizes(), "), in one dtype");
    TORCH_CHECK(!whole.is_alias_of(part) || part.storage_offset() == whole.storage_offset() + rank_ * part.numel(),
                "strictccl: the part overlaps the whole and is not its slice ", rank_);
  }

  // TorchNeuron has no kernel for tensors without elements; its broadcast and all-to-all return at once.
  static void refuse_empty(const Tensor& t) { TORCH_CHECK(!kLikeNeuron || t.numel(), "No implementation could handle operation: tensors cannot be empty"); }

  WorkPtr broadcast(Tensors& t, const c10d::BroadcastOptions& o) override {
    return in_place(Op::BROADCAST, t, [o](auto& g, Tensors& x) { return g.broadcast(x, o); });
  }
  WorkPtr allreduce(Tensors& t, const c10d::AllreduceOptions& o) override {
    refuse_empty(t.at(0));
    return in_place(Op::ALLREDUCE, t, [o](auto& g, Tensors& x) { return g.allreduce(x, o); });
  }
  WorkPtr reduce(Tensors& t, const c10d::ReduceOptions& o) override {
    return in_place(Op::REDUCE, t, [o](auto& g, Tensors& x) { return g.reduce(x, o); });
  }
  WorkPtr allgather(Lists& out, Tensors& in, const c10d::AllgatherOptions& o) override {
    return apart(Op::ALLGATHER, out.at(0), in, [o](auto& g, Tensors& y, Tensors& x) {
      Lists lists{y};
      return g.allgather(lists, x, o);
    });
  }
  WorkPtr gather(Lists& out, Tensors& in, const c10d::GatherOptions& o) override {
    return apart(Op::GATHER, out.empty() ? Tensors{} : out[0], in, [o](auto& g, Tensors& y, Tensors& x) {
      Lists lists;
      if (!y.empty()) lists.push_back(y);
      return g.gather(lists, x, o);
    });
  }
  WorkPtr scatter(Tensors& out, Lists& in, const c10d::ScatterOptions& o) override {
    return apart(Op::SCATTER, out, in.empty() ? Tensors{} : in[0], [o](auto& g, Tensors& y, Tensors& x) {
      Lists lists;
      if (!x.empty()) lists.push_back(x);
      return g.scatter(y, lists, o);
    });
  }
  WorkPtr _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions& o) override {
    check_sizes(out, in), refuse_empty(in);
    return apart(Op::_ALLGATHER_BASE, {out}, {in}, [o](auto& g, Tensors& y, Tensors& x) { return g._allgather_base(y[0], x[0], o); });
  }
  WorkPtr _reduce_scatter_base(Tensor& out, Tensor& in, const c10d::ReduceScatterOptions& o) override {
    check_sizes(in, out), refuse_empty(in);
    return apart(Op::_REDUCE_SCATTER_BASE, {out}, {in}, [o](auto& g, Tensors& y, Tensors& x) { return g._reduce_scatter_base(y[0], x[0], o); });
  }
  // Of one tensor each: so compiled graphs call them.
  WorkPtr allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const c10d::AllgatherOptions& o) override {
    TORCH_CHECK(out.size() == 1 && in.size() == 1, "strictccl: several tensors at once");
    return _allgather_base(out[0], in[0], o);
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& out, Tensors& in, const c10d::ReduceScatterOptions& o) override {
    TORCH_CHECK(out.size() == 1 && in.size() == 1, "strictccl: several tensors at once");
    return _reduce_scatter_base(out[0], in[0], o);
  }
  WorkPtr alltoall_base(Tensor& out, Tensor& in, std::vector<int64_t>& to, std::vector<int64_t>& from, const c10d::AllToAllOptions& o) override {
    TORCH_CHECK(!out.is_alias_of(in), "strictccl: all_to_all in place");
    const auto equal = [](const auto& sizes) { return std::all_of(sizes.begin(), sizes.end(), [&](int64_t size) { return size == sizes[0]; }); };
    TORCH_CHECK_NOT_IMPLEMENTED(!kLikeNeuron || (equal(to) && equal(from)), "Unsupported split_sizes found");
    return apart(Op::ALLTOALL_BASE, {out}, {in}, [=](auto& g, Tensors& y, Tensors& x) mutable { return g.alltoall_base(y[0], x[0], to, from, o); });
  }
  WorkPtr barrier(const c10d::BarrierOptions& o) override {
    host_waits("barrier");
    return start(Op::BARRIER, {}, [=, this] { gloo->barrier()->wait(); });
  }

  // Starts all messages, then waits for all; a receiver acknowledges, so that no sender is ahead of it.
  void pass(std::vector<Message> messages) {
    std::vector<WorkPtr> works, acknowledged;
    Tensors kept;
    for (auto& m : messages) {
      Tensors bytes{m.bytes}, one{at::zeros({1})};
      works.push_back(m.sends ? gloo->send(bytes, m.peer, m.tag) : gloo->recv(bytes, m.peer, m.tag));
      kept.push_back(one[0]);
      if (m.sends) acknowledged.push_back(gloo->recv(one, m.peer, m.tag + kAcknowledge));
    }
    for (size_t i = 0; i < messages.size(); ++i) {
      works[i]->wait();
      Tensors one{kept[i]};
      if (!messages[i].sends) gloo->send(one, messages[i].peer, messages[i].tag + kAcknowledge)->wait();
    }
    for (auto& work : acknowledged) work->wait();
  }
  // A message by itself takes a communicator of its two ranks, one of a batch that of the group, as with NCCL.
  WorkPtr message(bool sends, Tensors& tensors, int peer, int tag) {
    std::vector<Loan> loans;
    auto bytes = lend(tensors, !sends, loans, sends).at(0);
    Message made{sends, bytes, peer, tag + (batching ? kBatched : 0)};
    if (!batching)
      return start(sends ? Op::SEND : Op::RECV, std::move(loans), [=, this] { pass({made}); }, std::to_string(std::min(rank_, peer)) + "-" + std::to_string(std::max(rank_, peer)));
    batch.push_back(made);
    batch_loans.insert(batch_loans.end(), loans.begin(), loans.end());
    return c10::make_intrusive<StrictWork>(rank_, Op::COALESCED, std::shared_future<void>(), std::vector<Loan>{});
  }
  WorkPtr send(Tensors& tensors, int to, int tag) override { return message(true, tensors, to, tag); }
  WorkPtr recv(Tensors& tensors, int from, int tag) override { return message(false, tensors, from, tag); }
  void startCoalescing() override { batching = true; }
  WorkPtr endCoalescing() override {
    batching = false;
    auto messages = std::exchange(batch, {});
    return start(Op::COALESCED, std::exchange(batch_loans, {}), [=, this] { pass(messages); });
  }

  c10::intrusive_ptr<c10d::Backend> gloo;
  std::string name;
  std::optional<at::Device> device;
  bool batching = false;
  std::vector<Message> batch;
  std::vector<Loan> batch_loans;
  std::map<std::string, std::unique_ptr<Queue>> queues;  // "" and one for each pair; the last member: ends first
};

}  // namespace

void add_collectives(py::module_& m) {
  py::module_::import("torch._C._distributed_c10d");
  py::class_<StrictOptions, c10d::Backend::Options, c10::intrusive_ptr<StrictOptions>>(m, "Options")
      .def("__deepcopy__", [](const StrictOptions& o, py::object) { return c10::make_intrusive<StrictOptions>(o.timeout); });
  py::class_<StrictBackend, c10d::Backend, c10::intrusive_ptr<StrictBackend>>(m, "Backend")
      .def_property_readonly("options", &StrictBackend::getBackendOptions)
      .def("perform_nocolor_split", [](StrictBackend& b, py::object) { py::gil_scoped_release free; b.take_part_in_split(); });
  m.def("make_backend", [](c10::intrusive_ptr<c10d::Backend> gloo, std::string name) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<StrictBackend>(std::move(gloo), std::move(name));
  });
}

}  // namespace strict
