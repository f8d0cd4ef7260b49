// Runs hw/rtl/chip_axi.sv on an image of memory, token after token, as a host would: it writes id and
// position, waits, reads the logits, and takes the largest for the next token. hw/chip_story.py makes the
// image and reads what this writes.
//
//     chip_run IMAGE PROGRAM LOGITS VOCAB IDS NEW RECORD LATENCY PAUSES FAULTS
//
// IDS: the prompt, as 1,2,3; NEW: how many ids to add. LATENCY: clocks from a request to memory's answer;
// PAUSES: the share of clocks in which a channel pauses; FAULTS: 1: check_faults first. It prints the new
// ids, and a line `clocks TOKEN STEP BEGIN END` for each step. RECORD, a file, gets what steps made: for each
// kind of words (hw/sim/chip_trace.sv) of each step four numbers, token, step, kind and how many, then the
// words, all of 32 bits. Kind 256 + i: sums of scaler i.
//
// Every clock is checked: what the chip offers on m_axi stays until it is taken; a burst is of whole beats,
// inside memory, and does not cross 4 KB.
#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <fstream>
#include <iostream>
#include <iterator>
#include <map>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "Vchip_axi.h"
#include "hw/sim/assertions.h"
#include "svdpi.h"
#include "verilated.h"

namespace {

void require(bool holds, const std::string& rule) {
    if (!holds) throw std::runtime_error(rule);
}

// ---- what chip_trace.sv says ----

struct Clocks {
    uint64_t begin, end;
};
std::vector<Clocks> steps;                                  // of the token at hand
std::map<std::pair<int, int>, std::vector<uint32_t>> made;  // by step and kind
uint64_t clocks = 0;

}  // namespace

extern "C" {
void trace_step(int begins) {
    if (begins)
        steps.push_back({clocks, 0});
    else
        steps.back().end = clocks;
}
void trace_word(int kind, int word) { made[{int(steps.size()) - 1, kind}].push_back(uint32_t(word)); }
void trace_sum(int sum) {
    const char* name = std::strstr(svGetNameFromScope(svGetScope()), "gen_edges[");
    trace_word(256 + std::atoi(name + std::strlen("gen_edges[")), sum);
}
}

namespace {

// ---- the system around the chip ----

class System {
  public:
    System(std::vector<uint8_t> memory, int latency, double pauses)
        : bytes(std::move(memory)), latency_(latency), pauses_(pauses) {
        reset();
    }
    ~System() { top_.final(); }

    std::vector<uint8_t> bytes;

    uint32_t access(bool writes, uint8_t address, uint32_t value = 0) {
        top_.s_axil_awaddr = top_.s_axil_araddr = address, top_.s_axil_wdata = value, top_.s_axil_wstrb = 15;
        top_.s_axil_awvalid = top_.s_axil_wvalid = top_.s_axil_bready = writes;
        top_.s_axil_arvalid = top_.s_axil_rready = !writes;
        for (int i = 0; i < 100; i++) {
            top_.eval();
            const bool asked = writes ? top_.s_axil_awready : top_.s_axil_arready;
            const bool answered = writes ? top_.s_axil_bvalid : top_.s_axil_rvalid;
            const uint32_t read = top_.s_axil_rdata;
            tick();
            if (asked) top_.s_axil_awvalid = top_.s_axil_wvalid = top_.s_axil_arvalid = 0;
            if (answered) {
                top_.s_axil_bready = top_.s_axil_rready = 0;
                return read;
            }
        }
        throw std::runtime_error("a register does not answer");
    }

    void reset() {
        top_.aresetn = top_.m_axi_rvalid = top_.m_axi_bvalid = 0;
        reads_.clear(), writes_.clear(), answers_.clear(), data_.clear();
        ar_waits_ = aw_waits_ = w_waits_ = {};
        for (int i = 0; i < 4; i++) tick();
        top_.aresetn = 1;
    }
    // Runs a token, for up to so many clocks; what STATUS says then. The registers are those of
    // hw/rtl/chip_registers.sv.
    uint32_t run(uint32_t program, uint32_t id, uint32_t position, uint64_t limit = 3'000'000) {
        require(access(false, 0x00) == 0x63686970, "ID is not the chip's");
        access(true, 0x14, program), access(true, 0x0c, id), access(true, 0x10, position),
            access(true, 0x04, 1);
        const uint64_t from = clocks;
        while ((access(false, 0x08) & 1) && clocks - from < limit)
            for (int i = 0; i < 100; i++) tick();
        return access(false, 0x08);
    }
    int64_t wrong_read = -1,
            wrong_write = -1;  // the beat that is answered with an error, counted from here on

