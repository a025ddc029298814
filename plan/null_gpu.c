/* The null GPU: a libcuda.so.1 that, preloaded, makes a CUDA 13 build of torch find GPUs on a machine that has none.
 *
 * torch links the CUDA runtime, cuBLAS, cuDNN and NCCL as shared libraries and looks the driver up by name. A preloaded
 * library comes before all of them, so what is defined here takes their place: what torch and Triton call, and no more.
 * "Device" memory is the host's, mapped but untouched. Kernels are counted by name and not run; with emulated_gpu.so
 * the CPU computes torch's operators, and NCCL then moves real data between processes. All work is done, or counted, at
 * the moment it is submitted: a stream never has anything left to wait for.
 *
 * Signatures, structs and numbers are those of CUDA 13's public headers (driver_types.h, cuda.h), cublas_api.h,
 * cublasLt.h, cudnn_graph.h, nvml.h and nccl.h. Their statuses are ints in which 0 is success.
 *
 * Environment: NULL_GPU_COUNT devices, of which CUDA_VISIBLE_DEVICES may hide some; NULL_GPU_GIB memory of each, of
 * which another process holds NULL_GPU_TAKEN_GIB;
 * NULL_GPU_NAME; NULL_GPU_CAPABILITY (9.0); NULL_GPU_DRIVER, the CUDA version the driver knows (13000);
 * NULL_GPU_EMULATE=1 if values matter; NULL_GPU_NCCL=shm if the ranks are processes of this machine. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <execinfo.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/uio.h>
#include <unistd.h>
#include "driver_types.h"

/* Stubs that succeed: one does nothing, one that little, one gives its caller a value through its first argument, one
   is another name of a function. () takes whatever it is called with, which the x86-64 calling convention allows. */
