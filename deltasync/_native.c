// The loops over elements on the host: compare, fingerprint, add, prepare, swap, count, encode, decode.
//
// `deltasync/kernels/native.py` is the only caller and documents each function; `kernels/reference.py` says in numpy what
// they return. This file has no state but the pool of threads, and depends on Python and pthreads alone. It includes itself
// once for each instruction set: the part between KERNELS and the end is compiled for plain C (or NEON), AVX2 and AVX-512.
//
// Addresses in tables of rows are the caller's and trusted. Whatever came from a store (words, tables, counts, positions) is
// checked: malformed input is refused, and nothing is read or written beyond an array.

#ifndef ISA
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

typedef uint64_t u64;
typedef uint32_t u32;
typedef uint16_t u16;
typedef uint8_t u8;
typedef int64_t i64;
typedef unsigned __int128 u128;
#define INLINE static inline __attribute__((always_inline))
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))

enum {
    ROW = 1 << 16,       // most elements of a row that is compared, so that offsets fit 16 bits
    CHUNK = 1 << 12,     // most changes of a row
    STREAM = 1 << 18,    // elements that are hashed by one thread
    PIECE = 1 << 12,     // elements of a block that are counted at a time
    AHEAD = 64,          // elements, or changes, for which memory is asked for ahead
    BLOCK = 1 << 10,     // most changes that are written at a time
    COLUMNS = 6,         // of a line of `kernels.table`
    DIMS = 8,
    SYMBOLS = 256,
    TABLE_BITS = 12,
    SLOTS = 1 << TABLE_BITS,
    LANES = 64,
    STRIDE = 16,
    RATIO_BITS = 8,
    SAMPLE = 32,
    WIDE = 4,  // blocks that are coded at a time: each symbol of a block waits for the symbol before
};
#define EACH(n) _Pragma("GCC unroll 4") for (int n = 0; n < WIDE; n++)

// ---- Threads: one pool for the process, started by the first large job; a fork has none and starts its own ----

typedef struct Job {
    void (*run)(struct Job *);
    void *of;
    i64 count;
    _Atomic i64 next;
    _Atomic int failed;  // out of memory, or malformed input
    int active, most;
    struct Job *link;
} Job;

static pthread_mutex_t pool_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t pool_work = PTHREAD_COND_INITIALIZER, pool_done = PTHREAD_COND_INITIALIZER;
static Job *pool_jobs;
static int pool_threads;

static i64 take(Job *job) {
    i64 row = atomic_fetch_add_explicit(&job->next, 1, memory_order_relaxed);
    return row < job->count && !atomic_load_explicit(&job->failed, memory_order_relaxed) ? row : -1;
}

static void *pool_main(void *unused) {
    (void)unused;
    pthread_mutex_lock(&pool_lock);
    for (;;) {
        Job *job = pool_jobs;
        while (job && (job->active >= job->most || atomic_load(&job->next) >= job->count)) job = job->link;
        if (!job) {
            pthread_cond_wait(&pool_work, &pool_lock);
            continue;
        }
        job->active++;
        pthread_mutex_unlock(&pool_lock);
        job->run(job);
        pthread_mutex_lock(&pool_lock);
        if (!--job->active) pthread_cond_broadcast(&pool_done);
    }
    return NULL;
}

static void pool_start(int threads) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_t thread;
    while (pool_threads < threads && !pthread_create(&thread, &attributes, pool_main, NULL)) pool_threads++;
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

// Runs a job in this thread and up to `threads` - 1 others. Returns 0, or what a thread set `failed` to.
static int run(void (*kernel)(Job *), void *of, i64 count, i64 threads) {
    Job job = {.run = kernel, .of = of, .count = count, .most = (int)MIN(MIN(threads, count) - 1, 1023)};
    if (job.most <= 0) {
        kernel(&job);
        return job.failed;
    }
    pthread_mutex_lock(&pool_lock);
    pool_start(job.most);
    job.link = pool_jobs;
    pool_jobs = &job;
    pthread_cond_broadcast(&pool_work);
    pthread_mutex_unlock(&pool_lock);
    kernel(&job);
    pthread_mutex_lock(&pool_lock);
    Job **at = &pool_jobs;
    while (*at != &job) at = &(*at)->link;
    *at = job.link;
    while (job.active) pthread_cond_wait(&pool_done, &pool_lock);
    pthread_mutex_unlock(&pool_lock);
    return job.failed;
}

static void before_fork(void) { pthread_mutex_lock(&pool_lock); }
static void after_fork(void) { pthread_mutex_unlock(&pool_lock); }
static void in_child(void) {
    pthread_mutex_init(&pool_lock, NULL);
    pthread_cond_init(&pool_work, NULL);
    pthread_cond_init(&pool_done, NULL);
    pool_jobs = NULL;
    pool_threads = 0;
}

enum { NO_MEMORY = 1, MALFORMED = 2 };

// ---- Elements of 1, 2, 4 or 8 bytes, at any address ----

INLINE u64 get(const void *p, i64 i, int w) {
    const char *at = (const char *)p + i * w;
    u64 v = 0;
    if (w == 1) { u8 x; memcpy(&x, at, 1); v = x; }
    if (w == 2) { u16 x; memcpy(&x, at, 2); v = x; }
    if (w == 4) { u32 x; memcpy(&x, at, 4); v = x; }
    if (w == 8) { u64 x; memcpy(&x, at, 8); v = x; }
    return v;
}
INLINE void put(void *p, i64 i, u64 v, int w) {
    char *at = (char *)p + i * w;
    if (w == 1) { u8 x = (u8)v; memcpy(at, &x, 1); }
    if (w == 2) { u16 x = (u16)v; memcpy(at, &x, 2); }
    if (w == 4) { u32 x = (u32)v; memcpy(at, &x, 4); }
    if (w == 8) { memcpy(at, &v, 8); }
}
INLINE i64 at_of(const void *p, i64 k, int wide) { return wide ? ((const i64 *)p)[k] : ((const int32_t *)p)[k]; }
INLINE void at_set(void *p, i64 k, i64 v, int wide) {
    if (wide) ((i64 *)p)[k] = v;
    else ((int32_t *)p)[k] = (int32_t)v;
}
INLINE u64 all_bits(int w) { return ~(u64)0 >> (64 - 8 * w); }
INLINE void *pointer(i64 address) { return (void *)(uintptr_t)address; }

