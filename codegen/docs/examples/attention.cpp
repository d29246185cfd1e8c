// SPDX-License-Identifier: Apache-2.0
// Calls an exported kernel from C++ and compares its output with a loop on the CPU.
//
//   fmha-gen build specs/sm90_d64_bf16_full.yaml --export exported
//   LIBS=$(python -c 'from cutlass.cute import runtime
//   for library in runtime.find_runtime_libraries(enable_tvm_ffi=True):
//       print(library, "-Wl,-rpath," + library.rpartition("/")[0])')
//   g++ -std=c++17 attention.cpp exported/sm90_d64_bf16_full.o -Iexported
//       $(tvm-ffi-config --cxxflags) $LIBS -ldl -o attention     (all on one line)
//   ./attention
//
// LIBS are libcute_dsl_runtime.so and libtvm_ffi.so where pip put them, and where they are found
// when the program runs. Neither Python nor the CUDA toolkit is needed then, only the driver.
// Status 0: the output is right; 1: it is not, or the call was refused and says why.

#include <dlfcn.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "sm90_d64_bf16_full.h"

constexpr int64_t kBatch = 2, kQueries = 200, kKeys = 333, kHeads = 3, kHeadDim = 64;

// --- GPU memory. A program with the CUDA toolkit calls cudaMalloc and cudaMemcpy instead.

struct Driver {
  void *library = dlopen("libcuda.so.1", RTLD_NOW);
  int sm_count = 132;

  template <typename... Arguments>
  void call(const char *name, Arguments... arguments) {
    auto function = reinterpret_cast<int (*)(Arguments...)>(dlsym(library, name));
    if (int status = function ? function(arguments...) : -1) {
      std::fprintf(stderr, "%s: status %d\n", name, status);
      std::exit(1);
    }
  }

  Driver() {
    if (library == nullptr) return;  // the kernel's own call will say so
    constexpr int kMultiprocessors = 16;
    int device = 0;
    void *context = nullptr;
    call("cuInit", 0u);
    call("cuDeviceGet", &device, 0);
    call("cuDevicePrimaryCtxRetain", &context, device);
    call("cuCtxSetCurrent", context);
    call("cuDeviceGetAttribute", &sm_count, kMultiprocessors, device);
  }

  void *upload(std::vector<uint16_t> &values) {
    if (library == nullptr) return std::aligned_alloc(256, (values.size() * 2 + 255) / 256 * 256);
    uint64_t address = 0;
    call("cuMemAlloc_v2", &address, values.size() * 2);
    call("cuMemcpyHtoD_v2", address, static_cast<const void *>(values.data()), values.size() * 2);
    return reinterpret_cast<void *>(address);
  }

  void download(std::vector<uint16_t> &values, void *address) {
    call("cuCtxSynchronize");
    call("cuMemcpyDtoH_v2", static_cast<void *>(values.data()),
         reinterpret_cast<uint64_t>(address), values.size() * 2);
  }
};

// --- bf16: the upper half of a float

float to_float(uint16_t bits) {
  uint32_t whole = uint32_t{bits} << 16;
  float value;
  std::memcpy(&value, &whole, 4);
  return value;
}

uint16_t to_bf16(float value) {
  uint32_t whole;
  std::memcpy(&whole, &value, 4);
  return static_cast<uint16_t>((whole + 0x7fff + (whole >> 16 & 1)) >> 16);
}

// --- a tensor [batch, seqlen, heads, head_dim], on both sides

struct Tensor {
  std::vector<uint16_t> values;
  int64_t shape[4], strides[4];
  DLTensor view;

  Tensor(Driver &driver, int64_t seqlen, std::mt19937 &random)
      : values(kBatch * seqlen * kHeads * kHeadDim),
        shape{kBatch, seqlen, kHeads, kHeadDim},
        strides{seqlen * kHeads * kHeadDim, kHeads * kHeadDim, kHeadDim, 1} {
    std::normal_distribution<float> normal;
    for (uint16_t &value : values) value = to_bf16(normal(random));
    view = DLTensor{driver.upload(values),       DLDevice{kDLCUDA, 0}, 4,
                    DLDataType{kDLBfloat, 16, 1}, shape,                strides,
                    0};
  }