#define OK(name) int name() { return 0; }
#define STUB(name, parameters, ...) int name parameters { __VA_ARGS__; return 0; }
#define GIVES(name, type, value) int name(type *result) { *result = value; return 0; }
#define ALSO(name, known) extern typeof(known) name __attribute__((alias(#known)));
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread int device, last_error;
static int fail(int error) { return last_error = error; }
static const char *text_setting(const char *name, const char *otherwise) { return getenv(name) ?: otherwise; }
static double setting(const char *name, const char *otherwise) { return atof(text_setting(name, otherwise)); }
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
static __thread int in_callback; /* what Python itself does in the callback is not reported to it */
static void count(int kind, const char *what) {
  counts[kind]++;
  if (kind == N_malloc || kind == N_free) return; /* torch's allocator is locked: whoever has Python's lock may wait */
  if (callback && !in_callback) in_callback = 1, callback(kind, what), in_callback = 0;
}
/* Kernels by name. The key is the address that stands for a kernel in the host's code, or a hash (FNV) of the name. */
static struct { uint64_t key; const char *name; long count; } kernels[1 << 19];
static const int SLOTS = sizeof kernels / sizeof *kernels;
static int add_kernel(const void *address, const char *name, int times) {
  uint64_t key = (uint64_t)address;
  if (!address) for (const char *c = name; *c; c++) key = (key ^ (unsigned char)*c) * 1099511628211ull;
  pthread_mutex_lock(&lock);
  int i = (key ^ key >> 4) * 0x9E3779B97F4A7C15ull >> 45;
  while (kernels[i].key && kernels[i].key != key) i = (i + 1) % SLOTS;
  if (!kernels[i].key) kernels[i].key = key, kernels[i].name = strdup(name ?: "?");
  kernels[i].count += times;
  return pthread_mutex_unlock(&lock);
}
long null_gpu_count(int kind) { return counts[kind]; }
const char *null_gpu_kind_name(int kind) { return kind < KIND_COUNT ? kind_names[kind] : NULL; }
double null_gpu_gemm_flops(void) { return gemm_flops; }
void null_gpu_set_callback(void (*function)(int, const char *)) { callback = function; } /* not called for kernels */
void null_gpu_reset(void) {
  gemm_flops = 0, memset(counts, 0, sizeof counts);
  for (int i = 0; i < SLOTS; i++) kernels[i].count = 0;
}
void null_gpu_write_kernels(const char *path) { /* lines of count, tab, name; collectives with one rank's bytes */
  FILE *file = fopen(path, "w");
  for (int i = 0; file && i < SLOTS; i++)
    if (kernels[i].count) fprintf(file, "%ld\t%s\n", kernels[i].count, kernels[i].name);
  if (file) fclose(file);
}
/* ---- The device, as the runtime (cuda...) and the driver (cu...) describe it: an H100 if nothing else is set ---- */
static int emulated(void) { return setting("NULL_GPU_EMULATE", "0") == 1; }
static int device_count(void) { /* those that CUDA_VISIBLE_DEVICES names */
  static int known = -1; /* a watchdog of NCCL may ask while Python changes the environment: getenv is not safe then */
  if (known >= 0) return known;
  const char *visible = getenv("CUDA_VISIBLE_DEVICES");
  int count = setting("NULL_GPU_COUNT", "1"), named = visible && *visible;
  for (const char *c = visible ?: ""; *c; c++) named += *c == ',';
  return known = visible && named < count ? named : count;
}
static int driver(void) { return setting("NULL_GPU_DRIVER", "13000"); }
static size_t gib(const char *name, const char *otherwise) { return setting(name, otherwise) * (1ull << 30); }
static size_t capacity(void) { return gib("NULL_GPU_GIB", "79.1"); }
static int major(void) { return atoi(text_setting("NULL_GPU_CAPABILITY", "9.0")); }
static int minor(void) { return atoi((strchr(text_setting("NULL_GPU_CAPABILITY", "9.0"), '.') ?: ".0") + 1); }
static int attribute(int number) { /* cudaDevAttr... and CU_DEVICE_ATTRIBUTE_... share their numbers */
  static const int constants[128] = {
    [cudaDevAttrMaxThreadsPerBlock] = 1024, [cudaDevAttrMaxThreadsPerMultiProcessor] = 2048, [cudaDevAttrWarpSize] = 32,
    [cudaDevAttrMaxRegistersPerBlock] = 65536, [cudaDevAttrClockRate] = 1980000, [cudaDevAttrMultiProcessorCount] = 132,
    [cudaDevAttrMemoryClockRate] = 2619000, [cudaDevAttrGlobalMemoryBusWidth] = 5120,
    [cudaDevAttrMaxGridDimX] = 1 << 30, [cudaDevAttrMaxSharedMemoryPerBlock] = 49152,
    [cudaDevAttrMaxSharedMemoryPerBlockOptin] = 232448, [102] = 1, [103] = 1}; /* virtual memory, its handles' kind */
  if (number == cudaDevAttrComputeCapabilityMajor) return major();
  return number == cudaDevAttrComputeCapabilityMinor ? minor() : number >= 0 && number < 128 ? constants[number] : 0;
}
int cudaGetDeviceProperties(struct cudaDeviceProp *p, int d) {
  *p = (struct cudaDeviceProp){
    .totalGlobalMem = capacity(), .major = major(), .minor = minor(), .multiProcessorCount = 132, .warpSize = 32,
    .maxThreadsPerBlock = 1024, .maxThreadsPerMultiProcessor = 2048, .maxBlocksPerMultiProcessor = 32,
    .maxThreadsDim = {1024, 1024, 64}, .maxGridSize = {1 << 30, 65535, 65535}, .sharedMemPerBlock = 49152,
    .sharedMemPerBlockOptin = 232448, .sharedMemPerMultiprocessor = 233472, .regsPerBlock = 65536,
    .regsPerMultiprocessor = 65536, .l2CacheSize = 50 << 20, .textureAlignment = 512, .uuid.bytes = {d}};
  return snprintf(p->name, sizeof p->name, "%s", text_setting("NULL_GPU_NAME", "NVIDIA H100 80GB HBM3")) < 0;
}
int cudaGetDeviceCount(int *n) { /* a driver older than the runtime is told by this error, and torch warns of it */
  *n = driver() < 13000 ? 0 : device_count();
  return driver() < 13000 ? fail(cudaErrorInsufficientDriver) : *n ? 0 : fail(cudaErrorNoDevice);
}
int cudaSetDevice(int d) { return d < 0 || d >= device_count() ? fail(cudaErrorInvalidDevice) : (device = d, 0); }
int cudaDeviceGetPCIBusId(char *text, int size, int d) { return snprintf(text, size, "0000:%02x:00.0", d + 1) < 0; }
int cudaPeekAtLastError(void) { return last_error; }
int cudaGetLastError(void) { int error = last_error; return last_error = 0, error; }
const char *cudaGetErrorString(int error) { /* torch tells users this */
  return error == cudaErrorInsufficientDriver ? "CUDA driver version is insufficient for CUDA runtime version"
    : error == cudaErrorStreamCaptureUnsupported ? "operation not permitted when stream is capturing"
    : error ? "an error of the null GPU" : "no error";
}
ALSO(cudaGetErrorName, cudaGetErrorString)
STUB(cudaDeviceGetAttribute, (int *value, int number), *value = attribute(number)) OK(cudaDeviceEnablePeerAccess)
STUB(cudaDeviceGetStreamPriorityRange, (int *least, int *most), if (least) *least = 0; if (most) *most = -5)
GIVES(cudaGetDevice, int, device) GIVES(cudaDriverGetVersion, int, driver()) GIVES(cudaRuntimeGetVersion, int, 13000)
GIVES(cudaDeviceCanAccessPeer, int, 1) OK(cudaProfilerStart) OK(cudaProfilerStop)
/* The driver, for torch and for what Triton compiles and links. Its context is only ever compared with NULL. */
GIVES(cuDevicePrimaryCtxRetain, void *, (void *)0x100) ALSO(cuCtxGetCurrent, cuDevicePrimaryCtxRetain)
STUB(cuDevicePrimaryCtxGetState, (int d, unsigned *flags, int *active), *flags = 0; *active = 1) OK(cuInit)
GIVES(cuDeviceGetCount, int, device_count()) STUB(cuDeviceGetUuid, (char *uuid, int d), memset(uuid, d, 16))
ALSO(cuDriverGetVersion, cudaDriverGetVersion) ALSO(cuCtxGetDevice, cudaGetDevice) OK(cuLogsUnregisterCallback)
STUB(cuGetErrorString, (int error, const char **text), *text = cudaGetErrorString(error)) OK(cuLogsRegisterCallback)
ALSO(cuGetErrorName, cuGetErrorString) ALSO(cuDeviceGetAttribute, cudaDeviceGetAttribute) OK(cuCtxPushCurrent)
STUB(cuDeviceGet, (int *d, int i), *d = i) OK(cuCtxSetCurrent) OK(cuCtxPopCurrent) OK(cuCtxSetLimit) OK(cuCtxGetLimit)
/* NVML, under the second name build.py gives this library. The allocator asks it how GPUs are linked: they are not. */
#define REFUSES(name) int name() { return 3; } /* NVML_ERROR_NOT_SUPPORTED */
OK(nvmlInit_v2) OK(nvmlDeviceGetHandleByPciBusId_v2) REFUSES(nvmlDeviceGetNvLinkRemoteDeviceType)
STUB(nvmlDeviceGetComputeRunningProcesses, (void *d, unsigned *n), *n = 0) REFUSES(nvmlDeviceGetNvLinkRemotePciInfo_v2)
REFUSES(nvmlDeviceGetGpuFabricInfoV) REFUSES(nvmlSystemGetCudaDriverVersion_v2)
/* CUPTI, by which torch's profiler would hear of kernels: it hears of none. The real one calls itself for ever where
   there is no real driver. */
