// Communicators: the backend `glass` of torch.distributed, with NCCL's rules.
//
// A collective is a launch of two jobs on one stream. The first copies the inputs and tells the
// other ranks that this rank's device has reached it; the second waits for the end, and copies the
// outputs. In between the communicator's own thread waits until all ranks have told so, and moves
// the bytes by gloo, between host buffers of its own. So an abort can end a collective at any time,
// and gloo never holds device memory.
//
// An asynchronous collective runs on the communicator's stream, which waits for the caller's
// current one; one without `async_op` runs on the current stream itself, as ProcessGroupNCCL's.
//
// `table()` guards all state here. Its mutex is never held while the world's is taken.
#include "glass.h"

#include <ATen/ops/add.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/minimum.h>
#include <ATen/ops/mul.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <pybind11/chrono.h>
#include <torch/extension.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>

namespace glass {

namespace {

using c10d::OpType;
using c10d::ReduceOp;
using c10d::Work;
using Tensors = std::vector<at::Tensor>;
using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using WorkPtr = c10::intrusive_ptr<Work>;
using Steady = std::chrono::steady_clock;
using Milliseconds = std::chrono::milliseconds;

constexpr Milliseconds kForever = std::chrono::hours(24 * 365);
constexpr Milliseconds kGlance(50); // how often a waiting thread looks at its time limits
constexpr int kTag = 1;

struct Span {
  Address begin;
  size_t size;
};

// Numbers by which ranks see whether they are in the same collective.
struct Announcement {
  int64_t kind = 0;    // OpType
  int64_t bytes = -1;  // that each rank gives, -1 if they may differ
  int64_t root = -1;
  int64_t detail = -1; // reductions: dtype and operation
};
constexpr int64_t kNumbers = 4;

// One operation. A launch has one, or those of a batch.
struct Part {
  std::string name;
  Announcement says;
  int peer = -1; // of a send or receive: its rank in the lane
  std::vector<Span> reads, writes;
  // Moves bytes from `in` to `out`, one buffer for each span, and returns what is still under way.
  std::function<std::vector<WorkPtr>(c10d::Backend& gloo, Tensors& in, Tensors& out)> exchange;
};

struct Launch;

// A launch that a device has reached. A captured launch has one for each replay.
struct Run {
  std::shared_ptr<Launch> launch;
  class Lane* lane = nullptr;
  uint64_t number = 0;
  std::vector<Tensors> in, out;
  Steady::time_point since = Steady::now();
  bool is_over = false;
  bool is_fatal = false;
  std::string failure;
};

struct Launch {
  std::string name;
  std::vector<Part> parts;
  Announcement says;
  std::vector<int> peers;
  std::deque<std::shared_ptr<Run>> runs; // reached, and their outputs not yet copied
  std::shared_ptr<bool> gate;            // with `is_late`: keeps the second job until the end
  bool is_over = false;                  // of the only run, without a capture
  std::string failure;
};

struct Table {
  std::mutex mutex;
  std::condition_variable changed;
  // by device, in the order in which they were reached; the first `bound` have a place
  std::map<int, std::vector<std::shared_ptr<Run>>> present;
  std::map<int, std::string> lost;
  size_t bound = 4;
  double watchdog_s = 0;
};

// It outlives every thread.
Table& table() {
  static Table* made = [] {
    auto* table = new Table();
    if (const char* text = std::getenv("GLASS_COLLECTIVES"))
      table->bound = size_t(std::max(1, std::atoi(text)));
    if (const char* text = std::getenv("GLASS_WATCHDOG_S")) table->watchdog_s = std::atof(text);
    return table;
  }();
  return *made;
}
using Held = std::unique_lock<std::mutex>;

struct Fatal : std::runtime_error {
  using std::runtime_error::runtime_error;
};

bool is_captured(StreamState* stream) {
  Lock lock(world().mutex);
  return stream->capture != 0;
}

bool matches(const Announcement& ours, const Announcement& theirs) {
  auto is = [](const Announcement& one, OpType kind) { return one.kind == int64_t(kind); };
  bool is_pair = (is(ours, OpType::SEND) && is(theirs, OpType::RECV)) ||
      (is(ours, OpType::RECV) && is(theirs, OpType::SEND));
  return (is_pair || ours.kind == theirs.kind) && ours.bytes == theirs.bytes &&
      ours.root == theirs.root && ours.detail == theirs.detail;
}

std::string text_of(const Announcement& said) {
  std::string text = c10d::opTypeToString(OpType(uint8_t(said.kind)));
  if (said.bytes >= 0) text += " of " + std::to_string(said.bytes) + " bytes";
  if (said.root >= 0) text += ", root " + std::to_string(said.root);
  return text;
}

// ---- one set of ranks --------------------------------------------------------------------------

// A communicator of NCCL's: ranks, their order of collectives, and a stream. A group has one for
// all its ranks, and one for each pair of ranks that send to each other.
class Lane : public std::enable_shared_from_this<Lane> {
 public:
  Lane(std::string group, int device, int rank, std::vector<int> ranks, Milliseconds timeout,
       bool is_contained)
      : group_(std::move(group)),
        device_(device),
        rank_(rank),
        ranks_(std::move(ranks)),
        timeout_(timeout),
        is_contained_(is_contained),
        stream(stream_from_pool(device, false)),
        heard_(ranks_.size()) {}

  // Begins to serve. `control` carries announcements, `data` bytes.
  void start(BackendPtr control, BackendPtr data) {
    control_ = std::move(control);
    data_ = std::move(data);
    std::thread([self = shared_from_this()] { self->listen(); }).detach();
    std::thread([self = shared_from_this()] { self->serve(); }).detach();
  }

  int size() const {
    return int(ranks_.size());
  }

