// Stands in for libcuda.so.1 where there is no GPU: keeps the driver's rules about contexts and records launches.
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum { kParams = 32, kBytes = 512 };

typedef struct {
  unsigned grid[3], block[3], smem;
  void* stream;
  struct { int id; char pad[4]; int value; char rest[60]; }* attributes;
  unsigned attribute_count;
} Config;

// One record per launch; the argument block as the kernel would see it.
typedef struct {
  unsigned grid[3], block, smem;
  uint64_t stream, context;
  int pdl;
  char args[kBytes];
} Launch;

#define EXPORT __attribute__((visibility("default")))

EXPORT Launch fake_last;
EXPORT int fake_launches, fake_modules, fake_smem, fake_loaded, fake_capture_mode;
EXPORT int fake_load_failures, fake_load_status, fake_launch_status, fake_device_count = 2;
EXPORT int fake_param_count;
EXPORT size_t fake_param_offset[kParams], fake_param_size[kParams];
EXPORT char fake_entry[256];

static _Thread_local uint64_t context;
static uint64_t contexts[8];  // of function handles: a function belongs to the context it was loaded in

EXPORT void fake_set_context(uint64_t value) { context = value; }
EXPORT uint64_t fake_get_context(void) { return context; }

EXPORT int cuInit(unsigned flags) { return flags == 0 ? 0 : 1; }
EXPORT int cuDriverGetVersion(int* version) { *version = 13000; return 0; }
EXPORT int cuDeviceGetCount(int* count) { *count = fake_device_count; return 0; }
EXPORT int cuDeviceGet(int* device, int ordinal) {
  if (ordinal < 0 || ordinal >= fake_device_count) return 101;
  *device = ordinal;
  return 0;
}
EXPORT int cuDeviceGetName(char* name, int length, int device) { strncpy(name, "Fake GPU", length); return device < 0; }
EXPORT int cuDeviceTotalMem_v2(size_t* bytes, int device) { *bytes = (size_t)8 << 30; return device < 0; }
EXPORT int cuDeviceGetAttribute(int* value, int attribute, int device) {
  *value = attribute == 16 ? 132 : attribute == 75 ? 9 : attribute == 13 ? 1980000 : attribute == 36 ? 3201000
      : attribute == 37 ? 6144 : 0;
  return device < 0 || attribute == 38;  /* a driver that does not state the L2 */
}
EXPORT int cuDevicePrimaryCtxRetain(uint64_t* result, int device) { *result = 0x1000 + device; return 0; }
EXPORT int cuCtxGetCurrent(uint64_t* result) { *result = context; return 0; }

static _Thread_local uint64_t stack[8];
static _Thread_local int depth;
EXPORT int cuCtxPushCurrent_v2(uint64_t value) { stack[depth++] = context; context = value; return 0; }
EXPORT int cuCtxPopCurrent_v2(uint64_t* value) { *value = context; context = stack[--depth]; return 0; }

EXPORT int cuThreadExchangeStreamCaptureMode(int* mode) {
  int old = fake_capture_mode;
  fake_capture_mode = *mode;
  *mode = old;
  return 0;
}
EXPORT int cuGetErrorName(int status, char const** text) {
  *text = status == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : "CUDA_ERROR_OTHER";
  return status >= 9000;
}
EXPORT int cuGetErrorString(int status, char const** text) {
  *text = status == 700 ? "an illegal memory access was encountered" : "something else";
  return status >= 9000;
}
EXPORT int cuModuleLoadData(void** module, void const* image) {
  if (context == 0) return 201;
  if (fake_capture_mode != 2) return 900;
  if (fake_load_failures > 0 || memcmp(image, "\177ELF", 4) != 0) { --fake_load_failures; return fake_load_status; }
  *module = (void*)(uintptr_t)++fake_modules;
  return 0;
}
EXPORT int cuModuleGetFunction(void** function, void* module, char const* name) {
  if (strcmp(name, "absent") == 0) return 500;
  strncpy(fake_entry, name, sizeof fake_entry - 1);
  contexts[(uintptr_t)module % 8] = context;
  *function = (void*)(0x7f0000000000u + (uintptr_t)module);  // above 32 bits: a truncated handle must fail
  return 0;
}
EXPORT int cuFuncSetAttribute(void* function, int attribute, int value) {
  if (attribute != 8 || value > 227 * 1024) return 1;
  fake_smem = value;
  return function == 0;
}
EXPORT int cuFuncLoad(void* function) { ++fake_loaded; return function == 0; }
EXPORT int cuFuncGetParamInfo(void* function, size_t index, size_t* offset, size_t* size) {
  if (index >= (size_t)fake_param_count) return 1;
  *offset = fake_param_offset[index];
  *size = fake_param_size[index];
  return function == 0;
}
static int launch(Config const* config, void* function, void** params, void** extra) {
  uintptr_t module = (uintptr_t)function - 0x7f0000000000u;
  if (module == 0 || module > (uintptr_t)fake_modules || extra != 0) return 400;
  if (context == 0) return 201;
  if (context != contexts[module % 8]) return 400;
  if (fake_launch_status) return fake_launch_status;
  ++fake_launches;
  memcpy(fake_last.grid, config->grid, sizeof fake_last.grid);
  fake_last.block = config->block[0] * config->block[1] * config->block[2];
  fake_last.smem = config->smem;
  fake_last.stream = (uint64_t)config->stream;
  fake_last.context = context;
  fake_last.pdl = config->attribute_count == 1 && config->attributes[0].id == 6 && config->attributes[0].value == 1;
  for (int i = 0; i < fake_param_count; ++i)
    memcpy(fake_last.args + fake_param_offset[i], params[i], fake_param_size[i]);
  return 0;
}
EXPORT int cuLaunchKernelEx(Config const* config, void* function, void** params, void** extra) {
  return launch(config, function, params, extra);
}
// For launchers in a process that may hold the real driver too.
EXPORT int fake_cuLaunchKernelEx(Config const* config, void* function, void** params, void** extra) {
  return launch(config, function, params, extra);
}
