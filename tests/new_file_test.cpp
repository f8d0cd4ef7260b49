// Files that are there as a whole or not at all.
#include "engine/os/files.h"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <fstream>
#include <iterator>
#include <string>

#include "own_folder.h"

namespace fs = std::filesystem;

namespace {

// An empty folder.
std::string fresh(const char* name) {
    const fs::path folder = own_folder() / "new_file" / name;
    fs::remove_all(folder);
    fs::create_directories(folder);
    return folder.string() + "/";
}

std::string text_of(const std::string& path) {
    std::ifstream in(path);
    return {std::istreambuf_iterator<char>(in), {}};
}

size_t n_files(const std::string& folder) {
    return size_t(std::distance(fs::directory_iterator(folder), fs::directory_iterator()));
}

// What there was to see when a file was flushed to the disk.
struct Flushed {
    std::string watched{};  // a file; empty: nobody looks
    int reason = 0;         // with which it fails
    int n_times = 0;
    off_t size = 0;
    std::string in_place{};  // what the watched file holds
} flushed;

void write_text(const std::string& path, const std::string& text) {
    NewFile file(path);
    file.write(text.data(), text.size());
    file.commit();
}

}  // namespace

// In place of the C library's.
extern "C" int fsync(int fd) {
    if (!flushed.watched.empty()) {
        struct stat info {};
        fstat(fd, &info);
        flushed.n_times++, flushed.size = info.st_size, flushed.in_place = text_of(flushed.watched);
        errno = flushed.reason;
        if (flushed.reason != 0) return -1;
    }
    return int(syscall(SYS_fsync, fd));
}

// Whether a file can be created without a name.
bool finds_descriptors = true;
extern "C" int access(const char* path, int mode) noexcept {
    if (!finds_descriptors && path == std::string("/proc/self/fd")) mode = -1;  // no such mode: it fails
    return int(syscall(SYS_faccessat, AT_FDCWD, path, mode));
}

TEST_CASE("new file: there once it is committed, in place of what was there, with nothing beside it") {
    const std::string folder = fresh("commit"), path = folder + "out";
    const mode_t mask = umask(027);
    write_text(path, "one");
    umask(mask);
    CHECK(text_of(path) == "one");
    CHECK((fs::status(path).permissions() & fs::perms::all) == fs::perms(0640));
    {
        NewFile file(path);
        file.write("two", 3);
        CHECK(text_of(path) == "one");
    }
    CHECK(text_of(path) == "one");  // not committed
    CHECK(n_files(folder) == 1);
    write_text(path, "three");
    CHECK(text_of(path) == "three");
    CHECK(n_files(folder) == 1);

    // Through a link, to where it leads.
    fs::create_directories(folder + "elsewhere");
    write_text(folder + "elsewhere/real", "four");
    fs::create_symlink(folder + "elsewhere/real", folder + "link");
    write_text(folder + "link", "five");
    CHECK(fs::is_symlink(folder + "link"));
    CHECK(text_of(folder + "elsewhere/real") == "five");
    CHECK(n_files(folder + "elsewhere") == 1);

    // Also where nothing is yet, by two links.
    fs::create_symlink("elsewhere/new", folder + "second");
    fs::create_symlink("second", folder + "first");
    write_text(folder + "first", "a file");
    CHECK(fs::is_symlink(folder + "first"));
    CHECK(fs::is_symlink(folder + "second"));
    CHECK(text_of(folder + "elsewhere/new") == "a file");

    // In the working directory, by its name alone.
    const fs::path here = fs::current_path();
    fs::current_path(folder);
    write_text("plain", "six");
    fs::current_path(here);
    CHECK(text_of(folder + "plain") == "six");
}

TEST_CASE("new file: all of it is on the disk before it is in place") {
    const std::string folder = fresh("disk"), path = folder + "out";
    write_text(path, "old");
    const std::string text(100000, 'x');
    {
        NewFile file(path);
        file.write(text.data(), text.size());
        flushed = {.watched = path};
        file.commit();
    }
    CHECK(flushed.n_times == 1);
    CHECK(flushed.size == ptrdiff_t(text.size()));
    CHECK(flushed.in_place == "old");
    CHECK(text_of(path) == text);

    NewFile file(path);
    file.write("new", 3);
    flushed = {.watched = path, .reason = EIO};
    CHECK_THROWS_WITH_AS(file.commit(), (path + ": cannot write: Input/output error").c_str(),
                         std::runtime_error);
    flushed = {};
    CHECK(text_of(path) == text);
}

TEST_CASE("new file: what is no regular file is refused and left alone, before anything is written") {
    const std::string folder = fresh("refuse"), fifo = folder + "fifo";
    auto refusal = [](const std::string& path) -> std::string {
        try {
            const NewFile file(path);
            return "";
        } catch (const std::runtime_error& e) {
            return e.what();
        }
    };
    REQUIRE(mkfifo(fifo.c_str(), 0600) == 0);
    CHECK(refusal(fifo) == fifo + ": cannot write: not a regular file");
    CHECK(refusal("/dev/null") == "/dev/null: cannot write: not a regular file");
    fs::create_symlink("/dev/null", folder + "link");
    CHECK(refusal(folder + "link") == folder + "link: cannot write: not a regular file");
    CHECK(refusal(folder) == folder + ": cannot write: Is a directory");
    CHECK(refusal(folder + "no/such") == folder + "no/such: cannot write: No such file or directory");
    CHECK(refusal(fifo + "/x") == fifo + "/x: cannot write: Not a directory");
    CHECK(refusal(folder + "new/") == folder + "new/: cannot write: Is a directory");
    CHECK(refusal("") == ": cannot write: No such file or directory");
    CHECK(refusal("/proc/new") == "/proc/new: cannot write: No such file or directory");
    CHECK(n_files(folder) == 2);
}

