// A CUDA device that is not there: CPU-only torch, tensors of device "cuda" whose memory the host cannot touch.
//
// - Device pointers lie in a PROT_NONE reservation; the bytes are in a mirror at a fixed distance. Host code that
//   follows a device pointer gets SIGSEGV. Nothing is ever unprotected, so there are no races between threads.
// - One boxed fallback for the dispatch key CUDA runs the CPU kernel on aliases of the mirror, after the device
//   checks that real kernels make.
// - Copies to pinned memory with non_blocking=True arrive only at a synchronisation, until then there is garbage.
// - ProcessGroupNCCL: refuses what NCCL refuses, and exchanges over gloo.
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/EmptyTensor.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/is_set_to_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/extension.h>
#include <torch/csrc/utils/device_lazy_init.h>
#include <torch/library.h>

#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <deque>
#include <map>
#include <mutex>
#include <set>

namespace sim {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;
using Clock = std::chrono::steady_clock;

constexpr auto kDev = DeviceType::CUDA;
constexpr size_t kSpan = size_t(8) << 30;  // address space of one device
constexpr int kMost = 8;

// -- state -----------------------------------------------------------------------------------------------------------

struct Pending { char* to; std::vector<char> bytes; uint64_t seq; };

struct Dev {
  std::map<size_t, std::vector<char*>> free;
  char* next = nullptr;
  size_t used = 0, peak = 0, allocations = 0;
  std::deque<Pending> pending;
};

struct Event { DeviceIndex device; uint64_t seq; int asked = 0; bool done = false; Clock::time_point at; };

static int g_count = 0;
static size_t g_limit = size_t(1) << 30;
static bool g_init = false, g_bad_fork = false;
static char *g_va = nullptr, *g_real = nullptr;
static Dev g_dev[kMost];
static std::recursive_mutex g_lock;
static thread_local DeviceIndex t_device = 0;
static thread_local int64_t t_stream[kMost] = {};
static int64_t g_streams = 0;
static uint64_t g_seq = 0, g_done = 0;
static std::atomic<int64_t> g_syncs{0}, g_kernels{0};
static std::set<std::string> g_refused_log;
static bool g_is_lazy = true;

static void after_fork() {
  if (!g_init) return;
  g_bad_fork = true;
  torch::utils::set_requires_device_init(kDev, true);
}

static void ensure() {
  TORCH_CHECK(!g_bad_fork, "CUDA error: initialization error (this process was forked from one that had started CUDA)");
  if (g_init) return;
  std::lock_guard<std::recursive_mutex> hold(g_lock);
  if (g_init) return;
  TORCH_CHECK(g_count > 0, "No CUDA GPUs are available");
  size_t all = kSpan * g_count;
  g_va = (char*)mmap(nullptr, all, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  g_real = (char*)mmap(nullptr, all, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(g_va != MAP_FAILED && g_real != MAP_FAILED, "simcuda: no address space");
  for (int i = 0; i < g_count; i++) g_dev[i].next = g_va + kSpan * i;
  g_init = true;
}

static bool is_device(const void* p) { return g_va && p >= g_va && p < g_va + kSpan * g_count; }
static char* real(const void* p) { return p ? g_real + ((const char*)p - g_va) : nullptr; }
static DeviceIndex device_of(const void* p) { return (DeviceIndex)(((const char*)p - g_va) / kSpan); }

static void deliver(DeviceIndex d, uint64_t upto = UINT64_MAX) {
  std::lock_guard<std::recursive_mutex> hold(g_lock);
  g_done = std::max(g_done, std::min(upto, g_seq));
  auto& q = g_dev[d].pending;
  while (!q.empty() && q.front().seq <= upto) {
    memcpy(q.front().to, q.front().bytes.data(), q.front().bytes.size());
    q.pop_front();
  }
}

static py::object* g_on_sync = nullptr;
static void synced(const char* what, DeviceIndex d, uint64_t until = UINT64_MAX) {
  g_syncs++;
  deliver(d, until);
  if (g_on_sync && Py_IsInitialized()) {
    py::gil_scoped_acquire gil;
    (*g_on_sync)(what);
  }
}

// -- memory ----------------------------------------------------------------------------------------------------------

static void release(void* p);

struct DeviceMemory final : public c10::DeviceAllocator {
  c10::DataPtr allocate(size_t n) override {
    ensure();
    DeviceIndex d = t_device;
    if (n == 0) return {nullptr, nullptr, &release, Device(kDev, d)};
    size_t size = (n + 511) / 512 * 512;
    std::lock_guard<std::recursive_mutex> hold(g_lock);
    auto& dev = g_dev[d];
    if (dev.used + size > g_limit)
      C10_THROW_ERROR(OutOfMemoryError, c10::str("CUDA out of memory. Tried to allocate ", n >> 20, " MiB. GPU ", int(d), " has a total capacity of ", g_limit >> 20, " MiB of which ", (g_limit - dev.used) >> 20, " MiB is free. (simcuda)"));
    char* p;
    auto& list = dev.free[size];
    if (!list.empty()) { p = list.back(); list.pop_back(); }
    else {
      p = dev.next; dev.next += size + 512;
      TORCH_CHECK(dev.next < g_va + kSpan * (d + 1), "simcuda: address space is used up");
    }
    sizes_[p] = size;
    dev.used += size; dev.allocations++;
    dev.peak = std::max(dev.peak, dev.used);
    if (size <= (1 << 20)) memset(real(p), 0xFF, size);  // NaN: memory of a GPU is not zero
    return {p, p, &release, Device(kDev, d)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t n) const override { memcpy(real(to), real(from), n); }
  bool initialized() override { return g_init; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex d) override {
    c10::CachingDeviceAllocator::DeviceStats s;
    auto& a = s.allocated_bytes[0];
    a.current = g_dev[d].used; a.peak = g_dev[d].peak;
    s.reserved_bytes[0] = a;
    return s;
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex d) override { g_dev[d].peak = g_dev[d].used; }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex d) override { return {g_limit - g_dev[d].used, g_limit}; }
  std::unordered_map<char*, size_t> sizes_;
};
static DeviceMemory g_memory;

static void release(void* p) {
  if (!p || g_bad_fork) return;
  std::lock_guard<std::recursive_mutex> hold(g_lock);
  auto found = g_memory.sizes_.find((char*)p);
  if (found == g_memory.sizes_.end()) return;
  auto& dev = g_dev[device_of(p)];
  dev.used -= found->second;
  if (found->second <= (1 << 20)) memset(real(p), 0xFF, found->second);
  else madvise(real(p), found->second, MADV_DONTNEED);
  dev.free[found->second].push_back((char*)p);
  g_memory.sizes_.erase(found);
}

static std::map<char*, size_t> g_pinned;
static bool is_pinned(const void* p) {
  std::lock_guard<std::recursive_mutex> hold(g_lock);
  auto after = g_pinned.upper_bound((char*)p);
  if (after == g_pinned.begin()) return false;
  --after;
  return (char*)p < after->first + after->second;
}
static void unpin(void* p) {
  if (!p) return;
  std::lock_guard<std::recursive_mutex> hold(g_lock);
  for (auto& dev : g_dev) {
    auto& q = dev.pending;
    auto size = g_pinned[(char*)p];
    q.erase(std::remove_if(q.begin(), q.end(), [&](Pending& one) { return one.to >= (char*)p && one.to < (char*)p + size; }), q.end());
  }
  g_pinned.erase((char*)p);
  free(p);
}
struct HostMemory final : public at::HostAllocator {
  c10::DataPtr allocate(size_t n) override {
    ensure();
    if (!n) return {nullptr, nullptr, &unpin, Device(DeviceType::CPU)};
    char* p = (char*)aligned_alloc(512, (n + 511) / 512 * 512);
    std::lock_guard<std::recursive_mutex> hold(g_lock);
    g_pinned[p] = n;
    return {p, p, &unpin, Device(DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t n) const override { memcpy(to, from, n); }
  bool record_event(void*, void*, Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
static HostMemory g_host;

// -- guard, generator, hooks -----------------------------------------------------------------------------------------

static void check_index(DeviceIndex i) {
  TORCH_CHECK(i >= 0 && i < g_count, "CUDA error: invalid device ordinal");
}

struct Guard final : public c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return kDev; }
  Device exchangeDevice(Device d) const override {
    Device old(kDev, t_device);
    if (d.index() != t_device) { check_index(d.index()); t_device = d.index(); }
    return old;
  }
  Device getDevice() const override { return {kDev, t_device}; }
  void setDevice(Device d) const override { if (d.index() >= 0) { check_index(d.index()); t_device = d.index(); } }
  void uncheckedSetDevice(Device d) const noexcept override { if (d.index() >= 0 && d.index() < g_count) t_device = d.index(); }
  Stream getStream(Device d) const override { return Stream(Stream::UNSAFE, fill(d), t_stream[fill(d).index()]); }
  Stream getDefaultStream(Device d) const override { return Stream(Stream::DEFAULT, fill(d)); }
  Stream getStreamFromGlobalPool(Device d, bool) const override { return getNewStream(d, 0); }
  Stream getNewStream(Device d, int) const override { return Stream(Stream::UNSAFE, fill(d), ++g_streams); }
  Stream exchangeStream(Stream s) const override {
    auto old = getStream(s.device());
    t_stream[s.device().index()] = s.id();
    return old;
  }
  void* getStreamNativeHandle(const Stream s) const override { return (void*)s.id(); }
  void destroyEvent(void* e, const DeviceIndex) const noexcept override { delete (Event*)e; }
  void record(void** e, const Stream& s, const DeviceIndex, const c10::EventFlag) const override {
    ensure();
    if (!*e) *e = new Event();
    auto event = (Event*)*e;
    std::lock_guard<std::recursive_mutex> hold(g_lock);
    *event = Event{s.device_index(), ++g_seq, 0, false, Clock::now()};
  }
  void block(void*, const Stream&) const override {}
  bool queryEvent(void* e) const override {
    auto event = (Event*)e;
    if (!event || event->done || event->seq <= g_done) return true;
    if (g_is_lazy && event->asked++ == 0) return false;
    deliver(event->device, event->seq);
    return event->done = true;
  }
  DeviceIndex deviceCount() const noexcept override { return g_count; }
  bool queryStream(const Stream& s) const override { deliver(s.device_index()); return true; }
  void synchronizeStream(const Stream& s) const override { synced("stream.synchronize", s.device_index()); }
  void synchronizeEvent(void* e) const override {
    auto event = (Event*)e;
    if (!event) return;
    synced("event.synchronize", event->device, event->seq);
    event->done = true;
  }
  void synchronizeDevice(const DeviceIndex d) const override { ensure(); synced("synchronize", d < 0 ? t_device : d); }
  void recordDataPtrOnStream(const c10::DataPtr&, const Stream&) const override {}
  double elapsedTime(void* a, void* b, const DeviceIndex) const override {
    return std::chrono::duration<double, std::milli>(((Event*)b)->at - ((Event*)a)->at).count();
  }
  static Device fill(Device d) { return {kDev, d.index() < 0 ? t_device : d.index()}; }
};

struct Generator final : public c10::GeneratorImpl {
  explicit Generator(DeviceIndex d, uint64_t seed = c10::detail::getNonDeterministicRandom() * 0 + 67280421310721ull)
      : c10::GeneratorImpl(Device(kDev, d), c10::DispatchKeySet(c10::DispatchKey::CUDA)), seed_(seed) {}
  void set_current_seed(uint64_t s) override { seed_ = s; offset_ = 0; }
  void set_offset(uint64_t o) override { offset_ = o; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override { auto s = c10::detail::getNonDeterministicRandom(true); set_current_seed(s); return s; }
  void set_state(const c10::TensorImpl& t) override {
    TORCH_CHECK(t.device_type() == DeviceType::CPU && t.dtype() == caffe2::TypeMeta::Make<uint8_t>(), "RNG state must be a torch.ByteTensor");
    TORCH_CHECK(t.numel() == 16, "RNG state is wrong size");
    memcpy(&seed_, t.data(), 8);
    memcpy(&offset_, (const char*)t.data() + 8, 8);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto t = at::empty({16}, at::TensorOptions().dtype(at::kByte));
    memcpy(t.data_ptr(), &seed_, 8);
    memcpy((char*)t.data_ptr() + 8, &offset_, 8);
    return t.getIntrusivePtr();
  }
  uint64_t draw() {
    std::lock_guard<std::mutex> hold(mutex_);
    uint64_t x = seed_ + 0x9E3779B97F4A7C15ull * (offset_ / 4 + 1);
    offset_ += 4;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
  }
  Generator* clone_impl() const override {
    auto g = new Generator(device_.index(), seed_);
    g->offset_ = offset_;
    return g;
  }
  uint64_t seed_, offset_ = 0;
};

static at::Generator& default_generator(DeviceIndex d) {
  static std::vector<at::Generator> all = [] {
    std::vector<at::Generator> made;
    for (int i = 0; i < kMost; i++) made.push_back(at::make_generator<Generator>((DeviceIndex)i));
    return made;
  }();
  return all[d < 0 ? t_device : d];
}

struct Hooks final : public at::CUDAHooksInterface {
  void init() const override { ensure(); }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return g_count > 0; }
  const at::Generator& getDefaultGenerator(DeviceIndex d) const override { return default_generator(d); }
  at::Generator getNewGenerator(DeviceIndex d) const override { return at::make_generator<Generator>(d < 0 ? t_device : d); }
  Device getDeviceFromPtr(void* p) const override { return {kDev, device_of(p)}; }
  bool isPinnedPtr(const void* p) const override { return is_pinned(p); }
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return g_init; }
  DeviceIndex deviceCount() const override { return g_count; }
  void setCurrentDevice(DeviceIndex d) const override { check_index(d); t_device = d; }
  DeviceIndex getCurrentDevice() const override { return t_device; }
  DeviceIndex exchangeDevice(DeviceIndex d) const override { auto old = t_device; check_index(d); t_device = d; return old; }
  DeviceIndex maybeExchangeDevice(DeviceIndex d) const override { auto old = t_device; if (d >= 0) { check_index(d); t_device = d; } return old; }
  DeviceIndex current_device() const override { return t_device; }
  at::Allocator* getPinnedMemoryAllocator() const override { return &g_host; }
  at::Allocator* getCUDADeviceAllocator() const override { return &g_memory; }
  std::string showConfig() const override { return "simcuda"; }
  int getNumGPUs() const override { return g_count; }
  void deviceSynchronize(DeviceIndex d) const override { synced("synchronize", d); }
};

// -- kernels ---------------------------------------------------------------------------------------------------------

static Tensor alias_cpu(const Tensor& t) {
  auto keep = t.storage();
  return at::from_blob(
      real(t.unsafeGetTensorImpl()->storage().data() ? (char*)t.const_data_ptr() : nullptr), t.sizes(), t.strides(),
      [keep](void*) {}, at::TensorOptions().dtype(t.dtype()).device(at::kCPU));
}

static Tensor empty_on(at::IntArrayRef size, at::IntArrayRef stride, at::ScalarType dtype, Device d) {
  ensure();
  c10::DeviceGuard guard(d);
  return Tensor(at::detail::empty_strided_generic(size, stride, &g_memory, c10::DispatchKeySet(c10::DispatchKey::CUDA), dtype));
}

static Tensor to_device(const Tensor& t, Device d) {
  auto made = empty_on(t.sizes(), t.strides(), t.scalar_type(), d);
  if (t.numel()) alias_cpu(made).copy_(t);
  return made;
}

static Device pick(std::optional<Device> d) {
  Device chosen = d.value_or(Device(kDev, t_device));
  if (chosen.index() < 0) chosen = Device(kDev, t_device);
  check_index(chosen.index());
  return chosen;
}

Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  ensure();
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard guard(pick(device));
  return Tensor(at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &g_memory, c10::DispatchKeySet(c10::DispatchKey::CUDA), c10::dtype_or_default(dtype), format));
}
Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  return empty_on(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), c10::dtype_or_default(dtype), pick(device));
}