OK(cuptiActivityDisable) OK(cuptiActivityEnable) OK(cuptiActivityEnableCudaEventDeviceTimestamps) OK(cuptiFinalize)
OK(cuptiActivityEnableDriverApi) OK(cuptiActivityEnableRuntimeApi) OK(cuptiActivityFlushAll) OK(cuptiEnableCallback)
OK(cuptiActivityPopExternalCorrelationId) OK(cuptiActivityPushExternalCorrelationId) OK(cuptiActivitySetAttribute)
OK(cuptiActivityRegisterCallbacks) OK(cuptiActivityRegisterTimestampCallback) OK(cuptiSubscribe) OK(cuptiUnsubscribe)
OK(cuptiEnableDomain) GIVES(cuptiGetVersion, uint32_t, 130000)
enum { READ_WRITE = PROT_READ | PROT_WRITE, NEW = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE };
static void *pages(size_t size) { return mmap(0, size, READ_WRITE, NEW, -1, 0); }
/* ---- What is not here. torch looks up dozens of the driver's functions that it never calls, so each gets a few bytes
   of code that name it when it is called: mov rdi, name; mov rax, missing; jmp rax. ---- */
static void missing(const char *name) {
  fprintf(stderr, "null GPU: %s was called, which plan/null_gpu.c does not have\n", name), abort();
}
int cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned v, unsigned long long f, int *status) {
  if (status) *status = cudaDriverEntryPointSuccess;
  if ((*function = dlsym(RTLD_DEFAULT, name))) return 0;
  char *code = *function = pages(4096);
  memcpy(code, "\x48\xbf" "--name--" "\x48\xb8" "missing-" "\xff\xe0", 22);
  memcpy(code + 2, &(char *){strdup(name)}, 8), memcpy(code + 12, &(void *){missing}, 8);
  return mprotect(code, 4096, PROT_READ | PROT_EXEC);
}
/* The real runtime looks here for the driver when one of its functions is called that this file doesn't have: it is the
   outermost function of the runtime that is on the stack. */
int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status) {
  void *frames[32];
  Dl_info info;
  for (int i = backtrace(frames, 32) - 1; i >= 0; i--)
    if (dladdr(frames[i], &info) && strstr(info.dli_fname, "libcudart") && info.dli_sname) missing(info.dli_sname);
  return cudaErrorNotSupported;
}
/* ---- Memory: the blocks that the GPU knows of. `before` is what one held before a capture: see keep_memory. ---- */
enum { PAGEABLE, ON_DEVICE, PINNED, REGISTERED };
typedef struct { char *start; size_t size; int kind, device; char *before; } Block;
static Block *blocks;
static int block_count, block_room;
static _Atomic ssize_t used[16];
static ssize_t unused(int d) { return capacity() - used[d] - gib("NULL_GPU_TAKEN_GIB", "0"); }
static Block find_block(const char *p, int remove) { /* the newest first: a block that is looked for is often new */
  Block found = {.kind = PAGEABLE, .device = -2};
  pthread_mutex_lock(&lock);
  int i = block_count - 1;
  while (i >= 0 && (p < blocks[i].start || p >= blocks[i].start + blocks[i].size)) i--;
  if (i >= 0) found = blocks[i];
  if (i >= 0 && remove) blocks[i] = blocks[--block_count], free(found.before);
  pthread_mutex_unlock(&lock);
  return found;
}
static int add_block(void *p, size_t size, int kind) {
  pthread_mutex_lock(&lock);
  if (block_count == block_room) blocks = realloc(blocks, (block_room = 2 * block_room + 64) * sizeof *blocks);
  blocks[block_count++] = (Block){p, size, kind, device};
  return pthread_mutex_unlock(&lock);
}
static int new_block(int counter, void **p, size_t size, int kind) {
  size = (size + 4095) / 4096 * 4096 ?: 4096;
  if (kind == ON_DEVICE && (ssize_t)size > unused(device)) return fail(cudaErrorMemoryAllocation);
  if (kind == ON_DEVICE) used[device] += size;
  return count(counter, ""), add_block(*p = pages(size), size, kind);
}
static void free_block(int counter, void *p) {
  Block block = (count(counter, ""), find_block(p, 1));
  if (block.kind == ON_DEVICE) used[block.device] -= block.size;
  if (block.kind != PAGEABLE) munmap(block.start, block.size);
}
int cudaMalloc(void **p, size_t size) { return new_block(N_malloc, p, size, ON_DEVICE); }
int cudaHostAlloc(void **p, size_t size) { return new_block(N_host_alloc, p, size, PINNED); }
STUB(cudaFree, (void *p), free_block(N_free, p)) STUB(cudaFreeHost, (void *p), free_block(N_host_free, p))
STUB(cudaHostRegister, (void *p, size_t n), count(N_host_alloc, "register"); add_block(p, n, REGISTERED))
STUB(cudaMemGetInfo, (ssize_t *left, size_t *all), *all = capacity(); *left = unused(device) > 0 ? unused(device) : 0)
STUB(cudaHostUnregister, (void *p), find_block(p, 1)) GIVES(cuMemGetAllocationGranularity, size_t, 2 << 20)
STUB(cudaPointerGetAttributes, (struct cudaPointerAttributes *a, void *p), Block b = find_block(p, 0);
     *a = (struct cudaPointerAttributes){b.kind == ON_DEVICE ? cudaMemoryTypeDevice : b.kind ? cudaMemoryTypeHost : 0,
                                         b.device, b.kind == ON_DEVICE ? p : 0, b.kind >= PINNED ? p : 0})