TEST_CASE("new file: two at once for one path do not mix") {
    const std::string folder = fresh("two"), path = folder + "out";
    NewFile a(path), b(path);
    a.write("aaa", 3);
    b.write("b", 1);
    a.commit();
    CHECK(text_of(path) == "aaa");
    b.commit();
    CHECK(text_of(path) == "b");
    CHECK(n_files(folder) == 1);
}

TEST_CASE("new file: a name that is taken is left to whom it belongs") {
    const std::string folder = fresh("taken"), path = folder + "out";
    const std::string taken = folder + ".runq-" + std::to_string(getpid()) + "-0.part";
    std::ofstream(taken) << "another's";
    write_text(path, "mine");
    CHECK(text_of(path) == "mine");
    CHECK(text_of(taken) == "another's");
    CHECK(n_files(folder) == 2);
}

TEST_CASE("new file: a write that fails, or a signal that kills, leaves nothing") {
    const std::string folder = fresh("fail"), path = folder + "out";
    write_text(path, "old");
    for (const bool is_killed : {false, true}) {
        const pid_t child = fork();
        if (child == 0) {
            std::signal(SIGXFSZ, SIG_IGN);
            const rlimit most = {100000, 100000};  // bytes of a file
            setrlimit(RLIMIT_FSIZE, &most);
            const std::string text(is_killed ? 50000 : 200000, 'x');
            int code = 0;
            try {
                NewFile file(path);
                file.write(text.data(), text.size());
                if (is_killed) std::raise(SIGKILL);
                file.commit();
            } catch (const std::runtime_error& e) {
                code = e.what() == path + ": cannot write: File too large" ? 7 : 8;
            }
            _exit(code);
        }
        int status = 0;
        REQUIRE(waitpid(child, &status, 0) == child);
        CHECK(is_killed == WIFSIGNALED(status));
        if (!is_killed) CHECK(WEXITSTATUS(status) == 7);
        CHECK(text_of(path) == "old");
        CHECK(n_files(folder) == 1);
    }
}

TEST_CASE("new file: where there is no /proc, as in a chroot, it has a name") {
    const std::string folder = fresh("no_proc");
    const pid_t child = fork();
    if (child == 0) {
        const char* root = folder.c_str();
        if (chroot(root) != 0 && (unshare(CLONE_NEWUSER) != 0 || chroot(root) != 0)) _exit(77);
        try {
            write_text("/out", "text");
        } catch (const std::runtime_error& e) {
            _exit(1);
        }
        _exit(0);
    }
    int status = 0;
    REQUIRE(waitpid(child, &status, 0) == child);
    if (WEXITSTATUS(status) == 77) {
        MESSAGE("left out: chroot is not permitted");
        return;
    }
    CHECK(status == 0);
    CHECK(text_of(folder + "out") == "text");
    CHECK(n_files(folder) == 1);
}

TEST_CASE("new file: what a killed process leaves under a name goes with the next, what is open stays") {
    const std::string folder = fresh("left_over"), path = folder + "out";
    finds_descriptors = false;
    NewFile open(path);
    open.write("open", 4);
    CHECK(n_files(folder) == 1);
    const pid_t child = fork();
    if (child == 0) {
        NewFile file(folder + "another");
        file.write("left", 4);
        std::raise(SIGKILL);
    }
    int status = 0;
    REQUIRE(waitpid(child, &status, 0) == child);
    CHECK(WIFSIGNALED(status));
    CHECK(n_files(folder) == 2);
    std::ofstream(folder + ".runq-1-0.part.txt") << "of another kind";
    fs::create_directories(folder + ".runq-1-0.part");
    {
        NewFile next(path);
        CHECK(n_files(folder) == 4);  // the first, this one, and two that are none of ours
        next.write("next", 4);
        next.commit();
    }
    CHECK(text_of(path) == "next");
    open.commit();
    finds_descriptors = true;
    CHECK(text_of(path) == "open");
    CHECK(n_files(folder) == 3);
}

TEST_CASE("same file: by any name and link") {
    const std::string folder = fresh("same"), path = folder + "a";
    write_text(path, "a");
    write_text(folder + "b", "a");
    fs::create_symlink(path, folder + "link");
    fs::create_hard_link(path, folder + "hard");
    CHECK(same_file(path, path));
    CHECK(same_file(path, folder + "./a"));
    CHECK(same_file(path, folder + "link"));
    CHECK(same_file(folder + "hard", path));
    CHECK_FALSE(same_file(path, folder + "b"));
    CHECK_FALSE(same_file(path, folder + "none"));
    CHECK_FALSE(same_file(folder + "none", folder + "none"));
}
