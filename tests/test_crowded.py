"""A program beside others that want every core: the first words come as soon as from one thread.

One thread has its turn sooner or later, as the machine is busy. Threads that wait for each other's turn, loop after
loop, take 0.5 to 1.2 s here.
"""

import re
import statistics
import subprocess

import pytest

from tests.helpers import ROOT

pytestmark = pytest.mark.alone


@pytest.fixture(params=[1, 3])
def busy(request):
    """Processes that do nothing but use up a core each, in sessions of their own as another user's would be."""
    spin = ["sh", "-c", "while :; do :; done"]
    processes = [subprocess.Popen(spin, start_new_session=True) for _ in range(request.param)]
    yield
    for process in processes:
        process.kill()
        process.wait()


def prefill_seconds(*options):
    command = [ROOT / "runq", ROOT / "model.bin", "--ids", "1922,11,1112", "-n", "4", "-t", "0", *options]
    done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True, check=True)
    return 3 / float(re.search(r"^prefill +3 tokens in .* s, (.*) tokens/s$", done.stderr, re.M)[1])


@pytest.mark.usefixtures("busy")
@pytest.mark.parametrize("options", [(), ("-j", "2")], ids=["default", "two threads"])
def test_a_short_prompt_does_not_wait_for_other_programs(options):
    pairs = [(prefill_seconds(*options), prefill_seconds("-j", "1")) for _ in range(11)]  # in turns: at the same load
    ours, one_thread = map(statistics.median, zip(*pairs, strict=True))
    assert ours < 0.020 + 10 * one_thread, pairs