STUB(cuPointerGetAttribute, (void *value, int number, void *p), /* 3: its address on the device, else a kind */
     if (number == 3) *(void **)value = p; else *(int *)value = cudaMemoryTypeDevice)
/* Expandable segments reserve addresses, create pieces of memory and map them there. Here a reservation has its pages
   from the beginning. A piece is its size plus its device, the fourth of its properties. */
int cuMemCreate(size_t *piece, size_t size, const int *properties) {
  if ((ssize_t)size > unused(properties[3])) return cudaErrorMemoryAllocation;
  used[properties[3]] += size;
  return count(N_malloc, ""), *piece = size + properties[3], 0;
}
STUB(cuMemRelease, (size_t piece), count(N_free, ""); used[piece % 4096] -= piece / 4096 * 4096) OK(cuMemSetAccess)
STUB(cuMemMap, (void *p, size_t size), add_block(p, size, ON_DEVICE))
STUB(cuMemUnmap, (void *p, size_t n), find_block(p, 1); madvise(p, n, MADV_DONTNEED))
STUB(cuMemAddressReserve, (void **p, size_t n), *p = pages(n)) STUB(cuMemAddressFree, (void *p, size_t n), munmap(p, n))
/* ---- Streams, events, graphs. A stream that waits for a capturing stream's event joins its capture. A graph keeps
   what null_gpu_record is given (transfers and collectives here, operators in emulated_gpu.cpp) and repeats it. ---- */
typedef struct { int capture; } Stream; /* the number of the capture that it is, or was, part of */
typedef struct { double time; int capture; } Event;
typedef struct { long nodes, steps; struct { void (*run)(void *); void *job; } *step; } Graph;
static Stream default_stream;
static Graph *recording; /* of the capture that is under way, one at a time */
static int captures;
static Stream *stream_of(void *s) { return (uintptr_t)s <= 2 ? &default_stream : s; } /* 0, 1, 2: cudaStreamPerThread */
static int capturing(void *s) { return recording && stream_of(s)->capture == captures; }
void null_gpu_record(void (*run)(void *), const void *job, size_t size) { /* `job` is copied */
  pthread_mutex_lock(&lock);
  recording->step = realloc(recording->step, (recording->steps + 1) * sizeof *recording->step);
  recording->step[recording->steps].run = run, recording->nodes++;
  recording->step[recording->steps++].job = memcpy(malloc(size), job, size);
  pthread_mutex_unlock(&lock);
}
/* During a capture a GPU computes nothing, but the emulation does, once. So the memory that was there is put back. */
static void keep_memory(int put_back) {
  pthread_mutex_lock(&lock);
  for (Block *b = blocks; emulated() && b < blocks + block_count; b++)
    if (put_back && b->before) memcpy(b->start, b->before, b->size), free(b->before), b->before = NULL;
    else if (!put_back && b->kind == ON_DEVICE) b->before = memcpy(malloc(b->size), b->start, b->size);
  pthread_mutex_unlock(&lock);
}
STUB(cudaStreamBeginCapture, (void *s), keep_memory(0); counts[N_captured] = 0;
     recording = calloc(1, sizeof *recording); stream_of(s)->capture = ++captures)
STUB(cudaStreamEndCapture, (void *s, Graph **graph), *graph = recording; recording = NULL; keep_memory(1))
STUB(cudaStreamGetCaptureInfo, (void *s, int *is, uint64_t *id, void **graph, void **dependencies, void **e, size_t *n),
     *is = capturing(s); if (id) *id = captures; if (graph) *graph = recording; if (n) *n = 0)
STUB(cudaGraphLaunch, (Graph *g),
     count(N_graph_launch, ""); for (int i = 0; i < g->steps; i++) g->step[i].run(g->step[i].job))
