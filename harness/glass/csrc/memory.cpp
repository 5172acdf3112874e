// Device memory, its caching allocator, and pinned host memory.
//
// A device's memory is a file in memory, mapped twice: once without any access, at the addresses
// that tensors have, and once for the jobs. Host code that follows a tensor's pointer faults.
//
// The allocator has CUDA's contract: a freed block is its own stream's at once, and others' only
// after what `record_stream` named. Reuse is eager: the smallest free block that fits is taken, so
// a missing wait or record shows. The same holds for pinned blocks, which only wait for copies of
// torch's own.
#include "glass.h"

#include <ATen/core/CachingHostAllocator.h>
#include <Python.h>
#include <c10/util/Exception.h>
#include <c10/util/llvmMathExtras.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

namespace glass {

namespace {

constexpr size_t kUnit = 512;                  // blocks are multiples of it
constexpr size_t kSegment = size_t(2) << 20;   // device memory is taken in multiples of it
constexpr size_t kPoisoned = size_t(1) << 20;  // larger blocks are not poisoned
constexpr unsigned char kPoison = 0xFF;        // NaN in every floating dtype

bool is_set_up = false;
struct sigaction old_action;

int64_t number(const char* name, int64_t otherwise) {
  const char* text = getenv(name);
  return text && *text ? strtoll(text, nullptr, 10) : otherwise;
}

// A process may be forked from one that has loaded torch, with another environment.
Settings read_environment() {
  Settings settings;
  settings.devices = int(number("GLASS_DEVICES", settings.devices));
  settings.memory = size_t(number("GLASS_MEMORY", int64_t(settings.memory)));
  settings.seed = uint64_t(number("GLASS_SEED", 0));
  settings.delay_us = int(number("GLASS_DELAY_US", 0));
  settings.is_late = number("GLASS_LATE", 0) != 0;
  settings.poisons = number("GLASS_POISON", 1) != 0;
  const char* races = getenv("GLASS_RACES");
  settings.finds_races = !races || strcmp(races, "off") != 0;
  settings.raises_races = !races || strcmp(races, "note") != 0;
  return settings;
}

size_t round_up(size_t size, size_t unit) {
  return (size + unit - 1) / unit * unit;
}

// Says what host code touched, and lets the earlier handler (faulthandler's, the default) end it.
void on_fault(int number, siginfo_t* info, void* context) {
  auto address = reinterpret_cast<Address>(info->si_addr);
  for (const Space& space : world().spaces) {
    if (address < space.begin || address >= space.begin + space.size) continue;
    char text[200];
    int length = snprintf(
        text, sizeof text,
        "glass: host code touched device memory: address %p, byte %zu of glass:%d\n",
        info->si_addr, size_t(address - space.begin), space.device);
    if (write(2, text, size_t(length)) < 0) break;
    break;
  }
  sigaction(number, &old_action, nullptr); // the access is repeated, and meets that handler
  (void)context;
}

Space map_memory(int fd, size_t size, int device, bool is_foreign) {
  void* outside = mmap(nullptr, size, PROT_NONE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  void* within = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  TORCH_CHECK(outside != MAP_FAILED && within != MAP_FAILED, "glass: mmap: ", strerror(errno));
  return {reinterpret_cast<Address>(outside), size, static_cast<char*>(within), device, fd,
          is_foreign};
}

using Key = std::tuple<Pool, int, size_t, Address>;
Key key_of(const Block& block) {
  return {block.pool, block.home->index, block.size, block.begin};
}

void make_free(DeviceState& device, Block& block) {
  block.is_free = true;
  block.used_by.clear();
  block.awaited.clear();
  device.free.insert(key_of(block));
  auto absorb = [&](std::map<Address, Block>::iterator left,
                    std::map<Address, Block>::iterator right) {
    if (!left->second.is_free || !right->second.is_free ||
        left->second.segment != right->second.segment)
      return false;
    device.free.erase(key_of(left->second));
    device.free.erase(key_of(right->second));
    left->second.size += right->second.size;
    device.blocks.erase(right);
    device.free.insert(key_of(left->second));
    return true;
  };
  auto here = device.blocks.find(block.begin);
  auto next = std::next(here);
  if (next != device.blocks.end()) absorb(here, next);
  if (here != device.blocks.begin()) absorb(std::prev(here), here);
}

// Frees blocks whose awaited events are over.
void process_events(DeviceState& device) {
  std::vector<Address> over;
  for (auto& [begin, block] : device.blocks) {
    if (block.awaited.empty()) continue;
    bool is_done = true;
    for (const EventState& event : block.awaited) is_done = is_done && is_over(event);
    if (!is_done) continue;
    for (const EventState& event : block.awaited) join(world().host, event.clock);
    over.push_back(begin);
  }
  for (Address begin : over) make_free(device, device.blocks.at(begin));
}

// Gives free segments back: of `pool`, by default of no private pool, and of pools without a user.
// A graph's replay uses what its capture has freed, so the memory stays the pool's.
void release_free(DeviceState& device, std::optional<Pool> pool) {
  World& w = world();
  std::vector<Address> whole;
  for (auto& [begin, block] : device.blocks) {
    bool is_dead = block.pool != Pool{0, 0} && w.pools[block.pool] == 0;
    if (block.is_free && device.segments.at(block.segment) == block.size &&
        (is_dead || block.pool == pool.value_or(Pool{0, 0})))
      whole.push_back(begin);
  }
  for (Address begin : whole) {
    Block& block = device.blocks.at(begin);
    device.free.erase(key_of(block));
    device.segments.erase(begin);
    device.statistics.reserved -= block.size;
    forget_touched(begin, begin + block.size);
    fallocate(
        device.space.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
        off_t(begin - device.space.begin), off_t(block.size));
    device.blocks.erase(begin);
  }
}

size_t away_bytes(const DeviceState& device) {
  size_t sum = 0;
  for (auto& [begin, size] : device.away) sum += size;
  return sum;
}

std::optional<Address> take_segment(DeviceState& device, size_t size) {
  if (device.statistics.reserved - away_bytes(device) + size > device.space.size)
    return std::nullopt;
  Address at = device.space.begin;
  for (auto& [begin, length] : device.segments) {
    if (begin - at >= size) break;
    at = begin + length;
  }
  if (at + size > device.space.begin + device.space.size) return std::nullopt;
  device.segments[at] = size;
  device.statistics.reserved += size;
  device.statistics.reserved_peak =
      std::max(device.statistics.reserved_peak, device.statistics.reserved);
  return at;
}

Block* find_free(DeviceState& device, Pool pool, StreamState* stream, size_t size) {
  auto found = device.free.lower_bound(Key{pool, stream->index, size, 0});
  if (found == device.free.end() || std::get<0>(*found) != pool ||
      std::get<1>(*found) != stream->index)
    return nullptr;
  Block& block = device.blocks.at(std::get<3>(*found));
  device.free.erase(found);
  return &block;
}

class Allocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t requested) override {
    int index = current_device();
    c10::Device where(kGlass, c10::DeviceIndex(index));
    if (requested == 0) return {nullptr, nullptr, &free_block, where};
    StreamState* stream = current(index);
    World& w = world();
    Unlocked unlocked;
    Lock lock(w.mutex);
    check_health_locked();
    DeviceState& device = *w.devices.at(size_t(index));
    size_t size = round_up(requested, kUnit);
    Pool pool = thread_pool;
    if (stream->capture) pool = w.captures.at(stream->capture)->graph->pool;
    if (w.captures.empty()) process_events(device);
    Block* block = find_free(device, pool, stream, size);
    if (!block) {
      // what CUDA would do now, cudaMalloc, is forbidden beside a capture of the mode Global
      if (!stream->capture) need_no_capture("an allocation of new device memory", stream);
      size_t segment = round_up(size, kSegment);
      auto at = take_segment(device, segment);
      if (!at && w.captures.empty()) {
        wait_for_freed(lock, device);
        release_free(device, std::nullopt);
        at = take_segment(device, segment);
      }
      if (!at) {
        device.statistics.out_of_memory++;
        size_t free = device.space.size + away_bytes(device) - device.statistics.reserved;
        TORCH_CHECK_WITH(
            OutOfMemoryError, false, "glass out of memory. Tried to allocate ", requested,
            " bytes. glass:", index, " has ", device.space.size, " bytes, of which ", free,
            " are free; ", device.statistics.allocated, " are allocated by torch.");
      }
      Block fresh;
      fresh.begin = fresh.segment = *at;
      fresh.size = segment;
      fresh.home = stream;
      fresh.pool = pool;
      block = &device.blocks.emplace(*at, fresh).first->second;
    }
    if (block->size > size) {
      Block rest = *block;
      rest.begin += size;
      rest.size -= size;
      rest.is_free = true;
      block->size = size;
      device.free.insert(key_of(device.blocks.emplace(rest.begin, rest).first->second));
    }
    block->is_free = false;
    block->requested = requested;
    Statistics& seen = device.statistics;
    seen.allocations++;
    seen.allocated += size;
    seen.allocated_peak = std::max(seen.allocated_peak, seen.allocated);
    auto* pointer = reinterpret_cast<void*>(block->begin);
    c10::DataPtr data(pointer, pointer, &free_block, where);
    if (stream->capture || pool != Pool{0, 0}) return data;
    bool poisons = w.settings.poisons && size <= kPoisoned;
    Address begin = block->begin;
    char* twin = device.space.inside + (begin - device.space.begin);
    lock.unlock();
    // whoever still uses the block's earlier content is found here, and reads this
    Job job;
    if (poisons) job = [=] { memset(twin, kPoison, size); };
    launch(stream, "reuse of freed memory", job, {{begin, begin + size, true, true}});
    return data;
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &free_block;
  }
  void copy_data(void* to, const void* from, size_t count) const override {
    auto target = reinterpret_cast<Address>(to), source = reinterpret_cast<Address>(from);
    char* into = inside(target, count, "copy_data");
    char* out_of = inside(source, count, "copy_data");
    launch(
        current(), "copy_data", [=] { memmove(into, out_of, count); },
        {{source, source + count, false, true}, {target, target + count, true, true}});
  }
  bool initialized() override {
    return is_set_up;
  }
  void emptyCache(c10::MempoolId_t pool) override {
    if (!is_set_up) return;
    Unlocked unlocked;
    Lock lock(world().mutex);
    need_no_capture("empty_cache");
    for (auto& device : world().devices) {
      wait_for_freed(lock, *device);
      release_free(*device, pool == Pool{0, 0} ? std::nullopt : std::optional<Pool>(pool));
    }
  }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    record_use(reinterpret_cast<Address>(data.get()), state_of(stream));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex index) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    need_set_up();
    Lock lock(world().mutex);
    const Statistics& seen = world().devices.at(size_t(index))->statistics;
    auto& sum = stats.allocated_bytes[0];
    sum.current = int64_t(seen.allocated);
    sum.peak = int64_t(seen.allocated_peak);
    stats.active_bytes[0] = stats.requested_bytes[0] = sum;
    stats.reserved_bytes[0].current = int64_t(seen.reserved);
    stats.reserved_bytes[0].peak = int64_t(seen.reserved_peak);
    stats.allocation[0].allocated = int64_t(seen.allocations);
    stats.num_ooms = int64_t(seen.out_of_memory);
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex index) override {
    need_set_up();
    Lock lock(world().mutex);
    world().devices.at(size_t(index))->statistics.allocations = 0;
  }
  void resetPeakStats(c10::DeviceIndex index) override {
    need_set_up();
    Lock lock(world().mutex);
    Statistics& seen = world().devices.at(size_t(index))->statistics;
    seen.allocated_peak = seen.allocated;
    seen.reserved_peak = seen.reserved;
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex index) override {
    need_set_up();
    Lock lock(world().mutex);
    const DeviceState& device = *world().devices.at(size_t(index));
    size_t used = device.statistics.reserved - away_bytes(device);
    return {device.space.size > used ? device.space.size - used : 0, device.space.size};
  }

 private:
  // Waits like cudaFree.
  static void wait_for_freed(Lock& lock, DeviceState& device) {
    wait_for_all(lock, device);
    process_events(device);
  }

  static void free_block(void* pointer) {
    if (!pointer || was_forked) return;
    World& w = world();
    auto begin = reinterpret_cast<Address>(pointer);
    Unlocked unlocked;
    Lock lock(w.mutex);
    for (auto& device : w.devices) {
      auto found = device->blocks.find(begin);
      if (found == device->blocks.end()) continue;
      Block& block = found->second;
      device->statistics.allocated -= block.size;
      if (block.used_by.empty()) {
        make_free(*device, block);
        return;
      }
      for (StreamState* stream : block.used_by)
        block.awaited.push_back({{stream, stream->launched}, stream->clock, 0, false, nullptr});
      block.used_by.clear();
      return;
    }
  }
};

