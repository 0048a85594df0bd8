// An allocator for PyTorch's CPU tensors that serves one training step from an arena, at planned offsets.
//
// A straight-line step requests the same sizes in the same order each time. So a program is that sequence, with an
// offset for each request; nothing is searched. A request that is not in the program gets the smallest gap between live
// blocks that holds it; an entry of the program that is never requested is skipped.
//
//     idle      every request goes to PyTorch's own allocator                               (any thread)
//     record    the same, and is recorded                                                   (the thread that began it)
//     serve     from the arena, by the program or by best fit, and is recorded              (the thread that began it)
//
// No block is ever placed over a live one, whatever the program says: a tensor that outlives its step stays intact.
//
// The record holds each allocation (its bytes) and each free (minus one, minus the number of the allocation): from it
// the caller reads what a kernel allocates and frees, and the peak.
//
// Plain C functions, so that Python needs only ctypes; only c10's headers, so that it builds in seconds.

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace {

constexpr int64_t kAlignment = 64;

constexpr int64_t kLookAhead = 64;  // entries that may be skipped to find a request

struct Entry {
  int64_t bytes;
  int64_t offset;
};

struct Block {
  int64_t request;  // its number; -1: of an earlier step
  int64_t bytes;
};

struct State {
  std::mutex mutex;
  c10::Allocator* original = nullptr;
  // The arena: `reserved` bytes of addresses; pages are resident once they were touched.
  char* base = nullptr;
  int64_t reserved = 0;
  int64_t touched = 0;               // bytes from its base that may be resident
  std::map<int64_t, int64_t> taken;  // offset → end of each live block
  // The current step.
  const Entry* program = nullptr;
  int64_t n_entries = 0;
  bool from_arena = false;
  bool writing = false;
  bool tight = false;  // pages are released with their block
  int64_t next = 0;        // entry of the program
  int64_t skipped = 0;     // entries that were not requested
  int64_t unplanned = 0;   // requests that were not served by the program
  int64_t height = 0;      // the highest end of a block of the arena
  int64_t held = 0;
  int64_t peak = 0;
  int64_t n_requests = 0;
  std::vector<int64_t> events;
  std::unordered_map<void*, Block> live;
};

State& state() {
  static State* instance = new State;  // never destroyed: tensors may be freed while the process exits
  return *instance;
}

thread_local bool is_step_thread = false;

// The entry of the program for a request of so many bytes, or nullptr.
const Entry* planned_entry(State& s, int64_t bytes) {
  const int64_t last = std::min(s.n_entries, s.next + kLookAhead);
  for (int64_t n = s.next; n < last; ++n) {
    if (s.program[n].bytes == bytes) {
      s.skipped += n - s.next;
      s.next = n + 1;
      return &s.program[n];
    }
  }
  return nullptr;
}

bool is_free(const State& s, int64_t offset, int64_t end) {
  auto after = s.taken.lower_bound(offset);
  if (after != s.taken.end() && after->first < end) return false;
  return after == s.taken.begin() || std::prev(after)->second <= offset;
}

// The offset of the smallest gap between live blocks that holds so many bytes, or the end of the last block.
int64_t best_fit(const State& s, int64_t bytes) {
  int64_t best = -1, best_gap = INT64_MAX, end = 0;
  for (const auto& [offset, block_end] : s.taken) {
    const int64_t gap = offset - end;
    if (gap >= bytes && gap < best_gap) {
      best = end;
      best_gap = gap;
    }
    end = block_end;
  }
  return best >= 0 ? best : end;
}

// A block of the arena, or nullptr if it is full.
void* place(State& s, int64_t bytes) {
  const int64_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  const Entry* entry = planned_entry(s, bytes);
  int64_t offset;
  if (entry != nullptr && entry->offset % kAlignment == 0 && is_free(s, entry->offset, entry->offset + rounded)) {
    offset = entry->offset;
  } else {
    s.unplanned += 1;
    offset = best_fit(s, rounded);
  }
  if (offset + rounded > s.reserved) return nullptr;
  s.taken[offset] = offset + rounded;
  s.height = std::max(s.height, offset + rounded);
  s.touched = std::max(s.touched, offset + rounded);
  return s.base + offset;
}

void record_allocation(State& s, void* pointer, int64_t bytes) {
  s.live[pointer] = {s.n_requests, bytes};
  s.n_requests += 1;
  s.events.push_back(bytes);
  s.held += bytes;
  s.peak = std::max(s.peak, s.held);
}

void record_free(State& s, void* pointer) {
  auto block = s.live.find(pointer);
  if (block == s.live.end()) return;
  if (block->second.request >= 0) {
    if (s.writing) s.events.push_back(-1 - block->second.request);
    s.held -= block->second.bytes;
  }
  s.live.erase(block);
}

// Returns the whole pages of a part of the arena to the system.
void release_pages(const State& s, int64_t from, int64_t to) {
  static const int64_t page = sysconf(_SC_PAGESIZE);
  const int64_t first = (from + page - 1) / page * page, last = to / page * page;
  if (last > first) madvise(s.base + first, last - first, MADV_DONTNEED);
}

void deallocate(void* pointer) {
  if (pointer == nullptr) return;
  State& s = state();
  bool ours;
  {
    std::lock_guard<std::mutex> lock(s.mutex);
    if (!s.live.empty()) record_free(s, pointer);
    const char* p = static_cast<const char*>(pointer);
    ours = s.base != nullptr && p >= s.base && p < s.base + s.reserved;
    if (ours) {
      auto block = s.taken.find(p - s.base);
      if (block != s.taken.end()) {
        if (s.tight) release_pages(s, block->first, block->second);
        s.taken.erase(block);
      }
    }
  }
  if (ours) {
    c10::profiledCPUMemoryReporter().Delete(pointer);
  } else {
    s.original->raw_deallocate(pointer);
  }
}

struct ArenaAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    State& s = state();
    void* pointer = nullptr;
    if (is_step_thread && s.writing && n > 0) {
      std::lock_guard<std::mutex> lock(s.mutex);
      const int64_t bytes = static_cast<int64_t>(n);
      if (s.from_arena) {
        pointer = place(s, bytes);
        if (pointer != nullptr) c10::profiledCPUMemoryReporter().New(pointer, n);
      }
      if (pointer == nullptr) pointer = s.original->raw_allocate(n);
      record_allocation(s, pointer, bytes);
    } else {
      pointer = s.original->raw_allocate(n);
    }
    return {pointer, pointer, &deallocate, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &deallocate; }
  void copy_data(void* to, const void* from, std::size_t n) const override { std::memcpy(to, from, n); }
};

}  // namespace