#define INDEX_STEP 0x9E3779B97F4A7C15u
// What an element adds to the fingerprint of its tensor: `reference.cell_hash`.
INLINE u64 cell(u64 key, u64 index, u64 bits) {
    u64 z = key + index * INDEX_STEP + bits * 0xD1B54A32D192ED03u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

// ---- What kernels work on; see native.py ----

typedef struct { int w; u64 key; const i64 *start; i64 length, chunks; const char *bits; char *out; _Atomic u64 *sum; } Stream;
typedef struct {
    int w, wide;
    const i64 *row;  // tensor, first index, count, address before, address after, position
    const u64 *key, *bound;
    i64 room, rows;
    _Atomic i64 used;
    u16 *arena_offset;
    char *arena_step, *step;
    void *at;
    i64 *count_R, *place_R, *start_R, *above_R;
    u64 *gain_R;
} Scan;
typedef struct {
    int w, wide, is_done;  // whether memory has taken the steps, so that it is only read
    const i64 *row;  // tensor, first change, behind the last, address of position 0, first position, behind the last
    const u64 *key, *bound;
    const void *at;
    const char *step;
    u64 *gain_R;
    i64 *above_R;
} Add;
typedef struct {
    int w;
    i64 block;
    const i64 *line, *dims, *write, *row;  // see kernels/table.py
    const u32 *low;
    const char *step;
    u32 *to;  // positions in live memory, or `OUTSIDE` of the segment
    char *value;
    _Atomic u64 *sum;
    i64 lines;
} Writes;
#define OUTSIDE 0xFFFFFFFFu
typedef struct {
    int w, wide;
    i64 classes, blocks;
    const i64 *base_B, *size_BC, *bound_B, *ratio_CC;
    i64 *size_to_BC;
    const void *at;
    const u8 *class_K;
    const char *step;
    const u32 *freq_TS;
    // counting
    const i64 *run_R;
    i64 *count_RTS;
    // encoding
    const void *coding;
    const i64 *room_B;
    u32 *out;
    i64 *first_B;
    // decoding
    const u32 *words;
    const i64 *word_B2;
    void *at_to;
    char *step_to;
    // classes: address, columns, stride, rows, first position, shift, mask
    const i64 *row_BF;
    const u8 *class_E, *low_C, *span_C;
    int32_t *rank_K;
    u8 *class_to_K;
    // survey
    const i64 *period_R;
    i64 *element_RE;
    u32 *step_RES;
} Code;
typedef struct {
    int w, wide, by_tile;
    const i64 *bound_G, *band_GF;
    const void *at;
    const char *step;
    void *at_to;
    char *step_to;
    i64 *count_B;
} Regroup;
typedef struct { u64 inverse; u32 freq, start; } Coding;  // of a symbol
typedef struct { u8 symbol[SLOTS]; u32 range[SYMBOLS]; } Decoding;  // a table: symbol of each slot; slots and first slot of each symbol

#define BAD(job, code) (atomic_store(&(job)->failed, code))
#define BY_WIDTH(body, job, of) \
    switch ((of)->w) { \
        case 1: body(job, of, 1); break; \
        case 2: body(job, of, 2); break; \
        case 4: body(job, of, 4); break; \
        default: body(job, of, 8); \
    }
#define KERNEL(name, Kind) \
    static void ISA(name)(Job *job) { Kind *of = job->of; BY_WIDTH(ISA(name##_body), job, of) }

// ---- Numbers, see rans.py ----

INLINE u32 bucket(u64 value, u32 *extra) {
    if (value < 16) { *extra = 0; return (u32)value; }
    u32 exponent = 63 - (u32)__builtin_clzll(value);
    *extra = exponent - 2;
    return 4 * exponent + ((u32)(value >> *extra) & 3);
}
INLINE u64 zigzag(u64 step, int w) {
    i64 signed_ = (i64)(step << (64 - 8 * w)) >> (64 - 8 * w), sign = signed_ >> 63;  // no branch: every second one is negative
    return 2 * (((u64)signed_ ^ (u64)sign) - (u64)sign) - 1 + (u64)sign;
}
INLINE u64 unzigzag(u64 value) {
    u64 magnitude = (value >> 1) + 1, sign = (value & 1) - 1;
    return (magnitude ^ sign) - sign;
}
// The class in which the gap before change k of a block begins, and the gap.
INLINE i64 gap_before(const Code *of, i64 b, i64 k, i64 *gap, int one) {
    i64 base = of->base_B[b], place = at_of(of->at, k, of->wide) - base, low = of->bound_B[b];
    if (one) {
        *gap = place - (k > low ? at_of(of->at, k - 1, of->wide) - base : -1) - 1;
        return 0;
    }
    i64 c = of->class_K[k], classes = of->classes, begin = 0, before = -1;
    const i64 *size_C = of->size_BC + b * classes, *ratio_CC = of->ratio_CC;
    if (k > low) {
        begin = of->class_K[k - 1];
        before = at_of(of->at, k - 1, of->wide) - base;
    } else while (begin < classes - 1 && size_C[begin] == 0) begin++;
    if (begin == c) {
        *gap = place - before - 1;
        return begin;
    }
    i64 rest = size_C[begin] - before - 1;
    for (i64 to = begin + 1; to < c; to++) rest += (size_C[to] * ratio_CC[begin * classes + to]) >> RATIO_BITS;
    *gap = rest + (((place + 1) * ratio_CC[begin * classes + c]) >> RATIO_BITS) - 1;
    return begin;
}

#define JOIN2(a, b) a##_##b
#define JOIN1(a, b) JOIN2(a, b)
#define ISA(name) JOIN1(name, SUFFIX)

#define differing ISA(differing)
#define between ISA(between)
#define ones ISA(ones)
#define nth ISA(nth)
#define ahead ISA(ahead)
#define at_most ISA(at_most)
#define snap ISA(snap)
#define find ISA(find)
#define flush ISA(flush)
#define push_bits ISA(push_bits)
#define push_symbol ISA(push_symbol)
#define pull ISA(pull)
#define number ISA(number)
#define open_lane ISA(open_lane)
#define change ISA(change)
#define decode_lanes ISA(decode_lanes)
#define field_row ISA(field_row)
#define count_block ISA(count_block)
#define place_block ISA(place_block)
#define neon_bits ISA(neon_bits)

#define SUFFIX plain
#include "_native.c"
#undef SUFFIX
#if defined(__x86_64__)
#define PRAGMA(text) _Pragma(#text)
#ifdef __clang__
#define BEGIN(isa) PRAGMA(clang attribute push(__attribute__((target(isa))), apply_to = function))
#define END _Pragma("clang attribute pop")
#define WIDE_VECTORS ""
#else
#define BEGIN(isa) _Pragma("GCC push_options") PRAGMA(GCC target(isa))
#define END _Pragma("GCC pop_options")
#define WIDE_VECTORS ",prefer-vector-width=512"
#endif
BEGIN("avx2,bmi,bmi2,lzcnt,popcnt")
#define SUFFIX avx2
#define AVX2
#include "_native.c"
#undef SUFFIX
#undef AVX2
END
BEGIN("avx512f,avx512bw,avx512dq,avx512vl,avx512cd,avx512vbmi2,avx2,bmi,bmi2,lzcnt,popcnt" WIDE_VECTORS)
#define SUFFIX avx512
#define AVX512
#include "_native.c"
#undef SUFFIX
#undef AVX512
END
#define FOR_ISA(name) {name##_plain, name##_avx2, name##_avx512}
#else
#define FOR_ISA(name) {name##_plain}
#endif
// ---- What Python calls ----

enum { MOST_ARGUMENTS = 16 };
typedef struct {
    i64 n[MOST_ARGUMENTS];   // integers, by place
    void *p[MOST_ARGUMENTS]; // arrays; NULL for None
    i64 size[MOST_ARGUMENTS];
    int item[MOST_ARGUMENTS];
    Py_buffer view[MOST_ARGUMENTS];
    int held;
} Call;

static int simd;  // plain (or NEON), AVX2, AVX-512

// Reads arguments: n an integer, r an array, w one that is written, o an array or None.
static int parse(Call *call, PyObject *arguments, const char *kinds) {
    call->held = 0;
    i64 count = PyTuple_Size(arguments);
    if (count != (i64)strlen(kinds)) {
        PyErr_SetString(PyExc_TypeError, "wrong number of arguments");
        return 0;
    }
    for (i64 i = 0; i < count; i++) {
        PyObject *argument = PyTuple_GetItem(arguments, i);
        if (kinds[i] == 'n') {
            call->n[i] = (i64)PyLong_AsUnsignedLongLongMask(argument);
            if (PyErr_Occurred()) return 0;
            continue;
        }
        call->p[i] = NULL;
        call->size[i] = call->item[i] = 0;
        if (kinds[i] == 'o' && argument == Py_None) continue;
        Py_buffer *view = &call->view[call->held];
        if (PyObject_GetBuffer(argument, view, kinds[i] == 'w' ? PyBUF_WRITABLE : PyBUF_SIMPLE)) return 0;
        call->held++;
        call->p[i] = view->buf;
        call->item[i] = (int)view->itemsize;
        call->size[i] = view->len / MAX(view->itemsize, 1);
    }
    return 1;
}

static PyObject *finish(Call *call, PyObject *result) {
    while (call->held) PyBuffer_Release(&call->view[--call->held]);
    return result;
}

static PyObject *refuse(Call *call, const char *text) {
    PyErr_SetString(PyExc_ValueError, text);
    return finish(call, NULL);
}

static PyObject *report(Call *call, int failed) {
    if (failed == NO_MEMORY) return PyErr_NoMemory(), finish(call, NULL);
    return finish(call, PyBool_FromLong(!failed));
}

// Whether argument i is an array of `count` elements of `item` bytes.
#define IS(i, items, bytes) (call.item[i] == (bytes) && call.size[i] == (items))
#define WIDTH(i) (call.item[i] == 1 || call.item[i] == 2 || call.item[i] == 4 || call.item[i] == 8)
#define INDEX(i) (call.item[i] == 4 || call.item[i] == 8)
#define RUN(kernel, of, count, threads, failed) \
    do { \
        static void (*const kernels[])(Job *) = FOR_ISA(kernel); \
        Py_BEGIN_ALLOW_THREADS failed = run(kernels[simd], of, count, threads); \
        Py_END_ALLOW_THREADS \
    } while (0)
#define ENTRY(name, kinds) \
    static PyObject *name##_entry(PyObject *self, PyObject *arguments) { \
        (void)self; \
        Call call; \
        int failed = 0; \
        (void)failed; \
        if (!parse(&call, arguments, kinds)) return finish(&call, NULL);
#define WRONG return refuse(&call, "arrays of wrong sizes or types")

// Whether numbers ascend from `least` to `most` at most.
static int ascends(const i64 *p, i64 count, i64 least, i64 most) {
    for (i64 i = 0; i < count; i++) {
        if (p[i] < least || p[i] > most) return 0;
        least = p[i];
    }
    return 1;
}

// Memory that is used again, because new memory is slow when first written.
enum { MOST_SPARE = 64 << 20 };
static void *spare;
static i64 spare_bytes;

static void *take_spare(i64 bytes) {
    pthread_mutex_lock(&pool_lock);
    void *found = spare_bytes >= bytes ? spare : NULL;
    if (found) spare = NULL, spare_bytes = 0;
    pthread_mutex_unlock(&pool_lock);
    return found ? found : malloc((size_t)bytes);
}

static void keep_spare(void *p, i64 bytes) {
    pthread_mutex_lock(&pool_lock);
    if (p && bytes > spare_bytes && bytes <= MOST_SPARE) {
        void *other = spare;
        spare = p, spare_bytes = bytes;
        p = other;
    }
    pthread_mutex_unlock(&pool_lock);
    free(p);
}

ENTRY(fingerprint, "nnrro")  // threads, key, first index of each run, bits, copy
    _Atomic u64 sum = 0;
    Stream of = {.w = call.item[3], .key = (u64)call.n[1], .start = call.p[2], .bits = call.p[3], .out = call.p[4], .sum = &sum};
    if (!WIDTH(3) || call.item[2] != 8 || (call.p[4] && !IS(4, call.size[3], of.w))) WRONG;
    if (call.size[2] && call.size[3]) {
        of.length = call.size[3] / call.size[2];
        if (of.length * call.size[2] != call.size[3]) WRONG;
        RUN(stream, &of, call.size[2] * ((of.length + STREAM - 1) / STREAM), call.n[0], failed);
    }
    return finish(&call, PyLong_FromUnsignedLongLong(sum));
}

ENTRY(scan, "nrrrwwww")  // threads, rows, keys, bounds, positions, steps, gains, above
    i64 rows = call.size[1] / 6, tensors = call.size[2], total = 0;
    Scan of = {.w = call.item[5], .wide = call.item[4] == 8, .row = call.p[1], .key = call.p[2], .bound = call.p[3],
               .at = call.p[4], .step = call.p[5], .room = call.size[5], .rows = rows};
    if (!IS(1, 6 * rows, 8) || !IS(2, tensors, 8) || !IS(3, 2 * tensors, 8) || !WIDTH(5) || !INDEX(4) ||
        call.size[4] != of.room || !IS(6, tensors, 8) || !IS(7, tensors, 8)) WRONG;
    for (i64 r = 0; r < rows; r++) {
        const i64 *row = of.row + 6 * r;
        if (row[0] < 0 || row[0] >= tensors || row[2] < 0 || row[2] > ROW) WRONG;
    }
    i64 *numbers = calloc((size_t)MAX(rows, 1), 5 * 8), arena_bytes = of.room * (of.w + 2) + 16;
    of.arena_step = take_spare(arena_bytes);
    of.arena_offset = (u16 *)(of.arena_step + of.room * of.w + (of.room & of.w & 1));
    of.count_R = numbers, of.place_R = numbers + rows, of.start_R = numbers + 2 * rows, of.above_R = numbers + 3 * rows;
    of.gain_R = (u64 *)numbers + 4 * rows;
    failed = numbers && of.arena_step ? 0 : NO_MEMORY;
    if (!failed) RUN(scan, &of, rows, call.n[0], failed);
    for (i64 r = 0; !failed && r < rows; r++) {
        of.start_R[r] = total;
        total += of.count_R[r];
    }
    if (!failed && total <= of.room) {
        RUN(join, &of, rows, total < ROW ? 1 : call.n[0], failed);
        for (i64 r = 0; r < rows; r++) {
            ((u64 *)call.p[6])[of.row[6 * r]] += of.gain_R[r];
            ((i64 *)call.p[7])[of.row[6 * r]] += of.above_R[r];
        }
    }
    free(numbers);
    keep_spare(of.arena_step, arena_bytes);
    if (failed) return report(&call, failed);
    return finish(&call, PyLong_FromLongLong(total));
}

ENTRY(add, "nnrrrrrww")  // threads, whether memory has taken the steps, rows, keys, bounds, positions, steps, gains, above
    i64 rows = call.size[2] / 6, tensors = call.size[3], changes = call.size[6];
    Add of = {.w = call.item[6], .wide = call.item[5] == 8, .is_done = call.n[1] != 0, .row = call.p[2], .key = call.p[3],
              .bound = call.p[4], .at = call.p[5], .step = call.p[6]};
    if (!IS(2, 6 * rows, 8) || !IS(3, tensors, 8) || !IS(4, 2 * tensors, 8) || !WIDTH(6) || !INDEX(5) ||
        call.size[5] != changes || !IS(7, tensors, 8) || !IS(8, tensors, 8)) WRONG;
    for (i64 r = 0; r < rows; r++) {
        const i64 *row = of.row + 6 * r;
        if (row[0] < 0 || row[0] >= tensors || row[1] < 0 || row[2] < row[1] || row[2] > changes || row[2] - row[1] > CHUNK) WRONG;
    }
    i64 *numbers = calloc((size_t)MAX(rows, 1), 2 * 8);
    of.gain_R = (u64 *)numbers, of.above_R = numbers + rows;
    if (!numbers) return report(&call, NO_MEMORY);
    RUN(check, &of, rows, call.n[0], failed);
    if (!failed) RUN(add, &of, rows, call.n[0], failed);
    for (i64 r = 0; !failed && r < rows; r++) {
        ((u64 *)call.p[7])[of.row[6 * r]] += of.gain_R[r];
        ((i64 *)call.p[8])[of.row[6 * r]] += of.above_R[r];
    }
    free(numbers);
    return report(&call, failed);
}

// Reads what `stage` and `exchange` have: threads, changes of a row, lines, dimensions, writes, rows, positions in memory, values, sums.
static int writes_of(Writes *of, const Call *at) {
    Call call = *at;
    i64 lines = call.size[2] / COLUMNS, strided = call.size[3] / (6 * DIMS), room = call.size[6];
    *of = (Writes){.w = call.item[7], .block = call.n[1], .line = call.p[2], .dims = call.p[3], .write = call.p[4], .row = call.p[5],
                   .to = call.p[6], .value = call.p[7], .sum = call.p[8], .lines = lines};
    if (!IS(2, COLUMNS * lines, 8) || !IS(3, 6 * DIMS * strided, 8) || !IS(4, 3 * lines, 8) || call.item[5] != 8 ||
        !IS(6, room, 4) || !WIDTH(7) || call.size[7] != room || !IS(8, 3 * lines, 8) || of->block < 1 || of->block > BLOCK) return 0;
    for (i64 r = 0; r < call.size[5]; r++) {
        i64 number = of->row[r] >> 32, first = (of->row[r] & 0xFFFFFFFF) * of->block;
        if (number < 0 || number >= lines) return 0;
        const i64 *write = of->write + 3 * number, dims = of->line[COLUMNS * number + 5];
        if (dims < 0 || dims > DIMS || (dims && number >= strided) || write[0] < 0 || write[2] < 0 || first >= write[1] ||
            write[2] + write[1] > room) return 0;
    }
    return 1;
}

ENTRY(stage, "nnrrrrwwwrr")  // and positions and steps
    Writes of;
    if (!writes_of(&of, &call) || call.item[9] != 4 || !IS(10, call.size[9], of.w)) WRONG;
    for (i64 r = 0; r < call.size[5]; r++) {
        const i64 *write = of.write + 3 * (of.row[r] >> 32);
        if (write[0] + write[1] > call.size[9]) WRONG;
    }
    of.low = call.p[9], of.step = call.p[10];
    RUN(stage, &of, call.size[5], call.n[0], failed);
    return report(&call, failed);
}

