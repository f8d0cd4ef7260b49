"""A thread that comes to a loop too late touches nothing of it: engine/os/threads.h with pauses where it matters.

A helper sees a loop, and stands still before it joins. Meanwhile that loop ends, and the next one is half set up: its
items begin where they should and end where those of the first did. By chance this hardly ever happens.
"""

import os
import subprocess

import pytest

from tests.helpers import ROOT

# Where a copy of the header calls the driver.
PAUSES = {
    "            n_inside_.fetch_add(1);\n": "            before_joining();\n            n_inside_.fetch_add(1);\n",
    "            part.end = n_ ": "            half_set_up(t);\n            part.end = n_ ",
    "wake_all(n_inside_);\n": "wake_all(n_inside_);\n            has_left();\n",
}
CHECK = "if (turn_.load() == turn) work(t);"

DRIVER = """
#include <atomic>
#include <cstdio>
#include <thread>

std::atomic<int> step = 0;
bool is_second = false;
void wait_for(int value) {
    while (step < value) std::this_thread::yield();
}
void before_joining() {  // the helper, in the first loop
    if (step == 0) step = 1, wait_for(2);
}
void half_set_up(int t) {  // the second loop: of the helper's part there is the beginning
    if (is_second && t == 1) step = 2, wait_for(3);
}
void has_left() {
    if (step == 2) step = 3;
}

#include "threads.h"

struct Loop { std::atomic<int> n_done = 0, n_outside = 0; };

template <int n>
void body(void* argument, int64_t begin, int64_t end) {
    wait_for(1);
    auto& loop = *static_cast<Loop*>(argument);
    loop.n_done += int(end - begin);
    if (end > n) loop.n_outside++;
}

int main() {
    ThreadPool pool(2);
    Loop first, second;
    pool.run(100, body<100>, &first);
    is_second = true;
    pool.run(10, body<10>, &second);
    std::printf("%d and %d done, %d outside\\n", first.n_done.load(), second.n_done.load(), second.n_outside.load());
}
"""


@pytest.mark.parametrize("looks", [True, False], ids=["as it is", "without its look at the loop"])
def test_a_late_helper_leaves_the_next_loop_alone(tmp_path, looks):
    source = (ROOT / "engine" / "os" / "threads.h").read_text()
    for old, new in (PAUSES | ({} if looks else {CHECK: "work(t);"})).items():
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    (tmp_path / "threads.h").write_text(source)
    (tmp_path / "driver.cpp").write_text(DRIVER)
    compiler = os.environ.get("CXX", "g++")
    program = tmp_path / "driver"
    flags = ["-std=c++20", "-O1", "-pthread", "-DENGINE", f"-I{ROOT}"]
    subprocess.run([compiler, *flags, tmp_path / "driver.cpp", "-o", program], check=True)
    done = subprocess.run([program], capture_output=True, text=True, timeout=300, check=True)
    assert (done.stdout == "100 and 10 done, 0 outside\n") == looks, done.stdout
