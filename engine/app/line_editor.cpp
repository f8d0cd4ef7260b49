// Lines that a person types, through libedit.
#include "engine/app/line_editor.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include "engine/os/system.h"

#ifdef LINE_EDITOR
#include <histedit.h>
#include <sys/stat.h>
#include <termios.h>
#include <unistd.h>

#include <clocale>
#include <csignal>
#include <cstring>
#include <cwchar>
#include <iterator>
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
constexpr const char* clear_line = "\r\033[J";
constexpr const char* paste_begins = "\033[200~";
constexpr std::wstring_view paste_ends = L"\033[201~";

// The terminal while there is an editor. It shows nothing by itself: between two lines and during an answer
// what is typed waits for the next marker, and stands behind it then. Before a signal stops or ends the
// program, the terminal is as it was at first.
class Terminal {
  public:
    // Another size; the program goes on after Ctrl-Z. Then what ends a program, and Ctrl-Z; Ctrl-C the second
    // time.
    static constexpr int signals[] = {SIGWINCH, SIGCONT, SIGINT, SIGHUP,  SIGQUIT, SIGTERM,
                                      SIGPIPE,  SIGABRT, SIGBUS, SIGSEGV, SIGTSTP};

    static inline volatile std::sig_atomic_t changed = 0;     // what the editor knows of the terminal is old
    static inline volatile std::sig_atomic_t is_reading = 0;  // the editor has it as it needs it

    // Before the editor changes anything.
    static void open(const Streams& io) {
        in_ = fileno(io.in), err_ = fileno(io.err);
        tcgetattr(in_, &at_first_);
    }
    // The editor has put the terminal into the state that it has between two lines.
    static void start() {
        tcgetattr(in_, &between_);
        for (size_t i = 0; i < std::size(signals); i++) {
            struct sigaction action {};
            sigaction(signals[i], nullptr, &before_[i]);
            if (before_[i].sa_handler == SIG_IGN) continue;
            action.sa_sigaction = handle;
            action.sa_flags = SA_SIGINFO | SA_RESTART;
            sigaction(signals[i], &action, nullptr);
        }
    }
    static void close() {
        for (size_t i = 0; i < std::size(signals); i++) sigaction(signals[i], &before_[i], nullptr);
        set(at_first_);
    }
    // After a line.
    static void hide() { set(between_); }

  private:
    // A handler calls what is below.

    // A program in the background has no say in what its terminal does.
    static void set(const termios& state) {
        const pid_t owner = tcgetpgrp(in_);
        if (owner < 0 || owner == getpgrp()) tcsetattr(in_, TCSANOW, &state);
    }

    static void change() {
        const int reason = errno;
        changed = 1;
        if (!is_reading) set(between_);
        errno = reason;
    }

    static void handle(int signal, siginfo_t* info, void*) {
        if (signal == SIGWINCH || signal == SIGCONT) return change();
        if (signal == SIGINT && !interrupted) {
            interrupted = 1;
            return;
        }
        const int reason = errno;
        if (is_reading) {
            [[maybe_unused]] const ssize_t n = write(err_, paste_off, std::strlen(paste_off));
        }
        set(at_first_);
        const size_t i = size_t(std::find(std::begin(signals), std::end(signals), signal) - signals);
        struct sigaction action = before_[i], own{};
        if (signal == SIGINT) action = {};  // before, it was what hears the first Ctrl-C
        sigaction(signal, &action, &own);
        // A fault happens again, to whom it would have happened without this.
        if (info->si_code <= 0 || (signal != SIGBUS && signal != SIGSEGV)) raise(signal);
        if (signal == SIGTSTP) {
            sigset_t stop;
            sigemptyset(&stop);
            sigaddset(&stop, SIGTSTP);
            pthread_sigmask(SIG_UNBLOCK, &stop, nullptr);  // stands still here
            sigaction(signal, &own, nullptr);
            change();  // also where nothing has stopped it
        }
        errno = reason;
    }

    static inline int in_ = -1, err_ = -1;
    static inline termios at_first_{}, between_{};
    static inline struct sigaction before_[std::size(signals)];
};

}  // namespace

struct LineEditor::Keys {
    EditLine* edit = nullptr;
    History* history = nullptr;
    std::FILE* err;
    std::string marker;
    size_t most = 0, n_keys = 0;  // that a line may have, and that it has
    bool too_long = false;

    Keys(const Streams& io, const std::string& file) : err(io.err) {
        // Letters beyond ASCII are UTF-8, also where the environment does not say so.
        if (std::setlocale(LC_CTYPE, "") == nullptr || MB_CUR_MAX == 1) std::setlocale(LC_CTYPE, "C.UTF-8");
        Terminal::open(io);
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
        el_set(edit, EL_GETCFN, next_key);
        el_set(edit, EL_ADDFN, "runq-paste", "insert what is pasted", paste);
        el_set(edit, EL_BIND, paste_begins, "runq-paste", nullptr);
        el_set(edit, EL_BIND, "^R", "em-inc-search-prev", nullptr);
        el_source(edit, nullptr);  // ~/.editrc
        // Between two lines. With icanon, Ctrl-D would be no key there, and a long line would have an end.
        el_set(edit, EL_SETTY, "-x", "-echo", "-icanon", nullptr);
        Terminal::start();
    }
    ~Keys() {
        if (edit != nullptr) el_end(edit);
        if (history != nullptr) history_end(history);
        if (edit != nullptr && history != nullptr) Terminal::close();
    }
    Keys(const Keys&) = delete;
    Keys& operator=(const Keys&) = delete;