  // Puts a launch at the end of a stream, or into its capture.
  EventState put(
      StreamState* on, const std::shared_ptr<Launch>& launched, std::vector<Access> accesses) {
    bool captured = is_captured(on);
    TORCH_CHECK(
        !captured || !world().settings.is_late || world().settings.devices == 1 || size() == 1,
        "glass: with GLASS_LATE one thread does the work of all devices of a process, so a graph "
        "cannot wait there for another device");
    if (!captured && last_.at.stream && last_.at.stream != on) {
      // NCCL keeps the order of a communicator's launches, but promises it to nobody
      EventState order = last_;
      order.clock.clear();
      wait_event(on, order);
    }
    auto self = shared_from_this();
    launch(on, launched->name, [self, launched] { self->begin(launched); }, accesses);
    if (world().settings.is_late && !captured) {
      auto gate = hold(on);
      bool is_over;
      {
        Held held(table().mutex);
        launched->gate = gate;
        is_over = launched->is_over;
      }
      if (is_over) open(gate);
    }
    launch(on, launched->name, [self, launched] { self->finish(launched); }, std::move(accesses));
    EventState end = record(on, false);
    if (!captured) last_ = end;
    return end;
  }

  // Keeps tensors until their launch is over, or until `kept` is emptied.
  void keep(const EventState& end, std::shared_ptr<Tensors> kept) {
    if (end.capture) return;
    std::vector<std::pair<EventState, std::shared_ptr<Tensors>>> left, over;
    for (auto& each : shelf_) (query(each.first, true) ? over : left).push_back(std::move(each));
    left.emplace_back(end, std::move(kept));
    shelf_ = std::move(left);
  }

  // Ends what runs and what comes, with this reason.
  void abort(const std::string& reason) {
    std::vector<std::shared_ptr<bool>> gates;
    {
      Held held(table().mutex);
      if (aborted_.empty()) aborted_ = reason;
      for (auto& run : runs_)
        if (auto gate = end(*run, reason, false)) gates.push_back(gate);
    }
    for (auto& gate : gates) open(gate);
    close();
  }

  void close() {
    WorkPtr listening;
    {
      Held held(table().mutex);
      if (aborted_.empty()) aborted_ = "the communicator was destroyed";
      is_closing_ = true;
      listening = std::move(listening_);
      table().changed.notify_all();
    }
    if (listening) listening->abort();
    Lock lock(world().mutex);
    world().changed.notify_all();
  }

  // Waits on the host for the last launch.
  void drain() {
    if (last_.at.stream) synchronize(last_);
  }

  void check() {
    Held held(table().mutex);
    TORCH_CHECK(aborted_.empty(), "glass: communicator ", name(), ": ", aborted_);
  }

  void set_timeout(Milliseconds timeout) {
    Held held(table().mutex);
    timeout_ = timeout;
  }

  // With the mutex.
  std::string describe(const Run& run) {
    Table& t = table();
    std::string text = run.launch->name + " " + std::to_string(run.number) + " of communicator " +
        name() + ", rank " + std::to_string(ranks_[size_t(rank_)]);
    if (!has_place(run))
      return text + ", waits for a place on glass:" + std::to_string(device_) + ", which has " +
          std::to_string(t.bound) + " (GLASS_COLLECTIVES)";
    std::string missing;
    for (int peer : run.launch->peers)
      if (heard_[size_t(peer)].empty())
        missing += (missing.empty() ? "" : ", ") + std::to_string(ranks_[size_t(peer)]);
    if (missing.empty()) return text + ", moves its bytes";
    text += ", waits for rank " + missing;
    return lost_.empty() ? text : text + " (a connection was lost: " + lost_ + ")";
  }

 private:
  std::string name() const {
    return "'" + group_ + "'";
  }

  bool has_place(const Run& run) {
    auto& present = table().present[device_];
    for (size_t i = 0; i < std::min(present.size(), table().bound); ++i)
      if (present[i].get() == &run) return true;
    return false;
  }

  // The first job. The stream's thread.
  void begin(const std::shared_ptr<Launch>& launched) {
    auto run = std::make_shared<Run>();
    run->launch = launched;
    run->lane = this;
    for (const Part& part : launched->parts) {
      Tensors in, out;
      for (const Span& span : part.reads) {
        in.push_back(at::empty({int64_t(span.size)}, at::kByte));
        std::memcpy(
            in.back().data_ptr(), inside(span.begin, span.size, "a collective's input"), span.size);
      }
      for (const Span& span : part.writes)
        out.push_back(at::empty({int64_t(span.size)}, at::kByte));
      run->in.push_back(std::move(in));
      run->out.push_back(std::move(out));
    }
    if (size() == 1) {
      for (size_t i = 0; i < run->out.size(); ++i)
        for (size_t j = 0; j < run->out[i].size(); ++j)
          std::memcpy(run->out[i][j].data_ptr(), run->in[i][j].data_ptr(), run->in[i][j].nbytes());
    }
    std::shared_ptr<bool> gate;
    {
      Held held(table().mutex);
      run->number = ++reached_;
      launched->runs.push_back(run);
      if (size() == 1) {
        gate = end(*run, "", false);
      } else if (!aborted_.empty()) {
        gate = end(*run, aborted_, false); // the serving thread may have ended
      } else {
        runs_.push_back(run);
        table().present[device_].push_back(run);
      }
      table().changed.notify_all();
    }
    if (gate) open(gate);
  }

