// Torch's operations on the device.
//
// An operation without a kernel of its own comes to `fallback`. Its outputs' shapes are found on
// `meta`, their memory is allocated, and a job with CPU tensors over the same bytes goes to the
// current stream. So the host runs ahead, as on a card. It waits where CUDA's does: where an
// operation returns a number, where a shape depends on data, at copies to pageable memory.
#include "glass.h"

#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/op_registration/op_registration.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorShape.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Exceptions.h>
#include <torch/library.h>

#include <atomic>

namespace glass {

uint64_t next_seed(const at::Generator& generator); // device.cpp

namespace {

using c10::IValue;
using Stack = torch::jit::Stack;

// Jobs compute like a program without autograd, modes or inference tensors, whoever does them.
struct Plain {
  c10::impl::ForceDispatchKeyGuard keys{
      c10::impl::LocalDispatchKeySet(c10::impl::PODLocalDispatchKeySet{}).included_,
      c10::autograd_dispatch_keyset_with_ADInplaceOrView};
};

bool is_glass(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kGlass;
}

// Bytes from the first to the last element.
std::pair<Address, Address> span_of(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return {0, 0};
  auto begin = reinterpret_cast<Address>(tensor.const_data_ptr());
  int64_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  return {begin, begin + size_t(last + 1) * tensor.element_size()};
}

at::Tensor over(void* memory, const at::Tensor& like) {
  // torch's own default for such tensors asks for a device of the pointer
  return at::from_blob(
      memory, like.sizes(), like.strides(), [](void*) {},
      at::TensorOptions().dtype(like.dtype()).device(at::kCPU), at::Device(at::kCPU));
}

} // namespace

at::Tensor twin_of(const at::Tensor& tensor) {
  c10::InferenceMode off(false);
  Plain plain;
  auto [begin, end] = span_of(tensor);
  char* memory = begin == end ? nullptr : inside(begin, end - begin, "a kernel's argument");
  at::Tensor made = over(memory, tensor);
  if (tensor.is_conj()) made._set_conj(true);
  if (tensor.is_neg()) made._set_neg(true);
  return made;
}

Access access_of(const at::Tensor& tensor, bool writes) {
  auto [begin, end] = span_of(tensor);
  size_t bytes = size_t(tensor.numel()) * tensor.element_size();
  return {begin, end, writes, bytes >= end - begin};
}

namespace {

// Operations that touch only some elements of these arguments, by their numbers.
bool touches_some(const std::string& name) {
  static const char* const kinds[] = {"index", "gather", "scatter", "embedding", "masked_",
                                      "take", "put_", "slice_scatter", "select_scatter"};
  for (const char* kind : kinds)
    if (name.find(kind) != std::string::npos) return true;
  return false;
}

// How an operation runs, found once for each.
struct Plan {
  std::string name;
  bool is_index = false;
  bool has_out = false;
  bool waits = false;   // returns something else than tensors
  std::atomic<bool> has_meta{true}; // as far as known
  bool touches_some = false;
  std::vector<bool> writes;          // for each argument
  std::vector<int> returns_argument; // for each return: the argument that it is, or -1
};

void fill(Plan& plan, const c10::FunctionSchema& schema) {
  plan.name = schema.name();
  if (plan.name.rfind("aten::", 0) == 0) plan.name = plan.name.substr(6);
  plan.is_index = plan.name.rfind("index", 0) == 0 || plan.name.rfind("_index", 0) == 0;
  plan.has_out = schema.overload_name().find("out") != std::string::npos;
  if (!schema.overload_name().empty()) plan.name += "." + schema.overload_name();
  plan.touches_some = touches_some(schema.name());
  for (const auto& argument : schema.arguments())
    plan.writes.push_back(argument.alias_info() && argument.alias_info()->isWrite());
  for (const auto& made : schema.returns()) {
    int which = -1;
    if (made.alias_info()) {
      for (size_t i = 0; i < schema.arguments().size(); ++i) {
        const auto* info = schema.arguments()[i].alias_info();
        if (info && info->beforeSets() == made.alias_info()->beforeSets()) which = int(i);
      }
    }
    plan.returns_argument.push_back(which);
    auto kind = made.type()->kind();
    bool is_tensor = kind == c10::TypeKind::TensorType ||
        (kind == c10::TypeKind::ListType &&
         made.type()->expectRef<c10::ListType>().getElementType()->kind() ==
             c10::TypeKind::TensorType);
    if (!is_tensor) plan.waits = true;
  }
}

// Plans are never removed; `has_meta` may only become false.
Plan& plan_for(const c10::FunctionSchema& schema) {
  static auto* mutex = new std::mutex;
  static auto* plans = new std::unordered_map<const c10::FunctionSchema*, std::unique_ptr<Plan>>;
  std::lock_guard<std::mutex> lock(*mutex);
  std::unique_ptr<Plan>& plan = (*plans)[&schema];
  if (!plan) {
    plan = std::make_unique<Plan>();
    fill(*plan, schema);
  }
  return *plan;
}

using OnTensor = std::function<at::Tensor(const at::Tensor&)>;

// Applies a function to each tensor of an argument, and leaves everything else.
IValue mapped(const IValue& value, const OnTensor& on_tensor) {
  if (value.isTensor()) {
    const at::Tensor& tensor = value.toTensor();
    return tensor.defined() ? IValue(on_tensor(tensor)) : value;
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> made;
    for (const at::Tensor& tensor : value.toTensorVector())
      made.push_back(tensor.defined() ? on_tensor(tensor) : tensor);
    return made;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> made;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
      made.push_back(
          tensor && tensor->defined() ? std::optional(on_tensor(*tensor)) : tensor);
    return made;
  }
  if (value.isList() && !value.isIntList() && !value.isDoubleList() && !value.isBoolList()) {
    auto list = value.toList();
    bool has_tensors = false;
    for (const IValue& each : list) has_tensors = has_tensors || each.isTensor();
    if (!has_tensors) return value;
    c10::impl::GenericList made(list.elementType());
    for (const IValue& each : list) made.push_back(mapped(each, on_tensor));
    return made;
  }
  return value;
}

void each_tensor(const IValue& value, const std::function<void(const at::Tensor&)>& visit) {
  mapped(value, [&](const at::Tensor& tensor) {
    visit(tensor);
    return tensor;
  });
}

at::Tensor as_meta(const at::Tensor& tensor) {
  at::Tensor made = at::empty_strided(
      tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta).pinned_memory(false));
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number())
    made.unsafeGetTensorImpl()->set_wrapped_number(true);
  if (tensor.is_conj()) made._set_conj(true);
  if (tensor.is_neg()) made._set_neg(true);
  return made;
}