ENTRY(exchange, "nnrrrrrww")
    Writes of;
    if (!writes_of(&of, &call)) WRONG;
    RUN(exchange, &of, call.size[5], call.n[0], failed);
    return report(&call, failed);
}

// Reads the blocks and changes from arguments i on: base, sizes, bounds, positions, classes, steps. Returns whether they fit.
static int blocks_of(Code *of, Call *at, int i, i64 classes) {
    Call call = *at;
    of->blocks = call.size[i + 2] - 1, of->classes = classes;
    of->base_B = call.p[i], of->size_BC = call.p[i + 1], of->bound_B = call.p[i + 2];
    of->at = call.p[i + 3], of->class_K = call.p[i + 4], of->step = call.p[i + 5];
    of->w = call.item[i + 5], of->wide = call.item[i + 3] == 8;
    i64 changes = call.size[i + 5];
    if (of->blocks < 0 || classes < 1 || classes > SYMBOLS || !IS(i, of->blocks, 8) || !IS(i + 1, of->blocks * classes, 8) ||
        call.item[i + 2] != 8 || !INDEX(i + 3) || call.size[i + 3] != changes || !WIDTH(i + 5)) return 0;
    if (of->class_K ? !IS(i + 4, changes, 1) : classes != 1) return 0;
    for (i64 k = 0; of->class_K && k < changes; k++)
        if (of->class_K[k] >= classes) return 0;
    return ascends(of->bound_B, of->blocks + 1, 0, changes);
}

ENTRY(count, "nrrrrrorrw")  // threads, runs, blocks and changes, ratios, counts
    i64 runs = call.size[1] - 1, classes = 1;
    while (classes * classes < call.size[8]) classes++;
    Code of = {.run_R = call.p[1], .ratio_CC = call.p[8], .count_RTS = call.p[9]};
    if (!blocks_of(&of, &call, 2, classes) || !IS(8, classes * classes, 8) || call.item[1] != 8 || runs < 0 ||
        !ascends(of.run_R, runs + 1, 0, of.blocks) || !IS(9, runs * 2 * classes * SYMBOLS, 8)) WRONG;
    RUN(count, &of, runs, call.n[0], failed);
    return report(&call, failed);
}

ENTRY(encode, "nrrrrorrrrww")  // threads, blocks and changes, frequencies, ratios, ends of rooms, words, words of each block
    i64 classes = call.size[7] / (2 * SYMBOLS), most = 0;
    Code of = {.freq_TS = call.p[7], .ratio_CC = call.p[8], .room_B = call.p[9], .out = call.p[10], .first_B = call.p[11]};
    if (!blocks_of(&of, &call, 1, classes) || !IS(7, 2 * classes * SYMBOLS, 4) || !IS(8, classes * classes, 8) ||
        !IS(9, of.blocks + 1, 8) || call.item[10] != 4 || !IS(11, of.blocks, 8)) WRONG;
    // 12 bits for each symbol, at most 61 and 8 w - 3 extra ones
    most = (2 * TABLE_BITS + 61 + 8 * of.w + 31) / 32;
    for (i64 b = 0; b < of.blocks; b++)
        if (of.room_B[b + 1] - of.room_B[b] < most * (of.bound_B[b + 1] - of.bound_B[b]) + 5) WRONG;
    if (of.room_B[0] || of.room_B[of.blocks] > call.size[10]) WRONG;
    Coding *coding = malloc((size_t)(2 * classes * SYMBOLS) * sizeof *coding);
    if (!coding) return report(&call, NO_MEMORY);
    for (i64 t = 0; t < 2 * classes; t++)
        for (u32 s = 0, start = 0; s < SYMBOLS; start += of.freq_TS[t * SYMBOLS + s++]) {
            u64 freq = of.freq_TS[t * SYMBOLS + s];  // 2**64 / freq rounded down; the division is of 2**64 - 1
            u64 inverse = freq < 2 ? ~(u64)0 : ~(u64)0 / freq + ((freq & (freq - 1)) == 0);
            coding[t * SYMBOLS + s] = (Coding){inverse, (u32)freq, start};
        }
    of.coding = coding;
    RUN(encode, &of, (of.blocks + 3) / 4, call.n[0], failed);
    free(coding);
    u32 *to = of.out;
    for (i64 b = 0; b < of.blocks; b++) {  // close the gaps between the blocks
        i64 count = of.room_B[b + 1] - of.first_B[b];
        memmove(to, of.out + of.first_B[b], (size_t)count * 4);
        to += count;
        of.first_B[b] = count;
    }
    return report(&call, failed);
}

// Returns tables with these slots for each symbol; NULL if they do not add up.
static Decoding *slots_of(const u32 *freq_TS, i64 tables) {
    Decoding *found = malloc((size_t)tables * sizeof *found);
    for (i64 t = 0; found && t < tables; t++) {
        u32 at = 0;
        int is_right = 1;
        for (u32 s = 0; s < SYMBOLS; s++) {
            u32 freq = MIN(freq_TS[t * SYMBOLS + s], SLOTS - at);
            memset(found[t].symbol + at, (int)s, freq);
            found[t].range[s] = freq << 16 | at;
            at += freq;
            is_right &= freq == freq_TS[t * SYMBOLS + s];
        }
        if (at != SLOTS || !is_right) {
            free(found);
            return NULL;
        }
    }
    return found;
}

ENTRY(decode, "nrrrrrrww")  // threads, words, words of blocks, base, sizes, bounds, frequencies, positions, steps
    i64 blocks = call.size[5] - 1, changes = call.size[8];
    Code of = {.words = call.p[1], .word_B2 = call.p[2], .base_B = call.p[3], .size_BC = call.p[4], .bound_B = call.p[5],
               .at_to = call.p[7], .step_to = call.p[8], .w = call.item[8], .wide = call.item[7] == 8, .classes = 1, .blocks = blocks};
    if (call.item[1] != 4 || blocks < 0 || !IS(2, 2 * blocks, 8) || !IS(3, blocks, 8) || !IS(4, blocks, 8) || call.item[5] != 8 ||
        !IS(6, 2 * SYMBOLS, 4) || !INDEX(7) || call.size[7] != changes || !WIDTH(8) || !ascends(of.bound_B, blocks + 1, 0, changes) ||
        !ascends(of.word_B2, 2 * blocks, 0, call.size[1])) WRONG;
    Decoding *slot = slots_of(call.p[6], 2);
    if (!slot) return refuse(&call, "tables of wrong sums");
    of.coding = slot;
    RUN(decode, &of, (blocks + 3) / 4, call.n[0], failed);
    free(slot);
    return report(&call, failed);
}

// Whether the table of blocks, argument i, fits; classes are arguments j and j + 1.
static int classes_of(Code *of, Call *at, int i, int j) {
    Call call = *at;
    of->row_BF = call.p[i], of->bound_B = call.p[i + 1], of->blocks = call.size[i] / 7;
    of->low_C = call.p[j], of->span_C = call.p[j + 1], of->classes = call.size[j];
    for (i64 b = 0; b < of->blocks; b++) {
        const i64 *row = of->row_BF + 7 * b;
        if (row[1] < 1 || row[2] < 0 || row[3] < 1 || row[1] > (1 << 30) || row[3] > (1 << 30) / row[1] || row[5] < 0 || row[5] > 63 ||
            row[6] < 0 || row[6] > 255) return 0;
    }
    return IS(i, 7 * of->blocks, 8) && IS(i + 1, of->blocks + 1, 8) && of->classes > 0 && of->classes <= SYMBOLS && call.item[j] == 1 &&
           IS(j + 1, of->classes, 1);
}

ENTRY(rank, "nrrrrrrrwwww")  // threads, blocks, bounds, positions, steps, class of each field, classes, sizes, ranks, classes, steps
    i64 changes = call.size[4];
    Code of = {.at = call.p[3], .step = call.p[4], .w = call.item[4], .wide = call.item[3] == 8, .class_E = call.p[5],
               .size_to_BC = call.p[8], .rank_K = call.p[9], .class_to_K = call.p[10], .step_to = call.p[11]};
    if (!classes_of(&of, &call, 1, 6) || !WIDTH(4) || !INDEX(3) || call.size[3] != changes || !IS(5, SYMBOLS, 1) ||
        !IS(8, of.blocks * of.classes, 8) || !IS(9, changes, 4) || !IS(10, changes, 1) || !IS(11, changes, of.w) ||
        !ascends(of.bound_B, of.blocks + 1, 0, changes)) WRONG;
    for (int e = 0; e < SYMBOLS; e++)
        if (of.class_E[e] >= of.classes) WRONG;
    RUN(rank, &of, of.blocks, call.n[0], failed);
    return report(&call, failed);
}

