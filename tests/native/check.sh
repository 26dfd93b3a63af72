#!/bin/sh
# make check-native: the C cores under sanitizers, with faults put in to prove that they are seen,
# and on ARM64 under qemu where a cross compiler is (which proves function, and no memory order).
set -eu
here=$(dirname "$0")
core=$here/../../echelon/dist/backends/shm/native
out=${OUT:-$(mktemp -d)}
sources="$here/check.c $here/operations.c $here/endings.c"
for name in engine queue faults collectives messages matching waiting reduce; do
    sources="$sources $core/$name.c"
done
flags="-std=gnu11 -O1 -g -Wall -Wextra -Werror -ffp-contract=off -I$core -pthread"
CC=${CC:-cc}

# The recorder's core: its reader maps the ring a second time, so what is reported is the writers'.
ring=$here/../../echelon/recorder/native
ring_sources="$here/ring_check.c"
for name in slots spans checksum heartbeat; do
    ring_sources="$ring_sources $ring/$name.c"
done
ring_flags="-std=gnu11 -O1 -g -Wall -Wextra -Werror -Wno-tsan -I$ring -pthread"

$CC $flags $sources -o "$out/plain" -lm
"$out/plain" 200
"$out/plain" 3 65
"$out/plain" 1 256

$CC $flags -fsanitize=address,undefined -fno-sanitize-recover=all $sources -o "$out/address" -lm
"$out/address" 100
echo "AddressSanitizer and UBSan: clean"

$CC $flags -fsanitize=thread $sources -o "$out/thread" -lm
TSAN_OPTIONS=halt_on_error=1 "$out/thread" 60
TSAN_OPTIONS=halt_on_error=1 "$out/thread" 2 12
echo "ThreadSanitizer: clean"

$CC $flags -DEC_WEAKEN_SLEEP $sources -o "$out/sleepy" -lm
if "$out/sleepy" 60 >"$out/sleepy.log" 2>&1; then
    echo "a weakened store before sleeping went unnoticed: lost wakes are not counted" >&2
    exit 1
fi
grep -q "number of lost wakes is wrong" "$out/sleepy.log"
echo "lost wakes: counted in the build with a weakened store before sleeping"

$CC $flags -fsanitize=thread -DEC_WEAKEN_PUBLISH $sources -o "$out/weakened" -lm
if TSAN_OPTIONS=halt_on_error=1 "$out/weakened" 60 >"$out/weakened.log" 2>&1; then
    echo "a weakened release store went unnoticed: this check checks nothing" >&2
    exit 1
fi
grep -q "WARNING: ThreadSanitizer: data race" "$out/weakened.log"
echo "ThreadSanitizer: reports the build with a weakened release store"

if command -v aarch64-linux-gnu-gcc >/dev/null && command -v qemu-aarch64-static >/dev/null; then
    aarch64-linux-gnu-gcc $flags -O2 -static $sources -o "$out/arm64" -lm
    qemu-aarch64-static "$out/arm64" 40
    echo "ARM64 under qemu: right results (no proof of memory order)"
else
    echo "ARM64: skipped: needs gcc-aarch64-linux-gnu and qemu-user-static"
fi

$CC $ring_flags $ring_sources -o "$out/ring"
"$out/ring" 40000
$CC $ring_flags -fsanitize=address,undefined -fno-sanitize-recover=all $ring_sources -o "$out/ring_address"
"$out/ring_address" 10000
$CC $ring_flags -fsanitize=thread $ring_sources -o "$out/ring_thread"
TSAN_OPTIONS=halt_on_error=1 "$out/ring_thread" 4000
$CC $ring_flags -fsanitize=thread -DBB_WITHOUT_LOCK $ring_sources -o "$out/ring_weakened"
if TSAN_OPTIONS=halt_on_error=1 "$out/ring_weakened" 4000 >"$out/ring_weakened.log" 2>&1; then
    echo "writers without a lock went unnoticed: this check checks nothing" >&2
    exit 1
fi
grep -q "WARNING: ThreadSanitizer: data race" "$out/ring_weakened.log"
echo "recorder: AddressSanitizer, UBSan and ThreadSanitizer clean; writers without a lock reported"
if command -v aarch64-linux-gnu-gcc >/dev/null && command -v qemu-aarch64-static >/dev/null; then
    aarch64-linux-gnu-gcc $ring_flags -O2 -static $ring_sources -o "$out/ring_arm64"
    qemu-aarch64-static "$out/ring_arm64" 10000
    echo "recorder: ARM64 under qemu: right results (no proof of memory order)"
fi

# The store's core works on Python's own objects, so its tests drive it, in an interpreter that has
# the sanitizer loaded and takes each object from malloc, where a read past its end is seen.
tree=$out/tree
mkdir -p "$tree"
cp -r "$here/../../echelon" "$here/../../tests" "$here/../../pyproject.toml" "$tree"
python=$(cd "$here/../.." && pwd)/.venv/bin/python
store=echelon/store/server
suffix=$("$python" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
includes=$("$python" -c 'import sysconfig; print("-I" + sysconfig.get_path("include"))')
build_store() {
    $CC -std=c11 -O1 -g -fPIC -shared -Wall -Werror -fsanitize=address,undefined \
        -fno-sanitize-recover=all "$includes" "$@" "$tree/$store"/native/*.c \
        -o "$tree/$store/_native$suffix"
}
run_store() (
    cd "$tree"
    LD_PRELOAD=$($CC -print-file-name=libasan.so) ASAN_OPTIONS=detect_leaks=0 PYTHONMALLOC=malloc \
        "$python" -m pytest -q -s tests/store/test_executor.py
)
build_store
run_store
build_store -DST_WITHOUT_BOUNDS
if run_store >"$out/store_weakened.log" 2>&1; then
    echo "a string that is read past its packet went unnoticed: this check checks nothing" >&2
    exit 1
fi
grep -q "AddressSanitizer: heap-buffer-overflow" "$out/store_weakened.log"
echo "store: AddressSanitizer and UBSan clean; a read past the packet reported"