  private:
    struct Burst {
        uint64_t address, ready;
        int beats;
    };
    bool pauses() { return pauses_ > 0 && std::uniform_real_distribution<double>(0, 1)(random_) < pauses_; }

    void tick() {
        Vchip_axi& t = top_;
        const bool runs = t.aresetn;
        t.m_axi_arready = runs && reads_.size() < 16 && !pauses();
        t.m_axi_awready = runs && !pauses(), t.m_axi_wready = runs && !pauses();
        if (!t.m_axi_rvalid && runs && !reads_.empty() && clocks >= reads_.front().ready && !pauses()) {
            t.m_axi_rvalid = 1, t.m_axi_rlast = reads_.front().beats == 1;
            t.m_axi_rresp = wrong_read-- == 0 ? 2 : 0;  // SLVERR
            std::memcpy(&t.m_axi_rdata, &bytes[reads_.front().address], beat);
        }
        if (!t.m_axi_bvalid && runs && !answers_.empty() && clocks >= answers_.front() && !pauses())
            t.m_axi_bvalid = 1, t.m_axi_bresp = wrong_write-- == 0 ? 2 : 0;
        t.eval();
        const bool ar = t.m_axi_arvalid && t.m_axi_arready, aw = t.m_axi_awvalid && t.m_axi_awready,
                   w = t.m_axi_wvalid && t.m_axi_wready, r = t.m_axi_rvalid && t.m_axi_rready,
                   b = t.m_axi_bvalid && t.m_axi_bready;
        if (runs) {
            // What is offered stays until it is taken.
            stays(ar_waits_, t.m_axi_arvalid, ar, t.m_axi_araddr << 8 | t.m_axi_arlen,
                  "an address of a read");
            stays(aw_waits_, t.m_axi_awvalid, aw, t.m_axi_awaddr, "an address of a write");
            uint64_t sum = t.m_axi_wstrb;
            for (size_t i = 0; i < beat; i++) sum = sum * 31 + reinterpret_cast<uint8_t*>(&t.m_axi_wdata)[i];
            stays(w_waits_, t.m_axi_wvalid, w, sum, "data of a write");
            if (ar) {
                const uint64_t first = t.m_axi_araddr, n = uint64_t(t.m_axi_arlen) + 1;
                check(first, n, t.m_axi_arburst, t.m_axi_arsize);
                reads_.push_back({first, clocks + uint64_t(latency_), int(n)});
            }
            if (aw) {
                check(t.m_axi_awaddr, uint64_t(t.m_axi_awlen) + 1, t.m_axi_awburst, t.m_axi_awsize);
                require(t.m_axi_awlen == 0, "a write of several beats");
                writes_.push_back(t.m_axi_awaddr);
            }
            if (w) {
                require(t.m_axi_wlast, "wlast is not with the last beat");
                const auto* data = reinterpret_cast<const uint8_t*>(&t.m_axi_wdata);
                std::vector<int> lanes(beat);
                for (size_t i = 0; i < beat; i++)
                    lanes[i] =
                        (reinterpret_cast<const uint8_t*>(&t.m_axi_wstrb)[i / 8] >> i % 8 & 1) ? data[i] : -1;
                data_.push_back(std::move(lanes));
            }
            while (!writes_.empty() && !data_.empty()) {
                for (size_t i = 0; i < beat; i++)
                    if (data_.front()[i] >= 0) bytes[writes_.front() + i] = uint8_t(data_.front()[i]);
                writes_.pop_front(), data_.pop_front(), answers_.push_back(clocks + uint64_t(latency_));
            }
            if (r) {
                Burst& burst = reads_.front();
                burst.address += beat;
                if (--burst.beats == 0) reads_.pop_front();
            }
            if (b) answers_.pop_front();
        }
        for (uint8_t level : {1, 0}) t.aclk = level, t.eval();
        clocks++;
        if (r) t.m_axi_rvalid = 0, std::memset(&t.m_axi_rdata, int(clocks), beat);
        if (b) t.m_axi_bvalid = 0;
        check_assertions();
    }

