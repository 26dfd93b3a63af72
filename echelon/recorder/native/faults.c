/* What must work when the process is about to die, or nearly: async-signal-safe, all of it.
 *
 * Two tasks share the handler. A store into a ring whose file was cut off ends in SIGBUS: the ring's
 * memory is then replaced by anonymous memory, and the program continues without its record. Any other
 * fault is written into the ring (signal, address, C frames with their files and offsets) before the
 * handler that was there first gets the signal, as if this one had never been.
 *
 * The frames come from backtrace(), which loads its library at its first call: `prepare` makes that
 * call beforehand. Names of functions are looked up later, by the reader of the ring.
 */
#define _GNU_SOURCE /* beyond ISO C: signals, clocks */
#include "ring.h"

#include <signal.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#if defined(__linux__) && defined(__GLIBC__)
#include <execinfo.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>

enum { NUM_SIGNALS = 5, MAX_RANGES = 1024, ALT_STACK_BYTES = 1 << 17, PAGE = 4096 };

static const int SIGNALS[NUM_SIGNALS] = {SIGBUS, SIGSEGV, SIGABRT, SIGFPE, SIGILL};

struct range {
    _Atomic uintptr_t begin; /* 0: a free place */
    size_t length;
    int protection;
};

static struct range ranges[MAX_RANGES];
static struct sigaction before[NUM_SIGNALS];
static bool is_installed[NUM_SIGNALS];
static _Atomic(struct bb_fault *) words; /* where to write; NULL: nowhere */
static pid_t owner;
static _Atomic int has_spoken, was_passed_on[NUM_SIGNALS];
static char maps[1 << 16];

static int index_of(int number)
{
    for (int i = 0; i < NUM_SIGNALS; i++)
        if (SIGNALS[i] == number)
            return i;
    return -1;
}