ENTRY(decode_classes, "nrrrrrrrrww")  // threads, blocks, bounds, words, words of blocks, classes, frequencies, ratios, positions, steps
    i64 changes = call.size[10];
    Code of = {.words = call.p[3], .word_B2 = call.p[4], .ratio_CC = call.p[8], .at_to = call.p[9], .step_to = call.p[10],
               .w = call.item[10], .wide = call.item[9] == 8};
    if (!classes_of(&of, &call, 1, 5) || call.item[3] != 4 || !IS(4, 2 * of.blocks, 8) || !IS(7, 2 * of.classes * SYMBOLS, 4) ||
        !IS(8, of.classes * of.classes, 8) || !INDEX(9) || call.size[9] != changes || !WIDTH(10) ||
        !ascends(of.bound_B, of.blocks + 1, 0, changes) || !ascends(of.word_B2, 2 * of.blocks, 0, call.size[3])) WRONG;
    Decoding *slot = slots_of(call.p[7], 2 * of.classes);
    i64 *size_BC = calloc((size_t)MAX(of.blocks * of.classes, 1), 8);
    if (!slot || !size_BC) {
        free(slot), free(size_BC);
        return refuse(&call, "tables of wrong sums");
    }
    of.coding = slot, of.size_BC = of.size_to_BC = size_BC;
    RUN(decode_classes, &of, (of.blocks + 3) / 4, call.n[0], failed);
    free(slot), free(size_BC);
    return report(&call, failed);
}

ENTRY(survey, "nrrrrrrww")  // threads, runs, blocks, bounds, positions, steps, periods, elements, symbols of steps
    i64 runs = call.size[1] - 1, changes = call.size[5], blocks = call.size[2] / 7;
    Code of = {.run_R = call.p[1], .row_BF = call.p[2], .bound_B = call.p[3], .at = call.p[4], .step = call.p[5], .w = call.item[5],
               .wide = call.item[4] == 8, .period_R = call.p[6], .element_RE = call.p[7], .step_RES = call.p[8]};
    if (call.item[1] != 8 || runs < 0 || !IS(2, 7 * blocks, 8) || !IS(3, blocks + 1, 8) || !INDEX(4) || call.size[4] != changes ||
        !WIDTH(5) || !IS(6, runs, 8) || !IS(7, runs * SYMBOLS, 8) || !IS(8, runs * SYMBOLS * SYMBOLS, 4) ||
        !ascends(of.run_R, runs + 1, 0, blocks) || !ascends(of.bound_B, blocks + 1, 0, changes)) WRONG;
    for (i64 r = 0; r < runs; r++)
        if (of.period_R[r] < 1) WRONG;
    RUN(survey, &of, runs, call.n[0], failed);
    return report(&call, failed);
}

ENTRY(regroup, "nrrnrrwww")  // threads, bounds, bands, by tile, positions, steps, positions, steps, counts
    i64 bands = call.size[2] / 6, changes = call.size[5];
    Regroup of = {.bound_G = call.p[1], .band_GF = call.p[2], .by_tile = call.n[3] != 0, .at = call.p[4], .step = call.p[5],
                  .w = call.item[5], .wide = call.item[4] == 8, .at_to = call.p[6], .step_to = call.p[7], .count_B = call.p[8]};
    if (!IS(2, 6 * bands, 8) || !IS(1, bands + 1, 8) || !INDEX(4) || call.size[4] != changes || !WIDTH(5) ||
        !IS(6, changes, call.item[4]) || !IS(7, changes, of.w) || call.item[8] != 8 || !ascends(of.bound_G, bands + 1, 0, changes)) WRONG;
    for (i64 g = 0; g < bands; g++) {
        const i64 *band = of.band_GF + 6 * g;
        if (band[1] < 1 || band[2] < 1 || band[3] < 0 || band[4] < 0 || band[5] < 0 ||
            (of.by_tile && band[5] + band[3] > call.size[8])) WRONG;
    }
    RUN(regroup, &of, bands, call.n[0], failed);
    return report(&call, failed);
}

// ---- Which values of a field form a class: those whose changes take the fewest bits together ----

static double x_log_x(double x) { return x > 1.0 ? x * log2(x) : 0.0; }

// Estimates the bits that the changes of a class take, with their tables, but without the extra bits of steps.
static double class_bits(double element, const i64 *step_S, i64 symbols, const double *costs) {
    double changed = 0.0, bits = costs[0];
    for (i64 s = 0; s < symbols; s++)
        if (step_S[s]) {
            changed += (double)step_S[s];
            bits += costs[1] - x_log_x((double)step_S[s]);
        }
    element = MAX(element, changed);
    return bits + x_log_x(element) - x_log_x(element - changed);  // which of them change; then by which step
}

typedef struct {
    const i64 *bound_P, *value_V;
    const double *element_RE, *costs;
    const u32 *step_RVS;
    i64 values, symbols;
    u8 *begins_R;
    int16_t *first_RE, *last_RE;
    double *mean_RE;
} Groups;

// Estimates the bits of the changes of a run of blocks, if each value of the field is a class.
static double run_bits(const Groups *of, const double *element_E, const i64 *step_VS) {
    double bits = 0.0;
    for (i64 v = 0; v < of->values; v++) {
        const i64 *step_S = step_VS + v * of->symbols;
        int any = 0;
        for (i64 s = 0; s < of->symbols; s++) any |= step_S[s] != 0;
        bits += any ? class_bits(element_E[of->value_V[v]], step_S, of->symbols, of->costs) : 0.0;
    }
    return bits;
}

// Writes the classes of a group of runs to the lines of its first run. `step_CS` is scratch of one class more than there are.
static void fit(const Groups *of, i64 run, const double *count_E, const i64 *step_VS, i64 *step_CS) {
    i64 symbols = of->symbols, first_C[SYMBOLS], last_C[SYMBOLS], count = 0, v = 0, *both_S = step_CS + of->values * symbols;
    double element_E[SYMBOLS + 1] = {0}, bits_C[SYMBOLS], joined_C[SYMBOLS];  // joined with the next class
    for (i64 e = 0; e < SYMBOLS; e++) {
        const i64 *step_S = step_VS + v * symbols;
        i64 changed = 0;
        if (v < of->values && of->value_V[v] == e) {
            for (i64 s = 0; s < symbols; s++) changed += step_S[s];
            v++;
        }
        element_E[e + 1] = element_E[e] + MAX(count_E[e], (double)changed);
        if (!changed) continue;
        first_C[count] = last_C[count] = e;
        memcpy(step_CS + count * symbols, step_S, (size_t)symbols * 8);
        bits_C[count++] = class_bits(count_E[e], step_S, symbols, of->costs);
    }
    for (i64 from = 0, to = count - 1;;) {
        for (i64 c = MAX(from, 0); c < MIN(to, count - 1); c++) {
            for (i64 s = 0; s < symbols; s++) both_S[s] = step_CS[c * symbols + s] + step_CS[(c + 1) * symbols + s];
            joined_C[c] = class_bits(element_E[last_C[c + 1] + 1] - element_E[first_C[c]], both_S, symbols, of->costs);
        }
        i64 best = -1;
        double most = 0.0;
        for (i64 c = 0; c + 1 < count; c++) {
            double gain = bits_C[c] + bits_C[c + 1] - joined_C[c] + of->costs[2] * element_E[SYMBOLS];
            if (gain > most) most = gain, best = c;
        }
        if (best < 0) break;
        for (i64 s = 0; s < symbols; s++) step_CS[best * symbols + s] += step_CS[(best + 1) * symbols + s];
        bits_C[best] = joined_C[best], last_C[best] = last_C[best + 1], count--;
        for (i64 c = best + 1; c < count; c++) {
            first_C[c] = first_C[c + 1], last_C[c] = last_C[c + 1], bits_C[c] = bits_C[c + 1], joined_C[c] = joined_C[c + 1];
            memcpy(step_CS + c * symbols, step_CS + (c + 1) * symbols, (size_t)symbols * 8);
        }
        from = best - 1, to = best + 1;
    }
    of->begins_R[run] = 1;
    for (i64 c = 0, at = run * SYMBOLS; c < count; c++, at++) {
        i64 changed = 0;
        for (i64 s = 0; s < symbols; s++) changed += step_CS[c * symbols + s];
        of->first_RE[at] = (int16_t)first_C[c], of->last_RE[at] = (int16_t)last_C[c];
        of->mean_RE[at] = (element_E[last_C[c] + 1] - element_E[first_C[c]]) / (double)changed;
    }
}

static void groups_plain(Job *job) {
    const Groups *of = job->of;
    i64 size = of->values * of->symbols, *memory = malloc((size_t)(MAX(4 * size, 1) + of->symbols) * 8);
    if (!memory) {
        BAD(job, NO_MEMORY);
        return;
    }
    i64 *group_VS = memory, *run_VS = memory + size, *both_VS = memory + 2 * size, *scratch = memory + 3 * size;
    double group_E[SYMBOLS], both_E[SYMBOLS];
    for (i64 p; (p = take(job)) >= 0;) {
        i64 first = of->bound_P[p];
        double last_bits = 0.0;
        for (i64 r = first; r < of->bound_P[p + 1]; r++) {
            const double *element_E = of->element_RE + r * SYMBOLS;
            for (i64 i = 0; i < size; i++) run_VS[i] = of->step_RVS[r * size + i];
            double bits = run_bits(of, element_E, run_VS);
            if (r > of->bound_P[p]) {
                for (i64 i = 0; i < size; i++) both_VS[i] = group_VS[i] + run_VS[i];
                for (i64 e = 0; e < SYMBOLS; e++) both_E[e] = group_E[e] + element_E[e];
                double joined = run_bits(of, both_E, both_VS);
                if (joined <= last_bits + bits) {
                    memcpy(group_VS, both_VS, (size_t)size * 8);
                    memcpy(group_E, both_E, sizeof both_E);
                    last_bits = joined;
                    continue;
                }
                fit(of, first, group_E, group_VS, scratch);
            }
            first = r, last_bits = bits;
            memcpy(group_VS, run_VS, (size_t)size * 8);
            memcpy(group_E, element_E, sizeof group_E);
        }
        if (first < of->bound_P[p + 1]) fit(of, first, group_E, group_VS, scratch);
    }
    free(memory);
}

// threads, bounds of payloads, elements, values that change, symbols of steps, costs: of a table, a symbol, an element; whether
// a run begins a group, first and last value of each class, elements a change
ENTRY(groups, "nrrrrrwwww")
    i64 pieces = call.size[1] - 1, runs = call.size[2] / SYMBOLS, values = call.size[3];
    Groups of = {.bound_P = call.p[1], .element_RE = call.p[2], .value_V = call.p[3], .step_RVS = call.p[4], .costs = call.p[5],
                 .values = values, .symbols = call.size[4] / MAX(runs * values, 1), .begins_R = call.p[6], .first_RE = call.p[7],
                 .last_RE = call.p[8], .mean_RE = call.p[9]};
    if (pieces < 0 || call.item[1] != 8 || !IS(2, runs * SYMBOLS, 8) || call.item[3] != 8 || !IS(4, runs * values * of.symbols, 4) ||
        !IS(5, 3, 8) || !IS(6, runs, 1) || !IS(7, runs * SYMBOLS, 2) || !IS(8, runs * SYMBOLS, 2) || !IS(9, runs * SYMBOLS, 8) ||
        !ascends(of.bound_P, pieces + 1, 0, runs) || values > SYMBOLS || !ascends(of.value_V, values, 0, SYMBOLS - 1)) WRONG;
    Py_BEGIN_ALLOW_THREADS failed = run(groups_plain, &of, pieces, call.n[0]);
    Py_END_ALLOW_THREADS
    return report(&call, failed);
}

