// What the device offers to its collective library.
#pragma once
#include <ATen/ATen.h>
#include <torch/csrc/utils/pybind.h>

namespace strict {

// The same tensor for code that runs as the device: its memory under an address that can be read.
at::Tensor inside(const at::Tensor& tensor);
// Overwrites a tensor that nobody may look at now: NaN, or -1.
void poison(const at::Tensor& inside);
// Refuses a change of a tensor whose copy to the host, on another stream, need not have ended.
void refuse_change(const at::Tensor& tensor);
// The host waits for the current stream of a device: counted, with the Python line that caused it.
void host_waits(const std::string& why, std::optional<at::Device> device = {});
int64_t setting(const char* name, int64_t otherwise);

void add_collectives(py::module_& module);

}  // namespace strict