class PinnedAllocator final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t requested) override {
    c10::Device cpu(c10::DeviceType::CPU);
    if (requested == 0) return {nullptr, nullptr, &give_back, cpu};
    need_set_up();
    World& w = world();
    Lock lock(w.mutex);
    size_t size = std::max<size_t>(kUnit, c10::llvm::PowerOf2Ceil(requested));
    for (auto& [begin, block] : w.pinned) {
      if (!block.is_free || block.size != size) continue;
      bool is_done = true;
      for (const EventState& event : block.awaited) is_done = is_done && is_over(event);
      if (!is_done) continue;
      for (const EventState& event : block.awaited) join(w.host, event.clock);
      block.awaited.clear();
      block.is_free = false;
      return {reinterpret_cast<void*>(begin), reinterpret_cast<void*>(begin), &give_back, cpu};
    }
    need_no_capture("an allocation of pinned memory");
    void* memory = mmap(
        nullptr, round_up(size, 4096), PROT_READ | PROT_WRITE,
        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(memory != MAP_FAILED, "glass: no pinned memory: ", strerror(errno));
    w.pinned[reinterpret_cast<Address>(memory)] = {size, false, {}};
    return {memory, memory, &give_back, cpu};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &give_back;
  }
  void copy_data(void* to, const void* from, size_t count) const override {
    memcpy(to, from, count);
  }
  bool record_event(void* pointer, void*, c10::Stream stream) override {
    note_pinned_use(pointer, state_of(stream));
    return is_pinned(pointer);
  }
  void empty_cache() override {
    empty_pinned_cache();
  }
  at::HostStats get_stats() override {
    at::HostStats stats;
    Lock lock(world().mutex);
    for (auto& [begin, block] : world().pinned) {
      stats.allocated_bytes.current += int64_t(block.size);
      if (!block.is_free) stats.active_bytes.current += int64_t(block.size);
    }
    return stats;
  }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}

 private:
  static void give_back(void* pointer) {
    if (!pointer) return;
    World& w = world();
    Lock lock(w.mutex);
    auto found = w.pinned.find(reinterpret_cast<Address>(pointer));
    if (found == w.pinned.end()) return;
    found->second.is_free = true;
    // whoever still uses it, without a copy that torch knows of, may find anything
    if (w.settings.poisons && found->second.awaited.empty() && found->second.size <= kPoisoned)
      memset(pointer, kPoison, found->second.size);
  }
};