static void resize_bytes(c10::StorageImpl* s, size_t n) {
  TORCH_CHECK(s->resizable(), "Trying to resize storage that is not resizable");
  c10::DeviceGuard guard(s->device());
  auto fresh = g_memory.allocate(n);
  size_t common = std::min(n, (size_t)s->nbytes());
  if (common && s->data()) memcpy(real(fresh.get()), real(s->data()), common);
  s->set_data_ptr_noswap(std::move(fresh));
  s->set_nbytes(n);
}

const Tensor& resize_(const Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto impl = self.unsafeGetTensorImpl();
  if (self.sizes() != sizes) impl->set_sizes_contiguous(sizes);
  if (format && *format != at::MemoryFormat::Preserve && *format != at::MemoryFormat::Contiguous) impl->empty_tensor_restride(*format);
  size_t need = (impl->numel() + impl->storage_offset()) * impl->itemsize();
  auto s = impl->unsafe_storage().unsafeGetStorageImpl();
  if (impl->numel() && need > s->nbytes()) resize_bytes(s, need);
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  TORCH_CHECK(source.device().type() == kDev, "Attempted to set the storage of a tensor on device \"", self.device(), "\" to a storage on different device \"", source.device(), "\"");
  auto impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(source);
  impl->set_storage_offset(offset.expect_int());
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  if (stride.data() && stride.size() == size.size()) impl->set_sizes_and_strides(sizes, C10_AS_INTARRAYREF_SLOW(stride));
  else impl->set_sizes_contiguous(sizes);
  size_t need = at::detail::computeStorageNbytes(impl->sizes(), impl->strides(), impl->itemsize(), impl->storage_offset());
  if (impl->numel() && need > source.nbytes()) resize_bytes(source.unsafeGetStorageImpl(), need);
  return self;
}
Tensor& set_source(Tensor& self, at::Storage source) {
  int64_t n = source.nbytes() / self.itemsize();
  return set_storage(self, source, 0, c10::SymIntArrayRef{c10::SymInt(n)}, {});
}
Tensor& set_tensor(Tensor& self, const Tensor& source) {
  if (self.unsafeGetTensorImpl() == source.unsafeGetTensorImpl()) return self;
  return set_storage(self, source.storage(), source.sym_storage_offset(), source.sym_sizes(), source.sym_strides());
}
Tensor& set_none(Tensor& self) {
  auto fresh = empty_on({0}, {1}, self.scalar_type(), self.device());
  return set_storage(self, fresh.storage(), 0, c10::SymIntArrayRef{c10::SymInt(0)}, {});
}

