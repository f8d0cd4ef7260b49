// Traces: every intermediate tensor of a run, by step name, written as one safetensors file, as
// docs/numerics.md describes it.
//
// A run calls forward() several times: a chunk of the prompt, another chunk, then a token at a time. A step's
// values are appended along the token axis, so that a trace has the same shape however the tokens were fed.
// Attention scores widen as the context grows; the file has zeros to the right of the shorter ones.
//
// A trace is in memory until it is written. How much it will take is counted first (size_of()), so that a run
// without room for it ends with an error line. A trace can also keep nothing but the first value that is not
// finite (find_not_finite()).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <initializer_list>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "engine/cpu/quant_matmul.h"
#include "engine/cpu/quant_matrix.h"
#include "engine/cpu/rows.h"
#include "engine/model/config.h"
#include "engine/os/files.h"

// The full name of a step: "layers.3.attn.norm", or "norm" outside the layers (layer -1).
inline std::string step_name(int layer, std::string_view name) {
    return (layer < 0 ? "" : "layers." + std::to_string(layer) + ".").append(name);
}

// The layer of which a trace has the accumulators of each product; golden/ says the same.
constexpr int accumulator_layer = 1;

// Bytes that a trace takes in memory.
struct TraceSize {
    int first_position = 0;  // whose steps are kept
    uint64_t at_first = 0;   // a token with all steps, at position 0
    uint64_t growth = 0;     // and one position later more than that: attention sees one position more
    uint64_t before = 0;     // a token of which keys and values alone are kept

    // Those of positions begin .. end - 1.
    uint64_t bytes(uint64_t begin, uint64_t end) const {
        const uint64_t kept = std::clamp(uint64_t(first_position), begin, end), n = end - kept;
        return (kept - begin) * before + n * at_first + growth * ((kept + end) * n - n) / 2;
    }
};

// A value that is infinite or NaN.
struct NotFiniteValue {
    size_t position;
    std::string step;
    float value;
    bool is_half;  // of fp16
};

class Trace {
  public:
    // first_position: the first whose steps are kept.
    explicit Trace(int first_position = 0) : first_position_(size_t(first_position)) {}

    // What this trace takes. run(position) runs any token there, for positions 0 to n - 1, with n at most 2:
    // nothing of it is kept.
    template <class Run>
    TraceSize size_of(int n, Run run) {
        TraceSize size{int(first_position_)};
        counts_ = true;
        for (int position = 0; position < n; position++) {
            counted_ = counted_before_ = 0;
            run(position);
            (position == 0 ? size.at_first : size.growth) = counted_;
            size.before = counted_before_;
        }
        if (n > 1) size.growth -= size.at_first;
        counts_ = false;
        return size;
    }

    // From the next token on, which is at first_position, keeps nothing but the first value that is not
    // finite: of the first step that is not, at the first position.
    void find_not_finite(size_t first_position) {
        finds_ = true;
        first_position_ = first_position;
        tensors_.clear();
        not_finite_.reset();
    }
    const std::optional<NotFiniteValue>& not_finite() const { return not_finite_; }

    // Appends a step's values for n_tokens tokens, each of the given shape: {} one number, {width} a vector,
    // {n_heads, n_positions} a matrix, and so on; the last dimension may grow from call to call. T is float,
    // int8_t, uint8_t, int32_t, or a type of fp16.
    template <class T>
    void add(const std::string& step, const T* values, size_t n_tokens, std::initializer_list<int> shape) {
        const bool of_all =
            step == "tokens" || step.ends_with("attn.k_rope") || step.ends_with("attn.v_proj");
        size_t n_values = 1;
        for (const int n : shape) n_values *= size_t(n);
        const size_t n_bytes = n_values * sizeof(T);
        if (counts_) {
            counted_ += n_tokens * (n_bytes + besides);
            if (of_all) counted_before_ += n_tokens * (n_bytes + besides);
            return;
        }
        if (finds_) return find(step, values, n_tokens, n_values);
        Tensor& t = tensors_[step];
        t.type = tensor_type<T>;
        t.shape = shape;
        for (size_t i = 0; i < n_tokens; i++) {
            const auto position = int32_t(t.n_seen++);
            if (step == "tokens" && first_position_ > 0) add("positions", &position, 1, {});
            if (size_t(position) < first_position_ && !of_all) continue;
            const auto* p = reinterpret_cast<const char*>(values) + i * n_bytes;
            t.tokens.emplace_back(p, p + n_bytes);
        }
    }

    // Whether the next token's values of a step will be kept.
    bool keeps_next(const std::string& step) {
        return !counts_ && !finds_ && tensors_[step].n_seen >= first_position_;
    }

    // Tokens that were run, whether their steps are kept or not.
    size_t n_tokens() const {
        const auto tokens = tensors_.find("tokens");
        return tokens == tensors_.end() ? 0 : tokens->second.n_seen;
    }

    // Throws std::runtime_error naming the path.
    void write(const std::string& path) const {
        NewFile file(path);
        std::string header = "{";
        size_t offset = 0;
        for (const auto& [step, t] : tensors_) {
            header += (offset > 0 ? ",\"" : "\"") + step + "\":{\"dtype\":\"" + t.type + "\",\"shape\":[" +
                      std::to_string(t.tokens.size());
            for (const int n : t.shape) header += "," + std::to_string(n);
            header += "],\"data_offsets\":[" + std::to_string(offset) + ",";
            offset += t.tokens.size() * t.last_bytes();
            header += std::to_string(offset) + "]}";
        }
        header += '}';
        header.resize((header.size() + 7) / 8 * 8, ' ');
        const uint64_t header_bytes = header.size();
        file.write(&header_bytes, sizeof header_bytes);
        file.write(header.data(), header.size());
        for (const auto& [step, t] : tensors_) {
            size_t n_rows = 1;
            for (size_t i = 1; i < t.shape.size(); i++) n_rows *= size_t(t.shape[i - 1]);
            const std::vector<char> zeros(t.last_bytes() / n_rows);
            for (const std::vector<char>& token : t.tokens) {
                const size_t row_bytes = token.size() / n_rows;
                for (size_t r = 0; r < n_rows; r++) {
                    file.write(token.data() + r * row_bytes, row_bytes);
                    file.write(zeros.data(), zeros.size() - row_bytes);
                }
            }
        }
        file.commit();
    }

