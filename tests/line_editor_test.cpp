// Lines that a person types on a terminal: signals, the terminal's settings, the history. Keys and what is
// seen on the screen: tests/test_chat.py.
#include "engine/app/line_editor.h"

#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <termios.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include "engine/os/system.h"
#include "own_folder.h"

namespace fs = std::filesystem;

namespace {

// A terminal that this process has the other side of. It ends with the test's last resort, an alarm that
// kills, if somebody waits for ever.
class Pty {
  public:
    Pty() {
        alarm(600);
        keyboard_ = posix_openpt(O_RDWR | O_NOCTTY);
        REQUIRE(keyboard_ >= 0);
        REQUIRE(grantpt(keyboard_) == 0);
        REQUIRE(unlockpt(keyboard_) == 0);
        terminal_ = open(ptsname(keyboard_), O_RDWR | O_NOCTTY);
        REQUIRE(terminal_ >= 0);
        stream = fdopen(terminal_, "r+");
        at_first_ = settings();
        at_first_.c_lflag &= ~tcflag_t(ECHOCTL);  // libedit's own settings for a program have it
        tcsetattr(terminal_, TCSANOW, &at_first_);
    }
    ~Pty() {
        std::fclose(stream);
        close(keyboard_);
        alarm(0);
    }
    Pty(const Pty&) = delete;
    Pty& operator=(const Pty&) = delete;

    Streams streams() const { return {stream, stream, stream}; }
    void type(const std::string& keys) const {
        REQUIRE(write(keyboard_, keys.data(), keys.size()) == ptrdiff_t(keys.size()));
    }
    // What is shown, up to the first `end` in it.
    std::string shown_until(const std::string& end) const {
        std::string text;
        for (char c = 0; !text.ends_with(end); text += c) {
            if (read(keyboard_, &c, 1) != 1) break;
        }
        return text;
    }
    termios settings() const {
        termios found{};
        tcgetattr(terminal_, &found);
        return found;
    }
    bool is_as_at_first() const {
        const termios a = settings(), &b = at_first_;
        return a.c_iflag == b.c_iflag && a.c_oflag == b.c_oflag && a.c_lflag == b.c_lflag &&
               std::ranges::equal(a.c_cc, b.c_cc);
    }
    bool has(tcflag_t flag) const { return (settings().c_lflag & flag) != 0; }

    std::FILE* stream = nullptr;

  private:
    int keyboard_ = -1, terminal_ = -1;
    termios at_first_{};
};

// With keys, if the program has libedit, or as a terminal without any.
void choose_terminal(bool has_keys) {
    setenv("TERM", has_keys ? "xterm" : "dumb", 1);
    setenv("NO_COLOR", "1", 1);
}

// Waits until the thread or process whose /proc/.../stat it is sleeps, or has ended.
void wait_for_sleep(const std::string& stat) {
    std::string state;
    while (state != "S") {
        std::string word;
        std::ifstream in(stat);
        in >> word >> word >> state;
        if (!in) break;
    }
}

}  // namespace

TEST_CASE("line editor: a line, an empty one, and the end") {
    for (const bool has_keys : {false, true}) {
        CAPTURE(has_keys);
        choose_terminal(has_keys);
        const Pty pty;
        LineEditor editor(pty.streams(), "", 1 << 16);
        std::string text;
        pty.type("one\n");
        CHECK(editor.read("> ", text) == Typed::line);
        CHECK(text == "one");
        pty.type("\n");
        CHECK(editor.read(". ", text) == Typed::line);
        CHECK(text == "");
        std::thread keyboard([&] {
            pty.shown_until("- ");
            pty.type("\x04");
        });
        CHECK(editor.read("- ", text) == Typed::end);
        keyboard.join();
    }
}

