// Lines that a person types, through libedit.
#include "common/app/line_editor.h"

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <system_error>
#include <utility>

#include "common/os/signals.h"
#include "common/os/system.h"

#ifdef LINE_EDITOR
#include <histedit.h>
#include <sys/stat.h>
#include <unistd.h>

#include <clocale>
#include <csignal>
#include <cwchar>
#endif

namespace {

bool is_dumb() { return environment("TERM").empty() || environment("TERM") == "dumb"; }

}  // namespace

bool wants_colour(std::FILE* file) {
    return is_terminal(file) && !is_dumb() && environment("NO_COLOR").empty();
}

std::string history_path() {
    if (const char* path = std::getenv("RUNQ_HISTORY"); path != nullptr) return path;
    if (const std::string state = environment("XDG_STATE_HOME"); !state.empty())
        return state + "/runq/history";
    const std::string home = environment("HOME");
    return home.empty() ? "" : home + "/.local/state/runq/history";
}

#ifdef LINE_EDITOR

namespace {

volatile std::sig_atomic_t terminal_changed = 0;  // another size, or the program goes on after Ctrl-Z

// While a line is read: a signal that changes the terminal ends a wait for keys.
class TerminalSignals {
  public:
    TerminalSignals() {
        struct sigaction action {};
        action.sa_handler = [](int) { terminal_changed = 1; };
        sigaction(SIGWINCH, &action, &window_);
        sigaction(SIGCONT, &action, &go_on_);
    }
    ~TerminalSignals() {
        sigaction(SIGWINCH, &window_, nullptr);
        sigaction(SIGCONT, &go_on_, nullptr);
    }

  private:
    struct sigaction window_ {};
    struct sigaction go_on_ {};
};

// A terminal puts these around what is pasted, once it is asked to (xterm's "bracketed paste mode").
constexpr const char *paste_on = "\033[?2004h", *paste_off = "\033[?2004l";
constexpr const char* paste_begins = "\033[200~";
constexpr std::wstring_view paste_ends = L"\033[201~";

}  // namespace

struct LineEditor::Keys {
    EditLine* edit = nullptr;
    History* history = nullptr;
    std::string marker;

    Keys(const Streams& io, const std::string& file) {
        // Letters beyond ASCII are UTF-8, also where the environment does not say so.
        if (std::setlocale(LC_CTYPE, "") == nullptr || MB_CUR_MAX == 1) std::setlocale(LC_CTYPE, "C.UTF-8");
        edit = el_init("runq", io.in, io.err, io.err);
        history = history_init();
        if (edit == nullptr || history == nullptr) return;
        HistEvent event;
        ::history(history, &event, H_SETSIZE, 1000);
        ::history(history, &event, H_SETUNIQUE, 1);
        if (!file.empty()) ::history(history, &event, H_LOAD, file.c_str());
        el_set(edit, EL_CLIENTDATA, this);
        el_set(edit, EL_EDITOR, "emacs");
        el_set(edit, EL_HIST, ::history, history);
        el_set(edit, EL_PROMPT_ESC, prompt, '\1');
        el_set(edit, EL_GETCFN, get_key);
        el_set(edit, EL_ADDFN, "runq-paste", "insert what is pasted", paste);
        el_set(edit, EL_BIND, paste_begins, "runq-paste", nullptr);
        el_set(edit, EL_BIND, "^R", "em-inc-search-prev", nullptr);
        el_source(edit, nullptr);  // ~/.editrc
    }
    ~Keys() {
        if (edit != nullptr) el_end(edit);
        if (history != nullptr) history_end(history);
    }
    Keys(const Keys&) = delete;
    Keys& operator=(const Keys&) = delete;

    // Whether the terminal itself shows what is typed. libedit lets it do so between two lines; what comes in
    // that moment would be on the screen twice, since it stands behind the next marker too.
    void terminal_echoes(bool on) { el_set(edit, EL_SETTY, "-x", on ? "+echo" : "-echo", nullptr); }

    static Keys& of(EditLine* edit) {
        void* keys = nullptr;
        el_get(edit, EL_CLIENTDATA, &keys);
        return *static_cast<Keys*>(keys);
    }
    static char* prompt(EditLine* edit) { return of(edit).marker.data(); }

