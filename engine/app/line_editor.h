// Reads what a person types: on a terminal with keys to edit the line and a history that is kept, elsewhere a
// line as it comes.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "engine/app/streams.h"

// $RUNQ_HISTORY, else runq/history in $XDG_STATE_HOME or in ~/.local/state; empty: no history is kept.
std::string history_path();

enum class Typed { line, too_long, end, ctrl_c };

// With libedit (make LINE_EDITOR=1, the default) arrow keys, history, Ctrl-R and what else ~/.editrc says; a
// paste, even of several lines, stays one text. Without it, or where standard input or error is no terminal,
// a line ends where the stream has one. The terminal has other settings only while a line is read. A signal
// that stops or ends the program meanwhile gives the first ones back, but for the mode of pastes, and goes to
// the whole process group, as libedit does it.
class LineEditor {
  public:
    // `most`: bytes that a text may have; of a longer one no more is kept in memory. `history`: a file of
    // earlier lines, to which new ones are added. One that cannot be read or written is
    // as if it were empty. Its folders are made with its first line.
    LineEditor(const Streams& io, std::string history, size_t most);
    ~LineEditor();
    LineEditor(const LineEditor&) = delete;
    LineEditor& operator=(const LineEditor&) = delete;

    // Reads a line without its end. If a terminal is read from, it stands behind the marker.
    Typed read(const char* marker, std::string& line);
    // Puts what was read into the history.
    void remember(const std::string& text);

  private:
    Streams io_;
    bool terminal_;
    std::string history_;
    size_t most_;
    struct Keys;  // libedit, where it is compiled in and the terminal has keys
    std::unique_ptr<Keys> keys_;
};