Tensor& copy_(Tensor& self, const Tensor& src, bool non_blocking) {
  ensure();
  if (self.numel() == 0 && src.numel() == 0) return self;
  g_kernels++;
  bool to = self.device().type() == kDev, from = src.device().type() == kDev;
  auto source = src.expand_as(self);
  at::NoGradGuard no_grad;
  if (from && !to) {
    auto d = src.device().index();
    bool pinned = is_pinned(self.const_data_ptr());
    if (non_blocking && g_is_lazy && self.is_contiguous() && self.numel()) {
      if (pinned) {
        Tensor value = alias_cpu(source).to(self.scalar_type()).contiguous();
        std::lock_guard<std::recursive_mutex> hold(g_lock);
        Pending p{(char*)self.data_ptr(), std::vector<char>((char*)value.data_ptr(), (char*)value.data_ptr() + value.nbytes()), ++g_seq};
        memset(self.data_ptr(), 0xFF, value.nbytes());
        g_dev[d].pending.push_back(std::move(p));
        return self;
      }
      // Into pageable memory cudaMemcpyAsync may or may not wait. It does here.
    }
    synced("copy to the host", d);
    self.copy_(alias_cpu(source));
    return self;
  }
  // From pageable memory the driver waits, too: it copies in the order of the stream.
  if (to && !from && !(non_blocking && is_pinned(src.const_data_ptr()))) synced("copy to the GPU", self.device().index());
  alias_cpu(self).copy_(from ? alias_cpu(source) : source);
  return self;
}
Tensor copy_from(const Tensor& self, const Tensor& dst, bool non_blocking) {
  Tensor to = dst;
  copy_(to, self, non_blocking);
  return dst;
}
Tensor copy_from_and_resize(const Tensor& self, const Tensor& dst) {
  Tensor to = dst;
  if (to.sizes() != self.sizes()) to.resize_(self.sizes());
  copy_(to, self, false);
  return dst;
}