  // The second job. The stream's thread.
  void finish(const std::shared_ptr<Launch>& launched) {
    std::shared_ptr<Run> run;
    {
      Held held(table().mutex);
      run = launched->runs.front();
      table().changed.wait(held, [&] { return run->is_over; });
      launched->runs.pop_front();
    }
    if (run->is_fatal) throw std::runtime_error(run->failure);
    if (!run->failure.empty()) return; // an aborted kernel leaves anything behind
    for (size_t i = 0; i < launched->parts.size(); ++i) {
      const auto& writes = launched->parts[i].writes;
      for (size_t j = 0; j < writes.size(); ++j)
        std::memcpy(
            inside(writes[j].begin, writes[j].size, "a collective's output"),
            run->out[i][j].data_ptr(), writes[j].size);
    }
  }

  // Hears the other ranks' announcements. A thread of its own.
  void listen() {
    try {
      for (;;) {
        Tensors numbers{at::empty({kNumbers}, at::kLong)};
        WorkPtr work;
        {
          Held held(table().mutex);
          if (is_closing_) return;
          work = listening_ = control_->recvAnysource(numbers, kTag);
        }
        if (!work->wait(kForever)) return;
        auto* said = numbers[0].data_ptr<int64_t>();
        Held held(table().mutex);
        heard_[size_t(work->sourceRank())].push_back({said[0], said[1], said[2], said[3]});
        table().changed.notify_all();
      }
    } catch (const std::exception& e) {
      note_lost(e);
    }
  }

  // As on a card, a collective without its peer waits until somebody's patience ends.
  void note_lost(const std::exception& error) {
    std::string first = error.what();
    Held held(table().mutex);
    lost_ = first.substr(0, first.find('\n'));
  }

  // Does what was reached, one after the other. A thread of its own.
  void serve() {
    const bool is_late = world().settings.is_late;
    Held held(table().mutex);
    for (;;) {
      table().changed.wait(held, [&] {
        return is_closing_ || !runs_.empty() || (is_late && can_drive_ && is_awaited());
      });
      if (runs_.empty()) {
        if (is_closing_) return;
        uint64_t seen = reached_;
        held.unlock();
        drive(seen);
        held.lock();
        continue;
      }
      auto run = runs_.front();
      std::string failure;
      bool is_fatal = false;
      try {
        attend(held, *run);
      } catch (const std::exception& e) {
        if (!held.owns_lock()) held.lock();
        failure = e.what();
        failure = failure.substr(0, failure.find("\nException raised from"));
        is_fatal = dynamic_cast<const Fatal*>(&e) || (aborted_.empty() && !is_contained_);
        if (aborted_.empty()) aborted_ = failure;
      }
      auto gate = end(*run, failure, is_fatal);
      runs_.pop_front();
      held.unlock();
      if (is_fatal) {
        Lock lock(world().mutex);
        fail(failure);
      }
      if (gate) open(gate);
      run = nullptr; // what its buffers hold is freed without the mutex
      held.lock();
    }
  }

  // Ends a run, unless an abort has; with the mutex. Returns the gate to be opened without it.
  std::shared_ptr<bool> end(Run& run, const std::string& failure, bool is_fatal) {
    if (is_fatal) table().lost.emplace(device_, failure);
    if (run.is_over) return nullptr;
    run.is_over = run.launch->is_over = true;
    run.is_fatal = is_fatal;
    run.failure = failure;
    if (run.launch->failure.empty()) run.launch->failure = failure;
    auto& present = table().present[device_];
    present.erase(
        std::remove_if(
            present.begin(), present.end(), [&](auto& each) { return each.get() == &run; }),
        present.end());
    table().changed.notify_all();
    return run.launch->gate;
  }

  // With `is_late` nobody works unless a host waits, but another rank waits for this device.
  void drive(uint64_t seen) {
    try {
      Lock lock(world().mutex);
      wait_until(lock, [&] { return reached_ != seen || is_closing_; });
    } catch (const std::exception&) {
      can_drive_ = false; // the device is lost, and says so to its users
    }
  }

  bool is_awaited() {
    return std::any_of(heard_.begin(), heard_.end(), [](auto& said) { return !said.empty(); });
  }

  void attend(Held& held, Run& run) {
    await(held, run, [&] { return has_place(run); });
    const auto& peers = run.launch->peers;
    held.unlock();
    std::vector<WorkPtr> sent;
    const Announcement& says = run.launch->says;
    for (int peer : peers) {
      Tensors numbers{at::empty({kNumbers}, at::kLong)};
      int64_t* said = numbers[0].data_ptr<int64_t>();
      said[0] = says.kind, said[1] = says.bytes, said[2] = says.root, said[3] = says.detail;
      try {
        sent.push_back(control_->send(numbers, peer, kTag));
      } catch (const std::exception& e) {
        note_lost(e); // a rank that has ended is waited for
      }
    }
    held.lock();
    await(held, run, [&] {
      return std::none_of(
          peers.begin(), peers.end(), [&](int peer) { return heard_[size_t(peer)].empty(); });
    });
    // they have arrived before an error here can end this process
    held.unlock();
    for (auto& work : sent) work->wait(kForever);
    held.lock();
    for (int peer : peers) {
      Announcement theirs = heard_[size_t(peer)].front();
      if (!matches(says, theirs))
        throw Fatal(
            describe(run) + ": rank " + std::to_string(ranks_[size_t(peer)]) +
            " is in another collective: " + text_of(theirs) + ", and here it is " + text_of(says));
      heard_[size_t(peer)].pop_front();
    }
    held.unlock();
    std::vector<WorkPtr> rest;
    for (size_t i = 0; i < run.launch->parts.size(); ++i) {
      const Part& part = run.launch->parts[i];
      if (part.exchange)
        for (auto& work : part.exchange(*data_, run.in[i], run.out[i])) rest.push_back(work);
    }
    for (auto& work : rest) work->wait();
    held.lock();
  }