static int synchronize(int kind, int captured) { /* what is only being recorded never ends */
  return count(kind, ""), captured ? fail(cudaErrorStreamCaptureUnsupported) : 0;
}
static double now(void) { struct timespec t; return clock_gettime(CLOCK_MONOTONIC, &t), t.tv_sec + t.tv_nsec / 1e9; }
int cudaStreamSynchronize(void *s) { return synchronize(N_sync_stream, capturing(s)); }
int cudaDeviceSynchronize(void) { return synchronize(N_sync_device, recording != NULL); }
int cudaEventSynchronize(Event *e) { return synchronize(N_sync_event, recording && e->capture == captures); }
GIVES(cudaStreamCreate, Stream *, calloc(1, sizeof(Stream))) ALSO(cudaStreamCreateWithFlags, cudaStreamCreate)
ALSO(cudaStreamCreateWithPriority, cudaStreamCreate) STUB(cudaStreamGetPriority, (void *s, int *n), *n = 0)
STUB(cudaStreamIsCapturing, (void *s, int *is), *is = capturing(s)) OK(cudaStreamQuery) OK(cudaStreamDestroy)
ALSO(cuStreamIsCapturing, cudaStreamIsCapturing)
STUB(cudaStreamWaitEvent, (void *s, Event *e),
     count(N_stream_wait, ""); if (e->capture) stream_of(s)->capture = e->capture)
STUB(cudaEventCreate, (Event **e), count(N_event_create, ""); *e = calloc(1, sizeof **e)) OK(cudaGraphDestroy)
STUB(cudaEventDestroy, (Event *e), free(e)) ALSO(cudaEventCreateWithFlags, cudaEventCreate) OK(cudaGraphExecDestroy)
STUB(cudaEventRecord, (Event *e, void *s), count(N_event_record, ""); *e = (Event){now(), capturing(s) * captures})
STUB(cudaEventElapsedTime, (float *ms, Event *a, Event *b), *ms = 1e3 * (b->time - a->time))
ALSO(cudaEventRecordWithFlags, cudaEventRecord) STUB(cudaEventQuery, (), count(N_event_query, ""))
STUB(cudaGraphGetNodes, (Graph *graph, void **nodes, size_t *n), *n = graph->nodes)
STUB(cudaGraphInstantiateWithFlags, (Graph **executable, Graph *graph), *executable = graph)
STUB(cudaLaunchHostFunc, (void *s, void (*act)(void *), void *data), act(data)) OK(cudaThreadExchangeStreamCaptureMode)
/* ---- Copies and memset. Large ones are left out unless values matter: they would touch memory for nothing. ---- */
typedef struct { void *to; const void *from; size_t size; int value; } Transfer;
static void transfer(void *job) {
  Transfer *t = job;
  if (t->size > 1 << 20 && !emulated()) return;
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
  return cudaMemcpyAsync(to, from, size, direction, 0), synchronize(N_sync_memcpy, recording != NULL);
}
STUB(cudaMemcpyPeerAsync, (void *to, int t, void *from, int f, size_t n, void *s), cudaMemcpyAsync(to, from, n, 3, s))
STUB(cudaMemsetAsync, (void *to, int value, size_t n, void *s), submit(N_memset, (Transfer){to, 0, n, value}, s))
STUB(cudaMemset, (void *to, int value, size_t n), submit(N_memset, (Transfer){to, 0, n, value}, 0))
STUB(cudaMemcpy2DAsync, (), count(N_d2d, "2d")) GIVES(cudaGetSymbolAddress, void *, kernels)
/* ---- Kernels: the runtime's, named when their library is loaded, and Triton's, from the driver's modules ---- */
static int launch(int kind, const void *address, const char *name) {
  counts[kind]++;
  if (recording) recording->nodes++, counts[N_captured]++;
  return add_kernel(address, name, 1), 0;
}
STUB(cudaLaunchKernel, (void *kernel), launch(N_launch, kernel, 0)) ALSO(__cudaLaunchKernel, cudaLaunchKernel)
STUB(cudaLaunchKernelExC, (void *how, void *kernel), launch(N_launch, kernel, 0)) OK(__cudaPushCallConfiguration)
STUB(cuLaunchKernel, (void *kernel), launch(N_triton, kernel, 0)) ALSO(cudaLaunchCooperativeKernel, cudaLaunchKernel)
STUB(cuLaunchKernelEx, (void *how, void *kernel), launch(N_triton, kernel, 0)) OK(__cudaPopCallConfiguration)
STUB(__cudaRegisterFunction, (void **h, void *kernel, char *d, const char *name), add_kernel(kernel, name, 0))
STUB(cuModuleGetFunction, (char **kernel, void *m, char *name), add_kernel(*kernel = strdup(name), name, 0))
ALSO(cudaLibraryGetKernel, cuModuleGetFunction) OK(cudaLibraryUnload) OK(cuModuleUnload)
GIVES(cuModuleLoad, long, 1) ALSO(cuModuleLoadData, cuModuleLoad) ALSO(cuModuleLoadDataEx, cuModuleLoad)
ALSO(cudaLibraryLoadData, cuModuleLoad) STUB(__cudaGetKernel, (void **kernel, void *address), *kernel = address)
void **__cudaRegisterFatBinary(void *binary) { return (void **)kernels; } /* any address will do */
OK(__cudaRegisterFatBinaryEnd) OK(__cudaUnregisterFatBinary) OK(__cudaRegisterVar) OK(__cudaInitModule)
STUB(cudaFuncGetAttributes, (struct cudaFuncAttributes *a), *a = (struct cudaFuncAttributes){.maxThreadsPerBlock = 1024,
     .numRegs = 32, .binaryVersion = 90, .ptxVersion = 90, .maxDynamicSharedSizeBytes = 232448})
