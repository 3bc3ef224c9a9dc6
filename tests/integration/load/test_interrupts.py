"""Ctrl-C during a verb raises one KeyboardInterrupt, and leaves no descriptor, thread or mapping.

A child process runs each verb repeatedly, receives SIGINT at a random moment, and reports what is left.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from penstock.testing.checkpoints import write_llama

ROUNDS = 20
SEED = 16
CHILD_S = 120.0
ANSWER_S = 5.0
"""Longest time from the signal to the exception. It takes 0.2 s, and more on a loaded machine."""

VERBS = ["load", "load_copy", "load_into", "stream", "stream_copy", "safe_open_mmap", "safe_open_pread"]

CHILD = """
import contextlib, gc, json, os, random, signal, sys, threading, time
import penstock

signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background inherits "ignored"
directory, rounds, chance = sys.argv[1], int(sys.argv[2]), random.Random(int(sys.argv[3]))
first_file = os.path.join(directory, sorted(name for name in os.listdir(directory) if name.endswith(".safetensors"))[0])
copied = penstock.ReadSettings(copy=True)
target = dict(penstock.load(directory, settings=copied))

def stream(**options):
    for name, tensor in penstock.stream(directory, **options):
        pass

def safe_open(backend):
    with penstock.safe_open(first_file, backend=backend) as file:
        for name in file.keys():
            file.get_tensor(name)
        file.get_tensors()

verbs = {
    "load": lambda: penstock.load(directory),
    "load_copy": lambda: penstock.load(directory, settings=copied),
    "load_into": lambda: penstock.load_into(target, directory),
    "stream": stream,
    "stream_copy": lambda: stream(settings=copied),
    "safe_open_mmap": lambda: safe_open("mmap"),
    "safe_open_pread": lambda: safe_open("pread"),
}

def state():
    descriptors = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that lists them
            descriptors.append(os.readlink(f"/proc/self/fd/{fd}"))
    with open("/proc/self/maps") as file:
        maps = sum(directory in line for line in file)
    threads = sorted(thread.name for thread in threading.enumerate())
    return {"descriptors": sorted(descriptors), "threads": threads, "maps": maps, "collects": gc.isenabled()}

def interrupt_after(seconds, begun, sent):
    while not begun:
        time.sleep(0.0005)
    time.sleep(seconds)
    sent.append(time.monotonic())
    os.kill(os.getpid(), signal.SIGINT)

def answer_s(verb, span_s):
    # Seconds from the signal to the exception, or None without an exception.
    begun, sent = [], []
    sender = threading.Thread(target=interrupt_after, args=(chance.uniform(0, span_s), begun, sent), name="sender")
    sender.start()
    deadline = time.monotonic() + 10
    try:
        begun.append(True)
        while time.monotonic() < deadline:
            verb()
    except KeyboardInterrupt:
        answered = time.monotonic()
        sender.join()
        return answered - sent[0]
    return None

def outcome(verb):
    for _ in range(3):
        verb()  # what is made once and kept: threads of torch, modules
    gc.collect()
    gc.freeze()
    start = time.monotonic()
    for _ in range(5):
        verb()
    span_s = 2 * (time.monotonic() - start) / 5
    before, left, answers = state(), [], []
    for _ in range(rounds):
        answers.append(answer_s(verb, span_s))
        gc.collect()
        for _ in range(200):  # threads that were told to end may take a moment
            after = state()
            if after == before:
                break
            time.sleep(0.01)
        else:
            left.append(after)
    try:
        verb()
        time.sleep(0.05)
        is_raised_again = False
    except KeyboardInterrupt:
        is_raised_again = True
    return {"answers": answers, "before": before, "left": left, "is_raised_again": is_raised_again}

for name in verbs:
    print(json.dumps({"verb": name, **outcome(verbs[name])}), flush=True)
"""


@pytest.fixture(scope="module")
def all_outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the report and the stderr of a child that was interrupted in each verb."""
    directory = tmp_path_factory.mktemp("small")
    write_llama(directory, total_bytes=2 << 20, shards=3)
    command = [sys.executable, "-c", CHILD, str(directory), str(ROUNDS), str(SEED)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        stdout, stderr = child.communicate(timeout=CHILD_S)
    except subprocess.TimeoutExpired:  # a verb waits for a thread that an interrupted one left
        child.kill()
        stdout, stderr = child.communicate()
    outcomes: dict[str, Any] = {}
    for line in stdout.splitlines():
        outcome = json.loads(line)
        outcomes[outcome["verb"]] = outcome
    return {**outcomes, "stderr": stderr, "returncode": child.returncode}


@pytest.mark.parametrize("verb", VERBS)
def test_interrupted_call_leaves_no_files_or_threads(verb: str, all_outcomes: dict[str, Any]) -> None:
    assert verb in all_outcomes, all_outcomes["stderr"]
    outcome = all_outcomes[verb]
    answers = outcome["answers"]
    lost = answers.count(None)
    print(f"{verb}: {len(answers) - lost} of {len(answers)} answered, {len(outcome['left'])} left something")
    assert (lost, outcome["left"], outcome["is_raised_again"]) == (0, [], False), outcome["before"]
    assert max(answers) < ANSWER_S


def test_interrupted_call_prints_nothing(all_outcomes: dict[str, Any]) -> None:
    assert (all_outcomes["returncode"], all_outcomes["stderr"]) == (0, "")
