// Lines that a person types, through libedit.
#include "engine/app/line_editor.h"

#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>

#include "engine/os/system.h"

#ifdef LINE_EDITOR
#include <histedit.h>
#include <sys/stat.h>
#include <termios.h>
#include <unistd.h>

#include <cerrno>
#include <clocale>
#include <csignal>
#include <cstring>
#include <cwchar>
#include <filesystem>
#include <new>
#include <string_view>
#include <system_error>
#endif

std::string history_path() {
    if (const char* path = std::getenv("RUNQ_HISTORY"); path != nullptr) return path;
    if (const std::string state = environment("XDG_STATE_HOME"); !state.empty())
        return state + "/runq/history";
    const std::string home = home_folder();
    return home.empty() ? "" : home + "/.local/state/runq/history";
}

#ifdef LINE_EDITOR

namespace {

// A terminal puts these around what is pasted, once it is asked to (xterm's "bracketed paste mode").
constexpr const char *paste_on = "\033[?2004h", *paste_off = "\033[?2004l";
constexpr const char* paste_begins = "\033[200~";
constexpr std::wstring_view paste_ends = L"\033[201~";

// ----------------------------------------------------------------------------
// The terminal while there is an editor. It echoes nothing itself: what is typed between two lines or during
// an answer waits, and appears behind the next marker. Before a signal stops or ends the program, the
// terminal gets its first settings back. The handler only makes calls that are async-signal-safe (man 7
// signal-safety).

// A new size, and the program going on after Ctrl-Z; then what ends a program (the second Ctrl-C does), and
// Ctrl-Z.
constexpr int signals[] = {SIGWINCH, SIGCONT, SIGINT, SIGHUP,  SIGQUIT, SIGTERM,
                           SIGPIPE,  SIGABRT, SIGBUS, SIGSEGV, SIGTSTP};

volatile std::sig_atomic_t has_changed = 0;  // what the editor knows of the terminal is out of date
volatile std::sig_atomic_t is_reading = 0;   // the terminal has the editor's settings
int terminal_in, terminal_err;
termios at_first{}, between_lines{};
struct sigaction before[NSIG];  // what each signal did

// A program in the background has no say in what its terminal does.
void set_terminal(const termios& state) {
    const pid_t owner = tcgetpgrp(terminal_in);
    if (owner < 0 || owner == getpgrp()) tcsetattr(terminal_in, TCSANOW, &state);
}

void take_back() {
    has_changed = 1;
    if (!is_reading) set_terminal(between_lines);
}

void handle(int signal, siginfo_t* info, void*) {
    const int reason = errno;
    if (signal == SIGWINCH || signal == SIGCONT) {
        take_back();
    } else if (signal == SIGINT && !interrupted) {
        interrupted = 1;
    } else {
        if (is_reading) {
            [[maybe_unused]] const ssize_t n = write(terminal_err, paste_off, std::strlen(paste_off));
        }
        set_terminal(at_first);
        struct sigaction own {};
        sigaction(signal, &before[signal], &own);
        // A fault happens again, to whom it would have happened without this.
        if (info->si_code <= 0 || (signal != SIGBUS && signal != SIGSEGV)) std::raise(signal);
        if (signal == SIGTSTP) {  // the program goes on, or nothing has stopped it
            sigaction(signal, &own, nullptr);
            take_back();
        }
    }
    errno = reason;
}

void catch_signals() {
    for (const int signal : signals) {
        struct sigaction action {};
        sigaction(signal, nullptr, &before[signal]);
        if (before[signal].sa_handler == SIG_IGN) continue;
        action.sa_sigaction = handle;
        action.sa_flags = SA_SIGINFO | SA_RESTART | SA_NODEFER;  // it raises the signal that it handles
        sigaction(signal, &action, nullptr);
    }
}

// ----------------------------------------------------------------------------
// libedit's editor: what it calls, and what calls it

Streams io;
EditLine* edit;
History* earlier;
char* prompt;
size_t most_keys, n_keys;  // that a line may have, and that it has

// The next character of the terminal: 1, 0 at its end, -1 when Ctrl-C comes. libedit's own function goes on
// waiting.
int get_key(wchar_t* key) {
    std::mbstate_t state{};
    while (!interrupted) {
        if (std::exchange(has_changed, 0)) {
            el_set(edit, EL_PREP_TERM, 0);  // otherwise 1 is what it has been
            el_set(edit, EL_PREP_TERM, 1);
            note(io.err, paste_on);
            el_resize(edit);
            note(io.err, "\r\033[J");  // clears the line, or it would be there twice
            el_set(edit, EL_REFRESH);
        }
        if (!wait_for_input(io.in)) continue;
        char byte = 0;
        const ssize_t n = read(terminal_in, &byte, 1);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return int(n);
        const size_t used = std::mbrtowc(key, &byte, 1, &state);
        if (used == size_t(-2)) continue;  // the character has more bytes
        if (used == size_t(-1)) *key = L'\ufffd';
        n_keys++;
        return 1;
    }
    return -1;
}

// The same for a line: of one that is too long the rest is read and forgotten.
int next_key(EditLine*, wchar_t* key) {
    int n = get_key(key);
    while (n == 1 && n_keys > most_keys && *key != L'\r' && *key != L'\n') n = get_key(key);
    return n;
}

// Reads up to the end of a paste and inserts it: line breaks are part of the text, and nothing in it is a
// key.
unsigned char paste(EditLine*, int) {
    std::wstring text, kept;
    for (wchar_t key = 0; !text.ends_with(paste_ends); text.push_back(key)) {
        if (get_key(&key) != 1) return CC_EOF;
        if (text.size() > most_keys) text.erase(0, text.size() - paste_ends.size());
    }
    if (n_keys > most_keys) return CC_NEWLINE;
    text.resize(text.size() - paste_ends.size());
    for (size_t i = 0; i < text.size(); i++) {
        if (text.compare(i, 2, L"\r\n") == 0) continue;        // the '\n' comes next
        const wchar_t c = text[i] == L'\r' ? L'\n' : text[i];  // as terminals send a line break
        if (c >= L' ' || c == L'\n' || c == L'\t') kept.push_back(c);
    }
    while (kept.ends_with(L'\n')) kept.pop_back();
    return !kept.empty() && el_winsertstr(edit, kept.c_str()) != 0 ? CC_ERROR : CC_REFRESH;
}

void open_editor(const std::string& history_file) {
    // Letters beyond ASCII are UTF-8, also where the environment does not say so.
    if (std::setlocale(LC_CTYPE, "") == nullptr || MB_CUR_MAX == 1) std::setlocale(LC_CTYPE, "C.UTF-8");
    terminal_in = fileno(io.in), terminal_err = fileno(io.err);
    tcgetattr(terminal_in, &at_first);
    edit = el_init("runq", io.in, io.err, io.err);
    earlier = history_init();
    if (edit == nullptr || earlier == nullptr) throw std::bad_alloc();
    HistEvent event;
    history(earlier, &event, H_SETSIZE, 1000);
    history(earlier, &event, H_SETUNIQUE, 1);
    if (!history_file.empty()) history(earlier, &event, H_LOAD, history_file.c_str());
    el_set(edit, EL_EDITOR, "emacs");
    el_set(edit, EL_HIST, history, earlier);
    el_set(
        edit, EL_PROMPT_ESC, +[](EditLine*) { return prompt; }, '\1');
    el_set(edit, EL_GETCFN, next_key);
    el_set(edit, EL_ADDFN, "runq-paste", "insert what is pasted", paste);
    el_set(edit, EL_BIND, paste_begins, "runq-paste", nullptr);
    el_set(edit, EL_BIND, "^R", "em-inc-search-prev", nullptr);
    el_source(edit, nullptr);  // ~/.editrc
    // Between two lines. With icanon, Ctrl-D would be no key there, and a long line would have an end.
    el_set(edit, EL_SETTY, "-x", "-echo", "-icanon", nullptr);
    tcgetattr(terminal_in, &between_lines);
    catch_signals();
}

// As LineEditor::read().
Typed edit_line(const char* marker, std::string& line) {
    std::string shown = marker;
    if (environment("NO_COLOR").empty())  // https://no-color.org
        shown = "\1\033[1m\1" + shown + "\1\033[0m\1";
    prompt = shown.data();
    n_keys = 0;
    is_reading = 1;
    if (std::exchange(has_changed, 0)) el_resize(edit);
    note(io.err, paste_on);
    int n = 0;
    const char* typed = el_gets(edit, &n);
    note(io.err, paste_off);
    is_reading = 0;
    set_terminal(between_lines);
    if (typed == nullptr || n <= 0 || n_keys > most_keys) {
        note(io.err, "\n");  // what is said next does not stand behind the marker
        return interrupted ? Typed::ctrl_c : n_keys > most_keys ? Typed::too_long : Typed::end;
    }
    line.assign(typed, size_t(n));
    if (line.ends_with('\n')) line.pop_back();
    return Typed::line;
}

}  // namespace