  float at(int64_t batch, int64_t row, int64_t head, int64_t column) const {
    return to_float(values[batch * strides[0] + row * strides[1] + head * strides[2] + column]);
  }
};

// --- an argument: what it is, and its value. The padding beside it must be 0.

TVMFFIAny argument(int32_t kind) {
  TVMFFIAny any;
  std::memset(&any, 0, sizeof any);
  any.type_index = kind;
  return any;
}

TVMFFIAny of_tensor(Tensor &tensor) {
  TVMFFIAny any = argument(kTVMFFIDLTensorPtr);
  any.v_ptr = &tensor.view;
  return any;
}

TVMFFIAny of_float(double value) {
  TVMFFIAny any = argument(kTVMFFIFloat);
  any.v_float64 = value;
  return any;
}

TVMFFIAny of_int(int64_t value) {
  TVMFFIAny any = argument(kTVMFFIInt);
  any.v_int64 = value;
  return any;
}

// The error of this thread's last call that did not return 0; reading it clears it.
std::string error_of_last_call() {
  TVMFFIObjectHandle error = nullptr;
  TVMFFIErrorMoveFromRaised(&error);
  if (error == nullptr) return "no error";
  const TVMFFIErrorCell *cell = TVMFFIErrorGetCellPtr(error);
  std::string text(cell->kind.data, cell->kind.size);
  text += ": " + std::string(cell->message.data, cell->message.size);
  TVMFFIObjectDecRef(error);
  return text;
}

// --- the same in a loop: the largest difference

double largest_error(const Tensor &q, const Tensor &k, const Tensor &v, const Tensor &out,
                     double scale) {
  double worst = 0;
  for (int64_t batch = 0; batch < kBatch; ++batch)
    for (int64_t head = 0; head < kHeads; ++head)
      for (int64_t row = 0; row < kQueries; ++row) {
        std::vector<double> weights(kKeys), sums(kHeadDim);
        double total = 0;
        for (int64_t key = 0; key < kKeys; ++key) {
          double score = 0;
          for (int64_t d = 0; d < kHeadDim; ++d)
            score += double{q.at(batch, row, head, d)} * k.at(batch, key, head, d);
          total += weights[key] = std::exp(score * scale);
        }
        for (int64_t key = 0; key < kKeys; ++key)
          for (int64_t d = 0; d < kHeadDim; ++d)
            sums[d] += weights[key] / total * v.at(batch, key, head, d);
        for (int64_t d = 0; d < kHeadDim; ++d) {
          double error = std::fabs(out.at(batch, row, head, d) - sums[d]);
          if (!(error <= worst)) worst = error;  // NaN is the largest
        }
      }
  return worst;
}

int main() {
  Driver driver;
  std::mt19937 random(1);
  Tensor q(driver, kQueries, random), k(driver, kKeys, random), v(driver, kKeys, random);
  Tensor out(driver, kQueries, random);  // filled with something else
  const double scale = 1 / std::sqrt(double{kHeadDim});

  // In the header's order. The stream is the default one: TVMFFIEnvSetStream would set another.
  TVMFFIAny arguments[] = {of_tensor(q),   of_tensor(k),    of_tensor(v),
                           of_tensor(out), of_float(scale), of_int(driver.sm_count)};
  TVMFFIAny result = argument(kTVMFFINone);
  if (sm90_d64_bf16_full(nullptr, arguments, 6, &result) != 0) {
    std::fprintf(stderr, "%s\n", error_of_last_call().c_str());
    return 1;
  }
  driver.download(out.values, out.view.data);

  const double error = largest_error(q, k, v, out, scale);
  std::printf("largest error %.5f\n", error);
  return error < 0.01 ? 0 : 1;  // bf16 rounds 0.5, and few outputs are larger, by 0.001
}
