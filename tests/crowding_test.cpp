// When a run takes fewer threads, and more again.
#include "common/cpu/crowding.h"

#include <doctest/doctest.h>

namespace {

// Looks once every 0.1 s for so many seconds, threads waiting for that share of a core.
void wait(Crowding& c, double& now, double& waited, double seconds, double share) {
    for (int i = 0; i < static_cast<int>(seconds * 10 + 0.5); i++) {
        now += 0.1;
        waited += 0.1 * share;
        c.look(now, waited);
    }
}

}  // namespace

TEST_CASE("crowding: a thread less at a time while cores are wanted, and one more when they are free") {
    Crowding c;
    c.begin(4);
    double now = 100, waited = 3;
    CHECK_FALSE(c.look(now, waited));  // what was waited before does not count
    wait(c, now, waited, 5, 0.1);
    CHECK(c.threads() == 4);
    wait(c, now, waited, 0.1, 0.5);
    CHECK(c.threads() == 3);
    wait(c, now, waited, 0.1, 0.5);
    CHECK(c.threads() == 2);
    wait(c, now, waited, 1.8, 0);
    CHECK(c.threads() == 2);
    wait(c, now, waited, 0.4, 0);
    CHECK(c.threads() == 3);
    wait(c, now, waited, 0.1, 0.5);  // not free after all
    CHECK(c.threads() == 2);
    wait(c, now, waited, 10, 0);
    CHECK(c.threads() == 4);
    wait(c, now, waited, 10, 0.9);  // never none, and tried again every two seconds
    CHECK(c.threads() <= 2);
    CHECK(c.threads() >= 1);
}

TEST_CASE("crowding: one thread stays one, and nothing changes where nothing is known") {
    Crowding one, all;
    one.begin(1);
    all.begin(3);
    double now = 1, waited = 0;
    wait(one, now, waited, 5, 0.9);
    CHECK(one.threads() == 1);
    wait(all, now, waited, 5, 0);
    CHECK(all.threads() == 3);
    CHECK(seconds_without_core() >= 0);
}
