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
        return a.c_iflag == b.c_iflag && a.c_oflag == b.c_oflag && a.c_lflag == b.c_lflag;
    }
    bool has(tcflag_t flag) const { return (settings().c_lflag & flag) != 0; }

    std::FILE* stream = nullptr;

  private:
    int keyboard_ = -1, terminal_ = -1;
    termios at_first_{};
};

// With keys, if the program has libedit, or as a terminal without any.
void choose_terminal(bool has_keys) { setenv("TERM", has_keys ? "xterm" : "dumb", 1); }

[[maybe_unused]] const std::string paste_off = "\033[?2004l";

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
        pty.type("\n\x04");
        CHECK(editor.read(". ", text) == Typed::line);
        CHECK(text == "");
        CHECK(editor.read(". ", text) == Typed::end);
    }
}

TEST_CASE("line editor: Ctrl-C is heard that came before the wait, or that another thread takes") {
    void (*const before)(int) = std::signal(SIGINT, SIG_DFL);
    catch_ctrl_c();
    for (const bool has_keys : {false, true}) {
        CAPTURE(has_keys);
        choose_terminal(has_keys);
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
            std::string state;  // that of one who waits comes and stays
            while (state != "S") {
                std::string word;
                std::ifstream in(reader);
                in >> word >> word >> state;
                if (!in) break;
            }
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
    }
    std::signal(SIGINT, before);
}

#ifdef LINE_EDITOR

TEST_CASE("line editor: the terminal shows nothing by itself, from the beginning to the end") {
    choose_terminal(true);
    const Pty pty;
    {
        LineEditor editor(pty.streams(), "", 1 << 16);
        std::string text;
        for (int i = 0; i < 2; i++) {
            CHECK_FALSE(pty.has(ECHO));
            CHECK_FALSE(pty.has(ICANON));
            CHECK(pty.has(ISIG));
            pty.type("a\n");
            CHECK(editor.read("> ", text) == Typed::line);
        }
    }
    CHECK(pty.is_as_at_first());
}

TEST_CASE("line editor: a signal that ends the program leaves the terminal as it was") {
    choose_terminal(true);
    for (const int signal : {SIGINT, SIGHUP, SIGQUIT, SIGTERM, SIGPIPE, SIGABRT, SIGBUS, SIGSEGV}) {
        for (const bool reads : {false, true}) {
            if (reads && signal == SIGINT) continue;  // the first one ends the wait
            CAPTURE(signal);
            CAPTURE(reads);
            const Pty pty;
            const pid_t child = fork();
            if (child == 0) {
                const rlimit none{};
                setrlimit(RLIMIT_CORE, &none);
                std::signal(signal, SIG_DFL);
                LineEditor editor(pty.streams(), "", 1 << 16);
                std::string text;
                if (reads) editor.read("> ", text);
                if (signal == SIGINT) std::raise(signal);  // which is only heard
                std::raise(signal);
                _exit(1);
            }
            if (reads) {
                pty.shown_until("> ");
                CHECK_FALSE(pty.is_as_at_first());
                kill(child, signal);
                CHECK(pty.shown_until(paste_off).ends_with(paste_off));
            }
            int status = 0;
            REQUIRE(waitpid(child, &status, 0) == child);
            REQUIRE(WIFSIGNALED(status));
            CHECK(WTERMSIG(status) == signal);
            CHECK(pty.is_as_at_first());
        }
    }
}

TEST_CASE("line editor: a program that is stopped leaves the terminal as it was, and takes it back") {
    choose_terminal(true);
    for (const bool reads : {false, true}) {
        CAPTURE(reads);
        const Pty pty;
        const pid_t child = fork();
        if (child == 0) {
            setpgid(0, 0);  // a group that a shell looks after
            std::signal(SIGTSTP, SIG_DFL);
            LineEditor editor(pty.streams(), "", 1 << 16);
            std::string text;
            for (int i = 0; i < 2 && !reads; i++) std::raise(SIGTSTP);
            if (!reads) note(pty.stream, "> ");
            editor.read("> ", text);
            _exit(text == "typed" ? 7 : 1);
        }
        int status = 0;
        for (int i = 0; i < 2; i++) {
            if (reads) {
                pty.shown_until("> ");
                kill(child, SIGTSTP);
            }
            REQUIRE(waitpid(child, &status, WUNTRACED) == child);
            REQUIRE(WIFSTOPPED(status));
            CHECK(WSTOPSIG(status) == SIGTSTP);
            CHECK(pty.is_as_at_first());
            kill(child, SIGCONT);
        }
        pty.shown_until("> ");
        CHECK_FALSE(pty.has(ECHO));
        CHECK_FALSE(pty.has(ICANON));
        pty.type("typed\n");
        REQUIRE(waitpid(child, &status, 0) == child);
        CHECK(WIFEXITED(status));
        CHECK(WEXITSTATUS(status) == 7);
    }
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
