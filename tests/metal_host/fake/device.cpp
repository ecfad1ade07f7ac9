// mlx::core::metal::Device and CommandEncoder of MLX 0.32.4 on the host. A dispatch becomes a task
// of MLX's CPU stream, which runs the kernel under the fibre runtime; whatever that or these
// functions find wrong becomes an exception, which MLX hands to Python.
#include <dlfcn.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <sstream>
#include <stdexcept>

#include "../runtime/runtime.h"
#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/backend/metal/device.h"

namespace {

using metal_host::Access;
using metal_host::BoundBuffer;
using metal_host::Dispatch;
using MTL::Binding;

[[noreturn]] void fail(const std::string& text) {
  throw std::runtime_error("[metal emulated] " + text);
}

/// Output of `python -m tests.metal_host.build ...`, where the real device calls Apple's compiler.
std::string run_builder(const std::string& arguments) {
  const std::string command = "cd '" METAL_HOST_ROOT "' && '" METAL_HOST_PYTHON
                              "' -m tests.metal_host.build " +
                              arguments + " 2>&1";
  FILE* pipe = popen(command.c_str(), "r");
  if (pipe == nullptr) fail("cannot run " + command);
  std::string output;
  for (int c; (c = fgetc(pipe)) != EOF;) output += static_cast<char>(c);
  if (pclose(pipe) != 0) fail("a kernel does not compile:\n" + output);
  while (!output.empty() && output.back() == '\n') output.pop_back();
  return output;
}

struct Runtime {
  const char* (*dispatch)(const Dispatch*, metal_host::Statistics*);
  uint64_t* function_constants;
  std::filesystem::path compiled;  // folder of compiled kernels
};

/// The runtime of tests/metal_host, shared with the ctypes dispatcher: kernels resolve their calls
/// against it.
const Runtime& runtime() {
  static const Runtime loaded = [] {
    const std::string printed = run_builder("runtime");
    const size_t line = printed.find('\n');
    void* handle = dlopen(printed.substr(0, line).c_str(), RTLD_NOW | RTLD_GLOBAL);
    if (handle == nullptr) fail(dlerror());
    return Runtime{reinterpret_cast<decltype(Runtime::dispatch)>(dlsym(handle, "mtlh_dispatch")),
                   static_cast<uint64_t*>(dlsym(handle, "mtlh_fc_table")),
                   printed.substr(line + 1)};
  }();
  return loaded;
}

double setting(const char* name, double fallback) {
  const char* text = std::getenv(name);
  return text == nullptr ? fallback : std::atof(text);
}

/// The bytes that a kernel may touch: those of the array, and no more than were allocated.
Binding bind(const mlx::core::array& a, int64_t offset, Binding::Kind kind) {
  if (a.size() == 0) return {kind, {}, nullptr, 0, nullptr};
  if (a.data_shared_ptr() == nullptr) fail("an array was bound that has no buffer");
  auto buffer = a.buffer();
  char* begin = static_cast<char*>(buffer.raw_ptr());
  char* data = const_cast<char*>(a.data<char>()) + offset;
  const size_t allocated = mlx::core::allocator::allocator().size(buffer) - (data - begin);
  const size_t declared = a.data_size() * a.itemsize() - offset;
  return {kind, {}, data, std::min(allocated, declared), begin};
}

/// Whether this is the first time that an output's buffer is bound, and nobody shares it: then it
/// gets filled with NaN, so that whatever the kernels leave unwritten is seen.
bool is_fresh(const mlx::core::array& a) {
  static std::map<const void*, std::weak_ptr<mlx::core::array::Data>> seen;
  const auto& data = a.data_shared_ptr();
  auto& entry = seen[data.get()];
  if (data.use_count() != 1 || entry.lock() == data) return false;
  entry = data;
  constexpr size_t kMostSeen = 1000;
  if (seen.size() > kMostSeen)
    std::erase_if(seen, [](const auto& s) { return s.second.expired(); });
  return true;
}

/// A snapshot of the encoder's state, as the command buffer would hold it.
struct Command {
  MTL::ComputeCommandEncoder state;
  MTL::Size threads, group;

  void check() const {
    const auto* pipeline = state.pipeline;
    if (pipeline == nullptr) fail("dispatch without a pipeline state");
    const size_t n = group.width * group.height * group.depth;
    if (n == 0 || n > pipeline->max_threads) {
      fail(pipeline->name + ": a threadgroup of " + std::to_string(n) + " threads");
    }
    if (threads.width * threads.height * threads.depth == 0)
      fail(pipeline->name + ": an empty grid");
    for (int i : pipeline->buffers) check_binding(i);
    for (size_t bytes : state.threadgroup_memory) {
      if (bytes % 16 != 0)
        fail(pipeline->name + ": threadgroup memory must be a multiple of 16 bytes");
    }
  }

