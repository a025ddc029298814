/* The null GPU: a libcuda.so.1 that, preloaded, makes a CUDA 13 build of torch find GPUs on a machine that has none.
 *
 * torch links the CUDA runtime, cuBLAS, cuDNN and NCCL as shared libraries and looks the driver up by name. A preloaded
 * library comes before all of them, so what is defined here takes their place: what torch and Triton call, and no more.
 * "Device" memory is the host's, mapped but untouched. Kernels are counted by name and not run; with emulated_gpu.so
 * the CPU computes torch's operators, and NCCL then moves real data between processes. All work is done, or counted, at
 * the moment it is submitted: a stream never has anything left to wait for.
 *
 * Signatures, structs and numbers are those of CUDA 13's public headers (driver_types.h, cuda.h), cublas_api.h,
 * cublasLt.h, cudnn_graph.h and nccl.h. Their statuses are ints in which 0 is success. A stub defined with () takes
 * whatever it is called with, which the x86-64 calling convention allows.
 *
 * Environment: NULL_GPU_COUNT devices; NULL_GPU_GIB memory of each, of which another process holds NULL_GPU_TAKEN_GIB;
 * NULL_GPU_NAME; NULL_GPU_CAPABILITY (9.0); NULL_GPU_DRIVER, the CUDA version the driver knows (13000);
 * NULL_GPU_VERBOSE=1 names driver functions that are looked up and not here; NULL_GPU_EMULATE=1; NULL_GPU_NCCL=shm. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <execinfo.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>
#include "driver_types.h"

#define OK(name) int name() { return 0; }                                          /* succeeds and does nothing */
#define STUB(name, parameters, ...) int name parameters { __VA_ARGS__; return 0; } /* does that little and succeeds */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread int device, last_error;
static int fail(int error) { return last_error = error; }
static const char *text_setting(const char *name, const char *otherwise) { return getenv(name) ?: otherwise; }
static double setting(const char *name, const char *otherwise) { return atof(text_setting(name, otherwise)); }
static double now_ms(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1e3 + t.tv_nsec / 1e6;
}

/* ---- Counters, which tests read through ctypes. "captured" is the number of kernels in the last graph ---- */
#define KINDS(_) _(launch) _(gemm) _(conv) _(h2d_pageable) _(h2d_pinned) _(d2h_pageable) _(d2h_pinned) _(d2d) \
  _(memset) _(sync_stream) _(sync_device) _(sync_event) _(sync_memcpy) _(malloc) _(free) _(host_alloc) _(host_free) \
  _(event_record) _(stream_wait) _(graph_launch) _(captured) _(nccl) _(triton) _(event_create) _(event_query)
#define AS_ENUM(kind) N_##kind,
#define AS_TEXT(kind) #kind,
enum { KINDS(AS_ENUM) KIND_COUNT };
static const char *kind_names[] = {KINDS(AS_TEXT)};
static atomic_long counts[KIND_COUNT];
static double gemm_flops;
static void (*callback)(int kind, const char *what);
static __thread int in_callback;
static void count(int kind, const char *what) {
  counts[kind]++;
  if (!callback || in_callback) return;
  in_callback = 1; /* what Python itself does in the callback is not reported to it */
  callback(kind, what);
  in_callback = 0;
}

/* Kernels by name. The key is the address that stands for a kernel in the host's code, or a hash of the name. */
#define SLOTS (1 << 19)
static struct { uint64_t key; const char *name; long count; } kernels[SLOTS];
static int add_kernel(const void *address, const char *name, int times) {
  uint64_t key = (uint64_t)address;
  if (!address) for (const char *c = name; *c; c++) key = (key ^ (unsigned char)*c) * 1099511628211ull; /* FNV */
  pthread_mutex_lock(&lock);
  int i = (key ^ key >> 4) * 0x9E3779B97F4A7C15ull >> 45;
  while (kernels[i].key && kernels[i].key != key) i = (i + 1) % SLOTS;
  kernels[i].key = key;
  if (!kernels[i].name) kernels[i].name = strdup(name ?: "?");
  kernels[i].count += times;
  pthread_mutex_unlock(&lock);
  return 0;
}
long null_gpu_count(int kind) { return counts[kind]; }
const char *null_gpu_kind_name(int kind) { return kind < KIND_COUNT ? kind_names[kind] : NULL; }
double null_gpu_gemm_flops(void) { return gemm_flops; }
void null_gpu_set_callback(void (*function)(int, const char *)) { callback = function; } /* not called for kernels */
void null_gpu_reset(void) {
  for (int i = 0; i < KIND_COUNT; i++) counts[i] = 0;
  for (int i = 0; i < SLOTS; i++) kernels[i].count = 0;
  gemm_flops = 0;
}
void null_gpu_write_kernels(const char *path) { /* lines of count, tab, name; collectives with one rank's bytes */
  FILE *file = fopen(path, "w");
  for (int i = 0; file && i < SLOTS; i++)
    if (kernels[i].count) fprintf(file, "%ld\t%s\n", kernels[i].count, kernels[i].name);
  if (file) fclose(file);
}