static int best_simd(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("bmi") || !__builtin_cpu_supports("bmi2")) return 0;
    int wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq");
    return 1 + (wide && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512vbmi2"));
#else
    return 0;
#endif
}

static PyObject *simd_entry(PyObject *self, PyObject *arguments) {  // the most to use, -1 to change nothing; returns what is used
    (void)self;
    Call call;
    if (!parse(&call, arguments, "n")) return NULL;
    if (call.n[0] >= 0) simd = (int)MIN(call.n[0], best_simd());
    return PyLong_FromLong(simd);
}

#define METHOD(name) {#name, name##_entry, METH_VARARGS, NULL}
static PyMethodDef methods[] = {
    METHOD(fingerprint), METHOD(scan), METHOD(add), METHOD(stage), METHOD(exchange), METHOD(count), METHOD(encode),
    METHOD(decode), METHOD(rank), METHOD(decode_classes), METHOD(survey), METHOD(regroup), METHOD(groups), METHOD(simd), {NULL, NULL, 0, NULL},
};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_native", NULL, -1, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) {
    static int is_ready;
    if (!is_ready && pthread_atfork(before_fork, after_fork, in_child)) return PyErr_NoMemory();
    is_ready = 1;
    simd = best_simd();
    return PyModule_Create(&module);
}

#else  // the kernels, for each instruction set

// ---- Lanes: 64 elements or bytes as the bits of a word, the lowest for the first ----

INLINE u64 differing(const char *a, const char *b, int w) {
#if defined(AVX512)
    u64 m = 0;
    for (int part = 0; part < w; part++) {
        __m512i x = _mm512_loadu_si512(a + 64 * part), y = _mm512_loadu_si512(b + 64 * part);
        if (w == 1) m |= _mm512_cmpneq_epi8_mask(x, y);
        if (w == 2) m |= (u64)_mm512_cmpneq_epi16_mask(x, y) << (32 * part);
        if (w == 4) m |= (u64)_mm512_cmpneq_epi32_mask(x, y) << (16 * part);
        if (w == 8) m |= (u64)_mm512_cmpneq_epi64_mask(x, y) << (8 * part);
    }
    return m;
#elif defined(AVX2)
    u64 same = 0;
    if (w == 1) {
        for (int part = 0; part < 2; part++) {
            __m256i x = _mm256_loadu_si256((const __m256i *)(a + 32 * part)), y = _mm256_loadu_si256((const __m256i *)(b + 32 * part));
            same |= (u64)(u32)_mm256_movemask_epi8(_mm256_cmpeq_epi8(x, y)) << (32 * part);
        }
    } else if (w == 2) {
        for (int part = 0; part < 2; part++) {
            const __m256i *x = (const __m256i *)(a + 64 * part), *y = (const __m256i *)(b + 64 * part);
            __m256i one = _mm256_cmpeq_epi16(_mm256_loadu_si256(x), _mm256_loadu_si256(y));
            __m256i other = _mm256_cmpeq_epi16(_mm256_loadu_si256(x + 1), _mm256_loadu_si256(y + 1));
            __m256i both = _mm256_permute4x64_epi64(_mm256_packs_epi16(one, other), 0xD8);
            same |= (u64)(u32)_mm256_movemask_epi8(both) << (32 * part);
        }
    } else {
        for (int part = 0; part < 2 * w; part++) {
            __m256i x = _mm256_loadu_si256((const __m256i *)(a + 32 * part)), y = _mm256_loadu_si256((const __m256i *)(b + 32 * part));
            if (w == 4) same |= (u64)_mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(x, y))) << (8 * part);
            if (w == 8) same |= (u64)_mm256_movemask_pd(_mm256_castsi256_pd(_mm256_cmpeq_epi64(x, y))) << (4 * part);
        }
    }
    return ~same;
#else
    u64 any = 0, m = 0;
    for (int i = 0; i < 8 * w; i++) any |= get(a, i, 8) ^ get(b, i, 8);
    if (any)
        for (int i = 0; i < LANES; i++) m |= (u64)(get(a, i, w) != get(b, i, w)) << i;
    return m;
#endif
}

#if defined(__aarch64__)
INLINE u64 neon_bits(uint8x16_t a, uint8x16_t b, uint8x16_t c, uint8x16_t d) {
    static const u8 weight[16] = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    uint8x16_t bit = vld1q_u8(weight);
    uint8x16_t low = vpaddq_u8(vandq_u8(a, bit), vandq_u8(b, bit)), high = vpaddq_u8(vandq_u8(c, bit), vandq_u8(d, bit));
    uint8x16_t both = vpaddq_u8(low, high);
    return vgetq_lane_u64(vreinterpretq_u64_u8(vpaddq_u8(both, both)), 0);
}
#endif

// Which of 64 bytes are from `low` to `low + span`.
INLINE u64 between(const u8 *p, u8 low, u8 span) {
#if defined(AVX512)
    __m512i x = _mm512_sub_epi8(_mm512_loadu_si512(p), _mm512_set1_epi8((char)low));
    return _mm512_cmple_epu8_mask(x, _mm512_set1_epi8((char)span));
#elif defined(AVX2)
    __m256i lows = _mm256_set1_epi8((char)low), spans = _mm256_set1_epi8((char)span);
    u64 m = 0;
    for (int part = 0; part < 2; part++) {
        __m256i x = _mm256_sub_epi8(_mm256_loadu_si256((const __m256i *)(p + 32 * part)), lows);
        m |= (u64)(u32)_mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_min_epu8(x, spans), x)) << (32 * part);
    }
    return m;
#elif defined(__aarch64__)
    uint8x16_t lows = vdupq_n_u8(low), spans = vdupq_n_u8(span), x[4];
    for (int part = 0; part < 4; part++) x[part] = vcleq_u8(vsubq_u8(vld1q_u8(p + 16 * part), lows), spans);
    return neon_bits(x[0], x[1], x[2], x[3]);
#else
    u64 m = 0;
    for (int i = 0; i < LANES; i++) m |= (u64)((u8)(p[i] - low) <= span) << i;
    return m;
#endif
}

INLINE int ones(u64 m) { return __builtin_popcountll(m); }

// The number of the bit that is set after `n` others.
INLINE int nth(u64 m, u64 n) {
#if defined(AVX512)
    return (int)_tzcnt_u64(_pdep_u64((u64)1 << n, m));
#else
    int lane = 0;
    for (int half = 32; half; half /= 2) {  // without branches, which would often be mispredicted
        u64 below = (u64)ones(m & (((u64)1 << half) - 1)), is_above = below <= n;
        n -= below * is_above;
        m >>= half * is_above;
        lane += half * (int)is_above;
    }
    return lane;
#endif
}

// How many of the next STRIDE ascending numbers are at most `most`.
INLINE int at_most(const int32_t *p, int32_t most) {
#if defined(AVX512)
    return ones(_mm512_cmple_epi32_mask(_mm512_loadu_si512(p), _mm512_set1_epi32(most)));
#else
    int count = 0;
    for (int i = 0; i < STRIDE; i++) count += p[i] <= most;
    return count;
#endif
}

INLINE void ahead(const char *p, i64 bytes) {
    for (i64 line = 0; line < bytes; line += 64) __builtin_prefetch(p + line);
}

// ---- Compare ----

// Copies elements that another thread may be writing. What is done with the copy is done with bits that stay: without the
// barrier a compiler may read the elements again.
INLINE void snap(char *to, const char *from, size_t bytes) {
    memcpy(to, from, bytes);
    __asm__ volatile("" : : "r"(to) : "memory");
}

// Writes offsets and steps of the elements that differ, and returns how many there are; up to 64 more are written. New
// elements are read once, since whoever trains may write them meanwhile.
INLINE i64 find(const char *old, const char *new_, i64 count, u16 *offset, char *step, int w) {
    i64 found = 0, i = 0;
    enum { FAR = 4096 };  // bytes that memory is asked for ahead
    _Alignas(64) char now[LANES * 8];
    for (; i + LANES <= count; i += LANES) {
        ahead(old + i * w + FAR, LANES * w);
        ahead(new_ + i * w + FAR, LANES * w);
        snap(now, new_ + i * w, (size_t)LANES * w);
        u64 m = differing(old + i * w, now, w);
        for (int n = 0; n < 2; n++) {  // without a branch: where nothing differs, the next one overwrites what is written
            i64 lane = __builtin_ctzll(m | (u64)1 << 63);
            offset[found] = (u16)(i + lane);
            put(step, found, get(now, lane, w) - get(old, i + lane, w), w);
            found += m != 0;
            m &= m - 1;
        }
        for (; m; m &= m - 1, found++) {
            i64 lane = __builtin_ctzll(m);
            offset[found] = (u16)(i + lane);
            put(step, found, get(now, lane, w) - get(old, i + lane, w), w);
        }
    }
    snap(now, new_ + i * w, (size_t)((count - i) * w));
    for (i64 lane = 0; i + lane < count; lane++)
        if (get(old, i + lane, w) != get(now, lane, w)) {
            offset[found] = (u16)(i + lane);
            put(step, found++, get(now, lane, w) - get(old, i + lane, w), w);
        }
    return found;
}

INLINE void ISA(scan_body)(Job *job, Scan *of, int w) {
    u16 *offset = malloc((ROW + LANES) * sizeof *offset);
    char *step = malloc((size_t)(ROW + LANES) * w), *value = malloc((size_t)(ROW + LANES) * w);
    if (!offset || !step || !value) BAD(job, NO_MEMORY);
    for (i64 r; (r = take(job)) >= 0;) {
        const i64 *row = of->row + 6 * r;
        const char *old = pointer(row[3]), *new_ = pointer(row[4]);
        i64 found = find(old, new_, row[2], offset, step, w), above = 0;
        u64 key = of->key[row[0]] + (u64)row[1] * INDEX_STEP, mask = of->bound[2 * row[0]], largest = of->bound[2 * row[0] + 1];
        u64 gain = 0;
        for (i64 k = 0; k < found; k++) put(value, k, get(old, offset[k], w), w);
        for (i64 k = 0; k < found; k++) {  // a loop of its own, which is vectorized
            u64 before = get(value, k, w), now = (before + get(step, k, w)) & all_bits(w);
            gain += cell(key, offset[k], now) - cell(key, offset[k], before);
            above += (now & mask) > largest;
        }
        i64 place = atomic_fetch_add(&of->used, found);
        if (found <= of->room - place) {
            memcpy(of->arena_offset + place, offset, (size_t)found * 2);
            memcpy(of->arena_step + place * w, step, (size_t)(found * w));
        }
        of->count_R[r] = found;
        of->place_R[r] = place;
        of->gain_R[r] = gain;
        of->above_R[r] = above;
    }
    free(offset);
    free(step);
    free(value);
}
KERNEL(scan, Scan)

