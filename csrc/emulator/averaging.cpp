// The averaging kernels on numpy arrays, and the planner, which has no other way into a test.
#include "cuda/kernels/averaging.cuh"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <memory>
#include <stdexcept>
#include <string>

namespace py = pybind11;

namespace {

using Arrays = std::vector<py::array>;

pfl::DType dtype_named(const std::string& name) {
  if (name == "float32") return pfl::DType::kFloat32;
  if (name == "float64") return pfl::DType::kFloat64;
  if (name == "float16") return pfl::DType::kFloat16;
  if (name == "bfloat16") return pfl::DType::kBFloat16;
  throw std::invalid_argument("unknown dtype " + name);
}

const auto emulate = [](auto kernel, int64_t grid, const pfl::cuda::ListArguments& args) {
  pfl::emulator::launch(kernel, dim3(static_cast<unsigned>(grid)), dim3(pfl::cuda::kThreads), 0, args);
};

std::vector<int64_t> sizes_of(const Arrays& arrays) {
  std::vector<int64_t> sizes;
  for (const py::array& array : arrays) sizes.push_back(array.size());
  return sizes;
}

// bfloat16, which numpy has not, comes as uint16.
void average(const std::string& dtype, Arrays out, const std::vector<Arrays>& clients,
             const std::vector<double>& weights, const Arrays& server, double lr) {
  pfl::visit_dtype(dtype_named(dtype), [&](auto tag) {
    using T = typename decltype(tag)::type;
    using A = pfl::accumulate_t<T>;
    pfl::cuda::AverageRows rows;
    rows.sizes = sizes_of(out);
    std::vector<std::vector<const void*>> pointers(out.size());
    std::vector<std::unique_ptr<A[]>> carries;
    for (size_t t = 0; t < out.size(); ++t) {
      rows.out.push_back(out[t].mutable_data());
      if (!server.empty()) rows.server.push_back(server[t].data());
      for (const Arrays& client : clients) pointers[t].push_back(client[t].data());
      rows.clients.push_back(pointers[t].data());
      if (pfl::cuda::carry_needed(static_cast<int64_t>(clients.size()))) {
        carries.push_back(std::make_unique<A[]>(rows.sizes[t]));
        rows.carry.push_back(carries.back().get());
      }
    }
    const int64_t count = static_cast<int64_t>(clients.size());
    if (server.empty()) {
      pfl::cuda::launch_average<T, false>(rows, count, weights.data(), lr, emulate);
    } else {
      pfl::cuda::launch_average<T, true>(rows, count, weights.data(), lr, emulate);
    }
  });
}

void accumulate(const std::string& dtype, Arrays sums, const Arrays& client, double weight) {
  std::vector<void*> sum_pointers;
  std::vector<const void*> client_pointers;
  for (py::array& sum : sums) sum_pointers.push_back(sum.mutable_data());
  for (const py::array& x : client) client_pointers.push_back(x.data());
  pfl::visit_dtype(dtype_named(dtype), [&](auto tag) {
    pfl::cuda::launch_accumulate<typename decltype(tag)::type>(sizes_of(client), sum_pointers, client_pointers, weight,
                                                               emulate);
  });
}

std::vector<bool> nonfinite(const std::string& dtype, const Arrays& tensors) {
  const auto found = std::make_unique<bool[]>(tensors.size());
  std::vector<const void*> pointers;
  std::vector<bool*> flags;
  for (size_t t = 0; t < tensors.size(); ++t) {
    pointers.push_back(tensors[t].data());
    flags.push_back(&found[t]);
  }
  pfl::visit_dtype(dtype_named(dtype), [&](auto tag) {
    pfl::cuda::launch_nonfinite<typename decltype(tag)::type>(sizes_of(tensors), pointers, flags, emulate);
  });
  return std::vector<bool>(found.get(), found.get() + tensors.size());
}

// [[(tensor, offset, length), ...] for each bundle]
py::list plan_bundles(const std::vector<int64_t>& sizes, int64_t bundle_elements) {
  const pfl::BundlePlan plan = pfl::plan_bundles(sizes, bundle_elements);
  py::list bundles;
  for (int64_t b = 0; b < plan.bundles(); ++b) {
    py::list pieces;
    for (int64_t p = plan.bundle_begin[b]; p < plan.bundle_begin[b + 1]; ++p) {
      pieces.append(py::make_tuple(plan.pieces[p].tensor, plan.pieces[p].offset, plan.pieces[p].length));
    }
    bundles.append(pieces);
  }
  return bundles;
}

// [[(tensor, chunk_end), ...] for each launch]
py::list plan_launches(const std::vector<int64_t>& sizes, int64_t chunk_elements, int64_t slots, int64_t max_chunks) {
  py::list launches;
  for (const pfl::LaunchPlan& plan : pfl::plan_launches(sizes, chunk_elements, slots, max_chunks)) {
    py::list entries;
    for (const pfl::Slot& slot : plan) entries.append(py::make_tuple(slot.tensor, slot.chunk_end));
    launches.append(entries);
  }
  return launches;
}

}  // namespace

void bind_averaging(py::module_& m) {
  m.attr("CHUNK_ELEMENTS") = pfl::cuda::kChunkElements;
  m.attr("MAX_CLIENTS_PER_LAUNCH") = pfl::cuda::kMaxClientsPerLaunch;
  m.def("average", &average, py::arg("dtype"), py::arg("out"), py::arg("clients"), py::arg("weights"),
        py::arg("server") = Arrays(), py::arg("lr") = 1.0);
  m.def("accumulate", &accumulate, py::arg("dtype"), py::arg("sums"), py::arg("client"), py::arg("weight"));
  m.def("nonfinite", &nonfinite, py::arg("dtype"), py::arg("tensors"));
  m.def("plan_bundles", &plan_bundles, py::arg("sizes"), py::arg("bundle_elements"));
  m.def("plan_launches", &plan_launches, py::arg("sizes"), py::arg("chunk_elements"), py::arg("slots_per_launch"),
        py::arg("max_chunks") = int64_t{0x7fffffff});
}