/* ---- The device, as the runtime (cuda...) and the driver (cu...) describe it: an H100 if nothing else is set ---- */
static int emulated(void) { return setting("NULL_GPU_EMULATE", "0") == 1; }
static int device_count(void) { return setting("NULL_GPU_COUNT", "1"); }
static int driver(void) { return setting("NULL_GPU_DRIVER", "13000"); }
static size_t gib(const char *name, const char *otherwise) { return setting(name, otherwise) * (1ull << 30); }
static size_t capacity(void) { return gib("NULL_GPU_GIB", "79.1"); }
static const char *device_name(void) { return text_setting("NULL_GPU_NAME", "NVIDIA H100 80GB HBM3"); }
static int capability(int part) { return text_setting("NULL_GPU_CAPABILITY", "9.0")[part] - '0'; } /* of "9.0" */
static int attribute(int number) { /* cudaDevAttr... and CU_DEVICE_ATTRIBUTE_... share their numbers */
  static const int constants[128] = {
    [cudaDevAttrMaxThreadsPerBlock] = 1024, [cudaDevAttrMaxGridDimX] = 2147483647, [cudaDevAttrMaxGridDimY] = 65535,
    [cudaDevAttrMaxGridDimZ] = 65535, [cudaDevAttrMaxSharedMemoryPerBlock] = 49152, [cudaDevAttrWarpSize] = 32,
    [cudaDevAttrMaxRegistersPerBlock] = 65536, [cudaDevAttrClockRate] = 1980000, [cudaDevAttrMultiProcessorCount] = 132,
    [cudaDevAttrMemoryClockRate] = 2619000, [cudaDevAttrL2CacheSize] = 50 << 20, [cudaDevAttrCooperativeLaunch] = 1,
    [cudaDevAttrGlobalMemoryBusWidth] = 5120, [cudaDevAttrMaxThreadsPerMultiProcessor] = 2048,
    [cudaDevAttrMaxSharedMemoryPerMultiprocessor] = 233472, [cudaDevAttrMaxSharedMemoryPerBlockOptin] = 232448,
    [102] = 1, [103] = 1}; /* virtual memory management, with handles that are file descriptors */
  if (number == cudaDevAttrComputeCapabilityMajor) return capability(0);
  if (number == cudaDevAttrComputeCapabilityMinor) return capability(2);
  return number >= 0 && number < 128 ? constants[number] : 0;
}
int cudaGetDeviceProperties(struct cudaDeviceProp *p, int d) {
  *p = (struct cudaDeviceProp){
    .totalGlobalMem = capacity(), .major = capability(0), .minor = capability(2), .multiProcessorCount = 132,
    .warpSize = 32, .maxThreadsPerBlock = 1024, .maxThreadsPerMultiProcessor = 2048, .maxBlocksPerMultiProcessor = 32,
    .maxThreadsDim = {1024, 1024, 64}, .maxGridSize = {2147483647, 65535, 65535}, .sharedMemPerBlock = 49152,
    .sharedMemPerBlockOptin = 232448, .sharedMemPerMultiprocessor = 233472, .regsPerBlock = 65536,
    .totalConstMem = 65536, .regsPerMultiprocessor = 65536, .l2CacheSize = 50 << 20, .memoryBusWidth = 5120,
    .textureAlignment = 512, .unifiedAddressing = 1, .pciBusID = d + 1, .uuid.bytes = {d}};
  snprintf(p->name, sizeof p->name, "%s", device_name());
  return 0;
}
int cudaGetDeviceCount(int *n) { /* a driver older than the runtime is told by this error, and torch warns of it */
  *n = driver() < 13000 ? 0 : device_count();
  return driver() < 13000 ? fail(cudaErrorInsufficientDriver) : *n ? 0 : fail(cudaErrorNoDevice);
}
int cudaSetDevice(int d) { return d < 0 || d >= device_count() ? fail(cudaErrorInvalidDevice) : (device = d, 0); }
STUB(cudaGetDevice, (int *d), *d = device) STUB(cudaDriverGetVersion, (int *v), *v = driver()) OK(cudaProfilerStart)
STUB(cudaRuntimeGetVersion, (int *v), *v = 13000) STUB(cudaDeviceCanAccessPeer, (int *can), *can = 1)
STUB(cudaDeviceGetAttribute, (int *value, int number), *value = attribute(number)) OK(cudaProfilerStop)
STUB(cudaDeviceGetStreamPriorityRange, (int *least, int *most), if (least) *least = 0; if (most) *most = -5)
int cudaDeviceGetPCIBusId(char *text, int size, int d) { return snprintf(text, size, "0000:%02x:00.0", d + 1) < 0; }
int cudaPeekAtLastError(void) { return last_error; }
int cudaGetLastError(void) { int error = last_error; return last_error = 0, error; }
const char *cudaGetErrorString(int error) { /* torch tells users this */
  return error == cudaErrorInsufficientDriver ? "CUDA driver version is insufficient for CUDA runtime version"
    : error == cudaErrorStreamCaptureUnsupported ? "operation not permitted when stream is capturing"
    : error ? "an error of the null GPU" : "no error";
}
const char *cudaGetErrorName(int error) { return cudaGetErrorString(error); }
STUB(cuGetErrorString, (int error, const char **text), *text = cudaGetErrorString(error))
/* The driver. Its contexts are only ever compared with NULL. */
static __thread void *context = (void *)0x100;
STUB(cuCtxSetCurrent, (void *c), context = c)
int cuDevicePrimaryCtxGetState(int d, unsigned *flags, int *active) { *flags = 0; return *active = 1, 0; }
int cuDeviceGetName(char *text, int size, int d) { return snprintf(text, size, "%s", device_name()) < 0; }
STUB(cuCtxGetCurrent, (void **c), *c = context) STUB(cuDevicePrimaryCtxRetain, (void **c), *c = (void *)0x100)
OK(cuCtxPopCurrent) STUB(cuDriverGetVersion, (int *v), *v = driver()) STUB(cuDeviceGet, (int *d, int i), *d = i)
STUB(cuDeviceGetCount, (int *n), *n = device_count()) STUB(cuCtxGetDevice, (int *d), *d = device) OK(cuInit)
STUB(cuDeviceGetAttribute, (int *value, int number), *value = attribute(number)) OK(cuLogsRegisterCallback)
STUB(cuDeviceGetUuid, (char *uuid, int d), memset(uuid, d, 16)) STUB(cuDeviceTotalMem_v2, (size_t *n), *n = capacity())
OK(cuLogsUnregisterCallback) OK(cuCtxPushCurrent)

