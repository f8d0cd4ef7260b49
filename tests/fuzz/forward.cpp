// Fuzzes the forward pass of the program PROGRAM. The input is the choices that a small model is made by, and
// then the sizes of the chunks in which it runs ids. With PLAIN the program's file alone runs it.
#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/model_bytes.h"
#include "tests/fuzz/program.h"
#ifdef PLAIN
#include "tests/fuzz/plain_form.h"
#endif

namespace {

// Whether check_config takes a group size, in a model whose dimensions are multiples of it.
template <class C>
bool takes_group_size(C c, int group_size) {
    c.group_size = group_size;
    c.n_heads = c.n_kv_heads = 1;
    c.dim = c.hidden_dim = c.head_dim = std::max(4, group_size);
    try {
        file_format.check(c);
        return true;
    } catch (const std::runtime_error&) {
        return false;
    }
}

// One of the group sizes that the program takes.
template <class C>
int choose_group_size(const C& c, Choices& choices) {
    std::vector<int> sizes{0, 4, 8, 12, 32, 64};
    std::erase_if(sizes, [&](int size) { return !takes_group_size(c, size); });
    return sizes[size_t(choices.number(0, int(sizes.size()) - 1))];
}

// A model that check_config takes, of a few KB (AWQ, GPTQ: of some 100 KB).
template <class C = ProgramConfig>
C choose_config(Choices& choices) {
    C c = smallest_config();
    c.arch = choices.one_of({Arch::llama, Arch::qwen3});
    c.n_layers = choices.number(1, 2);
    c.n_kv_heads = choices.number(1, 3);
    c.n_heads = c.n_kv_heads * choices.number(1, 3);
    c.vocab_size = choices.number(1, 40);
    c.max_seq_len = 600;
    c.bos_id = -1;
    c.eos_ids.clear();
    c.shared_classifier = choices.yes();
    c.rope_type = choices.number(0, 3);
    c.rope_theta = choices.one_of({1.0f, 1e4f, 1e12f});
    c.norm_eps = choices.one_of({1e-5f, 0.0f, 1.0f});
    if constexpr (is_emulated) {
        c.group_size = choices.one_of({64, 128});
        c.head_dim = choices.one_of({32, 64, 96, 128});
        // Heads until they fill whole groups.
        const int heads_per_kv = c.heads_per_kv();
        while (c.q_dim() % c.group_size != 0) c.n_kv_heads++, c.n_heads = c.n_kv_heads * heads_per_kv;
        c.dim = c.group_size * choices.number(1, 2);
        c.hidden_dim = c.group_size * choices.number(1, 2);
    } else if constexpr (with_formats<C>) {
        for (auto& f : c.formats) set_format(f, choices.number(0, int(std::size(matrix_formats)) - 1));
        if (c.shared_classifier) c.formats.back() = c.formats.front();
        c.has_order = choices.yes();
        c.group_size = group_size_of(c.formats);
        c.head_dim = choices.one_of({32, 64, 96});
        const int heads_per_kv = c.heads_per_kv();
        while (c.q_dim() % 128 != 0) c.n_kv_heads++, c.n_heads = c.n_kv_heads * heads_per_kv;
        c.dim = 128 * choices.number(1, 2);
        c.hidden_dim = 128 * choices.number(1, 2);
    } else if constexpr (with_experts<C>) {
        c.arch = Arch::qwen3_moe;
        auto& m = c.moe;
        auto& [kind, group] = m.expert_format;
        using Kind = decltype(m.expert_format.kind);
        kind = choices.one_of({Kind::a8w8, Kind::a8w4, Kind::mxfp8, Kind::ladder});
        const bool is_ladder = kind == Kind::ladder;
        for (auto& f : m.ladder)
            if (is_ladder) set_format(f, choices.number(0, int(std::size(matrix_formats)) - 1));
        if (c.shared_classifier) m.ladder.back() = m.ladder.front();
        group = kind == Kind::a8w8   ? 0
                : kind == Kind::a8w4 ? choices.one_of({64, 0, 32, 128})
                : is_ladder          ? group_size_of(m.ladder)
                                     : choices.one_of({32, 64, 96});
        m.pure = kind != Kind::a8w8 && !is_ladder && choices.yes();
        m.n_experts = choices.number(1, 5);
        m.n_active = choices.number(1, m.n_experts);
        m.norm_topk_prob = choices.yes();
        for (int l = 0; l < c.n_layers; l++) m.is_dense.push_back(choices.yes());
        const int unit = is_ladder ? 128 : std::max(group, kind == Kind::a8w4 ? 32 : 4);
        const bool has_rows = m.pure || is_ladder;  // of that unit, in all matrices
        const int most = std::max(1, 96 / unit);
        m.hidden_dim = unit * choices.number(1, most);
        c.dim = unit * choices.number(1, most);
        c.hidden_dim = has_rows ? unit * choices.number(1, most) : 4 * choices.number(1, 20);
        c.group_size = is_ladder ? group : 0;
        c.head_dim = has_rows ? unit : 4 * choices.number(1, 8);
    } else {
        c.group_size = choose_group_size(c, choices);
        const int unit = std::max(4, c.group_size);
        c.head_dim = 2 * choices.number(1, 40);
        const int heads_per_kv = c.heads_per_kv();
        while (c.q_dim() % unit != 0) c.n_kv_heads++, c.n_heads = c.n_kv_heads * heads_per_kv;
        c.dim = unit * choices.number(1, 6);
        c.hidden_dim = unit * choices.number(1, 6);
        if (file_format.max_activations > 0) c.static_activations = c.group_size == 0 && choices.yes();
    }
    return c;
}

// The logits of every position, which do not depend on how its tokens were fed: on a CPU not in one bit.
class Logits {
  public:
    Logits(const ModelConfig& c, size_t n_positions, bool tame)
        : of_(n_positions),
          n_vocab_(size_t(c.vocab_size)),
          are_finite_(tame && c.norm_eps > 0),
          are_exact_(tame && !is_emulated) {}