Allocator the_allocator;
PinnedAllocator the_pinned_allocator;
at::HostAllocatorRegistry<kGlass> registry(&the_pinned_allocator);

} // namespace

thread_local Pool thread_pool{0, 0};
bool was_forked = false;

World& world() {
  static World* the = new World; // never destroyed: streams' threads may outlive main
  return *the;
}

Unlocked::Unlocked() {
  if (Py_IsInitialized() && PyGILState_Check()) state_ = PyEval_SaveThread();
}
Unlocked::~Unlocked() {
  if (state_) PyEval_RestoreThread(static_cast<PyThreadState*>(state_));
}

int device_count() {
  World& w = world();
  Lock lock(w.mutex);
  if (!is_set_up) w.settings = read_environment();
  return w.settings.devices;
}

void need_set_up() {
  World& w = world();
  if (is_set_up) return;
  Lock lock(w.mutex);
  if (is_set_up) return;
  w.settings = read_environment();
  w.draw.seed(w.settings.seed);
  for (int i = 0; i < w.settings.devices; ++i) {
    size_t size = round_up(w.settings.memory, kSegment);
    int fd = memfd_create("glass", MFD_CLOEXEC);
    TORCH_CHECK(fd >= 0 && ftruncate(fd, off_t(size)) == 0, "glass: memfd: ", strerror(errno));
    auto device = std::make_unique<DeviceState>();
    device->index = i;
    device->space = map_memory(fd, size, i, false);
    w.spaces.push_back(device->space);
    w.devices.push_back(std::move(device));
  }
  struct sigaction action {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGSEGV, &action, &old_action);
  pthread_atfork(nullptr, nullptr, [] { was_forked = true; });
  is_set_up = true;
}