  void await(Held& held, const Run& run, const std::function<bool()>& is_so) {
    Table& t = table();
    for (;;) {
      if (!aborted_.empty()) throw std::runtime_error(aborted_);
      if (t.lost.count(device_)) throw Fatal(t.lost[device_]);
      if (is_so()) return;
      double waited = std::chrono::duration<double>(Steady::now() - run.since).count();
      if (t.watchdog_s > 0 && waited > t.watchdog_s) {
        std::string report = "watchdog: after " + std::to_string(int(waited)) + " s";
        for (auto& each : t.present[device_]) report += "; " + each->lane->describe(*each);
        throw Fatal(report);
      }
      if (waited > std::chrono::duration<double>(timeout_).count())
        throw std::runtime_error("timeout: " + describe(run));
      t.changed.wait_for(held, kGlance);
    }
  }

  const std::string group_;
  const int device_;
  const int rank_;
  const std::vector<int> ranks_; // of the group, for messages
  Milliseconds timeout_;
  const bool is_contained_;
  BackendPtr control_, data_;

 public:
  StreamState* const stream;

 private:
  // of the callers' threads, which launch one at a time
  EventState last_;
  std::vector<std::pair<EventState, std::shared_ptr<Tensors>>> shelf_;

  // guarded by the table's mutex
  std::vector<std::deque<Announcement>> heard_;
  std::deque<std::shared_ptr<Run>> runs_;
  std::string aborted_, lost_;
  WorkPtr listening_;
  std::atomic<bool> is_closing_{false}; // `drive` reads these two without it
  std::atomic<uint64_t> reached_{0};
  bool can_drive_ = true;
};

// ---- what a caller gets ------------------------------------------------------------------------

class Launched : public Work {
 public:
  Launched(
      int rank, OpType kind, std::shared_ptr<Lane> lane, std::shared_ptr<Launch> launched,
      EventState end, int device, Tensors outputs, std::shared_ptr<Tensors> kept, uint64_t number)
      : Work(rank, kind),
        lane_(std::move(lane)),
        launch_(std::move(launched)),
        end_(std::move(end)),
        device_(device),
        outputs_(std::move(outputs)),
        kept_(std::move(kept)),
        number_(number) {}

  bool isCompleted() override {
    return !failure().empty() || query(end_);
  }
  bool isSuccess() const override {
    return failure().empty();
  }
  std::exception_ptr exception() const override {
    std::string said = failure();
    return said.empty() ? nullptr : std::make_exception_ptr(std::runtime_error("glass: " + said));
  }
  void synchronize() override {
    wait_event(current(device_), end_);
    kept_->clear();
  }
  // The current stream waits; the host does with a time limit, and for a barrier.
  bool wait(Milliseconds timeout) override {
    synchronize();
    if (opType_ == OpType::BARRIER && timeout == kNoTimeout) {
      glass::synchronize(end_);
    } else if (timeout != kNoTimeout) {
      auto until = Steady::now() + timeout;
      while (!isCompleted()) {
        TORCH_CHECK(
            Steady::now() < until, "glass: ", launch_->name, " did not end within ",
            timeout.count(), " ms");
        std::this_thread::sleep_for(Milliseconds(1));
      }
    }
    return true;
  }
  void blockCurrentStream() override {
    synchronize();
  }
  std::vector<at::Tensor> result() override {
    return outputs_;
  }
  uint64_t getSequencenumber() const override {
    return number_;
  }

 private:
  std::string failure() const {
    Held held(table().mutex);
    return launch_->failure;
  }

  std::shared_ptr<Lane> lane_;
  std::shared_ptr<Launch> launch_;
  EventState end_;
  int device_;
  Tensors outputs_;
  std::shared_ptr<Tensors> kept_;
  uint64_t number_;
};

// ---- bytes -------------------------------------------------------------------------------------

at::Tensor as(const at::Tensor& bytes, at::ScalarType dtype) {
  return bytes.view(dtype);
}

// Reduces chunks of the same size, in the order of their ranks. Small floats are added as float32
// and rounded after each rank, as NCCL's rings do.
at::Tensor reduce_chunks(const at::Tensor& all, int64_t count, at::ScalarType dtype, ReduceOp op) {
  c10::ParallelGuard alone(true);
  auto kind = ReduceOp::RedOpType(op);
  bool is_small = at::isFloatingType(dtype) && c10::elementSize(dtype) < 4;
  auto compute = is_small ? at::kFloat : dtype;
  auto chunks = all.chunk(count);
  at::Tensor sum = as(chunks[0], dtype).clone();
  for (size_t i = 1; i < chunks.size(); ++i) {
    at::Tensor one = sum.to(compute), other = as(chunks[i], dtype).to(compute);
    bool is_or = dtype == at::kBool && (kind == ReduceOp::SUM || kind == ReduceOp::MAX);
    at::Tensor both = kind == ReduceOp::PRODUCT ? at::mul(one, other)
        : kind == ReduceOp::MIN                 ? at::minimum(one, other)
        : kind == ReduceOp::MAX || is_or        ? at::maximum(one, other)
                                                : at::add(one, other);
    sum = both.to(dtype);
  }
  if (kind == ReduceOp::AVG) {
    sum = at::isIntegralType(dtype, true) ? sum.div(count, "trunc").to(dtype)
                                          : sum.to(compute).div(count).to(dtype);
  }
  return sum.view(at::kByte);
}

at::Tensor all_gather(c10d::Backend& gloo, at::Tensor in) {
  at::Tensor all = at::empty({in.numel() * gloo.getSize()}, at::kByte);
  gloo.all_gather_single(all, in)->wait();
  return all;
}

void put(at::Tensor& into, const at::Tensor& bytes) {
  std::memcpy(into.data_ptr(), bytes.contiguous().data_ptr(), into.nbytes());
}

// Spreads bytes over buffers, one after the other.
void put_all(Tensors& into, const at::Tensor& bytes) {
  int64_t at = 0;
  for (at::Tensor& each : into) {
    put(each, bytes.narrow(0, at, each.numel()));
    at += each.numel();
  }
}

at::Tensor cat(const Tensors& parts) {
  return parts.size() == 1 ? parts[0] : at::cat(parts);
}

at::Tensor all_to_all(
    c10d::Backend& gloo, at::Tensor in, std::vector<int64_t> out_counts,
    std::vector<int64_t> in_counts) {
  int64_t size = in.numel();
  if (!out_counts.empty()) size = std::accumulate(out_counts.begin(), out_counts.end(), int64_t(0));
  at::Tensor out = at::empty({size}, at::kByte);
  gloo.all_to_all_single(out, in, out_counts, in_counts)->wait();
  return out;
}

// ---- the backend -------------------------------------------------------------------------------

class Communicator : public c10d::Backend {
 public:
  // `connect(name, rank, size)` returns two gloo backends between these ranks. If not
  // `is_contained`, a failed collective ends the device, where ProcessGroupNCCL ends the process.
  Communicator(int rank, int size, Milliseconds timeout, bool is_contained, py::object connect)
      : Backend(rank, size),
        timeout_(timeout),
        is_contained_(is_contained),
        connect_(new py::object(std::move(connect))) {}

