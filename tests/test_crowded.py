"""A program beside others that want every core: the first words come at once all the same."""

import re
import statistics
import subprocess

import pytest

from tests.helpers import ROOT

pytestmark = pytest.mark.alone

LIMIT = 0.020  # seconds; threads that wait for each other's turn take 0.5 to 1.2


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
    assert statistics.median(prefill_seconds(*options) for _ in range(10)) < LIMIT