  void check_binding(int index) const {
    const std::string where = state.pipeline->name + ": buffer(" + std::to_string(index) + ")";
    const Binding& b = state.bindings[index];
    if (b.kind == Binding::Kind::kNone) fail(where + " is not bound");
    constexpr size_t kMostBytes = 4096;
    if (b.kind == Binding::Kind::kBytes && b.size > kMostBytes)
      fail(where + ": setBytes takes at most 4 KiB");
    if (b.kind != Binding::Kind::kOutput && b.kind != Binding::Kind::kInOut) return;
    // Metal's compiler assumes that buffer arguments do not alias.
    for (int other : state.pipeline->buffers) {
      const Binding& o = state.bindings[other];
      if (other == index || o.address == nullptr) continue;
      if (o.address < b.address + b.size && b.address < o.address + o.size) {
        fail(where + " is written and overlaps buffer(" + std::to_string(other) + ")");
      }
    }
  }

  void run() const {
    const auto& pipeline = *state.pipeline;
    std::vector<BoundBuffer> buffers;
    for (int i : pipeline.buffers) {
      const Binding& b = state.bindings[i];
      const bool bytes = b.kind == Binding::Kind::kBytes;
      const void* address = bytes ? static_cast<const void*>(b.bytes.data()) : b.address;
      const bool written = b.kind == Binding::Kind::kOutput || b.kind == Binding::Kind::kInOut;
      // Several dispatches may write one output, so "all of it written" is not asked of each:
      // set_output_array filled the buffer with NaN instead.
      buffers.push_back({reinterpret_cast<uint64_t>(address), b.size, i,
                         written ? Access::kInOut : Access::kInput,
                         reinterpret_cast<uint64_t>(bytes ? address : b.allocation)});
    }
    Dispatch job{};
    job.function = reinterpret_cast<metal_host::KernelFunction>(pipeline.function);
    const auto set = [](uint32_t* to, const MTL::Size& from) {
      to[0] = from.width, to[1] = from.height, to[2] = from.depth;
    };
    set(job.threads, threads);
    set(job.threadgroup, group);
    job.buffers = buffers.data();
    job.num_buffers = buffers.size();
    for (int i = 0; i < MTL::ComputeCommandEncoder::kBuffers; ++i) {
      job.threadgroup_memory[i] = state.threadgroup_memory[i];
    }
    job.threadgroup_memory_limit = 32768;
    job.seed = static_cast<uint64_t>(setting("METAL_HOST_SEED", 1));
    job.fuzz = static_cast<float>(setting("METAL_HOST_FUZZ", 0));
    job.options = metal_host::kCheckRaces | metal_host::kStrict;
    job.shuffle = 1;
    job.max_accesses = 2'000'000'000;

    static std::mutex one_at_a_time;
    std::lock_guard lock(one_at_a_time);
    memset(runtime().function_constants, 0, 256 * sizeof(uint64_t));
    for (const auto& [i, value] : pipeline.constants) runtime().function_constants[i] = value;
    metal_host::Statistics statistics;
    const std::string issues = runtime().dispatch(&job, &statistics);
    if (!issues.empty()) fail(pipeline.name + "\n" + issues);
  }
};

std::map<mlx::core::metal::CommandEncoder*, mlx::core::Stream>& streams() {
  static std::map<mlx::core::metal::CommandEncoder*, mlx::core::Stream> all;
  return all;
}

}  // namespace