INLINE void ISA(join_body)(Job *job, Scan *of, int w) {
    for (i64 r; (r = take(job)) >= 0;) {
        i64 position = of->row[6 * r + 5], start = of->start_R[r], count = of->count_R[r];
        const u16 *offset = of->arena_offset + of->place_R[r];
        if (of->wide) for (i64 k = 0; k < count; k++) ((i64 *)of->at)[start + k] = position + offset[k];
        else for (i64 k = 0; k < count; k++) ((int32_t *)of->at)[start + k] = (int32_t)(position + offset[k]);
        memcpy(of->step + start * w, of->arena_step + of->place_R[r] * w, (size_t)(count * w));
    }
}
KERNEL(join, Scan)

// ---- Fingerprints ----

INLINE void ISA(stream_body)(Job *job, Stream *of, int w) {
    enum { PART = 512 };
    i64 per = (of->length + STREAM - 1) / STREAM;
    u64 sum = 0;
    for (i64 r; (r = take(job)) >= 0;) {
        i64 done = r % per * STREAM, count = MIN(STREAM, of->length - done), skip = (r / per * of->length + done) * w;
        const char *bits = of->bits + skip;
        u64 key = of->key + (u64)(of->start[r / per] + done) * INDEX_STEP;
        for (i64 at = 0; at < count; at += PART) {
            i64 size = MIN(PART, count - at);
            const char *piece = bits + at * w;
            ahead(piece + PART * w, PART * w);
            if (of->out) piece = memcpy(of->out + skip + at * w, piece, (size_t)(size * w));  // the fingerprint is of what was written
            u64 part = 0, first = key + (u64)at * INDEX_STEP;
            for (i64 i = 0; i < size; i++) part += cell(first, (u64)i, get(piece, i, w));
            sum += part;
        }
    }
    atomic_fetch_add(of->sum, sum);
}
KERNEL(stream, Stream)

// ---- Changes of live memory ----

static void ISA(check)(Job *job) {
    const Add *of = job->of;
    for (i64 r; (r = take(job)) >= 0;) {
        const i64 *row = of->row + 6 * r;
        int bad = 0;
        for (i64 k = row[1]; k < row[2]; k++) {
            i64 at = at_of(of->at, k, of->wide);
            bad |= (at < row[4]) | (at >= row[5]);
        }
        if (bad) BAD(job, MALFORMED);
    }
}

INLINE void ISA(add_body)(Job *job, Add *of, int w) {
    char old[CHUNK * 8];
    u64 index[CHUNK];
    for (i64 r; (r = take(job)) >= 0;) {
        const i64 *row = of->row + 6 * r;
        i64 low = row[1], count = row[2] - low, above = 0;
        char *bits = pointer(row[3]);
        for (i64 k = 0; k < count; k++) {
            if (k + AHEAD < count) __builtin_prefetch(bits + at_of(of->at, low + k + AHEAD, of->wide) * w, 1);
            i64 at = at_of(of->at, low + k, of->wide);
            u64 before = get(bits, at, w), step = get(of->step, low + k, w);
            put(old, k, of->is_done ? before - step : before, w);
            if (!of->is_done) put(bits, at, before + step, w);
            index[k] = (u64)(at - row[4]);
        }
        u64 key = of->key[row[0]], mask = of->bound[2 * row[0]], largest = of->bound[2 * row[0] + 1], gain = 0;
        for (i64 k = 0; k < count; k++) {
            u64 before = get(old, k, w), now = (before + get(of->step, low + k, w)) & all_bits(w);
            gain += cell(key, index[k], now) - cell(key, index[k], before);
            above += (now & mask) > largest;
        }
        of->gain_R[r] = gain;
        of->above_R[r] = above;
    }
}
KERNEL(add, Add)

INLINE void ISA(stage_row)(Job *job, const Writes *of, i64 number, i64 first, int strided, int w) {
    const i64 *line = of->line + COLUMNS * number, *dims = of->dims + 6 * DIMS * number, *write = of->write + 3 * number;
    const char *memory = pointer(line[0]), *step = of->step + (write[0] + first) * w;
    const u32 *low = of->low + write[0] + first;
    u32 *to = of->to + write[2] + first;
    char *value = of->value + (write[2] + first) * w;
    i64 count = MIN(of->block, write[1] - first), kept = 0;
    u64 old[BLOCK], most = 0, gain = 0, check = 0, key = (u64)line[1] + (u64)line[2] * INDEX_STEP;
    double part[DIMS];
    for (int d = 0; strided && d < line[5]; d++) part[d] = 1.0 / (double)dims[3 * d];
    for (i64 k = 0; k < count; k++) {
        u32 rest = low[k] - (u32)line[3];
        u64 place = rest;
        int inside = 1;
        if (strided) {
            place = 0;
            for (int d = 0; d < line[5]; d++) {
                u32 coordinate = (u32)(((double)rest + 0.5) * part[d]);  // exact, and sooner than a division
                rest -= coordinate * (u32)dims[3 * d];
                inside &= coordinate < dims[3 * d + 1];
                place += (u64)coordinate * (u64)dims[3 * d + 2];
            }
            inside &= rest == 0;
        }
        to[k] = inside ? (u32)place : OUTSIDE;
        if (!inside) continue;
        most = MAX(most, place);
        __builtin_prefetch(memory + place * w);
    }
    if (most >= (u64)line[4]) {
        BAD(job, MALFORMED);
        return;
    }
    for (i64 k = 0; k < count; k++) old[k] = strided && to[k] == OUTSIDE ? 0 : get(memory, to[k], w);
    for (i64 k = 0; k < count; k++) {  // a loop of its own, which is vectorized
        u64 now = (old[k] + get(step, k, w)) & all_bits(w), index = (u64)(low[k] - (u32)line[3]), inside = !strided || to[k] != OUTSIDE;
        put(value, k, now, w);
        gain += (cell(key, index, now) - cell(key, index, old[k])) & (0 - inside);
        check += old[k] * (2 * (u64)to[k] + 1);
        kept += (i64)inside;
    }
    atomic_fetch_add(of->sum + number, gain);
    atomic_fetch_add(of->sum + of->lines + number, check);
    atomic_fetch_add(of->sum + 2 * of->lines + number, (u64)kept);
}

INLINE void ISA(stage_body)(Job *job, Writes *of, int w) {
    for (i64 r; (r = take(job)) >= 0;) {
        i64 number = of->row[r] >> 32, first = (of->row[r] & 0xFFFFFFFF) * of->block;
        if (of->line[COLUMNS * number + 5]) ISA(stage_row)(job, of, number, first, 1, w);
        else ISA(stage_row)(job, of, number, first, 0, w);
    }
}
KERNEL(stage, Writes)

INLINE void ISA(exchange_body)(Job *job, Writes *of, int w) {
    for (i64 r; (r = take(job)) >= 0;) {
        i64 number = of->row[r] >> 32, first = (of->row[r] & 0xFFFFFFFF) * of->block;
        const i64 *write = of->write + 3 * number;
        i64 count = write[1] - first, place = write[2] + first;  // to the end of the line, of which memory is asked for ahead
        char *bits = pointer(of->line[COLUMNS * number]), *value = of->value + place * w;
        const u32 *to = of->to + place;
        u64 sum = 0;
        for (i64 k = 0, last = MIN(of->block, count); k < last; k++) {
            if (k + AHEAD < count) __builtin_prefetch(bits + (i64)to[k + AHEAD] * w, 1);
            if (to[k] == OUTSIDE) continue;
            u64 before = get(bits, to[k], w);
            put(bits, to[k], get(value, k, w), w);
            put(value, k, before, w);
            sum += before * (2 * (u64)to[k] + 1);
        }
        atomic_fetch_add(of->sum + of->lines + number, sum);
    }
}
KERNEL(exchange, Writes)

// ---- Counting and encoding ----

// As below, for one class: four counters of each symbol, as the same symbol often follows.
INLINE void ISA(count_one)(Code *of, i64 r, i64 *count_TS, int w) {
    u32 count[4][2][SYMBOLS], extra;
    memset(count, 0, sizeof count);
    const void *at_K = of->at, *step_K = of->step;
    int wide = of->wide;
    for (i64 b = of->run_R[r]; b < of->run_R[r + 1]; b++) {
        i64 before = of->base_B[b] - 1, end = of->bound_B[b + 1];
        for (i64 k = of->bound_B[b]; k < end; k++) {
            i64 at = at_of(at_K, k, wide);
            count[k & 3][0][bucket((u64)(at - before - 1), &extra)]++;
            count[k & 3][1][bucket(zigzag(get(step_K, k, w), w), &extra)]++;
            before = at;
        }
    }
    for (int i = 0; i < 4; i++)
        for (int s = 0; s < 2 * SYMBOLS; s++) count_TS[s] += count[i][s / SYMBOLS][s % SYMBOLS];
}

INLINE void ISA(count_body)(Job *job, Code *of, int w) {
    for (i64 r; (r = take(job)) >= 0;) {
        i64 *count_TS = of->count_RTS + r * 2 * of->classes * SYMBOLS, gap;
        u32 extra;
        if (!of->class_K) {
            ISA(count_one)(of, r, count_TS, w);
            continue;
        }
        for (i64 b = of->run_R[r]; b < of->run_R[r + 1]; b++)
            for (i64 k = of->bound_B[b]; k < of->bound_B[b + 1]; k++) {
                i64 begin = gap_before(of, b, k, &gap, 0), c = of->class_K[k];
                count_TS[2 * begin * SYMBOLS + bucket((u64)gap, &extra)]++;
                count_TS[(2 * c + 1) * SYMBOLS + bucket(zigzag(get(of->step, k, w), w), &extra)]++;
            }
    }
}
KERNEL(count, Code)

INLINE void flush(u32 **out, u64 *x, u64 freq, u32 bits) {
    (*out)[-1] = (u32)*x;  // without a branch, which would often be mispredicted
    u64 full = (*x >> (64 - bits)) >= freq;
    *out -= full;
    *x >>= 32 * full;
}
INLINE void push_bits(u32 **out, u64 *x, u64 value, u32 bits) {
    flush(out, x, 1, bits);
    *x = (*x << bits) + (value & (((u64)1 << bits) - 1));
}
INLINE void push_symbol(u32 **out, u64 *x, u64 value, const Coding *table) {
    u32 extra;
    const Coding *of = table + bucket(value, &extra);
    if (extra) {  // decoding reads groups of 24 bits from the top and the shortest one last, so encoding begins with that
        u32 done = extra > 24 ? (extra - 1) % 24 + 1 : extra;
        push_bits(out, x, value, done);
        for (; done < extra; done += 24) push_bits(out, x, value >> done, 24);
    }
    flush(out, x, of->freq, TABLE_BITS);
    u64 quotient = (u64)(((u128)*x * of->inverse) >> 64);  // or one less
    quotient += *x - quotient * of->freq >= of->freq;
    *x += quotient * (SLOTS - of->freq) + of->start;
}