void record_stream(Tensor&, Stream) {}
Tensor view(const Tensor& self, c10::SymIntArrayRef size) { return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size)); }
Tensor as_strided(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  std::optional<int64_t> at_;
  if (offset) at_ = offset->expect_int();
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), at_);
}
Tensor reshape_alias(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

// Ops that take indices or masks from the host, or that copy themselves.
static bool may_mix(const std::string& name) {
  static const std::set<std::string> names = {
      "aten::index.Tensor", "aten::index_put_", "aten::_index_put_impl_", "aten::index_put", "aten::index.Tensor_out",
      "aten::_unsafe_index.Tensor", "aten::_unsafe_index_put", "aten::index_put.out"};
  return names.count(name) || name.rfind("aten::_foreach", 0) == 0;
}
static bool waits(const std::string& name) {
  static const std::set<std::string> names = {
      "aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::masked_select", "aten::_unique2", "aten::unique_dim",
      "aten::bincount", "aten::repeat_interleave.Tensor", "aten::is_nonzero"};
  return names.count(name);
}

struct Mixer {
  std::string name;
  bool strict;
  std::optional<Device> device;
  void see(const Tensor& t) {
    if (!t.defined() || t.device().type() != kDev) return;
    TORCH_CHECK(!device || *device == t.device(), "Expected all tensors to be on the same device, but found at least two devices, ", *device, " and ", t.device(), "! (when checking argument of ", name, ")");
    device = t.device();
  }
  Tensor host(const Tensor& t) {
    if (!t.defined()) return t;
    if (t.device().type() == kDev) {
      TORCH_CHECK(t.layout() == at::kStrided, "simcuda: sparse tensors are not simulated");
      return alias_cpu(t);
    }
    if (t.device().type() == DeviceType::CPU)
      TORCH_CHECK(!strict || !device || t.dim() == 0, "Expected all tensors to be on the same device, but found at least two devices, ", *device, " and cpu! (when checking argument of ", name, ")");
    return t;
  }
};

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  ensure();
  g_kernels++;
  const auto& schema = op.schema();
  const auto& arguments = schema.arguments();
  const size_t n = arguments.size(), begin = stack->size() - n;
  std::string name = schema.name() + (schema.overload_name().empty() ? "" : "." + schema.overload_name());
  Mixer mix{name, !may_mix(name), {}};
  std::optional<Device> asked;
  for (size_t i = 0; i < n; i++) {
    auto& v = (*stack)[begin + i];
    if (v.isTensor()) mix.see(v.toTensor());
    else if (v.isTensorList()) for (const Tensor& t : v.toTensorVector()) mix.see(t);
    else if (v.isOptionalTensorList()) { for (const auto& t : v.toOptionalTensorVector()) if (t) mix.see(*t); }
    else if (v.isDevice()) asked = v.toDevice();
  }
  Device device = mix.device.value_or(asked && asked->type() == kDev ? pick(asked) : Device(kDev, t_device));
  c10::DeviceGuard guard(device);
  std::vector<c10::IValue> given(stack->begin() + begin, stack->end());
  std::vector<std::pair<Tensor, Tensor>> outs;  // of the device, of the host
  bool has_generator = false;
  auto& standard = *static_cast<Generator*>(default_generator(device.index()).unsafeGetGeneratorImpl());
  for (size_t i = 0; i < n; i++) {
    auto& v = (*stack)[begin + i];
    const auto& a = arguments[i];
    bool writes = a.alias_info() && a.alias_info()->isWrite();
    if (v.isTensor()) {
      auto t = v.toTensor();
      if (writes && t.defined() && t.device().type() == kDev && a.is_out() ) {
        // It may have to be resized, which an alias cannot.
        auto host = at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kCPU));
        if (t.numel()) host.copy_(alias_cpu(t));
        outs.emplace_back(t, host);
        v = host;
      } else {
        TORCH_CHECK(!(writes && t.defined() && t.device().type() == DeviceType::CPU && mix.device && !may_mix(name)), "Expected all tensors to be on the same device, but found at least two devices, ", device, " and cpu! (", name, " writes to a tensor of the CPU)");
        v = mix.host(t);
      }
    } else if (v.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& t : v.toTensorVector()) list.push_back(mix.host(t));
      v = list;
    } else if (v.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const auto& t : v.toOptionalTensorVector()) list.push_back(t ? std::optional<Tensor>(mix.host(*t)) : std::nullopt);
      v = list;
    } else if (v.isDevice()) {
      v = Device(DeviceType::CPU);
    } else if (a.type()->str().find("Generator") != std::string::npos) {
      has_generator = true;
      auto* from = &standard;
      if (v.isGenerator()) {
        auto g = v.toGenerator();
        TORCH_CHECK(g.device().type() == kDev, "Expected a 'cuda' device type for generator but found '", g.device().type(), "'");
        from = static_cast<Generator*>(g.unsafeGetGeneratorImpl());
      }
      v = at::detail::createCPUGenerator(from->draw());
    } else if (a.name() == "pin_memory" && v.isBool()) {
      v = c10::IValue();
    }
  }
  if (waits(name)) synced(name.c_str(), device.index());
  if (!has_generator && op.hasTag(at::Tag::nondeterministic_seeded)) {
    auto host = at::detail::getDefaultCPUGenerator();
    auto before = host.get_state();
    host.set_current_seed(standard.draw());
    try { op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack); } catch (...) { host.set_state(before); throw; }
    host.set_state(before);
  } else {
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  for (auto& [on_device, host] : outs) {
    auto to = on_device;
    if (to.sizes() != host.sizes()) to.resize_(host.sizes());
    if (host.numel()) alias_cpu(to).copy_(host);
  }
  const auto& returns = schema.returns();
  const size_t first = stack->size() - returns.size();
  for (size_t r = 0; r < returns.size(); r++) {
    auto& v = (*stack)[first + r];
    const auto* info = returns[r].alias_info();
    if (info && info->isWrite()) {
      for (size_t i = 0; i < n; i++)
        if (arguments[i].alias_info() && *arguments[i].alias_info() == *info) { v = given[i]; break; }
    } else if (v.isTensor()) {
      auto t = v.toTensor();
      if (t.defined()) {
        TORCH_CHECK(!info, "simcuda: a view is missing for ", name);
        v = to_device(t, device);
      }
    } else if (v.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& t : v.toTensorVector()) list.push_back(t.defined() ? to_device(t, device) : t);
      v = list;
    }
  }
}