TEST_CASE(
    "line editor: without keys, Ctrl-C is heard that came before the wait, or that another thread takes") {
    void (*const before)(int) = std::signal(SIGINT, SIG_DFL);
    catch_ctrl_c();
    choose_terminal(false);
    const Pty pty;
    LineEditor editor(pty.streams(), "", 1 << 16);
    std::string text;
    std::raise(SIGINT);
    CHECK(editor.read("> ", text) == Typed::ctrl_c);
    pty.shown_until("> ");
    interrupted = 0;

    sigset_t ctrl_c;
    sigemptyset(&ctrl_c);
    sigaddset(&ctrl_c, SIGINT);
    pthread_sigmask(SIG_BLOCK, &ctrl_c, nullptr);
    const std::string reader = "/proc/self/task/" + std::to_string(gettid()) + "/stat";
    std::thread other([&] {
        pty.shown_until("> ");
        wait_for_sleep(reader);
        pthread_sigmask(SIG_UNBLOCK, &ctrl_c, nullptr);
        kill(getpid(), SIGINT);
    });
    CHECK(editor.read("> ", text) == Typed::ctrl_c);
    other.join();
    pthread_sigmask(SIG_UNBLOCK, &ctrl_c, nullptr);
    interrupted = 0;
    pty.type("next\n");
    CHECK(editor.read("> ", text) == Typed::line);
    CHECK(text == "next");
    std::signal(SIGINT, before);
}

#ifdef LINE_EDITOR

namespace {

// Runs `child` in a process of its own, which is a group of its own, as libedit sends a signal once more to
// all of the group. Its exit code is what `child` returns.
template <typename Child>
pid_t start(const Child& child) {
    const pid_t id = fork();
    if (id != 0) return id;
    setpgid(0, 0);
    const rlimit none{};
    setrlimit(RLIMIT_CORE, &none);
    _exit(child());
}

int exit_code(pid_t child) {
    int status = 0;
    REQUIRE(waitpid(child, &status, 0) == child);
    REQUIRE(WIFEXITED(status));
    return WEXITSTATUS(status);
}

}  // namespace

TEST_CASE("line editor: the terminal has its own settings but while a line is read") {
    choose_terminal(true);
    const Pty pty;
    {
        LineEditor editor(pty.streams(), "", 1 << 16);
        CHECK(pty.is_as_at_first());
        std::string text;
        for (int i = 0; i < 2; i++) {
            std::thread keyboard([&] {
                pty.shown_until("> ");
                CHECK_FALSE(pty.has(ECHO));
                CHECK_FALSE(pty.has(ICANON));
                CHECK(pty.has(ISIG));
                pty.type("a\n");
            });
            CHECK(editor.read("> ", text) == Typed::line);
            keyboard.join();
            CHECK(pty.is_as_at_first());
        }
    }
    CHECK(pty.is_as_at_first());
}

TEST_CASE("line editor: with keys, Ctrl-C is heard that came before the wait or meanwhile") {
    choose_terminal(true);
    const Pty pty;
    const pid_t child = start([&] {
        std::signal(SIGINT, SIG_DFL);
        catch_ctrl_c();
        LineEditor editor(pty.streams(), "", 1 << 16);
        std::string text;
        std::raise(SIGINT);
        for (int i = 0; i < 3; i++) {
            if (editor.read("> ", text) != Typed::ctrl_c || !pty.is_as_at_first()) return i;
            interrupted = 0;
        }
        return editor.read("> ", text) == Typed::line && text == "next" ? 7 : 3;
    });
    pty.shown_until("> ");
    for (int i = 0; i < 2; i++) {
        pty.shown_until("> ");
        wait_for_sleep("/proc/" + std::to_string(child) + "/stat");
        kill(child, SIGINT);
    }
    pty.shown_until("> ");
    pty.type("next\n");
    CHECK(exit_code(child) == 7);
}

TEST_CASE("line editor: with keys, Ctrl-C is heard that another thread takes") {
    choose_terminal(true);
    const Pty pty;
    const pid_t child = start([&] {
        std::signal(SIGINT, SIG_DFL);
        catch_ctrl_c();
        sigset_t ctrl_c;
        sigemptyset(&ctrl_c);
        sigaddset(&ctrl_c, SIGINT);
        std::thread([] { pause(); }).detach();  // takes it: begun before the other blocks it
        pthread_sigmask(SIG_BLOCK, &ctrl_c, nullptr);
        LineEditor editor(pty.streams(), "", 1 << 16);
        std::string text;
        return editor.read("> ", text) == Typed::ctrl_c ? 7 : 1;
    });
    pty.shown_until("> ");
    wait_for_sleep("/proc/" + std::to_string(child) + "/stat");
    kill(child, SIGINT);
    CHECK(exit_code(child) == 7);
    CHECK(pty.is_as_at_first());
}