LineEditor::~LineEditor() {
    if (!has_keys_) return;
    el_end(edit);
    history_end(earlier);
    for (const int signal : signals) sigaction(signal, &before[signal], nullptr);
    set_terminal(at_first);
}

void LineEditor::remember(const std::string& text) {
    if (!has_keys_ || history_.empty()) return;
    HistEvent event;
    history(earlier, &event, H_ENTER, text.c_str());
    const mode_t mask = umask(077);  // what is said is nobody else's
    std::error_code error;
    std::filesystem::create_directories(std::filesystem::path(history_).parent_path(), error);
    history(earlier, &event, H_SAVE, history_.c_str());
    umask(mask);
}

#else

LineEditor::~LineEditor() = default;
void LineEditor::remember(const std::string&) {}

#endif

LineEditor::LineEditor(const Streams& streams, std::string history_file, size_t most)
    : io_(streams), terminal_(is_terminal(streams.in)), history_(std::move(history_file)), most_(most) {
#ifdef LINE_EDITOR
    const std::string kind = environment("TERM");
    has_keys_ = terminal_ && is_terminal(io_.err) && !kind.empty() && kind != "dumb";
    io = io_, most_keys = most;
    if (has_keys_) open_editor(history_);
#endif
}

Typed LineEditor::read(const char* marker, std::string& line) {
#ifdef LINE_EDITOR
    if (has_keys_) return edit_line(marker, line);
#endif
    if (terminal_) note(io_.err, marker);
    while (terminal_ && !interrupted && !wait_for_input(io_.in)) {
    }
    line.clear();
    int c = EOF;
    while (!interrupted && (c = read_byte(io_.in)) != EOF && c != '\n')
        if (line.size() <= most_) line.push_back(char(c));
    if (c == '\n' || (c == EOF && !line.empty() && std::ferror(io_.in) == 0)) {
        if (line.size() > most_) return Typed::too_long;
        if (line.ends_with('\r')) line.pop_back();
        return Typed::line;
    }
    if (terminal_) note(io_.err, "\n");  // what is printed next does not stand behind the marker
    std::clearerr(io_.in);
    return interrupted ? Typed::ctrl_c : Typed::end;
}