// The composite op asks CUDA whether a fused kernel fits: none does, and the plain one is used.
int64_t choose_attention(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool, std::optional<double>, bool) {
  return 0;  // SDPBackend::math
}

// Depthwise convolutions have kernels of their own on CUDA; here all take the CPU's.
static Tensor host_of(const Tensor& t) { return t.defined() && t.device().type() == kDev ? alias_cpu(t) : t; }
Tensor convolution(const Tensor& x, const Tensor& w, const std::optional<Tensor>& b, at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding, int64_t groups) {
  Mixer mix{"convolution", true, {}};
  mix.see(x); mix.see(w);
  if (b) mix.see(*b);
  std::optional<Tensor> bias;
  if (b && b->defined()) bias = mix.host(*b);
  g_kernels++;
  return to_device(at::convolution(mix.host(x), mix.host(w), bias, stride, padding, dilation, transposed, output_padding, groups), *mix.device);
}
std::tuple<Tensor, Tensor, Tensor> convolution_backward(const Tensor& g, const Tensor& x, const Tensor& w, at::OptionalIntArrayRef bias_sizes, at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding, int64_t groups, std::array<bool, 3> mask) {
  Mixer mix{"convolution_backward", true, {}};
  mix.see(g); mix.see(x); mix.see(w);
  g_kernels++;
  auto [a, b, c] = at::convolution_backward(mix.host(g), mix.host(x), mix.host(w), bias_sizes, stride, padding, dilation, transposed, output_padding, groups, mask);
  auto up = [&](const Tensor& t) { return t.defined() ? to_device(t, *mix.device) : t; };
  return {up(a), up(b), up(c)};
}

// Cells of recurrent nets are fused on CUDA alone.
std::tuple<Tensor, Tensor, Tensor> lstm_cell(const Tensor& ig, const Tensor& hg, const Tensor& cx, const std::optional<Tensor>& ib, const std::optional<Tensor>& hb) {
  Mixer mix{"_thnn_fused_lstm_cell", true, {}};
  mix.see(ig); mix.see(hg); mix.see(cx);
  auto gates = mix.host(ig) + mix.host(hg);
  if (ib && ib->defined()) gates = gates + mix.host(*ib);
  if (hb && hb->defined()) gates = gates + mix.host(*hb);
  auto parts = gates.chunk(4, 1);
  auto i = parts[0].sigmoid(), f = parts[1].sigmoid(), g = parts[2].tanh(), o = parts[3].sigmoid();
  auto cy = f * mix.host(cx) + i * g;
  auto hy = o * cy.tanh();
  return {to_device(hy, *mix.device), to_device(cy, *mix.device), to_device(at::cat({i, f, g, o}, 1), *mix.device)};
}
std::tuple<Tensor, Tensor, Tensor> lstm_cell_backward(const std::optional<Tensor>& ghy_, const std::optional<Tensor>& gcy_, const Tensor& cx, const Tensor& cy, const Tensor& workspace, bool has_bias) {
  auto parts = host_of(workspace).chunk(4, 1);
  auto i = parts[0], f = parts[1], g = parts[2], o = parts[3];
  auto c = host_of(cy).tanh();
  auto ghy = ghy_ && ghy_->defined() ? host_of(*ghy_) : at::zeros_like(c);
  auto gcy = gcy_ && gcy_->defined() ? host_of(*gcy_) : at::zeros_like(c);
  auto dc = ghy * o * (1 - c * c) + gcy;
  auto gates = at::cat({dc * g * i * (1 - i), dc * host_of(cx) * f * (1 - f), dc * i * (1 - g * g), ghy * c * o * (1 - o)}, 1);
  auto d = workspace.device();
  return {to_device(gates, d), to_device(dc * f, d), has_bias ? to_device(gates.sum(0), d) : Tensor()};
}
std::tuple<Tensor, Tensor> gru_cell(const Tensor& ig, const Tensor& hg, const Tensor& hx, const std::optional<Tensor>& ib, const std::optional<Tensor>& hb) {
  Mixer mix{"_thnn_fused_gru_cell", true, {}};
  mix.see(ig); mix.see(hg); mix.see(hx);
  auto a = mix.host(ig), b = mix.host(hg), h = mix.host(hx);
  if (ib && ib->defined()) a = a + mix.host(*ib);
  if (hb && hb->defined()) b = b + mix.host(*hb);
  auto x = a.chunk(3, 1), y = b.chunk(3, 1);
  auto r = (x[0] + y[0]).sigmoid(), z = (x[1] + y[1]).sigmoid(), n = (x[2] + r * y[2]).tanh();
  auto hy = (h - n) * z + n;
  return {to_device(hy, *mix.device), to_device(at::cat({r, z, n, h, y[2]}, 1), *mix.device)};
}
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> gru_cell_backward(const Tensor& ghy_, const Tensor& workspace, bool has_bias) {
  auto w = host_of(workspace).chunk(5, 1);
  auto r = w[0], z = w[1], n = w[2], h = w[3], hn = w[4], ghy = host_of(ghy_);
  auto dz = ghy * (h - n) * z * (1 - z), dn = ghy * (1 - z) * (1 - n * n), dr = dn * hn * r * (1 - r);
  auto a = at::cat({dr, dz, dn}, 1), b = at::cat({dr, dz, dn * r}, 1);
  auto d = workspace.device();
  return {to_device(a, d), to_device(b, d), to_device(ghy * z, d), has_bias ? to_device(a.sum(0), d) : Tensor(), has_bias ? to_device(b.sum(0), d) : Tensor()};
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage", &set_source);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("set_", &set_none);
  m.impl("copy_", &copy_);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("record_stream", &record_stream);
  m.impl("view", &view);
  m.impl("as_strided", &as_strided);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("view.dtype", TORCH_FN(at::native::view_dtype));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  m.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
  m.impl("is_set_to", TORCH_FN(at::native::is_set_to));
  m.impl("convolution", &convolution);
  m.impl("_thnn_fused_lstm_cell", &lstm_cell);
  m.impl("_thnn_fused_lstm_cell_backward_impl", &lstm_cell_backward);
  m.impl("_thnn_fused_gru_cell", &gru_cell);
  m.impl("_thnn_fused_gru_cell_backward", &gru_cell_backward);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward", &convolution_backward);
}