namespace mlx::core::metal {

ResidencySets::ResidencySets(MTL::Device*) {}
ResidencySets::~ResidencySets() = default;

CommandEncoder::CommandEncoder(Device& d, int, ResidencySets& r) : device_(d), residency_sets_(r) {}
CommandEncoder::~CommandEncoder() = default;

MTL::ComputeCommandEncoder* CommandEncoder::get_command_encoder() {
  if (!encoder_) encoder_ = NS::TransferPtr(new MTL::ComputeCommandEncoder);
  return encoder_.get();
}

void CommandEncoder::set_input_array(const array& a, int index, int64_t offset) {
  get_command_encoder()->bindings[index] = bind(a, offset, Binding::Kind::kInput);
  temporaries_.push_back(a);
}

void CommandEncoder::set_output_array(array& a, int index, int64_t offset) {
  Binding b = bind(a, offset, Binding::Kind::kOutput);
  if (b.address != nullptr && is_fresh(a)) memset(b.address, 0xff, b.size);
  get_command_encoder()->bindings[index] = b;
  temporaries_.push_back(a);
}

void CommandEncoder::add_temporary(array a) {
  temporaries_.push_back(std::move(a));
}

void CommandEncoder::dispatch_threadgroups(MTL::Size groups, MTL::Size group) {
  dispatch_threads(MTL::Size(groups.width * group.width, groups.height * group.height,
                             groups.depth * group.depth),
                   group);
}

void CommandEncoder::dispatch_threads(MTL::Size threads, MTL::Size group) {
  Command command{*get_command_encoder(), threads, group};
  command.check();
  auto& encoder = cpu::get_command_encoder(streams().at(this));
  encoder.dispatch(
      [command = std::move(command), keep_alive = std::move(temporaries_)] { command.run(); });
  temporaries_.clear();
}

Device::Device()
    : residency_sets_(nullptr),
      arch_("applegpu_g13d"),
      arch_gen_(13),
      max_ops_per_buffer_(50),
      max_mb_per_buffer_(50) {}
Device::~Device() = default;

MTL::Library* Device::get_library(const std::string& name, const CompileOptions&,
                                  const std::function<std::string(void)>& builder) {
  std::lock_guard lock(library_mtx_);
  if (auto it = library_map_.find(name); it != library_map_.end()) return it->second.get();
  const std::string source = builder();
  for (unsigned char c : source) {
    if (c >= 128) fail(name + ": the source is not ASCII, which Metal's NSString encoding needs");
  }
  // Kernels resolve their calls against the runtime, which is loaded here.
  const std::string stem = (runtime().compiled / name).string();
  if (!std::filesystem::exists(stem + ".so")) {  // the name has a hash of the source
    std::ofstream(stem + ".metal") << source;
    run_builder("kernels '" + stem + ".metal' '" + stem + "'");
  }
  void* handle = dlopen((stem + ".so").c_str(), RTLD_NOW);
  if (handle == nullptr) fail(dlerror());
  std::ifstream table(stem + ".txt");
  std::ostringstream kernels;
  kernels << table.rdbuf();
  auto* library = new MTL::Library{handle, kernels.str()};
  library_map_.insert({name, NS::TransferPtr(library)});
  return library;
}

MTL::Library* Device::get_library(const std::string&, const std::string&) {
  fail("a metallib cannot be emulated");
}

MTL::ComputePipelineState* Device::get_kernel(const std::string& base_name, MTL::Library* library,
                                              const std::string& hash_name,
                                              const MTLFCList& constants,
                                              const std::vector<MTL::Function*>&) {
  std::lock_guard lock(kernel_mtx_);
  const std::string& key = hash_name.empty() ? base_name : hash_name;
  auto& known = library_kernels_[library];
  if (auto it = known.find(key); it != known.end()) return it->second.get();
  auto* pipeline = new MTL::ComputePipelineState;
  std::istringstream table(library->kernels);
  for (std::string line; std::getline(table, line);) {
    std::istringstream fields(line);
    std::string name, symbol;
    fields >> name >> symbol;
    if (name != base_name) continue;
    pipeline->function = dlsym(library->handle, symbol.c_str());
    for (int index; fields >> index;) pipeline->buffers.push_back(index);
  }
  if (pipeline->function == nullptr) fail("there is no kernel " + base_name);
  pipeline->name = key;
  for (const auto& [value, type, index] : constants) {
    uint64_t bits = 0;
    memcpy(&bits, value, type == MTL::DataTypeBool ? 1 : 4);
    pipeline->constants.push_back({static_cast<int>(index), bits});
  }
  known.insert({key, NS::TransferPtr(pipeline)});
  return pipeline;
}

Device& device(mlx::core::Device) {
  static auto* the_device = new Device;
  return *the_device;
}

CommandEncoder& get_command_encoder(Stream s) {
  static std::mutex mutex;
  static std::map<int, CommandEncoder*> encoders;
  std::lock_guard lock(mutex);
  auto& encoder = encoders[s.index];
  if (encoder == nullptr) {
    auto& d = device(s.device);
    encoder = new CommandEncoder(d, s.index, d.residency_sets());
    streams().insert({encoder, s});
  }
  return *encoder;
}

}  // namespace mlx::core::metal
