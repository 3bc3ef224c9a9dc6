"""The CUDA driver's calls through ctypes, without a device.

A library replaces the driver's. It reports calls without a context or with invalid arguments, and unreleased resources.
tests/gpu tests the real driver.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.cuda.driver import SIGNATURES

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")

DRIVER = """
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
typedef uint64_t u64;
typedef struct { int live; u64 posted, done; } stream;
typedef struct { int live; stream *on; u64 at; } event;
static __thread int depth;
static _Atomic long wrong, streams, events, copies, pinned;
static int check(int ok) { if (!ok || !depth) wrong++; return ok ? 0 : 1; }
static int queue(u64 dst, u64 src, size_t n, stream *on) {
  if (check(on && on->live)) return 400;
  memcpy((void *)dst, (void *)src, n); copies++; on->posted++; return 0;
}
int cuInit(unsigned flags) { return 0; }
int cuDeviceGet(int *device, int number) { *device = number; return 0; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)(u64)(16 + device); return 0; }
int cuCtxPushCurrent_v2(void *context) { depth++; return check((u64)context >> 4 == 1); }
int cuCtxPopCurrent_v2(void **context) { int bad = check(1); depth--; return bad; }
int cuMemGetAddressRange_v2(u64 *base, size_t *n, u64 at) { *base = at & ~4095ull; *n = 1 << 30; return check(1); }
int cuIpcGetMemHandle(void *handle, u64 base) { memset(handle, 1, 64); return check(!(base & 4095)); }
int cuStreamCreate(stream **made, unsigned flags) {
  *made = calloc(1, sizeof(stream)); (*made)->live = 1; streams++; return check(flags == 1);
}
int cuStreamDestroy_v2(stream *on) { int bad = check(on->live); on->live = 0; streams--; return bad; }
int cuEventCreate(event **made, unsigned flags) {
  *made = calloc(1, sizeof(event)); (*made)->live = 1; events++; return check(flags == 2);
}
int cuEventDestroy_v2(event *one) { int bad = check(one->live); one->live = 0; events--; return bad; }
int cuEventRecord(event *one, stream *on) {
  one->on = on; one->at = on ? on->posted : 0; return check(one->live && (!on || on->live));
}
int cuEventQuery(event *one) {
  if (check(one->live)) return 400;
  return one->on && one->on->done < one->at ? (one->on->done++, 600) : 0;
}
int cuMemHostRegister_v2(void *at, size_t n, unsigned flags) {
  pinned++; return check(!((u64)at & 4095) && n && (flags == 3 || flags == 11));
}
int cuMemHostUnregister(void *at) { pinned--; return check(1); }
int cuMemcpyAsync(u64 dst, u64 src, size_t n, stream *on) { return queue(dst, src, n, on); }
int cuMemcpyHtoDAsync_v2(u64 dst, const void *src, size_t n, stream *on) { return queue(dst, (u64)src, n, on); }
int cuMemcpyBatchAsync_v2(u64 *dst, u64 *src, size_t *n, size_t count, int *how, size_t *of, size_t num, stream *on) {
  if (check(num == 1 && !of[0] && how[0] == 1)) return 1;
  for (size_t i = 0; i < count; i++) if (queue(dst[i], src[i], n[i], on)) return 1;
  return 0;
}
typedef struct { size_t x, y; int type; void *host; u64 at; void *array; size_t pitch; } side;
typedef struct { side from, to; size_t width, height; } pitched;
int cuMemcpy2DAsync_v2(const pitched *one, stream *on) {
  if (check(one->from.type == 4 && one->to.type == 4 && one->width <= one->from.pitch && one->width <= one->to.pitch))
    return 1;
  for (size_t i = 0; i < one->height; i++)
    if (queue(one->to.at + i * one->to.pitch, one->from.at + i * one->from.pitch, one->width, on)) return 1;
  return 0;
}
int cuGetErrorName(int code, const char **said) { *said = "CUDA_ERROR_MADE_UP"; return 0; }
void told(long *out) { long all[] = {wrong, streams, events, copies, pinned}; memcpy(out, all, sizeof all); }
"""

READS = """
import ctypes, gc, json, threading
import numpy as np
from penstock.memory.arena import Arena
from tests.support.holder import HolderProcess, pattern
from penstock.testing.transport_suite import segments
from penstock.cuda.driver import load_driver
from penstock.transport.cuda_ipc import CudaIpcTransport
from penstock.transport.into_device import PinnedTransport, StagedTransport
from penstock.transport.protocol import Memory, Rectangles
from penstock.transport.shm import ShmTransport