STUB(cuFuncGetAttribute, (int *value, int number), *value = number ? 0 : 1024) /* 0: threads in a block */
GIVES(cudaOccupancyMaxActiveBlocksPerMultiprocessor, int, 2) GIVES(cuOccupancyMaxActiveClusters, int, 66)
ALSO(cuOccupancyMaxActiveBlocksPerMultiprocessor, cudaOccupancyMaxActiveBlocksPerMultiprocessor)
ALSO(cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags, cudaOccupancyMaxActiveBlocksPerMultiprocessor)
OK(cudaFuncSetAttribute) OK(cudaKernelSetAttributeForDevice) OK(cuFuncSetAttribute) OK(cuFuncSetCacheConfig)
OK(cuTensorMapEncodeTiled) OK(cuTensorMapEncodeIm2col) ALSO(cuLaunchCooperativeKernel, cuLaunchKernel)
/* ---- cuBLAS and cuBLASLt: products are counted with their shapes ---- */
static int gemm(const char *name, double m, double n, double k) {
  char text[96];
  snprintf(text, sizeof text, "%s %.0fx%.0fx%.0f", name, m, n, k);
  gemm_flops += 2 * m * n * k;
  return launch(N_gemm, NULL, text);
}
#define GEMM(name) int name(void *h, int ta, int tb, int m, int n, int k) { return gemm(#name, m, n, k); }
#define BATCHED(name, A, B, C) /* of so many matrices at a step's distance */ \
  int name(void *h, int ta, int tb, int m, int n, int k, void *alpha, A, B, void *beta, C, int batch) { \
    return gemm(#name, m, n, (double)k * batch); }
#define PLAIN(x) void *x, int ld##x, long long step##x
#define TYPED(x) void *x, int type##x, int ld##x, long long step##x
GEMM(cublasGemmEx) GEMM(cublasSgemm_v2) GEMM(cublasDgemm_v2) GEMM(cublasSgemmEx)
BATCHED(cublasSgemmStridedBatched, PLAIN(a), PLAIN(b), PLAIN(c))
BATCHED(cublasGemmStridedBatchedEx, TYPED(a), TYPED(b), TYPED(c))
STUB(cublasSgemv_v2, (void *h, int t, int m, int n), gemm("cublasSgemv", m, n, 1)) OK(cublasSetSmCountTarget)
STUB(cublasSdot_v2, (void *h, int n), gemm("cublasSdot", 1, 1, n)) OK(cublasSetStream_v2) OK(cublasSetWorkspace_v2)
STUB(cublasDotEx, (void *h, int n), gemm("cublasDotEx", 1, 1, n)) OK(cublasSetPointerMode_v2) OK(cublasSetMathMode)
GIVES(cublasCreate_v2, void *, malloc(8)) STUB(cublasGetMathMode, (void *h, int *mode), *mode = 0) OK(cublasDestroy_v2)
ALSO(cublasGetPointerMode_v2, cublasGetMathMode) size_t cublasLtGetVersion(void) { return 130101; }
typedef struct { uint64_t rows, columns; int transposed, batch; } Matrix; /* a layout, or how to multiply */
STUB(cublasLtMatrixLayoutCreate, (Matrix **m, int type, uint64_t rows, uint64_t columns),
     *m = malloc(sizeof **m); **m = (Matrix){rows, columns, 0, 1})
GIVES(cublasLtMatmulDescCreate, Matrix *, calloc(1, sizeof(Matrix)))
/* CUBLASLT_MATMUL_DESC_TRANSA is 3, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT 5. A heuristic result of zeros is a success. */
STUB(cublasLtMatmulDescSetAttribute, (Matrix *m, int what, int *value), what == 3 && (m->transposed = *value))
STUB(cublasLtMatrixLayoutSetAttribute, (Matrix *m, int what, int *value), what == 5 && (m->batch = *value))
STUB(cublasLtMatmulAlgoGetHeuristic, (void *h, void *op, void *a, void *b, void *c, void *d, void *p, int most,
     char *results, int *found), *found = 1; memset(results, 0, 96))
STUB(cublasLtMatmul, (void *h, Matrix *op, void *alpha, void *A, Matrix *a, void *B, Matrix *b, void *beta, void *C,
     Matrix *c, void *D, Matrix *d),
     gemm("cublasLtMatmul", d->rows, d->columns, 1.0 * (op->transposed ? a->rows : a->columns) * d->batch))
GIVES(cublasLtMatmulPreferenceCreate, void *, malloc(8)) STUB(cublasLtMatmulPreferenceDestroy, (void *p), free(p))
ALSO(cublasLtMatmulDescDestroy, cublasLtMatmulPreferenceDestroy) OK(cublasLtMatmulPreferenceSetAttribute)
ALSO(cublasLtMatrixLayoutDestroy, cublasLtMatmulPreferenceDestroy) OK(cublasLtMatmulAlgoInit)
OK(cublasLtMatmulAlgoCheck) OK(cublasLtMatmulAlgoConfigSetAttribute) OK(cublasLtMatmulAlgoConfigGetAttribute)
/* ---- cuDNN's backend, through which torch runs convolutions: one engine, which needs no workspace ---- */
int cudnnBackendGetAttribute(void *d, int name, int type, int64_t wanted, int64_t *found, int64_t *out) {
  int is_descriptor = type == 15, is_number = type == 3 && wanted == 1; /* CUDNN_TYPE_BACKEND_DESCRIPTOR and _INT64 */
  return found ? *found = is_descriptor || is_number : 0, out && is_number ? *out = 0 : 0, 0;
}
STUB(cudnnBackendCreateDescriptor, (int type, void **d), *d = calloc(1, 64)) GIVES(cudnnCreate, void *, malloc(8))
STUB(cudnnBackendDestroyDescriptor, (void *d), free(d)) OK(cudnnBackendSetAttribute) OK(cudnnBackendFinalize)
STUB(cudnnBackendExecute, (), launch(N_conv, NULL, "cudnnBackendExecute")) OK(cudnnSetStream) OK(cudnnGetStream)
/* ---- NCCL. With NULL_GPU_NCCL=shm the ranks are processes of this machine: in shared memory each says where its data
   is, the others read it from there, and a rank whose call differs from the others' ends the run. Without it, a process
   believes that all others do and hold what it does. emulated_gpu.cpp sums up. ---- */
enum { AllReduce, Reduce, ReduceScatter, AllGather, Gather, AlltoAll, Broadcast, Send, Recv, RANKS = 16, LETTERS = 64 };
static const char *names[] = {"AllReduce", "Reduce", "ReduceScatter", "AllGather", "Gather", "AlltoAll", "Broadcast",
                              "Send", "Recv"};
static const int type_sizes[16] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1}; /* ncclDataType_t: int8 to bfloat16, float8 */
typedef struct { int op, type, reduction, peer, process; size_t n; char *from, *to; struct Comm *comm; } Call;
typedef struct { atomic_int sent, fetched; Call letters[LETTERS]; } Box; /* they say where what is sent lies */
typedef struct { atomic_int arrived, meetings; int colors[RANKS]; Call calls[RANKS]; Box boxes[RANKS][RANKS]; } Shared;
typedef struct Comm { int size, rank, splits; double factor; char name[200]; Shared *shared; } Comm;
void (*null_gpu_reduce)(void *to, void *parts, int64_t ranks, int64_t n, int type, int reduction, double factor);
static void give_up(const char *why) { fprintf(stderr, "null NCCL: %s\n", why), abort(); }
#define WAIT_UNTIL(condition) for (int i = 0; !(condition); usleep(50)) if (++i == 2000000) give_up("a rank is missing")
static int is_one_gone(Comm *c) { /* a real GPU would wait, but not the host, which hears of it by gloo */
  for (Call *call = c->shared->calls; call < c->shared->calls + c->size; call++)
    if (call->process && kill(call->process, 0)) give_up("the process of a rank is gone");
  return 0;
}
static void meet(Comm *c) {
  int before = c->shared->meetings;
  if (++c->shared->arrived == c->size) c->shared->arrived = 0, c->shared->meetings++;
  WAIT_UNTIL(c->shared->meetings != before || (i % 10000 == 9999 && is_one_gone(c)));
}
static void read_from(Call *call, size_t offset, char *to, size_t size) {
  struct iovec here = {to, size}, there = {call->from + offset, size};
  if (process_vm_readv(call->process, &here, 1, &there, 1, 0) != size) give_up("another rank's memory can't be read");
}
static void exchange(void *job) {
  Call *mine = job, *calls = mine->comm->shared ? mine->comm->shared->calls : NULL;
  Comm *c = mine->comm;
  int op = mine->op, one_part = op <= ReduceScatter || op == Broadcast, own = op == ReduceScatter || op == AlltoAll;
  size_t bytes = mine->n * type_sizes[mine->type];
  if (!calls && bytes * c->size > 1 << 20) return;
  if (calls) calls[c->rank] = *mine, meet(c);
  char *parts = malloc(bytes * c->size + 1), why[256];
  for (int i = 0; i < c->size; i++) {
    Call *call = calls ? &calls[i] : mine;
    snprintf(why, sizeof why, "MISMATCH, rank %d: nccl%s of %zu (type %d), rank %d: nccl%s of %zu (type %d)", c->rank,
             names[op], mine->n, mine->type, i, names[call->op], call->n, call->type);
    if (memcmp(call, mine, 4 * sizeof(int)) || call->n != mine->n) give_up(why); /* op, type, reduction, root */
    read_from(call, own * c->rank * bytes, parts + i * bytes, bytes);
  }
  if (calls) meet(c); /* now all have read what was sent, and results may take its place */
  if ((op == Reduce || op == Gather) && c->rank != mine->peer) bytes = 0; /* the result is the root's alone */
  else if (op <= ReduceScatter && null_gpu_reduce)
    null_gpu_reduce(mine->to, parts, c->size, mine->n, mine->type, mine->reduction, c->factor);
  else memcpy(mine->to, op == Broadcast ? parts + mine->peer * bytes : parts, one_part ? bytes : bytes * c->size);
  free(parts);
}
static __thread Call group[1024]; /* what is sent and received is delivered at the end of a group */
static __thread int grouped, depth;
STUB(ncclGroupStart, (), depth++)
int ncclGroupEnd(void) {
  if (--depth > 0) return 0;
  for (int round = 0; round < 3; round++) for (Call *call = group; call < group + grouped; call++) {
    int sends = call->op == Send, rank = call->comm->rank;
    Box *box = &call->comm->shared->boxes[sends ? rank : call->peer][sends ? call->peer : rank];
    if (round == 0 && sends) {
      WAIT_UNTIL(box->sent - box->fetched < LETTERS);
      box->letters[box->sent % LETTERS] = *call, box->sent++;
    } else if (round == 1 && !sends) {
      WAIT_UNTIL(box->sent > box->fetched);
      read_from(&box->letters[box->fetched % LETTERS], 0, call->to, call->n * type_sizes[call->type]), box->fetched++;
    } else if (round == 2 && sends) WAIT_UNTIL(box->fetched == box->sent);
  }
  return grouped = 0;
}
static int call(int op, void *from, void *to, size_t n, int type, int reduction, int peer, Comm *c, void *s) {
  Call call = {op, type, reduction, peer, getpid(), n, from, to, c};
  char what[96];
  snprintf(what, sizeof what, "nccl%s %zu bytes", names[op], n * type_sizes[type]);
  count(N_nccl, what);
  if (op < Send) exchange(&call);
  else if (c->shared) ncclGroupStart(), group[grouped++] = call, ncclGroupEnd();
  if (op < Send && capturing(s)) null_gpu_record(exchange, &call, sizeof call);
  if (recording) recording->nodes++, counts[N_captured]++;
  return add_kernel(NULL, what, 1);
}
#define COLLECTIVE(op, reduction, root, ...) /* the parameters between the type and the communicator differ */ \
  int nccl##op(void *from, void *to, size_t n, int type, ##__VA_ARGS__, Comm *c, void *stream) { \
    return call(op, from, to, n, type, reduction, root, c, stream); }