// -- NCCL ------------------------------------------------------------------------------------------------------------

struct Work final : public c10d::Work {
  Work(c10d::OpType type, c10::intrusive_ptr<c10d::Work> inner, std::function<void()> after, std::vector<Tensor> outputs)
      : c10d::Work(-1, type), inner_(std::move(inner)), after_(std::move(after)), outputs_(std::move(outputs)) {}
  bool isCompleted() override { return inner_->isCompleted(); }
  bool isSuccess() const override { return inner_->isSuccess(); }
  std::exception_ptr exception() const override { return inner_->exception(); }
  std::vector<Tensor> result() override { return outputs_; }
  void synchronize() override { wait(kNoTimeout); }
  bool wait(std::chrono::milliseconds t) override {
    // gloo's thread may have to drop a tensor of Python's before it comes to this work.
    std::optional<py::gil_scoped_release> no_gil;
    if (PyGILState_Check()) no_gil.emplace();
    std::lock_guard<std::mutex> hold(once_);
    if (done_) return true;
    inner_->wait(t);
    at::NoGradGuard no_grad;
    after_();
    return done_ = true;
  }
  void blockCurrentStream() override { wait(kNoTimeout); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    wait(kNoTimeout);
    std::vector<Device> devices;
    if (!outputs_.empty()) devices.push_back(outputs_[0].device());
    auto f = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), devices);
    f->markCompleted(c10::IValue(outputs_));
    return f;
  }
  c10::intrusive_ptr<c10d::Work> inner_;
  std::function<void()> after_;
  std::vector<Tensor> outputs_;
  std::mutex once_;
  bool done_ = false;
};

