// Streams, events, the order of work, and graphs.
//
// A stream's items are done in order by the stream's thread, which starts at the first item. An
// event is a point of a stream: how many of its items must be over. With `is_late` there are no
// threads: who waits does the work of all streams, in an order drawn by the seed, so a program
// with one thread runs the same way each time.
//
// Races are found when a launch is made, not when it runs: each stream has a clock of the items
// that are certain to be over before its next one. The host's clock is one for all threads, since
// nobody knows how threads tell each other what they have waited for.
#include "glass.h"

#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include <chrono>

namespace glass {

namespace {

thread_local int this_device = 0;
thread_local std::map<int, StreamState*> currents;

constexpr int kPoolSize = 32; // torch's own pool of streams, for each priority

double now_ms() {
  using namespace std::chrono;
  return duration<double, std::milli>(steady_clock::now().time_since_epoch()).count();
}

bool is_ready(const Item& item) {
  if (item.gate && !*item.gate) return false;
  return !item.waits || item.waits->stream->done >= item.waits->number;
}

// Does the first item of a stream. The mutex is free while its job runs.
void do_one(Lock& lock, StreamState* stream) {
  World& w = world();
  Item item = std::move(stream->queue.front());
  stream->queue.pop_front();
  stream->is_running = true;
  int delay = 0;
  if (w.settings.delay_us > 0 && item.job && !w.settings.is_late && stream->draw() % 4 == 0)
    delay = int(stream->draw() % uint64_t(w.settings.delay_us));
  lock.unlock();
  std::string error;
  try {
    if (delay) std::this_thread::sleep_for(std::chrono::microseconds(delay));
    if (item.job) item.job();
  } catch (const std::exception& e) {
    error = e.what();
  }
  item.job = nullptr; // what it holds may be freed by a deleter that takes the mutex
  lock.lock();
  if (!error.empty()) fail(item.name + ": " + error);
  stream->is_running = false;
  stream->done++;
  w.changed.notify_all();
}

void work(StreamState* stream) {
  World& w = world();
  Lock lock(w.mutex);
  for (;;) {
    w.changed.wait(lock, [&] {
      return !w.is_stopping && !stream->queue.empty() && is_ready(stream->queue.front());
    });
    do_one(lock, stream);
  }
}

// Does one ready item of any stream; returns whether there was one.
bool drive(Lock& lock) {
  World& w = world();
  if (w.is_driving) return false;
  std::vector<StreamState*> ready;
  for (StreamState* stream : w.streams)
    if (!stream->is_running && !stream->queue.empty() && is_ready(stream->queue.front()))
      ready.push_back(stream);
  if (ready.empty()) return false;
  StreamState* chosen = ready[w.draw() % ready.size()];
  w.is_driving = true;
  do_one(lock, chosen);
  w.is_driving = false;
  w.changed.notify_all();
  return true;
}

void drive_some(Lock& lock) {
  World& w = world();
  if (!w.settings.is_late) return;
  for (uint64_t left = w.draw() % 4; left > 0 && drive(lock); --left) {
  }
}

void push(StreamState* stream, Item item) {
  World& w = world();
  stream->queue.push_back(std::move(item));
  stream->launched++;
  if (size_t(stream->index) >= stream->clock.size()) stream->clock.resize(stream->index + 1);
  stream->clock[stream->index] = stream->launched;
  if (!w.settings.is_late && !stream->has_thread) {
    stream->has_thread = true;
    std::thread(work, stream).detach();
  }
  w.changed.notify_all();
}

Capture* capture_of(StreamState* stream) {
  World& w = world();
  auto found = w.captures.find(stream->capture);
  return stream->capture && found != w.captures.end() ? found->second.get() : nullptr;
}

void break_capture(Capture* capture, const std::string& why) {
  if (capture->broken.empty()) capture->broken = why;
}

std::string touch_text(const Touch& touch) {
  return "'" + touch.name + "' (launch " + std::to_string(touch.number) + " of stream " +
      std::to_string(touch.stream) + ")";
}

// Splits a range so that one begins at `at`.
void split(Touched& touched, Address at) {
  auto after = touched.upper_bound(at);
  if (after == touched.begin()) return;
  auto here = std::prev(after);
  if (here->first == at || here->second.end <= at) return;
  Range right = here->second;
  here->second.end = at;
  touched.emplace(at, std::move(right));
}

// Returns a sentence if an access is not ordered after earlier ones, and notes it otherwise.
std::string touch(
    Touched& touched, const Clock& clock, const Touch& who, const std::vector<Access>& accesses,
    bool notes) {
  auto is_before = [&](const Touch& other) {
    return other.stream == who.stream ||
        (size_t(other.stream) < clock.size() && clock[other.stream] >= other.number);
  };
  if (!notes) {
    for (const Access& access : accesses) {
      auto it = touched.upper_bound(access.begin);
      if (it != touched.begin()) --it;
      for (; it != touched.end() && it->first < access.end; ++it) {
        if (it->second.end <= access.begin) continue;
        auto find = [&](const std::vector<Touch>& others, const char* did) -> std::string {
          for (const Touch& other : others)
            if (!is_before(other) && (other.whole || access.whole))
              return "race: '" + who.name + "' (stream " + std::to_string(who.stream) + ") " +
                  (access.writes ? "writes" : "reads") + " what " + touch_text(other) + " " + did +
                  ", and nothing orders it after that: " +
                  describe(std::max(access.begin, it->first));
          return "";
        };
        std::string found = find(it->second.written, "writes");
        if (found.empty() && access.writes) found = find(it->second.read, "reads");
        if (!found.empty()) return found;
      }
    }
    return "";
  }
  auto put = [](std::vector<Touch>& among, Touch touch) {
    for (Touch& other : among)
      if (other.stream == touch.stream && other.whole == touch.whole) {
        other = std::move(touch);
        return;
      }
    among.push_back(std::move(touch));
  };
  for (const Access& access : accesses) {
    if (access.begin >= access.end) continue;
    split(touched, access.begin);
    split(touched, access.end);
    Touch touch = who;
    touch.whole = access.whole;
    Address at = access.begin;
    while (at < access.end) {
      auto it = touched.lower_bound(at);
      if (it == touched.end() || it->first > at) {
        Address end = it == touched.end() ? access.end : std::min(access.end, it->first);
        it = touched.emplace(at, Range{end, {}, {}}).first;
      }
      Range& range = it->second;
      if (access.writes) {
        if (access.whole) {
          range.written.clear();
          range.read.clear();
        }
        put(range.written, touch);
      } else {
        put(range.read, touch);
      }
      at = range.end;
    }
  }
  return "";
}

void check_and_note(StreamState* stream, const std::string& name, const std::vector<Access>& all) {
  World& w = world();
  if (!w.settings.finds_races) return;
  Touch who{stream->index, stream->launched + 1, true, name};
  std::string found = touch(w.touched, stream->clock, who, all, false);
  if (!found.empty()) {
    w.races.push_back(found);
    TORCH_CHECK(!w.settings.raises_races, "glass: ", found);
  }
  touch(w.touched, stream->clock, who, all, true);
}

void capture_launch(StreamState* stream, std::string name, Job job, std::vector<Access> accesses) {
  World& w = world();
  Capture* capture = capture_of(stream);
  TORCH_CHECK(capture, "glass: the capture of this stream is over");
  TORCH_CHECK(capture->broken.empty(), "glass: the capture is invalid: ", capture->broken);
  size_t index = size_t(stream->index);
  Clock& clock = capture->clocks[stream];
  if (capture->counts.size() <= index) capture->counts.resize(index + 1);
  if (clock.size() <= index) clock.resize(index + 1);
  uint64_t number = ++capture->counts[index];
  if (w.settings.finds_races) {
    Touch who{stream->index, number, true, name};
    std::string found = touch(capture->touched, clock, who, accesses, false);
    if (!found.empty()) {
      w.races.push_back(found);
      TORCH_CHECK(!w.settings.raises_races, "glass: in a capture: ", found);
    }
    touch(capture->touched, clock, who, accesses, true);
  }
  clock[index] = number;
  capture->graph->nodes.push_back({std::move(name), std::move(job), std::move(accesses)});
}

} // namespace

void join(Clock& into, const Clock& other) {
  if (into.size() < other.size()) into.resize(other.size());
  for (size_t i = 0; i < other.size(); ++i) into[i] = std::max(into[i], other[i]);
}

void fail(const std::string& message) {
  World& w = world();
  if (w.broken.empty()) w.broken = message;
  w.changed.notify_all();
}

void check_health_locked() {
  World& w = world();
  TORCH_CHECK(
      !was_forked, "glass: the device cannot be used in a forked process that inherits its use");
  TORCH_CHECK(w.broken.empty(), "glass: the device is lost since an earlier error: ", w.broken);
}

void wait_until(Lock& lock, const std::function<bool()>& is_so) {
  World& w = world();
  while (!is_so()) {
    check_health_locked();
    if (w.settings.is_late && drive(lock)) continue;
    if (is_so()) break;
    w.changed.wait(lock);
  }
}

int current_device() {
  return this_device;
}

void set_device(int device) {
  TORCH_CHECK(
      device >= 0 && device < device_count(), "glass: there is no device ", device);
  this_device = device;
}

namespace {
StreamState* new_stream(DeviceState& device, int priority) {
  World& w = world();
  auto state = std::make_unique<StreamState>();
  state->id = c10::StreamId(device.streams.size());
  state->device = device.index;
  state->index = int(w.streams.size());
  state->priority = priority;
  state->draw.seed(w.settings.seed * 1000003 + uint64_t(state->index));
  w.streams.push_back(state.get());
  device.streams.push_back(std::move(state));
  return device.streams.back().get();
}
} // namespace

// The ids of a device's streams: 0, then the pool of low, then that of high priority.
StreamState* default_stream(int device) {
  need_set_up();
  Lock lock(world().mutex);
  DeviceState& state = *world().devices.at(size_t(device));
  if (state.streams.empty()) {
    new_stream(state, 0);
    for (int i = 0; i < 2 * kPoolSize; ++i) new_stream(state, i < kPoolSize ? 0 : -1);
  }
  return state.streams[0].get();
}

StreamState* stream_from_pool(int device, bool is_high_priority) {
  default_stream(device);
  Lock lock(world().mutex);
  DeviceState& state = *world().devices.at(size_t(device));
  int drawn = state.drawn[is_high_priority]++ % kPoolSize;
  return state.streams[size_t(1 + drawn + (is_high_priority ? kPoolSize : 0))].get();
}

StreamState* state_of(c10::Stream stream) {
  default_stream(stream.device_index());
  Lock lock(world().mutex);
  return world().devices.at(size_t(stream.device_index()))->streams.at(size_t(stream.id())).get();
}

c10::Stream as_stream(const StreamState* stream) {
  return c10::Stream(
      c10::Stream::UNSAFE, c10::Device(kGlass, c10::DeviceIndex(stream->device)), stream->id);
}

StreamState* current(int device) {
  if (device < 0) device = this_device;
  StreamState*& found = currents[device];
  if (!found) found = default_stream(device);
  return found;
}

void set_current(StreamState* stream) {
  currents[stream->device] = stream;
}

void launch(StreamState* stream, std::string name, Job job, std::vector<Access> accesses) {
  World& w = world();
  Unlocked unlocked;
  Lock lock(w.mutex);
  check_health_locked();
  check_pages(accesses, name);
  check_health_locked();
  if (stream->capture) {
    capture_launch(stream, std::move(name), std::move(job), std::move(accesses));
    return;
  }
  join(stream->clock, w.host);
  check_and_note(stream, name, accesses);
  push(stream, {std::move(name), std::move(job), {}, {}});
  drive_some(lock);
}

void launch_and_wait(
    StreamState* stream, std::string name, Job job, std::vector<Access> accesses) {
  auto error = std::make_shared<std::exception_ptr>();
  {
    Lock lock(world().mutex);
    need_no_capture(name.c_str(), stream);
  }
  Job kept = [job = std::move(job), error] {
    try {
      job();
    } catch (...) {
      *error = std::current_exception();
    }
  };
  launch(stream, name, std::move(kept), std::move(accesses));
  synchronize(stream, name.c_str());
  if (*error) std::rethrow_exception(*error);
}

// ---- events ------------------------------------------------------------------------------------

EventState record(StreamState* stream, bool is_timed) {
  World& w = world();
  Lock lock(w.mutex);
  check_health_locked();
  EventState event;
  event.is_timed = is_timed;
  if (Capture* capture = capture_of(stream)) {
    event.capture = capture->id;
    event.clock = capture->clocks[stream];
    return event;
  }
  join(stream->clock, w.host);
  Item item;
  item.name = "record";
  if (is_timed) {
    event.reached_ms = std::make_shared<double>(0);
    item.job = [reached = event.reached_ms] { *reached = now_ms(); };
  }
  push(stream, std::move(item));
  event.at = {stream, stream->launched};
  event.clock = stream->clock;
  return event;
}

void wait_event(StreamState* stream, const EventState& event) {
  World& w = world();
  Lock lock(w.mutex);
  check_health_locked();
  Capture* capture = capture_of(stream);
  if (event.capture) {
    auto found = w.captures.find(event.capture);
    TORCH_CHECK(found != w.captures.end(), "glass: this event was recorded in a capture that is over");
    TORCH_CHECK(!capture || capture == found->second.get(), "glass: two captures cannot be merged");
    capture = found->second.get();
    stream->capture = capture->id;
    capture->streams.insert(stream);
    join(capture->clocks[stream], event.clock);
    return;
  }
  if (!event.at.stream) return; // never recorded
  if (capture) {
    break_capture(capture, "a captured stream waited for an event of work outside of the capture");
    TORCH_CHECK(false, "glass: ", capture->broken);
  }
  join(stream->clock, event.clock);
  if (event.at.stream != stream && event.at.stream->done < event.at.number)
    push(stream, {"wait", {}, event.at, {}});
}

bool is_over(const EventState& event) {
  return !event.at.stream || event.at.stream->done >= event.at.number;
}

bool is_written(Address begin, Address end) {
  World& w = world();
  Lock lock(w.mutex);
  auto it = w.touched.upper_bound(begin);
  if (it != w.touched.begin()) --it;
  for (; it != w.touched.end() && it->first < end; ++it) {
    if (it->second.end <= begin) continue;
    for (const Touch& touch : it->second.written)
      if (w.streams[size_t(touch.stream)]->done < touch.number) return false;
  }
  return true;
}

bool query(const EventState& event, bool is_ours) {
  World& w = world();
  Lock lock(w.mutex);
  if (!is_ours) {
    check_health_locked();
    TORCH_CHECK(!event.capture, "glass: an event of a capture cannot be asked");
    need_no_capture("an event's query");
    drive_some(lock);
  }
  if (!is_over(event)) return false;
  join(w.host, event.clock);
  return true;
}

void synchronize(const EventState& event) {
  World& w = world();
  Unlocked unlocked;
  Lock lock(w.mutex);
  check_health_locked();
  TORCH_CHECK(!event.capture, "glass: an event of a capture cannot be waited for");
  need_no_capture("an event's synchronize");
  wait_until(lock, [&] { return is_over(event); });
  join(w.host, event.clock);
  check_health_locked();
}

void synchronize(StreamState* stream, const char* what) {
  World& w = world();
  Unlocked unlocked;
  Lock lock(w.mutex);
  check_health_locked();
  need_no_capture(what, stream);
  uint64_t number = stream->launched;
  Clock clock = stream->clock;
  wait_until(lock, [&] { return stream->done >= number; });
  join(w.host, clock);
  check_health_locked();
}

bool query(StreamState* stream) {
  World& w = world();
  Lock lock(w.mutex);
  check_health_locked();
  need_no_capture("a stream's query", stream);
  drive_some(lock);
  if (stream->done < stream->launched) return false;
  join(w.host, stream->clock);
  return true;
}

void wait_for_all(Lock& lock, DeviceState& device) {
  std::vector<std::pair<StreamState*, uint64_t>> ends;
  Clock clock;
  for (auto& stream : device.streams) {
    ends.emplace_back(stream.get(), stream->launched);
    join(clock, stream->clock);
  }
  wait_until(lock, [&] {
    for (auto& [stream, number] : ends)
      if (stream->done < number) return false;
    return true;
  });
  join(world().host, clock);
}

void synchronize_device(int device) {
  World& w = world();
  Unlocked unlocked;
  default_stream(device);
  Lock lock(w.mutex);
  check_health_locked();
  need_no_capture("a device's synchronize");
  wait_for_all(lock, *w.devices.at(size_t(device)));
  check_health_locked();
}

std::shared_ptr<bool> hold(StreamState* stream) {
  Lock lock(world().mutex);
  auto gate = std::make_shared<bool>(false);
  push(stream, {"hold", {}, {}, gate});
  return gate;
}

void open(const std::shared_ptr<bool>& gate) {
  Lock lock(world().mutex);
  *gate = true;
  world().changed.notify_all();
}

void stop() {
  World& w = world();
  Unlocked unlocked;
  Lock lock(w.mutex);
  w.is_stopping = true;
  // a job that waits for another process may never end
  w.changed.wait_for(lock, std::chrono::seconds(2), [&] {
    for (StreamState* stream : w.streams)
      if (stream->is_running) return false;
    return true;
  });
}

std::vector<std::string> waiting() {
  Lock lock(world().mutex);
  std::vector<std::string> said;
  for (StreamState* stream : world().streams) {
    if (stream->done == stream->launched) continue;
    std::string text = "glass:" + std::to_string(stream->device) + " stream " +
        std::to_string(stream->id) + ": " + std::to_string(stream->launched - stream->done) +
        " items left";
    if (!stream->queue.empty() && !stream->is_running) {
      const Item& item = stream->queue.front();
      text += ", next '" + item.name + "'";
      if (item.waits)
        text += " for item " + std::to_string(item.waits->number) + " of stream " +
            std::to_string(item.waits->stream->id) + " (" +
            std::to_string(item.waits->stream->done) + " over)";
    }
    said.push_back(text);
  }
  return said;
}

// ---- graphs ------------------------------------------------------------------------------------

// Calls that CUDA calls unsafe: forbidden to the capturing thread, in the mode Global to all.
// A forbidden call breaks the capture as well.
void need_no_capture(const char* what, StreamState* stream) {
  World& w = world();
  for (auto& [id, capture] : w.captures) {
    bool is_own = stream && stream->capture == id;
    bool is_forbidden = is_own || capture->mode == CaptureMode::Global ||
        (capture->mode == CaptureMode::ThreadLocal &&
         capture->thread == std::this_thread::get_id());
    if (!is_forbidden) continue;
    break_capture(capture.get(), std::string(what) + " was called during the capture");
    TORCH_CHECK(
        false, "glass: ", what, " is not permitted while a stream is captured",
        is_own ? "" : " (its mode forbids it to this thread, too)");
  }
}

void begin_capture(StreamState* stream, Pool pool, CaptureMode mode) {
  World& w = world();
  Lock lock(w.mutex);
  check_health_locked();
  TORCH_CHECK(!stream->capture, "glass: this stream is captured already");
  TORCH_CHECK(stream->id != 0, "glass: the default stream cannot be captured");
  auto capture = std::make_shared<Capture>();
  capture->id = ++w.last_capture;
  capture->origin = stream;
  capture->streams.insert(stream);
  capture->mode = mode;
  capture->thread = std::this_thread::get_id();
  capture->graph = std::make_shared<Graph>();
  capture->graph->pool = pool;
  stream->capture = capture->id;
  w.captures[capture->id] = capture;
}

std::shared_ptr<Graph> end_capture(StreamState* stream) {
  World& w = world();
  Lock lock(w.mutex);
  Capture* capture = capture_of(stream);
  TORCH_CHECK(capture, "glass: this stream is not captured");
  TORCH_CHECK(capture->origin == stream, "glass: a capture ends on the stream where it began");
  auto kept = w.captures[capture->id];
  w.captures.erase(capture->id);
  for (StreamState* each : kept->streams) each->capture = 0;
  TORCH_CHECK(kept->broken.empty(), "glass: the capture is invalid: ", kept->broken);
  const Clock& known = kept->clocks[stream];
  for (StreamState* each : kept->streams) {
    size_t index = size_t(each->index);
    uint64_t made = index < kept->counts.size() ? kept->counts[index] : 0;
    TORCH_CHECK(
        made == 0 || (index < known.size() && known[index] >= made),
        "glass: stream ", each->id, " has captured work that the capture's stream did not wait for");
  }
  return kept->graph;
}

void replay(const std::shared_ptr<Graph>& graph, StreamState* stream) {
  std::vector<Access> accesses;
  for (const Node& node : graph->nodes)
    accesses.insert(accesses.end(), node.accesses.begin(), node.accesses.end());
  launch(
      stream, "graph",
      [graph] {
        for (const Node& node : graph->nodes) {
          try {
            node.job();
          } catch (const std::exception& e) {
            throw std::runtime_error("in a graph, " + node.name + ": " + e.what());
          }
        }
      },
      std::move(accesses));
}

} // namespace glass