COLLECTIVE(AllReduce, reduction, 0, int reduction) COLLECTIVE(ReduceScatter, reduction, 0, int reduction)
COLLECTIVE(Reduce, reduction, root, int reduction, int root) COLLECTIVE(Broadcast, 0, root, int root)
COLLECTIVE(AllGather, 0, 0) COLLECTIVE(AlltoAll, 0, 0) COLLECTIVE(Gather, 0, root, int root)
int ncclSend(void *f, size_t n, int type, int p, Comm *c, void *s) { return call(Send, f, 0, n, type, 0, p, c, s); }
int ncclRecv(void *t, size_t n, int type, int p, Comm *c, void *s) { return call(Recv, 0, t, n, type, 0, p, c, s); }
static int new_comm(Comm **out, int size, int rank, const char *name) {
  Comm *c = *out = calloc(1, sizeof *c);
  c->size = size, c->rank = rank, strcpy(c->name, name);
  if (strcmp(text_setting("NULL_GPU_NCCL", ""), "shm")) return 0;
  char path[256] = "/dev/shm/null-gpu-";
  int file = open(strcat(path, name), O_RDWR | O_CREAT, 0600);
  if (size > RANKS || ftruncate(file, sizeof(Shared))) give_up("too many ranks, or /dev/shm is full");
  c->shared = mmap(0, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY); /* allows the others to read this process's memory */
  meet(c);
  return unlink(path), close(file);
}
typedef struct { char text[128]; } Id; /* made by one rank and told to the others by torch */
STUB(ncclGetUniqueId, (Id *id), snprintf(id->text, 128, "%d-%.0f", getpid(), now() * 1e9))
STUB(ncclCommInitRank, (Comm **c, int size, Id id, int rank), new_comm(c, size, rank, id.text))
int ncclCommSplit(Comm *parent, int color, int key, Comm **out) { /* torch's keys are in the order of the ranks */
  if (!parent->shared) return new_comm(out, parent->size, parent->rank, parent->name);
  char name[200];
  int size = 0, rank = 0, *colors = parent->shared->colors;
  colors[parent->rank] = color, meet(parent);
  for (int i = 0; i < parent->size; i++) size += colors[i] == color, rank += colors[i] == color && i < parent->rank;
  snprintf(name, sizeof name, "%.160s_%d_%d", parent->name, ++parent->splits, color), meet(parent);
  return color < 0 ? (*out = NULL, 0) : new_comm(out, size, rank, name);
}
STUB(ncclRedOpCreatePreMulSum, (int *op, void *by, int type, int place, Comm *c), *op = 5; /* first of one's own */
     c->factor = type == 8 ? *(double *)by : type == 6 ? *(_Float16 *)by : *(float *)by)
