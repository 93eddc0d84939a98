// Pairs of (row, rank) that go through one expert together.
#pragma once

#include <cstdint>

// As in experts.rs.
struct ExpertGroup {
    uint32_t expert;
    // Slot, in the sorted_pairs of pairs.
    uint32_t first;
    uint32_t pairs;
};

// In the sorted_pairs of pairs, of a slot that no pair has: what an expert's pairs leave of their last act_tile.
constexpr uint32_t NO_PAIR = ~0u;