c10::DeviceAllocator* allocator() {
  return &the_allocator;
}
c10::Allocator* pinned_allocator() {
  return &the_pinned_allocator;
}

DeviceState& device_of(int index) {
  need_set_up();
  return *world().devices.at(size_t(index));
}

const Space* space_of(Address address) {
  for (const Space& space : world().spaces)
    if (address >= space.begin && address < space.begin + space.size) return &space;
  return nullptr;
}

char* inside(Address address, size_t size, const char* what) {
  if (size == 0 && address == 0) return nullptr;
  Lock lock(world().mutex);
  const Space* space = space_of(address);
  TORCH_CHECK(
      space && address + size <= space->begin + space->size, "glass: ", what, " of address ",
      reinterpret_cast<void*>(address), ", which is not the device's");
  return space->inside + (address - space->begin);
}

std::string describe(Address address) {
  World& w = world();
  for (auto& device : w.devices) {
    if (address < device->space.begin || address >= device->space.begin + device->space.size)
      continue;
    std::string where = "glass:" + std::to_string(device->index);
    auto after = device->blocks.upper_bound(address);
    if (after == device->blocks.begin()) return "an address of " + where + " without a block";
    const Block& block = std::prev(after)->second;
    if (address >= block.begin + block.size) return "an address of " + where + " without a block";
    return "byte " + std::to_string(address - block.begin) + " of a " +
        (block.is_free ? "free" : "used") + " block of " + std::to_string(block.size) +
        " bytes on " + where + " (stream " + std::to_string(block.home->index) + "'s)";
  }
  auto after = w.pinned.upper_bound(address);
  if (after != w.pinned.begin()) {
    auto& [begin, block] = *std::prev(after);
    if (address < begin + block.size)
      return "byte " + std::to_string(address - begin) + " of a " +
          (block.is_free ? "free" : "used") + " block of pinned memory of " +
          std::to_string(block.size) + " bytes";
  }
  return space_of(address) ? "another process' device memory" : "memory of the host";
}