at::Tensor made_like(const at::Tensor& meta, int device) {
  return at::empty_strided(
      meta.sizes(), meta.strides(),
      meta.options().device(c10::Device(kGlass, c10::DeviceIndex(device))));
}

bool is_mask(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte;
}

void resize(const at::Tensor& tensor, at::IntArrayRef sizes, at::IntArrayRef strides);

// The arguments of the job: CPU tensors over the device's bytes, values of host scalars.
Stack job_arguments(const Stack& arguments, const c10::FunctionSchema& schema) {
  c10::InferenceMode off(false);
  Plain plain;
  Stack made;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const IValue& value = arguments[i];
    if (value.isDevice()) {
      made.emplace_back(c10::Device(at::kCPU));
    } else if (value.isGenerator()) {
      made.emplace_back(value); // replaced in the job
    } else {
      made.push_back(mapped(value, [&](const at::Tensor& tensor) {
        if (is_glass(tensor)) return twin_of(tensor);
        if (tensor.device().is_cpu()) {
          at::Tensor copy = tensor.detach().clone(); // a kernel gets the value at the launch
          if (tensor.unsafeGetTensorImpl()->is_wrapped_number())
            copy.unsafeGetTensorImpl()->set_wrapped_number(true);
          return copy;
        }
        TORCH_CHECK(false, schema.name(), ": tensors on ", tensor.device(), " and on glass");
      }));
    }
  }
  return made;
}

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  const auto& schema = op.schema();
  const size_t count = schema.arguments().size();
  Plan& plan = plan_for(schema);
  const std::string& name = plan.name;
  Stack arguments(stack->end() - ptrdiff_t(count), stack->end());

  // the device, and what torch would refuse
  int device = -1;
  bool has_mask = false;
  for (size_t i = 0; i < count; ++i) {
    if (arguments[i].isDevice() && arguments[i].toDevice().type() == kGlass && device < 0) {
      device = arguments[i].toDevice().index();
      if (device < 0) device = current_device();
    }
    each_tensor(arguments[i], [&](const at::Tensor& tensor) {
      if (is_glass(tensor)) {
        TORCH_CHECK(
            device < 0 || device == tensor.device().index(), "Expected all tensors to be on the "
            "same device, but found at least two devices, glass:", device, " and ",
            tensor.device(), " (", name, ")");
        device = tensor.device().index();
      }
    });
  }
  for (size_t i = 0; i < count; ++i)
    each_tensor(arguments[i], [&](const at::Tensor& tensor) {
      if (plan.is_index && arguments[i].isList() && is_mask(tensor)) has_mask = true;
      TORCH_CHECK(
          is_glass(tensor) || tensor.dim() == 0 || plan.is_index,
          "Expected all tensors to be on the same device, but found at least two devices, glass:",
          device, " and ", tensor.device(), " (", name, ")");
    });
  TORCH_CHECK(device >= 0, "glass: ", name, " has no argument on the device");
  c10::DeviceGuard guard(c10::Device(kGlass, c10::DeviceIndex(device)));
  StreamState* stream = current(device);

  // shapes
  bool knows = plan.has_meta && !plan.waits && !has_mask;
  Stack found;
  std::vector<at::Tensor> metas; // of arguments that are written, to see whether they grow
  if (knows) {
    Stack shapes;
    for (size_t i = 0; i < count; ++i) {
      const IValue& value = arguments[i];
      if (value.isDevice()) {
        shapes.emplace_back(c10::Device(at::kMeta));
      } else if (value.isGenerator()) {
        shapes.emplace_back();
      } else {
        shapes.push_back(mapped(value, [&](const at::Tensor& tensor) {
          bool stays = !is_glass(tensor) && tensor.dim() == 0;
          return stays ? tensor : as_meta(tensor);
        }));
      }
    }
    Stack kept = shapes;
    try {
      op.callBoxed(&shapes);
      found = std::move(shapes);
      for (size_t i = 0; i < count; ++i) {
        if (!plan.writes[i]) continue;
        std::vector<at::Tensor> own, meta;
        each_tensor(arguments[i], [&](const at::Tensor& tensor) { own.push_back(tensor); });
        each_tensor(kept[i], [&](const at::Tensor& tensor) { meta.push_back(tensor); });
        for (size_t j = 0; j < own.size(); ++j)
          if (is_glass(own[j]) && own[j].sizes() != meta[j].sizes())
            resize(own[j], meta[j].sizes(), meta[j].strides());
      }
    } catch (const c10::NotImplementedError&) {
      knows = false;
    } catch (python_error& error) {
      // many shapes are found by functions in Python
      pybind11::gil_scoped_acquire held;
      if (!PyErr_GivenExceptionMatches(error.type, PyExc_NotImplementedError)) throw;
      knows = false;
    } catch (pybind11::error_already_set& error) {
      pybind11::gil_scoped_acquire held;
      if (!error.matches(PyExc_NotImplementedError)) throw;
      knows = false;
    }
    if (!knows) plan.has_meta = false;
  }

  // accesses
  std::vector<Access> accesses;
  for (size_t i = 0; i < count; ++i)
    each_tensor(arguments[i], [&](const at::Tensor& tensor) {
      if (!is_glass(tensor) || tensor.numel() == 0) return;
      Access access = access_of(tensor, plan.writes[i]);
      if (plan.touches_some && !(plan.writes[i] && plan.has_out))
        access.whole = false;
      accesses.push_back(access);
    });

  // outputs
  Stack results;
  std::vector<std::pair<size_t, at::Tensor>> outputs; // place among the CPU results, tensor
  if (knows) {
    for (size_t i = 0; i < schema.returns().size(); ++i) {
      int which = plan.returns_argument[i];
      if (which >= 0) {
        TORCH_CHECK(
            plan.writes[size_t(which)], "glass: ", name, " returns a view, and has no kernel here");
        results.push_back(arguments[size_t(which)]);
        continue;
      }
      results.push_back(mapped(found[i], [&](const at::Tensor& meta) {
        at::Tensor made = made_like(meta, device);
        if (made.numel() > 0) accesses.push_back(access_of(made, true));
        return made;
      }));
    }
  }

  Stack inputs = job_arguments(arguments, schema);
  std::optional<std::pair<size_t, uint64_t>> random;
  std::optional<at::Generator> generator;
  for (size_t i = 0; i < count; ++i) {
    bool takes = schema.arguments()[i].name() == "generator";
    if (!takes) continue;
    generator = arguments[i].isGenerator()
        ? arguments[i].toGenerator()
        : at::detail::getPrivateUse1Hooks().getDefaultGenerator(c10::DeviceIndex(device));
    random = {i, 0};
  }
  const bool is_captured = stream->capture != 0;
  if (random && !is_captured) random->second = next_seed(*generator);

  auto call = [op, inputs, random, generator, is_captured]() -> Stack {
    c10::InferenceMode off(false);
    Plain plain;
    Stack own = inputs;
    if (random) {
      // a replay draws anew
      uint64_t seed = is_captured ? next_seed(*generator) : random->second;
      own[random->first] = at::detail::createCPUGenerator(seed);
    }
    op.callBoxed(&own);
    return own;
  };

  if (!knows && !plan.waits && !has_mask) {
    bool is_in_place = true;
    for (int which : plan.returns_argument) is_in_place = is_in_place && which >= 0;
    if (is_in_place && !schema.returns().empty()) {
      launch(stream, name, [call] { call(); }, std::move(accesses));
      for (int which : plan.returns_argument) results.push_back(arguments[size_t(which)]);
      torch::jit::drop(*stack, count);
      for (IValue& value : results) stack->push_back(std::move(value));
      return;
    }
  }
  if (!knows) {
    Stack made;
    launch_and_wait(stream, name, [&] { made = call(); }, std::move(accesses));
    for (size_t i = 0; i < made.size(); ++i) {
      int which = plan.returns_argument[i];
      if (which >= 0 && plan.writes[size_t(which)]) {
        results.push_back(arguments[size_t(which)]);
        continue;
      }
      results.push_back(mapped(made[i], [&](const at::Tensor& host) {
        at::Tensor there = made_like(host, device);
        there.copy_(host);
        return there;
      }));
    }
  } else {
    Stack targets;
    for (size_t i = 0; i < results.size(); ++i)
      targets.push_back(
          plan.returns_argument[i] >= 0 ? IValue() : mapped(results[i], [](const at::Tensor& made) {
            return twin_of(made);
          }));
    launch(
        stream, name,
        [call, targets] {
          Stack made = call();
          c10::InferenceMode off(false);
          Plain plain;
          for (size_t i = 0; i < targets.size(); ++i) {
            std::vector<at::Tensor> into, from;
            if (targets[i].isNone()) continue;
            each_tensor(targets[i], [&](const at::Tensor& tensor) { into.push_back(tensor); });
            each_tensor(made[i], [&](const at::Tensor& tensor) { from.push_back(tensor); });
            for (size_t j = 0; j < into.size(); ++j) into[j].copy_(from[j]);
          }
        },
        std::move(accesses));
  }
  torch::jit::drop(*stack, count);
  for (IValue& value : results) stack->push_back(std::move(value));
}

