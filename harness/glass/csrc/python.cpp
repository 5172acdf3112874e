// The names of `harness.glass._glass`.
#include "glass.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/extension.h>

#include <algorithm>

namespace glass {
void register_device();

namespace {

struct PyGraph {
  std::shared_ptr<Graph> graph;
  Pool pool{0, 0};
  bool keeps = false;
  StreamState* stream = nullptr;

  void begin(std::optional<Pool> wanted, const std::string& mode) {
    reset();
    pool = wanted ? *wanted : new_pool();
    stream = current();
    auto chosen = mode == "thread_local" ? CaptureMode::ThreadLocal
        : mode == "relaxed"              ? CaptureMode::Relaxed
                                         : CaptureMode::Global;
    begin_capture(stream, pool, chosen);
    keep_pool(pool);
    keeps = true;
  }
  void end() {
    graph = end_capture(stream);
  }
  void run() {
    TORCH_CHECK(graph, "glass: this graph has captured nothing");
    replay(graph, current());
  }
  void reset() {
    graph = nullptr;
    if (keeps) drop_pool(pool);
    keeps = false;
  }
  ~PyGraph() {
    reset();
  }
};

// One launch over rows of four int64: the addresses of a weight's range, of its new values, of
// their places (uint16, 0 for all in order), and their count. It exchanges old and new values.
void launch_exchange(const at::Tensor& table, int64_t width) {
  TORCH_CHECK(table.device().type() == kGlass && table.is_contiguous() && table.size(-1) == 4);
  StreamState* stream = current(table.device().index());
  at::Tensor rows = twin_of(table);
  auto resolve = [](Address address, size_t size, size_t alignment, const char* what) -> char* {
    TORCH_CHECK(address % alignment == 0, what, " is not aligned");
    {
      Lock lock(world().mutex);
      auto after = world().pinned.upper_bound(address);
      if (after != world().pinned.begin()) {
        auto& [begin, block] = *std::prev(after);
        if (address + size <= begin + block.size) {
          TORCH_CHECK(!block.is_free, "illegal address of ", what, ": ", describe(address));
          return reinterpret_cast<char*>(address);
        }
      }
      if (!space_of(address)) TORCH_CHECK(
          false, "illegal address of ", what, ": ", describe(address), ", neither the device's nor pinned");
      for (auto& device : world().devices) {
        auto next = device->blocks.upper_bound(address);
        if (next == device->blocks.begin()) continue;
        const Block& block = std::prev(next)->second;
        if (address >= block.begin + block.size) continue;
        TORCH_CHECK(
            !block.is_free && address + size <= block.begin + block.size, "illegal address of ",
            what, ": ", describe(address));
      }
    }
    return inside(address, size, what);
  };
  std::vector<Access> accesses{access_of(table, false)};
  // the host's launch knows the addresses if the table is whole by now, as at a commit
  if (is_written(accesses[0].begin, accesses[0].end)) {
    const int64_t* row = rows.data_ptr<int64_t>();
    for (int64_t i = 0; i < rows.numel() / 4; ++i, row += 4) {
      size_t count = size_t(row[3]), last = count - 1;
      Address places = Address(row[2]), values = Address(row[1]), live = Address(row[0]);
      if (count == 0) continue;
      if (places) {
        if (!is_written(places, places + 2 * count)) continue;
        try {
          auto* at = reinterpret_cast<const uint16_t*>(resolve(places, count * 2, 2, "places"));
          last = *std::max_element(at, at + count);
        } catch (const c10::Error&) {
          continue; // the job tells
        }
        accesses.push_back({places, places + 2 * count, false, true});
      }
      accesses.push_back({values, values + count * size_t(width), true, true});
      accesses.push_back({live, live + (last + 1) * size_t(width), true, !places});
    }
  }
  auto job = [rows, width, resolve] {
    const int64_t* row = rows.data_ptr<int64_t>();
    size_t size = size_t(width);
    for (int64_t i = 0; i < rows.numel() / 4; ++i, row += 4) {
      size_t count = size_t(row[3]);
      if (count == 0) continue;
      char* values = resolve(Address(row[1]), count * size, size, "new values");
      const uint16_t* places = nullptr;
      size_t last = count - 1;
      if (row[2]) {
        places = reinterpret_cast<const uint16_t*>(
            resolve(Address(row[2]), count * 2, 2, "places"));
        for (size_t j = 0; j < count; ++j) last = std::max<size_t>(j ? last : 0, places[j]);
      }
      char* live = resolve(Address(row[0]), (last + 1) * size, size, "a weight");
      for (size_t j = 0; j < count; ++j) {
        char* here = live + size * (places ? places[j] : j);
        std::swap_ranges(here, here + size, values + j * size);
      }
    }
  };
  launch(stream, "exchange", job, accesses);
}

} // namespace

void bind_communicator(py::module& module);

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  bind_communicator(m);
  m.def("register_device", &register_device);
  m.def("current_device", &current_device);
  m.def("set_device", &set_device);
  m.def("device_count", &device_count);
  m.def("default_generator", [](int index) {
    return at::detail::getPrivateUse1Hooks().getDefaultGenerator(c10::DeviceIndex(index));
  });
  m.def("is_initialized", [] { return allocator()->initialized(); });
  m.def("mem_get_info", [](int device) { return allocator()->getMemoryInfo(c10::DeviceIndex(device)); });
  m.def("empty_cache", [] { allocator()->emptyCache({0, 0}); });
  m.def("empty_pinned_cache", &empty_pinned_cache);
  m.def("statistics", [](int device) {
    Statistics seen = device_of(device).statistics;
    py::dict made;
    made["allocated_bytes.all.current"] = seen.allocated;
    made["allocated_bytes.all.peak"] = seen.allocated_peak;
    made["reserved_bytes.all.current"] = seen.reserved;
    made["reserved_bytes.all.peak"] = seen.reserved_peak;
    made["allocation.all.allocated"] = seen.allocations;
    made["num_ooms"] = seen.out_of_memory;
    return made;
  });
  m.def("reset_peak", [](int device) { allocator()->resetPeakStats(c10::DeviceIndex(device)); });
  m.def("pinned_bytes", [] {
    Lock lock(world().mutex);
    size_t used = 0, free = 0;
    for (auto& [begin, block] : world().pinned) (block.is_free ? free : used) += block.size;
    return std::make_pair(used, free);
  });
  m.def("races", [] {
    Lock lock(world().mutex);
    return world().races;
  });
  m.def("clear_races", [] {
    Lock lock(world().mutex);
    world().races.clear();
  });
  m.def("synchronize_device", &synchronize_device);
  m.def("reseed", [](uint64_t seed) {
    Lock lock(world().mutex);
    world().settings.seed = seed;
    world().draw.seed(seed);
    for (StreamState* stream : world().streams)
      stream->draw.seed(seed * 1000003 + uint64_t(stream->index));
  });
  m.def("waiting", &waiting);
  m.def("error", [] {
    Lock lock(world().mutex);
    return world().broken;
  });
  m.def("describe", [](Address address) {
    Lock lock(world().mutex);
    return describe(address);
  });
  m.def("stop", &stop);
  m.def("hold", [](int64_t id, int device) {
    auto gate = hold(state_of(c10::Stream(
        c10::Stream::UNSAFE, c10::Device(kGlass, c10::DeviceIndex(device)), id)));
    return py::cpp_function([gate] { open(gate); });
  });
  m.def("is_capturing", [] { return current()->capture != 0; });
  m.def("new_pool", &new_pool);
  m.def("keep_pool", &keep_pool);
  m.def("drop_pool", &drop_pool);
  m.def("exchange_thread_pool", [](Pool pool) { return std::exchange(thread_pool, pool); });
  m.def("send_away", &send_away);
  m.def("bring_back", &bring_back);
  m.def("segments_of", &segments_of);
  m.def("share", [](Address address) { return share(address); });
  m.def("open_shared", &open_shared);
  m.def("close_shared", &close_shared);
  m.def("storage_at", [](Address address, size_t size, int device, const py::object& owner) {
    // keeps `owner` until the storage is freed
    auto* kept = new py::object(owner);
    auto release = [](void* context) {
      py::gil_scoped_acquire held;
      delete static_cast<py::object*>(context);
    };
    c10::DataPtr data(
        reinterpret_cast<void*>(address), kept, release,
        c10::Device(kGlass, c10::DeviceIndex(device)));
    auto storage = c10::make_intrusive<c10::StorageImpl>(
        c10::StorageImpl::use_byte_size_t(), size, std::move(data), allocator(), false);
    auto options = at::TensorOptions().dtype(at::kByte).device(data.device());
    return at::empty({0}, options.device(c10::Device(kGlass, c10::DeviceIndex(device))))
        .set_(c10::Storage(std::move(storage)), 0, {int64_t(size)}, {1});
  });
  m.def("elapsed_ms", [](uintptr_t begin, uintptr_t end) {
    c10::impl::VirtualGuardImpl guard(kGlass);
    return guard.elapsedTime(
        reinterpret_cast<void*>(begin), reinterpret_cast<void*>(end), c10::DeviceIndex(0));
  });
  m.def("launch_exchange", &launch_exchange);
  py::class_<PyGraph>(m, "Graph")
      .def(py::init<>())
      .def("capture_begin", &PyGraph::begin, py::arg("pool") = py::none(), py::arg("capture_error_mode") = "global")
      .def("capture_end", &PyGraph::end)
      .def("replay", &PyGraph::run)
      .def("reset", &PyGraph::reset)
      .def("pool", [](PyGraph& self) { return self.pool; });
}

} // namespace glass
