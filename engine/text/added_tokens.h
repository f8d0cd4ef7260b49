// Finds added tokens, such as <|im_end|>, in a text: at every place the longest. Part of tokenizer.h.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

struct AddedToken {
    enum Flag : uint32_t { special = 1, normalized = 2, lstrip = 4, rstrip = 8, single_word = 16 };
    int id = 0;
    uint32_t flags = 0;
    size_t size = 0;  // bytes of its text
};

// The automaton of Aho and Corasick ("Efficient string matching", 1975), which reads a text once, whatever is
// looked for. Here it reads backwards: after s[i..] its state is the longest start of s[i..] that some token
// ends with, and the longest token at i is that whole state or the end of a shorter one.
class AddedTokens {
  public:
    // Takes the place of all tokens so far. Texts are not empty; of tokens with the same text the first
    // counts.
    void build(std::vector<std::pair<AddedToken, std::string>> tokens);

    struct Found {
        size_t at = 0;
        const AddedToken* token = nullptr;
    };
    // Every place in `s` where a token starts, the last first, each with the longest token there.
    std::vector<Found> find_backwards(std::string_view s) const;

  private:
    // A node stands for the end of a token's text. The root is nodes_[0], the empty one; a node's children,
    // which are one byte longer on the left, lie side by side in the order of that byte.
    struct Node {
        int32_t children = 0;  // the first; the next node's children follow those of this one
        int32_t shorter = 0;   // the longest node that this one starts with
        int32_t token = -1;    // the longest token that this node starts with
        uint8_t byte = 0;
    };
    int32_t child(int32_t node, uint8_t byte) const;  // 0: none
    int32_t step(int32_t node, uint8_t byte) const;

    std::vector<AddedToken> tokens_;
    std::vector<Node> nodes_;           // by depth, and one behind the last
    std::array<int32_t, 256> first_{};  // the root's children, by their byte
};

inline void AddedTokens::build(std::vector<std::pair<AddedToken, std::string>> tokens) {
    nodes_.clear(), tokens_.clear();
    first_.fill(0);
    if (tokens.empty()) return;
    // In the order of the reversed texts, those with the same end lie side by side.
    size_t bytes = 0;
    for (auto& [token, text] : tokens) {
        token.size = text.size();
        std::reverse(text.begin(), text.end());
        bytes += text.size();
    }
    std::stable_sort(tokens.begin(), tokens.end(),
                     [](const auto& a, const auto& b) { return a.second < b.second; });

    // The nodes, level by level. At each one, tokens [begin, end) have the same `depth` bytes.
    struct Range {
        int32_t node;
        size_t begin, end;
    };
    std::vector<Range> level{{0, 0, tokens.size()}}, next;
    nodes_.reserve(bytes + 2);
    nodes_.emplace_back();
    for (size_t depth = 0; !level.empty(); depth++, level.swap(next)) {
        next.clear();
        for (const auto& [node, begin, end] : level) {
            nodes_[node].children = static_cast<int32_t>(nodes_.size());
            size_t i = begin;
            while (i < end && tokens[i].second.size() == depth) i++;
            if (i > begin) {  // texts that end here are all the same
                nodes_[node].token = static_cast<int32_t>(tokens_.size());
                tokens_.push_back(tokens[begin].first);
            }
            while (i < end) {
                const size_t first = i;
                const char byte = tokens[i].second[depth];
                while (i < end && tokens[i].second[depth] == byte) i++;
                next.push_back({static_cast<int32_t>(nodes_.size()), first, i});
                nodes_.push_back({.byte = static_cast<uint8_t>(byte)});
            }
        }
    }
    const auto n = static_cast<int32_t>(nodes_.size());
    nodes_.push_back({.children = n});

    for (int32_t node = 0; node < n; node++) {
        for (int32_t c = nodes_[node].children; c < nodes_[node + 1].children; c++) {
            if (node == 0) {
                first_[nodes_[c].byte] = c;
            } else {
                nodes_[c].shorter = step(nodes_[node].shorter, nodes_[c].byte);
            }
            if (nodes_[c].token < 0) nodes_[c].token = nodes_[nodes_[c].shorter].token;
        }
    }
}

inline int32_t AddedTokens::child(int32_t node, uint8_t byte) const {
    const auto begin = nodes_.begin() + nodes_[node].children,
               end = nodes_.begin() + nodes_[node + 1].children;
    const auto it = std::lower_bound(begin, end, byte, [](const Node& a, uint8_t b) { return a.byte < b; });
    return it != end && it->byte == byte ? static_cast<int32_t>(it - nodes_.begin()) : 0;
}

// The state after one more byte on the left.
inline int32_t AddedTokens::step(int32_t node, uint8_t byte) const {
    for (; node != 0; node = nodes_[node].shorter) {
        if (const int32_t longer = child(node, byte)) return longer;
    }
    return first_[byte];
}

inline std::vector<AddedTokens::Found> AddedTokens::find_backwards(std::string_view s) const {
    std::vector<Found> found;
    if (nodes_.empty()) return found;
    int32_t node = 0;
    for (size_t i = s.size(); i-- > 0;) {
        node = step(node, static_cast<uint8_t>(s[i]));
        if (const int32_t token = nodes_[node].token; token >= 0) found.push_back({i, &tokens_[token]});
    }
    return found;
}
