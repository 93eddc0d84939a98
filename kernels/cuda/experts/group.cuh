// Pairs of (row, rank) that go through one expert together.
#pragma once

#include <cstdint>

// As in experts.rs.
struct Group {
    uint32_t expert;
    // Slot, in the order of pairs.
    uint32_t first;
    uint32_t pairs;
};

// In the order of pairs, of a slot that no pair has: what an expert's pairs leave of their last panel.
constexpr uint32_t NO_PAIR = ~0u;
