/* A heartbeat from a thread that never takes the interpreter's lock.
 *
 * Beside the heartbeat of a Python thread it tells two silences apart: where only Python's is old,
 * some code holds the lock; where both are old, the process gets no processor.
 */
#define _GNU_SOURCE /* beyond ISO C: signals, clocks */
#include "ring.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <time.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed;
static pthread_t thread;
static bool is_running, must_stop;
static _Atomic uint64_t *word;
static int64_t period_ns;

static int64_t now_ns(struct timespec *now)
{
    clock_gettime(CLOCK_MONOTONIC, now);
    return (int64_t)now->tv_sec * 1000000000 + now->tv_nsec;
}

static void *beat(void *unused)
{
    struct timespec next;
    pthread_mutex_lock(&lock);
    while (!must_stop) {
        int64_t now = now_ns(&next);
        atomic_store_explicit(word, (uint64_t)now, memory_order_relaxed);
        now += period_ns;
        next.tv_sec = now / 1000000000;
        next.tv_nsec = now % 1000000000;
        while (!must_stop && pthread_cond_timedwait(&changed, &lock, &next) != ETIMEDOUT)
            ;
    }
    pthread_mutex_unlock(&lock);
    return unused;
}

/* Block all signals but those that a thread causes itself: a blocked SIGBUS kills at once. */
static void block_signals(sigset_t *before)
{
    static const int own[] = {SIGBUS, SIGSEGV, SIGFPE, SIGILL, SIGABRT, SIGTRAP};
    sigset_t all;
    sigfillset(&all);
    for (size_t i = 0; i < sizeof own / sizeof *own; i++)
        sigdelset(&all, own[i]);
    pthread_sigmask(SIG_BLOCK, &all, before);
}

/* A forked child has no such thread, and perhaps a lock that it held. */
static void forget(void)
{
    is_running = false;
    pthread_mutex_init(&lock, NULL);
}

bool bb_heartbeat_start(_Atomic uint64_t *to, int64_t period)
{
    sigset_t before;
    pthread_condattr_t monotonic;
    static bool is_registered;
    if (is_running)
        return false;
    if (!is_registered)
        is_registered = pthread_atfork(NULL, NULL, forget) == 0;
    pthread_condattr_init(&monotonic);
#ifdef __linux__
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
#endif
    pthread_cond_init(&changed, &monotonic);
    word = to;
    period_ns = period;
    must_stop = false;
    block_signals(&before);
    is_running = pthread_create(&thread, NULL, beat, NULL) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return is_running;
}

void bb_heartbeat_stop(_Atomic uint64_t *to)
{
    if (!is_running || word != to)
        return;
    pthread_mutex_lock(&lock);
    must_stop = true;
    pthread_cond_signal(&changed);
    pthread_mutex_unlock(&lock);
    pthread_join(thread, NULL);
    is_running = false;
}
