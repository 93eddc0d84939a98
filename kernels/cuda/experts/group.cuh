// Pairs of (row, rank) that go through one expert together.
#pragma once

#include <cstdint>

// As in experts.rs.
struct Group {
    uint32_t expert;
    // In the order of pairs.
    uint32_t first;
    uint32_t pairs;
};