  ~Communicator() override {
    for (auto& lane : lanes()) lane->close();
    if (!Py_IsInitialized()) return;
    py::gil_scoped_acquire gil;
    delete connect_;
  }

  const std::string getBackendName() const override {
    return "glass";
  }
  c10::intrusive_ptr<Options> getBackendOptions() override {
    return c10::make_intrusive<Options>("glass", timeout_);
  }
  bool supportsCoalescing() const override {
    return true;
  }
  void setTimeout(Milliseconds timeout) override {
    timeout_ = timeout;
    for (auto& lane : lanes()) lane->set_timeout(timeout);
  }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override {
    return launched_;
  }

  void abort() override {
    {
      Held held(mutex_);
      aborted_ = "the communicator was aborted";
    }
    for (auto& lane : lanes()) lane->abort("the communicator was aborted");
  }

  void shutdown() override {
    for (auto& lane : lanes()) {
      try {
        lane->drain();
      } catch (const c10::Error& e) {
        TORCH_WARN("glass: a communicator was destroyed with work that failed: ", e.what());
      }
      lane->close();
    }
  }

  void startCoalescing() override {
    batch_.emplace();
  }

  WorkPtr endCoalescing() override {
    Batch batch = std::move(*batch_);
    batch_.reset();
    if (batch.parts.empty()) return nullptr;
    std::vector<int> peers;
    for (const Part& part : batch.parts) {
      if (part.peer < 0) {
        peers = all_peers();
        break;
      }
      if (std::find(peers.begin(), peers.end(), part.peer) == peers.end())
        peers.push_back(part.peer);
    }
    Announcement says;
    says.kind = int64_t(OpType::COALESCED);
    std::string name = "batch of " + batch.parts[0].name;
    return start(
        lane(batch.device), OpType::COALESCED, name, std::move(batch.parts), says, peers,
        std::move(batch.tensors), {}, batch.is_async, batch.device);
  }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    at::Tensor tensor = only(tensors);
    bool is_root = opts.rootRank == getRank();
    int64_t root = opts.rootRank;
    Part part = made("broadcast", OpType::BROADCAST, tensor.nbytes(), root);
    (is_root ? part.reads : part.writes).push_back(span(tensor));
    part.exchange = [root, is_root](c10d::Backend& gloo, Tensors& in, Tensors& out) {
      c10d::BroadcastOptions own;
      own.rootRank = root;
      gloo.broadcast(is_root ? in : out, own)->wait();
      return std::vector<WorkPtr>();
    };
    return enqueue(OpType::BROADCAST, std::move(part), tensors, tensors, opts.asyncOp);
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    at::Tensor tensor = only(tensors);
    return enqueue(
        OpType::ALLREDUCE,
        reduction("all_reduce", OpType::ALLREDUCE, tensor, tensor, opts.reduceOp, -1), tensors,
        tensors, opts.asyncOp);
  }

  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
    at::Tensor tensor = only(tensors);
    return enqueue(
        OpType::REDUCE,
        reduction("reduce", OpType::REDUCE, tensor, tensor, opts.reduceOp, int(opts.rootRank)),
        tensors, tensors, opts.asyncOp);
  }