STUB(cuGetErrorName, (int error, const char **text), *text = cudaGetErrorString(error)) OK(cudaDeviceEnablePeerAccess)
OK(cuCtxSetLimit) OK(cuCtxGetLimit) OK(cuFuncSetCacheConfig) OK(cuTensorMapEncodeIm2col) /* Triton links these */

/* NVML, under the second name build.py gives this library. The allocator asks it how GPUs are linked: they are not. */
#define REFUSES(name) int name() { return 3; } /* NVML_ERROR_NOT_SUPPORTED */
OK(nvmlInit_v2) OK(nvmlDeviceGetHandleByPciBusId_v2) REFUSES(nvmlDeviceGetNvLinkRemoteDeviceType)
STUB(nvmlDeviceGetComputeRunningProcesses, (void *d, unsigned *n), *n = 0) REFUSES(nvmlDeviceGetNvLinkRemotePciInfo_v2)
REFUSES(nvmlDeviceGetGpuFabricInfoV) REFUSES(nvmlSystemGetCudaDriverVersion_v2)

/* ---- What is not here. torch looks up dozens of the driver's functions that it never calls, so each gets a few bytes
   of code that name it when it is called: mov rdi, name; mov rax, missing; jmp rax. ---- */
static void missing(const char *name) {
  fprintf(stderr, "null GPU: %s was called, which tests/gpu/null_gpu.c does not have\n", name);
  abort();
}
int cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned v, unsigned long long f, int *status) {
  char newer[128]; /* some functions have a second version, which is what their plain name means now */
  snprintf(newer, sizeof newer, "%s_v2", name);
  if (status) *status = cudaDriverEntryPointSuccess;
  if ((*function = dlsym(RTLD_DEFAULT, name) ?: dlsym(RTLD_DEFAULT, newer))) return 0;
  if (setting("NULL_GPU_VERBOSE", "0")) fprintf(stderr, "null GPU: has no %s\n", name);
  char *code = *function = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  memcpy(code, "\x48\xbf" "--name--" "\x48\xb8" "missing-" "\xff\xe0", 22);
  memcpy(code + 2, &(char *){strdup(name)}, 8);
  memcpy(code + 12, &(void *){missing}, 8);
  return mprotect(code, 4096, PROT_READ | PROT_EXEC);
}
/* The real runtime looks here for the driver when one of its functions is called that this file doesn't have. */
int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status) {
  void *frames[32];
  Dl_info info;
  for (int i = backtrace(frames, 32) - 1; i >= 0; i--) /* the outermost frame in the runtime is the function called */
    if (dladdr(frames[i], &info) && strstr(info.dli_fname, "libcudart") && info.dli_sname) missing(info.dli_sname);
  return cudaErrorNotSupported;
}

