// The device as torch asks for it: a guard with streams and events, hooks, generators.
#include "glass.h"

#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/GeneratorImpl.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <atomic>

namespace glass {

namespace {

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = kGlass;
  c10::DeviceType type() const override {
    return kGlass;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override {
    return {kGlass, c10::DeviceIndex(current_device())};
  }
  void setDevice(c10::Device device) const override {
    if (device.has_index()) set_device(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) set_device(device.index());
  }
  c10::Stream getStream(c10::Device device) const override {
    return as_stream(current(device.index()));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return as_stream(default_stream(device.has_index() ? device.index() : current_device()));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool is_high) const override {
    return as_stream(
        stream_from_pool(device.has_index() ? device.index() : current_device(), is_high));
  }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    return getStreamFromGlobalPool(device, priority < 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    c10::Stream before = getStream(stream.device());
    set_current(state_of(stream));
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return state_of(stream);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<EventState*>(event);
  }
  void record(
      void** event, const c10::Stream& stream, const c10::DeviceIndex,
      const c10::EventFlag flag) const override {
    auto made = glass::record(state_of(stream), flag == c10::EventFlag::BACKEND_DEFAULT);
    auto* old = static_cast<EventState*>(*event);
    if (old)
      *old = std::move(made);
    else
      *event = new EventState(std::move(made));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) wait_event(state_of(stream), *static_cast<EventState*>(event));
  }
  bool queryEvent(void* event) const override {
    return !event || glass::query(*static_cast<EventState*>(event));
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return c10::DeviceIndex(device_count());
  }
  bool queryStream(const c10::Stream& stream) const override {
    return glass::query(state_of(stream));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    glass::synchronize(state_of(stream));
  }
  bool isStreamCapturing(const c10::Stream& stream) const override {
    return state_of(stream)->capture != 0;
  }
  void synchronizeEvent(void* event) const override {
    if (event) glass::synchronize(*static_cast<EventState*>(event));
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    synchronize_device(device);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    allocator()->recordStream(data, stream);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    auto* begin = static_cast<EventState*>(first);
    auto* end = static_cast<EventState*>(second);
    TORCH_CHECK(
        begin && end && begin->is_timed && end->is_timed,
        "Both events must be created with argument 'enable_timing=True'.");
    {
      Lock lock(world().mutex);
      TORCH_CHECK(is_over(*begin) && is_over(*end), "Both events must be completed.");
    }
    return *end->reached_ms - *begin->reached_ms;
  }
};

// Numbers come from CPU generators, a new one for each launch.
struct GeneratorOfGlass final : c10::GeneratorImpl {
  explicit GeneratorOfGlass(c10::DeviceIndex index)
      : c10::GeneratorImpl(
            c10::Device(kGlass, index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    drawn = 0;
  }
  void set_offset(uint64_t offset) override {
    drawn = offset;
  }
  uint64_t get_offset() const override {
    return drawn;
  }
  uint64_t current_seed() const override {
    return seed_;
  }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom(false));
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16, "glass: a generator's state has 16 bytes");
    const auto* values = static_cast<const uint64_t*>(state.data());
    seed_ = values[0];
    drawn = values[1];
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    at::Tensor state = at::empty({16}, at::kByte);
    auto* values = reinterpret_cast<uint64_t*>(state.data_ptr());
    values[0] = seed_;
    values[1] = drawn;
    return state.getIntrusivePtr();
  }
  GeneratorOfGlass* clone_impl() const override {
    auto* copy = new GeneratorOfGlass(device().index());
    copy->seed_ = seed_;
    copy->drawn = drawn.load();
    return copy;
  }
  static c10::DeviceType device_type() {
    return kGlass;
  }
  std::atomic<uint64_t> drawn{0};

 private:
  uint64_t seed_ = c10::default_rng_seed_val;
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return device_count() > 0;
  }
  bool hasPrimaryContext(c10::DeviceIndex) const override {
    return allocator()->initialized();
  }
  void init() const override {
    need_set_up();
  }
  c10::DeviceIndex deviceCount() const override {
    return c10::DeviceIndex(device_count());
  }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    set_device(device);
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return c10::DeviceIndex(current_device());
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    auto before = getCurrentDevice();
    set_device(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  bool isPinnedPtr(const void* data) const override {
    return is_pinned(data);
  }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return pinned_allocator();
  }
  c10::Device getDeviceFromPtr(void* data) const override {
    Lock lock(world().mutex);
    const Space* space = space_of(reinterpret_cast<Address>(data));
    TORCH_CHECK(space, "glass: this pointer is not the device's");
    return {kGlass, c10::DeviceIndex(space->device)};
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    static auto* generators = [] {
      auto* made = new std::vector<at::Generator>;
      for (int i = 0; i < device_count(); ++i)
        made->push_back(at::make_generator<GeneratorOfGlass>(c10::DeviceIndex(i)));
      return made;
    }();
    return generators->at(size_t(index < 0 ? current_device() : index));
  }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return at::make_generator<GeneratorOfGlass>(
        c10::DeviceIndex(index < 0 ? current_device() : index));
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    c10::DeviceGuard guard(storage.device());
    auto data = allocator()->allocate(size);
    size_t kept = std::min(size, storage.nbytes());
    if (kept > 0) allocator()->copy_data(data.get(), storage.data(), kept);
    impl->set_data_ptr_noswap(std::move(data));
    impl->set_nbytes(size);
  }
};

} // namespace

uint64_t next_seed(const at::Generator& generator) {
  auto* own = static_cast<GeneratorOfGlass*>(generator.unsafeGetGeneratorImpl());
  // splitmix64
  uint64_t z = own->current_seed() + 0x9E3779B97F4A7C15ull * (own->drawn.fetch_add(1) + 1);
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

void register_device() {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  c10::SetAllocator(kGlass, allocator());
}

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

} // namespace glass