NBYTES = 3_000_011  # in rows so few that cuda_ipc starts no kernel
ROWS = [(at, at, min(60_000, NBYTES - at)) for at in range(0, NBYTES, 60_001)]
expected = bytearray(NBYTES)
for at, _, nbytes in ROWS:
    expected[at : at + nbytes] = pattern(NBYTES)[at : at + nbytes]

def made() -> Memory:
    arena = Arena.allocate(NBYTES)
    return Memory(address=arena.address, nbytes=NBYTES, device="cuda:0", owner=arena)

def read(transport, into, descriptor, rows) -> None:
    transport.wait(transport.post_read(into, descriptor, segments(rows)), stall_s=60)

def check(transport, into, descriptor) -> None:
    read(transport, into, descriptor, ROWS)
    assert ctypes.string_at(into.memory.address, NBYTES) == expected
    threads = [threading.Thread(target=read, args=(transport, into, descriptor, [row])) for row in ROWS[:20]]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

with HolderProcess("shm", nbytes=NBYTES) as holder:
    for make in (lambda shm: StagedTransport("staged_shm", shm), PinnedTransport):
        shm = ShmTransport()
        transport = make(shm)
        check(transport, transport.register_into(made()), holder.descriptor)
        transport.close()
        shm.close()

ours, theirs, source = CudaIpcTransport(), CudaIpcTransport(), made()
ctypes.memmove(source.address, pattern(NBYTES), NBYTES)
given = theirs.register(source).descriptor
check(ours, ours.register(made()), given)
into = ours.register(made())
columns = dict(src=[7], dst=[5], run_bytes=[16_384], num_rows=[100], src_pitch=[25_000], dst_pitch=[17_000])
rectangles = Rectangles(**{name: np.array(column) for name, column in columns.items()})
for turn in range(2):
    ours.wait(ours.post_rectangles(into, given, rectangles), stall_s=60)
    found = np.frombuffer(ctypes.string_at(into.memory.address, NBYTES), np.uint8)
    truth = np.frombuffer(pattern(NBYTES), np.uint8)
    for src, dst, run, count, src_pitch, dst_pitch in zip(*columns.values()):
        for i in range(count):
            here, there = dst + i * dst_pitch, src + i * src_pitch
            assert (found[here : here + run] == truth[there : there + run]).all()
ours.close()
theirs.close()

driver, into, given = load_driver(), np.zeros(100, np.uint8), np.arange(100, dtype=np.uint8)
with driver.entered(0):
    stream, event = driver.make_stream(), driver.make_event()
    driver.copy_to_device(int(into.ctypes.data) + 10, int(given.ctypes.data) + 20, 30, stream)
    driver.record(event, stream)
    while not driver.is_done(event):
        pass
    driver.free([stream], [event])
assert (into[10:40] == given[20:50]).all() and not into[:10].any() and not into[40:].any()
del transport, ours, theirs
gc.collect()
found = (ctypes.c_long * 5)()
ctypes.CDLL("libcuda.so.1").told(found)
print(json.dumps(dict(zip(("wrong", "streams", "events", "copies", "pinned"), found))))
"""


def test_transport_copies_make_valid_driver_calls_without_leaks(tmp_path: Path) -> None:
    rest = "".join(f"int {name}() {{ return 801; }}\n" for name in SIGNATURES if f"int {name}(" not in DRIVER)
    (tmp_path / "driver.c").write_text(DRIVER + rest)
    command = ["cc", "-shared", "-fPIC", "-o", str(tmp_path / "libcuda.so.1"), str(tmp_path / "driver.c")]
    subprocess.run(command, check=True, capture_output=True)
    environ = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", READS], env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found.pop("copies") == 3 * (50 + 20) + 2 * 100 + 1
    assert found == {"wrong": 0, "streams": 0, "events": 0, "pinned": 0}