INLINE void ISA(encode_lanes)(Job *job, Code *of, int w, int one) {
    const Coding *coding = of->coding;
    const void *step_K = of->step;
    for (i64 r; (r = take(job)) >= 0;) {
        u32 *out[WIDE];
        u64 x[WIDE];
        i64 low[WIDE], k[WIDE], block[WIDE], gap, least = INT64_MAX;
        EACH(lane) {
            i64 b = block[lane] = MIN(WIDE * r + lane, of->blocks - 1);
            out[lane] = of->out + of->room_B[b + 1];
            x[lane] = 1;
            low[lane] = of->bound_B[b];
            k[lane] = WIDE * r + lane < of->blocks ? of->bound_B[b + 1] : low[lane];
            least = MIN(least, k[lane] - low[lane]);
        }
#define PUSH(lane) \
    do { \
        i64 change = --k[lane], begin = gap_before(of, block[lane], change, &gap, one), c = one ? 0 : of->class_K[change]; \
        push_symbol(&out[lane], &x[lane], zigzag(get(step_K, change, w), w), coding + (2 * c + 1) * SYMBOLS); \
        push_symbol(&out[lane], &x[lane], (u64)gap, coding + 2 * begin * SYMBOLS); \
    } while (0)
        for (i64 t = 0; t < least; t++) EACH(lane) PUSH(lane);
        EACH(lane) {
            while (k[lane] > low[lane]) PUSH(lane);
            i64 b = block[lane];
            if (WIDE * r + lane >= of->blocks) continue;
            if (of->bound_B[b + 1] > low[lane]) {
                if (x[lane] >> 32) *--out[lane] = (u32)(x[lane] >> 32);
                *--out[lane] = (u32)x[lane];
            }
            of->first_B[b] = out[lane] - of->out;
        }
    }
}
INLINE void ISA(encode_body)(Job *job, Code *of, int w) {
    if (of->class_K) ISA(encode_lanes)(job, of, w, 0);
    else ISA(encode_lanes)(job, of, w, 1);
}
KERNEL(encode, Code)

// ---- Decoding ----

typedef struct {
    const u32 *next, *end;
    u64 x;
    i64 block, k, end_k, c, place, base;
    const i64 *size_C;
} ISA(Lane);
#define Lane ISA(Lane)

// Renormalises without a branch, which would often be mispredicted; behind the last word of the block not at all.
INLINE void pull(Lane *lane, int checked) {
    u64 is_short = (lane->x >> 32) == 0, word;
    if (checked) {
        is_short &= lane->next < lane->end;
        word = *(lane->next < lane->end ? lane->next : lane->end - 1);
    } else word = *lane->next;
    lane->x = lane->x << 32 * is_short | (word & (0 - is_short));
    lane->next += is_short;
}

INLINE u64 number(Lane *lane, const Decoding *table, int checked) {
    u64 slot = lane->x & (SLOTS - 1);
    u32 symbol = table->symbol[slot], range = table->range[symbol];
    lane->x = (u64)(range >> 16) * (lane->x >> TABLE_BITS) + slot - (range & 0xFFFF);
    pull(lane, checked);
    if (symbol < 16) return symbol;
    u32 extra = (symbol >> 2) - 2;
    u64 value = 4 + (symbol & 3);
    do {
        u32 bits = MIN(extra, 24);
        value = value << bits | (lane->x & (((u64)1 << bits) - 1));
        lane->x >>= bits;
        pull(lane, checked);
        extra -= bits;
    } while (extra);
    return value;
}

// The class that a gap leads to beyond the end of class `c`, and 256 times the place in it; -1 if there is none.
static i64 ISA(cross)(const Code *of, const i64 *size_C, i64 c, u64 gap) {
    i64 classes = of->classes;
    if (gap >> 56) return -1;
    i64 rest = (i64)gap;
    for (i64 to = c + 1; to < classes; to++) {
        i64 ratio = of->ratio_CC[c * classes + to], span = (size_C[to] * ratio) >> RATIO_BITS;
        if (rest < span) {
            i64 wanted = (rest + 1) << RATIO_BITS, place = (wanted + ratio - 1) / ratio;
            return place >= 1 && place <= size_C[to] && (place * ratio) >> RATIO_BITS == rest + 1 ? (place - 1) << 8 | to : -1;
        }
        rest -= span;
    }
    return -1;
}

INLINE int open_lane(const Code *of, Lane *lane, i64 b, i64 k, i64 end_k) {
    lane->next = of->words + of->word_B2[2 * b];
    lane->end = of->words + of->word_B2[2 * b + 1];
    lane->k = k;
    lane->end_k = end_k;
    lane->block = b;
    lane->size_C = of->size_BC + b * of->classes;
    lane->place = -1;
    lane->c = 0;
    while (lane->c < of->classes - 1 && !lane->size_C[lane->c]) lane->c++;
    lane->base = of->base_B ? of->base_B[b] : 0;
    lane->x = 1;
    i64 words = lane->end - lane->next;
    if (k == end_k) return words == 0;
    if (!words) return 0;
    lane->x = *lane->next++;
    if (words == 1) return 1;
    lane->x |= (u64)*lane->next++ << 32;
    return lane->x >> 32 != 0;
}

INLINE int change(const Code *of, Lane *lane, int w, int one, const Decoding *table, void *at, u8 *class_K, char *step, int checked) {
    i64 c = one ? 0 : lane->c;
    u64 gap = number(lane, table + 2 * c, checked), left = (u64)(lane->size_C[c] - lane->place - 1);
    int good = gap < left;
    if (one) lane->place += (i64)((1 + gap) & (0 - (u64)good));
    else if (good) lane->place += 1 + (i64)gap;
    else {
        i64 found = ISA(cross)(of, lane->size_C, c, gap - left);
        if (found < 0) return 0;
        good = 1;
        lane->c = c = found & 255;
        lane->place = found >> 8;
    }
    u64 value = number(lane, table + 2 * c + 1, checked);
    good &= value <= 2 * (((u64)1 << (8 * w - 1)) - 1);
    at_set(at, lane->k, lane->base + lane->place, one && of->wide);
    if (!one) class_K[lane->k] = (u8)c;
    put(step, lane->k, unzigzag(value), w);
    lane->k++;
    return good;
}

#define ENOUGH(lane) ((lane).end - (lane).next >= 8)  // words that a change takes at most
// Decodes the changes of lanes into arrays that each lane counts in by itself. Returns 0 if any is malformed.
INLINE int decode_lanes(
    const Code *of, const Lane *given, int w, int one, void *const *at, u8 *const *class_K, char *const *step
) {
    const Decoding *table = of->coding;
    int good = 1;
    Lane lane[WIDE];  // a copy whose address nobody has, so that it is in registers
    EACH(n) lane[n] = given[n];
    for (;;) {
        int go = good;
        EACH(n) go &= (lane[n].k < lane[n].end_k) & ENOUGH(lane[n]);
        if (!go) break;
        EACH(n) good &= change(of, &lane[n], w, one, table, at[n], class_K[n], step[n], 0);
    }
    EACH(n) {
        while (good && lane[n].k < lane[n].end_k && ENOUGH(lane[n])) good = change(of, &lane[n], w, one, table, at[n], class_K[n], step[n], 0);
        while (good && lane[n].k < lane[n].end_k) good = change(of, &lane[n], w, one, table, at[n], class_K[n], step[n], 1);
        good &= lane[n].next == lane[n].end && lane[n].x == 1;
    }
    return good;
}

INLINE void ISA(decode_body)(Job *job, Code *of, int w) {
    for (i64 r; (r = take(job)) >= 0;) {
        Lane lane[WIDE] = {{0}};  // those without a block end at once
        EACH(n) lane[n].x = 1;
        void *at[WIDE] = {NULL};
        u8 *class_K[WIDE] = {NULL};
        char *step[WIDE] = {NULL};
        int lanes = (int)MIN(WIDE, of->blocks - WIDE * r), good = 1;
        for (int n = 0; n < lanes; n++) {
            i64 b = WIDE * r + n;
            good &= open_lane(of, &lane[n], b, of->bound_B[b], of->bound_B[b + 1]);
            at[n] = of->at_to;
            step[n] = of->step_to;
        }
        if (!good || !decode_lanes(of, lane, w, 1, at, class_K, step)) BAD(job, MALFORMED);
    }
}
KERNEL(decode, Code)

// ---- Classes ----

typedef struct { u8 *field; int32_t *ahead, *rank; u8 *class_K; u64 *marks; i64 *place, *to; char *step; i64 elements, changes, width, words; } ISA(Room);
#define Room ISA(Room)

static int ISA(fit_room)(Room *room, i64 elements, i64 changes, i64 classes, int w) {
    i64 words = (elements + LANES - 1) / LANES, width = words + STRIDE;
    if (elements > room->elements) {
        free(room->field), free(room->ahead), free(room->marks), free(room->to);
        room->field = malloc((size_t)words * LANES);
        room->ahead = malloc((size_t)(classes * width) * 4);
        room->marks = malloc((size_t)words * 8);
        room->to = malloc((size_t)words * 8);
        room->elements = elements;
    }
    if (changes > room->changes) {
        free(room->rank), free(room->class_K), free(room->place), free(room->step);
        room->rank = malloc((size_t)changes * 4);
        room->class_K = malloc((size_t)changes);
        room->place = malloc((size_t)changes * 8);
        room->step = malloc((size_t)(changes * w));
        room->changes = changes;
    }
    room->words = words;
    room->width = width;
    return room->field && room->ahead && room->marks && room->to && (!changes || (room->rank && room->class_K && room->place && room->step));
}
static void ISA(free_room)(Room *room) {
    free(room->field), free(room->ahead), free(room->marks), free(room->to);
    free(room->rank), free(room->class_K), free(room->place), free(room->step);
}

// Writes fields of numbers in memory as bytes.
INLINE void field_row(const char *from, u8 *to, i64 count, u32 shift, u8 mask, int w) {
    i64 i = 0;
#if defined(AVX512)
    if (w == 2)
        for (; i + 32 <= count; i += 32) {
            __m512i x = _mm512_srl_epi16(_mm512_loadu_si512(from + 2 * i), _mm_cvtsi32_si128((int)shift));
            _mm256_storeu_si256((__m256i *)(to + i), _mm512_cvtepi16_epi8(_mm512_and_si512(x, _mm512_set1_epi16(mask))));
        }
#endif
    if (w == 2 && shift == 7)  // of a number known here, narrow vectors are made
        for (; i < count; i++) to[i] = (u8)(get(from, i, w) >> 7) & mask;
    for (; i < count; i++) to[i] = (u8)(get(from, i, w) >> shift) & mask;
}

