// A libcuda.so.1 for tests on machines without a GPU. "Device memory" is host memory, so copies
// work; a "device image" is text, the names of its kernels. Every call can be made to fail.
//
// FAKE_CUDA_VERSION   what cuDriverGetVersion gives (default 12080)
// FAKE_CUDA_DEVICES   number of devices (default 1)
// FAKE_CUDA_FAIL      "cuInit=803": this function returns this code; "cuGraphLaunch@3=719": its
//                     third call does, and from then on so does every call, as after a real fault;
//                     "*@500=719": the same from the 500th call of any function on
// FAKE_CUDA_CONTROL   file that, once it exists, takes the place of FAKE_CUDA_FAIL
// FAKE_CUDA_LOG       file to which every kernel that runs is appended
// FAKE_CUDA_CALLS     file to which every call is appended: the function's name
// FAKE_CUDA_LAZY      if set, work waits until something waits for it, so that who writes memory
// too
//                     early, or reads it too early, gets what a device would give
//
// A kernel called `store_dim` writes the value of its second argument, a dim, to its first, an
// operand. One called `store_constant` writes its third argument, a constant, there.
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int Result;

static int setting(const char* name, int otherwise) {
  const char* text = getenv(name);
  return text != NULL ? atoi(text) : otherwise;
}

static void append(const char* file, const char* line) {
  const char* path = getenv(file);
  FILE* log = path != NULL ? fopen(path, "a") : NULL;
  if (log == NULL) return;
  fprintf(log, "%s\n", line);
  fclose(log);
}

// FAKE_CUDA_FAIL, or what the control file holds.
static const char* to_fail(void) {
  static char text[128];
  const char* path = getenv("FAKE_CUDA_CONTROL");
  FILE* control = path != NULL ? fopen(path, "r") : NULL;
  if (control == NULL) return getenv("FAKE_CUDA_FAIL");
  const size_t length = fread(text, 1, sizeof text - 1, control);
  text[length] = '\0';
  fclose(control);
  return text;
}

static Result broken = 0;  // what every call returns after a fault
static int calls = 0;      // of the function that is to fail

static Result outcome(const char* function) {
  append("FAKE_CUDA_CALLS", function);
  if (broken != 0) return broken;
  const char* fail = to_fail();
  if (fail == NULL) return 0;
  const size_t length = fail[0] == '*' ? 1 : strlen(function);
  if (length > 1 && strncmp(fail, function, length) != 0) return 0;
  if (fail[length] == '=') return atoi(fail + length + 1);
  if (fail[length] != '@' || ++calls != atoi(fail + length + 1)) return 0;
  return broken = atoi(strchr(fail, '=') + 1);
}

#define RETURN return outcome(__func__)
#define CHECK                                \
  do {                                       \
    const Result failed = outcome(__func__); \
    if (failed != 0) return failed;          \
  } while (0)

// Work on a stream: a copy, a fill, a kernel, an event (which notes how many kernels ran before) or
// a wait for one.
typedef struct Event {
  int kernels;         // that ran before it was last reached
  int recorded, done;  // how often it was set, and reached
} Event;

typedef struct Work {
  enum { COPY, FILL, KERNEL, EVENT, WAIT } kind;
  void* to;
  const void* from;
  size_t bytes;
  int value;
  Event* event;
  int count;       // of the event's being reached, that a wait is for
  char text[192];  // a kernel's line of the log
  struct Work* next;
} Work;

typedef struct Queue {
  Work* first;
  Work** end;
} Queue;

typedef Queue Graph;

enum { STREAMS = 16 };
static Queue streams[STREAMS];
static int n_streams = 0;
static Graph* capturing = NULL;
static int kernels_run = 0;

static void put(Queue* queue, Work work) {
  Work* copy = malloc(sizeof work);
  *copy = work;
  copy->next = NULL;
  if (queue->first == NULL) queue->end = &queue->first;
  *queue->end = copy;
  queue->end = &copy->next;
}

static void perform(const Work* work) {
  if (work->kind == COPY) memcpy(work->to, work->from, work->bytes);
  if (work->kind == FILL) memset(work->to, work->value, work->bytes);
  if (work->kind == EVENT) {
    work->event->kernels = kernels_run;
    ++work->event->done;
  }
  if (work->kind != KERNEL) return;
  ++kernels_run;
  append("FAKE_CUDA_LOG", work->text);
  if (work->to != NULL) *(int*)work->to = work->from != NULL ? *(const int*)work->from : work->value;
}

