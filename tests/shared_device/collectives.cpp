// Collectives of ranks that share an accelerator, which its own library refuses: gloo carries copies on the host.
#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

namespace {

using at::Tensor;
using Tensors = std::vector<Tensor>;
using Lists = std::vector<Tensors>;
using Op = c10d::OpType;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

Tensors on_host(const Tensors& tensors) {
  Tensors copies;
  for (const auto& t : tensors) copies.push_back(t.detach().to(at::kCPU).contiguous().clone());
  return copies;
}

// Ends when gloo has ended and the results are on the device, in the order of the stream that waits.
struct SharedWork final : c10d::Work {
  SharedWork(int rank, Op op, WorkPtr inner, Tensors results, Tensors arrived, Tensors kept)
      : Work(rank, op), inner(std::move(inner)), results(std::move(results)), arrived(std::move(arrived)), kept(std::move(kept)) {}
  bool wait(std::chrono::milliseconds timeout) override {
    inner->wait(timeout);
    at::AutoDispatchBelowADInplaceOrView below;  // a collective is no change that autograd must know
    for (size_t i = 0; i < results.size(); ++i) results[i].copy_(arrived[i]);
    results.clear();
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  void blockCurrentStream() override { wait(kNoTimeout); }
  bool isCompleted() override { return inner->isCompleted(); }
  bool isSuccess() const override { return inner->isSuccess(); }
  Tensors result() override { return {}; }
  WorkPtr inner;
  Tensors results, arrived, kept;  // kept: what gloo still reads
};

struct SharedBackend final : c10d::Backend {
  explicit SharedBackend(c10::intrusive_ptr<c10d::Backend> gloo) : Backend(gloo->getRank(), gloo->getSize()), gloo(std::move(gloo)) {}
  const std::string getBackendName() const override { return "sharedccl"; }
  void eagerConnectSingleDevice(at::Device) override {}
  void setTimeout(std::chrono::milliseconds t) override { gloo->setTimeout(t); }
  void setSequenceNumberForGroup() override { gloo->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return gloo->getSequenceNumberForGroup(); }
  void abort() override { gloo->abort(); }
  void shutdown() override { gloo->shutdown(); }

  // Of tensors that are input and output in one.
  template <class Call>
  WorkPtr in_place(Op op, const Tensors& tensors, Call call) {
    auto host = on_host(tensors);
    auto inner = call(host);
    return c10::make_intrusive<SharedWork>(rank_, op, inner, tensors, host, Tensors{});
  }
  template <class Call>
  WorkPtr apart(Op op, const Tensors& outs, const Tensors& ins, Call call) {
    auto in = on_host(ins);
    Tensors out;
    for (const auto& t : outs) out.push_back(at::empty(t.sizes(), t.options().device(at::kCPU)));
    auto inner = call(out, in);
    return c10::make_intrusive<SharedWork>(rank_, op, inner, outs, out, in);
  }

  WorkPtr broadcast(Tensors& t, const c10d::BroadcastOptions& o) override {
    return in_place(Op::BROADCAST, t, [&](Tensors& x) { return gloo->broadcast(x, o); });
  }
  WorkPtr allreduce(Tensors& t, const c10d::AllreduceOptions& o) override {
    return in_place(Op::ALLREDUCE, t, [&](Tensors& x) { return gloo->allreduce(x, o); });
  }
  WorkPtr reduce(Tensors& t, const c10d::ReduceOptions& o) override {
    return in_place(Op::REDUCE, t, [&](Tensors& x) { return gloo->reduce(x, o); });
  }
  WorkPtr allgather(Lists& out, Tensors& in, const c10d::AllgatherOptions& o) override {
    return apart(Op::ALLGATHER, out.at(0), in, [&](Tensors& y, Tensors& x) {
      Lists lists{y};
      return gloo->allgather(lists, x, o);
    });
  }
  WorkPtr gather(Lists& out, Tensors& in, const c10d::GatherOptions& o) override {
    return apart(Op::GATHER, out.empty() ? Tensors{} : out[0], in, [&](Tensors& y, Tensors& x) {
      Lists lists;
      if (!y.empty()) lists.push_back(y);
      return gloo->gather(lists, x, o);
    });
  }
  WorkPtr scatter(Tensors& out, Lists& in, const c10d::ScatterOptions& o) override {
    return apart(Op::SCATTER, out, in.empty() ? Tensors{} : in[0], [&](Tensors& y, Tensors& x) {
      Lists lists;
      if (!x.empty()) lists.push_back(x);
      return gloo->scatter(y, lists, o);
    });
  }
  WorkPtr _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions& o) override {
    return apart(Op::_ALLGATHER_BASE, {out}, {in}, [&](Tensors& y, Tensors& x) { return gloo->_allgather_base(y[0], x[0], o); });
  }
  WorkPtr _reduce_scatter_base(Tensor& out, Tensor& in, const c10d::ReduceScatterOptions& o) override {
    return apart(Op::_REDUCE_SCATTER_BASE, {out}, {in}, [&](Tensors& y, Tensors& x) { return gloo->_reduce_scatter_base(y[0], x[0], o); });
  }
  // Of one tensor each: so compiled graphs call them.
  WorkPtr allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const c10d::AllgatherOptions& o) override {
    TORCH_CHECK(out.size() == 1 && in.size() == 1, "sharedccl: several tensors at once");
    return _allgather_base(out[0], in[0], o);
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& out, Tensors& in, const c10d::ReduceScatterOptions& o) override {
    TORCH_CHECK(out.size() == 1 && in.size() == 1, "sharedccl: several tensors at once");
    return _reduce_scatter_base(out[0], in[0], o);
  }
  WorkPtr alltoall_base(Tensor& out, Tensor& in, std::vector<int64_t>& to, std::vector<int64_t>& from, const c10d::AllToAllOptions& o) override {
    return apart(Op::ALLTOALL_BASE, {out}, {in}, [&](Tensors& y, Tensors& x) { return gloo->alltoall_base(y[0], x[0], to, from, o); });
  }
  WorkPtr barrier(const c10d::BarrierOptions&) override { return gloo->barrier(); }
  WorkPtr send(Tensors& t, int to, int tag) override {
    return apart(Op::SEND, {}, t, [&](Tensors&, Tensors& x) { return gloo->send(x, to, tag); });
  }
  WorkPtr recv(Tensors& t, int from, int tag) override {
    return apart(Op::RECV, t, {}, [&](Tensors& y, Tensors&) { return gloo->recv(y, from, tag); });
  }

  c10::intrusive_ptr<c10d::Backend> gloo;
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  pybind11::module_::import("torch._C._distributed_c10d");
  pybind11::class_<SharedBackend, c10d::Backend, c10::intrusive_ptr<SharedBackend>>(module, "Backend");
  module.def("make_backend", [](c10::intrusive_ptr<c10d::Backend> gloo) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<SharedBackend>(std::move(gloo));
  });
}