STUB(ncclCommCount, (Comm *c, int *n), *n = c->size) STUB(ncclCommUserRank, (Comm *c, int *rank), *rank = c->rank)
STUB(ncclCommGetAsyncError, (Comm *c, int *error), *error = 0) GIVES(ncclGetVersion, int, 23007)
const char *ncclGetErrorString(int error) { return error ? "an error of the null NCCL" : ""; }
ALSO(ncclGetLastError, ncclGetErrorString) ALSO(ncclCommInitRankConfig, ncclCommInitRank)
OK(ncclCommDestroy) OK(ncclCommAbort) OK(ncclCommFinalize) OK(ncclCommRegister) OK(ncclCommDeregister)
OK(ncclCommWindowRegister) OK(ncclCommWindowDeregister) OK(ncclRedOpDestroy)
/* ---- A process forked from one that has used CUDA may not use it; here it may, so torch's handler is left out ---- */
int __register_atfork(void (*prepare)(void), void (*parent)(void), void (*child)(void), void *library) {
  int (*real)(void *, void *, void *, void *) = dlsym(RTLD_NEXT, "__register_atfork");
  Dl_info info;
  int torchs = child && dladdr((void *)child, &info) && strstr(info.dli_fname, "libtorch_python");
  return torchs ? 0 : real(prepare, parent, child, library);
}