// ---- memory and views ----------------------------------------------------------------------------

c10::Device resolved(std::optional<at::Device> device) {
  int index = device && device->has_index() ? device->index() : current_device();
  return {kGlass, c10::DeviceIndex(index)};
}

at::Tensor empty(
    c10::SymIntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool>,
    std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(resolved(device));
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(sizes), allocator(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      at::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(resolved(device));
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides), allocator(),
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), at::dtype_or_default(dtype));
}

at::Tensor as_strided(
    const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
    std::optional<c10::SymInt> offset) {
  std::optional<int64_t> at_offset;
  if (offset) at_offset = offset->expect_int();
  return at::native::as_strided_tensorimpl(
      self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), at_offset);
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
  return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

at::Tensor reshape_alias(
    const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(
      self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

at::Tensor unfold(const at::Tensor& self, int64_t dimension, int64_t size, int64_t step) {
  return at::native::unfold(self, dimension, size, step);
}

void resize(const at::Tensor& tensor, at::IntArrayRef sizes, at::IntArrayRef strides) {
  auto* impl = tensor.unsafeGetTensorImpl();
  size_t last = 1;
  bool is_empty = false;
  for (size_t i = 0; i < sizes.size(); ++i) {
    is_empty = is_empty || sizes[i] == 0;
    last += size_t(sizes[i] - 1) * size_t(strides[i]);
  }
  size_t need = is_empty ? 0 : (last + size_t(tensor.storage_offset())) * tensor.element_size();
  if (need > tensor.storage().nbytes())
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(tensor.storage(), need);
  impl->set_sizes_and_strides(sizes, strides);
}

const at::Tensor& resize_(
    const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  if (self.sizes() == sizes) return self;
  resize(self, sizes, c10::contiguous_strides(sizes));
  if (format && *format != at::MemoryFormat::Preserve)
    self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  return self;
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size,
    c10::SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset.expect_int());
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  if (stride.empty() && !size.empty())
    impl->set_sizes_and_strides(sizes, c10::contiguous_strides(sizes));
  else
    impl->set_sizes_and_strides(sizes, C10_AS_INTARRAYREF_SLOW(stride));
  return self;
}

at::Tensor& set_source(at::Tensor& self, at::Storage source) {
  int64_t length = int64_t(source.nbytes() / self.element_size());
  int64_t one = 1;
  return set_storage(
      self, std::move(source), 0, c10::fromIntArrayRefSlow(length), c10::fromIntArrayRefSlow(one));
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(source.storage());
  impl->set_storage_offset(source.storage_offset());
  impl->set_sizes_and_strides(source.sizes(), source.strides());
  return self;
}

at::Tensor& set_nothing(at::Tensor& self) {
  return set_tensor(self, at::empty({0}, self.options()));
}

// ``tensor.data = other`` moves a tensor between host and device, as CUDA's may.
bool has_compatible_shallow_copy_type(const at::Tensor& self, const at::Tensor& from) {
  auto is_dense = [](const at::Tensor& tensor) {
    return tensor.layout() == at::kStrided && (is_glass(tensor) || tensor.device().is_cpu());
  };
  return is_dense(self) && is_dense(from);
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  allocator()->recordStream(self.storage().data_ptr(), stream);
}

// ---- copies --------------------------------------------------------------------------------------

// A copy between two devices is ordered on both sides, like torch's on CUDA.
void copy_across(const at::Tensor& source, const at::Tensor& target) {
  StreamState* here = current(source.device().index());
  StreamState* there = current(target.device().index());
  if (here != there) wait_event(here, record(there, false));
  at::Tensor from = twin_of(source), into = twin_of(target);
  launch(
      here, "copy_",
      [from, into] {
        c10::InferenceMode off(false);
        Plain plain;
        into.copy_(from);
      },
      {access_of(source, false), access_of(target, true)});
  if (here != there) wait_event(there, record(here, false));
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  at::Tensor self = source;
  if (self.numel() == 0 && target.numel() == 0) return target;
  if (self.sizes() != target.sizes()) self = self.expand_as(target);
  if (is_glass(self) && is_glass(target)) {
    copy_across(self, target);
    return target;
  }
  const at::Tensor& there = is_glass(self) ? self : target;
  const at::Tensor& host = is_glass(self) ? target : self;
  c10::DeviceGuard guard(there.device());
  StreamState* stream = current(there.device().index());
  bool is_plain = host.is_contiguous() && there.is_contiguous() &&
      host.scalar_type() == there.scalar_type();
  bool is_live = is_plain && host.is_pinned();
  bool waits = !non_blocking || (is_glass(self) && !is_live);
  if (waits) {
    Lock lock(world().mutex);
    need_no_capture("a copy that the host waits for", stream);
  }
  at::Tensor with_host, with_device = twin_of(there);
  {
    c10::InferenceMode off(false);
    Plain plain;
    if (is_live || is_glass(self)) {
      with_host = over(host.data_ptr(), host);
      if (host.is_conj()) with_host._set_conj(true);
    } else {
      // pageable memory is read at the launch
      with_host = host.detach().to(there.scalar_type()).contiguous().clone();
    }
  }
  std::vector<Access> accesses{access_of(there, !is_glass(self))};
  if (is_live) accesses.push_back(access_of(host, is_glass(self)));
  at::Tensor from = is_glass(self) ? with_device : with_host;
  at::Tensor into = is_glass(self) ? with_host : with_device;
  launch(
      stream, is_glass(self) ? "copy_ to the host" : "copy_ to the device",
      [from, into] {
        c10::InferenceMode off(false);
        Plain plain;
        into.copy_(from);
      },
      std::move(accesses));
  if (is_live && !stream->capture) note_pinned_use(host.data_ptr(), stream);
  if (waits) synchronize(stream, "a copy that the host waits for");
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& target) {
  if (self.sizes() != target.sizes()) target.resize_(self.sizes());
  return copy_from(self, target, false);
}

} // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Storage", set_source);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_nothing);
  m.impl("_has_compatible_shallow_copy_type", has_compatible_shallow_copy_type);
  m.impl("record_stream", record_stream);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
}

} // namespace glass