    void check(uint64_t first, uint64_t n, int burst, int size) {
        const uint64_t end = first + n * beat;
        require(burst == 1 && (1u << size) == beat && first % beat == 0, "a burst is not of whole beats");
        require(first / 4096 == (end - 1) / 4096, "a burst crosses 4 KB");
        require(end <= bytes.size(), "a burst leaves memory");
    }
    struct Waiting {
        bool waits = false;
        uint64_t data = 0;
    };
    static void stays(Waiting& was, bool valid, bool taken, uint64_t data, const char* what) {
        require(!was.waits || (valid && data == was.data), std::string(what) + " changes while it waits");
        was = {valid && !taken, data};
    }

    VerilatedContext context_;
    Vchip_axi top_{&context_};
    static constexpr size_t beat = CHIP_COLS;  // bytes
    int latency_;
    double pauses_;
    std::mt19937 random_;
    std::deque<Burst> reads_;
    std::deque<uint64_t> writes_, answers_;  // addresses; when they are answered
    std::deque<std::vector<int>> data_;      // a byte, or -1 where its strobe is 0
    Waiting ar_waits_, aw_waits_, w_waits_;
};

// What is no token: a position that there is no room for is refused; an error of memory is said, and the
// token ends; after a reset in the middle of a token all is as before.
void check_faults(System& system, uint32_t program, uint32_t id) {
    require(system.run(program, id, 512) == 8, "position 512 is not refused");
    for (const uint64_t limit : {150, 5000, 5300, 47000}) {
        require(system.run(program, id, 3, limit) == 1, "STATUS does not say that the token runs");
        system.reset();
        require(system.access(false, 0x08) == 0 && system.access(false, 0x0c) == 0,
                "registers after a reset");
    }
    for (int64_t* beat : {&system.wrong_read, &system.wrong_write}) {
        *beat = 200;
        require(system.run(program, id, 0) == 6, "STATUS does not say done and error");
    }
}

void write_words(std::ofstream& out, const std::vector<uint32_t>& words) {
    out.write(reinterpret_cast<const char*>(words.data()), std::streamsize(4 * words.size()));
}

}  // namespace

int main(int argc, char** argv) try {
    require(argc == 11, "chip_run IMAGE PROGRAM LOGITS VOCAB IDS NEW RECORD LATENCY PAUSES FAULTS");
    std::ifstream in(argv[1], std::ios::binary);
    require(in.good(), std::string("cannot open ") + argv[1]);
    std::vector<uint8_t> image{std::istreambuf_iterator<char>(in), {}};
    const auto program = uint32_t(std::stoul(argv[2]));
    const size_t logits = std::stoul(argv[3]), vocab = std::stoul(argv[4]);
    std::vector<uint32_t> ids;
    for (const char* at = argv[5]; *at != 0; at += *at == ',') {
        char* end;
        ids.push_back(uint32_t(std::strtoul(at, &end, 10)));
        at = end;
    }
    const size_t prompt = ids.size(), total = prompt + std::stoul(argv[6]);
    std::ofstream record(argv[7], std::ios::binary);
    System system(std::move(image), std::atoi(argv[8]), std::atof(argv[9]));
    if (std::atoi(argv[10]) != 0) check_faults(system, program, ids[0]);
    for (uint32_t position = 0; position < std::max(prompt, total - 1); position++) {
        steps.clear(), made.clear();
        require(system.run(program, ids[position], position) == 2, "STATUS does not say done");
        for (const auto& [key, words] : made) {
            write_words(record,
                        {position, uint32_t(key.first), uint32_t(key.second), uint32_t(words.size())});
            write_words(record, words);
        }
        for (size_t i = 0; i < steps.size(); i++)
            std::printf("clocks %u %zu %llu %llu\n", position, i,
                        static_cast<unsigned long long>(steps[i].begin),
                        static_cast<unsigned long long>(steps[i].end));
        if (position + 1 < prompt || ids.size() == total) continue;
        std::vector<float> values(vocab);
        std::memcpy(values.data(), &system.bytes[logits], 4 * vocab);
        ids.push_back(uint32_t(std::max_element(values.begin(), values.end()) - values.begin()));
        std::printf("id %u\n", ids.back());
        std::fflush(stdout);
    }
    return 0;
} catch (const std::exception& e) {
    std::cerr << "chip_run: " << e.what() << "\n";
    return 1;
}