    // The next character of the terminal: 1, 0 at its end, -1 when Ctrl-C comes. libedit's own goes on
    // waiting.
    static int get_key(EditLine* edit, wchar_t* key) {
        int fd = STDIN_FILENO;
        if (std::FILE* in = nullptr; el_get(edit, EL_GETFP, 0, &in) == 0) fd = fileno(in);
        std::mbstate_t state{};
        for (int n_bytes = 0;;) {
            char byte = 0;
            const ssize_t n = ::read(fd, &byte, 1);
            if (n < 0 && errno == EINTR && !interrupted) {
                if (!std::exchange(terminal_changed, 0)) continue;
                el_set(edit, EL_PREP_TERM, 1);
                el_resize(edit);
                el_set(edit, EL_REFRESH);
                continue;
            }
            if (n <= 0) return int(n);
            const size_t used = std::mbrtowc(key, &byte, 1, &state);
            if (used == size_t(-2) && ++n_bytes < 6) continue;  // the character has more bytes
            if (used == size_t(-1) || used == size_t(-2)) *key = L'\ufffd';
            if (used == 0) *key = L'\0';
            return 1;
        }
    }

    // Reads up to the end of a paste and inserts it: line breaks are part of the text, and nothing in it is a
    // key.
    static unsigned char paste(EditLine* edit, int) {
        std::wstring text;
        wchar_t key = 0;
        while (!text.ends_with(paste_ends)) {
            if (get_key(edit, &key) != 1) return CC_EOF;
            text.push_back(key);
        }
        text.resize(text.size() - paste_ends.size());
        std::wstring kept;
        for (size_t i = 0; i < text.size(); i++) {
            if (text[i] == L'\r') {  // as terminals send a line break
                kept.push_back(L'\n');
                if (i + 1 < text.size() && text[i + 1] == L'\n') i++;
            } else if (text[i] >= L' ' || text[i] == L'\n' || text[i] == L'\t') {
                kept.push_back(text[i]);
            }
        }
        while (kept.ends_with(L'\n')) kept.pop_back();
        return !kept.empty() && el_winsertstr(edit, kept.c_str()) != 0 ? CC_ERROR : CC_REFRESH;
    }
};

LineEditor::LineEditor(const Streams& io, std::string history)
    : io_(io), terminal_(is_terminal(io.in)), history_(std::move(history)) {
    if (!terminal_ || !is_terminal(io.err) || is_dumb()) return;
    keys_ = std::make_unique<Keys>(io, history_);
    if (keys_->edit == nullptr || keys_->history == nullptr) keys_ = nullptr;
}

void LineEditor::remember(const std::string& text) {
    if (keys_ == nullptr || history_.empty()) return;
    HistEvent event;
    ::history(keys_->history, &event, H_ENTER, text.c_str());
    const mode_t before = umask(077);  // what is said is nobody else's
    std::error_code error;
    std::filesystem::create_directories(std::filesystem::path(history_).parent_path(), error);
    ::history(keys_->history, &event, H_SAVE, history_.c_str());
    umask(before);
}

#else

struct LineEditor::Keys {};

LineEditor::LineEditor(const Streams& io, std::string history)
    : io_(io), terminal_(is_terminal(io.in)), history_(std::move(history)) {}

void LineEditor::remember(const std::string&) {}

#endif

LineEditor::~LineEditor() = default;

Typed LineEditor::read(std::string& text, GoesOn* goes_on) {
#ifdef LINE_EDITOR
    if (keys_ != nullptr) keys_->terminal_echoes(false);
#endif
    Typed typed = read_line_behind("> ", text);
    while (typed == Typed::line && goes_on != nullptr && goes_on(text)) {
        std::string line;
        typed = read_line_behind(". ", line);
        text += '\n' + line;
    }
#ifdef LINE_EDITOR
    if (keys_ != nullptr) keys_->terminal_echoes(true);
#endif
    return typed;
}

Typed LineEditor::read_line_behind(const char* marker, std::string& line) {
#ifdef LINE_EDITOR
    if (keys_ != nullptr) {
        const char* mark = "\1";  // around what takes no room on the screen
        keys_->marker = wants_colour(io_.err)
                            ? std::string(mark) + "\033[1m" + mark + marker + mark + "\033[0m" + mark
                            : marker;
        const TerminalSignals signals;
        note(io_.err, paste_on);
        int n = 0;
        const char* typed = el_gets(keys_->edit, &n);
        note(io_.err, paste_off);
        if (typed == nullptr || n <= 0) {
            note(io_.err, "\n");
            return interrupted ? Typed::ctrl_c : Typed::end;
        }
        line.assign(typed, size_t(n));
        if (line.ends_with('\n')) line.pop_back();
        return Typed::line;
    }
#endif
    if (terminal_) note(io_.err, marker);
    if (read_line(io_.in, line)) return Typed::line;
    if (terminal_) note(io_.err, "\n");  // what is printed next does not stand behind the marker
    std::clearerr(io_.in);
    return interrupted ? Typed::ctrl_c : Typed::end;
}
