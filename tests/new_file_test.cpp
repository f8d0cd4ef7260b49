// Files that are there as a whole or not at all.
#include "engine/os/files.h"

#include <doctest/doctest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

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

void write_text(const std::string& path, const std::string& text) {
    NewFile file(path);
    file.write(text.data(), text.size());
    file.commit();
}

}  // namespace

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
    fs::create_symlink("round", folder + "round");
    CHECK(refusal(folder + "round") == folder + "round: cannot write: Too many levels of symbolic links");
    const std::string long_name = folder + std::string(300, 'x');
    CHECK(refusal(long_name) == long_name + ": cannot write: File name too long");
    CHECK(n_files(folder) == 3);
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

TEST_CASE("new file: a failed write leaves nothing, SIGKILL a file that harms none") {
    const std::string folder = fresh("fail"), path = folder + "out";
    write_text(path, "old");
    // 200000 bytes do not all fit into a stream's buffer, 2000 do: commit() writes those.
    for (const size_t n_bytes : {200000, 2000, 500}) {
        const pid_t child = fork();
        if (child == 0) {
            std::signal(SIGXFSZ, SIG_IGN);
            const rlimit most = {1000, 1000};  // bytes of a file
            setrlimit(RLIMIT_FSIZE, &most);
            const std::string text(n_bytes, 'x');
            bool commits = false;
            int code = 0;
            try {
                NewFile file(path);
                file.write(text.data(), text.size());
                if (n_bytes == 500) std::raise(SIGKILL);
                commits = true;
                file.commit();
            } catch (const std::runtime_error& e) {
                code = e.what() == path + ": cannot write: File too large" ? 7 + commits : 9;
            }
            _exit(code);
        }
        int status = 0;
        REQUIRE(waitpid(child, &status, 0) == child);
        CHECK(WIFSIGNALED(status) == (n_bytes == 500));
        if (n_bytes != 500) CHECK(WEXITSTATUS(status) == (n_bytes == 2000 ? 8 : 7));
        CHECK(text_of(path) == "old");
        CHECK(n_files(folder) == (n_bytes == 500 ? 2 : 1));
    }
    write_text(path, "new");
    CHECK(text_of(path) == "new");
    CHECK(n_files(folder) == 2);
}

TEST_CASE("new file: what cannot be put in place is removed") {
    const std::string folder = fresh("in_place"), path = folder + "out";
    {
        NewFile file(path);
        file.write("text", 4);
        fs::create_directory(path);
        CHECK_THROWS_WITH_AS(file.commit(), (path + ": cannot write: Is a directory").c_str(),
                             std::runtime_error);
    }
    CHECK(fs::is_directory(path));
    CHECK(n_files(folder) == 1);
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