  private:
    static constexpr size_t besides = 40;  // bytes that a token of a step takes besides its values
    struct Tensor {
        std::string type;
        std::vector<int> shape;                // of the last token, which has the longest rows
        size_t n_seen = 0;                     // tokens, kept or not
        std::deque<std::vector<char>> tokens;  // the values of each
        size_t last_bytes() const { return tokens.empty() ? 0 : tokens.back().size(); }
    };

    // Looks for values that are not finite, n for each token.
    template <class T>
    void find(const std::string& step, const T* values, size_t n_tokens, size_t n) {
        if (not_finite_) return;
        size_t& n_seen = tensors_[step].n_seen;
        const T* end = values + n_tokens * n;
        const T* found = std::find_if(values, end, [](T x) { return !std::isfinite(float(x)); });
        if (found != end)
            not_finite_ = {first_position_ + n_seen + size_t(found - values) / n, step, float(*found),
                           std::string_view(tensor_type<T>) == "F16"};
        n_seen += n_tokens;
    }

    size_t first_position_;
    std::map<std::string, Tensor> tensors_;
    bool counts_ = false;  // while it does, nothing is kept
    uint64_t counted_ = 0, counted_before_ = 0;
    bool finds_ = false;  // likewise, but for not_finite_
    std::optional<NotFiniteValue> not_finite_;
};

// Records the steps of one layer, or those outside the layers (layer -1), if there is a trace:
//
//     rmsnorm(s.normed, s.x, ...);  record("attn.norm", s.normed);
struct Recorder {
    Trace* trace;
    int layer;

    Recorder(Trace* t, int l) : trace(t), layer(l) {}

    // n_tokens values of the given shape, as Trace::add() has it.
    template <class T>
    void operator()(std::string_view name, const T* values, int n_tokens,
                    std::initializer_list<int> shape) const {
        if (trace != nullptr) trace->add(step_name(layer, name), values, size_t(n_tokens), shape);
    }
    // (n_tokens, n_cols)
    void operator()(std::string_view name, const Rows& x) const {
        (*this)(name, x.row(0), x.n_rows, {x.n_cols});
    }
    // (n_tokens, heads, head_dim)
    void operator()(std::string_view name, const Rows& x, int head_dim) const {
        (*this)(name, x.row(0), x.n_rows, {x.n_cols / head_dim, head_dim});
    }
    // Quantized activations: NAME.q (n_tokens, n_cols) and NAME.s (n_tokens, n_groups).
    void operator()(std::string_view name, const Int8Rows& x) const {
        if (trace == nullptr) return;
        (*this)(std::string(name) + ".q", x.codes.data(), x.n_rows, {x.n_cols});
        (*this)(std::string(name) + ".s", x.scales.data(), x.n_rows, {x.n_groups()});
    }
    // A product: out (n_tokens, w.n_rows) under its name. In accumulator_layer NAME.acc (n_tokens, w.n_rows,
    // n_groups) has the int32 sums of codes in each group, by a plain loop: kernels keep none.
    template <class Matrix>
    void operator()(std::string_view name, const Rows& out, const Int8Rows& x, const Matrix& w) const {
        (*this)(name, out);
        if (trace == nullptr || layer != accumulator_layer) return;
        const std::string step = std::string(name) + ".acc";
        const auto matrix = view_of(w);
        std::vector<int8_t> expanded(size_t(x.n_cols));
        for (int t = 0; t < x.n_rows; t++) {
            const bool is_kept = trace->keeps_next(step_name(layer, step));
            std::vector<int32_t> sums(size_t(matrix.n_rows) * size_t(x.n_groups()));
            int32_t* sum = sums.data();
            for (int i = 0; i < matrix.n_rows && is_kept; i++) {
                const int8_t* codes = expanded.data();
                if constexpr (has_few_bits<Matrix>) {
                    expand_columns(expanded.data(), matrix, i, 0, x.n_cols);  // expand_rows.h
                } else {
                    codes = w.codes + size_t(i) * size_t(x.n_cols);
                }
                for (int first = 0; first < x.n_cols; first += x.group_size, sum++)
                    for (int k = first; k < first + x.group_size; k++)
                        *sum += int32_t(x.row_codes(t)[k]) * int32_t(codes[k]);
            }
            (*this)(step, sums.data(), 1, {matrix.n_rows, x.n_groups()});
        }
    }
    // A matrix (n_heads, positions) for each token, of the positions that it sees.
    void operator()(std::string_view name, const HeadScores& x) const {
        for (int t = 0; t < x.n_tokens && trace != nullptr; t++) {
            const int n_positions = x.pos + t + 1;
            std::vector<float> seen;
            for (int i = t * x.n_heads; i < (t + 1) * x.n_heads; i++)
                seen.insert(seen.end(), x.row(i), x.row(i) + n_positions);
            (*this)(name, seen.data(), 1, {x.n_heads, n_positions});
        }
    }
};
