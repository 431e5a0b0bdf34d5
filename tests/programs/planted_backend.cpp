// A backend in C++ that hands everything to another one, gloo, and is wrong in the one way that its fault names.
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/extension.h>

using c10d::Backend;
using c10d::Work;
using Tensors = std::vector<at::Tensor>;

class Planted : public Backend {
 public:
  Planted(c10::intrusive_ptr<Backend> inner, std::string fault)
      : Backend(inner->getRank(), inner->getSize()), inner_(std::move(inner)), fault_(std::move(fault)) {}

  const std::string getBackendName() const override {
    return "planted_cpp";
  }

  c10::intrusive_ptr<Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    auto work = inner_->allreduce(tensors, opts);
    auto& tensor = tensors[0];
    if (fault_ == "cpp_remainder" && tensor.numel() > 16 && tensor.numel() % 16) {
      work->wait();
      tensor.view({-1})[tensor.numel() - 1].add_(1);
    }
    if (fault_ == "cpp_bfloat16_sum" && tensor.scalar_type() == at::kBFloat16 && getSize() > 1) {
      work->wait();
      tensor.neg_();
    }
    return work;
  }

  c10::intrusive_ptr<Work> _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts)
      override {
    auto work = inner_->_allgather_base(output, input, opts);
    if (fault_ == "cpp_swapped_gather" && getSize() > 1) {
      work->wait();
      auto rows = output.view({getSize(), -1});
      auto first = rows[0].clone();
      rows[0].copy_(rows[1]);
      rows[1].copy_(first);
    }
    return work;
  }

  c10::intrusive_ptr<Work> scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& opts) override {
    auto work = inner_->scatter(outputs, inputs, opts);
    if (fault_ == "cpp_scatter_on_rank_2" && getRank() == 2) {
      work->wait();
      outputs[0].zero_();
    }
    return work;
  }

  c10::intrusive_ptr<Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    return inner_->broadcast(tensors, opts);
  }
  c10::intrusive_ptr<Work> allreduce_coalesced(
      Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override {
    return inner_->allreduce_coalesced(tensors, opts);
  }
  c10::intrusive_ptr<Work> reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
    return inner_->reduce(tensors, opts);
  }
  c10::intrusive_ptr<Work> allgather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    return inner_->allgather(outputs, inputs, opts);
  }
  c10::intrusive_ptr<Work> allgather_coalesced(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    return inner_->allgather_coalesced(outputs, inputs, opts);
  }
  c10::intrusive_ptr<Work> allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    return inner_->allgather_into_tensor_coalesced(outputs, inputs, opts);
  }
  c10::intrusive_ptr<Work> gather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override {
    return inner_->gather(outputs, inputs, opts);
  }
  c10::intrusive_ptr<Work> reduce_scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& opts) override {
    return inner_->reduce_scatter(outputs, inputs, opts);
  }
  c10::intrusive_ptr<Work> _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) override {
    return inner_->_reduce_scatter_base(output, input, opts);
  }
  c10::intrusive_ptr<Work> reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) override {
    return inner_->reduce_scatter_tensor_coalesced(outputs, inputs, opts);
  }
  c10::intrusive_ptr<Work> alltoall_base(
      at::Tensor& output,
      at::Tensor& input,
      std::vector<int64_t>& output_splits,
      std::vector<int64_t>& input_splits,
      const c10d::AllToAllOptions& opts) override {
    return inner_->alltoall_base(output, input, output_splits, input_splits, opts);
  }
  c10::intrusive_ptr<Work> alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override {
    return inner_->alltoall(outputs, inputs, opts);
  }
  c10::intrusive_ptr<Work> send(Tensors& tensors, int rank, int tag) override {
    return inner_->send(tensors, rank, tag);
  }
  c10::intrusive_ptr<Work> recv(Tensors& tensors, int rank, int tag) override {
    return inner_->recv(tensors, rank, tag);
  }
  c10::intrusive_ptr<Work> barrier(const c10d::BarrierOptions& opts) override {
    return inner_->barrier(opts);
  }

 private:
  c10::intrusive_ptr<Backend> inner_;
  std::string fault_;
};

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("wrap", [](c10::intrusive_ptr<Backend> inner, std::string fault) -> c10::intrusive_ptr<Backend> {
    return c10::make_intrusive<Planted>(std::move(inner), std::move(fault));
  });
}