    static Keys& of(EditLine* edit) {
        void* keys = nullptr;
        el_get(edit, EL_CLIENTDATA, &keys);
        return *static_cast<Keys*>(keys);
    }
    static char* prompt(EditLine* edit) { return of(edit).marker.data(); }

    // The next character of the terminal: 1, 0 at its end, -1 when Ctrl-C comes. libedit's own goes on
    // waiting.
    static int get_key(EditLine* edit, wchar_t* key) {
        std::FILE* in = stdin;
        el_get(edit, EL_GETFP, 0, &in);
        std::mbstate_t state{};
        for (int n_bytes = 0;;) {
            if (std::exchange(Terminal::changed, 0)) {
                el_set(edit, EL_PREP_TERM, 0);  // otherwise 1 is what it has been
                el_set(edit, EL_PREP_TERM, 1);
                note(of(edit).err, paste_on);
                el_resize(edit);
                note(of(edit).err, clear_line);  // or the line would be there twice
                el_set(edit, EL_REFRESH);
            }
            if (interrupted) return -1;
            if (!wait_for_input(in)) continue;
            char byte = 0;
            const ssize_t n = ::read(fileno(in), &byte, 1);
            if (n < 0 && errno == EINTR) continue;
            if (n <= 0) return int(n);
            const size_t used = std::mbrtowc(key, &byte, 1, &state);
            if (used == size_t(-2) && ++n_bytes < 6) continue;  // the character has more bytes
            if (used == size_t(-1) || used == size_t(-2)) *key = L'\ufffd';
            if (used == 0) *key = L'\0';
            return 1;
        }
    }

    // The same for a line: of one that is too long the rest is read and forgotten.
    static int next_key(EditLine* edit, wchar_t* key) {
        Keys& keys = of(edit);
        int n = get_key(edit, key);
        if (n != 1 || ++keys.n_keys <= keys.most) return n;
        keys.too_long = true;
        while (n == 1 && *key != L'\r' && *key != L'\n') n = get_key(edit, key);
        return n;
    }

    // Reads up to the end of a paste and inserts it: line breaks are part of the text, and nothing in it is a
    // key.
    static unsigned char paste(EditLine* edit, int) {
        Keys& keys = of(edit);
        std::wstring text;
        wchar_t key = 0;
        while (!text.ends_with(paste_ends)) {
            if (get_key(edit, &key) != 1) return CC_EOF;
            text.push_back(key);
            if (++keys.n_keys <= keys.most + paste_ends.size()) continue;
            keys.too_long = true;
            text.erase(0, text.size() - std::min(text.size(), paste_ends.size()));
        }
        if (keys.too_long) return CC_NEWLINE;
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
void LineEditor::remember(const std::string&) {}

#endif

LineEditor::LineEditor(const Streams& io, std::string history, size_t most)
    : io_(io), terminal_(is_terminal(io.in)), history_(std::move(history)), most_(most) {
#ifdef LINE_EDITOR
    const std::string kind = environment("TERM");
    if (!terminal_ || !is_terminal(io.err) || kind.empty() || kind == "dumb") return;
    keys_ = std::make_unique<Keys>(io, history_);
    if (keys_->edit == nullptr || keys_->history == nullptr) keys_ = nullptr;
#endif
}
LineEditor::~LineEditor() = default;

Typed LineEditor::read(const char* marker, std::string& line) {
#ifdef LINE_EDITOR
    if (keys_ != nullptr) {
        const std::string mark = "\1";                   // around what takes no room on the screen
        keys_->marker = environment("NO_COLOR").empty()  // https://no-color.org
                            ? mark + "\033[1m" + mark + marker + mark + "\033[0m" + mark
                            : marker;
        Terminal::is_reading = 1;
        if (std::exchange(Terminal::changed, 0)) el_resize(keys_->edit);
        note(io_.err, paste_on);
        keys_->most = most_, keys_->n_keys = 0, keys_->too_long = false;
        int n = 0;
        const char* typed = el_gets(keys_->edit, &n);
        note(io_.err, paste_off);
        Terminal::is_reading = 0;
        Terminal::hide();
        if (keys_->too_long && !interrupted) {
            note(io_.err, "\n");  // what is said of it does not stand behind the marker
            return Typed::too_long;
        }
        if (typed == nullptr || n <= 0) {
            note(io_.err, "\n");
            return interrupted ? Typed::ctrl_c : Typed::end;
        }
        line.assign(typed, size_t(n));
        if (line.ends_with('\n')) line.pop_back();
        return Typed::line;
    }
#endif
    for (int c; is_cut_ && !interrupted && (c = read_byte(io_.in)) != EOF;) is_cut_ = c != '\n';
    if (terminal_) note(io_.err, marker);
    while (terminal_ && !interrupted && !wait_for_input(io_.in)) {
    }
    if (!interrupted) {
        line.clear();
        int c = 0;
        while (line.size() <= most_ && (c = read_byte(io_.in)) != EOF && c != '\n') line.push_back(char(c));
        is_cut_ = line.size() > most_;
        if (is_cut_) return Typed::too_long;
        if (line.ends_with('\r')) line.pop_back();
        if (c == '\n' || (!line.empty() && std::ferror(io_.in) == 0)) return Typed::line;
    }
    if (terminal_) note(io_.err, "\n");  // what is printed next does not stand behind the marker
    std::clearerr(io_.in);
    return interrupted ? Typed::ctrl_c : Typed::end;
}