/* ---- Memory: the blocks that the GPU knows of ---- */
enum { PAGEABLE, ON_DEVICE, PINNED, REGISTERED };
typedef struct { char *start; size_t size; int kind, device, counted; } Block;
static Block *blocks;
static int block_count, block_room;
static size_t used[16];
static size_t unused(int d) {
  size_t gone = used[d] + gib("NULL_GPU_TAKEN_GIB", "0");
  return gone < capacity() ? capacity() - gone : 0;
}
static Block find_block(const char *p, int remove) { /* the newest first: a block that is looked for is often new */
  Block found = {.kind = PAGEABLE, .device = -2};
  pthread_mutex_lock(&lock);
  int i = block_count - 1;
  while (i >= 0 && (p < blocks[i].start || p >= blocks[i].start + blocks[i].size)) i--;
  if (i >= 0) found = blocks[i];
  if (i >= 0 && remove) blocks[i] = blocks[--block_count];
  if (i >= 0 && remove && found.counted) used[found.device] -= found.size;
  pthread_mutex_unlock(&lock);
  return found;
}
static int add_block(void *p, size_t size, int kind, int counted) {
  pthread_mutex_lock(&lock);
  if (block_count == block_room) blocks = realloc(blocks, (block_room = 2 * block_room + 64) * sizeof *blocks);
  blocks[block_count++] = (Block){p, size, kind, device, counted};
  if (counted) used[device] += size;
  pthread_mutex_unlock(&lock);
  return 0;
}
static int new_block(void **p, size_t size, int kind, int counted) {
  size = (size + 4095) / 4096 * 4096 ?: 4096;
  *p = mmap(0, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return *p == MAP_FAILED ? fail(cudaErrorMemoryAllocation) : add_block(*p, size, kind, counted);
}
static int free_block(int counter, void *p) {
  count(counter, "");
  Block block = find_block(p, 1);
  return block.kind == PAGEABLE ? 0 : munmap(block.start, block.size);
}
int cudaMalloc(void **p, size_t size) {
  if (size > unused(device)) return fail(cudaErrorMemoryAllocation);
  count(N_malloc, "");
  return new_block(p, size, ON_DEVICE, 1);
}
int cudaHostAlloc(void **p, size_t size) { count(N_host_alloc, ""); return new_block(p, size, PINNED, 0); }
STUB(cudaHostRegister, (void *p, size_t size), count(N_host_alloc, "register"); add_block(p, size, REGISTERED, 0))
STUB(cudaHostUnregister, (void *p), find_block(p, 1))
int cudaFree(void *p) { return free_block(N_free, p); }
int cudaFreeHost(void *p) { return free_block(N_host_free, p); }
STUB(cudaMemGetInfo, (size_t *available, size_t *total), *available = unused(device); *total = capacity())
int cudaPointerGetAttributes(struct cudaPointerAttributes *a, void *p) {
  static const int types[] = {cudaMemoryTypeUnregistered, cudaMemoryTypeDevice, cudaMemoryTypeHost, cudaMemoryTypeHost};
  Block block = find_block(p, 0);
  *a = (struct cudaPointerAttributes){types[block.kind], block.device, block.kind == ON_DEVICE ? p : NULL};
  if (block.kind >= PINNED) a->hostPointer = p;
  return 0;
}
int cuPointerGetAttribute(void *value, int number, void *p) { /* 3: its address on the device; else a kind of memory */
  return number == 3 ? (*(void **)value = p, 0) : (*(int *)value = cudaMemoryTypeDevice, 0);
}
int cuMemGetAddressRange_v2(char **start, size_t *size, void *p) {
  Block block = find_block(p, 0);
  return (start ? *start = block.start : 0, size ? *size = block.size : 0, 0);
}



/* Expandable segments reserve addresses and map pieces of memory there. Here a reservation has its pages from the
   beginning; capacity is counted where the driver would take memory, in cuMemCreate. */
typedef struct { size_t size; int device; } Piece;
int cuMemCreate(Piece **piece, size_t size, const int *properties) { /* kind, kinds of handles, kind of place, device */
  if (size > unused(properties[3])) return cudaErrorMemoryAllocation;
  count(N_malloc, "");
  *piece = malloc(sizeof **piece);
  **piece = (Piece){size, properties[3]};
  used[properties[3]] += size;
  return 0;
}
STUB(cuMemRelease, (Piece *piece), count(N_free, ""); used[piece->device] -= piece->size)
int cuMemAddressReserve(void **p, size_t size) { return new_block(p, size, ON_DEVICE, 0); }
int cuMemAddressFree(void *p) { return free_block(N_free, p); }
int cuMemUnmap(void *p, size_t size) { return madvise(p, size, MADV_DONTNEED); }
STUB(cuMemGetAllocationGranularity, (size_t *n), *n = 2 << 20) OK(cuMemMap) OK(cuMemSetAccess)

/* ---- Streams, events, graphs. A stream that waits for a capturing stream's event joins its capture. A graph keeps
   what null_gpu_record is given (transfers and collectives here, operators in emulated_gpu.cpp) and repeats it. ---- */
typedef struct { int priority, capture; } Stream;
typedef struct { double time; int capture; } Event;
typedef struct { void (*run)(void *); void *job; } Step;
typedef struct { long nodes, steps; Step *step; } Graph;
static Stream default_stream;
static Graph *recording; /* of the capture that is under way, one at a time */
static int captures;
static Stream *stream_of(void *s) { return (uintptr_t)s <= 2 ? &default_stream : s; } /* 0, 1, 2: cudaStreamPerThread */
static int capturing(void *s) { return recording && stream_of(s)->capture == captures; }
void null_gpu_record(void (*run)(void *), const void *job, size_t size) { /* `job` is copied */
  pthread_mutex_lock(&lock);
  recording->step = realloc(recording->step, (recording->steps + 1) * sizeof(Step));
  recording->nodes++;
  recording->step[recording->steps++] = (Step){run, memcpy(malloc(size), job, size)};
  pthread_mutex_unlock(&lock);
}
static int synchronize(int kind, int captured) { /* what is only being recorded never ends */
  count(kind, "");
  return captured ? fail(cudaErrorStreamCaptureUnsupported) : 0;
}
int cudaStreamSynchronize(void *s) { return synchronize(N_sync_stream, capturing(s)); }
int cudaDeviceSynchronize(void) { return synchronize(N_sync_device, recording != NULL); }
int cudaEventSynchronize(Event *e) { return synchronize(N_sync_event, recording && e->capture == captures); }
int cudaStreamCreateWithPriority(Stream **s, unsigned flags, int priority) {
  *s = calloc(1, sizeof **s);
  (*s)->priority = priority;
  return 0;
}
int cudaStreamGetCaptureInfo(void *s, int *is, unsigned long long *id, void **graph, void **d, void **e, size_t *n) {
  *is = capturing(s);
  if (id) *id = captures;
  if (graph) *graph = recording;
  if (n) *n = 0;
  return 0;
}
int cudaStreamBeginCapture(void *s, int mode) {
  recording = calloc(1, sizeof *recording);
  counts[N_captured] = 0;
  stream_of(s)->capture = ++captures;
  return 0;
}
int cudaGraphLaunch(Graph *graph, void *s) {
  count(N_graph_launch, "");
  for (int i = 0; i < graph->steps; i++) graph->step[i].run(graph->step[i].job);
  return 0;
}
STUB(cudaStreamCreateWithFlags, (Stream **s), *s = calloc(1, sizeof **s)) STUB(cudaEventDestroy, (Event *e), free(e))
STUB(cudaStreamCreate, (Stream **s), *s = calloc(1, sizeof **s)) STUB(cudaEventQuery, (), count(N_event_query, ""))
STUB(cudaStreamGetPriority, (void *s, int *priority), *priority = stream_of(s)->priority) OK(cudaStreamQuery)
STUB(cudaStreamIsCapturing, (void *s, int *is), *is = capturing(s)) OK(cudaStreamDestroy) OK(cudaGraphDestroy)
STUB(cudaStreamEndCapture, (void *s, Graph **graph), *graph = recording; recording = NULL) OK(cudaGraphExecDestroy)
STUB(cudaStreamBeginCaptureToGraph, (void *s), cudaStreamBeginCapture(s, 0)) OK(cudaThreadExchangeStreamCaptureMode)
STUB(cudaGraphGetNodes, (Graph *graph, void **nodes, size_t *n), *n = graph->nodes)
STUB(cudaGraphInstantiateWithFlags, (Graph **executable, Graph *graph), *executable = graph)
STUB(cudaLaunchHostFunc, (void *s, void (*function)(void *), void *data), function(data))
STUB(cudaEventCreateWithFlags, (Event **e), count(N_event_create, ""); *e = calloc(1, sizeof **e))
STUB(cudaEventCreate, (Event **e), count(N_event_create, ""); *e = calloc(1, sizeof **e))
STUB(cudaEventRecord, (Event *e, void *s),
     count(N_event_record, ""); e->time = now_ms(); e->capture = capturing(s) * captures)
STUB(cudaEventRecordWithFlags, (Event *e, void *s), cudaEventRecord(e, s))
STUB(cudaStreamWaitEvent, (void *s, Event *e),
     count(N_stream_wait, ""); e->capture && (stream_of(s)->capture = e->capture))
STUB(cudaEventElapsedTime, (float *ms, Event *a, Event *b), *ms = b->time - a->time)


/* ---- Copies and memset. Large ones are left out unless values matter: they would touch memory for nothing. ---- */
typedef struct { void *to; const void *from; size_t size; int value; } Transfer;
static void transfer(void *job) {
  Transfer *t = job;
  if (t->size > 64 << 20 && !emulated()) return;
  if (t->from) memmove(t->to, t->from, t->size); else memset(t->to, t->value, t->size);
}
static int submit(int kind, Transfer t, void *s) {
  char what[64];
  snprintf(what, sizeof what, "%zu bytes", t.size);
  count(kind, what);
  transfer(&t);
  if (capturing(s)) null_gpu_record(transfer, &t, sizeof t);
  return 0;
}
int cudaMemcpyAsync(void *to, const void *from, size_t size, int direction, void *s) {
  int target = find_block(to, 0).kind, source = find_block(from, 0).kind, kind = N_d2d;
  if (target == ON_DEVICE && source != ON_DEVICE) kind = source == PAGEABLE ? N_h2d_pageable : N_h2d_pinned;
  if (source == ON_DEVICE && target != ON_DEVICE) kind = target == PAGEABLE ? N_d2h_pageable : N_d2h_pinned;
  return submit(kind, (Transfer){to, from, size}, s);
}
int cudaMemcpy(void *to, const void *from, size_t size, int direction) {
  cudaMemcpyAsync(to, from, size, direction, 0);
  return synchronize(N_sync_memcpy, recording != NULL);
}
STUB(cudaMemcpyPeerAsync, (void *to, int t, void *from, int f, size_t n, void *s), cudaMemcpyAsync(to, from, n, 3, s))
STUB(cudaMemsetAsync, (void *to, int value, size_t n, void *s), submit(N_memset, (Transfer){to, 0, n, value}, s))
STUB(cudaMemset, (void *to, int value, size_t n), submit(N_memset, (Transfer){to, 0, n, value}, 0))
STUB(cudaMemcpy2DAsync, (), count(N_d2d, "2d")) STUB(cudaGetSymbolAddress, (void **p), *p = kernels)

/* ---- Kernels: the runtime's, named when their library is loaded, and Triton's, from the driver's modules ---- */
static int launch(int kind, const void *address, const char *name) {
  counts[kind]++;
  if (recording) recording->nodes++, counts[N_captured]++;
  return add_kernel(address, name, 1);
}
static __thread struct { dim3 grid, block; size_t shared; void *stream; } pushed; /* by kernel<<<...>>>, for its stub */
unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *s) {
  pushed = (typeof(pushed)){grid, block, shared, s};
  return 0;
}
STUB(__cudaPopCallConfiguration, (dim3 *grid, dim3 *block, size_t *shared, void **s),
     *grid = pushed.grid; *block = pushed.block; *shared = pushed.shared; *s = pushed.stream)
