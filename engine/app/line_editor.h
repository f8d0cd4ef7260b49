// Reads what a person types: on a terminal with keys to edit the line and a history that is kept, elsewhere a
// line as it comes.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

#include "engine/app/streams.h"

// Whether notes on a terminal may be in colour: https://no-color.org
bool wants_colour(std::FILE* file);

// $RUNQ_HISTORY, else runq/history in $XDG_STATE_HOME or in ~/.local/state; empty: no history is kept.
std::string history_path();

enum class Typed { line, too_long, end, ctrl_c };

// With libedit (make LINE_EDITOR=1, the default) arrow keys, history, Ctrl-R and what else ~/.editrc says; a
// paste, even of several lines, stays one text. Without it, or where standard input or error is no terminal,
// a line ends where the stream has one.
class LineEditor {
  public:
    // `most`: bytes that a text may have; of a longer one no more is kept in memory. `history`: a file of
    // earlier lines, to which new ones are added. One that cannot be read or written is
    // as if it were empty. Its folders are made with its first line.
    LineEditor(const Streams& io, std::string history, size_t most);
    ~LineEditor();

    // Whether a text wants one more line.
    using GoesOn = bool(std::string_view text);
    // Reads a line without its end, and with it those that `goes_on` asks for (null: none), joined by '\n';
    // the end of the input, as Ctrl-D gives it, ends them too. If a terminal is read from, the first stands
    // behind "> ", the others behind ". ".
    Typed read(std::string& text, GoesOn* goes_on);
    // Puts what was read into the history.
    void remember(const std::string& text);

  private:
    struct Keys;  // libedit's, or nothing
    Typed read_line_behind(const char* marker, std::string& line);
    Streams io_;
    bool terminal_;
    std::string history_;
    size_t most_;
    bool is_cut_ = false;         // the last line was longer: its rest comes next, and is dropped
    std::unique_ptr<Keys> keys_;  // null: lines as they come
};