void check_pages(const std::vector<Access>& accesses, const std::string& name) {
  for (auto& device : world().devices) {
    if (device->away.empty()) continue;
    for (const Access& access : accesses) {
      auto after = device->away.lower_bound(access.end);
      if (after == device->away.begin()) continue;
      auto& [begin, size] = *std::prev(after);
      if (begin + size > access.begin)
        fail("'" + name + "' touches released memory: " + describe(std::max(begin, access.begin)));
    }
  }
}

void forget_touched(Address begin, Address end) {
  Touched& touched = world().touched;
  touched.erase(touched.lower_bound(begin), touched.lower_bound(end));
}

void record_use(Address address, StreamState* stream) {
  Lock lock(world().mutex);
  for (auto& device : world().devices) {
    auto after = device->blocks.upper_bound(address);
    if (after == device->blocks.begin()) continue;
    Block& block = std::prev(after)->second;
    if (address >= block.begin + block.size || block.is_free) continue;
    if (block.home != stream) block.used_by.insert(stream);
    return;
  }
}

bool is_pinned(const void* pointer) {
  auto address = reinterpret_cast<Address>(pointer);
  Lock lock(world().mutex);
  auto after = world().pinned.upper_bound(address);
  if (after == world().pinned.begin()) return false;
  auto& [begin, block] = *std::prev(after);
  return address < begin + block.size && !block.is_free;
}

