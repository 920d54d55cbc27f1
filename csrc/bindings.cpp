// Python bindings: thin. Everything that waits or works releases the interpreter lock.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <limits>
#include <optional>

#include "core/backend.h"
#include "core/embedded.h"
#include "core/file_reader.h"
#include "cpu/probe.h"
#include "cuda/driver.h"

namespace py = pybind11;

namespace atlas {
namespace {

// A contiguous buffer of bytes seen from C++; checked before the lock is released.
struct Bytes {
  explicit Bytes(const py::buffer& buffer, bool writable) : info(buffer.request(writable)) {
    py::ssize_t expected = info.itemsize;
    for (py::ssize_t axis = info.ndim; axis-- > 0;) {
      if (info.strides[axis] != expected && info.shape[axis] > 1) {
        throw py::value_error("buffer is not C-contiguous");
      }
      expected *= info.shape[axis];
    }
  }
  size_t size() const { return static_cast<size_t>(info.size * info.itemsize); }
  py::buffer_info info;
};

void check_range(const Backend& backend, size_t offset, size_t bytes) {
  if (offset > backend.arena_bytes() || bytes > backend.arena_bytes() - offset) {
    throw DeviceFault("arena access [" + std::to_string(offset) + ", +" + std::to_string(bytes) +
                      ") is outside the arena of " + std::to_string(backend.arena_bytes()) +
                      " bytes");
  }
}

Variant variant_of(const py::dict& d) {
  Variant variant;
  variant.phase = d["phase"].cast<int>();
  variant.max_rows = d["max_rows"].cast<int>();
  variant.kernel = d["kernel"].cast<std::string>();
  variant.image = d["image"].cast<int>();
  const auto grid = d["grid"].cast<std::vector<std::array<int64_t, 3>>>();
  for (size_t axis = 0; axis < grid.size() && axis < 3; ++axis) {
    variant.grid[axis] = {static_cast<int>(grid[axis][0]), grid[axis][1], grid[axis][2]};
  }
  variant.block = d["block"].cast<unsigned>();
  variant.shared = d["shared"].cast<unsigned>();
  variant.cluster = d["cluster"].cast<unsigned>();
  variant.pdl = d["pdl"].cast<bool>();
  variant.cooperative = d["cooperative"].cast<bool>();
  variant.arguments = d["arguments"].cast<std::vector<uint32_t>>();
  variant.scratch = d["scratch"].cast<std::optional<size_t>>().value_or(kNoOperand);
  return variant;
}

std::vector<size_t> offsets(const std::vector<std::optional<size_t>>& given) {
  std::vector<size_t> result;
  for (const auto& offset : given) result.push_back(offset.value_or(kNoOperand));
  return result;
}

LaunchSpec launch_spec(const py::dict& d) {
  LaunchSpec spec;
  spec.name = d["name"].cast<std::string>();
  spec.op = d["op"].cast<std::string>();
  spec.phase = d["phase"].cast<int>();
  spec.operands = offsets(d["operands"].cast<std::vector<std::optional<size_t>>>());
  spec.dims = d["dims"].cast<std::vector<int>>();
  for (const py::handle& item : d["constants"].cast<py::list>()) {
    Constant constant;
    if (py::isinstance<py::float_>(item)) {
      constant.f = item.cast<double>();
    } else {
      constant.i = item.cast<int64_t>();
    }
    spec.constants.push_back(constant);
  }
  spec.row_dim = d["row_dim"].cast<int>();
  for (const auto& variant : d["variants"].cast<std::vector<py::dict>>()) {
    spec.variants.push_back(variant_of(variant));
  }
  if (spec.variants.empty()) throw py::value_error("launch " + spec.name + " has no variant");
  return spec;
}

// (file, offset there, first byte in `memory`, bytes, piece, stride), which must lie in `memory`.
FilePart file_part(const Bytes& memory, const std::array<int64_t, 6>& numbers) {
  const auto [file, offset, first, bytes, piece, stride] = numbers;
  const auto size = static_cast<int64_t>(memory.size());
  bool inside = offset >= 0 && first >= 0 && first <= size && 0 < piece && piece <= stride &&
                0 < bytes && bytes <= size;
  if (inside) {
    const int64_t whole = (bytes - 1) / piece;  // pieces before the last
    inside = whole <= size / stride && bytes - whole * piece <= size - first - whole * stride;
  }
  if (!inside) throw py::value_error("a part of a file that does not fit into the memory for it");
  return {static_cast<int>(file),
          offset,
          static_cast<char*>(memory.info.ptr) + first,
          static_cast<size_t>(bytes),
          static_cast<size_t>(piece),
          static_cast<size_t>(stride)};
}

py::memoryview view(std::string_view data) {
  return py::memoryview::from_memory(data.data(), static_cast<py::ssize_t>(data.size()));
}

}  // namespace

PYBIND11_MODULE(_core, m) {
  m.doc() = "The C++ core: backends that replay programs. Used through atlas.runtime.core.";
  m.attr("CORE_ABI") = kCoreAbi;
  m.attr("STEP_VERSION") = kStepVersion;

  // Leaked on purpose: the translator may run while the interpreter shuts down.
  static auto* device_error =
      new py::object(py::module_::import("atlas.errors").attr("DeviceError"));
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const DeviceFault& fault) {
      PyErr_SetObject(device_error->ptr(), (*device_error)("device", fault.what()).ptr());
    }
  });

  py::class_<Backend>(m, "Backend")
      .def("describe", &Backend::describe)
      .def("allocate", &Backend::allocate, py::call_guard<py::gil_scoped_release>())
      .def("arena_bytes", &Backend::arena_bytes)
      .def("write",
           [](Backend& self, size_t offset, const py::buffer& data) {
             const Bytes bytes(data, false);
             check_range(self, offset, bytes.size());
             py::gil_scoped_release release;
             self.write(offset, bytes.info.ptr, bytes.size());
           })
      .def("read",
           [](Backend& self, size_t offset, const py::buffer& data) {
             const Bytes bytes(data, true);
             check_range(self, offset, bytes.size());
             py::gil_scoped_release release;
             self.read(offset, bytes.info.ptr, bytes.size());
           })
      .def("fill",
           [](Backend& self, size_t offset, int value, size_t bytes) {
             check_range(self, offset, bytes);
             py::gil_scoped_release release;
             self.fill(offset, static_cast<uint8_t>(value), bytes);
           })
      .def(
          "staging",
          [](Backend& self, size_t bytes) {
            return py::memoryview::from_memory(self.staging(bytes),
                                               static_cast<py::ssize_t>(bytes));
          },
          py::keep_alive<0, 1>())
      .def("release",
           [](Backend& self, const py::memoryview& staging) {
             void* memory = py::buffer(staging).request().ptr;
             staging.attr("release")();  // so that whoever still has it gets an error
             self.release(memory);
           })
      .def("load_images",
           [](Backend& self, const std::vector<py::buffer>& images) {
             std::vector<std::string_view> views;
             for (const py::buffer& image : images) {
               const Bytes bytes(image, false);
               views.emplace_back(static_cast<const char*>(bytes.info.ptr), bytes.size());
             }
             self.load_images(views);
           })
      .def("load",
           [](Backend& self, const std::vector<py::dict>& launches) {
             ProgramSpec spec;
             for (const py::dict& launch : launches) spec.push_back(launch_spec(launch));
             return self.load(spec);
           })
      .def("begin_step",
           [](Backend& self, size_t offset, const py::buffer& block, size_t bytes) {
             const Bytes view(block, false);
             if (bytes > view.size()) throw py::value_error("step block is shorter than `bytes`");
             check_range(self, offset, bytes);
             py::gil_scoped_release release;
             self.begin_step(offset, view.info.ptr, bytes);
           })
      .def("run", &Backend::run, py::call_guard<py::gil_scoped_release>())
      .def("run_on",
           [](Backend& self, int program, size_t launch,
              const std::vector<std::optional<size_t>>& operands) {
             self.run_on(program, launch, offsets(operands));
           })
      .def("capture",
           [](Backend& self, int program, size_t offset, const std::vector<int32_t>& header) {
             if (header.size() != kHeaderWords) throw py::value_error("not a step header");
             py::gil_scoped_release release;
             self.capture(program, offset, header.data());
           })
      .def("read_later",
           [](Backend& self, size_t offset, const py::buffer& data) {
             const Bytes bytes(data, true);
             check_range(self, offset, bytes.size());
             py::gil_scoped_release release;
             self.read_later(offset, bytes.info.ptr, bytes.size());
           })
      .def("fence", &Backend::fence)
      .def("wait", &Backend::wait, py::call_guard<py::gil_scoped_release>())
      .def("passed", &Backend::passed)
      .def("upload",
           [](Backend& self, size_t offset, const py::buffer& data) {
             const Bytes bytes(data, false);
             check_range(self, offset, bytes.size());
             py::gil_scoped_release release;
             return self.upload(offset, bytes.info.ptr, bytes.size());
           })
      .def("order_runs", &Backend::order_runs)
      .def("order_uploads", &Backend::order_uploads)
      .def("run_timed", &Backend::run_timed, py::call_guard<py::gil_scoped_release>())
      .def("run_seconds", &Backend::run_seconds, py::call_guard<py::gil_scoped_release>())
      .def("synchronize", &Backend::synchronize, py::call_guard<py::gil_scoped_release>());

  py::class_<FileReader>(m, "FileReader")
      .def(py::init<int>(), py::arg("threads"))
      .def("read",
           [](FileReader& self, const py::buffer& memory,
              const std::vector<std::array<int64_t, 6>>& parts) {
             const Bytes bytes(memory, true);
             std::vector<FilePart> checked;
             for (const auto& part : parts) checked.push_back(file_part(bytes, part));
             return self.read(checked);
           })
      .def("wait", &FileReader::wait, py::call_guard<py::gil_scoped_release>())
      .def("close", &FileReader::close, py::call_guard<py::gil_scoped_release>());

  m.def("cpu_backend", &make_cpu_backend, py::arg("n_threads"), py::arg("level") = "",
        py::arg("cores") = std::numeric_limits<int>::max());
  m.def("cpu_levels", [] {
    std::vector<std::string> usable;
    for (const CpuLevel& level : cpu_levels()) {
      if (level.usable()) usable.push_back(level.name);
    }
    return usable;
  });
  m.def("cpu_level_report", [] {
    py::list result;
    for (const CpuLevel& level : cpu_levels()) {
      py::dict entry;
      entry["name"] = level.name;
      entry["compiled"] = level.compiled;
      entry["obstacle"] = level.obstacle;
      entry["failure"] = level.failure;
      result.append(entry);
    }
    return result;
  });
  m.def("memory_nodes", &memory_nodes, py::arg("root") = "/sys/devices/system/node");
  m.def("interleave_obstacle", &interleave_obstacle);
  m.def("cpu_rates", [](int threads) {
    CpuRates rates;
    {
      py::gil_scoped_release release;
      rates = measure_cpu_rates(threads);
    }
    py::dict result;
    result["read"] = rates.read_bytes;
    result["f32"] = rates.f32;
    result["bf16"] = rates.bf16;
    result["int8"] = rates.int8;
    return result;
  });
  m.def("cpu_kernels", &cpu_kernels, py::arg("level") = "");
  m.def("break_cpu_level", &break_cpu_level, py::arg("level"), py::arg("faults"));
  m.def("cuda_backend", &make_cuda_backend, py::arg("device") = 0);
  m.def("cuda_devices", [] {
    std::vector<CudaDevice> devices;
    {
      py::gil_scoped_release release;  // the first call starts the driver, beside imports
      devices = cuda_devices();
    }
    py::list result;
    for (const CudaDevice& device : devices) {
      py::dict entry;
      entry["index"] = device.index;
      entry["name"] = device.name;
      entry["compute_capability"] = py::make_tuple(device.major, device.minor);
      entry["total_memory"] = device.total_memory;
      entry["multiprocessors"] = device.multiprocessors;
      entry["shared_memory_per_block"] = device.shared_memory_per_block;
      entry["l2_bytes"] = device.l2_bytes;
      entry["cooperative_launch"] = device.cooperative_launch;
      entry["cluster_launch"] = device.cluster_launch;
      result.append(entry);
    }
    return result;
  });
  m.def("embedded_manifest", [] { return py::bytes(std::string(embedded_manifest())); });
  m.def("embedded_images", [] { return view(embedded_images()); });
}

}  // namespace atlas