extern "C" {

// The PyTorch that it was built for: c10's classes may differ in another.
const char* et_torch_version() { return ET_TORCH_VERSION; }

// A fork while another thread allocates: the child gets the mutex unlocked and the state consistent. The step of a
// thread that does not exist in the child is over.
void before_fork() { state().mutex.lock(); }
void after_fork() { state().mutex.unlock(); }
void after_fork_in_child() {
  if (!is_step_thread) state().writing = false;
  state().mutex.unlock();
}

// Put this allocator before PyTorch's own. Once in a process; false if that one cannot be wrapped.
bool et_install() {
  static ArenaAllocator ours;
  State& s = state();
  if (s.original != nullptr) return true;
  c10::Allocator* original = c10::GetAllocator(c10::DeviceType::CPU);
  if (original == nullptr || original->raw_deleter() == nullptr) return false;
  s.original = original;
  pthread_atfork(before_fork, after_fork, after_fork_in_child);
  c10::SetAllocator(c10::DeviceType::CPU, &ours, 255);
  return c10::GetAllocator(c10::DeviceType::CPU) == &ours;
}

// Reserve addresses for the arena, once in a process; they take no memory until they are touched. False if the system
// refuses.
bool et_reserve(int64_t bytes) {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  if (s.base != nullptr) return true;
  void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) return false;
  s.base = static_cast<char*>(base);
  s.reserved = bytes;
  return true;
}

// Return the pages above `bytes` to the system.
void et_trim(int64_t bytes) {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  constexpr int64_t kPage = 1 << 16;
  int64_t from = (bytes + kPage - 1) / kPage * kPage;
  if (!s.taken.empty()) from = std::max(from, (s.taken.rbegin()->second + kPage - 1) / kPage * kPage);
  if (s.base == nullptr || from >= s.touched) return;
  madvise(s.base + from, s.touched - from, MADV_DONTNEED);
  s.touched = from;
}

// Return the pages between live blocks to the system, and until `et_stop` those of every block that is freed: only live
// blocks are then resident.
void et_release() {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  int64_t end = 0;
  for (const auto& [offset, block_end] : s.taken) {
    release_pages(s, end, offset);
    end = block_end;
  }
  release_pages(s, end, s.touched);
  s.tight = s.writing;
}

// The highest byte of the arena that was used since it was last trimmed.
int64_t et_touched() {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  return s.touched;
}

// The bytes of the arena that are resident now.
int64_t et_resident() {
  static const int64_t page = sysconf(_SC_PAGESIZE);
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  unsigned char residence[1 << 14];
  int64_t pages = 0;
  for (int64_t at = 0; at < s.touched; at += static_cast<int64_t>(sizeof(residence)) * page) {
    const int64_t bytes = std::min(s.touched - at, static_cast<int64_t>(sizeof(residence)) * page);
    if (mincore(s.base + at, bytes, residence) != 0) return s.touched;
    for (int64_t n = 0; n < (bytes + page - 1) / page; ++n) pages += residence[n] & 1;
  }
  return pages * page;
}

// Whether a step is running.
bool et_started() {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  return s.writing;
}

// From now to `et_stop`, requests of this thread are recorded and, with `from_arena`, served from the arena. One step
// at a time: the caller has checked `et_started`.
void et_start(const Entry* program, int64_t n, bool from_arena) {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  s.program = program;
  s.n_entries = n;
  s.from_arena = from_arena;
  s.next = s.skipped = s.unplanned = s.height = s.held = s.peak = s.n_requests = 0;
  s.events.clear();
  for (auto& [pointer, block] : s.live) block.request = -1;
  s.writing = true;
  is_step_thread = true;
}

// Returns the number of recorded events. `counts` gets: requests that were not served by the program, entries of the
// program that were not requested, peak bytes, bytes still held, height of the arena.
int64_t et_stop(int64_t* counts) {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  s.writing = s.tight = false;
  is_step_thread = false;
  counts[0] = s.unplanned;
  counts[1] = s.skipped + s.n_entries - s.next;
  counts[2] = s.peak;
  counts[3] = s.held;
  counts[4] = s.height;
  s.program = nullptr;
  return static_cast<int64_t>(s.events.size());
}

void et_events(int64_t* into) {
  State& s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  std::memcpy(into, s.events.data(), s.events.size() * sizeof(int64_t));
}
}
