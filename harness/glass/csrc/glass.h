// A device that keeps CUDA's rules on CPU threads. `docs/glass.md` says which ones.
//
// One mutex guards all state of this process' devices (`world()`), and one condition variable
// tells of every change. Jobs run outside of the mutex. The interpreter's lock is never held by a
// thread that waits here (`Unlocked`), and is never taken below the mutex.
#pragma once

#include <ATen/ATen.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Stream.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

namespace glass {

constexpr auto kGlass = c10::DeviceType::PrivateUse1;
using Address = uintptr_t;
using Job = std::function<void()>;
using Pool = c10::MempoolId_t;

// ---- time: which work is certain to be over ------------------------------------------------

// For each stream the number of its items that are certain to be over at some point.
using Clock = std::vector<uint64_t>;
void join(Clock& into, const Clock& other);

// Bytes that a launch reads or writes. `whole`: it touches every byte of the range.
struct Access {
  Address begin;
  Address end;
  bool writes;
  bool whole;
};

struct StreamState;

struct Point {
  StreamState* stream = nullptr;
  uint64_t number = 0; // items of the stream that are over when this point is reached
};

struct EventState {
  Point at;
  Clock clock;
  uint64_t capture = 0; // the capture it was recorded in, 0 for none
  bool is_timed = false;
  std::shared_ptr<double> reached_ms;
};

struct Item {
  std::string name;
  Job job;                      // may be empty
  std::optional<Point> waits;   // another stream's point
  std::shared_ptr<bool> gate;   // false: not yet
};

struct StreamState {
  c10::StreamId id = 0;
  int device = 0;
  int index = 0; // place in clocks
  int priority = 0;
  std::deque<Item> queue;
  uint64_t launched = 0;
  uint64_t done = 0;
  bool is_running = false;
  bool has_thread = false;
  Clock clock;
  uint64_t capture = 0;
  std::mt19937_64 draw;
};

// ---- graphs ----------------------------------------------------------------------------------

enum class CaptureMode { Global, ThreadLocal, Relaxed };

struct Node {
  std::string name;
  Job job;
  std::vector<Access> accesses;
};

struct Graph {
  std::vector<Node> nodes;
  Pool pool{0, 0};
};

// Last accesses of a range of addresses.
struct Touch {
  int stream = -1;
  uint64_t number = 0;
  bool whole = false;
  std::string name;
};
struct Range {
  Address end = 0;
  std::vector<Touch> written;
  std::vector<Touch> read;
};
using Touched = std::map<Address, Range>;

struct Capture {
  std::map<StreamState*, Clock> clocks; // the captured launches that are ordered before each stream
  Clock counts;                         // captured launches of each stream
  Touched touched;
  uint64_t id = 0;
  StreamState* origin = nullptr;
  std::set<StreamState*> streams;
  CaptureMode mode = CaptureMode::Global;
  std::thread::id thread;
  std::string broken; // why it is invalid
  std::shared_ptr<Graph> graph;
};

// ---- memory ----------------------------------------------------------------------------------

struct Block {
  Address begin = 0;
  size_t size = 0;
  size_t requested = 0;
  StreamState* home = nullptr;
  Pool pool{0, 0};
  bool is_free = true;
  std::set<StreamState*> used_by; // by record_stream
  std::vector<EventState> awaited;
  Address segment = 0;
};

struct Space { // a range of addresses that the host may not touch, and its twin
  Address begin = 0;
  size_t size = 0;
  char* inside = nullptr;
  int device = -1;
  int fd = -1;
  bool is_foreign = false; // another process' memory
};

struct Statistics {
  size_t allocated = 0, allocated_peak = 0, reserved = 0, reserved_peak = 0;
  uint64_t allocations = 0, out_of_memory = 0;
};

struct DeviceState {
  int index = 0;
  Space space;
  std::map<Address, Block> blocks;       // free and used ones
  std::set<std::tuple<Pool, int, size_t, Address>> free; // pool, stream's place, size, address
  std::map<Address, size_t> segments;    // what cudaMalloc would have given
  std::map<Address, size_t> away;        // pages given back under their addresses
  Statistics statistics;
  std::vector<std::unique_ptr<StreamState>> streams;
  int drawn[2] = {0, 0};                 // of the pools of streams
};

struct PinnedBlock {
  size_t size = 0;
  bool is_free = false;
  std::vector<EventState> awaited;
};

struct Settings {
  int devices = 1;
  size_t memory = size_t(4) << 30;
  uint64_t seed = 0;
  int delay_us = 0;
  bool is_late = false;   // no threads: work is done where somebody waits, in an order by seed
  bool finds_races = true;
  bool raises_races = true;
  bool poisons = true;
};

struct World {
  std::mutex mutex;
  std::condition_variable changed;
  Settings settings;
  std::vector<std::unique_ptr<DeviceState>> devices;
  std::vector<StreamState*> streams; // by their place in clocks
  std::vector<Space> spaces;
  std::map<Address, PinnedBlock> pinned;
  Clock host; // what the host has waited for, all threads together
  Touched touched;
  std::map<uint64_t, std::shared_ptr<Capture>> captures;
  std::map<Pool, int> pools; // private pools and their users
  uint64_t last_capture = 0, last_pool = 0;
  std::string broken; // the first error of a job: no later call succeeds
  std::vector<std::string> races;
  bool is_driving = false;
  bool is_stopping = false;
  std::mt19937_64 draw;
};
World& world();
using Lock = std::unique_lock<std::mutex>;

// Lets other Python threads run while this one waits; does nothing without the interpreter's lock.
class Unlocked {
 public:
  Unlocked();
  ~Unlocked();