    // Those of the last positions before `end`.
    void add(std::span<const float> logits, int end) {
        expect(!logits.empty() && logits.size() % n_vocab_ == 0, "there is a logit for each token");
        const size_t n = logits.size() / n_vocab_;
        for (size_t i = 0; i < n; i++) {
            const std::span<const float> row = logits.subspan(i * n_vocab_, n_vocab_);
            std::vector<float>& before = of_[size_t(end) - n + i];
            if (are_finite_) {
                expect(std::all_of(row.begin(), row.end(), [](float x) { return std::isfinite(x); }),
                       "sound weights give finite logits");
            }
            if (are_exact_ && !before.empty()) {
                expect(std::equal(row.begin(), row.end(), before.begin()), "chunks change no logit");
            }
            before.assign(row.begin(), row.end());
        }
    }

  private:
    std::vector<std::vector<float>> of_;  // by position; empty if not seen yet
    size_t n_vocab_;
    bool are_finite_, are_exact_;
};

}  // namespace

#ifdef PLAIN
namespace plain {  // whose Options, Trace and load_model these are
#else
namespace {
#endif

void fuzz_forward(FuzzBytes bytes) {
    static MemoryFile file;
    Choices choices(bytes);
    const auto c = choose_config(choices);
    const uint32_t seed = uint32_t(choices.number(0, 255));
    std::vector<uint8_t> weights = tame_weights(weight_bytes(c), seed);
    tame_mxfp8(weights, c);
    const bool tame = !choices.yes();
    for (size_t i = 0; i < weights.size() && !tame; i += 97) weights[i] = uint8_t(choices.number(0, 255));
    put_in_form(weights, c);
    file.write(model_bytes(c, weights, {}));

    Options o;
    o.model_path = file.path();
    // Short, or somewhat longer than the KV cache's page of 256 positions.
    o.ctx = choices.number(0, 3) == 3 ? choices.number(250, 300) : choices.number(1, 20);
    o.own["--matmul"] = choices.one_of({"fused", "plain"});
    o.own["--backend"] = "builtin";
    o.own["--kv"] = choices.one_of({"f32", "f16", "q8"});
    if (choices.yes()) o.own["--kv"] = "f32", o.own["--attn"] = "int8";  // of runq_w8a8; others do not look
    if (has_experts && choices.yes()) o.own["--no-fuse"] = "";
    Trace trace;
    const bool is_traced = choices.yes() && o.ctx <= 20;  // instrumented, 300 positions take a minute
    const auto m = load_model(o, is_traced ? &trace : nullptr);

    std::vector<int> ids(size_t(o.ctx));
    auto state = uint32_t(choices.number(0, 255));
    for (int& id : ids) {
        state = state * 1664525 + 1013904223;
        id = int((state >> 8) % uint32_t(c.vocab_size));
    }
    Logits seen(c, ids.size(), tame);
    // In chunks, now and then going back to an earlier position, as chat does.
    const int most_chunks = is_emulated ? 2 : 6, most_again = is_emulated ? 2 : 8;
    int reached = 0;
    for (int pos = 0, chunks = 0; pos < o.ctx && chunks < most_chunks; chunks++) {
        const bool all_logits = choices.yes();
        const int n = choices.number(1, std::min(o.ctx - pos, all_logits ? m->max_chunk : o.ctx));
        for (int i = 0; i < n; i += m->max_chunk) {
            const int end = std::min(n, i + m->max_chunk);
            const auto tokens = std::span(ids).subspan(size_t(pos + i), size_t(end - i));
            const auto logits = m->forward(tokens, pos + i, all_logits ? end - i : end == n ? 1 : 0);
            if (!logits.empty()) seen.add(logits, pos + end);
        }
        pos += n;
        reached = std::max(reached, pos);
        if (choices.number(0, 3) == 3) pos = choices.number(0, pos);
    }
    // And the first of them again, one at a time.
    for (int pos = 0; pos < std::min(reached, most_again); pos++) {
        seen.add(m->forward(std::span(&ids[size_t(pos)], 1), pos, 1), pos + 1);
    }
}

}  // namespace

#ifdef PLAIN
using plain::fuzz_forward;
#endif

FUZZ_TARGET(fuzz_forward)