void note_pinned_use(const void* pointer, StreamState* stream) {
  auto address = reinterpret_cast<Address>(pointer);
  Lock lock(world().mutex);
  auto after = world().pinned.upper_bound(address);
  if (after == world().pinned.begin()) return;
  auto& [begin, block] = *std::prev(after);
  if (address < begin + block.size)
    block.awaited.push_back({{stream, stream->launched}, stream->clock, 0, false, nullptr});
}

size_t empty_pinned_cache() {
  World& w = world();
  Lock lock(w.mutex);
  size_t freed = 0;
  for (auto it = w.pinned.begin(); it != w.pinned.end();) {
    bool is_done = it->second.is_free;
    for (const EventState& event : it->second.awaited) is_done = is_done && is_over(event);
    if (!is_done) {
      ++it;
      continue;
    }
    freed += it->second.size;
    forget_touched(it->first, it->first + it->second.size);
    munmap(reinterpret_cast<void*>(it->first), round_up(it->second.size, 4096));
    it = w.pinned.erase(it);
  }
  return freed;
}

// ---- pools of graphs ---------------------------------------------------------------------------

Pool new_pool() {
  Lock lock(world().mutex);
  return {++world().last_pool, 0};
}

void keep_pool(Pool pool) {
  Lock lock(world().mutex);
  world().pools[pool]++;
}

void drop_pool(Pool pool) {
  Lock lock(world().mutex);
  world().pools[pool]--;
}

// ---- pages that leave their addresses ----------------------------------------------------------

void send_away(Address begin, size_t size) {
  Lock lock(world().mutex);
  for (auto& device : world().devices) {
    if (begin < device->space.begin || begin >= device->space.begin + device->space.size) continue;
    device->away[begin] = size;
    fallocate(
        device->space.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
        off_t(begin - device->space.begin), off_t(size));
    return;
  }
  TORCH_CHECK(false, "glass: these pages are not the device's");
}

void bring_back(Address begin, size_t size) {
  Lock lock(world().mutex);
  for (auto& device : world().devices) {
    auto found = device->away.find(begin);
    if (found == device->away.end() || found->second != size) continue;
    TORCH_CHECK_WITH(
        OutOfMemoryError,
        device->statistics.reserved - away_bytes(*device) + size <= device->space.size,
        "glass out of memory: ", size, " bytes of pages cannot come back");
    device->away.erase(found);
    return;
  }
  TORCH_CHECK(false, "glass: these pages were not away");
}

std::vector<std::pair<Address, size_t>> segments_of(Pool pool) {
  Lock lock(world().mutex);
  std::map<Address, size_t> found;
  for (auto& device : world().devices)
    for (auto& [begin, block] : device->blocks)
      if (block.pool == pool) found[block.segment] = device->segments.at(block.segment);
  return {found.begin(), found.end()};
}

// ---- memory of other processes -----------------------------------------------------------------

std::pair<int, size_t> share(Address address) {
  Lock lock(world().mutex);
  const Space* space = space_of(address);
  TORCH_CHECK(space, "glass: this address is not the device's");
  TORCH_CHECK(!space->is_foreign, "glass: memory of another process cannot be shared again");
  return {space->fd, address - space->begin};
}

Address open_shared(int process, int fd, size_t size, int device) {
  need_set_up();
  std::string path = "/proc/" + std::to_string(process) + "/fd/" + std::to_string(fd);
  int own = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  TORCH_CHECK(own >= 0, "glass: the memory of process ", process, " is not there: ", strerror(errno));
  Lock lock(world().mutex);
  Space space = map_memory(own, size, device, true);
  world().spaces.push_back(space);
  return space.begin;
}

void close_shared(Address begin) {
  Lock lock(world().mutex);
  auto& spaces = world().spaces;
  for (auto it = spaces.begin(); it != spaces.end(); ++it) {
    if (it->begin != begin || !it->is_foreign) continue;
    // the protected range stays taken: a pointer kept for too long finds nothing there
    munmap(it->inside, it->size);
    close(it->fd);
    forget_touched(begin, begin + it->size);
    spaces.erase(it);
    return;
  }
}

} // namespace glass
