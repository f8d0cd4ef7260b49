// A system around hw/rtl/matmul_axi.sv with FETCH, in simulation: memory that m_axi reads, two DMA engines
// for activations and results, and a bus master for registers; hw/driver/matmul.h runs on it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <random>
#include <vector>

#include "hw/driver/matmul.h"

class Vmatmul_axi;

// How memory answers.
struct SystemMemory {
    int latency = 20;       // clocks from an address that is taken to its first beat
    double pauses = 0;      // share of clocks in which a channel, or one of the streams, pauses
    int64_t error_at = -1;  // the beat that is answered with an error, counted from here on
};

// What the ports of m_axi have shown since clear().
struct SystemCounts {
    uint64_t bursts = 0, beats = 0, first_clock = 0,
             last_clock = 0;  // clocks of the first address, and the last beat
    int most_bursts = 0;      // that were asked for and not all there
};

// Every clock is checked: what the core offers stays until it is taken; a burst is inside memory, of whole
// beats, no longer than 256 of them, and does not cross 4 KB; no more than 16 wait. std::runtime_error says
// what is not.
class MatmulSystem {
  public:
    explicit MatmulSystem(size_t memory_bytes);
    ~MatmulSystem();
    MatmulSystem(const MatmulSystem&) = delete;
    MatmulSystem& operator=(const MatmulSystem&) = delete;

    matmul_bus bus;  // with an interrupt; set bus.wait to nullptr for polling
    SystemMemory memory;
    SystemCounts counts;
    uint64_t clocks = 0, patience = 400000;  // clocks that wait() takes at most
    uint8_t* data() { return bytes_.data(); }
    void clear() { counts = {}, beats_sent_ = 0; }
    void reset();
    void run(int n_clocks);
    bool idle() const;      // no transfer waits, and nothing is asked of memory
    void drop_transfers();  // as a reset of the DMA engines does

  private:
    struct Model;
    struct Burst {
        uint64_t address, ready;
        int beats;
    };
    struct Transfer {
        uint8_t* at;
        size_t left;
    };
    void tick();
    uint32_t access(bool writes, uint32_t address, uint32_t value);
    bool pauses() {
        return memory.pauses > 0 && std::uniform_real_distribution<double>(0, 1)(random_) < memory.pauses;
    }
    std::unique_ptr<Model> model_;
    std::vector<uint8_t> bytes_;
    std::deque<Burst> bursts_;
    std::deque<Transfer> sends_, receives_;
    std::mt19937 random_;
    int beat_bytes_ = 0;
    int64_t beats_sent_ = 0;
    uint64_t waiting_address_ = 0;
    int waiting_len_ = -1;  // of the burst that waits; -1: none
};