void **__cudaRegisterFatBinary(void *binary) { return (void **)kernels; } /* any address will do */
STUB(__cudaRegisterFunction, (void **h, void *address, char *d, const char *name), add_kernel(address, name, 0))
OK(__cudaRegisterFatBinaryEnd) OK(__cudaUnregisterFatBinary) OK(__cudaRegisterVar) OK(__cudaInitModule)
STUB(__cudaGetKernel, (const void **kernel, const void *address), *kernel = address)
STUB(__cudaLaunchKernel, (void *f), launch(N_launch, f, 0)) STUB(cudaLaunchKernel, (void *f), launch(N_launch, f, 0))
STUB(cudaLaunchCooperativeKernel, (void *f), launch(N_launch, f, 0))
STUB(cuLaunchKernel, (void *f), launch(N_triton, f, 0))
STUB(cudaLaunchKernelExC, (void *how, void *f), launch(N_launch, f, 0))
STUB(cuLaunchKernelEx, (void *how, void *f), launch(N_triton, f, 0))
STUB(cuLaunchCooperativeKernel, (void *f), launch(N_triton, f, 0))
STUB(cudaLibraryGetKernel, (char **f, void *library, char *name), add_kernel(*f = strdup(name), name, 0))
STUB(cuModuleGetFunction, (char **f, void *module, char *name), add_kernel(*f = strdup(name), name, 0))
STUB(cudaFuncGetAttributes, (struct cudaFuncAttributes *a), *a = (struct cudaFuncAttributes){.maxThreadsPerBlock = 1024,
     .numRegs = 32, .binaryVersion = 90, .ptxVersion = 90, .maxDynamicSharedSizeBytes = 232448})