TEST_CASE("line editor: a signal that is ignored leaves the line as it is") {
    choose_terminal(true);
    for (const int signal : {SIGINT, SIGHUP, SIGTERM}) {
        CAPTURE(signal);
        const Pty pty;
        const pid_t child = start([&] {
            std::signal(signal, SIG_IGN);
            catch_ctrl_c();
            LineEditor editor(pty.streams(), "", 1 << 16);
            std::string text;
            return editor.read("> ", text) == Typed::line && text == "typed" ? 7 : 1;
        });
        pty.shown_until("> ");
        pty.type("typ");
        pty.shown_until("typ");
        for (int i = 0; i < 2; i++) {
            wait_for_sleep("/proc/" + std::to_string(child) + "/stat");
            kill(child, signal);
        }
        pty.type("ed\n");
        CHECK(exit_code(child) == 7);
        CHECK(pty.is_as_at_first());
    }
}

TEST_CASE("line editor: a signal that ends the program leaves the terminal to others") {
    choose_terminal(true);
    for (const int signal : {SIGHUP, SIGQUIT, SIGTERM}) {
        CAPTURE(signal);
        const Pty pty;
        const pid_t child = start([&] {
            std::signal(signal, SIG_DFL);
            LineEditor editor(pty.streams(), "", 1 << 16);
            std::string text;
            editor.read("> ", text);
            return 1;
        });
        pty.shown_until("> ");
        CHECK_FALSE(pty.has(ECHO));
        wait_for_sleep("/proc/" + std::to_string(child) + "/stat");
        kill(child, signal);
        int status = 0;
        REQUIRE(waitpid(child, &status, 0) == child);
        REQUIRE(WIFSIGNALED(status));
        CHECK(WTERMSIG(status) == signal);
        CHECK(pty.has(ECHO));
        CHECK(pty.has(ICANON));
    }
}

TEST_CASE("line editor: a program that is stopped leaves the terminal to others, and takes it back") {
    choose_terminal(true);
    const Pty pty;
    const pid_t child = start([&] {
        std::signal(SIGTSTP, SIG_DFL);
        LineEditor editor(pty.streams(), "", 1 << 16);
        std::string text;
        return editor.read("> ", text) == Typed::line && text == "typed" ? 7 : 1;
    });
    pty.shown_until("> ");
    pty.type("typ");
    for (int i = 0; i < 3; i++) {
        pty.shown_until("typ");
        CHECK_FALSE(pty.has(ECHO));
        CHECK_FALSE(pty.has(ICANON));
        wait_for_sleep("/proc/" + std::to_string(child) + "/stat");
        kill(child, SIGTSTP);
        int status = 0;
        REQUIRE(waitpid(child, &status, WUNTRACED) == child);
        REQUIRE(WIFSTOPPED(status));
        CHECK(WSTOPSIG(status) == SIGTSTP);
        CHECK(pty.has(ECHO));
        CHECK(pty.has(ICANON));
        kill(child, SIGCONT);
    }
    pty.shown_until("typ");
    pty.type("ed\n");
    CHECK(exit_code(child) == 7);
    CHECK(pty.is_as_at_first());
}

TEST_CASE("line editor: the history is nobody else's, and files made later are as they would be") {
    choose_terminal(true);
    const Pty pty;
    const fs::path folder = own_folder() / "line_editor";
    const mode_t mask = umask(022);
    {
        LineEditor editor(pty.streams(), folder / "state" / "history", 1 << 16);
        editor.remember("said");
    }
    const mode_t later = umask(mask);
    CHECK(later == 022);
    for (const fs::path& path : {folder, folder / "state"})
        CHECK(fs::status(path).permissions() == fs::perms::owner_all);
    CHECK(fs::status(folder / "state" / "history").permissions() ==
          (fs::perms::owner_read | fs::perms::owner_write));
}

#endif
