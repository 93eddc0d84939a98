// Matrices of experts that one launch multiplies with, as in experts.rs.
#pragma once

constexpr int STACKS_MAX = 2;