STUB(cuFuncGetAttribute, (int *value, int number), *value = number ? 0 : 1024) /* 0: threads in a block */
STUB(cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags, (int *n), *n = 2) OK(cudaFuncSetAttribute)
STUB(cudaOccupancyMaxActiveBlocksPerMultiprocessor, (int *n), *n = 2) OK(cudaKernelSetAttributeForDevice)
STUB(cuOccupancyMaxActiveBlocksPerMultiprocessor, (int *n), *n = 2) STUB(cuModuleLoadData, (long *module), *module = 1)
STUB(cudaLibraryLoadData, (long *library), *library = 1) STUB(cuModuleLoadDataEx, (long *module), *module = 1)
STUB(cuModuleLoad, (long *module), *module = 1) OK(cudaLibraryUnload) OK(cuModuleUnload) OK(cuFuncSetAttribute)
STUB(cuOccupancyMaxActiveClusters, (int *n), *n = 66) OK(cuTensorMapEncodeTiled)

/* ---- cuBLAS and cuBLASLt: products are counted with their shapes ---- */
static int gemm(const char *name, double m, double n, double k) {
  char text[96];
  snprintf(text, sizeof text, "%s %.0fx%.0fx%.0f", name, m, n, k);
  gemm_flops += 2 * m * n * k;
  return launch(N_gemm, NULL, text);
}
#define GEMM(name) STUB(name, (void *h, int ta, int tb, int m, int n, int k), gemm(#name, m, n, k))
#define BATCHED(name, A, B, C) /* of so many matrices at a step's distance */ \
  STUB(name, (void *h, int ta, int tb, int m, int n, int k, void *alpha, A, B, void *beta, C, int batch), \
       gemm(#name, m, n, (double)k * batch))
#define PLAIN(x) void *x, int ld##x, long long step##x
#define TYPED(x) void *x, int type##x, int ld##x, long long step##x
GEMM(cublasGemmEx) GEMM(cublasSgemm_v2) GEMM(cublasDgemm_v2) GEMM(cublasSgemmEx)
BATCHED(cublasSgemmStridedBatched, PLAIN(a), PLAIN(b), PLAIN(c))
BATCHED(cublasGemmStridedBatchedEx, TYPED(a), TYPED(b), TYPED(c))
STUB(cublasSgemv_v2, (void *h, int t, int m, int n), gemm("cublasSgemv", m, n, 1)) OK(cublasDestroy_v2)
STUB(cublasSdot_v2, (void *h, int n), gemm("cublasSdot", 1, 1, n)) STUB(cublasCreate_v2, (void **h), *h = malloc(8))
STUB(cublasDotEx, (void *h, int n), gemm("cublasDotEx", 1, 1, n)) OK(cublasSetStream_v2) OK(cublasSetWorkspace_v2)
STUB(cublasGetMathMode, (void *h, int *mode), *mode = 0) STUB(cublasGetPointerMode_v2, (void *h, int *mode), *mode = 0)
OK(cublasSetMathMode) OK(cublasSetPointerMode_v2) OK(cublasSetSmCountTarget)
size_t cublasLtGetVersion(void) { return 130101; }
typedef struct { uint64_t rows, columns; int transposed, batch; } Matrix; /* a layout, or how to multiply */
int cublasLtMatrixLayoutCreate(Matrix **m, int type, uint64_t rows, uint64_t columns) {
  *m = malloc(sizeof **m);
  **m = (Matrix){rows, columns, 0, 1};
  return 0;
}
STUB(cublasLtMatmulDescCreate, (Matrix **m), *m = calloc(1, sizeof **m))
/* CUBLASLT_MATMUL_DESC_TRANSA is 3, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT 5. A heuristic result of zeros is a success. */
STUB(cublasLtMatmulDescSetAttribute, (Matrix *m, int what, int *value), what == 3 && (m->transposed = *value))
STUB(cublasLtMatrixLayoutSetAttribute, (Matrix *m, int what, int *value), what == 5 && (m->batch = *value))
STUB(cublasLtMatmulAlgoGetHeuristic, (void *h, void *op, void *a, void *b, void *c, void *d, void *p, int most,
     char *results, int *found), *found = 1; memset(results, 0, 96))
STUB(cublasLtMatmul, (void *h, Matrix *op, void *alpha, void *A, Matrix *a, void *B, Matrix *b, void *beta, void *C,
     Matrix *c, void *D, Matrix *d),
     gemm("cublasLtMatmul", d->rows, d->columns, 1.0 * (op->transposed ? a->rows : a->columns) * d->batch))
STUB(cublasLtMatmulPreferenceCreate, (void **p), *p = malloc(8)) STUB(cublasLtMatmulDescDestroy, (Matrix *m), free(m))
STUB(cublasLtMatmulPreferenceDestroy, (void *p), free(p)) STUB(cublasLtMatrixLayoutDestroy, (Matrix *m), free(m))
OK(cublasLtMatmulPreferenceSetAttribute) OK(cublasLtMatmulAlgoInit) OK(cublasLtMatmulAlgoCheck)
OK(cublasLtMatmulAlgoConfigSetAttribute) OK(cublasLtMatmulAlgoConfigGetAttribute)

/* ---- cuDNN's backend, through which torch runs convolutions: one engine, which needs no workspace ---- */
int cudnnBackendGetAttribute(void *d, int name, int type, int64_t wanted, int64_t *found, int64_t *out) {
  int is_descriptor = type == 15, is_number = type == 3 && wanted == 1; /* CUDNN_TYPE_BACKEND_DESCRIPTOR and _INT64 */
  if (found) *found = is_descriptor || is_number;
  if (out && is_number) *out = 0;
  return 0;
}
STUB(cudnnBackendCreateDescriptor, (int type, void **d), *d = calloc(1, 64)) OK(cudnnSetStream) OK(cudnnGetStream)
STUB(cudnnBackendDestroyDescriptor, (void *d), free(d)) STUB(cudnnCreate, (void **h), *h = malloc(8))
STUB(cudnnBackendExecute, (), launch(N_conv, NULL, "cudnnBackendExecute")) OK(cudnnBackendFinalize)
OK(cudnnBackendSetAttribute)

/* ---- NCCL. With NULL_GPU_NCCL=shm the ranks are processes of this machine: in shared memory each says where its data
   is, the others read it from there, and a rank whose call differs from the others' ends the run. Without it, a process
   believes that all others do and hold what it does. emulated_gpu.cpp sums up. ---- */
#define RANKS 16
#define OPERATIONS(_) _(AllReduce) _(Reduce) _(ReduceScatter) _(AllGather) _(Gather) _(AlltoAll) _(Broadcast) \
  _(Send) _(Recv)
#define AS_OPERATION(name) name,
#define AS_FUNCTION(name) "nccl" #name,
enum { OPERATIONS(AS_OPERATION) };
static const char *op_names[] = {OPERATIONS(AS_FUNCTION)};
static const int type_sizes[16] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1}; /* ncclDataType_t: int8 to bfloat16, float8 */
typedef struct Comm Comm;
typedef struct { int op, type, reduction, peer; size_t n; char *from, *to; Comm *comm; int process, color, key; } Call;
typedef struct { atomic_int arrived, meetings, full[RANKS][RANKS]; Call calls[RANKS], mail[RANKS][RANKS]; } Shared;
struct Comm { int size, rank, splits; double factor; char name[200]; Shared *shared; };
void (*null_gpu_reduce)(void *to, void *parts, int64_t ranks, int64_t n, int type, int reduction, double factor);
static void give_up(Comm *c, const char *what, const char *why) {
  fprintf(stderr, "null NCCL: rank %d of %s in %s: %s\n", c->rank, c->name, what, why);
  abort();
}
#define WAIT_UNTIL(condition, c, what) \
  for (double start = now_ms(); !(condition); usleep(20)) \
    if (now_ms() > start + 240e3) give_up(c, what, "waits for ever")
static void meet(Comm *c, const char *what) {
  int before = c->shared->meetings;
  if (atomic_fetch_add(&c->shared->arrived, 1) + 1 == c->size) {
    c->shared->arrived = 0;
    c->shared->meetings++;
  }
  WAIT_UNTIL(c->shared->meetings != before, c, what);
}
static void read_from(pid_t process, char *from, char *to, size_t size) {
  for (ssize_t done; size; from += done, to += done, size -= done) {
    done = process_vm_readv(process, &(struct iovec){to, size}, 1, &(struct iovec){from, size}, 1, 0);
    if (done <= 0) perror("null NCCL can't read another rank's memory"), abort();
  }
}
static void exchange(void *job) {
  Call *mine = job, *calls = mine->comm->shared ? mine->comm->shared->calls : NULL;
  Comm *c = mine->comm;
  size_t bytes = mine->n * type_sizes[mine->type];
  int op = mine->op, own_part = op == ReduceScatter || op == AlltoAll, broadcast = op == Broadcast;
  if (!calls && bytes * c->size > 64 << 20) return;
  if (calls) calls[c->rank] = *mine, meet(c, op_names[op]);
  char *parts = malloc(bytes * c->size + 1);
  for (int i = 0; i < c->size; i++) {
    Call *call = calls ? &calls[i] : mine;
    if (call->op != op || call->n != mine->n || call->type != mine->type || call->reduction != mine->reduction) {
      fprintf(stderr, "null NCCL: MISMATCH, rank %d: %s of %zu (type %d), rank %d: %s of %zu (type %d)\n", c->rank,
              op_names[op], mine->n, mine->type, i, op_names[call->op], call->n, call->type);
      give_up(c, op_names[op], "the ranks' calls differ");
    }
    if (!broadcast) read_from(call->process, call->from + own_part * c->rank * bytes, parts + i * bytes, bytes);
    if (broadcast && i == mine->peer) read_from(call->process, call->from, parts, bytes);
  }
  if (calls) meet(c, op_names[op]); /* now all have read what was sent, and results may take its place */
  if ((op == Reduce || op == Gather) && c->rank != mine->peer) op = Send;
  if (op <= ReduceScatter && null_gpu_reduce)
    null_gpu_reduce(mine->to, parts, c->size, mine->n, mine->type, mine->reduction, c->factor);
  else if (op != Send) memcpy(mine->to, parts, op <= ReduceScatter || broadcast ? bytes : bytes * c->size);
  free(parts);
}
/* Sends and receives wait for their group's end. A letter box says where the data is until it has been fetched. */
static __thread Call group[1024];
static __thread int grouped, depth;
static int delivered(Call *call) {
  Shared *shared = call->comm->shared;
  int sends = call->op == Send, rank = call->comm->rank;
  int from = sends ? rank : call->peer, to = sends ? call->peer : rank;
  if (sends && !call->to && !shared->full[from][to]) { /* not posted yet: `to` tells */
    shared->mail[from][to] = *call;
    shared->full[from][to] = 1;
    call->to = call->from;
    return 0;
  }
  if (shared->full[from][to] == sends) return 0;
  Call *letter = &shared->mail[from][to];
  if (!sends) read_from(letter->process, letter->from, call->to, call->n * type_sizes[call->type]);
  return !(shared->full[from][to] = 0);
}
static int all_delivered(void) {
  int left = 0;
  for (int i = 0; i < grouped; i++) if (group[i].comm && !delivered(&group[i])) left++; else group[i].comm = NULL;
  return left == 0;
}
STUB(ncclGroupStart, (), depth++)
int ncclGroupEnd(void) {
  Comm *c = grouped ? group[0].comm : NULL;
  if (--depth > 0) return 0;
  if (c && c->shared) WAIT_UNTIL(all_delivered(), c, "ncclGroupEnd");
  return grouped = 0;
}
static int call(int op, void *from, void *to, size_t n, int type, int reduction, int peer, Comm *c, void *s) {
  Call call = {op, type, reduction, peer, n, from, to, c, getpid()};
  char what[96];
  snprintf(what, sizeof what, "%s %zu bytes", op_names[op], n * type_sizes[type]);
  count(N_nccl, what);
  if (op >= Send) {
    ncclGroupStart();
    group[grouped++] = call;
    ncclGroupEnd();
  } else exchange(&call);
  if (op < Send && capturing(s)) null_gpu_record(exchange, &call, sizeof call);
  if (recording) recording->nodes++, counts[N_captured]++;
  return add_kernel(NULL, what, 1);
}
#define COLLECTIVE(op, reduction, root, ...) /* the parameters between the type and the communicator differ */ \
  STUB(nccl##op, (void *from, void *to, size_t n, int type, ##__VA_ARGS__, Comm *c, void *stream), \
       call(op, from, to, n, type, reduction, root, c, stream))
COLLECTIVE(AllReduce, reduction, 0, int reduction) COLLECTIVE(ReduceScatter, reduction, 0, int reduction)
COLLECTIVE(Reduce, reduction, root, int reduction, int root) COLLECTIVE(Broadcast, 0, root, int root)
COLLECTIVE(AllGather, 0, 0) COLLECTIVE(AlltoAll, 0, 0) COLLECTIVE(Gather, 0, root, int root)
STUB(ncclSend, (void *f, size_t n, int type, int p, Comm *c, void *s), call(Send, f, 0, n, type, 0, p, c, s))
STUB(ncclRecv, (void *t, size_t n, int type, int p, Comm *c, void *s), call(Recv, 0, t, n, type, 0, p, c, s))
static int new_comm(Comm **out, int size, int rank, const char *name) {
  Comm *c = *out = calloc(1, sizeof *c);
  *c = (Comm){size, rank};
  snprintf(c->name, sizeof c->name, "%s", name);
  if (size == 1 || strcmp(text_setting("NULL_GPU_NCCL", ""), "shm")) return 0;
  char path[256];
  snprintf(path, sizeof path, "/dev/shm/null-gpu-%s", name);
  int file = open(path, O_RDWR | O_CREAT, 0600);
  if (size > RANKS || ftruncate(file, sizeof(Shared))) give_up(c, "new_comm", "too many ranks, or /dev/shm is full");
  c->shared = mmap(0, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY); /* allows the others to read this process's memory */
  meet(c, "new_comm");
  if (rank == 0) unlink(path);
  meet(c, "new_comm");
  return 0;
}
typedef struct { char text[128]; } Id; /* hexadecimal digits, made by one rank and told to the others by torch */
int ncclGetUniqueId(Id *id) { return snprintf(id->text, 128, "%d-%.0f", getpid(), now_ms() * 1e6) < 0; }
int ncclCommSplit(Comm *parent, int color, int key, Comm **out) {
  if (!parent->shared) return new_comm(out, parent->size, parent->rank, parent->name);
  Call *calls = parent->shared->calls;
  int size = 0, rank = 0;
  calls[parent->rank] = (Call){.color = color, .key = key};
  meet(parent, "ncclCommSplit");
  for (int i = 0; i < parent->size; i++) {
    size += calls[i].color == color;
    rank += calls[i].color == color && (calls[i].key < key || (calls[i].key == key && i < parent->rank));
  }
  meet(parent, "ncclCommSplit");
  char name[200];
  snprintf(name, sizeof name, "%.160s_%d_%d", parent->name, ++parent->splits, color);
  *out = NULL;
  return color < 0 ? 0 : new_comm(out, size, rank, name);
}
STUB(ncclCommInitRank, (Comm **c, int size, Id id, int rank), new_comm(c, size, rank, id.text))
STUB(ncclCommInitRankConfig, (Comm **c, int size, Id id, int rank), new_comm(c, size, rank, id.text))
STUB(ncclCommInitRankScalable, (Comm **c, int size, int rank, int n, Id *id), new_comm(c, size, rank, id->text))
int ncclRedOpCreatePreMulSum(int *op, void *by, int type, int place, Comm *c) { /* 5: the first number of its own */
  c->factor = type == 8 ? *(double *)by : type == 6 ? *(_Float16 *)by : *(float *)by;
  return *op = 5, 0;
}
STUB(ncclCommCount, (Comm *c, int *n), *n = c->size) STUB(ncclCommUserRank, (Comm *c, int *rank), *rank = c->rank)
STUB(ncclGetVersion, (int *version), *version = 23007) STUB(ncclCommGetAsyncError, (Comm *c, int *error), *error = 0)
const char *ncclGetErrorString(int error) { return error ? "an error of the null NCCL" : "no error"; }
const char *ncclGetLastError(Comm *c) { return ""; }
OK(ncclCommDestroy) OK(ncclCommAbort) OK(ncclCommFinalize) OK(ncclRedOpDestroy)

OK(ncclCommRegister) OK(ncclCommDeregister) OK(ncclCommWindowRegister) OK(ncclCommWindowDeregister)

/* ---- A process forked from one that has used CUDA may not use it; here it may, so torch's handler is left out ---- */
int __register_atfork(void (*prepare)(void), void (*parent)(void), void (*child)(void), void *library) {
  int (*real)(void *, void *, void *, void *) = dlsym(RTLD_NEXT, "__register_atfork");
  Dl_info info;
  int torchs = child && dladdr((void *)child, &info) && strstr(info.dli_fname, "libtorch_python");
  return torchs ? 0 : real(prepare, parent, child, library);
}