class NCCL final : public c10d::Backend {
 public:
  NCCL(c10::intrusive_ptr<c10d::Backend> inner, int rank, int size, py::object options)
      : c10d::Backend(rank, size), inner_(std::move(inner)), options_(std::move(options)) {}
  ~NCCL() override { py::gil_scoped_acquire gil; options_ = py::object(); }
  const std::string getBackendName() const override { return "nccl"; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  void setTimeout(std::chrono::milliseconds t) override { inner_->setTimeout(t); }
  bool supportsCoalescing() const override { return true; }
  void startCoalescing() override { group_.emplace(); }
  c10::intrusive_ptr<c10d::Work> endCoalescing() override {
    auto works = std::move(*group_);
    group_.reset();
    auto any = works.empty() ? nullptr : works.back();
    TORCH_CHECK(any, "simcuda: an empty group");
    std::vector<Tensor> outputs;
    for (auto& one : works) { auto more = one->result(); outputs.insert(outputs.end(), more.begin(), more.end()); }
    return c10::make_intrusive<Work>(c10d::OpType::COALESCED, any, [works] { for (auto& one : works) one->wait(kNoTimeout); }, outputs);
  }
  void eagerConnectSingleDevice(at::Device d) override { meet(d); }

  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<Tensor>& ts, const c10d::BroadcastOptions& o) override {
    auto h = down(ts, "broadcast");
    return made(c10d::OpType::BROADCAST, inner_->broadcast(*h, o), h, ts);
  }
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<Tensor>& ts, const c10d::AllreduceOptions& o) override {
    auto h = down(ts, "all_reduce");
    auto options = o;
    auto by = scale(options.reduceOp, *h);
    return made(c10d::OpType::ALLREDUCE, inner_->allreduce(*h, options), h, ts, by);
  }
  c10::intrusive_ptr<c10d::Work> allreduce_coalesced(std::vector<Tensor>& ts, const c10d::AllreduceCoalescedOptions& o) override {
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    for (auto& t : ts) { std::vector<Tensor> one{t}; works.push_back(allreduce(one, o)); }
    return joined(works, ts);
  }
  c10::intrusive_ptr<c10d::Work> reduce(std::vector<Tensor>& ts, const c10d::ReduceOptions& o) override {
    auto h = down(ts, "reduce");
    auto options = o;
    auto by = scale(options.reduceOp, *h);
    if (rank_ != o.rootRank) return made(c10d::OpType::REDUCE, inner_->reduce(*h, options), std::make_shared<std::vector<Tensor>>(), {});
    return made(c10d::OpType::REDUCE, inner_->reduce(*h, options), h, ts, by);
  }
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<std::vector<Tensor>>& outs, std::vector<Tensor>& ins, const c10d::AllgatherOptions& o) override {
    auto h = down(ins, "all_gather");
    auto ho = down(outs.at(0), "all_gather");
    auto lists = std::make_shared<std::vector<std::vector<Tensor>>>(1, *ho);
    auto work = inner_->allgather(*lists, *h, o);
    return made(c10d::OpType::ALLGATHER, work, ho, outs[0], 1, [lists, h] {});
  }
  c10::intrusive_ptr<c10d::Work> _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions& o) override {
    std::vector<Tensor> is{in}, os{out};
    auto hi = down(is, "all_gather_into_tensor"), ho = down(os, "all_gather_into_tensor");
    return made(c10d::OpType::_ALLGATHER_BASE, inner_->_allgather_base((*ho)[0], (*hi)[0], o), ho, os, 1, [hi] {});
  }
  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(std::vector<Tensor>& outs, std::vector<Tensor>& ins, const c10d::AllgatherOptions& o) override {
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    for (size_t i = 0; i < ins.size(); i++) works.push_back(_allgather_base(outs[i], ins[i], o));
    return joined(works, outs);
  }
  c10::intrusive_ptr<c10d::Work> reduce_scatter(std::vector<Tensor>& outs, std::vector<std::vector<Tensor>>& ins, const c10d::ReduceScatterOptions& o) override {
    auto ho = down(outs, "reduce_scatter"), hi = down(ins.at(0), "reduce_scatter");
    auto flat = std::make_shared<Tensor>(at::cat([&] { std::vector<Tensor> f; for (auto& t : *hi) f.push_back(t.flatten()); return f; }()));
    auto options = o;
    auto by = scale(options.reduceOp, *hi);
    auto out = std::make_shared<Tensor>((*ho)[0].flatten());
    return made(c10d::OpType::REDUCE_SCATTER, inner_->_reduce_scatter_base(*out, *flat, options), ho, outs, by, [out, flat, ho] { (*ho)[0].copy_(out->view_as((*ho)[0])); });
  }
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(Tensor& out, Tensor& in, const c10d::ReduceScatterOptions& o) override {
    std::vector<Tensor> is{in}, os{out};
    auto hi = down(is, "reduce_scatter_tensor"), ho = down(os, "reduce_scatter_tensor");
    auto options = o;
    auto by = scale(options.reduceOp, *hi);
    return made(c10d::OpType::_REDUCE_SCATTER_BASE, inner_->_reduce_scatter_base((*ho)[0], (*hi)[0], options), ho, os, by, [hi] {});
  }
  c10::intrusive_ptr<c10d::Work> reduce_scatter_tensor_coalesced(std::vector<Tensor>& outs, std::vector<Tensor>& ins, const c10d::ReduceScatterOptions& o) override {
    std::vector<c10::intrusive_ptr<c10d::Work>> works;
    for (size_t i = 0; i < ins.size(); i++) works.push_back(_reduce_scatter_base(outs[i], ins[i], o));
    return joined(works, outs);
  }
  c10::intrusive_ptr<c10d::Work> gather(std::vector<std::vector<Tensor>>& outs, std::vector<Tensor>& ins, const c10d::GatherOptions& o) override {
    auto h = down(ins, "gather");
    auto ho = outs.empty() ? std::make_shared<std::vector<Tensor>>() : down(outs[0], "gather");
    auto lists = std::make_shared<std::vector<std::vector<Tensor>>>();
    if (!outs.empty()) lists->push_back(*ho);
    return made(c10d::OpType::GATHER, inner_->gather(*lists, *h, o), ho, outs.empty() ? std::vector<Tensor>() : outs[0], 1, [lists, h] {});
  }
  c10::intrusive_ptr<c10d::Work> scatter(std::vector<Tensor>& outs, std::vector<std::vector<Tensor>>& ins, const c10d::ScatterOptions& o) override {
    auto ho = down(outs, "scatter");
    auto lists = std::make_shared<std::vector<std::vector<Tensor>>>();
    if (!ins.empty()) lists->push_back(*down(ins[0], "scatter"));
    return made(c10d::OpType::SCATTER, inner_->scatter(*ho, *lists, o), ho, outs, 1, [lists] {});
  }
  c10::intrusive_ptr<c10d::Work> alltoall_base(Tensor& out, Tensor& in, std::vector<int64_t>& os_, std::vector<int64_t>& is_, const c10d::AllToAllOptions& o) override {
    std::vector<Tensor> is{in}, os{out};
    auto hi = down(is, "all_to_all"), ho = down(os, "all_to_all");
    return made(c10d::OpType::ALLTOALL_BASE, inner_->alltoall_base((*ho)[0], (*hi)[0], os_, is_, o), ho, os, 1, [hi] {});
  }
  c10::intrusive_ptr<c10d::Work> send(std::vector<Tensor>& ts, int to, int tag) override {
    auto h = down(ts, "send", false);
    return made(c10d::OpType::SEND, inner_->send(*h, to, tag), std::make_shared<std::vector<Tensor>>(), {}, 1, [h] {});
  }
  c10::intrusive_ptr<c10d::Work> recv(std::vector<Tensor>& ts, int from, int tag) override {
    auto h = down(ts, "recv", false);
    return made(c10d::OpType::RECV, inner_->recv(*h, from, tag), h, ts);
  }
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& o) override {
    sequence_++;
    return inner_->barrier(o);
  }
  void abort() override {}
  void shutdown() override {}
  py::object options() { return options_; }
  c10::intrusive_ptr<c10d::Backend> inner_;

 private:
  using List = std::shared_ptr<std::vector<Tensor>>;
  // NCCL refuses two ranks on one GPU; found out at the first collective, as there.
  void meet(at::Device d) {
    if (met_) return;
    met_ = true;
    device_ = d;
    char host[256] = {};
    gethostname(host, 255);
    const char* other = getenv("NCCL_HOSTID");
    int64_t mine = (int64_t)(std::hash<std::string>()(other ? other : host) << 8) | (d.index() & 255);
    std::vector<Tensor> in{at::full({1}, mine, at::kLong)};
    std::vector<std::vector<Tensor>> out(1);
    for (int i = 0; i < size_; i++) out[0].push_back(at::zeros({1}, at::kLong));
    inner_->allgather(out, in, {})->wait();
    for (int i = 0; i < size_; i++)
      TORCH_CHECK(i == rank_ || out[0][i].item<int64_t>() != mine, "NCCL error: invalid usage. Duplicate GPU detected : rank ", rank_, " and rank ", i, " both on CUDA device ", int(d.index()));
  }
  List down(std::vector<Tensor>& ts, const char* what, bool collective = true) {
    static const std::set<at::ScalarType> known = {at::kChar, at::kByte, at::kBool, at::kInt, at::kLong, at::kHalf, at::kBFloat16, at::kFloat, at::kDouble, at::kComplexFloat, at::kComplexDouble, at::kFloat8_e4m3fn, at::kFloat8_e5m2};
    auto h = std::make_shared<std::vector<Tensor>>();
    for (auto& t : ts) {
      TORCH_CHECK(t.device().type() == kDev, "Tensors must be CUDA and dense (", what, " of ", t.device(), ")");
      TORCH_CHECK(!device_ || *device_ == t.device() || !met_, "Expected all tensors of this group on ", *device_, ", got ", t.device(), " (", what, ")");
      TORCH_CHECK(t.is_contiguous() || t.is_non_overlapping_and_dense(), "Tensors must be contiguous (", what, ")");
      TORCH_CHECK(known.count(t.scalar_type()), "Input tensor data type is not supported for NCCL process group: ", t.scalar_type());
      auto flat = t.is_contiguous() ? t : t.as_strided({t.numel()}, {1}, t.storage_offset());
      auto host = alias_cpu(flat).clone();
      h->push_back(host.is_complex() ? at::view_as_real(host) : host);
    }
    if (collective && !ts.empty()) meet(ts[0].device());
    sequence_++;
    return h;
  }
  double scale(c10d::ReduceOp& op, std::vector<Tensor>& h) {
    if (op == c10d::ReduceOp::AVG) {
      op = c10d::ReduceOp(c10d::ReduceOp::SUM);
      return 1.0 / size_;
    }
    if (op == c10d::ReduceOp::PREMUL_SUM) {
      auto* more = dynamic_cast<c10d::PreMulSumSupplement*>(op.supplement_.get());
      for (auto& t : h) t.mul_(more->tensor_factor.defined() ? host_of(more->tensor_factor).item<double>() : more->double_factor);
      op = c10d::ReduceOp(c10d::ReduceOp::SUM);
    }
    return 1;
  }
  c10::intrusive_ptr<c10d::Work> made(c10d::OpType type, c10::intrusive_ptr<c10d::Work> inner, List host, std::vector<Tensor> to, double by = 1, std::function<void()> before = nullptr) {
    auto work = c10::make_intrusive<Work>(type, inner, [host, to, by, before] {
      if (before) before();
      for (size_t i = 0; i < to.size(); i++) {
        auto& t = to[i];
        auto value = by == 1 ? (*host)[i] : (*host)[i].mul(by);
        auto flat = t.is_contiguous() ? t : t.as_strided({t.numel()}, {1}, t.storage_offset());
        auto there = alias_cpu(flat);
        if (there.is_complex()) there = at::view_as_real(there);
        there.copy_(value.view_as(there));
      }
    }, to);
    if (group_) group_->push_back(work);
    return work;
  }
  c10::intrusive_ptr<c10d::Work> joined(std::vector<c10::intrusive_ptr<c10d::Work>> works, std::vector<Tensor> outs) {
    auto any = works.back();
    return c10::make_intrusive<Work>(c10d::OpType::COALESCED, any, [works] { for (auto& one : works) one->wait(kNoTimeout); }, outs);
  }
  py::object options_;
  std::optional<at::Device> device_;
  std::optional<std::vector<c10::intrusive_ptr<c10d::Work>>> group_;
  bool met_ = false;
  std::atomic<uint64_t> sequence_{0};
};