  WorkPtr allgather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    at::Tensor input = only(inputs);
    TORCH_CHECK(
        outputs.size() == 1 && int(outputs[0].size()) == getSize(),
        "glass: all_gather needs one output for each rank");
    Part part = made("all_gather", OpType::ALLGATHER, input.nbytes());
    part.reads = {span(input)};
    for (const at::Tensor& output : outputs[0]) {
      need_size(output, input.nbytes());
      part.writes.push_back(span(output));
    }
    part.exchange = [](c10d::Backend& gloo, Tensors& in, Tensors& out) {
      put_all(out, all_gather(gloo, in[0]));
      return std::vector<WorkPtr>();
    };
    return enqueue(
        OpType::ALLGATHER, std::move(part), with(outputs[0], inputs), outputs[0], opts.asyncOp);
  }

  WorkPtr all_gather_single(
      at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) override {
    need_size(output, input.nbytes() * size_t(getSize()));
    Part part = made("all_gather_into_tensor", OpType::_ALLGATHER_BASE, input.nbytes());
    part.reads = {span(input)};
    part.writes = {span(output)};
    part.exchange = [](c10d::Backend& gloo, Tensors& in, Tensors& out) {
      put(out[0], all_gather(gloo, in[0]));
      return std::vector<WorkPtr>();
    };
    return enqueue(
        OpType::_ALLGATHER_BASE, std::move(part), {output, input}, {output}, opts.asyncOp);
  }

  WorkPtr reduce_scatter(
      Tensors& outputs, std::vector<Tensors>& inputs,
      const c10d::ReduceScatterOptions& opts) override {
    at::Tensor output = only(outputs);
    TORCH_CHECK(
        inputs.size() == 1 && int(inputs[0].size()) == getSize(),
        "glass: reduce_scatter needs one input for each rank");
    Part part = scattering("reduce_scatter", OpType::REDUCE_SCATTER, output, opts.reduceOp);
    for (const at::Tensor& input : inputs[0]) {
      need_size(input, output.nbytes());
      part.reads.push_back(span(input));
    }
    return enqueue(
        OpType::REDUCE_SCATTER, std::move(part), with(inputs[0], outputs), outputs, opts.asyncOp);
  }

  WorkPtr reduce_scatter_single(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) override {
    need_size(input, output.nbytes() * size_t(getSize()));
    Part part =
        scattering("reduce_scatter_tensor", OpType::_REDUCE_SCATTER_BASE, output, opts.reduceOp);
    part.reads = {span(input)};
    return enqueue(
        OpType::_REDUCE_SCATTER_BASE, std::move(part), {output, input}, {output}, opts.asyncOp);
  }

  WorkPtr gather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override {
    at::Tensor input = only(inputs);
    int64_t root = opts.rootRank;
    bool is_root = root == getRank();
    Part part = made("gather", OpType::GATHER, input.nbytes(), root);
    part.reads = {span(input)};
    Tensors own;
    if (is_root) {
      TORCH_CHECK(
          outputs.size() == 1 && int(outputs[0].size()) == getSize(),
          "glass: gather needs one output for each rank");
      own = outputs[0];
    }
    for (const at::Tensor& output : own) {
      need_size(output, input.nbytes());
      part.writes.push_back(span(output));
    }
    part.exchange = [root, is_root](c10d::Backend& gloo, Tensors& in, Tensors& out) {
      std::vector<Tensors> lists;
      if (is_root) lists.push_back(out);
      c10d::GatherOptions options;
      options.rootRank = root;
      gloo.gather(lists, in, options)->wait();
      return std::vector<WorkPtr>();
    };
    return enqueue(OpType::GATHER, std::move(part), with(own, inputs), own, opts.asyncOp);
  }

  WorkPtr scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& opts) override {
    at::Tensor output = only(outputs);
    int64_t root = opts.rootRank;
    bool is_root = root == getRank();
    Part part = made("scatter", OpType::SCATTER, output.nbytes(), root);
    part.writes = {span(output)};
    Tensors own;
    if (is_root) {
      TORCH_CHECK(
          inputs.size() == 1 && int(inputs[0].size()) == getSize(),
          "glass: scatter needs one input for each rank");
      own = inputs[0];
    }
    for (const at::Tensor& input : own) {
      need_size(input, output.nbytes());
      part.reads.push_back(span(input));
    }
    part.exchange = [root, is_root](c10d::Backend& gloo, Tensors& in, Tensors& out) {
      std::vector<Tensors> lists;
      if (is_root) lists.push_back(in);
      c10d::ScatterOptions options;
      options.rootRank = root;
      gloo.scatter(out, lists, options)->wait();
      return std::vector<WorkPtr>();
    };
    return enqueue(OpType::SCATTER, std::move(part), with(own, outputs), outputs, opts.asyncOp);
  }

  WorkPtr all_to_all_single(
      at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_counts,
      std::vector<int64_t>& input_counts, const c10d::AllToAllOptions& opts) override {
    c10d::checkSplitSizes(input_counts, input, getSize());
    c10d::checkSplitSizes(output_counts, output, getSize());
    auto bytes = [](std::vector<int64_t> counts, const at::Tensor& tensor) {
      int64_t rows = tensor.dim() ? tensor.size(0) : 0;
      for (int64_t& count : counts) count *= rows ? int64_t(tensor.nbytes()) / rows : 0;
      return counts;
    };
    auto out_bytes = bytes(output_counts, output), in_bytes = bytes(input_counts, input);
    bool is_even = out_bytes.empty() && in_bytes.empty();
    if (is_even) need_size(output, input.nbytes());
    if (!is_even && out_bytes.empty())
      out_bytes.assign(size_t(getSize()), int64_t(output.nbytes()) / getSize());
    if (!is_even && in_bytes.empty())
      in_bytes.assign(size_t(getSize()), int64_t(input.nbytes()) / getSize());
    Part part = made("all_to_all_single", OpType::ALLTOALL_BASE);
    if (is_even) part.says.bytes = int64_t(input.nbytes());
    part.reads = {span(input)};
    part.writes = {span(output)};
    part.exchange = [out_bytes, in_bytes](c10d::Backend& gloo, Tensors& in, Tensors& out) {
      put(out[0], all_to_all(gloo, in[0], out_bytes, in_bytes));
      return std::vector<WorkPtr>();
    };
    return enqueue(
        OpType::ALLTOALL_BASE, std::move(part), {output, input}, {output}, opts.asyncOp);
  }

  WorkPtr alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override {
    TORCH_CHECK(
        int(outputs.size()) == getSize() && int(inputs.size()) == getSize(),
        "glass: all_to_all needs one tensor for each rank");
    Part part = made("all_to_all", OpType::ALLTOALL);
    std::vector<int64_t> out_bytes, in_bytes;
    for (const at::Tensor& output : outputs) {
      part.writes.push_back(span(output));
      out_bytes.push_back(int64_t(output.nbytes()));
    }
    for (const at::Tensor& input : inputs) {
      part.reads.push_back(span(input));
      in_bytes.push_back(int64_t(input.nbytes()));
    }
    part.exchange = [out_bytes, in_bytes](c10d::Backend& gloo, Tensors& in, Tensors& out) {
      put_all(out, all_to_all(gloo, cat(in), out_bytes, in_bytes));
      return std::vector<WorkPtr>();
    };
    return enqueue(
        OpType::ALLTOALL, std::move(part), with(outputs, inputs), outputs, opts.asyncOp);
  }

  WorkPtr send(Tensors& tensors, int peer, int) override {
    return between(OpType::SEND, tensors, peer);
  }
  WorkPtr recv(Tensors& tensors, int peer, int) override {
    return between(OpType::RECV, tensors, peer);
  }

  // An all-reduce of nothing, for which the host waits.
  WorkPtr barrier(const c10d::BarrierOptions& opts) override {
    int device = opts.device && opts.device->has_index() ? opts.device->index() : current_device();
    Part part = made("barrier", OpType::BARRIER, 0);
    Announcement says = part.says;
    std::vector<Part> parts;
    parts.push_back(std::move(part));
    auto work = start(
        lane(device), OpType::BARRIER, "barrier", std::move(parts), says, all_peers(), {}, {},
        opts.asyncOp, device);
    if (!opts.asyncOp) glass::synchronize(current(device), "a barrier");
    return work;
  }

 private:
  struct Batch {
    std::vector<Part> parts;
    Tensors tensors;
    int device = 0;
    bool is_async = false;
  };

  static Part made(const char* name, OpType kind, size_t bytes, int64_t root = -1) {
    Part part = made(name, kind);
    part.says.bytes = int64_t(bytes);
    part.says.root = root;
    return part;
  }
  static Part made(const char* name, OpType kind) {
    Part part;
    part.name = name;
    part.says.kind = int64_t(kind);
    return part;
  }

  static at::Tensor only(const Tensors& tensors) {
    TORCH_CHECK(tensors.size() == 1, "glass: a collective takes one tensor");
    return tensors[0];
  }

  static void need_size(const at::Tensor& tensor, size_t bytes) {
    TORCH_CHECK(
        tensor.nbytes() == bytes, "glass: a collective's tensor has ", tensor.nbytes(),
        " bytes, and not ", bytes);
  }

  // Refuses what NCCL refuses.
  static Span span(const at::Tensor& tensor) {
    TORCH_CHECK(tensor.device().type() == kGlass, "glass: tensors must be glass and dense");
    TORCH_CHECK(tensor.is_contiguous(), "glass: a collective's tensors must be contiguous");
    switch (tensor.scalar_type()) {
      case at::kByte: case at::kChar: case at::kBool: case at::kInt: case at::kLong:
      case at::kHalf: case at::kBFloat16: case at::kFloat: case at::kDouble:
      case at::kFloat8_e4m3fn: case at::kFloat8_e5m2:
      case at::kFloat8_e4m3fnuz: case at::kFloat8_e5m2fnuz:
        break;
      default:
        TORCH_CHECK(false, "glass: NCCL has no data type for ", tensor.scalar_type());
    }
    return {reinterpret_cast<Address>(tensor.data_ptr()), tensor.nbytes()};
  }

  static Tensors with(Tensors one, const Tensors& other) {
    one.insert(one.end(), other.begin(), other.end());
    return one;
  }

  std::vector<int> all_peers() const {
    std::vector<int> peers;
    for (int i = 0; i < getSize(); ++i)
      if (i != getRank()) peers.push_back(i);
    return peers;
  }

  static int64_t detail_of(at::ScalarType dtype, const ReduceOp& op) {
    auto kind = ReduceOp::RedOpType(op);
    TORCH_CHECK(
        kind == ReduceOp::SUM || kind == ReduceOp::AVG || kind == ReduceOp::PRODUCT ||
            kind == ReduceOp::MIN || kind == ReduceOp::MAX,
        "glass: NCCL has no such reduction");
    TORCH_CHECK(
        dtype != at::kBool || kind != ReduceOp::AVG, "glass: NCCL has no average of booleans");
    return int64_t(dtype) * 16 + int64_t(kind);
  }

  Part reduction(
      const char* name, OpType kind, const at::Tensor& input, const at::Tensor& output,
      const ReduceOp& op, int root) {
    Part part = made(name, kind, input.nbytes(), root);
    auto dtype = input.scalar_type();
    part.says.detail = detail_of(dtype, op);
    part.reads = {span(input)};
    bool writes = root < 0 || root == getRank();
    if (writes) part.writes = {span(output)};
    part.exchange = [dtype, op, writes](c10d::Backend& gloo, Tensors& in, Tensors& out) {
      at::Tensor all = all_gather(gloo, in[0]);
      if (writes && all.numel()) put(out[0], reduce_chunks(all, gloo.getSize(), dtype, op));
      return std::vector<WorkPtr>();
    };
    return part;
  }

  Part scattering(const char* name, OpType kind, const at::Tensor& output, const ReduceOp& op) {
    Part part = made(name, kind, output.nbytes());
    auto dtype = output.scalar_type();
    part.says.detail = detail_of(dtype, op);
    part.writes = {span(output)};
    part.exchange = [dtype, op](c10d::Backend& gloo, Tensors& in, Tensors& out) {
      at::Tensor all = all_to_all(gloo, cat(in), {}, {});
      if (all.numel()) put(out[0], reduce_chunks(all, gloo.getSize(), dtype, op));
      return std::vector<WorkPtr>();
    };
    return part;
  }

  // A send or receive. Alone it runs on the pair's own stream; in a batch, with all of the batch.
  WorkPtr between(OpType kind, Tensors& tensors, int peer) {
    at::Tensor tensor = only(tensors);
    TORCH_CHECK(peer != getRank(), "glass: a rank sends nothing to itself");
    bool sends = kind == OpType::SEND;
    Part part = made(sends ? "send" : "recv", kind, tensor.nbytes());
    (sends ? part.reads : part.writes).push_back(span(tensor));
    int there = batch_ ? peer : int(getRank() < peer);
    part.peer = there;
    part.exchange = [sends, there](c10d::Backend& gloo, Tensors& in, Tensors& out) {
      return std::vector<WorkPtr>{
          sends ? gloo.send(in, there, kTag) : gloo.recv(out, there, kTag)};
    };
    return enqueue(kind, std::move(part), tensors, sends ? Tensors() : tensors, true, peer);
  }

  WorkPtr enqueue(
      OpType kind, Part part, Tensors tensors, Tensors outputs, bool is_async, int peer = -1) {
    int device = tensors[0].device().index();
    for (const at::Tensor& tensor : tensors)
      TORCH_CHECK(
          tensor.device() == tensors[0].device(), "glass: a collective's tensors are on several "
          "devices");
    if (batch_) {
      batch_->device = device;
      batch_->is_async |= is_async;
      batch_->parts.push_back(std::move(part));
      batch_->tensors.insert(batch_->tensors.end(), tensors.begin(), tensors.end());
      return nullptr;
    }
    std::string name = part.name;
    Announcement says = part.says;
    std::vector<int> peers = part.peer < 0 ? all_peers() : std::vector<int>{part.peer};
    std::vector<Part> parts;
    parts.push_back(std::move(part));
    return start(
        lane(device, peer), kind, name, std::move(parts), says, std::move(peers),
        std::move(tensors), std::move(outputs), is_async, device);
  }

  WorkPtr start(
      std::shared_ptr<Lane> lane, OpType kind, const std::string& name, std::vector<Part> parts,
      Announcement says, std::vector<int> peers, Tensors tensors, Tensors outputs, bool is_async,
      int device) {
    lane->check();
    auto launched = std::make_shared<Launch>();
    launched->name = name;
    launched->says = says;
    launched->peers = std::move(peers);
    std::vector<Access> accesses;
    for (const Part& part : parts) {
      auto note = [&](const std::vector<Span>& spans, bool writes) {
        for (const Span& span : spans)
          if (span.size) accesses.push_back({span.begin, span.begin + span.size, writes, true});
      };
      note(part.reads, false);
      note(part.writes, true);
    }
    launched->parts = std::move(parts);
    StreamState* caller = current(device);
    StreamState* on = is_async ? lane->stream : caller;
    if (is_async) wait_event(on, record(caller, false));
    EventState end = lane->put(on, launched, std::move(accesses));
    uint64_t number = ++launched_;
    if (!is_async) return nullptr;
    auto kept = std::make_shared<Tensors>(std::move(tensors));
    lane->keep(end, kept);
    return c10::make_intrusive<Launched>(
        getRank(), kind, lane, launched, end, device, std::move(outputs), kept, number);
  }

  std::vector<std::shared_ptr<Lane>> lanes() {
    Held held(mutex_);
    std::vector<std::shared_ptr<Lane>> all;
    for (auto& [key, lane] : lanes_) all.push_back(lane);
    return all;
  }

  // Returns the communicator of all ranks, or that of this rank and a peer. At its first use the
  // host waits for the other ranks, and nothing can end that wait but the group's time limit.
  std::shared_ptr<Lane> lane(int device, int peer = -1) {
    {
      Held held(mutex_);
      TORCH_CHECK(aborted_.empty(), "glass: ", aborted_);
      auto found = lanes_.find({device, peer});
      if (found != lanes_.end()) return found->second;
    }
    {
      Lock lock(world().mutex);
      need_no_capture("the making of a communicator", current(device));
    }
    std::string group = getGroupDesc();
    if (group.empty() || group == "undefined") group = getGroupUid();
    std::vector<int> ranks;
    int rank = getRank();
    std::string name;
    if (peer < 0) {
      for (int i = 0; i < getSize(); ++i) ranks.push_back(i);
      name = "all/" + std::to_string(made_++);
    } else {
      ranks = {std::min(rank, peer), std::max(rank, peer)};
      name = std::to_string(ranks[0]) + ":" + std::to_string(ranks[1]);
      group += ":" + name;
      rank = int(rank > peer);
    }
    auto lane =
        std::make_shared<Lane>(group, device, rank, ranks, timeout_, is_contained_);
    if (ranks.size() > 1) {
      BackendPtr control, data;
      {
        py::gil_scoped_acquire gil;
        py::tuple both = (*connect_)(name, rank, ranks.size());
        control = both[0].cast<BackendPtr>();
        data = both[1].cast<BackendPtr>();
      }
      lane->start(std::move(control), std::move(data));
    }
    std::string aborted;
    {
      Held held(mutex_);
      lanes_[{device, peer}] = lane;
      aborted = aborted_;
    }
    if (!aborted.empty()) lane->abort(aborted);
    return lane;
  }

  Milliseconds timeout_;
  const bool is_contained_;
  py::object* const connect_;
  std::mutex mutex_; // of the next three
  std::map<std::pair<int, int>, std::shared_ptr<Lane>> lanes_; // by device and peer
  std::string aborted_;
  int made_ = 0;
  std::atomic<uint64_t> launched_{0};
  std::optional<Batch> batch_;
};

} // namespace

void bind_communicator(py::module& module) {
  module.def(
      "make_communicator",
      [](int rank, int size, std::chrono::milliseconds timeout, bool is_contained,
         py::object connect) -> BackendPtr {
        return c10::make_intrusive<Communicator>(
            rank, size, timeout, is_contained, std::move(connect));
      });
  module.def("collectives", [] {
    Held held(table().mutex);
    std::vector<std::string> said;
    for (auto& [device, runs] : table().present)
      for (auto& run : runs) said.push_back(run->lane->describe(*run));
    return said;
  });
}

} // namespace glass