/* Replace the memory of the ring that `at` lies in; false if it lies in none. */
static bool replace_memory(uintptr_t at)
{
    for (int i = 0; i < MAX_RANGES; i++) {
        uintptr_t begin = atomic_load(&ranges[i].begin);
        if (!begin || at < begin || at >= begin + ranges[i].length)
            continue;
        void *to = mmap((void *)begin, ranges[i].length, ranges[i].protection,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
        return to != MAP_FAILED;
    }
    return false;
}

static const char *hex(const char *at, uint64_t *value)
{
    for (*value = 0;; at++) {
        if (*at >= '0' && *at <= '9')
            *value = *value << 4 | (uint64_t)(*at - '0');
        else if (*at >= 'a' && *at <= 'f')
            *value = *value << 4 | (uint64_t)(*at - 'a' + 10);
        else
            return at;
    }
}

/* Look the frames up in one line of /proc/self/maps: begin-end perms offset device inode path. */
static void look_up(const char *line, struct bb_fault *fault, uint32_t count)
{
    uint64_t begin, end, offset;
    const char *at = hex(line, &begin);
    at = hex(at + 1, &end);
    at = hex(at + 6, &offset);
    const char *path = strchr(at, '/');
    for (uint32_t i = 0; path && i < count; i++) {
        struct bb_fault_frame *frame = &fault->frames[i];
        if (frame->address < begin || frame->address >= end)
            continue;
        size_t length = strlen(path), room = sizeof frame->file - 1;
        const char *from = length > room ? path + length - room : path;
        frame->offset = frame->address - begin + offset;
        memcpy(frame->file, from, strlen(from));
    }
}

static void look_up_all(struct bb_fault *fault, uint32_t count)
{
    int file = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
    size_t used = 0;
    while (file >= 0) {
        ssize_t got = read(file, maps + used, sizeof maps - 1 - used);
        if (got <= 0)
            break;
        used += (size_t)got;
        maps[used] = 0;
        char *line = maps, *end;
        while ((end = strchr(line, '\n'))) {
            *end = 0;
            look_up(line, fault, count);
            line = end + 1;
        }
        used = (size_t)(maps + used - line);
        memmove(maps, line, used);
    }
    if (file >= 0)
        close(file);
}

static void speak(struct bb_fault *fault, int number, const siginfo_t *info)
{
    void *frames[BB_FAULT_FRAMES];
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    fault->signal = (uint32_t)number;
    fault->code = info->si_code;
    fault->address = info->si_code > 0 ? (uint64_t)(uintptr_t)info->si_addr : 0;
    fault->mono_ns = (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
    fault->thread = (uint32_t)syscall(SYS_gettid);
    fault->num_frames = 0;
    atomic_store_explicit(&fault->stamp, 1, memory_order_release);
    int count = backtrace(frames, BB_FAULT_FRAMES); /* may fault itself: what is there stays */
    for (int i = 0; i < count; i++)
        fault->frames[i].address = (uint64_t)(uintptr_t)frames[i];
    look_up_all(fault, (uint32_t)count);
    fault->num_frames = (uint32_t)count;
    atomic_store_explicit(&fault->stamp, 2, memory_order_release);
}

static void handle(int number, siginfo_t *info, void *context)
{
    (void)context;
    if (number == SIGBUS && info->si_code > 0 && replace_memory((uintptr_t)info->si_addr))
        return;
    struct bb_fault *fault = atomic_load(&words);
    if (fault && getpid() == owner && !atomic_exchange(&has_spoken, 1))
        speak(fault, number, info);
    int index = index_of(number);
    if (index >= 0) { /* a handler that was put over this one may lead back here: once is enough */
        struct sigaction last = {.sa_handler = SIG_DFL};
        sigaction(number, atomic_exchange(&was_passed_on[index], 1) ? &last : &before[index], NULL);
    }
    if (info->si_code <= 0) /* sent, not caused: it comes again when this handler returns */
        syscall(SYS_tgkill, getpid(), syscall(SYS_gettid), number);
}

static void install(int number, bool also_over_others)
{
    int index = index_of(number);
    struct sigaction now, ours = {.sa_sigaction = handle, .sa_flags = SA_SIGINFO | SA_ONSTACK};
    if (is_installed[index] || sigaction(number, NULL, &now) < 0)
        return;
    /* Another runtime (a JVM, a crash reporter) may live on its faults: it keeps them. */
    if (!also_over_others && ((now.sa_flags & SA_SIGINFO) || now.sa_handler != SIG_DFL))
        return;
    sigemptyset(&ours.sa_mask);
    before[index] = now;
    is_installed[index] = sigaction(number, &ours, NULL) == 0;
}

static void use_own_stack(void)
{
    static char *stack;
    if (!stack && (stack = malloc(ALT_STACK_BYTES))) {
        stack_t ours = {.ss_sp = stack, .ss_size = ALT_STACK_BYTES};
        sigaltstack(&ours, NULL); /* of this thread: the main one, mostly */
    }
}

bool bb_faults_protect(uintptr_t begin, size_t length, bool writable)
{
    for (int i = 0; i < MAX_RANGES; i++) {
        if (atomic_load(&ranges[i].begin))
            continue;
        ranges[i].length = length;
        ranges[i].protection = writable ? PROT_READ | PROT_WRITE : PROT_READ;
        atomic_store(&ranges[i].begin, begin);
        install(SIGBUS, true);
        return true;
    }
    return false;
}

void bb_faults_release(uintptr_t begin)
{
    struct bb_fault *fault = atomic_load(&words);
    for (int i = 0; i < MAX_RANGES; i++) {
        if (atomic_load(&ranges[i].begin) != begin)
            continue;
        if ((uintptr_t)fault >= begin && (uintptr_t)fault < begin + ranges[i].length)
            atomic_store(&words, NULL);
        atomic_store(&ranges[i].begin, 0);
    }
}

void bb_faults_write_to(struct bb_fault *fault, bool also_over_others)
{
    void *frame[1];
    backtrace(frame, 1);
    use_own_stack();
    owner = getpid();
    atomic_store(&has_spoken, 0);
    atomic_store(&words, fault);
    for (int i = 0; i < NUM_SIGNALS; i++)
        install(SIGNALS[i], also_over_others);
}

#else /* neither Linux nor glibc: faults end the process as they always did */

bool bb_faults_protect(uintptr_t begin, size_t length, bool writable)
{
    (void)begin, (void)length, (void)writable;
    return false;
}

void bb_faults_release(uintptr_t begin)
{
    (void)begin;
}

void bb_faults_write_to(struct bb_fault *fault, bool also_over_others)
{
    (void)fault, (void)also_over_others;
}

#endif