// -- installing ------------------------------------------------------------------------------------------------------

}  // namespace sim
namespace c10d {
// DDP measures its passes with events of the device.
class SimTimer final : public Timer {
 public:
  explicit SimTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event start, Event end) override { return getTimeRef(end) - getTimeRef(start); }
};
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, SimTimer)
}  // namespace c10d
namespace sim {
static Guard g_guard;
static void install(int count, size_t limit) {
  g_count = std::min(count, kMost);
  g_limit = limit;
  c10::impl::device_guard_impl_registry[(size_t)kDev].store(&g_guard);
  c10::SetAllocator(kDev, &g_memory, 255);
  at::setHostAllocator(kDev, &g_host, 255);
  // torch keeps the hooks that it found first, and asks for them before this is loaded.
  new ((void*)&at::detail::getCUDAHooks()) Hooks();
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose_attention);
  pthread_atfork(nullptr, nullptr, &after_fork);
}

}  // namespace sim

PYBIND11_MODULE(_sim, m) {
  m.def("install", &sim::install);
  m.def("init", &sim::ensure);
  m.def("is_initialized", [] { return sim::g_init; });
  m.def("is_in_bad_fork", [] { return sim::g_bad_fork; });
  m.def("count", [] { return sim::g_count; });
  m.def("set_count", [](int n) { sim::g_count = n; });
  m.def("device", [] { return (int)sim::t_device; });
  m.def("set_device", [](int d) { if (d >= 0) { sim::check_index(d); sim::t_device = d; } });
  m.def("exchange_device", [](int d) { int old = sim::t_device; if (d >= 0) { sim::check_index(d); sim::t_device = d; } return old; });
  m.def("used", [](int d) { return sim::g_dev[d].used; });
  m.def("peak", [](int d) { return sim::g_dev[d].peak; });
  m.def("reset_peak", [](int d) { sim::g_dev[d].peak = sim::g_dev[d].used; });
  m.def("limit", [] { return sim::g_limit; });
  m.def("set_limit", [](size_t n) { sim::g_limit = n; });
  m.def("syncs", [] { return sim::g_syncs.load(); });
  m.def("kernels", [] { return sim::g_kernels.load(); });
  m.def("set_lazy", [](bool on) { sim::g_is_lazy = on; });
  m.def("on_sync", [](py::object f) { auto* old = sim::g_on_sync; sim::g_on_sync = f.is_none() ? nullptr : new py::object(f); (void)old; });
  m.def("resize_storage", [](const at::Tensor& t, size_t n) { sim::resize_bytes(t.storage().unsafeGetStorageImpl(), n); });
  m.def("default_generator", [](int d) { return sim::default_generator(d); });
  py::module::import("torch.distributed");
  py::class_<sim::NCCL, c10::intrusive_ptr<sim::NCCL>, c10d::Backend>(m, "NCCLBase")
      .def(py::init([](c10::intrusive_ptr<c10d::Backend> inner, int rank, int size, py::object o) { return c10::make_intrusive<sim::NCCL>(inner, rank, size, o); }))
      .def_property_readonly("options", &sim::NCCL::options)
      .def_property_readonly("uid", [](sim::NCCL&) { return 0; });
}