// Runs a stream up to a wait for what is not yet done. Returns how much was done.
static int advance(Queue* stream) {
  int done = 0;
  while (stream->first != NULL) {
    Work* work = stream->first;
    if (work->kind == WAIT && work->event->done < work->count) break;
    stream->first = work->next;
    perform(work);
    free(work);
    ++done;
  }
  return done;
}

// Always the first stream that can go on, as far as it can: only what events order is in order.
static void finish(void) {
  const int backward = getenv("FAKE_CUDA_BACKWARD") != NULL;
  for (int i = 0; i < n_streams;) {
    i = advance(&streams[backward ? n_streams - 1 - i : i]) > 0 ? 0 : i + 1;
  }
}

static void begin(void* stream, Work work) {
  if (work.kind == EVENT) ++work.event->recorded;
  put(capturing != NULL ? capturing : (Queue*)stream, work);
  if (capturing == NULL && getenv("FAKE_CUDA_LAZY") == NULL) finish();
}

Result cuGetErrorName(Result code, const char** name) {
  *name = code == 2     ? "CUDA_ERROR_OUT_OF_MEMORY"
          : code == 803 ? "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"
          : code == 719 ? "CUDA_ERROR_LAUNCH_FAILED"
                        : "CUDA_ERROR_FAKE";
  return 0;
}
Result cuGetErrorString(Result code, const char** text) {
  (void)code;
  *text = "said by the fake driver";
  return 0;
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
  switch (attribute) {
    case 16:  // multiprocessors
      *value = 132;
      break;
    case 38:  // bytes of L2
      *value = 50 << 20;
      break;
    case 75:  // compute capability, major; the minor is 0
      *value = 9;
      break;
    case 97:  // shared memory per block
      *value = 227 << 10;
      break;
    case 95:   // cooperative launch
    case 120:  // clusters
      *value = setting("FAKE_CUDA_CLUSTERS", 1);
      break;
    default:
      *value = 0;
  }
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
Result cuMemHostRegister_v2(void* pointer, size_t bytes, unsigned flags) {
  (void)pointer, (void)bytes, (void)flags;
  RETURN;
}
Result cuMemHostUnregister(void* pointer) {
  (void)pointer;
  RETURN;
}
Result cuMemcpyHtoDAsync_v2(unsigned long long to, const void* from, size_t bytes, void* stream) {
  CHECK;
  begin(stream, (Work){.kind = COPY, .to = (void*)(size_t)to, .from = from, .bytes = bytes});
  return 0;
}
Result cuMemcpyDtoHAsync_v2(void* to, unsigned long long from, size_t bytes, void* stream) {
  CHECK;
  begin(stream, (Work){.kind = COPY, .to = to, .from = (const void*)(size_t)from, .bytes = bytes});
  return 0;
}
Result cuMemsetD8Async(unsigned long long to, unsigned char value, size_t bytes, void* stream) {
  CHECK;
  begin(stream, (Work){.kind = FILL, .to = (void*)(size_t)to, .value = value, .bytes = bytes});
  return 0;
}
Result cuStreamCreate(void** stream, unsigned flags) {
  (void)flags;
  CHECK;
  if (n_streams == STREAMS) return 2;
  *stream = &streams[n_streams++];
  return 0;
}
Result cuStreamDestroy_v2(void* stream) {
  (void)stream;
  RETURN;
}
Result cuStreamSynchronize(void* stream) {
  (void)stream;
  CHECK;
  finish();
  return 0;
}
Result cuStreamWaitEvent(void* stream, void* event, unsigned flags) {
  (void)flags;
  CHECK;
  begin(stream, (Work){.kind = WAIT, .event = event, .count = ((Event*)event)->recorded});
  return 0;
}
Result cuEventCreate(void** event, unsigned flags) {
  (void)flags;
  *event = calloc(1, sizeof(Event));
  RETURN;
}
Result cuEventDestroy_v2(void* event) {
  free(event);
  RETURN;
}
Result cuEventRecord(void* event, void* stream) {
  CHECK;
  begin(stream, (Work){.kind = EVENT, .event = event});
  return 0;
}
Result cuEventRecordWithFlags(void* event, void* stream, unsigned flags) {
  (void)flags;
  CHECK;
  begin(stream, (Work){.kind = EVENT, .event = event});
  return 0;
}
Result cuEventSynchronize(void* event) {
  (void)event;
  CHECK;
  finish();
  return 0;
}
Result cuEventQuery(void* event) {
  CHECK;
  return ((Event*)event)->done == ((Event*)event)->recorded ? 0 : 600;  // not ready
}
Result cuEventElapsedTime(float* milliseconds, void* begin_event, void* end_event) {
  // A kernel takes 0.5 ms, an event 0.25.
  *milliseconds =
      0.5f * (float)(((Event*)end_event)->kernels - ((Event*)begin_event)->kernels) + 0.25f;
  RETURN;
}
Result cuStreamBeginCapture_v2(void* stream, int mode) {
  (void)stream, (void)mode;
  CHECK;
  capturing = calloc(1, sizeof *capturing);
  return 0;
}
Result cuStreamEndCapture(void* stream, void** graph) {
  (void)stream;
  *graph = capturing;
  capturing = NULL;
  RETURN;
}
Result cuGraphInstantiateWithFlags(void** exec, void* graph, unsigned long long flags) {
  (void)flags;
  CHECK;
  Graph* copy = calloc(1, sizeof *copy);
  for (const Work* work = ((Graph*)graph)->first; work != NULL; work = work->next) put(copy, *work);
  *exec = copy;
  return 0;
}
Result cuGraphUpload(void* exec, void* stream) {
  (void)exec, (void)stream;
  RETURN;
}
Result cuGraphLaunch(void* exec, void* stream) {
  CHECK;
  for (const Work* work = ((Graph*)exec)->first; work != NULL; work = work->next) {
    begin(stream, *work);
  }
  return 0;
}
static void discard(Graph* graph) {
  for (Work *work = graph->first, *next; work != NULL; work = next) {
    next = work->next;
    free(work);
  }
  free(graph);
}
Result cuGraphDestroy(void* graph) {
  discard(graph);
  RETURN;
}
Result cuGraphExecDestroy(void* exec) {
  discard(exec);
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
  CHECK;
  if (strstr(library, name) == NULL) return 500;
  *kernel = strdup(name);  // never freed: handles live as long as the process
  return 0;
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
  *value = setting("FAKE_CUDA_THREADS", 256);
  RETURN;
}
Result cuFuncSetAttribute(void* function, int attribute, int value) {
  char line[128];
  snprintf(line, sizeof line, "%s: attribute %d = %d", (const char*)function, attribute, value);
  append("FAKE_CUDA_LOG", line);
  RETURN;
}

typedef struct LaunchAttribute {
  int id;
  char padding[4];
  unsigned words[16];
} LaunchAttribute;

typedef struct LaunchConfig {
  unsigned grid[3], block[3], shared;
  void* stream;
  const LaunchAttribute* attributes;
  unsigned n_attributes;
} LaunchConfig;

Result cuOccupancyMaxActiveClusters(int* clusters, void* function, const LaunchConfig* config) {
  (void)function, (void)config;
  *clusters = setting("FAKE_CUDA_OCCUPANCY", 1);
  RETURN;
}
Result cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void* function, int block,
                                                   size_t shared) {
  (void)function, (void)block, (void)shared;
  *blocks = setting("FAKE_CUDA_OCCUPANCY", 1);
  RETURN;
}
Result cuLaunchKernelEx(const LaunchConfig* config, void* function, void** arguments,
                        void** extra) {
  (void)extra;
  CHECK;
  Work work = {.kind = KERNEL};
  int length =
      snprintf(work.text, sizeof work.text, "%s %u %u %u %u %u", (const char*)function,
               config->grid[0], config->grid[1], config->grid[2], config->block[0], config->shared);
  for (unsigned i = 0; i < config->n_attributes; ++i) {
    const LaunchAttribute* attribute = &config->attributes[i];
    const char* names[] = {[2] = "cooperative", [4] = "cluster", [6] = "pdl"};
    length += snprintf(work.text + length, sizeof work.text - (size_t)length, " %s=%u",
                       names[attribute->id], attribute->words[0]);
  }
  if (strcmp(function, "store_dim") == 0) {
    work.to = (void*)(size_t)*(unsigned long long*)arguments[0];
    work.from = (const void*)(size_t)*(unsigned long long*)arguments[1];
  }
  if (strcmp(function, "store_constant") == 0) {
    work.to = (void*)(size_t)*(unsigned long long*)arguments[0];
    work.value = *(int*)arguments[2];
  }
  begin(config->stream, work);
  return 0;
}
