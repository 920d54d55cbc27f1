// A libcuda.so.1 for tests on machines without a GPU. "Device memory" is host memory, so copies
// work; a "device image" is text, the names of its kernels. Every call can be made to fail.
//
// FAKE_CUDA_VERSION   what cuDriverGetVersion gives (default 12080)
// FAKE_CUDA_DEVICES   number of devices (default 1)
// FAKE_CUDA_FAIL      "cuInit=803": this function returns this code
// FAKE_CUDA_LOG       file to which every launch is appended
//
// A kernel called `store_dim` writes the value of its second argument, a dim, to its first, an
// operand.
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int Result;

static int setting(const char* name, int otherwise) {
  const char* text = getenv(name);
  return text != NULL ? atoi(text) : otherwise;
}

static Result outcome(const char* function) {
  const char* fail = getenv("FAKE_CUDA_FAIL");
  const size_t length = strlen(function);
  if (fail != NULL && strncmp(fail, function, length) == 0 && fail[length] == '=') {
    return atoi(fail + length + 1);
  }
  return 0;
}

#define RETURN return outcome(__func__)

Result cuGetErrorName(Result code, const char** name) {
  *name = code == 2     ? "CUDA_ERROR_OUT_OF_MEMORY"
          : code == 803 ? "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"
                        : "CUDA_ERROR_FAKE";
  RETURN;
}
Result cuGetErrorString(Result code, const char** text) {
  (void)code;
  *text = "said by the fake driver";
  RETURN;
}
Result cuInit(unsigned flags) {
  (void)flags;
  RETURN;
}
Result cuDriverGetVersion(int* version) {
  *version = setting("FAKE_CUDA_VERSION", 12080);
  RETURN;
}
Result cuDeviceGetCount(int* count) {
  *count = setting("FAKE_CUDA_DEVICES", 1);
  RETURN;
}
Result cuDeviceGet(int* device, int index) {
  *device = index;
  RETURN;
}
Result cuDeviceGetName(char* name, int size, int device) {
  snprintf(name, (size_t)size, "Fake GPU %d", device);
  RETURN;
}
Result cuDeviceTotalMem_v2(size_t* bytes, int device) {
  (void)device;
  *bytes = (size_t)8 << 30;
  RETURN;
}
Result cuDeviceGetAttribute(int* value, int attribute, int device) {
  (void)device;
  *value = attribute == 16 ? 132 : attribute == 75 ? 9 : 0;
  RETURN;
}
Result cuDevicePrimaryCtxRetain(void** context, int device) {
  (void)device;
  *context = (void*)1;
  RETURN;
}
Result cuDevicePrimaryCtxRelease_v2(int device) {
  (void)device;
  RETURN;
}
Result cuCtxSetCurrent(void* context) {
  (void)context;
  RETURN;
}
Result cuMemGetInfo_v2(size_t* available, size_t* total) {
  *available = (size_t)1 << 30;
  *total = (size_t)8 << 30;
  RETURN;
}
Result cuMemAlloc_v2(unsigned long long* pointer, size_t bytes) {
  *pointer = (unsigned long long)(size_t)calloc(1, bytes);
  RETURN;
}
Result cuMemFree_v2(unsigned long long pointer) {
  free((void*)(size_t)pointer);
  RETURN;
}
Result cuMemHostAlloc(void** pointer, size_t bytes, unsigned flags) {
  (void)flags;
  *pointer = calloc(1, bytes);
  RETURN;
}
Result cuMemFreeHost(void* pointer) {
  free(pointer);
  RETURN;
}
Result cuMemcpyHtoDAsync_v2(unsigned long long to, const void* from, size_t bytes, void* stream) {
  (void)stream;
  memcpy((void*)(size_t)to, from, bytes);
  RETURN;
}
Result cuMemcpyDtoHAsync_v2(void* to, unsigned long long from, size_t bytes, void* stream) {
  (void)stream;
  memcpy(to, (const void*)(size_t)from, bytes);
  RETURN;
}
Result cuMemsetD8Async(unsigned long long to, unsigned char value, size_t bytes, void* stream) {
  (void)stream;
  memset((void*)(size_t)to, value, bytes);
  RETURN;
}
Result cuStreamCreate(void** stream, unsigned flags) {
  (void)flags;
  *stream = (void*)2;
  RETURN;
}
Result cuStreamDestroy_v2(void* stream) {
  (void)stream;
  RETURN;
}
Result cuStreamSynchronize(void* stream) {
  (void)stream;
  RETURN;
}
Result cuLibraryLoadData(void** library, const void* image, int* options, void** values, unsigned n,
                         int* library_options, void** library_values, unsigned n_library) {
  (void)options, (void)values, (void)n, (void)library_options, (void)library_values,
      (void)n_library;
  *library = strdup(image);
  RETURN;
}
Result cuLibraryUnload(void* library) {
  free(library);
  RETURN;
}
Result cuLibraryGetKernel(void** kernel, void* library, const char* name) {
  if (strstr(library, name) == NULL) return 500;
  *kernel = strdup(name);  // never freed: handles live as long as the process
  RETURN;
}
Result cuKernelGetFunction(void** function, void* kernel) {
  *function = kernel;
  RETURN;
}
Result cuFuncLoad(void* function) {
  (void)function;
  RETURN;
}
Result cuFuncGetAttribute(int* value, int attribute, void* function) {
  (void)attribute, (void)function;
  *value = 256;
  RETURN;
}
Result cuFuncSetAttribute(void* function, int attribute, int value) {
  (void)function, (void)attribute, (void)value;
  RETURN;
}
Result cuLaunchKernel(void* function, unsigned x, unsigned y, unsigned z, unsigned block_x,
                      unsigned block_y, unsigned block_z, unsigned shared, void* stream,
                      void** arguments, void** extra) {
  (void)block_y, (void)block_z, (void)stream, (void)extra;
  const char* path = getenv("FAKE_CUDA_LOG");
  FILE* log = path != NULL ? fopen(path, "a") : NULL;
  if (log != NULL) {
    fprintf(log, "%s %u %u %u %u %u\n", (const char*)function, x, y, z, block_x, shared);
    fclose(log);
  }
  if (strcmp(function, "store_dim") == 0) {
    int* operand = (int*)(size_t)*(unsigned long long*)arguments[0];
    const int* dim = (const int*)(size_t)*(unsigned long long*)arguments[1];
    *operand = *dim;
  }
  RETURN;
}
