// Lines that a person types, through libedit.
#include "engine/app/line_editor.h"

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>

#include "engine/os/system.h"

#ifdef LINE_EDITOR
#include <histedit.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <termios.h>

#include <cerrno>
#include <clocale>
#include <csignal>
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

}  // namespace

struct LineEditor::Keys {
    Streams io;
    size_t most, n_keys = 0;  // that a line may have, and that it has
    std::string prompt{};
    termios at_first{};
    EditLine* edit;
    History* earlier = history_init();

    Keys(const Streams& streams, const std::string& history_file, size_t most_keys)
        : io(streams), most(most_keys) {
        // Letters beyond ASCII are UTF-8, also where the environment does not say so.
        if (std::setlocale(LC_CTYPE, "") == nullptr || MB_CUR_MAX == 1) std::setlocale(LC_CTYPE, "C.UTF-8");
        tcgetattr(fileno(io.in), &at_first);
        edit = el_init("runq", io.in, io.err, io.err);
        if (edit == nullptr || earlier == nullptr) throw std::bad_alloc();
        HistEvent event;
        history(earlier, &event, H_SETSIZE, 1000);
        history(earlier, &event, H_SETUNIQUE, 1);
        if (!history_file.empty()) history(earlier, &event, H_LOAD, history_file.c_str());
        el_set(edit, EL_CLIENTDATA, this);
        el_set(edit, EL_SIGNAL, 1);
        el_set(edit, EL_EDITOR, "emacs");
        el_set(edit, EL_HIST, history, earlier);
        el_set(
            edit, EL_PROMPT_ESC, +[](EditLine* e) { return of(e).prompt.data(); }, '\1');
        el_wset(edit, EL_GETCFN, next);
        el_set(edit, EL_ADDFN, "runq-paste", "insert what is pasted", paste);
        el_set(edit, EL_BIND, paste_begins, "runq-paste", nullptr);
        el_set(edit, EL_BIND, "^R", "em-inc-search-prev", nullptr);
        el_source(edit, nullptr);  // ~/.editrc
        struct sigaction action {};
        action.sa_handler = [](int) {};
        sigaction(SIGALRM, &action, nullptr);
        tcsetattr(fileno(io.in), TCSADRAIN, &at_first);  // el_init() has changed them
    }
    ~Keys() {
        el_end(edit);
        history_end(earlier);
    }
    Keys(const Keys&) = delete;
    Keys& operator=(const Keys&) = delete;

    static Keys& of(EditLine* edit) {
        void* keys = nullptr;
        el_get(edit, EL_CLIENTDATA, &keys);
        return *static_cast<Keys*>(keys);
    }

    // From now on a SIGALRM comes as often; 0: none.
    static void set_timer(suseconds_t microseconds) {
        const itimerval timer{{0, microseconds}, {0, microseconds}};
        setitimer(ITIMER_REAL, &timer, nullptr);
    }

    // The next character of the terminal: 1, 0 at its end, -1 when Ctrl-C comes. libedit's own function reads
    // it: no other one can draw the line again and set libedit's handlers again after a signal. One may come
    // just before it reads: so a timer sends another.
    int get(wchar_t* key) {
        while (!interrupted) {
            el_wset(edit, EL_GETCFN, EL_BUILTIN_GETCFN);
            set_timer(200000);
            const int n = el_wgetc(edit, key), reason = errno;
            set_timer(0);
            el_wset(edit, EL_GETCFN, next);
            if (n == 1) n_keys++;
            if (n >= 0 || reason != EINTR) return n;
        }
        return -1;
    }

    // The same for a line: of one that is too long the rest is read and forgotten.
    static int next(EditLine* edit, wchar_t* key) {
        Keys& keys = of(edit);
        int n = keys.get(key);
        while (n == 1 && keys.n_keys > keys.most && *key != L'\r' && *key != L'\n') n = keys.get(key);
        return n;
    }

    // Reads up to the end of a paste and inserts it: line breaks are part of the text, and nothing in it is a
    // key.
    static unsigned char paste(EditLine* edit, int) {
        Keys& keys = of(edit);
        std::wstring text, kept;
        for (wchar_t key = 0; !text.ends_with(paste_ends); text.push_back(key)) {
            if (keys.get(&key) != 1) return CC_EOF;
            if (text.size() > keys.most) text.erase(0, text.size() - paste_ends.size());
        }
        if (keys.n_keys > keys.most) return CC_NEWLINE;
        text.resize(text.size() - paste_ends.size());
        for (size_t i = 0; i < text.size(); i++) {
            if (text.compare(i, 2, L"\r\n") == 0) continue;        // the '\n' comes next
            const wchar_t c = text[i] == L'\r' ? L'\n' : text[i];  // as terminals send a line break
            if (c >= L' ' || c == L'\n' || c == L'\t') kept.push_back(c);
        }
        while (kept.ends_with(L'\n')) kept.pop_back();
        return !kept.empty() && el_winsertstr(edit, kept.c_str()) != 0 ? CC_ERROR : CC_REFRESH;
    }

    // As LineEditor::read().
    Typed read(const std::string& marker, std::string& line) {
        // What is between two \1 takes no room on the screen. libedit drops it at the end of a prompt.
        const bool bold = environment("NO_COLOR").empty();  // https://no-color.org
        prompt = std::string("\1") + paste_on + (bold ? "\033[1m" : "") + "\1" + marker;
        if (bold) prompt.insert(prompt.size() - 1, "\1\033[0m\1");  // before the marker's blank
        n_keys = 0;
        int n = 0;
        el_set(edit, EL_PREP_TERM, 1);  // before the marker is seen: behind it Ctrl-D is a key
        const char* typed = el_gets(edit, &n);
        tcsetattr(fileno(io.in), TCSADRAIN, &at_first);
        note(io.err, paste_off);
        if (typed == nullptr || n <= 0 || n_keys > most) {
            note(io.err, "\n");  // what is said next does not stand behind the marker
            return interrupted ? Typed::ctrl_c : n_keys > most ? Typed::too_long : Typed::end;
        }
        line.assign(typed, size_t(n));
        if (line.ends_with('\n')) line.pop_back();
        return Typed::line;
    }
};

void LineEditor::remember(const std::string& text) {
    if (!keys_ || history_.empty()) return;
    HistEvent event;
    history(keys_->earlier, &event, H_ENTER, text.c_str());
    const mode_t mask = umask(077);  // what is said is nobody else's
    std::error_code error;
    std::filesystem::create_directories(std::filesystem::path(history_).parent_path(), error);
    history(keys_->earlier, &event, H_SAVE, history_.c_str());
    umask(mask);
}

#else

struct LineEditor::Keys {};
void LineEditor::remember(const std::string&) {}

#endif

LineEditor::LineEditor(const Streams& streams, std::string history_file, size_t most)
    : io_(streams), terminal_(is_terminal(streams.in)), history_(std::move(history_file)), most_(most) {
#ifdef LINE_EDITOR
    const std::string kind = environment("TERM");
    if (terminal_ && is_terminal(io_.err) && !kind.empty() && kind != "dumb")
        keys_ = std::make_unique<Keys>(io_, history_, most);
#endif
}

LineEditor::~LineEditor() = default;

Typed LineEditor::read(const char* marker, std::string& line) {
#ifdef LINE_EDITOR
    if (keys_) return keys_->read(marker, line);
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