 private:
  void* state_ = nullptr;
};

// memory.cpp
int device_count(); // by the environment until the device is used
void need_set_up();
const Space* space_of(Address address);                       // with the mutex
char* inside(Address address, size_t size, const char* what); // the twin of an address
c10::DeviceAllocator* allocator();
c10::Allocator* pinned_allocator();
bool is_pinned(const void* address);
void note_pinned_use(const void* address, StreamState* stream); // torch's own copies
void record_use(Address address, StreamState* stream);          // record_stream
std::string describe(Address address);                        // with the mutex
void check_pages(const std::vector<Access>& accesses, const std::string& name); // with the mutex
void forget_touched(Address begin, Address end);              // with the mutex
Pool new_pool();
void keep_pool(Pool pool);
void drop_pool(Pool pool);
void send_away(Address begin, size_t size);
void bring_back(Address begin, size_t size);
std::vector<std::pair<Address, size_t>> segments_of(Pool pool);
std::pair<int, size_t> share(Address address);                  // fd, offset
Address open_shared(int process, int fd, size_t size, int device);
void close_shared(Address begin);
size_t empty_pinned_cache();
DeviceState& device_of(int index);

// streams.cpp
StreamState* state_of(c10::Stream stream);
c10::Stream as_stream(const StreamState* stream);
StreamState* current(int device = -1);
void set_current(StreamState* stream);
int current_device();
void set_device(int device);
StreamState* stream_from_pool(int device, bool is_high_priority);
StreamState* default_stream(int device);
// Put a job at the end of the stream, or into its capture.
void launch(StreamState* stream, std::string name, Job job, std::vector<Access> accesses);
// The same, and wait for it; the job's error is the caller's.
void launch_and_wait(StreamState* stream, std::string name, Job job, std::vector<Access> accesses);
EventState record(StreamState* stream, bool is_timed);
void wait_event(StreamState* stream, const EventState& event);
bool query(const EventState& event, bool is_ours = false);
void synchronize(const EventState& event);
void synchronize(StreamState* stream, const char* what = "synchronize");
void synchronize_device(int device);
void wait_for_all(Lock& lock, DeviceState& device); // all of the device's work
bool query(StreamState* stream);
void check_health_locked();          // raises what a job has raised; with the mutex
extern bool was_forked;
void need_no_capture(const char* what, StreamState* stream = nullptr); // with the mutex
std::shared_ptr<bool> hold(StreamState* stream);
void open(const std::shared_ptr<bool>& gate);
void begin_capture(StreamState* stream, Pool pool, CaptureMode mode);
std::shared_ptr<Graph> end_capture(StreamState* stream);
void replay(const std::shared_ptr<Graph>& graph, StreamState* stream);
void stop(); // at the process' end: no further item is begun
std::vector<std::string> waiting();  // who waits for whom
bool is_over(const EventState& event); // with the mutex
bool is_written(Address begin, Address end); // whether all launches that write it are over
void wait_until(Lock& lock, const std::function<bool()>& is_so);
void fail(const std::string& message); // with the mutex: the device is lost
extern thread_local Pool thread_pool; // of `use_mem_pool`

// operators.cpp
at::Tensor twin_of(const at::Tensor& tensor);
Access access_of(const at::Tensor& tensor, bool writes);

} // namespace glass
