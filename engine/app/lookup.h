// Prompt lookup: what may come next, guessed from the text so far (Apoorv Saxena, 2023,
// github.com/apoorvumang/prompt-lookup-decoding).
//
// Where the last few tokens stood before, what followed them then may follow again: in summaries, in edited
// code, in lists. The model runs the guess behind the last token in one pass, which reads the weights once,
// and says what it would have chosen behind each of them. The guess counts as far as it chose the same, which
// generate() in generate.h checks.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

class Lookup {
  public:
    // most: tokens of a guess; 0 guesses nothing.
    explicit Lookup(int most = 0)
        : most_(static_cast<size_t>(most)), width_(std::min<size_t>(most_, first_width)) {}

    // What followed the last tokens of `ids` where they stood before, three of them if they did, or two; up
    // to `room` tokens, and none if they never did. Of several places the last.
    std::vector<int> guess(std::span<const int> ids, size_t room) const {
        const size_t width = std::min(width_, room);
        for (size_t n = 3; width > 0 && n >= 2; n--) {
            if (ids.size() <= n) continue;
            const auto last = ids.last(n), before = ids.first(ids.size() - 1);
            const auto found = std::find_end(before.begin(), before.end(), last.begin(), last.end());
            if (found == before.end()) continue;
            const auto follows = ids.subspan(static_cast<size_t>(found - before.begin()) + n);
            const auto chosen = follows.first(std::min(width, follows.size()));
            return {chosen.begin(), chosen.end()};
        }
        return {};
    }

    // What came of a guess: so many of its tokens were right. Guesses become longer while they are, and short
    // where they are not: a pass over more tokens takes longer.
    void judge(size_t n_right, size_t n_guessed) {
        width_ = n_right == n_guessed ? std::min(2 * width_, most_) : std::max<size_t>(n_right, 1);
    }

  private:
    static constexpr size_t first_width = 2;
    size_t most_, width_;
};
