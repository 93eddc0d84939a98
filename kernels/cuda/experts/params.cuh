// Matrices of experts that one launch multiplies with.
#pragma once

#include "group.cuh"

constexpr int STACKS_MAX = 2;

// What both kinds of products read and write; as `Work` in experts.rs.
struct ExpertParams {
    // Tiles of all experts' matrices, one after the other.
    const uint8_t *weights[STACKS_MAX];
    // f32 [pairs][rows], or [slots][rows].
    float *out[STACKS_MAX];
    const uint8_t *act_tiles;
    // The pair of a slot.
    const uint32_t *sorted_pairs;
    const ExpertGroup *groups;
    const uint32_t *group_count;
    // Of one expert's matrix.
    int rows;
    int col_tiles;
};