// Writes the fields of a block as bytes, filled up with 0 to a multiple of 64; those of changed elements, whose places are given,
// before the change. Counts the elements of each class before each 64 elements, int32[C, width], and in all.
INLINE int count_block(const Code *of, Room *room, const i64 *row, i64 low, i64 high, i64 *size_C, int w) {
    const char *bits = pointer(row[0]);
    i64 columns = row[1], stride = row[2], rows = row[3], elements = columns * rows, k = low, at = 0, word = 0;
    i64 some = MAX(PIECE / columns, 1);
    u32 shift = (u32)row[5];
    u8 mask = (u8)row[6];
    double row_part = 1.0 / (double)stride;
    memset(room->field + elements, 0, (size_t)(room->words * LANES - elements));
    memset(size_C, 0, (size_t)of->classes * 8);
    while (word < room->words) {  // some rows at a time: memory is on its way while the ones before are counted
        i64 end = MIN(at + some, rows), done = end * columns;
        for (; at < end; at++) {
            const char *from = bits + at * stride * w;
            if (rows > 1) ahead(from + MAX(some, 8) * stride * w, columns * w);
            field_row(from, room->field + at * columns, columns, shift, mask, w);
        }
        for (; k < high; k++) {
            i64 offset = at_of(of->at, k, of->wide) - row[4], line = (i64)(((double)offset + 0.5) * row_part);
            i64 place = offset - line * (stride - columns);
            if (offset < 0 || place < 0 || offset - line * stride >= columns || place >= elements) return 0;
            if (place >= done) break;
            u8 before = (u8)(((get(bits, offset, w) - get(of->step, k, w)) & all_bits(w)) >> shift) & mask;
            room->field[place] = before;
            room->place[k - low] = place;
        }
        i64 last = end == rows ? room->words : done / LANES;
        for (i64 c = 0; c < of->classes; c++) {
            u8 least = of->low_C[c], span = of->span_C[c];
            int32_t *ahead_W = room->ahead + c * room->width, total = (int32_t)size_C[c];
            for (i64 i = word; i < last; i++) {
                ahead_W[i] = total;
                total += ones(between(room->field + i * LANES, least, span));
            }
            size_C[c] = total;
        }
        word = last;
    }
    for (i64 c = 0; c < of->classes; c++) {
        for (i64 i = room->words; i < room->width; i++) room->ahead[c * room->width + i] = INT32_MAX;  // where a search ends
        if (of->low_C[c] == 0) size_C[c] -= room->words * LANES - elements;
    }
    return k == high;
}

INLINE void ISA(rank_body)(Job *job, Code *of, int w) {
    Room room = {0};
    i64 next_C[SYMBOLS + 1];
    for (i64 b; (b = take(job)) >= 0;) {
        const i64 *row = of->row_BF + 7 * b;
        i64 low = of->bound_B[b], high = of->bound_B[b + 1], elements = row[1] * row[3];
        if (low == high) continue;
        if (!ISA(fit_room)(&room, elements, high - low, of->classes, w)) {
            BAD(job, NO_MEMORY);
            break;
        }
        if (!count_block(of, &room, row, low, high, of->size_to_BC + b * of->classes, w)) {
            BAD(job, MALFORMED);
            break;
        }
        memset(next_C, 0, sizeof next_C);
        for (i64 k = low; k < high; k++) next_C[of->class_E[room.field[room.place[k - low]]] + 1]++;
        for (i64 c = 0; c < of->classes; c++) next_C[c + 1] += next_C[c];
        for (i64 k = low; k < high; k++) {
            i64 place = room.place[k - low], c = of->class_E[room.field[place]], word = place / LANES;
            u64 lanes = between(room.field + word * LANES, of->low_C[c], of->span_C[c]);
            i64 to = low + next_C[c]++;
            of->rank_K[to] = room.ahead[c * room.width + word] + ones(lanes & (((u64)1 << place % LANES) - 1));
            of->class_to_K[to] = (u8)c;
            put(of->step_to, to, get(of->step, k, w), w);
        }
    }
    ISA(free_room)(&room);
}
KERNEL(rank, Code)

// Turns the decoded ranks of a block into ascending positions.
INLINE void place_block(const Code *of, Room *room, const i64 *row, i64 low, i64 count, int w) {
    memset(room->marks, 0, (size_t)room->words * 8);
    i64 last = -1, word = 0;
    for (i64 k = 0; k < count; k++) {  // ascending by class, and by rank in each
        i64 c = room->class_K[k];
        int32_t rank = room->rank[k], *ahead_W = room->ahead + c * room->width;
        if (c != last) word = 0, last = c;
        for (int more = STRIDE; more == STRIDE; word += more) more = at_most(ahead_W + word + 1, rank);
        int lane = nth(between(room->field + word * LANES, of->low_C[c], of->span_C[c]), (u64)(rank - ahead_W[word]));
        room->place[k] = word * LANES + lane;
        room->marks[word] |= (u64)1 << lane;
    }
    i64 to = low;
    for (i64 word = 0; word < room->words; word++) {
        room->to[word] = to;
        to += ones(room->marks[word]);
    }
    i64 columns = row[1];
    double row_part = 1.0 / (double)columns;
    for (i64 k = 0; k < count; k++) {
        i64 place = room->place[k], word = place / LANES;
        i64 index = room->to[word] + ones(room->marks[word] & (((u64)1 << place % LANES) - 1));
        i64 at = (i64)(((double)place + 0.5) * row_part);
        at_set(of->at_to, index, row[4] + at * row[2] + place - at * columns, of->wide);
        put(of->step_to, index, get(room->step, k, w), w);
    }
}

INLINE void ISA(decode_classes_body)(Job *job, Code *of, int w) {
    Room room[WIDE] = {{0}};
    for (i64 r; (r = take(job)) >= 0;) {
        Lane lane[WIDE] = {{0}};
        EACH(n) lane[n].x = 1;
        void *at[WIDE] = {NULL};
        u8 *class_K[WIDE] = {NULL};
        char *step[WIDE] = {NULL};
        int lanes = (int)MIN(WIDE, of->blocks - WIDE * r), good = 1;
        for (int n = 0; n < lanes; n++) {
            i64 b = WIDE * r + n, count = of->bound_B[b + 1] - of->bound_B[b];
            const i64 *row = of->row_BF + 7 * b;
            i64 elements = row[1] * row[3];
            if (count > elements) {
                BAD(job, MALFORMED);
                goto done;
            }
            if (!ISA(fit_room)(&room[n], elements, count, of->classes, w)) {
                BAD(job, NO_MEMORY);
                goto done;
            }
            if (count) count_block(of, &room[n], row, 0, 0, of->size_to_BC + b * of->classes, w);
            good &= open_lane(of, &lane[n], b, 0, count);
            at[n] = room[n].rank;
            class_K[n] = room[n].class_K;
            step[n] = room[n].step;
        }
        if (!good || !decode_lanes(of, lane, w, 0, at, class_K, step)) {
            BAD(job, MALFORMED);
            break;
        }
        for (int n = 0; n < lanes; n++) {
            i64 b = WIDE * r + n, low = of->bound_B[b], count = of->bound_B[b + 1] - low;
            if (count) place_block(of, &room[n], of->row_BF + 7 * b, low, count, w);
        }
    }
done:
    for (int n = 0; n < WIDE; n++) ISA(free_room)(&room[n]);
}
KERNEL(decode_classes, Code)

INLINE void ISA(survey_body)(Job *job, Code *of, int w) {
    for (i64 r; (r = take(job)) >= 0;) {
        i64 *element_E = of->element_RE + r * SYMBOLS, at = 0, period = of->period_R[r];
        u32 *step_ES = of->step_RES + r * SYMBOLS * SYMBOLS, extra, count_4E[4][SYMBOLS] = {{0}};  // four, as the same often follows
        for (i64 b = of->run_R[r]; b < of->run_R[r + 1]; b++) {
            const i64 *row = of->row_BF + 7 * b;
            i64 columns = row[1], stride = row[2], rows = row[3], first = row[4], samples = (columns + SAMPLE - 1) / SAMPLE;
            i64 span = (rows - 1) * stride + columns;
            const char *bits = pointer(row[0]);
            u32 shift = (u32)row[5];
            u8 mask = (u8)row[6];
            for (; at < rows * samples; at += period) {
                i64 start = at / samples * stride + at % samples * SAMPLE, next = at + 24 * period;
                if (next < rows * samples) ahead(bits + (next / samples * stride + next % samples * SAMPLE) * w, SAMPLE * w);
                i64 end = MIN(start + SAMPLE, at / samples * stride + columns);
                for (i64 i = start; i < end; i++) count_4E[i & 3][(u8)(get(bits, i, w) >> shift) & mask]++;
            }
            at -= rows * samples;
            for (i64 k = of->bound_B[b]; k < of->bound_B[b + 1]; k++) {
                if (k + AHEAD < of->bound_B[b + 1]) __builtin_prefetch(bits + (at_of(of->at, k + AHEAD, of->wide) - first) * w);
                i64 offset = at_of(of->at, k, of->wide) - first;
                if (offset < 0 || offset >= span) {
                    BAD(job, MALFORMED);
                    return;
                }
                u64 step = get(of->step, k, w), old = (get(bits, offset, w) - step) & all_bits(w);
                step_ES[((u8)(old >> shift) & mask) * SYMBOLS + bucket(zigzag(step, w), &extra)]++;
            }
        }
        for (int e = 0; e < 4 * SYMBOLS; e++) element_E[e % SYMBOLS] += count_4E[e / SYMBOLS][e % SYMBOLS];
    }
}
KERNEL(survey, Code)

INLINE void ISA(regroup_body)(Job *job, Regroup *of, int w) {
    i64 *next_C = NULL, room = 0;
    for (i64 g; (g = take(job)) >= 0;) {
        const i64 *band = of->band_GF + 6 * g;
        i64 first = band[0], stride = band[1], columns = band[2], keys = of->by_tile ? band[3] : band[4];
        if (keys + 2 > room) {
            free(next_C);
            room = 2 * keys + 2;
            next_C = malloc((size_t)room * 8);
            if (!next_C) {
                BAD(job, NO_MEMORY);
                return;
            }
        }
        memset(next_C, 0, (size_t)(keys + 1) * 8);
        next_C[0] = of->bound_G[g];
        // Multiply by inverses: a division takes longer than all the rest. With 0.5 added, rounding does not matter.
        double row_part = 1.0 / (double)stride, tile_part = 1.0 / (double)columns;
        for (int counting = 1; counting >= 0; counting--) {
            for (i64 k = of->bound_G[g]; k < of->bound_G[g + 1]; k++) {
                i64 at = at_of(of->at, k, of->wide), offset = at - first, c = (i64)(((double)offset + 0.5) * row_part);
                if (of->by_tile) c = (i64)(((double)(offset - c * stride) + 0.5) * tile_part);
                if (c < 0 || c >= keys) {
                    BAD(job, MALFORMED);
                    goto done;
                }
                if (counting) next_C[c + 1]++;
                else {
                    i64 to = next_C[c]++;
                    at_set(of->at_to, to, at, of->wide);
                    put(of->step_to, to, get(of->step, k, w), w);
                }
            }
            if (counting)
                for (i64 c = 0; c < keys; c++) {
                    if (of->by_tile) of->count_B[band[5] + c] = next_C[c + 1];
                    next_C[c + 1] += next_C[c];
                }
        }
    }
done:
    free(next_C);
}
KERNEL(regroup, Regroup)
#undef Lane
#undef Room
#undef PUSH
#undef ENOUGH
#endif
